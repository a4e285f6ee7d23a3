"""Two library calls become one where a routine does both at once, if the second alone reads what the first makes: what
lies between them then never goes through memory as a whole.

A routine knows behind which others it can be done so (`Fusible.behind`); here it is decided where that applies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tilewright.ir.graph import Graph, Op, Operand, Routine, Value

from .offers.offer import Fusible
from .spare import one_behind_another


def join_calls(graph: Graph) -> Graph:
    """The graph with such calls as one, at the place of the second; chains of more than two, too."""
    while (joined := _join_once(graph)) is not graph:
        graph = joined
    return graph


def _join_once(graph: Graph) -> Graph:
    producer, consumers, kept = graph.producer(), graph.consumers(), graph.kept()
    joined: dict[Op, Op] = {}
    gone: set[Op] = set()
    for op in graph.ops:
        first = _only_maker(op, producer)
        if (
            first is None
            or first in gone
            or first in joined
            or first.output in kept
            or len(consumers[first.output]) > 1
        ):
            continue
        made = _joined(first, op)
        if made is not None:
            joined[op] = made
            gone.add(first)
    return graph.with_ops([joined.get(op, op) for op in graph.ops if op not in gone]) if joined else graph


def _only_maker(op: Op, producer: Mapping[Value, Op]) -> Op | None:
    """The call on one operand that makes the first operand of the call of `op`."""
    if op.call is None or op.call.args != tuple(map(Operand, range(len(op.inputs)))) or not op.inputs:
        return None
    maker = producer.get(op.inputs[0])
    if maker is None or maker.call is None or op.inputs.count(op.inputs[0]) > 1:
        return None
    return (
        maker if maker.call.args == (Operand(0),) and len(maker.inputs) == len(maker.outputs) == 1 else None
    )


def _joined(first: Op, second: Op) -> Op | None:
    one, other = first.call, second.call
    assert one is not None and other is not None
    if not isinstance(other.function, Fusible) or not isinstance(one.function, Routine):
        return None
    made = other.function.behind(one.function)
    if made is None:
        return None
    spare = one_behind_another(one.spare, other.spare)
    call = replace(made, strides=other.strides, spare=spare, refused=(*one.refused, *other.refused))
    origins = [o for o in (first.origin, *first.absorbed) if o >= 0 and o != second.origin]
    absorbed = tuple(dict.fromkeys((*origins, *second.absorbed)))
    return replace(second, call=call, inputs=(*first.inputs, *second.inputs[1:]), absorbed=absorbed)
