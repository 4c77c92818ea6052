"""Engine: owns policy, casts, scalers and optimizers, and can take it all back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from amp_engine import casting
from amp_engine.casting import EngineCasts, patcher
from amp_engine.errors import AmpStateError, AmpTypeError
from amp_engine.explaining import Explaining
from amp_engine.ground.dtypes import LOW_PRECISION
from amp_engine.initialization import arguments, keep_by_name
from amp_engine.initialization.arguments import InitializeOptions, Models, Optimizers
from amp_engine.initialization.initialized import Initialized, master_params
from amp_engine.initialization.request import checked
from amp_engine.levels import levels, report
from amp_engine.levels.policy import Policy
from amp_engine.levels.policy_file import RunPolicy, takes_policy
from amp_engine.levels.scale_rule import DEFAULT_MAX_LOSS_SCALE, DynamicLossScale
from amp_engine.optimizers import LARC, inner_of
from amp_engine.page import markup
from amp_engine.saving.averages import AveragedModel, AvgFn, MultiAvgFn
from amp_engine.saving.of_engine import Saving
from amp_engine.scaling import by_hand
from amp_engine.scaling.by_hand import Gradients
from amp_engine.scaling.losses import Scaling
from amp_engine.scaling.scaler import LossScaler
from amp_engine.stepping.clipping import clip_grad_norm_
from amp_engine.stepping.scaled_backwards import Disabled
from amp_engine.stepping.stepped import SteppedOptimizer

if TYPE_CHECKING:
    from typing_extensions import Unpack

M = TypeVar("M", bound=nn.Module)


class Engine(Saving, Explaining):
    """Mixed precision for some models and optimizers, without module-level state.

        with Engine() as engine:
            model, optimizer = engine.initialize(model, optimizer, opt_level="O2")
            for x, y in batches:
                with engine.scale_loss(loss_fn(model(x), y), optimizer) as scaled_loss:
                    scaled_loss.backward()
                optimizer.step()
                optimizer.zero_grad()

    `initialize` may be called again with further models and optimizers: the newest policy and scalers
    count, what was initialized before stays so. Leaving the context is `close()`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.policy: Policy | None = None  # None before initialize and after close
        self.reporter = report.Reporter()
        self.min_loss_scale: float | None = None
        self.max_loss_scale: float = DEFAULT_MAX_LOSS_SCALE
        self.hard_override = False  # whether `initialize` says what does not fit a level, in place of raising it
        self.allow_incoming_model_not_fp32 = False  # whether `initialize` takes half weights without masters everywhere
        self.function_casts = EngineCasts(self.reporter.say)
        self._scaling = Scaling()
        self._initialized = Initialized(self._scaling, self.function_casts, self.reporter)
        self.backwards = self._initialized.backwards

    @property
    def scalers(self) -> list[LossScaler]:
        """One for each loss_id; empty before `initialize` and after `close`."""
        return self._scaling.scalers

    @scalers.setter
    def scalers(self, value: list[LossScaler]) -> None:
        self._scaling.scalers = value

    def __repr__(self) -> str:
        if self.policy is None:
            return "<Engine: initialize() was not called>"
        if not self.policy.enabled:
            return "<Engine: enabled=False>"
        optimizers = ", ".join(type(optimizer).__name__ for optimizer in self._initialized.optimizers)
        scale = str(self.policy.loss_scale)
        count = f"{len(self.scalers)} losses" if len(self.scalers) != 1 else "1 loss"
        return f"<Engine at {self.policy.opt_level}: steps {optimizers or 'no optimizer'}; {count}, loss scale {scale}>"

    def _repr_html_(self) -> str:
        return markup.fragment(markup.preformatted(repr(self)))

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        master_weights: bool | Literal["split"] | None = None,
        loss_scale: float | str | DynamicLossScale | None = None,
        cast_model_outputs: torch.dtype | str | None = None,
        num_losses: int = 1,
        verbosity: int = 1,
        min_loss_scale: float | None = None,
        max_loss_scale: float = DEFAULT_MAX_LOSS_SCALE,
        *,
        skip_on_overflow: bool = False,
        allow_banned: bool = False,
        adopt_data_writes: bool = False,
        process_group: ProcessGroup | None = None,
        moment_dtype: torch.dtype | str | None = None,
        casts: Literal["everywhere", "model"] = "everywhere",
        policy: str | os.PathLike[str] | RunPolicy | None = None,
    ) -> Any:
        """Prepare models and optimizers for training at `opt_level`. They are changed in place and returned.

        Args:
            models: a module, or a list of modules; on any device. At O1 and O4 parameters that an optimizer steps are
                FP32, unless `master_weights` is True; elsewhere in any floating type.
            optimizers: an optimizer, or LARC or a kind of Lookahead around one; a list of them; or None.
            enabled: False returns everything untouched and makes `scale_loss` yield the loss as it is.
            opt_level: "O0" FP32; "O1" cast functions; "O2" half model, FP32 batch norm and masters; "O3"
                pure half; "O4", "O5" are O1, O2 in bfloat16. Sets the defaults of the properties below.
            cast_model_type: type of parameters, floating buffers and inputs; False leaves the model alone.
            patch_torch_functions: cast arguments of listed functions; set by O1 and O4 only.
            keep_batchnorm_fp32: keep affine batch norms in FP32; "True" and "False" are taken too.
            master_weights: step FP32 copies of low-precision parameters, at O1 and O4 of those that arrive in half;
                "split" (O5): bfloat16 parameters and the 16
                bits that rounding took from each, 2 bytes a parameter less.
            loss_scale: "dynamic"; a DynamicLossScale with numbers of your own; "auto", which follows the largest
                gradient that was seen; or a static scale (a number, or a string with one).
            cast_model_outputs: type of floating model outputs; default float32 where the model is cast.
            num_losses: how many scalers there are for `scale_loss(..., loss_id=i)`.
            verbosity: 0 silent, 1 apex's messages, 2 every cast, and each skip on every rank, as well.
            min_loss_scale: floor of dynamic scales; None means 2**-24.
            max_loss_scale: ceiling of dynamic scales.
            skip_on_overflow: skip a step whose gradients overflowed under a static scale too.
            allow_banned: run `binary_cross_entropy` in FP32 under O1 instead of refusing it.
            adopt_data_writes: have masters follow writes through `param.data`, at one more read of both a step.
            process_group: the ranks that agree on overflows, where neither DistributedDataParallel nor DTensors tell:
                FullyShardedDataParallel, ZeroRedundancyOptimizer, stages of a pipeline.
            moment_dtype: torch.bfloat16 keeps Adam's moments in 2 bytes each in place of 4, rounded by chance.
            casts: where O1 and O4 cast functions: "everywhere" in the process, as apex did; "model" in forwards of
                `models` and their parts, in the thread that calls them, and in `with amp.casts():`. What such a
                forward gives is FP32, unless `cast_model_outputs` says otherwise.
            policy: a RunPolicy, or the path of its file: the level, modules that `close` gives back kept in FP32, and
                other arguments, unless they are passed here.

        Returns:
            As apex: the model or list of models; with `optimizers` given a pair, an empty list included.

        Raises AmpStateError, AmpTypeError or AmpValueError, with everything as it was before the call.
        """
        with patcher.changing(), ExitStack() as undo:  # one thread at a time, here and in `close`
            self.backwards.refuse_inside("initialize")
            casting.discard_interrupted()
            if not enabled:
                self.reporter.verbosity = verbosity
                self.policy, self.scalers = levels.DISABLED, []
                self.function_casts.end_of(models, "enabled=False")
                return models if optimizers is None else (models, optimizers)

            given = {
                "cast_model_type": cast_model_type,
                "keep_batchnorm_fp32": keep_batchnorm_fp32,
                "master_weights": master_weights,
                "loss_scale": loss_scale,
                "cast_model_outputs": cast_model_outputs,
                "min_loss_scale": min_loss_scale,
                "max_loss_scale": max_loss_scale,
                "moment_dtype": moment_dtype,
                "casts": casts,
            }
            assert policy is None or isinstance(policy, RunPolicy)  # it says nothing else any more
            names = () if policy is None else tuple(policy.keep_float)
            kept = undo.enter_context(keep_by_name.kept(models, names, opt_level))
            given["patch_torch_functions"] = patch_torch_functions
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
            decided, bounds = request.policy, (request.min_loss_scale, request.max_loss_scale)
            num_losses = arguments.check_num_losses(num_losses)
            if decided.patch_torch_functions:
                self.function_casts.check_environment()
                self.function_casts.check_where(request.casts_everywhere)
            self._initialized.refuse_known(request.optimizers, request.wrappers)

            self.reporter.verbosity = verbosity
            self.reporter.say_banner(report.initialization(request.defaults, decided))

            self._initialized.add(request, adopt_data_writes)
            if self.policy is None:
                self.overflows.begin()
            self.policy = decided
            self.min_loss_scale, self.max_loss_scale = bounds
            self._scaling.begin(decided.loss_scale, num_losses, *bounds, skip_on_overflow)
            self.function_casts.follow(
                decided, request.models, allow_banned, verbosity == 2, everywhere=request.casts_everywhere
            )
            if emulated := arguments.emulated_on_cpu(request.models, decided):
                self.reporter.say_once(report.emulated_on_cpu(str(decided.opt_level), emulated))
            if found := arguments.zero_eps(request.optimizers, decided):
                self.reporter.say_once(report.EPS_IS_ZERO.format(optimizer=found[0], eps=found[1]))
            self.reporter.end_banner()
            self._initialized.kept_by_policy.update(kept)
            return models if optimizers is None else (models, optimizers)

    def scale_loss(
        self,
        loss: Tensor,
        optimizers: Optimizer | LARC | Iterable[Optimizer | LARC] | None,
        loss_id: int = 0,
        model: Any = None,
        delay_unscale: bool = False,
        delay_overflow_check: bool = False,
    ) -> AbstractContextManager[Tensor]:
        """A context that gives `loss.float() * scale`; on exit unscale the gradients and adjust the scale.

        Afterwards `.grad` of what `master_params(optimizer)` gives is unscaled and includes earlier backwards
        since the last step. An overflow makes the next `step()` of each listed optimizer do nothing.

        Args:
            loss: any shape, any floating type.
            optimizers: those whose parameters the loss reaches: one, or several, or none; None at a scale of 1 only.
            loss_id: which scaler.
            model: ignored, as in apex.
            delay_unscale: leave the gradients scaled; the next `scale_loss` without it unscales the sum.
            delay_overflow_check: leave the scale alone; an overflow counts at the next check of this scaler.

        Raises AmpStateError, AmpTypeError or AmpIndexError before the body is run. If the body raises,
        gradients are put back as they were at the entry; only what `delay_unscale` had left scaled is discarded, if
        the body ran a backward into it. No host sync.
        """
        del model
        if self.policy is None:
            raise AmpStateError(report.SCALE_LOSS_BEFORE_INITIALIZE)
        if not self.policy.enabled:
            return Disabled(loss)
        arguments.check_loss(loss, "scale_loss", "backward()")
        casting.discard_interrupted()
        self.function_casts.note_use(bool(self.policy.patch_torch_functions))
        scaler = self._scaling.scaler(loss_id)
        if optimizers is None and not scaler.is_identity:
            raise AmpTypeError(
                "scale_loss(loss, None) scales the loss, and names no optimizer whose gradients are to be unscaled.  "
                "Call amp.scale_loss(loss, optimizer); for gradients of inputs alone "
                "torch.autograd.grad(amp.scale(loss), inputs) and amp.unscale(gradients).  At a scale of 1, as O0 has "
                "it, None is taken."
            )
        listed = [] if optimizers is None else arguments.as_list(optimizers)
        stepped = list(dict.fromkeys(map(self._initialized.stepped_by, listed)))
        return self.backwards.of(loss, stepped, scaler, loss_id, delay_unscale, delay_overflow_check)

    def get_scale(self, loss_id: int = 0) -> Tensor:
        """The scale that the next backward of this loss uses, to log it: float32, shape [], a copy on its device.

        No host sync; `float(amp.get_scale())` is one. With several ranks it waits for their agreement on the last
        backward. 1 if not enabled.

        Raises AmpStateError before `initialize`, AmpIndexError for an unknown loss_id.
        """
        policy = self._initialized_policy("get_scale")
        return self._scaling.scaler(loss_id).snapshot().scale if policy.enabled else torch.ones(())

    def scale(self, loss: Tensor, loss_id: int = 0) -> Tensor:
        """`loss.float() * scale`, to call `torch.autograd.grad` on: for gradient penalties and other double backwards.

            gradients = torch.autograd.grad(amp.scale(loss), model.parameters(), create_graph=True)
            penalty = sum(g.square().sum() for g in amp.unscale(gradients))
            with amp.scale_loss(loss + penalty, optimizer) as scaled_loss:
                scaled_loss.backward()

        Args:
            loss: any shape, any floating type.
            loss_id: whose scale; that of the `scale_loss` that the gradients end up in.

        Returns:
            float32, in the shape of the loss, in its graph; the loss itself if not enabled. The scale is 1 at levels
            that scale no loss.

        Raises AmpStateError before `initialize`, AmpTypeError or AmpIndexError. No host sync.
        """
        policy = self._initialized_policy("scale")
        arguments.check_loss(loss, "scale", "torch.autograd.grad")
        return by_hand.scaled(self._scaling, loss, loss_id) if policy.enabled else loss

    def unscale(self, gradients: Gradients, loss_id: int = 0) -> Gradients:
        """Gradients of `amp.scale(loss)`, divided by its scale.

        A value that is not finite counts as an overflow of the next `scale_loss` with this `loss_id`, also if the loss
        made from it is finite, as behind a clamp: the step is skipped and the scale falls.

        Args:
            gradients: what `torch.autograd.grad` gave, a tuple in which an entry may be None, a list, or one tensor.
            loss_id: as passed to `scale`.

        Returns:
            The same shapes in a container of the same kind, in the graph: float32, or float64 where that was given. The
            argument itself if not enabled.

        Raises AmpStateError if `scale` was not called since a `scale_loss` of this `loss_id` was left, since the scale
        may have changed; AmpTypeError or AmpIndexError. No host sync.
        """
        policy = self._initialized_policy("unscale")
        return by_hand.unscaled(self._scaling, gradients, loss_id) if policy.enabled else gradients

    def master_params(self, optimizer: Optimizer | LARC) -> Iterator[nn.Parameter]:
        """Each parameter in the groups of `optimizer`: its masters where it has them.

        Between `scale_loss` and `step` their `.grad` is unscaled, so this is what to clip. The optimizer need not
        have been initialized. No host sync.

        Raises AmpTypeError, when it is called, for what is no optimizer.
        """
        params = master_params(optimizer)
        self._look_at_gathered(optimizer)
        return params

    def _look_at_gathered(self, optimizer: Optimizer | LARC) -> SteppedOptimizer | None:
        """The SteppedOptimizer of `optimizer`, after a look at gradients that are older than their place in it."""
        stepped = self._initialized.get(inner_of(optimizer))
        if stepped is not None:
            self.backwards.look_at_gathered(stepped)
        return stepped

    def clip_grad_norm_(
        self, optimizer: Optimizer | LARC, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip the gradients of `master_params(optimizer)`, between `scale_loss` and `step`.

        After one backward, and with a norm_type of 2 or infinity, nothing is read of masters: their norm was taken on
        the way, and the factor is applied in the step, or when a master's `.grad` is looked at. Gradients of
        float32 parameters, which anybody may write, are multiplied at once, and read once more unless torch tells that
        nobody wrote them (since 2.13, from the second call on). Otherwise this is torch.nn.utils.clip_grad_norm_.

        Args:
            optimizer: need not have been initialized.
            max_norm: in the unit of the unscaled gradients.
            norm_type: of the norm, as in torch.
            error_if_nonfinite: raise RuntimeError if the norm is not finite. Waits for the device.

        Returns:
            The norm before clipping: float32, shape []. No host sync otherwise.
        """
        arguments.check_has_groups(optimizer, "clip_grad_norm_", ", max_norm")
        stepped = self._look_at_gathered(optimizer)
        return clip_grad_norm_(optimizer.param_groups, stepped, max_norm, norm_type, error_if_nonfinite)

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
            model: a part of a model is fine, and so is a parallel wrapper that can be copied.
            optimizer: those that step its parameters, one or a list; None where there are none.
            device: where the average is.
            avg_fn: the average of two tensors, as torch's class takes it; without one, of equal weights.
            multi_avg_fn: the same of two lists.
            use_buffers: average floating buffers too.

        Returns:
            A copy of the model in FP32, without casts, to evaluate, save and load as torch's. It holds nothing of the
            engine: before `initialize` and after `close` it goes on.

        Raises AmpTypeError for an optimizer that was not passed to `initialize`. Allocates 4 bytes a parameter.
        """
        listed = list(optimizer) if isinstance(optimizer, tuple) else optimizer
        for one in arguments.as_optimizers(listed):
            if self.policy is not None and self.policy.enabled:
                self._initialized.stepped_by(one)
        return AveragedModel(model, device, avg_fn, multi_avg_fn, use_buffers)

    def casts(self) -> AbstractContextManager[None]:
        """A context in which functions are cast at O1 and O4, in this thread, also with `casts="model"`.

            with amp.casts():
                loss = criterion(head(features), target)

        Nests. Inside of a module that is kept in FP32 it casts; `disable_casts` wins over it. Elsewhere, and where
        functions are cast anyway, it changes nothing. Functions that Python calls in a backward are not inside.
        """
        return self.function_casts.enabled()

    def disable_casts(self) -> AbstractContextManager[None]:
        """A context in which no function is cast, in any thread. Nests; does nothing without O1 or O4."""
        return self.function_casts.disabled()

    def keep_float(self, module: M, keep: bool = True) -> M:
        """Keep `module`, with all that is in it, in FP32; `keep_float(module, False)` takes it back.

        Under O1 and O4, inside its forward no function is cast, in this thread, and float16 and bfloat16 inputs, in
        any containers, arrive as float32; gradients flow through that cast. It may be called before and after
        `initialize`, and a kept module may contain others. It does nothing while no casts are on: at O0, after `close`.

        Levels that cast the model (O2, O3, O5) want it before `initialize`: parameters and buffers of the module stay
        float32, as batch norms do, its inputs are cast to float32 and its outputs to the model's type. A parameter that
        it shares with a module outside is float32 there, too.

        Args:
            module: it must be called; `module.forward(x)` passes the hooks by. Listed functions in the `backward` of a
                custom autograd function are cast all the same.
            keep: False undoes it.

        Returns `module`. Raises AmpTypeError for anything but a module, and AmpStateError for a part of a model that
        is cast already. No host sync.
        """
        policy = self.policy
        if policy is not None and policy.cast_model_type in LOW_PRECISION and self._initialized.has_module(module):
            raise AmpStateError(
                f"{policy.opt_level} has cast this {type(module).__name__} with its model.  Call keep_float() before "
                "amp.initialize()."
            )
        kept = casting.keep_float(module, keep)
        self._initialized.kept_by_policy.discard(module)  # from now on the user's business
        return kept

    def look_after(self, optimizer: Optimizer, on_skip: Callable[[bool], None]) -> SteppedOptimizer:
        """Look after an optimizer whose losses and scalers are the caller's business, until `close`.

        Args:
            on_skip: called for each step that was skipped, with whether this is the first rank of those that agreed.

        Raises AmpStateError or AmpTypeError for what `initialize` would not take either.
        """
        return self._initialized.look_after_alone(optimizer, on_skip)

    def step_was_skipped(self, optimizer: Optimizer | LARC) -> bool:
        """Whether the last `optimizer.step()` was skipped. Waits for the device if that decided."""
        return self._initialized.stepped_by(optimizer).pending.skipped

    def close(self) -> None:
        """Take everything back; the engine can be used again.

        torch's functions are restored. Models get their own types again, with the exact values of the
        masters where those are FP32, and lose every hook; optimizers step their own parameters again, with their
        state in the types of these.
        """
        with patcher.changing():
            self.backwards.refuse_inside("close")
            casting.discard_interrupted()
            self.function_casts.remove()
            self._initialized.release()
            self.function_casts.discard_lists()
            self.policy, self.scalers = None, []
