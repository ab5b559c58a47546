"""LoRA adapters as the front knows them, and what workers call them.

A name may mean another adapter tomorrow, while requests with today's still run, or are run again after a worker died.
So workers know every adapter by a key of its own, and keep it until no request needs it.
"""

from __future__ import annotations

import itertools
from collections.abc import Set
from pathlib import Path

from moesaic.errors import UserError
from moesaic.serve.core.adapters import Adapter, load_adapter
from moesaic.serve.core.engine import Engine


class AdapterTable:
    """`engine` is the front's, whose adapters are those that new requests may name."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.paths: dict[str, str] = {}  # by key, of all that a request may still need
        self.retired: set[Adapter] = set()  # which no new request can name
        self._keys: dict[Adapter, str] = {}
        self._numbers = itertools.count(1)

    def read(self, name: str, path: str) -> tuple[str, Adapter]:
        """Read an adapter and give it a key; nobody can name it yet."""
        adapter = load_adapter(self.engine.model, path, name)
        key = self._keys[adapter] = f"{name}#{next(self._numbers)}"
        self.paths[key] = str(Path(path).resolve())
        return key, adapter

    def use(self, name: str, adapter: Adapter) -> None:
        if (before := self.engine.adapters.get(name)) is not None:
            self.retire(before)
        self.engine.adapters[name] = adapter

    def add(self, name: str, path: str) -> None:
        self.use(name, self.read(name, path)[1])

    def remove(self, name: str) -> None:
        adapter = self.engine.adapters.get(name)
        self.engine.unload_adapter(name)
        if adapter is not None:
            self.retire(adapter)

    def retire(self, adapter: Adapter) -> None:
        self.retired.add(adapter)

    def check(self, adapter: Adapter | None) -> None:
        """A request may have been made before its adapter was unloaded, and is submitted only now."""
        if adapter is not None and adapter not in self._keys:
            raise UserError("adapter", f"{adapter.name!r} has been unloaded")

    def key(self, adapter: Adapter | None) -> str | None:
        return None if adapter is None else self._keys[adapter]

    def drop(self, in_use: Set[Adapter | None]) -> list[str]:
        """Forget the retired that no request has; their keys."""
        gone = [adapter for adapter in self.retired if adapter not in in_use]
        self.retired -= set(gone)
        keys = [self._keys.pop(adapter) for adapter in gone]
        for key in keys:
            del self.paths[key]
        return keys
