# ruff: noqa: N999 - apex's name
"""`amp_C`: apex's multi-tensor operations, on amp_engine's kernels, for every device that torch has.

Every operation is called as `op(chunk_size, noop_flag, tensor_lists, *args)`, most often through
`multi_tensor_applier(op, noop_flag, tensor_lists, *args)`.

    chunk_size    an int, taken and not used: the kernels choose their own, and no result depends on it.
    noop_flag     int32, one element, on the device of the tensors. An operation either sets it to 1 if a value that it
                  reads is not finite, and never clears it; or does nothing if it is not 0; or does not use it.
    tensor_lists  lists of equal lengths, of float32, float16 and bfloat16 in any mixture (float64 where this is said).
                  Tensors of one index have one shape and one order in memory, without gaps (contiguous, channels_last,
                  ...). Empty tensors and empty lists are fine.

Anything else raises AmpValueError, which names list and tensor, and changes nothing. Arithmetic is in float32, rounded
once to the type of what is written. No operation waits for the device.

An operation is a function below: its decorator lists its lists and arguments, its docstring has its formula.

The legacy pair multi_tensor_lamb_stage1_cuda and multi_tensor_lamb_stage2_cuda is not served; multi_tensor_lamb does
both stages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import wraps
from inspect import Parameter, Signature
from typing import Any, NoReturn

import torch
from torch import Tensor

from amp_engine import kernels
from amp_engine.apex import float64_steps
from amp_engine.errors import AmpValueError
from amp_engine.ground.dtypes import dtype_name
from amp_engine.kernels.formulas import Adagrad, Adam, Formula, Lamb, NovoGrad, Sgd
from amp_engine.kernels.layout import FLOATS
from amp_engine.kernels.refusals import check_apart, check_lists
from amp_engine.levels.policy import LOWEST_SCALE

TensorList = Sequence[Tensor]


class _Call:
    """One call of an operation.

    Args:
        op: name of the operation.
        flag: noop_flag.
        lists: tensor_lists.
        reads: the number of lists, from the first on, that are not written.
    """

    def __init__(self, op: str, flag: Tensor, lists: Sequence[TensorList], reads: int) -> None:
        self.op = op
        self.flag = flag
        self.lists = lists
        self.allowed: Sequence[torch.dtype] = FLOATS
        self._names = {f"tensor_lists[{i}]": tensors for i, tensors in enumerate(lists)}
        self._written = [*self._names][reads:]

    def refuse(self, text: str) -> NoReturn:
        raise AmpValueError(f"{self.op}: {text}")

    def check(self) -> None:
        """Refuse lists as the kernels do, by the caller's names for them. A loop over all tensors, which takes long."""
        check_lists(self.op, self._names, self._written, allowed=dict.fromkeys(self._names, self.allowed))

    def check_gradients(self) -> None:
        """Refuse gradients that share memory, which are written after the kernels."""
        check_apart(self.op, {"tensor_lists[0]": self.lists[0]}, {})

    def number(self, value: float | Tensor) -> Tensor:
        """`value` as float32 of shape [] on the device of the call. No host sync."""
        if isinstance(value, Tensor):
            return value.float().view(())
        return torch.full((), value, dtype=torch.float32, device=self.flag.device)

    def scalar(self, name: str, value: Any) -> Tensor:
        """`number` of an argument that has to be on the device."""
        if not isinstance(value, Tensor) or value.numel() != 1 or value.device != self.flag.device:
            found = f"shape {list(value.shape)} on {value.device}" if isinstance(value, Tensor) else repr(value)
            self.refuse(f"{name} is {found}, but must be a tensor of one element on {self.flag.device}.")
        return self.number(value.detach())

    def is_set(self) -> Tensor:
        """The flag as bool, shape []."""
        return self.flag.view(()) != 0

    def set_where(self, bad: Tensor) -> None:
        """Set the flag if one of `bad` (bool, any shape) is true. No host sync."""
        if bad.numel():
            self.flag.masked_fill_(bad.any(), 1)


def _operation(lists: str, arguments: str = "", *, scalars: str = "", reads: int = 1) -> Callable[[Any], Any]:
    """Make an operation of a function of a _Call and of the arguments by name.

    Args:
        lists: names of the lists; "[name]" may be left out.
        arguments: names of the arguments in their order; "name=None" may be left out.
        scalars: names of the arguments that are one element on the device, of any type; they become float32, shape [].
        reads: the number of lists, from the first on, that are not written; 0 where gradients are written, too.
    """
    names, on_device = lists.split(), scalars.split()
    needed = [name for name in names if not name.startswith("[")]
    after = (argument.partition("=None") for argument in arguments.split())
    kind = Parameter.POSITIONAL_OR_KEYWORD
    parameters = [Parameter(name, kind) for name in ("chunk_size", "noop_flag", "tensor_lists")]
    parameters += [Parameter(name, kind, default=None if default else Parameter.empty) for name, default, _ in after]
    signature = Signature(parameters)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def operation(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            _, flag, tensor_lists, *_ = bound.args
            call = _Call(function.__name__, flag, tensor_lists, reads)
            if flag.numel() != 1 or flag.dtype is not torch.int32:
                call.refuse(
                    f"noop_flag is a {dtype_name(flag.dtype)} tensor of shape {list(flag.shape)}, but must be one "
                    "int32.  Call torch.zeros(1, dtype=torch.int32, device=...)."
                )
            if not len(needed) <= len(tensor_lists) <= len(names):
                call.refuse(f"tensor_lists holds {len(tensor_lists)} lists, but takes {len(needed)}: {lists}.")
            if tensor_lists[0] and tensor_lists[0][0].device != flag.device:
                call.refuse(
                    f"noop_flag is on {flag.device}, but the tensors are on {tensor_lists[0][0].device}.  Make a flag "
                    "for each device."
                )
            given = {parameter.name: bound.arguments[parameter.name] for parameter in parameters[3:]}
            given.update({name: call.scalar(name, given[name]) for name in on_device})
            try:
                if reads == 0:
                    call.check_gradients()
                with torch.no_grad():
                    return function(call, **given)
            except AmpValueError:
                call.check()
                raise

        vars(operation)["__signature__"] = signature
        return operation

    return decorate


@_operation("inputs outputs", "scale")
def multi_tensor_scale(call: _Call, scale: float) -> None:
    """out = in * scale, for lists [in, out], whose types are independent; out may be in.

    The flag is set if an element of `in` is not finite. An overflow in the rounding to `out` does not set it.
    """
    inputs, outputs = call.lists
    call.set_where(kernels.scale_(outputs, inputs, call.number(scale)).nonfinite)


@_operation("xs ys outputs", "a b arg_to_check", reads=2)
def multi_tensor_axpby(call: _Call, a: float, b: float, arg_to_check: int) -> None:
    """out = a * x + b * y, for lists [x, y, out], whose types are independent; out may be x or y.

    Args:
        arg_to_check: the flag is set if an element of x (0), of y (1) or of either (-1) is not finite.
    """
    if arg_to_check not in (-1, 0, 1):
        call.refuse(f"arg_to_check={arg_to_check!r}.  Use -1 (both), 0 (x) or 1 (y).")
    xs, ys, outputs = call.lists
    # Checked before y is overwritten, since the output may be y.
    of_y = None if arg_to_check == 0 else kernels.check(ys)
    of_x = kernels.axpby_(outputs, xs, ys, call.number(a), call.number(b))
    if arg_to_check != 1:
        call.set_where(of_x.nonfinite)
    if of_y is not None:
        call.set_where(of_y.nonfinite)


@_operation("xs", "per_tensor=None")
def multi_tensor_l2norm(call: _Call, per_tensor: bool | None) -> tuple[Tensor, Tensor]:
    """2-norm over all tensors of the list in [x].

    The flag is set if the norm is not finite. Squares are summed in float64, where they do not overflow as they did in
    apex; the square of one element above 1.8e19 still may.

    Returns:
        (norm over all: float32, shape [1]; norm of each: float32, shape [n], or shape [0] unless `per_tensor`).
    """
    return _norms(call, kernels.check(call.lists[0]).sum_squares, per_tensor)


@_operation("xs", "per_tensor=None")
def multi_tensor_l2norm_mp(call: _Call, per_tensor: bool | None) -> tuple[Tensor, Tensor]:
    """`multi_tensor_l2norm`, which returns zeros where the flag was set before."""
    sum_squares = kernels.check(call.lists[0]).sum_squares.to(call.flag.device)
    return _norms(call, sum_squares.masked_fill(call.is_set(), 0), per_tensor)


@_operation("inputs outputs", "scale per_tensor=None")
def multi_tensor_l2norm_scale(call: _Call, scale: float, per_tensor: bool | None) -> tuple[Tensor, Tensor]:
    """out = in * scale, for lists [in, out], whose types are independent; and the 2-norm of `in * scale`.

    The norm is of the values before they are rounded to the type of `out`. Flag and returns are those of
    `multi_tensor_l2norm`.
    """
    inputs, outputs = call.lists
    factor = call.number(scale)
    return _norms(call, kernels.scale_(outputs, inputs, factor).sum_squares, per_tensor, factor)


@_operation("xs", "inv_scale per_tensor=None", scalars="inv_scale")
def multi_tensor_unscale_l2norm(call: _Call, inv_scale: Tensor, per_tensor: bool | None) -> tuple[Tensor, Tensor]:
    """2-norm of `x * inv_scale` over the list in [x], which is not changed.

    Args:
        inv_scale: one floating element, on the device of the tensors.

    Flag and returns are those of `multi_tensor_l2norm`.
    """
    return _norms(call, kernels.check(call.lists[0]).sum_squares, per_tensor, inv_scale)


@_operation(
    "gradients parameters momentum_buffers [copies]",
    "weight_decay momentum dampening lr nesterov first_run wd_after_momentum scale",
)
def multi_tensor_sgd(call: _Call, first_run: bool, scale: float, **given: Any) -> None:
    """SGD, for lists [gradients, parameters, momentum buffers] or these and [..., copies of parameters].

    g = grad * scale;  g += weight_decay * p, unless wd_after_momentum
    buffer = g if first_run, else momentum * buffer + (1 - dampening) * g
    g = g + momentum * buffer if nesterov, else buffer;  g += weight_decay * p, if wd_after_momentum
    p -= lr * g;  copy = p

    Buffers are not read or written if `momentum` is 0. Nothing is written if the flag is set. `first_run` applies to
    all tensors of the call; a tensor whose first gradient comes later needs a call of its own.
    """
    step = 1 if first_run else 2
    _step(call, _formula(Sgd, given), call.lists, step, inv_scale=call.number(scale), skips=call.is_set())


_ADAM = "lr beta1 beta2 epsilon step mode bias_correction weight_decay"


@_operation("gradients parameters exp_avg exp_avg_sq", _ADAM)
def multi_tensor_adam(call: _Call, step: int, **given: Any) -> None:
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
    _step(call, _formula(Adam, given), call.lists, step)


@_operation("gradients parameters exp_avg exp_avg_sq", f"{_ADAM} inv_scale", scalars="lr step inv_scale", reads=0)
def multi_tensor_adam_capturable(call: _Call, step: Tensor, inv_scale: Tensor, **given: Any) -> None:
    """`multi_tensor_adam` with lr, step and inv_scale on the device; `g *= inv_scale` is written back.

    Args:
        lr, inv_scale: one floating element each.
        step: one element of any type: the number of this step, from 1. It is not advanced.

    Nothing is written where the flag is set.
    """
    _step_and_unscale(call, _formula(Adam, given), call.lists, step, inv_scale)


@_operation(
    "gradients parameters exp_avg exp_avg_sq masters", f"{_ADAM} inv_scale", scalars="lr step inv_scale", reads=0
)
def multi_tensor_adam_capturable_master(call: _Call, step: Tensor, inv_scale: Tensor, **given: Any) -> None:
    """`multi_tensor_adam_capturable`, for lists [gradients, parameters, exp_avg, exp_avg_sq, masters].

    The masters are stepped, and the parameters become the masters, rounded.
    """
    grads, params, exp_avgs, exp_avg_sqs, masters = call.lists
    _step_and_unscale(call, _formula(Adam, given), (grads, masters, exp_avgs, exp_avg_sqs, params), step, inv_scale)


_LAMB = "lr beta1 beta2 epsilon step bias_correction weight_decay grad_averaging mode global_grad_norm max_grad_norm"


@_operation("gradients parameters exp_avg exp_avg_sq", f"{_LAMB} use_nvlamb=None", scalars="global_grad_norm", reads=0)
def multi_tensor_lamb(call: _Call, **given: Any) -> None:
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
    _lamb(call, **given)


@_operation(
    "gradients parameters exp_avg exp_avg_sq [copies]",
    f"{_LAMB} use_nvlamb found_inf inv_scale",
    scalars="lr step global_grad_norm max_grad_norm found_inf inv_scale",
    reads=0,
)
def multi_tensor_lamb_mp(call: _Call, found_inf: Tensor, **given: Any) -> None:
    """`multi_tensor_lamb` of `g = grad * inv_scale`, with the numbers that change between steps on the device.

    For lists [gradients, parameters, exp_avg, exp_avg_sq] or these and [..., copies of parameters]. Nothing is written
    if the flag is set or `found_inf` is not 0.

    Args:
        lr, global_grad_norm, max_grad_norm, found_inf, inv_scale: one floating element each. The norm is of the
            unscaled gradients.
        step: one element of any type: the number of this step, from 1. It is not advanced.
    """
    _lamb(call, skips=call.is_set() | (found_inf != 0), **given)


@_operation(
    "gradients parameters exp_avg",
    "grad_norms lr beta1 beta2 epsilon step bias_correction weight_decay grad_averaging mode norm_type",
)
def multi_tensor_novograd(
    call: _Call, grad_norms: Tensor, beta2: float, step: int, bias_correction: int, norm_type: int, **given: Any
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
    grads = call.lists[0]
    if grad_norms.shape != (len(grads),) or grad_norms.device != call.flag.device:
        call.refuse(
            f"grad_norms has shape {list(grad_norms.shape)} on {grad_norms.device}, but must have one norm a "
            f"tensor: shape [{len(grads)}] on {call.flag.device}."
        )
    if norm_type not in (0, 2):
        call.refuse(f"norm_type={norm_type!r}.  Use 2, or 0 for the largest magnitude.")
    if not grads:
        return
    if grads[0].dtype is torch.float64:
        # The maximum of no element is an error.
        size = torch.stack([g.norm() if norm_type == 2 or not g.numel() else g.abs().max() for g in grads])
        nonfinite = torch.stack([~g.isfinite().all() for g in grads])  # squares of finite ones may overflow
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
    # blended and corrected norms for a later step (the second), with beta2 = 1, which does not change them.
    bias1, bias2 = (1 - given["beta1"] ** step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    inside = given["mode"] == 0
    given["lr"] /= bias1
    given["weight_decay"] *= 1 if inside else bias1
    novograd = _formula(
        NovoGrad,
        given,
        beta2=1.0,
        bias_correction=False,
        decay_inside_moment=inside,
        infinity_norm=norm_type == 0,
    )
    _step(call, novograd, call.lists, 2, norms=norms / bias2**0.5)
    grad_norms.copy_(norms)
    call.set_where(nonfinite)


@_operation("gradients parameters sums", "lr epsilon mode weight_decay")
def multi_tensor_adagrad(call: _Call, **given: Any) -> None:
    """Adagrad, for lists [gradients, parameters, sums]; all three also float64.

    g += weight_decay * p, if mode is 0 (L2)
    h += g * g;  p -= lr * (g / (sqrt(h) + epsilon) [+ weight_decay * p, if mode is 1])

    The flag is left alone and not read.
    """
    _step(call, _formula(Adagrad, given), call.lists, 1)


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
    kernels.update_scale_(
        current_scale,
        growth_tracker,
        found_inf,
        growth_factor=growth_factor,
        backoff_factor=backoff_factor,
        growth_interval=growth_interval,
        min_scale=LOWEST_SCALE,
        max_scale=float("inf"),
        hysteresis_tracker=hysteresis_tracker,
        hysteresis=hysteresis,
    )
    return current_scale


def __getattr__(name: str) -> NoReturn:
    if name in ("multi_tensor_lamb_stage1_cuda", "multi_tensor_lamb_stage2_cuda"):
        raise AttributeError(f"amp_C.{name} is not served; call multi_tensor_lamb, which does both stages.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_NAMES = {"epsilon": "eps", "wd_after_momentum": "decay_after_momentum"}


def _formula(kind: type[Formula], given: dict[str, Any], **more: Any) -> Any:
    """The formula with the hyperparameters among the arguments of a call, and `more`."""
    values = {_NAMES.get(name, name): value for name, value in given.items()}
    values = {"decoupled": values.get("mode") == 1, **values, **more}
    known = {field.name: field for field in fields(kind)}
    are_flags = {name for name, field in known.items() if isinstance(field.default, bool)}
    return kind(**{n: bool(v) if n in are_flags else v for n, v in values.items() if n in known})


def _norms(
    call: _Call, sum_squares: Tensor, per_tensor: bool | None, factor: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Norms as float32 of tensors with these sums of squares, times `factor`. Sets the flag if one is not finite."""
    each = sum_squares.to(call.flag.device)
    size = 1.0 if factor is None else factor.double().abs()
    total = (each.sum().sqrt() * size).float().reshape(1)
    call.set_where(~total.isfinite())
    return total, (each.sqrt() * size).float() if per_tensor else total.new_empty(0)


def _step(
    call: _Call,
    formula: Formula,
    lists: Sequence[TensorList],
    step: int | Tensor,
    *,
    norms: Tensor | None = None,
    inv_scale: Tensor | None = None,
    skips: Tensor | None = None,
    gradient_norm: Tensor | None = None,
) -> Sequence[TensorList]:
    """Step once.

    Args:
        lists: gradients, weights, the states of the formula, and maybe what gets the rounded weights.
        step: the number of this step, from 1; one element, if it is a tensor.
        norms: NovoGrad's norms, shape [n].
        inv_scale, gradient_norm: float32, shape [].
        skips: bool, shape []; nothing is written where it is true.

    Returns:
        The states as they were computed, before they were rounded.
    """
    grads, weights, *rest = lists
    n = 2 if formula.needs_state2 else 1
    states = rest[:n] if formula.needs_state1 else []
    copies = rest[n] if len(rest) > n else None
    if isinstance(formula, (Adam, Adagrad, NovoGrad)) and weights and weights[0].dtype is torch.float64:
        call.allowed = (torch.float64, torch.float32)
        call.check()
        both = [grads, weights, *states]
        float64_steps.step_(formula, both, copies, step=step, norms=norms, inv_scale=inv_scale, skips=skips)
        return states
    wide = [[t.float() for t in state] for state in states]
    first, second = (*wide, None, None)[:2]
    kernels.step_once(
        formula,
        grads,
        weights,
        first,
        second,
        (call.number(step) - 1).expand(len(weights)).contiguous(),
        None if norms is None else norms.float(),
        copies,
        inv_scale=inv_scale,
        found_inf=None if skips is None else skips.float(),
        gradient_norm=gradient_norm,
    )
    for state, state_f32 in zip(states, wide, strict=True):
        narrow = [(t, t_f32) for t, t_f32 in zip(state, state_f32, strict=True) if t is not t_f32]
        if narrow:
            kernels.cast_copy_(*map(list, zip(*narrow, strict=True)))
    return wide


def _step_and_unscale(call: _Call, adam: Adam, lists: Sequence[TensorList], step: Tensor, inv_scale: Tensor) -> None:
    """Step by unscaled gradients, and write them back, unless the flag is set."""
    skips = call.is_set()
    _step(call, adam, lists, step, inv_scale=inv_scale, skips=skips)
    grads, factor = lists[0], torch.where(skips, 1.0, inv_scale)
    if grads and grads[0].dtype is torch.float64:
        torch._foreach_mul_(list(grads), factor)
    elif grads:
        kernels.scale_(grads, grads, factor)


def _lamb(
    call: _Call,
    step: int | Tensor,
    global_grad_norm: Tensor,
    max_grad_norm: float | Tensor,
    inv_scale: Tensor | None = None,
    skips: Tensor | None = None,
    **given: Any,
) -> None:
    """Step by LAMB, and write the updates into the gradients, unless `skips`."""
    grads, params = call.lists[:2]
    if not params:
        return
    lamb: Lamb = _formula(Lamb, given, max_grad_norm=1.0)
    max_norm = call.number(max_grad_norm)
    norm = torch.where(max_norm > 0, global_grad_norm / max_norm, 0.0)
    decays = lamb.decoupled and lamb.weight_decay != 0
    before = [p.to(torch.float32, copy=True) for p in params] if decays else None
    exp_avgs, exp_avg_sqs = _step(call, lamb, call.lists, step, inv_scale=inv_scale, skips=skips, gradient_norm=norm)
    updates, denominators = list(exp_avgs), list(torch._foreach_sqrt(list(exp_avg_sqs)))
    if lamb.bias_correction:
        t = call.number(step).double()
        # Foreach would widen 0-d updates to a factor's float64.
        updates = list(torch._foreach_mul(updates, (1 / (1 - lamb.beta1**t)).float()))
        torch._foreach_mul_(denominators, (1 - lamb.beta2**t).rsqrt().float())
    torch._foreach_add_(denominators, lamb.eps)
    updates = list(torch._foreach_div(updates, denominators))
    if before is not None:
        torch._foreach_add_(updates, before, alpha=lamb.weight_decay)
    if skips is not None:
        updates = [torch.where(skips, g.float(), u) for g, u in zip(grads, updates, strict=True)]
    torch._foreach_copy_(list(grads), updates)
