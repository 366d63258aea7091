"""What the command line says when something cannot be used: in its own words, with the way out, and with status 2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedkin.cli.commands import app
from fedkin.cli.spoken import ELSEWHERE, as_flags
from fedkin.config import Config
from fedkin.models import build
from fedkin.preparation import Column, Preparation
from fedkin.use.model_file import Card, save


@pytest.fixture(autouse=True)
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "a.csv").write_text("age,dose,label\n1,2,x\n2,3,y\n")


def call(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("run fedavg --data nofile.csv", "--data nofile.csv: no such file"),
        ("run fedavg --data no/folder", "--data no/folder: no such file or folder"),
        ("run fedavg --set lam=1", "method 'fedavg' has no options of its own"),
        ("run ditto --set lamm=1", "method 'ditto' has no option 'lamm': did you mean 'lam'?"),
        ("methods mix", "a method of your own? --plugin FILE.py"),
        ("run fedavg --attack mix", "an attack of your own? --plugin FILE.py"),
        ("run fedcap --rule median", "--rule median would change nothing: every client's model is mixed by similarity"),
        ("run fedcap --rule median", "(eq. 3 of Li et al., ACSAC 2024)"),
        ("run fedavg --malicious 0.2", "for example --attack sf"),
        ("run fedavg --lr 0", "--lr 0: accepts a number above 0"),
        ("run fedavg --seeds 3 --lr 0.1", "for several seeds: fedkin compare fedavg --seeds 3 --lr 0.1"),
        ("run fedavg ditto", "for several: fedkin compare fedavg ditto"),
        ("run fedavg --learning-rate 0.1", "Did you mean --lr?"),
        ("run fedavg --partition pathological:30", "30 classes per client, but digits has 10"),
        ("run fedavg --clients 5000", "5000 clients, but digits has 1797 samples"),
        ("run fedavg --data empty", "holds no .npz, .parquet or .csv file"),
        ("run fedavg --data tables/a.csv --label kind", "expected a column 'kind'"),
        ("compare fedavg ditto --partition pathological:30", "30 classes per client"),
        ("compare fedper fedrep --clients 5 --rounds 1 --head no", "runs failed"),
    ],
)
def test_what_cannot_be_used_is_refused_with_the_way_out(
    words: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    refused = call(*words.split())
    assert refused.exit_code == 2
    assert says in " ".join(refused.stderr.split())


@pytest.mark.parametrize(
    ("said", "spoken"),
    [
        ("impute='local' would", "--impute local would"),
        ("say it, for example attack=sf", "say it, for example --attack sf"),
        ("attackers=1+8+10 says who", "--attackers 1+8+10 says who"),
        ("seed=3: taken", "--seed 3: taken"),
        ("augment=true needs images", "--augment needs images"),
        ("attack='lie:z=0.5': why", "--attack lie:z=0.5: why"),
        ("--rule krum:malicious=-1: malicious='-1': accepts", "--rule krum:malicious=-1: malicious='-1': accepts"),
        ("its own option lr=0.1 is used", "its own option lr=0.1 is used"),
        ("x.toml: rounds=0: accepts", "x.toml: rounds=0: accepts"),
        ("write VALUE, as in lr=0.01,0.1", "write VALUE, as in --lr 0.01,0.1"),
        ("ditto.lam=3, model_hash=1", "ditto.lam=3, model_hash=1"),
    ],
)
def test_settings_become_flags(said: str, spoken: str) -> None:
    assert as_flags(said) == spoken


def test_other_tools_names_lead_to_flags_that_there_are() -> None:
    flags = {"--" + name.replace("_", "-") for name in vars(Config())} | {"--seeds"}
    assert set(ELSEWHERE) <= flags
    assert not flags & {f"--{word}" for words in ELSEWHERE.values() for word in words}


def test_a_folder_of_tables_is_told_from_images(tmp_path: Path) -> None:
    model = build("mlp", (2,), 2)
    own = Preparation((Column("age"), Column("dose")))
    card = Card(
        "mlp", (2,), 2, "float32", 0, None, 0.0, 1.0, ("x", "y"), ("age", "dose"), "fedavg", "r", preparation=own
    )
    save(tmp_path / "m.safetensors", model, card)
    refused = call("predict", "--model", "m.safetensors", "--data", "tables")
    assert refused.exit_code == 2
    assert "a folder with data files (a.csv)" in refused.stderr
    assert "the model takes the columns age, dose" in refused.stderr
