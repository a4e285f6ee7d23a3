"""The recipes of docs/distributed.md: two processes against one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tilewright.accuracy import compare

ROOT = Path(__file__).parents[2]
STEPS = 3

pytestmark = pytest.mark.skipif(
    not dist.is_available() or not dist.is_gloo_available(), reason="torch was built without gloo"
)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def run_two(name: str, folder: Path) -> list[dict[str, list[Tensor]]]:
    """What two processes computed by a recipe."""
    shared = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
    }  # fmt: skip
    command = [sys.executable, "-W", "ignore", "-m", "tests.distributed.worker", name, str(folder)]
    runs = [
        subprocess.Popen(
            command,
            env={**os.environ, **shared, "RANK": str(rank)},
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [run.communicate(timeout=240)[1] for run in runs]
    finally:
        for run in runs:
            run.kill()
    assert [run.returncode for run in runs] == [0, 0], "\n".join(said)[-4000:]
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize(
    ("name", "collectives"),
    [
        ("tensor_parallel", True),
        pytest.param("fully_sharded", False, marks=pytest.mark.slow),
        pytest.param("replicated", False, marks=pytest.mark.slow),
    ],
)
def test_two_processes_against_one(name: str, collectives: bool, tmp_path: Path) -> None:
    first, second = run_two(name, tmp_path)
    facts = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert facts[0] == facts[1], "both processes compiled the same"
    assert facts[0]["kinds"] == ["backward", "forward"] and facts[0]["generated"] > 10
    assert bool(facts[0]["collectives"]) == collectives
    for ours, theirs in zip(first["found"][STEPS:], second["found"][STEPS:], strict=True):
        assert torch.equal(ours, theirs), "replicas are equal bit by bit"
    losses = torch.stack([first["found"][k] / 2 + second["found"][k] / 2 for k in range(STEPS)])
    eager, exact = first["eager"], first["exact"]
    verdicts = [
        compare(losses, torch.stack(eager[:STEPS]), torch.stack(exact[:STEPS])),
        compare(
            *(torch.cat([t.flatten() for t in found[STEPS:]]) for found in (first["found"], eager, exact))
        ),
    ]
    assert all(v.passed for v in verdicts), verdicts
