"""Sites that bring tables: they agree on columns by name and on the words of categories, each prepares its own table,
and what comes of it is what a simulation of the same files makes. What sites say is checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pd = pytest.importorskip("pandas")
pytest.importorskip("cryptography")

from test_restore import InPerson  # noqa: E402

import fedkin as fk  # noqa: E402
from fedkin.config import make_config  # noqa: E402
from fedkin.deploy.greeting import Facts, fitting, together  # noqa: E402
from fedkin.deploy.joining import TRAVELS  # noqa: E402
from fedkin.deploy.server import _check, prepare_deployed  # noqa: E402
from fedkin.deploy.site_columns import plain, united  # noqa: E402
from fedkin.deploy.wire import pack, unpack  # noqa: E402
from fedkin.deploy.worker import Worker  # noqa: E402
from fedkin.engines.remote import Remote  # noqa: E402
from fedkin.errors import DataError, UsageError  # noqa: E402
from fedkin.rounds import drive  # noqa: E402
from fedkin.use.model_file import load  # noqa: E402

SETTINGS: dict[str, Any] = {"method": "fedper", "model": "mlp", "rounds": 2, "epochs": 1, "lr": 0.05, "device": "cpu"}


def write_tables(folder: Path) -> None:
    folder.mkdir()
    for i, (name, cities) in enumerate((("oslo", ["a", "b"]), ("paris", ["c", "b"]))):
        rng = np.random.default_rng(i)
        one = pd.DataFrame(
            {"age": rng.normal(50, 9, 40), "city": rng.choice(cities, 40), "label": rng.integers(0, 2, 40)}
        )
        one.loc[rng.random(40) < 0.2, "age"] = np.nan
        one[one.columns if i == 0 else one.columns[::-1]].to_csv(folder / f"{name}.csv", index=False)


class Seated(InPerson):
    """Takes the columns along."""

    def seat(self, job: Any, folder: Path) -> list[dict[str, Any]]:
        told = {k: v for k, v in job.config.to_dict().items() if k in TRAVELS}
        replies = []
        for place, worker in enumerate(self.workers):
            columns = plain(united([f.columns for f in self.facts]))
            fields = {"kind": "join", "run": "run-1", "attempt": 1, "round": 0, "place": place, "clients": 2}
            shared = {"labels": together(self.facts)[2], "columns": columns, "config": told}
            reply = worker.answer({"own": pack({"initial": job.site.initial}, {**fields, **shared})})
            replies.append(unpack(reply).fields)
        return replies


def deployed(folder: Path, **settings: Any) -> tuple[Any, list[dict[str, Any]], list[Worker]]:
    lines: list[str] = []
    workers = [
        Worker(name, folder / f"{name}.csv", folder.parent / name, lines.append, secret=False)
        for name in ("oslo", "paris")
    ]
    facts = [Facts.of(unpack(w.answer({"own": pack({}, {"kind": "hello"})})).fields) for w in workers]
    assert any("of 2 columns and of 2 words in them" in line for line in lines)
    found, odd = fitting(facts, 10)
    assert (found, odd) == (facts, {})
    carrier = Seated(workers, facts)
    job = prepare_deployed(make_config({**SETTINGS, **settings}), facts, Remote(carrier, ["oslo", "paris"]))
    carrier.attempt = 1
    return job, carrier.seat(job, folder), workers


@pytest.mark.parametrize("settings", [{"impute": "local", "scale": "local"}, {"impute": "local:words=frequent"}])
def test_sites_with_tables_do_what_a_simulation_does(settings: dict[str, Any], tmp_path: Path) -> None:
    write_tables(tmp_path / "sites")
    job, replies, workers = deployed(tmp_path / "sites", **settings)
    assert [r["kind"] for r in replies] == ["joined", "joined"], replies
    job.engine._checkpoints = lambda: []
    result = drive(job, None, lambda job, record: None)
    expected = fk.run(data=str(tmp_path / "sites"), **SETTINGS, **settings)
    assert result.accuracy == expected.accuracy
    for place, worker in enumerate(workers):
        made, wanted = load(next(worker.folder.rglob("personal.safetensors"))), expected.personal(place)
        assert made.card.preparation == wanted.samples.preparations[0]
        own = dict(made.module.named_parameters())
        for name, value in wanted.network.named_parameters():
            assert torch.allclose(own[name], value, atol=1e-6), name


def test_a_site_says_what_the_server_does_not_allow_for(tmp_path: Path) -> None:
    write_tables(tmp_path / "sites")
    _, replies, _ = deployed(tmp_path / "sites", scale="local")
    assert [r["kind"] for r in replies] == ["failed", "failed"]
    assert "column 'age' has no value in row" in replies[0]["reason"]


@pytest.mark.parametrize("name", ["impute", "scale"])
def test_federated_is_for_simulations(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}='federated': real sites prepare their tables each alone"):
        _check(make_config({name: "federated"}))


GOOD: dict[str, Any] = {"samples": 4, "tests": None, "shape": [2], "dtype": "float64", "labels": [0, 1]}
COLUMNS = [["age", []], ["city", ["a", "b"]]]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("age", "no proper list"),
        ([["age", []]], "names 1 columns, and its samples have the shape"),
        ([["age", []], ["age", []]], "two of its columns have one name"),
        ([["age", []], ["city", ["a", "a"]]], "has a word twice"),
        ([["age", []], ["city", list("abcde")]], "more than 4 words"),
        ([["age", []], ["city", [1]]], "names with the words"),
        ([["age", []], "city"], "names with the words"),
        ([["age", []], ["x" * 300, []]], "names with the words"),
        ([["age", []]] * 20_000, "no proper list"),
    ],
)
def test_what_a_site_says_of_columns_is_checked(columns: Any, message: str) -> None:
    assert Facts.of({"site": "a", **GOOD, "columns": COLUMNS}).dtype == "float32"
    with pytest.raises(DataError, match=message):
        Facts.of({"site": "a", **GOOD, "columns": columns})


def test_sites_with_other_columns_do_not_fit_and_nobody_keeps_others_out() -> None:
    usual = [Facts.of({"site": n, **GOOD, "columns": c}) for n, c in (("a", COLUMNS), ("b", COLUMNS[::-1]))]
    other = Facts.of({"site": "c", **GOOD, "columns": [["age", []], ["town", ["x"]]]})
    found, odd = fitting([*usual, other], 10)
    assert [f.name for f in found] == ["a", "b"]
    assert "it has the columns 'town' (words); most sites have the columns 'city' (words)" in odd["c"]
    with pytest.raises(DataError, match=r"site 'a' has the columns 'city' .words., site 'c' the columns 'town'"):
        together([*usual, other])
    many = [["age", []], ["city", [f"w{i}" for i in range(999)]]]
    greedy = Facts.of({"site": "0", **GOOD, "samples": 2000, "columns": many})
    found, odd = fitting([greedy, *usual], 10)
    assert [f.name for f in found] == ["a", "b"]
    assert "with its words a table has more than 1000 in a column" in odd["0"]
