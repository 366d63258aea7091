"""The server's end of the wire: Flower's SuperLink, inside this process and open only where sites need it.

Flower serves three things on one port: the Fleet API for the nodes, the Control API (start a run with code of one's
own, register a node's key) and the Runtime API (carry that code out). The last two ask nobody for a password. Here
they are shut: `Door` lets through the Fleet calls that a site makes and answers everything else with "not found", so
nobody can bring code or keys over the network. It also bounds what one request may weigh, and holds a site's "is there
something for me?" until there is, which makes an exchange as fast as the network instead of as fast as the polling.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Container, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedkin.deploy.flower import record, require_flower, silence
from fedkin.errors import FedKinError, UsageError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

FLEET = "/v1/fleet/"
CALLS = ("activate-node", "deactivate-node", "send-node-heartbeat", "pull-messages", "push-messages", "push-object",
         "pull-object", "confirm-message-received")  # fmt: skip
OPEN_CALLS = ("register-node", "unregister-node")  # only where no keys are asked for
HOLD = 10.0  # seconds that a question for messages is held
SMALL = 1 << 20  # bytes of a request that carries no part of a parcel
SLACK = 4096  # bytes that Flower adds around a piece
PIECE = 16 << 20  # bytes of a parcel that travel in one request
PUSHES = 8  # times that a site may begin to push one reply, where the network fails
STARTUP = 20.0
BEAT = 10.0  # seconds between two signs of life of the run itself


@dataclass(frozen=True)
class Arrived:
    """A reply: its pieces, not looked at yet."""

    ticket: str
    pieces: list[bytes]


@dataclass(frozen=True)
class Lost:
    """There will be no reply, or none that can be used; and why."""

    ticket: str
    reason: str
    invalid: bool = False  # no honest site sends such a thing


class Link:
    """A SuperLink that serves sites. `keys` are the public keys (PEM) that may join, by site; None: anybody may."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        certificate: tuple[Path, Path] | None = None,
        keys: Mapping[str, bytes] | None = None,
        piece: int = PIECE,
        limit: int = 2 << 30,
    ) -> None:
        if keys is not None and certificate is None:
            raise UsageError("keys without TLS prove nothing: give the server's certificate too")
        require_flower()
        silence()
        from flwr.superlink.main import create_app

        self._app = create_app()
        self._app.state.enable_supernode_auth = keys is not None
        self._state = self._app.state.linkstate_factory.state()
        self.piece, self.limit = piece, limit
        self._host, self._port, self._certificate = host, port, certificate
        self._names = self._register(keys or {})
        self.door = Door(self._app, self._state.nodes, open_to_all=keys is None, largest=piece + SLACK)
        self._server: Any = None
        self._run = self._task = 0
        self._refused: dict[str, str] = {}
        self._pushed: dict[str, int] = {}  # how often a reply to a message was begun
        self._stopping = threading.Event()
        self._store = self._state.store_message_and_object_tree
        self._state.store_message_and_object_tree = self._store_reply

    # ------------------------------------------------------------ coming and going

    def start(self) -> str:
        """Serve; returns host:port."""
        import uvicorn

        certificate, key = self._certificate or (None, None)
        config = uvicorn.Config(
            self.door, host=self._host, port=self._port, log_level="critical", lifespan="off", access_log=False,
            ssl_certfile=certificate, ssl_keyfile=key, limit_concurrency=max(1024, 8 * len(self._names)),
            timeout_keep_alive=75, server_header=False, ws="none",
        )  # fmt: skip
        self._server = uvicorn.Server(config)
        failure: list[BaseException] = []

        def serve() -> None:
            try:
                asyncio.run(self._serve())
            except (Exception, SystemExit) as error:
                failure.append(error)

        self._thread = threading.Thread(target=serve, name="link", daemon=True)
        self._thread.start()
        until = time.monotonic() + STARTUP
        while not self._server.started:
            if failure or not self._thread.is_alive() or time.monotonic() > until:
                raise FedKinError(
                    f"cannot serve on {self._host}:{self._port}: is the port free and the host this machine's? "
                    "Choose another with --port"
                )
            time.sleep(0.01)
        self._port = self._server.servers[0].sockets[0].getsockname()[1]
        self._begin_run()
        threading.Thread(target=self._beat, name="beat", daemon=True).start()
        return f"{self._host}:{self._port}"

    async def _serve(self) -> None:
        self.door.loop = asyncio.get_running_loop()
        await self._server._serve()  # without uvicorn's signal handlers: Ctrl-C belongs to the command line

    def stop(self) -> None:
        self._stopping.set()
        if self._server is not None:
            self.door.wake_all()
            self._server.should_exit = self._server.force_exit = True
            self._thread.join(5)

    @property
    def port(self) -> int:
        return self._port

    def _begin_run(self) -> None:
        from flwr.common.constant import NOOP_FLWR_AID, SUPERLINK_NODE_ID
        from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
        from flwr.supercore.task_identity import TaskIdentity

        state = self._state
        self._run = state.create_run(
            "fedkin/fedkin", "1", None, {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP
        )
        self._task = state.get_run_info(run_ids=[self._run])[0].primary_task_id
        if state.claim_task(self._task) is None or not state.activate_task(self._task):
            raise FedKinError("Flower did not start its run; is this flwr 1.41?")
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = self._run, SUPERLINK_NODE_ID, self._task

    def _beat(self) -> None:
        while not self._stopping.wait(BEAT):
            self._state.acknowledge_task_heartbeat(self._task)

    # ------------------------------------------------------------ who is there

    def _register(self, keys: Mapping[str, bytes]) -> dict[int, str]:
        from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID

        return {self._state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, 0): name for name, key in keys.items()}

    def nodes(self) -> dict[int, str | None]:
        """Nodes that are connected now, and whose key each has (None where no keys are asked for)."""
        return {int(n): self._names.get(int(n)) for n in self._state.get_nodes(self._run)}

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes that Flower counted so far: to the sites, from the sites."""
        run = self._state.get_run_info(run_ids=[self._run])[0]
        return int(run.bytes_sent), int(run.bytes_recv)

    # ------------------------------------------------------------ messages

    def push(self, node: int, parcels: Mapping[str, Sequence[Any]], ttl: float) -> str | None:
        """Leave a message for a node: named parcels, each as the `records` made of it. The ticket for its reply."""
        from flwr.app import Message, RecordDict
        from flwr.app.message import remove_content_from_message
        from flwr.supercore.inflatable.inflatable_object import (
            get_all_nested_objects,
            get_object_tree,
            no_object_id_recompute,
        )

        content = RecordDict({f"{name}.{i}": r for name, records in parcels.items() for i, r in enumerate(records)})
        message = Message(content, node, "train.fedkin", ttl=ttl)
        with no_object_id_recompute():
            message.metadata.__dict__["_message_id"] = message.object_id
            tree, objects = get_object_tree(message), get_all_nested_objects(message)
            session = self._state.start_session(self._run)
            stored, missing = self._store(remove_content_from_message(message), tree, session)
            if not stored:
                return None
            for name in missing:
                if not self._state.store_object(self._run, session, name, objects[name].deflate()):
                    return None
        self.door.wake(node)
        return str(message.metadata.message_id)

    def records(self, parcel: bytes) -> list[Any]:
        """A parcel as Flower's records, one for each piece; the same ones may go into several messages."""
        return [record(parcel[i : i + self.piece]) for i in range(0, len(parcel), self.piece)]

    def pull(self, tickets: Iterable[str]) -> list[Arrived | Lost]:
        """Replies that have come in full since the last time, and those that will not come."""
        waiting = set(tickets)
        found: list[Arrived | Lost] = [Lost(t, self._refused.pop(t), True) for t in waiting if t in self._refused]
        waiting -= {f.ticket for f in found}
        known = {t for t in waiting if t in self._state.message_ins_store}
        found += [Lost(t, "its time was up") for t in waiting - known]
        for reply in self._state.get_message_res(message_ids=set(known), run_id=self._run) if known else []:
            ticket, name = reply.metadata.reply_to_message_id, reply.metadata.message_id
            if reply.has_error():
                found.append(Lost(ticket, _in_words(reply.error)))
                self._state.object_store.delete(name)
                continue
            contents = self._contents(name)
            if contents is None:  # some of its objects are still on the way
                reply.metadata.delivered_at = ""
                continue
            self._state.object_store.delete(name)
            try:
                found.append(Arrived(ticket, _pieces(name, contents)))
            except Exception as error:  # whatever Flower's reader makes of strange bytes is that site's fault
                found.append(Lost(ticket, f"its reply cannot be read: {type(error).__name__}: {error}"[:300], True))
        self.forget(f.ticket for f in found)
        return found

    def forget(self, tickets: Iterable[str]) -> None:
        """No reply to these is wanted any more."""
        done = set(tickets)
        for ticket in done:
            self._refused.pop(ticket, None)
            self._pushed.pop(ticket, None)
            reply = self._state.message_ins_id_to_message_res_id.get(ticket)
            self._state.object_store.delete(ticket)
            if reply is not None:
                self._state.object_store.delete(reply)
        self._state.delete_messages(message_ins_ids=done)

    def _contents(self, name: str) -> dict[str, bytes] | None:
        from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
        from flwr.supercore.object_store import NoObjectInStoreError

        try:
            tree = self._state.object_store.get_object_tree(name)
        except NoObjectInStoreError:
            return None
        contents: dict[str, bytes] = {}
        for node in iterate_object_tree(tree):
            content = self._state.get_object(self._run, node.object_id)
            if not content:
                return None
            contents[node.object_id] = content
        return contents

    def _store_reply(self, message: Any, tree: Any, session: str) -> tuple[bool, list[str]]:
        """What a site pushes: the reply to a message that it was sent, and nothing else. One whose list of parts
        alone says that it is too large is refused before any part comes."""
        ticket, most = message.metadata.reply_to_message_id, -(-self.limit // self.piece) + 8
        asked = self._state.message_ins_store.get(ticket)
        if asked is None or asked.metadata.dst_node_id != message.metadata.src_node_id:
            return False, []
        self._pushed[ticket] = self._pushed.get(ticket, 0) + 1
        if self._pushed[ticket] > PUSHES:
            return False, []
        if _count(tree, most) > most:
            self._refused[ticket] = f"its reply has more than {most} parts of {self.piece} bytes: over the limit"
            return False, []
        done: tuple[bool, list[str]] = self._store(message, tree, session)
        return done


def _count(tree: Any, most: int) -> int:
    found, todo = 0, [tree]
    while todo and found <= most:
        node = todo.pop()
        found += 1
        todo += node.children
    return found


def _pieces(name: str, contents: dict[str, bytes]) -> list[bytes]:
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    content = inflate_object_from_contents(name, contents).content  # type: ignore[attr-defined]
    found = []
    for i in range(len(content)):
        piece = content[f"own.{i}"]["p"]
        if not isinstance(piece, bytes):
            raise TypeError("a piece is not bytes")
        found.append(piece)
    return found


def _in_words(error: Any) -> str:
    from flwr.common.constant import ErrorCode

    words = {
        ErrorCode.NODE_UNAVAILABLE: "the connection to it was lost",
        ErrorCode.MESSAGE_UNAVAILABLE: "its time was up",
        ErrorCode.REPLY_MESSAGE_UNAVAILABLE: "its time was up",
    }
    return words.get(error.code, f"Flower reports error {error.code}: {error.reason or ''}"[:300])


class Door:
    """What sites may call; everything else does not exist. Counts the bytes of requests while they come in."""

    def __init__(self, app: App, nodes: Container[int], open_to_all: bool, largest: int) -> None:
        self._app, self._nodes, self._largest = app, nodes, largest
        self._calls = {FLEET + c for c in (*CALLS, *(OPEN_CALLS if open_to_all else ()))}
        self.loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[int, int] = {}  # messages left for a node that it has not asked for yet
        self._asking: dict[int, set[asyncio.Event]] = {}
        self._closed = False
        self.sent = self.received = 0  # bytes of all requests and answers, with their headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        if path not in self._calls:
            await _answer(send, 404)
            return
        limit = self._largest if path == FLEET + "push-object" else SMALL
        body = await _read(scope, receive, limit)
        if body is None:
            await _answer(send, 413)
            return
        self.received += len(body) + len(path) + sum(len(name) + len(value) + 4 for name, value in scope["headers"])
        if path == FLEET + "pull-messages" and not await self._hold(body, receive):
            return
        served = False

        async def again() -> MutableMapping[str, Any]:
            nonlocal served
            if served:
                return await receive()
            served = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def counted(message: MutableMapping[str, Any]) -> None:
            self.sent += len(message.get("body", b""))
            self.sent += sum(len(name) + len(value) + 4 for name, value in message.get("headers", ()))
            await send(message)

        await self._app(scope, again, counted)

    async def _hold(self, body: bytes, receive: Receive) -> bool:
        """Wait until there is something for who asks, or for a while; False if it has gone away meanwhile."""
        from flwr.proto.fleet_pb2 import PullMessagesRequest
        from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

        try:
            node = PullMessagesRequest.FromString(body).node.node_id
        except DecodeError:
            return True
        if node in self._nodes and not self._waiting.get(node) and not self._closed:
            event = asyncio.Event()
            self._asking.setdefault(node, set()).add(event)
            gone, told = asyncio.ensure_future(receive()), asyncio.ensure_future(event.wait())
            try:
                await asyncio.wait({gone, told}, timeout=HOLD, return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    return False
            finally:
                gone.cancel()
                told.cancel()
                asking = self._asking.get(node, set())
                asking.discard(event)
                if not asking:
                    self._asking.pop(node, None)
        if self._waiting.get(node):
            self._waiting[node] -= 1
        return True

    def wake(self, node: int) -> None:
        """There is something for this node. Called from any thread."""
        if self.loop is not None:
            self.loop.call_soon_threadsafe(self._wake, node)

    def _wake(self, node: int) -> None:
        self._waiting[node] = self._waiting.get(node, 0) + 1
        for event in self._asking.get(node, ()):
            event.set()

    def wake_all(self) -> None:
        self._closed = True
        if self.loop is not None and not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._wake_all)

    def _wake_all(self) -> None:
        for events in self._asking.values():
            for event in events:
                event.set()


async def _read(scope: Scope, receive: Receive, limit: int) -> bytes | None:
    """The body of a request, or None as soon as it is known to be too large."""
    for name, value in scope["headers"]:
        if name == b"content-length" and (not value.isdigit() or int(value) > limit):
            return None
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            return None
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def _answer(send: Send, status: int) -> None:
    words = {404: b"not found", 413: b"too large"}[status]
    headers = [(b"content-type", b"text/plain"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": words})
