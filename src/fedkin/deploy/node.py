"""A site's end of the wire: a Flower node that lives in this process and runs no code but FedKin's own.

Flower's own SuperNode fetches an app from the server, installs it and starts it anew for every message. Nothing of
that happens here: this node speaks the same protocol (register, activate, heartbeat, pull, push, with every request
signed by the site's key), but the only thing it takes from the server is bytes for `wire.unpack`.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

from fedkin.deploy.flower import record, require_flower, silence
from fedkin.errors import FedKinError, UsageError

BEAT = 10.0  # seconds between two signs of life, Flower's least; a dead node is missed after twice as long
PATIENCE = 60.0  # seconds to wait for an answer to one request
TRIES = 4  # of one request, where the network fails
PARTS = 4096  # objects in one message, at most


class Unreachable(FedKinError):
    """The server cannot be reached now; trying again later may help."""


class Refused(FedKinError):
    """The server does not let this site in, or not yet."""


@dataclass(frozen=True)
class Incoming:
    """A message from the server: its parcels by name, each in pieces, and how to answer it."""

    message: Any
    parcels: dict[str, list[bytes]]
    came: float


class Node:
    """`key`: this site's private key; None: nameless, which only a server that asks for no keys accepts."""

    def __init__(self, server: str, *, ca: Path | None = None, key: Any = None, limit: int = 2 << 30) -> None:
        if key is not None and ca is None:
            raise UsageError("a key without the server's ca.crt proves nothing: give --ca too")
        require_flower()
        silence()
        from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes
        from flwr.supernode.fleet_http_client import FleetHttpClient

        self._own_key = key is not None
        private = key if key is not None else generate_key_pairs()[0]
        self._public = public_key_to_bytes(private.public_key())
        self._clock = _Clock(private, self._public)
        certificate = ca.read_bytes() if ca is not None else None
        self._limit, self._server = limit, server
        self._client, self._beats = (
            FleetHttpClient.from_server_address(server, ca is None, certificate, [self._clock]) for _ in range(2)
        )
        self._node: Any = None
        self._stopped = threading.Event()
        self._lost: str | None = None

    # ------------------------------------------------------------ coming and going

    def open(self) -> None:
        """Join; `Refused` where the key is unknown or in use, `Unreachable` where nobody answers."""
        from flwr.proto.fleet_pb2 import ActivateNodeRequest, RegisterNodeFleetRequest
        from flwr.proto.node_pb2 import Node as Named

        self._clock.read(self._server, self._client)
        if not self._own_key:
            self._ask(self._client.RegisterNode, RegisterNodeFleetRequest(public_key=self._public))
        answer = self._ask(
            self._client.ActivateNode, ActivateNodeRequest(public_key=self._public, heartbeat_interval=BEAT)
        )
        self._node = Named(node_id=answer.node_id)
        threading.Thread(target=self._beat, name="beat", daemon=True).start()

    def close(self) -> None:
        """Say goodbye, so that the server knows at once."""
        from flwr.proto.fleet_pb2 import DeactivateNodeRequest, UnregisterNodeFleetRequest

        self._stopped.set()
        if self._node is not None:
            name = self._node.node_id
            with suppress(Exception):
                self._beats.DeactivateNode(DeactivateNodeRequest(node_id=name))
                if not self._own_key:
                    self._beats.UnregisterNode(UnregisterNodeFleetRequest(node_id=name))
        for client in (self._client, self._beats):
            client.close()

    def __enter__(self) -> Node:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _beat(self) -> None:
        from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest

        missed = 0
        while not self._stopped.wait(BEAT * random.uniform(0.3, 0.5)):
            try:
                known = self._beats.SendNodeHeartbeat(
                    SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=BEAT)
                ).success
                missed = 0
                if not known:
                    self._lost = "the server does not know this site any more"
            except Exception as error:
                missed += 1
                if missed >= TRIES or getattr(getattr(error, "response", None), "status_code", 0) == 401:
                    self._lost = f"the server does not answer: {error}"

    # ------------------------------------------------------------ messages

    def receive(self) -> Incoming | None:
        """The next message, or None if there is none for a while (the server holds the question for some seconds)."""
        from flwr.common.serde import message_from_proto
        from flwr.proto.fleet_pb2 import PullMessagesRequest
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest

        if self._lost:
            raise Unreachable(self._lost)
        answer = self._ask(self._client.PullMessages, PullMessagesRequest(node=self._node))
        if not answer.messages_list:
            return None
        message, tree = message_from_proto(answer.messages_list[0]), answer.message_object_trees[0]
        came = time.monotonic()
        contents = self._contents(message.metadata.run_id, tree)
        self._ask(
            self._client.ConfirmMessageReceived,
            ConfirmMessageReceivedRequest(
                node=self._node, run_id=message.metadata.run_id, message_object_id=tree.object_id
            ),
        )
        return Incoming(message, _parcels(tree.object_id, contents), came)

    def reply(self, to: Incoming, pieces: Sequence[bytes]) -> None:
        """Answer a message. Its time is told by the server's clock, whatever this machine's says."""
        from flwr.app import Message, RecordDict
        from flwr.app.message import remove_content_from_message
        from flwr.common.serde import message_to_proto
        from flwr.proto.fleet_pb2 import PushMessagesRequest
        from flwr.proto.message_pb2 import PushObjectRequest
        from flwr.supercore.inflatable.inflatable_object import (
            get_all_nested_objects,
            get_object_tree,
            no_object_id_recompute,
        )

        content = RecordDict({f"own.{i}": record(piece) for i, piece in enumerate(pieces)})
        message = Message(content, reply_to=to.message)
        asked, meta = to.message.metadata, message.metadata
        spent = time.monotonic() - to.came
        left = asked.ttl - spent - 1
        if left <= 0:
            raise Unreachable("the server's time for this reply was up")
        meta.__dict__["_created_at"], meta.ttl = asked.created_at + spent, left
        with no_object_id_recompute():
            meta.__dict__["_message_id"] = message.object_id
            tree, objects = get_object_tree(message), get_all_nested_objects(message)
            answer = self._ask(
                self._client.PushMessages,
                PushMessagesRequest(
                    node=self._node, messages_list=[message_to_proto(remove_content_from_message(message))],
                    message_object_trees=[tree], clientapp_runtime_list=[spent],
                ),
            )  # fmt: skip
            for name in answer.objects_to_push:
                if name in objects:
                    self._ask(
                        self._client.PushObject,
                        PushObjectRequest(
                            node=self._node, run_id=asked.run_id, object_id=name,
                            object_content=objects[name].deflate(), session_id=answer.session_id,
                        ),
                    )  # fmt: skip

    def _contents(self, run: int, tree: Any) -> dict[str, bytes]:
        from flwr.proto.message_pb2 import PullObjectRequest
        from flwr.supercore.inflatable.inflatable_object import get_object_id, iterate_object_tree

        names = list(dict.fromkeys(node.object_id for node in iterate_object_tree(tree)))
        if len(names) > PARTS:
            raise FedKinError(f"a message of {len(names)} parts: at most {PARTS} are taken")
        contents: dict[str, bytes] = {}
        for name in names:
            answer = self._ask(self._client.PullObject, PullObjectRequest(node=self._node, run_id=run, object_id=name))
            if not answer.object_available or get_object_id(answer.object_content) != name:
                raise Unreachable("a message was withdrawn while it was fetched")
            contents[name] = answer.object_content
            if sum(map(len, contents.values())) > self._limit:
                raise FedKinError(f"a message of more than {self._limit} bytes: not taken")
        return contents

    def _ask(self, call: Any, request: Any) -> Any:
        """One request, again where the network fails; what Flower and HTTP say, in words."""
        import httpx

        for attempt in range(TRIES):
            try:
                return call(request)
            except httpx.HTTPStatusError as error:
                status, text = error.response.status_code, error.response.text[:300]
                if status < 500:
                    raise Refused(_why(status, text)) from None
                reason = f"the server answers with HTTP status {status}: {text}"
            except httpx.TransportError as error:
                reason = f"{type(error).__name__}: {error}"
                if "certificate" in str(error).lower():
                    raise Refused(f"the server's certificate is not accepted: {error}") from None
            except ValueError as error:
                reason = str(error)
            if self._stopped.wait(0.2 * 2**attempt * random.uniform(0.5, 1.5)):
                break
        raise Unreachable(f"{self._server} cannot be reached ({reason})")


def _why(status: int, text: str) -> str:
    if status == 413:
        return "the server finds this message too large"
    if status == 404:
        return "the server knows no such call: it may ask for keys (--key, --ca), or is no FedKin server"
    if status == 401:
        return "the server does not accept this site's signature: is its clock right, is the key signed there?"
    if "could not be activated" in text or "ACTIVATION" in text.upper() or status in (400, 409, 412):
        return (
            "the server does not let this site in: its key is not signed there, or another process with the same key "
            "is connected (one that has just died is missed for up to 20 s)"
        )
    return f"the server refuses (HTTP status {status}): {text}"


def _parcels(name: str, contents: dict[str, bytes]) -> dict[str, list[bytes]]:
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    try:
        content = inflate_object_from_contents(name, contents).content  # type: ignore[attr-defined]
        found: dict[str, dict[int, bytes]] = {}
        for key in content:
            parcel, _, number = key.rpartition(".")
            piece = content[key]["p"]
            if not isinstance(piece, bytes):
                raise TypeError("a piece is not bytes")
            found.setdefault(parcel, {})[int(number)] = piece
        return {parcel: [pieces[i] for i in range(len(pieces))] for parcel, pieces in found.items()}
    except Exception as error:
        raise FedKinError(f"a message that cannot be read: {type(error).__name__}: {error}"[:300]) from error


class _Clock:
    """Signs requests with the site's key and the server's time, so that a site's wrong clock does no harm."""

    def __init__(self, private: Any, public: bytes) -> None:
        self._private, self._public, self._ahead = private, public, 0.0

    def read(self, server: str, client: Any) -> None:
        """How far the server's clock is ahead, by the date of its answer to anything."""
        import httpx

        try:
            answer = client._client.get(f"{client._base_url}/", timeout=PATIENCE)
            date = parsedate_to_datetime(answer.headers["date"]).timestamp()
        except httpx.TransportError as error:
            if "certificate" in str(error).lower():
                raise Refused(f"the server's certificate is not accepted: {error}") from None
            raise Unreachable(f"{server} cannot be reached ({type(error).__name__}: {error})") from None
        except (KeyError, ValueError, TypeError):
            return
        ahead = date - time.time()
        self._ahead = ahead if abs(ahead) > 3 else 0.0

    def intercept(self, context: Any, call_next: Any) -> Any:
        from base64 import b64encode
        from datetime import UTC, datetime

        from flwr.common.constant import TIMESTAMP_HEADER
        from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
        from flwr.supercore.primitives.asymmetric import sign_message

        stamp = datetime.fromtimestamp(time.time() + self._ahead, UTC).isoformat()
        signature = sign_message(self._private, stamp.encode("ascii"))
        context.request.headers[FLEET_HTTP_PUBLIC_KEY_HEADER] = b64encode(self._public).decode()
        context.request.headers[TIMESTAMP_HEADER] = stamp
        context.request.headers[FLEET_HTTP_SIGNATURE_HEADER] = b64encode(signature).decode()
        return call_next(context)
