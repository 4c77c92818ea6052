"""Every architecture of transformers, and how a tiny random model of it is built, saved and loaded."""

from __future__ import annotations

import copy
import functools
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

from tests.zoo.inputs import layout_of, make, normal_numbers
from tests.zoo.others import DIFFUSERS, TIMM
from tests.zoo.special import CHANGES
from tests.zoo.tiny import PLANS, tiny_config

LARGEST = 80e6  # parameters
PATIENCE = 30  # seconds, for attempts to build one that runs

# The first mapping that has an architecture names its class, unless no tiny model of that class runs.
HEADS = (
    "SPEECH_SEQ_2_SEQ",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "IMAGE_TEXT_TO_TEXT",
    "MASKED_LM",
    "CAUSAL_LM",
    "CTC",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "IMAGE_CLASSIFICATION",
    "OBJECT_DETECTION",
    "UNIVERSAL_SEGMENTATION",
    "SEMANTIC_SEGMENTATION",
    "DEPTH_ESTIMATION",
    "VIDEO_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "SEQUENCE_CLASSIFICATION",
    "TIME_SERIES_PREDICTION",
    "TEXT_TO_WAVEFORM",
    "MULTIMODAL_LM",
    "PRETRAINING",
)


@dataclass
class Model:
    """A tiny random model in FP32.

    Attributes:
        plan: how its config was made small.
        inputs: from a seed; floating ones are FP32 numbers that bfloat16 has.
        load: the same weights as a checkpoint's loader gives them in a dtype.
    """

    module: nn.Module
    plan: str
    inputs: Callable[[int], dict[str, Any]]
    load: Callable[[torch.dtype], nn.Module]


def architectures() -> list[str]:
    """Those of transformers' registry, and some of diffusers and timm."""
    others = [*(f"diffusers/{name}" for name in DIFFUSERS), *(f"timm/{name}" for name in TIMM)]
    return sorted({kind for mapping in _mappings().values() for kind in mapping}) + others


@functools.cache
def _mappings() -> dict[str, dict[str, str]]:
    return {
        name: dict(getattr(modeling_auto, name))
        for name in dir(modeling_auto)
        if name.startswith("MODEL_") and name.endswith("NAMES")
    }


def classes_of(architecture: str) -> list[str]:
    """Names of classes, the best first: one with a head, then the base model."""
    names = [f"MODEL_FOR_{head}_MAPPING_NAMES" for head in HEADS] + ["MODEL_MAPPING_NAMES"]
    found = [_mappings()[name].get(architecture) for name in names if name in _mappings()]
    found = [name if isinstance(name, str) else name[0] for name in found if name]
    others = [mapping[architecture] for mapping in _mappings().values() if architecture in mapping]
    others = [name if isinstance(name, str) else name[0] for name in others]
    chosen = [*found[:1], *found[-1:], *others]
    return list(dict.fromkeys(name for name in chosen if hasattr(transformers, name)))[:5]


def build(architecture: str, folder: str) -> Model:
    """A small random model of an architecture, whose name begins with its library if that is not transformers."""
    library, _, name = architecture.rpartition("/")
    return {"": _of_transformers, "diffusers": _of_diffusers, "timm": _of_timm}[library](name, folder)


def _of_diffusers(name: str, folder: str) -> Model:
    import diffusers

    kind = getattr(diffusers, name)
    settings, inputs_from = DIFFUSERS[name]
    torch.manual_seed(0)
    module = kind(**settings).eval()
    as_trained(module)
    module.save_pretrained(folder)
    return Model(
        module,
        "by hand",
        inputs=lambda seed: inputs_from(normal_numbers(seed)),
        load=lambda dtype: kind.from_pretrained(folder, torch_dtype=dtype),
    )


def _of_timm(name: str, folder: str) -> Model:
    import timm

    torch.manual_seed(0)
    module = timm.create_model(name, num_classes=10).eval()
    as_trained(module)
    return Model(
        module,
        "by hand",
        inputs=lambda seed: {"x": normal_numbers(seed)(2, 3, TIMM[name], TIMM[name])},
        load=lambda dtype: copy.deepcopy(module).to(dtype),
    )


def _of_transformers(architecture: str, folder: str) -> Model:
    """A tiny model of it. Raises what the first attempt raised if no class runs with any plan."""
    first: Exception | None = None
    started = time.monotonic()
    for plan in PLANS:
        for name in classes_of(architecture):
            if first and time.monotonic() - started > PATIENCE:
                raise first
            try:
                return _build(architecture, name, plan, folder)
            except Exception as error:
                first = first or error
    raise first or LookupError("transformers has no class for it")


def _build(architecture: str, class_name: str, plan: str, folder: str) -> Model:
    kind = getattr(transformers, class_name)
    config = tiny_config(CONFIG_MAPPING[architecture], plan, CHANGES.get(architecture, {}))
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind(config).parameters())
    if size > LARGEST:
        raise ValueError(f"no tiny config: {size / 1e6:.0f} million parameters")
    torch.manual_seed(0)
    module = kind(config).eval()
    as_trained(module)

    probed = copy.deepcopy(module)  # a forward may keep tensors in attributes

    def run(inputs: dict[str, Any]) -> None:
        with torch.no_grad():
            probed(**inputs)

    layout = layout_of(probed, run)
    module.save_pretrained(folder)
    return Model(
        module,
        plan,
        inputs=lambda seed: make(module, seed, layout),
        load=lambda dtype: kind.from_pretrained(folder, dtype=dtype),
    )


@torch.no_grad()
def as_trained(module: nn.Module) -> None:
    """Give the tensors values of a size that training gives them.

    As they are first drawn, weights are so small, and branches of blocks so near zero, that a wrong table of
    positions or a rounded statistic would hardly change an output.
    """
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        if not parameter.is_floating_point() or not parameter.numel():
            continue
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        if parameter.dim() >= 2:
            wanted = parameter[0].numel() ** -0.5
            spread = float(parameter.std()) if parameter.numel() > 1 else 0.0
            if not spread > 1e-4 * float(parameter.abs().max()):  # a constant, whose spread is the mean's rounding
                parameter.add_(noise, alpha=wanted)
            elif spread < wanted:
                parameter.mul_(wanted / spread)
        elif parameter.abs().max() < 0.1:
            parameter.add_(noise, alpha=0.1)
    saved = set(module.state_dict())
    for name, buffer in module.named_buffers():
        if name in saved and buffer.is_floating_point() and buffer.numel() > 1:
            noise = torch.rand(buffer.shape, generator=generator).to(buffer.dtype)
            if not buffer.any():
                buffer.add_(noise - 0.5, alpha=0.2)
            elif (buffer == 1).all():
                buffer.add_(noise - 0.5)


def measured(architecture: str) -> dict[str, Any]:
    """The row of an architecture; its one key is `error` if no model of it is built or runs in FP32."""
    from tests.zoo.measure import row_of, text_of

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            model = build(architecture, folder)
        except Exception as error:
            return {"error": text_of(error)}
        return row_of(model)
