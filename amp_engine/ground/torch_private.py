"""The private names of torch that amp_engine uses, which torch does not promise to keep.

No other file of the package imports or calls a private name of torch, so that tests/test_torch_private.py shows which
names a new torch broke. All of them worked in the versions of `SEEN_IN`. `torch._foreach_*` is documented, and not
listed here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._C._dynamo import eval_frame
from torch._compile import _disable_dynamo
from torch._functorch import config as _compiler_config
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

SEEN_IN = ("2.11.0", "2.13.0", "2.14.1")
"""The versions of torch that CI runs the tests on."""

_C: Any = torch._C


class PrivateName(NamedTuple):
    """A private name of torch.

    Attributes:
        name: its full name, or the name of an attribute of `owner`.
        purpose: the reason why amp_engine needs it.
        owner: a class of torch, or None for a name in a module.
    """

    name: str
    purpose: str
    owner: type | None = None


NAMES = (
    PrivateName("torch._lazy_clone", "a copy that takes no memory until one of the two is written"),
    PrivateName("torch._C._data_address", "where memory is, without asking to write it"),
    PrivateName("torch._C._get_dispatch_mode", "whether a call is made of fake tensors,"),
    PrivateName("torch._C._TorchDispatchModeKey", "which is a mode of this key"),
    PrivateName("torch._C._len_torch_dispatch_stack", "whether something traces an operator of ours"),
    PrivateName("torch._C._disabled_torch_dispatch_impl", "whether a tensor's class traces one"),
    PrivateName("torch._C._current_graph_task_id", "whether an operation is run by a backward"),
    PrivateName("torch._C._current_autograd_node", "whose backward it is"),
    PrivateName("torch._C._autograd._get_sequence_nr", "which node of the graph a forward belongs to"),
    PrivateName("torch.autograd.variable.Variable._execution_engine", "to be called when a backward has ended"),
    PrivateName("torch._C._is_any_autocast_enabled", "whether code is compiled to run as under torch.autocast:"),
    PrivateName("torch._C._DisableAutocast", "around which torch enters this"),
    PrivateName("torch._library.fake_impl.set_ctx_getter", "and this around the fake kernels of its operators"),
    PrivateName("torch._functorch.config._config", "to keep compiled graphs out of caches that cannot tell them apart"),
    PrivateName("torch._C._functorch.peek_interpreter_stack", "whether a cast is made inside of vmap, grad or jvp"),
    PrivateName("torch._C.DisableTorchFunctionSubclass", "to call a function from a tensor's __torch_function__"),
    PrivateName("torch._C.TensorBase", "the slots behind Tensor.data and the operators, past any subclass"),
    PrivateName("torch._C._dynamo.eval_frame", "to have Dynamo trace hooks as parts of a graph, and not alone"),
    PrivateName("torch._compile._disable_dynamo", "torch.compiler.disable, without importing Dynamo: a second"),
    PrivateName("torch._utils._flatten_dense_tensors", "apex_C.flatten"),
    PrivateName("torch._utils._unflatten_dense_tensors", "apex_C.unflatten"),
    PrivateName("torch.jit._builtins._find_builtin", "to show torch.jit.script patched functions"),
    PrivateName("torch.jit._builtins._register_builtin", "as the operators that they are"),
    PrivateName("torch.nn.modules.batchnorm._BatchNorm", "which modules are batch norms"),
    PrivateName("torch.utils._python_dispatch.TorchDispatchMode", "to see each operation of a batch that is recorded"),
    PrivateName("torch.utils._python_dispatch._get_current_dispatch_mode", "whether a mode sees a cast"),
    PrivateName("torch.utils._python_dispatch.is_traceable_wrapper_subclass", "which parameters hold others"),
    PrivateName("torch.ops.aten.add_.Tensor._schema", "which arguments an operation writes to"),
    PrivateName("torch.utils._pytree.tree_leaves", "the tensors in what a forward gave, as DDP finds them"),
    PrivateName("torch.distributed.algorithms.join._JoinConfig", "whether a rank of a DDP may end before others"),
    PrivateName("torch.distributed.fsdp.FSDPModule._get_fsdp_state", "the `_mp_policy` that a module was sharded with"),
    PrivateName("_version", "whether a tensor was written", torch.Tensor),
    PrivateName("_is_view", "whether a gradient shares its memory", torch.Tensor),
    PrivateName("_values", "the entries of a sparse tensor where they are", torch.Tensor),
    PrivateName("_is_zerotensor", "whether a gradient has no memory", torch.Tensor),
    PrivateName("_cdata", "which memory a tensor has", torch.UntypedStorage),
    PrivateName("_sequence_nr", "the order of operations in a forward", torch.autograd.graph.Node),
    PrivateName("_input_metadata", "the shapes of what a backward is given", torch.autograd.graph.Node),
    PrivateName("_apply", "to cast a model as Module.to does, with a type for each tensor", nn.Module),
    PrivateName("_parameters", "the parameters of one module, shared ones under each name", nn.Module),
    PrivateName("_buffers", "the same of buffers", nn.Module),
    PrivateName("_modules", "to replace modules where they are", nn.Module),
    PrivateName("_forward_hooks", "to find our hooks on a module, and remove them", nn.Module),
    PrivateName("_forward_hooks_always_called", "what torch notes about them elsewhere", nn.Module),
    PrivateName("_forward_hooks_with_kwargs", "the same", nn.Module),
    PrivateName("_forward_pre_hooks", "to find our hooks on a module, and remove them", nn.Module),
    PrivateName("_forward_pre_hooks_with_kwargs", "what torch notes about them elsewhere", nn.Module),
    PrivateName("_state_dict_hooks", "to find our hooks on a module, and remove them", nn.Module),
    PrivateName("_state_dict_pre_hooks", "the same", nn.Module),
    PrivateName("_load_state_dict_pre_hooks", "the same", nn.Module),
    PrivateName("_load_state_dict_post_hooks", "the same", nn.Module),
    PrivateName("_optimizer_step_pre_hooks", "to be the last hook before a step", Optimizer),
    PrivateName("_optimizer_step_post_hooks", "to have a ghost without any", Optimizer),
    PrivateName("_optimizer_state_dict_post_hooks", "whether a class of optimizers has hooks at all", Optimizer),
    PrivateName("_optimizer_load_state_dict_pre_hooks", "the same", Optimizer),
)

DispatchMode = TorchDispatchMode
TensorBase: Any = _C.TensorBase
BatchNormBase = _BatchNorm
c_extension = _C
compiled_graph_caches = [
    vars(_compiler_config)["_config"][name] for name in ("enable_autograd_cache", "enable_remote_autograd_cache")
]
disable_dynamo = _disable_dynamo
disabled_torch_dispatch: Any = _C._disabled_torch_dispatch_impl
dispatch_modes: Any = _C._len_torch_dispatch_stack
current_dispatch_mode = _get_current_dispatch_mode
fake_kernels: Any = torch._library.fake_impl
find_jit_builtin: Any = torch.jit._builtins._find_builtin
flatten_dense_tensors = _flatten_dense_tensors
data_address: Any = _C._data_address
functorch_level: Any = _C._functorch.peek_interpreter_stack
is_wrapper_subclass = is_traceable_wrapper_subclass
leaves_of = tree_leaves
register_jit_builtin: Any = torch.jit._builtins._register_builtin
unflatten_dense_tensors = _unflatten_dense_tensors
without_subclasses: Any = _C.DisableTorchFunctionSubclass
dynamo_frames: Any = eval_frame


COMPILED = "_orig_mod"
"""The name of the model inside of torch.compile's wrapper."""


def without_compiled(path: str) -> str:
    """Return the path of a module or parameter without the names that torch.compile adds to it."""
    return ".".join(part for part in path.split(".") if part != COMPILED)


def lazy_clone(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor by copy-on-write. No launch on a GPU, where operators on lists write what all owners of it see.

    Raises RuntimeError for memory that copy-on-write cannot hold: of numpy, of DLPack, or of several processes.
    """
    clone: Any = torch._lazy_clone
    copied: torch.Tensor = clone(tensor)
    return copied


def fake_mode() -> Any:
    """Return the active mode of fake tensors, or None."""
    return _C._get_dispatch_mode(_C._TorchDispatchModeKey.FAKE)


def fsdp_policy_of(module: Any) -> Any:
    """Return the MixedPrecisionPolicy that `fully_shard` got for `module`."""
    return module._get_fsdp_state()._mp_policy


def fsdp_param_dtype(module: Any) -> torch.dtype | None:
    """Return the `param_dtype` of `fsdp_policy_of(module)`, or None."""
    dtype = fsdp_policy_of(module).param_dtype
    return dtype if isinstance(dtype, torch.dtype) else None


def after_backward(call: Callable[[], None]) -> None:
    """Have autograd call `call` when the running backward has ended. Does nothing in a compiled backward."""
    variable: Any = torch.autograd.Variable
    with suppress(RuntimeError):  # a compiled backward
        variable._execution_engine.queue_callback(call)


def is_in_backward() -> bool:
    """True if autograd runs a backward in this thread."""
    return bool(_C._current_graph_task_id() != -1)


def joins_uneven_inputs(wrapper: Any) -> bool:
    """True if a DistributedDataParallel is used inside of its `join()`, where a rank may have no more batches."""
    config = wrapper._join_config  # a torch.distributed.algorithms.join._JoinConfig
    return bool(config.enable)


def comm_hooks(wrapper: Any) -> list[tuple[Any, Any]]:
    """Return (hook, state) of each communication hook of a DistributedDataParallel."""
    return [*wrapper._comm_hooks]


def delays_reductions(wrapper: Any) -> bool:
    """True if a DistributedDataParallel has `delay_all_reduce_named_params`."""
    return bool(wrapper._delay_all_reduce_params)


def written_arguments(operation: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments that an operation of the dispatcher writes to, by its schema: tensors, and lists of them."""
    places = enumerate(operation._schema.arguments)
    written = [(i, one.name) for i, one in places if one.alias_info is not None and one.alias_info.is_write]
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in written]
