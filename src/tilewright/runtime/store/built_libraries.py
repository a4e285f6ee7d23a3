"""Remembers on disk which library was built for a graph's kernels, so that a later process neither schedules nor prints
them: that happens when somebody looks at them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar, overload

from tilewright.options import Options
from tilewright.runtime.cpu.toolchain import LIBRARY, toolchain
from tilewright.target import Target

from .cache import ContentStore, digest
from .code_identity import PRINTING, code_identity
from .decisions import Decisions

T = TypeVar("T")
LOG = logging.getLogger("tilewright")
FILE = "library.json"


class Later(Sequence[T]):
    """Items that are made when somebody asks for one."""

    def __init__(self, make: Callable[[], Sequence[T]]) -> None:
        self._make = make
        self._made: Sequence[T] | None = None

    def _all(self) -> Sequence[T]:
        if self._made is None:
            self._made = self._make()
        return self._made

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        return self._all()[index]

    def __len__(self) -> int:
        return len(self._all())


class BuiltLibraries:
    """Built libraries by the identities of their kernels, for one machine, compiler, set of options and version of
    ours."""

    def __init__(self, target: Target, store: ContentStore, options: Options, covers: Decisions) -> None:
        self.store = store
        self.identity = digest(
            "library", covers.identity, toolchain(target, options), code_identity(PRINTING)
        )

    def get(self, task: Sequence[str]) -> Path | None:
        """The library of these kernels, if it was built before and is complete."""
        folder = self.store.get(self._key(task))
        if folder is None:
            return None
        try:
            name = json.loads((folder / FILE).read_text(encoding="utf-8"))
            found = self.store.get(str(name))
        except (OSError, ValueError) as error:
            LOG.info("no library is taken from %s: %s", folder, error)
            return None
        return None if found is None else found / LIBRARY

    def put(self, task: Sequence[str], library: Path) -> None:
        """Store that `library`, an entry of the store, was built for these kernels."""
        self.store.put(self._key(task), {FILE: json.dumps(library.parent.name).encode()})

    def _key(self, task: Sequence[str]) -> str:
        return digest(self.identity, *task)
