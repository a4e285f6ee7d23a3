"""Texts of a file that torch would evaluate as Python: whether they are arithmetic over sizes, and soon done."""

from __future__ import annotations

import ast
import re
from collections.abc import Container

from tilewright.tuning.input_limits import PROGRAM_FILES

_SYMBOL = re.compile(r"[A-Za-z_]{1,16}[0-9]{0,5}")
_NUMBER = re.compile(r"[0-9.eE+-]{1,40}")
_RAISES = frozenset({"Pow", "PowByNatural", "FloatPow", "LShift"})
"""Functions that make large numbers of small ones."""
_OPERATIONS = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.operator, ast.unaryop, ast.boolop,
    ast.cmpop, ast.expr_context,
)  # fmt: skip
_OF_TENSORS = frozenset({"size", "stride", "storage_offset", "dim", "numel", "shape"})
_OF_NUMBERS = frozenset({"max", "min", "abs", "int", "float"})
_OF_MODULES = {
    "math": frozenset({"ceil", "floor", "trunc", "sqrt"}),
    "torch": frozenset({"sym_float", "sym_int", "sym_max", "sym_min", "sym_not", "sym_sqrt", "sym_ite"}),
}


def is_size(text: str, functions: Container[str]) -> bool:
    """Whether `text` is arithmetic over symbols and numbers, by these functions of sizes."""
    tree = _parsed(text)
    return tree is not None and all(_is_of_size(node, functions) for node in _parts(tree)) and _is_small(tree)


def is_guard(text: str) -> bool:
    """Whether `text` is a condition on what tensors among the arguments, `L`, say of themselves."""
    tree = _parsed(text)
    return tree is not None and all(map(_is_of_guard, _parts(tree))) and _is_small(tree)


def is_name(text: str) -> bool:
    """Whether `text` may be the name of a size. (Torch counts to the number in some.)"""
    return _SYMBOL.fullmatch(text) is not None


def _parsed(text: str) -> ast.Expression | None:
    if len(text) > PROGRAM_FILES.max_expression_characters:
        return None
    try:
        return ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _parts(tree: ast.AST) -> list[ast.AST]:
    """All nodes but what a node before them has been judged with: what is called, by its name."""
    functions = [n.func for n in ast.walk(tree) if isinstance(n, ast.Call)]
    modules = [f.value for f in functions if isinstance(f, ast.Attribute) and isinstance(f.value, ast.Name)]
    judged = {id(n) for n in (*functions, *(m for m in modules if m.id in _OF_MODULES))}
    return [n for n in ast.walk(tree) if id(n) not in judged]


def _is_of_size(node: ast.AST, functions: Container[str]) -> bool:
    match node:
        case ast.Constant(value=bool() | int() | float()):
            return True
        case ast.Constant(value=str() as text):
            return is_name(text) or _NUMBER.fullmatch(text) is not None
        case ast.Name(id=name):
            return name in ("oo", "int_oo", "true", "false") or (
                is_name(name) and name[-1].isdigit() and name not in functions
            )
        case ast.Call(func=ast.Name(id=name)):
            return name in functions
        case ast.keyword(value=ast.Constant(value=bool() | int())):
            return True
        case _:
            return isinstance(node, _OPERATIONS)


def _is_of_guard(node: ast.AST) -> bool:
    match node:
        case ast.Constant(value=bool() | int() | float() | str() | None):
            return True
        case ast.Name(id="L"):
            return True
        case ast.Call(func=ast.Name(id=name), keywords=[]):
            return name in _OF_NUMBERS
        case ast.Call(func=ast.Attribute(value=ast.Name(id=module), attr=name), keywords=[]) if (
            module in _OF_MODULES
        ):
            return name in _OF_MODULES[module]
        case ast.Call(func=ast.Attribute(attr=name), keywords=[]):
            return name in _OF_TENSORS
        case ast.Attribute(attr=name):
            return name in _OF_TENSORS
        case ast.Subscript(slice=ast.Constant() | ast.UnaryOp(operand=ast.Constant())):
            return True
        case _:
            return isinstance(node, _OPERATIONS)


def _is_small(tree: ast.AST) -> bool:
    """Whether no number in it is raised to what takes long: powers do not nest, and exponents are few."""
    powers = [n for n in ast.walk(tree) if _exponent(n) is not None]
    for node in powers:
        exponent = _exponent(node)
        assert exponent is not None
        if any(n is not node and _exponent(n) is not None for n in ast.walk(node)):
            return False
        numbers = [n.value for n in ast.walk(exponent) if isinstance(n, ast.Constant)]
        plain = [n for n in numbers if isinstance(n, (int, float)) and not isinstance(n, bool)]
        if any(abs(n) > PROGRAM_FILES.max_exponent for n in plain) or len(plain) > 1:
            return False
    return all(
        abs(n.value) <= PROGRAM_FILES.max_number
        for n in ast.walk(tree)
        if isinstance(n, ast.Constant) and type(n.value) is int
    )


def _exponent(node: ast.AST) -> ast.AST | None:
    """By what a node raises or shifts its first operand."""
    match node:
        case ast.BinOp(op=ast.Pow() | ast.LShift(), right=right):
            return right
        case ast.Call(func=ast.Name(id=name), args=[_, right]) if name in _RAISES:
            return right
        case _:
            return None
