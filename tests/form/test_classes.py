"""Which axes become one loop, which folds are computed twice, what is refused."""

from __future__ import annotations

import pytest
import torch
from tests.support.corpus import Case, gram, qkv_heads, rope, softmax_plus_transpose
from tests.support.cpp_harness import host_target
from tests.support.lowered import form_of
from tests.support.one_kernel import capture, one_kernel

from tilewright.analysis.size_hints import NO_HINTS
from tilewright.errors import IllegalSchedule
from tilewright.form.classes import make_form
from tilewright.form.companions import with_companions
from tilewright.ir.dtype import bool_
from tilewright.ir.expr import Expr, const, walk
from tilewright.ir.form import Form
from tilewright.ir.program import Loop
from tilewright.ir.schedule import ClassPlan, Reductions, Role, Schedule, Sized, Tiling
from tilewright.ir.sizes import dims
from tilewright.lower.lower import lower
from tilewright.schedule.cpu.vectors import vector_schedule


def schedule_of(form: Form, *roles: tuple[int, Role], **more: object) -> Schedule:
    """Roles by position in `form.classes()`."""
    classes = form.classes()
    return Schedule(Tiling(tuple(ClassPlan(classes[n], role) for n, role in roles))).changed(**more)


def loops(form: Form, online: bool) -> dict[str, int]:
    """Loops per class under the heuristic roles, one lane at a time."""
    made = vector_schedule(form, host_target(), NO_HINTS)
    plain = tuple(ClassPlan(c.axis, c.role) for c in made.tiling.classes)
    program = lower(form, Schedule(Tiling(plain), Reductions(online=online)))
    count: dict[str, int] = {}
    for s in program.statements():
        if isinstance(s, Loop):
            count[s.axis.name] = count.get(s.axis.name, 0) + 1
    return count


SOFTMAX = Case("softmax", lambda x: torch.softmax(x, -1), ((12, 64),))


def test_classes_of_softmax_join_through_the_input() -> None:
    form = form_of(SOFTMAX)
    assert len(form.classes()) == 2
    assert {f.reduce for f in form.folds.values()} == {(form.classes()[1],)}


def test_classes_of_a_product_with_itself_stay_apart() -> None:
    form = form_of(Case("gram", lambda x: (x[:, None, :] * x[None, :, :]).sum(-1), ((9, 20),)))
    (fold,) = form.folds.values()
    assert len(set(fold.kept)) == 2 and len(form.classes()) == 3


def test_classes_of_normalised_rows_clone_the_norm() -> None:
    form = form_of(Case("gram", gram, ((9, 20),)))
    assert len(form.folds) == 3, "the norm of row i, the norm of row j, the product"


def test_classes_of_softmax_and_its_transpose_do_not_cross() -> None:
    form = form_of(Case("both", softmax_plus_transpose, ((20, 20),)))
    assert len(form.folds) == 4
    for f in form.folds.values():
        assert not set(f.kept) & set(f.reduce)


def test_classes_of_rotated_tables_are_not_joined_to_positions() -> None:
    form = form_of(Case("rope", rope, ((3, 4, 16), (4, 16), (4, 16))))
    (out,) = form.outputs
    assert [dims.static(a.extent) for a in out.kept] == [3, 4, 16]


def test_views_refine_to_common_classes_with_symbolic_sizes() -> None:
    dynamic = {0: "n", 2: "h", 3: "w"}
    norm = Case("g", lambda x, w: torch.nn.functional.group_norm(x, 4, w), ((2, 8, 6, 5), (8,)), (dynamic,))
    names = [repr(a.extent) for a in form_of(norm, dynamic=True).classes()]
    assert len(names) == 4 and names[1:3] == ["4", "2"], (
        "batch, group, channel in the group, and height x width"
    )
    plain = Case("g", lambda x: torch.nn.functional.group_norm(x, 4), ((2, 8, 6, 5),), (dynamic,))
    assert len(form_of(plain, dynamic=True).classes()) == 2, "without weights memory sees rows"


def test_merge_makes_one_loop_of_what_memory_sees_as_one() -> None:
    form = form_of(Case("add", lambda x, y: x + y, ((3, 4, 5), (3, 4, 5))))
    assert [dims.static(a.extent) for a in form.classes()] == [60]


@pytest.mark.parametrize(
    ("case", "apart", "online"),
    [
        (SOFTMAX, 3, 2),
        (Case("rms", lambda x: x * torch.rsqrt((x * x).mean(-1, keepdim=True)), ((12, 64),)), 2, 2),
        (Case("norm", lambda x: torch.nn.functional.layer_norm(x, (64,)), ((12, 64),)), 3, 2),
        (Case("lse", lambda x: (x - x.amax(-1, keepdim=True)).exp().sum(-1).log() + x.amax(-1), ((12, 64),)), 2, 1),
        (Case("guarded_lse", lambda x: torch.logsumexp(x, -1), ((12, 64),)), 2, 1),
        (Case("squares", lambda x: _moments_of_e(x), ((12, 64),)), 2, 1),
        (Case("entropy", lambda x: _entropy(x), ((12, 64),)), 2, 1),
    ],
    ids=lambda v: v.name if isinstance(v, Case) else str(v),
)  # fmt: skip
def test_passes_without_and_with_transport(case: Case, apart: int, online: int) -> None:
    form = form_of(case)
    (streamed,) = {f.reduce[0].name for f in form.folds.values()}
    assert loops(form, False)[streamed] == apart
    assert loops(with_companions(form), True)[streamed] == online


def _moments_of_e(x: torch.Tensor) -> torch.Tensor:
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e.sum(-1) + (e * e).sum(-1)


def _entropy(x: torch.Tensor) -> torch.Tensor:
    d = x - x.amax(-1, keepdim=True)
    e = torch.exp(d)
    return e.sum(-1).log() - (e * d).sum(-1) / e.sum(-1)


def test_attention_as_written_has_three_passes_and_two_with_transport() -> None:
    case = Case("a", lambda q, k, v: _attention(q, k, v), ((9, 8), (16, 8), (16, 8)))
    form = form_of(case)
    keys = next(a for a in form.classes() if dims.static(a.extent) == 16)
    assert loops(form, False)[keys.name] == 3
    assert loops(form, True)[keys.name] == 2


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    s = (q[:, None, :] * k[None, :, :]).sum(-1)
    return (torch.softmax(s, -1)[:, :, None] * v[None, :, :]).sum(1)


def test_refusal_fold_over_a_grid_class() -> None:
    form = form_of(SOFTMAX)
    with pytest.raises(IllegalSchedule, match="no reduction runs over a grid class"):
        lower(form, schedule_of(form, (0, Role.GRID), (1, Role.GRID)))


def test_refusal_kept_class_inside_the_reduced_one() -> None:
    form = form_of(SOFTMAX)
    with pytest.raises(IllegalSchedule, match="outside those it reduces"):
        lower(form, schedule_of(form, (1, Role.STREAMED), (0, Role.STREAMED)))


def test_refusal_class_without_a_role() -> None:
    form = form_of(SOFTMAX)
    with pytest.raises(IllegalSchedule, match="every class has a role"):
        lower(form, schedule_of(form, (0, Role.GRID)))


def test_refusal_of_fetching_for_a_next_grid_point_where_there_is_none() -> None:
    form = form_of(SOFTMAX)
    made = schedule_of(form, (0, Role.STREAMED), (1, Role.STREAMED))
    lower(form, made)
    with pytest.raises(IllegalSchedule, match="a next grid point"):
        lower(form, made.changed(next_point=(Sized(0, const(True, bool_)),)))


def test_refusal_scan_out_of_order() -> None:
    form = form_of(Case("cumsum", lambda x: torch.cumsum(x, -1), ((4, 32),)))
    with pytest.raises(IllegalSchedule, match="a scan runs in order"):
        lower(form, schedule_of(form, (0, Role.GRID), (1, Role.STREAMED)))


def test_refusal_more_clones_than_allowed() -> None:
    graph = capture(Case("gram", gram, ((9, 20),)), False)
    with pytest.raises(IllegalSchedule, match="read at its own classes"):
        make_form(one_kernel(graph), graph.layouts, clones=0)


def test_heads_of_a_fused_projection_make_one_form() -> None:
    form = form_of(Case("qkv", qkv_heads, ((2, 10, 48),), ({0: "b", 1: "s"},)), dynamic=True)
    assert len(form.outputs) == 1 and len(form.folds) == 4


def test_what_classes_see_of_an_expression_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joining, refining and merging ask the same of the same expressions, form after form."""
    graph = capture(SOFTMAX, False)
    kernel = one_kernel(graph)
    make_form(kernel, graph.layouts)
    walked: list[Expr] = []

    def noted(e: Expr) -> tuple[Expr, ...]:
        walked.append(e)
        return walk(e)

    monkeypatch.setattr("tilewright.form.classes.walk", noted)
    monkeypatch.setattr("tilewright.ir.form.walk", noted)
    make_form(kernel, graph.layouts)
    assert len(walked) <= 2 * len(kernel.ops)
