"""What the documentation site is made of besides docs/: pages that lie elsewhere, and the reference from docstrings."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pygments.formatters import HtmlFormatter

import fedkin
from fedkin.config import Config
from fedkin.options import describe

ROOT = Path(__file__).parent.parent
AS_THEY_ARE = ("BENCHMARKS.md", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "RESULTS.md")
OUTSIDE = {"README.md": "index.md", **{name: name for name in AS_THEY_ARE}}
"""Files of the repository that are part of the site, and what they are called there."""
CALLED = {**OUTSIDE, "examples": "examples.md"}
"""What has another place on the site than in the repository, where all but this is below docs/."""
REFERENCE = {
    "Runs": ("run", "resume", "join", "compare", "tune", "Result", "Newcomers", "Tuned", "Config"),
    "Methods": ("Method", "METHODS", "option", "Keep", "Federation", "Clients", "each", "weighted_mean", "Cohort"),
    "Training": ("Model", "SGD", "Adam", "Term", "cross_entropy", "align", "guide"),
    "Tasks": ("task", "Task", "TASKS", "Metric"),
    "Networks": ("MODELS", "check", "NetworkCheck", "lora", "adapters", "merged", "Layout"),
    "Partitions": ("iid", "pathological", "shards", "dirichlet", "groups", "natural"),
    "Errors": ("FedKinError", "UsageError", "DataError"),
}
"""Every name that `fedkin` exports, in the order in which somebody meets them."""
BEGIN = """# Reference

Everything that `import fedkin as fk` gives. [Your data](your-data.md), [your network](your-model.md) and
[your method](your-method.md) show it at work. K is the number of clients, D the number of columns of a row.
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds what does not lie in docs/: nothing is copied, so nothing gets out of date."""
    for source, name in OUTSIDE.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / source)))
    files.append(File.generated(config, "examples.md", content=examples()))
    files.append(File.generated(config, "reference.md", content=reference()))
    files.append(File.generated(config, "pygments.css", content=colours()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as they are in the repository, made those of the site; where a block is to be typed, its title."""
    name = page.file.src_uri
    source = next((path for path, called in OUTSIDE.items() if called == name), f"docs/{name}")
    markdown = re.sub(r"^```sh (\w[\w ]*)$", r'```sh title="\1"', markdown, flags=re.M)
    return re.sub(
        r"(\]\()(?![a-z]+:)([^)#\s]+)", lambda found: found[1] + link(found[2], source, name, files), markdown
    )


def link(target: str, source: str, page: str, files: Files) -> str:
    """A path relative to a file of the repository, made relative to a page of the site."""
    path = normpath(PurePosixPath(source).parent / target)
    there = CALLED.get(path, path.removeprefix("docs/"))
    if files.get_file_from_path(there) is None:
        raise PluginError(f"{source} links to {target}, which is not part of the site")
    return relpath(there, PurePosixPath(page).parent)


def examples() -> str:
    """The scripts and the notebook of examples/ as one page."""
    parts = ["# Examples\n", "The scripts and the notebook in `examples`; the tests run each of them as it stands."]
    for path in sorted((ROOT / "examples").glob("*.py")):
        parts += [f"## {path.name}\n", f"```python\n{path.read_text(encoding='utf-8')}```\n"]
    for path in sorted((ROOT / "examples").glob("*.ipynb")):
        parts.append(f"## {path.name}\n")
        for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            text = "".join(cell["source"]).replace("# ", "### ", 1) if cell["cell_type"] == "markdown" else ""
            parts.append(text or "```python\n" + "".join(cell["source"]) + "\n```")
            parts.append("")
    return "\n".join(parts)


def colours() -> str:
    """Of code, by day and by night."""
    styles = {".highlight": "default", "[data-bs-theme=dark] .highlight": "github-dark"}
    return "\n".join(HtmlFormatter(style=style).get_style_defs(place) for place, style in styles.items())


def reference() -> str:
    """The page that mkdocstrings fills from docstrings."""
    parts = [BEGIN]
    for title, names in REFERENCE.items():
        parts.append(f"## {title}\n")
        for name in names:
            parts += [directive(name), settings() if name == "Config" else ""]
    return "\n".join(parts)


def directive(name: str) -> str:
    value = getattr(fedkin, name)
    described = inspect.isclass(value) or inspect.isfunction(value)
    home = f"{value.__module__}.{value.__qualname__}" if described else f"{fedkin._WHERE[name]}.{name}"
    options: dict[str, Any] = {"heading": f"fedkin.{name}", "toc_label": name, "show_signature": name != "Config"}
    return "\n".join([f"::: {home}", "    options:", *(f"      {k}: {v}" for k, v in options.items()), ""])


def settings() -> str:
    """The fields of `Config`, as `fedkin run --help` shows them."""
    rows = [
        f"| `{o.name}` | {o.type.replace('|', ', ')} | `{o.default}` | {o.help.replace('|', '/')} |"
        for o in describe(Config)
        if o.help
    ]
    return "\n".join(["| setting | type | default | what it is |", "| --- | --- | --- | --- |", *rows, ""])
