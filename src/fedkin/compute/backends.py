"""The ways to train R rows: one after another, on worker threads, as one batched program, or as CUDA graphs.

Which is faster depends on the network, the batch and the device, so `choice` measures. They compute the same thing:
the tests hold each of them against a plain PyTorch loop.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fedkin.compute import graphs
from fedkin.compute.rowwise import each
from fedkin.compute.stack import batched
from fedkin.compute.work import Precision, Work

WORTH_SHARING = 4_000_000  # multiplications in a step below which more than one thread only costs
WAYS = ("each", "threads", "batched", "graph")


@contextmanager
def intra_op_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def matmul_precision(precision: Precision) -> Iterator[None]:
    """TF32 only where it was asked for."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def run_way(way: str, work: Work) -> Tensor:
    """Train `work` in the named way. Returns the mean loss of each row, [R]."""
    with matmul_precision(work.precision):
        return _run_way(way, work)


def _run_way(way: str, work: Work) -> Tensor:
    if way == "threads":
        return each(work, workers=min(cores(), len(work.rows)))
    if way in ("each", "batched"):
        rows = 1 if way == "each" else len(work.rows)
        small = rows * work.plan.table.shape[2] * work.layout.weights < WORTH_SHARING
        with intra_op_threads(1 if small else torch.get_num_threads()):
            return each(work) if way == "each" else batched(work)
    return graphs.train(work)
