"""The time that is shown is the time that passed, and every part of it is named."""

from __future__ import annotations

import math
import sqlite3
import time
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fedkin as fk
from fedkin.cli.application import app
from fedkin.rounds import RoundRecord
from fedkin.rounds.clock import PARTS, Clock
from fedkin.runs import database, recorder
from fedkin.runs import start as runs
from fedkin.runs.folder import RunFolder
from fedkin.testing import finished, job_of
from fedkin.web.views import curves

TINY: dict[str, Any] = {"rounds": 3, "clients": 6, "epochs": 1, "way": "each", "device": "cpu", "partition": "iid"}


def test_a_clock_goes_on_after_a_restore() -> None:
    clock = Clock()
    with clock.counting("evaluating"):
        time.sleep(0.02)
    clock.add("training", 2.0)
    clock.add("server", 1.0)
    assert clock.rounds == 3.0
    again = Clock()
    again.add("preparing", 0.5)
    again.restore({**clock.state(), "wall": 10.0})
    assert again.parts["evaluating"] == clock.parts["evaluating"] >= 0.02
    assert again.parts["preparing"] == 0.5
    assert 10.0 <= again.wall < 11.0


class Slow:
    """Makes each part of a run take a tenth of a second at least."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from fedkin.methods.fedavg import FedAvg
        from fedkin.rounds import assemble

        def slowed(owner: Any, name: str) -> None:
            real = getattr(owner, name)

            @wraps(real)
            def wait(*given: Any, **more: Any) -> Any:
                time.sleep(0.1)
                return real(*given, **more)

            monkeypatch.setattr(owner, name, wait)

        slowed(assemble, "load_data")
        slowed(FedAvg, "train")
        slowed(FedAvg, "round")
        slowed(FedAvg, "report")
        slowed(recorder.Recorder, "after_round")
        slowed(recorder.Recorder, "exchange")


def test_the_parts_are_apart_and_make_up_the_wall_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Slow(monkeypatch)
    begin = time.perf_counter()
    result = fk.run("fedavg", **TINY, runs_dir=str(tmp_path))
    passed = time.perf_counter() - begin
    least = {"preparing": 0.1, "training": 0.3, "server": 0.3, "evaluating": 0.4, "writing": 0.6}
    assert set(result.times) == set(PARTS) == set(least)
    for part, seconds in least.items():
        assert result.times[part] >= seconds, part
    assert sum(result.times.values()) == pytest.approx(result.wall, rel=0.1)
    assert result.wall <= passed == pytest.approx(result.wall, rel=0.1)
    assert result.seconds == pytest.approx(result.times["training"] + result.times["server"])
    history = result.history
    assert history[-1].training == pytest.approx(result.times["training"])
    assert history[0].evaluating < history[-1].evaluating <= result.times["evaluating"]
    assert [r.wall for r in history] == sorted(r.wall for r in history)
    run = RunFolder.open(str(result.run))
    assert (run.info.wall, run.info.times, run.info.seconds) == (result.wall, result.times, result.seconds)
    assert run.table("rounds", columns=["wall"])["wall"] == [r.wall for r in history]
    shown = CliRunner().invoke(app, ["show", "last", "--runs-dir", str(tmp_path)]).stdout
    assert f"{result.wall:.1f} s wall clock (preparing {result.times['preparing']:.1f}, training" in shown
    listed = CliRunner().invoke(app, ["runs", "--runs-dir", str(tmp_path)], env={"COLUMNS": "200"}).stdout
    assert f"{result.wall:.1f} s" in listed


def test_with_many_clients_most_of_the_time_may_be_evaluation_and_is_shown() -> None:
    begin = time.perf_counter()
    result = fk.run("fedavg", rounds=2, clients=600, participation=0.01, partition="iid", epochs=1, device="cpu")
    passed = time.perf_counter() - begin
    assert passed == pytest.approx(result.wall, abs=0.3, rel=0.2)
    assert sum(result.times.values()) == pytest.approx(result.wall, abs=0.1, rel=0.1)
    assert result.times["evaluating"] > result.seconds, "what the rounds' own seconds leave out"


def test_a_resumed_run_adds_up_its_sittings(tmp_path: Path) -> None:
    def stop(event: Any) -> None:
        if isinstance(event, RoundRecord) and event.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fk.run("fedavg", **TINY, runs_dir=str(tmp_path), checkpoint_every=1, on_event=stop)
    (folder,) = tmp_path.iterdir()
    before = RunFolder.open(folder).table("rounds")["wall"][-1]
    result = runs.resume(RunFolder.open(folder))
    assert result.wall > before
    assert result.history[2].wall > result.history[1].wall == before
    assert sum(result.times.values()) <= result.wall


def test_a_checkpoint_and_tables_of_an_older_version_are_read(tmp_path: Path) -> None:
    job = finished(job_of("fedavg"))
    state = {k: v for k, v in job.state().items() if k not in ("clock", "refusals")}
    columns = list(database.TABLES["rounds"])
    later = columns[database.FIRST["rounds"] :]
    state["history"] = [{k: v for k, v in r.items() if k not in later} for r in state["history"]]
    again = job_of("fedavg")
    again.restore({**state, "seconds": 5.0})
    assert again.seconds == 5.0
    assert again.clock.wall > 5.0
    assert math.isnan(again.history[0].wall)

    fk.run("fedavg", **TINY, runs_dir=str(tmp_path))
    (folder,) = tmp_path.iterdir()
    with sqlite3.connect(folder / "metrics.sqlite") as base:
        for column in later:
            base.execute(f"ALTER TABLE rounds DROP COLUMN {column}")
    base.close()
    found = RunFolder.open(folder).table("rounds")
    assert (found["round"], found["wall"]) == ([1, 2, 3], [None] * 3)
    assert curves(folder)[0]["wall"] == [None] * 3
    writer = database.Database(folder / "metrics.sqlite")  # as a resumed run opens it
    writer.add("rounds", [range(4, 4 + len(columns))])
    writer.commit()
    writer.close()
    assert RunFolder.open(folder).table("rounds")["wall"][-2:] == [None, 4.0 + columns.index("wall")]
