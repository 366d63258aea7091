"""From Python: how results show themselves, tables of comparisons, progress, callbacks, and what can be imported."""

from __future__ import annotations

import ast
import csv
import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import fedkin as fk
from fedkin.cli.flags import grid_configs
from fedkin.report.comparison import Table
from fedkin.report.figures import Figure, LeftOut
from fedkin.report.gather import RunData
from fedkin.report.of_result import ResultData
from fedkin.report.one_run import FIGURES, figure
from fedkin.sweep.statistics import Outcome, groups_of

ROOT = Path(__file__).parent.parent
SMALL: dict[str, Any] = {"data": "digits", "clients": 5, "epochs": 1, "lr": 0.05, "device": "cpu", "way": "each"}
OWN = {"method": "fedcap", "attack": "sf", "malicious": 0.4, "metrics": "macro-f1"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, fk.Result]:
    """One with an attack, notes and further metrics, one with the committee, each with its folder."""
    home = str(tmp_path_factory.mktemp("runs"))
    settings = {**SMALL, "rounds": 3, "runs_dir": home}
    return {
        "fedcap": fk.run(**OWN, **settings),
        "c-pfl": fk.run("c-pfl", validation_share=0.2, drop=0.3, **settings),
    }


@pytest.fixture(scope="module")
def compared() -> Any:
    settings = {**SMALL, "rounds": 2}
    settings.pop("lr")
    return fk.compare(["fedavg", "local"], seeds=2, grid={"lr": [0.01, 0.1]}, baseline="fedavg", **settings)


# ---------------------------------------------------------------- a result


def test_a_result_is_printed_in_a_few_lines(runs: dict[str, fk.Result]) -> None:
    result = runs["fedcap"]
    many = replace(result, per_client=result.per_client * 2000, failures=[*result.failures] * 1000, malicious=[1, 3])
    for text in (repr(result), repr(many), str(many)):
        assert len(text.splitlines()) <= 6
        assert len(text) < 1000
    assert f"{result.accuracy.macro:.2f} % macro" in repr(result)
    assert "sf: 2 of 5 clients malicious" in repr(result)
    assert str(result.run) in repr(result)
    assert "10000 clients" in repr(many)
    broken = replace(result, diverged="its loss is infinite")
    assert repr(broken).endswith("diverged: its loss is infinite")


def test_a_notebook_shows_scores_and_curves(runs: dict[str, fk.Result]) -> None:
    result = runs["c-pfl"]
    page = replace(result, remarks=["<script>alert(1)</script>"])._repr_html_()
    assert page is not None
    assert page.count("<svg ") == 2
    assert "Accuracy per round" in page
    assert "Loss per round" in page
    for value in (result.accuracy.macro, result.accuracy.worst_decile, result.best.accuracy.micro):
        assert f">{value:.2f}<" in page
    assert "&lt;script&gt;" in page
    assert "<script" not in page
    named = re.findall(r'id="([^"]+)"', page) + re.findall(r'id="([^"]+)"', result._repr_html_() or "")
    assert len(set(named)) == len(named)  # many outputs stand in one page
    assert ":root" not in page  # nothing of it reaches the page around


@pytest.mark.parametrize("name", FIGURES)
def test_a_result_has_the_figures_of_its_folder(runs: dict[str, fk.Result], name: str) -> None:
    for result in runs.values():
        mine, theirs = figure(name, ResultData(result)), figure(name, RunData(fk.RunFolder.open(str(result.run))))
        assert type(mine) is type(theirs), mine
        if isinstance(mine, LeftOut) or isinstance(theirs, LeftOut):
            with pytest.raises(fk.UsageError, match="there is no figure"):
                result.plot(name)
            continue
        assert (mine.title, mine.caption, mine.alt) == (theirs.title, theirs.caption, theirs.alt)
        assert numbers_of(mine) == numbers_of(theirs)
        assert result.plot(name).axes


def numbers_of(made: Figure) -> str:
    """All that is drawn, as text; seconds are measured by two clocks."""
    with np.printoptions(threshold=sys.maxsize, precision=6):
        return "\n".join(repr(panel) for panel in made.panels if getattr(panel, "unit", "") != "s")


def test_drawings_are_of_matplotlib_and_show_themselves(runs: dict[str, fk.Result], tmp_path: Path) -> None:
    import matplotlib.pyplot as plt

    before = plt.get_fignums()  # of examples that other tests ran
    drawing = runs["fedcap"].plot()
    drawing.savefig(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").stat().st_size > 5000
    assert drawing.axes[0].get_ylabel() == ""  # the words stand at the side of all charts
    assert drawing.get_supylabel() == "test accuracy, %"
    data, how = drawing._repr_png_()
    assert data.startswith(b"\x89PNG")
    assert how["width"] > 400
    assert plt.get_fignums() == before  # nothing is left open
    with pytest.raises(fk.UsageError, match="did you mean 'accuracy-per-round'"):
        runs["fedcap"].plot("accuracy-per-rounds")


@pytest.mark.parametrize("table", ["rounds", "clients", "exchanges", "events", "notes"])
def test_frames_are_the_tables_of_the_folder(runs: dict[str, fk.Result], table: str) -> None:
    for result in runs.values():
        made, kept = result.frame(table), fk.RunFolder.open(str(result.run)).table(table)
        if table == "clients":  # the folder has those of all rounds
            last = [i for i, r in enumerate(kept["round"]) if (r, kept["final"][i]) == (3, result.kept.final)]
            kept = {name: [column[i] for i in last] for name, column in kept.items()}
        for name in set(kept) - {"metrics", "validation_metrics", "seconds", "writing", "wall", "evaluating"}:
            mine = [None if v != v else v for v in made[name].tolist()]
            assert mine == kept[name], (table, name)
        assert len(made) == len(kept[next(iter(kept))])
    if table in ("rounds", "clients"):
        found = runs["fedcap"].frame(table)["macro-f1"]
        source = runs["fedcap"].history if table == "rounds" else runs["fedcap"].per_client
        assert found.tolist() == pytest.approx([x.metrics["macro-f1"] for x in source])


def test_without_pandas_there_is_a_sentence(runs: dict[str, fk.Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(fk.UsageError, match=r"pip install 'fedkin\[pandas\]'"):
        runs["c-pfl"].frame()
    with pytest.raises(fk.UsageError, match="unknown table 'round': did you mean 'rounds'"):
        runs["c-pfl"].frame("round")


def test_classes_and_split(runs: dict[str, fk.Result]) -> None:
    result, kept = runs["fedcap"], fk.RunFolder.open(str(runs["fedcap"].run)).split()
    assert result.class_names == tuple(map(str, range(10)))
    assert result.split is not None
    assert result.split.hash == result.prepared.split_hash
    for part in ("train", "test"):
        assert all(map(np.array_equal, getattr(result.split, part), kept[part]))
    assert np.array_equal(result.class_counts, kept["class_counts"])
    assert repr(result.split).startswith("Split(pathological:2: 5 clients, ")
    words = [(np.ones((8, 2)), ["ill", "well"] * 4)] * 2
    named = fk.run("fedavg", clients=words, rounds=1, device="cpu")
    assert named.class_names == ("ill", "well")
    measured = [(np.arange(16.0).reshape(8, 2), np.arange(8.0))] * 2
    regressed = fk.run("fedavg", clients=measured, rounds=1, task="regression", device="cpu")
    assert (regressed.class_names, regressed.class_counts) == ((), None)
    assert "mae" in repr(regressed) or regressed.accuracy.metric in repr(regressed)
    with pytest.raises(fk.UsageError, match="no figure 'Who has which classes'"):
        regressed.plot("split")


# ---------------------------------------------------------------- a comparison


def test_a_comparison_is_a_pair_with_a_table_that_is_a_list(compared: Any) -> None:
    results, table = compared
    assert len(results) == 8
    assert [(r["method"], r["settings"]["lr"]) for r in table] == [
        ("fedavg", 0.01),
        ("local", 0.01),
        ("fedavg", 0.1),
        ("local", 0.1),
    ]
    assert [r.seed for r in results] == [0, 1] * 4
    for row, pair in zip(table, zip(results[::2], results[1::2], strict=True), strict=True):
        assert row["macro"]["mean"] == pytest.approx(np.mean([r.accuracy.macro for r in pair]))
    assert isinstance(table, list)
    assert json.loads(json.dumps(table))[0]["method"] == "fedavg"
    assert compared[1] is compared.table is table
    assert "lr 0.01" in repr(table).splitlines()[1]
    assert repr(compared).startswith("8 results, and their table:\n")


def test_a_table_is_written_out_as_the_command_writes_it(compared: Any, tmp_path: Path) -> None:
    table = compared.table
    assert table.to_markdown(tmp_path / "t.md") == (tmp_path / "t.md").read_text()
    assert table.to_latex() == compared.to_latex()
    assert table.to_markdown().count("| method |") == 2  # the table, and the tests against the baseline
    assert r"\begin{tabular}" in table.to_latex(str(tmp_path / "new" / "t.tex"))
    rows = list(csv.DictReader(io.StringIO(table.to_csv())))
    frame = table.frame()
    assert list(frame.columns) == list(rows[0])
    assert frame["macro_mean"].tolist() == [float(row["macro_mean"]) for row in rows]
    page = compared._repr_html_()
    assert page.count("<table>") == 2
    assert page.count("<svg ") == 1
    assert f"<b>{max(row['macro']['mean'] for row in table if row['settings']['lr'] == 0.1):.2f}</b>" in page


def test_a_table_draws_what_the_report_of_its_runs_has(compared: Any) -> None:
    drawing = compared.plot()
    assert [ax.get_title(loc="left") for ax in drawing.axes] == ["lr 0.01", "lr 0.1"]
    lines = drawing.axes[0].get_lines()
    assert [line.get_label() for line in lines] == ["fedavg", "local"]
    first = [r for r in compared.results if r.config.lr == 0.01 and r.method == "fedavg"]
    assert lines[0].get_ydata()[-1] == pytest.approx(np.mean([r.accuracy.macro for r in first]))
    worst = compared.table.plot("accuracy-per-round", "worst_decile")
    assert worst.axes[0].get_lines()[0].get_ydata()[-1] == pytest.approx(
        np.mean([r.accuracy.worst_decile for r in first])
    )
    assert compared.plot("gain-over-local").axes
    with pytest.raises(fk.UsageError, match="there is no figure 'Privacy against accuracy'"):
        compared.plot("epsilon")
    with pytest.raises(fk.UsageError, match="unknown figure"):
        compared.plot("matrix")
    with pytest.raises(fk.UsageError, match="unknown measure"):
        compared.plot(measure="accuracy")


def test_a_table_of_one_run_has_its_curves() -> None:
    table = fk.compare(["local"], rounds=2, **SMALL).table
    assert [line.get_label() for line in table.plot().axes[0].get_lines()] == ["macro", "worst decile"]
    lone = Table(groups_of([(fk.Config(), None)]))
    assert "failed" in repr(lone)
    assert lone._repr_html_().count("<svg ") == 0


@pytest.mark.parametrize(
    ("grid", "words"),
    [
        ({"lr": [0.01, 0.1], "ditto.lam": [0.1, 1]}, ["lr=0.01,0.1", "ditto.lam=0.1,1"]),
        ({"lam": (0.1, 2.0), "test-share": np.array([0.2, 0.4])}, ["lam=0.1,2", "test-share=0.2,0.4"]),
        ({"partition": [fk.pathological(2), fk.iid()]}, ["partition=pathological:2,iid"]),
        ({"model": "mlp"}, ["model=mlp"]),
    ],
)
def test_a_grid_is_that_of_the_command_line(grid: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    """Run by run: what one of them has done, the other only reads."""
    settings = {"clients": 5, "rounds": 1, "epochs": 1}
    results, _ = fk.compare(["fedavg", "ditto"], seeds=[2], grid=grid, runs_dir=str(tmp_path), **settings)
    asked = grid_configs(["fedavg", "ditto"], {k: str(v) for k, v in settings.items()}, [], "2,", words)
    assert {c.identity() for c in asked} == {info.identity for info in fk.Catalogue(tmp_path).runs()}
    assert [r.seed for r in results] == [2] * len(asked)


class Half(fk.METHODS["fedavg"]):  # type: ignore[misc]
    """A method of somebody's own, which is not registered."""


def test_a_grid_of_objects() -> None:
    sites = {"north": site(1.0), "south": site(-1.0)}
    network = torch.nn.Linear(3, 2)
    results, table = fk.compare(
        [Half, "ditto"], grid={"lr": [0.1, 0.2], "ditto.lam": [1, 2]}, clients=sites, model=network, rounds=1
    )
    assert [r.method for r in results] == ["half", "ditto", "ditto"] * 2
    assert {r.per_client[1].name for r in results} == {"south"}
    assert len(table) == 6


def site(sign: float) -> tuple[Any, Any]:
    x = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
    return x, (sign * x[:, 0] > 0).astype(int)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"grid": ["lr=1"]}, "a dictionary of lists"),
        ({"grid": {"seed": [1]}}, r"grid has 'seed': give seeds=\[...\] instead"),
        ({"grid": {"attack": ["sf"]}}, r"give attack=\[...\] instead"),
        ({"grid": {"rounds": [1]}}, "'rounds' is given twice"),
        ({"grid": {"test-share": [0.2], "test_share": [0.3]}}, "twice, by two spellings"),
        ({"grid": {"lr": []}}, "at least one value"),
        ({"grid": {"lr": [0.1, 0.1]}}, "0.1 is named twice"),
        ({"grid": {"lrr": [0.1]}}, "unknown option of local, ditto 'lrr'"),
        ({"grid": {"fedprox.mu": [0.1]}}, "unknown method in option 'fedprox.mu'"),
        ({"grid": {"model": [torch.nn.Linear(1, 1)]}}, "a Linear cannot be in a grid"),
        ({"grid": {"model": ["mlp"]}, "model": torch.nn.Linear(1, 1)}, "'model' is given twice"),
        ({"grid": {"data": ["digits"]}, "data": fk.load_data("digits")}, "'data' is given twice"),
        (
            {"grid": {"label": ["a", "b"]}, "clients": [([[1.0]] * 4, [0, 1, 0, 1])]},
            "data are Python objects, which are",
        ),
        ({"grid": {"device": ["cpu"]}}, "does not change what comes out"),
        ({"grid": {"lam": [-1]}}, "lam"),
        ({"grid": {"lam": [1]}, "options": {"lam": 5}}, "'lam' is given twice"),
        ({"grid": {"ditto.lam": [1]}, "options": {"lam": 5}}, "'ditto.lam' is given twice"),
        ({"grid": {"lam": [1]}, "options": {"ditto": {"lam": 5}}}, "'lam' is given twice"),
        ({"metric": "best"}, "unknown metric 'best'"),
    ],
)
def test_grids_that_are_refused(how: dict[str, Any], says: str) -> None:
    with pytest.raises(fk.UsageError, match=says):
        fk.compare(["local", "ditto"], rounds=1, **how)


def test_two_methods_of_one_name_are_refused() -> None:
    other = type("Half", (fk.METHODS["local"],), {})
    with pytest.raises(fk.UsageError, match="method 'half' is named twice by two different ones"):
        fk.compare([Half, other], rounds=1)
    with pytest.raises(fk.UsageError, match="method 'local' is named twice"):
        fk.compare(["local", "local"], rounds=1)


# ---------------------------------------------------------------- progress


def test_nothing_is_printed_unless_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    fk.run("local", rounds=2, **SMALL)
    fk.compare(["local"], rounds=2, **SMALL)
    assert capfd.readouterr() == ("", "")


def test_verbose_says_a_line_for_each_round(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    heard: list[Any] = []
    fk.run("local", rounds=2, verbose=True, on_event=heard.append, runs_dir=str(tmp_path), **SMALL)
    out, err = capfd.readouterr()
    lines = err.splitlines()
    assert out == ""
    assert lines[0].startswith("local on digits · 5 clients, pathological:2 · ")
    assert [line[:9] for line in lines[1:]] == ["round 1/2", "round 2/2"]
    assert f"accuracy {heard[-1].accuracy.macro:.2f}" in lines[-1]
    fk.compare(["local", "fedavg"], rounds=2, verbose=True, eval_point="auto", runs_dir=str(tmp_path), **SMALL)
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].startswith("local seed 0  finished before: local-")
    assert "fedavg seed 0  round 2/2" in lines[-1]


def test_in_a_notebook_a_line_is_brought_up_to_date(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """By what a kernel of Jupyter offers; a stand-in for it is enough to see what is asked of it."""
    shown: list[str] = []

    class Handle:
        def update(self, text: dict[str, str], raw: bool) -> None:
            shown[-1] = text["text/plain"]

    def display(text: dict[str, str], raw: bool, display_id: bool) -> Handle:
        shown.append(text["text/plain"])
        return Handle()

    kernel = SimpleNamespace(kernel=object())
    notebook = SimpleNamespace(get_ipython=lambda: kernel, display=SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    fk.run("local", rounds=2, verbose=True, **SMALL)
    assert [line[:9] for line in shown] == ["round 2/2"]
    fk.compare(["local"], seeds=2, rounds=2, verbose=True, **SMALL)
    assert len(shown) == 2
    assert shown[-1].startswith("run 2 of 2, local seed 1  round 2/2")
    assert capfd.readouterr().err == ""


# ---------------------------------------------------------------- stopping from a callback


def after(rounds: int, why: str = "enough") -> Any:
    def hear(event: Any) -> None:
        if isinstance(event, fk.RoundRecord) and event.round == rounds and not event.final:
            raise fk.StopTraining(why)

    return hear


def same(a: fk.Result, b: fk.Result) -> None:
    assert [(r.round, r.final, r.accuracy) for r in a.history] == [(r.round, r.final, r.accuracy) for r in b.history]
    for client in range(len(a.per_client)):
        for one, two in zip(a.personal(client).parameters(), b.personal(client).parameters(), strict=True):
            assert torch.equal(one, two)


@pytest.mark.parametrize("method", ["fedper", "fedbabu"])  # one that says nothing after the last round, one that does
@pytest.mark.parametrize("kept", [False, True])
def test_a_stopped_run_is_one_of_so_many_rounds(method: str, kept: bool, tmp_path: Path) -> None:
    where: dict[str, Any] = {"runs_dir": str(tmp_path), "checkpoint_every": 3} if kept else {}
    stopped = fk.run(method, rounds=9, on_event=after(2), **where, **SMALL)
    same(stopped, fk.run(method, rounds=2, **SMALL))
    assert stopped.stopped == 2
    assert "stopped early after round 2 of 9: enough" in stopped.remarks
    if kept:
        folder = fk.RunFolder.open(str(stopped.run))
        assert folder.info.status == "finished"
        assert any(line.endswith("stopped early after round 2: enough") for line in folder.log())
        again = fk.resume(str(stopped.run))
        same(again, stopped)
        assert (again.stopped, again.remarks) == (2, stopped.remarks)
        longer = fk.resume(str(stopped.run), rounds=4)
        same(longer, fk.run(method, rounds=4, **SMALL))
        assert longer.stopped is None


def test_a_stopped_run_goes_on_to_as_many_rounds_as_it_was_to_have(tmp_path: Path) -> None:
    stopped = fk.run("fedpkda", rounds=4, on_event=after(2), runs_dir=str(tmp_path), **SMALL)
    longer = fk.resume(
        str(stopped.run), rounds=4, on_event=after(3, "")
    )  # it asks for the number of rounds, which is that
    assert longer.stopped == 3
    assert "stopped early after round 3 of 4: a listener asked for it" in longer.remarks
    assert fk.RunFolder.open(str(stopped.run)).table("rounds")["round"] == [1, 2, 3]
    assert fk.resume(str(stopped.run), rounds=4).stopped is None
    with pytest.raises(fk.UsageError, match="asks how many rounds there will be"):
        fk.resume(str(fk.run("fedpkda", rounds=4, on_event=after(2), runs_dir=str(tmp_path), **SMALL).run), rounds=5)


class LastWord(fk.METHODS["fedavg"]):  # type: ignore[misc]
    """Is killed once, in what it does after the last round."""

    killed = False

    def finish(self, fed: fk.Federation) -> None:
        if not LastWord.killed:
            LastWord.killed = True
            raise KeyboardInterrupt
        self.model = fed.ask(fed.all, self.train, model=self.model).mean("model", otherwise=self.model)


@pytest.mark.parametrize("rounds", [None, 6])
def test_killed_after_the_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds: int | None) -> None:
    monkeypatch.setattr(LastWord, "killed", False)
    home = {"runs_dir": str(tmp_path), "checkpoint_every": 5}
    with pytest.raises(KeyboardInterrupt):
        fk.run(LastWord, rounds=6, on_event=after(2), **home, **SMALL)
    (left,) = fk.Catalogue(tmp_path).runs()
    assert (left.status, left.rounds_done) == ("interrupted", 2)
    result = fk.resume(left.id, runs_dir=str(tmp_path), method=LastWord, rounds=rounds)
    assert result.stopped == (2 if rounds is None else None)
    same(result, fk.run(LastWord, rounds=2 if rounds is None else 6, **SMALL))


def test_where_there_is_nothing_to_stop() -> None:
    def at_once(event: Any) -> None:
        raise fk.StopTraining

    with pytest.raises(fk.UsageError, match="StopTraining before a round"):
        fk.run("local", rounds=2, on_event=at_once, **SMALL)
    last = fk.run("local", rounds=2, on_event=after(2), **SMALL)
    assert (last.stopped, last.remarks) == (None, [])
    sparse = fk.run("local", rounds=6, eval_every=2, on_event=after(2), **SMALL)
    assert (sparse.stopped, [r.round for r in sparse.history]) == (2, [2])


@pytest.mark.parametrize("how", [{}, {"together": 3}, {"runs_dir": "here"}])
def test_in_a_comparison_the_run_that_was_heard_of_is_stopped(how: dict[str, Any], tmp_path: Path) -> None:
    worked: list[Any] = []

    def hear(event: Any) -> None:
        if isinstance(event, fk.Prepared):
            worked.append(event.config)
        elif worked[-1].lr == 0.05 and event.round == 1 and "together" not in how:
            raise fk.StopTraining

    how = {k: str(tmp_path) if k == "runs_dir" else v for k, v in how.items()}
    settings = {k: v for k, v in SMALL.items() if k != "lr"}
    results, table = fk.compare(["local"], grid={"lr": [0.05, 0.1]}, rounds=3, on_event=hear, **how, **settings)
    expected = [None, None] if "together" in how else [1, None]
    assert [r.stopped for r in results] == expected
    assert len(table) == 2


def test_a_listener_keeps_runs_from_sharing_a_training() -> None:
    """Else what stops one would stop the others."""
    names: list[str] = []

    def hear(event: Any) -> None:
        if isinstance(event, fk.Prepared):
            names.append(event.eval_point)
        elif names[-1] == "received" and event.round == 1:
            raise fk.StopTraining

    grid = {"eval_point": ["received", "after_local"]}
    results, _ = fk.compare(["fedper"], grid=grid, rounds=2, on_event=hear, **SMALL)
    assert [r.stopped for r in results] == [1, None]


@pytest.mark.parametrize("method", ["fedper", "fedbabu"])
def test_a_comparison_wants_all_rounds_of_a_run_that_was_stopped(method: str, tmp_path: Path) -> None:
    where = {"rounds": 3, "runs_dir": str(tmp_path)}
    fk.run(method, on_event=after(1), **where, **SMALL)
    heard, table = fk.compare([method], on_event=after(2), **where, **SMALL)  # begins anew: it may be stopped again
    assert (heard[0].stopped, table[0]["stopped"]) == (2, {"0": 2})
    assert f"{method} stopped early: seed 0 after round 2 of 3" in table.to_markdown()
    results, table = fk.compare([method], **where, **SMALL)
    same(results[0], fk.run(method, rounds=3, eval_point="received", **SMALL))
    assert (results[0].stopped, table[0]["stopped"]) == (None, {})
    found = [(r.cut_short, r.rounds_done) for r in fk.Catalogue(tmp_path).runs()]
    assert sorted(found) == [(False, 3), (True, 1)]


def test_a_run_that_patience_ended_is_read(tmp_path: Path) -> None:
    how = {"rounds": 9, "patience": 1, "min_gain": 99.0, "validation_share": 0.2, "runs_dir": str(tmp_path), **SMALL}
    first = fk.compare(["local"], **how)[1]
    assert first[0]["stopped"] == fk.compare(["local"], **how)[1][0]["stopped"] == {"0": 2}
    assert len(fk.Catalogue(tmp_path).runs()) == 1


def test_runs_elsewhere_cannot_be_stopped(tmp_path: Path) -> None:
    with pytest.raises(fk.UsageError, match="cannot stop runs in other processes"):
        fk.compare(["local", "fedavg"], rounds=3, jobs=2, runs_dir=str(tmp_path), on_event=after(1), **SMALL)


# ---------------------------------------------------------------- sinks, models, data


def test_sinks_of_ones_own(tmp_path: Path) -> None:
    told: list[Any] = []

    class Mine(fk.Sink):
        def start(self, info: Any) -> None:
            told.append(info["method"])

        def round(self, record: fk.RoundRecord, clients: Any) -> None:
            told.append((record.round, len(clients)))

        def finish(self, result: fk.Result) -> None:
            told.append(result.accuracy.macro)

    result = fk.run("local", rounds=2, runs_dir=str(tmp_path), sinks=[Mine()], **SMALL)
    assert told == ["local", (1, 5), (2, 5), result.accuracy.macro]
    with pytest.raises(fk.UsageError, match="say with runs_dir"):
        fk.run("local", rounds=1, sinks=[Mine()], **SMALL)
    with pytest.raises(fk.UsageError, match=r"a list of names .* and of sinks made from fedkin\.Sink"):
        fk.run("local", rounds=1, runs_dir=str(tmp_path), sinks=[Mine], **SMALL)  # type: ignore[list-item]
    with pytest.raises(fk.UsageError, match="unknown sink 'tensorbord'"):
        fk.run("local", rounds=1, runs_dir=str(tmp_path), sinks=["tensorbord"], **SMALL)


def test_models_of_own_data_are_exported(tmp_path: Path) -> None:
    sites = {"north": site(1.0), "south/2": site(-1.0)}
    result = fk.run("fedper", clients=sites, model="mlp", rounds=2, device="cpu")
    files = fk.export(result, tmp_path)
    assert [f.name for f in files] == ["north.safetensors", "south-2.safetensors"]
    model, x = fk.load_model(files[1]), sites["south/2"][0]
    assert np.array_equal(model.probabilities(x).argmax(1), result.predict(x, "south/2"))
    assert [f.name for f in fk.export(result, tmp_path / "one", clients=["north"])] == ["north.safetensors"]
    for wrong in ({"formats": "onnx"}, {"formats": ["pickle"]}, {"clients": [7]}, {"clients": ["nord"]}):
        with pytest.raises(fk.UsageError):
            fk.export(result, tmp_path, **wrong)


def test_clients_come_from_a_generator() -> None:
    def clients() -> Any:
        yield site(1.0)
        yield site(-1.0)

    listed = fk.run("local", clients=[site(1.0), site(-1.0)], rounds=1, device="cpu")
    same(fk.run("local", clients=clients(), rounds=1, device="cpu"), listed)
    values = {"a": site(1.0), "b": site(-1.0)}.values()
    results, _ = fk.compare(["local"], seeds=2, clients=values, rounds=1, device="cpu")
    same(results[0], fk.run("local", clients=clients(), rounds=1, device="cpu", eval_point="received"))
    joined = fk.join(results[0], clients=(c for c in [site(1.0)]))
    assert joined.names == ("client-2",)


# ---------------------------------------------------------------- what can be imported

PUBLIC = {"fedkin", "fedkin.testing", "fedkin.papers"}
FOR_DEVELOPERS = ("architecture.md",)


def examples() -> list[Path]:
    pages = [p for p in sorted((ROOT / "docs").glob("*.md")) if p.name not in FOR_DEVELOPERS]
    return [ROOT / "README.md", *pages, *sorted((ROOT / "examples").glob("*.py"))]


def imported(code: str) -> set[str]:
    """The modules of FedKin that are imported, and what is taken from `fedkin` itself, by import or as `fk.name`."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "fk":
            found.add(f"fedkin.{node.attr}")
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names if a.name.split(".")[0] == "fedkin"}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fedkin":
            found |= {f"fedkin.{a.name}" if node.module == "fedkin" else str(node.module) for a in node.names}
    return found


@pytest.mark.parametrize("path", examples(), ids=lambda p: p.name)
def test_no_example_needs_a_module_inside(path: Path) -> None:
    text = path.read_text()
    blocks = [text] if path.suffix == ".py" else re.findall(r"^```python\n(.*?)^```", text, re.S | re.M)
    blocks += re.findall(r"^python - <<'END'\n(.*?)^END", text, re.S | re.M)
    exported = {f"fedkin.{name}" for name in fk.__all__}
    for block in blocks:
        assert imported(block) <= PUBLIC | exported, path.name


def test_an_import_from_inside_is_found() -> None:
    assert imported("from fedkin.runs.folder import RunFolder\nimport fedkin as fk") == {"fedkin.runs.folder", "fedkin"}
    assert imported("from fedkin import Layout") == {"fedkin.Layout"}
    assert imported("fk.data.load('digits')") == {"fedkin.data"}


def test_every_name_is_there() -> None:
    assert all(hasattr(fk, name) for name in fk.__all__)
    assert sorted(fk._WHERE) == sorted(name for name in fk.__all__ if not name.startswith("__"))
    for name in ("load_paper", "parse", "make_plan", "records", "as_markdown", "Ledger", "reproduce", "Data"):
        assert callable(getattr(__import__("fedkin.papers", fromlist=[name]), name))


def test_outcomes_of_results_have_their_figures(compared: Any) -> None:
    """A table made of outcomes that keep no models, as the command line has them."""
    kept = [Outcome.of(replace(r, _rows=torch.empty(0, 0))) for r in compared.results]
    made = Table(groups_of((o.config, o) for o in kept), "fedavg")
    assert made.to_csv() == compared.to_csv()
    assert len(made.plot().axes) == 2
