"""What a site needs before and after a federation: keys, and the use of its model."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from fedkin.cli.application import DEPLOY, USE, Json, RunsDir, app, command
from fedkin.cli.console import messages, percent, print_json, screen, table
from fedkin.cli.extras import Plugins, use_plugins
from fedkin.errors import UsageError

if TYPE_CHECKING:
    from datetime import datetime

    from fedkin.deploy.certificates import Certificate, KnownSite
    from fedkin.use.model_file import Personal

SHOWN = 10

keys = typer.Typer(
    no_args_is_help=True, rich_markup_mode="rich", help="Make and manage the certificates and keys of a deployment."
)
app.add_typer(keys, name="keys", rich_help_panel=DEPLOY)

Folder = Annotated[str, typer.Argument(metavar="DIR", help="The folder of keys on the server.")]
Hosts = Annotated[
    str,
    typer.Option(
        "--host",
        metavar="NAME[,NAME]",
        help="The names and addresses by which sites reach the server, with commas between.",
    ),
]


def _listed(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


# ---------------------------------------------------------------- keys


@command(
    "new",
    """
    fedkin keys new keys --host server.example.org,10.0.0.5
    fedkin keys new keys --host localhost --sites siteA,siteB
    """,
    within=keys,
)
def keys_new(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="The folder to make.")],
    host: Hosts,
    sites: Annotated[
        str | None,
        typer.Option(
            "--sites",
            metavar="NAME,...",
            help="Sites whose keys are made here as well; it is safer to run `fedkin keys new-site` at each site.",
        ),
    ] = None,
    days: Annotated[
        int,
        typer.Option(help="How long the authority is valid; the server's certificate is valid for at most 825 days."),
    ] = 730,
    json: Json = False,
) -> None:
    """Make a certificate authority and the server's certificate. Run this once, on the server.

    Give ca.crt to every site. Nothing that exists is overwritten.
    """
    from fedkin.deploy.authority import new_folder

    made = new_folder(folder, _listed(host), _listed(sites), days)
    _show_folder(str(made), json)
    if not json and sites:
        messages().print(
            f"[yellow]Give each site its {escape(str(made))}/sites/NAME.key and NAME.crt in a safe way, "
            "then delete the key here; the server does not need it.[/]",
            soft_wrap=True,
        )


@command("new-site", "fedkin keys new-site siteA --to ~/fedkin", within=keys)
def keys_new_site(
    name: Annotated[str, typer.Argument(help="The site's name.")],
    to: Annotated[str, typer.Option("--to", metavar="DIR", help="The folder for NAME.key and NAME.csr.")] = ".",
    json: Json = False,
) -> None:
    """Make a site's key and a request for its certificate. Run this once, at the site; only NAME.csr leaves it.

    Tell the person who runs the server the fingerprint, by phone or in person.
    """
    from fedkin.deploy.authority import new_site
    from fedkin.deploy.certificates import fingerprint, load_request

    request = new_site(to, name)
    print_of = fingerprint(load_request(request).public_key())
    private = request.with_suffix(".key")
    if json:
        return print_json({"site": name, "fingerprint": print_of, "private": str(private), "request": str(request)})
    out = screen()
    out.print(f"{escape(str(private))}  the private key: it stays here, mode 600", soft_wrap=True)
    out.print(f"{escape(str(request))}  goes to the server, for `fedkin keys sign`", soft_wrap=True)
    out.print(f"fingerprint {print_of}", soft_wrap=True)


@command(
    "sign",
    """
    fedkin keys sign keys siteA.csr
    fedkin keys sign keys siteA.csr --replace
    """,
    within=keys,
)
def keys_sign(
    folder: Folder,
    request: Annotated[str, typer.Argument(metavar="NAME.csr", help="The site's request, NAME.csr.")],
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="The site's name (default: the one in the request).")
    ] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Replace the key that the site had.")] = False,
    days: Annotated[
        int, typer.Option(help="How long the certificate is valid; it ends with the authority at the latest.")
    ] = 400,
    json: Json = False,
) -> None:
    """Let a site join: make its certificate, DIR/sites/NAME.crt. Compare the printed fingerprint with the site's.

    If the same request is signed again, the site gets a new certificate for the same key. A server that is running
    notices this.
    """
    from fedkin.deploy.authority import sign

    site = sign(folder, request, name, replace, days)
    made = f"{folder.rstrip('/')}/sites/{site.name}.crt"
    if json:
        return print_json({"site": site.name, "fingerprint": site.fingerprint, "certificate": made})
    screen().print(f"site {site.name} may join with key {site.fingerprint}", soft_wrap=True)
    screen().print(f"{escape(made)}  goes back to the site, with ca.crt", soft_wrap=True)


@command("revoke", "fedkin keys revoke keys siteA", within=keys)
def keys_revoke(folder: Folder, name: Annotated[str, typer.Argument(help="The site.")], json: Json = False) -> None:
    """Remove a site from the list. Its certificate is refused from now on, also by a server that is running."""
    from fedkin.deploy.authority import revoke

    site = revoke(folder, name)
    if json:
        return print_json({"site": site.name, "fingerprint": site.fingerprint})
    screen().print(f"site {site.name} may no longer join; a server that is running has noticed", soft_wrap=True)


@command("renew", "fedkin keys renew keys --host server.example.org", within=keys)
def keys_renew(folder: Folder, host: Hosts, json: Json = False) -> None:
    """Make a new certificate for the server by the same authority. Nothing changes for the sites."""
    from fedkin.deploy.authority import renew_server

    renew_server(folder, _listed(host))
    _show_folder(folder, json)


@command("show", "fedkin keys show keys", within=keys)
def keys_show(folder: Folder, json: Json = False) -> None:
    """Show the fingerprints of the certificates, when they expire, and which sites may join."""
    _show_folder(folder, json)


def _show_folder(folder: str, json: bool) -> None:
    from pathlib import Path

    from fedkin.deploy.certificates import certificate, sites

    known = sites(folder)
    files = {name: Path(folder).expanduser() / "sites" / f"{name}.crt" for name in known}
    ends = {name: certificate(path).expires for name, path in files.items() if path.exists()}
    ca, server = (certificate(Path(folder).expanduser() / name) for name in ("ca.crt", "server.crt"))
    if json:
        return print_json(
            {
                "folder": folder,
                "authority": _facts(ca),
                "server": _facts(server),
                "sites": {s.name: s.fingerprint for s in known.values()},
                "expires": {name: end.isoformat() for name, end in ends.items()},
            }
        )
    out = screen()
    out.print(_certificates(ca, server))
    out.print(f"SHA-256 of ca.crt: {ca.fingerprint}", soft_wrap=True)
    out.print(_sites(list(known.values()), ends) if known else "no site may join yet: fedkin keys sign DIR NAME.csr")


def _facts(cert: Certificate) -> dict[str, Any]:
    return {
        "file": str(cert.path),
        "fingerprint": cert.fingerprint,
        "expires": cert.expires.isoformat(),
        "hosts": list(cert.hosts),
    }


def _certificates(ca: Certificate, server: Certificate) -> Any:
    made = table(None, "certificate", "valid until", "good for")
    for cert, hosts in ((ca, "signing the server and the sites"), (server, ", ".join(server.hosts))):
        made.add_row(escape(str(cert.path)), f"{cert.expires:%Y-%m-%d}", hosts)
    return made


def _sites(known: list[KnownSite], ends: dict[str, datetime]) -> Any:
    made = table(None, "site", "fingerprint", "valid until")
    for site in known:
        made.add_row(site.name, site.fingerprint, f"{ends[site.name]:%Y-%m-%d}" if site.name in ends else "")
    return made


# ---------------------------------------------------------------- a check-up


# ---------------------------------------------------------------- the model in use


@command(
    "predict",
    """
    fedkin predict --model personal.safetensors --data new.npz --out predictions.csv
    fedkin predict --model personal.safetensors --data new.csv --json
    """,
    USE,
)
def predict(
    model: Annotated[str, typer.Option("--model", metavar="FILE", help="The file of a personal model, .safetensors.")],
    data: Annotated[
        str,
        typer.Option(
            "--data",
            metavar="FILE",
            help="The samples: .npz (with x, and y if the labels are known), .csv or .parquet; an image, or a "
            "folder of images or of folders named like their classes.",
        ),
    ],
    convert: Annotated[
        bool, typer.Option("--convert", help="Bring images to the size and colours that the model takes.")
    ] = False,
    out: Annotated[
        str | None, typer.Option("--out", metavar="FILE.csv", help="Write all predictions to this file.")
    ] = None,
    plugin: Plugins = None,
    json: Json = False,
) -> None:
    """Classify new samples with a personal model. If the file holds labels, also say how often the model is right.

    A model of another task (regression, survival, ...) says its numbers; if the file holds targets, also how good they
    are."""
    from fedkin.use.model_file import load
    from fedkin.use.predict import is_pictures, read_pictures, read_samples
    from fedkin.use.predict import predict as judge

    use_plugins(plugin)
    personal = load(model)
    if convert and not is_pictures(data):
        raise UsageError(f"--convert would change nothing: {data} holds no images")
    if personal.card.targets != "classes":
        return _answered(personal, model, data, out, json)
    like = personal.card.samples
    if is_pictures(data):
        found = judge(personal, *read_pictures(data, like, convert))
    else:
        found = judge(personal, *read_samples(data, columns=[c.name for c in like.table]))
    if out is not None:
        found.write_csv(out)
    if found.foreign:
        messages().print(
            f"[yellow]labels unknown to the model, counted as wrong: {escape(', '.join(found.foreign[:20]))}[/]",
            soft_wrap=True,
        )
    if json:
        return print_json({"model": asdict(personal.card), "out": out, **found.to_dict()})
    shown = screen()
    if out is None:
        made = table(None, "row", "prediction", "probability", right=["row", "probability"])
        for row in found.to_dict()["predictions"][:SHOWN]:
            made.add_row(str(row["row"]), escape(row["prediction"]), f"{row['probability']:.3f}")
        shown.print(made)
        if len(found.probabilities) > SHOWN:
            shown.print(f"... {len(found.probabilities) - SHOWN} more; --out FILE.csv or --json gives all")
    else:
        shown.print(f"{len(found.probabilities)} predictions in {escape(out)}", soft_wrap=True)
    if found.accuracy is not None:
        shown.print(f"accuracy {percent(found.accuracy)} % of {len(found.probabilities)} samples")


def _answered(personal: Personal, model: str, data: str, out: str | None, as_json: bool) -> None:
    """What a model of another task than classification says."""
    from fedkin.options import said
    from fedkin.tasks import task_for
    from fedkin.use.answers import answer
    from fedkin.use.predict import read_samples

    card = personal.card
    found = answer(personal, *read_samples(data, columns=[c.name for c in card.samples.table], targets=card.targets))
    if out is not None:
        found.write_csv(out)
    if as_json:
        return print_json({"model": asdict(card), "out": out, **found.to_dict()})
    shown = screen()
    if out is None:
        made = table(None, "row", "prediction", right=["row"])
        for row in found.to_dict()["predictions"][:SHOWN]:
            made.add_row(str(row["row"]), escape(str(row["prediction"])[:100]))
        shown.print(made)
        if len(found.values) > SHOWN:
            shown.print(f"... {len(found.values) - SHOWN} more; --out FILE.csv or --json gives all")
    else:
        shown.print(f"{len(found.values)} predictions in {escape(out)}", soft_wrap=True)
    if found.metrics is not None:
        units = {name: m.unit for name, m in task_for(card.targets).metrics.items()}
        told = ", ".join(f"{name} {said(v, units[name])} {units[name]}".strip() for name, v in found.metrics.items())
        shown.print(f"{told}  of {len(found.values)} samples", soft_wrap=True)


@command(
    "export",
    """
    fedkin export last --client all --to models
    fedkin export last --client client-3 --to models --format safetensors,onnx
    fedkin export personal.safetensors --format onnx
    """,
    USE,
)
def export(
    what: Annotated[str, typer.Argument(metavar="RUN|FILE", help="A run, or a personal model's file.")],
    client: Annotated[
        str,
        typer.Option(
            "--client",
            metavar="NAME,...|all",
            help="The clients of a run whose models are written, with commas between, or all.",
        ),
    ] = "all",
    to: Annotated[
        str | None,
        typer.Option(
            "--to", metavar="DIR", help="The folder to write to (default, for a model file: the file's own folder)."
        ),
    ] = None,
    format: Annotated[str, typer.Option("--format", metavar="NAME,...", help="safetensors, onnx.")] = "safetensors",
    runs_dir: RunsDir = None,
    plugin: Plugins = None,
    json: Json = False,
) -> None:
    """Write the personal models of a run as files, or a model file in another format."""
    from fedkin.use.export import convert, export_run, formats

    use_plugins(plugin)
    wanted = formats(format)
    if what.endswith(".safetensors"):
        written = convert(what, wanted, to)
    elif to is None:
        raise UsageError("--to DIR is missing: say where the models of the run are to go")
    else:
        written = export_run(what, client, to, wanted, runs_dir)
    if json:
        return print_json({"files": [str(path) for path in written]})
    for path in written:
        screen().print(escape(str(path)), soft_wrap=True)
