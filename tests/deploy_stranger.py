"""Somebody without a key, for tests: `python deploy_stranger.py KIND PORT FOLDER` troubles a server until it is killed.
In FOLDER are certificates that this server's authority did not sign, or does not vouch for any more."""

from __future__ import annotations

import os
import socket
import ssl
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

OPEN = b"POST /open HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"


def trouble(kind: str, port: int, folder: Path) -> None:
    def dial() -> socket.socket:
        return socket.create_connection(("127.0.0.1", port), timeout=5)

    def say(*words: bytes) -> None:
        with closing(dial()) as one:
            for part in words:
                one.sendall(part)
            one.recv(1000)

    def knock(pair: str | None = None, words: bytes = OPEN, old: bool = False) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if old:
            context.maximum_version = ssl.TLSVersion.TLSv1_2
        if pair is not None:
            context.load_cert_chain(folder / f"{pair}.crt", folder / f"{pair}.key")
        with closing(dial()) as plain, closing(context.wrap_socket(plain)) as one:
            one.sendall(words)
            if answer := one.recv(1000):
                print("answered:", answer[:12].decode("latin-1"), flush=True)

    def hold(words: bytes) -> None:
        one = dial()
        one.sendall(words)
        held.append(one)
        if len(held) > 400:
            held.pop(0).close()

    held: list[socket.socket] = []
    kinds: dict[str, Callable[[], None]] = {
        "plain": lambda: say(OPEN),
        "garbage": lambda: say(os.urandom(3000)),
        "headers": lambda: say(b"POST /pull HTTP/1.1\r\n", *[b"x: " + b"y" * (1 << 16) + b"\r\n"] * 50),
        "flood": lambda: dial().close(),
        "idle": lambda: hold(b""),
        "half": lambda: hold(HELLO + bytes(32)),
        "drip": lambda: hold(HELLO[:1]),
        "nameless": knock,
        "body": lambda: knock(words=OPEN.replace(b"length: 0", b"length: 9999999") + bytes(1 << 20)),
        "old": lambda: knock(old=True),
        "foreign": lambda: knock("foreign"),
        "server": lambda: knock("server"),
        "revoked": lambda: knock("revoked"),
    }
    if kind not in kinds:
        raise SystemExit(f"no such stranger: {kind}")
    print("here", flush=True)
    while True:
        with suppress(OSError):
            kinds[kind]()
        time.sleep(0.01)


if __name__ == "__main__":
    trouble(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
