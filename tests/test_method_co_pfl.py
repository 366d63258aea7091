"""CO-PFL: its equations worked out the slow way, its limits, its messages."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conformance import FEATURES, Network, every_check, finished, job_of, personal_rows, poison, sane
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import Bench, distance, numbers
from torch import Tensor, nn

from fedkin.compute.layout import Layout
from fedkin.compute.optim import Adam, Moments
from fedkin.core.cohort import Cohort
from fedkin.core.federation import Answer, Clients, Faults, Federation, Masked, Reply, weighted_mean
from fedkin.core.store import Keep
from fedkin.methods import METHODS, Method
from fedkin.methods.co_pfl import COPFL, COPFLOptions
from fedkin.methods.co_pfl.masks import cosine, grow, learnable, leave_one_out, normalised, shared_mean

LAYOUT = Layout.of(Network(norm=True), "head", "average")
PARAMETERS = LAYOUT.parameters
ways = pytest.mark.parametrize("way", ["each", "threads", "batched"])


class Tap:
    """Listens to every exchange: what went down and what came up, round by round."""

    def __init__(self, change: Any = None) -> None:
        self.down: list[dict[str, Any]] = []
        self.up: list[dict[str, Tensor]] = []
        self.ids: list[list[int]] = []
        self.change = change

    def __call__(self, ids: Any, phase: str, message: Any, answer: Answer, round: int) -> Answer:
        if self.change is not None:
            self.change(answer, round)
        plain = {k: v.values if isinstance(v, Masked) else v for k, v in answer.replies.items()}
        self.down.append({k: v.rows.clone() if hasattr(v, "rows") else v.clone() for k, v in message.items()})
        self.up.append({k: v.clone() for k, v in plain.items()})
        self.ids.append(ids.tolist())
        return answer


# ---------------------------------------------------------------- masks


@given(
    seed=st.integers(0, 10_000),
    rate=st.floats(0, 1),
    budget=st.floats(0, 1),
    scope=st.sampled_from(["per_tensor_unmasked", "global"]),
)
@settings(max_examples=60, deadline=None)
def test_masks_only_grow_and_never_beyond_the_budget(seed: int, rate: float, budget: float, scope: Any) -> None:
    random = torch.Generator().manual_seed(seed)
    mask = torch.zeros(3, LAYOUT.width, dtype=torch.bool)
    for _ in range(4):
        moved = torch.rand(3, LAYOUT.width, generator=random).round(decimals=seed % 3)  # many ties for some seeds
        grown = grow(mask, moved, LAYOUT, rate, budget, scope)
        assert (grown | mask).equal(grown), "a personal coordinate became shared again"
        assert not grown[:, ~learnable(LAYOUT, mask.device)].any(), "a statistic was made personal"
        assert (grown.sum(1) <= budget * PARAMETERS).all()
        new = grown & ~mask
        if scope == "global":
            assert (new.sum(1) <= math.ceil(rate * PARAMETERS)).all()
        for slot in LAYOUT.slots if scope != "global" else ():
            here = slice(slot.start, slot.stop)
            size = slot.shape.numel()
            assert (grown[:, here].sum(1) <= budget * size).all()
            assert slot.name.endswith("weight") or not grown[:, here].any()
            for k in range(3):
                chosen, left = moved[k, here][new[k, here]], moved[k, here][~grown[k, here]]
                if len(chosen) and len(left):
                    assert chosen.min().bfloat16() >= left.max().bfloat16(), "a smaller change was preferred"
        mask = grown


def test_a_mask_gains_a_share_of_what_is_left_until_the_budget_is_used_up() -> None:
    """0.25, 0.4375, and then 0.5 instead of 0.578: the budget is strict."""
    layout = Layout.of(nn.Sequential(nn.Linear(16, 16, bias=False)), "")
    mask, shares = torch.zeros(1, 256, dtype=torch.bool), []
    for _ in range(4):
        mask = grow(mask, torch.rand(1, 256), layout, 0.25, 0.5, "per_tensor_unmasked")
        shares.append(mask.float().mean().item())
    assert shares == [0.25, 0.4375, 0.5, 0.5]


def test_the_global_top_may_hold_what_is_personal_already() -> None:
    layout = Layout.of(nn.Sequential(nn.Linear(4, 2)), "")  # ten numbers
    moved = torch.tensor([[9.0, 8, 7, 6, 5, 4, 3, 2, 1, 0]])
    first = grow(torch.zeros(1, 10, dtype=torch.bool), moved, layout, 0.3, 0.5, "global")
    assert first.nonzero()[:, 1].tolist() == [0, 1, 2]
    assert grow(first, moved, layout, 0.3, 0.5, "global").equal(first)
    assert grow(first, moved.flip(1), layout, 0.3, 0.5, "global").nonzero()[:, 1].tolist() == [0, 1, 2, 8, 9]


def test_rounding_does_not_decide_which_coordinates_become_personal() -> None:
    layout = Layout.of(nn.Sequential(nn.Linear(16, 16, bias=False)), "")
    mask, even = torch.zeros(1, 256, dtype=torch.bool), torch.full((1, 256), 1e-4)
    shaken = even * (1 + 1e-6 * torch.randn(1, 256))
    assert not shaken.equal(even)
    for scope in ("per_tensor_unmasked", "global"):
        assert grow(mask, shaken, layout, 0.25, 0.5, scope).equal(grow(mask, even, layout, 0.25, 0.5, scope))


@pytest.mark.parametrize("scope", ["per_tensor_unmasked", "global"])
def test_exact_ranking_takes_the_largest_changes_as_they_are(scope: Any) -> None:
    """Eq. 6 to the last digit, where three digits leave ties."""
    layout = Layout.of(nn.Sequential(nn.Linear(16, 16, bias=False)), "")
    moved = 1 + 1e-4 * torch.rand(3, 256, generator=torch.Generator().manual_seed(3))
    grown = grow(torch.zeros(3, 256, dtype=torch.bool), moved, layout, 0.25, 0.5, scope, exact=True)
    for row, chosen in zip(moved.tolist(), grown, strict=True):
        largest = sorted(range(256), key=lambda i, row=row: -row[i])[:64]  # type: ignore[misc]
        assert chosen.nonzero().flatten().tolist() == sorted(largest)
    rounded = grow(torch.zeros(3, 256, dtype=torch.bool), moved, layout, 0.25, 0.5, scope)
    assert rounded.nonzero()[:, 1].view(3, -1).tolist() == [list(range(64))] * 3  # all ties: the first ones
    one, two = (finished(job_of("co-pfl", {"ranking": r}, rounds=1, lr=0.01)) for r in ("rounded", "exact"))
    assert not one.site.store.tensors["mask"].equal(two.site.store.tensors["mask"])


def test_the_mean_of_a_coordinate_is_over_those_who_share_it() -> None:
    rows, shared, alpha = torch.randn(5, 40), torch.rand(5, 40) < 0.5, torch.rand(5)
    shared[:, 0], shared[:, 1], kept = False, True, torch.randn(40)
    mean, z = shared_mean(rows, shared, alpha, kept)
    for i in range(40):
        who = shared[:, i]
        expected = (alpha[who] * rows[who, i]).sum() / alpha[who].sum() if who.any() else kept[i]
        assert mean[i].item() == pytest.approx(expected.item(), abs=1e-5)
        assert z[i].item() == pytest.approx(alpha[who].sum().item(), abs=1e-6)


def test_leaving_one_out_is_the_mean_without_it() -> None:
    rows, shared, alpha = torch.randn(5, 40), torch.rand(5, 40) < 0.6, normalised(torch.rand(5) + 0.1)
    mean, z = shared_mean(rows, shared, alpha, torch.zeros(40))
    others, known = leave_one_out(mean, z, alpha, rows, shared)
    for n in range(5):
        rest = torch.arange(5) != n
        alone, weight = shared_mean(rows[rest], shared[rest], alpha[rest], mean)
        assert known[n].equal(shared[n] & (weight > 0))
        assert torch.allclose(others[n], torch.where(shared[n], alone, mean), atol=1e-4)


def test_with_equal_weights_and_no_masks_it_is_the_plain_mean_of_the_others() -> None:
    rows, alpha, shared = torch.randn(4, 30), torch.full((4,), 0.25), torch.ones(4, 30, dtype=torch.bool)
    mean, z = shared_mean(rows, shared, alpha, torch.zeros(30))
    others, known = leave_one_out(mean, z, alpha, rows, shared)
    assert known.all()
    for n in range(4):
        assert torch.allclose(others[n], rows[torch.arange(4) != n].mean(0), atol=1e-5)


def test_with_all_the_weight_there_are_no_others() -> None:
    rows, shared = torch.randn(1, 30), torch.ones(1, 30, dtype=torch.bool)
    others, known = leave_one_out(rows[0] + 1, torch.ones(30), torch.ones(1), rows, shared)
    assert not known.any()
    assert others.equal(rows + 1)
    assert cosine(rows, rows, known).item() == 0


def test_weights_sum_to_one_also_when_nobody_has_a_score() -> None:
    assert normalised(torch.tensor([1.0, 3.0])).tolist() == [0.25, 0.75]
    assert normalised(torch.zeros(4)).tolist() == [0.25] * 4


# ---------------------------------------------------------------- limits


class PersistentAdam(Method):
    """FedAvg, equal weights, clients with an Adam memory that outlives the round."""

    keeps = {"u": Keep("row", "zeros"), "v": Keep("row", "zeros"), "steps": Keep((), "zeros"), "own": Keep("row")}
    alone_after: int | None = None  # from this round on everybody goes on alone, with fresh moments

    def round(self, fed: Federation, cohort: Clients) -> None:
        replies = fed.ask(cohort, self.train, model=self.model)
        self.model = replies.mean("model", otherwise=self.model, weights=torch.ones(len(replies)))

    def train(self, client: Cohort, model: Tensor) -> Reply:
        start = client.rows(model=model)
        if self.alone_after is not None and client.round >= self.alone_after:
            start = client["own"]
            if client.round == self.alone_after:
                client["u"], client["v"], client["steps"] = start * 0, start * 0, torch.zeros(len(client))
        memory = Moments([client["u"], client["v"]], client["steps"])
        client["own"] = client.fit(start, opt=Adam(client.training.opt.lr), moments=memory)
        (client["u"], client["v"]), client["steps"] = memory.buffers, memory.steps
        return {"model": client.model(client["own"])}


class AloneFromRoundOne(PersistentAdam):
    alone_after = 1

    def personal(self, client: Cohort, model: Tensor) -> Tensor:
        return client["own"]


@ways
@pytest.mark.parametrize("options", [{}, {"optimiser": "adam"}, {"alternation": "gauss_seidel"}], ids=str)
def test_without_masks_and_scores_it_is_fedavg_with_persistent_adam(way: str, options: dict[str, Any]) -> None:
    how: dict[str, Any] = {"rounds": 3, "lr": 0.01, "way": way, "sizes": (9, 6, 1)}
    ours = finished(job_of("co-pfl", {"p": 0, "cowa": "none", **options}, **how))
    theirs = finished(job_of(PersistentAdam, **how))
    assert torch.allclose(ours.method.model, theirs.method.model, atol=1e-6)
    fresh = finished(job_of("fedavg", optimiser="adam", **how))
    assert not torch.allclose(ours.method.model, fresh.method.model, atol=1e-4), "the moments do not persist"


def test_without_masks_scores_and_moments_it_is_fedavg() -> None:
    how: dict[str, Any] = {"rounds": 2, "sizes": (3, 3, 3)}
    ours = finished(job_of("co-pfl", {"p": 0, "cowa": "none", "optimiser": "sgd"}, **how))
    assert torch.allclose(ours.method.model, finished(job_of("fedavg", **how)).method.model, atol=1e-6)


@ways
def test_with_everything_personal_after_round_0_it_is_local_training(way: str) -> None:
    how: dict[str, Any] = {"rounds": 4, "lr": 0.01, "way": way}
    ours = finished(job_of("co-pfl", {"p": 1, "gamma": 1, "scope": "global"}, **how))
    assert torch.allclose(personal_rows(ours), personal_rows(finished(job_of(AloneFromRoundOne, **how))), atol=1e-6)
    first = finished(job_of("co-pfl", {"p": 1, "gamma": 1, "scope": "global"}, **{**how, "rounds": 1}))
    assert ours.method.model.equal(first.method.model), "the server's model moved although nobody shares anything"
    assert (ours.method.z == 0).all()


def test_the_learning_rate_is_the_runs_unless_given() -> None:
    runs = personal_rows(finished(job_of("co-pfl", lr=0.02)))
    given_ = personal_rows(finished(job_of("co-pfl", {"lr": 0.02}, lr=0.3)))
    assert runs.equal(given_)
    assert not runs.equal(personal_rows(finished(job_of("co-pfl", lr=0.3))))


# ---------------------------------------------------------------- the client half, the slow way


def two_passes(bench: Bench, options: COPFLOptions, starts: list[Tensor], lr: float) -> list[Tensor]:
    """Algorithm 2, lines 1-16, with ordinary modules: masked gradients, the moments written out."""
    count = len(bench.parts)
    memory = [
        {part: [torch.zeros(bench.layout.width), torch.zeros(bench.layout.width), 0] for part in "ps"}
        for _ in range(count)
    ]
    masks, own, results = [torch.zeros(bench.layout.width, dtype=torch.bool)] * count, [bench.initial] * count, []

    def one(k: int, row: Tensor, h: Tensor, part: str, fit: int, epochs: int, round: int) -> Tensor:
        if not h.any():
            return row
        u, v, tau = memory[k][part]
        for x, y in bench.batches(k, bench.plan(round, "train", fit, epochs)):
            module = bench.module(row)
            F.cross_entropy(module(x), y).backward()
            q = torch.cat([p.grad.flatten() for p in module.parameters()]) * h
            tau += 1
            u, v = 0.9 * u + 0.1 * q, 0.999 * v + 0.001 * q * q
            row = row - lr * h * (u / (1 - 0.9**tau)) / ((v / (1 - 0.999**tau)).sqrt() + 1e-8)
        memory[k][part] = [u, v, tau]
        return row

    for r, w in enumerate(starts):
        for k in range(count):
            start, m, fit = torch.where(masks[k], own[k], w), masks[k], 0
            row, turns = start, bench.epochs if options.alternation == "gauss_seidel" else 1
            for _ in range(turns):
                begin = mine = row
                if r > 0:
                    fit += 1
                    mine = one(k, row, m, "p", fit, bench.epochs // turns, r)
                fit += 1
                from_ = mine if options.alternation == "gauss_seidel" else begin
                row = torch.where(m, mine, one(k, from_, ~m, "s", fit, bench.epochs // turns, r))
            masks[k] = grow(m[None], (start - row).abs()[None], bench.layout, options.p, options.gamma, options.scope)[
                0
            ]
            if options.transfer_moments:
                for i in (0, 1):
                    memory[k]["p"][i] = torch.where(masks[k] & ~m, memory[k]["s"][i], memory[k]["p"][i])
            own[k] = row
        results.append(torch.stack(own))
    return results


@pytest.mark.parametrize("way", ["each", "batched"])
@pytest.mark.parametrize(
    "options",
    [{}, {"alternation": "gauss_seidel"}, {"transfer_moments": True}, {"scope": "global", "p": 0.6, "gamma": 0.7}],
    ids=str,
)
@pytest.mark.parametrize("epochs", [1, 2])
def test_the_two_passes_are_those_of_algorithm_2(way: str, options: dict[str, Any], epochs: int) -> None:
    sizes, lr = (9, 1, 6), 0.01
    bench = Bench(
        Network(),
        *numbers(sum(sizes), (FEATURES,), 3),
        sizes,
        classes=4,
        opt=Adam(lr),
        epochs=epochs,
        way=way,
        keeps=COPFL.keeps,
    )
    method, layout = COPFL(COPFLOptions(cowa="none", **options)), bench.layout
    servers = [bench.initial + 0.01 * torch.randn(layout.width) for _ in range(3)]
    expected = two_passes(bench, method.options, servers, lr)
    for r, w in enumerate(servers):
        client = bench.cohort(round=r)
        start = method.personal(client, w)
        method.train(client, w, torch.ones(layout.width), torch.zeros(3))
        assert distance(client["own"], expected[r], start) < 1e-3


def test_masks_wait_for_their_turn() -> None:
    for every, changed in ((1, [0, 1, 2, 3]), (2, [0, 2])):
        tap = Tap()
        finished(job_of("co-pfl", {"mask_every": every, "p": 0.05}, rounds=4, tamper=tap, lr=0.01))
        masks = [torch.zeros_like(tap.up[0]["mask"]), *(u["mask"] for u in tap.up)]
        assert [r for r in range(4) if not masks[r + 1].equal(masks[r])] == changed
        assert all((masks[r + 1] | masks[r]).equal(masks[r + 1]) for r in range(4))


# ---------------------------------------------------------------- scores and averages


@pytest.mark.parametrize("aggregation", ["per_coordinate", "or_freeze"])
@pytest.mark.parametrize("cowa", ["both", "grad", "pred"])
def test_scores_and_averages_are_those_of_a_server_that_sees_everything(aggregation: str, cowa: str) -> None:
    """Every round from what travelled, by leaving uploads out for real (eqs. 8-10), in double precision."""
    tap, options = Tap(), {"aggregation": aggregation, "cowa": cowa, "p": 0.2}
    job, own = job_of("co-pfl", options, rounds=4, lr=0.02, tamper=tap), []
    for _ in range(4):
        job.advance()
        own.append(job.site.store.tensors["own"].double())
    layout, source, everybody = job.site.layout, job.site.source, [0, 1, 2]
    weights = [u["score"].double() / u["score"].double().sum() for u in tap.up]
    assert weights[0].tolist() == pytest.approx([1 / 3] * 3)
    models = [d["model"].double() for d in tap.down] + [job.method.model.double()]
    frozen = torch.zeros(layout.width, dtype=torch.bool)
    for r in range(4):
        shared = ~tap.up[r]["mask"]
        frozen |= ~shared.all(0) & (aggregation == "or_freeze")

        def average(who: list[int], rows: Tensor, otherwise: Tensor, r: int = r, shared: Tensor = shared) -> Tensor:
            part = weights[r][who, None] * shared[who]
            return torch.where(part.sum(0) > 0, (part * rows[who]).sum(0) / part.sum(0), otherwise)

        expected = average(everybody, tap.up[r]["model"].double(), models[r])
        assert torch.allclose(models[r + 1], torch.where(frozen, models[r], expected), atol=1e-6)
        for n in everybody if r < 3 else ():
            rest = [i for i in everybody if i != n]
            where = shared[n] & shared[rest].any(0) & ~frozen
            assert 0 < where.sum() < layout.width
            without = torch.where(where, average(rest, tap.up[r]["model"].double(), models[r + 1]), models[r + 1])
            step, others = models[r + 1] - own[r + 1][n], average(rest, models[r] - own[r], torch.zeros(layout.width))
            grad = 1 - F.cosine_similarity(step[where], others[where], 0).item()
            network = layout.load(copy.deepcopy(job.model), without.float())
            chosen = torch.from_numpy(job.site.parts["train"][n])
            with torch.no_grad():
                pred = F.cross_entropy(network(source.batch(chosen)), source.labels(chosen)).item()
            expected_score = {"both": grad + pred, "grad": grad, "pred": pred}[cowa]
            assert tap.up[r + 1]["score"][n].item() == pytest.approx(expected_score, abs=2e-3)
    assert weights[-1].std() > 0.01


@pytest.mark.parametrize("aggregation", ["per_coordinate", "or_freeze"])
@pytest.mark.parametrize("fault", [{"participation": 0.5}, {"straggle": 0.4}, {"drop": 0.4}], ids=str)
def test_who_was_not_in_the_last_average_cannot_be_taken_out_of_it(fault: dict[str, float], aggregation: str) -> None:
    """What a server that sees everything would score: the last average without n, which is the average itself if n was
    not in it, on n's data (eq. 9), and the way there from where n last was (eq. 8)."""
    sizes, rounds, tap = (9, 6, 4, 5, 8, 7), 8, Tap()
    options = {"aggregation": aggregation, "p": 0.2}
    job = job_of("co-pfl", options, sizes=sizes, rounds=rounds, lr=0.02, tamper=tap, **fault)
    layout, source = job.site.layout, job.site.source
    frozen, last = torch.zeros(layout.width, dtype=torch.bool), dict[int, int]()  # last: client to row of `sent`
    weights, sent, shared, checked, returned = Tensor(), Tensor(), Tensor(), 0, 0
    for r in range(rounds):
        before = {k: v.clone() for k, v in job.site.store.tensors.items()}
        failed = len(job.fed.failures)
        job.advance()
        if len(tap.ids) == r:  # everybody dropped out
            tap.ids.append([])
            tap.up.append({})
            tap.down.append({})
            continue
        model, late = tap.down[r]["model"].double(), {f.client for f in job.fed.failures[failed:]}
        for k, n in enumerate(tap.ids[r]):
            if r == 0 or not last:
                continue
            without, where = model, torch.ones(layout.width, dtype=torch.bool)
            if n in last:  # in the last average: make it again, without n
                rest = [i for m, i in last.items() if m != n]
                part = weights[rest, None] * shared[rest]
                where = shared[last[n]] & (part.sum(0) > 0) & ~frozen
                alone = (part * sent[rest]).sum(0) / part.sum(0)
                without = torch.where(where, alone, model)
            else:
                where = ~before["mask"][n] & ~frozen & (tap.down[r]["z"] > 0)
                returned += 1
            step, way = model - job.site.store.tensors["own"][n].double(), before["received"][n].double() - without
            grad = 1 - F.cosine_similarity(step[where], way[where], 0).item()
            network = layout.load(copy.deepcopy(job.model), without.float())
            chosen = torch.from_numpy(job.site.parts["train"][n])
            with torch.no_grad():
                pred = F.cross_entropy(network(source.batch(chosen)), source.labels(chosen)).item()
            assert tap.up[r]["score"][k].item() == pytest.approx(grad + pred, abs=2e-3), (r, n)
            checked += 1
        good = [k for k, n in enumerate(tap.ids[r]) if n not in late]
        if good:
            last = {tap.ids[r][k]: i for i, k in enumerate(good)}
            score = tap.up[r]["score"][good].double()
            weights, sent, shared = score / score.sum(), tap.up[r]["model"][good].double(), ~tap.up[r]["mask"][good]
            frozen |= ~shared.all(0) & (aggregation == "or_freeze")
    assert checked > 10
    assert returned > 2


def test_the_direction_score_compares_this_step_with_the_last_one_of_the_others() -> None:
    """Without masks everything is visible: delta_n of this round against the others' mean step of the last."""
    tap = Tap()
    finished(job_of("co-pfl", {"p": 0, "cowa": "grad"}, rounds=3, lr=0.02, tamper=tap))
    for r in (1, 2):
        alpha = tap.up[r - 1]["score"] / tap.up[r - 1]["score"].sum()
        before, now = tap.down[r - 1]["model"], tap.down[r]["model"]
        for n in range(3):
            rest = torch.arange(3) != n
            steps = (before - tap.up[r - 1]["model"])[rest]
            others = (alpha[rest, None] * steps).sum(0) / alpha[rest].sum()
            expected = 1 - F.cosine_similarity(now - tap.up[r]["model"][n], others, 0)
            assert tap.up[r]["score"][n].item() == pytest.approx(expected.item(), abs=1e-3)


def test_weights_sum_to_one_and_masks_stay_in_budget_throughout() -> None:
    tap = Tap()
    job = finished(job_of("co-pfl", {"gamma": 0.3}, rounds=4, tamper=tap))
    notes = [n.value for n in job.fed.notes if n.name == "alpha"]
    assert len(notes) == 4
    assert all(a.sum().item() == pytest.approx(1, abs=1e-5) for a in notes)
    assert all(u["mask"].float().mean(1).max() <= 0.3 for u in tap.up)
    assert all((u["model"][u["mask"]] == 0).all() for u in tap.up), "a personal weight left the client"
    assert tap.up[-1]["mask"].float().mean() > 0.2


@pytest.mark.parametrize("buffers", ["average", "local"])
def test_statistics_are_never_personal_nor_left_out(buffers: str) -> None:
    tap, lists = Tap(), {"p": 1.0, "gamma": 1.0, "scope": "global"}
    job = finished(job_of("co-pfl", lists, norm=True, buffers=buffers, lr=0.01, tamper=tap, rounds=3))
    expected = learnable(job.site.layout, torch.device("cpu"))[job.site.layout.columns("model")]
    assert tap.up[-1]["mask"].equal(expected.expand(3, -1))
    assert expected.all() == (buffers == "local")
    sane(job)


def test_statistics_have_no_direction() -> None:
    tap = Tap()
    job = finished(job_of("co-pfl", {"p": 0, "cowa": "grad"}, norm=True, lr=0.01, tamper=tap, sizes=(6, 6)))
    weights = learnable(job.site.layout, torch.device("cpu"))
    first, now, sent = tap.down[0]["model"], tap.down[1]["model"], [u["model"] for u in tap.up]
    for n in (0, 1):
        step, others = (now - sent[1][n])[weights], (first - sent[0][1 - n])[weights]
        expected = 1 - F.cosine_similarity(step, others, 0).item()
        assert tap.up[1]["score"][n].item() == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("clip", [None, 2.0])
def test_a_score_that_is_not_finite_counts_nothing(monkeypatch: pytest.MonkeyPatch, clip: float | None) -> None:
    tap = Tap()
    broken = torch.tensor([float("inf"), 1.0, float("nan")])
    monkeypatch.setattr(Cohort, "loss", lambda self, rows: broken[torch.from_numpy(self.ids)])
    finished(job_of("co-pfl", {"cowa": "pred", "pred_clip": clip}, tamper=tap))
    assert tap.up[1]["score"].tolist() == [0, 1, 0]


def test_an_alarm_is_noted_where_no_score_is_above_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss of one's own may be below 0."""
    monkeypatch.setattr(Cohort, "loss", lambda self, rows: torch.full((len(self.ids),), -5.0))
    job = finished(job_of("co-pfl", {"cowa": "pred"}))
    assert {n.round: n.value for n in job.fed.notes if n.name == "alarm"}[1] == (
        "no client's score is above 0, so that all weigh alike"
    )
    assert 0 not in {n.round for n in job.fed.notes if n.name == "alarm"}


@pytest.mark.parametrize(("profile", "most"), [("paper", 1.0), ("robust", 0.9)])
def test_a_client_cannot_claim_any_contribution_in_the_robust_profile(profile: str, most: float) -> None:
    def boast(answer: Answer, round: int) -> None:
        answer.replies["score"] = answer.replies["score"].clone()  # type: ignore[union-attr]
        answer.replies["score"][1] = 1e9  # type: ignore[index]

    job = finished(job_of("co-pfl", {"profile": profile}, tamper=Tap(boast), lr=0.01))
    claimed = [n.value[1].item() for n in job.fed.notes if n.name == "alpha"][-1]
    assert (claimed > 0.99) == (profile == "paper")
    assert claimed <= most


def test_the_prediction_score_is_clipped_on_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    tap = Tap()
    monkeypatch.setattr(Cohort, "loss", lambda self, rows: torch.full((len(self),), 50.0))
    finished(job_of("co-pfl", {"cowa": "pred", "pred_clip": 2}, tamper=tap))
    assert tap.up[1]["score"].tolist() == pytest.approx([2 * math.log(4)] * 3)


def test_a_rule_sees_rows_in_which_kept_weights_do_not_count() -> None:
    seen: list[Tensor] = []

    def rule(rows: Tensor, weights: Tensor, start: Tensor) -> Tensor:
        seen.append(rows)
        return weighted_mean(rows, weights, start)

    tap = Tap()
    job = job_of("co-pfl", tamper=tap, lr=0.01)
    job.fed._average = rule
    finished(job)
    assert len(seen) == 2
    kept = tap.up[0]["mask"]
    assert (kept.any(0) & ~kept.all(0)).any()
    assert seen[0][~kept].equal(tap.up[0]["model"][~kept])
    assert torch.allclose(seen[0][kept], tap.down[1]["model"].expand(3, -1)[kept], atol=1e-6)


# ---------------------------------------------------------------- messages, absences


@pytest.mark.parametrize("aggregation", ["per_coordinate", "or_freeze"])
def test_a_round_costs_what_the_message_table_says(aggregation: str) -> None:
    tap = Tap()
    job = finished(job_of("co-pfl", {"aggregation": aggregation}, rounds=3, tamper=tap))
    d = job.site.layout.size("model")
    bits = math.ceil(d / 8)
    for e, up in zip(job.fed.exchanges, tap.up, strict=True):
        z = 4 * d if aggregation == "per_coordinate" else bits
        assert e.bytes_down == 3 * (4 * d + z + 4)
        assert e.bytes_up == 4 * int((~up["mask"]).sum()) + 3 * (bits + 4)
    assert job.fed.exchanges[2].bytes_up < job.fed.exchanges[0].bytes_up < 3 * (4 * d + bits + 4)


def test_clients_are_told_their_weight_in_the_last_average() -> None:
    tap = Tap()
    job = finished(job_of("co-pfl", sizes=(5, 5, 5, 5), participation=0.5, rounds=6, tamper=tap, lr=0.01))
    last = dict.fromkeys(range(4), 0.0)
    for ids, down, up in zip(tap.ids, tap.down, tap.up, strict=True):
        assert down["alpha"].tolist() == pytest.approx([last[i] for i in ids], abs=1e-6)
        heard = dict(zip(ids, (up["score"] / up["score"].sum()).tolist(), strict=True))
        last = {i: heard.get(i, 0.0) for i in range(4)}
    assert any(set(a) != set(b) for a, b in zip(tap.ids, tap.ids[1:], strict=False))
    sane(job)


def test_what_is_frozen_stays_frozen_also_when_those_who_froze_it_are_away() -> None:
    tap, options = Tap(), {"aggregation": "or_freeze", "p": 0.1}
    finished(job_of("co-pfl", options, sizes=(5, 5, 5, 5), participation=0.25, rounds=5, tamper=tap, lr=0.01))
    assert len({i for ids in tap.ids for i in ids}) > 1
    live, model = torch.ones_like(tap.down[0]["z"]), tap.down[0]["model"]
    for down, up in zip(tap.down, tap.up, strict=True):
        assert down["z"].equal(live)
        assert down["model"][~live].equal(model[~live])
        live, model = live & ~up["mask"].any(0), down["model"]


def test_after_local_training_a_client_uses_both_parts_as_trained() -> None:
    job = finished(job_of("co-pfl", eval_point="after_local", rounds=3, lr=0.01))
    assert personal_rows(job).equal(job.site.store.tensors["own"])
    late = job_of("co-pfl", eval_point="after_local", rounds=1, participation=0.34)
    late.advance()
    away = [i for i in range(3) if late.site.store.tensors["shared_steps"][i] == 0]
    assert len(away) == 2
    assert personal_rows(late)[away].equal(late.method.model.expand(2, -1)), "who never trained has the received model"


def test_who_joins_late_is_judged_by_the_model_of_the_others() -> None:
    """It was in no average: nothing is taken out, and its score is the model's loss on its data."""
    tap = Tap()
    job = job_of("co-pfl", {"cowa": "pred"}, tamper=tap, rounds=3, lr=0.01, sizes=(5, 5, 5))
    job.fed.remove([2])
    job.advance()
    job.fed.removed.clear()
    job.advance()
    client = Cohort(job.site, np.array([2]), 1, "look")
    assert tap.ids[1] == [0, 1, 2]
    assert tap.up[1]["score"][2].item() == pytest.approx(client.loss(tap.down[1]["model"])[0].item(), rel=1e-5)
    steps = job.site.store.tensors["personal_steps"]
    assert (steps > 0).tolist() == [True, True, False], "a pass without a mask counts no steps"


def test_a_poisoned_reply_is_left_out_of_model_and_weights() -> None:
    job = finished(job_of("co-pfl", tamper=poison(1), rounds=3))
    assert job.method.alpha[1] == 0
    assert job.method.alpha.sum().item() == pytest.approx(1, abs=1e-5)
    sane(job)


def test_dropping_out_leaves_a_clients_memory_alone() -> None:
    job = job_of("co-pfl", rounds=3)
    job.advance()
    before = {k: v.clone() for k, v in job.site.store.tensors.items()}
    job.fed._faults = Faults(drop=1.0)
    job.advance()
    assert all(v.equal(before[k]) for k, v in job.site.store.tensors.items())


OPTIONS = [
    {"scope": "global", "aggregation": "or_freeze", "alternation": "gauss_seidel"},
    {"profile": "robust", "optimiser": "adam", "transfer_moments": True, "mask_every": 2},
]


@pytest.mark.parametrize("check", every_check())
@pytest.mark.parametrize("options", OPTIONS, ids=["literal", "robust"])
def test_other_options_stand_the_checks(options: dict[str, Any], check: Any) -> None:
    assert "co-pfl" in METHODS
    check("co-pfl", options)
