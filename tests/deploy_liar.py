"""A client that lies, for tests: `python deploy_liar.py LIES client ...` is `fedkin client ...`, but the reply to the
training phase of round n+1 is changed by the n-th of LIES (names with commas between; `honest`: not changed)."""

from __future__ import annotations

import os
import pickle
import sys
import time
from typing import Any

import torch

from fedkin.cli import main
from fedkin.deploy import node, worker
from fedkin.deploy.wire import pack, unpack

SILENT = b"silent"


def lie(kind: str, reply: bytes) -> bytes:
    parcel = unpack(reply)
    values: dict[str, Any] = dict(parcel.values)
    first = next(iter(values))
    if kind == "nan":
        return pack({**values, first: torch.full_like(values[first], torch.nan)}, parcel.fields)
    if kind == "shape":
        return pack({**values, first: values[first][:, :-1]}, parcel.fields)
    if kind == "names":
        return pack({"gift": values[first]}, parcel.fields)
    if kind == "garbage":
        return os.urandom(len(reply))
    if kind == "pickle":
        return pickle.dumps({n: v.tolist() for n, v in values.items()})
    if kind == "large":
        return pack({first: torch.zeros(1, 10 * (1 << 20) // 4)}, parcel.fields)  # ten times a limit of 1 MB
    if kind == "silent":
        return SILENT
    if kind == "hang":
        print("hanging", flush=True)
        time.sleep(600)
    raise SystemExit(f"no such lie: {kind}")


def install(lies: list[str]) -> None:
    honest, send = worker.Worker._call, node.Node.reply

    def call(self: worker.Worker, message: Any) -> bytes:
        at, phase = message.fields["round"] - 1, message.fields["phase"]
        kind = lies[at] if 0 <= at < len(lies) and not phase.startswith("report") else "honest"
        if kind == "hang":
            return lie(kind, honest(self, message))
        reply = honest(self, message)
        return reply if kind == "honest" else lie(kind, reply)

    def reply(self: node.Node, to: Any, pieces: list[bytes]) -> None:
        if b"".join(pieces) != SILENT:
            send(self, to, pieces)

    worker.Worker._call, node.Node.reply = call, reply  # type: ignore[method-assign]


if __name__ == "__main__":
    install(sys.argv.pop(1).split(","))
    main()
