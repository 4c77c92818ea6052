"""The section about dimensions of matrix products in half that are not multiples of 8, the size for tensor cores.

NVIDIA's "Train With Mixed Precision" asks for multiples of 8 in the sizes of linear layers, channels, vocabularies and
batches of 2-byte types. From cuBLAS 11 and cuDNN 7.6.3 on, other sizes also run on tensor cores, but slower: 8 elements
are 16 bytes ("Matrix Multiplication Background User's Guide", same site, section "Tensor Core Requirements").
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from amp_engine.casting.keep_float import kept_modules
from amp_engine.engine import Engine
from amp_engine.ground.distributed import fsdp2_param_dtypes
from amp_engine.ground.dtypes import LOW_PRECISION
from amp_engine.tools.page.page import Block, Named, Section, Sentence
from amp_engine.tools.telemetry.receipt.models import measured, named, shown_name
from amp_engine.tools.telemetry.wording import plural

MULTIPLE = 8
_LINK = "https://docs.nvidia.com/deeplearning/performance/mixed-precision-training/index.html"
_RULE = (
    "Tensor cores want the dimensions of matrix products in float16 and bfloat16 in multiples of 8.  Pad these, if the "
    'model is yours to change (NVIDIA, "Train With Mixed Precision"):'
)

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class Shape:
    """A dimension of a matrix product in half that is not a multiple of 8.

    Attributes:
        module: name of the module, after the name of its model if there are several.
        class_name: class of the module.
        dimension: the name in the module's class, such as "out_features".
        size: size of the dimension.
        pad_to: the next multiple of 8.
    """

    module: str
    class_name: str
    dimension: str
    size: int
    pad_to: int


@dataclass(frozen=True)
class Shapes:
    """The audit of shapes for tensor cores.

    Attributes:
        audited: number of modules that compute matrix products in half.
        found: the dimensions to pad.
    """

    audited: int
    found: tuple[Shape, ...]


NONE = Shapes(0, ())


def described(engine: Engine) -> Shapes:
    """Count the modules that compute matrix products in half, and find the dimensions to pad.

    Covers Linear, convolutions, attention, recurrent networks and their cells, and the outputs of embeddings. An
    embedding's number of rows is no dimension of a product, unless a Linear shares the weight; that Linear is audited
    itself. Depthwise convolutions are no matrix products.
    """
    audited, found = 0, []
    for prefix, model in named(engine):
        for name, module in _computing_in_half(model, engine.function_casts.casts is not None):
            audited += 1
            where = ".".join(filter(None, (prefix, name)))
            for dimension, size in _sizes(module):
                if size % MULTIPLE:
                    padded = -(-size // MULTIPLE) * MULTIPLE
                    found.append(Shape(where, type(module).__name__, dimension, size, padded))
    return Shapes(audited, tuple(found))


def _computing_in_half(model: nn.Module, has_casts: bool) -> Iterator[tuple[str, nn.Module]]:
    in_float = {part for module, _ in kept_modules(model) for part in module.modules()}
    inside = {child for m in model.modules() if isinstance(m, nn.MultiheadAttention) for child in m.children()}
    is_cast_by_fsdp2 = bool(fsdp2_param_dtypes(model) & set(LOW_PRECISION))
    for name, module in model.named_modules():
        if module in inside or module in in_float or not any(_sizes(module)):
            continue
        params = measured(module.parameters(recurse=False))
        is_half = any(p.dtype in LOW_PRECISION for p in params) or is_cast_by_fsdp2
        if is_half or (has_casts and not isinstance(module, (nn.Embedding, nn.EmbeddingBag))):
            yield name, module


def section(shapes: Shapes) -> Section:
    """The dimensions to pad; modules of the same class with the same dimension and size share a line."""
    groups: dict[str, list[str]] = {}
    for one in shapes.found:
        words = f"{one.class_name}: {one.dimension} = {one.size}, pad to {one.pad_to}"
        groups.setdefault(words, []).append(shown_name(one.module))
    blocks: list[Block]
    if groups:
        blocks = [Sentence(_RULE, link=_LINK), *(Named(words, names) for words, names in groups.items())]
    elif shapes.audited:
        blocks = [Sentence(f"Every dimension is a multiple of 8.  ({plural(shapes.audited, 'module')})", "soft")]
    else:
        blocks = [Sentence("No module that is looked at computes a matrix product in half.", "soft")]
    return Section("Shapes for tensor cores", blocks)


def _sizes(module: nn.Module) -> Iterator[tuple[str, int]]:
    """Yield names and sizes of the dimensions of a module's products, without batches and sequences."""
    if isinstance(module, nn.Linear):
        yield from (("in_features", module.in_features), ("out_features", module.out_features))
    elif isinstance(module, _CONVOLUTIONS):
        channels = module.in_channels // module.groups, module.out_channels // module.groups
        if module.groups == 1:
            yield from (("in_channels", channels[0]), ("out_channels", channels[1]))
        elif channels[0] > 1:
            yield from (("in_channels of a group", channels[0]), ("out_channels of a group", channels[1]))
    elif isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        yield "embedding_dim", module.embedding_dim
    elif isinstance(module, nn.MultiheadAttention):
        yield from (("embed_dim", module.embed_dim), ("embed_dim / num_heads", module.head_dim))
        for name in ("kdim", "vdim"):
            if getattr(module, name) != module.embed_dim:
                yield name, getattr(module, name)
    elif isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        yield from (("input_size", module.input_size), ("hidden_size", module.hidden_size))
        if getattr(module, "proj_size", 0):
            yield "proj_size", int(module.proj_size)  # type: ignore[arg-type]  # cells lack it
