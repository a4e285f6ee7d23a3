"""Samples compiled together and judged one by one: values, types and strides, and gradients, by the fp64 rule."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import tilewright
from benchmarks.ops.programs import Program, copied, joined, tensors_of, wide
from benchmarks.promises import blame, promised, strides
from tilewright.accuracy import compare, in_float64
from tilewright.ir.kernel import Cover, LibraryStep

OPTIONS: Mapping[str, bool] = {"measure": False}
GROUP = 24
"""Samples in one graph at most."""
DRAWS = 8
"""Draws of a sample's numbers that are judged as one where the first fails: of a few elements, eager's error is a
matter of luck."""

Again = Callable[[int, int], Program | None]
"""The program at a place of the list once more, with the numbers of another seed."""


@dataclass(frozen=True)
class Outcome:
    """How one sample went. `state` is right, wrong, crashed, refused (the whole graph runs as captured) or excluded
    (torch itself cannot do it); `how` is generated, chosen (a library call by choice) or library."""

    state: str
    how: str = "library"
    said: str = ""
    fell: str = ""


@dataclass(frozen=True)
class Reference:
    """What eager computes and the same in float64: results, then gradients (None where there is none)."""

    eager: tuple[Tensor | None, ...]
    exact: tuple[Tensor | None, ...]
    draws: bool


def judged(programs: Sequence[Program], again: Again, *, dynamic: bool, gradients: bool) -> list[Outcome]:
    """Compile programs in groups and judge each; those that draw random numbers have a graph of their own."""
    outcomes: dict[int, Outcome] = {}
    together: list[int] = []
    references: dict[int, Reference] = {}
    for k, p in enumerate(programs):
        try:
            if not p.repeatable:
                raise ValueError("its tensors are not dense ones of real numbers")
            references[k] = reference(p, gradients)
        except Exception as refused:  # noqa: BLE001  torch refuses some of its own samples
            outcomes[k] = Outcome("excluded", said=_line(refused))
            continue
        if references[k].draws:
            outcomes |= _group([k], programs, references, dynamic, gradients)
        else:
            together.append(k)
    for start in range(0, len(together), GROUP):
        outcomes |= _group(together[start : start + GROUP], programs, references, dynamic, gradients)
    for k, o in outcomes.items():
        if o.state == "wrong" and "FAIL" in o.said:
            said = _settled(programs[k], [again(k, seed) for seed in range(DRAWS)], dynamic, gradients)
            state = o.state if said else "refused" if o.fell else "right"
            outcomes[k] = Outcome(state, o.how, said or o.fell, o.fell)
    return [outcomes[k] for k in range(len(programs))]


def _settled(p: Program, drawn: Sequence[Program | None], dynamic: bool, gradients: bool) -> str:
    """What is wrong with a program over several draws of its numbers, taken as one; empty if nothing is."""
    alike = [
        _shaken(p, q, seed)
        for seed, q in enumerate(drawn)
        if q is not None and q.text == p.text and q.shown() == p.shown()
    ]
    run, _ = joined([p])
    tilewright.reset()
    compiled = torch.compile(run, backend=tilewright.backend, dynamic=dynamic, options=dict(OPTIONS))
    ours: list[Sequence[Tensor | None]] = []
    want: list[Reference] = []
    for q in [p, *alike]:
        try:
            want.append(reference(q, gradients))
        except Exception:
            if q is p:
                raise
            continue
        torch.manual_seed(0)
        ours.append(_pulled(compiled, q.tensors, gradients)[0])
    whole = Reference(_stacked([w.eager for w in want]), _stacked([w.exact for w in want]), want[0].draws)
    return _difference(_stacked(ours), whole)


def _shaken(p: Program, q: Program, seed: int) -> Program:
    """`q`; where torch draws the same numbers for every seed, those of `p`, each a little nearer to 0. A program of
    integers alone has them in another order."""
    if not all(torch.equal(a, b) for a, b in zip(p.tensors, q.tensors, strict=True)):
        return q
    draw = torch.Generator().manual_seed(seed)
    whole = not any(t.is_floating_point() for t in q.tensors)

    def near(t: Tensor) -> Tensor:
        found = copied(t).requires_grad_(False)
        if t.is_floating_point():
            found.mul_((1 - torch.rand(t.shape, generator=draw) / 32).to(t.device, t.dtype))
        elif whole and t.dtype is not torch.bool:
            order = torch.randperm(t.numel(), generator=draw).to(t.device)
            found.copy_(t.flatten()[order].reshape(t.shape))
        return found.requires_grad_(t.requires_grad)

    return Program(p.text, tuple(map(near, p.tensors)), p.scope)


def _stacked(draws: Sequence[Sequence[Tensor | None]]) -> tuple[Tensor | None, ...]:
    """Results of several draws, each with a dim in front; what has another shape in each is that of the first."""
    found: list[Tensor | None] = []
    for parts in zip(*draws, strict=True):
        held = [t for t in parts if t is not None]
        same = len(held) == len(parts) and len({(t.shape, t.dtype) for t in held}) == 1
        found.append(torch.stack(held) if same else parts[0])
    return tuple(found)


def reference(p: Program, gradients: bool) -> Reference:
    """Run a program eagerly and in float64. Raises what torch raises."""
    run, args = joined([p])
    state = torch.get_rng_state()
    torch.manual_seed(0)
    seeded = torch.get_rng_state()
    eager = _pulled(run, args, gradients)[0]
    draws = not torch.equal(seeded, torch.get_rng_state())
    torch.set_rng_state(state)
    torch.manual_seed(0)
    return Reference(eager, tuple(_exact(p, eager, gradients)), draws)


def _exact(p: Program, eager: Sequence[Tensor | None], gradients: bool) -> Sequence[Tensor | None]:
    """The results in float64; eager's own where torch has none."""
    run, args = joined([p])
    if not gradients:
        try:
            found = list(tensors_of(in_float64(run)(*map(copied, args))))
            if _fits(found, eager):
                return found
        except Exception:  # noqa: BLE001  not every op has a float64 kernel
            torch.manual_seed(0)
    try:
        widened, its_args = joined([wide(p)])
        exact = _pulled(widened, its_args, gradients)[0]
        return exact if _fits(exact, eager) else eager
    except Exception:  # noqa: BLE001
        return eager


def _fits(found: Sequence[Tensor | None], eager: Sequence[Tensor | None]) -> bool:
    shapes = [[None if t is None else t.shape for t in x] for x in (found, eager)]
    return shapes[0] == shapes[1]


def _pulled(
    run: Callable[..., Any], args: Sequence[Tensor], gradients: bool
) -> tuple[tuple[Tensor | None, ...], list[int]]:
    """Results of a call, then the gradients of its arguments under fixed cotangents; and how many results each program
    has."""
    given = [copied(a) if gradients else copied(a).requires_grad_(False) for a in args]
    results = run(*given)
    counts = [len(list(tensors_of(r))) for r in results]
    outputs = list(tensors_of(results))
    if not gradients:
        return tuple(outputs), counts
    ends = [t for t in outputs if t.requires_grad and t.is_floating_point()]
    starts = [t for t in given if t.requires_grad]
    if not ends or not starts:
        raise ValueError("nothing to differentiate")
    found = torch.autograd.grad(ends, starts, [_cotangent(t) for t in ends], allow_unused=True)
    return tuple(t.detach() for t in outputs) + found, counts


def _cotangent(t: Tensor) -> Tensor:
    draw = torch.Generator().manual_seed(t.numel())
    return (torch.randint(-8, 9, t.shape, generator=draw) / 8).to(t.device, t.dtype)


def _group(
    members: Sequence[int], programs: Sequence[Program], references: Mapping[int, Reference], dynamic: bool,
    gradients: bool,
) -> dict[int, Outcome]:  # fmt: skip
    """One graph for all members; if it fails or falls back, one for each."""
    try:
        found = _compiled([programs[k] for k in members], dynamic, gradients)
    except Exception as failed:  # noqa: BLE001  every failure is a finding
        if len(members) == 1:
            return {members[0]: _failure(programs[members[0]], failed, dynamic, gradients)}
        found = None
    if found is None or (found.fell and len(members) > 1):
        outcomes: dict[int, Outcome] = {}
        for k in members:
            outcomes |= _group([k], programs, references, dynamic, gradients)
        return outcomes
    outcomes = {}
    for k, ours, how in zip(members, found.results, found.how, strict=True):
        run, args = joined([programs[k]])
        said = _difference(ours, references[k], partial(promised, run, *args))
        state = "wrong" if said else "refused" if found.fell else "right"
        if said and _same_in_torch(programs[k], references[k], dynamic, gradients):
            state, said = "excluded", f"torch's own tracing: {said}"
        outcomes[k] = Outcome(state, how, said or found.fell, found.fell)
    return outcomes


@dataclass(frozen=True)
class _Found:
    """What compiled programs gave: results by program, who computes each, and why the graph fell back, if it did."""

    results: list[tuple[Tensor | None, ...]]
    how: list[str]
    fell: str


def _compiled(programs: Sequence[Program], dynamic: bool, gradients: bool) -> _Found:
    run, args = joined(programs)
    tilewright.reset()
    compiled = torch.compile(run, backend=tilewright.backend, dynamic=dynamic, options=dict(OPTIONS))
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flat, counts = _pulled(compiled, args, gradients)
    graphs = tilewright.compilations()
    fallen = [str(g.coverage) for g in graphs if not g.kernels and tilewright.stats().fallbacks]
    fell = fallen[0] if fallen else ""
    results, pulls = iter(flat[: sum(counts)]), iter(flat[sum(counts) :])
    parts: list[tuple[Tensor | None, ...]] = []
    for p, n in zip(programs, counts, strict=True):
        own = [next(results) for _ in range(n)]
        parts.append((*own, *(next(pulls) for t in p.tensors if gradients and t.requires_grad)))
    return _Found(parts, _ways(graphs, counts), fell)


def _ways(graphs: Sequence[Any], counts: Sequence[int]) -> list[str]:
    """Who computes each program: read off the graph from its results back, where there is one graph with calls."""
    called = [g for g in graphs if g.coverage.need or g.coverage.choice]
    if not called:
        return ["generated"] * len(counts)
    worst = "library" if any(g.coverage.need for g in called) else "chosen"
    if len(graphs) != 1 or len(counts) == 1 or graphs[0].kind != "inference":
        return [worst] * len(counts)
    cover = next((p.result for p in graphs[0].trace.phases if p.name == "partition"), None)
    if not isinstance(cover, Cover) or len(cover.graph.outputs) != sum(counts):
        return [worst] * len(counts)
    ranks = _ranks(cover)
    words = ("generated", "chosen", "library")
    ends = iter(cover.graph.outputs)
    return [words[max((ranks.get(next(ends), 0) for _ in range(n)), default=0)] for n in counts]


def _ranks(cover: Cover) -> dict[object, int]:
    """Of each value: 0 if kernels alone make it, 1 with library calls by choice, 2 with calls by need."""
    ranks: dict[object, int] = {}
    for op in cover.graph.ops:
        own = 0
        if op.call is not None and not op.call.own:
            own = 1 if op.call.reason in ("contraction", "convolution", "attention") else 2
        rank = max([own, *(ranks.get(v, 0) for v in op.inputs)])
        ranks |= dict.fromkeys(op.outputs, rank)
    for step in cover.steps:
        if isinstance(step, LibraryStep) and step.choice:
            for v in step.op.outputs:
                ranks[v] = max(1, ranks.get(v, 0))
    return ranks


def _difference(
    ours: Sequence[Tensor | None], want: Reference, promise: Callable[[], list[list[int]]] | None = None
) -> str:
    """What is wrong with results; empty if nothing is. Strides are judged if there is a `promise` of torch's."""
    if len(ours) != len(want.eager):
        return f"{len(ours)} results, eager {len(want.eager)}"
    for k, (y, e, r) in enumerate(zip(ours, want.eager, want.exact, strict=True)):
        if y is None or e is None:
            if y is not e and not (e is None and y is not None and not y.any()):
                return f"result {k}: {'none' if y is None else 'one'} where eager has {'none' if e is None else 'one'}"
            continue
        if want.draws and not torch.equal(y, e) and e.shape == y.shape and e.dtype == y.dtype:
            return f"result {k}: other random numbers"
        verdict = compare(y, e, e if r is None or want.draws else r)
        if not verdict.passed:
            return f"result {k}: {verdict}"
        if promise is not None and strides(y) != strides(e) and strides(y) not in promise()[k : k + 1]:
            return f"result {k} of {list(e.shape)}: strides {y.stride()}, eager {e.stride()}"
    return ""


def _failure(p: Program, failed: Exception, dynamic: bool, gradients: bool) -> Outcome:
    """What an exception means: torch's own, if its tracing fails without us, else a crash of ours."""
    blame(failed)
    try:
        _in_torch(p, dynamic, gradients)
    except Exception as theirs:  # noqa: BLE001
        return Outcome("excluded", said=f"torch's own tracing: {_line(theirs)}")
    return Outcome("crashed", said=_line(failed))


def _in_torch(p: Program, dynamic: bool, gradients: bool) -> tuple[Tensor | None, ...]:
    run, args = joined([p])
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        return _pulled(torch.compile(run, backend="aot_eager", dynamic=dynamic), args, gradients)[0]


def _same_in_torch(p: Program, want: Reference, dynamic: bool, gradients: bool) -> bool:
    """Whether torch's tracing alone already gives another result than eager."""
    try:
        return bool(_difference(_in_torch(p, dynamic, gradients), want, list))
    except Exception:  # noqa: BLE001
        return True


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
