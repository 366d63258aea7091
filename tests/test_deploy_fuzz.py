"""Ten thousand of everything that somebody could send: at the decoder, at the server's end and at a site's."""

from __future__ import annotations

import json
import random
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("cryptography")

from test_deploy_transport import (
    DECLARED,
    LETTER,
    dial,
    eventually,
    folder,
    identity,
    listen,
    opened,
    oslo,
    pretending,
    requests,
    serving,
    statuses,
    where,
)
from test_deploy_wire import hostile
from test_deploy_worker import Told

from fedkin.core.federation import Each, Masked
from fedkin.deploy.link import Link
from fedkin.deploy.node import Incoming, Node
from fedkin.deploy.policy import Policy
from fedkin.deploy.wire import MAGIC, WireError, pack, unpack
from fedkin.errors import FedKinError

__all__ = ["folder", "oslo"]
MANY = pytest.param(10_000, marks=pytest.mark.slow)
LIMIT = 1 << 20  # bytes that a frame may become


def peak() -> int:
    """The most memory that this process has had, in bytes."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM"))


@contextmanager
def at_most(more: int) -> Iterator[None]:
    """What is done in here needs no more memory than this, on top of what is there."""
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of what was before
    before = peak()
    yield
    print(f"{(peak() - before) >> 10} kB more at the peak")
    assert peak() - before < more


def bent(good: bytes, rng: random.Random) -> bytes:
    """Something right that something was done to."""
    whole = bytearray(good)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        at, length = rng.randrange(len(whole) + 1), rng.choice([1, 1, 2, 8, 100])
        how = rng.randrange(6)
        if how == 0:
            whole[at : at + length] = rng.randbytes(min(length, len(whole) - at))
        elif how == 1:
            del whole[at : at + length]
        elif how == 2:
            whole[at:at] = rng.randbytes(length)
        elif how == 3:
            whole[at:at] = whole[at : at + length]
        elif how == 4:
            del whole[at:]
        elif at < len(whole):
            whole[at] ^= 1 << rng.randrange(8)
        if not whole:
            return b""
    return bytes(whole)


def reframed(frame: bytes, rng: random.Random) -> bytes:
    """A frame whose header was changed, and the length that it says with it; the body as it was, or cut."""
    length = int.from_bytes(frame[4:8], "little")
    header, body = bent(frame[8 : 8 + length], rng), frame[8 + length :]
    if rng.random() < 0.5:
        text = json.loads(frame[8 : 8 + length])
        entry = rng.choice(text["values"])
        junk = [None, -1, 0, 1.5, "", [], {}, [2**40], 2**70, "each", "int8", True]
        entry[rng.choice(list(entry))] = rng.choice(junk)
        header = json.dumps(text).encode()
    said = len(header) if rng.random() < 0.9 else rng.randrange(1 << 32)
    return MAGIC + said.to_bytes(4, "little") + header + body[: rng.choice([len(body), len(body), 7])]


# ---------------------------------------------------------------- the decoder


@pytest.mark.parametrize("count", [600, MANY])
@pytest.mark.parametrize("transport", ["fp32", "fp16", "int8"])
def test_frames_raise_one_error_and_become_no_larger_than_they_may(transport: str, count: int) -> None:
    rng, other = random.Random(count), np.random.default_rng(count)
    mask = torch.rand(1, 2000) < 0.5
    message = {
        "model": torch.randn(1, 3000),
        "own": Each(torch.randn(1, 5)),
        "mask": mask,
        "lr": 0.1,
        "n": 3,
        "part": Masked(torch.randn(1, 2000), mask),
        "counts": torch.arange(20),
    }
    good = pack(message, {"kind": "reply", "loss": 0.5}, transport)  # type: ignore[arg-type]
    unpack(good, LIMIT)
    taken = 0
    with at_most(16 * LIMIT):
        for n in range(count):
            frame = (bent(good, rng), reframed(good, rng), hostile(other))[n % 3]
            with suppress(WireError):
                found = unpack(frame, LIMIT)
                taken += 1
                for value in found.values.values():
                    tensor = value.values if isinstance(value, Masked) else value
                    assert not isinstance(tensor, Tensor) or tensor.numel() * tensor.element_size() <= LIMIT
    assert count // 50 < taken < count // 2  # a changed number is a number


# ---------------------------------------------------------------- the server's end


def calls(session: str, count: int, seed: int) -> Iterator[bytes]:
    """Requests that are wrong, and right ones that something was done to."""
    rng = random.Random(seed)
    known = f"fedkin-session: {session}\r\nfedkin-after: 0\r\nfedkin-ticket: 1.1\r\n"
    right = [
        f"POST /{path} HTTP/1.1\r\nhost: x\r\n{known}content-length: {size}\r\n\r\n{'x' * size}".encode()
        for path, size in (("open", 0), ("beat", 0), ("pull", 0), ("push", 50))
    ]
    wrong = requests(session, seed, count, count)
    for n in range(count):
        yield next(wrong, b"") if n % 2 else bent(rng.choice(right), rng)


@pytest.mark.parametrize("count", [300, MANY])
@pytest.mark.parametrize("tls", [False, True])
def test_requests_get_declared_answers_only(folder: Path, oslo: ssl.SSLContext, tls: bool, count: int) -> None:
    """Each on a connection of its own: the server answers or hangs up, keeps nothing of it, and goes on."""
    context = oslo if tls else None
    with serving(folder if tls else None) as live:
        session, seen, answered = opened(live, context), set[int](), 0
        with at_most(64 << 20):
            for words in calls(session, count // 5 if tls else count, count):
                found = statuses(said(live, context, words))
                answered += bool(found)
                seen |= set(found)
        assert seen <= DECLARED, seen
        assert {400, 404, 410} <= seen
        assert answered > count // 20
        eventually(lambda: len(live._door._open) == 0)
        with Node(where(live), identity(folder, "rome") if tls else None) as site:
            number = max(live.nodes())
            ticket = live.push(number, {"own": b"?"}, 60)
            incoming = site.receive()
            assert incoming is not None
            site.reply(incoming, b"still here")
            assert [a.parcel for a in live.pull([str(ticket)])] == [b"still here"]  # type: ignore[union-attr]


def said(live: Link, context: ssl.SSLContext | None, words: bytes) -> bytes:
    with closing(dial(live, context)) as connection:
        with suppress(OSError):
            connection.sendall(words)
            if context is None:
                connection.shutdown(socket.SHUT_WR)  # nothing more comes: no need to wait for whether it does
            else:
                connection.settimeout(0.02)
        return listen(connection)


# ---------------------------------------------------------------- a site's end

RIGHT = b"HTTP/1.1 200 OK\r\nfedkin-session: 1.a\r\n" + LETTER + b"content-length: 5\r\n\r\nhello"


def answers(count: int) -> Iterator[bytes]:
    rng = random.Random(count)
    heads = [
        b"",
        b"content-length: 5",
        b"content-length: -1",
        b"content-length: 5\r\ncontent-length: 6",
        b"content-length: 99999999999999999999",
        b"content-length: \xb2",
        b"content-encoding: gzip",
        b"content-encoding: br\r\ncontent-length: 5",
        b"transfer-encoding: chunked",
        b"set-cookie: a=\xff; domain=x",
        b"location: http://[::1",
        b"location: /\xff",
        b"connection: close",
        b"x: " + b"y" * 200_000,
        b"fedkin-parcels: own=\xb2",
        b"fedkin-parcels: " + b"own=0," * 9000,
        b"fedkin-number: " + b"9" * 5000,
        b"fedkin-session: \xe9\xff",
        b"fedkin-ticket: \xe9",
        b"fedkin-most: 1e9",
        b"retry-after: -1",
    ]
    for n in range(count):
        if n % 3 == 0:
            yield bent(RIGHT, rng)
        elif n % 3 == 1:
            status = rng.choice(
                [
                    b"200 OK",
                    b"204 No",
                    b"100 Go on",
                    b"301 There",
                    b"401 \xff",
                    b"403 No",
                    b"410 letter",
                    b"413 Much",
                    b"500 Oh",
                    b"999 What",
                    b"-1 x",
                    b"200",
                ]
            )
            lines = [rng.choice(heads) for _ in range(rng.randrange(4))]
            yield b"\r\n".join([b"HTTP/1.1 " + status, LETTER.strip(), *lines]) + b"\r\n\r\n" + rng.randbytes(5)
        else:
            yield rng.randbytes(rng.randrange(300))


def saying(words: Callable[[], bytes]) -> Callable[[socket.socket], None]:
    def serve(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(words())

    return serve


@pytest.mark.parametrize("count", [150, MANY])
def test_answers_raise_declared_errors_only(count: int) -> None:
    """Whatever a server says to whoever comes, asks and replies."""
    left, taken = answers(count), 0
    with pretending(None, saying(lambda: next(left, RIGHT))) as port, at_most(64 << 20):
        site = Node(f"127.0.0.1:{port}", limit=1_000_000)
        site._stopped.set()  # no second try, and nothing in between
        for n in range(count):
            with suppress(FedKinError):
                if n % 3 == 0:
                    site.open()
                elif n % 3 == 1:
                    site.receive()
                else:
                    site.reply(Incoming("1.1", {}, 1000), b"mine")
                taken += 1
        site._client.close()
        site._beats.close()
    assert count // 50 < taken < count


@pytest.mark.parametrize("count", [150, pytest.param(3_000, marks=pytest.mark.slow)])
def test_letters_are_answered_in_words(tmp_path: Path, count: int) -> None:
    """Whatever a letter holds, a site's answer is one, and its record has a line more."""
    told, rng, other = Told(tmp_path, "ditto"), random.Random(count), np.random.default_rng(count)
    told.worker.policy = Policy(questions=10**6)
    told.join()
    fields = {"kind": "call", "run": "run-1", "attempt": 1, "phase": "train", "round": 0, "call": 0, "checkpoints": []}
    good = pack({"model": told.job.method.model}, fields)
    before = len((tmp_path / "site" / "record.jsonl").read_text().splitlines())
    kinds = set[str]()
    with at_most(128 << 20):
        for n in range(count):
            frame = (bent(good, rng), reframed(good, rng), hostile(other))[n % 3]
            parcels = {"own": frame} if n % 4 else {"own": good, "all": frame}
            kinds.add(str(unpack(told.worker.answer(parcels)).fields["kind"]))
    assert kinds == {"failed", "reply"}
    assert len((tmp_path / "site" / "record.jsonl").read_text().splitlines()) == before + count
