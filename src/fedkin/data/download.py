"""Fetching published files: hash first, unpack second, and nothing half-done left behind."""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import IO

from fedkin.errors import DataError

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all (0 where the server does not say)."""

CHUNK = 1 << 20
MAX_BYTES = 2 << 30


@dataclass(frozen=True)
class Remote:
    """One published file: where it lies (mirrors in order), its hash, and where its content belongs.

    ``members`` names what is taken out of an archive and where it goes; everything else in it stays packed. Without
    members the file itself is kept as ``target``.
    """

    urls: tuple[str, ...]
    md5: str
    target: str = ""
    members: Mapping[str, str] = field(default_factory=dict)


def fetch(remote: Remote, root: Path, progress: Progress | None = None, timeout: float = 30.0) -> None:
    """Brings one remote file under ``root``, from the first mirror that answers."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=root) as folder:
            archive = Path(folder) / "file"
            _first_that_answers(remote, archive, progress, timeout)
            for packed, target in (_unpack(archive, remote, Path(folder)) or {archive: remote.target}).items():
                (root / target).parent.mkdir(parents=True, exist_ok=True)
                os.replace(packed, root / target)
    except OSError as error:
        raise DataError(f"{root}: cannot be written ({error})") from error


def _first_that_answers(remote: Remote, path: Path, progress: Progress | None, timeout: float) -> None:
    failures = []
    for url in remote.urls:
        try:
            digest = _stream(url, path, progress, timeout)
        except (urllib.error.URLError, HTTPException, TimeoutError, ConnectionError, ValueError) as error:
            failures.append(f"{url}: {getattr(error, 'reason', error)}")
            continue
        if digest == remote.md5:
            return
        failures.append(f"{url}: expected md5 {remote.md5}, found {digest}; discarded")
    raise DataError("download failed: " + "; ".join(failures))


def _stream(url: str, path: Path, progress: Progress | None, timeout: float) -> str:
    """Writes the body of ``url`` to ``path`` and returns its md5 (the hash these data sets are published with)."""
    if not url.startswith(("https://", "http://")):
        raise ValueError("not an http address")
    digest, done = hashlib.md5(usedforsecurity=False), 0
    with urllib.request.urlopen(url, timeout=timeout) as answer, path.open("wb") as out:
        total = int(answer.headers.get("Content-Length") or 0)
        while chunk := answer.read(CHUNK):
            done += len(chunk)
            if done > MAX_BYTES:
                raise ValueError(f"more than {MAX_BYTES} bytes")
            digest.update(chunk)
            out.write(chunk)
            if progress is not None:
                progress(done, total)
    if total and done < total:
        raise ValueError(f"expected {total} bytes, found {done}")
    return digest.hexdigest()


def _unpack(archive: Path, remote: Remote, folder: Path) -> dict[Path, str]:
    """Takes the expected members out, under names of our own, so that no name in the archive ever becomes a path."""
    if not remote.members:
        return {}
    unpacked = {}
    with ExitStack() as stack:
        opener = _zip_members(archive, stack) if zipfile.is_zipfile(archive) else _tar_members(archive, stack)
        for number, (member, target) in enumerate(remote.members.items()):
            path = folder / f"member-{number}"
            try:
                with opener(member) as source, path.open("wb") as out:
                    shutil.copyfileobj(source, out)
            except (KeyError, tarfile.TarError, zipfile.BadZipFile) as error:
                raise DataError(f"{remote.urls[0]}: expected a file {member!r} inside, found: {error}") from error
            unpacked[path] = target
    return unpacked


def _zip_members(archive: Path, stack: ExitStack) -> Callable[[str], IO[bytes]]:
    return stack.enter_context(zipfile.ZipFile(archive)).open


def _tar_members(archive: Path, stack: ExitStack) -> Callable[[str], IO[bytes]]:
    try:
        tar = stack.enter_context(tarfile.open(archive))  # noqa: SIM115 - the stack closes it
    except tarfile.TarError as error:
        raise DataError(f"expected a tar or zip archive, found: {error}") from error

    def open_member(name: str) -> IO[bytes]:
        member = tar.getmember(name)
        stream = tar.extractfile(member) if member.isreg() else None
        if stream is None:
            raise KeyError(f"{name!r} is not a plain file")
        return stream

    return open_member
