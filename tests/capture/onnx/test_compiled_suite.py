"""ONNX's own backend suite, compiled: a sample in every run, all of it in the long one."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest
from benchmarks.onnx_suite.cases import cases, exclusions, reason_for
from benchmarks.onnx_suite.pool import run_cases
from benchmarks.onnx_suite.run import PASSED, run_case

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the suite itself divides by zero and overflows
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

ONE_OF = 100
"""Share of the cases in the sample."""

ALWAYS = frozenset({
    "test_cast_FLOAT8E4M3FN_to_FLOAT", "test_cast_FLOAT_to_BFLOAT16", "test_attention_4d_padded_kv_bf16",
    "test_identity_sequence", "test_identity_opt", "test_unique_sorted_with_axis_3d", "test_dft_inverse",
    "test_sequence_map_add_1_sequence_1_tensor", "test_optional_has_element_empty_optional_input",
})  # fmt: skip
"""Cases of kinds that once crashed, or that only the fp64 rule passes."""


def test_a_sample_passes(tmp_path: Path) -> None:
    """The rule of choice is the checksum of the name, so that a new onnx changes few of them."""
    sample = [
        c
        for c in cases()
        if c.name in ALWAYS or (zlib.crc32(c.name.encode()) % ONE_OF == 0 and not reason_for(c.name))
    ]
    assert ALWAYS <= {c.name for c in sample} and len(sample) > 20
    outcomes = {c.name: run_case(c, tmp_path) for c in sample}
    assert not {n: o for n, o in outcomes.items() if o.status != PASSED}
    assert sum(o.generated for o in outcomes.values()) > 0.8 * sum(o.ops for o in outcomes.values())


def test_every_exclusion_leaves_something_out() -> None:
    names = [c.name for c in cases()]
    assert not [p.pattern for p, _ in exclusions() if not any(map(p.search, names))]
    assert sum(map(bool, map(reason_for, names))) < 0.1 * len(names)


@pytest.mark.slow
def test_the_whole_suite_passes() -> None:
    names = [c.name for c in cases() if not reason_for(c.name)]
    failed = {n: (o.status, o.detail) for n, o in run_cases(names, 2) if o.status != PASSED}
    assert not failed
