"""Explains why the result or the derivative of an operation is not finite, from the tensors that it saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import Node

from amp_engine.ground.dtypes import dtype_name

# Values of a tensor, in words.
_Kinds = Sequence[tuple[Callable[[Tensor], Tensor], str]]
# Operation -> one of its saved tensors, and values of it.
Values = Mapping[str, tuple[str, _Kinds]]
_LOG: tuple[str, _Kinds] = "self", [(lambda x: x == 0, "of 0"), (lambda x: x < 0, "of negative numbers")]
_ARC: _Kinds = [(lambda x: x.abs() > 1, "of numbers beyond 1")]
_AT_ONE: _Kinds = [(lambda x: x.abs() == 1, "of 1 or -1")]
NO_RESULT: Values = {  # at these values the result is not finite
    **dict.fromkeys(["log", "log2", "log10"], _LOG),
    "log1p": ("self", [(lambda x: x == -1, "of -1"), (lambda x: x < -1, "of numbers below -1")]),
    "div": ("other", [(lambda x: x == 0, "by 0")]),
    **dict.fromkeys(["asin", "acos"], ("self", _ARC)),
    **dict.fromkeys(["atanh", "erfinv"], ("self", [*_ARC, *_AT_ONE])),
    "acosh": ("self", [(lambda x: x < 1, "of numbers below 1")]),
    "logit": ("self", [(lambda x: (x == 0) | (x == 1), "of 1 or 0")]),
    "native_batch_norm": ("running_var", [(lambda x: x < 0, "by a running_var below 0")]),
}
STEEP: Values = {  # at these values the result is finite, and the derivative is not
    "sqrt": ("result", [(lambda x: x == 0, "of 0")]),
    **dict.fromkeys(["asin", "acos"], ("self", _AT_ONE)),
}
_TOO_LARGE: _Kinds = [(torch.isinf, "of numbers that are too large")]
_OF_RESULT: Mapping[str, _Kinds] = {  # the inputs that led to a result that is not finite
    **dict.fromkeys(["exp", "exp2", "expm1", "sinh", "cosh"], _TOO_LARGE),
    "rsqrt": [(torch.isinf, "of 0"), (torch.isnan, "of negative numbers, or of nan,")],
    "reciprocal": [(torch.isinf, "of 0, or of nearly 0,")],
    "sqrt": [(torch.isnan, "of negative numbers, or of nan,")],
}
_SMALLEST = 2.0**-24  # float16 has no smaller number but 0
EXPLAINED = NO_RESULT.keys() | STEEP.keys() | _OF_RESULT.keys() | {"pow"}
"""The operations that `why` or `why_result` knows."""
# Operation -> the two tensors that it multiplies.
_PRODUCTS: Mapping[str, tuple[Callable[[Tensor, Tensor], Tensor], str, str]] = {
    "mm": (torch.mm, "self", "mat2"),
    "bmm": (torch.bmm, "self", "mat2"),
    "addmm": (torch.mm, "mat1", "mat2"),
    "baddbmm": (torch.bmm, "batch1", "batch2"),
    "mul": (torch.mul, "self", "other"),
}


def why(values: Values, node: Node, operation: str, name: str, saved: Tensor) -> str | None:
    """Name the values in `saved` that are among `values` of the operation; None without any. Waits for the device."""
    if operation == "pow" and name == "_saved_self":
        return _why_pow(saved, float(getattr(node, "_saved_exponent", 1.0)), values is STEEP)
    if getattr(node, "_saved_training", False):  # batch norm then does not divide by the running variance
        return None
    which, kinds = values.get(operation, ("", []))
    return _first_of(kinds, operation, saved) if name == f"_saved_{which}" else None


def why_divisor(divisor: Tensor) -> str | None:
    """Say that a division multiplies float16 gradients beyond their range, as `normalize` does in a row of zeros.

    None if no number is so small that float16 would have 0 for it. Waits for the device.
    """
    small = divisor.abs()[(divisor != 0) & (divisor.abs() < _SMALLEST)]
    if small.numel() == 0:
        return None
    elements = f"in {small.numel()} of {divisor.numel()} elements"
    return f"div by numbers down to {float(small.min()):.3g} enlarges gradients, beyond float16's range, {elements}"


def why_nothing(node: Node, operation: str, saved: Mapping[str, Tensor]) -> str | None:
    """Say that the operation is a mean of nothing; None if it is not. Waits for the device."""
    if operation == "mean" and not hasattr(node, "_saved_dim") and getattr(node, "_saved_self_sym_numel", 1) == 0:
        return "mean of nothing"
    weight = saved.get("_saved_total_weight")
    is_mean = getattr(node, "_saved_reduction", 0) == 1
    return f"{operation} of targets that are all ignored" if is_mean and weight is not None and weight == 0 else None


def why_result(operation: str, result: Tensor) -> str | None:
    """Name the inputs that led to this result, which is not finite; None if unknown. Waits for the device."""
    return _first_of(_OF_RESULT.get(operation, []), operation, result)


def why_softmax(node: Node, result: Tensor, mask: Tensor | None) -> str | None:
    """Explain a softmax that gave NaN in whole rows; None if it did not. Waits for the device.

    Args:
        mask: of a masked_fill that made its input; None without one.
    """
    dim = getattr(node, "_saved_dim", -1)
    dim = dim - 2**64 if dim >= 2**63 else dim  # torch gives a negative one as an unsigned number
    rows = result.isnan().all(dim)
    count = int(rows.sum())
    if count == 0:
        return None
    said = f"softmax: nan in {count} of {rows.numel()} rows"
    if mask is not None and bool(mask.expand_as(result).all(dim)[rows].all()):
        return f"{said}, which a mask fills with -inf throughout"
    return f"{said}, as where all of a row is -inf, or one of it inf or nan"


def why_mask(operation: str, result: Tensor, mask: Tensor) -> str | None:
    """Explain a result that is not finite only where a mask made it -inf; None for others. Waits for the device."""
    filled = result.isneginf()
    if not bool((filled == ~result.isfinite()).all()) or bool((filled & ~mask.expand_as(result)).any()):
        return None
    return f"-inf of a mask in {int(filled.sum())} of {filled.numel()} elements of {operation}"


def remade(node: Node, operation: str, saved: Mapping[str, Tensor]) -> Tensor | None:
    """Compute the result of a product or convolution again, without its bias.

    None if not all of its inputs were saved, or if one of them is not finite.
    """
    with torch.no_grad():
        if operation in _PRODUCTS:
            multiply, one, other = _PRODUCTS[operation]
            factor, factor2 = _finite(saved, one), _finite(saved, other)
            return None if factor is None or factor2 is None else multiply(factor, factor2)
        if operation == "convolution":
            x, weight = _finite(saved, "input"), _finite(saved, "weight")
            names = ["stride", "padding", "dilation", "transposed", "output_padding", "groups"]
            if x is not None and weight is not None:
                return torch.convolution(x, weight, None, *(getattr(node, f"_saved_{name}") for name in names))
    return None


def advice(why: str) -> str:
    """Advise on values that `why`, `why_result`, `why_softmax` or `why_mask` named."""
    if why.startswith("softmax"):
        return "Let a mask leave one element of each row."
    if why.startswith(("exp", "sinh", "cosh")):
        return (
            "Clamp its argument, or compute it in FP32 or bfloat16; where its results are added up, subtract the "
            "largest argument first, as logsumexp does."
        )
    if why.startswith("-inf"):
        return "What follows makes nan of it, as 0 * inf does: fill in a finite number there, before that."
    if why.endswith(("of nothing", "all ignored")):
        return "Leave out what has nothing left."
    if why.startswith("div by numbers"):
        return (
            "Raise the eps there, as in F.normalize(x, eps=1e-3), or compute in FP32 what is divided (amp.keep_float)."
        )
    if why.startswith("native_batch_norm"):
        return "A variance is not negative: load or measure it anew."
    if ", beyond float16" in why:
        return "Compute it in FP32."
    return "Keep its argument away from there: an eps, or a clamp."


def is_of_range(why: str) -> bool:
    """True if numbers are too large for their type, and no value is undefined."""
    return ", beyond " in why


def _why_pow(x: Tensor, exponent: float, is_steep: bool) -> str | None:
    if exponent < (1 if is_steep else 0) and exponent != 0 and (count := int((x == 0).sum())):
        return f"pow of 0 in {count} of {x.numel()} elements"
    result = x.pow(exponent)
    if is_steep or (count := int((~result.isfinite()).sum())) == 0:
        return None
    if bool(result.isnan().any()):
        return f"pow of negative numbers in {count} of {x.numel()} elements"
    largest, dtype = float(x.abs().max()), dtype_name(x.dtype)
    return f"pow of numbers up to {largest:.4g}, beyond {dtype}, in {count} of {x.numel()} elements"


def _first_of(kinds: _Kinds, operation: str, x: Tensor) -> str | None:
    for is_it, kind in kinds:
        if count := int(is_it(x).sum()):
            return f"{operation} {kind} in {count} of {x.numel()} elements"
    return None


def _finite(saved: Mapping[str, Tensor], name: str) -> Tensor | None:
    """Return the saved tensor of this name if it exists and is finite, else None. Waits for the device."""
    x = saved.get(f"_saved_{name}")
    return x if x is not None and bool(x.isfinite().all()) else None
