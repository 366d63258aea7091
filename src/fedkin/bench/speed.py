"""Speed as a ratio: the obvious loop and the cohort on the same work, in one process and one call.

The loop is what anybody would write first: one client after another, an ordinary `nn.Module` and `torch.optim.SGD`,
the device's default settings. The cohort is what a run uses. Both see the same mini-batches, so the models they end
with are compared too. Timings alternate and the median counts, because machines are shared.
"""

from __future__ import annotations

import resource
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedkin.bench.cells import cell_costs
from fedkin.compute import graphs
from fedkin.compute.backends import matmul_precision
from fedkin.compute.batches import Source, plan
from fedkin.compute.choice import Chooser
from fedkin.compute.layout import Layout
from fedkin.compute.optim import SGD
from fedkin.compute.program import trace
from fedkin.config import make_config
from fedkin.core.cohort import Cohort, Site, Training
from fedkin.core.store import Store
from fedkin.data import Dataset
from fedkin.errors import unknown
from fedkin.methods import METHODS
from fedkin.models import build
from fedkin.robust import RULES, apply, make_rule
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
    "fedcap-emnist": Case(
        "50 clients of FedCAP's EMNIST network, batch 10, 5 epochs of 200 samples",
        "fedcap-emnist",
        (1, 28, 28),
        62,
        50,
        10,
        200,
        5,
    ),
    "resnet18": Case(
        "10 clients of ResNet-18, batch 32, 3 epochs of 320 samples", "resnet18", CIFAR, 10, 10, 32, 320, 3
    ),
    "ragged": Case(
        "50 clients of CNN-512 with 34 to 2,628 samples, batch 10, 1 epoch",
        "cnn-512",
        CIFAR,
        10,
        50,
        10,
        600,
        1,
        ragged=True,
    ),
    "emnist-1000": Case(
        "memory: 1,000 clients of FedCAP's EMNIST network in chunks of 100, 1 epoch of 40 samples",
        "fedcap-emnist",
        (1, 28, 28),
        62,
        1000,
        10,
        40,
        1,
        loop=False,
        chunk=100,
    ),
}
BENCHES: dict[str, str] = {name: case.about for name, case in CASES.items()} | {
    "methods": "what methods cost beside FedAvg and FedBABU in the same run, and their server steps alone",
    "rules": "aggregation rules on 100 rows of 873,408 numbers: time, memory, and wrappers beside their base rule",
    "track": "what a run folder costs: rounds of 20 clients of CNN-512 with and without, a checkpoint every 10 rounds",
    "cells": "a cell of FedCAP's Table I on CIFAR-10 alone, and eighteen of them together",
}
ON_CPU = ("cnn-512", "fedcap-emnist", "emnist-1000", "methods", "rules", "track")
ON_GPU = ("cnn-512", "cnn-512-100", "resnet18", "ragged", "rules", "cells")


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
        elif name == "rules":
            rows += rule_costs(chosen, quick)
        elif name == "track":
            rows += track_costs(chosen, quick)
        elif name == "cells":
            rows += cell_costs(chosen, precision, quick)
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
        done = [Cohort(site, ids[at : at + size], 0, "bench").fit(site.initial) for at in range(0, case.clients, size)]
        return torch.cat(done)

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    begin = time.perf_counter()
    mine = cohort()
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
    steps = (("fedcap", 20, "fedcap-cifar", 10), ("pfedcs", 100, "cnn-512", 10), ("pfedcs", 100, "cnn-512", 100))
    for name, clients, model, classes in steps:
        job = _method_job(name, clients, model, classes, 10, 1, device)
        server = [_round_seconds(job)[1] for _ in range(rounds + 2)][2:]
        about = f"{name}'s server step, {clients} clients of {model}, {classes} classes"
        rows.append({"case": f"{name} server", "about": about, "server_ms": 1e3 * statistics.median(server)})
    return [{"device": str(device), "quick": quick, **row} for row in rows]


def track_costs(device: torch.device, quick: bool) -> list[dict[str, Any]]:
    """Ten rounds of two jobs in turn, one of them with a folder: the seconds that writing it took, as a share of the
    rounds it was written for, and the ratio of the medians. FedCAP holds four models for every client."""
    from fedkin.runs.recorder import Recorder

    rows, samples, epochs = [], *((20, 1) if quick else (60, 5))
    for name in ("fedavg", "fedcap"):
        plain, tracked = (_method_job(name, 20, "cnn-512", 10, samples, epochs, device) for _ in range(2))
        with tempfile.TemporaryDirectory() as home, Recorder.create(Path(home), tracked, tracked.config) as recorder:
            recorder.attach(tracked)
            writing, without, with_folder = [0.0], [], []
            hear = recorder.exchange

            def timed(*heard: Any, hear: Any = hear, writing: list[float] = writing) -> None:
                begin = time.perf_counter()
                hear(*heard)
                writing[0] += time.perf_counter() - begin

            tracked.fed.watcher = timed
            for _ in range(10):
                begin = time.perf_counter()
                plain.advance()
                without.append(time.perf_counter() - begin)
                begin = time.perf_counter()
                record = tracked.advance()
                middle = time.perf_counter()
                recorder.after_round(tracked, record)
                writing[0] += time.perf_counter() - middle
                with_folder.append(time.perf_counter() - begin)
            size = sum(f.stat().st_size for f in Path(home).rglob("*") if f.is_file())
        share = writing[0] / (sum(with_folder) - writing[0])
        rows.append(
            {
                "case": f"track {name}",
                "device": str(device),
                "quick": quick,
                "rounds": 10,
                "round_s": statistics.median(without),
                "folder_mb": size / 1e6,
                "writing_s": writing[0],
                "overhead_percent": 100 * share,
                "ratio": statistics.median(with_folder) / statistics.median(without),
            }
        )
    return rows


RULE_ROWS, RULE_COLUMNS = 100, 873_408  # a hundred bodies of CNN-512
RULE_LIMITS = {"cpu": 1000.0, "cuda": 30.0}  # milliseconds
WRAPPED = ("multi-krum", "krum", "median", "trimmed-mean", "rfa")


def rule_costs(device: torch.device, quick: bool) -> list[dict[str, Any]]:
    """Every rule on its own (fltrust without the server's training), the best of three; memory beyond the rows
    themselves; and how much longer wrappers take than the rule they wrap."""
    columns = RULE_COLUMNS // 16 if quick else RULE_COLUMNS
    drawn = torch.Generator(device).manual_seed(0)
    start = torch.randn(columns, generator=drawn, device=device)
    rows = torch.randn(RULE_ROWS, columns, generator=drawn, device=device).mul_(0.01).add_(start)
    weights, own = torch.ones(RULE_ROWS, device=device), rows[0] - start
    simple = [name for name in RULES if name not in ("bucketing", "gas")]
    specs: list[tuple[str, str, dict[str, Any]]] = [(n, n, {"update": own} if n == "fltrust" else {}) for n in simple]
    specs += [(f"{wrapper}:base={base}", base, {"base": base}) for wrapper in ("bucketing", "gas") for base in WRAPPED]
    found: dict[str, dict[str, Any]] = {}
    for spec, base, options in specs:
        rule = make_rule(spec.partition(":")[0], options)
        seconds, peaks = [], []
        for _ in range(1 if quick else 3):
            with _memory(device) as used:
                seconds.append(_timed(lambda rule=rule: apply(rule, rows, weights, start).row, device)[1])  # type: ignore[misc]
            peaks.append(used[0])
        ms, extra = 1e3 * min(seconds), min(peaks) / (rows.numel() * rows.element_size())
        ratio = ms / found[base]["ms"] if base != spec else 1.0
        within = ms < RULE_LIMITS[device.type] and extra < 3 and ratio < 3
        found[spec] = {
            "case": f"rule {spec}",
            "device": str(device),
            "quick": quick,
            "rows": RULE_ROWS,
            "columns": columns,
            "ms": ms,
            "memory_over_input": extra,
            "over_base": ratio,
            "within_limits": within,
        }
    return list(found.values())


@contextmanager
def _memory(device: torch.device) -> Iterator[list[int]]:
    """The most memory taken beyond what was taken before, in bytes, put into a list at the end."""
    peak = [0]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield peak
        peak[0] = torch.cuda.max_memory_allocated(device) - before
        return
    before, done = _resident(), threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            peak[0] = max(peak[0], _resident() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield peak
    finally:
        done.set()
        watcher.join()


def _resident() -> int:
    """This process's memory now; where the system does not tell, the most so far."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _method_job(
    method: str, clients: int, model: str, classes: int, samples: int, epochs: int, device: torch.device
) -> Job:
    rng = np.random.default_rng(0)
    count = clients * samples
    x, y = rng.integers(0, 256, (count, *CIFAR), dtype=np.uint8), rng.integers(0, classes, count)
    data = Dataset("bench", x, y, classes)
    settings = {
        "method": method,
        "clients": clients,
        "model": model,
        "partition": "iid",
        "epochs": epochs,
        "rounds": 1000,
        "test_share": 0.1,
        "device": str(device),
    }
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
    example = Source(x[:6], y[:6], torch.device("cpu")).batch(torch.arange(6))
    layout = Layout.of(network, example=example)
    initial = layout.row(network).to(device)
    site = Site(
        forward=trace(network, layout, example),
        layout=layout,
        initial=initial,
        source=Source(x, y, device),
        parts={"train": parts, "validation": [p[:0] for p in parts], "test": parts},
        names=[str(i) for i in range(case.clients)],
        classes=case.classes,
        training=Training(case.epochs, case.batch, SGD(0.01), precision),
        seed=0,
        store=Store(case.clients, {}, layout, initial),
        chooser=Chooser(way, remember=False),
    )
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
