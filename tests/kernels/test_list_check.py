"""Pass 1 of a step: one object, called again and again."""

import math
from types import SimpleNamespace

import pytest
import torch

from amp_engine import kernels
from amp_engine.errors import AmpValueError
from amp_engine.kernels import choice

from . import oracle
from .lists import FLOATS, Arena, copies, same_bits

SCALE = 3000.0


def run(list_check, tensors, outputs=None):
    found_inf, norm = torch.tensor(0.0), torch.tensor(math.nan)
    checks = list_check.run(tensors, outputs, torch.tensor(SCALE), found_inf, norm)
    return checks, found_inf.item(), norm.item()


def test_again_and_again_over_changing_lists():
    arena, list_check = Arena(), kernels.ListCheck()
    for sizes in ((1, 31, 40000), (1, 31, 40000), (5,), (), (32768, 0, 7, 65537)):
        tensors = [arena.randn(n, FLOATS[i % 3]) for i, n in enumerate(sizes)]
        if len(tensors) > 2:
            tensors[1] = None
        present = [t for t in tensors if t is not None]
        checks, found_inf, norm = run(list_check, tensors)
        assert found_inf == 0.0
        assert norm == pytest.approx(oracle.norm(present) / SCALE, rel=1e-6)
        sums = [0.0 if t is None else oracle.sum_squares(t) for t in tensors]
        assert checks.sum_squares.tolist() == pytest.approx(sums, rel=1e-6)
        assert checks.largest.tolist() == [0.0 if t is None else oracle.largest(t) for t in tensors]
        assert not checks.nonfinite.any()


def test_only_what_has_an_output_is_written():
    arena, list_check = Arena(), kernels.ListCheck()
    tensors = [arena.randn(33, dtype) for dtype in (*FLOATS, torch.float32)]
    before = copies(tensors)
    run(list_check, tensors, [tensors[0], None, tensors[2], None])
    inv_scale = torch.tensor(SCALE).double().reciprocal().float()
    for i, (t, b) in enumerate(zip(tensors, before, strict=True)):
        assert same_bits(t, (b.float() * inv_scale).to(b.dtype) if i in (0, 2) else b)
    assert arena.is_intact()


def test_multiplied_in_float32_and_rounded_once():
    arena, list_check = Arena(), kernels.ListCheck()
    tensors = [None if dtype is None else arena.randn(40000, dtype) for dtype in (*FLOATS, None, *FLOATS)]
    before, factor = copies([t for t in tensors if t is not None]), torch.tensor(0.3)
    versions = [t._version for t in tensors if t is not None]
    list_check.multiply_(tensors, factor)
    present = [t for t in tensors if t is not None]
    for t, b in zip(present, before, strict=True):
        assert same_bits(t, (b.float() * factor).to(b.dtype))
    assert [t._version for t in present] == [version + 1 for version in versions]
    assert arena.is_intact()


def test_nothing_is_multiplied_of_a_list_that_is_refused():
    tensors = [torch.ones(3), torch.ones(3, dtype=torch.float64)]
    with pytest.raises(AmpValueError, match=r"\[1\] is a"):
        kernels.ListCheck().multiply_(tensors, torch.tensor(2.0))
    assert torch.equal(tensors[0], torch.ones(3))


def test_each_device_has_a_check_of_its_own(monkeypatch):
    """What a GPU keeps between calls is of its own tensors, and the list of another one would put it out of date."""
    made = []

    class Check:
        def __init__(self):
            self.devices = []
            made.append(self)

        def multiply_(self, tensors, factor):
            self.devices.append(factor.device.type)

    for device in ("cpu", "meta"):
        monkeypatch.setitem(choice.NATIVE, device, SimpleNamespace(ListCheck=Check))
    list_check = kernels.ListCheck()
    for device in ("cpu", "meta") * 2:
        list_check.multiply_([], torch.empty((), device=device))
    assert [check.devices for check in made] == [["cpu"] * 2, ["meta"] * 2]


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_flag_is_set_and_never_taken_back(bad):
    list_check, found_inf = kernels.ListCheck(), torch.tensor(0.0)
    for value, flag in ((1.0, 0.0), (bad, 1.0), (1.0, 1.0)):
        list_check.run([torch.full((9,), value)], None, torch.tensor(1.0), found_inf, torch.tensor(0.0))
        assert found_inf.item() == flag


def test_a_list_that_is_not_walked_is_refused():
    tensors = [torch.ones(3), torch.ones(3, dtype=torch.float64)]
    with pytest.raises(AmpValueError, match=r"\[1\] is"):
        run(kernels.ListCheck(), tensors)
    with pytest.raises(AmpValueError, match="has 1 entries, but"):
        run(kernels.ListCheck(), tensors[:1] * 2, tensors[:1])
