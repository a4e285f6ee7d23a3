"""What is saved comes back: results, writes, free sizes, names, reports; and what cannot be saved is named."""

from __future__ import annotations

import copy
import errno
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from tests.support.artifacts import Saved, same_results
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import tilewright
from tilewright.artifact.file import container
from tilewright.errors import ArtifactError, InputError, RecompileWarning, UnsupportedError
from tilewright.runtime.stats import STATS


def kept(target: Any, *args: Any, folder: Path, **given: Any) -> Any:
    """The target compiled, saved and loaded."""
    compiled = tilewright.compile(target, **given)
    with torch.no_grad():
        compiled.prepare(args, {})
    tilewright.save(compiled, folder / "x.tw")
    STATS.reset()
    loaded = tilewright.load(folder / "x.tw", rebuild=False)
    assert STATS.graphs == 0
    return loaded


def agree(loaded: Callable[..., Any], eager: Callable[..., Any], *args: Any) -> None:
    """Two calls of both, with what they write."""
    for _ in range(2):
        ours, theirs = copy.deepcopy(args), copy.deepcopy(args)
        with torch.no_grad():
            made, wanted = loaded(*ours), eager(*theirs)
        found, spec = pytree.tree_flatten((made, ours))
        expected, same = pytree.tree_flatten((wanted, theirs))
        assert spec == same
        for a, b in zip(found, expected, strict=True):
            if isinstance(b, Tensor):
                assert a.stride() == b.stride()
                torch.testing.assert_close(a, b, equal_nan=True)
            else:
                assert a == b


def test_a_model_comes_back(small: Saved, tmp_path: Path) -> None:
    (tmp_path / "m.tw").write_bytes(small.data)
    loaded: Any = tilewright.load(tmp_path / "m.tw", rebuild=False)
    eager = copy.deepcopy(small.model)
    for rows in (4, 7, 2):
        x = torch.randn(rows, 8)
        with torch.no_grad():
            assert same_results(loaded(x), eager(x))  # the count of calls goes on
    with torch.no_grad():
        assert same_results(loaded(x=small.x), eager(small.x))
    assert str(loaded.inputs[0]) == "x: float32[batch, 8]"
    assert loaded.coverage.ops > 0 and len(loaded.kernels) == loaded.coverage.kernels
    assert "extern" in loaded.kernels[0].source and loaded.kernels[0].boundary.value
    with pytest.raises(InputError):
        loaded(torch.randn(4, 9))
    with pytest.raises(InputError):
        loaded(small.x, small.x)


def test_two_loaded_models_have_their_own_state(small: Saved, tmp_path: Path) -> None:
    (tmp_path / "m.tw").write_bytes(small.data)
    one, two = cast(Any, [tilewright.load(tmp_path / "m.tw") for _ in range(2)])
    one(small.x)
    assert one(small.x)[1]["calls"] == 4 and two(small.x)[1]["calls"] == 2


def _written(x: Tensor, y: Tensor) -> Tensor:
    x.add_(y)
    return x * 2


def _nested(x: Tensor, y: Tensor) -> Any:
    return {"sum": (x + y, [x * y, None, 3])}


def _aliases(x: Tensor, y: Tensor) -> Any:
    return x, x.t(), y[1:]


@pytest.mark.parametrize("program", [_written, _nested, _aliases])
def test_writes_nesting_and_views(program: Callable[..., Any], tmp_path: Path) -> None:
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    agree(kept(program, x, y, folder=tmp_path), program, x, y)


def test_convolutions_and_products_of_our_own(tmp_path: Path) -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1, groups=32),
        nn.Hardswish(), nn.Conv2d(32, 48, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10),
    ).eval()  # fmt: skip
    x = torch.randn(2, 3, 20, 20)
    agree(kept(net, x, folder=tmp_path), net, x)


@pytest.mark.parametrize("groups", [1, 4])
def test_transposed_convolutions(groups: int, tmp_path: Path) -> None:
    net = nn.Sequential(nn.ConvTranspose2d(16, 16, 3, stride=2, groups=groups), nn.ReLU()).eval()
    x = torch.randn(1, 16, 9, 9)
    agree(kept(net, x, folder=tmp_path), net, x)


def test_weights_that_are_not_frozen(tmp_path: Path) -> None:
    net, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(3, 8)
    loaded = kept(torch.export.export(net, (x,)), x, folder=tmp_path, freeze=False)
    agree(loaded, net, x)


def test_arrays_and_receivers(tmp_path: Path) -> None:
    loaded = kept(lambda x: x * 2 + 1, torch.randn(3, 3), folder=tmp_path)
    found = loaded(np.ones((3, 3), np.float32))
    assert isinstance(found, np.ndarray) and (found == 3).all()
    out = torch.empty(3, 3)
    assert loaded(torch.ones(3, 3), out=out) is out and bool((out == 3).all())


def test_a_size_that_changed_is_free(tmp_path: Path) -> None:
    compiled = tilewright.compile(torch.relu)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RecompileWarning)
        for rows in (3, 5):
            compiled(torch.randn(rows, 2))
    tilewright.save(compiled, tmp_path / "x.tw")
    loaded: Any = tilewright.load(tmp_path / "x.tw")
    assert loaded(torch.ones(9, 2)).shape == (9, 2)


def test_weights_beside_are_a_safetensors_file(tmp_path: Path) -> None:
    net, x = nn.Linear(8, 8), torch.randn(3, 8)
    compiled = tilewright.compile(net.eval(), (x,))
    tilewright.save(compiled, tmp_path / "x.tw", weights="beside")
    read = pytest.importorskip("safetensors.torch").load_file(tmp_path / "x.safetensors")
    assert any(torch.equal(t, net.weight.detach()) for t in read.values())
    agree(tilewright.load(tmp_path / "x.tw", rebuild=False), net, x)
    (tmp_path / "x.safetensors").write_bytes((tmp_path / "x.safetensors").read_bytes()[:-1] + b"x")
    with pytest.raises(ArtifactError, match="changed"):
        tilewright.load(tmp_path / "x.tw", trust=True)


@pytest.mark.parametrize(("weights", "full_at"), [("inside", 1), ("beside", 1), ("beside", 2)])
@pytest.mark.parametrize("earlier", [True, False])
def test_a_full_disk_changes_nothing(
    weights: str, full_at: int, earlier: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever lay there loads as before, its weights too; where nothing lay, nothing does."""
    x, calls = torch.randn(3, 8), [0]
    old, new = (tilewright.compile(nn.Linear(8, 8).eval(), (x,), freeze=True) for _ in range(2))
    if earlier:
        tilewright.save(old, tmp_path / "x.tw", weights=weights)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fsync(handle: int) -> None:
        calls[0] += os.readlink(f"/proc/self/fd/{handle}").startswith(str(tmp_path))  # not the cache's
        if calls[0] == full_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched, pytest.raises(InputError) as refused:
        patched.setattr(os, "fsync", fsync)
        tilewright.save(new, tmp_path / "x.tw", weights=weights)
    assert "No space left on device" in str(refused.value) and refused.value.hint == "make room there"
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    if earlier:
        agree(tilewright.load(tmp_path / "x.tw", rebuild=False), old, x)


def test_a_folder_where_weights_should_lie_is_told_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").mkdir()
    with pytest.raises(InputError, match="it is a folder"):
        tilewright.save(tilewright.compile(torch.relu, (torch.ones(3),)), tmp_path / "x.tw", weights="beside")
    assert not (tmp_path / "x.tw").exists()


def test_what_cannot_be_kept_is_named(tmp_path: Path) -> None:
    w, x = torch.randn(3, 3, requires_grad=True), torch.randn(2, 3)
    step = tilewright.compile(lambda w, x: torch.autograd.grad((x @ w).square().sum(), w)[0], (w, x))
    with pytest.raises(UnsupportedError, match="takes gradients cannot be kept.*where it runs"):
        tilewright.save(step, tmp_path / "step.tw")
    with pytest.raises(InputError, match="compiled yet"):
        tilewright.save(tilewright.compile(torch.relu), tmp_path / "x.tw")
    with pytest.raises(InputError, match="written"):
        tilewright.save(tilewright.compile(torch.relu, (x,)), tmp_path / "no" / "folder" / "x.tw")
    assert not list(tmp_path.iterdir())


def test_two_equal_graphs_are_both_there(tmp_path: Path) -> None:
    """Texts are found by their names, also where two of them are the same."""
    parts = container.Parts()
    assert parts.text("one", [1]) == "one" and parts.text("two", [1]) == "two"
    (tmp_path / "x.tw").write_bytes(container.packed({}, parts, lambda head: container.NO_SEAL))
    assert container.read(tmp_path / "x.tw").text("two") == [1]
