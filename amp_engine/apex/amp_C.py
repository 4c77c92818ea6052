# ruff: noqa: N999 - apex's name
"""`amp_C`: apex's multi-tensor operations, on amp_engine's kernels, for every device that torch has.

Every operation is called as `op(chunk_size, noop_flag, tensor_lists, *args)`, most often through
`multi_tensor_applier(op, noop_flag, tensor_lists, *args)`.

    chunk_size    an int, taken and not used: the kernels choose their own, and no result depends on it.
    noop_flag     int32, one element, on the device of the tensors. An operation either sets it to 1 if a value that it
                  reads is not finite, and never clears it; or does nothing if it is not 0; or does not use it.
    tensor_lists  lists of equal lengths. Each list is of one type: float32, float16 or bfloat16 (float64 where this is
                  said). Tensors of one index have one shape and one order in memory, without gaps (contiguous,
                  channels_last, ...). Empty tensors and empty lists are fine.

Anything else raises AmpValueError, which names list and tensor, and changes nothing. Arithmetic is in float32, rounded
once to the type of what is written. No operation waits for the device.

The legacy pair multi_tensor_lamb_stage1_cuda and multi_tensor_lamb_stage2_cuda is not served; multi_tensor_lamb does
both stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from amp_engine import kernels
from amp_engine.apex import float64_steps
from amp_engine.errors import AmpValueError
from amp_engine.ground.dtypes import dtype_name
from amp_engine.kernels.formulas import Adagrad, Adam, Formula, Lamb, NovoGrad, Sgd
from amp_engine.kernels.refusals import check_apart, check_lists
from amp_engine.levels.policy import LOWEST_SCALE

TensorList = Sequence[Tensor]
TensorLists = Sequence[TensorList]
F = TypeVar("F", bound=Callable[..., Any])


class _RefusedError(AmpValueError):
    """An argument that is not allowed, in words that lack the operation's name."""


def _operation(*names: str, optional: int = 0, reads: int = 1, writes_gradients: bool = False) -> Callable[[F], F]:
    """Make an operation of a function: check its flag and lists before it runs, and name it and its lists in errors.

    Args:
        names: of the lists; callers may leave out the last `optional` lists.
        reads: the number of lists, from the first on, that the kernels only read.
        writes_gradients: the first list is written after the kernels.
    """

    def decorate(function: F) -> F:
        op = function.__name__

        @wraps(function)
        def operation(chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, *args: Any, **kwargs: Any) -> Any:
            try:
                _check_lists(noop_flag, tensor_lists, names, optional)
                if writes_gradients:
                    check_apart(op, {"tensor_lists[0]": tensor_lists[0]}, {})
                with torch.no_grad():
                    return function(chunk_size, noop_flag, tensor_lists, *args, **kwargs)
            except _RefusedError as refusal:
                raise AmpValueError(f"{op}: {refusal}") from None
            except AmpValueError:
                # The kernel's error names the lists of the kernel, but the caller knows indices in tensor_lists.
                check_lists(
                    op,
                    {f"tensor_lists[{i}]": tensors for i, tensors in enumerate(tensor_lists)},
                    [f"tensor_lists[{i}]" for i in range(reads, len(tensor_lists))],
                )
                raise

        return operation  # type: ignore[return-value]

    return decorate


@_operation("inputs", "outputs")
def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, scale: float) -> None:
    """out = in * scale, for lists [in, out], whose types are independent; out may be in.

    The flag is set if an element of `in` is not finite. An overflow in the rounding to `out` does not set it.
    """
    inputs, outputs = tensor_lists
    checks = kernels.scale_(outputs, inputs, _constant(scale, noop_flag))
    _set_where(noop_flag, checks.nonfinite)


@_operation("xs", "ys", "outputs", reads=2)
def multi_tensor_axpby(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, a: float, b: float, arg_to_check: int
) -> None:
    """out = a * x + b * y, for lists [x, y, out], whose types are independent; out may be x or y.

    Args:
        arg_to_check: the flag is set if an element of x (0), of y (1) or of either (-1) is not finite.
    """
    if arg_to_check not in (-1, 0, 1):
        raise _RefusedError(f"arg_to_check={arg_to_check!r}.  Use -1 (both), 0 (x) or 1 (y).")
    xs, ys, outputs = tensor_lists
    # Checked before y is overwritten, since the output may be y.
    of_y = None if arg_to_check == 0 else kernels.check(ys)
    of_x = kernels.axpby_(outputs, xs, ys, _constant(a, noop_flag), _constant(b, noop_flag))
    if arg_to_check != 1:
        _set_where(noop_flag, of_x.nonfinite)
    if of_y is not None:
        _set_where(noop_flag, of_y.nonfinite)


@_operation("xs")
def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """2-norm over all tensors of the list in [x].

    The flag is set if the norm is not finite. Squares are summed in float64, where they do not overflow as they did in
    apex; the square of one element above 1.8e19 still may.

    Returns:
        (norm over all: float32, shape [1]; norm of each: float32, shape [n], or shape [0] unless `per_tensor`).
    """
    total, each = kernels.l2norm(tensor_lists[0])
    return _norms(noop_flag, total, each, per_tensor)


@_operation("xs")
def multi_tensor_l2norm_mp(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """`multi_tensor_l2norm`, which returns zeros where the flag was set before."""
    total, each = kernels.l2norm(tensor_lists[0])
    was_set = _is_set(noop_flag)
    if tensor_lists[0]:
        total, each = total.masked_fill(was_set, 0), each.masked_fill(was_set, 0)
    return _norms(noop_flag, total, each, per_tensor)


@_operation("inputs", "outputs")
def multi_tensor_l2norm_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, scale: float, per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """out = in * scale, for lists [in, out], whose types are independent; and the 2-norm of `in * scale`.

    The norm is of the values before they are rounded to the type of `out`. Flag and returns are those of
    `multi_tensor_l2norm`.
    """
    inputs, outputs = tensor_lists
    factor = _constant(scale, noop_flag)
    sum_squares = kernels.scale_(outputs, inputs, factor).sum_squares
    return _norms_of_squares(noop_flag, sum_squares, factor, per_tensor)


@_operation("xs")
def multi_tensor_unscale_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: TensorLists, inv_scale: Tensor, per_tensor: bool | None = None
) -> tuple[Tensor, Tensor]:
    """2-norm of `x * inv_scale` over the list in [x], which is not changed.

    Args:
        inv_scale: one floating element, on the device of the tensors.

    Flag and returns are those of `multi_tensor_l2norm`.
    """
    factor = _scalar("inv_scale", inv_scale, noop_flag)
    sum_squares = kernels.check(tensor_lists[0]).sum_squares
    return _norms_of_squares(noop_flag, sum_squares, factor, per_tensor)


@_operation("gradients", "parameters", "momentum buffers", "copies", optional=1)
def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    weight_decay: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
) -> None:
    """SGD, for lists [gradients, parameters, momentum buffers] or these and [..., copies of parameters].

    g = grad * scale;  g += weight_decay * p, unless wd_after_momentum
    buffer = g if first_run, else momentum * buffer + (1 - dampening) * g
    g = g + momentum * buffer if nesterov, else buffer;  g += weight_decay * p, if wd_after_momentum
    p -= lr * g;  copy = p

    Buffers are not read or written if `momentum` is 0. Nothing is written if the flag is set. `first_run` applies to
    all tensors of the call; a tensor whose first gradient comes later needs a call of its own.
    """
    sgd = Sgd(
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=bool(nesterov),
        decay_after_momentum=bool(wd_after_momentum),
    )
    done = 0 if first_run else 1
    _step(sgd, noop_flag, tensor_lists, done, inv_scale=_constant(scale, noop_flag), skips=_is_set(noop_flag))


@_operation("gradients", "parameters", "exp_avg", "exp_avg_sq")
def multi_tensor_adam(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """Adam, for lists [gradients, parameters, exp_avg, exp_avg_sq]; gradients and parameters also float64.

    g += weight_decay * p, if mode is 0 (L2)
    m = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) * g * g
    u = m / (1 - beta1**step) / (sqrt(v / (1 - beta2**step)) + epsilon);  u += weight_decay * p, if mode is 1 (AdamW)
    p -= lr * u

    Args:
        step: the number of this step, from 1.
        bias_correction: 0 leaves the divisions by 1 - beta**step out.

    The flag is left alone and not read.
    """
    adam = _adam(lr, beta1, beta2, epsilon, mode, bias_correction, weight_decay)
    _step(adam, noop_flag, tensor_lists, step - 1)


@_operation("gradients", "parameters", "exp_avg", "exp_avg_sq", writes_gradients=True)
def multi_tensor_adam_capturable(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Tensor,
) -> None:
    """`multi_tensor_adam` with lr, step and inv_scale on the device; `g *= inv_scale` is written back.

    Args:
        lr, inv_scale: one floating element each.
        step: one element of any type: the number of this step, from 1. It is not advanced.

    Nothing is written where the flag is set.
    """
    adam = _adam(_scalar("lr", lr, noop_flag), beta1, beta2, epsilon, mode, bias_correction, weight_decay)
    _step_and_unscale(adam, noop_flag, tensor_lists, step, inv_scale)


@_operation("gradients", "parameters", "exp_avg", "exp_avg_sq", "masters", writes_gradients=True)
def multi_tensor_adam_capturable_master(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: Tensor,
    mode: int,
    bias_correction: int,
    weight_decay: float,
    inv_scale: Tensor,
) -> None:
    """`multi_tensor_adam_capturable`, for lists [gradients, parameters, exp_avg, exp_avg_sq, masters].

    The masters are stepped, and the parameters become the masters, rounded.
    """
    adam = _adam(_scalar("lr", lr, noop_flag), beta1, beta2, epsilon, mode, bias_correction, weight_decay)
    _step_and_unscale(adam, noop_flag, tensor_lists, step, inv_scale)


@_operation("gradients", "parameters", "exp_avg", "exp_avg_sq", writes_gradients=True)
def multi_tensor_lamb(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: Tensor,
    max_grad_norm: float,
    use_nvlamb: bool | None = None,
) -> None:
    """LAMB, for lists [gradients, parameters, exp_avg, exp_avg_sq]. Gradients are overwritten: they become u.

    g /= max(1, global_grad_norm / max_grad_norm), unless max_grad_norm is 0;  g += weight_decay * p, if mode is 0
    m = beta1 * m + beta3 * g;  v = beta2 * v + (1 - beta2) * g * g;  beta3 = 1 - beta1 if grad_averaging else 1
    u = m / (1 - beta1**step) / (sqrt(v / (1 - beta2**step)) + epsilon);  u += weight_decay * p, if mode is 1
    p -= lr * r * u;  r = |p| / |u| if weight_decay != 0 or use_nvlamb, and neither norm is 0, else 1

    Args:
        step: the number of this step, from 1.
        bias_correction: 0 leaves the divisions by 1 - beta**step out.
        global_grad_norm: one floating element, on the device of the tensors.

    The flag is left alone and not read.
    """
    norm = _scalar("global_grad_norm", global_grad_norm, noop_flag)
    norm = norm / max_grad_norm if max_grad_norm > 0 else torch.zeros_like(norm)
    lamb = _lamb(lr, beta1, beta2, epsilon, bias_correction, weight_decay, grad_averaging, mode, use_nvlamb)
    _step_into_gradients(lamb, noop_flag, tensor_lists, step, norm)


@_operation("gradients", "parameters", "exp_avg", "exp_avg_sq", "copies", optional=1, writes_gradients=True)
def multi_tensor_lamb_mp(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: Tensor,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: Tensor,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    global_grad_norm: Tensor,
    max_grad_norm: Tensor,
    use_nvlamb: bool | None,
    found_inf: Tensor,
    inv_scale: Tensor,
) -> None:
    """`multi_tensor_lamb` of `g = grad * inv_scale`, with the numbers that change between steps on the device.

    For lists [gradients, parameters, exp_avg, exp_avg_sq] or these and [..., copies of parameters]. Nothing is written
    if the flag is set or `found_inf` is not 0.

    Args:
        lr, global_grad_norm, max_grad_norm, found_inf, inv_scale: one floating element each. The norm is of the
            unscaled gradients.
        step: one element of any type: the number of this step, from 1. It is not advanced.
    """
    norm = _scalar("global_grad_norm", global_grad_norm, noop_flag)
    max_norm = _scalar("max_grad_norm", max_grad_norm, noop_flag)
    norm = torch.where(max_norm > 0, norm / max_norm, 0.0)
    lr, step = _scalar("lr", lr, noop_flag), _scalar("step", step, noop_flag)
    factor = _scalar("inv_scale", inv_scale, noop_flag)
    skips = _is_set(noop_flag) | (_scalar("found_inf", found_inf, noop_flag) != 0)
    lamb = _lamb(lr, beta1, beta2, epsilon, bias_correction, weight_decay, grad_averaging, mode, use_nvlamb)
    _step_into_gradients(lamb, noop_flag, tensor_lists, step, norm, factor, skips)


@_operation("gradients", "parameters", "exp_avg")
def multi_tensor_novograd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    grad_norms: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    epsilon: float,
    step: int,
    bias_correction: int,
    weight_decay: float,
    grad_averaging: int,
    mode: int,
    norm_type: int,
) -> None:
    """NovoGrad, for lists [gradients, parameters, exp_avg]; gradients and parameters also float64.

    n = |g|_2;  norm = sqrt(beta2 * norm**2 + (1 - beta2) * n**2), if norm_type is 2
    n = largest |g|;  norm = beta2 * norm + (1 - beta2) * n, if norm_type is 0
    c1 = 1 - beta1**step;  c2 = sqrt(1 - beta2**step);  beta3 = 1 - beta1 if grad_averaging else 1
    m = beta1 * m + beta3 * (g / (norm / c2 + epsilon) + weight_decay * p);  p -= lr / c1 * m, if mode is 0
    m = beta1 * m + beta3 * g;  p -= lr * (m / c1 / (norm / c2 + epsilon) + weight_decay * p), if mode is 1

    Args:
        grad_norms: norms, not their squares: float32 (or float16), shape [n]; blended in place. Before the first step
            fill it with the norms of the first gradients, or with zeros.
        step: the number of this step, from 1.
        bias_correction: 0 makes c1 and c2 1.

    The flag is set if a gradient is not finite, and not read.
    """
    grads, params, _ = tensor_lists
    if grad_norms.shape != (len(grads),) or grad_norms.device != noop_flag.device:
        raise _RefusedError(
            f"grad_norms has shape {list(grad_norms.shape)} on {grad_norms.device}, but must have one norm a "
            f"tensor: shape [{len(grads)}] on {noop_flag.device}."
        )
    if norm_type not in (0, 2):
        raise _RefusedError(f"norm_type={norm_type!r}.  Use 2, or 0 for the largest magnitude.")
    if not grads:
        return
    if _is_float64(tensor_lists, params):
        # The maximum of no element is an error.
        size = torch.stack([g.norm() if norm_type == 2 or not g.numel() else g.abs().max() for g in grads])
        nonfinite = kernels.nonfinite(grads)
    else:
        checks = kernels.check(grads)
        size = checks.sum_squares.sqrt() if norm_type == 2 else checks.largest.double()
        nonfinite = checks.nonfinite
    norms = grad_norms.double()
    if norm_type == 2:
        norms = (beta2 * norms.square() + (1 - beta2) * size.square()).sqrt()
    else:
        norms = beta2 * norms + (1 - beta2) * size
    # At a tensor's first step, the formula would start the norm. Here the caller has started it, so the formula gets
    # blended and corrected norms for a later step (1 step done), with beta2 = 1, which does not change them.
    bias1, bias2 = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    inside = mode == 0
    novograd = NovoGrad(
        lr=lr / bias1,
        beta1=beta1,
        beta2=1.0,
        eps=epsilon,
        weight_decay=weight_decay if inside else weight_decay * bias1,
        bias_correction=False,
        grad_averaging=bool(grad_averaging),
        decay_inside_moment=inside,
        infinity_norm=norm_type == 0,
    )
    _step(novograd, noop_flag, tensor_lists, 1, norms=norms / bias2**0.5)
    grad_norms.copy_(norms)
    _set_where(noop_flag, nonfinite)


@_operation("gradients", "parameters", "sums")
def multi_tensor_adagrad(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    lr: float,
    epsilon: float,
    mode: int,
    weight_decay: float,
) -> None:
    """Adagrad, for lists [gradients, parameters, sums]; all three also float64.

    g += weight_decay * p, if mode is 0 (L2)
    h += g * g;  p -= lr * (g / (sqrt(h) + epsilon) [+ weight_decay * p, if mode is 1])

    The flag is left alone and not read.
    """
    adagrad = Adagrad(lr=lr, eps=epsilon, weight_decay=weight_decay, decoupled=mode == 1)
    _step(adagrad, noop_flag, tensor_lists, 0)


@torch.no_grad()
def update_scale_hysteresis(
    current_scale: Tensor,
    growth_tracker: Tensor,
    hysteresis_tracker: Tensor,
    found_inf: Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
    hysteresis: int,
) -> Tensor:
    """Adjust, in place, a dynamic loss scale that falls only after `hysteresis` overflows since the last clean step.

    if found_inf != 0:
        growth_tracker = 0;  hysteresis_tracker -= 1
        if hysteresis_tracker <= 0: current_scale *= backoff_factor
    else:
        growth_tracker += 1;  hysteresis_tracker = hysteresis
        if growth_tracker == growth_interval: current_scale *= growth_factor, if that is finite;  growth_tracker = 0

    The scale stops at the smallest normal float32 (1.2e-38); in apex it reached 0, and stayed there.

    Args:
        current_scale, found_inf: float32, one element each, on one device.
        growth_tracker, hysteresis_tracker: int32, one element each.

    Returns:
        `current_scale`. No host sync.
    """
    tensors = (current_scale, growth_tracker, hysteresis_tracker, found_inf)
    for name, tensor in zip(
        ("current_scale", "growth_tracker", "hysteresis_tracker", "found_inf"), tensors, strict=True
    ):
        if tensor.numel() != 1:
            raise AmpValueError(f"update_scale_hysteresis: {name} has {tensor.numel()} elements, but must have one.")
    scale, grown, left, bad = (tensor.view(()) for tensor in tensors)
    kernels.update_scale_(
        scale,
        grown,
        bad,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        min_scale=LOWEST_SCALE,
        max_scale=float("inf"),
        hysteresis_tracker=left,
        hysteresis=hysteresis,
    )
    return current_scale


def __getattr__(name: str) -> NoReturn:
    if name in ("multi_tensor_lamb_stage1_cuda", "multi_tensor_lamb_stage2_cuda"):
        raise AttributeError(f"amp_C.{name} is not served; call multi_tensor_lamb, which does both stages.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _adam(lr: Any, beta1: float, beta2: float, eps: float, mode: int, corrects: int, decay: float) -> Adam:
    return Adam(
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=decay,
        decoupled=mode == 1,
        bias_correction=bool(corrects),
    )


def _lamb(
    lr: Any, beta1: float, beta2: float, eps: float, corrects: int, decay: float, averages: int, mode: int, nv: Any
) -> Lamb:
    return Lamb(
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=decay,
        max_grad_norm=1.0,
        decoupled=mode == 1,
        bias_correction=bool(corrects),
        grad_averaging=bool(averages),
        use_nvlamb=bool(nv),
    )


def _step(
    formula: Formula,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    done: int | Tensor,
    *,
    has_masters: bool = False,
    norms: Tensor | None = None,
    inv_scale: Tensor | None = None,
    skips: Tensor | None = None,
    gradient_norm: Tensor | None = None,
) -> Sequence[TensorList]:
    """Step once.

    Args:
        tensor_lists: gradients, parameters, the states of the formula, and maybe copies of the parameters, or masters.
        done: the number of earlier steps of the parameters; shape [], if it is a tensor.
        norms: NovoGrad's norms, shape [n].
        inv_scale, gradient_norm: float32, shape [].
        skips: bool, shape []; nothing is written where it is true.

    Returns:
        The states as they were computed, before they were rounded.
    """
    n = 2 if formula.needs_state2 else 1
    grads, params = tensor_lists[:2]
    states = tensor_lists[2 : 2 + n] if formula.needs_state1 else []
    copies = tensor_lists[2 + n] if len(tensor_lists) > 2 + n else None
    if has_masters and copies is not None:
        params, copies = copies, params
    if isinstance(formula, (Adam, Adagrad, NovoGrad)) and _is_float64(tensor_lists, params):
        lists = [grads, params, *states]
        float64_steps.step_(formula, lists, copies, step=done + 1, norms=norms, inv_scale=inv_scale, skips=skips)
        return states
    wide: list[TensorList] = [
        state if not state or state[0].dtype is torch.float32 else [t.float() for t in state] for state in states
    ]
    kernels.step_once(
        formula,
        grads,
        params,
        wide[0] if wide else None,
        wide[1] if n == 2 else None,
        (done.float() if isinstance(done, Tensor) else _constant(done, noop_flag)).expand(len(params)).contiguous(),
        None if norms is None else norms.float(),
        copies,
        inv_scale=inv_scale,
        found_inf=None if skips is None else skips.float(),
        gradient_norm=gradient_norm,
    )
    for state, state_f32 in zip(states, wide, strict=True):
        if state is not state_f32:
            kernels.cast_copy_(state, state_f32)
    return wide


def _step_and_unscale(
    adam: Adam, noop_flag: Tensor, tensor_lists: TensorLists, step: Tensor, inv_scale: Tensor
) -> None:
    """Step by unscaled gradients, and write them back, unless the flag is set. A fifth list holds masters."""
    done = _scalar("step", step, noop_flag) - 1
    factor = _scalar("inv_scale", inv_scale, noop_flag)
    skips = _is_set(noop_flag)
    _step(adam, noop_flag, tensor_lists, done, has_masters=len(tensor_lists) == 5, inv_scale=factor, skips=skips)
    grads = tensor_lists[0]
    if grads:
        factor = torch.where(skips, 1.0, factor)
        if grads[0].dtype is torch.float64:
            torch._foreach_mul_(list(grads), factor)
        else:
            kernels.scale_(grads, grads, factor)


def _step_into_gradients(
    lamb: Lamb,
    noop_flag: Tensor,
    tensor_lists: TensorLists,
    step: int | Tensor,
    norm_over_max: Tensor,
    inv_scale: Tensor | None = None,
    skips: Tensor | None = None,
) -> None:
    """Step by LAMB, and write the updates into the gradients, unless `skips`."""
    grads, params = tensor_lists[:2]
    if not params:
        return
    decays = lamb.decoupled and lamb.weight_decay != 0
    before = [p.to(torch.float32, copy=True) for p in params] if decays else None
    exp_avgs_f32, exp_avg_sqs_f32 = _step(
        lamb, noop_flag, tensor_lists, step - 1, inv_scale=inv_scale, skips=skips, gradient_norm=norm_over_max
    )
    denominators = list(torch._foreach_sqrt(list(exp_avg_sqs_f32)))
    updates = list(exp_avgs_f32)
    if lamb.bias_correction:
        t = step.double() if isinstance(step, Tensor) else step
        # Foreach would widen 0-d updates to a factor's float64.
        inv_bias1, inv_root2 = (
            x.float() if isinstance(x, Tensor) else x for x in (1 / (1 - lamb.beta1**t), (1 - lamb.beta2**t) ** -0.5)
        )
        torch._foreach_mul_(denominators, inv_root2)
        updates = list(torch._foreach_mul(updates, inv_bias1))
    torch._foreach_add_(denominators, lamb.eps)
    updates = list(torch._foreach_div(updates, denominators))
    if before is not None:
        torch._foreach_add_(updates, before, alpha=lamb.weight_decay)
    if skips is not None:
        updates = [torch.where(skips, g.float(), u) for g, u in zip(grads, updates, strict=True)]
    torch._foreach_copy_(list(grads), updates)


def _check_lists(noop_flag: Tensor, tensor_lists: TensorLists, names: Sequence[str], optional: int) -> None:
    """Refuse a wrong flag, a wrong number of lists, lists of unequal lengths or of mixed types."""
    if noop_flag.numel() != 1 or noop_flag.dtype is not torch.int32:
        raise _RefusedError(
            f"noop_flag is a {dtype_name(noop_flag.dtype)} tensor of shape {list(noop_flag.shape)}, but must be one "
            "int32.  Call torch.zeros(1, dtype=torch.int32, device=...)."
        )
    needed = len(names) - optional
    if not needed <= len(tensor_lists) <= len(names):
        last = f", and {' and '.join(names[needed:])} if wanted" if optional else ""
        raise _RefusedError(
            f"tensor_lists holds {len(tensor_lists)} lists, but takes {needed}: {', '.join(names[:needed])}{last}."
        )
    for i, tensors in enumerate(tensor_lists):
        if len(tensors) != len(tensor_lists[0]):
            raise _RefusedError(
                f"tensor_lists[{i}] ({names[i]}) has {len(tensors)} entries, but tensor_lists[0] ({names[0]}) "
                f"has {len(tensor_lists[0])}.  All lists of one call are of one length."
            )
        for j, tensor in enumerate(tensors):
            if tensor.dtype != tensors[0].dtype:
                raise _RefusedError(
                    f"tensor_lists[{i}][{j}] ({names[i]}) is {dtype_name(tensor.dtype)}, but tensor_lists[{i}][0] is "
                    f"{dtype_name(tensors[0].dtype)}.  One list holds one type; make a call for each."
                )
    if tensor_lists[0] and tensor_lists[0][0].device != noop_flag.device:
        raise _RefusedError(
            f"noop_flag is on {noop_flag.device}, but the tensors are on {tensor_lists[0][0].device}.  Make a "
            "flag for each device."
        )


def _is_float64(lists: TensorLists, params: TensorList) -> bool:
    """True for float64 parameters, which plain PyTorch steps, in any order in memory. Refuses lists that do not fit."""
    if not params or params[0].dtype is not torch.float64:
        return False
    for i, tensors in enumerate(lists):
        for j, tensor in enumerate(tensors):
            if tensor.dtype not in (torch.float64, torch.float32):
                raise _RefusedError(
                    f"tensor_lists[{i}][{j}] is {dtype_name(tensor.dtype)}, but beside float64 parameters only float64 "
                    "and float32 are allowed."
                )
            if tensor.shape != lists[0][j].shape or tensor.device != lists[0][j].device:
                raise _RefusedError(
                    f"tensor_lists[{i}][{j}] has shape {list(tensor.shape)} on {tensor.device}, but "
                    f"tensor_lists[0][{j}] has {list(lists[0][j].shape)} on {lists[0][j].device}."
                )
    return True


def _norms(noop_flag: Tensor, total: Tensor, each: Tensor, per_tensor: bool | None) -> tuple[Tensor, Tensor]:
    """Return two norms as float32, and set the flag if `total` is not finite."""
    total = total.float().reshape(1).to(noop_flag.device)
    _set_where(noop_flag, ~total.isfinite())
    return total, each.float() if per_tensor else each.new_empty(0, dtype=torch.float32)


def _norms_of_squares(
    noop_flag: Tensor, sum_squares: Tensor, factor: Tensor, per_tensor: bool | None
) -> tuple[Tensor, Tensor]:
    """`_norms` of tensors whose sums of squares are known, times `factor`."""
    sum_squares = sum_squares.to(noop_flag.device)
    size = factor.double().abs()
    return _norms(noop_flag, sum_squares.sum().sqrt() * size, sum_squares.sqrt() * size, per_tensor)


def _is_set(noop_flag: Tensor) -> Tensor:
    """The flag as bool, shape []."""
    return noop_flag.view(()) != 0


def _set_where(noop_flag: Tensor, bad: Tensor) -> None:
    """Set the flag if one of `bad` (bool, any shape) is true. No host sync."""
    if bad.numel():
        noop_flag.masked_fill_(bad.any(), 1)


def _constant(value: float, noop_flag: Tensor) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=noop_flag.device)


def _scalar(name: str, value: float | Tensor, noop_flag: Tensor) -> Tensor:
    """`value` as a float32 tensor of shape [] on the device of the call. No host sync."""
    if not isinstance(value, Tensor) or value.numel() != 1 or value.device != noop_flag.device:
        found = f"shape {list(value.shape)} on {value.device}" if isinstance(value, Tensor) else repr(value)
        raise _RefusedError(f"{name} is {found}, but must be a tensor of one element on {noop_flag.device}.")
    return value.detach().float().view(())
