"""The CPU kernels of every instruction set, with copies written through the caches and past them, give the same bits.

Run as a module, this is the child that computes with what AMP_ENGINE_CPU asks for.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from amp_engine import kernels
from amp_engine.kernels import FORMULAS, _native, tensor_lists

from .conftest import NATIVE
from .lists import FLOATS, Arena, Rows, bits, rows, same_values
from .test_blocks import SHAPES, Tensors
from .test_steps import ARGUMENTS, SCALE, norm_of, step

SETS = ("portable", "avx2", "avx512")
ROOT = Path(__file__).resolve().parents[2]


def at(values: Tensor, offset: int) -> Tensor:
    """A copy of `values` that begins `offset` elements after an address as torch allocates it."""
    return torch.cat([values.new_zeros(offset), values])[offset:]


def streamed_rows() -> Rows:
    """Copies at aligned and at odd addresses, of more than a chunk and of odd ends."""
    arena = Arena()
    r = rows(arena, SCALE)
    r.copies = [None if c is None else at(c, (0, 0, 1, 8)[i % 4]) for i, c in enumerate(r.copies)]
    return r


def stepped(formula: str, stream_copies: bool) -> list[Tensor]:
    """Return the tensors that two steps write, of a table that writes its copies so."""
    r = streamed_rows()
    second = r.second if formula in ("adam", "lamb") else [None] * 36
    steps = _native.module.StepTable(
        formula, r.params, r.copies, r.first, second, [0] * 36, r.steps, r.norms, stream_copies=stream_copies
    )
    for _ in range(2):
        steps.step(
            r.grads,
            [True] * 36,
            [FORMULAS[formula](**ARGUMENTS[formula])],
            inv_scale=torch.tensor(1 / SCALE),
        )
    return r.tensors()


def unscaled(stream_gradients: bool) -> list[Tensor]:
    """Return the float32 gradients that a look writes so, of parameters whose gradients are float16."""
    params = [torch.nn.Parameter(torch.zeros(n, dtype=torch.float16)) for n in (40007, 65536, 9, 0, 1)]
    for param in params:
        param.grad_dtype = None
        param.grad = Arena(seed=param.numel()).randn(param.numel(), torch.float16, 1e-3)
    check, handle, plain = _native.module.ListCheck(stream_gradients), tensor_lists.params(params), bytes(len(params))
    assert check.look(handle, plain, True, False, torch.tensor(3000.0), torch.zeros(()), torch.zeros(()), None)
    return [param.grad for param in params]


def outcome() -> list[Tensor]:
    """Return what every operation writes and returns."""
    results = []
    for formula, h in ARGUMENTS.items():
        r = rows(Arena(), SCALE)
        step(formula, r, h, inv_scale=torch.tensor(1 / SCALE))
        results += [*r.tensors(), *stepped(formula, stream_copies=True)]
    results += unscaled(stream_gradients=True)
    for formula in ("adam", "sgd"):
        for masters in ("24bit", "FP32"):
            for special in (False, True):
                narrow = Tensors(formula, SHAPES, masters, is_in_blocks=True, special=special)
                for _ in range(2):
                    narrow.take()
                results += narrow.written()
    arena = Arena(seed=1)
    # Beyond float16's range too, and below its normal numbers.
    r = rows(arena, 1e5)
    tiny = [arena.randn(t.numel(), t.dtype, 1e-7) for t in r.grads]
    for xs in (r.grads, tiny):
        results += [*kernels.check(xs), norm_of(xs)]
        for dtype in FLOATS:
            outputs = [arena.zeros(x.numel(), dtype) for x in xs]
            kernels.cast_copy_(outputs, xs)
            sums = [arena.zeros(x.numel(), dtype) for x in xs]
            kernels.axpby_(sums, xs, r.params, torch.tensor(0.3), torch.tensor(-1.7))
            results += [*outputs, *sums]
    return results


@pytest.mark.slow
@NATIVE
def test_every_instruction_set_gives_the_same_bits(tmp_path):
    best = _native.module.build_info()["cpu_capability"]
    mine = outcome()
    for name in SETS[: SETS.index(best)]:
        line = [sys.executable, "-m", "tests.kernels.test_instruction_sets", str(tmp_path / name)]
        subprocess.run(line, env={**os.environ, "AMP_ENGINE_CPU": name}, cwd=ROOT, check=True)
        used, theirs = torch.load(tmp_path / name)
        assert used == name
        assert len(theirs) == len(mine)
        assert all(map(same_values, mine, theirs))


@NATIVE
@pytest.mark.parametrize("formula", ARGUMENTS)
def test_copies_written_past_the_caches_are_the_same(formula):
    for streamed, plain in zip(stepped(formula, True), stepped(formula, False), strict=True):
        assert torch.equal(bits(streamed), bits(plain))


@NATIVE
def test_gradients_written_past_the_caches_are_the_same():
    for streamed, plain in zip(unscaled(True), unscaled(False), strict=True):
        assert streamed.dtype is torch.float32
        assert torch.equal(bits(streamed), bits(plain))


if __name__ == "__main__":
    torch.save((_native.module.build_info()["cpu_capability"], outcome()), sys.argv[1])
