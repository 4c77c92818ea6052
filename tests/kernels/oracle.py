"""The truth that the kernels are held against: their formulas once more, in float64 and without `amp_engine`.

Each `*_step` takes one tensor's unscaled gradient, weight and state before, all float64, with a dictionary of
hyperparameters, and returns the weight and the state after. `noise` and `by_chance` round moments, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class State(NamedTuple):
    weight: Tensor
    first: Tensor | None = None
    second: Tensor | None = None
    norm: float = 0.0


def is_nonfinite(tensor: Tensor) -> bool:
    return not bool(torch.isfinite(tensor).all())


def sum_squares(tensor: Tensor) -> float:
    return tensor.double().square().sum().item()


def largest(tensor: Tensor) -> float:
    return tensor.double().abs().max().item() if tensor.numel() else 0.0


def norm(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(sum_squares(t) for t in tensors))


def _bias(beta: float, t: int, h: dict[str, Any]) -> float:
    return 1 - beta**t if h.get("bias_correction", True) else 1.0


def adam_step(g: Tensor, old: State, t: int, h: dict[str, Any], norm_of_all: float) -> State:
    p, m, v, _ = old
    if h.get("decoupled", True):
        p = p * (1 - h["lr"] * h["weight_decay"])
    else:
        g = g + h["weight_decay"] * p
    m = h["beta1"] * m + (1 - h["beta1"]) * g
    v = h["beta2"] * v + (1 - h["beta2"]) * g**2
    m_hat, v_hat = m / _bias(h["beta1"], t, h), v / _bias(h["beta2"], t, h)
    return State(p - h["lr"] * m_hat / (v_hat.sqrt() + h["eps"]), m, v)


def sgd_step(g: Tensor, old: State, t: int, h: dict[str, Any], norm_of_all: float) -> State:
    p, buffer, _, _ = old
    momentum, decay = h.get("momentum", 0), h.get("weight_decay", 0) * p
    after = h.get("decay_after_momentum", False)
    if not after:
        g = g + decay
    if momentum:
        buffer = g if t == 1 else momentum * buffer + (1 - h.get("dampening", 0)) * g
        g = g + momentum * buffer if h.get("nesterov") else buffer
    if after:
        g = g + decay
    return State(p - h["lr"] * g, buffer)


def adagrad_step(g: Tensor, old: State, t: int, h: dict[str, Any], norm_of_all: float) -> State:
    p, total, _, _ = old
    decay = h["weight_decay"] * p
    if not h.get("decoupled", False):
        g = g + decay
    total = total + g**2
    update = g / (total.sqrt() + h["eps"])
    if h.get("decoupled", False):
        update = update + decay
    return State(p - h["lr"] / (1 + (t - 1) * h.get("lr_decay", 0)) * update, total)


def novograd_step(g: Tensor, old: State, t: int, h: dict[str, Any], norm_of_all: float) -> State:
    p, m, _, before = old
    beta1, beta2 = h["beta1"], h["beta2"]
    infinity = h.get("infinity_norm", False)
    n = largest(g) if infinity else norm([g])
    if t == 1:
        before = 0.0 if h.get("init_zero", False) else n
    blended = beta2 * before + (1 - beta2) * n
    after = blended if infinity else math.sqrt(beta2 * before**2 + (1 - beta2) * n**2)
    c1, c2 = _bias(beta1, t, h), math.sqrt(_bias(beta2, t, h))
    beta3 = 1 - beta1 if h.get("grad_averaging", True) else 1
    denominator = after / c2 + h["eps"]
    if h.get("decay_inside_moment", False):
        m = beta1 * m + beta3 * (g / denominator + h["weight_decay"] * p)
        return State(p - h["lr"] / c1 * m, m, None, after)
    m = beta1 * m + beta3 * g
    return State(p - h["lr"] * (m / c1 / denominator + h["weight_decay"] * p), m, None, after)


def lamb_step(g: Tensor, old: State, t: int, h: dict[str, Any], norm_of_all: float) -> State:
    p, m, v, _ = old
    max_norm = h.get("max_grad_norm", 1.0)
    if max_norm:
        g = g / max(1.0, norm_of_all / max_norm)
    if not h.get("decoupled", True):
        g = g + h["weight_decay"] * p
    m = h["beta1"] * m + (1 - h["beta1"] if h.get("grad_averaging", True) else 1) * g
    v = h["beta2"] * v + (1 - h["beta2"]) * g**2
    u = m / _bias(h["beta1"], t, h) / ((v / _bias(h["beta2"], t, h)).sqrt() + h["eps"])
    if h.get("decoupled", True):
        u = u + h["weight_decay"] * p
    ratio = 1.0
    if (h.get("use_nvlamb", False) or h["weight_decay"]) and norm([p]) and norm([u]):
        ratio = norm([p]) / norm([u])
    return State(p - h["lr"] * ratio * u, m, v)


STEPS = {
    "adam": adam_step,
    "sgd": sgd_step,
    "adagrad": adagrad_step,
    "novograd": novograd_step,
    "lamb": lamb_step,
}


def scale_rule(
    scale: float,
    growth: int,
    left: int,
    found_inf: float,
    *,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 3,
    min_scale: float = 1.0,
    max_scale: float = 16.0,
    hysteresis: int = 1,
    dynamic: bool = True,
) -> tuple[float, int, int]:
    """(scale, growth tracker, hysteresis tracker) after one backward; without a tracker pass and get hysteresis 1."""
    if not dynamic:
        return scale, growth + 1, left
    if found_inf != 0:
        left -= 1
        return (scale if left > 0 else max(min_scale, scale * backoff_factor)), 0, left
    growth += 1
    if growth < growth_interval:
        return scale, growth, hysteresis
    grown = torch.tensor(min(max_scale, scale * growth_factor), dtype=torch.float32).item()
    return (grown if math.isfinite(grown) else scale), 0, hysteresis


def noise(step: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """16 pseudorandom bits an element for each of two moments, by the step and the element's place in memory: int64."""
    places = torch.arange(like.numel()).as_strided(like.shape, like.stride())
    bits = _mixed((places + _mixed(step.long())) & 0xFFFFFFFF)
    return bits & 0xFFFF, bits >> 16


def noise_in_blocks(step: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each of n elements in memory order: numbers in [0, 1) for both moments, 8 bits for the weight as int32."""
    places = torch.arange(n)
    bits = _mixed((places % 32 // 2 + _mixed(step.long())) & 0xFFFFFFFF) + _mixed(places // 32) & 0xFFFFFFFF
    upper, lower = (bits >> 16) / 2.0**16, (bits & 0xFFFF) / 2.0**16
    is_odd = places % 2 == 1
    of_weight = torch.where(is_odd, bits >> 16, bits) & 0xFF
    return torch.where(is_odd, lower, upper), torch.where(is_odd, upper, lower), of_weight.int()


def split24(value_f32: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Round to a bfloat16 and 8 bits by 8 bits of `noise`; a tie becomes a neighbour."""
    bits = value_f32.view(torch.int32) + noise
    bits = bits + ((bits & 0xFF00) == 0x8000).int() * ((noise & 2) * 0x100 - 0x100)
    low = torch.where(value_f32.isnan(), 0, bits >> 8 & 0xFF)
    high = torch.where(value_f32.isnan(), 0x7FC0, (bits >> 16) + (low > 0x80).int())
    return ((high + 0x8000 & 0xFFFF) - 0x8000).to(torch.int16).view(torch.bfloat16), low.to(torch.uint8)


def by_chance(value_f32: Tensor, noise: Tensor) -> Tensor:
    """Round to bfloat16 by 16 bits of `noise`, upwards with the probability that makes the mean exact.

    Rounding to nearest would keep a second moment with beta2 = 0.999 constant: a change of a thousandth is less than
    half of bfloat16's unit.
    """
    bits = torch.where(value_f32.isnan(), 0x7FC0, (value_f32.view(torch.int32).long() & 0xFFFFFFFF) + noise >> 16)
    return ((bits + 0x8000 & 0xFFFF) - 0x8000).to(torch.int16).view(torch.bfloat16)


def _mixed(x: Tensor) -> Tensor:
    """Hash 32 bits in int64 by lowbias32 (C. Wellons, "Prospecting for Hash Functions", 2018, public domain)."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & 0xFFFFFFFF
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)
