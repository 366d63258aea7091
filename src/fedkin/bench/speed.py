"""Speed as a ratio: the obvious loop and the cohort on the same work, in one process and one call.

The loop is what anybody would write first: one client after another, an ordinary `nn.Module` and `torch.optim.SGD`,
the device's default settings. The cohort is what a run uses. Both see the same mini-batches, so the models they end
with are compared too. Timings alternate and the median counts, because machines are shared.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedkin.bench.networks import LSTM, Depthwise, ViT, minilm
from fedkin.bench.stopwatch import peak_mb, sync, timed
from fedkin.compute import graphs, keys
from fedkin.compute.backends import matmul_precision
from fedkin.compute.batches import Source, plan
from fedkin.compute.choice import Chooser
from fedkin.compute.work import Precision
from fedkin.config import make_config
from fedkin.core.cohort import Cohort, Site
from fedkin.data import Dataset
from fedkin.methods import METHODS
from fedkin.models import build
from fedkin.rounds.assemble import Parts, make_site


@dataclass(frozen=True)
class Case:
    about: str
    model: str | Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    clients: int
    batch: int
    samples: int = 200
    epochs: int = 5
    ragged: bool = False
    loop: bool = True  # the loop is timed too
    chunk: int | None = None
    vocabulary: int = 0  # of token ids

    def network(self) -> nn.Module:
        if isinstance(self.model, str):
            return build(self.model, self.shape, self.classes)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.model()


CNN = Case("20 clients of CNN-512, batch 10, 5 epochs of 200 samples", "cnn-512", (3, 32, 32), 10, clients=20, batch=10)
EMNIST = Case(
    "50 clients of FedCAP's EMNIST network, batch 10, 5 epochs of 200 samples", "fedcap-emnist", (1, 28, 28), 62, 50, 10
)
RAGGED = "50 clients of CNN-512 with 34 to 2,628 samples, batch 10, 1 epoch"
RESNET = "10 clients of ResNet-18, batch 32, 3 epochs of 320 samples"
THOUSAND = "memory: 1,000 clients of FedCAP's EMNIST network in chunks of 100, 1 epoch of 40 samples"
VIT = Case(
    "20 clients of a transformer on images (4 layers, width 128), batch 10, 1 epoch of 100 samples",
    ViT,
    *((3, 32, 32), 10, 20, 10, 100, 1),
)
SERIES = "20 clients of an LSTM (hidden 128) on series of 50 steps, batch 10, 1 epoch of 100 samples"
BLOCKS = "20 clients of four depthwise-separable blocks of 64 channels with BatchNorm, batch 10, 1 epoch of 100 samples"
TEXTS = "20 clients of MiniLM (6 layers, width 384) with LoRA of rank 8, batch 8 of 64 tokens, 5 steps"
LORA = replace(VIT, about=TEXTS, model=minilm, shape=(64,), batch=8, samples=40, vocabulary=30522)
CASES: dict[str, Case] = {
    "cnn-512": CNN,
    "cnn-512-100": replace(CNN, about="the same with 100 clients", clients=100),
    "fedcap-emnist": EMNIST,
    "resnet18": replace(CNN, about=RESNET, model="resnet18", clients=10, batch=32, samples=320, epochs=3),
    "ragged": replace(CNN, about=RAGGED, clients=50, samples=600, epochs=1, ragged=True),
    "vit-tiny": VIT,
    "vit-tiny-100": replace(VIT, about="the same with 100 clients", clients=100),
    "lstm": replace(VIT, about=SERIES, model=LSTM, shape=(50, 32)),
    "depthwise-bn": replace(VIT, about=BLOCKS, model=Depthwise),
    "lora-minilm": LORA,
    "lora-minilm-100": replace(LORA, about="the same with 100 clients", clients=100),
    "emnist-1000": replace(EMNIST, about=THOUSAND, clients=1000, samples=40, epochs=1, loop=False, chunk=100),
}


def measure(name: str, device: torch.device, precision: Precision, quick: bool, way: str) -> dict[str, Any]:
    case = CASES[name]
    if quick:
        case = replace(case, samples=max(case.samples // 4, 2 * case.batch), epochs=1)
    network = case.network()
    site, parts = site_of(case, network, samples_of(case), device, precision, way)
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
    sync(device)
    ready = time.perf_counter() - begin
    repeats = 1 if quick or not case.loop else 3
    theirs: Tensor | None = None
    loops, cohorts = [], []
    for _ in range(repeats):
        if case.loop:
            theirs, seconds = timed(partial(loop, copy.deepcopy(network), site, steps, precision), device)
            loops.append(seconds)
        mine, seconds = timed(cohort, device)
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
        "peak_mb": peak_mb(device),
    }
    if theirs is not None:
        row["loop_ms"] = 1e3 * statistics.median(loops) / client_steps
        row["ratio"] = statistics.median(loops) / statistics.median(cohorts)
        row["difference"] = float((mine - theirs).norm() / (theirs - site.initial).norm())
    if case.ragged and device.type == "cuda":
        row["wasted"] = 1 - graphs.waste.useful / max(graphs.waste.computed, 1)
    graphs.forget()
    return row


def _sizes(case: Case) -> keys.I64:
    if case.ragged:
        return np.geomspace(34, 2628, case.clients).astype(np.int64)
    return np.full(case.clients, case.samples)


def samples_of(case: Case) -> Dataset:
    """Random ones."""
    rng, count = np.random.default_rng(0), int(_sizes(case).sum())
    size = (count, *case.shape)
    if case.vocabulary:
        x: Any = rng.integers(0, case.vocabulary, size)
    else:
        images = len(case.shape) == 3
        x = rng.integers(0, 256, size, dtype=np.uint8) if images else rng.standard_normal(size, dtype=np.float32)
    return Dataset("bench", x, rng.integers(0, case.classes, count), case.classes, vocabulary=case.vocabulary)


def site_of(
    case: Case,
    network: nn.Module,
    data: Dataset,
    device: torch.device,
    precision: Precision,
    way: str,
    head: str | None = None,
) -> tuple[Site, list[Any]]:
    """The clients of a case, with these samples dealt in order."""
    sizes = _sizes(case)
    parts = np.split(np.arange(sizes.sum()), np.cumsum(sizes)[:-1])
    config = make_config({"method": "fedavg", "epochs": case.epochs, "batch": case.batch, "lr": 0.01, "head": head})
    source, names = Source(data.x, data.y, device), [str(i) for i in range(case.clients)]
    lists: Parts = {"train": parts, "validation": [p[:0] for p in parts], "test": parts}
    chooser = Chooser(way, remember=False)
    kind = METHODS["fedavg"]
    return make_site(config, kind, network, data, source, lists, names, precision, chooser=chooser), parts


def loop(model: nn.Module, site: Site, steps: Any, precision: Precision) -> Tensor:
    """The obvious loop."""
    device, layout = site.source.device, site.layout
    model = model.to(device)
    clients = steps.table.shape[1]
    rows = torch.empty(clients, layout.width, device=device)
    with matmul_precision(precision):
        for k in range(clients):
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
