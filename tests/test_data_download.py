"""Downloads against a server on this machine: checked by hash, unpacked by name, and nothing left behind."""

from __future__ import annotations

import hashlib
import io
import socket
import tarfile
import threading
import zipfile
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest

from fedkin.data import SOURCES, download, load, sources
from fedkin.data.download import Remote, fetch
from fedkin.errors import DataError


@pytest.fixture
def serve():
    """A function that puts a body at a path and returns the address."""
    bodies = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = bodies.get(self.path)
            self.send_response(200 if body is not None else 404)
            claimed = len(body or b"") + (10 if self.path.startswith("/short") else 0)
            self.send_header("Content-Length", str(claimed))
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()

    def put(path, body):
        bodies[path] = body
        return f"http://127.0.0.1:{server.server_port}{path}"

    yield put
    server.shutdown()
    server.server_close()
    thread.join(5)


def md5(body):
    return hashlib.md5(body, usedforsecurity=False).hexdigest()


def tar_of(files, links=()):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, body in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(body)
            tar.addfile(member, io.BytesIO(body))
        for name in links:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, "b"
            tar.addfile(member)
    return out.getvalue()


def left(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_a_file_arrives_with_progress(serve, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "CHUNK", 4)
    body, seen = b"ten bytes.", []
    fetch(Remote((serve("/f", body),), md5(body), "sub/f"), tmp_path, lambda *a: seen.append(a))
    assert (tmp_path / "sub" / "f").read_bytes() == body
    assert left(tmp_path) == ["sub/f"]
    assert seen == [(4, 10), (8, 10), (10, 10)]


def test_a_wrong_hash_is_refused_and_nothing_stays(serve, tmp_path):
    with pytest.raises(DataError, match=f"expected md5 {'0' * 32}, found {md5(b'x')}; discarded"):
        fetch(Remote((serve("/f", b"x"),), "0" * 32, "f"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_second_mirror_helps(serve, tmp_path):
    good = serve("/good", b"x")
    fetch(Remote((good + "-missing", serve("/bad", b"y"), good), md5(b"x"), "f"), tmp_path)
    assert left(tmp_path) == ["f"]


def test_a_dead_server_a_short_body_and_too_much(serve, tmp_path, monkeypatch):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{unused.getsockname()[1]}/f"
    with pytest.raises(DataError, match="download failed"):
        fetch(Remote((dead,), "", "f"), tmp_path, timeout=2)
    with pytest.raises(DataError, match="download failed"):
        fetch(Remote((serve("/short", b"x"),), md5(b"x"), "f"), tmp_path, timeout=2)
    with pytest.raises(DataError, match="not an http address"):
        fetch(Remote(("file:///etc/passwd",), "", "f"), tmp_path)
    monkeypatch.setattr(download, "MAX_BYTES", 3)
    with pytest.raises(DataError, match="more than 3 bytes"):
        fetch(Remote((serve("/f", b"four"),), md5(b"four"), "f"), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_only_expected_members_leave_an_archive(serve, tmp_path):
    root = tmp_path / "root"
    body = tar_of({"d/a": b"A", "../evil": b"E", "/tmp/evil": b"E", "d/other": b"O"})
    fetch(Remote((serve("/t", body),), md5(body), "", {"d/a": "d/a"}), root)
    assert left(tmp_path) == ["root/d/a"]
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("gzip/a.gz", b"A")
        archive.writestr("../evil", b"E")
    body = zipped.getvalue()
    fetch(Remote((serve("/z", body),), md5(body), "", {"gzip/a.gz": "E/a.gz"}), root)
    assert left(tmp_path) == ["root/E/a.gz", "root/d/a"]


BODIES = {"another": tar_of({"d/b": b"B"}), "link": tar_of({"d/b": b"B"}, links=["d/a"]), "none": b"no archive"}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)  # an archive holds the time, and names must not
def test_an_archive_without_the_file_is_refused(serve, tmp_path, body):
    with pytest.raises(DataError, match="expected a"):
        fetch(Remote((serve("/t", body),), md5(body), "", {"d/a": "d/a"}), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def cifar_at(monkeypatch):
    """Points the source cifar10 at another address for the time of a test."""

    def point(url, hash_):
        entry = SOURCES["cifar10"]
        moved = replace(entry, remotes=(replace(entry.remotes[0], urls=(url,), md5=hash_),))
        monkeypatch.setitem(sources.SOURCES._entries, "cifar10", moved)

    return point


def test_load_fetches_what_is_missing_once(serve, tmp_path, cifar_at):
    names = [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    body = tar_of({f"cifar-10-batches-bin/{name}": bytes(3073) for name in names} | {"readme.html": b"hello"})
    cifar_at(serve("/cifar", body), md5(body))
    assert load("cifar10", tmp_path).x.shape == (6, 3, 32, 32)
    assert left(tmp_path) == sorted(f"cifar-10-batches-bin/{name}" for name in names)
    cifar_at("http://127.0.0.1:1/gone", "")
    assert np.all(load("cifar10", tmp_path).y == 0)


def test_load_without_a_network_says_what_to_do(tmp_path, cifar_at):
    cifar_at("http://127.0.0.1:1/gone", "")
    with pytest.raises(DataError) as caught:
        load("cifar10", tmp_path)
    for part in ("http://127.0.0.1:1/gone", "FEDKIN_DATA", "cifar-10-batches-bin", str(tmp_path)):
        assert part in str(caught.value)
    assert list(tmp_path.iterdir()) == []
