"""Networks that do more in a forward pass than compute: they train as the plain loop does, or are refused by name."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from reference import OPTIMISERS, Bench, distance, numbers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fedkin as fk
from fedkin.bench.check import ALONE
from fedkin.compute.layout import Layout
from fedkin.compute.optim import SGD
from fedkin.compute.program import trace
from fedkin.errors import UsageError

QUICK: dict[str, Any] = {"rounds": 1, "epochs": 1, "batch": 4, "lr": 0.1, "device": "cpu", "way": "each"}
X, Y = numbers(21, (6,), 3)
CLIENTS = [(X[:9], Y[:9]), (X[9:], Y[9:])]


class Two(nn.Module):
    """A trunk and a head; `body` is what differs."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def body(self, x: Tensor) -> Tensor:
        return self.trunk(x).relu()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


# ---------------------------------------------------------------- what it does, it does in training too


class Without(Two):
    """A part that does not learn, by `torch.no_grad`."""

    def body(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.trunk(x).relu()


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return -g


class Reversal(Two):
    """A gradient that is turned round."""

    def body(self, x: Tensor) -> Tensor:
        return _Reversed.apply(self.trunk(x).relu())


class Detached(Two):
    """Given in evaluation mode: in training its trunk gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.eval()

    def body(self, x: Tensor) -> Tensor:
        h = self.trunk(x).relu()
        return h.detach() if self.training else h


class Hooked(Two):
    """A module whose hook halves gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU()
        self.act.register_full_backward_hook(lambda m, found, _: tuple(g / 2 for g in found))

    def body(self, x: Tensor) -> Tensor:
        return self.act(self.trunk(x))


class Asleep(Two):
    """A branch over the whole batch that begins at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.beside = nn.Parameter(torch.zeros(1)), nn.Linear(6, 8)

    def body(self, x: Tensor) -> Tensor:
        h = self.beside(x)
        return self.trunk(x).relu() + self.alpha * (h - h.mean(0, keepdim=True))


class Average(Two):
    """A buffer that follows the batch, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(1))

    def body(self, x: Tensor) -> Tensor:
        h = self.trunk(x)
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * h.detach().abs().mean())
        return h / self.mean


class Replaced(Average):
    """A buffer that follows the batch and is put in another's place."""

    def body(self, x: Tensor) -> Tensor:
        h = self.trunk(x)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * h.detach().abs().mean()
        return h / self.mean


class Later(Average):
    """The old value is used before a new one takes its place."""

    def body(self, x: Tensor) -> Tensor:
        h = self.trunk(x)
        y = h / self.mean
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * h.detach().abs().mean()
        return y


class Data(Average):
    """The same by `.data`."""

    def body(self, x: Tensor) -> Tensor:
        h = self.trunk(x)
        if self.training:
            self.mean.data = 0.9 * self.mean + 0.1 * h.detach().abs().mean()
        return h / self.mean


class Clock(Average):
    """A buffer that moves on whatever the batch holds; rows go together all the same."""

    def body(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9)
        return self.trunk(x) * self.mean


class Bounded(Two):
    """An embedding that shortens its vectors as they are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 8, max_norm=1.0)

    def body(self, x: Tensor) -> Tensor:
        return self.trunk(x) + self.words((x.abs().long() % 4)[:, 0])


class FourAxes(Two):
    """A buffer that lies otherwise in memory than a network of one channel has it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(1, 8, 1, 2))

    def body(self, x: Tensor) -> Tensor:
        h = self.trunk(x)
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * h.detach().abs().mean(0).view(1, 8, 1, 1))
        return h / self.mean[0, :, 0, 1]


class Counted(Two):
    """Words that are seen often learn less."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 8, scale_grad_by_freq=True)

    def body(self, x: Tensor) -> Tensor:
        return self.trunk(x) + self.words((x.abs().long() % 4)[:, 0])


BESIDES = [
    Without,
    Reversal,
    Detached,
    Hooked,
    Asleep,
    Average,
    Replaced,
    Later,
    Data,
    Clock,
    Bounded,
    FourAxes,
    Counted,
]


@pytest.mark.parametrize("kind", BESIDES)
@pytest.mark.parametrize("way", ["each", "threads", "batched"])
def test_what_a_forward_pass_does_besides_is_done_as_in_the_plain_loop(kind: type[Two], way: str) -> None:
    torch.manual_seed(1)
    bench = Bench(kind(), X, Y, (9, 7, 5), classes=3, opt=SGD(0.1), way=way)
    starts = bench.starts()
    assert bench.site.forward.together or kind not in (Without, Clock)
    if way == "batched" and not bench.site.forward.together:
        with pytest.raises(UsageError, match="cannot run this network"):
            bench.cohort().fit(starts)
        return
    assert distance(bench.cohort().fit(starts), bench.reference(starts), starts) < 1e-4


def test_a_check_looks_at_the_weights_that_it_is_told_to() -> None:
    same = {"device": "cpu", "clients": 2, "steps": 1, "batch": 2}
    assert fk.check(Asleep(), X[:6], init="given", **same).form == ALONE
    with pytest.raises(UsageError, match="did you mean 'given'"):
        fk.check(Asleep(), X[:6], init="givn", **same)


def test_the_users_network_is_traced_as_a_copy() -> None:
    network = Replaced()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    example = torch.from_numpy(X[:6])
    trace(network, Layout.of(network, example=example), example)
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    assert type(network.mean) is Tensor


class Scaled(Two):
    """Parameters and a buffer without axes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("shift", torch.tensor(0.5))

    def body(self, x: Tensor) -> Tensor:
        return self.trunk(x).relu() * self.scale + self.shift


class Weighed(Two):
    """Uses its own parameters as numbers."""

    def body(self, x: Tensor) -> Tensor:
        return self.trunk(x) / (1 + sum(p.square().sum() for p in self.parameters()))


class Sparse(Two):
    """An embedding that asks for sparse gradients beside a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.gain = nn.Embedding(4, 8, sparse=True), nn.Parameter(torch.ones(8))

    def body(self, x: Tensor) -> Tensor:
        return self.trunk(x) + self.gain * self.words((x.abs().long() % 4)[:, 0])


@pytest.mark.parametrize("kind", [Scaled, Weighed, Sparse])
@pytest.mark.parametrize("way", ["each", "threads", "batched"])
def test_parameters_of_any_shape_and_use_train(kind: type[Two], way: str) -> None:
    torch.manual_seed(1)
    opt = OPTIMISERS["sgd-momentum-decay"]
    bench = Bench(kind(), X, Y, (9, 7, 5), classes=3, opt=SGD(0.1) if kind is Sparse else opt, way=way)
    starts = bench.starts()
    plain = Bench(kind(), X, Y, (9, 7, 5), classes=3, opt=bench.opt)
    if kind is Sparse:  # PyTorch's optimisers would take other steps for the sparse gradients
        plain.model.words.sparse = False
    assert distance(bench.cohort().fit(starts), plain.reference(starts), starts) < 1e-4


def test_a_parameter_without_axes_goes_through_a_run() -> None:
    for settings in ({}, {"clip_grad": 1.0}, {"optimiser": "adam"}, {"accumulate": 2}):
        for way in ("each", "batched"):
            result = fk.run("fedavg", model=Scaled, clients=CLIENTS, **{**QUICK, "way": way}, **settings)
            assert result.personal(0).network.scale.shape == ()
            assert result.personal(0).network.scale != 1.5


# ---------------------------------------------------------------- buffers that are constants


class Causal(nn.Module):
    """Attention behind a mask of infinities, and a table of another precision."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.attend = nn.Linear(2, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
        self.register_buffer("table", torch.arange(3, dtype=torch.float64) / 3)
        self.register_buffer("derived", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inside(x.view(-1, 3, 2)) + (self.table * self.derived).float().unsqueeze(1)
        return self.head(self.attend(h, h, h, attn_mask=self.mask, need_weights=False)[0].mean(1))


@pytest.mark.parametrize("method", ["fedavg", "c-pfl", "fedcap"])
def test_buffers_that_are_constants_are_neither_trained_nor_sent(method: str) -> None:
    result = fk.run(method, model=Causal, clients=CLIENTS, **{**QUICK, "way": "auto"})
    assert result.diverged is None
    assert not result.failures
    network = result.personal(0).network
    fresh = Causal()
    assert all(torch.equal(value, dict(network.named_buffers())[name]) for name, value in fresh.named_buffers())
    if method == "fedavg":
        assert result.bytes["up"] == 2 * 4 * sum(p.numel() for p in fresh.parameters())
    assert Layout.of(fresh, "head").size("buffers") == 0


@pytest.mark.parametrize("way", ["each", "threads", "batched"])
def test_a_network_with_a_mask_of_infinities_trains_as_in_the_plain_loop(way: str) -> None:
    torch.manual_seed(1)
    bench = Bench(Causal(), X, Y, (9, 7, 5), classes=3, opt=SGD(0.1), way=way)
    assert bench.site.forward.together
    starts = bench.starts()
    assert distance(bench.cohort().fit(starts), bench.reference(starts), starts) < 1e-4


# ---------------------------------------------------------------- what no row can hold


class Momentum(Two):
    def __init__(self) -> None:
        super().__init__()
        self.slow = copy.deepcopy(self.trunk).requires_grad_(False)

    def body(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.training:
                self.slow.weight.mul_(0.999).add_(self.trunk.weight, alpha=0.001)
        return self.trunk(x) + self.slow(x)


class Steps(Two):
    steps = 0

    def body(self, x: Tensor) -> Tensor:
        self.steps += self.training
        return self.trunk(x).relu() if self.steps > 15 else self.trunk(x)


class Number(Two):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def body(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return self.trunk(x) / (1 + self.seen)


class FirstBatch(Two):
    scale: Tensor | None = None

    def body(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = x.std()
        return self.trunk(x) / self.scale


class Always(Average):
    def body(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9)
        return self.trunk(x) * self.mean


class Python(Two):
    def body(self, x: Tensor) -> Tensor:
        return self.trunk(x) * (0.5 if self.training and random.random() < 0.1 else 1.0)


class Derived(Average):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(1), persistent=False)


class OnAndOn(Two):
    def body(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.trunk(x), 0.5)


class GradientHook(Two):
    def __init__(self) -> None:
        super().__init__()
        self.trunk.weight.register_hook(lambda g: g * 0)


class Again(Two):
    def body(self, x: Tensor) -> Tensor:
        return checkpoint(self.trunk, x, use_reentrant=False)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Momentum, r"changes its frozen parameter 'slow.weight' in training.*register_buffer"),
        (Steps, r"Steps changes self.steps in training.*register_buffer\('steps'"),
        (Number, r"changes its buffer 'seen' \(torch.int64\) in training"),
        (FirstBatch, r"changes self.scale in training"),
        (Always, r"changes 'mean' in evaluation mode.*only while self.training"),
        (Python, r"draws random numbers from Python's random in training"),
        (Derived, r"changes its buffer 'mean' in training, which is taken for a constant"),
        (OnAndOn, r"in evaluation mode \(test_networks_odd.py line \d+: return nn.functional.dropout\(.*self.training"),
        (GradientHook, r"parameter 'trunk.weight' of GradientHook has a hook.*register_full_backward_hook"),
        (GradientHook(), r"parameter 'trunk.weight' of GradientHook has a hook"),
        (torch.jit.script(nn.Sequential(nn.Linear(6, 3))), r"compiled by torch.jit.*give the nn.Module"),
        (Again, r"uses torch.utils.checkpoint \(test_networks_odd.py line \d+: return checkpoint\(self.trunk"),
        (
            lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 3)),
            r"BatchNorm1d '1' of Sequential has momentum=None.*such as 0.1",
        ),
    ],
)
def test_what_is_remembered_beside_the_row_is_refused_by_name(kind: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        fk.run("fedavg", model=kind, clients=CLIENTS, **QUICK)


class Recorder(Two):
    """Keeps what it saw last, and looks up what depends on no sample: neither is a memory."""

    table: Tensor | None = None

    def body(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, x.shape[1])
        self.hidden = [self.trunk(x + self.table)]
        self.length = len(x)
        return self.hidden[0].relu()


def test_what_is_written_down_and_not_read_again_does_no_harm() -> None:
    bench = Bench(Recorder(), X, Y, (9, 7, 5), classes=3, opt=SGD(0.1))
    starts = bench.starts()
    assert distance(bench.cohort().fit(starts), bench.reference(starts), starts) < 1e-4


# ---------------------------------------------------------------- noise


class Dropped(Two):
    def body(self, x: Tensor) -> Tensor:
        h = self.trunk(x)
        return h if self.training and torch.rand(1).item() < 0.1 else h.relu()


class DropPath(Two):
    """timm's, behind a layer that begins at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.zero = nn.Linear(8, 8)
        for parameter in self.zero.parameters():
            nn.init.zeros_(parameter)

    def body(self, x: Tensor) -> Tensor:
        h = self.trunk(x)
        y = self.zero(h.relu())
        return h + y * y.new_empty((len(y), 1)).bernoulli_(0.5) if self.training else h + y


@pytest.mark.parametrize("kind", [Dropped, DropPath])
def test_noise_that_is_rarely_seen_is_keyed(kind: type[Two]) -> None:
    network = kind()
    found = fk.check(network, X[:6], device="cpu", clients=2, steps=1, batch=2)
    assert found.noise
    assert kind is DropPath or found.form == ALONE
    runs = []
    for seed in (0, 1):  # of PyTorch's own generator, which must not matter
        torch.manual_seed(seed)
        result = fk.run("fedavg", model=network, init="given", clients=CLIENTS, **{**QUICK, "rounds": 3})
        runs.append(np.concatenate([p.detach().flatten() for p in result.personal(0).network.parameters()]))
    assert np.array_equal(*runs)


def test_a_thread_that_draws_random_numbers_is_no_network_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here it draws during the first two of three looks."""
    from fedkin.compute import probing

    looks: list[int] = []
    moved = probing.Generators.moved

    def disturbed(self: probing.Generators) -> str:
        looks.append(len(looks))
        if len(looks) in (1, 3):  # the first look at evaluation; the next look at training
            random.random()
        return moved(self)

    monkeypatch.setattr(probing.Generators, "moved", disturbed)
    network = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    assert fk.run("fedavg", data="digits", clients=5, rounds=1, model=network).accuracy.macro > 0
    assert len(looks) == 5
