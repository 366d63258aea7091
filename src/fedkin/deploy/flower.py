"""Flower, quiet and private: no telemetry, no look for updates, no folder in the user's home, no chatter."""

from __future__ import annotations

import functools
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

from fedkin.errors import UsageError

WANTED = "1.41"


def require_flower() -> None:
    """The right Flower, or what to do."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("flwr")
    except PackageNotFoundError:
        raise UsageError("a deployment needs Flower: pip install 'fedkin[flower]'") from None
    if found.split(".")[:2] != WANTED.split("."):
        raise UsageError(f"flwr {found} is installed; this FedKin speaks to {WANTED}: pip install 'fedkin[flower]'")


def silence() -> None:
    """Before the first import of flwr: it reads these once."""
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    os.environ["FLWR_DISABLE_UPDATE_CHECK"] = "1"
    for name in ("FLWR_DATABASE", "FLWR_OIDC_ENABLED", "FLWR_ENABLE_EVENT_LOG"):  # would make it another SuperLink
        os.environ.pop(name, None)
    os.environ.setdefault("FLWR_HOME", str(Path(tempfile.gettempdir()) / f"fedkin-flwr-{getattr(os, 'getuid', int)()}"))
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    import flwr.supercore

    assert flwr.supercore
    logging.getLogger("flwr").setLevel(logging.CRITICAL)


def record(piece: bytes) -> Any:
    """A piece of a parcel as a record that Flower sends."""
    return _record_class()({"p": piece})


@functools.cache
def _record_class() -> Any:
    """Flower's ConfigRecord, made into bytes and hashed once instead of for every message it is part of."""
    from flwr.app import ConfigRecord
    from flwr.supercore.inflatable.inflatable_object import get_object_id

    def deflate(self: Any) -> bytes:
        if "made" not in self.__dict__:
            self.__dict__["made"] = ConfigRecord.deflate(self)
        made: bytes = self.__dict__["made"]
        return made

    def object_id(self: Any) -> str:
        if "named" not in self.__dict__:
            self.__dict__["named"] = get_object_id(self.deflate())
        return str(self.__dict__["named"])

    members = {"deflate": deflate, "object_id": property(object_id), "__qualname__": "ConfigRecord"}
    return type("ConfigRecord", (ConfigRecord,), members)  # by this name the other side knows what it is
