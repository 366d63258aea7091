"""A site's end of the wire: asks the server for letters, and answers them.

It calls and is never called. What it takes from the server is bytes for `wire.unpack`: as many as were announced, at
most as many as this site allows, not compressed, and within a time; redirections and cookies are not followed or kept.
"""

from __future__ import annotations

import random
import secrets
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any

from fedkin.deploy.certificates import Identity
from fedkin.deploy.door import PATIENCE, SLOWEST
from fedkin.deploy.link import is_loopback
from fedkin.errors import FedKinError, UsageError

BEAT = 5.0  # seconds between two signs of life
TRIES = 4  # of one request, where the network fails
PARCELS = ("all", "own")
WORDS = 4096  # bytes of an answer that is no letter
WORD = 100  # letters of a session or a ticket
LIMIT = 1 << 30  # bytes of a letter, unless the site says otherwise
_CHANCE = random.Random()  # its own: whoever watches the process's generator for networks that draw sees nothing of it


class Unreachable(FedKinError):
    """The server cannot be reached now; trying again later may help."""


class Refused(FedKinError):
    """The server does not let this site in, or not yet. `final`: trying again cannot help."""

    final = False


@dataclass(frozen=True)
class Incoming:
    """A letter: its parcels by name; and how many bytes the reply may have."""

    ticket: str
    parcels: dict[str, bytes]
    most: int


@dataclass(frozen=True)
class _Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes


class Node:
    """`identity`: this site's certificate; None: a server on this machine that asks for none. `process` tells a site
    whose connection broke from a second one with its certificate."""

    def __init__(
        self, server: str, identity: Identity | None = None, *, limit: int = LIMIT, process: str | None = None
    ) -> None:
        self._server, self._limit = server, limit
        self._process = process or secrets.token_hex(8)
        if identity is None and not is_loopback(server.rpartition(":")[0]):
            raise UsageError(f"{server}: without TLS only a server on this machine is called; give --key and --ca")
        self._client, self._beats = self._new_client(identity), self._new_client(identity)
        self._session: str | None = None
        self._after = 0
        self._stopped = threading.Event()
        self._lost: str | None = None

    def _new_client(self, identity: Identity | None) -> Any:
        import httpx

        no_cookies = CookieJar(DefaultCookiePolicy(allowed_domains=[]))
        times = httpx.Timeout(PATIENCE, connect=10.0)
        scheme, context = ("http", False) if identity is None else ("https", client_context(identity))
        kept = httpx.Limits(max_connections=2, keepalive_expiry=60.0)
        proxies = not is_loopback(self._server.rpartition(":")[0])  # that the environment names lead elsewhere
        return httpx.Client(
            base_url=f"{scheme}://{self._server}",
            verify=context,
            timeout=times,
            cookies=no_cookies,
            headers={"accept-encoding": "identity"},
            limits=kept,
            trust_env=proxies,
        )

    # ------------------------------------------------------------ coming and going

    def open(self) -> None:
        """Join; `Refused` where this site is not let in, `Unreachable` where nobody answers."""
        answer = self._ask("/open", {"fedkin-process": self._process})
        self._session = _word(answer.headers, "fedkin-session")
        threading.Thread(target=self._beat, name="beat", daemon=True).start()

    def close(self) -> None:
        """Say goodbye, so that the server knows at once."""
        self._stopped.set()
        if self._session is not None:
            with suppress(Exception), self._request(self._beats, "/close", self._known(), b"", timeout=5.0):
                pass
        for client in (self._client, self._beats):
            client.close()

    def __enter__(self) -> Node:
        try:
            self.open()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _known(self) -> dict[str, str]:
        return {"fedkin-session": self._session or ""}

    def _beat(self) -> None:
        missed = 0
        while not self._stopped.wait(BEAT * _CHANCE.uniform(0.8, 1.2)):
            try:
                with self._request(self._beats, "/beat", self._known(), b"", timeout=3 * BEAT) as response:
                    status = _read(response, WORDS).status  # to its end, or the connection could not be kept
                missed = 0
                if status != 204:
                    self._lost = "the server does not know this site any more"
            except Exception as error:
                missed += 1
                if missed >= TRIES:
                    self._lost = f"the server does not answer: {error}"

    # ------------------------------------------------------------ letters

    def receive(self) -> Incoming | None:
        """The next letter, or None if there is none for a while (the server holds the question for some seconds)."""
        if self._lost:
            raise Unreachable(self._lost)
        answer = self._ask("/pull", {**self._known(), "fedkin-after": str(self._after)}, most=self._limit)
        if answer.status == 204:
            return None
        number, most = (_number(answer.headers, name) for name in ("fedkin-number", "fedkin-most"))
        parcels = _parcels(answer.headers.get("fedkin-parcels", ""), answer.body)
        self._after = max(self._after, number)
        return Incoming(_word(answer.headers, "fedkin-ticket"), parcels, most)

    def reply(self, to: Incoming, content: bytes) -> None:
        """Answer a letter. One that is not waited for any more is not sent again."""
        with suppress(_NotWanted):
            self._ask("/push", {**self._known(), "fedkin-ticket": to.ticket}, content)

    def _ask(self, path: str, headers: Mapping[str, str], content: bytes = b"", most: int = WORDS) -> _Answer:
        """One request, again where the network fails; what TLS and HTTP say, in words."""
        import httpx

        reason = ""
        for attempt in range(TRIES):
            try:
                with self._request(self._client, path, headers, content) as response:
                    answer = _read(response, most if response.status_code == 200 else WORDS)
                if answer.status < 300:
                    return answer
                if answer.status < 500:
                    raise _why(answer, path)
                reason = f"the server answers with HTTP status {answer.status}"
            except httpx.TransportError as error:
                reason = f"{type(error).__name__}: {error}"
                if "CERTIFICATE_VERIFY_FAILED" in str(error):
                    raise _for_good(f"the server's certificate is not accepted: {error}") from None
                if path == "/open" and isinstance(error, httpx.ReadError | httpx.RemoteProtocolError):
                    reason += "; it hung up: if it does so every time, it does not accept this site's certificate"
            if self._stopped.wait(0.2 * 2**attempt * _CHANCE.uniform(0.5, 1.5)):
                break
        raise Unreachable(f"{self._server} cannot be reached ({reason})")

    @contextmanager
    def _request(
        self, client: Any, path: str, headers: Mapping[str, str], content: bytes, timeout: float | None = None
    ) -> Iterator[Any]:
        times = {} if timeout is None else {"timeout": timeout}
        with client.stream("POST", path, headers=dict(headers), content=content, **times) as response:
            yield response


class _NotWanted(FedKinError):
    """A reply that came too late."""


def client_context(identity: Identity) -> ssl.SSLContext:
    """TLS as a site speaks it: it shows its certificate, and talks to nobody whom the authority does not vouch for."""
    try:
        identity.check()
    except FedKinError as error:
        raise _for_good(str(error)) from error
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(identity.ca)
    context.load_cert_chain(identity.certificate, identity.key)
    return context


def _for_good(reason: str) -> Refused:
    error = Refused(reason)
    error.final = True
    return error


def _why(answer: _Answer, path: str) -> FedKinError:
    said = "".join(c if c.isprintable() else " " for c in answer.body[:300].decode("utf-8", "replace"))
    if answer.status == 410:
        if path == "/push" and "letter" in said:
            return _NotWanted(said)
        return Unreachable("the server does not know this site any more")
    if answer.status == 404:
        return _for_good("the server knows no such call: is it a FedKin server of this version?")
    if answer.status == 413:
        return FedKinError(f"the server finds this reply too large ({said})")
    return Refused(f"the server does not let this site in: {said or f'HTTP status {answer.status}'}")


def _read(response: Any, most: int) -> _Answer:
    """An answer's bytes as they are, no more than announced, allowed, and there in time."""
    headers = {name.lower(): value for name, value in response.headers.items()}
    if "content-encoding" in headers:
        raise FedKinError("the server sends a compressed answer: not taken")
    length = headers.get("content-length", "" if response.status_code != 204 else "0")
    if not (length.isascii() and length.isdigit()) or len(length) > 15:
        raise FedKinError("the server does not say how long its answer is: not taken")
    if int(length) > most:
        raise FedKinError(f"the server sends {length} bytes, this site takes at most {most}: not taken")
    until = time.monotonic() + PATIENCE + int(length) / SLOWEST
    whole = bytearray()
    for piece in response.iter_raw():
        whole += piece
        if len(whole) > most or time.monotonic() > until:
            raise FedKinError("the server's answer is longer or slower than it may be: not taken")
    return _Answer(response.status_code, headers, bytes(whole))


def _word(headers: Mapping[str, str], name: str) -> str:
    """What goes back to the server as it came, and so has to be what a header can hold."""
    text = headers.get(name, "")
    if not (text.isascii() and text.isprintable()) or len(text) > WORD:
        raise FedKinError(f"an answer that cannot be read: {name} is no word")
    return text


def _number(headers: Mapping[str, str], name: str) -> int:
    text = headers.get(name, "")
    if not (text.isascii() and text.isdigit()) or len(text) > 15:
        raise FedKinError(f"a letter that cannot be read: {name} is no number")
    return int(text)


def _parcels(sizes: str, body: bytes) -> dict[str, bytes]:
    """The parcels of a letter, whose names and sizes its header tells."""
    found: dict[str, bytes] = {}
    at = 0
    for part in sizes.split(","):
        name, _, size = part.partition("=")
        if name not in PARCELS or name in found or not (size.isascii() and size.isdigit()) or len(size) > 15:
            raise FedKinError(f"a letter that cannot be read: its parcels are {sizes[:100]!r}")
        found[name] = body[at : at + int(size)]
        at += int(size)
    if at != len(body):
        raise FedKinError(f"a letter that cannot be read: it has {len(body)} bytes, its parcels {at}")
    return found
