"""The section about models: their types, and the modules that are not in half, with the reasons."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn

from amp_engine.casting.keep_float import kept_modules
from amp_engine.engine import Engine
from amp_engine.ground.distributed import is_sharded
from amp_engine.ground.dtypes import LOW_PRECISION, dtype_name
from amp_engine.ground.torch_private import BatchNormBase
from amp_engine.levels.policy import Policy
from amp_engine.tools.page.page import Block, Named, Section, Sentence, Table
from amp_engine.tools.telemetry.wording import plural, size

BY_KEEP_FLOAT = "amp.keep_float"
BY_KEEP_FLOAT_O1 = "amp.keep_float: no function is cast inside of its forward"
BY_BATCH_NORM = "batch norm, by keep_batchnorm_fp32=True"
IS_SHARD = "an FP32 shard: fully_shard casts it for forward and backward"
IS_SHARED = "shared with {0}, which is kept"
NOT_FLOATING = "not floating point"
CAME_SINCE = "in this type since initialize: the module was added, or cast, afterwards"


@dataclass(frozen=True)
class OfType:
    """The tensors of one type in a model.

    Attributes:
        kind: "parameters" or "buffers".
        dtype: their type.
        tensors, elements, bytes: their numbers; a tensor with two names counts once.
    """

    kind: str
    dtype: str
    tensors: int
    elements: int
    bytes: int


@dataclass(frozen=True)
class Kept:
    """Tensors of one module that a level does not cast to half.

    Attributes:
        module: name of the module in the model; "" is the model itself.
        class_name: class of the module.
        dtype: type of the tensors; None if the level casts functions but no weights, and the whole module is kept.
        tensors, elements: their numbers.
        why: the reason.
    """

    module: str
    class_name: str
    dtype: str | None
    tensors: int
    elements: int
    why: str


@dataclass(frozen=True)
class Model:
    """An initialized model.

    Attributes:
        name: "" for a single model, else "models[0]" and so on.
        class_name: class of the model.
        types: types of its parameters and buffers.
        kept: its tensors that are not in half.
    """

    name: str
    class_name: str
    types: tuple[OfType, ...]
    kept: tuple[Kept, ...]


def described(engine: Engine, policy: Policy) -> tuple[Model, ...]:
    """Describe each initialized model under a policy. Changes nothing. No host sync."""
    return tuple(
        Model(name, type(model).__name__, tuple(_types(model)), tuple(_kept(model, policy)))
        for name, model in named(engine)
    )


def named(engine: Engine) -> list[tuple[str, nn.Module]]:
    """Each initialized model with its name: "" for a single one, else "models[0]" and so on."""
    models = engine._initialized.models
    return [(f"models[{i}]" if len(models) > 1 else "", model) for i, model in enumerate(models)]


def measured(tensors: Iterable[Tensor]) -> list[Tensor]:
    """The tensors that have a shape; parameters of lazy modules have none before the first forward."""
    return [tensor for tensor in tensors if not nn.parameter.is_lazy(tensor)]


def section(models: Sequence[Model]) -> Section:
    """The types of each model, and its modules that are not in half."""
    return Section("Models", [block for model in models for block in _blocks(model)])


def shown_name(module: str) -> str:
    """The name of a module; the model itself has none."""
    return module or "(the model itself)"


def _blocks(model: Model) -> Iterator[Block]:
    yield Sentence(f"{model.name}: {model.class_name}" if model.name else model.class_name, "title")
    rows = [
        (t.kind, t.dtype, plural(t.elements, "element"), f"in {plural(t.tensors, 'tensor')}", size(t.bytes))
        for t in model.types
    ]
    if rows:
        yield Table(rows, numbers=(2, 4), indent=1)
    if model.kept:
        yield Sentence("not in half:", indent=1)

    def key(one: Kept) -> tuple[str, str, str]:
        return one.why, one.class_name, one.dtype or ""

    for (why, class_name, dtype), group in groupby(sorted(model.kept, key=key), key):
        kept = list(group)
        elements = plural(sum(one.elements for one in kept), "element")
        what = f"{dtype}, {why}" if dtype else why
        names = [shown_name(one.module) for one in kept]
        yield Named(f"{len(kept)} x {class_name}, {elements}: {what}", names, indent=2)


def _types(model: nn.Module) -> Iterator[OfType]:
    for kind, tensors in (("parameters", measured(model.parameters())), ("buffers", measured(model.buffers()))):
        for dtype in dict.fromkeys(t.dtype for t in tensors):
            of_type = [t for t in tensors if t.dtype is dtype]
            elements = sum(t.numel() for t in of_type)
            yield OfType(kind, dtype_name(dtype), len(of_type), elements, elements * dtype.itemsize)


def _kept(model: nn.Module, policy: Policy) -> Iterator[Kept]:
    is_half = policy.cast_model_type in LOW_PRECISION or any(p.dtype in LOW_PRECISION for p in model.parameters())
    if is_half:
        yield from _kept_in_half_model(model, policy)
    elif policy.patch_torch_functions:
        names = {module: name for name, module in model.named_modules()}
        for module, _ in kept_modules(model):
            tensors = measured([*module.parameters(), *module.buffers()])
            count = sum(t.numel() for t in tensors)
            yield Kept(names[module], type(module).__name__, None, len(tensors), count, BY_KEEP_FLOAT_O1)


def _kept_in_half_model(model: nn.Module, policy: Policy) -> Iterator[Kept]:
    by_user = {part for module, _ in kept_modules(model) for part in module.modules()}
    names = {module: name for name, module in model.named_modules()}
    reasons: dict[int, tuple[str, str]] = {}  # by id of a kept tensor: the reason and the module
    for module, name in names.items():
        is_norm = isinstance(module, BatchNormBase) and module.affine and bool(policy.keep_batchnorm_fp32)
        why = BY_KEEP_FLOAT if module in by_user else BY_BATCH_NORM if is_norm else None
        for tensor in _own(module) if why is not None else ():
            reasons.setdefault(id(tensor), (str(why), name))
    for module, name in names.items():
        found: dict[tuple[torch.dtype, str], list[Tensor]] = {}
        for tensor in _own(module):
            if tensor.dtype in LOW_PRECISION:
                continue
            why, owner = reasons.get(id(tensor), (IS_SHARD if is_sharded(tensor) else CAME_SINCE, name))
            if not tensor.is_floating_point():
                why = NOT_FLOATING
            elif owner != name:
                why = IS_SHARED.format(owner or "the model")
            found.setdefault((tensor.dtype, why), []).append(tensor)
        for (dtype, why), tensors in found.items():
            count = sum(t.numel() for t in tensors)
            yield Kept(name, type(module).__name__, dtype_name(dtype), len(tensors), count, why)


def _own(module: nn.Module) -> Sequence[Tensor]:
    return measured([*module.parameters(recurse=False), *module.buffers(recurse=False)])
