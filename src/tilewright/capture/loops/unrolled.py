"""What equal steps of a captured graph read and make: whether they are one loop, and which."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import lcm
from typing import cast

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from tilewright.capture.modes import MODES, SET_GRADIENTS
from tilewright.tuning.search_limits import REPEATS
from tilewright.tuning.thresholds import LOOPS

from .nodes import arguments_of, val_of
from .numbers.opened import Opening, opening_of
from .numbers.places import knows, place_of_chance, takes_number
from .numbers.within import InBody, Values, body_of, changing_numbers
from .taken.kinds import Numbers, Own, Picked, Sliced, Taken
from .taken.parts import indexed, picked, picks, sliced

CHECKPOINTS = (torch.ops.higher_order.tag_activation_checkpoint,)
"""What calls a function whose inside is computed again in the backward pass."""
OF_NUMBERS = (torch.tensor, torch.as_tensor, torch.arange, torch.linspace, torch.logspace, torch.eye)
"""What makes the same tensor of the same numbers."""
Function = tuple[fx.GraphModule, tuple[tuple[InBody, Values], ...]]
"""A function that steps call, and the numbers in it that change."""


@dataclass(frozen=True, slots=True)
class PartWrite:
    """Step k writes `value`, as step 1 has it, into a part of a tensor that it does not read."""

    part: Sliced
    value: fx.Node


@dataclass(slots=True)
class EqualSteps:
    """Equal steps: `windows[k]` are the nodes of step k, and node number m of each does the same."""

    windows: list[list[fx.Node]]
    carried: dict[tuple[int, int], fx.Node] = field(default_factory=dict[tuple[int, int], fx.Node])
    """Carried values: what the node of this number made so many steps before, and what stands for it in step 0."""
    delayed: dict[tuple[int, int], tuple[int, int]] = field(
        default_factory=dict[tuple[int, int], tuple[int, int]]
    )
    """Carried values of more than one step before, by number of a node and of its argument that they are."""
    sliced: dict[object, Taken] = field(default_factory=dict[object, Taken])
    """By what stands for them in step 1: a node of it, or number of a node and of its argument."""
    again: dict[tuple[int, int], tuple[int, int]] = field(
        default_factory=dict[tuple[int, int], tuple[int, int]]
    )
    """Arguments that take what another argument takes already, by the same numbers."""
    outer: dict[fx.Node, None] = field(default_factory=dict[fx.Node, None])
    counted: dict[fx.Node, None] = field(default_factory=dict[fx.Node, None])
    """Floats and bools of sizes, in the order of the program. A scan takes none: each step computes them again."""
    functions: dict[fx.Node, Function] = field(default_factory=dict[fx.Node, Function])
    """What of these is no tensor but a function that steps call, with the numbers in it that change."""
    opened: dict[int, Opening] = field(default_factory=dict[int, Opening])
    """Nodes, by number, that are opened into arithmetic: numbers in them change."""
    stores: dict[int, PartWrite] = field(default_factory=dict[int, PartWrite])
    """Nodes, by number, that write into parts: all of them are one write behind the loop."""
    read_back: dict[fx.Node, tuple[int, int]] = field(default_factory=dict[fx.Node, tuple[int, int]])
    """Parts, by what takes them in step 1, that steps before have written: the carried values that they are."""
    read_first: frozenset[fx.Node] = frozenset()
    """Parts, by what takes them in step 1, that the step itself writes behind all reads: what lies there before."""
    held: tuple[fx.Node, ...] = ()
    """Tensors of outside that steps write to and read again: carried values in a memory of their own."""
    unseen: frozenset[fx.Node] = frozenset()
    """Those of them that steps write into without autograd's knowledge, as batch norms do with their statistics."""
    owned: frozenset[int] = frozenset()
    """Carried values, by the number of their node, that steps write into where they lie."""
    unread: frozenset[object] = frozenset()
    """What is sliced and read only by products that are sliced themselves."""

    @property
    def states(self) -> int:
        """The number of carried values, those of outside among them."""
        return len(self.carried) + len(self.held)

    def value_of(self, m: int) -> fx.Node:
        """What node number m makes in step 1, or writes."""
        return self.stores[m].value if m in self.stores else self.windows[1][m]

    @property
    def values_stored(self) -> list[fx.Node]:
        """What step 1 writes into parts."""
        return [store.value for store in self.stores.values()]

    @property
    def taken(self) -> dict[object, Taken]:
        """What a step takes of what is sliced."""
        return {key: what for key, what in self.sliced.items() if key not in self.unread}

    @property
    def steps(self) -> int:
        """Their number."""
        return len(self.windows)

    def given_to(self, m: int) -> list[object]:
        """The keys of numbers that node number m gives a function besides its arguments."""
        beyond = len(arguments_of(self.windows[1][m]))
        return [key for key in self.sliced if isinstance(key, tuple) and key[0] == m and key[1] >= beyond]

    def node_of(self, key: object) -> fx.Node:
        """What stands in step 1 for what is sliced and has this key."""
        if isinstance(key, fx.Node):
            return key
        m, p = cast(tuple[int, int], key)
        return cast(fx.Node, arguments_of(self.windows[1][m])[p])

    def taken_by(self, m: int, p: int) -> tuple[object, Taken | None]:
        """What argument p of node number m is a part of, if it is one, and the key that it has among what is sliced."""
        at = self.again.get((m, p), (m, p))
        key = at if at in self.sliced else arguments_of(self.windows[1][m])[p]
        return key, self.sliced.get(key)


class Unlike(Exception):
    """The steps are no loop that can be written as one."""


class BeginsUnlike(Unlike):
    """The first step is not like the others: those may be a loop without it."""


def runs(windows: Sequence[Sequence[fx.Node]]) -> list[tuple[int, int]]:
    """Runs of steps whose arguments come from the same places of this step and those before, or from outside, where the
    same ones differ from the step before, and plain ones by the same; longest first."""
    where = {n: (k, m) for k, window in enumerate(windows) for m, n in enumerate(window)}

    def source(k: int, n: fx.Node, p: int, a: object, b: object) -> tuple[object, ...]:
        if not isinstance(a, fx.Node):
            return ("plain", _change((n, p), a, b))
        if body_of(a) is not None and body_of(b) is not None:
            return ("function",)
        step, number = where.get(a, (-1, 0))
        inside = step >= 0 and k - step <= REPEATS.max_steps_back
        return (k - step, number) if inside else ("outside", a is not b)

    def sources(k: int) -> list[tuple[object, ...]]:
        return [
            source(k, n, p, a, b)
            for n, before in zip(windows[k], windows[k - 1], strict=True)
            for p, (a, b) in enumerate(zip(arguments_of(n), arguments_of(before), strict=True))
        ]

    runs: list[tuple[int, int]] = []
    start, usual = 0, sources(1)
    for k in range(1, len(windows)):
        now = sources(k)
        if k == start + 1:
            usual = now
        elif now != usual:
            runs.append((start, k))
            start, usual = (k - 1, now) if k == start + 2 else (k, usual)
    runs.append((start, len(windows)))
    return sorted(runs, key=lambda r: r[0] - r[1])


def cycle_of(windows: Sequence[Sequence[fx.Node]]) -> int:
    """After how many steps those plain arguments come again that keep steps apart (`flip(k % 2)`); 1 if they do not,
    or there are none."""
    cycle = 1
    for nodes in zip(*windows, strict=True):
        for p, across in enumerate(zip(*map(arguments_of, nodes), strict=True)):
            if not _keeps_apart(nodes[0], p, across):
                continue
            again = (n for n in range(2, REPEATS.max_cycle + 1) if across[n:] == across[:-n])
            cycle = lcm(cycle, next(again, REPEATS.max_cycle + 1))
            if cycle > REPEATS.max_cycle:
                return 1
    return cycle if cycle * REPEATS.min_cycles <= len(windows) else 1


def _keeps_apart(node: fx.Node, place: int, across: Sequence[object]) -> bool:
    """Whether an argument, which is across[k] in step k, makes steps unlike: a plain one that neither stays, nor
    counts, nor may differ."""
    if isinstance(across[0], fx.Node) or all(type(a) is type(across[0]) and a == across[0] for a in across):
        return False
    plain = [a for a in across if isinstance(a, (int, float))]
    if len(plain) == len(across) and takes_number(node, place) and knows(node, place, plain):
        return False
    whole = [a for a in across if type(a) is int]
    if len(whole) < len(across):
        return True
    return not picks(node, place) and len({b - a for a, b in pairwise(whole)}) > 1


def _change(at: tuple[fx.Node, int], now: object, before: object) -> object:
    """By how much a plain argument of a node differs from that of the step before. Numbers may differ at will."""
    if type(now) in (int, float) and type(before) in (int, float) and takes_number(*at):
        drops = place_of_chance(at[0]) == at[1]  # nothing, where the chance is none
        return int(drops and (now == 0) != (before == 0))
    if type(now) is float and type(before) is float:
        return 0  # the op may be opened
    if type(now) is int and type(before) is int:
        return 0 if picks(*at) else now - before
    return type(now) is type(before) and now == before


def classify_reads(windows: list[list[fx.Node]]) -> EqualSteps:
    """The steps with what they read. Raises Unlike."""
    made = EqualSteps(windows)
    where = [{n: m for m, n in enumerate(window)} for window in windows]
    for m, node in enumerate(windows[1]):
        across = [window[m] for window in windows]
        part = sliced(across, where) or _copied(made, across, where)
        if part is not None:
            made.sliced[node] = part
            continue
        if _stored(made, where, m):
            continue
        for p, across in enumerate(zip(*(arguments_of(window[m]) for window in windows), strict=True)):
            _read(made, where, (m, p), across)
    for node in [n for n in made.outer if _is_counted(n)]:
        del made.outer[node]
        _count(made, node)
    return made


def _is_counted(node: fx.Node) -> bool:
    """Whether a node is a float or a bool computed of sizes alone."""
    if not isinstance(val_of(node), (torch.SymFloat, torch.SymBool)) or node.op != "call_function":
        return False
    return all(isinstance(val_of(n), torch.SymInt) or _is_counted(n) for n in node.all_input_nodes)


def _count(made: EqualSteps, node: fx.Node) -> None:
    """Note a number of sizes as computed in each step, behind what it is computed of; sizes come from outside."""
    for n in node.all_input_nodes:
        if isinstance(val_of(n), torch.SymInt):
            made.outer[n] = None
        else:
            _count(made, n)
    made.counted[node] = None


def _stored(made: EqualSteps, where: Sequence[dict[fx.Node, int]], m: int) -> bool:
    """Whether a node writes part after part of one tensor of outside. Noted."""
    nodes = [window[m] for window in made.windows]
    base = nodes[1].args[0] if nodes[1].target is operator.setitem else None
    if not isinstance(base, fx.Node):
        return False
    tensor, value = val_of(base), nodes[1].args[2]
    if any(n.args[0] is not base for n in nodes) or not isinstance(tensor, Tensor):
        return False
    part = indexed(base, tensor, [n.args[1] for n in nodes])
    if part is None or abs(part.step) < (part.length or 1):
        return False
    if not isinstance(value, fx.Node) or value not in where[1]:
        raise Unlike("a step writes what it does not make")
    _read(made, where, (m, len(arguments_of(nodes[1])) - 1), [n.args[2] for n in nodes])
    made.stores[m] = PartWrite(part, value)
    return True


def _read(
    made: EqualSteps, where: Sequence[dict[fx.Node, int]], at: tuple[int, int], across: Sequence[object]
) -> None:
    """Note where argument `at` (number of a node, and of its argument) comes from, which is across[k] in step k."""
    second = across[1]
    if not isinstance(second, fx.Node):
        if at[0] in made.opened or made.windows[1][at[0]] in made.sliced:
            return
        if any(type(a) is not type(second) or a != second for a in across):
            node = made.windows[1][at[0]]
            if not takes_number(node, at[1]) or not all(type(a) in (int, float) for a in across):
                _open(made, at[0])
                return
            values = cast(tuple[float, ...], tuple(across))
            if not knows(node, at[1], values):
                raise Unlike(f"{node.target} computes otherwise with some of the numbers that change")
            made.sliced[at] = Numbers(values)
        return
    if second in where[1]:
        if any(a not in where[k] or where[k][a] != where[1][second] for k, a in enumerate(across)):  # pyright: ignore[reportArgumentType]
            raise BeginsUnlike("the first step is wired in another way")
    elif all(a is second for a in across):
        made.outer[second] = None
        function = body_of(second)
        if function is not None and made.functions.setdefault(second, (function, ())) != (function, ()):
            raise Unlike("a function is called with numbers that change, and without")
    elif not _called(made, at, across) and not _carried(made, where, at, across):
        outside = [a for a in across if isinstance(a, fx.Node) and not any(a in inside for inside in where)]
        if len(outside) < len(across):
            raise BeginsUnlike("the first steps are wired in another way")
        part = sliced(outside, [{}] * len(outside)) or _own(made, outside)
        first = next((key for key, what in made.sliced.items() if what == part and key != at), None)
        if isinstance(first, tuple):
            made.again[at] = cast(tuple[int, int], first)
        else:
            made.sliced[at] = part


def _open(made: EqualSteps, m: int) -> None:
    """Note how node number m is computed, whose numbers change and which takes no tensor in their place: opened into
    arithmetic (see `opened`), or, if it reads numbers alone, in front of the loop for all steps. Raises Unlike."""
    nodes = [window[m] for window in made.windows]
    if any(n.target in MODES and n.target is not SET_GRADIENTS for n in made.windows[1]):
        raise Unlike(f"an argument of {nodes[1].target} differs from step to step, in a mode of its own")
    opening = None if nodes[1].target in OF_NUMBERS else opening_of(nodes)
    # its numbers are the opening's now; what stands for its operands stays
    stale = [
        (m, p) for p in range(len(arguments_of(nodes[1]))) if isinstance(made.sliced.get((m, p)), Numbers)
    ]
    for key in stale:
        del made.sliced[key]
    if opening is not None:
        made.opened[m] = opening
    elif nodes[1].target in OF_NUMBERS and not nodes[1].all_input_nodes:
        made.sliced[nodes[1]] = _own(made, nodes)
        return
    else:
        raise Unlike(f"an argument of {nodes[1].target} differs from step to step")
    beyond = len(arguments_of(nodes[1]))
    for k, (_, values) in enumerate(opening.changing):
        made.sliced[m, beyond + k] = Numbers(values)


def _called(made: EqualSteps, at: tuple[int, int], across: Sequence[object]) -> bool:
    """Whether an argument is a function that is the same in each step but for numbers in it. Noted: the node gives them
    to it behind its arguments."""
    m, second = at[0], cast(fx.Node, across[1])
    node, bodies = made.windows[1][m], [body_of(a) for a in across]
    changing = None if node.target not in CHECKPOINTS else changing_numbers(bodies)
    if changing is None:
        return False
    if second in made.functions:
        raise Unlike("a function is called twice with numbers that change")
    made.outer[second] = None
    made.functions[second] = (cast(fx.GraphModule, bodies[1]), tuple((at, v) for at, v in changing.items()))
    beyond = len(arguments_of(node))
    for k, values in enumerate(changing.values()):
        made.sliced[m, beyond + k] = Numbers(values)
    return True


def _carried(
    made: EqualSteps, where: Sequence[dict[fx.Node, int]], at: tuple[int, int], across: Sequence[object]
) -> bool:
    """Whether an argument is what a step before made. Noted with what stands for it in the first steps."""
    count, last = len(across), cast(fx.Node, across[-1])
    back = next(
        (d for d in range(1, min(REPEATS.max_steps_back, count - 1) + 1) if last in where[count - 1 - d]),
        None,
    )
    if back is None:
        return False
    number = where[count - 1 - back][last]
    if any(across[k] is not made.windows[k - back][number] for k in range(back, count)):
        raise BeginsUnlike("the first steps are wired in another way")
    for k, first in enumerate(across[:back]):
        if not isinstance(first, fx.Node):
            raise BeginsUnlike("the first step reads a number where others read a tensor")
        if any(first in inside for inside in where):
            raise BeginsUnlike("the first steps are wired in another way")
        if made.carried.setdefault((number, back - k), first) is not first:
            raise BeginsUnlike("one value is carried from two beginnings")
    if back > 1:
        made.delayed[at] = (number, back)
    return True


def _own(made: EqualSteps, nodes: Sequence[fx.Node]) -> Own:
    """The tensors that steps read, each one of its own. Raises BeginsUnlike for such of unlike types, and for large
    ones: they are copied into one tensor at each call. (Layers behind each other, of weights of their own, are no
    loop.)"""
    first = val_of(nodes[0])
    values = [v for n in nodes if isinstance(v := val_of(n), Tensor)]
    if not isinstance(first, Tensor) or len(values) < len(nodes):
        raise BeginsUnlike("each step reads something of its own")
    kinds = {(str(v.shape), v.dtype, v.device) for v in values}
    if len(kinds) > 1:
        raise BeginsUnlike("each step reads a tensor of its own type")
    if not _may_be_copied(made, values):
        raise BeginsUnlike("each step reads a large tensor of its own")
    return Own(tuple(nodes))


def _copied(made: EqualSteps, nodes: Sequence[fx.Node], where: Sequence[dict[fx.Node, int]]) -> Picked | None:
    """What one tensor's parts are that the steps read, at places in any order, unless they are large."""
    part, first = picked(nodes, where), val_of(nodes[0])
    return part if isinstance(first, Tensor) and _may_be_copied(made, [first]) else None


def _may_be_copied(made: EqualSteps, values: Sequence[Tensor]) -> bool:
    """Whether what each step reads of its own is small, or small for a step and no weight."""
    most = sum(v.numel() for n in made.windows[1] if isinstance(v := val_of(n), Tensor))
    is_weight = any(isinstance(v, torch.nn.Parameter) for v in values)
    return statically_known_true(values[0].numel() <= LOOPS.max_gathered_elements) or (
        not is_weight and statically_known_true(values[0].numel() <= most)
    )
