"""Attacks against their definitions, written out in NumPy, and against every rule."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.stats import norm
from torch import Tensor

from fedkin.errors import UsageError
from fedkin.options import describe
from fedkin.robust import ATTACKS, RULES, DataAttack, ReplyAttack, make_attack, make_rule
from fedkin.robust.attacks import (
    IPM,
    LIE,
    Adaptive,
    Backdoor,
    Garbage,
    Gaussian,
    InputNoise,
    Knowledge,
    LabelFlip,
    MinMax,
    MinSum,
    ModelReplacement,
    SignFlip,
    largest,
    lie_z,
)
from fedkin.robust.rules import FLTrust, Mean, MultiKrum, Rule, apply

cases = settings(max_examples=25, deadline=None)
seeds = st.integers(0, 10_000)
REPLIES = [n for n, kind in ATTACKS.items() if issubclass(kind, ReplyAttack)]
DATA = [n for n, kind in ATTACKS.items() if issubclass(kind, DataAttack)]


def draw(seed: int, n: int = 10, m: int = 3, width: int = 17) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(seed)
    malicious = torch.zeros(n, dtype=torch.bool)
    malicious[torch.from_numpy(rng.permutation(n)[:m])] = True
    return torch.tensor(rng.normal(0.3, 1.0, size=(n, width))).float(), malicious


def send(attack: ReplyAttack, updates: Tensor, malicious: Tensor, knowledge: Knowledge = "full") -> np.ndarray:
    sent = attack(updates, malicious, knowledge, np.random.default_rng(0))
    return sent.double().numpy()


def close(got: np.ndarray, wanted: object) -> None:
    np.testing.assert_allclose(got, np.broadcast_to(np.asarray(wanted, np.float64), got.shape), rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- definitions


@given(seed=seeds)
@cases
def test_sign_flip_and_model_replacement(seed: int) -> None:
    updates, malicious = draw(seed)
    own = updates[malicious].double().numpy()
    close(send(SignFlip(), updates, malicious), -own)
    close(send(ModelReplacement(), updates, malicious), 10 * own)
    close(send(ModelReplacement(factor=2.5), updates, malicious), 2.5 * own)


def test_gaussian_has_the_size_of_the_honest_update() -> None:
    updates, malicious = draw(0, width=20_000)
    updates *= torch.arange(1, 11)[:, None]
    sent = send(Gaussian(), updates, malicious)
    np.testing.assert_allclose(sent.std(1), updates[malicious].std(1).numpy(), rtol=0.03)
    assert np.abs(sent.mean(1) / sent.std(1)).max() < 0.03
    assert abs(np.corrcoef(sent)[0, 1]) < 0.05
    np.testing.assert_allclose(send(Gaussian(sigma=0.5), updates, malicious).std(1), 0.5, rtol=0.03)


@given(seed=seeds)
@cases
def test_lie(seed: int) -> None:
    updates, malicious = draw(seed, n=20, m=6)
    z = norm.ppf(9 / 14)
    for knowledge, seen in (("full", updates), ("own", updates[malicious])):
        x = seen.double().numpy()
        close(send(LIE(), updates, malicious, knowledge), x.mean(0) - z * x.std(0, ddof=1))
    x = updates.double().numpy()
    close(send(LIE(z=1.5), updates, malicious), x.mean(0) - 1.5 * x.std(0, ddof=1))


def test_lie_z_by_hand() -> None:
    assert lie_z(20, 6) == pytest.approx(0.366, abs=5e-4)  # s = 5, cdf 9/14
    assert lie_z(20, 4) == pytest.approx(norm.ppf(9 / 16))  # s = 7
    assert lie_z(10, 1) == 0.3  # s = 5, cdf 4/9: no positive z
    assert lie_z(4, 4) == 0.3  # nobody is benign
    assert lie_z(20, 15) == pytest.approx(norm.ppf(4 / 5))  # a majority needs nobody; one supporter is counted


@given(seed=seeds)
@cases
def test_ipm(seed: int) -> None:
    updates, malicious = draw(seed)
    x, bad = updates.double().numpy(), malicious.numpy()
    close(send(IPM(), updates, malicious), -10 * x[~bad].mean(0))
    close(send(IPM(epsilon=0.5), updates, malicious), -0.5 * x[~bad].mean(0))
    close(send(IPM(), updates, malicious, "own"), -10 * x[bad].mean(0))
    assert (x[~bad].mean(0) @ send(IPM(), updates, malicious)[0]) < 0


def sticks_out(attack: MinMax | MinSum, d: np.ndarray, x: np.ndarray) -> bool:
    to = ((d - x) ** 2).sum(1)
    between = ((x[:, None] - x[None]) ** 2).sum(-1)
    if isinstance(attack, MinMax):
        return bool(to.max() > between.max())
    if not attack.squared:
        to, between = np.sqrt(to), np.sqrt(between)
    return bool(to.sum() > (between.sum(1).max() if attack.bound == "max" else between.sum(1).min()))


@pytest.mark.parametrize("attack", [MinMax(), MinSum(), MinSum(bound="min"), MinSum(squared=False)], ids=str)
@pytest.mark.parametrize("knowledge", ["full", "own"])
@given(seed=seeds, scale=st.sampled_from([1e-6, 1.0, 1e6]))
@cases
def test_envelope_is_as_far_as_allowed(attack: MinMax | MinSum, knowledge: Knowledge, seed: int, scale: float) -> None:
    updates, malicious = draw(seed, m=4)
    updates *= scale
    x = (updates if knowledge == "full" else updates[malicious]).double().numpy()
    sent = send(attack, updates, malicious, knowledge)
    mean, direction = x.mean(0), -x.std(0, ddof=1)
    gamma = (sent[0] - mean) @ direction / (direction @ direction)
    assert gamma > 0
    np.testing.assert_allclose(sent[0], mean + gamma * direction, rtol=1e-4, atol=1e-5 * scale)
    assert (sent == sent[0]).all()
    assert not sticks_out(attack, mean + (1 - 1e-4) * gamma * direction, x)
    assert sticks_out(attack, mean + 1.01 * gamma * direction, x)


def test_min_max_by_hand() -> None:
    # -1, 0 and 1: mean 0, direction -1, and 2 is the largest distance: -1 is as far as one may go from 1.
    updates = torch.tensor([[-1.0], [0.0], [1.0]])
    sent = send(MinMax(), updates, torch.tensor([True, False, False]))
    assert sent.item() == pytest.approx(-1, rel=1e-4)
    # Min-Sum of distances: |d + 1| + |d| + |d - 1| = 3 |d| from 1 on, and 3 is what the outermost have.
    plain = send(MinSum(squared=False), updates, torch.tensor([True, False, False]))
    assert plain.item() == pytest.approx(-1, rel=1e-4)
    # Min-Sum: (d + 1)^2 + d^2 + (d - 1)^2 = 3 d^2 + 2 <= 5 (max) or <= 2 (min).
    assert send(MinSum(), updates, torch.tensor([True, False, False])).item() == pytest.approx(-1, rel=1e-4)
    assert send(MinSum(bound="min"), updates, torch.tensor([True, False, False])).item() == pytest.approx(0, abs=1e-6)


@given(limit=st.floats(1e-6, 1e6))
@cases
def test_largest_feasible(limit: float) -> None:
    assert largest(lambda g: g <= limit) == pytest.approx(limit, rel=2e-5)
    assert largest(lambda g: g <= limit) <= limit
    assert largest(lambda g: False) == 0


def received(updates: Tensor, malicious: Tensor, row: np.ndarray) -> Tensor:
    rows = updates.clone()
    rows[malicious] = torch.from_numpy(row).float()
    return rows


@pytest.mark.parametrize("knowledge", ["full", "own"])
@given(seed=seeds, t_norm=st.sampled_from([0.01, 1.0, 1000.0]))
@cases
def test_adaptive_is_as_long_as_norm_detection_allows(knowledge: Knowledge, seed: int, t_norm: float) -> None:
    updates, malicious = draw(seed)
    sent = send(Adaptive("norm", t_norm=t_norm), updates, malicious, knowledge)
    benign = updates[~malicious if knowledge == "full" else malicious].double().numpy().mean(0)
    assert (sent == sent[0]).all()
    assert np.linalg.norm(sent[0]) <= t_norm < 1.01 * np.linalg.norm(sent[0])
    close(sent[0] / np.linalg.norm(sent[0]), -benign / np.linalg.norm(benign))


@pytest.mark.parametrize("direction", ["mean", "spread"])
@pytest.mark.parametrize("spec", ["multi-krum", "krum:malicious=0.2", "clustered", "gas:parts=3;malicious=3"])
@given(seed=seeds)
@cases
@example(seed=4112)  # the clustered rule takes nothing in this direction
@example(seed=6810)  # it refuses a row just beyond the edge and takes a longer one again
def test_adaptive_goes_to_the_edge_of_what_a_rule_uses(spec: str, direction: str, seed: int) -> None:
    updates, malicious = draw(seed)
    updates += 1  # the benign go the same way, and -mean is another one
    name, _, options = spec.partition(":")
    rule = make_rule(name, dict(o.split("=") for o in options.split(";") if o))
    benign = updates[~malicious].double().numpy()
    p = -benign.mean(0) if direction == "mean" else -benign.std(0, ddof=1)
    sent = send(make_attack("adaptive", {"against": spec, "direction": direction, "most": 100}), updates, malicious)
    g = (sent[0] - benign.mean(0)) @ p / (p @ p)

    def theirs(g: float) -> tuple[int, int]:
        used = apply(rule, received(updates, malicious, benign.mean(0) + g * p), torch.ones(10), torch.zeros(17)).used
        return int(used[malicious].sum()), min(3, int(used.sum()))

    assert 0 < g <= 100
    nothing_passes = theirs(0.0)[0] < theirs(0.0)[1]  # clusters may leave out the benign mean itself
    if name == "clustered" and nothing_passes:
        assert g < 1e-6 or theirs((1 - 1e-3) * g)[0] == theirs((1 - 1e-3) * g)[1]
    elif name != "gas":  # deals coordinates by what it receives: nearly the same row can fare otherwise
        assert theirs((1 - 1e-3) * g)[0] == theirs((1 - 1e-3) * g)[1]
        beyond = [theirs(further * g) for further in (1.01, 1.003, 1.001, 1.0003, 1.0001)]
        assert g > 99 or any(taken < all_of_them for taken, all_of_them in beyond[: 1 if name != "clustered" else None])


def harm(rule: Rule, rows: Tensor, benign: Tensor) -> float:
    """How far the result falls short of the benign mean, along it."""
    mean = benign.mean(0)
    return float((mean - rule(rows, torch.ones(len(rows)), torch.zeros_like(mean))) @ mean / mean.norm())


@pytest.mark.parametrize("rule", [Mean(), MultiKrum()], ids=str)
@given(seed=seeds)
@cases
def test_adaptive_harms_more_than_lie(rule: Rule, seed: int) -> None:
    updates, malicious = draw(seed)
    benign = updates[~malicious]
    worse, lie = (
        harm(rule, received(updates, malicious, send(a, updates, malicious)), benign) for a in (Adaptive(rule), LIE())
    )
    assert worse > lie


@given(seed=seeds, cosine=st.sampled_from([-0.2, 0.3, 0.8]))
@cases
def test_adaptive_looks_like_the_mean_to_a_committee(seed: int, cosine: float) -> None:
    updates, malicious = draw(seed)
    mean = updates[~malicious].double().numpy().mean(0)
    sent = send(Adaptive("committee", cosine=cosine), updates, malicious)[0]
    assert np.linalg.norm(sent) == pytest.approx(np.linalg.norm(mean), rel=1e-5)
    away = -updates[~malicious].double().numpy().std(0, ddof=1)
    furthest = away @ mean / np.linalg.norm(away) / np.linalg.norm(mean)  # it turns to minus the spread, not beyond
    assert sent @ mean / np.linalg.norm(mean) ** 2 == pytest.approx(max(cosine, furthest), abs=1e-4)


def test_adaptive_says_at_once_what_it_does_not_know() -> None:
    with pytest.raises(UsageError, match="multi-krum"):
        make_attack("adaptive", {"against": "multikrum"})
    with pytest.raises(UsageError, match="malicious"):
        make_attack("adaptive", {"against": "krum:malicious=x"})


def test_garbage() -> None:
    updates, malicious = draw(0)
    assert np.isnan(send(ATTACKS["nan"](), updates, malicious)).all()  # type: ignore[arg-type]
    huge = send(Garbage(size=1e12), updates, malicious)
    assert huge.shape == (3, 17)
    assert np.abs(huge).max() > 1e11
    assert send(Garbage(kind="shape"), updates, malicious).shape == (3, 18)


# ---------------------------------------------------------------- all of them


@pytest.mark.parametrize("name", REPLIES)
@pytest.mark.parametrize("knowledge", ["full", "own"])
@pytest.mark.parametrize(("n", "m"), [(1, 1), (2, 1), (3, 3), (7, 1), (7, 6)])
def test_any_number_of_attackers(name: str, knowledge: Knowledge, n: int, m: int) -> None:
    updates, malicious = draw(n + m, n, m)
    before = updates.clone()
    attack = make_attack(name)
    assert isinstance(attack, ReplyAttack)
    sent = send(attack, updates, malicious, knowledge)
    assert sent.shape == (m, 17)
    assert np.isfinite(sent).all() or name == "nan"
    assert np.array_equal(sent, send(attack, updates, malicious, knowledge), equal_nan=True)
    assert torch.equal(updates, before)


@pytest.mark.parametrize("name", [n for n in REPLIES if n not in ("nan", "garbage")])
def test_own_knowledge_sees_nothing_of_the_benign(name: str) -> None:
    updates, malicious = draw(3)
    attack = make_attack(name)
    assert isinstance(attack, ReplyAttack)
    before = send(attack, updates, malicious, "own")
    updates[~malicious] *= -7
    assert np.array_equal(send(attack, updates, malicious, "own"), before)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", REPLIES)
@pytest.mark.parametrize("strength", [0.0, 1e-20, 1.0, 1e10, 1e19, 1e38])
def test_no_attack_at_any_strength_makes_a_rule_return_nan(rule: str, name: str, strength: float) -> None:
    updates, malicious = draw(5)
    start = torch.linspace(-1, 1, 17)
    attack = make_attack(name)
    assert isinstance(attack, ReplyAttack)
    rows = start + updates
    sent = attack(updates, malicious, "full", np.random.default_rng(0)) * strength
    rows[malicious] = start + sent
    combine = FLTrust(update=updates[~malicious].mean(0)) if rule == "fltrust" else make_rule(rule)
    for few in (rows, rows[:2], rows[malicious]):
        assert combine(few, torch.arange(1.0, len(few) + 1), start).isfinite().all()


def test_every_attack_says_what_it_is() -> None:
    for kind in ATTACKS.values():
        assert kind.about
        assert kind.__doc__
        assert all(o.help for o in describe(kind))
    with pytest.raises(UsageError, match="did you mean 'ipm'"):
        make_attack("imp")
    with pytest.raises(UsageError, match="epsilon"):
        make_attack("ipm", {"epsilon": 0})


# ---------------------------------------------------------------- data


def images(n: int = 50, side: int = 8) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.integers(0, 200, (n, 1, side, side)).astype(np.uint8), rng.integers(0, 10, n)


def test_label_flips() -> None:
    x, y = images()
    rng = np.random.default_rng(0)
    assert LabelFlip().poison(x, y, 10, 0, rng)[1].tolist() == [(v + 1) % 10 for v in y]
    assert LabelFlip("mirror").poison(x, y, 10, 0, rng)[1].tolist() == [9 - v for v in y]
    drawn = LabelFlip("random").poison(x, y, 10, 0, rng)[1]
    assert set(drawn.tolist()) <= set(range(10))
    assert 0.6 < (drawn != y).mean() < 1


def test_input_noise_is_not_in_the_data() -> None:
    """It comes with each batch, other noise in every round."""
    x, y = images()
    noisy, labels = InputNoise(0.1).poison(x, y, 10, 0, np.random.default_rng(0))
    assert np.array_equal(noisy, x)
    assert np.array_equal(labels, y)
    with pytest.raises(UsageError, match="token"):
        InputNoise().poison(np.zeros((3, 5), np.int64), y[:3], 10, 0, np.random.default_rng(0))


def test_backdoor_marks_a_share_with_the_patch_and_the_target() -> None:
    x, y = images()
    attack = Backdoor(target=4, share=0.2)
    bad_x, bad_y = attack.poison(x, y, 10, 0, np.random.default_rng(1))
    changed = (bad_x != x).any((1, 2, 3))
    assert changed.sum() == 10
    assert (bad_x[changed][:, :, 5:, 5:] == 255).all()
    assert (bad_x[:, :, :5] == x[:, :, :5]).all()
    assert (bad_y[changed] == 4).all()
    assert np.array_equal(bad_y[~changed], y[~changed])
    with pytest.raises(UsageError, match="target"):
        Backdoor(target=10).poison(x, y, 10, 0, np.random.default_rng(1))


@pytest.mark.parametrize("trigger", ["patch", "bars"])
def test_distributed_trigger_is_dealt_to_attackers(trigger: str) -> None:
    x = np.zeros((2, 3, 32, 32), np.uint8)
    attack = make_attack("backdoor", {"trigger": trigger, "distributed": True})
    assert isinstance(attack, Backdoor)
    quarters = [attack.triggered(x, rank) > 0 for rank in range(4)]
    whole = attack.triggered(x) > 0
    assert (np.sum(quarters, axis=0) == whole).all()  # together all of it, and nothing twice
    assert np.array_equal(attack.triggered(x, 5) > 0, quarters[1])
    assert np.array_equal(Backdoor().triggered(x, 1), Backdoor().triggered(x))
    if trigger == "bars":
        rows, columns = np.nonzero(whole[0, 0])
        assert set(rows.tolist()) == {0, 4}
        assert set(columns.tolist()) == {*range(6), *range(9, 15)}
        with pytest.raises(UsageError, match="patch"):
            attack.triggered(np.zeros((2, 1, 8, 8), np.uint8))


def test_trigger_on_other_kinds_of_data() -> None:
    features = np.linspace(0, 1, 20, dtype=np.float32).reshape(2, 10)
    assert (Backdoor().triggered(features)[:, -3:] == 1).all()
    assert np.array_equal(Backdoor().triggered(features)[:, :-3], features[:, :-3])
    assert Backdoor().triggered(np.zeros((0, 1, 8, 8), np.uint8)).shape == (0, 1, 8, 8)


def test_backdoor_boost() -> None:
    updates, malicious = draw(0)
    own = updates[malicious].double().numpy()
    close(send(Backdoor(), updates, malicious), own)
    close(send(Backdoor(scale=100), updates, malicious), 100 * own)
    close(send(Backdoor(scale=0), updates, malicious), 10 * own)


@pytest.mark.parametrize("name", DATA)
def test_data_attacks_leave_the_original_alone(name: str) -> None:
    x, y = images()
    before = x.copy(), y.copy()
    attack = make_attack(name)
    assert isinstance(attack, DataAttack)
    bad = attack.poison(x, y, 10, 0, np.random.default_rng(0))
    assert np.array_equal(x, before[0])
    assert np.array_equal(y, before[1])
    assert name == "input-noise" or not (np.array_equal(bad[0], x) and np.array_equal(bad[1], y))
    assert (bad[0].dtype, bad[1].dtype, bad[0].shape) == (x.dtype, y.dtype, x.shape)
