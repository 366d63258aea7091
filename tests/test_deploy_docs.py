"""docs/deploy.md as a stranger follows it: every block is run where it says, each machine a folder of its own.

One site is killed and started again, then the server is killed and resumed, as the page tells to."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import numpy as np
import pytest
import typer

from fedkin.cli.application import app
from fedkin.config import make_config, read_toml
from fedkin.data import load as load_data
from fedkin.runs.catalogue import Catalogue
from fedkin.use.model_file import load

PAGE = (Path(__file__).parent.parent / "docs" / "deploy.md").read_text(encoding="utf-8")
BLOCKS = [(kind.strip(), body) for kind, body in re.findall(r"^```([^\n]*)\n(.*?)^```", PAGE, re.M | re.S)]
KINDS = {
    "sh",
    "sh server",
    "sh site",
    "sh server stays",
    "sh site stays",
    "sh server resume",
    "sh server late",
    "toml",
    "python",
}
SITES = ("oslo", "paris", "rome", "vienna")
LATE = "bern"
HOST = "server.example.org"
COPY = f"""#!/bin/sh
# scp between machines that are folders
place() {{ case "$1" in {HOST}:*) rest="${{1#*:}}"; echo "$MACHINES/server/${{rest:-.}}";; *) echo "$1";; esac; }}
exec cp "$(place "$1")" "$(place "$2")"
"""


# ---------------------------------------------------------------- what can be checked at once


def test_all_blocks_are_of_a_kind_that_is_run() -> None:
    assert {kind for kind, _ in BLOCKS} == KINDS
    assert [kind for kind, _ in BLOCKS].count("sh site stays") == 1


def _lines() -> Iterator[list[str]]:
    for kind, body in BLOCKS:
        if kind.startswith("sh"):
            yield from (shlex.split(found) for found in re.findall(r"^(?:for .* do )?(fedkin [^;\n]*)", body, re.M))
    yield from (shlex.split(found) for found in re.findall(r"`(fedkin [a-z-]+(?: [^`]*)?)`", PAGE))


@pytest.mark.parametrize("words", list(_lines()), ids=" ".join)
def test_commands_and_options_exist(words: list[str]) -> None:
    command = typer.main.get_command(app)
    words = words[1:]
    while isinstance(command, click.Group):
        assert words, "a group of commands is not a command"
        found = command.commands.get(words.pop(0))
        assert found is not None
        command = found
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert {w.partition("=")[0] for w in words if w.startswith("--")} <= known | {"--help"}


def test_the_experiment_is_one(tmp_path: Path) -> None:
    [body] = [body for kind, body in BLOCKS if kind == "toml"]
    (tmp_path / "experiment.toml").write_text(body)
    assert make_config(read_toml(tmp_path / "experiment.toml")).method == "fedcap"


# ---------------------------------------------------------------- the whole page


class Machines:
    """Folders that stand for machines, and the processes on them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.running = folder, dict[str, subprocess.Popen[bytes]]()
        for name in ("home", "server", *SITES, LATE):
            (folder / name).mkdir()
        tools = folder / "tools"
        tools.mkdir()
        (tools / "scp").write_text(COPY)
        (tools / "scp").chmod(0o755)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        path = os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]])
        self.environment = {
            **os.environ,
            "PATH": path,
            "MACHINES": str(folder),
            "OMP_NUM_THREADS": "1",
            "FEDKIN_RUNS": "runs",
            "PYTHONUNBUFFERED": "1",
        }

    def run(self, machine: str, body: str) -> str:
        done = subprocess.run(**self._how(machine, body), capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, f"{machine}: {body}\n{done.stdout}\n{done.stderr}"
        return str(done.stdout)

    def start(self, machine: str, body: str) -> None:
        with self.log(machine).open("ab") as log:
            self.running[machine] = subprocess.Popen(
                **self._how(machine, body), stdout=log, stderr=log, start_new_session=True
            )

    def _how(self, machine: str, body: str) -> dict[str, object]:
        there = body.replace(f"--host {HOST}", "--host 127.0.0.1").replace(f"{HOST}:9092", f"127.0.0.1:{self.port}")
        if "fedkin server" in there:
            there = there.replace("--host 0.0.0.0", f"--host 127.0.0.1 --port {self.port}")
        return {
            "args": ["bash", "-euc", there],
            "cwd": self.folder / machine,
            "env": {**self.environment, "SITE": machine},
        }

    def log(self, machine: str) -> Path:
        return self.folder / machine / "log"

    def kill(self, machine: str) -> None:
        process = self.running[machine]
        assert process.poll() is None, f"{machine} had ended already:\n{self.log(machine).read_text()[-2000:]}"
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def finish(self, machine: str) -> None:
        code = self.running[machine].wait(240)
        assert code == 0, f"{machine}: {code}\n{self.log(machine).read_text()[-3000:]}"

    def until(self, what: Callable[[], bool], seconds: float = 120) -> None:
        end = time.monotonic() + seconds
        while not what():
            logs = "\n".join(f"{m}: {self.log(m).read_text()[-1500:]}" for m in self.running)
            assert time.monotonic() < end, logs
            time.sleep(0.05)

    def stop(self) -> None:
        for process in self.running.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    made = Machines(tmp_path)
    yield made
    made.stop()


def rounds(machines: Machines, machine: str) -> int:
    """The last round that this site trained in."""
    found = re.findall(r"round (\d+), train", machines.log(machine).read_text())
    return int(found[-1]) if found else 0


@pytest.mark.slow
def test_the_walk_through(machines: Machines) -> None:
    [client] = [body for kind, body in BLOCKS if kind == "sh site stays"]
    for kind, body in BLOCKS:
        if kind == "sh":
            assert "accuracy" in machines.run("home", body)
        elif kind == "toml":
            (machines.folder / "server" / "experiment.toml").write_text(body)
        elif kind == "sh server":
            machines.run("server", body)
        elif kind == "sh site":
            with ThreadPoolExecutor() as all_at_once:
                list(all_at_once.map(machines.run, SITES, [body] * len(SITES)))
        elif kind == "sh server stays":
            machines.start("server", body)
            machines.until(lambda: "serving on" in machines.log("server").read_text())
        elif kind == "sh site stays":
            for name in SITES:
                machines.start(name, body)
        elif kind == "sh server resume":
            kill_and_return(machines, client, body)
            for name in ("server", *SITES):
                machines.finish(name)
        elif kind == "sh server late":
            check_what_is_left(machines)
            come_late(machines, client, body)


def come_late(machines: Machines, client: str, join: str) -> None:
    """As the page says: data, key and certificates, and the same client as everybody's."""
    digits, (made, fetch) = load_data("digits"), (b for k, b in BLOCKS if k == "sh site" and "scp" in b)
    np.savez(machines.folder / LATE / f"{LATE}.npz", x=digits.x[:90], y=digits.y[:90])
    machines.run(LATE, made)
    begun = machines.log("server").read_text()
    machines.start("server", join)
    machines.until(lambda: "serving on" in machines.log("server").read_text().removeprefix(begun))
    machines.run(LATE, fetch)
    machines.start(LATE, client)
    machines.finish(LATE)
    model = load(machines.folder / LATE / f"fedkin-{LATE}" / "personal.safetensors")
    assert (model.card.site, model.card.method) == (LATE, "fedcap")
    machines.until(lambda: f"site '{LATE}' came late" in machines.log("server").read_text())


def kill_and_return(machines: Machines, client: str, resume: str) -> None:
    machines.until(lambda: rounds(machines, "oslo") >= 3)
    machines.kill("rome")
    before = machines.log("rome").read_text()
    machines.start("rome", client)
    machines.until(lambda: ", train" in machines.log("rome").read_text().removeprefix(before))
    machines.kill("server")
    machines.start("server", resume)


def check_what_is_left(machines: Machines) -> None:
    run = Catalogue(machines.folder / "server" / "runs").find("last")
    assert (run.info.status, run.info.rounds_done, sorted(run.info.names)) == ("finished", 30, sorted(SITES))
    log = (run.path / "log.txt").read_text()
    assert "'rome'" in log
    assert re.search(r"Z resumed after round \d+$", log, re.MULTILINE)
    models = []
    for name in SITES:
        there = machines.folder / name
        model = load(there / f"fedkin-{name}" / "personal.safetensors")
        assert (model.card.site, model.card.method, model.card.run) == (name, "fedcap", run.info.id)
        new = np.load(there / "new.npz")
        right = np.array(model.card.names())[model.probabilities(new["x"]).argmax(1)].astype(int) == new["y"]
        assert right.mean() > 0.8
        assert len((there / "predictions.csv").read_text().splitlines()) == len(new["x"]) + 1
        assert (there / f"fedkin-{name}" / "personal.onnx").stat().st_size > 1000
        assert not (machines.folder / "server" / f"{name}.key").exists()
        models.append(next(model.module.parameters()))
    assert len({m.sum().item() for m in models}) == 4  # each has its own
    names = json.loads((machines.folder / "server" / "keys" / "sites.json").read_text())["sites"]
    assert sorted(names) == sorted(SITES)
