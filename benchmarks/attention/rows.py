"""The rows of the benchmark: cores of some length, stacks of layers, prefill in chunks."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks import gpu_peers
from benchmarks.attention import llama
from benchmarks.attention.llama import Layer, Shape, Step
from benchmarks.attention.peers import EAGER, INDUCTOR, INSIDE, OURS, ablated, peers, until_late
from benchmarks.attention.turn import Results, Row
from benchmarks.attention.workloads import WORKLOADS, Attention, Corm, Margins, Sizes, Tensors
from benchmarks.record import Facts
from tilewright import accuracy, measure
from tilewright.measure import BuiltPeer, Peer, Workload

SLICE = 1 << 28
"""Scores that are judged at once: heads do not touch each other, and float64 needs memory."""
LONGEST = 0.05
"""Seconds of a step of the ablation from which on one sample is enough."""


# --- cores -----------------------------------------------------------------------


def core(
    name: str, sizes: Sizes, dtype: torch.dtype, device: torch.device, folder: Path, until: float
) -> Row:
    """One core; the same inputs for the same sizes."""
    torch.manual_seed(0)
    module = WORKLOADS[name]().eval()
    inputs = sizes.inputs(name, dtype=dtype, device=device)
    keys = sizes.keys or sizes.queries
    pairs = sizes.batch * sizes.heads * sizes.queries * (keys - (sizes.queries - 1) / 2)  # those not masked
    return Row(
        Workload(f"{name}-{sizes.queries}", module, inputs),
        peers(folder, until),
        lambda results: judge(module, inputs, results),
        2 * pairs * (sizes.depth + (sizes.value_depth or sizes.depth)),
        sizes.batch * sizes.heads * sizes.queries * keys * dtype.itemsize,
        ({}, INSIDE) if type(module) is Attention else ({},),
    )


def ablation(name: str, sizes: Sizes, dtype: torch.dtype, device: torch.device, until: float) -> Row:
    """One core by our compiler alone, without some of what it does; its model decides, so that all cores may be built
    side by side."""
    whole = core(name, sizes, dtype, device, Path(), until)
    return replace(whole, peers=ablated(until), ours=(), measuring=(), longest=LONGEST)


def judge(module: Attention, inputs: Tensors, results: Results) -> dict[str, Facts]:
    """The fp64 rule for each contestant, some heads at a time; the worst of the slices counts. Inputs of other than
    four dims are the same for all heads."""
    q, k = inputs[:2]
    place = 2 if module.layout == "bshd" else 1
    shared = q.shape[place] // k.shape[place]
    scores = q.shape[0] * q.shape[3 - place] * k.shape[3 - place]
    count = max(1, SLICE // (scores * shared))  # heads of k at once
    found: dict[str, Facts] = {}
    for start in range(0, k.shape[place], count):
        wide, narrow = slice(start * shared, (start + count) * shared), slice(start, start + count)
        heads = (wide, narrow, narrow)
        some = tuple(
            t if t.dim() != 4 else _heads(t, place if i < 3 else 1, heads[i] if i < 3 else wide)
            for i, t in enumerate(inputs)
        )
        eager = measure.flatten(module(*some))
        exact = measure.flatten(accuracy.in_float64(module)(*some))
        near = _deciding(module, some)
        for name, made in results.items():
            mine = tuple(_heads(t, place if i == 0 else 1, wide) for i, t in enumerate(made))
            verdict = _verdict(mine, eager, exact, near)
            before = found.get(name)
            if before is None or not verdict["passed"] or (before["passed"] and _k(verdict) > _k(before)):
                found[name] = verdict if before is None or before["passed"] else before
    return found


def _heads(t: Tensor, place: int, heads: slice) -> Tensor:
    return t[:, :, heads] if place == 2 else t[:, heads]


def _k(facts: Facts) -> float:
    return float(facts["of_eager"])  # type: ignore[arg-type]


def _deciding(module: Attention, inputs: Tensors) -> dict[int, accuracy.Deciding]:
    """The floats behind the bools of a core that has some."""
    if not isinstance(module, Corm):
        return {}
    exact = accuracy.in_float64(module.deciding)(*inputs[:3])
    return {1: accuracy.Deciding(module.deciding(*inputs[:3]), exact, exact)}


def _verdict(mine: Tensors, eager: Tensors, exact: Tensors, near: Mapping[int, accuracy.Deciding]) -> Facts:
    """Of all results together; `near` holds the floats behind those that are no floats, by place."""
    floats = [i for i, t in enumerate(eager) if t.dtype.is_floating_point]
    if len(mine) != len(eager):
        return {"passed": False, "of_eager": 0.0, "reason": f"{len(mine)} results, eager {len(eager)}"}
    facts = gpu_peers.verdict(*(tuple(ts[i] for i in floats) for ts in (mine, eager, exact)))
    ties = 0
    for i in set(range(len(eager))) - set(floats):
        judged = accuracy.compare(mine[i], eager[i], exact[i], deciding=near.get(i))
        ties += judged.near_ties
        facts["near_ties"] = ties
        if not judged.passed:
            facts |= {"passed": False, "reason": str(judged)}
    return facts


# --- layers ----------------------------------------------------------------------

STEPS = (EAGER, INDUCTOR, OURS)
"""Who runs layers."""


class Stack(nn.Module):
    """Layers that some step runs."""

    def __init__(self, layers: Sequence[Layer], run: Callable[..., Tensors]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.run = run

    def through(self, step: Step, inputs: Tensors) -> Tensors:
        """The results with another step."""
        return measure.flatten(self.run(step, list(self.layers), *inputs))

    def forward(self, *inputs: Tensor) -> Tensors:
        """The results in eager."""
        return self.through(llama.step, inputs)


def _step_peer(name: str) -> Peer:
    def build(workload: Workload, threads: int) -> BuiltPeer:
        assert isinstance(workload.target, Stack)
        module: Stack = workload.target
        step: Step = llama.step
        before = gpu_peers.compilations().fallbacks
        if name != EAGER:
            backend = "inductor" if name == INDUCTOR else importlib.import_module("tilewright").backend
            step = torch.compile(gpu_peers.fresh(llama.step), backend=backend, dynamic=False, fullgraph=True)  # type: ignore[assignment,arg-type]
        return BuiltPeer(lambda *inputs: _checked(module.through(step, inputs), name, before))

    return build


def _checked(results: Tensors, name: str, before: int) -> Tensors:
    if name == OURS and gpu_peers.compilations().fallbacks > before:  # it would be eager under our name
        raise gpu_peers.MissingError("the graph was refused and runs as captured")
    return results


def layers(
    name: str, shape: Shape, places: int, dtype: torch.dtype, device: torch.device, until: float
) -> Row:
    """A stack of layers around one core over `places` tokens; the core's statistics are collected."""
    torch.manual_seed(0)
    module = Stack(llama.stack(name, shape, dtype, device), llama.forward)
    x = torch.randn(1, places, shape.hidden, device=device).to(dtype)
    noise = Sizes(places, shape.heads, shape.depth).inputs(name, device=device)[3:]
    return _stack_row(f"{name}-{shape.layers}-{places}", module, shape, (x, *noise), until)


def prefill(
    shape: Shape, places: int, chunk: int, budget: int, dtype: torch.dtype, device: torch.device, until: float
) -> Row:
    """Prefill in chunks; every contestant evicts the keys that eager's run chose, as near ties may differ."""
    torch.manual_seed(0)
    held = llama.stack("h2o", shape, dtype, device)
    x = torch.randn(1, places, shape.hidden, device=device).to(dtype)
    with torch.no_grad():
        chosen = llama.prefill(llama.step, held, x, chunk, budget)[1]

    def run(step: Step, layers: Sequence[Layer], x: Tensor) -> Tensors:
        return (llama.prefill(step, layers, x, chunk, budget, chosen)[0],)

    return _stack_row(f"prefill-{shape.layers}-{places}", Stack(held, run), shape, (x,), until)


def _stack_row(name: str, module: Stack, shape: Shape, inputs: Tensors, until: float) -> Row:
    places = inputs[0].shape[1]

    def judged(results: Results) -> Mapping[str, Facts]:
        with torch.no_grad():
            eager = module(*inputs)
            # A function: its ops are widened one by one, and no float64 copy of all weights is made.
            exact = accuracy.in_float64(lambda *given: module.through(llama.step, given))(*inputs)
            near = {} if all(t.is_floating_point() for t in eager) else _margins(module, inputs)
        return {who: _verdict(made, eager, exact, near) for who, made in results.items()}

    weights = sum(p.numel() for p in module.parameters() if p.dim() > 1)
    return Row(
        Workload(name, module, inputs),
        {who: until_late(_step_peer(who), until) for who in STEPS},
        judged,
        2 * places * weights,
        shape.heads * places * places * inputs[0].dtype.itemsize,
    )


def _margins(module: Stack, inputs: Tensors) -> dict[int, accuracy.Deciding]:
    """The floats behind each layer's bools, of a stack around Corm."""
    cores = [layer.core for layer in module.layers]  # type: ignore[union-attr]
    try:
        for layer in module.layers:
            layer.core = Margins().eval()
        eager = module(*inputs)
        exact = accuracy.in_float64(lambda *given: module.through(llama.step, given))(*inputs)
    finally:
        for layer, core in zip(module.layers, cores, strict=True):
            layer.core = core
    return {i: accuracy.Deciding(eager[i], exact[i], exact[i]) for i in range(1, len(eager))}
