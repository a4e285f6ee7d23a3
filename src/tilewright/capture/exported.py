"""Exported programs: a functional graph, its weights, and how calls are flattened."""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor, fx
from torch._export.verifier import SpecViolationError
from torch.export import ExportedProgram
from torch.export.exported_program import _get_updated_range_constraints
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.utils import _pytree as pytree

from tilewright.errors import UnsupportedError
from tilewright.ir.expr import Expr

from .aliasing.bodies import with_copies_of_what_bodies_leave
from .aliasing.overlapping import refuse_overlapping_writes
from .aten import decompositions, mended_ops
from .aten.retraced import retraced
from .environment import conditions, shape_env, unsqueezed
from .loops.recurrent import recurrent_loops
from .placement.dense_inputs import dense_inputs
from .symbols import Ranges


@dataclass(frozen=True, slots=True, eq=False)
class Exported:
    """A functional graph without Python around it.

    `weights` are tensors by placeholder name (parameters, buffers and constants that nothing writes to); `state` are
    those that the program writes to. `inputs` name the placeholders of the caller's flat arguments.
    Result k of the graph is copied into `writes[k]` (a tensor of the state, or the number of a flat argument), or is
    the next output. Where it is the value that result `written[k]` is, the output is what that was copied into, as in
    torch's module of the program.
    """

    gm: fx.GraphModule
    weights: Mapping[str, Tensor]
    state: Mapping[str, Tensor]
    inputs: tuple[str, ...]
    writes: Mapping[int, Tensor | int]
    written: Mapping[int, int]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    conditions: tuple[Expr, ...] = ()
    """What must hold of the sizes, besides what shapes say."""
    ranges: Ranges | None = None
    """Of sizes, where they are wider than those that the program was traced with."""
    constants: Mapping[int, object] = field(default_factory=dict[int, object])
    """What stood in flat arguments at export that were no tensors and became part of the program: None, numbers."""
    names: Mapping[str, str] = field(default_factory=dict[str, str])
    """What the program's author calls weights and state, by placeholder name."""


def _functional(program: ExportedProgram) -> tuple[ExportedProgram, fx.GraphModule]:
    """The program in the ops that we declare, without writes but at its end; its graph apart, as that of a program
    which writes nothing is made anew without the rest."""
    program = with_copies_of_what_bodies_leave(program)
    with dense_inputs(program.graph_module), mended_ops(), recurrent_loops(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch copies a class of its own that it deprecates
        made = retraced(program)
        if made is not None:
            return program, made
        try:
            program = program.run_decompositions(decompositions())
        except SpecViolationError as error:
            raise UnsupportedError(
                f"torch cannot make this program functional: {str(error).splitlines()[0]}", phase="capture",
                hint="where a branch or loop writes into what it is given (dropout that drops nothing is its operand), "
                "let it write into a `clone()`",
            ) from error  # fmt: skip
    return program, program.graph_module


def exported(program: ExportedProgram) -> Exported:
    """The program in the ops that we declare. Raises UnsupportedError for inputs that are no tensors or numbers, and
    for writes that torch cannot make functional."""
    refuse_overlapping_writes(program.graph_module)
    program, gm = _functional(program)
    signature = program.graph_signature
    held = {**program.state_dict, **program.constants}
    tensors = {name: t for name, t in held.items() if isinstance(t, Tensor)}
    targets = set(signature.buffers_to_mutate.values())
    weights: dict[str, Tensor] = {}
    state: dict[str, Tensor] = {}
    inputs: list[str] = []
    constants: dict[int, object] = {}
    names: dict[str, str] = {}
    for spec in signature.input_specs:
        name = getattr(spec.arg, "name", "")
        if spec.kind is InputKind.USER_INPUT:
            if isinstance(spec.arg, ConstantArgument):
                constants[len(inputs)] = spec.arg.value
            inputs.append(name)
        elif spec.target is not None and spec.target in tensors:
            (state if spec.target in targets else weights)[name] = tensors[spec.target]
            names[name] = spec.target
        else:
            raise UnsupportedError(f"an input of kind {spec.kind.name}", phase="capture", op=name)
    writes: dict[int, Tensor | int] = {}
    for k, out in enumerate(signature.output_specs):
        if out.kind is OutputKind.BUFFER_MUTATION and out.target is not None:
            writes[k] = tensors[out.target]
        elif out.kind is OutputKind.USER_INPUT_MUTATION and out.target is not None:
            writes[k] = inputs.index(out.target)
        elif out.kind is not OutputKind.USER_OUTPUT:
            raise UnsupportedError(f"an output of kind {out.kind.name}", phase="capture")
    call = program.call_spec
    assert call.in_spec is not None and call.out_spec is not None
    (results,) = gm.graph.output_node().args
    assert isinstance(results, (tuple, list))
    places = {results[k]: k for k in writes}
    written = {k: places[r] for k, r in enumerate(results) if k not in writes and r in places}
    # A trace takes every free size for more than 1; torch runs the program at whatever its author has allowed.
    ranges = _get_updated_range_constraints(gm, program.range_constraints)
    needed = (*conditions(shape_env(gm), ranges), *unsqueezed(gm, ranges))
    return Exported(
        gm,
        weights,
        state,
        tuple(inputs),
        writes,
        written,
        call.in_spec,
        call.out_spec,
        needed,
        ranges,
        constants,
        names,
    )
