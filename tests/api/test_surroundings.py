"""Calls that were seen before, in other surroundings: types and devices by default, modes, globals of helpers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.torch_version import TorchVersion

import tilewright

factor = 2.0


def scaled(x: Tensor) -> Tensor:
    return x * factor


class Scaled(torch.nn.Module):
    def scaled(self, x: Tensor) -> Tensor:
        return x * factor

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(x)


@pytest.mark.parametrize(
    "target",
    [lambda x: scaled(x), lambda x: (lambda y: y * factor)(x), Scaled(), torch.nn.Sequential(Scaled())],
)
def test_globals_of_what_a_program_calls_are_compared(
    target: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = tilewright.compile(target)
    x = torch.ones(3)
    for value in (2.0, 2.0, 5.0, 5.0):
        monkeypatch.setitem(globals(), "factor", value)
        assert torch.equal(compiled(x), x * value)  # pyright: ignore[reportArgumentType]


def made(x: Tensor) -> tuple[Tensor, ...]:
    return torch.zeros(3) + 1.5, torch.arange(3) * 0.5, x.long() / 3


def test_the_type_by_default_is_compared() -> None:
    compiled = tilewright.compile(made)
    x = torch.ones(3, dtype=torch.float32)
    for dtype in (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            got, wanted = compiled(x), made(x)
        finally:
            torch.set_default_dtype(torch.float32)
        assert isinstance(got, tuple)
        for ours, eagers in zip(got, wanted, strict=True):
            assert ours.dtype == eagers.dtype and torch.equal(ours, eagers)


def test_the_device_by_default_is_compared() -> None:
    compiled = tilewright.compile(lambda x: (x + 1, torch.ones(3)))
    x = torch.ones(3)
    for _ in range(2):
        compiled(x)
    with torch.device("meta"):
        assert [t.device.type for t in compiled(x)] == ["cpu", "meta"]  # pyright: ignore


def test_a_mode_of_functions_sees_every_call() -> None:
    class Turned(TorchFunctionMode):
        def __torch_function__(
            self, func: object, types: object, args: object = (), kwargs: object = None
        ) -> object:
            chosen = torch.Tensor.cos if func is torch.Tensor.sin else func
            return chosen(*args, **(kwargs or {}))  # pyright: ignore

    compiled = tilewright.compile(lambda x: x.sin() * 2)
    x = torch.ones(3)
    for _ in range(2):
        assert torch.allclose(compiled(x), x.sin() * 2)  # pyright: ignore[reportArgumentType]
    with Turned():
        turned = compiled(x)
    assert torch.allclose(turned, x.cos() * 2)  # pyright: ignore[reportArgumentType]


def test_tensors_that_are_kept_conjugated() -> None:
    compiled = tilewright.compile(lambda z: (z.imag * 2 + z.real, z.abs()))
    z = torch.randn(5, dtype=torch.complex64)
    for given in (z, z, z.conj(), z.conj(), z):
        got = compiled(given)
        assert torch.allclose(got[0], given.imag * 2 + given.real)  # pyright: ignore
        assert torch.allclose(got[1], given.abs())  # pyright: ignore


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.rest = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.first(x))


def tripled(*given: object) -> object:
    last = given[-1]
    return last * 3 if isinstance(last, Tensor) else (last[0] * 3,)  # pyright: ignore


OLD = TorchVersion(torch.__version__) < "2.13"

CHANGES: dict[str, Callable[[Net], object]] = {
    "a hook": lambda m: m.register_forward_hook(tripled),
    "a hook of a part": lambda m: m.first.register_forward_hook(tripled),
    "a hook before a part": lambda m: m.rest[0].register_forward_pre_hook(tripled),  # pyright: ignore
    "another part": lambda m: setattr(m, "first", torch.nn.Linear(4, 4)),
    "another part of a part": lambda m: m.rest.__setitem__(1, torch.nn.Tanh()),
    "one part more": lambda m: m.rest.append(torch.nn.Tanh()),
    "another forward": lambda m: setattr(m, "forward", lambda x: x * 0),
    "another forward of a part": lambda m: setattr(m.first, "forward", torch.sin),
    "another class": lambda m: setattr(m.rest[1], "__class__", torch.nn.Tanh),
    "no bias": lambda m: setattr(m.first, "bias", None),
}


@pytest.mark.parametrize("frozen", [None, True])
@pytest.mark.parametrize("change", CHANGES)
def test_parts_and_hooks_of_modules_are_compared(change: str, frozen: bool | None) -> None:
    if change == "another class" and OLD:
        pytest.skip("torch's guards do not compare the classes of parts")
    net, x = Net().eval(), torch.randn(2, 4)
    compiled = tilewright.compile(net, freeze=frozen)
    with torch.no_grad():
        before = net(x)
        for _ in range(2):
            assert torch.allclose(compiled(x), before, atol=1e-6)  # pyright: ignore[reportArgumentType]
        CHANGES[change](net)
        assert not torch.allclose(net(x), before)
        for _ in range(2):
            assert torch.allclose(compiled(x), net(x), atol=1e-6)  # pyright: ignore[reportArgumentType]


@pytest.mark.skipif(OLD, reason="torch's guards do not compare the classes of parts")
def test_another_forward_method_of_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = Net().eval(), torch.randn(2, 4)
    compiled = tilewright.compile(net)
    with torch.no_grad():
        for _ in range(2):
            compiled(x)
        monkeypatch.setattr(Net, "forward", lambda self, x: x * 0)  # pyright: ignore
        assert torch.equal(compiled(x), torch.zeros(2, 4))  # pyright: ignore[reportArgumentType]
