"""Good settings by trials: where is searched, what is chosen and by what, and that a search goes on where it was."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fedkin as fk
from fedkin.cli.application import app
from fedkin.cli.flags import run_config_of
from fedkin.cli.tune import command_of, ranges
from fedkin.config import make_config
from fedkin.errors import DataError, FedKinError, UsageError
from fedkin.methods import METHODS
from fedkin.rounds import RoundRecord
from fedkin.runs.asked import request
from fedkin.runs.catalogue import Catalogue
from fedkin.sweep.expand import idle_of
from fedkin.sweep.search import Axis, chosen, space_of
from fedkin.sweep.study import Study
from fedkin.sweep.tuning import Search, Tuned, ranked, tune

SMALL: dict[str, Any] = {"clients": 5, "epochs": 1, "model": "mlp", "samples_per_client": 40, "way": "each"}
SIZE = "samples_per_client"


def space(method: str = "ditto", **said: Any) -> list[Axis]:
    config = make_config({"method": method})
    return space_of(config, METHODS[method], said, idle_of(config))


def small(method: str = "ditto", **settings: Any) -> dict[str, Any]:
    return {"method": method, **SMALL, "rounds": 2, **settings}


# ---------------------------------------------------------------- where is searched


def test_ranges_values_and_declared_ones() -> None:
    lr, lam = space()
    assert (lr.name, lr.low, lr.high, lr.log) == ("lr", 0.001, 1.0, True)
    assert (lam.name, lam.low, lam.high, lam.log) == ("options.lam", 0.01, 10.0, True)
    assert space(lr="1e-4..1e-1:log")[0] == Axis("lr", 1e-4, 0.1, True)
    assert space(lam=(0.5, 2))[0] == Axis("options.lam", 0.5, 2.0)
    assert space(batch="10,20,50")[0].values == (10, 20, 50)
    assert space(epochs="1..5")[0] == Axis("epochs", 1, 5, whole=True)
    assert space(optimiser=["sgd", "adam"])[0].values == ("sgd", "adam")
    assert space("fedrep", head_epochs="1..4")[0].whole
    assert ranges(["ditto.lam=0.01..10:log"]) == {"ditto.lam": "0.01..10:log"}


def test_a_method_that_declares_bounds_alone_is_searched_between_them() -> None:
    @dataclass(frozen=True)
    class Options:
        share: float = fk.option(0.5, "a share", low=0, high=1)
        strength: float = fk.option(1.0, "without an end", low=0)
        part: float = fk.option(0.5, "not all", above=0, high=1)

    class Own(fk.METHODS["fedavg"]):  # type: ignore[misc]
        pass

    Own.Options = Options
    found = space_of(make_config({}), Own, {})
    assert [(a.short, a.low, a.high) for a in found] == [("lr", 0.001, 1), ("share", 0, 1), ("part", 0.01, 1)]
    given = make_config({"lr": 0.1, "options": {"share": 0.2}})
    assert [a.short for a in space_of(given, Own, {})] == ["part"]


@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_has_something_to_search(name: str) -> None:
    assert space(name)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ({"lamb": "0..1"}, "unknown setting to search for ditto, 'lamb'"),
        ({"data": "digits,mnist"}, "search data: it is part of what the problem is"),
        ({"seed": "0,1"}, "search seed: it is part of what the problem is"),
        ({"fedprox.mu": "0..1"}, "'fedprox' is not the method that is tuned, 'ditto'"),
        ({"lr": "0..1"}, "search lr: lr='0': accepts a number above 0"),
        ({"lam": "-1..1"}, "search lam: lam='-1': accepts a number of at least 0"),
        ({"momentum": "0..2"}, "search momentum: momentum='2': accepts a number from 0 to 0.999"),
        ({"epochs": "1.5..3"}, "search epochs: epochs='1.5': accepts a whole number"),
        ({"lr": "1..0.1"}, "the range is empty; the lower end comes first"),
        ({"lr": "0.1..1:ln"}, "after the range stands log or nothing"),
        ({"lam": "0..1:log"}, "a logarithmic range begins above 0"),
        ({"lr": "0.1..a"}, "a range has two numbers"),
        ({"batch": "10"}, "two values or more, each once"),
        ({"batch": "10,10"}, "two values or more, each once"),
        ({"optimiser": "0..1"}, "accepts sgd, adam"),
        ({"lr": 3}, "a text, as in '0.01..10:log', a pair"),
        ({"head": "a,b"}, "search head: it is part of"),
    ],
)
def test_what_cannot_be_searched_is_said(said: dict[str, Any], error: str) -> None:
    with pytest.raises(UsageError) as found:
        space(**said)
    assert error in str(found.value)


@pytest.mark.parametrize(
    ("fixed", "said", "error"),
    [({"lr": 0.3}, "lr", r"search lr: it is given, too \(0.3\)"), ({"options": {"lam": 5}}, "ditto.lam", "given, too")],
)
def test_what_is_given_is_not_searched(fixed: dict[str, Any], said: str, error: str) -> None:
    with pytest.raises(UsageError, match=error):
        fk.tune("ditto", search={said: [0.1, 1]}, rounds=1, trials=1, **fixed)


def test_what_would_change_nothing_is_not_searched() -> None:
    config = make_config({"method": "co-pfl", "options": {"lr": 0.001}})
    assert "lr" not in [a.name for a in space_of(config, METHODS["co-pfl"], {}, idle_of(config))]
    with pytest.raises(UsageError, match=r"search lr: would change nothing: its own option lr=0\.001 is used"):
        space_of(config, METHODS["co-pfl"], {"lr": "0.1..1"}, idle_of(config))


def test_a_trial_is_a_run_that_can_be_typed() -> None:
    base = make_config({"method": "ditto", "rounds": 3, "augment": False, "options": {"output": "shared"}})
    config = chosen(base, {"lr": 0.1234, "options.lam": 0.5}, seed=2)
    assert (config.lr, config.options, config.seed) == (0.1234, {"output": "shared", "lam": 0.5}, 2)
    words = command_of(config)
    assert "--lr 0.1234" in words
    assert "--no-augment" in words
    assert words.endswith("--set output=shared --set lam=0.5")
    flags = {"rounds": "3", "augment": "false", "lr": "0.1234", "seed": "2"}
    assert run_config_of("ditto", flags, ["output=shared", "lam=0.5"]).identity() == config.identity()
    assert Axis("lr", 0.001, 0.99999).rounded(0.99996) == 0.99999


# ---------------------------------------------------------------- what Optuna is asked


def study(path: Path | None, axes: list[Axis] | None = None) -> Study:
    return Study(path, axes or [Axis("lr", 0.01, 1.0, True), Axis("batch", values=(5, 10))], seed=3, warmup=2)


def test_what_is_proposed_follows_from_the_seed_and_from_what_was_found(tmp_path: Path) -> None:
    def ask(through: list[Study], trials: int) -> list[Any]:
        found = []
        for one in through:
            with one:
                for _ in range(trials):
                    trial = one.ask()
                    one.tell(trial.number, "done", -abs(trial.values["lr"] - 0.3), {"runs": []})
                    found.append(trial)
        return found

    whole = ask([study(None)], 12)
    first = ask([study(tmp_path / "s.jsonl")], 5)
    assert [*first, *ask([study(tmp_path / "s.jsonl")], 7)] == whole
    near = [abs(t.values["lr"] - 0.3) for t in whole]
    assert min(near[8:]) < 0.2


def test_each_of_few_choices_is_proposed_once(tmp_path: Path) -> None:
    few = [Axis("batch", values=(5, 10)), Axis("augment", values=(True, False)), Axis("epochs", 1, 3, whole=True)]
    with study(tmp_path / "few.jsonl", few) as one:
        for _ in range(10):
            one.ask()
    with study(tmp_path / "few.jsonl", few) as one:
        for _ in range(2):
            one.tell(one.ask().number, "failed", None, {})
        assert one.untried() == []
        asked = [p.values for p in one.begun()] + [t.values for t in one.ended()]
    assert len({repr(sorted(values.items())) for values in asked}) == len(asked) == 2 * 2 * 3
    with study(None) as many:
        assert many.untried() is None


def test_a_trial_below_the_median_is_to_end(tmp_path: Path) -> None:
    with study(tmp_path / "s.jsonl") as one:
        for _ in range(5):
            number = one.ask().number
            assert not any(one.report(number, r, 90.0) for r in (1, 2, 3))
            one.tell(number, "done", 90.0, {})
        good, bad = one.ask().number, one.ask().number
        assert not any(one.report(good, r, 91.0) for r in (1, 2, 3))
        assert [one.report(bad, r, 50.0) for r in (1, 2, 2)] == [False, True, True]
        one.tell(bad, "pruned", None, {"why": "slow", "rounds": 2})
        assert [t.end for t in one.ended()] == ["done"] * 5 + ["pruned"]
        assert [p.number for p in one.begun()] == [good]


def test_a_study_is_json_alone_and_survives_what_befalls_files(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    with study(path) as one:
        one.tell(one.ask().number, "done", 1.0, {"runs": ["a"]})
        with pytest.raises(UsageError, match="at work in another process"):
            study(path)
    lines = path.read_bytes()
    assert all(isinstance(json.loads(line), dict) for line in lines.splitlines())
    path.write_bytes(lines + b'{"op_code": 4, "half')
    with study(path) as one:
        assert len(one.ended()) == 1
        one.ask()
    with study(path) as one:
        assert len(one.begun()) == 1
    path.write_bytes(b"\x80\x04cos\nsystem\n" + lines)
    with pytest.raises(DataError, match="damaged in line 1"):
        study(path)
    path.write_bytes(lines)
    with pytest.raises(DataError, match="it searches lr, batch"):
        study(path, [Axis("momentum", 0, 0.9)])
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    with pytest.raises(DataError, match="cannot be opened"):
        study(link)


# ---------------------------------------------------------------- searches


def search(runs: Path, method: str = "fedavg", trials: int = 3, **settings: Any) -> Search:
    config = make_config({**small(method, runs_dir=str(runs), validation_share=0.2), **settings})
    axes = [Axis("lr", 0.001, 0.5, True)]
    return Search(config, METHODS[method], axes, [0, 1], trials)


def test_the_best_on_validation_is_chosen_and_only_its_test_value_is_told(tmp_path: Path) -> None:
    found = tune(search(tmp_path))
    assert [t.state for t in found.trials] == ["done"] * 3
    assert found.best is not None
    assert found.best.score == max(t.score for t in found.trials)
    assert [t.number for t in found.trials if t.test == t.test] == [found.best.number]
    runs = {i.id: i for i in Catalogue(tmp_path).runs()}
    assert len(runs) == 6
    own = [runs[name].result or {} for name in found.best.runs]
    assert found.best.score == pytest.approx(sum(r["validation"]["macro"] for r in own) / 2)
    assert found.best.test == pytest.approx(sum(r["accuracy"]["macro"] for r in own) / 2)
    assert all(runs[n].config["lr"] == t.settings["lr"] for t in found.trials for n in t.runs)
    assert ranked(found.trials, higher=False)[-1].number == found.best.number
    assert found.settings == {"lr": found.best.settings["lr"]}
    assert "test" not in json.dumps(found.to_dict()["trials"])
    assert found.best.words() in found.to_markdown()


def test_it_goes_on_where_it_was_and_adds_trials(tmp_path: Path) -> None:
    whole = tune(replace(search(tmp_path / "whole", trials=4), seeds=[0]))
    part = replace(search(tmp_path / "part", trials=2), seeds=[0])
    tune(part)
    with Study(part.store, part.space, part.base.seed, 2) as one:
        begun = one.ask()  # as if killed while it ran
    before = {i.id for i in Catalogue(tmp_path / "part").runs()}
    told: list[int] = []
    found = tune(replace(part, trials=4), tell=lambda t: told.append(t.number))
    assert told == [2, 3]
    assert begun.number == 2
    assert [(t.settings, t.score) for t in found.trials] == [(t.settings, t.score) for t in whole.trials]
    assert len({i.id for i in Catalogue(tmp_path / "part").runs()} - before) == 2
    again = tune(replace(part, trials=4), tell=lambda t: told.append(t.number))
    assert told == [2, 3]
    assert again.best == found.best


def test_a_study_is_of_the_data_that_the_files_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "sites"
    home.mkdir()
    (home / "a.csv").write_text("x,label\n1,0\n2,1\n")

    def store(**how: Any) -> Path | None:
        return search(tmp_path / "runs", data=str(home), **how).store

    first = store()
    (home / "a.csv").touch()
    assert store() == first
    (home / "a.csv").write_text("x,label\n2,0\n1,1\n")
    changed = store()
    assert changed != first
    (home / "b.csv").write_text("x,label\n2,0\n1,1\n")
    assert store() not in (first, changed)
    monkeypatch.setattr("fedkin.sweep.tuning.VERSION", "0.0.0")
    (home / "b.csv").unlink()
    assert store() != changed


def test_when_all_has_been_tried_it_is_said(tmp_path: Path) -> None:
    few = replace(search(tmp_path, trials=5), seeds=[0], space=[Axis("lr", values=(0.1, 0.2))])
    found = tune(few)
    assert sorted(t.settings["lr"] for t in found.trials) == [0.1, 0.2]
    assert found.remarks == ["all 2 combinations have been tried"] == tune(few).remarks
    assert tune(replace(few, trials=2)).remarks == []


def test_a_trial_that_was_stopped_has_the_rounds_that_it_did() -> None:
    def hear(event: Any) -> None:
        if isinstance(event, RoundRecord):
            raise fk.StopTraining

    (trial,) = fk.tune("fedavg", trials=1, rounds=3, on_event=hear, **SMALL).trials
    assert (trial.state, trial.rounds, trial.why) == ("done", 1, "stopped early: seed 0 after round 1")


@pytest.mark.slow
def test_two_processes_find_what_one_does_where_nothing_is_pruned(tmp_path: Path) -> None:
    one = tune(replace(search(tmp_path / "one", trials=2), prune=False))
    two = tune(replace(search(tmp_path / "two", trials=2), prune=False), jobs=2)
    assert [(t.settings, t.score) for t in one.trials] == [(t.settings, t.score) for t in two.trials]


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_trial_that_does_badly_ends_early(tmp_path: Path, jobs: int) -> None:
    """The study is made to have seen better: whatever comes is pruned at the second round."""
    one = replace(search(tmp_path, trials=6, rounds=5, checkpoint_every=1), seeds=[0, 1])
    tmp_path.mkdir(exist_ok=True)
    with Study(one.store, one.space, 0, 2) as study_:
        for _ in range(5):
            number = study_.ask().number
            for r in range(1, 6):
                study_.report(number, r, 101.0)
            study_.tell(number, "done", 101.0, {"validation": [101.0], "test": [1.0], "rounds": 5})
    found = tune(one, jobs=jobs)
    last = found.trials[-1]
    assert (last.state, last.rounds, last.why.partition(":")[0]) == ("pruned", 2, "pruned after round 2")
    infos = Catalogue(tmp_path).runs()
    first = next(i for i in infos if i.seed == 0)
    assert (first.status, first.rounds_done) == ("interrupted", 2)
    if jobs == 1:  # the other seed comes later, and is not even begun; beside it, it may be further
        assert sorted(i.rounds_done for i in infos) == [0, 2]


def test_from_python_with_a_network_and_data_of_ones_own() -> None:
    import numpy as np
    from torch import nn

    rng = np.random.default_rng(0)
    sites = [(rng.normal(size=(20, 4)).astype("float32"), np.arange(20) % 2) for _ in range(3)]
    found = fk.tune(
        "fedprox", clients=sites, model=lambda: nn.Linear(4, 2), rounds=1, epochs=1,
        search={"lr": (0.01, 0.5, "log"), "mu": [0.01, 1.0]}, trials=3,
    )  # fmt: skip
    assert isinstance(found, Tuned)
    assert found.study is None
    assert set(found.settings) == {"lr", "options"}
    assert repr(found).startswith("Tuned(fedprox: lr=")
    assert fk.run("fedprox", clients=sites, model=lambda: nn.Linear(4, 2), rounds=1, epochs=1, **found.settings)


def test_without_validation_samples_there_is_nothing_to_go_by() -> None:
    with pytest.raises(UsageError, match="tuned on validation samples, and none are set aside"):
        fk.tune("fedavg", validation_share=0, rounds=1, trials=1)
    with pytest.raises(UsageError, match="trials=0"):
        fk.tune("fedavg", trials=0)
    asked = request(method="fedavg", validation_share=0.2)
    assert asked.config.validation_share == 0.2


def test_trials_that_all_fail_end_the_search(tmp_path: Path) -> None:
    wrong = search(tmp_path, trials=9, optimiser="adam", momentum=0.5)
    with pytest.raises(UsageError, match="goes with optimiser sgd"):
        tune(wrong)

    class Broken(METHODS["fedavg"]):  # type: ignore[misc]
        def round(self, fed: Any, cohort: Any) -> None:
            raise FedKinError("out of order")

    with pytest.raises(FedKinError, match="every trial fails: out of order"):
        fk.tune(Broken, rounds=1, trials=9, **SMALL)


def test_a_trial_that_diverged_is_never_chosen(tmp_path: Path) -> None:
    one = replace(search(tmp_path, trials=2), space=[Axis("lr", values=(0.05, 1e30))], seeds=[0])
    found = tune(replace(one, trials=4))
    broken = [t for t in found.trials if t.settings["lr"] == 1e30]
    assert broken
    assert all(t.state == "failed" and t.why.startswith("diverged") for t in broken)
    assert found.best is not None
    assert found.best.settings["lr"] == 0.05


def test_on_the_command_line(tmp_path: Path) -> None:
    flags = [f"--{n.replace('_', '-')}={v}" for n, v in {**SMALL, "rounds": 2, "runs_dir": str(tmp_path)}.items()]
    words = ["tune", "ditto", "--trials", "2", "--search", "lr=0.01,0.1", *flags]
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["command"].startswith("fedkin run ditto --clients 5")
    assert f"--lr {found['best']['settings']['lr']}" in found["command"]
    assert "20 % of each client's training samples are set aside for validation" in done.stderr
    again = CliRunner().invoke(app, words)
    assert "which goes on" in again.stderr
    assert "on which nothing was chosen" in " ".join(again.stdout.split())
    bad = CliRunner().invoke(app, ["tune", "ditto", "--search", "lr"])
    assert bad.exit_code == 2
    assert "write NAME=LOW..HIGH" in bad.output


def test_without_optuna_tune_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.delitem(sys.modules, "fedkin.sweep.study")
    with pytest.raises(UsageError, match=r"needs Optuna: pip install 'fedkin\[tune\]'"):
        fk.tune("fedavg", trials=1, rounds=1)


def test_nothing_else_needs_optuna() -> None:
    """One module imports it, and that one is imported when somebody tunes."""
    source = Path(fk.__file__).parent
    lines = [(path.name, line) for path in source.rglob("*.py") for line in path.read_text().splitlines()]
    assert {name for name, line in lines if line.split()[:2] in (["import", "optuna"], ["from", "optuna"])} == {
        "study.py"
    }
    assert [
        name for name, line in lines if line.startswith(("import fedkin.sweep.study", "from fedkin.sweep.study"))
    ] == []


def test_the_first_seed_is_what_is_reported(tmp_path: Path) -> None:
    heard: list[RoundRecord] = []
    found = fk.tune(
        "fedavg", trials=1, seeds=[4, 5], on_event=heard.append, runs_dir=str(tmp_path), rounds=2, **SMALL
    )  # fmt: skip
    assert found.seeds == [4, 5]
    lines = [json.loads(line) for line in Path(str(found.study)).read_text().splitlines()]
    reported = [line["intermediate_value"] for line in lines if "intermediate_value" in line]
    scores = [e.choice for e in heard if isinstance(e, RoundRecord)]
    assert reported == scores[:2]
