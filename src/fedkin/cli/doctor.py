"""`fedkin doctor`: what FedKin finds on this machine, and whether a site is ready for its deployment."""

from __future__ import annotations

import os
import platform
import re
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from fedkin.cli.application import LOOK, Json, command
from fedkin.cli.console import print_json, screen
from fedkin.cli.deploy import Ca, Cert, Key, Vocabulary
from fedkin.errors import UsageError
from fedkin.rounds.words import size
from fedkin.version import VERSION

COLOURS = {"ok": "green", "warning": "yellow", "failed": "bold red", "skipped": "dim"}
ALWAYS = ("torch", "numpy", "scipy", "scikit-learn", "safetensors", "typer", "rich")
PLACES = ("FEDKIN_DATA", "FEDKIN_RUNS", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
"""Variables of the environment whose values say something and are no secret."""


@command(
    "doctor",
    """
    fedkin doctor
    fedkin doctor --json
    fedkin doctor --data siteA.npz
    fedkin doctor --server server.example.org:9092 --ca ca.crt --key siteA.key --data siteA.npz --config experiment.toml
    """,
    LOOK,
)
def doctor(
    server: Annotated[str | None, typer.Option("--server", metavar="HOST:PORT", help="The server's address.")] = None,
    ca: Ca = None,
    key: Key = None,
    cert: Cert = None,
    data: Annotated[str | None, typer.Option("--data", metavar="FILE", help="The site's data.")] = None,
    task: Annotated[
        str | None, typer.Option("--task", metavar="TASK", help="What they are for (default: as the experiment says).")
    ] = None,
    vocabulary: Vocabulary = 0,
    config: Annotated[
        str | None,
        typer.Option("--config", metavar="FILE.toml", help="The experiment's TOML file, which names the model."),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            metavar="FILE.toml",
            help="A file that says what this site allows; with --config, the experiment is compared with it.",
        ),
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="The server was started without TLS.")] = False,
    join: Annotated[
        bool,
        typer.Option(
            "--join", help="Also join the server and leave at once; not while a client of this site is running."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Say what FedKin finds on this machine, or check a site of a deployment step by step.

    Without flags: versions, processor, memory, GPU, threads, data sets, optional packages and where FedKin may write.
    This belongs into the report of a bug; it names no secret, and your home folder is written as ~.

    With --data, --key, --policy or --server the site is checked instead: its data, its key, its connection to the
    server. The exit status is 1 if a step failed. Nothing about the data leaves this machine.
    """
    if server is None and key is None and data is None and policy is None:
        given = [flag for flag, value in {"--ca": ca, "--cert": cert, "--config": config}.items() if value is not None]
        given += [flag for flag, value in {"--insecure": insecure, "--join": join}.items() if value]
        if given:
            raise UsageError(f"{given[0]} alone checks nothing: give --data, --key, --policy or --server (with --ca)")
        return present(machine(), json)
    from fedkin.cli.flags import from_file
    from fedkin.config import make_config
    from fedkin.deploy.doctor import address, examine

    if server is not None:
        address(server)
    settings = make_config(from_file(config)) if config else None
    out, steps = screen(), []
    for step in examine(
        server=server,
        ca=ca,
        key=key,
        cert=cert,
        data=data,
        task=task,
        vocabulary=vocabulary,
        config=settings,
        policy=policy,
        insecure=insecure,
        join=join,
    ):
        steps.append(step)
        if not json:
            out.print(f"[{COLOURS[step.state]}]{step.state:<8}[/] {step.name}: {escape(step.found)}", soft_wrap=True)
            if step.fix and step.state != "ok":
                out.print(f"         fix: {escape(step.fix)}", soft_wrap=True)
    failed = [s.name for s in steps if s.state == "failed"]
    if json:
        print_json({"ready": not failed, "steps": [vars(s) for s in steps]})
    elif not failed:
        out.print(
            "[green]This site is ready.[/]"
            if server
            else "So far so good; --server also checks the connection to the server."
        )
    if failed:
        raise typer.Exit(1)


# ---------------------------------------------------------------- the machine


def machine() -> dict[str, Any]:
    """What there is here, as `--json` prints it."""
    import torch

    from fedkin.cli.listing import files_are_here
    from fedkin.data import SOURCES, data_home
    from fedkin.rounds.footprint import host_room
    from fedkin.runs.catalogue import runs_folder
    from fedkin.runs.facts import source_hash

    cards = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "fedkin": {"version": VERSION, "source": source_hash(), "folder": tidy(Path(__file__).parent.parent)},
        "python": {"version": platform.python_version(), "program": tidy(sys.executable)},
        "machine": {
            "system": platform.platform(),
            "cores": os.cpu_count(),
            "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "memory": host_room(),
        },
        "torch": {
            "version": torch.__version__,
            "threads": torch.get_num_threads(),
            "cuda": torch.version.cuda,
            "gpus": [{"name": card.name, "memory": card.total_memory} for card in cards],
        },
        "packages": {name: _version(name) for name in ALWAYS},
        "extras": {extra: {name: _version(name) for name in names} for extra, names in extras().items()},
        "data": {
            **_writable(data_home()),
            "here": [name for name, entry in SOURCES.items() if files_are_here(entry, data_home())],
        },
        "runs": _writable(runs_folder()),
        "environment": {name: tidy(os.environ[name]) for name in PLACES if os.environ.get(name)},
    }


def tidy(path: str | Path) -> str:
    """A path without the name of whose it is."""
    text, home = str(path), str(Path.home())
    return f"~{text[len(home) :]}" if text == home or text.startswith(home.rstrip(os.sep) + os.sep) else text


def extras() -> dict[str, list[str]]:
    """The packages that each extra brings, as FedKin's own metadata list them."""
    try:
        lines = requires("fedkin") or []
    except PackageNotFoundError:  # run from its sources, without having been installed
        return {}
    found: dict[str, list[str]] = {}
    for line in lines:
        extra = re.search(r"""extra == ['"]([\w-]+)['"]""", line)
        name = re.match(r"[\w.-]+", line)
        if extra and name and name[0] != "fedkin" and extra[1] not in ("dev", "docs"):
            found.setdefault(extra[1], []).append(name[0])
    return found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _writable(folder: Path) -> dict[str, Any]:
    """Whether a file can be made there, or where the folder would be made; it is tried, and nothing stays behind."""
    place = folder.resolve()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            why = None
    except OSError as error:
        why = error.strerror or str(error)
    return {"folder": tidy(folder), "exists": folder.exists(), "writable": why is None, "why": why}


def present(found: Mapping[str, Any], json: bool) -> None:
    """The machine, for a program or for people."""
    if json:
        return print_json(found)
    out, own, here, net = screen(), found["fedkin"], found["machine"], found["torch"]
    cards = ", ".join(f"{g['name']} ({size(g['memory'])})" for g in net["gpus"])
    memory = size(here["memory"]) if here["memory"] else "unknown"
    extra = "; ".join(
        f"{name}: {', '.join(f'{p} {v}' if v else f'[yellow]{p} is missing[/]' for p, v in packages.items())}"
        for name, packages in found["extras"].items()
    )
    lines = {
        "fedkin": f"{own['version']}, sources {own['source'][:12]}, in {own['folder']}",
        "python": f"{found['python']['version']}, {found['python']['program']}",
        "machine": f"{here['system']}, {here['usable_cores']} of {here['cores']} cores, free memory {memory}",
        "torch": f"{net['version']}, {net['threads']} threads, "
        + (f"CUDA {net['cuda']}" if net["cuda"] else "without CUDA"),
        "GPU": cards or "[dim]none that torch can use[/]",
        "packages": ", ".join(
            f"{name} {v}" if v else f"[red]{name} is missing[/]" for name, v in found["packages"].items()
        ),
        "extras": extra or "[dim]unknown: FedKin is not installed as a package[/]",
        "data": f"{', '.join(found['data']['here'])}; {_place(found['data'])}",
        "runs": _place(found["runs"]),
        "set": ", ".join(f"{name}={escape(value)}" for name, value in found["environment"].items())
        or "[dim]nothing[/]",
    }
    for name, value in lines.items():
        out.print(f"[dim]{name:<9}[/] {value}", soft_wrap=True)


def _place(found: Mapping[str, Any]) -> str:
    what = "[green]can be written[/]" if found["writable"] else f"[red]cannot be written ({escape(found['why'])})[/]"
    return f"{escape(found['folder'])} {'' if found['exists'] else 'is not there yet and '}{what}"
