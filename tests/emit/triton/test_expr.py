"""Every scalar operation and every element type, printed as Triton, against the meaning of the program."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.emit.scalar_programs import divisor, operations, pointwise, sample
from tests.support.triton.harness import Job, Outcome, build, interpret, same_as_interpreter

from tilewright.ir.dtype import DTYPES, DType, Kind, bool_, f32
from tilewright.ir.expr import SCALARS, Expr, call, cast, const
from tilewright.lower.variants import Variant

TYPES = ("f32", "f64", "i32", "i64", "u8", "i8", "i16", "bool")
COUNT = 75


def arithmetic(dtype: DType, name: str) -> Job:
    """All operations of one type that take the same kind of values."""
    outputs: list[tuple[str, DType, Callable[..., Expr]]] = []
    inputs: list[np.ndarray] = []
    for op in [*operations(dtype), *(["pow"] if not dtype.is_float and dtype is not bool_ else [])]:
        rule = SCALARS[op]
        first = len(inputs)
        args = [np.roll(sample(dtype, COUNT, op), k) for k in range(rule.arity)]
        inputs += [args[0], *(divisor(y, op) for y in args[1:])]
        if op == "pow" and not dtype.is_float:
            inputs[-1] = (np.abs(inputs[-1].astype(np.int64)) % 7).astype(inputs[-1].dtype)

        def body(*values: Expr, op: str = op, first: int = first) -> Expr:
            return call(op, *values[first : first + SCALARS[op].arity])

        outputs.append((op, bool_ if rule.result == "bool" else dtype, body))
    program = pointwise([dtype] * len(inputs), outputs)
    return Job(program, [*inputs, *[None] * len(outputs)], {"n": COUNT}, name=name)


def casts(dtype: DType, name: str) -> Job:
    """Conversions of one type to all."""
    x = np.abs(sample(dtype, COUNT, "fmod")) if dtype is not bool_ else sample(dtype, COUNT)
    if dtype.kind is Kind.INT:
        x[:2] = 0, 1
    outputs = [(to.name, to, lambda a, to=to: cast(a, to)) for to in DTYPES.values()]
    outputs.append(("rounded", f32, lambda a: cast(cast(a, DTYPES["bf16"]), f32)))
    return Job(pointwise([dtype], outputs), [x, *[None] * len(outputs)], {"n": COUNT}, name=name)


def constants() -> Job:
    """Bare numbers where the language would choose a type of its own."""
    f64, i64, u8 = DTYPES["f64"], DTYPES["i64"], DTYPES["u8"]

    def tenth(*_: Expr) -> Expr:
        return call("where", call("lt", const(1, f64), const(2, f64)), const(0.1, f64), const(7, f64))

    outputs: list[tuple[str, DType, Callable[..., Expr]]] = [
        ("double", f64, tenth),
        ("clamped", f64, lambda x, *_: call("minimum", cast(x, f64), const(0.1, f64))),
        ("number", i64, lambda *_: const(-(1 << 40), i64)),
        ("chosen", i64, lambda x, *_: call("where", call("gt", x, const(0, f32)), const(5, i64), const(-1, i64))),
        ("bytes", u8, lambda x, y: call("maximum", y, const(200, u8))),
        ("truth", bool_, lambda *_: const(True, bool_)),
        ("inverse", bool_, lambda x, y: call("not", call("le", x, const(float("nan"), f32)))),
        ("infinite", f32, lambda x, y: call("maximum", x, const(float("inf"), f32))),
        ("exponential", f32, lambda *_: call("exp", const(1, f32))),
    ]  # fmt: skip
    inputs = [sample(f32, COUNT, "floor"), sample(u8, COUNT)]
    return Job(
        pointwise((f32, u8), outputs), [*inputs, *[None] * len(outputs)], {"n": COUNT}, name="constants"
    )


Runs = dict[str, tuple[Job, Outcome]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Every job of this file, run in one process."""
    np.random.seed(0)
    jobs = [arithmetic(DTYPES[t], f"operations {t}") for t in TYPES]
    jobs += [casts(DTYPES[t], f"casts {t}") for t in DTYPES] + [constants()]
    outcomes = interpret(tmp_path_factory.mktemp("ops"), jobs)
    return {j.name: (j, o) for j, o in zip(jobs, outcomes, strict=True)}


@pytest.mark.parametrize("name", TYPES)
def test_operations(runs: Runs, name: str) -> None:
    same_as_interpreter(*runs[f"operations {name}"], rtol=3e-6, atol=1e-30)


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_casts(runs: Runs, name: str) -> None:
    same_as_interpreter(*runs[f"casts {name}"], rtol=0, atol=0)


def test_constants_have_their_own_types(runs: Runs) -> None:
    same_as_interpreter(*runs["constants"], rtol=1e-7, atol=0)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("f64", "i64", "i8", "i16")]


@pytest.mark.parametrize("name", ["f32", "i32", "u8", "bool", *SLOW])
@pytest.mark.parametrize("machine", ["sm_90", pytest.param("gfx942", marks=pytest.mark.slow)])
def test_operations_build(tmp_path: Path, name: str, machine: str) -> None:
    job = arithmetic(DTYPES[name], name)
    assert build(tmp_path, job.source(), machine).facts.threads >= 32


def test_constants_and_casts_build(tmp_path: Path) -> None:
    for k, job in enumerate([constants(), casts(f32, "casts"), casts(DTYPES["bf16"], "halves")]):
        assert build(tmp_path / str(k), job.source()).facts.threads == 32
    wide = Job(
        *[getattr(job, f) for f in ("program", "inputs", "sizes", "symbols")], Variant(True, True), "wide"
    )
    assert build(tmp_path / "wide", wide.source()).facts.threads == 32
