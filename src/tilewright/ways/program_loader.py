"""Reads files of exported programs: what they hold is looked at before torch's loader, which brings Dynamo, sees it."""

from __future__ import annotations

import logging
import os
import warnings

import torch
from torch.export.pt2_archive._package import load_pt2

from tilewright.errors import InputError, ModelError

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
    said_twice = logging.getLogger("torch.export")
    said_twice.addFilter(_nothing)  # what it logs with a stack before it raises
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # `torch.export.load` would look for a file of another kind in what this one refuses
            return load_pt2(path).exported_programs["model"]
    except Exception as error:  # whatever torch's loader raises of a file that is none
        raise _not_loaded(path, error) from error
    finally:
        said_twice.removeFilter(_nothing)


def _not_loaded(path: str, error: Exception) -> ModelError:
    said = next(iter(str(error).splitlines()), type(error).__name__)
    return ModelError(
        f"torch cannot load this program: {said}", phase="input", place=path,
        hint="write it again with torch.export.save and this version of torch",
    )  # fmt: skip


def _nothing(record: logging.LogRecord) -> bool:
    del record
    return False
