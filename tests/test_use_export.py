"""Personal models for use elsewhere: ONNX gives what torch gives, and a run's models come out as they were."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from test_use_predict import SAMPLES, Own, card, network, samples
from torch import nn
from typer.testing import CliRunner

from fedkin.cli.application import app
from fedkin.config import make_config
from fedkin.data import from_arrays
from fedkin.errors import DataError, FedKinError, UsageError
from fedkin.rounds import run_config
from fedkin.runs import checkpoint
from fedkin.runs.catalogue import Catalogue
from fedkin.runs.start import start
from fedkin.use import export
from fedkin.use.model_file import Card, Personal, load, save

QUICK = ("cnn-512", "harcnn", "fasttext")  # pixels, series, text; the others are slow to export


def run_onnx(path: Path, x: Any) -> tuple[Any, Any]:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    logits, probabilities = session.run(["logits", "probabilities"], {"samples": x})
    return logits, probabilities


def expected(model: nn.Module, x: Any, mean: float = 0.3, std: float = 0.7) -> Any:
    inputs = torch.from_numpy(x)
    with torch.no_grad():
        return model((inputs.float() / 255 - mean) / std if x.dtype == np.uint8 else inputs).numpy()


@pytest.mark.parametrize("name", QUICK)
def test_onnx_equals_torch(tmp_path: Path, name: str) -> None:
    model = network(name)
    path = export.to_onnx(Personal(card(name), model), tmp_path / "deep" / "model.onnx")
    onnx.checker.check_model(str(path))
    for n in (1, 7):
        x = samples(name, n)
        logits, probabilities = run_onnx(path, x)
        wanted = expected(model, x)
        assert np.abs(logits - wanted).max() < 1e-4
        assert np.abs(probabilities - Personal(card(name), model).probabilities(x)).max() < 1e-4
        assert logits.shape == (n, 4)
    described = {p.key: p.value for p in onnx.load(path).metadata_props}
    assert json.loads(described["fedkin"])["site"] == "siteA"
    assert [p.name for p in path.parent.iterdir()] == ["model.onnx"]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(SAMPLES) - set(QUICK)))
def test_onnx_of_the_other_networks(tmp_path: Path, name: str) -> None:
    test_onnx_equals_torch(tmp_path, name)


def test_own_network(tmp_path: Path) -> None:
    own = Own().eval()
    path = export.to_onnx(Personal(Card(None, (6,), 4), own), tmp_path / "own.onnx")
    assert np.abs(run_onnx(path, samples("mlp"))[0] - expected(own, samples("mlp"))).max() < 1e-4


class Stubborn(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if float(x.sum()) > 0 else -x  # what it does depends on the numbers: no exporter follows


def test_a_network_that_cannot_be_exported(tmp_path: Path) -> None:
    with pytest.raises(FedKinError, match="cannot be written as ONNX"):
        export.to_onnx(Personal(Card(None, (4,), 4), Stubborn()), tmp_path / "x.onnx")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "pickle", "onnx,pt", ","])
def test_formats(text: str) -> None:
    with pytest.raises(UsageError, match="format"):
        export.formats(text)
    assert export.formats("onnx, safetensors,onnx") == ["onnx", "safetensors"]


def test_which() -> None:
    names = ["siteA", "siteB", "3", "siteD"]
    assert export.which(names, "all") == [0, 1, 2, 3]
    assert export.which(names, "siteB,0") == [1, 0]
    assert export.which(names, "3") == [2]  # a name goes before a number
    with pytest.raises(UsageError, match="did you mean 'siteA'"):
        export.which(["siteA", "other"], "sitA")
    with pytest.raises(UsageError, match="give a client's name"):
        export.which(names, ",")


# ---------------------------------------------------------------- from runs


SMALL = {
    "method": "fedper",
    "data": "digits",
    "clients": 3,
    "rounds": 2,
    "epochs": 1,
    "partition": "iid",
    "model": "mlp",
    "device": "cpu",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("runs")
    return folder, start(make_config({**SMALL, "runs_dir": str(folder)}))


def same(one: nn.Module, two: nn.Module) -> None:
    for a, b in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_models_of_a_run(runs: tuple[Path, Any], tmp_path: Path) -> None:
    folder, result = runs
    written = export.export_run("last", "all", tmp_path, ["safetensors"], folder)
    assert [p.name for p in written] == [f"{c.name}.safetensors" for c in result.per_client]
    for i, path in enumerate(written):
        back = load(path)
        same(back.module, result.personal(i))
        assert (back.card.method, back.card.round, back.card.site) == ("fedper", 2, result.per_client[i].name)
        assert back.card.run == Catalogue(folder).find("last").info.id
        assert back.card.class_names == tuple("0123456789")
    with pytest.raises(AssertionError):
        same(load(written[0]).module, result.personal(1))


def test_the_run_is_only_read(runs: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = runs
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    export.export_run("last", "0", tmp_path, ["safetensors"], folder)
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before


def test_a_method_with_a_holdout_is_restored_with_it(tmp_path: Path) -> None:
    result = start(make_config({**SMALL, "method": "c-pfl", "runs_dir": str(tmp_path / "runs")}))
    [path] = export.export_run("last", "1", tmp_path / "out", ["safetensors"], tmp_path / "runs")
    same(load(path).module, result.personal(1))


def test_runs_that_have_no_models_to_give(tmp_path: Path) -> None:
    folder = tmp_path / "runs"
    start(make_config({**SMALL, "runs_dir": str(folder)}))
    run = Catalogue(folder).find("last")
    names = checkpoint.names(run.path / "checkpoints")
    for name in names:
        path = run.path / "checkpoints" / f"{name}.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(DataError, match="no sound checkpoint is left"):
        export.export_run("last", "0", tmp_path / "out", ["safetensors"], folder)
    for name in names:
        checkpoint.remove(run.path / "checkpoints", name)
    with pytest.raises(DataError, match="has no checkpoint"):
        export.export_run("last", "0", tmp_path / "out", ["safetensors"], folder)


def test_a_deployments_models_are_at_the_sites(runs: tuple[Path, Any], tmp_path: Path) -> None:
    folder = tmp_path / "deployed"
    shutil.copytree(Catalogue(runs[0]).find("last").path, folder)
    written = json.loads((folder / "run.json").read_text())
    written["config"]["data"] = "sites"
    (folder / "run.json").write_text(json.dumps(written))
    with pytest.raises(UsageError, match="each site has its own model"):
        export.export_run("deployed", "0", tmp_path / "out", ["safetensors"], tmp_path)


def test_a_run_with_its_own_network_is_exported_from_python(tmp_path: Path) -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(64, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(x.flatten(1))
            return out

    result = start(
        make_config({**SMALL, "model": None, "method": "ditto", "runs_dir": str(tmp_path / "runs")}), model=Flat()
    )
    with pytest.raises(UsageError, match="model as Python objects"):
        export.export_run("last", "0", tmp_path / "out", ["safetensors"], tmp_path / "runs")
    own = Card(None, (1, 8, 8), 10, "uint8")
    [path] = export.from_result(result, own, [2], tmp_path / "out", ["safetensors"])
    same(load(path, Flat()).module, result.personal(2))


def test_names_of_clients_make_safe_names_of_files(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).standard_normal((12, 6)).astype(np.float32), np.arange(12) % 4
    clients = [(x, y)] * 3
    names = ["../a b", "..-a-b", "/"]
    result = run_config(make_config({"rounds": 1, "model": "mlp"}), data=from_arrays(clients, names=names))
    written = export.from_result(result, card("mlp"), [0, 1, 2], tmp_path / "out", ["safetensors"])
    assert {p.parent for p in written} == {tmp_path / "out"}
    assert len({p.name for p in written}) == 3


# ---------------------------------------------------------------- the command


def test_command(runs: tuple[Path, Any], tmp_path: Path) -> None:
    folder, result = runs

    def fedkin(*words: str, code: int = 0) -> str:
        outcome = CliRunner().invoke(app, ["export", *words])
        assert outcome.exit_code == code, outcome.output
        return outcome.output

    there = ["--runs-dir", str(folder)]
    name = result.per_client[1].name
    out = fedkin("last", *there, "--client", name, "--to", str(tmp_path), "--json")
    [path] = json.loads(out)["files"]
    assert path == str(tmp_path / f"{name}.safetensors")
    assert f"{name}.onnx" in fedkin(path, "--format", "onnx")
    x = np.random.default_rng(2).integers(0, 17, (5, 1, 8, 8)).astype(np.uint8)
    assert np.abs(run_onnx(tmp_path / f"{name}.onnx", x)[1] - load(path).probabilities(x)).max() < 1e-4
    assert "already; choose --format onnx" in fedkin(path, code=2)
    assert "--to DIR is missing" in fedkin("last", *there, code=2)
    assert "unknown client 'nobody'" in fedkin("last", *there, "--client", "nobody", "--to", str(tmp_path), code=2)
    assert "unknown run" in fedkin("none", *there, "--to", str(tmp_path), code=2)
    assert "no such model file" in fedkin("missing.safetensors", "--format", "onnx", code=2)


def test_conversion_keeps_everything(tmp_path: Path) -> None:
    path = save(tmp_path / "personal.safetensors", network("mlp"), card("mlp"))
    written = export.convert(path, ["safetensors", "onnx"], tmp_path / "other")
    assert [p.name for p in written] == ["personal.safetensors", "personal.onnx"]
    assert written[0].read_bytes() == path.read_bytes()
