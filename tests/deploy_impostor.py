"""A server that was broken into, for tests: `python deploy_impostor.py KIND PORT KEYS` has the server's own key and
treats whoever comes badly. It says `served` each time it has done so."""

from __future__ import annotations

import gzip
import json
import os
import socket
import ssl
import sys
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

LETTER = b"fedkin-ticket: 1.%d\r\nfedkin-number: %d\r\nfedkin-most: 1000000\r\nfedkin-parcels: own=%d\r\n"


def framed(fields: dict[str, Any], values: list[dict[str, Any]] | None = None, body: bytes = b"") -> bytes:
    text = json.dumps({"fields": fields, "values": values or []}).encode()
    return b"FKW1" + len(text).to_bytes(4, "little") + text + body


def letter(frame: bytes, number: int = 1) -> bytes:
    size = len(frame)
    return b"HTTP/1.1 200 OK\r\n" + LETTER % (number, number, size) + b"content-length: %d\r\n\r\n" % size + frame


def join(**change: Any) -> bytes:
    config = {"method": "fedavg", "model": "mlp", "rounds": 5}
    fields = {
        "kind": "join",
        "run": "evil",
        "attempt": 1,
        "round": 0,
        "place": 0,
        "clients": 1,
        "config": config,
        "labels": list(range(10)),
        "frozen": "",
    }
    initial = {"name": "initial", "type": "tensor", "dtype": "float32", "shape": [1], "as": "raw"}
    return framed({**fields, **change}, [initial], bytes(4))


LARGE = {"method": "fedavg", "model": "resnet18-cifar"}
CALL = {"kind": "call", "run": "evil", "attempt": 1, "round": 0, "call": 0}
BOMB = [
    {"name": "m", "type": "tensor", "dtype": "bool", "shape": [1, 1], "as": "bits"},
    {
        "name": "model",
        "type": "masked",
        "dtype": "float32",
        "shape": [0],
        "as": "raw",
        "full": [1, 1, 10**9],
        "mask": {"of": "m", "not": False},
    },
]
OK = b"HTTP/1.1 200 OK\r\n"
MANY = [bytes(1 << 20)] * 200
ANSWERS: dict[str, Callable[[], list[bytes]]] = {
    "garbage": lambda: [letter(os.urandom(5000))],
    "bomb": lambda: [letter(framed(CALL, BOMB, b"\0"))],
    "announce": lambda: [OK + LETTER % (1, 1, 5) + b"content-length: 99999999999999\r\n\r\n", *MANY],
    "endless": lambda: [OK + LETTER % (1, 1, 5) + b"\r\n", *MANY],
    "gzip": lambda: [
        OK + LETTER % (1, 1, 5) + b"content-encoding: gzip\r\ncontent-length: 204100\r\n\r\n",
        gzip.compress(bytes(200 << 20)),
    ],
    "ticket": lambda: [letter(framed({"kind": "hello"})).replace(b"ticket: 1.1", b"ticket: \xe9\xff")],
    "secret": lambda: [letter(framed({**CALL, "phase": "__getstate__"}))],
    "climb": lambda: [letter(join(run="../../climbed"))],
    "option": lambda: [letter(join(config={"method": "fedavg", "model": "/etc/passwd", "lr": [1], "rounds": 10**30}))],
    "classes": lambda: [letter(join(labels=list(range(120_000)), config=LARGE))],
    "codes": lambda: [letter(framed({"kind": "refused", "reason": "\x1b[2J\x1b[31mowned"}))],
    "elsewhere": lambda: [b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n"],
    "oh": lambda: [b"HTTP/1.1 500 Oh\r\ncontent-length: 0\r\n\r\n"],
    "session": lambda: [],
    "hangup": lambda: [],
}


def treat(kind: str, connection: socket.socket) -> None:
    session = b"\xe9\xff" if kind == "session" else b"1.a"
    while asked := connection.recv(1 << 20):
        if asked.startswith(b"POST /open") and kind != "hangup":
            connection.sendall(OK + b"fedkin-session: " + session + b"\r\ncontent-length: 0\r\n\r\n")
        elif asked.startswith(b"POST /pull"):
            for part in ANSWERS[kind]():
                connection.sendall(part)
        elif kind == "hangup":
            break
        else:
            connection.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")
        if kind in ("session", "hangup") or asked.startswith(b"POST /p"):
            print("served", flush=True)


def serve(kind: str, port: int, keys: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(keys / "server.crt", keys / "server.key")

    def talk(plain: socket.socket) -> None:
        with suppress(OSError):
            plain.settimeout(20)
            with closing(context.wrap_socket(plain, server_side=True)) as connection:
                treat(kind, connection)
        print("served", flush=True)

    with socket.create_server(("127.0.0.1", port)) as listener:
        while True:
            threading.Thread(target=talk, args=(listener.accept()[0],), daemon=True).start()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
