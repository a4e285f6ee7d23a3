"""Times kernels of /tmp/gaps45 that stand in probe45.json beside the library's products (not to be kept)."""
import importlib.util, json, sys, tempfile
from pathlib import Path
import torch

def clock(run, count=5, rounds=7):
    run(); torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for _ in range(count): run()
    found = []
    for _ in range(rounds):
        a, b = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        a.record(); g.replay(); b.record(); torch.cuda.synchronize()
        found.append(a.elapsed_time(b) / count * 1e3)
    return sorted(found)[rounds // 2]

def main():
    table = json.loads(Path(__file__).with_suffix(".json").read_text())
    folder = Path(tempfile.mkdtemp()); out = {}
    dev = torch.device("cuda"); error = torch.zeros(1, dtype=torch.int32, device=dev)
    torch.manual_seed(0)
    for n, (name, e) in enumerate(table.items()):
        try:
            f = folder / f"m{n}.py"; f.write_text(e["text"])
            spec = importlib.util.spec_from_file_location(f"m{n}", f); m = importlib.util.module_from_spec(spec); spec.loader.exec_module(m)
            ts = [(torch.randn(*s, device=dev) * 0.7).half() for s in e["shapes"]]
            run = lambda: m.k0[(e["grid"],)](*ts, error, num_warps=e["warps"], num_stages=e["stages"])
            us = clock(run); note = ""
            if name.startswith("behind"):
                s, v, o = ts
                S = s.shape[-1]; later = torch.ones(S, S, dtype=torch.bool, device=dev).triu(1)
                want = torch.softmax((s[:2].float() * 576**-0.5).masked_fill(later, float("-inf")), -1) @ v[:2].float()
                note = f"error {(o[:2].float() - want).abs().max().item():.2e}"
            out[name] = us; print(f"{name:28s} {us:9.1f} us {note}", flush=True)
            del ts
        except Exception as x:  # noqa: BLE001
            print(name, "FAILED", type(x).__name__, str(x)[:200], flush=True)
        torch.cuda.empty_cache()
    half = lambda *s: (torch.randn(*s, device=dev) * 0.7).half()
    q, k, v, o = half(16, 4096, 576), half(16, 4096, 576), half(16, 4096, 512), None
    s = torch.empty(16, 4096, 4096, device=dev, dtype=torch.float16)
    print(f"{'bmm q k':28s} {clock(lambda: torch.bmm(q, k.mT, out=s)):9.1f} us")
    r = torch.empty(16, 4096, 512, device=dev, dtype=torch.float16)
    print(f"{'bmm p v':28s} {clock(lambda: torch.bmm(s, v, out=r)):9.1f} us")
    s2 = s.view(1, 8, -1)[:, :, : 4096 * 4096 * 2]; w = half(1, 8, 8); r2 = torch.empty_like(s2)
    print(f"{'bmm mix 8 x 8 x 2^25':28s} {clock(lambda: torch.bmm(w, s2, out=r2)):9.1f} us")
    q, k, v = half(16, 4096, 64), half(16, 4096, 64), half(16, 4096, 64)
    print(f"{'bmm q k 64':28s} {clock(lambda: torch.bmm(q, k.mT, out=s)):9.1f} us")
    r = torch.empty(16, 4096, 64, device=dev, dtype=torch.float16)
    print(f"{'bmm p v 64':28s} {clock(lambda: torch.bmm(s, v, out=r)):9.1f} us")
    q, k = half(2, 8 * 4096, 512), half(2, 4096, 512); s3 = s.view(2, 8 * 4096, 4096)
    print(f"{'bmm scaled q, heads summed':28s} {clock(lambda: torch.bmm(q, k.mT, out=s3)):9.1f} us")
    print(json.dumps(out))

main()
