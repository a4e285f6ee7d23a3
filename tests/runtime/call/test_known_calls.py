"""Calls like those before them are one native function: whatever changes between two of them, results are those that
the program itself gives."""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tilewright
from tilewright.errors import UnsupportedError
from tilewright.runtime.call.model import CompiledModel


@pytest.fixture(autouse=True)
def _inference() -> Generator[None]:  # pyright: ignore[reportUnusedFunction]
    with torch.no_grad():
        yield


class Base(nn.Module):
    """Its forward method is inherited."""

    scale = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.size = 3
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) * self.size + self.scale


def model_of(fast: Callable[..., object]) -> CompiledModel:
    """What holds the native functions."""
    found = vars(fast).get("_model", fast)
    assert isinstance(found, CompiledModel)
    return found


def looks_of(fast: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets longer with each call that no native function serves."""
    model, looks = model_of(fast), list[int]()
    plain = model._look_up

    def look_up(*given: Any) -> object:
        looks.append(0)
        return plain(*given)

    monkeypatch.setattr(model, "_look_up", look_up)
    return looks


def made_known(fast: Callable[..., object], *args: object) -> None:
    for _ in range(5):
        fast(*args)
    assert model_of(fast)._calls


def _other_dict(m: nn.Module, **other: object) -> None:
    m.__dict__ = {**vars(m), **other}


def _other_weight(m: Base) -> dict[str, object]:
    return {"_parameters": {"weight": nn.Parameter(torch.ones(4, 4)), "bias": m.first.bias}}


def _hide(m: nn.Module, name: str, value: object) -> None:
    setattr(type(m), name, value)


def _as_buffer(m: Base) -> None:
    del m.first.weight
    m.first.register_buffer("weight", torch.ones(4, 4))


def _without_memory() -> Tensor:
    return torch._efficientzerotensor((4, 4))


CHANGES: dict[str, Callable[[Base], object]] = {
    "moved": lambda m: setattr(m.first.weight, "data", torch.ones(4, 4)),
    "transposed": lambda m: setattr(m.first.weight, "data", m.first.weight.data.t()),
    "expanded": lambda m: setattr(m.first.weight, "data", torch.arange(4.0).expand(4, 4)),
    "negated": lambda m: setattr(m.first.weight, "data", torch._neg_view(m.first.weight.data)),
    "negated, with gaps": lambda m: setattr(
        m.first.weight, "data", torch.complex(m.first.weight.data, torch.ones(4, 4)).conj().imag
    ),
    "no memory": lambda m: setattr(m.first.weight, "data", _without_memory()),
    "written": lambda m: m.first.weight.mul_(2),
    "loaded": lambda m: m.load_state_dict({k: t + 1 for k, t in m.state_dict().items()}, assign=True),
    "replaced": lambda m: setattr(m.first, "weight", nn.Parameter(torch.ones(4, 4), requires_grad=False)),
    "a buffer": _as_buffer,
    "other parameters": lambda m: setattr(m.first, "_parameters", _other_weight(m)["_parameters"]),
    "other attributes": lambda m: _other_dict(m, size=7),
    "other attributes of a part": lambda m: _other_dict(m.first, **_other_weight(m)),
    "hidden method": lambda m: _hide(m, "forward", lambda self, x: x * self.size),
    "own method": lambda m: setattr(m, "forward", lambda x: x - 1),
    "other class": lambda m: setattr(m.first, "__class__", type("Less", (nn.Linear,), {"forward": lambda s, x: x - 3})),
    "attribute": lambda m: setattr(m, "size", 4),
    "class attribute": lambda m: setattr(m, "scale", 5.0),
    "hook": lambda m: m.first.register_forward_hook(lambda *given: given[2] + 5),
}  # fmt: skip


@pytest.mark.parametrize("freeze", [False, True], ids=["free", "frozen"])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_two_calls(name: str, *, freeze: bool) -> None:
    module, x = type("Own", (Base,), {})(), torch.randn(3, 4)
    fast = tilewright.compile(module, (x,), freeze=True) if freeze else tilewright.compile(module)
    made_known(fast, x)
    CHANGES[name](module)
    for _ in range(3):
        torch.testing.assert_close(fast(x), module(x))


ARGUMENTS: dict[str, Callable[[], Tensor]] = {
    "negated": lambda: torch._neg_view(torch.randn(4, 4)),
    "imaginary part of a conjugate": lambda: torch.randn(4, 4, dtype=torch.complex64).conj().imag,
    "no memory": _without_memory,
    "transposed": lambda: torch.randn(4, 4).t(),
    "expanded": lambda: torch.arange(4.0).expand(4, 4),
    "another type": lambda: torch.randn(4, 4).double(),
    "another size": lambda: torch.randn(5, 4),
    "a parameter": lambda: nn.Parameter(torch.randn(4, 4), requires_grad=False),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_of_another_kind(name: str) -> None:
    def program(x: Tensor) -> Tensor:
        return x * 2 + 1

    fast, plain, other = tilewright.compile(program), torch.randn(4, 4), ARGUMENTS[name]()
    for x in (plain, other, plain):
        made_known(fast, plain)
        for _ in range(3):
            torch.testing.assert_close(fast(x), program(x))


def test_a_tensor_in_the_form_of_another_library_is_refused() -> None:
    """Its sizes, strides and type may be those of an expanded one; its memory is not torch's."""
    fast, x = tilewright.compile(lambda x: x * 2), torch.randn(4, 1).expand(4, 4)
    made_known(fast, x)
    for _ in range(3):
        with pytest.raises(UnsupportedError, match="mkldnn"):
            fast(torch.randn(4, 4).to_mkldnn())
        torch.testing.assert_close(fast(x), x * 2)


@pytest.mark.parametrize(
    "found",
    [lambda x: x.nonzero().shape[0], lambda x: int(x.sum().item()), lambda x: x.sum().item(), lambda x: x[x > 0].shape],
    ids=["size", "integer", "number", "sizes"],
)  # fmt: skip
def test_numbers_that_a_program_finds_in_tensors(found: Callable[[Tensor], object]) -> None:
    fast = tilewright.compile(lambda x: (x * 2, found(x)))
    for x in (*[torch.zeros(4)] * 4, torch.ones(4), torch.tensor([0.0, 1, 1, 0])):
        given = fast(x)
        assert isinstance(given, tuple) and given[1] == found(x) and type(given[1]) is type(found(x))


def test_sizes_are_returned_as_sizes() -> None:
    fast, x = tilewright.compile(lambda x: (x * 2, x.shape)), torch.randn(3, 4)
    made_known(fast, x)
    given = fast(x)
    assert isinstance(given, tuple) and type(given[1]) is torch.Size and given[1] == x.shape


def test_a_copy_compiles_anew_what_the_first_one_knows() -> None:
    """Both have one way to compile the module: what that serves now need not be what short ways were made for."""
    module, x = Base(), torch.randn(3, 4)
    fast = tilewright.compile(module)
    other = copy.copy(fast)
    for f in (fast, other):
        made_known(f, x)
    module.first.bias = None
    for f in (other, fast, other, fast):
        torch.testing.assert_close(f(x), module(x))


def test_weights_that_have_moved_are_known_again(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = Base(), torch.randn(3, 4)
    fast = tilewright.compile(module)
    made_known(fast, x)
    looks = looks_of(fast, monkeypatch)
    module.first.weight.data = torch.ones(4, 4)
    for _ in range(5):
        torch.testing.assert_close(fast(x), module(x))
    assert len(looks) == 1


def test_calls_under_inference_mode_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    fast, x = tilewright.compile(lambda x: x * 2), torch.randn(3, 4)
    made_known(fast, x)
    looks = looks_of(fast, monkeypatch)
    with torch.inference_mode():
        y = torch.randn(3, 4)
        given = fast(y)
        assert isinstance(given, Tensor) and given.is_inference()
        torch.testing.assert_close(given, y * 2)
    assert not looks


@pytest.mark.filterwarnings("ignore")  # torch warns of its own trace
def test_a_trace_of_torch_takes_no_known_call_for_a_constant() -> None:
    fast, x = tilewright.compile(lambda x: x.sin() * 2), torch.ones(3)
    made_known(fast, x)
    with pytest.raises(RuntimeError, match=r"torch\.jit\.trace"):
        torch.jit.trace(lambda x: fast(x) + x, (x,))
    torch.testing.assert_close(fast(x), x.sin() * 2)


def test_lists_and_dicts_of_the_caller_are_given_as_they_are() -> None:
    def program(x: Tensor, found: list[Tensor], named: dict[str, Tensor]) -> Tensor:
        found.append(x * 2)
        named["a"] = x * 3
        return x + 1

    fast, x = tilewright.compile(program), torch.ones(2)
    for _ in range(3):
        found, named = list[Tensor](), dict[str, Tensor]()
        fast(x, found, named)
        torch.testing.assert_close((found, named), ([x * 2], {"a": x * 3}))


def test_where_an_argument_lies() -> None:
    fast = tilewright.compile(lambda x: (x * 2, x.data_ptr()))
    tensors = [torch.ones(2) for _ in range(2)]
    for x in (*[tensors[0]] * 3, *[tensors[1]] * 3):
        given = fast(x)
        assert isinstance(given, tuple) and given[1] == x.data_ptr()
