"""Clients that come when a run is over: on this machine, or sites of a deployment."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedkin.cli.application import TRAIN, Json, RunsDir, command
from fedkin.cli.console import messages, print_json, safe, screen, table
from fedkin.cli.extras import Plugins, use_plugins
from fedkin.cli.runs import Run
from fedkin.errors import UsageError
from fedkin.options import said

if TYPE_CHECKING:
    from fedkin.deploy.server import Serving

FOR_LATECOMERS = ("clients", "epochs", "runs_dir")
"""The settings that have a meaning for sites that come when a run is over."""


@command(
    "join",
    """
    fedkin join last --data new-clinic.csv
    fedkin join last --data clinics --samples 5,20,100 --save models
    """,
    TRAIN,
)
def join(
    run: Run,
    data: Annotated[
        str,
        typer.Option(
            "--data", metavar="FILE|DIR", help="A file (.npz, .csv, .parquet), or a folder with one for each newcomer."
        ),
    ],
    samples: Annotated[
        str,
        typer.Option("--samples", metavar="N,N,...", help="Also show how models do that train on so many samples."),
    ] = "",
    epochs: Annotated[
        int | None,
        typer.Option(
            "--epochs", metavar="N", help="Epochs for which a newcomer trains (default: what the method needs)."
        ),
    ] = None,
    save: Annotated[
        str | None, typer.Option("--save", metavar="DIR", help="Write the models into a folder, for fedkin predict.")
    ] = None,
    label: Annotated[
        str, typer.Option("--label", metavar="NAME", help="The column of a table that holds the labels.")
    ] = "label",
    device: Annotated[
        str | None, typer.Option("--device", metavar="NAME", help="cpu, cuda, ... (default: the run's).")
    ] = None,
    runs_dir: RunsDir = None,
    plugin: Plugins = None,
    json: Json = False,
) -> None:
    """Give clients that were not in a run models of their own, without changing anybody else's.

    Each method has its recipe: one that shares a body tunes a head on it, Ditto pulls a model towards the shared one,
    FedCAP mixes one of those that are similar. The table says how accurate a newcomer's model is on its own test
    samples before it trains (0 samples) and afterwards.
    """
    use_plugins(plugin)
    counts = _counts(samples)

    from fedkin.use.join import join as settle

    found = settle(run, data=data, samples=counts, epochs=epochs, label=label, runs_dir=runs_dir, device=device)
    written = [str(path) for path in found.save(save)] if save is not None else []
    if json:
        return print_json({**found.to_dict(), "files": written})
    numbers = ("samples", safe(found.metric.name), "loss", "test samples")
    made = table(f"{found.method}, {found.epochs} epochs", "newcomer", *numbers, right=numbers)
    for t in found.trials:
        name, count = safe(t.client), "0 (before)" if not t.samples else str(t.samples)
        made.add_row(name, count, said(t.accuracy, found.metric.unit), said(t.loss, ""), str(t.test_samples))
    if len(found.names) > 1:
        made.add_section()
        for samples_each, mean in found.means().items():
            count = str(samples_each) if samples_each else "0 (before)"
            made.add_row(f"mean of {len(found.names)}", count, said(mean, found.metric.unit), "", "")
    out = screen()
    out.print(made)
    for remark in found.remarks:
        out.print(f"[yellow]note[/] {safe(remark)}", soft_wrap=True)
    if written:
        many = f"{len(written)} models" if len(written) > 1 else "the model"
        messages().print(f"{many} written: fedkin predict --model {safe(written[0])} --data NEW", soft_wrap=True)


def serve_arrivals(
    run: str,
    serving: Serving,
    settings: Mapping[str, Any],
    idle: Sequence[str],
    again: Sequence[str],
    say: Callable[[str], None],
    json: bool,
) -> None:
    """`fedkin server --join RUN`. `idle`: flags that were given and have no meaning here. `again`: sites that may have
    another model."""
    from fedkin.config import make_config
    from fedkin.deploy.latecomers import serve_latecomers
    from fedkin.runs.catalogue import Catalogue, runs_folder

    given = [*(name.replace("_", "-") for name in settings if name not in FOR_LATECOMERS), *idle]
    if given:
        raise UsageError(f"--{given[0]} changes nothing with --join, which leaves the run as it is; leave it out")
    asked = make_config({name: settings[name] for name in ("clients", "epochs") if name in settings})
    clients, epochs = ((getattr(asked, n) if n in settings else None) for n in ("clients", "epochs"))
    found = Catalogue(runs_folder(settings.get("runs_dir"))).locate(run)
    signal.signal(signal.SIGTERM, interrupt)
    told = serve_latecomers(found, serving, clients=clients, epochs=epochs, again=again, say=say)
    if json:
        print_json(told.to_dict())
    else:
        say(f"{len(told.settled)} sites came late and have models of their own")
    if told.stopped:
        raise typer.Exit(130)


def interrupt(number: int, frame: object) -> None:
    """SIGTERM as Ctrl-C: whoever is at work ends in order."""
    raise KeyboardInterrupt


def _counts(text: str) -> list[int]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise UsageError(f"--samples {text!r}: give numbers of samples with commas between, as in 5,20,100")
    return [int(word) for word in words]
