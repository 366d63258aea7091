"""One runner, in every mode: whatever is shared, laid together or spread, each cell gives what it gives by itself."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import fedkin as fk
from fedkin.cli.application import app
from fedkin.config import Config, make_config
from fedkin.errors import UsageError
from fedkin.methods import METHODS
from fedkin.methods.fedavg import FedAvg
from fedkin.rounds import Event, Job, RoundRecord, run_config
from fedkin.runs.catalogue import Catalogue, Past
from fedkin.runs.folder import RunFolder
from fedkin.runs.start import resume, start
from fedkin.sweep.processes import least_loaded
from fedkin.sweep.runner import Cell, Quiet, Sweep, run_sweep
from fedkin.sweep.trainings import batches

BASE: dict[str, Any] = {
    "clients": 5,
    "rounds": 3,
    "epochs": 1,
    "samples_per_client": 40,
    "way": "each",
    "device": "auto",
    "lr": 0.05,
}
CELLS: list[dict[str, Any]] = [
    {"method": "fedavg"},
    {"method": "ditto", "eval_every": 2},
    {"method": "ditto", "eval_every": 2, "options": {"output": "shared"}},
    {"method": "ditto", "eval_every": 2, "eval_point": "after_local"},
    {"method": "fedcap", "attack": "sf"},
    {"method": "fedcap", "attack": "sf", "options": {"output": "customised"}},
    {"method": "c-pfl", "options": {"finetune_epochs": 0}},
    {"method": "c-pfl", "options": {"finetune_epochs": 2}},
    {"method": "c-pfl", "options": {"finetune_epochs": 3}},
    {"method": "fedavg", "seed": 1},
]
"""Seven trainings: evaluated in three ways, in two, tuned in three, and by themselves."""


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDKIN_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(METHODS, "_entries", dict(METHODS._entries))


def tiny(**settings: Any) -> Config:
    return make_config({**BASE, **settings})


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[RunFolder]:
    """Each cell by itself."""
    home = str(tmp_path_factory.mktemp("alone"))
    return [RunFolder.open(start(tiny(**cell, runs_dir=home)).run or "") for cell in CELLS]


TIMES = {"seconds", "training", "evaluating", "writing", "wall"}


def written(folder: RunFolder) -> dict[str, Any]:
    """What a run's tables say, without times."""
    names = ("rounds", "clients", "exchanges", "traffic", "notes", "events")
    found = {name: folder.table(name) for name in names}
    return {name: {k: repr(v) for k, v in table.items() if k not in TIMES} for name, table in found.items()}


MODES: list[Any] = [
    {},
    {"together": 3},
    {"devices": ["cpu", "cpu"], "together": 2},
    pytest.param({"jobs": 3}, marks=pytest.mark.slow),
    pytest.param({"devices": ["cpu"]}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_every_mode_gives_what_each_cell_gives_by_itself(mode: dict[str, Any], alone: list[RunFolder]) -> None:
    configs = [tiny(**cell) for cell in CELLS]
    sweep = run_sweep(configs, **mode)
    assert [c.error for c in sweep.cells] == [""] * len(CELLS)
    assert {c.state for c in sweep.cells} == {"done"}
    for cell, lone in zip(sweep.cells, alone, strict=True):
        folder = Catalogue().find(cell.run or "")
        assert (folder.info.status, folder.info.identity) == ("finished", cell.config.identity())
        assert written(folder) == written(lone), cell.name
        told, before = folder.info.result or {}, lone.info.result or {}
        assert set(told) == set(before)
        for key in ("accuracy", "best", "bytes", "detection", "diverged", "rounds_done", "failed", "backdoor"):
            assert told.get(key) == before.get(key), (cell.name, key)
        assert folder.info.rounds_done == 3
        one, other = resume(folder), resume(lone)  # the models are there, and are the same
        for client in range(5):
            assert np.array_equal(one._rows[client], other._rows[client]), (cell.name, client)
        assert cell.outcome.accuracy == one.accuracy
        assert [r.round for r in cell.records] == [r.round for r in one.history]
    assert len({c.run for c in sweep.cells}) == len(CELLS), "each has a folder of its own"
    assert run_sweep(configs, **mode).skipped == len(CELLS)


def test_a_training_is_done_once(monkeypatch: pytest.MonkeyPatch) -> None:
    advanced: list[str] = []
    real = Job.advance
    monkeypatch.setattr(Job, "advance", lambda job: advanced.append(job.config.method) or real(job))
    run_sweep([tiny(**cell) for cell in CELLS])
    assert {m: advanced.count(m) for m in advanced} == {"fedavg": 6, "ditto": 3, "fedcap": 3, "c-pfl": 3}
    advanced.clear()
    run_sweep([tiny(**cell) for cell in CELLS], tracked=False, together=8)
    assert len(advanced) == 15


def test_what_goes_together_shares_data_network_and_way() -> None:
    configs = [tiny(), tiny(method="ditto"), tiny(method="local", way="batched"), tiny(seed=1), tiny(seed=2)]
    assert batches(configs, 2) == [[[0], [1]], [[2]], [[3], [4]]]
    shared = [tiny(**cell) for cell in CELLS]
    assert batches(shared) == [[[0]], [[1, 2, 3]], [[4, 5]], [[6, 7, 8]], [[9]]]
    assert batches(shared, 9) == [[[0], [1, 2, 3], [4, 5], [6, 7, 8], [9]]]
    assert batches(shared, apart=[1, 7])[1:] == [[[1]], [[2, 3]], [[4, 5]], [[6, 8]], [[7]], [[9]]]


# ---------------------------------------------------------------- cut short


class Doing(Quiet):
    """Does something once, when a cell has told of a round."""

    def __init__(self, what: Any, method: str = "ditto", round: int = 1) -> None:
        self._what, self._method, self._round = what, method, round
        self.said: list[str] = []

    def listener(self, cell: Cell) -> Any:
        hear = super().listener(cell)

        def both(event: Event) -> None:
            hear(event)
            if isinstance(event, RoundRecord) and (cell.config.method, event.round) == (self._method, self._round):
                what, self._what = self._what, lambda cell: None
                what(cell)

        return both

    def say(self, line: str) -> None:
        self.said.append(line)


LONG = [tiny(method=m, seed=s, rounds=400, eval_every=1, checkpoint_every=1) for m in ("ditto", "fedavg") for s in (0,)]


def killing(cell: Cell) -> None:
    """The process in which a cell runs: the one that has its folder locked, so that no other cell is at work there."""
    mine = Past(None).busy(cell.config)
    assert mine is not None
    os.kill(int(mine.raw["pid"]), signal.SIGKILL)


def test_a_process_that_is_killed_takes_only_its_run_which_goes_on_the_next_time() -> None:
    configs = [replace(config, rounds=12) for config in LONG] + [tiny(method="local", rounds=3)]
    sweep = run_sweep(configs, jobs=2, watcher=lambda cells: Doing(killing, round=3))
    assert [c.state for c in sweep.cells] == ["failed", "done", "done"]
    assert sweep.cells[0].error == "its process ended with status -9"
    lost = Catalogue().find(sweep.cells[0].run or "")
    assert lost.info.status == "interrupted"
    assert lost.info.rounds_done >= 2
    again = run_sweep(configs, jobs=2)
    assert [c.state for c in again.cells] == ["done", "skipped", "skipped"]
    assert again.cells[0].run == lost.info.id
    assert again.cells[0].records[0].round > 2, "from its checkpoint"
    assert again.cells[0].outcome.accuracy == run_config(configs[0]).accuracy
    assert not multiprocessing.active_children()


@pytest.fixture
def handlers() -> Iterator[None]:
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)] == before
    assert not multiprocessing.active_children()


@pytest.mark.parametrize("kind", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_ctrl_c_stops_all_processes_after_their_round(kind: int, handlers: None) -> None:
    configs = [*LONG, tiny(method="local")]
    watcher = Doing(lambda cell: os.kill(os.getpid(), kind))
    sweep = run_sweep(configs, jobs=2, watcher=lambda cells: watcher, signals=True)
    assert sweep.signal == kind
    assert sweep.cells[0].state == "interrupted"
    assert {c.state for c in sweep.cells} <= {"interrupted", "waiting", "done"}
    assert any("stopping after this round" in line for line in watcher.said)
    stopped = [c for c in sweep.cells if c.state == "interrupted" and c.run]
    assert stopped
    for cell in stopped:
        info = Catalogue().find(cell.run or "").info
        assert (info.status, info.stale) == ("interrupted", False), "it stopped by itself"
        assert info.rounds_done == len(cell.records) + 1, "the round it was in is saved, not told"
    first = replace(configs[0], rounds=400)
    watcher = Doing(lambda cell: os.kill(os.getpid(), kind), round=len(stopped[0].records) + 2)
    again = run_sweep([first], watcher=lambda cells: watcher, signals=True)
    assert again.cells[0].records[0].round == len(sweep.cells[0].records) + 2, "and goes on from there"
    assert any("going on with" in line for line in watcher.said)


def test_a_second_ctrl_c_ends_the_processes_at_once(handlers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedkin.runs.start.SAME_REQUEST", 0.0)

    def twice(cell: Cell) -> None:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)

    sweep = run_sweep(LONG, jobs=2, watcher=lambda cells: Doing(twice), signals=True)
    assert sweep.signal == signal.SIGINT
    assert sweep.cells[0].state == "interrupted"
    assert {r.status for r in Catalogue().runs()} == {"interrupted"}


def test_shared_trainings_that_were_cut_short_give_the_same(alone: list[RunFolder], handlers: None) -> None:
    for k, several in ((1, slice(1, 4)), (6, slice(6, 9))):
        configs = [tiny(**cell) for cell in CELLS[several]]
        watcher = Doing(lambda cell: os.kill(os.getpid(), signal.SIGINT), configs[0].method, 2 if k == 1 else 1)
        sweep = run_sweep(configs, watcher=lambda cells, w=watcher: w, signals=True)
        assert [c.state for c in sweep.cells] == ["interrupted"] * 3
        again = run_sweep(configs)
        assert [c.state for c in again.cells] == ["done"] * 3
        assert again.cells[0].run == sweep.cells[0].run
        for cell, lone in zip(again.cells, alone[several], strict=True):
            assert written(Catalogue().find(cell.run or "")) == written(lone)


def test_a_used_up_budget_begins_nothing_new() -> None:
    configs = [tiny(), tiny(seed=1)]
    assert [c.state for c in run_sweep(configs, budget=0.0).cells] == ["waiting"] * 2
    assert [c.state for c in run_sweep(configs, budget=0.0, jobs=2).cells] == ["waiting"] * 2
    slow = Doing(lambda cell: time.sleep(0.3), "fedavg")
    assert [c.state for c in run_sweep(configs, budget=0.2, watcher=lambda cells: slow).cells] == ["done", "waiting"]
    shown = CliRunner().invoke(app, ["compare", "fedavg", "local", "--rounds", "1", "--budget", "0"])
    assert shown.exit_code == 0
    assert "the budget is used up; 2 runs are left" in " ".join(shown.stderr.split())


# ---------------------------------------------------------------- failing


def test_a_cell_that_fails_in_a_process_fails_alone() -> None:
    configs = [tiny(), tiny(clients=5000), tiny(seed=1)]
    sweep = run_sweep(configs, jobs=2)
    assert [c.state for c in sweep.cells] == ["done", "failed", "done"]
    assert "5000" in sweep.cells[1].error


def test_what_goes_wrong_with_a_finished_run_ends_the_sweep_and_is_no_fault_of_the_run() -> None:
    def full(cell: Cell) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        run_sweep([tiny(), tiny(seed=1)], ended=full)
    assert [r.status for r in Catalogue().runs()] == ["finished"]


def test_a_process_that_cannot_begin_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedkin import plugins

    path = tmp_path / "mine.py"
    path.write_text("")
    monkeypatch.setattr(plugins, "_loaded", {})
    plugins.load(path)
    path.write_text("raise SystemExit(3)")
    sweep = run_sweep([tiny(), tiny(seed=1)], jobs=2)
    assert [c.state for c in sweep.cells] == ["failed", "failed"]
    assert "ended with status" in sweep.cells[0].error


# ---------------------------------------------------------------- devices


def test_the_least_loaded_device_is_next() -> None:
    assert least_loaded(2, []) == 0
    assert least_loaded(2, [0]) == 1
    assert least_loaded(3, [0, 1, 0, 2, 1]) == 2
    assert least_loaded(3, [0, 1, 2, 2], among=[2, 1]) == 1
    taken: list[int] = []
    for _ in range(6):
        taken.append(least_loaded(3, taken))
    assert sorted(taken) == [0, 0, 1, 1, 2, 2]


def test_devices_are_checked_before_anything_runs() -> None:
    with pytest.raises(UsageError, match="'abacus'"):
        run_sweep([tiny()], devices=["abacus"])
    with pytest.raises(UsageError, match="give one of them"):
        run_sweep([tiny(device="cpu")], devices=["cpu", "cpu"])
    with pytest.raises(UsageError, match="runs_dir"):
        run_sweep([tiny(), tiny(seed=1)], jobs=2, tracked=False)
    assert not Catalogue().runs()
    words = ["compare", "fedavg", "--devices", "cpu,"]
    assert "--devices 'cpu,'" in CliRunner().invoke(app, words).stderr


MINI = """
name = "mini"
title = "mini"
cite = "us"
[settings]
clients = 5
rounds = 1
epochs = 1
lr = 0.05
[[table]]
name = "t"
title = "t"
metric = "macro"
methods = "rows"
[[table.column]]
name = "all"
[[table.row]]
name = "FedAvg"
set = { method = "fedavg" }
numbers = [60.0]
[[table.row]]
name = "Local"
set = { method = "local" }
numbers = [60.0]
"""


def test_the_commands_spread_over_devices(tmp_path: Path) -> None:
    words = ["--rounds", "1", "--clients", "5", "--epochs", "1", "--devices", "cpu,cpu"]
    shown = CliRunner().invoke(app, ["compare", "fedavg", "local", *words])
    assert shown.exit_code == 0, shown.stderr
    runs = Catalogue().runs()
    assert [r.status for r in runs] == ["finished"] * 2
    assert len({r.raw["pid"] for r in runs} - {os.getpid()}) in (1, 2)
    assert os.getpid() not in {r.raw["pid"] for r in runs}
    assert {r.given["device"] for r in runs} == {"cpu"}
    path = tmp_path / "mini.toml"
    path.write_text(MINI)
    shown = CliRunner().invoke(app, ["reproduce", str(path), "--seeds", "1", "--devices", "cpu,cpu"])
    assert shown.exit_code == 0, shown.stderr
    runs = Catalogue().runs()[2:]
    assert [r.status for r in runs] == ["finished"] * 2
    assert os.getpid() not in {r.raw["pid"] for r in runs}


# ---------------------------------------------------------------- from Python

SMALL: dict[str, Any] = {"rounds": 2, "clients": 5, "epochs": 1, "way": "each", "samples_per_client": 40}


def models(results: list[Any]) -> list[Any]:
    return [[np.asarray(r._rows[c]).tolist() for c in range(5)] for r in results]


def test_python_reads_what_is_finished_and_spreads(tmp_path: Path) -> None:
    plain, rows = fk.compare(["fedavg", "ditto"], seeds=2, **SMALL)
    for mode in ({}, {"together": 2}, {"jobs": 2}):
        home = str(tmp_path / "".join(mode))
        events: list[Event] = []
        results, table = fk.compare(
            ["fedavg", "ditto"], seeds=2, runs_dir=home, on_event=events.append, **mode, **SMALL
        )
        assert models(results) == models(plain)
        assert [r["macro"] for r in table] == [r["macro"] for r in rows]
        assert [(r.method, r.seed) for r in results] == [(r.method, r.seed) for r in plain]
        assert len(events) == 4 * 3
        events.clear()
        again, _ = fk.compare(["fedavg", "ditto"], seeds=2, runs_dir=home, on_event=events.append, **mode, **SMALL)
        assert (models(again), events) == (models(plain), [])
        assert [r.run for r in again] == [r.run for r in results]
        assert len(Catalogue(home).runs()) == 4
    fk.compare(["fedavg", "ditto"], seeds=2, runs_dir=home, fresh=True, **SMALL)
    assert len(Catalogue(home).runs()) == 8


class Own(FedAvg):
    broken = False

    def round(self, fed: Any, cohort: Any) -> None:
        if Own.broken:
            raise RuntimeError("out of luck")
        super().round(fed, cohort)


def test_python_objects_are_always_run_and_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {**SMALL, "runs_dir": str(tmp_path)}
    for _ in range(2):
        results, _ = fk.compare([Own, FedAvg], **given)
        assert [r.method for r in results] == ["own", "fedavg"]
    assert sorted(r.method for r in Catalogue(tmp_path).runs()) == ["fedavg", "own", "own"]
    assert models(fk.compare([Own], together=2, seeds=2, **given)[0][:1]) == models(results[:1])
    for wrong in ({"jobs": 2}, {"devices": ["cpu", "cpu"]}):
        with pytest.raises(UsageError, match="method given as Python objects"):
            fk.compare([Own, "fedavg"], **wrong, **given)
    METHODS.register("own")(Own)
    with pytest.raises(UsageError, match="method given as Python objects"):
        fk.compare(["own", "fedavg"], jobs=2, **given)
    monkeypatch.setattr(Own, "broken", True)
    count = len(Catalogue(tmp_path).runs())
    with pytest.raises(RuntimeError, match="out of luck"):
        fk.compare([Own, "local"], fresh=True, **given)
    assert len(Catalogue(tmp_path).runs()) == count + 1, "the first failure ends it"


def test_a_run_with_a_network_of_ones_own_is_no_other_run(tmp_path: Path) -> None:
    from torch import nn

    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    config = tiny(runs_dir=str(tmp_path))
    start(config, model=net)
    assert run_sweep([config]).skipped == 0
    assert run_sweep([config]).skipped == 1


def test_ctrl_c_from_python_is_ctrl_c(tmp_path: Path) -> None:
    def stop(event: Event) -> None:
        if isinstance(event, RoundRecord):
            raise KeyboardInterrupt

    for mode in ({}, {"jobs": 2}):
        with pytest.raises(KeyboardInterrupt):
            fk.compare(["fedavg", "local"], runs_dir=str(tmp_path), fresh=True, on_event=stop, **mode, **SMALL)
    assert threading.active_count() < 10
    assert not multiprocessing.active_children()


def test_runs_that_are_done_are_not_held_in_memory() -> None:
    sweep: Sweep = run_sweep([tiny(rounds=1)], tracked=False)
    assert sweep.cells[0].outcome.source._rows.numel() == 0
