"""A whole deployment on this machine: a server, N clients, keys and data files, each process its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from fedkin.config import Config
from fedkin.data import Dataset
from fedkin.deploy.authority import new_folder
from fedkin.errors import FedKinError, UsageError
from fedkin.tasks import USUAL

Say = Callable[[str], None]
LEAVE = 20.0  # seconds that clients have to end by themselves
NOT_FOR_SERVER = (
    "data",
    "data_dir",
    "partition",
    "samples_per_client",
    "quantity_skew",
    "shift",
    "severity",
    "method",
    "test_share",
    "options",
)


def run_cluster(
    config: Config,
    folder: Path,
    *,
    insecure: bool = False,
    plugins: Sequence[str] = (),
    say: Say = print,
    out: IO[Any] | None = None,
) -> dict[str, Path]:
    """Run to the end; every client's model file. Nothing is left running, whatever happens. `plugins`: files that all
    processes run first."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UsageError(f"{folder} is not empty, or no folder: give a new one with --folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        names, theirs = deal_files(config, folder / "data")
    except OSError as error:
        raise UsageError(f"{folder} cannot be written ({error.strerror or error}): give another --folder") from error
    if not insecure:
        new_folder(folder / "keys", ["127.0.0.1"], names)
    spec = config.task or USUAL[theirs.targets]
    experiment = write_experiment(replace(config, task=spec, given={*config.asked, "task"}), folder, len(names))
    own = [word for file in plugins for word in ("--plugin", file)]
    told = ["--task", spec, *(["--vocabulary", str(theirs.vocabulary)] if theirs.vocabulary else []), *own]
    port = free_port()
    say(f"{len(names)} data files in {folder / 'data'}" + ("" if insecure else f", keys in {folder / 'keys'}"))
    started: list[subprocess.Popen[bytes]] = []
    try:
        server = start([*server_words(experiment, folder, port, insecure), *own], folder / "server.log", out)
        started.append(server)
        clients = [
            start([*client_words(name, folder, port, insecure), *told], folder / name / "client.log") for name in names
        ]
        started += clients
        status = server.wait()
        if status:
            raise FedKinError(f"the server ended with status {status}; its words above or in {folder} say why")
        until = time.monotonic() + LEAVE
        for client in clients:
            client.wait(max(0.1, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        say("some clients did not end by themselves and are stopped")
    finally:
        stop(started)
    return {name: folder / name / "personal.safetensors" for name in names}


def server_words(experiment: Path, folder: Path, port: int, insecure: bool) -> list[str]:
    safety = ["--insecure"] if insecure else ["--keys", str(folder / "keys")]
    return ["server", str(experiment), "--port", str(port), *safety]


def client_words(name: str, folder: Path, port: int, insecure: bool) -> list[str]:
    pair = ["--key", str(folder / "keys" / "sites" / f"{name}.key"), "--ca", str(folder / "keys" / "ca.crt")]
    return [
        "client",
        "--server",
        f"127.0.0.1:{port}",
        "--data",
        str(folder / "data" / f"{name}.npz"),
        "--name",
        name,
        "--folder",
        str(folder / name),
        "--give-up",
        "60",
        *(["--insecure"] if insecure else pair),
    ]


def deal_files(config: Config, folder: Path) -> tuple[list[str], Dataset]:
    """The data set as the configuration deals it, one .npz for each client; their names, and the data set."""
    from fedkin.rounds import load_data

    dataset, split = load_data(config)
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"site-{i:02d}" for i in range(split.clients)]
    for name, train, validation, test in zip(names, split.train, split.validation, split.test, strict=True):
        own = np.sort(np.concatenate([train, validation]))
        arrays = {"x_train": dataset.x[own], "y_train": dataset.y[own], "x_test": dataset.x[test]}
        np.savez(folder / f"{name}.npz", **arrays, y_test=dataset.y[test])
    return names, dataset


def write_experiment(config: Config, folder: Path, clients: int) -> Path:
    """The experiment as a TOML file for `fedkin server`."""
    values = {k: v for k, v in config.to_dict().items() if k in config.asked and k not in NOT_FOR_SERVER}
    values |= {"clients": clients, "runs_dir": str(folder / "runs"), "checkpoint_every": 1}
    options = config.options
    lines = [f"method = {json.dumps(config.method)}", *_toml(values), "", "[options]", *_toml(options)]
    path = folder / "experiment.toml"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _toml(values: Mapping[str, Any]) -> list[str]:
    return [f"{k} = {json.dumps(v)}" for k, v in values.items() if v is not None]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(words: Sequence[str], log: Path, out: IO[Any] | None = None) -> subprocess.Popen[bytes]:
    """A process of its own. One thread each: many on one machine get in each other's way."""
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with open(log, "ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "fedkin", *words],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=out or file,
            env=environment,
        )


def stop(processes: Sequence[subprocess.Popen[bytes]], patience: float = 5.0) -> None:
    """End these processes: first politely, then not."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    until = time.monotonic() + patience
    for process in processes:
        try:
            process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
