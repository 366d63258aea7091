"""One thread, and a cache of our own: the tests must be repeatable and never touch what the user has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _quiet_machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    torch.set_num_threads(1)
    patch = pytest.MonkeyPatch()
    patch.delenv("COLUMNS", raising=False)  # xdist sets it for its workers
    patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    patch.setenv("FEDKIN_RUNS", str(tmp_path_factory.mktemp("runs")))
    yield
    patch.undo()


@pytest.fixture(autouse=True)
def _fixed_randomness() -> None:
    torch.manual_seed(0)
