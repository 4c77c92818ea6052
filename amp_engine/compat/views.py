"""What scripts read and write of apex's private state, as views of the one real state."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from itertools import chain
from typing import Any, Protocol

from torch import nn

from amp_engine.arguments import APEX_METHODS
from amp_engine.errors import AmpStateError
from amp_engine.policy import Policy
from amp_engine.scaler import LossScaler
from amp_engine.stepping.master import Master
from amp_engine.stepping.stepped import SteppedOptimizer


class PolicyHolder(Protocol):
    """Whose policy `Properties` shows."""

    policy: Policy | None

    def set_policy(self, policy: Policy) -> None:
        """Have another one. Raises AmpStateError for what comes too late."""


class Draft:
    """A policy that nothing was initialized with: of `Properties()`, as in apex before `initialize`."""

    def __init__(self) -> None:
        self.policy: Policy | None = Policy()

    def set_policy(self, policy: Policy) -> None:
        """Have another one."""
        self.policy = policy


class Options(MutableMapping[str, Any]):
    """`opt_properties.options`: apex's seven properties in print order, to read and to write."""

    def __init__(self, holder: PolicyHolder) -> None:
        self._holder = holder

    def __getitem__(self, name: str) -> Any:
        return self._policy.properties()[name]

    def __setitem__(self, name: str, value: Any) -> None:
        """Raises AmpStateError, AmpTypeError or AmpValueError for what does not fit, or comes too late."""
        self._holder.set_policy(self._policy.with_property(name, value))

    def __delitem__(self, name: str) -> None:
        raise AmpStateError(f"opt_properties.options[{name!r}] cannot be deleted.  Assign a value to it instead.")

    def __iter__(self) -> Iterator[str]:
        return iter(self._policy.properties())

    def __len__(self) -> int:
        return len(self._policy.properties())

    def __repr__(self) -> str:
        return repr(self._policy.properties())

    @property
    def _policy(self) -> Policy:
        return self._holder.policy or Policy()


class Properties:
    """`_amp_state.opt_properties`: a policy as attributes, and as the mapping `options`.

    Args:
        holder: whose policy it is; without one it is a policy of its own, as before `initialize`.
    """

    _holder: PolicyHolder

    def __init__(self, holder: PolicyHolder | None = None) -> None:
        self.__dict__["_holder"] = Draft() if holder is None else holder

    @property
    def options(self) -> Options:
        """The same as a mapping."""
        return Options(self._holder)

    def become(self, policy: Policy) -> None:
        """Set every property."""
        self._holder.set_policy(policy)

    def __getattr__(self, name: str) -> Any:
        if name in Policy().properties():
            return self.options[name]
        raise AttributeError(f"'Properties' object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        self.options[name] = value


class RefusesGradScaler:
    """What torch.amp.GradScaler asks an optimizer before its step: here it is false, or an error.

    By itself GradScaler would find no gradients, and say that no inf checks were recorded. Copies are plain False.
    """

    name = "_step_supports_amp_scaling"

    def __init__(self, stepped: SteppedOptimizer, before: dict[str, Any]) -> None:
        self._stepped = stepped
        self._before = before

    @classmethod
    def put_on(cls, optimizer: Any, stepped: SteppedOptimizer) -> None:
        """Have GradScaler ask, unless `optimizer` has no masters, or GradScaler's scale is its own business."""
        found = vars(optimizer).get(cls.name)
        if not stepped.rows.makes_masters or isinstance(found, cls) or getattr(optimizer, cls.name, False):
            return
        before = {cls.name: found} if cls.name in vars(optimizer) else {}
        vars(optimizer)[cls.name] = cls(stepped, before)

    @classmethod
    def take_off(cls, optimizer: Any) -> None:
        """Put back what was there."""
        found = vars(optimizer).get(cls.name)
        if isinstance(found, cls):
            del vars(optimizer)[cls.name]
            vars(optimizer).update(found._before)

    def __bool__(self) -> bool:
        self._stepped.refuse_foreign_scaler()
        return False

    def __reduce__(self) -> Any:
        return bool, ()


class Stash:
    """`optimizer._amp_stash`: by its presence "this optimizer was initialized"; flags, and lists of parameters.

    Its methods with apex's names are attributes of the optimizer, too.
    """

    def __init__(self, stepped: SteppedOptimizer) -> None:
        self._stepped = stepped

    def attributes(self) -> dict[str, Any]:
        """What `initialize` adds to the optimizer."""
        return {"_amp_stash": self, **{name: getattr(self, name) for name in APEX_METHODS}}

    def _amp_lazy_init(self) -> None:
        """Give parameters that are new masters, and masters what the model's parameters were loaded with."""
        self._stepped.look_for_parameters()

    _lazy_init_maybe_master_weights = _amp_lazy_init

    def _prepare_amp_backward(self) -> None:
        """What `scale_loss` does at its entry: set earlier gradients aside."""
        self._stepped.prepare_backward()

    def _post_amp_backward(self, scaler: LossScaler) -> None:
        """What `scale_loss` does at its exit: unscale, look for overflows, and add what was set aside.

        An overflow is remembered in `scaler` for its `update_scale()`. Whether the step is skipped is up to the caller.
        """
        self._stepped.post_backward(scaler)

    def _master_params_to_model_params(self) -> None:
        """Round the masters into the model's parameters, as every step does."""
        self._stepped.rows.write_back()

    @property
    def lazy_init_called(self) -> bool:
        """Whether masters follow the model's parameters. False has the next backward look closer.

        Then writes through `param.data`, which nothing else tells of, are taken over into masters, once.
        """
        return not self._stepped.adopts_next

    @lazy_init_called.setter
    def lazy_init_called(self, value: bool) -> None:
        self._stepped.adopts_next = not value

    @property
    def already_patched(self) -> bool:
        """Whether the next step will be skipped. Waits for the device if that decided.

        True is for those who replace `step` by a skip of their own, and False for that skip.
        """
        return self._stepped.pending.skips_next

    @already_patched.setter
    def already_patched(self, value: bool) -> None:
        if value:
            self._stepped.pending.caller_skips = True
        elif self._stepped.pending.caller_skips:
            self._stepped.skipped_by_caller()

    @property
    def params_have_scaled_gradients(self) -> bool:
        """Whether gradients were left scaled, as by `delay_unscale`, for the next backward to add to."""
        return self._stepped.window.is_left_open

    @params_have_scaled_gradients.setter
    def params_have_scaled_gradients(self, value: bool) -> None:
        self._stepped.set_left_open(value)

    @property
    def fp16_groups(self) -> list[list[nn.Parameter]]:
        """Per group: the model's low-precision parameters that have masters."""
        return [[m.param for m in group] for group in self._mastered()]

    @property
    def fp32_from_fp16_groups(self) -> list[list[nn.Parameter]]:
        """Per group: their masters, in the same order."""
        return [[m.weight for m in group] for group in self._mastered()]

    @property
    def fp32_from_fp32_groups(self) -> list[list[nn.Parameter]]:
        """Per group: what the optimizer steps without a master."""
        find = self._stepped.rows.find
        return [[p for p in group["params"] if find(p) is None] for group in self._stepped.optimizer.param_groups]

    @property
    def all_fp16_params(self) -> list[nn.Parameter]:
        """`fp16_groups` in one list."""
        return list(chain.from_iterable(self.fp16_groups))

    @property
    def all_fp32_from_fp16_params(self) -> list[nn.Parameter]:
        """`fp32_from_fp16_groups` in one list."""
        return list(chain.from_iterable(self.fp32_from_fp16_groups))

    @property
    def all_fp32_from_fp32_params(self) -> list[nn.Parameter]:
        """`fp32_from_fp32_groups` in one list."""
        return list(chain.from_iterable(self.fp32_from_fp32_groups))

    def _mastered(self) -> list[list[Master]]:
        find = self._stepped.rows.find
        found = [[find(p) for p in group["params"]] for group in self._stepped.optimizer.param_groups]
        return [[m for m in group if m is not None] for group in found]
