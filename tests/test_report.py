"""Reports: the figures show what the run recorded, the page stands alone, and a hostile folder stays text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from colours import contrast, looks
from typer.testing import CliRunner

from fedkin.cli.application import app
from fedkin.config import make_config
from fedkin.core import notes
from fedkin.errors import DataError, UsageError
from fedkin.report import overview, several_runs, svg
from fedkin.report import page as reports
from fedkin.report.figures import Figure, LeftOut, Lines, Missing, Series, Strips, Timeline
from fedkin.report.gather import RunData
from fedkin.report.matrix import by_cluster, collaboration, scale
from fedkin.report.one_run import details
from fedkin.report.page import write_report
from fedkin.report.several_runs import compared, grouped, name_of
from fedkin.rounds import Result, load_data
from fedkin.runs.folder import RunFolder
from fedkin.runs.start import start
from fedkin.web.views import compare_page

SMALL = {"clients": 10, "partition": "pathological:4", "rounds": 3, "epochs": 1, "lr": 0.05, "way": "each"}
OWN_FIGURE = {
    "c-pfl": "committee",
    "fedcap": "matrix",
    "pfedcs": "matrix",
    "co-pfl": "contributions",
    "fedpkda": "prototypes",
}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """Real runs, by a name of their own."""
    where = str(tmp_path_factory.mktemp("runs"))
    wanted: dict[str, dict[str, Any]] = {m: {"method": m, "attack": "sf"} for m in OWN_FIGURE}
    for seed in (0, 1):
        wanted |= {f"{m} {seed}": {"method": m, "seed": seed} for m in ("local", "fedavg")}
    for share in (0.2, 0.4):
        wanted[f"hostile {share}"] = {"method": "fedavg", "attack": "ipm", "malicious": share, "seed": 0}
    return {k: start(make_config({**SMALL, "runs_dir": where, **v})) for k, v in wanted.items()}


def opened(result: Result) -> RunData:
    assert result.run is not None
    return RunData(RunFolder.open(result.run))


def folders(*results: Result) -> list[RunFolder]:
    return [opened(r).folder for r in results]


def shown(parts: list[Any], name: str) -> Figure:
    found = [p for p in parts if isinstance(p, Figure) and p.name == name]
    assert len(found) == 1, f"{name} in {parts}"
    return found[0]


def copied(result: Result, to: Path) -> Path:
    assert result.run is not None
    shutil.copytree(result.run, to)
    return to


def tampered(folder: Path, sql: str, *values: Any) -> None:
    with sqlite3.connect(folder / "metrics.sqlite") as base:
        base.execute(sql, values)
    base.close()


class Page(HTMLParser):
    """Elements and attributes as a browser would see them, and the text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


# ---------------------------------------------------------------- what is drawn is what was recorded


@pytest.mark.parametrize("method", OWN_FIGURE)
def test_every_method_gets_its_own_figure(done: dict[str, Result], method: str) -> None:
    part = shown(details(opened(done[method])), OWN_FIGURE[method])
    assert part.alt
    assert part.caption
    assert svg.inline_svg(svg.draw(part), part.alt, "x").count("<path") > 3


@pytest.mark.parametrize(
    ("method", "weights", "who"), [("pfedcs", "collaborators", "participants"), ("fedcap", "weights", "members")]
)
def test_the_matrices_are_the_noted_weights(done: dict[str, Result], method: str, weights: str, who: str) -> None:
    result = done[method]
    found = collaboration(opened(result), 10**6)
    noted = {n.round + 1: n.value for n in result.notes if n.name == weights}
    ids = {n.round + 1: n.value for n in result.notes if n.name == who}
    assert found.rounds == sorted(noted)
    assert sorted(found.order) == found.clients == list(range(10))
    for number, frame in zip(found.rounds, found.frames, strict=True):
        part = frame[np.ix_(ids[number], ids[number])]
        np.testing.assert_allclose(part, noted[number].numpy(), rtol=1e-6)
        assert np.isfinite(frame).sum() == len(ids[number]) ** 2


def test_masks_grow_and_pulls_cross(done: dict[str, Result]) -> None:
    shares = [value["share"] for value in opened(done["co-pfl"]).noted(notes.MASK).values()]
    assert len(shares) == 3
    assert np.all(np.diff(np.median(shares, 1)) > 0)
    assert np.max(shares) <= 0.5 + 1e-6
    run = opened(done["fedpkda"])
    pulls = np.array(list(run.noted(notes.PULLS).values()))
    assert np.all(np.diff(pulls[:, 0]) < 0)
    assert np.all(np.diff(pulls[:, 1]) > 0)
    last = run.noted(notes.PROTOTYPE_WEIGHTS)[3]
    np.testing.assert_allclose(np.sum(last["weights"], 1), 1, rtol=1e-6)
    assert len(last["weights"]) == len(last["classes"])
    gamma = run.told(notes.SHARES)[3]
    assert gamma.sum() == pytest.approx(1)
    assert len(gamma) == len(run.told(notes.MEMBERS)[3]) == 10


def test_the_prototype_weights_make_the_global_prototypes() -> None:
    import torch

    from fedkin.methods.fedpkda.prototypes import global_prototypes

    rows, has = torch.randn(7, 4, 5), torch.rand(7, 4) < 0.8
    goals, known, shares = global_prototypes(rows, has, "diag")
    for goal, weights, k in zip(goals, shares, torch.nonzero(known).flatten().tolist(), strict=True):
        torch.testing.assert_close(weights.float() @ rows[:, k].where(has[:, [k]], 0.0), goal)


def test_the_split_is_in_the_run(done: dict[str, Result], tmp_path: Path) -> None:
    result = done["fedavg 0"]
    dataset, split = load_data(result.config)
    run = opened(result)
    np.testing.assert_array_equal(run.class_counts, split.class_table(dataset))
    np.testing.assert_array_equal(run.folder.split()["class_counts_test"], split.class_table(dataset, "test"))
    older = copied(result, tmp_path / "older")
    with np.load(older / "split.npz") as file:
        kept = {k: file[k] for k in file if not k.startswith("class_counts")}
    np.savez(older / "split.npz", **kept)
    with pytest.raises(Missing, match="no class counts"):
        _ = RunData(RunFolder.open(older)).class_counts
    np.savez(older / "split.npz", **kept, class_counts=np.ones((10, 0), np.int64))
    with pytest.raises(Missing, match="do not fit"):
        _ = RunData(RunFolder.open(older)).class_counts


def test_removals_stand_against_the_truth(done: dict[str, Result], tmp_path: Path) -> None:
    folder = copied(done["fedcap"], tmp_path / "run")
    run = RunData(RunFolder.open(folder))
    bad, honest = run.malicious[0], next(c for c in range(10) if c not in run.malicious)
    tampered(folder, "DELETE FROM events")
    for number, client, kind in ((2, bad, "removed"), (1, honest, "failed"), (1, honest, "left_out")):
        tampered(folder, "INSERT INTO events VALUES (?, '', ?, ?, 'x')", number, client, kind)
    (panel,) = shown(details(run), "removals").panels
    assert isinstance(panel, Timeline)
    rounds, states = panel.cells(200)
    assert rounds == [1, 2, 3]
    who = [run.names.index(name) for name in panel.rows]
    assert who[: len(run.malicious)] == run.malicious
    assert panel.marked == list(range(len(run.malicious)))
    assert states[who.index(bad)] == ["", "removed", "removed"]
    assert states[who.index(honest)] == ["failed", "", ""]
    assert f"1 of {len(run.malicious)} malicious and 0 of" in shown(details(run), "removals").caption


# ---------------------------------------------------------------- several runs


def test_seeds_are_averaged_and_every_number_has_its_run(done: dict[str, Result]) -> None:
    pair = [done["fedavg 0"], done["fedavg 1"]]
    groups = grouped([opened(r) for r in [*pair, done["local 0"]]])
    assert [(g.row, g.column, len(g.members), g.older) for g in groups] == [("fedavg", "", 2, []), ("local", "", 1, [])]
    macro = [r.accuracy.macro for r in pair]
    row = overview._summary(groups[0])
    assert row["macro"] == f"{np.mean(macro):.2f} ± {np.std(macro, ddof=1):.2f}"
    assert row["best"].startswith(f"{np.mean([r.best.accuracy.micro for r in pair]):.2f} ±")
    assert row["runs"] == [Path(str(r.run)).name for r in pair]
    assert row["seeds"] == [0, 1]
    assert overview._summary(groups[1])["macro"] == f"{done['local 0'].accuracy.macro:.2f}"
    line = several_runs.series(groups, "macro")[0]
    each = np.array([[h.accuracy.macro for h in r.history] for r in pair])
    np.testing.assert_allclose(line.y, each.mean(0))
    assert line.high is not None
    np.testing.assert_allclose(line.high, each.mean(0) + each.std(0, ddof=1))


def test_conditions_are_what_differs(done: dict[str, Result]) -> None:
    several = [opened(done[k]) for k in ("fedavg 0", "hostile 0.2", "hostile 0.4", "local 0")]
    assert [(g.row, g.column) for g in grouped(several)] == [
        ("fedavg", "no attack"),
        ("fedavg", "ipm, 20 % malicious"),
        ("fedavg", "ipm, 40 % malicious"),
        ("local", "no attack"),
    ]


def test_what_changes_a_result_makes_a_group_and_nothing_else_does(done: dict[str, Result], tmp_path: Path) -> None:
    def like(name: str, precision: str, resolved: str, created: int, **settings: Any) -> RunData:
        folder = copied(done["fedavg 0"], tmp_path / name)
        raw = json.loads((folder / "run.json").read_text())
        for part in ("given", "config"):
            raw[part] |= {"precision": precision, **settings}
        raw["prepared"]["precision"] = resolved
        (folder / "run.json").write_text(json.dumps({**raw, "created": f"2999-01-0{created}T00:00:00Z"}))
        return RunData(RunFolder.open(folder))

    full, half = like("full", "fp32", "fp32", 1), like("half", "bf16", "bf16", 2)
    assert [(g.column, [r.info.id for r in g.members], g.older) for g in grouped([full, half])] == [
        ("precision fp32", ["full"], []),
        ("precision bf16", ["half"], []),
    ]
    usual = like("usual", "auto", "fp32", 3, on_failure="stop", eval_point="received")
    (group,) = grouped([full, usual])
    assert [r.info.id for r in group.members] == ["usual"]
    assert [r.info.id for r in group.older] == ["full"]
    page = compare_page([full.folder, half.folder, usual.folder])
    lines = page["runs"]
    assert lines[0]["group"] == lines[2]["group"] != lines[1]["group"]
    assert page["older"] == ["full"]
    assert len(page["figures"][0]["panels"][0]["series"]) == 2
    each = compare_page([full.folder, half.folder, usual.folder], seeds=False)["figures"][0]["panels"][0]["series"]
    assert len({one["label"] for one in each}) == 3


def test_of_two_equal_runs_the_newer_counts(done: dict[str, Result], tmp_path: Path) -> None:
    again = copied(done["fedavg 0"], tmp_path / "fedavg-again")
    raw = json.loads((again / "run.json").read_text())
    (again / "run.json").write_text(json.dumps({**raw, "created": "2999-01-01T00:00:00Z"}))
    (group,) = grouped([RunData(RunFolder.open(again)), opened(done["fedavg 0"])])
    assert [r.info.id for r in group.members] == ["fedavg-again"]
    assert [r.info.id for r in group.older] == [Path(str(done["fedavg 0"].run)).name]


def test_gain_over_local_is_per_client_on_the_same_split(done: dict[str, Result]) -> None:
    groups = grouped([opened(done[k]) for k in ("fedavg 0", "local 0", "local 1")])
    (panel,) = several_runs.gain_over_local(groups).panels
    assert isinstance(panel, Strips)
    a, b = ([c.accuracy for c in done[k].per_client] for k in ("fedavg 0", "local 0"))
    np.testing.assert_allclose(panel.rows["fedavg"], np.subtract(a, b))
    groups = grouped([opened(done[k]) for k in ("fedavg 0", "local 1")])
    with pytest.raises(Missing, match="same split and seed"):
        several_runs.gain_over_local(groups)


def test_accuracy_against_the_share_of_attackers(done: dict[str, Result]) -> None:
    keys = ("fedavg 0", "hostile 0.2", "hostile 0.4")
    (panel,) = several_runs.attacker_shares(grouped([opened(done[k]) for k in keys])).panels
    assert isinstance(panel, Lines)
    (line,) = panel.series
    np.testing.assert_allclose(line.x, [0, 20, 40])
    np.testing.assert_allclose(line.y, [done[k].accuracy.macro for k in keys])


def test_every_method_is_shown_before_a_second_of_any(done: dict[str, Result]) -> None:
    groups = grouped([opened(done[k]) for k in ("fedavg 0", "hostile 0.2", "hostile 0.4", "local 0")])
    assert [name_of(g) for g in reports._one_of_each_first(groups)] == [
        "fedavg, ipm, 20 % malicious",
        "local, no attack",
        "fedavg, ipm, 40 % malicious",
        "fedavg, no attack",
    ]


def test_epsilon_is_compared_under_the_same_conditions(done: dict[str, Result], tmp_path: Path) -> None:
    runs = []
    for share, attack, epsilon in ((0.1, "sf", 5.0), (0.2, "sf", 9.0), (0.3, "ipm", 1.0)):
        folder = copied(done["fedpkda"], tmp_path / f"{share}")
        raw = json.loads((folder / "run.json").read_text())
        raw["options"]["noise"] = share
        raw["given"]["attack"] = raw["config"]["attack"] = attack
        (folder / "run.json").write_text(json.dumps(raw))
        tampered(folder, "UPDATE notes SET value = ? WHERE name = 'epsilon'", json.dumps({"composed": epsilon}))
        runs.append(RunData(RunFolder.open(folder)))
    said = several_runs.epsilon_accuracy(grouped(runs)).alt
    assert "fedpkda (sf)" in said
    assert "ipm" not in said
    with pytest.raises(Missing, match="do not differ in epsilon"):
        several_runs.epsilon_accuracy(grouped(runs[1:]))


def test_similar_clients_stand_together_and_few_do_not_spoil_the_scale() -> None:
    rng = np.random.default_rng(0)
    group = rng.permutation(np.repeat(range(4), 5))
    weights = np.where(group[:, None] == group, 0.05, 0.0)
    assert sum(group[a] != group[b] for a, b in pairwise(by_cluster(weights[None]))) == 3
    weights[0, 1] = 0.6
    assert scale(weights[None]) == pytest.approx(0.05)
    assert scale(np.zeros((1, 3, 3))) > 0
    assert by_cluster(np.full((2, 4, 4), 0.25)) == [0, 1, 2, 3]


# ---------------------------------------------------------------- the page


def check_stands_alone(html: str) -> Page:
    """Nothing is fetched, and only our own script may run."""
    page = Page(html)
    policy = next(m["content"] for m in page.all("meta") if m.get("http-equiv") == "Content-Security-Policy") or ""
    assert "default-src 'none'" in policy
    assert "unsafe-inline" not in policy.split("script-src")[1]
    own = (reports.TEMPLATES / "report.js").read_text()
    assert base64.b64encode(hashlib.sha256(own.encode()).digest()).decode() in policy
    bodies = re.findall(r"<script>(.*?)</script>", html, re.S)
    assert all(body == own for body in bodies)
    assert {tag.get("type") for tag in page.all("script")} <= {None, "application/json"}
    assert len([tag for tag in page.all("script") if not tag]) == len(bodies) <= 1
    for tag, attributes in page.tags:
        assert tag not in ("iframe", "object", "embed", "link", "base", "form")
        for name, value in attributes.items():
            assert not name.startswith("on"), (tag, name)
            if name in ("src", "href", "xlink:href", "action"):
                assert (value or "").startswith(("#", "data:image/png;base64,")), (tag, value)
    assert not re.search(r"url\((?!#)", html)
    return page


@pytest.mark.parametrize("keys", [("fedcap",), ("pfedcs",), ("fedavg 0", "fedavg 1", "local 0", "hostile 0.2")])
def test_the_page_stands_alone(done: dict[str, Result], tmp_path: Path, keys: tuple[str, ...]) -> None:
    files, _ = write_report(folders(*(done[k] for k in keys)), tmp_path)
    assert files == [tmp_path / "report.html"]
    html = files[0].read_text()
    page = check_stands_alone(html)
    assert all(one.get("aria-label") and one.get("role") == "img" for one in page.all("svg"))
    assert not [c for c in svg.THEME if c in re.sub(r"<style>.*?</style>", "", html, flags=re.S)]
    drawings = re.findall(r' id="([^"]+)"', html)
    assert len(drawings) == len(set(drawings))
    for key in keys:
        result = done[key]
        worst = f"{result.accuracy.worst_decile:.2f}"
        for said in (Path(str(result.run)).name, result.prepared.split_hash[:10], worst):
            assert said in page.text
    if keys == ("fedcap",):
        assert "client-9" in page.text
        assert any(i.get("type") == "range" for i in page.all("input"))


NASTY = "<script>window.hacked=1</script>"
QUOTES = '"\' onload=window.hacked=1 x="$\\frac{1}{0}$ --> ]]> {{ 7*7 }}'


def hostile(result: Result, to: Path) -> Path:
    """A folder in which every text and note is an attempt."""
    folder = copied(result, to)
    raw = json.loads((folder / "run.json").read_text())
    raw["names"] = [
        NASTY,
        QUOTES,
        "</svg><img src=x onerror=window.hacked=1>",
        "&lt;b&gt;",
        "\u202e\x00\x07name",
        "$" * 3,
        "a" * 5000,
        "%s{0}",
        "-->",
        "'",
    ]
    raw["config"] |= {"method": raw["config"]["method"], "data": NASTY, "model": QUOTES, "rule": NASTY}
    raw["given"] = {}
    raw["options"] = {NASTY: QUOTES}
    raw["error"], raw["created"], raw["status"] = NASTY + QUOTES, NASTY, "failed"
    raw["environment"] = {"fedkin": NASTY, "git": {"revision": NASTY, "dirty": NASTY}}
    raw["prepared"] |= {"split_hash": QUOTES, "eval_point": NASTY, "device": NASTY, "precision": NASTY}
    (folder / "run.json").write_text(json.dumps(raw))
    tampered(folder, "UPDATE exchanges SET phase = ?", NASTY)
    tampered(folder, "UPDATE clients SET name = ?", NASTY)
    tampered(folder, "INSERT INTO events VALUES (99999999999, ?, -5, ?, ?)", NASTY, NASTY, NASTY)
    tampered(folder, "INSERT INTO events VALUES (1, ?, 0, 'removed', ?)", NASTY, NASTY)
    return folder


@pytest.mark.parametrize("key", [*OWN_FIGURE, "fedavg 0"])
def test_a_hostile_folder_stays_text(done: dict[str, Result], tmp_path: Path, key: str) -> None:
    folder = hostile(done[key], tmp_path / "run")
    (file,), _ = write_report([RunFolder.open(folder)])
    html = file.read_text()
    page = check_stands_alone(html)
    assert "window.hacked=1</script>" in page.text  # it is shown, as text
    assert "49" not in re.findall(r"-->.{0,10}\]\]>.{0,12}", page.text)
    assert NASTY not in html


BAD_NOTES = [
    "null",
    "17",
    '"text"',
    "[]",
    "[[1, 2], [3]]",
    "[[[[]]]]",
    '{"clients": [99, -1, "a"], "share": [1]}',
    "{",
    "[NaN, Infinity]",
    "[1e999]",
    "[" * 2000,
    "[1" + "0" * 400 + "]",
    '[["<b>"]]',
]


@pytest.mark.parametrize("key", OWN_FIGURE)
def test_damaged_notes_leave_figures_out_with_a_reason(done: dict[str, Result], tmp_path: Path, key: str) -> None:
    for i, text in enumerate(BAD_NOTES):
        folder = copied(done[key], tmp_path / str(i))
        tampered(folder, "UPDATE notes SET value = ?", text)
        parts = details(RunData(RunFolder.open(folder)))
        assert all(isinstance(p, LeftOut) and p.why for p in parts if not isinstance(p, Figure) or p.name != "removals")
    write_report([RunFolder.open(folder)])


def test_a_run_without_a_round_says_so(done: dict[str, Result], tmp_path: Path) -> None:
    folder = copied(done["fedcap"], tmp_path / "run")
    for table in ("rounds", "clients", "exchanges", "events", "notes"):
        tampered(folder, f"DELETE FROM {table}")
    parts = compared(grouped([RunData(RunFolder.open(folder))]))
    assert [p.name for p in parts if isinstance(p, Figure)] == ["split"]
    assert {p.why for p in parts if isinstance(p, LeftOut)} >= {"no round has been evaluated yet"}
    (file,), gaps = write_report([RunFolder.open(folder)])
    page = Page(file.read_text())
    assert "Accuracy per round is left out: no round has been evaluated yet." in page.text
    assert len(page.all("svg")) == 1
    assert gaps


def test_a_damaged_database_is_an_error_in_words(done: dict[str, Result], tmp_path: Path) -> None:
    folder = copied(done["fedcap"], tmp_path / "run")
    (folder / "metrics.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(DataError, match=r"metrics\.sqlite"):
        write_report([RunFolder.open(folder)])


def test_links_in_a_run_folder_are_not_followed(done: dict[str, Result], tmp_path: Path) -> None:
    folder, victim = copied(done["fedavg 0"], tmp_path / "run"), tmp_path / "precious"
    victim.write_text("mine")
    (folder / "report.html").symlink_to(victim)
    write_report([RunFolder.open(folder)])
    assert victim.read_text() == "mine"
    assert not (folder / "report.html").is_symlink()
    (tmp_path / "elsewhere").mkdir()
    (folder / "figures").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="is a link"):
        write_report([RunFolder.open(folder)], formats=["png"])
    assert not list((tmp_path / "elsewhere").iterdir())
    assert not list(folder.glob(".report-*"))


def test_custom_methods_get_the_matrix_by_making_the_notes(done: dict[str, Result], tmp_path: Path) -> None:
    folder = copied(done["fedavg 0"], tmp_path / "run")
    assert not [p for p in details(RunData(RunFolder.open(folder))) if isinstance(p, Figure)]
    tampered(folder, "INSERT INTO notes VALUES (1, 'participants', '[2, 5]')")
    tampered(folder, "INSERT INTO notes VALUES (1, 'collaborators', '[[0.75, 0.25], [0.5, 0.5]]')")
    run = RunData(RunFolder.open(folder))
    found = collaboration(run, 10**6)
    assert found.clients == [2, 5]
    np.testing.assert_array_equal(found.frames[0], [[0.75, 0.25], [0.5, 0.5]])
    svg.draw(shown(details(run), "matrix"))


# ---------------------------------------------------------------- size and speed


def test_a_hundred_clients_and_rounds(done: dict[str, Result], tmp_path: Path) -> None:
    folder, n = copied(done["pfedcs"], tmp_path / "run"), 100
    raw = json.loads((folder / "run.json").read_text())
    raw |= {"names": [f"client-{c}" for c in range(n)], "malicious": list(range(30)), "rounds_done": n}
    (folder / "run.json").write_text(json.dumps(raw))
    counts = np.random.default_rng(0).integers(0, 60, (n, 10))
    ends = np.arange(1, n + 1)
    parts = {part: np.arange(n) for part in ("train", "validation", "test")}
    np.savez(
        folder / "split.npz",
        names=np.array(raw["names"]),
        class_counts=counts,
        **parts,
        **{f"{part}_ends": ends for part in parts},
    )
    weights = json.dumps(np.random.default_rng(1).random((n, n)).round(4).tolist())
    scores = json.dumps(np.random.default_rng(2).random(n).round(4).tolist())
    with sqlite3.connect(folder / "metrics.sqlite") as base:
        for table in ("rounds", "clients", "events", "notes"):
            base.execute(f"DELETE FROM {table}")
        for r in range(1, n + 1):
            row = (r, 0, r / 2, r / 2, r / 3, 5, 1, 1, r * 1e6, r * 1e6, r, n, 0, 0)
            base.execute(
                "INSERT INTO rounds VALUES ("
                + "?," * 14
                + "0, 1, 1, 1, 4, 1, 1, 0.1, NULL, "
                + ", ".join(["NULL"] * 7)
                + ")",
                row,
            )
            base.executemany(
                "INSERT INTO clients VALUES (?, 0, ?, 'x', 1, 2, 50.0, 1.0, NULL, NULL)", [(r, c) for c in range(n)]
            )
            base.executemany("INSERT INTO events VALUES (?, '', ?, 'rejected', '')", [(r, c) for c in range(0, n, 7)])
            notes = [
                ("participants", json.dumps(list(range(n)))),
                ("collaborators", weights),
                ("scores", scores),
                ("accepted", "[1, 2, 3]"),
                ("committee", "[4, 5]"),
                ("threshold", "0.5"),
                ("alpha", scores),
            ]
            base.executemany("INSERT INTO notes VALUES (?, ?, ?)", [(r, *note) for note in notes])
    base.close()
    begin = time.process_time()
    (file,), gaps = write_report([RunFolder.open(folder)])
    assert time.process_time() - begin < 15
    assert file.stat().st_size < 3e6
    assert {gap.title for gap in gaps} == {"Gain over training alone"}
    data = json.loads(re.findall(r'<script type="application/json">(.*?)</script>', file.read_text(), re.S)[0])
    assert len(data["frames"]) == len(data["rounds"]) == 40
    assert data["rounds"][0] == 1
    assert data["rounds"][-1] == n
    assert len(base64.b64decode(data["frames"][0])) == n * n


def test_drawing_leaves_matplotlib_as_it_was() -> None:
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    lines = Lines("round", "y", "", [Series("a", np.arange(3), np.arange(3.0))])
    svg.inline_svg(svg.draw(Figure("caption", "alt", [lines])), "alt", "salt")
    assert dict(mpl.rcParams) == before


# ---------------------------------------------------------------- the command


@pytest.fixture
def there(done: dict[str, Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDKIN_RUNS", str(tmp_path / "runs"))
    for key in ("fedavg 0", "fedavg 1", "local 0"):
        copied(done[key], tmp_path / "runs" / Path(str(done[key].run)).name)
    return tmp_path


def report(*words: str) -> SimpleNamespace:
    done = CliRunner().invoke(app, ["report", *words])
    return SimpleNamespace(code=done.exit_code, out=done.stdout, err=" ".join(done.stderr.split()))


def test_the_command_writes_where_it_says(there: Path) -> None:
    run = report("last")
    assert run.code == 0, run.err
    path = Path(run.out.strip())
    assert path.name == "report.html"
    assert path.parent.parent == there / "runs"
    run = report("fedavg-*", "local", "--format", "svg", "--json")
    found = json.loads(run.out)
    assert len(found["runs"]) == 3
    assert {Path(f).parent.name for f in found["files"]} == {"fedkin-report"}
    assert "gain-over-local.svg" in {Path(f).name for f in found["files"]}
    assert all(Path(f).read_bytes().startswith(b"<?xml") for f in found["files"])


def test_figures_of_one_run_go_into_its_folder(done: dict[str, Result], tmp_path: Path) -> None:
    folder = copied(done["fedcap"], tmp_path / "run")
    files, _ = write_report([RunFolder.open(folder)], formats=["png"])
    assert all(f.parent == folder / "figures" and f.read_bytes().startswith(b"\x89PNG") for f in files)
    assert {f.stem for f in files} >= {"accuracy-per-round", "matrix", "split"}


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["last", "--format", "pdf"], 2, "unknown format 'pdf'"),
        (["last", "--format", ","], 2, "format is empty"),
        (["fedavgg"], 2, "unknown run 'fedavgg'"),
        (["../etc"], 2, "run '../etc' is not there"),
        (["./file-less/"], 2, "run './file-less/' is not there"),
        (["a:b"], 2, "names are 1 to 100"),
        (["x*"], 2, "no run in"),
        (["last", "--to", "file/below"], 2, "cannot be written"),
    ],
)
def test_wrong_usage_is_answered(there: Path, words: list[str], code: int, said: str) -> None:
    (there / "file").write_text("")
    run = report(*words)
    assert run.code == code
    assert said in run.err


def test_no_runs_no_report() -> None:
    with pytest.raises(UsageError, match="at least one run"):
        write_report([])


def test_help_stays_light() -> None:
    code = "import sys, fedkin.cli; print([m for m in ('matplotlib', 'jinja2', 'torch') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_the_demo_ends_with_a_report(done: dict[str, Result], tmp_path: Path) -> None:
    from fedkin.cli.demo import report_of

    copied(done["fedavg 0"], tmp_path / "runs" / "fedavg-0")
    (said,) = report_of(str(tmp_path / "runs"))
    assert Path(said.split("[/] ")[1]).read_text().startswith("<!doctype html>")


# ---------------------------------------------------------------- in a real browser

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver")
    if not (CHROMIUM and DRIVER):
        pytest.skip("needs chromium and chromedriver")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    profile = tmp_path_factory.mktemp("profile")
    for flag in (
        "headless",
        "no-sandbox",
        "disable-gpu",
        "no-first-run",
        "disable-background-networking",
        "disable-component-update",
        "disable-sync",
        f"user-data-dir={profile}",
    ):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


def test_slider_keyboard_and_hostile_names_in_a_browser(browser: Any, done: dict[str, Result], tmp_path: Path) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    folder = hostile(done["pfedcs"], tmp_path / "run")
    (file,), _ = write_report([RunFolder.open(folder)])
    browser.get(file.as_uri())
    slider = browser.find_element(By.CSS_SELECTOR, "input[type=range]")
    shown = browser.find_element(By.CSS_SELECTOR, ".slider output")
    canvas, said = (browser.find_element(By.CSS_SELECTOR, c) for c in (".slider canvas", ".slider .said"))
    pixels = "return document.querySelector('canvas').toDataURL()"
    assert shown.text == "round 3"
    last = browser.execute_script(pixels)
    slider.send_keys(Keys.HOME)
    assert shown.text == "round 1"
    assert browser.execute_script(pixels) != last
    canvas.send_keys(Keys.ARROW_RIGHT + Keys.ARROW_DOWN)
    assert "learns from" in said.text
    assert not browser.find_element(By.CSS_SELECTOR, ".still").is_displayed()
    assert browser.execute_script("return window.hacked") is None
    assert browser.get_log("browser") == []
    ink = "return getComputedStyle(document.querySelector('svg text')).fill"
    light = browser.execute_script(ink)
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    )
    assert browser.execute_script(ink) != light


EXTENT = """const box = document.querySelector(arguments[0]).getBoundingClientRect();
    return [document.querySelector(arguments[0]).checkVisibility(), box.height, box.right];"""
LETTERS = """const svg = document.querySelector("figure svg");
    return 9 * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width;"""


def test_tables_and_letters_fit_a_desk_a_phone_and_paper(browser: Any, done: dict[str, Result], tmp_path: Path) -> None:
    many = folders(*(done[k] for k in ("fedcap", "fedavg 0", "fedavg 1", "local 0", "local 1", "hostile 0.2")))
    for runs, name in ((many, "many"), (folders(done["fedcap"]), "one")):
        (file,), _ = write_report(runs, tmp_path / name)
        for width in (1400, 390):
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            browser.get(file.as_uri())
            assert browser.execute_script("return document.documentElement.scrollWidth") <= width
            for table in ("[aria-label='Summary table'] table", "[aria-label='Table of runs'] table"):
                assert browser.execute_script(EXTENT, table)[2] <= width, (name, width, table)
            assert browser.execute_script(LETTERS) > 9.5  # pixels
    closed = "details .wide table"
    assert not browser.execute_script(EXTENT, closed)[0]
    paper = {"width": 1032, "height": 700, "deviceScaleFactor": 1, "mobile": False}  # A4, landscape, within its margins
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", paper)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": []})
    try:
        for table in (closed, "details .long", "[aria-label='Table of runs'] table"):
            seen, height, right = browser.execute_script(EXTENT, table)
            assert seen, table
            assert height > 20, table
            assert right <= 1032, table
        assert browser.execute_script(EXTENT, ".slider")[1] == 0
        assert browser.execute_script(EXTENT, ".still svg")[1] > 100
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": []})
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert browser.get_log("browser") == []


def test_words_stand_out_from_the_paper(done: dict[str, Result], tmp_path: Path) -> None:
    (file,), _ = write_report(folders(done["fedavg 0"]), tmp_path)
    style = re.findall(r"<style>(.*?)</style>", file.read_text(), re.S)[0]
    words = set(re.findall(r"(?<![-\w])color: var\(--(\w+)\)", style))
    assert words == {"ink", "muted", "link", "bad"}
    for look in looks(style):
        pairs = [(word, behind) for word in sorted(words) for behind in ("paper", "soft")]
        assert not [(pair, look) for pair in pairs if contrast(look[pair[0]], look[pair[1]]) < 4.5]


def test_a_report_of_a_deployment_says_that_only_the_sites_know_their_classes(
    done: dict[str, Result], tmp_path: Path
) -> None:
    (copied(done["fedavg 0"], tmp_path / "run") / "sites.json").write_text("[]")
    (file,), gaps = write_report([RunFolder.open(tmp_path / "run")])
    assert [gap.why for gap in gaps if gap.title == "Who has which classes"] == [
        "only the sites know how many samples of each class they have"
    ]
    assert "only the sites know" in file.read_text()
