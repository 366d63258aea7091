"""Which sites have had a model of a run that they were not in: one for each name, unless somebody allows another.

What a site is given may be made of the models of a few sites, by what it sends. Who may ask again and again, each time
with an update of its choice, can tell from the answers what each single one is. So the run's folder has a list, and a
name stands there from the first reply of a visit that the server uses, before anything is sent because of it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from fedkin.deploy.certificates import NAME
from fedkin.errors import DataError, UsageError
from fedkin.runs.checkpoint import replace_file, writing
from fedkin.runs.folder import LATECOMERS, read_json

FORMAT = 1
REFUSAL = "it has had its model of this run; whoever runs the server can allow it another with --again"


class Guestbook:
    """One run's list. `again`: names that may have one model more than they have had, while this server runs."""

    def __init__(self, run: Path, again: Sequence[str] = ()) -> None:
        self._path = run / LATECOMERS
        had = self._read()
        for name in again:
            if name not in had:
                known = ", ".join(sorted(had)) or "nobody"
                raise UsageError(f"--again {name}: it has had no model of this run (those that have: {known})")
        self._allowed = {name: had[name] + 1 for name in again}

    def refusal(self, name: str) -> str | None:
        """Why this site gets no model; None: it may have one."""
        return None if self._read().get(name, 0) < self._allowed.get(name, 1) else REFUSAL

    def enter(self, name: str) -> None:
        """From now on it has had one more; DataError where it may not."""
        had = self._read()
        if had.get(name, 0) >= self._allowed.get(name, 1):
            raise DataError(REFUSAL)
        whole = {"format": FORMAT, "models": {**had, name: had.get(name, 0) + 1}}
        with writing(self._path):
            replace_file(self._path, [json.dumps(whole, indent=1).encode()])

    def _read(self) -> dict[str, int]:
        if not os.path.lexists(self._path):
            return {}
        whole = read_json(self._path)
        had = whole.get("models")
        sound = isinstance(had, dict) and all(
            NAME.fullmatch(name) and type(many) is int and many > 0 for name, many in had.items()
        )
        if whole.get("format") != FORMAT or not isinstance(had, dict) or not sound:
            raise DataError(
                f"{self._path} does not say which sites have had a model, and without it they could have any number; "
                "put a sound copy in its place, or remove it if each may have one more"
            )
        return had
