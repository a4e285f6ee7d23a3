"""What a program of the sweep is, and how its inputs are written down."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

Drive = Literal["once", "accumulate", "retain", "flat"]
"""How gradients are asked for: by one backward pass; two calls, whose gradients add up; one call with two backward
passes; gradients that are views of one flat buffer."""


@dataclass(frozen=True)
class Program:
    """`make` gives the module. `inputs` are shapes by comma, `B` for the batch, with what stands in them after a colon:
    `i10` integers below 10, `p` positive numbers, `u` numbers in (0, 1), `b` truth values, else normal ones. `fixed`
    programs have no size that may change; `plain` ones only run in fp32."""

    name: str
    make: Callable[[], nn.Module]
    inputs: tuple[str, ...]
    drive: Drive = "once"
    fixed: bool = False
    plain: bool = False


class Function(nn.Module):
    """A function with weights of given shapes, which it gets behind its inputs. They are no ParameterList: with one,
    torch 2.11 traced none of these on the H200."""

    def __init__(self, run: Callable[..., object], weights: tuple[tuple[int, ...], ...] = ()) -> None:
        super().__init__()
        self.run = run
        self.names = tuple(f"weight{k}" for k in range(len(weights)))
        for name, shape in zip(self.names, weights, strict=True):
            self.register_parameter(name, nn.Parameter(torch.randn(shape) * 0.5))

    def forward(self, *args: Tensor) -> object:
        """The function's result."""
        return self.run(*args, *[getattr(self, name) for name in self.names])


def function(
    name: str,
    run: Callable[..., object],
    *inputs: str,
    weights: tuple[tuple[int, ...], ...] = (),
    fixed: bool = False,
    plain: bool = False,
    drive: Drive = "once",
) -> Program:
    """A program that is a function."""
    return Program(name, lambda: Function(run, weights), inputs, drive, fixed, plain)


def module(
    name: str, make: Callable[[], nn.Module], *inputs: str, fixed: bool = False, plain: bool = False,
    drive: Drive = "once",
) -> Program:  # fmt: skip
    """A program that is a module."""
    return Program(name, make, inputs, drive, fixed, plain)


def drawn(spec: str, batch: int, draw: torch.Generator) -> Tensor:
    """A tensor as `Program.inputs` describes it."""
    dims, _, kind = spec.partition(":")
    shape = [batch * int(d[1:] or 1) if d.startswith("B") else int(d) for d in dims.split(",") if d]
    if kind.startswith("i"):
        return torch.randint(0, int(kind[1:]), shape, generator=draw)
    if kind == "b":
        return torch.rand(shape, generator=draw) < 0.6
    if kind == "u":
        return torch.rand(shape, generator=draw) * 0.9 + 0.05
    if kind == "p":
        return torch.rand(shape, generator=draw) * 2 + 0.3
    return torch.randn(shape, generator=draw)
