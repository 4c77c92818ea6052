"""Steps in the backward: each parameter as soon as its gradient is complete, which is then freed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from amp_engine.errors import AmpStateError
from amp_engine.ground import devices
from amp_engine.ground.devices import HostNumbers
from amp_engine.ground.distributed import has_other_ranks
from amp_engine.ground.torch_private import disable_dynamo
from amp_engine.kernels import ListCheck, tensor_lists
from amp_engine.optimizers.fused_step import FusedStep, fused_step_of
from amp_engine.stepping.record import Record
from amp_engine.stepping.records import Records
from amp_engine.stepping.rows import Columns


class Release:
    """Steps the parameters of one optimizer in the backward, and frees their gradients. The StepHook owns it.

    Args:
        record: of the optimizer, whose class the kernels step.
        owner: of the record.
        tell: called at a step with how many gradients since the last one were not finite, one of their parameters, and
            True if none was finite.
    """

    def __init__(self, record: Record, owner: Records, tell: Callable[[int, nn.Parameter, bool], None]) -> None:
        fused = fused_step_of(record.optimizer)
        assert fused is not None, "checked with the request"
        self._fused: FusedStep = fused
        self._record = record
        self._owner = owner
        self._tell = tell
        self._check = ListCheck()
        self._columns: Columns | None = None
        self._places: dict[int, int] = {}  # id of a parameter -> its row
        self._groups: list[dict[str, Any]] = []  # of each row
        self._handles: list[RemovableHandle] = []
        weakref.finalize(self, _remove_all, self._handles).atexit = False  # of an optimizer that is gone
        self._stepped: set[int] = set()  # rows that were stepped since the last `end_step`
        self._flags: dict[torch.device, Tensor] = {}  # 1 for each row whose gradient was not finite
        self._numbers: dict[torch.device, tuple[Tensor, Tensor]] = {}  # a scale of 1; a norm that nothing reads
        self._sent: list[tuple[list[nn.Parameter], HostNumbers, int]] = []  # the last: how many were looked at
        self._follow_groups()

    def remove(self) -> None:
        """Remove the hooks from the parameters."""
        _remove_all(self._handles)

    def _follow_groups(self) -> None:
        """Have hooks on exactly the parameters in the groups. Call after a scan.

        Raises AmpStateError for a parameter that another optimizer steps, too.
        """
        record, columns = self._record, self._record.columns
        # Loading a state makes other groups of the same parameters.
        self._groups = [group for group in record.optimizer.param_groups for _ in group["params"]]
        if columns is self._columns:
            return
        other = next((one for one in self._owner.all if one is not record and one.shares_parameters_with(record)), None)
        if other is not None:
            both = f"{type(record.optimizer).__name__} and {type(other.optimizer).__name__}"
            raise AmpStateError(
                f"{both} step a common parameter, whose gradient is gone after the first step.  Give each parameter to "
                "one of them, or leave out release_gradients."
            )
        self.remove()
        self._columns = columns
        self._places = {id(p): row for row, p in enumerate(columns.params)}
        self._flags.clear()
        self._fused.keep_apart(columns.params)
        tensor_lists.count_apart(columns.params)  # graphs and marks would take the step of one for a write into others
        of_self = weakref.WeakMethod(self._on_complete)  # a parameter outlives its optimizer

        def on_complete(param: Tensor) -> None:
            if (call := of_self()) is not None:
                call(param)

        for param in columns.params:
            if param.requires_grad:
                self._handles.append(param.register_post_accumulate_grad_hook(on_complete))

    @disable_dynamo
    def _on_complete(self, param: Tensor) -> None:
        if self._owner.is_rehearsal or param.grad is None:
            return
        if not self._stepped:
            self._begin(param)
        if (row := self._places.get(id(param))) is not None:
            if row in self._stepped:
                self._refuse_second(param)
            self._step(row)

    def _begin(self, param: Tensor) -> None:
        """Before the first parameter of a step. Raises AmpStateError where no step may run in the backward."""
        record = self._record
        self._fused.check_groups("release_gradients")
        record.follow_writes(rounds=False)
        self._follow_groups()
        name, why = type(record.optimizer).__name__, ""
        if record.is_in_body:
            why = "the loss is scaled, by another amp.initialize with a loss scale"
        elif devices.is_capturing(param.device):
            why = "a CUDA graph captures the backward"
        elif record.ranks.has_wrappers() or has_other_ranks():
            why = "ranks reduce gradients after the backward"
        if why:
            raise AmpStateError(
                f"release_gradients=True has the backward step the parameters of {name}, but {why}.  Nothing was "
                "stepped.  Leave out release_gradients."
            )

    def _refuse_second(self, param: Tensor) -> None:
        param.grad = None
        name = type(self._record.optimizer).__name__
        raise AmpStateError(
            f"A parameter of shape {tuple(param.shape)} got a second gradient before {name}.step().  With "
            "release_gradients=True each backward steps its parameters, so that gradients of several backwards do not "
            f"add up.  Call {name}.step() after each backward, also after one that raised (zero_grad() does not end "
            "it), or leave out release_gradients to accumulate."
        )

    @torch.no_grad()
    def _step(self, row: int) -> None:
        columns = self._record.columns
        param, weight = columns.params[row], columns.weights[row]
        grad, copy = param.grad, None if columns.copies is None else columns.copies[row]
        assert grad is not None, "the caller saw it"
        self._fused.check_apart(grad)
        casts_off = self._owner.casts.off()
        with nullcontext() if casts_off is None else casts_off:
            found_inf = self._found_inf(row, grad)
            self._fused.step_apart(param, weight, grad, copy, self._groups[row], found_inf)
        if (beside := columns.beside[row]) is not None:
            beside.mark()
        param.grad = None
        self._stepped.add(row)
        self._record.is_stepped_ahead = True

    def _found_inf(self, row: int, grad: Tensor) -> Tensor | None:
        """Return the flag of a row, set to 1 if its gradient is not finite; None if nothing is skipped."""
        if not self._owner.skips_unscaled:
            return None
        device = grad.device
        if device not in self._flags:
            self._flags[device] = torch.zeros(len(self._record.columns.params), dtype=torch.float32, device=device)
            one = torch.ones((), dtype=torch.float32, device=device)
            self._numbers[device] = one, torch.zeros_like(one)
        flag = self._flags[device][row]
        scale, norm = self._numbers[device]
        self._check.run([grad], None, scale, flag, norm)
        return flag

    def end_step(self) -> None:
        """At the optimizer's `step`: step gradients that came in another way, and tell what was not finite.

        No host sync: what is on its way from a GPU is told at a later step.
        """
        record = self._record
        self._follow_groups()
        left = [row for row, param in enumerate(record.columns.params) if param.grad is not None]
        if left:
            self._fused.check_groups("release_gradients")
        for row in left:
            if row in self._stepped:
                self._refuse_second(record.columns.params[row])
            self._fused.check_apart(record.columns.params[row].grad)  # type: ignore[arg-type]
        for row in left:
            self._step(row)
        record.written_parameters.warn(record.optimizer, record.rows)
        for flags in self._flags.values():
            stepped = [row for row in self._stepped if record.columns.params[row].device == flags.device]
            self._sent.append((list(record.columns.params), HostNumbers(flags), len(stepped)))
        self._flags.clear()
        self._stepped.clear()
        record.is_stepped_ahead = False
        record.pending.taken_unseen()
        record.stepped(may_be_left=False)
        self.hear()
        if left:
            self._columns = None  # one may be trained only now, and gets a hook
            self._follow_groups()

    def hear(self) -> None:
        """Tell of gradients that were not finite, as far as the host knows."""
        while self._sent and self._sent[0][1].is_known():
            params, numbers, count = self._sent.pop(0)
            bad = [p for row, p in enumerate(params) if numbers.read(row) != 0]
            if bad:
                self._tell(len(bad), bad[0], len(bad) == count)


def _remove_all(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()
