"""FedCAP against its equations: weights, calibration, detection, collection, and its parts alone (Table IV)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conformance import every_check, federation, finished, job_of, personal_rows, poison
from torch import Tensor

from fedkin.compute import keys
from fedkin.config import make_config
from fedkin.core.federation import Answer, Clients, Federation, each
from fedkin.methods.fedavg import FedAvg
from fedkin.methods.fedcap import FedCAP
from fedkin.methods.fedcap.similarity import contributions, usual
from fedkin.rounds import Job, prepare

FIVE = (9, 6, 1, 5, 8)


def close(found: Tensor, expected: Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-4, atol=1e-6)


def customised(job: Job) -> Tensor:
    return job.method.deliver_to_all(job.fed)["model"].rows


def notes(job: Job, name: str, round: int) -> list[Any]:
    return [n.value for n in job.fed.notes if (n.name, n.round) == (name, round)]


def scaled(client: int | None, factor: float, phases: tuple[str, ...] = ("train",), since: int = 0) -> Any:
    """This client's (None: everybody's) updates are blown up on their way."""

    def tamper(ids: keys.I64, phase: str, message: Any, answer: Answer, round: int) -> Answer:
        if phase in phases and round >= since:
            hit = torch.from_numpy((answer.ids == client) | (client is None))
            update = answer.replies["update"]
            answer.replies["update"] = torch.where(hit[:, None], factor * update, update)
        return answer

    return tamper


def gradient(job: Job, row: Tensor, k: int) -> Tensor:
    """Of this model's loss on all of a client's training samples."""
    module = job.site.layout.load(copy.deepcopy(job.model), row)
    part = torch.from_numpy(job.site.parts["train"][k])
    F.cross_entropy(module(job.site.source.batch(part)), job.site.source.labels(part)).backward()
    return torch.cat([dict(module.named_parameters())[s.name].grad.flatten() for s in job.site.layout.slots])


class Recorder:
    """Everything that passed between server and clients."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, str, list[int], Tensor, list[int], Tensor]] = []

    def __call__(self, ids: keys.I64, phase: str, message: Any, answer: Answer, round: int) -> Answer:
        model = message["model"]
        sent = model.rows if hasattr(model, "rows") else model.expand(len(ids), -1)
        update = answer.replies["update"].clone()
        self.seen.append((round, phase, ids.tolist(), sent.clone(), answer.ids.tolist(), update))
        return answer


# ---------------------------------------------------------------- eqs. 4 and 5


def slow_weights(d_k: Tensor, pool: dict[int, Tensor], alpha: float, phi: float, me: int) -> dict[int, float]:
    """One client's weights, as section V-A says it."""
    others = [i for i in pool if i != me]
    score = {}
    for i in others:
        length = float(d_k.norm() * pool[i].norm())
        score[i] = math.exp(alpha * (float(d_k @ pool[i]) / length if length else -1.0))
    q = {i: score[i] / sum(score.values()) for i in others}
    if me not in pool:
        return q
    return {me: 1.0} if not others else {**{i: (1 - phi) * q[i] for i in others}, me: phi}


@pytest.mark.parametrize(("alpha", "phi"), [(10.0, 0.3), (2.0, 0.0), (0.0, 0.25), (4.0, 1.0)])
@pytest.mark.parametrize("members", [1, 2, 5])
def test_weights_are_a_softmax_of_cosines_with_a_share_for_oneself(alpha: float, phi: float, members: int) -> None:
    updates = torch.randn(members, 30)
    updates[members // 2] *= 0 if members > 2 else 1  # no direction: as dissimilar as can be
    pool = dict(enumerate(updates))
    found = contributions(updates, updates, alpha, phi)
    for k in pool:
        expected = slow_weights(updates[k], pool, alpha, phi, k)
        assert found[k].tolist() == pytest.approx([expected[i] for i in pool], abs=1e-6)
    strangers = torch.cat([torch.randn(3, 30), torch.zeros(1, 30)])
    for d, row in zip(strangers, contributions(strangers, updates, alpha), strict=True):
        expected = slow_weights(d, pool, alpha, phi, -1)
        assert row.tolist() == pytest.approx([expected[i] for i in pool], abs=1e-6)


def test_an_update_longer_than_floats_can_square_spoils_nobody_elses_weights() -> None:
    updates = torch.randn(4, 30)
    updates[3] *= 1e30
    found = contributions(updates, updates, 10.0, 0.3)
    assert torch.isfinite(found).all()
    assert found.sum(1).tolist() == pytest.approx([1.0] * 4)


def test_two_clients_share_by_phi() -> None:
    job = finished(job_of("fedcap", {"phi": 0.2}, sizes=(5, 4)))
    assert notes(job, "weights", 0)[0].flatten().tolist() == pytest.approx([0.2, 0.8, 0.8, 0.2])


# ---------------------------------------------------------------- whole rounds against a slow server


class SlowServer:
    """The round of section V for one client after another, driven by what was recorded."""

    def __init__(self, first: Tensor, samples: list[int], alpha: float, phi: float) -> None:
        self.w = self.before = first
        self.samples, self.alpha, self.phi = samples, alpha, phi
        self.recovered: dict[int, Tensor] = {}
        self.calibrated: dict[int, Tensor] = {}
        self.collected: dict[int, Tensor] = {}

    def customised(self, k: int) -> Tensor:
        if not self.recovered:
            return self.w
        d_k = self.calibrated[k] if k in self.calibrated else self.collected[k]
        weights = slow_weights(d_k, self.calibrated, self.alpha, self.phi, k)
        return sum((weights[i] * self.recovered[i] for i in weights), torch.zeros_like(self.w))

    def train(self, sent: dict[int, Tensor], updates: dict[int, Tensor]) -> None:
        self.recovered = {k: sent[k] + updates[k] for k in updates}
        self.calibrated = {k: self.recovered[k] - self.w for k in updates}
        size = sum(self.samples[k] for k in updates)
        self.before = self.w
        self.w = sum((self.samples[k] / size * self.recovered[k] for k in updates), torch.zeros_like(self.w))


@pytest.mark.parametrize("way", ["each", "threads", "batched"])
@pytest.mark.parametrize("participation", [1.0, 0.6])
def test_every_message_is_what_the_paper_says(participation: float, way: str) -> None:
    record = Recorder()
    options = {"alpha": 5.0, "phi": 0.3}
    job = job_of("fedcap", options, sizes=FIVE, rounds=5, participation=participation, tamper=record, way=way)
    slow = SlowServer(job.method.model, [len(p) for p in job.site.parts["train"]], 5.0, 0.3)
    finished(job)
    collections = 0
    for round, phase, ids, sent, answered, updates in record.seen:
        if phase == "collect":
            collections += 1
            assert all(k not in slow.recovered for k in ids)
            assert close(sent, slow.before.expand(len(ids), -1)), round
            slow.collected = dict(zip(answered, updates, strict=True))
        else:
            assert close(sent, torch.stack([slow.customised(k) for k in ids])), round
            assert answered == ids
            slow.train(dict(zip(ids, sent, strict=True)), dict(zip(ids, updates, strict=True)))
    assert (collections > 0) == (participation < 1)
    assert close(job.method.model, slow.w)
    assert close(job.method.updates, torch.stack([slow.calibrated[k] for k in job.method.members]))


@pytest.mark.parametrize("way", ["each", "batched"])
def test_without_preference_it_is_the_plain_mean(way: str) -> None:
    """alpha = 0, phi = 1/n, everybody there: FedAvg with equal weights."""

    class EqualFedAvg(FedAvg):
        def round(self, fed: Federation, cohort: Clients) -> None:
            replies = fed.ask(cohort, self.train, model=self.model)
            self.model = replies.mean("model", self.model, torch.ones(len(replies)))

    mean, equal, third = (
        job_of(EqualFedAvg, rounds=3, way=way),
        job_of("fedcap", {"alpha": 0, "phi": "equal"}, rounds=3, way=way),
        job_of("fedcap", {"alpha": 0, "phi": 1 / 3}, rounds=3, way=way),
    )
    for _ in range(3):
        for job in (mean, equal, third):
            job.advance()
        for job in (equal, third):
            assert close(customised(job), mean.method.model.expand(3, -1))


def test_the_first_update_needs_no_calibration_the_second_does() -> None:
    record = Recorder()
    job = job_of("fedcap", tamper=record)
    job.advance()
    assert close(job.method.updates, record.seen[0][5])
    job.advance()
    assert not close(job.method.updates, record.seen[1][5])


@pytest.mark.parametrize("ablation", ["full", "2"])
def test_a_rule_averages_the_model_that_clients_are_given_and_no_mere_reference(ablation: str) -> None:
    def median(rows: Tensor, weights: Tensor, start: Tensor) -> Tensor:
        return rows.median(0).values

    config = make_config(
        {
            "method": "fedcap",
            "model": "mlp",
            "rounds": 1,
            "epochs": 1,
            "device": "cpu",
            "way": "each",
            "options": {"ablation": ablation},
        }
    )
    job = prepare(config, data=federation(), average=median)
    job.advance()
    pool, samples = job.method.pool, job.fed.all.samples.float()
    expected = pool.median(0).values if ablation == "2" else (samples / samples.sum()) @ pool
    assert torch.equal(job.method.model, expected)


# ---------------------------------------------------------------- detection


@pytest.mark.parametrize("t_norm", [10, "auto"])
@pytest.mark.parametrize("since", [0, 1])
def test_an_update_blown_up_removes_its_client_and_nobody_else(t_norm: Any, since: int) -> None:
    job = job_of("fedcap", {"t_norm": t_norm}, sizes=(8,) * 8, rounds=4, tamper=scaled(3, 1e4, since=since))
    finished(job)
    assert job.fed.removed == {3: since}
    assert notes(job, "removed", since) == [[3]]
    assert all(notes(job, "removed", r) == [[]] for r in range(4) if r != since)
    assert job.method.members == [0, 1, 2, 4, 5, 6, 7]
    assert [e.asked for e in job.fed.exchanges] == [8] * (since + 1) + [7] * (3 - since)
    assert float(notes(job, "norms", since)[0].argmax()) == 3
    assert float(customised(job).abs().max()) < 10


def test_the_threshold_counts_to_the_last_digit() -> None:
    probe = job_of("fedcap", sizes=FIVE)
    probe.advance()
    norms = notes(probe, "norms", 0)[0]
    largest = float(norms.max())
    for t_norm, removed in ((largest, []), (largest * 0.999, [int(norms.argmax())])):
        job = job_of("fedcap", {"t_norm": t_norm}, sizes=FIVE)
        job.advance()
        assert list(job.fed.removed) == removed


def test_the_automatic_threshold() -> None:
    assert usual(torch.tensor([1.0, 2.0, 3.0, 4.0, 100.0])) == pytest.approx(3 + 6 * 1)
    assert usual(torch.tensor([1.0, 2.0, math.nan, 3.0])) == pytest.approx(2 + 6 * 1)
    assert usual(torch.tensor([1.0, 1.0, 1.0, 1.01])) == pytest.approx(1.06)  # a rounding error is not an attack
    assert math.isnan(usual(torch.tensor([math.nan])))


def test_a_removed_client_does_not_count_for_the_others() -> None:
    """What remains is what would have been without it."""
    with_it = finished(job_of("fedcap", {"phi": 0.2}, rounds=3, tamper=scaled(1, 1e6)))
    without = job_of("fedcap", {"phi": 0.2}, rounds=3)
    without.fed.remove([1])
    finished(without)
    assert close(personal_rows(with_it)[[0, 2]], personal_rows(without)[[0, 2]])
    assert close(customised(with_it)[[0, 2]], customised(without)[[0, 2]])


def test_the_official_code_lets_the_detected_train_on() -> None:
    job = job_of("fedcap", {"profile": "official"}, sizes=FIVE, rounds=3, tamper=scaled(3, 1e4, since=1))
    job.advance()
    stale = customised(job)[3]
    job.advance()
    job.advance()
    assert job.fed.removed == {}
    assert job.method.flagged == [3]
    assert job.method.members == [0, 1, 2, 4]
    assert [e.asked for e in job.fed.exchanges] == [5, 5, 5]
    assert torch.equal(customised(job)[3], stale)
    assert notes(job, "removed", 2) == [[]]
    assert torch.isfinite(notes(job, "norms", 2)[0]).all()  # still measured, not counted


def test_flagged_norms_do_not_move_the_automatic_threshold() -> None:
    options = {"removal": "flag", "t_norm": "auto"}
    job = finished(job_of("fedcap", options, sizes=FIVE, rounds=3, tamper=scaled(3, 1e4)))
    same = finished(job_of("fedcap", {"t_norm": "auto"}, sizes=FIVE, rounds=3, tamper=scaled(3, 1e4)))
    assert notes(job, "t_norm", 2) == pytest.approx(notes(same, "t_norm", 2))


def test_when_all_are_removed_models_stay_and_an_alarm_is_noted() -> None:
    job = job_of("fedcap", rounds=4, tamper=scaled(None, 1e5, since=1))
    job.advance()
    before, model = customised(job).clone(), job.method.model.clone()
    job.advance()
    assert sorted(job.fed.removed) == [0, 1, 2]
    assert notes(job, "alarm", 1)
    job.advance()  # nobody is left to ask
    job.advance()
    assert torch.equal(customised(job), before)
    assert torch.equal(job.method.model, model)
    assert job.method.members == []
    assert job.method.pool.shape == (0, len(model))


def test_a_round_whose_participants_are_all_removed_keeps_the_last_pool_without_them() -> None:
    job = job_of("fedcap", sizes=FIVE, rounds=4, tamper=scaled(None, 1e5, since=1))
    fed, method = job.fed, job.method
    method.round(fed, fed.all[:3])
    pool, updates = method.pool, method.updates
    fed.round = 1
    method.round(fed, fed.all[2:4])
    assert sorted(fed.removed) == [2, 3]
    assert method.members == [0, 1]
    assert torch.equal(method.pool, pool[:2])
    assert torch.equal(method.updates, updates[:2])
    assert notes(job, "alarm", 1)
    job.fed._tamper = None
    fed.round = 2
    method.round(fed, fed.all[[0, 4]])  # goes on: 0 is known, 4 is collected from
    assert method.members == [0, 4]


def wild(client: int, phases: tuple[str, ...], rounds: tuple[int, ...] = tuple(range(9))) -> Any:
    """This client's updates are not finite, in these phases and rounds."""

    def tamper(ids: keys.I64, phase: str, message: Any, answer: Answer, round: int) -> Answer:
        return poison(client)(ids, phase, message, answer, round) if phase in phases and round in rounds else answer

    return tamper


@pytest.mark.parametrize(("phase", "at"), [("train", 0), ("train", 1), ("collect", 1)])
def test_an_update_that_is_not_finite_removes_its_sender_and_counts_for_nobody(phase: str, at: int) -> None:
    """Once is enough, as in the authors' code; the others end up where they would have without it."""
    cohorts = [[0, 2, 3], [0, 1, 2], [1, 2, 3], [0, 1, 4]] if phase == "collect" or at else [[0, 1, 2], [1, 2], [0, 1]]
    job = visits(job_of("fedcap", sizes=FIVE, tamper=wild(1, (phase,), (at,))), *cohorts)
    without = job_of("fedcap", sizes=FIVE)
    without.fed.remove([1])
    visits(without, *cohorts)
    assert job.fed.removed == {1: at}
    assert notes(job, "rejected", at) == [[1]]
    assert [(f.client, f.round, f.phase) for f in job.fed.failures] == [(1, at, phase)]
    rest = [0, 2, 3, 4]
    assert close(customised(job)[rest], customised(without)[rest])
    assert close(personal_rows(job)[rest], personal_rows(without)[rest])


@pytest.mark.parametrize("options", [{"ablation": "1"}, {"ablation": "4"}])
def test_where_nothing_is_detected_what_is_not_finite_is_as_good_as_silence(options: dict[str, Any]) -> None:
    def silent(ids: keys.I64, at: str, message: Any, answer: Answer, round: int) -> Answer:
        keep = answer.ids != 1
        rest = {n: v[torch.from_numpy(keep)] for n, v in answer.replies.items()}
        return Answer(answer.ids[keep], rest, failed={1: "silent"} if not keep.all() else {})

    how = {"sizes": FIVE, "rounds": 5, "participation": 0.6}
    jobs = [finished(job_of("fedcap", options, tamper=t, **how)) for t in (poison(1), silent)]
    for job in jobs:
        assert {f.client for f in job.fed.failures} == {1}
        assert not job.fed.removed
        assert not job.method.flagged
    assert torch.equal(customised(jobs[0]), customised(jobs[1]))
    assert torch.equal(personal_rows(jobs[0]), personal_rows(jobs[1]))


@pytest.mark.parametrize("profile", ["paper", "official"])
@pytest.mark.parametrize("participation", [1.0, 0.6])
def test_attackers_that_send_nan_are_found(profile: str, participation: float) -> None:
    result = finished(
        job_of(
            "fedcap",
            {"profile": profile},
            sizes=(6,) * 10,
            rounds=8,
            participation=participation,
            attack="nan",
            malicious=0.3,
        )
    ).result()
    found = result.detection
    assert found is not None
    assert (found.overall.accuracy, found.overall.false_negative, found.overall.false_positive) == (1.0, 0.0, 0.0)
    assert all(rates.false_negative == 0 or math.isnan(rates.false_negative) for rates in found.rounds.values())
    assert any(rates.false_negative == 0 for rates in found.rounds.values())


def test_when_everybody_sends_nan_models_stay_and_an_alarm_is_noted() -> None:
    def all_wild(ids: keys.I64, phase: str, message: Any, answer: Answer, round: int) -> Answer:
        answer.replies = {n: v * math.nan for n, v in answer.replies.items()}
        return answer

    job = job_of("fedcap", rounds=3, tamper=all_wild)
    first = job.method.model.clone()
    job.advance()
    assert sorted(job.fed.removed) == [0, 1, 2]
    assert notes(job, "alarm", 0)
    assert torch.equal(customised(job), first.expand(3, -1))


# ---------------------------------------------------------------- collection, and what travels


def ledger(job: Job) -> list[tuple[int, str, int, int, int]]:
    one = 4 * job.site.layout.size("model")
    return [(e.round, e.phase, e.asked, e.bytes_down // one, e.bytes_up // one) for e in job.fed.exchanges]


def visits(job: Job, *cohorts: list[int]) -> Job:
    for cohort in cohorts:
        job.method.round(job.fed, job.fed.all[np.array(cohort)] & job.fed.alive)
        job.fed.round += 1
    return job


def test_the_bytes_of_a_round_are_those_of_the_message_table() -> None:
    job = visits(job_of("fedcap", sizes=FIVE), [0, 1, 2], [1, 2, 3, 4], [1, 2, 3, 4], [0])
    assert ledger(job) == [
        (0, "train", 3, 3, 3),
        (1, "collect", 2, 2, 2),
        (1, "train", 4, 4, 4),
        (2, "train", 4, 4, 4),
        (3, "collect", 1, 1, 1),
        (3, "train", 1, 1, 1),
    ]
    assert all(e.bytes_down % (4 * job.site.layout.size("model")) == 0 for e in job.fed.exchanges)


def test_a_client_that_does_not_answer_the_collection_sits_the_round_out() -> None:
    job = job_of("fedcap", sizes=FIVE, tamper=lambda ids, phase, m, answer, r: poison(3)(ids, phase, m, answer, r))
    visits(job, [0, 1], [1, 3, 4])
    assert ledger(job)[1:] == [(1, "collect", 2, 2, 1), (1, "train", 2, 2, 2)]
    assert job.method.members == [1, 4]


@pytest.mark.parametrize("collect", ["zero", "last_known"])
def test_the_cheap_collections_ask_nobody(collect: str) -> None:
    job = visits(job_of("fedcap", {"collect": collect}, sizes=FIVE), [0, 1], [1, 2, 3])
    known = job.method.pool.new_zeros(2, job.method.pool.shape[1])
    if collect == "last_known":
        known[0] = job.method.known[0]
    expected = contributions(known, job.method.updates, 10.0)
    visits(job, [0, 4])
    assert {phase for _, phase, *_ in ledger(job)} == {"train"}
    assert close(notes(job, "weights_absent", 2)[0], expected)
    assert notes(job, "weights_absent", 2)[0][1].tolist() == pytest.approx([1 / 3] * 3)  # nothing known: all alike
    assert (collect == "zero") == (not job.method.known)


def test_last_known_is_the_calibrated_update_of_the_last_visit() -> None:
    job = visits(job_of("fedcap", {"collect": "last_known"}, sizes=FIVE), [0, 1, 2])
    first = job.method.updates.clone()
    visits(job, [1, 2, 3])
    assert torch.equal(job.method.known[0], first[0])
    assert torch.equal(job.method.known[1], job.method.updates[0])
    assert sorted(job.method.known) == [0, 1, 2, 3]


def test_customising_for_all_collects_once_after_each_round() -> None:
    job = visits(job_of("fedcap", {"eval_customise_all": True}, sizes=FIVE), [0, 1], [1, 2, 3])
    assert ledger(job) == [
        (0, "train", 2, 2, 2),
        (0, "collect", 3, 3, 3),
        (1, "train", 3, 3, 3),
        (1, "collect", 2, 2, 2),
    ]
    rows = customised(job)
    assert not any(torch.equal(row, job.method.model) for row in rows)
    assert close(rows[[0, 4]], notes(job, "weights_absent", 1)[0] @ job.method.pool)


def test_local_statistics_are_not_touched_by_a_collection() -> None:
    job = visits(job_of("fedcap", sizes=FIVE, norm=True, buffers="local", lr=0.01), [0, 1])
    statistics = job.site.store.read("buffers", np.arange(5))
    job.fed.ask(job.fed.all, job.method.collect, model=job.method.origin)
    assert torch.equal(job.site.store.read("buffers", np.arange(5)), statistics)
    assert not torch.equal(statistics[0], statistics[4])


# ---------------------------------------------------------------- the two outputs


def test_outputs() -> None:
    personal, custom = (
        visits(job_of("fedcap", {"output": o}, sizes=FIVE), [0, 1, 2], [2, 3]) for o in ("personalised", "customised")
    )
    received, v = customised(personal), personal.site.store.read("personal", np.arange(5))
    assert torch.equal(received, customised(custom))
    assert torch.equal(personal_rows(custom), received)
    assert torch.equal(personal_rows(personal)[:4], v[:4])
    assert not close(received[:4], v[:4])
    assert torch.equal(received[4], personal.method.model)  # never asked: the global model, either way
    assert torch.equal(personal_rows(personal)[4], personal.method.model)
    personal.site.store.write("personal", np.arange(4), -v[:4])  # so that the two differ in what they get right
    message = personal.method.deliver_to_all(personal.fed)
    both = personal.engine.call(np.arange(5), "compare", message, 2).replies
    assert both["personalised"].tolist() == personal.evaluate().correct.tolist()
    assert both["customised"].tolist() == custom.evaluate().correct.tolist()
    assert both["customised"].tolist() != both["personalised"].tolist()


def test_after_local_training() -> None:
    settings = {"sizes": FIVE, "eval_point": "after_local"}
    personal, custom = (
        visits(job_of("fedcap", {"output": o}, **settings), [0, 1, 2]) for o in ("personalised", "customised")
    )
    assert torch.equal(personal_rows(personal)[:3], personal.site.store.read("personal", np.arange(3)))
    assert close(personal_rows(custom)[:3], custom.method.pool)


def test_a_free_personal_model_is_local_training() -> None:
    """lam = 0 cuts v off from everybody."""
    own, local = finished(job_of("fedcap", {"lam": 0}, rounds=3)), finished(job_of("local", rounds=3))
    assert close(personal_rows(own), personal_rows(local))


def test_one_step_is_equation_7() -> None:
    """One batch a round: v - lr (grad L(v) + lam (v - received)), and w - lr grad L(w)."""
    lr, lam, record = 0.1, 0.7, Recorder()
    job = job_of("fedcap", {"lam": lam}, lr=lr, batch=16, tamper=record)
    job.advance()
    v = personal_rows(job)
    job.advance()
    _, _, _, received, _, update = record.seen[1]
    for k in range(3):
        expected = v[k] - lr * (gradient(job, v[k], k) + lam * (v[k] - received[k]))
        assert close(personal_rows(job)[k], expected)
        assert close(update[k], -lr * gradient(job, received[k], k))


# ---------------------------------------------------------------- somebody new


def test_a_newcomer_is_collected_from_customised_for_and_trains_its_own() -> None:
    record = Recorder()
    job = visits(job_of("fedcap", {"alpha": 5.0, "lam": 0.5}, sizes=FIVE, batch=16), [0, 1, 2, 3], [0, 1, 2, 3])
    others = personal_rows(job)[:4]
    state = {k: v for k, v in job.method.state().items() if k in ("pool", "updates", "model", "origin")}
    job.fed._tamper = lambda *a: record(*a) if a[1] == "collect" else a[3]
    done = job.method.welcome(job.fed, job.fed.all[4:])
    assert list(done) == [4]
    assert ledger(job)[2:] == [(2, "collect", 1, 1, 1), (2, "settle", 1, 1, 0)]
    ((_, _, _, sent, _, update),) = record.seen
    assert torch.equal(sent[0], job.method.origin)
    pool = dict(zip(job.method.members, job.method.updates, strict=True))
    weights = slow_weights(update[0], pool, 5.0, 0.3, 4)
    expected = sum((weights[k] * row for k, row in zip(pool, job.method.pool, strict=True)), torch.zeros_like(sent[0]))
    assert close(customised(job)[4], expected)
    assert close(personal_rows(job)[4], expected - 0.1 * gradient(job, expected, 4))  # one step from where it is drawn
    assert torch.equal(personal_rows(job)[:4], others)
    assert all(torch.equal(getattr(job.method, k), v) for k, v in state.items())


def test_a_newcomer_before_anybody_else_starts_from_the_global_model() -> None:
    job = job_of("fedcap", sizes=FIVE)
    job.method.welcome(job.fed, job.fed.all[4:])
    assert ledger(job) == [(0, "settle", 1, 1, 0)]
    assert torch.equal(customised(job)[4], job.method.model)


def test_who_was_removed_cannot_come_again_as_a_newcomer() -> None:
    job = visits(job_of("fedcap", sizes=FIVE, tamper=scaled(1, 1e5)), [0, 1, 2])
    assert list(job.method.welcome(job.fed, job.fed.all[[1, 4]])) == [4]
    assert ledger(job)[1:] == [(1, "collect", 1, 1, 1), (1, "settle", 1, 1, 0)]


def test_a_newcomer_that_stays_silent_is_not_served() -> None:
    job = visits(job_of("fedcap", sizes=FIVE, tamper=poison(4)), [0, 1])
    assert len(job.method.welcome(job.fed, job.fed.all[3:])) == 1
    assert 4 not in job.method.customised


# ---------------------------------------------------------------- Table IV


def test_personalisation_alone_is_ditto() -> None:
    row2, ditto = (
        finished(job_of(name, options, sizes=FIVE, rounds=3, participation=0.6))
        for name, options in (("fedcap", {"ablation": "2", "lam": 0.5}), ("ditto", {"lam": 0.5}))
    )
    assert close(row2.method.model, ditto.method.model)
    assert close(customised(row2), ditto.method.model.expand(5, -1))
    trained = row2.site.store.read("has_personal", np.arange(5))[:, 0] > 0
    assert close(personal_rows(row2)[trained], personal_rows(ditto)[trained])
    assert row2.result().bytes == ditto.result().bytes


@pytest.mark.parametrize(
    ("row", "calibrated", "personal"),
    [("full", True, True), ("1", False, False), ("3", True, False), ("4", False, True)],
)
def test_rows_of_the_ablation(row: str, calibrated: bool, personal: bool) -> None:
    record = Recorder()
    job = finished(job_of("fedcap", {"ablation": row, "alpha": 5.0}, sizes=FIVE, tamper=record))
    raw = record.seen[1][5]
    assert close(job.method.updates, raw) != calibrated
    assert close(customised(job), contributions(job.method.updates, job.method.updates, 5.0, 0.3) @ job.method.pool)
    assert ("personal" in job.site.store.tensors) == personal
    assert torch.equal(personal_rows(job), customised(job)) != personal
    attacked = finished(job_of("fedcap", {"ablation": row}, sizes=FIVE, tamper=scaled(3, 1e4)))
    assert (list(attacked.fed.removed) == [3]) == calibrated
    assert bool(attacked.fed.removed) == bool(notes(attacked, "t_norm", 0)) == calibrated


@pytest.mark.parametrize("row", ["1", "2", "4"])
def test_rows_that_do_not_calibrate_can_detect_by_updates_as_they_come(row: str) -> None:
    options, record = {"ablation": row, "detect_raw": True}, Recorder()
    calm = finished(job_of("fedcap", options, sizes=FIVE, tamper=record))
    assert not calm.fed.removed
    assert close(notes(calm, "norms", 1)[0], record.seen[1][5].norm(dim=1))
    hostile = finished(job_of("fedcap", options, sizes=FIVE, tamper=scaled(3, 1e4)))
    assert list(hostile.fed.removed) == [3]
    detector = hostile.method.detector()
    assert detector is not None
    assert detector.reference is None
    assert detector.bar(torch.ones(2)) == 10.0


def test_without_detection_what_is_not_finite_still_stays_out() -> None:
    def overflow(ids: keys.I64, phase: str, message: Any, answer: Answer, round: int) -> Answer:
        hit = torch.from_numpy(answer.ids == 3)[:, None]
        answer.replies["update"] = torch.where(hit, 3e38, answer.replies["update"])  # finite, its length is not
        return answer

    job = finished(job_of("fedcap", {"ablation": "1"}, sizes=FIVE, tamper=overflow))
    assert torch.isfinite(customised(job)).all()
    assert 3 not in job.method.members


# ---------------------------------------------------------------- the promises of every method, with other options

OTHERS: list[dict[str, Any]] = [
    {"profile": "official"},
    {"profile": "robust", "output": "customised"},
    {"collect": "last_known", "phi": "equal"},
    {"collect": "zero", "ablation": "1"},
    {"ablation": "2"},
]


@pytest.mark.parametrize("check", every_check())
@pytest.mark.parametrize("options", OTHERS, ids=str)
def test_conformance(options: dict[str, Any], check: Callable[..., None]) -> None:
    check("fedcap", options)


def test_more_than_the_options_is_not_needed_by_the_client_half() -> None:
    job = visits(job_of("fedcap"), [0, 1, 2])
    fresh = FedCAP(job.method.options)
    job.engine.method = fresh
    reply = job.engine.call(np.arange(3), "train", {"model": each(customised(job))}, 1)
    assert reply.replies["update"].shape == (3, job.site.layout.size("model"))
