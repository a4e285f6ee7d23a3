"""Tensors that torch keeps negated: their memory holds the numbers with the other sign, and a bit says so.

The imaginary part of a conjugate is one. Kernels read memory, so no tensor inside of a graph is kept so: views of this
kind are computed (`aten.decompose`), and what comes in is brought into plain memory before the graph runs.

Zeros that torch keeps without any memory are brought there too. Its own tracing cannot read them, so that they are
known at the entry point alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeGuard

import torch
from torch import Tensor, fx

from tilewright.capture.opaque import Build, Runner

from .shares import find_written


def around_negated(build: Build) -> Build:
    """`build` for graphs whose arguments may be kept negated: those that were when Dynamo saw them, which its guards
    hold to, and gradients that a backward pass gets, of which nothing is known. What a graph writes into such an
    argument is written back."""

    def one(gm: fx.GraphModule, kind: str, frozen: Mapping[str, Tensor]) -> Runner:
        live = [n for n in gm.graph.find_nodes(op="placeholder") if n.name not in frozen]
        taken = [k for k, n in enumerate(live) if _may_be(n)]
        runner = build(gm, kind, {name: unnegated(t) for name, t in frozen.items()})
        targets = find_written(gm)
        return _plain(runner, {k: live[k] in targets for k in taken}) if taken else runner

    return one


def unnegated(t: Tensor) -> Tensor:
    """`t`, or the same numbers in plain memory, with the strides of `t`: graphs are made for these."""
    if not t.is_neg():
        return t
    made = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in t.stride())
    made[once].copy_(t[once])
    return made


def _may_be(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and (value.is_neg() or "tangents" in str(node.target))


def _plain(runner: Runner, taken: Mapping[int, bool]) -> Runner:
    """`runner` for arguments of which those numbered `taken` may be kept negated; True: it writes into them."""

    def run(args: list[object]) -> list[object]:
        back = _resolved(args, taken)
        results = list(runner(args))
        args.clear()
        for given, made in back:
            given.copy_(made)
        return results

    run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]  (torch's sign that the list may be emptied)
    return run


def _resolved(args: list[object], taken: Mapping[int, bool]) -> list[tuple[Tensor, Tensor]]:
    """Bring those of `args` that are kept negated into plain memory; of those that are written, what they were and are.
    Whoever runs the graph holds nothing else: a backward pass gives its gradients back early."""
    back: list[tuple[Tensor, Tensor]] = []
    for k, writes in taken.items():
        given = args[k]
        if isinstance(given, Tensor) and given.is_neg():
            args[k] = made = given.resolve_neg()
            back += [(given, made)] if writes else []
    return back


def in_memory(x: object) -> object:
    """Zeros in memory for zeros without memory; anything else as it is."""
    return torch.zeros(x.shape, dtype=x.dtype, device=x.device) if _is_without(x) else x


def around_zeros(compiled: Callable[..., object], example_inputs: Sequence[object]) -> Callable[..., object]:
    """`compiled` for inputs that are zeros without memory where the examples are; Dynamo's guards hold to that."""
    if not any(map(_is_without, example_inputs)):
        return compiled
    return lambda *args: compiled(*map(in_memory, args))


def _is_without(x: object) -> TypeGuard[Tensor]:
    return isinstance(x, Tensor) and x._is_zerotensor()
