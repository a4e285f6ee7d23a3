"""Nodes of a captured graph that change how those behind them are computed: with gradients or not, how precisely."""

# What switches modes torch names with underscores.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from typing import cast

import torch
from torch import fx

from tilewright.capture.loops.repeats import Repeat

_ENTER_INFERENCE = torch.autograd.grad_mode._enter_inference_mode
_EXIT_INFERENCE = torch.autograd.grad_mode._exit_inference_mode
_ENTER = (torch.amp.autocast_mode._enter_autocast, _ENTER_INFERENCE)
_EXIT = (torch.amp.autocast_mode._exit_autocast, _EXIT_INFERENCE)
SET_GRADIENTS = torch._C._set_grad_enabled
MODES = (SET_GRADIENTS, *_ENTER, *_EXIT)


def infer_without_gradients(gm: fx.GraphModule) -> None:
    """Let regions of `inference_mode`, in place, be regions without gradients, which give the same values. Torch cannot
    trace views that such a region takes of what is made outside of it, and leaves the process in a mode in which no op
    runs. Within the mode itself there is nothing to change."""
    if not torch.is_inference_mode_enabled():
        _infer_without_gradients(gm, torch.is_grad_enabled())


def _infer_without_gradients(gm: fx.GraphModule, asks: bool) -> None:
    """The same in a graph that is entered with gradients or without, and in the functions that it calls."""
    before: dict[fx.Node, bool] = {}
    for n in gm.graph.nodes:
        if n.target is SET_GRADIENTS:
            asks = bool(n.args[0])
        elif n.target in (_ENTER_INFERENCE, _EXIT_INFERENCE):
            entered = n.target is _ENTER_INFERENCE
            if entered:
                before[n] = asks
            asks = not n.args[0] if entered else before[n.args[0]]
            with gm.graph.inserting_before(n):
                gm.graph.call_function(SET_GRADIENTS, (asks,))
        for function in n.all_input_nodes:
            body = getattr(gm, str(function.target), None) if function.op == "get_attr" else None
            if isinstance(body, fx.GraphModule):
                _infer_without_gradients(body, asks)
    for n in reversed(gm.graph.nodes):
        if n.target in (_ENTER_INFERENCE, _EXIT_INFERENCE):
            gm.graph.erase_node(n)
    if before:
        gm.recompile()


def nodes_without_gradients(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes that are made without gradients."""
    found: set[fx.Node] = set()
    asks = True
    for n in nodes:
        if n.target is SET_GRADIENTS:
            asks = bool(n.args[0])
        elif not asks:
            found.add(n)
    return found


def shift_of(nodes: Sequence[fx.Node], repeat: Repeat) -> int:
    """By how many nodes later the steps of a stretch must begin, so that none begins in a mode that it leaves: the
    scan of them would stand in that mode."""
    first = range(repeat.start, repeat.start + repeat.period)
    if not any(nodes[k].target in MODES for k in first):
        return 0
    without, inside = False, 0
    modes: list[tuple[bool, int]] = []
    for n in nodes[: first.stop]:
        modes.append((without, inside))
        if n.target is SET_GRADIENTS:
            without = not n.args[0]
        inside += (n.target in _ENTER) - (n.target in _EXIT)
    return min(first, key=lambda k: modes[k]) - first.start


@contextmanager
def kept_modes() -> Generator[None]:
    """Behind it the modes are as before, also where what runs inside fails between entering one and leaving it."""
    gradients, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    casts = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]
    depth = _autocast_depth()
    with torch.inference_mode(inference), torch.set_grad_enabled(gradients):
        try:
            yield
        finally:
            for device, enabled, dtype in casts:
                torch.set_autocast_enabled(device, enabled)
                torch.set_autocast_dtype(device, dtype)
            for _ in range(_autocast_depth() - depth):
                torch.autocast_decrement_nesting()


@contextmanager
def composites_cast() -> Generator[None]:
    """What is computed inside is cast as elsewhere. Torch takes ops apart that are made of others (`rnn_tanh_cell`,
    `einsum`) where autograd would be; in the body of a scan autograd is past, and they would be taken apart behind
    where their parts are cast."""
    past = torch._C._dispatch_tls_local_exclude_set()
    autograd = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)
    casts = any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
    if not casts or not past.has(torch._C.DispatchKey.AutogradFunctionality):
        yield
        return
    entered = torch._C._dispatch_tls_local_include_set()
    with torch.no_grad(), torch._C._ForceDispatchKeyGuard(entered, past - autograd):
        yield


def _autocast_depth() -> int:
    """How many regions of autocast this is in."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


@contextmanager
def autocast_behind(nodes: Sequence[fx.Node]) -> Generator[None]:
    """The precision that is in force behind these nodes."""
    entered: dict[fx.Node, None] = {}
    for n in nodes:
        if n.target is torch.amp.autocast_mode._enter_autocast:
            entered[n] = None
        elif n.target is torch.amp.autocast_mode._exit_autocast:
            entered.pop(cast(fx.Node, n.args[0]), None)
    with ExitStack() as stack:
        for n in entered:
            stack.enter_context(torch.amp.autocast_mode.autocast(*n.args))  # pyright: ignore[reportArgumentType]
        yield
