"""What every method, attack and rule must stand, whatever its paper says; for your own as for ours.

    from fedkin.testing import METHOD_CHECKS, check_attack, check_method, check_rule

    check_method(MyMethod, {"lam": 0.5})        # a class or a registered name; AssertionError says what is wrong

or one test a promise, with pytest:

    @pytest.mark.parametrize("check", METHOD_CHECKS, ids=lambda c: c.__name__)
    def test_my_method(check):
        check(MyMethod)

The federation is tiny and unpleasant: a client with one sample, a class that nobody has, few rounds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedkin.config import make_config
from fedkin.core.federation import Answer, Faults, Masked, Tamper, difference, spec_of
from fedkin.data import Dataset, Split
from fedkin.engines.rehearsal import Rehearsal
from fedkin.engines.simulator import Simulator
from fedkin.methods import METHODS, Method
from fedkin.methods.base import REPORTS
from fedkin.options import validated
from fedkin.robust import ATTACKS, RULES, Adversary, Attack, DataAttack, ReplyAttack, Rule, Watched, apply
from fedkin.rounds import Job, prepare

Kind = str | type[Method]
Check = Callable[..., None]
FEATURES, CLASSES = 6, 4  # of the four classes only three occur


def federation(sizes: tuple[int, ...] = (9, 6, 1), tests: int = 3, seed: int = 0) -> tuple[Dataset, Split]:
    """Clients of these training sizes; the last class is nobody's."""
    rng = np.random.default_rng(seed)
    total = sum(sizes) + tests * len(sizes)
    y = rng.integers(0, CLASSES - 1, total)
    x = (rng.standard_normal((total, FEATURES)) + y[:, None]).astype(np.float32)
    edges = np.cumsum([0, *[n + tests for n in sizes]])
    rows = [np.arange(a, b) for a, b in pairwise(edges)]
    nobody = tuple(r[:0] for r in rows)
    split = Split(
        tuple(r[tests:] for r in rows),
        nobody,
        tuple(r[:tests] for r in rows),
        tuple(f"client-{i}" for i in range(len(sizes))),
    )
    return Dataset("tiny", x, y, CLASSES), with_validation(split)


def with_validation(split: Split) -> Split:
    """A last training sample for validation wherever more than three are left."""
    spare = [r[-1:] if len(r) > 3 else r[:0] for r in split.train]
    train = tuple(r[: len(r) - len(v)] for r, v in zip(split.train, spare, strict=True))
    return replace(split, train=train, validation=tuple(spare))


class Network(nn.Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8) if norm else nn.Identity(), nn.ReLU())
            self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(x))
        return logits


def job_of(
    method: Kind,
    options: Mapping[str, Any] | None = None,
    *,
    sizes: tuple[int, ...] = (9, 6, 1),
    tamper: Tamper | None = None,
    norm: bool = False,
    **settings: Any,
) -> Job:
    """A run on the tiny federation, ready to go."""
    named = {"method": method} if isinstance(method, str) else {"method": method.__name__.lower()}
    defaults = {"rounds": 2, "epochs": 1, "batch": 4, "lr": 0.1, "device": "cpu", "way": "each", "init": "given"}
    values = {**defaults, **named, **settings, "options": dict(options or {})}
    config = make_config(values, given=())  # the same for every method, whether it has a use for all of it or not
    kind = METHODS[method] if isinstance(method, str) else method
    return prepare(config, method=kind, model=Network(norm), data=federation(sizes), tamper=tamper)


def finished(job: Job) -> Job:
    for _ in range(job.config.rounds):
        job.advance()
    job.finish()
    return job


def personal_rows(job: Job) -> Tensor:
    return job.rows()


def sane(job: Job) -> None:
    """Nobody's model is broken, and every client can have its own."""
    rows = personal_rows(job)
    assert rows.shape == (len(job.fed.all), job.site.layout.width)
    assert torch.isfinite(rows).all(), "a personal model holds NaN or infinity"
    for value in tensors_in(job.method.state()):
        assert not value.is_floating_point() or torch.isfinite(value).all(), "the server holds NaN or infinity"
    result = job.result()
    for client in job.fed.all:
        module = result.personal(client)
        assert not module.training
        assert module(torch.zeros(2, FEATURES)).shape == (2, CLASSES)
    assert 0 <= result.accuracy.micro <= 100
    json.dumps(result.to_dict()["failed"])


def tensors_in(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [t for v in value.values() for t in tensors_in(v)]
    if isinstance(value, list | tuple):
        return [t for v in value for t in tensors_in(v)]
    return []


# ---------------------------------------------------------------- tampering with replies


def poison(client: int) -> Tamper:
    """Everything this client sends is NaN."""

    def tamper(ids: Any, phase: str, message: Any, answer: Answer, round: int) -> Answer:
        for k in np.flatnonzero(answer.ids == client):
            answer.replies = {n: _with_nan(v, int(k)) for n, v in answer.replies.items()}
        return answer

    return tamper


def _with_nan(value: Tensor | Masked, k: int) -> Tensor | Masked:
    if isinstance(value, Masked):
        return Masked(_with_nan(value.values, k), value.mask)  # type: ignore[arg-type]
    if not value.is_floating_point():
        return value
    value = value.clone()
    value[k] = float("nan")
    return value


def misshape(client: int, how: str) -> Tamper:
    """This client sends a tensor of another shape, another type, or under another name."""

    def tamper(ids: Any, phase: str, message: Any, answer: Answer, round: int) -> Answer:
        at = answer.ids == client
        if not at.any() or not answer.replies:
            return answer
        k, keep = int(np.flatnonzero(at)[0]), torch.from_numpy(~at)
        plain = {n: v.values if isinstance(v, Masked) else v for n, v in answer.replies.items()}
        wrong = {
            "shape": {n: torch.cat([v[k].flatten(), v[k].flatten()[:1]]) for n, v in plain.items()},
            "type": {n: v[k].to(torch.complex64) for n, v in plain.items()},
            "name": {f"{n}-2": v[k] for n, v in plain.items()},
        }
        rest = {
            n: Masked(v.values[keep], v.mask[keep]) if isinstance(v, Masked) else v[keep]
            for n, v in answer.replies.items()
        }
        return Answer(answer.ids[~at], rest, {client: wrong[how]}, answer.failed)

    return tamper


# ---------------------------------------------------------------- the promises


def runs_and_serves_every_client(method: Kind, options: Mapping[str, Any] | None = None) -> None:
    """Two rounds with two of three clients: everybody has a model in the end, trained on or not."""
    job = finished(job_of(method, options, participation=0.67))
    assert [r.round for r in job.history if not r.final] == [1, 2]
    assert all(r.participants == 2 for r in job.history if not r.final)
    sane(job)


def learns_something(method: Kind, options: Mapping[str, Any] | None = None) -> None:
    job = job_of(method, options)
    before = personal_rows(job)
    finished(job)
    assert not torch.equal(personal_rows(job), before), "no personal model has changed in two rounds"


def repeats_itself(method: Kind, options: Mapping[str, Any] | None = None) -> None:
    """The same seed gives the same bits; another seed does not."""
    one, two = (personal_rows(finished(job_of(method, options, seed=5, participation=0.67))) for _ in range(2))
    other = personal_rows(finished(job_of(method, options, seed=6, participation=0.67)))
    assert torch.equal(one, two), "two runs with one seed differ"
    assert not torch.equal(one, other), "the seed changes nothing"


def does_not_depend_on_the_chunk(method: Kind, options: Mapping[str, Any] | None = None) -> None:
    """One client at a time, two, or all: the same up to rounding."""
    whole = personal_rows(finished(job_of(method, options, way="batched", sizes=(9, 6, 1, 5))))
    for chunk in (1, 3):
        pieces = personal_rows(finished(job_of(method, options, way="batched", sizes=(9, 6, 1, 5), chunk=chunk)))
        assert torch.allclose(whole, pieces, rtol=1e-3, atol=1e-4), f"chunk={chunk} changes the result"


def works_with_two_clients(method: Kind, options: Mapping[str, Any] | None = None) -> None:
    sane(finished(job_of(method, options, sizes=(5, 4))))


def survives_dropouts(method: Kind, options: Mapping[str, Any] | None = None) -> None:
    """Half of the clients stay silent at each exchange: recorded, and the run goes on."""
    job = finished(job_of(method, options, drop=0.5, rounds=4))
    assert any(f.reason == "dropped out" for f in job.fed.failures)
    sane(job)


def survives_stragglers(method: Kind, options: Mapping[str, Any] | None = None) -> None:
    job = finished(job_of(method, options, straggle=0.5, rounds=4))
    assert any(f.reason == "reply came too late" for f in job.fed.failures)
    sane(job)


def survives_when_nobody_answers(method: Kind, options: Mapping[str, Any] | None = None) -> None:
    """Nobody did anything, so nobody's model may have changed."""
    job = job_of(method, options)
    job.fed._faults = Faults(drop=1.0)
    before = personal_rows(job)
    finished(job)
    sane(job)
    assert all(e.answered == 0 and e.bytes_up == 0 for e in job.fed.exchanges)
    assert torch.equal(personal_rows(job), before), "models changed although nobody answered"


def survives_when_everybody_is_late(method: Kind, options: Mapping[str, Any] | None = None) -> None:
    job = job_of(method, options)
    job.fed._faults = Faults(straggle=1.0)
    sane(finished(job))


def survives_poison(method: Kind, options: Mapping[str, Any] | None = None) -> None:
    """One client sends NaN: it is a failure with a reason, and nobody's model is harmed."""
    job = finished(job_of(method, options, tamper=poison(1)))
    if job.result().bytes["up"]:
        assert {f.client for f in job.fed.failures} == {1}
        assert any("not finite" in f.reason for f in job.fed.failures)
    sane(job)


def survives_odd_replies(method: Kind, options: Mapping[str, Any] | None = None) -> None:
    words = {"shape": "has shape", "type": "is torch.complex64 instead of", "name": "instead of"}
    for how, reason in words.items():
        job = finished(job_of(method, options, tamper=misshape(1, how)))
        if job.result().bytes["up"]:
            assert {f.client for f in job.fed.failures} == {1}
            assert all(reason in f.reason for f in job.fed.failures), (how, job.fed.failures)
        sane(job)


def never_asks_the_removed(method: Kind, options: Mapping[str, Any] | None = None) -> None:
    asked: list[int] = []

    def listen(ids: Any, phase: str, message: Any, answer: Answer, round: int) -> Answer:
        asked.extend(ids.tolist())
        return answer

    job = job_of(method, options, tamper=listen)
    job.fed.remove([0])
    sane(finished(job))
    assert asked
    assert 0 not in asked


def sends_no_more_than_it_says(method: Kind, options: Mapping[str, Any] | None = None) -> None:
    """`shares` bounds what leaves a client at one time (besides a number about each other client)."""
    job = finished(job_of(method, options))
    for e in job.fed.exchanges:
        assert e.bytes_down >= 0
        assert e.bytes_up >= 0
        assert 0 <= e.answered <= e.asked <= len(job.fed.all)
    shares = job.method.shares
    if shares == "nothing":
        assert job.result().bytes == {"down": 0, "up": 0}
    elif shares in ("model", "body", "head"):
        most = 4 * (job.site.layout.size(shares) + len(job.fed.all))  # type: ignore[arg-type]
        for e in job.fed.exchanges:
            assert e.bytes_up <= most * e.answered, f"{e.phase} sends more than its {shares}"


def keeps_a_plain_state(method: Kind, options: Mapping[str, Any] | None = None) -> None:
    """Tensors, numbers, names, and dictionaries and lists of these: what a checkpoint can hold."""
    job = finished(job_of(method, options))
    assert "options" not in job.method.state()
    for name, value in job.method.state().items():
        _plain(value, name)


def _plain(value: object, where: str) -> None:
    if isinstance(value, Mapping):
        for k, v in value.items():
            assert isinstance(k, str | int), f"state {where}: key {k!r} is neither a name nor a number"
            _plain(v, f"{where}.{k}")
    elif isinstance(value, list | tuple):
        for i, v in enumerate(value):
            _plain(v, f"{where}[{i}]")
    else:
        kinds = (Tensor, bool, int, float, str, type(None))
        assert isinstance(value, kinds), f"state {where} is a {type(value).__name__}"


def keeps_its_halves_apart(method: Kind, options: Mapping[str, Any] | None = None) -> None:
    """The client half has no memory but `keeps`, and is never told what the server half knows."""
    job = job_of(method, options)
    assert isinstance(job.engine, Simulator)
    client = job.engine.method
    assert client is not job.method
    before = dict(vars(client))
    finished(job)
    sane(job)
    after = dict(vars(client))
    assert after.keys() == before.keys(), f"the client half remembers {sorted(after.keys() - before.keys())} on itself"
    assert all(after[k] is before[k] for k in before), "the client half changed its own attributes"


def can_be_judged_at_every_point(method: Kind, options: Mapping[str, Any] | None = None) -> None:
    for point in REPORTS:
        sane(finished(job_of(method, options, eval_point=point)))


def handles_batch_norm(method: Kind, options: Mapping[str, Any] | None = None) -> None:
    """Statistics averaged or local; where local, nothing that travels is wide enough to hold them."""
    for buffers in ("average", "local"):
        job = finished(job_of(method, options, norm=True, buffers=buffers, lr=0.01))
        sane(job)
        variance = job.site.layout.tensors(personal_rows(job))["body.1.running_var"]
        assert (variance > 0).all(), "a variance is not positive"


def can_be_rehearsed(method: Kind, options: Mapping[str, Any] | None = None) -> None:
    """What a reply looks like follows from the method, its options, the network and the message, for every client
    alike: a server can know it beforehand, from a client that is made up."""
    job = job_of(method, options, rounds=3, participation=0.67)
    call, rehearsal = job.engine.call, Rehearsal(job.site, type(job.method)(job.method.options), (FEATURES,), "float32")

    def compared(ids: Any, function: str, message: Any, round: int) -> Answer:
        answer = call(ids, function, message, round)
        if function not in REPORTS.values():
            known = rehearsal(function, message, round, anew=True)
            assert not isinstance(known, str), f"{function} cannot be run on a made-up client: {known}"
            sent = spec_of(answer.replies)
            assert sent == known, f"{function} of a made-up client: {difference(known, sent)}"
        return answer

    job.engine.call = compared  # type: ignore[method-assign]
    finished(job)


def measuring_changes_nothing(method: Kind, options: Mapping[str, Any] | None = None) -> None:
    """Evaluating twice, or more often, does not alter the run."""
    job = finished(job_of(method, options))
    first = personal_rows(job)
    assert torch.equal(first, personal_rows(job))
    seldom = finished(job_of(method, options, eval_every=2))
    assert torch.equal(first, personal_rows(seldom)), "evaluating more often changes the result"


METHOD_CHECKS: list[Check] = [
    runs_and_serves_every_client,
    learns_something,
    repeats_itself,
    does_not_depend_on_the_chunk,
    works_with_two_clients,
    survives_dropouts,
    survives_stragglers,
    survives_when_nobody_answers,
    survives_when_everybody_is_late,
    survives_poison,
    survives_odd_replies,
    never_asks_the_removed,
    sends_no_more_than_it_says,
    keeps_a_plain_state,
    keeps_its_halves_apart,
    can_be_judged_at_every_point,
    handles_batch_norm,
    can_be_rehearsed,
    measuring_changes_nothing,
]


def check_method(method: Kind, options: Mapping[str, Any] | None = None) -> None:
    """Every promise of a method."""
    for check in METHOD_CHECKS:
        check(method, options)


# ---------------------------------------------------------------- attacks


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
    adversary.arm(job.site, dataset.x, dataset.y)
    finished(job)
    benign = torch.from_numpy(~adversary.malicious())
    assert torch.isfinite(personal_rows(job)[benign]).all(), f"{method}: a benign client's model holds NaN or infinity"


__all__ = ["METHOD_CHECKS", "check_attack", "check_method", "check_rule"]
