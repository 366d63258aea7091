"""The first minute: help that can be read, answers that come at once, completion, and a report of the machine."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedkin.cli import names
from fedkin.cli.application import app
from fedkin.cli.doctor import extras, tidy
from fedkin.cli.flags import NAMED, NOT_FLAGS
from fedkin.config import GROUPS, SPLIT, Config
from fedkin.core.schedules import SCHEDULES
from fedkin.data import PARTITIONS, SOURCES, load, make_split
from fedkin.data.fitting import Preparing
from fedkin.data.image_folder import Shown
from fedkin.data.manner import Reading
from fedkin.errors import UsageError
from fedkin.methods import METHODS
from fedkin.models import MODELS
from fedkin.options import describe
from fedkin.robust import ATTACKS, RULES
from fedkin.tasks import TASKS

REGISTRIES = [METHODS, ATTACKS, RULES, MODELS, SOURCES, PARTITIONS, TASKS, SCHEDULES]
OWN = """
import sys
from fedkin.cli import main
sys.argv = ["fedkin", *{words!r}]
code = 0
try:
    main()
except SystemExit as end:
    code = end.code
print(*(m for m in ("torch", "numpy", "scipy", "pandas", "matplotlib") if m in sys.modules))
sys.exit(code)
"""


def in_a_process(*words: str) -> subprocess.CompletedProcess[str]:
    """A command in a fresh process, whose last line of output names the slow packages that it imported."""
    text = OWN.format(words=words)
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False, timeout=60)


# ---------------------------------------------------------------- at once


@pytest.mark.parametrize("registry", REGISTRIES, ids=lambda r: r.kind)
def test_the_names_that_are_read_off_the_text_are_those_that_are_registered(registry: Any) -> None:
    own = [name for name in registry if _home(registry[name]).startswith("fedkin.")]
    assert names._own(registry.kind) == sorted(own)
    assert names.known(registry.kind) == list(registry)


def _home(entry: Any) -> str:
    """The module of something that is registered; others may have come from tests."""
    for part in ("make", "read"):
        entry = getattr(entry, part, entry)
    found: str = getattr(getattr(entry, "func", entry), "__module__", "")
    return found


@pytest.mark.parametrize(
    "words",
    [
        ("--help",),
        ("run", "--help"),
        ("run", "dito"),
        ("run", "fedavg", "--data", "cifar"),
        ("run", "fedavg", "--attack", "imp"),
        ("compare", "fedavg", "dito"),
        ("compare", "fedavg", "--rule", "mean,medain"),
        ("methods", "dito"),
        ("datasets", "minst"),
        ("split", "--partition", "dirichle"),
        ("runs", "--runs-dir", "/nowhere"),
    ],
    ids=" ".join,
)
def test_help_and_a_wrong_name_wait_for_nothing(words: tuple[str, ...]) -> None:
    done = in_a_process(*words)
    assert done.returncode == (2 if "unknown" in done.stderr else 0), done.stderr
    assert done.stdout.splitlines()[-1] == ""


def test_a_wrong_name_is_the_error_it_would_be_later() -> None:
    for kind, registry in zip(names.PLACES, REGISTRIES, strict=True):
        with pytest.raises(UsageError) as early:
            names.check_name(kind, "no-such-thing:option=1")
        with pytest.raises(UsageError) as late:
            registry["no-such-thing"]
        assert str(early.value).startswith(str(late.value)), "and may say more"


# ---------------------------------------------------------------- help


def test_every_setting_says_what_it_is_about() -> None:
    assert {d.name: d.group for d in describe(Config) if d.group not in GROUPS} == {"options": ""}


def flags_of(line: str) -> list[str]:
    """The flags that a line of help begins with; a setting may have two."""
    found = re.match(r"│ +(--[-a-z,]+)", line)
    return [] if found is None else found[1].split(",")


def test_help_has_a_group_after_the_other() -> None:
    text = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "160"}).stdout
    places = [text.index(f"─ {group} ─") for group in GROUPS]
    assert places == sorted(places)
    of = {d.name: d.group for d in describe(Config)}
    for place, group in zip(places, GROUPS, strict=True):
        panel = text[place : text.index("╰", place)]
        shown = {flag for line in panel.splitlines() for flag in flags_of(line)}
        for field in fields(Config):
            if field.name not in NOT_FLAGS:
                assert (f"--{field.name.replace('_', '-')}" in shown) == (of[field.name] == group), field.name


def test_the_settings_of_a_split_are_those_that_the_split_takes() -> None:
    named = {"data", *inspect.signature(load).parameters, *inspect.signature(make_split).parameters}
    tables = {f.name for f in fields(Reading)} | {f.name for f in fields(Preparing)}
    images = {f"image_{name}" for name in inspect.signature(Shown.of).parameters}
    assert set(SPLIT) == (named | tables | images) & {f.name for f in fields(Config)}


# ---------------------------------------------------------------- completion


def completed(*words: str, **env: str) -> list[str]:
    """What a shell is offered for the last of these words."""
    asked = {"_FEDKIN_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(["fedkin", *words]), "COMP_CWORD": len(words)}
    done = CliRunner().invoke(app, [], prog_name="fedkin", env={**{k: str(v) for k, v in asked.items()}, **env})
    assert done.exit_code == 0, done.output
    return [line.strip() for line in done.stdout.splitlines()]


def test_a_shell_completes_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fed.toml").touch()
    (tmp_path / "fedora.txt").touch()
    assert completed("run", "fedp") == ["fedper", "fedpkda", "fedprox"]
    assert "fed.toml" in completed("run", "fed")
    assert "fedora.txt" not in completed("run", "fed")
    assert completed("compare", "fedavg", "dit") == ["ditto"]
    assert completed("run", "fedavg", "--data", "emnist-") == ["emnist-balanced", "emnist-digits", "emnist-letters"]
    assert completed("run", "fedavg", "--attack", "no") == ["none"]
    assert completed("run", "fedavg", "--rule", "med") == ["median"]
    assert completed("run", "fedavg", "--optimiser", "") == ["sgd", "adam"]
    assert completed("methods", "fedr") == ["fedrep"]


def test_every_setting_that_is_a_name_is_completed() -> None:
    assert set(NAMED) <= {f.name for f in fields(Config)}
    assert {kind for kind, *_ in NAMED.values()} == set(names.PLACES)


def test_a_shell_completes_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDKIN_RUNS", str(tmp_path))
    (tmp_path / "ditto-20261115-171502-a3f9").mkdir()
    (tmp_path / "fedcap-20261115-171502-a3f9").mkdir()
    (tmp_path / "report.html").touch()
    assert completed("show", "dit") == ["ditto-20261115-171502-a3f9"]
    assert completed("resume", "la") == ["last"]
    monkeypatch.setenv("FEDKIN_RUNS", str(tmp_path / "nowhere"))
    assert completed("show", "") == ["last"]


# ---------------------------------------------------------------- the machine


def test_doctor_reports_the_machine_and_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home" / "alice"
    (home / "runs").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("FEDKIN_RUNS", str(home / "runs"))
    monkeypatch.setenv("FEDKIN_DATA", str(home / "file" / "data"))
    monkeypatch.setenv("FEDKIN_TOKEN", "a-secret-of-sixteen")
    (home / "file").touch()
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["torch"]["version"]
    assert found["runs"] == {"folder": "~/runs", "exists": True, "writable": True, "why": None}
    assert found["data"]["folder"] == "~/file/data"
    assert not found["data"]["writable"]
    assert "digits" in found["data"]["here"]
    shown = CliRunner().invoke(app, ["doctor"])
    assert shown.exit_code == 0, shown.output
    assert "cannot be written" in shown.stdout
    for text in (done.stdout, shown.stdout):
        assert "alice" not in text
        assert "a-secret-of-sixteen" not in text
    assert list((home / "runs").iterdir()) == []


def test_doctor_still_checks_sites_and_says_so() -> None:
    done = CliRunner().invoke(app, ["doctor", "--ca", "ca.crt"])
    assert done.exit_code == 2
    assert "--ca alone checks nothing" in " ".join(done.stderr.split())


def test_extras_are_read_off_the_package() -> None:
    assert extras()["web"] == ["fastapi", "uvicorn"]
    assert "dev" not in extras()


def test_a_path_is_written_without_whose_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/al")
    assert tidy("/home/al/runs") == "~/runs"
    assert tidy("/home/alice/runs") == "/home/alice/runs"
    assert tidy("/home/al") == "~"
