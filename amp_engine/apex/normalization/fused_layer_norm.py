"""`apex.normalization.fused_layer_norm`, on torch's own kernels, which are fused by now.

The modules are torch's LayerNorm and RMSNorm with apex's arguments, so `isinstance` and state_dict agree with torch's.
In addition, input and weights may differ in type: the arithmetic then has the wider type, and the result the type of
the input, or of the weights if the name begins with Mixed. Under O1 and O4 all modules and functions run in float32 and
return float32, as `F.layer_norm` does.

`memory_efficient` is accepted and has no effect: in apex it chose the tensor that the backward keeps; torch keeps the
input.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_engine.amp import float_function
from amp_engine.errors import AmpValueError

Shape = int | Sequence[int]


@float_function
def fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """Layer norm over the last dimensions, `normalized_shape`, `weight` and `bias` of that shape; in input's type."""
    return _layer_norm(input, weight, bias, normalized_shape, eps).to(input.dtype)


@float_function
def fused_layer_norm(
    input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """Layer norm over the last dimensions, `normalized_shape`, without weights; in input's type."""
    return F.layer_norm(input, _tuple(normalized_shape), eps=eps)


@float_function
def mixed_dtype_fused_layer_norm_affine(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    normalized_shape: Shape,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> Tensor:
    """`fused_layer_norm_affine` in weight's type."""
    return _layer_norm(input, weight, bias, normalized_shape, eps).to(weight.dtype)


@float_function
def fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """RMS norm over the last dimensions, `normalized_shape`, with `weight` of that shape; in input's type."""
    return _rms_norm(input, weight, normalized_shape, eps).to(input.dtype)


@float_function
def fused_rms_norm(input: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False) -> Tensor:
    """RMS norm over the last dimensions, `normalized_shape`, without weights; in input's type."""
    return F.rms_norm(input, _tuple(normalized_shape), eps=eps)


@float_function
def mixed_dtype_fused_rms_norm_affine(
    input: Tensor, weight: Tensor, normalized_shape: Shape, eps: float = 1e-6, memory_efficient: bool = False
) -> Tensor:
    """`fused_rms_norm_affine` in weight's type."""
    return _rms_norm(input, weight, normalized_shape, eps).to(weight.dtype)


class _Fused(nn.Module):
    """The arguments of apex's modules, for the torch module that follows this class in the bases."""

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__(list(_tuple(normalized_shape)), eps, elementwise_affine)
        self.memory_efficient = memory_efficient


class _Mixed(nn.Module):
    """The arguments of apex's modules whose output has the type of their parameters."""

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        *,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        if not elementwise_affine:
            name = type(self).__name__
            raise AmpValueError(
                f"{name} does not support elementwise_affine=False: its output has the type of its parameters. "
                f"Use {name.removeprefix('Mixed')}(..., elementwise_affine=False)."
            )
        super().__init__(normalized_shape, eps, memory_efficient=memory_efficient)


class FusedLayerNorm(_Fused, nn.LayerNorm):
    """Layer norm over the last dimensions; parameters `weight` and `bias`, both of shape `normalized_shape`, or none.

    Args:
        normalized_shape: sizes of the last dimensions, or the size of the last one.
        eps: added to the variance.
        elementwise_affine: adds the parameters.
        memory_efficient: changes nothing here.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalize an input of shape `(*, *normalized_shape)`; the output has its shape and type."""
        if not self.elementwise_affine:
            return fused_layer_norm(input, self.normalized_shape, self.eps)
        return fused_layer_norm_affine(input, self.weight, self.bias, self.normalized_shape, self.eps)


class MixedFusedLayerNorm(_Mixed, FusedLayerNorm):
    """FusedLayerNorm whose output has the type of its parameters; it always has them.

    Raises AmpValueError for `elementwise_affine=False`.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalize an input of shape `(*, *normalized_shape)`; the output has the parameters' type."""
        return mixed_dtype_fused_layer_norm_affine(input, self.weight, self.bias, self.normalized_shape, self.eps)


class FusedRMSNorm(_Fused, nn.RMSNorm):
    """RMS norm over the last dimensions; one parameter `weight` of shape `normalized_shape`, or none.

    Args:
        normalized_shape: sizes of the last dimensions, or the size of the last one.
        eps: added to the mean square.
        elementwise_affine: adds the parameter.
        memory_efficient: changes nothing here.
    """

    eps: float  # never None, which torch.nn.RMSNorm may have

    def forward(self, input: Tensor) -> Tensor:
        """Normalize an input of shape `(*, *normalized_shape)`; the output has its shape and type."""
        if not self.elementwise_affine:
            return fused_rms_norm(input, self.normalized_shape, self.eps)
        return fused_rms_norm_affine(input, self.weight, self.normalized_shape, self.eps)


class MixedFusedRMSNorm(_Mixed, FusedRMSNorm):
    """FusedRMSNorm whose output has the type of its parameter; it always has one.

    Raises AmpValueError for `elementwise_affine=False`.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalize an input of shape `(*, *normalized_shape)`; the output has the parameter's type."""
        return mixed_dtype_fused_rms_norm_affine(input, self.weight, self.normalized_shape, self.eps)


def _layer_norm(input: Tensor, weight: Tensor, bias: Tensor | None, shape: Shape, eps: float) -> Tensor:
    dtype = torch.promote_types(input.dtype, weight.dtype)
    return F.layer_norm(input.to(dtype), _tuple(shape), weight.to(dtype), bias if bias is None else bias.to(dtype), eps)


def _rms_norm(input: Tensor, weight: Tensor, shape: Shape, eps: float) -> Tensor:
    dtype = torch.promote_types(input.dtype, weight.dtype)
    return F.rms_norm(input.to(dtype), _tuple(shape), weight.to(dtype), eps)


def _tuple(shape: Shape) -> tuple[int, ...]:
    return (shape,) if isinstance(shape, int) else tuple(shape)
