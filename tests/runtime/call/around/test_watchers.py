"""Watchers of dicts are few: a library that is loaded again takes no second one."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest

from tilewright.options import Options
from tilewright.runtime.cpu.kernels import launcher_text
from tilewright.runtime.cpu.toolchain import built
from tilewright.runtime.objects import watching
from tilewright.runtime.store.cache import ContentStore, default_root


def test_a_library_takes_one_watcher(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[object] = []

    def add(function: ctypes.c_void_p) -> int:
        taken.append(function)
        return len(taken)

    python = SimpleNamespace(PyDict_AddWatcher=add, PyDict_Watch=lambda *_: 0)  # pyright: ignore[reportUnknownLambdaType]
    monkeypatch.setattr(ctypes, "pythonapi", python)
    monkeypatch.setattr(watching, "_watchers", [])
    monkeypatch.setattr(watching, "_made", {})
    options = Options()
    library = built([launcher_text()], (), ContentStore(default_root(options)), options)
    for _ in range(3):
        watching.attach(library)
    assert len(taken) == 1 and not watching._watchers  # it tells of nothing, and is not believed
