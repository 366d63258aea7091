"""PFedCS: clusterings against scikit-learn, weights against a plain loop, rounds against written-out ones."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from reference import Bench, numbers, train_client
from sklearn.cluster import AgglomerativeClustering, KMeans
from sklearn.mixture import GaussianMixture
from torch import Tensor, nn

from fedkin.config import make_config
from fedkin.core.federation import Answer
from fedkin.data import Dataset, Split
from fedkin.errors import UsageError
from fedkin.methods.pfedcs import PFedCS, PFedCSOptions, collaborators, mixing, mixture
from fedkin.rounds import Job, prepare

# ---------------------------------------------------------------- rows of distances


def uniform(rng: np.random.Generator, rows: int, n: int) -> np.ndarray:
    return rng.random((rows, n))


def two_groups(rng: np.random.Generator, rows: int, n: int) -> np.ndarray:
    near = max(2, n // 5)
    return np.concatenate([rng.normal(0.3, 0.03, (rows, near)), rng.normal(0.9, 0.05, (rows, n - near))], 1)


def overlapping(rng: np.random.Generator, rows: int, n: int) -> np.ndarray:
    near = max(2, n // 5)
    return np.concatenate([rng.normal(0.6, 0.08, (rows, near)), rng.normal(0.85, 0.06, (rows, n - near))], 1)


def blocks(rng: np.random.Generator, rows: int, n: int) -> np.ndarray:
    """Distances between heads that come in groups of four."""
    centres = np.repeat(rng.standard_normal((n // 4 + 1, 64)), 4, 0)[: n + 1]
    heads = centres + 0.3 * rng.standard_normal((n + 1, 64))
    raw = np.square(heads[:, None] - heads).sum(-1)
    return raw[~np.eye(n + 1, dtype=bool)].reshape(n + 1, n)[:rows]


def rows_of(kind: Any, rows: int, n: int, seed: int = 0) -> np.ndarray:
    values = np.abs(kind(np.random.default_rng(seed), rows, n))
    return values / values.max(1, keepdims=True)


def by_sklearn(values: np.ndarray, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Who is in the lower component, and the mean log-likelihood."""
    lower, bound = [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for row in values:
            mix = GaussianMixture(2, covariance_type="full", n_init=5, reg_covar=1e-6, random_state=seed)
            labels = mix.fit_predict(row[:, None])
            lower.append(labels == mix.means_[:, 0].argmin())
            bound.append(mix.lower_bound_)
    return np.array(lower), np.array(bound)


def alike(a: np.ndarray, b: np.ndarray) -> float:
    """Share of rows with the same labels throughout."""
    return float((a == b).all(1).mean())


@pytest.mark.parametrize("n", [9, 19, 49])
@pytest.mark.parametrize("kind", [two_groups, blocks])
def test_mixture_labels_are_sklearns_where_there_is_structure(kind: Any, n: int) -> None:
    values = rows_of(kind, 20, n)
    assert alike(mixture.gaussian_mixture(values), by_sklearn(values)[0]) == 1


@pytest.mark.parametrize("kind", [uniform, overlapping])
def test_mixture_agrees_with_sklearn_as_sklearn_with_itself(kind: Any) -> None:
    """Without structure the likelihood has several tops, and five random restarts do not always find the same."""
    values = rows_of(kind, 40, 19)
    expected, other_seed = by_sklearn(values)[0], by_sklearn(values, 1)[0]
    assert alike(mixture.gaussian_mixture(values), expected) >= min(0.9, alike(other_seed, expected) - 0.05)


def test_a_fit_from_the_same_start_is_sklearns() -> None:
    """With n_init 1 and the same k-means split, labels and likelihood are the same number for number."""
    values = rows_of(uniform, 30, 19, seed=4)
    start = mixture.two_means(values)
    lower, reached = mixture.fit_mixtures(values, start)
    for row, first, mine, bound in zip(values, start, lower, reached, strict=True):
        x = row[:, None]
        means = np.array([[row[first].mean()], [row[~first].mean()]])
        precisions = np.array([[[1 / (row[g].var() + 1e-6)]] for g in (first, ~first)])
        mix = GaussianMixture(
            2, weights_init=[first.mean(), 1 - first.mean()], means_init=means, precisions_init=precisions
        )
        labels = mix.fit_predict(x)
        assert bound == pytest.approx(mix.lower_bound_, abs=1e-9)
        assert (mine == (labels == mix.means_[:, 0].argmin())).all()


def test_the_lower_component_is_the_one_with_the_smaller_mean() -> None:
    values = rows_of(uniform, 20, 19)
    start = mixture.two_means(values)
    assert (mixture.fit_mixtures(values, start)[0] == mixture.fit_mixtures(values, ~start)[0]).all()


def test_mixture_is_as_likely_as_the_best_of_sklearns_restarts() -> None:
    values = rows_of(overlapping, 40, 19, seed=2)
    bound = by_sklearn(values)[1]
    one_start = mixture.fit_mixtures(values, mixture.two_means(values))[1]
    assert (one_start >= bound - 1e-9).mean() < 0.9  # the best split alone is not enough
    assert (mixture.best_mixtures(values)[1] >= bound - 1e-9).mean() >= 0.95


def test_kmeans_and_hierarchy_are_sklearns() -> None:
    values = np.concatenate([rows_of(uniform, 25, 19), rows_of(overlapping, 25, 19)])
    for mine, row in zip(mixture.two_means(values), values, strict=True):
        labels = KMeans(2, n_init=20, random_state=0).fit_predict(row[:, None])
        assert (mine == (labels == labels[row.argmin()])).all()
    for mine, row in zip(mixture.hierarchy(values), values, strict=True):
        labels = AgglomerativeClustering(2).fit_predict(row[:, None])
        assert (mine == (labels == labels[row.argmin()])).all()


@pytest.mark.parametrize("how", ["gmm", "kmeans", "hierarchical"])
def test_degenerate_rows(how: Any) -> None:
    few = np.array([[0.1, 0.9, 1.0], [0.25, 0.625, 1.0]])
    assert mixture.lower_group(few, how).tolist() == [[True, False, False], [True, True, False]]
    rows = np.array([[0.5] * 6, [0.0] * 6, [0.2, 0.2, 1, 1, 1, 1], [0.1, 0.12, 0.11, 0.9, 1, 0.95]])
    lower = mixture.lower_group(rows, how)
    assert lower[:2].all()  # all the same: everybody
    assert lower[2].tolist() == [True, True, False, False, False, False]  # two values: at or below the mean
    assert lower[3].tolist() == [True, True, True, False, False, False]


def test_a_group_without_members_means_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    values = rows_of(uniform, 2, 9)
    for empty in (True, False):
        monkeypatch.setattr(mixture, "gaussian_mixture", lambda v, e=empty: np.full(v.shape, e))
        assert mixture.lower_group(values, "gmm").all()


def test_a_fixed_threshold_is_one_half() -> None:
    assert mixture.lower_group(np.array([[0.5, 0.51, 0.1, 1.0]]), "fixed").tolist() == [[True, False, True, False]]


# ---------------------------------------------------------------- distances, threshold, weights


def plain_distances(heads: np.ndarray) -> np.ndarray:
    raw = np.array([[np.square(a - b).sum() for b in heads] for a in heads])
    return raw / raw.max(1, keepdims=True)


def test_distances_are_the_plain_ones() -> None:
    heads = 5 + 0.01 * torch.randn(9, 40)
    heads[4] = heads[3]
    found = mixture.distances(heads)
    assert found == pytest.approx(plain_distances(heads.double().numpy()), abs=1e-5)
    assert found[3, 4] == pytest.approx(0, abs=1e-6)
    assert (np.diag(found) == 0).all()
    assert (found.max(1) == 1).all()
    assert not mixture.distances(torch.randn(40).expand(6, 40)).any()


def test_distances_survive_huge_heads() -> None:
    heads = torch.randn(5, 8)
    heads[2] = 3e38
    found = mixture.distances(heads)
    assert np.isfinite(found).all()
    assert (found[[0, 1, 3, 4], 2] == 1).all()


def plain_weights(d: np.ndarray, chosen: np.ndarray, n: np.ndarray, lam: float) -> np.ndarray:
    weights = np.zeros(d.shape)
    for k in range(len(d)):
        team = sorted({k, *np.nonzero(chosen[k])[0]})
        far, mean = max(d[k, j] for j in team), np.mean([d[k, j] for j in team])
        for i in team:
            near = 1 / len(team) if far - mean < 1e-12 else (far - d[k, i]) / (len(team) * (far - mean))
            weights[k, i] = lam * near + (1 - lam) * n[i] / sum(n[j] for j in team)
    return weights


@pytest.mark.parametrize("lam", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("literal", [False, True])
def test_weights_sum_to_one(lam: float, literal: bool) -> None:
    rng = np.random.default_rng(1)
    d = plain_distances(rng.standard_normal((12, 6)))
    chosen = (rng.random((12, 12)) < 0.3) & ~np.eye(12, dtype=bool)
    chosen[0], chosen[1] = False, np.arange(12) == 5  # nobody; a single one
    n = rng.integers(1, 90, 12).astype(float)
    weights = mixing(d, chosen, n, lam, literal)
    assert (weights >= 0).all()
    assert weights.sum(1) == pytest.approx(np.ones(12), abs=1e-12)
    assert (weights[~(chosen | np.eye(12, dtype=bool))] == 0).all()
    assert weights[0].tolist() == np.eye(12)[0].tolist()
    if not literal:
        assert weights == pytest.approx(plain_weights(d, chosen, n, lam), abs=1e-12)


def test_literal_weights() -> None:
    """Eq. 7 over the collaborators {1, 2} of client 0, its own weight by the same formula, then scaled."""
    d = np.zeros((3, 3))
    d[0] = [0, 0.2, 0.6]
    chosen = np.array([[0, 1, 1], [0, 0, 0], [0, 0, 0]], bool)
    p = np.array([0.5 * 0.6 / 0.4 + 0.5 * 30 / 30, 0.5 * 0.4 / 0.4 + 0.5 * 10 / 30, 0.5 * 20 / 30])
    found = mixing(d, chosen, np.array([30.0, 10, 20]), 0.5, True)
    assert found[0] == pytest.approx(p / p.sum())


def test_equal_distances_share_equally() -> None:
    d = np.zeros((4, 4))
    assert mixing(d, ~np.eye(4, dtype=bool), np.ones(4), 1.0, False) == pytest.approx(np.full((4, 4), 0.25))


def test_the_threshold_falls_from_the_mean_to_the_least() -> None:
    d = np.zeros((6, 6))
    d[0] = [0, 0.1, 0.2, 0.3, 0.4, 1.0]  # mean of the others 0.4, least 0.1
    expected = {0.0: [1, 2, 3, 4], 0.5: [1, 2], 0.99: [1]}
    for progress, members in expected.items():
        assert np.nonzero(collaborators(d, progress, "fixed")[0])[0].tolist() == members


def test_true_blocks_are_found_and_nothing_else() -> None:
    """Twenty heads in blocks of four: sets lie inside the blocks, and are the blocks while the threshold is loose."""
    rng = np.random.default_rng(0)
    heads = np.repeat(rng.standard_normal((5, 30)), 4, 0) + 0.05 * rng.standard_normal((20, 30))
    block = np.arange(20) // 4
    same = (block[:, None] == block) & ~np.eye(20, dtype=bool)
    d = mixture.distances(torch.from_numpy(heads).float())
    for how in ("gmm", "kmeans", "hierarchical"):
        assert (collaborators(d, 0.2, how) == same).all(), how
        late = collaborators(d, 0.999, how)
        assert not (late & ~same).any()
        assert late.any(1).all()


# ---------------------------------------------------------------- whole runs


def blocky(clients: int = 8, size: int = 24, seed: int = 0, classes: int = 4) -> tuple[Dataset, Split]:
    """Clients in blocks of four; each block has two classes of its own. The last class of five nobody has."""
    rng = np.random.default_rng(seed)
    block = np.arange(clients) // 4
    y = np.concatenate([rng.integers(0, 2, size) + 2 * b for b in block])
    centres = 1.5 * rng.standard_normal((classes + 1, 6))
    x = (centres[y] + 0.5 * rng.standard_normal((len(y), 6))).astype(np.float32)
    rows = np.arange(len(y)).reshape(clients, size)
    none = tuple(np.zeros(0, np.int64) for _ in range(clients))
    names = tuple(f"c{i}" for i in range(clients))
    split = Split(tuple(r[: size - 6] for r in rows), none, tuple(r[size - 6 :] for r in rows), names)
    return Dataset("toy", x, y.astype(np.int64), classes + 1), split


class Tiny(nn.Module):
    def __init__(self, bias: bool = True, classes: int = 5) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.ReLU())
        self.head = nn.Linear(8, classes, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def job_of(
    method: str = "pfedcs",
    data: Any = None,
    model: nn.Module | None = None,
    tamper: Any = None,
    options: dict[str, Any] | None = None,
    **config: Any,
) -> Job:
    settings = {
        "rounds": 4,
        "epochs": 1,
        "batch": 6,
        "lr": 0.1,
        "device": "cpu",
        "way": "each",
        "init": "given",
        **config,
    }
    torch.manual_seed(0)
    made = make_config({"method": method, **settings, "options": options or {}})
    return prepare(made, data=data or blocky(), model=model or Tiny(), tamper=tamper)


def after(job: Job, rounds: int) -> Tensor:
    for _ in range(rounds):
        job.advance()
    return job.rows()


def noted(job: Job, name: str) -> list[Any]:
    return [note.value for note in job.fed.notes if note.name == name]


@pytest.mark.parametrize("way", ["each", "batched"])
@pytest.mark.parametrize("beta", [0, 1])
def test_without_a_first_stage_it_is_fedper(beta: int, way: str) -> None:
    found = after(job_of(options={"beta": beta}, way=way, participation=0.6, drop=0.2), 3)
    assert torch.equal(found, after(job_of("fedper", way=way, participation=0.6, drop=0.2), 3))


def test_the_second_stage_is_fedper() -> None:
    """From round beta on nothing is compared, noted or kept; before, it is not FedPer."""
    job = job_of(options={"beta": 3})
    differs = after(job, 2)
    assert not torch.equal(differs, after(job_of("fedper"), 2))
    job.advance()
    assert [e.phase for e in job.fed.exchanges] == ["learn", "learn", "train"]
    assert len(noted(job, "collaborators")) == 2
    assert job.method.state()["heads"].numel() == 0


def test_bytes_are_those_of_the_message_table() -> None:
    job = job_of(options={"beta": 3}, participation=0.5)
    after(job, 3)
    body, head = job.site.layout.size("body"), job.site.layout.size("head")
    first, _, last = job.fed.exchanges
    assert (first.asked, first.bytes_down, first.bytes_up) == (4, 16 * (body + head), 16 * (body + head))
    assert (last.bytes_down, last.bytes_up) == (16 * body, 16 * body)


def test_the_first_round_averages_all() -> None:
    dataset, split = blocky()
    uneven = Split((split.train[0][:1], *split.train[1:]), split.validation, split.test, split.names)
    job = job_of(data=(dataset, uneven))
    job.advance()
    assert torch.allclose(noted(job, "collaborators")[0], torch.full((8, 8), 1 / 8))
    assert noted(job, "participants") == [list(range(8))]


@pytest.mark.parametrize("through", [False, True])
@pytest.mark.parametrize("rho", [0, 2])
def test_a_client_trains_as_written_out(rho: int, through: bool) -> None:
    """Eqs. 9-13 in plain PyTorch: tune the teacher under a fixed body, then learn from labels and from it."""
    torch.manual_seed(1)
    x, y = numbers(22, (6,), 5)
    bench = Bench(Tiny(), x, y, (9, 1, 12), classes=5, epochs=2, keeps=PFedCS.keeps)
    layout, start = bench.layout, bench.starts(0.3)
    client = bench.cohort(round=2, stream="learn")
    client["head"] = layout.head(start)
    body, teacher = layout.body(start[0]), layout.head(bench.starts(0.8)).flip(0)
    method = PFedCS(PFedCSOptions(rho=rho, teacher_lr=0.2, teacher_gradient=through))
    reply = method.learn(client, body=body, teacher=teacher)
    for k in range(3):
        tutor = bench.module(client.rows(body=body, head=teacher)[k])
        if rho:
            opt = type(bench.opt)(0.2)
            train_client(tutor, bench.batches(k, bench.plan(2, "learn", 1, rho)), opt, learn="head")
        weight, bias = tutor.head.weight.detach(), tutor.head.bias.detach()

        def loss(features: Tensor, logits: Tensor, labels: Tensor, w: Tensor = weight, b: Tensor = bias) -> Tensor:
            p = F.linear(features if through else features.detach(), w, b).softmax(1)
            kl = (p * (p.log() - logits.log_softmax(1))).sum(1).mean()
            return F.cross_entropy(logits, labels) + kl

        student = bench.module(client.rows(body=body, head=layout.head(start))[k])
        fits = 2 if rho else 1
        train_client(student, bench.batches(k, bench.plan(2, "learn", fits)), bench.opt, loss=loss)
        expected = layout.row(student)
        assert torch.allclose(reply["body"][k], layout.body(expected), atol=1e-5)
        assert torch.allclose(reply["head"][k], layout.head(expected), atol=1e-5)
        assert torch.equal(client["head"][k], reply["head"][k])


@pytest.mark.parametrize("selection", ["adaptive", "none", "all", "random"])
def test_teachers_are_mixed_from_last_rounds_heads(selection: str) -> None:
    sent: list[Tensor] = []

    def watch(ids: Any, phase: str, message: Any, answer: Answer, round: int) -> Answer:
        sent.append(message["teacher"].rows)
        return answer

    job = job_of(options={"selection": selection, "beta": 50}, tamper=watch)
    after(job, 3)
    heads = job.method.state()["heads"].clone()
    job.advance()
    weights = noted(job, "collaborators")[-1]
    assert torch.allclose(sent[-1], weights @ heads, atol=1e-6)
    assert torch.allclose(weights.sum(1), torch.ones(8))
    distance = mixture.distances(heads[:, :40])  # the weight [5, 8] without the bias
    own = np.eye(8, dtype=bool)
    chosen = {"none": ~own & own, "all": ~own, "adaptive": collaborators(distance, 4 / 50, "gmm")}.get(selection)
    if chosen is None:
        assert ((weights > 0).sum(1) <= 4).all()
        assert not torch.equal(weights > 0, noted(job, "collaborators")[-2] > 0)
        chosen = (weights.numpy() > 0) & ~own
    expected = mixing(distance, chosen, np.full(8, 18.0), 0.5, False)
    assert weights.numpy() == pytest.approx(expected, abs=1e-5)


def test_the_threshold_counts_rounds_from_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []

    def record(distance: np.ndarray, progress: float, clustering: Any) -> np.ndarray:
        seen.append(progress)
        return collaborators(distance, progress, clustering)

    monkeypatch.setattr("fedkin.methods.pfedcs.method.collaborators", record)
    after(job_of(options={"beta": 4}), 4)
    assert seen == [2 / 4, 3 / 4]  # in the first round all heads are the same, in the fourth nothing is compared


def test_random_collaborators_are_three_others() -> None:
    job = job_of(options={"selection": "random", "lam": 0.0})
    after(job, 2)
    for weights in noted(job, "collaborators"):
        assert ((weights > 0).sum(1) == 4).all()
        assert (weights.diagonal() > 0).all()


def test_collaborators_become_the_true_blocks() -> None:
    job = job_of(rounds=12, epochs=3, options={"beta": 40}, data=blocky(12, classes=6), model=Tiny(classes=7))
    after(job, 12)
    block = torch.arange(12) // 4
    last = noted(job, "collaborators")[-1] > 0
    assert not (last & (block[:, None] != block)).any()
    assert (last.sum(1) >= 2).all()


def test_the_bias_counts_only_when_asked() -> None:
    assert job_of().method.state()["compared"] == 40
    assert job_of(options={"bias": True}).method.state()["compared"] == 45


def test_stale_heads_join_only_when_asked() -> None:
    for use_stale in (False, True):
        job = job_of(participation=0.4, options={"use_stale": use_stale}, rounds=6)
        after(job, 5)
        pools, seen = noted(job, "participants"), set()
        for round, pool in enumerate(pools):
            job.fed.round = round
            cohort = set(job.fed.sample(0.4))
            assert set(pool) == (cohort | seen if use_stale else cohort)
            seen |= cohort
        assert [w.shape for w in noted(job, "collaborators")] == [(len(p), len(p)) for p in pools]


def test_independent_heads_differ_and_are_known_to_the_server() -> None:
    job = job_of(options={"independent_head_init": True, "beta": 50})
    job.advance()
    draw = job.fed.exchanges[0]
    assert (draw.phase, draw.bytes_down, draw.bytes_up) == ("draw_head", 0, 8 * 45 * 4)
    weights = noted(job, "collaborators")[0]
    assert not torch.allclose(weights, torch.full((8, 8), 1 / 8))
    again = job_of(options={"independent_head_init": True, "beta": 50}, chunk=3)
    assert torch.allclose(after(again, 1), job.rows(), atol=1e-5)


# ---------------------------------------------------------------- what goes wrong


def spoil(*bad: int) -> Any:
    def tamper(ids: Any, phase: str, message: Any, answer: Answer, round: int) -> Answer:
        rows = torch.from_numpy(np.isin(answer.ids, bad))
        for value in answer.replies.values():
            value[rows] = float("nan")
        return answer

    return tamper


def test_a_client_that_sends_nan_changes_nothing_on_the_server() -> None:
    job = job_of(tamper=spoil(2))
    rows = after(job, 3)
    state = job.method.state()
    assert torch.isfinite(rows).all()
    assert torch.equal(state["heads"][2], job.site.layout.head(job.site.initial))
    assert state["known"] == [0, 1, 3, 4, 5, 6, 7]
    assert len(job.fed.failures) == 3


@pytest.mark.parametrize("how", [{"tamper": spoil(*range(8))}, {"drop": 0.99}])
def test_nobody_answers(how: dict[str, Any]) -> None:
    job = job_of(options={"beta": 3}, **how)
    before = job.method.state()["body"].clone()
    after(job, 3)
    assert torch.equal(job.method.state()["body"], before)


@pytest.mark.parametrize("how", ["gmm", "kmeans", "hierarchical", "fixed"])
def test_partial_participation_with_drops(how: str) -> None:
    job = job_of(participation=0.6, drop=0.3, straggle=0.2, options={"clustering": how}, rounds=6)
    assert torch.isfinite(after(job, 6)).all()
    for weights in noted(job, "collaborators"):
        assert (weights >= 0).all()
        assert torch.allclose(weights.sum(1), torch.ones(len(weights)))


@pytest.mark.parametrize("clients", [1, 2])
@pytest.mark.parametrize("selection", ["adaptive", "random"])
def test_one_or_two_clients_one_sample(clients: int, selection: str) -> None:
    dataset, split = blocky(4)
    train = (split.train[0][:1], *split.train[1:clients])
    few = Split(train, split.validation[:clients], split.test[:clients], split.names[:clients])
    job = job_of(data=(dataset, few), options={"selection": selection})
    assert torch.isfinite(after(job, 3)).all()
    assert torch.allclose(noted(job, "collaborators")[-1].sum(1), torch.ones(clients))


def test_a_removed_client_teaches_nobody() -> None:
    job = job_of(options={"use_stale": True}, rounds=4)
    after(job, 2)
    job.fed.remove([3])
    job.advance()
    assert 3 not in noted(job, "participants")[-1]


def test_a_head_without_bias_and_a_head_that_is_not_linear() -> None:
    job = job_of(model=Tiny(bias=False))
    assert torch.isfinite(after(job, 2)).all()

    class Deep(Tiny):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Sequential(nn.ReLU(), nn.Linear(8, 5))

    for bias in (False, True):
        with pytest.raises(UsageError, match="linear"):
            job_of(model=Deep(), head="head", options={"bias": bias})
