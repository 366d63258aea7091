"""Names for things that users add: methods, models, data sets, partitions. One decorator, one look-up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from fedkin.errors import UsageError, unknown

T = TypeVar("T")


class Registry(Mapping[str, T]):
    """A mapping from names to entries that answers a wrong name with the nearest right ones.

    >>> METHODS: Registry[type] = Registry("method")
    >>> @METHODS.register("my-method")
    ... class MyMethod: ...
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """A decorator that adds what it decorates under this name; a name that is taken is refused."""

        def add(entry: T) -> T:
            known = self._entries.get(name)
            if known is not None and getattr(known, "__qualname__", known) != getattr(entry, "__qualname__", entry):
                raise UsageError(f"{self.kind} {name!r} exists already ({known!r}); register yours under another name")
            self._entries[name] = entry
            return entry

        return add

    def sort(self) -> None:
        """What is there so far goes by its name, whichever was imported first."""
        self._entries = dict(sorted(self._entries.items()))

    def __getitem__(self, name: str) -> T:
        if name not in self._entries:
            raise unknown(self.kind, name, self._entries)
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
