"""The actions of a user, and how the reference changes by them.

An action is a function of the world and of small numbers, which it takes modulo what there is, so that it means
something wherever it stands: sequences can be shortened. Where it has no meaning it does nothing.
"""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from amp_engine import amp
from amp_engine.casting.in_force import discard_weight_casts
from amp_engine.errors import AmpStateError
from tests.fuzz import lifecycle
from tests.fuzz.models import batch
from tests.fuzz.reference import zero
from tests.fuzz.world import MismatchError, World

Numbers = dict[str, Any]
Draw = Callable[[random.Random], Numbers]


@dataclass(frozen=True)
class Action:
    """`run(world, **draw(random))`, as often as `weight` says."""

    run: Callable[..., None]
    draw: Draw
    weight: float


ACTIONS: dict[str, Action] = {}


def action(weight: float, **numbers: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register an action; `numbers` are drawn: of a list an item, below an int a number."""

    def draw(source: random.Random) -> Numbers:
        return {
            name: source.randrange(among) if isinstance(among, int) else source.choice(among)
            for name, among in numbers.items()
        }

    def register(run: Callable[..., None]) -> Callable[..., None]:
        ACTIONS[run.__name__] = Action(run, draw, weight)
        return run

    return register


class BodyError(Exception):
    """Raised by an action in the body of `scale_loss`."""


MANY = 1000
SEED = 50


def pick(world: World, which: int, names: list[str] | None = None) -> str:
    names = list(world.params) if names is None else names
    return names[which % len(names)]


def trainable(world: World, which: int) -> str | None:
    """A parameter that an optimizer steps."""
    names = [name for o in range(len(world.optimizers)) for name in world.ref.names(o)]
    return names[which % len(names)] if names else None


# --- training -------------------------------------------------------------------------------------


def run_backward(
    world: World,
    optimizers: list[int],
    seed: int,
    loss_id: int,
    delay: bool,
    trouble: str,
    parts: int,
    inside: Callable[[], None] | None = None,
    late_check: bool = False,
    zero: str = "",
) -> None:
    """A backward of the models of `optimizers` in a `scale_loss` over these.

    Args:
        delay: `delay_unscale`, without effect beside unscaled gradients.
        trouble: "" none; "inf", "nan" in all gradients; "one" in one gradient; "strided", "negative" a
            gradient with gaps, or with its bit for negation; "twice" two backwards in the body;
            "early", "late" an error in the body before or after the backward.
        parts: which models run only their first layer.
        inside: called in the body, after the backward.
        late_check: `delay_overflow_check`.
        zero: "none" or "zeros": `zero_grad` in the body, before the backward.
    """
    ref = world.ref
    loss_id %= len(ref.scalers)
    claimed = [window.loss_id for o in optimizers if (window := ref.windows[o]) is not None]
    if claimed:
        loss_id = claimed[0]
    if len(set(claimed)) > 1:
        return
    losses = []
    for m in sorted({m for o in optimizers for m in world.owned(o)}):
        ours, plain = world.losses(m, seed + m, (parts >> m) % 4 != 3)
        if ours.requires_grad and plain.requires_grad:
            losses.append((ours, plain))
    if not losses:
        return
    ours, plain = sum(ours for ours, _ in losses), sum(plain for _, plain in losses)
    world.same(ours, plain, "loss")
    through = not ref.is_scaled
    if through:
        ref.enter_passed(optimizers)
    scale = 1.0 if through else ref.enter(optimizers, loss_id)
    ref.deferred.difference_update(optimizers)
    reentered = [o for o in optimizers if ref.windows[o] is not None]
    began = False
    marks = {o: ref.marks(o) for o in reentered}
    factor = {"inf": float("inf"), "nan": float("nan")}.get(trouble, 1.0)
    stepped = [world.optimizers[o] for o in optimizers]
    try:
        with amp.scale_loss(
            ours, stepped, loss_id=loss_id, delay_unscale=delay, delay_overflow_check=late_check
        ) as scaled:
            wanted = plain.float() * scale
            world.same(scaled, wanted, "scaled loss")
            for o in optimizers if zero else ():
                set_to_none = zero == "none" or trouble == "early"
                world.optimizers[o].zero_grad(set_to_none)
                ref.zero_grad(o, set_to_none)
            marks = {o: ref.marks(o) for o in reentered}
            if trouble == "early":
                raise BodyError
            if not through:
                ref.begin(optimizers, loss_id, scale)
            began = True
            for loss in (scaled, wanted):
                if trouble == "twice":
                    loss.backward(retain_graph=True)
                (loss * factor).backward()
            if inside is not None:
                inside()
            if trouble in ("one", "strided", "negative"):
                for params in (world.params, ref.params):
                    for name in [n for o in optimizers for n in ref.names(o)][:1]:
                        spoil(params[name], trouble)
            if trouble == "late":
                raise BodyError
    except BodyError:
        if not through:
            ref.abandon(optimizers, marks, began)
        return
    if through:
        ref.leave_passed(optimizers)
    elif not delay or ref.has_earlier(optimizers):
        ref.exit(optimizers, loss_id, late_check)
    else:
        ref.delay(optimizers)


TROUBLE = [*[""] * 12, "inf", "nan", "one", "early", "late", "twice", "strided", "negative"]


def spoil(param: Tensor, how: str) -> None:
    """An overflow in one element, or a gradient that is laid out or marked as few are."""
    grad = param.grad
    if grad is not None and how == "one":
        with torch.no_grad():
            grad[(0,) * grad.dim()] = float("inf")
    elif grad is not None and how == "strided":
        param.grad = torch.stack([grad, grad], -1)[..., 0]
    elif grad is not None:
        param.grad = torch._neg_view(grad.clone())


@action(
    10,
    which=MANY,
    seed=SEED,
    loss_id=3,
    delay=[0, 0, 0, 1],
    trouble=TROUBLE,
    parts=MANY,
    late_check=[0, 0, 0, 0, 0, 1],
    zero=["", "", "", "none", "zeros"],
)
def backward(
    world: World,
    which: int,
    seed: int,
    loss_id: int,
    delay: int,
    trouble: str,
    parts: int,
    late_check: int,
    zero: str = "",
) -> None:
    """A backward of one optimizer's models, or of several's; perhaps with an overflow, or an error in the body."""
    count = len(world.optimizers)
    chosen = [o for o in range(count) if (which >> o) & 1] or [which % count]
    run_backward(world, chosen, seed, loss_id, bool(delay), trouble, parts, late_check=bool(late_check), zero=zero)


@action(2, which=MANY, seed=SEED, loss_id=3, delay=[0, 0, 1], trouble=TROUBLE)
def nested(world: World, which: int, seed: int, loss_id: int, delay: int, trouble: str) -> None:
    """`scale_loss` of one optimizer in the body of another's."""
    if len(world.optimizers) < 2:
        return
    a, b = which % 2, 1 - which % 2

    def inner() -> None:
        run_backward(world, [b], seed + 7, loss_id + which // 2 % 2, bool(delay), trouble, which)

    run_backward(world, [a], seed, loss_id, False, "", 0, inner)


@action(1, which=MANY, seed=SEED)
def backward_outside(world: World, which: int, seed: int) -> None:
    """A backward without `scale_loss`."""
    # What a parameter has gathered that joins has tests of its own, and so has a clipping that is overtaken.
    if world.is_open() or world.ref.added or world.ref.deferred:
        return
    ours, plain = world.losses(which % len(world.models), seed)
    for loss in (ours, plain):
        if loss.requires_grad:
            loss.backward()


@action(8, which=MANY, how=["", "", "None", "closure=None"])
def step(world: World, which: int, how: str = "") -> None:
    """Step with the arguments that trainers pass."""
    o = which % len(world.optimizers)
    args, kwargs = {"None": ((None,), {}), "closure=None": ((), {"closure": None})}.get(how, ((), {}))
    is_taken = world.ref.step(o)
    try:
        world.optimizers[o].step(*args, **kwargs)
    except AmpStateError as error:
        if is_taken or "outside of amp.scale_loss" not in str(error):
            raise
        return
    if not is_taken:
        raise MismatchError("a step on half gradients that no loss scale has multiplied")
    world.same(amp.current_engine().step_was_skipped(world.optimizers[o]), world.ref.skipped[o], "step was skipped")
    if o in world.inexact or o in world.ref.clipped:
        world.rounded.add(o)
    # A class's own step leaves FP32 gradients; the kernels leave each as it was.
    is_wide = {name for name, p in world.params.items() if p.grad is not None and p.grad.dtype is torch.float32}
    world.ref.widen(o, is_wide)
    if o in world.ref.deferred:  # whether the gradients that stay are clipped depends on who stepped
        zero_grad(world, o, True)
        world.ref.deferred.discard(o)


@action(8, which=MANY, seed=SEED, set_to_none=[True, True, False])
def iterate(world: World, which: int, seed: int, set_to_none: bool) -> None:
    """A plain iteration, so that there is training between the rest."""
    o = which % len(world.optimizers)
    zero_grad(world, o, set_to_none)
    run_backward(world, [o], seed, 0, False, "", 0)
    step(world, o)


@action(4, which=MANY, set_to_none=[True, True, False])
def zero_grad(world: World, which: int, set_to_none: bool) -> None:
    o = which % len(world.optimizers)
    set_to_none = set_to_none or o in world.ref.deferred
    world.optimizers[o].zero_grad(set_to_none)
    world.ref.zero_grad(o, set_to_none)


@action(1, which=MANY, set_to_none=[True, True, False])
def model_zero_grad(world: World, which: int, set_to_none: bool) -> None:
    m = which % len(world.models)
    set_to_none = set_to_none or bool(world.ref.deferred)
    world.models[m].zero_grad(set_to_none)
    zero(world.ref.models[m].parameters(), set_to_none)


@action(3, which=MANY, kind=["amp", "amp", "torch", "amp inf"], max_norm=[2.0**-8, 0.25, 64.0], again=[0, 0, 1])
def clip(world: World, which: int, kind: str, max_norm: float, again: int) -> None:
    """Between backward and step; perhaps once more, to half of it."""
    o = which % len(world.optimizers)
    ref = world.ref
    params = ref.params_of(o)
    if ref.windows[o] is not None or not ref.has_gradients(o):
        return
    kind = "torch" if ref.hooks[o] else kind  # after amp's clipping their edits are an error
    if not all(bool(p.grad.isfinite().all()) for p in params if p.grad is not None):
        return
    if any(p.grad.is_neg() for p in (*params, *world.params_of(o)) if p.grad is not None):
        return  # torch's clip_grad_norm_ raises
    if kind == "torch":
        if o in ref.deferred:
            return
        norm = torch.nn.utils.clip_grad_norm_(world.params_of(o), max_norm)
        world.same(norm, torch.nn.utils.clip_grad_norm_(params, max_norm), "norm")
        return
    order = float("inf") if kind == "amp inf" else 2.0
    ref.scan(o)
    is_refused = ref.is_scaled and any(map(ref.has_half, ref.names(o)))
    try:
        norm = amp.clip_grad_norm_(world.optimizers[o], max_norm, order)
    except AmpStateError as error:
        if not is_refused or "outside of amp.scale_loss" not in str(error):
            raise
        return
    if is_refused:
        raise MismatchError("a clipping of half gradients that no loss scale has multiplied")
    ref.look(o)
    plain = torch.nn.utils.get_total_norm([p.grad.float() for p in params if p.grad is not None], order)
    world.same(norm, plain, "norm", 1e-5)
    ref.deferred.discard(o)
    if world.record(o).clip is not None:
        ref.deferred.add(o)
    if o in ref.deferred:
        ref.widen(o)
    torch.nn.utils.clip_grads_with_norm_(params, max_norm, plain)
    if o not in ref.deferred:
        world.match_gradients(o, 2e-6)
    if ref.looked[o] is not None:
        ref.looked[o] = ref.gradients(o)
    ref.clipped.add(o)
    if again:
        clip(world, which, "amp", max_norm / 2, 0)


@action(2, which=MANY, lr=[1 / 16, 1 / 8, 1 / 4])
def set_lr(world: World, which: int, lr: float) -> None:
    o = which % len(world.optimizers)
    for optimizer in (world.optimizers[o], world.ref.optimizers[o]):
        for group in optimizer.param_groups:
            group["lr"] = lr


@action(2, which=MANY, scale=[2.0**3, 2.0**8, 2.0**12])
def set_scale(world: World, which: int, scale: float) -> None:
    """amp.load_state_dict, or the attribute that scripts write."""
    i = which % len(world.ref.scalers)
    if not world.ref.scalers[i].dynamic:
        return
    if which % 2:
        state = amp.state_dict()
        state[f"loss_scaler{i}"]["loss_scale"] = scale
        amp.load_state_dict(state)
    else:
        amp._amp_state.loss_scalers[i]._loss_scale = scale
    world.ref.scalers[i].set(scale)


@action(1.5, which=MANY, seed=SEED, scale=[2.0**3, 2.0**8, 2.0**12], delay=[0, 1])
def windows_apart(world: World, which: int, seed: int, scale: float, delay: int) -> None:
    """Open windows of two optimizers at different scales, and take one loss for both: seldom drawn by itself."""
    if len(world.optimizers) < 2 or world.is_open():
        return
    a, b = which % 2, 1 - which % 2
    run_backward(world, [a], seed, 0, True, "", 0)
    set_scale(world, which // 2 % 2 * len(world.ref.scalers), scale)
    run_backward(world, [b], seed + 1, 0, True, "", 0)
    run_backward(world, [0, 1], seed + 2, 0, bool(delay), "", 0)


# --- forwards -------------------------------------------------------------------------------------


@action(4, which=MANY, seed=SEED, mode=["no_grad", "inference_mode", "eval", "train", "amp off"])
def forward(world: World, which: int, seed: int, mode: str) -> None:
    """A forward whose graph, if there is one, is dropped. In train mode batch norms move."""
    m = which % len(world.models)
    both = world.models[m], world.ref.models[m]
    if world.half is not None and world.level in ("O1", "O4") and mode == "amp off":
        mode = "train"  # half weights do not take FP32 inputs then
    for model in both if mode in ("eval", "inference_mode") else ():
        model.eval()
    with ExitStack() as stack:
        if mode == "no_grad":
            stack.enter_context(torch.no_grad())
        if mode == "inference_mode":
            stack.enter_context(torch.inference_mode())
        if mode == "amp off":
            stack.enter_context(amp.disable_casts())
            both[1].half, half = None, both[1].half
        try:
            world.outputs(m, seed)
        finally:
            if mode == "amp off":
                both[1].half = half
            for model in both:
                model.train()


# --- writes ---------------------------------------------------------------------------------------


def write(tensor: Tensor, value: Tensor, how: str) -> None:
    value = value.to(tensor.dtype)
    if how == "no_grad":
        with torch.no_grad():
            tensor.copy_(value)
    elif how == "element":
        with torch.no_grad():
            tensor[(0,) * tensor.dim()] = value.reshape(-1)[0]
    elif how == "data":
        tensor.data.copy_(value)
        discard_weight_casts()  # else not seen within an iteration
    elif how == "data replaced":
        tensor.data = value.clone()
    else:
        raise ValueError(how)


def values(like: Tensor, seed: int) -> Tensor:
    return torch.randint(-12, 13, like.shape, generator=torch.Generator().manual_seed(seed)) / 16


@action(3, which=MANY, seed=SEED, how=["no_grad", "element", "state dict", "data replaced"])
def write_param(world: World, which: int, seed: int, how: str) -> None:
    """A write that autograd can see; a master takes the new value at the next step."""
    name = pick(world, which)
    if how == "state dict":
        if world.params[name].dtype != torch.float32:
            return  # its values are copies then
        m, own = name[1:].split(".", 1)
        for models in (world.models, world.ref.models):
            entry = models[int(m)].state_dict()[own]
            entry.copy_(values(entry, seed))
        return
    value = values(world.params[name], seed)
    if how == "data replaced" and name in world.ref.masters and bool((value == world.params[name]).any()):
        return  # in new memory only what differs is a write
    write(world.params[name], value, how)
    plain = world.ref.params[name]
    write(plain, values(plain, seed), how)
    if name in world.ref.masters:
        world.ref.moved.add(name)


@action(3, which=MANY, seed=SEED)
def write_param_hidden(world: World, which: int, seed: int) -> None:
    """A write that moves no version. A master takes the new value in the next step that is taken."""
    name = pick(world, which)
    for params in (world.params, world.ref.params):
        write(params[name], values(params[name], seed), "data")


@action(2, which=MANY, seed=SEED)
def write_master(world: World, which: int, seed: int) -> None:
    """Reaches the model at its next forward, or at the next step."""
    name = trainable(world, which)
    if name is None or name not in world.ref.masters or name in world.ref.added:
        return
    entry = world.entry(name)
    assert entry is not None
    for tensor in (entry, world.ref.masters[name]):
        write(tensor, values(tensor, seed), "no_grad")
    if name not in world.ref.moved:
        world.ref.written.add(name)


@action(1.5, which=MANY, seed=SEED, save=[0, 1, 1])
def swap(world: World, which: int, seed: int, save: int) -> None:
    """Other weights go in through `.data` and out again, as averages do; what is saved meanwhile is what runs."""
    m = which % len(world.models)
    own = [name for name in world.params if name.startswith(f"m{m}.")]
    before = [[params[name].data.clone() for name in own] for params in (world.params, world.ref.params)]
    if world.ref.written:  # masters that are to reach the model by this forward
        return
    for params in (world.params, world.ref.params):
        for i, name in enumerate(own):
            write(params[name], values(params[name], seed + i), "data")
    if save:
        for name, value in world.models[m].state_dict().items():
            if f"m{m}.{name}" in world.ref.params:
                world.same(value, world.ref.saved(f"m{m}.{name}"), f"saved m{m}.{name}, swapped")
    with torch.no_grad():
        world.outputs(m, seed)
    for params, values_before in zip((world.params, world.ref.params), before, strict=True):
        for name, value in zip(own, values_before, strict=True):
            write(params[name], value, "data")


@action(1, which=MANY)
def drop_gradient(world: World, which: int) -> None:
    """`p.grad = None` of one entry: the step leaves it out."""
    name = trainable(world, which)
    if name is None or world.is_open():
        return
    world.params[name].grad = world.ref.params[name].grad = None


@action(2, which=MANY, how=["halve", "replace", "transpose", "negative", "zero", "add"])
def edit_gradient(world: World, which: int, how: str) -> None:
    """Edit a gradient between backward and step, as users do."""
    name = trainable(world, which)
    if name is None or world.is_open() or world.ref.deferred or world.ref.params[name].grad is None:
        return
    for p in (world.params[name], world.ref.params[name]):
        grad = p.grad
        if grad is None:
            continue
        with torch.no_grad():
            if how == "halve":
                grad.mul_(0.5)
            elif how == "replace":
                p.grad = grad.clone() * 2
            elif how == "transpose" and grad.dim() == 2:
                p.grad = grad.t().contiguous().t()
            elif how == "negative":
                p.grad = torch._neg_view(grad.clone())
            elif how == "zero":
                grad.zero_()
            elif how == "add":
                grad.add_(p.detach(), alpha=1 / 64)


HOOKS: dict[str, Callable[[Tensor], Any]] = {
    "halve": lambda p: p.grad.mul_(0.5),
    "halve data": lambda p: p.grad.data.mul_(0.5),
    "replace": lambda p: setattr(p, "grad", p.grad * 2),
    "look": lambda p: p.grad.sum(),
}


@action(1, which=MANY, how=[*HOOKS])
def register_hook(world: World, which: int, how: str) -> None:
    """A step pre-hook of the user's, at any time: it goes before the step, and finds unscaled gradients."""
    o = which % len(world.optimizers)
    if o in world.ref.deferred:
        return

    @torch.no_grad()
    def edit(params: list[Tensor]) -> None:
        for p in params:
            if p.grad is not None:
                HOOKS[how](p)

    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        edit([p for group in optimizer.param_groups for p in group["params"]])

    world.hooks.append((o, world.optimizers[o].register_step_pre_hook(hook)))
    world.ref.hooks[o].append(edit)


@action(0.7, which=MANY)
def remove_hook(world: World, which: int) -> None:
    """Remove one of the hooks."""
    if world.hooks:
        o, handle = world.hooks.pop(which % len(world.hooks))
        place = [other for other, _ in world.hooks[: which % (len(world.hooks) + 1)]].count(o)
        handle.remove()
        world.ref.hooks[o].pop(place)


# --- groups ---------------------------------------------------------------------------------------


@action(1.5, which=MANY, on=[0, 0, 1])
def toggle(world: World, which: int, on: int) -> None:
    """`requires_grad` of all that an optimizer has, or of one entry, through its groups."""
    o = which % len(world.optimizers)
    names = world.ref.names(o)
    if which % 3 == 0 and names:
        names = [names[which % len(names)]]
    if any(name in world.ref.added for name in names):
        return
    for name in names:
        for params in (world.params, world.ref.params):
            params[name].requires_grad_(bool(on))


@action(1, which=MANY)
def freeze(world: World, which: int) -> None:
    """Or unfreeze."""
    name = pick(world, which)
    if name in world.ref.added:
        return
    for params in (world.params, world.ref.params):
        params[name].requires_grad_(not params[name].requires_grad)


@action(1, which=MANY)
def add_group(world: World, which: int) -> None:
    """A parameter that no optimizer has."""
    free = [
        (o, name)
        for o in range(len(world.optimizers))
        for m in world.owned(o)
        for name in world.params
        if name.startswith(f"m{m}.") and world.owner(name) is None and world.params[name].requires_grad
    ]
    if not free or world.is_open():
        return
    o, name = free[which % len(free)]
    world.params[name].grad = world.ref.params[name].grad = None  # what it has gathered has tests of its own
    world.optimizers[o].add_param_group({"params": [world.params[name]]})
    world.ref.optimizers[o].add_param_group({"params": [world.ref.params[name]]})
    world.ref.groups[o].append([name])
    world.ref.added.add(name)


@action(1, which=MANY)
def move_between_groups(world: World, which: int) -> None:
    """The last of a group to the end of the next, or the first two of a group swapped."""
    o = which % len(world.optimizers)
    ours, plain, names = world.optimizers[o].param_groups, world.ref.optimizers[o].param_groups, world.ref.groups[o]
    if world.is_open():
        return
    g = which % len(names)
    for params in (ours[g]["params"], plain[g]["params"], names[g]):
        if len(params) > 1:
            params[0], params[1] = params[1], params[0]
    if len(names) > 1 and names[g]:
        h = (g + 1) % len(names)
        for lists in ([x["params"] for x in ours], [x["params"] for x in plain], names):
            lists[h].append(lists[g].pop())


@action(0.7, which=MANY)
def remove_param(world: World, which: int) -> None:
    """Remove one entry from its group, with its state."""
    o = which % len(world.optimizers)
    names = world.ref.groups[o]
    if world.is_open() or len(world.ref.names(o)) < 2:
        return
    g = next(g for g in range(len(names)) if names[g])
    ours, plain = world.optimizers[o].param_groups[g]["params"], world.ref.optimizers[o].param_groups[g]["params"]
    for optimizer, params in ((world.optimizers[o], ours), (world.ref.optimizers[o], plain)):
        optimizer.state.pop(params.pop(0), None)  # or torch's state_dict() fails
    names[g].pop(0)
    world.ref.regrouped.add(o)


# --- optimizer state ------------------------------------------------------------------------------


@action(1, which=MANY, how=["clear inner", "pop one", "clear all", "new dict", "replace", "in place"])
def change_state(world: World, which: int, how: str) -> None:
    """Reset or edit moments in `optimizer.state`, as scripts do."""
    o = which % len(world.optimizers)
    for optimizer in (world.optimizers[o], world.ref.optimizers[o]):
        if how == "clear inner":
            for state in optimizer.state.values():
                state.clear()
        elif how == "clear all":
            optimizer.state.clear()
        elif how == "new dict":
            optimizer.state = copy.copy(optimizer.state)
            optimizer.state.clear()
        for state in optimizer.state.values():
            for key in ("momentum_buffer", "exp_avg"):
                if isinstance(state.get(key), Tensor):
                    if how == "pop one" and len(state) == 1:  # SGD's; others raise without it
                        state.pop(key)
                    elif how == "replace":
                        state[key] = state[key] * 2
                    elif how == "in place":
                        state[key].zero_()


# --- checkpoints ----------------------------------------------------------------------------------


def pack(world: World) -> Any:
    return {
        "models": [copy.deepcopy(m.state_dict()) for m in world.models],
        "optimizers": [copy.deepcopy(o.state_dict()) for o in world.optimizers],
        "amp": copy.deepcopy(amp.state_dict()),
    }


@action(1)
def save(world: World) -> None:
    """Save, to load later. The reference saves masters where there are any."""
    ref = world.ref
    if ref.regrouped:
        return
    exact = {name: ref.saved(name).clone() for name in ref.params}
    buffers = [[b.clone() for b in m.buffers()] for m in ref.models]
    for m, model in enumerate(world.models):
        for name, value in model.state_dict().items():
            if f"m{m}.{name}" in exact:
                world.same(value, exact[f"m{m}.{name}"], f"saved m{m}.{name}")
    states = [copy.deepcopy(o.state_dict()) for o in ref.optimizers]
    scalers = [(s.scale, s.unskipped) for s in ref.scalers]
    world.saved.append((pack(world), exact, buffers, states, scalers, copy.deepcopy(ref.groups)))


@action(1, which=MANY, what=["all", "all", "model", "optimizer", "amp"])
def load(world: World, which: int, what: str) -> None:
    """Into the objects that are there, in mid-training."""
    ref = world.ref
    if not world.saved or ref.added:  # when what joined gets its master then, depends on what was loaded before
        return
    ours, exact, buffers, states, scalers, groups = world.saved[which % len(world.saved)]
    if what in ("all", "model"):
        for model, state in zip(world.models, ours["models"], strict=True):
            model.load_state_dict(state)
        low = [name for name, p in ref.params.items() if p.dtype != torch.float32]
        if ref.by_master and any(name not in ref.masters for name in low):  # ours looks for parameters where one is new
            for o in range(len(world.optimizers)):
                ref.scan(o)
        lifecycle.load(ref, exact, buffers)
    if what in ("all", "optimizer") and groups == ref.groups:
        for o, (optimizer, state) in enumerate(zip(world.optimizers, ours["optimizers"], strict=True)):
            optimizer.load_state_dict(copy.deepcopy(state))
            ref.scan(o)
            ref.optimizers[o].load_state_dict(copy.deepcopy(states[o]))
    if what in ("all", "amp"):
        amp.load_state_dict(ours["amp"])
        for scaler, (scale, unskipped) in zip(ref.scalers, scalers, strict=True):
            scaler.set(scale)
            scaler.unskipped = unskipped


@action(0.7, which=MANY, how=["close", "drop"])
def resume(world: World, which: int, how: str) -> None:
    """Into fresh objects, as a new process would; the old ones closed, or dropped as they are."""
    ref = world.ref
    if world.is_open() or ref.added or ref.regrouped or any(not ref.params[name].requires_grad for name in ref.masters):
        return
    packed = copy.deepcopy(pack(world))
    if how == "close":
        amp.close()
    world.renew()
    for model, state in zip(world.models, packed["models"], strict=True):
        model.load_state_dict(state)
    for optimizer, state in zip(world.optimizers, packed["optimizers"], strict=True):
        optimizer.load_state_dict(state)
    amp.load_state_dict(packed["amp"])
    lifecycle.resume(ref)


@action(0.7, level=["O0", "O1", "O2", "O3", "O4", "O5"], loss_scale=[None, None, None, 64.0, "dynamic"])
def reopen(world: World, level: str, loss_scale: float | str | None) -> None:
    """Close, and initialize the same objects, at this level or another."""
    if world.is_open() or (level == "O3" and any(kind.startswith("fused") for kind in world.kinds)):
        return
    if world.half is not None or not all(p.requires_grad for p in world.params.values()):
        return
    for model in (*world.models, *world.ref.models):
        model.zero_grad()
    world.close()
    states = [copy.deepcopy(o.state_dict()) for o in world.ref.optimizers]
    world.plain = world.ref.models
    world.initialize({**world.start, "level": level, "loss_scale": loss_scale})
    for optimizer, state in zip(world.ref.optimizers, states, strict=True):
        optimizer.load_state_dict(state)
    world.saved.clear()


@action(0.5, level=["O0", "O1", "O2", "O4", "O5"], keep=[0, 1])
def start_anew(world: World, level: str, keep: int) -> None:
    """Another model at another level without close(), as in a notebook, unless functions are cast until then."""
    if world.level in ("O1", "O4") and level not in ("O1", "O4"):
        keep = 0
        amp.close()  # or functions would still be cast
    old = World.__new__(World)
    old.__dict__.update(world.__dict__)
    world.__dict__.clear()
    start = {**old.start, "level": level}
    if level in ("O1", "O4") and "normed" in old.start["models"]:
        start["half"] = None
    attic = [*old.attic, old] if keep else []
    del old
    gc.collect()
    world.__init__(start)  # type: ignore[misc]
    world.attic = attic


@action(1, which=MANY, seed=SEED)
def copy_model(world: World, which: int, seed: int) -> None:
    """A deepcopy runs its own weights, and what is done to it leaves the model alone."""
    m = which % len(world.models)
    if any(p.grad is not None and not p.is_leaf for p in world.models[m].parameters()):
        return
    twin, plain = copy.deepcopy(world.models[m]), copy.deepcopy(world.ref.models[m])
    x = batch(twin, seed)
    cast = world.level in ("O2", "O3", "O5")
    expected = plain(x.to(world.ref.dtype)).float() if cast else plain(x)
    world.same(twin(x), expected, f"output of a copy of m{m}")
    with torch.no_grad():
        for p in twin.parameters():
            p.fill_(1.0)
    twin(x)
    world.outputs(m, seed, True)
    with torch.no_grad():  # ours or theirs moved more often: compare both
        for ours, theirs in zip(world.models[m].buffers(), world.ref.models[m].buffers(), strict=True):
            world.same(ours, theirs, f"buffers of m{m} beside its copy")


@action(0.7, which=MANY, last=[0, 1])
def layout(world: World, which: int, last: int) -> None:
    """`model.to(memory_format=...)` in mid-training."""
    # Gradients that move count as written: a step after a clip refuses them, and one after a late check checks them.
    if world.ref.deferred or any(scaler.overflowed for scaler in world.ref.scalers):
        return
    m = which % len(world.models)
    are_last = [last == 1 if i == m else was for i, was in enumerate(world.start["channels_last"])]
    world.start = {**world.start, "channels_last": are_last}
    before = {name: p.stride() for name, p in world.ref.params.items()}
    for models in (world.models, world.ref.models):
        models[m].to(memory_format=torch.channels_last if last else torch.contiguous_format)
    changed = {name for name, p in world.ref.params.items() if p.stride() != before[name]}
    changed &= set(world.ref.masters)
    world.ref.moved.update(changed)
    world.ref.written.difference_update(changed)


@action(1.5, which=MANY, seed=SEED, what=["iterate", "iterate", "backward", "step", "forward", "write"])
def in_another_thread(world: World, which: int, seed: int, what: str) -> None:
    """Run in a thread that comes and goes, so that what torch keeps for each thread is new."""
    runs: dict[str, Callable[[], None]] = {
        "iterate": lambda: iterate(world, which, seed, True),
        "backward": lambda: run_backward(world, [which % len(world.optimizers)], seed, 0, False, "", 0),
        "step": lambda: step(world, which),
        "forward": lambda: forward(world, which, seed, "train"),
        "write": lambda: write_param(world, which, seed, "no_grad"),
    }
    with ThreadPoolExecutor(1) as threads:
        threads.submit(runs[what]).result()


@action(1.5, which=MANY)
def average(world: World, which: int) -> None:
    """`amp.averaged_model` is the mean of what masters were, or weights."""
    m = which % len(world.models)
    o = next(o for o in range(len(world.optimizers)) if m in world.owned(o))
    if m not in world.averages:
        world.averages[m] = (amp.averaged_model(world.models[m], world.optimizers[o]), {})
    averaged, plain = world.averages[m]
    averaged.update_parameters(world.models[m])
    count = int(averaged.n_averaged)
    for name, value in averaged.module.named_parameters():
        now = world.ref.exact(f"m{m}.{name}").double()
        plain[name] = plain[name] + (now - plain[name]) / count if count > 1 else now
        world.same(value, plain[name].float(), f"average of m{m}.{name}", 1e-5, 1e-6)


@action(0.3)
def collect(world: World) -> None:
    """A collection of garbage."""
    gc.collect()
