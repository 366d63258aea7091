"""What is tried before anybody trains: ids have rows in their embeddings, a loss and metrics of one's own fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedkin as fk
from fedkin.compute import layers
from fedkin.config import make_config
from fedkin.data import Brought, Reading, own_clients
from fedkin.errors import DataError, UsageError
from fedkin.rounds import prepare

QUICK: dict[str, Any] = {"rounds": 1, "epochs": 1, "batch": 4, "lr": 0.1, "device": "cpu", "init": "given"}


class Words(nn.Module):
    def __init__(self, shift: int = 0) -> None:
        super().__init__()
        self.words, self.fc, self.shift = nn.Embedding(20, 4), nn.Linear(4, 2), shift

    def forward(self, ids: Tensor) -> Tensor:
        return self.fc(self.words(ids + self.shift).mean(1))


class InTwo(Words):
    """Categories beside each other, each with words of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.few = nn.Embedding(3, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.fc(self.words(ids[:, 0]) + self.few(ids[:, 1]))


def texts(odd: int | None = None, second: int = 20) -> list[Any]:
    rng, found = np.random.default_rng(0), []
    for k in range(3):
        ids = rng.integers(1, 20, (12, 5))
        ids[:, 1] = ids[:, 1] % second
        if k == 1 and odd is not None:
            ids[8, 2] = odd
        found.append(({"ids": ids}, np.arange(12) % 2, {"ids": ids[:3]}, np.array([0, 1, 0])))
    return found


@pytest.mark.parametrize("way", ["each", "batched"])
@pytest.mark.parametrize("odd", [20, -1])
def test_an_id_without_a_row_is_named_with_its_client_before_training(way: str, odd: int) -> None:
    """Twenty rows are 0..19; in the batched way, the row after a client's last is its neighbour's first."""
    with pytest.raises(DataError, match=rf"'client-1', training sample 23 .*id {odd} .*'words'.* 0\.\.19"):
        fk.run("local", clients=texts(odd), model=Words(), way=way, **QUICK)


def test_ids_are_those_that_reach_the_embedding() -> None:
    fk.run("local", clients=texts(20), model=Words(-1), **QUICK)
    with pytest.raises(DataError, match="id 20 is looked up"):
        fk.run("local", clients=texts(), model=Words(1), **QUICK)
    fk.run("local", clients=texts(second=3), model=InTwo(), **QUICK)
    with pytest.raises(DataError, match=r"'few', which has the rows 0\.\.2"):
        fk.run("local", clients=texts(), model=InTwo(), **QUICK)


def test_rows_do_not_look_into_each_other() -> None:
    """Whatever computes ids: one beyond its row's words is refused, not found at the neighbour's."""
    weights = torch.randn(2, 20, 4)
    for odd in (20, -1):
        with pytest.raises(UsageError, match=r"rows 0\.\.19"):
            layers.embedding(torch.tensor([[3], [odd], [4], [5]]), weights, None, 2)
    found = layers.embedding(torch.tensor([[3], [19], [0], [5]]), weights, None, 2)
    assert torch.equal(found[:, 0], torch.stack([weights[0, 3], weights[0, 19], weights[1, 0], weights[1, 5]]))


NUMBERS = [(np.random.default_rng(k).normal(size=(9, 6)), np.arange(9.0)) for k in range(2)]


def absolute(output: Tensor, y: Tensor) -> Tensor:
    return (output - y).abs()


def broken(output: Tensor, y: Tensor) -> Tensor:
    raise KeyError("weights")


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (absolute, "metric 'm' gives 3 numbers: it must give one"),
        (broken, "metric 'm' fails for outputs of shape .*KeyError: 'weights'"),
        (lambda output, y: "0.5", "metric 'm' gives '0.5': it must give one number"),
        (lambda output, y: None, "metric 'm' gives a NoneType"),
        (lambda output, y: {}, "metric 'm' gives a dict"),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_a_metric_that_gives_no_number_is_refused_before_training(metric: Any, said: str, first: bool) -> None:
    fine = {"mse": nn.functional.mse_loss}
    both = {"m": metric, **fine} if first else {**fine, "m": metric}
    with pytest.raises(UsageError, match=said):
        prepared(fk.task(nn.functional.mse_loss, both))


def prepared(task: Any) -> Any:
    data = Brought(own_clients(NUMBERS, Reading(targets="numbers")))
    return prepare(make_config({**QUICK, "data": "own"}), task=task, model=nn.Linear(6, 1), data=data)


def test_a_loss_that_nothing_follows_from_is_refused_before_training() -> None:
    for loss in (lambda o, y: absolute(o, y).mean().detach(), lambda o, y: y.mean()):
        with pytest.raises(UsageError, match="does not follow from the network's output"):
            prepared(fk.task(loss, {"mse": nn.functional.mse_loss}))
    prepared(fk.task(nn.functional.mse_loss, {"one": lambda o, y: np.float32(1), "none": lambda o, y: float("nan")}))


def test_ids_that_came_as_numbers_are_told_the_way() -> None:
    ids = np.random.default_rng(0).integers(1, 20, (8, 5))
    with pytest.raises(UsageError, match=r"looks ids up in an embedding: give whole numbers in a dictionary"):
        fk.run("local", clients=[(ids, np.arange(8) % 2)], model=Words(), **QUICK)


def test_new_samples_with_an_id_without_a_row_are_refused() -> None:
    result = fk.run("local", clients=texts(), model=Words(), **QUICK)
    with pytest.raises(DataError, match="an id that its embedding has no row for"):
        result.predict({"ids": np.full((3, 5), 20)}, 0)
