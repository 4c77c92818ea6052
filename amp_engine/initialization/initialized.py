"""The models and optimizers that an engine looks after: added all together or not at all."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_engine.apex_private import stash
from amp_engine.casting import EngineCasts
from amp_engine.casting.inputs import Inputs
from amp_engine.errors import AmpRuntimeWarning, AmpStateError, AmpTypeError
from amp_engine.ground.callers import warn
from amp_engine.ground.distributed import fsdp1_around, fsdp1_in, is_in_zero, steps_shards, wrappers_around
from amp_engine.ground.dtypes import LOW_PRECISION, dtype_name, is_low_precision
from amp_engine.ground.tools import tool
from amp_engine.initialization.arguments import check_has_groups
from amp_engine.initialization.as_it_came import left_alone_of
from amp_engine.initialization.cast_model import CastModel, give_half_back, remember
from amp_engine.initialization.keep_by_name import give_back
from amp_engine.initialization.loaded_on_ranks import agree
from amp_engine.initialization.request import Request
from amp_engine.initialization.sharded_since import refusal_of_replaced, refuse_sharded_since
from amp_engine.initialization.state_dict import hold_loaded_no_longer, remove_joining_hook
from amp_engine.kernels import CODES, missing
from amp_engine.kernels.blocks import size_in_blocks
from amp_engine.levels import report
from amp_engine.levels.fsdp import is_cast_by_fsdp2
from amp_engine.levels.policy import Skips
from amp_engine.levels.report import Reporter
from amp_engine.optimizers import LARC, inner_of
from amp_engine.optimizers.fused_step import release_fused_step
from amp_engine.optimizers.rules import rule_of
from amp_engine.optimizers.wrapped import inner_optimizers, refuse_around_masters, takes_hooks
from amp_engine.scaling.losses import Scaling
from amp_engine.stepping import exact_state
from amp_engine.stepping.arithmetic import is_zero
from amp_engine.stepping.beside import Beside, HostMaster, Master, Remainder, Remainder24
from amp_engine.stepping.exact import exact_of, exact_value
from amp_engine.stepping.gradient_warnings import warn_of_rounded_masters
from amp_engine.stepping.half_weights import warn_of_converted
from amp_engine.stepping.overflow_messages import OverflowMessages
from amp_engine.stepping.pending import Pending
from amp_engine.stepping.ranks import Ranks
from amp_engine.stepping.record import Record, State
from amp_engine.stepping.records import Records
from amp_engine.stepping.rows import Rows
from amp_engine.stepping.step import StepHook, let_strangers_be, look_at_strangers, remove_hooks, remove_unused

if TYPE_CHECKING:
    from amp_engine.tools.diagnosis.overflow_watch import OverflowWatch


class Initialized:
    """Cast models and stepped optimizers, held by weak references, so that the script can free them.

    Args:
        scaling: the scalers.
        casts: the function casts, which a step must not run under.
        reporter: prints messages about skipped steps.
        tools: the place of what tools keep.
    """

    def __init__(self, scaling: Scaling, casts: EngineCasts, reporter: Reporter, tools: dict[str, Any]) -> None:
        self._cast_models: list[CastModel] = []
        # Optimizers of cast parameters or masters: `release` gives their state the parameters' restored type.
        self._state_follows_cast: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._scaling = scaling
        self._reporter = reporter
        self._tools = tools
        self.records = Records(scaling, casts)
        self._messages = OverflowMessages(reporter, scaling, lambda: self.overflows)
        self._events = events = self.records.events  # not those of a rehearsal
        events.skipped.subscribe(self._messages.skipped)
        events.reported.subscribe(self._messages.stepped_on)
        events.unchecked.subscribe(self._messages.unchecked)
        self._wrappers: weakref.WeakKeyDictionary[LARC | Optimizer, Callable[[], None] | None]
        self._wrappers = weakref.WeakKeyDictionary()
        # Parameters whose gradients may have any type, and the type that the user chose for them, until `release` ends.
        self._of_any_grad_dtype: list[tuple[nn.Parameter, torch.dtype | None]] = []
        # What lies beside a module's own parameters, by the id of the parameter: it outlives the optimizer.
        self._beside: weakref.WeakKeyDictionary[nn.Module, dict[int, Beside]] = weakref.WeakKeyDictionary()
        # The request by which each model was initialized, for optimizers that are made later.
        self._requests: weakref.WeakKeyDictionary[nn.Module, Request] = weakref.WeakKeyDictionary()
        # Modules that a policy file keeps in FP32, until `release`.
        self.kept_by_policy: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    @property
    def models(self) -> list[nn.Module]:
        """Every initialized model, in the order of initialization."""
        return [model for cast in self._cast_models if (model := cast.model) is not None]

    @property
    def overflows(self) -> OverflowWatch:
        """The explanations of overflows, which are loaded here."""
        if "overflows" not in self._tools:
            watch = tool("diagnosis.overflow_watch").OverflowWatch
            made = watch(self._reporter, lambda: self.models, self.stepped_params, self._scaling, self._events)
            self._tools.setdefault("overflows", made)
        found: OverflowWatch = self._tools["overflows"]
        return found

    def options(self) -> dict[str, str]:
        """The options of the models' requests, see `Request.options`; the last one's where several differ."""
        found: dict[str, str] = {}
        for request in self._requests.values():
            found |= request.options()
        return found

    def begin(self) -> None:
        """Forget what was counted, and what tools keep, of earlier models."""
        if "overflows" in self._tools:
            self.overflows.evidence.end()
        self._tools.clear()
        self.records.begin_counting()

    def has_module(self, module: nn.Module) -> bool:
        """True if `module` is a model, or inside of one."""
        return any(module is part for model in self.models for part in model.modules())

    def add(self, request: Request) -> None:
        """Cast models, give optimizers masters and hooks. If anything raises, nothing has changed.

        To undo the cast, it keeps the memory from before the cast until the last optimizer is added.
        """
        models, optimizers, policy = request.models, request.optimizers, request.policy
        output_dtype = request.output_dtype
        # Values from before the cast, without a copy: casting gives a parameter other memory. Not p.detach(), which
        # would share the parameter's version: a step of the master would count as a write to the parameter.
        exact = {
            id(p): p.data if (value_f32 := exact_value(p)) is None else value_f32
            for optimizer in optimizers
            for p in master_params(optimizer)
            if p.is_floating_point()
        }
        dtype = policy.cast_model_type or None
        casts_functions = bool(policy.patch_torch_functions) and not request.casts_everywhere
        if (dtype is not None or casts_functions) and output_dtype is None:
            output_dtype = torch.float32
        put_back = remember(models)
        cast_models: list[CastModel] = []
        try:
            for model in models:
                by_fsdp2 = is_cast_by_fsdp2(model, policy)
                cast_models.append(
                    CastModel(
                        model,
                        dtype=None if by_fsdp2 else dtype,
                        keep_batchnorm_fp32=bool(policy.keep_batchnorm_fp32),
                        inputs=Inputs(left_alone_of(model, request.left_alone)),
                        output_dtype=request.output_dtype if by_fsdp2 else output_dtype,
                        saves_float32=bool(policy.master_weights),
                        casts_functions=casts_functions,
                    )
                )
            for optimizer in optimizers:
                self._take_in(optimizer, request, exact)
            # `undo` restores the types from before a model's first initialization.
            for cast_model in cast_models:
                for earlier in [m for m in self._cast_models if m.model is cast_model.model]:
                    cast_model.take_over(earlier)
                    self._cast_models.remove(earlier)
            self._cast_models += cast_models
            self._keep_with_models()
        except BaseException:
            with ExitStack() as undo:  # runs all callbacks, even if one raises
                undo.callback(put_back)
                for cast_model in cast_models:
                    undo.callback(cast_model.remove_hooks)
                for optimizer in optimizers:
                    undo.callback(self._undo_take_in, optimizer)
            raise
        for gone in [cast_model for cast_model in self._cast_models if cast_model.is_gone]:
            with suppress(ValueError):  # another thread removed it
                self._cast_models.remove(gone)
        for model in models:
            self._requests[model] = request.without_objects()
        for optimizer in optimizers:
            exact_state.take(optimizer)
        if policy.master_weights or request.skips is not Skips.NEVER:
            look_at_strangers(self, Initialized._look_at_stranger)
        for wrapper, optimizer in request.wrappers.items():
            self.look_after_wrapper(wrapper, optimizer)

    def steps(self, request: Request) -> Iterator[str]:
        """The messages of what steps what, where amp takes part in the step."""
        is_active = self._scaling.is_active or request.skips is not Skips.NEVER
        in_models = {id(p) for model in self.models for p in model.parameters()}
        for optimizer in request.optimizers:
            record = self.records.get(optimizer)
            assert record is not None, "it was just added"
            masters = _counted(record)
            rule = rule_of(optimizer)
            is_known = rule is not None and all(map(rule.supports, optimizer.param_groups))
            devices = {p.device for p in record.columns.params}
            if masters or is_active:
                is_by_kernels = is_known and not any(map(missing, devices))
                each = _bytes_of_state(record, request.moment_dtype) if is_known and masters else 0.0
                yield report.steps(type(optimizer).__name__, masters, is_by_kernels, record.releases, each)
            if outside := sum(one is not None and id(one.param) not in in_models for one in record.columns.beside):
                yield report.outside_of_models(type(optimizer).__name__, outside)

    def refuse_known(self, optimizers: Sequence[Optimizer], wrappers: Iterable[Any]) -> None:
        """Raise AmpStateError for an optimizer that is initialized, or that has attributes of apex's names."""
        seen = {id(optimizer) for optimizer in self.records.optimizers}
        for optimizer in optimizers:
            if id(optimizer) in seen or stash.is_on(optimizer):
                raise AmpStateError(
                    "A given optimizer should only be passed through amp.initialize once.  "
                    f"This {type(optimizer).__name__} was; call amp.close() first to start over, which "
                    "rounds a model that came in half: save model.state_dict() before it, and load it after initialize."
                )
            seen.add(id(optimizer))
            stash.check_names_are_free(optimizer)
        for wrapper in wrappers:
            if isinstance(wrapper, Optimizer):
                stash.check_names_are_free(wrapper)

    def record_of(self, optimizer: Any, takes_in: bool = False) -> Record:
        """The record of `optimizer`, or of the optimizer inside.

        Args:
            takes_in: True to look after one that was made after `initialize`.

        Raises AmpTypeError if there is none.
        """
        stepping, record = inner_of(optimizer), None
        if isinstance(stepping, Optimizer):
            takes_in = takes_in and not self.records.is_rehearsal  # which puts back what would be added to it
            record = self.records.get(stepping) or (self.look_after(stepping) if takes_in else None)
        if record is None:
            raise AmpTypeError(
                f"This {type(optimizer).__name__} was not passed to amp.initialize, and has stepped no model of it "
                "since, or another optimizer steps its parameters now.  Call model, optimizer = "
                "amp.initialize(model, optimizer, opt_level=...) and hand the same optimizer to scale_loss."
            )
        if stepping is not optimizer:
            self.look_after_wrapper(optimizer, stepping)  # the wrapper may have been made after `initialize`
        return record

    def record_to_clip(self, optimizer: Optimizer) -> Record | None:
        """The record of `optimizer`, if it has one; one that was made later is looked after from here on."""
        record = self.records.get(optimizer)
        if record is None and isinstance(optimizer, Optimizer) and takes_hooks(optimizer) and self.has_masters:
            self._look_at_stranger(optimizer)
            record = self.records.get(optimizer)
        return record

    def look_after_wrapper(self, wrapper: LARC | Optimizer, inner: Optimizer) -> None:
        """Add a wrapper of an initialized optimizer, until `release`. LARC adapts gradients on the masters."""
        if wrapper in self._wrappers:
            return
        record = self.records.get(inner)
        assert record is not None, "it was asked for before"
        if isinstance(wrapper, LARC):
            self._wrappers[wrapper] = wrapper.register_context(lambda: self.on_masters(record))
        else:
            if record.rows.kind is not None:
                refuse_around_masters(wrapper, inner)
            self._wrappers[wrapper] = None
            for hooks in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
                # After torch's zero_grad() the class's step reads these, and not every class has them. They stay.
                if not hasattr(wrapper, hooks):
                    vars(wrapper)[hooks] = OrderedDict()
        stash.put_on(wrapper, record, self.records)

    @contextmanager
    def on_masters(self, record: Record) -> Iterator[None]:
        """A context in which groups and state of an optimizer have its masters, which show unscaled gradients."""
        self.records.close_into(record)
        record.follow_writes()
        if record.rows.is_shown or not record.rows.can_show:
            yield
            return
        record.rows.adopt()
        record.hand_out()
        try:
            with record.rows.shown():
                yield
        finally:
            record.take_gradients()

    def release(self) -> None:
        """Undo every `add`, also if ranks cannot agree on an overflow; what an interrupt left, the next call undoes.

        Optimizers come first: their masters go into the models as exact FP32 values.
        """
        for wrapper, remove in self._wrappers.items():
            if remove is not None:
                remove()
            stash.take_off(wrapper)
        self._wrappers.clear()
        let_strangers_be(self)
        self._requests.clear()
        optimizers = self.records.optimizers
        params = [(param, param.dtype) for model in self.models for param in model.parameters()]
        self._keep_with_models()
        # Parameters with masters are FP32 in between, even if they end as half.
        beside = {key: one for of_module in self._beside.values() for key, one in of_module.items()}
        with_masters = [one.rows for one in self.records.all if one.rows.kind is not None]
        mastered = {id(p) for rows in with_masters for p in rows.columns.params} | beside.keys()
        with ExitStack() as undo:
            undo.callback(self._release_models)
            undo.callback(self._release_beside, list(beside.values()))
            for optimizer in reversed(optimizers):
                undo.callback(self._let_go, optimizer)
        _warn_of_lost_hooks(
            [p for p, dtype in params if p.dtype != dtype or (dtype in LOW_PRECISION and id(p) in mastered)]
        )

    def _release_beside(self, beside: Sequence[Beside]) -> None:
        """Give parameters the values beside them that belong to no optimizer."""
        for one in beside:
            if not one.is_owned() and one in exact_of(one.param):
                one.give_back()
                self._of_any_grad_dtype.append((one.param, one.chosen_grad_dtype))

    def _release_models(self) -> None:
        if self.records.all:  # after an interrupt masters may be left, whose exact values casts would round
            return
        remove_unused()
        within = {module for model in self.models for module in model.modules()}
        for cast_model in reversed(self._cast_models):
            cast_model.undo()
        self._cast_models.clear()
        for module in self._beside:
            if module not in within:
                give_half_back(module)
        self._beside.clear()
        remove_joining_hook()
        give_back([*self.kept_by_policy])
        self.kept_by_policy.clear()
        for optimizer in [*self._state_follows_cast]:
            _match_state_to_parameters(optimizer)
        self._state_follows_cast.clear()
        while self._of_any_grad_dtype:
            param, chosen = self._of_any_grad_dtype[-1]
            grad, param.grad = param.grad, None
            param.grad_dtype = chosen or param.dtype
            param.grad = None if grad is None else grad.to(param.grad_dtype)
            self._of_any_grad_dtype.pop()

    def look_after(self, optimizer: Optimizer) -> Record | None:
        """Take in an optimizer that was made after `initialize`; None if it steps no parameter of a model.

        Masters that are there, of an earlier optimizer, go on; if that lives, it is let go. Others start from the
        parameters. Raises AmpStateError, with all values kept, for an optimizer that cannot have what the level gives.
        """
        params = list(master_params(optimizer))
        ids = set(map(id, params))
        of_models = [(model, of) for model in self.models if (of := self._requests.get(model)) is not None]
        mine = [(model, of) for model, of in of_models if any(id(p) in ids for p in model.parameters())]
        if not mine:
            return None
        request = replace(mine[0][1].of_later(optimizer), models=[model for model, _ in mine])
        self.refuse_known([optimizer], [])
        if request.policy.master_weights:
            refuse_sharded_since(optimizer, request.models)
        earlier = [one for one in self.records.all if one.rows.kind is not None and one.state is State.IDLE]
        earlier = [one for one in earlier if not ids.isdisjoint(one.param_ids())]
        if not self._are_unscaled:
            _refuse_gradients(optimizer, [p for p in params if not any(id(p) in one.param_ids() for one in earlier)])
        held = agree(params) if request.policy.master_weights else []
        for one in earlier:
            if one.is_stepped_ahead:
                warn(
                    f"The last backward was stepped by the {type(one.optimizer).__name__} that this "
                    f"{type(optimizer).__name__} replaces, since release_gradients=True steps in the backward.  Step "
                    "the new optimizer once before the next backward, or delete the earlier one.",
                    AmpRuntimeWarning,
                )
            self._replace(one)
        state = chain.from_iterable(one.values() for one in optimizer.state.values() if isinstance(one, dict))
        narrow = sum(isinstance(value, Tensor) and is_low_precision(value) for value in state)
        had_masters = any(next(exact_of(p), None) is not None for p in params)
        self._take_in(optimizer, request, {}, is_later=True)
        del held  # the rows have it
        record = self.records.get(optimizer)
        assert record is not None, "it was taken in"
        taken = exact_state.take(optimizer)
        is_half = taken < narrow and request.moment_dtype is torch.float32
        if taken and not had_masters:
            warn_of_rounded_masters(optimizer, record.rows)
        for line in report.later_optimizer(type(optimizer).__name__, _counted(record), had_masters, is_half):
            self._reporter.say_once(line)
        return record

    def _replace(self, record: Record) -> None:
        """Let an optimizer go whose parameters another one steps from now on."""
        optimizer = record.optimizer
        record.leave()
        remove_hooks(optimizer)
        release_fused_step(optimizer)
        stash.take_off(optimizer)  # lets go of the record
        self.records.remove(optimizer)

    def _keep_with_models(self, gone: Sequence[Beside] = ()) -> None:
        """Keep what lies beside parameters with the models that have these; forget what no model has any more.

        Args:
            gone: of parameters that an optimizer has no longer.
        """
        for model in self.models:
            for module in model.modules():  # each, as a part may outlive the model
                own = [p for p in module._parameters.values() if p is not None]
                beside = {id(p): one for p in own for one in exact_of(p) if isinstance(one, Beside)}
                if beside or module in self._beside:
                    self._beside[module] = beside
            hold_loaded_no_longer(model)
        kept = {key for of_module in self._beside.values() for key in of_module} if gone else ()
        for one in gone:
            if id(one.param) not in kept and one in exact_of(one.param):
                one.forget()

    @property
    def has_masters(self) -> bool:
        """True if a model has, or may get, FP32 masters."""
        return any(request.policy.master_weights for request in self._requests.values())

    @property
    def _are_unscaled(self) -> bool:
        """True if no loss is scaled."""
        return all(scaler.is_identity for scaler in self._scaling.scalers)

    def _look_at_stranger(self, optimizer: Optimizer) -> bool:
        """Before a step of an optimizer that no engine knows: take it in, or refuse it where losses are scaled.

        There nobody knows the scale of its gradients. Returns False to be asked again before its next step.
        """
        if self.records.is_rehearsal:
            return False
        for inner in inner_optimizers(optimizer).values():
            if (record := self.records.get(inner)) is not None:
                if record.rows.kind is not None:
                    refuse_around_masters(optimizer, inner)
                return True
        if self._are_unscaled:
            self.look_after(optimizer)
            return True
        ids = {id(p) for p in master_params(optimizer)}
        for model, request in self._requests.items():
            for name, p in model.named_parameters() if request.policy.master_weights else ():
                if id(p) in ids and p.requires_grad and is_low_precision(p):
                    kind = type(optimizer).__name__
                    raise AmpStateError(
                        f"This {kind} was passed neither to amp.initialize nor to amp.scale_loss, and would step "
                        f"{name} in {dtype_name(p.dtype)}, where small updates are lost.  Nothing was stepped.  "
                        f"Call amp.scale_loss(loss, optimizer) with this {kind}, or pass it to amp.initialize."
                    )
        return True

    def stepped_params(self) -> list[nn.Parameter]:
        """The models' parameters that an optimizer steps, each once."""
        return list({id(p): p for one in self.records.all for p in one.columns.params}.values())

    def _take_in(
        self,
        optimizer: Optimizer,
        request: Request,
        exact: Mapping[int, Tensor],
        is_later: bool = False,
    ) -> None:
        policy = request.policy
        # Shards are FP32 and need no masters.
        in_shards = steps_shards(optimizer)
        split = {"split": Remainder, "24bit": Remainder24}.get(str(policy.master_weights))
        of_self = weakref.ref(self)

        def keep(gone: Sequence[Beside]) -> None:
            if (initialized := of_self()) is not None:
                initialized._keep_with_models(gone)

        if split is not None:
            rows = Rows(optimizer, split, exact, keep_with_models=keep)
        elif policy.master_weights and not in_shards:
            rows = Rows(optimizer, HostMaster if request.on_host else Master, exact, keep_with_models=keep)
        else:
            rows = Rows(optimizer, halves=request.half_weights[request.optimizers.index(optimizer)])
        has_masters = rows.kind is not None
        try:
            if has_masters:
                rows.keep()
            if (has_masters or policy.cast_model_type) and not in_shards:
                self._state_follows_cast.add(optimizer)
                if not has_masters:
                    _match_state_to_parameters(optimizer)
            in_flat_shards = any(fsdp1_in(model) or fsdp1_around(model) for model in request.models)
            ranks = Ranks(rows, request.process_group, is_in_zero(optimizer), in_flat_shards)
            refuse_replaced = refusal_of_replaced(request.models, self._scaling)

            def check(record: Record) -> None:
                refuse_replaced(record)
                warn_of_converted(policy, record.optimizer)

            keeps_half = request.keeps_half and rows.makes_masters
            record = Record(optimizer, rows, Pending(self.records.events), ranks, check, keeps_half, is_later)
            self.records.add(record)
            hook = StepHook(record, self.records)
            stash.put_on(optimizer, record, self.records, hook)
            needs_kernels = request.moment_dtype is not torch.float32 or request.releases or request.on_host
            if split is not None or needs_kernels:
                record.use_kernels(request.moment_dtype, needs_kernels)
            if request.on_host:
                hook.step_on_host()
            if request.releases:
                hook.release_gradients(partial(self._messages.left_out, request.names))
        except BaseException:
            self._undo_take_in(optimizer)
            self._of_any_grad_dtype += rows.abandon()
            raise

    def _undo_take_in(self, optimizer: Optimizer) -> None:
        record = self.records.get(optimizer)
        if record is not None:
            remove_hooks(optimizer)
            release_fused_step(optimizer)
            self._of_any_grad_dtype += record.rows.abandon()
            stash.take_off(optimizer)
            self.records.remove(optimizer)

    def _let_go(self, optimizer: Optimizer) -> None:
        record = self.records.get(optimizer)
        if record is None:
            return
        remove_hooks(optimizer)
        may_be_bad = True
        try:
            may_be_bad = record.may_have_overflowed()
        finally:
            release_fused_step(optimizer)
            self._of_any_grad_dtype += record.release(may_be_bad)
            stash.take_off(optimizer)  # lets go of the record
            self.records.remove(optimizer)


def _refuse_gradients(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> None:
    """Raise AmpStateError if one of `params` has a gradient, but of 0, where losses are scaled. May wait."""
    for p in params:
        if p.grad is not None and not is_zero(p.grad):
            raise AmpStateError(
                f"{type(optimizer).__name__}, which was made after amp.initialize, steps a parameter of shape "
                f"{tuple(p.shape)} with a gradient, which scaled losses may have left in it.  Call its zero_grad() "
                "before its first amp.scale_loss."
            )


def master_params(optimizer: Optimizer | LARC) -> Iterator[nn.Parameter]:
    """Iterate over the parameters in the groups of `optimizer`. The call raises AmpTypeError if it has no groups."""
    check_has_groups(optimizer, "master_params", "")
    return (p for group in optimizer.param_groups for p in group["params"])


def _match_state_to_parameters(optimizer: Optimizer) -> None:
    """Cast an optimizer's state from before a cast to the parameters' new type, which torch's kernels require.

    Calls the optimizer's own `load_state_dict`, which may keep the state of half parameters in FP32.
    """
    differs = any(
        isinstance(value, Tensor) and value.is_floating_point() and (value.dtype, value.device) != (p.dtype, p.device)
        for p in master_params(optimizer)
        for key, value in optimizer.state.get(p, {}).items()
        if key != "step"
    )
    if differs:
        groups, listed = optimizer.param_groups, set(map(id, master_params(optimizer)))
        # `state_dict` has no number for a parameter that left the groups.
        left = {p: optimizer.state.pop(p) for p in [*optimizer.state] if isinstance(p, Tensor) and id(p) not in listed}
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.state.update(left)
        optimizer.param_groups = groups  # equal to the loaded ones, but other code may refer to these


def _counted(record: Record) -> str:
    """Return how many masters an optimizer has, such as "4 FP32 masters"; "" if it has none."""
    count = sum(one is not None for one in record.columns.beside)
    kind = record.rows.kind
    return f"{count} {kind.plural}" if count and kind is not None else ""


def _bytes_of_state(record: Record, moment_dtype: torch.dtype) -> float:
    """Return the bytes a parameter of weights, of what lies beside them, and of moments.

    0.0 for masters on the CPU, and for a class that the kernels do not know.
    """
    columns, elements, found = record.columns, 0, 0.0
    rule = rule_of(record.optimizer)
    if record.rows.kind is HostMaster or rule is None:
        return 0.0
    groups = [group for group in record.optimizer.param_groups for _ in group["params"]]
    for param, one, group in zip(columns.params, columns.beside, groups, strict=True):
        moments = (
            rule.needs_state1(group) + (rule.state2 is not None and not rule.keeps_norm) if param.requires_grad else 0
        )
        of_moment = size_in_blocks(param.numel()) if moment_dtype is CODES else param.numel() * moment_dtype.itemsize
        beside = () if one is None else (one.stepped, one.copy)
        elements += param.numel()
        found += param.nbytes + sum(t.nbytes for t in beside if t is not param) + moments * of_moment
    return found / max(elements, 1)


def _warn_of_lost_hooks(changed: Sequence[nn.Parameter]) -> None:
    """Warn that a DistributedDataParallel no longer reduces these parameters, which have changed type."""
    for wrapper in wrappers_around(changed) if changed else ():
        name = type(wrapper).__name__
        warn(
            f"close() gave parameters of this {type(wrapper.module).__name__} their own types again, by which the "
            f"{name} around it loses the hooks that reduce their gradients: each rank would train alone from now on.  "
            f"Call {name}(model) anew before you train on.  To evaluate, save or load, nothing is to be done.",
            AmpRuntimeWarning,
        )
