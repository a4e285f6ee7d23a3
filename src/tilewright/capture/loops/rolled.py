"""Loops that Dynamo took apart step by step, as scans again.

A loop in Python leaves equal steps behind each other in the graph. Where step k reads what step k - 1 made, the same
tensors in every step, and parts of tensors that move by one with each step, the steps become one scan of torch's. Torch
knows its gradient: so this happens before autograd, and is right for training and inference alike. Numbers that change
with the step become one more tensor that is sliced. What is read of each step is stacked by the scan. What steps write
is carried, or stacked as well (`in_place`). Steps draw random numbers in the order of before."""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from tilewright.capture.modes import autocast_behind, shift_of
from tilewright.tuning.search_limits import REPEATS
from tilewright.tuning.thresholds import LOOPS

from .beside_values import check_beside
from .in_place import Writes, check_writes, owning, reading_back
from .leaving import Watch, memories_of, written_after
from .lifted import lift_products
from .nodes import arguments_of, val_of
from .numbers.bodies import taking_numbers
from .numbers.differentiated import Differentiated
from .numbers.draws import drawn_in_front, sample_of
from .numbers.stepping import copied, type_of
from .numbers.within import body_of
from .recurrent import CARRIED_INEXACT, SCANS_DIFFERENTIATE
from .repeats import Repeat, repeats
from .scanned import CHECKPOINTS, Scan, ScannedLoop, replace_by_scan, tensors_of, written_of
from .spelling.bodies import with_bodies_once
from .spelling.flat import without_levels
from .spelling.fresh import compute_apart
from .spelling.parts import write_parts_by_index
from .spelling.places import place_parts
from .spelling.rows import write_rows_once
from .taken.kinds import Drawn, Numbers
from .unrolled import BeginsUnlike, EqualSteps, Unlike, classify_reads, cycle_of, runs

LOG = logging.getLogger("tilewright")
_DRAWS = "draws"
"""By which the body of a loop knows whether it draws random numbers."""


def roll_loops(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph with a scan in the place of each loop of more than `LOOPS.max_unrolled_steps` equal steps; itself if
    it has none. Nodes carry `meta["example_value"]`."""
    flat = without_levels(gm) if _may_repeat(gm) else None
    if flat is not None and (made := _rolled(flat)) is not flat:
        return made
    return _rolled(_rolled_within(with_bodies_once(gm)))


def _may_repeat(gm: fx.GraphModule) -> bool:
    """Whether a graph has equal steps, as far as its nodes tell."""
    return bool(repeats(list(gm.graph.nodes), LOOPS.max_unrolled_steps))


def _rolled_within(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph with loops in the functions that it computes again (checkpoints), unless these draw: what draws in a
    loop would draw anew."""
    bodies = {n.target: body for n in gm.graph.find_nodes(op="get_attr") if (body := body_of(n)) is not None
              and all(user.target in CHECKPOINTS for user in n.users)}  # fmt: skip
    loops = {name: made for name, body in bodies.items() if (made := roll_loops(body)) is not body
             and not any(loop.body.meta[_DRAWS] for loop in made.children() if isinstance(loop, Scan))}  # fmt: skip
    if not loops:
        return gm
    made = copy.copy(gm)
    for name, body in loops.items():
        setattr(made, str(name), body)
    return made


def _rolled(gm: fx.GraphModule) -> fx.GraphModule:
    if len(gm.graph.nodes) <= LOOPS.max_unrolled_steps:
        return gm
    if _device(gm.graph.nodes) not in ("cpu", "cuda"):
        return gm
    plain = with_bodies_once(gm)
    made, found = write_parts_by_index(plain), False
    most = LOOPS.max_unrolled_steps
    while True:
        spelled, loop = made, _first_loop(list(made.graph.nodes), most)
        for spell in _SPELLINGS:
            if loop is None:
                spelled = spell(made, plain)
                loop = None if spelled is made else _first_loop(list(spelled.graph.nodes), most)
        if loop is None:
            _tell_of_sizes(list(gm.graph.nodes), found=found)
            return made if found else gm
        if loop.steps * loop.cycle <= most:  # a part of many: what is left of them alone may be few
            most = min(most, REPEATS.min_part_steps - 1)
        LOG.info("%d equal steps became a loop", loop.steps)
        made, found = replace_by_scan(spelled, loop), True
        plain = made


def _tell_of_sizes(nodes: Sequence[fx.Node], *, found: bool) -> None:
    """Say that steps are compiled one by one because their sizes differ, if they do and all else is alike."""
    most = LOOPS.max_unrolled_steps
    if found or repeats(nodes, most, named=False):
        return
    grown = repeats(nodes, most, named=False, sized=False)
    if grown:
        LOG.info(
            "%d steps stay apart: their sizes differ, and a loop has one size", max(r.steps for r in grown)
        )


_SPELLINGS: tuple[Callable[[fx.GraphModule, fx.GraphModule], fx.GraphModule], ...] = (
    lambda made, _: write_rows_once(compute_apart(made)),
    lambda made, _: place_parts(compute_apart(made)),
    lambda _, plain: place_parts(plain, through=True),
)
"""Other spellings of a graph, of one with writes into parts by index and of what it was before, tried in this order
where no steps are found alike."""


def _first_loop(nodes: Sequence[fx.Node], most: int) -> ScannedLoop | None:
    """A loop of more than `most` steps among these nodes; one of whose steps each one reads an input of its own only if
    there is no other."""
    for cycles in (False, True):
        for named in (True, False):
            for repeat in repeats(nodes, most, named=named):
                cycle = cycle_of(_windows(nodes, repeat)) if cycles else 1
                loop = _loop(nodes, repeat.joined(cycle)) if cycles == (cycle > 1) else None
                if loop is not None:
                    return loop
    return None


def _windows(nodes: Sequence[fx.Node], repeat: Repeat, shift: int = 0) -> list[list[fx.Node]]:
    """The nodes of each step, begun so many nodes later."""
    period, start = repeat.period, repeat.start + shift
    return [
        list(nodes[start + k * period : start + (k + 1) * period]) for k in range(repeat.steps - (shift > 0))
    ]


def _device(nodes: Iterable[fx.Node]) -> str:
    """Where the tensors of a graph lie; empty if at several places."""
    found = {t.device.type for t in tensors_of(nodes)}
    return found.pop() if len(found) == 1 else ""


def _loop(nodes: Sequence[fx.Node], repeat: Repeat) -> ScannedLoop | None:
    """The loop of a stretch, if it is one: of all its steps, or of the longest run of steps that are alike."""
    period, shift = repeat.period, shift_of(nodes, repeat)
    start, windows = repeat.start + shift, _windows(nodes, repeat, shift)
    if not all(n.op in ("call_function", "call_method") for n in windows[0]):
        return None
    for first, last in runs(windows):
        while last - first > repeat.most:
            try:
                begin, end = start + first * period, start + last * period
                check_beside(nodes, begin, end)
                with autocast_behind(nodes[:begin]):
                    found = reading_back(classify_reads(windows[first:last]))
                    drawn_in_front(found)
                    steps, body, stacked, ends, idle = _made(found)
                leaving = [window[m] for window in steps.windows for m in stacked]
                leaving += [steps.windows[-1][m] for m in ends]
                written = written_after(nodes[:begin], leaving, nodes[end:])
                return ScannedLoop(steps, body, stacked, ends, written, idle, repeat.cycle)
            except BeginsUnlike as why:
                LOG.info("%s: the loop begins with the next one", why)
                first += 1
            except Unlike as why:
                LOG.info("equal steps stay apart: %s", why)
                break
    return None


# --- the body ---


def _made(
    found: EqualSteps,
) -> tuple[EqualSteps, fx.GraphModule, tuple[int, ...], dict[int, int], frozenset[int]]:
    """The steps as a loop runs them, and what `_body` says of them. Raises Unlike."""
    try:
        steps = lift_products(found)
        return steps, *_body(steps)
    except Writes as why:
        steps = owning(found, why)
        return steps, *_body(steps)


def _leaving(found: EqualSteps) -> tuple[tuple[int, ...], dict[int, int]]:
    """Numbers of the nodes of a step: carried ones of which only what the last step makes is read outside are second,
    with the carried values that they are; all others that are read outside are first."""
    windows = found.windows
    inside = {n for window in windows for n in window}
    made = [m for m in range(len(windows[0])) if windows[1][m] not in found.sliced]
    carried = {m: p for p, (m, delay) in enumerate(found.carried) if delay == 1}
    readers = {m: [k for k in range(len(windows)) if _read_outside(found, k, m, inside)] for m in made}
    ends = {m: carried[m] for m in made if readers[m] == [len(windows) - 1] and m in carried}
    stacked = tuple(m for m in made if readers[m] and m not in ends)
    return stacked, {m: p for m, p in ends.items() if m not in found.owned}


def _body(
    found: EqualSteps,
) -> tuple[fx.GraphModule, tuple[int, ...], dict[int, int], frozenset[int]]:
    """The body of the steps, what of each step is stacked, what of the last is read, and what it takes that gets no
    gradient. Raises Unlike."""
    windows = found.windows
    stacked, ends = _leaving(found)
    check_writes(found, stacked, ends)
    _check_kinds(found, stacked)
    graph, root = fx.Graph(), torch.nn.Module()
    values, samples = _given(found, graph, root)
    keys = {n: k for k, n in values.items() if n.op == "placeholder"}
    given = list(keys.values())
    for key in (*found.held, *(("carried", m, 1) for m in found.owned)):
        if SCANS_DIFFERENTIATE and isinstance(key, fx.Node) and not _asks_gradient([key]):
            values[key] = graph.call_method("detach", (values[key],))  # scans ask for those of all states
        values[key] = graph.call_method("clone", (values[key],))
    values |= {windows[0][m]: values["carried", m, delay] for m, delay in found.carried if delay == 1}
    stored: list[fx.Node] = []
    for m, node in enumerate(windows[1]):
        if m in found.stores:  # as it is now: a step may write into it later
            values[node] = graph.call_method("clone", (values[found.stores[m].value],))
            stored.append(values[node])
        elif node in found.read_back:
            values[node] = values["carried", *found.read_back[node]]
        elif node not in found.sliced:
            values[node] = _copied(graph, found, node, m, values)
    carried = [
        values[windows[1][m] if delay == 1 else ("carried", m, delay - 1)] for m, delay in found.carried
    ]
    carried += [values[node] for node in found.held]
    results = [graph.call_method("clone", (values[windows[1][m]],)) for m in stacked]
    rows = [graph.call_method("contiguous", (x,)) for x in carried]
    graph.output((*[graph.call_method("clone", (x,)) for x in rows], *results, *stored))
    body = fx.GraphModule(root, graph)
    _check(found, body, samples, given, stacked)
    idle = _idle(body, samples, found.states)
    if not SCANS_DIFFERENTIATE and any(k < found.states for k in idle):
        raise Unlike("this torch fails where a step differentiates nothing of a state")
    return body, stacked, ends, idle


def _given(
    found: EqualSteps, graph: fx.Graph, root: torch.nn.Module
) -> tuple[dict[object, fx.Node], list[object]]:
    """The placeholders of a body by what they stand for, and what stands for their values. Functions that steps call
    are attributes of `root`."""
    values: dict[object, fx.Node] = {}
    samples: list[object] = []

    def take(key: object, sample: object) -> None:
        values[key] = graph.placeholder(f"given_{len(samples)}")
        samples.append(sample)

    for m, delay in found.carried:
        take(("carried", m, delay), val_of(found.value_of(m)))
    for node in found.held:
        take(node, val_of(node))
    like = tensors_of(found.windows[0])[0]
    for key, what in found.taken.items():
        if isinstance(what, Numbers):
            take(key, like.new_zeros((), dtype=type_of(what)))
        elif isinstance(what, Drawn):
            take(key, sample_of(what))
        else:
            take(key, val_of(found.node_of(key)))
    if not found.taken:
        take("counter", like.new_zeros((), dtype=torch.int64))
    for m, opening in found.opened.items():
        body = taking_numbers(opening.body, opening.changing)
        made = Differentiated(body, opening.operands, opening.results, single=opening.single)
        root.add_module(_opened(m), made)
    for node in found.outer:
        if node in found.functions:
            root.add_module(str(node.target), taking_numbers(*found.functions[node]))
            values[node] = graph.get_attr(str(node.target))
        elif node not in found.held:
            take(node, val_of(node))
    for node in found.counted:
        values[node] = graph.node_copy(node, values.__getitem__)
    return values, samples


def _opened(m: int) -> str:
    return f"opened_{m}"


def _check_kinds(found: EqualSteps, stacked: Sequence[int]) -> None:
    """Raise Unlike for values that no scan carries or stacks."""
    windows = found.windows
    left = [*(found.value_of(m) for m in (*(m for m, _ in found.carried), *stacked)), *found.values_stored]
    if not all(isinstance(val_of(n), Tensor) for n in left):
        raise Unlike("what leaves a step is no tensor")
    kinds = {
        t.dtype
        for n in (*left, *found.held)
        for t in tensors_of([n])
        if not (t.is_floating_point() or t.is_complex())
    }
    if kinds - CARRIED_INEXACT.keys() and _asks_gradient(windows[1]):
        raise Unlike("torch has no gradient of loops over unsigned integers")


def _asks_gradient(nodes: Sequence[fx.Node]) -> bool:
    return any(t.requires_grad for t in tensors_of(nodes))


def _copied(
    graph: fx.Graph, found: EqualSteps, node: fx.Node, m: int, values: dict[object, fx.Node]
) -> fx.Node:  # fmt: skip
    """A node of step 1 in the body."""

    def operand(p: int, _: fx.Node) -> fx.Node:
        delayed = found.delayed.get((m, p))
        return values[("carried", *delayed) if delayed is not None else found.taken_by(m, p)[0]]

    changing = {
        p: (values[m, p], what)
        for p in range(len(arguments_of(node)))
        if isinstance(what := found.sliced.get((m, p)), Numbers)
    }
    given = found.given_to(m)
    drawn = next((values[key] for key in given if isinstance(found.sliced[key], Drawn)), None)
    if m in found.opened:
        operands = [operand(p, a) for p, a in enumerate(arguments_of(node)) if isinstance(a, fx.Node)]
        made = graph.call_module(_opened(m), (*operands, *(values[key] for key in given)))
        made.meta = written_of(node)
        return made
    made = copied(graph, node, operand, changing, drawn)
    made.args = (*made.args, *(values[key] for key in given if drawn is None))
    made.meta = written_of(node)
    return made


def _read_outside(found: EqualSteps, k: int, m: int, inside: set[fx.Node]) -> bool:
    return any(u not in inside for u in found.windows[k][m].users)


def _check(
    found: EqualSteps, body: fx.GraphModule, samples: Sequence[object], keys: Sequence[object], stacked: Sequence[int]
) -> None:  # fmt: skip
    """Run the body on what only pretends to be there. Raises Unlike unless its results are what the steps made, and
    Writes if it writes into some of `samples`, which stand at `keys`."""
    fake = next((s for s in samples if isinstance(s, FakeTensor)), None)
    known = all(isinstance(s, FakeTensor) for s in samples if isinstance(s, Tensor))
    if fake is None or not known or any(s is None for s in samples):
        raise Unlike("what the steps read is not known")
    versions = [t._version if isinstance(t, Tensor) else 0 for t in samples]
    with fake.fake_mode, torch.no_grad(), enable_python_dispatcher():
        with Watch() as watch:
            try:
                made = body.forward(*samples)  # calling it would print what fails
            except Exception as error:
                raise Unlike(f"a step fails alone: {error}") from error
    body.meta[_DRAWS] = bool(watch.drew)
    if watch.acted:
        raise Unlike(f"a step runs {watch.acted}, which scans lose")
    if watch.drew and any(isinstance(what, Drawn) for what in found.taken.values()):
        raise Unlike(f"a step runs {watch.drew} as well, and all else is drawn in front of the loop")
    callers = {u.target for f in found.functions for u in f.users}
    if watch.drew and callers - {*CHECKPOINTS}:
        raise Unlike(f"a step runs {watch.drew}")
    written = {
        key: m for key, t in zip(keys, samples, strict=True) for m in memories_of(t) if m in watch.wrote
    }
    if written:
        before = {key: (t, v) for key, t, v in zip(keys, samples, versions, strict=True)}
        unseen = {
            key for key in written if isinstance(t := before[key][0], Tensor) and t._version == before[key][1]
        }
        raise Writes(written.keys(), unseen, watch.wrote[next(iter(written.values()))])
    if not found.states:
        raise Unlike("no step reads what another one made")
    last = found.windows[1]
    wanted = [*(found.value_of(m) for m, _ in found.carried), *found.held, *(last[m] for m in stacked)]
    wanted += found.values_stored
    for have, node in zip(made, wanted, strict=True):
        _alike(have, val_of(node), Unlike)
    for have, first in zip(made, found.carried.values(), strict=False):
        _alike(have, val_of(first), BeginsUnlike)


def _alike(have: object, want: object, otherwise: type[Unlike]) -> None:
    """Raise `otherwise` unless two values are of one type."""
    if not isinstance(want, Tensor) or not isinstance(have, Tensor):
        raise otherwise("a step gives what is no tensor")
    if have.dtype != want.dtype or str(have.shape) != str(want.shape) or have.device != want.device:
        raise otherwise(f"a value of {want.dtype}{list(want.shape)} becomes {have.dtype}{list(have.shape)}")


def _idle(body: fx.GraphModule, samples: Sequence[object], carried: int) -> frozenset[int]:
    """The places of what asks for a gradient and gets none, since the steps read it under `no_grad` or detached: eager
    has None there, and torch's gradient of a scan is zeros. All states ask that are `tied`."""
    fake = next(s for s in samples if isinstance(s, FakeTensor))
    given: dict[int, Tensor] = {}
    shapes = fake.fake_mode.shape_env
    ties = not SCANS_DIFFERENTIATE and any(isinstance(s, Tensor) and s.requires_grad for s in samples)
    silent = nullcontext() if shapes is None else shapes.suppress_guards()  # a trial binds no size
    with fake.fake_mode as mode, torch.enable_grad(), silent:

        def leaf(k: int, s: object) -> object:
            if not isinstance(s, Tensor):
                return s
            x = (s if isinstance(s, FakeTensor) else mode.from_tensor(s)).detach()
            if s.requires_grad or (ties and k < carried and s.is_floating_point()):
                given[k] = x.requires_grad_()
            return x

        leaves = [leaf(k, s) for k, s in enumerate(samples)]
        try:
            made = tree_leaves(body.forward(*leaves)) if given else []  # calling it would print what fails
        except Exception as error:
            raise Unlike(f"a step fails alone: {error}") from error
    reached = _leaves_of([x.grad_fn for x in made if isinstance(x, Tensor) and x.grad_fn is not None])
    return frozenset(k for k, x in given.items() if id(x) not in reached)


def _leaves_of(ends: Sequence[Node]) -> set[int]:
    """The identities of the leaves that autograd reaches from these nodes."""
    found, seen, left = set[int](), set[Node](), list(ends)
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            found.add(id(variable))
        left += [n for n, _ in node.next_functions if n is not None]
    return found
