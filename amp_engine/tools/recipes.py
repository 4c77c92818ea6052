"""Recipes of training in eight and four bits, to compare a batch in. They are not levels."""

from __future__ import annotations

from dataclasses import dataclass

from amp_engine.tools.narrow_formats import E2M1, E4M3, E5M2, Format, one_scale, powers_of_two, two_levels


@dataclass(frozen=True)
class Recipe:
    """The formats of operands of matrix products.

    Attributes:
        operands: format in a forward, and of operands in a backward that are not gradients.
        gradients: format of gradients in a backward.
        has_convolutions: True if convolutions use these formats too; not with blocks.
    """

    operands: Format
    gradients: Format
    has_convolutions: bool = False


_MXFP8 = Format(E4M3, powers_of_two, block=32)  # OCP MX v1.0, section 5.2: blocks of 32
_NVFP4 = Format(E2M1, two_levels, block=16)

# The formats of gradients are those of Transformer Engine's Float8CurrentScaling (HYBRID), MXFP8BlockScaling (E4M3)
# and NVFP4BlockScaling (E2M1), https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/api/common.html
RECIPES = {
    "float8": Recipe(Format(E4M3, one_scale), Format(E5M2, one_scale), has_convolutions=True),
    "mxfp8": Recipe(_MXFP8, _MXFP8),
    "nvfp4": Recipe(_NVFP4, _NVFP4),
}


def meant(opt_level: object) -> str | None:
    """Return the recipe that the user means by a name such as "fp8"; None if there is none."""
    text = str(opt_level).strip().lower()
    words = {"mxfp8": "mxfp8", "float8": "float8", "fp8": "float8", "fp4": "nvfp4"}
    return next((recipe for word, recipe in words.items() if word in text), None)


def beneath(opt_level: str) -> str:
    """Return the level at which the rest of a model runs: O0 for a recipe, else `opt_level` itself."""
    return "O0" if opt_level in RECIPES else opt_level
