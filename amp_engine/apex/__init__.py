"""The package that `import apex` finds: apex's packages, on amp_engine and today's PyTorch.

Three ways in: `from amp_engine import amp`; `import amp_engine.apex.install` at the top of a program; `python -m
amp_engine.apex train.py` for a script that stays as it is. See docs/migrating_from_apex.md.
"""

import importlib
from types import ModuleType

_PARTS = (
    "amp",
    "fp16_utils",
    "fused_dense",
    "mlp",
    "multi_tensor_apply",
    "normalization",
    "optimizers",
    "parallel",
)


class DeprecatedFeatureWarning(FutureWarning):
    """Never issued, since nothing here is deprecated; scripts filter warnings by this name."""


def __getattr__(name: str) -> ModuleType:
    # In apex, `import apex; apex.parallel` worked. Importing all parts at once would be slow.
    if name in _PARTS:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_PARTS])
