"""The commands. Each is thin: it gathers what the user said, hands it on, and shows what comes back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Annotated, Any

import typer

from fedkin.cli.console import complain, guarded, messages, print_json, screen, table
from fedkin.cli.flags import checked, from_file, grid_configs, run_config_of, split_settings, with_settings
from fedkin.config import make_config

app = typer.Typer(
    name="fedkin", no_args_is_help=True, rich_markup_mode="rich", add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]}, pretty_exceptions_show_locals=False,
)  # fmt: skip

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="An option of the method itself; repeatable.")
]


def _command(
    name: str, example: str, panel: str, settings: Callable[[], set[str] | None] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers a command with its example in the help, errors in words, and flags for the settings it takes."""

    def add(function: Callable[..., None]) -> Callable[..., None]:
        lines = "\n\n".join(f"[cyan]{line.strip()}[/]".replace("[:", "\\[:") for line in example.strip().splitlines())
        ready = guarded(function) if settings is None else with_settings(settings())(guarded(function))
        prose = _paragraphs(function.__doc__ or "")
        about = "\n\n".join([*prose, "[bold]Example[/]", lines])
        app.command(name, rich_help_panel=panel, short_help=prose[0], help=about)(ready)
        return function

    return add


def _paragraphs(text: str) -> list[str]:
    return [" ".join(part.split()) for part in text.split("\n\n")]


def _everything() -> None:
    """All settings."""
    return None


TRAIN, LOOK = "Train", "Look at what there is"


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"fedkin {version('fedkin')}")
        raise typer.Exit


WELCOME = """
[bold]FedKin[/]: personalised federated learning. Each client ends up with its own good model.

Start with [cyan]fedkin demo[/], then [cyan]fedkin compare fedavg ditto fedper[/]. Nothing needs a network: the data
set [cyan]digits[/] is included. Every command shows an example: [cyan]fedkin run --help[/].

Exit status: 0 done, 1 failed, 2 wrong usage.
"""


@app.callback(help="\n\n".join(_paragraphs(WELCOME)))
def _welcome(
    show: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and leave.")
    ] = False,
) -> None:
    """What comes before any command."""


@_command("run", """
    fedkin run ditto --data digits --clients 20 --partition pathological:2 --rounds 20 --set lam=0.5
    fedkin run fedcap --attack ipm --malicious 0.3
    fedkin run fedavg --attack lie:z=0.5 --rule multi-krum:malicious=0.4
    fedkin run experiment.toml --rounds 50
    """, TRAIN, settings=_everything)  # fmt: skip
def run(
    target: Annotated[str, typer.Argument(metavar="METHOD|FILE.toml", help="A method's name, or a TOML file.")],
    settings: dict[str, Any],
    set_: Sets = None,
    json: Json = False,
) -> None:
    """Train one federation with one method.

    Settings come from the flags, else from the TOML file (keys as below with underscores, the method's own options
    in a table \\[options]), else from the defaults.

    Under attack the accuracy is that of the benign clients. An attack or rule takes its options after a colon, as in
    lie:z=0.5; [cyan]fedkin attacks[/] and [cyan]fedkin rules[/] list them.
    """
    config = run_config_of(target, settings, set_ or [])
    _remark(settings, [config.attack])

    from fedkin.cli.live import run_screen
    from fedkin.cli.outcome import run_facts, summarise
    from fedkin.rounds import run_config

    with run_screen(messages()) as listener:
        result = run_config(config, on_event=listener)
    if json:
        print_json(run_facts(result))
    else:
        summarise(result)


def _remark(settings: dict[str, Any], attacks: list[str]) -> None:
    """Says so when flags about attackers meet nobody."""
    idle = [f"--{name}" for name in ("malicious", "knowledge", "attackers") if name in settings]
    if idle and set(attacks) == {"none"}:
        messages().print(f"[yellow]{', '.join(idle)} without --attack changes nothing: everybody is honest[/]")


@_command("compare", """
    fedkin compare fedavg ditto fedper --data cifar10 --clients 20 --partition pathological:2 --seeds 3
    fedkin compare fedprox ditto --set fedprox.mu=0.1 --set ditto.lam=0.5
    fedkin compare fedavg fedcap --attack none,sf,lie:z=0.5 --rule mean,median --malicious 0.3
    """, TRAIN, settings=_everything)  # fmt: skip
def compare(
    methods: Annotated[list[str], typer.Argument(metavar="METHOD...", help="Methods; a TOML file for settings.")],
    settings: dict[str, Any],
    seeds: Annotated[
        str | None, typer.Option(metavar="N|A,B,...", help="How many seeds, from --seed on; or a list of them.")
    ] = None,
    set_: Sets = None,
    json: Json = False,
) -> None:
    """Train several methods under the same conditions; one table, mean ± std over seeds.

    --set NAME=VALUE reaches every method that has the option; --set METHOD.NAME=VALUE reaches one.

    Here --attack and --rule take several with commas between, each with its own options: in
    --attack none,backdoor:target=1,share=0.5,ipm there are three attacks, as share=0.5 has no name before a colon.
    Every method meets every attack under every rule.
    """
    configs = grid_configs(methods, settings, set_ or [], seeds)
    attacks, rules = (list(dict.fromkeys(getattr(c, key) for c in configs[0])) for key in ("attack", "rule"))
    _remark(settings, attacks)
    first = configs[0][0]
    parts = [first.data, f"{first.clients or 'all'} clients", first.partition, f"{first.rounds} rounds"]
    if attacks != ["none"]:
        parts += [f"attack {' | '.join(attacks)}", f"{100 * first.malicious:g} % malicious"]
    if rules != ["mean"]:
        parts.append(f"rule {' | '.join(rules)}")
    _compare(configs, " · ".join(parts), json)


def _compare(configs: Any, title: str, json: bool, closing: Callable[[Any], list[str]] | None = None) -> None:
    from fedkin.cli.grid import run_grid, summary_table

    grid = run_grid(configs, title)
    if json:
        print_json(grid.to_dict())
    elif grid.results:
        out = screen()
        out.print(summary_table(grid))
        for sentence in closing(grid) if closing else []:
            out.print(sentence)
    if not grid.complete:
        complain("stopped by Ctrl-C; the table holds the runs that were finished")
        raise typer.Exit(130)
    if grid.failed:
        complain(f"{len(grid.failed)} of {len(grid.failed) + len(grid.results)} runs failed")
        raise typer.Exit(1)


@_command("demo", "fedkin demo", TRAIN)
def demo(json: Json = False) -> None:
    """Every method on handwritten digits, everybody honest, then with hostile clients: under a minute, no download."""
    import torch

    from fedkin.cli.demo import SETTINGS, sentences
    from fedkin.methods import METHODS

    torch.set_num_threads(1)  # networks this small gain nothing from more, and on a busy machine lose everything
    configs = grid_configs(list(METHODS), SETTINGS, [], None)
    title = "Handwritten digits, 20 clients with two classes each: all honest, then three in ten hostile"
    _compare(configs, title, json, sentences)


@_command("split", """
    fedkin split --data digits --clients 20 --partition dirichlet:0.1
    fedkin split experiment.toml --json
    """, LOOK, settings=split_settings)  # fmt: skip
def split(
    settings: dict[str, Any],
    file: Annotated[str | None, typer.Argument(metavar="[FILE.toml]", help="Settings from a TOML file.")] = None,
    json: Json = False,
) -> None:
    """Show who would hold which classes, before anything trains."""
    from fedkin.cli.splits import show_split

    show_split(checked(make_config({**(from_file(file) if file else {}), **settings})), json)


@_command("methods", """
    fedkin methods
    fedkin methods fedrep --model cnn-512
    """, LOOK)  # fmt: skip
def methods(
    name: Annotated[str | None, typer.Argument(help="One method: its paper, options and message size.")] = None,
    model: Annotated[str, typer.Option(metavar="NAME", help="The model whose message size is shown.")] = "cnn-512",
    json: Json = False,
) -> None:
    """List the methods, or show one: paper, options with ranges, what is shared."""
    from fedkin.cli.listing import list_methods, show_method

    if name is None:
        list_methods(json)
    else:
        show_method(name, model, json)


@_command("attacks", """
    fedkin attacks
    fedkin attacks lie
    """, LOOK)  # fmt: skip
def attacks(name: Annotated[str | None, typer.Argument(help="One attack.")] = None, json: Json = False) -> None:
    """List what malicious clients can do, or show one attack: paper, options with ranges."""
    from fedkin.cli.listing import list_attacks, show_attack

    if name is None:
        list_attacks(json)
    else:
        show_attack(name, json)


@_command("rules", """
    fedkin rules
    fedkin rules multi-krum
    """, LOOK)  # fmt: skip
def rules(name: Annotated[str | None, typer.Argument(help="One rule.")] = None, json: Json = False) -> None:
    """List the rules by which the server can average, or show one: paper, options with ranges."""
    from fedkin.cli.listing import list_rules, show_rule

    if name is None:
        list_rules(json)
    else:
        show_rule(name, json)


@_command("datasets", """
    fedkin datasets
    fedkin datasets cifar10 --data-dir ~/data
    """, LOOK)  # fmt: skip
def datasets(
    name: Annotated[str | None, typer.Argument(help="One data set.")] = None,
    data_dir: Annotated[str | None, typer.Option(metavar="DIR", help="Where to look for the files.")] = None,
    json: Json = False,
) -> None:
    """List the data sets and whether their files are there, or show one."""
    from fedkin.cli.listing import list_datasets, show_dataset

    if name is None:
        list_datasets(data_dir, json)
    else:
        show_dataset(name, data_dir, json)


@_command("models", """
    fedkin models
    fedkin models resnet18
    """, LOOK)  # fmt: skip
def models(name: Annotated[str | None, typer.Argument(help="One model.")] = None, json: Json = False) -> None:
    """List the networks with their sizes, or show one layer by layer."""
    from fedkin.cli.listing import list_models, show_model

    if name is None:
        list_models(json)
    else:
        show_model(name, json)


@_command("partitions", """
    fedkin partitions
    fedkin partitions dirichlet
    """, LOOK)  # fmt: skip
def partitions(name: Annotated[str | None, typer.Argument(help="One partition.")] = None, json: Json = False) -> None:
    """List the ways to deal samples to clients, or explain one."""
    from fedkin.cli.listing import list_partitions, show_partition

    if name is None:
        list_partitions(json)
    else:
        show_partition(name, json)


@_command("bench", """
    fedkin bench --quick
    fedkin bench cnn-512 --device cuda
    """, LOOK)  # fmt: skip
def bench(
    what: Annotated[str, typer.Argument(help="One benchmark, or all.")] = "all",
    device: Annotated[str, typer.Option(metavar="DEVICE", help="cpu, cuda, cuda:1, ... or auto.")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Less work, rougher numbers.")] = False,
    precision: Annotated[str, typer.Option(help="fp32, tf32, bf16 or auto.")] = "auto",
    way: Annotated[str, typer.Option(help="How rows are trained: auto, or one way (compiled, graph, ...).")] = "auto",
    json: Json = False,
) -> None:
    """Measure the speed of this machine, as ratios to the obvious loop over clients."""
    from fedkin.bench import run_bench

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


