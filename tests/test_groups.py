"""Which runs are the same but for the seed: decided in one place, for what is to be run and for what has a folder."""

from __future__ import annotations

import ast
import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import fedkin as fk
from fedkin.config import LATER, NOT_IDENTITY, Config, make_config
from fedkin.report.gather import RunData
from fedkin.report.several_runs import grouped as in_report
from fedkin.runs.folder import RunFolder, RunInfo
from fedkin.sweep.groups import grouped, same_but_seed, settings_of, told_apart, varied
from fedkin.web.views import compare_page

ROOT = Path(__file__).parent.parent / "src" / "fedkin"
SMALL: dict[str, Any] = {
    "clients": 3,
    "partition": "iid",
    "samples_per_client": 30,
    "rounds": 1,
    "epochs": 1,
    "device": "cpu",
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    result = fk.run("ditto", **SMALL, runs_dir=str(tmp_path_factory.mktemp("runs")), checkpoint_every=0)
    return Path(str(result.run))


def another(run: Path, where: Path, created: int, prepared: dict[str, Any] | None = None, **settings: Any) -> RunFolder:
    """A copy with other settings, as they were given and as they were filled in."""
    folder = Path(shutil.copytree(run, where))
    raw = json.loads((folder / "run.json").read_text())
    raw["created"] = f"2026-01-01T00:00:0{created}Z"
    raw["config"] |= settings
    raw["given"] |= settings
    raw["prepared"] |= prepared or {}
    (folder / "run.json").write_text(json.dumps(raw))
    return RunFolder.open(folder)


DIFFERENT = {
    "precision": ("fp32", "bf16"),
    "lr": (0.1, 0.01),
    "rule": ("mean", "median"),
    "eval_point": ("received", "after_local"),
}
SAME = {
    "on_failure": ("drop", "stop"),
    "device": ("cpu", "cuda"),
    "chunk": (None, 3),
    "way": ("each", "batched"),
    "force": (False, True),
    "checkpoint_every": (0, 5),
    "malicious": (0.3, 0.1),  # nobody attacks
    "seed": (0, 1),
}


@pytest.mark.parametrize(("key", "values"), [*DIFFERENT.items(), *SAME.items()])
def test_configurations_and_folders_are_grouped_alike_in_tables_reports_and_pages(
    made: Path, tmp_path: Path, key: str, values: tuple[Any, Any]
) -> None:
    """Reports once dropped the older of an fp32 and a bf16 run at one seed, and split groups by on_failure."""
    expected = 2 if key in DIFFERENT else 1
    configs = [make_config({**SMALL, key: value}) for value in values]
    assert len(grouped(configs, lambda c: c)) == expected
    resolved = [{key: v} if key in ("precision", "eval_point") else None for v in values]
    runs = [another(made, tmp_path / f"r{i}", i, resolved[i], **{key: v}) for i, v in enumerate(values)]
    assert len(grouped([r.info for r in runs], lambda info: info)) == expected
    groups = in_report([RunData(r) for r in runs])
    assert len(groups) == expected
    assert sum(len(g.older) for g in groups) == (expected == 1 and key != "seed")
    assert len({line["group"] for line in compare_page(runs)["runs"]}) == expected


def test_of_one_seed_the_last_counts_and_the_others_are_named() -> None:
    items = [("a", Config(seed=1)), ("b", Config(seed=0)), ("c", Config(seed=1, on_failure="stop"))]
    (group,) = grouped(items, lambda item: item[1])
    assert [name for name, _ in group.members] == ["b", "c"]
    assert [name for name, _ in group.older] == ["a"]
    assert group.over_seeds(lambda item: float(item[1].seed)) == {"mean": 0.5, "std": pytest.approx(0.5**0.5)}


def test_what_auto_stood_for_and_options_left_to_the_method_do_not_split_a_group(made: Path, tmp_path: Path) -> None:
    first = RunFolder.open(made).info
    assert first.options  # all of them, though none was given
    assert first.given["options"] == {}
    given = another(made, tmp_path / "given", 2, options=dict(first.options), precision="fp32").info
    assert same_but_seed(given) == same_but_seed(first)
    assert settings_of(first)["options.lam"] == first.options["lam"]


def test_words_for_rows_and_columns() -> None:
    configs = [
        make_config({"method": m, "attack": a, "options": o, "seed": s})
        for m, o in (("fedavg", {}), ("ditto", {"lam": 1.0}), ("ditto", {"lam": 2.0}))
        for a in ("none", "sf")
        for s in (0, 1)
    ]
    groups = grouped(configs, lambda c: c)
    rows = ["fedavg", "ditto lam=1.0", "ditto lam=2.0"]
    assert [(g.row, g.column) for g in groups] == [(r, c) for r in rows for c in ("no attack", "sf")]
    assert all([c.seed for c in g.members] == [0, 1] for g in groups)
    assert varied(configs) == ([], ["attack"])
    assert varied([Config(method="ditto", lr=0.1), Config(lr=0.2), Config(rule="median")]) == (["rule"], ["lr"])


# ---------------------------------------------------------------- one home


@cache
def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} | {
        a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names
    }


def users(name: str) -> set[str]:
    return {str(p.relative_to(ROOT)) for p in ROOT.rglob("*.py") if name in names_in(p)}


def test_which_settings_change_a_result_is_decided_in_one_place() -> None:
    assert set(NOT_IDENTITY) <= set(Config().to_dict())
    assert users("ONLY_UNDER_ATTACK") == {"config.py", "cli/runs.py"}  # `fedkin show` leaves them out, too
    # grids over one of them are refused
    assert users("NOT_IDENTITY") <= {"config.py", "sweep/expand.py", "papers/table_records.py"}
    assert users("effective") <= {"config.py", "runs/folder.py", "sweep/groups.py"}


def test_a_run_info_is_read_as_its_folder_has_it(made: Path) -> None:
    info = RunInfo.read(made)
    assert not {"on_failure", "device", "malicious"} & settings_of(info).keys()


def test_settings_that_older_runs_could_not_have_tell_runs_apart_too() -> None:
    plain, cosine, factors = (
        make_config({"rounds": 2, **more}) for more in ({}, {"lr_schedule": "cosine"}, {"lr_factors": "lognormal:0.5"})
    )
    old = plain.to_dict()
    for name in LATER:
        del old[name]
    found = grouped([plain, cosine, factors, make_config({**old, "seed": 1}, ())], lambda c: c)
    assert [(g.row, g.column) for g in found] == [
        ("fedavg", "lr schedule constant, lr factors same"),
        ("fedavg", "lr schedule cosine"),
        ("fedavg", "lr factors lognormal:0.5"),
    ]
    assert len(found[0].members) == 2
    both = [replace(c, lr=lr) for c in (plain, cosine) for lr in (0.1, 0.2)]
    words = [g.column for g in grouped(both, lambda c: c)]
    assert words == ["lr 0.1", "lr 0.2", "lr 0.1, lr schedule cosine", "lr 0.2, lr schedule cosine"]
    (limited, free) = grouped([replace(plain, validation_share=0.1), plain], lambda c: c)
    assert (limited.column, free.column) == ("validation share 0.1", "validation share not set")


def test_what_tells_runs_apart_in_a_list_is_said_as_one_types_it() -> None:
    configs = [
        make_config({"method": "fedprox", "options": {"mu": 0.1}}),
        make_config({"method": "fedprox", "options": {"mu": 1.0}, "lr": 0.1, "seed": 3}),
        make_config({"method": "fedavg", "partition": "iid", "attack": "sf"}),
        make_config({"method": "fedavg", "lr_schedule": "cosine"}),
        make_config({"method": "local", "lr": 0.7}),
    ]
    told = ["mu=0.1", "mu=1.0 lr=0.1", "partition=iid", "lr_schedule=cosine", ""]
    assert told_apart(configs, beside=("attack",)) == told
    assert told_apart(configs)[2] == "partition=iid attack=sf"
    assert told_apart([]) == []
