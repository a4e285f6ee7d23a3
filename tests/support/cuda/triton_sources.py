"""Hand-written Triton kernels in the form in which emit hands them over."""

from __future__ import annotations

from tilewright.emit.triton.kernel import Argument, TritonSource
from tilewright.lower.variants import Variant

HEAD = "import triton\nimport triton.language as tl\n\n\n@triton.jit\n"
PLAIN = Variant(False, False)
ERROR = Argument("error", "error", "*i32", 0, False)


def scaled(variant: Variant = PLAIN, *, entry: str = "k0", warps: int = 4) -> TritonSource:
    """b[i] = 2 a[i] + 1 for i < n; sets the error word to 7 if n > 1000000."""
    text = HEAD + (
        f"def {entry}(a, b, n, error):\n"
        "    i = tl.program_id(0) * 1024 + tl.arange(0, 1024)\n"
        "    x = tl.load(a + i, mask=i < n, other=0.0)\n"
        "    tl.store(b + i, x * 2.0 + 1.0, mask=i < n)\n"
        "    if n > 1000000:\n"
        "        tl.store(error, 7)\n"
    )
    size = "i64" if variant.wide else "i32"
    arguments = (
        Argument("pointer", "a", "*fp32", 0, variant.aligned),
        Argument("pointer", "b", "*fp32", 1, variant.aligned),
        Argument("size", "n", size, 0, variant.aligned),
        ERROR,
    )
    return TritonSource(text, entry, arguments, warps, 1, variant)


def product(tile: int) -> TritonSource:
    """A loop of dots whose operands take 3 stages of 2 * tile * 64 halves in shared memory."""
    text = HEAD + (
        "def k0(a, b, c, n, error):\n"
        f"    i = tl.arange(0, {tile})\n"
        "    k = tl.arange(0, 64)\n"
        f"    acc = tl.zeros(({tile}, {tile}), tl.float32)\n"
        "    for j in range(0, n, 64):\n"
        "        x = tl.load(a + i[:, None] * n + (j + k)[None, :])\n"
        f"        y = tl.load(b + (j + k)[:, None] * {tile} + i[None, :])\n"
        "        acc += tl.dot(x, y)\n"
        f"    tl.store(c + i[:, None] * {tile} + i[None, :], acc)\n"
    )
    pointers = tuple(Argument("pointer", n, t, k, True) for k, (n, t) in enumerate(
        (("a", "*fp16"), ("b", "*fp16"), ("c", "*fp32"))
    ))  # fmt: skip
    arguments = (*pointers, Argument("size", "n", "i32", 0, True), ERROR)
    return TritonSource(text, "k0", arguments, 8, 3, Variant(True, False))
