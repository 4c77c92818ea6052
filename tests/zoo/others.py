"""A dozen models each of diffusers and timm: their settings and inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Normal = Callable[..., Tensor]  # of a shape

# A pipeline gives integers, or floats in FP32 that bfloat16 does not have.
STEP = torch.tensor([937, 23])
TIME = torch.tensor([937.0, 23.0])


def _text(normal: Normal, width: int = 32) -> Tensor:
    return normal(2, 8, width)


def _flux(normal: Normal) -> dict[str, Any]:
    places = torch.cartesian_prod(torch.zeros(1), torch.arange(4.0), torch.arange(4.0))
    return {
        "hidden_states": normal(2, 16, 4),
        "encoder_hidden_states": _text(normal),
        "pooled_projections": normal(2, 32),
        "timestep": TIME / 1000,
        "img_ids": places,
        "txt_ids": torch.zeros(8, 3),
    }


BLOCKS = {"block_out_channels": (32, 64), "layers_per_block": 1, "norm_num_groups": 8}
HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
CROSS = {
    **BLOCKS,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "cross_attention_dim": 32,
    "attention_head_dim": 8,
}

DIFFUSERS: dict[str, tuple[dict[str, Any], Callable[[Normal], dict[str, Any]]]] = {
    "UNet2DModel": (
        {
            **BLOCKS,
            "sample_size": 16,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
            "attention_head_dim": 8,
        },
        lambda normal: {"sample": normal(2, 3, 16, 16), "timestep": STEP},
    ),
    "UNet2DConditionModel": (
        {**CROSS, "sample_size": 16, "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")},
        lambda normal: {"sample": normal(2, 4, 16, 16), "timestep": STEP, "encoder_hidden_states": _text(normal)},
    ),
    "ControlNetModel": (
        {**CROSS, "conditioning_embedding_out_channels": (16, 32)},
        lambda normal: {
            "sample": normal(2, 4, 16, 16),
            "timestep": STEP,
            "encoder_hidden_states": _text(normal),
            "controlnet_cond": normal(2, 3, 32, 32),
        },
    ),
    "AutoencoderKL": (
        {
            **BLOCKS,
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
        },
        lambda normal: {"sample": normal(2, 3, 32, 32)},
    ),
    "AutoencoderTiny": (
        {
            "encoder_block_out_channels": (32, 32),
            "decoder_block_out_channels": (32, 32),
            "num_encoder_blocks": (1, 2),
            "num_decoder_blocks": (2, 1),
        },
        lambda normal: {"sample": normal(2, 3, 32, 32)},
    ),
    "VQModel": (
        {
            **BLOCKS,
            "down_block_types": ("DownEncoderBlock2D",) * 2,
            "up_block_types": ("UpDecoderBlock2D",) * 2,
            "num_vq_embeddings": 64,
        },
        lambda normal: {"sample": normal(2, 3, 32, 32)},
    ),
    "DiTTransformer2DModel": (
        {**HEADS, "num_layers": 2, "sample_size": 16, "norm_num_groups": 8, "num_embeds_ada_norm": 1000},
        lambda normal: {
            "hidden_states": normal(2, 4, 16, 16),
            "timestep": STEP,
            "class_labels": torch.tensor([3, 7]),
        },
    ),
    "PixArtTransformer2DModel": (
        {**HEADS, "num_layers": 2, "sample_size": 16, "cross_attention_dim": 32, "caption_channels": 32},
        lambda normal: {
            "hidden_states": normal(2, 4, 16, 16),
            "timestep": STEP,
            "encoder_hidden_states": _text(normal),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
    ),
    "SD3Transformer2DModel": (
        {
            **{**HEADS, "attention_head_dim": 16},
            "num_layers": 2,
            "sample_size": 16,
            "joint_attention_dim": 32,
            "caption_projection_dim": 32,
            "pooled_projection_dim": 32,
            "out_channels": 16,
        },
        lambda normal: {
            "hidden_states": normal(2, 16, 16, 16),
            "timestep": TIME,
            "encoder_hidden_states": _text(normal),
            "pooled_projections": normal(2, 32),
        },
    ),
    "FluxTransformer2DModel": (
        {
            **HEADS,
            "in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 32,
            "axes_dims_rope": (4, 4, 8),
        },
        _flux,
    ),
    "SanaTransformer2DModel": (
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "num_cross_attention_heads": 2,
            "cross_attention_head_dim": 16,
            "cross_attention_dim": 32,
            "caption_channels": 32,
            "sample_size": 16,
        },
        lambda normal: {
            "hidden_states": normal(2, 4, 16, 16),
            "timestep": STEP,
            "encoder_hidden_states": _text(normal),
        },
    ),
    "CogVideoXTransformer3DModel": (
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "time_embed_dim": 8,
            "text_embed_dim": 32,
            "num_layers": 1,
            "sample_width": 8,
            "sample_height": 8,
            "sample_frames": 5,
            "max_text_seq_length": 8,
        },
        lambda normal: {
            "hidden_states": normal(2, 2, 4, 8, 8),
            "timestep": STEP,
            "encoder_hidden_states": _text(normal),
        },
    ),
    "WanTransformer3DModel": (
        {
            **{"num_attention_heads": 2, "attention_head_dim": 24},
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 32,
            "freq_dim": 32,
            "ffn_dim": 64,
            "num_layers": 2,
            "rope_max_seq_len": 32,
        },
        lambda normal: {
            "hidden_states": normal(2, 4, 2, 8, 8),
            "timestep": TIME,
            "encoder_hidden_states": _text(normal),
        },
    ),
    "LTXVideoTransformer3DModel": (
        {
            **HEADS,
            "in_channels": 4,
            "out_channels": 4,
            "cross_attention_dim": 32,
            "num_layers": 1,
            "caption_channels": 32,
        },
        lambda normal: {
            "hidden_states": normal(2, 32, 4),
            "timestep": TIME,
            "encoder_hidden_states": _text(normal),
            "encoder_attention_mask": torch.ones(2, 8, dtype=torch.bool),
            "num_frames": 2,
            "height": 4,
            "width": 4,
        },
    ),
}

# Names of timm, with the side of their images.
TIMM = {
    "test_vit": 160,
    "test_vit2": 64,
    "test_resnet": 160,
    "test_convnext": 160,
    "test_efficientnet": 160,
    "test_efficientnet_gn": 160,
    "test_nfnet": 160,
    "test_mambaout": 160,
    "test_byobnet": 160,
    "eva02_tiny_patch14_224": 224,
    "mobilevit_xxs": 128,
    "repvit_m0_9": 128,
    "levit_128s": 224,
    "xcit_nano_12_p16_224": 128,
}
