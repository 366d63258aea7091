"""FedPKDA: its equations as oracles, its limits, its messages, and what its noise is worth."""

from __future__ import annotations

import copy
import math
import time
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from reference import train_client
from torch import Tensor, nn

from fedkin.compute.batches import plan
from fedkin.compute.optim import SGD
from fedkin.config import make_config
from fedkin.core.cohort import Cohort
from fedkin.core.federation import Answer, Masked
from fedkin.data import Dataset
from fedkin.data.split import Split
from fedkin.errors import UsageError
from fedkin.methods import METHODS, options_of
from fedkin.methods.fedpkda import prototypes
from fedkin.methods.fedpkda.prototypes import PrototypeOptions, global_prototypes, laplace, mahalanobis_weights, phase
from fedkin.rounds import Job, prepare

INPUT, WIDTH, CLASSES = 6, 8, 5
SIZES = (11, 1, 9, 14, 6, 8)  # one client with a single sample
HAS = ((0, 1, 3), (1,), (0, 1), (1, 3, 2), (0, 3), (0, 1, 3))  # nobody has class 4; one client has class 2
PLAIN: dict[str, Any] = {"noise": 0.0, "clip": math.inf}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(INPUT, WIDTH), nn.ReLU())
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


def toy(sizes: tuple[int, ...] = SIZES) -> tuple[Dataset, Split]:
    rng = np.random.default_rng(0)
    y = np.concatenate([[HAS[c][j % len(HAS[c])] for j in range(n)] for c, n in enumerate(sizes)]).astype(np.int64)
    x = (0.4 * (rng.standard_normal((len(y), INPUT)) + 0.5 * y[:, None])).astype(np.float32)
    edges = np.cumsum([0, *sizes])
    parts = tuple(np.arange(a, b) for a, b in pairwise(edges))
    none = tuple(p[:0] for p in parts)
    return Dataset("toy", x, y, CLASSES), Split(parts, none, parts, tuple(f"c{i}" for i in range(len(sizes))))


def job(
    options: dict[str, Any] | None = None,
    *,
    method: str = "fedpkda",
    sizes: tuple[int, ...] = SIZES,
    tamper: Any = None,
    **config: Any,
) -> Job:
    torch.manual_seed(1)
    values = {
        "method": method,
        "rounds": 4,
        "epochs": 2,
        "batch": 4,
        "lr": 0.05,
        "device": "cpu",
        "way": "each",
        "init": "given",
        "options": options or {},
        "clients": len(sizes),
        **config,
    }
    return prepare(make_config(values), model=Net(), data=toy(sizes), tamper=tamper)


def advanced(j: Job, rounds: int) -> Job:
    for _ in range(rounds):
        j.advance()
    return j


def cohort(j: Job, stream: str = "observe", ids: Any = None) -> Cohort:
    chosen = j.fed.all.ids if ids is None else np.array(ids, np.int64)
    return Cohort(j.site, chosen, j.fed.round, stream)


def network(j: Job, row: Tensor) -> nn.Module:
    return j.site.layout.load(copy.deepcopy(j.model), row)


def means(j: Job, rows: Tensor, clip: float = math.inf) -> tuple[Tensor, Tensor]:
    """Class means of features, the obvious way: [N, C, F] and which exist."""
    found, has = torch.zeros(len(rows), CLASSES, WIDTH), torch.zeros(len(rows), CLASSES, dtype=torch.bool)
    for k, row in enumerate(rows):
        part = torch.from_numpy(j.site.parts["train"][k])
        features, y = network(j, row).body(j.site.source.batch(part)).clamp(-clip, clip), j.site.source.labels(part)
        for c in y.unique().tolist():
            found[k, c], has[k, c] = features[y == c].mean(0).detach(), True
    return found, has


# ---------------------------------------------------------------- the phase function (eq. 10)


def test_phase_is_odd_increasing_and_has_the_papers_values() -> None:
    def literal(s: float) -> float:
        up, down = math.log(1 + math.exp(s)), math.log(1 + math.exp(-s))
        return (up - down) / (up + down)

    points = [0.01 * k for k in range(1, 600)]
    values = [phase(s) for s in points]
    assert phase(0.0) == 0.0
    assert all(a < b for a, b in pairwise(values))
    assert all(phase(-s) == -phase(s) for s in points)
    assert values == pytest.approx([literal(s) for s in points], rel=1e-12)
    assert [round(phase(s), 3) for s in (0.1, 0.5, 1.0, 2.5, 5.0)] == [0.072, 0.345, 0.615, 0.941, 0.997]


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        ("paper", (0.1 + 0.5 * (1 - phase(0.5)), 0.1 + 0.9 * phase(0.5))),
        ("official", (0.1 + 0.3 * (1 - phase(2.5)), 0.1 + 0.5 * phase(2.5))),
    ],
)
def test_pulls_at_half_time(profile: str, expected: tuple[float, float]) -> None:
    kind = METHODS["fedpkda"]
    method: Any = kind(options_of(kind, {"profile": profile}, "fedpkda"))
    assert method.pulls(0.5) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("profile", "expected"),
    [
        ("paper", [1 / 4, 2 / 4, 3 / 4, 1.0]),  # t is in (0, 1]
        ("official", [0.0, 1 / 4, 2 / 4, 3 / 4]),  # the authors' code divides the number of the epoch, from 0, by T
    ],
)
def test_progress_of_the_rounds(profile: str, expected: list[float]) -> None:
    seen: list[float] = []

    def listen(ids: Any, phase: str, message: Any, answer: Answer, round: int) -> Answer:
        seen.extend([message["progress"]] if phase == "train" else [])
        return answer

    advanced(job({"profile": profile}, tamper=listen), 4)
    assert seen == pytest.approx(expected)


# ---------------------------------------------------------------- Mahalanobis weights (eqs. 4-7)


def outlier(n: int, width: int) -> tuple[Tensor, Tensor]:
    rows = 0.24 * torch.randn(1, n, width, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    rows[0, 0] += 3
    return rows, torch.ones(1, n, dtype=torch.bool)


def direct(x: Tensor, sigma: Tensor) -> Tensor:
    """Weights by the full inverse, one prototype after another."""
    inverse = torch.linalg.inv(sigma + 1e-6 * torch.eye(x.shape[1], dtype=torch.float64))
    near = torch.stack([1 / ((d @ inverse @ d).sqrt() + 1e-6) for d in x - x.mean(0)])
    return near / near.sum()


@pytest.mark.parametrize(("n", "width"), [(3, 8), (9, 8), (20, 512)])
def test_literal_covariance_weighs_all_alike_with_few_prototypes(n: int, width: int) -> None:
    weights = mahalanobis_weights(*outlier(n, width), "full")
    assert float((weights * n - 1).abs().max()) < 1e-3  # not 0: Sigma has 1e-6 on its diagonal


@pytest.mark.parametrize("n", [10, 12, 60])
def test_small_solve_equals_the_direct_inverse(n: int) -> None:
    x, _ = outlier(n, 8)
    found = mahalanobis_weights(x, torch.ones(1, n, dtype=torch.bool), "full")[0]
    assert torch.allclose(found, direct(x[0], torch.cov(x[0].T)), rtol=1e-8, atol=0)
    assert float((found - 1 / n).abs().max()) > 1e-3


def test_a_diagonal_covariance_turns_a_gross_outlier_down() -> None:
    rows, has = outlier(20, 512)
    relative = {}
    for cov in ("full", "ledoit_wolf", "diag"):
        weights = mahalanobis_weights(rows, has, cov)[0]
        relative[cov] = float(weights[0] / weights[1:].mean())
        assert float(weights.sum()) == pytest.approx(1)
    assert relative["full"] == pytest.approx(1, abs=1e-4)
    assert relative["diag"] == pytest.approx(0.10, abs=0.01)
    assert 0.3 < relative["ledoit_wolf"] < 0.9
    expected = direct(rows[0], torch.diag(rows[0].var(0)))
    assert torch.allclose(mahalanobis_weights(rows, has, "diag")[0], expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize(("n", "width"), [(20, 6), (7, 30)])
def test_ledoit_wolf_is_that_of_scikit_learn(n: int, width: int) -> None:
    covariance = pytest.importorskip("sklearn.covariance")
    x, has = outlier(n, width)
    sigma = torch.from_numpy(covariance.ledoit_wolf(x[0].numpy())[0])
    assert torch.allclose(mahalanobis_weights(x, has, "ledoit_wolf")[0], direct(x[0], sigma), rtol=1e-8, atol=0)


@pytest.mark.parametrize("cov", ["full", "diag", "ledoit_wolf"])
@pytest.mark.parametrize("together", [1, 1 << 26])
def test_absent_prototypes_count_for_nothing(cov: Any, together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prototypes, "AT_ONCE", together)
    rows = torch.randn(12, 4, 3, generator=torch.Generator().manual_seed(0))
    present = torch.ones(12, 4, dtype=torch.bool)
    present[5:, 0], present[2:, 1], present[3:, 3] = False, False, False
    rows[~present] = float("nan")
    found, known, shares = global_prototypes(rows, present, cov)
    assert known.tolist() == [True, False, True, True]  # two prototypes are too few
    for row, share, c in zip(found, shares, (0, 2, 3), strict=True):
        x = rows[present[:, c], c].double()
        weights = mahalanobis_weights(x.unsqueeze(0), torch.ones(1, len(x), dtype=torch.bool), cov)[0]
        assert torch.allclose(row.double(), weights @ x, atol=1e-6)
        assert torch.allclose(share[present[:, c]], weights)
        assert not share[~present[:, c]].any()


def slowly(rows: Tensor, present: Tensor, cov: Any, exactly: bool = False) -> Tensor:
    """The weights class by class, by an n x n solve whatever n is; `exactly`: by singular values, which rounding does
    not trouble where the system can hardly be solved."""
    weights = torch.zeros(present.shape, dtype=torch.float64)
    for c, has in enumerate(present):
        x = rows[c, has].double()
        x, n, width = x - x.mean(0), len(x), x.shape[1]
        if cov == "diag":
            squared = (x.square() / (x.square().sum(0) / (n - 1) + 1e-6)).sum(1)
        else:
            gram, scale, ridge = x @ x.T, 1 / (n - 1), 0.0
            if cov == "ledoit_wolf":
                mean, square = gram.trace() / (n * width), gram.square().sum() / n**2
                far = (square / width - mean**2).clamp(min=0)
                noise = ((gram.diagonal().square().sum() / n - square) / (n * width)).clamp(min=0)
                shrink = float((noise / far).clamp(max=1)) if far > 0 else 0.0
                scale, ridge = (1 - shrink) / n, shrink * float(mean)
            floor = max(ridge + 1e-6, 1e-13 * scale * float(gram.trace()))
            if exactly:
                u, sizes, _ = torch.linalg.svd(x, full_matrices=False)
                squared = ((u * sizes).square() / (scale * sizes.square() + floor)).sum(1)
            else:
                system = scale * gram + floor * torch.eye(n, dtype=torch.float64)
                squared = torch.linalg.solve(system, gram).diagonal().clamp(min=0)
        near = 1 / (squared.sqrt() + 1e-6)
        weights[c, has] = near / near.sum()
    return weights


@pytest.mark.parametrize("cov", ["full", "diag", "ledoit_wolf"])
@pytest.mark.parametrize(("n", "width"), [(5, 12), (12, 12), (13, 12), (40, 12), (90, 3), (60, 1)])
@pytest.mark.parametrize("kind", ["plain", "enormous", "ties"])
def test_the_smaller_solve_gives_the_same_weights(cov: Any, n: int, width: int, kind: str) -> None:
    draw = torch.Generator().manual_seed(n * width)
    rows = torch.randn(3, n, width, generator=draw, dtype=torch.float64)
    present = torch.rand(3, n, generator=draw) < 0.7
    present[:, :3] = True
    if kind == "enormous":
        rows *= 1e12
    elif kind == "ties":
        rows[:, 2:] = rows[:, :1]
    rows[~present] = torch.nan
    found = mahalanobis_weights(rows, present, cov)
    if kind != "enormous":
        assert torch.allclose(found, slowly(rows, present, cov), rtol=1e-9, atol=0)
    many = int(present.sum(1).min()) > width + 1
    exact = slowly(rows, present, cov, exactly=True)
    assert torch.allclose(found, exact, rtol=1e-9 if many or kind != "enormous" else 1e-2, atol=0)
    assert torch.allclose(found.sum(1), torch.ones(3, dtype=torch.float64))


def test_where_rounding_leaves_no_factor_the_weights_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, present = torch.randn(1, 30, 4, generator=torch.Generator().manual_seed(0)), torch.ones(1, 30).bool()
    expected = mahalanobis_weights(rows, present, "full")
    failed = (torch.full((1, 4, 4), torch.nan, dtype=torch.float64), torch.ones(1, dtype=torch.int32))
    monkeypatch.setattr(torch.linalg, "cholesky_ex", lambda system: failed)
    assert torch.allclose(mahalanobis_weights(rows, present, "full"), expected, rtol=1e-9, atol=0)


def test_the_servers_work_grows_with_the_clients_and_not_with_their_cube() -> None:
    draw = torch.Generator().manual_seed(0)

    def seconds(clients: int) -> float:
        rows, present = torch.randn(clients, 2, 32, generator=draw), torch.ones(clients, 2, dtype=torch.bool)
        times = []
        for _ in range(3):
            begin = time.thread_time()
            global_prototypes(rows, present, "full")
            times.append(time.thread_time() - begin)
        return min(times)

    assert seconds(4000) < 40 * seconds(500)  # eight times the clients; by an n x n solve this is above 300


def test_identical_prototypes_are_their_own_global_one() -> None:
    rows = torch.full((4, 1, 3), 0.7)
    for cov in ("full", "diag", "ledoit_wolf"):
        found, known, _ = global_prototypes(rows, torch.ones(4, 1, dtype=torch.bool), cov)  # type: ignore[arg-type]
        assert torch.allclose(found, rows[0])
        assert known.all()


# ---------------------------------------------------------------- noise and what it buys


def test_noise_is_laplace_and_a_function_of_seed_client_and_round() -> None:
    ids = np.arange(4)
    one = laplace(3, ids, 1, (10, 500))
    assert float(one.mean()) == pytest.approx(0, abs=0.05)
    assert float(one.abs().mean()) == pytest.approx(1, abs=0.03)
    assert float(one.var()) == pytest.approx(2, abs=0.15)
    assert torch.equal(laplace(3, ids[2:3], 1, (10, 500))[0], one[2])
    for other in (laplace(4, ids, 1, (10, 500)), laplace(3, ids, 2, (10, 500)), laplace(3, ids + 4, 1, (10, 500))):
        assert not torch.isclose(other, one).any(2).all()
    assert len(torch.unique(one)) > 0.99 * one.numel()


def test_the_papers_noise_costs_what_it_costs() -> None:
    twenty = torch.tensor([20.0], dtype=torch.float64)
    assert float(PrototypeOptions(nonnegative=True).epsilon(512, twenty)) == pytest.approx(5120 / 20)
    assert float(PrototypeOptions().epsilon(512, twenty)) == pytest.approx(2 * 5120 / 20)
    assert math.isinf(float(PrototypeOptions(noise=0.0).epsilon(512, twenty)))
    aimed = PrototypeOptions(target_epsilon=0.5)
    assert float(aimed.epsilon(512, twenty)) == pytest.approx(0.5)
    assert float(aimed.scale(512, twenty)) == pytest.approx(512 * 2 / (20 * 0.5))
    with pytest.raises(UsageError, match="clip is inf"):
        PrototypeOptions(target_epsilon=0.5, clip=math.inf)


@pytest.mark.parametrize("kind", ["value", "l2"])
@pytest.mark.parametrize("nonnegative", [True, False])
def test_bounded_features_are_never_further_apart_than_the_sensitivity(kind: Any, nonnegative: bool) -> None:
    options = PrototypeOptions(clip=0.7, clip_kind=kind, nonnegative=nonnegative)
    half = torch.cat([torch.ones(WIDTH // 2), torch.zeros(WIDTH // 2)])
    extreme = 9 * torch.stack([half, 1 - half, torch.ones(WIDTH), -torch.ones(WIDTH), torch.zeros(WIDTH)])
    f = options.bounded(torch.cat([extreme, 3 * torch.randn(50, WIDTH)]))
    apart = float(torch.cdist(f, f, p=1).max())
    assert apart == pytest.approx(options.sensitivity(WIDTH), rel=1e-5)  # reached, never passed
    assert float((f if kind == "value" else f.norm(dim=1)).abs().max()) == pytest.approx(0.7)
    small = 0.01 * torch.rand(3, WIDTH)
    assert torch.equal(options.bounded(small), small)


def test_every_round_notes_its_epsilon_and_adds_them_up() -> None:
    j = advanced(job({"nonnegative": True}), 3)
    notes = [n for n in j.fed.notes if n.name == "epsilon"]
    assert [n.round for n in notes] == [0, 1, 2]
    once = WIDTH / (1 * 0.1)  # the smallest class of the client with one sample
    assert [n.value["composed"] for n in notes] == pytest.approx([once, 2 * once, 3 * once])
    assert notes[0].value["per_class_and_round"] == pytest.approx(once)
    assert notes[0].value["smallest_class"] == 1
    assert "not meaningful" in notes[0].value["meaning"]
    assert "travel without noise" in notes[0].value["meaning"]


def test_epsilon_adds_up_for_those_who_sent() -> None:
    j = advanced(job({"target_epsilon": 3.0}, participation=0.5), 4)
    counts = torch.zeros(len(SIZES))
    for r in range(4):
        j.fed.round = r
        counts[j.fed.sample(0.5).ids] += 1
    assert torch.allclose(j.method.spent.float(), 3.0 * counts)  # type: ignore[attr-defined]
    first, *_, last = [n.value for n in j.fed.notes if n.name == "epsilon"]
    assert "3-differentially private" in first["meaning"]
    assert last["composed"] == pytest.approx(3.0 * float(counts.max()))
    silent = advanced(job(PLAIN), 1).fed.notes[0].value
    assert silent["composed"] == math.inf
    assert "no privacy" in silent["meaning"]


# ---------------------------------------------------------------- prototypes (eq. 2)


def test_without_noise_and_clipping_prototypes_are_plain_means_under_the_local_body() -> None:
    j = advanced(job(PLAIN), 2)
    local = cohort(j)["local"]
    theta = j.method.theta  # type: ignore[attr-defined]
    reply = METHODS["fedpkda"](options_of(METHODS["fedpkda"], PLAIN, "")).observe(cohort(j))  # type: ignore[attr-defined]
    expected, has = means(j, local)
    assert torch.equal(reply["present"], has)
    assert torch.allclose(reply["prototypes"].values, expected, atol=1e-6)
    installed, _ = means(j, cohort(j).rows(body=theta, head=cohort(j).head(local)))
    assert not torch.allclose(reply["prototypes"].values, installed, atol=1e-3)  # not under the new theta
    assert reply["fewest"].tolist() == [3.0, 1.0, 4.0, 4.0, 3.0, 2.0]


@pytest.mark.parametrize("target", [None, 2.0])
def test_noise_is_added_to_clipped_means_of_present_classes_only(target: float | None) -> None:
    options = {"clip": 0.3, "noise": 0.25, "target_epsilon": target}
    j = job(options)
    method: Any = METHODS["fedpkda"](options_of(METHODS["fedpkda"], options, ""))
    reply, clean = method.observe(cohort(j)), cohort(j).prototypes(cohort(j)["local"], clip=0.3)
    noise = laplace(0, j.fed.all.ids, 0, (CLASSES, WIDTH))
    scale = torch.full_like(clean[1], 0.25) if target is None else WIDTH * 0.6 / (clean[1].clamp(min=1) * target)
    expected = (clean[0] + noise * scale.unsqueeze(2)) * reply["present"].unsqueeze(2)
    assert torch.allclose(reply["prototypes"].values, expected, atol=1e-6)
    assert torch.equal(reply["prototypes"].mask, reply["present"].unsqueeze(2).expand(-1, -1, WIDTH))
    alone = method.observe(cohort(j, ids=[3]))  # a client's noise does not depend on who else is there
    assert torch.equal(alone["prototypes"].values[0], reply["prototypes"].values[3])


# ---------------------------------------------------------------- limits


ways = pytest.mark.parametrize("way", ["each", "batched"])
STILL: dict[str, Any] = {"omega_local": 0, "omega_global": 0, "offset": 0}


@ways
@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_without_pulls_and_by_samples_it_is_fedper(way: str, participation: float) -> None:
    mine = advanced(job({**STILL, "aggregate": "samples"}, way=way, participation=participation), 3)
    other = advanced(job(method="fedper", way=way, participation=participation), 3)
    assert torch.equal(mine.method.theta, other.method.body)  # type: ignore[attr-defined]
    assert torch.equal(mine.rows(), other.rows())
    assert {e.phase for e in mine.fed.exchanges} == {"train"}
    assert [e.bytes_up for e in mine.fed.exchanges] == [e.bytes_up for e in other.fed.exchanges]  # no gamma either


@pytest.mark.parametrize(("profile", "other", "part"), [("paper", "fedper", "body"), ("official", "fedavg", "model")])
def test_with_gammas_like_the_sample_counts_the_average_is_by_samples(profile: str, other: str, part: str) -> None:
    def level(ids: Any, phase: str, message: Any, answer: Answer, round: int) -> Answer:
        if phase == "train":
            answer.replies["gamma"] = torch.tensor([2.5 * SIZES[i] for i in ids])
        return answer

    mine = advanced(job({**STILL, "profile": profile}, tamper=level), 3)
    theirs = advanced(job(method=other), 3)
    assert torch.allclose(mine.method.theta, getattr(theirs.method, part), atol=1e-6)  # type: ignore[attr-defined]


# ---------------------------------------------------------------- a round, the slow and obvious way


def pulled(how: str, f: Tensor, y: Tensor, prototypes: Tensor, there: Tensor) -> Tensor:
    """L_LA or L_GA of one batch, written out."""
    if how == "printed":  # eqs. 8 and 9: all classes, squared norms
        rows = [sum((x - prototypes[c]).square().sum() for c in range(CLASSES) if there[c]) for x in f]
        return torch.stack(rows).mean()  # type: ignore[arg-type]
    if how == "class_means":  # the authors' code: the classes of the batch in turn, MSELoss for each, added up
        found = [F.mse_loss(f[y == c], prototypes[c].expand_as(f[y == c])) for c in y.unique().tolist() if there[c]]
        return torch.stack([*found, torch.zeros(())]).sum()
    return torch.stack([(x - prototypes[c]).square().mean() * there[c] for x, c in zip(f, y, strict=True)]).mean()


WEAK = {"omega_local": 0.05, "omega_global": 0.09, "offset": 0.01}
ROUNDS: list[tuple[str, str, dict[str, Any]]] = [
    *((profile, variant, {}) for profile in ("paper", "official") for variant in ("full", "kda", "cp", "base")),
    ("paper", "full", {"pull": "printed", "own_clip": True, **WEAK}),
    ("paper", "full", {"pull": "class_means", "first_t": 0}),
    ("official", "full", {"pull": "mean", "first_t": 1}),
]


@ways
@pytest.mark.parametrize(("profile", "variant", "options"), ROUNDS, ids=str)
def test_a_round_is_what_a_plain_loop_makes_of_the_paper(
    way: str, profile: str, variant: str, options: dict[str, Any]
) -> None:
    j = advanced(job({"profile": profile, "variant": variant, "noise": 0.02, "clip": 0.5, **options}, way=way), 1)
    before = cohort(j)["local"].clone()
    theta, layout = j.method.theta.clone(), j.site.layout  # type: ignore[attr-defined]
    exact, has = means(j, before)
    clipped = means(j, before, clip=0.5)[0]
    assert not torch.allclose(clipped, exact, atol=1e-3)
    noisy = clipped + 0.02 * laplace(0, j.fed.all.ids, 1, (CLASSES, WIDTH))
    exact = clipped if options.get("own_clip") else exact
    goals, known = torch.zeros(CLASSES, WIDTH), has.sum(0) >= 3
    for c in torch.nonzero(known).flatten().tolist():
        x = noisy[has[:, c], c].double()
        goals[c] = (direct(x, torch.cov(x.T)) @ x).float()
    official = profile == "official"
    t = options.get("first_t", 0 if official else 1) + 1  # the second round of four
    phi = phase(t / 4 * (5 if official else 1))
    own, others = (0.3, 0.5) if official else (0.5, 0.9)
    own, others = options.get("omega_local", own), options.get("omega_global", others)
    near, far = options.get("offset", 0.1) + own * (1 - phi), options.get("offset", 0.1) + others * phi
    near, far = {"full": (near, far), "kda": (near, 0.0), "cp": (0.0, 1.0), "base": (0.0, 0.0)}[variant]
    how = options.get("pull", "class_means" if official else "mean")

    expected, gammas = [], []
    for k in range(len(SIZES)):

        def pull(f: Tensor, y: Tensor, k: int = k) -> Tensor:
            return near * pulled(how, f, y, exact[k], has[k]) + far * pulled(how, f, y, goals, known)

        row, fits = before[k].clone(), 1
        row[: len(theta)] = theta
        module = network(j, row)
        if official and variant != "base":
            train_client(module, batches(j, k, 1, 1), SGD(0.002), learn="body", loss=lambda f, z, y: pull(f, y))
            fits = 2
        align = not official
        train_client(
            module,
            batches(j, k, fits, 2),
            SGD(0.05),
            loss=lambda f, z, y, on=align: F.cross_entropy(z, y) + (pull(f, y) if on else 0.0),
        )
        expected.append(layout.row(module))
        shared = list(module.parameters() if official else module.body.parameters())
        gamma, part = 0.0, torch.from_numpy(j.site.parts["train"][k])
        for i in part.split(4):
            loss = F.cross_entropy(module(j.site.source.batch(i)), j.site.source.labels(i))
            gamma += sum(float(g.square().sum()) for g in torch.autograd.grad(loss, shared))
        gammas.append(gamma)
    j.advance()
    rows, weights = torch.stack(expected), torch.tensor(gammas) / sum(gammas)
    assert torch.allclose(cohort(j)["local"], rows, atol=2e-5)
    assert torch.allclose(j.method.theta, weights @ rows[:, : len(theta)], atol=2e-5)  # type: ignore[attr-defined]
    assert torch.allclose(j.fed.notes[-1].value.float(), weights, atol=1e-4)
    assert float((rows - before).abs().max()) > 1e-2


def batches(j: Job, k: int, fit: int, epochs: int) -> list[tuple[Tensor, Tensor]]:
    part = j.site.parts["train"][k]
    steps = plan([part], np.array([k]), epochs, 4, (0, 1, "train", fit), False)
    chosen = [torch.from_numpy(steps.table[s, 0, : steps.sizes[s, 0]]) for s in range(len(steps.sizes))]
    return [(j.site.source.batch(i), j.site.source.labels(i)) for i in chosen]


# ---------------------------------------------------------------- Fisher weights


@pytest.mark.parametrize("norm", ["sum", "mean"])
@pytest.mark.parametrize("fim", ["batch", "per_sample", "full"])
@pytest.mark.parametrize("params", ["shared", "all"])
def test_fisher_traces(fim: str, norm: str, params: str) -> None:
    options = {"fim": fim, "fim_norm": norm, "fim_params": params}
    j = job(options)
    method: Any = METHODS["fedpkda"](options_of(METHODS["fedpkda"], options, ""))
    rows = cohort(j)["local"]
    found = method.fisher(cohort(j), rows)
    for k, n in enumerate(SIZES):
        module, part = network(j, rows[k]), torch.from_numpy(j.site.parts["train"][k])
        shared = list((module if params == "all" else module.body).parameters())
        traces = []
        for i in part.split({"batch": 4, "per_sample": 1, "full": n}[fim]):
            how = "sum" if fim == "full" and norm == "sum" else "mean"
            loss = F.cross_entropy(module(j.site.source.batch(i)), j.site.source.labels(i), reduction=how)
            traces.append(sum(float(g.square().sum()) for g in torch.autograd.grad(loss, shared)))
        assert float(found[k]) == pytest.approx(sum(traces) if norm == "sum" else np.mean(traces), rel=1e-4)


def forged(values: list[float]) -> Any:
    def tamper(ids: Any, phase: str, message: Any, answer: Answer, round: int) -> Answer:
        if phase == "train":
            answer.replies["gamma"] = torch.tensor(values)
        return answer

    return tamper


@pytest.mark.parametrize(
    ("profile", "sent", "share"),
    [
        ("paper", [1, 2, 3, 4, 5, 85], [0.01, 0.02, 0.03, 0.04, 0.05, 0.85]),
        ("robust", [1, 2, 3, 4, 5, 1e30], [1 / 30, 2 / 30, 3 / 30, 4 / 30, 5 / 30, 15 / 30]),  # lower median 3
        ("paper", [1, 1, 1, 1, 0, -7], [0.25, 0.25, 0.25, 0.25, 0, 0]),
        ("paper", [0] * 6, [n / sum(SIZES) for n in SIZES]),
        ("paper", [3e38] * 6, [1 / 6] * 6),
    ],
)
def test_weights_of_the_average(profile: str, sent: list[float], share: list[float]) -> None:
    j = advanced(job({"profile": profile}, tamper=forged([float(v) for v in sent])), 1)
    assert j.fed.notes[-1].value.tolist() == pytest.approx(share, rel=1e-6)
    expected = torch.tensor(share) @ cohort(j).body(cohort(j)["local"])
    assert torch.allclose(j.method.theta, expected, atol=1e-6)  # type: ignore[attr-defined]


# ---------------------------------------------------------------- messages


@pytest.mark.parametrize(("profile", "participation"), [("paper", 1.0), ("paper", 0.5), ("official", 0.5)])
def test_ledger_of_a_round(profile: str, participation: float) -> None:
    j = job({"profile": profile}, participation=participation)
    part = j.site.layout.size("body" if profile == "paper" else "model")
    for _ in range(3):
        asked = j.fed.sample(participation)
        senders = j.fed.all if profile == "official" else asked
        begin = len(j.fed.exchanges)
        j.advance()
        first, second = j.fed.exchanges[begin:]
        assert (first.phase, second.phase) == ("observe", "train")
        assert (first.asked, second.asked) == (len(senders), len(asked))
        bits = -(-CLASSES // 8)
        assert first.bytes_down == 0
        assert first.bytes_up == sum(4 * WIDTH * len(HAS[c]) + bits + 4 for c in senders)
        classes = int((j.method.present.sum(0) >= 3).sum())  # type: ignore[attr-defined]
        assert second.bytes_down == len(asked) * (4 * part + 4 * WIDTH * classes + bits + 4)
        assert second.bytes_up == len(asked) * (4 * part + 4)


def test_variants_that_need_no_global_prototypes_ask_for_none() -> None:
    for variant in ("base", "kda"):
        j = advanced(job({"variant": variant}), 2)
        assert {e.phase for e in j.fed.exchanges} == {"train"}
        assert j.fed.exchanges[0].bytes_down == len(SIZES) * (4 * j.site.layout.size("body") + 4)
    assert {e.phase for e in advanced(job({"variant": "cp"}), 1).fed.exchanges} == {"observe", "train"}


def test_what_leaves_a_client_is_noised() -> None:
    seen: list[dict[str, Any]] = []

    def listen(ids: Any, phase: str, message: Any, answer: Answer, round: int) -> Answer:
        seen.append(dict(answer.replies))
        return answer

    j = job({"noise": 0.5}, tamper=listen)
    exact, has = means(j, cohort(j)["local"])
    j.advance()
    assert [set(s) for s in seen] == [{"prototypes", "present", "fewest"}, {"theta", "gamma"}]
    assert not torch.isclose(seen[0]["prototypes"].values[has], exact[has], atol=1e-5).any(1).all()
    assert seen[1]["theta"].shape[1] == j.site.layout.size("body")  # no head


# ---------------------------------------------------------------- whose prototypes count


@pytest.mark.parametrize("cache", [True, False])
def test_cache_of_last_prototypes(cache: bool) -> None:
    sent: list[tuple[np.ndarray, Masked, Tensor]] = []

    def listen(ids: Any, phase: str, message: Any, answer: Answer, round: int) -> Answer:
        if phase == "observe":
            sent.append((ids, answer.replies["prototypes"], answer.replies["present"]))  # type: ignore[arg-type]
        return answer

    j = advanced(job({"proto_cache": cache}, participation=0.5, tamper=listen), 3)
    expected = torch.zeros(len(SIZES), CLASSES, dtype=torch.bool)
    for ids, values, has in sent if cache else sent[-1:]:
        expected[ids] = has
        last = {int(i): values.values[k] for k, i in enumerate(ids)}
    method: Any = j.method
    heard = {int(i) for ids, _, _ in (sent if cache else sent[-1:]) for i in ids}
    assert set(method.senders) == heard
    assert len(method.senders) == len(method.prototypes) == len(heard), "only senders have a place in its memory"
    assert torch.equal(method.present, expected[method.senders])
    assert all(torch.equal(method.prototypes[method.senders.index(i)], row) for i, row in last.items())
    assert len({tuple(ids) for ids, _, _ in sent}) > 1


def test_removed_clients_prototypes_are_forgotten() -> None:
    goals: list[Tensor] = []

    def listen(ids: Any, phase: str, message: Any, answer: Answer, round: int) -> Answer:
        if phase == "train":
            goals.append(message["goals"])
        return answer

    j = job(tamper=listen)
    j.advance()
    j.fed.remove([0, 3])
    j.advance()
    method: Any = j.method
    stay = torch.tensor([1, 2, 4, 5])
    expected, known, _ = global_prototypes(method.prototypes[stay], method.present[stay], "full")
    assert known.tolist() == [True, True, False, False, False]
    assert torch.equal(goals[-1], expected)


# ---------------------------------------------------------------- when things go wrong


@pytest.mark.parametrize("phase", ["observe", "train"])
@pytest.mark.parametrize("who", [[2], list(range(len(SIZES)))])
@pytest.mark.parametrize("profile", ["paper", "robust", "official"])
def test_replies_that_are_not_finite_are_left_out(phase: str, who: list[int], profile: str) -> None:
    def spoil(ids: Any, asked: str, message: Any, answer: Answer, round: int) -> Answer:
        if asked == phase:
            value = answer.replies["prototypes" if phase == "observe" else "theta"]
            tensor = value.values if isinstance(value, Masked) else value
            tensor[[k for k, i in enumerate(ids) if i in who]] = float("nan")
        return answer

    j = job({"profile": profile}, tamper=spoil)
    start = j.method.theta.clone()  # type: ignore[attr-defined]
    advanced(j, 2)
    method: Any = j.method
    assert {f.client for f in j.fed.failures} == set(who)
    assert torch.isfinite(method.theta).all()
    assert torch.isfinite(method.prototypes).all()
    assert torch.equal(method.theta, start) == (phase == "train" and len(who) > 1)
    if phase == "observe":
        assert not {*method.senders} & {*who}


@pytest.mark.parametrize("fault", ["drop", "straggle"])
def test_clients_that_drop_out(fault: str) -> None:
    j = advanced(job(rounds=6, **{fault: 0.6}), 6)
    assert j.fed.failures
    assert torch.isfinite(j.rows()).all()


@pytest.mark.parametrize("profile", ["paper", "robust", "official"])
def test_two_clients_have_no_global_prototypes_and_still_train(profile: str) -> None:
    j = job({"profile": profile}, sizes=(11, 1))
    start = j.method.theta.clone()  # type: ignore[attr-defined]
    advanced(j, 2)
    train = [e for e in j.fed.exchanges if e.phase == "train"]
    assert train[0].bytes_down == 2 * (4 * len(start) + -(-CLASSES // 8) + 4)
    assert not torch.equal(j.method.theta, start)  # type: ignore[attr-defined]


@pytest.mark.parametrize("profile", ["paper", "official"])
def test_neither_the_way_nor_the_chunk_matters(profile: str) -> None:
    runs = [
        advanced(job({"profile": profile}, participation=0.7, **how), 3).rows()
        for how in ({}, {"chunk": 1}, {"way": "threads"}, {"way": "batched"})
    ]
    assert torch.equal(runs[0], runs[1])
    for other in runs[2:]:
        assert torch.allclose(runs[0], other, atol=1e-5)


def test_it_learns() -> None:
    j = job(rounds=12)
    first = j.advance()
    last = [j.advance() for _ in range(11)][-1]
    assert first is not None
    assert last is not None
    assert last.test_loss < first.test_loss
