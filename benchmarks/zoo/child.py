"""One model, judged in a process of its own: forward, a training step, seconds of compiling, an ONNX export."""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import json
import logging
import os
import resource
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch._dynamo
import torch._inductor.compile_fx  # imported here, to be in no contestant's seconds
from torch import Tensor, nn

import tilewright
from benchmarks import record
from benchmarks.zoo.draws import Kept, Step, Triple, judged, redrawn, taken
from benchmarks.zoo.models import LeftOut, Made, made, tensors
from benchmarks.zoo.runs import CAPTURE, Runs, forward, step
from tilewright import accuracy


def cpu_seconds() -> float:
    """Of this process and its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


@contextlib.contextmanager
def fresh() -> Iterator[None]:
    """With nothing compiled before, and empty caches of kernels."""
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        kept = {name: os.environ.get(name) for name in record.CACHES}
        os.environ.update({name: str(Path(folder) / name.lower()) for name in record.CACHES})
        torch._dynamo.reset()
        tilewright.reset()
        gc.collect()
        try:
            yield
        finally:
            for name, value in kept.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value


def _shares() -> record.Facts:
    """How much of all graphs is generated."""
    covered = [c.coverage for c in tilewright.compilations()]
    calls: Counter[str] = Counter()
    for c in covered:
        for who, rows in (("choice", c.choice), ("need", c.need), ("own routine", c.own)):
            for r in rows:
                calls[f"{r.name} ({r.reason}, {who})"] += r.count
    return {
        "graphs": len(covered), "ops": sum(c.ops for c in covered), "generated": sum(c.generated for c in covered),
        "needed": sum(r.count for c in covered for r in c.need),
        "library": dict(calls.most_common()),
        "fallbacks": tilewright.stats().fallbacks,
    }  # fmt: skip


def attempt(backend: str, run: Callable[[], Step]) -> tuple[Step, record.Facts]:
    """Run what is compiled for `backend` for the first time, with empty caches; the CPU seconds of that call."""
    with fresh():
        start = cpu_seconds()
        done = run()
        facts: record.Facts = {"cpu_s": round(cpu_seconds() - start, 2)}
        return done, facts | (_shares() if backend == "tilewright" else {})


def part(found: Made, training: bool, channels_last: bool) -> record.Facts:
    """Judge one way to run a model."""
    runs = Runs(found, training, channels_last)
    try:
        eager = runs.eagerly()
    except Exception as error:  # noqa: BLE001 - what eager cannot run is no finding
        return {"left_out": f"eager: {_line(error)}"}
    compiled = runs.compiled = torch.compile(runs.own, backend=tilewright.backend)
    try:
        ours, facts = attempt("tilewright", lambda: runs.once(compiled, runs.own))
    except Exception:
        why = _crash(runs.captured)
        if why:
            return {"left_out": f"torch.compile(backend={CAPTURE!r}): {why}"}
        raise
    first = (ours, eager, runs.exactly())
    for name in ("results", "gradients", "buffers"):
        facts[name] = judged(name, first, runs.more, runs.others)
    wrong = [name for name in ("results", "gradients", "buffers") if not facts[name]["passed"]]  # type: ignore[index, call-overload]
    if wrong and captured_otherwise(ours, eager, runs.captured()):
        return {
            "left_out": f"torch.compile(backend={CAPTURE!r}) gives other numbers than eager, as ours: {facts}"
        }
    return facts


def captured_otherwise(ours: Step, eager: Step, captured: Step) -> bool:
    """Whether the program that torch captured is another one than eager runs, and ours computes that: ours lies near
    what was captured, also where that and eager's do not part. NaN is near nothing."""
    found = [(*s.results, *s.gradients, *s.buffers) for s in (ours, eager, captured)]
    parted = False
    for y, e, c in zip(*found, strict=True):
        if y.shape != c.shape or c.shape != e.shape:
            return False
        if not e.is_floating_point():
            near = y.equal(c) or y.equal(e)
        elif _rms(e - c) > 1e-2 * _rms(e):
            parted = True
            near = 100 * _rms(y - c) <= _rms(y - e)
        else:
            near = _rms(y - c) <= 1e-2 * _rms(e)
        if not near:
            return False
    return parted


def _rms(t: Tensor) -> float:
    return float(t.double().square().mean().sqrt())


def _crash(run: Callable[[], object]) -> str:
    """What a run raises, in one line; empty if nothing."""
    try:
        run()
    except Exception as error:  # noqa: BLE001 - whatever it raises is the finding
        return _line(error)
    return ""


def rival(found: Made, training: bool) -> record.Facts:
    """The CPU seconds that Inductor takes for the first run."""
    model = copy.deepcopy(found.model).train(training)
    compiled = torch.compile(model, backend="inductor")
    inputs = dict(found.inputs)
    try:
        _, facts = attempt(
            "inductor",
            lambda: step(compiled, model, inputs) if training else Step(forward(compiled, inputs), [], []),  # type: ignore[arg-type]
        )
    except Exception as error:  # noqa: BLE001 - the peer's failure is a fact
        return {"inductor_failed": _line(error)}
    return {"inductor_cpu_s": facts["cpu_s"]}


class _Flat(nn.Module):
    """A model from a list of tensors to its floats."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *args: Tensor) -> tuple[Tensor, ...]:
        """Whatever it gives, flat."""
        results = tensors(self.model(**dict(zip(self.names, args, strict=True))))
        return tuple(t for t in results if t.is_floating_point())


def exported(found: Made) -> record.Facts:
    """The model as an ONNX file, compiled, beside onnxruntime."""
    import onnxruntime

    model = found.model.eval()
    inputs = dict(found.inputs)
    names, values = list(inputs), tuple(inputs.values())
    flat = _Flat(model, names).eval()
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.onnx")
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.onnx.export(flat, values, path, input_names=names, dynamo=False, opset_version=17)
        except Exception as error:  # noqa: BLE001 - what torch cannot export is no finding
            return {"left_out": f"export: {_line(error)}"}

        def wanted(given: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
            with torch.no_grad():
                return tensors(flat(*given)), [t.detach() for t in accuracy.in_float64(flat)(*given)]

        def verdict(call: Callable[[Sequence[Tensor]], list[Tensor]], first: list[Tensor]) -> record.Facts:
            def again(_: str, kept: Kept, numbers: Sequence[int]) -> list[list[Triple]]:
                found: list[list[Triple]] = []
                for number in numbers:
                    given = list(redrawn(inputs, number - 1).values())
                    found.append(
                        list(zip(*(taken(t, kept) for t in (call(given), *wanted(given))), strict=True))
                    )
                return found

            eager, exact = wanted(values)
            return judged("results", (Step(first, [], []), Step(eager, [], []), Step(exact, [], [])), again)

        with fresh():
            start = cpu_seconds()
            compiled = tilewright.compile(path)
            ours = tensors(compiled(*values))
            facts: record.Facts = {
                "cpu_s": round(cpu_seconds() - start, 2),
                "coverage": str(compiled.coverage),
            }
        facts["results"] = verdict(lambda given: tensors(compiled(*given)), ours)
        try:
            session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

            def theirs(given: Sequence[Tensor]) -> list[Tensor]:
                named = dict(zip(names, given, strict=True))
                results = session.run(None, {i.name: named[i.name].numpy() for i in session.get_inputs()})
                return [torch.from_numpy(a) for a in results]

            facts["onnxruntime"] = verdict(theirs, theirs(values))
        except Exception as error:  # noqa: BLE001 - the peer's failure is a fact
            facts["onnxruntime"] = {"passed": False, "why": _line(error)}
        return facts


def _line(error: BaseException) -> str:
    lines = [text for text in str(error).strip().splitlines() if text]
    return f"{type(error).__name__}: {lines[0][:400] if lines else ''}"


def parts_of(found: Made) -> list[str]:
    """The ways to run a model, by name."""
    ways = ["forward", "training"]
    return ways + [f"{w} channels-last" for w in ways] if found.pixels else ways


def run(given: list[str], errors: str) -> None:
    """`main` in a process of its own, which writes what it prints into the file `errors`."""
    with open(errors, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    main(given)
    sys.stdout.flush()
    os._exit(0)


def main(given: list[str]) -> None:
    """Judge the model that the arguments name and write what was found, after each part."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--onnx", action="store_true")
    parser.add_argument("--part", action="append", help="judge this one only; may be given again")
    parser.add_argument("--full", action="append", default=[], help="a kind of which there are enough")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(given)
    warnings.filterwarnings("ignore")
    logging.disable(logging.CRITICAL)
    torch.backends.cudnn.allow_tf32 = False  # rules of eleven bits would hide what is wrong
    facts: record.Facts = {}

    def write() -> None:
        arguments.out.write_text(json.dumps(facts))

    try:
        found = made(arguments.model)
        if found.kind in arguments.full:
            raise LeftOut(f"enough of its kind: {found.kind}")
    except LeftOut as error:
        facts["left_out"] = str(error)
        write()
        return
    found.model.to(arguments.device)
    found = Made(
        found.model, {n: t.to(arguments.device) for n, t in found.inputs.items()}, found.kind, found.plan
    )
    facts |= {
        "kind": found.kind,
        "plan": found.plan,
        "inputs": {n: list(t.shape) for n, t in found.inputs.items()},
    }
    ways: dict[str, record.Facts] = {}
    facts["parts"] = ways
    asked = arguments.part or [*parts_of(found), *(["onnx"] if arguments.onnx else [])]
    for name in [n for n in parts_of(found) if n in asked]:
        ways[name] = {"crash": "the process died"}
        write()
        try:
            ways[name] = part(found, "training" in name, "channels-last" in name)
        except Exception as error:  # noqa: BLE001 - whatever it raises is the finding
            ways[name] = {"crash": _line(error)}
        write()
    if "onnx" in asked:
        ways["onnx"] = {"crash": "the process died"}
        write()
        try:
            ways["onnx"] = exported(found)
        except Exception as error:  # noqa: BLE001 - whatever it raises is the finding
            ways["onnx"] = {"crash": _line(error)}
        write()
    rivals = [n for n in ("forward", "training") if arguments.peer and n in ways]
    for name in [n for n in rivals if "left_out" not in ways[n]]:
        ways[name] = {**ways[name], **rival(found, name == "training")}
        write()
