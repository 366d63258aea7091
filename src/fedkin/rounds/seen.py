"""Which samples a run has trained on, and those before it that it began with: what is no stranger to a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fedkin.compute.batches import Source
from fedkin.data import Split
from fedkin.data.sample_keys import Keys, row_keys, with_targets

NOBODY = np.zeros(0, np.uint64)


def keys_of(source: Source, names: Sequence[str] = ()) -> Keys:
    """Of every sample with its target: as a table's rows came, where they did. `names`: of the classes."""
    count, values = source.count, source.x[: source.count]
    values = values.permute(0, 3, 1, 2) if source.planar else values
    samples = source.keys if source.keys is not None else row_keys(values.cpu().numpy())
    return with_targets(samples, source.y[:count].cpu().numpy(), names)


@dataclass(frozen=True, eq=False)
class Seen:
    """Samples that were trained on, and those for validation, by their keys. `whole`: there are no others."""

    train: Keys
    validation: Keys
    whole: bool = True
    runs: int = 1
    """How many runs it is of, one that began with the other."""

    @classmethod
    def by(cls, keys: Keys | None, split: Split | None, before: Seen | None) -> Seen:
        """What a run has seen whose samples have these keys, and the one that it began with."""
        if keys is None or split is None:
            own = cls(NOBODY, NOBODY, False)
        else:
            train, validation = (_keys(keys, part) for part in (split.train, split.validation))
            own = cls(train, validation)
        if before is None:
            return own
        train, validation = np.union1d(own.train, before.train), np.union1d(own.validation, before.validation)
        return cls(train, validation, own.whole and before.whole, own.runs + before.runs)

    def state(self) -> dict[str, Any]:
        """To be kept."""
        keys = {"train": self.train, "validation": self.validation}
        return {**{k: torch.from_numpy(v.view(np.int64)) for k, v in keys.items()}, "whole": self.whole, "n": self.runs}

    @classmethod
    def of_state(cls, state: Any) -> Seen:
        """From what was kept; of a run that kept nothing of the kind, nothing is known."""
        if state is None:
            return cls(NOBODY, NOBODY, False)
        if not isinstance(state, Mapping):
            raise ValueError("no proper keys of samples")
        found = [state[name].numpy() for name in ("train", "validation")]
        if any(keys.dtype != np.int64 or keys.ndim != 1 for keys in found):
            raise ValueError("no proper keys of samples")
        train, validation = (keys.view(np.uint64) for keys in found)
        return cls(train, validation, state["whole"] is True, int(state["n"]))

    def spoils(self, keys: Keys, split: Split) -> int:
        """How many of the samples for validation have been trained on."""
        return _among(_rows(keys, split.validation), self.train, _keys(keys, split.train))

    def remarks(self, run: str, keys: Keys, split: Split) -> list[str]:
        """What is to be said where tests and choices of a run that begins with `run` are of such samples. One that is
        among the training samples here as well would be no stranger to a new model either, and does not count."""
        own = _keys(keys, split.train)
        whose = f"{run}, which this run begins with{' (or of those that it began with)' if self.runs > 1 else ''}"
        notes, validation, test = [], _rows(keys, split.validation), _rows(keys, split.test)
        if seen := self.spoils(keys, split):
            notes.append(
                f"{seen} of the {len(validation)} validation samples were training samples of {whose}: choices on "
                "validation samples (patience, keep=best, select=val) are not to be trusted; begin with a run that set "
                "the same samples aside (same seed, split and validation share)"
            )
        if seen := _among(test, self.train, own):
            notes.append(
                f"{seen} of the {len(test)} test samples were training samples of {whose}: the accuracy is not one on "
                "unseen samples; take the seed and the split of that run"
            )
        if seen := _among(test, np.setdiff1d(self.validation, self.train), own):
            notes.append(
                f"{seen} of the {len(test)} test samples were validation samples of {whose}: where something was "
                "chosen on them, the accuracy is not one on unseen samples"
            )
        if not self.whole:
            notes.append(
                f"whether all of the test samples are new to {whose}, cannot be told: a run that it goes back to kept "
                "no record of its training samples"
            )
        return notes


def _rows(keys: Keys, parts: Sequence[Any]) -> Keys:
    return keys[np.concatenate(parts).astype(np.int64)]


def _keys(keys: Keys, parts: Sequence[Any]) -> Keys:
    return np.unique(_rows(keys, parts))


def _among(rows: Keys, seen: Keys, own: Keys) -> int:
    return int((np.isin(rows, seen) & ~np.isin(rows, own)).sum())
