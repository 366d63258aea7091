"""What is tried once before anybody trains, where a mistake would show late or as somebody else's error."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedkin.compute.batches import Source
from fedkin.compute.forward import Context, Out
from fedkin.compute.keys import I64
from fedkin.core.cohort import Site
from fedkin.errors import DataError, UsageError
from fedkin.tasks import OwnTask

TABLES = (nn.Embedding, nn.EmbeddingBag)
AT_ONCE = 256  # samples of a pass that looks for the one that is wrong


def check_ids(network: nn.Module, source: Source, parts: Mapping[Any, Sequence[I64]], names: Sequence[str]) -> None:
    """DataError where a sample leads the network to a row that an embedding has not got.

    A sample made of the largest number in every place, and one of the smallest, say for all of them whether there can
    be one; only then are the samples themselves looked at."""
    if not source.count or source.x.dtype == torch.uint8 or not any(isinstance(m, TABLES) for m in network.modules()):
        return
    twin = copy.deepcopy(network).cpu().eval()
    extremes = torch.stack([source.x.amin(0), source.x.amax(0)]).cpu()
    if source.planar:
        extremes = extremes.permute(0, 3, 1, 2)
    if all(_beyond(twin, sample) is None for sample in (extremes[:1], extremes[1:])):
        return
    for part, lists in parts.items():
        for name, rows in zip(names, lists, strict=True):
            for some in np.array_split(rows, -(-len(rows) // AT_ONCE) or 1):
                if not len(some) or _beyond(twin, _inputs(source, some)) is None:
                    continue
                row, found = next(
                    (row, found) for row in some.tolist() if (found := _beyond(twin, _inputs(source, [row])))
                )
                raise DataError(
                    f"client {name!r}, {'training' if part == 'train' else part} sample {row} (of all samples, from "
                    f"0): {found}; give the embedding more rows, or number the ids from 0"
                )


def _inputs(source: Source, rows: Sequence[int] | I64) -> Tensor:
    return source.batch(torch.as_tensor(rows, device=source.device)).cpu()


def _beyond(network: nn.Module, x: Tensor) -> str | None:
    """In words, the first id of these samples that an embedding has no row for."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            with _Lookups(network):
                network(x)
        except _Beyond as found:
            return str(found)
        except UsageError:
            raise
        except Exception:  # a sample made of extremes may be none that the network takes
            return None
    return None


def check_task(site: Site) -> None:
    """UsageError where a loss or a metric of the user's own gives nothing that can be used: what would be learnt of the
    first client's training samples, and how the first model does on its test samples."""
    task = site.task
    if not isinstance(task, OwnTask):
        return
    for part in ("train", "test"):
        rows = next((rows[:AT_ONCE] for rows in site.parts[part] if len(rows)), None)
        if rows is None:
            continue
        index = torch.from_numpy(rows).to(site.source.device)
        y, tensors = site.source.labels(index), site.layout.tensors(site.initial.unsqueeze(0).clone())
        with torch.no_grad():
            logits = site.forward(tensors, site.source.batch(index), 1, Context()).logits
        if part == "train":
            logits.requires_grad_()
            loss = task.value(Out(logits, logits), y.unsqueeze(0), {})
            if not loss.requires_grad:
                raise UsageError(
                    f"the loss of the task {task.name} does not follow from the network's output, so that nothing can "
                    "be learnt: compute it of the output, with PyTorch's operations and without detach() or no_grad()"
                )
            continue
        for metric in (task.metric, *site.extra):
            metric.of(task.keep(logits[0], y), y)


class _Beyond(Exception):
    """An id without a row; in words."""


class _Lookups(TorchFunctionMode):
    """Sees what is looked up in the embeddings of a network."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.names = {id(p): name.rpartition(".")[0] for name, p in network.named_parameters()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (F.embedding, F.embedding_bag):
            given = dict(zip(("input", "weight"), args, strict=False)) | (kwargs or {})
            ids, weight = given["input"], given["weight"]
            if ids.is_floating_point():
                raise UsageError(
                    "the samples are numbers, and the network looks ids up in an embedding: give whole numbers in a "
                    "dictionary, ({'ids': x}, y) in place of (x, y)"
                )
            odd = ids[(ids < 0) | (ids >= len(weight))]
            if odd.numel():
                which = self.names.get(id(weight))
                raise _Beyond(
                    f"id {odd[0]} is looked up in {repr(which) if which else 'an embedding'}, which has the rows "
                    f"0..{len(weight) - 1}"
                )
        return func(*args, **(kwargs or {}))
