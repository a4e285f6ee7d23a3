"""What leaves the steps of a loop, and which of it is written to afterwards.

A scan stacks copies of what its steps made. That is the same as the steps were as long as nobody tells a copy from the
tensor it was taken of: by writing to one of two that share memory, or by getting both as results. Which tensors share
memory is what torch's pretended tensors say; whether a call writes is seen by making it once more with others."""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import contextlib
import operator
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._higher_order_ops.effects import has_effects
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_arg
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .nodes import val_of
from .unrolled import Unlike


class Watch(TorchDispatchMode):
    """Notes which memory ops write into, which op draws random numbers (empty: none), and which one does what torch
    keeps in order beside values: it may raise, or print."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.wrote: dict[int, str] = {}
        self.drew = ""
        self.acted = ""

    def __torch_dispatch__(
        self, func: OpOverload | HigherOrderOperator, types: object, args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:  # fmt: skip
        """Run the op."""
        given = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            return self._called(func, args, given)
        for k, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[k] if k < len(args) else given.get(argument.name)
                self.wrote.update(dict.fromkeys(memories_of(value), str(func)))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.drew = str(func)
        if has_effects(func):
            self.acted = str(func)
        return func(*args, **given)

    def _called(
        self, func: HigherOrderOperator, args: tuple[object, ...], given: Mapping[str, object]
    ) -> object:
        """Run an op that calls functions: what torch captured as such writes nothing."""
        bodies = [g for g in args if isinstance(g, fx.GraphModule)]
        targets = [
            n.target for g in bodies for n in g.graph.nodes if n.op in ("call_function", "call_method")
        ]
        if any(torch.Tag.nondeterministic_seeded in getattr(t, "tags", ()) for t in targets):
            self.drew = str(func)
        return func(*args, **given)


def written_after(
    before: Sequence[fx.Node], leaving: Sequence[fx.Node], after: Sequence[fx.Node]
) -> frozenset[fx.Node]:
    """Those of the nodes that leave a loop whose memory something writes to after it: `before`, `leaving` and `after`
    are nodes that precede, belong to, and follow the loop. Raises Unlike where copies would be told from them."""
    if not all(any(memories_of(val_of(n))) for n in leaving):
        raise Unlike("a step makes a tensor that is not one piece of memory")
    owners: Counter[int] = Counter(m for n in leaving for m in memories_of(val_of(n)))
    outside = {m for n in before for m in memories_of(val_of(n))} & set(owners)
    written: set[int] = set()
    results: Counter[int] = Counter()
    for node in after:
        touched = {m for n in node.all_input_nodes for m in memories_of(val_of(n)) if m in owners}
        if node.op == "output":
            results = Counter(m for n in node.all_input_nodes for m in memories_of(val_of(n)) if m in owners)
        elif touched - written:
            written.update(written_by(node, touched))
    if any(owners[m] > 1 or m in outside for m in written):
        raise Unlike("two values of the steps share memory that is written to afterwards")
    if any(m in outside or (owners[m] > 1 and times > 1) for m, times in results.items()):
        raise Unlike("results share memory")
    return frozenset(n for n in leaving if any(m in written for m in memories_of(val_of(n))))


def memories_of(value: object) -> Iterator[int]:
    """What tells the memory of each tensor of a value from other memory."""
    for t in tree_leaves(value):
        if isinstance(t, Tensor) and torch._C._has_storage(t):
            yield t.untyped_storage()._cdata


def overlaps(t: Tensor) -> bool:
    """Whether two elements of a tensor may lie in one place, at the sizes that are known or were seen."""
    seen = [
        [n.node.hint if isinstance(n, torch.SymInt) else n for n in part] for part in (t.stride(), t.shape)
    ]
    if t.layout != torch.strided or any(n is None for part in seen for n in part):
        return False
    end = 0
    for step, size in sorted(zip(*seen, strict=True)):
        if size > 1:
            if step <= end:
                return True
            end += step * (size - 1)
    return False


def written_by(node: fx.Node, touched: Collection[int]) -> Collection[int]:
    """The memory of these that a node writes to; all of it where that cannot be known."""
    seen = seen_to_write(node, touched)
    return touched if seen is None else seen


def seen_to_write(node: fx.Node, touched: Collection[int]) -> Collection[int] | None:
    """The memory of these that a node writes to, seen by calling it with other tensors that look the same; None where
    that cannot be done."""
    if _only_reads(node):
        return ()
    called = {"call_function": node.target, "call_method": _method}.get(node.op)
    values = {n: val_of(n) for n in node.all_input_nodes}
    mode = next((v.fake_mode for v in values.values() if isinstance(v, FakeTensor)), None)
    if called is None or mode is None or any(v is None for v in values.values()):
        return None
    fresh = mode.shape_env.ignore_fresh_unbacked_symbols() if mode.shape_env else contextlib.nullcontext()
    watch = Watch()
    try:
        with mode, fresh, torch.no_grad(), enable_python_dispatcher():
            others = {n: _like(v) if isinstance(v, Tensor) else v for n, v in values.items()}
            args, kwargs = map_arg((node.args, node.kwargs), lambda n: others[n])  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues, reportUnknownVariableType]
            with watch:
                called(*((node.target,) if called is _method else ()), *args, **kwargs)  # pyright: ignore[reportCallIssue, reportUnknownArgumentType]
    except Exception:  # noqa: BLE001  (whatever a call raises on what only looks like its operands)
        return None
    return {
        m
        for n, v in values.items()
        for m, other in zip(memories_of(v), memories_of(others[n]), strict=True)
        if m in touched and other in watch.wrote
    }


_OPERATORS = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "lt", "le", "gt", "ge", "eq", "ne", "and_",
    "or_", "xor", "neg", "abs", "invert", "getitem",
)  # fmt: skip
_READING = frozenset(getattr(operator, name) for name in _OPERATORS)


def _only_reads(node: fx.Node) -> bool:
    """Whether the name of what a node calls says that it writes nothing: methods that write end in an underscore."""
    if node.op == "call_method":
        return not str(node.target).endswith("_") and "out" not in node.kwargs
    return node.op == "call_function" and node.target in _READING


def _like(t: Tensor) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)


def _method(name: object, receiver: object, *args: object, **kwargs: object) -> object:
    return getattr(receiver, str(name))(*args, **kwargs)
