"""Loads before stores, in programs that store over what they load.

Each such store waits until all threads of its block have loaded. One wait is enough for all of them, and all loads are
under way at once, if the stores stand behind the loads. Nothing that is loaded is what another store has left there:
each load stands before the store to its element (`analysis/writes/order`), and here it only gets further ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewright.ir.program import Branch, Compute, Load, Loop, Nest, Stmt, Store, TileProgram


def with_stores_last(program: TileProgram) -> TileProgram:
    """The same meaning, with the stores of each row of loads, computations and stores at its end."""
    return replace(program, body=_sorted(program.body)) if program.over else program


def _sorted(body: Sequence[Stmt]) -> tuple[Stmt, ...]:
    done: list[Stmt] = []
    stores: list[Store] = []
    for s in body:
        match s:
            case Store():
                stores.append(s)
                continue
            case Load() if all(s.buffer != store.buffer for store in stores):
                pass
            case Compute():
                pass
            case Loop() | Nest():
                s = replace(s, body=_sorted(s.body))
                done, stores = [*done, *stores], []
            case Branch():
                s = replace(s, body=_sorted(s.body), orelse=_sorted(s.orelse))
                done, stores = [*done, *stores], []
            case _:
                done, stores = [*done, *stores], []
        done.append(s)
    return (*done, *stores)
