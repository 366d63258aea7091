"""The papers' tables as data, the plans made from them, running and resuming, and what is written down."""

from __future__ import annotations

import json
import math
import multiprocessing
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import kendalltau
from typer.testing import CliRunner

from fedkin import rounds
from fedkin.cli.application import app
from fedkin.cli.flags import seeds_of
from fedkin.config import Config
from fedkin.errors import DataError, UsageError
from fedkin.methods import METHODS
from fedkin.papers import html_page, markdown, result_files, results_page, table_records
from fedkin.papers import verdicts as compare
from fedkin.papers.cell_settings import canonical
from fedkin.papers.measures import METRICS, Measures, Point, Traces, facts, value_of
from fedkin.papers.plan import Plan, calibrate, make_plan, quick
from fedkin.papers.published import NAMES, Paper, forget, load_file, load_paper, parse
from fedkin.papers.runner import Ledger, Session, commit, from_folder, measures_of, reproduce
from fedkin.runs.folder import RunFolder
from fedkin.sweep.loaded import Data
from fedkin.sweep.runner import run_sweep
from fedkin.sweep.trainings import batches, trained

ROOT = Path(__file__).parent.parent

LISTED = {
    "c-pfl": ["table3", "table4", "table5", "table6", "figure4", "figure5", "figure6"],
    "pfedcs": ["table1", "table2", "table3", "table4", "table5"],
    "fedcap": [
        "table1",
        "table2",
        "table3",
        "table4",
        "table5",
        "figure8",
        "figure9",
        "figure10",
        "figure11",
        "figure12",
    ],
    "co-pfl": ["table1", "table2", "table3", "table7", "table8", "table9", "table10", "mamo"],
    "fedpkda": ["table1", "table2", "table3", "figure4"],
    "claims": [
        "fedcap-benign",
        "fedcap-fltrust",
        "fedcap-length",
        "co-pfl-baselines",
        "pfedcs-fedper",
        "pfedcs-blocks",
        "c-pfl-tuning",
        "c-pfl-flips",
        "c-pfl-figure4-flips",
        "c-pfl-noise",
        "fedpkda-fedper",
    ],
    "natural": ["ucihar", "wisdm51", "mnist", "rates"],
}

# typed from the papers by hand, apart from the files
PRINTED = [
    ("c-pfl", "table3", "C-PFL", "practical CIFAR10", 90.56),
    ("c-pfl", "table3", "FedProto", "practical CIFAR100", 49.15),
    ("c-pfl", "table3", "GPFL", "pathological CIFAR10", 86.29),
    ("c-pfl", "table4", "C-PFL", "pathological CIFAR100", 44.48),
    ("c-pfl", "table4", "Ditto", "pathological CIFAR10", 85.22),
    ("c-pfl", "table5", "C-PFL", "Fashion-MNIST (s)", 39.35),
    ("c-pfl", "table6", "CIFAR-10", "0 epochs", 53.86),
    ("c-pfl", "table6", "CIFAR-100", "20 epochs", 50.21),
    ("c-pfl", "figure4", "CIFAR10 FedBABU", "40 %", 9.89),
    ("c-pfl", "figure4", "CIFAR10 C-PFL", "10 %", 1.04),
    ("c-pfl", "figure5", "GPFL", "IMDB", 99.48),
    ("pfedcs", "table1", "PFedCS", "CIFAR-100 C=10", 63.29),
    ("pfedcs", "table1", "ClusterFL", "Tiny-ImageNet C=40", 36.19),
    ("pfedcs", "table2", "FedAMP", "CIFAR-10 alpha=0.05", 93.76),
    ("pfedcs", "table3", "Random Selection", "C=15", 54.34),
    ("pfedcs", "table4", "CIFAR-100", "FIX", 61.49),
    ("pfedcs", "table5", "Acc.", "rho=0", 53.58),
    ("fedcap", "table1", "CIFAR-10 Min-Max", "M-Krum", 52.00),
    ("fedcap", "table1", "EMNIST IPM", "Median", 65.88),
    ("fedcap", "table1", "WISDM LIE", "FLTrust", 37.36),
    ("fedcap", "table2", "CIFAR-10 IPM", "RFA GAS", 82.76),
    ("fedcap", "table2", "WISDM LIE", "M-Krum Bucket", 93.57),
    ("fedcap", "table3", "WISDM DAcc", "LIE", 72.22),
    ("fedcap", "table3", "EMNIST FNR", "LIE", 63.33),
    ("fedcap", "table4", "1 customised", "Min-Max", 48.76),
    ("fedcap", "table4", "2 personal", "IPM", 10.95),
    ("fedcap", "table5", "FedCAP", "R2Acc(80%)", 9),
    ("fedcap", "table5", "FedFomo", "Communication", 120),
    ("co-pfl", "table1", "FedPer", "CINIC10", 70.98),
    ("co-pfl", "table2", "p=0.50", "gamma=0.50", 67.32),
    ("co-pfl", "table7", "p=0.01", "gamma=0.05", 75.18),
    ("co-pfl", "table8", "CINIC10 neither", "Acc (%)", 46.63),
    ("co-pfl", "table9", "FedAvg", "10 per class", 24.30),
    ("co-pfl", "table10", "FedSelect", "10 per class", 70.49),
    ("fedpkda", "table1", "FedAS", "Cifar100 beta=0.3 P=0.6", 44.47),
    ("fedpkda", "table1", "FedFSA", "Flowers102 beta=0.5 P=0.6", 37.72),
    ("fedpkda", "table2", "P=0.4 PSNR", "FedPKDA", 6.87),
    ("fedpkda", "table3", "Cifar100 P=0.4", "w/ CP", 45.73),
]


def cell_config(paper: str, table: str, row: str, column: str) -> Config:
    cell = load_paper(paper).table(table).cell(row, column)
    assert cell is not None
    return cell.variants[0]


# ------------------------------------------------------------ the tables


@pytest.mark.parametrize("paper", NAMES)
def test_every_listed_table_is_there(paper: str) -> None:
    assert sorted(t.name for t in load_paper(paper).tables) == sorted(LISTED[paper])


@pytest.mark.parametrize(("paper", "table", "row", "column", "number"), PRINTED)
def test_numbers_are_the_papers(paper: str, table: str, row: str, column: str, number: float) -> None:
    cell = load_paper(paper).table(table).cell(row, column)
    assert cell is not None
    assert cell.printed == number


def test_averages_that_the_paper_prints_come_out() -> None:
    printed = {"table1": {"PFedCS": 61.64, "FedBABU": 58.86}, "table2": {"PFedCS": 68.41, "FedGH": 63.19}}
    for table, averages in printed.items():
        for row, mean in averages.items():
            numbers = [c.printed for c in load_paper("pfedcs").table(table).cells if c.row == row]
            assert sum(n for n in numbers if n is not None) / 9 == pytest.approx(mean, abs=0.011)


def test_settings_of_cells() -> None:
    rule = cell_config("fedcap", "table1", "CIFAR-10 SF", "Trim.")
    assert (rule.method, rule.rule, rule.attack) == ("fedavg-ft", "trimmed-mean:cut=0.5", "sf")
    assert METHODS["fedavg-ft"].eval_point == "after_local"
    assert (rule.data, rule.model, rule.clients, rule.partition) == ("cifar10", "fedcap-cifar", 20, "pathological:2")
    assert (rule.samples_per_client, rule.batch, rule.lr, rule.epochs, rule.rounds) == (300, 10, 0.01, 5, 100)
    cap = cell_config("fedcap", "table1", "CIFAR-10 MR", "FedCAP")
    assert cap.options == {"lam": 10.0}  # alpha 10 and phi 0.3 are the method's own
    assert cell_config("fedcap", "table4", "1 customised", "LIE").options == {"ablation": "1"}
    assert cell_config("fedcap", "table4", "5 FedCAP", "LIE") == cell_config("fedcap", "table3", "CIFAR-10 TAcc", "LIE")
    assert cell_config("fedcap", "figure10", "CIFAR-10 LIE 40 %", "M-Krum").rule == "multi-krum:malicious=0.4"
    tuned = cell_config("c-pfl", "table6", "CIFAR-10", "15 epochs")
    assert (tuned.clients, tuned.partition, tuned.options) == (100, "dirichlet:0.1", {"finetune_epochs": 15})
    noisy = cell_config("c-pfl", "figure4", "CIFAR10 C-PFL", "40 %")
    assert (noisy.attack, noisy.malicious, noisy.attackers) == ("input-noise:sigma=0.3", 0.4, "redrawn")
    base, ours = (cell_config("co-pfl", "table1", m, "CIFAR10") for m in ("FedPer", "CO-PFL"))
    assert (base.lr, base.momentum, base.epochs, ours.lr, ours.epochs) == (0.01, 0.5, 5, 0.0001, 3)
    assert cell_config("co-pfl", "table1", "CO-PFL", "CIFAR10C").options == {"p": 0.15}
    flowers = load_paper("fedpkda").table("table1").cell("FedPKDA", "Flowers102 beta=0.3 P=0.2")
    assert flowers is not None
    assert flowers.missing == "data not available: flowers102"


def test_a_cells_word_follows_from_what_is_not_usual() -> None:
    cell = load_paper("fedcap").table("table1").cell("CIFAR-10 SF", "Mean")
    assert cell is not None

    def word(**settings: Any) -> str:
        return table_records.settings_of(replace(cell, variants=tuple(replace(v, **settings) for v in cell.variants)))

    assert word() == word(order="shuffled") == word(seed=3) == word(device="cpu")
    words = [word(), word(order="fixed"), word(rounds=99), word(momentum=0.5), word(options={"x": 1})]
    assert len(set(words)) == len(words)


def test_what_is_missing_says_so_and_comes_by_itself() -> None:
    name, at = "fedala", ("FedALA", "practical CIFAR10")
    if name not in METHODS:
        cell = load_paper("c-pfl").table("table3").cell(*at)
        assert cell is not None
        assert cell.missing == f"method not there yet: {name}"
        METHODS.register(name)(METHODS["fedavg"])
        try:
            forget()
            cell = load_paper("c-pfl").table("table3").cell(*at)
            assert cell is not None
            assert cell.missing == ""
            assert cell.variants[0].method == name
        finally:
            METHODS._entries.pop(name)
            forget()


def test_the_files_are_in_the_package() -> None:
    found = {p.name for p in files("fedkin.papers").iterdir()}
    assert {f"{n.replace('-', '_')}.toml" for n in NAMES} <= found
    assert '"papers/*.toml"' in (ROOT / "pyproject.toml").read_text()


MINI = """
name = "mini"
title = "A small paper"
cite = "nobody, 2025"

[settings]
data = "digits"
clients = 5
rounds = 2
epochs = 1
samples_per_client = 40
lr = 0.05

[named.hostile]
attack = "sf"

[[table]]
name = "t"
title = "a table"
metric = "micro"
methods = "rows"
[[table.column]]
name = "calm"
[[table.column]]
name = "storm"
use = ["hostile"]
[[table.row]]
name = "FedAvg"
set = { method = "fedavg" }
numbers = [50.0, "?"]
[[table.row]]
name = "Ditto"
set = { method = "ditto" }
numbers = [90.0, 80.0]
[[table.check]]
says = "Ditto is above FedAvg"
left = "Ditto"
right = ["*"]
"""


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("[settings]", "[settings", "not valid TOML"),
        ('title = "A small paper"', "", "'title' is missing"),
        ("lr = 0.05", "learning_rate = 0.05", "a run has no option 'learning_rate'"),
        ("lr = 0.05", "lr = -1", "lr=-1"),
        ('metric = "micro"', 'metric = "mikro"', "unknown metric 'mikro': did you mean 'micro'"),
        ('metric = "micro"', 'metric = "rounds_to"', "rounds_to takes the accuracy"),
        ('metric = "micro"', "", "no metric"),
        ('methods = "rows"', 'methods = "lines"', "accepts rows, columns, none"),
        ('methods = "rows"', "colour = 1", "unknown key 'colour'"),
        ('numbers = [50.0, "?"]', "numbers = [50.0]", "has 1 numbers for 2 columns"),
        ('numbers = [50.0, "?"]', 'numbers = [50.0, "51"]', "'51' is no number"),
        ('numbers = [50.0, "?"]', "numbers = [50.0, nan]", "nan is no number"),
        ('use = ["hostile"]', 'use = ["hostil"]', "unknown named settings 'hostil': did you mean 'hostile'"),
        ('use = ["hostile"]', "use = 5", "use = 5: accepts a list"),
        ("numbers = [90.0, 80.0]", "numbers = [90.0, 80.0]\nnote = 5", "note = 5: accepts text"),
        ('set = { method = "ditto" }', "set = [1]", "set = [1]: accepts a table"),
        ('name = "Ditto"', 'name = "FedAvg"', "'FedAvg' stands there twice"),
        ('set = { method = "ditto" }', 'set = { method = "ditto", options = { ditto = { mu = 1 } } }', "'mu'"),
        ('set = { method = "ditto" }', "", "no method"),
        ('attack = "sf"', 'attack = "sf"\npartition = "pathologic:2"', "pathologic"),
        ('left = "Ditto"', 'left = "Dito"', "unknown line 'Dito': did you mean 'Ditto'"),
        ('right = ["*"]', "by = 1", "give right, or at_least, or target"),
        ('right = ["*"]', "target = 80", "target needs within"),
        ('name = "storm"', 'name = "storm"\nratio_to = "Nobody"', "refers to 'Nobody'"),
        ('name = "storm"', 'name = "storm"\nratio_to = "FedAvg"\ndrop_from = "calm"', "exclude each other"),
    ],
)
def test_broken_files_are_refused(old: str, new: str, error: str) -> None:
    assert old in MINI
    with pytest.raises(DataError, match=re.escape(error)) as caught:
        parse(MINI.replace(old, new, 1), "mini.toml")
    assert "mini.toml" in str(caught.value) or "metric" in error or "rounds_to" in error


def test_unknown_names_get_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'fedcap'"):
        load_paper("fedcab")
    with pytest.raises(UsageError, match="did you mean 'table1'"):
        load_paper("fedcap").table("tabel1")
    with pytest.raises(UsageError, match="unknown row"):
        load_paper("fedcap").table("table1").select(["CIFAR-1000"], [])


def test_rows_are_found_by_group_name_or_both() -> None:
    table = load_paper("fedcap").table("table1")
    assert len(table.select(["cifar-10"], [])) == 48
    assert len(table.select(["SF"], ["FedCAP"])) == 3
    assert [c.row for c in table.select(["WISDM sf"], ["fedcap"])] == ["WISDM SF"]


# ------------------------------------------------------------ plans


def everything(paper: Paper) -> list[tuple[Any, Any]]:
    return [(t, c) for t in paper.tables for c in t.cells]


@pytest.fixture
def mini() -> Paper:
    return parse(MINI, "mini.toml")


def plan_of(paper: Paper, seeds: tuple[int, ...] = (0,), **more: Any) -> Plan:
    return make_plan(paper, everything(paper), seeds, Data(), settings=more)


def test_runs_are_shared_and_the_first_seed_comes_first(mini: Paper) -> None:
    twice = parse(MINI + MINI[MINI.index("[[table]]") :].replace('"t"', '"u"'), "mini.toml")
    plan = plan_of(twice, (0, 1))
    assert len(plan.cells) == 8
    assert [(c.method, c.attack, c.seed) for c in plan.runs] == [
        (m, a, s) for s in (0, 1) for m in ("fedavg", "ditto") for a in ("none", "sf")
    ]


def test_accuracy_and_detection_come_from_the_same_runs() -> None:
    paper = load_paper("fedcap")
    chosen = [
        (paper.table(t), c)
        for t, col in (("table1", "FedCAP"), ("table3", "SF"))
        for c in paper.table(t).select(["CIFAR-10"], [col])
        if "SF" in (c.row.split()[-1], c.column)
    ]
    plan = make_plan(paper, chosen, (0,), Data(), small=True)
    assert len(chosen) == 5
    assert [c.options["output"] for c in plan.runs if "output" in c.options] == ["customised"]
    assert len(plan.runs) == 2  # personal models, and for accuracy the customised ones too


def test_data_that_are_not_here_are_named(tmp_path: Path) -> None:
    paper, data = load_paper("fedcap"), Data(str(tmp_path))
    plan = make_plan(paper, everything(paper)[:1], (0,), data)
    assert plan.cells[0].why_not == "data not available: cifar10"
    assert plan.runs == []
    small = make_plan(paper, everything(paper)[:1], (0,), data, small=True)
    assert (small.runs[0].data, small.runs[0].rounds) == ("digits", 3)


def test_options_that_change_nothing_do_not_make_another_run() -> None:
    plain = Config(method="pfedcs")
    assert canonical(replace(plain, options={"selection": "adaptive", "beta": 100})) == plain
    assert canonical(replace(plain, malicious=0.4)) == plain
    assert canonical(replace(plain, malicious=0.4, attack="sf")) != replace(plain, attack="sf")


def test_calibration_knows_every_kind(mini: Paper) -> None:
    plan = plan_of(mini)
    estimate = calibrate(plan.runs, Data())
    assert not estimate.rough
    assert 0 < estimate.seconds(plan.runs) < 60
    rough = calibrate(plan.runs, Data(), limit=0.0)
    assert len(rough.rough) == 2  # of two methods; the attack makes no other kind
    assert rough.seconds(plan.runs) >= 0


def test_quick_is_smaller_in_every_way() -> None:
    before = cell_config("co-pfl", "table1", "CO-PFL", "CIFAR10C")
    after = quick(before, Data("/nonexistent"))
    assert (after.rounds, after.epochs, after.samples_per_client) == (3, 1, 60)
    assert (after.data, after.model, after.shift, after.augment) == ("digits", None, None, False)


# ------------------------------------------------------------ running


def go(paper: Paper, runs: Path, seeds: tuple[int, ...] = (0,), small: bool = False, **more: Any) -> Session:
    data = Data()
    plan = make_plan(paper, everything(paper), seeds, data, small=small, settings={"runs_dir": str(runs)})
    return reproduce(plan, Ledger(runs, data), data, **more)


def test_what_was_run_is_not_run_again(mini: Paper, tmp_path: Path) -> None:
    first = go(mini, tmp_path)
    assert (first.ran, first.skipped, first.left, first.failed) == (4, 0, 0, {})
    again = go(mini, tmp_path)
    assert (again.ran, again.skipped) == (0, 4)
    one, two = (table_records.records(s.plan, s.outcome)[0]["cells"] for s in (first, again))
    assert one == two
    more = go(mini, tmp_path, (0, 1))
    assert (more.ran, more.skipped) == (4, 4)
    cells = table_records.records(more.plan, more.outcome)[0]["cells"]
    for cell in cells:
        first_, second = cell["values"]
        assert (cell["seeds"], cell["ours"]) == ([0, 1], pytest.approx((first_ + second) / 2))
        assert cell["std"] == pytest.approx(abs(first_ - second) / math.sqrt(2))
    assert any(c["std"] > 0 for c in cells)
    assert go(mini, tmp_path, again=True).ran == 4


def lose_folders(runs: Path) -> None:
    """Runs would be found by their own folders too."""
    for path in runs.glob("*/run.json"):
        path.unlink()


def test_a_half_written_line_costs_one_run(mini: Paper, tmp_path: Path) -> None:
    go(mini, tmp_path)
    ledger = tmp_path / "reproduce.jsonl"
    text = ledger.read_text()
    ledger.write_text(text[:-200])
    lose_folders(tmp_path)
    after = go(mini, tmp_path)
    assert (after.ran, after.skipped, after.ledger.unreadable) == (1, 3, 1)
    lose_folders(tmp_path)
    assert go(mini, tmp_path).ran == 0


def test_a_run_is_found_by_its_folder_too(mini: Paper, tmp_path: Path) -> None:
    session = go(mini, tmp_path)
    told = {c.identity(): session.outcome(c) for c in session.plan.runs}
    (tmp_path / "reproduce.jsonl").unlink()
    again = go(mini, tmp_path)
    assert again.ran == 0
    for config in again.plan.runs:
        before, found = told[config.identity()], again.outcome(config)
        assert before is not None
        assert found is not None
        assert found.points == before.points
        assert found.facts == before.facts
        assert (found.split, found.precision, found.run) == (before.split, before.precision, before.run)


def test_what_was_run_elsewhere_counts_where_the_data_are_not(mini: Paper, tmp_path: Path) -> None:
    there = go(mini, tmp_path)
    lines = (tmp_path / "reproduce.jsonl").read_text().replace('"data": "digits"', '"data": "cifar10"').splitlines()
    elsewhere, data = tmp_path / "elsewhere", Data(str(tmp_path / "no data"))
    paper = parse(MINI.replace('data = "digits"', 'data = "cifar10"'), "mini.toml")
    plan = make_plan(paper, everything(paper), (0,), data)
    elsewhere.mkdir()
    known = {c.identity(): c for p in plan.cells for v in p.runs for c in v}
    raw = [json.loads(line) for line in lines]
    for record, key in zip(raw, known, strict=True):  # in the order in which they were run
        record["identity"] = key
    (elsewhere / "reproduce.jsonl").write_text("".join(json.dumps(r) + "\n" for r in raw))
    session = reproduce(plan, Ledger(elsewhere, data), data)
    assert (session.ran, plan.runs, plan.runnable) == (0, [], [])
    ours = [[c["ours"] for c in table_records.records(s.plan, s.outcome)[0]["cells"]] for s in (session, there)]
    assert ours[0] == ours[1]
    assert None not in ours[0]


def test_records_from_before_a_setting_was_added_still_count(mini: Paper, tmp_path: Path) -> None:
    go(mini, tmp_path)
    ledger = tmp_path / "reproduce.jsonl"
    raw = [json.loads(line) for line in ledger.read_text().splitlines()]
    for record in raw:
        record["config"].pop("on_failure")
        record["identity"] = "of an older version"
    ledger.write_text("".join(json.dumps(r) + "\n" for r in raw))
    lose_folders(tmp_path)
    assert go(mini, tmp_path).skipped == 4


def test_a_copy_that_is_no_checkout_is_told_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedkin.runs.facts.git_state", lambda folder: None)
    try:
        known = {"": "fedkin ", "0123456789abcdef01": "0123456789ab", "0123456789abcdef+": "0123456789ab+"}
        for told, said in known.items():
            commit.cache_clear()
            monkeypatch.setenv("FEDKIN_COMMIT", told)
            assert commit().startswith(said)
            assert commit().endswith("+") == told.endswith("+")
        commit.cache_clear()
        monkeypatch.setenv("FEDKIN_COMMIT", "main")
        with pytest.raises(UsageError, match="FEDKIN_COMMIT"):
            commit()
    finally:
        commit.cache_clear()


def test_ctrl_c_keeps_what_is_done(mini: Paper, tmp_path: Path) -> None:
    seen: list[Any] = []

    def stop(config: Config, found: Any) -> None:
        seen.append(found)
        if len(seen) == 2:
            raise KeyboardInterrupt

    session = go(mini, tmp_path, finished=stop)
    assert session.interrupted
    assert (session.ran, session.left) == (2, 2)
    assert go(mini, tmp_path).ran == 2


def test_a_budget_that_is_used_up_begins_nothing(mini: Paper, tmp_path: Path) -> None:
    session = go(mini, tmp_path, budget=0.0)
    assert (session.ran, session.left) == (0, 4)
    notes = {c["note"] for c in table_records.records(session.plan, session.outcome)[0]["cells"]}
    assert notes == {"not run yet"}


def test_a_run_that_fails_does_not_stop_the_rest(tmp_path: Path) -> None:
    text = MINI.replace('set = { method = "fedavg" }', 'set = { method = "fedavg", clients = 5000 }')
    paper = parse(text, "mini.toml")
    session = go(paper, tmp_path)
    assert (session.ran, len(session.failed)) == (2, 2)
    cells = table_records.records(session.plan, session.outcome, session.failed)[0]["cells"]
    assert [c["ours"] is None for c in cells] == [True, True, False, False]
    assert cells[0]["note"].startswith("failed: ")
    assert go(paper, tmp_path).skipped == 2  # a failure is tried again


TUNED = Config(method="c-pfl", clients=10, rounds=2, epochs=1, samples_per_client=60, lr=0.05, checkpoint_every=0)


def test_tuning_from_one_training_is_the_same_as_alone(tmp_path: Path) -> None:
    configs = [replace(TUNED, options={"finetune_epochs": f}, runs_dir=str(tmp_path)) for f in (0, 1, 3)]
    assert batches(configs) == [[[0, 1, 2]]]
    found = outcomes(configs)
    alone = [outcomes([c])[0] for c in configs]
    assert [[p.micro for p in o.points] for o in found] == [[p.micro for p in o.points] for o in alone]
    assert [len(o.points) for o in found] == [2, 3, 3]
    assert len({o.points[-1].micro for o in found}) > 1
    more = [*configs, replace(configs[0], seed=1), replace(configs[1], seed=1)]
    assert batches(more, 2) == [[[0, 1, 2], [3, 4]]]  # two trainings, as rows of one cohort
    both = outcomes(more, together=2)
    assert [[p.micro for p in o.points] for o in both[:3]] == [[p.micro for p in o.points] for o in alone]
    assert len(both) == 5
    assert both[3].points[-1].train_loss != both[0].points[-1].train_loss


def outcomes(configs: list[Config], together: int = 1) -> list[Measures]:
    sweep = run_sweep(configs, keep=measures_of, data=Data(), together=together, fresh=True)
    return [c.outcome or c.cause for c in sweep.cells]


def test_running_together_is_the_same_as_one_by_one(tmp_path: Path) -> None:
    base = Config(clients=5, rounds=2, epochs=1, samples_per_client=40, lr=0.05, runs_dir=str(tmp_path))
    configs = [
        replace(base, method=m, seed=s, attack=a)
        for m, s, a in (("fedavg", 0, "none"), ("ditto", 0, "sf"), ("fedavg", 1, "none"))
    ]
    assert batches(configs, 2) == [[[0], [1]], [[2]]]
    one, two = outcomes(configs), outcomes(configs, 3)
    assert [o.identity for o in one] == [o.identity for o in two]
    for a, b in zip(one, two, strict=True):
        assert [p.micro for p in a.points] == pytest.approx([p.micro for p in b.points])
        assert a.facts == b.facts


def test_a_failure_among_runs_together_stays_alone(tmp_path: Path) -> None:
    base = Config(clients=5, rounds=1, epochs=1, samples_per_client=40, runs_dir=str(tmp_path))
    good, bad = outcomes([base, replace(base, clients=5000)], together=2)
    assert isinstance(good, Measures)
    assert isinstance(bad, DataError)


def test_several_processes_give_what_one_gives(mini: Paper, tmp_path: Path) -> None:
    heard: list[int] = []
    one = go(mini, tmp_path / "one")
    two = go(mini, tmp_path / "two", jobs=2, hear=lambda config, event: heard.append(getattr(event, "round", 0)))
    assert (two.ran, two.left, two.failed) == (4, 0, {})
    assert set(heard) == {0, 1, 2}
    for config in one.plan.runs:
        mine, theirs = one.outcome(config), two.outcome(replace(config, runs_dir=str(tmp_path / "two")))
        assert mine is not None
        assert theirs is not None
        assert [p.micro for p in mine.points] == pytest.approx([p.micro for p in theirs.points])
        assert (mine.alone, theirs.alone) == (True, False)
    assert go(mini, tmp_path / "two", jobs=2).skipped == 4


def test_a_process_that_dies_takes_only_its_own_run_along(mini: Paper, tmp_path: Path) -> None:
    killed: list[Any] = []

    def hear(config: Config, event: Any) -> None:
        if not killed and (config.method, config.attack) == ("fedavg", "none"):
            killed.append(multiprocessing.active_children()[0])
            killed[0].kill()

    session = go(mini, tmp_path, jobs=2, hear=hear)
    assert session.ran >= 2
    assert session.ran + len(session.failed) == 4
    assert all("its process ended with status -9" in why for why in session.failed.values())
    again = go(mini, tmp_path)  # a run whose folder was complete when its process died is found, not run
    assert again.ran <= len(session.failed)
    assert (again.ran + again.skipped, again.failed) == (4, {})


def test_processes_begin_nothing_when_the_budget_is_used_up(mini: Paper, tmp_path: Path) -> None:
    session = go(mini, tmp_path, budget=0.0, jobs=3)
    assert (session.ran, session.left) == (0, 4)


def test_a_failure_in_a_process_is_told(mini: Paper, tmp_path: Path) -> None:
    text = MINI.replace('set = { method = "fedavg" }', 'set = { method = "fedavg", clients = 5000 }')
    session = go(parse(text, "mini.toml"), tmp_path, jobs=2)
    assert (session.ran, len(session.failed)) == (2, 2)
    assert all("5000" in why for why in session.failed.values())


def test_a_run_whose_time_counts_has_the_device_to_itself(tmp_path: Path) -> None:
    """Also if it was run before, beside others."""
    timed = MINI.replace('name = "storm"', 'name = "storm"\nmetric = "seconds"')
    other = go(parse(MINI, "mini.toml"), tmp_path, together=4)
    assert {o.alone for c in other.plan.runs if (o := other.outcome(c)) is not None} == {False}
    session = go(parse(timed, "mini.toml"), tmp_path, together=4, jobs=2)
    assert (session.ran, session.skipped) == (2, 2)
    for config in session.plan.runs:
        found = session.outcome(config)
        assert found is not None
        assert found.alone == (config.attack != "none")
        assert math.isnan(value_of(found, "seconds")) != found.alone
    assert go(parse(timed, "mini.toml"), tmp_path).skipped == 4


def test_only_the_tuning_makes_no_other_training() -> None:
    assert trained(TUNED) == trained(replace(TUNED, options={"finetune_epochs": 7}))
    assert trained(TUNED) != trained(replace(TUNED, options={"score": "balanced"}))
    assert trained(Config(method="fedavg")) != trained(Config(method="fedavg", seed=1))


def test_nor_does_how_models_are_judged() -> None:
    one = Config(method="fedcap", options={"lam": 1.0})
    for other in ({"eval_point": "after_local"}, {"options": {"lam": 1.0, "output": "customised"}}):
        assert trained(replace(one, **other)) == trained(one)
    assert trained(replace(one, options={"output": "customised"})) != trained(one)
    assert trained(TUNED) != trained(replace(TUNED, eval_point="after_local"))  # tuned from what it is judged by


JUDGED = """[[table.row]]
name = "FedCAP"
set = { method = "fedcap" }
best_of = [{ }, { options = { fedcap = { output = "customised" } } },
           { eval_point = "after_local", options = { fedcap = { output = "customised" } } }]
numbers = [90.0, "?"]
[[table.row]]
name = "either"
set = { method = "ditto" }
best_of = [{ eval_point = "last_round" }, { options = { ditto = { output = "shared" } } }]
numbers = [90.0, "?"]
"""


@pytest.mark.parametrize("together", [1, 8])
def test_a_training_that_is_judged_in_several_ways_is_done_once(
    tmp_path: Path, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And gives what each would give by itself."""
    paper = parse(MINI.replace("[[table.check]]", f"{JUDGED}[[table.check]]"), "mini.toml")
    advanced: list[str] = []
    real = rounds.Job.advance
    monkeypatch.setattr(rounds.Job, "advance", lambda job: advanced.append(trained(job.config)) or real(job))
    session = go(paper, tmp_path, together=together)
    assert not session.failed
    assert session.ran == len(session.plan.runs) == 2 * (1 + 3 + 3)
    assert len(advanced) == 2 * 2 * 3  # rounds, columns, trainings
    values = set()
    for config in session.plan.runs:
        alone, found = rounds.run_config(config), session.outcome(config)
        assert found is not None
        ours = [(p.round, p.micro, p.macro, p.train_loss, p.bytes_down) for p in found.points]
        assert ours == [
            (r.round, r.accuracy.micro, r.accuracy.macro, r.train_loss, r.bytes_down) for r in alone.history
        ]
        assert (found.eval_point, found.identity) == (alone.prepared.eval_point, config.identity())
        values.add((config.method, config.attack, found.points[-1].micro))
    assert len(values) > 2 * 3  # some ways of judging do give other numbers


# ------------------------------------------------------------ metrics


def outcome(*points: tuple[int, float, float], **facts_: float) -> Measures:
    made = tuple(Point(r, False, micro, micro - 1, 0.5, r * 2**20 * 3, s, micro - 20) for r, micro, s in points)
    return Measures("id", {"rounds": 10}, made, facts_, 1.0, "cpu", "fp32", "received", "x", "abc")


def test_metrics_read_what_they_say() -> None:
    run = outcome((5, 70.0, 10.0), (10, 82.0, 18.0), (15, 81.0, 26.0), dacc=90.0)
    values = {
        "micro": 81.0,
        "macro": 80.0,
        "worst_decile": 61.0,
        "best_micro": 82.0,
        "best_untuned": 82.0,
        "best_macro": 81.0,
        "rounds_to:80": 10.0,
        "seconds": 1.6,
        "down_mib": 3.0,
        "train_loss": 0.5,
        "dacc": 90.0,
    }
    assert {name: value_of(run, name) for name in values} == pytest.approx(values)
    assert math.isnan(value_of(run, "rounds_to:95"))
    tuned = replace(run, points=(*run.points, replace(run.points[-1], final=True, micro=90.0)))
    assert [value_of(tuned, name) for name in ("best_untuned", "best_micro", "micro")] == [82.0, 90.0, 90.0]
    assert math.isnan(value_of(run, "fpr"))
    assert {"%", "s", "rounds", "MiB", "loss", "times"} == {m.unit for m in METRICS.values()}


def test_an_outcome_survives_the_ledger() -> None:
    run = replace(outcome((1, 50.0, 1.0)), facts={"dacc": 1.0})
    assert Measures.from_dict(json.loads(json.dumps({**run.to_dict(), "wall": 2.0}))) == replace(run, wall=2.0)
    before = run.to_dict()
    del before["points"][0]["worst"]  # a line from before the worst-served tenth was kept
    assert math.isnan(Measures.from_dict(before).points[0].worst)
    for broken in ({}, [], {**run.to_dict(), "points": []}, {**run.to_dict(), "points": [{"round": 1}]}):
        with pytest.raises(DataError):
            Measures.from_dict(broken)


def test_collaborators_and_acceptance() -> None:
    blocks = [frozenset({0, 1}), frozenset({0, 1}), frozenset({2, 3}), frozenset({2, 3})]
    pure = [[0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0], [0, 0, 1.0, 0], [0, 0, 0.5, 0.5]]
    mixed = [[0.5, 0, 0.5, 0], *pure[1:]]
    notes = [
        (5, "participants", [0, 1, 2, 3]),
        (5, "collaborators", mixed),
        (20, "participants", [0, 1, 2, 3]),
        (20, "collaborators", pure),
        (21, "participants", [0, 1, 2, 3]),
        (21, "collaborators", mixed),
    ]
    found = facts(Traces(notes, None, classes=blocks))
    assert found == {"blocks_inside": 100 * 7 / 8, "blocks_whole": 100 * 5 / 8}  # the sixth round is too early
    votes = [(0, "accepted", [0, 1, 3]), (0, "rejected", [2]), (1, "accepted", [1]), (1, "rejected", [0, 2, 3])]
    found = facts(Traces(votes, None, hostile=lambda r: [r == 1, False, True, False]))
    assert found == {"accepted_honest": 80.0, "accepted_hostile": 0.0, "accepted_ratio": math.inf}


# ------------------------------------------------------------ comparing


def test_kendall_is_scipys() -> None:
    for a, b in (([1, 2, 3, 4], [1, 3, 2, 4]), ([1, 2, 2, 5], [3, 1, 2, 2]), ([5.0, 4.0], [1.0, 2.0])):
        assert compare.kendall(a, b) == pytest.approx(kendalltau(a, b).statistic)
    assert compare.kendall([1, 1], [1, 2]) is None


def filled(paper: Paper, numbers: dict[tuple[str, str], float], **more: Any) -> dict[str, Any]:
    table = paper.tables[0]
    origin = {"seeds": [0], "values": [0.0], "rounds": 2, "command": "x", "commit": "y", "device": "z", **more}
    cells = []
    for cell in table.cells:
        at = (cell.row, cell.column)
        cells.append({**table_records.empty(table, cell), **({"ours": numbers[at], **origin} if at in numbers else {})})
    return {**table_records.outline(paper, table), "cells": cells}


def test_rankings_and_claims(mini: Paper) -> None:
    good = filled(mini, {("FedAvg", "calm"): 51.0, ("Ditto", "calm"): 88.5, ("Ditto", "storm"): 77.0})
    assert compare.rankings(good) == [
        {
            "line": "calm",
            "methods": 2,
            "ours": "Ditto",
            "paper": "Ditto",
            "agrees": True,
            "level": False,
            "mixed": False,
            "tau": 1.0,
        }
    ]
    (verdict,) = compare.verdicts(good)
    assert (verdict["holds"], verdict["held"], verdict["of"], verdict["unknown"]) == (True, 1, 1, 1)
    assert [compare.close(c) for c in good["cells"]] == [True, None, True, False]
    bad = filled(mini, {("FedAvg", "calm"): 95.0, ("Ditto", "calm"): 88.5, ("FedAvg", "storm"): 1.0})
    assert not compare.rankings(bad)[0]["agrees"]
    assert compare.rankings(bad)[0]["tau"] == -1.0
    assert compare.verdicts(bad)[0]["broken"] == ["calm: FedAvg"]
    assert compare.summary(bad)["close"] == 1
    assert (compare.rankings(bad)[0]["level"], compare.verdicts(bad)[0]["level"]) == (False, 0)


def test_a_note_about_real_numbers_is_not_shown_beside_quick_ones(tmp_path: Path) -> None:
    text = MINI.replace('name = "calm"', 'name = "calm"\nnote = "one seed"')
    for small in (False, True):
        session = go(parse(text, "mini.toml"), tmp_path / str(small), small=small)
        (record,) = table_records.records(session.plan, session.outcome)
        assert ("one seed" in markdown.markdown(record)) != small


@pytest.mark.parametrize("name", NAMES)
def test_every_check_of_a_paper_compares_something(name: str) -> None:
    paper = load_paper(name)
    for table in paper.tables:
        record = {**table_records.outline(paper, table), "cells": [table_records.empty(table, c) for c in table.cells]}
        for check, verdict in zip(table.checks, compare.verdicts(record), strict=True):
            assert verdict["unknown"], f"{table.name}: {check.says!r} compares nothing: where = {check.where}"


def test_a_best_method_that_is_a_point_behind_is_level(mini: Paper) -> None:
    for ahead, level in ((0.04, 0), (0.9, 1), (1.0, 1), (1.1, 0)):
        record = filled(mini, {("FedAvg", "calm"): 88.5 + ahead, ("Ditto", "calm"): 88.5})
        (rank,), (verdict,), text = compare.rankings(record), compare.verdicts(record), markdown.markdown(record)
        assert (rank["agrees"], rank["level"]) == (ahead == 0.04, bool(level))
        assert compare.summary(record)["best_level"] == level
        assert verdict["holds"] is False
        assert ("in 0 of 1 lines, within a point of the best in 1 more" in text) == bool(level)
        assert ("**does not hold** in 1 of 1, each by a point or less (calm: FedAvg)" in text) == (ahead <= 1.0)


def test_the_page_sums_up_each_paper_and_counts_repeated_numbers_once(mini: Paper) -> None:
    one = filled(mini, {("FedAvg", "calm"): 51.5, ("Ditto", "calm"): 88.5, ("Ditto", "storm"): 77.0})
    for i, cell in enumerate(one["cells"]):
        cell["values"] = [float(i)] * 3
        cell["seeds"] = [0, 1, 2]
    gaps = [compare.difference(c) for c in compare.comparable(one)]
    assert sorted(round(abs(g), 2) for g in gaps if g is not None) == [1.5, 1.5, 3.0]
    assert "Where the papers hold" not in results_page.results_page([one])
    one["paper_found"] = "holds in part."
    page = results_page.results_page([one, {**one, "table": "again"}])
    assert page.count("- **mini** (nobody, 2025): holds in part.") == 1
    assert "**2 of 3** numbers that can be compared are close to the paper's (67 %)" in page
    assert "| mini | 2 of 3 | 2 | 0 | 0 | 0 | 0 | 1.5 points | 2 of 2 |" in page


def hand_made() -> dict[str, Any]:
    """Thirteen numbers of every kind: what is counted, and how, can be seen by looking at them."""
    base = {
        "metric": "micro",
        "unit": "%",
        "lower": False,
        "paper": 50.0,
        "ours": 51.0,
        "std": 1.0,
        "reading": "",
        "seeds": [0, 1, 2],
        "values": [50.0, 51.0, 52.0],
        "note": "",
        "judged": "as received",
        "row": "r",
    }
    kinds: list[dict[str, Any]] = [
        {"settings": "a"},  # strict
        {"settings": "a"},  # the same number, printed once more
        {"settings": "b"},  # another one that has the same value: strict
        {"settings": "a", "metric": "macro"},  # and another metric of the same runs: strict
        {"settings": "c", "reading": "it fits"},  # chosen
        {"settings": "d", "reading": "it fits", "seeds": [0], "values": [51.0], "std": None},  # chosen
        {"settings": "e", "std": 3.4},  # standard error 1.96: strict
        {"settings": "f", "std": 3.5},  # standard error 2.02: by chance
        {"settings": "g", "seeds": [0, 1], "values": [50.0, 52.0]},  # few seeds
        {"settings": "h", "lower": True, "paper": 1.5, "ours": 0.1},  # nothing is lost
        {"settings": "i", "lower": True, "paper": 2.5, "ours": 1.5},  # something is: strict
        {"settings": "l", "since": ["steps are longer"]},  # older
        {"settings": "j", "ours": 60.0},  # far
        {"settings": "k", "ours": 60.0, "reading": "it does not fit either"},  # far
    ]
    cells = [{**base, "column": str(i), **kind} for i, kind in enumerate(kinds)]
    return {"paper": "mini", "kind": "table", "cells": cells}


def test_numbers_are_counted_by_the_rule_that_the_page_states() -> None:
    record = hand_made()
    other = {**record, "paper": "another", "cells": record["cells"][:1]}
    assert [c["settings"] for c in compare.distinct([record])] == list("abacdefghiljk")
    assert len(compare.distinct([record, record])) == 13
    assert len(compare.distinct([record, other])) == 14  # another paper's number is another number
    found = compare.count(compare.distinct([record]))
    wanted = {"chosen": 2, "nothing": 1, "chance": 1, "few": 1, "older": 1, "strict": 5, "sound": 6}
    assert found == compare.Count(compared=13, close=11, **wanted)
    said = results_page.in_short([record])
    assert said.startswith("11 of the 13 numbers that can be compared are close to the paper's (within two points")
    assert "5 of these meet strict conditions" in said
    assert "2 depend on a reading that was chosen because it fits, 2 do not show anything, 1 have fewer" in said
    assert said.endswith("and 1 were measured before a later change in FedKin that can move them")


def test_a_loss_that_does_not_occur_is_told_from_a_small_one() -> None:
    loss = {"metric": "micro", "unit": "%", "lower": True}
    for paper, ours, nothing in ((1.5, 1.0, True), (1.5, 1.01, False), (1.0, 0.2, False), (1.5, -0.9, True)):
        assert compare.nothing_lost({**loss, "paper": paper, "ours": ours}) == nothing
    assert not compare.nothing_lost({**loss, "lower": False, "paper": 1.5, "ours": 0.1})
    assert not compare.nothing_lost({**loss, "metric": "fpr", "paper": 1.5, "ours": 0.1})  # a rate, not a loss


def test_of_a_number_that_is_repeated_the_one_with_most_seeds_counts() -> None:
    record = hand_made()
    once = {**record["cells"][0], "seeds": [0], "values": [99.0], "ours": 99.0, "note": "why"}
    (cell,) = compare.distinct([{**record, "cells": [once, record["cells"][0]]}])
    assert cell["seeds"] == [0, 1, 2]


def test_a_reading_chosen_after_measuring_is_marked_where_it_is_used(mini: Paper) -> None:
    text = MINI.replace('name = "calm"', 'name = "calm"\nreading = "the quiet one"')
    noted = text + '[[table.cell]]\nrow = "Ditto"\ncolumn = "storm"\nreading = "the loud one"\n'
    table = parse(noted, "mini.toml").tables[0]
    assert [c.reading for c in table.cells] == ["the quiet one", "", "the quiet one", "the loud one"]
    everywhere = parse(MINI.replace('metric = "micro"', 'metric = "micro"\nreading = "all"', 1), "mini.toml").tables[0]
    assert {c.reading for c in everywhere.cells} == {"all"}
    record = filled(
        parse(noted, "mini.toml"),
        {("FedAvg", "calm"): 51.0, ("FedAvg", "storm"): 9.0, ("Ditto", "calm"): 80.0, ("Ditto", "storm"): 80.0},
    )
    page = results_page.results_page([record])
    assert "Reading chosen after measuring (calm): the quiet one." in page
    assert "- mini: the quiet one (a table, calm: 1 of 2 close)" in page
    assert "2 under a reading chosen after measuring because it fits" in page.replace("\n", " ")


def test_chosen_readings_of_the_papers() -> None:
    """Those that replaced another one after a number had missed; what the words or the code decide is none."""
    chosen = {
        (paper, t.name, c.row, c.column)
        for paper in NAMES
        for t in load_paper(paper).tables
        for c in t.cells
        if c.reading
    }
    assert ("c-pfl", "table6", "CIFAR-10", "10 epochs") in chosen
    assert ("c-pfl", "table3", "C-PFL", "practical CIFAR10") not in chosen
    assert {c for p, t, r, c in chosen if (p, t, r) == ("fedcap", "table4", "1 customised")} == {
        "LIE",
        "Min-Max",
        "Min-Sum",
        "IPM",
    }
    assert {c for p, t, r, c in chosen if (p, t, r) == ("fedcap", "table4", "3 customised, calibrated")} == {
        "Min-Max",
        "Min-Sum",
        "IPM",
    }
    assert {r for p, t, r, _ in chosen if (p, t) == ("fedpkda", "table1")} == {"Ditto", "FedPKDA"}
    assert not [c for c in chosen if c[0] in ("pfedcs", "co-pfl") or c[:2] == ("fedcap", "table1")]
    for record in result_files.read_all(ROOT / "results"):
        for cell in record["cells"]:
            if "eval_point=after_local" in cell["note"] and record["table"] == "table4":
                assert cell["reading"], f"{cell['row']}, {cell['column']}: the second way of judging counts"


def test_numbers_in_words_come_from_the_tables() -> None:
    record = {**hand_made(), "table": "t"}
    assert results_page.filled("{close:t} and {close:t:3}: {ours:t:r:12}", [record]) == "12 of 14 and 1 of 1: 60.0"
    for wrong in ("{close:u}", "{close:t:nobody}", "{ours:t:r:99}"):
        with pytest.raises(DataError, match="no such cell"):
            results_page.filled(wrong, [record])
    record["cells"][12]["ours"] = None
    assert results_page.filled("{close:t:12}, {ours:t:r:12}", [record]) == "0 of 0, –"
    assert not results_page.NUMBER.search(results_page.results_page(result_files.read_all(ROOT / "results")))


def test_the_readme_says_what_the_results_are() -> None:
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert results_page.in_short(result_files.read_all(ROOT / "results")) in readme


# ------------------------------------------------------------ when models are judged


@pytest.mark.parametrize(
    ("paper", "table", "row", "column", "point"),
    [
        ("fedpkda", "table1", "FedPKDA", "Cifar100 beta=0.3 P=0.2", "as received"),
        ("fedpkda", "table1", "FedAvg-P", "Cifar100 beta=0.3 P=0.2", "as the last round left them"),
        ("fedpkda", "table1", "Ditto", "Cifar100 beta=0.3 P=0.2", "as received, by the shared model"),
        ("fedpkda", "table1", "FedBABU", "Cifar100 beta=0.3 P=0.2", "tuned at the end for 10 epochs"),
        ("fedpkda", "table1", "FedAS", "Cifar100 beta=0.3 P=0.2", ""),  # not there yet
        ("fedcap", "table1", "CIFAR-10 SF", "Median", "after local training"),
        (
            "fedcap",
            "table1",
            "CIFAR-10 SF",
            "FedCAP",
            "as received, by the better of personalised and customised model",
        ),
        ("fedcap", "table3", "CIFAR-10 DAcc", "SF", ""),  # not of models
        ("fedcap", "table4", "1 customised", "LIE", "the better of as received and after local training"),
        ("c-pfl", "table6", "CIFAR-10", "0 epochs", "as received"),
        ("claims", "c-pfl-figure4-flips", "shared C-PFL", "0 %", "before the tuning at the end"),
        ("claims", "co-pfl-baselines", "FedPer", "CIFAR10", "as received"),
    ],
)
def test_every_cell_knows_when_its_models_are_judged(paper: str, table: str, row: str, column: str, point: str) -> None:
    cell = load_paper(paper).table(table).cell(row, column)
    assert cell is not None
    assert table_records.judged(cell) == point


def test_a_table_says_when_its_models_are_judged_and_rows_that_differ_say_so() -> None:
    alike = filled(parse(MINI, "mini.toml"), {("FedAvg", "calm"): 51.0, ("Ditto", "calm"): 88.0})
    assert "Evaluation point: as received." in markdown.markdown(alike)
    assert "| FedAvg |" in markdown.markdown(alike)
    assert compare.verdicts(alike)[0]["mixed"] == 0
    text = MINI.replace('set = { method = "fedavg" }', 'set = { method = "fedavg", eval_point = "after_local" }')
    apart = filled(parse(text, "mini.toml"), {("FedAvg", "calm"): 51.0, ("Ditto", "calm"): 88.0})
    said = "Evaluation points differ: after local training (FedAvg); as received (Ditto)."
    written = markdown.markdown(apart)
    assert said in written.replace("\n", " ")
    assert "| FedAvg *(after local training)* | " in written
    assert "1 of 1 comparisons, 1 at one seed, 1 between different evaluation points, 1 not measured" in " ".join(
        written.split()
    )
    page = html_page.html_page([apart])
    assert said in page
    assert "<th>FedAvg<small>after local training</small></th>" in page
    assert [v["mixed"] for v in compare.verdicts(apart)] == [1]
    assert [r["mixed"] for r in compare.rankings(apart)] == [True]
    assert "methods are evaluated at different points in 1 of them" in " ".join(written.split())


def test_every_measured_accuracy_has_its_point() -> None:
    for record in result_files.read_all(ROOT / "results"):
        for cell in compare.measured(record):
            assert bool(cell["judged"]) == METRICS[cell["metric"].partition(":")[0]].judged
        if any(c["judged"] for c in compare.measured(record)):
            assert "Evaluation point" in markdown.evaluation(record)


def test_a_tree_that_was_changed_is_said_at_its_numbers(mini: Paper) -> None:
    for made_by, said in (("03f45132f0b5+", True), ("03f45132f0b5", False), ("aaaaaaa, bbbbbbb+", True)):
        record = filled(mini, {("FedAvg", "calm"): 51.0}, commit=made_by)
        assert ("changes that are in no commit" in markdown.markdown(record)) == said


def test_a_claim_tests_what_its_words_say() -> None:
    """Within so much of a number: on both sides; the paper's own score and FedKin's are two claims."""
    text = MINI.replace('right = ["*"]', 'target = 90.0\nwithin = 2.0\nwhere = ["calm"]')
    for ours, holds in ((88.0, True), (92.0, True), (87.9, False), (92.1, False)):
        record = filled(parse(text, "mini.toml"), {("Ditto", "calm"): ours})
        assert compare.verdicts(record)[0]["holds"] is holds
    for name in NAMES:
        for table in load_paper(name).tables:
            for check in table.checks:
                if "within two points of" in check.says and not check.right:
                    assert check.target is not None
                    assert f"{check.target:.2f}" in check.says
                if check.left == "C-PFL balanced":
                    assert "balanced score" in check.says
    flips = result_files.read(ROOT / "results" / "claims" / "c-pfl-flips.json")
    found = {v["says"]: v["holds"] for v in compare.verdicts(flips)}
    assert [holds for says, holds in found.items() if says.startswith("with the paper's score")] == [False, False]
    assert [holds for says, holds in found.items() if says.startswith("with FedKin's balanced")] == [True, True]


def test_a_claim_says_that_its_numbers_are_older_than_a_change(mini: Paper) -> None:
    record = filled(mini, {("FedAvg", "calm"): 51.0, ("Ditto", "calm"): 60.0})
    told = "of numbers made before a change that can move them"
    assert compare.verdicts(record)[0]["older"] == 0
    assert told not in markdown.markdown(record)
    for row in ("FedAvg", "Ditto"):  # either side of the comparison
        cells = [{**c, "since": ["steps are longer"]} if c["row"] == row else c for c in record["cells"]]
        changed = {**record, "cells": cells}
        assert compare.verdicts(changed)[0]["older"] == 1
        assert f"1 {told} (†)" in " ".join(markdown.markdown(changed).split())


def test_a_claim_that_is_known_not_to_hold_says_what_came_out(tmp_path: Path) -> None:
    text = MINI.replace('says = "Ditto is above FedAvg"', 'says = "so"\nfound = "level"').replace(
        'left = "Ditto"\nright = ["*"]', 'left = "Ditto"\nright = ["*"]\nby = 1000.0'
    )
    session = go(parse(text, "mini.toml"), tmp_path)
    (record,) = table_records.records(session.plan, session.outcome)
    (verdict,) = compare.verdicts(record)
    assert (verdict["holds"], verdict["found"]) == (False, "level")
    assert "**does not hold** in 2 of 2 (calm: FedAvg; storm: FedAvg). level." in markdown.markdown(record)


def varied() -> Paper:
    """With cells that are a drop, a ratio or the best of two."""
    text = MINI.replace('name = "storm"', 'name = "storm"\ndrop_from = "calm"')
    ditto = 'set = { method = "ditto" }'
    text = text.replace(ditto, f"{ditto}\nbest_of = [{{ lr = 0.05 }}, {{ lr = 1e-9 }}]")
    text += '[[table]]\nname = "r"\ntitle = "r"\nmetric = "down_mib"\nratio_to = "FedAvg"\nmethods = "rows"\n' + (
        '[[table.column]]\nname = "c"\n[[table.row]]\nname = "FedAvg"\nset = { method = "fedavg" }\nnumbers = [4.0]\n'
        '[[table.row]]\nname = "FedPer"\nset = { method = "fedper" }\nnumbers = [3.0]\n'
    )
    return parse(text, "mini.toml")


def test_ratios_drops_and_the_best_of_several(tmp_path: Path) -> None:
    session = go(varied(), tmp_path)
    first, second = table_records.records(session.plan, session.outcome)
    at = {(c["row"], c["column"]): c for c in first["cells"]}
    runs = {(c.method, c.attack, c.lr): session.outcome(c) for c in session.plan.runs}
    micro = {k: o.points[-1].micro for k, o in runs.items() if o is not None}
    assert at["FedAvg", "storm"]["ours"] == pytest.approx(micro["fedavg", "none", 0.05] - micro["fedavg", "sf", 0.05])
    assert at["Ditto", "calm"]["ours"] == max(micro["ditto", "none", 0.05], micro["ditto", "none", 1e-9])
    assert at["Ditto", "calm"]["note"] == "best of 2: lr=0.05"
    assert at["FedAvg", "storm"]["lower"]
    assert [c["paper"] for c in second["cells"]] == [1.0, 0.75]
    assert second["cells"][1]["ours"] < 1
    assert len(compare.comparable(second)) == 1
    part, _ = table_records.records(session.plan, lambda c: None if c.lr == 1e-9 else session.outcome(c))
    notes = {(c["row"], c["column"]): c["note"] for c in part["cells"]}
    assert notes["Ditto", "calm"] == "best of 2: lr=0.05 (1 of 2 measured)"


def test_what_sets_variants_apart_is_said_in_full(tmp_path: Path) -> None:
    """Also an option and a point of evaluation that are the method's usual ones."""
    ditto = 'set = { method = "ditto" }'
    some = "[{ }, { eval_point = 'after_local', options = { ditto = { lam = 0.5 } } }]"
    session = go(parse(MINI.replace(ditto, f"{ditto}\nbest_of = {some}"), "mini.toml"), tmp_path)
    (record,) = table_records.records(session.plan, session.outcome)
    usual = METHODS["ditto"].Options().lam
    assert {c["note"] for c in record["cells"] if c["row"] == "Ditto"} <= {
        f"best of 2: eval_point=received, lam={usual}",
        "best of 2: eval_point=after_local, lam=0.5",
    }


def test_a_cell_of_its_own_brings_the_one_it_refers_to(tmp_path: Path) -> None:
    paper = parse(MINI.replace('name = "storm"', 'name = "storm"\ndrop_from = "calm"'), "mini.toml")
    table = paper.tables[0]
    plan = make_plan(paper, [(table, c) for c in table.select(["Ditto"], ["storm"])], (0,), Data())
    assert [(c.method, c.attack) for c in plan.runs] == [("ditto", "sf"), ("ditto", "none")]


# ------------------------------------------------------------ writing down


def test_results_page_is_made_from_the_files() -> None:
    assert (ROOT / "RESULTS.md").read_text() == results_page.results_page(result_files.read_all(ROOT / "results"))


def test_every_result_has_its_provenance_and_the_papers_number() -> None:
    for name in NAMES:
        for table in load_paper(name).tables:
            record = result_files.read(ROOT / "results" / name / f"{table.name}.json")  # refuses what lacks something
            assert [(c["row"], c["column"]) for c in record["cells"]] == [(c.row, c.column) for c in table.cells]
            for cell, known in zip(record["cells"], table.cells, strict=True):
                published = table_records.published(table, known)
                assert cell["paper"] == (None if published is None else pytest.approx(published, abs=1e-4))
                if cell["ours"] is not None:
                    assert cell["seeds"]
                    assert len(cell["values"]) == len(cell["seeds"])
                    assert cell["ours"] == pytest.approx(sum(cell["values"]) / len(cell["values"]), abs=1e-3)
                    assert re.fullmatch(r"[0-9a-f]{7,40}\+?(, [0-9a-f]{7,40}\+?)*|fedkin .+", cell["commit"])


def test_every_number_that_is_not_close_has_a_note() -> None:
    for path in sorted((ROOT / "results").glob("*/*.json")):
        for cell in result_files.read(path)["cells"]:
            if cell["ours"] is not None and compare.close(cell) is False:
                assert cell["note"], f"{path.parent.name} {path.stem}: {cell['row']}, {cell['column']} differs: why?"


@pytest.mark.parametrize("key", ["seeds", "command", "commit", "device"])
def test_a_number_without_provenance_is_refused(mini: Paper, tmp_path: Path, key: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps(filled(mini, {("FedAvg", "calm"): 51.0})))
    result_files.read(path)
    path.write_text(json.dumps(filled(mini, {("FedAvg", "calm"): 51.0}, **{key: ""})))
    with pytest.raises(DataError, match=key):
        result_files.read(path)


def test_saving_keeps_what_was_measured_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paper = load_paper("claims")
    table = paper.table("pfedcs-fedper")
    new = {"seeds": [0], "values": [90.0], "rounds": 200, "command": "x", "commit": "abcdef0", "device": "z"}
    new["note"] = ""

    def save(row: str, ours: float) -> dict[str, Any]:
        cells = [
            {**table_records.empty(table, c), **({**new, "ours": ours} if c.row == row else {})} for c in table.cells
        ]
        (path,) = result_files.save([{**table_records.outline(paper, table), "cells": cells}], tmp_path)
        return result_files.read(path)

    save("PFedCS", 90.0)
    both = save("FedPer", 89.0)
    assert [c["ours"] for c in both["cells"]] == [90.0, 89.0]
    assert "**yes** (1 of 1, 1 at one seed)" in results_page.results_page(result_files.read_all(tmp_path))
    assert [c["ours"] for c in save("PFedCS", 88.0)["cells"]] == [88.0, 89.0]
    monkeypatch.setattr(result_files, "load_paper", lambda name: explained if name == "claims" else load_paper(name))
    text = (files("fedkin.papers") / "claims.toml").read_text()
    row = 'set = { method = "fedper" }\nnumbers = [90.06]'
    assert text.count(row) == 1
    explained = parse(text.replace(row, f'note = "and here is why"\n{row}'), "claims.toml")
    for _ in range(2):
        result_files.refresh(tmp_path)
    found = result_files.read(tmp_path / "claims" / "pfedcs-fedper.json")["cells"]
    assert [c["note"] for c in found] == ["", "and here is why"]
    assert [c["ours"] for c in result_files.read(tmp_path / "claims" / "pfedcs-fedper.json")["cells"]] == [88.0, 89.0]
    assert result_files.read(tmp_path / "fedpkda" / "table2.json")["cells"][0]["note"].startswith("how well images")
    with pytest.raises(UsageError, match="--quick"):
        result_files.save([{**table_records.outline(paper, table), "quick": True, "cells": []}], tmp_path)


def test_seeds_saved_one_after_another_are_those_saved_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paper = varied()
    monkeypatch.setattr(result_files, "load_paper", lambda name: paper)
    for folder, seeds in (("once", (0, 1, 2)), ("parts", (0, 2)), ("parts", (1,))):
        session = go(paper, tmp_path / "runs", seeds)
        result_files.save(table_records.records(session.plan, session.outcome), tmp_path / folder)
    for name in ("t", "r"):
        once, parts = (result_files.read(tmp_path / f / "mini" / f"{name}.json")["cells"] for f in ("once", "parts"))
        for a, b in zip(once, parts, strict=True):
            assert b == {**a, **{k: pytest.approx(a[k], abs=2e-4) for k in ("ours", "std")}}
            assert b["seeds"] == [0, 1, 2]
            assert b["command"].endswith("--seeds 3")


def measured_twice(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """What a cell is after it was saved with one set of values and then with another."""
    paper = parse(MINI, "mini.toml")
    first, second = (filled(paper, {("Ditto", "calm"): 71.0}, **{"note": "", **more}) for more in (old, new))
    (cell,) = compare.measured(result_files.merged(paper, paper.tables[0], first, second["cells"]))
    return cell


def test_seeds_of_two_machines_add_up() -> None:
    there = {
        "seeds": [4, 0],
        "values": [80.0, 90.0],
        "commit": "aaaaaaa, bbbbbbb",
        "note": "best of 2: lr=0.1",
        "device": "cpu, fp32, NVIDIA H200, tf32",
    }
    here = {
        "seeds": [2],
        "values": [85.0],
        "commit": "bbbbbbb",
        "note": "best of 2: lr=0.1; failed: another",
        "device": "NVIDIA H200, fp32",
    }
    cell = measured_twice(there, here)
    assert (cell["seeds"], cell["values"]) == ([0, 2, 4], [90.0, 85.0, 80.0])
    assert (cell["ours"], cell["std"]) == (85.0, 5.0)
    assert cell["command"] == "fedkin reproduce mini t --rows Ditto --cols calm --seeds 0,2,4"
    assert cell["commit"] == "aaaaaaa, bbbbbbb"
    assert cell["device"] == "cpu, fp32, NVIDIA H200, tf32, NVIDIA H200, fp32"
    assert cell["note"] == here["note"]
    again = measured_twice(there, {**here, "device": "NVIDIA H200, tf32"})
    assert again["device"] == there["device"]


def test_of_a_seed_measured_twice_the_new_value_counts() -> None:
    cell = measured_twice({"seeds": [0, 1], "values": [90.0, 80.0]}, {"seeds": [1, 2], "values": [70.0, 80.0]})
    assert (cell["seeds"], cell["values"]) == ([0, 1, 2], [90.0, 70.0, 80.0])
    assert (cell["ours"], cell["std"]) == (80.0, 10.0)
    assert cell["command"].endswith("--seeds 3")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rounds": 2}, {"rounds": 3}),
        ({"metric": "macro"}, {}),
        ({"unit": "times"}, {}),
        ({"note": "best of 2: lr=0.1"}, {"note": "best of 2: lr=0.2"}),
        ({"note": "best of 2: lr=0.1"}, {}),
        ({"settings": "other"}, {}),
        ({"values": [90.0]}, {}),
        ({"values": None}, {}),
        ({"seeds": [2, 1]}, {}),  # all of them measured again
    ],
)
def test_what_does_not_fit_together_is_replaced(old: dict[str, Any], new: dict[str, Any]) -> None:
    before = {"seeds": [0, 1], "values": [90.0, 80.0], "commit": "aaaaaaa", **old}
    now = {"seeds": [1, 2], "values": [70.0, 72.0], "commit": "bbbbbbb", **new}
    cell = measured_twice(before, now)
    assert {k: cell[k] for k in now} == now
    assert (cell["ours"], cell["std"], cell["command"]) == (71.0, None, "x")


def test_a_number_goes_when_its_cell_is_defined_otherwise() -> None:
    paper, other = (parse(text, "mini.toml") for text in (MINI, MINI.replace("lr = 0.05", "lr = 0.06")))
    assert paper != other
    record = filled(paper, {("Ditto", "calm"): 71.0})
    kept, gone = (result_files.merged(p, p.tables[0], record) for p in (paper, other))
    assert [c["ours"] for c in compare.measured(kept)] == [71.0]
    assert compare.measured(gone) == []
    assert {c["note"] for c in gone["cells"]} == {table_records.NOT_RUN}


BEFORE = '[[changed]]\nwhat = "steps are longer"\nwhere = { method = "ditto" }\n'
BY_REVISION, BY_DEFINITION = BEFORE + 'made_by = ["aaaaaaa", "ccccccc"]\n', BEFORE + "was = { lr = 0.05 }\n"


@pytest.mark.parametrize(("commit", "old"), [("aaaaaaa", True), ("ccccccc+, bbbbbbb", True), ("bbbbbbb", False)])
def test_a_number_made_before_a_change_says_so_until_it_is_measured_again(commit: str, old: bool) -> None:
    paper = parse(MINI.replace("[named.hostile]", f"{BY_REVISION}[named.hostile]"), "mini.toml")
    table = paper.tables[0]
    record = filled(paper, {("FedAvg", "calm"): 51.0, ("Ditto", "calm"): 71.0}, commit=commit, note="")
    kept = result_files.merged(paper, table, record)
    fedavg, ditto = compare.measured(kept)
    assert "since" not in fedavg
    assert ditto.get("since") == (["steps are longer"] if old else None)
    text = markdown.markdown(kept)
    assert ("✗ 71.00† · 90.00" in text) == old
    assert ("- †: made before this changed, and not measured again yet: steps are longer (1 cell)." in text) == old
    assert ("† marks a number that was made before a change" in results_page.results_page([kept])) == old
    assert ditto["note"] == ""  # it explains no difference
    assert result_files.merged(paper, table, kept) == kept
    again = filled(paper, {("Ditto", "calm"): 88.0}, commit="ddddddd", note="")["cells"]
    assert [c.get("since") for c in compare.measured(result_files.merged(paper, table, kept, again))] == [None, None]


def test_a_number_of_a_former_definition_stays_marked_until_there_is_one_of_todays() -> None:
    then = parse(MINI, "mini.toml")
    text = MINI.replace("lr = 0.05", "lr = 0.06").replace("[named.hostile]", f"{BY_DEFINITION}[named.hostile]")
    paper = parse(text, "mini.toml")
    old = filled(then, {("FedAvg", "calm"): 51.0, ("Ditto", "calm"): 71.0}, seeds=[0, 1], values=[70.0, 72.0])
    kept = result_files.merged(paper, paper.tables[0], old)
    (cell,) = compare.measured(kept)  # FedAvg's is defined otherwise, and nobody says that it may stay
    assert (cell["row"], cell["ours"], cell["since"]) == ("Ditto", 71.0, ["steps are longer"])
    assert result_files.merged(paper, paper.tables[0], kept) == kept
    new = filled(paper, {("Ditto", "calm"): 88.0}, seeds=[2], values=[88.0])["cells"]
    (now,) = compare.measured(result_files.merged(paper, paper.tables[0], kept, new))
    assert (now["ours"], now["seeds"], now.get("since")) == (88.0, [2], None)  # seeds of the two do not mix


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        ('[[changed]]\nwhat = "x"\nwhere = { method = "ditto" }\n', "either made_by or was"),
        ('[[changed]]\nwhat = "x"\nmade_by = ["aaaaaaa"]\n', "in which cells"),
        ('[[changed]]\nwhere = { method = "ditto" }\nmade_by = ["aaaaaaa"]\n', "'what' is missing"),
        ('[[changed]]\nwhat = "x"\nwhere = { methd = "ditto" }\nmade_by = ["aaaaaaa"]\n', "did you mean 'method'"),
        ('[[changed]]\nwhat = "x"\nwhen = "then"\n', "when"),
    ],
)
def test_a_change_says_what_and_where(entry: str, error: str) -> None:
    with pytest.raises(DataError, match=error):
        parse(MINI.replace("[named.hostile]", f"{entry}[named.hostile]"), "mini.toml")


def test_the_command_of_a_cell_names_its_seeds(mini: Paper) -> None:
    for seeds, text in (([0], "1"), ([0, 1, 2], "3"), ([100], "100,"), ([0, 2], "0,2"), ([1, 2], "1,2")):
        assert table_records.seeds_text(seeds) == text
        assert seeds_of(text, 0) == seeds
    cell = mini.tables[0].cells[0]
    assert table_records.command(mini.tables[0], cell, [100]).endswith("--seeds 100,")
    some = {("FedAvg", "calm"): 51.0, ("Ditto", "calm"): 51.0}
    record = filled(mini, some, seeds=[100])
    for i, measured in enumerate(compare.measured(record)):
        measured["command"] = str(i)
    assert "To run it again: `fedkin reproduce mini t --seeds 100,`" in markdown.markdown(record)


def test_a_note_is_the_tables_own_and_what_the_runs_said() -> None:
    noted = MINI + '[[table.cell]]\nrow = "Ditto"\ncolumn = "calm"\nnote = "the reason; found"\n'
    paper = parse(noted, "mini.toml")
    record = filled(paper, {("Ditto", "calm"): 71.0}, note="not explained yet; best of 2: lr=0.1; failed: one; and why")
    (cell,) = compare.measured(result_files.merged(paper, paper.tables[0], record))
    assert cell["note"] == "the reason; found; best of 2: lr=0.1; failed: one; and why"


def test_markdown_and_html(mini: Paper) -> None:
    record = filled(mini, {("FedAvg", "calm"): 51.0, ("Ditto", "storm"): 70.0}, note="<b>odd</b> | strange")
    text = markdown.markdown(record)
    assert "| FedAvg | ✓ 51.00 · 50.00 · +1.00 | – |" in text
    assert "✗ 70.00 · 80.00 · −10.00" in text
    assert "not run yet (2)" in text
    page = html_page.html_page([record])
    assert "<b>odd" not in page
    assert "&lt;b&gt;odd" in page
    for foreign in ("http", "<script", "src=", "@import", "url("):
        assert foreign not in page
    quickly = {**record, "quick": True, "cells": [{**c, "quick": True} for c in record["cells"]]}
    assert "51.00*" in markdown.markdown(quickly)
    assert "51.00*" in html_page.html_page([quickly])
    assert "✓" not in markdown.markdown(quickly)


# ------------------------------------------------------------ the command


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("FEDKIN_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("FEDKIN_DATA", str(tmp_path / "no data"))
    monkeypatch.setenv("COLUMNS", "160")
    runner = CliRunner()
    return lambda *words: runner.invoke(app, ["reproduce", *map(str, words)])


def test_quick_runs_mark_every_number(shell: Any, tmp_path: Path) -> None:
    words = ("fedcap", "table3", "--rows", "CIFAR-10", "--cols", "Benign,LIE", "--quick", "--html", tmp_path / "x.html")
    done = shell(*words, "--json", "--markdown", tmp_path / "x.md")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert (found["ran"], found["plan"]["runs"]) == (4, 4)  # two scenarios, two kinds of models
    cells = found["tables"][0]["cells"]
    assert all(c["quick"] and c["ours"] is not None and "--quick" in c["command"] for c in cells)
    assert len(cells) == 5
    assert "means anything" in (tmp_path / "x.md").read_text()
    assert "means anything" in (tmp_path / "x.html").read_text()
    again = shell(*words)
    assert again.exit_code == 0
    assert "4 runs, all done before" in again.stderr
    assert "mean nothing" in again.stdout
    assert "85.60" in again.stdout
    assert "Evaluation point: as received, by the better of personalised and customised model." in again.stdout


def test_the_plan_says_what_cannot_be_run_and_runs_nothing(shell: Any, tmp_path: Path) -> None:
    done = shell("c-pfl", "table6", "--plan", "--json")
    plan = json.loads(done.stdout)["plan"]
    lacking = set(plan["tables"][0]["not_runnable"])
    assert {f"data not available: {name}" for name in ("mnist", "cifar10", "cifar100")} <= lacking
    three = ("--rows", "MNIST,CIFAR-10,CIFAR-100")  # Debian has a package of the fourth
    quickly = json.loads(shell("c-pfl", "table6", *three, "--plan", "--json", "--quick").stdout)["plan"]
    assert (quickly["runs"], quickly["trainings"]) == (5, 1)  # the same digits stand in for all three
    assert quickly["seconds"] > 0
    assert not (tmp_path / "runs").exists()


def test_several_tables_are_named_with_commas(shell: Any) -> None:
    plan = json.loads(shell("fedpkda", "table2,figure4", "--plan", "--json").stdout)["plan"]
    assert [t["table"] for t in plan["tables"]] == ["table2", "figure4"]
    wrong = shell("fedpkda", "table2,figure5", "--plan")
    assert wrong.exit_code == 2
    assert "unknown table of fedpkda" in wrong.stderr


def test_wrong_words_are_answered(shell: Any) -> None:
    for words, code, said in (
        (("fedcab",), 2, "did you mean 'fedcap'"),
        (("fedcap", "table9"), 2, "unknown table of fedcap"),
        (("fedcap", "table1", "--rows", "CIFAR"), 2, "unknown row"),
        (("fedcap", "--seeds", "x"), 2, "seeds='x'"),
        (("fedcap", "--quick", "--save", "r"), 2, "not saved"),
        (("fedcap", "--device", "tpu"), 2, "tpu"),
        (("/nowhere.toml",), 2, "no such file"),
        (("--render", "--save", "/nowhere"), 2, "no such folder"),
        (("fedpkda", "table2"), 1, "none of these cells can be run"),
    ):
        done = shell(*words)
        assert done.exit_code == code, (words, done.output)
        assert said in done.stderr, (words, done.stderr)


def test_papers_are_listed(shell: Any) -> None:
    found = json.loads(shell("--json").stdout)["papers"]
    assert [p["name"] for p in found] == list(NAMES)
    assert "Table III" in shell().stdout


def test_a_paper_of_ones_own_and_its_results(shell: Any, tmp_path: Path) -> None:
    path = tmp_path / "mini.toml"
    path.write_text(MINI)
    assert load_file(path).name == "mini"
    done = shell(path, "--seeds", "2", "--rows", "Ditto")
    assert done.exit_code == 0, done.output
    assert "±" in done.stdout
    assert "2 cells: 2 rounds, 2 seeds" in done.stdout
    assert "Evaluation point: as received." in done.stdout


def test_the_page_is_made_by_one_command(tmp_path: Path) -> None:
    target = tmp_path / "RESULTS.md"
    shutil.copytree(ROOT / "results", tmp_path / "results")
    words = [sys.executable, "-m", "fedkin", "reproduce", "--render", "--save", str(tmp_path / "results")]
    subprocess.run(words, check=True, timeout=120)
    assert target.read_text() == (ROOT / "RESULTS.md").read_text()
    results_page.write_results_page(tmp_path / "nothing", target)
    assert "0 of 0" in target.read_text()


def test_pages_are_made_where_little_or_nothing_is_measured(shell: Any, tmp_path: Path) -> None:
    (tmp_path / "results" / "fedpkda").mkdir(parents=True)
    name = Path("fedpkda") / "table3.json"
    (tmp_path / "results" / name).write_text((ROOT / "results" / name).read_text())
    done = shell("--render", "--save", tmp_path / "results")
    assert done.exit_code == 0, done.output
    page = (tmp_path / "RESULTS.md").read_text()
    assert "- **fedpkda** (Zeng et al., AAAI 2026): 0 of 0 numbers of Table 1" in page
    assert "**c-pfl**" not in page
    assert "not measured yet" in (tmp_path / "natural.md").read_text()


def test_a_folder_without_rounds_is_no_outcome(mini: Paper, tmp_path: Path) -> None:
    session = go(mini, tmp_path)
    run = session.outcome(session.plan.runs[0])
    assert run is not None
    assert run.run is not None
    folder = RunFolder.open(tmp_path / run.run)
    assert from_folder(folder, session.plan.runs[0], Data()).points == run.points
