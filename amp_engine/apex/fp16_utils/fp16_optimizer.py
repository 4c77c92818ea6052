"""`FP16_Optimizer`: an optimizer around an optimizer, which steps FP32 masters of half parameters."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_engine import kernels
from amp_engine.apex.fp16_utils.fp16util import clip_grad_norm, master_params_to_model_params
from amp_engine.errors import AmpStateError, AmpTypeError, AmpValueError
from amp_engine.ground.devices import HostNumbers, moved
from amp_engine.ground.dtypes import followed, is_low_precision
from amp_engine.kernels import tensor_lists
from amp_engine.levels.report import Reporter
from amp_engine.scaling.scaler import LossScaler

_SERIALIZE = "FP16_Optimizer cannot be pickled or copied.  Save its state_dict() and load that with load_state_dict()."


class FP16_Optimizer:  # noqa: N801 - apex's name
    """Steps FP32 masters in place of half parameters, with a loss scale of its own.

        optimizer = FP16_Optimizer(torch.optim.SGD(model.parameters(), lr=0.1), dynamic_loss_scale=True)
        optimizer.zero_grad()
        optimizer.backward(loss)
        optimizer.step()

    It replaces each float16 or bfloat16 parameter that requires a gradient by its master in the groups and the state of
    `init_optimizer`; a parameter that requires a gradient only later gets its master at the next `backward`. Masters
    follow writes to half weights (`model.load_state_dict`), except writes to `.data`. Pass `optimizer.optimizer` to
    learning rate schedulers.

    Args:
        init_optimizer: any optimizer that was not passed through `amp.initialize`.
        static_loss_scale: the scale, unless it is dynamic.
        dynamic_loss_scale: halves the scale and skips the step on overflow, doubles it after 2000 clean steps.
        dynamic_loss_args: arguments of `amp_engine.LossScaler`: init_scale (2**16), scale_factor, scale_window,
            min_loss_scale, max_loss_scale.
        verbose: prints messages.
        skip_on_overflow: skips overflowing steps under a static scale too. Otherwise, as in apex, they are taken, with
            one warning.

    Attributes:
        optimizer: `init_optimizer`.
        overflow: true if the last check found a gradient that is not finite, so that `step` does nothing.
        loss_scaler: the `LossScaler`.
        fp16_groups, fp32_from_fp16_groups: per group, half parameters and their masters.
        fp32_from_fp32_groups: per group, the float32 parameters.

    Raises AmpTypeError for parameters of other types, AmpStateError for an optimizer of `amp.initialize`.
    """

    def __init__(
        self,
        init_optimizer: Optimizer,
        static_loss_scale: float | str = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, float] | None = None,
        verbose: bool = True,
        *,
        skip_on_overflow: bool = False,
    ) -> None:
        if hasattr(init_optimizer, "_amp_stash"):
            raise AmpStateError(
                f"This {type(init_optimizer).__name__} was passed through amp.initialize, which keeps masters and "
                "scales losses itself.  Do without FP16_Optimizer, or without amp.initialize."
            )
        self._reporter = Reporter(int(bool(verbose)))
        self._dynamic_loss_args = {} if dynamic_loss_args is None else dict(dynamic_loss_args)
        self._skip_on_overflow = skip_on_overflow
        self.optimizer = init_optimizer
        self.loss_scaler = self._scaler("dynamic" if dynamic_loss_scale else static_loss_scale)
        self.dynamic_loss_scale = self.loss_scaler.dynamic
        self.overflow = False
        self.first_closure_call_this_step = True
        self.fp16_groups: list[list[nn.Parameter]] = []
        self.fp32_from_fp16_groups: list[list[nn.Parameter]] = []
        self.fp32_from_fp32_groups: list[list[nn.Parameter]] = []
        # The result of the last check, until `_adjust_scale` passes it to the loss scaler.
        self._found_inf: HostNumbers | None = None
        # Gradients of float32 parameters that are unscaled in place.
        self._unscaled: list[Tensor] = []
        self._is_static_reported = False
        self._adopt_params()
        # Marks of the half weights after our last write.
        self._marks = list(map(kernels.mark, self._half_params()))
        self._reporter.say(
            "Warning:  FP16_Optimizer is deprecated and dangerous, and will be deleted soon.  So it was in apex; here "
            "it stays.  New code is simpler with amp.initialize and amp.scale_loss.",
            rank0=True,
        )

    def backward(self, loss: Tensor, update_master_grads: bool = True, retain_graph: bool = False) -> None:
        """Run the backward of the scaled loss; gradients accumulate in the model until `zero_grad`.

        Args:
            loss: of shape [].
            update_master_grads: calls `update_master_grads` too. False for all but the last of several backwards saves
                time, and gives the same gradients.
            retain_graph: as in `Tensor.backward`.
        """
        self._adopt_params()
        self._adopt_values()
        self._scale_again()
        (loss.float() * self.loss_scale).backward(retain_graph=retain_graph)
        if update_master_grads:
            self.update_master_grads()

    @torch.no_grad()
    def update_master_grads(self) -> None:
        """Unscale half gradients into the masters' gradients, which are overwritten, and float32 gradients in place.

        Waits for the device under a dynamic scale, or with `skip_on_overflow`.
        """
        inv_scale = 1.0 / self.loss_scale
        by_device: dict[torch.device, list[tuple[Tensor, Tensor]]] = {}
        nonfinite: list[Tensor] = []
        for grad, target in self._gradients():
            if grad.is_sparse:
                nonfinite.append(kernels.nonfinite([grad.coalesce().values()]).any())
                target.grad = grad.float() * inv_scale
                continue
            given = tensor_lists.written_out(grad if kernels.is_dense(grad) else grad.contiguous())
            output = target.grad
            unfit = output is None or not kernels.is_dense(output) or kernels.is_lazy(output)
            if output is None or unfit or not kernels.same_layout(output, given):
                output = target.grad = torch.empty_like(given, dtype=torch.float32)
            by_device.setdefault(given.device, []).append((output, given))
        for device, pairs in by_device.items():
            factor = torch.full((), inv_scale, dtype=torch.float32, device=device)
            checks = kernels.scale_([output for output, _ in pairs], [given for _, given in pairs], factor)
            nonfinite.append(checks.nonfinite.any())
        self._unscaled = [p.grad for p in chain.from_iterable(self.fp32_from_fp32_groups) if p.grad is not None]
        found = [moved(flag, nonfinite[0].device) for flag in nonfinite]
        self._found_inf = HostNumbers(torch.stack(found).any().float().view(1) if found else torch.zeros(1))
        self.overflow = self._can_skip and self._found_inf.read() != 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the masters and round them into the model, unless a gradient overflowed; adjust the scale.

        Args:
            closure: calls `zero_grad` and `backward` of this optimizer and returns the loss. It is run again, with a
                lower scale, as long as its gradients overflow.

        Returns:
            The result of `optimizer.step`; None for a skipped step.

        Raises AmpStateError if a closure overflows at a scale that can fall no further.
        """
        if closure is not None:
            return self._step_with(closure)
        self._adjust_scale()
        if self.overflow:
            fate = "reducing loss scale to" if self.dynamic_loss_scale else "loss scale is static at"
            self._reporter.say(f"Gradient overflow.  Skipping step, {fate} {self.loss_scale}")
            return None
        result = self.optimizer.step()
        self._write_back()
        return result

    def zero_grad(self, set_grads_to_None: bool = False) -> None:  # noqa: N803 - apex's name
        """Zero the gradients of the model and of the masters, or set them to None."""
        in_optimizer = chain.from_iterable(group["params"] for group in self.optimizer.param_groups)
        for param in chain(in_optimizer, chain.from_iterable(self.fp16_groups)):
            if set_grads_to_None:
                param.grad = None
            elif param.grad is not None:
                if param.grad.grad_fn is not None:
                    param.grad.detach_()  # views, such as those of DDP's buckets, refuse this
                param.grad.zero_()
        self._unscaled = []

    def clip_master_grads(self, max_norm: float, norm_type: float = 2) -> Tensor | int:
        """Clip the unscaled gradients of masters and float32 parameters by their common norm.

        Returns:
            The norm before clipping, of shape []; -1 if the gradients overflowed, and then nothing is clipped.
        """
        if self.overflow:
            return -1
        params = [param for group in self.optimizer.param_groups for param in group["params"]]
        return clip_grad_norm(params, max_norm, norm_type)

    def inspect_master_grad_data(self) -> list[list[Tensor | None]] | None:
        """Return, per group, the unscaled gradient of each parameter or None; None and a warning after an overflow."""
        if self.overflow:
            self._reporter.say(
                "Warning:  inspect_master_grad_data() has nothing to show: the gradients of the last backward "
                "overflowed."
            )
            return None
        groups = self.optimizer.param_groups
        return [[None if p.grad is None else p.grad.detach() for p in group["params"]] for group in groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, the masters and the loss scale, in the keys of apex. Waits for the device.

        The scale is saved as numbers, {"loss_scale": float, "unskipped": int}, which `torch.load` reads with
        `weights_only=True`; apex saved its scaler object. Tensors are the live ones, as in torch's own optimizers.
        """
        self._adopt_values()
        return {
            "loss_scaler": self.loss_scaler.state_dict(),
            "dynamic_loss_scale": self.dynamic_loss_scale,
            "overflow": self.overflow,
            "first_closure_call_this_step": self.first_closure_call_this_step,
            "optimizer_state_dict": self.optimizer.state_dict(),
            "fp32_from_fp16": [[master.detach() for master in group] for group in self.fp32_from_fp16_groups],
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a `state_dict` saved here or by apex, and round its masters into the model's half parameters.

        Raises AmpValueError, before any change, for masters of other shapes, or a scaler that is neither numbers nor an
        object with a loss scale.
        """
        saved = state_dict["fp32_from_fp16"]
        shapes = [[tuple(t.shape) for t in group] for group in saved]
        expected = [[tuple(t.shape) for t in group] for group in self.fp32_from_fp16_groups]
        if shapes != expected:
            raise AmpValueError(
                f"fp32_from_fp16 holds masters of the shapes {shapes}, but this optimizer has {expected}.  Wrap an "
                "optimizer of the same groups and half parameters as the one that was saved."
            )
        scaler = self._loaded_scaler(state_dict["loss_scaler"], bool(state_dict["dynamic_loss_scale"]))
        self.optimizer.load_state_dict(state_dict["optimizer_state_dict"])
        self.loss_scaler, self.dynamic_loss_scale = scaler, scaler.dynamic
        self.overflow = bool(state_dict["overflow"])
        self.first_closure_call_this_step = bool(state_dict["first_closure_call_this_step"])
        self._found_inf = None
        for group, values in zip(self.fp32_from_fp16_groups, saved, strict=True):
            for master, value in zip(group, values, strict=True):
                master.copy_(value)
        self._write_back()

    def __getstate__(self) -> NoReturn:
        raise AmpStateError(_SERIALIZE)

    def __setstate__(self, state: Any) -> NoReturn:
        raise AmpStateError(_SERIALIZE)

    @property
    def loss_scale(self) -> float:
        """The scale of the next backward."""
        return self.loss_scaler.loss_scale()

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler._loss_scale = value

    @property
    def state(self) -> Any:
        """The state of `optimizer`, by master."""
        return self.optimizer.state

    @state.setter
    def state(self, value: Any) -> None:
        self.optimizer.state = value

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of `optimizer`, with masters in them."""
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, value: list[dict[str, Any]]) -> None:
        self.optimizer.param_groups = value

    @property
    def _can_skip(self) -> bool:
        return self.dynamic_loss_scale or self._skip_on_overflow

    def _scaler(self, loss_scale: float | str) -> LossScaler:
        arguments: Any = self._dynamic_loss_args if loss_scale == "dynamic" else {}
        return LossScaler(loss_scale, **arguments)  # type: ignore[arg-type]

    def _loaded_scaler(self, saved: Any, is_dynamic: bool) -> LossScaler:
        if isinstance(saved, LossScaler):  # a pickled scaler of apex becomes a LossScaler with its own bounds
            return copy.deepcopy(saved)
        loss_scale, unskipped = _scale_of(saved)
        scaler = self._scaler("dynamic" if is_dynamic else loss_scale)
        scaler.load_state_dict({"loss_scale": loss_scale, "unskipped": unskipped})
        return scaler

    def _adopt_params(self) -> None:
        """Replace each half parameter that requires a gradient and has no master yet by a new master."""
        groups = self.optimizer.param_groups
        known = {id(p) for group in chain(self.fp32_from_fp16_groups, self.fp32_from_fp32_groups) for p in group}
        fresh = [
            (i, j, param)
            for i, group in enumerate(groups)
            for j, param in enumerate(group["params"])
            if param.requires_grad and id(param) not in known
        ]
        for _, _, param in fresh:
            if not is_low_precision(param) and param.dtype is not torch.float32:
                raise AmpTypeError(
                    "Wrapped parameters must be either torch.cuda.FloatTensor or torch.cuda.HalfTensor. "
                    f"Received {param.type()}"
                )
        for lists in (self.fp16_groups, self.fp32_from_fp16_groups, self.fp32_from_fp32_groups):
            lists += [[] for _ in range(len(groups) - len(lists))]
        for i, j, param in fresh:
            if param.dtype is torch.float32:
                self.fp32_from_fp32_groups[i].append(param)
                continue
            master = nn.Parameter(param.detach().float())
            self.fp16_groups[i].append(param)
            self.fp32_from_fp16_groups[i].append(master)
            groups[i]["params"][j] = master
            if param in self.optimizer.state:
                state = self.optimizer.state.pop(param)
                self.optimizer.state[master] = {
                    name: v.float() if isinstance(v, Tensor) and is_low_precision(v) else v for name, v in state.items()
                }

    @torch.no_grad()
    def _adopt_values(self) -> None:
        """Copy each half weight that is no longer its rounded master into the master."""
        params = self._half_params()
        marks = list(map(kernels.mark, params))
        if marks != self._marks:
            for param, master in self._pairs():
                master.copy_(followed(master, param))
            self._marks = marks

    def _half_params(self) -> list[nn.Parameter]:
        return list(chain.from_iterable(self.fp16_groups))

    def _pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        return zip(self._half_params(), chain.from_iterable(self.fp32_from_fp16_groups), strict=True)

    def _gradients(self) -> Iterator[tuple[Tensor, nn.Parameter]]:
        """Yield each scaled gradient, with the parameter whose `.grad` is to hold it unscaled."""
        for param, master in self._pairs():
            if param.grad is None:
                master.grad = None
            else:
                yield param.grad, master
        for param in chain.from_iterable(self.fp32_from_fp32_groups):
            if param.grad is not None:
                yield param.grad, param

    @torch.no_grad()
    def _scale_again(self) -> None:
        """Scale again the gradients that were unscaled in place, so that a further backward can add to them."""
        unscaled = {id(grad) for grad in self._unscaled}
        for param in chain.from_iterable(self.fp32_from_fp32_groups):
            if param.grad is not None and id(param.grad) in unscaled:
                param.grad.mul_(self.loss_scale)
        self._unscaled = []

    def _adjust_scale(self) -> None:
        """Pass the result of the last check to the scaler, once."""
        if self._found_inf is None:
            return
        if self._can_skip:
            self.loss_scaler.record_(torch.tensor(self.overflow))
        elif not self._is_static_reported and self._found_inf.is_known() and self._found_inf.read() != 0:
            self._is_static_reported = True
            self._reporter.say(
                f"Gradient overflow.  The loss scale is static at {self.loss_scale}, so the step is taken with "
                "non-finite gradients.  Pass skip_on_overflow=True to FP16_Optimizer to skip such steps, or "
                "dynamic_loss_scale=True.  This is said once.",
                level=logging.WARNING,
            )
        self._found_inf = None
        self.loss_scaler.update_()

    def _step_with(self, closure: Callable[[], Any]) -> Any:
        def run() -> Any:
            if self.first_closure_call_this_step:
                self.first_closure_call_this_step = False
            else:
                self._write_back()  # optimizers that call it several times step the masters in between
            while True:
                loss = closure()
                before = self.loss_scale
                self._adjust_scale()
                if not self.overflow:
                    return loss
                if self.loss_scale == before:
                    raise AmpStateError(
                        f"The closure's gradients overflow at a loss scale of {self.loss_scale}, which falls no more: "
                        "no scale can help.  Look for an inf or a NaN in the loss."
                    )
                self._reporter.say(f"OVERFLOW within closure! Skipping step, reducing loss scale to {self.loss_scale}")

        self.first_closure_call_this_step = True
        try:
            return self.optimizer.step(run)
        finally:
            self.first_closure_call_this_step = True
            self._write_back()

    def _write_back(self) -> None:
        params = self._half_params()
        master_params_to_model_params(params, list(chain.from_iterable(self.fp32_from_fp16_groups)))
        self._marks = list(map(kernels.mark, params))


def _scale_of(saved: Any) -> tuple[float, int]:
    """Return scale and count of a saved scaler: numbers, or the attributes of an object whose class is gone."""
    state = saved if isinstance(saved, Mapping) else getattr(saved, "__dict__", {})
    for name in ("loss_scale", "_loss_scale", "cur_scale"):
        if name in state:
            return float(state[name]), int(state.get("unskipped", state.get("_unskipped", 0)))
    scale = getattr(saved, "loss_scale", None)
    try:
        return float(scale() if callable(scale) else scale), int(getattr(saved, "_unskipped", 0))  # type: ignore[arg-type]
    except (TypeError, ValueError) as e:
        raise AmpValueError(
            f"The saved loss_scaler is {saved!r}, which has no loss scale.  Expected "
            '{"loss_scale": float, "unskipped": int}, or a scaler object of apex.'
        ) from e
