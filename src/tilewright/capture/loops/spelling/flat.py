"""Graphs in which functions of torch's that take functions (`torch.func.grad`, `vmap`) are at work, in the ops that
these run: a scan cannot stand within them, and steps of what they run are steps like others."""

# What torch offers to transforms it names with underscores.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, fx
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import make_fx

from tilewright.capture.loops.nodes import val_of
from tilewright.capture.modes import MODES, kept_modes

from .registry import as_programs_do

LOG = logging.getLogger("tilewright")
_LEVELS = torch._C._functorch
ENTER, LEAVE = "_increment_nesting", "_decrement_nesting"
"""How names end of what begins and ends a level of functions that take functions."""


def without_levels(gm: fx.GraphModule) -> fx.GraphModule | None:
    """The graph in ops of torch's registry, without functions that take functions; None if it has none, or if what
    autograd is to do with it would be lost. Nodes carry `meta["example_value"]`."""
    nodes = list(gm.graph.nodes)
    if not any(n.op == "call_function" and _name(n).endswith(ENTER) for n in nodes):
        return None
    given = [val_of(n) for n in nodes if n.op == "placeholder"]
    fake = next((t for t in given if isinstance(t, FakeTensor)), None)
    lost = _lost(nodes, given)
    if lost or fake is None:
        LOG.info("equal steps stay apart: %s beside functions that take functions", lost or "no operand")
        return None
    try:
        with fake.fake_mode, kept_modes(), _kept_levels():
            made = make_fx(gm.forward, _allow_non_fake_inputs=True)(*map(_anew, given))
        made.graph.eliminate_dead_code()
        _enter_plainly(made, fake.device.type)
        as_programs_do(made)
        with fake.fake_mode, kept_modes():
            _Noted(made).run(*map(_anew, given))
    except Exception as why:  # noqa: BLE001  (whatever torch raises at what it cannot trace)
        LOG.info("equal steps stay apart: torch cannot trace the functions around them (%s)", why)
        return None
    return made


def _anew(x: object) -> object:
    """An operand like this one: a trace may write into it."""
    if not isinstance(x, Tensor):
        return x
    return torch.empty_strided(
        x.shape, x.stride(), dtype=x.dtype, device=x.device, requires_grad=x.requires_grad
    )


def _enter_plainly(gm: fx.GraphModule, device: str) -> None:
    """Let nothing in a graph be cast that was cast as it was traced."""
    if not torch.is_autocast_enabled(device):
        return
    last = gm.graph.find_nodes(op="output")[0]
    with gm.graph.inserting_before(next(n for n in gm.graph.nodes if n.op != "placeholder")):
        mode = gm.graph.call_function(
            torch.amp.autocast_mode._enter_autocast, (device, torch.get_autocast_dtype(device), False, True)
        )
    with gm.graph.inserting_before(last):
        gm.graph.call_function(torch.amp.autocast_mode._exit_autocast, (mode,))


def _lost(nodes: Sequence[fx.Node], given: Sequence[object]) -> str:
    """What a trace of these nodes would lose: below autograd nobody sees who is without gradients, or has its own."""
    if any(n.op in ("get_attr", "call_module") for n in nodes):
        return "tensors or functions that the graph holds"
    if not all(
        isinstance(t, FakeTensor) and t.layout == torch.strided for t in given if isinstance(t, Tensor)
    ):
        return "an operand that is no plain tensor"
    if not torch.is_grad_enabled() or not any(isinstance(t, Tensor) and t.requires_grad for t in given):
        return ""
    alone = next((n for n in nodes if n.target in MODES or isinstance(n.target, HigherOrderOperator)), None)
    return "" if alone is None else f"{_name(alone)}, which autograd is to see"


class _Noted(fx.Interpreter):
    """Runs a graph, and notes what each node makes."""

    def run_node(self, n: fx.Node) -> object:
        """See the class."""
        made = n.meta["example_value"] = super().run_node(n)
        return made


@contextmanager
def _kept_levels() -> Generator[None]:
    """Behind it, no level is open that was not before, also where what runs inside fails."""
    depth = _LEVELS.get_dynamic_layer_stack_depth()
    try:
        yield
    finally:
        if _LEVELS.get_dynamic_layer_stack_depth() > depth:
            _LEVELS.pop_dynamic_layer_stack_and_undo_to_depth(depth)
            torch._C._autograd._saved_tensors_hooks_enable()


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))
