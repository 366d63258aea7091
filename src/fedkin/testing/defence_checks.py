"""What every attack and every rule promises."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fedkin.config import make_config
from fedkin.options import validated
from fedkin.robust import ATTACKS, RULES, Adversary, Attack, DataAttack, ReplyAttack, Rule, Watched, apply
from fedkin.rounds import prepare
from fedkin.testing.tiny import federation, finished, personal_rows
from fedkin.testing.worlds import CLASSES, Network


def check_attack(attack: str | type[Attack], **options: Any) -> None:
    """An attack sends rows of the right shape, leaves what it was given alone, repeats itself, and can be run."""
    forged = _made(ATTACKS, attack, options)
    assert isinstance(forged, DataAttack | ReplyAttack), "an attack is a ReplyAttack or a DataAttack"
    if isinstance(forged, ReplyAttack):
        _sends_rows(forged)
    if isinstance(forged, DataAttack):
        _poisons_a_copy(forged)
    for method in ("fedavg", "ditto"):
        _bears(method, forged, None)


def _sends_rows(attack: ReplyAttack) -> None:
    updates = torch.from_numpy(np.random.default_rng(0).standard_normal((5, 7))).float()
    for count in (1, 2, 5):
        malicious = torch.arange(5) < count
        for knowledge in ("own", "full"):
            given = updates.clone()
            one = attack(given, malicious, knowledge, np.random.default_rng(1))
            assert torch.equal(given, updates), "the attack changed the updates it was shown"
            assert len(one) == count, f"{count} malicious clients send {len(one)} rows"
            two = attack(given, malicious, knowledge, np.random.default_rng(1))
            assert torch.equal(one.nan_to_num(), two.nan_to_num()), "the same generator gives other rows"


def _poisons_a_copy(attack: DataAttack) -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((9, 3, 8, 8)).astype(np.float32), rng.integers(0, CLASSES, 9)
    before = x.copy(), y.copy()
    bad_x, bad_y = attack.poison(x, y, CLASSES, 0, np.random.default_rng(1))
    assert np.array_equal(x, before[0]), "the attack changed the samples it was given: poison a copy"
    assert np.array_equal(y, before[1]), "the attack changed the labels it was given: poison a copy"
    assert len(bad_x) == len(bad_y), f"{len(bad_x)} samples with {len(bad_y)} labels"
    assert bad_x.shape[1:] == x.shape[1:], f"samples of shape {bad_x.shape[1:]} instead of {x.shape[1:]}"
    assert ((bad_y >= 0) & (bad_y < CLASSES)).all(), "a label that is no class"


# ---------------------------------------------------------------- rules


def check_rule(rule: str | type[Rule], **options: Any) -> None:
    """A rule gives one finite row, whatever arrives, says who had a say, and can be run under attack."""
    made = _made(RULES, rule, options)
    rng = np.random.default_rng(0)
    start = torch.from_numpy(rng.standard_normal(7)).float()
    for count in (1, 2, 9):
        rows = start + torch.from_numpy(rng.standard_normal((count, 7))).float()
        weights = torch.arange(1.0, count + 1)
        given = rows.clone()
        used = made.combine(rows, weights, start).used
        assert used.shape == (count,), "`used` says for each row whether it had a say"
        assert used.dtype == torch.bool, "`used` says for each row whether it had a say"
        one, two = apply(made, rows, weights, start), apply(made, rows, weights, start)
        assert torch.equal(rows, given), "the rule changed the rows it was given"
        assert one.row.shape == start.shape, f"a row of shape {tuple(one.row.shape)} instead of {tuple(start.shape)}"
        assert torch.isfinite(one.row).all(), f"NaN or infinity from {count} finite rows"
        assert torch.equal(one.row, two.row), "the same rows give another row"
        hostile = rows.clone()
        hostile[0] = torch.nan
        assert torch.isfinite(made(hostile, weights, start)).all(), "one row of NaN breaks the result"
    same = apply(made, start.repeat(4, 1), torch.ones(4), start).row
    assert torch.allclose(same, start, atol=1e-4), "four equal rows do not give that row"
    for attack in ("sf", "gaussian"):
        _bears("fedavg", ATTACKS[attack](), made)


def _made(registry: Any, kind: Any, options: Mapping[str, Any]) -> Any:
    """With checked options, as the command line would build it."""
    name = kind if isinstance(kind, str) else kind.__name__
    return validated(registry[kind] if isinstance(kind, str) else kind, options, name)


def _bears(method: str, attack: Attack, rule: Rule | None) -> None:
    """Two rounds with a malicious client: nobody benign is left with a broken model."""
    sizes = (9, 6, 4, 5)
    dataset, split = federation(sizes)
    config = make_config(
        {"method": method, "rounds": 2, "epochs": 1, "batch": 4, "lr": 0.1, "device": "cpu", "way": "each"}
    )
    adversary = Adversary(attack, len(sizes), 0.25, 0)
    average = None if rule is None else Watched(rule)
    job = prepare(config, model=Network(), data=(dataset, split), tamper=adversary.tamper, average=average)
    adversary.poison_site(job.site, dataset.x, dataset.y)
    finished(job)
    benign = torch.from_numpy(~adversary.malicious())
    assert torch.isfinite(personal_rows(job)[benign]).all(), f"{method}: a benign client's model holds NaN or infinity"
