"""Results that torch makes anew from an input: what the program gives in their place must lie there.

A program writes into an input and returns a view of it. Its graph has no writes but at the end, so that it returns a
view of the value that is written back, and torch makes the user's view of the input itself. With sizes that are not
known it reads strides and place off what the graph returned: the place in the input's storage, which the graph, that
makes memory of its own, does not know. It is nowhere guarded either, so that each call asks the input."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, fx
from torch._functorch._aot_autograd.schemas import OutputType
from torch._guards import TracingContext

from tilewright.capture.opaque import Runner, returned

from .memory import storage_of
from .shares import has_sizes, is_write


def in_place(gm: fx.GraphModule, runner: Runner) -> Runner:
    """`runner` with such results as views of the inputs."""
    like = _regained(gm) if has_sizes(gm) else []
    if not like:
        return runner
    plain: Callable[[], Runner] | None = getattr(runner, "entry", None)
    inner = runner if plain is None else plain()

    def run(args: list[object]) -> list[object]:
        seen = [args[i] for _, i in like]
        results = inner(args)
        for (k, _), x in zip(like, seen, strict=True):
            r = results[k]
            if isinstance(r, Tensor) and isinstance(x, Tensor) and not _is_same(r, x):
                results[k] = x.as_strided(r.shape, r.stride(), x.storage_offset() + r.storage_offset())
        return results

    run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
    return run


def _is_same(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _regained(gm: fx.GraphModule) -> list[tuple[int, int]]:
    """The results that torch makes anew from inputs that the graph writes into, each with the number of its input."""
    context = TracingContext.try_get()
    facts = getattr(context, "fw_metadata", None)
    if facts is None:
        return []
    number = {n: i for i, n in enumerate(n for n in gm.graph.nodes if n.op == "placeholder")}
    written = {storage_of(n.args[1]): n.args[0] for n in gm.graph.nodes if is_write(n)}
    found: list[tuple[int, int]] = []
    nodes = returned(gm)[facts.num_mutated_inp_runtime_indices :]
    for k, (node, of) in enumerate(zip(nodes, facts.output_info, strict=False)):
        source = written.get(storage_of(node))
        if of.output_type is OutputType.alias_of_input and isinstance(source, fx.Node) and source in number:
            found.append((facts.num_mutated_inp_runtime_indices + k, number[source]))
    return found
