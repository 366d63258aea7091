"""Sinks hear of every round, are never needed, and never stop a run."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedkin.cli.application import app
from fedkin.config import Config, make_config
from fedkin.errors import UsageError
from fedkin.rounds import Result, RoundRecord, run_config
from fedkin.runs import sinks
from fedkin.runs.sinks import SINKS, ClientScore, Sink, Sinks, check_sinks, make_sinks
from fedkin.runs.start import start


def tiny(runs: Path, **settings: Any) -> Config:
    return make_config(
        {
            "rounds": 2,
            "epochs": 1,
            "clients": 5,
            "way": "each",
            "samples_per_client": 20,
            "runs_dir": str(runs),
            **settings,
        }
    )


class Notebook(Sink):
    def __init__(self, fails: str = "") -> None:
        self.heard: list[str] = []
        self.clients: list[Sequence[ClientScore]] = []
        self._fails = fails

    def _note(self, what: str) -> None:
        self.heard.append(what)
        if what.split()[0] == self._fails:
            raise ValueError("no ink")

    def start(self, info: Mapping[str, Any]) -> None:
        self._note(f"start {info['method']} {info['config']['rounds']}")

    def round(self, record: RoundRecord, clients: Sequence[ClientScore]) -> None:
        self.clients.append(clients)
        self._note(f"round {record.round}")

    def finish(self, result: Result) -> None:
        self._note("finish")

    def close(self) -> None:
        self._note("close")


def test_a_sink_hears_everything(tmp_path: Path) -> None:
    sink = Notebook()
    result = start(tiny(tmp_path), sinks=Sinks([("mine", sink)]))
    assert sink.heard == ["start fedavg 2", "round 1", "round 2", "finish", "close"]
    assert [c.accuracy for c in sink.clients[-1]] == pytest.approx([c.accuracy for c in result.per_client])
    assert [c.name for c in sink.clients[-1]] == [c.name for c in result.per_client]


@pytest.mark.parametrize("fails", ["start", "round", "finish", "close"])
def test_a_sink_that_raises_is_reported_once_and_left_alone(fails: str, tmp_path: Path) -> None:
    bad, good, said = Notebook(fails), Notebook(), []  # type: tuple[Notebook, Notebook, list[str]]
    config = tiny(tmp_path)
    result = start(config, sinks=Sinks([("bad", bad), ("good", good)]), say=said.append)
    assert said == ["sink bad is switched off for the rest of this run: ValueError: no ink"]
    assert bad.heard[-1].split()[0] == fails
    assert good.heard[-1] == "close"
    plain = run_config(config)
    assert [c.accuracy for c in result.per_client] == [c.accuracy for c in plain.per_client]


def test_a_sink_is_closed_when_the_run_fails(tmp_path: Path) -> None:
    sink = Notebook()

    def stop(event: Any) -> None:
        if isinstance(event, RoundRecord):
            raise RuntimeError("enough")

    with pytest.raises(RuntimeError):
        start(tiny(tmp_path), sinks=Sinks([("mine", sink)]), on_event=stop)
    assert sink.heard == ["start fedavg 2", "round 1", "close"]


# ---------------------------------------------------------------- TensorBoard


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = reader.EventAccumulator(str(folder))
    found.Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_tensorboard_files_hold_the_curves(tmp_path: Path) -> None:
    result = start(tiny(tmp_path), sinks=make_sinks(["tensorboard"]))
    found = scalars(Path(result.run or "") / "tensorboard")
    wanted = [(r.round, r.accuracy.macro) for r in result.history]
    assert [step for step, _ in found["accuracy/macro"]] == [1, 2]
    assert [v for _, v in found["accuracy/macro"]] == pytest.approx([v for _, v in wanted], rel=1e-5)
    assert [v for _, v in found["bytes/up"]] == [r.bytes_up for r in result.history]
    assert {"loss/train", "accuracy/worst_decile", "clients/failed", "seconds"} <= set(found)


def test_the_command_line_sends_to_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDKIN_RUNS", str(tmp_path / "runs"))
    words = [
        "compare",
        "fedavg",
        "local",
        "--rounds",
        "1",
        "--epochs",
        "1",
        "--clients",
        "5",
        "--way",
        "each",
        "--samples-per-client",
        "20",
        "--sink",
        f"tensorboard:{tmp_path / 'board'}",
        "--json",
    ]
    outcome = CliRunner().invoke(app, words)
    assert outcome.exit_code == 0, outcome.output
    for cell in json.loads(outcome.stdout)["cells"]:
        found = scalars(tmp_path / "board" / Path(cell["run"]).name)
        assert found["accuracy/macro"] == [(1, pytest.approx(cell["accuracy"]["macro"], rel=1e-5))]


# ---------------------------------------------------------------- never required


@pytest.mark.parametrize("name", list(SINKS))
def test_a_missing_package_names_the_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "find_spec", lambda package: None)
    with pytest.raises(UsageError, match=rf"pip install 'fedkin\[{name}\]'"):
        check_sinks([name])


def test_unknown_sinks_are_refused() -> None:
    with pytest.raises(UsageError, match="did you mean 'wandb'"):
        check_sinks(["wandbb"])


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    said: list[str] = []
    result = start(tiny(tmp_path), sinks=make_sinks(["wandb:test"]), say=said.append)
    assert not said
    assert list(Path(result.run or "").glob("wandb/offline-run-*/run-*.wandb"))


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="mlflow is not installed")
def test_mlflow_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    said: list[str] = []
    result = start(tiny(tmp_path / "runs"), sinks=make_sinks([f"mlflow:{tmp_path / 'ml'}"]), say=said.append)
    assert not said
    client = MlflowClient(str(tmp_path / "ml"))
    (run,) = client.search_runs([client.get_experiment_by_name("fedkin").experiment_id])
    assert run.info.status == "FINISHED"
    history = client.get_metric_history(run.info.run_id, "accuracy/macro")
    assert [(m.step, m.value) for m in history] == [(r.round, r.accuracy.macro) for r in result.history]
