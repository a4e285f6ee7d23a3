"""Torch stops compiling a function that it compiled too often, and runs it eagerly: that is said and counted.

Torch tells backends nothing of it: it just does not call them. But each time it compiles a function again, it asks
hooks for a line about the user's context, before it looks at its limits; the hook here looks at the same limits, and at
the transforms that are around.
"""

# What torch offers to compilers it names with underscores.
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable
from types import CodeType, FrameType

import torch
from torch._dynamo.cache_size import exceeds_recompile_limit
from torch._dynamo.convert_frame import _compile as _dynamos_compile
from torch._dynamo.external_utils import wrap_inline

from tilewright.runtime.stats import STATS

_COMPILES = inspect.unwrap(_dynamos_compile).__code__

_KINDS = torch._C._functorch.TransformType
_TRANSFORMS = (_KINDS.Vmap, _KINDS.Grad, _KINDS.Jvp)
"""The transforms of torch under which it refuses to begin."""

_ENTRY = wrap_inline(len).__code__
"""The one function through which torch enters what has no code of the user's: its own modules."""


def warn_at_recompile_limit(backend: Callable[..., object]) -> None:
    """From now on, functions that torch stops compiling with `backend` are warned of and counted in `Stats.given_up`.

    Where torch raises an error instead (`fullgraph=True`, `fail_on_recompile_limit_hit`) that is left to it."""

    def context() -> str:
        frame = _compiling(sys._getframe())
        if frame is not None:
            _look(frame, backend)
        return ""

    register = getattr(torch._dynamo, "register_hook_for_recompile_user_context", None)
    if register is not None:
        register(context)


def _compiling(frame: FrameType | None) -> FrameType | None:
    """The innermost frame in which torch compiles a function."""
    while frame is not None and frame.f_code is not _COMPILES:
        frame = frame.f_back
    return frame


def _look(frame: FrameType, backend: Callable[..., object]) -> None:
    seen = frame.f_locals
    code, asked = seen.get("code"), seen.get("compiler_fn")
    if not isinstance(code, CodeType) or not callable(asked) or not _is_made_of(asked, backend):
        return
    config = torch._dynamo.config
    if seen.get("one_graph") or config.fail_on_recompile_limit_hit:
        return
    exceeded, limit = exceeds_recompile_limit(seen["cache_size"], seen["compile_id"])
    around = torch._C._functorch.peek_interpreter_stack()
    if exceeded:
        _tell(
            code,
            f"torch gave up compiling {code.co_name!r}: it was compiled {getattr(config, limit)} times, for this "
            f"backend and others (torch._dynamo.config.{limit}). Calls that fit none of these run eagerly. Raise the "
            "limit, mark the sizes that differ as dynamic, or use tilewright.compile, which counts by itself",
        )
    elif around is not None and around.key() in _TRANSFORMS:
        what = "torch's own modules" if code is _ENTRY else repr(code.co_name)
        _tell(
            code,
            f"torch gave up compiling {what}: it was called under {around.key().name.lower()}, and every later call of "
            "it runs eagerly too, by itself as well. Compile what calls the transform; torch._dynamo.reset() makes "
            "torch forget this",
        )


def _tell(code: CodeType, message: str) -> None:
    STATS.given_up += 1
    warnings.warn_explicit(message, RuntimeWarning, code.co_filename, code.co_firstlineno)


def _is_made_of(asked: object, backend: Callable[..., object]) -> bool:
    """Whether `asked` is `backend` in torch's wrappers, or with some arguments given."""
    inner: object = asked
    while inner is not None and inner is not backend:
        inner = (
            getattr(inner, "_torchdynamo_orig_backend", None)
            or getattr(inner, "compiler_fn", None)
            or (inner.func if isinstance(inner, functools.partial) else None)
        )
    return inner is backend
