"""Python tells of every change of a watched dict, or nobody relies on it."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import ctypes
import sys
from collections import OrderedDict
from collections.abc import Callable, Generator
from types import SimpleNamespace

import pytest

from tilewright.options import Options
from tilewright.runtime.call.around.held import Held, comparer
from tilewright.runtime.cpu.kernels import launchers
from tilewright.runtime.objects import watching
from tilewright.runtime.store.cache import ContentStore, default_root

Change = Callable[[dict[str, object]], object]


@pytest.fixture(autouse=True)
def _attached() -> Generator[None]:  # pyright: ignore[reportUnusedFunction]
    options = Options()
    launchers(ContentStore(default_root(options)), options)
    kept = watching._watchers[:]
    yield
    watching._watchers[:] = kept


CHANGES: dict[str, Change] = {
    "set": lambda d: d.__setitem__("a", 5),
    "deleted": lambda d: d.__delitem__("a"),
    "updated": lambda d: d.update(a=5),
    "popped": lambda d: d.pop("a"),
    "last popped": lambda d: d.popitem(),
    "cleared": lambda d: d.clear(),
    "joined": lambda d: d.__ior__({"a": 5}),
    "by a name of code": lambda d: exec("a = 5", d),
}


@pytest.mark.parametrize("kind", [dict, OrderedDict])
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("watched", [True, False])
def test_each_change_is_seen(name: str, kind: Callable[..., dict[str, object]], *, watched: bool) -> None:
    """With a watcher, where this Python has one, and without."""
    if not watched:
        watching._watchers.clear()
    first = object()
    d = kind(a=first)
    same = comparer([Held(d, [("a", first)])], ())
    assert same is not None and same() and same()
    CHANGES[name](d)
    assert not same() and not same()
    d["a"] = first
    assert same()


def test_changes_of_attributes_are_seen() -> None:
    class Plain:
        pass

    x, values = Plain(), [object() for _ in range(3)]
    vars(x)["a"] = values[0]
    same = comparer([Held(vars(x), [("a", values[0])])], ())
    assert same is not None
    for _ in range(20):  # so often that Python takes its quickest way
        for value in values:
            x.a = value  # type: ignore[attr-defined]
            assert same() is (value is values[0])


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python tells of no changes")
def test_dicts_are_watched_where_python_tells_of_all() -> None:
    """Python 3.13 does not tell of attributes that stand with their object, whoever else holds their dict."""

    class Plain:
        def __init__(self) -> None:
            self.a = 1

    given = Plain()
    given.__dict__ = {"a": 1}
    assert watching._watchers
    assert all(map(watching.watch, ({}, {"a": 1}, vars(given), globals(), OrderedDict(a=1))))
    assert watching.watch(vars(Plain())) is (sys.version_info < (3, 13))


@pytest.mark.parametrize("there", [True, False])
def test_who_hears_nothing_does_not_watch(monkeypatch: pytest.MonkeyPatch, *, there: bool) -> None:
    """Where Python has no watchers, or the trial finds that it does not tell of a change, all names are looked up."""
    told = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 0)
    python = SimpleNamespace(PyDict_AddWatcher=lambda _: 0, PyDict_Watch=lambda *_: 0) if there else object()
    monkeypatch.setattr(ctypes, "pythonapi", python)
    library = SimpleNamespace(tw_dict_changes=told, tw_dict_changes_told=lambda: 0)
    watching.attach(library)  # pyright: ignore[reportArgumentType]
    assert not watching._watchers and not watching.watch({})
