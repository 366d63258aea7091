"""The data of many runs: each set is read once, and the splits used last are kept."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedkin.config import Config
from fedkin.data import Dataset, Split, load
from fedkin.errors import DataError
from fedkin.methods import METHODS
from fedkin.rounds import load_data
from fedkin.rounds.choices import data_key

KEPT_SPLITS = 8
OF_THE_SPLIT = (
    "data",
    "data_dir",
    "task",
    "label",
    "client_column",
    "categories",
    "impute",
    "scale",
    "image_size",
    "image_mode",
    "clients",
    "partition",
    "samples_per_client",
    "quantity_skew",
    "test_share",
    "shift",
    "severity",
    "seed",
)


class Data:
    """`data_dir`: where sets lie, if not where the configurations say; `download`: fetch those that are not there."""

    def __init__(self, data_dir: str | None = None, download: bool = False) -> None:
        self.data_dir, self.download = data_dir, download
        self.sets: dict[str, Dataset] = {}  # those read so far, under the names that `load_data` has for them
        self.missing: dict[str, str] = {}  # those that were asked for and are not here, and why
        self._splits: OrderedDict[tuple[Any, ...], tuple[Dataset, Split]] = OrderedDict()

    def lacks(self, name: str) -> str:
        """Why a data set cannot be had here; empty if it can."""
        key = data_key(name, self.data_dir)
        if key not in self.sets and name not in self.missing:
            try:
                self.sets[key] = load(name, self.data_dir, download=self.download)
            except DataError as error:
                why = str(error).splitlines()[0].removesuffix("Three ways to get the data:").strip()
                self.missing[name] = why
        return self.missing.get(name, "")

    def of(self, config: Config, given: Mapping[str, Any] | None = None) -> tuple[Dataset, Split]:
        """`given`: what the run was given as Python objects; data among them are its own, and not kept."""
        given = given or {}
        method = given.get("method") or METHODS[config.method]
        share = method.holdout if config.validation_share is None else config.validation_share
        config = replace(config, validation_share=share, data_dir=self.data_dir or config.data_dir)
        if "data" in given:
            return load_data(config, self.sets, given["data"])
        key = (*(getattr(config, k) for k in OF_THE_SPLIT), share)
        if key not in self._splits:
            if self.download:
                self.lacks(config.data)
            self._splits[key] = load_data(config, self.sets)
            while len(self._splits) > KEPT_SPLITS:
                self._splits.popitem(last=False)
        self._splits.move_to_end(key)
        return self._splits[key]
