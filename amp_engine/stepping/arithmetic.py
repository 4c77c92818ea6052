"""Arithmetic of gradients, dense and sparse: add, multiply, copy into memory of their own."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn

from amp_engine import kernels
from amp_engine.errors import AmpValueError
from amp_engine.ground.distributed import is_placed_like, is_sharded, local_gradient, local_of
from amp_engine.kernels import tensor_lists


def without(
    rows: Sequence[int], grads: Sequence[Tensor | None], accesses: bytes
) -> tuple[Sequence[Tensor | None], bytes]:
    """Return gradients and accesses with None and NONE at `rows`."""
    left_grads, left_accesses = list(grads), bytearray(accesses)
    for row in rows:
        left_grads[row], left_accesses[row] = None, tensor_lists.NONE
    return left_grads, bytes(left_accesses)


def with_shards(
    params: Sequence[nn.Parameter], rows: Sequence[int], grads: Sequence[Tensor | None], accesses: bytes
) -> tuple[Sequence[Tensor | None], bytes]:
    """Return gradients and accesses with this rank's part of each DTensor's gradient at `rows`."""
    all_grads, all_accesses = list(grads), bytearray(accesses)
    for row in rows:
        if is_sharded(params[row]):
            all_grads[row] = shard = local_gradient(params[row])
            all_accesses[row] = tensor_lists.access_of(shard, shard)
    return all_grads, bytes(all_accesses)


def readable(param: nn.Parameter) -> Tensor:
    """Return the gradient of `param` in a form that torch's operators take; `param` must have one."""
    grad = param.grad
    assert grad is not None
    if not grad.is_sparse:
        return tensor_lists.written_out(grad)
    # One entry for each index, so that entries whose sum overflows are found.
    return grad.coalesce()


def values(grad: Tensor) -> Tensor:
    """Return the stored values of `grad`: for a sparse one those of its entries."""
    return grad.coalesce().values() if grad.is_sparse else grad


def reals(values: Tensor) -> Tensor:
    """Return a view of complex `values` as pairs of reals; other values as they are."""
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


def can_be_read(grad: Tensor) -> bool:
    """False for a gradient that wraps other tensors and is no DTensor, and for layouts and types without arithmetic."""
    wraps = is_sharded(grad) and not hasattr(grad, "placements")
    return not wraps and grad.layout in (torch.strided, torch.sparse_coo) and grad.dtype.itemsize > 1


def is_held(param: nn.Parameter) -> bool:
    """True if other code has the dense gradient of `param`, which must have one: in a variable, or in its memory."""
    grad = param.grad
    assert grad is not None
    # torch's copy_ between types drops the sign of a negative view, so such a gradient could not be put back.
    if grad.layout is not torch.strided or is_sharded(grad) or grad.is_neg():
        return False
    is_part = _is_part(grad)
    del grad
    return is_part or is_referenced(param)


def is_referenced(param: nn.Parameter) -> bool:
    """True if other code has the gradient of `param` in a variable, or made it as a view.

    Gradients that autograd made may be parts of one memory, of which other code knows nothing.
    """
    assert param.grad is not None
    return param.grad._is_view() or _references(param) > _references_of_none_else()


def _references(param: nn.Parameter) -> int:
    return sys.getrefcount(param.grad)


@cache
def _references_of_none_else() -> int:
    alone = nn.Parameter(torch.zeros(1, dtype=torch.float32, device="cpu"))
    alone.grad = torch.zeros(1, dtype=torch.float32, device="cpu")
    return _references(alone)


def _is_part(grad: Tensor) -> bool:
    return grad._is_view() or grad.untyped_storage().nbytes() > grad.nbytes


def is_zero(grad: Tensor | None) -> bool:
    """True if there is a gradient and each of its elements is zero. Waits for the device."""
    return grad is not None and not bool(values(grad).any())


@torch.no_grad()
def largest_and_squares(values: Tensor) -> Tensor:
    """Return the largest magnitude and the sum of squares: float64, shape [2]. No host sync.

    The largest is NaN if there is a NaN, and inf only if there is an inf. Complex values count as pairs of reals.
    """
    values = reals(values)
    if values.numel() == 0:
        return torch.zeros(2, dtype=torch.float64, device=values.device)
    largest = torch.linalg.vector_norm(values, math.inf).double()
    return torch.stack([largest, values.double().square().sum()])


def nonfinite(grads: Sequence[Tensor]) -> list[Tensor]:
    """Return flags that hold a True if an element is not finite: bool, any shape, on the devices of `grads`.

    No host sync.
    """
    shards = [local_of(grad) for grad in grads]
    try:
        return [kernels.check(shards).nonfinite]
    except AmpValueError:  # sparse, float64, with gaps in memory, or on several devices
        return [~values(shard).isfinite() for shard in shards]


@torch.no_grad()
def accumulate(pairs: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
    """Do `param.grad += grad` for each pair; a parameter without a gradient gets `grad` itself."""
    totals, grads = [], []
    for param, grad in pairs:
        if param.grad is None:
            param.grad = grad
        elif param.grad.is_sparse or grad.is_sparse or (is_sharded(grad) and not is_placed_like(grad, param.grad)):
            param.grad = param.grad + grad
        else:
            totals.append(local_of(param.grad))
            grads.append(local_of(grad))
    kernels.accumulate_(totals, grads)


def times(grad: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `grad * factor` in `dtype`, computed in float32 or, for float64, in float64; complex as pairs of these."""
    with torch.no_grad():
        if grad.is_complex() and not grad.is_sparse:
            return torch.view_as_complex(times(reals(grad), factor, dtype.to_real()))
        if not grad.is_sparse:
            return (grad * factor.to(grad.dtype) if grad.dtype == torch.float64 else grad.float() * factor).to(dtype)
        values = times(grad.values(), factor, dtype)
        return torch.sparse_coo_tensor(grad.indices(), values, grad.shape, is_coalesced=True, check_invariants=False)


def own_memory(param: Tensor, grad: Tensor) -> Tensor:
    """Return `grad`, or a copy if the next backward of `param` might write to its memory."""
    if grad.is_sparse or is_sharded(grad):
        return grad
    grad = tensor_lists.written_out(grad)
    if grad.dtype != param.dtype:
        return grad
    # DDP's gradient_as_bucket_view makes gradients views of a bucket that the next backward overwrites.
    return grad.clone() if _is_part(grad) else grad
