"""The printed text: goldens, what it must not contain, and the instructions that it becomes."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.cpp_harness import FLAGS, print_unit
from tests.support.tile_programs import M, N, dot_tiles, elementwise, row_sum, softmax

from tilewright.emit.cpp.expr import float_literal
from tilewright.emit.cpp.unit import INCLUDE
from tilewright.errors import UnsupportedError
from tilewright.ir.dtype import f16, f32
from tilewright.ir.expr import Axis, axis, call, cast, const, integer
from tilewright.ir.program import (
    Buffer,
    Compute,
    GridAxis,
    Load,
    Loop,
    Stmt,
    Store,
    TileProgram,
    Var,
    rewrite_body,
    value_of,
)
from tilewright.ir.reduction import moments, sum_
from tilewright.ir.sizes import dims
from tilewright.target import preset

WIDE = preset("x86-64-v4")


def silu() -> TileProgram:
    """y = narrow(x * sigmoid(x)) in halves."""
    return elementwise(
        N,
        (f16,),
        f16,
        lambda x: call("mul", cast(x, f32), call("sigmoid", cast(x, f32))),
        tile=16,
        stream=True,
    )


GOLDENS: dict[str, Callable[[], TileProgram]] = {
    "emit_elementwise": silu,
    "emit_softmax": lambda: softmax(N, M),
    "emit_moments": lambda: row_sum(integer(32), integer(100), moments(), tile=16),
}


@pytest.mark.parametrize("name", GOLDENS)
def test_golden(name: str, golden: Callable[[str, str], None]) -> None:
    golden(name, print_unit([GOLDENS[name]()], ("n", "m"), WIDE).text)


def test_entries_and_determinism() -> None:
    programs = [make() for make in GOLDENS.values()]
    first, second = (print_unit(programs, ("n", "m"), WIDE) for _ in range(2))
    assert first == second
    assert first.language == "cpp" and first.entries == ("k0", "k1", "k2")
    assert re.findall(r"#include (.*)", first.text) == ['"kernel.h"']
    headers = [h for p in INCLUDE.glob("*.h") for h in re.findall(r"#include ([<\"].*[>\"])", p.read_text())]
    assert headers and not [h for h in headers if h.startswith("<")], "generated code needs no system header"


def test_names_of_a_model_do_not_reach_the_text() -> None:
    odd = 'x"); system("true'
    c = Axis(odd, integer(32))
    x, y = Buffer(odd, f32, integer(32)), Buffer(odd + "2", f32, integer(32))
    v = Var(0, f32, (c,))
    body = (Load(v, x, axis(c)), Store(y, axis(c), value_of(v), (c,)))
    program = TileProgram((x, y), (), (Loop(c, dims.ZERO, integer(32), 16, body),), lane=c, notes=(odd,))
    assert "system" not in print_unit([program], (), WIDE).text


def test_numbers_beyond_the_largest_single_are_infinite() -> None:
    largest = 3.4028234663852886e38
    assert float(float_literal(largest, True).rstrip("f")) == pytest.approx(largest, rel=1e-7)
    for beyond in (3.4028236e38, 1e39, 1e300):
        assert float_literal(beyond, True) == "__builtin_inff()"
        assert float_literal(-beyond, True) == "-__builtin_inff()"
        assert float_literal(beyond, False) == repr(beyond)


def test_what_cannot_be_printed_is_refused() -> None:
    c = Axis("c", integer(32))
    v, w = Var(0, f32, (c,)), Var(1, f32, (c,))
    x, y = Buffer("x", f32, integer(32)), Buffer("y", f32, integer(32))
    to_one_place = (Load(v, x, axis(c)), Store(y, integer(0), value_of(v), (c,)))
    program = TileProgram((x, y), (), (Loop(c, dims.ZERO, integer(32), 16, to_one_place),), lane=c)
    with pytest.raises(UnsupportedError, match="one place"):
        print_unit([program], (), WIDE)
    unknown = TileProgram((x, y), (GridAxis(Axis("g", N), N),), (Compute(w, const(1, f32)),))
    with pytest.raises(KeyError):
        print_unit([unknown], ("m",), WIDE)


def assembly(programs: list[TileProgram], folder: Path) -> dict[str, list[str]]:
    """The instructions of each kernel."""
    (folder / "unit.cpp").write_text(print_unit(programs, ("n", "m"), WIDE).text)
    flags = [f for f in FLAGS if f != "-shared"]
    out = folder / "unit.s"
    subprocess.run(
        ["g++", *flags, *WIDE.compiler_flags, f"-I{INCLUDE}", "-S", str(folder / "unit.cpp"), "-o", str(out)],
        check=True,
    )
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in out.read_text().splitlines():
        label = re.match(r"_ZN2twL(?:\d+)(k\d+)E\w*:", line)
        if label:
            current = found.setdefault(label.group(1), [])
        elif line.strip() and not line.strip().startswith((".cfi", ".p2align", ".type", ".size", ".section")):
            current.append(line.strip())
    return found


def loops(code: list[str]) -> list[list[str]]:
    """Innermost loops: from a label to a later jump back to it, with no label between."""
    found: list[list[str]] = []
    start = 0
    for k, line in enumerate(code):
        if line.endswith(":"):
            start = k
            continue
        if re.match(rf"j\w+\s+{re.escape(code[start].rstrip(':'))}$", line):
            found.append(code[start : k + 1])
    return found


def test_inner_loops_are_full_width_without_spills_or_calls(tmp_path: Path) -> None:
    programs = [
        elementwise(N, (f32, f32), f32, lambda a, b: call("add", a, b), tile=64),
        row_sum(N, M, sum_(f32)),
        softmax(N, M),
        silu(),
    ]
    code = assembly(programs, tmp_path)
    for name in ("k0", "k1", "k2", "k3"):
        wide = [loop for loop in loops(code[name]) if any("zmm" in line for line in loop)]
        assert wide, f"{name} has no vector loop"
        for loop in wide:
            assert not [line for line in loop if line.startswith("call")], f"{name}: a call in {loop}"
            spills = [line for line in loop if "zmm" in line and re.search(r"\(%r[sb]p", line)]
            assert not spills, f"{name}: {spills}"
    assert any("vmovntps" in line for line in code["k3"]) or any("vmovntdq" in line for line in code["k3"])
    assert any("sfence" in line for line in code["k3"])
    row = [
        loop for loop in loops(code["k1"]) if sum("vaddps" in line and "zmm" in line for line in loop) == 4
    ]
    assert row and len(row[0]) <= 10, "the row sum adds four registers per step and does nothing else"


def test_a_dot_is_a_register_block(tmp_path: Path) -> None:
    code = assembly([dot_tiles(12, 128, 32, 6, 64)], tmp_path)["k0"]
    (inner,) = [loop for loop in loops(code) if any("fmadd" in line for line in loop)]
    assert sum("fmadd" in line and "zmm" in line for line in inner) == 24
    assert not [line for line in inner if "zmm" in line and re.search(r"\(%r[sb]p", line)], (
        "accumulators stay in registers"
    )
    assert len(inner) <= 45


def test_one_value_may_be_stored_once_for_all_lanes() -> None:
    c = Axis("c", integer(32))
    x, y = Buffer("x", f32, integer(1)), Buffer("y", f32, integer(1))
    v = Var(0, f32)
    body = (Load(v, x, integer(0)), Store(y, integer(0), value_of(v), (c,), call("lt", axis(c), integer(20))))
    program = TileProgram((x, y), (), (Loop(c, dims.ZERO, integer(32), 16, body),), lane=c)
    assert "if ((20 - a0) > 0) put(b1, v0);" in print_unit([program], (), WIDE).text


def test_a_value_is_rounded_once_when_it_is_stored() -> None:
    program = elementwise(integer(64), (f16,), f16, lambda x: cast(x, f32), tile=16)
    v = next(s for s in program.statements() if isinstance(s, Compute)).var

    def narrowed(s: Stmt) -> list[Stmt] | None:
        return [replace(s, value=call("narrow", value_of(v), dtype=f16))] if isinstance(s, Store) else None

    text = print_unit([replace(program, body=rewrite_body(program.body[:1], narrowed))], (), WIDE).text
    assert "convert<half>" not in text and "store(b1 + a1, v1);" in text
