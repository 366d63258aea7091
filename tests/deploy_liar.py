"""A client that lies, for tests: `python deploy_liar.py LIES client ...` is `fedkin client ...`, but the reply to the
training phase of round n+1 is changed by the n-th of LIES (names with commas between; `honest`: not changed).
`always:LIE`: every reply but reports; `report:LIE`, `hello:LIE`, `join:LIE`: those. `clockN`: a clock N seconds off."""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from fedkin.cli import main
from fedkin.deploy import node, worker
from fedkin.deploy.wire import MAGIC, pack, unpack

SILENT = b"silent"


def framed(header: dict[str, Any], body: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return MAGIC + len(text).to_bytes(4, "little") + text + body


def lie(kind: str, reply: bytes) -> bytes:
    parcel = unpack(reply)
    values: dict[str, Any] = dict(parcel.values)
    first = next(iter(values), "")
    fields = parcel.fields
    told: dict[str, Callable[[], bytes]] = {
        "nan": lambda: pack({**values, first: torch.full_like(values[first], torch.nan)}, fields),
        "huge": lambda: pack(
            {
                n: torch.full_like(v, 3e38) if v.is_floating_point() else v
                for n, v in values.items()
                if isinstance(v, torch.Tensor)
            },
            fields,
        ),
        "shape": lambda: pack({**values, first: values[first][:, :-1]}, fields),
        "empty": lambda: pack({**values, first: values[first][:, :0]}, fields),
        "nothing": lambda: pack({}, fields),
        "float64": lambda: pack({**values, first: values[first].double()}, fields),
        "int64": lambda: pack({**values, first: values[first].long()}, fields),
        "names": lambda: pack({"gift": values[first]}, fields),
        "garbage": lambda: os.urandom(len(reply)),
        "pickle": lambda: pickle.dumps({n: v.tolist() for n, v in values.items()}),
        "large": lambda: pack({first: torch.zeros(1, 10 * (1 << 20) // 4)}, fields),  # ten times a limit of 1 MB
        "loss": lambda: pack(values, {**fields, "loss": 1e300}),
        "steps": lambda: pack(values, {**fields, "steps": -(10**30)}),
        "failed": lambda: pack({}, {"kind": "failed", "reason": "\x1b[2J out of patience"}),
        "kind": lambda: pack(values, {**fields, "kind": ["reply"]}),
        "infinite": lambda: pack({n: torch.full_like(v, torch.inf) for n, v in values.items()}, fields),
        "strides": lambda: framed(
            {
                "fields": fields,
                "values": [
                    {
                        "name": first,
                        "type": "tensor",
                        "dtype": "float32",
                        "shape": [1, 0, 1 << 39, 1 << 39],
                        "as": "raw",
                    }
                ],
            }
        ),
        "bomb": lambda: framed(
            {
                "fields": fields,
                "values": [
                    {"name": "mask", "type": "tensor", "dtype": "bool", "shape": [1, 1], "as": "bits"},
                    {
                        "name": first,
                        "type": "masked",
                        "dtype": "float32",
                        "shape": [0],
                        "as": "raw",
                        "full": [1, 1, 380_000_000],
                        "mask": {"of": "mask", "not": False},
                    },
                ],
            },
            b"\0",
        ),
        "classes": lambda: pack({}, {**fields, "samples": 10**8, "labels": list(range(100_000))}),
        "samples": lambda: pack({}, {**fields, "samples": 10**8}),
        "other": lambda: pack({}, {**fields, "shape": [7]}),
        "wide": lambda: pack({**values, first: torch.cat([values[first]] * 2)}, fields),
        "half": lambda: pack({**values, first: values[first].half()}, fields),
        "truth": lambda: pack({**values, first: values[first] > 0}, fields),
        "axis": lambda: pack({**values, first: values[first][None]}, fields),
        "number": lambda: pack({**values, first: 1.0}, fields),
        "more": lambda: pack({**values, "gift": torch.zeros(1, 5)}, fields),
        "cut": lambda: reply[: len(reply) // 2],
        "twice": lambda: reply + reply,
        "length": lambda: MAGIC + b"\xff\xff\xff\xff" + reply[8:],
        "deep": lambda: MAGIC + (200_000).to_bytes(4, "little") + b"[" * 100_000 + b"]" * 100_000,
        "many": lambda: pack({**values, **{f"v{n}": 1 for n in range(300)}}, fields),
        "text": lambda: pack(values, {**fields, "loss": "much"}),
        "word": lambda: pack(values, {**fields, "steps": "9" * 10_000}),
        "unkind": lambda: pack(values, {n: v for n, v in fields.items() if n != "kind"}),
        "join": lambda: pack({}, {"kind": "joined", "train": 5}),
        "alias": lambda: pack({}, {**fields, "site": "oslo"}),
        "climb": lambda: pack({}, {**fields, "site": "../../etc/\x1b[2J"}),
        "version": lambda: pack({}, {**fields, "fedkin": {"a": [1]}}),
        "negative": lambda: pack({}, {**fields, "samples": -1, "tests": 10**400}),
        "axes": lambda: pack({}, {**fields, "shape": [10**6] * 4}),
        "mixed": lambda: pack({}, {**fields, "labels": [1, "a", [2], None]}),
        "silent": lambda: SILENT,
    }
    if kind == "hang":
        print("hanging", flush=True)
        time.sleep(600)
    if kind == "freeze":
        print("freezing", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        return reply
    if kind == "die":
        os._exit(1)
    if kind not in told:
        raise SystemExit(f"no such lie: {kind}")
    return told[kind]()


def install(lies: list[str]) -> None:
    honest, send = worker.Worker._call, node.Node.reply
    always = dict(one.split(":", 1) for one in lies if ":" in one)

    def call(self: worker.Worker, message: Any) -> bytes:
        at, report = message.fields["round"] - 1, message.fields["phase"].startswith("report")
        kind = lies[at] if 0 <= at < len(lies) and not report and not always else "honest"
        kind = always.get("report" if report else "always", kind)
        reply = honest(self, message)
        return reply if kind == "honest" else lie(kind, reply)

    def wrapped(name: str, kind: str) -> None:
        original = getattr(worker.Worker, name)
        setattr(worker.Worker, name, lambda self, *given: lie(kind, original(self, *given)))

    def reply(self: node.Node, to: Any, content: bytes) -> None:
        if content != SILENT:
            send(self, to, content)

    worker.Worker._call, node.Node.reply = call, reply  # type: ignore[method-assign]
    for name in ("hello", "join"):
        if name in always:
            wrapped(f"_{name}", always[name])


if __name__ == "__main__":
    install(sys.argv.pop(1).split(","))
    main()
