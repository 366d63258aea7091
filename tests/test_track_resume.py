"""A run that was stopped and resumed ends as if it never had been: every number, every model, every table."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import re
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conformance import every_method
from torch import Tensor, nn
from typer.testing import CliRunner

import fedkin as fk
from fedkin import api
from fedkin.cli.application import app
from fedkin.config import make_config
from fedkin.core.federation import Clients
from fedkin.errors import DataError, FedKinError, UsageError
from fedkin.methods.fedavg import FedAvg
from fedkin.rounds import Event, Result, RoundRecord, prepare, run_config
from fedkin.runs import checkpoint
from fedkin.runs import start as runs
from fedkin.runs.checkpoint import DiskFull
from fedkin.runs.folder import RunFolder
from fedkin.runs.start import Interrupted
from fedkin.runs.tree import Packer, Unpacker
from fedkin.testing import finished, job_of

TINY: dict[str, Any] = {
    "clients": 6,
    "rounds": 5,
    "epochs": 1,
    "way": "each",
    "device": "cpu",
    "model": "mlp",
    "samples_per_client": 30,
    "checkpoint_every": 2,
    "partition": "iid",
}
HOSTILE = {"participation": 0.6, "attack": "ipm", "malicious": 0.34, "drop": 0.1}


def stop_after(round: int) -> Any:
    """A listener that interrupts the process, as Ctrl-C would, once a round is over."""

    def hear(event: Event) -> None:
        if isinstance(event, RoundRecord) and event.round == round and not event.final:
            raise KeyboardInterrupt

    return hear


def only_run(where: Path) -> RunFolder:
    (folder,) = where.iterdir()
    return RunFolder.open(folder)


TIMES = ("seconds", "training", "evaluating", "writing", "wall", "times")


def without_time(value: Any) -> Any:
    """Facts of a run but for seconds and where it lies."""
    if isinstance(value, dict):
        skipped = (*TIMES, "run", "runs_dir", "memory", "checkpoint_every")
        return {k: without_time(v) for k, v in value.items() if k not in skipped}
    return [without_time(v) for v in value] if isinstance(value, list) else value


def tables(run: RunFolder) -> dict[str, Any]:
    names = ("rounds", "clients", "exchanges", "traffic", "events", "notes")
    return {n: {c: v for c, v in run.table(n).items() if c not in TIMES} for n in names}


def rows_of(result: Result) -> Tensor:
    return result._rows


def alone(method: Any, **settings: Any) -> Result:
    """The same run without a folder, and so without checkpoints."""
    return api.run(method, **{k: v for k, v in settings.items() if k != "checkpoint_every"})


def same(one: Result, two: Result) -> None:
    assert torch.equal(rows_of(one), rows_of(two))
    assert repr(without_time(one.to_dict())) == repr(without_time(two.to_dict()))  # repr: NaN is NaN
    assert [(n.round, n.name) for n in one.notes] == [(n.round, n.name) for n in two.notes]
    for a, b in zip(one.notes, two.notes, strict=True):
        assert type(a.value) is type(b.value)
        if isinstance(a.value, Tensor):
            assert a.value.dtype == b.value.dtype
            assert torch.equal(a.value.nan_to_num(-1), b.value.nan_to_num(-1))
        else:
            assert repr(a.value) == repr(b.value)


# ---------------------------------------------------------------- every method


@pytest.mark.parametrize("method", every_method())
def test_resumed_equals_uninterrupted(method: str, tmp_path: Path) -> None:
    settings = {**TINY, **HOSTILE}
    whole = api.run(method, **settings, runs_dir=str(tmp_path / "whole"))
    with pytest.raises(KeyboardInterrupt):
        api.run(method, **settings, runs_dir=str(tmp_path / "broken"), on_event=stop_after(3))
    broken = only_run(tmp_path / "broken")
    assert broken.info.status == "interrupted"
    assert broken.info.rounds_done == 3
    assert checkpoint.names(broken.path / "checkpoints") == ["round-000002"]  # so one round is done again
    assert broken.table("rounds")["round"] == [1, 2, 3]
    resumed = api.resume(str(broken.path))
    same(whole, resumed)
    assert repr(tables(only_run(tmp_path / "whole"))) == repr(tables(only_run(tmp_path / "broken")))
    assert only_run(tmp_path / "broken").info.status == "finished"
    same(whole, alone(method, **settings))  # and a folder changes nothing


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("fedavg", {"rule": "multi-krum:malicious=0.34"}),
        ("fedavg", {"rule": "centred-clip"}),
        ("co-pfl", {"options": {"transfer_moments": True}}),
        ("fedcap", {"options": {"collect": "last_known"}}),
        ("c-pfl", {"attackers": "redrawn"}),
        ("fedavg-ft", {"optimiser": "adam", "eval_every": 3}),
        ("fedavg", {"attack": "lf"}),
    ],
)
def test_with_rules_optimisers_and_options(method: str, more: dict[str, Any], tmp_path: Path) -> None:
    settings = {**TINY, **HOSTILE, **more}
    whole = alone(method, **settings)
    with pytest.raises(KeyboardInterrupt):
        api.run(method, **settings, runs_dir=str(tmp_path), on_event=stop_after(3))
    same(whole, api.resume(str(only_run(tmp_path).path)))


@pytest.mark.parametrize("round", [1, 2, 4, 5])
def test_wherever_it_stops(round: int, tmp_path: Path) -> None:
    whole = alone("c-pfl", **TINY)  # has a last word after the last round
    with pytest.raises(KeyboardInterrupt):
        api.run("c-pfl", **TINY, runs_dir=str(tmp_path), on_event=stop_after(round))
    same(whole, api.resume(str(only_run(tmp_path).path)))


def test_a_finished_run_gives_its_models_again(tmp_path: Path) -> None:
    whole = api.run("ditto", **TINY, runs_dir=str(tmp_path))
    again = api.resume(str(only_run(tmp_path).path))
    same(whole, again)
    assert again.run == whole.run


class Restless(FedAvg):
    """Draws from every global generator, and remembers odd things."""

    def start(self, fed, layout, row) -> None:
        super().start(fed, layout, row)
        self.seen = {0: Clients([0], np.array([1])), "x": (1, None)}
        self.array = np.arange(3)[::-1].copy()

    def round(self, fed, cohort) -> None:
        super().round(fed, cohort)
        self.model = self.model + 1e-3 * torch.rand(len(self.model))
        self.model *= 1 + 1e-3 * random.random() + 1e-3 * np.random.rand()  # noqa: NPY002
        self.seen[fed.round + 1] = cohort
        self.array = self.array + len(self.seen[fed.round + 1])


def test_global_generators_go_on(tmp_path: Path) -> None:
    def seeded() -> None:
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002

    seeded()
    whole = alone(Restless, **TINY)
    seeded()
    with pytest.raises(KeyboardInterrupt):
        api.run(Restless, **TINY, runs_dir=str(tmp_path), on_event=stop_after(3))
    run = str(only_run(tmp_path).path)
    with pytest.raises(UsageError, match="method as Python objects"):
        api.resume(run)
    seeded()
    same(whole, api.resume(run, method=Restless))


# ---------------------------------------------------------------- values


def test_values_survive_a_round_trip() -> None:
    strided = torch.arange(12.0).reshape(3, 4).T
    shared = torch.tensor([1.5])
    value = {
        1: "a",
        "b": [True, None, 2, 0.1, float("inf")],
        (1, ("x", torch.float32)): {3},
        "t": strided,
        "twice": [shared, shared],
        "n": np.float32(0.1),
        "array": np.array([[1, 2]], np.uint8),
        "empty": {},
        "bool": torch.tensor([True, False]),
        "half": torch.tensor([1.0], dtype=torch.bfloat16),
        "!": "a mark",
        "clients": Clients([2, 0], np.array([5, 6, 7])),
        "none": torch.zeros(0, 3),
        "scalar": torch.tensor(3),
    }
    packer = Packer()
    text = json.dumps(packer.pack(value), allow_nan=False)
    back = Unpacker(packer.tensors, torch.device("cpu"), np.array([5, 6, 7])).unpack(json.loads(text))
    assert list(back) == list(value)
    assert back["b"] == value["b"]
    assert type(back["n"]) is np.float32
    assert back["n"] == value["n"]
    assert back["t"].stride() == strided.stride()
    assert torch.equal(back["t"], strided)
    assert back["twice"][0] is back["twice"][1]
    assert back["array"].dtype == np.uint8
    assert back["half"].dtype == torch.bfloat16
    assert list(back["clients"]) == [0, 2]
    assert back["clients"].samples.tolist() == [5, 7]
    assert back["none"].shape == (0, 3)
    assert back["scalar"].shape == ()


def test_what_cannot_be_saved_is_named() -> None:
    with pytest.raises(FedKinError, match=r"state\.method\.thing\[0\] is a .*Path"):
        Packer().pack({"method": {"thing": [Path()]}})


class Hoarder(FedAvg):
    def start(self, fed, layout, row) -> None:
        super().start(fed, layout, row)
        self.file = object()


def test_a_method_with_such_a_thing_runs_without_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(FedKinError, match=r"method\.file is a builtins\.object.*checkpoint_every=0"):
        api.run(Hoarder, **TINY, runs_dir=str(tmp_path / "a"))
    assert only_run(tmp_path / "a").info.status == "failed"
    result = api.run(Hoarder, **{**TINY, "checkpoint_every": 0}, runs_dir=str(tmp_path / "b"))
    assert result.history
    assert not list((tmp_path / "b").glob("*/checkpoints/*"))


# ---------------------------------------------------------------- damage


def interrupted(where: Path, method: str = "ditto", at: int = 5, **more: Any) -> RunFolder:
    with pytest.raises(KeyboardInterrupt):
        api.run(method, **{**TINY, **more}, runs_dir=str(where), on_event=stop_after(at))
    return only_run(where)


def test_the_newest_two_checkpoints_are_kept(tmp_path: Path) -> None:
    run = interrupted(tmp_path, checkpoint_every=1)
    assert checkpoint.names(run.path / "checkpoints") == ["round-000005", "round-000004"]
    about = json.loads((run.path / "checkpoints/round-000005.json").read_text())
    assert about["round"] == 5
    assert about["bytes"] == (run.path / "checkpoints/round-000005.safetensors").stat().st_size
    from safetensors import safe_open

    with safe_open(run.path / "checkpoints/round-000005.safetensors", "pt") as file:  # anybody can read it
        assert file.metadata()["round"] == "5"
        assert {file.get_tensor(k).dtype for k in file.keys()} >= {torch.float32, torch.uint8}  # noqa: SIM118


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", ["bit", "short", "sidecar", "gone", "lies"])
def test_a_damaged_checkpoint_is_passed_over(damage: str, tmp_path: Path) -> None:
    whole = alone("ditto", **TINY)
    run = interrupted(tmp_path)
    path = run.path / "checkpoints/round-000004"
    tensors, about = path.with_suffix(".safetensors"), path.with_suffix(".json")
    if damage == "bit":
        flip(tensors)
    elif damage == "short":
        tensors.write_bytes(tensors.read_bytes()[:-9])
    elif damage == "sidecar":
        about.write_text("{")
    elif damage == "gone":
        tensors.unlink()
    else:  # the hash is right, the content is not
        tensors.write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
        hashed = hashlib.sha256(tensors.read_bytes()).hexdigest()
        about.write_text(json.dumps({"round": 4, "bytes": 16, "sha256": hashed}))
    said: list[str] = []
    result = runs.resume(run, say=said.append)
    assert "round-000004 is damaged" in said[0]
    assert "one before" in said[0]
    assert len(said) == 1
    same(whole, result)
    assert "resumed after round 2" in (run.path / "log.txt").read_text()


def test_with_no_sound_checkpoint_it_begins_again(tmp_path: Path) -> None:
    whole = alone("ditto", **TINY)
    run = interrupted(tmp_path)
    for path in (run.path / "checkpoints").glob("*.safetensors"):
        flip(path)
    said: list[str] = []
    same(whole, runs.resume(run, say=said.append))
    assert said[-1] == "no sound checkpoint: starting again from the first round"
    assert run.table("rounds")["round"] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("damage", ["garbage", "gone", "page", "empty", "table"])
def test_damaged_metrics_are_written_anew(damage: str, tmp_path: Path) -> None:
    """What the checkpoint remembers is there again; of single clients, what the file still gives."""
    whole = api.run("fedavg", **TINY, drop=0.3, runs_dir=str(tmp_path / "whole"))
    run = interrupted(tmp_path / "torn", "fedavg", drop=0.3)
    path = run.path / "metrics.sqlite"
    if damage == "garbage":
        path.write_bytes(b"no database at all" * 100)
    elif damage == "gone":
        path.unlink()
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "table":
        with sqlite3.connect(path) as base:
            base.execute("DROP TABLE notes")
        base.close()
    else:  # one page, of the clients' own rows, which reading how far the tables go does not touch
        with sqlite3.connect(path) as base:
            (page,) = base.execute("SELECT rootpage FROM sqlite_master WHERE name='clients'").fetchone()
            (size,) = base.execute("PRAGMA page_size").fetchone()
        base.close()
        torn = bytearray(path.read_bytes())
        torn[(page - 1) * size : page * size] = b"\xff" * size
        path.write_bytes(torn)
    said: list[str] = []
    same(whole, runs.resume(run, say=said.append))
    assert "metrics database is damaged" in said[0]
    assert "as the checkpoint remembers them" in said[1]
    assert "resumed after round 4" in (run.path / "log.txt").read_text()  # nothing is done twice
    ours, theirs = tables(run), tables(RunFolder.open(str(whole.run)))
    for name in ("rounds", "exchanges", "notes"):
        assert ours[name] == theirs[name], name
    key = [sorted(zip(*t["events"].values(), strict=True)) for t in (ours, theirs)]
    assert key[0] == key[1]
    assert ours["clients"]["round"][-3:] == [5, 5, 5]
    if damage == "table":
        assert ours["clients"] == theirs["clients"]
    with sqlite3.connect(path) as base:
        assert base.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    base.close()


def frozen(run: RunFolder) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in run.path.rglob("*") if p.is_file() and p.name != "log.txt"}


@pytest.mark.parametrize("how", ["run", "width", "clients", "name", "method"])
def test_a_checkpoint_that_does_not_fit_is_named_and_nothing_changes(how: str, tmp_path: Path) -> None:
    run = interrupted(tmp_path)
    folder, device, samples = run.path / "checkpoints", torch.device("cpu"), np.ones(6, np.int64)
    for name in checkpoint.names(folder):
        state = checkpoint.load(folder, name, device, samples)
        job = state["job"]
        if how == "run":
            state["run"] = "another"
        elif how == "width":
            job["method"]["model"] = torch.zeros(3)
        elif how == "clients":
            job["losses"] = job["losses"][:2]
        elif how == "name":
            job["method"]["__class__"] = 1
        else:
            del job["method"]
        checkpoint.save(folder, name, state["job"]["round"], state)
    before = frozen(run)
    words = {
        "run": "of run 'another'",
        "width": r"'model' is \[3\] where this run has",
        "clients": "is of 2 clients",
        "name": "'__class__'",
        "method": "it has no 'method'",
    }
    with pytest.raises(DataError, match=words[how]) as error:
        runs.resume(run)
    assert "nothing was changed" in str(error.value)
    assert frozen(run) == before


def test_a_checkpoint_ahead_of_its_database_is_passed_over(tmp_path: Path) -> None:
    whole = alone("ditto", **TINY)
    run = interrupted(tmp_path)
    with sqlite3.connect(run.path / "metrics.sqlite") as base:
        base.execute("DELETE FROM clients WHERE round > 3")
    base.close()
    said: list[str] = []
    same(whole, runs.resume(run, say=said.append))
    assert "misses rows" in said[0]
    assert run.table("rounds")["round"] == [1, 2, 3, 4, 5]


CUT_SHORT = """
import os, sqlite3, sys
base = sqlite3.connect(sys.argv[1], isolation_level=None)
base.execute("PRAGMA cache_size=1")
base.execute("PRAGMA cache_spill=1")
base.execute("BEGIN")
for i in range(3000):
    base.execute("INSERT INTO notes VALUES (9, 'big', ?)", ("x" * 900,))
os._exit(0)
"""


def test_a_commit_that_was_cut_short_is_rolled_back_by_resuming_alone(tmp_path: Path) -> None:
    """Whoever only reads obeys no journal: it may be anybody's."""
    whole = api.run("fedavg", **TINY, runs_dir=str(tmp_path / "whole"))
    with pytest.raises(KeyboardInterrupt):
        api.run("fedavg", **TINY, runs_dir=str(tmp_path / "broken"), on_event=stop_after(3))
    run = only_run(tmp_path / "broken")
    path, where = run.path / "metrics.sqlite", ("--runs-dir", str(tmp_path / "broken"))
    sound = path.read_bytes()
    subprocess.run([sys.executable, "-c", CUT_SHORT, str(path)], check=True, timeout=60)
    torn = {p.name: p.read_bytes() for p in run.path.iterdir() if p.is_file()}
    assert torn["metrics.sqlite"] != sound
    says = f"cut short while writing; fedkin resume {run.info.id} repairs it"
    with pytest.raises(DataError, match=says):
        run.table("rounds")
    listed = CliRunner().invoke(app, ["runs", *where])
    assert (listed.exit_code, "interrupted" in listed.stdout) == (0, True)
    for command in ("show", "report"):
        told = CliRunner().invoke(app, [command, "last", *where])
        assert (told.exit_code, "Traceback" in told.output) == (2, False), told.output
        assert says in " ".join(told.output.split())
    assert {p.name: p.read_bytes() for p in run.path.iterdir() if p.is_file()} == torn
    same(whole, api.resume(str(run.path)))
    assert repr(tables(only_run(tmp_path / "whole"))) == repr(tables(only_run(tmp_path / "broken")))


def test_other_data_are_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(200, 5)).astype(np.float32), rng.integers(0, 4, 200)
    path = tmp_path / "mine.npz"
    np.savez(path, x=x, y=y)
    settings = {**TINY, "data": str(path), "partition": "iid"}
    run = interrupted(tmp_path / "runs", **settings)
    np.savez(path, x=x + 1, y=y)
    with pytest.raises(DataError, match=r"samples of .* changed"):
        runs.resume(run)
    np.savez(path, x=x[:150], y=y[:150])
    with pytest.raises(DataError, match="split changed"):
        runs.resume(run)
    np.savez(path, x=x, y=y)
    same(alone("ditto", **settings), runs.resume(run))


def test_hostile_state_is_no_memory_of_a_method(tmp_path: Path) -> None:
    job = prepare(make_config({**TINY, "method": "fedavg"}))
    for name in ("__class__", "round", "a b"):
        state = {**job.state(), "method": {name: 1}}
        with pytest.raises(DataError, match="no memory"):
            job.restore(state)


def test_the_run_of_real_sites_is_resumed_by_its_server(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        api.run("fedavg", **TINY, runs_dir=str(tmp_path), on_event=stop_after(3))
    run = only_run(tmp_path)
    (run.path / "sites.json").write_text("[]")
    told = CliRunner().invoke(app, ["resume", "last", "--runs-dir", str(tmp_path)])
    assert told.exit_code == 2
    assert f"fedkin server --resume {run.info.id}" in " ".join(told.stderr.split())


class Normed(nn.Sequential):
    """A network with statistics of its own."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))


@pytest.mark.parametrize("rule", ["fltrust:root=20", "bucketing:base=fltrust"])
def test_the_statistics_of_the_servers_own_training_go_on(rule: str) -> None:
    torch.manual_seed(0)
    settings = {**TINY, **HOSTILE, "rule": rule, "buffers": "local", "way": "each", "model": None}
    config, model = make_config(settings), Normed()
    whole, broken, resumed = (prepare(config, model=model) for _ in range(3))
    whole.advance()
    whole.advance()
    broken.advance()
    packer = Packer()
    packed = packer.pack(broken.state())
    samples = np.array([len(p) for p in resumed.site.parts["train"]], np.int64)
    resumed.restore(Unpacker(packer.tensors, torch.device("cpu"), samples).unpack(packed))
    (before,), _ = broken.fed.state()["average"], resumed.advance()
    (expected,), (found,) = (job.fed.state()["average"] for job in (whole, resumed))
    assert torch.equal(found["buffers"], expected["buffers"])
    assert not torch.equal(found["buffers"], before["buffers"])  # it learns on


def test_two_cannot_work_on_one_run(tmp_path: Path) -> None:
    run = interrupted(tmp_path)
    from fedkin.runs.recorder import Recorder

    with Recorder(run.path, {}, 1):
        assert RunFolder.open(run.path).info.status == "interrupted"
        with pytest.raises(UsageError, match="another process"):
            runs.resume(run)


# ---------------------------------------------------------------- a full disk


def test_a_full_disk_stops_the_run_and_keeps_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = alone("ditto", **TINY)
    real, written = checkpoint.safetensors_stream, 0

    def full(*given: Any) -> Any:
        nonlocal written
        written += 1
        for piece in real(*given):
            if written > 1:
                with open("/dev/full", "wb") as device:  # a real ENOSPC, in the middle of a checkpoint
                    device.write(piece)
            yield piece

    monkeypatch.setattr(checkpoint, "safetensors_stream", full)
    with pytest.raises(DiskFull, match=r"the disk is full.*round-000002 is kept.*fedkin resume ditto-"):
        api.run("ditto", **TINY, runs_dir=str(tmp_path))
    monkeypatch.undo()
    run = only_run(tmp_path)
    assert run.info.status == "failed"
    assert "disk is full" in (run.info.error or "")
    assert sorted(p.name for p in (run.path / "checkpoints").iterdir()) == [
        "round-000002.json",
        "round-000002.safetensors",
    ]
    same(whole, runs.resume(run))


@pytest.mark.parametrize("what", ["run.json", "metrics.sqlite", "log.txt"])
def test_whatever_cannot_be_written(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedkin.runs import database, facts, recorder

    rounds: list[int] = []

    def hear(event: Event) -> None:
        if isinstance(event, RoundRecord):
            rounds.append(event.round)

    def no_space(*given: Any, **more: Any) -> Any:
        if len(rounds) < 2:
            return real(*given, **more)
        if what == "metrics.sqlite":
            raise sqlite3.OperationalError("database or disk is full")
        raise OSError(28, "No space left on device")

    if what == "run.json":
        real = recorder.write_json
        monkeypatch.setattr(recorder, "write_json", no_space)
    elif what == "metrics.sqlite":
        real = database.Database.commit
        monkeypatch.setattr(database.Database, "commit", no_space)
    else:
        real = facts.now
        monkeypatch.setattr(facts, "now", no_space)
    with pytest.raises(DiskFull, match=what):
        api.run("fedavg", **{**TINY, "checkpoint_every": 1}, runs_dir=str(tmp_path), on_event=hear)
    monkeypatch.undo()
    run = only_run(tmp_path)
    assert run.info.status in ("failed", "interrupted")
    same(alone("fedavg", **{**TINY, "checkpoint_every": 1}), runs.resume(run))


# ---------------------------------------------------------------- real processes, real signals


def program(*words: str, where: Path, **more: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "FEDKIN_RUNS": str(where)}
    return subprocess.Popen(
        [sys.executable, "-m", "fedkin", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        **more,
    )


LONG = [
    "--rounds",
    "60",
    "--clients",
    "6",
    "--epochs",
    "1",
    "--way",
    "each",
    "--checkpoint-every",
    "3",
    "--participation",
    "0.7",
    "--attack",
    "ipm",
    "--partition",
    "iid",
]


def test_sigterm_stops_after_the_round(tmp_path: Path) -> None:
    running = program("run", "ditto", *LONG[:1], "100000", *LONG[2:], where=tmp_path)
    assert running.stderr is not None
    while "round 2/" not in running.stderr.readline():
        assert running.poll() is None
    running.send_signal(signal.SIGTERM)
    out, err = running.communicate(timeout=120)
    assert (running.returncode, out) == (143, "")
    run = only_run(tmp_path)
    assert f"Continue with: fedkin resume {run.info.id}" in err
    assert "Traceback" not in err
    assert run.info.status == "interrupted"
    done = run.table("rounds")["round"][-1]
    assert checkpoint.names(run.path / "checkpoints")[0] == f"round-{done:06d}"
    assert run.info.rounds_done == done


def test_a_signal_that_is_delivered_twice_is_one_request(tmp_path: Path) -> None:
    """As `timeout` does it: to the process, and to its group."""
    slow = ["--rounds", "500", "--epochs", "50", "--clients", "20", "--way", "each"]
    running = program("run", "fedavg", *slow, where=tmp_path, start_new_session=True)
    assert running.stderr is not None
    while "round 1/" not in running.stderr.readline():
        assert running.poll() is None
    os.kill(running.pid, signal.SIGTERM)
    time.sleep(0.05)
    os.killpg(running.pid, signal.SIGTERM)
    _, err = running.communicate(timeout=120)
    assert running.returncode == 143
    assert "stopped after round" in err
    run = only_run(tmp_path)
    assert checkpoint.names(run.path / "checkpoints")[0] == f"round-{run.info.rounds_done:06d}"


def test_a_second_ctrl_c_quits_now(tmp_path: Path) -> None:
    slow = ["--rounds", "5", "--epochs", "2000", "--clients", "20", "--way", "each"]
    running = program("run", "fedavg", *slow, where=tmp_path)
    assert running.stderr is not None
    assert "fedavg on digits" in running.stderr.readline()
    time.sleep(0.2)
    running.send_signal(signal.SIGINT)
    assert "stopping after this round" in running.stderr.readline()
    time.sleep(runs.SAME_REQUEST + 0.1)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=120)
    assert running.returncode == 130
    assert "fedkin resume" in err
    assert only_run(tmp_path).info.status == "interrupted"


def compared(one: RunFolder, two: RunFolder) -> None:
    assert repr(tables(one)) == repr(tables(two))
    same(*(api.resume(str(r.path)) for r in (one, two)))


def in_a_process(where: str, settings: dict[str, Any]) -> None:
    """A run, or the rest of one, in a process of its own."""
    torch.set_num_threads(1)
    if list(Path(where).glob("*/run.json")):
        runs.resume(only_run(Path(where)))
    else:
        runs.start(make_config({**settings, "runs_dir": where}))


def killed(where: Path, settings: dict[str, Any], kills: list[tuple[int, float]]) -> None:
    """A run under SIGKILL, each time after so many more lines of its log and so many seconds; in the end in peace."""
    machine = multiprocessing.get_context("forkserver")
    machine.set_forkserver_preload([__name__])

    def lines() -> int:
        return sum(path.read_text().count("\n") for path in where.glob("*/log.txt"))

    for more, pause in kills:
        before = lines()
        process = machine.Process(target=in_a_process, args=(str(where), settings))
        process.start()
        while lines() <= before + more and process.is_alive():
            time.sleep(0.002)
        time.sleep(pause)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, "it was not killed at work"
    process = machine.Process(target=in_a_process, args=(str(where), settings))
    process.start()
    process.join()
    assert process.exitcode == 0


@pytest.mark.parametrize("times", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_killed_at_random_moments(times: int, tmp_path: Path) -> None:
    settings = {**TINY, **HOSTILE, "method": "fedcap", "rounds": 60, "checkpoint_every": 3}
    draw = random.Random(6)
    killed(tmp_path / "whole", settings, [])
    killed(tmp_path / "killed", settings, [(draw.randrange(9), draw.uniform(0, 0.03)) for _ in range(times)])
    after = re.findall(r"resumed after round (\d+)", (only_run(tmp_path / "killed").path / "log.txt").read_text())
    assert len(after) == times
    assert len(set(after)) > times // 3  # it did get on in between
    compared(only_run(tmp_path / "whole"), only_run(tmp_path / "killed"))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["co-pfl", "c-pfl", "fedpkda", "pfedcs"])
def test_the_program_killed_at_ten_random_moments(method: str, tmp_path: Path) -> None:
    whole = program("run", method, *LONG, where=tmp_path / "whole")
    assert whole.stderr is not None
    whole.stderr.readline()
    begin = time.monotonic()
    assert whole.communicate()[0]
    took, draw, command = time.monotonic() - begin, random.Random(method), ["run", method, *LONG]
    for moment in [*(draw.uniform(0.01, 0.2) * took for _ in range(10)), 600.0]:
        running = program(*command, where=tmp_path / "killed")
        assert running.stderr is not None
        running.stderr.readline()  # the headline: rounds begin
        try:
            running.wait(timeout=moment)
        except subprocess.TimeoutExpired:
            running.kill()
        running.communicate()
        command = ["resume", "last"]
    assert running.returncode == 0
    compared(only_run(tmp_path / "whole"), only_run(tmp_path / "killed"))


def test_library_runs_do_not_touch_signals(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def hear(event: Event) -> None:
        assert signal.getsignal(signal.SIGTERM) is before

    api.run("fedavg", **TINY, runs_dir=str(tmp_path), on_event=hear)


def test_stopping_says_where(tmp_path: Path) -> None:
    config = make_config({**TINY, "runs_dir": str(tmp_path)})

    def hear(event: Event) -> None:
        if isinstance(event, RoundRecord) and event.round == 2:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Interrupted, match="stopped after round 3 of 5") as caught:
        runs.start(config, on_event=hear, signals=True)
    assert caught.value.exit_code == 143
    assert caught.value.run == only_run(tmp_path).path
    same(run_config(make_config(TINY)), runs.resume(only_run(tmp_path)))


def test_fk_names_are_there() -> None:
    assert fk.run is api.run
    assert fk.resume is api.resume


# ---------------------------------------------------------------- what older versions wrote


@pytest.mark.parametrize("method", ["fedper", "ditto", "fedcap"])
def test_a_state_of_an_older_version_goes_on(method: str) -> None:
    """Every client's row, and one time for all."""
    done, begun, again = (job_of(method, rounds=3, participation=0.67) for _ in range(3))
    finished(done)
    begun.advance()
    later = ("clock", "refusals", "broken", "remarks")
    state: dict[str, Any] = {k: v for k, v in begun.state().items() if k not in later}
    assert 0 < min(len(kept["rows"]) for kept in state["clients"].values()) < 3
    state["clients"] = begun.site.store.tensors
    again.restore(state)
    assert any(r.startswith("1 rounds were done by a version that timed nothing else") for r in again.remarks)
    while not again.finished:
        again.advance() if again.fed.round < 3 else again.finish()
    for client in range(3):
        for a, b in zip(*(j.result().personal(client).parameters() for j in (done, again)), strict=True):
            assert torch.equal(a, b)


def test_a_state_that_lacks_what_the_method_needs_is_refused() -> None:
    job = job_of("fedpkda")
    job.advance()
    state = job.state()
    del state["method"]["senders"]
    with pytest.raises(DataError, match="has no 'senders', which FedPKDA needs: another version"):
        job_of("fedpkda").restore(state)


def test_a_network_given_before_there_was_a_choice_keeps_its_weights(tmp_path: Path) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    settings: dict[str, Any] = {"clients": 5, "rounds": 2, "epochs": 1, "device": "cpu", "model": network}

    def stop(event: Event) -> None:
        if isinstance(event, RoundRecord):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fk.run("fedavg", init="given", runs_dir=str(tmp_path), checkpoint_every=0, on_event=stop, **settings)
    (folder,) = tmp_path.iterdir()
    facts = json.loads((folder / "run.json").read_text())
    for name in ("config", "given"):
        facts.get(name, {}).pop("init", None)
    (folder / "run.json").write_text(json.dumps(facts))
    resumed, whole = api.resume(str(folder), model=network), fk.run("fedavg", init="given", **settings)
    assert resumed.config.init == "given"
    for a, b in zip(*(r.personal(0).parameters() for r in (resumed, whole)), strict=True):
        assert torch.equal(a, b)
