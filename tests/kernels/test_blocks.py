"""Masters of 24 bits and moments in blocks of 8 bits: the formats, and steps, which are those of float32 rounded."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from amp_engine import kernels
from amp_engine.errors import AmpValueError
from amp_engine.kernels import CODES, FORMULAS, blocks, halves

from . import oracle
from .conftest import NATIVE
from .lists import SIZES, same_bits, same_values
from .test_halves import values
from .test_steps import ARGUMENTS

KINDS = pytest.mark.parametrize("code", [blocks.FIRST, blocks.SECOND], ids=["first", "second"])


def of_24_bits(value_f32: Tensor) -> Tensor:
    rounded = value_f32.bfloat16()
    return halves.joined(rounded, halves.remainder24(value_f32, rounded))


def test_a_master_of_24_bits_is_near_its_value_and_rounds_to_its_parameter() -> None:
    x = values()
    x = torch.cat([x, x[: 1 << 16].view(torch.int32).bitwise_and(-(1 << 16)).add(0x7FFF).view(torch.float32)])
    x = x[x.isfinite() & (x.abs() < 2.0**127)]
    back = of_24_bits(x)
    bits, new = x.view(torch.int32).long(), back.view(torch.int32).long()
    assert not (new & 0xFF).any()
    is_tie = (bits & 0xFFFF).sub(0x8000).abs() <= 0x80
    assert (new - bits)[~is_tie].abs().max() <= 0x80
    assert (new - bits).abs().max() <= 0x100
    assert same_bits(back.bfloat16(), x.bfloat16())
    assert torch.equal(of_24_bits(back), back)
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf])
    assert same_bits(of_24_bits(special), special)
    assert of_24_bits(torch.tensor([math.nan])).isnan().all()


def test_every_remainder_of_a_step_is_that_of_its_value() -> None:
    x = values()
    x = x[x.isfinite() & (x.abs() < 2.0**127)]
    for noise in (0, 1, 128, 255):
        rounded, remainder = oracle.split24(x, torch.full(x.shape, noise, dtype=torch.int32))
        back = halves.joined(rounded, remainder)
        assert same_bits(rounded, back.bfloat16())
        assert torch.equal(halves.remainder24(back, rounded), remainder)


@pytest.mark.parametrize("upper", [0.0, -0.0, 1.0, -3.5])
def test_another_parameter_leaves_a_value_that_rounds_to_it(upper: float) -> None:
    remainder = torch.arange(256, dtype=torch.uint8)
    rounded = torch.full(remainder.shape, upper, dtype=torch.bfloat16)
    back = halves.joined(rounded, remainder)
    assert torch.equal(back.bfloat16()[remainder != 0x80], rounded[remainder != 0x80])


def spread(code: Any) -> Tensor:
    """64 times 33 elements, from tiny to huge, of which the first block is 0."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64 * 33, generator=generator) * torch.logspace(-18, 18, 64).repeat_interleave(33)
    x[:32] = 0
    return x.square() if code.of_root else x


def steps_of(x: Tensor, code: Any) -> Tensor:
    """The least power of two for each element's block that has its largest magnitude among the codes."""
    blocks_ = torch.nn.functional.pad(x.abs(), (0, -len(x) % 32)).view(-1, 32)
    return (blocks_.amax(1) / code.top).log2().ceil().exp2().repeat_interleave(32)[: len(x)]


@KINDS
def test_a_code_is_near_its_value(code: Any) -> None:
    x = spread(code)
    back = blocks.from_blocks(blocks.in_blocks(x, code), code, x)
    assert not back[:32].any()
    if code.of_root:
        x, back = x.sqrt(), back.sqrt()
    step = steps_of(x, code)
    error = (back - x).abs()
    assert (error <= torch.where(back > step, step / 2, step) * (1 + 2**-20)).all()
    assert (error > step / 4).any()
    assert not code.of_root or (back >= step).all()


@KINDS
def test_a_code_is_exact_in_the_mean(code: Any) -> None:
    x = torch.full((1 << 18,), 0.513 if code.of_root else -0.113)
    x[::32] = 1.5
    x = x.square() if code.of_root else x
    noise = oracle.noise_in_blocks(torch.tensor(3.0), len(x))[1 if code.of_root else 0]
    held = blocks.in_blocks(x, code, noise.float())
    back = blocks.from_blocks(held, code, x)
    rest = back[x != x[0]].sqrt() if code.of_root else back[x != x[0]]
    assert rest.unique().numel() == 2
    assert rest.mean().item() == pytest.approx(0.513 if code.of_root else -0.113, rel=2e-4)
    assert blocks.in_blocks(back, code, noise.float()).equal(held)


@pytest.mark.parametrize("columns", [1024, 4096, 4608, 8192])
def test_the_noise_of_a_row_tells_nothing_of_the_next(columns: int) -> None:
    for noise, mean in zip(oracle.noise_in_blocks(torch.tensor(3.0), 256 * columns), (0.5, 0.5, 127.5), strict=True):
        rows = noise.double().view(256, columns) - mean
        independent = 256 * (mean if mean > 1 else 0.5) ** 2 / 3
        assert 0.8 < rows.sum(0).square().mean() / independent < 1.25


@KINDS
def test_a_block_that_is_too_small_is_zero(code: Any) -> None:
    x = torch.full((64,), 2.0**-105)
    x[32:] = 2.0**-103
    held = blocks.in_blocks(x.square() if code.of_root else x, code)
    if not code.of_root:  # the square is 0 in float32
        assert held[64:].tolist() == [0, 18]
    assert not blocks.from_blocks(held, code, x)[:32].any()


def test_codes_are_in_the_order_of_memory_and_carry_what_is_not_finite() -> None:
    x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    last = x.to(memory_format=torch.channels_last)
    held = blocks.in_blocks(last, blocks.FIRST)
    assert blocks.is_in_blocks(held, last)
    assert held.shape == (124,)
    assert torch.equal(held, blocks.in_blocks(x.permute(0, 2, 3, 1).contiguous(), blocks.FIRST))
    back = blocks.from_blocks(held, blocks.FIRST, last)
    assert back.stride() == last.stride()
    assert (back - x).abs().max() < 0.02
    assert torch.equal(blocks.from_blocks(held.bfloat16(), blocks.FIRST, last), back)  # as torch loads it
    assert not blocks.is_in_blocks(held + 0.5, last), "a moment of another weight"
    for value in (math.inf, math.nan):
        x = torch.ones(64)
        x[3] = value
        back = blocks.from_blocks(blocks.in_blocks(x, blocks.FIRST), blocks.FIRST, x)
        assert not back[:32].isfinite().any()
        assert (back[32:] - 1).abs().max() < 1 / 128


SPECIAL = (math.nan, math.inf, -math.inf, 3e38, 1e-38, -0.0)


class Tensors:
    """Tensors of one step: weights, copies of them or remainders, moments, gradients.

    With `special`, most blocks have gradients that are not finite, huge, tiny or 0, and some have no moments yet.
    """

    def __init__(
        self, formula: str, shapes: list[tuple[int, ...]], masters: str, is_in_blocks: bool, special: bool = False
    ) -> None:
        generator = torch.Generator().manual_seed(1)

        def drawn(times: float = 1.0) -> list[Tensor]:
            made = [torch.randn(shape, generator=generator) * times for shape in shapes]
            return [t.to(memory_format=torch.channels_last) if t.ndim == 4 else t for t in made]

        self.formula = formula
        self.masters_f32 = [of_24_bits(w) for w in drawn()]
        self.weights, self.copies = [w.clone() for w in self.masters_f32], [w.bfloat16() for w in self.masters_f32]
        if masters == "24bit":
            self.weights = [w.bfloat16() for w in self.masters_f32]
            self.copies = list(map(halves.remainder24, self.masters_f32, self.weights))
        grads = drawn()
        for flat in [g.view(-1) for g in grads if g.ndim == 1 and special]:
            for i, value in enumerate(SPECIAL):
                flat[i * 32 + 5 :: 32 * (len(SPECIAL) + 1)] = value
            flat[64:96] = 0
        self.grads = [g.bfloat16() for g in grads]
        self.codes = [blocks.FIRST, blocks.SECOND][: 2 if formula in ("adam", "lamb") else 1]
        self.states: list[list[Any]] = [[None] * len(shapes)] * 2
        for i, code in enumerate(self.codes):
            moments = [m.square() if code.of_root else m for m in drawn(0.1)]
            for flat in [m.view(-1) for m in moments if m.ndim == 1 and special]:
                flat[32:96] = 0
            packed = [blocks.in_blocks(m, code) for m in moments]
            self.states[i] = packed if is_in_blocks else moments
        self.steps = torch.full((len(shapes),), 6.0)
        n = len(shapes)
        self.table = kernels.step_table(
            formula, self.weights, self.copies, *self.states, [0] * n, self.steps, torch.ones(n)
        )

    def wide_states(self) -> list[list[Any]]:
        """The moments in float32, in new memory."""
        wide = [[None] * len(self.weights)] * 2
        for i, code in enumerate(self.codes):
            both = zip(self.states[i], self.masters_f32, strict=True)
            wide[i] = [blocks.from_blocks(m, code, w) if m.dtype is CODES else m.clone() for m, w in both]
        return wide

    def take(self, found_inf: Tensor | None = None, **changes: Any) -> None:
        hyper = FORMULAS[self.formula](**(ARGUMENTS[self.formula] | changes))
        self.table.step(self.grads, [True] * len(self.grads), [hyper], inv_scale=torch.tensor(0.5), found_inf=found_inf)

    def written(self) -> list[Tensor]:
        moments = [m for state in self.states for m in state if m is not None]
        return [self.steps, *self.weights, *self.copies, *moments]


SHAPES = [(n,) for n in SIZES] + [(2, 3, 4, 5)]


@NATIVE
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("masters", ["24bit", "FP32"])
@pytest.mark.parametrize("formula", ["adam", "sgd"])
def test_a_step_in_blocks_is_that_of_float32_rounded_by_the_noise_of_the_step(
    formula: str, masters: str, special: bool
) -> None:
    t = Tensors(formula, SHAPES, masters, is_in_blocks=True, special=special)
    wide = [w.clone() for w in t.masters_f32]
    states, n = t.wide_states(), len(SHAPES)
    truth = kernels.step_table(formula, wide, [None] * n, *states, [0] * n, t.steps.clone(), None)
    hyper = FORMULAS[formula](**ARGUMENTS[formula])
    truth.step(t.grads, [True] * n, [hyper], inv_scale=torch.tensor(0.5))
    t.take()
    for i, w in enumerate(wide):
        *of_moments, of_weight = oracle.noise_in_blocks(t.steps[i], w.numel())
        for code, state, packed, noise in zip(t.codes, states, t.states, of_moments, strict=False):
            assert torch.equal(packed[i], blocks.in_blocks(state[i], code, noise.float())), (i, code)
        if masters == "24bit":
            rounded, rest = oracle.split24(w, of_weight.as_strided(w.shape, w.stride()))
            assert same_bits(t.weights[i], rounded)
            assert torch.equal(t.copies[i], rest)
        else:
            assert same_values(t.weights[i], w)
            assert same_values(t.copies[i], w.bfloat16())


@NATIVE
@pytest.mark.parametrize("formula", ARGUMENTS)
def test_a_step_of_24_bits_is_that_of_float32_rounded_by_the_noise_of_the_step(formula: str) -> None:
    t = Tensors(formula, SHAPES, "24bit", is_in_blocks=False)
    wide, n = [w.clone() for w in t.masters_f32], len(SHAPES)
    truth = kernels.step_table(formula, wide, [None] * n, *t.wide_states(), [0] * n, t.steps.clone(), torch.ones(n))
    hyper = FORMULAS[formula](**ARGUMENTS[formula])
    truth.step(t.grads, [True] * n, [hyper], inv_scale=torch.tensor(0.5))
    t.take()
    for i, w in enumerate(wide):
        rounded, rest = oracle.split24(w, (oracle.noise(t.steps[i], w)[1] >> 8).int())
        assert same_bits(t.weights[i], rounded)
        assert torch.equal(t.copies[i], rest)


@NATIVE
def test_small_updates_and_a_slow_decay_are_kept_in_the_mean() -> None:
    t = Tensors("adam", [(20_000,)], "24bit", is_in_blocks=True)
    before = halves.joined(t.weights[0], t.copies[0]).double()
    t.grads = [torch.ones(20_000, dtype=torch.bfloat16)]
    for state, code in zip(t.states, t.codes, strict=True):
        state[0].copy_(blocks.in_blocks(torch.ones(20_000), code))
    for _ in range(100):
        t.take(lr=1e-6, beta1=0.9, beta2=0.999, weight_decay=0.0, decoupled=True, bias_correction=False)
    moved = halves.joined(t.weights[0], t.copies[0]).double() - before
    second = blocks.from_blocks(t.states[1][0], blocks.SECOND, before)
    expected = 0.999**100 + (1 - 0.999**100) * 0.25  # gradients are halved
    assert second.mean().item() == pytest.approx(expected, rel=2e-3)
    first = [0.5 + 0.5 * 0.9**k for k in range(1, 101)]
    root = [math.sqrt(0.999**k + (1 - 0.999**k) * 0.25) for k in range(1, 101)]
    exact = -1e-6 * sum(m / v for m, v in zip(first, root, strict=True))
    assert moved.mean().item() == pytest.approx(exact, rel=0.02)  # to nearest no weight of 1 would move


@NATIVE
def test_a_skipped_step_changes_nothing() -> None:
    t = Tensors("adam", SHAPES, "24bit", is_in_blocks=True)
    before = [x.clone() for x in t.written()]
    t.take(found_inf=torch.tensor(1.0))
    assert all(map(torch.equal, t.written(), before))


def bytes_(n: int) -> Tensor:
    return torch.zeros(n, dtype=torch.uint8)


REFUSED = {
    "half weight": ("adam", torch.zeros(4).half(), bytes_(4), None, None, "only bfloat16 weights have"),
    "one in blocks": ("adam", torch.zeros(4), None, bytes_(5), torch.zeros(4), "both moments must have one type"),
    "size": ("adam", torch.zeros(4), None, bytes_(4), bytes_(4), "exponents of its blocks must be one flat tensor"),
    "shape": ("sgd", torch.zeros(4), None, bytes_(5).view(1, 5), None, "must be one flat tensor"),
    "lamb": ("lamb", torch.zeros(4), None, bytes_(5), bytes_(5), "must be float32"),
}


@NATIVE
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_stepped_is_refused(case: str) -> None:
    formula, weight, copy, state1, state2, text = REFUSED[case]
    with pytest.raises(AmpValueError, match=text):
        kernels.step_table(formula, [weight], [copy], [state1], [state2], [0], torch.zeros(1))
