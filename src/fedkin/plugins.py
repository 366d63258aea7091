"""Files of the user's own that register methods, attacks, rules: run when asked for by name, told apart by their hash.

A plugin is code. It is only ever run because somebody gave its path; a run folder that names one is not believed."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import SourceLoader
from pathlib import Path
from typing import Any

from fedkin.config import Config
from fedkin.errors import FedKinError, UsageError, unknown


@dataclass(frozen=True)
class Plugin:
    path: str
    sha256: str
    names: tuple[str, ...]  # what it registered

    def serves(self, config: Config) -> bool:
        """Whether a run depends on it: one of its names stands somewhere in the settings."""
        keys = ("method", "task", "attack", "rule", "lr_schedule", "model", "data", "partition")
        said = [getattr(config, k) or "" for k in keys] + [str(v) for v in config.options.values()]
        return any(name in text for name in (*self.names, f"{Path(self.path).name}:") for text in said)


class _Source(SourceLoader):
    """Runs exactly the bytes that were hashed; never a cached compilation."""

    def __init__(self, path: str, content: bytes) -> None:
        self._path, self._content = path, content

    def get_filename(self, fullname: str) -> str:
        return self._path

    def get_data(self, path: str | bytes) -> bytes:
        return self._content


_loaded: dict[str, Plugin] = {}


def load(path: str | Path) -> Plugin:
    """Run a plugin file. What it raises is said with the line it came from."""
    file = Path(path)
    if file.suffix != ".py":
        raise UsageError(f"plugin {str(path)!r}: a Python file (.py) of your own")
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UsageError(f"plugin {str(path)!r} cannot be read: {error.strerror or error}") from None
    place = str(file.resolve())
    sha = hashlib.sha256(content).hexdigest()
    if place in _loaded and _loaded[place].sha256 == sha:
        return _loaded[place]
    from fedkin.models import MODELS

    before = [dict(r.items()) for r in _registries()]
    name = _module(place)
    spec = importlib.util.spec_from_loader(name, _Source(place, content), origin=place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and docstrings look a class's module up here
    try:
        spec.loader.exec_module(module)
    except FedKinError as error:
        raise UsageError(f"plugin {str(path)!r}: {error}") from None
    except Exception as error:
        raise UsageError(f"plugin {str(path)!r} cannot be used: {_where(error, place)}") from error
    MODELS.file(place, vars(module))
    now = [dict(r.items()) for r in _registries()]
    names = [n for old, new in zip(before, now, strict=True) for n in new if new[n] is not old.get(n)]
    _loaded[place] = Plugin(place, sha, tuple(names))
    return _loaded[place]


def give(word: str) -> None:
    """What --plugin says: a file to run, or FILE.py:NAME, which says too that NAME in it is a network."""
    if word.rpartition(":")[0].endswith(".py"):
        as_model(word)
    else:
        load(word)


def given() -> list[str]:
    """What to say with --plugin in another process, for all that was said in this one."""
    from fedkin.models import MODELS

    named = [f"{p.path}:{name}" for p in _loaded.values() for name in MODELS.named_in(Path(p.path).name)]
    return [*_loaded, *named]


def own_network(where: str) -> Any:
    """What a file calls by this name, `my_net.py:Net`: a network, its class or a function that makes one. The file is
    run, and registers what it registers."""
    from fedkin.models.registered import networks_in

    path, _, name = where.rpartition(":")
    if not path:
        raise UsageError(f"{where!r}: give a file and what it calls the network, my_net.py:Net")
    module = sys.modules[_module(load(path).path)]
    if not hasattr(module, name):
        raise unknown(f"name in {path}", name, networks_in(vars(module)))
    return getattr(module, name)


def names_network(word: str | None) -> bool:
    """Whether somebody means a network in a file of theirs, FILE.py:NAME."""
    return word is not None and (word.endswith(".py") or word.rpartition(":")[0].endswith(".py"))


def as_model(where: str) -> str:
    """Runs the file in FILE.py:NAME, and takes what it calls so for a network; the name under which that is a setting:
    that of the file without its folder, and that of the network."""
    from fedkin.models import MODELS

    own_network(where)
    path, _, name = where.rpartition(":")
    place, file = str(Path(path).resolve()), Path(path).name
    other = next((p.path for p in _loaded.values() if Path(p.path).name == file and p.path != place), None)
    if other is not None:
        raise UsageError(f"{where}: another file of this name was run, {other}; give one of them another name")
    MODELS.name_in(file, name)
    MODELS[f"{file}:{name}"]  # refused where it cannot serve
    return f"{file}:{name}"


def loaded() -> list[Plugin]:
    return list(_loaded.values())


def used_by(config: Config) -> list[Plugin]:
    return [p for p in _loaded.values() if p.serves(config)]


def identity_of(config: Config) -> str:
    """What a run is: its configuration, and the code of the plugins it depends on."""
    used = sorted(p.sha256 for p in used_by(config))
    plain = config.identity()
    return hashlib.sha256("\n".join([plain, *used]).encode()).hexdigest() if used else plain


def facts(config: Config) -> list[dict[str, str]]:
    """For run.json."""
    return [{"path": p.path, "sha256": p.sha256} for p in used_by(config)]


def require(run: str, recorded: Any, model: object = None) -> None:
    """Refuses to go on with a run whose plugins are not loaded, or are no longer what they were. `model`: what its
    network is called."""
    entries = recorded if isinstance(recorded, Sequence) and not isinstance(recorded, str) else []
    here = {p.sha256 for p in _loaded.values()}
    for entry in entries:
        sha = str(entry.get("sha256", "")) if isinstance(entry, Mapping) else ""
        path = str(entry.get("path", ""))[:500] if isinstance(entry, Mapping) else ""
        if sha in here:
            continue
        same_name = next((p for p in _loaded.values() if Path(p.path).name == Path(path).name), None)
        if same_name is not None:
            raise UsageError(
                f"run {run!r} cannot go on: the plugin {path} changed since (sha256 {same_name.sha256[:12]} now, "
                f"{sha[:12]} then); restore the file, or start a new run"
            )
        file, _, name = str(model).rpartition(":")
        word = f"{path}:{name}" if file == Path(path).name else path
        raise UsageError(
            f"run {run!r} uses the plugin {path}: give it again, --plugin {word} (which runs that file's code)"
        )


def _module(place: str) -> str:
    return f"fedkin_plugin_{Path(place).stem}_{hashlib.sha256(place.encode()).hexdigest()[:8]}"


def _registries() -> list[Mapping[str, Any]]:
    from fedkin.core.schedules import SCHEDULES
    from fedkin.data import PARTITIONS, SOURCES
    from fedkin.methods import METHODS
    from fedkin.models import MODELS
    from fedkin.robust import ATTACKS, RULES
    from fedkin.tasks import TASKS

    return [METHODS, TASKS, ATTACKS, RULES, SCHEDULES, MODELS, PARTITIONS, SOURCES]


def _where(error: Exception, place: str) -> str:
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == place]
    line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
    said = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{f'line {line}: ' if line else ''}{type(error).__name__}: {said}"


__all__ = [
    "Plugin",
    "as_model",
    "facts",
    "give",
    "given",
    "identity_of",
    "load",
    "loaded",
    "names_network",
    "own_network",
    "require",
    "used_by",
]
