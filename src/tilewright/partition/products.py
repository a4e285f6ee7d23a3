"""Groups of ops that may share a kernel with a product of matrices: the pointwise ops behind it, as far as one result
leaves them; other products of the same rows that meet it there (gate and up of a gated MLP), or stand beside it
(queries, keys and values); and what unpacks their operands."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from tilewright.analysis.runs import halved
from tilewright.analysis.size_hints import NO_HINTS, SizeHints
from tilewright.ir.expr import Axis, Expr, axes_of, axis, substitute, walk
from tilewright.ir.graph import Graph, Op, Value
from tilewright.ir.kernel import AS_THEY_LIE, PADDED
from tilewright.ir.sizes import dims
from tilewright.library.convolution_layout import has_few_channels
from tilewright.library.offers.offer import has_channels_innermost
from tilewright.library.select import is_contraction, live_ops, slides
from tilewright.tuning.thresholds import GPU_MATMUL
from tilewright.tuning.timing_limits import PRODUCTS

from .layout import view_layout
from .recompute import is_cheap, size_bytes
from .regions import Region, Regions
from .topological_order import in_some_order


@dataclass(frozen=True, slots=True, eq=False)
class ProductGroup:
    """A region, and which of its ops are products."""

    region: Region
    products: tuple[Op, ...]

    @property
    def unpacks(self) -> bool:
        """Whether it makes an operand of a product, which a library would find in memory."""
        made = {v for op in self.region.ops for v in op.outputs}
        return any(v in made for op in self.products for v in op.inputs)

    @property
    def is_fusion(self) -> bool:
        """Whether it holds more than one call of a library does: a captured node, with its bias."""
        return len({op.origin for op in self.region.ops}) > 1


LIBRARY = ""
"""Stands for a schedule where the library's products were faster."""


@dataclass(frozen=True, slots=True)
class ProductWay:
    """How kernels compute a group: with the sum in so many `parts` side by side, which a second kernel merges; or with
    `operands` that others prepare: few channels padded, or the weights of windows laid as they are read."""

    parts: int = 1
    operands: str = AS_THEY_LIE

    def __str__(self) -> str:
        if self.operands != AS_THEY_LIE:
            return "kernel over padded channels" if self.operands == PADDED else "kernel over laid weights"
        return "kernel" if self.parts == 1 else f"kernel of {self.parts} parts and one that merges them,"


WHOLE = ProductWay()

CLOCK = "a clock"
"""Decides where kernels are timed."""


@dataclass(frozen=True, slots=True, eq=False)
class ChosenProduct:
    """What was decided for a group (the first of equal ones, whose `region` this is): the text of its kernel's
    schedule, or `LIBRARY`; seconds of what was chosen, and of the library's way; and by whom, the clock or what nobody
    timed here."""

    region: Graph
    schedule: str
    seconds: float
    library_seconds: float
    way: ProductWay = WHOLE
    decided_by: str = CLOCK

    def __str__(self) -> str:
        names = " + ".join(op.name for op in self.region.ops)
        how = f"{self.way} of {self.seconds * 1e6:.3g} us" if self.schedule else "library"
        said = "" if self.decided_by == CLOCK else f", by {self.decided_by}"
        return f"{names}: {how}; {self.library_seconds * 1e6:.3g} us with the library's products{said}"


@dataclass(frozen=True, slots=True, eq=False)
class ChosenProducts:
    """A graph whose chosen ops carry the number of their kernel, and the decisions behind it."""

    graph: Graph
    products: tuple[ChosenProduct, ...] = ()


def find_products(graph: Graph, hints: SizeHints = NO_HINTS) -> list[ProductGroup]:
    """The groups of a graph whose views are composed; no op is in two, nor has it a kernel yet. Sizes of what is summed
    are known, others are weighed at `hints`. The layouts of the graph are those of all values, as they would lie with
    calls for products."""
    finder = _Finder(graph, hints)
    found: list[ProductGroup] = []
    taken: set[Op] = set()
    for op in graph.ops:
        if op not in taken and finder.starts(op):
            group = finder.grow(op, taken)
            if group is not None:
                found.append(group)
                taken |= group.region.own
    found = list(finder.with_siblings(found))
    return [found[k] for k in in_some_order(graph, [group.region.own for group in found])]


class _Finder:
    """Grows groups from their products; `readers` are the live ones."""

    def __init__(self, graph: Graph, hints: SizeHints) -> None:
        live = live_ops(graph)
        # A view that only a call would read takes nothing out of a group.
        regions = Regions(graph.with_ops([op for op in graph.ops if op in live]))
        self.graph, self.regions, self.hints = graph, regions, hints
        self.readers: dict[Value, list[Op]] = {}
        for op in graph.ops:
            if op in live:
                for v in dict.fromkeys(op.inputs):
                    self.readers.setdefault(v, []).append(op)
        self.producer, self.live, self.kept = graph.producer(), live, graph.kept()
        self.nodes: dict[int, list[Op]] = {}
        for op in graph.ops:
            if op in live and op.origin >= 0:
                self.nodes.setdefault(op.origin, []).append(op)

    def starts(self, op: Op) -> bool:
        """Whether an op is a product of halves in a node that a library would call for it; a convolution if images have
        their channels innermost, before and behind it, or if its windows are single places."""
        if op.kernel >= 0 or op.origin < 0 or op not in self.live:
            return False
        call = self.graph.origins[op.origin].call
        if call is None or not (is_contraction(op) or slides(op, call)):
            return False
        if op.expr is None or not all(v.dtype.is_half for v in op.inputs):
            return False
        known = all(dims.static(a.extent) is not None for a in op.expr.reduce)
        if call.reason == "convolution":
            # weights that are all one number are no operand
            return known and len(op.inputs) > 1 and all(map(self.is_of_channels, self.images(op)))
        return known and call.reason == "contraction"

    def images(self, op: Op) -> tuple[Value, ...]:
        """The images of a convolution that must have their channels innermost for a kernel."""
        (image, weight), made = op.inputs[:2], self.graph.origins[op.origin].outputs[:1]
        return () if _is_of_places(weight) else made if has_few_channels(image) else (image, *made)

    def is_of_channels(self, image: Value) -> bool:
        """Whether channels lie innermost in an image."""
        layout, shape = self.graph.layouts.get(image), image.shape
        return layout is not None and len(shape) == 4 and has_channels_innermost(shape, layout.strides)

    def grow(self, seed: Op, taken: set[Op]) -> ProductGroup | None:
        """The largest group with one result that a product and its readers, taken one by one, come by; without a tail
        that only makes more bytes of them."""
        own, best = {seed}, set[Op]()
        operands = set(seed.inputs)
        while len(own) <= PRODUCTS.max_ops:
            ends = self.ends(own)
            if len(ends) == 1 and not self.cuts_a_node(own) and not self.is_made_again(ends[0], own - best):
                best = set(own)
            more = next(
                (m for r in self.next_readers(own) if (m := self.joined(r, own, seed, operands, taken))), None
            )
            if more is None:
                break
            own |= more
        return self.group(best | self.unpacking(best, taken)) if best else None

    def unpacking(self, own: set[Op], taken: set[Op]) -> set[Op]:
        """Ops that make operands of products out of less memory, where the group may have them."""
        found: set[Op] = set()
        for op in filter(self.starts, own):
            for v in dict.fromkeys(op.inputs):
                more = _unpacking_ops(v, self.producer, self.readers, set(self.kept), self.hints)
                if more and not more & taken and not self.would_wait(more, own | found):
                    found |= more
        return found

    def with_siblings(self, groups: Sequence[ProductGroup]) -> Iterator[ProductGroup]:
        """The groups, where a few of one product each that multiply the same rows by as many columns are one."""
        alike: dict[object, list[ProductGroup]] = {}
        for k, group in enumerate(groups):
            alike.setdefault(_sibling_key(group) or k, []).append(group)
        for same in alike.values():
            joined = [same[0]]
            for other in same[1:]:
                own = {op for g in joined for op in g.region.own}
                if len(joined) < PRODUCTS.max_siblings and not self.would_wait(set(other.region.ops), own):
                    joined.append(other)
                else:
                    yield other
            yield joined[0] if len(joined) == 1 else self.group({op for g in joined for op in g.region.own})

    def group(self, own: set[Op]) -> ProductGroup:
        """These ops, with their products."""
        products = tuple(op for op in self.graph.ops if op in own and self.starts(op))
        return ProductGroup(self.regions.region(own, set()), products)

    def ends(self, own: set[Op]) -> list[Value]:
        """What leaves a group."""
        return [
            v
            for op in own
            for v in op.outputs
            if v in self.kept or any(r not in own for r in self.readers.get(v, ()))
        ]

    def is_made_again(self, end: Value, tail: set[Op]) -> bool:
        """Whether readers of a group's result may rather make it of fewer bytes by the pointwise ops of its `tail`, as
        they would behind a library's product: halves that a softmax takes as singles."""
        readers = self.readers.get(end, ())
        if end in self.kept or any(op.expr is None or self.starts(op) for op in readers):
            return False
        if any(op.expr is None or not is_cheap(op, ()) for op in tail):
            return False
        sources = {v for op in tail for v in op.inputs} - {v for op in tail for v in op.outputs}
        return sum(size_bytes(v, self.hints) for v in sources) < size_bytes(end, self.hints)

    def cuts_a_node(self, own: set[Op]) -> bool:
        """Whether a node of a product is in it with a part: the library's call would make the values of the others
        anew."""
        products = filter(self.starts, own)
        return any(other not in own for op in products for other in self.nodes.get(op.origin, ()))

    def next_readers(self, own: set[Op]) -> Iterator[Op]:
        """Pointwise ops, in order, that read what the group makes."""
        made = {v for op in own for v in op.outputs}
        found = {r for v in made for r in self.readers.get(v, ()) if r not in own}
        yield from sorted(found, key=self.regions.position.__getitem__)

    def joined(
        self, reader: Op, own: set[Op], seed: Op, operands: set[Value], taken: set[Op]
    ) -> set[Op] | None:
        """A reader with the products of the same operand that it reads beside the group; None if it cannot join."""
        if not _is_plain(reader, seed, self.graph) or reader in taken or reader.kernel >= 0:
            return None
        if self.scatters(reader, own):
            return None
        more = {reader}
        for v in reader.inputs:
            p = self.producer.get(v)
            if p is None or p in own:
                continue
            beside = self.beside(p, seed, operands, taken)
            if beside is not None:
                more |= beside
        more |= self.small_producers(more, own, taken)
        return None if self.would_wait(more, own) else more

    def scatters(self, reader: Op, own: set[Op]) -> bool:
        """Whether neighbours in memory of a reader's result lie now here, now there in what the group makes, so that
        threads of a block would store along neither."""
        assert reader.expr is not None
        strides = self.strides(reader.output)
        nearest = [
            a
            for a, step in zip(reader.expr.axes, strides, strict=True)
            if step is dims.ONE and a.extent is not dims.ONE
        ]
        for r in reader.expr.reads() if nearest else ():
            assert isinstance(r.value, int)
            v = reader.inputs[r.value]
            if self.producer.get(v) not in own:
                continue
            steps = (dims.mul(i, s) for i, s in zip(r.args, self.strides(v), strict=True))
            if not _lies_in_runs(dims.add(dims.ZERO, *steps), nearest[0]):
                return True
        return False

    def strides(self, v: Value) -> tuple[Expr, ...]:
        """How a value lies."""
        layout = self.graph.layouts.get(v)
        return dims.dense_strides(v.shape) if layout is None else layout.strides

    def small_producers(self, more: set[Op], own: set[Op], taken: set[Op]) -> set[Op]:
        """Pointwise ops on little that only these ops read: scale and shift of a batch norm."""
        found: set[Op] = set()
        todo, most = list(more), max(map(self.size, more))
        while todo:
            op = todo.pop()
            for p in (self.producer.get(v) for v in op.inputs):
                inside = own | more | found
                if p is None or p in inside or p in taken or p.kernel >= 0 or p not in self.live:
                    continue
                if (
                    p.expr is None
                    or not p.expr.is_pointwise
                    or self.size(p) * PRODUCTS.min_times_smaller > most
                ):
                    continue
                if all(v not in self.kept and set(self.readers.get(v, ())) <= inside for v in p.outputs):
                    found.add(p)
                    todo.append(p)
        return found

    def size(self, op: Op) -> int:
        """Elements of the largest result of an op."""
        return max(self.hints.estimate(v.numel) for v in op.outputs)

    def would_wait(self, more: set[Op], own: set[Op]) -> bool:
        """Whether ops read, beside what a group and they make, something that depends on the group."""
        inside = own | more
        before = {p for op in more for v in op.inputs if (p := self.producer.get(v)) is not None} - inside
        return any(self.regions.inside(p, own) for p in before)

    def beside(self, last: Op, seed: Op, operands: set[Value], taken: set[Op]) -> set[Op] | None:
        """A product that shares one of the `operands`, with the pointwise ops up to `last`, which nobody else reads;
        None if there is none."""
        found: set[Op] = set()
        op: Op | None = last
        while op is not None and len(found) < PRODUCTS.max_ops:
            alone = all(v not in self.kept and len(self.readers.get(v, ())) == 1 for v in op.outputs)
            if not alone or op in taken or op.kernel >= 0:
                return None
            found.add(op)
            if self.starts(op) or is_contraction(op):
                same = self.starts(op) and operands & set(op.inputs) and op.output.shape == seed.output.shape
                return found if same else None
            if not _is_plain(op, seed, self.graph):
                return None
            before = [p for v in op.inputs if (p := self.producer.get(v)) is not None and p in self.live]
            op = before[0] if len(before) == 1 else None
        return None


def _is_of_places(weight: Value) -> bool:
    """Whether the windows of a convolution with this weight are single places."""
    return all(n is dims.ONE for n in weight.shape[2:])


def _lies_in_runs(offset: Expr, nearest: Axis) -> bool:
    """Whether neighbours along an axis lie at an even distance of each other at `offset`, as far as memory takes them
    at once. A shuffle of pixels whose result has rows innermost takes pairs of columns from one row after the other:
    where sizes are known, a kernel may store such turns together (`InterleavedStore`)."""
    least = GPU_MATMUL.min_stored_run_elements
    first, inner = halved(nearest, least, least)
    if _is_linear(offset, nearest, [first, inner]):
        return True
    extent, count = dims.static(nearest.extent), least // 2
    if extent is None or extent % least or dims.symbols_of(offset):
        return False
    while count > 1:
        number = dims.integer(count)
        turn, side = axis(Axis("turn", dims.integer(least // count))), axis(Axis("side", number))
        if _is_linear(offset, nearest, [first, dims.mul(turn, number), side]):
            return True
        count //= 2
    return False


def _is_linear(offset: Expr, along: Axis, parts: Sequence[Expr]) -> bool:
    """Whether `offset`, where `along` is the sum of `parts`, is linear in each of these but the first."""
    moved = substitute(offset, {axis(along): dims.add(*parts)})
    own = (a for part in parts[1:] for a in axes_of(part))
    return all(dims.coefficient(moved, a) is not None for a in own)


def _is_plain(op: Op, seed: Op, graph: Graph) -> bool:
    """Whether an op is pointwise, over as many elements as a product has, and no view that costs nothing."""
    if op.expr is None or not op.expr.is_pointwise or len(op.outputs) != 1:
        return False
    if op.expr.is_view() and _is_free(op, graph):
        return False
    sizes = [dims.prod(v.shape) for v in (op.output, seed.output)]
    return dims.equal(*sizes)


def _is_free(view: Op, graph: Graph) -> bool:
    """Whether a view of a dense value is its memory, also as the program returns it."""
    found, promised = view_layout(view, {}), graph.layouts.get(view.output)
    return found is not None and (
        promised is None or all(map(dims.equal, found[0].strides, promised.strides))
    )


def _sibling_key(group: ProductGroup) -> tuple[object, ...]:
    """What siblings have in common: the first operand, how it is read, and all sizes; nothing for groups that have no
    siblings, since other ops stand behind their product."""
    if group.is_fusion:
        return ()
    (op,) = group.products
    assert op.expr is not None
    rows = next(r for r in op.expr.reads() if r.value == 0)
    return (op.inputs[0], rows, *(v.shape for v in (*op.inputs, *op.outputs)))


def _unpacking_ops(
    operand: Value,
    producer: Mapping[Value, Op],
    readers: Mapping[Value, Sequence[Op]],
    kept: Set[Value],
    hints: SizeHints,
) -> set[Op]:
    """Pointwise ops that make an operand out of less memory (words of packed numbers, or bytes, with scales), if nobody
    else reads it; nothing else. `readers` are those of values that somebody reads, `kept` what leaves the graph."""
    found: set[Op] = set()
    inputs: dict[Value, None] = {operand: None}
    while len(found) <= PRODUCTS.max_ops:
        op = next(
            (
                p
                for v in inputs
                if (p := producer.get(v)) is not None and _unpacks(p, found, operand, readers, kept)
            ),
            None,
        )
        if op is None:
            break
        found.add(op)
        for v in op.outputs:
            inputs.pop(v, None)
        inputs |= dict.fromkeys(op.inputs)
    read = sum(hints.estimate(v.numel) * v.dtype.bytes for v in inputs)
    made = hints.estimate(operand.numel) * operand.dtype.bytes
    return found if read <= GPU_MATMUL.max_unpacked_ratio * made else set()


def _unpacks(
    op: Op, found: Set[Op], operand: Value, readers: Mapping[Value, Sequence[Op]], kept: Set[Value]
) -> bool:
    """Whether an op is pointwise at places that no data decide, and read by those `found` alone, or, of the operand, by
    one product."""
    e = op.expr
    if e is None or op.kernel >= 0 or not e.is_pointwise or len(op.outputs) != 1:
        return False
    places = [place for body in e.body for r in walk(body) if r.op == "read" for place in r.args]
    if any(x.op == "read" for place in places for x in walk(place)):
        return False
    by, made = readers.get(op.output, ()), op.output
    return made not in kept and (len(by) == 1 if made is operand else all(r in found for r in by))
