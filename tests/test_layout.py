"""A network becomes a row and comes back; each part that may travel is one slice of columns."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedkin.compute.layout import Layout
from fedkin.errors import UsageError
from fedkin.models import build

ZOO = {
    "cnn-512": (1, 16, 16),
    "fedcap-cifar": (3, 16, 16),
    "fedcap-emnist": (1, 16, 16),
    "harcnn": (3, 1, 20),
    "mlp": (1, 4, 4),
    "fasttext": (5,),
    "resnet18": (3, 32, 32),
    "resnet18-cifar": (3, 8, 8),
}


def network(name: str, seed: int = 0) -> nn.Module:
    return build(name, ZOO[name], 3, 20 if name == "fasttext" else 0, seed)


def example(name: str) -> torch.Tensor:
    return torch.zeros(2, *ZOO[name], dtype=torch.int64 if name == "fasttext" else torch.float32)


class Normed(nn.Module):
    """Body 3x4 + 3 and 2 x 3 of the norm, statistics 2 x 3, head 3x2 + 2; the head is registered first."""

    def __init__(self) -> None:
        super().__init__()
        self.top = nn.Linear(3, 2)
        self.inside = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)


@pytest.mark.parametrize("buffers", ["average", "local"])
@pytest.mark.parametrize("name", ZOO)
def test_a_row_written_into_another_network_makes_it_the_same(name: str, buffers: str) -> None:
    one, two = network(name, 0), network(name, 1)
    for module in one.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
    layout = Layout.of(one, "head", buffers)
    row = layout.row(one)
    assert not torch.equal(row, layout.row(two))
    layout.load(two, row)
    assert torch.equal(layout.row(two), row)
    theirs = two.state_dict()
    for key, value in one.state_dict().items():
        assert torch.equal(value, theirs[key]), key


@pytest.mark.parametrize("name", ZOO)
def test_columns_cover_the_row_without_gaps(name: str) -> None:
    layout = Layout.of(network(name), example=example(name))
    at = 0
    for slot in layout.slots:
        assert slot.start == at
        at = slot.stop
    assert at == layout.width
    assert layout.head_name == "head"
    assert layout.size("body") + layout.size("head") == layout.size("model")


def test_averaged_statistics_belong_to_the_body() -> None:
    layout = Layout.of(Normed(), "top", "average")
    assert [layout.size(p) for p in ("body", "head", "model", "buffers")] == [15 + 6 + 6, 8, 35, 6]
    assert layout.parameters == 29
    assert [s.kind for s in layout.slots] == ["body"] * 4 + ["buffer"] * 2 + ["head"] * 2
    assert layout.columns("buffers") == slice(21, 27)


def test_local_statistics_belong_to_nothing_that_travels() -> None:
    layout = Layout.of(Normed(), "top", "local")
    assert [layout.size(p) for p in ("body", "head", "model", "buffers")] == [21, 8, 29, 6]
    assert layout.width == 35
    assert layout.columns("buffers") == slice(29, 35)


def test_views_share_the_rows_memory() -> None:
    layout = Layout.of(Normed(), "top")
    rows = torch.zeros(3, layout.width)
    layout.tensors(rows)["top.weight"][1] = 7.0
    assert rows.sum() == 7.0 * 6
    layout.body(rows)[2] = 1.0
    assert torch.equal(layout.head(rows)[2], torch.zeros(8))
    assert layout.tensors(rows)["inside.weight"].shape == (3, 3, 4)


def test_the_head_is_the_layer_that_makes_the_output_unless_named() -> None:
    chain, x = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4)), torch.zeros(5, 2)
    assert Layout.of(chain, example=x).head_name == "2"
    assert Layout.of(chain, example=x).size("head") == 16
    assert Layout.of(chain, "0").size("head") == 9


def test_a_name_that_only_begins_like_the_heads_is_not_in_it() -> None:
    class Twins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.header = nn.Linear(2, 2), nn.Linear(2, 2)

    assert Layout.of(Twins(), "head").size("head") == 6


def test_without_a_head_all_is_body() -> None:
    layout = Layout.of(nn.Sequential(nn.Linear(2, 3)), "")
    assert layout.size("head") == 0
    assert layout.size("body") == layout.size("model") == 9


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Layout.of(network("mlp"), "haed"), "did you mean 'head'"),
        (lambda: Layout.of(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "1"), "ReLU without parameters"),
        (lambda: Layout.of(nn.Sequential(nn.Conv2d(1, 3, 4), nn.Flatten()), example=example("mlp")), "no nn.Linear"),
        (lambda: Layout.of(network("mlp")), "which module is the head"),
        (lambda: Layout.of(network("mlp").half()), "not float32"),
        (lambda: Layout.of(network("mlp"), buffers="mean"), "'average'"),
        (lambda: Layout.of(network("mlp"), "head").columns("tail"), "unknown part"),
        (lambda: Layout.of(network("mlp"), "head").load(network("mlp"), torch.zeros(3)), "columns, got shape"),
    ],
)
def test_mistakes_are_named(make, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make()
