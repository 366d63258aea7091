"""C-PFL: the committee's equations, what travels, the limits, and what one lying member can do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from fedkin.config import make_config
from fedkin.core.federation import Answer
from fedkin.data import Dataset, Split
from fedkin.errors import UsageError
from fedkin.methods.c_pfl import CPFL
from fedkin.methods.c_pfl.committee import lower_bound, tally
from fedkin.rounds import Job, prepare

CLASSES = 4


def data(clients: int = 8, train: int = 12, hold: int = 6, test: int = 4, labels: int = 3) -> tuple[Dataset, Split]:
    """Noisy samples of the first `labels` of four classes: nobody has the last one."""
    rng = np.random.default_rng(1)
    each = train + hold + test
    y = np.tile(np.arange(each) % labels, clients).astype(np.int64)
    x = (rng.normal(size=(clients * each, 6)) * 1.5 + 2 * np.eye(6)[y]).astype(np.float32)
    rows = np.arange(clients * each).reshape(clients, each)
    own, held, last = (tuple(p) for p in np.split(rows, [train, train + hold], axis=1))
    names = tuple(f"c{i}" for i in range(clients))
    return Dataset("toy", x, y, CLASSES), Split(own, held, last, names)


def job(
    options: Mapping[str, Any] | None = None,
    *,
    given: tuple[Dataset, Split] | None = None,
    tamper: Any = None,
    average: Any = None,
    **config: Any,
) -> Job:
    values = {"method": "c-pfl", "model": "mlp", "rounds": 3, "epochs": 1, "batch": 4, "lr": 0.1, "device": "cpu"}
    more = {} if average is None else {"average": average}
    return prepare(
        make_config({**values, **config, "options": dict(options or {})}), data=given or data(), tamper=tamper, **more
    )


def server(run: Job) -> CPFL:
    assert isinstance(run.method, CPFL)
    return run.method


def notes(run: Job, name: str) -> list[Any]:
    return [n.value for n in run.fed.notes if n.name == name]


def on(phase: str, change: Callable[[int, torch.Tensor], torch.Tensor], reply: str) -> Any:
    """A tamper that changes one client's reply at a time."""

    def tamper(ids: Any, asked: str, message: Any, answer: Answer, round: int) -> Answer:
        if asked == phase:
            value = answer.replies[reply]
            assert isinstance(value, torch.Tensor)
            rows = [change(int(c), v.clone()) for c, v in zip(answer.ids, value, strict=True)]
            answer.replies[reply] = torch.stack(rows)
        return answer

    return tamper


# ------------------------------------------------------------ equations


@pytest.mark.parametrize("k", [2, 5, 45])
def test_bound_is_the_lower_end_of_a_one_sided_t_interval(k: int) -> None:
    scores = torch.rand(k, dtype=torch.float64)
    low, _ = stats.t.interval(0.90, k - 1, loc=scores.numpy().mean(), scale=stats.sem(scores.numpy()))
    assert lower_bound(scores, 0.05) == pytest.approx(low, abs=1e-12)


def test_bound_of_one_or_of_equal_scores_is_that_score() -> None:
    assert lower_bound(torch.tensor([0.3], dtype=torch.float64), 0.05) == 0.3
    for k in range(2, 12):
        for percent in range(100):  # some of these means round up
            equal = torch.full((k,), percent / 100, dtype=torch.float64)
            assert bool((equal >= lower_bound(equal, 0.5)).all())


def votes(table: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Accuracies [K, M], NaN where there is no vote."""
    share = torch.tensor(table, dtype=torch.float64).unsqueeze(2)
    return share.nan_to_num(), (~share.isnan()).double()


@pytest.mark.parametrize("members", [1, 2, 3, 4, 5, 6])
def test_votes_by_mean_median_and_middle_third(members: int) -> None:
    table = np.random.default_rng(members).random((members, 7))
    args = votes(table.tolist())
    np.testing.assert_allclose(tally(*args, "mean"), table.mean(0), rtol=1e-7)
    np.testing.assert_allclose(tally(*args, "median"), np.median(table, 0), rtol=1e-6)
    if members == 3:
        np.testing.assert_allclose(tally(*args, "trimmed"), np.sort(table, 0)[1], rtol=1e-7)
    if members == 6:
        np.testing.assert_allclose(tally(*args, "trimmed"), np.sort(table, 0)[2:4].mean(0), rtol=1e-7)


def test_missing_votes_are_left_out_and_no_vote_is_no_score() -> None:
    nan = float("nan")
    found = tally(*votes([[0.2, nan, nan], [0.6, 0.5, nan], [nan, 0.7, nan]]), "mean")
    np.testing.assert_allclose(found[:2], [0.4, 0.6])
    assert bool(found[2].isnan())


def test_balanced_score_by_hand() -> None:
    """Class 0: members have 2, 4, 100 samples, the median 4 caps the third. Class 1: one member. Class 2: nobody."""
    count = torch.tensor([[[2, 0, 0]], [[4, 10, 0]], [[100, 0, 0]]], dtype=torch.float64)
    right = torch.tensor([[[1, 0, 0]], [[4, 9, 0]], [[25, 0, 0]]], dtype=torch.float64)
    class0 = (2 * 0.5 + 4 * 1.0 + 4 * 0.25) / 10
    np.testing.assert_allclose(tally(right, count, "mean"), [(class0 + 0.9) / 2])
    np.testing.assert_allclose(tally(right, count, "median"), [(0.5 + 0.9) / 2], rtol=1e-6)


def test_balanced_does_not_reward_having_the_committees_classes() -> None:
    """Two members full of class 0, one of class 1: a body that knows only class 0 must not beat its mirror image."""
    count = torch.tensor([[20, 0], [20, 0], [0, 20]], dtype=torch.float64)[:, None].expand(3, 2, 2)
    right = torch.stack([count[:, 0] * torch.tensor([1.0, 0.0]), count[:, 0] * torch.tensor([0.0, 1.0])], 1)
    np.testing.assert_allclose(tally(right, count, "mean"), [0.5, 0.5])


# ------------------------------------------------------------ rounds


def test_committee_size() -> None:
    assert [len(server(job(given=data(n, 4, 2, 2))).committee) for n in (2, 3, 4, 8, 50)] == [1, 2, 3, 3, 5]
    assert len(server(job({"committee_trains": True}, given=data(2))).committee) == 2
    with pytest.raises(UsageError, match="committee=8 of 8"):
        job({"committee": 8})
    with pytest.raises(UsageError, match="1 clients"):
        job(given=data(1))


@pytest.mark.parametrize("options", [{}, {"score": "balanced"}, {"profile": "robust"}, {"vote": "trimmed"}])
def test_scores_threshold_average_and_committee_follow_the_paper(options: dict[str, Any]) -> None:
    """Every round against a plain retelling of section 4 from the messages that travelled."""
    sent: dict[str, Any] = {}

    def spy(ids: Any, phase: str, message: Any, answer: Answer, round: int) -> Answer:
        sent[phase] = (list(ids), message, answer)
        return answer

    run = job(options, given=data(hold=30), tamper=spy, rounds=6, lr=0.3)
    me, tau, contribution, ever, rejections = server(run), 0.0, np.zeros(8), set[int](), 0
    for _ in range(6):
        committee = set(me.committee)
        run.advance()
        trainers, _, trained = sent["train"]
        judges, shown, _ = sent["validate"]
        assert set(trainers) == set(range(8)) - committee
        assert set(judges) == committee
        bodies = trained.replies["body"]
        assert sorted(map(tuple, shown["bodies"].tolist())) == sorted(map(tuple, bodies.tolist()))
        scores = _by_hand(run, bodies, judges, me.options.score, me.options.vote)
        assert notes(run, "threshold")[-1] == pytest.approx(tau)
        k, accepted = len(scores), scores >= tau - 1e-7
        bound = scores.mean() - stats.t.ppf(0.95, k - 1) * scores.std(ddof=1) / k**0.5
        relaxed = not accepted.any()
        accepted, tau = (scores >= bound - 1e-7, bound) if relaxed else (accepted, max(tau, bound))
        rejections += int((~accepted).sum())
        np.testing.assert_allclose(notes(run, "scores")[-1][trainers], scores, rtol=1e-6)
        assert notes(run, "accepted")[-1] == [c for c, a in zip(trainers, accepted, strict=True) if a]
        assert notes(run, "rejected")[-1] == [c for c, a in zip(trainers, accepted, strict=True) if not a]
        torch.testing.assert_close(me.body, bodies[torch.from_numpy(accepted)].mean(0))
        accuracy = (scores - scores.min()) / np.ptp(scores) if np.ptp(scores) else np.ones(k)
        contribution[trainers] += 0.5 * accuracy + 0.5 / k
        now = {c for c, a in zip(trainers, accepted, strict=True) if a}
        ever |= now
        by_worth = sorted(range(8), key=lambda c: -contribution[c])  # Algorithm 3, line 8, in the order of section 4.3
        rank = [c for c in by_worth if c in now] + [c for c in by_worth if c in ever - now]
        rank += [c for c in by_worth if c in committee - ever] + [c for c in by_worth if c not in committee | ever]
        assert set(me.committee) == set(rank[:3])
        assert notes(run, "committee")[-1] == sorted(committee)
    np.testing.assert_allclose(me.contribution, contribution, rtol=1e-6)
    assert rejections


def _by_hand(run: Job, bodies: torch.Tensor, judges: list[int], score: str, vote: str) -> np.ndarray[Any, Any]:
    """All toy members hold equally many samples of each class, so pooling by class and by member weigh alike."""
    site, table = run.site, []
    for body in bodies:
        row = site.initial.clone()
        row[site.layout.columns("body")] = body
        net = site.layout.load(run.model, row).eval()
        hits = []
        for j in judges:
            index = torch.from_numpy(site.parts["validation"][j])
            right = net(site.source.batch(index)).argmax(1) == site.source.labels(index)
            by_class = [right[site.source.labels(index) == c].float().mean().item() for c in range(3)]
            hits.append(by_class if score == "balanced" else [right.float().mean().item()])
        agree = np.mean if vote == "mean" else np.median
        table.append(float(np.mean(agree(np.array(hits), 0))))
    return np.array(table)


def test_large_clients_weigh_more_and_weights_sum_to_one() -> None:
    dataset, split = data(6)
    train = tuple(rows[: 2 + 2 * i] for i, rows in enumerate(split.train))
    kept: dict[str, torch.Tensor] = {}
    run = job(
        given=(dataset, Split(train, split.validation, split.test, split.names)),
        tamper=on("train", lambda c, body: kept.setdefault(str(c), body), "body"),
    )
    run.advance()
    ids = notes(run, "accepted")[0]
    n = torch.tensor([2.0 + 2 * i for i in ids])
    torch.testing.assert_close(server(run).body, (n / n.sum()) @ torch.stack([kept[str(i)] for i in ids]))


def test_threshold_never_falls_unless_it_is_relaxed() -> None:
    run = job(rounds=8, lr=0.3)
    taus = []
    for _ in range(8):
        run.advance()
        taus.append(server(run).tau)
    relaxed = {n.round for n in run.fed.notes if n.name == "relaxed"}
    falls = {i for i in range(1, 8) if taus[i] < taus[i - 1]}
    assert falls <= relaxed
    assert len(relaxed) < 8
    assert taus[-1] > 0


@pytest.mark.parametrize(("on_empty", "passed"), [("relax", "bound"), ("keep", "none"), ("top_half", "half")])
@pytest.mark.parametrize("threshold", ["ci", "fixed"])
def test_when_nothing_passes(on_empty: str, passed: str, threshold: str) -> None:
    share = {i: 0.1 * i for i in range(8)}
    run = job({"tau0": 1.0, "on_empty": on_empty, "threshold": threshold, "committee_trains": True, "committee": 8})
    me, scores = server(run), torch.tensor(list(share.values()), dtype=torch.float64)
    accepted = me.qualified(run.fed, scores)
    bound = lower_bound(scores, 0.05)
    want = {"bound": scores >= bound, "none": scores > 2, "half": scores >= 0.39}[passed]
    assert accepted.tolist() == want.tolist()
    assert me.tau == (bound if on_empty == "relax" and threshold == "ci" else 1.0)
    before = me.body.clone()
    run.advance()
    assert torch.equal(before, me.body) == (on_empty == "keep")


def test_contribution_by_size() -> None:
    for norm, want in (("share", [0.1, 0.3, 0.6]), ("max", [1 / 6, 0.5, 1.0])):
        run = job({"alpha": 0.0, "size_norm": norm})
        ids, n = torch.tensor([1, 4, 6]), torch.tensor([1.0, 3.0, 6.0], dtype=torch.float64)
        equal = torch.full((3,), 0.5, dtype=torch.float64)
        server(run).renew(run.fed, ids, n, equal, equal > 0)
        np.testing.assert_allclose(server(run).contribution[ids], want)
    run = job({"alpha": 1.0})
    server(run).renew(run.fed, ids, n, equal, equal > 0)
    assert server(run).contribution[ids].tolist() == [1, 1, 1]  # all alike: nobody is worse


def test_the_committee_is_topped_up_from_the_once_verified_then_from_the_old_one() -> None:
    run = job({"committee": 4})
    me = server(run)
    me.committee, me.verified[2], me.contribution[7] = [0, 1, 3, 5], True, 9.0
    scores = torch.tensor([0.9, 0.1], dtype=torch.float64)
    me.renew(run.fed, torch.tensor([4, 6]), torch.ones(2, dtype=torch.float64), scores, scores > 0.5)
    assert me.committee == [0, 1, 2, 4]  # 4 passed now, 2 once did, 0 and 1 sat before; 7 never passed
    me.committee, me.mute = [0, 1, 3, 5], [2, 0]
    me.renew(run.fed, torch.tensor([4, 6]), torch.ones(2, dtype=torch.float64), scores, scores > 0.5)
    assert me.committee == [1, 3, 4, 5]  # who cannot vote comes last


def test_old_members_come_after_verified_clients_that_have_contributed_more() -> None:
    """Algorithm 3, line 8, and eqs. 8 and 9: seats go by contribution among the verified; a seat held before is none of
    it. Worked out for every client in turn: how many must be seated before it."""
    random = np.random.default_rng(4)
    for _ in range(40):
        run = job({"committee": 4})
        me = server(run)
        me.committee = sorted(random.choice(8, 4, replace=False).tolist())
        me.verified = torch.from_numpy(random.random(8) < 0.6)
        me.contribution = torch.from_numpy(random.permutation(8).astype(float))
        trained = [c for c in range(8) if c not in me.committee]
        old, passed = me.committee, random.random(4) < 0.4
        scores = torch.from_numpy(np.where(passed, 0.9, 0.1))
        me.renew(run.fed, torch.tensor(trained), torch.ones(4, dtype=torch.float64), scores, scores > 0.5)
        now = [c for c, ok in zip(trained, passed, strict=True) if ok]

        def tier(c: int, now: list[int] = now, old: list[int] = old, me: CPFL = me) -> int:
            return 0 if c in now else 1 if me.verified[c] else 2 if c in old else 3

        def before(a: int, b: int, tier: Callable[[int], int] = tier, me: CPFL = me) -> bool:
            more = me.contribution[a] > me.contribution[b] or (me.contribution[a] == me.contribution[b] and a < b)
            return tier(a) < tier(b) or (tier(a) == tier(b) and bool(more))

        assert me.committee == [c for c in range(8) if sum(before(other, c) for other in range(8)) < 4]


# ------------------------------------------------------------ limits


@pytest.mark.parametrize("way", ["each", "batched"])
def test_a_committee_that_lets_all_pass_is_fedbabu(way: str) -> None:
    given = data(hold=0)
    open_door = {"threshold": "fixed", "tau0": 0.0, "committee_data": "train", "committee_trains": True}
    one = job(open_door, given=given, participation=0.6, way=way)
    two = job({"finetune": "head"}, given=given, participation=0.6, way=way, method="fedbabu")
    for _ in range(3):
        one.advance()
        two.advance()
        assert torch.equal(server(one).body, two.method.body)  # type: ignore[attr-defined]
    one.finish()
    two.finish()
    assert torch.equal(one.result()._rows, two.result()._rows)


def test_only_the_head_is_tuned_and_only_at_the_end() -> None:
    run = job({"finetune_epochs": 2})
    run.advance()
    layout, first = run.site.layout, run.site.initial
    assert torch.equal(layout.head(run.result()._rows), layout.head(first).expand(8, -1))
    assert run.finish() is not None
    rows = run.result()._rows
    assert torch.equal(layout.body(rows), server(run).body.expand(8, -1))
    assert not torch.equal(layout.head(rows)[0], layout.head(rows)[1])
    assert job({"finetune_epochs": 0}).finish() is None


def test_a_rule_sees_only_what_was_accepted() -> None:
    seen: list[int] = []

    def count(rows: torch.Tensor, weights: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        seen.append(len(rows))
        return rows.mean(0)

    run = job(average=count, lr=0.3)
    for _ in range(3):
        run.advance()
    assert seen == [len(a) for a in notes(run, "accepted")]
    assert min(seen) < 5


# ------------------------------------------------------------ what travels


@pytest.mark.parametrize("score", ["accuracy", "balanced"])
@pytest.mark.parametrize("quorum", [None, 1, 2])
@pytest.mark.parametrize("trains", [False, True])
def test_ledger(score: str, quorum: int | None, trains: bool) -> None:
    options = {"score": score, "committee_quorum": quorum, "committee_trains": trains, "finetune_epochs": 1}
    run = job(options)
    run.advance()
    body = 4 * run.site.layout.size("body")
    trainers, committee = (8, 3) if trains else (5, 3)
    train = [e for e in run.fed.exchanges if e.phase == "train"]
    assert [(e.bytes_down, e.bytes_up) for e in train] == [(trainers * body, trainers * body)]
    judged = quorum * trainers if quorum else committee * trainers - (committee if trains else 0)
    asked = [e for e in run.fed.exchanges if e.phase == "validate"]
    assert sum(e.bytes_down for e in asked) == judged * body
    members = sum(e.asked for e in asked)
    up = judged * 4 if score == "accuracy" else judged * 4 * CLASSES + members * 4 * CLASSES
    assert sum(e.bytes_up for e in asked) == up
    if not (quorum or trains):
        assert len(asked) == 1
    run.finish()
    assert run.fed.exchanges[-1].bytes_down == 8 * body
    assert run.fed.exchanges[-1].bytes_up == 0


def test_members_cannot_tell_who_sent_a_body_and_votes_find_their_way_back() -> None:
    """Scores must follow the body, and renaming the trainers must not change what a member sees."""
    shown: list[torch.Tensor] = []
    flip: dict[str, torch.Tensor] = {}

    def spy(ids: Any, phase: str, message: Any, answer: Answer, round: int) -> Answer:
        if phase == "train":
            bodies = answer.replies["body"]
            assert isinstance(bodies, torch.Tensor)
            answer.replies["body"] = flip["body"] = bodies[flip["order"]]
        if phase == "validate":
            shown.append(message["bodies"])
        return answer

    found = []
    for order in ([0, 1, 2, 3, 4], [3, 0, 4, 1, 2]):
        flip["order"] = torch.tensor(order)
        run = job(tamper=spy, given=data(hold=30), lr=0.3)
        run.advance()
        found.append(notes(run, "scores")[0][~notes(run, "scores")[0].isnan()])
    assert torch.equal(shown[0], shown[1])
    assert not torch.equal(shown[1], flip["body"])
    assert torch.equal(found[0][torch.tensor([3, 0, 4, 1, 2])], found[1])
    assert len(set(found[0].tolist())) > 1


def test_a_quorum_is_q_members_for_each_body_the_same_at_the_same_seed() -> None:
    def judges(seed: int) -> dict[bytes, set[int]]:
        found: dict[bytes, set[int]] = {}

        def spy(ids: Any, phase: str, message: Any, answer: Answer, round: int) -> Answer:
            for body in message["bodies"] if phase == "validate" else []:
                found.setdefault(body.numpy().tobytes(), set()).update(ids.tolist())
            return answer

        run = job({"committee_quorum": 2, "committee": 4, "committee_trains": True}, tamper=spy, seed=seed)
        run.advance()
        return found

    first = judges(0)
    assert len(first) == 8
    assert {len(j) for j in first.values()} == {2}
    assert len({tuple(sorted(j)) for j in first.values()}) > 2
    assert first == judges(0)


def test_a_member_never_judges_its_own_body() -> None:
    own: dict[int, torch.Tensor] = {}

    def spy(ids: Any, phase: str, message: Any, answer: Answer, round: int) -> Answer:
        if phase == "train":
            bodies = answer.replies["body"]
            assert isinstance(bodies, torch.Tensor)
            own.update(zip(ids.tolist(), bodies, strict=True))
        if phase == "validate":
            for member in ids.tolist():
                assert not any(torch.equal(own[member], b) for b in message["bodies"])
                assert len(message["bodies"]) == 7
        return answer

    run = job({"committee_trains": True}, tamper=spy)
    run.advance()
    assert len(own) == 8


# ------------------------------------------------------------ lies, faults, odd clients


FIXED = {"committee": 3, "threshold": "fixed", "tau0": 0.5, "on_empty": "keep"}


def decide(options: dict[str, Any], votes: Callable[[bool], dict[str, torch.Tensor]]) -> str:
    """Two honest members and a liar judge four bodies with the bar at 0.5; `votes(liar)` is what a member sends."""
    liar = server(job(FIXED, given=data(7))).committee[1]

    def tamper(ids: Any, phase: str, message: Any, answer: Answer, round: int) -> Answer:
        if phase == "validate":
            sent = [votes(c == liar) for c in ids.tolist()]
            answer.replies = {name: torch.stack([v[name] for v in sent]) for name in sent[0]}
        return answer

    run = job({**FIXED, **options}, given=data(7), tamper=tamper)
    run.advance()
    accepted = len(notes(run, "accepted")[0])
    assert accepted in (0, 4)
    return "accepted" if accepted else "rejected"


@pytest.mark.parametrize(("honest", "lie", "right"), [(0.7, 0.0, "accepted"), (0.3, 1.0, "rejected")])
def test_one_lying_member_decides_a_mean_but_not_a_median(honest: float, lie: float, right: str) -> None:
    def votes(liar: bool) -> dict[str, torch.Tensor]:
        return {"right": torch.full((4,), lie if liar else honest)}

    assert decide({"vote": "mean"}, votes) != right
    assert decide({"vote": "median"}, votes) == right
    assert decide({"vote": "trimmed"}, votes) == right


@pytest.mark.parametrize(("honest", "lie", "right"), [(8, 0, "accepted"), (2, 10, "rejected")])
@pytest.mark.parametrize("vote", ["mean", "median", "trimmed"])
def test_one_member_that_claims_a_million_samples_does_not_decide_a_balanced_score(
    honest: int, lie: int, right: str, vote: str
) -> None:
    def votes(liar: bool) -> dict[str, torch.Tensor]:
        many = 100_000 if liar else 1
        hits = torch.full((4, CLASSES), (lie if liar else honest) * many, dtype=torch.int32)
        return {"right": hits, "count": torch.full((CLASSES,), 10 * many, dtype=torch.int32)}

    assert decide({"score": "balanced", "vote": vote}, votes) == right


@pytest.mark.parametrize(("honest", "lie", "right"), [(7, 0, "accepted"), (3, 10, "rejected")])
def test_under_a_balanced_score_too_the_median_is_what_stops_a_liar_in_a_close_call(
    honest: int, lie: int, right: str
) -> None:
    def votes(liar: bool) -> dict[str, torch.Tensor]:
        hits = torch.full((4, CLASSES), lie if liar else honest, dtype=torch.int32)
        return {"right": hits, "count": torch.full((CLASSES,), 10, dtype=torch.int32)}

    assert decide({"score": "balanced", "vote": "mean"}, votes) != right
    assert decide({"score": "balanced", "vote": "median"}, votes) == right


@pytest.mark.parametrize("lie", [1e9, -5.0, 1.5])
def test_impossible_votes_do_not_count_and_cost_the_seat(lie: float) -> None:
    liar = server(job(FIXED)).committee[0]
    run = job(FIXED, tamper=on("validate", lambda c, v: v * 0 + (lie if c == liar else 0.6), "right"))
    run.advance()
    scores = notes(run, "scores")[0]
    np.testing.assert_allclose(scores[~scores.isnan()], 0.6, rtol=1e-6)
    assert server(run).mute == [liar]
    assert liar not in server(run).committee


def test_impossible_counts_do_not_count() -> None:
    liar = server(job(FIXED)).committee[0]
    cheat = on("validate", lambda c, v: v + (10**6 if c == liar else 0), "right")
    run = job({**FIXED, "score": "balanced"}, tamper=cheat)
    run.advance()
    assert server(run).mute == [liar]


@pytest.mark.parametrize("quorum", [None, 2])
def test_a_body_that_is_not_finite_is_neither_judged_nor_averaged(quorum: int | None) -> None:
    bad = next(c for c in range(8) if c not in server(job()).committee)
    broken = on("train", lambda c, v: v * float("nan") if c == bad else v, "body")
    run = job({"committee_quorum": quorum}, tamper=broken)
    run.advance()
    assert bool(server(run).body.isfinite().all())
    assert bad not in notes(run, "accepted")[0] + notes(run, "rejected")[0]
    assert [(f.client, f.phase) for f in run.fed.failures] == [(bad, "train")]
    assert server(run).contribution[bad] == 0


def test_a_member_without_holdout_gives_no_vote_and_loses_its_seat() -> None:
    for score in ("accuracy", "balanced"):
        dataset, split = data()
        poor = server(job()).committee[0]
        hold = tuple(v[:0] if c == poor else v for c, v in enumerate(split.validation))
        run = job({"score": score}, given=(dataset, Split(split.train, hold, split.test, split.names)))
        run.advance()
        assert server(run).mute == [poor]
        assert not run.fed.failures
        assert not notes(run, "scores")[0][list(set(range(8)) - set(notes(run, "committee")[0]))].isnan().any()


@pytest.mark.parametrize("score", ["accuracy", "balanced"])
def test_no_holdout_anywhere_is_said_and_judging_on_training_data_needs_none(score: str) -> None:
    run = job({"score": score}, given=data(hold=0), rounds=9)
    before = server(run).body.clone()
    run.advance()
    assert torch.equal(before, server(run).body)  # nobody vouches: nothing is averaged, and others are asked next
    assert not set(notes(run, "committee")[0]) & set(server(run).committee)
    run.advance()
    with pytest.raises(UsageError, match="validation_share"):
        run.advance()  # three committees of three: all eight clients have been asked
    run = job({"score": score, "committee_data": "train"}, given=data(hold=0))
    run.advance()
    assert not torch.equal(before, server(run).body)


def test_the_holdout_is_what_members_judge_on_by_default() -> None:
    dataset, split = data()
    wrong = dataset.y.copy()
    wrong[np.concatenate(split.validation)] = 3  # a class no body has learnt
    best = {}
    for where in ("holdout", "train"):
        options = {"threshold": "fixed", "committee_data": where}
        run = job(options, given=(Dataset("toy", dataset.x, wrong, CLASSES), split), rounds=6)
        for _ in range(6):
            run.advance()
        best[where] = float(notes(run, "scores")[-1].nan_to_num().max())
    assert best["holdout"] < 0.2
    assert best["train"] > 0.5
    assert make_config({"method": "c-pfl"}).validation_share is None
    assert CPFL.holdout == 0.1


@pytest.mark.parametrize("clients", [2, 3])
@pytest.mark.parametrize("options", [{}, {"committee_trains": True}, {"committee_quorum": 1}, {"profile": "robust"}])
def test_two_and_three_clients(clients: int, options: dict[str, Any]) -> None:
    run = job(options, given=data(clients), rounds=4)
    before = server(run).body.clone()
    for _ in range(4):
        run.advance()
    assert not torch.equal(before, server(run).body)
    assert 1 <= len(server(run).committee) <= clients


@pytest.mark.parametrize("options", [{}, {"profile": "robust", "committee_quorum": 2, "committee_trains": True}])
def test_dropouts_stragglers_partial_participation_and_tiny_clients(options: dict[str, Any]) -> None:
    dataset, split = data(10)
    train = tuple(v[:1] if c % 3 == 0 else v for c, v in enumerate(split.train))
    hold = tuple(v[:0] if c % 3 == 0 else v for c, v in enumerate(split.validation))
    given = (dataset, Split(train, hold, split.test, split.names))
    run = job(options, given=given, rounds=12, participation=0.4, drop=0.4, straggle=0.2)
    for _ in range(12):
        assert run.advance() is not None
        assert len(server(run).committee) == 3
    run.finish()
    assert bool(server(run).body.isfinite().all())
    assert any(f.phase == "validate" for f in run.fed.failures)


def test_everybody_silent_changes_nothing() -> None:
    run = job(tamper=on("train", lambda c, v: v * float("nan"), "body"))
    before, committee = server(run).body.clone(), server(run).committee
    run.advance()
    assert torch.equal(before, server(run).body)
    assert not set(server(run).committee) & set(committee)  # others get to train
    assert server(run).tau == 0


def test_a_committee_that_never_answers_is_drawn_anew() -> None:
    dead = server(job()).committee
    run = job(tamper=on("validate", lambda c, v: v * float("nan") if c in dead else v, "right"))
    run.advance()
    assert not set(server(run).committee) & set(dead)
    before = server(run).body.clone()
    run.advance()
    assert not torch.equal(before, server(run).body)


def test_server_memory_is_plain_and_a_run_repeats_itself() -> None:
    runs = [job({"profile": "robust", "committee_quorum": 2}) for _ in range(2)]
    for run in runs:
        for _ in range(3):
            run.advance()
    one, two = (server(run).state() for run in runs)
    for name, value in one.items():
        assert isinstance(value, torch.Tensor | int | float | str | list), name
        assert torch.equal(value, two[name]) if isinstance(value, torch.Tensor) else value == two[name]
