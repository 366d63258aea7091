"""What methods cost beside simple ones, what their server steps cost alone, and what a run folder costs."""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedkin.bench.stopwatch import sync
from fedkin.config import make_config
from fedkin.data import Dataset
from fedkin.methods import METHODS
from fedkin.rounds import Job, prepare, split_of
from fedkin.runs.recorder import Recorder


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


def _method_job(
    method: str, clients: int, model: str, classes: int, samples: int, epochs: int, device: torch.device
) -> Job:
    rng = np.random.default_rng(0)
    count = clients * samples
    x, y = rng.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8), rng.integers(0, classes, count)
    data = Dataset("bench", x, y, classes)
    given = {"method": method, "clients": clients, "model": model, "epochs": epochs, "device": str(device)}
    config = make_config({**given, "partition": "iid", "rounds": 1000, "test_share": 0.1})
    return prepare(config, data=(data, split_of(replace(config, validation_share=METHODS[method].holdout), data)))


def _round_seconds(job: Job) -> tuple[float, float]:
    """Seconds of one round without evaluation, and of that the server's own part."""
    before = len(job.fed.exchanges)
    begin = time.perf_counter()
    job.method.round(job.fed, job.fed.sample(1.0))
    sync(job.site.source.device)
    whole = time.perf_counter() - begin
    job.fed.round += 1
    return whole, whole - sum(e.seconds for e in job.fed.exchanges[before:])
