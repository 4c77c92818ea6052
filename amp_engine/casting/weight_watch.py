"""Discards copies of weights that an optimizer of others may have written while functions are cast."""

from __future__ import annotations

import gc
from collections import ChainMap
from collections.abc import Callable
from typing import Any

from torch.optim import optimizer as optimizers

from amp_engine.casting.cache import WeightCache, tensors_hold_their_objects
from amp_engine.casting.patches import Patches


class _StepHooks(ChainMap[Any, Any]):
    """torch's hooks after the step of any optimizer, and one of ours behind them, while functions are cast.

    It replaces torch's dictionary: a step in another thread may iterate over that, and would raise if we added to it.
    Hooks that other code adds and removes meanwhile are added to and removed from torch's, which is the first map.
    """

    def values(self) -> Any:
        """Return a list of all hooks as they are now, which a step iterates over."""
        return [hook for hooks in self.maps for hook in list(hooks.values())]


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

    _step_hooks.maps[1:] = [{"amp_engine": after_step}]
    theirs = vars(optimizers)["_global_optimizer_post_hooks"]
    if theirs is not _step_hooks:
        _step_hooks.maps[0] = theirs
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
