"""One restore: whether its clients were simulated or real sites, a run goes back by the same code, and nothing changes
before everything has been looked at."""

from __future__ import annotations

import copy
import json
import random
import shutil
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_deploy_worker import TRAVELS
from test_track_resume import TINY, flip, frozen, only_run, same, stop_after, tables
from torch import Tensor

from fedkin import api
from fedkin.config import make_config
from fedkin.core.messages import for_some
from fedkin.data import load
from fedkin.deploy.greeting import Facts, together
from fedkin.deploy.server import prepare_deployed
from fedkin.deploy.wire import pack, unpack
from fedkin.deploy.worker import Worker
from fedkin.engines.remote import Arrival, Bounds, Delivery, Remote
from fedkin.errors import DataError, FedKinError
from fedkin.rounds import Job, Result, prepare
from fedkin.runs import checkpoint
from fedkin.runs.folder import RunFolder
from fedkin.runs.recorder import Recorder
from fedkin.runs.restore import restore
from fedkin.runs.start import begin, follow
from fedkin.runs.tree import Packer
from fedkin.testing import job_of

SETTINGS: dict[str, Any] = {
    "method": "ditto",
    "rounds": 5,
    "epochs": 1,
    "lr": 0.05,
    "way": "each",
    "checkpoint_every": 2,
}


class InPerson:
    """The sites of a deployment in this process: messages go to their workers, packed as on the wire."""

    def __init__(self, workers: Sequence[Worker], facts: Sequence[Facts]) -> None:
        self.workers, self.facts, self.came, self.attempt = workers, facts, dict[int, Arrival](), time.time_ns() >> 10

    def fix_clients(self, job: Job, folder: Path) -> None:
        """All take part, from where the server is; what it could go back to is told with every message."""
        told = {k: v for k, v in job.config.to_dict().items() if k in TRAVELS}
        for place, worker in enumerate(self.workers):
            seat = {"place": place, "clients": 2, "labels": together(self.facts)[2], "config": told}
            fields = {"kind": "join", "run": "run-1", "attempt": self.attempt, "round": job.fed.round, **seat}
            reply = unpack(worker.answer({"own": pack({"initial": job.site.initial}, fields)}))
            assert reply.fields["kind"] == "joined", reply.fields
        assert isinstance(job.engine, Remote)
        job.engine._checkpoints = lambda: [int(n[6:]) for n in checkpoint.names(folder / "checkpoints") if n[0] == "r"]

    def send(
        self, ids: Sequence[int], message: Mapping[str, Any], fields: Mapping[str, Any], bounds: Bounds
    ) -> dict[int, str]:
        for row, client in enumerate(ids):
            whole = {"kind": "call", "run": "run-1", "attempt": self.attempt, **fields}
            own = for_some(message, slice(row, row + 1))
            reply = unpack(self.workers[client].answer({"own": pack(own, whole)}))
            assert reply.fields["kind"] == "reply", reply.fields
            self.came[client] = Delivery(reply.values, reply.fields)
        return {}

    def collect(self) -> dict[int, Arrival]:
        came, self.came = self.came, {}
        return came

    def cancel(self, ids: Sequence[int]) -> None: ...

    def present(self, client: int) -> bool:
        return True


@dataclass
class Deployed:
    """Two sites that take part in one run; `job` makes the server's half of it anew, as after a crash."""

    workers: list[Worker]
    facts: list[Facts]

    @classmethod
    def of(cls, folder: Path) -> Deployed:
        digits, workers = load("digits"), []
        for i, name in enumerate(("oslo", "paris")):
            folder.mkdir(parents=True, exist_ok=True)
            rows = slice(60 * i, 60 * (i + 1))
            np.savez(folder / f"{name}.npz", x=digits.x[rows], y=digits.y[rows])
            workers.append(Worker(name, folder / f"{name}.npz", folder / name, lambda text: None, secret=False))
        hellos = [unpack(w.answer({"own": pack({}, {"kind": "hello"})})).fields for w in workers]
        return cls(workers, [Facts.of(hello) for hello in hellos])

    def job(self, runs_dir: Path) -> Job:
        config = make_config({**SETTINGS, "runs_dir": str(runs_dir)})
        return prepare_deployed(config, self.facts, Remote(InPerson(self.workers, self.facts), ["oslo", "paris"]))


Make = Callable[[Path], Job]


@pytest.fixture(params=["simulated", "deployed"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    """Prepares the same run again and again."""
    if request.param == "deployed":
        pytest.importorskip("cryptography")
        return Deployed.of(tmp_path / "sites").job
    own = {"clients": 3, "partition": "iid", "samples_per_client": 30, "device": "cpu"}
    return lambda runs_dir: prepare(make_config({**SETTINGS, **own, "runs_dir": str(runs_dir)}))


def stopped(make: Make, where: Path, at: int = 5) -> RunFolder:
    """A run that ended in the middle; of a deployed one the folder says which sites took part."""
    job = make(where)
    with pytest.raises(KeyboardInterrupt), begin(job, job.config) as recorder:
        followed(job, recorder, stop_after(at))
    (folder,) = where.iterdir()
    if isinstance(job.engine, Remote):
        (folder / "sites.json").write_text("[]")
    return RunFolder.open(folder)


def followed(job: Job, recorder: Recorder, on_event: Any = None) -> Result:
    if isinstance(job.engine, Remote) and isinstance(job.engine.carrier, InPerson):
        job.engine.carrier.fix_clients(job, recorder.folder)
    return follow(job, recorder, on_event)


def gone_on(make: Make, run: RunFolder, said: list[str] | None = None) -> Result:
    """Restored and followed to its end."""
    said = [] if said is None else said
    job = make(run.path.parent)
    with Recorder(run.path, dict(run.info.raw), job.config.checkpoint_every) as recorder:
        restore(job, run, recorder, said.append)
        return followed(job, recorder)


def rewritten(run: RunFolder, change: Callable[[dict[str, Any]], None]) -> None:
    """All its checkpoints, sound, with another content."""
    folder = run.path / "checkpoints"
    for name in checkpoint.names(folder):
        state = checkpoint.load(folder, name, torch.device("cpu"), np.full(9, 30))
        number = state["job"]["round"]
        change(state)
        checkpoint.save(folder, name, number, state)


def whole(make: Make, where: Path) -> Result:
    job = make(where)
    with begin(job, job.config) as recorder:
        return followed(job, recorder)


UNFIT: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "run": (lambda s: s.update(run="another"), "that is of run 'another'"),
    "clients": (lambda s: s["job"].update(losses=torch.zeros(7)), "it is of 7 clients"),
    "width": (lambda s: s["job"]["method"].update(model=torch.zeros(3)), r"'model' is \[3\] where this run has"),
    "round": (lambda s: s["job"].update(round=99), "it is of round 99, the run has 5"),
    "keeps": (lambda s: s["job"]["clients"].update(head=torch.zeros(3, 4)), "keeps 'head'"),
    "late": (lambda s: s["job"].update(generators={}), "it has no 'python'"),
    "removed": (lambda s: s["job"]["federation"].update(removed={55: 0}), "it speaks of client 55"),
    "method": (lambda s: s["job"].pop("method"), "it has no 'method'"),
}


@pytest.mark.parametrize("how", UNFIT)
def test_a_state_that_does_not_fit_is_named_and_changes_nothing(how: str, make: Make, tmp_path: Path) -> None:
    """The server of real sites once took it for damaged: it deleted its checkpoints and began at round 1."""
    run = stopped(make, tmp_path / "runs")
    rewritten(run, UNFIT[how][0])
    before = frozen(run)
    with pytest.raises(DataError, match=UNFIT[how][1]) as error:
        gone_on(make, run)
    assert "nothing was changed" in str(error.value)
    assert frozen(run) == before


def test_nor_does_the_table_of_an_older_version_change(make: Make, tmp_path: Path) -> None:
    """Columns that are missing are made when it is known that the run goes on."""
    run = stopped(make, tmp_path / "runs")
    with sqlite3.connect(run.path / "metrics.sqlite") as base:
        for column in ("metrics", "lr"):
            base.execute(f"ALTER TABLE rounds DROP COLUMN {column}")
    base.close()
    rewritten(run, UNFIT["width"][0])
    before = frozen(run)
    with pytest.raises(DataError):
        gone_on(make, run)
    assert frozen(run) == before


@pytest.mark.parametrize("what", ["split_hash", "parameters", "data_hash"])
def test_another_run_is_refused_before_its_checkpoints_are_looked_at(what: str, make: Make, tmp_path: Path) -> None:
    run = stopped(make, tmp_path / "runs")
    raw = json.loads((run.path / "run.json").read_text())
    raw["prepared"][what] = 7 if what == "parameters" else "other"
    (run.path / "run.json").write_text(json.dumps(raw))
    for path in (run.path / "checkpoints").glob("*.safetensors"):
        flip(path)
    before = frozen(run)
    said: list[str] = []
    with pytest.raises(DataError, match="cannot go on"):
        gone_on(make, RunFolder.open(run.path), said)
    assert said == []
    assert frozen(run) == before


def test_a_damaged_checkpoint_falls_back_to_the_one_before(make: Make, tmp_path: Path) -> None:
    run = stopped(make, tmp_path / "runs")
    flip(run.path / "checkpoints" / "round-000004.safetensors")
    said: list[str] = []
    result = gone_on(make, run, said)
    assert said == [said[0]]
    assert said[0].startswith("checkpoint round-000004 is damaged")
    assert [r.round for r in result.history] == [1, 2, 3, 4, 5]
    assert run.table("rounds")["round"] == [1, 2, 3, 4, 5]
    assert RunFolder.open(run.path).info.status == "finished"


def test_without_a_sound_checkpoint(make: Make, tmp_path: Path) -> None:
    """A simulation begins again; real sites would lose what they keep."""
    run = stopped(make, tmp_path / "runs")
    for path in (run.path / "checkpoints").glob("*.safetensors"):
        flip(path)
    before, said = frozen(run), list[str]()
    if run.info.deployed:
        with pytest.raises(DataError, match="no checkpoint is sound, and sites that begin again would lose"):
            gone_on(make, run, said)
        assert frozen(run) == before
    else:
        again = gone_on(make, run, said)
        assert said[-1] == "no sound checkpoint: starting again from the first round"
        same(whole(make, tmp_path / "whole"), again)


@pytest.mark.parametrize("damage", ["garbage", "gone", "table"])
def test_damaged_metrics_are_repaired(damage: str, make: Make, tmp_path: Path) -> None:
    run = stopped(make, tmp_path / "runs")
    path = run.path / "metrics.sqlite"
    if damage == "garbage":
        path.write_bytes(b"no database at all" * 100)
    elif damage == "gone":
        path.unlink()
    else:
        with sqlite3.connect(path) as base:
            base.execute("DROP TABLE notes")
        base.close()
    said: list[str] = []
    gone_on(make, run, said)
    assert "metrics database is damaged" in said[0]
    assert "as the checkpoint remembers them" in said[1]
    assert run.table("rounds")["round"] == [1, 2, 3, 4, 5]
    with sqlite3.connect(path) as base:
        assert base.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    base.close()


def test_metrics_that_were_repaired_can_be_rewound_again(make: Make, tmp_path: Path) -> None:
    """Rows of single clients are lost, and the run is cut short once more before its next checkpoint: what that counts
    must be the rows of the new tables."""
    run = stopped(make, tmp_path / "runs", at=3)
    with sqlite3.connect(run.path / "metrics.sqlite") as base:
        base.execute("DELETE FROM clients WHERE round = 1")
        base.execute("DROP TABLE notes")
    base.close()
    job = make(run.path.parent)
    with Recorder(run.path, dict(run.info.raw), 0) as recorder:
        restore(job, run, recorder, lambda text: None)
        with pytest.raises(KeyboardInterrupt):
            followed(job, recorder, stop_after(4))
    gone_on(make, RunFolder.open(run.path))
    clients = len(job.site.names)
    assert run.table("clients")["round"] == [r for r in (2, 3, 4, 5) for _ in range(clients)]
    assert run.table("rounds")["round"] == [1, 2, 3, 4, 5]


def test_a_finished_run_whose_models_are_gone_is_left_as_it_is(tmp_path: Path) -> None:
    api.run("ditto", **TINY, runs_dir=str(tmp_path))
    run = only_run(tmp_path)
    flip(run.path / "checkpoints" / "final.safetensors")
    before = frozen(run)
    with pytest.raises(DataError, match="is finished, but the models in its last checkpoint are gone"):
        api.resume(str(run.path))
    assert frozen(run) == before


def test_a_deployed_run_goes_back_to_where_it_was(tmp_path: Path) -> None:
    """The engine's numbers too: losses and steps, which the sites told."""
    pytest.importorskip("cryptography")
    make = Deployed.of(tmp_path / "sites").job
    run = stopped(make, tmp_path / "runs", at=2)
    job = make(tmp_path / "runs")
    with Recorder(run.path, dict(run.info.raw), 2) as recorder:
        restore(job, run, recorder, lambda text: None)
        assert (job.fed.round, job.engine.client_steps > 0) == (2, True)
        assert job.engine.losses.isfinite().all()
        assert [r.round for r in job.history] == [1, 2]
        assert tables(run)["rounds"]["round"] == [1, 2]
        assert RunFolder.open(run.path).info.status == "running"


# ---------------------------------------------------------------- the job itself: all or nothing


class Stateful:
    """An average with a memory, as a rule of one's own may be."""

    memory = 0

    def __call__(self, rows: Tensor, weights: Tensor, start: Tensor) -> Tensor:
        return rows.mean(0)

    def state(self) -> int:
        return self.memory

    def restore(self, state: int) -> None:
        if state == 13:
            raise DataError("13 is no memory of this rule")
        self.memory = state


def advanced(rounds: int = 2) -> Job:
    job = job_of("ditto", rounds=3)
    job.fed._average = Stateful()
    for _ in range(rounds):
        job.advance()
    return job


def remembers(job: Job) -> tuple[str, str]:
    """All of it, bit for bit, but for the time."""
    packer = Packer()
    text = json.dumps(packer.pack({k: v for k, v in job.state().items() if k not in ("clock", "seconds")}))
    return text, repr({name: tensor.tolist() for name, tensor in packer.tensors.items()})


BROKEN: dict[str, Callable[[dict[str, Any]], object]] = {
    **{
        f"without {name}": (lambda s, name=name: s.pop(name))
        for name in ("round", "finished", "method", "clients", "losses", "ways", "history", "federation", "generators")
    },
    "round": lambda s: s.update(round="two"),
    "method": lambda s: s["method"].update(round=1),
    "clients": lambda s: (
        s["clients"]["own"].update(rows=torch.zeros(3, 2))
        if "own" in s["clients"]
        else s["clients"].update(x=torch.zeros(3))
    ),
    "losses": lambda s: s.update(losses=None),
    "ways": lambda s: s["ways"].update(client_steps="many"),
    "history": lambda s: s["history"][0].update(nonsense=1),
    "refusals": lambda s: s.update(refusals=[{"round": 1}]),
    "broken": lambda s: s.update(broken=[1]),
    "clock": lambda s: s.update(clock={"wall": "long"}),
    "failures": lambda s: s["federation"].update(failures=[(1, 2)]),
    "exchanges": lambda s: s["federation"].update(exchanges=[None]),
    "average": lambda s: s["federation"].update(average=13),
    "numpy": lambda s: s["generators"].update(numpy={"bit_generator": "other"}),
    "python": lambda s: s["generators"].update(python=[3, [1, 2], None]),
    "torch": lambda s: s["generators"].update(torch=torch.zeros(3)),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_job_takes_all_of_a_state_or_nothing(how: str) -> None:
    state = copy.deepcopy(advanced().state())
    BROKEN[how](state)
    job = advanced(1)
    random.seed(5)
    before = remembers(job)
    with pytest.raises(DataError):
        job.restore(state)
    assert remembers(job) == before


def test_a_sound_state_is_taken() -> None:
    one, other = advanced(), advanced(1)
    other.restore(copy.deepcopy(one.state()))
    assert remembers(other) == remembers(one)
    assert torch.equal(one.rows(), other.rows())


def test_what_is_wrong_with_the_run_that_another_begins_with_is_said_with_its_name(tmp_path: Path) -> None:
    made = api.run("ditto", runs_dir=str(tmp_path), **TINY)
    name, checkpoints = Path(str(made.run)).name, Path(str(made.run)) / "checkpoints"

    def refused() -> str:
        with pytest.raises(FedKinError) as error:
            api.run("ditto", start_from=str(made.run), runs_dir=str(tmp_path), **TINY)
        return str(error.value)

    flip(checkpoints / "final.safetensors")
    damaged = "checkpoint final is damaged (final.safetensors does not match its hash)"
    assert refused() == f"run {name!r}: {damaged}"  # and nobody goes back to the one before
    (checkpoints / "final.json").write_text("{")
    assert refused() == f"{name}/checkpoints/final.json is not valid JSON (half-written?)"
    shutil.rmtree(str(made.run))
    assert refused().startswith(f"run {str(made.run)!r} is not there")
