"""Weights in two halves and moments rounded by chance: each step is that of float32, split or rounded afterwards."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from amp_engine import kernels
from amp_engine.errors import AmpValueError
from amp_engine.kernels import FORMULAS, REMAINDER, halves

from . import oracle
from .conftest import NATIVE
from .lists import SIZES, same_bits
from .test_steps import ARGUMENTS

pytestmark = NATIVE

SPECIAL = (0x0, 0x80000000, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x7F7F8000, 0x7F7F7FFF, 0x1, 0x8000, 0x8001, 0x18000)


def of_bits(bits: Tensor) -> Tensor:
    return ((bits + 2**31) % 2**32 - 2**31).to(torch.int32).view(torch.float32)


def values(n: int = 1 << 20) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return of_bits(torch.cat([torch.tensor(SPECIAL), torch.randint(0, 2**32, (n,), generator=generator)]))


def is_tie_below_even(value_f32: Tensor) -> Tensor:
    return (value_f32.view(torch.int32) & 0x1FFFF) == 0x18000


def test_all_but_ties_below_even_come_back_and_the_upper_half_is_the_rounded_value() -> None:
    x = values()
    rounded, remainder = halves.split(x)
    assert rounded.dtype is torch.bfloat16
    assert remainder.dtype is REMAINDER
    is_number = ~x.isnan()
    assert torch.equal(rounded.view(torch.int16)[is_number], x.bfloat16().view(torch.int16)[is_number])
    back = halves.joined(rounded, remainder)
    assert back.isnan().equal(x.isnan())
    moved = is_tie_below_even(x) & is_number
    same = is_number & ~moved
    assert same.sum() > 1_000_000
    assert torch.equal(back.view(torch.int32)[same], x.view(torch.int32)[same])
    assert moved.any()
    assert torch.equal(back.view(torch.int32)[moved], x.view(torch.int32)[moved] + 1)


@pytest.mark.parametrize("step", [1, 2, 70_000])
def test_24_bits_are_rounded_by_the_noise_of_the_kernels(step: int) -> None:
    x = values(1 << 16)
    rounded, remainder = halves.split24(x, step)
    expected, rest = oracle.split24(x, (oracle.noise(torch.tensor(step), x)[1] >> 8).int())
    assert same_bits(rounded, expected)
    assert torch.equal(remainder, rest)
    error = (halves.joined(rounded, remainder).view(torch.int32) - x.view(torch.int32))[x.isfinite()]
    assert error.abs().max() <= 0x1FF
    assert abs(error.float().mean()) < 1


@pytest.mark.parametrize("upper", [0.0, -0.0, 1.0, -3.5, 1e-40])
def test_another_upper_half_leaves_a_value_that_rounds_to_it(upper: float) -> None:
    remainder = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    rounded = torch.full(remainder.shape, upper, dtype=torch.bfloat16)
    is_tie = remainder == -(2**15)
    joined = halves.joined(rounded, remainder)
    assert torch.equal(joined.bfloat16()[~is_tie], rounded[~is_tie])


def test_rounding_by_chance_is_exact_in_the_mean_and_keeps_what_bfloat16_holds() -> None:
    like = torch.empty(1 << 18)
    x = torch.full_like(like, 1.0 + 2**-9)  # a quarter of a unit above 1
    for step in (1.0, 2.0):
        for noise in oracle.noise(torch.tensor(step), like):
            up = oracle.by_chance(x, noise) > 1
            assert abs(up.float().mean().item() - 0.25) < 0.01
    one, other = (oracle.noise(torch.tensor(step), like)[0] for step in (1.0, 2.0))
    assert abs(torch.corrcoef(torch.stack([one, other]).float())[0, 1]) < 0.01
    kept = torch.tensor([0.0, 1.0, -2.5, math.inf, -math.inf])
    assert torch.equal(oracle.by_chance(kept, torch.full((5,), 0xFFFF)).float(), kept)
    assert oracle.by_chance(torch.tensor([math.nan]), torch.tensor([0xFFFF])).isnan().all()


class Tensors:
    """The tensors of a table, twice the same: as float32, and in halves."""

    def __init__(self, formula: str, moments: torch.dtype, shapes: list[tuple[int, ...]]) -> None:
        generator = torch.Generator().manual_seed(1)

        def draw(shape: tuple[int, ...], spread: float = 1.0) -> Tensor:
            return torch.randn(shape, generator=generator) * spread

        weights = [halves.joined(*halves.split(draw(s))) for s in shapes]
        self.wide = [w.clone() for w in weights]
        self.rounded, self.remainders = map(list, zip(*map(halves.split, weights), strict=True))
        first = [draw(s, 0.1).to(moments) for s in shapes]
        second = [draw(s, 0.1).square().to(moments) for s in shapes]
        nothing: list[Tensor | None] = [None] * len(shapes)
        has_second = formula in ("adam", "lamb")
        self.narrow_state = [first, second if has_second else nothing]
        self.wide_state = [[m.float() for m in first], [m.float() for m in second] if has_second else nothing]
        self.grads = [draw(s).bfloat16() for s in shapes]

    def table(self, formula: str, split: bool, narrow: bool) -> tuple[kernels.StepTable, Tensor]:
        n = len(self.wide)
        steps = torch.full((n,), 6.0)
        weights, copies = (self.rounded, self.remainders) if split else (self.wide, [None] * n)
        state = self.narrow_state if narrow else self.wide_state
        return kernels.step_table(formula, weights, copies, *state, [0] * n, steps, torch.ones(n)), steps


def take(table: kernels.StepTable, formula: str, grads: list[Tensor], found_inf: Tensor | None = None) -> None:
    hyper = FORMULAS[formula](**ARGUMENTS[formula])
    table.step(grads, [True] * len(grads), [hyper], inv_scale=torch.tensor(0.5), found_inf=found_inf)


SHAPES = [(n,) for n in SIZES]


@pytest.mark.parametrize("formula", ARGUMENTS)
def test_a_split_step_is_that_of_its_master(formula: str) -> None:
    t = Tensors(formula, torch.float32, SHAPES)
    t.narrow_state = [[None if s is None else s.clone() for s in part] for part in t.wide_state]
    for split in (True, False):
        take(t.table(formula, split, narrow=split)[0], formula, t.grads)
    for wide, rounded, remainder in zip(t.wide, t.rounded, t.remainders, strict=True):
        expected, rest = halves.split(wide)
        assert same_bits(rounded, expected)
        assert torch.equal(remainder, rest)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("shapes", [SHAPES, [(2, 3, 4, 5)]], ids=["flat", "channels last"])
def test_moments_are_those_of_float32_rounded_by_the_noise_of_the_step(split: bool, shapes: list) -> None:
    t = Tensors("adam", torch.bfloat16, shapes)
    if len(shapes) == 1:
        for part in (t.wide, t.rounded, t.remainders, t.grads, *t.narrow_state, *t.wide_state):
            part[:] = [x.contiguous(memory_format=torch.channels_last) for x in part]
    wide, steps = t.table("adam", False, narrow=False)
    take(wide, "adam", t.grads)
    expected = [w.clone() for w in t.wide]
    t.wide = [halves.joined(r, b) for r, b in zip(t.rounded, t.remainders, strict=True)]
    take(t.table("adam", split, narrow=True)[0], "adam", t.grads)
    for i, weight in enumerate(expected):
        noises = oracle.noise(steps[i], t.grads[i])
        for state, narrow, noise in zip(t.wide_state, t.narrow_state, noises, strict=True):
            assert same_bits(narrow[i], oracle.by_chance(state[i], noise))
        got = halves.joined(t.rounded[i], t.remainders[i]) if split else t.wide[i]
        assert same_bits(got, halves.joined(*halves.split(weight)) if split else weight)


def test_a_second_moment_goes_on_decaying() -> None:
    t = Tensors("adam", torch.bfloat16, [(20_000,)])
    t.narrow_state[1] = [torch.ones(20_000, dtype=torch.bfloat16)]
    table, _ = t.table("adam", True, narrow=True)
    hyper = FORMULAS["adam"](lr=0.0, beta2=0.999)
    for _ in range(100):
        table.step([torch.zeros(20_000, dtype=torch.bfloat16)], [False], [hyper])
    assert abs(t.narrow_state[1][0].float().mean().item() - 0.999**100) < 1e-3  # to nearest it would still be 1


def test_a_skipped_step_changes_nothing() -> None:
    t = Tensors("adam", torch.bfloat16, SHAPES)
    table, steps = t.table("adam", True, narrow=True)
    everything = [steps, *t.rounded, *t.remainders, *t.narrow_state[0], *t.narrow_state[1]]
    before = [x.clone() for x in everything]
    take(table, "adam", t.grads, found_inf=torch.tensor(1.0))
    assert all(map(torch.equal, everything, before))


@pytest.mark.parametrize(
    ("formula", "weight", "copy", "state1", "state2", "text"),
    [
        ("adam", torch.float16, REMAINDER, torch.float32, torch.float32, "only bfloat16 weights have"),
        ("adam", torch.float32, REMAINDER, torch.float32, torch.float32, "only bfloat16 weights have"),
        (
            "adam",
            torch.bfloat16,
            torch.int32,
            torch.float32,
            torch.float32,
            "int16 or uint8 for remainders",
        ),
        ("adam", torch.float32, None, torch.bfloat16, torch.float32, "both moments must have one type"),
        ("adam", torch.float32, None, torch.float16, torch.float16, "must be float32, bfloat16, or uint8"),
        ("adagrad", torch.float32, None, torch.bfloat16, None, "must be float32"),
        ("lamb", torch.float32, None, torch.bfloat16, torch.bfloat16, "must be float32"),
    ],
)
def test_what_cannot_be_stepped_is_refused(formula, weight, copy, state1, state2, text) -> None:
    def zeros(dtype: torch.dtype | None) -> list[Tensor | None]:
        return [None if dtype is None else torch.zeros(4, dtype=dtype)]

    with pytest.raises(AmpValueError, match=text):
        kernels.step_table(
            formula, [torch.zeros(4, dtype=weight)], zeros(copy), zeros(state1), zeros(state2), [0], torch.zeros(1)
        )
