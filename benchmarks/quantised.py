"""`python -m benchmarks.quantised --json FILE`: products with weights of 4 or 8 bits, as users write them.

Each spelling unpacks a weight of n rows and k columns, with a scale for each group of 128 columns (or for each row),
and multiplies some rows of halves with it. Contestants are eager, Inductor with its defaults and with max-autotune,
ours as a user gets it, and ours by the model alone. All are captured into CUDA graphs and replayed in turns; a result
that breaks the fp64 rule does not count. `packed_bytes_per_s` tells how fast the packed weight was read.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
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
Make = Callable[[int, int, int, torch.dtype], list[Tensor]]

PEERS = ("eager", "inductor", "inductor max-autotune", "tilewright", "tilewright by the model")
ROWS = (1, 16, 256)
GROUP = 128


def _grouped(w: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight (n, k) with a scale for each group of columns."""
    n, k = w.shape
    return (w.reshape(n, scale.shape[1], -1).to(dtype) * scale.unsqueeze(-1)).reshape(n, k)


def shifted(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    """Two numbers of a byte by a vector of shifts."""
    shifts = torch.tensor([0, 4], dtype=torch.uint8, device=packed.device)
    w = ((packed.unsqueeze(-1) >> shifts) & 15).flatten(-2).to(torch.int8) - 8
    return F.linear(x, _grouped(w, scale, x.dtype))


def stacked(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    """Low and high halves of a byte, side by side."""
    w = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).to(x.dtype) - 8
    return x @ _grouped(w, scale, x.dtype).t()


def with_zeros(x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """The same with a zero point for each group."""
    w = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
    n, k = w.shape
    w = w.view(n, scale.shape[1], -1).to(x.dtype)
    return F.linear(x, ((w - zero.unsqueeze(-1)) * scale.unsqueeze(-1)).view(n, k))


def repeated(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    """Scales that are repeated for each column of their group."""
    w = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).to(torch.int8) - 8
    return F.linear(x, w.to(x.dtype) * scale.repeat_interleave(w.shape[1] // scale.shape[1], dim=1))


def words(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    """Eight numbers of an int32."""
    shifts = torch.arange(0, 32, 4, device=packed.device, dtype=torch.int32)
    return F.linear(x, _grouped(((packed.unsqueeze(-1) >> shifts) & 15).flatten(-2) - 8, scale, x.dtype))


def gptq(x: Tensor, packed: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """As GPTQ stores it: (k / 8, n) int32, scales (k / group, n), packed zero points (k / group, n / 8)."""
    shifts = torch.arange(0, 32, 4, device=packed.device, dtype=torch.int32)
    w = (packed.unsqueeze(1) >> shifts.view(1, -1, 1)) & 15
    points = ((zero.unsqueeze(-1) >> shifts) & 15).flatten(-2) + 1
    groups, n = scale.shape
    w = (w.reshape(groups, -1, n) - points.unsqueeze(1)).to(x.dtype) * scale.unsqueeze(1)
    return x @ w.reshape(-1, n)


def along_rows(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    """Two rows of the weight in a row of bytes."""
    w = torch.stack((packed & 15, packed >> 4), 1).flatten(0, 1).to(x.dtype) - 8
    return F.linear(x, _grouped(w, scale, x.dtype))


def in_halves(x: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    """The first half of the columns in the low halves of bytes, the second in the high ones."""
    w = torch.cat((packed & 15, packed >> 4), -1).to(x.dtype) - 8
    return F.linear(x, _grouped(w, scale, x.dtype))


def int8_rows(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    """Bytes with a scale for each row."""
    return F.linear(x, w.to(x.dtype) * scale)


def int8_behind(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    """The same scale behind the product."""
    return F.linear(x, w.to(x.dtype)) * scale.squeeze(-1)


def int8_groups(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    """Bytes with a scale for each group."""
    return F.linear(x, _grouped(w, scale, x.dtype))


def _scales(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.rand(*shape).mul(0.02).add(0.005).to(dtype)


def _bytes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def _words(*shape: int) -> Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)


def _int8(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8)


def _pairs(n: int, k: int, group: int, dtype: torch.dtype) -> list[Tensor]:
    return [_bytes(n, k // 2), _scales(n, k // group, dtype=dtype)]


def _zeros(n: int, k: int, group: int, dtype: torch.dtype) -> list[Tensor]:
    return [*_pairs(n, k, group, dtype), torch.randint(0, 16, (n, k // group)).to(dtype)]


def _gptq(n: int, k: int, group: int, dtype: torch.dtype) -> list[Tensor]:
    return [_words(k // 8, n), _scales(k // group, n, dtype=dtype), _words(k // group, n // 8)]


SPELLINGS: Mapping[str, tuple[Function, Make]] = {
    "shifted": (shifted, _pairs),
    "stacked": (stacked, _pairs),
    "with zeros": (with_zeros, _zeros),
    "repeated": (repeated, _pairs),
    "words": (words, lambda n, k, g, t: [_words(n, k // 8), _scales(n, k // g, dtype=t)]),
    "gptq": (gptq, _gptq),
    "along rows": (along_rows, lambda n, k, g, t: [_bytes(n // 2, k), _scales(n, k // g, dtype=t)]),
    "in halves": (in_halves, _pairs),
    "int8 rows": (int8_rows, lambda n, k, g, t: [_int8(n, k), _scales(n, 1, dtype=t)]),
    "int8 behind": (int8_behind, lambda n, k, g, t: [_int8(n, k), _scales(n, 1, dtype=t)]),
    "int8 groups": (int8_groups, lambda n, k, g, t: [_int8(n, k), _scales(n, k // g, dtype=t)]),
}
"""What users write, and how it makes weights: n, k, columns of a group, the type of scales."""


def operands(
    name: str, rows: int, n: int, k: int, group: int = GROUP, dtype: torch.dtype = torch.float16
) -> list[Tensor]:
    """Rows and a packed weight for a spelling."""
    return [torch.randn(rows, k).to(dtype), *SPELLINGS[name][1](n, k, group, dtype)]


def compiled(peer: str, function: Function) -> Function:
    """A contestant; it compiles at its first call."""
    if peer == "eager":
        return function
    if peer.startswith("tilewright"):
        options = {"tune_seconds": 0} if peer.endswith("model") else None
        return torch.compile(function, backend=tilewright.backend, dynamic=False, options=options)  # type: ignore[arg-type]
    mode = "max-autotune-no-cudagraphs" if peer.endswith("autotune") else None
    return torch.compile(function, mode=mode, dynamic=False)


def case(name: str, rows: int, side: int, device: torch.device, rounds: int) -> dict[str, Facts]:
    """The facts of each contestant of one spelling."""
    function = SPELLINGS[name][0]
    torch.manual_seed(0)
    given = [t.to(device) for t in operands(name, rows, side, side)]
    found = beside_each_other(
        function, given, {peer: partial(compiled, peer) for peer in PEERS}, device, rounds
    )
    packed = sum(t.numel() * t.element_size() for t in given[1:])
    for facts in found.values():
        if isinstance(microseconds := facts.get("median_us"), float):
            facts["packed_bytes_per_s"] = packed / (microseconds * 1e-6)
    return found


def line(name: str, rows: int, found: Mapping[str, Facts]) -> list[str]:
    """A row of the table: microseconds and MiB of each contestant."""
    return [name, str(rows), *cells(found, 1)]


@click.command(help=__doc__)
@click.option("--device", default="cuda", show_default=True)
@click.option("--rows", "counts", type=int, multiple=True, help="rows; 1, 16 and 256 unless told")
@click.option("--side", default=4096, show_default=True, help="rows and columns of the weight")
@click.option("--only", multiple=True, type=click.Choice(list(SPELLINGS)))
@click.option("--rounds", default=20, show_default=True)
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path))
def main(
    device: str, counts: tuple[int, ...], side: int, only: tuple[str, ...], rounds: int, path: Path | None
) -> None:
    """Run all spellings in turn, and write what is known after each."""
    where = torch.device(device)
    if where.type == "cuda" and (reason := gpu_report.unusable(where)):
        print(reason, file=sys.stderr)
        sys.exit(2)
    facts: dict[str, dict[str, Facts]] = {}
    lines: list[list[str]] = []
    with torch.no_grad():
        for count in counts or ROWS:
            for name in only or SPELLINGS:
                facts[f"{name} {count}"] = found = case(name, count, side, where, rounds)
                lines.append(line(name, count, found))
                print(*lines[-1], sep="  ", flush=True)
                if path is not None:
                    record.write_json(path, gpu_report.provenance(where, "") | {"cases": facts})
    print(gpu_report.text_table("products with packed weights", ["spelling", "rows", *PEERS], lines))


if __name__ == "__main__":
    main()
