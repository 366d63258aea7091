"""`ask` is the only road: who is asked, what arrives, what it costs, who failed and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from conformance import Network, finished, job_of
from torch import Tensor

import fedkin.core.federation
from fedkin.compute.layout import Layout
from fedkin.core.federation import Answer, Clients, Each, Faults, Federation, Masked, each, gate, weighted_mean
from fedkin.errors import FedKinError

SAMPLES = np.array([10, 20, 30, 40, 50])


class Recorder:
    """An engine that notes what it was asked and answers with a function of the client's number."""

    def __init__(self, answer: Callable[[np.ndarray], dict[str, Any]] | None = None) -> None:
        self.answer = answer or (lambda ids: {"id": torch.from_numpy(ids).float()[:, None]})
        self.calls: list[tuple[list[int], str, Mapping[str, object], int, int]] = []

    def call(self, ids, function, message, round) -> Answer:
        self.calls.append((ids.tolist(), function, message, round))
        return Answer(ids, self.answer(ids))


def train() -> None:
    """Stands for a client function: only its name matters here."""


# ---------------------------------------------------------------- clients


def test_clients_are_a_sorted_set_with_sizes() -> None:
    some = Clients([3, 1, 3], SAMPLES)
    assert list(some) == [1, 3]
    assert some.samples.tolist() == [20, 40]
    assert list(some - [1]) == [3]
    assert list(some | Clients([0], SAMPLES)) == [0, 1, 3]
    assert list(some & [3, 4]) == [3]
    assert 3 in some
    assert 0 not in some
    assert some[1] == 3
    assert list(some[torch.tensor([False, True])]) == [3]


def test_full_participation_asks_everybody() -> None:
    fed = Federation(Recorder(), SAMPLES)
    assert list(fed.sample(1.0)) == list(fed.all) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("share", "count"), [(0.01, 1), (0.3, 2), (0.5, 3), (0.9, 5)])
def test_participation_is_rounded_and_never_nobody(share: float, count: int) -> None:
    assert len(Federation(Recorder(), SAMPLES).sample(share)) == count


def test_the_cohort_depends_on_seed_and_round() -> None:
    def cohorts(seed: int) -> list[list[int]]:
        fed = Federation(Recorder(), np.ones(20), seed=seed)
        drawn = []
        for fed.round in range(4):
            drawn.append(list(fed.sample(0.3)))
        return drawn

    assert cohorts(1) == cohorts(1)
    assert cohorts(1) != cohorts(2)
    assert len({tuple(c) for c in cohorts(1)}) > 1


def test_every_method_sees_the_same_cohorts() -> None:
    def asked(method: str) -> list[list[int]]:
        seen: list[list[int]] = []

        def listen(ids, phase, message, answer, round):
            seen.append(ids.tolist())
            return answer

        finished(job_of(method, tamper=listen, participation=0.5, sizes=(4,) * 6, rounds=4, seed=3))
        return seen[:4]

    first = asked("fedavg")
    assert len({tuple(c) for c in first}) > 1
    assert all(len(c) == 3 for c in first)
    assert [asked(m) for m in ("local", "ditto", "fedrep", "lg-fedavg")] == [first] * 4


def test_the_removed_are_not_drawn_and_their_place_is_taken() -> None:
    fed = Federation(Recorder(), SAMPLES)
    gone = list(fed.sample(0.4))
    fed.remove(gone[:1])
    assert len(fed.sample(0.4)) == 2
    assert gone[0] not in fed.sample(1.0)
    assert list(fed.alive) == [c for c in range(5) if c != gone[0]]
    assert fed.removed == {gone[0]: 0}


# ---------------------------------------------------------------- asking


def test_ask_stacks_replies_in_the_order_of_the_clients() -> None:
    engine = Recorder()
    fed = Federation(engine, SAMPLES)
    fed.round, fed.rounds = 3, 10
    replies = fed.ask(Clients([4, 0, 2], SAMPLES), train, model=torch.zeros(2))
    assert replies["id"][:, 0].tolist() == [0, 2, 4]
    assert replies.samples.tolist() == [10, 30, 50]
    ids, name, _, round = engine.calls[0]
    assert (ids, name, round) == ([0, 2, 4], "train", 3)


def test_a_mean_weighs_by_samples_unless_told() -> None:
    fed = Federation(Recorder(), SAMPLES)
    replies = fed.ask(Clients([0, 3], SAMPLES), train)
    start = torch.tensor([7.0])
    assert replies.mean("id", start).tolist() == pytest.approx([(10 * 0 + 40 * 3) / 50])
    assert replies.mean("id", start, torch.tensor([1.0, 1.0])).tolist() == pytest.approx([1.5])
    nobody = fed.ask(Clients([], SAMPLES), train)
    assert nobody.mean("id", start) is start


def test_another_average_gets_rows_weights_and_the_start() -> None:
    def median(rows: Tensor, weights: Tensor, start: Tensor) -> Tensor:
        assert weights.tolist() == [10, 20, 50]
        assert start.tolist() == [7]
        return rows.median(0).values

    fed = Federation(Recorder(), SAMPLES, average=median)
    assert fed.ask(Clients([0, 1, 4], SAMPLES), train).mean("id", torch.tensor([7.0])).tolist() == [1]


def test_a_reply_that_does_not_exist_is_named() -> None:
    fed = Federation(Recorder(), SAMPLES)
    with pytest.raises(FedKinError, match="no reply named 'body': the clients sent id"):
        fed.ask(fed.all, train)["body"]
    with pytest.raises(FedKinError, match="nobody answered"):
        Federation(Recorder(), SAMPLES, faults=Faults(drop=1.0)).ask(fed.all, train)["id"]


def test_weighted_mean_is_the_formula() -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, 6.0]])
    assert weighted_mean(rows, torch.tensor([1.0, 3.0]), rows[0]).tolist() == [2.5, 5.0]


# ---------------------------------------------------------------- faults


def test_the_dropped_do_no_work_and_the_late_do() -> None:
    engine = Recorder()
    fed = Federation(engine, np.ones(40), faults=Faults(drop=0.3, straggle=0.3, seed=1))
    replies = fed.ask(fed.all, train)
    reasons = {f.client: f.reason for f in fed.failures}
    dropped = {c for c, r in reasons.items() if r == "dropped out"}
    late = {c for c, r in reasons.items() if r == "reply came too late"}
    assert dropped
    assert late
    assert set(engine.calls[0][0]) == set(range(40)) - dropped
    assert set(replies.clients) == set(range(40)) - dropped - late
    assert replies["id"][:, 0].tolist() == list(replies.clients)
    assert (fed.exchanges[0].asked, fed.exchanges[0].answered) == (40, len(replies))


def test_each_working_client_gets_its_own_row() -> None:
    engine = Recorder()
    fed = Federation(engine, np.ones(40), faults=Faults(drop=0.5, seed=1))
    fed.ask(fed.all, train, mine=each(torch.arange(40.0)), ours=torch.arange(3))
    ids, _, message, _ = engine.calls[0]
    assert 0 < len(ids) < 40
    assert isinstance(message["mine"], Each)
    assert message["mine"].rows.tolist() == ids
    assert message["ours"].tolist() == [0, 1, 2]


def test_faults_depend_on_client_round_and_phase_alone() -> None:
    faults = Faults(seed=4)
    everybody = faults.draw("drop", 0.5, np.arange(30), 2, "train")
    assert np.array_equal(faults.draw("drop", 0.5, np.arange(10, 20), 2, "train"), everybody[10:20])
    for kind, round, phase in (("straggle", 2, "train"), ("drop", 3, "train"), ("drop", 2, "tune")):
        assert not np.array_equal(faults.draw(kind, 0.5, np.arange(30), round, phase), everybody)
    assert 0.3 < faults.draw("drop", 0.5, np.arange(3000), 0, "train").mean() < 0.7


# ---------------------------------------------------------------- the gate


def test_not_finite_replies_are_failures() -> None:
    values = torch.ones(4, 3)
    values[1, 2], values[2, 0] = float("nan"), float("inf")
    values[3, :2] = torch.tensor([float("inf"), -float("inf")])
    fed = Federation(Recorder(lambda ids: {"x": values}), np.ones(4))
    assert list(fed.ask(fed.all, train).clients) == [0]
    assert {f.client: f.reason for f in fed.failures} == {
        1: "'x' has 1 values that are not finite",
        2: "'x' has 1 values that are not finite",
        3: "'x' has 2 values that are not finite",
    }


def test_a_method_can_ask_who_sent_what_is_not_finite() -> None:
    """Those alone: not who sent another shape, dropped out or came too late; and their values are nowhere."""
    values = torch.ones(12, 3)
    values[[1, 2, 5]] = float("nan")

    class Mixed(Recorder):
        def call(self, ids, function, message, round) -> Answer:
            kept = ids[ids != 7]
            odd = {7: {"x": torch.full((4,), float("nan"))}}
            return Answer(kept, {"x": values[kept]}, odd=odd, failed={3: "silent"})

    faults = Faults(straggle=0.4, seed=0)
    late = set(np.flatnonzero(faults.draw("straggle", 0.4, np.arange(12), 0, "train")).tolist())
    fed = Federation(Mixed(), np.ones(12), faults=faults)
    replies = fed.ask(fed.all, train)
    assert late & {1, 2, 5}
    assert set(replies.not_finite) == {1, 2, 5} - late != set()
    assert not set(replies.not_finite) & set(replies.clients)
    assert torch.isfinite(replies["x"]).all()
    assert list(replies.only(torch.ones(len(replies), dtype=torch.bool)).not_finite) == list(replies.not_finite)
    assert {type(f.reason) for f in fed.failures} == {str}  # plain text, as a checkpoint holds it
    assert not len(Federation(Recorder(), SAMPLES).ask(fed.all[:3], train).not_finite)


def test_large_finite_numbers_are_no_failure() -> None:
    answer = Answer(np.arange(2), {"x": torch.full((2, 3), 3e38)})
    assert gate(answer)[1] == {}


def test_odd_replies_are_failures_and_say_how() -> None:
    odd = {
        2: {"x": torch.zeros(4)},
        3: {"y": torch.zeros(3)},
        4: {"x": torch.zeros(3, dtype=torch.int64)},
        5: {},
    }
    answer = Answer(np.arange(2), {"x": torch.zeros(2, 3)}, odd=odd)
    assert gate(answer)[1] == {
        2: "'x' has shape [4] instead of [3]",
        3: "sent ['y'] instead of ['x']",
        4: "'x' is torch.int64 instead of torch.float32",
        5: "sent [] instead of ['x']",
    }


def test_a_reply_above_the_limit_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedkin.core.messages, "MAX_REPLY_BYTES", 8)
    assert "more than the limit of 8" in gate(Answer(np.arange(1), {"x": torch.zeros(1, 3)}))[1][0]
    assert gate(Answer(np.arange(1), {"x": torch.zeros(1, 2)}))[1] == {}


def test_what_the_engine_reports_as_failed_is_recorded() -> None:
    class Half(Recorder):
        def call(self, ids, function, message, round) -> Answer:
            return Answer(ids[1:], {"id": torch.from_numpy(ids[1:]).float()[:, None]}, failed={0: "no power"})

    fed = Federation(Half(), SAMPLES)
    assert list(fed.ask(fed.all, train).clients) == [1, 2, 3, 4]
    assert [(f.client, f.phase, f.reason) for f in fed.failures] == [(0, "train", "no power")]


def test_an_attacker_sees_who_works_and_changes_the_answer() -> None:
    def tamper(ids, phase, message, answer, round):
        assert (ids.tolist(), phase, message["model"].tolist(), round) == ([0, 1, 2, 3, 4], "train", [1.0], 0)
        answer.replies["id"] = -answer.replies["id"]
        return answer

    fed = Federation(Recorder(), SAMPLES, tamper=tamper)
    assert fed.ask(fed.all, train, model=torch.ones(1))["id"][:, 0].tolist() == [0, -1, -2, -3, -4]


# ---------------------------------------------------------------- what it costs


def cost(message: dict[str, Any], reply: Callable[[np.ndarray], dict[str, Any]] = lambda ids: {}) -> tuple[int, int]:
    fed = Federation(Recorder(reply), SAMPLES)
    fed.ask(fed.all, train, **message)
    return fed.exchanges[0].bytes_down, fed.exchanges[0].bytes_up


@pytest.mark.parametrize(
    ("message", "down"),
    [
        ({}, 0),
        ({"x": torch.zeros(3)}, 5 * 12),
        ({"x": torch.zeros(3), "y": torch.zeros(2, dtype=torch.int64)}, 5 * (12 + 16)),
        ({"x": torch.zeros(3).bool()}, 5 * 1),
        ({"x": torch.zeros(9).bool()}, 5 * 2),
        ({"x": torch.zeros(3).bfloat16()}, 5 * 6),
        ({"x": 3, "y": 0.5, "z": True, "w": None, "v": "abc"}, 5 * (4 + 4 + 4 + 0 + 3)),
        ({"x": each(torch.zeros(5, 3))}, 5 * 12),
        ({"x": each(torch.zeros(5, 9).bool())}, 5 * 2),
        ({"x": each(torch.zeros(5))}, 5 * 4),
    ],
)
def test_bytes_down_are_counted_for_every_client(message: dict[str, Any], down: int) -> None:
    assert cost(message) == (down, 0)


def test_bytes_up_count_what_each_client_sends() -> None:
    mask = torch.tensor([[True, False, True]] * 4 + [[False, False, True]])
    assert cost({}, lambda ids: {"x": torch.zeros(5, 3)}) == (0, 60)
    assert cost({}, lambda ids: {"x": torch.zeros(5, 9).bool()}) == (0, 10)
    assert cost({}, lambda ids: {"x": Masked(torch.zeros(5, 3), mask)}) == (0, 9 * 4)
    assert cost({}, lambda ids: {"x": torch.zeros(5), "y": torch.zeros(5, 2, 2)}) == (0, 20 + 80)


def test_masked_replies_give_their_masks() -> None:
    mask = torch.rand(5, 3) < 0.5
    fed = Federation(Recorder(lambda ids: {"x": Masked(torch.ones(5, 3), mask)}), SAMPLES)
    replies = fed.ask(fed.all, train)
    assert torch.equal(replies.mask("x"), mask)
    assert torch.equal(replies["x"], torch.ones(5, 3))


def test_failed_clients_send_nothing_that_counts() -> None:
    values = torch.ones(5, 3)
    values[1] = float("nan")
    assert cost({}, lambda ids: {"x": values}) == (0, 4 * 12)


def test_messages_hold_tensors_numbers_and_words_only() -> None:
    with pytest.raises(FedKinError, match="cannot hold a dict"):
        cost({"x": {}})
    with pytest.raises(FedKinError, match="one row for each of the 5 clients asked, got 4"):
        cost({"x": each(torch.zeros(4, 2))})


BODY, HEAD = 6 * 8 + 8, 8 * 4 + 4  # the network of the conformance suite


@pytest.mark.parametrize(
    ("method", "options", "numbers_down", "numbers_up"),
    [
        ("fedavg", {}, 2 * 3 * (BODY + HEAD), 2 * 3 * (BODY + HEAD)),
        ("fedprox", {}, 2 * 3 * (BODY + HEAD), 2 * 3 * (BODY + HEAD)),
        ("ditto", {}, 2 * 3 * (BODY + HEAD), 2 * 3 * (BODY + HEAD)),
        ("fedper", {}, 2 * 3 * BODY, 2 * 3 * BODY),
        ("fedrep", {}, 2 * 3 * BODY, 2 * 3 * BODY),
        ("lg-fedavg", {}, 2 * 3 * HEAD, 2 * 3 * HEAD),
        ("lg-fedavg", {"pretrain": 1}, 3 * (BODY + HEAD) + 3 * BODY + 3 * HEAD, 3 * (BODY + HEAD) + 3 * HEAD),
        ("fedbabu", {"finetune_epochs": 0}, 2 * 3 * BODY, 2 * 3 * BODY),
        ("fedbabu", {"finetune_epochs": 1}, 3 * 3 * BODY, 2 * 3 * BODY),
        ("local", {}, 0, 0),
    ],
)
def test_two_rounds_of_three_clients_cost_what_the_paper_says(
    method: str, options: dict[str, Any], numbers_down: int, numbers_up: int
) -> None:
    layout = Layout.of(Network(), "head")
    assert (layout.size("body"), layout.size("head")) == (BODY, HEAD)
    job = finished(job_of(method, options))
    assert job.result().bytes == {"down": 4 * numbers_down, "up": 4 * numbers_up}
    assert (job.history[-1].bytes_down, job.history[-1].bytes_up) == (4 * numbers_down, 4 * numbers_up)


def test_local_statistics_do_not_travel() -> None:
    """BatchNorm over 8 features: 16 parameters and 16 statistics, of which only the parameters are sent."""
    up = {b: finished(job_of("fedavg", norm=True, buffers=b)).result().bytes["up"] for b in ("average", "local")}
    assert up == {"average": 4 * 6 * (BODY + HEAD + 16 + 16), "local": 4 * 6 * (BODY + HEAD + 16)}


# ---------------------------------------------------------------- the local engine


def test_a_reply_must_run_over_the_clients() -> None:
    from fedkin.methods.fedavg import FedAvg

    class Careless(FedAvg):
        def train(self, client, model):
            return {"model": client.model(client.fit(client.rows(model=model))).mean(0)}

    with pytest.raises(
        FedKinError, match=r"Careless\.train returned 'model' of shape .*, not a row of numbers for each of 3 clients"
    ):
        job_of(Careless).advance()


def test_chunks_join_masks_and_rows() -> None:
    from fedkin.methods.fedavg import FedAvg

    class Odd(FedAvg):
        def round(self, fed, cohort):
            got = fed.ask(cohort, self.train, mine=each(torch.arange(5.0)))
            self.seen, self.masked, self.mask = got["mine"], got["masked"], got.mask("masked")

        def train(self, client, mine):
            values = torch.from_numpy(client.ids)[:, None].float().expand(-1, 2)
            return {"mine": mine, "masked": Masked(values, values > 2)}

    for chunk in (None, 1, 2, 5, 9):
        job = job_of(Odd, sizes=(4,) * 5, chunk=chunk)
        job.method.round(job.fed, job.fed.all)
        assert job.method.seen.tolist() == [0, 1, 2, 3, 4]
        assert job.method.masked[:, 0].tolist() == [0, 1, 2, 3, 4]
        assert job.method.mask[:, 1].tolist() == [False, False, False, True, True]
