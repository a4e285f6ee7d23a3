"""The benchmark of thresholds: what its rounds say together and alone. No figure is judged here."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from benchmarks.thresholds import Figures, Measured, facts, replaced

from tilewright.tuning import thresholds

ROUNDS = ({"4": 2.0, "8": 1.0}, {"4": 1.1, "8": 1.5})


def test_the_best_round_of_each_value_counts() -> None:
    made = Measured("4", ROUNDS, 2)
    assert made.seconds == {"4": 1.1, "8": 1.0} and made.best == "8" and made.loss == 1.1
    assert [made.of_round(k).loss for k in (0, 1)] == [2.0, 1.0]


def test_a_file_has_all_rounds_and_the_load() -> None:
    key = "cpu_cost.instructions_per_second"
    found = Figures({key: [3.0, 5.0]}, {"some": {"one": Measured("4", ROUNDS, 2)}}, [1.0, 2.0, 3.0])
    told = facts(found)
    assert told["load"] == [1.0, 2.0, 3.0]
    assert told["rates"][key]["measured"] == [3.0, 5.0]  # type: ignore[index, call-overload]
    some = told["sweeps"]["some"]  # type: ignore[index, call-overload]
    assert some["loss"] == 1.1 and some["loss_of_rounds"] == [2.0, 1.0]  # type: ignore[index, call-overload]
    assert some["programs"]["one"]["rounds"] == ROUNDS  # type: ignore[index, call-overload]


def test_a_module_imported_inside_reads_the_table_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some are imported by the first compilation, which a sweep does with a value of its own."""
    late = ModuleType("tilewright.imported_late")
    with replaced("CPU_VECTORS", "task_elements", 512):
        vars(late)["CPU_VECTORS"] = thresholds.CPU_VECTORS
        monkeypatch.setitem(sys.modules, late.__name__, late)
        assert vars(late)["CPU_VECTORS"].task_elements == 512
    assert vars(late)["CPU_VECTORS"] is thresholds.CPU_VECTORS
    with replaced("CPU_VECTORS", "task_elements", 1024):
        assert vars(late)["CPU_VECTORS"].task_elements == 1024
