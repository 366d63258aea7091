"""A deployment on this machine: a server and three sites, each a process of its own, over TLS on the loopback address.

On real machines the same commands are typed where they belong: docs/deploy.md. Needs `pip install 'fedkin[deploy]'`."""

import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import fedkin as fk

SITES = {"oslo": 0.0, "paris": 2.0, "rome": -2.0}
EXPERIMENT = """
method = "fedper"
model = "mlp"
rounds = 3
lr = 0.1
"""


def fedkin(*words: str) -> list[str]:
    return [sys.executable, "-m", "fedkin", *words]


def write_data(path: Path, offset: float) -> None:
    rng = np.random.default_rng(len(path.name))
    x = rng.normal(size=(80, 8))
    np.savez(path, x=(x + offset).astype(np.float32), y=np.where(x[:, 0] + x[:, 1] > 0, "ill", "well"))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def main(folder: Path) -> None:
    (folder / "experiment.toml").write_text(EXPERIMENT)
    # on real machines every site makes its key itself: fedkin keys new-site
    words = ["keys", "new", "keys", "--host", "127.0.0.1", "--sites", ",".join(SITES)]
    subprocess.run(fedkin(*words), cwd=folder, check=True)
    for site, offset in SITES.items():
        write_data(folder / f"{site}.npz", offset)

    port = str(free_port())
    running = [subprocess.Popen(fedkin("server", "experiment.toml", "--keys", "keys", "--port", port), cwd=folder)]
    for site in SITES:
        words = ["--server", f"127.0.0.1:{port}", "--ca", "keys/ca.crt", "--key", f"keys/sites/{site}.key"]
        words += ["--data", f"{site}.npz", "--name", site]
        running.append(subprocess.Popen(fedkin("client", *words), cwd=folder))
    try:
        assert [process.wait(timeout=120) for process in running] == [0] * len(running)
    finally:
        for process in running:
            process.kill()
    for site in SITES:
        model = folder / f"fedkin-{site}" / "personal.safetensors"
        print(f"{site} has a model of its own: {model.name}, {model.stat().st_size} bytes")


if __name__ == "__main__":
    print(f"FedKin {fk.__version__}")
    with tempfile.TemporaryDirectory() as place:
        main(Path(place))
