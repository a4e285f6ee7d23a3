"""The front doors: the backend of `torch.compile`, and `compile` for modules, functions, exported programs and ONNX."""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, fx

from tilewright.capture.device import ADMITTED
from tilewright.capture.exported import Exported, exported
from tilewright.capture.joint import Recorder, Runner, through_autograd
from tilewright.capture.onnx import OnnxModule, bind_inputs, load, split, typical_shapes
from tilewright.capture.onnx.refuse import FITS, is_refusal
from tilewright.capture.trace import fits, hints, trace
from tilewright.compiler import COMPILATIONS, Compilation, Compiled, Trace, compile_fx
from tilewright.errors import InputError, ModelError, TilewrightError, UnsupportedError
from tilewright.options import Options, OptionValue
from tilewright.plan.coverage import Coverage, total
from tilewright.runtime import cuda_executable
from tilewright.runtime.direct import Direct
from tilewright.runtime.model import CompiledModel, Way
from tilewright.runtime.naming import DimsLike, Naming
from tilewright.runtime.pieces import Pieces
from tilewright.runtime.programs import ProgramWay
from tilewright.runtime.stats import STATS, Stats
from tilewright.runtime.steps import CALLED
from tilewright.runtime.traced import TracedWay

OptionsLike = Options | Mapping[str, OptionValue] | None
Target = torch.nn.Module | Callable[..., object] | torch.export.ExportedProgram | str | os.PathLike[str]


# --- torch.compile ---------------------------------------------------------------


def backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[object],
    *,
    options: OptionsLike = None,
    mode: str | None = None,
) -> Callable[..., object]:
    """The backend `tilewright` of `torch.compile`. `options` as in `tilewright.options`; `mode` is not used.

    Weights stay inputs unless `options={"freeze": True}`, and then only where no gradient is asked for."""
    del mode
    return Session(Options.make(options)).backend(gm, example_inputs)


@dataclass(eq=False)
class Session:
    """What one compiled model has compiled so far."""

    options: Options
    compiled: list[Compiled] = field(default_factory=list)
    recorder: Recorder | None = None

    def fresh(self) -> Session:
        """Another one of the same options."""
        return Session(self.options)

    def backend(self, gm: fx.GraphModule, example_inputs: Sequence[object]) -> Callable[..., object]:
        """Compile what Dynamo captured."""
        return through_autograd(
            gm, example_inputs, self._build, freeze=bool(self.options.freeze), recorder=self.recorder
        )

    def _build(self, gm: fx.GraphModule, kind: str, frozen: Mapping[str, Tensor]) -> Runner:
        done = compile_fx(gm, self.options, frozen=frozen, trusted=True, kind=kind)
        self.compiled.append(done)
        return done.executable  # pyright: ignore[reportReturnType]  (arguments and results of a graph are what it says)

    @property
    def coverage(self) -> Coverage | None:
        """Of all graphs together."""
        return total([c.coverage for c in self.compiled])

    @property
    def kernels(self) -> tuple[object, ...]:
        """Of all graphs, in the order in which they were compiled."""
        return tuple(k for c in self.compiled for k in c.kernels)

    @property
    def calls(self) -> tuple[object, ...]:
        """What runs besides kernels, of all graphs."""
        return tuple(k for c in self.compiled for k in c.calls)

    @property
    def cuda_graphs(self) -> tuple[str, ...]:
        """One line for each graph on a GPU under `cuda_graphs`."""
        return tuple(line for c in self.compiled for line in c.cuda_graphs)

    @property
    def trace(self) -> Trace:
        """Of the graph compiled last."""
        return self.compiled[-1].trace if self.compiled else Trace()


def stats() -> Stats:
    """Counters since the start of the process or the last `reset`."""
    return STATS.snapshot()


def compilations() -> tuple[Compilation, ...]:
    """How each graph was compiled, oldest first, with its coverage, kernels, calls and trace: of graphs of any door
    that can still run, since the start of the process or the last `reset`."""
    return COMPILATIONS()


def synchronize() -> None:
    """Wait until the GPUs that compiled graphs have used are done. Raises what their kernels found wrong, such as
    IndexOutOfRange, which else the next call raises."""
    cuda_executable.synchronize()


def reset() -> None:
    """Forget what torch has compiled and set all counters to 0. Compiled models stay usable."""
    torch._dynamo.reset()
    STATS.reset()
    COMPILATIONS.clear()


# --- compile ---------------------------------------------------------------------


def compile(
    target: Target,
    example_inputs: Sequence[object] | Mapping[str, object] | None = None,
    *,
    dims: DimsLike | str | None = None,
    device: str | torch.device | None = None,
    strict: bool = False,
    freeze: bool | None = None,
    options: OptionsLike = None,
) -> CompiledModel:
    """Compile a module, a function, an exported program, or the path of an ONNX file.

    `example_inputs` (a tuple, or a mapping by name) compiles now, else the first call does. `dims` names dynamic dims
    by input and position, `{"x": {0: "batch", 1: ("length", 2, 512)}}`, with the range it may have; one graph then
    serves all sizes. `dims="oblivious"` lets sizes 0 and 1 share it. `strict` raises UnsupportedError where an op would
    run as a library call by need. `freeze` makes weights constants (the default for files and exported programs).
    Values other than tensors are read when compiling: arguments, module attributes, closures and globals are compared
    on each call, what lies deeper inside them is not.
    """
    wanted = Options.make(options)
    if strict:
        wanted = wanted.replace(strict=True)
    if freeze is not None:
        wanted = wanted.replace(freeze=freeze)
    if dims is not None and not isinstance(dims, Mapping) and dims != "oblivious":
        raise InputError(f"dims cannot be {dims!r}", phase="input", hint='a mapping or "oblivious"')
    naming = Naming(dims if isinstance(dims, Mapping) else {})
    way = _way(target, wanted, naming, _device(device), oblivious=dims == "oblivious")
    model = CompiledModel(way)
    if isinstance(example_inputs, (Tensor, np.ndarray)):
        raise InputError("example_inputs is one tensor", phase="input", hint="pass a tuple: (x,)")
    if isinstance(example_inputs, Mapping):
        model.prepare((), dict(example_inputs))
    elif example_inputs is not None:
        model.prepare(tuple(example_inputs), {})
    return model


def _device(wanted: str | torch.device | None) -> torch.device | None:
    if wanted is None:
        return None
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise InputError(f"not a device: {wanted!r}", phase="input", hint='"cpu" or "cuda"') from error
    if device.type not in ADMITTED:
        raise UnsupportedError(f"device {device}", phase="input", hint='"cpu" or "cuda"')
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(
            f"there is no {device} here", phase="input", hint="torch.cuda.is_available() is False"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"there is no {device} here", phase="input", hint=f"there are {torch.cuda.device_count()} GPUs"
        )
    return device


def _way(
    target: Target, options: Options, naming: Naming, device: torch.device | None, *, oblivious: bool
) -> Way:
    if isinstance(target, (str, os.PathLike)):
        path = os.fspath(target)
        if not path.endswith(".onnx"):
            raise InputError(f"{path} is no .onnx file", phase="input", hint="give the path of an ONNX model")
        return FileWay(_moved(load(path), device), options, naming, device, path)
    if device is not None:
        held = (*target.parameters(), *target.buffers()) if isinstance(target, torch.nn.Module) else ()
        if any(t.device.type != device.type or device.index not in (None, t.device.index or 0) for t in held):
            raise InputError(
                f"the module is not on {device}", phase="input", hint=f"move it with .to({str(device)!r})"
            )
    _check_target(target)
    if isinstance(target, torch.export.ExportedProgram):
        return program_way(exported(target), options)
    if callable(target):
        return TracedWay(target, Session(options), naming, oblivious=oblivious)
    raise InputError(
        f"cannot compile a {type(target).__name__}", phase="input",
        hint="give a module, a function, an exported program, or the path of a model file",
    )  # fmt: skip


def _check_target(target: object) -> None:
    """Raise InputError for what can be called but is no program."""
    if isinstance(target, type):
        raise InputError(
            f"{target.__name__} is a class", phase="input", hint=f"make an instance: {target.__name__}(...)"
        )
    if isinstance(target, CompiledModel):
        raise InputError("this is compiled already", phase="input", hint="compile what it was made from")
    if isinstance(target, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        raise UnsupportedError("scripted programs", phase="input", hint="compile what it was scripted from")


def _moved(module: OnnxModule, device: torch.device | None) -> OnnxModule:
    return module if device is None else module.to(device)


def program_way(program: Exported, options: Options) -> ProgramWay:
    """Compile an exported or traced program."""

    def build(gm: fx.GraphModule, frozen: Mapping[str, Tensor]) -> Compiled:
        return compile_fx(gm, options, frozen=frozen, conditions=program.conditions, ranges=program.ranges)

    return ProgramWay(program, build, freeze=options.freeze is not False)


class FileWay:
    """A model file. Its declared dynamic dims (or those of `naming`) are symbols; dims of one name are taken as equal
    while they are, and a call where they differ gets a graph in which each has its own symbol."""

    def __init__(
        self,
        module: OnnxModule,
        options: Options,
        naming: Naming,
        device: torch.device | None = None,
        place: str = "",
    ) -> None:
        """`module` is on `device` (None: the CPU), and numpy arrays are brought there. `place` is the file."""
        self.module = module
        self.place = place
        self.device = device
        self.options = options
        self.naming = naming
        self._ways: list[ProgramWay | Pieces] = []
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
    def coverage(self) -> Coverage | None:
        """Of the graphs compiled so far; compiles for typical sizes if there is none."""
        self._typical()
        return total([w.coverage for w in self._ways])

    @property
    def kernels(self) -> tuple[object, ...]:
        """Of the graphs compiled so far; compiles for typical sizes if there is none."""
        self._typical()
        return tuple(k for w in self._ways for k in w.kernels)

    @property
    def calls(self) -> tuple[object, ...]:
        """What runs besides kernels; compiles for typical sizes if there is no graph yet."""
        self._typical()
        return tuple(k for w in self._ways for k in w.calls)

    @property
    def cuda_graphs(self) -> tuple[str, ...]:
        """One line for each graph on a GPU under `cuda_graphs`."""
        return tuple(line for w in self._ways for line in w.cuda_graphs)

    @property
    def trace(self) -> object:
        """Of the graph compiled last; compiles for typical sizes if there is none."""
        self._typical()
        return self._ways[-1].trace or Trace()

    def unchanged(self) -> bool:
        """A file's weights are its own."""
        return True

    def copied(self, memo: dict[int, object]) -> FileWay:
        """Itself: nothing can change a file's weights."""
        return self

    def prepare(self, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Compile for inputs like these."""
        self._chosen(self._bound(args, kwargs))

    def __call__(
        self, args: tuple[object, ...], kwargs: dict[str, object], out: Sequence[Tensor] | None
    ) -> tuple[object, Direct | None]:
        """The outputs: a tensor, or a tuple of several."""
        inputs = self._bound(args, kwargs)
        way = self._chosen(inputs)
        try:
            return way.run(inputs, out), None
        except (RuntimeError, ValueError, TypeError, LookupError, ArithmeticError) as error:
            if isinstance(error, TilewrightError) or not is_refusal(error):
                raise
            raise ModelError(
                f"a call refuses what reaches it: {next(iter(str(error).splitlines()), '')}", phase="run",
                op="; ".join(getattr(error, "__notes__", ())).removeprefix(CALLED), place=self.place, hint=FITS,
            ) from error  # fmt: skip

    def _bound(self, args: tuple[object, ...], kwargs: dict[str, object]) -> tuple[Tensor, ...]:
        return bind_inputs(self.module, args, kwargs)  # pyright: ignore[reportArgumentType]  (it checks them)

    def _typical(self) -> None:
        """Compile without inputs: declared sizes, and for the others the first typical ones that the model takes."""
        if self._ways:
            return
        specs = self.module.input_specs
        if any(s.dtype is None or s.dims is None for s in specs):
            raise InputError(
                "the file does not declare its inputs", phase="input", hint="pass example_inputs"
            )
        refused: TilewrightError | None = None
        for shapes in typical_shapes(specs):
            try:
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

    def _chosen(self, inputs: Sequence[Tensor]) -> ProgramWay | Pieces:
        list(self.naming.place_of(dict(zip(self.names, inputs, strict=True))))
        sizes: dict[str, int] = {}
        equal = True
        for name, t in zip(self.names, inputs, strict=True):
            for place, dim in self._dims[name].items():
                equal &= sizes.setdefault(dim, t.shape[place]) == t.shape[place]
        with self._lock:
            for way in self._ways:
                if way.admits(inputs):
                    return way
            return self._traced(inputs, equal)

    def _traced(self, inputs: Sequence[Tensor], equal: bool) -> ProgramWay | Pieces:
        """A new graph: with every declared dim free and sizes 0 and 1 among them, else without these, else with dims of
        size 0 and 1 fixed."""
        wanted = [self._dims[n] for n in self.names]
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
                program = trace(self.module, examples, [list(e) for e in dims], same, oblivious=oblivious)
            except (UnsupportedError, ModelError) as error:
                refused = refused or error
                continue
            if not fits(program, inputs):
                continue
            made = program_way(program, self.options)
            if made.admits(inputs):
                self._ways.append(made)
                return made
            unfit.append(made)
        if self.module.data_dependent and not self.options.strict:
            pieces = Pieces(split(self.module), lambda program: program_way(program, self.options))
            pieces.run(inputs, None)  # what lies between is compiled for what really comes there
            self._ways.append(pieces)
            return pieces
        if unfit:
            return unfit[0]  # it says why when it runs
        raise refused or InputError("the model does not fit these inputs", phase="input")
