"""Low-rank updates and bottlenecks: they begin as nothing, they alone learn and travel, and they can be merged."""

from __future__ import annotations

import logging

import pytest
import torch
from conformance import every_method
from torch import Tensor, nn

import fedkin as fk
from fedkin.compute.layout import Layout
from fedkin.errors import UsageError
from fedkin.models.adapters import Bottleneck, LowRank, LowRankAttention


class Encoder(nn.Module):
    """A small vision transformer as people write it."""

    def __init__(self, norm_first: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.patch = nn.Linear(16, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unfold(2, 4, 4).unfold(3, 4, 4).flatten(4).flatten(1, 3)
        out: Tensor = self.head(self.encoder(self.patch(x)).mean(1))
        return out


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def learning(network: nn.Module) -> set[str]:
    return {n for n, p in network.named_parameters() if p.requires_grad}


def disturbed(network: nn.Module) -> nn.Module:
    """As after some learning."""
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    return network


X = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(1))
TARGETS = [None, "*linear1", ["*.self_attn"], ["patch", "*linear?"]]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("targets", TARGETS)
def test_a_network_with_updates_begins_as_the_one_without(targets: object, norm_first: bool, training: bool) -> None:
    plain = Encoder(norm_first)
    changed = fk.lora(plain, 4, targets, head="head")  # type: ignore[arg-type]
    with torch.no_grad():
        for network in (plain, changed):
            network.train(training)
        torch.testing.assert_close(changed(X), plain(X))
    assert learning(plain) == {n for n, _ in plain.named_parameters()}  # the given network is left as it was
    assert not any("base" in n for n in learning(changed))
    assert {"head.weight", "head.bias"} < learning(changed)


@pytest.mark.parametrize("targets", TARGETS)
def test_merging_gives_the_first_shape_and_the_same_answers(targets: object) -> None:
    plain = Encoder().eval()
    changed = disturbed(fk.lora(plain, 4, targets, head="head", alpha=2.0)).eval()  # type: ignore[arg-type]
    merged = fk.merged(changed)
    assert [(n, p.shape) for n, p in merged.named_parameters()] == [(n, p.shape) for n, p in plain.named_parameters()]
    with torch.no_grad():
        torch.testing.assert_close(merged(X), changed(X), rtol=1e-4, atol=1e-5)
        assert (merged(X) - plain(X)).abs().max() > 0.01


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("masks", ["none", "padding", "causal", "both", "floats"])
def test_attention_with_updates_is_attention_with_the_merged_weights(masks: str, batch_first: bool) -> None:
    torch.manual_seed(0)
    found = disturbed(LowRankAttention(nn.MultiheadAttention(8, 2, batch_first=batch_first), 3))
    x = torch.randn(4, 6, 8)
    padding = torch.zeros(4, 6, dtype=torch.bool)
    padding[:, 4:] = True
    causal = torch.ones(6, 6, dtype=torch.bool).triu(1)
    given: dict[str, Tensor] = {}
    if masks in ("padding", "both"):
        given["key_padding_mask"] = padding
    if masks in ("causal", "both"):
        given["attn_mask"] = causal
    if masks == "floats":
        given["attn_mask"] = torch.randn(4 * 2, 6, 6)
    x = x if batch_first else x.transpose(0, 1)
    ours, weights = found(x, x, x, **given)
    theirs, _ = found.merged()(x, x, x, need_weights=False, **given)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert weights is None


def test_the_row_holds_the_small_parts_alone() -> None:
    changed = fk.lora(mlp(), rank=2, head="3")
    layout = Layout.of(changed, "3")
    assert layout.size("body") == 2 * (64 + 32)
    assert layout.size("head") == 330
    assert set(layout.frozen) == {"1.base.weight", "1.base.bias"}


def test_bottlenecks_stand_behind_what_is_named_and_begin_as_nothing() -> None:
    plain = Encoder().eval()
    changed = fk.adapters(plain, 4, head="head").eval()
    with torch.no_grad():
        torch.testing.assert_close(changed(X), plain(X))
    assert sum(isinstance(m, Bottleneck) for m in changed.modules()) == 2
    network = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(216, 10))
    behind = fk.adapters(network, 3, targets="1", head="4")
    assert behind(X).shape == (5, 10)
    assert learning(behind) == {
        "4.weight",
        "4.bias",
        *(f"1.{p}.{w}" for p in ("up", "down") for w in ("weight", "bias")),
    }


def test_seeds_draw_down_anew_and_leave_up_at_zero(caplog: pytest.LogCaptureFixture) -> None:
    from fedkin.models.own import first_network

    network = fk.lora(mlp(), 2, head="3")
    one, two = (first_network(network, seed, "seed")[0] for seed in (1, 2))
    for drawn in (one, two):
        assert isinstance(drawn[1], LowRank)  # type: ignore[index]
        assert not drawn[1].up.weight.any()  # type: ignore[index,union-attr]
        assert torch.equal(drawn[1].base.weight, network[1].base.weight)  # type: ignore[index,union-attr]
    assert not torch.equal(one[1].down.weight, two[1].down.weight)  # type: ignore[index,union-attr]


@pytest.mark.parametrize("method", every_method())
def test_every_method_learns_low_rank_rows(method: str) -> None:
    logging.disable(logging.WARNING)
    try:
        network = fk.lora(mlp(), 2, head="3")
        result = fk.run(method, model=network, init="given", clients=10, rounds=2, lr=0.05)
    finally:
        logging.disable(logging.NOTSET)
    layout = Layout.of(network, "3")
    for client in range(2):
        own = result.personal(client).network
        assert torch.equal(own[1].base.weight, network[1].base.weight)  # type: ignore[index,union-attr]
        assert own[1].up.weight.any()  # type: ignore[index,union-attr]
    assert result.bytes["up"] <= 2 * 10 * 4 * 3 * layout.width


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: fk.lora(mlp(), 0, head="3"), "rank=0"),
        (lambda: fk.lora(mlp(), 1.5, head="3"), "rank=1.5"),  # type: ignore[arg-type]
        (lambda: fk.lora(mlp(), 2), "which part of Sequential learns as it is"),
        (lambda: fk.lora(mlp(), 2, head="fc"), "unknown head"),
        (lambda: fk.lora(mlp(), 2, "9", head="3"), "unknown target"),
        (lambda: fk.lora(mlp(), 2, "2", head="3"), "target '2' is a ReLU"),
        (lambda: fk.lora(mlp(), 2, head=["1", "3"]), "no nn.Linear or nn.MultiheadAttention outside of its head"),
        (lambda: fk.lora(mlp(), 2, head="3", alpha=float("nan")), "alpha=nan"),
        (lambda: fk.lora(mlp(), 2, head="3", dropout=1.0), "dropout=1.0"),
        (lambda: fk.lora(fk.lora(mlp(), 2, head="3"), 2, head="3"), "has adapters already"),
        (lambda: fk.lora(nn.Linear, 2, head="3"), "give the network itself"),  # type: ignore[arg-type]
        (lambda: fk.adapters(mlp(), 0, head="3"), "width=0"),
        (lambda: fk.adapters(mlp(), 4, head="3"), "no nn.TransformerEncoderLayer"),
        (lambda: fk.adapters(mlp(), 4, "2", head="3"), "the width of what a ReLU gives is not known"),
        (
            lambda: fk.lora(nn.Sequential(nn.MultiheadAttention(8, 2, kdim=4), nn.Linear(8, 2)), 2, head="1"),
            "one width for queries, keys and values",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_words(build: object, words: str) -> None:
    with pytest.raises(UsageError) as error:
        build()  # type: ignore[operator]
    assert words in str(error.value)


def test_what_is_frozen_already_stays_so_and_what_learns_goes_on() -> None:
    network = mlp()
    network[1].requires_grad_(False)
    assert learning(fk.lora(network, 2)) == {"1.down.weight", "1.up.weight", "3.weight", "3.bias"}


def test_a_layer_that_stands_in_two_places_has_one_update() -> None:
    shared = nn.Linear(8, 8)
    network = nn.Sequential(shared, nn.ReLU(), shared, nn.Linear(8, 2))
    changed = fk.lora(network, 2, head="3")
    assert changed[0] is changed[2]


@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_with_updates_takes_a_single_sample(batch_first: bool) -> None:
    found = disturbed(LowRankAttention(nn.MultiheadAttention(8, 2, batch_first=batch_first), 3)).eval()
    x, mask = torch.randn(5, 8), torch.ones(5, 5).triu(1).bool()
    given = {"key_padding_mask": torch.arange(5) > 3, "attn_mask": mask}
    torch.testing.assert_close(found(x, x, x, **given)[0], found.merged()(x, x, x, **given)[0])
