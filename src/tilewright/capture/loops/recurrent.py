"""Torch's recurrent layers over many steps as scans: torch itself takes them apart step by step."""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false, reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._decomp import decompositions as torchs
from torch._higher_order_ops.scan import scan_op
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.torch_version import TorchVersion

from tilewright.tuning.thresholds import LOOPS

SCANS_DIFFERENTIATE = TorchVersion(torch.__version__) >= "2.13"
"""Whether torch's gradient of a scan is right. Up to 2.12 it loses that of a state which begins with a tensor that
needs none, as most do, without a word: so `tie_states` ones begin ours."""

Layer = Callable[..., tuple[Tensor, object]]
_NAMES = ("one_layer_rnn", "one_layer_lstm", "mkldnn_one_layer_lstm")


_computes_again: ContextVar[bool] = ContextVar("_computes_again", default=False)


@contextmanager
def computed_again(active: bool) -> Generator[None]:
    """While active, scans save nothing of what their steps make but the states: the backward pass computes it again."""
    token = _computes_again.set(active)
    try:
        yield
    finally:
        _computes_again.reset(token)


def computes_again() -> bool:
    """Whether a scan that is traced now saves only its states."""
    return _computes_again.get()


@contextmanager
def recurrent_loops() -> Generator[None]:
    """While active, torch's rules for RNN, GRU and LSTM layers (those that it does not hand to a library) make one scan
    of each layer and direction with more than `LOOPS.max_unrolled_steps` steps, gradients included. LSTM layers that
    are trained are not handed to oneDNN: torch loses there what it saves for its gradient."""
    plain: dict[str, Layer] = {name: getattr(torchs, name) for name in _NAMES}
    setattr(torchs, _NAMES[0], _rnn(plain[_NAMES[0]]))
    lstm = _lstm(plain[_NAMES[1]])
    setattr(torchs, _NAMES[1], lstm)
    setattr(torchs, _NAMES[2], _inferred(plain[_NAMES[2]], lstm))
    try:
        yield
    finally:
        for name, layer in plain.items():
            setattr(torchs, name, layer)


def tie_states(states: Sequence[Tensor], others: Sequence[object]) -> list[Tensor]:
    """Beginnings of a scan's states whose gradients torch does not lose: where torch does, those that need none are
    tied to a tensor among all that the scan reads that needs one, of which no number goes into them."""
    given = [t for t in (*states, *others) if isinstance(t, Tensor)]
    source = next((t for t in given if t.requires_grad and t.is_floating_point() and t.numel()), None)
    if SCANS_DIFFERENTIATE or source is None or not torch.is_grad_enabled():
        return list(states)
    never = torch.zeros((), dtype=torch.bool, device=source.device)
    one = source[(0,) * source.dim()]

    def with_gradient(x: Tensor) -> Tensor:
        plain = x.requires_grad or not x.is_floating_point()  # of complex ones there is no gradient
        return x if plain else torch.where(never, one.to(x.dtype), x)

    return list(map(with_gradient, states))


CARRIED_INEXACT = {
    torch.bool: torch.float32, torch.int8: torch.float32, torch.uint8: torch.float32, torch.int16: torch.float32,
    torch.int32: torch.float64, torch.int64: torch.float64,
}  # fmt: skip
"""What torch's scans, which differentiate no integers, carry in their place: a type that holds every value, and for
int64 the two halves of each as numbers. (Bits as they are would be those of NaNs, which conversions change.)"""

_HALF = 32


def as_inexact(x: Tensor) -> Tensor:
    """A tensor as torch's scans differentiate it: integers as `CARRIED_INEXACT` says, halves along a last dim, and
    complex numbers as real ones."""
    if x.is_complex():
        return torch.view_as_real(x.resolve_conj()).clone(memory_format=torch.contiguous_format)
    if x.is_floating_point():
        return x
    parts = torch.stack((x >> _HALF, x & ((1 << _HALF) - 1)), -1) if x.dtype == torch.int64 else x
    return parts.to(CARRIED_INEXACT[x.dtype])


def from_inexact(x: Tensor, kind: torch.dtype) -> Tensor:
    """What `as_inexact` made `x` of."""
    if x.dtype == kind:
        return x
    if kind.is_complex:
        return torch.complex(x[..., 0], x[..., 1])
    integers = x.detach().to(kind)
    return (integers[..., 0] << _HALF) | integers[..., 1] if kind == torch.int64 else integers


def _is_long(x: Tensor) -> bool:
    steps = x.shape[0]
    return isinstance(steps, torch.SymInt) or steps > LOOPS.max_unrolled_steps


def _rnn(plain: Layer) -> Layer:
    def layer(
        inp: Tensor, hidden: Tensor, params: Sequence[Tensor], has_biases: bool,
        hidden_fn: Callable[..., Tensor], reverse: bool = False,
    ) -> tuple[Tensor, object]:  # fmt: skip
        if not _is_long(inp):
            return plain(inp, hidden, params, has_biases, hidden_fn, reverse=reverse)
        held = (params[1], params[3]) if has_biases else (params[1],)

        def step(h: Tensor, now: Tensor, weight: Tensor, *rest: Tensor) -> list[Tensor]:
            # no default: torch would take its parameter for an operand
            after = hidden_fn(now, h, None, None, weight, rest[0] if has_biases else None)
            return [after, after.clone()]

        made, last = _scanned(step, [hidden], inp, params, has_biases, held, reverse)
        return made, last[0]

    return layer


def _lstm(plain: Layer) -> Layer:
    def layer(
        inp: Tensor, hidden: Sequence[Tensor], params: Sequence[Tensor], has_biases: bool, reverse: bool = False
    ) -> tuple[Tensor, object]:  # fmt: skip
        if not _is_long(inp):
            return plain(inp, hidden, params, has_biases, reverse=reverse)
        projects = len(params) in (3, 5)
        held = (params[1], *params[3:]) if has_biases else tuple(params[1:])

        def step(h: Tensor, c: Tensor, now: Tensor, weight: Tensor, *rest: Tensor) -> list[Tensor]:
            bias = rest[0] if has_biases else None
            down = rest[-1] if projects else None
            h, c = torchs.lstm_cell(now, h, c, weight, bias, down, chunk_dim=2)
            return [h, c, h.clone()]

        made, last = _scanned(step, list(hidden), inp, params, has_biases, held, reverse)
        return made, tuple(last)

    return layer


def _inferred(library: Layer, taken_apart: Layer) -> Layer:
    """`library` where no gradient is asked for."""

    def layer(
        inp: Tensor, hidden: Sequence[Tensor], params: Sequence[Tensor], has_biases: bool, reverse: bool = False
    ) -> tuple[Tensor, object]:  # fmt: skip
        trained = torch.is_grad_enabled() and any(t.requires_grad for t in (*hidden, *params))
        return (taken_apart if trained else library)(inp, hidden, params, has_biases, reverse=reverse)

    return layer


def _scanned(
    step: Callable[..., list[Tensor]], hidden: Sequence[Tensor], inp: Tensor, params: Sequence[Tensor],
    has_biases: bool, held: tuple[Tensor, ...], reverse: bool,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """The results of all steps, and the last state."""
    projected = F.linear(inp, params[0], params[2] if has_biases else None)
    slices = projected.flip(0) if reverse else projected
    slices, *rest = apart_in_memory((slices, *(h.unsqueeze(0) for h in hidden), *held))
    states = tie_states(rest[: len(hidden)], (slices, *rest))
    *last, made = scan_op(step, states, [slices], tuple(rest[len(hidden) :]))
    made = made.squeeze(1)
    return made.flip(0) if reverse else made, [h.squeeze(0) for h in last]


def apart_in_memory(operands: Sequence[Any]) -> list[Any]:
    """Operands, copied where they share memory with one before: torch refuses scans of such, and layers for a GPU keep
    all their weights in one piece of memory."""
    seen: set[int] = set()
    found: list[object] = []
    for t in operands:
        if not isinstance(t, Tensor):  # a size
            found.append(t)
            continue
        place = _memory(t)
        found.append(t.clone() if place in seen else t)
        seen.add(place)
    return found


def _memory(t: Tensor) -> int:
    """What tells whether two tensors of a trace share memory."""
    inner = torch._from_functional_tensor(t.elem) if isinstance(t, FunctionalTensor) else t
    return inner.untyped_storage()._cdata


LENGTHS_IN_FILES = (
    "torch fixes the length of GRU and RNN layers: export an ONNX file where it is dynamic, "
    "`torch.onnx.export(model, inputs, FILE, dynamo=False, input_names=[...], dynamic_axes={...})`, and compile that; "
    "or leave it out of `dims`, and each length is compiled once"
)
"""The way that works where a layer's length is to be free."""


def counts_steps(target: object) -> bool:
    """Whether it has layers that torch takes apart step by step, each length for itself (an LSTM is a call)."""
    layers = target.modules() if isinstance(target, torch.nn.Module) else ()
    return any(isinstance(m, torch.nn.RNNBase) and not isinstance(m, torch.nn.LSTM) for m in layers)
