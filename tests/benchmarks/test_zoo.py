"""The zoo's own parts: small configurations, verdicts, figures, and one model through a child."""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from benchmarks.zoo import __main__ as zoo
from benchmarks.zoo.child import captured_otherwise, part
from benchmarks.zoo.draws import Kept, More, Step, Triple, _beside_others, _exchanged, judged, telling
from benchmarks.zoo.models import LeftOut, Made, _checked, made, names
from benchmarks.zoo.roundings import roundings
from benchmarks.zoo.small import PLANS, shrunk

from benchmarks import record


def test_names_come_from_the_packages() -> None:
    found = names()
    assert len(found) > 300 and len(set(found)) == len(found) and "transformers:bert" in found


def test_configurations_shrink_by_the_names_of_their_attributes() -> None:
    from transformers import BertConfig, CLIPConfig

    config = BertConfig()
    shrunk(config, PLANS[0])
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (2, 64, 4)
    assert config.vocab_size == 512 and config.hidden_dropout_prob == 0.0
    both = CLIPConfig()
    shrunk(both, PLANS[1])
    assert both.vision_config.num_hidden_layers == 2 and both.vision_config.hidden_size == 768
    assert both.vision_config.image_size == 64


def test_models_come_with_inputs_or_a_reason() -> None:
    found = made("transformers:bert")
    assert found.kind in ("encoder", "decoder") and not found.pixels and set(found.inputs) == {"input_ids"}
    with pytest.raises(LeftOut, match="KeyError"):
        made("transformers:no such model")


def test_a_tensor_that_fails_is_judged_over_more_steps() -> None:
    exact = torch.linspace(1, 2, 2000).double()

    def trio(ours: float = 0.0, eager: float = 0.0) -> tuple[Step, Step, Step]:
        """Noise of 1e-6, and jumps of an element of ours and of eager's."""
        found = [(exact + 1e-6 * torch.sin((7 + k) * exact)).float() for k in range(2)]
        found[0][3] += ours
        found[1][5] += eager
        return Step(found[:1], [], []), Step(found[1:], [], []), Step([exact], [], [])

    def draws(**jumps: float) -> More:
        def more(name: str, kept: Kept, numbers: Sequence[int]) -> list[list[Triple]]:
            ours, eager, exact = (getattr(s, name) for s in trio(**jumps))
            return [[(ours[k], eager[k], exact[k]) for k in kept]] * len(numbers)

        return more

    def none(*_: object) -> list[list[Triple]]:
        raise AssertionError("nothing is in doubt")

    assert judged("results", trio(), none)["passed"]
    assert judged("results", trio(ours=1e-2), draws(eager=1e-2))["passed"]  # eager meets its own jumps
    assert not judged("results", trio(ours=1e-2), draws(eager=1e-4))["passed"]
    assert not judged("results", trio(ours=1e-2), draws())["passed"]
    nothing = judged("results", (Step([], [], []), *trio(0.0)[1:]), none)
    assert not nothing["passed"] and "0 tensors" in str(nothing["why"])


def test_of_a_hundred_draws_only_what_still_fails_is_kept() -> None:
    exact = torch.linspace(1, 2, 2000).double()
    eager = (exact + 1e-6 * torch.sin(8 * exact)).float()
    bad, lucky = eager + 1e-2, eager.clone()
    lucky[3] += 1e-2
    asked: list[tuple[list[int], int]] = []

    def more(_: str, kept: Kept, numbers: Sequence[int]) -> list[list[Triple]]:
        asked.append((sorted(kept), len(numbers)))
        jumped = eager.clone()
        jumped[5] += 1e-2  # as ours of the second one
        trios: dict[int, Triple] = {0: (bad, eager, exact), 1: (eager, jumped, exact)}
        return [[trios[k] for k in kept]] * len(numbers)

    first = (Step([bad, lucky], [], []), Step([eager, eager], [], []), Step([exact, exact], [], []))
    assert not judged("results", first, more)["passed"]
    assert asked == [([0, 1], 20), ([0], 80), ([0], 300)]


def test_another_shape_is_wrong_over_all_draws() -> None:
    x = torch.randn(2, 3)
    trio = (
        Step([x.t()], [], []),
        Step([x.t().reshape(2, 3)], [], []),
        Step([x.t().reshape(2, 3).double()], [], []),
    )
    same: list[Triple] = [(x.t(), x.t().reshape(2, 3), x.t().reshape(2, 3).double())]
    assert not judged("results", trio, lambda *_: [same] * 5)["passed"]


def test_rows_that_tell_are_kept_of_large_tensors() -> None:
    exact = torch.zeros(3000, 64).double()
    ours, eager = torch.zeros(3000, 64), torch.zeros(3000, 64)
    ours[1234, 5], ours[77, 3], eager[2345, 6] = 1.0, torch.nan, 1.0
    rows = telling(ours, eager, exact)
    assert rows is not None and {77, 1234, 2345} <= set(rows.tolist()) and len(rows) * 64 < 20_000
    again = telling(eager, ours, exact)
    assert again is not None and again.equal(rows)
    assert telling(ours[:200], eager[:200], exact[:200]) is None
    assert telling(ours.reshape(1, -1), eager.reshape(1, -1), exact.reshape(1, -1)) is None


def test_a_program_that_torch_captures_otherwise_is_known() -> None:
    def step(*values: float) -> Step:
        return Step([torch.tensor(values)], [torch.ones(3)], [torch.arange(3)])

    eager, captured = step(1.0, 2.0), step(1.0, 3.0)
    assert captured_otherwise(step(1.0, 3.000001), eager, captured)
    assert not captured_otherwise(step(1.0, 3.2), eager, captured)  # ours is a third one
    assert not captured_otherwise(step(1.0, 3.0), eager, step(1.0, 2.001))  # it is not
    assert not captured_otherwise(step(1.0, torch.nan), eager, captured)
    same = step(1.0, 3.0)
    for wrong in (
        Step(same.results, [torch.zeros(3)], same.buffers),
        Step(same.results, same.gradients, [torch.ones(3).int()]),
    ):
        assert not captured_otherwise(wrong, eager, captured)  # where the two agree
    assert not captured_otherwise(Step([torch.ones(2, 2)], same.gradients, same.buffers), eager, captured)


def test_chance_is_told_by_exchanging_the_roles() -> None:
    exact = torch.linspace(1, 2, 5000).double()

    def one(*errors: float) -> list[torch.Tensor]:
        """A tensor per draw: noise, and one element that errs so much further."""
        draw, made = torch.Generator().manual_seed(sum(map(hash, errors)) % 1000), []
        for error in errors:
            t = (exact + 1e-6 * torch.randn(5000, generator=draw, dtype=torch.float64).clamp(-2, 2)).float()
            t[7] += error
            made.append(t)
        return made

    r = [exact] * 6
    often = one(8e-6, 8e-6, 8e-6, 8e-6, 8e-6, 8e-6)
    assert _exchanged(one(7e-6, 0, 0, 0, 0, 0), one(0, 0, 5e-6, 0, 0, 5e-6), r) is not None
    assert _exchanged(often, one(0, 0, 3e-6, 0, 0, 0), r) is None  # in each draw
    assert _exchanged(one(1e-3, 0, 0, 0, 0, 0), one(0, 0, 5e-6, 0, 0, 5e-6), r) is None  # too far
    assert _beside_others(often, r, [often]) is not None
    assert _beside_others(one(1e-3, 0, 0, 0, 0, 0), r, [often]) is None


class _Odd(torch.nn.Module):
    """Gives other numbers with another seed, or takes no training step."""

    def __init__(self, noise: float) -> None:
        super().__init__()
        self.noise = noise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            raise ValueError("labels must be given")
        return x + self.noise * torch.rand(3)


def test_what_eager_gives_by_chance_or_refuses_is_left_out() -> None:
    inputs = {"x": torch.ones(3)}
    with pytest.raises(LeftOut, match="another seed"):
        _checked(_Odd(1.0), inputs, "encoder", "")
    found = _checked(_Odd(0.0), inputs, "encoder", "")
    facts = part(Made(found.model, inputs, "encoder", ""), training=True, channels_last=False)
    assert facts == {"left_out": "eager: ValueError: labels must be given"}
    assert zoo.outcome(facts) == "left out"


def test_gradients_at_the_edge_of_a_relu_jump_with_eagers_own_rounding() -> None:
    class Edge(torch.nn.Module):
        """An inner sum that cancels, so that its sign is that of its rounding."""

        def __init__(self, edge: bool) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))
            self.edge = edge

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.weight * x
            by_format = x.is_contiguous(memory_format=torch.channels_last)
            noise = (1e-7 if by_format else -1e-7) if self.edge and x.dtype == torch.float32 else -1e-7
            return torch.relu(y - y.detach() + noise)

    inputs = {"x": torch.randn(2, 3, 4, 4)}
    ways = {edge: roundings(Made(Edge(edge), inputs, "vision", ""), False) for edge in (True, False)}
    assert [f["failed"] for f in ways[True].values()] == [1, 0, 0, 0]
    assert [f["failed"] for f in ways[False].values()] == [0, 0, 0, 0]


def test_figures_count_parts() -> None:
    right: record.Facts = {
        "ops": 10,
        "generated": 8,
        "library": {"aten.mm": 2},
        "results": {"passed": True},
        "fallbacks": 0,
    }
    models: dict[str, record.Facts] = {
        "a": {"kind": "encoder", "parts": {"forward": {**right, "cpu_s": 2.0, "inductor_cpu_s": 4.0}}},
        "b": {"kind": "vision", "parts": {"forward": {"crash": "x"}, "training": {**right, "fallbacks": 1}}},
        "c": {"left_out": "why"},
    }
    facts = zoo.summary(models)
    assert facts["models"] == 2 and facts["kinds"] == {"encoder": 1, "vision": 1}
    assert facts["parts"] == {"forward": {"right": 1, "crash": 1}, "training": {"crash": 1}}
    assert facts["library"] == {"aten.mm": 4} and facts["library_of_ops"] == 20
    assert facts["generated_share"] == 0.8 and facts["compile_cpu_over_inductor"] == {"forward": 0.5}
    assert zoo.outcome({"results": {"passed": False, "why": ""}}) == "wrong"


def test_files_and_rivals_are_asked_for_until_enough_were_had(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, list[str]] = {}

    def child(name: str, device: str, flags: list[str], _: float) -> record.Facts:
        asked[name] = flags
        exported: record.Facts = {"left_out": "export: no"} if name == "a" else {"cpu_s": 1.0}
        parts: record.Facts = {"onnx": exported} if "--onnx" in flags else {}
        return {"kind": "vision" if name in "abd" else "audio", "parts": parts}

    monkeypatch.setattr(zoo, "child", child)
    found = zoo.Zoo(6, "cpu", {"onnx": 1, "peer": 0}, {})
    with ThreadPoolExecutor(1) as pool:
        for name in "abcde":
            found.start(pool, name)
            found.take(*found.running)
    assert asked["a"] == asked["b"] == ["--onnx"]  # what torch cannot export does not count
    assert asked["c"] == asked["d"] == asked["e"] == ["--full=vision"]
    assert found.models["d"] == {"left_out": "enough of its kind: vision"}  # in a race
    assert found.places() == 2 and found.kinds() == {"vision": 2, "audio": 2}


def _spin() -> None:
    while True:
        pass


def test_a_model_has_seconds_of_a_processor_not_of_the_clock() -> None:
    context = multiprocessing.get_context("fork")
    idle = context.Process(target=time.sleep, args=(1.5,))
    idle.start()
    assert zoo._waited(idle, 1.0, 1 << 40) == ""
    busy = context.Process(target=_spin)
    busy.start()
    assert zoo._waited(busy, 1.0, 1 << 40) == "not finished after 1 s"


def test_only_what_was_wrong_is_judged_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, list[str]] = {}
    right: record.Facts = {"results": {"passed": True}}

    def child(name: str, device: str, flags: list[str], _: float) -> record.Facts:
        asked[name] = flags
        return {"kind": "audio", "parts": {"training": right}}

    kept: record.Facts = {
        "kind": "audio", "commit": "old",
        "parts": {"forward": right, "training": {"crash": "x"}, "onnx": {"left_out": "y"}},
    }  # fmt: skip
    path = tmp_path / "zoo.json"
    path.write_text(
        json.dumps({"models": {"b": {**kept, "kind": "vision", "parts": {"forward": right}}, "a": kept}})
    )
    monkeypatch.setattr(zoo, "child", child)
    monkeypatch.setattr(zoo, "names", lambda: ["a", "b", "c"])
    monkeypatch.setattr("sys.argv", ["zoo", "--count", "2", "--anew", "--json", str(path)])
    assert zoo.main() == 0
    assert list(asked) == ["a"] and asked["a"][-1] == "--part=training"
    parts = json.loads(path.read_text())["models"]["a"]["parts"]
    assert list(parts) == ["forward", "onnx", "training"]
    assert parts["training"] == {**right, "commit": record.commit()} and "commit" not in parts["forward"]


@pytest.mark.slow
def test_a_model_in_a_child(tmp_path: Path) -> None:
    facts = zoo.child("transformers:bert", "cpu", [], 600)
    assert {p: zoo.outcome(f) for p, f in facts["parts"].items()} == {"forward": "right", "training": "right"}  # type: ignore[union-attr]
    assert json.dumps(facts)
