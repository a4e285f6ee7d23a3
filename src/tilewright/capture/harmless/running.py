"""Programs of unknown origin as torch runs them, without a graph of them: each op is looked at when it is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tilewright.errors import ModelError

from .operands import fits
from .ops import gives_memory_as_found, may_run


class HarmlessOps(TorchDispatchMode):
    """Within it, ops that may read or write memory that is not their operands' raise ModelError."""

    def __init__(self) -> None:
        super().__init__()
        self._known: set[object] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run an op if it may be run."""
        del types
        given = kwargs or {}
        assert isinstance(func, OpOverload)
        if func not in self._known:
            if not may_run(func):
                _refuse(func)
            self._known.add(func)
        if not fits(func, args, given):
            _refuse(func)
        made: object = func(*args, **given)
        if gives_memory_as_found(func):
            for t in tree_leaves(made):
                assert isinstance(t, Tensor)
                t.zero_()
        return made


def _refuse(op: OpOverload) -> None:
    raise ModelError(
        "this model may read or write memory that is not its own", phase="run", op=str(op),
        hint="see that operands of this op have the sizes that it takes",
    )  # fmt: skip
