"""Choosing on validation samples: what is told of them, when training stops, which models are kept, and which cell of a
grid is picked. Test samples never take part in a choice."""

from __future__ import annotations

import json
import math
import sqlite3
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

import fedkin as fk
from fedkin.cli import app
from fedkin.config import Config, make_config
from fedkin.errors import UsageError
from fedkin.rounds import Accuracy, RoundRecord, prepare, validation
from fedkin.rounds.records import best_on_validation
from fedkin.runs.catalogue import Catalogue
from fedkin.runs.database import FIRST, TABLES
from fedkin.runs.folder import METRICS, RunFolder
from fedkin.sweep.selection import selected
from fedkin.sweep.statistics import Outcome, groups_of

SMALL = {
    "clients": 4,
    "rounds": 3,
    "epochs": 1,
    "model": "mlp",
    "partition": "dirichlet:0.5",
    "samples_per_client": 40,
}
ASIDE = {**SMALL, "validation_share": 0.25}


def by_hand(job, rows, part: str) -> np.ndarray:
    """The share right of every client's own samples of a part, sample by sample."""
    found = []
    for client, samples in enumerate(job.site.parts[part]):
        network = job.site.layout.load(job.model, rows[client]).eval()
        right = 0
        for i in samples:
            x, y = job.site.source.batch(torch.tensor([i])), int(job.site.source.y[i])
            with torch.no_grad():
                right += int(network(x).argmax(1)) == y
        found.append(100 * right / len(samples))
    return np.array(found)


@pytest.mark.parametrize("method", ["fedavg", "fedper", "c-pfl"])
def test_validation_metrics_are_those_of_the_validation_samples(method: str) -> None:
    job = prepare(make_config({"method": method, **ASIDE}))
    for _ in range(2):
        record = job.advance()
        rows = job.rows()
        for part, told in (("validation", record.validation), ("test", record.accuracy)):
            each = by_hand(job, rows, part)
            assert told.macro == pytest.approx(each.mean(), abs=1e-4)
            assert told.std == pytest.approx(each.std(), abs=1e-4)
        assert record.validated == 4
    result = job.result()
    assert [c.validation for c in result.per_client] == pytest.approx(by_hand(job, rows, "validation"), abs=1e-4)
    assert result.validation == record.validation
    assert not np.intersect1d(np.concatenate(job.site.parts["validation"]), np.concatenate(job.site.parts["test"])).size


def test_who_asks_for_none_is_told_of_none() -> None:
    for method in ("fedavg", "c-pfl"):  # what C-PFL sets aside is for its committee
        result = fk.run(method, **SMALL)
        assert result.validation is None
        assert result.best_by == "test"
        assert result.to_dict()["history"][0]["validation"] is None
        assert all(math.isnan(c.validation) for c in result.per_client)


def test_a_committee_that_judges_on_them_is_said() -> None:
    remarks = fk.run("c-pfl", **ASIDE).remarks
    assert any("committee judges models on them" in r for r in remarks)
    quiet = fk.run("c-pfl", options={"committee_data": "train"}, **ASIDE).remarks + fk.run("fedavg", **ASIDE).remarks
    assert not any("committee" in r for r in quiet)


def test_the_rest_of_a_run_does_not_depend_on_looking(tmp_path: Path) -> None:
    """The same samples set aside, looked at or not: the same models and test metrics."""
    jobs = [prepare(make_config({"method": "ditto", **ASIDE})) for _ in range(2)]
    jobs[1].site.validate = False
    for job in jobs:
        while not job.finished:
            job.advance() if job.fed.round < 3 else job.finish()
    assert torch.equal(jobs[0].rows(), jobs[1].rows())
    assert [r.accuracy for r in jobs[0].history] == [r.accuracy for r in jobs[1].history]


def test_the_best_round_is_chosen_on_validation() -> None:
    result = fk.run("fedper", **{**ASIDE, "rounds": 6, "lr": 0.3})
    scores = [r.validation.macro for r in result.history]
    assert result.best_by == "validation"
    assert result.best.round == 1 + scores.index(max(scores))
    told = result.to_dict()["best"]
    assert told["by"] == "validation"
    assert told["round"] == result.best.round
    assert told["validation"]["macro"] == max(scores)


def test_a_folder_tells_the_same(tmp_path: Path) -> None:
    result = fk.run("fedavg-ft", runs_dir=str(tmp_path), **ASIDE)
    folder = RunFolder.open(result.run)
    told = json.loads(json.dumps(result.to_dict()))["history"]
    kept = folder.history()
    for a, b in zip(told, kept, strict=True):
        assert a["validation"] == b["validation"]
        assert a["validation_loss"] == b["validation_loss"]
        assert a["validated"] == b["validated"] == 4
    assert [c["validation"] for c in folder.per_client()] == [c.validation for c in result.per_client]
    assert folder.info.result["validation"]["macro"] == result.validation.macro
    again = fk.api.resume(result.run)
    assert again.validation == result.validation
    assert again.history == result.history


def test_an_old_database_can_be_read_and_gone_on_with(tmp_path: Path) -> None:
    result = fk.run("fedavg", runs_dir=str(tmp_path), **SMALL)
    path = Path(result.run) / METRICS
    base = sqlite3.connect(path)
    for table in ("rounds", "clients"):  # as versions wrote it that knew of no validation
        for column in list(TABLES[table])[: FIRST[table] - 1 : -1]:
            if column.startswith("validat"):
                base.execute(f"ALTER TABLE {table} DROP COLUMN {column}")
    base.commit()
    base.close()
    folder = RunFolder.open(result.run)
    assert [r["validation"] for r in folder.history()] == [None] * 3
    assert folder.per_client()[0]["validation"] is None
    assert fk.api.resume(result.run).accuracy == result.accuracy
    from fedkin.report.gather import RunData

    assert RunData(folder).best_by == "test"


def one_class_clients(share_two: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Some clients have both classes, the others one: of these no AUC can be told."""
    rng = np.random.default_rng(0)
    made = []
    for c in range(4):
        y = rng.integers(0, 2, 60) if c < share_two else np.zeros(60, int)
        made.append((rng.normal(size=(60, 3)).astype("float32") + y[:, None], y[:, None].astype("float32")))
    return made


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))


def test_what_cannot_be_computed_is_passed_over_and_named() -> None:
    result = fk.run(
        "fedavg",
        clients=one_class_clients(2),
        model=net(),
        task="multi-label",
        metrics="auc",
        validation_share=0.3,
        rounds=2,
    )
    last = result.history[-1]
    assert last.validated == 4
    assert last.validation_metrics["auc"] > 0
    each = [c.metrics["auc"] for c in result.per_client]
    assert [math.isnan(v) for v in each] == [False, False, True, True]
    assert any("auc cannot be computed on validation for 2 of 4 clients" in r for r in result.remarks)


# ---------------------------------------------------------------- when to stop


def records(scores: list[float], higher: bool = True, first: int = 1) -> list[RoundRecord]:
    """Records that say nothing but these validation scores."""
    test = Accuracy(0.0, 0.0, 0.0, 0.0, higher=higher)
    return [
        RoundRecord(i, test, 0.0, 0.0, 0, 0, 0.0, 1, 0, 0, validation=Accuracy(s, s, s, 0.0, higher=higher))
        for i, s in enumerate(scores, start=first)
    ]


def stop_by_hand(scores: list[float], patience: int, gain: float, higher: bool) -> int | None:
    """The first round at which none of the last `patience` scores was better than what was best before them."""
    best, since = None, 0
    for place, score in enumerate(scores, start=1):
        if math.isnan(score):
            continue
        if best is None or (score - best > gain if higher else best - score > gain):
            best, since = score, 0
        else:
            since += 1
        if since >= patience:
            return place
    return None


SCORES = st.lists(st.one_of(st.integers(0, 20).map(float), st.just(math.nan)), min_size=1, max_size=15)


@given(SCORES, st.integers(1, 4), st.sampled_from([0.0, 1.0, 2.5]), st.booleans())
@settings(max_examples=200, deadline=None)
def test_a_run_stops_where_it_should(scores: list[float], patience: int, gain: float, higher: bool) -> None:
    config = make_config({"patience": patience, "min_gain": gain, "rounds": 100})
    history = records(scores, higher)
    first = next((n for n in range(1, len(scores) + 1) if validation.stopped(history[:n], config)), None)
    assert first == stop_by_hand(scores, patience, gain, higher)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 3), st.booleans())
@settings(max_examples=100, deadline=None)
def test_what_gets_better_all_the_time_never_stops(gains: list[int], patience: int, higher: bool) -> None:
    scores = np.cumsum(gains).astype(float) * (1 if higher else -1)
    config = make_config({"patience": patience, "min_gain": 0.5, "rounds": 100})
    assert validation.stopped(records(scores.tolist(), higher), config) is None


@given(SCORES, st.booleans())
@settings(max_examples=200, deadline=None)
def test_the_best_is_the_first_of_the_best_scores(scores: list[float], higher: bool) -> None:
    found, best = best_on_validation(records(scores, higher)), None
    for place, score in enumerate(scores, start=1):
        if not math.isnan(score) and (best is None or (score > best[0] if higher else score < best[0])):
            best = score, place
    assert (found and found.round) == (best and best[1])


STOPS = {**ASIDE, "rounds": 30, "lr": 0.5, "eval_every": 2, "patience": 2}


@pytest.fixture(scope="module")
def early() -> fk.Result:
    return fk.run("fedper", keep="best", **STOPS)


def test_a_run_stops_early_and_says_so(early: fk.Result) -> None:
    scores = [r.validation.macro for r in early.history]
    assert early.stopped == early.history[-1].round < 30
    assert len(scores) == 1 + int(np.argmax(scores)) + 2  # patience, counted in evaluations
    assert early.to_dict()["stopped"] == early.stopped
    assert any(f"stopped early after round {early.stopped} of 30" in r for r in early.remarks)
    assert early.exchanges[-1].round == early.stopped - 1


def test_the_rounds_until_then_are_those_of_a_run_that_goes_on(early: fk.Result) -> None:
    whole = fk.run("fedper", **{**STOPS, "patience": 29})
    assert [r.accuracy for r in whole.history[: len(early.history)]] == [r.accuracy for r in early.history]


def test_models_kept_are_those_of_the_best_round(early: fk.Result) -> None:
    """As a run has them that ends there."""
    at = early.kept.round
    assert at == early.best.round < early.stopped
    until = prepare(make_config({"method": "fedper", **{k: v for k, v in STOPS.items() if k != "patience"}}))
    for _ in range(at):
        until.advance()
    then = until.result()
    assert early.accuracy == then.history[-1].accuracy == early.kept.accuracy
    assert early.validation == then.validation
    assert [c.accuracy for c in early.per_client] == [c.accuracy for c in then.per_client]
    for client in range(4):
        mine, theirs = (r.personal(client).state_dict() for r in (early, then))
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    last = fk.run("fedper", **STOPS)
    assert (last.kept.round, last.accuracy) == (early.stopped, early.history[-1].accuracy)


@pytest.mark.parametrize("method", ["fedavg-ft", "ditto", "fedcap", "c-pfl"])
def test_every_shape_of_method_keeps_its_best(method: str) -> None:
    """Its server's memory, what clients keep, and what comes after the last round."""
    result = fk.run(method, keep="best", **{**ASIDE, "rounds": 5, "lr": 0.5}, eval_point="after_local")
    record = best_on_validation(result.history)
    assert result.kept == record
    each = [c.validation for c in result.per_client]
    assert np.mean(each) == pytest.approx(record.validation.macro)
    assert np.mean([c.accuracy for c in result.per_client]) == pytest.approx(record.accuracy.macro)


def test_looking_at_the_result_on_the_way_changes_nothing() -> None:
    job = prepare(make_config({"method": "ditto", "keep": "best", **{**ASIDE, "rounds": 6, "lr": 0.5}}))
    seen = []
    while not job.finished:
        job.advance() if not job.no_rounds_left else job.finish()
        seen.append(job.result())
        assert seen[-1].kept == best_on_validation(seen[-1].history)
    plain = fk.run("ditto", keep="best", **{**ASIDE, "rounds": 6, "lr": 0.5})
    assert [(r.accuracy, r.validation) for r in plain.history] == [(r.accuracy, r.validation) for r in seen[-1].history]
    assert torch.equal(seen[-1]._rows, plain._rows)


def test_killed_and_gone_on_it_stops_at_the_same_round_with_the_same_models(tmp_path: Path, early: fk.Result) -> None:
    for at in (early.kept.round, early.stopped - 1):

        def pull(event: object, at: int = at) -> None:
            if getattr(event, "round", 0) >= at > 0:
                raise KeyboardInterrupt

        folder = tmp_path / str(at)
        with pytest.raises(KeyboardInterrupt):
            fk.run("fedper", keep="best", runs_dir=str(folder), checkpoint_every=1, on_event=pull, **STOPS)
        run = Catalogue(folder).find("fedper")
        assert run.info.status == "interrupted"
        again = fk.api.resume(str(run.path))
        assert (again.stopped, again.kept.round) == (early.stopped, early.kept.round)
        assert again.accuracy == early.accuracy
        assert torch.equal(again._rows, early._rows)
    finished = fk.api.resume(str(run.path))
    assert torch.equal(finished._rows, early._rows)
    told = RunFolder.open(run.path)
    assert told.info.result["stopped"] == early.stopped
    assert told.info.result["kept"] == {"round": early.kept.round, "final": False, "by": "best"}
    assert [c["accuracy"] for c in told.per_client()] == [c.accuracy for c in early.per_client]
    assert "stopped early" in "".join(told.log())


def test_export_takes_the_models_that_were_kept(tmp_path: Path, early: fk.Result) -> None:
    from fedkin.use import export, model_file

    fk.run("fedper", keep="best", runs_dir=str(tmp_path), **STOPS)
    (path,) = export.export_run("fedper", "0", tmp_path / "models", ["safetensors"], tmp_path)
    model = model_file.load(path)
    assert model.card.round == early.kept.round
    x = torch.rand(3, 1, 8, 8)
    assert torch.equal(model.module(x), early.personal(0).network(x))


@pytest.mark.parametrize("asked", [{"patience": 3}, {"keep": "best"}])
def test_choosing_needs_samples_to_choose_on(asked: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="validation_share"):
        fk.run("fedavg", **SMALL, **asked)
    with pytest.raises(UsageError, match="validation_share"):  # what its committee has is not for choosing
        fk.run("c-pfl", **SMALL, **asked)


def test_a_gain_without_patience_would_change_nothing() -> None:
    with pytest.raises(UsageError, match="min_gain=1"):
        fk.run("fedavg", min_gain=1, **ASIDE)


def test_a_score_that_can_never_be_computed_stops_nothing() -> None:
    result = fk.run(
        "fedavg",
        clients=[(x, np.stack([np.arange(60) % 7, np.zeros(60)], 1)) for x, _ in one_class_clients(0)],
        model=nn.Linear(3, 1),
        task="survival",
        validation_share=0.3,
        rounds=4,
        patience=1,
        keep="best",
    )
    assert result.stopped is None
    assert math.isnan(result.history[-1].validation.macro)
    assert result.history[-1].validated == 0
    assert result.kept.round == 4
    assert any("could never be computed" in r for r in result.remarks)


# ---------------------------------------------------------------- a cell of a grid

GRID = {**ASIDE, "rounds": 2}


def outcome(config: Config, validation: float, test: float) -> Outcome:
    """A finished run that says these two numbers."""
    result = fk.run("fedavg", **{**GRID, "rounds": 1})
    scores = [Accuracy(v, v, v, 0.0) for v in (test, validation)]
    return replace(Outcome.of(result, config), accuracy=scores[0], validation=scores[1], diverged=None)


@pytest.fixture(scope="module")
def one_outcome() -> Outcome:
    return outcome(Config(), 0.0, 0.0)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=12, max_size=12),
    st.sampled_from(["val", "test"]),
    st.booleans(),
    st.sets(st.integers(0, 11), max_size=3),
    st.sets(st.integers(0, 11), max_size=2),
)
@settings(max_examples=60, deadline=None)
def test_what_is_selected_is_the_best_mean_over_seeds(
    one_outcome: Outcome, numbers: list, way: str, higher: bool, missing: set[int], diverged: set[int]
) -> None:
    """Against a plain loop: two methods, three rates each, two seeds."""
    keys = [(m, lr, seed) for m in ("fedavg", "fedper") for lr in (0.01, 0.1, 1.0) for seed in (0, 1)]
    cells, scores = [], {}
    for i, ((method, lr, seed), pair) in enumerate(zip(keys, numbers, strict=True)):
        config = make_config({"method": method, "lr": lr, "seed": seed, "validation_share": 0.25})
        val, test = (Accuracy(v, v, v, 0.0, higher=higher) for v in map(float, pair))
        why = "because" if i in diverged else None
        found = replace(one_outcome, config=config, options={}, accuracy=test, validation=val, diverged=why)
        cells.append((config, None if i in missing else found))
        fit = i not in missing | diverged
        scores.setdefault((method, lr), []).append((pair[0] if way == "val" else pair[1]) if fit else math.nan)
    for group in selected(groups_of(cells), way):
        means = {lr: sum(s) / 2 for (m, lr), s in scores.items() if m == group.config.method}
        known = {lr: v for lr, v in means.items() if not math.isnan(v)}
        if not known:
            assert not group.outcomes
            continue
        best = (max if higher else min)(known.values())
        assert group.config.lr == next(lr for lr, v in known.items() if v == best)
        assert group.choice["tried"] == 3
        assert group.choice["mean"] == best
        assert len(group.choice["passed_over"]) == 3 - len(known)
        assert group.choice["on"] == {"val": "validation", "test": "test"}[way]
        assert (group.row, group.column) == (group.config.method, "")


def test_conditions_are_not_picked_from(one_outcome: Outcome) -> None:
    cells = []
    for attack in ("none", "sf"):
        for lr, score in ((0.01, 3.0), (0.1, 5.0 if attack == "none" else 1.0)):
            config = make_config({"method": "fedavg", "lr": lr, "attack": attack, "validation_share": 0.25})
            cells.append((config, replace(one_outcome, config=config, validation=Accuracy(score, score, score, 0.0))))
    chosen = selected(groups_of(cells), "val")
    assert [(g.config.attack, g.config.lr) for g in chosen] == [("none", 0.1), ("sf", 0.01)]
    assert [g.column for g in chosen] == ["no attack", "sf"]


def test_compare_selects_on_validation_and_says_so(tmp_path: Path) -> None:
    words = ["compare", "fedavg", "fedper", "--grid", "lr=0.001,0.2", "--seeds", "2", "--select", "val"]
    words += ["--runs-dir", str(tmp_path)]
    words += [f"--{k.replace('_', '-')}={v}" for k, v in GRID.items()]
    answer = CliRunner().invoke(app, words)
    assert answer.exit_code == 0, answer.output
    text = " ".join(answer.output.split())
    assert "settings chosen on validation data" in text
    assert "lr 0.2, chosen on validation data" in text
    assert "among 2" in text
    told = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert len(told["cells"]) == 8
    assert [(row["method"], row["select"]["on"], row["select"]["tried"]) for row in told["table"]] == [
        ("fedavg", "validation", 2),
        ("fedper", "validation", 2),
    ]
    for row in told["table"]:
        runs = [c for c in told["cells"] if c["method"] == row["method"]]
        means = {
            lr: np.mean([c["validation"]["macro"] for c in runs if c["config"]["lr"] == lr]) for lr in (0.001, 0.2)
        }
        assert row["select"]["mean"] == pytest.approx(max(means.values()))
        best = [c["accuracy"]["macro"] for c in runs if c["config"]["lr"] == max(means, key=means.get)]
        assert row["macro"]["mean"] == pytest.approx(np.mean(best))
    on_test = CliRunner().invoke(app, [*words, "--select", "test"]).output
    assert "settings chosen on test data" in " ".join(on_test.split())


def test_selecting_needs_validation_samples() -> None:
    answer = CliRunner().invoke(app, ["compare", "fedavg", "--grid", "lr=0.1,1", "--select", "val"])
    assert answer.exit_code == 2
    assert "--validation-share" in answer.output
    with pytest.raises(UsageError, match="validation_share"):
        fk.compare(["fedavg"], select="val", **SMALL)
    with pytest.raises(UsageError, match="way to select"):
        fk.compare(["fedavg"], select="validation", **ASIDE)
    _, (row,) = fk.compare(["fedavg"], select="val", **{**ASIDE, "rounds": 1})
    assert row["select"]["picked"] == ""


def test_a_run_that_patience_ended_has_its_result_after_the_last_word(tmp_path: Path) -> None:
    """FedBABU tunes when training is over: its last checkpoint is of an earlier round than the run was to have."""
    how = {**ASIDE, "rounds": 20, "lr": 2.0, "patience": 1}
    result = fk.run("fedbabu", runs_dir=str(tmp_path), checkpoint_every=1, **how)
    assert result.stopped is not None
    again = fk.resume(str(result.run))
    assert (again.stopped, again.accuracy) == (result.stopped, result.accuracy)
