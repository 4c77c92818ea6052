"""The names that apex has, had, or is taken to have, and the answer to each here.

Names are written as a script would: `apex.amp.scale_loss`; `optimizer.` stands for any object, in front of what
`amp.initialize` adds to it; `f(keyword=)` is a keyword of `f`; a last `*` is any ending; indices are left out, so
that `amp._amp_state.loss_scalers[0]._loss_scale` is `apex.amp._amp_state.loss_scalers._loss_scale`. Names of the
private parts of apex are those that scripts were seen to use.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Served:
    """Does what it did in apex."""

    name: str


@dataclass(frozen=True)
class Different:
    """Is there, and differs from apex as `note` says."""

    name: str
    note: str


@dataclass(frozen=True)
class Missing:
    """Is not there, nor is any name below it; `instead` says what to write."""

    name: str
    instead: str


Row: TypeAlias = Served | Different | Missing


def _served(package: str, names: str) -> Iterator[Served]:
    return (Served(f"{package}.{name}") for name in names.split())


def _missing(package: str, names: str, instead: str) -> Iterator[Missing]:
    return (Missing(f"{package}.{name}", instead) for name in names.split())


_FUNCTIONS = """
    init half_function float_function promote_function register_half_function register_float_function
    register_promote_function
"""
_PUBLIC = f"{_FUNCTIONS} scale_loss disable_casts initialize state_dict load_state_dict master_params"

TABLE: tuple[Row, ...] = (
    Served("apex"),
    *_served("apex", "amp fp16_utils multi_tensor_apply optimizers parallel normalization mlp fused_dense"),
    Different("apex.DeprecatedFeatureWarning", "never warned with: nothing is deprecated here"),
    # --- apex.amp ---
    *_served("apex.amp", _PUBLIC),
    *_served("apex.amp", "amp frontend handle scaler opt lists utils compat rnn_compat _initialize"),
    *_served("apex.amp", "_process_optimizer __version__"),
    Missing("apex.amp.wrap", "write half_function, float_function or promote_function of apex.amp"),
    Missing(
        "apex.amp.initialize(combine_grad=)",
        "leave it out: it is of a fork for Ascend devices; the step here reads gradients in one pass as they are",
    ),
    *_missing(
        "apex.amp",
        "initialize(combine_ddp=) initialize(ddp_replica_count=)",
        "leave it out: it is of a fork for Ascend devices; wrap the model in DistributedDataParallel after initialize",
    ),
    Missing(
        "apex.amp.initialize(dtype=)",
        "write opt_level='O4' (functions in bfloat16) or 'O5' (the model in bfloat16)",
    ),
    # --- apex.amp, its modules ---
    *_served("apex.amp.amp", f"{_PUBLIC} AmpHandle NoOpHandle"),
    *_served("apex.amp.frontend", "initialize state_dict load_state_dict Properties opt_levels"),
    *_served("apex.amp.handle", "scale_loss disable_casts AmpHandle NoOpHandle"),
    *_served("apex.amp.scaler", "LossScaler"),
    *_served("apex.amp.opt", "OptimWrapper"),
    *_served("apex.amp.lists", "functional_overrides torch_overrides tensor_overrides"),
    *_served("apex.amp.lists.functional_overrides", "MODULE FP16_FUNCS FP32_FUNCS CASTS"),
    *_served("apex.amp.lists.torch_overrides", "MODULE FP16_FUNCS FP32_FUNCS CASTS"),
    *_served("apex.amp.lists.tensor_overrides", "MODULE FP16_FUNCS FP32_FUNCS CASTS"),
    Served("apex.amp._initialize.applier"),
    Served("apex.amp._process_optimizer.AmpOptimizerState"),
    Served("apex.amp.rnn_compat.has_old_rnns"),
    Served("apex.amp.compat.filter_attrs"),
    Served("apex.amp.utils.is_fp_tensor"),
    # --- apex.amp, its state ---
    Served("apex.amp._amp_state"),
    *_served("apex.amp._amp_state", "AmpState maybe_print warn_or_err master_params"),
    *_served("apex.amp._amp_state", "hard_override verbosity min_loss_scale max_loss_scale"),
    Different(
        "apex.amp._amp_state.allow_incoming_model_not_fp32",
        "lets half weights through at O1 and O4, with a warning; the other levels take or cast them either way",
    ),
    Served("apex.amp._amp_state.opt_properties"),
    *_served("apex.amp._amp_state.opt_properties", "options enabled opt_level cast_model_type patch_torch_functions"),
    *_served("apex.amp._amp_state.opt_properties", "keep_batchnorm_fp32 master_weights loss_scale"),
    Served("apex.amp._amp_state.loss_scalers"),
    *_served("apex.amp._amp_state.loss_scalers", "loss_scale _loss_scale _unskipped _has_overflow _overflow_buf"),
    *_served("apex.amp._amp_state.loss_scalers", "dynamic _scale_seq_len _min_loss_scale _max_loss_scale update_scale"),
    *_served("apex.amp._amp_state.loss_scalers", "clear_overflow_state unscale unscale_with_stashed"),
    Served("apex.amp._amp_state.handle"),
    *_served("apex.amp._amp_state.handle", "is_active _is_active has_cache cache remove_cache verbose"),
    *_served("apex.amp._amp_state.handle", "_disable_casts _clear_cache _deactivate wrap_optimizer"),
    Missing(
        "apex.amp._amp_state.handle.scale_loss",
        "refused in apex, too: write amp.initialize(model, optimizer), then amp.scale_loss(loss, optimizer)",
    ),
    # --- what initialize adds to an optimizer ---
    Served("optimizer._amp_stash"),
    *_served("optimizer._amp_stash", "lazy_init_called already_patched params_have_scaled_gradients"),
    *_served("optimizer._amp_stash", "fp16_groups fp32_from_fp16_groups fp32_from_fp32_groups"),
    *_served("optimizer._amp_stash", "all_fp16_params all_fp32_from_fp16_params all_fp32_from_fp32_params"),
    *_served("optimizer", "_lazy_init_maybe_master_weights _amp_lazy_init _prepare_amp_backward _post_amp_backward"),
    Served("optimizer._master_params_to_model_params"),
    # --- apex.fp16_utils ---
    *_served("apex.fp16_utils", "BN_convert_float network_to_half prep_param_lists model_grads_to_master_grads"),
    *_served("apex.fp16_utils", "master_params_to_model_params tofp16 to_python_float clip_grad_norm convert_module"),
    *_served("apex.fp16_utils", "convert_network FP16Model FP16_Optimizer LossScaler DynamicLossScaler"),
    *_served("apex.fp16_utils", "fp16_optimizer fp16util loss_scaler"),
    *_served("apex.fp16_utils.fp16_optimizer", "FP16_Optimizer"),
    *_served("apex.fp16_utils.loss_scaler", "LossScaler DynamicLossScaler"),
    *_served("apex.fp16_utils.fp16util", "BN_convert_float network_to_half prep_param_lists convert_module"),
    *_served("apex.fp16_utils.fp16util", "model_grads_to_master_grads master_params_to_model_params tofp16"),
    *_served("apex.fp16_utils.fp16util", "to_python_float clip_grad_norm convert_network FP16Model"),
    # --- kernels ---
    *_served("apex.multi_tensor_apply", "MultiTensorApply multi_tensor_applier"),
    Served("apex.multi_tensor_apply.multi_tensor_apply"),
    *_served("apex.multi_tensor_apply.multi_tensor_apply", "MultiTensorApply"),
    Served("amp_C"),
    *_served("amp_C", "multi_tensor_scale multi_tensor_axpby multi_tensor_l2norm multi_tensor_l2norm_mp"),
    *_served("amp_C", "multi_tensor_l2norm_scale multi_tensor_unscale_l2norm multi_tensor_sgd multi_tensor_adam"),
    *_served("amp_C", "multi_tensor_adam_capturable multi_tensor_adam_capturable_master multi_tensor_lamb"),
    *_served("amp_C", "multi_tensor_lamb_mp multi_tensor_novograd multi_tensor_adagrad update_scale_hysteresis"),
    *_missing(
        "amp_C",
        "multi_tensor_lamb_stage1_cuda multi_tensor_lamb_stage2_cuda",
        "call amp_C.multi_tensor_lamb, which does both stages",
    ),
    Served("apex_C"),
    *_served("apex_C", "flatten unflatten"),
    Missing("fused_layer_norm_cuda", "import apex.normalization.FusedLayerNorm, or write torch.nn.LayerNorm"),
    Missing("fused_weight_gradient_mlp_cuda", "use Megatron-Core without gradient accumulation fusion"),
    Missing("scaled_masked_softmax_cuda", "write torch.nn.functional.scaled_dot_product_attention"),
    Missing("scaled_upper_triang_masked_softmax_cuda", "write torch.nn.functional.scaled_dot_product_attention"),
    Missing("xentropy_cuda", "write torch.nn.functional.cross_entropy(logits, labels, label_smoothing=...)"),
    # --- apex.optimizers ---
    *_served("apex.optimizers", "FusedSGD FusedAdam FusedNovoGrad FusedLAMB FusedAdagrad FusedMixedPrecisionLamb"),
    *_served("apex.optimizers", "fused_sgd fused_adam fused_novograd fused_lamb fused_adagrad"),
    *_served("apex.optimizers", "fused_mixed_precision_lamb"),
    Served("apex.optimizers.fused_sgd.FusedSGD"),
    Served("apex.optimizers.fused_adam.FusedAdam"),
    Served("apex.optimizers.fused_novograd.FusedNovoGrad"),
    Served("apex.optimizers.fused_lamb.FusedLAMB"),
    Served("apex.optimizers.fused_adagrad.FusedAdagrad"),
    Served("apex.optimizers.fused_mixed_precision_lamb.FusedMixedPrecisionLamb"),
    Different(
        "apex.optimizers.FP16_Optimizer",
        "is that of apex.fp16_utils; checkpoints of the class that apex had here until 2019 do not load",
    ),
    Missing("apex.optimizers.fp16_optimizer", "from apex.fp16_utils import FP16_Optimizer"),
    Missing("apex.optimizers.NpuFused*", "of a fork for Ascend devices: write FusedAdam, FusedSGD or FusedLAMB"),
    # --- apex.parallel ---
    *_served("apex.parallel", "DistributedDataParallel Reducer SyncBatchNorm convert_syncbn_model"),
    *_served("apex.parallel", "create_syncbn_process_group LARC distributed sync_batchnorm"),
    *_served("apex.parallel", "optimized_sync_batchnorm"),
    *_served("apex.parallel.distributed", "DistributedDataParallel Reducer flat_dist_call"),
    Served("apex.parallel.sync_batchnorm.SyncBatchNorm"),
    Served("apex.parallel.optimized_sync_batchnorm.SyncBatchNorm"),
    Missing("apex.parallel.multiproc", "type torchrun --nproc_per_node=... script.py"),
    # --- apex.normalization, apex.mlp, apex.fused_dense ---
    *_served("apex.normalization", "FusedLayerNorm FusedRMSNorm MixedFusedLayerNorm MixedFusedRMSNorm"),
    Served("apex.normalization.fused_layer_norm"),
    *_served("apex.normalization.fused_layer_norm", "FusedLayerNorm FusedRMSNorm MixedFusedLayerNorm"),
    *_served("apex.normalization.fused_layer_norm", "MixedFusedRMSNorm fused_layer_norm fused_layer_norm_affine"),
    *_served("apex.normalization.fused_layer_norm", "fused_rms_norm fused_rms_norm_affine"),
    *_served("apex.normalization.fused_layer_norm", "mixed_dtype_fused_layer_norm_affine"),
    *_served("apex.normalization.fused_layer_norm", "mixed_dtype_fused_rms_norm_affine"),
    *_served("apex.mlp", "MLP mlp"),
    Served("apex.mlp.mlp.MLP"),
    *_served("apex.fused_dense", "FusedDense FusedDenseGeluDense fused_dense"),
    *_served("apex.fused_dense.fused_dense", "FusedDense FusedDenseGeluDense"),
    # --- not in the scope of amp_engine ---
    Missing("apex.contrib", "nothing of it is offered: write the torch.nn modules; torch.compile fuses them"),
    Missing(
        "apex.contrib.xentropy",
        "write torch.nn.functional.cross_entropy(logits, labels, label_smoothing=..., ignore_index=...)",
    ),
    Missing(
        "apex.contrib.clip_grad",
        "write torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm), "
        "or clip_grad_norm_(optimizer, max_norm) of amp_engine.amp",
    ),
    Missing(
        "apex.contrib.multihead_attn",
        "write torch.nn.MultiheadAttention, or torch.nn.functional.scaled_dot_product_attention",
    ),
    Missing("apex.contrib.fmha", "write torch.nn.functional.scaled_dot_product_attention"),
    Missing("apex.contrib.group_norm", "write torch.nn.GroupNorm; torch.compile fuses it"),
    Missing("apex.contrib.layer_norm", "write torch.nn.LayerNorm, or apex.normalization.FusedLayerNorm"),
    Missing(
        "apex.contrib.groupbn",
        "write torch.nn.BatchNorm2d on channels_last tensors; across GPUs torch.nn.SyncBatchNorm",
    ),
    Missing("apex.contrib.cudnn_gbn", "write torch.nn.SyncBatchNorm"),
    Missing("apex.contrib.conv_bias_relu", "write torch.nn.functional.conv2d and relu; torch.compile fuses them"),
    Missing("apex.contrib.bottleneck", "write torchvision.models.resnet.Bottleneck"),
    Missing("apex.contrib.index_mul_2d", "write x[index] * y; torch.compile fuses it"),
    Missing("apex.contrib.focal_loss", "write torchvision.ops.sigmoid_focal_loss"),
    Missing("apex.contrib.transducer", "write torchaudio.functional.rnnt_loss, where your torchaudio has it"),
    Missing(
        "apex.contrib.sparsity",
        "2:4 pruning is not offered: see torch.sparse.to_sparse_semi_structured and torchao.sparsity",
    ),
    Missing("apex.contrib.optimizers", "write apex.optimizers.FusedAdam, FusedLAMB or FusedSGD"),
    *_missing(
        "apex.contrib.optimizers",
        "fp16_optimizer FP16_Optimizer",
        "write amp.initialize(model, optimizer, opt_level='O2'), or from apex.fp16_utils import FP16_Optimizer",
    ),
    *_missing(
        "apex.contrib.optimizers",
        "distributed_fused* DistributedFused*",
        "shard with torch.distributed.fsdp.fully_shard, at O4",
    ),
    Missing("apex.transformer", "use Megatron-Core (megatron.core), or torch.distributed.tensor.parallel"),
    Missing("apex.transformer.amp", "write torch.amp.GradScaler"),
    Missing("apex.transformer.functional", "write torch.nn.functional.scaled_dot_product_attention"),
    Missing("apex.transformer.layers", "write torch.nn.LayerNorm, or apex.normalization.FusedLayerNorm"),
    Missing(
        "apex.transformer.pipeline_parallel",
        "use Megatron-Core (megatron.core.pipeline_parallel), or torch.distributed.pipelining",
    ),
    Missing("apex.RNN", "write torch.nn.LSTM, GRU or RNN"),
    Missing("apex.reparameterization", "write torch.nn.utils.parametrizations.weight_norm(module)"),
    Missing("apex.pyprof", "write torch.profiler.profile, or torch.autograd.profiler.emit_nvtx for nsys"),
)

ROWS: dict[str, Row] = {row.name: row for row in TABLE}
# The first parts of names that are apex's, wherever they stand.
ROOTS = frozenset(name.split(".")[0] for name in ROWS) - {"optimizer"}
# Attributes that only an optimizer of amp has.
ADDED = frozenset(name.split(".")[1] for name in ROWS if name.startswith("optimizer."))
# Two names of one thing. The left one is a script's, the right one has the rows.
ALIASES = {
    "amp_engine.apex.amp_C": "amp_C",
    "amp_engine.apex.apex_C": "apex_C",
    "amp_engine.apex": "apex",
    "amp_engine.amp": "apex.amp",
    "amp_engine.optimizers": "apex.optimizers",
    "apex.amp._amp_state._amp_state": "apex.amp._amp_state",
    "apex.parallel.LARC.LARC": "apex.parallel.LARC",
    # Results of calls.
    "apex.amp.init()": "apex.amp._amp_state.handle",
    "apex.amp.frontend.Properties()": "apex.amp._amp_state.opt_properties",
    "apex.amp.scaler.LossScaler()": "apex.amp._amp_state.loss_scalers",
}
_CHILDREN: dict[str, list[str]] = {}
for _name in ROWS:
    _CHILDREN.setdefault(_name.rpartition(".")[0], []).append(_name.rpartition(".")[2])


def canonical(name: str) -> str:
    """Return the table's name for a script's `name`: aliases replaced, `x._amp_stash` as `optimizer._amp_stash`."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part in ADDED:
            return ".".join(["optimizer", *parts[i:]])
        alias = ALIASES.get(".".join(parts[: i + 1]))
        if alias is not None:
            return canonical(".".join([alias, *parts[i + 1 :]]))
    return name


def find(name: str) -> Row | None:
    """Return the row for canonical `name`: its own, or that of the closest part that stands for all names below it.

    None where apex has other names in its place, or none at all.
    """
    if name in ROWS:
        return ROWS[name]
    parent, _, last = name.rpartition(".")
    for pattern in ROWS:
        if pattern.endswith("*") and name.startswith(pattern[:-1]):
            return ROWS[pattern]
    row = find(parent) if parent else None
    is_dunder = last.startswith("__") and last.endswith("__")
    return row if isinstance(row, Missing) or is_dunder or not has_members(parent) else None


def has_members(name: str) -> bool:
    """True for a package, a module or a state object: one with rows for its members."""
    return name in _CHILDREN


def members(name: str) -> list[str]:
    """Return the names that `from name import *` brings."""
    return [child for child in _CHILDREN.get(name, []) if child.isidentifier() and not child.startswith("_")]


def similar(name: str) -> str | None:
    """Return the name in the table that `name` may be a typo of."""
    parent, _, last = name.rpartition(".")
    close = difflib.get_close_matches(last, [c for c in _CHILDREN.get(parent, []) if c.isidentifier()], n=1)
    return f"{parent}.{close[0]}" if close else None


def resolve(name: str) -> Any:
    """Return the object behind a served name; of a list, its first element.

    Raises ImportError or AttributeError where there is none.
    """
    root, _, rest = name.partition(".")
    parent, _, last = name.rpartition(".")
    if not rest:
        return importlib.import_module("amp_engine.apex" if root == "apex" else f"amp_engine.apex.{root}")
    owner = resolve(parent)
    for found in (owner, *_module(parent)):
        if hasattr(found, last):
            value = getattr(found, last)
            return value[0] if isinstance(value, list) and value else value
    for module in _module(name):
        return module
    raise AttributeError(f"{parent} has no attribute {last!r}")


def _module(name: str) -> Iterator[Any]:
    """Yield the module called `name`, if there is one. Some names of apex are both a module and an object."""
    path = f"amp_engine.{name}" if name.startswith("apex.") else f"amp_engine.apex.{name}"
    try:
        yield importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not path.startswith(error.name):
            raise
