"""The loop as one op of torch's: a body that runs step by step, which tracing captures as a graph of its own.

`loop_op(body, steps, going, stacked, backwards, carried, slices, outer)` calls `body(counter, *carried, *slices,
*outer)` once a step. `counter` is an int64 tensor without dims that counts from 0; `slices` hand each step its part
along dim 0 (the last part first if `backwards`). The body returns the next carried values, then `stacked` values that
are collected along a new dim 0, and in front of these, if it returns one more, a bool that says whether another step
follows. `steps` is the most steps there are (None: the condition alone ends the loop); `going` may be a bool that
forbids the first one.
"""

# What torch offers to higher-order ops it names with underscores.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch
from torch import Tensor, fx
from torch._C import DispatchKey  # pyright: ignore[reportPrivateImportUsage]
from torch._higher_order_ops.utils import (
    _maybe_run_with_interpreter,
    autograd_not_implemented,
    reenter_make_fx,
    unique_graph_id,
)
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    disable_proxy_modes_tracing,
    get_proxy_mode,
    track_tensor_tree,
)
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils import _pytree as pytree

from tilewright.errors import UnsupportedError
from tilewright.tuning.input_limits import LOOP_LIMITS

Body = Callable[..., Sequence[Tensor]]
Steps = int | None
"""A number of steps: an int, or (while torch captures) a SymInt, which torch too lets stand for an int."""


class Changing(UnsupportedError):
    """A carried value comes out of a step with another shape or type than it went in with."""


class _Loop(HigherOrderOperator):
    def __init__(self) -> None:
        super().__init__("tilewright_loop")

    def __call__(
        self, body: Body, steps: Steps, going: Tensor | None, stacked: int, backwards: bool,
        carried: Sequence[Tensor], slices: Sequence[Tensor], outer: Sequence[object],
    ) -> tuple[Tensor, ...]:  # fmt: skip
        return super().__call__(
            body, steps, going, stacked, backwards, list(carried), list(slices), list(outer)
        )


loop_op = _Loop()


_KEEPING: ContextVar[bool] = ContextVar("keeping", default=False)


@contextmanager
def keeping_loops() -> Generator[None]:
    """While active, what is traced may hold `loop_op`: a compiler of ours reads the graph."""
    before = _KEEPING.set(True)
    try:
        yield
    finally:
        _KEEPING.reset(before)


def keeps_loops() -> bool:
    """Whether what runs now becomes a graph that may hold `loop_op`."""
    return _KEEPING.get() and get_proxy_mode() is not None


# --- meaning ---


@loop_op.py_impl(DispatchKey.CompositeExplicitAutograd)
def run_eagerly(
    body: Body, steps: Steps, going: Tensor | None, stacked: int, backwards: bool, carried: Sequence[Tensor],
    slices: Sequence[Tensor], outer: Sequence[object],
) -> tuple[Tensor, ...]:  # fmt: skip
    """The meaning of the op, in plain torch."""
    state, done = list(carried), 0
    collected: list[list[Tensor]] = [[] for _ in range(stacked)]
    device = _device(carried, slices, outer)
    goes = going is None or bool(going)
    while goes and (steps is None or done < steps):
        if done >= LOOP_LIMITS.max_steps and steps is None:
            raise endless()
        place = steps - 1 - done if backwards and steps is not None else done
        parts = [x.select(0, place) for x in slices]
        made = list(body(torch.tensor(done, device=device), *state, *parts, *outer))
        if len(made) > len(state) + stacked:
            goes = bool(made.pop(0))
        state, fresh = made[: len(state)], made[len(state) :]
        for column, value in zip(collected, fresh, strict=True):
            column.append(value)
        done += 1
    if stacked and not done:
        return (*state, *_nothing(body, stacked, carried, slices, outer))
    stacks = [torch.stack(c[::-1] if backwards else c) for c in collected]
    return (*[x.clone() if x is first else x for x, first in zip(state, carried, strict=True)], *stacks)


def endless() -> UnsupportedError:
    """The error for a loop without a trip count whose condition does not end it."""
    return UnsupportedError(
        f"a loop does not end within {LOOP_LIMITS.max_steps} steps", phase="run", op="loop"
    )


def _nothing(
    body: Body, stacked: int, carried: Sequence[Tensor], slices: Sequence[Tensor], outer: Sequence[object]
) -> list[Tensor]:
    """What is collected where there is no step: shapes and types of a step that only pretends to run."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = pytree.tree_map_only(
            Tensor, mode.from_tensor, (list(carried), [_part(x) for x in slices], list(outer))
        )
        made = list(body(torch.tensor(0), *fakes[0], *fakes[1], *fakes[2]))[-stacked:]
        shapes = [((0, *x.shape), x.dtype) for x in made]
    device = _device(carried, slices, outer)
    return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes]


def _device(*groups: Sequence[object]) -> torch.device:
    return next((x.device for group in groups for x in group if isinstance(x, Tensor)), torch.device("cpu"))


def _part(x: Tensor) -> Tensor:
    """What one step gets of `x`, with any elements."""
    return x.new_empty(x.shape[1:])


# --- while torch looks at shapes, or captures ---


def _outputs(
    made: Sequence[Tensor], steps: Steps, stacked: int, carried: Sequence[Tensor], mode: FakeTensorMode | None
) -> tuple[Tensor, ...]:
    """Fake results of the op for fake results of a step. Raises Changing."""
    conditional = len(made) - len(carried) - stacked
    if conditional not in (0, 1) or (steps is None and not conditional):
        raise UnsupportedError("the results of a loop's body do not fit the loop", phase="capture", op="loop")
    state, fresh = made[conditional : conditional + len(carried)], made[conditional + len(carried) :]
    for before, after in zip(carried, state, strict=True):
        same = (
            before.dtype == after.dtype
            and before.dim() == after.dim()
            and all(statically_known_true(a == b) for a, b in zip(before.shape, after.shape, strict=True))
        )
        if not same:
            raise Changing(
                f"a carried value of {before.dtype}{list(before.shape)} becomes {after.dtype}{list(after.shape)}",
                phase="capture", op="loop",
            )  # fmt: skip
    length = steps
    if conditional and stacked:
        env = mode.shape_env if mode is not None else None
        if env is None:
            raise UnsupportedError("a number of steps that depends on data", phase="capture", op="loop")
        length = env.create_unbacked_symint()
        torch._check(length >= 0)
    results = [x.new_empty(x.shape) for x in carried]
    if length is not None:
        results += [x.new_empty((length, *x.shape)) for x in fresh]
    return tuple(results)


def _counter(carried: Sequence[Tensor], slices: Sequence[Tensor], outer: Sequence[object]) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=_device(carried, slices, outer))


@loop_op.py_impl(FakeTensorMode)
def _fake(
    mode: FakeTensorMode, body: Body, steps: Steps, going: Tensor | None, stacked: int, backwards: bool,
    carried: Sequence[Tensor], slices: Sequence[Tensor], outer: Sequence[object],
) -> tuple[Tensor, ...]:  # fmt: skip
    del going, backwards
    with mode:
        made = body(_counter(carried, slices, outer), *carried, *[_part(x) for x in slices], *outer)
        return _outputs(made, steps, stacked, carried, mode)


@loop_op.py_impl(ProxyTorchDispatchMode)
def _traced(
    mode: ProxyTorchDispatchMode, body: Body, steps: Steps, going: Tensor | None, stacked: int, backwards: bool,
    carried: Sequence[Tensor], slices: Sequence[Tensor], outer: Sequence[object],
) -> tuple[Tensor, ...]:  # fmt: skip
    with disable_proxy_modes_tracing():
        faked = next((x.fake_mode for x in (*carried, *slices, *outer) if isinstance(x, FakeTensor)), None)
        entered: AbstractContextManager[object] = faked if faked is not None else nullcontext()
        with entered:
            counter = _counter(carried, slices, outer)
            state = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in carried]
            parts = [_part(x) for x in slices]
        graph = reenter_make_fx(body)(counter, *state, *parts, *outer)
        returned = next(n for n in graph.graph.nodes if n.op == "output").args[0]
        if not isinstance(returned, (list, tuple)) or not all(isinstance(n, fx.Node) for n in returned):
            raise UnsupportedError("a loop's body that returns no tensors", phase="capture", op="loop")
        with entered:
            results = _outputs([n.meta["val"] for n in returned], steps, stacked, carried, faked)
    _, name = unique_graph_id(mode, prefix="loop_body")
    mode.tracer.root.register_module(name, graph)
    given = (graph, steps, going, stacked, backwards, list(carried), list(slices), list(outer))
    proxies = pytree.tree_map(mode.tracer.unwrap_proxy, given)
    proxy = mode.tracer.create_proxy("call_function", loop_op, proxies, {}, name="loop")
    return track_tensor_tree(results, proxy, constant=None, tracer=mode.tracer)


@loop_op.py_functionalize_impl
def _functionalized(
    ctx: object, body: Body, steps: Steps, going: Tensor | None, stacked: int, backwards: bool,
    carried: Sequence[Tensor], slices: Sequence[Tensor], outer: Sequence[object],
) -> object:  # fmt: skip
    plain = ctx.unwrap_tensors((going, list(carried), list(slices), list(outer)))
    first, state, parts, rest = plain
    with ctx.redispatch_to_next():
        functional = ctx.functionalize(_maybe_run_with_interpreter(body))
        return ctx.wrap_tensors(loop_op(functional, steps, first, stacked, backwards, state, parts, rest))


loop_op.py_autograd_impl(autograd_not_implemented(loop_op, deferred_error=True))
