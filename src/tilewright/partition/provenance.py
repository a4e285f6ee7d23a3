"""Where in the user's program something happened: ops by the captured nodes that they stem from, with their source
lines.

What is remembered about a region holds for every equal one, whose nodes have other names: so remembered texts hold
*references*, the places of ops in the region, and names are filled in when somebody reads them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import PurePath

from tilewright.ir.graph import Graph, Op, Origin

_REFERENCE = re.compile(r"@(\d+)")


def site(op: Op, origins: Sequence[Origin], alone: bool = False) -> str:
    """The captured node of an op, with its line if that is known: `mul_7 (model.py:12)`, or `exp of softmax_3` for one
    that is not `alone` in standing for its node."""
    if op.origin < 0:
        return op.name
    origin = origins[op.origin]
    node = origin.node or origin.name
    file, colon, line = origin.place.rpartition(":")
    place = f" ({PurePath(file).name}:{line})" if colon and line.isdecimal() else ""
    alone = alone or op.name in (node.rstrip("_0123456789"), origin.name.rpartition(".")[2])
    return f"{node}{place}" if alone else f"{op.name} of {node}{place}"


def references(region: Graph) -> Callable[[Op], str]:
    """What stands for an op in remembered texts: its place in the region, or that of an op from which it stems."""
    exact = {op: k for k, op in enumerate(region.ops)}
    alike: dict[tuple[int, str], int] = {}
    for k, op in enumerate(region.ops):
        for key in ((op.origin, op.name), (op.origin, "")):
            alike.setdefault(key, k)

    def reference(op: Op) -> str:
        if op.origin < 0 and op not in exact:
            return op.name
        place = exact.get(op, alike.get((op.origin, op.name), alike.get((op.origin, ""))))
        return op.name if place is None else f"@{place}"

    return reference


def fill_sites(text: str, region: Graph) -> str:
    """A remembered text with the sites of the ops of `region`."""
    return filler(region)(text)


def filler(region: Graph) -> Callable[[str], str]:
    """What fills the sites of the ops of `region` into remembered texts."""
    shared = Counter(op.origin for op in region.ops)

    def name(found: re.Match[str]) -> str:
        if int(found[1]) >= len(region.ops):
            return found[0]
        op = region.ops[int(found[1])]
        return site(op, region.origins, shared[op.origin] == 1)

    return lambda text: _REFERENCE.sub(name, text)
