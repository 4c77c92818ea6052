"""Discards copies of weights that an optimizer may have written while functions are cast."""

from __future__ import annotations

import gc
from collections import ChainMap
from collections.abc import Callable
from typing import Any

from torch.optim import optimizer as optimizers

from amp_engine.casting.cache import WeightCache, tensors_hold_their_objects
from amp_engine.casting.patches import Patches


class _StepHooks(ChainMap[Any, Any]):
    """torch's global hooks after optimizer steps, and behind them one of ours, while functions are cast.

    Replaces torch's dictionary, as a step in another thread may iterate over the dictionary, and would raise if we
    added to it. Other code meanwhile adds and removes hooks in the first map, which is torch's dictionary.
    """

    def values(self) -> Any:
        """Return a list of the present hooks, over which a step iterates."""
        return [hook for hooks in self.maps for hook in list(hooks.values())]


_step_hooks = _StepHooks()  # never freed, as handles of hooks that are added to it refer to it weakly


def watch_weights(cache: WeightCache, patches: Patches, afterwards: Callable[[], None]) -> None:
    """Discard casts after each optimizer's step, and orphans at each full garbage collection.

    torch notes only writes that request memory; an optimizer may write to an address that it kept as a number.

    Args:
        cache: holds the casts.
        patches: undoes this.
        afterwards: called when locks that a finalizer found taken may be free.
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
