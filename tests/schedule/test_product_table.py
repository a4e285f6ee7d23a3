"""The table of measured products: read, merged and refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tests.support.layers import ROOT

from tilewright.errors import InputError
from tilewright.schedule.product_table import (
    FastestProduct,
    MeasuredBlocks,
    ProductShape,
    ProductTable,
    parse_products,
    product_table,
)

SHAPE = ProductShape("contraction", 2, 1, False, 1, "kkn", 1, 64, 4096, 1024, 64 * 1024)
BLOCKS = MeasuredBlocks((32, 64), 128, 4, 5, descriptors=True, parts=2)
ENTRY = FastestProduct(SHAPE, BLOCKS, 9.0, 10.0, "somewhere")


def at(entry: FastestProduct = ENTRY, **sizes: object) -> FastestProduct:
    return FastestProduct(shape(**sizes), entry.blocks, entry.us, entry.library_us, entry.source)


def shape(**sizes: object) -> ProductShape:
    """Of these sizes, over an image of which each place is taken once."""
    made = replace(SHAPE, **sizes)  # type: ignore[arg-type]
    return made if "image" in sizes else replace(made, image=made.batch * made.m * made.k // made.taps)


def test_a_table_is_read_as_it_was_written() -> None:
    table = ProductTable().merged([ENTRY, at(m=128), at(kind="convolution", taps=9)])
    assert parse_products(table.text(), "here") == table
    assert '"descriptors": true' in table.text() and "persistent" not in table.text()


def test_an_entry_for_the_same_shape_replaces_the_old_one() -> None:
    faster = FastestProduct(SHAPE, BLOCKS, 8.0, 10.0, "elsewhere")
    assert ProductTable().merged([ENTRY, at(n=512)]).merged([faster]).entries == tuple(
        sorted((faster, at(n=512)))
    )


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (shape(), ENTRY), (shape(m=80), ENTRY), (shape(m=110), at(m=128)), (shape(m=300), None), (shape(k=700), None),
        (shape(n=3000, k=1400), ENTRY), (shape(fused=True), None), (shape(count=2), None), (shape(bytes=4), None),
        (shape(kind="convolution"), None), (shape(taps=9), None), (shape(batch=2), None),
        (shape(runs="knn"), None), (shape(image=4 * 64 * 1024), None), (shape(image=16 * 1024), None),
        (shape(image=80 * 1024), ENTRY),
    ],
)  # fmt: skip
def test_the_nearest_entry_of_the_same_kind_serves_if_it_is_near(
    asked: ProductShape, found: FastestProduct | None
) -> None:
    assert ProductTable().merged([ENTRY, at(m=128)]).find(asked) == found


ROW = json.loads(ProductTable().merged([ENTRY]).text())[0]


@pytest.mark.parametrize(
    "wrong",
    [
        "{}", "[1]", "nothing", "[null]", *(json.dumps([{**ROW, **change}]) for change in (
            {"tiles": [32, -64]}, {"tiles": 32}, {"tiles": [True, 2]}, {"step": 0}, {"warps": 1.5}, {"us": -1},
            {"us": float("nan")}, {"library_us": "fast"}, {"library_us": float("inf")}, {"kind": "sum"},
            {"operands": "lost"}, {"fused": 1}, {"source": 3}, {"colour": "red"}, {"m": None}, {"parts": 0},
            {"runs": "kk"}, {"runs": "kkx"}, {"image": 0},
        )),
        json.dumps([{k: v for k, v in ROW.items() if k != "k"}]),
    ],
)  # fmt: skip
def test_other_tables_are_refused_by_name(wrong: str) -> None:
    with pytest.raises(InputError, match="not a table of products") as refused:
        parse_products(wrong, "sm_00_products.json")
    assert refused.value.place == "sm_00_products.json"


def test_a_target_without_measurements_has_an_empty_table() -> None:
    assert product_table("sm_00") == ProductTable()


def test_entries_of_the_package_name_files_of_results() -> None:
    entries = product_table("sm_90").entries
    assert entries
    for file, _, place in (e.source.partition("#") for e in entries):
        found = json.loads((ROOT.parents[1] / file).read_text(encoding="utf-8"))
        for key in place.split("/"):
            found = found[int(key)] if isinstance(found, list) else found[key]
