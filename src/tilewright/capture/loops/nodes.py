"""What the nodes of a captured graph show of themselves: their values and their arguments."""

from __future__ import annotations

from torch import fx


def val_of(node: fx.Node) -> object:
    """What stands for the value of a node while torch captures, or in an exported program."""
    return node.meta["example_value"] if "example_value" in node.meta else node.meta.get("val")


def arguments_of(node: fx.Node) -> list[object]:
    """All nodes and plain values among the arguments, in order."""
    found: list[object] = []

    def visit(a: object) -> None:
        if isinstance(a, (list, tuple)):
            for x in a:  # pyright: ignore[reportUnknownVariableType]
                visit(x)  # pyright: ignore[reportUnknownArgumentType]
        elif isinstance(a, dict):
            for x in a.values():  # pyright: ignore[reportUnknownVariableType]
                visit(x)  # pyright: ignore[reportUnknownArgumentType]
        elif isinstance(a, slice):
            for x in (a.start, a.stop, a.step):
                visit(x)
        else:
            found.append(a)

    visit(node.args)
    visit(node.kwargs)
    return found
