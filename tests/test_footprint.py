"""What a run takes: clients that took no part have no row, models are judged a few at a time, and what a run will need
is said before it starts."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conformance import every_method, finished, job_of, personal_rows
from torch import Tensor, nn

import fedkin as fk
from fedkin.compute.layout import Layout
from fedkin.core import cohort as cohorts
from fedkin.core.cohort import Cohort
from fedkin.core.federation import Clients, Federation, Measured, each
from fedkin.core.store import Keep, Store
from fedkin.errors import DataError, UsageError
from fedkin.methods.fedavg import FedAvg
from fedkin.rounds import footprint
from fedkin.rounds.footprint import Footprint


def arrays(found: Measured) -> list[np.ndarray[Any, Any]]:
    """All that was measured, on test and on validation samples."""
    aside = [] if found.validation is None else arrays(found.validation)
    return [found.correct, found.total, found.loss, found.extra, *aside]


FEW = {"sizes": (9, 6, 2, 5, 7, 4, 3, 8), "participation": 0.25}


# ---------------------------------------------------------------- what clients keep


def store(clients: int = 50) -> Store:
    network = nn.Linear(3, 2)
    layout = Layout.of(network, head="")
    keeps = {"row": Keep("row"), "seen": Keep((), "zeros"), "mask": Keep("row", "zeros", torch.bool)}
    return Store(clients, keeps, layout, layout.row(network))


def test_the_store_is_a_row_for_everybody_that_holds_only_those_who_wrote() -> None:
    sparse, rng = store(), np.random.default_rng(0)
    plain = {name: torch.stack([sparse.first(name)] * 50) for name in sparse.keeps}
    for _ in range(30):
        name = str(rng.choice(list(plain)))
        ids = np.sort(rng.choice(40, rng.integers(1, 9), replace=False))  # ten clients never write
        rows = torch.from_numpy(rng.standard_normal((len(ids), *plain[name].shape[1:]))).to(plain[name].dtype)
        if name == "row" and rng.random() < 0.5:
            rows[0, 1] = [torch.nan, torch.inf, -torch.inf][rng.integers(3)]
            plain[name][ids[1:]] = rows[1:]
        else:
            plain[name][ids] = rows
        sparse.write(name, ids, rows)
        asked = rng.permutation(50)[: rng.integers(1, 50)]
        for n in plain:
            assert torch.equal(sparse.read(n, asked), plain[n][asked])
    state = sparse.state()
    assert all(40 >= len(v["ids"]) == len(v["rows"]) for v in state.values())
    again = store()
    again._initial = sparse._initial
    again.restore(state)
    for n in plain:
        assert torch.equal(again.read(n, np.arange(50)), plain[n])
    again.restore(sparse.tensors)
    assert all(torch.equal(again.read(n, np.arange(50)), plain[n]) for n in plain)


@pytest.mark.parametrize("wrong", ["name", "id", "twice", "shape", "type", "count"])
def test_a_saved_state_of_something_else_is_refused(wrong: str) -> None:
    kept = store()
    kept.write("row", np.array([1, 4]), torch.ones(2, 8))
    saved = kept.state()
    ids, rows = saved["row"]["ids"], saved["row"]["rows"]
    saved = {
        "name": {"other": saved["row"]},
        "id": {"row": {"ids": ids + 49, "rows": rows}},
        "twice": {"row": {"ids": ids * 0, "rows": rows}},
        "shape": {"row": {"ids": ids, "rows": rows[:, 1:]}},
        "type": {"row": {"ids": ids, "rows": rows.double()}},
        "count": {"row": {"ids": ids[:1], "rows": rows}},
    }[wrong]
    with pytest.raises(DataError, match="the saved state"):
        kept.restore(saved)


@pytest.mark.parametrize("method", ["ditto", "fedcap", "co-pfl", "fedpkda", "local"])
def test_only_those_who_took_part_are_held(method: str) -> None:
    job = job_of(method, **FEW)
    job.advance()
    assert {len(v["ids"]) for v in job.site.store.state().values()} == {2}


# ---------------------------------------------------------------- a few at a time


@pytest.fixture
def widest(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of clients that were worked on at once."""
    seen: list[int] = []
    begin = Cohort.__init__

    def spied(self: Cohort, site: Any, ids: Any, round: int, stream: str) -> None:
        seen.append(len(ids))
        begin(self, site, ids, round, stream)

    monkeypatch.setattr(cohorts.Cohort, "__init__", spied)
    return seen


@pytest.mark.parametrize("method", every_method())
def test_chunk_bounds_training_judging_and_the_result(method: str, widest: list[int]) -> None:
    job = finished(job_of(method, sizes=FEW["sizes"], chunk=3))
    job.result()
    assert max(widest) == 3


@pytest.mark.parametrize("method", every_method())
@pytest.mark.parametrize("point", ["received", "after_local", "last_round"])
def test_how_many_are_judged_together_changes_no_bit(method: str, point: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = finished(job_of(method, **FEW, eval_point=point))
    whole, rows = job.evaluate(), personal_rows(job)
    for some in (1, 3):
        monkeypatch.setattr(type(job.engine), "at_once", some)
        for a, b in zip(arrays(whole), arrays(job.evaluate()), strict=True):
            assert a.tobytes() == b.tobytes()
        assert torch.equal(rows, personal_rows(job))


def test_without_a_chunk_the_models_judged_together_are_bounded_by_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_of("fedavg", **FEW)
    width = job.site.layout.width
    monkeypatch.setattr("fedkin.engines.simulator.cores", lambda: 2)
    assert 4 * width * job.engine.at_once <= 16 << 20 < 4 * width * (job.engine.at_once + 2)
    assert job_of("fedavg", **FEW, chunk=5).engine.at_once == 5


def test_a_message_of_its_own_for_each_may_be_made_for_some_or_for_all() -> None:
    class ForSome(FedAvg):
        def deliver_to(self, fed: Federation, clients: Clients) -> dict[str, Any]:
            return {"model": each(torch.stack([self.model + c for c in clients]))}

    class ForAll(FedAvg):  # as methods did it that were written before
        def deliver_to_all(self, fed: Federation) -> dict[str, Any]:
            return {"model": each(torch.stack([self.model + c for c in fed.all]))}

    jobs = [finished(job_of(kind, **FEW, chunk=3)) for kind in (ForSome, ForAll)]
    expected = torch.stack([jobs[0].method.model + c for c in range(8)])  # type: ignore[attr-defined]
    for job in jobs:
        assert torch.equal(personal_rows(job), expected)
    assert all(np.array_equal(a, b) for a, b in zip(*(arrays(j.evaluate()) for j in jobs), strict=True))


def test_a_large_result_makes_a_model_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, widest: list[int]) -> None:
    job = job_of("fedcap", **FEW)
    job.advance()
    small = job.result()
    assert isinstance(small._rows, Tensor)
    monkeypatch.setattr(footprint, "MODELS_AT_ONCE", 100)
    large = job.result()
    assert not isinstance(large._rows, Tensor)
    assert len(large._rows) == 8
    widest.clear()
    for client in range(8):
        assert torch.equal(large._rows[client], small._rows[client])
        one, two = (dict(r.personal(client).named_parameters()) for r in (small, large))
        assert all(torch.equal(one[n], two[n]) for n in one)
    assert set(widest) == {1}
    with pytest.raises(UsageError, match="clients 0 to 7"):
        large.personal(8)
    job.advance()
    with pytest.raises(UsageError, match="is of round 1, and its run has gone on"):
        large.personal(0)


# ---------------------------------------------------------------- before a run starts


def refusing(monkeypatch: pytest.MonkeyPatch, **room: int) -> None:
    monkeypatch.setattr(footprint, "host_room", lambda: room.get("host", 1 << 40))


def test_a_run_that_cannot_fit_is_refused_with_what_would_help(monkeypatch: pytest.MonkeyPatch) -> None:
    refusing(monkeypatch, host=10_000)
    with pytest.raises(UsageError, match=r"needs about .* of memory, and .*--chunk.*--participation.*--force"):
        job_of("ditto")
    assert job_of("ditto", force=True).prepared.needed.host > 10_000  # type: ignore[union-attr]


def test_a_folder_that_cannot_fit_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=100))
    settings: dict[str, Any] = {"clients": 5, "rounds": 1, "epochs": 1, "way": "each"}
    settings["runs_dir"] = str(tmp_path / "new")
    with pytest.raises(UsageError, match=r"of disk, and there are 100 B.*--checkpoint-every 0.*--force"):
        fk.run("ditto", **settings)
    assert not (tmp_path / "new").exists()
    assert fk.run("ditto", **settings, force=True).run


def test_resuming_asks_no_second_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done = fk.run("ditto", clients=5, rounds=1, epochs=1, way="each", runs_dir=str(tmp_path))
    refusing(monkeypatch, host=10)
    assert torch.equal(fk.resume(str(done.run))._rows, done._rows)  # type: ignore[arg-type]


def test_the_control_groups_limit_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = {
        "/proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 8000 kB\n",
        "/sys/fs/cgroup/memory.max": "5000000\n",
        "/sys/fs/cgroup/memory.current": "1000000\n",
    }

    def read(path: Path) -> str:
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(Path, "read_text", read)
    assert footprint.host_room() == 4_000_000
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert footprint.host_room() == 8000 * 1024
    files.clear()
    assert footprint.host_room() is None


def test_more_clients_models_and_rounds_need_more() -> None:
    def needed(method: str = "ditto", **more: Any) -> Footprint:
        found = job_of(method, **{"sizes": (4,) * 40, "participation": 0.25, "rounds": 2, **more}).prepared.needed
        assert found is not None
        return replace(found, host=found.host - footprint.resident())

    assert needed(checkpoint_every=0).disk < needed().disk < needed(rounds=20).disk
    assert needed("fedavg").disk < needed("ditto").disk < needed("co-pfl").disk
    assert needed("ditto", participation=0.1).disk < needed("ditto", participation=1.0).disk


def test_what_was_expected_and_what_it_came_to_is_in_the_result_and_the_folder(tmp_path: Path) -> None:
    result = fk.run("fedavg", clients=5, rounds=1, epochs=1, way="each", runs_dir=str(tmp_path))
    said = result.to_dict()["memory"]
    assert said["host_peak"] > 50e6
    assert said["host_estimate"] > 50e6
    raw = json.loads((Path(str(result.run)) / "run.json").read_text())
    assert raw["result"]["memory"]["host_peak"] == said["host_peak"]
    assert raw["prepared"]["needed"]["disk"] == said["disk_estimate"]
    size = sum(f.stat().st_size for f in Path(str(result.run)).rglob("*") if f.is_file())
    assert 0.3 < said["disk_estimate"] / size < 3


# ---------------------------------------------------------------- against what is measured

MEASURE = """
import json, sys, numpy, torch
from fedkin.rounds import footprint
from fedkin.config import make_config
from fedkin.data import from_arrays
from fedkin.rounds import drive, prepare
torch.set_num_threads(1)
given, draw = json.loads(sys.argv[1]), numpy.random.default_rng(0)
arrays = [(draw.standard_normal((8, 64)).astype("f4"), draw.integers(0, 4, 8)) for _ in range(given["clients"])]
sizes = [(64, 1000), (1000, 256), (256, 4)]
layers = [layer for size in sizes for layer in (torch.nn.Linear(*size), torch.nn.ReLU())][:-1]
config = make_config({"epochs": 1, "rounds": 2, "way": "each", "device": "cpu", "data": "own", **given})
job = prepare(config, data=from_arrays(arrays), model=torch.nn.Sequential(*layers))
now = footprint.resident()
drive(job)
print(json.dumps([job.prepared.needed.host - now, footprint.peak() - now]))
"""


def growth(**given: Any) -> tuple[int, int]:
    """Bytes by which a process grows while it runs: expected, and measured in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, json.dumps(given)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    expected, measured = json.loads(done.stdout.splitlines()[-1])
    return expected, measured


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        {"method": "fedavg", "clients": 200},
        {"method": "fedavg", "clients": 200, "chunk": 10},
        {"method": "fedavg", "clients": 150, "way": "batched"},
        {"method": "ditto", "clients": 200},
        {"method": "fedcap", "clients": 150},
        {"method": "fedcap", "clients": 600, "participation": 0.05},
        {"method": "co-pfl", "clients": 60},
        {"method": "c-pfl", "clients": 150},
        {"method": "fedpkda", "clients": 150},
        {"method": "pfedcs", "clients": 150},
        {"method": "fedavg-ft", "clients": 150},
    ],
    ids=lambda g: "-".join(map(str, g.values())),
)
def test_the_estimate_is_within_a_factor_of_two(given: dict[str, Any]) -> None:
    expected, measured = growth(**given)
    assert 0.5 < expected / measured < 2, f"expected {expected / 1e6:.0f} MB, measured {measured / 1e6:.0f} MB"


@pytest.mark.slow
def test_many_clients_of_which_few_take_part_need_little() -> None:
    """2,000 models are 2.6 GB; a round of 20, its memory and what is judged at once are a tenth of that."""
    _, measured = growth(method="fedcap", clients=2000, participation=0.01)
    assert measured < 1e9
    _, bounded = growth(method="fedavg", clients=400, chunk=10)
    _, unbounded = growth(method="fedavg", clients=400)
    assert bounded < 0.8 * unbounded
