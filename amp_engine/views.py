"""What scripts read of apex's private state, as views of the engine's one real state."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

from torch import nn

from amp_engine.master_weights import Master
from amp_engine.policy import Policy

if TYPE_CHECKING:
    from amp_engine.engine import Engine
    from amp_engine.step import SteppedOptimizer


class Properties:
    """`_amp_state.opt_properties`: the policy as attributes, and as the dictionary `options`."""

    def __init__(self, policy: Policy) -> None:
        self.options = policy.properties()

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["options"][name]
        except KeyError:
            raise AttributeError(f"'Properties' object has no attribute {name!r}") from None


class Stash:
    """`optimizer._amp_stash`: by its presence "this optimizer was initialized", and lists of parameters."""

    lazy_init_called = True  # masters exist from initialize on

    def __init__(self, stepped: SteppedOptimizer) -> None:
        self._stepped = stepped

    @property
    def already_patched(self) -> bool:
        """Whether a backward was checked and not yet stepped."""
        return bool(self._stepped.verdicts)

    @property
    def params_have_scaled_gradients(self) -> bool:
        """Whether `delay_unscale` left gradients scaled."""
        return self._stepped.window is not None and not self._stepped.in_backward

    @property
    def fp16_groups(self) -> list[list[nn.Parameter]]:
        """Per group: the model's low-precision parameters that have masters."""
        return [[m.param for m in group] for group in self._mastered()]

    @property
    def fp32_from_fp16_groups(self) -> list[list[nn.Parameter]]:
        """Per group: their masters, in the same order."""
        return [[m.weight for m in group] for group in self._mastered()]

    @property
    def fp32_from_fp32_groups(self) -> list[list[nn.Parameter]]:
        """Per group: what the optimizer steps without a master."""
        masters = self._stepped.masters
        return [
            [p for p in group["params"] if masters is None or masters.find(p) is None]
            for group in self._stepped.optimizer.param_groups
        ]

    @property
    def all_fp16_params(self) -> list[nn.Parameter]:
        """`fp16_groups` in one list."""
        return list(chain.from_iterable(self.fp16_groups))

    @property
    def all_fp32_from_fp16_params(self) -> list[nn.Parameter]:
        """`fp32_from_fp16_groups` in one list."""
        return list(chain.from_iterable(self.fp32_from_fp16_groups))

    @property
    def all_fp32_from_fp32_params(self) -> list[nn.Parameter]:
        """`fp32_from_fp32_groups` in one list."""
        return list(chain.from_iterable(self.fp32_from_fp32_groups))

    def _mastered(self) -> list[list[Master]]:
        masters = self._stepped.masters
        groups = self._stepped.optimizer.param_groups
        if masters is None:
            return [[] for _ in groups]
        found = [[masters.find(p) for p in group["params"]] for group in groups]
        return [[m for m in group if m is not None] for group in found]


class Handle:
    """`_amp_state.handle`, and what `amp.init()` returns: the function casts of the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def is_active(self) -> bool:
        """Whether functions are cast now."""
        return self._engine.casts is not None and self._engine.casts.is_active

    _is_active = property(is_active)

    @property
    def has_cache(self) -> bool:
        """Whether casts of weights are kept within an iteration."""
        return self._engine.casts is not None

    @property
    def cache(self) -> Any:
        """The cache of cast weights."""
        return None if self._engine.casts is None else self._engine.casts.cache

    def remove_cache(self, param: nn.Parameter) -> None:
        """Forget the cast of one weight."""
        if self._engine.casts is not None:
            self._engine.casts.cache.discard(param)

    def _clear_cache(self) -> None:
        if self._engine.casts is not None:
            self._engine.casts.cache.clear()

    def _disable_casts(self) -> Any:
        return self._engine.disable_casts()

    def _deactivate(self) -> None:
        if self._engine.casts is not None:
            self._engine.casts.remove()


class NoOpHandle:
    """What `amp.init(enabled=False)` returns."""

    has_cache = False

    def is_active(self) -> bool:
        """Never."""
        return False

    def _clear_cache(self) -> None:
        pass

    def _deactivate(self) -> None:
        pass
