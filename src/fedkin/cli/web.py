"""`fedkin web`: the page over a folder of runs."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated

import typer

from fedkin.cli.application import RUNS, RunsDir, command
from fedkin.cli.console import messages
from fedkin.errors import UsageError


@command(
    "web",
    """
    fedkin web
    fedkin web --runs-dir results --port 9000
    fedkin web --host 0.0.0.0 --token "$(python -c 'import secrets; print(secrets.token_urlsafe())')"
    """,
    RUNS,
)
def web(
    runs_dir: RunsDir = None,
    port: Annotated[
        int,
        typer.Option(
            "--port", metavar="PORT", min=0, max=65535, help="The port to serve on; 0: any port that is free."
        ),
    ] = 8765,
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="The address to serve on.")] = "127.0.0.1",
    token: Annotated[
        str | None,
        typer.Option(
            "--token", metavar="TEXT", envvar="FEDKIN_TOKEN", show_envvar=True, help="A secret that visitors must give."
        ),
    ] = None,
) -> None:
    """Show all runs in the browser, live while they train.

    Only this machine can connect. Another --host needs a --token of at least 16 characters, which the first visit
    gives as ?token=...; better set FEDKIN_TOKEN, as other users of this machine see a command's flags.
    """
    missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
    if missing:
        raise UsageError(f"the page needs {' and '.join(missing)}: pip install 'fedkin[web]'")
    from fedkin.web.serve import bound, serve

    socket = bound(host, port, token)
    with socket:
        shown = f"[{host}]" if ":" in host else host
        address = f"http://{shown}:{socket.getsockname()[1]}/"
        messages().print(f"FedKin at {address}{'?token=... (the one given)' if token else ''}  Ctrl-C stops")
        serve(socket, runs_dir, host, token)
