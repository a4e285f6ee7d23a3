"""Entry points."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

from tilewright.capture.aten import decompositions
from tilewright.compiler import compile_fx
from tilewright.options import Options


def backend(gm: fx.GraphModule, example_inputs: Sequence[object], **kw: object) -> Callable[..., object]:
    """Backend."""
    options = Options.make(kw.get("options"))  # type: ignore

    def comp(kind: str):
        def f(g, inputs):
            c = compile_fx(g, options, trusted=True, kind=kind)
            ex = c.executable

            def run(args):
                return ex(args)

            run._boxed_call = True
            return run

        return f

    return aot_autograd(
        fw_compiler=comp("forward"), bw_compiler=comp("backward"), inference_compiler=comp("inference"),
        partition_fn=min_cut_rematerialization_partition, decompositions=decompositions(), keep_inference_input_mutations=True,
    )(gm, example_inputs)
