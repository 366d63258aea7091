"""All runs in a folder: listed by their run.json alone, found by name or by what they are, compared."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from fedkin import plugins
from fedkin.config import LATER, Config
from fedkin.errors import DataError, UsageError
from fedkin.runs.folder import NAME, RunFolder, RunInfo, check_name

MOST_ENTRIES = 100_000


def runs_folder(given: str | Path | None = None) -> Path:
    """Where runs are kept: as given, else FEDKIN_RUNS, else ./runs."""
    return Path(given or os.environ.get("FEDKIN_RUNS") or "runs")


@dataclass(frozen=True)
class Broken:
    """Something among the runs that is none, or no longer, or not yet."""

    name: str
    reason: str


class Catalogue:
    """The runs in a folder (as given, else FEDKIN_RUNS, else ./runs): `path` is that folder.

    Only the run.json of each is read: hundreds in a moment."""

    def __init__(self, runs_dir: str | Path | None = None) -> None:
        self.path = runs_folder(runs_dir)

    def entries(self) -> list[RunInfo | Broken]:
        """Every run, oldest first, then what is no run. Never raises because of what it finds."""
        try:
            with os.scandir(self.path) as found:
                items = [(e.name, e.is_symlink(), e.is_dir(follow_symlinks=False)) for e in found][:MOST_ENTRIES]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise DataError(f"{self.path} cannot be listed: {error.strerror or error}") from None
        runs: list[RunInfo] = []
        broken: list[Broken] = []
        base = self.path.resolve()
        for name, link, folder in sorted(items):
            if link or folder:
                entry = _entry(base, name, link)
                (runs if isinstance(entry, RunInfo) else broken).append(entry)  # type: ignore[arg-type]
        return [*sorted(runs, key=lambda r: (r.created, r.id)), *broken]

    def runs(self) -> list[RunInfo]:
        """What the run.json of every run says, the oldest first: `id`, `status`, `method`, `accuracy`, ..."""
        return [e for e in self.entries() if isinstance(e, RunInfo)]

    def find(self, name: str) -> RunFolder:
        """By name, by the beginning of one if only one run has it, or "last"."""
        check_name(name)
        exact = self.path / name
        if exact.is_dir() and not exact.is_symlink():
            return RunFolder.open(exact)
        runs = self.runs()
        if name == "last":
            if not runs:
                raise UsageError(f"no runs in {self.path} yet: start one with fedkin run, or give --runs-dir")
            return RunFolder(runs[-1])
        found = [r for r in runs if r.id.startswith(name)]
        if len(found) == 1:
            return RunFolder(found[0])
        if found:
            listed = ", ".join(r.id for r in found[:8])
            raise UsageError(f"run {name!r}: {len(found)} runs begin like this: {listed}{' ...' * (len(found) > 8)}")
        if not runs:
            raise UsageError(f"unknown run {name!r}: there are no runs in {self.path}; give --runs-dir")
        raise _nearest(name, runs)

    def locate(self, word: str) -> RunFolder:
        """`find`, or a path to the folder: for people on the command line, never for names from elsewhere."""
        if os.sep not in word:
            return self.find(word)
        if not Path(word).is_dir():
            raise UsageError(f"run {word!r} is not there: give the path of a run's folder, or a run's name")
        return RunFolder.open(word)


def _entry(base: Path, name: str, link: bool) -> RunInfo | Broken:
    if link:
        return Broken(name, "a link, not a folder")
    if not NAME.fullmatch(name):
        return Broken(name, "not a name that runs have")
    try:
        return RunInfo.read(base / name)
    except (DataError, OSError) as error:
        return Broken(name, str(error))


def _nearest(name: str, runs: list[RunInfo]) -> UsageError:
    """Like `unknown`, but people type the beginning of a name, and a list of hundreds helps nobody."""
    begins = {r.id[: len(name)].lower(): r.id for r in runs}  # of those that begin alike, the newest
    near = get_close_matches(name.lower(), list(begins), n=3, cutoff=0.6)
    hint = f"did you mean {' or '.join(repr(begins[n]) for n in near)}?" if near else f"the newest is {runs[-1].id!r};"
    return UsageError(f"unknown run {name!r}: {hint} fedkin runs lists all {len(runs)}")


class Past:
    """Runs that are there already, by what they are. One that was given Python objects is nobody else's."""

    def __init__(self, runs_dir: str | Path | None) -> None:
        self._catalogue = Catalogue(runs_dir)
        self._known: dict[str, list[RunInfo]] = {}
        for info in self._catalogue.runs():
            self._known.setdefault(info.identity, []).append(info)
        self._before = {info.id for found in self._known.values() for info in found}

    def finished(self, config: Config) -> RunInfo | None:
        """The newest finished run of exactly this, unless files it was trained on have changed since. One that a
        listener ended is not what its settings say."""
        done = [i for i in self._of(config) if i.status == "finished" and not i.cut_short]
        return next((i for i in reversed(done) if not _changed_since(config, i)), None)

    def unfinished(self, config: Config, halted: bool) -> RunInfo | None:
        """The one of those that stopped that came furthest; `halted`: also of those that a listener ended."""
        found = [i for i in self._of(config) if i.status in ("interrupted", "failed") or (halted and i.cut_short)]
        left = [i for i in found if not _changed_since(config, i)]
        return max(left, key=lambda i: i.rounds_done, default=None)

    def busy(self, config: Config) -> RunInfo | None:
        return next((i for i in self._of(config) if i.status == "running"), None)

    def newest(self, config: Config) -> RunInfo | None:
        """The folder that was made for it since."""
        identity = plugins.identity_of(config)
        found = [i for i in self._catalogue.runs() if i.identity == identity and i.id not in self._before]
        return found[-1] if found else None

    def _of(self, config: Config) -> list[RunInfo]:
        found = [i for same in _spellings(config) for i in self._known.get(plugins.identity_of(same), [])]
        same = (i for i in found if not i.objects and _same_place(config, i))
        return sorted(same, key=lambda i: (i.created, i.id))


def _spellings(config: Config) -> list[Config]:
    """The same run, its method's own evaluation point named or left to the method."""
    from fedkin.methods import METHODS  # which needs torch, and listing does without

    own = METHODS[config.method].eval_point
    return [replace(config, eval_point=p) for p in ("auto", own)] if config.eval_point in ("auto", own) else [config]


def _same_place(config: Config, info: RunInfo) -> bool:
    """Data in files: the same files, wherever the command is given."""
    here = Path(config.data)
    return not here.exists() or str(here.resolve()) == info.given.get("data", str(here.resolve()))


def _changed_since(config: Config, info: RunInfo) -> bool:
    """Whether the user's own files are newer than the run."""
    here = Path(config.data)
    if not here.exists():
        return False
    try:
        begun = datetime.fromisoformat(info.created).timestamp()
        files = [here, *here.iterdir()] if here.is_dir() else [here]
        return max(f.stat().st_mtime for f in files) > begun + 1
    except (OSError, ValueError):
        return True


def diff(a: RunInfo, b: RunInfo) -> dict[str, dict[str, tuple[Any, Any]]]:
    """What differs between two runs: in settings, in the environment, and in what came out."""

    def differing(one: Mapping[str, Any], two: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        keys = list(dict.fromkeys([*one, *two]))
        return {k: (one.get(k), two.get(k)) for k in keys if one.get(k) != two.get(k)}

    def settings(info: RunInfo) -> dict[str, Any]:
        flat = {k: v for k, v in {**LATER, **info.config}.items() if k not in ("options", "runs_dir")}
        return {**flat, **{f"options.{k}": v for k, v in info.options.items()}}

    def outcome(info: RunInfo) -> dict[str, Any]:
        found = info.result or {}
        return {
            "status": info.status,
            "rounds_done": info.rounds_done,
            **{f"accuracy.{k}": v for k, v in info.accuracy.items()},
            **{k: found.get(k) for k in ("bytes", "seconds", "wall", "diverged", "removed", "detection") if k in found},
        }

    def about(info: RunInfo) -> dict[str, Any]:
        git = info.environment.get("git")
        kept = {k: v for k, v in info.environment.items() if k != "git"}
        git = {f"git.{k}": v for k, v in git.items()} if isinstance(git, dict) else {}
        return {**kept, **git, "split_hash": info.prepared.get("split_hash")}

    return {
        "config": differing(settings(a), settings(b)),
        "environment": differing(about(a), about(b)),
        "result": differing(outcome(a), outcome(b)),
    }
