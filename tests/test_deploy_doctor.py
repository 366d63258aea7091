"""The check-up of a site, against real sockets on this machine: each mistake is found, named, and its fix said."""

from __future__ import annotations

import json
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from email.utils import formatdate
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from fedkin.cli.application import app
from fedkin.config import make_config
from fedkin.deploy import authority, doctor
from fedkin.deploy import certificates as keys
from fedkin.deploy.doctor import Step, address, examine
from fedkin.errors import UsageError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return authority.new_folder(tmp_path_factory.mktemp("doctor") / "keys", ["server.example.org"], ["siteA"])


@contextmanager
def listening(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """Somebody at a port of this machine who treats every connection with `serve`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.1)
        stop = threading.Event()

        def loop() -> None:
            while not stop.is_set():
                try:
                    connection, _ = listener.accept()
                except TimeoutError:
                    continue
                with connection:
                    connection.settimeout(5)
                    with suppress(OSError):
                        serve(connection)

        thread = threading.Thread(target=loop)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            stop.set()
            thread.join()


def secure(folder: Path, clock: float | None = 0.0) -> Callable[[socket.socket], None]:
    """A web server's first words under TLS; its clock differs by `clock` seconds, None: it does not tell the time."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.crt", folder / "server.key")

    def serve(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as secured:
            if not secured.recv(4096).startswith(b"HEAD / HTTP/1.1\r\n"):
                return
            date = "" if clock is None else f"date: {formatdate(time.time() + clock, usegmt=True)}\r\n"
            secured.sendall(f"HTTP/1.1 404 Not Found\r\n{date}\r\n".encode())

    return serve


def steps(**given: object) -> dict[str, Step]:
    return {step.name: step for step in examine(**{"wait": 2.0, **given})}  # type: ignore[arg-type]


# ---------------------------------------------------------------- the server


def test_all_is_well(folder: Path) -> None:
    with listening(secure(folder)) as port:
        found = steps(server=f"127.0.0.1:{port}", ca=str(folder / "ca.crt"), key=str(folder / "sites/siteA.key"))
    assert {name: step.state for name, step in found.items()} == dict.fromkeys(
        ["packages", "key", "site's certificate", "network", "TLS", "certificate", "clock"], "ok"
    )
    assert keys.sites(folder)["siteA"].fingerprint in found["key"].found
    assert "729 days" in found["certificate"].found
    assert "of 'siteA', valid for 399 days more" in found["site's certificate"].found


def test_wrong_authority(folder: Path, tmp_path: Path) -> None:
    other = authority.new_folder(tmp_path / "other", ["localhost"])
    with listening(secure(folder)) as port:
        found = steps(server=f"127.0.0.1:{port}", ca=str(other / "ca.crt"))
    assert found["TLS"].state == "failed"
    assert "did not sign the server's certificate" in found["TLS"].found
    assert "get ca.crt" in found["TLS"].fix
    assert "clock" not in found


@pytest.mark.parametrize("host", ["127.0.0.2", "localhost.localdomain"])
def test_wrong_host(folder: Path, monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """127.0.0.2 is this machine, too, but the certificate is not made for it; the other name is made to lead here."""
    real = socket.create_connection
    monkeypatch.setattr(socket, "create_connection", lambda to, **rest: real(("127.0.0.1", to[1]), **rest))
    with listening(secure(folder)) as port:
        found = steps(server=f"{host}:{port}", ca=str(folder / "ca.crt"))
    assert found["TLS"].state == "failed"
    assert f"not good for {host}" in found["TLS"].found
    assert "keys renew" in found["TLS"].fix


def test_expired(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(authority, "_now", lambda real=authority._now: real() - timedelta(days=40))
    old = authority.new_folder(tmp_path / "old", ["localhost"], ["siteA"], days=30)
    soon = authority.new_folder(tmp_path / "soon", ["localhost"], ["siteA"], days=50)
    monkeypatch.undo()
    own = {
        name: steps(key=str(f / "sites/siteA.key"), ca=str(f / "ca.crt"))["site's certificate"]
        for name, f in (("old", old), ("soon", soon))
    }
    assert (own["old"].state, own["soon"].state) == ("failed", "warning")
    assert "keys sign" in own["old"].fix
    with listening(secure(old)) as port:
        found = steps(server=f"127.0.0.1:{port}", ca=str(old / "ca.crt"))
    assert found["TLS"].state == "failed"
    assert "ran out" in found["TLS"].found
    with listening(secure(soon)) as port:
        found = steps(server=f"127.0.0.1:{port}", ca=str(soon / "ca.crt"))
    assert found["certificate"].state == "warning"
    assert "valid for 9 days more" in found["certificate"].found


@pytest.mark.parametrize("words", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"SSH-2.0-OpenSSH\r\n", b""])
def test_no_tls(folder: Path, words: bytes) -> None:
    with listening(lambda c: c.sendall(words)) as port:
        found = steps(server=f"127.0.0.1:{port}", ca=str(folder / "ca.crt"))
    assert found["network"].state == "ok"
    assert found["TLS"].state == "failed"
    assert "does not speak TLS" in found["TLS"].found


def test_silence(folder: Path) -> None:
    with listening(lambda c: (time.sleep(0.6), None)[1]) as port:
        found = steps(server=f"127.0.0.1:{port}", ca=str(folder / "ca.crt"), wait=0.3)
    assert found["TLS"].state == "failed"
    assert "no answer to the TLS greeting" in found["TLS"].found


def test_closed_port(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    found = steps(server=f"127.0.0.1:{port}", ca=str(folder / "ca.crt"))
    assert found["network"].state == "failed"
    assert "refuses" in found["network"].found
    assert "fedkin server" in found["network"].fix
    assert "TLS" not in found


def test_no_such_host() -> None:
    found = steps(server="no-such-host.invalid:9092")
    assert found["network"].state == "failed"
    assert "nobody knows" in found["network"].found


@pytest.mark.parametrize("content", [b"", b"nonsense", None])
def test_the_authoritys_file_is_no_certificate(folder: Path, tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "ca.crt"
    if content is not None:
        path.write_bytes(content)
    with listening(secure(folder)) as port:
        found = steps(server=f"127.0.0.1:{port}", ca=str(path))
    assert found["TLS"].state == "failed"
    assert "is no certificate" in found["TLS"].found


@pytest.mark.parametrize(
    ("clock", "state", "words"),
    [
        (0.0, "ok", "as the server's"),
        (-100.0, "ok", "ahead"),
        (-400.0, "warning", "ahead"),
        (250.0, "ok", "behind"),
        (400.0, "warning", "behind"),
        (None, "skipped", "does not tell"),
    ],
)
def test_clock(folder: Path, clock: float | None, state: str, words: str) -> None:
    with listening(secure(folder, clock)) as port:
        files = {"ca": str(folder / "ca.crt"), "key": str(folder / "sites/siteA.key")}
        found = steps(server=f"127.0.0.1:{port}", **files)["clock"]
    assert found.state == state
    assert words in found.found


def test_joining_a_real_server(folder: Path, tmp_path: Path) -> None:
    from fedkin.deploy.link import Link

    request = authority.new_site(tmp_path, "stranger")
    authority.sign(folder, request)
    shutil.copy(folder / "sites" / "stranger.crt", tmp_path)
    authority.revoke(folder, "stranger")
    link = Link(keys=folder)
    there = {"server": link.start(), "ca": str(folder / "ca.crt"), "join": True}
    try:
        for _ in range(2):  # leaving at once leaves room for the next
            known = steps(**there, key=str(folder / "sites/siteA.key"))
            assert (known["joining"].state, known["clock"].state) == ("ok", "ok")
        stranger = steps(**there, key=str(tmp_path / "stranger.key"))["joining"]
        assert stranger.state == "failed"
        assert "not on the server's list" in stranger.found
        assert "keys sign" in stranger.fix
        without = steps(**there)
        assert without["joining"].state == "skipped"
        assert "clock" not in without  # a stranger is not told the time
    finally:
        link.stop()


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:0", "host:65536", "host:x", "http://host:1"])
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="HOST:PORT"):
        address(text)


def test_addresses() -> None:
    assert address("a.example:9092") == ("a.example", 9092)
    assert address("[::1]:9092") == ("::1", 9092)


# ---------------------------------------------------------------- this machine


def test_a_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "httpx":
            raise metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(doctor, "version", version)
    step = steps()["packages"]
    assert step.state == "failed"
    assert "httpx is not installed" in step.found
    assert step.fix == "pip install 'fedkin[deploy]'"


def test_a_key_that_others_can_read(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "siteA.key"
    path.write_bytes((folder / "sites/siteA.key").read_bytes())
    path.chmod(0o644)
    found = steps(key=str(path))["key"]
    assert found.state == "failed"
    assert "chmod 600" in found.found


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path / "siteA.npz"
    np.savez(path, x=rng.integers(0, 256, (30, 16, 16, 3)).astype(np.uint8), y=np.arange(30) % 3 * 5)
    return path


def test_data_that_fit(data: Path) -> None:
    found = steps(data=str(data), config=make_config({"model": "resnet18-cifar"}))
    assert {s.state for s in found.values()} == {"ok"}
    assert found["data"].found == "30 samples of shape (3, 16, 16) (uint8)"
    assert found["classes"].found == "0: 10, 5: 10, 10: 10"
    assert found["model"].found.startswith("resnet18-cifar takes them")
    assert steps(data=str(data))["model"].found.startswith("cnn-512 takes them")


@pytest.mark.parametrize(
    ("settings", "match"),
    [({"model": "fasttext"}, "needs text"), ({"model": "cnn-51"}, "did you mean"), ({"head": "hed"}, "mean 'head'")],
)
def test_a_model_that_does_not_fit(data: Path, settings: dict[str, str], match: str) -> None:
    found = steps(data=str(data), config=make_config(settings))
    assert found["model"].state == "failed"
    assert match in found["model"].found


@pytest.mark.parametrize(
    ("arrays", "match"),
    [
        ({"x": np.zeros((3, 2))}, "expected an array 'y'"),
        ({"x": np.zeros((3, 2)), "y": np.zeros(2)}, "3 samples, but labels"),
        ({"x": np.full((3, 2), np.nan), "y": np.zeros(3)}, "not finite"),
        ({"x": np.zeros((0, 2)), "y": np.zeros(0)}, "no samples"),
        ({"x": np.zeros((3, 2)), "y": np.array([0.5, 1, 2])}, "is not a class"),
        ({"x": np.array([{}]), "y": np.zeros(1)}, "plain arrays"),
    ],
)
def test_data_that_are_wrong(tmp_path: Path, arrays: dict[str, np.ndarray], match: str) -> None:  # type: ignore[type-arg]
    np.savez(tmp_path / "a.npz", **arrays)  # type: ignore[arg-type]
    found = steps(data=str(tmp_path / "a.npz"))
    assert found["data"].state == "failed"
    assert match in found["data"].found
    assert "model" not in found


def test_one_class_only(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((3, 2)), y=np.zeros(3))
    assert steps(data=str(tmp_path / "a.npz"))["classes"].state == "warning"


# ---------------------------------------------------------------- the command


def test_command(folder: Path, data: Path, tmp_path: Path) -> None:
    (tmp_path / "experiment.toml").write_text('model = "mlp"\n')
    config = str(tmp_path / "experiment.toml")
    files = ["--data", str(data), "--key", str(folder / "sites/siteA.key"), "--config", config]

    def fedkin(*words: str, code: int) -> str:
        outcome = CliRunner().invoke(app, ["doctor", *words])
        assert outcome.exit_code == code, outcome.output
        return outcome.stdout

    with listening(secure(folder)) as port:
        there = ["--server", f"127.0.0.1:{port}", "--ca", str(folder / "ca.crt")]
        assert "This site is ready." in fedkin(*files, *there, code=0)
        shown = json.loads(fedkin(*files, *there, "--json", code=0))
        assert shown["ready"]
        assert [s["name"] for s in shown["steps"]] == [
            "packages",
            "data",
            "classes",
            "model",
            "key",
            "site's certificate",
            "network",
            "TLS",
            "certificate",
            "clock",
        ]
    shown_now = fedkin(*files, *there, code=1)
    assert "failed   network" in shown_now
    assert "fix: is `fedkin server` running" in shown_now
    assert not json.loads(fedkin(*files, *there, "--json", code=1))["ready"]
    fedkin("--insecure", code=2)
    fedkin("--server", "nowhere", code=2)
