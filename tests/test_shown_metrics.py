"""What the numbers of a run are, wherever they are shown: of a task where less is better the least is the best, no
percent sign stands behind it, and it keeps its digits. Settings that tell runs apart are named."""

from __future__ import annotations

import csv
import io
import math
from dataclasses import replace
from typing import Any

import pytest

from fedkin.config import Config
from fedkin.report.tables import comma_separated, latex, markdown, paired_sheet, sheet
from fedkin.rounds import Accuracy, ClientRecord
from fedkin.runs.metric import ShownMetric
from fedkin.sweep.selection import selected
from fedkin.sweep.statistics import Outcome, groups_of

MSE = ShownMetric("mse", "", higher=False)


def outcome(method: str, each: list[float], seed: int = 0, metric: ShownMetric = MSE, **settings: Any) -> Outcome:
    clients = [ClientRecord(i, f"c{i}", a, 0.5, 10, 10, 0) for i, a in enumerate(each)]
    worst = max if not metric.higher else min
    accuracy = Accuracy(each[0], sum(each) / len(each), worst(each), 0.001, metric.name, metric.unit, metric.higher)
    where: Any = None
    config = Config(method=method, seed=seed, **settings)
    return Outcome(config, {}, accuracy, accuracy, 3, clients, (), 10, 1.0, f"s{seed}", "received", where)


def table(*outcomes: Outcome) -> Any:
    return groups_of((o.config, o) for o in outcomes)


BAD, GOOD = [0.0248, 0.0236, 0.0221, 0.0249], [0.0151, 0.0162, 0.0173, 0.0154]


# ---------------------------------------------------------------- tables


def test_of_errors_the_least_stands_out_and_keeps_its_digits() -> None:
    made = sheet(table(outcome("fedavg", BAD), outcome("ditto", GOOD)))
    columns = [made.head.index(name) for name in ("macro", "micro", "worst decile")]
    assert [[row[c].best for c in columns] for row in made.rows] == [[False] * 3, [True] * 3]
    assert [row[columns[0]].text for row in made.rows] == ["0.02385", "0.016"]
    assert made.title.startswith("Scores of the personal models (mse, less is better), evaluated")
    words = " ".join([made.title, *made.head, *made.notes])
    assert "ccuracy" not in words
    assert "percent" not in words
    assert "by micro mse" in words
    assert "**0.016**" in markdown(made)
    assert r"\textbf{0.016}" in latex(made)
    wide = sheet(table(outcome("fedavg", BAD), outcome("ditto", GOOD)), "worst-decile")
    assert [row[1].best for row in wide.rows] == [False, True]
    micro = sheet(table(outcome("fedavg", BAD)), "micro")
    assert "in the cells the mean over test samples (micro)" in micro.notes[0]


def test_a_difference_of_errors_says_what_its_sign_means() -> None:
    groups = table(outcome("fedavg", BAD), outcome("ditto", GOOD))
    made = paired_sheet(groups, "fedavg")
    assert "differences in macro mse per pair (below zero is better)" in made.title
    assert made.rows[0][made.head.index("median difference")].text == "-0.00845"
    assert "each client's mse averaged over the seeds" in " ".join(made.notes)
    share = ShownMetric("auc", "", higher=True)
    other = table(outcome("fedavg", [0.71, 0.73], metric=share), outcome("ditto", [0.82, 0.86], metric=share))
    assert "(above zero is better)" in paired_sheet(other, "fedavg").title
    assert paired_sheet(other, "fedavg").rows[0][1].text == "+0.12"


def test_numbers_for_programs_say_of_which_metric_they_are() -> None:
    lines = list(csv.DictReader(io.StringIO(comma_separated(table(outcome("fedavg", BAD))))))
    assert [lines[0][k] for k in ("metric", "unit", "higher")] == ["mse", "", "False"]
    accuracy = ShownMetric()
    found = table(outcome("fedavg", [50.0, 60.0], metric=accuracy))
    assert found[0].to_dict()["score"] == {"metric": "accuracy", "unit": "%", "higher": True}
    assert sheet(found).title.startswith("Accuracy of the personal models, evaluated")


def test_metrics_that_differ_are_told_apart_and_never_held_against_each_other() -> None:
    accuracy = ShownMetric()
    made = sheet(table(outcome("fedavg", [50.0, 60.0], metric=accuracy), outcome("ditto", GOOD, task="regression")))
    assert "(accuracy in percent; mse, less is better)" in made.title
    assert [row[1].best for row in made.rows] == [True, True]
    assert [row[1].plain() for row in made.rows] == ["55.00 accuracy", "0.016 mse"]


def test_of_errors_the_least_is_picked_and_told_with_its_digits() -> None:
    (group,) = selected(
        table(outcome("fedavg", BAD, lr=0.1), outcome("fedavg", GOOD, lr=0.2), outcome("fedavg", BAD, lr=0.3)), "test"
    )
    assert group.config.lr == 0.2
    assert "chosen on test data (macro 0.016)" in " ".join(sheet([group]).notes)
    nothing = replace(group, members=[])
    assert sheet([nothing]).rows[0][1].plain().startswith("failed")


@pytest.mark.parametrize(
    ("metric", "value", "said"),
    [(ShownMetric(), 71.234, "71.23"), (MSE, 0.0123456, "0.01235"), (MSE, 1.86e20, "1.86e+20"), (MSE, math.nan, "-")],
)
def test_values_as_people_read_them(metric: ShownMetric, value: float, said: str) -> None:
    assert metric.said(value) == said


def test_words_about_accuracy_are_said_about_the_metric() -> None:
    assert MSE.put("Accuracy per round") == "mse per round"
    assert ShownMetric().put("Accuracy per round") == "Accuracy per round"
    assert MSE.best([3.0, math.nan, 2.0]) == 2.0
    assert math.isnan(MSE.best([]))
