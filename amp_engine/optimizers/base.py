"""The base of the fused optimizers: the step, masters, and loading states of torch.optim, apex or earlier versions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from amp_engine import kernels
from amp_engine.errors import AmpStateError, AmpTypeError, AmpValueError
from amp_engine.ground.distributed import is_sharded
from amp_engine.ground.dtypes import followed
from amp_engine.kernels import tensor_lists
from amp_engine.optimizers.fused_step import FusedStep, StepInput, own_fused_step
from amp_engine.optimizers.rules import Rule
from amp_engine.optimizers.state_form import NORM

Params = Iterable[Tensor] | Iterable[dict[str, Any]]


_OF_APEX = ("grads", "output_params", "scale", "grad_norms", "grad_scaler")


class FusedOptimizer(Optimizer):
    """An optimizer that steps in one pass over gradients, weights and state, by kernels compiled for CPU and CUDA.

    Parameters may be float32, float16 and bfloat16, mixed; state is always float32. Under `amp.initialize` the step
    clips, skips and writes the model's half parameters in that same pass; with `gradients="half"` it unscales, too.

    Without compiled kernels the constructor raises AmpStateError, a RuntimeError like apex's; `step` raises it for
    parameters on a device without kernels.

    With `master_weights` it keeps float32 masters of half parameters, as `state[p]["master_param"]`. A master starts
    from its parameter at the parameter's first gradient. If other code wrote the parameter since the last step, the
    master takes the new values, but keeps its exact value of elements that still equal the rounded master.
    """

    rule: ClassVar[Rule]
    settings: ClassVar[tuple[str, ...]] = ("set_grad_none",)  # attributes that copies and pickles keep
    master_weights: bool = False

    @classmethod
    def has_own_step(cls) -> bool:
        """True for a subclass with another `step`, which kernels do not replace."""
        return inspect.unwrap(cls.step) is not _STEP

    def __init__(self, params: Params, defaults: dict[str, Any], set_grad_none: bool = True) -> None:
        self._refuse_missing_kernels(torch.device("cpu"))
        self.set_grad_none = set_grad_none
        # Marks of half parameters and their masters after their last step.
        self._marks: WeakIdKeyDictionary = WeakIdKeyDictionary()
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._marks = WeakIdKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self.settings}}

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Discard the gradients, or with `set_to_none=False` fill them with 0.

        Args:
            set_to_none: None stands for `set_grad_none` of the constructor.
        """
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *older: Any, **named: Any) -> Any:
        """Step every parameter that has a gradient. No host sync.

        Args:
            closure: evaluated first, with gradients on; its value is returned.
            older, named: None for `grads`, `output_params`, `scale`, `grad_norms` and `grad_scaler`.

        Raises AmpTypeError for `grads`, `output_params`, `scale` and `grad_norms`, which ancient versions of apex took,
        and for `grad_scaler`, unless they are None; the message says what to type. Raises AmpStateError for sparse
        gradients.
        """
        # The signature does not name `grad_scaler`: torch.amp.GradScaler would believe that this optimizer unscales.
        given = {**dict(zip(_OF_APEX, older, strict=False)), **named}
        if given.get("grad_scaler") is not None:
            raise AmpTypeError(
                f"{type(self).__name__}.step() got grad_scaler.  Call scaler.step(optimizer), which calls step() with "
                "what it needs to unscale and to skip."
            )
        if removed := [name for name, value in given.items() if value is not None or name not in _OF_APEX]:
            raise AmpTypeError(
                f"{type(self).__name__}.step() got {', '.join(removed)}, which apex removed.  Call step() without "
                "arguments, inside of amp.initialize and amp.scale_loss where gradients are scaled."
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self.param_groups:
            return loss
        fused = own_fused_step(self)
        weights = [p for group in self.param_groups for p in group["params"]]
        gradients, accesses, _ = tensor_lists.gradients(weights)
        are_plain = tensor_lists.OTHER not in accesses and not tensor_lists.asks_for_gradients(weights)
        if not are_plain:
            gradients = [p.grad for p in weights]
        step = StepInput(weights, weights, gradients, None, bytes([self._unscales]) * len(weights), are_plain)
        planned = None if self.master_weights else fused.plan(step)
        if planned is not None:
            self._step_unscaling(fused, planned)
        else:
            self._step_beside(fused, weights, gradients)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that this class, the class of torch.optim with the same state, or apex's class saved.

        State of half parameters stays float32, where torch would round it. Raises AmpStateError for amsgrad.
        """
        for group in state_dict["param_groups"]:
            refuse_amsgrad(type(self).__name__, group.get("amsgrad", False))
        # With defaults for settings that another class did not save, and with counts in the form of torch.
        groups = [{**self.defaults, **self._renamed(group), **group} for group in state_dict["param_groups"]]
        state = {key: dict(value) for key, value in state_dict["state"].items()}
        for group, own_group in zip(groups, self.param_groups, strict=False):
            self._spread(group, state, own_group["params"])
        super().load_state_dict({**state_dict, "state": state, "param_groups": groups})
        saved = chain.from_iterable(group["params"] for group in groups)
        own = chain.from_iterable(group["params"] for group in self.param_groups)
        for index, p in zip(saved, own, strict=True):
            for name, value in state.get(index, {}).items():
                if not isinstance(value, Tensor):
                    continue
                if name == "step":
                    self.state[p][name] = value.clone()  # torch would share it with the optimizer that saved
                elif value.is_floating_point():
                    self.state[p][name] = value.to(device=p.device, dtype=torch.float32, copy=True)

    def _step_beside(self, fused: FusedStep, params: list[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Step masters, and dense copies of parameters that have gaps in memory, and write them into the parameters."""
        self._check(params, gradients)
        weights = list(params)
        if self.master_weights:
            weights = [self._master(p, g) for p, g in zip(params, gradients, strict=True)]
        copies = [None if w is p else p for w, p in zip(weights, params, strict=True)]
        gaps = [i for i, p in enumerate(params) if not kernels.is_dense(p)]
        for i in gaps:
            copies[i] = None
            if weights[i] is params[i]:
                weights[i] = params[i].detach().contiguous()
        step = StepInput(params, weights, gradients, copies, bytes([self._unscales]) * len(params))
        planned = fused.plan(step)
        if planned is None:
            reason = fused.obstacle(step)
            raise AmpStateError(
                f"{type(self).__name__} cannot step: {reason}.  If it is the state that does not fit, call "
                "optimizer.state.clear() to start anew, or load the state again."
            )
        self._step_unscaling(fused, planned)
        for i in gaps:
            if gradients[i] is not None:
                params[i].copy_(weights[i])
        if self.master_weights:
            for p, w in zip(params, weights, strict=True):
                self._marks[p] = kernels.mark(p), kernels.mark(w)

    @property
    def _unscales(self) -> bool:
        """True if torch.amp.GradScaler drives this step, and leaves unscaling to it."""
        return isinstance(getattr(self, "grad_scale", None), Tensor)

    def _step_unscaling(self, fused: FusedStep, step: StepInput) -> None:
        """Step with the scale and the flag that torch.amp.GradScaler has set, if it drives this step."""
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        fused.step(
            step,
            inv_scale=grad_scale.reshape(()).double().reciprocal().float() if isinstance(grad_scale, Tensor) else None,
            # `found_inf` is the int 0 if no parameter has a gradient.
            found_inf=found_inf.reshape(()) if isinstance(found_inf, Tensor) else None,
        )

    def _master(self, p: Tensor, grad: Tensor | None) -> Tensor:
        """Return the float32 master of `p`, with writes to either copied to the other; `p` if float32 or unstepped."""
        if p.dtype == torch.float32:
            return p
        state: dict[str, Any] = self.state[p] if grad is not None else self.state.get(p, {})
        master: Tensor | None = state.get("master_param")
        if master is None:
            if grad is None:
                return p
            master = state["master_param"] = p.detach().float()
        if master.dtype != torch.float32 or not kernels.is_dense(master) or not _one_order(master, p):
            master = state["master_param"] = _float32_like(p, master)
        of_param, of_master = self._marks.get(p, (None, None))
        if of_param is not None and of_param != kernels.mark(p):
            master.copy_(followed(master, p))
        elif of_master is not None and of_master != kernels.mark(master):
            p.copy_(master)  # the master was written, and this step may have no gradient for it
        return master

    def _renamed(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings that torch's classes save under another name."""
        return {}

    def _spread(self, group: dict[str, Any], state: Mapping[Any, dict[str, Any]], params: list[nn.Parameter]) -> None:
        """Give each parameter its own step count and NovoGrad norm, which apex keeps in the group."""
        step = group.pop("step", None)
        norms = group.pop(NORM, None)
        for index in group["params"]:
            if step is not None and index in state:
                state[index].setdefault("step", torch.tensor(float(step), dtype=torch.float32))
        if norms is not None:
            halves, singles = (list(chunk.flatten().unbind()) if isinstance(chunk, Tensor) else [] for chunk in norms)
            for index, p in zip(group["params"], params, strict=True):
                if index in state:
                    state[index].setdefault(NORM, (singles if p.dtype == torch.float32 else halves).pop(0).float())

    def _refuse_missing_kernels(self, device: torch.device) -> None:
        reason = kernels.missing(device)
        if reason is not None:
            raise AmpStateError(
                f"{type(self).__name__} needs compiled kernels: {reason}.  Or use an optimizer of torch.optim, which "
                "amp.initialize gives FP32 masters as well."
            )

    def _check(self, params: list[Tensor], gradients: Sequence[Tensor | None]) -> None:
        """Raise AmpTypeError or AmpStateError for tensors that cannot be stepped, before anything is written."""
        for device in dict.fromkeys(p.device for p in params):
            self._refuse_missing_kernels(device)
        for i, (p, g) in enumerate(zip(params, gradients, strict=True)):
            if any(n > 1 and stride == 0 for n, stride in zip(p.shape, p.stride(), strict=True)):
                raise AmpTypeError(
                    f"{type(self).__name__} steps parameters whose elements have a place each; parameter {i} of shape "
                    f"{tuple(p.shape)} and strides {p.stride()} is expanded.  Make it of a .contiguous() tensor."
                )
            if is_sharded(p) or is_sharded(g):
                raise AmpTypeError(
                    f"{type(self).__name__} cannot step tensors that wrap others, as the DTensors of fully_shard do; "
                    f"parameter {i} of shape {tuple(p.shape)}, or its gradient, does.  Use an optimizer of "
                    "torch.optim, such as torch.optim.AdamW."
                )
            if kernels.is_lazy(p):
                raise AmpTypeError(
                    f"{type(self).__name__} steps parameters whose elements are those in their memory; parameter {i} "
                    f"of shape {tuple(p.shape)} is a negative view.  Make it of a .clone()."
                )
            if g is not None and g.is_sparse:
                raise AmpStateError(
                    f"{type(self).__name__} does not support sparse gradients; parameter {i} of shape "
                    f"{tuple(p.shape)} has one.  Use torch.optim.SparseAdam for it."
                )
            if p.dtype not in kernels.FLOATS or (g is not None and g.dtype not in kernels.FLOATS):
                raise AmpTypeError(
                    f"{type(self).__name__} steps float32, float16 and bfloat16; parameter {i} is {p.dtype} with "
                    f"{'no' if g is None else f'a {g.dtype}'} gradient.  Use the optimizer of torch.optim for it."
                )


_STEP = inspect.unwrap(FusedOptimizer.step)  # of which torch makes a wrapper for each class


def _one_order(master: Tensor, param: Tensor) -> bool:
    """True if a master has its parameter's order in memory, or the parameter has gaps, or the shapes differ."""
    return master.shape != param.shape or not kernels.is_dense(param) or kernels.same_layout(master, param)


def _float32_like(param: Tensor, value: Tensor) -> Tensor:
    """Copy `value` to float32 in the order in memory of `param`, which may have gaps."""
    if value.shape != param.shape:
        return value.detach().float().contiguous()  # refused later, with a message
    return torch.empty_like(param, dtype=torch.float32).copy_(value.detach())


def check_not_negative(**values: float | Tensor) -> None:
    """Raise AmpValueError for the first value below 0."""
    for name, value in values.items():
        # A tensor on a GPU is not checked: reading it would wait.
        if not (isinstance(value, Tensor) and not value.is_cpu) and not value >= 0.0:
            raise AmpValueError(f"{name}={value!r}, but it must be 0 or more.  Use for example {name}=1e-3.")


def check_betas(betas: tuple[float, float]) -> None:
    """Raise AmpValueError unless both betas are in [0, 1)."""
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise AmpValueError(f"betas={betas!r}, but both must be in [0, 1).  Use for example betas=(0.9, 0.999).")


def refuse_amsgrad(name: str, amsgrad: bool) -> None:
    """Raise AmpStateError, a RuntimeError like apex's, for AMSGrad, which no kernel computes."""
    if amsgrad:
        raise AmpStateError(f"{name} does not support the AMSGrad variant.  Use torch.optim.AdamW(amsgrad=True).")
