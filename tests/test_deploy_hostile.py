"""Real processes that lie, freeze or die: whatever a site sends, the server and the other sites go on."""

from __future__ import annotations

import math
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("httpx")

from test_deploy_processes import Make, Place, Process, experiment, place
from typer.testing import CliRunner

from fedkin.cli.application import app
from fedkin.deploy.cluster import write_experiment
from fedkin.engines.remote import Terms
from fedkin.rounds import Result
from fedkin.runs.folder import RunFolder
from fedkin.web import views

__all__ = ["place"]
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedcap": {"participation": 0.5},
    "c-pfl": {"options": {"committee": 2, "finetune_epochs": 1}},
    "pfedcs": {"options": {"beta": 3}},
    "co-pfl": {"lr": 0.001, "optimiser": "adam"},
    "fedpkda": {},
}
QUICK = Terms(deadline=20, give_up=120, phases={"report": 20})


def peak(process: Process) -> int:
    """The most memory that a process has had, in bytes."""
    status = Path(f"/proc/{process.popen.pid}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM"))


def honest_and_whole(here: Place, result: Result, liar: int, rounds: int) -> None:
    """Every round was done, nobody but the liar failed, and the others have models that are numbers."""
    assert result.history[-1].round == rounds
    assert {f.client for f in result.failures} <= {liar}
    for number, name in enumerate(here.names):
        if number != liar:
            assert torch.isfinite(here.model(name)).all()


# ---------------------------------------------------------------- a few, quick


def test_a_site_alone_does_not_decide_what_is_right(place: Make) -> None:
    """One site, and all that it sends has the wrong shape: nothing of it is used, and the server ends in order."""
    here = place(1, insecure=True)
    here.liar(here.names[0], "always:shape")
    lines: list[str] = []
    result = here.serve(experiment("fedavg", rounds=4), lines, terms=Terms(deadline=60, minimum=0, pause=0, invalid=3))
    assert len(result.failures) == 3
    assert all("'model' has shape" in f.reason for f in result.failures)
    assert result.removed == {0: 2}
    assert any("'bergen': removed for good after 3 invalid messages in a row" in line for line in lines)
    run = RunFolder.open(str(result.run))
    (gone,) = run.events("removed")
    assert gone["reason"].startswith("3 invalid messages in a row, the last: 'model' has shape")
    shown = CliRunner().invoke(app, ["show", run.info.id, "--runs-dir", str(run.path.parent)], env={"COLUMNS": "300"})
    assert "round 3: bergen (3 invalid messages in a row, the last: 'model' has shape" in shown.output
    assert "removed for good: 3 invalid messages" in (run.path / "log.txt").read_text()
    assert math.isnan(result.history[-1].train_loss)


# ---------------------------------------------------------------- many, slow


@pytest.fixture(scope="module")
def crew(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Three honest sites that stay for one run after another; the fourth is a liar's place."""
    here = Place(tmp_path_factory.mktemp("crew"), 4)
    for i, name in enumerate(here.names):
        if i != LIAR:
            here.client(name, "--stay")
    yield here
    here.close()


LIAR = 2
LIES = [
    "nan",
    "huge",
    "shape",
    "empty",
    "nothing",
    "float64",
    "int64",
    "names",
    "garbage",
    "pickle",
    "large",
    "loss",
    "steps",
    "failed",
    "kind",
    "strides",
    "bomb",
]


def hosted(here: Place, lies: str, method: str, rounds: int = 4, **more: Any) -> tuple[Result, list[str], float]:
    liar = here.liar(here.names[LIAR], lies)
    lines: list[str] = []
    settings = {"rounds": rounds, **METHODS[method]}
    try:
        begin = time.monotonic()
        result = here.serve(experiment(method, **settings), lines, **{"terms": QUICK, **more})
        return result, lines, time.monotonic() - begin
    finally:
        liar.popen.kill()
        liar.popen.wait(10)


@pytest.mark.slow
@pytest.mark.parametrize("kind", LIES)
def test_no_reply_ends_the_server_or_harms_the_others(crew: Place, kind: str) -> None:
    result, _, _ = hosted(crew, f"always:{kind}", "fedavg", terms=Terms(deadline=60, pause=0.0), largest=1 << 20)
    if kind == "huge":  # finite numbers: a mean lets them through, as the documentation says
        assert result.history[-1].round == 4
        return
    honest_and_whole(crew, result, LIAR, 4)
    assert len(result.failures) == 4
    assert all(crew.names[LIAR] in f.reason or "not finite" in f.reason for f in result.failures)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["infinite", "shape", "nothing", "garbage", "strides", "float64"])
def test_no_report_ends_the_server_and_the_accuracy_says_of_whom_it_is(crew: Place, kind: str) -> None:
    result, _, _ = hosted(crew, f"report:{kind}", "fedavg", terms=Terms(deadline=60, pause=0.0))
    honest_and_whole(crew, result, LIAR, 4)
    assert {(r.judged, r.judgeable) for r in result.history} == {(3, 4)}
    run = RunFolder.open(str(result.run))
    shown = CliRunner().invoke(app, ["show", run.info.id, "--runs-dir", str(run.path.parent)], env={"COLUMNS": "300"})
    assert "3 of 4 clients when last evaluated; in 4 rounds not all answered" in shown.output
    assert views.run_page(run)["partly"] == [1, 2, 3, 4]
    events = run.events("unjudged")
    assert {e["client"] for e in events} == {LIAR}
    assert {e["round"] for e in events} == {1, 2, 3, 4}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["shape", "failed", "silent", "die", "freeze", "huge"])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_ends_though_a_site_is_dead_frozen_or_lying(crew: Place, method: str, kind: str) -> None:
    result, _, seconds = hosted(crew, f"always:{kind}", method, rounds=5)
    assert result.history[-1].round == 5
    if kind != "huge":  # finite numbers, which only some methods tell from others
        assert {f.client for f in result.failures} <= {LIAR}
    assert seconds < 200
    trained = [e for e in result.exchanges if e.answered]
    assert trained, "nobody answered anything"
    for number, name in enumerate(crew.names):
        if number != LIAR and kind != "huge":
            assert torch.isfinite(crew.model(name)).all()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["classes", "samples", "other", "garbage", "bomb"])
def test_no_greeting_costs_memory_or_prevents_the_start(place: Make, kind: str) -> None:
    """With --least the run starts with those who came; a claim that can be true is believed, at no cost."""
    here = place(4)
    for i, name in enumerate(here.names):
        here.liar(name, f"hello:{kind}") if i == LIAR else here.client(name)
    toml = write_experiment(experiment("fedavg"), here.folder, 4)
    server = here.server(str(toml), "--least", "3", "--wait", "60")
    server.wait_for("round 1/2", 150)
    most = peak(server)
    assert server.ended(120) == 0, server.text()[-3000:]
    assert most < 1200 << 20, most
    run = RunFolder.open(next((here.folder / "runs").iterdir()))
    assert run.info.prepared["classes"] == 10
    assert len(run.info.names) == (4 if kind == "samples" else 3)


@pytest.mark.slow
def test_a_masked_reply_of_a_few_bytes_stays_one(place: Make) -> None:
    here = place(3)
    for i, name in enumerate(here.names):
        here.liar(name, "always:bomb") if i == LIAR else here.client(name)
    toml = write_experiment(experiment("co-pfl", rounds=4), here.folder, 3)
    server = here.server(str(toml), "--remove-after", "2")
    server.wait_for("removed for good after 2 invalid messages", 150)
    most = peak(server)
    assert server.ended(120) == 0, server.text()[-3000:]
    assert most < 1200 << 20, most


@pytest.mark.slow
def test_a_site_that_declines_is_named_and_so_is_the_flag(place: Make) -> None:
    here = place(3)
    for i, name in enumerate(here.names):
        here.liar(name, "join:failed") if i == 1 else here.client(name, "--stay")
    toml = write_experiment(experiment("fedavg"), here.folder, 3)
    first = here.server(str(toml))
    assert first.ended(150) == 1
    assert "'kyoto' cannot take part: " in first.text()
    assert "out of patience" in first.text()
    assert "\x1b[2J" not in first.text()
    assert "start with those who came: --least 2" in first.text().replace("\n", " ")
    again = here.server(str(toml), "--least", "2")
    assert again.ended(150) == 0, again.text()[-3000:]


@pytest.mark.slow
def test_the_server_gives_up_resumable_and_goes_on_when_they_are_back(place: Make) -> None:
    here = place(3)
    clients = [here.client(name) for name in here.names]
    toml = write_experiment(experiment("ditto", rounds=40), here.folder, 3)
    server = here.server(str(toml), "--give-up", "5", "--deadline", "60")
    server.wait_for("round 2/40", 150)
    for client in clients[1:]:
        client.kill()
    assert server.ended(200) == 1
    assert "--give-up" in server.text()
    assert "--resume" in server.text()
    run = RunFolder.open(next((here.folder / "runs").iterdir()))
    assert run.info.status == "failed"
    for name in here.names[1:]:
        here.client(name)
    again = here.server("--resume", "last")
    assert again.ended(300) == 0, again.text()[-3000:]
    assert RunFolder.open(run.path).info.status == "finished"


# ---------------------------------------------------------------- damage on the server's disk


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["gone", "page", "checkpoint", "foreign"])
def test_a_server_mends_what_it_can_and_changes_nothing_where_it_cannot(place: Make, damage: str) -> None:
    here = place(3)
    for name in here.names:
        here.client(name, "--stay")
    toml = write_experiment(experiment("ditto", rounds=30), here.folder, 3)
    server = here.server(str(toml))
    server.wait_for("round 6/30", 150)
    server.kill()
    run = RunFolder.open(next((here.folder / "runs").iterdir()))
    metrics, newest = run.path / "metrics.sqlite", max((run.path / "checkpoints").glob("*.safetensors"))
    states = {p: p.read_bytes() for name in here.names for p in (here.folder / name / "runs").rglob("*.safetensors")}
    if damage == "gone":
        metrics.unlink()
    elif damage == "page":
        torn = bytearray(metrics.read_bytes())
        torn[4096 * 5 : 4096 * 6] = bytes(range(256)) * 16
        metrics.write_bytes(torn)
    elif damage == "checkpoint":
        torn = bytearray(newest.read_bytes())
        torn[len(torn) // 2] ^= 1
        newest.write_bytes(torn)
    else:
        raw = (run.path / "run.json").read_text()
        (run.path / "run.json").write_text(raw.replace(f'"id": "{run.path.name}"', '"id": "another-run"'))
    before = {p: p.read_bytes() for p in (run.path / "checkpoints").iterdir()}
    again = here.server("--resume", "last")
    if damage == "foreign":
        assert again.ended(150) != 0
        text = " ".join(again.text().split())
        assert f"that is of run '{run.path.name}'; nothing was changed" in text
        assert {p: p.read_bytes() for p in (run.path / "checkpoints").iterdir()} == before
        assert all(p.read_bytes() == held for p, held in states.items())
        return
    assert again.ended(300) == 0, again.text()[-3000:]
    assert ("is damaged" in again.text()) or ("written anew" in again.text())
    with sqlite3.connect(metrics) as base:
        assert base.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert RunFolder.open(run.path).table("rounds")["round"] == list(np.arange(1, 31))
