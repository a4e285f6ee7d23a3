"""`python -m benchmarks.gluon.printed [--all] [--json FILE]`: attention with and without specialised warps on a GPU.

Each program is compiled with the usual text of its kernel and with those that are printed in Gluon, whatever a clock
would say; results are held against fp32, times stand beside cuDNN's attention, full or causal. Children build all
kernels first, side by side; then one process checks and times them. A kernel that hangs ends it.
"""

# pyright: basic
from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import gpu_report, record
from tilewright.ir.schedule import Role
from tilewright.schedule.gpu import scheduler as gpu
from tilewright.schedule.gpu.proposed.product_loops import specialised_proposals

FAULTS = RuntimeError, ValueError, TypeError, LookupError
"""What costs a row, or one of its contestants, and no other."""
WAYS: dict[str, int] = {"triton": 0, "gluon 128": 128, "gluon 64": 64}
"""Contestant -> keys of a block; 0: the usual text."""
CHOSEN = [0]
PROPOSED: set[int] = set()
"""Ways for which the program that was compiled last has a proposal."""
usual_best = gpu.BlockScheduler.best


def best(self, form, by):
    """The proposal of the way that is chosen; the usual schedule where there is none."""
    found, keys = usual_best(self, form, by), CHOSEN[0]
    for proposal in specialised_proposals(found, by) if keys else ():
        if any(c.role is Role.STREAMED and c.tile == keys for c in proposal.schedule.tiling.classes):
            PROPOSED.add(keys)
            return proposal
    return found


gpu.BlockScheduler.best = best


# --- workloads ---------------------------------------------------------------------


def scores(q, k):
    """q k^T / sqrt(depth), as the program rounds it, in fp32."""
    return (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).float()


def finish(s, v):
    """softmax(s) v."""
    return torch.softmax(s, dim=-1).to(v.dtype) @ v


class Vanilla(torch.nn.Module):
    """Scores as they are."""

    def change(self, s, heads):
        """Scores [..., queries, keys] of so many heads, changed."""
        return s

    def forward(self, q, k, v):
        """Operands [batch, heads, places, depth]."""
        return finish(self.change(scores(q, k), q.shape[1]), v)


class Causal(Vanilla):
    """No key behind its query."""

    def change(self, s, heads):
        """Scores [..., queries, keys] of so many heads, changed."""
        n = s.shape[-1]
        hidden = torch.ones(n, n, dtype=torch.bool, device=s.device).triu(1)
        return s.masked_fill(hidden, -math.inf)


class SoftCap(Vanilla):
    """Scores within 20."""

    def change(self, s, heads):
        """Scores [..., queries, keys] of so many heads, changed."""
        return 20 * torch.tanh(s / 20)


class Alibi(Vanilla):
    """A bias by distance, with a slope for each head."""

    def change(self, s, heads):
        """Scores [..., queries, keys] of so many heads, changed."""
        n = s.shape[-1]
        i = torch.arange(n, device=s.device)
        slope = torch.exp2(-(torch.arange(heads, device=s.device) + 1) * 8.0 / heads)
        return s + slope[:, None, None] * (i[None, :] - i[:, None]).float()


class Window(Vanilla):
    """The 1024 keys in front of a query."""

    def change(self, s, heads):
        """Scores [..., queries, keys] of so many heads, changed."""
        i = torch.arange(s.shape[-1], device=s.device)
        d = i[:, None] - i[None, :]
        return s.masked_fill((d < 0) | (d >= 1024), -math.inf)


class Bias(Vanilla):
    """A bias that is loaded."""

    def forward(self, q, k, v, bias):
        """Operands [batch, heads, places, depth]."""
        return finish(scores(q, k) + bias, v)


class Sdpa(Vanilla):
    """As torch has it."""

    def forward(self, q, k, v):
        """Operands [batch, heads, places, depth]."""
        return F.scaled_dot_product_attention(q, k, v)


class CausalSdpa(Causal):
    """As torch has it."""

    def forward(self, q, k, v):
        """Operands [batch, heads, places, depth]."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Gqa(Causal):
    """Heads that share keys and values."""

    def forward(self, q, k, v):
        """Operands [batch, heads, places, depth]."""
        r = q.shape[1] // k.shape[1]
        return super().forward(q, k.repeat_interleave(r, 1), v.repeat_interleave(r, 1))


H, BF = torch.float16, torch.bfloat16
FULL = (4, 16, 4096, 128)
"""Batch, heads, places, depth."""
ROWS = {
    "vanilla": (Vanilla, FULL, H),
    "causal": (Causal, FULL, H),
    "softcap": (SoftCap, FULL, H),
    "alibi": (Alibi, FULL, H),
    "window": (Window, FULL, H),
    "bias": (Bias, FULL, H),
    "gqa": (Gqa, FULL, H),
    "sdpa": (Sdpa, FULL, H),
    "sdpa causal": (CausalSdpa, FULL, H),
    "sdpa bf16": (Sdpa, FULL, BF),
    "sdpa 512": (Sdpa, (16, 12, 512, 64), H),
    "vanilla bf16": (Vanilla, FULL, BF),
    "vanilla d64": (Vanilla, (4, 32, 4096, 64), H),
    "causal d64": (Causal, (4, 32, 4096, 64), H),
    "causal 1000": (Causal, (4, 16, 1000, 128), H),
    "vanilla 1000": (Vanilla, (4, 16, 1000, 128), H),
    "vanilla d256": (Vanilla, (2, 16, 4096, 256), H),
    "causal d256": (Causal, (2, 16, 4096, 256), H),
    "causal 8192": (Causal, (2, 16, 8192, 128), H),
}
FIRST = ("vanilla", "causal", "softcap", "alibi")


def inputs(name, device):
    """Operands of a row."""
    kind, shape, dtype = ROWS[name]
    b, h, n, d = shape
    kv = (b, h // 4, n, d) if kind is Gqa else shape
    made = [torch.randn(s, device=device).to(dtype) for s in (shape, kv, kv)]
    return (*made, torch.randn((1, h, n, n), device=device).to(dtype)) if kind is Bias else tuple(made)


def compiled(name, way, given):
    """A row's program, compiled in one way. Raises LookupError if there is no such way."""
    import tilewright

    CHOSEN[0] = WAYS[way]
    PROPOSED.clear()
    call = tilewright.compile(
        ROWS[name][0]().eval(), given, options={"contractions": "inside", "measure": False}
    )
    CHOSEN[0] = 0
    if WAYS[way] and not PROPOSED:
        raise LookupError(f"nothing is proposed for {name}, {way}")
    return call


def reference(name, given):
    """Results in fp32, for a batch and four heads at a time: batch, heads, result."""
    kind = ROWS[name][0]
    module = kind()
    for b in range(given[0].shape[0]):
        q, k, v = (t[b : b + 1].float() for t in given[:3])
        rest = [t[:, :].float() for t in given[3:]]
        # heads one by one, as ALiBi needs to know which; slices of the full change
        for h in range(0, q.shape[1], 4):
            part = slice(h, h + 4)
            kk, vv = (
                (t[:, h // 4 : h // 4 + 1].repeat_interleave(4, 1) for t in (k, v))
                if kind is Gqa
                else (k[:, part], v[:, part])
            )
            s = scores(q[:, part], kk)
            if kind is Alibi:
                n, heads = s.shape[-1], q.shape[1]
                i = torch.arange(n, device=s.device)
                slope = torch.exp2(-(torch.arange(heads, device=s.device) + 1) * 8.0 / heads)[part]
                s = s + slope[:, None, None] * (i[None, :] - i[:, None]).float()
            elif kind is Bias:
                s = s + rest[0][:, part]
            else:
                s = module.change(s, q.shape[1])
            yield b, part, torch.softmax(s, dim=-1) @ vv


def wait(what, seconds=6.0):
    """Wait for the device; end the process if it hangs."""
    done = torch.cuda.Event()
    done.record()
    until = time.monotonic() + seconds
    while not done.query():
        if time.monotonic() > until:
            print(f"HANGS: {what}", flush=True)
            os._exit(3)
        time.sleep(0.002)


def row(name, device, rounds, ways):
    """Check and time one row."""
    from benchmarks.gpu_clock import sets_needed, time_runs

    torch.manual_seed(0)
    kind, shape, _ = ROWS[name]
    moved = 8 * math.prod(shape)
    sets = [inputs(name, device) for _ in range(1 if kind is Bias else sets_needed(moved, device))]
    calls, results = {}, {}
    for way in ways:
        try:
            call = compiled(name, way, sets[0])
            spoiled = torch.empty_like(sets[0][0]).fill_(math.nan)
            del spoiled
            found = call(*sets[0])
            wait(f"{name}, {way}")
            calls[way] = call
            results[way] = (found[0] if isinstance(found, (tuple, list)) else found).clone()
        except FAULTS:
            print(f"{name}, {way}:\n{traceback.format_exc()[-1500:]}", flush=True)
    causal = issubclass(kind, Causal)

    def cudnn(q, k, v, *rest):
        if kind is Gqa:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    try:
        cudnn(*sets[0])
        calls["cudnn (causal or full)"] = cudnn
    except FAULTS as error:
        print("cudnn:", str(error)[:200])
    torch.backends.cuda.matmul.allow_tf32 = False
    worst, largest = dict.fromkeys(results, 0.0), 0.0
    for b, part, right in reference(name, sets[0]):
        largest = max(largest, float(right.abs().max()))
        for way, result in results.items():
            error = float((result[b : b + 1, part].float() - right).abs().max())
            worst[way] = max(worst[way], error if math.isfinite(error) else math.inf)
    timed = time_runs({way: (call, sets) for way, call in calls.items()}, device, rounds)
    flops = 4.0 * math.prod(shape) * shape[2] / (2 if causal else 1)
    base = timed["triton"].timing.median if "triton" in timed else math.nan
    facts = {}
    for way, t in timed.items():
        s = t.timing.median
        error = f"{worst[way] / largest:.2e}" if way in worst else "-"
        rate = flops / s / 1e12
        times = f"{s * 1e6:9.1f} us {rate:7.1f} TFLOP/s  x{base / s:5.2f}"
        print(
            f"{name:14} {way:24} {times}  error {error} {t.method}",
            flush=True,
        )
        facts[way] = {"us": s * 1e6, "error": error, "method": t.method}
    torch.cuda.empty_cache()
    return facts


def build(name, way):
    """Compile, for the cache."""
    device = torch.device("cuda")
    compiled(name, way, inputs(name, device))


def main():
    """Build, check and time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", nargs="*", default=list(FIRST))
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", default="", help="recorded instead of the checkout's own")
    parser.add_argument("--build", nargs=2, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.build:
        build(*a.build)
        return
    start = time.time()
    names = list(ROWS) if a.all else a.only
    jobs = [(n, w) for n in names for w in a.ways]
    running, left = [], list(jobs)
    while left or running:
        while left and len(running) < max(2, (os.cpu_count() or 2) - 2):
            n, w = left.pop(0)
            running.append(
                subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.gluon.printed", "--build", n, w],
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            )
        running = [p for p in running if p.poll() is None]
        time.sleep(0.1)
    print(f"built in {time.time() - start:.1f} s", flush=True)
    device, facts = torch.device("cuda"), {}
    for n in names:
        try:
            facts[n] = row(n, device, a.rounds, a.ways)
        except FAULTS:
            print(f"{n}:\n{traceback.format_exc()[-1500:]}", flush=True)
        if a.json:
            record.write_json(a.json, gpu_report.provenance(device, a.commit) | {"rows": facts})
    print(f"done in {time.time() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
