"""The round loop: the numbers it reports, worked by hand; the papers' rounds, worked by hand; and their limits."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from conformance import CLASSES, FEATURES, Network, federation, finished, job_of, personal_rows
from reference import train_client
from torch import Tensor, nn

import fedkin as fk
from fedkin.compute.batches import plan
from fedkin.compute.probe import bf16_works
from fedkin.config import make_config
from fedkin.data import Dataset, Split
from fedkin.errors import DataError, UsageError
from fedkin.methods import Method
from fedkin.rounds import Accuracy, Job, pick_device, pick_precision, prepare, run_config

# ---------------------------------------------------------------- evaluation, by hand


class Still(Method):
    """Does nothing; what is judged is the first model."""

    def round(self, fed, cohort) -> None: ...


class Flipping(Method):
    """Turns the model's answers around in every round: right after the second, wrong after the first and third."""

    def round(self, fed, cohort) -> None:
        self.model = -self.model


def echo() -> nn.Module:
    """A network that answers with its input: the larger of two features wins."""
    model = nn.Sequential(nn.Linear(2, 2))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(2))
        model[0].bias.zero_()
    return model


def judged(right: list[int], wrong: list[int]) -> tuple[Dataset, Split]:
    """Client k has right[k] + wrong[k] test samples that `echo` gets right and wrong, and one training sample."""
    y, x, train, test = [], [], [], []
    for good, bad in zip(right, wrong, strict=True):
        train.append(np.array([len(y)]))
        y.append(0)
        x.append([1.0, 0.0])
        test.append(np.arange(len(y), len(y) + good + bad))
        y += [1] * (good + bad)
        x += [[0.0, 1.0]] * good + [[1.0, 0.0]] * bad
    names = tuple(f"client-{k}" for k in range(len(right)))
    nobody = tuple(np.arange(0) for _ in right)
    return Dataset("echo", np.array(x, np.float32), np.array(y), 2), Split(tuple(train), nobody, tuple(test), names)


def judge(method: type[Method], rounds: int = 1, **settings: Any) -> Job:
    config = make_config({"rounds": rounds, "device": "cpu", "way": "each", "init": "given", **settings})
    data = judged([3, 1, 10, 0], [1, 1, 0, 0])
    return finished(prepare(config, method=method, model=echo(), data=data))


def test_accuracies_are_those_worked_out_by_hand() -> None:
    result = judge(Still).result()
    assert result.accuracy.micro == pytest.approx(100 * 14 / 16)
    assert result.accuracy.macro == pytest.approx((75 + 50 + 100) / 3)
    assert result.accuracy.worst_decile == pytest.approx(50)
    assert result.accuracy.std == pytest.approx(math.sqrt((0**2 + 25**2 + 25**2) / 3))
    assert [c.accuracy for c in result.per_client[:3]] == pytest.approx([75, 50, 100])
    assert math.isnan(result.per_client[3].accuracy)  # no test samples: no accuracy, and in no mean
    assert [(c.correct, c.test_samples, c.train_samples) for c in result.per_client] == [
        (3, 4, 1),
        (1, 2, 1),
        (10, 10, 1),
        (0, 0, 1),
    ]
    hit, miss = math.log(1 + math.exp(-1)), math.log(1 + math.exp(1))
    losses = [(3 * hit + miss) / 4, (hit + miss) / 2, hit]
    assert [c.loss for c in result.per_client[:3]] == pytest.approx(losses, rel=1e-5)
    assert result.history[-1].test_loss == pytest.approx(np.mean(losses), rel=1e-5)


def test_the_worst_decile_is_the_mean_of_the_lowest_tenth_rounded_up() -> None:
    hundred = np.full(11, 100)
    assert Accuracy.of(np.arange(11) * 10, hundred).worst_decile == pytest.approx((0 + 10) / 2)
    assert Accuracy.of(np.arange(10) * 10 + 5, hundred[:10]).worst_decile == pytest.approx(5)


def test_without_test_samples_there_is_no_accuracy() -> None:
    assert math.isnan(Accuracy.of(np.zeros(2), np.zeros(2)).micro)


def test_the_best_round_is_reported_beside_the_last() -> None:
    result = judge(Flipping, rounds=3).result()
    assert [r.accuracy.micro for r in result.history] == pytest.approx([12.5, 87.5, 12.5])
    assert result.accuracy.micro == pytest.approx(12.5)
    assert (result.best.round, result.best.accuracy.micro) == (2, pytest.approx(87.5))


def test_of_equally_good_rounds_the_first_is_the_best() -> None:
    assert judge(Still, rounds=3).result().best.round == 1


def test_evaluation_happens_every_so_often_and_at_the_end() -> None:
    assert [r.round for r in judge(Still, rounds=5, eval_every=2).history] == [2, 4, 5]


def test_accuracy_may_be_watched_for_some_clients_only() -> None:
    job = prepare(
        make_config({"rounds": 1, "device": "cpu", "init": "given"}),
        method=Still,
        model=echo(),
        data=judged([3, 1, 10, 0], [1, 1, 0, 0]),
    )
    job.counted = job.fed.all[[0, 1]]
    assert job.advance().accuracy.micro == pytest.approx(100 * 4 / 6)


def test_the_training_loss_is_the_mean_over_clients_that_trained() -> None:
    job = job_of("fedavg", participation=0.67)
    record = job.advance()
    losses = job.engine.losses
    assert losses.isnan().sum() == 1
    assert record.train_loss == pytest.approx(losses[~losses.isnan()].mean().item())


def test_a_model_is_judged_as_received_or_after_local_training() -> None:
    received, local = (job_of("fedavg", eval_point=p, participation=0.67) for p in ("received", "after_local"))
    for job in (received, local):
        job.advance()
    assert torch.equal(received.method.model, local.method.model)
    rows = personal_rows(received)
    assert torch.equal(rows, received.method.model.expand(3, -1))
    asked = [c for c in range(3) if not local.engine.losses.isnan()[c]]
    held = personal_rows(local)
    absent = next(c for c in range(3) if c not in asked)
    assert torch.equal(held[absent], rows[absent])  # never trained: what it received
    weights = local.fed.all[asked].samples
    assert torch.allclose((weights / weights.sum()) @ held[asked], local.method.model, atol=1e-6)
    assert not torch.allclose(held[asked[0]], local.method.model)


def test_in_the_last_round_only_its_participants_are_judged_after_training() -> None:
    both = [job_of("fedavg", eval_point=p, participation=0.34, rounds=6) for p in ("after_local", "last_round")]
    seen = set()
    for _ in range(6):
        for job in both:
            job.engine.losses.fill_(float("nan"))
            job.advance()
        held, now = (personal_rows(job) for job in both)
        asked = {c for c in range(3) if not both[1].engine.losses.isnan()[c]}
        seen |= asked
        for c in range(3):
            assert torch.equal(now[c], held[c] if c in asked else both[1].method.model)
        if seen - asked:  # one that trained before, and not now: it still holds what came of it
            assert not torch.equal(held, now)
    assert len(seen) > 1


def test_fedavg_ft_is_fedavg_judged_after_local_training() -> None:
    one = finished(job_of("fedavg-ft"))
    two = finished(job_of("fedavg", eval_point="after_local"))
    assert torch.equal(personal_rows(one), personal_rows(two))


def test_a_personal_model_is_an_ordinary_module() -> None:
    result = finished(job_of("fedper")).result()
    with pytest.raises(UsageError, match="clients 0 to 2"):
        result.personal(3)
    with pytest.raises(UsageError, match="clients 0 to 2"):
        result.personal(-1)
    data, split = federation()
    for c, record in enumerate(result.per_client):
        logits = result.personal(c)(torch.from_numpy(data.x[split.test[c]]))
        assert record.correct == (logits.argmax(1).numpy() == data.y[split.test[c]]).sum()


# ---------------------------------------------------------------- the papers' rounds, by hand


def trained(
    job: Job,
    start: nn.Module,
    client: int,
    *,
    fit: int = 1,
    round: int = 0,
    stream: str = "train",
    epochs=1,
    **how: Any,
) -> nn.Module:
    """A copy of `start` after the plain loop over this client's batches."""
    site, module = job.site, copy.deepcopy(start)
    part = site.parts["train"][client]
    steps = plan([part], np.array([client]), epochs, 4, (site.seed, round, stream, fit), site.has_batch_norm)
    chosen = [torch.from_numpy(t[0, : s[0]]) for t, s in zip(steps.table, steps.sizes, strict=True)]
    batches = [(site.source.batch(i), site.source.labels(i)) for i in chosen]
    train_client(module, batches, site.training.opt, **how)
    return module


def average(job: Job, models: list[nn.Module], part: str) -> Tensor:
    layout, weights = job.site.layout, job.fed.all.samples
    rows = torch.stack([layout.row(m)[layout.columns(part)] for m in models])
    return (weights[:, None] * rows).sum(0) / weights.sum()


def test_a_round_of_fedavg_by_hand() -> None:
    job = job_of("fedavg")
    expected = average(job, [trained(job, Network(), c) for c in range(3)], "model")
    job.advance()
    assert torch.allclose(job.method.model, expected, atol=1e-6)


def test_rounds_in_a_fixed_order_by_hand() -> None:
    job, model = job_of("fedavg", order="fixed", epochs=2), Network()
    for _ in range(2):
        models = []
        for part in job.site.parts["train"]:
            order = [i for i in torch.from_numpy(part).split(4) if len(i) == min(4, len(part))]
            batches = [(job.site.source.batch(i), job.site.source.labels(i)) for i in order] * 2
            models.append(copy.deepcopy(model))
            train_client(models[-1], batches, job.site.training.opt)
        mean = average(job, models, "model")
        model = job.site.layout.load(Network(), mean)
        job.advance()
    assert torch.allclose(job.method.model, mean, atol=1e-5)


def test_a_round_of_fedprox_by_hand() -> None:
    job = job_of("fedprox", {"mu": 0.5}, epochs=2)
    models = [trained(job, Network(), c, mu=0.5, anchor=Network(), epochs=2) for c in range(3)]
    job.advance()
    assert torch.allclose(job.method.model, average(job, models, "model"), atol=1e-6)


def test_a_round_of_ditto_by_hand() -> None:
    """Two rounds: the personal model is drawn to the model received in this round."""
    job = job_of("ditto", {"lam": 0.5})
    received, own = Network(), [Network() for _ in range(3)]
    for round in range(2):
        own = [trained(job, own[c], c, round=round, mu=0.5, anchor=received) for c in range(3)]
        mean = average(job, [trained(job, received, c, round=round) for c in range(3)], "model")
        received = job.site.layout.load(Network(), mean)
        job.advance()
    assert torch.allclose(job.method.model, mean, atol=1e-5)
    assert torch.allclose(personal_rows(job), torch.stack([job.site.layout.row(m) for m in own]), atol=1e-5)


def test_a_round_of_fedper_by_hand() -> None:
    job = job_of("fedper")
    models = [trained(job, Network(), c) for c in range(3)]
    job.advance()
    rows, layout = personal_rows(job), job.site.layout
    assert torch.allclose(job.method.body, average(job, models, "body"), atol=1e-6)
    assert torch.allclose(layout.head(rows), torch.stack([layout.head(layout.row(m)) for m in models]), atol=1e-6)
    assert torch.equal(layout.body(rows), job.method.body.expand(3, -1))


def test_a_round_of_fedrep_by_hand() -> None:
    """First the head on the received body, then the body under that head."""
    job = job_of("fedrep", {"head_epochs": 2, "body_epochs": 1})
    heads = [trained(job, Network(), c, learn="head", epochs=2) for c in range(3)]
    models = [trained(job, heads[c], c, learn="body", fit=2) for c in range(3)]
    job.advance()
    rows, layout = personal_rows(job), job.site.layout
    assert torch.allclose(job.method.body, average(job, models, "body"), atol=1e-6)
    assert torch.allclose(layout.head(rows), torch.stack([layout.head(layout.row(m)) for m in heads]), atol=1e-6)


def test_a_round_of_fedbabu_by_hand_leaves_the_head_alone() -> None:
    job = job_of("fedbabu", {"finetune_epochs": 0})
    models = [trained(job, Network(), c, learn="body") for c in range(3)]
    job.advance()
    assert torch.allclose(job.method.body, average(job, models, "body"), atol=1e-6)
    assert torch.equal(job.site.layout.head(personal_rows(job)), job.site.layout.head(job.site.initial).expand(3, -1))


def test_fedbabu_tunes_what_it_says_after_the_last_round() -> None:
    for part, frozen in (("head", True), ("full", False)):
        job = job_of("fedbabu", {"finetune_epochs": 2, "finetune": part})
        for _ in range(2):
            job.advance()
        layout, before = job.site.layout, personal_rows(job)
        start = layout.load(Network(), before[0])
        learn = "head" if part == "head" else "model"
        expected = [trained(job, start, c, learn=learn, epochs=2, round=2, stream="tune") for c in range(3)]
        assert job.finish().final
        after = personal_rows(job)
        assert torch.allclose(after, torch.stack([layout.row(m) for m in expected]), atol=1e-5)
        assert torch.equal(layout.body(after), layout.body(before)) == frozen


def test_fedbabu_without_tuning_has_no_last_word() -> None:
    job = job_of("fedbabu", {"finetune_epochs": 0})
    for _ in range(2):
        job.advance()
    assert job.finish() is None
    assert len(job.history) == 2


def test_a_round_of_lg_fedavg_by_hand() -> None:
    job = job_of("lg-fedavg")
    models = [trained(job, Network(), c) for c in range(3)]
    job.advance()
    rows, layout = personal_rows(job), job.site.layout
    assert torch.allclose(layout.head(rows), average(job, models, "head").expand(3, -1), atol=1e-6)
    assert torch.allclose(layout.body(rows), torch.stack([layout.body(layout.row(m)) for m in models]), atol=1e-6)


def test_lg_fedavg_starts_from_a_pretrained_model() -> None:
    job = job_of("lg-fedavg", {"pretrain": 1})
    models = [trained(job, Network(), c, stream="pretrain") for c in range(3)]
    job.advance()
    start = average(job, models, "model")
    assert torch.allclose(personal_rows(job), start.expand(3, -1), atol=1e-6)  # everybody has it, head and body
    module = job.site.layout.load(Network(), start)
    expected = average(job, [trained(job, module, c, round=1) for c in range(3)], "head")
    job.advance()
    assert torch.allclose(job.method.head, expected, atol=1e-5)


# ---------------------------------------------------------------- limits


def rows_of(method: str, options: dict[str, Any] | None = None, **settings: Any) -> Tensor:
    return personal_rows(finished(job_of(method, options, participation=0.67, rounds=3, **settings)))


def test_fedprox_without_a_pull_is_fedavg() -> None:
    assert torch.equal(rows_of("fedprox", {"mu": 0.0}), rows_of("fedavg"))
    assert not torch.equal(rows_of("fedprox", {"mu": 0.5}, epochs=2), rows_of("fedavg", epochs=2))


def test_ditto_without_a_pull_is_local_training() -> None:
    assert torch.allclose(rows_of("ditto", {"lam": 0.0}), rows_of("local"), atol=1e-6)
    assert not torch.allclose(rows_of("ditto", {"lam": 1.0}), rows_of("local"), atol=1e-4)


@pytest.mark.parametrize("point", ["received", "after_local", "last_round"])
def test_dittos_shared_model_is_fedavgs(point: Any) -> None:
    shared = rows_of("ditto", {"output": "shared"}, eval_point=point)
    assert torch.allclose(shared, rows_of("fedavg", eval_point=point), atol=1e-6)
    assert not torch.allclose(shared, rows_of("ditto", eval_point=point), atol=1e-4)


def test_fedper_with_an_empty_head_is_fedavg() -> None:
    assert torch.equal(rows_of("fedper", head=""), rows_of("fedavg"))
    assert not torch.equal(rows_of("fedper"), rows_of("fedavg"))


def test_lg_fedavg_that_only_pretrains_shares_one_model() -> None:
    rows = rows_of("lg-fedavg", {"pretrain": 3})
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])


def test_local_training_of_all_does_not_wait_to_be_drawn() -> None:
    everybody = personal_rows(finished(job_of("local")))
    drawn = personal_rows(finished(job_of("local", {"who": "all"}, participation=0.34)))
    assert torch.equal(everybody, drawn)


def test_one_client_alone_makes_fedavg_local_training() -> None:
    alone = (personal_rows(finished(job_of(m, sizes=(7,)))) for m in ("fedavg", "local"))
    assert torch.allclose(*alone, atol=1e-6)


# ---------------------------------------------------------------- runs


def small_run(**settings: Any) -> fk.Result:
    given = {"rounds": 2, "clients": 5, "epochs": 1, "device": "cpu", "way": "each", "samples_per_client": 20}
    return fk.run(**{**given, **settings})


def test_the_same_seed_gives_the_same_run_bit_for_bit() -> None:
    one, two, other = small_run(seed=1), small_run(seed=1), small_run(seed=2)
    assert torch.equal(one._rows, two._rows)
    assert [r.accuracy for r in one.history] == [r.accuracy for r in two.history]
    assert one.prepared.split_hash == two.prepared.split_hash != other.prepared.split_hash
    assert not torch.equal(one._rows, other._rows)


@pytest.mark.parametrize("way", ["each", "threads", "batched"])
def test_neither_the_way_nor_the_chunk_changes_a_run(way: str) -> None:
    expected = small_run()
    start = fk.models.build("mlp", (1, 8, 8), 10)
    moved = expected._rows - fk.Layout.of(start, "head").row(start)
    for chunk in (1, 3, None):
        found = small_run(way=way, chunk=chunk)
        assert (found._rows - expected._rows).norm() < 1e-4 * moved.norm()


def test_events_come_in_order() -> None:
    seen: list[Any] = []
    result = small_run(on_event=seen.append, method="fedbabu", options={"finetune_epochs": 1})
    assert type(seen[0]).__name__ == "Prepared"
    assert [(r.round, r.final) for r in seen[1:]] == [(1, False), (2, False), (2, True)]
    assert seen[1:] == result.history


def test_users_bring_clients_networks_and_methods() -> None:
    rng = np.random.default_rng(0)
    clients = [(rng.standard_normal((8, FEATURES)).astype(np.float32), np.arange(8) % CLASSES) for _ in range(3)]
    result = fk.run(Flipping, clients=clients, model=Network(), rounds=1, device="cpu")
    assert (result.method, len(result.per_client), result.config.model) == ("flipping", 3, "Network")


def test_comparisons_summarise_over_seeds() -> None:
    results, rows = fk.compare(
        ["fedavg", "local"], seeds=2, rounds=1, clients=5, epochs=1, device="cpu", way="each", samples_per_client=20
    )
    assert [(r.method, r.seed) for r in results] == [("fedavg", 0), ("fedavg", 1), ("local", 0), ("local", 1)]
    assert [r["method"] for r in rows] == ["fedavg", "local"]
    macro = [r.accuracy.macro for r in results[:2]]
    assert rows[0]["macro"] == {"mean": pytest.approx(np.mean(macro)), "std": pytest.approx(np.std(macro, ddof=1))}
    alone = fk.compare(["local"], rounds=1, clients=5, epochs=1, device="cpu", way="each", samples_per_client=20)[1]
    assert np.isnan(alone[0]["macro"]["std"]), "one seed has no spread"
    assert rows[1]["megabytes"]["mean"] == 0.0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"method": "fedavgg"}, "did you mean 'fedavg"),
        ({"options": {"mu": 1}}, "method 'fedavg' has no options of its own"),
        ({"method": "ditto", "options": {"lam": -1}}, "lam=-1"),
        ({"way": "fast"}, "unknown way"),
        ({"way": "graph"}, "needs a CUDA device"),
        ({"device": "tpu"}, "accepts auto, cpu"),
        ({"head": "tail"}, "unknown head"),
        ({"model": nn.Linear(2, 2)}, r"Linear cannot take samples of shape \(1, 8, 8\)"),
    ],
)
def test_mistakes_are_refused_before_anything_trains(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        small_run(**settings)


def test_a_network_with_too_few_outputs_is_refused() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 9))
    with pytest.raises(UsageError, match="gives 9 outputs, the data have 10 classes"):
        small_run(model=model, partition="iid")


def test_a_client_without_training_samples_is_named_before_the_run() -> None:
    data, split = federation()
    with pytest.raises(DataError, match="'client-1' has no training samples"):
        Split((split.train[0], split.train[1][:0], split.train[2]), split.validation, split.test, split.names)
    assert run_config(make_config({"rounds": 1, "device": "cpu"}), data=(data, split)).accuracy.micro >= 0


def test_devices_and_precisions() -> None:
    assert pick_device("cpu").type == "cpu"
    with pytest.raises(UsageError, match="GPU format"):
        pick_precision("tf32", torch.device("cpu"))
    assert pick_precision("auto", torch.device("cpu")) == "fp32"
    with pytest.raises(UsageError, match="accepts auto"):
        pick_device("meta")


def test_local_batch_norm_statistics_differ_between_clients_and_shared_ones_do_not() -> None:
    for buffers, same in (("average", True), ("local", False)):
        job = finished(job_of("fedavg", norm=True, buffers=buffers, lr=0.01))
        means = job.site.layout.tensors(personal_rows(job))["body.1.running_mean"]
        assert torch.allclose(means[0], means[1], atol=1e-6) == same
        weights = job.site.layout.tensors(personal_rows(job))["body.0.weight"]
        assert torch.equal(weights[0], weights[1])


def test_bf16_computes_in_bf16() -> None:
    if not bf16_works():
        pytest.skip("a trial of bf16 crashed on this CPU")
    settings = {"rounds": 1, "clients": 10, "lr": 0.05, "way": "each"}
    exact, rough = (fk.run("fedavg", precision=p, **settings) for p in ("fp32", "bf16"))
    difference = float((exact._rows - rough._rows).norm() / exact._rows.norm())
    assert 1e-6 < difference < 1e-2
