"""Aggregation rules against their definitions, written out in NumPy, and the properties that they should have."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedkin.errors import UsageError
from fedkin.options import describe
from fedkin.papers.published import load_paper
from fedkin.robust import GAS, RULES, Bucketing, Outcome, Rule, apply, make_rule
from fedkin.robust import rows as linear
from fedkin.robust.rules import RFA, FLTrust, Krum, Mean, Median, MultiKrum, TrimmedMean
from fedkin.rounds import named_spec

cases = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 10_000)


def draw(seed: int, n: int = 9, width: int = 23, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    rows, weights, start = rng.normal(size=(n, width)) * scale, rng.integers(1, 50, n), rng.normal(size=width)
    return torch.tensor(rows).float(), torch.tensor(weights).float(), torch.tensor(start).float()


def build(name: str, width: int = 23, seed: int = 7) -> Rule:
    """A rule with its defaults, and what only the server can give."""
    root = torch.tensor(np.random.default_rng(seed).normal(size=width)).float()
    return FLTrust(update=root) if name == "fltrust" else make_rule(name)


def close(got: Tensor, wanted: object, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    np.testing.assert_allclose(got.double().numpy(), np.asarray(wanted, np.float64), rtol=rtol, atol=atol)


# ---------------------------------------------------------------- definitions


def krum_scores(x: np.ndarray, f: int) -> np.ndarray:
    scores = []
    for i in range(len(x)):
        others = sorted(((x[i] - x[j]) ** 2).sum() for j in range(len(x)) if j != i)
        scores.append(sum(others[: max(1, len(x) - f - 2)]))
    return np.array(scores)


def oracle(name: str, x: np.ndarray, w: np.ndarray, start: np.ndarray, root: np.ndarray) -> np.ndarray:
    n, f, d = len(x), int(len(x) * 0.3), x - start
    norms = np.linalg.norm(d, axis=1)
    if name == "mean":
        return (w[:, None] * x).sum(0) / w.sum()
    if name == "krum":
        return x[np.argmin(krum_scores(x, f))]
    if name == "multi-krum":
        return x[np.argsort(krum_scores(x, f), kind="stable")[: n - f]].mean(0)
    if name == "median":
        return np.median(x, axis=0)
    if name == "trimmed-mean":
        return np.sort(x, axis=0)[f : n - f].mean(0)
    if name == "rfa":
        z, before = (w[:, None] * x).sum(0) / w.sum(), np.inf
        for _ in range(4):
            away = np.maximum(1e-5, np.linalg.norm(x - z, axis=1))
            if before - w @ away <= 1e-6 * (w @ away):
                break
            before, b = w @ away, w / away
            z = (b[:, None] * x).sum(0) / b.sum()
        return z
    if name == "clustered":
        kept = cluster(1 - (d @ d.T) / np.outer(norms, norms))
        return (w[kept, None] * x[kept]).sum(0) / w[kept].sum()
    if name == "fltrust":
        trust = np.maximum(0, d @ root / norms / np.linalg.norm(root))
        scaled = d * (np.linalg.norm(root) / norms)[:, None]
        return start + (trust[:, None] * scaled).sum(0) / (trust.sum() + 1e-9)
    if name == "norm-clip":
        clipped = d * np.minimum(1, np.median(norms) / norms)[:, None]
        return start + (w[:, None] * clipped).sum(0) / w.sum()
    assert name == "centred-clip"
    v = start.copy()
    for _ in range(3):
        away = np.linalg.norm(x - v, axis=1)
        v = v + ((x - v) * np.minimum(1, np.median(away) / away)[:, None]).mean(0)
    return v


def cluster(distance: np.ndarray) -> list[int]:
    """Complete linkage down to two clusters, one merge at a time; the larger, or the first row's if equal."""
    groups = [[i] for i in range(len(distance))]
    while len(groups) > 2:
        pairs = [
            (max(distance[i, j] for i in a for j in b), p, q)
            for p, a in enumerate(groups)
            for q, b in enumerate(groups)
            if p < q
        ]
        _, p, q = min(pairs)
        groups[p] = groups[p] + groups.pop(q)
    return sorted(max(groups, key=lambda g: (len(g), 0 in g)))


SIMPLE = [n for n in RULES if n not in ("bucketing", "gas")]


@pytest.mark.parametrize("name", SIMPLE)
@given(seed=seeds, n=st.integers(3, 12))
@cases
def test_rule_is_its_definition(name: str, seed: int, n: int) -> None:
    rows, weights, start = draw(seed, n)
    root = np.random.default_rng(7).normal(size=23)
    wanted = oracle(name, *(t.double().numpy() for t in (rows, weights, start)), root)
    close(build(name)(rows, weights, start), wanted)


def test_krum_by_hand() -> None:
    # With f = 1 of 5, two neighbours count. 0, 1, 2 lie together, 10 and 12 apart: row 1 has the scores 1 + 1.
    rows = torch.tensor([[0.0], [1.0], [2.0], [10.0], [12.0]])
    found = apply(Krum(malicious=1), rows, torch.ones(5), torch.zeros(1))
    assert found.row.item() == 1.0
    assert found.used.tolist() == [False, True, False, False, False]
    assert found.scores is not None
    assert found.scores.tolist() == [1 + 4, 1 + 1, 1 + 4, 4 + 64, 4 + 100]


def test_medians_and_trimming_by_hand() -> None:
    rows = torch.tensor([[1.0, 9.0], [2.0, 8.0], [4.0, 5.0], [100.0, -70.0]])
    weights, start = torch.ones(4), torch.zeros(2)
    assert Median()(rows, weights, start).tolist() == [3.0, 6.5]
    assert Median(lower=True)(rows, weights, start).tolist() == [2.0, 5.0]
    assert TrimmedMean(malicious=1)(rows, weights, start).tolist() == [3.0, 6.5]
    five = torch.tensor([[0.0], [1.0], [5.0], [6.0], [100.0]])
    assert TrimmedMean(malicious=2)(five, torch.ones(5), torch.zeros(1)).item() == 5.0
    assert TrimmedMean(malicious=2, cut=0.5)(five, torch.ones(5), torch.zeros(1)).item() == 4.0  # q = floor(f / 2)


def test_clusters_by_hand() -> None:
    # Three updates to the right, two to the left; the larger cluster is averaged by training samples.
    start = torch.tensor([1.0, 1.0])
    rows = start + torch.tensor([[1.0, 0.0], [2.0, 0.1], [3.0, 0.0], [-1.0, 0.0], [-9.0, 0.1]])
    found = apply(make_rule("clustered"), rows, torch.tensor([2.0, 1.0, 1.0, 5.0, 5.0]), start)
    assert found.used.tolist() == [True, True, True, False, False]
    close(found.row, [1 + 7 / 4, 1 + 0.1 / 4])
    # An update of zero has no direction and belongs to nobody.
    rows[3:] = start + torch.tensor([[1.0, 0.2], [0.0, 0.0]])
    assert apply(make_rule("clustered"), rows, torch.ones(5), start).used.tolist() == [True] * 4 + [False]


def test_geometric_median_by_hand() -> None:
    # The point with the least sum of distances to the corners of a square and its middle is the middle.
    rows = torch.tensor([[0.0, 0.0], [0.0, 2.0], [2.0, 0.0], [2.0, 2.0], [1.0, 1.0]])
    close(RFA(iterations=50)(rows, torch.ones(5), torch.zeros(2)), [1, 1])
    # A majority at one point holds it there, wherever the others are.
    rows = torch.tensor([[1.0], [1.0], [1.0], [1e6], [1e6]])
    close(RFA(iterations=500, tolerance=0.0)(rows, torch.ones(5), torch.zeros(1)), [1], rtol=1e-3)


def test_rfa_per_tensor_is_rfa_of_each_tensor() -> None:
    rows, weights, start = draw(3)
    got = RFA(per_tensor=True, bounds=(0, 5, 23))(rows, weights, start)
    parts = [RFA()(rows[:, c], weights, start[c]) for c in (slice(0, 5), slice(5, 23))]
    close(got, torch.cat(parts))
    with pytest.raises(UsageError, match="23"):
        RFA(per_tensor=True, bounds=(0, 5, 22))(rows, weights, start)


def geometric_median(x: np.ndarray) -> np.ndarray:
    """Weiszfeld's steps until nothing moves, all points alike; at one of the points, Vardi and Zhang's (2000)."""
    z = x.mean(0)
    for _ in range(20_000):
        away = np.linalg.norm(x - z, axis=1)
        at = away > 1e-12
        toward = (x[at] / away[at, None]).sum(0) / (1 / away[at]).sum()
        pull = np.linalg.norm(((x[at] - z) / away[at, None]).sum(0))
        stay = min(1.0, (~at).sum() / pull) if pull else 1.0
        after = (1 - stay) * toward + stay * z
        if np.linalg.norm(after - z) < 1e-13:
            break
        z = after
    return z


def table_one(column: str) -> str:
    """The rule behind a column of FedCAP's Table I."""
    return next(c.variants[0].rule for c in load_paper("fedcap").table("table1").cells if c.column == column)


@pytest.mark.parametrize("hostile", ["none", "ipm", "same"])
@pytest.mark.parametrize("seed", range(4))
def test_rfa_in_fedcaps_tables_is_the_geometric_median_of_each_tensor(hostile: str, seed: int) -> None:
    """Its authors' code goes on until it has converged, unweighted and tensor by tensor; four steps fall short."""
    rows, weights, start = draw(seed, n=20)
    if hostile == "ipm":
        rows[14:] = start - 20 * (rows[:14] - start).mean(0)
    elif hostile == "same":
        rows[14:] = rows[14]
    rule = dataclasses.replace(make_rule(*named_spec(table_one("RFA"))), bounds=(0, 5, 23))  # type: ignore[type-var]
    x = rows.double().numpy()
    wanted = np.concatenate([geometric_median(x[:, :5]), geometric_median(x[:, 5:])])
    close(rule(rows, weights, start), wanted, rtol=1e-4, atol=1e-5)
    short = dataclasses.replace(rule, iterations=4)(rows, weights, start)  # type: ignore[type-var]
    assert hostile != "ipm" or np.abs(short.numpy() - wanted).max() > 0.01


def test_rfa_that_looks_rarely_whether_it_may_stop_finds_what_one_that_never_stops_does() -> None:
    rows, weights, start = draw(2, n=12)
    long = RFA(iterations=400, tolerance=1e-9)
    seen = long.combine(rows, weights, start).scores
    x, n, before = rows.double().numpy(), weights.double().numpy(), np.inf
    share = n / n.sum()
    for _ in range(400):
        away = np.maximum(1e-5, np.linalg.norm(x - share @ x, axis=1))
        if before - n @ away <= 1e-9 * (n @ away):
            break
        before, share = n @ away, n / away / (n / away).sum()
    assert seen is not None
    close(seen, share)


@pytest.mark.parametrize("copies", [1, 3])
def test_fltrust_first_tensor_only_rescales_nothing_else(copies: int) -> None:
    rows, weights, start = draw(5)
    rows[:copies] = rows[0]
    root = torch.tensor(np.random.default_rng(1).normal(size=23)).float()
    d, g = (rows - start).double().numpy(), root.double().numpy()
    norms = np.linalg.norm(d, axis=1)
    trust = np.maximum(0, d @ g / norms / np.linalg.norm(g))
    one_object = [d[0]] * copies + list(d[copies:])  # what attackers send lies in memory once
    for update, norm in zip(one_object, norms, strict=True):
        update[:5] *= np.linalg.norm(g) / norm
    d = np.stack(one_object)
    wanted = start.double().numpy() + trust @ d / (trust.sum() + 1e-9)
    close(FLTrust(update=root, first_tensor_only=True, bounds=(0, 5, 23))(rows, weights, start), wanted)


def test_fltrust_trusts_nobody_against_the_root_and_asks_for_one() -> None:
    rows, weights, start = draw(5)
    root = (rows - start).mean(0)
    found = apply(FLTrust(update=lambda begin: root), start - root + 0 * rows, weights, start)
    close(found.row, start)
    assert not found.used.any()
    with pytest.raises(UsageError, match="update"):
        FLTrust()(rows, weights, start)


def test_gas_is_its_definition() -> None:
    """With a base rule that works on coordinates it does not matter how these are dealt to as many parts."""
    rows, weights, start = draw(11, n=10)
    x = rows.double().numpy()
    scores = np.abs(x - np.median(x, axis=0)).sum(1)
    kept = np.argsort(scores)[:7]
    found = apply(GAS(parts=23, base="median"), rows, weights, start)
    assert np.flatnonzero(found.used.numpy()).tolist() == sorted(kept.tolist())
    close(found.row, x[kept].mean(0))


# ---------------------------------------------------------------- limits


@given(seed=seeds)
@cases
def test_limits_are_the_plain_mean(seed: int) -> None:
    rows, weights, start = draw(seed)
    plain = rows.double().mean(0)
    for rule in (
        MultiKrum(malicious=0, keep=9),
        MultiKrum(malicious=0),
        TrimmedMean(malicious=0),
        Bucketing(size=9, base="median"),
        GAS(malicious=0),
    ):
        close(rule(rows, weights, start), plain)
    close(Mean()(rows, torch.ones(9), start), plain)
    close(TrimmedMean(malicious=8)(rows, weights, start), Median()(rows, weights, start))


@pytest.mark.parametrize("name", SIMPLE)
@given(seed=seeds)
@cases
def test_buckets_of_one_are_the_base_rule(name: str, seed: int) -> None:
    rows, weights, start = draw(seed)
    base = build(name)
    bucketed, alone = (apply(r, rows, weights, start) for r in (Bucketing(size=1, base=base, seed=seed), base))
    close(bucketed.row, alone.row)
    assert bucketed.used.tolist() == alone.used.tolist()


@pytest.mark.parametrize("name", [n for n in SIMPLE if n != "fltrust"])  # its root has the coordinates in order
@given(seed=seeds)
@cases
def test_gas_in_one_part_keeps_the_nearest_to_the_base_rule(name: str, seed: int) -> None:
    rows, weights, start = draw(seed)
    base = build(name)
    away = np.linalg.norm((rows - base(rows, weights, start)).numpy(), axis=1)
    found = apply(GAS(parts=1, base=base, malicious=3), rows, weights, start)
    assert np.flatnonzero(found.used.numpy()).tolist() == sorted(np.argsort(away)[:6].tolist())


def test_share_and_number_of_attackers() -> None:
    rows, weights, start = draw(2, n=10)
    assert apply(MultiKrum(malicious=0.3), rows, weights, start).used.sum() == 7
    assert apply(MultiKrum(malicious=4), rows, weights, start).used.sum() == 6
    assert apply(MultiKrum(malicious=0.29), rows[:1].expand(100, -1), torch.ones(100), start).used.sum() == 71
    assert apply(MultiKrum(malicious=50), rows, weights, start).used.sum() == 1
    # A share counts buckets (int(5 * 0.3) = 1 of 5), a number stays: 4 buckets or 2 are kept, two rows in each.
    assert apply(Bucketing(malicious=0.3), rows, weights, start).used.sum() == 8
    assert apply(Bucketing(malicious=3), rows, weights, start).used.sum() == 4


def test_random_orders_are_new_every_round_and_follow_from_the_seed() -> None:
    rows, weights, start = draw(4, n=12)
    again = Bucketing(base="krum")(rows, weights, start)
    assert torch.equal(Bucketing(base="krum")(rows, weights, start), again)
    others = [Bucketing(base="krum", seed=s)(rows, weights, start) for s in range(1, 9)]
    later = [Bucketing(base="krum")(rows + r - r, weights, start + r) for r in range(1, 9)]
    assert any(not torch.equal(o, again) for o in others)
    assert any(not torch.equal(o, again) for o in later)


# ---------------------------------------------------------------- properties


@pytest.mark.parametrize("name", [n for n in RULES if n != "bucketing"])
@given(seed=seeds)
@cases
def test_order_of_rows_does_not_matter(name: str, seed: int) -> None:
    rows, weights, start = draw(seed)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(seed))
    rule = GAS(parts=23, base="median") if name == "gas" else build(name)
    one, other = apply(rule, rows, weights, start), apply(rule, rows[order], weights[order], start)
    close(other.row, one.row)
    assert other.used.tolist() == one.used[order].tolist()


@pytest.mark.parametrize("name", [n for n in RULES if n != "bucketing"])
@given(seed=seeds, shift=st.floats(-50, 50), scale=st.floats(0.1, 20))
@cases
def test_moves_and_scales_with_its_input(name: str, seed: int, shift: float, scale: float) -> None:
    """f(scale x + shift) = scale f(x) + shift, when what the clients started from moves along."""
    rows, weights, start = draw(seed)
    rule = GAS(parts=23, base="median") if name == "gas" else build(name)
    moved = rule
    if isinstance(rule, FLTrust):
        assert isinstance(rule.update, Tensor)
        moved = dataclasses.replace(rule, update=rule.update * scale)
    got = moved(rows * scale + shift, weights, start * scale + shift)
    close(got, rule(rows, weights, start) * scale + shift, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("name", [n for n in RULES if n not in ("mean", "rfa", "fltrust", "norm-clip", "centred-clip")])
@pytest.mark.parametrize("strength", [1e2, 1e6, 1e12, 1e18])
def test_a_minority_cannot_move_the_result_far(name: str, strength: float) -> None:
    rows, weights, start = draw(1, n=20)
    rows[:3] = strength * torch.randn(23, generator=torch.Generator().manual_seed(0))
    found = build(name)(rows, weights, start)
    assert found.abs().max() < rows[3:].abs().max() * 1.01


# ---------------------------------------------------------------- what must never crash


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_rows_that_are_not_finite_have_no_say(name: str, bad: float) -> None:
    rows, weights, start = draw(8)
    spoilt = torch.cat([rows, rows[:2]])
    spoilt[9, 3], spoilt[10] = bad, bad
    # The random orders of bucketing and GAS follow from the first row, which is a good one in both.
    found, clean = (
        apply(build(name), spoilt, torch.cat([weights, weights[:2]]), start),
        apply(build(name), rows, weights, start),
    )
    close(found.row, clean.row)
    assert found.used.tolist() == [*clean.used.tolist(), False, False]
    if found.scores is not None:
        assert found.scores[9:].isnan().all()
    nothing = apply(build(name), torch.full_like(rows, bad), weights, start)
    assert torch.equal(nothing.row, start)
    assert not nothing.used.any()


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_few_rows(name: str, n: int) -> None:
    rows, weights, start = draw(6, n=n)
    got = build(name)(rows, weights, start)
    assert got.isfinite().all()
    if n == 1 and name not in ("fltrust",):
        close(got, rows[0])
    if n == 2 and name in ("krum", "multi-krum", "median", "trimmed-mean", "gas"):
        close(got, rows.mean(0))


@pytest.mark.parametrize("name", RULES)
def test_identical_rows_and_no_weights(name: str) -> None:
    rows, weights, start = draw(6)
    same = rows[:1].expand(9, -1)
    got = build(name)(same, torch.zeros(9), start)
    assert got.isfinite().all()
    if name != "fltrust":
        close(got, rows[0])
    unmoved = build(name)(start.expand(9, -1), weights, start)
    close(unmoved, start)


@pytest.mark.parametrize("name", RULES)
def test_other_shapes_and_types(name: str) -> None:
    rows, weights, start = draw(6, width=24)
    flat = build(name, 24)(rows, weights, start)
    shaped = build(name, 24)(rows.view(9, 4, 6), weights, start.view(4, 6))
    assert shaped.shape == (4, 6)
    assert torch.equal(shaped.flatten(), flat)
    half = build(name, 24)(rows.bfloat16(), weights, start.bfloat16())
    assert half.dtype == torch.bfloat16
    assert half.isfinite().all()


@pytest.mark.parametrize("name", RULES)
def test_input_is_left_alone(name: str) -> None:
    given_to = draw(9)
    before = [t.clone() for t in given_to]
    build(name)(*given_to)
    assert all(torch.equal(a, b) for a, b in zip(given_to, before, strict=True))


def test_every_rule_says_what_it_is() -> None:
    for kind in RULES.values():
        assert kind.about
        assert kind.paper
        assert kind.__doc__
        assert all(o.help for o in describe(kind))


def test_options_are_checked() -> None:
    with pytest.raises(UsageError, match="did you mean 'krum'"):
        make_rule("krumm")
    with pytest.raises(UsageError, match="size"):
        make_rule("bucketing", {"size": 0})
    with pytest.raises(UsageError, match="krum"):
        make_rule("gas", {"base": "crum"})(*draw(0))
    assert make_rule("bucketing", {"base": Median()}) == Bucketing(base=Median())


# ---------------------------------------------------------------- numbers


def test_distances_survive_a_common_offset_and_one_enormous_row() -> None:
    """A float32 Gram matrix around zero, or around the mean, has nothing left of these distances."""
    rows, _, start = draw(0, n=8, width=2 * linear.BLOCK + 5, scale=1e-3)
    rows, start = rows + 100, torch.full_like(start, 100.0)
    rows[7] += 1e9
    exact = rows.double()
    wanted = ((exact[:, None] - exact[None]) ** 2).sum(-1)
    got = linear.squared_distances(rows, start)
    assert torch.allclose(got[:7, :7], wanted[:7, :7], rtol=1e-6)
    assert torch.allclose(got[7], wanted[7], rtol=1e-4)
    assert not got.diagonal().any()


def test_blocks_give_what_the_whole_would() -> None:
    rows, weights, start = draw(0, n=5, width=2 * linear.BLOCK + 5)
    close(linear.lengths(rows, start), (rows - start).double().norm(dim=1))
    close(linear.dots(rows, start, start), (rows - start).double() @ start.double(), atol=1e-3)
    close(linear.step(rows, start, weights), start + weights @ (rows - start), atol=1e-3)
    close(Median()(rows, weights, start), rows.median(0).values)


def test_own_rule() -> None:
    @dataclasses.dataclass(frozen=True)
    class Halfway(Rule):
        def combine(self, rows: Tensor, weights: Tensor, start: Tensor) -> Outcome:
            return Outcome((start + rows.mean(0)) / 2, torch.ones(len(rows), dtype=torch.bool))

    rows = torch.tensor([[2.0], [4.0], [float("nan")]])
    assert Halfway()(rows, torch.ones(3), torch.tensor([1.0])).item() == 2.0
