"""The operations as callers know them, and the torch.library operator of each.

In eager mode a function calls the native module, or the reference where there is none, directly: the dispatcher takes
microseconds per tensor. Where something traces (torch.compile, fake tensors) it calls `torch.ops.amp_engine.<name>`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from amp_engine.errors import AmpValueError
from amp_engine.kernels import reference
from amp_engine.kernels.hyperparameters import Hyperparameters
from amp_engine.kernels.reference import Checks
from amp_engine.kernels.refusals import TensorList
from amp_engine.kernels.table import StepTable, native_call, native_for
from amp_engine.torch_private import disabled_torch_dispatch, dispatch_modes


def check(tensors: Sequence[Tensor]) -> Checks:
    """Look at every element once: non-finite or not, sum of squares and largest magnitude of each tensor.

    Args:
        tensors: n dense tensors of float16, bfloat16 or float32, mixed freely, on one device.

    Returns:
        See `Checks`. The largest magnitude decides: a finite tensor whose squares overflow is not reported.

    Raises AmpValueError for other lists, as all operations do before anything is written. No host sync.
    """
    return Checks(*_call("check", _check, tensors, tensors))


def l2norm(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """2-norm over all of `tensors`, and of each of them: float32, shapes [] and [n]. No host sync."""
    return _call("l2norm", _l2norm, tensors, tensors)


def unscaled(tensors: Sequence[Tensor], inv_scale: Tensor) -> list[Tensor]:
    """`[t.float() * inv_scale for t in tensors]`: float32, shapes and strides as given. No host sync.

    Args:
        inv_scale: float32, shape [], on the device of `tensors`.
    """
    return _call("unscaled", _unscaled, tensors, tensors, inv_scale)


def unscale_(tensors: Sequence[Tensor], inv_scale: Tensor) -> Checks:
    """`t *= inv_scale` for each t, computed in float32 and rounded once to the type of t. No host sync.

    Args:
        inv_scale: float32, shape [], on the device of `tensors`.

    Returns:
        What was found before.
    """
    return Checks(*_call("unscale_", _unscale_, tensors, tensors, inv_scale))


def scale_(outputs: Sequence[Tensor], inputs: Sequence[Tensor], factor: Tensor) -> Checks:
    """`output[...] = input * factor` pairwise, in float32, rounded once to the type of each output. No host sync.

    Args:
        outputs: of the shapes and strides of `inputs`, each possibly the input itself.
        factor: float32, shape [], on the device of `inputs`.

    Returns:
        What was found in `inputs`.
    """
    return Checks(*_call("scale_", _scale_, inputs, outputs, inputs, factor))


def axpby_(
    outputs: Sequence[Tensor], xs: Sequence[Tensor], ys: Sequence[Tensor], a: Tensor | None, b: Tensor | None
) -> Checks:
    """`output[...] = fma(a, x, b * y)` triple by triple, in float32, rounded once to each output's type. No host sync.

    Args:
        outputs, xs, ys: of equal shapes and strides; an output may be its x or its y.
        a, b: float32, shape [], on the device of `xs`; None is 1.

    Returns:
        What was found in `xs`.
    """
    return Checks(*_call("axpby_", _axpby_, xs, outputs, xs, ys, a, b))


def cast_copy_(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """`output[...] = input` pairwise, rounded to nearest even into the type of each output. No host sync."""
    _call("cast_copy_", _cast_copy_, inputs, outputs, inputs)


def update_scale_(
    scale: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    *,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    min_scale: float,
    max_scale: float,
    hysteresis_tracker: Tensor | None = None,
    hysteresis: int = 1,
    dynamic: bool = True,
    inv_scale_used: Tensor | None = None,
    found_inf_used: Tensor | None = None,
) -> None:
    """Adjust a dynamic loss scale after one backward, in place; `reference.update_scale_` says how. No host sync.

    Args:
        scale: float32, shape [].
        growth_tracker: int32, shape []: clean backwards since the scale last moved.
        found_inf: float32, shape []. Tested `!= 0`, since it may be a sum over devices or ranks.
        hysteresis_tracker: int32, shape []: overflows that are still let pass. None: the first one counts.
        dynamic: False: the scale stays, and the count runs on.
        inv_scale_used: float32, shape []; receives 1 / scale of before.
        found_inf_used: float32, shape []; takes `found_inf` over, which is then 0.
    """
    _call(
        "update_scale_",
        _update_scale_,
        [scale],
        scale,
        growth_tracker,
        found_inf,
        hysteresis_tracker,
        inv_scale_used,
        found_inf_used,
        growth_factor,
        backoff_factor,
        growth_interval,
        hysteresis,
        min_scale,
        max_scale,
        dynamic,
    )


# The steps. Of each tensor that has a gradient (`grads[i]` is not None), unless `found_inf != 0`:
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
    _call(
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
        group = Hyperparameters(lr if lr_tensor is None else lr_tensor, **hyperparameters)
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


def _check(tensors: Sequence[Tensor]) -> Checks:
    native = native_for(_device(tensors))
    return reference.check(tensors) if native is None else Checks(*native_call(native.check, tensors))


def _l2norm(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    native = native_for(_device(tensors))
    return reference.l2norm(tensors) if native is None else native_call(native.l2norm, tensors)


def _unscaled(tensors: Sequence[Tensor], inv_scale: Tensor) -> list[Tensor]:
    native = native_for(_device(tensors))
    if native is None:
        return reference.unscaled(tensors, inv_scale)
    copies = [torch.empty_like(t, dtype=torch.float32, requires_grad=False) for t in tensors]
    native_call(native.check, tensors, copies, inv_scale)
    return copies


def _unscale_(tensors: Sequence[Tensor], inv_scale: Tensor) -> Checks:
    native = native_for(_device(tensors))
    if native is None:
        return reference.unscale_(tensors, inv_scale)
    return Checks(*native_call(native.check, tensors, tensors, inv_scale))


def _scale_(outputs: Sequence[Tensor], inputs: Sequence[Tensor], factor: Tensor) -> Checks:
    native = native_for(_device(inputs))
    if native is None:
        return reference.scale_(outputs, inputs, factor)
    return Checks(*native_call(native.check, inputs, outputs, factor))


def _axpby_(
    outputs: Sequence[Tensor], xs: Sequence[Tensor], ys: Sequence[Tensor], a: Tensor | None, b: Tensor | None
) -> Checks:
    native = native_for(_device(xs))
    if native is None:
        return reference.axpby_(outputs, xs, ys, a, b)
    return Checks(*native_call(native.axpby, outputs, xs, ys, a, b))


def _cast_copy_(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    native = native_for(_device(inputs))
    if native is None:
        reference.cast_copy_(outputs, inputs)
    else:
        native_call(native.cast_copy, outputs, inputs)


def _update_scale_(
    scale: Tensor,
    growth_tracker: Tensor,
    found_inf: Tensor,
    hysteresis_tracker: Tensor | None,
    inv_scale_used: Tensor | None,
    found_inf_used: Tensor | None,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
    min_scale: float,
    max_scale: float,
    dynamic: bool,
) -> None:
    native = native_for(scale.device)
    if native is None:
        reference.update_scale_(
            scale,
            growth_tracker,
            found_inf,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            min_scale=min_scale,
            max_scale=max_scale,
            hysteresis_tracker=hysteresis_tracker,
            hysteresis=hysteresis,
            dynamic=dynamic,
            inv_scale_used=inv_scale_used,
            found_inf_used=found_inf_used,
        )
        return
    native_call(
        native.update_scale,
        scale,
        growth_tracker,
        hysteresis_tracker,
        found_inf,
        inv_scale_used,
        growth_factor,
        backoff_factor,
        growth_interval,
        hysteresis,
        min_scale,
        max_scale,
        dynamic,
        found_inf_used,
    )


def _device(tensors: Sequence[Tensor]) -> torch.device:
    return tensors[0].device if tensors else torch.device("cpu")


def _call(name: str, eager: Callable[..., Any], tensors: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
    """The operator where something traces `tensors`, else `eager`."""
    if torch.compiler.is_compiling() or dispatch_modes() or any(map(_is_dispatched, tensors[:1])):
        with torch.no_grad():
            return getattr(torch.ops.amp_engine, name)(*args, **kwargs)
    return eager(*args, **kwargs)


def _is_dispatched(tensor: Tensor) -> bool:
    return type(tensor).__torch_dispatch__ is not disabled_torch_dispatch


_LIBRARY = torch.library.Library("amp_engine", "DEF")  # its operators live as long as it does


def _define(name: str, eager: Callable[..., Any], schema: str, fake: Callable[..., Any]) -> None:
    # Not torch.library.custom_op: it makes an autograd function for each operator, a third of the time of `import
    # amp_engine`, and nothing here is differentiated.
    _LIBRARY.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
    _LIBRARY.impl(name, eager, "CompositeExplicitAutograd")
    torch.library.register_fake(f"amp_engine::{name}", fake, lib=_LIBRARY)


def _fake_checks(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    n, device = len(tensors), tensors[0].device if tensors else None
    return (
        torch.empty(n, dtype=torch.bool, device=device),
        torch.empty(n, dtype=torch.float64, device=device),
        torch.empty(n, dtype=torch.float32, device=device),
    )


def _fake_l2norm(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    device = tensors[0].device if tensors else None
    return torch.empty((), device=device), torch.empty(len(tensors), device=device)


def _fake_nothing(*args: Any, **kwargs: Any) -> None:
    pass


_CHECKS = "(Tensor, Tensor, Tensor)"
_define("check", _check, f"(Tensor[] tensors) -> {_CHECKS}", _fake_checks)
_define("l2norm", _l2norm, "(Tensor[] tensors) -> (Tensor, Tensor)", _fake_l2norm)
_define(
    "unscaled",
    _unscaled,
    "(Tensor[] tensors, Tensor inv_scale) -> Tensor[]",
    lambda tensors, inv_scale: [torch.empty_like(t, dtype=torch.float32) for t in tensors],
)
_define(
    "unscale_",
    _unscale_,
    f"(Tensor(a!)[] tensors, Tensor inv_scale) -> {_CHECKS}",
    lambda tensors, inv_scale: _fake_checks(tensors),
)
_define(
    "scale_",
    _scale_,
    f"(Tensor(a!)[] outputs, Tensor[] inputs, Tensor factor) -> {_CHECKS}",
    lambda outputs, inputs, factor: _fake_checks(inputs),
)
_define(
    "axpby_",
    _axpby_,
    f"(Tensor(a!)[] outputs, Tensor[] xs, Tensor[] ys, Tensor? a, Tensor? b) -> {_CHECKS}",
    lambda outputs, xs, ys, a, b: _fake_checks(xs),
)
_define("cast_copy_", _cast_copy_, "(Tensor(a!)[] outputs, Tensor[] inputs) -> ()", _fake_nothing)
_define(
    "update_scale_",
    _update_scale_,
    "(Tensor(a!) scale, Tensor(b!) growth_tracker, Tensor(c!) found_inf, Tensor(d!)? hysteresis_tracker, "
    "Tensor(e!)? inv_scale_used, Tensor(f!)? found_inf_used, float growth_factor, float backoff_factor, "
    "int growth_interval, int hysteresis, float min_scale, float max_scale, bool dynamic) -> ()",
    _fake_nothing,
)

_HYPERPARAMETERS = ", ".join(
    f"{field.type} {field.name}={field.default}" for field in fields(Hyperparameters) if field.name != "lr"
)
_EAGER_STEPS = {op: _eager_step(op) for op in ("adam_", "sgd_", "adagrad_", "novograd_", "lamb_")}
for _op, _eager in _EAGER_STEPS.items():
    _define(
        _op,
        _eager,
        "(Tensor?[] grads, Tensor(a!)[] params, Tensor(b!)[] copies, int[] rows_with_copy, Tensor(c!)[] state1, "
        "Tensor(d!)[] state2, Tensor(e!) steps, Tensor(f!)? norms, Tensor? inv_scale, Tensor? found_inf, "
        f"Tensor? gradient_norm, Tensor? lr_tensor, float lr, *, {_HYPERPARAMETERS}) -> ()",
        _fake_nothing,
    )
