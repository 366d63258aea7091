"""Clients that come when a run is over: every method has a recipe for them, and nobody else's model changes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conformance import every_method
from torch import Tensor, nn
from typer.testing import CliRunner

import fedkin as fk
from fedkin.cli.application import app
from fedkin.core.cohort import Cohort
from fedkin.core.federation import Clients, Federation, Reply
from fedkin.data import own_clients
from fedkin.methods import METHODS
from fedkin.methods.base import Method
from fedkin.rounds import Job
from fedkin.rounds.newcomers import Arrived, arrive
from fedkin.rounds.trained import Trained
from fedkin.testing.tiny import MethodOrName, finished, job_of, personal_rows, tensors_in
from fedkin.testing.worlds import CLASSES, FEATURES

Pair = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
OTHER_OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("fedbabu", {"finetune_epochs": 0}),
    ("local", {"who": "all"}),
    ("ditto", {"output": "shared"}),
    ("lg-fedavg", {"pretrain": 1}),
    ("fedcap", {"ablation": "2"}),
    ("fedcap", {"collect": "last_known", "output": "customised"}),
    ("fedpkda", {"share": "model"}),
    ("co-pfl", {"aggregation": "or_freeze", "optimiser": "sgd"}),
    ("pfedcs", {"beta": 0}),
]


def samples(count: int, seed: int = 7) -> Pair:
    """Like those of the tiny federation."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, CLASSES - 1, count)
    return (rng.standard_normal((count, FEATURES)) + y[:, None]).astype(np.float32), y


def everything(job: Job) -> list[Tensor]:
    """All that the server and the clients of a run have."""
    kept = [t for of in job.site.store.state().values() for t in of.values()]
    return [t.clone() for t in [*tensors_in(job.method.state()), *kept, personal_rows(job)]]


def arrived(job: Job, clients: Mapping[str, Pair] | None = None, **how: Any) -> Arrived:
    return arrive(Trained.of(job), own_clients(dict(clients or {"late": samples(40)})), **how)


# ------------------------------------------------------------ every method


def check_newcomers(method: MethodOrName, options: dict[str, Any] | None = None, **settings: Any) -> None:
    """What every method promises to those who come late: a model of their own, the same every time and whoever else
    comes, while all that others have stays as it is, bit for bit."""
    job = finished(job_of(method, options, participation=0.67, **settings))
    before, exchanges = everything(job), len(job.fed.exchanges)
    both = {"late": samples(40), "later": samples(24, seed=8)}
    found = arrived(job, both, counts=[5, 20])
    after = everything(job)
    assert len(before) == len(after)
    assert all(map(torch.equal, before, after)), "somebody else's model or the server's memory has changed"
    assert len(job.fed.exchanges) == exchanges
    assert [(t.client, t.samples) for t in found.trials] == [
        *[("late", count) for count in (0, 5, 20, 30)],
        *[("later", count) for count in (0, 5, 18)],
    ]
    assert all(0 <= t.accuracy <= 100 and np.isfinite(t.loss) for t in found.trials)
    assert found.rows.shape == (2, job.site.layout.width)
    assert torch.isfinite(found.rows).all()
    assert torch.equal(arrived(job, both).rows, found.rows), "the same newcomers get other models"
    assert torch.allclose(arrived(job).rows[0], found.rows[0], atol=1e-6), "it matters who else comes"
    if job.method.private != "nothing" and (options or {}).get("finetune_epochs") != 0:
        assert not torch.equal(found.rows[0], found.rows[1]), "two newcomers have one model"


@pytest.mark.parametrize("name", every_method())
def test_every_method_welcomes_newcomers(name: str) -> None:
    check_newcomers(name)


@pytest.mark.parametrize(("name", "options"), OTHER_OPTIONS, ids=[f"{n}-{o}" for n, o in OTHER_OPTIONS])
def test_methods_with_other_options_welcome_newcomers(name: str, options: dict[str, Any]) -> None:
    changed = {"output": "customised"} if options.get("output") == "customised" else {}
    if options.get("output") == "shared" or options.get("share") == "model":
        job = finished(job_of(name, options))
        assert torch.equal(arrived(job).rows[0], Trained.of(job).layout.row(shared_of(job)))
    else:
        check_newcomers(name, {**options, **changed})


@pytest.mark.parametrize("name", every_method())
@pytest.mark.parametrize("point", ["after_local", "last_round"])
def test_newcomers_are_evaluated_where_the_run_is(name: str, point: str) -> None:
    job = finished(job_of(name, eval_point=point, norm=True, buffers="local", lr=0.01))
    found = arrived(job)
    assert torch.isfinite(found.rows).all()
    if name in ("fedavg", "fedprox"):  # trained, once
        assert not torch.equal(found.rows[0], job.site.initial)


def shared_of(job: Job) -> nn.Module:
    model = Trained.of(job).model()
    assert model is not None
    return model


class Mix(Method):
    """A method of one's own, which says nothing of newcomers; its server has a number for each client."""

    keeps = {"own": fk.Keep("row")}
    private = "the trained model"

    def start(self, fed: Federation, layout: fk.Layout, row: Tensor) -> None:
        super().start(fed, layout, row)
        self.seen = torch.zeros(len(fed.all))

    def round(self, fed: Federation, cohort: Clients) -> None:
        replies = fed.ask(fed.alive & cohort, self.train, model=self.model)
        self.seen[torch.from_numpy(cohort.ids)] += 1
        self.model = replies.mean("model", otherwise=self.model)

    def train(self, client: Cohort, model: Tensor) -> Reply:
        client["own"] = client.fit(client.rows(model=model))
        return {"model": client.model(client["own"])}

    def personal(self, client: Cohort, model: Tensor) -> Tensor:
        return (client.rows(model=model) + client["own"]) / 2


def test_a_method_of_ones_own_welcomes_newcomers_without_saying_how() -> None:
    check_newcomers(Mix)


def test_the_recipe_may_not_touch_the_server() -> None:
    """The copy is what changes: caught if it were not one."""

    class Careless(Mix):
        def welcome(self, fed: Federation, newcomers: Clients) -> Clients:
            self.seen += 1
            self.model += 1
            return super().welcome(fed, newcomers)

    check_newcomers(Careless)


# ------------------------------------------------------------ recipes


def test_a_head_is_tuned_on_the_body_as_it_is() -> None:
    for name in ("fedper", "fedrep", "fedpkda", "pfedcs"):
        job = finished(job_of(name))
        layout, rows = job.site.layout, arrived(job).rows
        assert torch.equal(layout.body(rows)[0], job.method.shared()["body"])
        assert not torch.equal(layout.head(rows)[0], layout.head(job.site.initial))


def test_a_body_is_tuned_below_the_head_as_it_is() -> None:
    job = finished(job_of("lg-fedavg", {"pretrain": 1}))
    layout, rows = job.site.layout, arrived(job).rows
    assert torch.equal(layout.head(rows)[0], job.method.shared()["head"])
    assert not torch.equal(layout.body(rows)[0], layout.body(job.site.initial))


def test_ditto_pulls_towards_the_shared_model() -> None:
    """The stronger the pull, the nearer; with none it is training alone from the shared model, as in FedAvg-FT."""
    far = []
    for lam in (0.0, 1.0, 5.0):
        job = finished(job_of("ditto", {"lam": lam}, lr=0.05))
        far.append(float((arrived(job).rows[0] - job.method.model).norm()))
    assert far[0] > far[1] > far[2] > 0
    free, tuned = (finished(job_of(*what, batch=64)) for what in (("ditto", {"lam": 0.0}), ("fedavg-ft", {})))
    assert torch.allclose(arrived(free).rows, arrived(tuned).rows, atol=1e-6)


def test_a_shared_model_is_what_newcomers_to_fedavg_get() -> None:
    for name in ("fedavg", "fedprox"):
        job = finished(job_of(name))
        found = arrived(job)
        assert torch.equal(found.rows[0], job.method.model)
        assert len({t.accuracy for t in found.trials}) == 1


def test_fedcap_customises_from_the_pool() -> None:
    """As an absent client of the next round would be served, by another way."""
    job = finished(job_of("fedcap", {"output": "customised"}))
    row = arrived(job).rows[0]
    pool = job.method.pool
    weights = torch.linalg.lstsq(pool.T.double(), row.double()[:, None]).solution[:, 0]
    assert torch.allclose(weights @ pool.double(), row.double(), atol=1e-5)
    assert (weights > 0).all()
    assert float(weights.sum()) == pytest.approx(1, abs=1e-4)


def test_a_mask_grows_to_its_full_share_and_no_further() -> None:
    job = finished(job_of("co-pfl", {"gamma": 0.25}))
    row, layout = arrived(job).rows[0], job.site.layout
    for slot in layout.slots:
        moved = int((row != job.method.model)[slot.start : slot.stop].sum())
        limit = int(0.25 * slot.shape.numel()) if "weight" in slot.name else 0
        assert moved <= limit
    assert not torch.equal(row, job.method.model)


def test_heads_teach_newcomers_until_round_beta() -> None:
    early, late = (finished(job_of("pfedcs", {"beta": beta})) for beta in (100, 1))
    names = [[e.phase for e in _exchanges(job)] for job in (early, late)]
    assert names == [["settle", "show", "study"], ["settle"]]


def _exchanges(job: Job) -> list[Any]:
    from fedkin.rounds import newcomers

    seen: list[Any] = []

    class Listening(newcomers._Late):
        def settle(self) -> Any:
            found = super().settle()
            seen.extend(self.fed.exchanges)
            return found

    before = newcomers._Late
    newcomers._Late = Listening  # type: ignore[misc]
    try:
        arrived(job)
    finally:
        newcomers._Late = before  # type: ignore[misc]
    return seen


def test_more_epochs_change_more() -> None:
    job = finished(job_of("fedper"))
    few, many = arrived(job, epochs=1), arrived(job, epochs=30)
    assert (few.epochs, many.epochs) == (1, 30)
    assert many.trials[-1].loss < few.trials[-1].loss


def test_a_schedule_has_no_say_in_how_newcomers_train() -> None:
    one, two = (
        finished(job_of("fedper", rounds=1, lr_schedule=schedule))
        for schedule in ("constant", "step:after=1,gamma=1e-9")
    )
    assert torch.equal(arrived(one).rows, arrived(two).rows)


# ------------------------------------------------------------ data that do not fit


@pytest.mark.parametrize(
    ("clients", "reason"),
    [
        (
            {"late": (np.zeros((9, FEATURES + 1), np.float32), np.zeros(9, int))},
            "client 'late': the model takes numbers",
        ),
        (
            {"late": (np.zeros((9, FEATURES), np.float32), np.arange(9))},
            "has the class '4', which the run does not know",
        ),
        ({"client-1": samples(9)}, "client 'client-1' was in the run"),
    ],
)
def test_data_that_do_not_fit_are_refused(clients: dict[str, Pair], reason: str) -> None:
    job = finished(job_of("fedper"))
    with pytest.raises(fk.FedKinError, match=reason):
        arrived(job, clients)


def test_columns_go_by_name(tmp_path: Path) -> None:
    x, y = samples(60)
    table = {f"column-{i}": x[:, i] for i in range(FEATURES)} | {"label": np.array(["ab", "cd", "ef"])[y]}
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame(table)
    result = fk.run("fedper", clients={"a": frame[:20], "b": frame[20:40]}, rounds=1, epochs=1, model="mlp")
    late = frame[40:]
    same = fk.join(result, clients={"late": late[late.columns[::-1]]})
    assert torch.equal(same._rows, fk.join(result, clients={"late": late})._rows)
    assert set(same.predict(x[:5])) <= {"ab", "cd", "ef"}
    with pytest.raises(fk.DataError, match="column 'column-2' is missing, which the run has"):
        fk.join(result, clients={"late": late.drop(columns="column-2")})
    with pytest.raises(fk.DataError, match="has the class 'xy', which the run does not know \\(it knows ab, cd, ef\\)"):
        fk.join(result, clients={"late": late.assign(label="xy")})


@pytest.mark.parametrize(
    ("known", "labels", "reason"),
    [
        (["ill", "well"], [0, 1], r"numbers as labels \(0, 1\), and the run's classes are called ill, well"),
        ([3, 4], [0, 0], "has the class '0', which the run does not know"),
        ([3, 4], [3, 4], None),
        ([3, 4], ["3", "4"], None),
    ],
)
def test_a_number_stands_for_no_name(known: list[Any], labels: list[Any], reason: str | None) -> None:
    x, y = samples(40)
    run = fk.run("fedper", clients={"a": (x, np.array(known)[y % 2])}, rounds=1, epochs=1, model="mlp")
    late = {"late": (x[:20], np.array(labels)[np.arange(20) % 2])}
    if reason is None:
        assert fk.join(run, clients=late)._rows.shape[0] == 1
        return
    with pytest.raises(fk.DataError, match=reason):
        fk.join(run, clients=late)


def test_classes_go_by_name_where_the_data_say_it() -> None:
    """Not by their places, which may be others."""
    datasets = pytest.importorskip("datasets")
    x, y = samples(40)

    def told(names: list[str]) -> Any:
        kind = datasets.Features(
            {"x": datasets.Sequence(datasets.Value("float32"), FEATURES)} | {"label": datasets.ClassLabel(names=names)}
        )
        words = [("ill", "well")[n % 2] for n in y]
        return datasets.Dataset.from_dict({"x": x.tolist(), "label": words}, features=kind)

    run = fk.run("fedper", clients={"a": told(["ill", "well"])}, rounds=1, epochs=1, model="mlp")
    one, other = (fk.join(run, clients={"late": told(names)}) for names in (["ill", "well"], ["well", "ill"]))
    assert torch.equal(one._rows, other._rows)


def test_who_else_comes_does_not_change_a_newcomers_split() -> None:
    """The shared model is nobody's own, so that the accuracies are those of the test samples alone."""
    job = finished(job_of("fedavg"))
    late = {name: samples(31, seed) for seed, name in enumerate("bcd")}
    before, now = arrived(job, late), arrived(job, {"a": samples(20, 9), **late})
    assert [t for t in now.trials if t.client != "a"] == before.trials
    assert torch.equal(arrived(job, {"b": late["b"]}).rows[0], before.rows[0])


def test_too_few_samples_are_said() -> None:
    job = finished(job_of("fedper"))
    found = arrived(job, {"late": samples(8), "single": samples(1)}, counts=[5, 100])
    counts = {"late": [0, 5, 6], "single": [0, 1]}
    assert [(t.client, t.samples) for t in found.trials] == [(n, c) for n, of in counts.items() for c in of]
    assert found.remarks == [
        "single: fewer than 5 training samples, so no accuracy with so many",
        "late, single: fewer than 100 training samples, so no accuracy with so many",
    ]
    assert np.isnan([t.accuracy for t in found.trials if t.client == "single"]).all()


def test_a_result_whose_run_went_on_is_refused() -> None:
    job = job_of("fedper", rounds=3)
    job.advance()
    result = job.result()
    fk.join(result, clients=[samples(20)])
    job.advance()
    with pytest.raises(fk.UsageError, match="its run has gone on since"):
        fk.join(result, clients=[samples(20)])


# ------------------------------------------------------------ from a folder, and from memory


def call(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


SMALL: dict[str, Any] = {"clients": 5, "rounds": 2, "epochs": 1, "model": "mlp", "checkpoint_every": 1}


@pytest.fixture(scope="module")
def digits() -> Pair:
    data = fk.data.load("digits")
    return data.x[:120], data.y[:120]


@pytest.mark.parametrize("method", ["fedper", "fedcap"])
def test_a_folder_and_a_result_give_the_same(method: str, tmp_path: Path, digits: Pair) -> None:
    result = fk.run(method, runs_dir=str(tmp_path / "runs"), **SMALL)
    np.savez(tmp_path / "late.npz", x=digits[0], y=digits[1])
    by_memory = fk.join(result, clients={"late": digits}, samples=[5, 20])
    by_folder = fk.join(str(result.run), data=tmp_path / "late.npz", samples=[5, 20])
    assert by_memory.trials == by_folder.trials
    assert torch.equal(by_memory._rows, by_folder._rows)
    assert [t.samples for t in by_folder.trials] == [0, 5, 20, 90]
    assert by_folder.to_markdown().splitlines()[0] == "| samples | 0 | 5 | 20 | 90 |"
    assert by_folder.predict(digits[0][:3]).dtype.kind == "i"
    assert repr(by_folder) == f"Newcomers({method}: late)"


def test_several_newcomers_have_a_mean(digits: Pair) -> None:
    """For numbers of samples that all of them bring, over those that have test samples."""
    result = fk.run("fedper", **{**SMALL, "checkpoint_every": 0})
    x, y = digits
    found = fk.join(result, clients={"a": (x[:60], y[:60]), "b": (x[60:], y[60:]), "c": (x[:1], y[:1])}, samples=[5])
    before = [t.accuracy for t in found.trials if t.samples == 0]
    assert found.means() == {0: pytest.approx(np.nanmean(before))}
    both = fk.join(result, clients={"a": (x[:60], y[:60]), "b": (x[60:], y[60:])}, samples=[5])
    each = {count: [t.accuracy for t in both.trials if t.samples == count] for count in (0, 5, 45)}
    assert both.means() == {count: pytest.approx(np.mean(of)) for count, of in each.items()}
    last = both.to_markdown().splitlines()[-1]
    assert last == f"| mean | {' | '.join(f'{np.mean(of):.2f}' for of in each.values())} |"


def test_the_command_writes_models_that_predict(tmp_path: Path, digits: Pair) -> None:
    result = fk.run("ditto", runs_dir=str(tmp_path / "runs"), **SMALL)
    before = {p.name: p.read_bytes() for p in Path(str(result.run)).rglob("*") if p.is_file()}
    (tmp_path / "new").mkdir()
    for name in ("rome", "oslo"):
        np.savez(tmp_path / "new" / f"{name}.npz", x=digits[0], y=digits[1])
    to = ["--save", str(tmp_path / "models"), "--json"]
    done = call("join", str(result.run), "--data", str(tmp_path / "new"), "--samples", "5,20", *to)
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert [(t["client"], t["samples"]) for t in told["newcomers"]] == [
        (name, count) for name in ("oslo", "rome") for count in (0, 5, 20, 90)
    ]
    assert [Path(f).name for f in told["files"]] == ["oslo.safetensors", "rome.safetensors"]
    said = call("predict", "--model", told["files"][1], "--data", str(tmp_path / "new" / "rome.npz"), "--json")
    assert said.exit_code == 0, said.output
    assert json.loads(said.stdout)["samples"] == 120
    assert before == {p.name: p.read_bytes() for p in Path(str(result.run)).rglob("*") if p.is_file()}
    shown = call("join", str(result.run), "--data", str(tmp_path / "new" / "rome.npz"))
    assert "0 (before)" in shown.stdout


def test_mistakes_are_refused_with_the_fix(tmp_path: Path, digits: Pair) -> None:
    result = fk.run("ditto", runs_dir=str(tmp_path / "runs"), **{**SMALL, "checkpoint_every": 0})
    np.savez(tmp_path / "late.npz", x=digits[0], y=digits[1])
    late = ["--data", str(tmp_path / "late.npz")]
    assert "has no checkpoint, so no models" in call("join", str(result.run), *late).stderr
    assert "give numbers of samples" in call("join", str(result.run), *late, "--samples", "5,x").stderr
    with pytest.raises(fk.UsageError, match="one of the two"):
        fk.join(result)
    own = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    made = fk.run("ditto", runs_dir=str(tmp_path / "runs"), **{**SMALL, "model": own})
    with pytest.raises(fk.UsageError, match="was given its model as Python objects"):
        fk.join(str(made.run), clients=[digits])
    assert len(fk.join(made, clients=[digits]).names) == 1


# ------------------------------------------------------------ the shared model


@pytest.mark.parametrize("name", every_method())
def test_the_shared_model_is_had_where_there_is_one(name: str) -> None:
    job = finished(job_of(name))
    result, common = job.result(), job.method.common()
    if not common:
        with pytest.raises(fk.UsageError, match=f"method '{name}' has no model that all clients share"):
            _ = result.model
        return
    row = job.site.layout.row(result.model.network)
    for part, values in common.items():
        assert torch.equal(row[job.site.layout.columns(part)], values)  # type: ignore[arg-type]
    assert result.model(torch.zeros(2, FEATURES)).shape == (2, CLASSES)
    assert not result.model.training


def test_which_methods_share_a_model() -> None:
    shared = {name for name in METHODS if finished(job_of(name)).method.common()}
    assert shared >= {"fedavg", "fedavg-ft", "fedprox", "ditto", "fedcap", "fedbabu", "c-pfl", "co-pfl"}
    assert not shared & {"local", "fedper", "fedrep", "lg-fedavg", "fedpkda", "pfedcs"}
