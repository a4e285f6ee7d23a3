"""Runs printed kernels in Triton's interpreter: `python child.py`, with TRITON_INTERPRET=1.

Each line that it reads names a FOLDER, and is answered by a line of JSON: what went wrong, empty if nothing. FOLDER
holds jobs.json, [{"file", "entry", "points", "sizes", "params", "rows", "descriptors"}, ...], and the memory of
parameter p of job k as k_p.npy (bf16 as its bits), which is overwritten; the error words stand in errors.json
afterwards. A job of several rows takes a table of its parameters.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import traceback
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
import triton.language as tl
from triton._C.libtriton.ir import INPUT_PRECISION
from triton.language.extra import libdevice
from triton.runtime.interpreter import (
    InterpreterBuilder,
    ReduceOps,
    ScanOps,
    TensorHandle,
    interpreter_builder,
)
from triton.tools.tensor_descriptor import TensorDescriptor

LIBRARY: dict[str, Any] = {
    "trunc": np.trunc, "nearbyint": np.rint, "expm1": np.expm1, "log10": np.log10, "log1p": np.log1p, "tanh": np.tanh,
    "erfc": np.vectorize(math.erfc), "tan": np.tan, "asin": np.arcsin, "acos": np.arccos, "atan": np.arctan,
    "sinh": np.sinh, "cosh": np.cosh, "asinh": np.arcsinh, "acosh": np.arccosh, "atanh": np.arctanh,
    "atan2": np.arctan2, "fmod": np.fmod, "pow": np.power,
}  # fmt: skip


def _stand_in(function: Any) -> Any:
    """The interpreter has no device library: the same function by numpy, computed in fp64."""

    def call(*args: Any) -> Any:
        wide = [a.handle.data.astype(np.float64) for a in args]
        data = np.asarray(function(*wide)).astype(args[0].handle.data.dtype)
        whole = max(args, key=lambda a: a.handle.data.size)
        return tl.tensor(TensorHandle(data, args[0].handle.dtype), whole.type)

    return call


QUICK = {
    "ex2.approx.ftz.f32": _stand_in(np.exp2), "lg2.approx.f32": _stand_in(np.log2),
    "tanh.approx.f32": _stand_in(np.tanh), "rcp.approx.ftz.f32": _stand_in(np.reciprocal),
}  # fmt: skip


def _assembly(text: str, constraints: str, args: Any, *rest: Any) -> Any:
    """The interpreter knows no machine code either."""
    return QUICK[text.split()[0]](*args)


tl.inline_asm_elementwise = _assembly


def _splat(self: Any, shape: Any, arg: Any) -> Any:
    """The interpreter gives a scalar comparison that meets a block the type of what was compared."""
    return TensorHandle(np.full(shape.shape, arg.data, arg.data.dtype), arg.dtype.scalar)


def _truncate(self: Any, value: Any, want: Any) -> Any:
    """The interpreter cuts off bits where a GPU rounds to the nearest bfloat16."""
    if want.scalar != tl.bfloat16:
        return self.cast_impl(value, want)
    rounded = value.data.astype(np.float32).astype(ml_dtypes.bfloat16)
    return TensorHandle(rounded.view(np.uint16), tl.bfloat16)


def _pieces(data: Any) -> list[Any]:
    """Three numbers of bfloat16 for each single, each of which holds what those before it leave."""
    found: list[Any] = []
    for _ in range(3):
        found.append(data.astype(ml_dtypes.bfloat16).astype(np.float32))
        data = data - found[-1]
    return found


def _dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
    """The interpreter does not know products of pieces: the small ones are added first, and left out where they are
    not numbers, as pieces of infinity."""
    if precision != INPUT_PRECISION.BF16x6:
        return self.whole_dot(a, b, d, precision, imprecise)
    (a0, a1, a2), (b0, b1, b2) = _pieces(a.data), _pieces(b.data)
    small = a1 @ b1 + a2 @ b0 + a0 @ b2 + a1 @ b0 + a0 @ b1
    return TensorHandle(np.where(np.isnan(small), 0, small) + a0 @ b0 + d.data, d.dtype.scalar)


def _merge(self: Any, first: list[Any], second: list[Any], types: list[Any]) -> list[Any]:
    """The states of two blocks of lanes, by the function of the kernel, all lanes at once."""
    found = self.combine_fn.fn(*map(self.to_tensor, first, types), *map(self.to_tensor, second, types))
    return [t.handle.data.reshape(first[0].shape) for t in (found if isinstance(found, tuple) else (found,))]


def _reduce(self: Any, parts: Any) -> list[Any]:
    """Neighbours are merged first. (The interpreter does one lane at a time.)"""
    types = [t.dtype for t in parts]
    whole = self.axis is None
    data = [t.handle.data.reshape(-1) if whole else np.moveaxis(t.handle.data, self.axis, 0) for t in parts]
    while len(data[0]) > 1:
        data = _merge(self, [d[0::2] for d in data], [d[1::2] for d in data], types)
    return [self.to_tensor(d[0], t) for d, t in zip(data, types, strict=True)]


def _scan(self: Any, parts: Any) -> list[Any]:
    """Each lane is merged with those before it, in steps that double."""
    types = [t.dtype for t in parts]
    data = [np.moveaxis(t.handle.data, self.axis, 0) for t in parts]
    step = 1
    while step < len(data[0]):
        later = _merge(self, [np.roll(d, step, 0) for d in data], data, types)
        data = [np.concatenate([d[:step], n[step:]]) for d, n in zip(data, later, strict=True)]
        step *= 2
    return [self.to_tensor(np.moveaxis(d, 0, self.axis), t) for d, t in zip(data, types, strict=True)]


def _memory(path: Path, dtype: str) -> torch.Tensor:
    data = torch.from_numpy(np.load(path))
    return data.view(torch.bfloat16) if dtype == "bf16" else data


def prepare() -> None:
    """Teach the interpreter what it lacks."""
    for name, function in LIBRARY.items():
        setattr(libdevice, name, _stand_in(function))
    InterpreterBuilder.create_splat, InterpreterBuilder.create_fp_trunc = _splat, _truncate
    InterpreterBuilder.whole_dot, InterpreterBuilder.create_dot = InterpreterBuilder.create_dot, _dot
    allowed = ("tf32", "tf32x3", "ieee", "bf16x6")
    object.__setattr__(interpreter_builder.options, "allowed_dot_input_precisions", allowed)
    ReduceOps.generic_reduce, ScanOps.generic_scan = _reduce, _scan
    np.seterr(all="ignore")


def run(folder: Path) -> None:
    """Run every job."""
    errors: list[int] = []
    for k, job in enumerate(json.loads((folder / "jobs.json").read_text())):
        spec = importlib.util.spec_from_file_location(job["file"], folder / f"{job['file']}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        whole = [_memory(folder / f"{k}_{p}.npy", t) for p, t in enumerate(job["params"])]
        inner = [t[job["guard"] : len(t) - job["guard"]] for t in whole]
        word = torch.zeros(1, dtype=torch.int32)
        shown = [
            TensorDescriptor(inner[p][start:], extents, strides, tile)
            for p, start, extents, strides, tile in job["descriptors"]
        ]
        rows = job["rows"]
        if rows:
            table = torch.tensor([t.data_ptr() for t in inner])
        if job["points"]:
            try:
                run = getattr(module, job["entry"])[(job["points"] * max(1, rows),)]
                run(*([table] if rows else inner), *job["sizes"], word, *shown)
            except Exception as error:
                raise RuntimeError(f"job {k}, {job['name']}") from error
        for p, t in enumerate(whole):
            np.save(
                folder / f"{k}_{p}.npy", (t.view(torch.int16) if t.dtype is torch.bfloat16 else t).numpy()
            )
        errors.append(int(word))
    (folder / "errors.json").write_text(json.dumps(errors))


def serve() -> None:
    """Answer until there is nothing more to read."""
    prepare()
    answers, sys.stdout = sys.stdout, sys.stderr  # what kernels print is no answer
    for line in sys.stdin:
        said = ""
        try:
            run(Path(json.loads(line)))
        except Exception:  # noqa: BLE001  (it is told to who asked)
            said = traceback.format_exc()
        print(json.dumps(said), file=answers, flush=True)


if __name__ == "__main__":
    serve()
