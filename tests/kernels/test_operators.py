"""Each operation as a torch.library operator: its schema tells the truth, and torch.compile takes it whole."""

from dataclasses import fields

import pytest
import torch
from torch._ops import OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_engine import kernels
from amp_engine.errors import AmpValueError
from amp_engine.kernels.formulas import Adam, NovoGrad, Sgd

from .conftest import NATIVE
from .lists import copies, same_bits

STEPS = [f"{name}_" for name in kernels.FORMULAS]
OPS = torch.ops.amp_engine
HALF, FLOAT = torch.float16, torch.float32


def tensors(*dtypes):
    return [torch.randn(5, 7 + i).to(dtype) for i, dtype in enumerate(dtypes)]


def scalar(value=0.5):
    return torch.tensor(value)


def step_arguments(formula):
    """Arguments for the operator: one gradient missing, one copy, all options that matter to this formula."""
    weights = tensors(FLOAT, FLOAT, HALF)
    grads = tensors(HALF, FLOAT, HALF)
    grads[1] = None
    state = [[torch.zeros_like(w, dtype=FLOAT) for w in weights] for _ in range(2)]
    args = (
        grads,
        weights,
        [torch.zeros_like(weights[2], dtype=torch.bfloat16)],
        [2],
        state[0],
        state[1] if formula in ("adam_", "lamb_") else [],
        torch.zeros(3),
        torch.zeros(3) if formula == "novograd_" else None,
        scalar(),
        scalar(0.0),
        None,
        scalar(0.1),
        0.0,
    )
    own = {field.name for field in fields(kernels.FORMULAS[formula.removesuffix("_")])}
    keywords = {"momentum": 0.9, "weight_decay": 0.1, "decoupled": True}
    return args, {name: value for name, value in keywords.items() if name in own}


def scale_arguments(kept):
    tracker, left = torch.tensor(0, dtype=torch.int32), torch.tensor(2, dtype=torch.int32)
    optional = (left, 2, True, scalar(), torch.zeros(4), scalar(), scalar()) if kept else ()
    return (scalar(4.0), tracker, scalar(1.0), 2.0, 0.5, 3, 1.0, 16.0, *optional), {}


CALLS = {
    "check": lambda: ((tensors(HALF, FLOAT, torch.bfloat16),), {}),
    "scale_": lambda: ((tensors(HALF, FLOAT), tensors(FLOAT, HALF), scalar()), {}),
    "axpby_": lambda: ((tensors(HALF, FLOAT), tensors(FLOAT, HALF), tensors(FLOAT, FLOAT), scalar(), None), {}),
    "cast_copy_": lambda: ((tensors(HALF, FLOAT), tensors(FLOAT, HALF)), {}),
    "update_scale_": lambda: scale_arguments(kept=True),
    "update_scale_ alone": lambda: scale_arguments(kept=False),
    **{name: lambda name=name: step_arguments(name) for name in STEPS},
}


def test_every_operation_is_an_operator():
    names = {name.split()[0] for name in CALLS}
    assert names == {n for n in [*kernels.__all__, *STEPS] if isinstance(getattr(OPS, n, None), OpOverloadPacket)}


@pytest.mark.parametrize("name", [name for name in CALLS if name not in STEPS])
def test_opcheck(name):
    args, kwargs = CALLS[name]()
    torch.library.opcheck(getattr(OPS, name.split()[0]).default, args, kwargs)


@NATIVE
@pytest.mark.parametrize("name", STEPS)
def test_opcheck_of_steps(name):
    test_opcheck(name)


ADAM = Adam(lr=0.1, beta2=0.99, weight_decay=0.1, decoupled=True)


def adam(grads, params, exp_avgs, exp_avg_sqs, steps, half, inv_scale, found_inf):
    kernels.step_once(
        ADAM,
        grads,
        params,
        exp_avgs,
        exp_avg_sqs,
        steps,
        None,
        half,
        inv_scale=inv_scale,
        found_inf=found_inf,
    )
    return steps + 1


def adam_arguments():
    params = [torch.nn.Parameter(t) for t in tensors(FLOAT, FLOAT)]
    zeros = [[torch.zeros_like(p) for p in params] for _ in range(2)]
    half = [None, torch.zeros_like(params[1], dtype=HALF)]
    return tensors(HALF, FLOAT), params, *zeros, torch.zeros(2), half, scalar(), scalar(0.0)


def novograd(grads, params, exp_avgs, norms, steps):
    kernels.step_once(NovoGrad(lr=0.1, beta2=0.99, weight_decay=0.1), grads, params, exp_avgs, None, steps, norms)
    return norms * 2


def update_scale(scale, tracker, found_inf, inverse):
    kernels.update_scale_(
        scale,
        tracker,
        found_inf,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=3,
        min_scale=1.0,
        max_scale=16.0,
        inv_scale_used=inverse,
    )
    return scale * inverse


def scale_in_place(given, factor):
    checks = kernels.scale_(given, given, factor)
    return checks.largest, [t + 1 for t in given]


COMPILED = {
    "check": (lambda given: kernels.check(given).sum_squares.sum(), lambda: (tensors(HALF, FLOAT),)),
    "scale_ in place": (scale_in_place, lambda: (tensors(HALF, FLOAT), scalar())),
    "scale_": (lambda *lists: kernels.scale_(*lists)[0], lambda: (tensors(HALF), tensors(FLOAT), scalar())),
    "axpby_": (
        lambda *lists: kernels.axpby_(*lists)[0],
        lambda: (tensors(HALF), tensors(FLOAT), tensors(FLOAT), scalar(), None),
    ),
    "cast_copy_": (lambda a, b: (kernels.cast_copy_(a, b), a[0] + 1)[1], lambda: (tensors(HALF), tensors(FLOAT))),
    "update_scale_": (update_scale, lambda: (scalar(4.0), torch.tensor(2, dtype=torch.int32), scalar(0.0), scalar())),
    "adam_": (adam, adam_arguments),
    "sgd_": (
        lambda grads, params, steps: kernels.step_once(Sgd(lr=0.1), grads, params, None, None, steps) or params[0] + 1,
        lambda: (tensors(HALF, FLOAT), tensors(FLOAT, FLOAT), torch.zeros(2)),
    ),
    "novograd_": (
        novograd,
        lambda: (tensors(HALF), tensors(FLOAT), [torch.zeros(5, 7)], torch.zeros(1), torch.zeros(1)),
    ),
}


def flat(value):
    if isinstance(value, torch.Tensor):
        return [value.detach()]
    return [t for v in value if v is not None for t in flat(v)]


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("name", [name for name in COMPILED if name not in STEPS])
def test_compiled_whole_and_equal(name):
    function, arguments = COMPILED[name]
    torch.manual_seed(1)
    eager_args = arguments()
    torch.manual_seed(1)
    args = arguments()
    expected = function(*eager_args)
    result = torch.compile(function, fullgraph=True, backend="aot_eager")(*args)
    assert all(map(same_bits, flat(result), flat(expected)))
    assert all(map(same_bits, flat(args), flat(eager_args)))


@NATIVE
@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("name", [name for name in COMPILED if name in STEPS])
def test_steps_are_compiled_whole_and_equal(name):
    test_compiled_whole_and_equal(name)


def test_fake_tensors_are_not_computed():
    with FakeTensorMode() as mode:
        checks = kernels.check([torch.ones(3), torch.ones(4).half()])
        kernels.scale_([torch.ones(3)], [torch.ones(3)], torch.tensor(0.5))
    assert [t.shape for t in checks] == [(2,)] * 3
    outside = mode.from_tensor(torch.ones(3))
    assert kernels.check([outside]).nonfinite.fake_mode is mode


def test_an_operator_refuses_as_its_function_does():
    given = [torch.ones(3), torch.ones(3, dtype=torch.float64)]
    before = copies(given)
    with pytest.raises(AmpValueError, match=r"\[1\]"):
        OPS.scale_(given, given, scalar())
    assert all(map(same_bits, given, before))
