"""Measures on the device whether a convolution that adds and rectifies while it writes is right and faster."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tilewright.analysis.size_hints import SizeHints
from tilewright.ir.dtype import DType
from tilewright.ir.expr import Expr
from tilewright.ir.graph import LibraryCall, Operand, Value, bind
from tilewright.ir.identity import identity
from tilewright.ir.sizes import dims
from tilewright.library.fuse_convolutions import FusedForm
from tilewright.library.offers.offer import channels_last
from tilewright.runtime.plan.tensors import drawn, torch_dtype
from tilewright.runtime.stats import STATS
from tilewright.runtime.store.cache import ContentStore, digest
from tilewright.runtime.store.tuned import Tuned
from tilewright.runtime.store.tuning_file import Entry
from tilewright.target import MemoryKind, Target

from .replays import replayed_seconds

LOG = logging.getLogger("tilewright")
FILE = "found"
KINDS = {"right": "fused_convolution", "seconds": "convolution"}
"""Of entries in tuning files."""

Run = Callable[[], Tensor]
Laid = Sequence[Expr] | None
"""Strides; None: dense."""
Placed = tuple[tuple[int, ...], tuple[int, ...], DType]
"""Sizes, strides and type of an operand."""


@dataclass(slots=True)
class ConvolutionTimer:
    """Measures convolutions on `device`, at the sizes of `hints`; what it finds stays in `store`."""

    target: Target
    store: ContentStore
    hints: SizeHints
    device: str
    tuned: Tuned = field(default_factory=Tuned)
    """What a tuning file says, before all."""
    known: dict[str, str] = field(default_factory=dict)

    def __call__(self, form: FusedForm) -> bool:
        """Whether the fused form is right, and faster than the convolution and a pass over its result. One that cannot
        be run here is not, nor where the program asks for results that are the same each time: it cannot be told so."""
        same = torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled()
        if same or not torch.backends.cudnn.enabled:
            return False
        values = [*form.inputs, *filter(None, (form.second,))]
        wants = [*form.fused.wants, *[None] * len(values)][: len(values)]
        laid = [
            channels_last(v.shape) if s is None and len(v.shape) == 4 else s
            for v, s in zip(values, wants, strict=True)
        ]
        if (
            self._found("right", form.fused, values, laid, lambda tensors: str(_is_right(form, tensors)))
            != "True"
        ):
            return False
        # As it runs beside a kernel, which adds the bias.
        x, weight, _, *rest = form.plain.args
        plain = self.seconds(replace(form.plain, args=(x, weight, None, *rest)), values, laid)
        fused = self.seconds(form.fused, values, laid)
        moved = [form.result] * 2 + [v for v in (form.second,) if v is not None]
        return plain is not None and fused is not None and fused <= plain + self.pass_seconds(moved)

    def seconds(self, call: LibraryCall, inputs: Sequence[Value], laid: Sequence[Laid]) -> float | None:
        """Seconds of one run on operands with these strides (None: dense); None where it cannot be run."""
        found = self._found(
            "seconds", call, inputs, laid, lambda tensors: repr(replayed_seconds(_bound(call, tensors)))
        )
        return float(found) if found else None

    def pass_seconds(self, moved: Sequence[Value]) -> float:
        """Modelled seconds of a kernel that reads or writes each of these once."""
        size = sum(self.hints.estimate(v.numel) * v.dtype.bytes for v in moved)
        device = next(x for x in self.target.levels if x.kind is MemoryKind.DEVICE)
        return self.target.launch_seconds + size / device.bandwidth

    def _found(
        self, what: str, call: LibraryCall, inputs: Sequence[Value], laid: Sequence[Laid],
        measure: Callable[[list[Tensor]], str],
    ) -> str:  # fmt: skip
        """What `measure` says of random operands, or has said before; empty where the call cannot be run."""
        shapes = [self._placed(v, s) for v, s in zip(inputs, laid, strict=True)]
        key = self._key(what, call, shapes)
        if key in self.known:
            return self.known[key]
        kind = KINDS[what]
        found = _text(self.tuned.get(kind, key))
        found = self._stored(key) if found is None else found
        if found is None and not self.tuned.seconds():
            self.tuned.leave(kind, key)
            return ""
        if found is None:
            STATS.timed += 1
            found = self._measured(call, shapes, measure)
            self.store.put(key, {FILE: found.encode()})
        self.known[key] = found
        self.tuned.note(kind, key, {"what": _told(call, shapes), **_entry(what, found)})
        return found

    def _placed(self, v: Value, strides: Laid) -> Placed:
        laid = strides if strides is not None else dims.dense_strides(v.shape)
        sizes, steps = (tuple(map(self.hints.estimate, x)) for x in (v.shape, laid))
        return sizes, steps, v.dtype

    def _key(self, what: str, call: LibraryCall, shapes: Sequence[Placed]) -> str:
        where = (
            torch.cuda.get_device_name(self.device),
            torch.__version__,
            str(torch.backends.cudnn.version()),
        )
        asked = identity(call.function, call.args, self.target.digest(), tuple(shapes))
        return digest("convolution", what, *where, asked, str(torch.backends.cudnn.benchmark))

    def _stored(self, key: str) -> str | None:
        folder = self.store.get(key)
        try:
            return None if folder is None else (folder / FILE).read_text(encoding="utf-8")
        except OSError as error:
            LOG.info("nothing is taken from %s: %s", folder, error)
            return None

    def _measured(
        self, call: LibraryCall, shapes: Sequence[Placed], measure: Callable[[list[Tensor]], str]
    ) -> str:
        try:
            with torch.no_grad(), torch.cuda.device(self.device):
                return measure([self._tensor(shape) for shape in shapes])
        except (RuntimeError, MemoryError) as refused:
            LOG.info("%s is not a way here: %s", call.name, str(refused))
        except Exception:
            LOG.exception("%s failed in a way that nobody expects; it is not taken", call.name)
        return ""

    def _tensor(self, placed: Placed) -> Tensor:
        sizes, steps, dtype = placed
        return drawn(torch.empty_strided(sizes, steps, dtype=torch_dtype(dtype), device=self.device))


def _entry(what: str, found: str) -> Entry:
    """What was found as fields of a tuning file."""
    if what == "right":
        return {"right": found == "True"}
    return {"seconds": float(found) if found else None}


def _text(entry: Entry | None) -> str | None:
    """What was found, from the fields of a tuning file."""
    match entry:
        case {"right": bool(right)}:
            return str(right)
        case {"seconds": None}:
            return ""
        case {"seconds": int() | float() as seconds}:
            return repr(float(seconds))
        case _:
            return None


def _told(call: LibraryCall, shapes: Sequence[Placed]) -> str:
    """A call in words."""
    return f"{call.name} of {', '.join(f'{t.name}{[*sizes]} laid {[*steps]}' for sizes, steps, t in shapes)}"


def _is_right(form: FusedForm, tensors: Sequence[Tensor]) -> bool:
    """Whether results lie as those of the convolution, and NaN stays NaN: some kernels of the library take the other
    operand of it."""
    tensors[0].fill_(float("nan"))
    plain, fused = (_bound(call, tensors)() for call in (form.plain, form.fused))
    return plain.stride() == fused.stride() and bool((plain.isnan() == fused.isnan()).all())


def _bound(call: LibraryCall, tensors: Sequence[Tensor]) -> Run:
    args = [tensors[a.index] if isinstance(a, Operand) else a for a in call.args]
    function, named = bind(call.function), dict(call.kwargs)

    def run() -> Tensor:
        made = function(*args, **named)
        assert isinstance(made, Tensor)
        return made

    return run
