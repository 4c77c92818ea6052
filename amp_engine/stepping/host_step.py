"""Steps of masters in the memory of the host: gradients travel there, and the new values of parameters back."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from amp_engine import kernels
from amp_engine.errors import AmpStateError
from amp_engine.ground import devices
from amp_engine.optimizers.fused_step import FusedStep, fused_step_of
from amp_engine.stepping.beside import HostMaster
from amp_engine.stepping.record import Record
from amp_engine.stepping.records import Records
from amp_engine.stepping.rows import Columns


class HostStep:
    """Steps the parameters of one optimizer, one by one: while one is stepped, others travel. The StepHook owns it.

    Args:
        record: of the optimizer, whose class the kernels step.
        owner: of the record.
    """

    def __init__(self, record: Record, owner: Records) -> None:
        fused = fused_step_of(record.optimizer)
        assert fused is not None, "checked with the request"
        self._fused: FusedStep = fused
        self._record = record
        self._owner = owner
        self._columns: Columns | None = None
        self._downloads: dict[torch.device, devices.Downloads] = {}

    def check(self) -> None:
        """Raise AmpStateError for what `step` cannot do, before it or another call has changed anything.

        That is the capture of a CUDA graph, in which no CPU steps, a setting that the kernels do not compute, a
        gradient that is not dense, and an FP32 parameter on a device without kernels.
        """
        self._fused.check_groups("masters_on")
        columns = self._record.columns
        params = columns.params
        for param, one in zip(params, columns.beside, strict=True):
            if param.grad is None:
                continue
            self._fused.check_apart(param.grad)
            if one is None and (reason := kernels.missing(param.device)) is not None:
                raise AmpStateError(
                    f'masters_on="cpu" has the CPU step half parameters; one of shape {tuple(param.shape)} stays FP32 '
                    f"on {param.device}, where compiled kernels step it: {reason}.  Or leave masters_on out."
                )
        if params and devices.is_capturing(params[0].device):
            raise AmpStateError(
                f"{type(self._record.optimizer).__name__}.step() is captured in a CUDA graph, but with "
                'masters_on="cpu" the CPU steps, which a replay skips.  Leave step() out of the capture, or masters_on.'
            )

    @torch.no_grad()
    def step(self) -> None:
        """Step every parameter that has a gradient. Waits for gradients; new values are on their way afterwards.

        Call after `check`.
        """
        record, columns = self._record, self._record.columns
        if columns is not self._columns:
            self._columns = columns
            self._fused.keep_apart(columns.params)
        groups = [group for group in record.optimizer.param_groups for _ in group["params"]]
        rows = [row for row, param in enumerate(columns.params) if param.grad is not None]
        sent, entries = [self._sent(row) for row in rows], record.rows.entries
        casts_off = self._owner.casts.off()
        with nullcontext() if casts_off is None else casts_off:
            for row, (grad, arrival) in zip(rows, sent, strict=True):
                if arrival is not None:
                    arrival.synchronize()
                param, one = columns.params[row], columns.beside[row]
                copy = None if one is None else one.copy
                self._fused.step_apart(entries[row], columns.weights[row], grad, copy, groups[row], None)
                if isinstance(one, HostMaster):
                    param.copy_(one.copy, non_blocking=True)
        record.rows.pairs.mark()  # not one by one: parameters may share a version

    def _sent(self, row: int) -> tuple[Tensor, torch.cuda.Event | None]:
        """Return a gradient where it is stepped, and the event of its arrival there; None: it is there."""
        param, one = self._record.columns.params[row], self._record.columns.beside[row]
        grad = param.grad
        assert grad is not None, "the caller saw it"
        if not isinstance(one, HostMaster):
            return grad, None
        device = param.device
        if device not in self._downloads:
            self._downloads[device] = devices.Downloads(device)
        memory = one.gradient_of(grad.dtype)
        return memory, self._downloads[device].start(memory, grad)
