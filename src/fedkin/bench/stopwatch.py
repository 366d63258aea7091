"""Seconds and bytes of a piece of work on a device."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fedkin.rounds.footprint import device_peak, peak, resident


def timed(work: Callable[[], Tensor], device: torch.device) -> tuple[Tensor, float]:
    sync(device)
    begin = time.perf_counter()
    result = work()
    sync(device)
    return result, time.perf_counter() - begin


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def memory(device: torch.device) -> Iterator[list[int]]:
    """The most memory taken beyond what was taken before, in bytes, put into a list at the end."""
    most = [0]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield most
        most[0] = torch.cuda.max_memory_allocated(device) - before
        return
    before, done = resident(), threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            most[0] = max(most[0], resident() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield most
    finally:
        done.set()
        watcher.join()


def peak_mb(device: torch.device) -> float:
    """GPU memory taken by tensors, or this process's largest resident size so far."""
    return (device_peak(device) if device.type == "cuda" else peak()) / 1e6
