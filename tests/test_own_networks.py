"""What happens to a network that a user brings: frozen parameters, the head, its first weights, its use afterwards."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conformance import every_method
from reference import OPTIMISERS, Bench, distance, numbers, train_client
from torch import Tensor, nn

import fedkin as fk
from fedkin.compute.layout import Layout
from fedkin.compute.program import Program
from fedkin.compute.vmapped import Vmapped
from fedkin.config import make_config
from fedkin.data import Brought, Dataset, Split, from_arrays, own_clients
from fedkin.errors import DataError, UsageError
from fedkin.models import Ready, Samples, draw_anew
from fedkin.rounds import prepare
from fedkin.rounds.inference import labels
from fedkin.testing import federation
from fedkin.use.model_file import Card
from fedkin.use.model_file import load as load_model
from fedkin.use.model_file import save as save_model

QUICK: dict[str, Any] = {"rounds": 1, "epochs": 1, "batch": 4, "lr": 0.1, "device": "cpu", "way": "each"}


def frozen(network: nn.Module, *prefixes: str) -> nn.Module:
    for name, parameter in network.named_parameters():
        if name.startswith(prefixes):
            parameter.requires_grad_(False)
    return network


class Chain(nn.Module):
    """Plain layers; the tape can do it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 8), nn.ReLU()
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Normed(nn.Module):
    """A norm of every kind, a grouped convolution, a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, groups=2)
        self.batch, self.group = nn.BatchNorm2d(4), nn.GroupNorm(2, 4)
        self.wide, self.layer = nn.Linear(144, 8), nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.batch(self.conv(x))
        y = (y + self.group(y)).relu().flatten(1)
        return self.head(self.layer(self.wide(y)))


class Odd(Chain):
    """Cannot be traced."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x if len(x) else x + 1))


class Adapted(nn.Module):
    """A frozen layer with a small trainable one beside it (LoRA), by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.flat, self.wide = nn.Flatten(), nn.Linear(128, 8)
        self.a, self.b = nn.Parameter(torch.randn(2, 128) * 0.1), nn.Parameter(torch.randn(8, 2) * 0.1)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.flat(x)
        return self.head((self.wide(x) + x @ self.a.T @ self.b.T).relu())


class BodyHead(nn.Module):
    """For the tiny federation: 6 features, 4 classes, three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x).relu()).relu())


# ---------------------------------------------------------------- frozen parameters

CASES: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "first layer": (Chain, ("body.0",)),
    "middle layer": (Chain, ("body.4",)),
    "weights only": (Chain, ("body.0.weight", "body.4.weight", "head.weight")),
    "biases only": (Chain, ("body.0.bias", "body.4.bias", "head.bias")),
    "head": (Chain, ("head",)),
    "all but the head": (Chain, ("body",)),
    "norms": (Normed, ("batch", "group", "layer")),
    "all but norms": (Normed, ("conv", "wide", "head")),
    "untraceable": (Odd, ("body",)),
    "adapter": (Adapted, ("wide", "head")),
}


@pytest.mark.parametrize("how", ["each-tape", "each", "threads", "batched"])
@pytest.mark.parametrize("case", CASES)
def test_frozen_parameters_stay_and_the_rest_learns_as_in_the_plain_loop(case: str, how: str) -> None:
    make, prefixes = CASES[case]
    torch.manual_seed(1)
    network = frozen(make(), *prefixes)
    x, y = numbers(21, (2, 8, 8), 3)
    opt = OPTIMISERS["sgd-momentum-decay"]
    bench = Bench(network, x, y, (9, 7, 5), classes=3, opt=opt, way=how.removesuffix("-tape"), tape="tape" in how)
    assert isinstance(bench.site.forward, Vmapped if case in ("untraceable", "adapter") else Program)
    assert (bench.site.tape is not None) == ("tape" in how and make is Chain)
    trainable = sum(p.numel() for p in network.parameters() if p.requires_grad)
    assert bench.layout.parameters == trainable == bench.layout.width - bench.layout.size("buffers")
    before, starts = copy.deepcopy(network).state_dict(), bench.starts()
    found = bench.cohort().fit(starts)
    expected = bench.reference(starts)  # an ordinary optimiser over all parameters: those without a gradient stay
    assert distance(found, expected, starts) < 1e-4
    for name, parameter in bench.module(found[0]).named_parameters():
        assert torch.equal(parameter, before[name]) != parameter.requires_grad, name


@pytest.mark.parametrize("case", ["weights only", "all but the head", "norms", "untraceable", "adapter"])
def test_what_is_measured_on_a_frozen_network_is_what_the_plain_module_gives(case: str) -> None:
    make, prefixes = CASES[case]
    torch.manual_seed(1)
    network = frozen(make(), *prefixes)
    x, y = numbers(12, (2, 8, 8), 3)
    bench = Bench(network, x, y, (7, 5), classes=3)
    cohort, rows = bench.cohort(), bench.starts()
    scores, traces = cohort.evaluate(rows), cohort.gradient_norms(rows, batch=7)
    samples, features = cohort.sample_gradients(rows), cohort.features(rows)
    for k, part in enumerate(bench.parts):
        module = bench.module(rows[k]).eval()
        caught: list[Tensor] = []
        module.head.register_forward_pre_hook(lambda _, given, caught=caught: caught.append(given[0]))
        inputs, labels = torch.from_numpy(x[part]), torch.from_numpy(y[part])
        logits = module(inputs)
        loss = F.cross_entropy(logits, labels)
        moving = {n: p for n, p in module.named_parameters() if p.requires_grad}
        found = dict(zip(moving, torch.autograd.grad(loss, list(moving.values())), strict=True))
        row = torch.cat([found[s.name].flatten() for s in bench.layout.slots if s.kind != "buffer"])
        assert torch.allclose(samples[k].mean(0), row, atol=1e-5)
        assert float(traces[k]) == pytest.approx(float(row.square().sum()), rel=1e-3)
        assert torch.allclose(features[k], caught[0], atol=1e-5)
        assert scores.correct[k].sum() == (logits.argmax(1) == labels).sum()


def test_one_copy_of_a_frozen_parameter_serves_all_rows() -> None:
    network = frozen(Chain(), "body.4.weight")
    layout = Layout.of(network, "head")
    program, seen = Program(network, layout), []
    from fedkin.compute import program as module

    rule = module.RULES[nn.Linear]
    module.RULES[nn.Linear] = lambda m, name, t, x, rows, c: (
        seen.append(t.get("body.4.weight")) or rule(m, name, t, x, rows, c)
    )
    try:
        program(layout.tensors(layout.row(network).repeat(5, 1)), torch.zeros(10, 2, 8, 8), 5, module.Context())
    finally:
        module.RULES[nn.Linear] = rule
    assert seen[0].shape == (5, 8, 36)
    assert seen[0].stride(0) == 0  # a view
    assert seen[0].untyped_storage().nbytes() == 4 * 8 * 36


@pytest.mark.parametrize("method", every_method())
def test_every_method_leaves_frozen_parameters_alone_and_does_not_send_them(method: str) -> None:
    def go(network: nn.Module) -> fk.Result:
        return fk.run(method, model=network, data=federation(), **QUICK)

    torch.manual_seed(2)
    network = frozen(BodyHead(), "first")
    before = copy.deepcopy(network).state_dict()
    some, whole = go(network), go(BodyHead())
    assert some.bytes["up"] < whole.bytes["up"] or method in ("local", "lg-fedavg")  # neither sends a body
    moved = False
    for client in range(3):
        for name, parameter in some.personal(client).network.named_parameters():
            if name.startswith("first"):
                assert torch.equal(parameter, before[name]), name
            else:
                moved |= not torch.equal(parameter, before[name])
    assert moved
    assert all(torch.equal(v, before[k]) for k, v in network.state_dict().items())  # the user's own is as it was


def test_bytes_are_those_of_what_learns() -> None:
    network = frozen(BodyHead(), "first")  # 6*8 + 8 frozen of 56 + 72 + 36
    result = fk.run("fedavg", model=network, data=federation(), **QUICK)
    assert result.bytes == {"down": 3 * 4 * (72 + 36), "up": 3 * 4 * (72 + 36)}
    assert result.prepared.parameters == 72 + 36


def test_a_frozen_norm_still_counts_as_pytorch_does() -> None:
    network = frozen(Normed(), "batch")
    layout = Layout.of(network, "head")
    assert layout.size("buffers") == 8
    assert [s.name for s in layout.slots if s.kind == "buffer"] == ["batch.running_mean", "batch.running_var"]


@pytest.mark.parametrize(
    ("prefixes", "method", "options", "words"),
    [
        (("",), "fedavg", {}, "all parameters of BodyHead are frozen"),
        (("head",), "fedper", {}, "the network's head is frozen"),
        (("head",), "fedrep", {}, "the network's head is frozen"),
        (("head",), "lg-fedavg", {}, "the network's head is frozen"),
        (("head",), "pfedcs", {}, "the network's head is frozen"),
        (("head",), "fedpkda", {}, "the network's head is frozen"),
        (("head",), "c-pfl", {}, "the network's head is frozen"),
        (("head",), "fedbabu", {"finetune": "head"}, "the network's head is frozen"),
        (("head.bias",), "pfedcs", {}, "'head.bias' of the head is frozen"),
        (("head.weight",), "pfedcs", {}, "'head.weight' of the head is frozen"),
        (("first", "second"), "fedper", {}, "the network's body is frozen"),
        (("first", "second"), "fedbabu", {}, "the network's body is frozen"),
    ],
)
def test_a_method_that_learns_what_is_frozen_says_so_before_the_first_round(
    prefixes: tuple[str, ...], method: str, options: dict[str, Any], words: str
) -> None:
    config = make_config({**QUICK, "method": method, "options": options})
    with pytest.raises(UsageError, match=words):
        prepare(config, model=frozen(BodyHead(), *prefixes), data=federation())


@pytest.mark.parametrize("method", ["fedavg", "ditto", "fedbabu", "co-pfl", "fedcap"])
def test_a_frozen_head_is_no_obstacle_to_methods_that_do_not_learn_it(method: str) -> None:
    network = frozen(BodyHead(), "head")
    result = fk.run(method, model=network, data=federation(), **QUICK)
    assert torch.equal(result.personal(0).network.head.weight, network.head.weight)


def test_two_runs_with_other_frozen_values_are_not_trained_as_one() -> None:
    one, two = frozen(BodyHead(), "first"), frozen(BodyHead(), "first")
    programs = [Program(n, Layout.of(n, "head")) for n in (one, two, copy.deepcopy(one))]
    assert programs[0].signature == programs[2].signature != programs[1].signature


def test_a_frozen_network_in_a_file(tmp_path: Path) -> None:
    network = frozen(BodyHead(), "first")
    data = federation()
    result = fk.run("fedper", model=network, data=data, **QUICK)
    file = save_model(tmp_path / "a.safetensors", result.personal(1), Card.of(data[0], None))
    again = load_model(file, model=BodyHead())
    x = data[0].x[:5]
    assert torch.equal(again.module.first.weight, network.first.weight)
    assert np.allclose(again.probabilities(x), torch.softmax(result.personal(1)(torch.from_numpy(x)), 1).detach())


# ---------------------------------------------------------------- the head


class HeadFirst(nn.Module):
    """The classifier is defined first, a layer that has no part in the output last."""

    def __init__(self, used: bool = False) -> None:
        super().__init__()
        self.fc, self.body, self.aux, self.used = nn.Linear(8, 4), nn.Linear(6, 8), nn.Linear(8, 4), used

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x).relu()
        return self.fc(y) + self.aux(y) if self.used else self.fc(y)


class Looking(HeadFirst):
    """The layer beside is computed, later than the classifier, and thrown away; a softmax follows."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x).relu()
        scores = self.fc(y)
        self.aux(y)
        return scores.log_softmax(1)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.body, self.head = nn.Linear(6, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.head.weight = self.body.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.first(x)).relu())


X = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", [HeadFirst, Looking])
def test_the_head_is_found_by_what_the_network_does(kind: type[HeadFirst]) -> None:
    assert Layout.of(kind(), example=X).head_name == "fc"


@pytest.mark.parametrize("method", every_method())
def test_every_method_copes_with_a_layer_that_is_not_used(method: str) -> None:
    network = HeadFirst()
    result = fk.run(method, model=network, data=federation(), init="given", **QUICK)
    if method == "fedper":
        heads = [result.personal(k).network.fc.weight for k in range(3)]
        bodies = [result.personal(k).network.body.weight for k in range(3)]
        assert not torch.equal(heads[0], heads[1])
        assert torch.equal(bodies[0], bodies[1])
    assert torch.allclose(result.personal(0).network.aux.weight, network.aux.weight)  # averaged, but never moved


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 8)), nn.Linear(8, 4))


@pytest.mark.parametrize(
    ("network", "head", "words"),
    [
        (HeadFirst(used=True), None, "'aux' and 'fc' both make the output of HeadFirst"),
        (
            nn.Sequential(nn.Linear(6, 8), nn.Unflatten(1, (8, 1)), nn.Conv1d(8, 4, 1), nn.Flatten()),
            None,
            "no nn.Linear makes the 4 outputs",
        ),
        (HeadFirst(), "aux", "'aux' has no part in the output"),
        (HeadFirst(), "body", "'body' gives 8 numbers a sample, HeadFirst gives 4"),
        (HeadFirst(), "cf", "did you mean 'fc'"),
        (nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), None, "gives 3 outputs, the data have 4 classes"),
        (nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 4)), None, r"cannot take samples of shape \(6,\)"),
        (nn.Sequential(nn.BatchNorm2d(6), nn.Linear(6, 4)), None, r"cannot take samples of shape \(6,\): expected 4D"),
        (nn.Sequential(nn.BatchNorm2d(6), nn.Linear(6, 4)), "", r"cannot take samples of shape \(6,\): expected 4D"),
        (old_weight_norm(), None, "Sequential cannot be copied.*parametrizations"),
        (nn.Sequential(nn.Unflatten(1, (6, 1)), nn.Linear(1, 4)), None, r"returns shape \(6, 6, 4\)"),
    ],
    ids=lambda v: v if isinstance(v, str) else type(v).__name__,
)
def test_a_head_that_is_not_known_is_asked_for(network: nn.Module, head: str | None, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        fk.run("fedavg", model=network, head=head, data=federation(), **QUICK)


def test_a_head_may_be_several_layers() -> None:
    network = nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)))
    assert Layout.of(network, "1", example=X).size("head") == 72 + 36


def test_more_outputs_than_classes_are_allowed() -> None:
    network = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 9))
    assert fk.run("fedper", model=network, data=federation(), **QUICK).personal(0)(X).shape == (6, 9)


def test_a_head_tied_to_the_body_cannot_be_split_off() -> None:
    with pytest.raises(UsageError, match=r"'head' and the body share 'body.weight'"):
        fk.run("fedper", model=Tied(), data=federation(), **QUICK)
    result = fk.run("ditto", model=Tied(), data=federation(), **QUICK)
    module = result.personal(0).network
    assert module.head.weight is module.body.weight


# ---------------------------------------------------------------- first weights


def first_weights(network: Any, seed: int = 0, **settings: Any) -> tuple[Tensor, tuple[str, ...]]:
    job = prepare(make_config({**QUICK, "seed": seed, **settings}), model=network, data=federation())
    return job.site.initial, job.prepared.remarks


def test_a_network_is_drawn_anew_at_every_seed_and_the_users_own_is_left_alone() -> None:
    network = frozen(BodyHead(), "first")
    before, state = copy.deepcopy(network.state_dict()), torch.get_rng_state()
    zero, again, one = (first_weights(network, seed) for seed in (0, 0, 1))
    assert torch.equal(zero[0], again[0])
    assert not torch.equal(zero[0], one[0])
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in network.state_dict().items())
    assert "weights of BodyHead that are not frozen were drawn anew from seed 0" in zero[1][0]
    assert "init='given' keeps" in zero[1][0]


def test_a_drawn_network_is_what_its_layers_draw() -> None:
    network = frozen(BodyHead(), "first")
    drawn = copy.deepcopy(network)
    assert draw_anew(drawn, 5) is None
    torch.manual_seed(5)
    assert torch.equal(drawn.second.weight, nn.Linear(8, 8).weight)
    assert torch.equal(drawn.first.weight, network.first.weight)


def test_given_weights_are_kept_and_that_is_said() -> None:
    network = BodyHead()
    row = Layout.of(network, "head").row(network)
    for seed in (0, 1):
        found, remarks = first_weights(network, seed, init="given")
        assert torch.equal(found, row)
        assert "the same at every seed" in remarks[0]


@pytest.mark.parametrize("affine", [True, False])
def test_statistics_of_a_frozen_trunk_stay_when_the_rest_is_drawn(affine: bool) -> None:
    trunk = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, affine=affine)).requires_grad_(False)
    network = nn.Sequential(trunk, nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, affine=affine)), nn.Linear(8, 3))
    states = [network.get_buffer(f"{i}.1.running_mean").fill_(3.0) for i in (0, 1)]
    given = network[2].weight.detach().clone()
    assert draw_anew(network, 5) is None
    assert [s.unique().tolist() for s in states] == [[3], [0]]
    assert not torch.equal(network[2].weight, given)


def test_a_network_that_cannot_be_drawn_anew_says_that_all_seeds_start_alike() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.head = nn.Parameter(torch.ones(6)), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x * self.w)

    network = Own()
    zero, one = first_weights(network, 0), first_weights(network, 1)
    assert torch.equal(zero[0], one[0])
    assert "starts the same at every seed" in zero[1][0]
    assert fk.run("fedavg", model=network, data=federation(), **QUICK).remarks[0] == zero[1][0]


@pytest.mark.parametrize("make", [BodyHead, lambda: BodyHead()], ids=["class", "function"])
def test_a_class_or_function_is_called_under_the_seed(make: Callable[[], nn.Module]) -> None:
    state = torch.get_rng_state()
    zero, again, one = (first_weights(make, seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(zero[0], again[0])
    assert not torch.equal(zero[0], one[0])
    assert not any("seed" in remark for remark in zero[1]), "nothing to say about its first weights"
    torch.manual_seed(1)
    network = BodyHead()
    assert torch.equal(one[0], Layout.of(network, "head").row(network))


@pytest.mark.parametrize(
    ("model", "settings", "words"),
    [
        ("mlp", {"init": "given"}, "init='given' keeps the weights of a network of your own"),
        (BodyHead, {"init": "given"}, "leave init out"),
        (lambda: 3, {}, "made a int, not an nn.Module"),
        (nn.Linear, {}, "model=lambda: Linear"),
        (7, {}, "model=7: give a network's name"),
        (BodyHead(), {"init": "zeros"}, "init='zeros'"),
    ],
    ids=lambda value: None if callable(value) and not isinstance(value, type) else str(value),
)
def test_mistakes_about_first_weights_are_named(model: Any, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        fk.run("fedavg", model=model, data=federation(), **QUICK, **settings)


@pytest.mark.parametrize("init", ["seed", "given"])
def test_resuming_needs_the_same_network(tmp_path: Path, init: str) -> None:
    network, data = frozen(BodyHead(), "first"), federation()
    result = fk.run("fedper", model=network, data=data, init=init, runs_dir=str(tmp_path), **QUICK)
    again = fk.resume(str(result.run), model=copy.deepcopy(network), data=data)
    for client in range(3):
        other = again.personal(client).state_dict()
        assert all(torch.equal(v, other[k]) for k, v in result.personal(client).state_dict().items())
    with pytest.raises(DataError, match="the network's first weights are not those"):
        fk.resume(str(result.run), model=frozen(BodyHead(), "first"), data=data)


# ---------------------------------------------------------------- in use


def _data(kind: str) -> tuple[Dataset, Split]:
    rng = np.random.default_rng(0)
    clients = []
    for _ in range(3):
        y = rng.integers(0, 3, 60)
        if kind == "images":
            x: Any = np.clip(rng.integers(0, 150, (60, 1, 8, 8)) + 40 * y[:, None, None, None], 0, 255).astype(np.uint8)
        elif kind == "text":
            x = rng.integers(1, 12, (60, 5)) + 4 * y[:, None]
        else:
            shape = (60, 4) if kind == "features" else (60, 2, 1, 20)
            x = rng.standard_normal(shape) + 0.7 * y.reshape(-1, *[1] * (len(shape) - 1))
        clients.append((x, np.array(["ant", "bee", "cow"])[y] if kind != "features" else y * 10 + 3))
    return from_arrays(clients, vocabulary=30 if kind == "text" else 0)


@pytest.mark.parametrize("kind", ["images", "features", "series", "text"])
def test_predictions_on_raw_samples_are_as_right_as_was_reported(kind: str) -> None:
    dataset, split = _data(kind)
    result = fk.run("fedper", data=(dataset, split), rounds=2, epochs=2, lr=0.1, device="cpu", way="each")
    labels = np.array([int(n) for n in dataset.class_names] if kind == "features" else dataset.class_names)
    assert 40 < result.accuracy.macro < 100
    for c in result.per_client:
        x, y = dataset.x[split.test[c.client]], dataset.y[split.test[c.client]]
        with torch.no_grad():
            hits = (result.personal(c.client)(torch.from_numpy(x)).argmax(1).numpy() == y).sum()
        assert (hits, len(y)) == (c.correct, c.test_samples)
        named = result.predict(x.tolist() if kind == "images" else x, c.name)
        assert (named == labels[y]).sum() == c.correct
        assert list(result.predict(torch.from_numpy(x[:4]), c.client)) == list(named[:4])


def test_a_personal_model_goes_by_name_and_refuses_what_it_was_not_trained_on() -> None:
    dataset, split = _data("images")
    result = fk.run("fedavg", data=(dataset, split), rounds=1, epochs=1, device="cpu", way="each")
    x = torch.from_numpy(dataset.x[:3])
    one = result.personal("client-1")
    assert torch.equal(one(x), result.personal(1)(x))
    assert torch.allclose(one(x), one.network((x / 255 - 0.5) / 0.5), atol=1e-5)
    assert one.names == ("ant", "bee", "cow")
    with pytest.raises(UsageError, match="did you mean 'client-1'"):
        result.personal("cleint-1")
    with pytest.raises(UsageError, match="clients 0 to 2"):
        result.predict(x, 3)
    for wrong, words in [
        (x / 255, "it normalises them itself"),
        (x[0], r"x\[None\]"),
        (x[:, :, :4], r"of shape \(1, 4, 8\)"),
    ]:
        for use in (one, lambda v: result.predict(v, 0)):
            with pytest.raises(DataError, match=words):
                use(wrong)
    with pytest.raises(DataError, match="different lengths"):
        result.predict([[1, 2], [3]], 0)


@pytest.mark.parametrize(
    ("kind", "x", "words"),
    [
        ("features", np.full((2, 4), np.nan), "not finite"),
        ("features", [["a"] * 4], "give numbers"),
        ("text", [[1, 2, 3, 4, 99]], "token ids run from 1 to 99"),
        ("text", [[1, 2, 3]], r"of shape \(3,\)"),
    ],
)
def test_samples_that_no_model_takes_are_refused(kind: str, x: Any, words: str) -> None:
    result = fk.run("fedavg", data=_data(kind), rounds=1, epochs=1, device="cpu", way="each")
    with pytest.raises(DataError, match=words):
        result.predict(x, 0)


def test_the_reference_loop_leaves_frozen_parameters_alone() -> None:
    """The oracle itself: an optimiser over all parameters moves only those with a gradient."""
    network = frozen(Chain(), "body.0")
    before = copy.deepcopy(network.state_dict())
    x, y = numbers(4, (2, 8, 8), 3)
    train_client(network, [(torch.from_numpy(x), torch.from_numpy(y))], OPTIMISERS["adam-decay"])
    assert torch.equal(network.body[0].weight, before["body.0.weight"])
    assert not torch.equal(network.body[4].weight, before["body.4.weight"])


def test_names_that_only_look_like_numbers_stay_names() -> None:
    for names in (("01", "02"), ("1", "٢")):
        model = Ready(nn.Identity(), Samples((2,), "float32", 2, names))
        assert labels(model, np.eye(2, dtype=np.float32)).tolist() == list(names)


@pytest.mark.parametrize(("given", "kind"), [(["1", "2"], "i"), ([-5, 10], "i"), (["a", "b"], "U")])
def test_labels_come_back_as_the_data_had_them(given: list[Any], kind: str) -> None:
    clients = [(np.eye(2, 6, dtype=np.float32)[[0, 1] * 6], np.array(given * 6)) for _ in range(2)]
    result = fk.run("local", model="mlp", clients=clients, rounds=3, lr=0.5, device="cpu")
    found = result.predict(clients[0][0][:2], 0)
    assert found.dtype.kind == kind
    assert [str(v) for v in found] == [str(v) for v in given]


def test_a_body_that_is_empty_is_said() -> None:
    with pytest.raises(UsageError, match=r"body is empty, all is head '0': name a smaller head, or take a method"):
        fk.run("fedper", model=nn.Sequential(nn.Linear(6, 4)), data=federation(), **QUICK)


@pytest.mark.parametrize("client", [1.0, None, True, -1, 3])
def test_a_client_that_is_none_is_refused(client: Any) -> None:
    result = fk.run("fedavg", model=HeadFirst(), data=federation(), **QUICK)
    with pytest.raises(UsageError, match=r"this run has clients 0 to 2"):
        result.personal(client)


def test_what_is_said_of_first_weights_leaves_frozen_ones_out() -> None:
    network = HeadFirst()
    network.body.requires_grad_(False)
    said = fk.run("fedavg", model=network, data=federation(), **QUICK).remarks[0]
    assert said.startswith("the weights of HeadFirst that are not frozen were drawn anew from seed 0")


@pytest.mark.parametrize("odd", [2.7, np.nan, np.inf])
def test_token_ids_that_are_no_whole_numbers_are_refused(odd: float) -> None:
    with pytest.raises(DataError, match=f"token ids are whole numbers, but {odd} is among them"):
        from_arrays([(np.array([[1, 2], [3, odd]]), [0, 1])], vocabulary=5)


class Masked(nn.Module):
    """Two inputs that are of one shape and kind."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.fc = nn.Embedding(30, 8), nn.Linear(8, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.fc((self.words(input_ids) * attention_mask.unsqueeze(-1)).sum(1))


def test_looking_at_a_network_leaves_its_first_weights_alone() -> None:
    """An embedding with max_norm shortens what it looks up."""
    network = nn.Sequential(nn.Embedding(20, 4, max_norm=0.1), nn.Flatten(), nn.Linear(20, 2))
    clients = [({"ids": np.arange(40).reshape(8, 5) % 20}, np.arange(8) % 2)] * 2
    job = prepare(make_config({**QUICK, "init": "given"}), model=network, data=Brought(own_clients(clients)))
    assert torch.equal(job.site.initial, job.site.layout.row(network))
    assert network[0].weight.norm(dim=1).max() > 1


def test_statistics_of_one_sample_are_told() -> None:
    net, client = (
        nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)),
        (np.ones((8, 6)), np.arange(8) % 2),
    )
    one = (np.ones((1, 6)), [0], np.ones((1, 6)), [0])

    def told(clients: list[Any], **settings: Any) -> str:
        brought = Brought(own_clients(clients))
        return " ".join(prepare(make_config({**QUICK, **settings}), model=net, data=brought).prepared.remarks)

    assert "batch=1: BatchNorm has the statistics of a single sample" in told([client, client], batch=1)
    assert "a client with one training sample (client-1): BatchNorm" in told([client, one])
    assert "BatchNorm" not in told([client, client])


def test_parts_of_which_some_have_an_arguments_name_are_refused() -> None:
    """Taken in their order, the mask would be looked up as words."""
    mask, ids = np.ones((8, 5), int), np.random.default_rng(0).integers(5, 30, (8, 5))
    with pytest.raises(UsageError, match=r"attention_mask is an argument of Masked.forward.* and ids is not"):
        fk.run("local", clients=[({"attention_mask": mask, "ids": ids}, np.arange(8) % 2)], model=Masked, **QUICK)
    learnt: list[Tensor] = []
    for names in (("attention_mask", "input_ids"), ("b", "a")):
        parts = dict(zip(names, (mask, ids) if names[0] == "attention_mask" else (ids, mask), strict=True))
        result = fk.run("local", clients=[(parts, np.arange(8) % 2)], model=Masked, **QUICK)
        learnt.append(result.personal(0).network.state_dict()["words.weight"])
    assert torch.equal(*learnt)
