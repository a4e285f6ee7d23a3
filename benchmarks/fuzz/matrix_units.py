"""Whether a result errs only since matrix units cut sums off where eager rounds them.

Products of fp32 made of pieces are sums of at most STEPS parts in a matrix unit, each cut off at the 24th bit. Errors
that are all of one sign do not cancel in what is summed of such products, as eager's roundings do. It is that, and not
a fault of the kernels, if both hold: the same program is right where its products of fp32 are rounded, and the error is
no larger than STEPS units of what is exact."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

from torch import Tensor

from tilewright import compiler
from tilewright.options import Options
from tilewright.place import Place
from tilewright.target import Target

UNITS = "matrix units"
"""The kind of a result that errs only so: counted, and no finding."""
STEPS = 8
"""Parts of a sum in a matrix unit: blocks of 128 keys, 16 at a time."""
_UNIT = 2.0**-23


@contextmanager
def rounded_products() -> Iterator[None]:
    """Compile for a machine whose matrix units take no fp32."""
    plain = compiler.machine_of

    def without(place: Place, options: Options) -> Target:
        found = plain(place, options)
        return replace(found, matrix_units=tuple(u for u in found.matrix_units if u.operand != "f32"))

    with mock.patch.object(compiler, "machine_of", without):
        yield


def is_small(ours: Tensor, exact: Tensor) -> bool:
    """Whether the error is within what cutting off makes of one product."""
    error, size = ((x.double() ** 2).mean().sqrt() for x in (ours.double() - exact, exact))
    return bool(error <= STEPS * _UNIT * size)


def of_pieces(options: Mapping[str, object]) -> bool:
    """Whether such products are made at all: not where all contractions are the library's, nor in TF32."""
    return options.get("contractions") != "library" and not options.get("tf32")
