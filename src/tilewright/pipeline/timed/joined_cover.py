"""Covers some of whose kernels took in the kernel in front of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tilewright.ir.graph import Graph, Layout, Op
from tilewright.ir.kernel import Cover, Kernel
from tilewright.ir.sizes import dims
from tilewright.partition.memo import task_of
from tilewright.schedule.scheduler import Solution
from tilewright.schedule.solver import Solver


@dataclass(frozen=True, slots=True, eq=False)
class Front:
    """A kernel, those that alone read what it makes, and each of these with it."""

    kernel: Kernel
    readers: tuple[Kernel, ...]
    joined: Mapping[Kernel, Solution]

    @property
    def apart(self) -> tuple[Kernel, ...]:
        """All kernels as they are, in order."""
        return (self.kernel, *self.readers)

    def region(self, cover: Cover) -> Graph:
        """What they compute, as a graph of its own."""
        made = dict.fromkeys(v for k in self.apart for v in k.outputs)
        inputs = dict.fromkeys(v for k in self.apart for v in k.inputs if v not in made)
        ops = (replace(op, kernel=-1) for op in self.ops)
        outputs = tuple(v for k in self.readers for v in k.outputs)
        dense = {v: Layout(dims.dense_strides(v.shape)) for v in (*inputs, *made)}
        layouts = {v: cover.layouts.get(v, lies) for v, lies in dense.items()}
        return Graph(tuple(inputs), tuple(ops), outputs, cover.graph.origins, layouts)

    @property
    def ops(self) -> list[Op]:
        """What any of them computes, in order."""
        return list(dict.fromkeys(op for k in self.apart for op in k.ops))

    def key(self, cover: Cover) -> str:
        """Equal for what is decided alike."""
        place = {op: n for n, op in enumerate(self.ops)}
        return task_of(
            self.region(cover), tuple((*(place[op] for op in k.ops), k.outputs) for k in self.apart)
        )


@dataclass(frozen=True, slots=True, eq=False)
class JoinedCover:
    """The cover of kernels `apart`, and those of its kernels that are joined."""

    apart: Cover
    fronts: tuple[Front, ...] = ()

    @property
    def cover(self) -> Cover:
        """Without the kernels in front, and with what takes them in."""
        if not self.fronts:
            return self.apart
        gone = {f.kernel for f in self.fronts}
        instead = {r: j for f in self.fronts for r, j in zip(f.readers, f.joined, strict=True)}
        steps = (instead.get(s, s) if isinstance(s, Kernel) else s for s in self.apart.steps if s not in gone)
        return replace(self.apart, steps=tuple(steps))

    def without_forgotten(self, solver: Solver) -> JoinedCover:
        """With kernels apart where the solver forgot the schedule of one that they became. Under the schedule that the
        model prefers it would be slow."""
        return replace(self, fronts=tuple(f for f in self.fronts if all(map(solver.is_preferred, f.joined))))
