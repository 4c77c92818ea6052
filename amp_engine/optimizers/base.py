"""What the fused optimizers share: the step, and loading what torch.optim, apex or an earlier version saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from amp_engine import kernels
from amp_engine.errors import AmpStateError, AmpTypeError, AmpValueError
from amp_engine.kernels import walk
from amp_engine.optimizers.fused_step import NORM, FusedStep, fused_step_of, laid_out_as
from amp_engine.optimizers.rules import Rule

Params = Iterable[Tensor] | Iterable[dict[str, Any]]


class FusedOptimizer(Optimizer):
    """An optimizer whose step is one pass over gradients, weights and state, on CPU and CUDA.

    Parameters may be float32, float16 and bfloat16, mixed; state is always float32. Under `amp.initialize` the step
    unscales, clips, skips and writes the model's half parameters in that same pass.
    """

    rule: ClassVar[Rule]
    settings: ClassVar[tuple[str, ...]] = ("set_grad_none",)  # attributes that copies and pickles keep

    def __init__(self, params: Params, defaults: dict[str, Any], set_grad_none: bool = True) -> None:
        self.set_grad_none = set_grad_none
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self.settings}}

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients, or with `set_to_none=False` fill them with 0.

        Args:
            set_to_none: None stands for `set_grad_none` of the constructor.
        """
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **removed: Any) -> Any:
        """Step every parameter that has a gradient. No host sync.

        Args:
            closure: evaluated first, with gradients on; its value is returned.

        Raises AmpTypeError for `grads`, `output_params`, `scale` and `grad_norms`, which ancient versions of apex took,
        and for `grad_scaler`, with what to type instead; AmpStateError for sparse gradients.
        """
        if "grad_scaler" in removed:
            raise AmpTypeError(
                f"{type(self).__name__}.step() got grad_scaler.  Type scaler.step(optimizer), which calls step() with "
                "what it needs to unscale and to skip."
            )
        if removed:
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
        fused = fused_step_of(self)
        assert fused is not None
        weights = [p for group in self.param_groups for p in group["params"]]
        gradients, walks, _ = walk.gradients(weights)
        known = walk.OTHER not in walks and not walk.asks_for_gradients(weights)
        if not known:
            gradients = [p.grad for p in weights]
        if not fused.takes(weights, gradients, known):
            self._refuse(weights, gradients)
        masters = self._own_masters(weights, gradients)
        if masters is None:
            self._step_unscaling(fused, weights, gradients, None, None)
        else:
            copies = [None if m is w else w for m, w in zip(masters, weights, strict=True)]
            self._step_unscaling(fused, weights, gradients, copies, masters)
            self._wrote(weights)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what this class, the class of torch.optim with the same state, or apex's saved.

        State stays float32 for half parameters too, where torch would round it. Raises AmpStateError for amsgrad.
        """
        for group in state_dict["param_groups"]:
            refuse_amsgrad(type(self).__name__, group.get("amsgrad", False))
        state_dict = self._with_defaults(state_dict)
        super().load_state_dict(state_dict)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = chain.from_iterable(group["params"] for group in self.param_groups)
        for index, p in zip(saved, own, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                if not isinstance(value, Tensor):
                    continue
                if name == "step":
                    self.state[p][name] = value.clone()  # torch would share it with the optimizer that saved
                elif value.is_floating_point():
                    self.state[p][name] = value.to(device=p.device, dtype=torch.float32, copy=True)

    def _step_unscaling(
        self,
        fused: FusedStep,
        params: list[Tensor],
        gradients: Sequence[Tensor | None],
        copies: list[Tensor | None] | None,
        masters: list[Tensor] | None,
    ) -> None:
        """`fused.step` with what torch.amp.GradScaler has set, if it drives this step."""
        grad_scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        inv_scale = None
        if isinstance(grad_scale, Tensor):
            inv_scale = grad_scale.reshape(()).double().reciprocal().float()
            if isinstance(gradients, list):  # and not a native list of what is known to be laid out so
                gradients = [laid_out_as(p, g) for p, g in zip(params, gradients, strict=True)]
        fused.step(
            params,
            gradients,
            copies,
            [inv_scale is not None] * len(params),
            weights=masters,
            inv_scale=inv_scale,
            # The int 0 where no parameter has a gradient.
            found_inf=found_inf.reshape(()) if isinstance(found_inf, Tensor) else None,
        )

    def _own_masters(self, weights: list[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor] | None:
        """The float32 weights to step instead of half ones, for optimizers that keep their own."""
        return None

    def _wrote(self, weights: list[Tensor]) -> None:
        """Half weights were written from their own masters."""

    def _with_defaults(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """`state_dict` with this class's settings where another class saved none, and counts where torch has them."""
        groups = [{**self.defaults, **self._renamed(group), **group} for group in state_dict["param_groups"]]
        state = {key: dict(value) for key, value in state_dict["state"].items()}
        for group, own in zip(groups, self.param_groups, strict=False):
            self._spread(group, state, own["params"])
        return {**state_dict, "state": state, "param_groups": groups}

    def _renamed(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Settings that torch's classes have under another name."""
        return {}

    def _spread(self, group: dict[str, Any], state: Mapping[Any, dict[str, Any]], params: list[nn.Parameter]) -> None:
        """apex counts the steps of a group, and keeps NovoGrad's norms there; here each parameter has its own."""
        step = group.pop("step", None)
        norms = group.pop(NORM, None)
        for index in group["params"]:
            if step is not None and index in state:
                state[index].setdefault("step", torch.tensor(float(step)))
        if norms is not None:
            halves, singles = (list(chunk.flatten().unbind()) if isinstance(chunk, Tensor) else [] for chunk in norms)
            for index, p in zip(group["params"], params, strict=True):
                if index in state:
                    state[index].setdefault(NORM, (singles if p.dtype == torch.float32 else halves).pop(0).float())

    def _refuse(self, weights: list[Tensor], gradients: Sequence[Tensor | None]) -> None:
        for i, (p, g) in enumerate(zip(weights, gradients, strict=True)):
            if not kernels.is_dense(p):
                raise AmpTypeError(
                    f"{type(self).__name__} steps dense parameters; parameter {i} of shape {tuple(p.shape)} and "
                    f"strides {p.stride()} has gaps in memory.  Make it of a .contiguous() tensor."
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
            if g is not None and (p.dtype not in _FLOATS or g.dtype not in _FLOATS):
                raise AmpTypeError(
                    f"{type(self).__name__} steps float32, float16 and bfloat16; parameter {i} is {p.dtype} with a "
                    f"{g.dtype} gradient.  Use the optimizer of torch.optim for it."
                )
        raise AmpTypeError(
            f"{type(self).__name__} cannot step these parameters: {[type(g).__name__ for g in gradients]}."
        )


class MasterKeepingOptimizer(FusedOptimizer):
    """A fused optimizer that may keep float32 masters of half parameters, as `state[p]["master_param"]`.

    A master starts from its parameter at that one's first gradient. Whatever somebody else has written into the
    parameter since its last step goes into the master; elements that are still the rounded master's leave it exact.
    """

    master_weights: bool

    def __init__(self, params: Params, defaults: dict[str, Any], set_grad_none: bool = True) -> None:
        self._stamps = WeakIdKeyDictionary()  # of half parameters, as of their last step
        super().__init__(params, defaults, set_grad_none)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._stamps = WeakIdKeyDictionary()

    def _own_masters(self, weights: list[Tensor], gradients: Sequence[Tensor | None]) -> list[Tensor] | None:
        if not self.master_weights:
            return None
        return [p if p.dtype == torch.float32 else self._master(p, g) for p, g in zip(weights, gradients, strict=True)]

    def _master(self, p: Tensor, grad: Tensor | None) -> Tensor:
        state: dict[str, Any] = self.state[p] if grad is not None else self.state.get(p, {})
        if "master_param" not in state:
            if grad is None:
                return p
            state["master_param"] = p.detach().float()
        master: Tensor = state["master_param"]
        if p in self._stamps and self._stamps[p] != kernels.stamps([p]):
            master.copy_(torch.where(p == master.to(p.dtype), master, p.float()))
        return master

    def _wrote(self, weights: list[Tensor]) -> None:
        for p in weights:
            self._stamps[p] = kernels.stamps([p])


_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def check_not_negative(**values: float | Tensor) -> None:
    """Raise AmpValueError for the first value below 0."""
    for name, value in values.items():
        # A tensor on a GPU is taken as it is: looking would wait.
        if not (isinstance(value, Tensor) and not value.is_cpu) and not value >= 0.0:
            raise AmpValueError(f"{name}={value!r}, but it must be 0 or more.  Type for example {name}=1e-3.")


def check_betas(betas: tuple[float, float]) -> None:
    """Raise AmpValueError unless both are in [0, 1)."""
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise AmpValueError(f"betas={betas!r}, but both must be in [0, 1).  Type for example betas=(0.9, 0.999).")


def refuse_amsgrad(name: str, amsgrad: bool) -> None:
    """Raise AmpStateError, a RuntimeError as apex's, for the variant that no kernel computes."""
    if amsgrad:
        raise AmpStateError(f"{name} does not support the AMSGrad variant.  Use torch.optim.AdamW(amsgrad=True).")
