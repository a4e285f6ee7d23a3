"""Recurrent layers: RNN, GRU, LSTM, as loops over time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.capture.onnx.looped import OnnxSteps, Operands, becomes_one_op, looped
from tilewright.capture.onnx.registry import op
from tilewright.errors import UnsupportedError

Activation = Callable[[Tensor], Tensor]


_ACTIVATIONS: dict[str, tuple[tuple[float, ...], Callable[..., Tensor]]] = {
    "relu": ((), torch.relu),
    "tanh": ((), torch.tanh),
    "sigmoid": ((), torch.sigmoid),
    "softsign": ((), F.softsign),
    "softplus": ((), F.softplus),
    "leakyrelu": ((0.01,), F.leaky_relu),
    "elu": ((1.0,), F.elu),
    "thresholdedrelu": ((1.0,), lambda x, alpha: torch.where(x > alpha, x, 0.0)),
    "hardsigmoid": ((0.2, 0.5), lambda x, alpha, beta: (x * alpha + beta).clamp(0, 1)),
    "affine": ((1.0, 0.0), lambda x, alpha, beta: x * alpha + beta),
    "scaledtanh": ((1.0, 1.0), lambda x, alpha, beta: torch.tanh(x * beta) * alpha),
}
"""By name: what alpha and beta are where a node gives none, as far as there is a use for them, and the function."""


def _activations(
    names: Sequence[str], alphas: Sequence[float], betas: Sequence[float]
) -> tuple[Activation, ...]:
    """The functions of these names. Each takes the next alpha and beta only if it has a use for one: the standard
    lets functions consume them in order, and onnxruntime reads that so."""
    left = (iter(alphas), iter(betas))
    made: list[Activation] = []
    for name in names:
        if name.lower() not in _ACTIVATIONS:
            raise UnsupportedError(
                f"activation {name!r}", phase="capture", op="RNN", hint="see the standard's list"
            )
        usual, function = _ACTIVATIONS[name.lower()]
        numbers = tuple(next(given, number) for given, number in zip(left, usual, strict=False))
        made.append(partial(_with_numbers, function, numbers))
    return tuple(made)


def _with_numbers(function: Callable[..., Tensor], numbers: tuple[float, ...], x: Tensor) -> Tensor:
    return function(x, *numbers)


@dataclass(frozen=True)
class Layer:
    """The attributes that the three layers share."""

    activations: tuple[Activation, ...]
    clip: float | None
    direction: str
    hidden: int
    layout: int

    @property
    def directions(self) -> int:
        """1 or 2."""
        return 2 if self.direction == "bidirectional" else 1

    def bound(self, x: Tensor) -> Tensor:
        """Clip the input of an activation."""
        return x if self.clip is None else x.clamp(-self.clip, self.clip)


def _layer(
    names: tuple[str, ...],
    given: Sequence[str] | None,
    alphas: Sequence[float] | None,
    betas: Sequence[float] | None,
    clip: float | None,
    direction: str,
    hidden: int,
    layout: int,
) -> Layer:
    count = 2 if direction == "bidirectional" else 1
    functions = _activations(given or names * count, alphas or (), betas or ())
    return Layer(functions, clip, direction, hidden, layout)


Held = tuple[Tensor | None, ...]
"""What every step of a direction reads: its recurrent weights and biases."""
Cell = Callable[[Tensor, "tuple[Tensor, ...]", int, Held], "tuple[Tensor, ...]"]
"""The next state of direction d for one projected input."""


def _run(
    layer: Layer,
    x: Tensor,
    weights: tuple[Tensor, Tensor | None],
    lengths: Tensor | None,
    states: Sequence[Tensor | None],
    held: Callable[[int], Held],
    cell: Cell,
) -> tuple[Tensor, ...]:
    """Run a cell over time in each direction: (Y, final states...) in the layout of the layer.

    `weights` (matrix and bias, one row per direction) project the inputs of all steps at once; the cell gets one
    projected step, and what is `held` for its direction.

    Past the end of a sample the output is zero and the state is kept.
    """
    x = x.transpose(0, 1) if layer.layout else x
    outs: list[Tensor] = []
    finals: list[list[Tensor]] = [[] for _ in states]
    for d in range(layer.directions):
        state: list[Tensor] = []
        for s in states:
            first = None if s is None else (s.transpose(0, 1) if layer.layout else s)[d]
            state.append(x.new_zeros(x.shape[1], layer.hidden) if first is None else first)
        w, b = weights
        flat = x.contiguous().view(x.shape[0] * x.shape[1], x.shape[2])  # torch fixes free sizes of 3 dims
        projected = F.linear(flat, w[d], None if b is None else b[d]).view(x.shape[0], x.shape[1], -1)
        ys, last = _walk(layer, projected, lengths, state, (d, held(d), cell))
        outs.append(ys)
        for final, s in zip(finals, last, strict=True):
            final.append(s)
    y = torch.stack(outs, 1) if len(outs) > 1 else outs[0].unsqueeze(1)
    last = [torch.stack(f) if len(f) > 1 else f[0].unsqueeze(0) for f in finals]
    if layer.layout:
        return (y.permute(2, 0, 1, 3), *[s.transpose(0, 1) for s in last])
    return (y, *last)


def _walk(
    layer: Layer,
    projected: Tensor,
    lengths: Tensor | None,
    state: list[Tensor],
    direction: tuple[int, Held, Cell],
) -> tuple[Tensor, list[Tensor]]:
    """One direction: the outputs of all steps, and the last state."""
    d, held, cell = direction
    steps = projected.shape[0]
    backwards = layer.direction == "reverse" or d == 1

    slices = [projected]
    if lengths is not None:
        slices.append((lengths > torch.arange(steps, device=lengths.device).unsqueeze(1)).unsqueeze(2))

    def step(state: Sequence[Tensor], parts: Sequence[Tensor], held: Held) -> tuple[Tensor, ...]:
        now, *live = parts
        new = cell(now, tuple(state), d, held)
        if not live:
            return (*new, new[0])
        states = tuple(torch.where(live[0], n, o) for n, o in zip(new, state, strict=True))
        return (*states, torch.where(live[0], new[0], torch.zeros_like(new[0])))

    if becomes_one_op(steps):

        def run(
            counter: Tensor, state: Sequence[Tensor], parts: Sequence[Tensor], held: Held
        ) -> tuple[Tensor | None, ...]:
            return (None, *step(state, parts, tuple(held)))

        walk = OnnxSteps(steps, collected=1, backwards=backwards)
        made = looped(run, walk, Operands(state, slices, held), projected.device)
        if made is not None:
            return made[-1], list(made[:-1])
    ys: list[Tensor] = []
    for t in range(steps - 1, -1, -1) if backwards else range(steps):
        *state, y = step(state, [part[t] for part in slices], held)
        ys.append(y)
    return torch.stack(ys[::-1] if backwards else ys), state


@op("RNN", since=7)
def rnn(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
    h0: Tensor | None = None,
    *,
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    activations: Sequence[str] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    layout: int = 0,
) -> tuple[Tensor, ...]:
    """One-gate recurrent layer; (Y, Y_h)."""
    hidden = r.shape[-1]
    layer = _layer(("Tanh",), activations, activation_alpha, activation_beta, clip, direction, hidden, layout)

    def cell(now: Tensor, state: tuple[Tensor, ...], d: int, held: Held) -> tuple[Tensor, ...]:
        (weight,) = held
        assert weight is not None
        return (layer.activations[d](layer.bound(now + F.linear(state[0], weight))),)

    total = None if bias is None else bias[:, :hidden] + bias[:, hidden:]
    return _run(layer, x, (w, total), lengths, [h0], lambda d: (r[d],), cell)


@op("GRU", since=7)
def gru(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
    h0: Tensor | None = None,
    *,
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    activations: Sequence[str] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    layout: int = 0,
    linear_before_reset: int = 0,
) -> tuple[Tensor, ...]:
    """Gated recurrent layer, gates in the order z, r, h; (Y, Y_h)."""
    hidden = r.shape[-1]
    names = ("Sigmoid", "Tanh")
    layer = _layer(names, activations, activation_alpha, activation_beta, clip, direction, hidden, layout)

    def held(d: int) -> Held:
        rb = None if bias is None else bias[d, 3 * hidden :]
        both = None if rb is None else rb[: 2 * hidden]
        return r[d, : 2 * hidden], both, r[d, 2 * hidden :], None if rb is None else rb[2 * hidden :]

    def cell(now: Tensor, state: tuple[Tensor, ...], d: int, held: Held) -> tuple[Tensor, ...]:
        h = state[0]
        both, both_bias, last, last_bias = held
        assert both is not None and last is not None
        f, g = layer.activations[2 * d], layer.activations[2 * d + 1]
        xz, xr, xh = now.split(hidden, 1)
        hz, hr = F.linear(h, both, both_bias).split(hidden, 1)
        z, reset = f(layer.bound(xz + hz)), f(layer.bound(xr + hr))
        if linear_before_reset:
            new = g(layer.bound(xh + reset * F.linear(h, last, last_bias)))
        else:
            new = g(layer.bound(xh + F.linear(reset * h, last, last_bias)))
        return ((1 - z) * new + z * h,)

    total = None if bias is None else bias[:, : 3 * hidden]
    return _run(layer, x, (w, total), lengths, [h0], held, cell)


@op("LSTM", since=7)
def lstm(
    x: Tensor,
    w: Tensor,
    r: Tensor,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
    h0: Tensor | None = None,
    c0: Tensor | None = None,
    peephole: Tensor | None = None,
    *,
    activation_alpha: Sequence[float] | None = None,
    activation_beta: Sequence[float] | None = None,
    activations: Sequence[str] | None = None,
    clip: float | None = None,
    direction: str = "forward",
    hidden_size: int | None = None,
    input_forget: int = 0,
    layout: int = 0,
) -> tuple[Tensor, ...]:
    """Long short-term memory, gates in the order i, o, f, c; (Y, Y_h, Y_c)."""
    hidden = r.shape[-1]
    names = ("Sigmoid", "Tanh", "Tanh")
    layer = _layer(names, activations, activation_alpha, activation_beta, clip, direction, hidden, layout)

    def held(d: int) -> Held:
        return r[d], None if peephole is None else peephole[d]

    def cell(now: Tensor, state: tuple[Tensor, ...], d: int, held: Held) -> tuple[Tensor, ...]:
        h, c = state
        weight, holes = held
        assert weight is not None
        f, g, out = layer.activations[3 * d : 3 * d + 3]
        i, o, forget, new = (now + F.linear(h, weight)).split(hidden, 1)
        if holes is not None:
            pi, po, pf = holes.split(hidden)
            i, forget = i + pi * c, forget + pf * c
        else:
            po = None
        i = f(layer.bound(i))
        forget = 1 - i if input_forget else f(layer.bound(forget))
        c = forget * c + i * g(layer.bound(new))
        o = f(layer.bound(o if po is None else o + po * c))
        return o * out(c), c

    total = None if bias is None else bias[:, : 4 * hidden] + bias[:, 4 * hidden :]
    return _run(layer, x, (w, total), lengths, [h0, c0], held, cell)
