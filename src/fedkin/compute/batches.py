"""Which samples each client sees at each step, and how they are fetched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedkin.compute import keys

Indices = NDArray[np.int64]


class Source:
    """A data set on one device. Images lie channels-last, as bytes where they came as bytes."""

    def __init__(
        self, x: NDArray[np.generic], y: Indices, device: torch.device, mean: float = 0.5, std: float = 0.5
    ) -> None:
        data = torch.from_numpy(np.ascontiguousarray(x))
        self.planar = data.dim() == 4
        if self.planar:
            data = data.permute(0, 2, 3, 1).contiguous()
        self.x = data.to(device)
        self.y = torch.from_numpy(np.asarray(y, np.int64)).to(device)
        self.device = device
        self._bytes = self.x.dtype == torch.uint8
        self._scale, self._shift = 1.0 / (255.0 * std), -mean / std
        self.count = len(self.y)
        self._shared_inputs = False

    def add_version(self, x: NDArray[np.generic] | None, y: Indices) -> None:
        """A second version of every sample, found at index + count: what an attacker makes of it. `x` None: only the
        labels differ, and the inputs are not stored twice."""
        self.y = torch.cat([self.y, torch.from_numpy(np.asarray(y, np.int64)).to(self.device)])
        self._shared_inputs = x is None
        if x is not None:
            other = torch.from_numpy(np.ascontiguousarray(x))
            other = other.permute(0, 2, 3, 1) if self.planar else other
            self.x = torch.cat([self.x, other.to(self.device)])

    def batch(self, index: Tensor, moves: Tensor | None = None) -> Tensor:
        """Network inputs for these samples: normalised floats (or token ids), channels in front.

        `moves` says how each image is shifted and flipped (see `crop_flip`)."""
        x = self.x.index_select(0, index % self.count if self._shared_inputs else index)
        if self._bytes:
            x = x.to(torch.float32).mul_(self._scale).add_(self._shift)
        if moves is not None:
            x = moved(x, moves)
        return x.permute(0, 3, 1, 2) if self.planar else x

    def labels(self, index: Tensor) -> Tensor:
        return self.y.index_select(0, index)


CROP = 4  # pixels of zeros around an image before it is cropped again


def moved(x: Tensor, moves: Tensor) -> Tensor:
    """Random crop with padding 4, and flip, of normalised images [N, H, W, C], as one gather; zeros beyond the edge."""
    n, height, width, _ = x.shape
    flip = (moves % 2).bool().view(n, 1)
    across = (moves // 2) % (2 * CROP + 1) - CROP
    down = moves // (2 * (2 * CROP + 1)) - CROP
    columns = torch.arange(width, device=x.device).expand(n, -1)
    columns = torch.where(flip, width - 1 - columns, columns) + across.view(n, 1)
    rows = torch.arange(height, device=x.device).expand(n, -1) + down.view(n, 1)
    seen_down, seen_across = (rows >= 0) & (rows < height), (columns >= 0) & (columns < width)
    inside = seen_down.view(n, height, 1, 1) & seen_across.view(n, 1, width, 1)
    at = rows.clamp(0, height - 1).view(n, height, 1) * width + columns.clamp(0, width - 1).view(n, 1, width)
    flat = x.reshape(n, height * width, -1)
    found = flat.gather(1, at.view(n, -1, 1).expand(-1, -1, flat.shape[2])).view(x.shape)
    return found * inside


def crop_flip(stream: tuple[int | str, ...], clients: Indices, steps: int, batch: int) -> Indices:
    """How every sample of a plan moves, [S, K, B]: two shifts of -4..4 and a flip, folded into one number."""
    key = keys.key(*stream, "augment", np.asarray(clients, np.int64))  # [K]
    draws = keys.uniform(key, steps * batch).reshape(len(clients), steps, batch)
    choices = 2 * (2 * CROP + 1) ** 2
    return np.ascontiguousarray((draws * choices).astype(np.int64).transpose(1, 0, 2))


@dataclass(frozen=True, eq=False)
class Plan:
    """table[s, k] holds the samples of client k's step s; its first sizes[s, k] entries count."""

    table: Indices  # [S, K, B]
    sizes: Indices  # [S, K]
    moves: Indices | None = None  # [S, K, B]: augmentation

    def first(self, steps: int) -> Plan:
        """The first steps only."""
        return Plan(self.table[:steps], self.sizes[:steps], None if self.moves is None else self.moves[:steps])

    @property
    def steps(self) -> Indices:
        """How many steps each client takes, [K]."""
        taken: Indices = (self.sizes > 0).sum(0)
        return taken


def plan(
    parts: Sequence[Indices], clients: Indices, epochs: int, batch: int, stream: tuple[int | str, ...], whole: bool
) -> Plan:
    """Shuffled epochs. A short last batch is kept; `whole` drops it when it has one sample and is not the only one
    (BatchNorm cannot learn from a single sample)."""
    rounds: list[tuple[Indices, Indices]] = []
    for part, client in zip(parts, clients, strict=True):
        tables, sizes = [], []
        for epoch in range(epochs):
            order = part[keys.permutation(keys.key(*stream, int(client), epoch), len(part))]
            if whole and len(order) % batch == 1 and len(order) > 1 and batch > 1:
                order = order[:-1]
            steps = -(-len(order) // batch)
            padded = np.zeros(steps * batch, np.int64)
            padded[: len(order)] = order
            tables.append(padded.reshape(steps, batch))
            size = np.full(steps, batch, np.int64)
            if steps:
                size[-1] = len(order) - (steps - 1) * batch
            sizes.append(size)
        rounds.append((np.concatenate(tables), np.concatenate(sizes)))
    longest = max((len(s) for _, s in rounds), default=0)
    table = np.zeros((longest, len(rounds), batch), np.int64)
    counted = np.zeros((longest, len(rounds)), np.int64)
    for k, (rows, size) in enumerate(rounds):
        table[: len(size), k], counted[: len(size), k] = rows, size
    return Plan(table, counted)
