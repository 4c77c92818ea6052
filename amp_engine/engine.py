"""Engine: holds a policy, casts, scalers and optimizers, and can undo all that it did."""

from __future__ import annotations

import os
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, overload

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from amp_engine import casting
from amp_engine.casting import EngineCasts, locks
from amp_engine.errors import AmpStateError, AmpTypeError, AmpValueError
from amp_engine.ground import tools
from amp_engine.ground.dtypes import LOW_PRECISION
from amp_engine.initialization import arguments, cast_notes, keep_by_name
from amp_engine.initialization.arguments import InitializeOptions, Models, Optimizers
from amp_engine.initialization.as_it_came import came_in_half
from amp_engine.initialization.initialized import Initialized, master_params
from amp_engine.initialization.policy_argument import takes_policy
from amp_engine.initialization.request import checked
from amp_engine.levels import levels, report
from amp_engine.levels.policy import Policy
from amp_engine.levels.scale_rule import DEFAULT_MAX_LOSS_SCALE, DynamicLossScale
from amp_engine.optimizers import LARC, inner_of
from amp_engine.saving import by_name, checkpoint_file, scaler_state
from amp_engine.saving import objects as saved_objects
from amp_engine.saving.averages import AveragedModel, AvgFn, MultiAvgFn
from amp_engine.saving.by_name import TrainingState
from amp_engine.saving.scaler_state import ScalerFormat
from amp_engine.scaling import by_hand
from amp_engine.scaling.by_hand import Gradients
from amp_engine.scaling.losses import Scaling
from amp_engine.scaling.scaler import LossScaler
from amp_engine.stepping import clipping
from amp_engine.stepping.last_step import LastStep
from amp_engine.stepping.reached import reached_by
from amp_engine.stepping.record import Record
from amp_engine.stepping.records import Disabled

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from amp_engine.tools import explanation
    from amp_engine.tools.diagnosis import find_overflow as overflow_search
    from amp_engine.tools.diagnosis import overflow_watch
    from amp_engine.tools.diagnosis.overflow_watch import OverflowWatch
    from amp_engine.tools.policy_file import RunPolicy
    from amp_engine.tools.telemetry import gradient_histogram as histograms
    from amp_engine.tools.telemetry import gradient_watch, receipt, update_audit
    from amp_engine.tools.telemetry import scalars as logged
    from amp_engine.tools.telemetry import step_times as times

M = TypeVar("M", bound=nn.Module)


class Engine:
    """Mixed precision for some models and optimizers, without module-level state.

        with Engine() as engine:
            model, optimizer = engine.initialize(model, optimizer, opt_level="O2")
            for x, y in batches:
                with engine.scale_loss(loss_fn(model(x), y), optimizer) as scaled_loss:
                    scaled_loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    `initialize` may be called again, in any thread, with further models and optimizers: its policy and scalers replace
    the earlier ones, and earlier models and optimizers stay initialized. Leaving the context calls `close()`.

    An engine is `Stateful`: torch.distributed.checkpoint saves it as an entry of a dictionary.
    """

    def __init__(self) -> None:
        self.policy: Policy | None = None  # None before initialize and after close
        self.reporter = report.Reporter()
        self.min_loss_scale: float | None = None
        self.max_loss_scale: float = DEFAULT_MAX_LOSS_SCALE
        self.hard_override = False  # True: `initialize` prints complaints about a level, and raises none
        self.allow_incoming_model_not_fp32 = False  # True: every level accepts half weights without masters
        self.function_casts = EngineCasts(self.reporter.say)
        self._scaling = Scaling()
        self.tools: dict[str, Any] = {}  # what tools keep about the models; forgotten by the first `initialize`
        self._initialized = Initialized(self._scaling, self.function_casts, self.reporter, self.tools)
        self.records = self._initialized.records
        # The number of optimizer steps that each scheduler has followed.
        self._followed: weakref.WeakKeyDictionary[LRScheduler, int] = weakref.WeakKeyDictionary()

    if TYPE_CHECKING:
        audit_updates = update_audit.audit_updates
        explain = explanation.explain
        find_overflow = overflow_search.find_overflow
        gradient_histogram = histograms.gradient_histogram
        overflow_report = overflow_watch.overflow_report
        receipt = receipt.receipt
        scalars = logged.scalars
        step_times = times.step_times
        watch_gradients = gradient_watch.watch_gradients
    else:

        def __getattr__(self, name: str) -> Any:
            """A tool that takes an engine, such as `receipt`, as a method: loaded when it is asked for."""
            if name not in tools.OF_ENGINE:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return MethodType(getattr(tools.tool(tools.OF_ENGINE[name]), name), self)

    @property
    def scalers(self) -> list[LossScaler]:
        """The loss scalers, one for each loss_id; empty before `initialize` and after `close`."""
        return self._scaling.scalers

    @property
    def overflows(self) -> OverflowWatch:
        """The record of overflows since the first `initialize`; a tool, which is loaded."""
        return self._initialized.overflows

    @property
    def _is_disabled(self) -> bool:
        return self.policy is not None and not self.policy.enabled

    def __repr__(self) -> str:
        if self.policy is None:
            return "<Engine: initialize() was not called>"
        if not self.policy.enabled:
            return "<Engine: enabled=False>"
        optimizers = ", ".join(type(optimizer).__name__ for optimizer in self.records.optimizers)
        scale = str(self.policy.loss_scale)
        count = f"{len(self.scalers)} losses" if len(self.scalers) != 1 else "1 loss"
        return f"<Engine at {self.policy.opt_level}: steps {optimizers or 'no optimizer'}; {count}, loss scale {scale}>"

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @overload
    def initialize(
        self,
        models: Models,
        optimizers: None = None,
        enabled: bool = ...,
        opt_level: str = ...,
        **options: Unpack[InitializeOptions],
    ) -> Models: ...

    @overload
    def initialize(
        self,
        models: Models,
        optimizers: Optimizers,
        enabled: bool = ...,
        opt_level: str = ...,
        **options: Unpack[InitializeOptions],
    ) -> tuple[Models, Optimizers]: ...

    @takes_policy
    def initialize(
        self,
        models: Any,
        optimizers: Any = None,
        enabled: bool = True,
        opt_level: str = "O1",
        cast_model_type: torch.dtype | str | bool | None = None,
        patch_torch_functions: bool | None = None,
        keep_batchnorm_fp32: bool | str | None = None,
        master_weights: bool | Literal["split", "24bit"] | None = None,
        loss_scale: float | str | DynamicLossScale | None = None,
        cast_model_outputs: torch.dtype | str | None = None,
        num_losses: int = 1,
        verbosity: int = 1,
        min_loss_scale: float | None = None,
        max_loss_scale: float = DEFAULT_MAX_LOSS_SCALE,
        *,
        skip_on_overflow: bool | Literal["auto"] = "auto",
        allow_banned: bool = False,
        adopt_data_writes: bool = False,
        process_group: ProcessGroup | None = None,
        moment_dtype: torch.dtype | str | None = None,
        casts: Literal["everywhere", "model"] = "everywhere",
        cast_inputs: bool | str | Sequence[str] = True,
        gradients: Literal["float32", "half"] = "float32",
        release_gradients: bool = False,
        masters_on: Literal["cpu"] | None = None,
        policy: str | os.PathLike[str] | RunPolicy | None = None,
    ) -> Any:
        """Prepare models and optimizers for training at `opt_level`, in place, and return them.

        A level that casts the model waits for the device, to name parameters and buffers that become infinite, 0 or
        another whole number.

        Args:
            models: a module, or a list of modules; on any device. At O1 and O4 the parameters that an optimizer steps
                must be FP32, unless `master_weights` is True; all others may have any floating type.
            optimizers: an optimizer, LARC or (not at O2 and O5) a kind of Lookahead around one, a list of these, or
                None.
            enabled: False changes nothing and makes `scale_loss` yield the loss itself.
            opt_level: "O0" FP32; "O1" cast functions; "O2" half model, FP32 batch norm and masters; "O3"
                pure half; "O4", "O5" are O1, O2 in bfloat16. Sets the defaults of the properties below.
            cast_model_type: type of parameters, buffers and inputs, but for what stays FP32 (docs/half_models.md);
                False does not cast the model.
            patch_torch_functions: cast arguments of listed functions; set by O1 and O4 only.
            keep_batchnorm_fp32: keep affine batch norms in FP32; the strings "True" and "False" are accepted too.
            master_weights: step FP32 copies of low-precision parameters, which lie beside the optimizer (at O1 and O4
                of the parameters that are in half before the call); "split" (O5) stores only the 16 bits of each master
                that its bfloat16 parameter lacks, which saves 2 bytes per parameter; "24bit" (O5) the upper 8 of these,
                rounded stochastically, which saves 3.
            loss_scale: "dynamic"; a DynamicLossScale with numbers of your own; "auto", which follows the largest
                gradient of the run; or a static scale (a number, or a string with one).
            cast_model_outputs: type of floating model outputs; default float32 where the model is cast.
            num_losses: the number of scalers, for `scale_loss(..., loss_id=i)`.
            verbosity: 0 silent; 1 short; 2 apex's table of the level, every cast, and each skip on every rank.
            min_loss_scale: floor of dynamic scales; None means 2**-24.
            max_loss_scale: ceiling of dynamic scales.
            skip_on_overflow: skip steps whose gradients are not finite under a static scale too: True at every level;
                "auto" at O4 and O5, but for steps with a closure at O4 and ranks that cannot agree (FSDP1, ZeRO without
                a process_group); False takes them, as PyTorch does.
            allow_banned: run `binary_cross_entropy` in FP32 under O1 instead of refusing it.
            adopt_data_writes: without effect, since masters always follow what is written into parameters.
            process_group: the ranks that agree on overflows, if neither DistributedDataParallel nor DTensors determine
                them: with FullyShardedDataParallel, ZeroRedundancyOptimizer or stages of a pipeline.
            moment_dtype: torch.bfloat16 stores each moment of Adam, AdamW and SGD in 2 bytes, not 4; "8bit" in 1 byte
                and a shared exponent for each 32 (docs/half_models.md); both with stochastic rounding.
            cast_inputs: False casts no floating inputs of a model at O2, O3 and O5; names of arguments are left alone,
                such as ["timestep"].
            gradients: "half" leaves the half gradients of masters as a scaled backward made them until the step, which
                unscales them: 6 bytes a parameter less to read and write at O2. `.grad` is then for
                `amp.clip_grad_norm_` and `amp.master_params` alone, a write is an error, and the step discards them.
            release_gradients: step each parameter in the backward, as soon as its gradient is complete, and free the
                gradient: 2 bytes a parameter less. At a scale of 1, on one rank, for classes that the kernels step;
                without clipping and accumulation, which are errors (docs/half_models.md).
            masters_on: "cpu" keeps masters and moments in the memory of the host, where the CPU's kernels step them:
                the device has 4 bytes a parameter, with the gradient. At a scale of 1, for the classes of
                `release_gradients`. A step waits for the device.
            casts: where O1 and O4 cast functions: "everywhere" in the process, as apex did; "model" in forwards of
                `models` and their parts, in the thread that calls them, and in `with amp.casts():`. Outputs of these
                forwards are FP32, unless `cast_model_outputs` says otherwise.
            policy: a RunPolicy, or the path of its file: the level, modules to keep in FP32 until `close`, and other
                arguments; arguments of this call take precedence.

        Returns:
            The model or list of models; unless `optimizers` is None, the pair (models, optimizers).

        Raises AmpStateError, AmpTypeError or AmpValueError, and then leaves everything as it was before the call.
        """
        with locks.install, ExitStack() as undo:  # one thread at a time, here and in `close`
            self.records.refuse_inside("initialize")
            casting.discard_interrupted()
            if not enabled:
                self.reporter.verbosity = verbosity
                self.policy, self._scaling.scalers = levels.DISABLED, []
                self.function_casts.note_other_level("enabled=False")
                return models if optimizers is None else (models, optimizers)

            given = {
                "cast_model_type": cast_model_type,
                "patch_torch_functions": patch_torch_functions,
                "keep_batchnorm_fp32": keep_batchnorm_fp32,
                "master_weights": master_weights,
                "loss_scale": loss_scale,
                "cast_model_outputs": cast_model_outputs,
                "min_loss_scale": min_loss_scale,
                "max_loss_scale": max_loss_scale,
                "moment_dtype": moment_dtype,
                "casts": casts,
                "cast_inputs": cast_inputs,
                "gradients": gradients,
                "release_gradients": release_gradients,
                "masters_on": masters_on,
            }
            # `takes_policy` has read the file.
            names = () if policy is None else tuple(cast("RunPolicy", policy).keep_float)
            kept = undo.enter_context(keep_by_name.kept(models, names, opt_level, cast_model_type))
            request = checked(
                models,
                optimizers,
                opt_level,
                given,
                skip_on_overflow,
                self.hard_override,
                process_group,
                self.allow_incoming_model_not_fp32,
            )
            decided = request.policy
            arguments.check_num_losses(num_losses)
            if decided.patch_torch_functions:
                self.function_casts.check(request.casts_everywhere)
            self._initialized.refuse_known(request.optimizers, request.wrappers)

            self.reporter.verbosity = verbosity
            for line in report.initialization(request.defaults, decided, request.options(), verbosity):
                self.reporter.say(line, rank0=True)

            notes = cast_notes.notes(request.models, decided)
            is_rounded = not all(map(came_in_half, request.models))
            emulated = arguments.emulated_on_cpu(request.models, decided)
            self._initialized.add(request)
            if self.policy is None:
                self._initialized.begin()
            self.policy = decided
            self.min_loss_scale, self.max_loss_scale = min_loss_scale, max_loss_scale
            self._scaling.begin(decided.loss_scale, num_losses, min_loss_scale, max_loss_scale, request.skips)
            self.function_casts.follow(decided, allow_banned, verbosity == 2, everywhere=request.casts_everywhere)
            for line in self._initialized.steps(request):
                self.reporter.say(line, rank0=True)
            if decided.master_weights and decided.cast_model_type in LOW_PRECISION and not request.optimizers:
                self.reporter.say_once(report.no_optimizer(decided.cast_model_type, is_rounded))
            for reason in arguments.missing_kernels(request.models):
                self.reporter.say_once(report.missing_kernels(reason))
            if emulated:
                self.reporter.say_once(report.emulated_on_cpu(str(decided.opt_level), emulated))
            for line in notes:
                self.reporter.say(line, rank0=True)
            if zero := arguments.zero_eps(request.optimizers, decided):
                self.reporter.say_once(report.EPS_IS_ZERO.format(optimizer=zero[0], eps=zero[1]))
            self._initialized.kept_by_policy.update(kept)
            return models if optimizers is None else (models, optimizers)

    def scale_loss(
        self,
        loss: Tensor,
        optimizers: Optimizer | LARC | Iterable[Optimizer | LARC] | Literal["reached"] | None = "reached",
        loss_id: int = 0,
        model: Any = None,
        delay_unscale: bool = False,
        delay_overflow_check: bool = False,
    ) -> AbstractContextManager[Tensor]:
        """A context that yields `loss.float() * scale`; on exit it unscales the gradients and adjusts the scale.

        Afterwards `.grad` of the parameters is unscaled, FP32 beside masters, and includes what was there before; it
        stays until it is zeroed. An overflow makes the next `step()` of each listed optimizer do nothing. At a scale of
        1 gradients stay as the backward left them, and the clipping or the step checks them.

        Args:
            loss: any shape, any floating type.
            optimizers: all optimizers with parameters that the loss reaches: one, a list, or None, which is allowed
                only at a scale of 1. One that was made after `initialize` is looked after from here on. One that is
                left out refuses to step scaled gradients. "reached" finds them in the graph of the loss: in
                microseconds if there is one optimizer; by a walk through the whole graph if there are several and the
                loss does not reach all.
            loss_id: the index of the loss's scaler.
            model: ignored, as in apex.
            delay_unscale: leave the gradients scaled; the next `scale_loss` without it unscales the sum. Without effect
                at a scale of 1, and beside unscaled gradients of earlier backwards, but of 0.
            delay_overflow_check: do not adjust the scale; an overflow counts at the next check of this scaler.

        Raises AmpStateError (also if the loss reaches no optimizer), AmpTypeError or AmpIndexError before the body
        runs. If the body raises, `optimizers` get the gradients that they had at the entry; only those that
        `delay_unscale` had left scaled are discarded, if the body ran a backward into them. At a scale of 1 gradients
        stay as in PyTorch. If the exit raises or is interrupted, no gradient stays that is scaled or unchecked. No host
        sync.
        """
        del model
        if self.policy is None:
            raise AmpStateError(report.SCALE_LOSS_BEFORE_INITIALIZE)
        if not self.policy.enabled:
            return Disabled(loss)
        arguments.check_loss(loss, "scale_loss", "backward()")
        casting.discard_interrupted()
        scaler = self._scaling.scaler(loss_id)
        if optimizers is None and not scaler.is_identity:
            raise AmpTypeError(
                "scale_loss(loss, None) scales the loss, and names no optimizer whose gradients are to be unscaled.  "
                "Call amp.scale_loss(loss, optimizer); for gradients of inputs alone "
                "torch.autograd.grad(amp.scale(loss), inputs) and amp.unscale(gradients).  At a scale of 1, as O0 has "
                "it, None is taken."
            )
        if optimizers == "reached":
            # At a scale of 1 an optimizer may be made later.
            records = self._reached_by(loss) if self.records.all or not scaler.is_identity else []
        else:
            listed = [] if optimizers is None else arguments.as_list(optimizers)
            found = (self._initialized.record_of(one, takes_in=True) for one in listed)
            records = list(dict.fromkeys(found))
        return self.records.of(loss, records, scaler, loss_id, delay_unscale, delay_overflow_check)

    def _reached_by(self, loss: Tensor) -> list[Record]:
        """The optimizers that a backward of `loss` gives gradients. Raises AmpStateError if there are none."""
        everyone = self.records.all
        records = reached_by(loss, everyone)
        if not records:
            names = ", ".join(type(one.optimizer).__name__ for one in everyone) or "none was passed to amp.initialize"
            raise AmpStateError(
                "amp.scale_loss(loss) finds the optimizers that the loss reaches, and it reaches no parameter of any: "
                f"{names}.  Compute the loss with the parameters that an initialized optimizer steps, without "
                "torch.no_grad() or .detach(), or name the optimizers: amp.scale_loss(loss, optimizer), or "
                "amp.GradScaler(optimizer)."
            )
        return records

    def get_scale(self, loss_id: int = 0) -> Tensor:
        """The scale that the next backward of this loss uses, to log it: a copy on its device, float32, shape [].

        1 if not enabled. No host sync, but `float(amp.get_scale())` is one. With several ranks it waits for their
        agreement on the last backward.

        Raises AmpStateError before `initialize`, AmpIndexError for an unknown loss_id.
        """
        policy = self._initialized_policy("get_scale")
        return (
            self._scaling.scaler(loss_id).snapshot().scale.clone()
            if policy.enabled
            else torch.ones((), dtype=torch.float32)
        )

    def scale(self, loss: Tensor, loss_id: int = 0) -> Tensor:
        """`loss.float() * scale`, to call `torch.autograd.grad` on: for gradient penalties and other double backwards.

            gradients = torch.autograd.grad(amp.scale(loss), model.parameters(), create_graph=True)
            penalty = sum(g.square().sum() for g in amp.unscale(gradients))
            with amp.scale_loss(loss + penalty, optimizer) as scaled_loss:
                scaled_loss.backward()

        Args:
            loss: any shape, any floating type.
            loss_id: the index of the scaler, as passed to the `scale_loss` of the loss that has these gradients in it.

        Returns:
            float32, of the shape of the loss, in its graph; the loss itself if not enabled. The scale is 1 at levels
            that scale no loss.

        Raises AmpStateError before `initialize`, AmpTypeError or AmpIndexError. No host sync.
        """
        policy = self._initialized_policy("scale")
        arguments.check_loss(loss, "scale", "torch.autograd.grad")
        self.records.note_scaled()
        return by_hand.scaled(self._scaling, loss, loss_id) if policy.enabled else loss

    def unscale(self, gradients: Gradients, loss_id: int = 0) -> Gradients:
        """Gradients of `amp.scale(loss)`, divided by its scale.

        A non-finite value counts as an overflow of the next `scale_loss` with this `loss_id`, even if the loss computed
        from it is finite, for example after a clamp: the step is skipped and the scale falls.

        Args:
            gradients: from `torch.autograd.grad`: a tuple in which an entry may be None, a list, or one tensor.
            loss_id: as passed to `scale`.

        Returns:
            Tensors of the given shapes in a container of the given kind, in the graph: float64 for float64, else
            float32. The argument itself if not enabled.

        Raises AmpStateError if `scale` was not called after the last `scale_loss` of this `loss_id`, which may have
        changed the scale; AmpTypeError or AmpIndexError. No host sync.
        """
        policy = self._initialized_policy("unscale")
        return by_hand.unscaled(self._scaling, gradients, loss_id) if policy.enabled else gradients

    def master_params(self, optimizer: Optimizer | LARC) -> Iterator[nn.Parameter]:
        """Iterate over the weights that `optimizer` steps: masters where there are some, else its parameters.

        Masters show unscaled FP32 gradients until the step: the same tensors as the parameters' own `.grad`. The
        optimizer need not have been initialized. No host sync.

        Raises AmpTypeError at the call, not at the first iteration, for anything but an optimizer.
        """
        params = master_params(optimizer)
        record = self.records.get(inner_of(optimizer))
        if record is not None:
            record.settle()
        if record is None or record.rows.is_shown:
            return params
        self.records.close_into(record)
        record.follow_writes(rounds=not record.is_in_body)
        record.hand_out()
        return iter(record.rows.shown_weights())

    @contextmanager
    def on_masters(self, optimizer: Optimizer | LARC) -> Iterator[None]:
        """A context in which the optimizer's groups and state have its FP32 masters, for code that writes weights.

            with amp.on_masters(optimizer):
                optimizer.eval()                 # schedulefree; or a perturbation, an average

        Masters show unscaled FP32 gradients. At the end the groups have the model's parameters again, into which the
        masters are rounded. No effect where there are no masters. Raises AmpTypeError for an optimizer that was not
        passed to `initialize`.
        """
        if self._is_disabled:
            yield
            return
        with self._initialized.on_masters(self._initialized.record_of(optimizer)):
            yield

    def clip_grad_norm_(
        self,
        optimizer: Optimizer | LARC | Tensor | Iterable[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> Tensor:
        """Clip the gradients that an optimizer steps, between `scale_loss` and `step`.

        Where one check saw all gradients and nobody wrote since, and with a norm_type of 2 or infinity, its norm is
        taken. Gradients beside masters are then clipped by the step, or by `master_params`, and a write into them
        before, such as another backward's, is an error; all others are multiplied at once. Otherwise this is
        torch.nn.utils.clip_grad_norm_, with norms of half gradients in FP32.

        Args:
            optimizer: an optimizer, initialized or not; or one parameter or an iterable of parameters or masters.
            max_norm: in the unit of the unscaled gradients.
            norm_type: as in torch.
            error_if_nonfinite: raise RuntimeError if the norm is not finite. Waits for the device.

        Returns:
            The norm before clipping: float32, shape []. No host sync without `error_if_nonfinite`.

        Raises AmpStateError at a level that scales for half gradients of a backward outside of `scale_loss`.
        """
        clipped = self._clipped(optimizer, "clip_grad_norm_", "max_norm")
        return clipping.clip_grad_norm_(clipped, max_norm, norm_type, error_if_nonfinite, self.records.look_to_clip)

    def clip_grad_value_(self, optimizer: Optimizer | LARC | Tensor | Iterable[Tensor], clip_value: float) -> None:
        """Clip each element of the gradients that an optimizer steps, between `scale_loss` and `step`.

        Args:
            optimizer: an optimizer or parameters, as `clip_grad_norm_` takes them.
            clip_value: clamps elements to [-clip_value, clip_value], in the unit of the unscaled gradients.

        Clips at once, in the type of `.grad`. No host sync. Raises AmpStateError as `clip_grad_norm_`.
        """
        clipped = self._clipped(optimizer, "clip_grad_value_", "clip_value")
        clipping.clip_grad_value_(clipped, clip_value, self.records.look_to_clip)

    def _clipped(self, given: Any, function: str, limit: str) -> clipping.Clipped:
        """Return the gradients of an optimizer or of parameters, for a clipping function."""
        params = arguments.as_parameters(given)
        if params is None:
            arguments.check_has_groups(given, function, f", {limit}")
            clipped = clipping.of_optimizer(given.param_groups, self._initialized.record_to_clip(inner_of(given)))
        else:
            clipped = clipping.of_parameters(params, self.records.all)
        for one in clipped.involved:
            self.records.close_into(one)
            one.look_for_parameters()
        return clipped

    def averaged_model(
        self,
        model: nn.Module,
        optimizer: Optimizer | LARC | Sequence[Optimizer | LARC] | None = None,
        device: int | torch.device | None = None,
        avg_fn: AvgFn | None = None,
        multi_avg_fn: MultiAvgFn | None = None,
        use_buffers: bool = False,
    ) -> AveragedModel:
        """torch.optim.swa_utils.AveragedModel in FP32, which follows the masters, at any level.

            averaged = amp.averaged_model(model, optimizer, multi_avg_fn=get_ema_multi_avg_fn(0.9999))
            ...
            optimizer.step()
            averaged.update_parameters(model)

        Args:
            model: a model, a part of one, or a parallel wrapper that can be copied.
            optimizer: all optimizers that step its parameters: one, a list, or None.
            device: of the average.
            avg_fn: averages two tensors, as in torch's class; default: equal weights.
            multi_avg_fn: averages two lists of tensors, as in torch's class.
            use_buffers: average floating buffers too.

        Returns:
            A copy of the model in FP32, to evaluate, save and load as torch's. It does not refer to the engine, and
            works before `initialize` and after `close` too. The function casts of O1 and O4 reach it unless they are
            off: `amp.disable_casts()`.

        Raises AmpTypeError for an optimizer that was not passed to `initialize`. Allocates 4 bytes per parameter.
        """
        listed = list(optimizer) if isinstance(optimizer, tuple) else optimizer
        for one in arguments.as_optimizers(listed):
            if self.policy is not None and self.policy.enabled:
                self._initialized.record_of(one)
        return AveragedModel(model, device, avg_fn, multi_avg_fn, use_buffers)

    def casts(self) -> AbstractContextManager[None]:
        """A context in which functions are cast at O1 and O4, in this thread, also with `casts="model"`.

            with amp.casts():
                loss = criterion(head(features), target)

        Can be nested. It casts inside of kept modules too; `disable_casts` takes precedence. At other levels, and where
        functions are cast anyway, it has no effect. Functions that Python calls during a backward are not cast by it.
        """
        return self.function_casts.enabled()

    def disable_casts(self) -> AbstractContextManager[None]:
        """A context in which no function is cast, in any thread. Can be nested; no effect without O1 or O4."""
        return self.function_casts.disabled()

    def keep_float(self, module: M, keep: bool = True) -> M:
        """Keep `module` and all its submodules in FP32; `keep_float(module, False)` undoes this.

        Under O1 and O4, no function is cast in the forward of `module`, in the thread that runs it; float16 and
        bfloat16 inputs, in any containers, are cast to float32, and gradients flow through that cast. `keep_float` may
        be called before and after `initialize`, and a kept module may contain others. It has no effect while casts are
        off: at O0 and after `close`.

        At levels that cast the model (O2, O3, O5), call it before `initialize`: parameters and buffers of the module
        stay float32, as those of batch norms do, its inputs are cast to float32 and its outputs to the model's type. A
        parameter that the module shares with another module is float32 there, too.

        Args:
            module: must be called as `module(x)`, since `module.forward(x)` does not run its hooks. Listed functions in
                the `backward` of a custom autograd function are cast nevertheless.
            keep: False undoes it.

        Returns `module`. Raises AmpTypeError for anything but a module, and AmpStateError for a part of a model that
        is already cast. No host sync.
        """
        policy = self.policy
        if policy is not None and policy.cast_model_type in LOW_PRECISION and self._initialized.has_module(module):
            raise AmpStateError(
                f"{policy.opt_level} has cast this {type(module).__name__} with its model.  Call keep_float() before "
                "amp.initialize()."
            )
        kept = casting.keep_float(module, keep)
        self._initialized.kept_by_policy.discard(module)  # from now on `close` does not undo it
        return kept

    def last_step(self, optimizer: Optimizer | LARC | None = None) -> LastStep:
        """The outcome of the last `optimizer.step()`: skipped or not, at which loss scale, with which norm.

            last = amp.last_step()
            ...                                  # later, when the GPU has finished the step
            print(last.skipped, last.loss_scale, last.norm)

        Args:
            optimizer: needed if several are initialized.

        No host sync, but reading an attribute waits until the host knows the outcome. `last.flag` is a tensor on the
        device, != 0 if the step was skipped; `last.is_known` is True once the host knows. Raises AmpTypeError for an
        optimizer that was not passed to `initialize`, AmpStateError without one if not exactly one is initialized.
        """
        if self._is_disabled:
            return LastStep()
        if optimizer is None:
            found = self.records.optimizers
            if len(found) != 1:
                raise AmpStateError(
                    f"last_step() was called without an optimizer, and {len(found)} are initialized.  Type "
                    "amp.last_step(optimizer)."
                )
            optimizer = found[0]
        return self._initialized.record_of(optimizer).pending.last

    def step_scheduler(self, scheduler: LRScheduler, optimizer: Optimizer | LARC | None = None) -> int:
        """Call `scheduler.step()` once for each step of its optimizer that was not skipped.

            optimizer.step()
            amp.step_scheduler(scheduler)

        No host sync: on a GPU the host learns of a step an iteration or two later, and then steps the scheduler.

        Args:
            scheduler: of torch.optim.lr_scheduler, or any object with `step` and `optimizer`.
            optimizer: the optimizer to follow; default `scheduler.optimizer`.

        Returns:
            The number of scheduler steps: 0, 1, or more if the host has learned of several steps. Raises AmpTypeError
            for anything but a scheduler, and for an optimizer that was not passed to `initialize`.
        """
        found = getattr(scheduler, "optimizer", None) if optimizer is None else optimizer
        if not hasattr(scheduler, "step") or found is None:
            raise AmpTypeError(
                f"step_scheduler takes a scheduler that has an optimizer, not a {type(scheduler).__name__}.  Type for "
                "example amp.step_scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1000)), or pass optimizer=."
            )
        if self._is_disabled:
            scheduler.step()
            return 1
        if self.records.is_rehearsal:
            return 0
        pending = self._initialized.record_of(found).pending
        pending.hear(wait=False)
        # A new scheduler starts at the count before the last step.
        took_last = not pending.unheard and not pending.last.skipped
        before = max(0, pending.taken - took_last)
        followed = self._followed.get(scheduler, before)
        for _ in range(pending.taken - followed):
            scheduler.step()
        self._followed[scheduler] = pending.taken
        return pending.taken - followed

    def state_dict(
        self, destination: OrderedDict[str, Any] | None = None, *, format: ScalerFormat = "amp"
    ) -> OrderedDict[str, Any]:
        """`{"loss_scaler0": {"loss_scale": float, "unskipped": int, "dynamic": bool, ...}, ...}`; empty if not enabled.

        Waits for the device once per dynamic scaler. `model.state_dict()` saves the masters. `format="apex"` writes
        only two numbers per entry; "torch" is for one GradScaler, see `amp.convert_state_dict`.
        """
        policy = self._initialized_policy("state_dict")
        return scaler_state.pack_scalers(self.scalers, policy.opt_level, destination, format)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the loss scalers from a state that `state_dict`, apex or a GradScaler wrote, at any level.

        Static scales do not change; a dynamic scale continues a saved dynamic scale, and starts at its initial value
        otherwise. Raises AmpStateError for keys that belong to no loss scaler, after loading the others.
        """
        self._initialized_policy("load_state_dict")
        scaler_state.unpack_scalers(self.scalers, state_dict, lambda text: self.reporter.say(text, rank0=True))

    named_masters = staticmethod(by_name.named_masters)
    export_state_dict = staticmethod(by_name.export_state_dict)

    def training_state(
        self, model: nn.Module, optimizer: Optimizer | LARC | Sequence[Optimizer | LARC]
    ) -> TrainingState:
        """Model, optimizers and loss scalers as one object for torch.distributed.checkpoint.

            dcp.save({"training": amp.training_state(model, optimizer)}, checkpoint_id=folder)
            dcp.load({"training": amp.training_state(model, optimizer)}, checkpoint_id=folder)

        It holds FP32 weights, and the optimizers' state by the names of parameters. Save each checkpoint to a folder of
        its own: an interrupted save leaves neither the old checkpoint nor the new one.
        """
        self._initialized_policy("training_state")
        return TrainingState(model, optimizer, self)

    def save(self, path: str | os.PathLike[str], /, **objects: Any) -> None:
        """Write a checkpoint that is whole or absent, even if the process dies meanwhile; call it on one rank only.

            amp.save(path, model=model, optimizer=optimizer, scheduler=scheduler, epoch=epoch)

        Saves the `state_dict()` of each object that has one, in lists, tuples and dictionaries too, and other values
        as they are. The loss scalers are saved as "amp". torch.load(path) gives the dictionary.

        It writes the bytes, then their SHA-256, to a file beside `path`, syncs it to the disk and renames it to `path`.

        Raises AmpValueError for an object named "amp", AmpTypeError for values that torch.load(weights_only=True) would
        not load, and OSError of the operating system, for example if the disk is full; an earlier file stays as it was.
        Waits for the device.
        """
        if "amp" in objects:
            raise AmpValueError('amp.save() writes "amp", the loss scalers, itself.  Choose another name.')
        state = saved_objects.state_of(objects)
        if self.policy is not None:
            state["amp"] = self.state_dict()
        checkpoint_file.write_file(path, state)

    def load(self, path: str | os.PathLike[str], /, *, map_location: Any = "cpu", **objects: Any) -> dict[str, Any]:
        """Load a file of `save` into objects, all of them or none, and the loss scalers if `initialize` was called.

            rest = amp.load(path, model=model, optimizer=optimizer, scheduler=scheduler)
            epoch = rest["epoch"]

        Args:
            path: the file; nothing in it is executed.
            map_location: where tensors are loaded to before they are copied, as in torch.load.
            objects: under the names of `save`, in the same lists and dictionaries.

        Returns:
            All entries that were not loaded into an object: values, and states of objects that were not passed.

        Raises AmpFileError if the file is damaged, with the expected and the found contents, and AmpStateError,
        AmpTypeError or AmpValueError for states that do not fit. Every object then has its earlier state again, of
        which the host keeps a copy during the load. Waits for the device.
        """
        saved = checkpoint_file.read_file(path, map_location)
        if self.policy is not None and "amp" in saved:
            objects = {**objects, "amp": self}
        saved_objects.load_states(objects, saved, os.fspath(path))
        return {name: value for name, value in saved.items() if name not in objects}

    def step_was_skipped(self, optimizer: Optimizer | LARC) -> bool:
        """True if the last `optimizer.step()` was skipped. Waits for the device if the device made the decision.

        False if not enabled.
        """
        return False if self._is_disabled else self._initialized.record_of(optimizer).pending.skipped

    def close(self) -> None:
        """Undo everything; the engine can be used again.

        torch's functions are restored. Models get their own types again, with the exact values of FP32 masters, and
        lose every hook; optimizers lose theirs, and have their state in the types of these parameters.
        """
        with locks.install:
            self.records.refuse_inside("close")
            casting.discard_interrupted()
            self.function_casts.remove()
            try:
                self._initialized.release()
            finally:
                self.function_casts.discard_lists()
                self.policy, self._scaling.scalers = None, []

    def _initialized_policy(self, call: str) -> Policy:
        if self.policy is None:
            raise AmpStateError(
                f"amp.{call}() was called before amp.initialize(), so there are no loss scalers.  Call "
                "model, optimizer = amp.initialize(model, optimizer, opt_level=...) first."
            )
        return self.policy
