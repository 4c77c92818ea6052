"""One step of many tensors, as callers know them, and their operators (library.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from torch import Tensor

from amp_engine.errors import AmpValueError
from amp_engine.kernels.backend import TensorList
from amp_engine.kernels.formulas import FORMULAS
from amp_engine.kernels.library import call, define, fake_nothing
from amp_engine.kernels.table import StepTable

# Of each tensor that has a gradient (`grads[i]` is not None), unless `found_inf != 0`:
#
#     steps[i] += 1
#     g = float(grads[i]) * inv_scale, negated if `maximize`
#     ... the update, in float32, with this step number ...
#     copies[i] = param, rounded
#
# Lists are of one length n, of equal shapes and strides. Params are float32, or float16 or bfloat16: widened, updated,
# rounded once. State is float32; `steps` float32, shape [n]; `inv_scale` and `found_inf` float32, shape [], None is 1
# and 0; `lr` a float, or a float32 tensor of shape [], which the host does not read if it is on a GPU. No host sync.


def adam_(
    grads: TensorList,
    params: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Tensor,
    copies: TensorList | None = None,
    *,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool = True,
    bias_correction: bool = True,
    maximize: bool = False,
    inv_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Adam, or AdamW if `decoupled`.

    p *= 1 - lr * weight_decay, if decoupled, else g += weight_decay * p
    m += (1 - beta1) * (g - m);  v = beta2 * v + (1 - beta2) * g * g
    p -= lr / (1 - beta1**t) * m / (sqrt(v) / sqrt(1 - beta2**t) + eps)
    """
    _step(
        "adam_",
        grads,
        params,
        copies,
        exp_avgs,
        exp_avg_sqs,
        steps,
        None,
        (inv_scale, found_inf, None),
        lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        decoupled=decoupled,
        bias_correction=bias_correction,
        maximize=maximize,
    )


def sgd_(
    grads: TensorList,
    params: Sequence[Tensor],
    momentum_buffers: Sequence[Tensor] | None,
    steps: Tensor,
    copies: TensorList | None = None,
    *,
    lr: float | Tensor,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    decay_after_momentum: bool = False,
    maximize: bool = False,
    inv_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """SGD: the arithmetic of torch.optim.SGD to the bit, for float32.

    g = fma(p, weight_decay, g), or so after the momentum
    buffer = g at the tensor's first step (steps[i] == 0 before), else fma(g, 1 - dampening, buffer * momentum)
    g = fma(buffer, momentum, g) if nesterov, else buffer
    p = fma(g, -lr, p)

    Args:
        momentum_buffers: None only if `momentum` is 0; not read or written then.
    """
    _step(
        "sgd_",
        grads,
        params,
        copies,
        momentum_buffers,
        None,
        steps,
        None,
        (inv_scale, found_inf, None),
        lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=nesterov,
        decay_after_momentum=decay_after_momentum,
        maximize=maximize,
    )


def adagrad_(
    grads: TensorList,
    params: Sequence[Tensor],
    sums: Sequence[Tensor],
    steps: Tensor,
    copies: TensorList | None = None,
    *,
    lr: float | Tensor,
    eps: float,
    weight_decay: float,
    decoupled: bool = False,
    lr_decay: float = 0.0,
    maximize: bool = False,
    inv_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """Adagrad.

    g += weight_decay * p, if not decoupled
    sum += g * g
    p -= lr / (1 + (t - 1) * lr_decay) * (g / (sqrt(sum) + eps) [+ weight_decay * p, if decoupled])
    """
    _step(
        "adagrad_",
        grads,
        params,
        copies,
        sums,
        None,
        steps,
        None,
        (inv_scale, found_inf, None),
        lr,
        eps=eps,
        weight_decay=weight_decay,
        decoupled=decoupled,
        lr_decay=lr_decay,
        maximize=maximize,
    )


def novograd_(
    grads: TensorList,
    params: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    norms: Tensor,
    steps: Tensor,
    copies: TensorList | None = None,
    *,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    bias_correction: bool = True,
    grad_averaging: bool = True,
    decay_inside_moment: bool = False,
    infinity_norm: bool = False,
    init_zero: bool = False,
    maximize: bool = False,
    inv_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """NovoGrad: one second moment for a whole tensor, kept as a norm.

    n = |g|_2, or the largest magnitude if infinity_norm;  norm = n at first (0 if init_zero), then
    norm = sqrt(beta2 * norm**2 + (1 - beta2) * n**2), or beta2 * norm + (1 - beta2) * n if infinity_norm
    c1 = 1 - beta1**t;  c2 = sqrt(1 - beta2**t);  beta3 = 1 - beta1 if grad_averaging else 1
    m = beta1 * m + beta3 * g;  p -= lr * (m / c1 / (norm / c2 + eps) + weight_decay * p), or if decay_inside_moment
    m = beta1 * m + beta3 * (g / (norm / c2 + eps) + weight_decay * p);  p -= lr / c1 * m

    Args:
        norms: float32, shape [n].
    """
    _step(
        "novograd_",
        grads,
        params,
        copies,
        exp_avgs,
        None,
        steps,
        norms,
        (inv_scale, found_inf, None),
        lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        bias_correction=bias_correction,
        grad_averaging=grad_averaging,
        decay_inside_moment=decay_inside_moment,
        infinity_norm=infinity_norm,
        init_zero=init_zero,
        maximize=maximize,
    )


def lamb_(
    grads: TensorList,
    params: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Tensor,
    copies: TensorList | None = None,
    *,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool = True,
    bias_correction: bool = True,
    grad_averaging: bool = True,
    max_grad_norm: float = 1.0,
    use_nvlamb: bool = False,
    grad_norm: Tensor | None = None,
    maximize: bool = False,
    inv_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """LAMB. Gradients are not overwritten.

    g /= max(1, grad_norm / max_grad_norm), unless max_grad_norm is 0
    g += weight_decay * p, if not decoupled
    m = beta1 * m + beta3 * g;  v = beta2 * v + (1 - beta2) * g * g;  beta3 = 1 - beta1 if grad_averaging else 1
    u = m / (1 - beta1**t) / (sqrt(v / (1 - beta2**t)) + eps) [+ weight_decay * p, if decoupled]
    p -= lr * r * u;  r = |p| / |u| where weight_decay != 0 or use_nvlamb, and both are not 0, else 1

    Args:
        grad_norm: float32, shape []: over all unscaled gradients of the optimizer; None: over those of this call.
    """
    _step(
        "lamb_",
        grads,
        params,
        copies,
        exp_avgs,
        exp_avg_sqs,
        steps,
        None,
        (inv_scale, found_inf, grad_norm),
        lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        decoupled=decoupled,
        bias_correction=bias_correction,
        grad_averaging=grad_averaging,
        max_grad_norm=max_grad_norm,
        use_nvlamb=use_nvlamb,
        maximize=maximize,
    )


def _step(
    op: str,
    grads: TensorList,
    params: Sequence[Tensor],
    copies: TensorList | None,
    state1: Sequence[Tensor] | None,
    state2: Sequence[Tensor] | None,
    steps: Tensor,
    norms: Tensor | None,
    scalars: tuple[Tensor | None, Tensor | None, Tensor | None],
    lr: float | Tensor,
    **hyperparameters: float | bool,
) -> None:
    copies = [] if copies is None else copies
    if copies and len(copies) != len(params):
        raise AmpValueError(
            f"{op}: copies has {len(copies)} entries, but params has {len(params)}.  "
            "All lists of one call are of one length."
        )
    call(
        op,
        _EAGER_STEPS[op],
        [steps],
        grads,
        params,
        # No torch that we support can trace a list that is written and holds None.
        [c for c in copies if c is not None],
        [i for i, c in enumerate(copies) if c is not None],
        [] if state1 is None else state1,
        [] if state2 is None else state2,
        steps,
        norms,
        *scalars,
        lr if isinstance(lr, Tensor) else None,
        0.0 if isinstance(lr, Tensor) else lr,
        **hyperparameters,
    )


def _eager_step(op: str) -> Callable[..., None]:
    def step(
        grads: TensorList,
        params: Sequence[Tensor],
        copies: Sequence[Tensor],
        rows_with_copy: Sequence[int],
        state1: Sequence[Tensor],
        state2: Sequence[Tensor],
        steps: Tensor,
        norms: Tensor | None,
        inv_scale: Tensor | None,
        found_inf: Tensor | None,
        gradient_norm: Tensor | None,
        lr_tensor: Tensor | None,
        lr: float,
        **hyperparameters: Any,
    ) -> None:
        n = len(params)
        group = FORMULAS[op.removesuffix("_")](lr=lr if lr_tensor is None else lr_tensor, **hyperparameters)
        by_row = dict(zip(rows_with_copy, copies, strict=True))
        table = StepTable(
            op.removesuffix("_"),
            params,
            [by_row.get(i) for i in range(n)],
            state1 or [None] * n,
            state2 or [None] * n,
            [0] * n,
            steps,
            norms,
        )
        table.step(
            grads,
            [True] * n,
            [group],
            inv_scale=inv_scale,
            found_inf=found_inf,
            gradient_norm=gradient_norm,
        )

    return step


_EAGER_STEPS = {f"{name}_": _eager_step(f"{name}_") for name in FORMULAS}
for _op, _eager in _EAGER_STEPS.items():
    _own = fields(FORMULAS[_op.removesuffix("_")])
    _hyperparameters = ", ".join(f"{field.type} {field.name}={field.default}" for field in _own if field.name != "lr")
    define(
        _op,
        _eager,
        "(Tensor?[] grads, Tensor(a!)[] params, Tensor(b!)[] copies, int[] rows_with_copy, Tensor(c!)[] state1, "
        "Tensor(d!)[] state2, Tensor(e!) steps, Tensor(f!)? norms, Tensor? inv_scale, Tensor? found_inf, "
        f"Tensor? gradient_norm, Tensor? lr_tensor, float lr, *, {_hyperparameters}) -> ()",
        fake_nothing,
    )
