"""Every code block of the README runs: Python, shell and TOML; only `make` and what needs a download is left out."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedkin as fk
from fedkin.cli.application import app
from fedkin.config import make_config, read_toml
from fedkin.methods import METHODS

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.M | re.S)
PYTHON = [body for language, body in BLOCKS if language == "python"]
TOML = [body for language, body in BLOCKS if language == "toml"]
SHELL = [line for language, body in BLOCKS if not language for line in body.splitlines() if line.startswith("fedkin ")]
SMALL = {"cifar10": "digits"}
"""What a shell line names and a test cannot have, and what stands in for it."""


@pytest.fixture(autouse=True)
def _methods_stay_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """The README registers a method of its own."""
    monkeypatch.setattr(METHODS, "_entries", dict(METHODS._entries))


def test_all_blocks_are_of_a_kind_that_is_run() -> None:
    assert {language for language, _ in BLOCKS} == {"", "python", "toml"}
    lines = [line for language, body in BLOCKS if not language for line in body.splitlines()]
    assert all(line.startswith(("make ", "fedkin ")) for line in lines)
    assert len(PYTHON) == 3
    assert len(TOML) == 1


@pytest.mark.parametrize("body", PYTHON)
def test_python(body: str, tmp_path: Path) -> None:
    path = tmp_path / "example.py"
    path.write_text(body, encoding="utf-8")
    found = runpy.run_path(str(path), run_name="__main__")
    if "sites" in found:  # the example with a network of one's own says how good its models are
        assert all(client.accuracy > 90 for client in found["result"].per_client)
        alike = fk.run("fedavg", clients=found["sites"], model=found["network"], rounds=5, lr=0.1)
        assert alike.per_client[2].accuracy < 10


@pytest.mark.parametrize(
    "line", [pytest.param(line, marks=[pytest.mark.slow] * ("local-cluster" in line)) for line in SHELL]
)
def test_shell(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mix.py").write_text(PYTHON[-1], encoding="utf-8")
    words = [SMALL.get(word, word) for word in shlex.split(line, comments=True)[1:]]
    if words[0] == "web":  # runs until it is stopped
        pytest.importorskip("fastapi")
        monkeypatch.setattr("fedkin.web.serve.serve", lambda *given: None)
        words += ["--port", "0"]
    if words[0] == "local-cluster":  # starts programs of its own, which need a real terminal's files
        pytest.importorskip("cryptography")
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "fedkin",
                words[0],
                "2",
                *words[2:],
            ],  # two sites show what four do, in half the time
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert len(list(tmp_path.glob("cluster/site-*/personal.safetensors"))) == 2
        return
    rounds = ["--rounds", "1"] if words[0] == "compare" else []
    outcome = CliRunner().invoke(app, [*words, *rounds])
    assert outcome.exit_code == 0, outcome.output


@pytest.mark.parametrize("body", TOML)
def test_toml(body: str, tmp_path: Path) -> None:
    path = tmp_path / "experiment.toml"
    path.write_text(body)
    assert make_config(read_toml(path)).options == {"lam": 0.5}
    command = re.search(r"`fedkin (run experiment.toml [^`]*)`", README)
    assert command is not None
    words = [str(path) if word == path.name else word for word in command[1].split()]
    outcome = CliRunner().invoke(app, words)
    assert outcome.exit_code == 0, outcome.output


def test_the_table_of_methods_is_complete() -> None:
    rows = [f"| `{name}` | {m.about} | {m.shares} | {m.private} | {m.paper} |" for name, m in METHODS.items()]
    shown = [line for line in README.splitlines() if line.startswith("| `")]
    assert shown == rows, "the table should be:\n" + "\n".join(rows)
