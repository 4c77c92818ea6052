"""The names that apex has, had, or is believed to have, and how amp_engine answers each.

Names are written as in scripts: `apex.amp.scale_loss`. `optimizer.` stands for any object, before an attribute that
`amp.initialize` adds to it; `f(keyword=)` is a keyword of `f`; a trailing `*` matches any ending. Indices are left out:
`amp._amp_state.loss_scalers[0]._loss_scale` is `apex.amp._amp_state.loss_scalers._loss_scale`. Of apex's private names,
the table has those that scripts were seen to use.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Row:
    """The answer to one name.

    Attributes:
        name: apex's.
        verdict: "served" does what it did in apex; "different" is there, and differs as `text` says; "missing" is not
            there, nor is any name below it, and `text` says what to write.
        text: empty for served names.
    """

    name: str
    verdict: Literal["served", "different", "missing"]
    text: str = ""


_PUBLIC = """
    init half_function float_function promote_function register_half_function register_float_function
    register_promote_function scale_loss disable_casts initialize state_dict load_state_dict master_params
"""

# Maps a package, a module or an object to the names in it. Each key but "optimizer" is served itself, too.
SERVED: dict[str, str] = {
    "apex": "",
    "apex.amp": f"{_PUBLIC} __version__",
    "apex.amp.amp": f"{_PUBLIC} AmpHandle NoOpHandle",
    "apex.amp.frontend": "initialize state_dict load_state_dict Properties opt_levels",
    "apex.amp.handle": "scale_loss disable_casts AmpHandle NoOpHandle",
    "apex.amp.scaler": "LossScaler",
    "apex.amp.lists": "",
    "apex.amp.lists.functional_overrides": "MODULE FP16_FUNCS FP32_FUNCS CASTS",
    "apex.amp.lists.torch_overrides": "MODULE FP16_FUNCS FP32_FUNCS CASTS",
    "apex.amp.lists.tensor_overrides": "MODULE FP16_FUNCS FP32_FUNCS CASTS",
    "apex.amp._initialize": "applier",
    "apex.amp._process_optimizer": "AmpOptimizerState",
    "apex.amp.rnn_compat": "has_old_rnns",
    "apex.amp.compat": "filter_attrs",
    "apex.amp.utils": "is_fp_tensor",
    "apex.amp._amp_state": """
        AmpState maybe_print warn_or_err master_params hard_override verbosity min_loss_scale max_loss_scale
    """,
    "apex.amp._amp_state.opt_properties": """
        options enabled opt_level cast_model_type patch_torch_functions keep_batchnorm_fp32 master_weights loss_scale
    """,
    "apex.amp._amp_state.loss_scalers": """
        loss_scale _loss_scale _unskipped _has_overflow _overflow_buf dynamic _scale_seq_len _min_loss_scale
        _max_loss_scale update_scale clear_overflow_state
    """,
    "apex.amp._amp_state.handle": """
        is_active _is_active _disable_casts _clear_cache _deactivate
    """,
    "optimizer": """
        _lazy_init_maybe_master_weights _amp_lazy_init _prepare_amp_backward _post_amp_backward
    """,
    "optimizer._amp_stash": """
        lazy_init_called params_have_scaled_gradients fp16_groups fp32_from_fp16_groups fp32_from_fp32_groups
        all_fp16_params all_fp32_from_fp16_params
    """,
    "apex.fp16_utils": """
        BN_convert_float network_to_half prep_param_lists model_grads_to_master_grads master_params_to_model_params
        tofp16 to_python_float clip_grad_norm convert_module convert_network FP16Model FP16_Optimizer LossScaler
        DynamicLossScaler
    """,
    "apex.fp16_utils.fp16_optimizer": "FP16_Optimizer",
    "apex.fp16_utils.loss_scaler": "LossScaler DynamicLossScaler",
    "apex.fp16_utils.fp16util": """
        BN_convert_float network_to_half prep_param_lists convert_module model_grads_to_master_grads
        master_params_to_model_params tofp16 to_python_float clip_grad_norm convert_network FP16Model
    """,
    "apex.multi_tensor_apply": "MultiTensorApply multi_tensor_applier",
    "apex.multi_tensor_apply.multi_tensor_apply": "MultiTensorApply",
    "amp_C": """
        multi_tensor_scale multi_tensor_axpby multi_tensor_l2norm multi_tensor_l2norm_mp multi_tensor_l2norm_scale
        multi_tensor_unscale_l2norm multi_tensor_sgd multi_tensor_adam multi_tensor_adam_capturable
        multi_tensor_adam_capturable_master multi_tensor_lamb multi_tensor_lamb_mp multi_tensor_novograd
        multi_tensor_adagrad update_scale_hysteresis
    """,
    "apex_C": "flatten unflatten",
    "apex.optimizers": "FusedSGD FusedAdam FusedNovoGrad FusedLAMB FusedAdagrad FusedMixedPrecisionLamb",
    "apex.optimizers.fused_sgd": "FusedSGD",
    "apex.optimizers.fused_adam": "FusedAdam",
    "apex.optimizers.fused_novograd": "FusedNovoGrad",
    "apex.optimizers.fused_lamb": "FusedLAMB",
    "apex.optimizers.fused_adagrad": "FusedAdagrad",
    "apex.optimizers.fused_mixed_precision_lamb": "FusedMixedPrecisionLamb",
    "apex.parallel": """
        DistributedDataParallel Reducer SyncBatchNorm convert_syncbn_model create_syncbn_process_group LARC
    """,
    "apex.parallel.distributed": "DistributedDataParallel Reducer flat_dist_call",
    "apex.parallel.sync_batchnorm": "SyncBatchNorm",
    "apex.parallel.optimized_sync_batchnorm": "SyncBatchNorm",
    "apex.normalization": "FusedLayerNorm FusedRMSNorm MixedFusedLayerNorm MixedFusedRMSNorm",
    "apex.normalization.fused_layer_norm": """
        FusedLayerNorm FusedRMSNorm MixedFusedLayerNorm MixedFusedRMSNorm fused_layer_norm fused_layer_norm_affine
        fused_rms_norm fused_rms_norm_affine mixed_dtype_fused_layer_norm_affine mixed_dtype_fused_rms_norm_affine
    """,
    "apex.mlp": "MLP",
    "apex.mlp.mlp": "MLP",
    "apex.fused_dense": "FusedDense FusedDenseGeluDense",
    "apex.fused_dense.fused_dense": "FusedDense FusedDenseGeluDense",
}

# Maps a name to the difference.
DIFFERENT = {
    "apex.DeprecatedFeatureWarning": "never warned with: nothing is deprecated here",
    "apex.amp._amp_state.allow_incoming_model_not_fp32": (
        "lets half weights through at O1 and O4, with a warning; the other levels take or cast them either way"
    ),
    "apex.optimizers.FP16_Optimizer": (
        "is that of apex.fp16_utils; checkpoints of the class that apex had here until 2019 do not load"
    ),
}

# Maps one name or several to what to write.
MISSING = {
    "apex.__version__": "write amp_engine.__version__",
    "apex.normalization.fused_layer_norm.FusedLayerNormAffineFunction": (
        "write fused_layer_norm_affine(input, weight, bias, normalized_shape, eps) of the same module"
    ),
    "apex.normalization.fused_layer_norm.FusedLayerNormFunction": (
        "write fused_layer_norm(input, normalized_shape, eps) of the same module"
    ),
    "apex.normalization.fused_layer_norm.FusedRMSNormAffineFunction": (
        "write fused_rms_norm_affine(input, weight, normalized_shape, eps) of the same module"
    ),
    "apex.normalization.fused_layer_norm.FusedRMSNormFunction": (
        "write fused_rms_norm(input, normalized_shape, eps) of the same module"
    ),
    "apex.normalization.fused_layer_norm.manual_rms_norm": "write torch.nn.functional.rms_norm",
    "apex.mlp.mlp_function apex.mlp.mlp.mlp_function": "write apex.mlp.MLP",
    "apex.parallel.ReduceOp": "write torch.distributed.ReduceOp",
    "apex.optimizers.FusedAdam(max_grad_norm=)": (
        "leave it out, and clip before step(): clip_master_grads(max_norm) of FP16_Optimizer, else clip_grad_norm_ of "
        "amp_engine.amp"
    ),
    "apex.amp.wrap": "write half_function, float_function or promote_function of apex.amp",
    "apex.amp.initialize(combine_grad=)": (
        "leave it out: it is of a fork for Ascend devices; the step here reads gradients in one pass as they are"
    ),
    "apex.amp.initialize(combine_ddp=) apex.amp.initialize(ddp_replica_count=)": (
        "leave it out: it is of a fork for Ascend devices; wrap the model in DistributedDataParallel after initialize"
    ),
    "apex.amp.initialize(dtype=)": "write opt_level='O4' (functions in bfloat16) or 'O5' (the model in bfloat16)",
    "apex.amp._amp_state.loss_scalers.unscale apex.amp._amp_state.loss_scalers.unscale_with_stashed": (
        "use amp.scale_loss, which unscales at its exit, or optimizer._post_amp_backward(scaler)"
    ),
    "apex.amp._amp_state.handle.wrap_optimizer apex.amp.opt": (
        "write amp.initialize(model, optimizer, num_losses=...), then amp.scale_loss(loss, optimizer, loss_id=...)"
    ),
    "apex.amp._amp_state.handle.scale_loss": (
        "refused in apex, too: write amp.initialize(model, optimizer), then amp.scale_loss(loss, optimizer)"
    ),
    "amp_C.multi_tensor_lamb_stage1_cuda amp_C.multi_tensor_lamb_stage2_cuda": (
        "call amp_C.multi_tensor_lamb, which does both stages"
    ),
    "fused_layer_norm_cuda": "import apex.normalization.FusedLayerNorm, or write torch.nn.LayerNorm",
    "fused_weight_gradient_mlp_cuda": "use Megatron-Core without gradient accumulation fusion",
    "scaled_masked_softmax_cuda scaled_upper_triang_masked_softmax_cuda": (
        "write torch.nn.functional.scaled_dot_product_attention"
    ),
    "apex.contrib.fmha apex.transformer.functional": "write torch.nn.functional.scaled_dot_product_attention",
    "xentropy_cuda": "write torch.nn.functional.cross_entropy(logits, labels, label_smoothing=...)",
    "apex.optimizers.fp16_optimizer": "from apex.fp16_utils import FP16_Optimizer",
    "apex.optimizers.NpuFused*": "of a fork for Ascend devices: write FusedAdam, FusedSGD or FusedLAMB",
    "apex.parallel.multiproc": "type torchrun --nproc_per_node=... script.py",
    "apex.contrib": "nothing of it is offered: write the torch.nn modules; torch.compile fuses them",
    "apex.contrib.xentropy": (
        "write torch.nn.functional.cross_entropy(logits, labels, label_smoothing=..., ignore_index=...)"
    ),
    "apex.contrib.clip_grad": (
        "write torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), max_norm), or clip_grad_norm_(optimizer, "
        "max_norm) of amp_engine.amp"
    ),
    "apex.contrib.multihead_attn": (
        "write torch.nn.MultiheadAttention, or torch.nn.functional.scaled_dot_product_attention"
    ),
    "apex.contrib.group_norm": "write torch.nn.GroupNorm; torch.compile fuses it",
    "apex.contrib.layer_norm apex.transformer.layers": "write torch.nn.LayerNorm, or apex.normalization.FusedLayerNorm",
    "apex.contrib.groupbn": "write torch.nn.BatchNorm2d on channels_last tensors; across GPUs torch.nn.SyncBatchNorm",
    "apex.contrib.cudnn_gbn": "write torch.nn.SyncBatchNorm",
    "apex.contrib.conv_bias_relu": "write torch.nn.functional.conv2d and relu; torch.compile fuses them",
    "apex.contrib.bottleneck": "write torchvision.models.resnet.Bottleneck",
    "apex.contrib.index_mul_2d": "write x[index] * y; torch.compile fuses it",
    "apex.contrib.focal_loss": "write torchvision.ops.sigmoid_focal_loss",
    "apex.contrib.transducer": "write torchaudio.functional.rnnt_loss, where your torchaudio has it",
    "apex.contrib.sparsity": (
        "2:4 pruning is not offered: see torch.sparse.to_sparse_semi_structured and torchao.sparsity"
    ),
    "apex.contrib.optimizers": "write apex.optimizers.FusedAdam, FusedLAMB or FusedSGD",
    "apex.contrib.optimizers.fp16_optimizer apex.contrib.optimizers.FP16_Optimizer": (
        "write amp.initialize(model, optimizer, opt_level='O2'), or from apex.fp16_utils import FP16_Optimizer"
    ),
    "apex.contrib.optimizers.distributed_fused* apex.contrib.optimizers.DistributedFused*": (
        "shard with torch.distributed.fsdp.fully_shard, at O4"
    ),
    "apex.transformer": "use Megatron-Core (megatron.core), or torch.distributed.tensor.parallel",
    "apex.transformer.amp": "write torch.amp.GradScaler",
    "apex.transformer.pipeline_parallel": (
        "use Megatron-Core (megatron.core.pipeline_parallel), or torch.distributed.pipelining"
    ),
    "apex.RNN": "write torch.nn.LSTM, GRU or RNN",
    "apex.reparameterization": "write torch.nn.utils.parametrizations.weight_norm(module)",
    "apex.pyprof": "write torch.profiler.profile, or torch.autograd.profiler.emit_nvtx for nsys",
}


def _rows() -> Iterator[Row]:
    for owner, names in SERVED.items():
        if owner != "optimizer":
            yield Row(owner, "served")
        yield from (Row(f"{owner}.{name}", "served") for name in names.split())
    yield from (Row(name, "different", note) for name, note in DIFFERENT.items())
    for names, instead in MISSING.items():
        yield from (Row(name, "missing", instead) for name in names.split())


TABLE: tuple[Row, ...] = tuple(_rows())
ROWS: dict[str, Row] = {row.name: row for row in TABLE}
# The first parts of apex's names.
ROOTS = frozenset(name.split(".")[0] for name in ROWS) - {"optimizer"}
# Attributes that only optimizers have, after `amp.initialize`.
ADDED = frozenset(name.split(".")[1] for name in ROWS if name.startswith("optimizer."))
# Maps a name that scripts use to another name of the same object, which has the rows.
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
    """Return the row for canonical `name`: its own, or that of the closest parent that stands for all names below it.

    Returns None if the parent has rows for its members but not for this one, or if there is no such parent.
    """
    if name in ROWS:
        return ROWS[name]
    parent, _, last = name.rpartition(".")
    for pattern in ROWS:
        if pattern.endswith("*") and name.startswith(pattern[:-1]):
            return ROWS[pattern]
    row = find(parent) if parent else None
    is_dunder = last.startswith("__") and last.endswith("__")
    is_missing = row is not None and row.verdict == "missing"
    return row if is_missing or is_dunder or not has_members(parent) else None


def has_members(name: str) -> bool:
    """True if the members of `name` have rows: for a package, a module or a state object."""
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
    """Return the object behind a served name; for a list, its first element.

    Raises ImportError or AttributeError if there is none.
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
