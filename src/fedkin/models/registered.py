"""Networks by name: FedKin's own, those that users register, and those that stand in a file of theirs, FILE.py:NAME."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedkin.errors import UsageError, unknown
from fedkin.models.inputs import one_tensor
from fedkin.models.own import Given, first_network
from fedkin.parts import Part
from fedkin.registry import Registry

Shape = tuple[int, ...]
KNOWN = ("shape", "classes", "vocabulary")
"""What a user's class or function is told of the data if it has an argument of that name."""


@dataclass(frozen=True)
class ModelEntry:
    """How to build one network for a sample shape, a number of classes and (text only) a vocabulary.

    For networks that users bring: `given`, the network itself or what makes one for such data, `called` so by them."""

    make: Callable[[Shape, int, int], nn.Module]
    about: str
    paper: str
    given: Callable[[Shape, int, int], Given] | None = None
    called: str = ""


@dataclass(frozen=True)
class _File:
    """A file that was run: its names, and which of these the person at this machine said are networks."""

    place: str
    names: Mapping[str, Any]
    named: set[str] = field(default_factory=set)


class Networks(Registry[ModelEntry]):
    """A registry that takes a user's class, or a function that makes a network, as it is, and that finds networks in
    the files that were run, which it does not list.

    Names come from strangers too (invitations, model files, run folders), so a file's own functions are called only
    where the file registers them, or where the person at this machine said that they are networks."""

    def __init__(self) -> None:
        super().__init__("model")
        self._files: dict[str, _File] = {}
        self._registered: list[Any] = []

    def register(self, name: str) -> Callable[[Any], Any]:
        """A decorator that adds a `ModelEntry`, an nn.Module class, or a function that makes a network."""
        add = super().register(name)

        def checked(given: Any) -> Any:
            if isinstance(given, ModelEntry):
                return add(given)
            if isinstance(given, nn.Module):
                kind = type(given).__name__
                raise UsageError(
                    f"model {name!r}: register what makes the network, fedkin.MODELS.register({name!r})({kind}), and "
                    f"not a {kind} that is made already, with which all runs would begin"
                )
            entry, known = _entry(f"model {name!r}", given), self._entries.get(name)
            self._registered.append(given)
            if known is not None and known.called == entry.called:  # its file was run before
                self._entries[name] = entry
            else:
                add(entry)
            return given

        return checked

    def file(self, path: str, names: Mapping[str, Any]) -> None:
        """A file that was run: the networks that it registers are found as FILE.py:NAME, too, from now on."""
        known = self._files.get(PurePath(path).name)
        named = known.named if known is not None and known.place == path else set()
        self._files[PurePath(path).name] = _File(path, names, named)

    def name_in(self, file: str, name: str) -> None:
        """The person at this machine says that what a file calls so is a network."""
        self._files[file].named.add(name)

    def named_in(self, file: str) -> list[str]:
        """What they said so of."""
        return sorted(self._files[file].named) if file in self._files else []

    def __getitem__(self, name: str) -> ModelEntry:
        found = self._in_file(name)
        return super().__getitem__(name) if found is None else _entry(f"model {name!r}", found)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or self._in_file(name, strict=False) is not None

    def _in_file(self, name: object, strict: bool = True) -> Any:
        file, _, inside = name.rpartition(":") if isinstance(name, str) else ("", "", "")
        if not file.endswith(".py"):
            return None
        known = self._files.get(file)
        if known is not None and inside in known.names:
            found = known.names[inside]
            if inside in known.named or self._registers(known, found):
                return found
        if not strict:
            return None
        if known is None:
            raise UsageError(
                f"model {name!r} stands in a file of yours, which is only run where you name it: --plugin {name} "
                "(from Python, give the network itself)"
            )
        if inside not in known.names:
            raise unknown(f"name in {file}", inside, networks_in(known.names))
        raise UsageError(
            f"model {name!r}: nobody at this machine said that {inside!r} in {file} is a network, and what else is in "
            f"a file is not called by its name: say so with --plugin {name}, or register it in the file, "
            '@fedkin.MODELS.register("NAME")'
        )

    def _registers(self, file: _File, found: Any) -> bool:
        return getattr(found, "__module__", None) == file.names.get("__name__") and any(
            found is given for given in self._registered
        )


def networks_in(names: Mapping[str, Any]) -> list[str]:
    """What a file defines that may be a network."""
    own = names.get("__name__", "")
    return [
        n
        for n, v in names.items()
        if isinstance(v, nn.Module) or (callable(v) and getattr(v, "__module__", "") == own and not n.startswith("_"))
    ]


def build(name: str, shape: Shape, classes: int, vocabulary: int = 0, seed: int = 0) -> nn.Module:
    """The named network, its weights drawn from `seed` alone (the global generator is left as it was)."""
    return begun(MODELS[name], shape, classes, vocabulary, seed)[0]


def begun(
    entry: ModelEntry,
    shape: Shape,
    classes: int,
    vocabulary: int,
    seed: int,
    init: Literal["seed", "given"] = "seed",
    parts: Sequence[Part] = (),
    example: Tensor | None = None,
) -> tuple[nn.Module, str | None]:
    """The network that a run starts with, and what a user should know about its first weights (see `first_network`)."""
    if entry.given is not None:
        return first_network(entry.given(shape, classes, vocabulary), seed, init, parts, example)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = entry.make(shape, classes, vocabulary)
    # an entry of a user's may give its scores in a tuple or a mapping
    return network if type(network).__module__.startswith("fedkin.models.") else one_tensor(network), None


def _called(given: Any) -> str:
    return str(getattr(given, "__qualname__", getattr(given, "__name__", type(given).__name__)))


def _entry(what: str, given: Any) -> ModelEntry:
    """What is known of a user's network; UsageError where it cannot serve."""
    about = (inspect.getdoc(given) or "").partition("\n")[0] if not isinstance(given, nn.Module) else ""
    if isinstance(given, ModelEntry):
        return given
    if isinstance(given, nn.Module):
        return ModelEntry(lambda *_: given, about, "your own", lambda *_: given)
    if not callable(given) or (isinstance(given, type) and not issubclass(given, nn.Module)):
        said = f"the class {given.__name__}" if isinstance(given, type) else repr(given)
        raise UsageError(f"{what} is {said}: give an nn.Module class, or a function that makes a network")
    asked = _asked(what, given)

    def make(shape: Shape, classes: int, vocabulary: int) -> nn.Module:
        known = dict(zip(KNOWN, (shape, classes, vocabulary), strict=True))
        network = given(**{name: known[name] for name in asked})
        if not isinstance(network, nn.Module):
            raise UsageError(f"{what}: {_called(given)} made a {type(network).__name__}, not an nn.Module")
        return network

    def of_data(shape: Shape, classes: int, vocabulary: int) -> Given:
        def drawn() -> nn.Module:
            return make(shape, classes, vocabulary)

        drawn.__name__ = _called(given)
        return drawn

    return ModelEntry(make, about, "your own", of_data, _called(given))


def _asked(what: str, given: Callable[..., Any]) -> list[str]:
    """Which of the known arguments it takes; all others must have a default."""
    try:
        takes = inspect.signature(given).parameters.values()
    except (TypeError, ValueError):
        return []
    named = [p for p in takes if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    missing = [p.name for p in named if p.default is p.empty and (p.name not in KNOWN or p.kind is p.POSITIONAL_ONLY)]
    if missing:
        raise UsageError(
            f"{what}: {_called(given)} needs {', '.join(missing)}, and FedKin can tell a network {', '.join(KNOWN)} by "
            f"these names and nothing else: give the others defaults, or a function, lambda classes: "
            f"{_called(given)}(...)"
        )
    return [p.name for p in named if p.name in KNOWN]


MODELS = Networks()
"""The networks that FedKin knows by name; `fedkin models` lists them."""
