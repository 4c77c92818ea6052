"""What one optimizer steps, row by row: its weights, the model's parameters behind them, their gradients.

A low-precision parameter gets a FP32 master, which replaces it in `optimizer.param_groups` and takes over its optimizer
state, so state never passes through half. A row without a master is one whose weight is the parameter.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from operator import or_
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_engine.errors import AmpStateError
from amp_engine.ground import devices
from amp_engine.ground.dtypes import is_low_precision
from amp_engine.ground.torch_private import disable_dynamo
from amp_engine.kernels import tensor_lists
from amp_engine.stepping import arithmetic
from amp_engine.stepping.columns import NO_COLUMNS, Columns, columns_of
from amp_engine.stepping.exact import add_maker, discard_exact, discard_maker, exact_value_of
from amp_engine.stepping.half_weights import HalfWeights
from amp_engine.stepping.master import (
    Master,
    Shared,
    laid_out_as,
    masters_of,
    take_state,
    write_back_all,
)
from amp_engine.stepping.seen import Left, seen
from amp_engine.stepping.slots import NO_SLOTS, OWN_SLOTS, Slot, Slots, WholeCheck

# Those that make masters,
_WITH_MASTERS: weakref.WeakSet[Rows] = weakref.WeakSet()
# and of these, those that have seen no backward yet.
_FRESH: weakref.WeakSet[Rows] = weakref.WeakSet()


def follow_masters_in_eager(module: nn.Module, args: Any) -> None:
    """Forward pre-hook: round masters that somebody wrote outside of a step (SAM, an average) into their models.

    Of all models: a look at the stamps of all masters is cheaper than to find those of one. Nothing in a graph.
    """
    if not torch.compiler.is_compiling():
        for rows in list(_WITH_MASTERS):
            rows.round_written()


@disable_dynamo
def follow_masters(module: nn.Module, args: Any) -> None:
    """As `follow_masters_in_eager`, and breaks a graph: for optimizers that write masters outside of their step."""
    follow_masters_in_eager(module, args)


def announce_broadcast(numel: int) -> None:
    """A tensor of `numel` elements, no parameter, was broadcast.

    Before the first backward that may be the model's own weights, to be copied into `param.data`. On the rank that
    they came from nothing changes by that, and elsewhere no version: so all go on from rounded values, as in apex.
    """
    for rows in list(_FRESH):
        rows._doubt(numel)


class StepRows(NamedTuple):
    """What one step reads and writes, one row for each parameter in the order of the groups.

    Attributes:
        weights: n; masters, or the parameters themselves.
        gradients: n; of each slot, as it is.
        slots: n; the state of each.
        copies: n; the model's parameters behind masters.
    """

    weights: Sequence[Tensor]
    gradients: Sequence[Tensor | None]
    slots: bytes
    copies: Sequence[Tensor | None]


class GradientMarks(NamedTuple):
    """Gradients as they were.

    Attributes:
        scans: of the rows, by then.
        stamps: of the gradients.
    """

    scans: int
    stamps: tensor_lists.GradientStamps


class Rows:
    """The rows of one optimizer, and the masters of those that have one.

    Args:
        optimizer: if masters are made its groups are edited in place: each low-precision parameter that requires a
            gradient is replaced by its master.
        makes_masters: whether low-precision parameters get one.
        exact: id of a parameter -> its float32 value from before the model was cast.
        adopt_data_writes: whether writes through `param.data` are looked for before each step, not before the first
            backward only.
        halves: looks after low-precision weights without masters; None where they are welcome.
    """

    splits: ClassVar[bool] = False  # whether weights have remainders

    def __init__(
        self,
        optimizer: Optimizer,
        makes_masters: bool,
        exact: Mapping[int, Tensor] | None = None,
        adopt_data_writes: bool = False,
        halves: HalfWeights | None = None,
    ) -> None:
        self.makes_masters = makes_masters
        self._halves = halves
        # Whether the optimizer switches its parameters between training and evaluation (schedulefree and kin).
        self.written_outside = callable(getattr(optimizer, "train", None)) and callable(
            getattr(optimizer, "eval", None)
        )
        # Whether somebody wrote low-precision parameters since the last step, by which their lower bits are lost.
        self.was_rounded = False
        self.masters: list[Master] = []  # in the order of the groups
        self.scans = 0  # that found something new
        self.joined: list[nn.Parameter] = []  # parameters that came with a gradient, until it is looked at
        self._departed: dict[int, weakref.ref[nn.Parameter]] = {}  # by id
        self._optimizer = weakref.ref(optimizer)
        self._wrappers: list[weakref.ref[Optimizer]] = []
        self._by_weight: dict[int, Master] = {}  # by id of the master weight
        self._by_param: dict[int, Master] = {}  # by id of the parameter
        # The parameters and weights of `masters`.
        self._low = self._high = tensor_lists.params([])
        self._columns = NO_COLUMNS
        self._scanned: list[tuple[nn.Parameter, ...]] = []  # the groups' parameters, as of the last scan
        self._shared = Shared(tensor_lists.stamps([]), tensor_lists.stamps([]))
        self._adopt_data_writes = adopt_data_writes
        self._is_fresh = True  # until masters are refreshed for the first time
        if makes_masters:
            self._await_broadcasts()
            self.scan(exact)
            add_maker(self)
            _WITH_MASTERS.add(self)

    def _await_broadcasts(self) -> None:
        """Hear of them until `refresh`."""
        _FRESH.add(self)

    def _doubt(self, numel: int) -> None:
        """Have masters take what parameters are, if a broadcast of `numel` elements may have had all of one in it."""
        if numel >= max((master.weight.numel() for master in self.masters), default=0):
            for master in self.masters:
                master.is_doubted = True

    @property
    def columns(self) -> Columns:
        """The rows as of the last scan; without masters, as the groups are now."""
        if not self.makes_masters:
            if self._optimizer() is None:
                return NO_COLUMNS
            self.scan()
        return self._columns

    @property
    def writes_parameters(self) -> bool:
        """True if a step rounds weights into the model, or has remainders to write."""
        return bool(self.masters) or self.splits

    def wrapped_by(self, wrapper: Optimizer) -> None:
        """Expect `wrapper`, which shares the groups, to write masters after their step; give it its state by master."""
        self.written_outside = True
        self._wrappers.append(weakref.ref(wrapper))
        states = list(self._states())
        for master in self.masters:
            take_state(master, states)

    def _states(self) -> Iterator[dict[Any, Any]]:
        """State by parameter: the optimizer's, and that of wrappers that have one of their own."""
        own = self._live_optimizer().state
        yield own
        for ref in self._wrappers:
            state = getattr(ref(), "state", None)
            if isinstance(state, dict) and state is not own:
                yield state

    def look_for_joined(self) -> None:
        """Scan, if the optimizer lives."""
        if self._optimizer() is not None:
            self.scan()

    def scan(self, exact: Mapping[int, Tensor] | None = None) -> None:
        """Bring the rows in line with the groups as they are now.

        New groups, unfrozen parameters and replaced entries get masters; entries that left the groups lose
        theirs. Raises AmpStateError, before anything is changed, for a parameter whose master is there too.
        """
        groups = self._live_optimizer().param_groups
        if self._is_scanned(groups):
            return
        self.scans += 1
        if not self.makes_masters:
            earlier = self._columns
            self._columns, self._scanned = columns_of(groups, self.find), [tuple(group["params"]) for group in groups]
            self._note_moves(earlier)
            self.look_at_types()
            return
        self._replace(groups, exact or {})
        are_new = not self.masters
        found = (self.find(p) for group in groups for p in group["params"])
        self.masters = [master for master in found if master is not None]
        if len(self.masters) < len(self._by_weight):
            stay = set(map(id, self.masters))
            for master in self._by_weight.values():
                if id(master) not in stay:  # whoever still holds it, its value is no longer the parameter's
                    discard_exact(master)
            self._by_weight = {id(m.weight): m for m in self.masters}
            self._by_param = {id(m.param): m for m in self.masters}
        self._low = tensor_lists.params([m.param for m in self.masters])
        self._high = tensor_lists.params([m.weight for m in self.masters])
        self._scanned = [tuple(group["params"]) for group in groups]
        earlier, self._columns = self._columns, columns_of(groups, self.find)
        self._note_moves(earlier)
        slots, were = self.slots, [None if m is None else m.row for m in self._columns.masters]
        is_shown, left = self.left.is_shown, self.left.rearranged(were)
        if slots.count > 0:
            slots = slots.rearranged(were)
        if are_new:
            self._shared = Shared(tensor_lists.stamps(self._low), tensor_lists.stamps(self._high), slots, left)
        else:
            marks = [master.marked_as() for master in self.masters]
            self._shared = Shared(
                tensor_lists.joined(p for p, _ in marks), tensor_lists.joined(w for _, w in marks), slots, left
            )
        rows = [row for row, master in enumerate(self._columns.masters) if master is not None]
        for place, (master, row) in enumerate(zip(self.masters, rows, strict=True)):
            master.share(self._shared, place, row)
        if is_shown:
            self.show_left()
        if are_new and tensor_lists.any_gradient(self._low):
            self.left.zero(m.row for m in self.masters if m.row is not None and is_zero(m.param.grad))
            self.show_left()

    def look_at_types(self) -> None:
        """Note which weights are low-precision, where that counts. A loop over all of them."""
        if self._halves is not None:
            self._halves.look_at(self._columns.plain)

    def judge_half(self) -> None:
        """Raise AmpStateError if a low-precision weight would be stepped where the level's are FP32. After a scan."""
        if self._halves is not None and not self.makes_masters:
            self._halves.judge(self._live_optimizer())

    def _note_moves(self, earlier: Columns) -> None:
        """Of parameters: which joined with a gradient, and which left."""
        now = set(map(id, self._columns.params))
        # No references to all: `torch.utils.swap_tensors` takes no parameter that has any.
        self._departed = {key: ref for key, ref in self._departed.items() if ref() is not None}
        self._departed |= {id(p): weakref.ref(p) for p in earlier.params if id(p) not in now}
        if earlier is not NO_COLUMNS and tensor_lists.any_gradient(self._columns.param_handle):
            known = set(map(id, earlier.params))
            self.joined += [p for p in self._columns.params if id(p) not in known and p.grad is not None]

    @property
    def departed(self) -> list[nn.Parameter]:
        """Parameters that have left the groups, whether they came back or not."""
        return [p for ref in self._departed.values() if (p := ref()) is not None]

    def master_of(self, param: nn.Parameter) -> Master | None:
        """The master of a parameter, or None."""
        return self._by_param.get(id(param))

    def _is_scanned(self, groups: list[dict[str, Any]]) -> bool:
        if len(groups) != len(self._scanned):
            return False
        for group, was in zip(groups, self._scanned, strict=True):  # no generator: asked five times an iteration
            if not tensor_lists.same_objects(group["params"], was):
                return False
        plain = self._columns.plain if self.makes_masters else None
        return not plain or not any(is_low_precision(p) and p.requires_grad for p in plain)

    def _replace(self, groups: list[dict[str, Any]], exact: Mapping[int, Tensor]) -> None:
        """Put masters in the place of low-precision parameters."""
        unmastered = {id(p): p for group in groups for p in group["params"] if is_low_precision(p) and p.requires_grad}
        entries = {id(p) for group in groups for p in group["params"]} if unmastered else set()
        for p in unmastered.values():
            if id(p) in self._by_param and id(self._by_param[id(p)].weight) in entries:
                raise AmpStateError(
                    f"A {str(p.dtype).removeprefix('torch.')} parameter of shape {tuple(p.shape)} was added to "
                    f"{type(self._live_optimizer()).__name__}, which already steps its FP32 master.  Leave it out of "
                    "add_param_group()."
                )
        states = [state for state in self._states() if state]
        for group in groups if unmastered else ():
            params = group["params"]
            for i, p in enumerate(params):
                if id(p) in unmastered:
                    master = self._by_param.get(id(p)) or self._create(p, exact.get(id(p)), states)
                    params[i] = master.weight

    def refresh(self, adopt_data_writes: bool = False) -> None:
        """Refresh every master whose parameter moved without us.

        The first time with `adopt_data_writes` in any case: apex made masters only at the first backward, so scripts
        initialize weights, or broadcast them, through `param.data` until then.

        Args:
            adopt_data_writes: compare values as well, but those of masters that somebody wrote meanwhile.
        """
        is_first, self._is_fresh = self._is_fresh, False
        if is_first:
            _FRESH.discard(self)
            for master in self.masters:
                if master.was_written():
                    master.is_doubted = False  # a script's own values, as it saved masters of an earlier run
                elif master.in_sync() and not master.is_doubted:
                    master.adopt()
                    master.mark_in_sync()
        if is_first or not tensor_lists.have_stamps(self._low, self._shared.params):
            for master in self.masters:
                self.was_rounded |= master.refresh() and not is_first
        if adopt_data_writes and not is_first:
            for master in self.masters:
                if not master.was_written():
                    master.adopt()
                    master.mark_weight()

    def follow(self) -> None:
        """Before a step: what somebody wrote into one of the two goes into the other; into the master, if into both.

        A step whose gradients leave a master out, or that is skipped, writes nothing of it into the model.
        """
        self.round_written()
        self.refresh(self._adopt_data_writes)

    def written(self) -> list[Master]:
        """Masters that somebody wrote outside of a step, where nobody wrote the parameter."""
        if tensor_lists.have_stamps(self._high, self._shared.weights):
            return []
        return [master for master in self.masters if master.was_written() and master.in_sync()]

    def round_written(self) -> None:
        """Round those into their parameters."""
        if written := self.written():
            write_back_all(written)
            for master in written:
                master.mark_in_sync()

    def write_back(self) -> None:
        """Round every master into its parameter. Moves the parameters' versions, as any optimizer does."""
        if self.masters:
            write_back_all(self.masters)
            self.mark_in_sync()

    def mark_in_sync(self) -> None:
        """Declare that masters and parameters agree."""
        self._shared.params = tensor_lists.stamps(self._low)
        self._shared.weights = tensor_lists.stamps(self._high)

    # Gradients.

    @property
    def slots(self) -> Slots:
        """What the last backward left for the next step; empty before it, and after a step. Assigned, the last go."""
        return self._shared.slots

    @slots.setter
    def slots(self, slots: Slots) -> None:
        if self._shared.slots.count > 0:
            self._shared.slots.discard()
        self._shared.slots = slots

    @property
    def left(self) -> Left:
        """Which masters had a gradient before a step."""
        return self._shared.left

    def step_rows(self) -> StepRows:
        """What the next step has to do, as of the last scan."""
        rows = self._step_rows()
        zero_rows = [row for row in self.left.zero_rows() if rows.slots[row] == Slot.EMPTY]
        if not zero_rows:
            return rows
        weights, sizes = rows.weights, dict[torch.device, int]()
        for row in zero_rows:
            sizes[weights[row].device] = max(sizes.get(weights[row].device, 0), weights[row].numel())
        zeros = {
            device: torch.zeros(size, device=device) for device, size in sizes.items()
        }  # which the step reads only
        gradients, states = list(rows.gradients), bytearray(rows.slots)
        for row in zero_rows:
            w, states[row] = weights[row], Slot.OWN
            gradients[row] = zeros[w.device].as_strided(w.shape, w.stride())
        return rows._replace(gradients=gradients, slots=bytes(states))

    def _step_rows(self) -> StepRows:
        columns, slots = self.columns, self.slots
        written = tensor_lists.any_gradient(self._high)
        if written:
            for master in self.masters:
                if master.gradient() is not None:
                    master.materialize()  # autograd wrote into the master itself, beside what is held
        if slots.count > 0 and slots.is_whole and not written and not columns.plain:
            return StepRows(columns.weights, slots.gradients, bytes(slots.states), columns.copies)
        held = bytes(slots.states) if slots.count > 0 else bytes(len(columns.weights))
        own: Sequence[Tensor | None]
        if columns.asks:
            own = [None if k else w.grad for k, w in zip(held, columns.weights, strict=True)]
            states = bytes(Slot.EMPTY if grad is None else Slot.FOREIGN for grad in own)  # nobody looked at it
        else:
            own, accesses, _ = tensor_lists.gradients(columns.weight_handle)
            states = accesses.translate(OWN_SLOTS)
        if slots.count > 0:
            own = tensor_lists.either(held, slots.gradients, own)
            states = bytes(map(or_, held, states))  # a row that is HELD has no gradient of its own by now
        return StepRows(columns.weights, own, states, columns.copies)

    def whole_check(self) -> WholeCheck | None:
        """What the last check found, if every gradient still is what it saw, and nothing else has one."""
        check = self.slots.check
        if check is None or not (
            self.slots.is_whole
            and tensor_lists.same_objects(self.columns.weights, check.weights)
            and not tensor_lists.any_gradient(self._high)
            and (check.unscaled is None or check.unscaled.is_untouched())
        ):
            return None
        return check

    def has_parameter_gradients(self) -> bool:
        """Whether a parameter that has a master has a gradient."""
        return tensor_lists.any_gradient(self._low)

    def has_master_gradients(self) -> bool:
        """True if a master has a float32 gradient by now."""
        return tensor_lists.any_gradient(self._high)

    def gradient_marks(self) -> GradientMarks:
        """Of the gradients that parameters with masters have."""
        return GradientMarks(self.scans, tensor_lists.gradient_stamps(self._low))

    def gradients_written_since(self, before: GradientMarks) -> bool:
        """Whether one of them was written or replaced since `gradient_marks()`; not if it was discarded.

        A write through `.data` moves no version, but the gradient to memory of its own: the old one is what is held.
        """
        if before.scans != self.scans or tensor_lists.have_gradient_stamps(self._low, before.stamps):
            return False  # of other rows; or not at all
        moved = tensor_lists.moved_since([master.param for master in self.masters], before.stamps)
        is_written = any(was_there and self.masters[row].param.grad is not None for row, was_there in moved)
        # Gradients of a parameter that has several masters come and go with the windows of each.
        return is_written and all(len(list(masters_of(master.param))) == 1 for master in self.masters)

    def totals(self) -> dict[int, Tensor]:
        """The float32 gradients that masters have by now, by row, for the kernels to add to."""
        if not tensor_lists.any_gradient(self._high):
            return {}
        found = ((row, m.total()) for row, m in enumerate(self._columns.masters) if m is not None)
        return {row: total for row, total in found if total is not None}

    def materialize(self, zeros: bool = False) -> None:
        """Make every held gradient a float32 gradient: 4 bytes an element; with `zeros` also where one of 0 is left."""
        if self.slots.count > 0:
            for master in self.masters:
                master.materialize_held()
        self.slots = NO_SLOTS
        for row in self.left.zero_rows() if zeros else ():
            if (zeroed := self._columns.masters[row]) is not None:
                zeroed.materialize()

    def discard_parameter_gradients(self) -> None:
        """Discard the gradients of parameters that have a master."""
        tensor_lists.discard_gradients(self._low)

    def spend_gradients(self, keeps_masters: bool = False) -> None:
        """Discard gradients as after every step, of masters unless they are kept, and notice who zeroes them then."""
        if self.masters:
            self.left.spend(self._has_gradients())
        if keeps_masters:
            self.discard_parameter_gradients()
            kept = [m.weight for m in self.masters if m.gradient() is not None]
            self.left.watch(seen(min(kept, key=Tensor.numel)) if kept else None)
        else:
            self.discard_gradients()
            self.show_left()

    def _has_gradients(self) -> bytes:
        """Of each row not 0 where there is one, held or its own."""
        columns, slots = self.columns, self.slots
        held = bytes(slots.states) if slots.count > 0 else bytes(len(columns.weights))
        if not tensor_lists.any_gradient(self._high):
            return held
        return bytes(map(or_, held, tensor_lists.gradients(columns.weight_handle)[1]))

    def show_left(self) -> None:
        """Have the smallest master and parameter whose gradients a step discarded show one of 0."""
        if self.masters and not devices.is_capturing(self.masters[0].weight.device):
            self.left.show(self._smallest_left)

    def _smallest_left(self) -> list[nn.Parameter]:
        left = [m for m in self.masters if m.row is not None and self.left.states[m.row]]
        weights = [m.weight for m in left]
        params = [m.param for m in left if len(list(masters_of(m.param))) == 1]
        return [min(those, key=Tensor.numel) for those in (weights, params) if those]

    def discard_gradients(self) -> None:
        """Discard the gradients of masters and of their parameters."""
        self.discard_master_gradients()
        self.discard_parameter_gradients()

    def discard_master_gradients(self) -> None:
        """Discard the gradients of masters, and leave those of their parameters."""
        tensor_lists.discard_gradients(self._high)
        self.slots = NO_SLOTS

    def find(self, weight: Tensor) -> Master | None:
        """The master whose weight, in the groups, is this very object."""
        return self._by_weight.get(id(weight))

    def release(self) -> None:
        """Put the parameters back into the groups, in float32 with their masters' values and state."""
        discard_maker(self)
        optimizer = self._optimizer()
        if optimizer is None or not self.makes_masters:
            return
        self.left.hear()
        with suppress(AmpStateError):  # a parameter that is there beside its master keeps what it has
            self.scan()
        if self.left.is_zeroed_in_place:
            self.left.zero_all()
        self.refresh(adopt_data_writes=True)
        for group in optimizer.param_groups:
            for i, p in enumerate(group["params"]):
                master = self.find(p)
                if master is None:
                    continue
                group["params"][i] = master.param
                for state in self._states():
                    if p in state:
                        state[master.param] = state.pop(p)
                grad = p.grad
                master.param.grad = None
                master.param.data = p.detach()
                master.param.grad = grad
                discard_exact(master)
        self._by_weight, self._by_param, self.masters = {}, {}, []
        self._low = self._high = tensor_lists.params([])
        self._scanned = []
        self._columns, self._shared = NO_COLUMNS, Shared(tensor_lists.stamps([]), tensor_lists.stamps([]))

    def _create(self, param: nn.Parameter, exact_f32: Tensor | None, states: Sequence[dict[Any, Any]]) -> Master:
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

    def _live_optimizer(self) -> Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None, "called from a hook of the optimizer or with it in hand"
        return optimizer


def is_zero(grad: Tensor | None) -> bool:
    """True if there is a gradient and each of its elements is zero. Waits for it."""
    return grad is not None and not bool(arithmetic.values(grad).any())
