"""Whether dicts hold what they held: what a native look at versions says is what a look at each name says."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import random
from collections import ChainMap, OrderedDict
from collections.abc import Callable

import pytest
from torch import nn

from tilewright.options import Options
from tilewright.runtime.call.around import held
from tilewright.runtime.call.around.held import ABSENT, Compare, Held, HeldFunction, HeldList, comparer
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


def test_a_dict_of_its_own_kind_is_read_as_it_lies() -> None:
    class Mine(dict[object, object]):
        def __getitem__(self, name: object) -> object:
            return 0

    d = Mine({"a": print})
    held = Held(d, [("a", print), ("b", ABSENT)])
    same = made(held)
    assert same() and held.still()
    d["a"] = len
    assert not same() and not held.still()
    d["a"] = print
    assert same() and held.still()
    d["b"] = 0
    assert not same() and not held.still()


def test_a_mapping_that_is_no_dict_is_left_to_python() -> None:
    assert comparer([Held(ChainMap({"a": 1}), [("a", 1)])], ()) is None


def test_the_order_of_keys() -> None:
    d: dict[object, object] = {"a": 1, "b": 2}
    held = Held(d, keys=("a", "b"))
    same = made(held)
    d["a"] = 5
    assert same() and held.still()
    d["a"] = d.pop("b")
    d["b"] = 2
    assert same() and held.still()
    del d["a"]
    assert not same() and not held.still()
    d["a"] = 1
    assert not same() and not held.still()


def test_lists() -> None:
    x: list[object] = [1.5, [2.5], "c"]
    held = HeldList(x, 3, {0: x[0], 2: x[2]})
    found = comparer([], (), [held])
    assert found is not None and found() and held.still()
    x[1] = None
    assert found() and held.still()
    for change, back in ((lambda: x.append(1), x.pop), (x.clear, lambda: x.extend([held.items[0], 0, "c"]))):
        change()
        assert not found() and not held.still()
        back()
        assert found() and held.still()


def test_what_functions_run_and_objects_own() -> None:
    def f(a: int, b: int = 2, *, c: int = 3) -> int:
        return a + b + c

    class Plain:
        pass

    x, held = Plain(), HeldFunction.of(f)
    own = vars(x)
    found = comparer([], (), (), [(x, own)], [held])
    assert found is not None and found() and held.still()
    defaults, named = f.__defaults__, f.__kwdefaults__
    f.__defaults__ = None
    assert not found() and not held.still()
    f.__defaults__ = defaults
    f.__kwdefaults__ = {"c": 3}
    assert not found() and not held.still()
    f.__kwdefaults__ = named
    assert found() and held.still()
    x.__dict__ = {}
    assert not found()
    x.__dict__ = own
    assert found()


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

    look = around._look
    seen = {look()}
    for _ in range(400):
        random.choice(_changes(m, vars(m)))()
        if random.random() < 0.7:
            seen.add(look())
            assert same() == look()
    assert seen == {True, False}
