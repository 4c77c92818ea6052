"""Restores everything that a batch changed that was run only to observe it."""

from __future__ import annotations

import functools
import random
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from amp_engine.ground.random_state import random_state, set_random_state
from amp_engine.ground.reachable import globals_of, reachable, slots_of
from amp_engine.ground.torch_private import lazy_clone

_VISITED = 200_000  # objects: fifteen for each module
_CELL: Any = types.CellType.__dict__["cell_contents"]  # of a variable of a closure


def randomness(found: Iterable[object]) -> Callable[[], None]:
    """Return a function that restores the states of torch's, Python's, a loaded NumPy's, and `found` generators."""
    states: list[tuple[Callable[[Any], Any], Any]] = [(set_random_state, random_state())]
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type != "cuda":
        device: Any = torch.get_device_module(accelerator)
        if getattr(device, "is_initialized", lambda: True)():
            if hasattr(device, "get_rng_state_all"):
                states.append((device.set_rng_state_all, device.get_rng_state_all()))
            elif hasattr(device, "get_rng_state"):
                states.append((device.set_rng_state, device.get_rng_state()))
    numpy: Any = sys.modules.get("numpy")
    for one in found:
        if isinstance(one, torch.Generator):
            states.append((one.set_state, one.get_state()))
        elif isinstance(one, random.Random):
            states.append((one.setstate, one.getstate()))
        elif numpy is not None and isinstance(one, numpy.random.RandomState):
            states.append((one.set_state, one.get_state()))
        elif numpy is not None and isinstance(one, numpy.random.Generator):
            bits = one.bit_generator
            states.append((functools.partial(setattr, bits, "state"), bits.state))

    def restore() -> None:
        for setter, state in states:
            setter(state)

    return restore


@contextmanager
def put_back(roots: Iterable[object]) -> Iterator[None]:
    """At exit restore all that `roots` reach, also if the body raises. At entry gradients become None.

    Containers and attributes get back their items, the same objects; tensors their bits in the same memory, their
    gradients and whether they require one; generators their states. Copies take no memory until one side is written.
    Not restored: what iterators, files and threads hold, NumPy arrays, and tensors outside of modules that lie in
    memory of NumPy or of several processes.
    """
    found = reachable(roots, limit=_VISITED)
    modules = [one for one in found if isinstance(one, nn.Module)]
    left_alone = {id(module._parameters) for module in modules}  # in which FSDP swaps shards and whole parameters
    tensors = [one for one in found if isinstance(one, Tensor) and not is_lazy(one)]
    leaves = [one for one in tensors if one.is_leaf]
    buffers = {id(buffer) for module in modules for buffer in module._buffers.values()}
    memories: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}
    with ExitStack() as stack:
        stack.callback(randomness(found))
        cudnn = torch.backends.cudnn
        stack.callback(_set_cudnn, cudnn.enabled, cudnn.benchmark, cudnn.deterministic)
        stack.callback(_write, memories)
        for tensor in (*tensors, *(one.grad for one in leaves if one.grad is not None)):
            _copy(memories, tensor, isinstance(tensor, nn.Parameter) or id(tensor) in buffers)
            if tensor.layout is torch.strided and not _is_wrapper(tensor):
                stack.callback(_place, tensor, tensor.detach())
        for leaf in leaves:
            stack.callback(_set_gradient, leaf, leaf.grad, leaf.requires_grad)
            leaf.grad = None
        for module in modules:
            stack.callback(setattr, module, "training", module.training)
        for one in found:
            if isinstance(one, (dict, list, set, deque)) and id(one) not in left_alone:
                stack.callback(_fill, one, _contents(one))
            elif isinstance(one, types.FunctionType):
                for cell in one.__closure__ or ():
                    stack.callback(_set, _CELL, cell, _value(_CELL, cell))
                for namespace, name, value in globals_of(one):
                    stack.callback(namespace.__setitem__, name, value)
            for slot in slots_of(one):
                stack.callback(_set, slot, one, _value(slot, one))
        yield


# Containers.


def _contents(one: Any) -> list[Any]:
    """The items of a container; keys and values in turn. Calls no method of a subclass."""
    if isinstance(one, dict):
        return [part for item in _base(one).items(one) for part in item]
    return list(_base(one).__iter__(one))


def _base(one: Any) -> Any:
    return next(kind for kind in (OrderedDict, dict, list, set, deque) if isinstance(one, kind))


def _fill(one: Any, contents: Sequence[Any]) -> None:
    """Give a container its items again, if they are others."""
    base, present = _base(one), _contents(one)
    if len(present) == len(contents) and all(a is b for a, b in zip(present, contents, strict=True)):
        return
    base.clear(one)
    if isinstance(one, dict):
        for key, value in zip(contents[::2], contents[1::2], strict=True):
            base.__setitem__(one, key, value)
    else:
        (base.update if base is set else base.extend)(one, contents)


def _value(slot: Any, owner: object) -> tuple[Any, ...]:
    """The value of a slot; none if it has none yet."""
    try:
        return (slot.__get__(owner),)
    except (AttributeError, ValueError):
        return ()


def _set(slot: Any, owner: object, values: tuple[Any, ...]) -> None:
    if values:
        slot.__set__(owner, *values)
    elif _value(slot, owner):
        slot.__delete__(owner)


# Tensors.


def _copy(memories: dict[int, tuple[torch.UntypedStorage, Tensor]], tensor: Any, is_needed: bool) -> None:
    """Add a copy of the memory of a tensor; `is_needed` also of memory that copy-on-write cannot hold."""
    if _is_wrapper(tensor):
        for one in (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]):
            if isinstance(one, Tensor):  # not a DTensor's mesh
                _copy(memories, one, is_needed)
        return
    if tensor.layout is not torch.strided:
        tensor = tensor._values() if tensor.is_sparse else tensor.detach().values()
    storage = tensor.untyped_storage()
    if storage.device.type == "meta" or not storage.nbytes() or storage._cdata in memories:
        return
    memory = _bytes(storage)
    try:
        memories[storage._cdata] = storage, lazy_clone(memory) if memory.is_cpu else memory.clone()
    except RuntimeError:  # memory of an array, or of several processes
        if is_needed:
            memories[storage._cdata] = storage, memory.clone()


def _is_wrapper(tensor: Tensor) -> bool:
    """True if the values are in other tensors, as those of a DTensor."""
    return hasattr(tensor, "__tensor_flatten__")


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """The memory, as a tensor of a version of its own: also of tensors that nothing may write."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _write(memories: dict[int, tuple[torch.UntypedStorage, Tensor]]) -> None:
    """Write the copies back where the memory was written."""
    for storage, copied in memories.values():
        present = _bytes(storage)[: copied.numel()]
        if present.shape == copied.shape and not torch.equal(present, copied):  # FSDP releases memory
            present.copy_(copied)


def _place(tensor: Tensor, before: Tensor) -> None:
    """Give a tensor the memory of `before` again, if it has another, as `tensor.data = x` gives it."""
    storages = tensor.untyped_storage(), before.untyped_storage()
    is_same = storages[0]._cdata == storages[1]._cdata and tensor.dtype == before.dtype
    are_alike = tensor.shape == before.shape and tensor.stride() == before.stride()
    if not (is_same and are_alike and tensor.storage_offset() == before.storage_offset()) and storages[1].nbytes():
        tensor.data = before


def _set_gradient(leaf: Tensor, grad: Tensor | None, requires_grad: bool) -> None:
    leaf.requires_grad_(requires_grad)
    leaf.grad = grad


def _set_cudnn(enabled: bool, benchmark: bool, deterministic: bool) -> None:
    cudnn = torch.backends.cudnn
    before = enabled, benchmark, deterministic
    if (cudnn.enabled, cudnn.benchmark, cudnn.deterministic) != before:  # torch may refuse writes
        cudnn.enabled, cudnn.benchmark, cudnn.deterministic = before
