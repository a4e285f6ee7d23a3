"""Torch's ahead-of-time autograd around a compiler of ours: what Dynamo captured becomes one graph, or a forward and a
backward graph, and each is built by a function that the caller passes in."""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import inspect
import logging
import sys
import threading
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from traceback import clear_frames

import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.exc import RestartAnalysis
from torch._functorch._aot_autograd.schemas import ViewAndMutationMeta
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from tilewright.capture.aliasing.bodies import copy_what_bodies_leave
from tilewright.capture.aliasing.called import InputFacts, Relied, guard_inputs, relied_on
from tilewright.capture.aliasing.lists import write_lists_in_order
from tilewright.capture.aliasing.negated import around_negated, around_zeros, in_memory
from tilewright.capture.aliasing.overlapping import (
    refuse_overlapping_writes,
    refuse_views_of_bases,
    refused_by_torch,
)
from tilewright.capture.aliasing.regained import in_place
from tilewright.capture.aliasing.shares import saved_inputs, told_apart
from tilewright.capture.aten import decompositions, mended_ops, preserve_resampling
from tilewright.capture.fused import avoid_wrong_routines, lay_masks
from tilewright.capture.loops.leaving import overlaps
from tilewright.capture.loops.recurrent import recurrent_loops
from tilewright.capture.loops.rolled import roll_loops
from tilewright.capture.loops.saved_once import save_once
from tilewright.capture.loops.unrolled import val_of
from tilewright.capture.modes import infer_without_gradients, kept_modes
from tilewright.capture.opaque import Build, Runner, around_opaque
from tilewright.capture.placement.moved import around_host_results, move
from tilewright.capture.placement.sides import around_sides
from tilewright.errors import UnsupportedError, warn_once

from .batched import one_by_one
from .draws import keep_draws_apart
from .mended_scans import mended_scans
from .rng import dropped_by_masks, save_states_apart, without_idle_draws
from .saved import keep_compared, keep_overwritten, mark_saved, save_sources

LOG = logging.getLogger("tilewright")


@dataclass(slots=True)
class Seen:
    """One call as a recording saw it: the number of the graph that Dynamo chose, what Dynamo passed and got, and what
    one graph inside passed and got."""

    outer: list[tuple[tuple[object, ...], object]] = field(default_factory=list)
    inner: list[tuple[str, Runner, tuple[object, ...], list[object]]] = field(default_factory=list)
    effects: bool = False
    graph: int = -1


class GraphRecorder(threading.local):
    """Where this thread's calls are written down while `seen` is set. With `stop`, graphs do not run at all."""

    seen: Seen | None = None
    stop: bool = False


class Compiling(Exception):
    """Raised by a graph instead of running, under `GraphRecorder.stop`."""


@dataclass(frozen=True, slots=True)
class Builders:
    """What makes callables of graphs: `build` compiles, `plain` runs what lives on the CPU in graphs of a GPU as it was
    captured (without it, `build` gets such graphs whole), and `eager` runs a program as Dynamo captured it, for a
    reason."""

    build: Build
    plain: Build | None
    eager: Callable[[fx.GraphModule, str], Callable[..., object]]

    def whole(self) -> Build:
        """`build` for all graphs that torch makes."""
        build = self.build if self.plain is None else around_sides(self.build, self.plain)
        return around_opaque(around_negated(around_host_results(build)))


def split_joint(
    joint: fx.GraphModule,
    joint_inputs: Sequence[object],
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: list[int] | None = None,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward graphs of a joint graph: what is saved and what is computed again is the minimum cut.

    Elementwise ops that a product of the backward pass reads are computed again too: that costs a kernel, and saving
    their results would cost memory from one pass to the other (gelu, relu and dropout before each linear layer)."""
    save_once(joint)
    move(joint)
    keep_draws_apart(joint)
    dropped_by_masks(joint)
    keep_compared(joint)
    keep_overwritten(joint)
    again = torch._functorch.config.patch(ban_recompute_materialized_backward=False)
    with without_idle_draws(joint) as shown, again:
        halves = min_cut_rematerialization_partition(
            joint,
            joint_inputs,
            num_fwd_outputs=num_fwd_outputs,
            static_lifetime_input_indices=static_lifetime_input_indices,
        )
        for half in halves:
            shown(half)
    save_states_apart(*halves)
    save_sources(*halves, num_fwd_outputs)
    mark_saved(halves[0], num_fwd_outputs)
    return halves


def through_autograd(
    gm: fx.GraphModule,
    example_inputs: Sequence[object],
    builders: Builders,
    *,
    freeze: bool,
    recorder: GraphRecorder | None = None,
) -> Callable[..., object]:
    """The callable for Dynamo.

    With `freeze`, parameters and buffers of an inference graph become constants; they are compared on each call
    (identity, address and version) and a change builds the graph anew."""
    effects = not _free_of_effects()
    as_given, example_inputs = example_inputs, list(map(in_memory, example_inputs))
    loops = _prepared(gm)
    given = [*(held := _held(gm)), *example_inputs]
    build = builders.whole()
    failed: list[str] = []
    facts, saved = list[InputFacts](), list[int]()

    def compiler(kind: str) -> Callable[[fx.GraphModule, Sequence[object]], Runner]:
        def compile_one(graph: fx.GraphModule, inputs: Sequence[object]) -> Runner:
            try:
                return built(graph)
            except Exception:
                failed.append(kind)
                raise

        def built(graph: fx.GraphModule) -> Runner:
            known = _keep_saved()
            if kind != "backward" and known is not None:
                refuse_views_of_bases(known, len(given))
                facts[:] = known.input_info
                saved[:] = saved_inputs(graph)
            fixed = _frozen_inputs(graph, given) if freeze and kind == "inference" else {}
            with _disable_current_modes():  # weights are real tensors, and what is computed from them is too
                runner: Runner = FrozenGraph(graph, build, fixed) if fixed else build(graph, kind, {})
            return _boxed(
                told_apart(graph, in_place(graph, runner) if kind != "backward" else runner), kind, recorder
            )

        return compile_one

    def differentiated(graph: fx.GraphModule) -> Callable[..., object]:
        with preserve_resampling(), mended_ops(), recurrent_loops(), mended_scans(), _dense_tangents(graph):
            return aot_autograd(
                fw_compiler=compiler("forward"),
                bw_compiler=compiler("backward"),
                inference_compiler=compiler("inference"),
                partition_fn=split_joint,
                decompositions=decompositions(),
                keep_inference_input_mutations=True,
            )(graph, example_inputs)

    with refused_by_torch(gm, failed):
        compiled = differentiated(gm) if loops is gm else _or_apart(differentiated, loops, gm, failed)
    relied = _relied_on(gm, facts, saved, len(held))
    compiled = guard_inputs(compiled, relied, lambda: _eagerly(gm, builders, recorder))
    compiled = around_zeros(compiled, as_given)
    return compiled if recorder is None else _observed(compiled, recorder, effects)


def _relied_on(gm: fx.GraphModule, facts: Sequence[InputFacts], saved: Sequence[int], held: int) -> Relied:
    """What the program relies on, by facts of inputs of which the first are weights that it has `held`."""
    examples = list(map(val_of, gm.graph.find_nodes(op="placeholder")))
    return relied_on(examples, facts[held:], [k - held for k in saved if k >= held])


def _prepared(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph with loops for equal steps, both made fit to be traced."""
    refuse_overlapping_writes(gm)
    copy_what_bodies_leave(gm)
    write_lists_in_order(gm)
    avoid_wrong_routines(gm)
    lay_masks(gm)
    infer_without_gradients(gm)
    return roll_loops(gm)


def _or_apart(
    differentiated: Callable[[fx.GraphModule], Callable[..., object]], loops: fx.GraphModule, gm: fx.GraphModule,
    failed: Sequence[str],
) -> Callable[..., object]:  # fmt: skip
    """The callable for `loops`, or for the same graph without loops, `gm`, where torch cannot trace them: not where the
    compilation of a pass `failed`, which has its own ways out."""
    with kept_modes(), warnings.catch_warnings():
        # Torch traces with its detection of anomalies.
        warnings.filterwarnings("ignore", "Error detected in Scan")
        try:
            return differentiated(loops)
        except (Compiling, RestartAnalysis, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if failed:
                raise
            said = str(error).split("\n")[0]
            # What is left of a mode ends it when it is freed: here, not at any time.
            clear_frames(error.__traceback__)
    LOG.warning("equal steps stay apart: torch cannot trace their loop (%s)", said)
    return differentiated(gm)


def _dense_tangents(gm: fx.GraphModule) -> AbstractContextManager[object]:
    """Under it, the gradient of a result that overlaps with itself (windows of one row) is taken in a layout that holds
    all of it: torch expects it in the result's own strides, and copies it into them."""
    results = [n.meta.get("example_value") for n in gm.graph.find_nodes(op="output")[0].all_input_nodes]
    config = torch._functorch.config
    if any(isinstance(t, Tensor) and overlaps(t) for t in results):
        return config.patch(guess_tangent_strides_as_outputs=False)
    return nullcontext()


def _keep_saved() -> ViewAndMutationMeta | None:
    """Our backward graphs write into nothing that the forward pass saved: torch need not refuse to keep it. What torch
    knows of the program is returned."""
    context = torch._guards.TracingContext.try_get()
    if context is None or context.fw_metadata is None:
        return None
    context.fw_metadata.bw_donated_idxs = []
    return context.fw_metadata


def _eagerly(gm: fx.GraphModule, builders: Builders, recorder: GraphRecorder | None) -> Callable[..., object]:
    """The program in eager mode. Raises Compiling where no graph may run."""
    if recorder is not None and recorder.stop:
        raise Compiling
    return builders.eager(gm, "inputs that it writes lie together in memory in another way than compiled for")


def _boxed(runner: Runner, kind: str, recorder: GraphRecorder | None) -> Runner:
    if recorder is None and kind != "backward" and getattr(runner, "_boxed_call", False):
        plain: Callable[[], Runner] | None = getattr(runner, "entry", None)
        return runner if plain is None else plain()

    if kind == "backward":
        runner = one_by_one(runner)

    def run(args: list[object]) -> list[object]:
        if recorder is not None and recorder.stop:
            raise Compiling
        seen = recorder.seen if recorder is not None else None
        if kind == "backward":
            _explain_double_backward()
        if seen is None:
            return runner(args)
        given = tuple(args)
        results = runner(args)
        seen.inner.append((kind, runner, given, results))
        return results

    run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]  (torch's sign that the list may be emptied)
    return run


def _observed(
    compiled: Callable[..., object], recorder: GraphRecorder, effects: bool
) -> Callable[..., object]:
    boxed = bool(getattr(compiled, "_boxed_call", False))

    def run(*args: object) -> object:
        seen = recorder.seen
        if seen is None:
            return compiled(*args)
        given = tuple(args[0]) if boxed and args and isinstance(args[0], list) else args
        results = compiled(*args)
        seen.outer.append((given, results))
        seen.effects |= effects
        return results

    if boxed:
        run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return run


def _free_of_effects() -> bool:
    """Whether the frame that Dynamo traces now leaves every Python object that existed before as it was. (If torch has
    no way to ask: no.)"""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        tx = InstructionTranslator.current_tx()
        effects = tx.output.side_effects
        if effects.tensor_hooks or effects.save_for_backward:
            return False
        old = [
            v for v in effects.id_to_variable.values() if not type(v.mutation_type).__name__.endswith("New")
        ]
        root = tx.output.root_tx
        fresh = _fresh_local(root.f_code) if root is not None else ""
        return all(
            _is_local(v, fresh) or _writes_back(v, effects.store_attr_mutations.get(v))
            for v in old
            if effects.is_modified(v)
        )
    except (AttributeError, RuntimeError, LookupError, TypeError):
        return False


def _fresh_local(code: types.CodeType) -> str:
    """The name of the dict of a frame's keyword arguments, which each call makes anew; empty if there is none."""
    if not code.co_flags & inspect.CO_VARKEYWORDS:
        return ""
    place = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    return code.co_varnames[place]


def _is_local(variable: object, name: str) -> bool:
    return bool(name) and getattr(getattr(variable, "source", None), "local_name", None) == name


def _writes_back(variable: object, changes: Mapping[str, object] | None) -> bool:
    """Whether an attribute mutation ends with the constants that stand there now."""
    held = getattr(variable, "value", None)
    if held is None or not changes:
        return False
    missing = object()
    for name, new in changes.items():
        value = getattr(new, "value", missing)
        if value is missing or getattr(held, name, None) is not value:
            return False
    return True


# --- frozen weights ---


def _held(gm: fx.GraphModule) -> list[Tensor]:
    """The weights that a captured graph holds itself, in the order in which they become its first inputs: torch leaves
    them there while another compiler's freezing is switched on."""
    held = {
        **dict(gm.named_parameters(remove_duplicate=False)),
        **dict(gm.named_buffers(remove_duplicate=False)),
    }
    return list(held.values())


def _frozen_inputs(graph: fx.GraphModule, example_inputs: Sequence[object]) -> dict[int, Tensor]:
    """Placeholders of `graph` that are parameters or buffers which it does not write to, with their real tensors."""
    context = torch._guards.TracingContext.try_get()
    places = [n for n in graph.graph.nodes if n.op == "placeholder"]
    if context is None or context.fw_metadata is None or len(places) != len(example_inputs):
        return {}
    written = {n.args[0] for n in graph.graph.nodes if n.op == "call_function" and "copy_" in str(n.target)}
    found: dict[int, Tensor] = {}
    for i in context.fw_metadata.static_input_indices or ():
        t = example_inputs[i]
        if isinstance(t, Tensor) and not isinstance(t, FakeTensor) and places[i] not in written:
            found[i] = t
    return found


def _address_and_version(t: Tensor) -> tuple[int, int]:
    """Address and version: what changes when someone writes into a tensor or gives it other memory."""
    return t.data_ptr(), -1 if t.is_inference() else t._version


class FrozenGraph:
    """A graph whose weights are constants, for as long as they stay what they were."""

    def __init__(self, graph: fx.GraphModule, build: Build, fixed: dict[int, Tensor]) -> None:
        self.graph, self.build = graph, build
        self.names = [n.name for n in graph.graph.nodes if n.op == "placeholder"]
        self.live = tuple(i for i in range(len(self.names)) if i not in fixed)
        self.lock = threading.Lock()
        self._take(fixed)

    def _take(self, fixed: Mapping[int, Tensor]) -> None:
        with torch.no_grad():
            frozen = {self.names[i]: t.detach() for i, t in fixed.items()}
        weight_versions = tuple((i, t, *_address_and_version(t)) for i, t in fixed.items())
        self.state = weight_versions, self.build(self.graph, "inference", frozen)

    @property
    def weight_versions(self) -> tuple[tuple[Tensor, int, int], ...]:
        """Each constant weight with the address and version that it had."""
        return tuple((t, address, version) for _, t, address, version in self.state[0])

    @property
    def runner(self) -> Runner:
        """Runs the graph on the arguments numbered `live`."""
        return self.state[1]

    def __call__(self, args: list[object]) -> list[object]:
        """Run on all arguments; weights that changed are taken anew."""
        weight_versions, runner = self.state
        for i, t, address, version in weight_versions:
            now = args[i]
            assert isinstance(now, Tensor)
            if now is not t or now.data_ptr() != address or (version >= 0 and now._version != version):
                with self.lock:
                    self._take({k: a for k, *_ in weight_versions if isinstance(a := args[k], Tensor)})
                _, runner = self.state
                break
        live = [args[i] for i in self.live]
        args.clear()
        return runner(live)


# --- double backward ---


_CONSTANT = (
    "gradients of a compiled graph were taken with create_graph=True, but cannot be differentiated: backward() raises "
    "there, and torch.autograd.grad may take them for constants without a word. Take inner derivatives by "
    "torch.func.grad in the compiled function, or compile the whole loss by tilewright.compile"
)


def _explain_double_backward() -> None:
    """If this backward pass is itself differentiated later, the error then names the supported way.

    Torch keeps a node whose own backward only raises; the node stands a few frames up, and only while the graph is
    kept, so that ordinary training never looks. From the node edges lead to inputs that the forward pass saved, and to
    no others: `backward()` comes to it, but `torch.autograd.grad`, which runs what lies between a loss and the inputs
    that it is asked for, may not, and then leaves its part out. So that is said before."""
    keeps = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    if keeps is None or not keeps():
        return
    frame = sys._getframe(1)
    while frame is not None:
        for held in frame.f_locals.values():
            if type(held).__name__ == "CompiledFunctionBackwardBackward":
                forward = getattr(type(held), "_forward_cls", None)
                if forward is not None:
                    forward.backward = staticmethod(_no_double_backward)
                warn_once(_CONSTANT)
                return
        frame = frame.f_back


def _no_double_backward(*_: object) -> None:
    raise UnsupportedError(
        "a compiled graph was differentiated twice",
        phase="run",
        op="double backward",
        hint="compile the whole loss, take inner derivatives in it by torch.func.grad, and call backward() once",
    )
