"""Networks of a user's own by name: registered as they are, or named with their file on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import fedkin as fk
from fedkin import plugins
from fedkin.cli.commands import app
from fedkin.errors import UsageError
from fedkin.models import MODELS, ModelEntry, build

OWN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.flat, self.head = nn.Flatten(), nn.Linear(torch.Size(shape).numel(), classes)

    def forward(self, x):
        return {"logits": self.head(self.flat(x))}

made = Net((1, 8, 8), 10)
with torch.no_grad():
    made.head.weight.zero_()

def deep(width): return None
number = 3
"""
TINY = ["--clients", "5", "--rounds", "1", "--epochs", "1", "--device", "cpu", "--way", "each"]


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder, names and files of each test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDKIN_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(plugins, "_loaded", {})
    monkeypatch.setattr(MODELS, "_files", {})
    monkeypatch.setattr(MODELS, "_entries", dict(MODELS.items()))
    (tmp_path / "own.py").write_text(OWN)


def call(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


def test_a_class_and_a_function_are_registered_as_they_are_and_told_of_the_data() -> None:
    @fk.MODELS.register("told")
    class Told(nn.Sequential):
        def __init__(self, classes: int) -> None:
            super().__init__(nn.Flatten(), nn.Linear(64, classes))

    fk.MODELS.register("plain")(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
    assert issubclass(Told, nn.Sequential)
    for name in ("told", "plain"):
        first, again, other = (build(name, (1, 8, 8), 10, seed=seed) for seed in (0, 0, 1))
        assert torch.equal(first[1].weight, again[1].weight)
        assert not torch.equal(first[1].weight, other[1].weight), "other first weights at every seed"
    result = fk.run("fedavg", model="told", clients=5, rounds=1, device="cpu")
    assert result.config.model == "told"
    with pytest.raises(UsageError, match="model 'told' exists already"):
        fk.MODELS.register("told")(nn.Flatten)
    entry = ModelEntry(lambda *_: nn.Identity(), "for this test", "none")
    assert fk.MODELS.register("entry")(entry) is MODELS["entry"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (nn.Linear(2, 2), r"register what makes the network, fedkin.MODELS.register\('x'\)\(Linear\), and not"),
        (nn.Linear, "Linear needs in_features, out_features, and FedKin can tell a network shape, classes, vocabulary"),
        (dict, "is the class dict: give an nn.Module class, or a function that makes a network"),
        (3, "model 'x' is 3: give an nn.Module class"),
    ],
)
def test_what_cannot_serve_is_refused_when_it_is_registered(given: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        fk.MODELS.register("x")(given)
    assert "x" not in MODELS


def test_a_run_takes_a_network_from_a_file_and_goes_on_only_with_that_file(tmp_path: Path) -> None:
    done = call("run", "fedavg", "--model", "own.py:Net", *TINY, "--checkpoint-every", "1", "--json")
    assert done.exit_code == 0, done.stderr
    run = Path(json.loads(done.stdout)["run"])
    kept = json.loads((run / "run.json").read_text())
    assert kept["config"]["model"] == "own.py:Net"
    assert [Path(p["path"]).name for p in kept["plugins"]] == ["own.py"]
    plugins._loaded.clear()
    MODELS._files.clear()  # type: ignore[attr-defined]
    longer = ["resume", run.name, "--rounds", "2"]
    assert f"give it again, --plugin {tmp_path / 'own.py'}:Net" in call(*longer).stderr
    assert "nobody at this machine said that 'Net' in own.py is a network" in call(*longer, "--plugin", "own.py").stderr
    assert call(*longer, "--plugin", "own.py:Net").exit_code == 0
    assert call("export", run.name, "--to", "models", "--client", "client-0", "--plugin", "own.py").exit_code == 0
    (tmp_path / "own.py").write_text(OWN + "# changed\n")
    assert "changed since" in call("resume", run.name, "--rounds", "3", "--plugin", "own.py").stderr


def test_a_comparison_and_other_processes_know_the_file() -> None:
    words = ["compare", "fedavg", "fedprox", "--model", "own.py:Net", *TINY, "--jobs", "2", "--json"]
    assert [c["skipped"] for c in json.loads(call(*words).stdout)["cells"]] == [False, False]
    assert [c["skipped"] for c in json.loads(call(*words).stdout)["cells"]] == [True, True]


def test_weights_that_came_with_a_network_in_a_file_can_be_kept() -> None:
    job = {"model": "own.py:made", "rounds": 1, "clients": 5, "device": "cpu", "lr": 1e-30}
    plugins.give("own.py:made")
    kept = fk.run("fedavg", init="given", **job)  # type: ignore[arg-type]
    assert kept.personal(0).network.head.weight.abs().max() < 1e-6
    drawn = fk.run("fedavg", **job)  # type: ignore[arg-type]
    assert drawn.personal(0).network.head.weight.abs().max() > 1e-2


@pytest.mark.parametrize(
    ("model", "says"),
    [
        ("own.py", "give a file and what it calls the network"),
        ("own.py:Nett", "unknown name in own.py 'Nett': did you mean 'Net'"),
        ("own.py:deep", "deep needs width"),
        ("own.py:number", "is 3: give an nn.Module class"),
        ("none.py:Net", "cannot be read"),
    ],
)
def test_a_file_that_cannot_serve_is_refused_at_once(model: str, says: str) -> None:
    refused = call("run", "fedavg", "--model", model, *TINY)
    assert refused.exit_code == 2
    assert says in refused.stderr


def test_a_settings_file_runs_no_code(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text('method = "fedavg"\nmodel = "own.py:Net"\n')
    refused = call("run", "x.toml", *TINY)
    assert refused.exit_code == 2
    assert "stands in a file of yours, which is only run where you name it: --plugin own.py" in refused.stderr
    assert call("run", "x.toml", *TINY, "--plugin", "own.py").exit_code == 2, "nor does it say what is a network"
    assert call("run", "x.toml", *TINY, "--plugin", "own.py:Net").exit_code == 0
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "own.py").write_text(OWN)
    both = call("run", "fedavg", "--model", "more/own.py:Net", "--plugin", "own.py", *TINY)
    assert "another file of this name was run" in both.stderr


def test_a_model_file_of_such_a_network_is_used_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        OWN.replace("nn.Linear(torch.Size(shape).numel(), classes)", "nn.LazyLinear(classes)").partition("made =")[0]
    )
    words = ["--model", "own.py:Net", *TINY, "--checkpoint-every", "1", "--json"]
    run = Path(json.loads(call("run", "fedavg", *words).stdout)["run"])
    assert call("export", run.name, "--to", "models", "--client", "client-0").exit_code == 0
    digits = fk.data.load("digits")
    np.savez("new.npz", x=digits.x[:3])
    ask = ["predict", "--model", "models/client-0.safetensors", "--data", "new.npz", "--json"]
    found = json.loads(call(*ask).stdout)
    assert found["samples"] == 3
    MODELS._files.clear()
    plugins._loaded.clear()
    for more in ([], ["--plugin", "own.py"]):
        refused = call(*ask, *more)
        assert refused.exit_code == 2
        assert "--plugin FILE.py:NAME" in refused.stderr
    assert call(*ask, "--plugin", "own.py:Net").exit_code == 0


HELPERS = """
from os import abort
from pathlib import Path
import fedkin as fk
from torch import nn

def wipe():
    Path("wiped").touch()
    raise SystemExit(3)

@fk.MODELS.register("wide")
def wide(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))

fk.MODELS.register("flat")(nn.Flatten)
Flat = nn.Flatten
"""


def test_of_a_file_only_what_it_registers_or_its_person_named_is_a_network(tmp_path: Path) -> None:
    (tmp_path / "helpers.py").write_text(HELPERS)
    plugins.give("helpers.py")
    for name in ("wipe", "abort", "Path", "fk", "nn", "Flat", "__name__"):
        assert f"helpers.py:{name}" not in MODELS
        with pytest.raises(UsageError, match="nobody at this machine said"):
            build(f"helpers.py:{name}", (1, 8, 8), 10)
    assert not (tmp_path / "wiped").exists()
    assert isinstance(build("helpers.py:wide", (1, 8, 8), 10), nn.Sequential), "the file registers it"
    assert plugins.given() == [str(tmp_path / "helpers.py")]
    plugins.give("helpers.py:Flat")
    assert "helpers.py:Flat" in MODELS
    assert plugins.given() == [str(tmp_path / "helpers.py"), f"{tmp_path / 'helpers.py'}:Flat"]


def test_a_model_file_calls_no_function_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "helpers.py").write_text(HELPERS)
    card = fk.use.model_file.Card("helpers.py:wipe", (1, 8, 8), 10)
    fk.use.model_file.save("evil.safetensors", nn.Linear(2, 2), card)
    np.savez("new.npz", x=np.zeros((3, 1, 8, 8), np.float32))
    asked = call("predict", "--model", "evil.safetensors", "--data", "new.npz", "--plugin", "helpers.py")
    assert asked.exit_code == 2
    assert "the network 'helpers.py:wipe' is not known here" in asked.stderr
    assert not (tmp_path / "wiped").exists()
