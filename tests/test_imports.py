"""Layers point one way, and nothing is ever unpickled: read off the source, not off what happens to be imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "src" / "fedkin"

MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "version": set(),
    "options": {"errors"},
    "registry": {"errors"},
    "parts": {"errors"},
    "preparation": {"errors"},
    "config": {"errors", "options", "version"},
    "compute": {"errors"},
    "tasks": {"errors", "options", "registry", "compute"},
    "core": {"errors", "options", "registry", "compute", "tasks"},
    "robust": {"errors", "registry", "options", "compute", "core"},
    "privacy": {"errors", "registry", "options", "compute", "core"},
    "methods": {"errors", "registry", "options", "compute", "tasks", "core", "robust", "privacy"},
    "engines": {"errors", "registry", "options", "compute", "tasks", "core", "methods"},
    "data": {"errors", "registry", "options", "parts", "preparation"},
    "models": {"errors", "registry", "parts", "preparation"},
}
"""What the lower half may import, package by package."""
UPPER = ["rounds", "plugins", "runs", "use", "sweep", "papers", "report", "web", "deploy", "bench", "api", "testing"]
"""The upper half, from the bottom: each may import the lower half and what stands before it here."""
for _place, _name in enumerate(UPPER):
    MAY_IMPORT[_name] = {*MAY_IMPORT} - {*UPPER[_place:]}
MAY_IMPORT |= {"__init__": {*MAY_IMPORT}, "cli": {*MAY_IMPORT}, "__main__": {"cli"}}


def unit(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def sources() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def imported(tree: ast.AST, *, typing_too: bool = False) -> Iterator[str]:
    """Dotted names of what a module imports from fedkin, wherever in the file."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) and not typing_too:
            for other in node.orelse:
                yield from imported(other)
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] == "fedkin")
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "relative import: write it out"
            if node.module == "fedkin":
                yield from (f"fedkin.{a.name}" for a in node.names)
            elif node.module and node.module.startswith("fedkin."):
                yield from (f"{node.module}.{a.name}" for a in node.names)
        else:
            yield from imported(node, typing_too=typing_too)


def layer_violations(layer: str, tree: ast.AST) -> list[str]:
    allowed = MAY_IMPORT[layer]
    found = []
    for name in imported(tree):
        other = name.split(".")[1]
        if other != layer and other not in allowed:
            found.append(name)
        if other == "cli" and layer not in ("cli", "__main__"):
            found.append(name)
        if layer == "engines" and other == "methods" and _concrete(name):
            found.append(name)
    return found


def _concrete(name: str) -> bool:
    """fedkin.methods.ditto.Ditto is a method; fedkin.methods.METHODS and fedkin.methods.base.Method are not."""
    parts = name.split(".")
    place = ROOT / "methods" / parts[2] if len(parts) > 2 and parts[2] != "base" else None
    return place is not None and (place.is_dir() or place.with_suffix(".py").exists())


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_layers_point_one_way(path: Path) -> None:
    assert layer_violations(unit(path), ast.parse(path.read_text())) == []


def test_the_local_engine_knows_methods_by_their_type_only() -> None:
    tree = ast.parse((ROOT / "engines" / "simulator.py").read_text())
    assert not [n for n in imported(tree) if n.startswith("fedkin.methods")]
    assert set(imported(tree, typing_too=True)) >= {"fedkin.methods.base.Method"}


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        ("methods", "from fedkin.engines.simulator import Simulator"),
        ("methods", "from fedkin.rounds import prepare"),
        ("methods", "from fedkin import cli"),
        ("methods", "def f():\n    import fedkin.data"),
        ("methods", "from fedkin.config import Config"),
        ("engines", "from fedkin.methods.ditto import Ditto"),
        ("engines", "from fedkin.methods import ditto"),
        ("engines", "from fedkin.methods.fedcap import FedCAP"),
        ("engines", "from fedkin.methods.fedcap.method import FedCAP"),
        ("robust", "from fedkin.methods import METHODS"),
        ("data", "from fedkin.compute.layout import Layout"),
        ("models", "from fedkin.data import load"),
        ("core", "from fedkin.methods import Method"),
        ("compute", "from fedkin.core.federation import each"),
        ("runs", "from fedkin.cli.main import app"),
        ("runs", "from fedkin.sweep.runner import run_sweep"),
        ("report", "from fedkin.web.routes import create_app"),
        ("deploy", "from fedkin import bench"),
    ],
)
def test_a_wrong_import_is_found(layer: str, text: str) -> None:
    assert layer_violations(layer, ast.parse(text))


def test_a_right_import_is_not() -> None:
    fine = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from fedkin.rounds import Job\n"
    assert layer_violations("methods", ast.parse(fine)) == []
    assert layer_violations("engines", ast.parse("from fedkin.methods import METHODS, Method")) == []


# ---------------------------------------------------------------- one place each


def all_calls(tree: ast.AST, where: str = "") -> Iterator[tuple[str, str]]:
    """What is called, and in which function."""
    for node in ast.iter_child_nodes(tree):
        inside = f"{where}.{node.name}".strip(".") if isinstance(node, ast.FunctionDef | ast.ClassDef) else where
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), where
        yield from all_calls(node, inside)


def calls(tree: ast.AST, name: str) -> list[str]:
    """The functions in which something of this name is called: `f`, or `.f` for a method whoever's."""
    return [where for called, where in all_calls(tree) if is_it(called, name)]


def is_it(called: str, name: str) -> bool:
    return called == name or (name.startswith(".") and called.endswith(name))


@cache
def calls_in_sources() -> list[tuple[str, str]]:
    """Of all of FedKin: what is called, and where. Reading it takes seconds, so it is done once."""
    return [
        (called, f"{path.relative_to(ROOT)}:{where}")
        for path in sources()
        for called, where in all_calls(ast.parse(path.read_text()))
    ]


def places(name: str) -> list[str]:
    """Where in the sources that is called."""
    return [place for called, place in calls_in_sources() if is_it(called, name)]


def test_a_site_is_put_together_in_one_place() -> None:
    """Simulator, server, worker and benchmarks go through it."""
    assert places("Site") == ["rounds/assemble.py:make_site"]
    assert {p.partition(":")[0] for p in places("make_site")} == {
        "rounds/assemble.py",
        "deploy/server.py",
        "deploy/joining.py",
        "rounds/newcomers.py",
        "bench/speed.py",
    }
    assert places("Job") == ["rounds/assemble.py:make_job"]
    assert {p.partition(":")[0] for p in places("make_job")} == {"rounds/assemble.py", "deploy/server.py"}


def test_a_run_is_begun_and_restored_in_one_place() -> None:
    """Simulations and the servers of real sites by the same code, and runs that share another's rounds; a model that is
    exported is only read."""
    assert places("restore") == ["deploy/server.py:resume_server", "runs/start.py:resume"]
    assert places("begin") == ["deploy/server.py:run_server", "runs/start.py:start", "sweep/executor.py:_recorder"]
    assert {p.partition(":")[0] for p in places("Recorder.create")} == {"runs/start.py", "bench/overheads.py"}
    assert {p.partition(":")[0] for p in places("checkpoint.load")} == {"runs/restore.py", "runs/begun_with.py"}
    assert places("begun_with.kept") == ["runs/restore.py:as_it_was", "runs/start.py:resume"]
    looking = {"runs/restore.py:_put_back", "runs/restore.py:at_newest", "runs/extension.py:check_longer"}
    assert set(places("sound_checkpoints")) == looking
    assert {p.partition(":")[0] for p in places("database.rewrite")} == {"runs/restore.py"}


def test_there_is_one_runner_of_grids() -> None:
    """Compare, demo, reproduce and Python go through it, and nobody else starts runs one after another, lays them
    together or brings up processes for them."""
    assert set(places("run_sweep")) == {
        "api.py:compare",
        "cli/grid.py:run_grid",
        "papers/runner.py:reproduce",
        "sweep/tuning.py:_Batch.run",
    }
    assert set(places("run_together")) == {"sweep/executor.py:Executor._together", "bench/cells.py:cell_costs"}
    assert {p.partition(":")[0] for p in places("Lockstep")} == {"sweep/together.py"}
    assert {p.partition(":")[0] for p in places("context.Process")} == {"sweep/processes.py"}
    assert places("Past") == ["papers/runner.py:Ledger.find", "sweep/runner.py:run_sweep"]
    assert set(places("run_config")) <= {"bench/cells.py:cell_costs.run_cell", "sweep/together.py:run_together"}
    starting = {p for p in places("runs.start") + places("start") if p.partition("/")[0] not in ("bench", "deploy")}
    assert starting == {"api.py:_run", "cli/commands.py:run", "sweep/executor.py:Executor._run"}
    assert places("begin") == ["deploy/server.py:run_server", "runs/start.py:start", "sweep/executor.py:_recorder"]
    for name in ("trained", "by_training", "batches"):
        defined = [p for p in sources() if f"def {name}(" in p.read_text()]
        assert [str(p.relative_to(ROOT)) for p in defined] == ["sweep/trainings.py"], name


def texts(tree: ast.AST, names: set[str]) -> list[tuple[int, str]]:
    """Where one of these names stands as a text of its own."""
    return [(n.lineno, n.value) for n in ast.walk(tree) if isinstance(n, ast.Constant) and n.value in names]


UNMISTAKABLE = {
    "accepted",
    "rejected",
    "collaborators",
    "members",
    "left_out",
    "unjudged",
    "relaxed",
    "norms",
    "pulls",
    "prototype_weights",
    "weights_absent",
}
"""Kinds of notes and events whose names mean nothing else above the methods."""


def test_what_a_note_means_is_said_in_one_place() -> None:
    """`core.notes` declares it; who writes one or asks for one names the declaration."""
    from fedkin.core import notes

    assert notes.KINDS.keys() | notes.EVENTS.keys() >= UNMISTAKABLE
    readers = [p for p in sources() if unit(p) in UPPER]
    found = {str(p.relative_to(ROOT)): texts(ast.parse(p.read_text()), UNMISTAKABLE) for p in readers}
    assert {path: lines for path, lines in found.items() if lines} == {}
    asking = {"note", "noted", "told", "rounds_of", "over_rounds", "whose", "events", "kind_of"}
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in asking:
                assert not any(isinstance(a, ast.Constant) and isinstance(a.value, str) for a in node.args[:1]), path


def test_a_second_place_is_found() -> None:
    assert texts(ast.parse("x = {'a': 'members'}\nif y == 'rejected': pass"), UNMISTAKABLE) == [
        (1, "members"),
        (2, "rejected"),
    ]

    tree = ast.parse("class A:\n    def f(self):\n        return Site(1)\nx = [a.Site(), Sites(), Site]\nSite()")
    assert calls(tree, "Site") == ["A.f", ""]
    assert calls(ast.parse("def g(job):\n    job.restore(1)\n    restore(2)"), ".restore") == ["g"]


# ---------------------------------------------------------------- nothing is unpickled

UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
UNSAFE_CALLS = {"torch.load", "eval", "exec", "pickle.load", "pickle.loads", "torch.hub.load", "yaml.load"}


def unsafe(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [f"import {a.name}" for a in node.names if a.name.split(".")[0] in UNSAFE_MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in UNSAFE_MODULES:
            found.append(f"from {node.module} import")
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            found += ["torch.load" for a in node.names if a.name == "load"]
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in UNSAFE_CALLS:
                found.append(name)
            for keyword in node.keywords:
                risky = keyword.arg == "allow_pickle" and not (
                    isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                )
                found += ["allow_pickle"] if risky else []
    return found


@pytest.mark.parametrize("path", sources(), ids=lambda p: str(p.relative_to(ROOT)))
def test_nothing_is_unpickled(path: Path) -> None:
    tree = ast.parse(path.read_text())
    if path == ROOT / "data" / "files.py":  # CIFAR comes as a pickle; it is read by an unpickler that refuses all names
        assert unsafe(tree) == ["import pickle"]
        uses = {ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Attribute) and _of_pickle(n)}
        assert uses <= {"pickle.Unpickler", "pickle.UnpicklingError"}
        classes = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
        readers = [c for c in classes if "pickle.Unpickler" in map(ast.unparse, c.bases)]
        assert len(readers) == 1
        assert any(isinstance(f, ast.FunctionDef) and f.name == "find_class" for f in readers[0].body)
    else:
        assert unsafe(tree) == []


def _of_pickle(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "pickle"


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "torch.load(f)",
        "from torch import load",
        "eval(text)",
        "exec(text)",
        "np.load(f, allow_pickle=True)",
        "np.load(f, allow_pickle=flag)",
        "import joblib",
    ],
)
def test_unsafe_reading_is_found(text: str) -> None:
    assert unsafe(ast.parse(text))


def test_safe_reading_is_not() -> None:
    assert unsafe(ast.parse("np.load(f, allow_pickle=False); module.eval(); json.load(f)")) == []
