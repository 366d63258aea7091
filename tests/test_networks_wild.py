"""Networks from the wild train as in a plain PyTorch loop, whichever way they run, their noise included."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from reference import Bench, distance, plain_loss, torch_optimiser, usual_order
from torch import Tensor, nn
from typer.testing import CliRunner
from wild import CLASSES, NETWORKS, images, numbers

import fedkin as fk
from fedkin.bench.check import ALONE, MAPPED, PROGRAM, RULE, VMAP
from fedkin.cli.application import app
from fedkin.compute import draws, keys
from fedkin.compute.calls import Calls, Drawn
from fedkin.compute.forward import Context
from fedkin.compute.optim import SGD
from fedkin.compute.program import Program
from fedkin.errors import DataError, UsageError
from fedkin.models import Ready
from fedkin.parts import pack
from fedkin.rounds import inference
from fedkin.use.model_file import Card
from fedkin.use.model_file import load as load_model
from fedkin.use.model_file import save as save_model

CLOSE = 1e-4
SIZES = (9, 5, 12)  # batch 4: a rest of one, of one, of none
WAYS = ("each", "threads", "batched")


@contextmanager
def keyed(key: int, samples: int) -> Iterator[None]:
    """PyTorch with noise that is a function of a key, by replacing what draws it, name by name."""
    calls = [0]

    def uniform(shape: tuple[int, ...]) -> Tensor:
        at = shape.index(samples) if samples in shape else 0
        order = (shape[at], *shape[:at], *shape[at + 1 :])
        drawn = draws.uniform(torch.tensor([key]) + calls[0], math.prod(shape)).view(order)
        calls[0] += 1
        return drawn.movedim(0, at)

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return dropped(x, p, tuple(x.shape)) if training else x

    def dropout2d(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return dropped(x, p, (*x.shape[:2], 1, 1)) if training else x

    def dropped(x: Tensor, p: float, shape: tuple[int, ...]) -> Tensor:
        return x * (uniform(shape) >= p) / (1 - p)

    def alpha(x: Tensor, p: float = 0.5, training: bool = False, inplace: bool = False) -> Tensor:
        if not training:
            return x
        kept = uniform(tuple(x.shape)) >= p
        lowest = -1.7580993408473766
        a = (1 - p + p * (1 - p) * lowest**2) ** -0.5
        return a * torch.where(kept, x, torch.full_like(x, lowest)) - a * p * lowest

    def attention(q: Tensor, k: Tensor, v: Tensor, attn_mask=None, dropout_p=0.0, is_causal=False) -> Tensor:
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        if is_causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -math.inf)
        if attn_mask is not None:
            scores = scores + attn_mask
        weights = scores.softmax(-1)
        return (dropout(weights, dropout_p) if dropout_p else weights) @ v

    def bernoulli_(x: Tensor, p: float) -> Tensor:
        return x.copy_(uniform(tuple(x.shape)) < p)

    one_layer = torch._VF.lstm

    def lstm(x: Tensor, hx: Any, weights: Any, biases: bool, layers: int, p: float, *how: bool) -> Any:
        training, both, first = how
        ends = []
        for i in range(layers):
            x = dropout(x, p, training) if i and p else x
            begin = tuple(h[i : i + 1] for h in hx) if layers > 1 else hx
            own = weights[4 * i : 4 * i + 4] if layers > 1 else weights
            x, *last = one_layer(x, begin, own, biases, 1, 0.0, training, both, first)
            ends.append(last)
        return x, *(torch.cat(end) for end in zip(*ends, strict=True))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._VF, "lstm", lstm)
        for name, function in (("dropout", dropout), ("dropout2d", dropout2d), ("alpha_dropout", alpha)):
            patch.setattr(F, name, function)
        patch.setattr(F, "scaled_dot_product_attention", attention)
        patch.setattr(Tensor, "bernoulli_", bernoulli_)
        yield


def plain_loop(bench: Bench, starts: Tensor) -> Tensor:
    """One client after another, with noise from the key of (seed, client, round, step)."""
    rows = []
    stream = (bench.seed, 0, "train", 1)
    own = keys.key(*stream, "noise", np.arange(len(bench.parts)))
    for k in range(len(bench.parts)):
        module = bench.module(starts[k]).train()
        optimiser = torch_optimiser(bench.opt, list(module.parameters()))
        for s, (x, y) in enumerate(bench.batches(k)):
            step = keys.mix(keys.mix(own) ^ keys.mix(np.array([s], np.uint64)))
            optimiser.zero_grad()
            with keyed(int(step[k].view(np.int64)), len(x)):
                logits = module(usual_order(x))
            plain_loss(logits, logits, y).backward()
            optimiser.step()
        rows.append(bench.layout.row(module))
    return torch.stack(rows)


def bench_of(name: str, way: str) -> Bench:
    wild = NETWORKS[name]
    torch.manual_seed(3)
    network, data = wild.network()
    y = np.random.default_rng(5).integers(0, CLASSES, sum(SIZES))
    return Bench(network, data(sum(SIZES)), y, SIZES, classes=CLASSES, opt=SGD(wild.lr), way=way, head=wild.head)


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_from_the_wild_train_as_in_the_plain_loop(name: str) -> None:
    wild, expected = NETWORKS[name], None
    for way in WAYS:
        bench = bench_of(name, way)
        form = bench.site.forward
        assert type(form) is wild.form, form.no_program
        start = bench.starts(0.05)
        if way == "batched" and not wild.together:
            with pytest.raises(UsageError, match=r"choose each or threads") as caught:
                bench.cohort().fit(start)
            assert wild.said in str(caught.value)
            continue
        assert form.together == wild.together, form.why_not
        expected = plain_loop(bench, start) if expected is None else expected
        assert distance(bench.cohort().fit(start), expected, start) < CLOSE, way


# ---------------------------------------------------------------- from the data to a prediction


def clients_of(data: Any, sizes: tuple[int, ...] = (14, 10)) -> list[tuple[Any, np.ndarray]]:
    rng, found = np.random.default_rng(0), []
    for n in sizes:
        x = data(n)
        y = np.concatenate([np.arange(CLASSES), rng.integers(0, CLASSES, n - CLASSES)])
        found.append((x, y))
    return found


QUICK: dict[str, Any] = {"rounds": 1, "epochs": 1, "batch": 4, "lr": 0.05, "device": "cpu", "way": "each"}


@pytest.mark.parametrize("name", ["BERT with a mask", "numbers and categories"])
def test_samples_of_several_parts_go_all_the_way(name: str, tmp_path: Path) -> None:
    wild = NETWORKS[name]
    x = wild.data(6)
    assert isinstance(x, dict)
    result = fk.run("fedper", model=wild.make, clients=clients_of(wild.data), **QUICK)
    model = result.personal(1)
    tensors = {n: torch.from_numpy(a) for n, a in x.items()}
    with torch.no_grad():
        scores = model(tensors)
        inside = model.network(**tensors)  # as its author calls it
    assert torch.allclose(scores, inside, atol=1e-6)
    assert list(result.predict(x, 1)) == scores.argmax(1).tolist()
    assert list(result.predict({n: a.tolist() for n, a in reversed(x.items())}, 1)) == scores.argmax(1).tolist()
    with pytest.raises(DataError, match="give a dictionary with an array of each"):
        result.predict(next(iter(x.values())), 1)
    with pytest.raises(DataError, match=f"the samples: samples of '{next(iter(x))}'.*the network takes"):
        result.predict({next(iter(x)): x[next(iter(x))]}, 1)
    path = tmp_path / "personal.safetensors"
    card = Card(None, model.samples.shape, CLASSES, model.samples.kind, parts=model.samples.parts)
    save_model(path, model, card)
    again = load_model(path, model=wild.make())
    assert np.allclose(again.probabilities(x), scores.double().softmax(1).numpy(), atol=1e-6)
    assert list(inference.labels(Ready(again.module, again.card.samples), x)) == scores.argmax(1).tolist()


def test_whole_numbers_beside_others_are_exact_or_refused() -> None:
    big = {"a": np.array([[2**24]]), "b": np.array([[0.5]])}
    with pytest.raises(DataError, match="'a' holds 16777216"):
        pack(big, "client 'x'")
    alone, parts = pack({"a": big["a"], "flag": np.array([True])}, "client 'x'")
    assert alone.tolist() == [[2**24, 1]]
    assert [(p.dtype, p.shape) for p in parts] == [("int64", (1,)), ("bool", ())]


@pytest.mark.parametrize(
    ("clients", "words"),
    [
        ([({"a": [[1.0]], "b": [[1], [2]]}, [0])], "different numbers of samples"),
        ([({}, [0])], "without arrays"),
        ([({"a": [["x"]]}, [0])], "'a' is <U1"),
        ([({"a": [[1.0]]}, [0]), ([[1.0]], [1])], "they must be alike"),
    ],
)
def test_parts_that_do_not_fit_are_refused(clients: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        fk.run("fedavg", model=NETWORKS["numbers and categories"].make, clients=clients, **QUICK)


def test_several_parts_need_a_network_of_ones_own_that_takes_them() -> None:
    clients = clients_of(NETWORKS["numbers and categories"].data)
    with pytest.raises(UsageError, match=r"the samples have several parts \('x_num'"):
        fk.run("fedavg", clients=clients, **QUICK)
    with pytest.raises(UsageError, match=r"the parts x_num, x_cat, and EarlyExit.forward takes x: give the parts"):
        fk.run("fedavg", model=NETWORKS["early exit"].make, clients=clients, **QUICK)


class Returns(nn.Module):
    def __init__(self, what: Any) -> None:
        super().__init__()
        self.fc, self.what = nn.Linear(5, CLASSES), what

    def forward(self, x: Tensor) -> Any:
        return self.what(self.fc(x))


@pytest.mark.parametrize(
    "what",
    [lambda y: (y, None), lambda y: [None, y], lambda y: {"logits": y}, lambda y: SimpleNamespace(logits=y)],
    ids=["tuple", "list", "mapping", "object"],
)
def test_scores_may_come_in_company(what: Any) -> None:
    clients = clients_of(numbers(5))
    plain = fk.run("fedavg", model=lambda: Returns(lambda y: y), clients=clients, **QUICK)
    found = fk.run("fedavg", model=lambda: Returns(what), clients=clients, **QUICK)
    assert torch.equal(found.personal(0)(torch.ones(2, 5)), plain.personal(0)(torch.ones(2, 5)))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (lambda y: {"scores": y}, "Returns returns a dict with 'scores': a network must return its class scores"),
        (lambda y: None, "Returns returns a NoneType"),
        (lambda y: (), "Returns returns a tuple"),
    ],
)
def test_what_holds_no_scores_is_named(what: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        fk.run("fedavg", model=lambda: Returns(what), clients=clients_of(numbers(5)), **QUICK)


@pytest.mark.parametrize("given", ["network", "class"])
def test_lazy_layers_take_their_sizes_from_the_samples_and_their_weights_from_the_seed(given: str) -> None:
    norm = [nn.LazyBatchNorm2d()] if given == "class" else []

    def make() -> nn.Module:
        return nn.Sequential(nn.LazyConv2d(4, 3), *norm, nn.ReLU(), nn.Flatten(), nn.LazyLinear(CLASSES))

    def rows(seed: int) -> Tensor:
        model = make() if given == "network" else make
        result = fk.run("fedavg", model=model, clients=clients_of(images), seed=seed, **QUICK)
        return result.personal(0).network[0].weight

    assert torch.equal(rows(0), rows(0))
    assert not torch.equal(rows(0), rows(1))
    if given == "network":
        with pytest.raises(UsageError, match="run it once on a few samples before, or give its class"):
            fk.run("fedavg", model=nn.Sequential(nn.LazyBatchNorm2d()), clients=clients_of(images), **QUICK)


# ---------------------------------------------------------------- what is said of it


def table() -> str:
    lines = ["| network | layers and habits | how it runs |", "| --- | --- | --- |"]
    for name, wild in NETWORKS.items():
        how = PROGRAM if wild.form is Program else VMAP if wild.together else f"{ALONE}: {wild.why}"
        about = " ".join((wild.make.__doc__ or "").split()).removesuffix(".")
        lines.append(f"| {name} | {about} | {how} |")
    return "\n".join(lines)


def test_the_table_of_the_docs_is_that_of_the_networks_tested_here() -> None:
    page = Path(__file__).parent.parent / "docs" / "your-model.md"
    assert table() in page.read_text()


def test_a_check_says_how_each_layer_runs_and_how_fast() -> None:
    network = NETWORKS["MLP-Mixer"].make()
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(not name.startswith("embed"))
    found = fk.check(network, images(4), clients=2, steps=1, batch=2, device="cpu")
    assert found.form == VMAP
    assert {"embed": "Linear", "n1": "RMSNorm"}.items() <= {layer.name: layer.kind for layer in found.layers}.items()
    ways = {layer.name: layer.way for layer in found.layers}
    assert ways["embed"] == "once for all rows (frozen)"
    assert (ways["tokens.0"], ways["tokens.1"], ways["tokens.2"]) == (RULE, MAPPED, RULE)
    assert set(found.ways_ms) >= {"each", "batched"}
    assert found.best in found.ways_ms
    assert found.columns["frozen"] == 12 * 8 + 8
    assert found.noise
    text = str(found)
    assert text.startswith("Mixer runs as: own code under vmap\n  no program over rows: ")
    assert "head: head; numbers: body" in text
    assert json.loads(json.dumps(found.to_dict()))["best"] == found.best


def test_a_check_names_the_line_that_stood_in_the_way() -> None:
    found = fk.check(NETWORKS["early exit"].make, numbers(5)(4), clients=2, steps=1, batch=2, device="cpu")
    assert found.form == ALONE
    assert any("wild.py line" in reason and "if h.abs().mean() < 0.5" in reason for reason in found.reasons)
    assert {layer.way for layer in found.layers} == {ALONE}
    assert "batched" not in found.ways_ms


def test_a_check_takes_samples_of_several_parts_and_refuses_what_are_none() -> None:
    wild = NETWORKS["BERT with a mask"]
    assert fk.check(wild.make, wild.data(3), clients=2, steps=1, batch=2, device="cpu").head == "classifier"
    with pytest.raises(UsageError, match="one row a sample"):
        fk.check(wild.make, 3.0, device="cpu")
    with pytest.raises(UsageError, match="batch=0"):
        fk.check(wild.make, wild.data(3), batch=0, device="cpu")


def test_a_network_in_a_file_is_checked_from_the_command_line() -> None:
    here = Path(__file__).parent / "wild.py"

    def call(*words: str) -> Any:
        return CliRunner().invoke(app, ["models", "--check", *words])

    words = [f"{here}:EarlyExit", "--shape", "5", "--device", "cpu"]
    assert json.loads(call(*words, "--json").stdout)["check"]["network"] == "EarlyExit"
    assert "EarlyExit runs as: row by row" in call(*words).stdout
    for wrong, said in (
        ([f"{here}:EarlyExi"], "did you mean 'EarlyExit'"),
        ([f"{here}"], "my_net.py:Net"),
        ([f"{here}:Bag", "--shape", "a"], "--shape a"),
    ):
        outcome = call(*wrong)
        assert outcome.exit_code == 2
        assert said in outcome.output.replace("\n", " ")


@pytest.mark.parametrize(
    "added", [{"add_bias_kv": True}, {"add_zero_attn": True}, {"add_bias_kv": True, "add_zero_attn": True}]
)
@pytest.mark.parametrize("weights", [True, False])
def test_keys_and_values_that_are_added_are_attended_to_as_in_pytorch(added: dict[str, bool], weights: bool) -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, batch_first=True, **added)
    x, mask = torch.randn(3, 5, 8), torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
    padded = torch.arange(5) >= torch.tensor([5, 3, 4])[:, None]
    for how in ({}, {"attn_mask": mask}, {"key_padding_mask": padded}, {"attn_mask": mask, "is_causal": True}):
        want = layer(x, x, x, need_weights=weights, **how)
        with Calls("layer", Context(), Drawn()):
            found = layer(x, x, x, need_weights=weights, **how)
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)


class Biased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True, add_zero_attn=True)
        self.fc = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.mix(x, x, x)[0].mean(1))


class Statless(nn.Sequential):
    """Statistics of the batch, in evaluation, too."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(40, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 3))


@pytest.mark.parametrize("network", [Biased, Statless])
def test_layers_with_less_usual_arguments_train(network: Any) -> None:
    clients = [(np.random.default_rng(k).normal(size=(8, 5, 8)), np.arange(8) % 3) for k in range(2)]
    rows = []
    for way in ("each", "batched"):
        settings: dict[str, Any] = {"rounds": 1, "epochs": 1, "batch": 3, "device": "cpu", "way": way, "lr": 0.1}
        result = fk.run("fedavg", clients=clients, model=network, **settings)
        rows.append(torch.cat([p.flatten() for p in result.personal(1).network.parameters()]))
    torch.testing.assert_close(*rows, rtol=1e-4, atol=1e-5)
