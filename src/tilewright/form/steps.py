"""Changes of forms by name, so that a schedule says which led to the form that it is for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from tilewright.analysis.size_hints import SizeHints
from tilewright.ir.expr import Axis
from tilewright.ir.form import Form, FormStep
from tilewright.target import Target

from .any_as_int import any_as_int
from .companions import with_companions
from .exp2 import unscale_maxima, use_erfc, use_log2
from .lane_softmax import in_accesses
from .products.mixed_heads import write_out_mixtures
from .products.part_sums import in_part_sums
from .products.quick_tanh import use_quick_tanh
from .products.unit_row import with_unit_row
from .row_parts import in_row_parts
from .sides.join_narrow import join_narrow
from .sides.join_words import join_words
from .sides.merge_sides import merge_sides
from .sides.pack_rows import pack_rows
from .sides.walk_sums import walk_sums
from .unrolled_sums import UNROLL, unroll_sums

Numbers = Mapping[Axis, int]
NONE: Numbers = MappingProxyType({})

STEPS: Mapping[str, Callable[[Form, Target, SizeHints, Numbers], Form]] = {
    "any_as_int": lambda form, target, hints, numbers: any_as_int(form),
    "in_accesses": lambda form, target, hints, numbers: in_accesses(form, numbers),
    "in_part_sums": lambda form, target, hints, numbers: in_part_sums(form),
    "in_row_parts": lambda form, target, hints, numbers: in_row_parts(form, target),
    "join_narrow": lambda form, target, hints, numbers: join_narrow(form),
    "join_words": lambda form, target, hints, numbers: join_words(form),
    "merge_sides": lambda form, target, hints, numbers: merge_sides(form),
    "pack_rows": lambda form, target, hints, numbers: pack_rows(form, numbers),
    "unscale_maxima": lambda form, target, hints, numbers: unscale_maxima(form),
    UNROLL: lambda form, target, hints, numbers: unroll_sums(form, numbers),
    "use_erfc": lambda form, target, hints, numbers: use_erfc(form),
    "use_log2": lambda form, target, hints, numbers: use_log2(form),
    "use_quick_tanh": lambda form, target, hints, numbers: use_quick_tanh(form),
    "walk_sums": lambda form, target, hints, numbers: walk_sums(form, numbers),
    "write_out_mixtures": lambda form, target, hints, numbers: write_out_mixtures(form),
    "with_companions": lambda form, target, hints, numbers: with_companions(form),
    "with_unit_row": lambda form, target, hints, numbers: with_unit_row(form, target, hints),
}
"""Each keeps the meaning, and gives the form itself where it finds nothing to change."""


def take(name: str, form: Form, target: Target, hints: SizeHints, numbers: Numbers = NONE) -> Form:
    """`form` after the step `name`, which it remembers; itself where that changes nothing."""
    made = STEPS[name](form, target, hints, numbers)
    given = tuple((a.name, n) for a, n in numbers.items())
    return form if made is form else made.after(FormStep(name, given))


def take_again(steps: tuple[FormStep, ...], form: Form, target: Target, hints: SizeHints) -> Form:
    """`form` after steps that were remembered. Raises KeyError for a step, or a class, that there is not."""
    for step in steps:
        classes = {a.name: a for a in form.classes()}
        form = take(step.name, form, target, hints, {classes[c]: n for c, n in step.numbers})
    return form
