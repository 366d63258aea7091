"""The command line as a user meets it: exit codes, JSON, files and flags, errors in words, tables."""

from __future__ import annotations

import io
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from fedkin.cli.application import app
from fedkin.cli.console import plain, sparkline
from fedkin.cli.flags import NOT_FLAGS, listed, seeds_of
from fedkin.cli.listing import paper_home
from fedkin.cli.live import Cell, window
from fedkin.config import Config
from fedkin.data import PARTITIONS, SOURCES
from fedkin.errors import FedKinError, UsageError
from fedkin.methods import METHODS
from fedkin.methods.fedavg import FedAvg
from fedkin.models import MODELS
from fedkin.robust import ATTACKS, RULES
from fedkin.rounds.words import seconds, size

TINY = ["--rounds", "2", "--epochs", "1", "--clients", "5", "--way", "each"]


def call(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def answer(*words: str) -> Any:
    """What `--json` printed: one object on standard output, nothing before or after it."""
    outcome = call(*words, "--json")
    assert outcome.exit_code == 0, outcome.output

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(outcome.stdout, parse_constant=refuse)


def refused(code: int, *words: str) -> str:
    outcome = call(*words)
    assert outcome.exit_code == code, outcome.output
    assert "Traceback" not in outcome.output
    assert not outcome.stdout
    return " ".join(outcome.stderr.split())


@pytest.fixture(autouse=True)
def _runs_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison skips what is finished: no test may find the runs of another."""
    monkeypatch.setenv("FEDKIN_RUNS", str(tmp_path / "runs"))


@pytest.fixture
def methods(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The registry, free to add to."""
    monkeypatch.setattr(METHODS, "_entries", dict(METHODS._entries))
    return METHODS


# ------------------------------------------------------------ run


def test_run_json_has_what_is_promised() -> None:
    got = answer("run", "ditto", *TINY, "--set", "lam=0.25", "--seed", "3")
    promised = {
        "method",
        "options",
        "seed",
        "accuracy",
        "best",
        "per_client",
        "history",
        "bytes",
        "seconds",
        "removed",
        "failed",
        "run",
    }
    assert promised <= set(got)
    assert set(got["accuracy"]) == {"macro", "micro", "worst_decile", "std", "metric", "unit", "higher"}
    assert (got["method"], got["seed"], got["options"]) == ("ditto", 3, {"lam": 0.25, "output": "personal"})
    assert got["config"]["options"] == {"lam": 0.25}
    assert len(got["history"]) == 2
    assert len(got["per_client"]) == 5


def test_numbers_that_do_not_exist_are_null() -> None:
    got = answer("run", "fedavg", *TINY, "--test-share", "0")
    assert got["accuracy"]["macro"] is None
    assert plain({"a": [math.nan, 1.0, (math.inf,)]}) == {"a": [None, 1.0, [None]]}


def test_run_prints_lines_while_it_runs_and_a_summary() -> None:
    outcome = call("run", "fedper", *TINY)
    assert outcome.exit_code == 0
    lines = outcome.stderr.splitlines()
    assert lines[0].startswith("fedper on digits · 5 clients, pathological:2 · mlp")
    assert [line.split("  ")[0] for line in lines[1:]] == ["round 1/2", "round 2/2"]
    assert all(word in lines[1] for word in ("loss", "accuracy", "worst decile", "down", "up", "failed", "removed"))
    for word in ("macro", "micro", "worst decile", "last round (2)", "best round", "split", "received", "sent"):
        assert word in outcome.stdout


def test_every_field_of_config_is_a_flag() -> None:
    text = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "200"}).stdout
    for field in fields(Config):
        if field.name not in NOT_FLAGS:
            assert "--" + field.name.replace("_", "-") in text


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "experiment.toml"
    path.write_text('method = "ditto"\nrounds = 3\nclients = 5\nepochs = 1\nway = "each"\n[options]\nlam = 0.5\n')
    got = answer("run", str(path), "--rounds", "1")
    assert (got["method"], got["config"]["rounds"], got["config"]["clients"]) == ("ditto", 1, 5)
    assert got["options"] == {"lam": 0.5, "output": "personal"}
    again = answer("run", str(path), "--rounds", "1", "--set", "lam=2")
    assert again["options"] == {"lam": 2.0, "output": "personal"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("roundss = 3", ["experiment.toml", "'roundss'", "'rounds'"]),
        ("rounds = 2.5", ["experiment.toml", "rounds=2.5", "a whole number of at least 1"]),
        ("rounds = ", ["not valid TOML"]),
        ("options = 3", ["options=3"]),
        ("[options]\nlamda = 1", ["'lamda'"]),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, says: list[str]) -> None:
    path = tmp_path / "experiment.toml"
    path.write_text(text)
    message = refused(2, "run", str(path))
    assert all(word in message for word in says)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run", "fedavgg"], ["'fedavgg'", "'fedavg'"]),
        (["run", "missing.toml"], ["missing.toml", "no such file"]),
        (["run", "fedavg", "--roundz", "3"], ["--roundz", "--rounds"]),
        (["run", "fedavg", "--rounds", "0"], ["--rounds 0", "a whole number of at least 1"]),
        (["run", "fedavg", "--lr", "fast"], ["--lr fast", "a number above 0"]),
        (["run", "fedavg", "--optimiser", "sdg"], ["--optimiser sdg", "sgd, adam"]),
        (["run", "fedavg", "--data", "cifar"], ["'cifar'", "'cifar10'"]),
        (["run", "fedavg", "--model", "cnn"], ["'cnn'", "'cnn-512'"]),
        (["run", "fedavg", "--partition", "dirichlet"], ["dirichlet:ALPHA"]),
        (["run", "fedavg", "--device", "tpu"], ["--device tpu", "cpu, cuda"]),
        (["run", "ditto", "--set", "lamb=1"], ["'lamb'", "'lam'"]),
        (["run", "ditto", "--set", "lam=-1"], ["lam='-1'", "at least 0"]),
        (["run", "ditto", "--set", "lam"], ["NAME=VALUE"]),
        (["compare", "fedavg", "dito"], ["'dito'", "'ditto'"]),
        (["compare", "fedavg", "fedavg"], ["twice"]),
        (["compare", "fedavg", "ditto", "--set", "fedprox.mu=1"], ["'fedprox'", "fedavg"]),
        (["compare", "fedavg", "ditto", "--set", "ditto.mu=1"], ["'mu'", "lam"]),
        (["compare", "fedavg", "ditto", "--set", "mu=1"], ["'mu'", "lam"]),
        (["compare", "fedavg", "--seeds", "none"], ["seeds='none'"]),
        (["methods", "fedrap"], ["'fedrap'", "'fedrep'"]),
        (["models", "resnet"], ["'resnet18'"]),
        (["datasets", "minst"], ["'mnist'"]),
        (["partitions", "dirichle"], ["'dirichlet'"]),
        (["attacks", "lies"], ["'lie'"]),
        (["rules", "medain"], ["'median'"]),
        (["run", "fedavg", "--attack", "imp"], ["unknown attack 'imp'", "'ipm'"]),
        (["run", "fedavg", "--attack", "non"], ["'none'"]),
        (["run", "fedavg", "--attack", "none,sf"], ["unknown attack 'none,sf'"]),
        (["run", "fedavg", "--attack", "lie:zz=1"], ["--attack lie:zz=1", "'z'"]),
        (["run", "fedavg", "--attack", "lie:z=much"], ["z='much'", "a number"]),
        (["run", "fedavg", "--attack", "lie:z"], ["'z' has no value"]),
        (["run", "fedavg", "--malicious", "1.5"], ["--malicious 1.5", "from 0 to 1"]),
        (["run", "fedavg", "--rule", "medain"], ["unknown rule 'medain'", "'median'"]),
        (["run", "fedavg", "--rule", "krum:malicious=-1"], ["--rule krum", "malicious='-1'", "at least 0"]),
        (["run", "fedavg", "--rule", "bucketing:base=krun"], ["--rule bucketing", "'krum'"]),
        (["run", "fedavg", "--rule", "fltrust:root=0"], ["--rule fltrust", "root='0'", "at least 1"]),
        (["run", "fedavg", "--rule", "gas:base=fltrust"], ["--rule gas", "FLTrust", "whole models"]),
        (["compare", "fedavg", "--attack", "none,fs"], ["unknown attack 'fs'", "'sf'"]),
        (["compare", "fedavg", "--attack", "sf,sf"], ["'sf'", "twice"]),
        (["compare", "fedavg", "--attack", "z=1,lie"], ["'z=1' is an option"]),
        (["compare", "fedavg", "--rule", ","], ["no name given"]),
        (["bench", "nothing-like-it"], ["'nothing-like-it'"]),
        (["rum"], ["rum"]),
    ],
)
def test_wrong_usage_is_exit_2_and_says_what_is_right(words: list[str], says: list[str]) -> None:
    message = refused(2, *words)
    missing = [word for word in says if word not in message]
    assert not missing, message


def test_missing_data_show_the_three_ways(tmp_path: Path) -> None:
    for command in (["run", "fedavg"], ["compare", "fedavg", "local"], ["split"]):
        message = refused(2, *command, "--data", "wisdm51", "--data-dir", str(tmp_path))
        assert "Three ways" in message
        assert all(way in message for way in ("1. put wisdm51.npz", "2. say where", "3. "))


def test_a_method_that_fails_is_exit_1(methods: Any) -> None:
    @methods.register("broken")
    class Broken(FedAvg):
        def round(self, fed: Any, cohort: Any) -> None:
            raise FedKinError("the server lost its mind")

    assert "the server lost its mind" in call("run", "broken", *TINY).stderr
    assert call("run", "broken", *TINY).exit_code == 1
    outcome = call("compare", "broken", "local", *TINY, "--json")
    got = json.loads(outcome.stdout)
    assert outcome.exit_code == 1
    assert [cell["method"] for cell in got["cells"]] == ["local"]
    assert got["failed"] == [
        {
            "method": "broken",
            "options": {},
            "attack": "none",
            "rule": "mean",
            "seed": 0,
            "error": "the server lost its mind",
            "run": ANY,
        }
    ]
    assert got["failed"][0]["run"].startswith("broken-")


# ------------------------------------------------------------ compare


def test_compare_json() -> None:
    sets = ["--set", "ditto.lam=0.1", "--set", "mu=1"]
    got = answer("compare", "fedavg", "ditto", "fedprox", *TINY, "--seeds", "2", *sets)
    assert [(c["method"], c["seed"]) for c in got["cells"]] == [
        ("fedavg", 0),
        ("ditto", 0),
        ("fedprox", 0),
        ("fedavg", 1),
        ("ditto", 1),
        ("fedprox", 1),
    ]
    options = {c["method"]: c["options"] for c in got["cells"]}
    assert options == {"fedavg": {}, "ditto": {"lam": 0.1, "output": "personal"}, "fedprox": {"mu": 1.0}}
    assert [(row["method"], row["seeds"]) for row in got["table"]] == [
        ("fedavg", [0, 1]),
        ("ditto", [0, 1]),
        ("fedprox", [0, 1]),
    ]
    assert len({c["split"] for c in got["cells"]}) == 2
    assert got["failed"] == []


def test_compare_agrees_with_run() -> None:
    together = answer("compare", "local", "fedrep", *TINY, "--seed", "4")["cells"][1]
    alone = answer("run", "fedrep", *TINY, "--seed", "4")
    for key in ("accuracy", "split", "bytes", "per_client"):
        assert together[key] == alone[key]


def test_compare_prints_lines_and_a_table() -> None:
    outcome = call("compare", "fedavg", "local", *TINY, "--seeds", "0,7")
    assert outcome.exit_code == 0
    assert "local seed 7  round 2/2" in outcome.stderr
    assert sum("  round " in line for line in outcome.stderr.splitlines()) == 4, "a line a run, not a round"
    assert [line.split()[:3] for line in outcome.stdout.splitlines()[-2:]] == [
        ["next:", "fedkin", "report"],
        ["next:", "fedkin", "web"],
    ]
    for word in ("method", "macro", "micro", "worst decile", "best round", "sent", "received", "±", "2 seeds"):
        assert word in outcome.stdout


def test_a_title_is_as_wide_as_the_screen_and_not_as_its_table() -> None:
    from fedkin.cli.console import table

    made, to = table("a title that is much wider than its table", "a"), Console(file=io.StringIO(), width=60)
    made.add_row("1")
    to.print(made)
    assert to.file.getvalue().splitlines()[0] == "a title that is much wider than its table"  # type: ignore[attr-defined]


def test_show_says_what_was_asked_for_first() -> None:
    run = answer("run", "fedavg", *TINY, "--lr", "0.02")["run"]
    shown = call("show", Path(run).name, "--runs-dir", str(Path(run).parent)).stdout
    first = next(line for line in shown.splitlines() if line.startswith("settings"))
    assert first.split("asked for:")[1].split()[0].startswith("clients=")
    assert "lr=0.02" in first
    assert "batch=10" not in first
    assert "batch=10" in shown
    assert "severity=" not in shown
    assert "malicious=" not in shown


def test_compare_takes_settings_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text("rounds = 1\nclients = 5\nepochs = 1\n[options.ditto]\nlam = 0.75\n")
    got = answer("compare", "local", "ditto", str(path))
    assert [c["config"]["rounds"] for c in got["cells"]] == [1, 1]
    assert got["cells"][1]["options"] == {"lam": 0.75, "output": "personal"}


def test_the_data_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedkin.rounds import choices

    reads: list[str] = []
    real = choices.load

    def counting(name: str, data_dir: str | None = None, **how: Any) -> Any:
        reads.append(name)
        return real(name, data_dir, **how)

    monkeypatch.setattr(choices, "load", counting)
    answer("compare", "local", "fedavg", *TINY, "--seeds", "2")
    assert reads == ["digits"]


def test_seeds() -> None:
    assert seeds_of(None, 4) == [4]
    assert seeds_of("3", 4) == [4, 5, 6]
    assert seeds_of("0,9", 4) == [0, 9]
    assert seeds_of("2,", 4) == [2]
    for wrong in ("0", "x", "1,1", "-1,2", ","):
        with pytest.raises(UsageError):
            seeds_of(wrong, 0)


def test_demo_speaks_from_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedkin.cli import demo

    small = {"rounds": 1, "epochs": 1, "clients": 5, "way": "each"}
    monkeypatch.setattr(demo, "SETTINGS", {**demo.SETTINGS, **small})
    outcome = call("demo")
    assert outcome.exit_code == 0, outcome.output
    for name in METHODS:
        assert name in outcome.stdout
    said = " ".join(outcome.stdout.split())
    assert "fedavg-ft is left out, because it is the same as fedavg then" in said
    assert "evaluated as received, percent" in said
    assert "One model for all (fedavg)" in said
    assert "Training alone (local)" in said
    assert all(f"1 of 5 clients are hostile, {attack} " in said for attack in ("ipm", "sf"))
    assert said.count("For the 4 benign clients fedavg") == 2
    title, *lines = outcome.stderr.splitlines()
    assert title.startswith("Handwritten digits")
    assert [line.split()[0] for line in lines] == [name for name in METHODS if name != "fedavg-ft"]
    assert all(line.count(" ipm ") == line.count(" sf ") == line.count(" no attack ") == 1 for line in lines)


def test_after_the_demo_there_are_commands_that_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedkin.cli.demo import next_steps

    monkeypatch.chdir(tmp_path)
    commands = [line.split("\n")[0].partition("fedkin ")[2] for line in next_steps(tmp_path)[1:]]
    assert [c.split()[0] for c in commands] == ["web", "compare", "run"]
    for command in commands[1:]:
        outcome = call(*shlex.split(command), "--rounds", "1", "--epochs", "1", "--way", "each")
        assert outcome.exit_code == 0, outcome.output
    assert commands[0] == f"web --runs-dir {tmp_path}"


def test_a_demo_on_a_terminal_has_a_line_per_method_and_leaves_none_behind() -> None:
    from fedkin.cli.demo import DemoScreen

    class Tty(io.StringIO):
        def isatty(self) -> bool:
            return True

    console = Console(file=Tty(), force_terminal=True, width=80, height=24, legacy_windows=False)
    cells = [Cell(Config(method=m, attack=a)) for m in METHODS for a in ("none", "ipm", "sf")]
    shown = DemoScreen(cells, console, "title")
    with shown:
        assert shown._live is not None
        assert shown._live.transient
        drawn = console.render_lines(shown._render())
    assert len(drawn) <= console.height
    assert sum(any(s.text.split()[:1] == [m] for s in line) for line in drawn for m in METHODS) == len(METHODS)


def test_a_comparison_that_is_over_shows_all_its_lines() -> None:
    from fedkin.cli.live import GridScreen

    console = Console(file=io.StringIO(), width=120, height=10)
    shown = GridScreen([Cell(Config(seed=seed)) for seed in range(30)], console, "title")

    def lines() -> int:
        console.file = io.StringIO()
        console.print(shown._render())
        return str(console.file.getvalue()).count("fedavg")

    assert lines() < 10
    shown._ended = True
    assert lines() == 30


def test_demo_says_who_holds_and_who_does_not() -> None:
    from fedkin.cli.demo import sentences
    from fedkin.cli.grid import Grid

    def cell(method: str, attack: str, benign: float) -> Any:
        clients = [SimpleNamespace(client=i, accuracy=benign if i else 0.0, test_samples=9) for i in range(4)]
        bad = [0] if attack != "none" else []
        return SimpleNamespace(method=method, config=Config(attack=attack), malicious=bad, per_client=clients)

    before = {"fedavg": 80.0, "local": 90.0, "fedcap": 95.0, "ditto": 95.0, "fedper": 90.0}
    after = {"fedavg": 10.0, "local": 90.0, "fedcap": 94.0, "ditto": 40.0, "fedper": 86.0}
    both = {"none": before, "ipm": after}
    grid = Grid([cell(m, attack, value) for attack, row in both.items() for m, value in row.items()])
    grid.rows = list  # type: ignore[method-assign,assignment]
    first, hold, lose, alone = sentences(grid)
    assert "1 of 4 clients are hostile" in first
    assert first.endswith("For the 3 benign clients fedavg collapses from 80.0 to 10.0 %.")
    assert hold.endswith(": fedcap 94.0, fedper 86.0")
    assert lose.endswith(": ditto 40.0")
    assert alone.endswith("gives 90.0 %; methods that reach more: fedcap.")


# ------------------------------------------------------------ attacks and rules


def test_lists_with_options() -> None:
    assert listed("none,backdoor:target=1,share=0.5, ipm", "attack") == ["none", "backdoor:target=1,share=0.5", "ipm"]
    assert listed("krum:malicious=0.2,median", "rule") == ["krum:malicious=0.2", "median"]
    assert listed("lie:z=1,lie:z=2", "attack") == ["lie:z=1", "lie:z=2"]


def test_wrong_attacks_are_refused_before_the_data_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("data were read")

    monkeypatch.setattr("fedkin.rounds.choices.load", never)
    for command in (["run", "fedavg"], ["compare", "fedavg", "local"]):
        for wrong in (["--attack", "lie:zz=1"], ["--attack", "imp"], ["--rule", "krum:f=1"], ["--rule", "mediam"]):
            refused(2, *command, *wrong)


def test_one_attack_and_one_rule() -> None:
    got = answer("attacks", "lie")
    assert got["options"][0] == {"name": "z", "default": None, "accepts": "a number or none", "help": ANY}
    assert [o["name"] for o in got["options"][1:]] == ["lie_about_votes"]
    assert got["changes"] == ["what they send"]
    assert "Baruch" in got["paper"]
    assert answer("attacks", "backdoor")["changes"] == ["what they train on", "what they send"]
    rfa = {o["name"] for o in answer("rules", "rfa")["options"]}
    assert rfa == {"iterations", "floor", "tolerance", "weighted", "per_tensor"}
    assert [o["name"] for o in answer("rules", "fltrust")["options"]] == ["root", "first_tensor_only"]
    shown = call("rules", "bucketing").stdout
    for word in ("Karimireddy", "size", "a whole number of at least 1", "a rule's name", "--rule bucketing:OPTION="):
        assert word in shown
    assert "no options" in call("rules", "mean").stdout
    assert "lie_about_votes" in call("attacks", "sf").stdout


def test_run_says_who_attacked_and_who_was_found() -> None:
    words = ["run", "fedavg", *TINY, "--clients", "10", "--attack", "ipm", "--malicious", "0.3", "--rule", "multi-krum"]
    outcome = call(*words)
    lines = outcome.stderr.splitlines()
    assert "ipm: 3 of 10 clients malicious, accuracy of the 7 benign ones only · rule multi-krum" in lines[0]
    assert all("benign accuracy" in line for line in lines[1:])
    got = answer(*words)
    assert (got["attack"], got["rule"], len(got["malicious"])) == ("ipm", "multi-krum", 3)
    assert got["detection"] == {"accuracy": 1.0, "false_positive": 0.0, "false_negative": 0.0}
    assert got["left_out"] == {str(c): {"rounds": 2, "of": 2} for c in got["malicious"]}
    for word in (
        "accuracy of 7 benign clients",
        "attackers see all updates",
        "left out",
        *(f"client-{c}* 2/2" for c in got["malicious"]),
        "found 3 of 3 attackers, 0 of 7 benign wrongly",
    ):
        assert word in outcome.stdout


def test_removed_clients_are_named_with_their_round() -> None:
    words = ["run", "fedcap", *TINY, "--clients", "10", "--attack", "ipm:epsilon=1000"]
    got = answer(*words)
    assert got["removed"]
    bad = set(got["malicious"])
    by_round: dict[int, list[str]] = {}
    for client, round in got["removed"].items():
        name = f"client-{client}*" if int(client) in bad else f"client-{client}"
        by_round.setdefault(round + 1, []).append(name)
    shown = call(*words).stdout
    for round, names in by_round.items():
        assert f"round {round}: " in shown
        assert all(name in shown for name in names)


def test_attackers_that_change_leave_nobody_out_of_the_accuracy() -> None:
    outcome = call("run", "c-pfl", *TINY, "--clients", "10", "--attack", "nan", "--attackers", "redrawn")
    assert outcome.exit_code == 0
    assert "3 of 10 clients malicious, others every round, accuracy of all clients" in outcome.stderr
    assert "benign" not in outcome.stderr
    assert re.search(
        r"took \d+\.\d\d % of the benign for attackers", outcome.stdout
    )  # of attackers no reply came through
    assert "every verdict against the truth of its round" in outcome.stdout
    assert "detection" not in call("run", "fedavg", *TINY, "--attack", "sf", "--attackers", "redrawn").stdout
    assert "failures" in outcome.stdout


def test_flags_about_attackers_without_an_attack_are_refused() -> None:
    refused = call("run", "local", *TINY, "--malicious", "0.5")
    assert refused.exit_code == 2
    assert "--malicious 0.5 would change nothing" in refused.stderr
    assert call("run", "local", *TINY, "--malicious", "0.5", "--attack", "sf").exit_code == 0


def test_compare_over_attacks_and_rules() -> None:
    several = ["--attack", "none,ipm:epsilon=5", "--rule", "mean,median", "--seeds", "2"]
    words = ["compare", "fedavg", "fedprox", *TINY, *several]
    got = answer(*words)
    keys = [(a, r, m) for a in ("none", "ipm:epsilon=5") for r in ("mean", "median") for m in ("fedavg", "fedprox")]
    assert [(c["attack"], c["rule"], c["method"], c["seed"]) for c in got["cells"]] == [
        (*key, seed) for seed in (0, 1) for key in keys
    ]
    assert [(row["attack"], row["rule"], row["method"]) for row in got["table"]] == keys
    assert all(row["seeds"] == [0, 1] for row in got["table"])
    outcome = call(*words, "--fresh")
    assert "fedavg under ipm:epsilon=5 by median seed 1  round 2/2" in outcome.stderr
    lines = [line.split() for line in outcome.stdout.splitlines()]
    assert ["method", "rule", "no", "attack", "ipm:epsilon=5"] in lines
    shown = {(w[0], w[1]): w[2:] for w in lines if w[1:2] in (["mean"], ["median"])}
    assert list(shown) == [(m, r) for m in ("fedavg", "fedprox") for r in ("mean", "median")]
    for row in got["table"]:
        macro = row["macro"]
        assert f"{macro['mean']:.2f} ±{macro['std']:.2f}" in " ".join(shown[row["method"], row["rule"]])
    assert "under attack 1 of 5 clients are malicious; accuracy of the 4 benign ones only (no attack: of all 5)" in (
        outcome.stdout
    )


def test_compare_under_one_attack_keeps_the_table() -> None:
    shown = call("compare", "fedavg", "fedper", *TINY, "--attack", "sf", "--rule", "median").stdout
    for word in ("personal models of benign clients", "worst decile", "best round", "1 of 5 clients", "rule: median"):
        assert word in shown
    several = call("compare", "fedper", *TINY, "--attack", "sf", "--rule", "mean,median").stdout
    assert ["method", "rule", "macro"] in [line.split()[:3] for line in several.splitlines()]


# ------------------------------------------------------------ lists


@pytest.mark.parametrize(
    ("command", "registry"),
    [
        ("methods", METHODS),
        ("attacks", ATTACKS),
        ("rules", RULES),
        ("models", MODELS),
        ("datasets", SOURCES),
        ("partitions", PARTITIONS),
    ],
)
def test_lists_are_complete(command: str, registry: Any) -> None:
    shown = call(command)
    assert shown.exit_code == 0
    assert all(name in shown.stdout for name in registry)
    assert [entry["name"] for entry in answer(command)[command]] == list(registry)


def test_one_method() -> None:
    got = answer("methods", "fedrep")
    assert {o["name"] for o in got["options"]} == {"head_epochs", "body_epochs"}
    assert (got["shares"], got["private"]) == ("body", "the head")
    whole, head = 878_538 * 4, 5_130 * 4
    assert got["message"]["down"] == got["message"]["up"] == whole - head
    assert answer("methods", "local")["message"]["down"] == 0
    assert answer("methods", "fedavg", "--model", "mlp")["message"]["up"] == 394_634 * 4
    shown = call("methods", "fedrep").stdout
    for word in ("Collins et al.", "head_epochs", "a whole number of at least 1", "the head", "3.5 MB down"):
        assert word in shown


DEPARTURES = {
    "fedpkda": ["pull=printed", "own_clip=true", "three clients", "proto_cache=false", "offset", "fim=full"],
    "co-pfl": ["aggregation=or_freeze", "scope=global", "ranking=exact", "bfloat16", "kT + t", "beta1"],
    "pfedcs": ["teacher_gradient=true", "held fixed", "literal=true", "bias=true"],
    "c-pfl": ["samples of the accepted", "committee_data=train", "on_empty", "Algorithm 3, line 8"],
    "fedcap": ["not finite", "removal=flag", "eval_customise_all=true"],
}


@pytest.mark.parametrize("name", DEPARTURES)
def test_a_method_says_where_it_departs_from_its_paper(name: str) -> None:
    """Every departure is on the screen and in the JSON, and the options that undo one exist."""
    shown, got = " ".join(call("methods", name).stdout.split()), answer("methods", name)
    listed = got["departs"]
    assert "Where FedKin departs from the paper" in shown
    for word in DEPARTURES[name]:
        assert word in shown
        assert any(word in text for text in listed)
    options = {o["name"] for o in got["options"]} | {"profile"}
    assert all(" ".join(text.split()) in shown for text in listed)
    assert {word for text in listed for word in re.findall(r"\b(\w+)=\w", text)} <= options
    assert "`departs`" in (sys.modules[paper_home(METHODS[name]).__module__].__doc__ or "")


def test_a_method_that_departs_from_nothing_says_nothing_of_it() -> None:
    assert answer("methods", "fedavg")["departs"] == []
    assert "what the paper prints" not in call("methods", "fedavg").stdout


def test_one_model_and_one_partition() -> None:
    got = answer("models", "cnn-512")
    assert got["parameters"] == 878_538
    assert got["head_module"] == "head"
    assert "head.weight" in call("models", "cnn-512").stdout
    assert "dirichlet:ALPHA[:LEAST_SAMPLES]" in call("partitions", "dirichlet").stdout


def test_data_sets_say_whether_they_are_here(tmp_path: Path) -> None:
    def here() -> dict[str, bool]:
        return {e["name"]: e["here"] for e in answer("datasets", "--data-dir", str(tmp_path))["datasets"]}

    before = here()
    assert before["digits"]
    assert not any(before[name] for name in ("cifar10", "mnist", "agnews", "ucihar"))
    (tmp_path / "cifar-10-batches-py").mkdir()
    (tmp_path / "MNIST" / "raw").mkdir(parents=True)
    (tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte.gz").touch()
    (tmp_path / "ag_news_csv").mkdir()
    (tmp_path / "ag_news_csv" / "train.csv").touch()
    (tmp_path / "UCI HAR Dataset").mkdir()
    after = here()
    assert after["cifar10"]
    assert after["mnist"]
    assert after["ucihar"]
    assert not after["agnews"]
    assert "Three ways" in call("datasets", "wisdm51", "--data-dir", str(tmp_path)).stdout
    assert "here" in call("datasets", "digits").stdout


def test_split_shows_who_holds_what() -> None:
    got = answer("split", "--clients", "10", "--validation-share", "0.1")
    assert sum(sum(c["classes"]) for c in got["clients"]) == got["samples"] == 1797
    assert all(sum(n > 0 for n in c["classes"]) == 2 for c in got["clients"])
    assert all(c["train"] + c["validation"] + c["test"] == sum(c["classes"]) for c in got["clients"])
    assert got["hash"] == answer("run", "local", *TINY, "--clients", "10", "--validation-share", "0.1")["split"]
    shown = call("split", "--clients", "10").stdout
    assert "client-9" in shown
    assert "classes per client: 2 to 2" in shown


def test_split_refuses_what_cannot_be() -> None:
    assert "multiple of 5 clients" in refused(2, "split", "--clients", "7")
    assert "--lr" in refused(2, "split", "--lr", "1")


# ------------------------------------------------------------ the program itself


def program(
    *words: str, tmp: Path | None = None, start: Sequence[str] = ("-m", "fedkin"), **more: Any
) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **({"TMPDIR": str(tmp)} if tmp else {})}
    return subprocess.Popen(
        [sys.executable, *start, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **more,
    )


def test_version_and_exit_codes_of_the_program() -> None:
    version, wrong = program("--version"), program("run", "nobody")
    out, err = version.communicate()
    assert (version.returncode, err) == (0, "")
    assert out.startswith("fedkin ")
    out, err = wrong.communicate()
    assert (wrong.returncode, out) == (2, "")
    assert "unknown method 'nobody'" in err


def test_ctrl_c_ends_cleanly() -> None:
    running = program("run", "local", "--rounds", "100000", "--clients", "5", "--way", "each")
    assert running.stderr is not None
    while "round 1/" not in running.stderr.readline():
        assert running.poll() is None
        time.sleep(0.01)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=20)
    assert (running.returncode, out) == (130, "")
    assert "Ctrl-C" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_stopped_demo_says_where_its_runs_are(tmp_path: Path) -> None:
    small = {"rounds": 1, "epochs": 1, "clients": 5, "way": "each"}
    code = f"from fedkin.cli import demo, main; demo.SETTINGS |= {small}; main()"
    running = program("demo", cwd=tmp_path, tmp=tmp_path, start=("-c", code))
    assert running.stderr is not None
    while "c-pfl " not in running.stderr.readline():
        assert running.poll() is None
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 130
    (folder,) = tmp_path.glob("fedkin-demo-*")
    assert f"fedkin runs --runs-dir {folder}" in " ".join(err.split())
    assert "the same command" not in err


@pytest.mark.parametrize("command", [c.name for c in app.registered_commands])
def test_every_command_shows_an_example(command: str) -> None:
    outcome = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"})
    assert outcome.exit_code == 0
    assert f"fedkin {command}" in outcome.stdout.split("Example")[1]


# ------------------------------------------------------------ small parts


def test_numbers_for_people() -> None:
    assert [size(n) for n in (0, 999, 1234, 99_900, 3_500_000, 2e15)] == [
        "0 B",
        "999 B",
        "1.2 kB",
        "99.9 kB",
        "3.5 MB",
        "2000.0 TB",
    ]
    assert [seconds(s) for s in (1.25, 99.99, 125, 7320)] == ["1.2 s", "100.0 s", "2 min 05 s", "2 h 02 min"]


def test_sparkline() -> None:
    assert sparkline([0, 50, 100]) == "▁▅█"
    assert sparkline([math.nan, 100.0]) == "█"
    assert len(sparkline(list(range(100)), width=10)) == 10


def test_a_long_grid_shows_the_part_at_work() -> None:
    cells = [Cell(Config(seed=i), "done" if i < 50 else "waiting") for i in range(100)]
    shown = [cell.config.seed for cell in window(cells, 10)]
    assert len(shown) == 10
    assert 50 in shown
    assert window(cells[:3], 10) == cells[:3]


def test_nothing_becomes_a_picture(capsys: pytest.CaptureFixture[str]) -> None:
    """Fingerprints hold pieces such as :AB:, which a terminal library takes for the name of an emoji."""
    from fedkin.cli.console import screen

    screen().print("31:AB:22", soft_wrap=True)
    assert capsys.readouterr().out.strip() == "31:AB:22"


def test_several_values_of_an_option_belong_into_a_grid() -> None:
    for words, way in ((("run", "ditto"), "fedkin compare METHOD --grid"), (("compare", "ditto"), "--grid")):
        outcome = call(*words, "--set", "lam=0.1,1")
        assert outcome.exit_code == 2
        assert f"for several values: {way} lam=0.1,1" in outcome.stderr
    assert "several values" not in call("run", "ditto", "--set", "lam=x").stderr


def test_a_plan_is_printed_as_a_result(tmp_path: Path) -> None:
    words = ("reproduce", "fedcap", "table1", "--rows", "CIFAR-10", "--quick", "--plan", "--data-dir", str(tmp_path))
    outcome = call(*words, "--runs-dir", str(tmp_path))
    assert outcome.exit_code == 0, outcome.output
    assert "cells can be run" in outcome.stdout
    assert "cells can be run" not in outcome.stderr
