"""The fp64 rule: whether a result is as good as eager's, measured against the same program in float64.

`y` is the result under test, `e` eager's, `r` the same program's in float64 from the same inputs. For every
output tensor, with u the unit roundoff of its dtype:

(a) NaN and each infinity stand at the same places in y and e;
(b) RMS(y - r) <= k RMS(e - r) + u RMS(r);
(c) |y - r| <= k (Q + u |r|) + u RMS(r) for each element, Q the 99.9 % quantile of |e - r|.

k is 2, and 3 for half types; in (c) it is multiplied by eager's own k where that exceeds 1: the smallest k
with which e itself fulfils (c). Where few elements carry the error, as in a sharp softmax (most results are
nearly 0 and nearly exact) or a map of detections, Q says nothing of those few, and eager, compared with
itself, would need a k of thousands. So a result may err k times as much as eager's worst element, measured
by the same yardstick. (b) needs no such factor, since e fulfils it with k = 1. The smallest k that a result
needs and eager's own are part of the verdict.

Two exceptions to (a), where eager overflowed on the way and r is finite: y may be finite too (then (c) binds
it), or the infinity that r is in the dtype; never the reverse. Integers and bools equal eager's, except where a
near tie decided or they are those of float64; these are counted.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map

QUANTILE = 0.999
FLOAT64_ULPS = 16.0
"""A float64 output has no wider reference: eager's own error is taken to be this many u RMS(r)."""

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Deciding:
    """The floats behind an integer output: eager's, those of float64, and how far apart the candidates lie.

    `gap` has the output's shape: in float64, the distance between the floats at our choice and at eager's.
    """

    eager: Tensor
    reference: Tensor
    gap: Tensor


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the rule says of one output tensor; prints as one line."""

    passed: bool
    reason: str
    """Why it failed; empty where it passed."""
    k: float
    smallest_k: float
    """The smallest k with which (b) and (c) hold; infinite where no k helps."""
    elements: int
    worst_element: tuple[int, ...] | None
    """Where (c) is tightest (floats), or the first difference (integers); None if there is none."""
    worst_values: tuple[float, float, float] | None
    """y, e and r at that element."""
    rms_ours: float = 0.0
    rms_eager: float = 0.0
    rescued: int = 0
    """Elements where eager overflowed and y, like r, is finite."""
    near_ties: int = 0
    """Integer elements that differ from eager's because a near tie decided."""
    eager_k: float = 0.0
    """The smallest k that eager itself needs in (c); above 1 it multiplies `k` there."""
    rms_k: float = 0.0
    """The smallest k with which (b) holds."""

    @property
    def relative_k(self) -> float:
        """`smallest_k` in units of what eager needs: floats pass if it is at most `k`."""
        return max(self.rms_k, self.smallest_k / max(1.0, self.eager_k))

    def __str__(self) -> str:
        """`PASS smallest k 0.98 of 2 (rms error 1.1e-07, eager 1.2e-07, 4096 elements)`.

        `of 2 x eager's 2.41` where eager itself needs more than 1.
        """
        text = f"{'PASS' if self.passed else 'FAIL'} smallest k {self.smallest_k:.3g} of {self.k:g}"
        text += f" x eager's {self.eager_k:.3g}" if self.eager_k > 1 else ""
        text += f" (rms error {self.rms_ours:.2g}, eager {self.rms_eager:.2g}, {self.elements} elements"
        text += f", {self.rescued} finite where eager overflows" if self.rescued else ""
        text += f", {self.near_ties} near ties" if self.near_ties else ""
        text += ")"
        if not self.passed:
            text += f": {self.reason}"
            if self.worst_element is not None and self.worst_values is not None:
                ours, eager, exact = self.worst_values
                text += (
                    f"; at {list(self.worst_element)} ours {ours:.9g}, eager {eager:.9g}, fp64 {exact:.9g}"
                )
        return text


@dataclass(frozen=True, slots=True)
class TreeVerdict:
    """What the rule says of all of a result: one `Verdict` per leaf, by its path."""

    leaves: tuple[tuple[str, Verdict], ...]

    @property
    def passed(self) -> bool:
        """Whether every leaf passed."""
        return all(verdict.passed for _, verdict in self.leaves)

    @property
    def smallest_k(self) -> float:
        """The largest of the leaves' smallest k."""
        return max((verdict.smallest_k for _, verdict in self.leaves), default=0.0)

    @property
    def eager_k(self) -> float:
        """The largest of the leaves' eager_k."""
        return max((verdict.eager_k for _, verdict in self.leaves), default=0.0)

    @property
    def relative_k(self) -> float:
        """The largest of the leaves' relative_k."""
        return max((verdict.relative_k for _, verdict in self.leaves), default=0.0)

    def __str__(self) -> str:
        """One line per leaf."""
        return "\n".join(f"{path or 'output'}: {verdict}" for path, verdict in self.leaves)


def default_k(dtype: torch.dtype) -> float:
    """3 for half types, else 2."""
    return 3.0 if dtype in (torch.float16, torch.bfloat16) else 2.0


def compare(
    y: Tensor, e: Tensor, r: Tensor, *, k: float | None = None, deciding: Deciding | None = None
) -> Verdict:
    """Compare one tensor. Shapes must agree, and the dtypes of `y` and `e`; `r` is float64 or y's integers.

    `k` overrides the default of the dtype. `deciding` names the floats behind an integer output; without it a
    difference counts as a near tie only where the float64 program sides with y, so that eager itself erred.
    """
    k = default_k(e.dtype) if k is None else k
    if y.shape != e.shape or r.shape != e.shape:
        return _refuse(y, k, f"shape {list(y.shape)}, eager {list(e.shape)}, fp64 {list(r.shape)}")
    if y.dtype != e.dtype:
        return _refuse(y, k, f"dtype {y.dtype}, eager {e.dtype}")
    y, e, r = (t.detach().cpu() for t in (y, e, r))
    if e.dtype.is_complex:
        y, e, r = (torch.view_as_real(t.resolve_conj()) for t in (y, e, r))
    if e.dtype.is_floating_point:
        return _compare_floats(y, e, r.double(), k)
    return _compare_exact(y, e, r, k, deciding)


def compare_trees(y: object, e: object, r: object, *, k: float | None = None) -> TreeVerdict:
    """Compare nested tuples, lists, dicts and registered classes leaf by leaf; leaves that are no tensors too.

    Numbers are compared as tensors without dims (floats as float32), anything else must be equal.
    """
    ours, eager, exact = (_leaves(tree) for tree in (y, e, r))
    paths = [[path for path, _ in leaves] for leaves in (ours, eager, exact)]
    if paths[0] != paths[1] or paths[2] != paths[1]:
        reason = f"structure {paths[0]}, eager {paths[1]}, fp64 {paths[2]}"
        return TreeVerdict((("", _refuse(torch.empty(0), k or 2.0, reason)),))
    verdicts: list[tuple[str, Verdict]] = []
    for (path, a), (_, b), (_, c) in zip(ours, eager, exact, strict=True):
        tensors = [_as_tensor(leaf) for leaf in (a, b, c)]
        if all(t is None for t in tensors):
            same = a == b
            verdicts.append(
                (path, Verdict(same, "" if same else f"{a!r}, eager {b!r}", k or 2.0, 0.0, 1, None, None))
            )
        elif any(t is None for t in tensors):
            verdicts.append(
                (path, _refuse(torch.empty(0), k or 2.0, f"{type(a).__name__}, eager {type(b).__name__}"))
            )
        else:
            ty, te, tr = (t for t in tensors if t is not None)
            verdicts.append((path, compare(ty, te, tr, k=k)))
    return TreeVerdict(tuple(verdicts))


def _leaves(tree: object) -> list[tuple[str, object]]:
    return [(keystr(path), leaf) for path, leaf in tree_flatten_with_path(tree)[0]]


def _as_tensor(leaf: object) -> Tensor | None:
    if isinstance(leaf, Tensor):
        return leaf
    if isinstance(leaf, bool | int):
        return torch.tensor(leaf)
    return torch.tensor(leaf, dtype=torch.float32) if isinstance(leaf, float) else None


def _refuse(y: Tensor, k: float, reason: str) -> Verdict:
    return Verdict(False, reason, k, math.inf, y.numel(), None, None)


def _place(flat: int, shape: torch.Size) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), shape))


def _compare_floats(y: Tensor, e: Tensor, r: Tensor, k: float) -> Verdict:
    wide_y, wide_e = y.double().reshape(-1), e.double().reshape(-1)
    flat_r = r.reshape(-1)
    finite_y, finite_e = wide_y.isfinite(), wide_e.isfinite()
    rescued = finite_y & ~finite_e & flat_r.isfinite()
    beyond = wide_y.isinf() & wide_e.isnan() & flat_r.isfinite() & (wide_y == flat_r.to(e.dtype).double())
    same = finite_y & finite_e | rescued | beyond | (wide_y == wide_e) | (wide_y.isnan() & wide_e.isnan())

    def at(i: int) -> tuple[tuple[int, ...], tuple[float, float, float]]:
        return _place(i, e.shape), (float(wide_y[i]), float(wide_e[i]), float(flat_r[i]))

    if not bool(same.all()):
        where, values = at(int((~same).int().argmax()))
        reason = f"{int((~same).sum())} elements where NaN or infinity stand differently"
        return Verdict(False, reason, k, math.inf, e.numel(), where, values, rescued=int(rescued.sum()))
    compared = finite_y & (finite_e | rescued)
    if not bool(compared.any()):
        return Verdict(True, "", k, 0.0, e.numel(), None, None)
    # Where r is not finite although y and e are, it says nothing: eager stands in for it.
    exact = torch.where(flat_r.isfinite(), flat_r, wide_e)
    numbers = _smallest_k(wide_y, wide_e, exact, compared, compared & finite_e, e.dtype)
    where, values = at(numbers.worst)
    verdict = Verdict(
        passed=True,
        reason="",
        k=k,
        smallest_k=max(numbers.by_rms, numbers.by_element),
        elements=e.numel(),
        worst_element=where,
        worst_values=values,
        rms_ours=numbers.rms_ours,
        rms_eager=numbers.rms_eager,
        rescued=int(rescued.sum()),
        eager_k=numbers.eager_k,
        rms_k=numbers.by_rms,
    )
    if verdict.relative_k <= k:
        return verdict
    by = f"{numbers.by_rms:.3g} by its rms error"
    if numbers.by_rms < verdict.relative_k:
        by = f"{numbers.by_element:.3g} by one element"
    return replace(verdict, passed=False, reason=f"smallest k is {by}")


@dataclass(frozen=True, slots=True)
class _Numbers:
    by_rms: float
    by_element: float
    eager_k: float
    worst: int
    rms_ours: float
    rms_eager: float


def _smallest_k(
    y: Tensor, e: Tensor, r: Tensor, compared: Tensor, trusted: Tensor, dtype: torch.dtype
) -> _Numbers:
    """The smallest k of (b) and of (c) over flat float64 tensors, on the elements `compared`, and eager's of (c).

    Eager's error is taken over `trusted`, the elements where eager is finite. `dtype` is the type that was computed in.
    """
    u = torch.finfo(dtype).eps / 2
    ours, exact = (y - r)[compared].abs(), r[compared].abs()
    eager = (e - r)[trusted].abs()
    size = _rms(exact)
    noise, quantile = _rms(eager), _quantile(eager)
    if dtype == torch.float64:
        noise, quantile = max(noise, FLOAT64_ULPS * u * size), max(quantile, FLOAT64_ULPS * u * size)
    eager_room = u * r[trusted].abs()
    unmeasured = (eager > u * size) & (quantile + eager_room == 0)
    if bool(unmeasured.any()):  # Q is 0, and so is r where eager errs: the least such error stands for Q
        quantile = float(eager[unmeasured].min())
    eager_k = _worst(eager, quantile + eager_room, u * size)[0]
    by_element, worst = _worst(ours, quantile + u * exact, u * size)
    by_rms = _ratio(_rms(ours) - u * size, noise)
    index = int(compared.nonzero()[worst])
    return _Numbers(by_rms, by_element, eager_k, index, _rms(ours), _rms(eager))


def _worst(error: Tensor, room: Tensor, free: float) -> tuple[float, int]:
    """The largest (error - free) / room, at least 0, and where it is; the largest error where all are free."""
    if not error.numel():
        return 0.0, 0
    excess = error - free
    ratios = torch.where(excess <= 0, torch.zeros_like(excess), excess / room)  # excess / 0 is infinite
    top = float(ratios.max())
    return top, int(ratios.argmax()) if top > 0 else int(error.argmax())


def _rms(x: Tensor) -> float:
    """Root mean square, scaled so that squares neither overflow nor vanish."""
    top = float(x.max()) if x.numel() else 0.0
    return top * float((x / top).square().mean().sqrt()) if top > 0 else 0.0


def _quantile(x: Tensor) -> float:
    """The smallest value that at least QUANTILE of the elements do not exceed."""
    return float(x.kthvalue(math.ceil(QUANTILE * x.numel())).values) if x.numel() else 0.0


def _ratio(excess: float, room: float) -> float:
    if excess <= 0:
        return 0.0
    return excess / room if room > 0 else math.inf


def _compare_exact(y: Tensor, e: Tensor, r: Tensor, k: float, deciding: Deciding | None) -> Verdict:
    differs = (y != e).reshape(-1)
    if not bool(differs.any()):
        return Verdict(True, "", k, 0.0, e.numel(), None, None)
    excused = differs & (y == r).reshape(-1)
    if deciding is not None:
        excused |= differs & _near_ties(deciding, k).to(differs.device).reshape(-1)
    wrong = differs & ~excused
    first = int((wrong if bool(wrong.any()) else differs).int().argmax())
    values = tuple(float(t.reshape(-1)[first]) for t in (y, e, r))
    count = int(wrong.sum())
    return Verdict(
        passed=count == 0,
        reason=f"{count} integers differ from eager's" if count else "",
        k=k,
        smallest_k=math.inf if count else 0.0,
        elements=e.numel(),
        worst_element=_place(first, e.shape),
        worst_values=(values[0], values[1], values[2]),
        near_ties=int(excused.sum()),
    )


def _near_ties(deciding: Deciding, k: float) -> Tensor:
    """Where the gap between the candidates is within what (c) grants at the largest deciding float."""
    u = torch.finfo(deciding.eager.dtype).eps / 2
    r = deciding.reference.detach().double().reshape(-1)
    error = (deciding.eager.detach().double().reshape(-1) - r).abs()
    error, r = error[error.isfinite()], r[r.isfinite()].abs()
    bound = k * (_quantile(error) + u * (float(r.max()) if r.numel() else 0.0)) + u * _rms(r)
    return deciding.gap.detach().double().abs() <= bound


# The same program in float64.


_STRICT_CALLS = frozenset(
    {torch.conv1d, torch.conv2d, torch.conv3d, torch.conv_transpose1d, torch.conv_transpose2d}
    | {torch.conv_transpose3d, torch.prelu, torch.bilinear}
)
"""Functions that compare the dtypes of their arguments before the dispatcher sees them."""


def _grouped_product(a: Tensor, b: Tensor, offs: Tensor | None = None, *_: object, **__: object) -> Tensor:
    """Products group by group; groups end at `offs` along rows of a, columns of b, or what both sum over."""
    if offs is None:
        return torch.bmm(a, b)
    ends = [0, *(int(end) for end in offs)]
    groups = [slice(start, end) for start, end in zip(ends, ends[1:], strict=False)]
    if a.dim() == b.dim() == 2:
        return torch.stack([a[:, g] @ b[g] for g in groups])
    if a.dim() == 2:
        parts, rest = [a[g] @ m for g, m in zip(groups, b, strict=True)], a.shape[0] - ends[-1]
        return torch.cat([*parts, a.new_zeros(rest, b.shape[2])])
    parts, rest = [m @ b[:, g] for g, m in zip(groups, a, strict=True)], b.shape[1] - ends[-1]
    return torch.cat([*parts, a.new_zeros(a.shape[1], rest)], 1)


_WITHOUT_FLOAT64: dict[object, Callable[..., Tensor]] = {
    torch._grouped_mm: _grouped_product,  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
}
"""Functions that torch has no float64 kernel of, by others."""


class _WideCalls(TorchFunctionMode):
    """Widens the arguments of the functions that refuse mixed dtypes (they write into none of them) or float64."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        if func in _STRICT_CALLS or func in _WITHOUT_FLOAT64:
            args, kwargs = tree_map(_widened, args), tree_map(_widened, kwargs or {})
        return _WITHOUT_FLOAT64.get(func, func)(*args, **(kwargs or {}))


def _run_in(mode: TorchDispatchMode, function: Callable[..., object], *args: object) -> object:
    with mode:
        return function(*args)


class _Wide(TorchDispatchMode):
    """Runs every op on float64 in place of narrower floats: arguments, requested dtypes and results; and what loops
    and branches of a program run."""

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self,
        func: torch._ops.OperatorBase,  # pyright: ignore[reportPrivateUsage]
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        narrow: list[tuple[Tensor, Tensor]] = []

        def widen(x: object) -> object:
            if isinstance(x, torch.dtype) and x.is_floating_point:
                return torch.float64
            if isinstance(x, Tensor) and x.dtype.is_floating_point and x.dtype != torch.float64:
                narrow.append((x, x.double()))
                return narrow[-1][1]
            # A mode is off while it handles an op: the functions that a loop or a branch takes run in it again.
            return partial(_run_in, self, x) if callable(x) and isinstance(func, HigherOrderOperator) else x

        wide_args, wide_kwargs = tree_map(widen, args), tree_map(widen, kwargs or {})
        result = func(*wide_args, **wide_kwargs)
        if isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:  # pyright: ignore[reportPrivateUsage]
            for original, wide in narrow:
                original.copy_(wide)
        return tree_map(widen, result)


@contextlib.contextmanager
def float64_mode() -> Generator[None]:
    """Within it, eager torch computes in float64 wherever the program says float32 or a half type.

    Torch's default dtype is float64 meanwhile, in which functions of integers are computed. Forward only: autograd
    casts a gradient back to the dtype of its variable. Library ops without a float64 kernel fail with torch's own
    error.
    """
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad(), _WideCalls(), _Wide():
            yield
    finally:
        torch.set_default_dtype(usual)


def in_float64(function: Callable[P, R]) -> Callable[P, R]:
    """The same program in float64: its tensors, weights and casts widened; inputs are rounded nowhere.

    A call of a module runs a copy of it whose parameters, buffers and other tensors are float64 (integers stay),
    so that nothing it writes is seen outside; while it runs, that copy takes twice the bytes of float32 weights.
    A module that cannot be copied runs itself, and a function too: their ops are widened one by one.
    """

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        program = _wide_copy(function) if isinstance(function, nn.Module) else function
        with float64_mode():
            # Widened copies: what the program writes into its inputs is not rounded, nor seen outside.
            wide_args, wide_kwargs = tree_map(_copied, args), tree_map(_copied, kwargs)
            return program(*wide_args, **wide_kwargs)  # pyright: ignore[reportCallIssue]

    return run


def _wide_copy(module: nn.Module) -> nn.Module:
    """A deep copy with float64 for every narrower float; tensors that are shared stay shared."""
    made: dict[int, object] = {}
    for part in module.modules():
        for tensor in tree_leaves(vars(part)):
            if isinstance(tensor, Tensor) and not is_lazy(tensor) and id(tensor) not in made:
                copied = _wide_tensor(tensor.detach())
                weight = isinstance(tensor, nn.Parameter)
                made[id(tensor)] = nn.Parameter(copied, requires_grad=False) if weight else copied
    try:
        return copy.deepcopy(module, made)
    except TypeError:  # it holds a lock, a file, a generator
        return module


def _widened(x: object) -> object:
    return x.double() if isinstance(x, Tensor) and x.dtype.is_floating_point else x


def _copied(x: object) -> object:
    return _wide_tensor(x) if isinstance(x, Tensor) else x


def _wide_tensor(x: Tensor) -> Tensor:
    """A copy, in float64 if it holds floats."""
    return x.to(torch.float64, copy=True) if x.dtype.is_floating_point else x.clone()
