"""The sites as the server sees them: who is there, under which name, and the post between them.

A site is known by its name, and by its key where keys are asked for; node numbers change with every connection and
mean nothing here. Sites greet, are told their place, and may go and come back at any time. Everything they say is
untrusted: it is checked here, or a reason is given.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedkin.core.federation import Each
from fedkin.data.targets import Targets
from fedkin.deploy.greeting import USUAL_CLASSES, Facts, fitting
from fedkin.deploy.link import Arrived, Link, Lost
from fedkin.deploy.wire import HEADER, Transport, WireError, pack, unpack
from fedkin.engines.remote import Arrival, Bounds, Delivery, Invalid
from fedkin.errors import DataError, FedKinError

Say = Callable[[str], None]
Invitation = Callable[[int], tuple[dict[str, Any], dict[str, Any]]]
"""From a site's place to the fields and values of its invitation."""

GREETING = HEADER + 64  # bytes of a greeting, or of an answer to an invitation: a header and no values
TALK = 300.0  # seconds for a greeting or an invitation
SLOW = 100_000  # bytes a second that frozen weights are given time for, beside that
FURNISHED = 3  # times that a site is sent them: a connection may break on the way
MARGIN = 60.0  # seconds that a message is kept longer than the exchange waits


class Sites:
    """Greets, seats and reaches sites; the `Carrier` of a `Remote`."""

    def __init__(
        self,
        link: Link,
        say: Say,
        *,
        transport: Transport = "fp32",
        most_classes: int = USUAL_CLASSES,
        targets: Targets = "classes",
        task: str = "classification",
    ) -> None:
        self._link, self._say, self._transport = link, say, transport
        self._wanted = most_classes, targets, task
        self.facts: dict[str, Facts] = {}
        self._nodes: dict[str, int] = {}  # a site's node now
        self._processes: dict[str, str] = {}  # what tells a site that is back from a second one of its name
        self._met: set[int] = set()  # nodes that were greeted
        self._talks: dict[str, tuple[int, str]] = {}  # ticket -> node and what it was asked
        self._calls: dict[str, tuple[int, int]] = {}  # ticket -> client, and bytes that its reply may become
        self._by_number: list[str] = []
        self._ready: set[int] = set()
        self._invitation: Invitation | None = None
        self._trunk: Callable[[], Mapping[str, Any]] = dict  # the frozen weights, as values
        self._packed_trunk: bytes | None = None  # one copy for all sites
        self._furnished = Counter[str]()  # how often a site was sent the frozen weights
        self._run = ""
        self._attempt = 0
        self._nameless = ""  # what was wrong with the last one whose name no key tells
        self.trouble: dict[str, str] = {}  # why a site could not join, or was not even heard to the end

    def report_to(self, say: Say) -> None:
        """Where to say what happens, from now on."""
        self._say = say

    # ------------------------------------------------------------ who is there

    def gather(self, count: int, wait: float, least: int | None = None) -> list[Facts]:
        """Wait until so many sites have greeted and fit together; their facts in order of their names. `least`: go on
        with fewer once all were heard of, or time is up."""
        until, told = time.monotonic() + wait, -1
        while True:
            self.tick()
            found, odd = fitting(list(self.facts.values()), *self._wanted)
            late = time.monotonic() > until
            if len(self.facts) != told:
                told = len(self.facts)
                self._say(f"{told} of {count} sites are here{_named(self.facts)}")
            if len(found) >= count:
                break
            all_heard = len({*self.facts, *self.trouble}) >= count
            if least is not None and len(found) >= least and (late or all_heard):
                self._say(f"starting with {len(found)} of {count} sites{_named({f.name: f for f in found})}")
                break
            if odd and told >= count:
                name, why = next(iter(odd.items()))
                raise DataError(f"site {name!r} does not fit: {why}. Mend its data, or {_without(len(found))}")
            if late:
                away = "".join(f"; site {name!r}: {why}" for name, why in {**self.trouble, **odd}.items())
                raise FedKinError(
                    f"{told} of {count} sites came within {wait:g} s{_named(self.facts)}{away}; start "
                    "the others with `fedkin client`, wait longer with --wait, or "
                    f"{_without(len(found))}"
                )
            time.sleep(0.05)
        for name, why in odd.items():
            self._say(f"going on without site {name!r}: {why}")
        return found

    def fix_clients(
        self,
        facts: Sequence[Facts],
        run: str,
        attempt: int,
        invitation: Invitation,
        trunk: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        """From now on these are the clients, by their place in the list, and nobody else is let in. `trunk`: the frozen
        weights, for a site that lacks them."""
        self._trunk = trunk
        self._by_number, self.facts = [f.name for f in facts], {f.name: f for f in facts}
        self._run, self._attempt, self._invitation = run, attempt, invitation
        for name in [n for n in self._nodes if n not in self.facts]:
            self._refuse(self._nodes.pop(name), self._began)
        for name in list(self._nodes):
            self._invite(name)

    def assemble(self, wait: float, least: int) -> None:
        """Wait until all are ready, or for a while and until enough are."""
        until = time.monotonic() + wait
        while len(self._ready) < len(self._by_number):
            self.tick()
            absent = [n for i, n in enumerate(self._by_number) if i not in self._ready]
            broken = [n for n in absent if n in self.trouble]
            rest = len(self._by_number) - len(broken)
            if rest < least and broken:
                raise FedKinError(
                    f"site {broken[0]!r} cannot take part: {self.trouble[broken[0]]}; mend that, or {_without(rest)}"
                )
            late = time.monotonic() > until
            if len(self._ready) >= least and absent and (late or len(broken) == len(absent)):
                self._say(f"going on without {', '.join(absent)}")
                return
            if late:
                ready = len(self._ready)
                raise FedKinError(
                    f"{ready} of {len(self._by_number)} sites are ready after {wait:g} s; "
                    f"missing: {', '.join(absent)}; bring them, or {_without(ready)}"
                )
            time.sleep(0.02)

    def dismiss(self, wait: float = 10.0) -> None:
        """Tell all that the run is over; they keep their models."""
        tickets = {
            self._link.push(self._nodes[name], self._own({"kind": "done"}), TALK)
            for i, name in enumerate(self._by_number)
            if i in self._ready
        } - {None}
        until = time.monotonic() + wait
        while tickets and time.monotonic() < until:
            tickets -= {found.ticket for found in self._link.pull(t for t in tickets if t)}
            time.sleep(0.02)

    def tick(self) -> None:
        """Notice who came and went, greet and seat; to be called often."""
        online = self._link.nodes()
        for name, node in list(self._nodes.items()):
            if node not in online:
                self._lost(name)
        self._met &= set(online)
        for node in set(online) - self._met:
            self._met.add(node)
            self._talk(node, "hello", {"kind": "hello"})
        if self._talks:
            for found in self._link.pull(list(self._talks)):
                node, kind = self._talks.pop(found.ticket)
                self._hear(node, kind, found, online.get(node))

    def _lost(self, name: str) -> None:
        self._nodes.pop(name, None)
        if name in self._by_number:
            self._ready.discard(self._by_number.index(name))
            self._say(f"site {name!r}: the connection was lost")
        else:
            self.facts.pop(name, None)

    def _hear(self, node: int, kind: str, found: Arrived | Lost, key_name: str | None) -> None:
        try:
            if isinstance(found, Lost):
                raise DataError(found.reason)
            fields = unpack(found.parcel, GREETING).fields
            if fields.get("kind") == "failed":
                raise DataError(_text(fields.get("reason")))
            if kind == "hello":
                self._greeted(node, fields, key_name)
            elif kind == "join":
                self._joined(node, fields)
        except Exception as error:  # whatever comes of what a site says is that site's trouble
            why = str(error) if isinstance(error, FedKinError) else f"its words made no sense ({type(error).__name__})"
            if isinstance(found, Lost):
                self._met.discard(node)  # if it is still there, it is greeted again
            name = next((n for n, other in self._nodes.items() if other == node), key_name)
            known = self.trouble.get(name) if name else self._nameless
            if kind != "hello" or why != known:  # who comes all the time is told of once
                self._say(f"site {name!r}: {why}" if name else f"a site without a name: {why}")
            self._nameless = self._nameless if name else why
            if name and not isinstance(found, Lost):
                self.trouble[name] = why
            if kind == "hello" and not isinstance(found, Lost):
                self._refuse(node, why)

    def _greeted(self, node: int, fields: Mapping[str, Any], key_name: str | None) -> None:
        from fedkin.version import VERSION

        facts = Facts.of(fields)
        name = facts.name
        if key_name is not None and key_name != name:
            raise DataError(f"its key is signed for {key_name!r}, it calls itself {name!r}")
        if fields.get("fedkin") != VERSION:
            raise DataError(f"it has FedKin {_text(fields.get('fedkin'))}, the server {VERSION}")
        if facts.outputs > self._wanted[0]:
            what = "names {} classes" if facts.labels else "needs {} outputs"
            raise DataError(f"it {what.format(facts.outputs)}, more than --max-classes {self._wanted[0]}")
        process = _text(fields.get("process"))
        if self._nodes.get(name, node) != node and (not process or self._processes.get(name) != process):
            raise DataError(f"a site named {name!r} is connected already")
        self._admit(facts, process)
        self._nodes[name], self.facts[name], self._processes[name] = node, facts, process
        self.trouble.pop(name, None)
        if self._invitation is not None and name in self._by_number:
            self._invite(name)

    def _admit(self, facts: Facts, process: str) -> None:
        """DataError for a site that has greeted and is not let in."""
        if self._by_number and facts.name not in self._by_number:
            raise DataError(self._began)
        if self._by_number and self.facts[facts.name] != facts:
            raise DataError("its data are not those it began the run with")

    @property
    def _began(self) -> str:
        return f"the federation is complete without it; it can have a model from fedkin server --join {self._run}"

    def _invite(self, name: str, trunk: bool = False) -> None:
        assert self._invitation is not None
        fields, values = self._invitation(self._by_number.index(name))
        if trunk and self._packed_trunk is None:
            self._packed_trunk = pack(self._trunk(), {})
        whole = {
            "kind": "join",
            "run": self._run,
            "attempt": self._attempt,
            "place": self._by_number.index(name),
            "clients": len(self._by_number),
            **fields,
        }
        self._talk(self._nodes[name], "join", whole, values, self._packed_trunk if trunk else None)

    def _joined(self, node: int, fields: Mapping[str, Any]) -> None:
        name = next((n for n, other in self._nodes.items() if other == node), None)
        if name is not None and fields.get("kind") == "lacking":
            self._furnished[name] += 1
            if self._furnished[name] > FURNISHED:
                raise DataError(f"it says that it lacks the frozen weights, which it was sent {FURNISHED} times")
            self._say(f"site {name!r} is sent the frozen weights")
            self._invite(name, trunk=True)
            return
        if name is None or fields.get("kind") != "joined":
            raise DataError("its answer to the invitation is none")
        self._ready.add(self._by_number.index(name))
        self.trouble.pop(name, None)
        self._say(f"site {name!r} takes part{_text(fields.get('remark'))}")

    def _talk(
        self,
        node: int,
        kind: str,
        fields: Mapping[str, Any],
        values: Mapping[str, Any] | None = None,
        common: bytes | None = None,
    ) -> None:
        parcels = self._own(fields, values) | ({} if common is None else {"all": common})
        ticket = self._link.push(node, parcels, TALK + sum(map(len, parcels.values())) / SLOW)
        if ticket is not None:
            self._talks[ticket] = (node, kind)

    def _refuse(self, node: int, reason: str) -> None:
        self._link.push(node, self._own({"kind": "refused", "reason": reason}), TALK)

    def _own(self, fields: Mapping[str, Any], values: Mapping[str, Any] | None = None) -> dict[str, bytes]:
        # the nonce makes a message's id one that nobody can guess, and so its reply one that nobody else can give
        return {"own": pack(values or {}, {**fields, "nonce": secrets.token_hex(16)})}

    # ------------------------------------------------------------ the post

    def present(self, client: int) -> bool:
        self.tick()
        return client in self._ready

    def send(
        self, ids: Sequence[int], message: Mapping[str, object], fields: Mapping[str, Any], bounds: Bounds
    ) -> dict[int, str]:
        self.tick()
        limit = self._link.limit if bounds.bytes is None else min(bounds.bytes, self._link.limit)
        away: dict[int, str] = {}
        shared = {k: v for k, v in message.items() if not isinstance(v, Each)}
        rows = {k: v for k, v in message.items() if isinstance(v, Each)}
        common = {"all": pack(shared, {}, self._transport)} if shared else {}
        for place, client in enumerate(ids):
            if client not in self._ready:
                away[client] = self.trouble.get(self._by_number[client], "it is not connected")
                continue
            whole = {
                "kind": "call",
                "run": self._run,
                "attempt": self._attempt,
                **fields,
                "nonce": secrets.token_hex(16),
            }
            mine = pack({k: Each(v.rows[place : place + 1]) for k, v in rows.items()}, whole, self._transport)
            parcels = {**common, "own": mine}
            ticket = self._link.push(self._nodes[self._by_number[client]], parcels, bounds.seconds + MARGIN)
            if ticket is None:
                away[client] = "the connection to it was lost"
            else:
                self._calls[ticket] = client, limit
        return away

    def collect(self) -> dict[int, Arrival]:
        self.tick()
        came: dict[int, Arrival] = {}
        for found in self._link.pull(list(self._calls)) if self._calls else []:
            client, limit = self._calls.pop(found.ticket)
            if isinstance(found, Lost):
                came[client] = Invalid(found.reason) if found.invalid else found.reason
            else:
                came[client] = delivery(found.parcel, limit)
        return came

    def cancel(self, ids: Sequence[int]) -> None:
        tickets = [t for t, (client, _) in self._calls.items() if client in ids]
        self._link.forget(tickets)
        for ticket in tickets:
            del self._calls[ticket]


def delivery(content: bytes, limit: int) -> Arrival:
    """A reply as it came, made into values if those take no more than `limit` bytes."""
    try:
        parcel = unpack(content, limit)
    except WireError as error:
        return Invalid(str(error))
    except Exception as error:  # nothing that a site sends ends the server
        return Invalid(f"its reply cannot be read ({type(error).__name__})")
    if parcel.fields.get("kind") == "failed":
        return f"it says that it failed: {_text(parcel.fields.get('reason'))}"
    if parcel.fields.get("kind") != "reply":
        return Invalid("its reply is not one")
    return Delivery(parcel.values, parcel.fields)


def _text(value: object) -> str:
    """What a site says, safe to show."""
    text = value if isinstance(value, str) else ""
    return "".join(c if c.isprintable() else " " for c in text[:500])


def _without(sites: int) -> str:
    return f"start with those who came: --least {max(1, sites)}"


def _named(names: Mapping[str, object]) -> str:
    return f": {', '.join(sorted(names))}" if names else ""
