"""An ONNX model as a `torch.nn.Module` written with plain torch ops."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import onnx
import torch
from onnx import FunctionProto, ValueInfoProto
from torch import Tensor

from tilewright.capture.onnx.values.run import torch_dtype
from tilewright.capture.onnx.values.traced import Val, ValueKind
from tilewright.errors import ModelError, UnsupportedError, shown
from tilewright.tuning.text_limits import TEXTS

from . import ops
from .build import Context, NameScope, ProgramBuilder, add_initialisers
from .control import BUILDERS
from .nodes import opset_table
from .program import OnnxProgram, ProgramModule
from .proto import default_opset, read_model
from .refuse import INTACT, check_types

OPERATORS = ops.__all__
"""The operator families; importing them has filled the table."""


@dataclass(frozen=True)
class InputSpec:
    """What the model declares about one input.

    `dtype` is None for a sequence or an optional. `dims`: a size, a name, or None for an unknown size; None for
    the whole tuple when the rank is unknown. Equal names are a hint that sizes are equal, not a proof.
    """

    name: str
    dtype: torch.dtype | None
    dims: tuple[int | str | None, ...] | None

    @cached_property
    def fixed(self) -> tuple[tuple[int, int], ...]:
        """(dim, size) of the sizes that the model fixes."""
        return tuple((i, d) for i, d in enumerate(self.dims or ()) if isinstance(d, int))

    def admits(self, value: object) -> bool:
        """Whether a value is a tensor of the declared dtype, rank and fixed sizes."""
        if not isinstance(value, Tensor) or value.dtype != self.dtype:
            return False
        if self.dims is None:
            return True
        shape = value.shape
        return len(shape) == len(self.dims) and all(shape[i] == n for i, n in self.fixed)


class OnnxModule(ProgramModule):
    """A loaded model. Call it with tensors in the order of `input_specs`.

    It returns a tensor for one output, else a tuple in the order of `output_names`. Weights are parameters
    (`requires_grad` False) and buffers named p0, p1, ...; `weight_names` are the file's names for these, as they may be
    shown. `data_dependent` names the nodes whose control flow or
    sizes depend on data: with any there, the model runs eagerly but cannot be exported as one graph (see `split`).
    """

    def __init__(
        self,
        program: OnnxProgram,
        constants: Sequence[tuple[Tensor, int]],
        input_specs: tuple[InputSpec, ...],
        output_names: tuple[str, ...],
        metadata: dict[str, str],
        opset: int,
    ) -> None:
        super().__init__(program, constants)
        self.weight_names: Mapping[str, str] = {}
        self.input_specs = input_specs
        self.output_names = output_names
        self.metadata = metadata
        self.opset = opset
        self.data_dependent = tuple(label for step in program.steps for label in step.data)


def load(path: str | os.PathLike[str] | onnx.ModelProto) -> OnnxModule:
    """Import an ONNX model.

    Raises ModelError for a file that is no valid model, UnsupportedError (with op, domain, opset, node) for an
    operator or type outside the importer. External data are read only from plain files below the model's folder.
    """
    source = read_model(path)
    model = source.model
    functions: dict[tuple[str, str, str], FunctionProto] = {
        ("" if f.domain == "ai.onnx" else f.domain, f.name, getattr(f, "overload", "")): f
        for f in model.functions
    }
    context = Context(source.folder, functions, BUILDERS)
    builder = ProgramBuilder(context)
    scope = NameScope(builder, opset_table(model.opset_import))
    add_initialisers(model.graph, scope)
    specs: list[InputSpec] = []
    slots: list[int] = []
    for info in model.graph.input:
        if info.name in scope.names:
            if scope.names[info.name] is not None and info.name not in {s.name for s in specs}:
                continue  # an initialiser that is also listed as an input: its default is used
            raise ModelError(f"two inputs are named {info.name!r}", phase="capture", place=source.place)
        specs.append(input_spec(info))
        val = builder.value(ValueKind.TENSOR)
        scope.names[info.name] = val
        slots.append(val.slot)
    builder.add_nodes(model.graph.node, scope)
    absent = [o.name for o in model.graph.output if o.name not in scope.names]
    if absent:
        raise ModelError(
            f"nothing makes output {absent[0]!r}", phase="capture", place=source.place, hint=INTACT
        )
    results: list[Val | None] = [scope.names[o.name] for o in model.graph.output]
    check_types(model, source.place)
    program = builder.finish(slots, results)
    used = {i for step in program.steps for i in step.ins} | set(program.outputs)
    held = [(v, v.const, slot) for v, slot in context.constants if slot in used and v.const is not None]
    made = OnnxModule(
        program,
        [(const, slot) for _, const, slot in held],
        tuple(specs),
        tuple(o.name for o in model.graph.output),
        {entry.key: entry.value for entry in model.metadata_props},
        default_opset(model),
    )
    made.weight_names = _weight_names([v for v, _, _ in held], scope)
    return made


def _weight_names(held: Sequence[Val], scope: NameScope) -> Mapping[str, str]:
    """For p0, p1, ... what the file calls each, no name twice. What stands inside of bodies keeps its number."""
    names = {id(val): name for name, val in reversed(scope.names.items())}
    taken: dict[str, str] = {}
    for k, val in enumerate(held):
        name = shown(names.get(id(val), ""), TEXTS.max_place_characters)
        if not name or name in taken:
            name = next(n for i in itertools.count() if (n := f"p{k}" + "_" * i) not in taken)
        taken[name] = f"p{k}"
    return {place: name for name, place in taken.items()}


def input_spec(info: ValueInfoProto) -> InputSpec:
    """The declaration of one input; names of dims that are no identifiers are dropped."""
    kind = info.type.WhichOneof("value")
    if kind != "tensor_type":
        if kind == "sparse_tensor_type" or kind == "map_type":
            raise UnsupportedError(
                f"input {info.name!r} is a {kind}", phase="capture", place=info.name, hint="use dense tensors"
            )
        return InputSpec(info.name, None, None)
    tensor = info.type.tensor_type
    try:
        dtype = torch_dtype(tensor.elem_type)
    except UnsupportedError as error:
        error.place = f"input {info.name}"
        raise
    if not tensor.HasField("shape"):
        return InputSpec(info.name, dtype, None)
    dims: list[int | str | None] = []
    for dim in tensor.shape.dim:
        if dim.HasField("dim_value") and dim.dim_value > 0:
            dims.append(dim.dim_value)
        elif dim.HasField("dim_param") and dim.dim_param.isidentifier():
            dims.append(dim.dim_param)
        else:
            dims.append(None)
    return InputSpec(info.name, dtype, tuple(dims))
