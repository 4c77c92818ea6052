"""`multi_tensor_applier(op, noop_flag, tensor_lists, *args)`: apex's way to call `amp_C`'s operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


class MultiTensorApply:
    """Calls an operation of `amp_C` on lists of tensors.

    Args:
        chunk_size: passed to each operation. No result depends on it.

    Attributes:
        available: True: `amp_C` is always there; without compiled kernels its optimizer steps raise.
        import_err: None; in apex the error of the import of `amp_C`.
    """

    available = True
    import_err: ImportError | None = None

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(
        self, op: Callable[..., Any], noop_flag_buffer: Tensor, tensor_lists: Sequence[Sequence[Tensor]], *args: Any
    ) -> Any:
        """Return `op(chunk_size, noop_flag, tensor_lists, *args)`."""
        return op(self.chunk_size, noop_flag_buffer, tensor_lists, *args)
