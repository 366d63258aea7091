"""Runs that begin with what another has learnt: what is taken over, what is not and why, and that they can go on alone.

`another_run_can_begin_with_it` of the conformance suite holds it for every method."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import fedkin as fk
from fedkin.cli.application import app
from fedkin.config import make_config
from fedkin.deploy.server import Serving, run_server
from fedkin.errors import DataError, UsageError
from fedkin.rounds import Result
from fedkin.rounds.trained import Trained
from fedkin.runs import checkpoint, origin, restore
from fedkin.runs.begun_with import START
from fedkin.runs.catalogue import Catalogue, Past
from fedkin.runs.folder import CHECKPOINTS, RunFolder
from fedkin.testing.tiny import finished, job_of

SMALL: dict[str, Any] = {"clients": 10, "epochs": 1, "lr": 0.05, "way": "each", "samples_per_client": 30}


def train(method: str, rounds: int = 2, **settings: Any) -> Result:
    return fk.run(method, rounds=rounds, **{**SMALL, **settings})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of FedAvg and one of Ditto."""
    folder = tmp_path_factory.mktemp("runs")
    for method in ("fedavg", "ditto"):
        train(method, runs_dir=str(folder))
    return folder


def name_of(runs: Path, method: str) -> str:
    return next(p.name for p in sorted(runs.iterdir()) if p.name.startswith(method))


def began(result: Result) -> str:
    return next(r for r in result.remarks if r.startswith("begins with"))


def folder_of(result: Result) -> RunFolder:
    return RunFolder.open(str(result.run))


# ---------------------------------------------------------------- what is taken over


def test_the_first_round_begins_with_the_shared_model_of_the_last() -> None:
    first = train("fedavg", 3)
    job = finished(job_of("fedavg", rounds=3))
    warm = job_of("fedavg", rounds=2, begin_with=Trained.of(job))
    assert torch.equal(warm.method.model, job.method.model)  # type: ignore[attr-defined]
    assert not torch.equal(warm.method.model, job_of("fedavg").method.model)  # type: ignore[attr-defined]
    again = train("fedavg", 2, start_from=first)
    assert "the shared model (9,610 numbers)" in began(again)
    assert again.history[0].train_loss < train("fedavg", 1).history[0].train_loss


def test_local_models_begin_with_the_shared_one() -> None:
    job = finished(job_of("fedavg"))
    warm = job_of("local", begin_with=Trained.of(job))
    assert torch.equal(warm.rows()[:, : len(job.method.model)], job.method.model.expand(3, -1))  # type: ignore[attr-defined]


def test_clients_have_what_they_kept() -> None:
    job = finished(job_of("ditto"))
    warm = job_of("ditto", begin_with=Trained.of(job))
    assert torch.equal(warm.rows(), job.rows())


def test_heads_go_on_in_another_method_that_keeps_heads() -> None:
    job = finished(job_of("fedper"))
    warm = job_of("fedrep", begin_with=Trained.of(job))
    assert torch.equal(warm.rows(), job.rows())
    assert warm.taken is not None
    assert any("head of 3 of 3 clients" in said for said in warm.taken.facts["taken"])


def test_a_body_that_learnt_under_the_common_head_comes_with_it() -> None:
    """At another seed the head is drawn otherwise, and the body is of no use under it."""
    first = train("fedbabu", options={"finetune_epochs": 1})
    warm = train("fedbabu", 1, start_from=first, seed=1, options={"finetune_epochs": 1})
    assert "the shared model (9,610 numbers)" in began(warm)
    assert "tuned, is_tuned of clients (made anew at the end of a run)" in began(warm)
    assert not warm.history[0].final
    assert warm.history[0].accuracy != first.accuracy  # of the body as received, not of what was tuned before


def test_masks_of_co_pfl_go_on_and_what_is_under_them_learns_from_the_first_round_on() -> None:
    done = finished(job_of("co-pfl", {"p": 0.3, "gamma": 0.5}, rounds=3, lr=0.01))
    warm = job_of("co-pfl", {"p": 0.3, "gamma": 0.5}, begin_with=Trained.of(done), rounds=2, lr=0.01)
    ids = np.arange(3)
    mask, own = (warm.site.store.read(name, ids) for name in ("mask", "own"))
    assert mask.any()
    warm.advance()
    moved = (warm.site.store.read("own", ids) != own) & mask
    assert moved.any(1).sum() == mask.any(1).sum()


def test_clients_are_known_by_name_where_they_bring_their_data_and_else_by_their_samples() -> None:
    rng = np.random.default_rng(0)
    y = np.arange(20) % 2
    sites = {name: (rng.normal(size=(20, 4)).astype("float32"), y) for name in ("oslo", "bergen", "tromso")}
    settings: dict[str, Any] = {"model": network(), "rounds": 1, "epochs": 1, "lr": 0.1}
    first = fk.run("local", clients=sites, **settings)
    later = {"bergen": (rng.normal(size=(12, 4)).astype("float32"), y[:12]), "narvik": sites["oslo"]}
    warm = fk.run("local", clients=later, start_from=first, **settings)
    assert "own of 1 of 2 clients" in began(warm)
    assert "own of 1 clients that are new" in began(warm)

    dealt = train("local")
    same, other = (train("local", 1, start_from=dealt, test_share=share, seed=0) for share in (0.25, 0.4))
    assert "own of 10 of 10 clients" in began(same)
    assert "own of 10 of 10 clients" in began(other)  # the same samples, tested otherwise
    with pytest.raises(UsageError, match="10 clients that hold other samples than those of this name did"):
        train("local", 1, start_from=dealt, seed=1)


def test_test_samples_that_were_trained_on_are_said() -> None:
    first = train("fedavg", 1)
    assert not [r for r in train("fedavg", 1, start_from=first).remarks if "were training samples" in r]
    other = [r for r in train("fedavg", 1, start_from=first, seed=4).remarks if "were training samples" in r]
    assert len(other) == 1
    assert "take the seed and the split of that run" in other[0]


# ---------------------------------------------------------------- what does not fit


def blobs(classes: int, width: int = 4, names: Callable[[int], Any] = int) -> list[Any]:
    rng = np.random.default_rng(0)
    y = np.arange(24) % classes
    return [(rng.normal(size=(24, width)).astype("float32"), np.array([names(c) for c in y])) for _ in range(3)]


def network(width: int = 4, hidden: int = 5, classes: int = 2) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, classes))


def on(data: list[Any], make: Callable[[], nn.Module], method: str = "fedavg", **settings: Any) -> Result:
    return fk.run(method, clients=data, model=make, rounds=1, epochs=1, lr=0.1, **settings)


def test_another_network_is_refused_with_the_tensors_in_which_it_differs() -> None:
    first = on(blobs(2), network())
    with pytest.raises(UsageError, match=r"another network.*0\.weight \(5x4 there, 6x4 here\)"):
        on(blobs(2), network(hidden=6), start_from=first)
    deeper = lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 2))  # noqa: E731
    with pytest.raises(UsageError, match=r"2\.weight \(2x5 there, 5x5 here\)"):
        on(blobs(2), deeper, start_from=first)


def test_other_classes_get_a_new_head_on_the_body() -> None:
    first = on(blobs(2), network())
    warm = on(blobs(3), network(classes=3), start_from=first)
    assert "2 of 4 tensors (25 numbers)" in began(warm)
    assert "the head (2.weight (2x5 there, 3x5 here), 2.bias (2 there, 3 here))" in began(warm)
    renamed = on(blobs(2, names=lambda c: "ab"[c]), network(), start_from=first)
    assert "its outputs stand for other classes: 0, 1 there, a, b here" in began(renamed)


def test_where_a_head_is_new_nothing_is_kept_that_has_one() -> None:
    first = on(blobs(2), network(), "ditto")
    warm = on(blobs(3), network(classes=3), "ditto", start_from=first)
    assert "personal (it has a head" in began(warm)


def test_nothing_to_take_is_an_error() -> None:
    first = train("local")
    with pytest.raises(UsageError, match=r"nothing of it can be taken over: a shared model \(local has none\)"):
        train("fedavg", 1, start_from=first)


def test_frozen_weights_come_along() -> None:
    """A head that was learnt on one frozen body is of no use on another."""

    def frozen() -> nn.Module:
        made = network()()
        made[0].requires_grad_(False)  # type: ignore[index, operator]
        return made

    first = on(blobs(2), frozen)
    warm = on(blobs(2), frozen, start_from=first, seed=3)
    assert torch.equal(warm.model.network[0].weight, first.model.network[0].weight)  # type: ignore[index, union-attr]
    assert "the shared model (37 numbers)" in began(warm)


def test_a_server_of_real_sites_refuses_it() -> None:
    with pytest.raises(UsageError, match="is for simulations: a server of real sites begins with a model of its own"):
        run_server(make_config({"method": "fedavg", "start_from": "x@y"}), Serving(port=0), clients=2)


# ---------------------------------------------------------------- a run of its own


def test_it_is_another_run_than_the_cold_one(runs: Path) -> None:
    before = name_of(runs, "ditto")
    warm = train("ditto", start_from=name_of(runs, "fedavg"), runs_dir=str(runs))
    cold = make_config({**SMALL, "method": "ditto", "rounds": 2, "runs_dir": str(runs)})
    asked = origin.resolved(make_config({**cold.to_dict(), "start_from": name_of(runs, "fedavg")}, cold.asked))
    past = Past(runs)
    found, same = past.finished(cold), past.finished(asked)
    assert found is not None
    assert found.id == before
    assert same is not None
    assert same.id == folder_of(warm).info.id
    facts = folder_of(warm).info.raw["start"]
    assert (facts["run"], facts["method"], facts["round"]) == (name_of(runs, "fedavg"), "fedavg", 2)
    assert len(facts["sha256"]) == 64
    shutil.rmtree(str(warm.run))


def test_a_comparison_reads_it_the_next_time(runs: Path) -> None:
    settings = {**SMALL, "rounds": 1, "start_from": name_of(runs, "fedavg"), "runs_dir": str(runs)}
    first, _ = fk.compare(["fedavg", "local"], **settings)
    again, _ = fk.compare(["fedavg", "local"], **settings)
    assert [r.run for r in first] == [r.run for r in again]
    in_memory, _ = fk.compare(["fedavg"], **{**SMALL, "rounds": 1, "start_from": first[0]})
    assert "begins with" in in_memory[0].remarks[0]
    for result in first:
        shutil.rmtree(str(result.run))


def stop_after(round: int) -> Callable[[Any], None]:
    def hear(event: Any) -> None:
        if getattr(event, "round", 0) == round:
            raise KeyboardInterrupt

    return hear


@pytest.mark.parametrize("every", [1, 0])
def test_it_goes_on_exactly_although_the_first_run_is_gone(tmp_path: Path, every: int) -> None:
    first = train("ditto", runs_dir=str(tmp_path))
    settings = {"start_from": folder_of(first).info.id, "participation": 0.5, "runs_dir": str(tmp_path)}
    whole = train("ditto", 3, **settings)
    with pytest.raises(KeyboardInterrupt):
        train("ditto", 3, checkpoint_every=every, on_event=stop_after(2), **settings)
    stopped = next(i for i in Catalogue(tmp_path).runs() if i.status == "interrupted")
    shutil.rmtree(str(first.run))
    found = fk.resume(str(stopped.path))
    assert [r.accuracy for r in found.history] == [r.accuracy for r in whole.history]
    assert all(
        torch.equal(a, b)
        for c in range(10)
        for a, b in zip(found.personal(c).parameters(), whole.personal(c).parameters(), strict=True)
    )


def test_a_run_that_went_on_is_not_the_one_that_was_named(tmp_path: Path) -> None:
    first = train("fedavg", 1, runs_dir=str(tmp_path))
    config = origin.resolved(make_config({**SMALL, "start_from": folder_of(first).info.id, "runs_dir": str(tmp_path)}))
    fk.resume(str(first.run), rounds=2)
    with pytest.raises(DataError, match="has gone on since"):
        origin.with_origin(config, {})


def test_what_it_began_with_is_needed_and_its_loss_is_said(tmp_path: Path) -> None:
    first = train("fedavg", 1, runs_dir=str(tmp_path))
    warm = train("local", 1, start_from=first, runs_dir=str(tmp_path))
    assert folder_of(warm).info.objects == []
    assert restore.as_it_was(folder_of(warm)).taken is not None
    path = Path(str(warm.run)) / CHECKPOINTS / f"{START}.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(DataError, match="its copy of that cannot be read"):
        fk.resume(str(warm.run))


def test_on_the_command_line(runs: Path) -> None:
    flags = [f"--{name}={value}" for name, value in (("clients", 10), ("epochs", 1), ("rounds", 1), ("lr", 0.05))]
    place = ["--runs-dir", str(runs)]
    done = CliRunner().invoke(app, ["run", "local", "--from", name_of(runs, "fedavg"), "--json", *flags, *place])
    assert done.exit_code == 0, done.output
    folder = json.loads(done.stdout)["run"]
    shown = CliRunner().invoke(app, ["show", folder, *place])
    assert f"{name_of(runs, 'fedavg')} (fedavg, after round 2). taken over: the shared model" in shown.stdout
    wrong = CliRunner().invoke(app, ["run", "local", "--from", "nothing-like-it", *flags, *place])
    assert wrong.exit_code == 2
    assert "unknown run 'nothing-like-it'" in wrong.output
    shutil.rmtree(folder)


def test_a_folder_that_was_made_up_is_refused_in_words(tmp_path: Path) -> None:
    first = train("fedavg", 1, runs_dir=str(tmp_path))
    warm = train("local", 1, start_from=first, runs_dir=str(tmp_path))
    folder = folder_of(warm)
    for state, error in (
        ({"tensors": {"body.9.weight": torch.zeros(3)}, "kept": {}}, "'body.9.weight', which does not fit its network"),
        ({"tensors": {}, "kept": {"own": 3}}, "its copy of that cannot be read"),
        ({"tensors": {}, "kept": {"other": {"ids": torch.arange(2), "rows": torch.zeros(2, 3)}}}, "keeps 'other'"),
    ):
        checkpoint.save(folder.path / CHECKPOINTS, START, 0, state)
        with pytest.raises(DataError, match=error):
            fk.resume(str(folder.path))
    raw = json.loads((folder.path / "run.json").read_text())
    (folder.path / "run.json").write_text(json.dumps({**raw, "start": {"taken": 3, "left": "x", "notes": [{}]}}))
    assert folder_of(warm).info.began_with["notes"] == ["{}"]
    assert CliRunner().invoke(app, ["show", str(folder.path)]).exit_code == 0


# ---------------------------------------------------------------- samples that were seen before


SITES = ("oslo", "bergen", "tromso")
BRIEF: dict[str, Any] = {"rounds": 1, "epochs": 1, "lr": 0.1}


def rows(count: int, clients: int = 3, seed: int = 0) -> dict[str, Any]:
    """So many rows for each client, the first of which are always the same."""
    rng = np.random.default_rng(seed)
    whole = [(rng.normal(size=(60, 4)).astype("float32"), rng.integers(0, 2, 60)) for _ in range(clients)]
    names = (*SITES, "narvik", "bodo")
    return {name: (x[:count], y[:count]) for name, (x, y) in zip(names, whole, strict=False)}


def frames(count: int, **columns: Any) -> list[Any]:
    pandas = pytest.importorskip("pandas")
    return [pandas.DataFrame({"age": x[:, 0], "bmi": x[:, 1], **columns, "label": y}) for x, y in rows(count).values()]


def seen(result: Result, what: str = "test") -> str:
    return next((r for r in result.remarks if f"{what} samples were training samples" in r), "")


def test_samples_that_were_trained_on_are_known_in_scaled_tables_in_larger_clients_and_among_others() -> None:
    tables: dict[str, Any] = {"model": network(2), "scale": "federated", **BRIEF}
    first = fk.run(clients=frames(40), **tables)
    assert not seen(fk.run(clients=frames(40), start_from=first, **tables))
    assert seen(fk.run(clients=frames(40), start_from=first, seed=1, **tables))
    local = {**tables, "scale": "local"}
    assert seen(fk.run(clients=frames(60), start_from=first, **local))  # of more rows, and prepared otherwise

    arrays: dict[str, Any] = {"model": network(), **BRIEF}
    begun = fk.run(clients=rows(30), **arrays)
    assert seen(fk.run(clients=rows(60), start_from=begun, **arrays))
    assert seen(fk.run(clients=rows(30, 5), start_from=begun, seed=1, **arrays))
    assert not seen(fk.run(clients=rows(30, seed=7), start_from=begun, **arrays))


def test_images_that_are_shifted_otherwise_are_known() -> None:
    first = train("fedavg", 1)
    for seed in (0, 4):
        shifted = train("fedavg", 1, start_from=first, shift="all", seed=seed)
        assert bool(seen(shifted)) == (seed == 4)
        plain = train("fedavg", 1, start_from=shifted, seed=5)
        assert "or of those that it began with" in seen(plain)


def test_what_was_seen_goes_down_a_chain_through_folders_and_resumed_runs(tmp_path: Path) -> None:
    place = {"runs_dir": str(tmp_path)}
    first = train("fedavg", 1, **place)
    second = train("fedavg", 1, start_from=first, seed=1, **place)
    shutil.rmtree(str(first.run))
    third = train("fedavg", 1, start_from=Path(str(second.run)).name, seed=1, **place)
    assert "or of those that it began with" in seen(third)
    again = fk.resume(str(third.run), rounds=2)
    assert seen(again) == seen(third)
    assert folder_of(third).info.began_with["seen"] == [seen(third)]


def test_a_run_that_kept_no_record_of_what_it_had_seen_is_said_to(tmp_path: Path) -> None:
    first = train("fedavg", 1, runs_dir=str(tmp_path))
    second = train("fedavg", 1, start_from=first, runs_dir=str(tmp_path))
    where, none = Path(str(second.run)) / CHECKPOINTS, np.zeros(0, np.int64)
    state = checkpoint.load(where, START, torch.device("cpu"), none)
    checkpoint.save(where, START, 0, {k: v for k, v in state.items() if k != "seen"})
    name = Path(str(second.run)).name
    third = train("fedavg", 1, start_from=name, runs_dir=str(tmp_path))
    assert any("cannot be told" in r for r in third.remarks)


def test_validation_samples_that_were_trained_on_are_said() -> None:
    first = train("fedavg", 1)
    warm = train("fedavg", 1, start_from=first, validation_share=0.2)
    assert "choices on validation samples (patience, keep=best, select=val) are not to be trusted" in seen(
        warm, "validation"
    )
    assert not seen(warm)
    aside = train("fedavg", 1, validation_share=0.2)
    assert not seen(train("fedavg", 1, start_from=aside, validation_share=0.2), "validation")


# ---------------------------------------------------------------- whose inputs, and who is who


def test_tables_of_other_columns_are_refused_and_other_scaling_is_said() -> None:
    tables: dict[str, Any] = {"model": network(2), **BRIEF}
    first = fk.run(clients=frames(40), **tables)
    turned = [frame[["bmi", "age", "label"]] for frame in frames(40)]
    with pytest.raises(UsageError, match="another order: input 1 was 'age' and is 'bmi' here"):
        fk.run(clients=turned, start_from=first, **tables)
    renamed = [frame.rename(columns={"bmi": "weight"}) for frame in frames(40)]
    with pytest.raises(UsageError, match="bmi only there; weight only here"):
        fk.run(clients=renamed, start_from=first, **tables)
    scaled = fk.run(clients=frames(40), start_from=first, scale="federated", **tables)
    assert any("'age' is scaled by as it is there, mean" in r for r in scaled.remarks)
    same = fk.run(clients=frames(40), start_from=scaled, scale="federated", seed=1, **tables)
    assert not any("prepared otherwise" in r for r in same.remarks)


def test_other_words_of_a_category_are_refused() -> None:
    tables: dict[str, Any] = {"model": network(4), **BRIEF}
    first = fk.run(clients=frames(40, town=["a", "b"] * 20), **tables)
    with pytest.raises(UsageError, match="town=a only there; town=c only here"):
        fk.run(clients=frames(40, town=["c", "b"] * 20), start_from=first, **tables)


def test_clients_of_a_list_without_names_are_known_by_their_samples() -> None:
    listed = list(rows(30).values())
    settings: dict[str, Any] = {"model": network(), **BRIEF}
    first = fk.run("local", clients=listed, **settings)
    warm = fk.run(
        "local",
        clients=[*listed[:0:-1], rows(30, 5)["bodo"]],
        start_from=first,
        lr=1e-9,
        **{k: v for k, v in settings.items() if k != "lr"},
    )
    assert "own of 2 of 3 clients" in began(warm)
    then, now = (next(iter(r.personal(c).parameters())) for r, c in ((first, 2), (warm, 0)))
    assert torch.allclose(then, now, atol=1e-6)


# ---------------------------------------------------------------- comparisons and searches


def test_a_comparison_says_below_its_table_which_runs_are_tested_on_what_was_seen(tmp_path: Path) -> None:
    first = train("fedavg", 1, runs_dir=str(tmp_path))
    settings = {**SMALL, "rounds": 1, "start_from": folder_of(first).info.id, "runs_dir": str(tmp_path)}
    for _ in range(2):  # also where runs are only read
        _, shown = fk.compare(["fedavg", "local"], seeds=2, **settings)
        (note,) = (line for line in shown.to_markdown().splitlines() if line.startswith("seen before"))
        assert note.startswith("seen before: fedavg seed 1, local seed 1: ")
        assert "test samples were training samples" in note
        assert [row["seen"].keys() for row in shown] == [{"1"}, {"1"}]
        assert "seen_seeds" in shown.to_csv().splitlines()[0]


def test_the_last_run_is_none_to_begin_with_where_the_same_call_goes_on(runs: Path) -> None:
    settings = {**SMALL, "rounds": 1, "start_from": "last", "runs_dir": str(runs)}
    with pytest.raises(UsageError, match="begin with the last of its own runs"):
        fk.compare(["fedavg"], **settings)
    with pytest.raises(UsageError, match="begin with the last of its own runs"):
        fk.tune("fedavg", **settings)
    place = ["--from", "last", "--runs-dir", str(runs), "--rounds", "1"]
    for words in (["compare", "fedavg", "local"], ["tune", "fedavg"]):
        done = CliRunner().invoke(app, [*words, *place])
        assert done.exit_code == 2
        assert "give the run's name" in done.output
    flags = ["--clients", "10", "--epochs", "1", "--samples-per-client", "30", "--way", "each"]
    done = CliRunner().invoke(app, ["compare", "local", *place, *flags, "--from", name_of(runs, "fedavg")])
    assert f"runs begin with {name_of(runs, 'fedavg')}" in done.output
    for info in Catalogue(runs).runs():
        if info.method == "local":
            shutil.rmtree(info.path)


def test_a_search_begins_with_no_run_that_has_trained_on_its_validation_samples() -> None:
    pytest.importorskip("optuna")
    first, aside = train("fedavg", 1), train("fedavg", 1, validation_share=0.2)
    search = {"search": {"lr": [0.01, 0.1]}, "trials": 1, **{k: v for k, v in SMALL.items() if k != "lr"}}
    with pytest.raises(UsageError, match=r"validation samples at seed 0 were training samples.*validation_share=0.2"):
        fk.tune("fedavg", rounds=1, start_from=first, **search)
    assert fk.tune("fedavg", rounds=1, start_from=aside, **search).best is not None
    with pytest.raises(UsageError, match="at seed 1 were training samples"):
        fk.tune("fedavg", rounds=1, start_from=aside, seeds=2, **search)


def test_weights_that_are_not_finite_are_no_beginning() -> None:
    job = job_of("fedavg", rounds=1, begin_with=Trained.of(finished(job_of("fedavg", rounds=1))))
    assert job.taken is not None
    spoilt = {name: torch.full_like(value, torch.nan) for name, value in job.taken.tensors.items()}
    with pytest.raises(DataError, match="not finite"):
        job_of("fedavg", rounds=1, begin_with=replace(job.taken, tensors=spoilt))
