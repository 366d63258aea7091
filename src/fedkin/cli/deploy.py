"""Commands of a real deployment: `server`, `client`, and `local-cluster` to try both on one machine."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fedkin.cli.application import DEPLOY, Json, Sets, command, everything
from fedkin.cli.arrivals import interrupt, serve_arrivals
from fedkin.cli.console import messages, print_json
from fedkin.cli.extras import Plugins, use_plugins
from fedkin.cli.flags import from_file, is_file, run_config_of
from fedkin.config import Config, is_folder
from fedkin.errors import UsageError
from fedkin.rounds.words import printable

KEYS_HELP = "The folder that `fedkin keys new` made."
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Use no TLS and no keys: only for trials on a machine of your own.")
]

Key = Annotated[str | None, typer.Option("--key", metavar="FILE", help="This site's private key.")]
Cert = Annotated[
    str | None,
    typer.Option("--cert", metavar="FILE", help="This site's certificate (default: the .crt file beside the key)."),
]
Task = Annotated[
    str,
    typer.Option("--task", metavar="TASK", help="What this site's data are for; runs that learn else are declined."),
]
ImageMode = Literal["rgb", "grey"]
Vocabulary = Annotated[
    int,
    typer.Option("--vocabulary", min=0, metavar="N", help="The samples are token ids below N; all sites say the same."),
]
Ca = Annotated[str | None, typer.Option("--ca", metavar="FILE", help="The authority's certificate, ca.crt.")]


@command(
    "server",
    """
    fedkin server experiment.toml --keys keys --host 0.0.0.0
    fedkin server fedcap --clients 4 --rounds 20 --keys keys
    fedkin server --resume last --keys keys
    fedkin server --join last --keys keys --host 0.0.0.0
    """,
    DEPLOY,
    settings=everything,
)
def server(
    settings: dict[str, Any],
    target: Annotated[
        str | None, typer.Argument(metavar="[METHOD|FILE.toml]", help="A method's name, or a TOML file.")
    ] = None,
    set_: Sets = None,
    keys: Annotated[str | None, typer.Option("--keys", metavar="DIR", help=KEYS_HELP)] = None,
    insecure: Insecure = False,
    host: Annotated[
        str, typer.Option(help="The address to serve on; 0.0.0.0: all addresses of this machine.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port to serve on; 0: any port that is free.")] = 9092,
    resume: Annotated[
        str | None, typer.Option("--resume", metavar="RUN", help="Continue a run that was stopped.")
    ] = None,
    join: Annotated[
        str | None,
        typer.Option("--join", metavar="RUN", help="Give sites that come after a run models of their own."),
    ] = None,
    again: Annotated[
        list[str] | None,
        typer.Option("--again", metavar="SITE", help="With --join: a site that had its model may have another one."),
    ] = None,
    wait: Annotated[float, typer.Option(min=1, help="Seconds to wait until the sites have joined.")] = 600.0,
    deadline: Annotated[float, typer.Option(min=1, help="Seconds that a site has to answer one question.")] = 600.0,
    phase_deadline: Annotated[
        str | None,
        typer.Option("--phase-deadline", metavar="PHASE=SECONDS,...", help="Deadlines for single phases, in seconds."),
    ] = None,
    minimum: Annotated[
        float, typer.Option(min=0, max=1, help="Share of all sites that must be connected for the run to continue.")
    ] = 0.5,
    give_up: Annotated[
        float, typer.Option("--give-up", metavar="SECONDS", min=0, help="End the run after so long without any reply.")
    ] = 3600.0,
    least: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Start with N sites if the others do not join or their data do not fit."),
    ] = None,
    remove_after: Annotated[
        int, typer.Option(min=0, metavar="N", help="Remove a site after N invalid messages in a row; 0: never.")
    ] = 8,
    max_classes: Annotated[int, typer.Option(min=1, help="Number of classes that all sites together may name.")] = 1000,
    transport: Annotated[
        str, typer.Option("--transport", metavar="fp32|fp16|int8", help="The format in which numbers are sent.")
    ] = "fp32",
    max_message: Annotated[
        int | None,
        typer.Option(min=1, metavar="MB", help="The largest reply that is accepted (default: eight times the model)."),
    ] = None,
    plugin: Plugins = None,
    json: Json = False,
) -> None:
    """Run an experiment over real sites, each with its own data on its own machine.

    Sites join with [cyan]fedkin client[/]. A site that fails is left out of that round and may come back; a server
    that was killed continues from its last checkpoint with --resume, and the sites come back by themselves.
    """
    from fedkin.cli.live import run_screen
    from fedkin.cli.outcome import run_facts, summarise
    from fedkin.deploy.server import Serving, resume_server, run_server
    from fedkin.engines.remote import Terms, TooFew
    from fedkin.runs.catalogue import Catalogue, runs_folder
    from fedkin.runs.start import Interrupted

    past = "--resume" if resume is not None else "--join"
    if resume is not None and join is not None:
        raise UsageError("--resume or --join, not both: one goes on with a run, the other leaves it as it is")
    if (resume or join) is not None and (target is not None or set_):
        raise UsageError(f"{past} takes a run as it was begun: give no method, file or --set")
    if (resume or join) is None and target is None:
        raise UsageError("which experiment? Give a method or a TOML file, or --resume RUN")
    if again and join is None:
        raise UsageError(f"--again {again[0]} allows a site another model of a finished run: give it with --join RUN")
    if transport not in ("fp32", "fp16", "int8"):
        raise UsageError(f"transport {transport!r}: choose fp32, fp16 or int8")
    use_plugins(plugin)
    serving = Serving(
        host,
        port,
        _keys_folder(keys, insecure),
        wait,
        Terms(deadline, minimum, give_up, phases=_phases(phase_deadline), invalid=remove_after),
        transport,  # type: ignore[arg-type]
        None if max_message is None else max_message << 20,
        least=least,
        most_classes=max_classes,
    )
    if join is not None:
        idle = {"least": least is None, "minimum": minimum == 0.5, "give-up": give_up == 3600.0}
        unused = [name for name, usual in idle.items() if not usual]
        return serve_arrivals(join, serving, settings, unused, again or [], _say, json)
    try:
        with run_screen(messages()) as listener:
            if resume is not None:
                run = Catalogue(runs_folder(settings.get("runs_dir"))).find(resume)
                result = resume_server(run, serving, on_event=listener, say=_say, signals=True)
            else:
                given = {**(from_file(str(target)) if is_file(str(target)) else {}), **settings}
                settings.setdefault("checkpoint_every", given.get("checkpoint_every", 1))
                config = run_config_of(str(target), settings, set_ or [])
                clients = config.clients if "clients" in given else None
                result = run_server(config, serving, clients=clients, on_event=listener, say=_say, signals=True)
    except Interrupted as error:
        _say(f"{error}; go on with: fedkin server --resume {error.run.name}, the sites come back by themselves")
        raise typer.Exit(error.exit_code) from None
    except TooFew as error:
        _say(f"{error}: fedkin server --resume last")
        raise typer.Exit(1) from None
    if json:
        print_json(run_facts(result))
    else:
        summarise(result)


def _phases(text: str | None) -> dict[str, float]:
    """Deadlines as they are written: train=1800,validate=60."""
    found: dict[str, float] = {}
    for part in (text or "").split(","):
        name, equals, seconds = part.partition("=")
        try:
            if part:
                found[name.strip()] = float(seconds)
        except ValueError:
            equals = ""
        if part and (not equals or not 1 <= found[name.strip()] < float("inf")):
            raise UsageError(f"--phase-deadline {part!r}: write PHASE=SECONDS, for instance train=1800")
    return found


def _keys_folder(keys: str | None, insecure: bool) -> Path | None:
    if keys is not None and insecure:
        raise UsageError("--keys or --insecure, not both")
    if keys is None and not insecure:
        raise UsageError("give --keys DIR (fedkin keys new makes it); for a trial without any protection, --insecure")
    return None if keys is None else Path(keys).expanduser()


def _say(text: str) -> None:
    """A line on the screen, with the time; for logs and people alike."""
    messages().print(f"{time.strftime('%H:%M:%S')} {text}", markup=False, highlight=False)


@command(
    "client",
    """
    fedkin client --server fl.example.org:9092 --data oslo.npz --name oslo --key oslo.key --ca ca.crt
    fedkin client --server 127.0.0.1:9092 --data oslo.npz --name oslo --insecure
    """,
    DEPLOY,
)
def client(
    server: Annotated[str, typer.Option("--server", metavar="HOST:PORT", help="Where `fedkin server` serves.")],
    data: Annotated[
        str,
        typer.Option(
            "--data", metavar="FILE", help="This site's samples: .npz, .csv, .parquet, or a folder CLASS/*.png."
        ),
    ],
    name: Annotated[str, typer.Option("--name", metavar="SITE", help="This site's name, as in its certificate.")],
    key: Key = None,
    cert: Cert = None,
    ca: Ca = None,
    insecure: Insecure = False,
    folder: Annotated[
        str | None,
        typer.Option(
            "--folder", metavar="DIR", help="The folder for this site's state and model (default: ./fedkin-SITE)."
        ),
    ] = None,
    label: Annotated[str, typer.Option(help="The column that holds the labels, if the data are a table.")] = "label",
    task: Task = "classification",
    vocabulary: Vocabulary = 0,
    categories: Annotated[
        str, typer.Option(metavar="A+B", help="Columns of a table that are categories although they hold numbers.")
    ] = "",
    image_size: Annotated[
        str | None, typer.Option(metavar="N|HxW", help="The size that images are brought to, the same at all sites.")
    ] = None,
    image_mode: Annotated[ImageMode | None, typer.Option(help="What images are converted to.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...; auto: a GPU if there is one.")] = "auto",
    noise: Annotated[
        str,
        typer.Option(
            "--noise",
            metavar="secret|shared",
            help="Whether noise is drawn from a seed that only this site knows, or from the run's.",
        ),
    ] = "secret",
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy", metavar="FILE.toml", help="A file that says what this site allows, whatever the server asks."
        ),
    ] = None,
    max_message: Annotated[
        int, typer.Option("--max-message", min=1, metavar="MB", help="The largest message that this site accepts.")
    ] = 1024,
    stay: Annotated[bool, typer.Option("--stay", help="After a run, wait for the next one.")] = False,
    give_up: Annotated[
        float | None,
        typer.Option("--give-up", metavar="SECONDS", help="End if no server could be reached for so long."),
    ] = None,
    plugin: Plugins = None,
) -> None:
    """Take part in a federation with this machine's data, which stay here.

    The client works until the server says that the run is over, and connects again by itself if the server or the
    network was away. Every line that begins with "sent:" says in words and bytes what left this machine, and
    record.jsonl in the client's folder keeps what was asked and answered. When the run is over, the model for this
    site is written to personal.safetensors in the same folder.
    """
    from fedkin.deploy.certificates import identity_of, site_name
    from fedkin.deploy.doctor import address

    site_name(name)
    host, port = address(server)
    if noise not in ("secret", "shared"):
        raise UsageError(f"--noise {noise}: choose secret or shared")
    if insecure and (key or ca or cert):
        raise UsageError("--insecure goes without --key, --cert and --ca")
    if not insecure and (key is None or ca is None):
        raise UsageError("give --key and --ca; for a trial without any protection, --insecure")
    identity = None if key is None or ca is None else identity_of(key, ca, cert)
    if identity is not None and (found := identity.check().name) != name:
        raise UsageError(f"--name {name}: the certificate {identity.certificate} is that of {found!r}")

    use_plugins(plugin)
    from fedkin.data import Shown
    from fedkin.deploy.client import ServerToJoin, serve
    from fedkin.deploy.joining import TRAVELS
    from fedkin.deploy.policy import Policy
    from fedkin.deploy.worker import Worker
    from fedkin.tasks import make_task

    rules = Policy.read(policy, TRAVELS) if policy is not None else Policy()
    where = Path(folder).expanduser() if folder else Path(f"fedkin-{name}")
    worker = Worker(
        name,
        Path(data).expanduser(),
        where,
        _line,
        label,
        make_task(task).targets,  # type: ignore[arg-type]
        vocabulary,
        tuple(categories.split("+")) if categories else (),
        Shown.of(image_size, image_mode),
        device,
        secret=noise == "secret",
        limit=max_message << 20,
        policy=rules,
    )
    shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    signal.signal(signal.SIGTERM, interrupt)  # so that it says goodbye
    try:
        serve(worker, ServerToJoin(shown, identity, give_up), _line, stay)
    except KeyboardInterrupt:
        _line("stopped; what this site keeps is in its folder, start it again to go on")
        raise typer.Exit(130) from None


def _line(text: str) -> None:
    print(f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} {printable(text)}", flush=True)


@command(
    "local-cluster",
    """
    fedkin local-cluster 4 --method fedcap --rounds 5
    fedkin local-cluster 4 --method c-pfl --data digits --partition dirichlet:0.3 --rounds 10
    """,
    DEPLOY,
    settings=everything,
)
def local_cluster(
    number: Annotated[int, typer.Argument(metavar="N", min=1, max=64, help="The number of client processes.")],
    settings: dict[str, Any],
    method: Annotated[str, typer.Option("--method", metavar="METHOD", help="Which method.")] = "fedcap",
    set_: Sets = None,
    folder: Annotated[
        str,
        typer.Option("--folder", metavar="DIR", help="The folder, a new one, for keys, data files, models and logs."),
    ] = "cluster",
    insecure: Insecure = False,
    plugin: Plugins = None,
) -> None:
    """Try a deployment on this machine: a server and N clients, each a process of its own, with keys and TLS.

    The data set is dealt to N files, one for each client. All processes end with the run.
    """
    from fedkin.deploy.cluster import run_cluster
    from fedkin.plugins import given

    use_plugins(plugin)
    # deals any data set to any number of clients
    usual = {} if is_folder(settings.get("data") or Config().data) else {"partition": "dirichlet:0.5"}
    config = run_config_of(method, {**usual, **settings, "clients": str(number)}, set_ or [])
    models = run_cluster(
        config, Path(folder).expanduser(), insecure=insecure, plugins=given(), say=_say, out=sys.stderr
    )
    for name, path in models.items():
        print(f"{name}: {path}")
