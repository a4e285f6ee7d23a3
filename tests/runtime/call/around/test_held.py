"""Whether dicts hold what they held: what a native look at versions says is what a look at each name says."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable

import pytest
from torch import nn

from tilewright.options import Options
from tilewright.runtime.call.around import held
from tilewright.runtime.call.around.held import Compare, Held, comparer
from tilewright.runtime.call.around.surroundings import Surroundings
from tilewright.runtime.cpu.kernels import launchers
from tilewright.runtime.store.cache import ContentStore, default_root


@pytest.fixture(autouse=True, params=["versions", "names"])
def _attached(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options()
    launchers(ContentStore(default_root(options)), options)
    if request.param == "names":
        monkeypatch.setattr(held, "VERSION", 0)


def made(*dicts: Held, objects: tuple[object, ...] = ()) -> Compare:
    found = comparer(dicts, objects)
    assert found is not None
    return found


def test_what_is_replaced_removed_or_put_back() -> None:
    first, second = object(), object()
    d: dict[object, object] = {"a": first, "b": second}
    same = made(Held(d, [("a", first)]))
    assert same() and same()
    d["b"] = d["c"] = 5
    assert same() and same()
    d["a"] = second
    assert not same() and not same()
    d["a"] = first
    assert same()
    del d["a"]
    assert not same()


def test_what_comes_between_the_names_and_the_first_look() -> None:
    d: dict[object, object] = {"a": "x"}
    same = made(Held(d, [("a", "x")]))
    d["a"] = "y"
    assert not same()


def test_counted_dicts() -> None:
    hooks: OrderedDict[object, object] = OrderedDict()
    same = made(Held(hooks, [], counted=True))
    assert same()
    hooks[3] = print
    assert not same()
    hooks.popitem()
    assert same()


def test_classes_and_types() -> None:
    class One:
        def run(self) -> int:
            return 1

    class Two(One):
        pass

    x = One()
    same = made(Held(vars(One), [("run", vars(One)["run"])]), objects=(x,))
    assert same()
    kept = One.run
    One.run = lambda self: 2  # type: ignore[method-assign]
    assert not same()
    One.run = kept  # type: ignore[method-assign]
    assert same()
    x.__class__ = Two
    assert not same()


def test_a_dict_of_its_own_kind_is_left_to_python() -> None:
    class Mine(dict[object, object]):
        pass

    assert comparer([Held(Mine({"a": 1}), [("a", 1)])], ()) is None


def _changes(m: nn.Module, d: dict[str, object]) -> list[Callable[[], object]]:
    return [
        lambda: setattr(m, "size", random.randrange(3)), lambda: d.update(size=random.randrange(3)), m.train, m.eval,
        lambda: m.register_buffer("b", None), lambda: d.pop("extra", None), lambda: setattr(m, "extra", "e"),
        lambda: m.__dict__.setdefault("extra", "f"), lambda: delattr(m, "extra") if "extra" in d else None,
    ]  # fmt: skip


def test_changes_in_any_order() -> None:
    """Both looks agree after each of many changes."""
    random.seed(0)
    m = nn.Linear(2, 2)
    vars(m)["size"] = 1
    around = Surroundings(m)
    same = around._same
    assert same is not None

    def look() -> bool:
        try:
            return around._look()
        except KeyError:
            return False

    seen = {look()}
    for _ in range(400):
        random.choice(_changes(m, vars(m)))()
        if random.random() < 0.7:
            seen.add(look())
            assert same() == look()
    assert seen == {True, False}
