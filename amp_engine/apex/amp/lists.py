"""`apex.amp.lists`: the functions that O1 casts, as three modules with three lists each, to read and to edit."""

from collections.abc import MutableSequence
from types import ModuleType
from typing import Any, overload

import torch

from amp_engine.amp import _amp_state
from amp_engine.apex.amp_modules import made
from amp_engine.casting import Registration
from amp_engine.casting.lists import FUNCTIONAL, TENSOR, TORCH, CastLists
from amp_engine.errors import AmpTypeError


class FunctionList(MutableSequence[str]):
    """The functions of one module, or class, that are cast in one way.

    Adding a name is `amp.register_half_function(module, name)`, or the same for another kind; a function whose name is
    removed runs without casts. A change lasts until `amp.close()`, and takes effect at once if O1 is on.

    Args:
        kind: "half", "float" or "promote".
        module: holds the functions.
        listed: the functions of this kind on amp_engine's own list.
    """

    def __init__(self, kind: str, module: Any, listed: tuple[str, ...]) -> None:
        self._kind = kind
        self._module = module
        self._listed = listed

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> MutableSequence[str]: ...

    def __getitem__(self, index: int | slice) -> str | MutableSequence[str]:
        return self._names()[index]

    def __setitem__(self, index: Any, name: Any) -> None:
        if not isinstance(index, int) or not isinstance(name, str):
            raise AmpTypeError("One name is replaced at a time.  Write functions[0] = 'softmax', say.")
        del self[index]
        self.append(name)

    def __delitem__(self, index: int | slice) -> None:
        names = self._names()[index]
        for name in [names] if isinstance(names, str) else names:
            _amp_state.engine.function_casts.unregister(self._module, name)

    def __len__(self) -> int:
        return len(self._names())

    def insert(self, index: int, name: str) -> None:
        """Add a name; the order has no meaning. Raises ValueError if there is no such function."""
        del index
        registration = Registration(self._kind, self._module, name)
        _amp_state.engine.function_casts.unregister(self._module, name)
        _amp_state.engine.function_casts.register(registration)

    def __repr__(self) -> str:
        return repr(self._names())

    def _names(self) -> list[str]:
        casts = _amp_state.engine.function_casts
        here = [r for r in casts.registrations if r.module is self._module]
        elsewhere = {r.name for r in here} | {name for module, name in casts.removals if module is self._module}
        added = [r.name for r in here if r.kind == self._kind]
        listed = [name for name in self._listed if name not in elsewhere and hasattr(self._module, name)]
        return listed + list(dict.fromkeys(added))


def _overrides(name: str, module: Any, lists: CastLists) -> ModuleType:
    return made(
        f"lists.{name}",
        MODULE=module,
        FP16_FUNCS=FunctionList("half", module, lists.half),
        FP32_FUNCS=FunctionList("float", module, lists.float),
        CASTS=FunctionList("promote", module, lists.promote + lists.sequence),
    )


functional_overrides = _overrides("functional_overrides", torch.nn.functional, FUNCTIONAL)
tensor_overrides = _overrides("tensor_overrides", torch.Tensor, TENSOR)
torch_overrides = _overrides("torch_overrides", torch, TORCH)
