"""A model as a flat list of steps over numbered slots; running it is one loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tilewright.capture.onnx.values import Host, Value, as_host, as_tensor, has_symbols, settle

Convert = Callable[[Value, torch.device], Value]


@dataclass(frozen=True)
class Step:
    """One call: read `ins`, write `outs`, then forget `dead`.

    `settle`: while torch captures symbolic sizes, bring the strides of tensor arguments into a known order.
    """

    call: Callable[..., object]
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    dead: tuple[int, ...]
    label: str
    settle: bool


@dataclass(frozen=True)
class Program:
    """Steps with their slots. Slot 0 holds the device; `template` holds values that never change."""

    template: tuple[object, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    steps: tuple[Step, ...]

    def run(self, device: torch.device, args: Sequence[Value]) -> tuple[Value, ...]:
        """Values of the outputs for the values of the inputs (in the order of `inputs`).

        Errors of torch keep their type and gain a note that names the node.
        """
        env: list[object] = list(self.template)
        env[0] = device
        for slot, value in zip(self.inputs, args, strict=True):
            env[slot] = value
        symbolic = any(isinstance(a, torch.Tensor) and has_symbols(a) for a in args)
        for step in self.steps:
            try:
                if symbolic and step.settle:
                    result = step.call(*[_settled(env[i]) for i in step.ins])
                else:
                    result = step.call(*[env[i] for i in step.ins])
            except Exception as error:
                _note(error, step.label)
                raise
            outs = step.outs
            if isinstance(result, tuple):
                for slot, value in zip(outs, result, strict=False):
                    env[slot] = value
            elif outs:
                env[outs[0]] = result
            for slot in step.dead:
                env[slot] = None
        return tuple(env[i] for i in self.outputs)  # type: ignore[misc]


def _settled(value: object) -> object:
    return settle(value) if isinstance(value, torch.Tensor) else value


def _note(error: Exception, label: str) -> None:
    """Name the innermost node once."""
    if not getattr(error, "__notes__", None):
        error.add_note(f"in ONNX node {label}")


def tensor_call(
    function: Callable[..., object], converts: Sequence[Convert | None], wants_device: bool
) -> Callable[..., object]:
    """`function` behind conversions of its arguments; the result takes the device as first argument."""
    todo = tuple((i, c) for i, c in enumerate(converts) if c is not None)

    def call(device: torch.device, *args: Value) -> object:
        values = list(args)
        for i, convert in todo:
            values[i] = convert(values[i], device)
        return function(*values, device=device) if wants_device else function(*values)

    return call


def host_call(host_function: Callable[..., object], plain: Callable[..., object]) -> Callable[..., object]:
    """Try the host meaning if all arguments are host values; else, or if it declines, call `plain`."""

    def call(device: torch.device, *args: Value) -> object:
        if all(arg is None or isinstance(arg, Host) for arg in args):
            result = host_function(*args)
            if result is not None:
                return result
        return plain(device, *args)

    return call


def scalar_call(function: Callable[..., object], rank: int, position: int) -> Callable[..., object]:
    """Binary `function` with one operand a number that stands for a tensor of rank `rank`.

    The number is taken as it is when the other operand has at least that rank.
    """
    other = 1 - position

    def call(*args: Value) -> object:
        result = function(*args)
        operand = args[other]
        if isinstance(result, torch.Tensor) and isinstance(operand, torch.Tensor) and operand.dim() < rank:
            return result.reshape([1] * (rank - operand.dim()) + list(result.shape))
        return result

    return call


def convert_tensor(value: Value, device: torch.device) -> Value:
    """Host to tensor."""
    return as_tensor(value, device)


def convert_host(value: Value, device: torch.device) -> Value:
    """Tensor to host."""
    del device
    return as_host(value)


def convert_scalar(value: Value, device: torch.device) -> Value:
    """A one-element host value as a number of rank 0, other host values as tensors."""
    if isinstance(value, Host) and value.rank == 0:
        return value.item()  # type: ignore[return-value]
    return as_tensor(value, device)
