"""A cohort trains exactly as a plain PyTorch loop would, one client after another (tests/reference.py)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from reference import (
    OPTIMISERS,
    Bench,
    digits,
    distance,
    numbers,
    plain_loss,
    tokens,
    torch_optimiser,
    train_client,
    usual_order,
)
from torch import Tensor, nn

from fedkin.compute.batches import plan
from fedkin.compute.layout import Layout
from fedkin.compute.losses import Term, align, cross_entropy, guide
from fedkin.compute.optim import SGD, Adam, Moments
from fedkin.compute.program import Program, trace
from fedkin.compute.vmapped import Vmapped
from fedkin.core.cohort import Model
from fedkin.errors import DataError, UsageError
from fedkin.models import build

CLOSE = 1e-4  # |found - expected| / |expected - start|
WAYS = [("each", True), ("each", False), ("threads", True), ("threads", False), ("batched", False)]
ways = pytest.mark.parametrize(("way", "tape"), WAYS, ids=[w + ("-tape" if t else "") for w, t in WAYS])
RAGGED = (9, 1, 4, 6)  # batch 4: two full and a rest of one; a single sample; exactly one batch; a rest of two


class Small(nn.Module):
    """A chain with every kind of layer the hand-written tape knows."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 4, 3, stride=2, bias=False),
            nn.Identity(),
            nn.Flatten(),
            nn.Linear(4, 6),
            nn.ReLU(),
        )
        self.head = nn.Linear(6, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def small_bench(sizes: tuple[int, ...] = RAGGED, **how) -> Bench:
    torch.manual_seed(1)
    return Bench(Small(), *digits(sum(sizes), (2, 8, 8), 3), sizes, classes=3, **how)


# ---------------------------------------------------------------- every way, every optimiser, ragged clients


@ways
@pytest.mark.parametrize("name", OPTIMISERS)
def test_ragged_clients_train_as_in_the_plain_loop(way: str, tape: bool, name: str) -> None:
    bench = small_bench(way=way, tape=tape, opt=OPTIMISERS[name], epochs=2)
    assert (bench.site.tape is not None) == tape
    start = bench.starts()
    assert distance(bench.cohort().fit(start), bench.reference(start), start) < CLOSE


@ways
def test_the_training_loss_is_the_mean_over_steps(way: str, tape: bool) -> None:
    bench = small_bench(way=way, tape=tape)
    start, cohort = bench.starts(), bench.cohort()
    cohort.fit(start)
    for k in range(len(RAGGED)):
        expected = train_client(bench.module(start[k]), bench.batches(k), bench.opt)
        assert cohort.losses[k].item() == pytest.approx(expected, rel=1e-5)


def test_fit_leaves_its_start_alone() -> None:
    bench = small_bench()
    start = bench.starts()
    before = start.clone()
    bench.cohort().fit(start)
    assert torch.equal(start, before)


def test_one_common_start_serves_every_client() -> None:
    bench = small_bench()
    common = bench.starts()[0]
    together = bench.cohort().fit(common)
    assert torch.equal(together, bench.cohort().fit(common.expand(len(RAGGED), -1)))


# ---------------------------------------------------------------- the zoo


ZOO = {  # name: (data, sizes of the clients, batch, learning rate: small where BatchNorm over a few samples is chaotic)
    "cnn-512": (lambda n: digits(n, (1, 16, 16), 3), (5, 1), 3, 0.05),
    "fedcap-cifar": (lambda n: digits(n, (3, 16, 16), 3), (5, 1), 3, 0.05),
    "fedcap-emnist": (lambda n: digits(n, (1, 16, 16), 3), (5, 1), 3, 0.05),
    "harcnn": (lambda n: numbers(n, (3, 1, 20), 3), (5, 1), 3, 0.05),
    "mlp": (lambda n: digits(n, (1, 4, 4), 3), (5, 1), 3, 0.05),
    "fasttext": (lambda n: tokens(n, 5, 20, 3), (5, 1), 3, 0.05),
    "resnet18": (lambda n: digits(n, (3, 32, 32), 3), (6, 3), 6, 1e-3),
    "resnet18-cifar": (lambda n: digits(n, (3, 8, 8), 3), (6, 3), 6, 1e-3),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * n.startswith("resnet18")) for n in ZOO])
def test_every_network_of_the_zoo_trains_as_in_the_plain_loop(name: str) -> None:
    make, sizes, batch, lr = ZOO[name]
    x, y = make(sum(sizes))
    model = build(name, x.shape[1:], 3, 20 if name == "fasttext" else 0)
    expected = None
    for way, tape in WAYS:
        if "resnet" in name and (tape or way == "threads"):
            continue  # eleven million parameters: no tape for them, and threads run the same code as each
        bench = Bench(model, x, y, sizes, classes=3, batch=batch, opt=SGD(lr), way=way, tape=tape)
        assert isinstance(bench.site.forward, Program), "the zoo must run in its fast form"
        start = bench.starts(0.0 if "resnet" in name else 0.1)
        expected = bench.reference(start) if expected is None else expected
        assert distance(bench.cohort().fit(start), expected, start) < CLOSE, way


# ---------------------------------------------------------------- parts, masks, pulls


@ways
@pytest.mark.parametrize("learn", ["model", "body", "head"])
def test_only_the_part_that_learns_moves(way: str, tape: bool, learn: str) -> None:
    bench = small_bench(way=way, tape=tape, opt=SGD(0.05, 0.9, 0.1))  # decay would move a part that is not frozen
    start = bench.starts()
    found = bench.cohort().fit(start, learn=learn)
    assert distance(found, bench.reference(start, learn=learn), start) < CLOSE
    frozen = {"model": None, "body": "head", "head": "body"}[learn]
    if frozen:
        columns = bench.layout.columns(frozen)
        assert torch.equal(found[:, columns], start[:, columns])


@ways
@pytest.mark.parametrize("name", ["sgd-momentum-decay", "adam-decay"])
def test_numbers_outside_the_mask_stay(way: str, tape: bool, name: str) -> None:
    bench = small_bench(way=way, tape=tape, opt=OPTIMISERS[name])
    start = bench.starts()
    mask = torch.rand(start.shape, generator=torch.Generator().manual_seed(5)) < 0.5
    found = bench.cohort().fit(start, mask=mask)
    assert torch.equal(found[~mask], start[~mask])
    assert distance(found, bench.reference(start, masks=mask), start) < CLOSE


@ways
@pytest.mark.parametrize("name", ["sgd", "sgd-momentum-decay", "adam"])
def test_the_proximal_term_is_half_mu_times_the_squared_distance(way: str, tape: bool, name: str) -> None:
    bench = small_bench(way=way, tape=tape, opt=OPTIMISERS[name])
    start, anchor = bench.starts(), bench.starts(0.5)
    found = bench.cohort().fit(start, mu=0.7, anchor=anchor)
    assert distance(found, bench.reference(start, mu=0.7, anchors=anchor), start) < CLOSE
    assert distance(found, bench.reference(start), start) > 0.01  # and it does pull


@ways
def test_a_pull_and_a_frozen_part_together(way: str, tape: bool) -> None:
    bench = small_bench(way=way, tape=tape)
    start, anchor = bench.starts(), bench.starts(0.5)
    found = bench.cohort().fit(start, mu=0.7, anchor=anchor, learn="body")
    assert distance(found, bench.reference(start, mu=0.7, anchors=anchor, learn="body"), start) < CLOSE


@ways
def test_several_models_of_a_client_see_the_same_batches(way: str, tape: bool) -> None:
    bench = small_bench(way=way, tape=tape)
    v, w = bench.starts(), bench.starts(0.5)
    found_v, found_w = bench.cohort().fit_together([Model(v, 0.7, w), Model(w)])
    assert distance(found_v, bench.reference(v, mu=0.7, anchors=w), v) < CLOSE
    assert distance(found_w, bench.reference(w), w) < CLOSE


@ways
def test_a_mask_holds_for_all_models_of_a_client(way: str, tape: bool) -> None:
    bench = small_bench(way=way, tape=tape)
    v, w = bench.starts(), bench.starts(0.5)
    mask = torch.rand(v.shape, generator=torch.Generator().manual_seed(5)) < 0.5
    for found, start in zip(bench.cohort().fit_together([Model(v), Model(w)], mask=mask), (v, w), strict=True):
        assert torch.equal(found[~mask], start[~mask])
        assert distance(found, bench.reference(start, masks=mask), start) < CLOSE


# ---------------------------------------------------------------- losses


def prototypes_and_presence() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(len(RAGGED), 3, 6, generator=generator), torch.tensor([True, False, True]).repeat(4, 1)


@ways
def test_alignment_draws_features_to_the_prototype_of_their_class(way: str, tape: bool) -> None:
    bench = small_bench(way=way, tape=tape)
    prototypes, present = prototypes_and_presence()

    def loss_of(k: int):
        def loss(features: Tensor, logits: Tensor, y: Tensor) -> Tensor:
            value = F.cross_entropy(logits, y)
            for f, label in zip(features, y, strict=True):
                if present[k, label]:
                    value = value + 2.0 * F.mse_loss(f, prototypes[k, label]) / len(y)
            return value

        return loss

    start = bench.starts()
    terms = [cross_entropy(), align(prototypes, present, 2.0, len(RAGGED))]
    found = bench.cohort().fit(start, loss=terms)
    assert distance(found, bench.reference(start, losses=[loss_of(k) for k in range(4)]), start) < CLOSE
    assert distance(found, bench.reference(start), start) > 0.01


@ways
def test_alignment_alone_leaves_the_head_without_gradient(way: str, tape: bool) -> None:
    bench = small_bench(way=way, tape=tape)
    prototypes, present = prototypes_and_presence()
    start = bench.starts()
    found = bench.cohort().fit(start, loss=[align(prototypes[0], present[0], 1.0, 4)], learn="body")
    assert torch.equal(bench.layout.head(found), bench.layout.head(start))

    def loss(features: Tensor, logits: Tensor, y: Tensor) -> Tensor:
        each = [F.mse_loss(f, prototypes[0, c]) * present[0, c] for f, c in zip(features, y, strict=True)]
        return torch.stack(each).mean() + 0.0 * logits.sum()

    assert distance(found[:1], bench.reference(start, losses=[loss] * 4, learn="body")[:1], start[:1]) < CLOSE


@ways
def test_guidance_is_the_divergence_from_a_frozen_classifier(way: str, tape: bool) -> None:
    bench = small_bench(way=way, tape=tape)
    generator = torch.Generator().manual_seed(9)
    weight, bias = torch.randn(4, 3, 6, generator=generator), torch.randn(4, 3, generator=generator)

    def loss_of(k: int):
        def loss(features: Tensor, logits: Tensor, y: Tensor) -> Tensor:
            teacher = F.linear(features.detach(), weight[k], bias[k]).softmax(1)
            return F.cross_entropy(logits, y) + F.kl_div(logits.log_softmax(1), teacher, reduction="batchmean")

        return loss

    start = bench.starts()
    found = bench.cohort().fit(start, loss=[cross_entropy(), guide(weight, bias)])
    assert distance(found, bench.reference(start, losses=[loss_of(k) for k in range(4)]), start) < CLOSE


@ways
def test_a_term_follows_its_client_when_several_models_train(way: str, tape: bool) -> None:
    bench = small_bench(way=way, tape=tape)
    scale = torch.tensor([1.0, 2.0, 3.0, 4.0])
    term = Term(
        "scaled", lambda out, y, given: out.features.square().mean(-1) * given["scale"][:, None], {"scale": scale}
    )

    def loss_of(k: int):
        return lambda features, logits, y: plain_loss(features, logits, y) + scale[k] * features.square().mean()

    v, w = bench.starts(), bench.starts(0.5)
    losses = [loss_of(k) for k in range(4)]
    found = bench.cohort().fit_together([Model(v), Model(w)], loss=[cross_entropy(), term])
    assert distance(found[0], bench.reference(v, losses=losses), v) < CLOSE
    assert distance(found[1], bench.reference(w, losses=losses), w) < CLOSE


# ---------------------------------------------------------------- optimiser memory


@ways
@pytest.mark.parametrize("name", ["sgd-momentum-decay", "adam"])
def test_moments_that_persist_continue_the_optimiser(way: str, tape: bool, name: str) -> None:
    opt = OPTIMISERS[name]
    bench = small_bench(way=way, tape=tape, opt=opt)
    start = bench.starts()
    moments = Moments.zeros(opt, len(RAGGED), bench.layout.width, torch.device("cpu"))
    first = bench.cohort(round=0).fit(start, moments=moments)
    found = bench.cohort(round=1).fit(first, moments=moments)
    expected = []
    for k in range(len(RAGGED)):
        module = bench.module(start[k])
        one = torch_optimiser(opt, list(module.parameters()))
        for round in range(2):
            train_client(module, bench.batches(k, bench.plan(round)), opt, optimiser=one)
        expected.append(bench.layout.row(module))
    assert distance(found, torch.stack(expected), start) < CLOSE
    assert moments.steps.tolist() == (2 * bench.plan().steps).tolist()


@ways
@pytest.mark.parametrize("name", ["sgd-momentum-decay", "adam"])
def test_memory_of_an_earlier_fit_does_not_reach_outside_the_mask(way: str, tape: bool, name: str) -> None:
    bench = small_bench(way=way, tape=tape, opt=OPTIMISERS[name])
    moments = Moments.zeros(bench.opt, len(RAGGED), bench.layout.width, torch.device("cpu"))
    start = bench.cohort().fit(bench.starts(), moments=moments)
    mask = torch.rand(start.shape, generator=torch.Generator().manual_seed(5)) < 0.5
    found = bench.cohort(round=1).fit(start, moments=moments, mask=mask)
    assert torch.equal(found[~mask], start[~mask])
    assert not torch.equal(found[mask], start[mask])


# ---------------------------------------------------------------- networks that users bring


class Branching(nn.Module):
    """Data-dependent control flow: nothing can trace this."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(5, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inside(x)
        return self.head(torch.relu(h) if h.mean() > 0 else torch.tanh(h))


class SharedLayer(nn.Module):
    """One layer used twice: its gradients add up."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.relu, self.head = nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.relu(self.inside(self.relu(self.inside(x)))))


class TiedWeights(nn.Module):
    """Two layers with one weight: it has one place in the row."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.two(torch.relu(self.one(x)))))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.norm, self.head = nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.inside(x))))


class OverTime(nn.Module):
    """A linear layer applied to each time step of a series [n, 4, 5]."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class GroupNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Linear(4 * 36, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.flatten(F.relu(self.norm(self.conv(x))), 1))


class Viewing(nn.Module):
    """`x.view(n, -1)` as in every tutorial; it must not meet the engine's channels-last images."""

    def __init__(self, untraceable: bool = False) -> None:
        super().__init__()
        self.conv, self.head, self.untraceable = nn.Conv2d(1, 4, 3), nn.Linear(4 * 36, 3), untraceable

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.conv(x))
        if self.untraceable and h.sum() < 0:
            h = -h
        return self.head(h.view(h.size(0), -1))


class Grouped(nn.Module):
    """Grouped and dilated convolutions, padding, a stride, no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(2, 4, 3, padding=1, groups=2)
        self.b = nn.Conv2d(4, 4, 3, dilation=2, bias=False)
        self.c = nn.Conv2d(4, 4, 2, stride=2)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.flatten(torch.relu(self.c(torch.relu(self.b(self.a(x))))), 1))


class LongHead(nn.Module):
    """A head of two layers whose first reads features that are negative too."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(5, 6)
        self.head = nn.Sequential(nn.ReLU(), nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


USERS = {  # name: (module, shape of a sample, its form, whether rows can share a pass)
    "control-flow": (Branching, (5,), Vmapped, False),
    "shared-layer": (SharedLayer, (5,), Program, True),
    "tied-weights": (TiedWeights, (5,), Program, True),
    "layer-norm": (Normed, (5,), Program, True),
    "over-time": (OverTime, (4, 5), Program, True),
    "group-norm": (GroupNormed, (2, 8, 8), Program, True),
    "view": (Viewing, (1, 8, 8), Program, True),
    "view-untraceable": (lambda: Viewing(True), (1, 8, 8), Vmapped, False),
    "grouped": (Grouped, (2, 8, 8), Program, True),
    "long-head": (LongHead, (5,), Program, True),
}


@ways
@pytest.mark.parametrize("name", USERS)
def test_networks_of_users_train_as_in_the_plain_loop(name: str, way: str, tape: bool) -> None:
    make, shape, form, together = USERS[name]
    torch.manual_seed(2)
    bench = Bench(make(), *numbers(20, shape, 3), RAGGED, classes=3, way=way, tape=tape)
    assert type(bench.site.forward) is form
    start = bench.starts()
    if way == "batched" and not together:
        with pytest.raises(UsageError, match="choose each or threads"):
            bench.cohort().fit(start)
    else:
        assert distance(bench.cohort().fit(start), bench.reference(start), start) < CLOSE


@pytest.mark.parametrize("name", USERS)
def test_the_automatic_way_copes_with_networks_of_users(name: str) -> None:
    make, shape, _, _ = USERS[name]
    torch.manual_seed(2)
    bench = Bench(make(), *numbers(20, shape, 3), RAGGED, classes=3, way="auto")
    start = bench.starts()
    assert distance(bench.cohort().fit(start), bench.reference(start), start) < CLOSE


@ways
def test_features_of_a_long_head_reach_the_loss_unrectified(way: str, tape: bool) -> None:
    torch.manual_seed(2)
    bench = Bench(LongHead(), *numbers(20, (5,), 3), RAGGED, classes=3, way=way, tape=tape)
    term = Term("size", lambda out, y, given: out.features.square().mean(-1))
    start = bench.starts()
    found = bench.cohort().fit(start, loss=[cross_entropy(), term])
    losses = [lambda f, logits, y: F.cross_entropy(logits, y) + f.square().mean()] * 4
    assert distance(found, bench.reference(start, losses=losses), start) < CLOSE


class Dropping(nn.Module):
    def __init__(self, kind: type[nn.Module] = nn.Dropout, branch: bool = False) -> None:
        super().__init__()
        self.inside, self.drop, self.again = nn.Linear(5, 32), kind(0.5), kind(0.2)
        self.head, self.branch = nn.Linear(32, 3), branch

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(torch.relu(self.inside(x)))
        if self.branch and h.sum() < 0:
            h = -h
        return self.head(self.again(h))


class FunctionalDropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside, self.head = nn.Linear(5, 32), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(torch.relu(self.inside(x)), 0.5, self.training))


def dropping_bench(way: str, seed: int = 0) -> Bench:
    torch.manual_seed(2)
    return Bench(Dropping(), *numbers(20, (5,), 3), RAGGED, classes=3, way=way, seed=seed)


@pytest.mark.parametrize("way", ["each", "threads", "batched"])
def test_dropout_depends_on_seed_client_and_step_alone(way: str) -> None:
    start = dropping_bench("each").starts()
    expected = dropping_bench("each").cohort().fit(start)
    torch.manual_seed(99)  # the global generator has no part in it
    found = dropping_bench(way).cohort().fit(start)
    assert distance(found, expected, start) < CLOSE
    some = dropping_bench(way).cohort([1, 3]).fit(start[[1, 3]])
    assert distance(some, expected[[1, 3]], start[[1, 3]]) < CLOSE


def test_dropout_drops_while_training_and_not_while_evaluating() -> None:
    bench = dropping_bench("each")
    start = bench.starts()
    module = bench.module(start[0]).eval()
    x = bench.source.batch(torch.arange(9))
    assert torch.allclose(bench.cohort([0]).features(start[:1])[0], module.inside(x).relu(), atol=1e-6)
    still = bench.module(start[0])
    for layer in (still.drop, still.again):
        layer.p = 0.0
    train_client(still, bench.batches(0), bench.opt)
    trained = bench.cohort([0]).fit(start[:1])
    assert distance(trained, bench.layout.row(still)[None], start[:1]) > 0.1


def test_what_dropout_keeps_is_scaled_up() -> None:
    bench = dropping_bench("each")
    seen: list[Tensor] = []
    term = Term("look", lambda out, y, given: seen.append(out.features.detach()) or out.logits.sum(-1) * 0.0)
    bench.cohort([0]).fit(bench.starts()[:1], loss=[term])
    module = bench.module(bench.starts()[0])
    expected = [torch.relu(module.inside(x)) for x, _ in bench.batches(0)]  # a loss of zero trains nothing
    drops, kept = [], []
    for found, clean in zip(seen, expected, strict=True):
        factor = (found[0] / clean)[clean > 0]
        values = {round(v, 3) for v in factor.tolist()}
        assert values == {0.0, 2.5}  # p = 0.5, then p = 0.2: either dropped, or 1 / (0.5 * 0.8)
        kept.append((factor > 0).float())
        drops.append(found[0] == 0)
    assert 0.2 < torch.cat(kept).mean() < 0.6  # 0.4 of them on average
    alive = (expected[0] > 0) & (expected[1] > 0)  # not those that are zero by themselves
    assert not torch.equal(drops[0][alive], drops[1][alive])  # every step draws anew


def test_dropout_keeps_the_share_it_says() -> None:
    from fedkin.compute import draws

    drawn = draws.uniform(torch.tensor([1, 2]), 20000)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert drawn.mean(1).tolist() == pytest.approx([0.5, 0.5], abs=0.02)
    assert not torch.equal(drawn[0], drawn[1])


@pytest.mark.parametrize("way", ["each", "threads", "batched"])
@pytest.mark.parametrize(
    "make",
    [lambda: Dropping(branch=True), lambda: Dropping(nn.AlphaDropout), FunctionalDropping],
    ids=["control-flow", "alpha-dropout", "functional"],
)
def test_noise_of_any_kind_depends_on_seed_client_and_step_alone(make, way: str) -> None:
    def bench(way: str) -> Bench:
        torch.manual_seed(2)
        return Bench(make(), *numbers(20, (5,), 3), RAGGED, classes=3, way=way)

    start = bench("each").starts()
    expected = bench("each").cohort().fit(start)
    torch.manual_seed(99)
    if way == "batched" and not bench(way).site.forward.together:
        assert "if self.branch and h.sum() < 0" in bench(way).site.forward.why_not
        return
    assert distance(bench(way).cohort().fit(start), expected, start) < CLOSE
    still = bench("each").module(start[0])
    still.eval()  # no noise
    some = bench(way).cohort([1]).fit(start[[1]])
    assert distance(some, expected[[1]], start[[1]]) < CLOSE


class Random(nn.Module):
    """Noise of other kinds than dropout."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.inside, self.head = kind, nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inside(x)
        if self.kind == "randint":
            h = h * torch.randint(0, 2, h.shape)
        if self.kind == "numpy":
            h = h * float(np.random.default_rng().random())
        if self.kind == "evaluation":
            h = h + torch.randn_like(h)
        return self.head(h)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("randint", r"randint \(test_core_training\.py line \d+: h = h \* torch\.randint"),
        ("numpy", "not with PyTorch"),
        ("evaluation", r"in evaluation mode with randn_like \(test_core_training\.py line"),
    ],
)
def test_noise_that_no_seed_could_repeat_is_refused_with_its_line(kind: str, words: str) -> None:
    model = Random(kind)
    with pytest.raises(UsageError, match=words):
        trace(model, Layout.of(model, "head"), torch.randn(6, 5))


# ---------------------------------------------------------------- BatchNorm


class BatchNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)
        self.inside, self.flat = nn.Linear(4 * 36, 5), nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm(self.conv(x))).flatten(1)
        return self.head(torch.relu(self.flat(self.inside(h))))


def normed_bench(sizes: tuple[int, ...] = (9, 4, 7), **how) -> Bench:
    torch.manual_seed(4)
    return Bench(BatchNormed(), *digits(sum(sizes), (2, 8, 8), 3), sizes, classes=3, opt=SGD(0.01), **how)


@pytest.mark.parametrize("way", ["each", "threads", "batched"])
@pytest.mark.parametrize("buffers", ["average", "local"])
def test_batch_norm_learns_and_remembers_as_in_the_plain_loop(way: str, buffers: str) -> None:
    """Three samples in a padded batch of four: the padding must not enter the statistics."""
    bench = normed_bench(way=way, buffers=buffers)
    start = bench.starts(0.0)
    found, expected = bench.cohort().fit(start), bench.reference(start)
    assert distance(found, expected, start) < CLOSE
    columns = bench.layout.columns("buffers")
    assert distance(found[:, columns], expected[:, columns], start[:, columns]) < CLOSE


def test_a_rest_of_one_sample_is_left_out_under_batch_norm_only() -> None:
    assert normed_bench().plan().sizes[:, 0].tolist() == [4, 4]  # 9 = 4 + 4 + 1
    assert small_bench().plan().sizes[:, 0].tolist() == [4, 4, 1]


@pytest.mark.parametrize("way", ["each", "batched"])
def test_a_client_with_one_sample_survives_batch_norm(way: str) -> None:
    bench = normed_bench((4, 1), way=way)
    found = bench.cohort().fit(bench.starts(0.0))
    assert torch.isfinite(found).all()
    assert (found[1] != bench.initial).any()


def test_untraceable_networks_without_batch_norm_keep_a_rest_of_one_sample() -> None:
    bench = Bench(Branching(), *numbers(5, (5,), 3), (5,), classes=3)
    assert bench.plan().sizes[:, 0].tolist() == [4, 1]


def test_local_statistics_stay_with_the_client() -> None:
    bench = normed_bench(buffers="local")
    columns = bench.layout.columns("buffers")
    cohort = bench.cohort()
    trained = cohort.fit(bench.starts(0.0))
    assert cohort.model(trained).shape[1] == bench.layout.parameters  # a whole model without them
    received = bench.cohort(round=1).rows(model=torch.zeros(bench.layout.size("model")))
    assert torch.equal(received[:, columns], trained[:, columns])
    assert not torch.equal(received[0, columns], received[1, columns])


def test_averaged_statistics_travel_with_the_body() -> None:
    bench = normed_bench(buffers="average")
    assert bench.layout.size("model") == bench.layout.parameters + 2 * (4 + 5)
    assert bench.layout.size("body") == bench.layout.size("model") - 18


# ---------------------------------------------------------------- batches


def test_an_epoch_shows_every_sample_once() -> None:
    parts = [np.arange(10, 21), np.arange(30, 31), np.arange(40, 44)]
    made = plan(parts, np.arange(3), 2, 4, (0,), False)
    for k, part in enumerate(parts):
        steps = -(-len(part) // 4)
        for epoch in range(2):
            rows = range(epoch * steps, (epoch + 1) * steps)
            seen = [i for s in rows for i in made.table[s, k, : made.sizes[s, k]]]
            assert sorted(seen) == part.tolist()
    assert made.steps.tolist() == [6, 2, 2]


@pytest.mark.parametrize("whole", [False, True])
def test_a_fixed_order_is_that_of_a_loader_that_neither_shuffles_nor_keeps_a_short_batch(whole: bool) -> None:
    parts = [np.arange(10, 21), np.arange(30, 31), np.arange(40, 44), np.arange(50, 53), np.arange(60, 69)]
    made = plan(parts, np.arange(5), 2, 4, (0,), whole, fixed=True)
    for k, part in enumerate(parts):
        loader = torch.utils.data.DataLoader(part, 4, shuffle=False, drop_last=len(part) >= 4)  # type: ignore[arg-type]
        right = [batch.tolist() for _ in range(2) for batch in loader]
        seen = [t[k, : s[k]].tolist() for t, s in zip(made.table, made.sizes, strict=True) if s[k]]
        assert seen == right


def test_the_batch_order_depends_on_seed_client_round_and_stream_alone() -> None:
    parts = [np.arange(20), np.arange(20, 40), np.arange(40, 50)]
    base = plan(parts, np.arange(3), 1, 4, (0, 0, "train", 1), False)
    alone = plan([parts[1]], np.array([1]), 1, 4, (0, 0, "train", 1), False)
    assert np.array_equal(base.table[:5, 1], alone.table[:, 0])
    for other in ((1, 0, "train", 1), (0, 1, "train", 1), (0, 0, "tune", 1), (0, 0, "train", 2)):
        assert not np.array_equal(base.table[:5, 1], plan(parts, np.arange(3), 1, 4, other, False).table[:5, 1])
    renamed = plan([parts[1]], np.array([2]), 1, 4, (0, 0, "train", 1), False)
    assert not np.array_equal(alone.table, renamed.table)


def test_a_longer_training_begins_like_a_shorter_one() -> None:
    part = [np.arange(20)]
    long, short = (plan(part, np.array([0]), e, 4, (0,), False) for e in (3, 1))
    assert np.array_equal(long.table[:5], short.table)
    assert not np.array_equal(long.table[:5], long.table[5:10])  # and is shuffled anew


def test_a_second_fit_in_a_round_shuffles_anew() -> None:
    bench = small_bench((12,))
    cohort, start = bench.cohort(), bench.starts()
    first, second = cohort.fit(start), cohort.fit(start)
    assert distance(first, bench.reference(start), start) < CLOSE
    assert distance(second, bench.reference(start, steps=bench.plan(fit=2)), start) < CLOSE
    assert distance(second, first, start) > 1e-3


@ways
def test_a_subset_of_clients_trains_like_all(way: str, tape: bool) -> None:
    bench = small_bench(way=way, tape=tape, opt=Adam(0.002))
    start = bench.starts()
    everybody = bench.cohort().fit(start)
    some = bench.cohort([3, 1]).fit(start[[3, 1]])
    assert distance(some, everybody[[3, 1]], start[[3, 1]]) < 1e-5


@ways
def test_the_same_work_twice_gives_the_same_bits(way: str, tape: bool) -> None:
    start = small_bench().starts()
    first, second = (small_bench(way=way, tape=tape).cohort().fit(start) for _ in range(2))
    assert torch.equal(first, second)


def test_pixels_are_scaled_once() -> None:
    bench = small_bench()
    raw = usual_order(bench.source.x.permute(0, 3, 1, 2)).float()
    assert torch.allclose(bench.source.batch(torch.tensor([3])), ((raw / 255 - 0.5) / 0.5)[3:4], atol=1e-6)


# ---------------------------------------------------------------- mistakes


def test_a_client_without_samples_is_named() -> None:
    bench = small_bench((4, 0, 3))
    with pytest.raises(DataError, match="'client-1' has no training samples"):
        bench.cohort().fit(bench.starts())
    assert torch.isfinite(bench.cohort([0, 2]).fit(bench.starts()[[0, 2]])).all()


def test_rows_of_the_wrong_width_are_refused() -> None:
    bench = small_bench()
    with pytest.raises(UsageError, match=r"client\.rows"):
        bench.cohort().fit(torch.zeros(4, 3))


def test_epochs_must_be_positive() -> None:
    bench = small_bench()
    with pytest.raises(UsageError, match="epochs=0"):
        bench.cohort().fit(bench.starts(), epochs=0)


def test_a_part_that_does_not_exist_cannot_learn() -> None:
    bench = small_bench()
    with pytest.raises(UsageError, match="learn='tail'"):
        bench.cohort().fit(bench.starts(), learn="tail")
    whole = small_bench(head="")
    with pytest.raises(UsageError, match="no such part"):
        whole.cohort().fit(whole.starts(), learn="head")


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: SGD(0.0), "lr"),
        (lambda: SGD(-1.0), "lr"),
        (lambda: SGD(0.1, 1.0), "momentum"),
        (lambda: SGD(0.1, weight_decay=-1), "weight_decay"),
        (lambda: Adam(0.1, beta1=1.0), "beta1"),
        (lambda: Adam(float("nan")), "lr"),
    ],
)
def test_optimisers_check_their_numbers(make, name: str) -> None:
    with pytest.raises(UsageError, match=name):
        make()
