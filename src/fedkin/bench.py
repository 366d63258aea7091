"""Speed as a ratio: the obvious loop and the cohort on the same work, in one process and one call.

The loop is what anybody would write first: one client after another, an ordinary `nn.Module` and `torch.optim.SGD`,
the device's default settings. The cohort is what a run uses. Both see the same mini-batches, so the models they end
with are compared too. Timings alternate and the median counts, because machines are shared.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedkin.cohort import Cohort, Site, Store, Training
from fedkin.compute import graphs
from fedkin.compute.batches import Source, plan
from fedkin.compute.choice import Chooser
from fedkin.compute.optim import SGD
from fedkin.compute.program import trace
from fedkin.compute.ways import matmul_precision
from fedkin.config import make_config
from fedkin.data import Dataset
from fedkin.errors import unknown
from fedkin.layout import Layout
from fedkin.methods import METHODS
from fedkin.models import build
from fedkin.rounds import Job, pick_device, pick_precision, prepare, split_of

Precision = Literal["fp32", "tf32", "bf16"]
PRECISIONS = ("auto", "fp32", "tf32", "bf16")


@dataclass(frozen=True)
class Case:
    about: str
    model: str
    shape: tuple[int, int, int]
    classes: int
    clients: int
    batch: int
    samples: int
    epochs: int
    ragged: bool = False
    loop: bool = True  # the loop is timed too
    chunk: int | None = None


CIFAR = (3, 32, 32)
CASES: dict[str, Case] = {
    "cnn-512": Case("20 clients of CNN-512, batch 10, 5 epochs of 200 samples", "cnn-512", CIFAR, 10, 20, 10, 200, 5),
    "cnn-512-100": Case("the same with 100 clients", "cnn-512", CIFAR, 10, 100, 10, 200, 5),
    "fedcap-emnist": Case("50 clients of FedCAP's EMNIST network, batch 10, 5 epochs of 200 samples",
                          "fedcap-emnist", (1, 28, 28), 62, 50, 10, 200, 5),
    "resnet18": Case("10 clients of ResNet-18, batch 32, 3 epochs of 320 samples", "resnet18", CIFAR, 10, 10, 32,
                     320, 3),
    "ragged": Case("50 clients of CNN-512 with 34 to 2,628 samples, batch 10, 1 epoch", "cnn-512", CIFAR, 10, 50, 10,
                   600, 1, ragged=True),
    "emnist-1000": Case("memory: 1,000 clients of FedCAP's EMNIST network in chunks of 100, 1 epoch of 40 samples",
                        "fedcap-emnist", (1, 28, 28), 62, 1000, 10, 40, 1, loop=False, chunk=100),
}  # fmt: skip
BENCHES: dict[str, str] = {name: case.about for name, case in CASES.items()} | {
    "methods": "what methods cost beside FedAvg and FedBABU in the same run, and their server steps alone"
}
ON_CPU = ("cnn-512", "fedcap-emnist", "emnist-1000", "methods")
ON_GPU = ("cnn-512", "cnn-512-100", "resnet18", "ragged")


def run_bench(
    what: str = "all", device: str = "auto", quick: bool = False, precision: str = "auto", way: str = "auto"
) -> list[dict[str, Any]]:
    """One row per case: seconds, milliseconds per client-step of both, the ratio, peak memory, agreement."""
    chosen = pick_device(device)
    if what != "all" and what not in BENCHES:
        raise unknown("benchmark", what, [*BENCHES, "all"])
    if precision not in PRECISIONS:
        raise unknown("precision", precision, PRECISIONS)
    names = [what] if what != "all" else list(ON_GPU if chosen.type == "cuda" else ON_CPU)
    rows: list[dict[str, Any]] = []
    for name in names:
        if name == "methods":
            rows += method_costs(chosen, quick)
        else:
            rows.append(measure(name, chosen, pick_precision(precision, chosen), quick, way))
    return rows


def measure(name: str, device: torch.device, precision: Precision, quick: bool, way: str) -> dict[str, Any]:
    case = CASES[name]
    if quick:
        case = Case(**{**vars(case), "samples": max(case.samples // 4, 2 * case.batch), "epochs": 1})
    network = build(case.model, case.shape, case.classes)
    site, parts = _site(case, network, device, precision, way)
    ids = np.arange(case.clients)
    steps = plan(parts, ids, case.epochs, case.batch, (0, 0, "bench", 1), site.has_batch_norm)
    client_steps = int(steps.steps.sum())

    def cohort() -> Tensor:
        size = case.chunk or case.clients
        done = [
            Cohort(site, ids[at : at + size], 0, "bench", horizon=10_000).fit(site.initial)
            for at in range(0, case.clients, size)
        ]
        return torch.cat(done)

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    begin = time.perf_counter()
    mine = cohort()
    if device.type == "cuda" and way == "auto":
        for _ in range(2):  # graphs are timed in the second job, and the compiler runs in the third
            cohort()
    _sync(device)
    ready = time.perf_counter() - begin
    repeats = 1 if quick or not case.loop else 3
    theirs: Tensor | None = None
    loops, cohorts = [], []
    for _ in range(repeats):
        if case.loop:
            theirs, seconds = _timed(lambda: _loop(network, site, steps, case, precision), device)
            loops.append(seconds)
        mine, seconds = _timed(cohort, device)
        cohorts.append(seconds)
    row: dict[str, Any] = {
        "case": name,
        "about": case.about,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "precision": precision,
        "quick": quick,
        "ways": sorted(set(site.chooser.chosen.values())) or [way],
        "client_steps": client_steps,
        "cohort_ms": 1e3 * statistics.median(cohorts) / client_steps,
        "cohort_step_ms": 1e3 * statistics.median(cohorts) / len(steps.sizes),
        "first_fit_s": ready,
        "peak_mb": _peak_mb(device),
    }
    if theirs is not None:
        row["loop_ms"] = 1e3 * statistics.median(loops) / client_steps
        row["ratio"] = statistics.median(loops) / statistics.median(cohorts)
        row["difference"] = float((mine - theirs).norm() / (theirs - site.initial).norm())
    if case.ragged and device.type == "cuda":
        row["wasted"] = 1 - graphs.waste.useful / max(graphs.waste.computed, 1)
    graphs.forget()
    return row


def method_costs(device: torch.device, quick: bool) -> list[dict[str, Any]]:
    """Rounds of two methods in turn on the same work, medians compared; and the server's part of a round."""
    rounds = 2 if quick else 5
    pairs = [("c-pfl", "fedbabu", 20, "cnn-512", 10), ("fedcap", "fedavg", 20, "fedcap-cifar", 10)]
    rows = []
    for name, beside, clients, model, classes in pairs:
        jobs = [_method_job(m, clients, model, classes, 60, 5, device) for m in (name, beside)]
        seconds = [[_round_seconds(job)[0] for job in jobs] for _ in range(rounds + 1)][1:]  # the first one warms up
        mine, theirs = (statistics.median(column) for column in zip(*seconds, strict=True))
        about = f"a round of {name} over one of {beside}, {clients} clients of {model}, 60 samples, 5 epochs"
        rows.append({"case": f"{name}/{beside}", "about": about, "ratio": mine / theirs, "cohort_s": mine})
    for name, clients, model, classes in (("fedcap", 20, "fedcap-cifar", 10), ("pfedcs", 100, "cnn-512", 100)):
        job = _method_job(name, clients, model, classes, 10, 1, device)
        server = [_round_seconds(job)[1] for _ in range(rounds + 2)][2:]
        about = f"{name}'s server step, {clients} clients of {model}, {classes} classes"
        rows.append({"case": f"{name} server", "about": about, "server_ms": 1e3 * statistics.median(server)})
    return [{"device": str(device), "quick": quick, **row} for row in rows]


def _method_job(
    method: str, clients: int, model: str, classes: int, samples: int, epochs: int, device: torch.device
) -> Job:
    rng = np.random.default_rng(0)
    count = clients * samples
    x, y = rng.integers(0, 256, (count, *CIFAR), dtype=np.uint8), rng.integers(0, classes, count)
    data = Dataset("bench", x, y, classes)
    settings = {"method": method, "clients": clients, "model": model, "partition": "iid", "epochs": epochs,
                "rounds": 1000, "test_share": 0.1, "device": str(device)}  # fmt: skip
    config = make_config(settings)
    return prepare(config, data=(data, split_of(replace(config, validation_share=METHODS[method].holdout), data)))


def _round_seconds(job: Job) -> tuple[float, float]:
    """Seconds of one round without evaluation, and of that the server's own part."""
    before = len(job.fed.exchanges)
    begin = time.perf_counter()
    job.method.round(job.fed, job.fed.sample(1.0))
    _sync(job.site.source.device)
    whole = time.perf_counter() - begin
    job.fed.round += 1
    return whole, whole - sum(e.seconds for e in job.fed.exchanges[before:])


def _site(
    case: Case, network: nn.Module, device: torch.device, precision: Precision, way: str
) -> tuple[Site, list[Any]]:
    rng = np.random.default_rng(0)
    sizes = np.full(case.clients, case.samples)
    if case.ragged:
        sizes = np.geomspace(34, 2628, case.clients).astype(np.int64)
    ends = np.cumsum(sizes)
    parts = [np.arange(end - size, end) for end, size in zip(ends, sizes, strict=True)]
    count = int(ends[-1])
    x = rng.integers(0, 256, (count, *case.shape), dtype=np.uint8)
    y = rng.integers(0, case.classes, count)
    layout = Layout.of(network)
    initial = layout.row(network).to(device)
    example = Source(x[:6], y[:6], torch.device("cpu")).batch(torch.arange(6))
    site = Site(
        forward=trace(network, layout, example), layout=layout, initial=initial, source=Source(x, y, device),
        parts={"train": parts, "validation": [p[:0] for p in parts], "test": parts},
        names=[str(i) for i in range(case.clients)], classes=case.classes,
        training=Training(case.epochs, case.batch, SGD(0.01), precision), seed=0,
        store=Store(case.clients, {}, layout, initial), chooser=Chooser(way, remember=False),
    )  # fmt: skip
    return site, parts


def _loop(network: nn.Module, site: Site, steps: Any, case: Case, precision: Precision) -> Tensor:
    """The obvious loop."""
    device, layout = site.source.device, site.layout
    model = build(case.model, case.shape, case.classes).to(device)
    rows = torch.empty(case.clients, layout.width, device=device)
    with matmul_precision(precision):
        for k in range(case.clients):
            layout.load(model, site.initial)
            model.train()
            optimiser = torch.optim.SGD(model.parameters(), lr=0.01)
            for s in range(int(steps.steps[k])):
                index = torch.from_numpy(steps.table[s, k, : steps.sizes[s, k]]).to(device)
                x, y = site.source.batch(index).contiguous(), site.source.labels(index)
                optimiser.zero_grad()
                with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
                    loss = F.cross_entropy(model(x), y)
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
            tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            with torch.no_grad():
                rows[k] = torch.cat([tensors[slot.name].reshape(-1) for slot in layout.slots])
    return rows


def _timed(work: Callable[[], Tensor], device: torch.device) -> tuple[Tensor, float]:
    _sync(device)
    begin = time.perf_counter()
    result = work()
    _sync(device)
    return result, time.perf_counter() - begin


def _sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak_mb(device: torch.device) -> float:
    """GPU memory taken by tensors, or this process's largest resident size so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
