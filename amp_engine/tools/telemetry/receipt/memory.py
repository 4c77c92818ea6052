"""The section about memory by class of tensors. It counts tensors, without torch's allocator statistics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_engine.engine import Engine
from amp_engine.ground.distributed import local_of
from amp_engine.stepping.beside import HostMaster, Master, Remainder
from amp_engine.stepping.exact import exact_of
from amp_engine.tools.diagnosis.recorder import tensors_in
from amp_engine.tools.page.page import Section, Table
from amp_engine.tools.telemetry.receipt.models import measured
from amp_engine.tools.telemetry.wording import number, size

PARAMETERS, BUFFERS, MASTERS, REMAINDERS = "parameters", "buffers", "FP32 masters", "remainders of split masters"
GRADIENTS, STATE, COPIES = "gradients", "optimizer state", "weight copies"
KINDS = (PARAMETERS, BUFFERS, MASTERS, REMAINDERS, STATE, COPIES, GRADIENTS)


@dataclass(frozen=True)
class Memory:
    """The memory of one class of tensors on one device.

    Attributes:
        kind: "parameters", "buffers", "FP32 masters", "remainders of split masters", "optimizer state", "weight
            copies", "gradients".
        device: "cpu", "cuda:0".
        tensors: number of tensors.
        bytes: their bytes; for DTensors, this rank's part. Memory that two classes share counts in the first.
    """

    kind: str
    device: str
    tensors: int
    bytes: int


def described(engine: Engine) -> tuple[Memory, ...]:
    """Count the bytes of each class on each device, as they are now. Changes nothing.

    Memory that two tensors share, such as the gradient of a master and its parameter, counts once, in the class that
    comes first. Activations, averages, tables of kernels and the reserve of torch's allocators are not counted. No
    host sync, except for sparse gradients.
    """
    records, casts = engine.records.all, engine.function_casts.casts
    params = [p for one in records for p in one.columns.params]
    copies = casts.cache.kept() if casts is not None else ()
    return _counted(engine._initialized.models, params, [one.optimizer for one in records], copies)


def of_plain(model: nn.Module, optimizer: Optimizer) -> tuple[Memory, ...]:
    """Count the bytes of a model and an optimizer without an engine, as `described` does."""
    return _counted([model], [p for group in optimizer.param_groups for p in group["params"]], [optimizer], ())


def _counted(
    models: Sequence[nn.Module], stepped: Iterable[Tensor], optimizers: Sequence[Optimizer], copies: Iterable[Tensor]
) -> tuple[Memory, ...]:
    params = [*(p for model in models for p in measured(model.parameters())), *stepped]
    count = _Count()
    count.add(PARAMETERS, params)
    count.add(BUFFERS, (b for model in models for b in measured(model.buffers())))
    beside = [kept for p in params if isinstance(p, nn.Parameter) for kept in exact_of(p)]
    count.add(MASTERS, (kept.weight for kept in beside if isinstance(kept, (Master, HostMaster))))
    count.add(REMAINDERS, (kept.bits for kept in beside if isinstance(kept, Remainder)))
    for one in optimizers:
        count.add(STATE, tensors_in(list(one.state.values())))
    count.add(COPIES, copies)
    count.add(GRADIENTS, (p.grad for p in params))
    return count.records()


def section(memory: Sequence[Memory]) -> Section:
    """A row for each class on each device, and the sum."""
    if not memory:
        return Section("Memory", [])
    rows = [(one.kind, one.device, number(one.tensors), size(one.bytes)) for one in memory]
    rows.append(("together", "", "", size(sum(one.bytes for one in memory))))
    table = Table(rows, ("class", "device", "tensors", "memory"), numbers=(2, 3), has_total=True)
    return Section("Memory", [table])


class _Count:
    """Sums by class and device; counts the same memory only once."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], list[int]] = {}
        self._seen: set[tuple[int, int]] = set()
        self._storages: list[Any] = []  # kept alive, so that no address is reused

    def add(self, kind: str, tensors: Iterable[Tensor | None]) -> None:
        """Count tensors of a class."""
        for tensor in tensors:
            if tensor is None:
                continue
            local = local_of(tensor.detach())
            if local.layout is not torch.strided:  # sparse: its indices and values
                self.add(kind, _parts(local))
                continue
            storage = local.untyped_storage()
            # Not data_ptr(), which counts as a write and copies copy-on-write memory.
            place = storage._cdata, int(local.storage_offset())
            if place not in self._seen:
                self._seen.add(place)
                self._storages.append(storage)
                self.add_bytes(kind, local.device, min(local.numel() * local.element_size(), storage.nbytes()))

    def add_bytes(self, kind: str, device: torch.device, count: int) -> None:
        """Count one more tensor."""
        sums = self._sums.setdefault((kind, str(device)), [0, 0])
        sums[0] += 1
        sums[1] += count

    def records(self) -> tuple[Memory, ...]:
        """The sums, in the order of the classes."""
        order = sorted(self._sums, key=lambda key: (KINDS.index(key[0]), key[1]))
        return tuple(Memory(*key, *self._sums[key]) for key in order)


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        yield from (tensor.indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values())
