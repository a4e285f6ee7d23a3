"""`python -m benchmarks.attention.gaps --json FILE`: attention that libraries do not have, beside peers.

Keys wider than values, scores of two products, normalised and rotated queries and keys, mixed heads, sums that
run along keys, keys and values of int8. Contestants are eager, Inductor with its defaults and with max-autotune, and
ours, as a user gets it and (`inside`) with kernels for everything, whatever the model says. All are captured into CUDA
graphs and replayed in turns; a result that breaks the fp64 rule does not count. Extra memory is the peak of one call
above what inputs and the result take.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from torch import Tensor

import tilewright
from benchmarks import gpu_report, record
from benchmarks.contestants import beside_each_other, cells
from benchmarks.record import Facts

Function = Callable[..., Tensor]
Made = Callable[[int, torch.device], list[Tensor]]

PEERS = ("eager", "inductor", "inductor max-autotune", "tilewright", "tilewright inside")


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5


def _weighed(s: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(s.float(), -1).to(v.dtype) @ v


def _later(s: Tensor) -> Tensor:
    places = torch.arange(s.shape[-1], device=s.device)
    return places > torch.arange(s.shape[-2], device=s.device)[:, None]


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = _scores(q, k)
    return _weighed(s.masked_fill(_later(s), float("-inf")), v)


def _latent(q: Tensor, k: Tensor) -> Tensor:
    return _causal(q, k, k[..., :512])


def _two(q: Tensor, k: Tensor, turned_q: Tensor, turned_k: Tensor, v: Tensor) -> Tensor:
    s = (q @ k.transpose(-1, -2) + turned_q @ turned_k.transpose(-1, -2)) * 192**-0.5
    return _weighed(s.masked_fill(_later(s), float("-inf")), v)


def _normed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _weighed(_scores(F.rms_norm(q, q.shape[-1:]), F.rms_norm(k, k.shape[-1:])), v)


def _rotated(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    def turned(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin

    return _causal(turned(q), turned(k), v)


def _mixed(s: Tensor, w: Tensor) -> Tensor:
    return torch.einsum("gh,bhij->bgij", w, s)


def _mixed_before(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return _weighed(_mixed(_scores(q, k), w), v)


def _talking(q: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> Tensor:
    return _mixed(torch.softmax(_mixed(_scores(q, k), w).float(), -1).to(v.dtype), u) @ v


def _summed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _weighed(torch.cumsum(_scores(q, k).float(), -1) * 0.1, v)


def _gated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = _scores(q, k).float()
    return _weighed(s - 0.01 * torch.cumsum(torch.sigmoid(s), -1), v)


def _stick_breaking(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    z = _scores(q, k).float()
    hidden = _later(z) | torch.eye(z.shape[-1], dtype=torch.bool, device=z.device)
    left = F.logsigmoid(-z).masked_fill(hidden, 0.0)
    behind = left.flip(-1).cumsum(-1).flip(-1) - left
    return torch.exp(F.logsigmoid(z) + behind).masked_fill(hidden, 0.0).to(v.dtype) @ v


def _forgetting(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
    passed = torch.cumsum(F.logsigmoid(gates.float()), -1)
    s = _scores(q, k).float() + passed[..., :, None] - passed[..., None, :]
    return _weighed(s.masked_fill(_later(s), float("-inf")), v)


def _of_int8(q: Tensor, k: Tensor, k_scale: Tensor, v: Tensor, v_scale: Tensor) -> Tensor:
    return _weighed(_scores(q, k.to(q.dtype) * k_scale), v.to(q.dtype) * v_scale)


def _halves(*shapes: tuple[int, ...]) -> Made:
    """Operands of these shapes; a place of 0 is the length."""

    def made(length: int, device: torch.device) -> list[Tensor]:
        sizes = [[n or length for n in shape] for shape in shapes]
        return [torch.randn(*size, device=device).mul_(0.7).half() for size in sizes]

    return made


def _bytes(length: int, device: torch.device) -> list[Tensor]:
    q, scale = _halves((2, 8, 0, 64), (2, 8, 0, 1))(length, device)
    stored = torch.randint(-100, 100, q.shape, device=device, dtype=torch.int8)
    return [q, stored, scale / 50, stored.roll(1, 2), scale / 50]


_PLAIN, _OF_80 = ((2, 8, 0, 64),) * 3, ((2, 8, 0, 80),) * 3
CASES: Mapping[str, tuple[Function, Made]] = {
    "vanilla": (lambda q, k, v: _weighed(_scores(q, k), v), _halves(*_PLAIN)),
    "576/512": (_causal, _halves((1, 16, 0, 576), (1, 16, 0, 576), (1, 16, 0, 512))),
    "576/512 latent": (_latent, _halves((1, 16, 0, 576), (1, 1, 0, 576))),
    "192/128": (_causal, _halves((2, 8, 0, 192), (2, 8, 0, 192), (2, 8, 0, 128))),
    "80": (_causal, _halves(*_OF_80)),
    "128 + 64": (_two, _halves((2, 8, 0, 128), (2, 8, 0, 128), (2, 8, 0, 64), (2, 1, 0, 64), (2, 8, 0, 128))),
    "normed": (_normed, _halves(*_PLAIN)),
    "rotated": (_rotated, _halves(*_PLAIN, (0, 64), (0, 64))),
    "mixed before": (_mixed_before, _halves(*_PLAIN, (8, 8))),
    "talking": (_talking, _halves(*_PLAIN, (8, 8), (8, 8))),
    "summed": (_summed, _halves(*_PLAIN)),
    "gated": (_gated, _halves(*_PLAIN)),
    "stick breaking": (_stick_breaking, _halves(*_PLAIN)),
    "forgetting": (_forgetting, _halves(*_PLAIN, (2, 8, 0))),
    "int8": (_of_int8, _bytes),
}


def compiled(peer: str, function: Function) -> Function:
    """A contestant; it compiles at its first call."""
    if peer == "eager":
        return function
    if peer.startswith("tilewright"):
        options = {"contractions": "inside"} if peer.endswith("inside") else None
        return torch.compile(function, backend=tilewright.backend, dynamic=False, options=options)  # type: ignore[arg-type]
    mode = "max-autotune-no-cudagraphs" if peer.endswith("autotune") else None
    return torch.compile(function, mode=mode, dynamic=False)


def case(
    name: str, length: int, device: torch.device, rounds: int, peers: Sequence[str] = PEERS
) -> dict[str, Facts]:
    """The facts of each contestant of one program."""
    function, make = CASES[name]
    torch.manual_seed(0)
    given = make(length, device)
    return beside_each_other(
        function, given, {peer: partial(compiled, peer) for peer in peers}, device, rounds
    )


def line(name: str, length: int, found: Mapping[str, Facts]) -> list[str]:
    """A row of the table: microseconds and MiB of each contestant."""
    return [name, str(length), *cells(found, 0)]


@click.command(help=__doc__)
@click.option("--device", default="cuda", show_default=True)
@click.option(
    "--length", "lengths", type=int, multiple=True, help="queries and keys; 1024 and 4096 unless told"
)
@click.option("--only", multiple=True, type=click.Choice(list(CASES)))
@click.option("--against", multiple=True, type=click.Choice(PEERS), help="contestants; all unless told")
@click.option("--rounds", default=20, show_default=True)
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path))
def main(
    device: str, lengths: tuple[int, ...], only: tuple[str, ...], against: tuple[str, ...], rounds: int,
    path: Path | None,
) -> None:  # fmt: skip
    """Run all programs in turn, and write what is known after each."""
    where = torch.device(device)
    if reason := gpu_report.unusable(where):
        print(reason, file=sys.stderr)
        sys.exit(2)
    facts: dict[str, dict[str, Facts]] = {}
    rows: list[list[str]] = []
    with torch.no_grad():
        for length in lengths or (1024, 4096):
            for name in only or CASES:
                facts[f"{name} {length}"] = found = case(name, length, where, rounds, against or PEERS)
                rows.append(line(name, length, found))
                print(*rows[-1], sep="  ", flush=True)
                if path is not None:
                    record.write_json(path, gpu_report.provenance(where, "") | {"cases": facts})
    print(
        gpu_report.text_table(
            "attention that libraries do not have", ["program", "length", *(against or PEERS)], rows
        )
    )


if __name__ == "__main__":
    main()
