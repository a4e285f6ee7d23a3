"""PTX as its assembler must be given it; whether a kernel waits before it touches memory, and when it releases.

What ptxas of CUDA 12 (12.8 and 12.9; 13.4 does not) assembles wrongly is said in another way:

1. `add.s16x2` with a constant: where only the upper half of the sum is used, the constant's lower half is added to it.
   LLVM packs additions of narrow integers so, a half undefined. Each half is added by itself.
2. Arithmetic of bf16 with a negative constant in a half of a pair: the constant is kept as the negation of a positive
   one, and the negation gets lost (a fill of -inf became inf). LLVM narrows maxima of extended bf16 so. Such constants
   are hidden: the y coordinate of a block is 0, as every grid has one row, and ptxas does not know.
"""

from __future__ import annotations

import re

_PACKED_SUM = re.compile(r"^(\s*)add\.s16x2\s+(%\w+), (%\w+), (%\w+|-?\d+);")
_SHORT_FLOATS = re.compile(r"^\s*(?:max|min|add|sub|mul|fma)\.(?:\w+\.)*bf16(?:x2)?\s", re.MULTILINE)
_CONSTANT = re.compile(r"^(\s*)(mov\.[busf](16|32)|selp\.[busf](16|32))(\s+)(.*);")
_NUMBER = re.compile(r"(?<![\w%.])(?:0x[0-9A-Fa-f]+|-?\d+)(?![\w.])")


def mend_ptx(text: str) -> str:
    """The same program in words that every assembler gets right."""
    hidden = _SHORT_FLOATS.search(text) is not None
    return "\n".join(_mended_line(line, hidden) for line in text.split("\n"))


def _mended_line(line: str, hidden: bool) -> str:
    packed = _PACKED_SUM.match(line)
    if packed is not None:
        return _by_halves(*packed.groups())
    constant = _CONSTANT.match(line) if hidden else None
    if constant is None:
        return line
    indent, verb, _, _, gap, operands = constant.groups()
    return _hidden(line, indent, f"{verb}{gap}", operands, bits=32 if verb.endswith("32") else 16)


def _by_halves(indent: str, result: str, left: str, right: str) -> str:
    steps = (
        ".reg .b16 %lower<2>, %upper<2>;", f"mov.b32 {{%lower0, %upper0}}, {left};",
        f"mov.b32 {{%lower1, %upper1}}, {right};", "add.s16 %lower0, %lower0, %lower1;",
        "add.s16 %upper0, %upper0, %upper1;", f"mov.b32 {result}, {{%lower0, %upper0}};",
    )  # fmt: skip
    return _block(indent, steps)


def _hidden(line: str, indent: str, verb: str, operands: str, bits: int) -> str:
    """A line with its negative constants behind a sum that only the machine can tell. Without any it stays."""
    if "{" in operands:
        return line
    steps: list[str] = []

    def behind(found: re.Match[str]) -> str:
        value = int(found[0], 0)
        if not _is_negative(value, bits):
            return found[0]
        name = f"%hidden{len(steps) // 2}"
        row = "mov.u32 %row, %ctaid.y;"
        steps.extend((row, f"or.b32 {name}, %row, {value};") if bits == 32 else
                     (row + " cvt.u16.u32 %narrow, %row;", f"or.b16 {name}, %narrow, {value};"))  # fmt: skip
        return name

    shown = _NUMBER.sub(behind, operands)
    if not steps:
        return line
    names = ".reg .b32 %row;" + (" .reg .b16 %narrow;" if bits == 16 else "") + f" .reg .b{bits} %hidden<2>;"
    return _block(indent, (names, *steps, f"{verb}{shown};"))


def _is_negative(value: int, bits: int) -> bool:
    """Whether a half of a constant is a negative bf16. All ones are none: so look -1 of integers and masks of lanes."""
    halves = [value >> shift & 0xFFFF for shift in range(0, bits, 16)]
    return any(half >> 15 and half != 0xFFFF for half in halves)


def _block(indent: str, steps: tuple[str, ...]) -> str:
    """Steps whose registers nobody else sees."""
    return f"{indent}{{ {' '.join(steps)} }}"


_BODY = re.compile(r"\.entry\s+\w+\s*\(.*?\)[^{]*\{(.*)", re.DOTALL)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_LABEL = re.compile(r"^[\w$%]+:")
_ARITHMETIC = frozenset(
    "abs add and bfe bfi brev clz cvt cvta div fma lop3 mad mad24 max min mov mul mul24 neg not or popc prmt rem selp"
    " set setp shf shl shr sub xor".split()
)
"""Instructions that touch no memory and do not branch."""
_HARMLESS = (["ld", "param"], ["griddepcontrol", "launch_dependents"])
"""Those that read what a launch gives, and that let the kernel behind begin, which then waits."""


def waits_first(text: str) -> bool:
    """Whether every thread of a kernel waits for the end of the kernel in front before it touches memory: in its text
    there is nothing before the wait but arithmetic, on the only way to it."""
    entry = _BODY.search(_COMMENT.sub("", text))
    before, wait, _ = entry[1].partition("griddepcontrol.wait") if entry else ("", "", "")
    if not wait:
        return False
    for line in re.split(r"[;{}\n]", before):
        step = _LABEL.sub("", line.strip()).strip()
        if not step or step[0] in ".%,":  # a directive; registers of a vector
            continue
        verb = step.split()[0].split(".")
        if verb[0] not in _ARITHMETIC and verb[:2] not in _HARMLESS:
            return False
    return True


def releases_first(text: str) -> bool:
    """Whether a kernel lets the one behind begin before it waits for the one in front."""
    return "griddepcontrol.launch_dependents" in _COMMENT.sub("", text).partition("griddepcontrol.wait")[0]
