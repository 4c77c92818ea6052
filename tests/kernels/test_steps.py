"""The five steps against float64: types, sizes, addresses, missing gradients, groups, skips."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from amp_engine import kernels
from amp_engine.kernels import FORMULAS
from amp_engine.kernels.formulas import Lamb, Sgd

from . import oracle
from .conftest import NATIVE
from .lists import SIZES, Arena, Rows, copies, rows, same_bits, same_values

# A large eps: where gradient and weight decay cancel, an update of lr * x / (|x| + eps) would magnify their rounding.
ADAM = {"lr": 0.01, "beta1": 0.9, "beta2": 0.99, "eps": 1e-3, "weight_decay": 0.1, "decoupled": True}
SGD = {"lr": 0.1}
ADAGRAD = {"lr": 0.01, "eps": 1e-3, "weight_decay": 0.1}
NOVOGRAD = {"lr": 0.01, "beta1": 0.95, "beta2": 0.98, "eps": 1e-8, "weight_decay": 0.1}
LAMB = {**ADAM, "max_grad_norm": 1.0}

CASES = [
    ("adam", ADAM),
    ("adam", {**ADAM, "decoupled": False}),
    ("adam", {**ADAM, "bias_correction": False, "weight_decay": 0.0}),
    ("adam", {**ADAM, "maximize": True}),
    ("sgd", SGD),
    ("sgd", {**SGD, "weight_decay": 0.1, "maximize": True}),
    ("sgd", {**SGD, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1}),
    ("sgd", {**SGD, "momentum": 0.9, "nesterov": True}),
    ("sgd", {**SGD, "momentum": 0.9, "weight_decay": 0.1, "decay_after_momentum": True}),
    ("adagrad", ADAGRAD),
    ("adagrad", {**ADAGRAD, "decoupled": True, "lr_decay": 0.5}),
    ("adagrad", {**ADAGRAD, "maximize": True}),
    ("novograd", NOVOGRAD),
    ("novograd", {**NOVOGRAD, "decay_inside_moment": True, "maximize": True}),
    ("novograd", {**NOVOGRAD, "infinity_norm": True, "init_zero": True, "bias_correction": False}),
    ("novograd", {**NOVOGRAD, "init_zero": True, "grad_averaging": False}),
    ("lamb", LAMB),
    ("lamb", {**LAMB, "decoupled": False, "max_grad_norm": 0.0}),
    ("lamb", {**LAMB, "weight_decay": 0.0, "use_nvlamb": True, "bias_correction": False}),
    ("lamb", {**LAMB, "weight_decay": 0.0, "grad_averaging": False, "maximize": True}),
    ("lamb", {**LAMB, "max_grad_norm": 1e6}),
]
NAMES = [f"{formula}{len([k for k, _ in CASES[:i] if k == formula])}" for i, (formula, _) in enumerate(CASES)]
ARGUMENTS = dict(reversed(CASES)) | {"sgd": CASES[6][1]}
SCALE = 1024.0
pytestmark = NATIVE


def step(formula: str, r: Rows, h: dict, **scalars) -> None:
    hyperparameters = FORMULAS[formula](**h)
    first = r.first if hyperparameters.needs_state1 else None
    second = r.second if hyperparameters.needs_state2 else None
    norms = r.norms if hyperparameters.keeps_norm else None
    kernels.step_once(hyperparameters, r.grads, r.params, first, second, r.steps, norms, r.copies, **scalars)


def table(formula: str, r: Rows, groups: list[int] | None = None) -> kernels.StepTable:
    n = len(r.params)
    second = r.second if formula in ("adam", "lamb") else [None] * n
    groups = [0] * n if groups is None else groups
    return kernels.step_table(formula, r.params, r.copies, r.first, second, groups, r.steps, r.norms)


def states(r: Rows) -> list[oracle.State]:
    both = zip(r.params, r.first, r.second, r.norms.tolist(), strict=True)
    return [oracle.State(p.detach().double(), m.double(), v.double(), n) for p, m, v, n in both]


def assert_stepped(
    formula: str, r: Rows, old: list[oracle.State], factors: list[float], hs: list[dict], counts
) -> None:
    """Assert that each row with a gradient went from `old` to where float64 goes."""
    true_grads = [None if g is None else g.double() * f for g, f in zip(r.grads, factors, strict=True)]
    norm_of_all = oracle.norm([g for g in true_grads if g is not None])
    for i, g in enumerate(true_grads):
        if g is None or not g.numel():
            continue
        h, t = hs[i], int(counts[i]) + 1
        new = oracle.STEPS[formula](-g if h.get("maximize") else g, old[i], t, h, norm_of_all)
        assert r.steps[i] == t
        param, half = r.params[i], r.copies[i]
        eps = torch.finfo(param.dtype).eps if param.dtype != torch.float32 else 2e-6
        near = {"rtol": eps, "atol": max(1e-6, eps * 1e-3), "msg": lambda m, i=i: f"row {i}: {m}"}
        torch.testing.assert_close(param.detach().double(), new.weight, **near)
        near.update(rtol=3e-6, atol=1e-7)
        if new.first is not None and (formula != "sgd" or h.get("momentum")):
            torch.testing.assert_close(r.first[i].double(), new.first, **near)
        if new.second is not None:
            torch.testing.assert_close(r.second[i].double(), new.second, **near)
        if formula == "novograd":
            assert r.norms[i].item() == pytest.approx(new.norm, rel=1e-6)
        if half is not None and param.dtype == torch.float32:
            assert same_bits(half, param.detach().to(half.dtype))
        elif half is not None:  # rounded from what the parameter was rounded from
            eps = torch.finfo(half.dtype).eps if half.dtype != torch.float32 else 2e-6
            torch.testing.assert_close(half.double(), new.weight, rtol=eps, atol=max(1e-6, eps * 1e-3))


def test_every_option_of_the_steps_is_tried():
    for name, formula in FORMULAS.items():
        tried = {key for one, h in CASES if one == name for key in h}
        assert tried == {field.name for field in fields(formula)}, name


@pytest.mark.parametrize(("formula", "h"), CASES, ids=NAMES)
def test_three_steps_from_the_first_one_on(formula, h):
    arena = Arena()
    r = rows(arena, SCALE)
    r.steps.zero_()
    for first in (*r.first, *r.second):
        first.zero_()
    if formula == "sgd":  # the first step does not read the buffer
        for first in r.first:
            first.fill_(math.nan)
    inv_scale, found_inf = torch.tensor(1 / SCALE), torch.tensor(0.0)
    all_grads = r.grads
    for turn in range(3):
        r.grads = [None if (i + turn) % 5 == 4 else g for i, g in enumerate(all_grads)]
        before, old, counts = copies(r.tensors()), states(r), r.steps.clone()
        grads_before = copies(r.grads)
        step(formula, r, h, inv_scale=inv_scale, found_inf=found_inf)
        n = len(r.params)
        assert_stepped(formula, r, old, [1 / SCALE] * n, [h] * n, counts)
        missing = [i for i, g in enumerate(r.grads) if g is None]
        assert all(same_bits(r.params[i].double(), old[i].weight) for i in missing)
        assert torch.equal(r.steps[missing], counts[missing])
        assert all(same_bits(a, b) for a, b in zip(r.grads, grads_before, strict=True) if a is not None)
        assert len(before) == len(r.tensors())
    assert arena.is_intact()


@pytest.mark.parametrize("formula", ARGUMENTS)
def test_a_skipped_step_leaves_every_bit(formula):
    r = rows(Arena(), sizes=(1, 31, 4096))
    r.grads[3][:] = math.nan
    before = copies(r.tensors())
    for flag in (1.0, 2.0, math.nan):
        step(formula, r, ARGUMENTS[formula], inv_scale=torch.tensor(0.5), found_inf=torch.tensor(flag))
        assert all(map(same_bits, r.tensors(), before))
    step(formula, r, ARGUMENTS[formula], found_inf=torch.tensor(0.0))
    assert r.steps.tolist() == [3.0] * 36


@pytest.mark.parametrize("formula", ARGUMENTS)
def test_no_gradient_or_no_tensor_is_no_step(formula):
    r = rows(Arena(), sizes=(1, 31))
    r.grads = [None] * 36
    before = copies(r.tensors())
    step(formula, r, ARGUMENTS[formula], inv_scale=torch.tensor(0.5))
    assert all(map(same_bits, r.tensors(), before))
    step(formula, Rows([], [], [], [], [], torch.zeros(0), torch.zeros(0)), ARGUMENTS[formula])


@pytest.mark.parametrize("formula", ARGUMENTS)
def test_an_empty_tensor_counts_its_steps(formula):
    r = rows(Arena(), sizes=(0, 3))
    step(formula, r, ARGUMENTS[formula])
    assert r.steps.tolist() == [3.0] * 36


@pytest.mark.parametrize("formula", ARGUMENTS)
def test_learning_rate_may_be_a_tensor(formula):
    a, b = rows(Arena(), sizes=(7, 4096)), rows(Arena(), sizes=(7, 4096))
    lr = torch.tensor(0.03)
    step(formula, a, {**ARGUMENTS[formula], "lr": lr})
    step(formula, b, {**ARGUMENTS[formula], "lr": lr.item()})
    assert all(map(same_bits, a.tensors(), b.tensors()))


@pytest.mark.parametrize("formula", ARGUMENTS)
@pytest.mark.parametrize("give_checks", [False, True])
def test_table_of_two_groups_partly_scaled_and_clipped(formula, give_checks):
    r = rows(Arena(), SCALE)
    groups = [i % 2 for i in range(36)]
    hs = [{**ARGUMENTS[formula]}, {**ARGUMENTS[formula], "lr": 0.002, "weight_decay": 0.0}]
    scaled = [i % 3 != 0 for i in range(36)]
    steps = table(formula, r, groups)
    norm, max_norm = torch.tensor(5.0), 2.0
    for i in range(0, 36, 3):
        r.grads[i] = r.grads[i] / SCALE
    r.grads[11] = None
    old, counts = states(r), r.steps.clone()
    checks = None
    if give_checks:
        found = kernels.check([torch.zeros(0) if g is None else g for g in r.grads])
        checks = kernels.Checks(*found)
    steps.step(
        r.grads,
        scaled,
        [FORMULAS[formula](**h) for h in hs],
        inv_scale=torch.tensor(1 / SCALE),
        found_inf=torch.tensor(0.0),
        norm=norm,
        max_norm=max_norm,
        checks=checks,
    )
    factor = max_norm / (5.0 + 1e-6) / SCALE
    assert_stepped(formula, r, old, [factor if s else 1.0 for s in scaled], [hs[g] for g in groups], counts)
    assert r.steps[11] == 2


@pytest.mark.parametrize(("norm", "factor"), [(1.0, 1.0), (4.0, 0.5)])
def test_clipping_only_shrinks(norm, factor):
    grad, weight = torch.ones(5), torch.zeros(5)
    steps = kernels.step_table("sgd", [weight], [None], [None], [None], [0], torch.zeros(1))
    steps.step([grad], [True], [Sgd(lr=1.0)], norm=torch.tensor(norm), max_norm=2.0)
    assert weight.tolist() == pytest.approx([-factor] * 5, rel=1e-6)


def test_lamb_is_clipped_by_the_norm_that_it_is_given():
    a, b = rows(Arena(), sizes=(31, 4096)), rows(Arena(), sizes=(31, 4096))
    step("lamb", a, LAMB, gradient_norm=torch.tensor(10.0))
    b.grads = [g.float() / 10 for g in b.grads]
    step("lamb", b, {**LAMB, "max_grad_norm": 0.0})
    for x, y in zip(a.params, b.params, strict=True):
        torch.testing.assert_close(x, y, rtol=2 * torch.finfo(x.dtype).eps, atol=1e-6)


@pytest.mark.parametrize(("weight", "grad"), [(0.0, 1.0), (1.0, 0.0)])
def test_lamb_has_no_trust_ratio_where_a_norm_is_zero(weight, grad):
    p = torch.full((9,), weight)
    h = {**LAMB, "weight_decay": 0.0, "use_nvlamb": True, "eps": 1e-6}
    state = [torch.zeros(9)], [torch.zeros(9)], torch.zeros(1)
    kernels.step_once(Lamb(**h), [torch.full((9,), grad)], [p], *state)
    assert p.tolist() == pytest.approx([weight - LAMB["lr"] * grad] * 9, rel=1e-5)


@pytest.mark.parametrize("formula", ARGUMENTS)
def test_an_overflowing_copy_is_inf_and_the_weight_is_not(formula):
    weight, copy = torch.full((20,), 1e5), torch.zeros(20, dtype=torch.float16)
    r = Rows([torch.ones(20)], [weight], [copy], [torch.zeros(20)], [torch.zeros(20)], torch.zeros(1), torch.zeros(1))
    step(formula, r, {**ARGUMENTS[formula], "weight_decay": 0.0})
    assert copy.isinf().all()
    assert weight.isfinite().all()


@pytest.mark.parametrize("formula", ARGUMENTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("adopts", [True, False])
def test_what_other_code_wrote_into_copies_replaces_the_weight_if_asked(formula, dtype, adopts):
    def stepped(adopts: bool, *, into_weight: bool) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(5)
        weight, grad = (torch.randn(1003, generator=generator) for _ in range(2))
        weight[7] = 1e6  # infinite in float16, and nobody wrote it
        copy = weight.to(dtype)
        copy[[3, 500, 1002]] = torch.tensor([0.25, 2.5, -7.0], dtype=dtype)
        if into_weight:
            weight[[3, 500, 1002]] = torch.tensor([0.25, 2.5, -7.0])
        h = FORMULAS[formula](**ARGUMENTS[formula])
        state1 = torch.zeros(1003) if h.needs_state1 else None
        state2 = torch.zeros(1003) if h.needs_state2 else None
        norms = torch.zeros(1) if h.keeps_norm else None
        table = kernels.step_table(
            formula, [weight], [copy], [state1], [state2], [0], torch.zeros(1), norms, adopts=adopts
        )
        table.step([grad], bytes(1), [h], found_inf=torch.ones(()))
        assert copy[3] == 0.25  # a skip leaves all as it is
        table.step([grad], bytes(1), [h])
        return weight, copy

    for one, other in zip(stepped(adopts, into_weight=False), stepped(False, into_weight=adopts), strict=True):
        assert same_values(one, other)


@pytest.mark.parametrize("formula", ARGUMENTS)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_bad_element_stays_alone_if_nobody_skips(formula, bad):
    r = rows(Arena(), sizes=(31,))
    for g in r.grads:
        g[9] = bad
    step(
        formula, r, {**ARGUMENTS[formula], "weight_decay": 0.0, **({"max_grad_norm": 0.0} if formula == "lamb" else {})}
    )
    if formula != "novograd":  # its norm is of the whole tensor
        for p in r.params:
            assert p[[*range(9), *range(10, 31)]].isfinite().all()


@pytest.mark.parametrize("formula", ARGUMENTS)
def test_channels_last_is_stepped_in_its_own_order(formula):
    def made(memory_format):
        generator = torch.Generator().manual_seed(3)

        def randn(dtype=torch.float32):
            values = torch.randn(4, 3, 5, 2, generator=generator).to(dtype)
            return [values.contiguous(memory_format=memory_format)]

        return Rows(
            randn(torch.float16),
            randn(),
            [torch.zeros_like(randn(torch.bfloat16)[0])],
            [randn()[0].abs()],
            [randn()[0].abs()],
            torch.full((1,), 2.0),
            torch.ones(1),
        )

    a, b = made(torch.channels_last), made(torch.contiguous_format)
    step(formula, a, ARGUMENTS[formula])
    step(formula, b, ARGUMENTS[formula])
    assert a.params[0].is_contiguous(memory_format=torch.channels_last)
    for x, y in zip(a.tensors(), b.tensors(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("formula", ARGUMENTS)
def test_subnormal_gradients_count(formula):
    tiny = torch.full((40,), 2.0**-24, dtype=torch.float16)
    r = Rows([tiny], [torch.ones(40)], [None], [torch.zeros(40)], [torch.zeros(40)], torch.zeros(1), torch.zeros(1))
    old = states(r)
    step(formula, r, ARGUMENTS[formula], inv_scale=torch.tensor(2.0**20))
    assert_stepped(formula, r, old, [2.0**20], [ARGUMENTS[formula]], [0])


def test_a_table_knows_when_memory_moved():
    r = rows(Arena(), sizes=(31,))
    steps = table("adam", r)
    assert steps.is_current()
    r.params[5].data = r.params[5].clone()
    assert not steps.is_current()
    assert table("adam", r).is_current()


def test_parameters_that_want_gradients_are_stepped():
    param = torch.nn.Parameter(torch.ones(5))
    version = param._version
    kernels.step_once(Sgd(lr=0.5), [torch.ones(5)], [param], None, None, torch.zeros(1))
    assert param.tolist() == [0.5] * 5
    assert param._version > version


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("formula", ARGUMENTS)
def test_any_number_of_threads_gives_the_same_bits(formula):
    results = []
    for n in (1, 2, 3):
        torch.set_num_threads(n)
        r = rows(Arena(), sizes=SIZES)
        step(formula, r, ARGUMENTS[formula])
        step(formula, r, ARGUMENTS[formula], inv_scale=torch.tensor(0.3))
        checks = kernels.check(r.params)
        results.append([*r.tensors(), *checks[1:], norm_of(r.params)])
    for other in results[1:]:
        assert all(map(same_bits, results[0], other))


@pytest.mark.parametrize("formula", ARGUMENTS)
def test_any_order_of_the_list_gives_the_same_bits(formula):
    straight = rows(Arena())
    step(formula, straight, ARGUMENTS[formula])
    for seed in range(3):
        order = torch.randperm(36, generator=torch.Generator().manual_seed(seed)).tolist()
        r = rows(Arena())
        shuffled = Rows(
            *([tensors[i] for i in order] for tensors in (r.grads, r.params, r.copies, r.first, r.second)),
            steps=r.steps[order],
            norms=r.norms[order],
        )
        step(formula, shuffled, ARGUMENTS[formula])
        for j, i in enumerate(order):
            assert same_bits(shuffled.params[j], straight.params[i])
            assert same_bits(shuffled.first[j], straight.first[i])
            assert same_bits(shuffled.norms[j], straight.norms[i])


def norm_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    norm = torch.zeros(())
    kernels.ListCheck().run(tensors, None, torch.ones(()), torch.zeros(()), norm)
    return norm


def test_any_order_of_the_list_gives_the_same_norm():
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(n, generator=generator) * 10.0 ** (n % 7) for n in (*range(1, 200), 32769, 65537)]
    total = norm_of(tensors)
    for _ in range(10):
        order = torch.randperm(len(tensors), generator=generator).tolist()
        assert same_bits(total, norm_of([tensors[i] for i in order]))
    assert total.item() == pytest.approx(oracle.norm(tensors), rel=1e-7)


@pytest.mark.parametrize("formula", ARGUMENTS)
def test_the_address_of_a_tensor_changes_no_bit(formula):
    at_odd, aligned = rows(Arena()), rows(Arena())
    for name in ("grads", "params", "copies", "first", "second"):
        setattr(aligned, name, copies(getattr(aligned, name)))
    step(formula, at_odd, ARGUMENTS[formula])
    step(formula, aligned, ARGUMENTS[formula])
    assert all(map(same_values, at_odd.tensors(), aligned.tensors()))


def test_lamb_takes_no_more_scratch_than_its_tensors():
    """A chunk for each of them would be 128 KB."""
    n = 1000
    grads, weights, first, second = ([torch.ones(10) for _ in range(n)] for _ in range(4))
    lamb = kernels.step_table("lamb", weights, [None] * n, first, second, [0] * n, torch.zeros(n))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        lamb.step(grads, [False] * n, [FORMULAS["lamb"](**LAMB)])
    taken = sum(max(event.self_cpu_memory_usage, 0) for event in recorded.events())
    assert 0 < taken < n * (10 * 4 * 2 + 64)


def test_two_threads_do_not_step_one_table_at_once():
    """Each step is done, or refused because one is under way."""
    n = 1 << 16
    weight, momentum, counts = torch.zeros(n), torch.zeros(n), torch.zeros(1)
    one = kernels.step_table("sgd", [weight], [None], [momentum], [None], [0], counts)
    hyperparameters = Sgd(lr=1.0, momentum=0.5)

    def run() -> list[str]:
        refusals = []
        for _ in range(100):
            try:
                one.step([torch.ones(n)], [False], [hyperparameters])
            except RuntimeError as error:
                refusals.append(str(error))
        return refusals

    with ThreadPoolExecutor(2) as pool:
        refusals = sum((future.result(60.0) for future in [pool.submit(run) for _ in range(2)]), [])
    assert all("another thread" in refusal for refusal in refusals)
    assert counts.item() == 200 - len(refusals)
    assert weight.unique().numel() == 1
