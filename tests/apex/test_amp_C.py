# ruff: noqa: N999 - named after amp_C
"""`amp_C`, operation by operation, against the formulas of its docstrings in float64."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from amp_engine.apex import amp_C
from amp_engine.apex.multi_tensor_apply import multi_tensor_applier
from amp_engine.errors import AmpValueError
from tests.kernels.conftest import backend as backend

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
FLOATS = (F32, F16, BF16)
SHAPES = ((3, 5), (0,), (), (40001,), (2, 0))
MODES = pytest.mark.parametrize("mode", [0, 1], ids=["l2", "decoupled"])
# Gradients, parameters, state.
STEP_TYPES = pytest.mark.parametrize(
    "dtypes", [(F32, F32, F32), (F16, F16, F32), (BF16, BF16, F32), (F16, F32, F32), (F64, F64, F32)], ids=str
)
SAME_TYPES = pytest.mark.parametrize("dtypes", [(F32, F32, F32), (F16, F16, F16), (F64, F64, F64)], ids=str)


def flag(value: int = 0) -> Tensor:
    return torch.tensor([value], dtype=torch.int32)


def randn(dtype: torch.dtype = F32, seed: int = 0, scale: float = 1.0, shapes: Any = SHAPES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(shape, generator=generator) * scale).to(dtype) for shape in shapes]


def positive(dtype: torch.dtype = F32, seed: int = 0, scale: float = 1.0) -> list[Tensor]:
    return [t.abs().add(0.01) for t in randn(dtype, seed, scale)]


def f64(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.detach().double() for t in tensors]


def clones(lists: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    return [[t.clone() for t in tensors] for tensors in lists]


def assert_near(actual: Sequence[Tensor], truth: Sequence[Tensor], slack: float = 1.0) -> None:
    """Within the rounding of the type, and of a few float32 operations."""
    for i, (a, t) in enumerate(zip(actual, truth, strict=True)):
        eps = max(torch.finfo(a.dtype).eps, 2e-6)
        torch.testing.assert_close(
            a.double(), t.reshape(a.shape), rtol=slack * eps, atol=slack * max(eps * 1e-2, 1e-6), msg=f"{i}: {a} {t}"
        )


def assert_same(actual: Any, expected: Any) -> None:
    for a, e in zip(actual, expected, strict=True):
        if isinstance(a, Tensor):
            assert torch.equal(a.nan_to_num(0.5), e.nan_to_num(0.5))
        else:
            assert_same(a, e)


def norm(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(t.double().square().sum().item() for t in tensors))


def call(op: Any, noop: Tensor, lists: Any, *args: Any) -> Any:
    return multi_tensor_applier(op, noop, lists, *args)


@pytest.mark.parametrize("into", FLOATS, ids=str)
@pytest.mark.parametrize("given", FLOATS, ids=str)
def test_scale_multiplies_every_type_into_every_type(given, into):
    ins, outs, noop = randn(given), randn(into, seed=1), flag()
    assert call(amp_C.multi_tensor_scale, noop, [ins, outs], 0.3) is None
    assert_near(outs, [t * 0.3 for t in f64(ins)])
    assert noop.tolist() == [0]


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 3])
def test_scale_sets_the_flag_for_an_input_that_is_not_finite_and_writes_on(bad, place):
    ins, outs, noop = randn(F16), randn(seed=1), flag()
    ins[place].view(-1)[-1] = bad
    call(amp_C.multi_tensor_scale, noop, [ins, outs], 0.5)
    assert noop.tolist() == [1]
    assert_same(outs, [t.float() * 0.5 for t in ins])


def test_scale_does_not_set_the_flag_for_an_output_that_overflows():
    outs, noop = [torch.zeros(2, dtype=F16)], flag()
    call(amp_C.multi_tensor_scale, noop, [[torch.full((2,), 1e5)], outs], 1.0)
    assert outs[0].isinf().all()
    assert noop.tolist() == [0]


def test_writers_never_clear_the_flag():
    noop = flag(1)
    call(amp_C.multi_tensor_scale, noop, [randn(), randn()], 1.0)
    call(amp_C.multi_tensor_axpby, noop, [randn(), randn(), randn()], 1.0, 1.0, -1)
    call(amp_C.multi_tensor_l2norm, noop, [randn()], True)
    assert noop.tolist() == [1]


@pytest.mark.parametrize("dtypes", [(F16, F32, F32), (F32, F32, F32), (F16, F16, F16), (BF16, F32, BF16)], ids=str)
def test_axpby_adds_two_scaled_lists(dtypes):
    x, y, out = (randn(dtype, seed) for seed, dtype in enumerate(dtypes))
    call(amp_C.multi_tensor_axpby, flag(), [x, y, out], 0.25, -3.0, -1)
    assert_near(out, [0.25 * a - 3.0 * b for a, b in zip(f64(x), f64(y), strict=True)], slack=2)


@pytest.mark.parametrize(
    ("where", "to_check", "is_set"), [(0, -1, 1), (0, 0, 1), (0, 1, 0), (1, -1, 1), (1, 0, 0), (1, 1, 1)]
)
def test_axpby_looks_at_the_arguments_that_it_is_told_to_look_at(where, to_check, is_set):
    lists, noop = [randn(), randn(seed=1)], flag()
    lists[where][0][0, 0] = math.nan
    # The output is y itself, which is judged as it came.
    call(amp_C.multi_tensor_axpby, noop, [*lists, lists[1]], 1.0, 1.0, to_check)
    assert noop.tolist() == [is_set]


def test_axpby_refuses_another_argument_to_check():
    with pytest.raises(AmpValueError, match=r"arg_to_check=2.  Use -1 \(both\), 0 \(x\) or 1 \(y\)"):
        call(amp_C.multi_tensor_axpby, flag(), [randn(), randn(), randn()], 1.0, 1.0, 2)


@pytest.mark.parametrize("op", [amp_C.multi_tensor_l2norm, amp_C.multi_tensor_l2norm_mp])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_l2norm_is_over_all_and_on_request_over_each(op, dtype):
    xs, noop = randn(dtype), flag()
    total, each = call(op, noop, [xs], True)
    assert total.shape == (1,)
    assert total.dtype == each.dtype == F32
    assert total.item() == pytest.approx(norm(xs), rel=1e-6)
    assert each.tolist() == pytest.approx([norm([x]) for x in xs], rel=1e-6)
    assert noop.tolist() == [0]
    for given in ((), (False,), (None,)):
        assert call(op, noop, [xs], *given)[1].shape == (0,)


def test_l2norm_of_no_tensors_is_zero():
    total, each = call(amp_C.multi_tensor_l2norm, flag(), [[]], True)
    assert (total.tolist(), each.tolist()) == ([0.0], [])


NORMS = {
    "multi_tensor_l2norm": lambda noop, xs: call(amp_C.multi_tensor_l2norm, noop, [xs], True),
    "multi_tensor_l2norm_mp": lambda noop, xs: call(amp_C.multi_tensor_l2norm_mp, noop, [xs], True),
    "multi_tensor_l2norm_scale": lambda noop, xs: call(
        amp_C.multi_tensor_l2norm_scale, noop, [xs, [t.clone() for t in xs]], 0.5, True
    ),
    "multi_tensor_unscale_l2norm": lambda noop, xs: call(
        amp_C.multi_tensor_unscale_l2norm, noop, [xs], torch.tensor([0.5]), True
    ),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_norms_set_the_flag_for_what_is_not_finite(name, bad):
    xs, noop = randn(), flag()
    xs[3][40000] = bad
    total, each = NORMS[name](noop, xs)
    assert noop.tolist() == [1]
    assert not total.isfinite().item()
    assert each.isfinite().tolist() == [True, True, True, False, True]


def test_l2norm_mp_returns_zeros_where_the_flag_was_set():
    noop = flag(1)
    total, each = call(amp_C.multi_tensor_l2norm_mp, noop, [randn()], True)
    assert (total.tolist(), each.tolist()) == ([0.0], [0.0] * len(SHAPES))
    assert call(amp_C.multi_tensor_l2norm, noop, [randn()])[0].item() > 0


@pytest.mark.parametrize(("given", "into"), [(F32, F32), (F16, F32), (F32, F16)], ids=str)
def test_l2norm_scale_writes_and_measures_the_scaled_values(given, into):
    ins, outs = randn(given), randn(into, seed=1)
    total, each = call(amp_C.multi_tensor_l2norm_scale, flag(), [ins, outs], -0.3, True)
    scaled = [t * -0.3 for t in f64(ins)]
    assert_near(outs, scaled)
    assert total.tolist() == pytest.approx([norm(scaled)], rel=1e-6)
    assert each.tolist() == pytest.approx([norm([t]) for t in scaled], rel=1e-6)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_unscale_l2norm_leaves_its_tensors_alone(dtype):
    xs = randn(dtype, scale=100)
    before = [t.clone() for t in xs]
    total, each = call(amp_C.multi_tensor_unscale_l2norm, flag(), [xs], torch.tensor([1 / 128]), True)
    assert total.tolist() == pytest.approx([norm(xs) / 128], rel=1e-6)
    assert each.tolist() == pytest.approx([norm([x]) / 128 for x in xs], rel=1e-6)
    assert_same(xs, before)


SGD = {"wd": 0.1, "momentum": 0.9, "dampening": 0.3, "lr": 0.5, "nesterov": False, "after": False, "scale": 0.25}


def sgd_truth(lists, first_run, *, wd, momentum, dampening, lr, nesterov, after, scale):
    for grad, p, m in zip(*(f64(tensors) for tensors in lists[:3]), strict=True):
        g = grad * scale + (0 if after else wd * p)
        if momentum:
            m = g if first_run else momentum * m + (1 - dampening) * g
            g = g + momentum * m if nesterov else m
        if after:
            g = g + wd * p
        yield p - lr * g, m


@pytest.mark.parametrize(
    "dtypes", [(F16, F16, F16), (F32, F32, F32), (F16, F32, F32, F16), (F32, F32, F32, F16), (BF16, F32, F32, BF16)]
)
@pytest.mark.parametrize("change", [{}, {"nesterov": True}, {"after": True}, {"momentum": 0.0}, {"wd": 0.0}], ids=str)
@pytest.mark.parametrize("first_run", [True, False], ids=["first", "later"])
def test_sgd_is_the_formula(dtypes, change, first_run):
    h = {**SGD, **change}
    lists = [randn(dtype, seed) for seed, dtype in enumerate(dtypes)]
    truth = list(sgd_truth(lists, first_run, **h))
    args = (h["wd"], h["momentum"], h["dampening"], h["lr"], h["nesterov"], first_run, h["after"], h["scale"])
    call(amp_C.multi_tensor_sgd, flag(), lists, *args)
    assert_near(lists[1], [p for p, _ in truth])
    assert_near(lists[2], [m for _, m in truth])
    if len(lists) == 4:
        assert_same(lists[3], [p.to(dtypes[3]) for p in lists[1]])


ADAM = (1e-2, 0.9, 0.99, 1e-6)


def adam_truth(lists, step, mode, corrected, wd, factor=1.0, lr=ADAM[0]):
    _, b1, b2, eps = ADAM
    c1, c2 = (1 - b1**step, 1 - b2**step) if corrected else (1, 1)
    for g, p, m, v in zip(*(f64(tensors) for tensors in lists), strict=True):
        g = g * factor + (wd * p if mode == 0 else 0)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        u = m / c1 / ((v / c2).sqrt() + eps) + (wd * p if mode == 1 else 0)
        yield p - lr * u, m, v


def adam_lists(dtypes):
    return [randn(dtypes[0]), randn(dtypes[1], 1), randn(dtypes[2], 2), positive(dtypes[2], 3)]


@STEP_TYPES
@MODES
@pytest.mark.parametrize(("step", "corrected"), [(1, 1), (7, 1), (7, 0)])
def test_adam_is_the_formula_and_ignores_the_flag(dtypes, mode, step, corrected):
    lists, noop = adam_lists(dtypes), flag(1)
    grads = [g.clone() for g in lists[0]]
    truth = list(adam_truth(lists, step, mode, corrected, 0.1))
    call(amp_C.multi_tensor_adam, noop, lists, *ADAM, step, mode, corrected, 0.1)
    for tensors, true in zip(lists[1:], zip(*truth, strict=True), strict=True):
        assert_near(tensors, true)
    assert_same(lists[0], grads)
    assert noop.tolist() == [1]


def test_adam_takes_its_step_as_a_tensor_of_integers():
    lists, others = (adam_lists((F32, F32, F32)) for _ in range(2))
    call(amp_C.multi_tensor_adam, flag(), lists, *ADAM, 7, 0, 1, 0.1)
    call(amp_C.multi_tensor_adam, flag(), others, *ADAM, torch.tensor(7), 0, 1, 0.1)
    for tensors, same in zip(lists, others, strict=True):
        assert_same(tensors, same)


def capturable(step=7, lr=ADAM[0], inv_scale=1 / 64):
    scalars = (torch.tensor(lr), *ADAM[1:], torch.tensor([step], dtype=torch.int32))
    return scalars, torch.tensor([inv_scale])


@STEP_TYPES
@MODES
def test_capturable_adam_takes_device_scalars_and_writes_unscaled_gradients_back(dtypes, mode):
    lists = adam_lists(dtypes)
    true_grads = [g / 64 for g in f64(lists[0])]
    truth = list(adam_truth(lists, 7, mode, 1, 0.1, 1 / 64))
    scalars, inv_scale = capturable()
    call(amp_C.multi_tensor_adam_capturable, flag(), lists, *scalars, mode, 1, 0.1, inv_scale)
    assert_near(lists[0], true_grads)
    for tensors, true in zip(lists[1:], zip(*truth, strict=True), strict=True):
        assert_near(tensors, true)
    assert scalars[4].tolist() == [7]


@pytest.mark.parametrize("half", [F16, BF16], ids=str)
def test_capturable_adam_steps_masters_and_rounds_them_into_the_parameters(half):
    grads, params, m, v = adam_lists((half, half, F32))
    masters = randn(seed=9)
    truth = list(adam_truth([grads, masters, m, v], 7, 1, 1, 0.1, 1 / 64))
    scalars, inv_scale = capturable()
    lists = [grads, params, m, v, masters]
    call(amp_C.multi_tensor_adam_capturable_master, flag(), lists, *scalars, 1, 1, 0.1, inv_scale)
    assert_near(masters, [p for p, _, _ in truth])
    assert_same(params, [p.to(half) for p in masters])


def lamb_truth(lists, step, mode, corrected, wd, averaging, norm_of_all, max_norm, nvlamb, factor=1.0):
    lr, b1, b2, eps = ADAM
    c1, c2 = (1 - b1**step, 1 - b2**step) if corrected else (1, 1)
    clip = max(1.0, norm_of_all / max_norm) if max_norm else 1.0
    for g, p, m, v in zip(*(f64(tensors) for tensors in lists), strict=True):
        g = g * factor / clip + (wd * p if mode == 0 else 0)
        m, v = b1 * m + (1 - b1 if averaging else 1) * g, b2 * v + (1 - b2) * g * g
        u = m / c1 / ((v / c2).sqrt() + eps) + (wd * p if mode == 1 else 0)
        both = norm([p]) > 0 and norm([u]) > 0 and (nvlamb or wd != 0)
        yield u, p - lr * (norm([p]) / norm([u]) if both else 1.0) * u, m, v


@pytest.mark.parametrize("dtypes", [(F32, F32, F32), (F16, F16, F16), (BF16, BF16, F32)], ids=str)
@MODES
@pytest.mark.parametrize(
    ("wd", "averaging", "corrected", "max_norm", "nvlamb"),
    [(0.1, 1, 1, 1.0, False), (0.0, 0, 1, 1e9, False), (0.0, 1, 0, 0.0, True)],
)
def test_lamb_is_the_formula_and_leaves_the_update_in_the_gradients(
    dtypes, mode, wd, averaging, corrected, max_norm, nvlamb
):
    lists = adam_lists(dtypes)
    global_norm = norm(lists[0])
    truth = list(lamb_truth(lists, 3, mode, corrected, wd, averaging, global_norm, max_norm, nvlamb))
    args = (3, corrected, wd, averaging, mode, torch.tensor([global_norm]), max_norm, nvlamb)
    call(amp_C.multi_tensor_lamb, flag(1), lists, *ADAM, *args)
    for tensors, true in zip(lists, zip(*truth, strict=True), strict=True):
        # A half state is rounded before it becomes the update.
        assert_near(tensors, true, slack=2)


@pytest.mark.parametrize("half", [F16, BF16], ids=str)
@pytest.mark.parametrize("has_copies", [True, False])
def test_lamb_mp_takes_device_scalars(half, has_copies):
    lists = adam_lists((half if has_copies else F32, F32, F32))
    copies = [randn(half, 8)] if has_copies else []
    global_norm = norm(lists[0]) / 64
    truth = list(lamb_truth(lists, 7, 1, 1, 0.1, 1, global_norm, 2.0, False, 1 / 64))
    scalars, inv_scale = capturable()
    tensors = (torch.tensor([global_norm]), torch.tensor(2.0), False, torch.zeros(1), inv_scale)
    call(amp_C.multi_tensor_lamb_mp, flag(), [*lists, *copies], *scalars, 1, 0.1, 1, 1, *tensors)
    for tensors, true in zip(lists, zip(*truth, strict=True), strict=True):
        assert_near(tensors, true, slack=2)
    if has_copies:
        assert_same(copies[0], [p.to(half) for p in lists[1]])


def test_lamb_mp_without_a_maximal_norm_does_not_clip():
    lists = adam_lists((F32, F32, F32))
    truth = list(lamb_truth(lists, 7, 1, 1, 0.1, 1, 5.0, 0.0, False))
    scalars, _ = capturable()
    tensors = (torch.tensor(5.0), torch.zeros(()), None, torch.zeros(()), torch.ones(()))
    call(amp_C.multi_tensor_lamb_mp, flag(), lists, *scalars, 1, 0.1, 1, 1, *tensors)
    for tensors, true in zip(lists, zip(*truth, strict=True), strict=True):
        assert_near(tensors, true, slack=2)


def novograd_truth(lists, norms, step, corrected, wd, averaging, mode, norm_type):
    lr, b1, b2, eps = ADAM
    c1, c2 = (1 - b1**step, math.sqrt(1 - b2**step)) if corrected else (1, 1)
    b3 = 1 - b1 if averaging else 1
    for g, p, m, gn in zip(*(f64(tensors) for tensors in lists), norms.double().tolist(), strict=True):
        if norm_type == 2:
            gn = math.sqrt(b2 * gn**2 + (1 - b2) * norm([g]) ** 2)
        else:
            gn = b2 * gn + (1 - b2) * (g.abs().max().item() if g.numel() else 0.0)
        if mode == 0:
            m = b1 * m + b3 * (g / (gn / c2 + eps) + wd * p)
            p = p - lr * (m / c1)
        else:
            m = b1 * m + b3 * g
            p = p - lr * (m / c1 / (gn / c2 + eps) + wd * p)
        yield p, m, gn


@STEP_TYPES
@MODES
@pytest.mark.parametrize("norm_type", [0, 2])
@pytest.mark.parametrize(("step", "corrected", "averaging"), [(1, 1, 1), (5, 1, 0), (5, 0, 1)])
def test_novograd_is_the_formula_and_blends_the_norms(dtypes, mode, norm_type, step, corrected, averaging):
    lists = [randn(dtype, seed) for seed, dtype in enumerate(dtypes)]
    norms, noop = torch.tensor([1.0, 0.5, 2.0, 0.0, 3.0]), flag()
    truth = list(novograd_truth(lists, norms, step, corrected, 0.1, averaging, mode, norm_type))
    args = (norms, *ADAM, step, corrected, 0.1, averaging, mode, norm_type)
    call(amp_C.multi_tensor_novograd, noop, lists, *args)
    assert_near(lists[1], [p for p, _, _ in truth])
    assert_near(lists[2], [m for _, m, _ in truth])
    assert norms.tolist() == pytest.approx([gn for _, _, gn in truth], rel=1e-6)
    assert noop.tolist() == [0]


@pytest.mark.parametrize("dtype", [F32, F64])
def test_novograd_sets_the_flag_for_gradients_that_are_not_finite(dtype):
    lists, noop = [randn(dtype), randn(dtype), randn()], flag()
    lists[0][0][0, 0] = math.inf
    call(amp_C.multi_tensor_novograd, noop, lists, torch.ones(5), *ADAM, 2, 1, 0.1, 1, 1, 2)
    assert noop.tolist() == [1]


def test_float64_gradients_whose_squares_overflow_are_finite_for_novograd():
    noop, lists = flag(), [[torch.full((3,), 1e200, dtype=F64)] for _ in range(3)]
    call(amp_C.multi_tensor_novograd, noop, lists, torch.ones(1), *ADAM, 2, 1, 0.1, 1, 1, 2)
    assert noop.tolist() == [0]


@SAME_TYPES
@MODES
def test_adagrad_is_the_formula(dtypes, mode):
    lists = [randn(dtypes[0]), randn(dtypes[1], 1), positive(dtypes[2], 2)]
    truth = []
    for g, p, h in zip(*(f64(tensors) for tensors in lists), strict=True):
        g = g + (0.1 * p if mode == 0 else 0)
        h = h + g * g
        truth.append((p - 0.5 * (g / (h.sqrt() + 1e-6) + (0.1 * p if mode == 1 else 0)), h))
    call(amp_C.multi_tensor_adagrad, flag(1), lists, 0.5, 1e-6, mode, 0.1)
    assert_near(lists[1], [p for p, _ in truth])
    assert_near(lists[2], [h for _, h in truth])


def readers():
    scalars, inv_scale = capturable()
    lamb = (*scalars, 1, 0.1, 1, 1, torch.tensor(5.0), torch.tensor(1.0), False)
    return {
        "sgd": (amp_C.multi_tensor_sgd, 4, (0.1, 0.9, 0.0, 0.5, False, True, False, 1.0)),
        "adam_capturable": (amp_C.multi_tensor_adam_capturable, 4, (*scalars, 1, 1, 0.1, inv_scale)),
        "adam_capturable_master": (amp_C.multi_tensor_adam_capturable_master, 5, (*scalars, 1, 1, 0.1, inv_scale)),
        "lamb_mp": (amp_C.multi_tensor_lamb_mp, 5, (*lamb, torch.zeros(()), inv_scale)),
    }


@pytest.mark.parametrize(("name", "dtype"), [*product(readers(), (F32, F16)), ("adam_capturable", F64)])
def test_readers_of_the_flag_write_nothing_where_it_is_set(name, dtype):
    op, n, args = readers()[name]
    own = F64 if dtype is F64 else F32
    lists = [randn(dtype), randn(own, 1), randn(F32, 2), positive(F32, 3), randn(dtype, 4)][:n]
    lists[0][0][0, 0] = math.nan
    before = clones(lists)
    call(op, flag(1), lists, *args)
    assert_same(lists, before)
    call(op, flag(0), lists, *args)
    assert not torch.equal(lists[1][3], before[1][3])


def test_lamb_mp_writes_nothing_where_its_own_found_inf_is_set():
    lists = adam_lists((F32, F32, F32))
    before = clones(lists)
    op, _, args = readers()["lamb_mp"]
    call(op, flag(), lists, *args[:-2], torch.ones(1), args[-1])
    assert_same(lists, before)


def hysteresis_truth(outcomes, scale, tracker, growth, hysteresis=2, interval=3):
    for outcome in outcomes:
        if outcome == "o":
            tracker, growth = tracker - 1, 0
            if tracker <= 0:
                scale *= 0.5
        else:
            tracker, growth = hysteresis, growth + 1
            if growth == interval:
                scale, growth = scale * 2, 0
        yield scale, tracker, growth


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_the_scale_with_hysteresis_falls_after_several_overflows_and_grows_after_an_interval(shape):
    scale, found = torch.full(shape, 8.0), torch.zeros(shape)
    growth, tracker = (torch.full(shape, n, dtype=torch.int32) for n in (0, 2))
    outcomes = "ococcooocccccc"
    for outcome, truth in zip(outcomes, hysteresis_truth(outcomes, 8.0, 2, 0), strict=True):
        found.fill_(outcome == "o")
        assert amp_C.update_scale_hysteresis(scale, growth, tracker, found, 2.0, 0.5, 3, 2) is scale
        assert (scale.item(), tracker.item(), growth.item()) == truth


def test_the_scale_with_hysteresis_never_becomes_zero_nor_infinite():
    scale, found = torch.tensor(1e-37), torch.ones(())
    growth, tracker = torch.zeros((), dtype=torch.int32), torch.ones((), dtype=torch.int32)
    for _ in range(60):
        amp_C.update_scale_hysteresis(scale, growth, tracker, found, 2.0, 0.5, 1, 1)
    assert scale.item() > 0
    scale.fill_(3e38)
    amp_C.update_scale_hysteresis(scale, growth, tracker, found.zero_(), 2.0, 0.5, 1, 1)
    assert scale.item() == pytest.approx(3e38)


LAMB = (*ADAM, 1, 1, 0.1, 1, 1, torch.ones(1), 1.0)
CALLS = {
    "multi_tensor_scale": (2, (1.0,)),
    "multi_tensor_axpby": (3, (1.0, 1.0, -1)),
    "multi_tensor_l2norm": (1, ()),
    "multi_tensor_l2norm_mp": (1, ()),
    "multi_tensor_l2norm_scale": (2, (1.0,)),
    "multi_tensor_unscale_l2norm": (1, (torch.ones(1),)),
    "multi_tensor_sgd": (3, (0.0, 0.9, 0.0, 0.1, False, True, False, 1.0)),
    "multi_tensor_adam": (4, (*ADAM, 1, 1, 1, 0.1)),
    "multi_tensor_adam_capturable": (4, (*capturable()[0], 1, 1, 0.1, torch.ones(1))),
    "multi_tensor_adam_capturable_master": (5, (*capturable()[0], 1, 1, 0.1, torch.ones(1))),
    "multi_tensor_lamb": (4, LAMB),
    "multi_tensor_lamb_mp": (
        4,
        (*capturable()[0], 1, 0.1, 1, 1, torch.ones(1), torch.ones(1), False, torch.zeros(1), torch.ones(1)),
    ),
    "multi_tensor_novograd": (3, (torch.ones(2), *ADAM, 1, 1, 0.1, 1, 1, 2)),
    "multi_tensor_adagrad": (3, (0.1, 1e-6, 1, 0.1)),
}
EVERY_OPERATION = pytest.mark.parametrize("name", CALLS)


def lists_for(name: str) -> list[list[Tensor]]:
    return [[torch.ones(2, 3), torch.ones(4)] for _ in range(CALLS[name][0])]


def assert_refused(name: str, noop: Tensor, lists: Any, message: str) -> None:
    before = clones(lists)
    with pytest.raises(AmpValueError, match=message) as refusal:
        call(getattr(amp_C, name), noop, lists, *CALLS[name][1])
    assert str(refusal.value).startswith(f"{name}: ")
    assert_same(lists, before)
    assert noop.view(-1).tolist()[0] == 0


def test_every_operation_is_tried():
    operations = {name for name in vars(amp_C) if name.startswith("multi_tensor_")}
    assert operations == set(CALLS)
    for name in operations:
        shape = list(inspect.signature(getattr(amp_C, name)).parameters)[:3]
        assert shape == ["chunk_size", "noop_flag", "tensor_lists"]


@EVERY_OPERATION
def test_a_list_of_mixed_types_is_that_of_a_call_for_each_tensor(name):
    n, args = CALLS[name]
    op = getattr(amp_C, name)
    lists = [randn(F32, seed, shapes=[(2, 3), (4,)]) for seed in range(n)]
    lists[-1] = [t.abs() for t in lists[-1]]  # a second moment, or a sum of squares
    for tensors in lists:
        tensors[1] = tensors[1].half()
    mixed = clones(lists)
    call(op, flag(), mixed, *(a.clone() if isinstance(a, Tensor) else a for a in args))
    for i in range(2):
        own = [a[i : i + 1].clone() if isinstance(a, Tensor) and a.shape == (2,) else a for a in args]
        alone = [[tensors[i]] for tensors in lists]
        call(op, flag(), alone, *own)
        assert_same([[tensors[i]] for tensors in mixed], alone)


@EVERY_OPERATION
def test_tensors_in_another_order_in_memory_are_refused_by_list_and_tensor(name):
    last = CALLS[name][0] - 1
    lists = lists_for(name)
    lists[last][0] = torch.ones(3, 4)[:, ::2].t() if last == 0 else torch.ones(3, 2).t()
    assert_refused(name, flag(), lists, rf"tensor_lists\[{last}\]\[0\] is a float32 tensor of shape \[2, 3\]")


@EVERY_OPERATION
def test_a_flag_of_another_type_or_device_is_refused(name):
    assert_refused(name, torch.zeros(1), lists_for(name), "noop_flag is a float32 tensor")
    assert_refused(name, flag().repeat(2), lists_for(name), r"noop_flag is a int32 tensor of shape \[2\]")
    meta = [[t.to("meta") for t in tensors] for tensors in lists_for(name)]
    with pytest.raises(AmpValueError, match="noop_flag is on cpu, but the tensors are on meta"):
        call(getattr(amp_C, name), flag(), meta, *CALLS[name][1])


@EVERY_OPERATION
def test_another_number_of_lists_or_lengths_is_refused(name):
    lists = lists_for(name)
    assert_refused(name, flag(), lists[1:], rf"tensor_lists holds {len(lists) - 1} lists, but takes {len(lists)}: ")
    if len(lists) > 1:
        lists[-1].pop()
        assert_refused(name, flag(), lists, rf"tensor_lists\[{len(lists) - 1}\] has 1 entries, but ")


@EVERY_OPERATION
def test_empty_lists_are_no_work(name):
    args = [torch.ones(0) if isinstance(a, Tensor) and a.shape == (2,) else a for a in CALLS[name][1]]
    noop = flag()
    call(getattr(amp_C, name), noop, [[] for _ in range(CALLS[name][0])], *args)
    assert noop.tolist() == [0]


@pytest.mark.parametrize("name", [n for n in CALLS if "norm" not in n])
def test_a_tensor_that_is_written_twice_is_refused(name):
    lists = lists_for(name)
    written = {"multi_tensor_scale": 1, "multi_tensor_axpby": 2}.get(name, 1)
    twice = torch.ones(4)
    lists[written] = [twice, twice]
    for i, tensors in enumerate(lists):
        if i != written:
            tensors[0] = torch.ones(4)
    assert_refused(name, flag(), lists, rf"tensor_lists\[{written}\]\[1\] has the same memory")


@pytest.mark.parametrize("name", ["multi_tensor_adam_capturable", "multi_tensor_lamb", "multi_tensor_lamb_mp"])
def test_gradients_that_are_written_and_share_memory_are_refused(name):
    lists = [[torch.ones(4), torch.ones(4)] for _ in range(4)]
    lists[0][1] = lists[0][0]
    assert_refused(name, flag(), lists, r"tensor_lists\[0\]\[1\] has the same memory as tensor_lists\[0\]\[0\]")
    memory = torch.ones(6)
    lists[0] = [memory[:4], memory[2:]]
    assert_refused(name, flag(), lists, r"tensor_lists\[0\]\[1\] shares memory with tensor_lists\[0\]\[0\]")


@pytest.mark.parametrize("name", ["multi_tensor_adam", "multi_tensor_novograd", "multi_tensor_adagrad"])
def test_float64_lists_of_other_shapes_or_types_are_refused(name):
    lists = [[t.double() for t in tensors] for tensors in lists_for(name)]
    lists[-1][1] = torch.ones(1, dtype=F64)
    message = r"\[1\] is a float64 tensor of shape \[1\] .*, but tensor_lists\[0\]\[1\] is .* shape \[4\]"
    assert_refused(name, flag(), lists, message)
    lists[-1] = [torch.ones(2, 3).half(), torch.ones(4).half()]
    assert_refused(name, flag(), lists, "is a float16 tensor .*, but the type must be float64 or float32")


@pytest.mark.parametrize("value", [0.1, torch.ones(2), torch.ones(1, device="meta")], ids=["float", "two", "meta"])
def test_a_device_scalar_that_is_none_is_refused(value):
    lists = lists_for("multi_tensor_adam_capturable")
    scalars, inv_scale = capturable()
    with pytest.raises(AmpValueError, match="lr is .*but must be a tensor of one element on cpu"):
        call(amp_C.multi_tensor_adam_capturable, flag(), lists, value, *scalars[1:], 1, 1, 0.1, inv_scale)


def test_the_legacy_stages_of_lamb_are_not_there_and_the_error_says_what_is():
    assert not hasattr(amp_C, "multi_tensor_lamb_stage1_cuda")
    with pytest.raises(AttributeError, match="call multi_tensor_lamb, which does both stages"):
        _ = amp_C.multi_tensor_lamb_stage2_cuda
    with pytest.raises(AttributeError, match="has no attribute 'multi_tensor_lam'"):
        _ = amp_C.multi_tensor_lam
