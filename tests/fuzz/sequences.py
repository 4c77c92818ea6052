"""Sequences of actions: drawn from a seed, run, shortened, written down and read again."""

from __future__ import annotations

import json
import random
import traceback
from dataclasses import dataclass
from typing import Any

import torch

from amp_engine import Engine, amp, kernels
from amp_engine.errors import AmpStateError
from tests.fuzz.actions import ACTIONS
from tests.fuzz.models import MODELS, OPTIMIZERS
from tests.fuzz.world import World, quiet

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
FUSED_ALONE = ("fused sgd", "fused adam", "fused lamb", "fused novograd", "fused adagrad")
# What goes wrong between a backward and its step is silent, so more of it is drawn there.
BETWEEN = {
    **dict.fromkeys(("clip", "drop_gradient", "edit_gradient", "move_between_groups", "zero_grad"), 3),
    **dict.fromkeys(("add_group", "remove_param", "freeze", "change_state", "write_master", "write_param"), 1),
    **dict.fromkeys(("write_param_hidden", "set_scale", "load", "save", "copy_model"), 1),
    **dict.fromkeys(("collect", "backward_outside", "set_lr", "forward", "in_another_thread", "average"), 0.5),
    "step": 6,
}


@dataclass
class Sequence:
    """How a run starts, and its actions: (action, its numbers, whether gradients and state are looked at after)."""

    start: dict[str, Any]
    actions: list[tuple[str, dict[str, Any], bool]]

    def __str__(self) -> str:
        return "\n".join(json.dumps(line) for line in [self.start, *self.actions])

    @classmethod
    def parse(cls, text: str) -> Sequence:
        start, *actions = [json.loads(line) for line in text.splitlines() if line.strip().startswith(("{", "["))]
        return cls(start, [(name, numbers, bool(look)) for name, numbers, look in actions])


def draw(seed: int, level: str | None = None) -> Sequence:
    """The sequence of a seed."""
    source = random.Random(seed)
    level = level or source.choice([*LEVELS, "O1", "O2", "O2", "O5"])
    models = [source.choice(["mlp", "mlp", "vector", "normed", "conv"]) for _ in range(source.choice([1, 1, 2]))]
    has_fused = level != "O3" and kernels.has_native(torch.device("cpu"))
    kinds = [kind for kind in OPTIMIZERS if has_fused or kind not in FUSED_ALONE]
    apart = len(models) == 2 and source.random() < 0.7
    owned = [[0], [1]] if apart else [list(range(len(models)))]
    dynamic = level in ("O1", "O2")
    start = {
        "level": level,
        "models": models,
        "channels_last": [kind == "conv" and source.random() < 0.5 for kind in models],
        "optimizers": [[source.choice(kinds), own, source.choice(["one", "one", "two", "part"])] for own in owned],
        "frozen": source.choice([[], [], [source.randrange(20)]]),
        "num_losses": source.choice([1, 1, 2]),
        "loss_scale": source.choice([None, None, 64.0] if dynamic else [None, None, None, "dynamic", 64.0]),
        "max_loss_scale": source.choice([2.0**4, 2.0**10, 2.0**12, 2.0**24]),
        "window": source.choice([2, 3, 2000]),
        "skips": source.choice([True, False, False, "auto", "auto"]),
        "half": source.choice([*[None] * 6, "float16", "bfloat16"]),
    }
    if start["half"] is not None and level in ("O1", "O4"):  # by hand, norms would be cast otherwise
        start["models"] = ["mlp" if kind == "normed" else kind for kind in models]
    chosen: list[str] = []
    for _ in range(source.randint(4, 24)):
        is_between = bool(chosen) and chosen[-1] != "step" and chosen[-1] in ("backward", *BETWEEN)
        if is_between and source.random() < 0.7:
            chosen += source.choices([*BETWEEN], [*BETWEEN.values()])
        else:
            chosen += source.choices([*ACTIONS], [action.weight for action in ACTIONS.values()])
    looks = source.choice([0.0, 0.15, 0.5, 1.0])
    return Sequence(start, [(name, ACTIONS[name].draw(source), source.random() < looks) for name in chosen])


def run(sequence: Sequence) -> str | None:
    """Return the failure of the sequence, and its action; None if there is none."""
    torch.manual_seed(0)
    place = "start"
    try:
        with quiet():
            world = World(sequence.start)
            for name, numbers, look in sequence.actions:
                place = name
                ACTIONS[name].run(world, **numbers)
                if not world.is_finite():
                    return None  # trained to nothing, as it may at a static scale
                world.check(look)
            place = "end"
            world.check(look=True)
            world.close()
    except Exception as error:
        _let_go()
        where = "".join(traceback.format_exception(error)[-4:])
        return f"{place}: {type(error).__name__}: {error}\n{where}"
    return None


def _let_go() -> None:
    """Undo amp, whatever it was in the midst of."""
    try:
        amp.close()
    except AmpStateError:  # a `scale_loss` that was never left
        amp._amp_state.engine.function_casts.remove()
        amp._amp_state.engine = Engine()


def shrink(sequence: Sequence) -> Sequence:
    """The same failure, of the same kind, with as few actions as deleting one by one leaves."""
    kind = _kind(run(sequence))
    shorter = True
    while shorter:
        shorter = False
        for size in (8, 4, 2, 1):
            i = len(sequence.actions) - size
            while i >= 0:
                candidate = Sequence(sequence.start, sequence.actions[:i] + sequence.actions[i + size :])
                if _kind(run(candidate)) == kind:
                    sequence, shorter = candidate, True
                i -= size
    return sequence


def _kind(failure: str | None) -> str | None:
    return None if failure is None else failure.split(":")[1].strip()


__all__ = ["MODELS", "Sequence", "draw", "run", "shrink"]
