"""LARC: layer-wise adaptive learning rates around any optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from amp_engine.errors import AmpStateError, AmpTypeError, AmpValueError
from amp_engine.ground.dtypes import is_low_precision


class LARC:
    """Layer-wise adaptive rate control (You, Gitman & Ginsburg 2017) around an optimizer.

    `step()` multiplies each gradient so that the inner optimizer's step is in proportion to the norm of the weight,
    then calls the inner optimizer. Per tensor, with the weight decay of its group:

        rate = trust_coefficient * |p| / (|g| + weight_decay * |p| + eps)
        rate = min(rate / lr, 1)                                            if clip
        g = (g + weight_decay * p) * rate

    If |p| or |g| is 0, the gradient stays the same. The inner optimizer steps with a weight decay of 0.

    Not a torch.optim.Optimizer, as in apex: LR schedulers take `.optim`. `amp.initialize`, `amp.scale_loss`,
    `amp.master_params` and `amp.clip_grad_norm_` take a LARC or its `.optim`, and work on `.optim`: LARC then adapts
    unscaled gradients of FP32 masters, and an overflow skips the step as usual.

    Args:
        optimizer: the inner optimizer, which steps.
        trust_coefficient: above 0.
        clip: never step further than the learning rate alone would; False: scale by the rate times the learning rate.
        eps: added to the denominator.

    Raises AmpTypeError if `optimizer` is no optimizer, AmpValueError for values out of range.
    """

    def __init__(
        self, optimizer: Optimizer, trust_coefficient: float = 0.02, clip: bool = True, eps: float = 1e-8
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise AmpTypeError(
                f"LARC() got a {type(optimizer).__name__}, but wraps a torch.optim.Optimizer.  Use for example "
                "LARC(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))."
            )
        if not trust_coefficient > 0.0 or not eps >= 0.0:
            raise AmpValueError(
                f"trust_coefficient={trust_coefficient!r}, eps={eps!r}, but the first must be above 0 and the second "
                "not below.  Use for example trust_coefficient=0.02, eps=1e-8."
            )
        self.optim = optimizer
        self.trust_coefficient = trust_coefficient
        self.eps = eps
        self.clip = clip
        self._contexts: list[Callable[[], AbstractContextManager[None]]] = []

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("optim", "trust_coefficient", "eps", "clip")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._contexts = []

    def __repr__(self) -> str:
        return (
            f"LARC(trust_coefficient={self.trust_coefficient}, clip={self.clip}, eps={self.eps}, optim={self.optim!r})"
        )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The inner optimizer's groups."""
        return self.optim.param_groups

    @property
    def state(self) -> Any:
        """The inner optimizer's state."""
        return self.optim.state

    @property
    def defaults(self) -> dict[str, Any]:
        """The inner optimizer's defaults."""
        return self.optim.defaults

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state; LARC has none."""
        return self.optim.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the inner optimizer's state."""
        self.optim.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the inner optimizer's gradients, by default as in torch."""
        self.optim.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the inner optimizer."""
        self.optim.add_param_group(param_group)

    def register_context(self, make: Callable[[], AbstractContextManager[None]]) -> Callable[[], None]:
        """Adapt gradients inside of a context that `make` returns, until the returned function is called."""
        self._contexts.append(make)
        return lambda: self._contexts.remove(make)

    def step(self, closure: None = None) -> Any:
        """Adapt the gradients in place, then step the inner optimizer. No host sync of its own.

        Raises AmpTypeError for a closure, which apex did not take either, and AmpStateError for sparse gradients.
        """
        if closure is not None:
            raise AmpTypeError(
                "LARC.step() takes no closure.  Run its forward and backward yourself, then call step() without "
                "arguments."
            )
        with ExitStack() as contexts:
            for make in self._contexts:
                contexts.enter_context(make())
            by_group = [_with_gradients(group["params"]) for group in self.param_groups]
            for group, alike in zip(self.param_groups, by_group, strict=True):
                for params, grads in alike:
                    self._adapt(group, params, grads)
        with _without_weight_decay(self.optim):
            return self.optim.step()

    @torch.no_grad()
    def _adapt(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor]) -> None:
        """Adapt gradients of one group, which have one type and device."""
        weight_decay = group.get("weight_decay", 0.0)
        is_low = is_low_precision(grads[0])
        dtype = torch.float32 if is_low else None
        of_params = torch.stack(torch._foreach_norm(params, 2, dtype))
        of_grads = torch.stack(torch._foreach_norm(grads, 2, dtype))
        rate = self.trust_coefficient * of_params / (of_grads + weight_decay * of_params + self.eps)
        if self.clip:
            rate = (rate / group["lr"]).clamp(max=1.0)
        # A gradient of 0 stays 0: the factor 0 removes the weight decay that was added to it.
        factors = torch.where(of_grads == 0, 0.0, torch.where(of_params == 0, 1.0, rate)).unbind()
        # Half would lose too much of the sum, and of the factors, which `_foreach_mul_` rounds to the gradients' type.
        adapted = [g.float() for g in grads] if is_low else grads
        if weight_decay != 0:
            # An optimizer that maximizes negates the gradient, and the decay in it.
            decay = -weight_decay if group.get("maximize", False) else weight_decay
            torch._foreach_add_(adapted, [p.float() for p in params] if is_low else params, alpha=decay)
        torch._foreach_mul_(adapted, factors)
        if is_low:
            torch._foreach_copy_(grads, adapted)


@contextmanager
def _without_weight_decay(optimizer: Optimizer) -> Iterator[None]:
    absorbed = [(group, group["weight_decay"]) for group in optimizer.param_groups if "weight_decay" in group]
    for group, _ in absorbed:
        group["weight_decay"] = 0.0
    try:
        yield
    finally:
        for group, weight_decay in absorbed:
            group["weight_decay"] = weight_decay


def _with_gradients(params: list[Tensor]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Return the `params` that have a gradient, with their gradients, in lists of one device and type.

    Raises AmpStateError for sparse gradients.
    """
    alike: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for p in params:
        grad = p.grad
        if grad is None or grad.numel() == 0:
            continue
        if grad.layout is not torch.strided:
            raise AmpStateError(
                f"LARC does not support sparse gradients; a parameter of shape {tuple(p.shape)} has one.  Step it with "
                "an optimizer of its own."
            )
        weights, grads = alike.setdefault((grad.device, grad.dtype), ([], []))
        weights.append(p)
        grads.append(grad)
    return list(alike.values())
