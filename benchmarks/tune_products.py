"""`python -m benchmarks.tune_products --json FILE` compiles the networks with much time for products and writes what
the clock decided of each group; `python -m benchmarks.tune_products --table TABLE --results FILE...` makes the table of
measured products (`src/tilewright/tuning/<target>_products.json`) of such files and of those of `benchmarks.gemm` and
`benchmarks.convolutions`.

Where several results are about one shape, the one in which a kernel gains least counts.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

import tilewright
from benchmarks import gpu_report, gpu_turns, record
from benchmarks.convolutions import ALONE, FUSED, LAYERS, PASS, PREPARED
from benchmarks.gpu_models import NETWORKS, load
from benchmarks.gpu_turns import BUILDING, DONE, Limits, Turns
from benchmarks.networks import layouts
from benchmarks.record import Facts, Json
from tilewright.form.unrolled_sums import UNROLL
from tilewright.ir.graph import Graph, Op
from tilewright.ir.kernel import AS_THEY_LIE
from tilewright.library.select import is_contraction, slides
from tilewright.partition.products import CLOCK, ChosenProduct, ChosenProducts
from tilewright.pipeline.tabled_products import product_shape
from tilewright.pipeline.trace import Trace
from tilewright.schedule.product_table import (
    APART,
    LISTS,
    FastestProduct,
    MeasuredBlocks,
    ProductShape,
    ProductTable,
    parse_products,
)

SECONDS = 120
"""For products of a network."""
CLASS = re.compile(r"\w+:(grid|resident|streamed|scan)(?:/\d+)?(?:x(\d+))?-?(?=\s|$)")
UNROLLED, WALKED = re.compile(rf"{UNROLL}\(([^)]*)\)"), re.compile(r"\w+:grid/(\d+)-?(?=\s|$)")
WIDE = 8
"""Halves that one access takes."""
NO_BLOCKS = MeasuredBlocks((), 1, 1, 1)
SHAPE_FIELDS = {f.name for f in fields(ProductShape)}


def read_blocks(schedule: str, parts: int = 1, operands: str = AS_THEY_LIE) -> MeasuredBlocks:
    """The blocks that the text of a schedule has."""
    classes = [(role, int(tile or 1)) for role, tile in CLASS.findall(schedule)]
    words = schedule.split()
    numbers = dict(w.split("=", 1) for w in words if "=" in w)
    tiles = sorted(tile for role, tile in classes if role == "grid" and tile > 1)
    step = max((tile for role, tile in classes if role != "grid"), default=1)
    warps, stages = (int(numbers.get(name, 1)) for name in ("warps", "stages"))
    marks = "descriptors" in words, "persistent" in words
    unrolled = tuple(int(n) for step in UNROLLED.findall(schedule) for n in re.findall(r"=(\d+)", step))
    rows = max((1, *map(int, WALKED.findall(schedule)))) if unrolled else 1
    return MeasuredBlocks(tuple(tiles), step, warps, stages, *marks, parts, operands, unrolled, rows)


def of_gemm(facts: Mapping[str, Any], file: str) -> Iterator[FastestProduct]:
    """Entries of a file of `benchmarks.gemm`."""
    for name, found in facts["shapes"].items():
        best = found.get("best")
        if best is None:
            continue
        ours = found["schedules"][best]
        m, n, k = (found[name] for name in "mnk")
        shape = ProductShape("contraction", 2, 1, False, 1, _runs(k, n), 1, m, n, k, m * k)
        blocks = read_blocks(ours["schedule"])
        if not blocks.tiles:
            continue  # a product with one row, which is no group
        yield FastestProduct(
            shape, blocks, _rounded(ours["median_us"]), _rounded(found["cublas_us"]), f"{file}#shapes/{name}"
        )


def of_convolutions(facts: Mapping[str, Any], file: str) -> Iterator[FastestProduct]:
    """Entries of a file of `benchmarks.convolutions`: alone, and with bias and ReLU."""
    for name, found in facts["layers"].items():
        layer_name, _, batch = name.partition("x")
        layer, best = LAYERS[layer_name], found.get("best")
        if best is None:
            continue
        ours, (prepared, parts, kernel) = found["ways"][best]["median_us"], _way(best)
        blocks = read_blocks(found["kernels"][kernel]["schedule"], parts, prepared)
        m, image = int(batch) * layer.result**2, int(batch) * layer.channels * layer.side**2
        depthwise, taps = layer.groups > 1, layer.kernel**2
        kind = "depthwise" if depthwise else "convolution"
        runs = _runs_of_windows(layer.features) if depthwise else _runs(layer.channels, layer.features)
        fused = ProductShape(kind, 2, 1, True, taps, runs, 1, m, layer.features, layer.products, image)
        theirs = min(found[f"{PASS}_us"], found[f"{FUSED}_us"])
        for shape, library in ((fused, theirs), (fused.alone(), found[f"{ALONE}_us"])):
            yield FastestProduct(shape, blocks, _rounded(ours), _rounded(library), f"{file}#layers/{name}")


def _runs(summed: int, results: int) -> str:
    """Of rows of so many halves, of both operands and of the result; those of an image are its channels."""
    return ("k" if summed % WIDE == 0 else APART) * 2 + ("n" if results % WIDE == 0 else APART)


def _runs_of_windows(channels: int) -> str:
    """Of images of so many channels; the weights of one lie together."""
    along = "n" if channels % WIDE == 0 else APART
    return along + APART + along


def _way(name: str) -> tuple[str, int, str]:
    """How operands are prepared, the number of parts, and the kernel of a way, of its name."""
    match = re.fullmatch(r"([cl]?)(?:s(\d+))?(p\d+)", name)
    if match is None:
        raise SystemExit(f"no way is named {name!r}")
    prepared, parts, _ = match.groups()
    return PREPARED.get(prepared, AS_THEY_LIE), int(parts or 1), name


def of_networks(facts: Mapping[str, Any], file: str) -> Iterator[FastestProduct]:
    """Entries of a file of this program."""
    for name, found in facts["networks"].items():
        for place, row in enumerate(found.get("products", ())):
            blocks, shape = row["blocks"], row["shape"]
            if shape.keys() != SHAPE_FIELDS:
                continue  # of a time when shapes said less, and not known since
            yield FastestProduct(
                ProductShape(**shape),
                MeasuredBlocks(**blocks | {name: tuple(blocks[name]) for name in LISTS if name in blocks}),
                row["us"], row["library_us"], f"{file}#networks/{name}/products/{place}",
            )  # fmt: skip


READERS = {"shapes": of_gemm, "layers": of_convolutions, "networks": of_networks}
"""By what a file of results holds."""


def table_of(files: Sequence[Path], table: ProductTable) -> ProductTable:
    """A table with what files say; where several are about one shape, that in which a kernel gains least."""
    found: dict[ProductShape, FastestProduct] = {}
    for path in files:
        facts = json.loads(path.read_text(encoding="utf-8"))
        reader = next(read for key, read in READERS.items() if key in facts)
        for entry in reader(facts, path.as_posix()):
            before = found.get(entry.shape)
            if before is None or entry.ratio > before.ratio:
                found[entry.shape] = entry
    return table.merged(found.values())


def rows_of(products: ChosenProducts) -> Iterator[Facts]:
    """What was decided of groups whose products are alike."""
    for chosen in products.products:
        multiply = list(filter(partial(multiplies, chosen.region), chosen.region.ops))
        shape = product_shape(chosen.region, multiply) if multiply else None
        if shape is None or chosen.decided_by != CLOCK:
            continue
        what = " + ".join(op.name for op in chosen.region.ops)
        yield {"what": what, "shape": asdict(shape), **_measured(chosen)}


def multiplies(graph: Graph, op: Op) -> bool:
    """Whether a library would be called for an op of a group."""
    call = graph.origins[op.origin].call if op.origin >= 0 else None
    return is_contraction(op) or (call is not None and slides(op, call))


def _measured(chosen: ChosenProduct) -> Facts:
    way = chosen.way
    blocks = read_blocks(chosen.schedule, way.parts, way.operands) if chosen.schedule else NO_BLOCKS
    told: dict[str, Json] = {**asdict(blocks), **{name: list(getattr(blocks, name)) for name in LISTS}}
    return {
        "blocks": told,
        "us": _rounded(chosen.seconds * 1e6),
        "library_us": _rounded(chosen.library_seconds * 1e6),
    }


def _rounded(us: float) -> float:
    return round(us, 3)


def child(item: str, arguments: argparse.Namespace) -> None:
    """Compile one network at one batch size, and write what was decided."""
    name, _, batch = item.rpartition(" ")
    network, device = NETWORKS[name], torch.device(arguments.device)
    facts: Facts = {"phase": BUILDING, "network": name, "batch": int(batch)}
    with torch.no_grad(), Turns(arguments.turns).building():
        loaded = load(network, device, torch.float16)
        model = layouts(loaded, network)[network.convolutional]
        x = network.inputs(int(batch), device, torch.float16)
        if network.convolutional:
            x = x.contiguous(memory_format=torch.channels_last)
        start = time.perf_counter()
        made = tilewright.compile(model, (x,), freeze=True, options={"tune_seconds": arguments.tune_seconds})
        facts["build_s"] = round(time.perf_counter() - start, 1)
        found = [
            phase.result
            for phase in cast(Trace, made.trace).phases
            if isinstance(phase.result, ChosenProducts)
        ]
        facts["products"] = [row for products in found for row in rows_of(products)]
    facts["phase"] = DONE
    record.write_json(arguments.child_json, facts)


def measure(arguments: argparse.Namespace) -> None:
    """Compile all networks, each in a process of its own, and write what was decided."""
    head = gpu_report.provenance(torch.device(arguments.device), arguments.commit)
    names = [f"{name} {batch}" for batch in arguments.batches for name in arguments.only or NETWORKS]

    def report(networks: Mapping[str, Facts]) -> None:
        record.write_json(
            arguments.json, head | {"tune_seconds": arguments.tune_seconds, "networks": networks}
        )

    limits = Limits(arguments.build or arguments.budget, arguments.budget, arguments.gpus)
    passed = [f"--device={arguments.device}", f"--tune-seconds={arguments.tune_seconds}"]
    found = gpu_turns.run(
        "benchmarks.tune_products", names, passed, limits, arguments.jobs or len(names), report
    )
    for name, facts in found.items():
        print(name, facts.get("failed") or f"{facts['build_s']} s, {len(facts['products'])} groups")  # type: ignore[arg-type]


def main(given: Sequence[str] | None = None) -> int:
    """Measure, or make the table, or both."""
    warnings.filterwarnings("ignore")
    parser = gpu_report.parser(__doc__)
    gpu_report.child_options(parser)
    parser.add_argument("--batches", type=lambda text: [int(n) for n in text.split(",")], default=[1, 64])
    parser.add_argument("--tune-seconds", type=int, default=SECONDS)
    parser.add_argument("--table", type=Path, help="the table to make, or to add to")
    parser.add_argument(
        "--results", type=Path, nargs="+", default=[], help="files of results that it is made of"
    )
    arguments = parser.parse_args(given)
    if arguments.child:
        child(arguments.child, arguments)
        return 0
    if arguments.table is not None:
        path: Path = arguments.table
        before = (
            parse_products(path.read_text(encoding="utf-8"), path.name) if path.exists() else ProductTable()
        )
        path.write_text(table_of(arguments.results, before).text(), encoding="utf-8")
    elif arguments.json is None:
        parser.error("--json or --table says what to make")
    else:
        measure(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
