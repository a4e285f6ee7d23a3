"""A kernel that sums parts, as it is emitted, with the merge behind it in the same kernel: the block that arrives last.

Every block of a tile stores its part and counts itself. The one that finds all others counted loads the parts in index
order, adds them, does what stands behind the sum, and sets the counter of its tile to zero for the next launch.

What orders memory: the barrier puts the stores of all threads in front of the count, which releases them; the count
acquires those of other blocks, and hands its result to all threads through shared memory, behind a barrier; parts are
loaded past the first cache (`.cg`), which may hold old lines.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace

from tilewright.emit.triton.kernel import Argument, TritonSource

HINTS = ("max_contiguous", "multiple_of")
"""What is told of addresses; the first argument is the address."""

PART = "g0"
"""The part is what varies slowest among the axes of a grid."""


@dataclass(frozen=True)
class Merge:
    """How parts are merged: their number, elements of the result and blocks of the whole grid; whether a bias for each
    feature (the innermost axis of the result) and ReLU stand behind the sum; whether it is one of fp64, as in merging
    kernels, or of fp32."""

    parts: int
    elements: int
    blocks: int
    bias: bool
    wide: bool = True


def with_tail(source: TritonSource, merge: Merge) -> TritonSource:
    """The kernel with its tail. New pointers follow the others: the result, counters (one for each tile, zero), and the
    bias. Raises ValueError for a kernel whose text does not end in the store of a part."""
    count = sum(a.kind == "pointer" for a in source.arguments)
    kinds = ("*fp16", "*i32", "*fp16") if merge.bias else ("*fp16", "*i32")
    more = [Argument("pointer", f"p{count + k}", kind, count + k, True) for k, kind in enumerate(kinds)]
    arguments = (*source.arguments[:count], *more, *source.arguments[count:])
    heading = f"def {source.entry}({', '.join(a.name for a in arguments)}):"
    text, found = re.subn(rf"^def {source.entry}\(.*\):$", heading, source.text, flags=re.MULTILINE)
    if found != 1:
        raise ValueError(f"no function {source.entry}")
    lines = _tail(_Stored.of(source), merge, [a.name for a in more])
    body = "\n".join(f"    {line}" for line in lines)
    return replace(source, text=f"{text.rstrip()}\n{body}\n", arguments=arguments)


def _tail(stored: _Stored, merge: Merge, names: list[str]) -> Iterator[str]:
    result, counters = names[:2]
    kind = "tl.float64" if merge.wide else "tl.float32"
    axis = stored.part_axis(merge.elements)
    masked = f", mask={stored.mask}" if stored.mask else ""
    filled = f"{masked}, other=0.0" if masked else ""

    def loaded(part: str) -> str:
        place = stored.place_of(axis, part)
        return f"tl.load({stored.base} + {place}{filled}, cache_modifier='.cg').to({kind})"

    yield "tl.debug_barrier()"
    yield f"counter = {counters} + tl.program_id(0) % {merge.blocks // merge.parts}"
    yield "arrived = tl.atomic_add(counter, 1, sem='acq_rel', scope='gpu')"
    yield f"if arrived == {merge.parts - 1}:"
    yield f"    total = {loaded('0')}"
    yield f"    for part in tl.static_range(1, {merge.parts}):"
    yield f"        total += {loaded('part')}"
    yield "    total = total.to(tl.float32)"
    if merge.bias:
        feature, dims = stored.innermost()
        yield f"    total += tl.load({names[2]} + {feature}).to(tl.float32){dims}"
        yield "    total = tl.maximum(total, 0.0, propagate_nan=tl.PropagateNan.ALL)"
    yield f"    tl.store({result} + {stored.place_of(axis, '0')}, total.to(tl.float16){masked})"
    yield "    tl.store(counter, 0)"


@dataclass(frozen=True)
class _Stored:
    """The store at the end of a kernel: its pointer, where it stores behind it (without names for shared numbers), and
    its mask (empty: none)."""

    base: str
    place: ast.expr
    mask: str

    @classmethod
    def of(cls, source: TritonSource) -> _Stored:
        functions = [n for n in ast.parse(source.text).body if isinstance(n, ast.FunctionDef)]
        (function,) = (f for f in functions if f.name == source.entry)
        last = function.body[-1]
        call = last.value if isinstance(last, ast.Expr) else None
        if not isinstance(call, ast.Call) or ast.unparse(call.func) != "tl.store":
            raise ValueError("a kernel does not end in a store")
        known = _definitions(function)
        address = _inlined(call.args[0], known)
        masks = [k.value for k in call.keywords if k.arg == "mask"]
        bases = [ast.unparse(t) for t, _ in _terms(address) if _is_name(t, "p")]
        if len(bases) != 1 or any(_has_part(_inlined(m, known)) for m in masks):
            raise ValueError(f"not understood: {ast.unparse(call)}")
        place = _replaced(address, {bases[0]: ast.Constant(0)})
        return cls(bases[0], place, ast.unparse(masks[0]) if masks else "")

    def part_axis(self, elements: int) -> str:
        """The name of the axis whose steps are a whole result. Raises ValueError if it is not the slowest one."""
        products = [
            n for n in ast.walk(self.place) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult)
        ]
        steps = [
            n.left.id
            for n in products
            if isinstance(n.left, ast.Name)
            and isinstance(n.right, ast.Constant)
            and n.right.value == elements
        ]
        if steps != [PART]:
            raise ValueError(f"parts are not found in {ast.unparse(self.place)}")
        return PART

    def place_of(self, axis: str, part: str) -> str:
        """Where an element of part `part` stands behind the pointer."""
        return ast.unparse(_replaced(self.place, {axis: ast.parse(part, mode="eval").body}))

    def innermost(self) -> tuple[str, str]:
        """The index along the innermost axis, and how it becomes one of the block. Raises ValueError if there is not
        one, or if the mask asks for it."""
        found = [(ast.unparse(t), dims) for t, dims in _terms(self.place) if _is_name(t, "a")]
        if len(found) != 1 or re.search(rf"\b{found[0][0]}\b", self.mask):
            raise ValueError(f"no innermost axis in {ast.unparse(self.place)}")
        return found[0]


def _definitions(function: ast.FunctionDef) -> dict[str, ast.expr]:
    """What the names of numbers and masks stand for."""
    found: dict[str, ast.expr] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if re.fullmatch(r"[im]\d+", name):
                found[name] = node.value
    return found


class _Names(ast.NodeTransformer):
    def __init__(self, values: Mapping[str, ast.expr]) -> None:
        self._values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        value = self._values.get(node.id)
        return node if value is None else self.visit(deepcopy(value))


def _inlined(node: ast.expr, known: Mapping[str, ast.expr]) -> ast.expr:
    made: ast.expr = _Names(known).visit(deepcopy(node))
    return made


def _replaced(node: ast.expr, values: Mapping[str, ast.expr]) -> ast.expr:
    return _inlined(node, values)


def _has_part(node: ast.expr) -> bool:
    return any(isinstance(n, ast.Name) and n.id == PART for n in ast.walk(node))


def _terms(node: ast.expr, dims: str = "") -> Iterator[tuple[ast.expr, str]]:
    """The terms of a sum of addresses, each with the index that gives it the dims of the block."""
    match node:
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            yield from _terms(left, dims)
            yield from _terms(right, dims)
        case ast.Subscript(value=value, slice=index):
            yield from _terms(value, f"[{ast.unparse(index).strip('()')}]")
        case ast.Call(func=ast.Attribute(attr=name), args=[first, *_]) if name in HINTS:
            yield from _terms(first, dims)
        case _:
            yield node, dims


def _is_name(node: ast.expr, kind: str) -> bool:
    """Whether it is the name of a pointer (p) or of an index along a block axis (a)."""
    return isinstance(node, ast.Name) and re.fullmatch(rf"{kind}\d+(_\d+)?", node.id) is not None
