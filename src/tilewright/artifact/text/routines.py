"""The closed list of routines that a plan in an artifact may call: what is written of each, and how it is made again.

Weights are written as the program holds them, and packed anew where they are loaded: packed forms are a library's own
affair, and those of ours depend on nothing but the weight and the machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tilewright.capture.harmless.ops import OverFirst, over_first
from tilewright.errors import UnsupportedError
from tilewright.ir.expr import Expr
from tilewright.ir.graph import LibraryCall, Routine
from tilewright.ir.task import Attention
from tilewright.ir.text.values import Json
from tilewright.library.fused import FusedAttention
from tilewright.library.offers.mkl import MklLinear, packed_for
from tilewright.library.offers.offer import FrozenProduct
from tilewright.library.offers.onednn import (
    OpenLinear,
    PackedConvolution,
    PackedLinear,
    PackedWindow,
    packed_parts,
)
from tilewright.library.padded_convolutions import PaddedConvolution
from tilewright.runtime.loops.call import LoopRunner
from tilewright.runtime.own.attention import OwnAttention
from tilewright.runtime.own.conv_window import ConvWindow
from tilewright.runtime.own.form import FusedProduct, NativeMethod
from tilewright.runtime.own.product import ProductCalls

from .typed import check_types

Fields = Mapping[str, Any]
Inner = Callable[[Any], Any]
"""Writes or reads a function inside a routine."""


@dataclasses.dataclass(frozen=True, slots=True)
class Raw:
    """What is JSON already."""

    value: Json


KeepLoop = Callable[[LibraryCall], str]
"""Keeps what runs the loop of a call, and gives the name under which it is found."""


def no_loops(call: LibraryCall) -> str:
    """For what has no plan of its own for steps. Raises UnsupportedError."""
    raise UnsupportedError("a loop is kept with its plan alone", phase="save", op=call.name)


def name_of(routine: Routine) -> str | None:
    """The name of a routine on the list; None for others."""
    return next((name for name, (of, _, _) in _ROUTINES.items() if type(routine) is of), None)


def written(routine: Routine, inner: Inner) -> list[object]:
    """What is kept of a routine: names and values in turn."""
    _, write, _ = _ROUTINES[name_of(routine) or ""]
    return [x for pair in write(routine, inner).items() for x in pair]


def no_routines() -> Routines:
    """For what has no packed weights: graphs as they were captured."""

    def refuse() -> ProductCalls:
        raise ValueError("a captured graph has no packed weights")

    return Routines(refuse)


class Routines:
    """Makes routines again. `own` gives what makes those of ours; it is asked when the first one is made. `loop` gives
    what runs the loop that was kept under a name."""

    def __init__(
        self, own: Callable[[], ProductCalls], loop: Callable[[str], LoopRunner] | None = None
    ) -> None:
        self._own = own
        self._loop = loop

    def loop(self, name: str) -> LoopRunner:
        """What runs a loop. Raises ValueError where there is none."""
        if self._loop is None:
            raise ValueError(f"no loop {name[:40]!r}")
        return self._loop(name)

    @cached_property
    def owner(self) -> ProductCalls:
        """Code of our own."""
        return self._own()

    def read(self, name: str, pairs: Any, inner: Inner) -> Routine:
        """The routine that was written so. Raises ValueError or TypeError for other data."""
        if name not in _ROUTINES or type(pairs) is not list or len(pairs) % 2:
            raise ValueError(f"no routine {name[:40]!r}")
        fields = dict(zip(pairs[::2], pairs[1::2], strict=True))
        return _ROUTINES[name][2](self, fields, inner)


def _checked(fields: Fields, **types: object) -> Fields:
    """Fields of these names and types alone."""
    if fields.keys() != types.keys():
        raise ValueError(f"fields {sorted(map(str, fields))} are not {sorted(types)}")
    for name, of in types.items():
        check_types(fields[name], of)
    return fields


# --- ours ----------------------------------------------------------------------------------------


def _write_product(r: FusedProduct, inner: Inner) -> Fields:
    assert isinstance(r.plain, Tensor)
    window = None if r.window is None else [list(x) for x in dataclasses.astuple(r.window)]
    return {
        "weight": r.plain, "bias": r.bias, "sizes": r.sizes, "window": window, "source": r.task.source,
        "shape": r.task.shape, "way": r.way.value, "activation": r.activation, "constants": r.constants,
        "added": r.added, "affine": r.affine,
        "chain": [None if part is None else Raw(inner(part)) for part in (r.first, r.then)],
    }  # fmt: skip


def _read_product(of: Routines, fields: Fields, inner: Inner) -> Routine:
    f = _checked(
        fields, weight=Tensor, bias=Tensor | None, sizes=tuple[int, int, int], window=list[list[int]] | None,
        source=tuple[Expr, ...], shape=tuple[Expr, ...], way=str, activation=str, constants=tuple[float, ...],
        added=bool, affine=tuple[float, ...], chain=list[object],
    )  # fmt: skip
    weight, bias, sizes, way = f["weight"], f["bias"], f["sizes"], NativeMethod(f["way"])
    window = None if f["window"] is None else ConvWindow(*[(a, b) for a, b in f["window"]])
    taps = weight[0, 0].numel() if weight.dim() > 2 else 1
    if (
        weight.dim() < 2
        or sizes != (weight.shape[0], weight.shape[1], taps)
        or weight.dtype is not torch.float32
    ):
        raise ValueError(f"a weight {list(weight.shape)} for {sizes}")
    columns = -(-sizes[0] // of.owner.panel) * of.owner.panel
    if bias is not None and (bias.dtype is not torch.float32 or bias.shape != (columns,)):
        raise ValueError(f"a bias {list(bias.shape)} for {columns} columns")
    task = FrozenProduct(None, None, f["source"], f["shape"])
    first, then = _chained(f["chain"], inner)
    product = FusedProduct(
        of.owner, of.owner.packed_later(weight, way), bias, sizes, window, task, way, weight, f["activation"],
        f["constants"], f["added"], f["affine"], first, then,
    )  # fmt: skip
    if not product.is_whole:
        raise ValueError("products that are no chain")
    return product


def _chained(parts: list[object], inner: Inner) -> tuple[FusedProduct | None, FusedProduct | None]:
    """The products in front of a depthwise convolution and behind it."""
    first, then = (None if part is None else inner(part) for part in parts)
    if not (isinstance(first, FusedProduct | None) and isinstance(then, FusedProduct | None)):
        raise TypeError("parts of a chain that are no products of ours")
    return first, then


def _write_attention(r: OwnAttention, inner: Inner) -> Fields:
    return {"task": r.task, "mask": r.mask}


def _read_attention(of: Routines, fields: Fields, inner: Inner) -> Routine:
    f = _checked(fields, task=Attention, mask=Tensor | None)
    return OwnAttention(of.owner, f["task"], f["mask"])


# --- libraries' ----------------------------------------------------------------------------------


def _write_linear(r: PackedLinear, inner: Inner) -> Fields:
    weight = torch.cat([w.to_dense() for w in r.weights], 1)
    return {"weight": weight, "bias": r.bias, "shape": r.shape, "attribute": list(r.attribute)}


def _read_linear(of: Routines, fields: Fields, inner: Inner) -> Routine:
    f = _checked(fields, weight=Tensor, bias=Tensor | None, shape=tuple[Expr, ...], attribute=list[object])
    return PackedLinear(packed_parts(f["weight"]), f["bias"], f["shape"], _attribute(f["attribute"]))


def _write_convolution(r: PackedConvolution, inner: Inner) -> Fields:
    weight, groups = r.weight.to_dense(), r.window.groups
    if r.window.transposed:  # it is kept as [out, in / groups, ..]
        made, each, *kernel = weight.shape
        weight = weight.reshape(groups, made // groups, each, *kernel).transpose(1, 2)
        weight = weight.reshape(groups * each, made // groups, *kernel)
    window = dataclasses.astuple(r.window)
    return {
        "weight": weight, "bias": r.bias, "window": list(window), "wants": r.wants, "strides": r.strides,
        "attribute": list(r.attribute), "added": r.added, "size": list(r.size),
    }  # fmt: skip


def _read_convolution(of: Routines, fields: Fields, inner: Inner) -> Routine:
    f = _checked(
        fields, weight=Tensor, bias=Tensor | None, window=list[object], wants=tuple[Expr, ...],
        strides=tuple[Expr, ...], attribute=list[object], added=bool, size=list[int],
    )  # fmt: skip
    window = PackedWindow(*f["window"])
    check_types(window, PackedWindow)
    packed = window.pack(f["weight"].contiguous(), f["size"])
    return PackedConvolution(
        packed,
        f["bias"],
        window,
        f["wants"],
        f["strides"],
        _attribute(f["attribute"]),
        f["added"],
        tuple(f["size"]),
    )


def _attribute(told: list[object]) -> tuple[str, tuple[float, ...], str]:
    made = tuple(told)
    check_types(made, tuple[str, tuple[float, ...], str])
    return made  # pyright: ignore[reportReturnType]


def _write_mkl(r: MklLinear, inner: Inner) -> Fields:
    return {"weight": r.weight, "bias": r.bias, "shape": r.shape, "rows": r.rows}


def _read_mkl(of: Routines, fields: Fields, inner: Inner) -> Routine:
    f = _checked(fields, weight=Tensor, bias=Tensor | None, shape=tuple[Expr, ...], rows=int)
    made = (f["weight"], f["bias"], f["shape"])
    return MklLinear(*made) if not f["rows"] else packed_for(f["weight"], f["rows"], f["bias"], f["shape"])


# --- plain data ----------------------------------------------------------------------------------


def _write_padded(r: PaddedConvolution, inner: Inner) -> Fields:
    return {"of": Raw(inner(r.of)), "around": r.around}


def _read_padded(of: Routines, fields: Fields, inner: Inner) -> Routine:
    f = _checked(fields, of=object, around=tuple[int, ...])
    return PaddedConvolution(inner(f["of"]), f["around"])


def _write_plain(r: Any, inner: Inner) -> Fields:
    return {f.name: getattr(r, f.name) for f in dataclasses.fields(r)}


def _plain_reader(kind: Callable[..., Routine]) -> Callable[[Routines, Fields, Inner], Routine]:
    def read(of: Routines, fields: Fields, inner: Inner) -> Routine:
        made = kind(**fields)
        check_types(made, kind)
        return made

    return read


def _write_over(r: OverFirst, inner: Inner) -> Fields:
    return {"of": Raw(inner(r.function))}


def _read_over(of: Routines, fields: Fields, inner: Inner) -> Routine:
    found = over_first(inner(_checked(fields, of=object)["of"]))
    if found is None:
        raise ValueError("no op in place that is known to look at its places first")
    return found


_ROUTINES: Mapping[
    str, tuple[type, Callable[[Any, Inner], Fields], Callable[[Routines, Fields, Inner], Routine]]
] = {
    "own product": (FusedProduct, _write_product, _read_product),
    "own attention": (OwnAttention, _write_attention, _read_attention),
    "onednn linear": (PackedLinear, _write_linear, _read_linear),
    "onednn convolution": (PackedConvolution, _write_convolution, _read_convolution),
    "onednn open linear": (OpenLinear, _write_plain, _plain_reader(OpenLinear)),
    "mkl linear": (MklLinear, _write_mkl, _read_mkl),
    "padded convolution": (PaddedConvolution, _write_padded, _read_padded),
    "fused attention": (FusedAttention, _write_plain, _plain_reader(FusedAttention)),
    "over first": (OverFirst, _write_over, _read_over),
}
