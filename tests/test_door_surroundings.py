"""Calls that were seen before, in other surroundings: types and devices by default, modes, globals of helpers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

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
