"""Starting and stopping the server."""

from __future__ import annotations

import socket
from pathlib import Path

import uvicorn

from fedkin.errors import UsageError
from fedkin.runs.catalogue import runs_folder
from fedkin.web.guard import check_binding
from fedkin.web.routes import create_app


def bound(host: str, port: int, token: str | None = None) -> socket.socket:
    """A socket that listens there; in words why not, otherwise. Nothing is bound that may not be."""
    check_binding(host, token)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        made = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise UsageError(f"--host {host}: {error.strerror or error}") from None
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host.strip("[]"), port))
    except OSError as error:
        made.close()
        raise UsageError(f"{host}:{port} cannot be bound: {error.strerror or error}; choose another --port") from None
    return made


def serve(made: socket.socket, runs_dir: str | Path | None, host: str, token: str | None) -> None:
    """Until Ctrl-C. No log of requests is kept: an address may hold the token."""
    folder = runs_folder(runs_dir)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--runs-dir {folder} is not a folder")
    config = uvicorn.Config(
        create_app(folder, host, token),
        access_log=False,
        log_level="warning",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    uvicorn.Server(config).run(sockets=[made])
