"""Who may ask, and what a browser may do with the answer.

Everything passes here first: only reading, only under a name that this server is known by (a page of somebody else's
that resolves its own name to this machine does not get in), and with the token where one is set.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from fedkin.errors import UsageError

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

SHORTEST_TOKEN = 16
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
PAGE_POLICY = (
    "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'"
)
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def check_binding(host: str, token: str | None) -> None:
    """Only this machine, unless there is a token; and one that cannot be guessed."""
    if token is not None and len(token) < SHORTEST_TOKEN:
        raise UsageError(
            f"--token has {len(token)} characters: give at least {SHORTEST_TOKEN}, for example from "
            "python -c 'import secrets; print(secrets.token_urlsafe())'"
        )
    if token is not None and not (token.isascii() and token.isprintable()):
        raise UsageError("--token: give printable ASCII characters, as it travels in an address")
    if token is None and not is_local(host):
        raise UsageError(
            f"--host {host}: others could read all runs; add --token with at least {SHORTEST_TOKEN} "
            "characters, or stay on 127.0.0.1"
        )


def is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"


class Guard:
    """Wraps the application; see above."""

    def __init__(self, app: App, host: str = "127.0.0.1", token: str | None = None) -> None:
        check_binding(host, token)
        self._app, self._token = app, None if token is None else token.encode()
        self._names = {*LOCAL_NAMES, host.strip("[]").lower()}
        self._literal = not is_local(host)
        if self._literal:
            self._names.add(socket.gethostname().lower())
        self._session = secrets.token_urlsafe(32)  # what the cookie holds instead of the token
        self._cookie = f"fedkin-{secrets.token_hex(4)}"  # browsers share cookies between the ports of a machine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            return None
        headers = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}
        if not self._known(headers.get("host", "")):
            return await _answer(send, 421, "This server does not go by that name: use the address it printed.")
        if scope["method"] not in ("GET", "HEAD"):
            return await _answer(send, 405, "This page only reads.", {"Allow": "GET, HEAD"})
        if self._token is None:
            return await self._app(scope, receive, _with_headers(send))
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = [value for key, value in query if key == "token"]
        if given and self._same(given[-1]):
            return await self._welcome(scope, send, query)
        if not (self._in_session(headers.get("cookie", "")) or self._same(_bearer(headers))):
            return await _answer(send, 401, "Open the address with ?token=..., as fedkin web printed it.")
        return await self._app(scope, receive, _with_headers(send))

    def _known(self, host: str) -> bool:
        name = host.strip().lower()
        name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
        if name in self._names:
            return True
        try:  # an address cannot be made to point elsewhere, as a name can
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return self._literal

    def _same(self, given: str) -> bool:
        return self._token is not None and hmac.compare_digest(given.encode("utf-8", "replace"), self._token)

    def _in_session(self, cookies: str) -> bool:
        try:
            found = SimpleCookie(cookies).get(self._cookie)
        except CookieError:
            return False
        return found is not None and hmac.compare_digest(found.value.encode(), self._session.encode())

    async def _welcome(self, scope: Scope, send: Send, query: list[tuple[str, str]]) -> None:
        """The right token: from now on a cookie, and the token out of the address bar."""
        rest = urlencode([(k, v) for k, v in query if k != "token"])
        path = "/" + quote(scope["path"].lstrip("/"))
        cookie = f"{self._cookie}={self._session}; HttpOnly; SameSite=Strict; Path=/"
        to = f"{path}?{rest}" if rest else path
        await _answer(send, 303, "", {"Location": to, "Set-Cookie": cookie})


def _bearer(headers: MutableMapping[str, str]) -> str:
    kind, _, value = headers.get("authorization", "").partition(" ")
    return value.strip() if kind.lower() == "bearer" else ""


def _encoded(headers: MutableMapping[str, str]) -> list[tuple[bytes, bytes]]:
    return [(k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in headers.items()]


async def _answer(send: Send, status: int, text: str, more: dict[str, str] | None = None) -> None:
    headers = {
        **HEADERS,
        "Content-Security-Policy": PAGE_POLICY,
        "Content-Type": "text/plain; charset=utf-8",
        "Content-Length": str(len(text)),
        **(more or {}),
    }
    await send({"type": "http.response.start", "status": status, "headers": _encoded(headers)})
    await send({"type": "http.response.body", "body": text.encode()})


def _with_headers(send: Send) -> Send:
    """Adds what every answer carries, unless the answer says otherwise."""

    async def sending(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            there = {k.lower() for k, _ in message["headers"]}
            ours = _encoded({**HEADERS, "Content-Security-Policy": PAGE_POLICY})
            message["headers"] = [*message["headers"], *((k, v) for k, v in ours if k not in there)]
        await send(message)

    return sending
