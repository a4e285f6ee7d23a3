"""A model as a flat list of steps over numbered slots; running it is one loop."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from tilewright.capture.onnx.values.run import Host, Value, as_host, as_tensor, has_symbols, order_strides
from tilewright.errors import TilewrightError

from .refuse import completed, is_refusal, refused

Convert = Callable[[Value, torch.device], Value]


@dataclass(frozen=True)
class OnnxStep:
    """One call: read `ins`, write `outs`, then forget `dead`.

    `order_strides`: while torch captures symbolic sizes, bring the strides of tensor arguments into a known order.
    `maybe`: the results may be host values. `data`: the nodes inside whose control flow or shape reads data.
    """

    call: Callable[..., object]
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    dead: tuple[int, ...]
    label: str
    order_strides: bool = False
    maybe: bool = False
    data: tuple[str, ...] = ()


@dataclass(frozen=True)
class OnnxProgram:
    """Steps with their slots. Slot 0 holds the device; `template` holds values that never change."""

    template: tuple[object, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    steps: tuple[OnnxStep, ...]

    def run(self, device: torch.device, args: Sequence[Value]) -> tuple[Value, ...]:
        """Values of the outputs for the values of the inputs (in the order of `inputs`).

        What a node refuses is a ModelError that names it. Errors of torch's capture keep their type and gain a note.
        """
        env: list[object] = list(self.template)
        env[0] = device
        for slot, value in zip(self.inputs, args, strict=True):
            env[slot] = value
        symbolic = any(isinstance(a, torch.Tensor) and has_symbols(a) for a in args)
        known: set[tuple[object, ...]] = set()
        for step in self.steps:
            try:
                if symbolic and step.order_strides:
                    result = step.call(*[_with_ordered_strides(env[i], known) for i in step.ins])
                else:
                    result = step.call(*[env[i] for i in step.ins])
            except TilewrightError as error:
                raise completed(error, step.label)  # noqa: B904  (the same error)
            except Exception as error:
                if is_refusal(error):
                    raise refused(error, step.label) from error
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


class ProgramModule(torch.nn.Module):
    """A program with its constants as parameters (`requires_grad` False) and buffers named p0, p1, ...

    Call it with the values of the program's inputs; it returns a tensor for one output, else a tuple.
    """

    def __init__(self, program: OnnxProgram, constants: Sequence[tuple[torch.Tensor, int]]) -> None:
        """`constants` are tensors with the slots that they fill."""
        super().__init__()
        for i, (tensor, _) in enumerate(constants):
            if isinstance(tensor, torch.nn.Parameter):
                self.register_parameter(f"p{i}", tensor)
            elif tensor.is_floating_point():
                self.register_parameter(f"p{i}", torch.nn.Parameter(tensor, requires_grad=False))
            else:
                self.register_buffer(f"p{i}", tensor)
        self.program = program
        self.constant_slots = tuple(slot for _, slot in constants)
        slots = self.constant_slots + program.inputs
        self._with_constants = OnnxProgram(program.template, slots, program.outputs, program.steps)

    def constants(self) -> list[torch.Tensor]:
        """The constants in the order of `constant_slots`."""
        return [getattr(self, f"p{i}") for i in range(len(self.constant_slots))]

    def device(self) -> torch.device | None:
        """Where the constants lie; None without constants."""
        return self.get_constant(0).device if self.constant_slots else None

    def get_constant(self, index: int) -> torch.Tensor:
        """One constant."""
        return getattr(self, f"p{index}")

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """Run the program."""
        if len(inputs) != len(self.program.inputs):
            raise TypeError(f"the model takes {len(self.program.inputs)} inputs, {len(inputs)} were given")
        constants = self.constants()
        device = _device_of((*inputs, *constants))
        results = self._with_constants.run(device, [*constants, *inputs])
        tensors = tuple(as_tensor(r, device) for r in results)
        return tensors[0] if len(tensors) == 1 else tensors  # type: ignore[return-value]


def _device_of(values: Sequence[Value]) -> torch.device:
    for value in values:
        if isinstance(value, torch.Tensor):
            return value.device
    return torch.device("cpu")


def prune(steps: Sequence[OnnxStep], outputs: Iterable[int]) -> tuple[OnnxStep, ...]:
    """The steps that the output slots need, in order, each with the slots that die after it."""
    needed = set(outputs)
    live: list[OnnxStep] = []
    for step in reversed(steps):
        if not needed.isdisjoint(step.outs):
            dead = sorted({s for s in (*step.ins, *step.outs) if s > 1 and s not in needed})
            needed.update(step.ins)
            live.append(replace(step, dead=tuple(dead)))
    live.reverse()
    return tuple(live)


def _with_ordered_strides(value: object, known: set[tuple[object, ...]]) -> object:
    return order_strides(value, known) if isinstance(value, torch.Tensor) else value


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
