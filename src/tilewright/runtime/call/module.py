"""A compiled module is a module: it stands where the one that it was made from stood."""

# What torch's modules call each other by begins with an underscore.
# pyright: reportPrivateUsage=false, reportIncompatibleVariableOverride=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Self

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .around.user_frames import without_our_frames
from .model import CompiledModel, TargetWay

_SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
_OWN = frozenset({"_way", "_short", "_known", "_calls", "_module", "_model", "_entry"})


class CompiledModule(CompiledModel, nn.Module):
    """A compiled model that is a view of the module it was made from: parameters, buffers, children, state, mode and
    attributes are the module's own, under their own names. Hooks that are set here run around the compiled call, those
    of the module inside of it."""

    def __init__(self, way: TargetWay, module: nn.Module) -> None:
        object.__setattr__(self, "_module", module)
        nn.Module.__init__(self)
        self._model = CompiledModel(way)
        self._entry: Callable[..., object] = self._model._enter
        CompiledModel.__init__(self, way)
        for held in _SHARED:
            object.__setattr__(self, held, getattr(module, held))

    def __copy__(self) -> CompiledModel:
        """Another callable of the same module."""
        return CompiledModule(self._way, self._module)

    def __deepcopy__(self, memo: dict[int, object]) -> CompiledModel:
        """A copy of the module with weights of its own, which compiles when it is first called. Weights that were
        frozen are shared."""
        way = self._way.copied(memo)
        module = memo.get(id(self._module), self._module)  # one that nothing can change is shared
        assert isinstance(module, nn.Module)
        return CompiledModule(way, module)

    def __call__(self, *args: object, **kwargs: Any) -> object:
        """Run, with the hooks that were set here. Raises InputError for inputs that do not fit, and what the module
        raises."""
        try:
            return self.__dict__["_entry"](*args, **kwargs)  # torch looks up a module's attributes slowly
        except Exception as error:
            error.__traceback__ = without_our_frames(error.__traceback__)
            raise

    def forward(self, *args: object, **kwargs: Any) -> object:
        """Run without hooks."""
        return self._model(*args, **kwargs)

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """As of any module."""
        self._call_hooks()
        return super().register_forward_hook(*args, **kwargs)

    def register_forward_pre_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """As of any module."""
        self._call_hooks()
        return super().register_forward_pre_hook(*args, **kwargs)

    def register_full_backward_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """As of any module."""
        self._call_hooks()
        return super().register_full_backward_hook(*args, **kwargs)

    def register_full_backward_pre_hook(self, *args: Any, **kwargs: Any) -> RemovableHandle:
        """As of any module."""
        self._call_hooks()
        return super().register_full_backward_pre_hook(*args, **kwargs)

    def _call_hooks(self) -> None:
        self._entry = partial(nn.Module.__call__, self)

    @property
    def training(self) -> bool:
        """The module's mode."""
        return self._module.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "_way" in self.__dict__:  # a module that is made sets it
            self._module.training = mode

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the module and of all inside of it."""
        self._module.train(mode)
        return self

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move or convert the module's weights."""
        self._module.to(*args, **kwargs)
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Ask for gradients of the module's weights, or for none."""
        self._module.requires_grad_(requires_grad)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Call `fn` of the module and of all inside of it."""
        self._module.apply(fn)
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._module._apply(fn, recurse)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """The module's state, under its own names."""
        return self._module.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load the module's state."""
        return self._module.load_state_dict(state_dict, *args, **kwargs)

    def _load_from_state_dict(self, *args: Any) -> None:
        self._module._load_from_state_dict(*args)

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__.get("_module")
        if module is None:
            raise AttributeError(name)
        return getattr(module, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name in self.__dict__ or name in _OWN or "_way" not in self.__dict__:
            object.__setattr__(self, name, value)
        else:
            setattr(self._module, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._module, name)

    def __dir__(self) -> Iterable[str]:
        """Its own names and the module's."""
        return sorted({*object.__dir__(self), *dir(self._module)})
