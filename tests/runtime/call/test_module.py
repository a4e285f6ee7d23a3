"""A compiled module stands where the one that it was made from stood."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import tilewright


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5))


X = torch.linspace(-1, 1, 12).reshape(3, 4)


def test_state_and_mode_are_the_module_s() -> None:
    module = net()
    fast = tilewright.compile(module)
    assert isinstance(fast, nn.Module) and list(fast.state_dict()) == list(module.state_dict())
    assert [p.data_ptr() for p in fast.parameters()] == [p.data_ptr() for p in module.parameters()]
    fast.eval()
    assert not module.training and not module[3].training
    torch.testing.assert_close(fast(X), module(X))
    fast.load_state_dict({k: v + 1 for k, v in module.state_dict().items()})
    torch.testing.assert_close(fast(X), module(X))
    fast.double()
    assert module[0].weight.dtype is torch.float64
    torch.testing.assert_close(fast(X.double()), module(X.double()))


def test_it_is_part_of_a_container() -> None:
    module = net().eval()
    whole = nn.Sequential(tilewright.compile(module), nn.Linear(8, 2)).eval()  # type: ignore[arg-type]
    assert "0.1.running_mean" in whole.state_dict() and len(list(whole.parameters())) == 6
    whole.load_state_dict({k: v * 2 if v.is_floating_point() else v for k, v in whole.state_dict().items()})
    torch.testing.assert_close(whole(X), whole[1](module(X)))
    twin = copy.deepcopy(whole)
    with torch.no_grad():
        module[0].weight.zero_()
    assert not torch.equal(twin(X), whole(X))


def test_it_learns() -> None:
    module = net()[:3]
    twin = copy.deepcopy(module)
    for m in (tilewright.compile(module), twin):
        assert isinstance(m, nn.Module)
        step = torch.optim.SGD(m.parameters(), 0.1)
        m.train()
        m(X).square().sum().backward()
        step.step()
    for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_attributes_are_the_module_s() -> None:
    module = net()
    fast = tilewright.compile(module)
    fast.extra = 5  # type: ignore[attr-defined]
    assert module.extra == 5 and fast.extra == 5 and "extra" in dir(fast)  # type: ignore[attr-defined]
    del fast.extra  # type: ignore[attr-defined]
    assert not hasattr(module, "extra") and not hasattr(fast, "absent")
    seen: list[nn.Module] = []
    fast.apply(seen.append)  # type: ignore[attr-defined]
    assert seen[-1] is module


def test_hooks_run() -> None:
    fast = tilewright.compile(net().eval())
    assert isinstance(fast, nn.Module)
    seen: list[str] = []
    before = fast.register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    after = fast.register_forward_hook(lambda m, args, result: seen.append(type(m).__name__))
    doubled = fast(X)
    before.remove()
    torch.testing.assert_close(doubled, fast(2 * X))
    after.remove()
    fast(X)
    assert seen == ["CompiledModule", "CompiledModule"]


@pytest.mark.parametrize("kind", ["module", "function"])
def test_a_program_around_it_is_traced_through_it(kind: str) -> None:
    inside = tilewright.compile(net().eval() if kind == "module" else torch.sin)

    def around(x: Tensor) -> Tensor:
        y = inside(x * 2)
        assert isinstance(y, Tensor)
        return y + 1

    graphs: list[torch.fx.GraphModule] = []

    def kept(gm: torch.fx.GraphModule, _: object) -> object:
        graphs.append(gm)
        return gm.forward

    torch.testing.assert_close(torch.compile(around, backend=kept, fullgraph=True)(X), around(X))  # type: ignore[arg-type]
    assert len(graphs) == 1
