"""O0, O2, O3, O5: cast a model's parameters, buffers, inputs and outputs, and keep its batch norms in FP32."""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from amp_engine.casting.forward_casts import (
    ForwardCasts,
    cast_forward,
    casts_of,
    has_parameter_of,
    is_called_from_outside,
    is_cast_at_forward,
    parts_of,
    restore_class,
)
from amp_engine.casting.inputs import Arguments, Inputs
from amp_engine.casting.keep_float import cast_functions_in, is_kept, kept_modules, remove_hooks
from amp_engine.casting.one_type import is_layer
from amp_engine.errors import AmpStateError
from amp_engine.ground.containers import cast_tensors
from amp_engine.ground.distributed import fsdp2_param_dtypes, is_any_sharded, is_fsdp2, is_sharded
from amp_engine.ground.dtypes import LOW_PRECISION, is_low_precision
from amp_engine.ground.dynamo import part_of_a_graph
from amp_engine.ground.torch_private import COMPILED, BatchNormBase
from amp_engine.initialization.as_it_came import came_in_half, declared_tensors, tensors_in_half
from amp_engine.initialization.half_averages import look_at_writes, note_writes, warn_of_low_precision_average
from amp_engine.initialization.state_dict import (
    fill_masters,
    forget_types,
    hook_children,
    hook_model,
    keep_incoming,
    save_float32,
)
from amp_engine.stepping.rows import round_written


class _CastHook:
    """A hook that `torch.jit.script` cannot compile, because it would need the types of one `forward`."""

    @property
    def __globals__(self) -> Any:
        """Only `torch.jit.script` reads this. Raises AmpStateError."""
        raise AmpStateError(
            "torch.jit.script cannot compile the hooks by which amp.initialize casts what goes into a model and what "
            "comes out.  Call torch.jit.trace(model, example_inputs), which records the casts, or amp.close() before "
            "torch.jit.script(model), which gives the model its own types back."
        )


class CastInputs(_CastHook):
    """Forward pre-hook: every floating tensor among the arguments becomes `dtype`. Picklable."""

    __name__ = "cast_inputs"  # torch.jit reads the names of hooks

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Cast arguments."""
        return cast_tensors(args, self.dtype), cast_tensors(kwargs, self.dtype)


class CastOutputs(_CastHook):
    """Forward hook: every floating tensor in the result becomes `dtype`. Picklable."""

    __name__ = "cast_outputs"

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Cast the result."""
        return cast_tensors(output, self.dtype)


class CastModelInputs(CastInputs):
    """Cast the inputs of a model whose `forward` was assigned to the instance, and so does not cast.

    A deepcopy of a model copies its hooks, so `__deepcopy__` can warn of a moving average in low precision.
    """

    def __init__(self, dtype: torch.dtype, inputs: Inputs, arguments: Arguments) -> None:
        super().__init__(dtype)
        self._inputs, self._arguments = inputs, arguments

    def __deepcopy__(self, memo: dict[int, Any]) -> CastModelInputs:
        if self.dtype in LOW_PRECISION:
            warn_of_low_precision_average(self.dtype)
        return type(self)(self.dtype, copy.copy(self._inputs), self._arguments)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Cast arguments."""
        if is_cast_at_forward(module):
            return args, kwargs
        return self._inputs.cast(self.dtype, self._arguments, args, kwargs)


class CastModelOutputs(CastOutputs):
    """Cast the outputs of a model whose `forward` was assigned to the instance, and so does not cast."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Cast the result."""
        return output if is_cast_at_forward(module) else super().__call__(module, args, output)


class CastKeptOutputs(CastOutputs):
    """Cast the outputs of a kept module to the model's type, except in calls from outside of the model."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Cast the result."""
        casts = casts_of(module)
        if casts is not None and casts.of_part and is_called_from_outside():
            return output
        return super().__call__(module, args, output)


for _hook in (CastInputs, CastOutputs, CastModelInputs, CastModelOutputs, CastKeptOutputs):
    part_of_a_graph(_hook.__call__)


class CastModel:
    """Casts one model, and undoes that.

    `forward` casts, so all hooks see inputs before their cast and outputs after theirs. A part casts only in calls from
    outside of the model. If the instance has its own `forward`, the model's last forward pre-hook and its first forward
    hook cast instead.

    Args:
        model: changed in place; its parameters stay the same objects.
        dtype: of parameters, buffers (see `cast_targets`) and inputs; None leaves all three alone.
        keep_batchnorm_fp32: affine batch norms (BatchNormNd, SyncBatchNorm) are float32, not `dtype`. What was passed
            to `keep_float` is float32 in any case.
        inputs: casts the inputs, or some of them.
        output_dtype: of floating outputs; None leaves them alone.
        saves_float32: True if `state_dict` has FP32 values, and loading them is exact, also without a cast to half.
        casts_functions: True if functions are cast inside of the forwards of the model and its parts.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        dtype: torch.dtype | None,
        keep_batchnorm_fp32: bool,
        inputs: Inputs,
        output_dtype: torch.dtype | None,
        saves_float32: bool,
        casts_functions: bool,
    ) -> None:
        self._model = weakref.ref(model)
        # The types in which tensors came: of those that were cast, and by name, for buffers that are replaced.
        self._came = WeakIdKeyDictionary()
        self._came_named = {name: tensor.dtype for name, tensor in _tensors(model)}
        self._handles: list[RemovableHandle] = []
        # Each module whose forward casts, its casts, and the casts that it had before.
        self._cast_modules: list[tuple[weakref.ref[nn.Module], ForwardCasts, ForwardCasts | None]] = []
        try:
            computes = None
            if dtype in LOW_PRECISION or saves_float32:
                self._handles += hook_model(model, saves_float32)
            if dtype is not None:
                targets = cast_targets(model, dtype, keep_batchnorm_fp32)
                came = {id(tensor): tensor.dtype for tensor, to in targets if tensor.dtype is not to}
                replaced = {id(before): after for before, after in _cast_each(model, targets)}
                for tensor, _ in targets:
                    if id(tensor) in came:
                        self._came[replaced.get(id(tensor), tensor)] = came[id(tensor)]
                if not is_kept(model) and not fsdp2_param_dtypes(model):  # FSDP2's policy casts them
                    computes = dtype
                    hook = CastModelInputs(dtype, inputs, Arguments.of_module(getattr(model, COMPILED, model)))
                    self._handles.append(model.register_forward_pre_hook(hook, with_kwargs=True))
                    self._handles += _cast_around_kept(model, dtype)
            for half in fsdp2_param_dtypes(model) & set(LOW_PRECISION) if saves_float32 else ():
                self._handles += _cast_around_kept(model, half)
            if saves_float32:
                self._handles.append(model.register_forward_pre_hook(round_written, prepend=True))
                if dtype in LOW_PRECISION:
                    look_at_writes(model)
                    self._handles.append(model.register_forward_pre_hook(note_writes))
            if output_dtype is not None:
                self._handles.append(model.register_forward_hook(CastModelOutputs(output_dtype), prepend=True))
            keeps_half = computes is not None and came_in_half(model)
            casts = ForwardCasts(computes, output_dtype, casts_functions, keeps_half=keeps_half, of_model=inputs)
            of_part = replace(casts, of_part=True)
            casts_already = computes is not None and casts_of(model) == of_part  # as part of a model like this one
            if (computes is not None or output_dtype is not None) and not is_fsdp2(model) and not casts_already:
                is_typed = computes is not None and has_parameter_of(model, dtype)
                self._cast_forward(model, replace(casts, of_typed=is_typed))
            if computes in LOW_PRECISION:
                for module, is_outermost in fp32_islands(model):
                    to = computes if is_outermost else None
                    self._cast_forward(module, ForwardCasts(torch.float32, to, of_island=True, of_model=inputs))
            if casts_functions:
                self._handles += cast_functions_in(model)
            if casts_functions or (computes is not None and self._cast_modules):
                for part in dict.fromkeys(parts_of(model)):
                    before = casts_of(part)
                    if before is None or before.of_part or before.inputs is not None:
                        is_compiled = part is getattr(model, COMPILED, None)  # called as the model is
                        self._cast_forward(part, replace(of_part, keeps_half=False) if is_compiled else of_part)
        except BaseException:
            self.remove_hooks()
            raise

    def _cast_forward(self, module: nn.Module, casts: ForwardCasts) -> None:
        self._cast_modules.append((weakref.ref(module), casts, casts_of(module)))
        cast_forward(module, casts)

    @property
    def model(self) -> nn.Module | None:
        """The model, unless it was garbage collected."""
        return self._model()

    @property
    def is_gone(self) -> bool:
        """True if the model and all of its parts were garbage collected."""
        return self.model is None and not self._parts()

    def _parts(self) -> list[nn.Module]:
        return [module for ref, _, _ in self._cast_modules if (module := ref()) is not None]

    def take_over(self, earlier: CastModel) -> None:
        """Replace `earlier` of the same model: remove its hooks, and restore its original types in `undo`."""
        before = {id(ref()): before for ref, _, before in earlier._cast_modules}
        self._cast_modules = [(ref, casts, before.get(id(ref()), own)) for ref, casts, own in self._cast_modules]
        earlier.remove_hooks()
        self._came.update(earlier._came)
        self._came_named.update(earlier._came_named)

    def undo(self) -> None:
        """Remove the hooks and restore the original type of each tensor that is still in the model.

        So it does for parts that outlive the model.
        """
        parts = self._parts()
        self.remove_hooks()
        model = self.model  # held: another thread may let go of it meanwhile
        if model is None:
            for part in parts:
                came = [(tensor, self._came.get(tensor)) for _, tensor in _tensors(part)]
                came += [one for module in part.modules() for one in tensors_in_half(module)]
                _cast_each(part, [(tensor, dtype) for tensor, dtype in came if dtype is not None])
                forget_types(part)
            return
        _remove(model, lambda hook: any(hook is ours for ours in _HOOK_FUNCTIONS))  # of joined parts
        if not is_any_sharded(model):  # the wrapper decides the types of shards
            named = self._came_named
            came = [(t, self._came.get(t) or named.get(name) or named.get(_plain(name))) for name, t in _tensors(model)]
            _cast_each(model, [(tensor, dtype) for tensor, dtype in came if dtype is not None])

    def remove_hooks(self) -> None:
        """Remove the hooks and leave the types."""
        while self._handles:
            self._handles.pop().remove()
        if (model := self.model) is not None:
            forget_types(model)
        while self._cast_modules:
            ref, casts, before = self._cast_modules.pop()
            module = ref()
            if module is not None and casts_of(module) is casts:
                restore_class(module)
                if before is not None:
                    cast_forward(module, before)


def give_half_back(module: nn.Module) -> None:
    """Give a module's own tensors the half types in which they came, if it is in no model any more."""
    if not is_any_sharded(module):
        _cast_each(module, list(tensors_in_half(module)))
    forget_types(module)


def without_casts(model: nn.Module) -> bool:
    """Remove from a copy of a cast model or part the casts that came with it. Returns whether inputs were cast."""
    casts = casts_of(model)
    removed = _remove(
        model, lambda hook: isinstance(hook, (CastInputs, CastOutputs)) or any(hook is ours for ours in _HOOK_FUNCTIONS)
    )
    return (casts is not None and casts.inputs is not None) or any(isinstance(hook, CastInputs) for hook in removed)


def _remove(model: nn.Module, is_ours: Callable[[Any], bool]) -> list[Any]:
    """Remove the hooks that `is_ours` accepts, and all casts, from all modules of `model`; return the hooks."""
    removed = []
    for module in model.modules():
        restore_class(module)
        removed += remove_hooks(module, is_ours)
    return removed


def is_cast(model: nn.Module) -> bool:
    """True if a level has cast `model`, or a part of it, and its casts are still there."""
    if any(casts_of(module) is not None for module in model.modules()):
        return True
    hooks = (h for m in model.modules() for h in (*m._forward_pre_hooks.values(), *m._forward_hooks.values()))
    return any(isinstance(hook, (CastInputs, CastOutputs)) for hook in hooks)


_HOOK_FUNCTIONS = (
    round_written,
    note_writes,
    hook_children,
    save_float32,
    keep_incoming,
    fill_masters,
)


def remember(models: Sequence[nn.Module]) -> Callable[[], None]:
    """Keep the storage of every parameter, gradient and buffer; the returned function restores it, bit for bit."""
    params = [
        (p, p.data, p.grad_dtype, p.grad, None if p.grad is None else p.grad.data)
        for m in models
        for p in m.parameters()
    ]
    modules = [module for m in models for module in m.modules() if not isinstance(module, torch.jit.ScriptModule)]
    buffers = [(module._buffers, dict(module._buffers)) for module in modules]

    def put_back() -> None:
        for param, data, grad_dtype, grad, grad_data in params:
            param.grad = None  # a gradient and its parameter change type one after the other
            param.data = data
            if param.grad_dtype != grad_dtype:
                param.grad_dtype = grad_dtype
            if grad is not None and grad_data is not None:
                grad.data = grad_data
                param.grad = grad
        for live, before in buffers:
            for name, buffer in before.items():
                live[name] = buffer

    return put_back


def cast_targets(model: nn.Module, dtype: torch.dtype, keep_batchnorm_fp32: bool) -> list[tuple[Tensor, torch.dtype]]:
    """Each floating parameter and buffer, and its target type.

    If a parameter came in low precision, the model says itself what stays FP32: only low precision is cast. A model
    that came in FP32 is cast as by `Module.to`, but for parameters that it names itself and for `fp32_islands`.

    With `keep_batchnorm_fp32`, affine batch norms become (usually: stay) float32. Norms without
    parameters and layer, group and instance norms are cast, as apex did. Kept modules become float32, too.
    """
    kept = {
        id(tensor)
        for module in model.modules()
        if keep_batchnorm_fp32 and isinstance(module, BatchNormBase) and module.affine
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    } | {id(tensor) for module, _ in kept_modules(model) for tensor in [*module.parameters(), *module.buffers()]}
    stay: set[int] = set()
    if dtype in LOW_PRECISION:
        islands = [*_decompositions(model), *(module for module, _ in fp32_islands(model))]
        kept |= {id(buffer) for island in islands for buffer in island.buffers()}
        if came_in_half(model):
            stay = {id(tensor) for _, tensor in _tensors(model) if not is_low_precision(tensor)}
        else:
            stay = {id(tensor) for _, tensor in declared_tensors(model)}
    return [(t, torch.float32 if id(t) in kept else t.dtype if id(t) in stay else dtype) for _, t in _tensors(model)]


def fp32_islands(model: nn.Module) -> Iterator[tuple[nn.Module, bool]]:
    """Yield each module with buffers alone of a model that came in FP32, and True if it is inside of none that is FP32.

    What they compute in half is far off: tables of frequencies and positions, means and variances, averages. They are
    no layers of torch, whose buffers belong to their inputs.
    """
    if came_in_half(model):
        return
    within = {one for module, _ in kept_modules(model) for one in module.modules()}
    for module in model.modules():  # parents first
        if module is not model and _computes_with_buffers_alone(module):
            yield module, module not in within
            within.update(module.modules())


def _decompositions(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the parametrizations whose decompositions and power iterations lose their digits in half."""
    kinds = (parametrizations._Orthogonal, parametrizations._SpectralNorm)
    yield from (module for module in model.modules() if isinstance(module, kinds))


def _computes_with_buffers_alone(module: nn.Module) -> bool:
    if is_layer(module) or isinstance(module, torch.jit.ScriptModule):  # whose class gives no `forward`
        return False
    return (
        type(module).forward is not nn.Module.forward
        and "forward" not in vars(module)
        and any(buffer.is_floating_point() for buffer in module.buffers(recurse=False))
        and next(module.parameters(), None) is None
    )


def _cast_around_kept(model: nn.Module, dtype: torch.dtype) -> Iterator[RemovableHandle]:
    """Make kept modules and decompositions accept any type, and return `dtype` or the type of the weight."""
    for module, is_outermost in kept_modules(model):
        yield module.register_forward_pre_hook(CastInputs(torch.float32), with_kwargs=True)
        if is_outermost:
            yield module.register_forward_hook(CastKeptOutputs(dtype), prepend=True)
    for weights in model.modules():
        originals = [*weights.parameters(recurse=False)] if isinstance(weights, ParametrizationList) else []
        for module in _decompositions(weights) if any(map(is_low_precision, originals)) else ():
            yield module.register_forward_pre_hook(CastInputs(torch.float32), with_kwargs=True)
            yield module.register_forward_hook(CastOutputs(originals[0].dtype), prepend=True)


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every name of every floating parameter and buffer."""
    for name, tensor in chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    ):
        if tensor.is_floating_point():
            yield name, tensor


def _plain(name: str) -> str:
    """Return the name that a parameter had before its module was parametrized."""
    return re.sub(r"parametrizations\.(\w+)\.original\d*$", r"\1", name)


def _cast_each(model: nn.Module, targets: Sequence[tuple[Tensor, torch.dtype]]) -> list[tuple[Tensor, Tensor]]:
    """Cast each tensor, in place if it is a parameter; return each buffer that was replaced, and what replaced it."""
    # `targets` keeps the tensors alive, so that no id is reused while it is looked up.
    by_id = {id(tensor): dtype for tensor, dtype in targets}
    of_grads = [(t.grad, dtype) for t, dtype in targets if t.is_leaf and t.grad is not None]
    by_id |= {id(grad): dtype for grad, dtype in of_grads}
    if any(is_sharded(t) for t, _ in targets) and all(t.dtype is by_id[id(t)] for t, _ in [*targets, *of_grads]):
        return []  # torch would swap each DTensor for itself, which it cannot while a graph has it
    made: dict[int, tuple[Tensor, Tensor]] = {}

    def cast(tensor: Tensor) -> Tensor:
        if id(tensor) not in by_id:
            return tensor
        if isinstance(tensor, nn.Parameter):
            return tensor.to(by_id[id(tensor)])
        # A buffer with several names stays one tensor.  Gradients come here, too.
        return made.setdefault(id(tensor), (tensor, tensor.to(by_id[id(tensor)])))[1]

    follow = [t for t, _ in targets if t.is_leaf and t.grad_dtype == t.dtype]
    # Like Module.to, but with a type per tensor: parameters stay the same objects.
    with _parameters_stay_objects():
        model._apply(cast)
    for tensor in follow:
        if tensor.grad_dtype != tensor.dtype:  # somebody had set it, as an earlier `close` does
            tensor.grad_dtype = tensor.dtype
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()  # cuDNN wants its weights in one chunk again
    return [*made.values()]


@contextmanager
def _parameters_stay_objects() -> Iterator[None]:
    """Have torch give parameters new memory, also where a user asked it for new parameters, which no optimizer has."""
    future = torch.__future__
    overwrites, swaps = (
        future.get_overwrite_module_params_on_conversion(),
        future.get_swap_module_params_on_conversion(),
    )
    future.set_overwrite_module_params_on_conversion(False)
    future.set_swap_module_params_on_conversion(False)
    try:
        yield
    finally:
        future.set_overwrite_module_params_on_conversion(overwrites)
        future.set_swap_module_params_on_conversion(swaps)
