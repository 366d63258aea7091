"""What the numbers of a run are, wherever they are shown: of a task where less is better the least is the best, no
percent sign stands behind it, and it keeps its digits. Settings that tell runs apart are named."""

from __future__ import annotations

import csv
import io
import math
import re
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn
from typer.testing import CliRunner

import fedkin as fk
from fedkin.cli.application import app
from fedkin.config import Config
from fedkin.report import several_runs, svg
from fedkin.report.figures import Figure, LeftOut, said
from fedkin.report.gather import RunData
from fedkin.report.one_run import figure
from fedkin.report.page import write_report
from fedkin.report.tables import paired_sheet, sheet
from fedkin.report.written import comma_separated, latex, markdown
from fedkin.rounds import Accuracy, ClientRecord
from fedkin.runs.catalogue import Catalogue
from fedkin.runs.folder import RunFolder
from fedkin.runs.found_out import found_out
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


# ---------------------------------------------------------------- runs: figures, report, page


def site(i: int, n: int = 24) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(i)
    x = draw.standard_normal((n, 4)).astype(np.float32)
    return x, (0.2 * x[:, :1] + 0.05 * i * draw.standard_normal((n, 1))).astype(np.float32)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two regressions, two runs by accuracy that differ in a schedule alone, and one under attack."""
    where = tmp_path_factory.mktemp("runs")
    small: dict[str, Any] = {"rounds": 2, "epochs": 1, "device": "cpu", "way": "each", "runs_dir": str(where)}
    for method in ("fedavg", "local"):
        net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        fk.run(method, clients=[site(i) for i in range(12)], task="regression", model=net, lr=0.1, **small)
    digits = {**small, "clients": 6, "partition": "iid", "samples_per_client": 40, "model": "mlp"}
    fk.run("fedprox", **digits)
    fk.run("fedprox", lr_schedule="step:every=1", **digits)
    fk.run("fedcap", attack="ipm:epsilon=1000", malicious=0.4, **digits)
    return where


def run_of(home: Path, method: str, place: int = 0) -> RunFolder:
    found = [r for r in Catalogue(home).runs() if r.method == method]
    return RunFolder(sorted(found, key=lambda r: str(r.config["lr_schedule"]))[place])


def drawn(found: Any) -> Figure:
    assert isinstance(found, Figure), found
    svg.draw(found)
    return found


def test_figures_of_errors_have_their_own_axis_and_the_worst_have_the_largest(home: Path) -> None:
    data = RunData(run_of(home, "fedavg"))
    curves = drawn(figure("accuracy-per-round", data))
    assert curves.title == "mse per round"
    assert (curves.panels[0].y, curves.panels[0].unit, curves.panels[0].high) == ("test mse", "", None)  # type: ignore[union-attr]
    low = curves.panels[0].series[0].low  # type: ignore[union-attr]
    assert (low > 0).all()
    spread = drawn(figure("spread-over-clients", data)).panels[0]
    assert list(spread.values) == sorted(spread.values, reverse=True)  # type: ignore[union-attr]
    assert spread.high is None  # type: ignore[union-attr]
    mean, worst = (line.value for line in spread.lines)  # type: ignore[union-attr]
    assert worst == pytest.approx(data.last["worst_decile"])
    assert worst > mean == pytest.approx(data.last["macro"])
    both = several_runs.grouped([data, RunData(run_of(home, "local"))])
    made = {part.title: part for part in several_runs.compared(both)}
    assert "Who has which classes" not in made
    ranks = drawn(made["Spread over clients"]).panels[0].series[0].y  # type: ignore[union-attr]
    assert (np.diff(ranks) <= 0).all()
    (gain,) = drawn(made["Gain over training alone"]).panels[0].rows.values()  # type: ignore[union-attr]
    alone = RunData(run_of(home, "local")).clients["accuracy"]
    assert gain == pytest.approx(alone - data.clients["accuracy"])
    mixed = several_runs.grouped([data, RunData(run_of(home, "fedprox"))])
    (left,) = [p for p in several_runs.compared(mixed) if p.title == "Accuracy per round"]
    assert isinstance(left, LeftOut)
    assert "measured by mse and accuracy" in left.why


def test_a_report_of_errors_speaks_of_no_percentages(home: Path, tmp_path: Path) -> None:
    write_report([run_of(home, "fedavg")], tmp_path)
    html = (tmp_path / "report.html").read_text()
    words = re.sub(r"<style.*?</style>|<svg.*?</svg>|<script.*?</script>|<[^>]*>", " ", html, flags=re.DOTALL)
    told = words[: words.index("settings")].replace("test samples", "")
    assert "mse, less is better, of the clients' personal models" in told
    assert "ccuracy" not in told
    assert " %" not in told
    macro = RunData(run_of(home, "fedavg")).last["macro"]
    assert f">{macro:.4g}<" in html


def test_a_report_names_every_setting_in_which_runs_differ(home: Path, tmp_path: Path) -> None:
    write_report([run_of(home, "fedprox"), run_of(home, "fedprox", 1)], tmp_path)
    html = (tmp_path / "report.html").read_text()
    assert "lr schedule step:every=1" in html
    values = (r"constant \| step:every=1", r"step:every=1 \| constant")  # in the order of the runs
    assert any(re.search(f"<code>{both}</code>", html) for both in values)


def test_the_page_says_the_metric_and_what_tells_runs_apart(home: Path) -> None:
    testclient = pytest.importorskip("starlette.testclient")
    from fedkin.web.routes import create_app

    web = testclient.TestClient(create_app(home), base_url="http://127.0.0.1")
    listed = {run["id"]: run for run in web.get("/api/runs").json()["runs"]}
    regression, other = run_of(home, "fedavg").info, run_of(home, "fedprox", 1).info
    assert [listed[regression.id][k] for k in ("metric", "unit", "higher")] == ["mse", "", False]
    assert listed[other.id]["metric"] == "accuracy"
    assert listed[other.id]["differs"] == "lr_schedule=step:every=1"
    assert web.get(f"/api/runs?text={other.id[:7]} step:every").json()["total"] == 1
    page = web.get(f"/run/{regression.id}").text
    assert "mse per round" in page
    assert "Accuracy per round" not in page
    assert web.get(f"/api/runs/{regression.id}/figures/accuracy-per-round").json()["title"] == "mse per round"
    client = web.get(f"/run/{regression.id}/client/0").text
    assert "mse by round" in client
    assert "percent" not in client
    assert "Samples by class" not in client
    compared = web.get(f"/api/compare?run={regression.id}&run={run_of(home, 'local').info.id}").json()
    assert compared["measures"]["macro"] == "mse, macro"
    two = web.get(f"/api/compare?run={other.id}&run={run_of(home, 'fedprox').info.id}").json()
    assert {row["key"]: row["values"] for row in two["diff"]}["lr_schedule"] == ["step:every=1", "constant"]
    attacked = run_of(home, "fedcap").info
    bad = len(attacked.malicious)
    found = web.get(f"/api/runs/{attacked.id}").json()["found"]
    assert re.fullmatch(rf"found \d of {bad} attackers, \d of {6 - bad} benign wrongly", found)


@pytest.mark.parametrize(
    ("rates", "malicious", "told"),
    [
        ({"false_negative": 1.0, "false_positive": 0.0}, 6, "found 0 of 6 attackers, 0 of 14 benign wrongly"),
        ({"false_negative": 1 / 3, "false_positive": 0.5}, 6, "found 4 of 6 attackers, 7 of 14 benign wrongly"),
        ({"false_negative": 0.5, "false_positive": None}, 6, "found 3 of 6 attackers"),
        ({"false_negative": math.nan, "false_positive": 0.5}, 0, "took 50.00 % of the benign for attackers"),
        (
            {"false_negative": 0.25, "false_positive": 0.1},
            0,
            "found 75.00 % of the attackers, 10.00 % of the benign wrongly",
        ),
        ({"false_negative": "x", "false_positive": -1}, 6, ""),
    ],
)
def test_who_was_found_is_counted(rates: dict[str, Any], malicious: int, told: str) -> None:
    assert found_out(rates, malicious, 14) == told


def test_losses_out_of_hand_are_short_and_on_a_logarithmic_scale(home: Path, tmp_path: Path) -> None:
    assert said(186_848_103_313_556_100_000.0, "") == "1.868e+20"
    made = drawn(figure("loss-per-round", RunData(run_of(home, "fedprox"))))
    assert not made.panels[0].same_scale  # type: ignore[union-attr]
    assert made.panels[0].far == 50  # type: ignore[union-attr]
    with sqlite3.connect(run_of(home, "local").path / "metrics.sqlite") as base:
        base.execute("UPDATE rounds SET test_loss = 1.868e20 WHERE round = 2")
    base.close()
    canvas = svg.draw(drawn(figure("loss-per-round", RunData(run_of(home, "local")))))
    assert canvas.axes[0].get_yscale() == "log"


# ---------------------------------------------------------------- the list and the difference, on the command line


def call(home: Path, width: int, *words: str) -> str:
    found = CliRunner().invoke(app, [*words, "--runs-dir", str(home)], env={"COLUMNS": str(width)})
    assert found.exit_code == 0, found.output
    return found.stdout


def test_the_list_says_in_what_runs_differ(home: Path) -> None:
    for width in (160, 90):
        shown = call(home, width, "runs", "--method", "fedprox")
        assert "lr_schedule=step" in "".join(shown.split())
        assert ("differs in" in shown) == (width == 160)
    assert "differs" not in call(home, 160, "runs", "--method", "fedcap")


def test_a_difference_is_readable(home: Path) -> None:
    one, two = run_of(home, "fedprox").info, run_of(home, "fedcap").info
    shown = call(home, 160, "diff", one.id, two.id)
    rows = {line.split("  ")[1].strip(): line for line in shown.splitlines() if line.startswith("  ")}
    assert "None" not in shown
    assert "{" not in shown
    assert "–" in rows["options.mu"]
    removed = two.result["removed"]  # type: ignore[index]
    rounds = {round + 1 for round in removed.values()}
    assert removed
    assert all(f"round {round}: client-" in rows["removed"] for round in rounds)
    assert "nobody" in rows["removed"]
    assert "attackers" in rows["detection"]
    assert rows["macro"].count("%") == 2
    assert "kB" in rows["sent down"] or "MB" in rows["sent down"]
    plain = call(home, 160, "diff", one.id, run_of(home, "fedavg").info.id)
    assert re.search(r"macro +\S+ % +\S+ mse", plain)
