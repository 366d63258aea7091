"""`fedkin tune`: good settings for a method, by trials that are chosen on validation samples."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from fedkin.cli.application import TRAIN, Json, Sets, command, everything
from fedkin.cli.console import complain, messages, print_json, safe, screen, table
from fedkin.cli.extras import Budget, Devices, Jobs, Plugins, Together, spread, use_plugins
from fedkin.cli.flags import run_config_of, seeds_of
from fedkin.cli.names import methods_and_files
from fedkin.config import Config
from fedkin.errors import UsageError
from fedkin.options import said

if TYPE_CHECKING:
    from fedkin.sweep.tuning import Trial, Tuned

STATES = {"done": "green", "pruned": "dim", "failed": "red"}


@command(
    "tune",
    """
    fedkin tune ditto --trials 20
    fedkin tune ditto --search lr=1e-4..1e-1:log --search ditto.lam=0.01..10:log --search batch=10,20,50 --seeds 3
    fedkin tune fedper --search lr=0.001..1:log --trials 30 --validation-share 0.3 --jobs 2
    """,
    TRAIN,
    settings=everything,
)
def tune(
    target: Annotated[
        str,
        typer.Argument(
            metavar="METHOD|FILE.toml", help="A method's name, or a TOML file.", autocompletion=methods_and_files
        ),
    ],
    settings: dict[str, Any],
    trials: Annotated[
        int, typer.Option("--trials", metavar="N", min=1, help="Trials in all, those of earlier calls among them.")
    ] = 20,
    search: Annotated[
        list[str] | None,
        typer.Option(
            "--search",
            metavar="NAME=RANGE",
            help="Where to look: LOW..HIGH, LOW..HIGH:log or A,B,C, for a setting or one of the method's options; can "
            "be repeated. \\[default: the learning rate, and what the method declares]",
        ),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option("--seeds", metavar="N|A,B,...", help="A run for each in every trial; the mean over them decides."),
    ] = None,
    prune: Annotated[
        bool, typer.Option("--prune/--no-prune", help="End trials early that do worse than the median of the others.")
    ] = True,
    set_: Sets = None,
    together: Together = None,
    jobs: Jobs = 1,
    devices: Devices = None,
    budget: Budget = None,
    plugin: Plugins = None,
    json: Json = False,
) -> None:
    """Look for good settings of one method, by trials.

    A trial is chosen by its score on validation samples, the mean over clients and over --seeds; a fifth of each
    client's training samples is set aside for that, unless --validation-share says otherwise. Test samples have no
    say. The test accuracy is shown for the trial that was chosen, and for no other.

    The study is a file in the runs folder, and every run has its folder: the same command goes on where it was
    stopped, and with more --trials it adds to them. Needs Optuna: pip install 'fedkin\\[tune]'.
    """
    use_plugins(plugin)
    config = run_config_of(target, settings, set_ or [], _repeatable)

    from fedkin.methods import METHODS
    from fedkin.sweep.expand import idle_of
    from fedkin.sweep.search import space_of
    from fedkin.sweep.tuning import SHARE, Search
    from fedkin.sweep.tuning import tune as find

    if "validation_share" not in config.asked:
        config = replace(config, validation_share=SHARE, given={*config.asked, "validation_share"})
        _say(f"{100 * SHARE:g} % of each client's training samples are set aside for validation (--validation-share)")
    kind = METHODS[config.method]
    space = space_of(config, kind, ranges(search or []), idle_of(config, kind))
    wanted = Search(config, kind, space, seeds_of(seeds, config.seed), trials, prune)
    if config.start_from is not None:
        from fedkin.runs.origin import name_of

        _say(f"every run begins with {name_of(config)}")
    _say(f"searching {'; '.join(axis.words() for axis in space)}")
    if wanted.store is not None:
        _say(f"study {wanted.store}{', which goes on' if wanted.store.exists() else ''}")
    how = spread(together, jobs, devices, budget, config.device)
    with _Screens(f"tuning {config.method}") as screens:
        found = find(wanted, watcher=screens, tell=screens.told, signals=True, **how)
    show(found, json)


def _repeatable(config: Config) -> None:
    if config.start_from is not None:
        from fedkin.runs.origin import check_repeatable

        check_repeatable(config.start_from)


def ranges(words: Sequence[str]) -> dict[str, str]:
    """`--search lr=1e-4..1e-1:log` by name."""
    made: dict[str, str] = {}
    for word in words:
        name, equals, where = (part.strip() for part in word.partition("="))
        if not equals or not name or not where:
            raise UsageError(f"--search {word!r}: write NAME=LOW..HIGH, NAME=LOW..HIGH:log, or NAME=A,B,C")
        if name in made:
            raise UsageError(f"--search {word!r}: {name} is named twice")
        made[name] = where
    return made


def show(found: Tuned, json: bool) -> None:
    """The trials, the best of them, and how it ended."""
    again = command_of(found.config) if found.config is not None else None
    if json:
        print_json({**found.to_dict(), "command": again})
    elif found.trials:
        _tables(found, again)
    if found.stopped is not None:
        name = "Ctrl-C" if found.stopped == 2 else "SIGTERM"
        complain(f"stopped by {name} after {len(found.trials)} trials; the same command goes on from there")
        raise typer.Exit(128 + found.stopped)
    if found.best is None:
        complain("no trial came to its end, so there is nothing to choose from")
        raise typer.Exit(1)


def _tables(found: Tuned, again: str | None) -> None:
    from fedkin.sweep.tuning import ranked

    out, names = screen(), list(dict.fromkeys(name for t in found.trials for name in t.settings))
    seeds = "" if len(found.seeds) == 1 else f", mean of {len(found.seeds)} seeds"
    score = f"validation {found.metric}"
    numbers = ("trial", *map(safe, names), score)
    made = table(f"{found.method}: {len(found.trials)} trials{seeds}", *numbers, "", right=numbers)
    for t in ranked(found.trials, found.higher):
        values = [_value(t.settings.get(name)) for name in names]
        spread = f" ± {said(t.std, found.unit)}" if t.std == t.std else ""
        state = "[bold green]chosen[/]" if t is found.best else f"[{STATES[t.state]}]{_state(t)}[/]"
        made.add_row(str(t.number), *values, f"{said(t.score, found.unit)}{spread}", state)
    out.print(made)
    for remark in found.remarks:
        out.print(f"[yellow]note[/] {safe(remark)}", soft_wrap=True)
    if found.importance:
        shares = ", ".join(f"{safe(name)} {100 * share:.0f} %" for name, share in found.importance.items())
        out.print(f"[dim]{'what mattered':<14}[/] {shares}", soft_wrap=True)
    if found.best is not None:
        best = found.best
        spread = f" ± {said(best.test_std, found.unit)}" if best.test_std == best.test_std else ""
        tested = f"test {found.metric} {said(best.test, found.unit)}{spread}, on which nothing was chosen"
        out.print(f"[bold]{'chosen':<14}[/] {safe(best.words())}; {safe(tested)}", soft_wrap=True)
        out.print(f"[dim]{'run it':<14}[/] {safe(str(again))}", soft_wrap=True, highlight=False)


def _state(trial: Trial) -> str:
    return f"pruned after round {trial.rounds}" if trial.state == "pruned" else safe(trial.why)


def _value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else safe(str(value))


def command_of(config: Config) -> str:
    """The command that does this run."""
    words = ["fedkin", "run", config.method]
    for setting in fields(Config):
        value = getattr(config, setting.name)
        if setting.name not in config.asked - {"method", "options"} or value is None:
            continue
        flag = setting.name.replace("_", "-")
        words += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    for name, value in config.options.items():
        words += ["--set", f"{name}={value}"]
    return shlex.join(words)


class _Screens:
    """A live table of the runs at work on a terminal, and a line for each trial that ends."""

    def __init__(self, title: str) -> None:
        self._title, self._open = title, list[Any]()

    def __enter__(self) -> _Screens:
        return self

    def __exit__(self, *error: object) -> None:
        self._close()

    def __call__(self, cells: list[Any]) -> Any:
        from fedkin.cli.live import GridScreen

        class Passing(GridScreen):
            """Wiped when its trials are over; silent where it could not be."""

            transient = True

            def __enter__(self) -> GridScreen:
                return super().__enter__() if self._live else self

            def listener(self, cell: Any) -> Callable[[Any], None]:
                heard = super().listener(cell) if self._live else _records(cell)
                return heard

        self._close()
        self._open = [Passing(cells, messages(), self._title).__enter__()]
        return self._open[0]

    def told(self, trial: Trial) -> None:
        self._close()
        score = f"validation {trial.score:.4g}" if trial.state == "done" else trial.why
        _say(f"trial {trial.number}  {trial.words()}  {score}")

    def _close(self) -> None:
        for shown in self._open:
            shown.__exit__(None, None, None)
        self._open = []


def _records(cell: Any) -> Callable[[Any], None]:
    cell.state = "running"
    return lambda event: None


def _say(line: str) -> None:
    messages().print(escape(line), soft_wrap=True, highlight=False)
