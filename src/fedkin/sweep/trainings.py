"""Which runs share a training, and which trainings go together: what a sweep does in one go."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import fields, replace
from typing import Any

from fedkin.config import Config
from fedkin.methods import METHODS

TUNING = "finetune_epochs"  # the option that acts only after the last round


def tunes(config: Config) -> bool:
    """Whether the method tunes models after the last round."""
    return config.method in METHODS and TUNING in {f.name for f in fields(METHODS[config.method].Options)}


def trained(config: Config) -> str:
    """The identity of a run's training: the same for runs that differ only in the tuning at the end or, where nothing
    is tuned, in how models are evaluated."""
    if config.patience is not None or config.keep == "best":  # what is evaluated decides how the training goes on
        return config.identity()
    if tunes(config):
        return replace(config, options={k: v for k, v in config.options.items() if k != TUNING}).identity()
    outputs = METHODS[config.method].outputs if config.method in METHODS else ()
    options = {k: v for k, v in config.options.items() if k not in outputs}
    return replace(config, options=options, eval_point="auto").identity()


def by_training(configs: Sequence[Config], apart: Container[int] = ()) -> list[list[int]]:
    """The numbers of configurations that share a training, training by training; those `apart` share with nobody."""
    found: dict[Any, list[int]] = {}
    for i, config in enumerate(configs):
        found.setdefault(i if i in apart else trained(config), []).append(i)
    return list(found.values())


def batches(configs: Sequence[Config], together: int = 1, apart: Container[int] = ()) -> list[list[list[int]]]:
    """What is run in one go: up to `together` trainings, each the numbers of its runs, on one device, that share data
    and network."""
    made: list[list[list[int]]] = []
    open_: dict[tuple[Any, ...], list[list[int]]] = {}  # a batch with room, by what its trainings have in common
    for training in by_training(configs, apart):
        config = configs[training[0]]
        common = (config.data, config.model, config.device, config.precision, config.way)
        if len(open_.get(common, ())) in (0, together):
            open_[common] = []
            made.append(open_[common])
        open_[common].append(training)
    return made
