"""What the assembler of PTX gets wrong is said in another way; everything else stays as it is."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tilewright.runtime.cuda import triton_compat
from tilewright.runtime.cuda.ptx import mend_ptx, releases_first, waits_first

PROGRAM = """.version 8.4
.target sm_90a
.address_size 64
.visible .entry k0(.param .u64 from, .param .u64 to)
{
	.reg .pred %p<3>;
	.reg .b16 %rs<9>;
	.reg .b32 %r<9>;
	.reg .b64 %rd<3>;
	ld.param.b64 %rd1, [from];
	ld.param.b64 %rd2, [to];
	ld.global.b32 %r1, [%rd1];
	setp.eq.s32 %p1, %r1, -5;
STEPS
	st.global.b32 [%rd2], %r4;
	ret;
}
"""
SUM = "	mov.b32 \t%r2, 16711680;\n	add.s16x2 \t%r4, %r1, %r2;"
MAXIMUM = "	mov.b32 \t%r2, -8323200;\n	max.NaN.bf16x2 \t%r4, %r1, %r2;"
CHOSEN = """	selp.b32 	%r2, %r1, -8323200, %p1;
	mov.b16 	%rs1, 0xFF80;
	selp.b16 	%rs2, -128, %rs1, %p1;
	mov.b32 	%r3, {%rs1, %rs2};
	fma.rn.bf16x2 	%r4, %r2, %r3, %r3;"""


def test_halves_are_added_by_themselves() -> None:
    text = mend_ptx(PROGRAM.replace("STEPS", SUM))
    assert "s16x2" not in text and "add.s16 %upper0, %upper0, %upper1;" in text
    assert "mov.b32 {%lower1, %upper1}, %r2;" in text and "mov.b32 %r4, {%lower0, %upper0};" in text


def test_negative_constants_of_short_floats_are_hidden() -> None:
    text = mend_ptx(PROGRAM.replace("STEPS", MAXIMUM))
    assert "or.b32 %hidden0, %row, -8323200; mov.b32 \t%r2, %hidden0; }" in text
    text = mend_ptx(PROGRAM.replace("STEPS", CHOSEN))
    assert "selp.b32 \t%r2, %r1, %hidden0, %p1; }" in text
    assert "or.b16 %hidden0, %narrow, 65408; mov.b16 \t%rs1, %hidden0; }" in text
    assert "selp.b16 \t%rs2, %hidden0, %rs1, %p1; }" in text and "setp.eq.s32 %p1, %r1, -5;" in text


@pytest.mark.parametrize(
    "steps",
    [
        "	mov.b32 \t%r4, -8323200;",  # no arithmetic of bf16
        MAXIMUM.replace("-8323200", "1065369472"),  # a positive number
        MAXIMUM.replace("-8323200", "-1"),  # no number
        MAXIMUM.replace("max.NaN.bf16x2", "max.f16x2"),
        "	cvt.rn.bf16x2.f32 	%r4, %r1, %r1;\n	mov.b32 	%r2, -8323200;",
    ],
)
def test_the_rest_stays(steps: str) -> None:
    text = PROGRAM.replace("STEPS", steps)
    assert mend_ptx(text) == text


@pytest.mark.skipif(triton_compat.version() is None, reason="Triton is not installed")
@pytest.mark.parametrize("steps", [SUM, MAXIMUM, CHOSEN])
def test_what_is_written_can_be_assembled(steps: str, tmp_path: Path) -> None:
    from triton.backends.nvidia.compiler import get_ptxas

    source = tmp_path / "k0.ptx"
    source.write_text(mend_ptx(PROGRAM.replace("STEPS", steps)))
    command = [get_ptxas(90).path, "-arch=sm_90a", "-o", str(tmp_path / "k0.cubin"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


WAIT = "\tgriddepcontrol.wait; // dummy\n"
EARLY = PROGRAM.replace("STEPS", "").replace("\tld.global", f"\t// ld.global\n{WAIT}\tld.global", 1)


def test_a_kernel_that_waits_first() -> None:
    assert waits_first(EARLY) and not waits_first(PROGRAM)
    vectors = "	mov.b64 {%r1, %r2}, %rd1;\n	$L__tmp0: add.s32 %r1, %r1, %r2;\n	// ld.global\n"
    assert waits_first(EARLY.replace("	griddepcontrol", f"{vectors}	griddepcontrol"))
    released, wait = "	griddepcontrol.launch_dependents;\n", "	griddepcontrol.wait;"
    first, later = EARLY.replace(wait, released + wait), EARLY.replace(wait, f"{wait}\n{released}")
    assert waits_first(first) and waits_first(later)
    assert releases_first(first) and not releases_first(later) and not releases_first(EARLY)


@pytest.mark.parametrize(
    "step",
    [
        "ld.global.b32 %r1, [%rd1];", "st.global.b32 [%rd1], %r1;", "@%p1 bra $L__BB0_2;", "bra $L__BB0_2;",
        "atom.global.add.u32 %r1, [%rd1], %r2;", "cp.async.cg.shared.global [%r1], [%rd1], 0x10;", "@%p1",
        "prefetch.global.L2 [%rd1];", "griddepcontrol;", "ret;", "call f, ();", "ld.volatile.global.b32 %r1, [%rd1];",
    ],
)  # fmt: skip
def test_a_kernel_that_does_something_before_it_waits(step: str) -> None:
    assert not waits_first(EARLY.replace("griddepcontrol", f"{step} griddepcontrol"))
