"""Products of fp32 inside kernels: of pieces that hold all bits, unless the switch or the option lets them be TF32."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path

import pytest
import torch
from tests.support.triton.described import Nowhere
from tests.support.triton.harness import build, print_triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tilewright.lower.variants import variants
from tilewright.options import Options
from tilewright.pipeline.backends import cuda
from tilewright.pipeline.compiler import Compiled, compile_fx
from tilewright.runtime.cuda import triton_compat
from tilewright.runtime.cuda.device import singles_may_round
from tilewright.target import preset

pytestmark = pytest.mark.skipif(triton_compat.version() is None, reason="Triton is not installed")


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    monkeypatch.setattr(cuda, "gpu_target", lambda ordinal: preset("sm_90"))
    monkeypatch.setattr(cuda, "driver_device", lambda *_: Nowhere())
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2), -1).sum(-2)


def compiled(
    run: Callable[..., Tensor] = scores, dtype: torch.dtype = torch.float32, **options: object
) -> Compiled:
    with FakeTensorMode():
        given = [torch.empty(2, 4, 512, 64, device="cuda", dtype=dtype) for _ in range(2)]
    gm = make_fx(lambda *a: [run(*a)], tracing_mode="fake")(*given)
    return compile_fx(gm, Options.make({"contractions": "inside", **options}), trusted=True)


def texts(made: Compiled) -> str:
    return "\n".join(k.source for k in made.kernels)


@pytest.mark.parametrize(
    ("switch", "option", "coarse"),
    [
        ("highest", None, False),
        ("high", None, True),
        ("medium", None, True),
        ("high", False, False),
        ("highest", True, True),
    ],
)
def test_the_switch_and_the_option(switch: str, option: bool | None, coarse: bool) -> None:
    torch.set_float32_matmul_precision(switch)
    made = compiled(tf32=option)
    text = texts(made)
    assert ('input_precision="tf32"' in text, 'input_precision="bf16x6"' in text) == (coarse, not coarse)
    for said, expected in (("are TF32", coarse), ("are six of their pieces", not coarse)):
        told = [k for k in made.kernels if f"its products of fp32 {said}" in k.reason]
        assert bool(told) == expected, "explain shows the reason of each kernel"


def test_the_older_switch_is_the_same() -> None:
    torch.set_float32_matmul_precision("highest")
    assert not singles_may_round()
    torch.backends.cuda.matmul.allow_tf32 = True
    assert singles_may_round()
    torch.backends.cuda.matmul.allow_tf32 = False
    assert not singles_may_round()


def test_halves_are_as_they_were() -> None:
    one, other = (texts(compiled(dtype=torch.float16, tf32=t)) for t in (False, True))
    assert one == other and "tl.dot" in one


def test_only_nvidia_machines_have_it() -> None:
    for name in ("gfx942", "x86-64-v4", "toy3"):
        assert preset(name).rounding_singles() is preset(name)
    made = preset("sm_80").rounding_singles()
    (unit,) = (u for u in made.matrix_units if u.operand == "f32")
    assert unit.precision == "tf32"
    said = {name: preset(name).singles for name in ("sm_80", "sm_90", "sm_100", "gfx942")}
    assert said == {"sm_80": "ieee", "sm_90": "bf16x6", "sm_100": "bf16x6", "gfx942": "ieee"}
    assert unit.flops == preset("sm_80").matrix_units[0].flops / 2 and made.rounding_singles() is made
    assert made.digest() != preset("sm_80").digest()


def test_matrix_units_run_them(tmp_path: Path) -> None:
    for coarse in (True, False):
        (kernel, *_) = (k for k in compiled(tf32=coarse).kernels if "tl.dot" in k.source)
        target = preset("sm_90").rounding_singles() if coarse else preset("sm_90")
        program = kernel.program
        built = build(tmp_path / str(coarse), print_triton(program, (), target, variants(program)[0], "k0"))
        assert ("tf32" in built.text) == coarse and ("bf16" in built.text) != coarse


def test_doubles_are_not_split() -> None:
    text = texts(compiled(dtype=torch.float64))
    assert "bf16" not in text and ("tl.dot" not in text or 'input_precision="ieee"' in text)


def statistics(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    p = torch.softmax(q @ k.transpose(-1, -2), -1)
    return p @ v, p.sum(-2)


def test_kernels_that_compute_the_same_product_add_its_pieces_in_the_same_order() -> None:
    """Where a score is large, a column kernel whose scores differ in the last bit from those of the row kernel gives
    weights that err more than eager's: its blocks of keys x queries are turned products of queries x keys."""
    with FakeTensorMode():
        given = [torch.empty(2, 4, 512, 64, device="cuda") for _ in range(3)]
    gm = make_fx(lambda *a: [*statistics(*a)], tracing_mode="fake")(*given)
    rows, columns = compile_fx(gm, Options.make({"contractions": "inside"}), trusted=True).kernels
    assert "tl.trans(tl.dot(" in columns.source and "tl.trans(tl.dot(" not in rows.source


def biased(q: Tensor, k: Tensor, bias: Tensor) -> Tensor:
    return torch.softmax((q @ k.transpose(-1, -2)).float() + bias, -1).to(k.dtype) @ k


def test_weights_that_the_program_rounds_to_halves_are_multiplied_as_halves() -> None:
    """Although the scores are singles: a bias of singles is no reason to split what was rounded."""
    with FakeTensorMode():
        given = [torch.empty(2, 4, 512, 64, device="cuda", dtype=torch.float16) for _ in range(2)]
        given.append(torch.empty(4, 512, 512, device="cuda"))
    gm = make_fx(lambda *a: [biased(*a)], tracing_mode="fake")(*given)
    text = texts(compile_fx(gm, Options.make({"contractions": "inside"}), trusted=True))
    assert text.count("tl.dot(") == 2 and "input_precision" not in text
