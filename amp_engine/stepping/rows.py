"""The rows of one optimizer: the model's parameters in its groups, and what lies beside each."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_engine.errors import AmpStateError, AmpValueError
from amp_engine.ground import devices
from amp_engine.ground.distributed import has_other_ranks, is_sharded
from amp_engine.ground.dtypes import is_low_precision
from amp_engine.kernels import tensor_lists
from amp_engine.stepping import exact_state
from amp_engine.stepping.beside import (
    Adoption,
    Beside,
    HostMaster,
    Master,
    Pairs,
    Remainder,
    Remainder24,
    round_all,
)
from amp_engine.stepping.exact import Exact, discard_exact, exact_of, exact_value
from amp_engine.stepping.half_weights import HalfWeights

# The key of the first group that counts how often masters of 24 bits were rounded after a step of the class's own.
ROUNDINGS = "amp_roundings"

_SAMPLE = 4096  # elements that are looked at for writes which move no version

# Rows that keep FP32 values of parameters, until they are released.
_KEEPING: weakref.WeakSet[Rows] = weakref.WeakSet()


def round_written(module: nn.Module, args: Any) -> None:
    """Forward pre-hook: round masters that were written outside of a step (SAM, an average) into their models.

    It does so for all models, which is cheaper than to find the masters of one. Does nothing in a compiled graph.
    """
    if not torch.compiler.is_compiling():
        for rows in list(_KEEPING):
            rows.settle()
            rows.round_written()


def make_for_joined() -> None:
    """Scan all rows for parameters that joined since the last backward. The next backward reports refused ones."""
    for rows in list(_KEEPING):
        with suppress(AmpStateError):
            rows.scan()


# A row has no object of its own: at 10,000 parameters, to make them would cost more than the step.
class Columns(NamedTuple):
    """One row for each entry of the groups.

    Attributes:
        params: n; the entries: the model's own parameters.
        beside: n; what keeps the float32 value of each, or None.
        weights: n; the tensor that a step updates: the master, or the parameter.
        copies: n; what the kernels write beside the weights: parameters of masters, or their values on the host,
            remainders, or None; None: nothing.
        plain_mask: n; 1 in rows without a master, else 0.
        has_plain: True if there are such rows.
        has_shards: True if some parameters are DTensors.
        handle: `params` in the form that is fastest to read.
    """

    params: tuple[nn.Parameter, ...]
    beside: tuple[Beside | None, ...]
    weights: tuple[nn.Parameter, ...]
    copies: tuple[Tensor | None, ...] | None
    plain_mask: bytes
    has_plain: bool
    has_shards: bool
    handle: Sequence[Tensor]


def _columns_of(params: tuple[nn.Parameter, ...], known: Mapping[int, Beside]) -> Columns:
    beside = tuple(known.get(id(p)) for p in params)
    weights = tuple(p if b is None else b.stepped for p, b in zip(params, beside, strict=True))
    copies = tuple(None if b is None else b.copy for b in beside)
    plain_mask = bytes(not isinstance(b, Master) for b in beside)
    return Columns(
        params,
        beside,
        weights,
        copies if known else None,
        plain_mask,
        1 in plain_mask,
        any(map(is_sharded, params)),
        tensor_lists.params(params),
    )


class Rows:
    """The rows of one optimizer.

    Args:
        optimizer: its groups and its state have the model's parameters, and keep them.
        kind: what low-precision parameters get; None if they get nothing.
        exact: id of a parameter -> its float32 value from before the model was cast; used until `keep`.
        halves: judges low-precision parameters that get nothing; None if they are allowed.
        keep_with_models: called where parameters joined or left the groups, with what lies beside those that left. It
            keeps that with the models that have these parameters, and forgets the rest. None: nobody does.

    Attributes:
        columns: as of the last scan.
        scans: count of scans that found something new.
        joined: parameters that joined since then with a gradient; whoever handles them empties the list.
        is_shown: True while the groups and the state have masters in the place of their parameters.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        kind: type[Master] | type[Remainder] | type[HostMaster] | None = None,
        exact: Mapping[int, Tensor] | None = None,
        halves: HalfWeights | None = None,
        keep_with_models: Callable[[Sequence[Beside]], None] | None = None,
    ) -> None:
        self.kind = kind
        self.joined: list[nn.Parameter] = []
        self.scans = 0
        self.is_shown = False
        self._optimizer = weakref.ref(optimizer)
        self._exact: Mapping[int, Tensor] = exact or {}
        self._halves = halves
        self._keep_with_models = keep_with_models
        self._known: dict[int, Beside] = {}  # by id of the parameter
        self._taken_over: set[int] = set()  # ids of parameters that had a value beside them before
        self._frozen: list[nn.Parameter] = []  # low-precision parameters that need a master when they are trained
        self._scanned: list[tuple[nn.Parameter, ...]] = []
        self._has_followed = False
        self._adoption: tuple[Columns, Adoption] | None = None
        self._wide: list[Remainder] = []  # those that are shown
        # 1 if other code wrote other values into low-precision parameters, from one `follow` that saw it to the next.
        self._writes: deque[devices.HostNumbers] = deque()
        self._looks = 256  # how often these are still looked for
        self._samples = 64  # how many parameters are still looked at for writes that move no version
        # Ends a step of the class's own that raised, after which torch calls no hook; None unless one runs or raised.
        self.end_own_step: Callable[[], None] | None = None
        self.pairs = Pairs([], [])
        self.columns = _columns_of((), {})

    @property
    def makes_masters(self) -> bool:
        """True if low-precision parameters have masters on their device."""
        return self.kind is Master

    @property
    def can_show(self) -> bool:
        """True if low-precision parameters have masters, wherever they are."""
        return self.makes_masters or self.kind is HostMaster

    @property
    def splits(self) -> bool:
        """True if low-precision parameters have remainders."""
        return self.kind is not None and issubclass(self.kind, Remainder)

    @property
    def masters(self) -> list[Master]:
        """The masters, in the order of the groups."""
        return [one for one in self._known.values() if isinstance(one, Master)]

    def keep(self) -> None:
        """Keep FP32 values, until `release`. From now on forwards and checkpoints reach these rows."""
        self.scan()
        self._exact = {}
        _KEEPING.add(self)

    def scan(self) -> None:
        """Update the rows to the present groups, if the optimizer is alive. Does nothing while masters are shown.

        Raises AmpStateError, before anything is changed, for a parameter that cannot have what it must get.
        """
        optimizer = self._optimizer()
        if optimizer is None or self.is_shown:
            return
        now = [group["params"] for group in optimizer.param_groups]
        is_same = len(now) == len(self._scanned) and all(map(tensor_lists.same_objects, now, self._scanned))
        if is_same and not self._has_other_needs():
            return
        params = tuple(p for group in now for p in group)
        known, frozen = self._beside_each(optimizer, params)
        gone = [one for key, one in self._known.items() if key not in known]
        new = [one for key, one in known.items() if key not in self._known]
        self._known, self._frozen, earlier = known, frozen, self.columns
        self._scanned = [tuple(group) for group in now]
        self.columns = _columns_of(params, known)
        self.scans += 1
        both = list(known.values())
        if self.splits:  # a remainder is dropped where a version moved
            tensor_lists.count_apart([one.param for one in both])
        pairs = Pairs([one.param for one in both], [one.weight for one in both if isinstance(one, Master)])
        for place, one in enumerate(both):
            one.enter(pairs, place)
        self.pairs = pairs
        self._allow_float32_gradients(both, optimizer.state)
        for one in new:
            one.owner = self._optimizer
        for one in gone:
            one.owner = None
            if self._keep_with_models is None:
                one.forget()
        if self._keep_with_models is not None and (new or gone):
            self._keep_with_models(gone)
        if self.scans > 1 and tensor_lists.any_gradient(self.columns.handle):
            before = set(map(id, earlier.params))
            self.joined += [p for p in params if id(p) not in before and p.grad is not None]
        self.look_at_types()

    def _has_other_needs(self) -> bool:
        """True if a frozen low-precision parameter is trained now."""
        for p in self._frozen:  # noqa: SIM110 - a generator is slower
            if p.requires_grad and is_low_precision(p):
                return True
        return False

    def _beside_each(
        self, optimizer: Optimizer, params: Sequence[nn.Parameter]
    ) -> tuple[dict[int, Beside], list[nn.Parameter]]:
        """Return what lies beside each parameter, by its id, and frozen parameters that would get something."""
        known: dict[int, Beside] = {}
        frozen: list[nn.Parameter] = []
        new: list[nn.Parameter] = []
        for p in params if self.kind is not None else ():
            if (one := self._known.get(id(p))) is not None:
                known[id(p)] = one
            elif not is_low_precision(p) or is_sharded(p):
                continue
            elif not p.requires_grad and not self.splits:
                frozen.append(p)
            elif id(p) not in known:
                if any(isinstance(one, Beside) and one.is_owned() for one in exact_of(p)):
                    raise AmpStateError(
                        f"A {p.dtype} parameter of shape {tuple(p.shape)} is stepped by two optimizers, the second is "
                        f"this {type(optimizer).__name__}: each would keep FP32 weights of its own.  Give the "
                        "parameter to one of them, or choose opt_level='O4'."
                    )
                known[id(p)] = None  # type: ignore[assignment]  # keeps its place in the order
                new.append(p)
        earlier = [next(exact_of(p), None) for p in new]
        for p, one_before in zip(new, earlier, strict=True):
            known[id(p)] = self._beside(p, one_before)
        for p, one_before in zip(new, earlier, strict=True):
            if one_before is not None:
                known[id(p)].is_loaded = True
                self._taken_over.add(id(p))
                if known[id(p)] is not one_before:
                    discard_exact(one_before)
        return known, frozen

    def _beside(self, param: nn.Parameter, earlier: Exact | None) -> Beside:
        """Return what lies beside a new parameter: what an earlier optimizer left, if it is of this kind."""
        assert self.kind is not None
        if earlier is None:
            return self.kind(param, self._exact.get(id(param)))
        return earlier if type(earlier) is self.kind else self.kind(param, exact_value(param))

    def _allow_float32_gradients(self, both: Sequence[Beside], state: dict[Any, Any]) -> None:
        """Let FP32 gradients into parameters of masters, and widen state from before."""
        for one in both:
            param = one.param
            if param.grad_dtype is not None:
                one.chosen_grad_dtype = None if param.grad_dtype == param.dtype else param.grad_dtype
                param.grad_dtype = param.grad_dtype if isinstance(one, Remainder) else None
            if one.param in state and self.scans == 1:
                state[one.param] = _widened(state[one.param])

    def look_at_types(self) -> None:
        """Note which parameters are low-precision, if that matters. Loops over all of them."""
        if self._halves is not None:
            self._halves.look_at(self.columns.params)

    def judge_half(self) -> None:
        """Raise AmpStateError if a level of FP32 weights would step a low-precision one. Call after a scan."""
        if self._halves is not None:
            optimizer = self._optimizer()
            assert optimizer is not None, "called with the optimizer in hand"
            self._halves.judge(optimizer)

    # Writes by other code.

    def follow(self, rounds: bool) -> None:
        """Have values beside take what other code wrote into parameters, then round written masters into the model.

        Writes that move no version are found by the step, which compares values. A parameter that was written by one
        rank alone must not leave the masters of ranks apart. With several ranks all masters therefore take their
        parameters before the first step, unless a checkpoint gave their values, and later whole where a version moved.
        With one rank they take the elements that differ.

        Args:
            rounds: False between a forward and its backward, where no parameter may be written.
        """
        if self.is_shown or not self._known:
            return
        is_first, self._has_followed = not self._has_followed, True
        have_moved = self.pairs.params.have_moved()
        is_whole = (is_first or have_moved) and has_other_ranks()
        if have_moved:
            moved = [one for place, one in enumerate(self._known.values()) if self.pairs.params.has_moved(place)]
            for one in moved if rounds else ():
                one.check_type()
            if moved and not is_first:
                self._look_at_writes(moved)
            for one in moved:
                one.follow(is_whole)
        elif rounds and not is_first and self._samples > 0 and self.makes_masters:
            self._samples -= 1
            master = self.columns.beside[self._samples % len(self.columns.beside)]
            if isinstance(master, Master) and not master.was_written():
                self._look_at_writes([master], _SAMPLE)
        if is_first and is_whole:
            for one in self._known.values():
                if not (one.is_loaded or one.was_written()):
                    one.follow(True)
        if rounds:
            self.round_written()

    @torch.no_grad()
    def _look_at_writes(self, moved: Sequence[Beside], count: int | None = None) -> None:
        device = moved[0].param.device
        if self._looks == 0 or device.type == "meta" or devices.is_capturing(device):
            return
        self._looks -= 1
        if count is None and len(moved) > len(self._known) // 2:  # a decay by hand, of which rounding may leave nothing
            self._writes.append(devices.HostNumbers(torch.ones(1, dtype=torch.float32)))
            return
        differ = [one.differs(count) for one in moved if one.param.device == device]
        self._writes.append(devices.HostNumbers(torch.stack(differ).any().float().reshape(1)))

    def was_written(self) -> bool:
        """True if other code wrote other values into parameters, as far as the host knows since the last call."""
        is_written = False
        while self._writes and self._writes[0].is_known():
            is_written |= self._writes.popleft().read() > 0
        return is_written

    def look_at_no_writes(self) -> None:
        """Have `was_written` return False from now on."""
        self._looks = 0
        self._writes.clear()

    def round_written(self) -> None:
        """Round masters that were written outside of a step into their parameters."""
        if self.is_shown or not self.makes_masters:
            return
        if self.pairs.weights.have_moved():
            written = [one for one in self.masters if one.was_written() and one.in_sync()]
            if written:
                round_all(written)
                for one in written:
                    one.mark()

    def adopt(self) -> None:
        """Have masters take the elements of their parameters that other code wrote, which a comparison finds."""
        masters, known = self.masters, self._adoption
        if not masters:
            return
        try:
            if known is None or known[0] is not self.columns or not known[1].is_current():
                known = self._adoption = self.columns, Adoption(masters)
            known[1].run()
        except AmpValueError:  # gaps in memory, another order there, several devices, no kernels: nothing was written
            for one in masters:
                one.follow(is_whole=False)
        self.pairs.mark()

    def round_shown(self) -> None:
        """Round masters that are shown into their parameters, but for parameters that other code has written."""
        if not self.is_shown:
            return
        unwritten = [one for place, one in enumerate(self._known.values()) if not self.pairs.params.has_moved(place)]
        for one in unwritten:
            if isinstance(one, HostMaster):
                one.write_back()
        if masters := [one for one in unwritten if isinstance(one, Master)]:
            round_all(masters)
        for one in unwritten:
            one.mark()

    def write_back(self) -> None:
        """Round every master into its parameter. Moves the versions of the parameters, like any optimizer."""
        for one in self._known.values():
            if isinstance(one, HostMaster):
                one.write_back()
        if masters := self.masters:
            round_all(masters)
        self.pairs.mark()

    # Masters in the place of parameters.

    def shown_weights(self) -> Sequence[nn.Parameter]:
        """The masters that code of the device can clip and write, else the parameters: n."""
        pairs = zip(self.columns.params, self.columns.beside, strict=True)
        return [one.stepped if isinstance(one, Master) else param for param, one in pairs]

    @property
    def entries(self) -> Sequence[nn.Parameter]:
        """The tensors in the groups, by which the state is kept: parameters, or masters that are shown; n."""
        pairs = zip(self.columns.params, self.columns.beside, strict=True) if self.is_shown else ()
        shown = [param if one is None or isinstance(one, Remainder) else one.stepped for param, one in pairs]
        return shown or self.columns.params

    def settle(self) -> None:
        """Put back what a step of the class's own has left that raised."""
        if self.end_own_step is not None:
            self.end_own_step()
        if self._wide and not self.is_shown:
            self._narrow()

    def check_can_show(self) -> None:
        """Raise AmpStateError if a split master cannot be shown. Call after a scan."""
        for one in self._known.values():
            if isinstance(one, Remainder):
                one.check_can_widen()

    def show(self) -> None:
        """Put masters into the groups and the state, in the place of their parameters. Call after a scan."""
        optimizer = self._optimizer()
        if self.is_shown or optimizer is None or not self._known:
            return
        self._wide = [one for one in self._known.values() if isinstance(one, Remainder)]
        weights = {id(one.param): one.stepped for one in self._known.values() if not isinstance(one, Remainder)}
        try:
            weights.update((id(one.param), one.widen()) for one in self._wide)
        except BaseException:
            for one in self._wide:
                one.free()
            self._wide = []
            raise
        self.is_shown = True
        _rename(optimizer, weights)

    def hide(self) -> None:
        """Undo `show`, and round the masters into their parameters."""
        optimizer = self._optimizer()
        if not self.is_shown or optimizer is None:
            return
        params = {id(one.stepped): one.param for one in self._known.values()}
        params.update((id(one.weight), one.param) for one in self._wide)
        _rename(optimizer, params)
        self.is_shown = False
        self._narrow()
        self.write_back()

    def _narrow(self) -> None:
        step, narrowed = self._next_rounding(), list(self._wide)
        while self._wide:
            self._wide[-1].narrow(step)
            self._wide.pop()
        for one in narrowed:  # again: views of one tensor count their writes together where there are no kernels
            one.mark()

    def _next_rounding(self) -> int:
        """Return the number of this rounding of masters, from 1; for those of 24 bits the first group keeps it."""
        optimizer = self._optimizer()
        if self.kind is not Remainder24 or optimizer is None:
            return 1
        group = optimizer.param_groups[0]
        group[ROUNDINGS] = group.get(ROUNDINGS, 0) + 1
        return int(group[ROUNDINGS])

    @contextmanager
    def shown(self) -> Iterator[None]:
        """A context in which groups and state have masters in the place of their parameters. It may be nested."""
        if self.is_shown:
            yield
            return
        self.show()
        try:
            yield
        finally:
            self.hide()

    # The end.

    def release(self) -> list[tuple[nn.Parameter, torch.dtype | None]]:
        """Give parameters the float32 values beside them, and their gradients that type. A repeated call goes on.

        Returns:
            The parameters whose gradients may have any type, until the caller sets their `grad_dtype`, each with the
            type that the user chose for its gradient, or None.
        """
        _KEEPING.discard(self)
        self.hide()
        for group in [] if (optimizer := self._optimizer()) is None else optimizer.param_groups:
            group.pop(ROUNDINGS, None)
        with suppress(AmpStateError):  # a parameter that cannot have what it must get keeps its value
            self.scan()
        self.follow(rounds=False)
        released = []
        for one in list(self._known.values()):
            one.give_back()
            released.append((one.param, one.chosen_grad_dtype))
            del self._known[id(one.param)]
        self._empty()
        return released

    def leave(self) -> None:
        """Let another optimizer have the parameters: what lies beside them stays with the models."""
        self.hide()
        self.follow(rounds=False)
        for one in self._known.values():
            one.owner = None
        self._known = {}
        self._empty()

    def abandon(self) -> list[tuple[nn.Parameter, torch.dtype | None]]:
        """Undo `keep`: discard what it made, and leave what it took over. Returns what `release` does."""
        made = [one for key, one in self._known.items() if key not in self._taken_over]
        self.leave()
        for one in made:
            discard_exact(one)
        if self._keep_with_models is not None:
            self._keep_with_models([])
        return [(one.param, one.chosen_grad_dtype) for one in made]

    def _empty(self) -> None:
        _KEEPING.discard(self)
        self._scanned, self._frozen, self._adoption = [], [], None
        self.pairs, self.columns = Pairs([], []), _columns_of((), {})


def _rename(optimizer: Optimizer, to: Mapping[int, nn.Parameter]) -> None:
    """Replace tensors in the groups and among the keys of the state, by their ids, in place."""
    for group in optimizer.param_groups:
        params = group["params"]
        for i, p in enumerate(params):
            params[i] = to.get(id(p), p)
    state: dict[Any, Any] = optimizer.state
    if any(id(key) in to for key in state):
        items = list(state.items())
        state.clear()
        state.update((to.get(id(key), key), value) for key, value in items)


def _widened(state: dict[Any, Any]) -> dict[Any, Any]:
    """Return optimizer state with low precision cast to float32; widening is exact."""
    widened: dict[Any, Any] = exact_state.mapped(state, lambda t: t.float() if is_low_precision(t) else t)
    return widened
