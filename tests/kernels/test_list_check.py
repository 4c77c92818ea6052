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


@pytest.mark.parametrize("value", [1.0, math.inf])
def test_a_scale_is_updated_after_the_check_as_by_itself(value):
    tensors, results = [torch.full((9,), value), None], []
    for together in (True, False):
        scale, tracker, found_inf, norm = (
            torch.tensor(4.0),
            torch.tensor(2, dtype=torch.int32),
            torch.zeros(()),
            torch.zeros(()),
        )
        inverse, outcome, loss = torch.zeros(()), torch.zeros(4), torch.tensor(0.25)
        update = (scale, tracker, found_inf, 2.0, 0.5, 3, 1.0, 16.0, None, 1, True, inverse, outcome, None, loss)
        kernels.ListCheck().run(tensors, None, scale, found_inf, norm, update if together else None)
        if not together:
            kernels.update_scale_(*update)
        results.append([t.item() for t in (scale, tracker, found_inf, norm, inverse)] + outcome.tolist())
    assert results[0] == results[1]
    assert results[0][5:] == [float(value == math.inf), 2.0 if value == math.inf else 8.0, 4.0, 0.25]


def test_an_update_is_refused_by_name():
    tensors, scale = [torch.full((9,), 2.0)], torch.tensor(4.0)
    update = (scale, torch.zeros(()), torch.zeros(()), 2.0, 0.5, 3, 1.0, 16.0, None, 1, True, None, None, None, None)
    with pytest.raises(AmpValueError, match="growth_tracker is"):
        kernels.ListCheck().run(tensors, tensors, scale, torch.zeros(()), torch.zeros(()), update)


def test_only_what_has_an_output_is_written():
    arena, list_check = Arena(), kernels.ListCheck()
    tensors = [arena.randn(33, dtype) for dtype in (*FLOATS, torch.float32)]
    before = copies(tensors)
    run(list_check, tensors, [tensors[0], None, tensors[2], None])
    inv_scale = torch.tensor(SCALE).double().reciprocal().float()
    for i, (t, b) in enumerate(zip(tensors, before, strict=True)):
        assert same_bits(t, (b.float() * inv_scale).to(b.dtype) if i in (0, 2) else b)
    assert arena.is_intact()


@pytest.mark.parametrize(("norm", "max_norm"), [(3.0, 0.9), (0.5, 2.0), (0.0, 1.0), (math.inf, 1.0), (1e-7, 1e-8)])
def test_clipped_in_float32_and_rounded_once(norm, max_norm):
    arena, list_check = Arena(), kernels.ListCheck()
    tensors = [None if dtype is None else arena.randn(40000, dtype) for dtype in (*FLOATS, None, *FLOATS)]
    before = copies([t for t in tensors if t is not None])
    factor = torch.tensor(min(1.0, max_norm / (torch.tensor(norm).item() + 1e-6)))
    versions = [t._version for t in tensors if t is not None]
    list_check.clip_(tensors, torch.tensor(norm), max_norm)
    present = [t for t in tensors if t is not None]
    for t, b in zip(present, before, strict=True):
        assert same_bits(t, (b.float() * factor).to(b.dtype))
    assert [t._version for t in present] == [version + 1 for version in versions]
    assert arena.is_intact()


def test_nothing_is_clipped_of_a_list_that_is_refused():
    tensors = [torch.ones(3), torch.ones(3, dtype=torch.float64)]
    with pytest.raises(AmpValueError, match=r"\[1\] is a"):
        kernels.ListCheck().clip_(tensors, torch.tensor(2.0), 1.0)
    assert torch.equal(tensors[0], torch.ones(3))


def test_each_device_has_a_check_of_its_own(monkeypatch):
    """A check keeps tensors on its GPU between calls, which the list of another GPU would put out of date."""
    made = []

    class Check:
        def __init__(self):
            self.devices = []
            made.append(self)

        def clip_(self, tensors, norm, max_norm):
            self.devices.append(norm.device.type)

    for device in ("cpu", "meta"):
        monkeypatch.setitem(choice.NATIVE, device, SimpleNamespace(ListCheck=Check))
    list_check = kernels.ListCheck()
    for device in ("cpu", "meta") * 2:
        list_check.clip_([], torch.empty((), device=device), 1.0)
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
