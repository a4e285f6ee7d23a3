"""`python -m benchmarks.attention --device cuda`: attention variants beside their peers.

Every core, stack of layers, or prefill has a process of its own, where all contestants run in turn. What
needs no quiet device is built by all processes side by side; the rest is built, judged and timed by one at a
time, the most telling sizes of all cores before the others. A contestant that fails or runs out of memory is
listed with its reason.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks import gpu_report, gpu_turns, record
from benchmarks.attention import figures, masked, rows
from benchmarks.attention.llama import Shape
from benchmarks.attention.peers import NAMES
from benchmarks.attention.turn import Made, Row, absent, build, build_own_ahead, finish, reports, table
from benchmarks.attention.workloads import WORKLOADS, Sizes
from benchmarks.gpu_clock import release
from benchmarks.gpu_turns import BUILDING, DONE, TIMING, Limits, Turns
from benchmarks.record import Facts
from tilewright import measure

CORE, LLAMA, PREFILL, ABLATION, DOCUMENTS = "core", "llama", "prefill", "ablation", "documents"
PARTS = (CORE, LLAMA, PREFILL, ABLATION, DOCUMENTS)
EVERYONE = (ABLATION, DOCUMENTS)
"""Parts with contestants of their own, all of which run."""
SHARED = 4096
"""Length up to which cores are built side by side; longer ones need more memory than many at once could have."""

COMPILERS = "4"
"""Processes that a child's Inductor may start."""


@dataclass(frozen=True)
class Point:
    """What is recorded of a row besides its contestants, and how the row is made."""

    facts: Facts
    make: Callable[[], Row]
    alone: bool
    """Whether nothing of it is built side by side with others, which would need more memory than there is."""


def points(part: str, name: str, arguments: argparse.Namespace) -> list[Point]:
    """The rows of one child, the most telling first."""
    if part == CORE:
        return [core(name, n, dtype, arguments) for n in arguments.seq for dtype in arguments.dtypes]
    if part == ABLATION:
        return [ablation(name, arguments)]
    if part == DOCUMENTS:
        return [documents(name, dtype, arguments) for dtype in arguments.dtypes]
    return [stack(part, name, count, arguments) for count in arguments.layers]


def core(name: str, queries: int, dtype: str, arguments: argparse.Namespace) -> Point:
    """One length of a core."""
    sizes = Sizes(
        queries, arguments.heads, arguments.depth, arguments.batch, arguments.keys, arguments.kv_heads
    )
    device, until = torch.device(arguments.device), arguments.build_until or float("inf")
    facts: Facts = {"part": CORE, "core": name, "dtype": dtype} | asdict(sizes)

    def make() -> Row:
        return rows.core(name, sizes, getattr(torch, dtype), device, arguments.onnx, until)

    return Point(facts, make, max(queries, arguments.keys) > SHARED)


def ablation(name: str, arguments: argparse.Namespace) -> Point:
    """The first length of a core, compiled with less and less left out."""
    whole = core(name, arguments.seq[0], arguments.dtypes[0], arguments)
    sizes = Sizes(
        arguments.seq[0], arguments.heads, arguments.depth, arguments.batch, kv_heads=arguments.kv_heads
    )
    device, until = torch.device(arguments.device), arguments.build_until or float("inf")

    def make() -> Row:
        return rows.ablation(name, sizes, getattr(torch, arguments.dtypes[0]), device, until)

    return Point(whole.facts | {"part": ABLATION}, make, alone=False)


def documents(name: str, dtype: str, arguments: argparse.Namespace) -> Point:
    """One mask of data."""
    sizes = Sizes(arguments.masked_seq, arguments.masked_heads, arguments.depth)
    device, until = torch.device(arguments.device), arguments.build_until or float("inf")
    facts: Facts = {"part": DOCUMENTS, "core": name, "dtype": dtype} | asdict(sizes)
    facts["batch"] = masked.CASES[name].batch

    def make() -> Row:
        return masked.row(name, sizes, getattr(torch, dtype), device, until)

    return Point(facts, make, alone=False)


def stack(part: str, name: str, count: int, arguments: argparse.Namespace) -> Point:
    """One number of layers, run at once or in chunks."""
    heads, places, dtype = arguments.heads, arguments.seq[0], arguments.dtypes[0]
    shape = Shape(count, arguments.hidden, heads, arguments.kv_heads, arguments.intermediate)
    device, until = torch.device(arguments.device), arguments.build_until or float("inf")
    facts: Facts = {"part": part, "core": name, "dtype": dtype, "queries": places} | asdict(shape)
    if part == PREFILL:
        facts |= {"chunk": arguments.chunk, "kept": arguments.keep}

    def make() -> Row:
        if part == LLAMA:
            return rows.layers(name, shape, places, getattr(torch, dtype), device, until)
        chunk, keep = arguments.chunk, arguments.keep
        return rows.prefill(shape, places, chunk, keep, getattr(torch, dtype), device, until)

    return Point(facts, make, alone=True)


def child(item: str, arguments: argparse.Namespace) -> Facts:
    """All rows of one core or stack; writes its facts after every row."""
    part, _, name = item.partition(" ")
    turns = Turns(arguments.turns)
    torch._dynamo.config.recompile_limit = 64  # every size is a graph of its own
    facts: Facts = {"phase": BUILDING, "rows": []}
    done: list[Facts] = []

    def write(**news: record.Json) -> None:
        facts.update(news)
        if arguments.child_json is not None:
            record.write_json(arguments.child_json, facts)

    wanted = points(part, name, arguments)
    with torch.no_grad():
        with turns.building():
            write()
            built = [early(point, arguments) for point in wanted]
        write(phase=TIMING)
        for point, made in zip(wanted, built, strict=True):
            with turns.timing():
                done.append(point.facts | late(point, made, arguments))
                made.items.clear()
                release(torch.device(arguments.device))
                write(rows=done)
    write(phase=DONE)
    return facts


def early(point: Point, arguments: argparse.Namespace) -> Made:
    """What of a row may be built while others build: contestants that time nothing meanwhile, and machine code."""
    made, device = Made(), torch.device(arguments.device)
    if point.alone:
        return made
    row = point.make()
    names = [who for who in contestants(point, row, arguments) if who not in row.measuring]
    build(row, names, made, device, arguments.threads)
    if device.type == "cuda":  # the machine code there does not depend on what is measured
        build_own_ahead(row, arguments.build_until or float("inf"))
    return made


def contestants(point: Point, row: Row, arguments: argparse.Namespace) -> list[str]:
    """Who takes part in a row."""
    everyone = list(row.peers) if point.facts["part"] in EVERYONE else arguments.peers
    return [who for who in everyone if who in row.peers]


def late(point: Point, made: Made, arguments: argparse.Namespace) -> Facts:
    """The other contestants and all figures of a row, or why there are none."""
    device = torch.device(arguments.device)
    try:
        row = point.make()
        build(row, contestants(point, row, arguments), made, device, arguments.threads)
        return finish(row, made, device, arguments.threads, arguments.rounds, arguments.seconds)
    except Exception as error:  # noqa: BLE001 - such as a lack of memory; other rows may do with less
        return {"failed": measure.one_line(error)}


# --- the whole run ---------------------------------------------------------------


def all_rows(cases: Mapping[str, Facts]) -> list[Facts]:
    """Rows of all children."""
    return [row for facts in cases.values() for row in facts.get("rows", ())]  # type: ignore[union-attr,misc]


def label(row: Facts) -> str:
    """Of a row in the tables."""
    layers = f" {row['layers']} layers" if "layers" in row else ""
    return f"{row['core']}{layers} {row['queries']} {row['dtype']}"


def wanted_figures(cases: Mapping[str, Facts], device: torch.device) -> list[gpu_report.Figure]:
    """Those of the kind of device."""
    return (figures.on_gpu if device.type == "cuda" else figures.on_cpu)(all_rows(cases))


def summary(cases: Mapping[str, Facts], device: torch.device) -> str:
    """Everything that is printed at the end."""
    found = all_rows(cases)
    parts: list[str] = []
    reasons = [(item, str(facts["failed"])) for item, facts in cases.items() if "failed" in facts]
    for part in PARTS:
        some = {label(row): row for row in found if row["part"] == part}
        if some:
            parts += [table(f"{part}, ms", some), reports(f"{part}, what we made", some)]
            reasons += absent(some)
    if reasons:
        parts.append(f"wrong, failed or absent:\n{gpu_report.grouped(reasons)}\n")
    lines = [item.row() for item in wanted_figures(cases, device)]
    if lines:
        parts.append(gpu_report.text_table("wanted figures", ["figure", "value", "wanted", ""], lines))
    return "\n".join(parts)


def options(given: Sequence[str] | None) -> argparse.Namespace:
    """The command line; sizes and types default to what is wanted of the device."""
    parser = gpu_report.parser(__doc__)
    gpu_report.child_options(parser)

    def words(text: str) -> list[str]:
        return [word for word in text.split(",") if word]

    def numbers(text: str) -> list[int]:
        return [int(word) for word in words(text)]

    add = parser.add_argument
    add("--parts", type=words, default=[CORE], help=f"some of: {','.join(PARTS)}")
    add("--seq", type=numbers, metavar="N,...", help="lengths, the most telling first")
    add("--keys", type=int, default=0, help="of every core, as many as queries unless told")
    add("--dtypes", type=words, help="float16 on a GPU, float32 on a CPU")
    add("--batch", type=int, default=1)
    add("--heads", type=int, help="32 on a GPU, 8 on a CPU")
    add("--kv-heads", type=int, default=0, help="as many as heads")
    add("--depth", type=int, help="of a head: 128 on a GPU, 64 on a CPU")
    add("--masked-seq", type=int, help="of documents: 8192 on a GPU, 512 on a CPU")
    add("--masked-heads", type=int, help="of documents: 16 on a GPU, 2 on a CPU")
    add("--layers", type=numbers, default=[4], metavar="N,...")
    add("--hidden", type=int, default=4096)
    add("--intermediate", type=int, default=11008)
    add("--chunk", type=int, default=1024, help="places at once in prefill")
    add("--keep", type=int, default=512, help="keys kept between chunks")
    add("--peers", type=words, help="some of the contestants")
    add("--threads", type=int, default=2)
    add("--seconds", type=float, default=2.0, help="timing per contestant")
    add(
        "--onnx",
        type=Path,
        default=record.ROOT / "out" / "attention",
        metavar="FOLDER",
        help="where ONNX files are kept",
    )
    made = parser.parse_args(given)
    gpu = torch.device(made.device).type == "cuda"
    made.seq = made.seq or ([4096, 8192, 1024, 16384] if gpu else [2048])
    made.dtypes = made.dtypes or ["float16" if gpu else "float32"]
    made.heads = made.heads or (32 if gpu else 8)
    made.kv_heads = made.kv_heads or made.heads
    made.depth = made.depth or (128 if gpu else 64)
    names = NAMES["cuda" if gpu else "cpu"]
    made.masked_seq = made.masked_seq or (8192 if gpu else 512)
    made.masked_heads = made.masked_heads or (16 if gpu else 2)
    made.peers = made.peers or list(names)
    for chosen, known in ((made.only, (*WORKLOADS, *masked.CASES)), (made.parts, PARTS), (made.peers, names)):
        for name in chosen:
            if name not in known:
                parser.error(f"no {name!r}; there are: {', '.join(known)}")
    return made


def passed_on(arguments: argparse.Namespace) -> list[str]:
    """What children are told."""
    simple = (
        "device", "rounds", "batch", "heads", "keys", "kv_heads", "depth", "hidden", "intermediate", "chunk", "keep",
        "threads", "seconds", "onnx", "masked_seq", "masked_heads",
    )  # fmt: skip
    lists = ("seq", "dtypes", "layers", "peers")
    given = {name: getattr(arguments, name) for name in simple}
    given |= {name: ",".join(map(str, getattr(arguments, name))) for name in lists}
    return [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]


def children(arguments: argparse.Namespace) -> list[str]:
    """A part and a name each, as far as they are asked for."""
    found: list[str] = []
    for part in PARTS:
        known = {PREFILL: ("h2o",), DOCUMENTS: tuple(masked.CASES)}.get(part, tuple(WORKLOADS))
        found += [
            f"{part} {name}"
            for name in known
            if part in arguments.parts and name in (arguments.only or known)
        ]
    return found


def main(given: Sequence[str] | None = None) -> int:
    """Run, print the tables, write the JSON."""
    warnings.filterwarnings("ignore")
    arguments = options(given)
    device = torch.device(arguments.device)
    if reason := gpu_report.unusable(device):
        print(reason, file=sys.stderr)
        return 2
    if arguments.child:
        child(arguments.child, arguments)
        return 0
    items = children(arguments)
    head = gpu_report.provenance(device, arguments.commit) | {"rounds": arguments.rounds}
    start = time.time()

    def report(cases: Mapping[str, Facts]) -> None:
        if arguments.json is not None:
            found = [figure.facts() for figure in wanted_figures(cases, device)]
            record.write_json(arguments.json, head | {"figures": found, "cases": cases})

    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", COMPILERS)
    jobs = arguments.jobs or (len(items) if device.type == "cuda" else 1)
    limits = Limits(arguments.build or 0.85 * arguments.budget, arguments.budget)
    cases = gpu_turns.run("benchmarks.attention", items, passed_on(arguments), limits, jobs, report)
    print(summary(cases, device))
    print(f"{time.time() - start:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
