"""Delta debugging: the smallest relative of a program and its setting that fails in the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.fuzz.judge import Failure, Setting
from benchmarks.fuzz.program import Given, Program, function

Case = tuple[Program, Setting]
Judge = Callable[[Program, Setting], Failure | None]


def shrunk(
    program: Program, setting: Setting, failure: Failure, judge: Judge, seconds: float
) -> tuple[Case, Failure]:
    """The smallest failing case that is found in time, and how it fails."""
    limit = time.monotonic() + seconds
    case, found = (program, setting), failure
    tried: set[str] = set()
    again = True
    while again:
        again = False
        for smaller in _smaller(*case):
            key = f"{smaller[0].source()}{smaller[0].givens}{smaller[0].sizes}{smaller[1]}"
            if key in tried:
                continue
            tried.add(key)
            if time.monotonic() > limit:
                return case, found
            if not _runs(smaller[0]):
                continue
            verdict = judge(*smaller)
            if verdict is not None and alike(verdict, failure):
                case, found, again = smaller, verdict, True
                break
    return case, found


def alike(a: Failure, b: Failure) -> bool:
    """Whether two failures are of one kind."""
    return a.kind == b.kind and (
        a.kind == "wrong" or a.text.split(":")[0] == b.text.split(":")[0] or a.kind == "layout"
    )


def _runs(program: Program) -> bool:
    try:
        function(program.source())(*program.inputs(0))
    except Exception:  # noqa: BLE001 - a relative that is no program
        return False
    return True


def _smaller(program: Program, setting: Setting) -> Iterator[Case]:
    """Relatives, those that lose most first."""
    count = len(program.statements)
    if len(program.outputs) > 1:
        for name in program.outputs:
            yield pruned(replace(program, outputs=(name,))), setting
    for k in range(count - 1, 0, -1):
        made = program.statements[k - 1].made
        if made and len(program.statements[k - 1 :]) > 1:
            yield pruned(replace(program, statements=program.statements[:k], outputs=made[:1])), setting
    if len(program.outputs) > 1:
        for name in program.outputs:
            yield pruned(replace(program, outputs=tuple(n for n in program.outputs if n != name))), setting
    for k in range(count):
        yield from ((made, setting) for made in _without(program, k))
    yield from _plainer(program, setting)


def _without(program: Program, k: int) -> Iterator[Program]:
    """Without statement `k`: what it made is an operand of it, another value of that shape, or a new input."""
    gone = program.statements[k]
    rest = program.statements[:k] + program.statements[k + 1 :]
    if not gone.made:
        yield pruned(replace(program, statements=rest))
        return
    values = _values(program)
    if len(gone.made) > 1 or gone.made[0] not in values:
        return
    value = values[gone.made[0]]
    for other in gone.operands:
        if values[other].shape == value.shape and values[other].dtype == value.dtype:
            yield pruned(_renamed(replace(program, statements=rest), gone.made[0], other))
    named = {n: s for s, n in program.sizes.items()}
    sizes = tuple(named.get(n, n) for n in value.shape)
    bound = 1 + int(value.max()) if value.numel() and value.dtype == torch.int64 else 2
    name = f"x{max(int(g.name[1:]) for g in program.givens) + 1}"
    given = Given(name, sizes, str(value.dtype).removeprefix("torch."), grad=value.requires_grad, bound=bound)
    made = replace(program, statements=rest, givens=(*program.givens, given))
    yield pruned(_renamed(made, gone.made[0], name))


def _values(program: Program) -> dict[str, Tensor]:
    """Every value of a program, as it is at the end."""
    text = program.source().rsplit("return", 1)[0] + "return (locals(),)\n"
    found = function(text)(*program.inputs(0))[0]
    assert isinstance(found, dict)
    return {n: v for n, v in found.items() if isinstance(v, Tensor)}


def _renamed(program: Program, old: str, new: str) -> Program:
    def name(n: str) -> str:
        return new if n == old else n

    statements = tuple(replace(s, operands=tuple(map(name, s.operands))) for s in program.statements)
    return replace(program, statements=statements, outputs=tuple(dict.fromkeys(map(name, program.outputs))))


def pruned(program: Program) -> Program:
    """Without what no output needs; statements that write are kept."""
    needed = set(program.outputs)
    kept = []
    for s in reversed(program.statements):
        if not s.made or needed & set(s.made):
            kept.append(s)
            needed |= set(s.operands)
    makes = {n for s in kept for n in s.made} | {g.name for g in program.givens}
    kept = [s for s in kept if all(n in makes for n in s.operands)]
    return replace(
        program, statements=tuple(reversed(kept)), givens=tuple(g for g in program.givens if g.name in needed)
    )


def _plainer(program: Program, setting: Setting) -> Iterator[Case]:
    """With fewer options, plainer inputs and smaller sizes."""
    for name in setting.options:
        yield program, replace(setting, options={n: v for n, v in setting.options.items() if n != name})
    if setting.training:
        yield program, replace(setting, training=False)
    if setting.dynamic:
        yield replace(program, later={}), replace(setting, dynamic=False)
    if setting.schedules:
        yield program, replace(setting, schedules=0)
    for k, g in enumerate(program.givens):
        for plainer in (replace(g, layout="contiguous"), replace(g, grad=False), replace(g, dtype="float32")):
            if plainer != g and not (plainer.dtype != g.dtype and g.dtype in ("int64", "bool")):
                yield (
                    replace(program, givens=(*program.givens[:k], plainer, *program.givens[k + 1 :])),
                    setting,
                )
    for name, size in program.sizes.items():
        for less in (2, size // 2, size - 1):
            if 1 < less < size and less not in program.sizes.values():
                yield replace(program, sizes={**program.sizes, name: less}), setting
    for name, size in program.sizes.items():
        used = {s for g in program.givens for s in g.sizes}
        if name in used and not setting.dynamic:
            fixed = tuple(
                replace(g, sizes=tuple(size if s == name else s for s in g.sizes)) for g in program.givens
            )
            yield replace(program, givens=fixed), setting
