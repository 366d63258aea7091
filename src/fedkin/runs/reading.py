"""Reading a file that anybody may have written."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from fedkin.errors import DataError


def read_bytes(path: Path, limit: int) -> bytes:
    """A plain file of a bounded size; a link, a device or a folder is refused."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        with open(os.open(path, flags), "rb") as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise DataError(f"{path.name} is not a plain file")
            if about.st_size > limit:
                raise DataError(f"{path.name} has {about.st_size} bytes, more than the limit of {limit}")
            return file.read(limit + 1)
    except FileNotFoundError:
        raise DataError(f"{path.name} is missing") from None
    except OSError as error:
        raise DataError(f"{path.name} cannot be read: {error.strerror or error}") from None
