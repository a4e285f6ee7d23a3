"""Reads files of exported programs: what they hold is looked at before torch's loader, which brings Dynamo, sees it,
and what they call before anything of it runs."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Generator, Iterable
from contextlib import contextmanager

import torch
from torch.export.pt2_archive._package import load_pt2

from tilewright.capture.empty_operands import take_empty_operands
from tilewright.capture.exported import Exported, exported
from tilewright.capture.harmless.ops import (
    unknown_calls,
    unknown_calls_given,
    with_growing_offsets,
    without_found_memory,
)
from tilewright.errors import InputError, ModelError, TilewrightError

from .harmless_programs import Harmful, check_archive


def load_program(path: str) -> torch.export.ExportedProgram:
    """The program of a file, by torch's own loader. Raises InputError for a file that is not there, ModelError for one
    that torch cannot load, or that may hold code: the loader would run it."""
    if not os.path.isfile(path):
        raise InputError("no such file", phase="input", place=path, hint="`torch.export.save` writes one")
    try:
        check_archive(path)
    except Harmful as why:
        raise ModelError(
            f"this program may run code when torch loads it: {why}", phase="input", place=path,
            hint="if you trust who made it, compile what torch.export.load makes of it",
        ) from why  # fmt: skip
    except Exception as error:  # whatever torch's reader raises of a file that is none
        raise _not_loaded(path, error) from error
    try:
        with warnings.catch_warnings(), _silent("torch.export", "torch._export.serde.serialize"):
            warnings.simplefilter("ignore")
            # `torch.export.load` would look for a file of another kind in what this one refuses
            return load_pt2(path).exported_programs["model"]
    except Exception as error:  # whatever torch's loader raises of a file that is none
        raise _not_loaded(path, error) from error


@contextmanager
def _silent(*names: str) -> Generator[None]:
    """Without what torch logs, with a stack, before it raises, and where it takes another way."""
    loggers = [logging.getLogger(name) for name in names]
    for logger in loggers:
        logger.addFilter(_nothing)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(_nothing)


def captured_program(program: torch.export.ExportedProgram, path: str) -> Exported:
    """The functional graph of a file's program. Raises ModelError where it calls what may reach memory that is not its
    own, or where its parts do not fit each other."""
    try:
        made = exported(program)
    except TilewrightError as error:
        error.place = error.place or path
        raise
    except Exception as error:  # whatever ops and torch's passes raise of operands that do not fit
        raise ModelError(
            f"torch's passes refuse this program: {_first_line(error)}", phase="capture", place=path,
            hint="see that its weights have the sizes that its ops take; export it again with this version of torch",
        ) from error  # fmt: skip
    _refuse(unknown_calls(made.gm), path)
    without_found_memory(made.gm)
    with_growing_offsets(made.gm)
    take_empty_operands(made.gm)
    return made


def check_as_given(program: torch.export.ExportedProgram, path: str) -> None:
    """Raise ModelError unless torch may run the program as it stands in its file."""
    _refuse(unknown_calls_given(program.graph_module), path)
    captured_program(program, path)


def _refuse(unknown: Iterable[str], path: str) -> None:
    for name in unknown:
        raise ModelError(
            "this program may read or write memory that is not its own", phase="input", place=path, op=name,
            hint="if you trust who made it, compile what torch.export.load makes of it",
        )  # fmt: skip


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _not_loaded(path: str, error: Exception) -> ModelError:
    return ModelError(
        f"torch cannot load this program: {_first_line(error)}", phase="input", place=path,
        hint="write it again with torch.export.save and this version of torch",
    )  # fmt: skip


def _nothing(record: logging.LogRecord) -> bool:
    del record
    return False
