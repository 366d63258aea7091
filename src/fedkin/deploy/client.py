"""A site: stays connected, answers the server, comes back by itself when the network or the server was away."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from fedkin.deploy.certificates import Identity
from fedkin.deploy.node import Node, Refused, Unreachable
from fedkin.deploy.wire import pack
from fedkin.deploy.worker import Say, Worker
from fedkin.errors import FedKinError

LONGEST = 30.0  # seconds between two tries
SLOWLY = 0.1  # seconds before an answer that is none
LET_IN = 120.0  # seconds to keep knocking where the server says no: one that died is missed for a while
_CHANCE = random.Random()  # see `node`


@dataclass(frozen=True)
class ServerToJoin:
    """The server, and how this site proves itself to it. `give_up`: seconds without a server before it ends."""

    server: str
    identity: Identity | None = None
    give_up: float | None = None


def serve(worker: Worker, where: ServerToJoin, say: Say, stay: bool = False) -> None:
    """Take part until the run is over (or, with `stay`, in one run after another)."""
    wait, last_seen, refused_since = 0.5, time.monotonic(), None

    def seen() -> None:
        nonlocal wait, last_seen, refused_since
        last_seen = time.monotonic()
        if worker.joined is not None:  # let in: the next trouble is a new one
            wait, refused_since = 0.5, None

    while True:
        try:
            with Node(where.server, where.identity, limit=worker.limit, process=worker.process) as node:
                say(f"connected to {where.server}")
                last_seen = time.monotonic()
                _listen(worker, node, seen)
            if not stay:
                return
            worker.finished, worker.joined = False, None
        except Refused as error:
            refused_since = refused_since or time.monotonic()
            if error.final:
                raise
            if time.monotonic() - refused_since > LET_IN:
                raise FedKinError(f"{error}; gave up after {LET_IN:.0f} s") from None
            say(f"{error}; trying again")
        except Unreachable as error:
            if where.give_up is not None and time.monotonic() - last_seen > where.give_up:
                raise FedKinError(f"{error}; gave up after {where.give_up:.0f} s") from None
            say(f"{error}; trying again in {wait:.0f} s")
        except FedKinError as error:
            say(f"{error}; connecting anew")
        time.sleep(wait * _CHANCE.uniform(0.7, 1.3))
        wait = min(2 * wait, LONGEST)


def _listen(worker: Worker, node: Node, seen: Callable[[], None]) -> None:
    """Answer one letter after another until the run is over."""
    while not worker.finished:
        incoming = node.receive()
        if incoming is not None:
            reply = worker.answer(incoming.parcels)
            if len(reply) > incoming.most:
                reason = f"a reply of {len(reply)} bytes: the server's limit is {incoming.most} (--max-message)"
                worker.say(f"failed: {reason}")
                reply = pack({}, {"kind": "failed", "reason": reason})
            if worker.failed:
                time.sleep(SLOWLY)  # a server that asks in vain fills neither a disk nor a log
            node.reply(incoming, reply)
            if worker.refused is not None:
                reason, worker.refused, worker.joined = worker.refused, None, None
                raise Refused(reason)
        seen()
