"""The benchmark's masks of data: what contestants compute is the same, and what our compiler makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from benchmarks.attention import __main__ as program
from benchmarks.attention import masked, turn
from benchmarks.attention.peers import FLEX, OURS, UNTRIMMED
from benchmarks.attention.workloads import Sizes
from benchmarks.record import Facts
from tests.end_to_end.attention.data_masks import listed
from tests.support.triton.absent_gpu import compiled

CPU = torch.device("cpu")
PLACES = 512


@pytest.mark.parametrize("name", masked.CASES)
def test_everybody_gets_the_same_mask(name: str) -> None:
    case = masked.CASES[name]
    torch.manual_seed(0)
    module, data = case.module(), case.data(PLACES)
    rule, i = module.rule(data), torch.arange(PLACES)
    shown = torch.stack(
        [rule(torch.tensor(b), torch.tensor(0), i[:, None], i[None, :]) for b in range(case.batch)]
    )
    seen = module.seen(data, PLACES).expand(case.batch, 1, PLACES, PLACES)
    assert torch.equal(seen[:, 0], shown)
    assert bool(seen.any(-1).all())  # a row that sees nothing would be NaN everywhere
    assert 0 < seen.float().mean() < 0.5


def test_a_quarter_of_the_blocks_is_visible() -> None:
    torch.manual_seed(0)
    flags = masked.CASES["flags"].data(8192)
    assert flags.shape == (64, 64) and abs(float(flags.float().mean()) - masked.SHARE) < 0.02


@pytest.mark.filterwarnings("ignore:flex_attention called without")  # compiled on GPUs only
@pytest.mark.parametrize("name", ["flags", "lengths"])
def test_a_mask_is_a_row(name: str) -> None:
    sizes = Sizes(2 * masked.BLOCK, heads=2, depth=8)
    row, made = masked.row(name, sizes, torch.float32, CPU, float("inf")), turn.Made()
    with torch.no_grad():
        turn.build_own_ahead(row, float("inf"))
        turn.build(row, list(row.peers), made, CPU, 1)
        facts = turn.finish(row, made, CPU, 1, rounds=5, seconds=0.01)
    found: dict[str, Facts] = facts["contestants"]  # type: ignore[assignment]
    assert set(found) == {FLEX, masked.SDPA, OURS, UNTRIMMED}
    assert all(item["accuracy"]["passed"] for item in found.values()), found  # type: ignore[index,call-overload]
    assert {who for who, item in found.items() if item.get("mask_ms")} == {FLEX, masked.SDPA}
    assert turn.best_peer(facts) == min(found[who]["median_ms"] for who in (FLEX, masked.SDPA))  # type: ignore[type-var]
    assert "(mask " in turn.table("", {name: facts})


def test_a_wrong_mask_is_seen() -> None:
    row = masked.row("in order", Sizes(2 * masked.BLOCK, 2, 8), torch.float32, CPU, float("inf"))
    *some, ids = row.workload.inputs
    with torch.no_grad():
        right = row.workload.target(*some, ids)  # type: ignore[operator]
        wrong = row.workload.target(*some, ids.roll(1))  # type: ignore[operator]
        verdicts = row.judge({"right": (right,), "wrong": (wrong,)})
    assert verdicts["right"]["passed"] and not verdicts["wrong"]["passed"]


@pytest.mark.parametrize(
    ("name", "loops"), [("flags", 2), ("interleaved", 2), ("in order", 2), ("lengths", 0)]
)
def test_masks_with_holes_get_lists(name: str, loops: int) -> None:
    """At the sizes of the benchmark, as the model chooses; without trimming there is one kernel."""
    case = masked.CASES[name]
    inputs = [*Sizes(8192, 16, 128, case.batch).inputs("vanilla", layout="bhsd"), case.data(8192)]
    for options, wanted in ({"contractions": "modelled"}, loops), (masked.WAYS[UNTRIMMED], 0):
        with torch.no_grad():
            made = compiled(
                case.module().eval(), inputs, **{key: str(value) for key, value in options.items()}
            )
        assert len(listed(made.kernels[-1].program)) == wanted
        assert (len(made.kernels) > 1) == bool(wanted)


def test_the_part_runs_through(tmp_path: Path) -> None:
    given = [
        "--device=cpu",
        "--masked-seq=256",
        "--masked-heads=2",
        "--depth=8",
        "--seconds=0.01",
        "--rounds=5",
    ]
    given += [f"--onnx={tmp_path}", "--child=documents interleaved", f"--child-json={tmp_path / 'a.json'}"]
    assert program.main(given) == 0
    facts = json.loads((tmp_path / "a.json").read_text())
    (row,) = facts["rows"]
    assert (row["part"], row["core"], row["queries"]) == ("documents", "interleaved", 256)
    assert row["contestants"][OURS]["accuracy"]["passed"]
    shown = program.summary({"documents interleaved": facts}, CPU)
    assert "interleaved 256 float32" in shown and "wanted figures" not in shown


def test_names_belong_to_parts() -> None:
    def items(*given: str) -> list[str]:
        return program.children(program.options(["--device=cpu", *given]))

    assert items("--parts=documents") == [f"documents {name}" for name in masked.CASES]
    assert items("--parts=core,documents", "--only=h2o", "--only=flags") == ["core h2o", "documents flags"]
    assert items("--parts=prefill") == ["prefill h2o"]
