"""One program, trained for a step by the compiler, by eager and in float64: each result, gradient and buffer judged."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import tilewright
from benchmarks.gradients.program import Program, drawn
from benchmarks.gradients.variants import LAYOUTS, PRECISIONS, Precision
from benchmarks.promises import blame, promised, settle, strides
from tilewright.accuracy import compare

BATCHES = (4, 6)
"""The sizes of a batch that may change; the first is that of one that may not."""
SEEDS = 8
"""Draws that are judged as one where the first fails: of a few elements, eager's error is a matter of luck."""

Named = dict[str, Tensor | None]


@dataclass(frozen=True)
class Outcome:
    """How a program went in one layout: right, wrong, crashed, refused (as captured) or excluded (torch's own)."""

    state: str
    said: str = ""


@dataclass(frozen=True)
class Case:
    """A program in one precision, with a batch that may change or not, on a device, in some layouts."""

    program: Program
    precision: Precision
    dynamic: bool
    device: str
    layouts: tuple[str, ...] = tuple(LAYOUTS)

    def only(self, layout: str) -> Case:
        """The same in one layout."""
        return Case(self.program, self.precision, self.dynamic, self.device, (layout,))

    @property
    def batches(self) -> tuple[int, ...]:
        """Sizes of the batches that are run, in order."""
        return BATCHES if self.dynamic else BATCHES[:1]


class Side(nn.Module):
    """Copies of a module, each with inputs of its own."""

    def __init__(self, copies: Sequence[nn.Module]) -> None:
        super().__init__()
        self.copies = nn.ModuleList(copies)

    def forward(self, inputs: Sequence[Sequence[Tensor]]) -> list[object]:
        """The result of each copy."""
        return [module(*given) for module, given in zip(self.copies, inputs, strict=True)]


def modules(case: Case) -> Side:
    """The program's module, once per layout, from a fixed seed."""
    torch.manual_seed(0)
    made = case.program.make()
    return Side([copy.deepcopy(made) for _ in case.layouts]).to(case.device)


def inputs(case: Case, batch: int, seed: int) -> list[list[Tensor]]:
    """The inputs of each copy."""
    draw = torch.Generator().manual_seed(seed)
    plain = [drawn(spec, batch, draw).to(case.device) for spec in case.program.inputs]
    return [[LAYOUTS[name](t) for t in plain] for name in case.layouts]


def _leaf(t: Tensor, wide: bool) -> Tensor:
    """A tensor to differentiate by, at the same strides; in float64 a dense one."""
    if not t.is_floating_point():
        return t
    return (t.double() if wide else t.detach()).requires_grad_()


def _cotangents(ends: Sequence[Tensor], scale: float) -> list[Tensor]:
    found: list[Tensor] = []
    for t in ends:
        draw = torch.Generator().manual_seed(1 + t.numel())
        found.append((torch.randint(-8, 9, t.shape, generator=draw) / 8 * scale).to(t.device, t.dtype))
    return found


def step(
    case: Case, side: Side, call: Callable[..., list[object]], batch: int, seed: int, *, wide: bool = False
) -> list[Named]:
    """One training step: results, gradients and buffers of each copy by name."""
    given = [[_leaf(t, wide) for t in xs] for xs in inputs(case, batch, seed)]
    if case.dynamic and not wide:
        _mark(case.program, given)
    drive, scale = case.program.drive, 1.0 if wide else case.precision.scale
    flat = _flat_gradients(side) if drive == "flat" else None
    results: list[object] = []
    for _ in range(2 if drive == "accumulate" else 1):
        if wide:
            results = call(given)
        else:
            with case.precision.around(case.device):
                results = call(given)
        ends = [t for t in tree_leaves(results) if isinstance(t, Tensor) and t.requires_grad]
        for again in (True, False) if drive == "retain" else (False,):
            torch.autograd.backward(ends, _cotangents(ends, scale), retain_graph=again)
    if flat is not None:
        _check_flat(side, flat)
    return [_facts(m, xs, r, scale) for m, xs, r in zip(side.copies, given, results, strict=True)]


def _mark(program: Program, given: Sequence[Sequence[Tensor]]) -> None:
    for xs in given:
        for spec, t in zip(program.inputs, xs, strict=True):
            if spec.startswith("B"):
                torch._dynamo.maybe_mark_dynamic(t, 0)


def _flat_gradients(side: Side) -> Tensor:
    """One buffer of which every gradient is a view, as data-parallel training keeps them."""
    weights = list(side.parameters())
    flat = torch.zeros(sum(p.numel() for p in weights), device=weights[0].device, dtype=weights[0].dtype)
    for p, part in zip(weights, flat.split([p.numel() for p in weights]), strict=True):
        p.grad = part.view_as(p)
    return flat


def _check_flat(side: Side, flat: Tensor) -> None:
    end = flat.data_ptr() + flat.numel() * flat.element_size()
    for p in side.parameters():
        if p.grad is None or not flat.data_ptr() <= p.grad.data_ptr() < end:
            raise AssertionError("a gradient left the buffer that it was given")


def _facts(module: nn.Module, given: Sequence[Tensor], result: object, scale: float) -> Named:
    leaves = tree_leaves(result)
    found: Named = {f"result {k}": t.detach() for k, t in enumerate(leaves) if isinstance(t, Tensor)}
    grads = [(f"input {k}", t) for k, t in enumerate(given)] + list(module.named_parameters())
    for name, t in grads:
        grad = t.grad if t.requires_grad else None
        found[f"gradient of {name}"] = None if grad is None else grad.detach().clone() / scale
    found |= {f"buffer {name}": t.detach().clone() for name, t in module.named_buffers()}
    return found


@contextmanager
def _double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Trial:
    """A case under way: three copies of its modules, and the compiled one."""

    def __init__(self, case: Case, backend: str = "tilewright") -> None:
        self.case = case
        self.ours, self.eager = modules(case), modules(case)
        self.exact = modules(case).double()
        self.start = copy.deepcopy(self.ours.state_dict())
        torch._dynamo.reset()
        options = {"options": {"measure": False}} if backend == "tilewright" else {}
        named: object = tilewright.backend if backend == "tilewright" else backend
        self.compiled = torch.compile(self.ours, backend=named, **options)

    def run(self, seed: int) -> list[list[tuple[Named, Named, Named]]]:
        """Steps from the start with inputs of a seed: by batch and copy, what the three have."""
        for side in (self.ours, self.eager, self.exact):
            side.load_state_dict(self.start)
            side.zero_grad()
        found: list[list[tuple[Named, Named, Named]]] = []
        for batch in self.case.batches:
            try:  # first: an error that it leaves on the device would be raised by our step
                e = step(self.case, self.eager, self.eager, batch, seed)
                settle()
            except RuntimeError as failed:
                blame(failed, "eager")
                raise
            y = step(self.case, self.ours, self.compiled, batch, seed)
            settle()
            with _double():
                r = step(self.case, self.exact, self.exact, batch, seed, wide=True)
            found.append(list(zip(y, e, r, strict=True)))
        return found

    def judge(self) -> list[str]:
        """What is wrong with each copy; empty where nothing is."""
        first = self.run(0)
        said = _said(self.case, [first])
        if any(said) and not any(_plain(s) for s in said):
            said = _said(self.case, [first, *(self.run(seed) for seed in range(1, SEEDS))])
        for n, batch in enumerate(self.case.batches):
            for k, (ours, eager, _) in enumerate(first[n]):
                said[k] = said[k] or _misplaced(self.case, k, batch, ours, eager)
        return said


def _plain(said: str) -> bool:
    """Whether a finding is no matter of rounding."""
    return bool(said) and "FAIL" not in said


def _said(case: Case, runs: Sequence[Sequence[Sequence[tuple[Named, Named, Named]]]]) -> list[str]:
    said = ["" for _ in case.layouts]
    for n, batch in enumerate(case.batches):
        for k in range(len(case.layouts)):
            said[k] = said[k] or _wrong([run[n][k] for run in runs], case.precision, f"batch {batch}: ")
    return said


def _wrong(draws: Sequence[tuple[Named, Named, Named]], precision: Precision, where: str) -> str:
    """The first thing that is wrong in some draws of one copy."""
    first = draws[0]
    if set(first[0]) != set(first[1]):
        return f"{where}results {sorted(first[0])}, eager {sorted(first[1])}"
    for name in first[1]:
        ours, eager, exact = ([d[i][name] for d in draws] for i in range(3))
        if any((y is None) != (e is None) for y, e in zip(ours, eager, strict=True)):
            return f"{where}{name}: {'none' if ours[0] is None else 'one'} where eager has another"
        y, e, r = (_stacked(ts) for ts in (ours, eager, exact))
        if y is None or e is None:
            continue
        verdict = compare(y, e, e if r is None or r.shape != e.shape else r, k=precision.k)
        if not verdict.passed:
            return f"{where}{name}: {verdict}"
    return ""


def _misplaced(case: Case, place: int, batch: int, ours: Named, eager: Named) -> str:
    """Whose strides are neither eager's nor those that torch promises, of the results of one copy."""
    for k in range(len(eager)):
        y, e = ours.get(f"result {k}"), eager.get(f"result {k}")
        if y is None or e is None or strides(y) == strides(e):
            continue
        given = [_leaf(t, wide=False) for t in inputs(case, batch, 0)[place]]
        with case.precision.around(case.device):
            promise = promised(modules(case).copies[place], *given)
        if strides(y) not in promise[k : k + 1]:
            return f"batch {batch}: result {k}: strides {y.stride()}, eager {e.stride()}"
    return ""


def _stacked(tensors: Sequence[Tensor | None]) -> Tensor | None:
    held = [t for t in tensors if t is not None]
    if not held or len({(t.shape, t.dtype) for t in held}) > 1:
        return held[0] if held else None
    return torch.stack(held)


def judged(case: Case) -> Mapping[str, Outcome]:
    """Judge a case; outcomes by layout."""
    tilewright.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            said = Trial(case).judge()
        except Exception as failed:  # noqa: BLE001  every failure is a finding
            blame(failed)
            if len(case.layouts) > 1:
                return {k: v for name in case.layouts for k, v in judged(case.only(name)).items()}
            return {case.layouts[0]: _failure(case, failed)}
        fell = [str(g.coverage) for g in tilewright.compilations() if not g.kernels]
        fell = fell if tilewright.stats().fallbacks else []
        if fell and len(case.layouts) > 1:
            return {k: v for name in case.layouts for k, v in judged(case.only(name)).items()}
        found: dict[str, Outcome] = {}
        for name, text in zip(case.layouts, said, strict=True):
            state = "wrong" if text else "refused" if fell else "right"
            if text and _in_torch(case.only(name)):
                state, text = "excluded", f"torch's own tracing: {text}"
            found[name] = Outcome(state, text or (fell[0] if fell else ""))
        return found


def _in_torch(case: Case) -> str:
    """What is wrong with torch's tracing alone; empty if nothing is."""
    try:
        return "".join(Trial(case, "aot_eager").judge())
    except Exception as theirs:  # noqa: BLE001
        return f"{_line(theirs)}"


def _failure(case: Case, failed: Exception) -> Outcome:
    theirs = _in_torch(case)
    if theirs:
        return Outcome("excluded", f"torch's own tracing: {theirs}")
    return Outcome("crashed", _line(failed))


def _line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


__all__ = ["PRECISIONS", "Case", "Outcome", "judged"]
