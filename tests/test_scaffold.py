"""`fedkin new` writes files that work at once; `fedkin.testing` holds users' own work to the promises of ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner, Result

from fedkin import plugins
from fedkin.cli.application import app
from fedkin.methods import METHODS
from fedkin.methods.fedavg import FedAvg
from fedkin.robust import ATTACKS, RULES, DataAttack, Outcome, ReplyAttack, Rule
from fedkin.testing import check_attack, check_method, check_rule
from fedkin.testing.method_checks import survives_when_nobody_answers

KINDS = ("method", "attack", "rule")


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for registry in (METHODS, ATTACKS, RULES):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    monkeypatch.setattr(plugins, "_loaded", {})
    monkeypatch.setenv("FEDKIN_RUNS", str(tmp_path / "runs"))


def call(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def test_what_is_written_passes_its_own_test_and_can_be_used(tmp_path: Path) -> None:
    for kind in KINDS:
        outcome = call("new", kind, f"my-{kind}", "--to", str(tmp_path / "own"))
        assert outcome.exit_code == 0, outcome.output
        assert f"test_my_{kind}.py" in outcome.stdout
        assert 25 <= len((tmp_path / "own" / f"my_{kind}.py").read_text().splitlines()) <= 50
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "."],
        cwd=tmp_path / "own",
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert "27 passed" in done.stdout
    files = [w for kind in KINDS for w in ("--plugin", str(tmp_path / "own" / f"my_{kind}.py"))]
    small = ["--rounds", "1", "--epochs", "1", "--clients", "5", "--way", "each", "--samples-per-client", "20"]
    used = call("run", "my-method", "--attack", "my-attack:strength=2", "--rule", "my-rule", *small, "--json", *files)
    assert used.exit_code == 0, used.output
    assert json.loads(used.stdout)["options"] == {"share": 0.5}
    for command in ("methods", "attacks", "rules"):
        shown = call(command, f"my-{command[:-1]}", *files)
        assert shown.exit_code == 0
        assert "unpublished" in call(command, *files).stdout


def test_a_broken_method_fails_a_check(tmp_path: Path) -> None:
    call("new", "method", "my-method", "--to", str(tmp_path))
    path = tmp_path / "my_method.py"
    path.write_text(path.read_text().replace('replies.mean("model", otherwise=self.model)', 'replies["model"].mean(0)'))
    plugins.load(path)
    with pytest.raises(Exception):  # noqa: B017, PT011
        survives_when_nobody_answers("my-method")


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    assert call("new", "rule", "mine", "--to", str(tmp_path)).exit_code == 0
    (tmp_path / "mine.py").write_text("precious")
    again = call("new", "rule", "mine", "--to", str(tmp_path))
    assert again.exit_code == 2
    assert "not overwritten" in again.stderr
    (tmp_path / "mine.py").unlink()
    (tmp_path / "test_mine.py").write_text("precious")
    assert call("new", "rule", "mine", "--to", str(tmp_path)).exit_code == 2
    assert not (tmp_path / "mine.py").exists(), "both or none"
    assert (tmp_path / "test_mine.py").read_text() == "precious"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["metod", "x"], "did you mean 'method'"),
        (["method", "Ditto"], "lower-case"),
        (["method", "ditto"], "exists already"),
        (["attack", "none"], "exists already"),
        (["method", "../evil"], "lower-case"),
        (["method", "a" * 41], "at most 40"),
        (["method", "two--dashes"], "lower-case"),
        (["rule", "class"], "means something else"),
        (["rule", "json"], "means something else"),
        (["rule", "torch"], "means something else"),
    ],
)
def test_wrong_names_are_refused(words: list[str], says: str, tmp_path: Path) -> None:
    outcome = call("new", *words, "--to", str(tmp_path))
    assert outcome.exit_code == 2
    assert says in " ".join(outcome.stderr.split())
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    outcome = call("new", "rule", "mine", "--to", str(tmp_path / "file"))
    assert outcome.exit_code == 2
    assert "cannot be written" in outcome.stderr


# ---------------------------------------------------------------- fedkin.testing catches what it is for


class Hasty(FedAvg):
    def round(self, fed: Any, cohort: Any) -> None:
        self.model = fed.ask(cohort, self.train, model=self.model)["model"].mean(0)


def test_a_method_that_assumes_answers_is_caught() -> None:
    check_method("fedavg")
    with pytest.raises(Exception):  # noqa: B017, PT011
        check_method(Hasty)


class Short(ReplyAttack):
    def __call__(self, updates: Tensor, malicious: Tensor, knowledge: Any, rng: np.random.Generator) -> Tensor:
        return -updates[malicious][:1]


class Meddling(ReplyAttack):
    def __call__(self, updates: Tensor, malicious: Tensor, knowledge: Any, rng: np.random.Generator) -> Tensor:
        updates[malicious] *= -1
        return updates[malicious]


class Random(ReplyAttack):
    def __call__(self, updates: Tensor, malicious: Tensor, knowledge: Any, rng: np.random.Generator) -> Tensor:
        return torch.randn_like(updates[malicious])


class InPlace(DataAttack):
    def poison(self, x: Any, y: Any, classes: int, rank: int, rng: np.random.Generator) -> tuple[Any, Any]:
        y[:] = 0
        return x, y


class NoClass(DataAttack):
    def poison(self, x: Any, y: Any, classes: int, rank: int, rng: np.random.Generator) -> tuple[Any, Any]:
        return x, y + classes


@pytest.mark.parametrize(
    ("attack", "says"),
    [
        (Short, "send 1 rows"),
        (Meddling, "changed the updates"),
        (Random, "the same generator"),
        (InPlace, "changed the labels"),
        (NoClass, "no class"),
    ],
)
def test_attacks_that_are_wrong_are_caught(attack: Any, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        check_attack(dataclass(frozen=True)(attack))


@pytest.mark.parametrize("attack", ["sf", "lie", "lf", "backdoor"])
def test_attacks_of_ours_are_right(attack: str) -> None:
    check_attack(attack)


class Everything(Rule):
    def combine(self, rows: Tensor, weights: Tensor, start: Tensor) -> Outcome:
        return Outcome(rows.sum(0), torch.ones(len(rows), dtype=torch.bool))


class Spread(Rule):
    def combine(self, rows: Tensor, weights: Tensor, start: Tensor) -> Outcome:
        return Outcome(rows.mean(0) / rows.std(0), torch.ones(len(rows), dtype=torch.bool))


class Vague(Rule):
    def combine(self, rows: Tensor, weights: Tensor, start: Tensor) -> Outcome:
        return Outcome(rows.mean(0), torch.ones(1, dtype=torch.bool))


@pytest.mark.parametrize(
    ("rule", "says"), [(Everything, "four equal rows"), (Spread, "NaN or infinity"), (Vague, "`used` says")]
)
@pytest.mark.filterwarnings("ignore:std")
def test_rules_that_are_wrong_are_caught(rule: Any, says: str) -> None:
    with pytest.raises(AssertionError, match=says):
        check_rule(dataclass(frozen=True)(rule))


@pytest.mark.parametrize("rule", ["median", "krum", "clustered"])
def test_rules_of_ours_are_right(rule: str) -> None:
    check_rule(rule)
