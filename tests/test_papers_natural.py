"""Natural federations: the comparison as data, what it says to somebody who has to choose, and its page."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from fedkin.methods import METHODS
from fedkin.papers import natural, result_files, results_page, table_records
from fedkin.papers import verdicts as compare
from fedkin.papers.plan import make_plan
from fedkin.papers.published import NATURAL, load_paper, parse
from fedkin.papers.runner import Ledger, reproduce
from fedkin.sweep.loaded import Data
from fedkin.sweep.trainings import by_training

ROOT = Path(__file__).parent.parent


def record(**rows: list[float] | tuple[list[float], list[float]]) -> dict[str, Any]:
    """A comparison: by method its values over seeds, or those as received and after local training."""
    cells = []
    for name, found in rows.items():
        both = found if isinstance(found, tuple) else (found,)
        for values, point in zip(both, ("as received", "after local training"), strict=False):
            cells.append(
                {
                    "row": name.replace("_", "-"),
                    "column": point,
                    "metric": "macro",
                    "judged": point,
                    "ours": sum(values) / len(values),
                    "values": values,
                    "seeds": list(range(len(values))),
                }
            )
    return {"kind": "comparison", "title": "t", "cells": cells}


def test_a_clear_lead_is_more_than_its_spread_over_the_same_seeds() -> None:
    one, other = natural.entries(record(A=[90.0, 80.0, 70.0], B=[88.0, 79.0, 67.0]))
    found = natural.lead(one, other)
    assert (found.by, found.spread, found.seeds) == (2.0, 1.0, 3)  # though each swings by ten points over seeds
    assert found.clear
    assert found.text == "+2.0 ± 1.0"
    assert not natural.lead(other, one).clear
    one, other = natural.entries(record(A=[90.0, 80.0, 70.0], B=[88.0, 82.0, 66.0]))
    assert natural.lead(one, other).by == pytest.approx(4 / 3)
    assert not natural.lead(one, other).clear
    assert natural.lead(*natural.entries(record(A=[90.0], B=[10.0]))).clear is False  # one seed tells nothing
    assert natural.lead(natural.Entry("A", "", {0: 1.0}), natural.Entry("B", "", {1: 2.0})).seeds == 0


def test_a_method_counts_by_its_better_point() -> None:
    (entry,) = natural.entries(record(FedPer=([50.0, 52.0], [60.0, 62.0])))
    assert (entry.mean, entry.judged, entry.text) == (61.0, "after local training", "61.0 ± 1.4")


def test_of_methods_that_are_level_the_simplest_is_taken_first() -> None:
    level = record(Local=[50.0, 50.0], FedAvg_FT=[90.0, 91.0], FedPer=[91.0, 90.5], PFedCS=[80.0, 80.5])
    found = natural.advice(level)
    assert found is not None
    assert (found.best.name, found.first.name) == ("FedPer", "FedAvg-FT")
    text = natural.said(level)
    assert text.startswith("Try FedAvg-FT first (90.5 ± 0.7, as received). FedPer has the highest mean (90.8 ± 0.4")
    assert "None of the five papers' methods is ahead of FedAvg-FT" in text
    assert "PFedCS 80.2 ± 0.4, as received: −10.2 ± 0.4 points against FedAvg-FT's 90.5 ± 0.7" in text
    clear = record(Local=[50.0, 50.0], FedAvg_FT=[90.0, 91.0], PFedCS=[92.0, 93.1])
    assert natural.said(clear) == (
        "Try PFedCS first (92.5 ± 0.8, as received): it is ahead of the next, FedAvg-FT, by +2.0 ± 0.1 points at the "
        "same seeds. Of the five papers' methods PFedCS is ahead of FedAvg-FT (PFedCS 92.5 ± 0.8, as received: "
        "+2.0 ± 0.1 points against FedAvg-FT's 90.5 ± 0.7)."
    )
    first = record(Local=[90.0, 90.0], FedAvg_FT=[89.0, 91.0])
    assert natural.said(first).startswith("Try Local first (90.0 ± 0.0, as received): it has the highest mean and is")
    assert "one seed tells nothing" in natural.said(record(Local=[90.0], FedAvg_FT=[99.0]))
    assert natural.said(record()) == "Nothing measured yet."
    lines = natural.overview([level, record()])
    assert lines[2] == "| t | FedAvg-FT, 90.5 ± 0.7 | 90.5 ± 0.7 | 50.0 ± 0.0 | PFedCS, 80.2 ± 0.4 | −10.2 ± 0.4 |"
    assert "not measured yet" in lines[3]
    assert natural.plainly([level, clear, record()]).startswith("In 1 of 2 federations none of the five papers'")
    assert natural.plainly([record()]) == ""


def test_where_the_advice_rests_on_a_rate_of_its_own_it_says_so() -> None:
    ahead = record(FedAvg_FT=[90.0, 91.0], CO_PFL=[95.0, 96.1])
    behind = record(FedAvg_FT=[90.0, 91.0], PFedCS=[95.0, 96.1], CO_PFL=[70.0, 71.0])
    second = record(FedAvg_FT=[90.0, 91.0], PFedCS=[95.0, 96.1], CO_PFL=[92.0, 93.0])
    assert [natural.RATES in natural.said(r) for r in (ahead, behind, second)] == [True, False, True]
    assert natural.RATES in natural.plainly([behind])  # the overview names the best of all
    assert natural.RATES not in natural.plainly([record(FedAvg_FT=[90.0, 91.0], PFedCS=[95.0, 96.1])])
    tables = load_paper(NATURAL).tables[:3]
    own = {cell.row for t in tables for cell in t.cells for c in cell.variants if "lr" in c.options}
    assert own == {natural.OWN_RATE}


def test_all_methods_are_compared_under_the_same_conditions() -> None:
    paper = load_paper(NATURAL)
    assert [t.name for t in paper.tables if t.kind == "comparison"] == ["ucihar", "wisdm51", "mnist"]
    for table in paper.tables[:3]:
        runs = {c.identity(): c for cell in table.cells for c in cell.variants}.values()
        assert {c.method for c in runs} == {n for n, m in METHODS.items() if m.__module__.startswith("fedkin.methods")}
        assert not [cell for cell in table.cells if cell.missing]
        for key in table_records.COMMON:
            assert len({getattr(c, key) for c in runs}) == 1, key
        assert {c.partition for c in runs} == {"natural"}
        assert len(by_training(list(runs))) == 14  # both points of evaluation, and every tuning, share a training
        for row in (line.title for line in table.rows):
            assert (
                any(c.row == row and table_records.judged(c) != "as received" for c in table.cells) or row == "FedAvg"
            )
        said = table_records.common(table)
        assert "partition=natural" in said
        assert "CO-PFL lr=" in said  # it trains with Adam, which takes another rate
        assert "FedBABU" not in said  # tuned or not is the column's business
    assert set(natural.FIVE) < {line.title for line in paper.tables[0].rows}
    assert natural.BASELINE in {line.title for line in paper.tables[0].rows}


def rates(record: Any) -> dict[tuple[str, str], str]:
    """By federation and method, the rate with the highest accuracy, of a table whose rows are METHOD RATE."""
    found: dict[tuple[str, str], Any] = {}
    for cell in compare.measured(record):
        at = (cell["column"], cell["row"].rpartition(" ")[0])
        if at not in found or cell["ours"] > found[at]["ours"]:
            found[at] = cell
    return {at: cell["row"].rpartition(" ")[2] for at, cell in found.items()}


def test_the_rates_are_those_that_the_page_says_were_best() -> None:
    paper = load_paper(NATURAL)
    grid = {(c.row, c.column): c.variants[0] for c in paper.table("rates").cells}
    for (row, column), config in grid.items():
        method, _, rate = row.partition(" ")
        assert float(rate) == (config.options["lr"] if method == "CO-PFL" else config.lr)
        assert config.data == column
    best = rates(result_files.read(ROOT / "results" / NATURAL / "rates.json"))
    for table in paper.tables[:3]:
        runs = {c.method: c for cell in table.cells for c in cell.variants}
        for method, taken in (("FedAvg", runs["fedavg"].lr), ("CO-PFL", runs["co-pfl"].options["lr"])):
            assert float(best.get((table.name, method), taken)) == taken, f"{table.name}: another rate is best"
            assert any(float(row.partition(" ")[2]) == taken for row, _ in grid if row.startswith(method))


def test_the_best_rate_is_found() -> None:
    cells = [
        {"row": f"{m} {rate}", "column": "har", "ours": ours}
        for m, rate, ours in (("FedAvg", "0.01", 50.0), ("FedAvg", "0.1", 60.0), ("CO-PFL", "0.1", 3.0))
    ]
    assert rates({"cells": cells}) == {("har", "FedAvg"): "0.1", ("har", "CO-PFL"): "0.1"}


def test_the_page_is_made_from_the_files() -> None:
    page = (ROOT / "docs" / "natural.md").read_text(encoding="utf-8")
    assert page == results_page.natural_page(result_files.read_all(ROOT / "results"))
    results = (ROOT / "RESULTS.md").read_text(encoding="utf-8")
    assert "(docs/natural.md)" in results
    for line in natural.overview([r for r in result_files.read_all(ROOT / "results") if r["kind"] == "comparison"]):
        assert line in results
        assert line in page


def test_from_runs_to_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One small table of it, with digits in the place of people."""
    text = (files("fedkin.papers") / "natural.toml").read_text(encoding="utf-8")
    text = text[: text.index('name = "wisdm51"')].rpartition("[[table]]")[0]
    real = text[text.index("[named.ucihar]") : text.index("[named.wisdm51]")]
    small = """[named.ucihar]
data = "digits"
model = "mlp"
clients = 4
partition = "pathological:5"
samples_per_client = 30
rounds = 1
epochs = 1
lr = 0.05

"""
    paper = parse(text.replace(real, small), "natural.toml")
    monkeypatch.setattr(result_files, "load_paper", lambda name: paper if name == NATURAL else load_paper(name))
    table, data = paper.tables[0], Data()
    wanted = ("Local", "FedAvg-FT", "FedBABU", "PFedCS")
    cells = [(table, c) for c in table.select(wanted, [])]
    plan = make_plan(paper, cells, (0, 1), data, settings={"runs_dir": str(tmp_path / "runs")})
    session = reproduce(plan, Ledger(tmp_path / "runs", data), data)
    assert not session.failed
    (path,) = result_files.save(table_records.records(plan, session.outcome), tmp_path / "results")
    found = result_files.read(path)
    assert len(compare.measured(found)) == 2 * 2 + 2 * 4
    entries = {e.name: e for e in natural.entries(found)}
    assert set(entries) == set(wanted)
    at = {(c["row"], c["column"]): c for c in compare.measured(found)}
    for name, entry in entries.items():
        means = [at[name, c]["ours"] for c in table_columns("mean") if (name, c) in at]
        assert entry.mean == pytest.approx(max(means), abs=1e-3)
        for point in ("as received", "after local training"):
            if (name, f"mean {point}") in at:
                assert at[name, f"worst tenth {point}"]["ours"] <= at[name, f"mean {point}"]["ours"]
    page = results_page.natural_page([found])
    for said in (
        "Settings: data=digits",
        "Try ",
        "of the five papers' methods",
        "fedkin reproduce natural ucihar",
        "Evaluation points differ",
        "tuned at the end for 10 epochs",
    ):
        assert said in page
    assert f"| {entries['Local'].text} |" in page


def table_columns(word: str) -> list[str]:
    return [f"{word} {point}" for point in ("as received", "after local training")]
