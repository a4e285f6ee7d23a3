"""The entry points: torch.compile, tilewright.compile in its forms, gradients, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import tilewright
from tilewright.errors import CompilerMissing, InputError, TilewrightError, UnsupportedError, VerifyError


@pytest.fixture(autouse=True)
def fresh() -> None:
    tilewright.reset()


def chain(x: Tensor, y: Tensor) -> Tensor:
    """Three elementwise ops."""
    return torch.relu(x + y) * 2


class Net(torch.nn.Module):
    """A small module with weights, a buffer, and a nested result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("shift", torch.ones(4))
        self.scale = 2.0

    def forward(self, x: Tensor, flag: bool = True) -> dict[str, Tensor | None]:
        """Uses everything."""
        y = self.linear(x) * self.scale + self.shift
        return {"y": torch.tanh(y) if flag else y, "none": None, "z": x.sum(0)}


def close(got: object, wanted: object) -> None:
    """Equal nesting, close values."""
    torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


# --- torch.compile ---------------------------------------------------------------


def test_the_backend_is_registered() -> None:
    assert "tilewright" in torch._dynamo.list_backends(None)
    compiled = torch.compile(chain, backend="tilewright")
    x, y = torch.randn(3, 5), torch.randn(3, 5)
    close(compiled(x, y), chain(x, y))
    assert tilewright.stats().graphs == 1


def test_graph_breaks_are_torchs() -> None:
    def program(x: Tensor) -> Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1

    x = torch.randn(4)
    close(torch.compile(program, backend="tilewright")(x), program(x))
    assert tilewright.stats().graphs == 2


def test_gradients_go_both_ways_through_the_pipeline() -> None:
    net = Net()
    x = torch.randn(5, 4, requires_grad=True)
    net(x)["y"].square().sum().backward()
    wanted = [x.grad, *(p.grad for p in net.parameters())]
    x.grad = None
    net.zero_grad()
    before = tilewright.stats().graphs
    torch.compile(net, backend="tilewright")(x)["y"].square().sum().backward()
    assert tilewright.stats().graphs == before + 2
    for got, want in zip([x.grad, *(p.grad for p in net.parameters())], wanted, strict=True):
        close(got, want)


@pytest.mark.filterwarnings("ignore:gradients of a compiled graph were taken")
def test_double_backward_names_the_supported_way() -> None:
    compiled = torch.compile(lambda x: torch.sin(x).sum(), backend="tilewright")
    x = torch.randn(4, requires_grad=True)
    (grad,) = torch.autograd.grad(compiled(x), x, create_graph=True)
    close(grad, torch.cos(x))
    with pytest.raises(UnsupportedError, match="whole loss"):
        grad.sum().backward()


def test_gradients_that_count_as_constants_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.autograd.grad` may not come to the node that raises: what it gives lacks a part then."""
    monkeypatch.setattr("tilewright.errors._ONCE", set())
    compiled = torch.compile(lambda x: torch.exp(x).sum(), backend="tilewright")
    x = torch.randn(4, requires_grad=True)
    with pytest.warns(match="create_graph=True"):
        (grad,) = torch.autograd.grad(compiled(x), x, create_graph=True)
    (got,) = torch.autograd.grad((x * grad).sum(), x)
    close(got, torch.exp(x))  # and not (1 + x) * exp(x)


def test_retain_graph_is_no_double_backward() -> None:
    compiled = torch.compile(lambda x: torch.sin(x).sum(), backend="tilewright")
    x = torch.randn(4, requires_grad=True)
    loss = compiled(x)
    loss.backward(retain_graph=True)
    loss.backward()
    close(x.grad, 2 * torch.cos(x))


@pytest.mark.filterwarnings("ignore:gradients of a compiled graph were taken")
@pytest.mark.parametrize("entry", [tilewright.compile, partial(torch.compile, backend="tilewright")])
def test_what_a_forward_pass_saves_is_kept_for_another_backward(entry: Callable[..., Any]) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.GELU(), torch.nn.Linear(5, 1))
    x = torch.randn(4, 6, requires_grad=True)
    (wanted,) = torch.autograd.grad(net(x).sum(), x)
    loss = entry(net)(x).sum()
    for _ in range(2):
        (got,) = torch.autograd.grad(loss, x, retain_graph=True)
        close(got, wanted)
    (grad,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(UnsupportedError, match="whole loss"):
        grad.square().sum().backward()


def test_derivatives_inside_a_compiled_loss() -> None:
    def loss(weight: Tensor, x: Tensor) -> Tensor:
        u = torch.tanh(x * weight).sum()
        (du,) = torch.autograd.grad(u, x, create_graph=True)
        return (du - 1).square().sum()

    weight = torch.randn(6, requires_grad=True)
    x = torch.randn(6, requires_grad=True)
    (wanted,) = torch.autograd.grad(loss(weight, x), weight)
    (got,) = torch.autograd.grad(tilewright.compile(loss)(weight, x), weight)
    close(got, wanted)


def test_frozen_weights_are_compared_on_each_call() -> None:
    net = Net().eval()
    compiled = torch.compile(net, backend="tilewright", options={"freeze": True})
    x = torch.randn(3, 4)
    with torch.no_grad():
        close(compiled(x), net(x))
        net.linear.weight.mul_(3)
        close(compiled(x), net(x))
        net.linear.bias.data = torch.randn(4)
        close(compiled(x), net(x))
        close(compiled(x), net(x))


def test_unknown_options_are_refused() -> None:
    with pytest.raises((InputError, RuntimeError), match="did you mean"):
        torch.compile(chain, backend="tilewright", options={"strictt": True})(torch.ones(2), torch.ones(2))


# --- tilewright.compile -------------------------------------------------------------


def test_a_function_and_its_short_way() -> None:
    compiled = tilewright.compile(chain)
    for size in (3, 3, 5, 3):
        x, y = torch.randn(size, 4), torch.randn(size, 4)
        close(compiled(x, y), chain(x, y))
    assert "generated 6 of 6 ops in 2 kernels" in str(compiled.coverage)  # static first, then any size
    assert compiled.kernels and "k0" in compiled.kernels[0].source  # pyright: ignore


def test_arguments_by_name_and_plain_values() -> None:
    net = Net()
    compiled = tilewright.compile(net)
    x = torch.randn(2, 4)
    with torch.no_grad():
        for flag in (True, False, True, False):
            close(compiled(x=x, flag=flag), net(x, flag))
            close(compiled(x, flag), net(x, flag))


def test_numpy_arrays() -> None:
    compiled = tilewright.compile(chain)
    x, y = np.ones((2, 3), np.float32), np.ones((2, 3), np.float32)
    for _ in range(2):
        assert np.array_equal(compiled(x, y), np.full((2, 3), 4.0, np.float32))
        close(compiled(x, torch.from_numpy(y)), torch.full((2, 3), 4.0))


def test_example_inputs_compile_without_running() -> None:
    norm = torch.nn.BatchNorm1d(4)
    compiled = tilewright.compile(norm, (torch.randn(8, 4),))
    assert norm.num_batches_tracked == 0
    assert tilewright.stats().graphs == 1
    other = torch.nn.BatchNorm1d(4)
    x = torch.randn(8, 4)
    close(compiled(x), other(x))
    assert norm.num_batches_tracked == 1


def test_attributes_and_weights_are_compared() -> None:
    net = Net()
    compiled = tilewright.compile(net)
    x = torch.randn(2, 4)
    with torch.no_grad():
        for _ in range(2):
            close(compiled(x), net(x))
        net.scale = 5.0
        close(compiled(x), net(x))
        net.linear.weight = torch.nn.Parameter(torch.randn(4, 4))
        close(compiled(x), net(x))
        close(compiled(torch.ones(3, 4)), net(torch.ones(3, 4)))
        net.shift.add_(1)
        close(compiled(x), net(x))
    compiled(x)["y"].sum().backward()
    assert net.linear.weight.grad is not None


def test_python_effects_happen_on_each_call() -> None:
    class Counter(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            self.last = x + 1
            return x * 2

    module = Counter()
    compiled = tilewright.compile(module)
    with torch.no_grad():
        for value in (1.0, 2.0, 3.0):
            compiled(torch.full((2,), value))
            assert module.last is not None and module.last[0] == value + 1


def test_closures_are_compared() -> None:
    factor = 2.0

    def program(x: Tensor) -> Tensor:
        return x * factor

    compiled = tilewright.compile(program)
    x = torch.ones(3)
    assert compiled(x)[0] == compiled(x)[0] == 2  # pyright: ignore
    factor = 3.0
    assert compiled(x)[0] == 3  # pyright: ignore


def test_nothing_is_compiled_yet() -> None:
    with pytest.raises(InputError, match="nothing is compiled"):
        _ = tilewright.compile(chain).coverage


def test_a_program_that_is_no_single_graph() -> None:
    def program(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x

    with pytest.raises(UnsupportedError, match=r"no single graph.*test_compile\.py:\d+"):
        tilewright.compile(program)(torch.ones(2))


def test_wrong_targets_and_arguments() -> None:
    with pytest.raises(InputError):
        tilewright.compile(3)  # pyright: ignore
    with pytest.raises(InputError):
        tilewright.compile("model.txt")
    with pytest.raises(UnsupportedError, match="xpu"):
        tilewright.compile(chain, device="xpu")
    with pytest.raises(InputError, match="not a device"):
        tilewright.compile(chain, device="nonsense")
    with pytest.raises(InputError):
        tilewright.compile(chain, dims="all")
    with pytest.raises(InputError, match="do not fit"):
        tilewright.compile(chain)(torch.ones(2))


def test_inputs_that_an_op_refuses() -> None:
    compiled = tilewright.compile(lambda a, b: a @ b)
    with pytest.raises(InputError, match=r"same reduction dim.*test_compile\.py:\d+"):
        compiled(torch.ones(3, 3), torch.ones(4, 4))
    with pytest.raises(InputError, match="unsupported operand"):
        compiled(torch.ones(3, 3), None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu() -> None:
    with pytest.raises(InputError, match="there is no cuda here"):
        tilewright.compile(chain, device="cuda")


def test_the_number_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InputError, match=r"there is no cuda:2 here. Hint: there are 2 GPUs"):
        tilewright.compile(chain, device="cuda:2")
    module = torch.nn.BatchNorm1d(3, affine=False)
    monkeypatch.setattr(Tensor, "device", torch.device("cuda:0"), raising=False)
    with pytest.raises(InputError, match="the module is not on cuda:1"):
        tilewright.compile(module, device="cuda:1")
    tilewright.compile(module, device="cuda:0")
    tilewright.compile(module, device="cuda")


# --- strict and coverage -----------------------------------------------------------


def test_strict_refuses_what_is_not_generated() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.linalg.inv(x) + 1

    x = torch.eye(3)
    close(tilewright.compile(program)(x), program(x))
    tilewright.reset()
    with pytest.raises(UnsupportedError, match="strict"):
        tilewright.compile(program, strict=True)(x)


def test_strict_admits_contractions_and_sorts() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.topk(torch.relu(x @ x), 2).values

    compiled = tilewright.compile(program, strict=True)
    x = torch.randn(4, 4)
    close(compiled(x), program(x))
    assert "aten.topk x1 (sort)" in str(compiled.coverage)


def test_without_a_compiler_everything_runs_as_library_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    x, y = torch.randn(3), torch.randn(3)
    with pytest.warns(RuntimeWarning, match="no C\\+\\+ compiler"):
        compiled = tilewright.compile(chain)
        close(compiled(x, y), chain(x, y))
    assert compiled.coverage.generated == 0 and compiled.coverage.ops == 3


# --- out= -----------------------------------------------------------------------------


def pair(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two outputs."""
    return x * 2, (x + 1).t()


@pytest.mark.parametrize("calls", [1, 2])
def test_outputs_of_the_caller(calls: int) -> None:
    compiled = tilewright.compile(pair)
    x = torch.randn(3, 4)
    for _ in range(calls - 1):
        compiled(x)
    out = (torch.empty(3, 4), torch.empty(4, 3))
    got = compiled(x, out=out)
    assert got[0] is out[0] and got[1] is out[1]  # pyright: ignore
    close(out, pair(x))


@pytest.mark.parametrize("calls", [0, 1])
def test_bad_outputs_of_the_caller(calls: int) -> None:
    compiled = tilewright.compile(chain)
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    for _ in range(calls):
        compiled(x, y)
    for out in (torch.empty(3, 5), torch.empty(3, 4, dtype=torch.float64), x, torch.empty(4).expand(3, 4)):
        with pytest.raises(InputError):
            compiled(x, y, out=out)
    with pytest.raises(InputError):
        compiled(x, y, out=(torch.empty(3, 4), torch.empty(3, 4)))
    wide = torch.empty(3, 9)
    close(compiled(x, y, out=wide[:, 2:6]), chain(x, y))


# --- exported programs -----------------------------------------------------------------


def test_exported_program() -> None:
    net = Net().eval()
    dynamic = {"x": {0: torch.export.Dim("batch", min=2, max=64)}, "flag": None}
    program = torch.export.export(net, (torch.randn(3, 4), True), dynamic_shapes=dynamic)
    compiled = tilewright.compile(program)
    for size in (3, 7, 20):
        x = torch.randn(size, 4)
        close(compiled(x, True), {k: v if v is None else v.detach() for k, v in net(x).items()})
    assert tilewright.stats().graphs == 1
    with pytest.raises(InputError):
        compiled(torch.randn(3, 5), True)
    with pytest.raises(InputError):
        compiled(torch.randn(3, 4, dtype=torch.float64), True)
    with pytest.raises(InputError):
        compiled(torch.randn(3, 4))


def test_exported_program_with_state() -> None:
    class Running(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            self.total.add_(x)
            return self.total * 2

    compiled = tilewright.compile(torch.export.export(Running(), (torch.ones(3),)))
    assert compiled(torch.ones(3))[0] == 2 and compiled(torch.ones(3))[0] == 4  # pyright: ignore


# --- failures and threads ---------------------------------------------------------------


def test_an_index_out_of_range_raises_as_eager() -> None:
    def program(table: Tensor, index: Tensor) -> Tensor:
        return table[index] * 2

    compiled = tilewright.compile(program)
    table = torch.randn(5, 3)
    close(compiled(table, torch.tensor([0, -1, 4])), program(table, torch.tensor([0, -1, 4])))
    for _ in range(2):
        with pytest.raises(IndexError):
            compiled(table, torch.tensor([0, 7]))
    close(compiled(table, torch.tensor([1, 2])), program(table, torch.tensor([1, 2])))


def test_an_integer_division_by_zero_raises_as_eager() -> None:
    def program(x: Tensor, y: Tensor) -> Tensor:
        return torch.div(x, y, rounding_mode="floor") + 1

    compiled = tilewright.compile(program)
    close(compiled(torch.tensor([7, -7]), torch.tensor([2, 2])), torch.tensor([4, -3]))
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        compiled(torch.tensor([7, -7]), torch.tensor([2, 0]))
    for divided in (lambda x: x // 0, lambda x: x % 0):
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            divided(torch.tensor([7, -7]))
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            tilewright.compile(divided)(torch.tensor([7, -7]))


def test_several_threads_may_call_one_model() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.softmax(torch.tanh(x) @ x.t(), -1) @ x

    compiled = tilewright.compile(program)
    inputs = [torch.randn(4 + k % 3, 8) for k in range(12)]
    wanted = [program(x) for x in inputs]
    for x in inputs[:3]:
        compiled(x)
    wrong: list[int] = []

    def work(k: int) -> None:
        for _ in range(20):
            got = compiled(inputs[k])
            if not torch.allclose(got, wanted[k], atol=1e-5):  # pyright: ignore
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(12)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_errors_name_their_phase() -> None:
    with pytest.raises(TilewrightError) as caught:
        tilewright.compile("missing.onnx")
    assert caught.value.phase


def test_transforms_never_meet_a_kernel() -> None:
    compiled = tilewright.compile(lambda x: torch.sin(x) * 2)
    x = torch.randn(3, 4)
    for _ in range(2):
        close(compiled(x[0]), torch.sin(x[0]) * 2)
    with pytest.raises(UnsupportedError):
        torch.func.vmap(compiled)(x)


def test_a_convolutional_net_learns_the_same() -> None:
    def net() -> torch.nn.Module:
        torch.manual_seed(3)
        return torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, padding=1),
            torch.nn.BatchNorm2d(8),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Flatten(),
            torch.nn.Linear(8 * 4 * 4, 5),
        )

    mine, theirs = net(), net()
    compiled = torch.compile(mine, backend="tilewright")
    for _ in range(3):
        x, y = torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,))
        for run, module in ((compiled, mine), (theirs, theirs)):
            module.zero_grad()
            torch.nn.functional.cross_entropy(run(x), y).backward()
            with torch.no_grad():
                for p in module.parameters():
                    assert p.grad is not None
                    p.sub_(p.grad, alpha=0.1)
    for a, b in zip(mine.state_dict().values(), theirs.state_dict().values(), strict=True):
        close(a, b)


def test_an_exported_program_keeps_its_conditions() -> None:
    class Branch(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2 if x.shape[0] > 4 else x * 3

    dynamic = {"x": {0: torch.export.Dim.DYNAMIC}}
    compiled = tilewright.compile(torch.export.export(Branch(), (torch.ones(8),), dynamic_shapes=dynamic))
    close(compiled(torch.ones(20)), torch.full((20,), 2.0))
    with pytest.raises(InputError):
        compiled(torch.ones(3))


@pytest.mark.parametrize("error", [UnsupportedError, VerifyError])
def test_a_graph_that_a_phase_refuses_runs_as_captured(
    monkeypatch: pytest.MonkeyPatch, error: type[TilewrightError]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error("not today", phase="capture")

    monkeypatch.setattr("tilewright.pipeline.compiler.from_fx", refuse)
    x, y = torch.randn(3), torch.randn(3)
    compiled = tilewright.compile(chain)
    if error is VerifyError:
        with pytest.warns(RuntimeWarning, match="not today"):
            close(compiled(x, y), chain(x, y))
    close(compiled(x, y), chain(x, y))
    assert compiled.coverage.generated == 0 and "not today" in str(compiled.coverage)
    assert tilewright.stats().fallbacks == 1
    with pytest.raises(error):
        tilewright.compile(chain, strict=True)(x, y)


def test_the_compiler_that_options_name_must_work() -> None:
    with pytest.raises(CompilerMissing):
        tilewright.compile(chain, options={"compiler": "no-such-compiler"})(torch.ones(2), torch.ones(2))


def test_many_modules_of_one_class() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self, factor: int) -> None:
            super().__init__()
            self.factor = factor

        def forward(self, x: Tensor) -> Tensor:
            return x * self.factor

    for factor in range(10):
        assert tilewright.compile(Scaled(factor), (torch.ones(5),))(torch.ones(5))[0] == factor


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda x: tilewright.compile(torch.relu, x), r"pass a tuple: \(x,\)"),
        (lambda x: tilewright.compile(torch.relu, (x,), options="fast"), "options cannot be 'fast'"),
        (lambda x: tilewright.compile(torch.relu, (x,), dims=[0]), "dims cannot be"),
        (lambda x: tilewright.compile(torch.relu, (x,), dims={0: {0: "n"}}), "inputs have names"),
        (lambda x: tilewright.compile(torch.nn.Linear, (x,)), "make an instance: Linear"),
        (lambda x: tilewright.compile(tilewright.compile(torch.relu)), "compiled already"),
        (lambda x: tilewright.compile(torch.jit.script(torch.nn.ReLU())), "scripted from"),
    ],
)
def test_wrong_use_says_what_to_do(wrong: Callable[[Tensor], object], said: str) -> None:
    with pytest.raises((InputError, UnsupportedError), match=said):
        wrong(torch.ones(3, 4))


def test_named_dims_leave_no_marks_on_tensors() -> None:
    """Or the next program compiled for the same tensor would be told to keep them free."""
    x = torch.randn(5, 4)
    x.note = "the caller's"  # type: ignore[attr-defined]
    tilewright.compile(lambda x: x * 2, dims={"x": {1: "n"}})(x)
    assert vars(x) == {"note": "the caller's"}
    close(tilewright.compile(lambda x: x + torch.arange(4))(x), x + torch.arange(4))


def test_results_of_one_call_share_a_size_from_data() -> None:
    """One result tells the size, and the others have it: no reason to run the whole graph as captured."""

    def program(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True)
        return torch.exp(values) + 1, inverse * 2, counts + 1

    compiled = tilewright.compile(program)
    for x in (torch.tensor([1.0, 2, 2, 0]), torch.tensor([3.0, 3, 3, 3])):
        close(compiled(x), program(x))
    assert compiled.kernels and "nothing determines" not in str(compiled.coverage)
