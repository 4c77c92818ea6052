"""What the rules of tiny.py do not get right, by architecture: settings to change."""

from __future__ import annotations

from typing import Any

from transformers import Dinov2Config, DINOv3ViTConfig, HGNetV2Config, ResNetConfig

MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}}
HALF_MROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [1, 1, 2],
    }
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16}
RESNET = ResNetConfig(
    embedding_size=16,
    hidden_sizes=[16, 32, 64, 64],
    depths=[1, 1, 1, 1],
    out_features=["stage1", "stage2", "stage3", "stage4"],
)
DETR = {"backbone_config": RESNET}
MIMI = {
    "upsample_groups": 64,
    "hidden_size": 64,
    "codebook_dim": 64,
    "vector_quantization_hidden_dimension": 64,
    "num_filters": 8,
}
DINO = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "image_size": 64,
    "patch_size": 8,
    "out_indices": [1, 2, 3, 4],
    "reshape_hidden_states": False,
}
GEMMA3N = {
    "intermediate_size": 128,
    "num_kv_shared_layers": 2,
    "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
    "vocab_size_per_layer_input": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
HGNET = {
    "backbone_config": HGNetV2Config(
        embedding_size=10,
        hidden_sizes=[64, 128, 256, 512],
        depths=[1, 1, 2, 1],
        stem_channels=[3, 16, 16],
        stage_in_channels=[16, 16, 32, 64],
        stage_mid_channels=[16, 32, 64, 128],
        stage_out_channels=[16, 32, 64, 128],
        stage_num_blocks=[1, 1, 2, 1],
        stage_numb_of_layers=[3, 3, 3, 3],
        out_features=["stage2", "stage3", "stage4"],
    ),
    "encoder_in_channels": [32, 64, 128],
}
SERIES = {"prediction_length": 16, "context_length": 32, "lags_sequence": [1, 2, 3], "num_time_features": 2}
HYBRID = ["linear_attention", "full_attention"] * 2
EDGETAM = {
    "backbone_config": {"architecture": "repvit_m1"},
    "backbone_channel_list": [384, 192, 96, 48],
    "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
}
GEMMA4 = {"vocab_size_per_layer_input": 128}

CHANGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "glm4v_text", "glm_image_text", "glm_ocr_text"), MROPE),
    **dict.fromkeys(
        ("qwen2_vl", "qwen2_5_vl", "glm4v", "glm46v", "glmga", "glm_ocr", "glm_image", "qwen2_5_omni_thinker"),
        {"text_config": MROPE},
    ),
    "glm4v_moe_text": HALF_MROPE,
    "glm4v_moe": {"text_config": HALF_MROPE},
    "bamba": {**MAMBA, "attn_layer_indices": [1, 3]},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 128},
    "granitemoehybrid": {**MAMBA, "layer_types": HYBRID},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16, "chunk_size": 16},
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 2, "mamba_dt_rank": 4},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "mamba_dt_rank": 4,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "mamba_headdim": 16,
        "attention_head_dim": 32,
        "attention_hidden_size": 128,
        "kv_channels": 16,
        "n_mamba_heads": 8,
        "hybrid_layer_ids": [1, 3],
        "num_query_groups": 4,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "reformer": {"axial_pos_shape": (16, 32), "axial_pos_embds_dim": (16, 48), "num_buckets": 8},
    "gptj": {"rotary_dim": 8},
    "codegen": {"rotary_dim": 8},
    **dict.fromkeys(("conditional_detr", "dab-detr", "detr", "table-transformer"), DETR),
    "deformable_detr": {"backbone_config": RESNET, "num_feature_levels": 4},
    "mimi": MIMI,
    "mimi_decoder": MIMI,
    "mimi_encoder": MIMI,
    "csm": {"codec_config": MIMI},
    "depth_anything": {
        "backbone_config": Dinov2Config(**DINO),
        "neck_hidden_sizes": [16, 32, 64, 64],
        "reassemble_hidden_size": 64,
        "patch_size": 8,
    },
    "prompt_depth_anything": {
        "backbone_config": Dinov2Config(**DINO),
        "neck_hidden_sizes": [16, 32, 64, 64],
        "reassemble_hidden_size": 64,
        "patch_size": 8,
    },
    "chmv2": {
        "backbone_config": DINOv3ViTConfig(**DINO, return_class_token=True),
        "post_process_channels": [16, 32, 64, 64],
        "patch_size": 8,
    },
    "gemma3n_text": GEMMA3N,
    "gemma3n": {"text_config": GEMMA3N},
    "gemma4_text": GEMMA4,
    "gemma4": {"text_config": GEMMA4},
    "gemma3": {"mm_tokens_per_image": 16},
    "t5gemma2": {"mm_tokens_per_image": 16},
    "aria": {"projector_patch_to_query_dict": {64: 16}, "max_value_projector_patch_to_query_dict": 16},
    "chameleon": {"vocabulary_map": {"<image>": 100, **{f"IMGIMG{chr(65 + i)}Z": i for i in range(26)}}},
    "blip-2": {"image_token_index": 100},
    "llava": {"vision_config": {"patch_size": 8}},
    "vipllava": {"vision_feature_layer": (-2, -3)},
    "esm": {"pad_token_id": 1, "mask_token_id": 4},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 16}},
    **dict.fromkeys(("d_fine", "deimv2", "pp_doclayout_v3", "pp_doclayout_v4"), HGNET),
    **dict.fromkeys(("autoformer", "informer", "time_series_transformer"), SERIES),
    "dbrx": {"attn_config": {"rope_theta": 10000.0}, "n_heads": 4},
    "emu3": {
        "vocabulary_map": {"<|extra_200|>": 98, "<image>": 99, **{f"<|visual token {i:06}|>": i for i in range(32)}}
    },
    "fast_vlm": {"vision_config": {"architecture": "fastvit_t8", "hidden_size": 768}},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "granite4_vision": {"deepstack_layer_map": [(1, 0), (2, 1)]},
    "kyutai_speech_to_text": {"codec_config": MIMI},
    "apertus1p5": {"text_config": {"vocab_size": 400}, "image_token_offset": 128, "audio_token_offset": 256},
    "depth_pro": {
        "patch_size": 64,
        "intermediate_hook_ids": (3, 1),
        "intermediate_feature_dims": (64, 64),
        "scaled_images_feature_dims": (64, 64, 64),
    },
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0}},
    "instructblip": {"image_token_index": 100},
    "instructblipvideo": {"video_token_index": 100},
    "edgetam": {"vision_config": EDGETAM},
    "edgetam_vision_model": EDGETAM,
    "gemma4_audio": {"subsampling_conv_channels": [128, 32]},
    "gemma3n_audio": {"input_feat_size": 128, "sscp_conv_channel_size": (128, 32)},
    "gemma4_vision": {"pooling_kernel_size": 2},
    "hunyuan_vl_text": MROPE,
    "moonshine_streaming": {"num_key_value_heads": 4},
    "molmo2": {"adapter_config": {"vision_feature_layer": [3, 1]}},
    "vitmatte": {"fusion_hidden_sizes": [16, 16, 16, 16], "convstream_hidden_sizes": [8, 8, 16]},
    "dpt": {"backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [16, 32, 64, 64]},
    "llama4": {"vision_config": {"intermediate_size": 256}},
    "nemotron_h": {"mamba_num_heads": 8, "n_groups": 2, "mamba_head_dim": 16, "ssm_state_size": 16},
    "lw_detr": {
        "projector_scale_factors": [1.0],
        "backbone_config": {"window_block_indices": [0, 1], "out_indices": [2, 4]},
    },
    "mgp-str": {"image_size": [32, 128]},
    "perceiver": {"num_latents": 16, "d_latents": 64, "d_model": 64, "num_self_attends_per_block": 2},
    "lxmert": {"l_layers": 2, "x_layers": 2, "r_layers": 2},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "dots1": {"first_k_dense_replace": 1},
    "deepseek_v2": {},
}
