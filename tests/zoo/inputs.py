"""Inputs of a model, made by the names of its forward's arguments."""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

BATCH = 2
LENGTH = 128
TOKENS = (5, 38)  # none of them means anything to a model
FRAMES = 4


def normal_numbers(seed: int) -> Callable[..., Tensor]:
    """A function from a shape to random numbers, which bfloat16 has."""
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator).bfloat16().float()


class Maker:
    """Makes one input at a time; each of its methods is the name of an argument.

    `layout` tells apart the layouts that models want of the same argument.
    """

    def __init__(self, model: nn.Module, seed: int, layout: dict[str, int]) -> None:
        self.config = model.config
        self.generator = torch.Generator().manual_seed(seed)
        self.layout = layout
        self.arguments = inspect.signature(model.forward).parameters

    def setting(self, *names: str, default: int = 0, of: tuple[str, ...] = ("vision_config", "audio_config")) -> int:
        """The first of the settings that the config has, or one of its parts."""
        parts = [getattr(self.config, name) for name in of if hasattr(self.config, name)]
        others = [part for name, part in vars(self.config).items() if hasattr(part, "to_dict") and name not in of]
        parts += [
            inner
            for part in (*parts, *others)
            for inner in getattr(part, "__dict__", {}).values()
            if hasattr(inner, "to_dict")
        ]
        for part in (*parts, self.config, *others):
            for name in names:
                value = getattr(part, name, None)
                if isinstance(value, (list, tuple)) and value:
                    value = value[0]
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    return value
        return default

    def normal(self, *shape: int) -> Tensor:
        """Random numbers that bfloat16 has."""
        return torch.randn(*shape, generator=self.generator).bfloat16().float()

    def tokens(self, *shape: int) -> Tensor:
        return torch.randint(*TOKENS, shape, generator=self.generator)

    # Text
    def input_ids(self):
        ids = self.tokens(BATCH, LENGTH)
        for token, count in self.layout.get("placeholders", {}).items():
            ids = torch.cat([ids[:, :4], torch.full((BATCH, count), token), ids[:, 4:]], 1)
        return ids

    def attention_mask(self):
        return torch.ones(BATCH, self.input_ids().shape[1], dtype=torch.long) if "input_ids" in self.arguments else None

    def mm_token_type_ids(self):
        return torch.isin(self.input_ids(), torch.tensor(list(self.layout.get("placeholders", {})))).long()

    def use_cache(self):
        return False

    def image_embeds_position_mask(self):
        return (torch.arange(LENGTH) < self.setting("latent_query_num")).long().repeat(BATCH, 1)

    def image_attention_mask(self):
        return torch.ones(BATCH, LENGTH, 1, dtype=torch.long)

    def encoder_hidden_states(self):
        return self.normal(BATCH, 16, self.config.encoder_hidden_size) if "query_embeds" in self.arguments else None

    def bbox(self):
        corners = torch.randint(0, 60, (BATCH, LENGTH, 4), generator=self.generator)
        return torch.cat([corners[..., :2], corners[..., :2] + corners[..., 2:]], -1)

    # Images
    def channels(self) -> int:
        return self.setting("num_channels", "in_channels", "in_chans", default=3)

    def size(self) -> int:
        return self.setting("image_size", "img_size", default=64)

    def image(self) -> tuple[int, int, int]:
        parts = (self.config, getattr(self.config, "backbone_config", None))
        size = next((size for part in parts if (size := getattr(part, "image_size", None))), None)
        return self.channels(), *(
            size if isinstance(size, (list, tuple)) and len(size) == 2 else (self.size(), self.size())
        )

    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return 8, 8

    def pixel_values(self):
        kind = self.layout.get("pixel_values", 0)
        if {
            "image_grid_thw",
            "grid_thw",
            "image_grid_hw",
            "spatial_shapes",
            "pixel_position_ids",
            "image_position_ids",
        } & set(self.arguments):
            patch = self.setting("patch_size", default=8)
            temporal = self.setting("temporal_patch_size", "patch_temporal", default=1)
            rows, columns = self.grid()
            count = rows * columns
            dimension = self.channels() * patch * patch
            shapes = [
                (BATCH * count, dimension * temporal),
                (BATCH * count, self.channels(), patch, patch),
                (BATCH, count, dimension),
                (1, BATCH * count, self.channels(), patch, patch),
                (BATCH, count, dimension * temporal),
                (BATCH * count * patch * patch, self.channels()),
                (BATCH * count, self.channels(), temporal, patch, patch),
                (BATCH, self.channels(), self.size(), self.size()),
            ]
        else:
            image = self.image()
            frames = self.setting("num_frames", "frames_per_clip", default=FRAMES)
            shapes = [(BATCH, *image), (BATCH, 1, *image), (BATCH, frames, *image), (BATCH, 2, *image)]
            patch = self.setting("patch_size", default=8)
            shapes += [
                (BATCH, image[0], 256, 256),
                (BATCH, (self.size() // patch) ** 2, self.channels() * patch * patch),
                (BATCH, image[0], 32, 32),
                (BATCH, image[0], 128, 128),
            ]
        if "aspect_ratio_ids" in self.arguments:
            return self.normal(BATCH, 1, self.setting("max_num_tiles", default=4), *image)
        return self.normal(*shapes[kind % len(shapes)])

    hidden_states = pixel_values

    def pixel_values_videos(self):
        if "pixel_values" in self.arguments:
            return None
        return self.normal(
            BATCH,
            self.setting("num_frames", "frames_per_clip", default=FRAMES),
            self.channels(),
            self.size(),
            self.size(),
        )

    def grid_thw(self):
        return torch.tensor([[1, *self.grid()]] * BATCH)

    image_grid_thw = grid_thw

    def image_grid_hw(self):
        return torch.tensor([self.grid()] * BATCH)

    spatial_shapes = target_sizes = image_grid_hw

    def merge_sizes(self):
        return torch.tensor([self.setting("spatial_merge_size", default=1)] * BATCH)

    image_merge_sizes = merge_sizes

    def pixel_position_ids(self):
        rows, columns = self.grid()
        return torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).repeat(BATCH, 1, 1)

    image_position_ids = pixel_position_ids

    def image_sizes(self):
        return torch.tensor([[self.size(), self.size()]] * BATCH)

    def pixel_attention_mask(self):
        rows, columns = self.grid()
        return torch.ones(BATCH, rows * columns, dtype=torch.long) if "spatial_shapes" in self.arguments else None

    # Sound
    def input_values(self):
        length = 4096
        bins = self.setting("num_mel_bins", default=32)
        shapes = [
            (BATCH, length),
            (BATCH, 1, length),
            (BATCH, 3840),
            (BATCH, self.setting("max_length", default=64), bins),
            (BATCH, bins, 64),
            (BATCH, 64, bins),
        ]
        return self.normal(*shapes[self.layout.get("input_values", 0) % len(shapes)])

    def frames(self) -> int:
        longest = self.setting("max_source_positions", default=0, of=("audio_config", "encoder_config"))
        return 2 * longest if longest else 128

    def input_features(self):
        bins = self.setting(
            "num_mel_bins",
            "feature_size",
            "input_feat_per_channel",
            "feature_projection_input_dim",
            "input_dim",
            "input_feat_size",
            default=32,
            of=("audio_config", "encoder_config"),
        )
        bins *= self.setting("num_stacked_frames", default=1)
        frames = self.frames()
        shapes = [
            (BATCH, bins, frames),
            (BATCH, frames, bins),
            (BATCH, 1, frames, bins),
            (BATCH, bins, 200),
            (BATCH, 200, bins),
            (BATCH, 64, 64),
            (BATCH, 64, 128),
            (BATCH, bins, 600),
        ]
        return self.normal(*shapes[self.layout.get("input_features", 0) % len(shapes)])

    audio_mel = input_features

    def input_features_mask(self):
        features = self.input_features()
        if features.dim() == 3:
            frames = features.shape[1 if self.layout.get("input_features", 0) in (1, 4) else 2]
            return torch.ones(BATCH, frames, dtype=torch.long)
        return None

    feature_attention_mask = input_features_mask

    def audio_mel_mask(self):
        return torch.zeros(BATCH, self.input_features().shape[1], dtype=torch.bool)

    # What few models have
    def decoder_input_ids(self):
        channels = self.setting("num_channels", of=("decoder_config",)) if hasattr(self.config, "decoder_config") else 1
        return self.tokens(BATCH, LENGTH // 2, channels) if channels > 3 else self.tokens(BATCH, LENGTH // 2)

    def states(self):
        return self.normal(BATCH, 16, self.config.state_dim)

    def actions(self):
        return self.normal(BATCH, 16, self.config.act_dim)

    def rewards(self):
        return self.normal(BATCH, 16, 1)

    returns_to_go = rewards

    def timesteps(self):
        return torch.arange(16).repeat(BATCH, 1)

    def flattened_patches(self):
        rows, columns = self.grid()
        places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).float()
        width = self.setting("patch_embed_hidden_size", default=64)
        return torch.cat([places.repeat(BATCH, 1, 1), self.normal(BATCH, rows * columns, width)], -1)

    def qformer_input_ids(self):
        return self.tokens(BATCH, 16)

    tasks_input_ids = qformer_input_ids

    def task_inputs(self):
        return self.tokens(BATCH, self.setting("task_seq_len", default=16))

    def tasks_attention_mask(self):
        return torch.ones(BATCH, 16, dtype=torch.long)

    def classes_input_ids(self):
        return self.tokens(2 * BATCH, 16)

    def classes_attention_mask(self):
        return torch.ones(2 * BATCH, 16, dtype=torch.long)

    def classes_structure(self):
        return torch.full((BATCH,), 2)

    def query_embeds(self):
        return self.normal(BATCH, 8, self.config.hidden_size)

    def latents(self):
        return self.normal(BATCH, self.config.hidden_size, 16)

    def visual_feats(self):
        return self.normal(BATCH, 16, self.config.visual_feat_dim)

    def visual_pos(self):
        return self.normal(BATCH, 16, self.config.visual_pos_dim)

    def high_res_pixel_values(self):
        return self.normal(
            BATCH,
            3,
            self.setting("image_size", of=("high_res_vision_config",)),
            self.setting("image_size", of=("high_res_vision_config",)),
        )

    def aspect_ratio_ids(self):
        return torch.ones(BATCH, 1, dtype=torch.long)

    def aspect_ratio_mask(self):
        return torch.ones(BATCH, 1, self.setting("max_num_tiles", default=4), dtype=torch.long)

    def prompt_pixel_values(self):
        return self.normal(BATCH, 3, self.size(), self.size())

    prompt_masks = prompt_pixel_values

    # Series
    def past_values(self):
        length, channels = self.setting("context_length", default=64), self.setting("num_input_channels", default=1)
        length += max(getattr(self.config, "lags_sequence", None) or [0])
        shapes = [(BATCH, length), (BATCH, length, channels)]
        return self.normal(*shapes[self.layout.get("past_values", 0) % 2])

    def past_values_padding(self):
        return torch.zeros(BATCH, self.past_values().shape[1])

    def past_observed_mask(self):
        return torch.ones_like(self.past_values())

    def past_time_features(self):
        return self.normal(*self.past_values().shape[:2], self.config.num_time_features)

    def future_values(self):
        return self.normal(BATCH, self.config.prediction_length) if "past_time_features" in self.arguments else None

    def future_time_features(self):
        return self.normal(BATCH, self.config.prediction_length, self.config.num_time_features)

    def freq(self):
        return torch.zeros(BATCH, 1, dtype=torch.long)


TEXT = ("input_ids", "attention_mask", "decoder_input_ids", "bbox", "mm_token_type_ids", "use_cache")
LAYOUTS = {"pixel_values": 8, "input_values": 6, "input_features": 8, "past_values": 2}


def make(model: nn.Module, seed: int, layout: dict[str, Any]) -> dict[str, Any]:
    """The inputs of a model in one layout."""
    found = {}
    for name in inspect.signature(model.forward).parameters:
        if layout.get("text only") and name not in TEXT:
            continue
        if callable(getattr(Maker, name, None)) and name not in (
            "channels",
            "size",
            "image",
            "grid",
            "frames",
            "tokens",
            "normal",
            "setting",
        ):
            # Each argument has a generator of its own: the layout of one does not change another.
            value = getattr(Maker(model, seed, layout), name)()
            if value is not None:
                found[name] = value
    return found


def layout_of(model: nn.Module, run: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """A layout with which the model runs. Raises what the first one raised if there is none."""
    names = [
        name
        for name in LAYOUTS
        if name in inspect.signature(model.forward).parameters
        or name == "pixel_values"
        and "hidden_states" in inspect.signature(model.forward).parameters
    ]
    first = None
    layouts: list[dict[str, Any]] = [
        dict(zip(names, kinds, strict=True)) for kinds in itertools.product(*(range(LAYOUTS[name]) for name in names))
    ][:40]
    if "input_ids" in inspect.signature(model.forward).parameters and names:
        layouts.append({"text only": True})
    for layout in layouts:
        for _ in range(4):  # placeholders for images and for sound
            try:
                run(make(model, 0, layout))
                return layout
            except Exception as error:
                if not _placeholders(model, error, layout):
                    first = first or error
                    break
    raise first


def _placeholders(model: nn.Module, error: Exception, layout: dict[str, Any]) -> bool:
    """Put as many placeholders into the text as the error says; False if it says nothing of them."""
    found = re.search(r"(?i)(image|video|audio)[^.]*tokens: ?(\d+).*?features:? ?(\d+)", str(error))
    if not found:
        return False
    kind, tokens, features = found[1].lower(), int(found[2]), int(found[3])
    config = model.config
    parts = [config, *(part for part in vars(config).values() if hasattr(part, "to_dict"))]
    tokens = [getattr(part, f"{kind}_token_{end}", None) for part in parts for end in ("id", "index")]
    token = next((token for token in tokens if isinstance(token, int)), None)
    if token is None:
        return False
    placeholders = layout.setdefault("placeholders", {})
    width = config.get_text_config().hidden_size
    if token in placeholders and placeholders[token] * BATCH == features:
        return False
    count = math.ceil(features / BATCH)
    if count > 600 or (token in placeholders):
        count = math.ceil(features / BATCH / width)
    if placeholders.get(token) == count:
        return False
    placeholders[token] = count
    return True
