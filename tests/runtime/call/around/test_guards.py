"""What a program has read where it was traced is changed, and the next call sees that. While nothing changes, calls
take the short way."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import enum
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import tilewright

Change = Callable[[], object]
Case = tuple[Callable[..., Tensor], list[Change]]


def of_list() -> Case:
    held: list[Any] = [3.0, [4.0]]
    return lambda x: x * held[0] + held[1][0] * len(held), [
        lambda: held.__setitem__(0, 5.0), lambda: held[1].__setitem__(0, 6.0), lambda: held.append(0),
    ]  # fmt: skip


def of_dict() -> Case:
    held: dict[str, float] = {"a": 2.0, "b": 3.0}

    def program(x: Tensor) -> Tensor:
        for name, value in held.items():
            x = (x + len(name)) * value
        return x * 7 if "absent" in held else x

    return program, [
        lambda: held.update(a=5.0), lambda: held.update(a=held.pop("a")), lambda: held.update(absent=1.0),
        lambda: held.pop("b"),
    ]  # fmt: skip


def of_object() -> Case:
    class Slotted:
        __slots__ = ("deep",)

    class Plain:
        shared = 2.0

    held, slotted = Plain(), Slotted()
    slotted.deep = SimpleNamespace(z=[1.0])  # type: ignore[attr-defined]

    def program(x: Tensor) -> Tensor:
        return x * held.shared + slotted.deep.z[0] + getattr(held, "more", 0.0)  # type: ignore[attr-defined]

    return program, [
        lambda: setattr(Plain, "shared", 3.0), lambda: setattr(held, "shared", 4.0), lambda: setattr(held, "more", 1.0),
        lambda: setattr(held, "__dict__", {"shared": 9.0}), lambda: slotted.deep.z.__setitem__(0, 2.0),  # type: ignore[attr-defined]
        lambda: setattr(slotted, "deep", SimpleNamespace(z=[7.0])),
    ]  # fmt: skip


class Mode(enum.Enum):
    ONE = 1
    TWO = 2


def of_options() -> Case:
    held: dict[str, object] = {"mode": Mode.ONE, "bias": None, "act": "relu", "type": torch.float32}

    def program(x: Tensor) -> Tensor:
        x = x if held["mode"] is Mode.ONE else -x
        x = functional.relu(x) if held["act"] == "relu" else torch.tanh(x)
        return (x if held["bias"] is None else x + held["bias"]).to(held["type"])  # type: ignore[operator, call-overload]

    changes: list[dict[str, object]] = [
        {"mode": Mode.TWO},
        {"bias": 2.0},
        {"act": "tanh"},
        {"type": torch.float64},
    ]
    return program, [functools.partial(held.update, c) for c in changes]


def of_functions() -> Case:
    def helper(x: Tensor, scale: float = 2.0, *, more: float = 1.0) -> Tensor:
        return x * scale + more

    def other(x: Tensor, scale: float = 0.0, *, more: float = 0.0) -> Tensor:
        return x - scale - more

    held = {"f": functools.partial(helper, more=3.0)}
    helper.factor = 2.0  # type: ignore[attr-defined]
    return lambda x: held["f"](x) + helper(x) * helper.factor, [  # type: ignore[attr-defined]
        lambda: setattr(helper, "__defaults__", (7.0,)), lambda: held["f"].keywords.update(more=8.0),
        lambda: (helper.__kwdefaults__ or {}).update(more=9.0), lambda: setattr(helper, "factor", 5.0),
        lambda: setattr(helper, "__code__", other.__code__),
    ]  # fmt: skip


def of_itself() -> Case:
    def program(x: Tensor, scale: float = 2.0, shifts: list[float] = [1.0]) -> Tensor:  # noqa: B006
        return x * scale + shifts[0]

    _, shifts = program.__defaults__ or (0.0, [0.0])
    return program, [
        lambda: shifts.__setitem__(0, 5.0),
        lambda: setattr(program, "__defaults__", (4.0, [0.0])),
    ]


def of_metadata() -> Case:
    held = [torch.ones(3)]
    return lambda x: x * held[0].shape[0], [
        lambda: held.__setitem__(0, torch.ones(5)),
        lambda: held[0].resize_(2),
    ]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Tanh()})
        self.scales = [2.0, 3.0]
        self.config = SimpleNamespace(deep={"z": 1.0})

    def forward(self, x: Tensor) -> Tensor:
        for part in self.inner.values():
            x = part(x)
        x = x if self.inner["a"].weight.requires_grad else -x
        return x * self.scales[1] + self.config.deep["z"]


def of_module() -> Case:
    m = Scaled()
    return m, [
        lambda: m.scales.__setitem__(1, 4.0), lambda: m.config.deep.update(z=2.0),
        lambda: m.inner.update({"a": m.inner.pop("a")}), lambda: m.inner["a"].requires_grad_(False),
        lambda: m.inner["a"].register_forward_hook(lambda *given: given[2] * m.scales[0]),
        lambda: m.scales.__setitem__(0, 7.0),
    ]  # fmt: skip


CASES = (
    of_list, of_dict, of_object, of_options, of_functions, of_itself, of_metadata, of_module,
)  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_a_trace_has_read_is_changed(case: Callable[[], Case]) -> None:
    program, changes = case()
    fast = tilewright.compile(program)
    x = torch.arange(-1.0, 3.0).view(2, 2)
    with torch.no_grad():
        fast(x)
        assert (
            fast.way.unchanged()
        )  # numbers that change often become inputs of graphs, which torch must be asked for
        for change in [lambda: None, *changes]:
            change()
            for _ in range(2):
                torch.testing.assert_close(fast(x), program(x))


class Argument:
    """Equal to any other."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 1


def test_arguments_that_are_equal_and_not_the_same() -> None:
    def program(x: Tensor, given: Any) -> Tensor:
        return x * (given[0] if isinstance(given, tuple) else given.value)

    fast, x, held = tilewright.compile(program), torch.arange(3), Argument(2)
    for given in (held, held, Argument(3), (1,), (1,), (1.0,), (True,)):
        torch.testing.assert_close(fast(x, given), program(x, given))
    held.value = 5
    torch.testing.assert_close(fast(x, held), program(x, held))


def test_hooks_that_run_outside_of_what_is_compiled() -> None:
    m, ran = Scaled(), list[int]()
    m.register_forward_hook(lambda *given: ran.append(1))
    fast, x = tilewright.compile(m), torch.ones(2, 2)
    with torch.no_grad():
        for _ in range(3):
            fast(x)
    assert len(ran) == 3


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
def test_hooks_of_all_modules() -> None:
    m = Scaled()
    fast, x = tilewright.compile(m), torch.ones(2, 2)
    measure = torch.compile(m, backend="eager")  # torch warns that it does not count such hooks as eager does
    with torch.no_grad():
        first = fast(x)
        torch.testing.assert_close(fast(x), measure(x))
        hook = nn.modules.module.register_module_forward_hook(lambda *given: given[2] * 2)
        try:
            torch.testing.assert_close(fast(x), measure(x))
        finally:
            hook.remove()
        torch.testing.assert_close(fast(x), first)


def test_several_keys_watch_what_each_has_read() -> None:
    held = {"a": [2.0], "b": [3.0]}

    def program(x: Tensor, name: str) -> Tensor:
        return x * held[name][0]

    fast, x = tilewright.compile(program), torch.ones(3)
    for name in "aabb":
        torch.testing.assert_close(fast(x, name), program(x, name))
    for changed in "ab":
        held[changed][0] += 4
        for name in "abab":
            torch.testing.assert_close(fast(x, name), program(x, name))


class Either(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, first: bool) -> Tensor:
        return x * self.a if first else x * self.b


def test_frozen_weights_of_several_graphs() -> None:
    m = Either()
    fast, x = tilewright.compile(m, freeze=True), torch.ones(3)
    with torch.no_grad():
        for weight in (None, m.b, m.a, m.b):
            if weight is not None:
                weight.add_(1)
            for first in (True, False, True, False):
                torch.testing.assert_close(fast(x, first), m(x, first))


def test_attributes_of_a_tensor_that_a_call_brings() -> None:
    def program(x: Tensor) -> Tensor:
        return x * x.scale  # type: ignore[attr-defined]

    fast = tilewright.compile(program)
    for scale in (2.0, 2.0, 3.0):
        x = torch.ones(3)
        x.scale = scale  # type: ignore[attr-defined]
        torch.testing.assert_close(fast(x), program(x))
