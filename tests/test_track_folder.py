"""A run is a folder: what is in it, how it is listed, and what happens to folders that somebody else has made."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import sqlite3
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from torch import nn
from typer.testing import CliRunner

from fedkin import api
from fedkin.cli.application import app
from fedkin.config import NOT_IDENTITY, Config, make_config
from fedkin.core.federation import Federation
from fedkin.errors import DataError, FedKinError, UsageError
from fedkin.methods.fedavg import FedAvg
from fedkin.rounds import Result, RoundRecord
from fedkin.runs import start as runs
from fedkin.runs.catalogue import Broken, Catalogue, diff, runs_folder
from fedkin.runs.database import TABLES
from fedkin.runs.folder import RunFolder, RunInfo, _write, check_name
from fedkin.runs.recorder import Recorder
from fedkin.runs.spreadsheet import inert

TINY: dict[str, Any] = {
    "clients": 6,
    "rounds": 3,
    "epochs": 1,
    "way": "each",
    "device": "cpu",
    "model": "mlp",
    "samples_per_client": 30,
    "partition": "iid",
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three finished runs."""
    where = tmp_path_factory.mktemp("three")
    api.run("fedavg", **TINY, runs_dir=str(where))
    api.run("fedcap", **TINY, attack="mr", malicious=0.34, drop=0.2, runs_dir=str(where), options={"t_norm": 0.1})
    api.run("c-pfl", **TINY, seed=1, runs_dir=str(where))
    return where


@pytest.fixture(scope="module")
def hostile(home: Path) -> RunFolder:
    return Catalogue(home).find("fedcap")


def call(*words: str, code: int = 0) -> Any:
    outcome = CliRunner().invoke(app, list(words))
    assert outcome.exit_code == code, outcome.output
    return outcome


def answer(*words: str) -> Any:
    return json.loads(call(*words, "--json").stdout)


# ---------------------------------------------------------------- what is in it


def test_files(hostile: RunFolder) -> None:
    found = {str(p.relative_to(hostile.path)) for p in hostile.path.rglob("*") if p.is_file()}
    assert found == {
        "run.json",
        "metrics.sqlite",
        "split.npz",
        "log.txt",
        "checkpoints/final.json",
        "checkpoints/final.safetensors",
    }
    assert re.fullmatch(r"fedcap-\d{8}-\d{6}-[0-9a-f]{4}", hostile.info.id)


def test_run_json_says_what_exactly_was_run(hostile: RunFolder) -> None:
    raw = json.loads((hostile.path / "run.json").read_text())
    assert raw["format"] == 1
    assert raw["status"] == "finished"
    assert raw["config"]["attack"] == "mr"
    assert raw["config"]["validation_share"] == 0.0  # resolved
    assert raw["given"]["validation_share"] is None  # as it was asked for
    assert raw["options"]["t_norm"] == 0.1
    assert raw["options"]["alpha"] == 10.0
    assert set(raw["environment"]) >= {"fedkin", "python", "torch", "numpy", "platform", "device", "precision", "git"}
    assert set(raw["prepared"]) >= {
        "clients",
        "classes",
        "split_hash",
        "parameters",
        "eval_point",
        "device",
        "precision",
    }
    assert raw["names"] == [f"client-{i}" for i in range(6)]
    assert len(raw["malicious"]) == 2
    assert set(raw["result"]) >= {"accuracy", "best", "bytes", "seconds", "removed", "detection", "rounds_done"}
    assert raw["result"]["rounds_done"] == raw["rounds_done"] == 3


def test_the_split_is_there_and_is_the_one_hashed(hostile: RunFolder) -> None:
    from fedkin.data import Split

    found = hostile.split()
    split = Split(*(tuple(found[k]) for k in ("train", "validation", "test", "names")))
    assert split.hash == hostile.info.prepared["split_hash"]


def test_pandas_reads_the_tables(hostile: RunFolder) -> None:
    with sqlite3.connect(hostile.path / "metrics.sqlite") as base:
        for name, columns in TABLES.items():
            frame = pd.read_sql(f"SELECT * FROM {name}", base)
            assert list(frame.columns) == list(columns)
        rounds = pd.read_sql("SELECT * FROM rounds", base)
        clients = pd.read_sql("SELECT * FROM clients", base)
    base.close()
    assert rounds["round"].tolist() == [1, 2, 3]
    assert clients.groupby("round").size().tolist() == [6, 6, 6]


def result_of(run: RunFolder) -> Result:
    return api.resume(str(run.path))


def test_tables_hold_what_the_result_says(hostile: RunFolder) -> None:
    result = result_of(hostile)
    rounds, clients = hostile.table("rounds"), hostile.table("clients")
    assert rounds["macro"] == [r.accuracy.macro for r in result.history]
    assert rounds["train_loss"] == [r.train_loss for r in result.history]
    assert rounds["bytes_up"][-1] == result.bytes["up"]
    assert rounds["client_steps"][-1] == result.history[-1].client_steps > 0
    assert clients["correct"][-6:] == [c.correct for c in result.per_client]
    assert clients["accuracy"][-6:] == [c.accuracy for c in result.per_client]
    exchanges, traffic = hostile.table("exchanges"), hostile.table("traffic")
    assert exchanges["round"] == [e.round + 1 for e in result.exchanges]
    assert exchanges["id"] == list(range(1, len(result.exchanges) + 1))
    for way in ("bytes_down", "bytes_up"):
        assert exchanges[way] == [getattr(e, way) for e in result.exchanges]
        per_exchange = [
            sum(b for b, x in zip(traffic[way], traffic["exchange"], strict=True) if x == i) for i in exchanges["id"]
        ]
        assert per_exchange == exchanges[way]
    failed = hostile.events("failed")
    assert [(e["round"], e["client"], e["phase"], e["reason"]) for e in failed] == [
        (f.round + 1, f.client, f.phase, f.reason) for f in result.failures
    ]
    assert failed
    assert {e["client"]: e["round"] - 1 for e in hostile.events("removed")} == result.removed
    assert result.removed
    assert [n[:2] for n in hostile.notes()] == [(n.round + 1, n.name) for n in result.notes]


def test_traffic_is_counted_for_each_client(home: Path) -> None:
    run = Catalogue(home).find("fedavg")
    traffic, width = run.table("traffic"), run.info.prepared["parameters"]
    assert set(traffic["bytes_up"]) == {4 * width}
    assert set(traffic["bytes_down"]) == {4 * width}
    assert sum(traffic["seconds"]) == pytest.approx(sum(run.table("exchanges")["seconds"]))


def test_the_last_word_of_a_method_counts_to_the_last_round(home: Path) -> None:
    run = Catalogue(home).find("c-pfl")
    rounds = run.table("rounds")
    assert list(zip(rounds["round"], rounds["final"], strict=True)) == [(1, 0), (2, 0), (3, 0), (3, 1)]
    assert max(run.table("exchanges")["round"]) == 3
    assert run.table("exchanges")["phase"][-1] == "tune"
    rejected = [(r, c) for r, _, value in run.notes("rejected") for c in value]
    assert [(e["round"], e["client"]) for e in run.events("rejected")] == rejected
    scores = run.notes("scores")
    assert all(len(value) == 6 for _, _, value in scores)
    assert any(v is None for v in scores[0][2])  # NaN: committee members are not scored


def test_what_a_rule_leaves_out_is_an_event(tmp_path: Path) -> None:
    result = api.run(
        "fedavg", **TINY, attack="sf", malicious=0.34, rule="multi-krum:malicious=0.34", runs_dir=str(tmp_path)
    )
    out = [
        (n.round + 1, c)
        for n in result.notes
        if n.name == "used"
        for c, used in zip(n.value["clients"], n.value["used"], strict=True)
        if not used
    ]
    assert out
    assert [(e["round"], e["client"]) for e in RunFolder.open(str(result.run)).events("left_out")] == out


def test_rows_can_be_chosen_and_names_are_checked(hostile: RunFolder) -> None:
    assert hostile.table("clients", {"client": 2, "round": 3})["name"] == ["client-2"]
    for bad in ("sqlite_master", "rounds; DROP TABLE rounds"):
        with pytest.raises(UsageError, match="unknown table"):
            hostile.table(bad)
    with pytest.raises(UsageError, match="unknown column"):
        hostile.table("rounds", {"1=1 OR round": 1})


def test_export(hostile: RunFolder, tmp_path: Path) -> None:
    for kind in ("csv", "parquet"):
        written = hostile.export(kind, tmp_path / kind)  # type: ignore[arg-type]
        assert {p.stem for p in written} == set(TABLES)
        read = pd.read_csv if kind == "csv" else pd.read_parquet
        frame = read(tmp_path / kind / f"rounds.{kind}")
        assert frame["macro"].tolist() == pytest.approx(hostile.table("rounds")["macro"])
    with open(tmp_path / "csv" / "events.csv", encoding="utf-8") as file:
        assert len(list(csv.reader(file))) == 1 + len(hostile.table("events")["round"])


def test_the_log_tells_the_story(hostile: RunFolder) -> None:
    lines = hostile.log()
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ ", line) for line in lines)
    text = "\n".join(lines)
    assert "started fedcap on digits, seed 0" in lines[0]
    assert "failed: dropped out" in text
    assert "removed for good" in text
    assert "finished" in lines[-1]


def test_a_tracked_run_is_the_untracked_one_and_only_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDKIN_RUNS", str(tmp_path / "never"))
    assert api.run("fedavg", **TINY).run is None
    assert not (tmp_path / "never").exists()
    assert runs_folder() == tmp_path / "never"
    monkeypatch.delenv("FEDKIN_RUNS")
    assert runs_folder() == Path("runs")


class Breaks(FedAvg):
    def round(self, fed: Federation, cohort: Any) -> None:
        if fed.round == 1:
            raise ZeroDivisionError("in the middle")
        super().round(fed, cohort)


def test_a_failure_is_written_down_with_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        api.run(Breaks, **TINY, runs_dir=str(tmp_path))
    (run,) = Catalogue(tmp_path).runs()
    assert (run.status, run.error) == ("failed", "in the middle")
    text = (run.path / "log.txt").read_text()
    assert "Traceback" in text
    assert "ZeroDivisionError: in the middle" in text


def test_a_failing_client_can_stop_the_run(tmp_path: Path) -> None:
    says = r"client 'client-\d' failed in round 1, phase train: dropped out; .*on_failure"
    with pytest.raises(FedKinError, match=says):
        api.run("fedavg", **TINY, drop=0.5, on_failure="stop", runs_dir=str(tmp_path))
    (run,) = Catalogue(tmp_path).runs()
    assert run.status == "failed"
    assert "failed: dropped out" in (run.path / "log.txt").read_text()  # at once, not when the round is over


def test_own_objects_are_named(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    one, two = (api.run("fedavg", **{**TINY, "model": net}, runs_dir=str(tmp_path)) for _ in range(2))
    infos = [RunFolder.open(str(r.run)).info for r in (one, two)]
    assert infos[0].objects == ["model"]
    assert infos[0].identity != infos[1].identity  # nobody can tell whether they are the same


def test_somebody_reading_does_not_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedkin.runs.database.BRIEF", 0.05)
    readers: list[sqlite3.Connection] = []

    def hear(event: Any) -> None:
        if isinstance(event, RoundRecord) and event.round == 1:  # a reader that takes its time
            (path,) = tmp_path.glob("*/metrics.sqlite")
            readers.append(sqlite3.connect(path, isolation_level=None))
            readers[0].execute("BEGIN")
            assert readers[0].execute("SELECT max(round) FROM rounds").fetchone() == (1,)
        elif isinstance(event, RoundRecord) and event.round == 3:
            assert readers[0].execute("SELECT max(round) FROM rounds").fetchone() == (1,)
            readers[0].close()

    result = api.run("fedavg", **{**TINY, "rounds": 4}, runs_dir=str(tmp_path), on_event=hear)
    assert RunFolder.open(str(result.run)).table("rounds")["round"] == [1, 2, 3, 4]


# ---------------------------------------------------------------- identity


def test_identity_is_what_changes_the_result() -> None:
    base = make_config({"method": "ditto"})
    elsewhere = {
        "runs_dir": "x",
        "checkpoint_every": 3,
        "device": "cpu",
        "way": "each",
        "chunk": 2,
        "data_dir": "d",
        "on_failure": "stop",
        "force": True,
    }
    assert set(elsewhere) == set(NOT_IDENTITY)
    assert make_config({"method": "ditto", **elsewhere}).identity() == base.identity()
    for change in ({"seed": 1}, {"lr": 0.02}, {"options": {"lam": 0.5}}, {"precision": "bf16"}, {"method": "fedavg"}):
        assert make_config({"method": "ditto", **change}).identity() != base.identity()


def test_identity_is_kept_in_the_folder(home: Path) -> None:
    config = make_config({**TINY, "method": "fedavg"})
    assert Catalogue(home).find("fedavg").info.identity == config.identity()


# ---------------------------------------------------------------- the catalogue


def test_runs_are_found_by_name_beginning_or_last(home: Path) -> None:
    catalogue = Catalogue(home)
    ids = [r.id for r in catalogue.runs()]
    assert sorted(i.split("-2")[0] for i in ids) == ["c-pfl", "fedavg", "fedcap"]
    assert catalogue.find(ids[1]).info.id == ids[1]
    assert catalogue.find("fedc").info.method == "fedcap"
    assert catalogue.find("last").info.id == ids[-1]
    with pytest.raises(UsageError, match="2 runs begin like this"):
        catalogue.find("fed")
    with pytest.raises(UsageError, match=r"unknown run 'fedcup': did you mean 'fedcap-"):
        catalogue.find("fedcup")
    with pytest.raises(UsageError, match="no runs in"):
        Catalogue(home / "nowhere").find("last")


@pytest.mark.parametrize("name", ["../fedavg", "a/b", "", "..", ".", "x" * 101, "a\0b", "a b", "ü", "--plugin", "-h"])
def test_names_that_climb_are_refused(name: str, home: Path) -> None:
    with pytest.raises(UsageError, match="names are"):
        check_name(name)
    with pytest.raises(UsageError):
        Catalogue(home).find(name)


def good(where: Path, name: str, **changes: Any) -> Path:
    """A folder with a run.json as a run would have it, and nothing else."""
    folder = where / name
    folder.mkdir(parents=True)
    raw = {
        "format": 1,
        "id": name,
        "created": "2026-01-01T00:00:00Z",
        "updated": "2026-01-01T00:00:00Z",
        "status": "finished",
        "error": None,
        "config": Config().to_dict(),
        "options": {},
        "identity": "x",
        "environment": {},
        "prepared": {},
        "names": [f"client-{i}" for i in range(100)],
        "malicious": [],
        "rounds_done": 100,
        "result": {"accuracy": {"macro": 50.0}},
        **changes,
    }
    (folder / "run.json").write_text(json.dumps(raw))
    return folder


def test_foreign_folders_never_break_the_list(tmp_path: Path) -> None:
    good(tmp_path, "good-1")
    secret = tmp_path / "outside.txt"
    secret.write_text("secret")
    reasons = {
        "empty": "missing",
        "half": "JSON",
        "list": "object",
        "future": "format",
        "status": "status",
        "types": "config",
        "huge": "limit",
        "linked": "cannot be read",
        "folder": "plain file|cannot be read",
        "pipe": "plain file",
        "deep": "JSON",
        "names": "names",
        "link": "a link",
        "böse": "name that runs have",
        "..sneaky name": "name that runs have",
    }
    for name in reasons:
        if name != "link":
            (tmp_path / name).mkdir()
    (tmp_path / "half/run.json").write_text('{"format": 1, "sta')
    (tmp_path / "list/run.json").write_text("[1]")
    (tmp_path / "future/run.json").write_text('{"format": 99}')
    (tmp_path / "deep/run.json").write_text("[" * 200_000)
    for name, change in (("status", {"status": "done"}), ("types", {"config": [1]}), ("names", {"names": [{}]})):
        (tmp_path / name).rmdir()
        good(tmp_path, name, **change)
    with open(tmp_path / "huge/run.json", "wb") as file:
        file.truncate(1 << 33)
    (tmp_path / "linked/run.json").symlink_to(secret)
    (tmp_path / "folder/run.json").mkdir()
    os.mkfifo(tmp_path / "pipe/run.json")
    (tmp_path / "link").symlink_to(tmp_path / "good-1")
    entries = Catalogue(tmp_path).entries()
    assert [e.id for e in entries if isinstance(e, RunInfo)] == ["good-1"]
    broken = {e.name: e.reason for e in entries if isinstance(e, Broken)}
    assert set(broken) == set(reasons)
    for name, reason in reasons.items():
        assert re.search(reason, broken[name]), (name, broken[name])
    listed = answer("runs", "--runs-dir", str(tmp_path))
    assert [r["id"] for r in listed["runs"]] == ["good-1"]
    assert len(listed["broken"]) == len(reasons)
    shown = call("runs", "--runs-dir", str(tmp_path)).stdout
    assert "half: not a run: run.json is not valid JSON" in shown
    assert "run.json" in call("show", "half", "--runs-dir", str(tmp_path), code=2).stderr
    call("show", "link", "--runs-dir", str(tmp_path), code=2)


@pytest.mark.parametrize("kind", ["missing", "text", "view", "columns", "link"])
def test_a_foreign_database_is_refused_with_the_reason(kind: str, tmp_path: Path) -> None:
    folder = good(tmp_path, "run-1")
    path = folder / "metrics.sqlite"
    if kind == "text":
        path.write_bytes(b"x" * 5000)
    elif kind == "link":
        path.symlink_to("/etc/passwd")
    elif kind != "missing":
        with sqlite3.connect(path) as base:
            endless = "WITH RECURSIVE t(x) AS (SELECT 1 UNION ALL SELECT x FROM t) SELECT x AS round FROM t"
            base.execute(f"CREATE VIEW rounds AS {endless}" if kind == "view" else "CREATE TABLE rounds (round, final)")
        base.close()
    with pytest.raises(DataError, match=r"metrics\.sqlite"):
        RunFolder.open(folder).table("rounds")
    assert "Traceback" not in call("show", "run-1", "--runs-dir", str(tmp_path), code=2).output


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no zip", None])
def test_a_foreign_split_is_refused(content: bytes | None, tmp_path: Path) -> None:
    folder = good(tmp_path, "run-1")
    if content is None:
        np.savez(
            folder / "split.npz",
            names=np.array(["a", "b"]),
            **{k: np.arange(3) for p in ("train", "validation", "test") for k in (p, f"{p}_ends")},
        )
    else:
        (folder / "split.npz").write_bytes(content)
    with pytest.raises(DataError, match=r"split\.npz"):
        RunFolder.open(folder).split()


def test_a_split_is_measured_before_it_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = good(tmp_path, "run-1")
    arrays = {k: np.zeros(2, np.int64) for p in ("train", "validation", "test") for k in (p, f"{p}_ends")}
    monkeypatch.setattr("fedkin.runs.folder.MAX_ROWS", 1 << 20)
    with open(folder / "split.npz", "wb") as file:
        np.savez_compressed(file, names=np.array(["a", "b"]), **{**arrays, "train": np.zeros(1 << 20, np.int64)})
    monkeypatch.setattr(zipfile.ZipFile, "open", lambda *given: 1 / 0)
    with pytest.raises(DataError, match=r"split\.npz: unpacked it has 8\d* bytes, larger than the limit"):
        RunFolder.open(folder).split()


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<i8', 'fortran_order': False, 'shape': (100000000000,), }",
        "{'descr': '<i8', 'fortran_order': False, 'shape': (100000000000, 0), }",
        "{'descr': '<U0', 'fortran_order': False, 'shape': (100000000000,), }",
        "{'descr': '|O', 'fortran_order': False, 'shape': (1,), }",
    ],
)
def test_an_array_is_not_larger_than_its_bytes(header: str, tmp_path: Path) -> None:
    folder = good(tmp_path, "run-1")
    with zipfile.ZipFile(folder / "split.npz", "w") as archive:
        for name in ("names", *(k for p in ("train", "validation", "test") for k in (p, f"{p}_ends"))):
            archive.writestr(f"{name}.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode())
    with pytest.raises(DataError, match=r"split\.npz"):
        RunFolder.open(folder).split()


def test_numbers_beyond_all_bounds_are_none(tmp_path: Path) -> None:
    vast = 10**400
    parts = {
        "accuracy": {"macro": vast, "micro": 12.5},
        "best": {"round": vast, "macro": -vast},
        "seconds": vast,
        "bytes": {"down": vast, "up": 3},
    }
    folder = good(tmp_path, "run-1", result=parts)
    info = RunFolder.open(folder).info
    assert math.isnan(info.accuracy["macro"])
    assert math.isnan(info.seconds)
    assert (info.accuracy["micro"], info.bytes) == (12.5, 3)
    assert "run-1" in call("runs", "--sort", "accuracy", "--runs-dir", str(tmp_path)).stdout
    assert "metrics.sqlite" in call("show", "run-1", "--runs-dir", str(tmp_path), code=2).stderr


def test_control_characters_do_not_reach_the_terminal(tmp_path: Path) -> None:
    good(tmp_path, "run-1", config={**Config().to_dict(), "method": "[bold]x\x1b[2J", "data": "[red]d\x1b]0;t\x07"})
    shown = call("runs", "--runs-dir", str(tmp_path)).stdout
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "[red]d" in shown


def test_two_hundred_runs_list_in_under_a_second(tmp_path: Path) -> None:
    for i in range(200):
        good(tmp_path, f"fedavg-20260101-000000-{i:04d}", status="running" if i % 10 == 0 else "finished")
    begin = time.perf_counter()
    entries = Catalogue(tmp_path).entries()
    assert time.perf_counter() - begin < 1
    assert len(entries) == 200


def test_a_running_run_whose_process_is_gone_is_interrupted(tmp_path: Path) -> None:
    folder = good(tmp_path, "run-1", status="running")
    info = RunFolder.open(folder).info
    assert (info.status, info.stale) == ("interrupted", True)
    with Recorder(folder, {}, 0):
        info = RunFolder.open(folder).info
        assert (info.status, info.stale) == ("running", False)
    assert RunFolder.open(folder).info.status == "interrupted"


def test_diff(home: Path) -> None:
    a, b = (Catalogue(home).find(n).info for n in ("fedavg", "c-pfl"))
    found = diff(a, b)
    assert found["config"]["method"] == ("fedavg", "c-pfl")
    assert found["config"]["seed"] == (0, 1)
    assert "lr" not in found["config"]
    assert found["environment"]["split_hash"] == (a.prepared["split_hash"], b.prepared["split_hash"])
    assert found["result"]["accuracy.macro"] == (a.accuracy["macro"], b.accuracy["macro"])
    assert diff(a, a) == {"config": {}, "environment": {}, "result": {}}


# ---------------------------------------------------------------- on the command line


def test_run_leaves_a_folder_and_says_where(tmp_path: Path) -> None:
    words = ["--clients", "5", "--rounds", "2", "--epochs", "1", "--way", "each", "--runs-dir", str(tmp_path)]
    got = answer("run", "fedavg", *words)
    assert Path(got["run"]).parent == tmp_path.resolve()
    shown = answer("show", "last", "--runs-dir", str(tmp_path))
    for key in (
        "method",
        "options",
        "seed",
        "accuracy",
        "best",
        "bytes",
        "seconds",
        "removed",
        "failed",
        "run",
        "split",
        "eval_point",
        "malicious",
        "detection",
        "history",
    ):
        assert shown[key] == got[key], key
    assert [c["accuracy"] for c in shown["per_client"]] == [c["accuracy"] for c in got["per_client"]]
    assert answer("show", got["run"])["id"] == shown["id"]


def test_show_agrees_with_run_on_removals_and_failures(hostile: RunFolder) -> None:
    result, shown = result_of(hostile).to_dict(), answer("show", str(hostile.path))
    assert shown["removed"] == result["removed"]
    assert shown["failed"] == result["failed"]


def test_runs_filter_and_sort(home: Path) -> None:
    def ids(*words: str) -> list[str]:
        return [r["method"] for r in answer("runs", *words, "--runs-dir", str(home))["runs"]]

    assert sorted(ids()) == ["c-pfl", "fedavg", "fedcap"]
    assert ids("--method", "fedcap") == ["fedcap"]
    assert ids("--attack", "mr") == ["fedcap"]
    assert sorted(ids("--attack", "none", "--status", "finished")) == ["c-pfl", "fedavg"]
    assert ids("--status", "failed") == []
    assert ids("--data", "cifar10") == []
    assert ids("--sort", "method") == ["c-pfl", "fedavg", "fedcap"]
    by = {r.method: r.accuracy["macro"] for r in Catalogue(home).runs()}
    assert ids("--sort", "accuracy") == sorted(by, key=lambda m: -by[m]), "the best first"
    assert "did you mean 'accuracy'" in call("runs", "--sort", "acuracy", code=2).stderr
    assert "unknown status" in call("runs", "--status", "done", code=2).stderr
    assert "no run in" in call("runs", "--runs-dir", str(home / "nowhere")).stderr


def test_show_answers_what_exactly_this_number_was(hostile: RunFolder) -> None:
    text = " ".join(call("show", str(hostile.path)).stdout.split())
    for word in (
        hostile.info.prepared["split_hash"],
        "seed 0",
        "torch",
        "attack=mr",
        "t_norm=0.1",
        "removed round",
        "the first: client-",
        "dropped out",
        "client-5",
        "parameters",
        "malicious",
    ):
        assert word in text, word


def test_diff_on_the_screen(home: Path) -> None:
    text = call("diff", "fedavg", "fedcap", "--runs-dir", str(home)).stdout
    assert "options.t_norm" in text
    assert "environment: the same" in text
    assert answer("diff", "fedavg", "c-pfl", "--runs-dir", str(home))["config"]["seed"] == [0, 1]


def test_resuming_a_finished_run_shows_it(home: Path) -> None:
    outcome = call("resume", "fedavg", "--runs-dir", str(home))
    assert "is finished; nothing to do" in outcome.stderr
    assert "finished" in outcome.stdout
    assert answer("resume", "fedavg", "--runs-dir", str(home))["method"] == "fedavg"


def test_unknown_runs_suggest_the_nearest(home: Path) -> None:
    for words in (["show", "fedavk"], ["resume", "fedavk"], ["diff", "fedavk", "fedcap"]):
        assert "did you mean 'fedavg-" in call(*words, "--runs-dir", str(home), code=2).stderr


def test_export_from_the_command_line(home: Path, tmp_path: Path) -> None:
    outcome = call("show", "fedavg", "--runs-dir", str(home), "--export", "csv", str(tmp_path / "x"))
    assert "6 tables written" in outcome.stderr
    assert (tmp_path / "x" / "rounds.csv").exists()
    assert (
        "unknown format"
        in call("show", "fedavg", "--runs-dir", str(home), "--export", "xml", str(tmp_path), code=2).stderr
    )


def test_python_objects_cannot_be_resumed_from_the_command_line(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        api.run(Breaks, **TINY, runs_dir=str(tmp_path))
    assert "method as Python objects" in call("resume", "last", "--runs-dir", str(tmp_path), code=2).stderr


def test_a_run_that_cannot_be_written_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedkin.runs.facts.split_bytes", lambda job: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        api.run("fedavg", **TINY, runs_dir=str(tmp_path / "new"))
    assert list((tmp_path / "new").iterdir()) == []  # nothing half-written stays
    monkeypatch.undo()
    (tmp_path / "file").write_text("")
    with pytest.raises(FedKinError, match="could not be written"):
        api.run("fedavg", **TINY, runs_dir=str(tmp_path / "file"))


def test_progress_shows_speed_and_memory() -> None:
    from fedkin.report.progress import pace
    from fedkin.rounds import Accuracy, RoundRecord
    from fedkin.rounds.footprint import resident

    def record(round: int, seconds: float, steps: int) -> RoundRecord:
        return RoundRecord(round, Accuracy(1, 1, 1, 1), 0, 0, 0, 0, seconds, 1, 0, 0, client_steps=steps)

    assert pace(record(1, 2.0, 100)) == 50
    assert pace(record(2, 3.0, 400), record(1, 2.0, 100)) == 300
    assert math.log10(resident()) > 6.5
    outcome = call("run", "fedavg", "--clients", "5", "--rounds", "1", "--epochs", "1", "--way", "each")
    assert re.search(r"round 1/1 .* \d+ steps/s  \d", outcome.stderr)


def test_runs_started_together_have_folders_of_their_own(tmp_path: Path) -> None:
    config = make_config({**TINY, "rounds": 1, "runs_dir": str(tmp_path)})
    found = {runs.start(config).run for _ in range(4)}
    assert len(found) == 4


def test_listing_needs_no_torch(home: Path) -> None:
    code = (
        f"import sys; from fedkin.runs.catalogue import Catalogue as C; assert len(C({str(home)!r}).runs()) == 3; "
        "assert not {'torch', 'numpy', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("attack", ["input-noise:sigma=1,test=true", "lf", "backdoor"])
def test_the_split_names_samples_and_not_what_attackers_make_of_them(attack: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"clients": 10, "rounds": 1, "epochs": 1}
    honest = api.run("fedavg", runs_dir=str(tmp_path), **settings)
    hostile = api.run("fedavg", runs_dir=str(tmp_path), attack=attack, **settings)
    assert honest.run is not None
    assert hostile.run is not None
    one, other = RunFolder.open(honest.run).split(), RunFolder.open(hostile.run).split()
    for part in ("train", "test"):
        assert all(np.array_equal(a, b) for a, b in zip(one[part], other[part], strict=True))
    assert np.array_equal(one["class_counts_test"], other["class_counts_test"])


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("=1+1", "'=1+1"),
        ("\n=1+1", "'\n'=1+1"),
        (" @x", " '@x"),
        ("x;=1+1;y", "x;'=1+1;y"),
        ("a\t+b", "a\t'+b"),
        ("-0.5", "-0.5"),
        ("co-pfl; a=1", "co-pfl; a=1"),
        ("client-0", "client-0"),
    ],
)
def test_no_text_in_a_table_is_a_formula(text: str, kept: str, tmp_path: Path) -> None:
    """Neither where it begins nor where a spreadsheet splits lines at semicolons."""
    assert inert(text) == kept
    _write(tmp_path / "t.csv", {"name": [text], "value": [-0.5]}, "csv")
    with (tmp_path / "t.csv").open(newline="", encoding="utf-8") as file:
        assert list(csv.reader(file)) == [["name", "value"], [kept, "-0.5"]]
