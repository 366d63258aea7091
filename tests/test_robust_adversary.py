"""The adversary at `ask`, what it does to data, how detection is counted, and whole runs under attack."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import torch
from torch import Tensor

from fedkin.config import Config, make_config
from fedkin.core.cohort import Cohort
from fedkin.core.federation import Answer, Each, Federation, Masked, Replies, gate
from fedkin.errors import UsageError
from fedkin.robust import Adversary, Detection, Rates, Verdict, Watched, detection, make_attack, make_rule
from fedkin.robust.attacks import IPM, LIE, Backdoor, Garbage, Gaussian, LabelFlip, NotANumber, SignFlip
from fedkin.robust.rules import MultiKrum
from fedkin.rounds import Job, load_data, prepare

IDS = np.arange(10)


def reply(seed: int = 0, n: int = 10, width: int = 6) -> Tensor:
    return torch.tensor(np.random.default_rng(seed).normal(size=(n, width))).float()


def tampered(adversary: Adversary, answer: Answer, round: int = 0, **message: object) -> Answer:
    return adversary.tamper(IDS, "train", message, answer, round)


def tensor(value: Tensor | Masked) -> Tensor:
    assert isinstance(value, Tensor)
    return value


# ---------------------------------------------------------------- who


def test_who_is_malicious_follows_from_the_seed() -> None:
    fixed = Adversary(SignFlip(), 20, 0.3)
    assert fixed.malicious().sum() == 6
    assert np.array_equal(fixed.malicious(0), fixed.malicious(7))
    assert np.array_equal(fixed.malicious(), Adversary(IPM(), 20, 0.3).malicious())
    ending = Adversary(SignFlip(), 20, 0.3, redraw=True, rounds=3)
    assert [ending.malicious(r).sum() for r in (2, 3)] == [6, 0]  # the last tuning is nobody's round
    assert any(
        not np.array_equal(fixed.malicious(), Adversary(SignFlip(), 20, 0.3, seed=s).malicious()) for s in (1, 2)
    )
    assert Adversary(SignFlip(), 100, 0.29).malicious().sum() == 29
    assert not Adversary(SignFlip(), 3, 0.3).malicious().any()
    moving = Adversary(SignFlip(), 20, 0.3, redraw=True)
    assert len({moving.malicious(r).tobytes() for r in range(5)}) > 1
    assert all(moving.malicious(r).sum() == 6 for r in range(5))


# ---------------------------------------------------------------- replies


def test_updates_count_from_what_was_received() -> None:
    adversary = Adversary(SignFlip(), 10)
    bad, sent, shared, own = adversary.malicious(), reply(), reply(1, 1)[0], reply(2)
    got = tensor(tampered(adversary, Answer(IDS, {"model": sent}), model=shared).replies["model"])
    assert torch.allclose(got[bad], 2 * shared - sent[bad])
    assert torch.equal(got[~bad], sent[~bad])
    got = tensor(tampered(adversary, Answer(IDS, {"model": sent}), model=Each(own)).replies["model"])
    assert torch.allclose(got[bad], (2 * own - sent)[bad])
    # under another name: the only tensor of the message with that shape
    got = tensor(tampered(adversary, Answer(IDS, {"body": sent}), model=shared, scale=0.5).replies["body"])
    assert torch.allclose(got[bad], 2 * shared - sent[bad])
    # nothing, or nothing certain, to count from: zero
    for message in ({}, {"model": shared[:3]}, {"a": shared, "b": shared}):
        got = tensor(tampered(adversary, Answer(IDS, {"body": sent}), **message).replies["body"])
        assert torch.equal(got[bad], -sent[bad])


def test_what_is_called_an_update_is_one_already() -> None:
    """FedCAP sends updates as long as the model it received."""
    adversary = Adversary(SignFlip(), 10)
    bad, sent, own = adversary.malicious(), reply(), reply(2)
    got = tensor(tampered(adversary, Answer(IDS, {"update": sent}), model=Each(own)).replies["update"])
    assert torch.equal(got[bad], -sent[bad])
    config = make_config(
        {
            "method": "fedcap",
            "clients": 6,
            "rounds": 1,
            "epochs": 1,
            "partition": "iid",
            "malicious": 0.5,
            "samples_per_client": 20,
        }
    )
    norms = []
    for attack in ("none", "sf"):  # a sign flip is as long as the honest update: nobody is removed for it
        job = prepare(dataclasses.replace(config, attack=attack, given=()))
        job.advance()
        norms.append(next(n.value for n in job.fed.notes if n.name == "norms"))
    assert torch.allclose(*norms)


def test_each_row_belongs_to_the_client_that_answered() -> None:
    adversary = Adversary(SignFlip(), 10)
    own, answered = reply(2), np.array([1, 2, 4, 5, 7, 8, 9])
    sent = reply(0, 7)
    got = tensor(tampered(adversary, Answer(answered, {"model": sent}), model=Each(own)).replies["model"])
    bad = adversary.malicious()[answered]
    assert 0 < bad.sum() < 7
    assert torch.allclose(got[bad], (2 * own[answered] - sent)[bad])
    assert torch.equal(got[~bad], sent[~bad])


def test_everything_else_is_left_alone() -> None:
    adversary = Adversary(IPM(), 10)
    honest = {
        "model": reply(),
        "count": torch.arange(10),
        "flags": torch.ones(10, 2, dtype=torch.bool),
        "scores": torch.rand(10, 4),
    }
    before = {k: v.clone() for k, v in honest.items()}
    got = tampered(adversary, Answer(IDS, dict(honest), failed={3: "why"})).replies
    assert not torch.equal(tensor(got["model"]), before["model"])
    for name in ("count", "flags", "scores"):
        assert torch.equal(tensor(got[name]), before[name])
    assert all(torch.equal(honest[k], before[k]) for k in honest)  # the honest answer is not written into
    nobody = Answer(IDS[~adversary.malicious()], {"model": reply(0, 7)})
    assert tampered(adversary, nobody) is nobody


def test_replies_of_any_shape() -> None:
    adversary = Adversary(LIE(z=1.0), 10)
    sent, base = reply(width=12).view(10, 3, 4), reply(1, 1, 12).view(3, 4)
    got = tensor(tampered(adversary, Answer(IDS, {"prototypes": sent}), prototypes=base).replies["prototypes"])
    d = (sent - base).double()
    wanted = base + d.mean(0) - d.std(0)
    assert torch.allclose(got[adversary.malicious()].double(), wanted.expand(3, 3, 4), atol=1e-5)
    flat = tensor(tampered(adversary, Answer(IDS, {"loss": torch.rand(10)})).replies["loss"])
    assert flat.shape == (10,)


def test_only_what_travels_under_a_mask_is_changed() -> None:
    adversary = Adversary(SignFlip(), 10)
    sent, mask = reply(), reply(5) > 0
    got = tampered(adversary, Answer(IDS, {"model": Masked(sent, mask)})).replies["model"]
    assert isinstance(got, Masked)
    bad = torch.from_numpy(adversary.malicious())[:, None]
    assert torch.equal(got.values, torch.where(bad & mask, -sent, sent))
    assert torch.equal(got.mask, mask)


def test_draws_follow_from_seed_round_and_phase() -> None:
    def sent(seed: int = 0, round: int = 0, phase: str = "train") -> Tensor:
        adversary = Adversary(Gaussian(), 10, 1.0, seed=seed)
        return tensor(adversary.tamper(IDS, phase, {}, Answer(IDS, {"model": reply()}), round).replies["model"])

    assert torch.equal(sent(), sent())
    assert all(not torch.equal(sent(), other) for other in (sent(seed=1), sent(round=1), sent(phase="tune")))


def test_knowledge_is_passed_on() -> None:
    sent = reply()
    for knowledge in ("own", "full"):
        adversary = Adversary(IPM(epsilon=1), 10, knowledge=knowledge)
        bad = adversary.malicious()
        seen = sent[bad] if knowledge == "own" else sent[~bad]
        got = tensor(tampered(adversary, Answer(IDS, {"model": sent})).replies["model"])
        assert torch.allclose(got[bad], -seen.mean(0).expand(3, -1), atol=1e-6)


@pytest.mark.parametrize("name", ["scores", "votes", "correct", "right"])
def test_lies_about_votes(name: str) -> None:
    adversary = Adversary(LabelFlip(), 10, lie_about_votes=True)
    bad = adversary.malicious()

    def lied(votes: Tensor) -> Tensor:
        got = tensor(tampered(adversary, Answer(IDS, {name: votes})).replies[name])
        assert np.array_equal(got[~bad].numpy(), votes[~bad].numpy(), equal_nan=votes.is_floating_point())
        assert got.dtype == votes.dtype
        return got[bad]

    assert lied(torch.tensor([[0.1, 0.5, 0.9]]).expand(10, 3)).flatten().tolist() == pytest.approx([0.9, 0.5, 0.1] * 3)
    assert lied(torch.tensor([[3, 8, 4]]).expand(10, 3))[0].tolist() == [8, 3, 7]
    assert lied(torch.tensor([[True, False]]).expand(10, 2))[0].tolist() == [False, True]
    assert lied(torch.full((10,), 0.2)).tolist() == pytest.approx([0.8] * 3)
    by_class = torch.tensor([[[1, 9], [3, 8], [2, 4]]]).expand(10, 3, 2)  # three bodies, two classes
    assert lied(by_class)[0].tolist() == [[3, 4], [1, 5], [2, 9]]
    missing = lied(torch.tensor([[0.1, float("nan"), 0.9]]).expand(10, 3))[0]
    assert missing.isnan().tolist() == [False, True, False]
    assert missing[[0, 2]].tolist() == pytest.approx([0.9, 0.1])


@pytest.mark.parametrize("attack", [NotANumber(), Garbage(kind="shape")], ids=str)
def test_the_gate_counts_senders_of_nonsense_as_failed(attack: NotANumber | Garbage) -> None:
    adversary = Adversary(attack, 10)
    answer = tampered(
        adversary,
        Answer(IDS, {"model": reply(), "mask": Masked(reply(), reply() > 0), "count": torch.arange(10)}),
        model=reply(1, 1)[0],
    )
    kept, reasons = gate(answer)
    assert sorted(reasons) == np.flatnonzero(adversary.malicious()).tolist()
    assert len(tensor(kept.replies["count"])) == len(kept.ids)
    benign = tensor(kept.replies["count"])[np.isin(kept.ids, list(reasons), invert=True)]
    assert benign.tolist() == np.flatnonzero(~adversary.malicious()).tolist()


class Lone:
    """An engine as on a network: it stacks what came, whatever it is, and knows what it should be."""

    width = 3

    def call(self, ids: np.ndarray, function: str, message: object, round: int) -> Answer:
        right = {"model": ((3,), torch.float32, False)}
        return Answer(ids, {"model": torch.zeros(len(ids), self.width)}, right=right)


def train() -> None:
    """Stands for a client function: only its name matters here."""


@pytest.mark.parametrize("asked", [1, 2, 4])
def test_what_is_right_is_not_decided_by_replies(asked: int) -> None:
    engine = Lone()
    fed = Federation(engine, np.ones(4, np.int64))
    assert len(fed.ask(fed.all[:asked], train)) == asked
    engine.width = 5
    assert len(fed.ask(fed.all[:asked], train)) == 0
    assert [f.reason for f in fed.failures] == ["'model' has shape [5] instead of [3]"] * asked


def test_a_lone_reply_of_the_wrong_kind_does_not_reach_a_method() -> None:
    config = dataclasses.replace(RUN, rounds=2, participation=0.3)

    def tamper(ids: np.ndarray, phase: str, message: object, answer: Answer, round: int) -> Answer:
        kept = [1, len(ids)][round]  # one, then everybody
        return Answer(answer.ids[:kept], {n: tensor(v)[:kept, :-1] for n, v in answer.replies.items()})

    job = prepare(config, tamper=tamper)
    before = job.method.model.clone()
    job.advance()
    job.advance()
    assert torch.equal(job.method.model, before)
    assert "instead of" in job.fed.failures[-1].reason


# ---------------------------------------------------------------- data


def test_poison_changes_the_attackers_training_samples_only() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 200, (100, 1, 8, 8)).astype(np.uint8), rng.integers(0, 10, 100)
    parts = [np.arange(10 * c, 10 * c + 8) for c in range(10)]  # two of each ten are for testing
    before = x.copy(), y.copy()
    adversary = Adversary(LabelFlip(), 10)
    mine = np.concatenate([parts[c] for c in np.flatnonzero(adversary.malicious())])
    bad_x, bad_y = adversary.poison(x, y, parts, 10)
    assert np.array_equal(bad_x, x)
    assert np.flatnonzero(bad_y != y).tolist() == sorted(mine.tolist())
    bad_x, bad_y = Adversary(Backdoor(share=1.0, target=11), 10).poison(x, y, parts, 12)
    assert np.flatnonzero((bad_x != x).any((1, 2, 3))).tolist() == sorted(mine.tolist())
    assert np.flatnonzero(bad_y != y).tolist() == sorted(mine.tolist())
    assert np.array_equal(x, before[0])
    assert np.array_equal(y, before[1])
    assert Adversary(SignFlip(), 10).poison(x, y, parts, 10)[0] is x
    everybodys = np.concatenate(parts)
    _, all_bad = Adversary(LabelFlip(), 10, redraw=True).poison(x, y, parts, 10)
    assert np.flatnonzero(all_bad != y).tolist() == everybodys.tolist()


def who_learns_otherwise(attackers: str) -> list[list[bool]]:
    """Three rounds: whose training differs from training on clean labels; it must be the malicious clients."""
    share = {"malicious": 0.5} if attackers in ("fixed", "redrawn") else {}
    config = make_config(
        {
            "clients": 6,
            "partition": "iid",
            "rounds": 3,
            "epochs": 1,
            "attack": "lf",
            **share,
            "attackers": attackers,
            "samples_per_client": 20,
        }
    )
    job = prepare(config)
    assert job.adversary is not None
    rounds = []
    for round in range(3):
        attacked, clean = (
            Cohort(site, np.arange(6), round, "train").fit(job.site.initial)
            for site in (job.site, dataclasses.replace(job.site, poisoned=None))
        )
        changed = (attacked != clean).any(1).tolist()
        assert changed == job.adversary.malicious(round).tolist()
        rounds.append(changed)
    return rounds


def test_attackers_train_on_flipped_labels_in_their_turn() -> None:
    fixed, redrawn = who_learns_otherwise("fixed"), who_learns_otherwise("redrawn")
    assert fixed[0] == fixed[1] == fixed[2]
    assert not redrawn[0] == redrawn[1] == redrawn[2]


def test_attackers_can_be_named() -> None:
    assert who_learns_otherwise("4+1") == [[False, True, False, False, True, False]] * 3
    settings = {"clients": 6, "partition": "iid", "samples_per_client": 20, "attack": "sf", "rounds": 1, "epochs": 1}
    job = prepare(make_config({**settings, "attackers": "0+2+3"}))
    assert job.counted.ids.tolist() == [1, 4, 5]  # whose accuracy counts
    mistakes = {
        "6": "'6' is no client",
        "1+-1": "'-1' is no client",
        "1+": "'' is no client",
        "2+02": "twice",
        "often": "fixed, redrawn, or the numbers of clients from 0 to 5",
    }
    for wrong, why in mistakes.items():
        with pytest.raises(UsageError, match=re.escape(why)):
            prepare(make_config({**settings, "attackers": wrong}))


def test_triggered_inputs() -> None:
    x = np.zeros((4, 1, 8, 8), np.uint8)
    adversary = Adversary(Backdoor(distributed=True), 10)
    assert (adversary.triggered(x) == 255).sum() == 4 * 9
    with pytest.raises(UsageError, match="trigger"):
        Adversary(SignFlip(), 10).triggered(x)


# ---------------------------------------------------------------- detection


def test_rates_by_hand() -> None:
    malicious = np.array([True, True, True, False, False, False, False, False])
    found = np.array([True, True, False, True, False, False, False, False])
    assert Rates.of(found, malicious) == Rates(6 / 8, 1 / 5, 1 / 3)
    assert np.isnan(Rates.of(found[3:], malicious[3:]).false_negative)


def test_detection_over_rounds() -> None:
    malicious = np.array([True, True, True, False, False])
    everyone = np.arange(5)
    verdicts = [
        Verdict(0, everyone, np.array([False, True, True, True, False])),
        Verdict(1, everyone, np.array([False, False, True, True, True])),
        Verdict(2, np.array([1, 2, 3]), np.array([True, True, True])),  # client 1 comes back
        Verdict(3, np.array([1, 3, 4]), np.array([False, True, True])),
    ]
    found = detection(malicious, verdicts)
    assert found.gone == {0: 0, 1: 3, 2: None}
    assert found.overall == Rates(4 / 5, 0.0, 1 / 3)
    assert found.rounds[0] == Rates(2 / 5, 1 / 2, 2 / 3)
    assert found.rounds[2].false_negative == 1.0
    assert found.table()[-1] == {"round": "all", "DAcc": 80.0, "FPR": 0.0, "FNR": pytest.approx(100 / 3)}
    assert [line["round"] for line in found.table()] == ["0", "1", "2", "3", "all"]
    removed = detection(malicious, verdicts, {2: 5, 4: 1})
    assert removed.gone[2] == 5
    assert removed.overall == Rates(4 / 5, 1 / 2, 0.0)
    assert detection(malicious, []) == Detection(Rates(2 / 5, 0.0, 1.0), {}, {0: None, 1: None, 2: None})


def test_a_watched_rule_remembers() -> None:
    watched = Watched(MultiKrum())
    rows = reply()
    assert torch.equal(watched(rows, torch.ones(10), rows[0]), MultiKrum()(rows, torch.ones(10), rows[0]))
    assert watched.last is not None
    assert watched.last.used.sum() == 7


# ---------------------------------------------------------------- whole runs

RUN = Config(
    data="digits",
    clients=10,
    partition="iid",
    rounds=4,
    epochs=1,
    lr=0.1,
    device="cpu",
    way="each",
    samples_per_client=60,
)


def finished(adversary: Adversary | None = None, rule: str = "mean") -> Job:
    """A run to its end, with the attackers' training data and replies as they are under attack."""
    dataset, split = load_data(RUN)
    if adversary is not None:
        x, y = adversary.poison(dataset.x, dataset.y, split.train, dataset.classes)
        dataset = dataclasses.replace(dataset, x=x, y=y)
    tamper = adversary.tamper if adversary is not None else None
    job = prepare(RUN, data=(dataset, split), tamper=tamper, average=make_rule(rule))
    for _ in range(RUN.rounds):
        job.advance()
    return job


def accuracy(attack: str, rule: str = "mean", share: float = 0.3) -> float:
    return finished(Adversary(make_attack(attack), 10, share), rule).history[-1].accuracy.micro


@pytest.fixture(scope="module")
def plain() -> float:
    return finished().history[-1].accuracy.micro


@pytest.mark.parametrize("attack", ["ipm", "sf"])
def test_a_robust_rule_holds_where_the_mean_breaks(plain: float, attack: str) -> None:
    broken = accuracy(attack, "mean")
    assert plain > broken + (20 if attack == "ipm" else 0)
    for rule in ("multi-krum", "trimmed-mean", "gas"):
        assert accuracy(attack, rule) > broken


def test_wrong_labels_mislead(plain: float) -> None:
    assert accuracy("lf", share=0.8) < plain - 20


def test_a_backdoor_opens() -> None:
    """Models trained with the trigger see the target class in it, models trained without do not."""
    adversary = Adversary(Backdoor(target=3, share=0.5), 10, 0.5)
    dataset, split = load_data(RUN)
    test = np.concatenate(split.test)
    shown = adversary.triggered(dataset.x[test[dataset.y[test] != 3]])

    def success(job: Job) -> float:
        with torch.no_grad():
            inputs = (torch.from_numpy(shown).float() / 255 - dataset.mean) / dataset.std
            return float((job.result().personal(0).network(inputs).argmax(1) == 3).float().mean())

    assert success(finished(adversary)) > success(finished()) + 0.2


@pytest.mark.parametrize("attack", [NotANumber(), Garbage(kind="shape")], ids=str)
def test_senders_of_nonsense_fail_and_the_run_goes_on(plain: float, attack: NotANumber | Garbage) -> None:
    adversary = Adversary(attack, 10)
    job = finished(adversary)
    assert {f.client for f in job.fed.failures} == set(np.flatnonzero(adversary.malicious()).tolist())
    assert len(job.fed.failures) == 3 * RUN.rounds
    assert job.history[-1].accuracy.micro > plain / 2


def test_types_fit_the_federation() -> None:
    """`Adversary.tamper` and rules are what `Federation` takes."""
    fed = Federation(None, np.ones(10, np.int64), tamper=Adversary(SignFlip(), 10).tamper, average=MultiKrum())  # type: ignore[arg-type]
    rows = reply()
    got = Replies(fed.all, {"model": rows}, {}, MultiKrum()).mean("model", rows[0])
    assert torch.equal(got, MultiKrum()(rows, torch.ones(10), rows[0]))
