"""The fuzzer: what it grows, that it finds planted mistakes and makes them small, a sample of it with fixed seeds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.fuzz import exact
from benchmarks.fuzz.__main__ import Forked, main, setting_of, torch_fails, written
from benchmarks.fuzz.apart import apart
from benchmarks.fuzz.grow import grown
from benchmarks.fuzz.judge import REFUSED, Failure, Setting, _overflows, judged
from benchmarks.fuzz.program import Given, Program, Statement, function, read
from benchmarks.fuzz.shrink import shrunk
from benchmarks.fuzz.smooth import firm
from benchmarks.fuzz.workers import NoWorker, Worker
from torch import fx

from tilewright.ir.program import Loop, Stmt, rewrite_body
from tilewright.schedule import solver as solving

SAMPLE = (4, 6, 20, 31, 36)
"""Seeds whose kernels the exact oracle judges; programs of all kinds, quick to interpret."""
COMPILED = (8,)


@pytest.fixture(autouse=True)
def quiet() -> None:
    warnings.simplefilter("ignore")


def test_programs_are_the_same_each_time_and_eager_takes_them() -> None:
    programs = [grown(seed) for seed in range(12)]
    assert [p.source() for p in programs] == [grown(seed).source() for seed in range(12)]
    assert all(5 <= len(p.statements) <= 40 for p in programs)
    assert any(p.later for p in programs) and any(g.grad for p in programs for g in p.givens)
    for seed, p in enumerate(programs):
        results = function(p.source())(*p.inputs(seed))
        assert all(bool(r.isfinite().all()) for r in results)
        if p.later:
            function(p.source())(*p.inputs(seed, later=True))


@pytest.mark.parametrize("seed", SAMPLE)
def test_kernels_under_random_decisions_are_exact(seed: int) -> None:
    program = grown(seed)
    setting = replace(setting_of(seed, program), schedules=17 * seed + 1)
    assert exact.judged_exactly(program, setting) is None


@pytest.mark.parametrize("seed", COMPILED)
def test_compiled_programs_are_right(seed: int) -> None:
    program = grown(seed)
    assert judged(program, replace(setting_of(seed, program), schedules=0)) is None


def test_kernels_read_what_those_before_them_made() -> None:
    """A kernel that merges parts may rely on parts of no elements having the sum 0."""
    x = Given("x0", ("b", 2, "n", 8), "float32", "strided")
    givens = (x, Given("x3", (2,), "float32"), Given("x4", (2,), "float32"))
    norm = Statement(("v0",), "F.group_norm({0}, 2, {1}, {2})", ("x0", "x3", "x4"))
    program = Program(givens, (norm,), ("v0",), {"b": 2, "n": 3}, {"b": 2, "n": 8})
    setting = Setting(dynamic=True, seed=2032, schedules=2033)
    assert exact.judged_exactly(program, setting) is None


def test_a_kernel_of_many_steps_is_left_undecided(monkeypatch: pytest.MonkeyPatch) -> None:
    oracles: list[exact.Oracle] = []

    class Watched(exact.Oracle):
        def __post_init__(self) -> None:
            super().__post_init__()
            oracles.append(self)
            self.end = time.process_time() + 1e6

        def _compare(self, *given: object) -> None:
            self.end = time.process_time() - 1  # over while it runs
            super()._compare(*given)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(exact, "Oracle", Watched)
    made = (Statement(("v0",), "{0}.cumsum(-1).softmax(-1)", ("x0",)),)
    program = Program((Given("x0", (90, 90), "float32"),), made, ("v0",), {}, {})
    assert exact.judged_exactly(program, Setting(seed=1, schedules=1)) is None
    (oracle,) = oracles
    assert oracle.kernels == 0 and oracle.undecided == 1
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)


def test_a_mean_beside_a_product_is_exact() -> None:
    """A kernel that multiplies by the inverse of a count says by what fraction, not by what float."""
    halves = [
        Given(n, sizes, "float16")
        for n, sizes in (("x0", (3, 5)), ("x2", (5,)), ("x3", (5,)), ("x6", (5, 8)))
    ]
    norm = Statement(("v0",), "F.rms_norm({0}, (5,), {1} + {2})", ("x0", "x2", "x3"))
    mixed = Statement(("v1",), "({0}.unsqueeze(-1) * {1}).sum(-2)", ("v0", "x6"))
    program = Program(tuple(halves), (norm, mixed), ("v1",), {}, {})
    assert exact.judged_exactly(program, Setting(seed=971735, schedules=755549)) is None


def test_exponentials_beside_products_are_exact() -> None:
    """Hopper takes them as powers of two, with a float that stands for log2 e."""
    made = Statement(("v0",), "({0} @ {0}.mT / 4).softmax(-1) @ {0}", ("x0",))
    program = Program((Given("x0", (2, 32, 16), "float16"),), (made,), ("v0",), {}, {})
    assert exact.judged_exactly(program, Setting(seed=972103, schedules=587532)) is None


def test_the_reference_is_wide_where_integers_become_floats() -> None:
    source = "def forward(x):\n    return (x.sqrt(),)\n"
    assert function(source, double=True)(torch.tensor([2]))[0].dtype == torch.float64
    assert function(source)(torch.tensor([2]))[0].dtype == torch.get_default_dtype() == torch.float32


def test_integers_that_a_near_tie_decides_are_told_from_others() -> None:
    """The largest of 500 numbers is beyond the second by less than four roundings of a half in some of 64 rows."""
    x = Given("x0", (64, 500), "float32")
    program = Program((x,), (Statement(("v0",), "{0}.argmax(-1)", ("x0",)),), ("v0",), {}, {})
    assert firm(program, 0, False, "cpu", "results", 0).all()
    halves = firm(replace(program, givens=(replace(x, dtype="bfloat16"),)), 0, False, "cpu", "results", 0)
    assert halves.any() and not halves.all()


def test_integers_that_ties_decide_everywhere_are_not_judged() -> None:
    """Sums of the same numbers in two orders: rounding tells which is larger. All were judged because few were firm."""
    x = Given("x0", (3, 200), "float32")
    made = (
        Statement(("v0",), "torch.stack([{0}[0] + {0}[1] + {0}[2], {0}[2] + {0}[1] + {0}[0]])", ("x0",)),
        Statement(("v1",), "{0}.argmax(0)", ("v0",)),
    )
    program = Program((x,), made, ("v1",), {}, {})
    assert int(firm(program, 0, False, "cpu", "results", 0).sum()) < 100


def test_complex_numbers_are_judged() -> None:
    """They are no integers: that a nudge changes them excuses nothing."""
    made = Statement(("v0",), "torch.complex({0}, {0} * {0})", ("x0",))
    program = Program((Given("x0", (8, 9), "float32"),), (made,), ("v0",), {}, {})
    assert firm(program, 0, False, "cpu", "results", 0).all()


def test_gradients_that_a_near_tie_decides_are_told_from_others() -> None:
    """Of the larger of two numbers the gradient is one or none: where they are close, rounding tells. A smooth function
    has no such place."""
    halves = (Given("x0", (40, 50), "bfloat16", grad=True), Given("x1", (40, 50), "bfloat16"))

    def sure(line: str) -> torch.Tensor:
        made = Statement(("v0",), line, ("x0", "x1"))
        return firm(Program(halves, (made,), ("v0",), {}, {}), 0, False, "cpu", "gradients", 0)

    larger = sure("torch.maximum({0}, {1})")
    x, y = (t.detach().double() for t in Program(halves, (), (), {}, {}).inputs(0))
    assert larger[(x - y).abs() > 0.2].all()
    assert not larger[(x - y).abs() < 1e-3 * y.abs()].any()
    assert sure("torch.sin({0}) * {1}").all()
    assert sure("torch.sin({0} * 1e4) * {1}").all(), "what jumps everywhere excuses nothing"


def test_what_overflows_in_eager_excuses_no_more_than_itself() -> None:
    exact = torch.linspace(1, 2, 64, dtype=torch.float64)
    eager = exact.bfloat16()
    eager[3:5] = torch.inf
    ours = exact.bfloat16()
    ours[8] = torch.nan
    assert _overflows(ours, eager, exact)
    ours[20] = 7.0
    assert not _overflows(ours, eager, exact)
    assert not _overflows(torch.full_like(ours, torch.nan), eager, exact)
    assert not _overflows(exact.float(), eager.float(), exact)


def test_a_type_that_torch_promises_and_eager_does_not_give_is_torchs_own() -> None:
    loss = Statement(("v0",), "F.huber_loss({0}, {1})", ("x0", "x1"))
    givens = (Given("x0", (4,), "bfloat16"), Given("x1", (4,), "float32"))
    program = Program(givens, (loss,), ("v0",), {}, {})
    failure = Failure("wrong", "results[0]: FAIL: dtype torch.float32, eager torch.bfloat16")
    assert torch_fails(Forked(), program, Setting(), failure)
    assert not torch_fails(Forked(), program, Setting(), Failure("wrong", "results[0]: FAIL smallest k 9"))
    same = replace(program, givens=(givens[1], givens[1]))
    assert not torch_fails(Forked(), same, Setting(), failure)


def test_what_torch_does_not_capture_as_one_graph_is_its_own() -> None:
    """The direct door wants one graph; a view of an input in place breaks it."""
    shaped = Statement((), "{0}.unsqueeze_(0)", ("x0",))
    program = Program((Given("x0", (2, 3), "float32"),), (shaped,), ("x0",), {}, {})
    for door, own in (("direct", True), ("backend", False)):
        setting = Setting(door=door)
        failure = judged(program, setting) or Failure("crash", "as if")
        assert torch_fails(Forked(), program, setting, failure) == own


def _without_last_steps(body: Sequence[Stmt]) -> tuple[Stmt, ...]:
    """Loops that end one step early."""

    def change(s: Stmt) -> Sequence[Stmt] | None:
        return [replace(s, stop=s.start)] if isinstance(s, Loop) else None

    return rewrite_body(body, change)


def test_the_exact_oracle_sees_a_lost_step(monkeypatch: pytest.MonkeyPatch) -> None:
    lower: Callable[..., object] = solving.lower

    def losing(form: object, schedule: object) -> object:
        program = lower(form, schedule)
        return replace(program, body=_without_last_steps(program.body))  # type: ignore[type-var, attr-defined]

    program = Program(
        (Given("x0", (5, 37), "float32"),), (Statement(("v0",), "{0}.sum(1) * 2", ("x0",)),), ("v0",), {}, {}
    )
    setting = Setting(schedules=3)
    assert exact.judged_exactly(program, setting) is None
    monkeypatch.setattr(solving, "lower", losing)
    found = exact.judged_exactly(program, setting)
    assert found is not None and found.kind == "wrong"


def _planted(gm: fx.GraphModule, inputs: Sequence[object], **options: object) -> Callable[..., object]:
    """A compiler that takes tanh for its argument."""
    for node in gm.graph.nodes:
        if node.target is torch.tanh:
            node.replace_all_uses_with(node.args[0])
    gm.recompile()
    return gm.forward


def test_a_planted_mistake_is_found_shrunk_and_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiled = torch.compile

    def wrong(plain: Callable[..., object], **given: object) -> Callable[..., object]:
        return compiled(plain, backend=_planted, dynamic=bool(given["dynamic"]))

    lines = (
        ("v0", "{0} * 2 + {1}", ("x0", "x1")),
        ("v1", "{0}.transpose(0, 1).contiguous()", ("v0",)),
        ("v2", "torch.tanh({0})", ("v1",)),
        ("v3", "{0}.sum(0)", ("v2",)),
        ("v4", "{0}.relu()", ("v0",)),
    )
    program = Program(
        (Given("x0", ("n", 6), "float32", "turned", True), Given("x1", (6,), "float32")),
        tuple(Statement((made,), text, read) for made, text, read in lines), ("v3", "v4"), {"n": 9}, {},
    )  # fmt: skip
    setting = Setting(training=True, options={"fusion": "none", "rules": False})
    with monkeypatch.context() as patch:
        patch.setattr(torch, "compile", wrong)
        failure = judged(program, setting)
        assert failure is not None and failure.kind == "wrong"
        (small, plain), last = shrunk(program, setting, failure, judged, 60)
    assert [s.template for s in small.statements] == ["torch.tanh({0})"]
    assert plain.options == {} and not plain.training and small.givens[0].layout == "contiguous"
    path = written(tmp_path, 1, small, plain, last)
    root = Path(__file__).parents[2]
    paths = os.pathsep.join((str(root), str(root / "src")))
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": paths}
    )  # fmt: skip
    assert done.stdout == "right\n" and done.returncode == 0, done.stderr


def test_a_child_that_dies_hangs_or_lies_is_a_finding() -> None:
    assert apart(lambda: None) is None
    assert apart(lambda: Failure("wrong", "text")) == Failure("wrong", "text")
    died = apart(lambda: os.kill(os.getpid(), signal.SIGKILL))
    assert died is not None and died.kind == "crash"
    slow = apart(lambda: time.sleep(60), seconds=0.2)
    assert slow is not None and slow.kind == "slow"


def _told(statement: str) -> Program:
    return Program(
        (Given("x0", (4, 6), "float32"),), (Statement(("v0",), statement, ("x0",)),), ("v0",), {}, {}
    )


def test_a_worker_that_dies_or_hangs_costs_its_program() -> None:
    worker = Worker("cpu")
    try:
        assert worker.grow(5) == repr(grown(5)) and read(repr(grown(5))) == grown(5)
        assert worker.ask(_told("{0} * 2"), Setting()) is None
        first = worker.process
        refused = worker.ask(_told("{0}.view(5, 5)"), Setting())
        assert refused is not None and refused.kind == REFUSED and worker.process is first
        slow = worker.ask(_told("{0} * 2 + __import__('time').sleep(60)"), Setting(), seconds=0.3)
        assert slow is not None and slow.kind == "slow"
        died = worker.ask(_told("{0} * __import__('os').kill(__import__('os').getpid(), 9)"), Setting())
        assert died is not None and died.kind == "crash" and "-9" in died.text
        assert worker.process is None
    finally:
        worker.end()


def test_a_device_that_is_not_there_judges_nothing() -> None:
    with pytest.raises(NoWorker, match="cuda:77 did not start"):
        Worker("cuda:77").ask(_told("{0} * 2"), Setting())


def test_a_run_that_judges_nothing_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["fuzz", "--workers", "1", "--count", "0"])
    assert main() == 1
    assert "no program was judged" in capsys.readouterr().out
