"""Which way trains: measured, remembered in the user's cache, and forced when asked."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from reference import Bench, distance
from test_core_training import RAGGED, Branching, Small

import fedkin as fk
import fedkin.compute.choice as choice
from fedkin.compute.backends import WAYS, cores
from fedkin.compute.choice import Chooser, cache_file, candidates, choose
from fedkin.compute.losses import cross_entropy
from fedkin.compute.optim import SGD, Adam, Moments
from fedkin.compute.work import Work
from fedkin.errors import UsageError
from fedkin.runs.folder import RunFolder
from fedkin.runs.start import resume


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "fedkin" / "ways.json"


def bench_of(chooser: Chooser, model: type = Small, shape: tuple[int, ...] = (2, 8, 8)) -> Bench:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((sum(RAGGED), *shape)).astype(np.float32), rng.integers(0, 3, sum(RAGGED))
    torch.manual_seed(1)
    return Bench(model(), x, y, RAGGED, classes=3, chooser=chooser)


def work_of(bench: Bench, **more) -> Work:
    names = tuple(s.name for s in bench.layout.slots if s.kind != "buffer")
    return Work(
        bench.site.forward,
        bench.layout,
        bench.starts(),
        np.arange(len(RAGGED)),
        bench.source,
        bench.plan(),
        bench.opt,
        names,
        **more,
    )


def test_the_choice_is_measured_once_and_remembered(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(choice, "choose", lambda work: asked.append(1) or "each")
    for _ in range(2):  # the second chooser reads what the first has written
        bench = bench_of(Chooser())
        for round in range(2):
            bench.cohort(round=round).fit(bench.starts())
    assert len(asked) == 1
    assert list(json.loads(cache.read_text()).values()) == ["each"]
    assert list(bench.site.chooser.chosen.values()) == ["each"]


def test_other_work_is_measured_anew(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "choose", lambda work: "each")
    bench = bench_of(Chooser())
    bench.cohort().fit(bench.starts())
    bench.cohort().fit(bench.starts(), learn="head")
    bench.cohort([0]).fit(bench.starts()[:1])
    bench.cohort().fit(bench.starts(), opt=Adam(0.001))
    assert len(bench.site.chooser.chosen) == 4
    assert len(json.loads(cache.read_text())) == 3  # for one row there is only one way


def test_a_remembered_choice_is_taken(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    real = choice.run_way
    monkeypatch.setattr(choice, "run_way", lambda way, work: used.append(way) or real(way, work))
    first = bench_of(Chooser())
    first.cohort().fit(first.starts())
    (kind,) = json.loads(cache.read_text())
    for way in ("batched", "each"):
        cache.write_text(json.dumps({kind: way}))
        bench = bench_of(Chooser())
        bench.cohort().fit(bench.starts())
        assert used[-1] == way


@pytest.mark.parametrize("damage", ["", "{", "[1, 2]", '"each"', "\x00\x01", '{"a": ['])
def test_a_damaged_cache_is_replaced(cache: Path, damage: str) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text(damage)
    bench = bench_of(Chooser())
    start = bench.starts()
    assert distance(bench.cohort().fit(start), bench.reference(start), start) < 1e-4
    assert set(json.loads(cache.read_text()).values()) <= set(WAYS)


def test_bytes_that_are_no_text_are_replaced_too(cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_bytes(b"\xff\xfe\x80")
    bench = bench_of(Chooser())
    bench.cohort().fit(bench.starts())
    assert json.loads(cache.read_text())


@pytest.mark.parametrize("way", ["graph", "compiled", "teleport"])
def test_a_remembered_way_that_cannot_run_here_is_ignored(cache: Path, way: str) -> None:
    bench = bench_of(Chooser())
    bench.cohort().fit(bench.starts())
    (kind,) = json.loads(cache.read_text())
    cache.write_text(json.dumps({kind: way}))
    again = bench_of(Chooser())
    again.cohort().fit(again.starts())
    assert again.site.chooser.chosen[kind] in ("each", "threads", "batched")


def test_what_others_have_remembered_is_kept(cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text('{"other": "each"}')
    bench = bench_of(Chooser())
    bench.cohort().fit(bench.starts())
    assert json.loads(cache.read_text())["other"] == "each"
    assert len(json.loads(cache.read_text())) == 2
    assert [p.name for p in cache.parent.iterdir()] == ["ways.json"]  # no temporary files left


def test_a_cache_that_cannot_be_written_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    bench = bench_of(Chooser())
    assert torch.isfinite(bench.cohort().fit(bench.starts())).all()


def test_a_chooser_may_forget(cache: Path) -> None:
    bench = bench_of(Chooser(remember=False))
    bench.cohort().fit(bench.starts())
    assert not cache.exists()


def test_the_cache_is_where_the_system_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_file() == tmp_path / "fedkin" / "ways.json"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert cache_file() == Path.home() / ".cache" / "fedkin" / "ways.json"


def test_choosing_leaves_the_work_alone() -> None:
    bench = bench_of(Chooser())
    moments = Moments.zeros(SGD(0.1, 0.9), len(RAGGED), bench.layout.width, torch.device("cpu"))
    work = work_of(bench, moments=moments, terms=[cross_entropy()])
    work.opt = SGD(0.1, 0.9)
    before = work.rows.clone()
    assert choose(work) in candidates(work)
    assert torch.equal(work.rows, before)
    assert not moments.steps.any()
    assert not moments.buffers[0].any()


def test_the_fastest_way_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    import fedkin.compute.choice as ways

    for fast in ("each", "batched"):
        monkeypatch.setattr(ways, "run_way", lambda way, work, fast=fast: time.sleep(0.001 if way == fast else 0.05))
        assert choose(work_of(bench_of(Chooser()))) == fast


def test_candidates_are_those_that_can_run() -> None:
    many = work_of(bench_of(Chooser()))
    several = ["threads"] if cores() > 1 else []
    assert candidates(many) == [*several, "each", "batched"]
    assert candidates(many.take([0], 1)) == ["each"]
    assert "batched" not in candidates(work_of(bench_of(Chooser(), Branching, (5,))))


def test_forced_ways_that_cannot_be_are_refused() -> None:
    with pytest.raises(UsageError, match="did you mean 'batched'"):
        Chooser("batch")
    with pytest.raises(UsageError, match=r"way='compiled' was removed .* use way='graph' or auto"):
        Chooser("compiled")
    bench = bench_of(Chooser("graph"))
    with pytest.raises(UsageError, match="needs a CUDA device"):
        bench.cohort().fit(bench.starts())
    bench = bench_of(Chooser("batched"), Branching, (5,))
    with pytest.raises(UsageError, match="choose each or threads"):
        bench.cohort().fit(bench.starts())


def test_a_run_begun_in_a_way_that_was_removed_goes_on(tmp_path: Path) -> None:
    settings = {"data": "digits", "clients": 5, "samples_per_client": 20, "rounds": 2, "epochs": 1, "device": "cpu"}
    whole = fk.run("fedavg", **settings, way="each")

    def stop(event: object) -> None:
        if getattr(event, "round", 0) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fk.run("fedavg", **settings, way="each", runs_dir=str(tmp_path), checkpoint_every=1, on_event=stop)
    (record,) = tmp_path.glob("*/run.json")
    record.write_text(record.read_text().replace('"way": "each"', '"way": "compiled"'))
    assert RunFolder.open(record.parent).info.config["way"] == "compiled"
    said: list[str] = []
    resumed = resume(RunFolder.open(record.parent), say=said.append)
    assert any("it goes on with way=auto" in s for s in said)
    torch.testing.assert_close(resumed._rows, whole._rows)


def test_a_forced_way_asks_no_cache(cache: Path) -> None:
    bench = bench_of(Chooser("each"))
    bench.cohort().fit(bench.starts())
    assert not cache.exists()
