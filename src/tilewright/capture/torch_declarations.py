"""Declarations of torch's ops that are wrong in some of its versions, put right before anything is traced by them."""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, cast

import torch
from torch import Tensor
from torch._C import DispatchKey  # pyright: ignore[reportPrivateImportUsage]
from torch._decomp import global_decomposition_table
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_impls import op_implementations_dict, register_op_impl
from torch.torch_version import TorchVersion

COUNTS_FROM_THE_END = TorchVersion(torch.__version__) >= "2.13"
"""Whether the declaration of `vector_norm` is known to take dims counted from the end. In 2.11 it keeps such a dim
where its size is 1, although it is to go: programs were traced with other shapes than they have, under any backend.
(2.12 was not tried: dims counted from the start mean the same there too.)"""

_NORM: OpOverload = torch.ops.aten.linalg_vector_norm.default
Dims = int | Sequence[int] | None
Declaration = Callable[..., tuple[Any, ...]]


def _from_the_start(x: Tensor, dim: Dims) -> Dims:
    if dim is None:
        return None
    return [d % max(1, x.dim()) if -x.dim() <= d < 0 else d for d in ([dim] if isinstance(dim, int) else dim)]


def vector_norm_counted(usual: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The declaration `usual` of `vector_norm`, which is only asked about dims counted from the start."""

    def declared(
        x: Tensor,
        ord: float = 2,
        dim: Dims = None,
        keepdim: bool = False,
        *,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        return usual(x, ord, _from_the_start(x, dim), keepdim, dtype=dtype)

    return declared


def _fake_norm(mode: FakeTensorMode, func: OpOverload, x: Tensor, *rest: object, **named: object) -> object:
    """What torch asks before it takes its own declaration, for an order, dims and whether they are kept (`rest`)."""
    dim = cast(Dims, rest[1] if len(rest) > 1 else named.get("dim"))
    counted = _from_the_start(x, dim)
    if dim is None or counted == ([dim] if isinstance(dim, int) else list(dim)):
        return NotImplemented
    given = (rest[0], counted, *rest[2:]) if len(rest) > 1 else rest
    with mode:
        return func(x, *given, **(named | {"dim": counted} if "dim" in named else named))


_NORMS_OF_STATISTICS: tuple[OpOverload, ...] = (
    torch.ops.aten.native_layer_norm.default,
    torch.ops.aten.native_group_norm.default,
    torch.ops.aten.native_batch_norm.default,
    torch.ops.aten._native_batch_norm_legit.default,
    torch.ops.aten._native_batch_norm_legit.no_stats,
    torch.ops.aten._native_batch_norm_legit_functional.default,
    torch.ops.aten._native_batch_norm_legit_no_training.default,
    torch.ops.aten._batch_norm_with_update.default,
    torch.ops.aten._batch_norm_with_update_functional.default,
    torch.ops.aten._batch_norm_no_update.default,
)


def statistics_in_singles(usual: Declaration) -> Declaration:
    """The declaration `usual` of a norm with the statistics that the CPU's kernels save of halves where weights are
    singles, as under autocast: singles. It declares halves, to which a program would round the mean, so that what is
    left of the values no longer adds up to nothing in the backward pass."""

    @functools.wraps(usual)
    def declared(x: Tensor, *rest: object, **named: object) -> tuple[Any, ...]:
        y, mean, deviation, *more = usual(x, *rest, **named)
        given = [t for t in (*rest, *named.values()) if isinstance(t, Tensor)]
        if x.device.type == "cpu" and x.dtype.itemsize < 4 and any(t.dtype.itemsize == 4 for t in given):
            mean, deviation = mean.to(torch.float32), deviation.to(torch.float32)
        return (y, mean, deviation, *more)

    return declared


def gradient_of_its_type(usual: Declaration) -> Declaration:
    """The declaration `usual` of a norm's backward pass with a gradient of the input's type, whatever type weights
    have."""

    @functools.wraps(usual)
    def declared(dy: Tensor, x: Tensor, *rest: object, **named: object) -> tuple[Any, ...]:
        dx, *more = usual(dy, x, *rest, **named)
        return (dx if dx is None else dx.to(x.dtype), *more)

    return declared


_GROUP_NORM_BACKWARD: OpOverload = torch.ops.aten.native_group_norm_backward.default

_aten = torch.ops.aten
_PADS: tuple[OpOverload, ...] = (
    *(_aten.reflection_pad2d.default, _aten.reflection_pad3d.default),
    *(_aten.replication_pad2d.default, _aten.replication_pad3d.default),
)
_PADS_BACKWARD: tuple[OpOverload, ...] = (
    *(_aten.reflection_pad2d_backward.default, _aten.reflection_pad3d_backward.default),
    *(_aten.replication_pad2d_backward.default, _aten.replication_pad3d_backward.default),
)


def in_memory_format(usual: Callable[..., Tensor], place: int) -> Callable[..., Tensor]:
    """The declaration `usual` of a pad with a result that lies as the CPU's kernels leave it: in the memory format of
    the operand at `place`. Row-major results were declared (2.13 has it right for images, forward), so that what
    follows channels-last images took another layout, and perhaps another kernel, than eager."""

    @functools.wraps(usual)
    def declared(*args: Any, **named: Any) -> Tensor:
        y = usual(*args, **named)
        x = args[place] if place < len(args) else None
        if not isinstance(x, Tensor) or x.device.type != "cpu":
            return y
        fmt = suggest_memory_format(x)  # `contiguous` would leave a single channel as it is
        return y.contiguous() if fmt is torch.contiguous_format else y.clone(memory_format=fmt)

    return declared


_NEAREST: tuple[OpOverload, ...] = tuple(
    getattr(_aten, f"{name}{k}d").default
    for name in ("upsample_nearest", "_upsample_nearest_exact")
    for k in (1, 2, 3)
)


def also_of_no_images(usual: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The declaration `usual` of an upsampling for a batch without images, too: there torch 2.13 asks a number where
    it takes a bool alone. It is that of one image, without it. Images that are nothing are refused as eager refuses
    them: sizes that are divided by would be 0."""

    @functools.wraps(usual)
    def declared(x: Tensor, *rest: Any, **named: Any) -> Tensor:
        known = [n for n in x.shape if type(n) is int]  # of a symbol nothing is asked
        if 0 not in known:
            return usual(x, *rest, **named)
        if type(x.shape[0]) is not int or 0 in known[1:]:
            raise RuntimeError(
                f"Non-empty {x.dim()}D data tensor expected but got a tensor with sizes {list(x.shape)}"
            )
        y = usual(x.new_empty((1, *x.shape[1:])), *rest, **named)
        return y.new_empty((0, *y.shape[1:]))

    return declared


_LABELS: OpOverload = _aten.multilabel_margin_loss_forward.default


def of_one_row(usual: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The declaration `usual` of a multi-label margin loss by row (a reduction of 0) with no dim where the kernel has
    none: for one row that has no dim for rows. One of size 1 was declared."""

    @functools.wraps(usual)
    def declared(x: Tensor, target: Tensor, reduction: int, **named: Any) -> tuple[Tensor, Tensor]:
        loss, is_target = usual(x, target, reduction, **named)
        return (loss.reshape(()) if x.dim() < 2 and reduction == 0 else loss), is_target

    return declared


_DECLARED: dict[OpOverload, Callable[..., object]] = {}
"""What fake tensors are to be told of an op."""
_freely: ContextVar[bool] = ContextVar("freely", default=False)
_select_kernel = torch._C._select_conv_backend
"""Which of its kernels torch takes for a convolution."""


@contextmanager
def any_kernels() -> Generator[None]:
    """In this block, which of its kernels torch would take for a convolution says nothing of sizes. To find out how a
    result lies torch asks whether there are 16 images, and a trace would hold for fewer, or for more, alone."""
    token = _freely.set(True)
    try:
        yield
    finally:
        _freely.reset(token)


def _kernel_selected(*given: object, **named: object) -> object:
    """As torch's own; versions differ in whether they name the operands."""
    fakes = [t for t in (*given, *named.values()) if isinstance(t, FakeTensor)] if _freely.get() else []
    env = fakes[0].fake_mode.shape_env if fakes else None
    with nullcontext() if env is None else env.suppress_guards():
        return _select_kernel(*given, **named)


def correct_declarations() -> None:
    """Put right what this version of torch declares wrongly, and let `any_kernels` be asked for."""
    torch._C._select_conv_backend = _kernel_selected
    for op in _NORMS_OF_STATISTICS:
        _declare(op, statistics_in_singles)
    _declare(_GROUP_NORM_BACKWARD, gradient_of_its_type)
    for place, pads in enumerate((_PADS, _PADS_BACKWARD)):
        for op in pads:
            _declare(op, functools.partial(in_memory_format, place=place))
    for op in _NEAREST:
        _declare(op, also_of_no_images)
    _declare(_LABELS, of_one_row)
    traced = _LABELS.py_kernels.get(DispatchKey.Autograd)  # taken before any table is asked
    if traced is not None:
        _LABELS.py_kernels[DispatchKey.Autograd] = of_one_row(traced)
        _LABELS._dispatch_cache.clear()
    if not COUNTS_FROM_THE_END:
        _correct_norms()
    FakeTensorMode.cache_clear()  # another backend may have asked before


def _declare(op: OpOverload, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Change the declaration of an op, in torch's tables and where fake tensors ask first."""
    for table in global_decomposition_table.values():
        if op in table:
            changed = table[op] = change(table[op])
            _DECLARED[op] = _asked_first(changed)
            _tell_fakes(op)


def keep_declarations() -> None:
    """Tell fake tensors again what was put right. An export of torch's takes out what they are told of the ops that it
    keeps whole, whoever told it."""
    lost = [op for op, told in _DECLARED.items() if op_implementations_dict.get(op) is not told]
    for op in lost:
        _tell_fakes(op)
    if lost:
        FakeTensorMode.cache_clear()


def _tell_fakes(op: OpOverload) -> None:
    op_implementations_dict.pop(op, None)
    register_op_impl(op)(_DECLARED[op])


def _asked_first(declared: Declaration) -> Callable[..., object]:
    def told(mode: FakeTensorMode, func: OpOverload, *args: object, **named: object) -> object:
        with mode:
            return declared(*args, **named)

    return told


def _correct_norms() -> None:
    register_op_impl(_NORM)(_fake_norm)
    for table in global_decomposition_table.values():
        if _NORM in table:
            table[_NORM] = vector_norm_counted(table[_NORM])
