"""What a cohort can say about models: each number against a plain computation with an ordinary module."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from reference import Bench, digits, numbers, parts_of
from test_core_training import RAGGED, BatchNormed, Branching, Small, TiedWeights
from torch import Tensor, nn

import fedkin.core.cohort
import fedkin.core.evaluation
from fedkin.compute.backends import run_way
from fedkin.compute.losses import align, cross_entropy
from fedkin.compute.work import Work
from fedkin.core.store import Keep
from fedkin.errors import DataError, UsageError

NETWORKS = {
    "chain": (Small, (2, 8, 8)),
    "batch-norm": (BatchNormed, (2, 8, 8)),
    "control-flow": (Branching, (5,)),
    "tied-weights": (TiedWeights, (5,)),
}
networks = pytest.mark.parametrize("name", NETWORKS)


def bench_of(name: str, **how) -> Bench:
    make, shape = NETWORKS[name]
    torch.manual_seed(1)
    x, y = digits(sum(RAGGED), shape, 3) if len(shape) == 3 else numbers(sum(RAGGED), shape, 3)
    bench = Bench(make(), x, y, RAGGED, classes=3, **how)
    bench.initial[bench.layout.columns("buffers")] += 0.3  # statistics that matter
    return bench


def client_data(bench: Bench, k: int) -> tuple[Tensor, Tensor]:
    index = torch.from_numpy(bench.parts[k])
    return bench.source.batch(index), bench.source.labels(index)


def features_by_hand(module: nn.Module, x: Tensor) -> Tensor:
    seen: list[Tensor] = []
    hook = module.head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    module(x)
    hook.remove()
    return seen[0].detach()


def gradient(module: nn.Module, x: Tensor, y: Tensor, learn: str) -> Tensor:
    """In the order of the row: as the layout lists them."""
    names = parts_of(module, "head")[learn]
    named = dict(module.named_parameters())
    found = torch.autograd.grad(F.cross_entropy(module(x), y), [named[n] for n in names])
    return torch.cat([g.flatten() for g in found])


@networks
@pytest.mark.parametrize("learn", ["model", "body", "head"])
def test_gradient_norms_sum_the_squared_norms_of_batch_gradients(name: str, learn: str) -> None:
    bench = bench_of(name, batch=4)
    start = bench.starts()
    found = bench.cohort().gradient_norms(start, learn)
    for k in range(len(RAGGED)):
        module = bench.module(start[k]).eval()
        x, y = client_data(bench, k)
        batches = zip(x.split(4), y.split(4), strict=True)
        expected = sum(gradient(module, bx, by, learn).square().sum() for bx, by in batches)
        assert found[k].item() == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize("name", ["chain", "batch-norm"])
@pytest.mark.parametrize("at_once", [8192, 9, 1])
def test_many_clients_in_one_pass_measure_the_same(name: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU does, done on this device: rows of ragged clients padded into shared passes."""
    bench = bench_of(name, batch=4)
    start, cohort = bench.starts(), bench.cohort()
    scores, norms = cohort.evaluate(start, "train"), cohort.gradient_norms(start, "body", batch=3)
    passes: list[str] = []

    def batched(way: str, work: Work) -> Tensor:
        passes.append(way)
        return run_way("batched", work)

    monkeypatch.setattr(fedkin.core.evaluation, "run_way", batched)
    monkeypatch.setattr(fedkin.core.evaluation, "EVALUATE_TOGETHER", at_once)
    monkeypatch.setattr(fedkin.core.evaluation, "EVALUATE", 5)
    monkeypatch.setattr(fedkin.core.cohort.Cohort, "_together", lambda self: True)
    together = cohort.evaluate(start, "train")
    assert torch.equal(together.correct, scores.correct)
    assert torch.equal(together.count, scores.count)
    torch.testing.assert_close(together.loss, scores.loss, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(cohort.gradient_norms(start, "body", batch=3), norms, rtol=1e-4, atol=1e-7)
    assert passes == ["graph"]


@pytest.mark.parametrize("name", ["chain", "batch-norm", "tied-weights"])
@pytest.mark.parametrize("learn", ["model", "head"])
def test_sample_gradients_are_those_of_single_samples(name: str, learn: str) -> None:
    bench = bench_of(name)
    start = bench.starts()
    found = bench.cohort().sample_gradients(start, learn)
    for k, size in enumerate(RAGGED):
        module = bench.module(start[k]).eval()
        x, y = client_data(bench, k)
        expected = torch.stack([gradient(module, x[i : i + 1], y[i : i + 1], learn) for i in range(size)])
        assert found[k].shape == expected.shape
        assert torch.allclose(found[k], expected, atol=1e-5)


def test_sample_gradients_of_a_network_with_control_flow() -> None:
    bench = bench_of("control-flow")
    start = bench.starts()
    found = bench.cohort([2]).sample_gradients(start[2:3])[0]
    module = bench.module(start[2]).eval()
    x, y = client_data(bench, 2)
    expected = torch.stack([gradient(module, x[i : i + 1], y[i : i + 1], "model") for i in range(RAGGED[2])])
    assert torch.allclose(found, expected, atol=1e-5)


@networks
def test_features_are_the_heads_inputs(name: str) -> None:
    bench = bench_of(name)
    start = bench.starts()
    for k, found in enumerate(bench.cohort().features(start)):
        expected = features_by_hand(bench.module(start[k]).eval(), client_data(bench, k)[0])
        assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("clip", [None, 0.1])
def test_prototypes_are_mean_features_of_each_class(clip: float | None) -> None:
    bench = bench_of("chain")
    start = bench.starts()
    prototypes, counts = bench.cohort().prototypes(start, clip=clip)
    assert prototypes.shape == (len(RAGGED), 3, 6)
    for k in range(len(RAGGED)):
        x, y = client_data(bench, k)
        features = features_by_hand(bench.module(start[k]).eval(), x)
        features = features if clip is None else features.clamp(-clip, clip)
        for c in range(3):
            mine = features[y == c]
            assert counts[k, c] == len(mine)
            expected = mine.mean(0) if len(mine) else torch.zeros(6)
            assert torch.allclose(prototypes[k, c], expected, atol=1e-5)
    assert (counts[1] == 0).sum() == 2  # the client with one sample knows one class


@networks
def test_loss_is_the_mean_over_samples_in_evaluation_mode(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedkin.core.evaluation, "EVALUATE", 4 if name != "control-flow" else 512)  # uneven pieces
    bench = bench_of(name)
    start = bench.starts()
    found = bench.cohort().loss(start)
    for k in range(len(RAGGED)):
        x, y = client_data(bench, k)
        expected = F.cross_entropy(bench.module(start[k]).eval()(x), y)
        assert found[k].item() == pytest.approx(expected.item(), rel=1e-5)


def test_loss_adds_its_terms_each_with_the_clients_own_share() -> None:
    bench = bench_of("chain")
    start = bench.starts()
    prototypes, present = torch.randn(4, 3, 6), torch.ones(4, 3, dtype=torch.bool)
    found = bench.cohort().loss(start, [cross_entropy(), align(prototypes, present, 2.0, 4)])
    for k in range(len(RAGGED)):
        x, y = client_data(bench, k)
        module = bench.module(start[k]).eval()
        pull = 2.0 * F.mse_loss(features_by_hand(module, x), prototypes[k, y])
        assert found[k].item() == pytest.approx((F.cross_entropy(module(x), y) + pull).item(), rel=1e-4)


@networks
def test_evaluation_counts_hits_per_class(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedkin.core.evaluation, "EVALUATE", 4 if name != "control-flow" else 512)
    bench = bench_of(name)
    start = bench.starts()
    scores = bench.cohort().evaluate(start, "train")
    for k in range(len(RAGGED)):
        x, y = client_data(bench, k)
        logits = bench.module(start[k]).eval()(x)
        for c in range(3):
            assert scores.count[k, c] == (y == c).sum()
            assert scores.correct[k, c] == ((y == c) & (logits.argmax(1) == c)).sum()
        assert scores.loss[k].item() == pytest.approx(F.cross_entropy(logits, y).item(), rel=1e-5)
        assert scores.accuracy[k].item() == pytest.approx((logits.argmax(1) == y).float().mean().item())


def test_looking_changes_nothing() -> None:
    bench = bench_of("batch-norm")
    start = bench.starts()
    before, cohort = start.clone(), bench.cohort()
    cohort.evaluate(start)
    cohort.features(start)
    cohort.prototypes(start)
    cohort.gradient_norms(start)
    cohort.sample_gradients(start)
    cohort.loss(start)
    assert torch.equal(start, before)


def test_a_client_without_samples_has_no_accuracy_and_no_prototypes() -> None:
    bench = bench_of("chain", test=[[0, 1], [], [2], [3]])
    scores = bench.cohort().evaluate(bench.starts())
    assert scores.accuracy.isnan().tolist() == [False, True, False, False]
    with pytest.raises(DataError, match="'client-0' has no validation samples"):
        bench.cohort([0]).prototypes(bench.starts()[:1], "validation")


# ---------------------------------------------------------------- what clients keep


def keeping() -> Bench:
    keeps = {"own": Keep("row"), "top": Keep("head"), "mask": Keep("model", "zeros", torch.bool), "count": Keep((2,))}
    return bench_of("chain", keeps=keeps)


def test_kept_tensors_start_as_the_common_model_or_as_zeros() -> None:
    bench = keeping()
    cohort = bench.cohort()
    assert torch.equal(cohort["own"], bench.initial.expand(4, -1))
    assert torch.equal(cohort["top"], bench.layout.head(bench.initial).expand(4, -1))
    assert cohort["mask"].dtype == torch.bool
    assert not cohort["mask"].any()
    assert torch.equal(cohort["count"], torch.zeros(4, 2))


def test_kept_tensors_stay_with_their_client() -> None:
    bench = keeping()
    bench.cohort([1, 3])["count"] = torch.tensor([[1.0, 1.0], [3.0, 3.0]])
    assert bench.cohort()["count"][:, 0].tolist() == [0, 1, 0, 3]
    assert bench.cohort([3, 2], round=5)["count"][:, 0].tolist() == [3, 0]


def test_what_is_read_is_a_copy() -> None:
    bench = keeping()
    for _ in range(2):  # before and after the first write
        bench.cohort()["count"].add_(1)
        assert not bench.cohort()["count"].any()
        bench.cohort()["count"] = torch.zeros(4, 2)


def test_undeclared_names_and_wrong_shapes_are_refused() -> None:
    cohort = keeping().cohort()
    with pytest.raises(UsageError, match="declare 'counts' in its `keeps`"):
        cohort["counts"]
    with pytest.raises(UsageError, match=r"shape \(2,\) per client, got \(4, 3\)"):
        cohort["count"] = torch.zeros(4, 3)


def test_rows_are_put_together_from_parts() -> None:
    bench = keeping()
    layout, cohort = bench.layout, bench.cohort([0, 1])
    heads = torch.stack([torch.full((layout.size("head"),), float(k)) for k in range(2)])
    rows = cohort.rows(body=torch.full((layout.size("body"),), 9.0), head=heads)
    assert (cohort.body(rows) == 9).all()
    assert torch.equal(cohort.head(rows), heads)
    assert torch.equal(cohort.head(cohort.rows(body=torch.zeros(layout.size("body"))))[0], layout.head(bench.initial))
