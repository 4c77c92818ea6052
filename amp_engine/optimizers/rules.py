"""What the fused step knows about each optimizer: its kind, its state, its hyperparameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from amp_engine.kernels import FORMULAS, Formula
from amp_engine.kernels.formulas import Adam as AdamFormula
from amp_engine.kernels.formulas import Sgd as SgdFormula

Group = Mapping[str, Any]


@dataclass(frozen=True)
class Rule:
    """How one optimizer class is stepped by the kernels.

    Attributes:
        formula: of `kernels.StepTable`.
        state1: name of the first state tensor, shaped as the weight: exp_avg, momentum_buffer or sum.
        state2: name of the second one, or None.
        hyperparameters: one parameter group in the kernels' terms.
        keeps_step: whether `state[p]["step"]` counts the steps, as a float32 tensor of shape [].
        needs_state1: whether tensors of this group have the first state at all.
        supports: whether the kernels compute what this group asks for.
    """

    formula: str
    state1: str
    state2: str | None
    hyperparameters: Callable[[Group], Formula]
    keeps_step: bool = True
    needs_state1: Callable[[Group], bool] = lambda group: True
    supports: Callable[[Group], bool] = lambda group: True

    @property
    def reads_sums(self) -> bool:
        """Whether the step needs the norms of the gradients, which pass 1 has taken."""
        return FORMULAS[self.formula].reads_sums

    @property
    def keeps_norm(self) -> bool:
        """Whether `state[p]["exp_avg_sq"]` is one float32 norm for the whole tensor."""
        return FORMULAS[self.formula].keeps_norm


def _torch_adam(group: Group) -> AdamFormula:
    beta1, beta2 = group["betas"]
    return AdamFormula(
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        decoupled=group.get("decoupled_weight_decay", False),
        maximize=group["maximize"],
    )


def _supports_torch_adam(group: Group) -> bool:
    tensors = isinstance(group["betas"][0], Tensor) or isinstance(group["betas"][1], Tensor)
    return not (group["amsgrad"] or group["differentiable"] or tensors)


def _torch_adamw(group: Group) -> AdamFormula:
    return _torch_adam({**group, "decoupled_weight_decay": True})


def _torch_sgd(group: Group) -> SgdFormula:
    return SgdFormula(
        lr=group["lr"],
        momentum=group["momentum"],
        dampening=group["dampening"],
        weight_decay=group["weight_decay"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
    )


# Exact types: a subclass may compute anything.
TORCH_RULES: dict[type[Optimizer], Rule] = {
    Adam: Rule("adam", "exp_avg", "exp_avg_sq", _torch_adam, supports=_supports_torch_adam),
    AdamW: Rule("adam", "exp_avg", "exp_avg_sq", _torch_adamw, supports=_supports_torch_adam),
    SGD: Rule(
        "sgd",
        "momentum_buffer",
        None,
        _torch_sgd,
        keeps_step=False,
        needs_state1=lambda group: group["momentum"] != 0,
        supports=lambda group: not group["differentiable"],
    ),
}


def rule_of(optimizer: Optimizer) -> Rule | None:
    """What the kernels compute for the class of `optimizer`, or None if it is not known to them."""
    rule = getattr(type(optimizer), "rule", None) or TORCH_RULES.get(type(optimizer))
    return rule if isinstance(rule, Rule) else None
