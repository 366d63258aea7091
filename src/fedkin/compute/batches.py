"""Which samples each client sees at each step, and how they are fetched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedkin.compute import draws, keys

Indices = NDArray[np.int64]


class Source:
    """A data set on one device. Images lie channels-last, as bytes where they came as bytes."""

    def __init__(
        self,
        x: NDArray[np.generic],
        y: NDArray[Any],
        device: torch.device,
        mean: float = 0.5,
        std: float = 0.5,
        keys: NDArray[np.uint64] | None = None,
    ) -> None:
        self.keys = keys  # what tells samples from each other, where their values do not
        data = torch.from_numpy(np.ascontiguousarray(x))
        self.planar = data.dim() == 4
        if self.planar:
            data = data.permute(0, 2, 3, 1).contiguous()
        self.x = data.to(device)
        self.y = _targets(y).to(device)
        self.device = device
        self._bytes = self.x.dtype == torch.uint8
        self._scale, self._shift = 1.0 / (255.0 * std), -mean / std
        self.count = len(self.y)
        self._shared_inputs = False
        self._sigma = 0.0

    def add_version(self, x: NDArray[np.generic] | None, y: NDArray[Any]) -> None:
        """A second version of every sample, found at index + count: what an attacker makes of it. `x` None: only the
        labels differ, and the inputs are not stored twice."""
        self.y = torch.cat([self.y, _targets(y).to(self.device)])
        self._shared_inputs = x is None
        if x is not None:
            other = torch.from_numpy(np.ascontiguousarray(x))
            other = other.permute(0, 2, 3, 1) if self.planar else other
            self.x = torch.cat([self.x, other.to(self.device)])

    def add_noise(self, sigma: float, seed: int) -> None:
        """N(0, sigma^2) on the normalised inputs of every second version, other noise in every round (`turn`)."""
        self._sigma, self._seed = sigma, seed
        self._key = torch.zeros((), dtype=torch.int64, device=self.device)

    def turn(self, round: int) -> None:
        """The round whose noise is on. The key changes in place, where captured programs look for it."""
        if self._sigma:
            self._key.fill_(int(keys.key(self._seed, "input-noise", round).view(np.int64)))

    def _noisy(self, x: Tensor, index: Tensor) -> Tensor:
        second, width = index >= self.count, x[0].numel() if len(x) else 0
        if x.device.type == "cpu":  # only where there is any
            at = second.nonzero().flatten()
            return x.index_add_(0, at, self._sigma * draws.normal(self._key, index[at], width).view(-1, *x.shape[1:]))
        drawn = draws.normal(self._key, index, width) * second.unsqueeze(1)
        return x + self._sigma * drawn.view_as(x)

    def batch(self, index: Tensor, moves: Tensor | None = None) -> Tensor:
        """Network inputs for these samples: normalised floats (or token ids), channels in front.

        `moves` says how each image is shifted and flipped (see `crop_flip`)."""
        x = self.x.index_select(0, index % self.count if self._shared_inputs else index)
        if self._bytes:
            x = x.to(torch.float32).mul_(self._scale).add_(self._shift)
        if self._sigma:
            x = self._noisy(x, index)
        if moves is not None:
            x = moved(x, moves)
        return x.permute(0, 3, 1, 2) if self.planar else x

    def labels(self, index: Tensor) -> Tensor:
        """The targets of these samples, [n, ...]."""
        return self.y.index_select(0, index)


def _targets(y: NDArray[Any]) -> Tensor:
    """Whole numbers (classes, tokens) as int64, others as float32."""
    y = np.asarray(y)
    return torch.from_numpy(np.ascontiguousarray(y, np.float32 if y.dtype.kind == "f" else np.int64))


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
    """table[s, k] holds the samples of client k's step s; its first sizes[s, k] entries count. What follows them are
    samples of the same client: whatever is wrong with them is nobody else's."""

    table: Indices  # [S, K, B]
    sizes: Indices  # [S, K]
    moves: Indices | None = None  # [S, K, B]: augmentation
    share: NDArray[np.float32] | None = (
        None  # [S, K]: of the samples that an update goes by; None: all are this batch's
    )
    ends: NDArray[np.bool_] | None = None  # [S, K]: after this batch the weights move

    def first(self, steps: int | None) -> Plan:
        """The first steps only; None: all."""
        arrays: list[Any] = [getattr(self, f.name) for f in fields(self)]
        cut: list[Any] = [None if array is None else array[:steps] for array in arrays]
        return Plan(*cut)

    @property
    def steps(self) -> Indices:
        """How many steps each client takes, [K]."""
        taken: Indices = (self.sizes > 0).sum(0)
        return taken


def plan(
    parts: Sequence[Indices],
    clients: Indices,
    epochs: int,
    batch: int,
    stream: tuple[int | str, ...],
    whole: bool,
    fixed: bool = False,
    accumulate: int = 1,
) -> Plan:
    """Shuffled epochs. A short last batch is kept; `whole` drops it when it has one sample and is not the only one
    (BatchNorm cannot learn from a single sample). `fixed`: every epoch in the samples' own order, and a short batch is
    dropped unless there is no other. `accumulate`: so many batches of an epoch go into one update,
    fewer at its end."""
    lengths = np.array([len(p) for p in parts], np.int64)
    used = lengths - ((lengths % batch == 1) & (lengths > 1) & (whole and batch > 1))
    if fixed:
        used = np.where(lengths < batch, lengths, lengths // batch * batch)
    steps = -(-used // batch)  # of an epoch
    longest = int(steps.max(initial=0)) * epochs
    table = np.broadcast_to(_firsts(parts)[:, None], (longest, len(parts), batch)).copy()
    sizes = np.zeros((longest, len(parts)), np.int64)
    for length in np.unique(lengths[steps > 0]).tolist():  # clients of one size are shuffled at once
        which = np.flatnonzero(lengths == length)
        n, s = int(used[which[0]]), int(steps[which[0]])
        key = keys.key(*stream, np.asarray(clients)[which][:, None], np.arange(epochs)[None])
        mine = np.stack([parts[k] for k in which.tolist()])
        drawn = np.broadcast_to(np.arange(length), (*key.shape, length)) if fixed else keys.permutation(key, length)
        order = mine[np.arange(len(which))[:, None, None], drawn]
        padded = np.broadcast_to(mine[:, :1, None], (len(which), epochs, s * batch)).copy()
        padded[..., :n] = order[..., :n]
        table[: epochs * s, which] = padded.reshape(len(which), epochs * s, batch).transpose(1, 0, 2)
        full = np.full((epochs, s), batch, np.int64)
        full[:, -1] = n - (s - 1) * batch
        sizes[: epochs * s, which] = full.reshape(-1, 1)
    if accumulate == 1:
        return Plan(table, sizes)
    share, ends = np.zeros(sizes.shape, np.float32), np.zeros(sizes.shape, bool)
    for s in np.unique(steps[steps > 0]).tolist():  # of clients with as many steps
        which, groups = np.flatnonzero(steps == s), np.arange(s) // accumulate
        of_epoch = sizes[: epochs * s, which].reshape(epochs, s, -1)
        together = np.add.reduceat(of_epoch, np.arange(0, s, accumulate), axis=1)[:, groups]
        share[: epochs * s, which] = (of_epoch / together).reshape(epochs * s, -1)
        ends[: epochs * s, which] = np.tile(np.append(np.diff(groups) > 0, True), epochs)[:, None]
    return Plan(table, sizes, share=share, ends=ends)


def in_order(parts: Sequence[Indices], batch: int) -> Plan:
    """Every client's samples once, in their order, in batches."""
    steps = -(-max((len(p) for p in parts), default=0) // batch)
    table = np.broadcast_to(_firsts(parts)[:, None], (len(parts), steps * batch)).copy()
    for k, part in enumerate(parts):
        table[k, : len(part)] = part
    left = np.array([len(p) for p in parts], np.int64) - np.arange(steps, dtype=np.int64)[:, None] * batch
    return Plan(table.reshape(len(parts), steps, batch).transpose(1, 0, 2), left.clip(0, batch))


def _firsts(parts: Sequence[Indices]) -> Indices:
    """Every client's first sample; who has none is never trained."""
    return np.array([part[0] if len(part) else 0 for part in parts], np.int64)
