"""Whether a result errs only since matrix units cut sums off where eager rounds them.

A product of fp32 made of pieces is a sum of at most PARTS parts in a matrix unit, each cut off at the 24th bit (the
pieces make six products; the sums of the other five are too small to matter). What is cut off makes sums smaller in
magnitude, so that it does not cancel where eager's roundings do. It is that, and no fault of the kernels, if all hold:
the machine makes such products, the errors have mostly one sign, in no place and on the whole are they larger than
PARTS units of the largest and of the whole result, and the same program is right if the unit rounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch
from torch import Tensor

from tilewright.options import Options
from tilewright.pipeline import compiler
from tilewright.pipeline.place import DevicePlace
from tilewright.target import Target

UNITS = "matrix units"
"""The kind of a result that errs only so: counted and told, not shrunk or written."""
PARTS = 8
"""Parts of a sum in a matrix unit: blocks of 128 keys, 16 at a time."""
ONE_SIGN = 0.5
"""Least share of the error that does not cancel."""
_UNIT = 2.0**-23


@contextmanager
def rounding_units() -> Iterator[None]:
    """Compile for the same machine, but products of fp32 by multiplying and adding, which rounds."""
    plain = compiler.machine_of

    def rounding(place: DevicePlace, options: Options) -> Target:
        found = plain(place, options)
        units = [replace(u, precision="ieee") if u.operand == "f32" else u for u in found.matrix_units]
        return replace(found, matrix_units=tuple(units))

    with mock.patch.object(compiler, "machine_of", rounding):
        yield


def takes_pieces(device: str, options: Mapping[str, object]) -> bool:
    """Whether a machine makes products of fp32 out of pieces, with these options."""
    if device == "cpu" or options.get("contractions") == "library":
        return False
    return compiler.machine_of(DevicePlace(device), Options.make(options)).singles == "bf16x6"


def cuts_off(ours: Tensor, exact: Tensor) -> bool:
    """Whether an error is as small, and of one sign, as what cutting off makes."""
    if ours.dtype is not torch.float32 or not bool(ours.isfinite().all()):
        return False
    error, bound = ours.double() - exact, PARTS * _UNIT
    whole = error.square().mean().sqrt() <= bound * exact.square().mean().sqrt()
    places = error.abs().max() <= bound * exact.abs().max()
    signed = (error * exact.sign()).mean().abs() >= ONE_SIGN * error.abs().mean()
    return bool(whole and places and signed)
