"""The rows of one optimizer: its weights, the model's parameters behind them, their gradients.

A low-precision parameter gets a FP32 master, which replaces it in `optimizer.param_groups` and takes over its optimizer
state, so state never passes through half. The weight of a row without a master is the parameter itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from operator import or_
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_engine.errors import AmpStateError
from amp_engine.ground import devices
from amp_engine.ground.dtypes import dtype_name, is_low_precision
from amp_engine.ground.torch_private import disable_dynamo
from amp_engine.kernels import tensor_lists
from amp_engine.kernels.backend import TensorList
from amp_engine.optimizers.fused_step import StepInput
from amp_engine.stepping.arithmetic import is_zero
from amp_engine.stepping.columns import NO_COLUMNS, Columns, columns_of
from amp_engine.stepping.exact import discard_exact, exact_value_of
from amp_engine.stepping.half_weights import HalfWeights
from amp_engine.stepping.master import (
    Ledger,
    Master,
    laid_out_as,
    masters_of,
    materialize_held,
    take_state,
    write_back_all,
)
from amp_engine.stepping.slots import NO_SLOTS, OWN_SLOTS, Slot, WholeCheck

_SCALED = bytes(slot == Slot.HELD for slot in range(256))
_FOREIGN = int(Slot.FOREIGN)  # `in` finds an int in a third of the time

# Rows that keep FP32 values of parameters, until they are released.
_KEEPING: weakref.WeakSet[Rows] = weakref.WeakSet()


def follow_masters_in_eager(module: nn.Module, args: Any) -> None:
    """Forward pre-hook: round masters that were written outside of a step (SAM, an average) into their models.

    It does so for all models, which is cheaper than to find the masters of one. Does nothing in a compiled graph.
    """
    if not torch.compiler.is_compiling():
        for rows in list(_KEEPING):
            if rows.masters:
                rows.round_written()


@disable_dynamo
def follow_masters(module: nn.Module, args: Any) -> None:
    """Like `follow_masters_in_eager`, but breaks a graph: for optimizers that write masters outside of steps."""
    follow_masters_in_eager(module, args)


def announce_broadcast(numel: int) -> None:
    """Note that a tensor of `numel` elements, which is no parameter, was broadcast.

    Before the first backward the tensor may hold parameters that a script then copies into `param.data`. The copy
    changes nothing on the sending rank and moves no version on the others, so all ranks continue from rounded values,
    as in apex.
    """
    for rows in list(_KEEPING):
        if rows._is_fresh:
            rows.doubt(numel)


def make_for_joined() -> None:
    """Scan all rows for parameters that joined since the last backward. The next backward reports refused ones."""
    for rows in list(_KEEPING):
        with suppress(AmpStateError):
            rows.scan()


class Rows:
    """The rows of one optimizer that steps the model's parameters themselves.

    Args:
        optimizer: its groups have the weights.
        halves: judges low-precision weights; None if they are allowed.
    """

    makes_masters: ClassVar[bool] = False
    splits: ClassVar[bool] = False  # True if weights have remainders
    _adopt_data_writes = False  # True to compare values before each step

    def __init__(self, optimizer: Optimizer, halves: HalfWeights | None = None) -> None:
        # True if weights may be written outside of steps: schedulefree switches them between training and evaluation.
        self.written_outside = callable(getattr(optimizer, "train", None)) and callable(
            getattr(optimizer, "eval", None)
        )
        # True if other code wrote low-precision parameters since the last step, which loses their lower bits.
        self.was_rounded = False
        self.masters: list[Master] = []  # in the order of the groups
        self.scans = 0  # count of scans that found something new
        self.joined: list[nn.Parameter] = []  # parameters that joined with a gradient which is not handled yet
        self._halves = halves
        self._departed: dict[int, weakref.ref[nn.Parameter]] = {}  # by id
        self._optimizer = weakref.ref(optimizer)
        self.columns = NO_COLUMNS  # as of the last scan
        self._scanned: list[tuple[nn.Parameter, ...]] = []  # the groups' parameters, as of the last scan
        # The parameters and weights of `masters`.
        self._low = self._high = tensor_lists.params([])
        self.ledger = Ledger([], [])
        self._is_fresh = True  # until `refresh` is called for the first time
        self._exact: Mapping[int, Tensor] = {}  # until `keep`: id of a parameter -> its value before the cast

    def keep(self) -> None:
        """Keep FP32 values, until `release`. From now on forwards, broadcasts and checkpoints reach these rows."""
        self.scan()
        self._exact = {}
        _KEEPING.add(self)

    def doubt(self, numel: int) -> None:
        """Drop exact values, if a broadcast of `numel` elements may have carried the largest parameter."""

    @property
    def writes_parameters(self) -> bool:
        """True if a step rounds weights into the model, or has remainders to write."""
        return bool(self.masters) or self.splits

    def wrapped_by(self, wrapper: Optimizer) -> None:
        """Expect `wrapper`, which shares the groups, to write weights after the step."""
        self.written_outside = True

    def scan(self) -> None:
        """Update the rows to the present groups, if the optimizer is alive."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        now = [group["params"] for group in optimizer.param_groups]
        is_same = len(now) == len(self._scanned) and all(map(tensor_lists.same_objects, now, self._scanned))
        if not is_same or self._has_unfrozen():
            self._rescan(optimizer.param_groups)
            self.look_at_types()

    def _rescan(self, groups: list[dict[str, Any]]) -> None:
        self.scans += 1
        earlier, self.columns = self.columns, columns_of(groups, self.find)
        self._scanned = [tuple(group["params"]) for group in groups]
        self._note_moves(earlier)

    def _has_unfrozen(self) -> bool:
        """True if a parameter in the groups needs a master that it did not need at the last scan."""
        return False

    def look_at_types(self) -> None:
        """Note which weights are low-precision, if that matters. Loops over all weights."""
        if self._halves is not None:
            self._halves.look_at(self.columns.plain)

    def judge_half(self) -> None:
        """Raise AmpStateError if a level of FP32 weights would step a low-precision one. Call after a scan."""
        if self._halves is not None:
            self._halves.judge(self._live_optimizer())

    def _note_moves(self, earlier: Columns) -> None:
        """Note the parameters that joined with a gradient, and parameters that left."""
        now = set(map(id, self.columns.params))
        # Weak references to departed parameters only: `torch.utils.swap_tensors` refuses a parameter that has some.
        self._departed = {key: ref for key, ref in self._departed.items() if ref() is not None}
        self._departed |= {id(p): weakref.ref(p) for p in earlier.params if id(p) not in now}
        if earlier is not NO_COLUMNS and tensor_lists.any_gradient(self.columns.param_handle):
            known = set(map(id, earlier.params))
            self.joined += [p for p in self.columns.params if id(p) not in known and p.grad is not None]

    @property
    def departed(self) -> list[nn.Parameter]:
        """Parameters that have left the groups, even if they came back."""
        return [p for ref in self._departed.values() if (p := ref()) is not None]

    def master_of(self, param: nn.Parameter) -> Master | None:
        """The master of a parameter, or None."""
        return None

    def find(self, weight: Tensor) -> Master | None:
        """The master whose weight, in the groups, is this very object."""
        return None

    def refresh(self, adopt_data_writes: bool = False) -> None:
        """Update masters or remainders of parameters that other code moved.

        Args:
            adopt_data_writes: True to also compare values.
        """
        self._is_fresh = False

    def follow(self) -> None:
        """Before a step: copy foreign writes between master and parameter; if both were written, from the parameter.

        A step that is skipped, or has no gradient for a master, would not write that master into the model.
        """
        self.round_written()
        self.refresh(self._adopt_data_writes)

    def written(self) -> list[Master]:
        """Return masters that were written outside of a step while their parameters were not."""
        have_moved = self.ledger.weights.have_moved()
        return [master for master in self.masters if master.was_written() and master.in_sync()] if have_moved else []

    def round_written(self) -> None:
        """Round masters that were written outside of a step into their parameters."""
        if written := self.written():
            write_back_all(written)
            for master in written:
                master.mark_in_sync()

    def write_back(self) -> None:
        """Round every master into its parameter. Moves the versions of the parameters, like any optimizer."""
        if self.masters:
            write_back_all(self.masters)
            self.mark_in_sync()

    def mark_in_sync(self) -> None:
        """Declare that masters and parameters agree."""
        self.ledger.params.mark()
        self.ledger.weights.mark()

    # Gradients.

    def step_input(self) -> StepInput:
        """Return the input of the next step, as of the last scan."""
        columns = self.columns
        written = tensor_lists.any_gradient(self._high)
        if written:
            for master in self.masters:
                if master.gradient() is not None:
                    master.materialize()  # autograd wrote into the master itself, beside the held gradient
        gradients, slots = self._step_gradients(columns, are_held=not written)
        if zero_rows := [row for row in self.ledger.spent.zero_rows() if slots[row] == Slot.EMPTY]:
            gradients, changed = list(gradients), bytearray(slots)
            for row, zeros in zip(zero_rows, _zeros_like([columns.weights[row] for row in zero_rows]), strict=True):
                gradients[row], changed[row] = zeros, Slot.OWN
            slots = bytes(changed)
        return StepInput(
            columns.weights,
            columns.weights,
            gradients,
            columns.copies if self.masters else None,
            slots.translate(_SCALED),
            are_plain=_FOREIGN not in slots,
            slots=slots,
            are_held=not written,
        )

    def _step_gradients(self, columns: Columns, are_held: bool) -> tuple[TensorList, bytes]:
        """Return the gradient of each row, and its Slot; `are_held` is True if no master has one of its own."""
        slots = self.ledger.slots
        held = None if slots.count == 0 else slots.held
        if held is not None and slots.is_whole and are_held and not columns.plain:
            return held.beside(), bytes(slots.states)
        own: TensorList
        if columns.asks:
            own = [None if is_held else w.grad for is_held, w in zip(self._held_states(), columns.weights, strict=True)]
            states = bytes(Slot.EMPTY if grad is None else Slot.FOREIGN for grad in own)  # its access is unknown
        else:
            own, accesses, _, _ = tensor_lists.gradients(columns.weight_handle)
            states = accesses.translate(OWN_SLOTS)
        if held is not None:
            own = held.beside(own)
            states = bytes(map(or_, slots.states, states))  # a row that is HELD has no gradient of its own by now
        return own, states

    def _held_states(self) -> bytes | bytearray:
        """Return the state of each slot."""
        return self.ledger.slots.states if self.ledger.slots.count > 0 else bytes(len(self.columns.weights))

    def whole_check(self) -> WholeCheck | None:
        """Return the last check if no gradient was written, discarded or added since; else None."""
        check = self.ledger.slots.check
        if check is None or not (
            self.ledger.slots.is_whole
            and tensor_lists.same_objects(self.columns.weights, check.weights)
            and not tensor_lists.any_gradient(self._high)
            and (check.unscaled is None or check.unscaled.is_untouched())
        ):
            return None
        return check

    def has_parameter_gradients(self) -> bool:
        """True if a parameter that has a master has a gradient."""
        return tensor_lists.any_gradient(self._low)

    def has_master_gradients(self) -> bool:
        """True if a master has a float32 gradient of its own."""
        return tensor_lists.any_gradient(self._high)

    def gradient_marks(self) -> tensor_lists.GradientMarks:
        """Return marks of the gradients of parameters with masters."""
        return tensor_lists.gradient_marks(self._low)

    def gradients_written_since(self, before: tensor_lists.GradientMarks) -> bool:
        """True if a gradient was written or replaced since `gradient_marks()`; False if it was discarded.

        A write through `.data` moves no version, but it makes a held gradient be copied, or has new memory.
        """
        if before.params is not self._low:
            return False  # the marks are of other rows
        held = self.ledger.slots.held
        rows = [] if held is None else held.written()
        if not rows and not before.have_moved():
            return False
        written = [self.columns.params[row] for row in rows]
        written += [self.masters[place].param for place, was_there in before.moved() if was_there]
        is_written = any(p.grad is not None for p in written)
        # Gradients of a parameter that has several masters come and go with the windows of each.
        return is_written and all(len(list(masters_of(master.param))) == 1 for master in self.masters)

    def gradients_discarded_since(self, before: tensor_lists.GradientMarks) -> bool:
        """True if a gradient was discarded since `gradient_marks()` and its master still has one that is not 0."""
        if before.params is not self._low or not before.have_moved():
            return False
        moved = [self.masters[place] for place, was_there in before.moved() if was_there]
        gone = [m for m in moved if m.param.grad is None and len(list(masters_of(m.param))) == 1]
        return any(m.is_held() or (m.gradient() is not None and not is_zero(m.gradient())) for m in gone)

    def totals(self) -> dict[int, Tensor]:
        """Return the float32 gradients of masters, by row, in memory that the kernels can add to."""
        if not tensor_lists.any_gradient(self._high):
            return {}
        found = ((row, m.total()) for row, m in enumerate(self.columns.masters) if m is not None)
        return {row: total for row, total in found if total is not None}

    def materialize(self, zeros: bool = False) -> None:
        """Make every held gradient float32, 4 bytes an element; with `zeros` also make gradients that were zeroed."""
        if self.ledger.slots.count > 0:
            materialize_held(self.ledger.slots, self.masters)
        self.ledger.slots = NO_SLOTS
        for row in self.ledger.spent.zero_rows() if zeros else ():
            if (zeroed := self.columns.masters[row]) is not None:
                zeroed.materialize()

    def discard_parameter_gradients(self) -> None:
        """Discard the gradients of parameters that have a master."""
        tensor_lists.discard_gradients(self._low)

    def spend_gradients(self, step: StepInput | None = None, keeps_masters: bool = False) -> None:
        """Discard gradients after a step, except masters' if `keeps_masters`, and watch for a later `zero_grad`.

        Args:
            step: the input of a fused step; None after any other, which may have made or discarded gradients.
        """
        if self.masters:
            had = self._has_gradients() if step is None else step.slots
            self.ledger.spent.spend(had, self.columns.master_mask)
        self.discard_parameter_gradients()  # first, so that nothing else has the memory of held gradients
        if keeps_masters:
            kept = [m.weight for m in self.masters if m.gradient() is not None]
            self.ledger.spent.watch(min(kept, key=Tensor.numel) if kept else None)
        else:
            if step is None or not step.are_held:
                tensor_lists.discard_gradients(self._high)
            self.ledger.slots = NO_SLOTS
            self.show_spent()

    def _has_gradients(self) -> bytes:
        """Return one byte a row, not 0 where the row has a gradient, held or its own."""
        held = bytes(self._held_states())
        if not tensor_lists.any_gradient(self._high):
            return held
        return bytes(map(or_, held, tensor_lists.gradients(self.columns.weight_handle).accesses))

    def show_spent(self) -> None:
        """Have the smallest master and the smallest parameter whose gradients a step discarded show tiny ones."""
        if self.masters and not devices.is_capturing(self.masters[0].weight.device):
            self.ledger.spent.show(self._smallest_spent)

    def _smallest_spent(self) -> list[nn.Parameter]:
        spent = [m for m in self.masters if m.row is not None and self.ledger.spent.states[m.row]]
        weights = [m.weight for m in spent]
        params = [m.param for m in spent if len(list(masters_of(m.param))) == 1]
        return [min(those, key=Tensor.numel) for those in (weights, params) if those]

    def discard_gradients(self) -> None:
        """Discard the gradients of masters and of their parameters."""
        self.discard_parameter_gradients()
        self.discard_master_gradients()

    def discard_master_gradients(self) -> None:
        """Discard the gradients of masters, and keep those of their parameters."""
        tensor_lists.discard_gradients(self._high)
        self.ledger.slots = NO_SLOTS

    def release(self) -> None:
        """Undo what these rows did to parameters and groups."""
        _KEEPING.discard(self)

    def _live_optimizer(self) -> Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None, "called from a hook of the optimizer or with it in hand"
        return optimizer


class MasterRows(Rows):
    """The rows of one optimizer that steps FP32 masters of low-precision parameters.

    Args:
        optimizer: its groups are edited in place: each low-precision parameter that requires a gradient is replaced by
            its master.
        exact: id of a parameter -> its float32 value from before the model was cast.
        adopt_data_writes: True to look for writes through `param.data` before each step, and not only before the first
            backward.
    """

    makes_masters = True

    def __init__(
        self, optimizer: Optimizer, exact: Mapping[int, Tensor] | None = None, adopt_data_writes: bool = False
    ) -> None:
        super().__init__(optimizer)
        self._wrappers: list[weakref.ref[Optimizer]] = []
        self._by_weight: dict[int, Master] = {}  # by id of the master weight
        self._by_param: dict[int, Master] = {}  # by id of the parameter
        self._adopt_data_writes = adopt_data_writes
        self._exact = exact or {}

    def doubt(self, numel: int) -> None:
        """Have masters take their parameters, if a broadcast of `numel` elements may have carried the largest one."""
        if numel >= max((master.weight.numel() for master in self.masters), default=0):
            for master in self.masters:
                master.is_doubted = True

    def wrapped_by(self, wrapper: Optimizer) -> None:
        """Expect `wrapper`, which shares the groups, to write masters after the step; move its state to masters."""
        super().wrapped_by(wrapper)
        self._wrappers.append(weakref.ref(wrapper))
        states = list(self._states())
        for master in self.masters:
            take_state(master, states)

    def _states(self) -> Iterator[dict[Any, Any]]:
        """Yield the state of the optimizer, and of wrappers that have their own, each keyed by parameter."""
        own = self._live_optimizer().state
        yield own
        for ref in self._wrappers:
            state = getattr(ref(), "state", None)
            if isinstance(state, dict) and state is not own:
                yield state

    def _rescan(self, groups: list[dict[str, Any]]) -> None:
        """Give new, unfrozen and replaced parameters masters, and drop masters that left the groups.

        Raises AmpStateError, before anything is changed, for a parameter beside its own master.
        """
        self._replace(groups)
        super()._rescan(groups)
        are_new = not self.masters
        self.masters = [master for master in self.columns.masters if master is not None]
        if len(self.masters) < len(self._by_weight):
            stay = set(map(id, self.masters))
            for master in self._by_weight.values():
                if id(master) not in stay:  # even if it is still referenced: the parameter may have other values
                    discard_exact(master)
            self._by_weight = {id(m.weight): m for m in self.masters}
            self._by_param = {id(m.param): m for m in self.masters}
        self._low = tensor_lists.params([m.param for m in self.masters])
        self._high = tensor_lists.params([m.weight for m in self.masters])
        slots, were = self.ledger.slots, [None if m is None else m.row for m in self.columns.masters]
        is_shown, spent = self.ledger.spent.hear(), self.ledger.spent.rearranged(were)
        if slots.count > 0:
            slots = slots.rearranged(were)
        self.ledger = Ledger([m.param for m in self.masters], [m.weight for m in self.masters], slots, spent)
        rows = [row for row, master in enumerate(self.columns.masters) if master is not None]
        for place, (master, row) in enumerate(zip(self.masters, rows, strict=True)):
            master.enter(self.ledger, place, row)
        if is_shown:
            self.show_spent()
        if are_new and tensor_lists.any_gradient(self._low):
            self.ledger.spent.zero(m.row for m in self.masters if m.row is not None and is_zero(m.param.grad))
            self.show_spent()

    def master_of(self, param: nn.Parameter) -> Master | None:
        """The master of a parameter, or None."""
        return self._by_param.get(id(param))

    def find(self, weight: Tensor) -> Master | None:
        """The master whose weight, in the groups, is this very object."""
        return self._by_weight.get(id(weight))

    def _has_unfrozen(self) -> bool:
        """True if a parameter in the groups needs a master that it did not need at the last scan."""
        plain = self.columns.plain
        return len(plain) > 0 and any(is_low_precision(p) and p.requires_grad for p in plain)

    def _replace(self, groups: list[dict[str, Any]]) -> None:
        """Replace low-precision parameters in `groups` by their masters."""
        unmastered = {id(p): p for group in groups for p in group["params"] if is_low_precision(p) and p.requires_grad}
        entries = {id(p) for group in groups for p in group["params"]} if unmastered else set()
        for p in unmastered.values():
            if id(p) in self._by_param and id(self._by_param[id(p)].weight) in entries:
                raise AmpStateError(
                    f"A {dtype_name(p.dtype)} parameter of shape {tuple(p.shape)} was added to "
                    f"{type(self._live_optimizer()).__name__}, which already steps its FP32 master.  Leave it out of "
                    "add_param_group()."
                )
        states = [state for state in self._states() if state]
        for group in groups if unmastered else ():
            params = group["params"]
            for i, p in enumerate(params):
                if id(p) in unmastered:
                    master = self._by_param.get(id(p)) or self._create(p, states)
                    params[i] = master.weight

    def refresh(self, adopt_data_writes: bool = False) -> None:
        """Refresh every master whose parameter was moved by other code.

        The first call always compares values: apex made masters only at the first backward, so scripts initialize
        weights, or broadcast them, through `param.data` until then.

        Args:
            adopt_data_writes: True to also compare values, except of masters that were written meanwhile.
        """
        is_first = self._is_fresh
        if is_first:
            super().refresh()
            for master in self.masters:
                if master.was_written():
                    master.is_doubted = False  # a script may restore masters that it saved in an earlier run
                elif master.in_sync() and not master.is_doubted:
                    master.adopt()
                    master.mark_in_sync()
        if is_first or self.ledger.params.have_moved():
            for master in self.masters:
                self.was_rounded |= master.refresh() and not is_first
        if adopt_data_writes and not is_first:
            for master in self.masters:
                if not master.was_written():
                    master.adopt()
                    master.mark_weight()

    def release(self) -> None:
        """Put the parameters back into the groups, in float32 with their masters' values and state."""
        super().release()
        optimizer = self._optimizer()
        if optimizer is None:
            return
        self.ledger.spent.hear()
        with suppress(AmpStateError):  # a parameter beside its own master keeps its value
            self.scan()
        if self.ledger.spent.is_zeroed_in_place:
            self.ledger.spent.zero_all()
        self.refresh(adopt_data_writes=True)
        for group in optimizer.param_groups:
            for i, p in enumerate(group["params"]):
                master = self.find(p)
                if master is None:
                    continue
                for state in self._states():
                    if p in state:
                        state[master.param] = state[p]
                        del state[p]
                grad = None
                with suppress(AmpStateError):  # a held gradient was lost
                    grad = p.grad
                master.param.grad = None
                master.param.data = p.detach()
                master.param.grad = None if grad is None else grad.to(master.param.grad_dtype)
                discard_exact(master)
                group["params"][i] = master.param  # last: an interrupted call finds the others in the groups
        self._by_weight, self._by_param, self.masters = {}, {}, []
        self._low = self._high = tensor_lists.params([])
        self._scanned = []
        self.columns, self.ledger = NO_COLUMNS, Ledger([], [])

    def _create(self, param: nn.Parameter, states: Sequence[dict[Any, Any]]) -> Master:
        exact_f32 = self._exact.get(id(param))
        others = list(masters_of(param))
        if exact_f32 is None:
            exact_f32 = exact_value_of(others)
            value_f32 = param.detach().to(torch.float32, copy=True) if exact_f32 is None else exact_f32
        elif others or exact_f32.dtype is not torch.float32:  # another optimizer's master has this memory
            value_f32 = exact_f32.to(torch.float32, copy=bool(others))
        else:
            value_f32 = exact_f32
        master = Master(param, laid_out_as(param, tensor_lists.written_out(value_f32)))
        self._by_weight[id(master.weight)] = master
        self._by_param[id(param)] = master
        take_state(master, states)
        return master


def _zeros_like(weights: Sequence[Tensor]) -> list[Tensor]:
    """Return zeros with the shapes and strides of `weights`. Do not write them: those of one device share memory."""
    sizes = dict[torch.device, int]()
    for w in weights:
        sizes[w.device] = max(sizes.get(w.device, 0), w.numel())
    zeros = {device: torch.zeros(size, device=device) for device, size in sizes.items()}
    return [zeros[w.device].as_strided(w.shape, w.stride()) for w in weights]
