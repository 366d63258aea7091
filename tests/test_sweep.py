"""Sweeps: which cells there are; finished ones are not done again, interrupted ones go on, failed ones fail alone."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import fedkin as fk
from fedkin import plugins
from fedkin.cli.application import app
from fedkin.cli.flags import grid_configs
from fedkin.config import Config, make_config
from fedkin.errors import UsageError
from fedkin.methods import METHODS
from fedkin.methods.fedavg import FedAvg
from fedkin.rounds import Event, Prepared, RoundRecord, run_config
from fedkin.runs.catalogue import Catalogue
from fedkin.sweep.expand import expand
from fedkin.sweep.runner import Cell, Quiet, Sweep, run_sweep

TINY = ["--rounds", "2", "--epochs", "1", "--clients", "5", "--way", "each", "--samples-per-client", "40"]


@pytest.fixture(autouse=True)
def _clean(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs, plugins and registered methods of each test's own."""
    monkeypatch.setenv("FEDKIN_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(METHODS, "_entries", dict(METHODS._entries))
    monkeypatch.setattr(plugins, "_loaded", {})


def call(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


def tiny(method: str = "fedavg", **settings: Any) -> Config:
    return make_config(
        {"method": method, "rounds": 2, "epochs": 1, "clients": 5, "way": "each", "samples_per_client": 40, **settings}
    )


def scores(sweep: Sweep) -> list[tuple[str, int, list[float]]]:
    return [(o.method, o.seed, [c.accuracy for c in o.per_client]) for o in sweep.outcomes]


# ---------------------------------------------------------------- which cells


def test_a_grid_is_every_combination_once() -> None:
    blocks = [
        {
            "method": ["fedavg", "ditto"],
            "attack": ["none", "sf"],
            "malicious": [0.2, 0.4],
            "options.lam": [0.1, 1.0],
            "seed": [3, 4],
        }
    ]
    got = [(c.seed, c.attack, c.malicious, c.method, c.options.get("lam")) for c in expand({"rounds": 1}, blocks)]
    one = [("none", 0.3, "fedavg", None), ("none", 0.3, "ditto", 0.1), ("none", 0.3, "ditto", 1.0)]
    two = [("sf", m, *rest) for m in (0.2, 0.4) for rest in (("fedavg", None), ("ditto", 0.1), ("ditto", 1.0))]
    assert got == [(s, *cell) for s in (3, 4) for cell in one + two]


def test_a_file_says_the_same_and_adds_cells(tmp_path: Path) -> None:
    path = tmp_path / "sweep.toml"
    path.write_text("""
rounds = 3
clients = 5
[options.ditto]
lam = 0.7
[grid]
method = ["fedavg", "ditto"]
lr = [0.01, 0.1]
"options.fedprox.mu" = [0.5]
[[cell]]
method = "fedprox"
lr = 0.2
options = { mu = 0.3 }
""")
    with pytest.raises(UsageError, match=r"fedprox"):
        grid_configs([str(path)], {}, [], None)  # fedprox is not among the grid's methods
    path.write_text(path.read_text().replace('"options.fedprox.mu" = [0.5]\n', "seed = [0, 1]\n"))
    got = grid_configs([str(path)], {"rounds": "1"}, [], None)
    assert {c.rounds for c in got} == {1}, "flags win"
    assert [(c.seed, c.lr, c.method, dict(c.options)) for c in got] == [
        (s, *rest)
        for s in (0, 1)
        for rest in (
            (0.01, "fedavg", {}),
            (0.01, "ditto", {"lam": 0.7}),
            (0.1, "fedavg", {}),
            (0.1, "ditto", {"lam": 0.7}),
            (0.2, "fedprox", {"mu": 0.3}),
        )
    ]
    flat = grid_configs([str(path)], {"lr": "0.5"}, ["ditto.lam=0.2"], "1")
    assert [(c.seed, c.lr, c.method, dict(c.options)) for c in flat] == [
        (0, 0.5, "fedavg", {}),
        (0, 0.5, "ditto", {"lam": 0.2}),
        (0, 0.5, "fedprox", {"mu": 0.3}),
    ]


def test_flags_make_a_grid() -> None:
    got = grid_configs(["ditto"], {}, [], None, ["lr=0.1,0.2", "ditto.lam=1,2"])
    assert [(c.lr, c.options["lam"]) for c in got] == [(0.1, 1.0), (0.1, 2.0), (0.2, 1.0), (0.2, 2.0)]


@pytest.mark.parametrize(
    ("block", "says"),
    [
        ({"method": []}, "at least one"),
        ({"method": ["fedavg"], "lr": [0.1, 0.1]}, "named twice"),
        ({"method": ["fedavg"], "lrr": [1]}, "did you mean 'lr'"),
        ({"method": ["fedavg"], "options.lam": [1]}, "'lam'"),
        ({"method": ["ditto"], "options.ditto.lamb": [1]}, "'lam'"),
        ({"method": ["fedavg"], "lr": [[0.1]]}, "plain values"),
        ({"method": ["fedavg"], "device": ["cpu"]}, "does not change"),
        ({"method": ["fedavg"], "lr": ["x"]}, "lr='x'"),
        ({"method": ["fedavg"], "seed": range(30_000)}, "30000 runs"),
    ],
)
def test_wrong_grids_are_refused(block: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError) as error:
        expand({}, [block])
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("grid = 3", "[grid]"),
        ("[cell]\nlr = 1", "[[cell]]"),
        ("[grid.lr]\na = 1", "not a table"),
        ("[grid]\nlr = [0.1]", "no method"),
    ],
)
def test_wrong_files_are_refused(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "sweep.toml"
    path.write_text(text)
    outcome = call("compare", str(path))
    assert outcome.exit_code == 2
    assert says in outcome.stderr
    path.write_text('[grid]\nmethod = ["fedavg"]')
    outcome = call("run", str(path))
    assert outcome.exit_code == 2
    assert "fedkin compare" in outcome.stderr


# ---------------------------------------------------------------- done once


def test_finished_cells_are_read_not_done_again(tmp_path: Path) -> None:
    words = ["compare", "fedavg", "local", *TINY, "--json"]
    first, second = json.loads(call(*words).stdout), json.loads(call(*words).stdout)
    assert [c.pop("skipped") for c in first["cells"]] == [False, False]
    assert [c.pop("skipped") for c in second["cells"]] == [True, True]
    assert second == first
    more = call("compare", "fedavg", "local", "ditto", *TINY)
    assert "2 of 3 runs were finished before" in more.stderr
    assert f"finished before: {Path(first['cells'][0]['run']).name}" in more.stderr
    assert len(Catalogue(tmp_path / "runs").runs()) == 3
    again = json.loads(call(*words, "--fresh").stdout)
    assert [c["skipped"] for c in again["cells"]] == [False, False]
    assert [c["accuracy"] for c in again["cells"]] == [c["accuracy"] for c in first["cells"]]
    assert len(Catalogue(tmp_path / "runs").runs()) == 5


def test_cells_are_what_run_says() -> None:
    got = json.loads(call("compare", "fedavg", *TINY, "--json").stdout)["cells"][0]
    alone = json.loads(call("run", "fedavg", *TINY, "--json").stdout)
    of_the_process = {"memory"}  # which did all cells
    assert set(alone) - {"ways", "gone", "detection_rounds", "left_out", "backdoor"} - of_the_process <= set(got)
    for key in ("accuracy", "best", "per_client", "bytes", "split", "method", "options", "seed", "removed", "failed"):
        assert got[key] == pytest.approx(alone[key]) if key == "accuracy" else got[key] == alone[key], key


def test_all_methods_are_evaluated_at_one_point_and_the_table_says_which(tmp_path: Path) -> None:
    def table(*words: str) -> tuple[str, list[dict[str, Any]]]:
        paths = [str(tmp_path / f"t.{kind}") for kind in ("md", "tex", "csv")]
        files = [w for pair in zip(("--markdown", "--latex", "--csv"), paths, strict=True) for w in pair]
        shown = call("compare", "fedavg", "fedavg-ft", *TINY, *words, *files)
        rows = list(csv.DictReader((tmp_path / "t.csv").read_text().splitlines()))
        texts = [shown.stdout, *(Path(p).read_text() for p in paths[:2])]
        return "\n".join(" ".join(t.split()) for t in texts), rows

    said, rows = table()
    assert said.count("evaluated as received, percent") == 3
    assert said.count("-ft as received is fedavg") == 3
    assert {r["eval_point"] for r in rows} == {"received"}
    assert rows[0]["macro_mean"] == rows[1]["macro_mean"], "which is what the note says"
    said, rows = table("--eval-point", "after_local")
    assert said.count("evaluated after local training, percent") == 3
    assert "as received" not in said
    assert {r["eval_point"] for r in rows} == {"after_local"}
    said, rows = table("--eval-point", "auto")
    assert said.count("evaluated as each row says") == 3
    assert [r["eval_point"] for r in rows] == ["received", "after_local"]
    matrix, _ = table("--eval-point", "auto", "--attack", "none,sf")
    for line in ("fedavg-ft", "after local training", "as received"):
        assert line in matrix
    with_file = tmp_path / "points.toml"
    with_file.write_text('eval_point = "auto"\n')
    assert [c.eval_point for c in grid_configs(["fedavg", str(with_file)], {}, [], None)] == ["auto"]
    both = grid_configs(["fedavg"], {}, [], None, ["eval_point=received,after_local"])
    assert [c.eval_point for c in both] == ["received", "after_local"]


def test_a_run_at_the_methods_own_point_is_the_cell_of_a_comparison(tmp_path: Path) -> None:
    call("run", "fedavg", *TINY)
    call("run", "fedavg-ft", *TINY)
    assert "1 of 2 runs were finished before" in call("compare", "fedavg", "fedavg-ft", *TINY).stderr
    assert (
        "2 of 2 runs were finished before"
        in call("compare", "fedavg", "fedavg-ft", *TINY, "--eval-point", "auto").stderr
    )
    assert len(Catalogue(tmp_path / "runs").runs()) == 3


def test_python_compares_at_one_point() -> None:
    settings: dict[str, Any] = {"rounds": 1, "clients": 5, "epochs": 1, "way": "each"}
    assert {r["eval_point"] for r in fk.compare(["fedavg", "fedavg-ft"], **settings)[1]} == {"received"}
    own = fk.compare(["fedavg", "fedavg-ft"], eval_point="auto", **settings)[1]
    assert [r["eval_point"] for r in own] == ["received", "after_local"]


def test_from_python_seeds_begin_with_the_seed() -> None:
    settings: dict[str, Any] = {"rounds": 1, "clients": 5, "epochs": 1, "way": "each"}
    (row,) = fk.compare(["fedavg"], seed=7, seeds=2, **settings)[1]
    assert row["seeds"] == [7, 8]
    for ask in (lambda **how: fk.compare(["fedavg"], **how), lambda **how: fk.tune("fedavg", **how)):
        with pytest.raises(UsageError, match=r"seed=7 beside seeds=\[1, 2\]"):
            ask(seed=7, seeds=[1, 2], **settings)


def test_a_run_that_was_found_is_in_the_row_of_its_method(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"rounds": 1, "clients": 5, "epochs": 1, "way": "each", "runs_dir": str(tmp_path)}
    fk.run("fedavg", **settings)  # at its own evaluation point, which is the one of the comparison
    (row,) = fk.compare(["fedavg"], seeds=2, **settings)[1]
    assert row["seeds"] == [0, 1]
    assert len(Catalogue(tmp_path).runs()) == 2


def test_a_diverged_cell_is_marked_everywhere_and_is_exit_1(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"t.{kind}") for kind in ("md", "tex", "csv")]
    files = [w for pair in zip(("--markdown", "--latex", "--csv"), paths, strict=True) for w in pair]
    words = ["compare", "fedavg", "local", *TINY, "--lr", "1e30"]
    shown = call(*words, *files)
    assert shown.exit_code == 1
    for text in (shown.stdout, *(Path(p).read_text() for p in paths[:2])):
        said = " ".join(text.split())
        assert said.count(" (diverged)") == 2
        assert "fedavg seed 0: in round 1 the replies of " in said
        assert "local seed 0: the training loss of 5 of 5 clients (client-0 first) was not finite after round 1" in said
    assert "2 of 2 runs diverged" in shown.stderr
    rows = list(csv.DictReader(Path(paths[2]).read_text().splitlines()))
    assert [r["diverged_seeds"] for r in rows] == ["0", "0"]
    assert "were refused" in rows[0]["diverged"]
    found = json.loads(call(*words, "--json").stdout)  # from the folders this time
    assert all(c["diverged"] for c in found["cells"])
    assert "were refused" in found["table"][0]["diverged"]["0"]
    row = fk.compare(["fedavg"], rounds=1, clients=5, epochs=1, way="each", lr=1e30)[1][0]
    assert "were refused" in row["diverged"]["0"]


def test_own_files_that_changed_are_trained_on_again(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    path = tmp_path / "own.npz"
    np.savez(path, x=rng.standard_normal((60, 4)).astype(np.float32), y=np.arange(60) % 3)
    configs = [tiny("local", data=str(path), clients=3, partition="iid")]
    assert run_sweep(configs).skipped == 0
    os.utime(path, (1, 1))
    assert run_sweep(configs).skipped == 1
    os.utime(path)
    later = path.stat().st_mtime + 60
    os.utime(path, (later, later))
    assert run_sweep(configs).skipped == 0


# ---------------------------------------------------------------- failures


class Broken(FedAvg):
    mended = False

    def round(self, fed: Any, cohort: Any) -> None:
        if fed.round == 1 and not Broken.mended:
            raise RuntimeError("out of luck")
        super().round(fed, cohort)


@pytest.mark.parametrize("together", [1, 3])
def test_one_failed_cell_does_not_stop_the_rest(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    METHODS.register("broken")(Broken)
    configs = [tiny("fedavg"), tiny("broken", checkpoint_every=1), tiny("local")]
    sweep = run_sweep(configs, together=together)
    assert [c.state for c in sweep.cells] == ["done", "failed", "done"]
    assert sweep.failed[0].error == "RuntimeError: out of luck"
    run = Catalogue().find(sweep.failed[0].run or "")
    assert (run.info.status, run.info.method) == ("failed", "broken")
    assert any("out of luck" in line for line in run.log())
    monkeypatch.setattr(Broken, "mended", True)
    again = run_sweep(configs, together=together)
    assert [c.state for c in again.cells] == ["skipped", "done", "skipped"]
    assert again.cells[1].run == run.info.id, "it goes on from its checkpoint"
    assert [r.round for r in again.cells[1].records] == [2]


def test_a_failed_cell_is_shown_and_is_exit_1() -> None:
    METHODS.register("broken")(Broken)
    outcome = call("compare", "broken", "local", *TINY, "--seeds", "2")
    assert outcome.exit_code == 1
    assert "broken seed 0 failed: RuntimeError: out of luck (run broken-" in outcome.stderr
    assert "2 of 4 runs failed" in outcome.stderr
    assert ["broken", "failed"] in [line.split()[:2] for line in outcome.stdout.splitlines()]
    assert any(line.split()[:1] == ["local"] for line in outcome.stdout.splitlines())


def test_a_cell_at_work_elsewhere_is_left_alone() -> None:
    config = tiny(rounds=1)
    inner: list[Sweep] = []

    class Curious(Quiet):
        def listener(self, cell: Cell) -> Any:
            hear = super().listener(cell)

            def both(event: Event) -> None:
                hear(event)
                if isinstance(event, RoundRecord) and not inner:
                    inner.append(run_sweep([config]))

            return both

    assert [c.state for c in run_sweep([config], watcher=lambda cells: Curious()).cells] == ["done"]
    assert "another process" in inner[0].failed[0].error


# ---------------------------------------------------------------- Ctrl-C


class Impatient(Quiet):
    """Sends a signal to this process after the first round, or at once when the run begins."""

    def __init__(self, times: int) -> None:
        self._times, self.said = times, []  # type: tuple[int, list[str]]

    def listener(self, cell: Cell) -> Any:
        hear = super().listener(cell)

        def both(event: Event) -> None:
            hear(event)
            if isinstance(event, Prepared):
                while self._times:
                    self._times -= 1
                    os.kill(os.getpid(), signal.SIGINT)

        return both

    def say(self, line: str) -> None:
        self.said.append(line)


@pytest.fixture
def grid() -> Iterator[list[Config]]:
    before = signal.getsignal(signal.SIGINT)
    yield [tiny(m, seed=s, rounds=3) for s in (0, 1) for m in ("fedavg", "local")]
    assert signal.getsignal(signal.SIGINT) is before, "the handler is put back"


@pytest.mark.parametrize("together", [1, 2])
def test_ctrl_c_stops_after_the_round_and_the_same_call_goes_on(grid: list[Config], together: int) -> None:
    watcher = Impatient(1)
    sweep = run_sweep(grid, watcher=lambda cells: watcher, together=together, signals=True)
    assert sweep.signal == signal.SIGINT
    assert [c.state for c in sweep.cells] == ["interrupted"] * together + ["waiting"] * (4 - together)
    assert any("stopping after this round" in line for line in watcher.said)
    stopped = {c.run for c in sweep.cells if c.run}
    assert all(Catalogue().find(run or "").info.rounds_done == 1 for run in stopped)
    again = run_sweep(grid, together=together, signals=True)
    assert [c.state for c in again.cells] == ["done"] * 4
    assert stopped <= {c.run for c in again.cells}
    assert [r.round for r in again.cells[0].records] == [2, 3]
    plain = [run_config(config) for config in grid]
    assert scores(again) == [(r.method, r.seed, [c.accuracy for c in r.per_client]) for r in plain]


def test_a_run_whose_process_is_gone_is_gone_on_with(grid: list[Config]) -> None:
    stopped = run_sweep(grid[:1], watcher=lambda cells: Impatient(1), signals=True).cells[0].run or ""
    path = Catalogue().find(stopped).path / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "status": "running"}))  # as after SIGKILL
    (cell,) = run_sweep(grid[:1]).cells
    assert (cell.state, cell.run) == ("done", stopped)
    assert [r.round for r in cell.records] == [2, 3]


@pytest.mark.parametrize("together", [1, 2])
def test_a_second_ctrl_c_quits_now(grid: list[Config], together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedkin.runs.start.SAME_REQUEST", 0.0)  # these come at once, a person's would not
    sweep = run_sweep(grid, watcher=lambda cells: Impatient(2), together=together, signals=True)
    assert sweep.signal == signal.SIGINT
    assert {c.state for c in sweep.cells} == {"interrupted", "waiting"}
    found = Catalogue().runs()
    assert found
    assert {r.status for r in found} == {"interrupted"}
    assert [c.state for c in run_sweep(grid[:2]).cells] == ["done", "done"]


def test_the_command_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedkin.sweep import runner as module

    real = module.run_sweep

    def interrupted(configs: Any, **given: Any) -> Sweep:
        done = real(configs[:1], **given)
        return Sweep([*done.cells, Cell(configs[1], "interrupted", run="x"), Cell(configs[2])], signal.SIGTERM)

    monkeypatch.setattr("fedkin.cli.grid.run_sweep", interrupted)
    outcome = call("compare", "fedavg", "local", "ditto", *TINY)
    assert outcome.exit_code == 143
    assert "stopped by SIGTERM with 2 of 3 runs to do; the same command goes on" in outcome.stderr


# ---------------------------------------------------------------- several at once


def test_together_is_the_same_as_one_after_another(tmp_path: Path) -> None:
    def configs(name: str) -> list[Config]:
        cells = ((0, "none", "fedavg"), (0, "lf", "fedavg"), (1, "none", "fedavg"), (0, "none", "ditto"))
        return [tiny(m, seed=s, attack=a, runs_dir=str(tmp_path / name)) for s, a, m in cells]

    one, several = run_sweep(configs("one")), run_sweep(configs("several"), together=3)
    assert scores(several) == scores(one)
    kept = [{"identity": r.identity, "objects": r.objects} for r in Catalogue(tmp_path / "several").runs()]
    assert sorted(k["identity"] for k in kept) == sorted(r.identity for r in Catalogue(tmp_path / "one").runs())
    assert all(k["objects"] == [] for k in kept), "such runs can be resumed alone"
    assert run_sweep(configs("several"), together=3).skipped == 4


# ---------------------------------------------------------------- plugins

PLUGIN = """
import fedkin as fk
from fedkin.methods.fedavg import FedAvg

@fk.METHODS.register("mine")
class Mine(FedAvg):
    about = "mine"
"""


def test_a_plugin_is_run_on_request_and_only_its_cells_depend_on_it(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN)
    assert "unknown method 'mine'" in call("compare", "mine", *TINY).stderr
    words = ["compare", "fedavg", "mine", *TINY, "--plugin", str(path), "--json"]
    first = json.loads(call(*words).stdout)["cells"]
    assert first[0]["accuracy"] == first[1]["accuracy"]
    assert [c["skipped"] for c in json.loads(call(*words).stdout)["cells"]] == [True, True]
    path.write_text(PLUGIN + "# another version\n")
    assert [c["skipped"] for c in json.loads(call(*words).stdout)["cells"]] == [True, False]
    shown = call("methods", "mine", "--plugin", str(path))
    assert shown.exit_code == 0
    assert "mine" in shown.stdout


def test_resume_wants_the_same_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN)
    plugins.load(path)
    sweep = run_sweep([tiny("mine")], watcher=lambda cells: Impatient(1), signals=True)
    run = sweep.cells[0].run or ""
    recorded = Catalogue().find(run).info.raw["plugins"]
    assert recorded == [{"path": str(path), "sha256": plugins.loaded()[0].sha256}]
    plugins._loaded.clear()
    refused = call("resume", run)
    assert refused.exit_code == 2
    assert f"--plugin {path}" in refused.stderr
    path.write_text(PLUGIN + "# another version\n")
    refused = call("resume", run, "--plugin", str(path))
    assert refused.exit_code == 2
    assert "changed" in refused.stderr
    path.write_text(PLUGIN)
    assert call("resume", run, "--plugin", str(path)).exit_code == 0
    assert Catalogue().find(run).info.status == "finished"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = (", "line 1: SyntaxError"),
        ("\nimport nowhere_at_all", "line 2: ModuleNotFoundError"),
        (PLUGIN.replace('"mine"', '"ditto"'), "exists already"),
    ],
)
def test_a_plugin_that_cannot_be_used_says_where(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text)
    outcome = call("methods", "--plugin", str(path))
    assert outcome.exit_code == 2
    assert says in outcome.stderr
    assert call("methods", "--plugin", str(tmp_path / "none.py")).exit_code == 2
    assert call("methods", "--plugin", str(tmp_path)).exit_code == 2


# ---------------------------------------------------------------- what comes out


def test_tables_are_written(tmp_path: Path) -> None:
    files = {k: tmp_path / "out" / f"table.{k}" for k in ("markdown", "latex", "csv")}
    words = [w for k, path in files.items() for w in (f"--{k}", str(path))]
    outcome = call(
        "compare", "fedavg", "local", *TINY, "--attack", "none,sf", "--seeds", "2", "--baseline", "fedavg", *words
    )
    assert outcome.exit_code == 0, outcome.output
    for word in ("Wilcoxon", "over clients", "n = ", "median difference", "benign ones only (no attack: of all 5)"):
        assert word in outcome.stdout, word
    rows = list(csv.DictReader(io.StringIO(files["csv"].read_text())))
    assert [(r["method"], r["attack"]) for r in rows] == [(m, a) for a in ("none", "sf") for m in ("fedavg", "local")]
    for row in rows:
        shown = f"{float(row['macro_mean']):.2f}"
        assert shown in outcome.stdout
        assert all(shown in files[kind].read_text() for kind in ("markdown", "latex"))
    assert rows[1]["paired_over"] == "clients"
    assert float(rows[1]["paired_n"]) == 5
    assert files["latex"].read_text().count(r"\begin{tabular}") == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--baseline", "dito"], "did you mean 'ditto'"),
        (["--metric", "makro"], "did you mean 'macro'"),
        (["--sink", "tensorbord"], "did you mean 'tensorboard'"),
        (["--together", "0"], "--together"),
        (["--csv", "a", "--latex", "a"], "files of their own"),
        (["--grid", "lr"], "--grid lr=0.01,0.1"),
        (["--grid", "lr=1,2", "--lr", "0.3"], "lr is given twice"),
        (["--grid", "ditto.lam=1,2", "--set", "lam=5"], "ditto.lam is given twice"),
    ],
)
def test_wrong_flags_are_refused_before_anything_runs(words: list[str], says: str, tmp_path: Path) -> None:
    outcome = call("compare", "fedavg", "ditto", *TINY, *words)
    assert outcome.exit_code == 2
    assert says in outcome.stderr.replace("\n", " ")
    assert not (tmp_path / "runs").exists()
