"""How arguments and results nest, as JSON: tuples, lists and dicts, and nothing else."""

from __future__ import annotations

from collections import OrderedDict
from typing import cast

from torch.utils import _pytree as pytree

from tilewright.artifact.file.strict_json import damaged
from tilewright.errors import UnsupportedError
from tilewright.ir.text.values import Json

LEAF = "leaf"


def write_tree(spec: pytree.TreeSpec, what: str) -> Json:
    """A structure as JSON. Raises UnsupportedError for classes of the user's or of a library."""
    if spec.is_leaf():
        return LEAF
    children = _children(spec)
    parts: list[Json] = [write_tree(child, what) for child in children]
    if spec.type is tuple:
        return {"tuple": parts}
    if spec.type is list:
        return {"list": parts}
    if spec.type in (dict, OrderedDict):
        keys = list(cast("list[object]", spec.context))
        if all(type(k) in (str, int) for k in keys):
            kind = "dict" if spec.type is dict else "ordered"
            return {kind: [[cast(Json, k), part] for k, part in zip(keys, parts, strict=True)]}
    raise UnsupportedError(
        f"{what} nests a {getattr(spec.type, '__name__', spec.type)}, which an artifact cannot name",
        phase="save", op=what, hint="take and return tuples, lists and dicts with strings as keys",
    )  # fmt: skip


def read_tree(told: Json, place: str) -> pytree.TreeSpec:
    """The structure that `write_tree` wrote. Raises ArtifactError for anything else."""
    return pytree.tree_structure(_example(told, place))


def _example(told: Json, place: str) -> object:
    match told:
        case "leaf":
            return 0
        case {"tuple": [*parts]}:
            return tuple(_example(p, place) for p in parts)
        case {"list": [*parts]}:
            return [_example(p, place) for p in parts]
        case {"dict": [*pairs]} | {"ordered": [*pairs]}:
            made: dict[object, object] = {}
            for pair in pairs:
                match pair:
                    case [str() | int() as key, part] if key not in made:
                        made[key] = _example(part, place)
                    case _:
                        raise damaged(f"no entry of a dict: {str(pair)[:80]}", place)
            return OrderedDict(made) if "ordered" in told else made
        case _:
            raise damaged(f"no structure: {str(told)[:80]}", place)


def _children(spec: pytree.TreeSpec) -> list[pytree.TreeSpec]:
    """The parts of a structure, in any torch."""
    listed = getattr(spec, "children", None)  # of torch 2.10 on
    found = listed() if callable(listed) else spec.children_specs  # pyright: ignore[reportDeprecated]
    return list(cast("list[pytree.TreeSpec]", found))
