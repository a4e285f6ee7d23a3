"""Cutting a model at the nodes that read data, so that what lies between can be compiled.

Segments run in order. A compiled segment is a module without data-dependent control flow, with tensors going in
and out; a library segment holds the nodes that read data and runs eagerly. Sizes that a segment needs are computed
again inside it from the tensors that they come from, so that they stay symbolic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from .module import OnnxModule
from .program import OnnxProgram, OnnxStep, ProgramModule, prune


@dataclass(frozen=True, eq=False)
class ModelSegment:
    """Part of a model: `module` takes the values `reads` and gives the values `writes` (numbers of values).

    `library`: it reads data and must run eagerly; `nodes` names the nodes that do.
    """

    module: ProgramModule
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    library: bool
    nodes: tuple[str, ...]

    @property
    def labels(self) -> tuple[str, ...]:
        """Every node, by name."""
        return tuple(step.label for step in self.module.program.steps)


@dataclass(frozen=True, eq=False)
class Split:
    """A model as segments. `inputs` and `outputs` are the numbers of its values at the border.

    `fixed` are outputs that are constants of the model.
    """

    segments: tuple[ModelSegment, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    fixed: dict[int, Tensor]

    def run(
        self, inputs: Sequence[object], calls: Sequence[Callable[..., object]] | None = None
    ) -> tuple[Tensor, ...]:
        """The outputs of the model; `calls` replace the segments' modules (compiled ones, in the same order)."""
        values: dict[int, object] = dict(self.fixed)
        values.update(zip(self.inputs, inputs, strict=True))
        for segment, call in zip(self.segments, calls or [s.module for s in self.segments], strict=True):
            result = call(*[values[i] for i in segment.reads])
            results = result if isinstance(result, tuple) else (result,)
            values.update(zip(segment.writes, results, strict=True))
        return tuple(values.get(i) for i in self.outputs)  # type: ignore[misc]


def split(module: OnnxModule) -> Split:
    """The segments of a model; one compiled segment if no node reads data."""
    program = module.program
    constants = dict(zip(module.constant_slots, module.constants(), strict=True))
    makers = {slot: step for step in program.steps for slot in step.outs}
    levels = _levels(program.steps, makers)
    groups: dict[int, list[OnnxStep]] = {}
    for step in program.steps:
        groups.setdefault(levels[id(step)], []).append(step)
    bodies = {level: _with_sizes(steps, makers) for level, steps in groups.items()}
    wanted = set(program.outputs)
    for steps in bodies.values():
        wanted |= _reads(steps, makers, program, constants)
    segments: list[ModelSegment] = []
    for level in sorted(bodies):
        steps = bodies[level]
        own = {slot for step in groups[level] for slot in step.outs}
        hosts = {slot for step in groups[level] if step.maybe for slot in step.outs}
        writes = sorted((own & wanted) - (hosts - set(program.outputs)))
        if not writes:
            continue
        needed = prune(steps, writes)
        reads = sorted(_reads(needed, makers, program, constants))
        used = [(tensor, slot) for slot, tensor in constants.items() if any(slot in s.ins for s in needed)]
        part = OnnxProgram(program.template, tuple(reads), tuple(writes), needed)
        nodes = tuple(label for step in groups[level] for label in step.data)
        segments.append(
            ModelSegment(ProgramModule(part, used), tuple(reads), tuple(writes), level % 2 == 1, nodes)
        )
    fixed = {slot: constants[slot] for slot in program.outputs if slot in constants}
    return Split(tuple(segments), program.inputs, program.outputs, fixed)


def _levels(steps: Sequence[OnnxStep], makers: dict[int, OnnxStep]) -> dict[int, int]:
    """Even levels are compiled, odd ones read data; a step stands as early as what it reads allows."""
    levels: dict[int, int] = {}
    for step in steps:
        level = 1 if step.data else 0
        for slot in step.ins:
            maker = makers.get(slot)
            if maker is not None:
                before = levels[id(maker)]
                same = bool(maker.data) == bool(step.data)
                level = max(level, before if same else before + 1)
        levels[id(step)] = level
    return levels


def _with_sizes(steps: Sequence[OnnxStep], makers: dict[int, OnnxStep]) -> list[OnnxStep]:
    """The steps of a group, behind copies of the host arithmetic of other groups that they need."""
    inside = {id(step) for step in steps}
    copies: dict[int, OnnxStep] = {}
    todo = list(steps)
    while todo:
        for slot in todo.pop().ins:
            maker = makers.get(slot)
            if maker is not None and maker.maybe and id(maker) not in inside:
                inside.add(id(maker))
                copies[id(maker)] = maker
                todo.append(maker)
    if not copies:
        return list(steps)
    place = {id(step): i for i, step in enumerate(dict.fromkeys(makers.values()))}
    return sorted([*copies.values(), *steps], key=lambda step: place[id(step)])


def _reads(
    steps: Sequence[OnnxStep], makers: dict[int, OnnxStep], program: OnnxProgram, constants: dict[int, Tensor]
) -> set[int]:
    """The values that the steps take from outside, constants left out."""
    made = {slot for step in steps for slot in step.outs}
    outside = {slot for step in steps for slot in step.ins} - made - set(constants)
    return {slot for slot in outside if slot in makers or slot in program.inputs}
