"""More rounds than a run was begun with: the run that it would have been with them from the start, or refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import fedkin as fk
from fedkin.cli.application import app
from fedkin.methods import METHODS
from fedkin.methods.fedavg import FedAvg
from fedkin.rounds import RoundRecord
from fedkin.runs import checkpoint
from fedkin.runs.catalogue import Catalogue
from fedkin.runs.folder import RunFolder

SMALL: dict[str, Any] = {"clients": 5, "samples_per_client": 12, "epochs": 1, "model": "mlp", "participation": 0.6}
TIMES = ("seconds", "training", "evaluating", "writing", "wall")
FOLLOWS = {"fedpkda"}


def rows(result: fk.Result) -> Tensor:
    return torch.stack([result._rows[c] for c in range(len(result.per_client))])


def timeless(record: RoundRecord) -> dict[str, Any]:
    return {k: v for k, v in asdict(record).items() if k not in TIMES}


def same(one: fk.Result, two: fk.Result) -> None:
    assert torch.equal(rows(one), rows(two))
    assert str([timeless(r) for r in one.history]) == str([timeless(r) for r in two.history])
    assert [replace(e, seconds=0) for e in one.exchanges] == [replace(e, seconds=0) for e in two.exchanges]
    tables = [RunFolder.open(str(r.run)) for r in (one, two)]
    for name, out in (("rounds", TIMES), ("clients", ()), ("exchanges", ("seconds",)), ("traffic", ("seconds",))):
        found = [{k: v for k, v in t.table(name).items() if k not in out} for t in tables]
        assert str(found[0]) == str(found[1]), name
    assert tables[0].info.identity == tables[1].info.identity
    assert tables[0].info.settings() == tables[1].info.settings()


@pytest.mark.parametrize("name", [m for m in METHODS if m not in FOLLOWS])
def test_a_finished_run_with_more_rounds_is_the_longer_run(name: str, tmp_path: Path) -> None:
    short = fk.run(name, rounds=2, runs_dir=str(tmp_path / "a"), checkpoint_every=1, **SMALL)
    longer = fk.resume(str(short.run), rounds=4)
    same(longer, fk.run(name, rounds=4, runs_dir=str(tmp_path / "b"), checkpoint_every=1, **SMALL))
    info = RunFolder.open(str(longer.run)).info
    assert (info.status, info.rounds_total, info.rounds_done) == ("finished", 4, 4)
    assert [(e["from"], e["to"], e["after_round"]) for e in info.extended] == [(2, 4, 2)]
    assert "final" in checkpoint.names(info.path / "checkpoints")


@pytest.mark.parametrize(("name", "every"), [("fedavg", 10), ("fedbabu", 10), ("fedbabu", 2), ("ditto", 2)])
def test_wherever_the_checkpoints_are(name: str, every: int, tmp_path: Path) -> None:
    """Also where the last round is evaluated only because it was the last one, and where what a method does at the end
    can only be undone by going back, if need be to the first round."""
    how = {**SMALL, "checkpoint_every": every, "eval_every": 2}
    short = fk.run(name, rounds=3, runs_dir=str(tmp_path / "a"), **how)
    assert [r.round for r in short.history][:2] == [2, 3]
    longer = fk.resume(str(short.run), rounds=5)
    same(longer, fk.run(name, rounds=5, runs_dir=str(tmp_path / "b"), **how))


def interrupted(after: int, **how: Any) -> str:
    def stop(event: Any) -> None:
        if getattr(event, "round", 0) == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fk.run(on_event=stop, **how)
    return str(Catalogue(how["runs_dir"]).find("last").path)


def test_an_interrupted_run_with_other_rounds(tmp_path: Path) -> None:
    how = {**SMALL, "checkpoint_every": 1, "method": "fedper"}
    for rounds in (3, 6):
        stopped = interrupted(2, rounds=5, runs_dir=str(tmp_path / f"a{rounds}"), **how)
        other = fk.resume(stopped, rounds=rounds)
        same(other, fk.run(rounds=rounds, runs_dir=str(tmp_path / f"b{rounds}"), **how))


def test_a_crash_on_the_way_to_more_rounds_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once run.json says how many rounds there are to be, a plain resume does them, whatever else was written."""
    how = {**SMALL, "checkpoint_every": 1}
    whole = fk.run("ditto", rounds=4, runs_dir=str(tmp_path / "b"), **how)
    for place in ("resumed", "attach", "checkpoint", "after_round"):
        short = fk.run("ditto", rounds=2, runs_dir=str(tmp_path / place), **how)

        def crash(*given: Any, **named: Any) -> None:
            raise RuntimeError("the power went")

        with monkeypatch.context() as patch:
            patch.setattr(f"fedkin.runs.recorder.Recorder.{place}", crash)
            with pytest.raises(RuntimeError):
                fk.resume(str(short.run), rounds=4)
        same(fk.resume(str(short.run)), whole)


def test_twice(tmp_path: Path) -> None:
    how = {**SMALL, "checkpoint_every": 1}
    run = fk.run("c-pfl", rounds=1, runs_dir=str(tmp_path / "a"), **how).run
    fk.resume(str(run), rounds=2)
    same(fk.resume(str(run), rounds=3), fk.run("c-pfl", rounds=3, runs_dir=str(tmp_path / "b"), **how))
    assert [(e["from"], e["to"]) for e in RunFolder.open(str(run)).info.extended] == [(1, 2), (2, 3)]


# ------------------------------------------------------------ what is refused


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> str:
    where = tmp_path_factory.mktemp("short")
    return str(fk.run("fedavg", rounds=3, runs_dir=str(where), checkpoint_every=1, **SMALL).run)


def test_rounds_that_are_done_stay_done(short: str) -> None:
    before = (Path(short) / "run.json").read_bytes()
    with pytest.raises(fk.UsageError, match="has done 3 rounds, which stay done"):
        fk.resume(short, rounds=2)
    assert (Path(short) / "run.json").read_bytes() == before
    assert len(fk.resume(short, rounds=3).history) == 3  # nothing to do


@pytest.mark.parametrize(
    ("method", "changed", "reason"),
    [
        (
            "fedavg",
            {"lr_schedule": "cosine"},
            "its learning rates \\(lr_schedule=cosine\\) follow",
        ),
        ("fedpkda", {}, "its method \\(fedpkda\\) asks how many rounds"),
        ("fedavg", {"checkpoint_every": 0}, "no sound checkpoint"),
    ],
)
def test_what_follows_the_number_of_rounds_is_refused(
    method: str, changed: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    how = {**SMALL, "checkpoint_every": 1, **changed}
    run = fk.run(method, rounds=2, runs_dir=str(tmp_path), **how).run
    before = (Path(str(run)) / "run.json").read_bytes()
    with pytest.raises(fk.FedKinError, match=reason):
        fk.resume(str(run), rounds=4)
    assert (Path(str(run)) / "run.json").read_bytes() == before


def test_schedules_that_do_not_follow_it_go_on(tmp_path: Path) -> None:
    how = {**SMALL, "checkpoint_every": 1, "lr_schedule": "step:every=2,gamma=0.5,warmup=2"}
    run = fk.run("fedavg", rounds=2, runs_dir=str(tmp_path / "a"), **how).run
    same(fk.resume(str(run), rounds=5), fk.run("fedavg", rounds=5, runs_dir=str(tmp_path / "b"), **how))


def test_a_method_of_ones_own_that_asks_is_found_out(tmp_path: Path) -> None:
    class Halfway(FedAvg):
        def round(self, fed: fk.Federation, cohort: fk.Clients) -> None:
            if fed.round < fed.rounds / 2:
                super().round(fed, cohort)

    run = fk.run(Halfway, rounds=2, runs_dir=str(tmp_path), checkpoint_every=1, **SMALL).run
    with pytest.raises(fk.UsageError, match="asks how many rounds there will be"):
        fk.resume(str(run), rounds=4, method=Halfway)


def test_from_the_command_line(short: str, tmp_path: Path) -> None:
    folder = tmp_path / Path(short).name
    shutil.copytree(short, folder)
    done = CliRunner().invoke(app, ["resume", str(folder), "--rounds", "4", "--json"])
    assert done.exit_code == 0, done.output
    assert [r["round"] for r in json.loads(done.stdout)["history"]] == [1, 2, 3, 4]
    shown = CliRunner().invoke(app, ["show", str(folder)])
    assert "more rounds 3 to 4, on " in shown.stdout
    fewer = CliRunner().invoke(app, ["resume", str(folder), "--rounds", "2"])
    assert fewer.exit_code == 2
    assert "which stay done" in fewer.stderr
