"""The commands. Each is thin: it gathers what the user said, hands it on, and shows what comes back."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Annotated, Any

import typer

from fedkin.cli.application import (
    DEPLOY,
    LOOK,
    MAKE,
    RUNS,
    TRAIN,
    Json,
    RunsDir,
    Sets,
    app,
    command,
    everything,
    paragraphs,
)
from fedkin.cli.console import messages, print_json, screen, table
from fedkin.cli.extras import Plugins, SinkFlags, sinks_of, use_plugins
from fedkin.cli.flags import checked, from_file, grid_configs, run_config_of
from fedkin.cli.names import check_name, completing, methods_and_files
from fedkin.cli.waiting import load, waiting
from fedkin.config import SPLIT, make_config
from fedkin.version import VERSION


def _one(kind: str) -> Any:
    return typer.Argument(help="The one to show in detail.", autocompletion=completing(kind))


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"fedkin {VERSION}")
        raise typer.Exit


WELCOME = """
[bold]FedKin[/]: personalised federated learning. Each client ends up with a good model of its own.

Start with [cyan]fedkin demo[/], then [cyan]fedkin compare fedavg ditto fedper[/]. Nothing needs a network: the data
set [cyan]digits[/] is included. Every command shows an example: [cyan]fedkin run --help[/].

Exit status: 0 if all went well, 1 if a run failed or diverged, 2 if the command or its data cannot be used, 130 after
    Ctrl-C, 143 after SIGTERM.
"""


@app.callback(help="\n\n".join(paragraphs(WELCOME)))
def _welcome(
    show: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """What comes before any command."""


@command(
    "run",
    """
    fedkin run ditto --data digits --clients 20 --partition pathological:2 --rounds 20 --set lam=0.5
    fedkin run fedcap --attack ipm --malicious 0.3
    fedkin run fedavg --attack lie:z=0.5 --rule multi-krum:malicious=0.4
    fedkin run experiment.toml --rounds 50
    """,
    TRAIN,
    settings=everything,
)
def run(
    target: Annotated[
        str,
        typer.Argument(
            metavar="METHOD|FILE.toml",
            help="A method's name, or a TOML file.",
            autocompletion=methods_and_files,
        ),
    ],
    settings: dict[str, Any],
    set_: Sets = None,
    sink: SinkFlags = None,
    plugin: Plugins = None,
    json: Json = False,
) -> None:
    """Train one federation with one method.

    Settings come from the flags, else from the TOML file, else from the defaults. In the file the keys are the names of
    the flags below, with underscores for dashes; the method's own options stand in a table \\[options].

    A setting that would change nothing is refused, with the reason.

    Under an attack, the accuracy is that of the benign clients. An attack or a rule takes its options after a colon, as
    in lie:z=0.5; [cyan]fedkin attacks[/] and [cyan]fedkin rules[/] list them.
    """
    use_plugins(plugin)
    config = run_config_of(target, settings, set_ or [])
    to = sinks_of(sink)

    from fedkin.cli.live import run_screen
    from fedkin.cli.outcome import present
    from fedkin.runs.sinks import make_sinks
    from fedkin.runs.start import start

    with run_screen(messages()) as listener:
        result = start(config, on_event=listener, signals=True, say=listener.say, sinks=make_sinks(to))
    present(result, json)


@command("demo", "fedkin demo", TRAIN)
def demo(json: Json = False) -> None:
    """Compare all methods on handwritten digits, first with honest clients only, then with hostile ones.

    It takes less than a minute and needs no download."""
    from pathlib import Path
    from tempfile import mkdtemp

    load()
    import torch

    from fedkin.cli.demo import LEFT_OUT, SETTINGS, DemoScreen, next_steps, report_of, sentences
    from fedkin.cli.grid import run_grid
    from fedkin.cli.sweeps import show
    from fedkin.methods import METHODS

    torch.set_num_threads(1)  # networks this small gain nothing from more, and on a busy machine lose everything
    folder = mkdtemp(prefix="fedkin-demo-") if not json else None
    methods = [name for name in METHODS if name != LEFT_OUT]
    configs = grid_configs(methods, {**SETTINGS, "runs_dir": folder, "checkpoint_every": 0}, [], None)
    configs.sort(key=lambda config: methods.index(config.method))  # all conditions of a method, then the next method
    title = "Handwritten digits, 20 clients with two classes each. Accuracy in percent: all honest, then 30 % hostile"
    grid = run_grid(configs, title, tracked=folder is not None, screen=DemoScreen)
    kept = f"fedkin runs --runs-dir {folder} lists the runs that are finished; fedkin demo starts again"

    def closing(grid: Any) -> list[str]:
        with waiting("drawing the report"):
            return sentences(grid) + (report_of(folder) if folder else [])

    show(grid, json, closing=closing, go_on=kept)
    for line in next_steps(Path(folder)) if folder else ():
        screen().print(line, soft_wrap=True)


@command(
    "split",
    """
    fedkin split --data digits --clients 20 --partition dirichlet:0.1
    fedkin split experiment.toml --json
    """,
    LOOK,
    settings=lambda: {*SPLIT},
)
def split(
    settings: dict[str, Any],
    file: Annotated[str | None, typer.Argument(metavar="[FILE.toml]", help="A TOML file with settings.")] = None,
    json: Json = False,
) -> None:
    """Show which client would hold which classes, before anything trains."""
    config = checked(make_config({**(from_file(file) if file else {}), **settings}))
    from fedkin.cli.splits import show_split

    show_split(config, json)


@command(
    "methods",
    """
    fedkin methods
    fedkin methods fedrep --model cnn-512
    """,
    LOOK,
)
def methods(
    name: Annotated[str | None, _one("method")] = None,
    model: Annotated[
        str, typer.Option("--model", metavar="NAME", help="The model whose message size is shown.")
    ] = "cnn-512",
    plugin: Plugins = None,
    json: Json = False,
) -> None:
    """List the methods, or show one with its paper, its options and their ranges, and what it shares."""
    use_plugins(plugin)
    check_name("method", name)
    from fedkin.cli.listing import Methods

    Methods(model).present(name, json)


@command(
    "attacks",
    """
    fedkin attacks
    fedkin attacks lie
    """,
    LOOK,
)
def attacks(name: Annotated[str | None, _one("attack")] = None, plugin: Plugins = None, json: Json = False) -> None:
    """List what malicious clients can do, or show one attack with its paper, its options and their ranges."""
    use_plugins(plugin)
    check_name("attack", name)
    from fedkin.cli.listing import Attacks

    Attacks().present(name, json)


@command(
    "rules",
    """
    fedkin rules
    fedkin rules multi-krum
    """,
    LOOK,
)
def rules(name: Annotated[str | None, _one("rule")] = None, plugin: Plugins = None, json: Json = False) -> None:
    """List the rules by which the server can average, or show one with its paper, its options and their ranges."""
    use_plugins(plugin)
    check_name("rule", name)
    from fedkin.cli.listing import Rules

    Rules().present(name, json)


@command(
    "schedules",
    """
    fedkin schedules
    fedkin schedules cosine
    """,
    LOOK,
)
def schedules(
    name: Annotated[str | None, _one("learning-rate schedule")] = None, plugin: Plugins = None, json: Json = False
) -> None:
    """List the ways in which the learning rate can change from round to round, or show one with its options.

    With --lr-factors, single clients can have rates of their own as well."""
    use_plugins(plugin)
    check_name("learning-rate schedule", name)
    from fedkin.cli.listing import Schedules

    Schedules().present(name, json)


@command(
    "tasks",
    """
    fedkin tasks
    fedkin tasks regression
    """,
    LOOK,
)
def tasks(name: Annotated[str | None, _one("task")] = None, plugin: Plugins = None, json: Json = False) -> None:
    """List what can be learnt (one class of several, numbers, tokens, ...), or show one task with its metrics."""
    use_plugins(plugin)
    check_name("task", name)
    from fedkin.cli.task_listing import Tasks

    Tasks().present(name, json)


@command(
    "datasets",
    """
    fedkin datasets
    fedkin datasets cifar10 --data-dir ~/data
    """,
    LOOK,
)
def datasets(
    name: Annotated[str | None, _one("data set")] = None,
    data_dir: Annotated[
        str | None, typer.Option("--data-dir", metavar="DIR", help="The folder in which to look for the files.")
    ] = None,
    json: Json = False,
) -> None:
    """List the data sets and say whether their files are there, or show one."""
    check_name("data set", name)
    from fedkin.cli.listing import DataSets

    DataSets(data_dir).present(name, json)


@command(
    "models",
    """
    fedkin models
    fedkin models resnet18
    fedkin models --check my_net.py:Net --shape 3,32,32
    """,
    LOOK,
)
def models(
    name: Annotated[str | None, _one("model")] = None,
    check: Annotated[
        str | None,
        typer.Option("--check", metavar="FILE.py:NAME", help="Say how your own network would train, and how fast."),
    ] = None,
    shape: Annotated[
        str, typer.Option("--shape", metavar="C,H,W", help="The shape of one sample, for --check.")
    ] = "3,32,32",
    vocabulary: Annotated[
        int, typer.Option("--vocabulary", metavar="N", help="Samples are token ids from 0 to N-1, for --check.")
    ] = 0,
    head: Annotated[
        str | None, typer.Option("--head", metavar="MODULE", help="The head of the network, for --check.")
    ] = None,
    device: Annotated[str, typer.Option("--device", metavar="NAME", help="The device, for --check.")] = "auto",
    json: Json = False,
) -> None:
    """List the networks with their sizes, show one layer by layer, or check one of your own."""
    check_name("model", name)
    from fedkin.cli.check_network import check_network
    from fedkin.cli.listing import Models

    if check is None:
        Models().present(name, json)
    else:
        check_network(check, shape, vocabulary, head, device, json)


@command(
    "partitions",
    """
    fedkin partitions
    fedkin partitions dirichlet
    """,
    LOOK,
)
def partitions(name: Annotated[str | None, _one("partition")] = None, json: Json = False) -> None:
    """List the ways to deal samples to clients, or explain one of them."""
    check_name("partition", name)
    from fedkin.cli.listing import Partitions

    Partitions().present(name, json)


@command(
    "bench",
    """
    fedkin bench --quick
    fedkin bench cnn-512 --device cuda
    """,
    LOOK,
)
def bench(
    what: Annotated[str, typer.Argument(help="A benchmark by name, or all.")] = "all",
    device: Annotated[str, typer.Option("--device", metavar="DEVICE", help="cpu, cuda, cuda:1, ... or auto.")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Do less work and get rougher numbers.")] = False,
    precision: Annotated[str, typer.Option(help="fp32, tf32, bf16 or auto.")] = "auto",
    way: Annotated[
        str,
        typer.Option(help="How the clients' models are trained side by side: auto, each, threads, batched or graph."),
    ] = "auto",
    json: Json = False,
) -> None:
    """Measure how fast clients are trained here, compared with a plain loop over them."""
    from fedkin.bench.suite import run_bench

    rows = run_bench(what, device, quick, precision, way)
    if json:
        return print_json({"bench": rows})
    names = list(dict.fromkeys(k for row in rows for k in row))
    numbers = [n for n in names if any(isinstance(row.get(n), int | float) for row in rows)]
    made = table(None, *(n.replace("_", " ") for n in names), right=[n.replace("_", " ") for n in numbers])
    for row in rows:
        made.add_row(*(_shown(row.get(n, "")) for n in names))
    screen().print(made)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> None:
    """The entry point: `fedkin` and `python -m fedkin`."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without our characters still shows the rest
    app()


TOPICS = (
    "runs",
    "differences",
    "arrivals",
    "sweeps",
    "tune",
    "reports",
    "web",
    "scaffold",
    "reproduce",
    "deploy",
    "site",
    "doctor",
)
"""Modules beside this one with more commands: importing one registers them."""

for _topic in TOPICS:
    import_module(f"fedkin.cli.{_topic}")

__all__ = ["DEPLOY", "LOOK", "MAKE", "RUNS", "TRAIN", "Json", "RunsDir", "Sets", "app", "command", "everything", "main"]
