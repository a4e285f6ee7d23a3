"""Ops opened into arithmetic, where a number changes with the step of a loop that no tensor may stand for.

Such an op is traced in each step with that step's own numbers, its gradient as well, and what is still an op with a
number of that kind is opened by torch's rules for it, again and again. Numbers then end in arithmetic, where tensors
may stand for them. Traces that differ in anything else (a norm of 1 and one of 1.5) are no loop. The gradients are
those of the ops themselves, at the places too where two pieces meet: they are traced, not derived anew."""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves

from tilewright.capture.loops.nodes import arguments_of, val_of
from tilewright.capture.loops.spelling.in_place_ops import IN_PLACE
from tilewright.capture.loops.spelling.registry import say_publicly

from .openings import rule_of
from .places import in_its_place, takes_number
from .within import InBody, Values, changing_numbers

LOG = logging.getLogger("tilewright")
Rules = Mapping[OpOverload, Callable[..., object]]


@dataclass(frozen=True, slots=True)
class Opening:
    """What computes a node of each step, but for numbers: of `operands` tensors and a gradient of each of its `results`
    the body makes the results, and the gradients of the operands."""

    body: fx.GraphModule
    changing: tuple[tuple[InBody, Values], ...]
    operands: int
    results: int
    single: bool
    """Whether the node makes a tensor, not a tuple of them."""


def opening_of(nodes: Sequence[fx.Node]) -> Opening | None:
    """What opens these nodes, one of each step, that are alike but for numbers; None if nothing does."""
    model = nodes[1]
    if not _may_be_opened(model):
        return None
    rules: dict[OpOverload, Callable[..., object]] = {}
    for a, b in ((nodes[0], nodes[-1]), *pairwise(nodes[:3])):
        while more := _rules_wanted(_traced(a, model, rules), _traced(b, model, rules)):
            if more.keys() <= rules.keys():
                return None
            rules |= more
    bodies: dict[fx.Node, fx.GraphModule | None] = {}
    ends_first = (model, nodes[0], nodes[-1], *nodes)  # a trace takes long, and the ends differ most
    for node in ends_first:
        bodies[node] = _traced(node, model, rules)
        if changing_numbers((bodies[model], bodies[node])) is None:
            return None
    body = bodies[model]
    changing = changing_numbers([bodies[node] for node in nodes])
    if changing is None or body is None or any(_writes(n) or _draws(n) for n in body.graph.nodes):
        return None
    made = val_of(model)
    results = [made] if isinstance(made, Tensor) else tree_leaves(made)
    return Opening(
        body, tuple(changing.items()), len(_operands(model)), len(results), isinstance(made, Tensor)
    )


def _may_be_opened(node: fx.Node) -> bool:
    """Whether a node makes tensors of tensors in a memory of their own, of known sizes, in the types that they have."""
    given, made = _operands(node), tree_leaves(val_of(node))
    if not made or not given or not all(isinstance(t, FakeTensor) for t in (*given, *made)):
        return False
    tensors = [t for t in (*given, *made) if isinstance(t, FakeTensor)]
    if any(torch._C._has_storage(t) is False or t.layout != torch.strided for t in tensors):
        return False
    memories = {t.untyped_storage()._cdata for t in tensors[: len(given)]}
    if any(t.untyped_storage()._cdata in memories for t in tensors[len(given) :]):
        return False
    fixed = not any(isinstance(n, torch.SymInt) for t in tensors for n in (*t.shape, *t.stride()))
    return fixed and not torch.is_autocast_enabled(tensors[0].device.type) and not _is_basic(node)


def _is_basic(node: fx.Node) -> bool:
    """Whether a node is arithmetic itself, or writes."""
    return in_its_place(node) or node.target in IN_PLACE or str(node.target).endswith("_")


def _operands(node: fx.Node) -> list[object]:
    return [val_of(a) for a in arguments_of(node) if isinstance(a, fx.Node)]


_KNOWN: WeakKeyDictionary[fx.Node, dict[tuple[object, ...], fx.GraphModule | None]] = WeakKeyDictionary()
"""What `_traced` made, by the node that gives the operands: a loop is looked at from several beginnings."""


def _traced(node: fx.Node, model: fx.Node, rules: Rules) -> fx.GraphModule | None:
    """The results of a node, of operands like those of `model`, and the gradients of these as a graph of ops, opened by
    `rules`; None where that cannot be known."""
    plain = (str(fx.map_arg((node.args, node.kwargs), lambda _: None)), *sorted(map(str, rules)))  # pyright: ignore[reportArgumentType]
    known = _KNOWN.setdefault(model, {})
    if plain not in known:
        known[plain] = None
        for all_inexact in (True, False):  # of some operands there may be no gradient
            try:
                known[plain] = _trace(node, model, rules, all_inexact=all_inexact)
                break
            except Exception as why:  # noqa: BLE001  (whatever torch raises at what it cannot trace)
                LOG.debug("%s cannot be opened: %s", node.target, why)
    return known[plain]


def _trace(node: fx.Node, model: fx.Node, rules: Rules, *, all_inexact: bool) -> fx.GraphModule:
    """Raises whatever torch raises."""
    examples = [t for t in _operands(model) if isinstance(t, FakeTensor)]
    trains = any(isinstance(t, Tensor) and t.requires_grad for t in tree_leaves(val_of(model)))
    mode = examples[0].fake_mode
    shapes = mode.shape_env
    silent = nullcontext() if shapes is None else shapes.suppress_guards()

    def call(*operands: Tensor) -> list[Tensor]:
        left = iter(operands)
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda _: next(left))  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues, reportUnknownVariableType]
        if node.op == "call_method":
            return tree_leaves(getattr(args[0], str(node.target))(*args[1:], **kwargs))
        return tree_leaves(node.target(*args, **kwargs))  # pyright: ignore[reportCallIssue]

    def joint(*given: Tensor) -> list[Tensor | None]:
        operands, tangents = given[: len(examples)], given[len(examples) :]
        made = call(*operands)
        ends = [(x, t) for x, t in zip(made, tangents, strict=True) if x.requires_grad]
        asked = [x for x in operands if x.requires_grad]
        found: list[Tensor | None] = []
        if ends and asked:
            found += torch.autograd.grad([x for x, _ in ends], asked, [t for _, t in ends], allow_unused=True)
        left = iter(found or [None] * len(asked))
        return [*made, *(next(left) if x.requires_grad else None for x in operands)]

    with mode, silent, torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        asks = [trains and _is_inexact(t) and (all_inexact or t.requires_grad) for t in examples]
        leaves = [t.detach().requires_grad_(ask) for t, ask in zip(examples, asks, strict=True)]
        tangents = [torch.empty_like(t).detach() for t in tree_leaves(val_of(model))]
        made = make_fx(joint, decomposition_table=dict(rules))(*leaves, *tangents)
        if any(_writes(n) for n in made.graph.nodes):
            with torch.no_grad():
                plain = [x.detach() for x in (*leaves, *tangents)]
                made = make_fx(functionalize(made.forward), decomposition_table=dict(rules))(*plain)
    made.graph.eliminate_dead_code()
    for n in made.graph.nodes:
        say_publicly(n)
    made.recompile()
    return made


def _is_inexact(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _draws(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def _rules_wanted(a: fx.GraphModule | None, b: fx.GraphModule | None) -> Rules:
    """Rules for the ops of two traces of one node that differ in a number for which no tensor may stand."""
    if a is None or b is None or len(a.graph.nodes) != len(b.graph.nodes):
        return {}
    found: dict[OpOverload, Callable[..., object]] = {}
    for one, other in zip(a.graph.nodes, b.graph.nodes, strict=True):
        pairs = list(zip(arguments_of(one), arguments_of(other), strict=False))
        for p, (x, y) in enumerate(pairs):
            if isinstance(x, fx.Node) or (type(x) is type(y) and x == y) or takes_number(one, p):
                continue
            rule = rule_of(one.target)
            if rule is not None and isinstance(one.target, OpOverload):
                found[one.target] = rule
    return found
