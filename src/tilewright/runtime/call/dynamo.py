"""Modules and functions: captured by Dynamo as one graph, called through it or, once a call is known, directly."""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import copy
import inspect
import logging
import re
import threading
import types
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.fx.experimental import _config as shapes_config
from torch.utils import _pytree as pytree

from tilewright.capture.autograd.joint import Compiling, FrozenGraph, GraphRecorder, Seen
from tilewright.capture.described import Signature
from tilewright.capture.loops.recurrent import LENGTHS_IN_FILES, counts_steps
from tilewright.capture.opaque import Runner
from tilewright.capture.signature import signature_of_call
from tilewright.errors import (
    FixedSize,
    InputError,
    RecompileWarning,
    SeveralGraphs,
    TilewrightError,
    UnsupportedError,
    warn,
)
from tilewright.options import Options
from tilewright.plan.coverage import Coverage
from tilewright.runtime.plan.arguments import deliver
from tilewright.runtime.plan.executable import Executable
from tilewright.tuning.input_limits import GRAPHS

from .around.frame import frame_of
from .around.guards import GuardLog
from .around.reached import global_hooks
from .around.reads import Reads
from .around.surroundings import Surroundings
from .asked import asking
from .dynamic_dims import Dim, Example, Naming, by_name, example_of, mark_dynamic
from .fast_path import Direct, direct_of, without_scalars
from .reports import Reports, ReportsOfParts
from .resized import sizes_changed, told


class Sessions(Reports, Protocol):
    """What the entry point hands down: a backend for Dynamo, and what it has compiled."""

    recorder: GraphRecorder | None
    options: Options

    def fresh(self) -> Sessions:
        """Another one of the same options."""
        ...

    def backend(self, gm: fx.GraphModule, example_inputs: Sequence[object]) -> Callable[..., object]:
        """Compile a captured graph."""
        ...

    @property
    def coverage(self) -> Coverage | None:
        """Of everything compiled."""
        ...


class _Signatures:
    """A backend that writes down what each graph takes and gives, what torch guards for it and when it runs, and says
    where other sizes made another one."""

    def __init__(
        self, session: Sessions, title: str, parameters: tuple[str, ...], named: Sequence[Dim]
    ) -> None:
        self._session = session
        self._named = named
        self._title = title
        self._parameters = parameters
        self.found: list[Signature] = []
        self.guards = GuardLog()

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[object]) -> Callable[..., object]:
        made = signature_of_call(gm, self._parameters)
        changes = sizes_changed(self.found, made, self._named)
        self.found.append(made)
        if changes:
            warn(told(self._title, changes, self._named), RecompileWarning)
        number = len(self.found) - 1
        self.guards.compiled(number)
        return self._numbered(self._session.backend(gm, example_inputs), number)

    def _numbered(self, run: Callable[..., object], number: int) -> Callable[..., object]:
        """The graph, which tells a recording its number."""
        recorder = self._session.recorder

        def graph(*args: object) -> object:
            if recorder is not None and recorder.seen is not None:
                recorder.seen.graph = number
            return run(*args)

        if getattr(run, "_boxed_call", False):
            graph._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]  (torch's sign of lists as arguments)
        return graph


def _parameters(target: Callable[..., object]) -> tuple[str, ...]:
    try:
        call = target.forward if isinstance(target, torch.nn.Module) else target
        return tuple(inspect.signature(call).parameters)
    except (TypeError, ValueError):  # builtins tell no names
        return ()


class TracedWay(ReportsOfParts):
    """`target` through Dynamo with `fullgraph`."""

    def __init__(
        self, target: Callable[..., object], session: Sessions, naming: Naming, *, oblivious: bool = False
    ) -> None:
        self.target = target
        self.session = session
        self.naming = naming
        self.oblivious = oblivious
        self.device: torch.device | None = None
        self.recorder = session.recorder = GraphRecorder()
        self._watched = _Signatures(session, self.title, _parameters(target), naming.dims)
        self._entered = _own_code_around(target)
        self._compiled = _on_its_own_account(self._entered or target, self._watched)
        self._seen_sizes: defaultdict[object, Any] = defaultdict(torch._dynamo.pgo.CodeState)
        self._around: Surroundings | None = None
        self._serves = False  # calls of some sizes, at least
        self._direct: dict[int, tuple[Executable, Executable | None]] = {}
        self.examples: list[Example] = []
        """The forms of calls that something was compiled for, oldest first."""

    @property
    def coverage(self) -> Coverage | None:
        """Of everything compiled so far."""
        return self.session.coverage

    @property
    def done(self) -> Coverage | None:
        """Of everything compiled so far."""
        return self.session.coverage

    @property
    def source(self) -> Callable[..., object]:
        """The target: a program around it is traced through it."""
        return self.target

    @property
    def title(self) -> str:
        """What is compiled."""
        return getattr(self.target, "__name__", type(self.target).__name__)

    @property
    def signature(self) -> Signature | None:
        """Of the graph compiled last."""
        if not self._watched.found:
            return None
        names = {(d.input, d.place): d for d in self.naming.dims}
        found = self._watched.found[-1]
        ranks = {t.name: len(t.shape or ()) for t in found.inputs}

        def name_of(name: str, dim: int) -> str | None:
            d = names.get((name, dim)) or names.get((name, dim - ranks.get(name, 0)))
            return d and d.name

        return found.named(name_of)

    def reporting(self) -> tuple[Reports]:
        """The session, which compiled it all."""
        return (self.session,)

    def unchanged(self) -> bool:
        """Whether parameters, plain attributes, closure and globals are the same objects as before."""
        return self._around is not None and self._around.unchanged()

    def copied(self, memo: dict[int, object]) -> TracedWay:
        """The same for a deep copy of the target, with nothing compiled yet."""
        target = copy.deepcopy(self.target, memo)
        return TracedWay(target, self.session.fresh(), self.naming, oblivious=self.oblivious)

    def prepare(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Compile without running: the graph's first call is stopped before it runs."""
        self.recorder.stop = True
        try:
            with asking(runs=False):
                self._call(args, kwargs)
        except Compiling:
            pass
        finally:
            self.recorder.stop = False

    def __call__(
        self, args: tuple[object, ...], kwargs: dict[str, object], out: Sequence[Tensor] | None
    ) -> tuple[object, Direct | None]:
        """The result, and the short way if every tensor's way is plain to see."""
        seen = self.recorder.seen = Seen()
        try:
            with asking(runs=True):
                result = self._call(args, kwargs)
        finally:
            self.recorder.seen = None
        short = self._short(seen, args, kwargs, result)
        if out is not None:
            result = deliver(
                result, out, [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            )
        return result, short

    def _call(self, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        _refuse_modes()
        if not torch._C._is_tracing():  # else sizes are tensors, and torch will refuse the call
            example = example_of(args, kwargs)
            if len(self.examples) < GRAPHS.max_short_ways and not any(map(example.is_like, self.examples)):
                self.examples.append(example)
        oblivious = self.oblivious and not _has_empty(args, kwargs)
        try:
            result = self._traced(args, kwargs, oblivious=oblivious)
        except FixedSize:
            if not (self._serves or oblivious):
                raise
            # At these sizes another one is 1, say, which broadcasts: a graph of their own serves them.
            result = self._traced(args, kwargs, free=False)
        except Compiling:
            self._serves = True
            raise
        self._serves = True
        return result

    def _traced(
        self,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        *,
        oblivious: bool = False,
        free: bool = True,
    ) -> object:
        """The result. Unless dims are to be `free`, torch may fix the size of any. Raises FixedSize where it fixes one
        that is free, or cannot trace the program for what it takes no size for."""
        places = list(self.naming.place_of(by_name(self.target, args, kwargs)))
        marked = mark_dynamic(places if free else (), oblivious)
        with self._settings(oblivious), marked, _without_torchs_stacks():
            try:
                return self._compiled(*args, **kwargs)
            except torch._dynamo.exc.BackendCompilerFailed as error:
                if isinstance(error.inner_exception, TilewrightError):
                    raise error.inner_exception from error
                raise
            except torch._dynamo.exc.Unsupported as error:
                raised = _observed(str(error))
                why = f"it raises {raised}" if raised else str(error).splitlines()[0]
                refused = SeveralGraphs(
                    f"the program is no single graph: {why}", phase="capture", place=_user_place(str(error)),
                    hint="torch.compile(..., backend='tilewright') allows graph breaks",
                )  # fmt: skip
                if not raised or self.recorder.stop:
                    raise refused from error
            except torch._dynamo.exc.UserError as error:
                raise UnsupportedError(
                    f"torch cannot capture the program: {str(error).splitlines()[0]}", phase="capture",
                    place=_user_place(str(error)),
                    hint="torch.compile(..., backend='tilewright') allows graph breaks",
                ) from error  # fmt: skip
            except torch._dynamo.exc.TorchRuntimeError as error:
                raise (FixedSize if oblivious else InputError)(
                    f"the program does not fit these inputs: {_torchs_reason(error)}", phase="capture",
                    place=_user_place(str(error)), hint="call it without compiling to see torch's own error",
                ) from error  # fmt: skip
            except torch.fx.experimental.symbolic_shapes.ConstraintViolationError as error:
                raise FixedSize(
                    f"a dim that `dims` names is fixed by the program: {_first_reason(error)}", phase="capture",
                    hint=LENGTHS_IN_FILES if counts_steps(self.target) else "leave it out of `dims`",
                ) from error  # fmt: skip
            except RuntimeError as error:
                if not str(error).startswith(_NOT_TRACED):
                    raise
                raise UnsupportedError(
                    "torch has marked this program's code as not to be compiled", phase="capture",
                    hint="tilewright.reset() makes torch forget that, and what else it has compiled",
                ) from error  # fmt: skip
        self.target(
            *args, **kwargs
        )  # raises what the program raises for such arguments, as it does by itself
        raise refused

    @contextmanager
    def _settings(self, oblivious: bool) -> Generator[None]:
        with ExitStack() as stack:
            if getattr(torch._dynamo.config, "trace_autograd_ops", None) is not None:
                stack.enter_context(torch._dynamo.config.patch(trace_autograd_ops=True))
            limits = {
                "recompile_limit": GRAPHS.max_per_code_object,
                "accumulated_recompile_limit": GRAPHS.max_per_code_object,
            }
            stack.enter_context(torch._dynamo.config.patch(limits))
            # recurrent layers are loops, or calls; by itself torch leaves a graph at them
            asked = {"skip_nnmodule_hook_guards": False, "allow_rnn": True}
            stack.enter_context(torch._dynamo.config.patch(asked))
            stack.enter_context(_sizes_remembered_in(self._seen_sizes))
            if self.naming:
                stack.enter_context(shapes_config.patch(use_duck_shape=False))
            if oblivious:
                stack.enter_context(shapes_config.patch(backed_size_oblivious=True))
            yield

    def _short(
        self, seen: Seen, args: tuple[object, ...], kwargs: dict[str, object], result: object
    ) -> Direct | None:
        """One graph, called once, for inference, whose tensors reach the caller untouched."""
        graph = _single(seen)
        if graph is None or self._entered is None and _has_hooks(self.target):
            return None
        runner, given, made = graph
        inner = runner.runner if isinstance(runner, FrozenGraph) else runner
        if not isinstance(inner, Executable):  # pyright: ignore[reportUnnecessaryIsInstance]
            return None
        if id(inner) not in self._direct:
            self._direct[id(inner)] = (inner, without_scalars(inner))
        executable = self._direct[id(inner)][1]
        if executable is None:
            return None
        # Last of all: it looks at all that the program has read, which takes longer than many a call.
        reads = self._watched.guards.reads(seen.graph, frame_of(self.target, self._entered, args, kwargs))
        around = None if reads is None else self._surroundings(reads)
        if around is None or any(t.requires_grad for t in around.tensors) and torch.is_grad_enabled():
            return None
        if isinstance(runner, FrozenGraph):
            around.watch(runner.weight_versions)
            given = [given[i] for i in runner.live]
        short = direct_of(executable, given, made, (*args, *kwargs.values()), result, around)
        if short is not None:
            self._around = around
        return short

    def _surroundings(self, reads: Reads) -> Surroundings | None:
        """What must stay as it is for this call and those before it that are known; None where that cannot be told."""
        before = self._around if self._around is not None and self._around.unchanged() else None
        if before is not None:
            if reads.within(before.reads):
                return before
            reads.add(before.reads)
        around = Surroundings(self.target, reads)
        if before is not None:
            around.watch(before.versions.values())
        return around if around.known else None


def _has_empty(args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    """Whether some size is 0. Torch takes the sizes that it leaves free for positive, so that it loses the guard of one
    that a trace fixes at 0: what such a call compiles would serve other sizes too. So it is for this size alone."""
    return any(isinstance(x, Tensor) and 0 in x.shape for x in pytree.tree_leaves((args, kwargs)))


def _single(seen: Seen) -> tuple[Runner, Sequence[object], Sequence[object]] | None:
    """The one graph that ran, for inference, and what it got and made, if nothing came between it and Dynamo."""
    if len(seen.outer) != 1 or len(seen.inner) != 1 or seen.effects:
        return None
    ((given, made),) = seen.outer
    ((kind, runner, inner_given, inner_made),) = seen.inner
    if kind != "inference" or not isinstance(made, (list, tuple)):
        return None
    if len(given) != len(inner_given) or any(a is not b for a, b in zip(given, inner_given, strict=True)):
        return None
    if len(made) != len(inner_made) or any(a is not b for a, b in zip(made, inner_made, strict=True)):
        return None
    return runner, inner_given, inner_made


def _has_hooks(target: Callable[..., object]) -> bool:
    """Whether torch runs hooks around the function that Dynamo enters: nobody knows what these do."""
    own = (target._forward_hooks, target._forward_pre_hooks) if isinstance(target, torch.nn.Module) else ()
    return any((*own, *global_hooks())) if own else False


@contextmanager
def _without_torchs_stacks() -> Generator[None]:
    """Torch logs a stack for sizes that it cannot leave free, and then raises what becomes an error of ours."""
    log, stands = logging.getLogger("torch._guards"), lambda record: record.levelno != logging.ERROR
    log.addFilter(stands)
    try:
        yield
    finally:
        log.removeFilter(stands)


_NOT_TRACED = "torch.compile with fullgraph=True found no compiled frames"


def _refuse_modes() -> None:
    """Raise UnsupportedError under a mode that wants to see each op: torch would compile nothing, now or later."""
    for place in range(torch._C._len_torch_dispatch_stack()):
        mode = torch._C._get_dispatch_stack_at(place)
        unseen = getattr(mode, "ignore_compile_internals", None)  # of torch 2.13 on
        if not mode.is_infra_mode() and not (unseen is not None and unseen()):
            raise UnsupportedError(
                f"a {type(mode).__name__} is active, which wants to see each op", phase="capture",
                hint="call what you compiled under it, not what became of it",
            )  # fmt: skip


_ISOLATES = "isolate_recompiles" in inspect.signature(torch.compile).parameters


def _own_code_around(target: Callable[..., object]) -> types.FunctionType | None:
    """What torch is given in place of `target`, where that is not `target` itself.

    Targets may share their code (modules of one class), and torch gives up on code that was compiled too often: what is
    compiled here must not count for what the user compiles, nor the other way round. Newer torches keep accounts apart.

    What has no code of the user's (torch's own modules), torch enters through one function for all of them. Once it
    met that function under a mode or transform, it compiles none of them any more: so we bring another one."""
    return None if _ISOLATES and _is_users(target) else _with_own_code(target)


def _on_its_own_account(target: Callable[..., object], backend: _Signatures) -> Callable[..., object]:
    """`target` through Dynamo, on an account of its own."""
    apart: dict[str, Any] = {"isolate_recompiles": True} if _ISOLATES else {}
    return torch.compile(target, backend=backend, fullgraph=True, **apart)


def _is_users(target: Callable[..., object]) -> bool:
    """Whether torch enters a function of the user's to run `target`."""
    runs = target.forward if isinstance(target, torch.nn.Module) else target
    return isinstance(runs, (types.FunctionType, types.MethodType)) and not torch._dynamo.trace_rules.check(
        runs
    )


def _with_own_code(target: Callable[..., object]) -> types.FunctionType:
    """A function that calls `target`, whose code object, by which torch counts, is nobody else's."""

    def call(*args: object, **kwargs: object) -> object:
        return target(*args, **kwargs)

    assert isinstance(call, types.FunctionType)
    call.__code__ = call.__code__.replace()
    return call


@contextmanager
def _sizes_remembered_in(seen: defaultdict[object, Any]) -> Generator[None]:
    """Inside, torch remembers the sizes that it met in `seen`. By itself it knows code by its place in a file alone:
    a size that another model of the same class had otherwise would become dynamic.

    Torch has one such memory for all threads. Its own is put back when the last call has ended, however calls of
    several threads overlap; each of these may then remember sizes of another one, which costs a graph, no result."""
    no_files = {"automatic_dynamic_local_pgo": False, "automatic_dynamic_remote_pgo": False}
    with torch._dynamo.config.patch(no_files):
        pgo = torch._dynamo.pgo
        with _SIZES_LOCK:
            _SIZES.append(pgo._CODE_STATE)
            pgo._CODE_STATE = seen
        try:
            yield
        finally:
            with _SIZES_LOCK:
                pgo._CODE_STATE = _SIZES.pop()


_SIZES_LOCK = threading.Lock()
_SIZES: list[Any] = []
"""What torch remembered of sizes before each call that is under way, the first one's at the bottom."""


def _user_place(text: str) -> str:
    """The innermost line of the user's code that Dynamo's message names."""
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith('File "')]
    file, _, rest = lines[-1].removeprefix('File "').partition('", line ') if lines else ("", "", "")
    return f"{file}:{rest.partition(',')[0]}" if file else ""


def _observed(text: str) -> str:
    """The type of the program's own exception that ends its trace; empty if that is not what Dynamo's message says."""
    found = re.search(r"raised exception (\w+)", text) if text.startswith("Observed exception") else None
    return found[1] if found else ""


def _torchs_reason(error: Exception) -> str:
    """What an op said when Dynamo tried it: its message stands in Dynamo's as `got RuntimeError('...')`."""
    found = re.search(r"got \w+\((['\"])(.*)\1\)", str(error))
    return found[2] if found else str(error).splitlines()[0]


def _first_reason(error: Exception) -> str:
    lines = [line.strip(" -") for line in str(error).splitlines() if line.strip().startswith("-")]
    line = lines[0] if lines else str(error).splitlines()[0]
    return line.partition(" If you're using ")[0].rstrip(
        "."
    )  # what torch advises is of calls that were not made here
