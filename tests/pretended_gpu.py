"""A GPU that is pretended: memory of the CPU which says that it is on "cuda:0", and a host that must not wait for it.

A `TorchDispatchMode` sees each operation. What a GPU would have in its memory is marked by its storage, and
`Tensor.device` answers by that mark. Operations by which the host waits for a GPU raise `HostWaitError`: reading a
number, shapes that depend on values, copies that block. Operations on tensors of both sides are errors, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from amp_engine import amp
from amp_engine.kernels import choice, library, reference_tensor_lists, steps, tensor_lists
from amp_engine.kernels.backend import TensorLists
from tests.gpu import stand_in

GPU, HOST = torch.device("cuda", 0), torch.device("cpu")
_DEVICE: Any = torch._C.TensorBase.device
# The host needs their values to know a number or a shape.
_ASKS = ("_local_scalar_dense", "item", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim")


class HostWaitError(AssertionError):
    """The host would have waited for the GPU."""


class PretendedGpu(TorchDispatchMode):
    """Computes on the CPU what was asked of the GPU, and raises where the host would wait."""

    def __init__(self) -> None:
        super().__init__()
        self._memory: dict[int, StorageWeakRef] = {}  # weak, so that no other storage gets an address that is in it
        self._pinned: dict[int, StorageWeakRef] = {}
        self.waits = 0  # for events
        self.operations = 0
        self.is_trapped = True

    def has(self, tensor: Tensor) -> bool:
        """True if a tensor is in the memory of the GPU."""
        return _key(tensor) in self._memory

    def put(self, tensor: Tensor) -> None:
        """Declare the memory of a tensor to be on the GPU."""
        storage = tensor.untyped_storage()
        self._memory[storage._cdata] = StorageWeakRef(storage)

    def trap(self, what: str) -> None:
        """Raise HostWaitError, as long as waits are trapped."""
        if self.is_trapped:
            raise HostWaitError(what)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = func._schema.name.removeprefix("aten::")
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        here = [t for t in given if self.has(t)]
        self.operations += bool(here)
        if here and name in _ASKS:
            self.trap(f"{func} reads the GPU's memory")
        if name in ("index", "index_put", "index_put_", "_index_put_impl_") and self.has(args[0]):
            self._look_at_indices(func, [t for t in args[1] if t is not None])
        to = kwargs.get("device")
        is_copy = name in ("_to_copy", "copy_")
        if is_copy:
            # Autograd, in C++, reads the CPU from a tensor as its device; `_to_host` sees what Python asks.
            source = args[1] if name == "copy_" else args[0]
            target = self.has(args[0]) or name == "_to_copy" and self._is_gpu(to)
            blocks = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
            if self.has(source) != target and (blocks or not target and _key(args[0]) not in self._pinned):
                self.trap(f"{func} copies between the host and the GPU, and waits")
        elif here and (strange := [t for t in given if not self.has(t) and t.dim() > 0]):
            raise AssertionError(f"{func} of the GPU takes a tensor of the host of shape {list(strange[0].shape)}")
        result_is_here = target if is_copy else self._is_gpu(to, *here)
        if to is not None:
            kwargs["device"] = HOST
        is_pinned = kwargs.pop("pin_memory", False)
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                if result_is_here and name != "copy_":
                    self.put(tensor)
                if is_pinned:
                    self._pinned[_key(tensor)] = StorageWeakRef(tensor.untyped_storage())
        return result

    def _is_gpu(self, device: torch.device | None, *tensors: Tensor) -> bool:
        return any(map(self.has, tensors)) if device is None else torch.device(device).type == "cuda"

    def _look_at_indices(self, func: Any, indices: list[Tensor]) -> None:
        for index in indices:
            if index.dtype in (torch.bool, torch.uint8):
                self.trap(f"{func} has a mask for an index, and needs the count of its elements")
            if not self.has(index):
                self.trap(f"{func} has an index of the host, which is copied to the GPU")


class Stream(stand_in.Stream):
    """The only queue of the GPU."""

    device = GPU


class Event:
    """A mark in the GPU's queue, which is reached some time after it is set."""

    def __init__(self, gpu: PretendedGpu) -> None:
        self._gpu, self._queries = gpu, 0

    def record(self, stream: Any = None) -> None:
        self._queries = 0

    def query(self) -> bool:
        self._queries += 1
        return self._queries > 2

    def synchronize(self) -> None:
        self._gpu.waits += 1


def _from_host(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(*args: Any, **kwargs: Any) -> Tensor:
        if torch.device(kwargs.get("device") or HOST).type == "cuda":
            raise HostWaitError(f"torch.{make.__name__} copies numbers to the GPU; torch.full would not wait")
        return make(*args, **kwargs)

    return call


def _to_host(gpu: PretendedGpu, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that copies to the host, or `to`, which C++ takes for done where the memory is the CPU's."""

    def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        devices = [torch.device(d) for d in (*args, *kwargs.values()) if isinstance(d, (str, torch.device))]
        is_to_host = method.__name__ != "to" or any(device.type == "cpu" for device in devices)
        if gpu.has(tensor) and is_to_host:
            gpu.trap(f"Tensor.{method.__name__} copies from the GPU")
            if method.__name__ in ("to", "cpu"):
                tensor = torch.empty_like(tensor, device=HOST, requires_grad=False).copy_(tensor.detach())
        if gpu.has(tensor) and devices:
            args = tuple(a for a in args if not isinstance(a, (str, torch.device)))
            kwargs.pop("device", None)
        return method(tensor, *args, **kwargs) if args or kwargs or not devices or not gpu.has(tensor) else tensor

    return call


def _regrouped(groups: dict[Any, Any]) -> dict[Any, Any]:
    """Groups by the devices that tensors say they are on; torch's optimizers and clipping make them in C++."""
    return {(lists[0][0].device, dtype): (lists, rows) for (_, dtype), (lists, rows) in groups.items()}


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def pretended_gpu(has_host_kernels: bool = False) -> Iterator[PretendedGpu]:
    """A GPU, on which plain PyTorch computes, as where nothing was compiled, or only for the CPU."""
    gpu, stream = PretendedGpu(), Stream()
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in vars(TensorLists) if not name.startswith("_")]:
            patch.setattr(tensor_lists, name, getattr(reference_tensor_lists, name))
        for device in [*choice.NATIVE]:
            if device != "cpu" or not has_host_kernels:
                patch.delitem(choice.NATIVE, device)
        patch.setattr(torch.Tensor, "device", property(lambda t: GPU if gpu.has(t) else _DEVICE.__get__(t)))
        patch.setattr(torch.Tensor, "is_cuda", property(gpu.has))
        patch.setattr(torch.Tensor, "is_cpu", property(lambda t: not gpu.has(t)))
        for module in (library, steps):  # an operator would compute below the mode, where nothing is seen
            patch.setattr(module, "is_traced", lambda tensor: False)
        for name in ("tensor", "as_tensor"):
            patch.setattr(torch, name, _from_host(getattr(torch, name)))
        for name in ("tolist", "numpy", "cpu", "to"):
            patch.setattr(torch.Tensor, name, _to_host(gpu, getattr(torch.Tensor, name)))
        grouped = torch._C._group_tensors_by_device_and_dtype
        patch.setattr(torch._C, "_group_tensors_by_device_and_dtype", lambda *args: _regrouped(grouped(*args)))
        patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(torch.cuda, "current_stream", lambda device=None: stream)
        patch.setattr(torch.cuda, "Stream", lambda device=None: stream)
        patch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
        patch.setattr(torch.cuda, "Event", lambda: Event(gpu))
        patch.setattr(torch.cuda, "synchronize", Event(gpu).synchronize)
        with gpu:
            try:
                yield gpu
            finally:
                gpu.is_trapped = False
                amp.close()  # while torch is as it was at its `initialize`
