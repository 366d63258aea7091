"""The server's end of the wire: letters for the sites, and their replies.

A site opens a session, asks for its next letter (the question is held until there is one), and pushes the reply. What
it may push is the reply to a letter that it was sent, once, and no longer than the server said; there is nothing else
that it could leave here. `Door` has found out who it is before any of this is read, and the list of those who may take
part is looked at again for every request, so that a site that was revoked is out at once.
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from fedkin.deploy.certificates import AdmittedSites
from fedkin.deploy.door import Answer, Connection, Door, Stop, server_context
from fedkin.errors import FedKinError, UsageError

HOLD = 10.0  # seconds that a question for a letter is held
GRACE = 2.0  # seconds without any connection after which a session is over
SILENCE = 30.0  # seconds without a word after which it is over, too
SESSIONS = 1000  # at most, where no certificates are asked for
OFTEN, WHILE = 30, 60.0  # sessions that one site may open within so many seconds
GREETING = 2 << 20  # bytes of a reply before it is known how large a model is
STARTUP = 20.0


@dataclass(frozen=True)
class Arrived:
    """A reply, not looked at yet."""

    ticket: str
    parcel: bytes


@dataclass(frozen=True)
class Lost:
    """There will be no reply, or none that can be used; and why."""

    ticket: str
    reason: str
    invalid: bool = False  # no honest site sends such a thing


@dataclass(eq=False)
class _Letter:
    ticket: str
    number: int
    parcels: Mapping[str, bytes]
    until: float
    most: int
    reply: bytes | None = None
    refused: str | None = None
    busy: bool = False


@dataclass(eq=False)
class _Session:
    node: int
    token: str
    name: str | None
    key: str
    process: str
    heard: float
    connections: set[Connection] = field(default_factory=set)
    left: float = 0.0  # when the last connection ended
    letters: dict[int, _Letter] = field(default_factory=dict)
    written: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)


class Link:
    """Serves sites. `keys`: the folder that `fedkin keys new` made; None: no TLS and no certificates, which is for one
    machine alone. `limit`: bytes of a reply."""

    def __init__(
        self, host: str = "127.0.0.1", port: int = 0, *, keys: Path | None = None, limit: int = GREETING
    ) -> None:
        if keys is None and not is_loopback(host):
            raise UsageError(
                f"host {host}: without TLS and keys a server serves its own machine alone; use 127.0.0.1, or --keys DIR"
            )
        self._roll = AdmittedSites(keys) if keys is not None else None
        self._door = Door(server_context(keys) if keys is not None else None, self._handle, self._ended)
        self.limit = limit
        self._host, self._port = host, port
        self._lock = threading.RLock()
        self._sessions: dict[int, _Session] = {}
        self._letters: dict[str, tuple[_Session, _Letter]] = {}
        self._nodes = 0
        self._opened: dict[str, deque[float]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._serving: asyncio.Task[None] | None = None

    # ------------------------------------------------------------ coming and going

    def start(self) -> str:
        """Serve; returns host:port."""
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            listener = socket.create_server((self._host, self._port), family=family, backlog=512)
        except OSError as error:
            raise FedKinError(
                f"cannot serve on {self._host}:{self._port} ({error.strerror or error}): is the port free and the host "
                "this machine's? Choose another with --port"
            ) from error
        listener.setblocking(False)
        self._port = int(listener.getsockname()[1])
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(listener, ready), name="link", daemon=True)
        self._thread.start()
        if not ready.wait(STARTUP):
            raise FedKinError("the server's network thread did not start")
        return f"[{self._host}]:{self._port}" if ":" in self._host else f"{self._host}:{self._port}"

    def _run(self, listener: socket.socket, ready: threading.Event) -> None:
        async def serve() -> None:
            self._loop, self._serving = asyncio.get_running_loop(), asyncio.current_task()
            ready.set()
            await self._door.serve(listener)

        with listener, suppress(asyncio.CancelledError):
            asyncio.run(serve())

    def stop(self) -> None:
        if self._loop is not None and self._serving is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._serving.cancel)
            self._thread.join(5)

    @property
    def port(self) -> int:
        return self._port

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes of HTTP so far, headers included: to the sites, from the sites."""
        return self._door.traffic

    # ------------------------------------------------------------ who is there

    def nodes(self) -> dict[int, str | None]:
        """Sites that are connected now, and whose certificate each has (None where none are asked for)."""
        with self._lock:
            for session in [s for s in self._sessions.values() if not self._alive(s)]:
                self._close(session)
            return {s.node: s.name for s in self._sessions.values()}

    def _alive(self, session: _Session) -> bool:
        now = time.monotonic()
        connected = bool(session.connections) or now - session.left < GRACE
        return connected and now - session.heard < SILENCE and self._allowed(session.name, session.key)

    def _allowed(self, name: str | None, key: str) -> bool:
        return self._roll is None or (name is not None and self._roll.allows(name, key))

    def _close(self, session: _Session) -> None:
        self._sessions.pop(session.node, None)
        for letter in session.letters.values():
            self._letters.pop(letter.ticket, None)
        session.letters.clear()
        self._wake(session)

    def _ended(self, connection: Connection) -> None:
        with self._lock:
            for session in self._sessions.values():
                if connection in session.connections:
                    session.connections.discard(connection)
                    session.left = time.monotonic()

    # ------------------------------------------------------------ letters

    def push(self, node: int, parcels: Mapping[str, bytes], ttl: float) -> str | None:
        """Leave a letter for a site: named parcels. The ticket for its reply; None: it is not there."""
        with self._lock:
            self._expire()
            session = self._sessions.get(node)
            if session is None:
                return None
            session.written += 1
            ticket = f"{node}.{session.written}"
            letter = _Letter(ticket, session.written, parcels, time.monotonic() + ttl, self.limit)
            session.letters[letter.number] = letter
            self._letters[ticket] = session, letter
            self._wake(session)
            return ticket

    def pull(self, tickets: Iterable[str]) -> list[Arrived | Lost]:
        """Replies that have come in full since the last time, and those that will not come."""
        found: list[Arrived | Lost] = []
        with self._lock:
            self.nodes()
            for ticket in set(tickets):
                _, letter = self._letters.get(ticket, (None, None))
                if letter is None:
                    found.append(Lost(ticket, "the connection to it was lost"))
                elif letter.refused is not None:
                    found.append(Lost(ticket, letter.refused, invalid=True))
                elif letter.reply is not None:
                    found.append(Arrived(ticket, letter.reply))
                elif time.monotonic() > letter.until:
                    found.append(Lost(ticket, "its time was up"))
            self.forget(f.ticket for f in found)
        return found

    def forget(self, tickets: Iterable[str]) -> None:
        """No reply to these is wanted any more."""
        with self._lock:
            for ticket in tickets:
                session, letter = self._letters.pop(ticket, (None, None))
                if session is not None and letter is not None:
                    session.letters.pop(letter.number, None)

    def _expire(self) -> None:
        """Letters whose reply nobody ever asks for."""
        late = time.monotonic() - SILENCE
        self.forget([t for t, (_, letter) in self._letters.items() if letter.until < late])

    def _wake(self, session: _Session) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(session.news.set)

    # ------------------------------------------------------------ what sites ask; in the network's thread

    async def _handle(self, connection: Connection, method: str, path: str, headers: Mapping[str, str]) -> Answer:
        peer = connection.peer
        name, key = (peer.name, peer.fingerprint) if peer is not None else (None, "")
        if not self._allowed(name, key):
            raise Stop(403, "this site's certificate is not on the server's list: it was revoked, or replaced")
        if method != "POST" or path not in ("/open", "/beat", "/pull", "/push", "/close"):
            raise Stop(404, "not found")
        if path == "/open":
            await connection.body(0)
            return self._open(connection, name, key, headers.get("fedkin-process", "")[:64])
        session = self._session(connection, name, headers.get("fedkin-session", ""))
        if path == "/push":
            return await self._push(connection, session, headers.get("fedkin-ticket", ""))
        await connection.body(0)
        if path == "/pull":
            return await self._pull(connection, session, headers.get("fedkin-after", ""))
        if path == "/close":
            with self._lock:
                self._close(session)
        return Answer(204)

    def _open(self, connection: Connection, name: str | None, key: str, process: str) -> Answer:
        with self._lock:
            here = [s for s in self._sessions.values() if name is not None and s.name == name]
            for session in here:
                if self._alive(session) and (not process or session.process != process):
                    raise Stop(409, f"another process with the certificate of {name!r} is connected")
                self._close(session)
            if len(self._sessions) >= SESSIONS and self._roll is None:
                raise Stop(409, f"{SESSIONS} sites are connected: no more are taken")
            if name is not None:
                times = self._opened.setdefault(name, deque(maxlen=OFTEN))
                if len(times) == OFTEN and time.monotonic() - times[0] < WHILE:
                    raise Stop(429, f"{OFTEN} sessions within {WHILE:.0f} s: wait a while")
                times.append(time.monotonic())
            self._nodes += 1
            made = _Session(self._nodes, secrets.token_hex(16), name, key, process, time.monotonic())
            made.connections.add(connection)
            self._sessions[made.node] = made
        return Answer(200, {"fedkin-session": f"{made.node}.{made.token}"})

    def _session(self, connection: Connection, name: str | None, given: str) -> _Session:
        number, _, token = given.partition(".")
        with self._lock:
            whole = number.isascii() and number.isdigit() and len(number) < 16
            session = self._sessions.get(int(number)) if whole else None
            known = session is not None and secrets.compare_digest(session.token.encode(), token.encode())
            if session is None or not known or session.name != name:
                raise Stop(410, "no such session: open one")
            session.heard = time.monotonic()
            session.connections.add(connection)
            return session

    async def _pull(self, connection: Connection, session: _Session, after: str) -> Answer:
        if not (after.isascii() and after.isdigit() and len(after) < 16):
            raise Stop(400, "after which letter?")
        until = time.monotonic() + HOLD
        while True:
            session.news.clear()
            with self._lock:
                if self._sessions.get(session.node) is not session or not self._allowed(session.name, session.key):
                    raise Stop(410, "no such session: open one")
                session.heard = time.monotonic()
                letter = next((x for x in session.letters.values() if x.number > int(after) and x.reply is None), None)
            if letter is not None:
                sizes = ",".join(f"{name}={len(parcel)}" for name, parcel in letter.parcels.items())
                known = {"ticket": letter.ticket, "number": letter.number, "parcels": sizes, "most": letter.most}
                headers = {f"fedkin-{name}": str(value) for name, value in known.items()}
                return Answer(200, headers, list(letter.parcels.values()))
            left = until - time.monotonic()
            if left <= 0:
                return Answer(204)
            await self._news(connection, session, left)

    async def _news(self, connection: Connection, session: _Session, seconds: float) -> None:
        told = asyncio.ensure_future(session.news.wait())
        gone = asyncio.ensure_future(connection.disturbed())
        try:
            await asyncio.wait({told, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                gone.result()
                raise Stop(400, "one request after the other")
        finally:
            for task in (told, gone):
                task.cancel()
            await asyncio.wait({told, gone})  # two must not read from one connection

    async def _push(self, connection: Connection, session: _Session, ticket: str) -> Answer:
        with self._lock:
            owner, letter = self._letters.get(ticket, (None, None))
            if letter is None or owner is not session or letter.busy or letter.reply is not None or letter.refused:
                raise Stop(410, "no such letter waits for a reply")
            letter.busy = True
        try:
            reply = await connection.body(letter.most)
        except Stop as stop:
            if stop.answer.status == 413:
                letter.refused = f"its reply is larger than the limit of {letter.most} bytes"
            raise
        finally:
            letter.busy = False
        if not self._allowed(session.name, session.key):
            raise Stop(403, "this site's certificate is not on the server's list any more")
        with self._lock:
            session.heard = time.monotonic()
            letter.reply = reply
        return Answer(204)


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
