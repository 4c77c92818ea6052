"""FP32 masters of an optimizer's low-precision parameters: create, refresh, write back, give up.

A master replaces its parameter in `optimizer.param_groups` and takes over its optimizer state, so state never
passes through half. Which of the two is newer is told by a stamp of the parameter, taken whenever we write it.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.weak import TensorWeakRef, WeakIdKeyDictionary

from amp_engine import kernels
from amp_engine.dtypes import followed, is_low_precision
from amp_engine.errors import AmpStateError, AmpValueError
from amp_engine.kernels import walk
from amp_engine.lazy_gradients import GRAD, Kept, MasterParameter, own
from amp_engine.torch_private import disable_dynamo

# Live parameter -> weak references to its masters. `state_dict` finds a master here by the identity of the
# parameter, so that a hook needs no engine and a deepcopy, whose parameters are others, finds none.
_MASTERS: WeakIdKeyDictionary = WeakIdKeyDictionary()

# Where the memory of parameters with masters begins and ends, in order; empty until somebody asks after one has moved.
_PLACES: list[tuple[int, int, TensorWeakRef]] = []

# Those that have seen no backward yet.
_FRESH: weakref.WeakSet[MasterWeights] = weakref.WeakSet()


class Shared:
    """What many masters have in one place.

    Attributes:
        params, weights: their stamps as they were when each two agreed.
        kept: the low-precision gradients that stand for theirs, if some do.
    """

    def __init__(self, params: walk.Stamps, weights: walk.Stamps, kept: Kept | None = None) -> None:
        self.params = walk.replaceable(params)
        self.weights = walk.replaceable(weights)
        self.kept = kept


# Of a master that no scan has seen.
_NOT_SCANNED = Shared(walk.stamps([]), walk.stamps([]))


class Master:
    """One low-precision parameter of a model and its float32 master, of equal shape and strides.

    Where the parameter has gaps in memory, the master has none.

    Args:
        param: the parameter.
        value_f32: becomes the master's memory.
        others: masters of the parameter that other optimizers have.
    """

    # A garbage collection goes through every dictionary, and making 50,000 masters sets off many.
    __slots__ = (
        "__weakref__",
        "_memory",
        "_place",
        "_shared",
        "compares",
        "incoming",
        "is_doubted",
        "param",
        "row",
        "weight",
    )

    def __init__(self, param: nn.Parameter, value_f32: Tensor, others: Sequence[Master] = ()) -> None:
        self.param = param
        self.weight = MasterParameter(value_f32, requires_grad=True)
        own(self.weight, self)
        # Optimizers read marks that users leave on parameters (`p.no_decay = True`).
        self.weight.__dict__.update(param.__dict__)
        self._shared = _NOT_SCANNED
        self._place = 0
        self.row: int | None = None  # among all that its optimizer steps, as of the last scan
        # A checkpoint's value between the hooks before and after torch copies it into `param`.
        self.incoming: Tensor | None = None
        # Whether a broadcast may have been copied into `param.data`, unseen, since the two agreed.
        self.is_doubted = False
        # Whether the parameter's values count where nobody is known to have written it.
        self.compares = False
        # Held, or what replaces it (`param.data = x`) could be given its address, by which the stamp knows it.
        self._memory = param.untyped_storage()
        _PLACES.clear()
        _MASTERS[param] = [weakref.ref(master) for master in (*others, self)]

    def gradient(self) -> Tensor | None:
        """The master's float32 gradient if it has one by now; what is kept is left alone."""
        return GRAD.__get__(self.weight)

    def total(self) -> Tensor | None:
        """The same, to be added to by the kernels."""
        grad = self.gradient()
        if grad is not None and kernels.is_lazy(grad):
            grad = grad.clone()
            GRAD.__set__(self.weight, grad)
        return grad

    def is_kept(self) -> bool:
        """Whether a low-precision gradient stands for its own."""
        return self._shared.kept is not None and self.row is not None and bool(self._shared.kept.held[self.row])

    def forget_kept(self) -> None:
        """Drop the kept gradient, if there is one."""
        if self._shared.kept is not None and self.row is not None:
            self._shared.kept.take(self.row)

    def materialize(self) -> None:
        """Make the float32 gradient from the kept one, if there is one, and add it to what autograd wrote meanwhile."""
        kept = self._shared.kept
        grad = None if kept is None or self.row is None else kept.take(self.row)
        if kept is None or grad is None:
            return
        # Whoever looks first may be in inference mode; the gradient is for those who come later, too.
        with torch.no_grad(), torch.inference_mode(False):
            unscaled, written = kept.unscaling.unscaled(grad), self.gradient()
            GRAD.__set__(self.weight, unscaled if written is None else unscaled.add_(written))

    def in_sync(self) -> bool:
        """Whether nobody but us moved the parameter since it was last stamped."""
        return walk.have_stamps([self.param], walk.stamps_of(self._shared.params, self._place))

    def was_written(self) -> bool:
        """Whether somebody but us wrote the master since the two last agreed."""
        return not walk.have_stamps([self.weight], walk.stamps_of(self._shared.weights, self._place))

    def mark_in_sync(self) -> None:
        """Declare that master and parameter agree."""
        shared = self._shared
        self.is_doubted = False
        self._memory = self.param.untyped_storage()
        _PLACES.clear()  # the parameter may have moved
        walk.put_stamps(shared.params, self._place, walk.stamps([self.param]))
        walk.put_stamps(shared.weights, self._place, walk.stamps([self.weight]))

    def mark_weight(self) -> None:
        """Declare what the master holds to be what the two agreed on."""
        walk.put_stamps(self._shared.weights, self._place, walk.stamps([self.weight]))

    def marked_as(self) -> tuple[walk.Stamps, walk.Stamps]:
        """The stamps of parameter and weight when they last agreed."""
        shared = self._shared
        if shared is _NOT_SCANNED:
            return walk.stamps([self.param]), walk.stamps([self.weight])
        return walk.stamps_of(shared.params, self._place), walk.stamps_of(shared.weights, self._place)

    def share(self, shared: Shared, place: int, row: int) -> None:
        """Keep the stamps, and the gradient, in `shared`, which has them already, from now on."""
        self._shared, self._place, self.row = shared, place, row

    @torch.no_grad()
    def refresh(self) -> None:
        """Take the parameter's value if somebody moved it. Exact if another master of it is in sync."""
        if self.in_sync() and not self.is_doubted:
            return
        value_f32 = None if self.is_doubted else exact_value(self.param)
        if value_f32 is None:
            value_f32 = self.param.detach()
        if self.weight.device == self.param.device and _is_laid_out_as(self.param, self.weight):
            self.weight.copy_(value_f32)
        else:
            self.weight.data = _laid_out_as(self.param, value_f32.to(self.param.device, torch.float32, copy=True))
        self.mark_in_sync()

    @torch.no_grad()
    def write_back_if_moved(self) -> None:
        """Round the master into the parameter if somebody wrote the master, and nobody the parameter."""
        if self.was_written() and self.in_sync():
            self.param.copy_(self.weight)
            self.mark_in_sync()

    @torch.no_grad()
    def adopt(self) -> None:
        """Take those elements of the parameter that differ from the rounded master.

        Finds writes through `.data`, which move no version. One more read of parameter and master.
        """
        self.weight.copy_(followed(self.weight, self.param))

    @torch.no_grad()
    def value(self) -> Tensor:
        """What the next step would go on from: of a master that is in sync. Its own memory, if nothing was adopted."""
        adopts = self.compares and not self.was_written()
        return followed(self.weight.detach(), self.param.detach()) if adopts else self.weight.detach()


def exact_value(param: nn.Parameter) -> Tensor | None:
    """The float32 value of the master behind `param`, or None if it has none that is up to date. Maybe not a copy."""
    return _exact_value(masters_of(param))


def _exact_value(masters: Iterable[Master]) -> Tensor | None:
    return next((master.value() for master in masters if master.in_sync()), None)


def masters_of(param: nn.Parameter) -> Iterator[Master]:
    """Every live master of `param`: one for each optimizer that owns it."""
    for ref in _MASTERS.get(param, ()):
        master = ref()
        if master is not None:
            yield master


def written_through_data(tensors: Iterable[Tensor]) -> None:
    """Have masters follow what was written into their parameters behind autograd's back, as `p.data` of `tensors`."""
    for tensor in tensors:
        torch.autograd.graph.increment_version(written_memory(tensor))


def written_memory(tensor: Tensor) -> list[Tensor]:
    """The parameters with masters that have memory where `tensor` has it, and those masters."""
    if not _PLACES:
        for param in list(_MASTERS):
            for t in (param, *(master.weight for master in masters_of(param))):
                if t.numel() > 0:
                    _PLACES.append((t.data_ptr(), t.data_ptr() + _extent(t), TensorWeakRef(t)))
        _PLACES.sort(key=itemgetter(0))
    begin = tensor.data_ptr()
    end = begin + _extent(tensor)
    found = []
    # Parameters do not overlap, but those that are one another's memory, whose places begin together.
    place = bisect_left(_PLACES, begin, key=itemgetter(1))
    while place < len(_PLACES) and _PLACES[place][0] < end:
        low, high, ref = _PLACES[place]
        param = ref()
        if param is not None and low < end and begin < high:
            found.append(param)
        place += 1
    return found


def _extent(tensor: Tensor) -> int:
    """Bytes from the first element to the end of the last."""
    if tensor.numel() == 0:
        return 0
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


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


@disable_dynamo
def follow_masters(module: nn.Module, args: Any) -> None:
    """Forward pre-hook for models whose optimizer writes masters outside of its step: schedule-free, or Lookahead."""
    for param in module.parameters():
        for master in masters_of(param):
            master.write_back_if_moved()


def follow_own_masters(module: nn.Module, args: Any) -> None:
    """The same for the parameters of `module` itself. In a graph nothing: the hook of the model went before it."""
    if torch.compiler.is_compiling():
        return
    for param in module._parameters.values():
        if param is not None:
            for master in masters_of(param):
                master.write_back_if_moved()


class Roster(NamedTuple):
    """What an optimizer steps, in the order of its groups.

    Attributes:
        weights: n; the entries of its groups.
        params: n; the model's own parameters: what a backward accumulates into.
        masters: n; what is between the two, or None where they are one.
        copies: n; those of `params` that have a master, else None.
        plain: the parameters without a master,
        plain_rows: and where they are;
        plain_mask: n; not 0 there.
        asks: whether some of `plain` have a `.grad` of their own to be asked, as masters of another optimizer do;
        weight_handle, param_handle, plain_handle: `weights`, `params` and `plain`, to be walked fast.
    """

    weights: tuple[nn.Parameter, ...]
    params: tuple[nn.Parameter, ...]
    masters: tuple[Master | None, ...]
    copies: tuple[nn.Parameter | None, ...]
    plain: tuple[nn.Parameter, ...]
    plain_rows: tuple[int, ...]
    plain_mask: bytes
    asks: bool
    weight_handle: Sequence[Tensor]
    param_handle: Sequence[Tensor]
    plain_handle: Sequence[Tensor]


def _roster(groups: list[dict[str, Any]], find: Callable[[nn.Parameter], Master | None]) -> Roster:
    weights = tuple(p for group in groups for p in group["params"])
    masters = tuple(map(find, weights))
    copies = tuple(None if m is None else m.param for m in masters)
    params = tuple(w if p is None else p for w, p in zip(weights, copies, strict=True))
    plain_rows = tuple(row for row, m in enumerate(masters) if m is None)
    plain = tuple(weights[row] for row in plain_rows)
    mask = bytes(m is None for m in masters)
    handles = [walk.params(tensors) for tensors in (weights, params, plain)]
    asks = walk.asks_for_gradients(plain)
    return Roster(weights, params, masters, copies, plain, plain_rows, mask, asks, *handles)


NO_ROSTER = _roster([], lambda _: None)

# Of optimizers without masters, from the entry of `scale_loss` to the step: the parameters of their groups, and what
# follows from them. No longer, since a parameter may refer to its optimizer, which would then never be freed.
_PLAIN_ROSTERS: weakref.WeakKeyDictionary[Optimizer, tuple[list[tuple[nn.Parameter, ...]], Roster]] = (
    weakref.WeakKeyDictionary()
)


def roster_of(optimizer: Optimizer, masters: MasterWeights | None) -> Roster:
    """What `optimizer` steps, as of the last scan of its masters."""
    if masters is not None:
        return masters.roster
    groups = optimizer.param_groups
    scanned, roster = _PLAIN_ROSTERS.get(optimizer, ([], NO_ROSTER))
    if not _have(groups, scanned):
        roster = _roster(groups, lambda _: None)
        _PLAIN_ROSTERS[optimizer] = [tuple(group["params"]) for group in groups], roster
    return roster


def forget_roster(optimizer: Optimizer) -> None:
    """Hold the parameters of an optimizer without masters no longer, whose iteration is over."""
    _PLAIN_ROSTERS.pop(optimizer, None)


def _have(groups: list[dict[str, Any]], params: list[tuple[nn.Parameter, ...]]) -> bool:
    """Whether the groups still have the very same parameters."""
    return len(groups) == len(params) and all(
        walk.same_objects(group["params"], was) for group, was in zip(groups, params, strict=True)
    )


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
        self.roster = _roster(groups, self.find)
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
        return _have(groups, self._scanned) and not any(
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
        self._shared.params = walk.replaceable(walk.stamps(self.params))
        self._shared.weights = walk.replaceable(walk.stamps(self.weights))

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
                _MASTERS[master.param].remove(weakref.ref(master))
        _PLACES.clear()
        self._by_weight, self._by_param, self.in_groups = {}, {}, []
        self.params = self.weights = walk.params([])
        self._scanned = []
        self.roster, self._shared = NO_ROSTER, Shared(walk.stamps([]), walk.stamps([]))

    def _create(self, param: nn.Parameter, exact_f32: Tensor | None) -> Master:
        others = list(masters_of(param))
        if exact_f32 is None:
            exact_f32 = _exact_value(others)
            value_f32 = (param if exact_f32 is None else exact_f32).detach().to(torch.float32, copy=True)
        else:
            value_f32 = exact_f32.to(torch.float32, copy=bool(others))  # another optimizer's master has this memory
        master = Master(param, _laid_out_as(param, walk.written_out(value_f32)), others)
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


def _is_laid_out_as(param: Tensor, value: Tensor) -> bool:
    """Whether `value` is dense, and in the order in memory of `param` unless that has gaps."""
    return (
        kernels.is_dense(value)
        and value.shape == param.shape
        and (not kernels.is_dense(param) or kernels.same_layout(value, param))
    )


def _laid_out_as(param: Tensor, value_f32: Tensor) -> Tensor:
    """`value_f32`, or a copy in the order in memory of `param`; in one without gaps where that has some."""
    if _is_laid_out_as(param, value_f32):
        return value_f32
    return torch.empty_like(param, dtype=torch.float32, requires_grad=False).copy_(value_f32)


def _widened(state: Any) -> Any:
    """Optimizer state in float32 where it was low precision; widening is exact."""
    if isinstance(state, Tensor):
        return state.float() if is_low_precision(state) else state
    if isinstance(state, dict):
        return {key: _widened(value) for key, value in state.items()}
    return state
