"""Discards copies of weights that an optimizer of others may have written while functions are cast."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

from torch.optim import optimizer as optimizers

from amp_engine.casting.cache import WeightCache, tensors_hold_their_objects
from amp_engine.casting.patches import Patches


class _StepHooks(MutableMapping[Any, Any]):
    """torch's hooks after the step of any optimizer, and one of ours beside them, while functions are cast.

    It replaces torch's dictionary: a step in another thread may iterate over that, and would raise if we added to it.
    Hooks that other code adds and removes meanwhile are added to and removed from torch's.
    """

    def __init__(self) -> None:
        self.theirs: MutableMapping[Any, Any] = vars(optimizers)["_global_optimizer_post_hooks"]
        self.ours: Callable[..., None] = lambda *_: None

    def __getitem__(self, key: Any) -> Any:
        return self.ours if key is self else self.theirs[key]

    def __setitem__(self, key: Any, hook: Any) -> None:
        self.theirs[key] = hook

    def __delitem__(self, key: Any) -> None:
        del self.theirs[key]

    def __iter__(self) -> Iterator[Any]:
        return iter([*self.theirs, self])

    def __len__(self) -> int:
        return len(self.theirs) + 1

    def __contains__(self, key: object) -> bool:
        return key is self or key in self.theirs

    def __hash__(self) -> int:
        return id(self)

    def values(self) -> Any:
        """Return a list of all hooks as they are now, which a step iterates over."""
        return [*self.theirs.values(), self.ours]


_step_hooks = _StepHooks()  # lives for ever: handles of hooks that are added to it refer to it weakly


def watch_weights(cache: WeightCache, patches: Patches, afterwards: Callable[[], None]) -> None:
    """Discard casts of weights that may be written without moving their version.

    torch tells of writes that ask for memory; an optimizer may have kept an address as a number.

    Args:
        cache: holds the casts.
        patches: undo all of this.
        afterwards: called when locks may be free that a finalizer found taken.
    """

    def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        cache.after_step()
        afterwards()

    _step_hooks.ours = after_step
    if vars(optimizers)["_global_optimizer_post_hooks"] is not _step_hooks:
        _step_hooks.theirs = vars(optimizers)["_global_optimizer_post_hooks"]
        patches.set(optimizers, "_global_optimizer_post_hooks", _step_hooks)

    drops_orphans = tensors_hold_their_objects()

    def on_collection(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and drops_orphans and info["generation"] == 2:
            cache.discard_orphans()
        elif phase == "stop":
            afterwards()

    def discard_collections() -> None:
        if on_collection in gc.callbacks:
            gc.callbacks.remove(on_collection)

    patches.on_undo(discard_collections)
    gc.callbacks.append(on_collection)
