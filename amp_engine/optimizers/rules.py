"""The rule by which the kernels step each optimizer: its formula, state and hyperparameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from amp_engine.kernels import FORMULAS, Formula
from amp_engine.kernels.formulas import Adam as AdamFormula
from amp_engine.kernels.formulas import Sgd as SgdFormula

Group = Mapping[str, Any]


@dataclass(frozen=True)
class Rule:
    """The rule by which the kernels step one class of optimizers.

    Attributes:
        formula: a key of `kernels.FORMULAS`.
        state1: name of the first state tensor, shaped as the weight: exp_avg, momentum_buffer or sum.
        state2: name of the second one, or None.
        hyperparameters: returns the formula of one parameter group.
        keeps_step: True if `state[p]["step"]` counts the steps, as a float32 tensor of shape [].
        needs_state1: returns True for groups with the first state.
        supports: returns True for groups that the kernels can step.
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
        """True if the step needs the norms of the gradients, which pass 1 computes."""
        return FORMULAS[self.formula].reads_sums

    @property
    def keeps_norm(self) -> bool:
        """True if `state[p]["exp_avg_sq"]` is one float32 norm for the whole tensor."""
        return FORMULAS[self.formula].keeps_norm


# Entries that groups of some classes, or of earlier versions of torch, lack: their fields keep the formula's defaults.
_MAY_BE_ABSENT = {"maximize", "lr_decay", "decoupled_weight_decay"}


def hyperparameters(
    formula: type[Formula], *, without: Sequence[str] = (), always: Mapping[str, bool] | None = None, **entries: str
) -> Callable[[Group], Formula]:
    """Return a function from a parameter group to its `formula`.

    A field is the group's entry of the same name, or of the name in `entries`; beta1 and beta2 are the entry `betas`.
    Fields in `without` keep their defaults, even if a group has such an entry; fields in `always` are the same in all
    groups.
    """
    betas, fixed = ("beta1", "beta2"), dict(always or {})
    named = [field for field in fields(formula) if field.name not in (*without, *betas, *fixed)]
    known = [(field.name, entries.get(field.name, field.name), isinstance(field.default, bool)) for field in named]
    has_betas = any(field.name == "beta1" for field in fields(formula))

    def of_group(group: Group) -> Formula:
        found = {
            name: bool(group[entry]) if is_flag else group[entry]
            for name, entry, is_flag in known
            if entry in group or entry not in _MAY_BE_ABSENT
        }
        if has_betas:
            found.update(zip(betas, group["betas"], strict=True))
        return formula(**found, **fixed)

    return of_group


def _supports_torch_adam(group: Group) -> bool:
    tensors = isinstance(group["betas"][0], Tensor) or isinstance(group["betas"][1], Tensor)
    return not (group["amsgrad"] or group["differentiable"] or tensors)


# Exact types: a subclass may compute anything.
TORCH_RULES: dict[type[Optimizer], Rule] = {
    Adam: Rule(
        "adam",
        "exp_avg",
        "exp_avg_sq",
        hyperparameters(AdamFormula, without=["bias_correction"], decoupled="decoupled_weight_decay"),
        supports=_supports_torch_adam,
    ),
    AdamW: Rule(
        "adam",
        "exp_avg",
        "exp_avg_sq",
        hyperparameters(AdamFormula, without=["bias_correction"], always={"decoupled": True}),
        supports=_supports_torch_adam,
    ),
    SGD: Rule(
        "sgd",
        "momentum_buffer",
        None,
        hyperparameters(SgdFormula, without=["decay_after_momentum"]),
        keeps_step=False,
        needs_state1=lambda group: group["momentum"] != 0,
        supports=lambda group: not group["differentiable"],
    ),
}


def rule_of(optimizer: Optimizer) -> Rule | None:
    """Return the rule for the class of `optimizer`, or None if the kernels do not know its step."""
    rule = own_rule_of(optimizer)
    kind: Any = type(optimizer)
    return TORCH_RULES.get(kind) if rule is None else None if kind.has_own_step() else rule


def own_rule_of(optimizer: Optimizer) -> Rule | None:
    """Return the rule by which the `step` of a class of this package steps; None for other classes."""
    rule = getattr(type(optimizer), "rule", None)
    return rule if isinstance(rule, Rule) else None


def unsupported(rule: Rule, groups: Sequence[Group]) -> str | None:
    """Return what one of `groups` asks for that the kernels do not compute, such as "amsgrad=True"; else None."""
    group = next((group for group in groups if not rule.supports(group)), None)
    if group is None:
        return None
    asked = [f"{name}=True" for name in ("amsgrad", "differentiable") if group.get(name)]
    return asked[0] if asked else "betas that are tensors" if "betas" in group else "a setting"
