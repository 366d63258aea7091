"""What every method promises, one function a promise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fedkin.core.federation import Answer, Faults, difference, spec_of
from fedkin.engines.rehearsal import Rehearsal
from fedkin.engines.simulator import Simulator
from fedkin.methods.base import REPORTS
from fedkin.rounds.trained import Trained
from fedkin.testing.tampering import misshape, poison
from fedkin.testing.tiny import MethodOrName, federation, finished, job_of, personal_rows, sane
from fedkin.testing.worlds import inside

Check = Callable[..., None]


def runs_and_serves_every_client(method: MethodOrName, options: Mapping[str, Any] | None = None) -> None:
    """Two rounds with two of three clients: everybody has a model in the end, trained on or not."""
    job = finished(job_of(method, options, participation=0.67))
    assert [r.round for r in job.history if not r.final] == [1, 2]
    assert all(r.participants == 2 for r in job.history if not r.final)
    sane(job)


def learns_something(method: MethodOrName, options: Mapping[str, Any] | None = None) -> None:
    job = job_of(method, options)
    before = personal_rows(job)
    finished(job)
    assert not torch.equal(personal_rows(job), before), "no personal model has changed in two rounds"


def repeats_itself(method: MethodOrName, options: Mapping[str, Any] | None = None) -> None:
    """The same seed gives the same bits; another seed does not."""
    one, two = (personal_rows(finished(job_of(method, options, seed=5, participation=0.67))) for _ in range(2))
    other = personal_rows(finished(job_of(method, options, seed=6, participation=0.67)))
    assert torch.equal(one, two), "two runs with one seed differ"
    assert not torch.equal(one, other), "the seed changes nothing"


def does_not_depend_on_the_chunk(method: MethodOrName, options: Mapping[str, Any] | None = None) -> None:
    """One client at a time, two, or all: the same up to rounding."""
    whole = personal_rows(finished(job_of(method, options, way="batched", sizes=(9, 6, 1, 5))))
    for chunk in (1, 3):
        pieces = personal_rows(finished(job_of(method, options, way="batched", sizes=(9, 6, 1, 5), chunk=chunk)))
        assert torch.allclose(whole, pieces, rtol=1e-3, atol=1e-4), f"chunk={chunk} changes the result"


def works_with_two_clients(method: MethodOrName, options: Mapping[str, Any] | None = None) -> None:
    sane(finished(job_of(method, options, sizes=(5, 4))))


def survives_dropouts(method: MethodOrName, options: Mapping[str, Any] | None = None) -> None:
    """Half of the clients stay silent at each exchange: recorded, and the run goes on."""
    job = finished(job_of(method, options, drop=0.5, rounds=4))
    assert any(f.reason == "dropped out" for f in job.fed.failures)
    sane(job)


def survives_stragglers(method: MethodOrName, options: Mapping[str, Any] | None = None) -> None:
    job = finished(job_of(method, options, straggle=0.5, rounds=4))
    assert any(f.reason == "reply came too late" for f in job.fed.failures)
    sane(job)


def survives_when_nobody_answers(method: MethodOrName, options: Mapping[str, Any] | None = None) -> None:
    """Nobody did anything, so nobody's model may have changed."""
    job = job_of(method, options)
    job.fed._faults = Faults(drop=1.0)
    before = personal_rows(job)
    finished(job)
    sane(job)
    assert all(e.answered == 0 and e.bytes_up == 0 for e in job.fed.exchanges)
    assert torch.equal(personal_rows(job), before), "models changed although nobody answered"


def survives_when_everybody_is_late(method: MethodOrName, options: Mapping[str, Any] | None = None) -> None:
    job = job_of(method, options)
    job.fed._faults = Faults(straggle=1.0)
    sane(finished(job))


def survives_poison(method: MethodOrName, options: Mapping[str, Any] | None = None) -> None:
    """One client sends NaN: it is a failure with a reason, and nobody's model is harmed."""
    job = finished(job_of(method, options, tamper=poison(1)))
    if job.result().bytes["up"]:
        assert {f.client for f in job.fed.failures} == {1}
        assert any("not finite" in f.reason for f in job.fed.failures)
    sane(job)


def survives_odd_replies(method: MethodOrName, options: Mapping[str, Any] | None = None) -> None:
    words = {"shape": "has shape", "type": "is torch.complex64 instead of", "name": "instead of"}
    for how, reason in words.items():
        job = finished(job_of(method, options, tamper=misshape(1, how)))
        if job.result().bytes["up"]:
            assert {f.client for f in job.fed.failures} == {1}
            assert all(reason in f.reason for f in job.fed.failures), (how, job.fed.failures)
        sane(job)


def never_asks_the_removed(method: MethodOrName, options: Mapping[str, Any] | None = None) -> None:
    asked: list[int] = []

    def listen(ids: Any, phase: str, message: Any, answer: Answer, round: int) -> Answer:
        asked.extend(ids.tolist())
        return answer

    job = job_of(method, options, tamper=listen)
    job.fed.remove([0])
    sane(finished(job))
    assert asked
    assert 0 not in asked


def sends_no_more_than_it_says(method: MethodOrName, options: Mapping[str, Any] | None = None) -> None:
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


def keeps_a_plain_state(method: MethodOrName, options: Mapping[str, Any] | None = None) -> None:
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


def keeps_its_halves_apart(method: MethodOrName, options: Mapping[str, Any] | None = None) -> None:
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


def can_be_evaluated_at_every_point(method: MethodOrName, options: Mapping[str, Any] | None = None) -> None:
    for point in REPORTS:
        sane(finished(job_of(method, options, eval_point=point)))


def handles_batch_norm(method: MethodOrName, options: Mapping[str, Any] | None = None) -> None:
    """Statistics averaged or local; where local, nothing that travels is wide enough to hold them."""
    for buffers in ("average", "local"):
        job = finished(job_of(method, options, norm=True, buffers=buffers, lr=0.01))
        sane(job)
        variance = job.site.layout.tensors(personal_rows(job))["body.1.running_var"]
        assert (variance > 0).all(), "a variance is not positive"


def can_be_rehearsed(method: MethodOrName, options: Mapping[str, Any] | None = None) -> None:
    """What a reply looks like follows from the method, its options, the network and the message, for every client
    alike: a server can know it beforehand, from a client that is made up."""
    job = job_of(method, options, rounds=3, participation=0.67)
    made = federation((12,), 0)[0]  # somebody else's samples, in the form in which a site has its own
    x, y = made.x, made.y
    call, rehearsal = job.engine.call, Rehearsal(job.site, type(job.method)(job.method.options), x, y)

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


def measuring_changes_nothing(method: MethodOrName, options: Mapping[str, Any] | None = None) -> None:
    """Evaluating twice, or more often, does not alter the run."""
    job = finished(job_of(method, options))
    first = personal_rows(job)
    assert torch.equal(first, personal_rows(job))
    seldom = finished(job_of(method, options, eval_every=2))
    assert torch.equal(first, personal_rows(seldom)), "evaluating more often changes the result"


def another_run_can_begin_with_it(method: MethodOrName, options: Mapping[str, Any] | None = None) -> None:
    """A run that starts from it begins with the very model that is shared and with what each client keeps, in its own
    network and memory, and goes on from there."""
    done = finished(job_of(method, options))
    earlier = Trained.of(done)
    shared, kept = earlier.handed_on(), {n: {k: v.clone() for k, v in f.items()} for n, f in earlier.kept.items()}
    keeps = {n: f for n, f in kept.items() if n in type(done.method).keeps and type(done.method).keeps[n].lasts}
    if not shared and not keeps:
        return  # it leaves nothing behind that is not its own
    begun = [job_of(method, options, rounds=1, begin_with=earlier) for _ in range(2)]
    for job in begun:
        first = {**job.model.state_dict(), **job.site.layout.tensors(job.site.initial)}  # what is frozen has no columns
        assert all(torch.equal(first[name], value) for name, value in shared.items()), "it begins with another model"
        for name, value in job.method.shared().items():
            assert torch.equal(value, job.site.initial[job.site.layout.columns(name)]), "the server has another model"  # type: ignore[arg-type]
        for name, found in keeps.items():
            assert torch.equal(job.site.store.read(name, found["ids"].numpy()), found["rows"]), f"{name!r} is lost"
        sane(finished(job))
    assert torch.equal(*map(personal_rows, begun)), "two runs that start from it differ"
    assert all(torch.equal(earlier.kept[n][k], v) for n, f in kept.items() for k, v in f.items()), "it has changed"


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
    can_be_evaluated_at_every_point,
    handles_batch_norm,
    can_be_rehearsed,
    measuring_changes_nothing,
    another_run_can_begin_with_it,
]


def check_method(method: MethodOrName, options: Mapping[str, Any] | None = None, world: str = "classification") -> None:
    """Every promise of a method. `world`: what it learns meanwhile, of `fedkin.testing.WORLDS`."""
    with inside(world):
        for check in METHOD_CHECKS:
            check(method, options)
