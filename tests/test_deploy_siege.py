"""A server process besieged by strangers while real sites train: no round is lost, and its memory stays small."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from test_deploy_processes import Place, experiment

from fedkin.deploy.cluster import write_experiment
from fedkin.runs.folder import RunFolder

BODY = 16 << 20


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path / "place", 3)
    yield made
    made.close()


def memory(pid: int) -> int:
    """Megabytes that a process holds."""
    [line] = [x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmRSS")]
    return int(line.split()[1]) // 1024


def idle(port: int, until: Callable[[], bool]) -> None:
    """1,100 connections that say nothing, every third one after the first word of a handshake."""
    with ExitStack() as stack:
        for n in range(1100):
            with suppress(OSError):
                one = stack.enter_context(closing(socket.create_connection(("127.0.0.1", port), timeout=10)))
                if n % 3 == 0:
                    one.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32))
        while not until():
            time.sleep(0.1)


def bodies(port: int, until: Callable[[], bool]) -> None:
    """Unfinished bodies of 16 MiB, by somebody who completes his half of the handshake without a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with ExitStack() as stack:
        for _ in range(150):
            with suppress(OSError):
                plain = stack.enter_context(closing(socket.create_connection(("127.0.0.1", port), timeout=10)))
                one = context.wrap_socket(plain)
                one.sendall(b"POST /push HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % BODY)
                one.sendall(bytes(BODY - 1))
            if until():
                return


def headers(port: int, until: Callable[[], bool]) -> None:
    """Two hundred megabytes of headers, in the clear."""
    with suppress(OSError), closing(socket.create_connection(("127.0.0.1", port), timeout=10)) as one:
        one.sendall(b"POST /pull HTTP/1.1\r\n")
        for n in range(200):
            one.sendall(b"x-%d: %s\r\n" % (n, b"y" * (1 << 20)))


@pytest.mark.slow
@pytest.mark.parametrize("attack", [idle, bodies, headers])
def test_rounds_go_on(here: Place, attack: Callable[[int, Callable[[], bool]], None]) -> None:
    config = experiment("fedavg", rounds=40)
    clients = [here.client(name) for name in here.names]
    server = here.server(str(write_experiment(config, here.folder, 3)))
    server.wait_for("round 2/40", 180)
    before, most = memory(server.popen.pid), 0
    thread = threading.Thread(target=attack, args=(here.port, lambda: server.popen.poll() is not None), daemon=True)
    thread.start()
    while server.popen.poll() is None:
        with suppress(OSError, ValueError):
            most = max(most, memory(server.popen.pid))
        time.sleep(0.1)
    assert server.ended(240) == 0, server.text()[-3000:]
    assert [c.ended(60) for c in clients] == [0] * 3
    assert most - before < 150, (before, most)
    run = RunFolder.open(next((here.folder / "runs").iterdir()))
    assert run.info.status == "finished"
    assert run.path.stat().st_mode & 0o077 == 0
    assert run.table("rounds")["round"][-1] == 40
    exchanges = run.table("exchanges")
    assert exchanges["answered"] == exchanges["asked"], "a site was missed"
    assert "Traceback" not in server.text()
    thread.join(30)
