"""Which loops written in Python become one loop of ours, and what their first call takes: one op with a number that
changes by step in each, and what steps write.

    python -m benchmarks.python_loop_steps [--steps 70] [--only NAME] [--json FILE]

Each in inference and in training: whether all graphs hold a loop (or two, where the program takes gradients itself),
else why not as the compiler says it; whether results and gradients are right (in doubles at most four times as far off
as eager, or a few units of single precision); the seconds of the first call by the wall, and of this process's own work
(other compilers' not counted).
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from torch import Tensor

import tilewright
from benchmarks import record
from benchmarks.record import Facts

Step = Callable[[Tensor, Tensor, int, float], Tensor]
Program = Callable[[Tensor, Tensor], Tensor]
WIDTH, LIMIT, UNITS = 6, 120, 256 * torch.finfo(torch.float32).eps


def _norms(h: Tensor) -> tuple[Tensor, Tensor]:
    return h.new_zeros(WIDTH), h.new_ones(WIDTH)


STEPS: dict[str, Step] = {
    "add(alpha)": lambda h, y, k, s: torch.add(h, y, alpha=s).sin(),
    "addbmm(alpha)": lambda h, y, k, s: torch.addbmm(h, y[None], h[None], alpha=s, beta=0.5).sin(),
    "addmm(alpha, beta)": lambda h, y, k, s: torch.addmm(h, y, h, alpha=s, beta=s).sin(),
    "addr(alpha)": lambda h, y, k, s: torch.addr(h, y[0], y[1], alpha=s).sin(),
    "alpha_dropout(p)": lambda h, y, k, s: F.alpha_dropout(torch.sin(h + y), s, True),
    "arange(start)": lambda h, y, k, s: torch.sin(h + y * torch.arange(k, k + WIDTH)),
    "batch_norm(eps)": lambda h, y, k, s: F.batch_norm(h, None, None, training=True, eps=s) + y,
    "batch_norm(momentum)": lambda h, y, k, s: F.batch_norm(h, *_norms(h), training=True, momentum=s) + y,
    "bernoulli(p)": lambda h, y, k, s: torch.sin(h + y) * torch.bernoulli(h.detach(), s),
    "cdist(p)": lambda h, y, k, s: h / 2 + 0.1 * torch.cdist(h, y, p=1.2 + s),
    "celu(alpha)": lambda h, y, k, s: F.celu(torch.sin(h + y), s),
    "clamp": lambda h, y, k, s: torch.sin(h + y).clamp(-s, s),
    "cosine_similarity(eps)": lambda h, y, k, s: torch.sin(h + F.cosine_similarity(h, y, 1, s)),
    "cross_entropy(label_smoothing)": lambda h, y, k, s: torch.sin(
        h + F.cross_entropy(h, y.softmax(1), label_smoothing=s)
    ),
    "dist(p)": lambda h, y, k, s: torch.sin(h + 0.1 * torch.dist(h, y, p=1 + s)),
    "dropout(p)": lambda h, y, k, s: F.dropout(torch.sin(h + y), s),
    "dropout1d(p)": lambda h, y, k, s: F.dropout1d(torch.sin(h + y)[None], s)[0],
    "elu(alpha)": lambda h, y, k, s: F.elu(torch.sin(h + y), s),
    "float_power": lambda h, y, k, s: torch.sin(h + torch.float_power(y.abs() + 1, s).to(h.dtype)),
    "group_norm(eps)": lambda h, y, k, s: F.group_norm(h + y, 2, eps=s),
    "hardshrink": lambda h, y, k, s: F.hardshrink(torch.sin(h + y), s / 10),
    "hardtanh": lambda h, y, k, s: F.hardtanh(torch.sin(h + y), -s, s),
    "hinge_embedding_loss(margin)": lambda h, y, k, s: torch.sin(
        h + F.hinge_embedding_loss(h, y.sign(), margin=s)
    ),
    "histc": lambda h, y, k, s: torch.sin(h) + torch.histc(y.detach(), WIDTH, -s, s),
    "huber_loss(delta)": lambda h, y, k, s: torch.sin(h + F.huber_loss(h, y, delta=s)),
    "index_add(alpha)": lambda h, y, k, s: torch.sin(h).index_add(0, torch.tensor([1, 2]), y[:2], alpha=s),
    "instance_norm(eps)": lambda h, y, k, s: F.instance_norm((h + y)[None], eps=s)[0],
    "instance_norm(momentum)": lambda h, y, k, s: F.instance_norm(
        (h + y)[None], *_norms(h), use_input_stats=True, momentum=s / 2
    )[0],
    "isclose(rtol)": lambda h, y, k, s: torch.sin(h) + torch.isclose(y, h, rtol=s).to(h.dtype),
    "layer_norm(eps)": lambda h, y, k, s: F.layer_norm(h + y, (WIDTH,), eps=s),
    "leaky_relu(slope)": lambda h, y, k, s: F.leaky_relu(torch.sin(h + y), s),
    "lerp(weight)": lambda h, y, k, s: torch.lerp(h, y, s / 10),
    "linspace(end)": lambda h, y, k, s: torch.sin(h + y * torch.linspace(0, s, WIDTH)),
    "local_response_norm": lambda h, y, k, s: F.local_response_norm((h + y)[None], 2, s, 0.75, 1 + s)[0],
    "logit(eps)": lambda h, y, k, s: torch.sin(torch.logit(torch.sigmoid(h + y), eps=s / 20)),
    "lp_pool1d(p)": lambda h, y, k, s: torch.sin(h + y + F.lp_pool1d(h.abs()[None] + 0.1, 1 + s, 1)[0]),
    "margin_ranking_loss": lambda h, y, k, s: torch.sin(h + F.margin_ranking_loss(h, y, y.sign(), margin=s)),
    "masked_fill": lambda h, y, k, s: torch.sin(h + y).masked_fill(y > 1, s),
    "multi_margin_loss": lambda h, y, k, s: torch.sin(
        h + y + F.multi_margin_loss(h, torch.arange(WIDTH), margin=s)
    ),
    "nan_to_num": lambda h, y, k, s: torch.nan_to_num(torch.sin(h + y), nan=s),
    "norm(p)": lambda h, y, k, s: torch.sin(h + y * torch.norm(h, p=1 + s, dim=1, keepdim=True)),
    "normal(std)": lambda h, y, k, s: torch.sin(h + y) + torch.normal(0.0, s, (WIDTH, WIDTH)),
    "normalize(eps)": lambda h, y, k, s: F.normalize(torch.sin(h + y), eps=s, dim=1),
    "normalize(p)": lambda h, y, k, s: F.normalize(torch.sin(h + y), p=1 + s, dim=1),
    "pad(value)": lambda h, y, k, s: torch.sin(F.pad(h + y, (1, 1), value=s)[:, :-2]),
    "pairwise_distance(p)": lambda h, y, k, s: torch.sin(h + 0.1 * F.pairwise_distance(h, y, p=1 + s)),
    "poisson_nll_loss(eps)": lambda h, y, k, s: torch.sin(
        h + F.poisson_nll_loss(h.abs(), y.abs(), log_input=False, eps=s)
    ),
    "quantile(q)": lambda h, y, k, s: torch.sin(h + torch.quantile(y * h, s, dim=1)),
    "randint(high)": lambda h, y, k, s: torch.sin(h + y) + torch.randint(0, k + 2, (WIDTH, WIDTH)).to(h.dtype),
    "renorm(maxnorm)": lambda h, y, k, s: torch.renorm(torch.sin(h + y), 2, 0, s),
    "rms_norm(eps)": lambda h, y, k, s: F.rms_norm(h + y, (WIDTH,), eps=s),
    "roll": lambda h, y, k, s: torch.sin(torch.roll(h, k, 1) + y),
    "rrelu": lambda h, y, k, s: F.rrelu(torch.sin(h + y), s / 4, s),
    "rrelu, training": lambda h, y, k, s: F.rrelu(torch.sin(h + y), s / 4, s, training=True),
    "scaled_dot_product_attention(scale)": lambda h, y, k, s: F.scaled_dot_product_attention(
        h[None], y[None], h[None], scale=s
    )[0],
    "scaled_dot_product_attention(dropout_p)": lambda h, y, k, s: F.scaled_dot_product_attention(
        h[None], y[None], h[None], dropout_p=s / 2
    )[0],
    "smooth_l1_loss(beta)": lambda h, y, k, s: torch.sin(h + F.smooth_l1_loss(h, y, beta=s)),
    "softplus(beta)": lambda h, y, k, s: F.softplus(torch.sin(h + y), s),
    "softplus(beta of either sign)": lambda h, y, k, s: F.softplus(torch.sin(h + y), s - 0.51),
    "softplus(threshold)": lambda h, y, k, s: F.softplus(torch.sin(h + y), 1.0, s),
    "softshrink": lambda h, y, k, s: F.softshrink(torch.sin(h + y), s / 10),
    "std(correction)": lambda h, y, k, s: torch.sin(h + y) + torch.std(y, 1, correction=s, keepdim=True),
    "tensor of numbers": lambda h, y, k, s: torch.sin(h + y * torch.tensor([s, 1.0, 2.0, k, 4.0, 5.0])),
    "threshold": lambda h, y, k, s: F.threshold(torch.sin(h + y), s - 0.3, s),
    "trapezoid(dx)": lambda h, y, k, s: torch.sin(h + torch.trapezoid(y, dx=s, dim=1)),
    "tril": lambda h, y, k, s: torch.sin(h.tril(k % 9 - 4) + y),
    "triplet_margin_loss": lambda h, y, k, s: torch.sin(h + F.triplet_margin_loss(h, y, h * y, margin=s)),
    "upsample(scale)": lambda h, y, k, s: torch.sin(
        h + F.interpolate(y[None], scale_factor=1 + s, mode="linear", recompute_scale_factor=False)[0, :, :WIDTH]
    ),
}  # fmt: skip
"""What a step makes of the last result, another operand, its own number, and a number between 0.1 and 1."""


def in_steps(step: Step, steps: int) -> Program:
    """The program that takes so many steps."""

    def program(h: Tensor, y: Tensor) -> Tensor:
        for k in range(steps):
            h = step(h, y, k, 0.1 + 0.85 * k / steps)
        return h

    return program


def shared_batch_norm(steps: int) -> Program:
    """A batch norm in training whose weights and statistics all steps share."""

    def program(h: Tensor, y: Tensor) -> Tensor:
        mean, var = y.new_zeros(WIDTH), y.new_ones(WIDTH)
        for _ in range(steps):
            h = torch.sin(F.batch_norm(h, mean, var, y[0], y[1], True)) + h / 2
        return h * var + mean

    return program


def cache(steps: int, *, whole: bool) -> Program:
    """A cache of which each step writes a part, and reads all, or all so far (of another size in each step)."""

    def program(h: Tensor, y: Tensor) -> Tensor:
        held = y.new_zeros(steps, WIDTH)
        for k in range(steps):
            held[k] = torch.tanh(h[0])
            kept = held if whole else held[: k + 1]
            h = h / 2 + (h @ kept.t()).softmax(-1) @ kept + y
        return h

    return program


def cell_under_autocast(steps: int) -> Program:
    """An op that is made of others, in half types."""

    def program(h: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=h.dtype == torch.float32):
            for _ in range(steps):
                h = torch.rnn_tanh_cell(y, h, y, y, y[0], y[1])
        return h.to(y.dtype)

    return program


def within_functions(steps: int) -> dict[str, Program]:
    """Steps in functions of torch's that take functions, and steps that call them."""

    def whole(h: Tensor, y: Tensor) -> Tensor:
        for _ in range(steps):
            h = torch.tanh(h @ y + h / 2)
        return h

    def total(h: Tensor, y: Tensor) -> Tensor:
        return whole(h, y).sum()

    def descended(h: Tensor, y: Tensor) -> Tensor:
        for _ in range(steps):
            h = h - 0.1 * torch.func.grad(lambda h: torch.cos(h @ y).sum())(h)
        return h

    return {
        "in torch.func.grad": torch.func.grad(total),
        "in vmap(grad)": torch.func.vmap(torch.func.grad(total), in_dims=(0, None)),
        "in vmap": torch.func.vmap(whole, in_dims=(0, None)),
        "in jvp": lambda h, y: torch.func.jvp(lambda h: whole(h, y), (h,), (y,))[1],
        "steps of torch.func.grad": descended,
    }


def programs(steps: int) -> dict[str, Program]:
    """All of them."""
    return {name: in_steps(step, steps) for name, step in STEPS.items()} | {
        "batch norm, statistics shared": shared_batch_norm(steps),
        "cache, all of it read": cache(steps, whole=True),
        "cache, read so far (sizes grow)": cache(steps, whole=False),
        "a cell under autocast": cell_under_autocast(steps),
        **within_functions(steps),
    }


class _Said(logging.Handler):
    """What the compiler says of loops."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the line, without places in memory."""
        if "stay apart" in record.getMessage():
            self.lines.append(record.getMessage().split(" at 0x")[0])


def results(program: Program, dtype: torch.dtype, *, train: bool) -> list[Tensor]:
    """What a call makes, and the gradients of its operands."""
    torch.manual_seed(0)
    leaves = [torch.randn(WIDTH, WIDTH).to(dtype).requires_grad_(train) for _ in range(2)]
    torch.manual_seed(1)
    with torch.set_grad_enabled(train):
        made = program(*leaves)
        if not train:
            return [made]
        weights = torch.linspace(0.5, 1.5, made.numel(), dtype=made.dtype).view_as(made)
        found = torch.autograd.grad((made * weights).sum(), leaves, materialize_grads=True)
    return [made.detach(), *found]


def distance(made: list[Tensor], exact: list[Tensor]) -> float:
    """The largest error in units of the largest element of its tensor."""
    pairs = zip(made, exact, strict=True)
    return max(
        float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(1e-30)) for a, b in pairs
    )


def run_case(program: Program, *, train: bool) -> Facts:
    """What became of one program."""
    said, log = _Said(), logging.getLogger("tilewright")
    tilewright.reset()
    torch.compiler.reset()
    log.addHandler(said)
    wall, own = time.perf_counter(), time.process_time()
    try:
        made = results(
            torch.compile(program, backend=tilewright.backend, fullgraph=True), torch.float32, train=train
        )
    finally:
        log.removeHandler(said)
    took = {"first_call_s": time.perf_counter() - wall, "own_work_s": time.process_time() - own}
    eager = results(program, torch.float32, train=train)
    try:
        exact = results(program, torch.float64, train=train)
    except RuntimeError:  # tensors of singles in the program
        exact = eager
    wrong, usual = distance(made, exact), distance(eager, exact)
    kept = tilewright.compilations()
    loops = [sum(c.name == "loop" for c in m.calls) for m in kept]
    found: Facts = {"one_loop": all(0 < n < 3 for n in loops), "right": wrong <= max(4 * usual, UNITS)}
    found |= {key: round(value, 2) for key, value in took.items()} | {"error": wrong, "eager_error": usual}
    return found if found["one_loop"] else found | {"why": [*dict.fromkeys(said.lines)][:2]}


def _late(*_: object) -> None:
    raise TimeoutError


def judged(program: Program, *, train: bool) -> Facts:
    """`run_case`, which may fail or take too long."""
    signal.signal(signal.SIGALRM, _late)
    signal.alarm(LIMIT)
    try:
        return run_case(program, train=train)
    except Exception as error:  # noqa: BLE001  (the report is about such)
        return {"one_loop": False, "right": False, "why": [f"{type(error).__name__}: {str(error)[:200]}"]}
    finally:
        signal.alarm(0)


@click.command(help=__doc__)
@click.option("--steps", default=70)
@click.option("--only", default="")
@click.option("--json", "file", type=click.Path(path_type=Path), default=None)
def main(steps: int, only: str, file: Path | None) -> None:
    """See the module."""
    logging.getLogger("tilewright").setLevel(logging.INFO)
    cases: dict[str, Facts] = {}
    for name, program in programs(steps).items():
        if only in name:
            cases[name] = {way: judged(program, train=way == "training") for way in ("inference", "training")}
            click.echo(f"{name}: {cases[name]}")
            write(file, steps, cases)
    click.echo(str(counted(cases)))


def counted(cases: Mapping[str, Facts]) -> Facts:
    """How many are one loop, and right."""
    ways = [way for case in cases.values() for way in case.values() if isinstance(way, dict)]
    return {
        "cases": len(ways),
        **{key: sum(way[key] is True for way in ways) for key in ("one_loop", "right")},
    }


def write(file: Path | None, steps: int, cases: Mapping[str, Facts]) -> None:
    """Write what is known by now: a run that is cut keeps it."""
    if file is not None:
        facts = record.provenance(torch.get_num_threads()) | {"steps": steps, "of": len(programs(steps))}
        record.write_json(file, facts | {"counts": counted(cases), "results": cases})


if __name__ == "__main__":
    main()
