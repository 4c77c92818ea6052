"""Restores everything that a batch changed that was run only to observe it."""

from __future__ import annotations

import copy
import functools
import random
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from amp_engine.ground.random_state import random_state, set_random_state
from amp_engine.ground.reachable import ITEMS, reachable
from amp_engine.ground.torch_private import lazy_clone


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
def put_back(
    models: Sequence[nn.Module], optimizers: Sequence[Optimizer], roots: Iterable[object], params: Iterable[Tensor] = ()
) -> Iterator[None]:
    """At exit restore everything that a batch changes, bit for bit, in the same memory, also if the body raises.

    Restores the models' gradients, buffers and modes; the options in the optimizers' groups; and, of the objects that
    models, optimizers and roots refer to: generators, schedulers, GradScalers, other modules, such as averages, with
    their parameters, other optimizers with their state, and other tensors in dictionaries and lists. At entry gradients
    become None.

    Args:
        models: the models that run; their parameters must not be stepped inside.
        optimizers: the optimizers whose steps do nothing inside.
        roots: objects to search, such as a step function.
        params: more parameters that get gradients.
    """
    found = reachable([*roots, *models, *optimizers])
    modules = {id(m): m for one in (*models, *found) if isinstance(one, nn.Module) for m in one.modules()}
    own = {id(p): p for one in models for p in one.parameters()} | {id(p): p for p in params}
    others = {id(p): p for m in modules.values() for p in m._parameters.values() if p is not None and id(p) not in own}
    buffers = [b for m in modules.values() for b in m._buffers.values() if b is not None]
    looked_after = [*own.values(), *others.values(), *buffers]
    with ExitStack() as stack:
        stack.callback(randomness(found))
        cudnn = torch.backends.cudnn
        stack.callback(_set_cudnn, cudnn.enabled, cudnn.benchmark, cudnn.deterministic)
        for scheduler in found:
            if isinstance(scheduler, (LRScheduler, torch.amp.GradScaler)):
                stack.callback(scheduler.load_state_dict, copy.deepcopy(scheduler.state_dict()))
        for optimizer in {id(one): one for one in (*optimizers, *found) if isinstance(one, Optimizer)}.values():
            stack.callback(_restorer(optimizer, is_stepped=all(optimizer is not one for one in optimizers)))
            looked_after += [p for group in optimizer.param_groups for p in group["params"]]
            states = [values for values in optimizer.state.values() if isinstance(values, dict)]
            looked_after += [value for values in states for value in values.values()]
        for module in modules.values():
            # By name too, because a forward may replace a buffer by another tensor.
            stack.callback(_restore_module, module, dict(module._buffers), module.training)
        for buffer in buffers:
            stack.callback(_write, buffer, buffer.clone())
        for param in others.values():
            if not is_lazy(param):
                stack.callback(_restore, param, _copied(param))
        _keep_tensors(stack, found, {id(one) for one in looked_after})
        for p in (*own.values(), *others.values()):
            # Copies the values of views, because the next backward writes into DistributedDataParallel's buckets.
            values = None if p.grad is None or p.grad._base is None else p.grad.clone()
            stack.callback(_restore_gradient, p, p.grad, values)
            p.grad = None
        yield


def _keep_tensors(stack: ExitStack, found: Iterable[object], known: set[int]) -> None:
    """Restore tensors outside of `known`, as those of an average, and their entries in dictionaries and lists."""
    for one in found:
        if isinstance(one, (dict, list)) and type(one) in (dict, OrderedDict, defaultdict, list):
            items = one.items() if isinstance(one, dict) else enumerate(one)
            held = {key: value for key, value in islice(items, ITEMS) if isinstance(value, Tensor)}
            if held:
                stack.callback(_hold_again, one, held)
        elif isinstance(one, Tensor) and id(one) not in known and not is_lazy(one):
            if (copied := _copied_for_nothing(one)) is not None:
                stack.callback(_restore, one, copied)
            if one.is_leaf and one.requires_grad:
                stack.callback(_restore_gradient, one, one.grad, None if one.grad is None else one.grad.clone())


def _hold_again(holder: Any, held: Mapping[Any, Tensor]) -> None:
    for key, value in held.items():
        if isinstance(holder, dict) or key < len(holder):
            holder[key] = value


@torch.no_grad()
def _copied(tensor: Tensor) -> Tensor:
    copied = _copied_for_nothing(tensor)
    return tensor.detach().clone() if copied is None else copied


@torch.no_grad()
def _copied_for_nothing(tensor: Tensor) -> Tensor | None:
    """A copy-on-write clone, which takes no memory until it or the tensor is written; None if torch cannot make one."""
    is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
    if is_plain and not (tensor.is_inference() or tensor.is_quantized or tensor.is_conj() or tensor.is_neg()):
        with suppress(RuntimeError):  # memory shared with other processes or an array
            return lazy_clone(tensor.detach())
    return None


@torch.no_grad()
def _restore(tensor: Tensor, value: Tensor) -> None:
    if tensor.shape != value.shape or tensor.dtype != value.dtype:
        tensor.data = value
    elif type(value) is not Tensor or value.is_meta or not torch.equal(_bits(tensor), _bits(value)):
        tensor.copy_(value)  # copies the copy-on-write memory


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


@torch.no_grad()
def _write(buffer: Tensor, value: Tensor) -> None:
    buffer.copy_(value)


def _restore_module(module: nn.Module, buffers: Mapping[str, Tensor | None], mode: bool) -> None:
    module._buffers.clear()
    module._buffers.update(buffers)
    module.training = mode


def _restore_gradient(param: Tensor, grad: Tensor | None, values: Tensor | None) -> None:
    param.grad = grad
    if grad is not None and values is not None:
        _write(grad, values)


def _restorer(optimizer: Optimizer, is_stepped: bool) -> Callable[[], None]:
    """Return a function that restores the options of all groups, and the state of an optimizer that is stepped."""
    groups = [
        {k: v.clone() if isinstance(v, Tensor) else copy.deepcopy(v) for k, v in group.items() if k != "params"}
        for group in optimizer.param_groups
    ]
    state = {}
    for param, values in optimizer.state.items():
        if is_stepped and isinstance(values, dict):
            state[param] = {k: (v, _copied(v) if isinstance(v, Tensor) else None) for k, v in values.items()}

    def restore() -> None:
        for group, before in zip(optimizer.param_groups, groups, strict=False):
            for name, value in before.items():
                if isinstance(value, Tensor) and isinstance(group.get(name), Tensor):
                    _write(group[name], value)
                else:
                    group[name] = value
        if not is_stepped:
            return
        for param in [param for param in optimizer.state if param not in state]:
            del optimizer.state[param]
        for param, values in state.items():
            present = optimizer.state[param]
            present.clear()
            for name, (value, copied) in values.items():
                if copied is not None:
                    _restore(value, copied)
                present[name] = value

    return restore


def _set_cudnn(enabled: bool, benchmark: bool, deterministic: bool) -> None:
    cudnn = torch.backends.cudnn
    before = enabled, benchmark, deterministic
    if (cudnn.enabled, cudnn.benchmark, cudnn.deterministic) != before:  # torch may refuse writes
        cudnn.enabled, cudnn.benchmark, cudnn.deterministic = before
