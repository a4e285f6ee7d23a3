"""Which composites torch takes apart before capture: those of core ATen, without the ones that have a declaration."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._C import (  # pyright: ignore[reportPrivateImportUsage]
    DispatchKey,
    _dispatch_get_registrations_for_dispatch_key,  # pyright: ignore[reportPrivateUsage]
)
from torch._decomp import core_aten_decompositions
from torch._decomp.decompositions import upsample_compute_output_size
from torch._dispatch.python import no_python_dispatcher
from torch._ops import OperatorBase, OpOverload
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, get_computation_dtype, suggest_memory_format
from torch._prims_common.wrappers import elementwise_type_promotion_wrapper

from tilewright.capture.torch_declarations import keep_declarations

from .foreach import foreach_decompositions, free_number_decompositions
from .promises import promise_decompositions
from .registry import TABLE
from .whole_windows import multiply_whole_windows

Decompositions = dict[OperatorBase, Callable[..., object]]

_NOT_KEPT = ("aten.view.dtype", "aten.reshape.default", "aten.contiguous.default", "aten.to.dtype")


_OF_THE_LIBRARY = (torch.ops.aten.embedding_dense_backward.default,)
"""Composites that torch takes apart into something slower than its own kernel: sums at repeated indices, one by one."""


_NUMBERS_OF_THEIR_OWN = (torch.ops.aten.bernoulli.default,)
"""Composites that draw other numbers than their parts do: on a GPU, not those that eager draws."""


_STRIDES_OF_THEIR_OWN = (torch.ops.aten.index_add.default, torch.ops.aten.index_copy.default)
"""Composites whose parts leave the result as its operand lies; the op's own kernel makes it row-major, and the program
goes on with that."""


_COUNTED_FROM_THE_END = ("index_fill", "index_fill_")
"""Composites that take negative indices, which the op that torch makes of them (index_copy) refuses."""


def decompositions() -> Decompositions:
    """The table for AOTAutograd and `ExportedProgram.run_decompositions`: core ATen, minus what has a declaration. Who
    asks for it traces next, and is to find torch's declarations put right."""
    keep_declarations()
    known = _dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
    return _decompositions(tuple(known), len(TABLE)).copy()


@lru_cache(1)
def _decompositions(known: tuple[str, ...], declared: int) -> Decompositions:
    """The table, given the composites that torch knows by now: asking torch for it takes as long as to compile a small
    graph."""
    table = core_aten_decompositions()
    for overload in TABLE:
        if str(overload) not in _NOT_KEPT:
            table.pop(overload, None)
    for overload in (*_OF_THE_LIBRARY, *_NUMBERS_OF_THEIR_OWN, *_STRIDES_OF_THEIR_OWN):
        table.pop(overload, None)
    for name in _COUNTED_FROM_THE_END:
        packet = getattr(torch.ops.aten, name)
        for which in packet.overloads():
            table.pop(getattr(packet, which), None)
    ours: Decompositions = {
        torch.ops.aten.special_log_ndtr.default: _log_ndtr,
        torch.ops.aten.logit_backward.default: logit_backward,
        torch.ops.aten.soft_margin_loss_backward.default: _soft_margin_loss_backward,
        torch.ops.aten.multilabel_margin_loss_forward.default: _multilabel_margin_loss,
        torch.ops.aten.isin.Tensor_Tensor: _is_in(table[torch.ops.aten.isin.Tensor_Tensor]),
        torch.ops.aten._weight_norm_interface.default: _weight_norm,
        torch.ops.aten._weight_norm_interface_backward.default: _weight_norm_backward,
        torch.ops.aten.smooth_l1_loss.default: _smooth_l1_loss(table[torch.ops.aten.smooth_l1_loss.default]),
        **{op: also_of_nothing(table[op]) for op in MEANS_BACKWARD},
        torch.ops.aten.eye.default: _eye,
        torch.ops.aten.eye.m: _eye,
        torch.ops.aten.detach_.default: _itself,
        torch.ops.aten._neg_view.default: torch.neg,
        torch.ops.aten.convolution.default: multiply_whole_windows,
    }
    for name in ("default", "Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor"):
        overload = getattr(torch.ops.aten.linspace, name)
        ours[overload] = _linspace(table[overload])
    lists = foreach_decompositions() | free_number_decompositions()
    theirs = dict(table.items())
    return theirs | promise_decompositions(theirs) | lists | ours


@elementwise_type_promotion_wrapper(
    type_promoting_args=("a",), type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.INT_TO_FLOAT
)
def _log_ndtr(a: Tensor) -> Tensor:
    """log of the normal distribution function at `a`, split at -1 as in torch's kernels; torch's own parts are split
    at 1, and between the two their difference has a fraction of the digits."""
    t = a * math.sqrt(0.5)
    below = torch.log(torch.special.erfcx(-t) / 2) - t * t
    return torch.where(a < -1.0, below, torch.log1p(-torch.erfc(t) / 2))


@elementwise_type_promotion_wrapper(
    type_promoting_args=("gradient", "x"), type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT
)
def logit_backward(gradient: Tensor, x: Tensor, eps: float | None = None) -> Tensor:
    """As torch's kernels have it: an `eps` below 0 is none, and beyond 0 and 1 then lies no number. Torch's own parts
    take it to widen what is inside."""
    free = eps is None or eps < 0
    least = 0.0 if eps is None or eps < 0 else eps
    inside = (x >= least) & (x <= 1 - least)
    beyond = torch.full_like(gradient, math.nan) if free else torch.zeros_like(gradient)
    return torch.where(inside, gradient / (x * (1 - x)), beyond)


@elementwise_type_promotion_wrapper(
    type_promoting_args=("gradient", "x", "target"),
    type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT,
)
def _soft_margin_loss_backward(gradient: Tensor, x: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    """Torch's own parts have sigmoid(target * x) - 1, whose digits are gone where examples are classified well."""
    made = -target * gradient * torch.sigmoid(-target * x)
    return made / x.numel() if reduction == 1 else made


def _multilabel_margin_loss(x: Tensor, target: Tensor, reduction: int = 1) -> tuple[Tensor, Tensor]:
    """Loss of rows, and which classes are targets: those in front of a row's first -1. Torch's own parts let the places
    behind it count as targets of class 0.

    loss = sum over targets t and other classes c of max(0, 1 - x[t] + x[c]) / classes
    """
    if x.dim() > 2 or 0 in x.shape[-1:] or target.shape != x.shape:
        raise RuntimeError(f"multilabel_margin_loss: input of size {x.shape}, target of size {target.shape}")
    rows, labels = torch.atleast_2d(x), torch.atleast_2d(target)
    classes = rows.shape[1]
    named = (labels == -1).to(torch.int32).cumsum(1) == 0
    label = torch.where(named, labels, 0)
    numbers = torch.arange(classes, device=target.device)
    # [row, place of a label, class]
    is_target = ((label.unsqueeze(-1) == numbers) & named.unsqueeze(-1)).any(1)
    counts = named.unsqueeze(-1) & ~is_target.unsqueeze(1)
    margin = 1 - rows.gather(1, label).unsqueeze(-1) + rows.unsqueeze(1)
    losses = torch.where(counts, margin.clamp_min(0) / classes, 0).sum((1, 2))
    made = {0: losses if x.dim() == 2 else losses[0], 1: losses.mean(), 2: losses.sum()}[reduction]
    return made, is_target.to(x.dtype).reshape(target.shape)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    """g v / |v| with a norm for each place along `dim`, and the norms: of halves in singles, as the op's kernels have
    them. Torch's own parts have those of fp16 in fp16, which its backward kernel refuses."""
    wide = get_computation_dtype(g.dtype)
    others = [d for d in range(v.dim()) if d != dim % v.dim()]
    norm = torch.linalg.vector_norm(v, 2, others, keepdim=True, dtype=wide)
    return (v.to(wide) * (g.to(wide) / norm)).to(v.dtype), norm


def _weight_norm_backward(
    gradient: Tensor, v: Tensor, g: Tensor, norm: Tensor, dim: int
) -> tuple[Tensor, Tensor]:
    """Gradients of v and g: with s = sum of gradient v over all but `dim`,

    dv = g / |v| (gradient - v s / |v|^2),  dg = s / |v|
    """
    wide = get_computation_dtype(g.dtype)
    others = [d for d in range(v.dim()) if d != dim % v.dim()]
    dw, wide_v = gradient.to(wide), v.to(wide)
    sums = (dw * wide_v).sum(others, keepdim=True)
    dv = g.to(wide) / norm * (dw - wide_v * (sums / (norm * norm)))
    return dv.to(v.dtype), (sums / norm).to(g.dtype)


MEANS_BACKWARD: tuple[OpOverload, ...] = (
    torch.ops.aten.mse_loss_backward.default,
    torch.ops.aten.smooth_l1_loss_backward.default,
    torch.ops.aten.huber_loss_backward.default,
)
"""Gradients of losses whose parts, as torch has them, divide a number by how many elements there are."""


def also_of_nothing(parts: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Torch's own parts of a mean's gradient, for no elements those of a sum's: of both nothing is left, but the mean
    divides by zero while it is traced."""

    def gradient(dy: Tensor, x: Tensor, target: Tensor, reduction: int = 1, *how: float) -> Tensor:
        known = all(type(n) is int for n in x.shape)  # of a symbol nothing is asked
        return parts(dy, x, target, 2 if known and x.numel() == 0 else reduction, *how)

    return gradient


def _smooth_l1_loss(parts: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Torch's own parts, which go on where the op's kernel refuses."""

    def checked(a: Tensor, b: Tensor, reduction: int = 1, beta: float = 1.0) -> Tensor:
        if beta < 0:
            raise RuntimeError("smooth_l1_loss does not support negative values for beta.")
        return parts(a, b, reduction, beta)

    return checked


def _is_in(parts: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Torch's own parts, which look values up in a sorted list, without NaN, behind which no search finds anything; NaN
    is nowhere."""

    def found(x: Tensor, among: Tensor, *, assume_unique: bool = False, invert: bool = False) -> Tensor:
        if assume_unique or not among.is_floating_point() or among.numel() == 0:
            return parts(x, among, assume_unique=assume_unique, invert=invert)
        blank = among.isnan()
        greatest = torch.where(blank, -math.inf, among).amax()
        made = parts(x, torch.where(blank, greatest, among)) & ~blank.all()
        return ~made if invert else made

    return found


def _itself(x: Tensor) -> Tensor:
    """What a composite makes of numbers is detached in place, below autograd, where nothing is attached."""
    return x


def _eye(n: int, m: int | None = None, *, dtype: torch.dtype | None = None, **how: Any) -> Tensor:
    """Ones where row and column have one number; torch's own parts count many in a type that few kernels take."""
    layout, pinned = how.get("layout"), how.get("pin_memory")
    if layout not in (None, torch.strided) or pinned:
        return NotImplemented
    rows = torch.arange(n, device=how.get("device"))
    columns = torch.arange(n if m is None else m, device=how.get("device"))
    return (rows.unsqueeze(-1) == columns).to(dtype or torch.get_default_dtype())


def _linspace(parts: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Torch's own parts, but for integers: cut off, a number that is next to a whole one shows how it was rounded, and
    the parts round otherwise than the op's kernel."""

    def floats(start: Any, end: Any, steps: int, *, dtype: torch.dtype | None = None, **how: Any) -> Tensor:
        if dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
            return NotImplemented
        return parts(start, end, steps, dtype=dtype, **how)

    return floats


Kernels = dict[DispatchKey, Callable[..., object]]
_KEYS = (DispatchKey.CompositeImplicitAutograd, DispatchKey.Autograd)


@contextmanager
def preserve_resampling() -> Generator[None]:
    """While active, AOTAutograd's tracing does not decompose resampling ops. Torch takes them apart by Python kernels
    of the dispatcher, before any decomposition table is asked; export does not need this."""
    taken: list[tuple[OpOverload, Kernels]] = []
    for overload in TABLE:
        name = overload.name() if isinstance(overload, OpOverload) else ""
        if not isinstance(overload, OpOverload) or "upsample" not in name or "backward" in name:
            continue
        taken.append((overload, {k: overload.py_kernels.pop(k) for k in _KEYS if k in overload.py_kernels}))
        if overload.name().endswith(".vec"):
            overload.py_kernels.update(dict.fromkeys(_KEYS, _by_size(overload)))
        _forget(overload)
    for overload in _gradients():
        taken.append((overload, {}))
        overload.py_kernels[DispatchKey.Meta] = _gradient_form(overload)
        _forget(overload)
    try:
        yield
    finally:
        for overload, kernels in taken:
            for key in (*_KEYS, DispatchKey.Meta) if not kernels else _KEYS:
                overload.py_kernels.pop(key, None)
            overload.py_kernels.update(kernels)
            _forget(overload)


@contextmanager
def mended_ops() -> Generator[None]:
    """While active, tracing takes ops apart by ours where torch's Python kernels make something else of them."""
    with _PYTHON_KERNELS.lock:
        if not _PYTHON_KERNELS.active:
            _PYTHON_KERNELS.torchs = {op: _exchange(op, kernel) for op, kernel in _KERNELS_PUT_RIGHT.items()}
        _PYTHON_KERNELS.active += 1
    try:
        yield
    finally:
        with _PYTHON_KERNELS.lock:
            _PYTHON_KERNELS.active -= 1
            if not _PYTHON_KERNELS.active:
                for op, kernels in _PYTHON_KERNELS.torchs.items():
                    op.py_kernels.update(kernels)
                    _forget(op)


@dataclass(slots=True)
class _PythonKernels:
    """How many threads trace with ours, and torch's, which the last one puts back."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    active: int = 0
    torchs: dict[OpOverload, Kernels] = field(default_factory=dict[OpOverload, Kernels])


_PYTHON_KERNELS = _PythonKernels()


def _exchange(op: OpOverload, kernel: Callable[..., object]) -> Kernels:
    """Let this be the op's kernel, under the keys that it has some for; returns those before."""
    before = {k: op.py_kernels[k] for k in _KEYS if k in op.py_kernels}
    op.py_kernels.update(dict.fromkeys(before, kernel))
    _forget(op)
    return before


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Dropout that drops nothing is its operand itself, as in eager mode. Torch's makes a copy, which a later write
    into either of the two would not reach."""
    if not train or not p:
        return x
    if p == 1:  # eager mode draws nothing then
        return x * x.new_zeros(())
    return torch.ops.aten.native_dropout(x, p, train)[0]


_KERNELS_PUT_RIGHT: dict[OpOverload, Callable[..., object]] = {
    torch.ops.aten.dropout.default: _dropout,
    torch.ops.aten.multilabel_margin_loss_forward.default: _multilabel_margin_loss,
}
"""Ops that the dispatcher takes apart before any table is asked, and what they are."""


@cache
def _gradients() -> tuple[OpOverload, ...]:
    """The backward passes of resampling ops of which torch knows the result's form for constant sizes alone."""
    packets = (getattr(torch.ops.aten, n, None) for n in _GRADIENTS)
    overloads = (packet.default for packet in packets if packet is not None)
    return tuple(o for o in overloads if DispatchKey.Meta not in o.py_kernels)


_GRADIENTS = tuple(
    f"{how}_backward"
    for how in (
        *("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d"),
        *(f"upsample_nearest{k}d" for k in (1, 2, 3)),
        *(f"_upsample_nearest_exact{k}d" for k in (1, 2, 3)),
        *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
    )
)


def _gradient_form(overload: OpOverload) -> Callable[..., Tensor]:
    """An empty tensor of the input's sizes, of any kind, laid out as torch lays out that of a small one."""

    def form(grad: Tensor, output_size: list[int], input_size: list[int], *how: object) -> Tensor:
        given = suggest_memory_format(grad)
        small = torch.empty([2] * grad.dim(), device="meta", dtype=grad.dtype)
        small = small.contiguous(memory_format=given)
        with no_python_dispatcher():
            probe = overload(small, [2] * len(output_size), [2] * grad.dim(), *how)
        made = given if probe.is_contiguous(memory_format=given) else torch.contiguous_format
        return torch.empty(input_size, device=grad.device, dtype=grad.dtype, memory_format=made)

    return form


def _forget(overload: OpOverload) -> None:
    """Make the dispatcher look its Python kernels up again."""
    overload._dispatch_cache.clear()  # pyright: ignore[reportPrivateUsage]


def _by_size(overload: OpOverload) -> Callable[..., object]:
    """A resampling op given a list of scale factors, as the form that takes sizes and one scale per dim."""
    plain = overload.overloadpacket.default

    def redirect(x: torch.Tensor, size: list[int] | None, *rest: object) -> object:
        *how, factors = rest
        assert factors is None or isinstance(factors, (list, tuple))
        target = list(upsample_compute_output_size(x.size(), size, factors) or ())
        return plain(x, target, *how, *(factors or [None] * len(target)))

    return redirect
