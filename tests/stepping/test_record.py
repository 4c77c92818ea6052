"""The states of a gradient: what the entry, the exit, a clipping and a step do to each, one test a cell."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from amp_engine import AmpStateError, AmpValueError, amp, kernels
from tests.support import scaler_numbers

# Steps without a gradient say so, which other tests look at.
pytestmark = pytest.mark.filterwarnings("ignore:.*finds no gradient:amp_engine.errors.AmpGradientWarning")

SIZE = 8  # elements of the parameter


class Kind(NamedTuple):
    """The level decides on the parameter and its master, the rest on the gradient that a backward leaves."""

    level: str
    is_sparse: bool = False
    arrives: Callable[[Tensor], Tensor] | None = None  # a hook on the parameter
    is_shown: bool = False  # True: made FP32 by `master_params`


KINDS = {
    "half, master": Kind("O5"),
    "FP32, master": Kind("O5", is_shown=True),
    "sparse, master": Kind("O5", is_sparse=True),
    "negative view, master": Kind("O5", arrives=lambda grad: torch._neg_view(-grad)),
    "half": Kind("O3"),
    "FP32": Kind("O0"),
    "sparse": Kind("O0", is_sparse=True),
}
HAS_MASTER = [name for name, kind in KINDS.items() if kind.level == "O5"]
DENSE = [name for name, kind in KINDS.items() if not kind.is_sparse]  # torch has no norms of others


def halved(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(0.5)


def replaced(param: Tensor) -> None:
    assert param.grad is not None
    param.grad = param.grad * 0.5


def zeroed(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.zero_()


def dropped(param: Tensor) -> None:
    param.grad = None


# What other code does after the check, and the factor of the gradient that is left; None if no gradient is.
WRITES: dict[str, tuple[Callable[[Tensor], None], float | None]] = {
    "seen": (lambda param: None, 1.0),
    "in place": (halved, 0.5),
    "replaced": (replaced, 0.5),
    "zeroed": (zeroed, 0.0),
    "None": (dropped, None),
}


class Cell:
    """One parameter of ones at a static scale, stepped by SGD with lr=1: a step takes the gradient away."""

    def __init__(self, kind: str, scale: float) -> None:
        self.kind, self.scale = KINDS[kind], scale
        self.model = nn.Embedding(SIZE // 2, 2, sparse=self.kind.is_sparse)
        nn.init.ones_(self.model.weight)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        amp.initialize(
            self.model,
            self.optimizer,
            opt_level=self.kind.level,
            loss_scale=scale,
            skip_on_overflow=True,
            verbosity=0,
        )
        self.param = self.model.weight
        if self.kind.arrives is not None:
            self.param.register_hook(self.kind.arrives)

    def loss(self, grad: float) -> Tensor:
        """A loss whose gradient is `grad` in each element."""
        return (self.model(torch.arange(SIZE // 2)).float() * grad).sum()

    def backward(self, grad: float, **keywords: Any) -> None:
        with amp.scale_loss(self.loss(grad), self.optimizer, **keywords) as scaled_loss:
            scaled_loss.backward()

    def seen(self, grad: float) -> None:
        """Leave a gradient that was checked."""
        self.backward(grad)
        if self.kind.is_shown:
            assert next(amp.master_params(self.optimizer)).grad is not None
        amp.current_engine().records.look_at_unseen(amp.current_engine().records.all[0])

    @property
    def grad(self) -> float | None:
        """The one value that all elements have."""
        if self.param.grad is None:
            return None
        values = set(self.param.grad.detach().to_dense().float().flatten().tolist())
        assert len(values) == 1
        return values.pop()

    @property
    def weight(self) -> float:
        """The one value of all elements of the master."""
        (values,) = {tuple(row) for row in next(amp.master_params(self.optimizer)).tolist()}
        assert len(set(values)) == 1
        return values[0]

    def step(self) -> bool:
        """Return True if it was skipped."""
        self.optimizer.step()
        return amp.last_step(self.optimizer).skipped


def fail_after(loss: Tensor) -> None:
    loss.backward()
    raise KeyError


@pytest.fixture(params=[1.0, 8.0], ids=["scale 1", "scale 8"])
def scale(request: pytest.FixtureRequest) -> float:
    return request.param


@pytest.fixture(params=KINDS)
def cell(request: pytest.FixtureRequest, scale: float) -> Cell:
    return Cell(request.param, scale)


# --- without a gradient -----------------------------------------------------------------------------------------------


def test_without_a_gradient_an_exit_a_clipping_and_a_step_do_nothing(cell: Cell) -> None:
    with amp.scale_loss(cell.loss(2.0), cell.optimizer):
        pass
    assert float(amp.clip_grad_norm_(cell.optimizer, 1.0)) == 0.0
    assert not cell.step()
    assert (cell.grad, cell.weight) == (None, 1.0)


# --- a gradient that was seen, and what other code did to it since ----------------------------------------------------


def test_an_exit_leaves_gradients_unscaled_and_in_float32_beside_a_master(cell: Cell) -> None:
    cell.backward(2.0)
    assert cell.grad == 2.0
    assert cell.param.grad is not None
    is_wide = cell.kind.level == "O5" and cell.scale != 1.0
    assert cell.param.grad.dtype == (torch.float32 if is_wide else cell.param.dtype)
    assert cell.param.grad.is_sparse == cell.kind.is_sparse


@pytest.mark.parametrize("write", WRITES)
def test_a_step_takes_what_is_there_and_leaves_it(cell: Cell, write: str) -> None:
    change, factor = WRITES[write]
    cell.seen(2.0)
    change(cell.param)
    assert not cell.step()
    assert cell.weight == 1.0 - 2.0 * (factor or 0.0)
    assert cell.param.tolist() == [[cell.weight] * 2] * (SIZE // 2)
    assert cell.grad == (None if factor is None else 2.0 * factor)


@pytest.mark.parametrize("write", WRITES)
def test_an_exit_adds_to_what_is_there(cell: Cell, write: str) -> None:
    change, factor = WRITES[write]
    cell.seen(2.0)
    change(cell.param)
    cell.backward(4.0)
    assert cell.grad == 2.0 * (factor or 0.0) + 4.0
    assert not cell.step()
    assert cell.weight == 1.0 - cell.grad


@pytest.mark.parametrize("write", WRITES)
def test_a_backward_of_a_scaled_loss_sets_aside_what_is_there(cell: Cell, write: str) -> None:
    change, factor = WRITES[write]
    cell.seen(2.0)
    change(cell.param)
    left = cell.grad
    with amp.scale_loss(cell.loss(4.0), cell.optimizer) as scaled_loss:
        assert cell.grad == left, "the entry changes no gradient"
        scaled_loss.backward()
        inside = cell.grad
    assert inside == (32.0 if cell.scale == 8.0 else 4.0 + (left or 0.0))


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("kind", DENSE)
def test_a_clipping_has_the_norm_of_what_is_there_and_scales_the_step(kind: str, scale: float, write: str) -> None:
    cell = Cell(kind, scale)
    change, factor = WRITES[write]
    cell.seen(2.0)
    change(cell.param)
    grad = 2.0 * (factor or 0.0)
    norm = float(amp.clip_grad_norm_(cell.optimizer, 1.0))
    assert norm == pytest.approx(grad * SIZE**0.5)
    assert not cell.step()
    is_in_place = kind == "half" or (kind == "negative view, master" and scale == 1.0)
    tolerance = 2**-8 if is_in_place else 1e-6
    assert cell.weight == pytest.approx(1.0 - grad * min(1.0, 1.0 / (norm + 1e-6)), abs=tolerance)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("kind", DENSE)
def test_a_clipping_holds_for_what_is_added_to(kind: str, scale: float, write: str) -> None:
    cell = Cell(kind, scale)
    change, factor = WRITES[write]
    cell.seen(4.0)
    change(cell.param)
    amp.clip_grad_norm_(cell.optimizer, SIZE**0.5)  # each element to 1
    cell.backward(2.0)
    wanted = 0.0 if not factor else 1.0
    assert next(amp.master_params(cell.optimizer)).grad is not None
    assert cell.grad == pytest.approx(wanted + 2.0, abs=2**-9 if kind == "half" else 1e-6)


# --- what is not finite -----------------------------------------------------------------------------------------------


def spoilt(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(math.inf)


def spoilt_anew(param: Tensor) -> None:
    assert param.grad is not None
    param.grad = param.grad * math.nan


@pytest.mark.parametrize("spoil", [spoilt, spoilt_anew])
def test_a_gradient_that_was_spoilt_since_the_check_skips_the_step(cell: Cell, spoil: Callable[[Tensor], None]) -> None:
    cell.seen(2.0)
    spoil(cell.param)
    assert cell.step()
    assert cell.weight == 1.0
    assert cell.step(), "it is there still"
    assert cell.weight == 1.0


def repaired(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.copy_(torch.zeros_like(param.grad))


@pytest.mark.parametrize("repair", [zeroed, dropped, repaired])
def test_what_was_found_of_a_gradient_ends_with_it(cell: Cell, repair: Callable[[Tensor], None]) -> None:
    cell.seen(math.inf)
    repair(cell.param)
    assert not cell.step()
    assert cell.weight == 1.0
    cell.optimizer.zero_grad()
    cell.backward(2.0)
    assert not cell.step()
    assert cell.weight == -1.0


def test_an_overflow_skips_each_step_until_it_is_zeroed(cell: Cell) -> None:
    cell.backward(math.inf)
    for _ in range(2):
        assert cell.step()
        assert cell.weight == 1.0
        assert cell.grad is not None
        assert not math.isfinite(cell.grad)
    cell.backward(2.0)
    assert cell.step(), "a finite gradient was added to one that is not"
    cell.optimizer.zero_grad()
    cell.backward(2.0)
    assert not cell.step()
    assert cell.weight == -1.0


# --- plain loops and a scale ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", HAS_MASTER)
def test_half_gradients_that_no_scale_loss_left_are_refused_at_a_scale_and_taken_at_1(kind: str, scale: float) -> None:
    cell = Cell(kind, scale)
    cell.loss(2.0).backward()
    if scale == 1.0:
        assert not cell.step()
        assert cell.weight == -1.0
    else:
        with pytest.raises(AmpStateError, match="of a backward\\(\\) outside of amp.scale_loss"):
            cell.step()
        assert cell.weight == 1.0
        cell.optimizer.zero_grad()
        cell.backward(2.0)
        assert not cell.step()


# --- clipped and written ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("write", ["in place", "replaced", "zeroed", "None"])
def test_a_write_between_the_clipping_and_the_step_is_refused_where_the_step_clips(scale: float, write: str) -> None:
    cell = Cell("half, master", scale)
    change, factor = WRITES[write]
    cell.seen(2.0)
    amp.clip_grad_norm_(cell.optimizer, 1.0)
    change(cell.param)
    if factor is None:
        assert not cell.step()
    else:
        with pytest.raises(AmpStateError, match="were written after amp.clip_grad_norm_"):
            cell.step()
    assert cell.weight == 1.0


# --- delay_unscale ----------------------------------------------------------------------------------------------------


@pytest.fixture(params=KINDS)
def delayed(request: pytest.FixtureRequest) -> Cell:
    """A gradient of 2 that `delay_unscale` left scaled."""
    cell = Cell(request.param, 8.0)
    cell.backward(2.0, delay_unscale=True)
    return cell


def test_a_delayed_gradient_is_scaled_as_the_backward_left_it(delayed: Cell) -> None:
    assert delayed.grad == 16.0
    assert delayed.param.grad is not None
    assert delayed.param.grad.dtype == delayed.param.dtype


def test_the_next_body_adds_to_a_delayed_gradient_and_its_exit_unscales_the_sum(delayed: Cell) -> None:
    with amp.scale_loss(delayed.loss(4.0), delayed.optimizer) as scaled_loss:
        scaled_loss.backward()
        assert delayed.grad == 48.0
        assert scaler_numbers()[1] == 0
    assert delayed.grad == 6.0
    assert scaler_numbers()[1] == 1, "both count as one"
    assert not delayed.step()
    assert delayed.weight == -5.0


def test_a_step_unscales_a_delayed_gradient(delayed: Cell) -> None:
    assert not delayed.step()
    assert (delayed.weight, delayed.grad) == (-1.0, 2.0)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_reaches_a_delayed_gradient(delayed: Cell, set_to_none: bool) -> None:
    delayed.optimizer.zero_grad(set_to_none)
    delayed.backward(4.0)
    assert delayed.grad == 4.0


def test_an_overflow_that_was_delayed_skips_the_step(delayed: Cell) -> None:
    delayed.backward(math.inf, delay_unscale=True)
    delayed.backward(2.0)
    assert delayed.step()
    assert delayed.weight == 1.0


def test_a_body_that_raises_before_its_backward_keeps_a_delayed_gradient(delayed: Cell) -> None:
    with pytest.raises(KeyError), amp.scale_loss(delayed.loss(4.0), delayed.optimizer):
        raise KeyError
    assert delayed.grad == 16.0
    delayed.step()
    assert delayed.weight == -1.0


def test_a_body_that_raises_after_its_backward_discards_a_delayed_gradient(delayed: Cell) -> None:
    with pytest.raises(KeyError), amp.scale_loss(delayed.loss(4.0), delayed.optimizer) as scaled_loss:
        fail_after(scaled_loss)
    assert delayed.grad is None
    delayed.step()
    assert delayed.weight == 1.0


def test_beside_unscaled_gradients_a_delayed_body_unscales_at_once(cell: Cell) -> None:
    cell.backward(1.0)
    cell.backward(2.0, delay_unscale=True)
    assert cell.grad == 3.0
    cell.backward(4.0)
    assert cell.grad == 7.0


def test_beside_unscaled_gradients_of_0_a_delayed_body_leaves_scaled_ones(cell: Cell) -> None:
    cell.backward(1.0)
    cell.optimizer.zero_grad(set_to_none=False)
    cell.backward(2.0, delay_unscale=True)
    assert cell.grad == 2.0 * cell.scale
    assert not cell.step()
    assert cell.weight == -1.0


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("delay_unscale", [True, False])
def test_zero_grad_reaches_earlier_gradients_after_a_body_that_left_none(
    cell: Cell, delay_unscale: bool, set_to_none: bool
) -> None:
    cell.backward(1.0)
    other = torch.ones((), requires_grad=True)
    with amp.scale_loss(other * 2, cell.optimizer, delay_unscale=delay_unscale) as scaled_loss:
        scaled_loss.backward()
    assert cell.grad == 1.0
    cell.optimizer.zero_grad(set_to_none)
    cell.backward(4.0)
    assert cell.grad == 4.0


def test_zeros_stay_where_a_delayed_body_left_no_gradient(cell: Cell) -> None:
    cell.backward(1.0)
    cell.optimizer.zero_grad(set_to_none=False)
    other = torch.ones((), requires_grad=True)
    with amp.scale_loss(other * 2, cell.optimizer, delay_unscale=True) as scaled_loss:
        scaled_loss.backward()
    assert cell.grad == 0.0
    cell.backward(4.0)
    assert cell.grad == 4.0


# --- bodies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("has_earlier", [True, False])
def test_a_body_that_raises_gets_its_gradients_back(kind: str, has_earlier: bool) -> None:
    cell = Cell(kind, 8.0)
    if has_earlier:
        cell.backward(2.0)
    earlier = cell.param.grad
    with pytest.raises(KeyError), amp.scale_loss(cell.loss(4.0), cell.optimizer) as scaled_loss:
        fail_after(scaled_loss)
    assert cell.param.grad is earlier
    assert cell.grad == (2.0 if has_earlier else None)
    assert not cell.step()
    assert cell.weight == (-1.0 if has_earlier else 1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_an_exit_that_refuses_gives_gradients_back(kind: str) -> None:
    cell = Cell(kind, 8.0)
    cell.backward(2.0)
    loss = cell.loss(4.0)
    with (
        pytest.raises(AmpStateError, match="called on the loss that was passed"),
        amp.scale_loss(loss, cell.optimizer),
    ):
        loss.backward()
    assert cell.grad == 2.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_body_inside_of_a_body_is_refused_and_changes_nothing(kind: str) -> None:
    cell = Cell(kind, 8.0)
    with amp.scale_loss(cell.loss(2.0), cell.optimizer) as scaled_loss:
        scaled_loss.backward()
        with (
            pytest.raises(AmpStateError, match="inside of its own body"),
            amp.scale_loss(cell.loss(4.0), cell.optimizer),
        ):
            pass
    assert cell.grad == 2.0


def test_a_step_inside_of_a_body_is_refused_at_a_scale_and_taken_at_1(scale: float) -> None:
    cell = Cell("half, master", scale)
    with amp.scale_loss(cell.loss(2.0), cell.optimizer) as scaled_loss:
        scaled_loss.backward()
        if scale != 1.0:
            with pytest.raises(AmpStateError, match="Leave the `with` first"):
                cell.step()
        else:
            cell.step()
    assert (cell.weight, cell.grad) == (1.0 if scale != 1.0 else -1.0, 2.0)


@pytest.mark.parametrize("kind", ["half, master", "half", "FP32"])
def test_a_gradient_in_memory_of_others_is_set_aside_in_memory_of_its_own(kind: str) -> None:
    cell = Cell(kind, 8.0)
    bucket = torch.full((2, SIZE), 2.0, dtype=cell.param.dtype)
    cell.param.grad = bucket[0].view_as(cell.param)
    with amp.scale_loss(cell.loss(4.0), cell.optimizer) as scaled_loss:
        scaled_loss.backward()
        bucket.fill_(100.0)
    assert cell.grad == 6.0
    if kind != "half, master":  # whose gradient is float32 afterwards
        assert cell.param.grad is not None
        assert cell.param.grad.data_ptr() == bucket.data_ptr()
        assert bucket.tolist() == [[6.0] * SIZE, [100.0] * SIZE]


def test_an_exit_that_adds_to_earlier_gradients_keeps_no_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    forgets: list[kernels.ListCheck] = []
    monkeypatch.setattr(kernels.ListCheck, "forget_gradients", lambda check: forgets.append(check))
    cell = Cell("half, master", 8.0)
    cell.backward(2.0)
    assert not forgets
    cell.backward(4.0)
    assert len(forgets) == 1
    assert cell.grad == 6.0


@pytest.mark.parametrize("zeroes", ["the buffer", "zero_grad"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_that_other_code_holds_stay_where_they_are_at_a_scale_of_1(kind: str, zeroes: str) -> None:
    cell = Cell(kind, 1.0)
    held = torch.zeros(2, SIZE, dtype=cell.param.dtype)[0].view_as(cell.param)
    cell.param.grad = held
    for value in (2.0, 4.0):
        held.zero_() if zeroes == "the buffer" else cell.optimizer.zero_grad(set_to_none=False)
        cell.backward(value)
        assert cell.grad == value
        assert torch.equal(held.float(), torch.full_like(held, value, dtype=torch.float32))
        cell.backward(1.0)
        assert cell.grad == value + 1.0
        assert float(held.flatten()[0]) == value + 1.0
        cell.step()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("delays", [False, True], ids=["", "delay_unscale"])
@pytest.mark.parametrize("kind", [kind for kind in HAS_MASTER if kind in DENSE])
def test_a_graph_of_gradients_is_refused_at_a_scale(kind: str, delays: bool) -> None:
    cell = Cell(kind, 8.0)
    with (
        pytest.raises(AmpStateError, match="create_graph=True"),
        amp.scale_loss(cell.loss(2.0).square(), cell.optimizer, delay_unscale=delays) as scaled_loss,
    ):
        scaled_loss.backward(create_graph=True)
    assert cell.grad is None


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_a_graph_that_another_backward_of_the_body_makes_is_refused_too() -> None:
    cell = Cell("half, master", 8.0)
    context = amp.scale_loss(cell.loss(2.0), cell.optimizer)
    context.__enter__().backward()
    amp.scale(cell.loss(2.0).square()).backward(create_graph=True)
    with pytest.raises(AmpStateError, match="create_graph=True"):
        context.__exit__(None, None, None)
    assert cell.grad is None


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("delays", [False, True], ids=["", "delay_unscale"])
@pytest.mark.parametrize("place", [None, 0, 1], ids=["alone", "first of two", "second of two"])
def test_where_a_graph_is_refused_the_gradients_of_the_entry_are_left(place: int | None, delays: bool) -> None:
    models = [nn.Linear(3, 1), nn.Linear(3, 1)][: 1 if place is None else 2]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1.0) for model in models]
    amp.initialize(models, optimizers, opt_level="O0", loss_scale=8.0, verbosity=0)

    def loss(of: int) -> Tensor:
        return models[of](torch.ones(2, 3)).square().sum()

    with amp.scale_loss(sum(map(loss, range(len(models)))), optimizers) as scaled_loss:
        scaled_loss.backward()
    before = [p.grad.clone() for model in models for p in model.parameters() if p.grad is not None]
    context = amp.scale_loss(sum(map(loss, range(len(models)))), optimizers, delay_unscale=delays)
    context.__enter__().backward()
    amp.scale(loss(place or 0)).backward(create_graph=True)
    with pytest.raises(AmpStateError, match="create_graph=True"):
        context.__exit__(None, None, None)
    after = [p.grad for model in models for p in model.parameters() if p.grad is not None]
    assert all(map(torch.equal, before, after))
    assert len(before) == len(after) == 2 * len(models)
    for model, optimizer in zip(models, optimizers, strict=True):
        expected = [p.detach() - p.grad for p in model.parameters() if p.grad is not None]
        optimizer.step()
        assert all(map(torch.equal, model.parameters(), expected))


def test_a_decay_by_hand_whose_sum_has_a_graph_is_no_double_backward() -> None:
    """`delay_unscale` left the gradient scaled, and the step unscales it."""
    cell = Cell("FP32", 8.0)
    cell.backward(2.0, delay_unscale=True)
    assert cell.param.grad is not None
    cell.param.grad = cell.param.grad + cell.param * 8.0
    assert cell.param.grad.grad_fn is not None
    assert not cell.step()
    assert cell.weight == 1.0 - (2.0 + 1.0)


def test_earlier_gradients_with_a_graph_of_a_shared_parameter_are_added_to() -> None:
    """The exit of the first optimizer has put them back when the second looks."""
    param = nn.Parameter(torch.ones(3))
    own = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizers = [torch.optim.SGD([param, one], lr=1.0) for one in own]
    amp.initialize(nn.ParameterList([param, *own]), optimizers, opt_level="O0", loss_scale=8.0, verbosity=0)
    for _ in range(2):
        with amp.scale_loss((param * own[0] * own[1]).sum(), optimizers) as scaled_loss:
            scaled_loss.backward()
        for p in (param, *own):
            assert p.grad is not None
            p.grad = p.grad + p
    assert all(p.grad is not None and torch.equal(p.grad, torch.full((3,), 4.0)) for p in (param, *own))


def turned(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.data = param.grad.data.t()


def shortened(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.data = param.grad.data[1:]


def negated(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.data = torch._neg_view(param.grad.data)


@pytest.mark.skipif(
    not kernels.has_native(torch.device("cpu")), reason="torch's own step takes what its operators take"
)
@pytest.mark.parametrize("changed", [turned, shortened, negated])
def test_an_exits_gradient_that_got_another_layout_of_its_memory_is_refused(changed: Callable[[Tensor], None]) -> None:
    """No version tells of it, and the kernels would read the memory as it was laid out before, or past its end."""
    model = nn.Linear(3, 3, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp.initialize(model, optimizer, opt_level="O1", loss_scale=8.0, verbosity=0)
    for _ in range(3):
        optimizer.step()
        optimizer.zero_grad()
        with amp.scale_loss(model(torch.randn(2, 3)).float().square().sum(), optimizer) as scaled_loss:
            scaled_loss.backward()
    changed(model.weight)
    before = model.weight.detach().clone()
    with pytest.raises(AmpValueError, match=r"gradients\[0\] is a"):
        optimizer.step()
    assert torch.equal(model.weight, before)


# --- masters' gradients -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_master_params_show_the_models_own_gradients_in_float32(kind: str, scale: float) -> None:
    cell = Cell(kind, scale)
    cell.backward(2.0)
    (master,) = amp.master_params(cell.optimizer)
    assert master.grad is cell.param.grad
    assert cell.grad == 2.0
    assert master.grad is not None
    assert master.grad.dtype == master.dtype
