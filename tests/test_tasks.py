"""Tasks: each loss against a plain PyTorch loop, each metric against an oracle, and what happens where one cannot be
computed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conformance import every_method
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import OPTIMISERS, Bench, distance
from sklearn import metrics as oracle
from torch import Tensor, nn

import fedkin as fk
from fedkin.config import make_config
from fedkin.data import from_arrays, from_folder
from fedkin.data.targets import IGNORED, read_targets
from fedkin.errors import DataError, UsageError
from fedkin.rounds import prepare
from fedkin.runs.catalogue import Catalogue
from fedkin.tasks import TASKS, Task, make_task, scores, task_for

CLOSE = 1e-4
WAYS = [("each", True), ("each", False), ("threads", True), ("batched", False)]
RAGGED = (9, 1, 4, 6)  # batch 4: two full and a rest of one; a single sample; exactly one batch; a rest of two
rng = np.random.default_rng(0)


class Tabular(nn.Module):
    """A chain that the hand-written tape knows."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.ReLU())
        self.head = nn.Linear(8, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


class Language(nn.Module):
    """A score for each of seven tokens at every position."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.mix = nn.GRU(6, 8, batch_first=True)
        self.head = nn.Linear(8, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mix(self.embed(x))[0])


def cox_by_hand(output: Tensor, y: Tensor) -> Tensor:
    """The definition, sample by sample."""
    total = 0 * output.sum()
    for i in range(len(y)):
        if y[i, 1] == 1:
            at_risk = torch.stack([output[j, 0] for j in range(len(y)) if y[j, 0] >= y[i, 0]])
            total = total + torch.logsumexp(at_risk, 0) - output[i, 0]
    return total / len(y)


def targets_for(kind: str, n: int) -> np.ndarray:
    draw = np.random.default_rng(n)
    if kind == "classes":
        return draw.integers(0, 3, n)
    if kind == "labels":
        return draw.integers(0, 2, (n, 3)).astype(np.float32)
    if kind == "numbers":
        return draw.standard_normal((n, 3)).astype(np.float32)
    return np.stack([draw.exponential(1, n), draw.integers(0, 2, n)], 1).astype(np.float32)


LOSSES: dict[str, tuple[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "classification:weights=1+2+5": (
        "classes",
        lambda out, y: F.cross_entropy(out, y, weight=torch.tensor([1.0, 2.0, 5.0])),
    ),
    "regression": ("numbers", F.mse_loss),
    "regression:loss=mae": ("numbers", F.l1_loss),
    "regression:loss=huber": ("numbers", F.huber_loss),
    "multi-label": ("labels", F.binary_cross_entropy_with_logits),
    "multi-label:positive=1+2+3": (
        "labels",
        lambda out, y: F.binary_cross_entropy_with_logits(out, y, pos_weight=torch.tensor([1.0, 2.0, 3.0])),
    ),
    "survival": ("survival", cox_by_hand),
}


def bench_of(spec: str, way: str, tape: bool, name: str = "sgd") -> Bench:
    task, n = make_task(spec), sum(RAGGED)
    torch.manual_seed(1)
    x = np.random.default_rng(3).standard_normal((n, 5)).astype(np.float32)
    outputs = 1 if task.targets == "survival" else 3
    how = {"way": way, "tape": tape, "opt": OPTIMISERS[name], "epochs": 2}
    return Bench(Tabular(outputs), x, targets_for(task.targets, n), RAGGED, classes=3, task=task, **how)


@pytest.mark.parametrize(("way", "tape"), WAYS)
@pytest.mark.parametrize("spec", LOSSES)
def test_clients_train_as_in_the_plain_loop(spec: str, way: str, tape: bool) -> None:
    bench, (_, loss) = bench_of(spec, way, tape), LOSSES[spec]
    start = bench.starts()
    plain = [lambda features, out, y: loss(out, y)] * len(RAGGED)
    # the single sample of the second client has nobody else at risk: its loss is none, and it does not move
    some = [0, 2, 3] if spec == "survival" else [0, 1, 2, 3]
    found, expected = bench.cohort().fit(start), bench.reference(start, losses=plain)
    assert distance(found[some], expected[some], start[some]) < CLOSE
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("name", OPTIMISERS)
def test_every_optimiser_takes_numbers(name: str) -> None:
    bench = bench_of("regression", "batched", False, name)
    start = bench.starts()
    expected = bench.reference(start, losses=[lambda _, out, y: F.mse_loss(out, y)] * len(RAGGED))
    assert distance(bench.cohort().fit(start), expected, start) < CLOSE


@pytest.mark.parametrize("way", ["each", "batched"])
def test_tokens_are_averaged_over_the_positions_that_count(way: str) -> None:
    torch.manual_seed(0)
    n, draw = sum(RAGGED), np.random.default_rng(1)
    x, y = draw.integers(0, 7, (n, 6)), draw.integers(0, 7, (n, 6))
    y[:, 4:][draw.random((n, 2)) < 0.5] = IGNORED
    bench = Bench(Language(), x, y, RAGGED, classes=1, task=make_task("next-token"), way=way, epochs=2)
    start = bench.starts()

    def loss(features: Tensor, out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out.flatten(0, 1), y.flatten())

    expected = bench.reference(start, losses=[loss] * len(RAGGED))
    assert distance(bench.cohort().fit(start), expected, start) < CLOSE
    assert bench.site.forward.together


@pytest.mark.parametrize("way", ["each", "batched"])
def test_a_loss_of_ones_own_is_taken_as_it_is_written(way: str) -> None:
    own = fk.task(lambda out, y: F.smooth_l1_loss(out, y, beta=0.3), {"mae": lambda out, y: (out - y).abs().mean()})
    n = sum(RAGGED)
    torch.manual_seed(1)
    x = np.random.default_rng(3).standard_normal((n, 5)).astype(np.float32)
    bench = Bench(Tabular(3), x, targets_for("numbers", n), RAGGED, classes=1, task=own, way=way)
    start = bench.starts()
    expected = bench.reference(start, losses=[lambda _, out, y: F.smooth_l1_loss(out, y, beta=0.3)] * len(RAGGED))
    assert distance(bench.cohort().fit(start), expected, start) < CLOSE


def test_balanced_weights_are_those_of_each_clients_own_classes() -> None:
    bench = bench_of("classification:weights=balanced", "batched", False)
    start, expected = bench.starts(), []
    for k, part in enumerate(bench.parts):
        counts = torch.bincount(bench.source.y[torch.from_numpy(part)], minlength=3).float()
        weight = counts.sum() / ((counts > 0).sum() * counts.clamp(min=1)) * (counts > 0)
        loss = [lambda _, out, y, w=weight: F.cross_entropy(out, y, weight=w)] * len(RAGGED)
        expected.append(bench.reference(start, losses=loss)[k])
    assert distance(bench.cohort().fit(start), torch.stack(expected), start) < CLOSE


def test_without_weights_classification_is_the_plain_loss() -> None:
    plain, default = bench_of("classification:weights=none", "each", True), bench_of("classification", "each", True)
    start = plain.starts()
    assert torch.equal(plain.cohort().fit(start), default.cohort().fit(start))


# ---------------------------------------------------------------- metrics


def values(spec: str, outputs: np.ndarray, y: np.ndarray) -> dict[str, float]:
    task = make_task(spec)
    out, known = torch.from_numpy(outputs), torch.from_numpy(y)
    return {name: m.of(task.keep(out, known), known) for name, m in task.metrics.items()}


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 7))
def test_metrics_of_classes_are_those_of_scikit_learn(seed: int, classes: int) -> None:
    draw = np.random.default_rng(seed)
    logits, y = draw.standard_normal((60, classes)), draw.integers(0, classes, 60)
    logits = logits.round(1) if classes == 2 else logits  # ties
    y[:classes] = np.arange(classes)  # all are there
    found, best = values("classification", logits, y), logits.argmax(1)
    assert found["accuracy"] == pytest.approx(100 * oracle.accuracy_score(y, best))
    assert found["macro-f1"] == pytest.approx(100 * oracle.f1_score(y, best, average="macro"))
    assert found["balanced-accuracy"] == pytest.approx(100 * oracle.balanced_accuracy_score(y, best))
    share = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    if classes == 2:
        assert found["auc"] == pytest.approx(oracle.roc_auc_score(y, logits[:, 1] - logits[:, 0]), abs=1e-9)
    else:
        assert found["auc"] == pytest.approx(oracle.roc_auc_score(y, share, multi_class="ovr"), abs=1e-9)
    if classes > 5:
        top = oracle.top_k_accuracy_score(y, logits + 1e-9 * draw.random(logits.shape), k=5)
        assert found["top5"] == pytest.approx(100 * top, abs=5)  # ties go either way
    else:
        assert math.isnan(found["top5"])


def test_the_calibration_error_is_what_its_definition_says() -> None:
    draw = np.random.default_rng(0)
    logits, y = 2 * draw.standard_normal((200, 4)), draw.integers(0, 4, 200)
    share = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    confidence, right = share.max(1), share.argmax(1) == y
    total = 0.0
    for b in range(15):
        here = (confidence > b / 15) & (confidence <= (b + 1) / 15)
        if here.any():
            total += here.mean() * abs(right[here].mean() - confidence[here].mean())
    assert values("classification", logits, y)["ece"] == pytest.approx(100 * total)


def test_metrics_of_several_labels_are_those_of_scikit_learn() -> None:
    draw = np.random.default_rng(0)
    logits, y = draw.standard_normal((80, 4)), draw.integers(0, 2, (80, 4))
    found, best = values("multi-label", logits, y.astype(np.float32)), (logits > 0).astype(int)
    assert found["f1"] == pytest.approx(100 * oracle.f1_score(y, best, average="micro"))
    assert found["macro-f1"] == pytest.approx(100 * oracle.f1_score(y, best, average="macro"))
    assert found["auc"] == pytest.approx(oracle.roc_auc_score(y, logits, average="macro"))
    assert found["exact"] == pytest.approx(100 * oracle.accuracy_score(y, best))
    assert found["label-accuracy"] == pytest.approx(100 * (y == best).mean())


def test_metrics_of_numbers_are_those_of_scikit_learn() -> None:
    draw = np.random.default_rng(0)
    outputs, y = draw.standard_normal((50, 2)), draw.standard_normal((50, 2))
    found = values("regression", outputs, y)
    assert found["mse"] == pytest.approx(oracle.mean_squared_error(y, outputs))
    assert found["rmse"] == pytest.approx(math.sqrt(oracle.mean_squared_error(y, outputs)))
    assert found["mae"] == pytest.approx(oracle.mean_absolute_error(y, outputs))
    assert found["r2"] == pytest.approx(oracle.r2_score(y, outputs))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000))
def test_concordance_is_the_share_of_pairs_in_order(seed: int) -> None:
    draw = np.random.default_rng(seed)
    risk, time = draw.integers(0, 6, 20).astype(float), draw.integers(1, 8, 20).astype(float)
    event = draw.integers(0, 2, 20)
    agree = pairs = 0.0
    for i in range(20):
        for j in range(20):
            if event[i] and (time[i] < time[j] or (time[i] == time[j] and not event[j])):
                pairs += 1
                agree += 1.0 if risk[i] > risk[j] else 0.5 if risk[i] == risk[j] else 0.0
    found = scores.concordance(*(torch.from_numpy(v) for v in (risk, time, event)))
    assert math.isnan(found) if not pairs else found == pytest.approx(agree / pairs)


def test_concordance_in_pieces_is_that_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(0)
    columns = [torch.from_numpy(v) for v in (draw.random(50), draw.exponential(1, 50), draw.integers(0, 2, 50))]
    whole = scores.concordance(*columns)
    monkeypatch.setattr(scores, "PAIRS", 7)
    assert scores.concordance(*columns) == pytest.approx(whole)


def test_perplexity_and_accuracy_are_over_positions_that_count() -> None:
    draw = np.random.default_rng(0)
    logits, y = draw.standard_normal((8, 5, 6)), draw.integers(0, 6, (8, 5))
    y[2, 3:] = IGNORED
    found, out, known = values("next-token", logits, y), torch.from_numpy(logits), torch.from_numpy(y)
    assert found["perplexity"] == pytest.approx(float(F.cross_entropy(out.flatten(0, 1), known.flatten()).exp()))
    counts = y != IGNORED
    assert found["accuracy"] == pytest.approx(100 * (logits.argmax(2) == y)[counts].mean())


# ---------------------------------------------------------------- runs


def test_a_test_loss_is_over_positions_whatever_the_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of 4 samples, of which the later ones have fewer positions that count."""
    x, y = rng.integers(0, 7, (10, 6)), rng.integers(0, 7, (10, 6))
    y[4:, 1:] = IGNORED
    data, settings = [({"x": x}, y, {"x": x}, y)], {"rounds": 1, "epochs": 1, "device": "cpu", "model": Language}
    whole = fk.run("local", clients=data, task="next-token", **settings).history[-1].test_loss
    monkeypatch.setattr("fedkin.core.evaluation.EVALUATE", 4)
    assert fk.run("local", clients=data, task="next-token", **settings).history[-1].test_loss == pytest.approx(whole)


@pytest.mark.parametrize("metrics", [None, "macro-f1"])
def test_outputs_beyond_the_classes_are_not_predicted(metrics: str | None) -> None:
    """Accuracy counts what `predict` says."""
    network = Tabular(5)
    with torch.no_grad():
        network.head.bias[3:] = 100.0
    x, y = rng.normal(size=(30, 5)).astype(np.float32), np.arange(30) % 3
    settings: dict = {"rounds": 1, "epochs": 1, "lr": 1e-9, "device": "cpu", "init": "given", "metrics": metrics}
    result = fk.run("local", clients=[(x, y, x, y)], model=network, **settings)
    assert result.accuracy.macro == pytest.approx(100 * float((result.predict(x, 0) == y).mean()))
    assert result.accuracy.macro > 0


def test_survival_of_single_samples_is_refused() -> None:
    with pytest.raises(UsageError, match=r"batch=1: the task survival compares the samples"):
        prepare(
            make_config({"data": "heart", "task": "survival", "batch": 1}),
            data=from_arrays([(rng.normal(size=(8, 5)), np.stack([np.arange(8), np.ones(8)], 1))], targets="survival"),
            model=Tabular(1),
        )


def numbers_of(i: int, n: int = 24) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(i)
    x = draw.standard_normal((n, 5)).astype(np.float32)
    return x, x[:, 0] * 2 + i * 0.1


QUICK = {"rounds": 3, "epochs": 2, "lr": 0.05, "batch": 8, "device": "cpu"}
LINEAR = {"model": Tabular(1), **QUICK}
CLIENTS = [numbers_of(i) for i in range(4)]


def test_a_regression_learns_and_says_what_its_numbers_are() -> None:
    result = fk.run("fedavg", clients=CLIENTS, task="regression", **LINEAR)
    assert (result.score.metric, result.score.unit, result.score.higher) == ("mse", "", False)
    assert result.score.micro < result.history[0].accuracy.micro < 5
    assert result.score.worst_decile >= result.score.macro  # the worst have the largest errors
    assert result.best.accuracy.micro == min(r.accuracy.micro for r in result.history)
    assert set(result.history[-1].metrics) == {"rmse", "mae", "r2"}
    one = result.per_client[0]
    assert result.predict(CLIENTS[0][0][:4], client=0).shape == (4,)
    assert one.metrics["rmse"] == pytest.approx(math.sqrt(one.accuracy), rel=1e-5)
    told = result.to_dict()
    assert told["accuracy"]["metric"] == "mse"
    assert told["history"][0]["metrics"].keys() == {"rmse", "mae", "r2"}


@pytest.mark.parametrize("name", every_method())
def test_every_method_learns_numbers_or_says_why_not(name: str) -> None:
    refused = {"c-pfl": "between 0 and 1", "fedpkda": "prototype of each class", "pfedcs": "class scores of a teacher"}
    if name in refused:
        with pytest.raises(UsageError, match=refused[name]):
            fk.run(name, clients=CLIENTS, task="regression", **LINEAR)
        return
    result = fk.run(name, clients=CLIENTS, task="regression", **{**LINEAR, "lr": 0.02})
    assert math.isfinite(result.score.macro)
    assert result.diverged is None
    assert not result.failures


@pytest.mark.parametrize("name", ["fedavg", "fedper", "ditto", "fedcap", "co-pfl", "c-pfl", "fedbabu", "fedrep"])
def test_methods_learn_what_comes_next(name: str) -> None:
    texts = [(np.arange(24)[:, None] + np.arange(7)[None] + i) % 7 for i in range(4)]
    data = from_arrays([(t[:, :-1], t[:, 1:]) for t in texts], vocabulary=7, targets="tokens", validation_share=0.2)
    result = fk.run(name, data=data, model=Language, **{**QUICK, "rounds": 4, "lr": 0.01 if name == "co-pfl" else 0.5})
    assert result.score.metric == "accuracy"
    assert result.prepared.task == "next-token"
    assert result.score.macro > 100 / 7 + 5
    assert result.history[-1].metrics["perplexity"] < 7


def test_a_run_with_a_folder_keeps_the_metrics_and_goes_on(tmp_path: Path) -> None:
    how = {"clients": CLIENTS, "task": "regression", "checkpoint_every": 1, **LINEAR}
    result = fk.run("ditto", runs_dir=str(tmp_path), **how)
    assert result.run is not None
    folder = Catalogue(str(tmp_path)).locate(result.run)
    assert folder.info.metric.name == "mse"
    assert not folder.info.metric.higher
    assert folder.history()[-1]["metrics"]["mae"] == pytest.approx(result.history[-1].metrics["mae"])
    assert folder.per_client()[0]["metrics"]["r2"] == pytest.approx(result.per_client[0].metrics["r2"])
    again = fk.resume(result.run, model=Tabular(1), clients=CLIENTS)
    assert again.score == result.score
    assert again.history[-1].metrics == result.history[-1].metrics


def test_chunks_and_one_by_one_give_the_same_metrics() -> None:
    whole = fk.run("fedavg", clients=CLIENTS, task="regression", **LINEAR)
    pieces = fk.run("fedavg", clients=CLIENTS, task="regression", chunk=1, **LINEAR)
    assert pieces.score.macro == pytest.approx(whole.score.macro, rel=1e-5)


def test_extra_metrics_of_classes_leave_training_and_accuracy_alone() -> None:
    how = {"data": "digits", "clients": 5, "rounds": 2, "lr": 0.05, "model": "mlp", "epochs": 1, "seed": 3}
    plain, more = fk.run("fedper", **how), fk.run("fedper", metrics="all", **how)
    assert plain.accuracy == more.accuracy
    assert [c.correct for c in plain.per_client] == [c.correct for c in more.per_client]
    assert more.history[-1].test_loss == pytest.approx(plain.history[-1].test_loss, rel=1e-5)
    assert set(more.history[-1].metrics) == set(TASKS["classification"].metrics) - {"accuracy"}
    some = fk.run("fedper", metrics=["auc", "macro-f1"], **how)
    assert list(some.history[-1].metrics) == ["auc", "macro-f1"]


def test_a_metric_that_cannot_be_computed_is_named_and_left_out() -> None:
    one_class = [(np.random.default_rng(i).standard_normal((12, 5)).astype(np.float32), [i % 2] * 12) for i in range(3)]
    mixed = (np.random.default_rng(9).standard_normal((12, 5)).astype(np.float32), [0, 1] * 6)
    result = fk.run("fedavg", clients=[*one_class, mixed], metrics="auc", **{**QUICK, "model": Tabular(2)})
    assert [math.isnan(c.metrics["auc"]) for c in result.per_client] == [True, True, True, False]
    assert result.history[-1].metrics["auc"] == result.per_client[3].metrics["auc"]
    assert any("auc cannot be computed for 3 of 4 clients (client-0, ...)" in r for r in result.remarks)
    assert any("samples of two classes" in r for r in result.remarks)


def test_a_main_metric_that_cannot_be_computed_leaves_its_client_out() -> None:
    def site(i: int, events: bool) -> tuple[np.ndarray, np.ndarray]:
        draw = np.random.default_rng(i)
        x = draw.standard_normal((20, 5)).astype(np.float32)
        return x, np.stack([draw.exponential(np.exp(-x[:, 0])), np.full(20, float(events))], 1)

    result = fk.run("fedavg", clients=[site(0, True), site(1, True), site(2, False)], task="survival", **LINEAR)
    assert math.isnan(result.per_client[2].accuracy)
    known = [c.accuracy for c in result.per_client[:2]]
    assert result.score.macro == pytest.approx(np.mean(known))
    assert any("concordance cannot be computed for 1 of 3 clients (client-2)" in r for r in result.remarks)


def test_numbers_that_break_are_told_and_not_left_out() -> None:
    result = fk.run("local", clients=CLIENTS, task="regression", **{**LINEAR, "lr": 1e6, "rounds": 4})
    assert result.diverged is not None


def test_a_model_whose_outputs_broke_has_the_worst_score() -> None:
    bench = bench_of("regression", "each", True)
    rows = bench.starts()
    rows[1] = torch.nan
    found = bench.cohort().evaluate(rows, "train")
    assert found.correct[1].item() == math.inf  # not left out
    assert found.count[:, 0].tolist() == list(RAGGED)


def test_survival_finds_who_is_at_risk() -> None:
    def site(i: int) -> tuple[np.ndarray, np.ndarray]:
        draw = np.random.default_rng(i)
        x = draw.standard_normal((60, 5)).astype(np.float32)
        time, seen = draw.exponential(np.exp(-2 * x[:, 0])), draw.exponential(2.0, 60)
        return x, np.stack([np.minimum(time, seen), time <= seen], 1)

    result = fk.run(
        "fedavg",
        clients=[site(i) for i in range(4)],
        task="survival",
        **{**LINEAR, "batch": 16, "lr": 0.3, "rounds": 6},
    )
    assert result.score.metric == "concordance"
    assert result.score.macro > 0.7
    assert result.predict(site(0)[0][:3], client=0).shape == (3,)


def test_several_labels_are_learnt() -> None:
    def site(i: int) -> tuple[np.ndarray, np.ndarray]:
        x = np.random.default_rng(i).standard_normal((60, 5)).astype(np.float32)
        return x, x[:, :3] > 0.5

    how = {**QUICK, "rounds": 8, "lr": 0.3, "model": Tabular(3)}
    result = fk.run("ditto", clients=[site(i) for i in range(3)], task="multi-label:positive=balanced", **how)
    assert result.score.metric == "f1"
    assert result.score.macro > 70
    assert set(np.unique(result.predict(site(0)[0], client=0))) <= {0, 1}


# ---------------------------------------------------------------- what is refused, and how


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        ("numbers", [1.0, np.nan], "target of sample 1 is missing"),
        ("numbers", np.zeros((2, 2, 2)), r"numbers are \[n\] or \[n, d\]"),
        ("numbers", ["a", "b"], "cannot be used: give numbers"),
        ("labels", [[0, 1], [2, 0]], "label 0 of sample 1 is 2"),
        ("labels", [[0, np.nan]], "labels are 0 or 1"),
        ("tokens", [1, 2], r"tokens are \[n, length\]"),
        ("tokens", [[1.5, 2]], "no whole number"),
        ("tokens", [[1, -3]], "token -3"),
        ("tokens", [[IGNORED, IGNORED]], "no position of sample 0 counts"),
        ("survival", [[1.0, 2.0]], "event 2"),
        ("survival", [1.0, 2.0], "time and the event"),
        ("survival", [[-1.0, 1.0]], "time -1"),
        ("numbers", [[1.0], [1.0, 2.0]], "one"),
    ],
)
def test_odd_targets_are_refused_with_their_place(kind: str, given: object, said: str) -> None:
    with pytest.raises(DataError, match=said):
        read_targets(kind, given, "here")  # type: ignore[arg-type]


def test_clients_whose_targets_differ_are_named() -> None:
    wide = (CLIENTS[1][0], np.zeros((24, 2)))
    with pytest.raises(DataError, match="client 'client-0' has targets of shape"):
        fk.run("fedavg", clients=[CLIENTS[0], wide], task="regression", **LINEAR)
    gap = [np.nan if i == 3 else 1.0 for i in range(24)]
    with pytest.raises(DataError, match="client 'b': the target of sample 3"):
        fk.run("fedavg", clients={"a": CLIENTS[0], "b": (CLIENTS[1][0], gap)}, task="regression", **LINEAR)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"task": "regresion"}, "did you mean 'regression'"),
        ({"task": "regression:loss=rmse"}, "accepts"),
        ({"task": 3}, "task=3"),
        ({"task": "regression", "metrics": "aucc"}, "metric of the task regression"),
        ({"task": "regression", "model": Tabular(2)}, "gives 2 outputs, the task regression needs 1"),
        ({"task": "regression", "attack": "lf"}, "changes class labels"),
        ({"task": "next-token"}, "tokens are"),
        ({}, "is not a class .* labels are whole numbers or names"),
    ],
)
def test_what_does_not_fit_a_task_is_refused(settings: dict, said: str) -> None:
    with pytest.raises((UsageError, DataError), match=said):
        fk.run("fedavg", clients=CLIENTS, **{**LINEAR, **settings})


def test_data_of_other_targets_are_refused_by_a_task_and_by_partitions() -> None:
    with pytest.raises(UsageError, match="the task regression needs targets that are one number"):
        fk.run("fedavg", data="digits", task="regression", rounds=1)
    x, y = (np.concatenate(part) for part in zip(*CLIENTS, strict=True))
    data = fk.data.Dataset("mine", x, y[:, None].astype(np.float32), 1, targets="numbers")
    with pytest.raises(UsageError, match=r"partition dirichlet:0\.5 goes by the class of each sample"):
        fk.run("fedavg", data=data, partition="dirichlet:0.5", **LINEAR)
    assert fk.run("fedavg", data=data, clients=4, partition="iid", **LINEAR).score.metric == "mse"


def test_a_loss_that_cannot_be_taken_is_refused_with_its_shapes() -> None:
    whole = fk.task(lambda out, y: (out - y).abs(), {"mae": lambda out, y: (out - y).abs().mean()})
    pairs, how = [(x, np.stack([y, y], 1)) for x, y in CLIENTS], {**LINEAR, "model": Tabular(2)}
    with pytest.raises(UsageError, match="it must give one number"):
        fk.run("fedavg", clients=pairs, task=whole, **how)
    with pytest.raises(UsageError, match="at least one"):
        fk.task(F.mse_loss, {})
    with pytest.raises(UsageError, match="targets='number'"):
        fk.task(F.mse_loss, {"mse": F.mse_loss}, targets="number")


def test_weights_that_are_no_numbers_are_refused() -> None:
    job = prepare(make_config({"data": "digits", "task": "classification:weights=1+2", "rounds": 1, "clients": 5}))
    with pytest.raises(UsageError, match="10 positive numbers"):
        job.advance()


def test_tables_have_targets_in_columns_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("age,time,event,size\n1,3.5,1,2\n2,1.0,0,4\n3,2.0,1,1\n")
    dataset, _ = from_folder(tmp_path, targets="survival")
    assert dataset.columns == ("age", "size")
    assert dataset.y.tolist() == [[3.5, 1.0], [1.0, 0.0], [2.0, 1.0]]
    (tmp_path / "a.csv").write_text("label_cat,x,label_dog\n1,3.5,0\n0,1.0,1\n")
    dataset, _ = from_folder(tmp_path, targets="labels")
    assert (dataset.columns, dataset.classes) == (("x",), 2)
    (tmp_path / "a.csv").write_text("label,x\n1.5,3.5\n,1.0\n")
    with pytest.raises(DataError, match="row 3"):
        from_folder(tmp_path, targets="numbers")
    with pytest.raises(DataError, match="expected a column 'time'"):
        from_folder(tmp_path, targets="survival")


# ---------------------------------------------------------------- a task of a plugin


def test_every_registered_task_keeps_its_promises() -> None:
    for name in TASKS:
        task = make_task(name)
        assert isinstance(task, Task)
        assert task.name == name
        assert task.main in task.metrics
        assert set(task.extra) <= set(task.metrics)
        assert task.about
        assert task_for(task.targets).targets == task.targets
        assert all(key == metric.name for key, metric in task.metrics.items())
