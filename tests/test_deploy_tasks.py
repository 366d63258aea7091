"""What real sites can learn beside classes: as in a simulation, and refused where data, task or site do not fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("cryptography")

import fedkin as fk
from fedkin.config import make_config
from fedkin.core.federation import Answer
from fedkin.core.messages import for_some
from fedkin.data import from_arrays
from fedkin.deploy.greeting import Facts, fitting, like, together
from fedkin.deploy.joining import TRAVELS
from fedkin.deploy.policy import Policy
from fedkin.deploy.server import _check, prepare_deployed
from fedkin.deploy.sites import delivery
from fedkin.deploy.wire import Parcel, pack, unpack
from fedkin.deploy.worker import Worker
from fedkin.engines.measurement import Judge
from fedkin.engines.remote import Arrival, Bounds, Remote, Terms
from fedkin.errors import DataError, FedKinError, UsageError
from fedkin.models import MODELS, ModelEntry
from fedkin.rounds import Job, prepare
from fedkin.tasks import TASKS, make_task
from fedkin.use.model_file import load as load_model

NAMES = ["lima", "oslo", "rome"]
VOCABULARY, LENGTH = 9, 5
Data = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


class NextTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.head = nn.Linear(6, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.relu(self.embedding(x)))
        return out


@pytest.fixture(autouse=True)
def language(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS._entries, "tokens", ModelEntry(lambda *_: NextTokens(), "for this test", "none"))


def data_for(spec: str, i: int, n: int = 24) -> Data:
    rng = np.random.default_rng(i)
    x = rng.standard_normal((n, 4)).astype(np.float32)
    kind = make_task(spec).targets
    if kind == "tokens":
        text = rng.integers(0, VOCABULARY, (n, LENGTH + 1))
        return text[:, :-1], text[:, 1:]
    if kind == "labels":
        return x, (x[:, :3] > 0).astype(np.int64)
    if kind == "survival":
        return x, np.stack([np.exp(x[:, 0]) + 0.1, rng.random(n) < 0.7], 1)
    if kind == "classes":
        return x, (x[:, 0] > 0).astype(np.int64)
    return x, np.stack([x[:, 0] + i, x[:, 1]], 1)


class Sites:
    """Sites in this process: messages go to their workers, packed as on the wire; `lie` changes what one sends."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.workers = list(workers)
        self.facts = [Facts.of(unpack(w.answer({"own": pack({}, {"kind": "hello"})})).fields) for w in workers]
        self.came: dict[int, Arrival] = {}
        self.lie: Callable[[int, Parcel], bytes] | None = None

    def seat(self, job: Job, **change: Any) -> list[Parcel]:
        told = {k: v for k, v in job.config.to_dict().items() if k in TRAVELS} | change
        seat = {"attempt": 1, "round": 0, "clients": len(self.workers), "labels": together(self.facts)[2]}
        fields = {"kind": "join", "run": "run-1", **seat, "config": told}
        message = [pack({"initial": job.site.initial}, {**fields, "place": i}) for i in range(len(self.workers))]
        return [unpack(w.answer({"own": m})) for w, m in zip(self.workers, message, strict=True)]

    def send(
        self, ids: Sequence[int], message: Mapping[str, Any], fields: Mapping[str, Any], bounds: Bounds
    ) -> dict[int, str]:
        for place, client in enumerate(ids):
            whole = {"kind": "call", "run": "run-1", "attempt": 1, **fields}
            mine = for_some(message, slice(place, place + 1))
            reply = self.workers[client].answer({"own": pack(mine, whole)})
            if self.lie is not None and client == 0 and fields["call"] < 0:
                reply = self.lie(client, unpack(reply))
            self.came[client] = delivery(reply, 1 << 20)
        return {}

    def collect(self) -> dict[int, Arrival]:
        came, self.came = self.came, {}
        return came

    def cancel(self, ids: Sequence[int]) -> None: ...

    def present(self, client: int) -> bool:
        return True


def settings(spec: str, **more: Any) -> dict[str, Any]:
    model = {"model": "tokens" if spec.startswith("next-token") else "mlp"}
    usual = {"method": "fedper", "rounds": 2, "epochs": 1, "batch": 8, "lr": 0.05, "task": spec, "seed": 3}
    return {**usual, **model, **more}


def sites_of(folder: Path, spec: str, **given: Any) -> Sites:
    """A worker of each name with data for a task, drawn as in a simulation."""
    task, workers = make_task(spec), []
    targets: Any = task.targets
    for i, name in enumerate(NAMES):
        folder.mkdir(parents=True, exist_ok=True)
        x, y = data_for(spec, i)
        np.savez(folder / f"{name}.npz", x=x, y=y)
        more = {"vocabulary": VOCABULARY} if targets == "tokens" else {}
        own = {"targets": targets, "secret": False, **more, **given}
        workers.append(Worker(name, folder / f"{name}.npz", folder / name, lambda text: None, **own))
    return Sites(workers)


def deployed(sites: Sites, spec: str, **more: Any) -> Job:
    """The server's half, with all sites seated."""
    config = make_config(settings(spec, **more))
    _check(config)
    job = prepare_deployed(config, sites.facts, Remote(sites, NAMES, Terms(give_up=0.0, pause=0.0)))
    replies = sites.seat(job)
    assert [r.fields["kind"] for r in replies] == ["joined"] * len(NAMES), replies[0].fields
    return job


def run_out(job: Job) -> Job:
    for _ in range(job.config.rounds):
        job.advance()
    job.finish()
    return job


SPECS = ["regression", "regression:loss=huber", "multi-label:positive=balanced", "survival", "next-token"]


@pytest.mark.parametrize(
    ("spec", "method"),
    [*((s, "fedper") for s in SPECS), *((s, "fedcap") for s in ("survival", "classification:weights=balanced"))],
)
def test_sites_learn_every_task_as_in_a_simulation(spec: str, method: str, tmp_path: Path) -> None:
    more = {"method": method, "metrics": "all"}
    job = run_out(deployed(sites_of(tmp_path, spec), spec, **more))
    targets: Any = make_task(spec).targets
    words = VOCABULARY if targets == "tokens" else 0
    data = from_arrays([data_for(spec, i) for i in range(3)], names=NAMES, vocabulary=words, targets=targets, seed=3)
    twin = run_out(prepare(make_config(settings(spec, **more)), data=data))
    ours, theirs = job.result(), twin.result()
    assert ours.score.metric == theirs.score.metric == make_task(spec).main
    for one, two in zip(job.history, twin.history, strict=True):
        assert one.accuracy.macro == pytest.approx(two.accuracy.macro, rel=1e-4)
        assert one.test_loss == pytest.approx(two.test_loss, rel=1e-4)
        assert one.metrics == pytest.approx(two.metrics, rel=1e-4, nan_ok=True)
        assert one.metrics.keys() == make_task(spec).metrics.keys() - {make_task(spec).main}
    for place, name in enumerate(NAMES):
        kept = load_model(tmp_path / name / "runs" / "run-1" / "personal.safetensors")
        assert kept.card.targets == targets
        row = torch.cat([p.flatten() for p in twin.result().personal(place).parameters()])
        own = torch.cat([p.detach().flatten() for p in kept.module.parameters()])
        assert torch.allclose(own, row, rtol=1e-4, atol=1e-5)


def test_a_task_of_ones_own_goes_where_it_is_registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = fk.task(nn.functional.l1_loss, {"mae": nn.functional.l1_loss}, name="median")
    monkeypatch.setitem(TASKS._entries, "median", made)
    sites = sites_of(tmp_path, "median")
    job = run_out(deployed(sites, "median"))
    assert job.history[-1].judged == 3
    assert job.result().score.metric == "mae"
    with pytest.raises(UsageError, match="'median' has no options"):
        make_task("median:loss=mae")
    monkeypatch.setitem(TASKS._entries, "other", made)
    with pytest.raises(UsageError, match=r"calls itself 'median': make it with fk.task\(..., name='other'\)"):
        make_task("other")
    monkeypatch.delitem(TASKS._entries, "median")
    [no, *_] = sites.seat(job, task="median")
    assert no.fields["kind"] == "failed"
    assert "the task 'median' is not known at this site" in no.fields["reason"]
    assert "--plugin FILE.py" in no.fields["reason"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"task": "classification"}, "start its client with --task classification"),
        ({"task": "os.system"}, "not known at this site"),
        ({"task": "regression:loss=os"}, "loss="),
        ({"task": None}, "start its client with --task classification"),
        ({"metrics": "mse+shell"}, "unknown metric"),
        ({"method": "fedpkda"}, "cannot learn the task regression"),
        ({"method": "c-pfl"}, "between 0 and 1, which mse is not"),
    ],
)
def test_a_site_declines_what_its_data_are_not_for(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    sites = sites_of(tmp_path, "regression")
    job = deployed(sites, "regression")
    for worker in sites.workers:
        worker.joined = None
    for reply in sites.seat(job, **change):
        assert reply.fields["kind"] == "failed"
        assert why in reply.fields["reason"]
    assert all(worker.joined is None for worker in sites.workers)


def test_what_a_site_tells_of_targets_that_are_no_classes(tmp_path: Path) -> None:
    sites = sites_of(tmp_path, "regression")
    assert sites.facts[0] == Facts("lima", 24, None, (4,), "float32", (), "numbers", 2, 0)
    job = deployed(sites, "regression", metrics="r2")
    reply = unpack(ask(sites, job, "report_after_local"))
    assert {n: tuple(v.shape) for n, v in reply.values.items()} == {  # type: ignore[union-attr]
        "correct": (1, 1),
        "count": (1, 1),
        "loss": (1,),
        "extra": (1, 1),
        "known": (1, 1),
    }


def ask(sites: Sites, job: Job, phase: str) -> bytes:
    part = job.method.shared_part
    assert part is not None
    fields = {"kind": "call", "run": "run-1", "attempt": 1, "phase": phase, "round": 1, "call": -1, "checkpoints": []}
    return sites.workers[0].answer({"own": pack({part: getattr(job.method, part)}, fields)})


def test_a_policy_makes_every_metric_coarse_or_declines_it(tmp_path: Path) -> None:
    told = {}
    for evaluation in (0.0, 0.25):
        sites = sites_of(tmp_path / str(evaluation), "multi-label", policy=Policy(evaluation=evaluation))
        job = deployed(sites, "multi-label", metrics="auc+exact")
        told[evaluation] = unpack(ask(sites, job, "report")).values
    exact, coarse = told[0.0], told[0.25]
    f1, auc, whole = (float(v) for v in (coarse["correct"] / coarse["count"], *coarse["extra"][0]))  # type: ignore
    assert (f1 * 4 % 1, auc * 4 % 1, whole / 25 % 1) == (0, 0, 0)
    assert not torch.equal(exact["extra"], coarse["extra"])  # type: ignore[arg-type]
    assert float(coarse["loss"]) == pytest.approx(float(f"{float(exact['loss']):.2g}"), rel=1e-6)  # type: ignore
    guarded = Policy.of({"metrics": ["f1", "auc"]}, TRAVELS)
    sites = sites_of(tmp_path / "metrics", "multi-label", policy=guarded)
    config = make_config(settings("multi-label", metrics="auc+exact"))
    job = prepare_deployed(config, sites.facts, Remote(sites, NAMES))
    assert "metric 'exact': this site's policy allows f1, auc" in sites.seat(job)[0].fields["reason"]
    assert sites.seat(job, metrics="auc")[0].fields["kind"] == "joined"


def test_numbers_are_told_to_two_digits_by_a_coarse_policy(tmp_path: Path) -> None:
    sites = sites_of(tmp_path, "regression", policy=Policy(evaluation=0.1))
    job = deployed(sites, "regression", metrics="all")
    said = unpack(ask(sites, job, "report")).values
    numbers = [float(said["correct"] / said["count"]), *said["extra"][0].tolist()]  # type: ignore
    assert [float(f"{v:.2g}") for v in numbers] == pytest.approx(numbers, rel=1e-6)


# ---------------------------------------------------------------- hostile sites

SAID: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "nan": lambda v: {**v, "correct": v["correct"] * torch.nan},
    "infinite": lambda v: {**v, "extra": v["extra"] + torch.inf},
    "unknown nan": lambda v: {**v, "extra": v["extra"] * torch.nan, "known": ~v["known"]},
    "huge count": lambda v: {**v, "count": v["count"] + 1e30},
    "fewer samples": lambda v: {**v, "count": v["count"] - 1},
    "negative error": lambda v: {**v, "correct": -v["correct"]},
    "a metric of no samples": lambda v: {**v, "count": v["count"] * 0},
    "huge metric": lambda v: {**v, "extra": v["extra"] + 3e38},
    "impossible metric": lambda v: {**v, "extra": v["extra"] - 1e6},
    "hidden in what is not known": lambda v: {**v, "known": v["known"] & False},
    "huge loss": lambda v: {**v, "loss": v["loss"] + 3e38},
}
WRONG: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "an unknown name": lambda v: {**v, "accuracy": v["loss"]},
    "one metric more": lambda v: {**v, "extra": v["extra"].repeat(1, 2), "known": v["known"].repeat(1, 2)},
    "no metrics": lambda v: {n: t for n, t in v.items() if n not in ("extra", "known")},
    "per class": lambda v: {**v, "correct": v["correct"].repeat(1, 5)},
    "float64": lambda v: {**v, "extra": v["extra"].double()},
    "numbers for truths": lambda v: {**v, "known": v["known"].float()},
}


@pytest.fixture(scope="module")
def liars(tmp_path_factory: pytest.TempPathFactory) -> tuple[Sites, Job]:
    sites = sites_of(tmp_path_factory.mktemp("liars"), "regression")
    return sites, deployed(sites, "regression", metrics="all", rounds=200)


@pytest.mark.parametrize("how", [*SAID, *WRONG])
def test_metrics_that_cannot_be_are_refused_and_counted(how: str, liars: tuple[Sites, Job]) -> None:
    sites, job = liars
    change = {**SAID, **WRONG}[how]
    sites.lie = lambda client, reply: pack(change(dict(reply.values)), reply.fields)  # type: ignore[arg-type]
    assert isinstance(job.engine, Remote)
    invalid = job.engine.conducts[0]._sites[0].invalid
    record = job.advance()
    assert record is not None
    assert (record.judged, record.judgeable) == (2, 3)
    assert all(math.isfinite(v) for v in (record.accuracy.macro, record.test_loss, *record.metrics.values()))
    reason = job.fed.notes[-1].value["reasons"][0]
    assert reason, reason
    job.engine.conducts[0].good(0) if how in SAID else None
    assert job.engine.conducts[0]._sites[0].invalid == (invalid + 1 if how in WRONG else 0)
    job.engine.conducts[0].good(0)


def test_whatever_numbers_a_site_says_the_record_stays_finite() -> None:
    """No measurement of random numbers, extreme ones among them, gets past the bounds of its metrics."""
    rng, task = np.random.default_rng(0), make_task("regression")
    judge = Judge(task, task.chosen(["rmse", "r2"]), [8, 8])
    odd = np.array([0, -0.0, 1, 8, -1, 0.5, 1e30, 3e38, -3e38, np.inf, -np.inf, np.nan, 1e-45, 8.0001])
    believed = 0
    for _ in range(300):
        shapes = {"correct": (2, 1), "count": (2, 1), "loss": (2,), "extra": (2, 2)}
        one = {n: torch.from_numpy(rng.choice(odd, shape).astype(np.float32)) for n, shape in shapes.items()}
        found, why = judge.believed(Answer(np.arange(2), {**one, "known": torch.from_numpy(rng.random((2, 2)) < 0.5)}))
        for k in range(2):
            values = found.extra[k]
            if k in why:
                assert (found.total[k], found.correct[k]) == (0, 0)
                assert np.isnan(values).all()
            else:
                believed += 1
                assert found.total[k] in (0, 8)
                assert 0 <= found.correct[k] <= 8 * 1e30
                assert np.isnan(values[0]) or 0 <= values[0] <= 1e30
                assert np.isnan(values[1]) or -1e30 <= values[1] <= 1.0001
    assert believed


GREETING = {
    "site": "oslo",
    "samples": 10,
    "tests": None,
    "shape": [4],
    "dtype": "float32",
    "labels": [],
    "targets": "numbers",
    "width": 2,
    "vocabulary": 0,
}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"targets": "pickles"}, "no known kind"),
        ({"targets": ["numbers"]}, "no known kind"),
        ({"width": 10**9}, "1000000000 targets a sample"),
        ({"width": 0}, "0 targets a sample"),
        ({"width": True}, "True targets a sample"),
        ({"targets": "survival", "width": 3}, "which survival do not have"),
        ({"targets": "tokens", "width": 3}, "which tokens do not have"),
        ({"labels": [1, 2]}, "it names classes, and its targets are none"),
        ({"vocabulary": 10**9}, "1000000000 token ids"),
        ({"vocabulary": 5}, "with 5 token ids"),
        ({"dtype": "int64"}, "with 0 token ids"),
        ({"shape": [10**6, 10**6]}, "a sample of it has 1000000000000 numbers"),
    ],
)
def test_greetings_that_cannot_be(change: dict[str, Any], why: str) -> None:
    with pytest.raises(DataError, match=why):
        Facts.of({**GREETING, **change})


def test_sites_whose_targets_are_not_for_the_task_do_not_fit() -> None:
    one = Facts.of(GREETING)
    names = [replace(one, name=n) for n in ("lima", "oslo", "rome")]
    wide, classes = replace(one, name="a", width=900), replace(one, name="b", targets="classes", labels=(0, 1), width=1)
    kept, odd = fitting([*names, wide, classes], 1000, "numbers", "regression")
    assert kept == names
    assert "targets of 900 numbers a sample; most sites have" in odd["a"]
    assert "the run learns regression" in odd["b"]
    assert "start its client with --task regression" in odd["b"]
    huge = replace(one, name="c", width=5000)
    assert "5000 outputs there would be more than --max-classes 1000" in fitting([huge], 1000, "numbers")[1]["c"]
    assert fitting([one, wide], 1000, "numbers")[0] == [one]  # one against one: the smaller, not the first by name


@pytest.mark.parametrize("spec", [*SPECS, "classification"])
def test_samples_that_are_nobodys_look_like_those_of_the_sites(spec: str, tmp_path: Path) -> None:
    facts = sites_of(tmp_path, spec).facts
    made = like(facts)  # a Dataset checks its targets itself
    assert (made.x.dtype.name, made.x.shape[1:], made.targets) == (facts[0].dtype, facts[0].shape, facts[0].targets)


@pytest.mark.parametrize(
    ("spec", "more", "why"),
    [
        ("regression", {"metrics": "auc"}, "unknown metric"),
        ("regression", {"method": "pfedcs"}, "cannot learn the task regression"),
        ("shell", {}, "unknown task"),
        ("classification:weights=1+2+3", {}, "2 positive numbers"),
        ("multi-label:positive=1+2", {}, "3 positive numbers"),
        ("next-token", {"model": "fasttext"}, "must return a score for each of 9 tokens"),
    ],
)
def test_a_server_refuses_before_it_begins_what_no_site_could_learn(
    spec: str, more: dict[str, Any], why: str, tmp_path: Path
) -> None:
    sites = sites_of(tmp_path, spec if spec != "shell" else "regression")
    with pytest.raises(UsageError, match=why):
        deployed(sites, spec, **more)


def test_token_ids_need_their_number(tmp_path: Path) -> None:
    with pytest.raises(FedKinError, match="--vocabulary N"):
        sites_of(tmp_path, "next-token", vocabulary=0)
    with pytest.raises(DataError, match="vocabulary has 5"):
        sites_of(tmp_path, "next-token", vocabulary=5)
