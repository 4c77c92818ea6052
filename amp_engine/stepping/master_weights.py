"""FP32 masters of an optimizer's low-precision parameters: create, refresh, write back, give up.

A master replaces its parameter in `optimizer.param_groups` and takes over its optimizer state, so state never
passes through half.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_engine import kernels
from amp_engine.dtypes import is_low_precision
from amp_engine.errors import AmpStateError, AmpValueError
from amp_engine.kernels import walk
from amp_engine.stepping.lazy_gradients import Kept
from amp_engine.stepping.master import Master, Shared, exact_value_of, forget_master, laid_out_as, masters_of
from amp_engine.stepping.roster import NO_ROSTER, have_same, make_roster

# Those that have seen no backward yet.
_FRESH: weakref.WeakSet[MasterWeights] = weakref.WeakSet()


def announce_broadcast(numel: int) -> None:
    """A tensor of `numel` elements, no parameter, was broadcast.

    Before the first backward that may be the model's own weights, to be copied into `param.data`. On the rank that
    they came from nothing changes by that, and elsewhere no version: so all ranks have masters take the rounded
    values of parameters, as apex did, if all of a parameter may have been in it.
    """
    for masters in list(_FRESH):
        if numel >= masters.largest:
            for master in masters.in_groups:
                master.is_doubted = True


class MasterWeights:
    """The masters of one optimizer.

    Args:
        optimizer: its groups are edited in place: each low-precision parameter that requires a gradient is
            replaced by its master.
        exact: id of a parameter -> its float32 value from before the model was cast.
        adopt_data_writes: whether writes through `param.data` are looked for before each step, not before the first
            backward only.
    """

    def __init__(self, optimizer: Optimizer, exact: Mapping[int, Tensor], adopt_data_writes: bool = False) -> None:
        self._optimizer = weakref.ref(optimizer)
        # Whether the optimizer switches its parameters between training and evaluation (schedulefree and kin).
        self.written_outside = callable(getattr(optimizer, "train", None)) and callable(
            getattr(optimizer, "eval", None)
        )
        self._wrappers: list[weakref.ref[Optimizer]] = []
        self._by_weight: dict[int, Master] = {}  # by id of the master weight
        self._by_param: dict[int, Master] = {}  # by id of the parameter
        self.in_groups: list[Master] = []
        # The parameters and weights of `in_groups`.
        self.params = self.weights = walk.params([])
        self.roster = NO_ROSTER
        self._scanned: list[tuple[nn.Parameter, ...]] = []  # the groups' parameters, as of the last scan
        self._shared = Shared(walk.stamps([]), walk.stamps([]))
        self._adopt_data_writes = adopt_data_writes
        self._is_fresh = True  # until masters are refreshed for the first time
        _FRESH.add(self)
        self.scan(exact)

    @property
    def largest(self) -> int:
        """Elements of the largest master."""
        return max((master.weight.numel() for master in self.in_groups), default=0)

    def wrapped_by(self, wrapper: Optimizer) -> None:
        """Expect `wrapper`, which shares the groups, to write masters after their step; give it its state by master."""
        self.written_outside = True
        self._wrappers.append(weakref.ref(wrapper))
        for master in self.in_groups:
            self._take_state(master)

    def _take_state(self, master: Master) -> None:
        """Have what is kept by parameter kept by master."""
        for state in self._states():
            if state and master.param in state:
                state[master.weight] = _widened(state.pop(master.param))

    def _states(self) -> Iterator[dict[Any, Any]]:
        """What is kept by parameter: the optimizer's state, and that of wrappers that have one of their own."""
        own = self._live_optimizer().state
        yield own
        for ref in self._wrappers:
            state = getattr(ref(), "state", None)
            if isinstance(state, dict) and state is not own:
                yield state

    def scan(self, exact: Mapping[int, Tensor] | None = None) -> None:
        """Bring the masters in line with the groups as they are now.

        New groups, unfrozen parameters and replaced entries get masters; entries that left the groups lose
        theirs. Raises AmpStateError, before anything is changed, for a parameter whose master is there too.
        """
        groups = self._live_optimizer().param_groups
        if self._is_scanned(groups):
            return
        entries = {id(p) for group in groups for p in group["params"]}
        unmastered = [p for group in groups for p in group["params"] if is_low_precision(p) and p.requires_grad]
        for p in unmastered:
            if id(p) in self._by_param and id(self._by_param[id(p)].weight) in entries:
                raise AmpStateError(
                    f"A {str(p.dtype).removeprefix('torch.')} parameter of shape {tuple(p.shape)} was added to "
                    f"{type(self._live_optimizer()).__name__}, which already steps its FP32 master.  Leave it out of "
                    "add_param_group()."
                )
        if unmastered:
            self._replace(groups, {id(p): p for p in unmastered}, exact or {})
        are_new = not self.in_groups
        found = (self.find(p) for group in groups for p in group["params"])
        self.in_groups = [master for master in found if master is not None]
        if len(self.in_groups) < len(self._by_weight):
            self._by_weight = {id(m.weight): m for m in self.in_groups}
            self._by_param = {id(m.param): m for m in self.in_groups}
        self.params = walk.params([m.param for m in self.in_groups])
        self.weights = walk.params([m.weight for m in self.in_groups])
        self._scanned = [tuple(group["params"]) for group in groups]
        self.roster = make_roster(groups, self.find)
        kept = self.kept
        if kept is not None:
            kept = kept.rearranged([None if m is None else m.row for m in self.roster.masters])
        if are_new:
            self._shared = Shared(walk.stamps(self.params), walk.stamps(self.weights), kept)
        else:
            marks = [master.marked_as() for master in self.in_groups]
            self._shared = Shared(walk.joined(p for p, _ in marks), walk.joined(w for _, w in marks), kept)
        rows = [row for row, master in enumerate(self.roster.masters) if master is not None]
        for place, (master, row) in enumerate(zip(self.in_groups, rows, strict=True)):
            master.share(self._shared, place, row)

    def _is_scanned(self, groups: list[dict[str, Any]]) -> bool:
        return have_same(groups, self._scanned) and not any(
            is_low_precision(p) and p.requires_grad for p in self.roster.plain
        )

    def _replace(
        self, groups: list[dict[str, Any]], unmastered: Mapping[int, nn.Parameter], exact: Mapping[int, Tensor]
    ) -> None:
        for group in groups:
            params = group["params"]
            for i, p in enumerate(params):
                if id(p) in unmastered:
                    master = self._by_param.get(id(p)) or self._create(p, exact.get(id(p)))
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
            for master in self.in_groups:
                master.compares = self._adopt_data_writes
                if master.was_written():
                    master.is_doubted = False  # a script's own values, as it saved masters of an earlier run
                elif master.in_sync() and not master.is_doubted:
                    master.adopt()
                    master.mark_in_sync()
        if is_first or not walk.have_stamps(self.params, self._shared.params):
            for master in self.in_groups:
                master.refresh()
        if adopt_data_writes and not is_first:
            for master in self.in_groups:
                if not master.was_written():
                    master.adopt()
                    master.mark_weight()

    def follow(self) -> None:
        """Before a step: what somebody wrote into one of the two goes into the other; into the master, if into both.

        A step whose gradients leave a master out, or that is skipped, writes nothing of it into the model.
        """
        if not walk.have_stamps(self.weights, self._shared.weights):
            written = [master for master in self.in_groups if master.was_written() and master.in_sync()]
            _write_back(written)
            for master in written:
                master.mark_in_sync()
        self.refresh(self._adopt_data_writes)

    def write_back(self) -> None:
        """Round every master into its parameter. Moves the parameters' versions, as any optimizer does."""
        _write_back(self.in_groups)
        self.mark_in_sync()

    def mark_in_sync(self) -> None:
        """Declare that masters and parameters agree."""
        self._shared.params = walk.stamps(self.params)
        self._shared.weights = walk.stamps(self.weights)

    @property
    def kept(self) -> Kept | None:
        """Gradients that are kept in low precision, row by row of the roster; None if there are none."""
        kept = self._shared.kept
        return None if kept is None or kept.count == 0 else kept

    def keep(self, kept: Kept) -> None:
        """Have `kept`, in the rows of the roster, stand for gradients of masters, which have none."""
        self._shared.kept = kept

    def drop_kept(self) -> None:
        """Drop the gradients that are kept."""
        if self._shared.kept is not None:
            self._shared.kept.drop()
            self._shared.kept = None

    def materialize(self) -> None:
        """Make every kept gradient a float32 gradient: 4 bytes an element."""
        if self.kept is not None:
            for master in self.in_groups:
                master.materialize()
            self.drop_kept()

    def drop_gradients(self) -> None:
        """Drop the gradients of masters and their parameters, as after every step."""
        self.drop_own_gradients()
        walk.drop_gradients(self.params)

    def drop_own_gradients(self) -> None:
        """Drop the gradients of masters, and leave those of their parameters."""
        walk.drop_gradients(self.weights)
        self.drop_kept()

    def find(self, weight: Tensor) -> Master | None:
        """The master whose weight, in the groups, is this very object."""
        return self._by_weight.get(id(weight))

    def release(self) -> None:
        """Put the parameters back into the groups, in float32 with their masters' values and state."""
        optimizer = self._optimizer()
        if optimizer is None:
            return
        with suppress(AmpStateError):  # a parameter that is there beside its master keeps what it has
            self.scan()
        self.refresh(self._adopt_data_writes)
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
                forget_master(master)
        self._by_weight, self._by_param, self.in_groups = {}, {}, []
        self.params = self.weights = walk.params([])
        self._scanned = []
        self.roster, self._shared = NO_ROSTER, Shared(walk.stamps([]), walk.stamps([]))

    def _create(self, param: nn.Parameter, exact_f32: Tensor | None) -> Master:
        others = list(masters_of(param))
        if exact_f32 is None:
            exact_f32 = exact_value_of(others)
            value_f32 = (param if exact_f32 is None else exact_f32).detach().to(torch.float32, copy=True)
        else:
            value_f32 = exact_f32.to(torch.float32, copy=bool(others))  # another optimizer's master has this memory
        master = Master(param, laid_out_as(param, walk.written_out(value_f32)), others)
        self._by_weight[id(master.weight)] = master
        self._by_param[id(param)] = master
        self._take_state(master)
        master.compares = self._is_fresh or self._adopt_data_writes
        return master

    def _live_optimizer(self) -> Optimizer:
        optimizer = self._optimizer()
        assert optimizer is not None, "called from a hook of the optimizer or with it in hand"
        return optimizer


@torch.no_grad()
def _write_back(masters: Sequence[Master]) -> None:
    try:
        kernels.cast_copy_([m.param for m in masters], [m.weight for m in masters])
    except AmpValueError:  # gaps in memory, another order there, several devices: nothing was written
        for master in masters:
            master.param.copy_(master.weight)


def _widened(state: Any) -> Any:
    """Optimizer state in float32 where it was low precision; widening is exact."""
    if isinstance(state, Tensor):
        return state.float() if is_low_precision(state) else state
    if isinstance(state, dict):
        return {key: _widened(value) for key, value in state.items()}
    return state
