"""The web page's server: what it answers, whom it lets in, and what hostile run folders cannot make it do."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click
import httpx
import numpy as np
import pytest
import typer

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

from colours import contrast, looks
from starlette.testclient import TestClient

from fedkin.cli.application import app
from fedkin.config import make_config
from fedkin.errors import DataError, UsageError
from fedkin.report import one_client, palette, svg
from fedkin.report.figures import Across, Bars, Columns, Figure, Lines, Part, Series, Strips
from fedkin.report.one_run import FIGURES
from fedkin.report.page import write_report
from fedkin.report.queries import PAGE, select
from fedkin.report.saving import as_csv
from fedkin.runs.database import TABLES, Database, create
from fedkin.runs.folder import RunFolder
from fedkin.web import stream as live
from fedkin.web import views
from fedkin.web.guard import check_binding
from fedkin.web.routes import create_app, report_policy
from fedkin.web.stream import Streams, place_of

TOKEN = "a-token-of-sufficient-length"
SCRIPT = "<script>alert(1)</script>"


def facts(name: str = "made", **more: Any) -> dict[str, Any]:
    """A run.json."""
    config = make_config({"method": "fedcap", "attack": "ipm", "rounds": 4, "clients": 3}).to_dict()
    config |= more.pop("config", {})
    accuracy = {"micro": 90.0, "macro": 91.0, "worst_decile": 80.0, "std": 3.0}
    result = {
        "accuracy": accuracy,
        "best": {"round": 3, **accuracy},
        "bytes": {"down": 1000, "up": 2000},
        "seconds": 1.5,
        "removed": {"1": 2},
        "detection": None,
        "rounds_done": 4,
    }
    return {
        "format": 1,
        "id": name,
        "created": "2026-01-02T03:04:05Z",
        "updated": "2026-01-02T03:05:05Z",
        "status": "finished",
        "pid": 1,
        "error": None,
        "config": config,
        "options": {"alpha": 10},
        "identity": "0" * 64,
        "rounds_done": 4,
        "environment": {"fedkin": "0.1.0"},
        "prepared": {"clients": 3, "classes": 2, "split_hash": "ab" * 32},
        "names": ["a", "b", "c"],
        "malicious": [1],
        "result": result,
        **more,
    }


def make_run(runs: Path, name: str = "made", rounds: int = 4, clients: int = 3, **more: Any) -> Path:
    """A run folder with plain numbers in every table."""
    folder = runs / name
    folder.mkdir(parents=True)
    more.setdefault("names", [f"client-{c}" for c in range(clients)])
    (folder / "run.json").write_text(json.dumps(facts(name, **more)))
    create(folder / "metrics.sqlite")
    base = Database(folder / "metrics.sqlite")
    fill(base, range(1, rounds + 1), clients)
    base.close()
    counts = np.arange(2 * clients).reshape(clients, 2)
    ends = {f"{part}_ends": np.arange(1, clients + 1) for part in ("train", "validation", "test")}
    rows = {part: np.arange(clients) for part in ("train", "validation", "test")}
    np.savez_compressed(folder / "split.npz", names=np.array(more["names"]), class_counts=counts, **rows, **ends)
    return folder


def fill(base: Database, rounds: Any, clients: int) -> None:
    for r in rounds:
        values = {
            "round": r,
            "final": 0,
            "macro": 50.0 + r,
            "worst_decile": 40.0 + r,
            "bytes_down": 100 * r,
            "bytes_up": 50 * r,
        }
        base.add("rounds", [[values.get(c, None if c.endswith("metrics") else 1.0) for c in TABLES["rounds"]]])
        told = {"round": r, "final": 0, "correct": 8, "count": 10, "accuracy": 80.0, "loss": 0.5}
        people = [{**told, "client": c, "name": f"client-{c}"} for c in range(clients)]
        base.add("clients", [[person.get(column) for column in TABLES["clients"]] for person in people])
        base.add("exchanges", [(r, r, "train", clients, clients, 100, 50, 0.1)])
        base.add("traffic", [(r, "train", r, c, 10, 5, 0.01) for c in range(clients)])
        base.add(
            "notes",
            [
                (r, "norms", json.dumps([1.0] * clients)),
                (r, "t_norm", "10.0"),
                (r, "judged", json.dumps({"clients": list(range(clients)), "used": [True] * clients})),
                (r, "members", json.dumps(list(range(clients)))),
                (r, "weights", json.dumps([[round(1 / clients, 4)] * clients] * clients)),
            ],
        )
    base.add("events", [(2, "", 1, "removed", "by fedcap")])
    base.commit()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    folder.mkdir()
    return folder


def client_of(runs: Path, **how: Any) -> TestClient:
    return TestClient(create_app(runs, **how), base_url="http://127.0.0.1:8765", follow_redirects=False)


def raw_get(app: Any, path: str, query: str = "") -> tuple[int, dict[str, str], str]:
    """As a client asks that does not tidy up addresses first."""
    import asyncio
    from urllib.parse import unquote

    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "GET",
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [(b"host", b"127.0.0.1")],
        "http_version": "1.1",
        "scheme": "http",
        "root_path": "",
        "server": ("127.0.0.1", 8765),
        "client": ("127.0.0.1", 1),
        "asgi": {"version": "3.0"},
    }
    asyncio.run(asyncio.wait_for(app(scope, receive, send), 20))
    headers = {k.decode(): v.decode() for k, v in sent[0]["headers"]}
    return sent[0]["status"], headers, b"".join(m.get("body", b"") for m in sent[1:]).decode()


@pytest.fixture
def web(runs: Path) -> TestClient:
    return client_of(runs)


# ---------------------------------------------------------------- a real run, from start to page


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Two methods for three rounds each, and what their results were."""
    from fedkin.runs.start import start

    runs = tmp_path_factory.mktemp("real")
    common = {
        "data": "digits",
        "clients": 10,
        "rounds": 3,
        "epochs": 1,
        "attack": "ipm",
        "runs_dir": str(runs),
        "model": "mlp",
    }
    results = {}
    for method in ("fedcap", "c-pfl", "pfedcs", "co-pfl"):
        result = start(make_config({**common, "method": method}))
        results[Path(str(result.run)).name] = result
    return runs, results


def test_every_page_of_a_real_run_answers_with_its_numbers(real: tuple[Path, dict[str, Any]]) -> None:
    runs, results = real
    web = client_of(runs)
    listed = {row["id"]: row for row in web.get("/api/runs").json()["runs"]}
    assert set(listed) == set(results)
    for name, result in results.items():
        assert listed[name]["macro"] == pytest.approx(result.accuracy.macro)
        assert listed[name]["bytes"] == sum(result.bytes.values())
        page = web.get(f"/api/runs/{name}").json()
        by_round = [record for record in result.history if not record.final]
        assert page["curves"]["macro"] == pytest.approx([record.accuracy.macro for record in by_round])
        assert page["curves"]["bytes_up"] == [record.bytes_up for record in by_round]
        assert (page["final"] is not None) == any(record.final for record in result.history)
        assert page["malicious"] == result.malicious
        found = web.get(f"/api/runs/{name}/clients").json()["clients"]
        assert [c["accuracy"] for c in found] == pytest.approx([c.accuracy for c in result.per_client])
        assert [c["malicious"] for c in found] == [c.client in result.malicious for c in result.per_client]
        sent = panels(web, name, "cost-per-phase")[0]
        assert [sum(part["values"]) for part in sent["parts"]] == [result.bytes["down"], result.bytes["up"]]
        one = web.get(f"/api/runs/{name}/clients/2").json()
        assert one["series"]["accuracy"][-1] == pytest.approx(result.per_client[2].accuracy)
        assert sum(c["count"] for c in one["classes"]) == result.per_client[2].train_samples
        assert result.prepared.split_hash[:12] in web.get(f"/api/runs/{name}/figures/split").json()["caption"]
        (split,) = panels(web, name, "split")
        assert [sum(v or 0 for v in row) for row in split["values"]] == [c.train_samples for c in result.per_client]
        for path in (f"/run/{name}", f"/run/{name}/client/2"):
            assert web.get(path).status_code == 200


def panels(web: TestClient, name: str, figure: str, **query: Any) -> list[dict[str, Any]]:
    """What a figure is made of; nothing where the page says why there is none."""
    answer = web.get(f"/api/runs/{name}/figures/{figure}", params=query)
    assert answer.status_code == 200, answer.text[:300]
    found: list[dict[str, Any]] = answer.json().get("panels", [])
    assert bool(found) != bool(answer.json().get("why"))
    return found


def test_figures_show_what_the_methods_noted(real: tuple[Path, dict[str, Any]]) -> None:
    runs, results = real
    web = client_of(runs)
    for name, result in results.items():
        own = {figure: panels(web, name, figure) for figure in ("matrix", "committee", "lengths", "contributions")}
        expected = {"fedcap": {"matrix", "lengths"}, "c-pfl": {"committee"}, "pfedcs": {"matrix"}}
        assert {k for k, found in own.items() if found} == expected.get(result.method, {"contributions"})
        for matrix in own["matrix"]:
            key = "weights" if result.method == "fedcap" else "collaborators"
            last = [n for n in result.notes if n.name == key][-1]
            who = [
                n.value for n in result.notes if n.name == ("members" if result.method == "fedcap" else "participants")
            ]
            at = [sorted({c for ids in who for c in ids}).index(c) for c in who[-1]]
            assert np.allclose(np.array(matrix["values"], float)[np.ix_(at, at)], last.value, atol=1e-6)
            assert sorted(matrix["order"]) == list(range(len(matrix["values"])))
            first = panels(web, name, "matrix", round=1)[0]
            assert first["order"] == matrix["order"]  # rows stay where they are as one moves through the rounds
            assert first["values"] != matrix["values"]
        for weights in own["contributions"][:1]:
            alpha = [n.value.tolist() for n in result.notes if n.name == "alpha"]
            assert np.allclose(np.array(weights["values"]).T, np.array(alpha), atol=1e-6)
        removed = {
            e["row"]: e["round"]
            for timeline in panels(web, name, "removals")
            for e in timeline["events"]
            if e["kind"] == "removed"
        }
        order = [*sorted(result.malicious), *(c for c in range(10) if c not in result.malicious)]
        assert {order[row]: r for row, r in removed.items()} == {c: r + 1 for c, r in result.removed.items()}


def test_report_and_page_show_the_same_figures(real: tuple[Path, dict[str, Any]], monkeypatch: Any) -> None:
    """For every figure of a run: the numbers, the order of clients, the words, the units and the colours that the
    report draws are those that the page's scripts are handed."""
    runs, results = real
    web = client_of(runs)
    drawn: dict[str, Any] = {}
    monkeypatch.setattr(svg, "draw", lambda figure, draw=svg.draw: drawn.update({figure.name: figure}) or draw(figure))
    seen = set()
    for name in results:
        drawn.clear()
        write_report([RunFolder.open(runs / name)], runs.parent / f"report-{name}")
        for key in FIGURES:
            there = web.get(f"/api/runs/{name}/figures/{key}").json()
            assert (key in drawn) == ("why" not in there) or key == "bytes-per-round", (name, key)
            if key not in drawn:
                continue
            seen.add(key)
            mine = drawn[key]
            assert (there["title"], there["caption"]) == (mine.title, mine.caption)
            assert [panel["kind"] for panel in there["panels"]] == [type(panel).__name__ for panel in mine.panels]
            for panel, own in zip(there["panels"], mine.panels, strict=True):
                assert same(panel, own), (name, key)
    assert seen == set(FIGURES) - {"bytes-per-round", "prototypes"}


def test_report_and_page_have_clients_in_one_order(real: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """As they are drawn: in the report's slider and its picture, and by the page's scripts from the order they are
    handed. Similar clients once stood together in two ways."""
    runs, results = real
    name = next(name for name, result in results.items() if result.method == "pfedcs")
    (file,), _ = write_report([RunFolder.open(runs / name)], tmp_path)
    html = file.read_text()
    (slider,) = (json.loads(x) for x in re.findall(r'json">(.*?)</script>', html, re.S) if "frames" in x)
    picture = html[html.index('id="s1-matrix"') :]
    drawn = re.findall(r">(client-\d+)\*?</text>", picture[: picture.index("</svg>")])
    (matrix,) = panels(client_of(runs), name, "matrix")
    assert matrix["order"] != sorted(matrix["order"])
    ordered = [matrix["rows"][i] for i in matrix["order"]]
    assert [shown.rstrip("*") for shown in slider["names"]] == ordered
    assert drawn == ordered * 2  # across and down


def same(told: Any, drawn: Any) -> bool:
    """A figure's part as JSON has it, against what is drawn: all of its fields."""
    if isinstance(told, dict) and not isinstance(drawn, dict):
        return all(same(told[k], getattr(drawn, k)) for k in told if k != "kind")
    if isinstance(told, dict):
        return told.keys() == drawn.keys() and all(same(told[k], drawn[k]) for k in told)
    if isinstance(told, list):
        return len(told) == len(drawn) and all(map(same, told, list(drawn)))
    if told is None or isinstance(told, float):
        return (told is None and drawn is None) or np.isclose(np.nan if told is None else told, drawn, equal_nan=True)
    return bool(told == drawn)


def test_the_scripts_have_no_words_units_or_colours_of_their_own(real: tuple[Path, dict[str, Any]]) -> None:
    """Of figures that the report has too: what the reader sees is said in report/ alone."""
    runs, results = real
    web = client_of(runs)
    static = Path(views.__file__).parent / "static"
    drawing = "".join((static / name).read_text() for name in ("figures.js", "charts.js"))
    ours = "".join(path.read_text() for path in static.glob("*.js"))
    pages = "".join((static.parent / "templates" / name).read_text() for name in ("run.html", "compare.html"))
    said = {plan.title for plan in FIGURES.values()}
    for name in results:
        for key in FIGURES:
            for panel in panels(web, name, key):
                said |= {panel[k] for k in ("x", "y", "what", "title") if panel.get(k)}
                said |= {one["label"] for k in ("series", "parts") for one in panel.get(k, [])}
    assert {"Who learns from whom", "learns from", "to the server", "threshold", "test accuracy, %"} <= said
    assert not [words for words in said - {"round", "client"} if words in re.findall(r'"([^"]*)"', drawing)]
    assert not [plan.title for plan in FIGURES.values() if f">{plan.title}<" in pages or f'"{plan.title}"' in pages]
    styles = (static / "style.css").read_text()
    for colours in (palette.SERIES, palette.DARK_SERIES, palette.HEAT, palette.LIGHT.values(), palette.DARK.values()):
        assert not [c for c in colours if c in ours + pages]
    assert not re.search(r"--(?:c\d|h\d+|ink|muted|grid|paper|soft|link|bad):", styles)
    served = web.get("/palette.css").text
    (file,), _ = write_report([RunFolder.open(runs / next(iter(results)))], runs.parent / "report")
    assert palette.css() in served
    assert palette.css() in file.read_text()
    assert '<link rel="stylesheet" href="/palette.css">' in web.get("/").text


def test_compare_overlays_curves_and_names_the_differences(real: tuple[Path, dict[str, Any]]) -> None:
    runs, results = real
    web = client_of(runs)
    page = web.get("/api/compare", params={"run": list(results)}).json()
    assert [run["id"] for run in page["runs"]] == list(results)
    for measure, figure, x in (("macro", 0, "round"), ("test_loss", 1, "megabytes, both ways")):
        query = {"run": list(results), "measure": measure}
        (panel,) = web.get("/api/compare", params=query).json()["figures"][figure]["panels"]
        assert panel["x"] == x
        lines = {one["label"].split(",")[0]: one["y"] for one in panel["series"]}
        for name, result in results.items():
            own = [r.test_loss if measure == "test_loss" else r.accuracy.macro for r in result.history if not r.final]
            assert lines[result.method] == pytest.approx(own), name
    assert web.get("/api/compare", params={"run": list(results), "measure": "x"}).status_code == 404
    assert len({one["label"] for one in page["figures"][0]["panels"][0]["series"]}) == 4
    diff = {line["key"]: line["values"] for line in page["diff"]}
    assert diff["method"] == [r.method for r in results.values()]
    assert "rounds" not in diff
    assert web.get("/api/compare", params={"run": [next(iter(results))]}).status_code == 404
    many = web.get("/api/compare", params={"run": [f"run-{i}" for i in range(views.MOST_COMPARED + 1)]})
    assert "25 runs to compare" in many.json()["error"]
    assert web.get("/compare").status_code == 200


def test_runs_that_differ_in_the_seed_form_a_group(runs: Path, web: TestClient) -> None:
    for name, config in (("one", {"seed": 0}), ("two", {"seed": 1}), ("three", {"seed": 0, "lr": 0.5})):
        make_run(runs, name, config=config)
    page = web.get("/api/compare?run=one&run=two&run=three").json()
    one, two, three = page["runs"]
    assert one["group"] == two["group"] != three["group"]
    assert len(page["figures"][0]["panels"][0]["series"]) == 2
    each = web.get("/api/compare?run=one&run=two&run=three&seeds=false").json()["figures"][0]["panels"][0]["series"]
    assert len({line["label"] for line in each}) == 3


# ---------------------------------------------------------------- the list


def test_filters_sorting_and_paging(runs: Path, web: TestClient) -> None:
    for i, method in enumerate(["fedcap", "fedavg", "fedavg", "ditto"]):
        result = {**facts()["result"], "accuracy": {"macro": [70.0, 90.0, None, 80.0][i]}}
        make_run(
            runs,
            f"run-{i}",
            config={"method": method, "attack": "none" if i else "ipm"},
            result=result,
            created=f"2026-01-0{i + 1}T00:00:00Z",
        )

    def names(**query: Any) -> list[str]:
        return [row["id"][-1] for row in web.get("/api/runs", params=query).json()["runs"]]

    assert names() == ["3", "2", "1", "0"]  # newest first
    assert names(method="fedavg") == ["2", "1"]
    assert names(method="fedavg", attack="ipm") == []
    assert names(text="ditto none") == ["3"]
    assert names(sort="macro") == ["1", "3", "0", "2"]  # unknown last, whichever way
    assert names(sort="accuracy") == names(sort="macro")
    assert names(sort="macro", order="up") == ["0", "3", "1", "2"]
    assert names(offset=1, limit=2) == ["2", "1"]
    page = web.get("/api/runs", params={"method": "fedavg", "limit": 1}).json()
    assert (page["all"], page["total"], len(page["runs"])) == (4, 2, 1)
    assert page["facets"]["method"] == ["ditto", "fedavg", "fedcap"]
    assert "sort by" in web.get("/api/runs", params={"sort": "nonsense"}).json()["error"]
    assert web.get("/api/runs", params={"limit": 0}).status_code == 400
    assert web.get("/api/runs", params={"limit": "many"}).status_code == 400


def test_a_run_says_what_can_be_done_next(runs: Path, web: TestClient) -> None:
    """What its folder cannot give is not offered."""
    make_run(runs, "bare")
    make_run(runs, "stopped", status="interrupted")
    make_run(runs, "broke", status="failed", objects=["model"])
    (make_run(runs, "going", status="interrupted", rounds_done=0) / "sites.json").write_text("[]")
    for name in ("done", "served", "given"):
        folder = make_run(runs, name, **({"objects": ["model"]} if name == "given" else {}))
        (folder / "checkpoints").mkdir()
        for end in ("json", "safetensors"):
            (folder / "checkpoints" / f"round-000004.{end}").write_bytes(b"")
    (runs / "served" / "sites.json").write_text("[]")
    where, server = f" --runs-dir {runs}", " --keys keys --host 0.0.0.0"

    def steps(name: str) -> list[str]:
        told = web.get(f"/api/runs/{name}").json()["next"]
        assert all(step["words"] and step["command"].endswith(where) for step in told)
        return [step["command"].removesuffix(where) for step in told]

    assert steps("bare") == ["fedkin report bare", "fedkin show bare"]
    assert steps("stopped") == ["fedkin resume stopped", "fedkin report stopped", "fedkin show stopped"]
    assert steps("broke") == ["fedkin report broke", "fedkin show broke"]
    assert steps("going") == [f"fedkin server --resume going{server}", "fedkin show going"]
    assert steps("done")[:3] == [
        "fedkin resume done --rounds 8",
        "fedkin join done --data NEW.csv",
        "fedkin export done --client all --to models",
    ]
    assert steps("served")[0] == f"fedkin server --join served{server}"
    assert steps("given") == ["fedkin report given", "fedkin show given"]
    known = typer.main.get_command(app)
    for name in ("stopped", "going", "done", "served"):
        for words in map(str.split, steps(name)):
            assert isinstance(known, click.Group)
            options = {o for p in known.commands[words[1]].params for o in p.opts}
            assert {w for w in words if w.startswith("--")} | {"--runs-dir"} <= options, words


# ---------------------------------------------------------------- figures as files


def test_a_figure_is_saved_as_the_report_draws_it_and_as_its_numbers(real: tuple[Path, dict[str, Any]]) -> None:
    runs, results = real
    web = client_of(runs)
    for name, result in results.items():
        for figure in FIGURES:
            shown, numbers = (web.get(f"/api/runs/{name}/figures/{figure}{rest}") for rest in ("", "/csv"))
            if "why" in shown.json():
                assert numbers.status_code == 404
                assert shown.json()["why"] in numbers.json()["error"]
            else:
                assert len(list(csv.reader(io.StringIO(numbers.text)))) > 1
        rows = list(csv.reader(io.StringIO(web.get(f"/api/runs/{name}/figures/accuracy-per-round/csv").text)))
        assert rows[0] == ["line", "round", "test accuracy, %", "low", "high"]
        macro = [float(row[2]) for row in rows if row[0] == "macro"]
        assert macro == [r.accuracy.macro for r in result.history if not r.final]
    name = next(n for n in results if n.startswith("pfedcs"))
    for figure in ("accuracy-per-round", "matrix"):
        drawing = web.get(f"/api/runs/{name}/figures/{figure}/svg")
        made = views.figure_of(RunFolder.open(str(runs / name)), figure)
        assert isinstance(made, Figure)
        assert drawing.content == svg.save(svg.draw(made), "svg")
        assert drawing.headers["content-disposition"] == f'attachment; filename="{name}-{figure}.svg"'
        assert drawing.headers["content-type"] == "image/svg+xml"
        assert "default-src 'none'; sandbox" in drawing.headers["content-security-policy"]


def test_one_round_of_who_learns_from_whom_is_saved(real: tuple[Path, dict[str, Any]]) -> None:
    runs, results = real
    web, name = client_of(runs), next(n for n in results if n.startswith("pfedcs"))
    first, last = (web.get(f"/api/runs/{name}/figures/matrix/csv?round={r}") for r in (1, 3))
    assert first.headers["content-disposition"] == f'attachment; filename="{name}-matrix-round-1.csv"'
    assert first.text != last.text
    table = list(csv.reader(io.StringIO(first.text)))
    panel = web.get(f"/api/runs/{name}/figures/matrix?round=1").json()["panels"][0]
    assert table[0][1:] == panel["columns"]
    assert [row[0] for row in table[1:]] == panel["rows"]
    assert [[float(v) if v else None for v in row[1:]] for row in table[1:]] == panel["values"]


def test_figures_of_clients_and_of_several_runs_are_saved(real: tuple[Path, dict[str, Any]]) -> None:
    runs, results = real
    web, (one, two, *_) = client_of(runs), results
    for figure in one_client.FIGURES:
        for kind in ("svg", "csv") if figure in ("loss", "classes") else ("csv",):
            answer = web.get(f"/api/runs/{one}/clients/3/figures/{figure}/{kind}")
            assert answer.status_code == 200, answer.text
            assert f"{one}-client-3-{figure}.{kind}" in answer.headers["content-disposition"]
    shown = web.get(f"/api/runs/{one}/clients/3").json()
    panel = web.get(f"/api/runs/{one}/clients/3/figures/accuracy").json()["panels"][0]
    assert panel["series"][0]["y"] == shown["series"]["accuracy"]
    assert panel["series"][1]["y"] == shown["macro"]
    traffic = web.get(f"/api/runs/{one}/clients/3/figures/bytes").json()["panels"][0]
    assert [line["y"][-1] for line in traffic["series"]] == [shown["bytes_down"], shown["bytes_up"]]
    several = {"run": [one, two], "measure": "worst_decile"}
    rows = list(csv.reader(io.StringIO(web.get("/api/compare/per-round/csv", params=several).text)))
    assert {row[0] for row in rows[1:]} == {"fedcap", "c-pfl", "c-pfl, after the last fine-tuning"}
    drawing = web.get("/api/compare/per-megabyte/svg", params=several)
    assert drawing.headers["content-disposition"] == 'attachment; filename="compare-per-megabyte-worst_decile.svg"'
    assert drawing.content.startswith(b"<?xml")


def test_what_cannot_be_saved_says_why(runs: Path, web: TestClient) -> None:
    make_run(runs)
    for path, why in {
        "/api/runs/made/figures/split/exe": "unknown format 'exe'",
        "/api/runs/made/figures/nothing/svg": "unknown figure 'nothing'",
        "/api/runs/made/clients/9/figures/loss/svg": "clients 0 to 2",
        "/api/runs/made/clients/1/figures/nothing/csv": "unknown figure 'nothing'",
        "/api/compare/per-round/svg?run=made": "select from 2",
        "/api/compare/per-year/svg?run=made&run=made&run=other": "",
    }.items():
        answer = web.get(path)
        assert answer.status_code == 404, path
        assert why in answer.json()["error"]


def test_names_in_files_are_neither_markup_nor_formulas(runs: Path, web: TestClient) -> None:
    """A spreadsheet computes what begins with an equals sign, a browser what looks like an element."""
    make_run(runs, names=["=cmd|' /C calc'!A0", SCRIPT, "a,b\n\x00c"])
    table = list(csv.reader(io.StringIO(web.get("/api/runs/made/figures/split/csv").text)))
    assert [row[0] for row in table[1:3]] == ["'=cmd|' /C calc'!A0", SCRIPT]
    assert table[3][0].startswith("a,b")
    for figure in ("split", "removals", "matrix"):
        answer = web.get(f"/api/runs/made/figures/{figure}/svg")
        assert answer.status_code == 200
        assert "<script" not in answer.text
        ElementTree.fromstring(answer.text)
        assert not re.search(r"(?:href|src)=\"(?!#|data:image/png)", answer.text)


@pytest.mark.parametrize(
    ("panel", "rows"),
    [
        (
            Lines("round", "loss", "", [Series("a", np.array([1.0, 2.0]), np.array([0.5, np.nan]), last=0.25)]),
            [
                ["line", "round", "loss"],
                ["a", "1", "0.5"],
                ["a", "2", ""],
                ["a, after the last fine-tuning", "2", "0.25"],
            ],
        ),
        (
            Columns(
                "client",
                "votes",
                "%",
                ["x", "y"],
                np.array([1.0, 2.5]),
                [("in", 0), ("out", 1)],
                [0, 1],
                [Across("tau", 2, 2)],
            ),
            [["client", "votes", "group"], ["x", "1", "in"], ["y", "2.5", "out"], ["tau", "2", "line"]],
        ),
        (Strips("gain", {"a": np.array([-1.0, 2.0])}), [["", "gain"], ["a", "-1"], ["a", "2"]]),
        (
            Bars("bytes", "B", ["train"], [Part("down", 0, np.array([3.0])), Part("up", 1, np.array([4.0]))]),
            [["bytes", "down", "up"], ["train", "3", "4"]],
        ),
    ],
)
def test_the_table_of_a_panel(panel: Any, rows: list[list[str]]) -> None:
    assert list(csv.reader(io.StringIO(as_csv(Figure("", "", [panel]))))) == rows
    assert as_csv(Figure("", "", [panel, panel])).count("\n\n") == 1


def test_only_the_sites_of_a_deployment_know_their_classes(runs: Path, web: TestClient) -> None:
    (make_run(runs, "served") / "sites.json").write_text("[]")
    assert web.get("/api/runs/served").json()["deployed"]
    answer = web.get("/api/runs/served/figures/split").json()
    assert "only the sites know" in answer["why"]
    assert "panels" not in answer
    page = web.get("/api/runs/served/clients/1").json()
    assert (page["classes"], page["attacked"]) == ([], True)
    assert "only the sites know" in page["classes_problem"]


def test_words_stand_out_from_what_they_stand_on() -> None:
    assert round(contrast("#000000", "#ffffff"), 2) == 21.0
    assert round(contrast("#777777", "#ffffff"), 2) == 4.48  # the textbook's example of too little
    own = (Path(views.__file__).parent / "static" / "style.css").read_text()
    css = palette.css().replace(" screen and", "") + own
    words = set(re.findall(r"(?<![-\w])color: var\(--([\w-]+)\)", css)) - {"paper"}
    words |= set(re.findall(r"svg (?:text|\.strong|\.marked) \{[^}]*fill: var\(--([\w-]+)\)", css))
    assert {"ink", "muted", "link", "good", "warn", "bad", "still"} == words
    for look in (one | other for one, other in zip(looks(palette.css()), looks(own), strict=True)):
        pairs = [(word, behind) for word in sorted(words) for behind in ("page", "paper", "soft", "truth")]
        weak = {pair: contrast(look[pair[0]], look[pair[1]]) for pair in (*pairs, ("paper", "link"))}
        assert not {pair: ratio for pair, ratio in weak.items() if ratio < 4.5}


def test_an_empty_folder_and_none_at_all(runs: Path) -> None:
    assert client_of(runs).get("/api/runs").json()["all"] == 0
    assert client_of(runs / "not-there").get("/api/runs").json()["all"] == 0


def test_half_written_folders_are_listed_as_such(runs: Path, web: TestClient) -> None:
    make_run(runs, "good")
    (runs / "empty").mkdir()
    (runs / "torn").mkdir()
    (runs / "torn" / "run.json").write_text('{"format": 1, "id": "to')
    page = web.get("/api/runs").json()
    assert [row["id"] for row in page["runs"]] == ["good"]
    assert {b["name"] for b in page["broken"]} == {"empty", "torn"}
    assert web.get("/run/torn").status_code == 422
    assert "valid JSON" in web.get("/api/runs/torn").json()["error"]


def test_an_unknown_run_suggests_the_nearest(runs: Path, web: TestClient) -> None:
    make_run(runs, "fedcap-20260102-030405-a3f9")
    answer = web.get("/api/runs/fedcap-20260102-030405-a3f8")
    assert answer.status_code == 404
    assert "fedcap-20260102-030405-a3f9" in answer.json()["error"]
    assert web.get("/run/last").headers["location"] == "/run/fedcap-20260102-030405-a3f9"


def test_tables_and_notes_come_in_pages(runs: Path, web: TestClient) -> None:
    make_run(runs, rounds=6)
    page = web.get("/api/runs/made/table/clients", params={"client": 1, "limit": 4}).json()
    assert page["columns"]["round"] == [1, 2, 3, 4]
    assert page["more"]
    rest = web.get("/api/runs/made/table/clients", params={"client": 1, "limit": 4, "offset": 4}).json()
    assert (rest["columns"]["round"], rest["more"]) == ([5, 6], False)
    assert web.get("/api/runs/made/table/sqlite_master").status_code == 404
    assert web.get("/api/runs/made/table/exchanges", params={"client": 1}).status_code == 404
    first = web.get("/api/runs/made/notes", params={"name": "t_norm", "limit": 4}).json()
    assert [n["round"] for n in first["notes"]] == [1, 2, 3, 4]
    assert first["next"] == 5
    last = web.get("/api/runs/made/notes", params={"name": "t_norm", "start": first["next"]}).json()
    assert [n["value"] for n in last["notes"]] == [10.0, 10.0]
    assert last["next"] is None


def test_large_notes_are_cut_into_answers_of_bounded_size(
    runs: Path, web: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "MOST_ANSWER_BYTES", 100)
    make_run(runs, rounds=9, clients=3)
    page = web.get("/api/runs/made/notes", params={"name": "weights"}).json()
    assert 0 < len(page["notes"]) < 9
    assert page["next"] == page["notes"][-1]["round"] + 1


# ---------------------------------------------------------------- who is let in


def test_another_host_needs_a_token() -> None:
    for host in ("0.0.0.0", "192.168.1.5", "::", "example.org"):
        with pytest.raises(UsageError, match="--token"):
            check_binding(host, None)
        check_binding(host, TOKEN)
    for host in ("127.0.0.1", "::1", "localhost", "127.0.0.2"):
        check_binding(host, None)
    with pytest.raises(UsageError, match="at least 16"):
        check_binding("127.0.0.1", "short")
    with pytest.raises(UsageError, match="ASCII"):
        check_binding("127.0.0.1", "ключ-ключ-ключ-ключ")


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8765", "", "127.0.0.1.evil.example", "10.0.0.1:8765", "[::2]"]
)
def test_foreign_names_are_refused(runs: Path, host: str) -> None:
    answer = client_of(runs).get("/api/runs", headers={"Host": host})
    assert answer.status_code == 421
    assert "runs" not in answer.text


@pytest.mark.parametrize("host", ["127.0.0.1:8765", "localhost:9000", "LOCALHOST", "[::1]:8765"])
def test_own_names_are_not(runs: Path, host: str) -> None:
    assert client_of(runs).get("/api/runs", headers={"Host": host}).status_code == 200


def test_a_public_server_goes_by_addresses_but_not_by_any_name(runs: Path) -> None:
    web = client_of(runs, host="0.0.0.0", token=TOKEN)
    bearer = {"Authorization": f"Bearer {TOKEN}"}
    assert web.get("/api/runs", headers={"Host": "10.0.0.1:8765", **bearer}).status_code == 200
    assert web.get("/api/runs", headers={"Host": "evil.example", **bearer}).status_code == 421


def test_the_token_opens_once_and_becomes_a_cookie(runs: Path) -> None:
    web = client_of(runs, token=TOKEN)
    for path in ("/", "/api/runs", "/static/style.css", "/run/x", "/report/x", "/api/runs/x/stream"):
        assert web.get(path).status_code == 401
        assert web.get(path, params={"token": TOKEN[:-1] + "x"}).status_code == 401
    entry = web.get("/api/runs", params={"method": "fedcap", "token": TOKEN})
    assert entry.status_code == 303
    assert entry.headers["location"] == "/api/runs?method=fedcap"
    cookie = entry.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert TOKEN not in cookie
    assert web.get("/api/runs").status_code == 200  # the client keeps the cookie
    fresh = client_of(runs, token=TOKEN)
    assert fresh.get("/api/runs", headers={"Cookie": cookie.split(";")[0]}).status_code == 401  # another server's
    assert fresh.get("/api/runs", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
    assert fresh.get("/api/runs", headers={"Authorization": "Bearer nonsense"}).status_code == 401
    assert fresh.get("/api/runs", headers={"Cookie": "=; ;;\x01"}).status_code == 401


def test_the_way_in_leads_nowhere_else(runs: Path) -> None:
    status, headers, _ = raw_get(create_app(runs, token=TOKEN), "//evil.example/x", f"token={TOKEN}")
    assert status == 303
    assert headers["location"] == "/evil.example/x"


def test_tokens_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch, runs: Path) -> None:
    import hmac

    seen: list[bytes] = []

    def compare(a: bytes, b: bytes) -> bool:
        seen.append(a)
        return hmac.compare_digest(a, b)

    monkeypatch.setattr("fedkin.web.guard.hmac", type("M", (), {"compare_digest": staticmethod(compare)}))
    client_of(runs, token=TOKEN).get("/", params={"token": "wrong"})
    assert b"wrong" in seen


def test_the_page_only_reads(web: TestClient) -> None:
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert web.request(method, "/api/runs").status_code == 405
        assert web.request(method, "/nowhere").status_code == 405


def test_every_answer_carries_the_headers(runs: Path, web: TestClient) -> None:
    make_run(runs)
    for path in ("/", "/run/made", "/api/runs", "/static/run.js", "/nowhere", "/api/runs/made/stream", "/run/none"):
        headers = web.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert headers["referrer-policy"] == "no-referrer"
        assert "access-control-allow-origin" not in headers
    assert web.get("/", headers={"Host": "evil.example"}).headers["x-frame-options"] == "DENY"


def test_pages_need_nothing_from_elsewhere_and_no_inline_script(runs: Path, web: TestClient) -> None:
    make_run(runs)
    for path in ("/", "/run/made", "/run/made/client/0", "/compare", "/run/none"):
        html = web.get(path).text
        assert not re.search(r"<script(?![^>]*\bsrc=)|\son\w+=|<style|\sstyle=|javascript:", html), path
        for address in re.findall(r"(?:src|href)=\"([^\"]+)\"", html):
            assert address.startswith(("/", "#")), address
            if address.startswith("/static/"):
                assert web.get(address).status_code == 200
    static = Path(create_app.__code__.co_filename).parent / "static"
    for script in static.glob("*.js"):
        code = script.read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\(|Function\(", code), (
            script.name
        )
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", code), script.name


def test_there_is_no_other_way_in(web: TestClient) -> None:
    for path in (
        "/docs",
        "/redoc",
        "/openapi.json",
        "/static/../app.py",
        "/static/%2e%2e/app.py",
        "/static/nothing.js",
    ):
        assert web.get(path).status_code == 404


# ---------------------------------------------------------------- hostile folders

APIS = (
    "",
    "/clients",
    "/clients/0",
    *(f"/figures/{name}" for name in FIGURES),
    "/figures/matrix?round=2",
    *(f"/clients/1/figures/{name}" for name in one_client.FIGURES),
    "/table/events",
    "/notes?name=weights",
    "/table/rounds",
)


def fine_or_told(web: TestClient, name: str) -> list[int]:
    """Every way to ask about a run; each gives an answer or an error in words, and never more than a page's worth."""
    seen = []
    for path in APIS:
        answer = web.get(f"/api/runs/{name}{path}")
        assert answer.status_code in (200, 404, 422), (path, answer.text[:300])
        assert len(answer.content) < 8 << 20
        json.loads(answer.text, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
        seen.append(answer.status_code)
    assert web.get(f"/run/{name}").status_code in (200, 422)
    return seen


def test_script_in_names_stays_text(runs: Path, web: TestClient) -> None:
    make_run(
        runs,
        "made",
        config={"method": SCRIPT, "data": SCRIPT, "attack": SCRIPT, "rule": SCRIPT},
        names=[SCRIPT] * 3,
        error=SCRIPT,
        options={SCRIPT: SCRIPT},
    )
    for path in ("/", "/run/made", "/run/made/client/1", "/compare"):
        assert SCRIPT not in web.get(path).text
    assert web.get("/api/runs/made").headers["content-type"] == "application/json"
    assert web.get("/api/runs").json()["runs"][0]["method"] == SCRIPT  # JSON carries it; the page sets it as text
    error = web.get("/run/%3Cscript%3Ealert(1)%3C%2Fscript%3E")
    assert SCRIPT not in error.text


def test_a_huge_run_json_is_refused_quickly(runs: Path, web: TestClient) -> None:
    make_run(runs, "good")
    (runs / "huge").mkdir()
    (runs / "huge" / "run.json").write_text(json.dumps({**facts("huge"), "error": "x" * (50 << 20)}))
    begin = time.perf_counter()
    page = web.get("/api/runs").json()
    assert time.perf_counter() - begin < 2
    assert [row["id"] for row in page["runs"]] == ["good"]
    assert "limit" in page["broken"][0]["reason"]
    assert web.get("/api/runs/huge").status_code == 422


def test_long_values_are_cut(runs: Path, web: TestClient) -> None:
    make_run(runs, "made", config={"method": "m" * 1_000_000, "data": ["x"] * 100_000}, error="e" * 1_000_000)
    assert len(web.get("/api/runs").content) < 5_000
    assert len(web.get("/api/runs/made").content) < 100_000


WRONG: dict[str, Callable[[], dict[str, Any]]] = {
    "config is a list": lambda: facts(config={}) | {"config": [1, 2]},
    "result is text": lambda: facts(result="no"),
    "accuracy is text": lambda: facts(result={"accuracy": "x", "bytes": [1], "seconds": {}}),
    "numbers out of range": lambda: facts(
        result={
            "accuracy": {"macro": 10**400, "std": float("inf")},
            "seconds": float("nan"),
            "bytes": {"down": 10**400},
        }
    ),
    "malicious are floats": lambda: facts(malicious=[1.5]),
    "malicious are far away": lambda: facts(malicious=[10**30, -5]),
    "names are numbers": lambda: facts(names=[1, 2]),
    "no names": lambda: facts(names=[]),
    "status unknown": lambda: facts(status="<b>"),
    "surrogates": lambda: facts(error="\ud800", config={"method": "\udfff"}, names=["\ud800", "b", "c"]),
    "deep": lambda: facts(options={"a": json.loads("[" * 500 + "]" * 500)}),
    "rounds done is huge": lambda: facts(rounds_done=10**100),
    "prepared is empty": lambda: facts(prepared={}),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_types_break_nothing(runs: Path, web: TestClient, case: str) -> None:
    make_run(runs, "good")
    folder = make_run(runs, "wrong")
    (folder / "run.json").write_text(json.dumps(WRONG[case]()))
    page = web.get("/api/runs")
    assert page.status_code == 200
    assert "good" in [row["id"] for row in page.json()["runs"]]
    fine_or_told(web, "wrong")
    assert web.get("/api/compare?run=good&run=wrong").status_code in (200, 422)


def test_links_are_not_followed(runs: Path, web: TestClient, tmp_path: Path) -> None:
    outside = make_run(tmp_path / "outside", "secret")
    (runs / "linked").symlink_to(outside, target_is_directory=True)
    assert web.get("/api/runs").json()["runs"] == []
    for path in ("/run/linked", "/api/runs/linked", "/report/linked"):
        assert web.get(path).status_code in (404, 422)
    for name in ("run.json", "metrics.sqlite", "split.npz", "report.html"):
        (outside / "report.html").write_text("secret report")
        inside = make_run(runs, f"by-{name}")
        (inside / name).unlink(missing_ok=True)
        (inside / name).symlink_to(outside / name)
    assert web.get("/api/runs/by-run.json").status_code == 422
    assert web.get("/api/runs/by-metrics.sqlite").status_code == 422
    assert web.get("/api/runs/by-split.npz/figures/split").status_code == 422
    assert web.get("/report/by-report.html").status_code == 422
    assert "secret report" not in web.get("/report/by-report.html").text


CLIMBING = ["..", "...", ".", "%2e%2e", "..%2foutside", "%2fetc%2fpasswd", "a%00b", "a b", "x" * 101, "a%5cb", "é"]


@pytest.mark.parametrize("name", CLIMBING)
def test_names_that_climb_are_refused(runs: Path, web: TestClient, tmp_path: Path, name: str) -> None:
    make_run(tmp_path, "outside")
    (tmp_path / "run.json").write_text(json.dumps(facts("tmp")))
    (runs / "run.json").write_text(json.dumps(facts("runs")))
    for path in ("/api/runs/{}", "/run/{}", "/report/{}", "/api/runs/{}/stream", "/api/runs/{}/figures/split"):
        status, _, body = raw_get(create_app(runs), path.format(name))
        assert status in (404, 422), path
        assert "2026-01-02" not in body
        assert "<main" not in body or "did not work" in body
    assert web.get("/api/compare", params={"run": ["../outside", "outside"]}).status_code == 404


def test_a_foreign_database_with_views_and_triggers_is_not_run(runs: Path, web: TestClient) -> None:
    folder = make_run(runs)
    base = sqlite3.connect(folder / "metrics.sqlite")
    base.executescript("""
        ALTER TABLE rounds RENAME TO real_rounds;
        CREATE VIEW rounds AS SELECT * FROM real_rounds;
        CREATE TRIGGER t AFTER INSERT ON clients BEGIN DELETE FROM clients; END;
    """)
    base.close()
    answer = web.get("/api/runs/made")
    assert answer.status_code == 422
    assert "no table 'rounds'" in answer.json()["error"]
    assert web.get("/api/runs/made/clients").status_code == 200  # a trigger does nothing to readers


@pytest.mark.parametrize(
    "statements",
    [
        "DROP TABLE rounds; CREATE TABLE rounds (round INTEGER, other TEXT)",
        "DROP TABLE rounds; CREATE TABLE rounds (round INTEGER, "
        + ", ".join(f"{c} AS (zeroblob(1000000000))" for c in TABLES["rounds"] if c != "round")
        + ")",
        "UPDATE rounds SET macro = 'text', bytes_up = 9e999; UPDATE rounds SET round = X'00ff' WHERE round = 2",
        "UPDATE clients SET accuracy = 'x', name = X'c328'; UPDATE clients SET client = 'me' WHERE client = 0",
        "UPDATE notes SET value = '[[1, \"a\"], [null]]'",
        "UPDATE notes SET value = '[[' || hex(zeroblob(300))",
        "UPDATE notes SET value = 17, round = 'now'",
        "UPDATE events SET client = 1e300, round = 'x', kind = NULL",
        "UPDATE notes SET value = '[' || replace(hex(zeroblob(4000)), '00', '[') || ']'",
    ],
)
def test_odd_contents_break_nothing(runs: Path, web: TestClient, statements: str) -> None:
    folder = make_run(runs)
    base = sqlite3.connect(folder / "metrics.sqlite")
    base.executescript(statements)
    base.close()
    fine_or_told(web, "made")
    with web.stream("GET", "/api/runs/made/stream") as stream:
        assert "event:" in stream.read().decode()


def test_columns_that_compute_are_not_asked_for(runs: Path, web: TestClient) -> None:
    folder = make_run(runs)
    base = sqlite3.connect(folder / "metrics.sqlite")
    others = ", ".join(f"{c} AS (zeroblob(10))" for c in TABLES["rounds"] if c != "round")
    base.executescript(
        f"DROP TABLE rounds; CREATE TABLE rounds (round INTEGER, {others}); INSERT INTO rounds VALUES (1)"
    )
    base.close()
    answer = web.get("/api/runs/made")
    assert answer.status_code == 422
    assert "lacks the columns final, micro" in answer.json()["error"]


def test_names_that_are_no_text_break_nothing(tmp_path: Path) -> None:
    runs = Path(os.fsdecode(os.fsencode(tmp_path) + b"/runs-\xff"))
    make_run(runs, "good")
    (runs / os.fsdecode(b"odd-\xfe")).mkdir()
    web = client_of(runs)
    assert web.get("/").status_code == 200
    page = web.get("/api/runs").json()
    assert [row["id"] for row in page["runs"]] == ["good"]
    assert page["broken"][0]["name"] == "odd-?"
    assert web.get("/run/good").status_code == 200
    assert web.get("/run/other").status_code == 404


def test_a_file_that_is_no_database(runs: Path, web: TestClient) -> None:
    folder = make_run(runs)
    (folder / "metrics.sqlite").write_bytes(os.urandom(4096))
    assert fine_or_told(web, "made")[0] == 422
    (folder / "metrics.sqlite").unlink()
    assert web.get("/api/runs/made").json()["curves"]["round"] == []
    (folder / "metrics.sqlite").mkdir()
    assert fine_or_told(web, "made")[0] == 422


def test_the_database_is_never_written_to(runs: Path, web: TestClient) -> None:
    """Not even to roll back a commit that was cut short: the journal may be anybody's."""
    folder = make_run(runs)
    before = (folder / "metrics.sqlite").read_bytes()
    child = f"""
import os, sqlite3
base = sqlite3.connect({str(folder / "metrics.sqlite")!r}, isolation_level=None)
base.execute("PRAGMA cache_size=1")
base.execute("PRAGMA cache_spill=1")
base.execute("BEGIN")
for i in range(3000):
    base.execute("INSERT INTO notes VALUES (9, 'big', ?)", ("x" * 900,))
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", child], check=True, timeout=60)
    assert (folder / "metrics.sqlite-journal").exists()
    torn = (folder / "metrics.sqlite").read_bytes()
    assert torn != before
    answer = web.get("/api/runs/made")
    assert answer.status_code == 422
    assert "resume" in answer.json()["error"]
    assert (folder / "metrics.sqlite").read_bytes() == torn
    assert (folder / "metrics.sqlite-journal").exists()


def test_a_slow_question_is_cut_short(runs: Path) -> None:
    folder = make_run(runs, rounds=30, clients=30)
    hasty = replace(PAGE, seconds=0.05)
    begin = time.perf_counter()
    with pytest.raises(DataError, match="interrupted"):
        select(folder, "count(*)", "clients", "AS a, clients AS b, clients AS c, clients AS d", limits=hasty)
    assert time.perf_counter() - begin < 3


def test_a_zip_bomb_for_a_split_is_not_unpacked(runs: Path, web: TestClient) -> None:
    import zipfile

    folder = make_run(runs)
    with zipfile.ZipFile(folder / "split.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("class_counts.npy", b"\0" * (200 << 20))
    answer = web.get("/api/runs/made/figures/split")
    assert answer.status_code == 422
    assert "larger" in answer.json()["error"]
    with zipfile.ZipFile(folder / "split.npz", "w") as archive:
        header = b"{'descr': '<i8', 'fortran_order': False, 'shape': (3, 100000000000), }"
        archive.writestr("class_counts.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    assert web.get("/api/runs/made/figures/split").status_code == 422
    np.savez(folder / "split.npz", class_counts=np.array([[{"a": 1}]], object))
    assert web.get("/api/runs/made/figures/split").status_code == 422


def test_a_report_is_served_in_a_sandbox(runs: Path, web: TestClient) -> None:
    folder = make_run(runs)
    missing = web.get("/report/made")
    assert missing.status_code == 404
    assert "fedkin report made" in missing.text
    write_report([RunFolder.open(folder)], folder, ["html"])
    answer = web.get("/report/made")
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert policy == report_policy()
    assert policy.startswith("sandbox allow-scripts; default-src 'none'")
    assert "allow-same-origin" not in policy
    assert "unsafe-inline" not in policy.split("script-src")[1].split(";")[0]
    for script in re.findall(r"<script>(.*?)</script>", answer.text, re.S):  # the slider's, which is known by its hash
        import base64
        import hashlib

        assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy


# ---------------------------------------------------------------- live


def events_of(text: str) -> list[tuple[str, Any]]:
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if "event" in fields:
            found.append((fields["event"], json.loads(fields["data"])))
    return found


def test_the_stream_of_a_finished_run_tells_all_and_ends(runs: Path, web: TestClient) -> None:
    make_run(runs)
    answer = web.get("/api/runs/made/stream")
    assert answer.headers["content-type"].startswith("text/event-stream")
    told = events_of(answer.text)
    assert [name for name, _ in told] == ["rounds", "status", "end"]
    assert told[0][1]["round"] == [1, 2, 3, 4]
    assert told[1][1]["status"] == "finished"
    assert "id: 4.0\n" in answer.text


def test_the_stream_goes_on_from_where_the_browser_was(runs: Path, web: TestClient) -> None:
    make_run(runs)
    told = events_of(web.get("/api/runs/made/stream", headers={"Last-Event-ID": "2.0"}).text)
    assert told[0][1]["round"] == [3, 4]
    assert events_of(web.get("/api/runs/made/stream?after=3.0").text)[0][1]["round"] == [4]
    for odd in (None, "", "x", "1", "1.2", "-1.0", "9" * 30 + ".0", "²." + "0"):
        assert place_of(odd) == (-1, 1)


def test_a_stream_sends_new_rounds_only_and_closes_when_the_run_is_done(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "EVERY", 0.02)
    folder = make_run(runs, rounds=2, status="running", result=None)
    import fcntl

    lock = os.open(folder, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)  # as a run at work does
    base = Database(folder / "metrics.sqlite")
    steps: list[Callable[[], Any]] = [
        lambda: fill(base, [3], 3),
        lambda: fill(base, [4], 3),
        lambda: ((folder / "run.json").write_text(json.dumps(facts("made"))), os.close(lock)),
    ]

    async def watch() -> list[tuple[str, Any]]:
        told: list[tuple[str, Any]] = []
        async for line in Streams().watch(RunFolder.open(folder), (-1, 1)):
            told += events_of(line)
            if told[-1][0] in ("rounds", "status") and steps and len(told) > 1:
                steps.pop(0)()
        return told

    import asyncio

    told = asyncio.run(asyncio.wait_for(watch(), 20))
    base.close()
    assert [value["round"] for name, value in told if name == "rounds"] == [[1, 2], [3], [4]]
    assert [value["status"] for name, value in told if name == "status"] == ["running", "finished"]
    assert told[-1][0] == "end"


def test_only_so_many_watch_at_once(runs: Path) -> None:
    make_run(runs)
    streams = Streams(most=1)
    web = client_of(runs, streams=streams)
    assert web.get("/api/runs/made/stream").status_code == 200
    assert streams.now == 0  # given back
    streams.now = 1
    answer = web.get("/api/runs/made/stream")
    assert answer.status_code == 503
    assert "close a page" in answer.json()["error"]


# ---------------------------------------------------------------- size


def test_many_large_runs_stay_responsive(runs: Path) -> None:
    """200 runs of 100 rounds x 100 clients: the list and a run's page answer in well under a second."""
    first = make_run(runs, "run-000", rounds=100, clients=100, config={"rounds": 100, "clients": 100})
    about = json.loads((first / "run.json").read_text())
    for i in range(1, 200):
        folder = runs / f"run-{i:03d}"
        folder.mkdir()
        (folder / "run.json").write_text(json.dumps({**about, "id": folder.name}))
        if i < 3:
            shutil.copy(first / "metrics.sqlite", folder)
    web = client_of(runs)
    web.get("/api/runs?limit=1")

    def seconds(path: str) -> float:
        best = 9.0
        for _ in range(3):
            begin = time.process_time()  # of all threads; other processes on the machine do not count
            answer = web.get(path)
            best = min(best, time.process_time() - begin)
            assert answer.status_code == 200
        return best

    assert seconds("/api/runs") < 1
    assert seconds("/") < 1
    drawn = ("", "/clients", *(f"/figures/{name}" for name in FIGURES))
    took = {path: seconds(f"/api/runs/run-000{path}") for path in drawn}
    assert sum(took.values()) < 1, took
    assert seconds("/api/runs/run-000/clients/50") < 1
    assert seconds("/api/runs/run-000/notes?name=weights") < 1
    assert seconds("/api/compare?run=run-000&run=run-001&run=run-002") < 1


# ---------------------------------------------------------------- the command


def free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


@pytest.fixture
def serving(runs: Path, tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    make_run(runs)
    port = free_port()
    command = [sys.executable, "-m", "fedkin", "web", "--runs-dir", str(runs), "--port", str(port)]
    env = {**os.environ, "FEDKIN_TOKEN": TOKEN}
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as process:
        address = f"http://127.0.0.1:{port}"
        for _ in range(200):
            try:
                httpx.get(address, timeout=5)
                break
            except httpx.TransportError:
                time.sleep(0.1)
        yield address, process
        process.kill()


def test_the_command_serves_until_interrupted_and_logs_no_token(serving: tuple[str, subprocess.Popen[str]]) -> None:
    address, process = serving
    assert httpx.get(f"{address}/api/runs").status_code == 401
    with httpx.Client(follow_redirects=True) as client:
        page = client.get(f"{address}/api/runs", params={"token": TOKEN})
        assert page.json()["all"] == 1
    process.send_signal(2)
    out, err = process.communicate(timeout=20)
    assert "127.0.0.1" in err
    assert TOKEN not in out + err
    assert "Traceback" not in err


def run_command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fedkin", "web", *words], capture_output=True, text=True, timeout=60, check=False
    )


def test_the_command_refuses_what_is_unsafe_or_impossible(tmp_path: Path) -> None:
    refused = run_command("--host", "0.0.0.0", "--runs-dir", str(tmp_path))
    assert refused.returncode == 2
    assert "--token" in refused.stderr
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = run_command("--port", str(taken.getsockname()[1]), "--runs-dir", str(tmp_path))
    assert busy.returncode == 2
    assert "another --port" in busy.stderr


def test_without_fastapi_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedkin.cli import web as command

    monkeypatch.setattr(command, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=re.escape("pip install 'fedkin[web]'")):
        command.web()
