"""Model files as compiled models: which graph serves a call, and what its dynamic sizes are."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, fx

from tilewright.artifact.text.program import Interface
from tilewright.capture.described import Signature
from tilewright.capture.exported import Exported
from tilewright.capture.harmless.ops import unknown_calls, with_growing_offsets, without_found_memory
from tilewright.capture.onnx import (
    Flat,
    FlatSplit,
    Nesting,
    OnnxModule,
    Split,
    bind_inputs,
    flatten_inputs,
    split,
    typical_shapes,
)
from tilewright.capture.onnx.refuse import FITS, is_refusal, op_of
from tilewright.capture.trace import fits, hints, trace
from tilewright.errors import InputError, ModelError, TilewrightError, UnsupportedError
from tilewright.keep.captures import CapturedWay, FileBytes, KeptCaptures
from tilewright.options import Options
from tilewright.pipeline.compiler import Compiled, compile_fx
from tilewright.pipeline.trace import Trace
from tilewright.plan.coverage import Coverage, total
from tilewright.runtime.call.asked import asking
from tilewright.runtime.call.dynamic_dims import Naming
from tilewright.runtime.call.exported import ProgramWay
from tilewright.runtime.call.fallback import EagerRegion
from tilewright.runtime.call.fast_path import Short
from tilewright.runtime.call.graph_breaks import Pieces
from tilewright.runtime.own.ahead import built_ahead
from tilewright.runtime.plan.steps import CALLED
from tilewright.tuning.input_limits import MODELS

LOG = logging.getLogger("tilewright")


_RAISED = (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError, MemoryError)
"""What ops raise of their arguments."""

AnyWay = ProgramWay | CapturedWay | Pieces | EagerRegion
"""What runs calls of some sizes."""

Cut = Callable[[], Split | FlatSplit]
"""Gives a model in segments."""


def program_way(program: Exported, options: Options) -> ProgramWay:
    """Compile an exported or traced program."""

    def build(gm: fx.GraphModule, frozen: Mapping[str, Tensor]) -> Compiled:
        return compile_fx(gm, options, frozen=frozen, program=program)

    return ProgramWay(program, build, freeze=options.freeze is not False)


def _file_way(program: Exported, options: Options) -> ProgramWay:
    """The same of a file that nobody vouches for. Raises ModelError where an op of it may reach memory that is not its
    own: none of those that the importer makes does."""
    for name in unknown_calls(program.gm):
        raise ModelError("this model may read or write memory that is not its own", phase="input", op=name)
    without_found_memory(program.gm)
    with_growing_offsets(program.gm)
    return program_way(program, options)


class FileGraphs:
    """The graphs of one model of flat tensors. `dims` names the dims of each that may change: dims of one name are
    taken as equal while they are, and a call where they differ gets a graph in which each has its own symbol."""

    def __init__(
        self,
        module: torch.nn.Module,
        dims: Sequence[Mapping[int, str]],
        nodes: Sequence[str],
        cut: Cut | None,
        options: Options,
        kept: KeptCaptures | None = None,
    ) -> None:
        """`nodes` are its nodes, by name. `cut` gives it in segments, where control flow in it depends on data. `kept`
        are graphs that were captured before."""
        self.ways: list[AnyWay] = []
        self._kept = kept
        self._module = module
        self._dims = dims
        self._nodes = nodes
        self._cut = cut
        self._options = options
        self.last: ProgramWay | CapturedWay | None = None
        """The graph compiled last."""

    def chosen(self, inputs: Sequence[Tensor]) -> AnyWay:
        """The graph for inputs like these. Raises what the model, or the phase that refuses it, says."""
        sizes: dict[str, int] = {}
        equal = True
        for entry, t in zip(self._dims, inputs, strict=True):
            for place, dim in entry.items():
                equal &= sizes.setdefault(dim, t.shape[place]) == t.shape[place]
        for way in self.ways:
            if way.admits(inputs):
                return way
        if len(self._nodes) > MODELS.max_file_nodes:
            return self._eager()
        known = self._kept.get(inputs) if self._kept is not None else None
        if known is not None and known.admits(inputs):
            self.last = known
            self.ways.append(known)
            return known
        return self._traced(inputs, equal)

    def _eager(self) -> EagerRegion:
        """The whole model as a library region. Raises UnsupportedError under `strict`."""
        why = f"more than {MODELS.max_file_nodes} nodes"
        if self._options.strict:
            raise UnsupportedError(
                f"the model has {len(self._nodes)} nodes",
                phase="capture",
                hint="cut it, or compile without strict",
            )
        LOG.warning("runs eagerly: %s", why)
        made = EagerRegion(self._module, [op_of(n) for n in self._nodes], why)
        self.ways.append(made)
        return made

    def _traced(self, inputs: Sequence[Tensor], equal: bool) -> AnyWay:
        """A new graph: with every declared dim free and sizes 0 and 1 among them, else without these, else with dims of
        size 0 and 1 fixed."""
        wanted = self._dims
        fixed = [{k: d for k, d in e.items() if t.shape[k] > 1} for e, t in zip(wanted, inputs, strict=True)]
        refused: TilewrightError | None = None
        unfit: list[ProgramWay] = []
        free = hints(inputs, wanted)
        for dims, examples, oblivious in (
            (wanted, free, True),
            (wanted, free, False),
            (fixed, list(inputs), False),
        ):
            groups: dict[str, list[tuple[int, int]]] = {}
            for i, entry in enumerate(dims):
                for place, dim in entry.items():
                    groups.setdefault(dim, []).append((i, place))
            same = [g for g in groups.values() if len(g) > 1] if equal else []
            try:
                with built_ahead((*self._module.buffers(), *self._module.parameters()), self._options):
                    program = trace(
                        self._module, examples, [list(e) for e in dims], same, oblivious=oblivious
                    )
            except (UnsupportedError, ModelError) as error:
                refused = refused or error
                continue
            if not fits(program, inputs):
                continue
            made = self.last = _file_way(program, self._options)
            if made.admits(inputs):
                self.ways.append(made)
                self._keep(inputs, made)
                return made
            unfit.append(made)
        if self._cut is not None and not self._options.strict:
            pieces = Pieces(self._cut(), lambda program: _file_way(program, self._options))
            pieces.run(inputs, None)  # what lies between is compiled for what really comes there
            self.ways.append(pieces)
            return pieces
        if unfit:
            return unfit[0]  # it says why when it runs
        raise refused or InputError("the model does not fit these inputs", phase="input")

    def _keep(self, inputs: Sequence[Tensor], made: ProgramWay) -> None:
        """Let other processes have what was captured."""
        if self._kept is not None and isinstance(made.built, Compiled):
            names, outputs = self._kept.inputs, self._kept.outputs
            interface = Interface(made.call.form, names, made.described(names, outputs), made.conditions)
            self._kept.put(inputs, interface, made.built)


def _declared_name(name: str | None) -> str | None:
    """The name of a dim, if a person gave it one."""
    return None if name is None or name.startswith("?") else name


class FileWay:
    """A model file. Its declared dynamic dims (or those of `naming`) are symbols, and so is every dim of a tensor in a
    sequence or an optional."""

    def __init__(
        self,
        module: OnnxModule,
        options: Options,
        naming: Naming,
        device: torch.device | None = None,
        place: str = "",
        file: FileBytes | None = None,
    ) -> None:
        """`module` is on `device` (None: the CPU), and numpy arrays are brought there. `place` is the file; `file` what
        was in it, if all of the model was."""
        self._bytes = file if device is None else None
        self.module = module
        self.place = place
        self.source = None
        self.title = os.path.basename(place) or "a model"
        self.device = device
        self.options = options
        self.naming = naming
        self._kinds: list[tuple[Nesting | None, FileGraphs]] = []
        self._nests = any(s.dtype is None for s in module.input_specs)
        self._lock = threading.Lock()
        self.names = tuple(s.name for s in module.input_specs)
        self._dims = self._dynamic()

    def _dynamic(self) -> dict[str, dict[int, str]]:
        """Names of the dynamic dims by input and place; unnamed ones get a name of their own."""
        given: dict[str, dict[int, str]] = {}
        for d in self.naming.dims:
            given.setdefault(d.input, {})[d.place] = d.name
        found: dict[str, dict[int, str]] = {}
        for spec in self.module.input_specs:
            declared = enumerate(spec.dims or ())
            own = {k: n or f"?{spec.name}.{k}" for k, n in declared if not isinstance(n, int)}
            found[spec.name] = own | given.get(spec.name, {})
        return found

    @property
    def signature(self) -> Signature | None:
        """Of the graph compiled last, with the file's names; None where the model is not one graph. Compiles for
        typical sizes if there is none."""
        if not any(graphs.last for _, graphs in self._kinds):
            self._typical()
        last = next((g.last for _, g in reversed(self._kinds) if g.last is not None), None)
        if last is None:
            return None
        found = last.described(() if self._nests else self.names, self.module.output_names)
        return found.named(lambda name, dim: _declared_name(self._dims.get(name, {}).get(dim)))

    @property
    def done(self) -> Coverage | None:
        """Of the graphs compiled so far; compiles nothing."""
        return total([w.coverage for w in self._ways()])

    @property
    def coverage(self) -> Coverage | None:
        """Of the graphs compiled so far; compiles for typical sizes if there is none."""
        self._typical()
        return total([w.coverage for w in self._ways()])

    @property
    def kernels(self) -> tuple[object, ...]:
        """Of the graphs compiled so far; compiles for typical sizes if there is none."""
        self._typical()
        return tuple(k for w in self._ways() for k in w.kernels)

    @property
    def calls(self) -> tuple[object, ...]:
        """What runs besides kernels; compiles for typical sizes if there is no graph yet."""
        self._typical()
        return tuple(k for w in self._ways() for k in w.calls)

    @property
    def cuda_graphs(self) -> tuple[str, ...]:
        """One line for each graph on a GPU under `cuda_graphs`."""
        return tuple(line for w in self._ways() for line in w.cuda_graphs)

    @property
    def trace(self) -> object:
        """Of the graph compiled last; compiles for typical sizes if there is none."""
        self._typical()
        return self._ways()[-1].trace or Trace()

    @property
    def compilations(self) -> tuple[object, ...]:
        """Of each graph compiled so far."""
        return tuple(c for w in self._ways() for c in w.compilations)

    def _ways(self) -> list[AnyWay]:
        return [w for _, graphs in self._kinds for w in graphs.ways]

    def program_ways(self) -> list[ProgramWay | CapturedWay]:
        """The graphs compiled so far, for typical sizes if there is none. Raises UnsupportedError where the model is
        not made of whole graphs of tensors."""
        self._typical()
        found = [w for w in self._ways() if isinstance(w, (ProgramWay, CapturedWay))]
        if self._nests or len(found) < len(self._ways()):
            what = "inputs that are sequences" if self._nests else "control flow that depends on data"
            raise UnsupportedError(
                f"a model with {what} cannot be kept in an artifact yet", phase="save", place=self.place,
                hint="compile the file where it runs (warm caches make that quick)",
            )  # fmt: skip
        return found

    def unchanged(self) -> bool:
        """A file's weights are its own."""
        return True

    def copied(self, memo: dict[int, object]) -> FileWay:
        """Itself: nothing can change a file's weights."""
        return self

    def prepare(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Compile for inputs like these."""
        with asking(runs=False):
            self._chosen(self._bound(args, kwargs))

    def __call__(
        self, args: tuple[object, ...], kwargs: dict[str, object], out: Sequence[Tensor] | None
    ) -> tuple[object, Short | None]:
        """The outputs, a tensor or a tuple of several, and a short way for calls with tensors like these."""
        with asking(runs=True):
            way, tensors = self._chosen(self._bound(args, kwargs))
        try:
            result = way.run(tensors, out)
        except _RAISED as error:
            self._explain(error)
            raise
        return result, self._short(way, (*args, *kwargs.values()), tensors)

    def _short(self, way: AnyWay, leaves: Sequence[object], tensors: Sequence[Tensor]) -> Short | None:
        """The way of calls whose tensors have the same types, sizes and devices, which alone decide what was checked
        here and which graph was chosen. None where an input was converted, or nests others."""
        places = {id(x): k for k, x in enumerate(leaves)}
        if self._nests or not isinstance(way, (ProgramWay, CapturedWay)) or len(places) != len(leaves):
            return None
        if len(leaves) != len(tensors) or any(id(t) not in places for t in tensors):
            return None
        run = way.direct([places[id(t)] for t in tensors])
        if run is None:
            return None

        def short(leaves: Sequence[object], out: Sequence[Tensor] | None) -> object:
            try:
                return run(leaves, out)
            except _RAISED as error:
                self._explain(error)
                raise

        return short

    def _explain(self, error: Exception) -> None:
        """Raise ModelError if a library call refused what reached it; errors of ours name the file at least."""
        if isinstance(error, TilewrightError):
            error.place = error.place or self.place
        if isinstance(error, TilewrightError) or not is_refusal(error):
            return
        raise ModelError(
            f"a call refuses what reaches it: {next(iter(str(error).splitlines()), '')}", phase="run",
            op="; ".join(getattr(error, "__notes__", ())).removeprefix(CALLED), place=self.place, hint=FITS,
        ) from error  # fmt: skip

    def _bound(self, args: tuple[object, ...], kwargs: dict[str, object]) -> Sequence[object]:
        return bind_inputs(self.module, args, kwargs)  # pyright: ignore[reportArgumentType]  (it checks them)

    def _typical(self) -> None:
        """Compile without inputs: declared sizes, and for the others the first typical ones that the model takes."""
        if self._ways():
            return
        specs = self.module.input_specs
        if any(s.dtype is None or s.dims is None for s in specs):
            raise InputError(
                "the file does not declare its inputs", phase="input", hint="pass example_inputs"
            )
        refused: TilewrightError | None = None
        for shapes in typical_shapes(specs):
            try:
                with asking(runs=False):
                    self._chosen(
                        [
                            torch.zeros(n, dtype=s.dtype, device=self.device)
                            for n, s in zip(shapes, specs, strict=True)
                        ]
                    )
            except (UnsupportedError, ModelError) as error:
                refused = refused or error
            else:
                return
        raise refused or InputError("no typical size fits", phase="input", hint="pass example_inputs")

    def _chosen(self, inputs: Sequence[object]) -> tuple[AnyWay, Sequence[Tensor]]:
        """The graph for such inputs, and the tensors that it takes."""
        list(self.naming.place_of(dict(zip(self.names, inputs, strict=True))))
        tensors, nesting = flatten_inputs(inputs) if self._nests else (inputs, None)
        with self._lock:
            return self._graphs(nesting, tensors).chosen(tensors), tensors  # pyright: ignore[reportArgumentType, reportReturnType]

    def _graphs(self, nesting: Nesting | None, tensors: Sequence[Tensor]) -> FileGraphs:
        """Those of calls whose inputs nest like these."""
        for known, graphs in self._kinds:
            if known == nesting:
                return graphs
        module, options = self.module, self.options
        nodes = [step.label for step in module.program.steps]
        if nesting is None:
            cut = (lambda: split(module)) if module.data_dependent else None
            dims = [self._dims[n] for n in self.names]
            kept = None
            if self._bytes is not None:
                kept = KeptCaptures(self._bytes, self.names, module.output_names, dims, options)
            made = FileGraphs(module, dims, nodes, cut, options, kept)
        else:
            dims = [
                self._dims[self.names[owner]] or {d: f"?{k}.{d}" for d in range(t.dim())}
                for k, (owner, t) in enumerate(zip(nesting.owners, tensors, strict=True))
            ]
            cut = (lambda: FlatSplit(split(module), nesting)) if module.data_dependent else None
            made = FileGraphs(Flat(module, nesting), dims, nodes, cut, options)
        self._kinds.append((nesting, made))
        return made
