"""The shared fixtures do what they promise."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._decomp import core_aten_decompositions
from torch._ops import OpOverload
from torch.export import exported_program

from tests import conftest, lighter
from tilewright.options import Options
from tilewright.runtime.cpu import toolchain
from tilewright.runtime.stats import STATS, Stats
from tilewright.runtime.store.cache import ContentStore


def test_every_test_has_an_empty_cache_of_its_own() -> None:
    place = Path(os.environ["TILEWRIGHT_CACHE_DIR"])
    assert place.is_dir() and not list(place.iterdir())
    assert torch.get_num_threads() == 2


def test_golden_refuses_and_explains(
    golden: Callable[[str, str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    if request.config.getoption("--update-goldens"):
        pytest.skip("goldens are being rewritten")
    monkeypatch.setattr(conftest, "GOLDENS", tmp_path)
    with pytest.raises(pytest.fail.Exception, match="no golden"):
        golden("a", "text")
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    golden("a", "one\ntwo")
    with pytest.raises(pytest.fail.Exception, match=r"\+three"):
        golden("a", "one\nthree")


@pytest.mark.parametrize("turn", [1, 2])
def test_counters_start_at_zero(turn: int) -> None:
    STATS.fallbacks += 1
    assert STATS == Stats(fallbacks=1), f"turn {turn}"


def test_nobody_listens_to_torchs_structured_trace() -> None:
    """It would make every captured graph up as text."""
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(3))
    assert not logging.getLogger("torch.__trace").handlers


def _kernels(ops: list[OpOverload]) -> list[tuple[dict[str, str], bool]]:
    """Which kernels ops have, by what they are, and whether they have a rule for fake tensors."""
    named = [
        {str(k): f"{type(f)} {getattr(f, '__name__', '')}" for k, f in op.py_kernels.items()} for op in ops
    ]
    return [(names, lighter._has_fake_rule(op)) for names, op in zip(named, ops, strict=True)]


def test_exporting_registers_what_torch_registers() -> None:
    assert exported_program._override_composite_implicit_decomp is lighter._overridden
    cia, _ = exported_program._split_decomp_table_to_cia_and_python_decomp(core_aten_decompositions())
    ops = list(cia)
    with lighter.OVERRIDDEN(cia):
        torchs = _kernels(ops)
    after = _kernels(ops)  # torch forgets the rule of one op that it had before
    with lighter._overridden(cia):
        ours = _kernels(ops)
    assert (ours == torchs) and (_kernels(ops) == after) and len(ours) > 100


TEXT = '#include "kernel.h"\nextern "C" __attribute__((visibility("default"))) int f() { return tw::minimum(%d, 50); }'


def test_libraries_are_built_once_and_are_what_users_get(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(number: int) -> bytes:
        store = ContentStore(tmp_path / str(len(list(tmp_path.iterdir()))))
        return toolchain.build_texts(
            [TEXT % number], toolchain.host_target().compiler_flags, store, Options()
        ).read_bytes()

    first, second, other = made(7), made(7), made(8)
    assert first == second != other
    monkeypatch.setattr(toolchain, "_run_compiler", lighter.RUN_COMPILER)
    assert made(7) == first and made(8) == other
