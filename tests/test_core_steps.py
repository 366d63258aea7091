"""Gradient clipping and accumulation: every way against a plain PyTorch loop, and their limits."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from reference import Bench, digits, distance, torch_optimiser
from test_core_training import CLOSE, RAGGED, Small, ways
from torch import Tensor, nn

import fedkin as fk
from fedkin.compute.batches import plan
from fedkin.compute.choice import Chooser
from fedkin.compute.lockstep import Lockstep
from fedkin.compute.optim import SGD, Adam, Moments, Optimiser
from fedkin.config import make_config
from fedkin.core.cohort import Model
from fedkin.deploy.joining import TRAVELS
from fedkin.errors import UsageError

CLIP = 0.3  # shortens about half of the gradients below
OPTIMISERS = [SGD(0.2), SGD(0.1, 0.9, 0.05), Adam(0.01)]


def bench(*, clip: float | None = None, accumulate: int = 1, sizes: tuple[int, ...] = RAGGED, **how) -> Bench:
    torch.manual_seed(1)
    found = Bench(Small(), *digits(sum(sizes), (2, 8, 8), 3), sizes, classes=3, **how)
    found.site.training = replace(found.site.training, clip=clip, accumulate=accumulate)
    return found


def plain(on: Bench, start: Tensor, opt: Optimiser, clip: float | None, accumulate: int) -> tuple[Tensor, int]:
    """The obvious loop: gradients add up over some batches, each counting by its samples. Also: steps shortened."""
    rows, shortened = [], 0
    for k in range(len(on.parts)):
        module, an_epoch = on.module(start[k]).train(), -(-len(on.parts[k]) // on.batch)
        optimiser, batches = torch_optimiser(opt, list(module.parameters())), on.batches(k)
        for epoch in range(on.epochs):
            mine = batches[epoch * an_epoch : (epoch + 1) * an_epoch]
            for begin in range(0, an_epoch, accumulate):
                group = mine[begin : begin + accumulate]
                optimiser.zero_grad()
                for x, y in group:
                    (F.cross_entropy(module(x), y) * len(y) / sum(len(y) for _, y in group)).backward()
                if clip is not None:
                    shortened += int(nn.utils.clip_grad_norm_(module.parameters(), clip) > clip)
                optimiser.step()
        rows.append(on.layout.row(module))
    return torch.stack(rows), shortened


@ways
@pytest.mark.parametrize("opt", OPTIMISERS, ids=str)
@pytest.mark.parametrize(("clip", "accumulate"), [(CLIP, 1), (None, 2), (CLIP, 2)])
def test_steps_are_those_of_the_plain_loop(way: str, tape: bool, opt: Optimiser, clip, accumulate: int) -> None:
    on = bench(way=way, tape=tape, opt=opt, epochs=3, clip=clip, accumulate=accumulate)
    start = on.starts()
    expected, shortened = plain(on, start, opt, clip, accumulate)
    assert clip is None or 0 < shortened < 3 * sum(-(-n // 4 // accumulate) for n in RAGGED)
    assert distance(on.cohort().fit(start), expected, start) < CLOSE


@ways
@pytest.mark.parametrize("times", [2, 3, 100])
def test_accumulation_is_one_batch_so_many_times_as_large(way: str, tape: bool, times: int) -> None:
    few = bench(way=way, tape=tape, epochs=2, accumulate=times, sizes=(9, 1, 4, 23), opt=SGD(0.1, 0.9))
    many = bench(way=way, tape=tape, epochs=2, batch=4 * times, sizes=(9, 1, 4, 23), opt=SGD(0.1, 0.9))
    start = few.starts()
    expected = many.cohort().fit(start)
    assert distance(few.cohort().fit(start), expected, start) < CLOSE


@ways
def test_no_limit_and_a_wide_one_are_no_clipping(way: str, tape: bool) -> None:
    start = bench().starts()
    expected = bench(way=way, tape=tape).cohort().fit(start)
    for clip in (math.inf, 1e6):
        assert torch.equal(bench(way=way, tape=tape, clip=clip).cohort().fit(start), expected)
    assert not torch.equal(bench(way=way, tape=tape, clip=CLIP).cohort().fit(start), expected)


@ways
def test_a_step_of_sgd_is_never_longer_than_the_limit_allows(way: str, tape: bool) -> None:
    on = bench(way=way, tape=tape, clip=0.01, opt=SGD(0.5), batch=100)
    start = on.starts(spread=3.0)
    assert ((on.cohort().fit(start) - start).norm(dim=1) <= 0.01 * 0.5 * (1 + 1e-4)).all()


@ways
def test_what_a_mask_holds_does_not_count(way: str, tape: bool) -> None:
    """Clipped under a mask as where the held numbers had no gradient: the longest step is lr * clip again."""
    on = bench(way=way, tape=tape, clip=0.01, opt=SGD(1.0), batch=100)
    start, mask = on.starts(spread=3.0), torch.rand(len(RAGGED), on.layout.width) < 0.3
    moved = on.cohort().fit(start, mask=mask) - start
    assert not moved[~mask].any()
    assert torch.allclose(moved.norm(dim=1), torch.full((len(RAGGED),), 0.01), rtol=1e-2)


@ways
def test_the_proximal_pull_is_not_clipped(way: str, tape: bool) -> None:
    on = bench(way=way, tape=tape, clip=1e-9, opt=SGD(0.5), batch=100)
    start, anchor = on.starts(), on.starts(spread=0.5)
    expected = start - 0.5 * 0.4 * (start - anchor)
    assert distance(on.cohort().fit(start, mu=0.4, anchor=anchor), expected, start) < CLOSE


@ways
def test_each_of_a_clients_models_has_its_own_norm(way: str, tape: bool) -> None:
    on = bench(way=way, tape=tape, clip=CLIP, accumulate=2, epochs=2)
    start, other = on.starts(), on.starts(spread=0.5)
    first, second = on.cohort().fit_together([Model(start), Model(other)])
    assert distance(first, on.cohort().fit(start), start) < CLOSE
    assert distance(second, on.cohort().fit(other), other) < CLOSE


def test_adam_counts_its_steps_and_a_loss_is_the_mean_over_mini_batches() -> None:
    on = bench(accumulate=3, sizes=(23,), opt=Adam(0.01))
    cohort, start = on.cohort(), on.starts()
    moments = Moments.zeros(on.opt, 1, on.layout.width, cohort.device)
    cohort.fit(start, moments=moments)
    assert moments.steps.tolist() == [2]  # of six mini-batches
    module, losses = on.module(start[0]).train(), []
    optimiser, batches = torch_optimiser(on.opt, list(module.parameters())), on.batches(0)
    for group in (batches[:3], batches[3:]):
        optimiser.zero_grad()
        for x, y in group:
            loss = F.cross_entropy(module(x), y)
            (loss * len(y) / sum(len(y) for _, y in group)).backward()
            losses.append(loss.item())
        optimiser.step()
    assert cohort.losses.item() == pytest.approx(np.mean(losses), rel=1e-5)


def test_groups_do_not_reach_from_one_epoch_into_the_next() -> None:
    parts = [np.arange(9), np.arange(9, 10), np.arange(10, 14)]
    found = plan(parts, np.arange(3), 2, 4, (0,), False, accumulate=2)
    assert found.share is not None
    assert found.ends is not None
    assert found.sizes[:, 0].tolist() == [4, 4, 1] * 2
    assert found.share[:, 0].tolist() == [0.5, 0.5, 1.0] * 2
    assert found.ends[:, 0].tolist() == [False, True, True] * 2
    assert found.share[:, 2].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert found.ends[:, 1].tolist() == [True, True, False, False, False, False]


@pytest.mark.parametrize("way", ["each", "batched"])
def test_runs_that_train_together_train_as_alone(way: str) -> None:
    """Jobs of other limits are not laid together; those that are keep their groups although their sizes differ."""

    def fit(chooser: Chooser, clip: float | None, sizes: tuple[int, ...]) -> Tensor:
        on = bench(chooser=chooser, clip=clip, accumulate=2, sizes=sizes, epochs=2)
        return on.cohort().fit(on.initial)

    cases = [(CLIP, RAGGED), (CLIP, (5, 17, 2, 4)), (None, RAGGED)]
    alone = [fit(Chooser(way), *case) for case in cases]
    together = Lockstep(Chooser(way)).run([lambda c, case=case: fit(c, *case) for case in cases])
    for mine, expected in zip(together, alone, strict=True):
        assert torch.allclose(mine, expected, atol=1e-6)


def test_settings_reach_clients_and_sites() -> None:
    assert {"clip_grad", "accumulate"} <= set(TRAVELS)
    assert make_config({"clip_grad": "inf"}).clip_grad is None
    assert make_config({"clip_grad": 0.5}).identity() != make_config({}).identity()
    for bad in ({"clip_grad": 0}, {"clip_grad": -1}, {"clip_grad": "nan"}, {"accumulate": 0}, {"accumulate": 1.5}):
        with pytest.raises(UsageError, match=next(iter(bad))):
            make_config(bad)
    how = {"clients": 5, "rounds": 2, "model": "mlp", "epochs": 2, "device": "cpu", "way": "each"}
    few = fk.run("fedavg", batch=8, accumulate=2, **how)
    many = fk.run("fedavg", batch=16, **how)
    rows = [torch.cat([p.flatten() for p in r.personal(0).parameters()]) for r in (few, many)]
    assert torch.allclose(*rows, atol=1e-5)


@ways
def test_so_many_steps_for_every_client(way: str, tape: bool) -> None:
    """In place of epochs: each takes them, with many samples and with one, and they are those of the plain loop."""
    on = bench(way=way, tape=tape, opt=SGD(0.2, 0.9))
    on.epochs = 40  # the reference cuts its epochs short, too
    start, rows = on.starts(), []
    for k in range(len(on.parts)):
        module = on.module(start[k]).train()
        optimiser = torch_optimiser(on.site.training.opt, list(module.parameters()))
        for x, y in on.batches(k)[:7]:
            optimiser.zero_grad()
            F.cross_entropy(module(x), y).backward()
            optimiser.step()
        rows.append(on.layout.row(module))
    assert distance(on.cohort().fit(start, steps=7), torch.stack(rows), start) < CLOSE


def test_steps_that_cannot_be() -> None:
    on = bench()
    for wrong, said in (({"steps": 0}, "steps=0: must be"), ({"steps": 3, "epochs": 1}, "give one of the two")):
        with pytest.raises(UsageError, match=said):
            on.cohort().fit(on.starts(), **wrong)
    with pytest.raises(UsageError, match="accumulate=2 goes by epochs"):
        bench(accumulate=2).cohort().fit(on.starts(), steps=3)
