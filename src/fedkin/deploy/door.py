"""Where sites come in: HTTP over TLS 1.3, and nothing is read from anybody without a certificate of the federation.

Between a stranger and the server stand OpenSSL's handshake, which asks for a certificate signed by the federation's
own authority, and the loop below that accepts connections. It bounds how many may be in the handshake, and for how
long; where there are too many, the address that has the most of them loses its oldest, so that crowds of idle
connections neither use up the machine nor keep a site out. Who has proved itself may hold a few connections, and each
request has bounds on its headers (h11's), its body and its time.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path
from typing import Any, Generic, TypeVar

import h11

from fedkin.deploy import certificates as keys

CROWD = 256  # connections that may be in the handshake at once
EACH = 4  # connections that one site may hold; it uses two
HANDSHAKE = 10.0  # seconds
HEADERS = 16 << 10  # bytes of a request's headers
IDLE = 90.0  # seconds until the headers of a connection's next request are there
SLOWEST = 32 << 10  # bytes a second at which a body has to move
PATIENCE = 60.0  # seconds that any body may take
PIECE = 256 << 10  # bytes handed to a connection at once
LINGER, UNREAD = 1.0, 1 << 20  # seconds and bytes to let an answer through where a request is not wanted to its end

T = TypeVar("T")
log = logging.getLogger("fedkin.deploy")


@dataclass(frozen=True)
class Peer:
    """Whose certificate it is, and its key's fingerprint."""

    name: str
    fingerprint: str


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Sequence[bytes] = ()


class Stop(Exception):
    """Not a request to go on with: answer this and hang up."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.answer = Answer(status, body=[reason.encode()])


def server_context(folder: Path) -> ssl.SSLContext:
    """TLS as this federation's server speaks it: no certificate by its authority, no connection."""
    keys.check_private(folder / "server.key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.num_tickets = 0  # every connection is checked anew
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    context.load_verify_locations(folder / "ca.crt")
    return context


class UnprovenPeers(Generic[T]):
    """Those who have not proved who they are, oldest first."""

    def __init__(self, most: int) -> None:
        self._most, self._here = most, dict[T, str]()

    def add(self, one: T, address: str) -> T | None:
        """Who has to go for it: the oldest from the address that has the most here."""
        self._here[one] = address
        return self.crowded() if len(self._here) > self._most else None

    def crowded(self) -> T | None:
        counts: dict[str, int] = {}
        for address in self._here.values():
            counts[address] = counts.get(address, 0) + 1
        worst = max(counts, key=lambda a: counts[a], default=None)
        gone = next((one for one, address in self._here.items() if address == worst), None)
        if gone is not None:
            del self._here[gone]
        return gone

    def remove(self, one: T) -> None:
        self._here.pop(one, None)

    def __len__(self) -> int:
        return len(self._here)


class Connection:
    """One HTTP connection, and who is at its other end (None: this door asks for no certificates)."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: Peer | None) -> None:
        self.peer = peer
        self.received = self.sent = 0
        self._reader, self._writer = reader, writer
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEADERS)
        self._length, self._head = 0, False

    async def request(self) -> tuple[str, str, dict[str, str]] | None:
        """Method, path and headers of the next one; None: there is none."""
        if self._http.our_state is h11.DONE:
            self._http.start_next_cycle()
        async with asyncio.timeout(IDLE):
            event = await self._next(HEADERS // 4)  # h11 bounds what is not complete: no more may come at once
        if not isinstance(event, h11.Request):
            return None
        self._head = event.method == b"HEAD"
        headers = {name.decode(): value.decode("latin-1") for name, value in event.headers}
        if "transfer-encoding" in headers:
            raise Stop(411, "say how long the body is")
        if "content-encoding" in headers:
            raise Stop(415, "nothing compressed is read")
        if "expect" in headers or "upgrade" in headers:
            raise Stop(417, "no such thing here")
        self._length = int(headers.get("content-length", "0"))
        return event.method.decode(), event.target.decode("latin-1"), headers

    async def body(self, most: int) -> bytes:
        """The request's body; refused before it is read where it says that it is too long."""
        if self._length > most:
            raise Stop(413, f"more than {most} bytes")
        whole = bytearray()
        try:
            async with asyncio.timeout(PATIENCE + self._length / SLOWEST):
                while isinstance(event := await self._next(), h11.Data):
                    whole += event.data
        except TimeoutError:
            raise Stop(408, "too slow") from None
        if not isinstance(event, h11.EndOfMessage):
            raise Stop(400, "cut off")
        return bytes(whole)

    async def disturbed(self) -> None:
        """Returns when the other end hangs up, or says something before it was answered."""
        self._http.receive_data(await self._reader.read(PIECE))
        self._http.next_event()

    async def answer(self, answer: Answer, last: bool) -> bool:
        """Send it; whether there may be another request."""
        size = sum(map(len, answer.body))
        headers = {"date": formatdate(usegmt=True), "content-length": str(size), **answer.headers}
        if answer.status == 204:
            del headers["content-length"]
        if last:
            headers["connection"] = "close"
        async with asyncio.timeout(PATIENCE + size / SLOWEST):
            await self._send(h11.Response(status_code=answer.status, headers=list(headers.items())))
            for part in answer.body if not self._head else ():
                for at in range(0, len(part), PIECE):
                    await self._send(h11.Data(data=part[at : at + PIECE]))
            await self._send(h11.EndOfMessage())
        return not last and self._http.our_state is h11.DONE and self._http.their_state is h11.DONE

    async def close(self) -> None:
        """Hang up; where a request was not read to its end, only after the other side could read the answer."""
        with suppress(OSError, TimeoutError, h11.ProtocolError):
            async with asyncio.timeout(LINGER):
                until = self.received + UNREAD
                while self._http.their_state is h11.SEND_BODY and self.received < until:
                    await self._next()
        self._writer.close()
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(LINGER):
                await self._writer.wait_closed()
        self.abort()

    def abort(self) -> None:
        self._writer.transport.abort()

    async def _next(self, most: int = PIECE) -> Any:
        while (event := self._http.next_event()) is h11.NEED_DATA:
            data = await self._reader.read(most)
            self.received += len(data)
            self._http.receive_data(data)
        return event

    async def _send(self, event: h11.Event) -> None:
        data = self._http.send(event)
        if data:
            self.sent += len(data)
            self._writer.write(data)
            await self._writer.drain()


Handler = Callable[[Connection, str, str, Mapping[str, str]], Awaitable[Answer]]


class Door:
    """Accepts connections and has `handle` answer their requests; `gone` is told when one has ended."""

    def __init__(self, context: ssl.SSLContext | None, handle: Handler, gone: Callable[[Connection], None]) -> None:
        self._context, self._handle, self._gone = context, handle, gone
        self._crowd = UnprovenPeers[asyncio.Task[None]](CROWD)
        self._tasks = set[asyncio.Task[None]]()
        self._of: dict[Peer, list[Connection]] = {}
        self._past = [0, 0]
        self._open = set[Connection]()

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes of all answers and all requests so far, headers included."""
        now = list(self._open)
        return self._past[0] + sum(c.sent for c in now), self._past[1] + sum(c.received for c in now)

    async def serve(self, listener: socket.socket) -> None:
        """Until cancelled."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: log.debug("%s", context.get("message")))
        try:
            while True:
                try:
                    accepted, address = await loop.sock_accept(listener)
                except OSError:  # no more descriptors, or whoever called has gone already
                    self._end(self._crowd.crowded())
                    await asyncio.sleep(0.05)
                    continue
                accepted.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                task = loop.create_task(self._welcome(accepted))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                self._end(self._crowd.add(task, str(address[0])))
                await asyncio.sleep(0)  # a flood of connections leaves time for those that are open
        finally:
            for task in self._tasks:
                task.cancel()

    def _end(self, task: asyncio.Task[None] | None) -> None:
        if task is not None:
            task.cancel()

    async def _welcome(self, accepted: socket.socket) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            connection = await self._shake_hands(accepted)
        except (OSError, ValueError, asyncio.CancelledError):  # asyncio closes the connection
            self._crowd.remove(task)
            return  # without the error: kept in the task, it would keep the connection's buffers
        if self._context is not None:
            self._crowd.remove(task)
        self._open.add(connection)
        try:
            await self._converse(connection)
        except (OSError, TimeoutError, h11.ProtocolError):
            pass
        except Exception:
            log.exception("a connection ended")
        finally:
            self._forget(connection)
            self._crowd.remove(task)
            await connection.close()

    async def _shake_hands(self, accepted: socket.socket) -> Connection:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=PIECE)
        protocol = asyncio.StreamReaderProtocol(reader)
        times = {"ssl_handshake_timeout": HANDSHAKE, "ssl_shutdown_timeout": LINGER} if self._context else {}
        transport, _ = await loop.connect_accepted_socket(lambda: protocol, accepted, ssl=self._context, **times)
        writer = asyncio.StreamWriter(transport, protocol, reader, loop)
        tls = transport.get_extra_info("ssl_object")
        if tls is None:
            return Connection(reader, writer, None)
        peer = Peer(*keys.peer(tls.getpeercert(binary_form=True)))
        connection = Connection(reader, writer, peer)
        held = self._of.setdefault(peer, [])
        held.append(connection)
        if len(held) > EACH:  # the newest is the one that the site still uses
            held[0].abort()
        return connection

    def _forget(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._past[0] += connection.sent
        self._past[1] += connection.received
        if connection.peer is not None:
            held = self._of.get(connection.peer, [])
            if connection in held:
                held.remove(connection)
            if not held:
                self._of.pop(connection.peer, None)
        self._gone(connection)

    async def _converse(self, connection: Connection) -> None:
        last = False
        while not last:
            try:
                request = await connection.request()
                if request is None:
                    return
                answer = await self._handle(connection, *request)
            except Stop as stop:
                answer, last = stop.answer, True
            except h11.RemoteProtocolError as error:
                status = 431 if error.error_status_hint == 431 else 400
                answer, last = Answer(status, body=[b"not HTTP as it is spoken here"]), True
            last = not await connection.answer(answer, last)
