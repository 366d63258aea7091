"""The wire between server and sites under attack: strangers, known sites that misbehave, servers that do."""

from __future__ import annotations

import gc
import gzip
import os
import random
import resource
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("cryptography")

from fedkin.cli.application import app
from fedkin.deploy import authority, door, link, node
from fedkin.deploy import certificates as keys
from fedkin.deploy.certificates import Identity, identity_of
from fedkin.deploy.door import UnprovenPeers
from fedkin.deploy.link import Arrived, Link, Lost
from fedkin.deploy.node import Node, Refused, Unreachable, client_context
from fedkin.errors import DataError, FedKinError, UsageError

# every status that the server ever answers with
DECLARED = {200, 204, 400, 403, 404, 408, 409, 410, 411, 413, 415, 417, 429, 431}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return authority.new_folder(tmp_path_factory.mktemp("transport") / "keys", ["127.0.0.1"], ["oslo", "rome"])


@contextmanager
def serving(folder: Path | None) -> Iterator[Link]:
    made = Link(keys=folder)
    made.start()
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def live(folder: Path) -> Iterator[Link]:
    with serving(folder) as made:
        yield made


def identity(folder: Path, name: str) -> Identity:
    return identity_of(folder / "sites" / f"{name}.key", folder / "ca.crt")


def where(live: Link) -> str:
    return f"127.0.0.1:{live.port}"


def dial(live: Link, context: ssl.SSLContext | None = None) -> socket.socket:
    plain = socket.create_connection(("127.0.0.1", live.port), timeout=20)
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return plain if context is None else context.wrap_socket(plain, server_hostname="127.0.0.1")


def listen(connection: socket.socket, most: int = 1 << 20) -> bytes:
    """All that the other side says until it hangs up."""
    said = b""
    with suppress(OSError):
        while len(said) < most and (part := connection.recv(65536)):
            said += part
    return said


def shout(live: Link, context: ssl.SSLContext | None, words: bytes) -> bytes:
    with closing(dial(live, context)) as connection:
        with suppress(OSError):
            connection.sendall(words)
        return listen(connection)


def statuses(said: bytes) -> list[int]:
    return [int(line.split()[1]) for line in said.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]


def eventually(what: Callable[[], bool], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until
        time.sleep(0.02)


def exchange(live: Link, site: Node, size: int = 1000) -> None:
    """One letter there and its reply back."""
    [number] = [n for n, name in live.nodes().items() if name == "oslo"]
    ticket = live.push(number, {"all": bytes(size), "own": b"mine"}, 60)
    assert ticket is not None
    incoming = site.receive()
    assert incoming is not None
    assert incoming.parcels == {"all": bytes(size), "own": b"mine"}
    site.reply(incoming, b"thanks")
    assert live.pull([ticket]) == [Arrived(ticket, b"thanks")]


# ---------------------------------------------------------------- who is let in


def test_a_letter_and_its_reply(live: Link, folder: Path) -> None:
    with Node(where(live), identity(folder, "oslo")) as site:
        assert list(live.nodes().values()) == ["oslo"]
        for size in (0, 1000, 3_000_000):
            exchange(live, site, size)
        sent, received = live.traffic
        assert sent > 3_000_000
        assert 0 < received < 30_000
        assert len(live._door._open) == 1  # one connection for all of it
    eventually(lambda: live.nodes() == {})


def refused_at_the_handshake(live: Link, context: ssl.SSLContext) -> None:
    """Not one byte is answered to somebody without a certificate of this federation."""
    before = live.traffic
    try:
        said = shout(live, context, b"POST /open HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
    except OSError:
        said = b""
    assert said == b""
    assert live.traffic == before


def trusting() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def test_without_a_certificate(live: Link) -> None:
    refused_at_the_handshake(live, trusting())


@pytest.mark.parametrize("name", ["oslo", "elsewhere"])
def test_a_certificate_of_another_federation(live: Link, tmp_path: Path, name: str) -> None:
    other = authority.new_folder(tmp_path / "other", ["127.0.0.1"], [name])
    context = trusting()
    context.load_cert_chain(other / "sites" / f"{name}.crt", other / "sites" / f"{name}.key")
    refused_at_the_handshake(live, context)
    with pytest.raises(Refused, match="certificate is not accepted") as found, Node(where(live), identity(other, name)):
        pass
    assert found.value.final


def test_a_self_signed_certificate_that_looks_right(live: Link, folder: Path, tmp_path: Path) -> None:
    key, made = str(tmp_path / "a.key"), str(tmp_path / "a.crt")
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-subj",
        "/CN=oslo",
        "-days",
        "9",
        "-keyout",
        key,
        "-out",
        made,
    ]
    subprocess.run(command, check=True, capture_output=True)
    context = trusting()
    context.load_cert_chain(made, key)
    refused_at_the_handshake(live, context)


def test_the_servers_own_certificate_is_not_a_sites(live: Link, folder: Path) -> None:
    context = trusting()
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    refused_at_the_handshake(live, context)


def test_an_expired_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authority, "_now", lambda real=authority._now: real() - timedelta(days=10))
    own = authority.new_folder(tmp_path / "keys", ["127.0.0.1"], ["rome"])
    request = authority.new_site(tmp_path, "tokyo")
    authority.sign(own, request, days=5)
    monkeypatch.undo()
    (tmp_path / "tokyo.crt").write_bytes((own / "sites" / "tokyo.crt").read_bytes())
    context = trusting()
    context.load_cert_chain(tmp_path / "tokyo.crt", tmp_path / "tokyo.key")
    with serving(own) as live:
        refused_at_the_handshake(live, context)
        with Node(where(live), identity(own, "rome")):
            pass
    with pytest.raises(DataError, match="ran out on"):
        identity_of(tmp_path / "tokyo.key", own / "ca.crt").check()
    with pytest.raises(Refused, match="ran out on"):
        Node(where(live), identity_of(tmp_path / "tokyo.key", own / "ca.crt"))


def test_old_tls_is_not_spoken(live: Link, folder: Path) -> None:
    context = client_context(identity(folder, "oslo"))
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(OSError, match=r"(?i)protocol|alert|reset|eof|closed"):
        dial(live, context)


def test_a_site_cannot_pose_as_the_server(folder: Path) -> None:
    """One authority signs both; what each certificate is for keeps them apart, besides the host names."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "sites" / "rome.crt", folder / "sites" / "rome.key")
    with pretending(context, lambda c: None) as port, pytest.raises(Refused, match="certificate is not accepted"):
        Node(f"127.0.0.1:{port}", identity(folder, "oslo")).open()
    lax = client_context(identity(folder, "oslo"))
    lax.check_hostname = False
    with (
        pretending(context, lambda c: None) as port,
        closing(socket.create_connection(("127.0.0.1", port))) as plain,
        pytest.raises(ssl.SSLCertVerificationError, match=r"purpose|certificate"),
    ):
        lax.wrap_socket(plain, server_hostname="127.0.0.1")


def test_a_site_signed_but_not_on_the_list(tmp_path: Path) -> None:
    own = authority.new_folder(tmp_path / "keys", ["127.0.0.1"], ["oslo", "rome"])
    shutil.copytree(own / "sites", tmp_path / "there")
    oslo = identity_of(tmp_path / "there" / "oslo.key", own / "ca.crt")
    with serving(own) as live:
        with Node(where(live), oslo) as site:
            exchange(live, site)
            held = threading.Thread(target=lambda: suppressed(site.receive))
            held.start()
            authority.revoke(own, "oslo")
            begin = time.monotonic()
            assert live.nodes() == {}  # at once, while its question is held
            held.join(20)
            assert time.monotonic() - begin < 5
            with pytest.raises(Refused, match="not on the server's list"):
                site.receive()
        with pytest.raises(Refused, match="revoked"), Node(where(live), oslo):
            pass
        request = authority.new_site(tmp_path, "oslo")
        authority.sign(own, request)  # a new key, while the server runs
        (tmp_path / "oslo.crt").write_bytes((own / "sites" / "oslo.crt").read_bytes())
        with Node(where(live), identity_of(tmp_path / "oslo.key", own / "ca.crt")) as site:
            exchange(live, site)
        with pytest.raises(Refused, match="not on the server's list"), Node(where(live), oslo):
            pass
        (own / "sites.json").write_text("damaged")
        with pytest.raises(Refused, match="not on the server's list"), Node(where(live), identity(own, "rome")):
            pass


def suppressed(call: Callable[[], object]) -> None:
    with suppress(FedKinError):
        call()


def test_one_process_for_each_certificate_and_who_died_is_missed_soon(live: Link, folder: Path) -> None:
    oslo = identity(folder, "oslo")
    first = Node(where(live), oslo, process="first")
    first.open()
    with pytest.raises(Refused, match="another process with the certificate of 'oslo'"), Node(where(live), oslo):
        pass
    with Node(where(live), identity(folder, "rome")):
        assert sorted(map(str, live.nodes().values())) == ["oslo", "rome"]
    again = Node(where(live), oslo, process="first")  # the same process, whose connection broke
    again.open()
    assert list(live.nodes().values()) == ["oslo"]
    with pytest.raises(Unreachable, match="does not know this site"):
        first.receive()
    again._stopped.set()
    for one in (first, again):
        one._stopped.set()
        one._client.close()
        one._beats.close()
    begin = time.monotonic()
    eventually(lambda: live.nodes() == {})
    assert time.monotonic() - begin < link.GRACE + 5


def test_a_site_that_comes_and_goes_all_the_time_has_to_wait(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(folder) as live:
        for _ in range(link.OFTEN):
            with Node(where(live), identity(folder, "oslo")):
                pass
        with pytest.raises(Refused, match="wait a while"), Node(where(live), identity(folder, "oslo")):
            pass
        with Node(where(live), identity(folder, "rome")):
            pass
        monkeypatch.setattr(link, "WHILE", 0.0)
        with Node(where(live), identity(folder, "oslo")):
            pass


def test_without_tls_only_on_this_machine() -> None:
    for host in ("0.0.0.0", "10.0.0.5", "server.example.org", "::"):
        with pytest.raises(UsageError, match="own machine"):
            Link(host)
    done = CliRunner().invoke(app, ["server", "fedavg", "--clients", "1", "--insecure", "--host", "0.0.0.0"])
    assert (done.exit_code, "own machine" in " ".join(done.output.split())) == (2, True)
    for server in ("10.0.0.5:9092", "server.example.org:9092"):
        with pytest.raises(UsageError, match="only a server on this machine"):
            Node(server)
    with serving(None) as live, Node(where(live)) as one, Node(where(live)) as two:
        assert list(live.nodes().values()) == [None, None]
        ticket = live.push(2, {"own": b"x"}, 10)
        assert ticket is not None
        incoming = two.receive()
        assert incoming is not None
        one.reply(incoming, b"not mine to answer")
        assert live.pull([ticket]) == []
        two.reply(incoming, b"mine")
        assert live.pull([ticket]) == [Arrived(ticket, b"mine")]


def test_the_server_does_not_need_the_authoritys_key(tmp_path: Path) -> None:
    own = authority.new_folder(tmp_path / "keys", ["127.0.0.1"], ["oslo"])
    (own / "ca.key").unlink()
    assert keys.check_server(own) == []
    with serving(own) as live, Node(where(live), identity(own, "oslo")) as site:
        exchange(live, site)


# ---------------------------------------------------------------- somebody on the way


class Between:
    """Carries bytes between a site and the server, and does something to them: `harm(number of the chunk, bytes)`."""

    def __init__(self, to: int, harm: Callable[[int, bytes], bytes]) -> None:
        self.said, self._to, self._harm, self._count = list[bytes](), to, harm, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                one, _ = self._listener.accept()
                other = socket.create_connection(("127.0.0.1", self._to))
                for a, b, keep in ((one, other, True), (other, one, False)):
                    threading.Thread(target=self._carry, args=(a, b, keep), daemon=True).start()

    def _carry(self, a: socket.socket, b: socket.socket, keep: bool) -> None:
        with suppress(OSError):
            while part := a.recv(65536):
                self._count += 1
                if keep:
                    self.said.append(part)
                b.sendall(self._harm(self._count, part))
        for end in (a, b):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()


def test_delayed_and_flipped_traffic_breaks_connections_and_no_letters(folder: Path) -> None:
    """What arrives is what was sent, or nothing and then the same again."""

    def harm(number: int, part: bytes) -> bytes:
        time.sleep(0.01)
        if number % 23:
            return part
        flipped = bytearray(part)
        flipped[len(part) // 2] ^= 1
        return bytes(flipped)

    with serving(folder) as live, closing(Between(live.port, harm)) as between:
        done, there = 0, f"127.0.0.1:{between.port}"
        for _ in range(30):
            with suppress(Unreachable), Node(there, identity(folder, "oslo"), process="p") as site:
                for _ in range(8):
                    number = next(iter(live.nodes()), None)
                    if number is None:  # both of its connections broke
                        break
                    ticket = live.push(number, {"own": b"mine", "all": bytes(range(256)) * 400}, 60)
                    assert ticket is not None
                    incoming = site.receive()
                    assert incoming is not None
                    assert incoming.parcels == {"own": b"mine", "all": bytes(range(256)) * 400}
                    site.reply(incoming, bytes(range(255, -1, -1)) * 400)
                    [found] = live.pull([ticket])
                    assert found == Arrived(ticket, bytes(range(255, -1, -1)) * 400)
                    done += 1
            if done >= 8:
                break
        assert done >= 8
        assert between._count > 23


def test_replayed_traffic_is_nothing(folder: Path) -> None:
    with serving(folder) as live, closing(Between(live.port, lambda _, part: part)) as between:
        with Node(f"127.0.0.1:{between.port}", identity(folder, "oslo")) as site:
            exchange(live, site)
        eventually(lambda: live.nodes() == {})
        before = live.traffic
        with closing(dial(live)) as again:
            for part in between.said:
                with suppress(OSError):
                    again.sendall(part)
            assert b"HTTP" not in listen(again)
        assert (live.nodes(), live.traffic) == ({}, before)


# ---------------------------------------------------------------- strangers


def test_the_crowd_loses_the_oldest_of_the_address_that_has_most() -> None:
    crowd = UnprovenPeers[int](5)
    assert [crowd.add(n, a) for n, a in enumerate(["x", "y", "x", "y", "x"])] == [None] * 5
    assert crowd.add(5, "z") == 0
    assert crowd.add(6, "z") == 1  # x, y and z have two each: the one whose oldest is oldest
    crowd.remove(2)
    assert crowd.add(7, "z") is None
    assert crowd.add(8, "z") == 5
    assert len(crowd) == 5


def test_the_crowd_never_grows_and_spares_other_addresses() -> None:
    rng, crowd, kind = random.Random(0), UnprovenPeers[int](20), int
    quiet = [kind(n) for n in range(3)]
    for one in quiet:
        crowd.add(one, f"site-{one}")
    gone = [crowd.add(n, "flood") for n in range(10, 2000) if rng.random() < 0.9]
    assert len(crowd) == 20
    assert not set(quiet) & {g for g in gone if g is not None}


@pytest.mark.parametrize("tls", [False, True])
def test_a_thousand_idle_strangers_stop_nothing(live: Link, folder: Path, tls: bool) -> None:
    """Plain connections that say nothing, and ones that stop in the middle of the handshake."""
    hello, before = client_hello(), handshakes()
    with Node(where(live), identity(folder, "oslo")) as site, ExitStack() as stack:
        exchange(live, site)
        for n in range(1100):
            idle = stack.enter_context(closing(socket.create_connection(("127.0.0.1", live.port), timeout=20)))
            if tls:
                with suppress(OSError):
                    idle.sendall(hello)
            if n % 200 == 0:
                exchange(live, site, 100_000)
        for _ in range(5):
            exchange(live, site, 100_000)
        with Node(where(live), identity(folder, "rome")):  # and a new one comes in
            assert sorted(map(str, live.nodes().values())) == ["oslo", "rome"]
        assert len(live._door._crowd) <= door.CROWD
        assert handshakes() - before <= door.CROWD + 50  # who had to go has left nothing behind


def handshakes() -> int:
    """TLS connections that have a place in memory."""
    gc.collect()
    return sum(type(one) is SSLProtocol for one in gc.get_objects())


def client_hello() -> bytes:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = trusting().wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with pytest.raises(ssl.SSLWantReadError):
        one.do_handshake()
    return outgoing.read()


def test_garbage_at_the_handshake(live: Link, folder: Path) -> None:
    rng = random.Random(1)
    hello = client_hello()
    with Node(where(live), identity(folder, "oslo")) as site:
        for n in range(150):
            if n % 3 == 0:
                words = rng.randbytes(rng.randrange(1, 4000))
            elif n % 3 == 1:
                words = bytearray(hello)
                for _ in range(rng.randrange(1, 8)):
                    words[rng.randrange(len(words))] = rng.randrange(256)
            else:
                words = b"POST /pull HTTP/1.1\r\nhost: x\r\n\r\n"
            with closing(socket.create_connection(("127.0.0.1", live.port), timeout=20)) as connection:
                with suppress(OSError):
                    connection.sendall(bytes(words))
                    connection.shutdown(socket.SHUT_WR)
                assert b"HTTP" not in listen(connection)
            if n % 50 == 0:
                exchange(live, site)
        exchange(live, site)


def test_a_handshake_has_its_time(live: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "HANDSHAKE", 0.3)
    with closing(dial(live)) as idle:
        begin = time.monotonic()
        assert listen(idle) == b""
        assert time.monotonic() - begin < 10


# ---------------------------------------------------------------- sites that misbehave


@pytest.fixture(scope="module")
def oslo(folder: Path) -> ssl.SSLContext:
    return client_context(identity(folder, "oslo"))


def opened(live: Link, context: ssl.SSLContext | None) -> str:
    said = shout(live, context, b"POST /open HTTP/1.1\r\nhost: x\r\nfedkin-process: p\r\nconnection: close\r\n\r\n")
    assert statuses(said) == [200], said
    [line] = [x for x in said.split(b"\r\n") if x.startswith(b"fedkin-session")]
    return line.split(b": ")[1].decode()


def requests(session: str, seed: int = 2, count: int = 450, noise: int = 150) -> Iterator[bytes]:
    """Requests of many kinds, none of them right."""
    rng = random.Random(seed)
    paths = [
        "/",
        "/open",
        "/pull",
        "/push",
        "/beat",
        "/close",
        "/v1/fleet/pull-messages",
        "/../open",
        "/%2e%2e/open",
        "*",
        "http://x/open",
        "/open?x=1",
        "/" + "a" * 3000,
    ]
    methods = ["POST", "GET", "HEAD", "PUT", "DELETE", "CONNECT", "OPTIONS", "PRI", "post", "X" * 50]
    extras = [
        "",
        "content-length: 5",
        "content-length: -1",
        "content-length: 99999999999999999999",
        "content-length: 5\r\ncontent-length: 6",
        "transfer-encoding: chunked",
        "content-encoding: gzip",
        "transfer-encoding: gzip, chunked",
        "expect: 100-continue",
        "upgrade: websocket",
        "fedkin-after: 1",
        "fedkin-after: \xb2",
        "fedkin-after: -1",
        "fedkin-after: " + "9" * 5000,
        "fedkin-ticket: 1.1",
        "fedkin-ticket: ../../x",
        "fedkin-session: 1.x",
        "fedkin-session: \xff\xfe",
        "a" * 20_000,
        "fedkin-session: " + "9" * 5000 + ".x",
        "x: " + "y" * 20_000,
        "cookie: a=b",
        ": empty",
        "bad header",
        "connection: close",
    ]
    for _ in range(count):
        head = [
            f"{rng.choice(methods)} {rng.choice(paths)} HTTP/{rng.choice(['1.1', '1.1', '1.0', '2.0', '9'])}",
            "host: x",
            f"fedkin-session: {session}" if rng.random() < 0.3 else "a: b",
            *(rng.choice(extras) for _ in range(rng.randrange(4))),
        ]
        body = rng.choice([b"", b"", b"12345", b"5\r\nhello\r\n0\r\n\r\n", rng.randbytes(300)])
        if "/close" in head[0] and session in str(head):
            continue
        yield "\r\n".join(head).encode("latin-1") + b"\r\n\r\n" + body
    for _ in range(noise):
        yield rng.randbytes(rng.randrange(1, 3000))


@pytest.mark.parametrize("tls", [False, True])
def test_odd_requests_get_declared_answers_only(folder: Path, oslo: ssl.SSLContext, tls: bool) -> None:
    """Six hundred, and some of them from a certificate's holder: nothing but the answers that are known."""
    with serving(folder if tls else None) as live:
        seen = odd_requests(live, oslo if tls else None, every=6 if tls else 1)
        assert seen <= DECLARED, seen
        assert {400, 404, 410, 411} <= seen
        eventually(lambda: live.nodes() == {})
        with Node(where(live), identity(folder, "oslo") if tls else None):
            assert len(live.nodes()) == 1


def odd_requests(live: Link, context: ssl.SSLContext | None, every: int) -> set[int]:
    session, seen, count = opened(live, context), set[int](), 0
    ours = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    todo = list(requests(session))[::every]
    for at in range(0, len(todo), door.EACH):
        with ExitStack() as stack:
            several = [stack.enter_context(closing(dial(live, context))) for _ in todo[at : at + door.EACH]]
            for connection, words in zip(several, todo[at:], strict=False):
                with suppress(OSError):
                    connection.sendall(words)
            for n, connection in enumerate(several):
                connection.settimeout(0.005 if n else 0.03)  # it may be waiting for the rest
                seen |= set(statuses(listen(connection)))
                count += 1
    assert count > 500 // every
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - ours < 100_000  # kB
    return seen


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (b"GET /open HTTP/1.1\r\nhost: x\r\n\r\n", 404),
        (b"POST /control/start-run HTTP/1.1\r\nhost: x\r\n\r\n", 404),
        (b"POST /pull HTTP/1.1\r\nhost: x\r\n\r\n", 410),
        (b"POST /open HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\n\r\nx", 413),
        (b"POST /open HTTP/1.1\r\nhost: x\r\ncontent-encoding: gzip\r\n\r\n", 415),
        (b"POST /open HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 411),
        (b"POST /open HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 2 * door.HEADERS + b"\r\n\r\n", 431),
        (b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n", 404),
        (b"POST /open HTTP/1.1\r\n\r\n", 400),
    ],
)
def test_what_is_answered_to_what(live: Link, oslo: ssl.SSLContext, words: bytes, status: int) -> None:
    said = shout(live, oslo, words)
    assert statuses(said) == [status]
    assert b"\r\ndate: " in said.lower()


def test_endless_headers_end_early(live: Link, oslo: ssl.SSLContext) -> None:
    with closing(dial(live, oslo)) as connection:
        sent, before = 0, live.traffic[1]
        with suppress(OSError):
            connection.sendall(b"POST /open HTTP/1.1\r\n")
            while sent < 50 << 20:
                sent += connection.send(b"x-%d: y\r\n" % sent * 1000)
        assert sent < 50 << 20  # it hung up
        assert live.traffic[1] - before < 2 * door.HEADERS


def test_only_replies_to_what_was_asked_once_and_no_larger_than_said(folder: Path, oslo: ssl.SSLContext) -> None:
    with serving(folder) as live, Node(where(live), identity(folder, "oslo")) as site:
        known = f"fedkin-session: {site._session}\r\n"

        def push(ticket: str, body: bytes, length: int | None = None) -> list[int]:
            head = f"POST /push HTTP/1.1\r\nhost: x\r\n{known}fedkin-ticket: {ticket}\r\nconnection: close\r\n"
            size = len(body) if length is None else length
            return statuses(shout(live, oslo, f"{head}content-length: {size}\r\n\r\n".encode() + body))

        assert push("1.1", b"unasked") == [410]  # nothing was asked yet
        for guess in ("", "0", "1.2", "2.1", "-1.1", "1.1 "):
            assert push(guess, b"x" * 1000) == [410]
        live.limit = 1000
        [number] = live.nodes()
        first, second, third = (live.push(number, {"own": b"?"}, 60) for _ in range(3))
        assert first is not None
        assert second is not None
        assert third is not None
        assert push(first, b"r" * 1000) == [204]
        assert push(first, b"again") == [410]
        assert push(second, b"r" * 10, 1001) == [413]
        assert push(second, b"r") == [410]
        found = {f.ticket: f for f in live.pull([first, second, third])}
        assert found == {
            first: Arrived(first, b"r" * 1000),
            second: Lost(second, "its reply is larger than the limit of 1000 bytes", True),
        }
        live.forget([third])
        assert push(third, b"late") == [410]
        with Node(where(live), identity(folder, "rome")) as other:
            fourth = live.push(number, {"own": b"?"}, 60)
            assert fourth is not None
            other.reply(node.Incoming(fourth, {}, 1000), b"in another's name")
            assert live.pull([fourth]) == []
        expired = live.push(number, {"own": b"?"}, -1)
        assert expired is not None
        assert live.pull([expired]) == [Lost(expired, "its time was up")]
        assert live.pull(["77.7"]) == [Lost("77.7", "the connection to it was lost")]
        assert not live._letters.keys() - {fourth}


def test_what_is_not_read_to_its_end_is_not_taken(live: Link, folder: Path, oslo: ssl.SSLContext) -> None:
    with Node(where(live), identity(folder, "oslo")) as site:
        [number] = live.nodes()
        ticket = live.push(number, {"own": b"?"}, 60)
        assert ticket is not None
        head = f"POST /push HTTP/1.1\r\nhost: x\r\nfedkin-session: {site._session}\r\nfedkin-ticket: {ticket}\r\n"
        with closing(dial(live, oslo)) as connection:
            connection.sendall(f"{head}content-length: 100\r\n\r\n".encode() + b"r" * 50)
        time.sleep(0.3)
        assert live.pull([ticket]) == []
        incoming = site.receive()
        assert incoming is not None
        site.reply(incoming, b"whole")
        assert live.pull([ticket]) == [Arrived(ticket, b"whole")]


def test_a_site_holds_a_few_connections_and_the_newest_stay(live: Link, folder: Path, oslo: ssl.SSLContext) -> None:
    with ExitStack() as stack:
        held = [stack.enter_context(closing(dial(live, oslo))) for _ in range(3 * door.EACH)]
        held[-1].sendall(b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert b"404" in held[-1].recv(1000)
        eventually(lambda: len(live._door._open) <= door.EACH + 1)
        assert held[0].recv(1000) == b""


def test_slow_headers_and_slow_bodies_have_their_time(
    live: Link, folder: Path, oslo: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "IDLE", 0.5)
    monkeypatch.setattr(door, "PATIENCE", 0.5)
    with closing(dial(live, oslo)) as connection:
        connection.sendall(b"POST /open HTTP/1.1\r\n")
        assert listen(connection) == b""
    with Node(where(live), identity(folder, "oslo")) as site:
        [number] = live.nodes()
        ticket = live.push(number, {"own": b"?"}, 60)
        head = f"POST /push HTTP/1.1\r\nhost: x\r\nfedkin-session: {site._session}\r\nfedkin-ticket: {ticket}\r\n"
        assert statuses(shout(live, oslo, f"{head}content-length: 100\r\n\r\n".encode())) == [408]


def test_a_broken_answer_is_sent_again(live: Link, folder: Path, oslo: ssl.SSLContext) -> None:
    """A letter that was lost on the way comes with the next question; a reply that came twice counts once."""
    with Node(where(live), identity(folder, "oslo")) as site:
        [number] = live.nodes()
        ticket = live.push(number, {"own": bytes(5_000_000)}, 60)
        assert ticket is not None
        ask = f"POST /pull HTTP/1.1\r\nhost: x\r\nfedkin-session: {site._session}\r\nfedkin-after: 0\r\n\r\n"
        with closing(dial(live, oslo)) as connection:
            connection.sendall(ask.encode())
            assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        incoming = site.receive()
        assert incoming is not None
        assert incoming.ticket == ticket
        site.reply(incoming, b"once")
        site.reply(incoming, b"twice")
        assert live.pull([ticket]) == [Arrived(ticket, b"once")]


# ---------------------------------------------------------------- servers that misbehave


@contextmanager
def pretending(context: ssl.SSLContext | None, serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """A server that treats every connection with `serve`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.1)
        stop = threading.Event()

        def talk(connection: socket.socket) -> None:
            with suppress(OSError):
                connection.settimeout(20)
                secured = connection if context is None else context.wrap_socket(connection, server_side=True)
                with closing(secured):
                    serve(secured)

        def loop() -> None:
            while not stop.is_set():
                with suppress(TimeoutError):
                    connection, _ = listener.accept()
                    threading.Thread(target=talk, args=(connection,), daemon=True).start()

        thread = threading.Thread(target=loop)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            stop.set()
            thread.join()


def answering(*answers: bytes) -> Callable[[socket.socket], None]:
    """Lets everybody in; then these words to whoever asks for a letter."""

    def serve(connection: socket.socket) -> None:
        while (asked := connection.recv(65536)).startswith(b"POST"):
            if asked.startswith(b"POST /open"):
                connection.sendall(b"HTTP/1.1 200 OK\r\nfedkin-session: 1.a\r\ncontent-length: 0\r\n\r\n")
            elif asked.startswith(b"POST /pull"):
                for words in answers:
                    connection.sendall(words)
                return
            else:
                connection.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")

    return serve


LETTER = b"fedkin-ticket: 1.1\r\nfedkin-number: 1\r\nfedkin-most: 1000\r\nfedkin-parcels: own=5\r\n"


def five(parcels: bytes) -> list[bytes]:
    return [b"HTTP/1.1 200 OK\r\n" + LETTER.replace(b"own=5", parcels) + b"content-length: 5\r\n\r\nhello"]


BOMB = gzip.compress(bytes(50 << 20))


@pytest.mark.parametrize(
    ("answers", "match"),
    [
        (
            [
                b"HTTP/1.1 200 OK\r\n" + LETTER + b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(BOMB),
                BOMB,
            ],
            "compressed",
        ),
        ([b"HTTP/1.1 200 OK\r\n" + LETTER + b"content-length: 999999999\r\n\r\n", bytes(1 << 20)], "at most 1000000"),
        ([b"HTTP/1.1 200 OK\r\n" + LETTER + b"content-length: 99999999999999999999\r\n\r\n"], "how long"),
        ([b"HTTP/1.1 200 OK\r\n" + LETTER + b"\r\n", *[bytes(1 << 20)] * 20], "how long"),
        (
            [
                b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n" + LETTER + b"\r\n",
                *[b"100000\r\n" + bytes(1 << 20) + b"\r\n"] * 20,
            ],
            "how long",
        ),
        ([b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello"], "is no number"),
        (five(b"own=9"), "has 5 bytes"),
        (five(b"../x=5"), "parcels are"),
        (five(b"own=2,own=3"), "parcels are"),
        ([five(b"own=5")[0].replace(b"ticket: 1.1", b"ticket: 1.\xe9")], "fedkin-ticket is no word"),
        ([b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n"], "HTTP status 302"),
        ([b"HTTP/1.1 403 No\r\ncontent-length: 9\r\n\r\n\x1b[31mred\r"], r"in:  \[31mred "),
        ([b"HTTP/1.1 404 No\r\ncontent-length: 0\r\n\r\n"], "is it a FedKin server"),
    ],
)
def test_what_a_site_does_not_take(answers: list[bytes], match: str) -> None:
    with pretending(None, answering(*answers)) as port, Node(f"127.0.0.1:{port}", limit=1_000_000) as site:
        with pytest.raises(FedKinError, match=match) as found:
            site.receive()
        assert "\x1b" not in str(found.value)


@pytest.mark.parametrize("session", [b"1.\xe9", b"\xff\xfe", b"1" * 1000])
def test_a_session_that_no_request_could_name_is_not_taken(session: bytes) -> None:
    """What a server says here goes back to it in every header: it must not end the site then."""

    def serve(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\nfedkin-session: " + session + b"\r\ncontent-length: 0\r\n\r\n")

    with pretending(None, serve) as port, pytest.raises(FedKinError, match="fedkin-session is no word"):
        Node(f"127.0.0.1:{port}").open()


def test_a_slow_answer_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "PATIENCE", 0.5)

    def drip(connection: socket.socket) -> None:
        answering(b"HTTP/1.1 200 OK\r\n" + LETTER + b"content-length: 5\r\n\r\n")(connection)
        for _ in range(4):
            time.sleep(0.3)
            connection.sendall(b"x")

    with pretending(None, drip) as port, Node(f"127.0.0.1:{port}") as site:
        monkeypatch.setattr(node, "TRIES", 1)
        with pytest.raises(FedKinError, match=r"slower|cannot be reached"):
            site.receive()


def test_cookies_are_not_kept() -> None:
    words = b"HTTP/1.1 204 No Content\r\nset-cookie: a=%s; max-age=999\r\n\r\n" % (b"b" * 5000)
    with pretending(None, answering(words)) as port, Node(f"127.0.0.1:{port}") as site:
        assert site.receive() is None
        assert len(site._client.cookies) == 0


MEMORY = """
import resource, sys
from fedkin.deploy.node import Node
from fedkin.errors import FedKinError
site = Node(f"127.0.0.1:{sys.argv[1]}", limit=1_000_000)
site.open()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for _ in range(5):
    try:
        site.receive()
    except FedKinError as error:
        pass
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("kind", ["gzip", "endless"])
def test_a_hostile_server_does_not_fill_a_sites_memory(kind: str) -> None:
    head = b"HTTP/1.1 200 OK\r\n" + LETTER
    if kind == "gzip":
        answers = [head + b"content-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(BOMB), BOMB]
    else:
        answers = [head + b"\r\n", *[bytes(1 << 20)] * 300]
    with pretending(None, answering(*answers)) as port:
        done = subprocess.run(
            [sys.executable, "-c", MEMORY, str(port)],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 30_000, done.stdout  # kB


# ---------------------------------------------------------------- what a server says of its disk


def test_a_full_disk_names_the_servers_own_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from fedkin.runs import start as runs
    from fedkin.runs.checkpoint import DiskFull
    from fedkin.runs.folder import SITES

    def full(*_: object) -> None:
        raise DiskFull("the disk is full")

    monkeypatch.setattr(runs, "drive", full)
    recorder = SimpleNamespace(folder=tmp_path, stopped=lambda *_: None)
    for command in (f"fedkin resume {tmp_path.name}", f"fedkin server --resume {tmp_path.name}"):
        with pytest.raises(DiskFull, match=command):
            runs.follow(None, recorder)  # type: ignore[arg-type]
        (tmp_path / SITES).write_text("[]")
