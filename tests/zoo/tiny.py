"""Tiny configs of transformers: the defaults of a config class with every size made small."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedConfig

VOCABULARY = 128
IMAGE = 64  # pixels; a patch has at most 8
POSITIONS = 512
WIDTH = 64
HEADS = 4
HEAD = 16

# The first pattern that is found in the name of a setting says how large it is at most. None leaves it alone.
SHALLOW: tuple[tuple[str, int | None], ...] = (
    (
        r"token|_id$|_ids$|_idx$|_index$|label|seed|ratio|factor|rate$|stride|padding|kernel|merge|bits|norm_|scale",
        None,
    ),
    (r"vocab_size$|num_bpe|num_wordpiece", VOCABULARY),
    (r"codebook_size|num_embeddings$|_vocab$", VOCABULARY),
    (r"top_?k_group|n_group$|num_expert_group", 1),
    (r"per_tok|moe_top_?k$|moe_k$", 2),
    (r"num_.*experts$|n_routed|expert_num|n_shared", 4),
    (r"num_position_embeddings", 256),  # a square
    (r"max_source", 128),
    (r"position|n_ctx|max_seq|seq_len|context_length|max_target|max_ep_len", POSITIONS),
    (r"sliding_window|attention_window|local_attention|attention_chunk", 16),
    (r"image_size|img_size|crop_size|resolution|^input_size$", IMAGE),
    (r"num_queries|num_proposals|num_denoising", 16),
    (r"^num_hidden_layers$", 4),
    (r"(^|_)depths?$|layers?$|num_blocks|blocks_per_stage|num_block_repeats|stage_num", 2),
)
NARROW: tuple[tuple[str, int | None], ...] = (
    *SHALLOW,
    (r"per_layer_input$", 16),
    (r"^patch_size$", 8),
    (r"kv_heads|key_value_heads|kv_n_heads|num_key_value", 2),
    (r"heads?$|num_heads|n_head", HEADS),
    (r"head_dim|head_size|d_kv|rope_dim|nope_dim|d_head|rotary_dim|headdim", HEAD),
    (r"intermediate|ffn|d_ff$|dff$|mlp_dim|feed_?forward|d_inner|linear_units", 2 * WIDTH),
    (r"lora_rank|_rank$", 16),
    (r"num_mel_bins|feature_size|spectrogram", 32),
    (r"hidden|embed|embd|d_model|_dim$|^dim$|_dims$|width|channels|filters|_size$|dim_|units$", WIDTH),
)
# What a model needs, and its config leaves out.
NEEDED = {
    "head_dim": HEAD,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "hidden_size": WIDTH,
    "vocab_size": VOCABULARY,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
PLANS = {"narrow": NARROW, "shallow": SHALLOW, "default": ()}


def tiny_config(kind: type[PreTrainedConfig], plan: str, changes: Mapping[str, Any]) -> PreTrainedConfig:
    """A config of the class `kind`, small, and with `changes`: a mapping changes the config of that name."""
    return _small(kind(), PLANS[plan], changes)


def _small(config: PreTrainedConfig, limits: Any, changes: Mapping[str, Any]) -> PreTrainedConfig:
    values: dict[str, Any] = {}
    # A setting that may differ between layers is not read from the config, but from what it was made of.
    known = vars(config)
    for field in dataclasses.fields(config):
        name = field.name
        value = known.get(type(config).attribute_map.get(name, name), known.get(name))
        if not field.init or name.startswith("_"):
            continue
        if isinstance(value, PreTrainedConfig):
            values[name] = _small(value, limits, _mapping(changes.get(name)))
        elif name == "rope_parameters" and value:
            values[name] = _rope(value, config, limits)
        elif value is None and name in NEEDED and limits:
            values[name] = NEEDED[name]
        elif field.default is not None or isinstance(value, (str, dict)):  # others it derives from those
            values[name] = _limited(name, value, limits)
    if len(known.get("_out_indices") or ()) > 1 and limits:
        stages, depth = known["_out_indices"], values.get("num_hidden_layers")
        values["out_indices"] = (
            list(stages) if not depth or max(stages) <= depth else list(range(1, depth + 1))[-len(stages) :]
        )
    heads, key_value_heads = values.get("num_attention_heads"), values.get("num_key_value_heads")
    if key_value_heads and heads and known["num_attention_heads"] == known["num_key_value_heads"]:
        values["num_key_value_heads"] = heads
    for name, value in changes.items():
        if not isinstance(values.get(name), PreTrainedConfig) or not isinstance(value, Mapping):
            values[name] = value
    return type(config)(**values)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _rope(parameters: dict, config: PreTrainedConfig, limits: Any) -> dict:
    """The parameters of a rotary embedding, whose sections add up to half of a small head."""
    found = {}
    for name, value in parameters.items():
        if isinstance(value, dict):
            value = _rope(value, config, limits)
        elif name == "mrope_section" and limits is NARROW:
            width = vars(config).get("head_dim") or config.hidden_size // config.num_attention_heads
            ends = [round(sum(value[: end + 1]) * HEAD / width) for end in range(len(value))]
            value = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        found[name] = value
    return found


def _limited(name: str, value: Any, limits: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if re.search(r"_(token_)?(id|index|idx)$", name) and isinstance(value, int) and limits:
        # Most are different, and none is among those that inputs draw from.
        return value if value < 5 else VOCABULARY - 1 - sum(map(ord, name)) % 40
    limit = next((limit for pattern, limit in limits if re.search(pattern, name)), None)
    if limit is None:
        return value
    if isinstance(value, int):
        return limit if name in ("max_position_embeddings", "n_positions") else min(value, limit)
    if isinstance(value, (list, tuple)) and value and all(type(item) is int for item in value):
        if "head" in name:
            return type(value)(min(1 << (item.bit_length() - 1), limit) for item in value)
        if limit == WIDTH:
            divisor = max(1, max(value) // limit)
            return type(value)(max(8, item // divisor // 8 * 8) if item > 8 else item for item in value)
        return type(value)(min(item, limit) for item in value)
    return value
