"""Every knob of the compiler, once: typed, documented, from code or from the environment, in the cache key.

Precedence: an argument in code, then the environment (`TILEWRIGHT_` + the upper-case name), then the default.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, Self, TypeGuard

from .errors import InputError, near_match, warn
from .tuning.timing_limits import PRODUCTS

PREFIX = "TILEWRIGHT_"
Trim = Literal["assume_finite", "exact"]
Contractions = Literal["modelled", "inside", "library"]
Fusion = Literal["full", "cover", "none"]
EarlyLaunch = Literal["none", "own", "any"]
OptionValue = bool | int | str | None

MODES: Mapping[str, Mapping[str, OptionValue]] = {
    "default": {},
    "reduce-overhead": {"cuda_graphs": True},
    "max-autotune-no-cudagraphs": {"measure": True, "tune_seconds": PRODUCTS.max_autotune_seconds},
    "max-autotune": {"measure": True, "tune_seconds": PRODUCTS.max_autotune_seconds, "cuda_graphs": True},
}
"""The options that the modes of `torch.compile` stand for."""

_ELSEWHERE = frozenset({"cache", "cache_dir", "tuning_file", "verify"})
_NOT_TIMED = frozenset(
    {"strict", "freeze", "threads", "measure", "tune_seconds", "cuda_graphs", "pin_threads"}
)
"""(Whose threads are timed, and how many, is part of the device's name.)"""

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The settings of one compilation; frozen and hashable. Raises `InputError` for a value of the wrong type."""

    strict: bool = False
    """Raise `UnsupportedError` where an op would run as a library call by need instead of counting it."""

    freeze: bool | None = None
    """Treat weights as constants (fold and pack them); None: only for model files and exported programs."""

    threads: int | None = None
    """Threads that generated CPU kernels use; None: as many as `torch.get_num_threads()` says at the call."""

    cache: bool = True
    """Keep built kernels on disk between processes."""

    cache_dir: str | None = None
    """Directory of the kernel cache; None: the user's cache directory of the operating system."""

    measure: bool = True
    """Time the ways to do a product, convolution or attention when compiling and take the fastest; else the one that
    is expected to be."""

    tune_seconds: int = 5
    """Seconds that building and timing kernels of products and convolutions beside a library's may take, about, for
    each graph on a GPU; 0: torch's attention op is the library's, and so are these but where a table of the package has
    sizes that are near, at which kernels were measured as faster on such a device."""

    tuning_file: str | None = None
    """A file that `tilewright tune` wrote: what it says of this device is taken and not timed again, whatever
    `tune_seconds` is. One of another device, version or schema, or a damaged one, is ignored with a warning."""

    compiler: str | None = None
    """Path or name of the C++ compiler; None: the first usable one that is found."""

    round_intermediates: bool = False
    """Round half-precision values inside a kernel as eager would, instead of keeping them in fp32."""

    trim: Trim = "assume_finite"
    """Skip masked work trusting that masked values are finite (`assume_finite`), or never (`exact`)."""

    contractions: Contractions = "modelled"
    """Contractions whose large results are folded again (attention): kernels of our own where these are modelled as
    faster than library calls (`modelled`) or never (`library`); or kernels for all contractions (`inside`). On GPUs
    `modelled` also times others beside the library (`tune_seconds`)."""

    rules: bool = True
    """Let guarded algebra rearrange regions around contractions before their kernels are chosen; without, they are
    taken as they are written. To see what the rules are worth."""

    fusion: Fusion = "full"
    """Which ops share a kernel: those that are faster together (`full`), or none (`none`); `cover` chooses kernels as
    `full` does, with what they compute twice, and then runs each op by itself. To see what fusing is worth."""

    tf32: bool | None = None
    """Let products of fp32 inside generated GPU kernels read 10 bits of fraction, on matrix units; None: as torch's own
    switch for matrix products says when a graph is compiled (`torch.set_float32_matmul_precision`)."""

    cuda_graphs: bool = False
    """Replay CUDA graphs for sizes that were seen before, where a graph can be captured."""

    early_launch: EarlyLaunch = "own"
    """Launch generated GPU kernels before the kernel in front has ended (compute capability 9.0 and later); they wait
    for its end before they touch memory. Behind other generated kernels of the same run (`own`), behind any kernel, as
    of a library or of the caller (`any`), or never (`none`)."""

    specialise_warps: bool = True
    """On an H100 or H200, also time kernels of attention in which one warp loads for the others, printed in Gluon, and
    take them where they are faster."""

    verify: bool | Literal["results"] = False
    """Hold each kernel and library call against its meaning as it runs, in eager's types and in float64, and raise
    `WrongResult` at the first that differs; loops are looked at step by step, and as a whole (slow; no CUDA graph is
    replayed). `results`: look only whose memory the results of calls are."""

    pin_threads: bool = False
    """Pin worker threads to cores. For benchmarks on quiet machines; changes no thread of the caller."""

    def __post_init__(self) -> None:
        for name in _CHECKS:
            object.__setattr__(self, name, _checked(name, getattr(self, name), place="options"))

    @classmethod
    def make(
        cls,
        given: Mapping[str, object] | Self | None = None,
        environ: Mapping[str, str] | None = None,
        mode: str | None = None,
    ) -> Options:
        """Build from `given` over what `mode` stands for, over the environment (`os.environ` if None). An `Options`
        takes what the mode stands for, and passes unchanged without one.

        Raises `InputError` for an unknown name (the hint names the nearest one) or a value of the wrong type.
        """
        meant = _options_of_mode(mode)
        if isinstance(given, Options):
            return given.replace(**meant) if meant else given
        if given is not None and not isinstance(given, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(
                f"options cannot be {given!r}", phase="options", hint='a mapping by name, {"threads": 2}'
            )
        values = cls._from_environment(os.environ if environ is None else environ)
        values |= meant
        for name, value in (given or {}).items():
            values[name] = _checked(name, value, place="options")
        return cls(**values)  # pyright: ignore[reportArgumentType]  (each value was checked by its field's own check)

    @staticmethod
    def _from_environment(environ: Mapping[str, str]) -> dict[str, OptionValue]:
        values: dict[str, OptionValue] = {}
        for name in _CHECKS:
            text = environ.get(PREFIX + name.upper(), "").strip()
            if text:
                values[name] = _checked(name, _parse(name, text), place=PREFIX + name.upper())
        for name in environ:
            if name.startswith(PREFIX) and name.removeprefix(PREFIX).lower() not in _CHECKS:
                _warn_unknown(name)
        return values

    def digest(self) -> str:
        """Hex SHA-256 of every option that can change generated code; part of the cache key.

        Left out: where results are kept or come from, and `verify`.
        """
        return self._digest(_ELSEWHERE)

    def clock_digest(self) -> str:
        """The same of every option that can change what a clock finds of a given task: how long it may take, and what
        is done with what it finds, cannot."""
        return self._digest(_ELSEWHERE | _NOT_TIMED)

    def _digest(self, left_out: frozenset[str]) -> str:
        shown = {k: v for k, v in dataclasses.asdict(self).items() if k not in left_out}
        return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()

    def replace(self, **changes: object) -> Options:
        """A copy with some options changed; the same checks as `make`, but no look at the environment."""
        checked = {name: _checked(name, value, place="options") for name, value in changes.items()}
        return dataclasses.replace(self, **checked)  # pyright: ignore[reportArgumentType]


@functools.cache
def _warn_unknown(variable: str) -> None:
    """Say once that a variable which looks like an option is none."""
    known = [PREFIX + name.upper() for name in _CHECKS]
    close = difflib.get_close_matches(variable, known, 1)
    meant = f"; did you mean {close[0]}?" if close else ""
    warn(f"{variable} in the environment is no option{meant}")


def _options_of_mode(mode: str | None) -> Mapping[str, OptionValue]:
    if mode is not None and mode not in MODES:
        hint = near_match(str(mode), MODES, "the modes")
        raise InputError(f"unknown mode {mode!r}", phase="options", hint=hint)
    return MODES[mode or "default"]


def _is_flag(value: object) -> TypeGuard[bool]:
    return isinstance(value, bool)


def _is_flag_or_none(value: object) -> TypeGuard[bool | None]:
    return value is None or isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_count(value: object) -> TypeGuard[int | None]:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1)


def _is_text(value: object) -> TypeGuard[str | None]:
    return value is None or (isinstance(value, str) and bool(value) and "\0" not in value)


def _is_contractions(value: object) -> TypeGuard[Contractions]:
    return value in ("modelled", "inside", "library")


def _is_fusion(value: object) -> TypeGuard[Fusion]:
    return value in ("full", "cover", "none")


def _is_early_launch(value: object) -> TypeGuard[EarlyLaunch]:
    return value in ("none", "own", "any")


def _is_verify(value: object) -> TypeGuard[bool | Literal["results"]]:
    return isinstance(value, bool) or value == "results"


def _is_trim(value: object) -> TypeGuard[Trim]:
    return value in ("assume_finite", "exact")


OptionsLike = Options | Mapping[str, OptionValue] | None
"""What entry points take as options."""

_CHECKS: Mapping[str, tuple[Callable[[object], TypeGuard[OptionValue]], str]] = {
    "strict": (_is_flag, "true or false"),
    "freeze": (_is_flag_or_none, "true, false or none"),
    "threads": (_is_count, "a positive integer or none"),
    "cache": (_is_flag, "true or false"),
    "cache_dir": (_is_text, "a path or none"),
    "measure": (_is_flag, "true or false"),
    "tune_seconds": (_is_number, "a whole number of seconds, 0 or more"),
    "tuning_file": (_is_text, "a path or none"),
    "compiler": (_is_text, "a path or none"),
    "round_intermediates": (_is_flag, "true or false"),
    "trim": (_is_trim, "'assume_finite' or 'exact'"),
    "contractions": (_is_contractions, "'modelled', 'inside' or 'library'"),
    "rules": (_is_flag, "true or false"),
    "fusion": (_is_fusion, "'full', 'cover' or 'none'"),
    "tf32": (_is_flag_or_none, "true, false or none"),
    "cuda_graphs": (_is_flag, "true or false"),
    "early_launch": (_is_early_launch, "'none', 'own' or 'any'"),
    "verify": (_is_verify, "true, false or 'results'"),
    "pin_threads": (_is_flag, "true or false"),
    "specialise_warps": (_is_flag, "true or false"),
}


def _checked(name: str, value: object, *, place: str) -> OptionValue:
    if name not in _CHECKS:
        near = difflib.get_close_matches(name, _CHECKS, n=1, cutoff=0.0)
        hint = f"did you mean {near[0]!r}? All: {', '.join(_CHECKS)}"
        raise InputError(f"unknown option {name!r}", phase="options", place=place, hint=hint)
    check, wanted = _CHECKS[name]
    if isinstance(value, os.PathLike):
        value = os.fspath(value)  # pyright: ignore[reportUnknownArgumentType]
    if not check(value):
        raise InputError(
            f"option {name} cannot be {value!r}", phase="options", place=place, hint=f"use {wanted}"
        )
    return value


def _parse(name: str, text: str) -> OptionValue:
    """What a word of the environment means for one option: the first reading that the option accepts."""
    word = text.lower()
    readings: list[OptionValue] = []
    if word in ("none", "null"):
        readings.append(None)
    if word in _TRUE | _FALSE:
        readings.append(word in _TRUE)
    if word.isdecimal():
        readings.append(int(word))
    readings.append(text)
    check = _CHECKS[name][0]
    return next((reading for reading in readings if check(reading)), text)
