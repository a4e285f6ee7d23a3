"""The library of our own routines, built while a program is traced: tracing takes one core, and so does a compiler.

It is the same for all models of a machine, is built once and kept, and takes a C++ compiler 4 to 5 seconds; who
compiles a first model with weights would wait for it behind the trace."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Generator, Iterable
from contextlib import contextmanager

from torch import Tensor

from tilewright.errors import TilewrightError
from tilewright.options import Options
from tilewright.runtime.cpu.toolchain import build_texts, host_target
from tilewright.runtime.store.cache import ContentStore, default_root
from tilewright.tuning.search_limits import BUILDING

from .native import source

LOG = logging.getLogger("tilewright")


@contextmanager
def built_ahead(weights: Iterable[Tensor], options: Options) -> Generator[None]:
    """Within it, the library is built if a program with such `weights` will want it and it is not there yet. It is
    there behind it, so that nothing that is timed later shares the machine with a compiler."""
    root = default_root(options)
    if root is None or (os.cpu_count() or 1) < 2 or not any(map(_is_factor, weights)):
        yield
        return
    thread = threading.Thread(target=_build, args=(ContentStore(root), options), name="tilewright-own")
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _is_factor(t: Tensor) -> bool:
    """Whether a weight looks like one of a product or convolution on the CPU that code of ours may do."""
    return (
        t.is_cpu
        and t.is_floating_point()
        and t.dim() >= 2
        and t.numel() >= BUILDING.least_own_weight_elements
    )


def _build(store: ContentStore, options: Options) -> None:
    """What fails here fails again where it is wanted, and is told there."""
    try:
        build_texts([source()], host_target().compiler_flags, store, options)
    except (TilewrightError, OSError) as error:
        LOG.info("the library of our own routines is not built ahead: %s", error)
