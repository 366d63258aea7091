"""The GPU's ways against the row-by-row way, on the same device. Skipped without a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from wild import NETWORKS

from fedkin.compute import graphs
from fedkin.compute.backends import run_way
from fedkin.compute.batches import Source, crop_flip, plan
from fedkin.compute.layout import Layout
from fedkin.compute.losses import align, cross_entropy
from fedkin.compute.optim import SGD, Adam, Moments
from fedkin.compute.program import trace
from fedkin.compute.work import Work
from fedkin.config import make_config
from fedkin.core.cohort import Cohort
from fedkin.models import build
from fedkin.rounds import Result, prepare, run_config
from fedkin.sweep.together import run_together

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SHAPE, CLASSES, ROWS = (3, 32, 32), 10, 5
SIZES = (25, 17, 10, 4, 1)


class WithDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(3072, 32), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(32, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x))
        return out


class WithNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        first = [nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        self.body = nn.Sequential(*first, nn.Conv2d(6, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(8 * 49, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x))
        return out


def job(model: nn.Module, **changes: object) -> Work:
    device = torch.device("cuda")
    rng = np.random.default_rng(0)
    ends = np.cumsum(SIZES)
    parts = [np.arange(e - n, e) for e, n in zip(ends, SIZES, strict=True)]
    x = rng.integers(0, 256, (int(ends[-1]), *SHAPE), dtype=np.uint8)
    y = rng.integers(0, CLASSES, int(ends[-1]))
    layout = Layout.of(model, "head")
    example = Source(x[:6], y[:6], torch.device("cpu")).batch(torch.arange(6))
    settings: dict[str, object] = {
        "forward": trace(model, layout, example),
        "layout": layout,
        "rows": layout.row(model).to(device).repeat(ROWS, 1),
        "client": np.arange(ROWS),
        "source": Source(x, y, device),
        "plan": plan(parts, np.arange(ROWS), 1, 10, (0,), True),
        "opt": SGD(0.01),
        "learn": layout.learnt("model"),
    }
    return Work(**{**settings, **changes})  # type: ignore[arg-type]


def same(way: str, model: nn.Module, tolerance: float = 1e-3, **changes: object) -> None:
    reference, tried = job(model, **changes), job(model, **changes)
    before = reference.rows.clone()
    run_way("each", reference)
    losses = run_way(way, tried)
    graphs.forget()
    assert torch.isfinite(losses).all()
    assert float((tried.rows - reference.rows).norm() / (reference.rows - before).norm()) < tolerance


@pytest.mark.parametrize("way", ["batched", "graph"])
@pytest.mark.parametrize("opt", [SGD(0.01), SGD(0.01, 0.9, 1e-3), Adam(1e-3)], ids=["sgd", "momentum", "adam"])
def test_every_optimiser(way: str, opt: object) -> None:
    same(way, build("fedcap-cifar", SHAPE, CLASSES), opt=opt, tolerance=2e-2 if isinstance(opt, Adam) else 1e-3)


@pytest.mark.parametrize("opt", [SGD(0.01, 0.9, 1e-3), Adam(1e-3)], ids=["momentum", "adam"])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("way", ["batched", "graph"])
def test_clipping_and_accumulation(way: str, clip: float | None, opt: object) -> None:
    model, ends = build("fedcap-cifar", SHAPE, CLASSES), np.cumsum(SIZES)
    parts = [np.arange(e - n, e) for e, n in zip(ends, SIZES, strict=True)]
    steps = plan(parts, np.arange(ROWS), 2, 4, (0,), True, accumulate=3)
    same(way, model, plan=steps, clip=clip, opt=opt, tolerance=2e-2 if isinstance(opt, Adam) else 1e-3)


def test_pull_mask_and_terms() -> None:
    model = build("fedcap-cifar", SHAPE, CLASSES)
    width = Layout.of(model, "head").width
    generator = torch.Generator("cuda").manual_seed(0)
    mask = torch.rand(ROWS, width, device="cuda", generator=generator) < 0.5
    anchor = torch.randn(ROWS, width, device="cuda", generator=generator) * 0.01
    prototypes = torch.randn(CLASSES, 64, device="cuda", generator=generator)
    present = torch.arange(CLASSES, device="cuda") < 7
    terms = [cross_entropy(), align(prototypes, present, 0.5, ROWS)]
    same("graph", model, mask=mask, mu=torch.full((ROWS,), 0.3, device="cuda"), anchor=anchor, terms=terms)


def test_batch_norm_dropout_and_augmentation() -> None:
    same("graph", WithNorm(), tolerance=5e-2, opt=SGD(1e-3))
    same("graph", build("resnet18-cifar", SHAPE, CLASSES), tolerance=5e-2, opt=SGD(1e-3))
    same("graph", WithDropout(), noise=np.arange(1, ROWS + 1).astype(np.uint64))
    steps = job(WithDropout()).plan
    moves = crop_flip((0,), np.arange(ROWS), *steps.table.shape[::2])
    same("graph", build("fedcap-cifar", SHAPE, CLASSES), plan=type(steps)(steps.table, steps.sizes, moves))


@pytest.mark.parametrize("way", ["batched", "graph"])
@pytest.mark.parametrize("frozen", ["body.0", "body.1", ("body.0.weight", "body.4.weight"), "head", "body"], ids=str)
def test_frozen_parameters(way: str, frozen: str | tuple[str, ...]) -> None:
    model = WithNorm()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    same(way, model, tolerance=5e-2, opt=SGD(1e-3))


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_from_the_wild(name: str) -> None:
    """Captured as a graph, or row by row where `vmap` cannot run them, as on the CPU."""
    wild = NETWORKS[name]
    torch.manual_seed(3)
    network, data = wild.network()
    x, y = data(int(sum(SIZES))), np.random.default_rng(5).integers(0, 3, sum(SIZES))
    example = Source(x[:6], y[:6], torch.device("cpu")).batch(torch.arange(6))
    layout = Layout.of(network, wild.head, example=example)
    forward = trace(network, layout, example)
    assert forward.together == wild.together
    ends, found = np.cumsum(SIZES), {}
    parts = [np.arange(e - n, e) for e, n in zip(ends, SIZES, strict=True)]
    for way, device in (("each", "cpu"), ("graph" if wild.together else "each", "cuda")):
        work = Work(
            forward,
            layout,
            layout.row(network).to(device).repeat(ROWS, 1),
            np.arange(ROWS),
            Source(x, y, torch.device(device)),
            plan(parts, np.arange(ROWS), 1, 10, (0,), forward.has_batch_norm),
            SGD(0.2 * wild.lr),
            layout.learnt("model"),
            noise=np.arange(1, ROWS + 1).astype(np.uint64),
        )
        before = work.rows.cpu().clone()
        assert torch.isfinite(run_way(way, work)).all()
        found[device] = work.rows.cpu()
    graphs.forget()
    error = (found["cuda"] - found["cpu"]).norm() / (found["cpu"] - before).norm()
    assert float(error) < (5e-2 if forward.has_batch_norm else 1e-3)


def test_graphs_are_reused_with_other_rows_and_moments_go_on() -> None:
    model = build("mlp", SHAPE, CLASSES)
    opt = Adam(1e-3)
    width, device = Layout.of(model, "head").width, torch.device("cuda")
    first, second = job(model, opt=opt), job(model, opt=opt)
    second.forward, second.source = first.forward, first.source
    for work in (first, second):
        work.moments = Moments.zeros(opt, ROWS, width, device)
    second.rows += 0.01
    run_way("graph", first)
    run_way("graph", second)
    reference = job(model, opt=opt, moments=Moments.zeros(opt, ROWS, width, device))
    reference.rows += 0.01
    run_way("each", reference)
    graphs.forget()
    start = job(model).rows + 0.01
    # Adam magnifies the rounding of gradients near zero, so rows are compared as a whole (1e-5 between two CPU ways)
    assert float((second.rows - reference.rows).norm() / (reference.rows - start).norm()) < 1e-3
    assert second.moments is not None
    assert reference.moments is not None
    assert torch.equal(second.moments.steps, reference.moments.steps)
    for mine, right in zip(second.moments.buffers, reference.moments.buffers, strict=True):
        assert float((mine - right).norm() / right.norm()) < 1e-4  # also of rows that rested while others went on


def test_rates_of_rows_are_filled_in_and_a_new_rate_captures_no_new_graph() -> None:
    """Each round has rates of its own: the graphs of the first round serve all."""
    model = build("fedcap-cifar", SHAPE, CLASSES)
    for opt in (SGD(0.01), SGD(0.01, 0.9, 1e-3), Adam(1e-3)):
        rates = torch.tensor([1.0, 0.5, 2.0, 0.1, 3.0], device="cuda") * opt.lr
        tolerance = 2e-2 if isinstance(opt, Adam) else 1e-3
        same("graph", model, opt=opt, rates=rates, tolerance=tolerance)
        same("batched", model, opt=opt, rates=rates, tolerance=tolerance)
    base = {"method": "fedavg", "data": "digits", "clients": 5, "rounds": 4, "epochs": 1, "device": "cuda"}
    graphs.forget()
    run = prepare(make_config({**base, "precision": "fp32", "lr_schedule": "cosine", "lr_factors": "lognormal:0.5"}))
    run.advance()
    captured = {id(graph) for kind in graphs._captured.values() for graph in kind.graphs.values()}
    assert captured
    while run.fed.round < run.config.rounds:
        run.advance()
    assert {id(graph) for kind in graphs._captured.values() for graph in kind.graphs.values()} == captured
    graphs.forget()


def test_many_clients_in_one_pass_measure_what_each_would_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(
        {
            "method": "fedavg",
            "data": "digits",
            "clients": 7,
            "partition": "dirichlet:0.3",
            "device": "cuda",
            "precision": "fp32",
        }
    )
    run = prepare(config)
    cohort = Cohort(run.site, np.arange(7), 0, "look")
    rows = run.site.initial + 0.05 * torch.randn(7, len(run.site.initial), device="cuda")
    scores, norms, losses = cohort.evaluate(rows), cohort.gradient_norms(rows, "body", batch=9), cohort.loss(rows)
    monkeypatch.setattr(Cohort, "_together", lambda self: False)
    alone, each = cohort.evaluate(rows), cohort.gradient_norms(rows, "body", batch=9)
    graphs.forget()
    assert torch.equal(scores.count, alone.count)
    assert float((scores.correct - alone.correct).abs().sum()) <= 2  # a tie may fall the other way
    torch.testing.assert_close(scores.loss, alone.loss, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(norms, each, rtol=1e-3, atol=1e-7)
    torch.testing.assert_close(losses, cohort.loss(rows), rtol=1e-4, atol=1e-6)


def test_runs_that_share_a_cohort_end_where_they_would_alone() -> None:
    base = {"data": "digits", "clients": 5, "rounds": 2, "epochs": 1, "device": "cuda", "precision": "fp32"}
    cells = [
        make_config({**base, **c})
        for c in (
            {"method": "fedavg"},
            {"method": "fedavg", "seed": 1, "attack": "sf"},
            {"method": "ditto"},
            {"method": "fedcap"},
            {"method": "fedcap", "attack": "ipm"},
            {"method": "co-pfl", "lr": 1e-3},
            {"method": "fedavg", "lr": 0.05, "lr_schedule": "exponential:gamma=0.5"},
        )
    ]
    for mine, cell in zip(run_together(cells), cells, strict=True):
        alone = run_config(cell)
        assert isinstance(mine, Result)
        assert torch.allclose(mine._rows, alone._rows, rtol=1e-3, atol=2e-4)
