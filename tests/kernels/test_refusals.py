"""A list that the kernels cannot take is refused by name and index, and nothing is written."""

import pytest
import torch

from amp_engine import kernels
from amp_engine.errors import AmpValueError
from amp_engine.kernels import FORMULAS
from amp_engine.kernels.formulas import Adam, Sgd

from .conftest import NATIVE
from .lists import copies, same_bits

pytestmark = NATIVE

ONE = torch.tensor(0.5)
SGD = Sgd(lr=0.1)


def made(n=3, dtype=torch.float32):
    return [torch.ones(4, 6, dtype=dtype) for _ in range(n)]


# Each: the function's tensors by parameter name, and how it is called with them.
OPERATIONS = {
    "check": (("tensors",), lambda tensors: kernels.check(tensors)),
    "scale_": (("inputs", "outputs"), lambda inputs, outputs: kernels.scale_(outputs, inputs, ONE)),
    "cast_copy_": (("inputs", "outputs"), lambda inputs, outputs: kernels.cast_copy_(outputs, inputs)),
    "axpby_": (("xs", "ys", "outputs"), lambda xs, ys, outputs: kernels.axpby_(outputs, xs, ys, ONE, ONE)),
    "sgd_": (
        ("params", "grads", "copies", "momentum_buffers"),
        lambda params, grads, copies, momentum_buffers: kernels.step_once(
            Sgd(lr=0.1, momentum=0.9), grads, params, momentum_buffers, None, torch.zeros(3), None, copies
        ),
    ),
    "adam_": (
        ("params", "grads", "copies", "exp_avgs", "exp_avg_sqs"),
        lambda params, grads, copies, exp_avgs, exp_avg_sqs: kernels.step_once(
            Adam(lr=0.1), grads, params, exp_avgs, exp_avg_sqs, torch.zeros(3), None, copies
        ),
    ),
}
# What the native module or the table calls a list.
ALSO = {
    "tensors": ("xs", "outputs"),
    "inputs": ("xs",),
    "params": ("weights",),
    "grads": ("gradients",),
    "momentum_buffers": ("state1",),
    "exp_avgs": ("state1",),
    "exp_avg_sqs": ("state2",),
}
SEVERAL_LISTS = [op for op, (names, _) in OPERATIONS.items() if len(names) > 1]


def called(op, lists, place):
    """Calls `op`, which must refuse `place` and write nothing."""
    name, index = place
    everything = [t.clone() if kernels.is_lazy(t) else t for tensors in lists.values() for t in tensors]
    everything = [t for t in everything if t.device.type != "meta" and not t.is_sparse]
    before = copies(everything)
    with pytest.raises(AmpValueError) as refusal:
        OPERATIONS[op][1](**lists)
    names = [name, *ALSO.get(name, ())]
    message = str(refusal.value)
    assert any((f"{n}[{index}]" if index is not None else f"{n} has") in message for n in names), message
    assert all(map(same_bits, everything, before))
    return message


def lists_of(op):
    return {name: made() for name in OPERATIONS[op][0]}


BAD = {
    "int": lambda: torch.ones(4, 6, dtype=torch.int32),
    "float64": lambda: torch.ones(4, 6, dtype=torch.float64),
    "meta": lambda: torch.ones(4, 6, device="meta"),
    "sparse": lambda: torch.ones(4, 6).to_sparse(),
    "gaps": lambda: torch.ones(4, 12)[:, ::2],
    "expanded": lambda: torch.ones(4, 1).expand(4, 6),
    "overlapping": lambda: torch.ones(20).as_strided((4, 6), (3, 1)),
    "negative view": lambda: torch._neg_view(torch.ones(4, 6)),
    "zeros without memory": lambda: torch._efficientzerotensor((4, 6)),
}


@pytest.mark.parametrize("op", OPERATIONS)
def test_a_tensor_that_is_not_walked_in_any_list(op):
    for name in OPERATIONS[op][0]:
        lists = lists_of(op)
        lists[name][1] = BAD["float64"]()
        called(op, lists, (name, 1))


@pytest.mark.parametrize("kind", BAD)
def test_a_tensor_that_is_not_walked_of_any_kind(kind):
    # Of one list alone, where no partner of another layout gives it away.
    called("check", {"tensors": [made(1)[0], BAD[kind]()]}, ("tensors", 1))
    for name in OPERATIONS["adam_"][0]:
        lists = lists_of("adam_")
        lists[name][1] = BAD[kind]()
        called("adam_", lists, (name, 1))


@pytest.mark.parametrize("op", SEVERAL_LISTS)
def test_a_tensor_unlike_its_partner(op):
    for name in OPERATIONS[op][0][1:]:
        for unlike in (torch.ones(6, 4), torch.ones(6, 4).t(), torch.ones(4, 5)):
            lists = lists_of(op)
            lists[name][2] = unlike
            # Whichever of the two is named: the message has both.
            assert "[2]" in called(op, lists, (name, 2))


def test_the_message_says_what_was_given_and_what_is_allowed():
    message = called("check", {"tensors": [*made(1), torch.ones(3, dtype=torch.float64)]}, ("tensors", 1))
    assert "shape [3]" in message
    assert "on cpu" in message
    assert "the type must be float32, float16 or bfloat16" in message


@pytest.mark.parametrize("op", SEVERAL_LISTS)
def test_lists_of_unequal_lengths(op):
    for name in OPERATIONS[op][0][1:]:
        for n in (2, 4):
            called(op, {**lists_of(op), name: made(n)}, (name, None))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["exp_avgs", "exp_avg_sqs"])
def test_state_is_float32_or_both_moments_are_bfloat16(name, dtype):
    lists = lists_of("adam_")
    lists[name][1] = lists[name][1].to(dtype)
    if dtype is torch.float16:
        assert "float32, bfloat16, or uint8" in called("adam_", lists, (name, 1))
    else:
        assert "must have one type" in called("adam_", lists, ("exp_avgs", 1))


WRITTEN = [
    ("scale_", "outputs", "outputs"),
    ("cast_copy_", "outputs", "outputs"),
    ("axpby_", "outputs", "outputs"),
    ("sgd_", "params", "params"),
    ("sgd_", "params", "copies"),
    ("sgd_", "copies", "momentum_buffers"),
    ("adam_", "exp_avgs", "exp_avg_sqs"),
]


@pytest.mark.parametrize(("op", "first", "second"), WRITTEN)
def test_one_memory_written_twice(op, first, second):
    lists = lists_of(op)
    lists[second][2] = lists[first][0].view(4, 6)
    assert "same memory" in called(op, lists, (second, 2))


READ = [
    ("scale_", "outputs", "inputs"),
    ("cast_copy_", "outputs", "inputs"),
    ("axpby_", "outputs", "xs"),
    ("axpby_", "outputs", "ys"),
    ("sgd_", "params", "grads"),
    ("sgd_", "copies", "grads"),
    ("adam_", "exp_avgs", "grads"),
    ("adam_", "exp_avg_sqs", "grads"),
]


def beside_each_other(distance, dtypes=(torch.float32, torch.float32)):
    """Return two tensors of shape [4, 6]; the second begins so many bytes after the first."""
    memory = torch.ones(300, dtype=torch.uint8)
    spans = [(100, dtypes[0]), (100 + distance, dtypes[1])]
    return [memory[at : at + 24 * dtype.itemsize].view(dtype).view(4, 6).fill_(1) for at, dtype in spans]


@pytest.mark.parametrize(("op", "first", "second"), WRITTEN + READ)
def test_memory_that_overlaps_partly(op, first, second):
    for distance in (-92, -4, 4, 48, 92):
        lists = lists_of(op)
        lists[first][0], lists[second][2] = beside_each_other(distance)
        message = called(op, lists, (second, 2))
        assert "shares memory with" in message
        assert "[0]" in message


@pytest.mark.parametrize(("op", "first", "second"), READ)
def test_memory_that_is_written_and_read_elsewhere(op, first, second):
    """The memory is of another index, or of the same but shifted, which is no work in place."""
    for place, distance in ((2, 0), (0, 40)):
        lists = lists_of(op)
        lists[first][0], lists[second][place] = beside_each_other(distance)
        called(op, lists, (second, place))


IN_PLACE = [one for one in READ if one[0] in ("scale_", "cast_copy_", "axpby_")]


def test_memory_that_is_read_as_one_type_and_written_as_another():
    for op, first, second in IN_PLACE:
        lists = lists_of(op)
        lists[first][1], lists[second][1] = beside_each_other(0, (torch.float16, torch.float32))
        called(op, lists, (second, 1))


def test_tensors_that_touch_are_walked():
    for op, first, second in WRITTEN + READ:
        for distance in (-96, 96):
            lists = lists_of(op)
            lists[first][0], lists[second][2] = beside_each_other(distance)
            OPERATIONS[op][1](**lists)


def test_work_in_place_and_what_is_read_twice_are_walked():
    for op, first, second in IN_PLACE:
        lists = lists_of(op)
        lists[second] = lists[first]
        OPERATIONS[op][1](**lists)
        lists = lists_of(op)
        lists[second] = [lists[second][0]] * 3
        OPERATIONS[op][1](**lists)


@pytest.mark.parametrize("counts", ["params", "exp_avgs", "grads"])
def test_counts_in_the_memory_of_something_else(counts):
    lists = lists_of("adam_")
    steps = torch.zeros(30)[3:27].view(4, 6)
    lists[counts][1] = steps
    before = copies([t for tensors in lists.values() for t in tensors])
    with pytest.raises(AmpValueError, match="memory"):
        kernels.step_once(
            Adam(lr=0.1),
            lists["grads"],
            lists["params"],
            lists["exp_avgs"],
            lists["exp_avg_sqs"],
            steps.view(24)[6:9],
        )
    assert all(map(same_bits, [t for tensors in lists.values() for t in tensors], before))


@pytest.mark.parametrize(
    "scalar", [torch.ones(2), torch.tensor(1), torch.tensor(1.0).double(), torch.ones((), device="meta")]
)
def test_factors_are_one_float32_on_the_device(scalar):
    tensors = made(2)
    for call in (
        lambda: kernels.scale_(tensors, tensors, scalar),
        lambda: kernels.scale_(tensors, made(2), scalar),
        lambda: kernels.axpby_(tensors, made(2), made(2), scalar, None),
        lambda: kernels.axpby_(tensors, made(2), made(2), None, scalar),
        lambda: kernels.step_once(SGD, made(2), tensors, None, None, torch.zeros(2), inv_scale=scalar),
        lambda: kernels.step_once(SGD, made(2), tensors, None, None, torch.zeros(2), found_inf=scalar),
    ):
        with pytest.raises(AmpValueError, match=r"must be one float32|must be one Float"):
            call()
    assert all(map(same_bits, tensors, made(2)))


@pytest.mark.parametrize("lazy", [torch._neg_view(torch.ones(())), torch._efficientzerotensor(())])
def test_factors_are_what_lies_in_their_memory(lazy):
    tensors = made(2)
    for call in (
        lambda: kernels.scale_(tensors, tensors, lazy),
        lambda: kernels.axpby_(tensors, made(2), made(2), None, lazy),
        lambda: kernels.step_once(SGD, made(2), tensors, None, None, torch.zeros(2), inv_scale=lazy),
        lambda: kernels.step_once(SGD, made(2), tensors, None, None, torch._neg_view(torch.zeros(2))),
    ):
        with pytest.raises(AmpValueError, match=r"not those in its memory.*\.clone"):
            call()
    assert all(map(same_bits, tensors, made(2)))


@pytest.mark.parametrize(
    "steps", [torch.zeros(2), torch.zeros(3, dtype=torch.int32), torch.zeros(3, 1), torch.zeros(6)[::2]]
)
def test_steps_are_one_float32_each(steps):
    params = made()
    with pytest.raises(AmpValueError, match=r"steps is .* \[3\]"):
        kernels.step_once(SGD, made(), params, None, None, steps)
    assert all(map(same_bits, params, made()))


def table(formula="sgd", **changes):
    given = {"weights": made(), "copies": [None] * 3, "state1": [None] * 3, "state2": [None] * 3, "groups": [0] * 3}
    return kernels.step_table(formula, **{**given, "steps": torch.zeros(3), "norms": None, **changes})


def test_a_table_is_of_a_known_formula():
    with pytest.raises(AmpValueError, match="formula is 'adamw'.*one of adam, sgd, adagrad, novograd, lamb"):
        table("adamw")


def test_a_table_for_novograd_has_norms():
    with pytest.raises(AmpValueError, match="norms"):
        table("novograd", state1=made())


def test_a_table_has_a_group_for_each_weight():
    with pytest.raises(AmpValueError, match="groups has 2 entries, but weights has 3"):
        table(groups=[0, 0])
    with pytest.raises(AmpValueError, match=r"weights\[1\] is in group 4 of 1"):
        table(groups=[0, 4, 0]).step(made(), [True] * 3, [Sgd(lr=0.1)])


@pytest.mark.parametrize(("kind", "h"), [("sgd", {"momentum": 0.9}), ("adam", {}), ("lamb", {}), ("adagrad", {})])
def test_a_gradient_without_state(kind, h):
    weights = made()
    steps = table(kind, weights=weights)
    steps.step([None] * 3, [True] * 3, [FORMULAS[kind](lr=0.1, **h)])
    with pytest.raises(AmpValueError, match=r"weights\[2\] has a gradient, but no optimizer state"):
        steps.step([None, None, made(1)[0]], [True] * 3, [FORMULAS[kind](lr=0.1, **h)])
    assert all(map(same_bits, weights, made()))


def test_a_table_takes_the_hyperparameters_of_its_kind():
    weights = made()
    with pytest.raises(TypeError, match="groups holds no hyperparameters of sgd: there is no momentum"):
        table(weights=weights).step(made(), [True] * 3, [Adam(lr=0.1)])
    assert all(map(same_bits, weights, made()))


def test_a_table_is_given_as_many_gradients_and_scales_as_it_has_weights():
    steps = table()
    with pytest.raises(AmpValueError, match="has 2 entries, but weights has 3"):
        steps.step(made(2), [True] * 3, [Sgd(lr=0.1)])
    with pytest.raises(AmpValueError, match="scaled has 2 entries, but weights has 3"):
        steps.step(made(), [True] * 2, [Sgd(lr=0.1)])
