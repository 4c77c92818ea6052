"""Find the modules that a policy or the model itself names, keep them in FP32, and undo that."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

from torch import nn

from amp_engine.casting.keep_float import is_kept, keep_float
from amp_engine.errors import AmpStateError, AmpValueError
from amp_engine.ground.distributed import has_fsdp2, is_sharded, without_wrapper
from amp_engine.ground.dtypes import LOW_PRECISION
from amp_engine.ground.torch_private import COMPILED, without_compiled
from amp_engine.initialization import arguments
from amp_engine.initialization.as_it_came import came_in_half, declared_modules
from amp_engine.levels import levels


@contextmanager
def kept(models: Any, names: Sequence[str], opt_level: str, cast_model_type: Any = None) -> Iterator[list[nn.Module]]:
    """Keep modules in FP32; undone if the body raises.

    Args:
        names: as in `RunPolicy.keep_float`; modules that a model in FP32 names itself are kept as well, at levels that
            cast the model.
        opt_level, cast_model_type: the level at which the models are about to be initialized, and its override.

    Yields:
        The modules that were not kept before. Raises AmpValueError for an unknown name, AmpStateError for a part of
        a model that cannot be kept, with nothing changed.
    """
    fresh: list[nn.Module] = []
    found = modules_named(arguments.as_models(models), names) if names else []
    declared: list[nn.Module] = []
    if levels.level(opt_level).override(cast_model_type=cast_model_type).cast_model_type in LOW_PRECISION:
        declared = [
            module
            for model in arguments.as_models(models)
            if not has_fsdp2(model) and not came_in_half(model)
            for _, module in declared_modules(model)
        ]
        for name, (model, module) in zip(names, found, strict=True):
            if not has_fsdp2(model) and any(map(is_sharded, module.parameters())):
                raise AmpStateError(
                    f"The policy keeps {name!r} in FP32, and tensor parallelism has made shards of it, which "
                    f"{opt_level} does not cast.  Leave the name out of the policy."
                )
    try:
        for module in [*(module for _, module in found), *declared]:
            if not is_kept(module):
                keep_float(module)
                fresh.append(module)
        yield fresh
    except BaseException:
        give_back(fresh)
        raise


def give_back(modules: Sequence[nn.Module]) -> None:
    """Undo `keep_float` of `modules`."""
    for module in modules:
        keep_float(module, False)


def modules_named(models: Sequence[nn.Module], names: Sequence[str]) -> list[tuple[nn.Module, nn.Module]]:
    """For each name the model and the module.

    Args:
        models: if there are several, names begin with `models[0]`.
        names: from `named_modules`. What torch.compile and DistributedDataParallel add to names may be missing, or be
            there although the models are no longer wrapped.

    Raises AmpValueError for an unknown name, with similar names.
    """
    known: dict[str, tuple[nn.Module, nn.Module]] = {}
    for i, model in enumerate(models):
        of = f"models[{i}]." if len(models) > 1 else ""
        inside = without_wrapper(getattr(model, COMPILED, model))
        for path, module in inside.named_modules(remove_duplicate=False):  # a wrapper comes before what is in it
            known[without_compiled(of + path).rstrip(".")] = model, module
    found = []
    for name in names:
        plain = without_compiled(name)
        one = known.get(plain) or known.get(re.sub(r"^(models\[\d+\]\.)?module\.", r"\1", plain))
        if one is None:
            near = get_close_matches(name, [path for path in known if path], 3)
            there = [path for path in known if path][:3]
            near_text = f"Near are {', '.join(near)}" if near else f"There are for example {', '.join(there)}"
            of_class = type(models[0]).__name__ if models else "empty list of models"
            several = f" in the {len(models)} models" if len(models) > 1 else f" in this {of_class}"
            raise AmpValueError(
                f"The policy keeps {name!r} in FP32, and no module has that name{several}.  {near_text}; "
                "model.named_modules() has all of them."
            )
        found.append(one)
    return found
