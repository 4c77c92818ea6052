"""The traps of apex.amp, each as a test named after it: what was broken there is right here."""

from __future__ import annotations

import collections
import copy
import functools
import io
import pickle
import types
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_engine import amp
from tests import support
from tests.models import MLP, NORMED_MLP
from tests.support import (
    LEVELS,
    MASTER_LEVELS,
    assert_bitwise,
    backward,
    entries_of,
    masters,
    scaler_numbers,
    train,
    weights_of,
)

HALF = torch.float16


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


started = functools.partial(support.started, task=MLP)


# initialize


def test_state_dict_of_a_disabled_amp_is_empty_and_loads() -> None:
    started("O2", enabled=False)
    assert amp.state_dict() == collections.OrderedDict()
    amp.load_state_dict(amp.state_dict())


def test_a_module_given_as_an_argument_is_not_cast() -> None:
    class Distilled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, inputs: Tensor, teacher: nn.Module) -> Tensor:
            return self.layer(inputs) - teacher(inputs.float())

    model, teacher = Distilled(), nn.Linear(8, 4)
    amp.initialize(model, opt_level="O2", verbosity=0)
    model(torch.randn(2, 8), teacher)
    assert teacher.weight.dtype == torch.float32


# scale_loss


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_tuple_of_optimizers_is_prepared_like_a_list(level: str) -> None:
    def run(kind: type) -> list[Tensor]:
        models = [NORMED_MLP.model(0), NORMED_MLP.model(1)]
        optimizers = [sgd(model) for model in models]
        amp.initialize(models, optimizers, opt_level=level, verbosity=0)
        for index in range(4):
            loss = sum(NORMED_MLP.loss(model, NORMED_MLP.batch(index)) for model in models)
            backward(loss, kind(optimizers))
            if index % 2:
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        values = [master for optimizer in optimizers for master in masters(optimizer)]
        amp.close()
        return values

    assert_bitwise(run(tuple), run(list))


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_a_delayed_first_backward_keeps_the_gradients_of_batch_norm(level: str) -> None:
    model, optimizer = started(level, task=NORMED_MLP)
    norm = model[1]
    backward(NORMED_MLP.loss(model, NORMED_MLP.batch(0)), optimizer, delay_unscale=True)
    scale = amp._amp_state.loss_scalers[0].loss_scale()
    first = norm.weight.grad.clone() / scale
    assert first.abs().max() > 0
    backward(NORMED_MLP.loss(model, NORMED_MLP.batch(0)), optimizer)
    torch.testing.assert_close(norm.weight.grad, 2 * first, rtol=1e-2, atol=1e-5)


def test_the_cast_cache_does_not_outlive_an_exception() -> None:
    model, optimizer = started("O1")
    loss = MLP.loss(model, MLP.batch())
    with pytest.raises(ZeroDivisionError), amp.scale_loss(loss, optimizer):
        raise ZeroDivisionError
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    assert model(MLP.batch()[0]).abs().max() == 0


# masters


@pytest.mark.parametrize("level", MASTER_LEVELS)
@pytest.mark.parametrize("when", ["before the first backward", "between steps"])
def test_parameters_unfrozen_later_get_masters_and_unscaled_gradients(level: str, when: str) -> None:
    model = MLP.model()
    model[0].requires_grad_(False)
    optimizer = sgd(model)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    if when == "between steps":
        train(MLP, model, optimizer, "cc")
    model[0].requires_grad_(True)
    truth = MLP.model()
    truth.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    MLP.loss(truth, MLP.batch(5)).backward()
    expected = 0.1 * truth[0].weight.grad
    train(MLP, model, optimizer, "c", first=5)
    exact = MLP.model()[0].weight.detach()
    now = masters(optimizer)[0]
    errors = [(start.float() - now - expected).norm() for start in (exact, exact.to(model[0].weight.dtype))]
    assert min(errors) < 0.1 * expected.norm()
    assert {param.dtype for param in weights_of(optimizer)} == {torch.float32}
    assert not any(param is model[0].weight for param in weights_of(optimizer))


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_accumulation_with_scale_one_keeps_every_batch_norm_gradient(level: str) -> None:
    model, optimizer = started(level, task=NORMED_MLP, loss_scale=1.0)
    norm = model[1]
    seen = []
    for index in range(3):
        backward(NORMED_MLP.loss(model, NORMED_MLP.batch(index)), optimizer)
        seen.append(norm.weight.grad.clone())
    alone = []
    for index in range(3):
        optimizer.zero_grad()
        backward(NORMED_MLP.loss(model, NORMED_MLP.batch(index)), optimizer)
        alone.append(norm.weight.grad.clone())
    torch.testing.assert_close(seen[1], alone[0] + alone[1])
    torch.testing.assert_close(seen[2], alone[0] + alone[1] + alone[2])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("keywords", [{}, {"set_to_none": True}, {"set_to_none": False}], ids=str)
def test_zero_grad_has_the_signature_of_torch(level: str, keywords: dict[str, bool]) -> None:
    model, optimizer = started(level, task=NORMED_MLP)
    backward(NORMED_MLP.loss(model, NORMED_MLP.batch(7)), optimizer)
    optimizer.zero_grad(**keywords)
    for param in weights_of(optimizer):
        if keywords.get("set_to_none", True):
            assert param.grad is None
        else:
            assert param.grad is not None
            assert param.grad.abs().max() == 0
    backward(NORMED_MLP.loss(model, NORMED_MLP.batch(0)), optimizer)
    gradients = [param.grad.clone() for param in weights_of(optimizer)]
    amp.close()
    model, optimizer = started(level, task=NORMED_MLP)
    NORMED_MLP.loss(model, NORMED_MLP.batch(7))
    backward(NORMED_MLP.loss(model, NORMED_MLP.batch(0)), optimizer)
    assert_bitwise(gradients, [param.grad for param in weights_of(optimizer)])


TINY = 1e-10  # 0.0 in float16


def with_tiny_state(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for param in model.parameters():
        param.grad = torch.full_like(param, 1e-5)
    optimizer.step()
    optimizer.zero_grad()
    for param in model.parameters():
        optimizer.state[param]["exp_avg_sq"].fill_(TINY)
    return optimizer


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_optimizer_state_from_before_initialize_never_passes_through_half(level: str) -> None:
    model = MLP.model()
    optimizer = with_tiny_state(model)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    for param in entries_of(optimizer):
        moments = optimizer.state[param]["exp_avg_sq"]
        assert_bitwise(moments, torch.full_like(moments, TINY))
        assert moments.dtype == torch.float32


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_an_optimizer_checkpoint_loaded_after_initialize_never_passes_through_half(
    level: str,
) -> None:
    saved = with_tiny_state(MLP.model()).state_dict()
    model = MLP.model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    optimizer.load_state_dict(saved)
    for param in entries_of(optimizer):
        moments = optimizer.state[param]["exp_avg_sq"]
        assert_bitwise(moments, torch.full_like(moments, TINY))
    assert_bitwise(optimizer.state_dict()["state"], saved["state"])


@pytest.mark.parametrize("level", MASTER_LEVELS)
@pytest.mark.parametrize("widened", [True, False], ids=["FP32 checkpoint", "half checkpoint"])
def test_a_model_checkpoint_loaded_after_the_start_reaches_the_masters(level: str, widened: bool) -> None:
    model, optimizer = started(level)
    train(MLP, model, optimizer, "ccc")
    other = MLP.model(5)
    if not widened:
        other = other.to(model[0].weight.dtype)
    model.load_state_dict(other.state_dict())
    exact = [param.detach().float() for param in other.parameters()]
    optimizer.zero_grad()
    optimizer.step()
    assert_bitwise(masters(optimizer), exact)
    assert_bitwise(
        [param.detach() for param in model.parameters()],
        [value.to(model[0].weight.dtype) for value in exact],
    )


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_an_in_place_write_to_a_half_parameter_reaches_its_master(level: str) -> None:
    model, optimizer = started(level)
    train(MLP, model, optimizer, "cc")
    with torch.no_grad():
        model[0].weight.copy_(torch.full_like(model[0].weight, 0.25))
    kept = masters(optimizer)[1:]
    optimizer.zero_grad()
    optimizer.step()
    assert_bitwise(masters(optimizer)[0], torch.full((16, 8), 0.25))
    assert_bitwise(masters(optimizer)[1:], kept)


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_a_checkpoint_of_the_model_holds_the_exact_masters(level: str) -> None:
    model, optimizer = started(level, task=NORMED_MLP)
    train(NORMED_MLP, model, optimizer, "ccccc")
    saved = model.state_dict()
    assert_bitwise([saved[name] for name, _ in model.named_parameters()], masters(optimizer))
    assert not torch.equal(saved["0.weight"], model[0].weight.float())


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_writes_through_data_reach_masters(level: str) -> None:
    model, optimizer = started(level)
    train(MLP, model, optimizer, "cc")
    model[0].weight.data.fill_(0.25)
    train(MLP, model, optimizer, "c", first=2)
    assert ((model[0].weight - 0.25).abs() < 0.1).all()


# skipping


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_scheduler_can_be_made_while_a_skip_is_pending(level: str) -> None:
    model, optimizer = started(level)
    backward(MLP.loss(model, MLP.batch()), optimizer, overflow=True)
    before = masters(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        optimizer.step()
        scheduler.step()
    assert_bitwise(masters(optimizer), before)


def test_step_is_never_replaced() -> None:
    model = MLP.model()
    optimizer = sgd(model)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    backward(MLP.loss(model, MLP.batch()), optimizer, overflow=True)
    for method in ("step", "zero_grad", "add_param_group", "state_dict", "load_state_dict"):
        assert method not in vars(optimizer)
    assert "forward" not in vars(model)


# the scaler


def overflow(times: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    inputs = MLP.batch()
    for _ in range(times):
        optimizer.zero_grad()
        backward(MLP.loss(model, inputs), optimizer, overflow=True)
        optimizer.step()


def test_the_default_floor_keeps_the_scale_from_reaching_zero() -> None:
    model, optimizer = started("O1")
    overflow(60, model, optimizer)
    assert scaler_numbers() == (2.0**-24, 0)
    train(MLP, model, optimizer, "c")
    assert scaler_numbers() == (2.0**-24, 1)


def test_a_floor_of_zero_is_no_way_to_a_scale_of_zero() -> None:
    model, optimizer = started("O1", min_loss_scale=0.0)
    overflow(60, model, optimizer)
    assert scaler_numbers()[0] > 0


# checkpoints of the scaler


def test_scalers_are_matched_by_name_and_not_by_order() -> None:
    started("O2", num_losses=2)
    amp.load_state_dict(
        collections.OrderedDict(
            loss_scaler1={"loss_scale": 2.0, "unskipped": 2},
            loss_scaler0={"loss_scale": 1024.0, "unskipped": 1},
        )
    )
    assert scaler_numbers(0) == (1024.0, 1)
    assert scaler_numbers(1) == (2.0, 2)


@pytest.mark.parametrize("saved", [1.0, 64.0, 100.0, 65536.0])
def test_a_static_scale_stays_what_initialize_was_told(saved: float) -> None:
    """apex loaded over it: 65536 of a dynamic scaler at O3, whose gradients overflow for ever."""
    started("O2", loss_scale=128.0)
    amp.load_state_dict({"loss_scaler0": {"loss_scale": saved, "unskipped": 7}})
    assert scaler_numbers()[0] == 128.0
    assert not amp._amp_state.loss_scalers[0].dynamic


@pytest.mark.parametrize(("scaler_format", "more"), [("amp", {"dynamic", "opt_level", "version"}), ("apex", set())])
def test_the_checkpoint_has_apex_form_and_fills_a_given_destination(scaler_format: Any, more: set[str]) -> None:
    started("O2", num_losses=2)
    saved = amp.state_dict(format=scaler_format)
    for state in saved.values():
        assert set(state) == {"loss_scale", "unskipped"} | more
        for key in more:
            del state[key]
    assert isinstance(saved, collections.OrderedDict)
    assert saved == {
        "loss_scaler0": {"loss_scale": 65536.0, "unskipped": 0},
        "loss_scaler1": {"loss_scale": 65536.0, "unskipped": 0},
    }
    assert isinstance(saved["loss_scaler0"]["loss_scale"], float)
    assert isinstance(saved["loss_scaler0"]["unskipped"], int)
    destination: dict[str, Any] = {"mine": 1}
    assert amp.state_dict(destination) is destination
    assert list(destination) == ["mine", "loss_scaler0", "loss_scaler1"]


# state_dict, deepcopy, pickle


class WithExtraState(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 4))
        self.epoch = 3

    def get_extra_state(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]


@pytest.mark.parametrize("level", LEVELS)
def test_extra_state_passes_through_the_checkpoint(level: str) -> None:
    model = WithExtraState()
    amp.initialize(model, sgd(model), opt_level=level, verbosity=0)
    saved = model.state_dict()
    assert saved["_extra_state"] == {"epoch": 3}
    model.epoch = 0
    model.load_state_dict(saved)
    assert model.epoch == 3


@pytest.mark.parametrize("level", LEVELS)
def test_a_checkpoint_is_float_at_every_level(level: str) -> None:
    model, optimizer = started(level, task=NORMED_MLP)
    train(NORMED_MLP, model, optimizer, "c")
    saved = model.state_dict()
    assert {value.dtype for value in saved.values()} == {torch.float32, torch.int64}


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_a_checkpoint_aliases_nothing(level: str) -> None:
    model, optimizer = started(level)
    best = model.state_dict()
    before = {name: value.clone() for name, value in best.items()}
    train(MLP, model, optimizer, "ccc")
    assert_bitwise(dict(best), before)


@pytest.mark.parametrize("level", LEVELS)
def test_a_deepcopy_runs_its_own_weights(level: str) -> None:
    model, _ = started(level)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    inputs = MLP.batch()[0]
    assert model(inputs).abs().max() == 0
    assert twin(inputs).abs().max() > 0
    assert twin(inputs).dtype == model(inputs).dtype


@pytest.mark.parametrize("level", LEVELS)
def test_a_model_pickles(level: str) -> None:
    model, _ = started(level)
    inputs = MLP.batch()[0]
    expected = model(inputs).detach()
    twin = pickle.loads(pickle.dumps(model))
    assert_bitwise(twin(inputs).detach(), expected)


@pytest.mark.parametrize("level", LEVELS)
def test_torch_save_of_a_whole_model_works(level: str) -> None:
    model, _ = started(level)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    twin = torch.load(buffer, weights_only=False)
    inputs = MLP.batch()[0]
    assert_bitwise(twin(inputs).detach(), model(inputs).detach())


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_replicas_of_data_parallel_run_their_own_forward(level: str) -> None:
    """`DataParallel` makes replicas by `_replicate_for_data_parallel`; each must run on its own weights."""
    model, _ = started(level)
    replica = model._replicate_for_data_parallel()
    for name, child in model.named_children():
        twin = child._replicate_for_data_parallel()
        for key, param in child.named_parameters():
            setattr(twin, key, torch.zeros_like(param))
        replica._modules[name] = twin
    inputs = MLP.batch()[0]
    outputs = replica(inputs)
    assert outputs.dtype == torch.float32
    assert outputs.abs().max() == 0
    assert model(inputs).abs().max() > 0


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_a_pickled_optimizer_holds_plain_parameters(level: str) -> None:
    model, optimizer = started(level)
    train(MLP, model, optimizer, "c")
    backward(MLP.loss(model, MLP.batch(1)), optimizer)
    twin = pickle.loads(pickle.dumps(optimizer))
    assert {type(param) for param in entries_of(twin)} == {nn.Parameter}
    assert_bitwise([param.detach() for param in entries_of(twin)], [param.detach() for param in model.parameters()])


# function patching


@pytest.mark.parametrize("level", LEVELS)
def test_decorated_functions_cast_at_o1_and_pass_through_elsewhere(level: str) -> None:
    def dtypes(*tensors: Tensor) -> tuple[torch.dtype, ...]:
        return tuple(tensor.dtype for tensor in tensors)

    half, single = torch.ones(2, dtype=HALF), torch.ones(2)
    decorated = {
        "half": amp.half_function(dtypes),
        "float": amp.float_function(dtypes),
        "promote": amp.promote_function(dtypes),
    }
    for function in decorated.values():
        assert function(half, single) == (HALF, torch.float32)
    started(level)
    expected = {
        "O1": {
            "half": (HALF, HALF),
            "float": (torch.float32, torch.float32),
            "promote": (torch.float32, torch.float32),
        }
    }
    for name, function in decorated.items():
        if level != "O4":
            assert function(half, single) == expected.get(level, {}).get(name, (HALF, torch.float32))
    amp.close()
    for function in decorated.values():
        assert function(half, single) == (HALF, torch.float32)


def test_a_mixed_list_passes_through() -> None:
    started("O1")
    mixed = [torch.ones(2, dtype=HALF), 3]
    assert amp.float_function(lambda items: items)(mixed) is mixed


def test_a_weight_may_be_used_twice_in_one_iteration() -> None:
    model, optimizer = started("O1")
    inputs = MLP.batch()[0]
    loss = (model(inputs).float() + model(2 * inputs).float()).square().mean()
    backward(loss, optimizer)
    assert model[0].weight.grad.isfinite().all()
    assert model[0].weight.grad.abs().max() > 0


def test_new_weights_in_eval_give_new_results() -> None:
    inputs = MLP.batch()[0]
    truth = MLP.model(9)(inputs)
    model, _ = started("O1")
    model.eval()
    with torch.no_grad():
        first = model(inputs).clone()
        model.load_state_dict(MLP.model(9).state_dict())
        second = model(inputs).clone()
    torch.testing.assert_close(second.float(), truth, rtol=0.02, atol=0.02)
    assert not torch.allclose(first, second)


# With gradients on, writes through `.data` are seen in the next iteration, as under torch.autocast.
WRITES = {
    "data.clamp_": (lambda w: w.data.clamp_(-0.01, 0.01), [False]),
    "data.copy_": (lambda w: w.data.copy_(torch.full_like(w, 0.01)), [False]),
    "data =": (lambda w: setattr(w, "data", torch.full_like(w, 0.01)), [True, False]),
    "init": (lambda w: nn.init.constant_(w, 0.01), [True, False]),
    "detach().fill_": (lambda w: w.detach().fill_(0.01), [True, False]),
}


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("level", ["O1", "O4"])
def test_a_weight_written_between_two_forwards_is_seen(level: str, how: str) -> None:
    write, grad_modes = WRITES[how]
    model, optimizer = started(level)
    inputs = MLP.batch()[0]
    train(MLP, model, optimizer, "c")
    for grad_mode in grad_modes:
        with torch.set_grad_enabled(grad_mode):
            model(inputs)
            with torch.no_grad():
                write(model[0].weight)
            hidden = model[0](inputs)
        expected = F.linear(inputs.double(), model[0].weight.double(), model[0].bias.double())
        torch.testing.assert_close(hidden.double(), expected, rtol=0.02, atol=0.02)
        with torch.no_grad():
            model[0].weight.normal_()


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_an_eval_forward_does_not_starve_the_training_forward(level: str) -> None:
    model, optimizer = started(level)
    with torch.no_grad():
        model(MLP.batch()[0])
    backward(MLP.loss(model, MLP.batch()), optimizer)
    assert all(param.grad is not None for param in model.parameters())
    assert all(param.grad.abs().max() > 0 for param in model.parameters())


def test_training_with_an_optimizer_that_writes_through_data_is_not_frozen() -> None:
    class ThroughData(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for param in group["params"]:
                    param.data.add_(param.grad, alpha=-group["lr"])

    model = MLP.model()
    optimizer = ThroughData(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    losses = [train(MLP, model, optimizer, "c")[0] for _ in range(4)]
    assert losses == sorted(losses, reverse=True)
    assert losses[3] < 0.95 * losses[0]


def test_a_tuple_of_parameters_is_cast_like_any_tuple() -> None:
    started("O1")
    lstm = nn.LSTM(4, 6)
    state = (nn.Parameter(torch.zeros(1, 2, 6)), nn.Parameter(torch.zeros(1, 2, 6)))
    outputs, (hidden, cell) = lstm(torch.randn(3, 2, 4), state)
    assert outputs.dtype == hidden.dtype == cell.dtype == HALF
    outputs.float().sum().backward()
    assert all(part.grad is not None and part.grad.dtype == torch.float32 for part in state)


def test_disable_casts_survives_an_exception() -> None:
    started("O1")
    inputs = torch.ones(2, 2)

    def fails() -> None:
        with amp.disable_casts():
            assert torch.mm(inputs, inputs).dtype == torch.float32
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert torch.mm(inputs, inputs).dtype == HALF


def test_disable_casts_nests() -> None:
    started("O1")
    inputs = torch.ones(2, 2)
    with amp.disable_casts():
        with amp.disable_casts():
            assert torch.mm(inputs, inputs).dtype == torch.float32
        assert torch.mm(inputs, inputs).dtype == torch.float32
    assert torch.mm(inputs, inputs).dtype == HALF


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_disable_casts_without_function_casts_does_nothing(level: str) -> None:
    started(level)
    with amp.disable_casts():
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float32


def test_disable_casts_before_initialize_does_nothing() -> None:
    with amp.disable_casts():
        pass


def test_disable_casts_reaches_the_casts_of_an_earlier_initialize() -> None:
    started("O1", seed=0)
    started("O1", seed=1)
    with amp.disable_casts():
        assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float32


def test_cat_takes_its_tensors_by_keyword() -> None:
    started("O1")
    out = torch.cat(tensors=[torch.ones(2, dtype=HALF), torch.ones(2)])
    assert out.dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "make", "expected"),
    [
        ("torch.softmax", lambda h, s: torch.softmax(h, 0), torch.float32),
        ("Tensor.softmax", lambda h, s: h.softmax(0), torch.float32),
        ("Tensor.log_softmax", lambda h, s: h.log_softmax(0), torch.float32),
        ("einsum", lambda h, s: torch.einsum("ij,jk->ik", s, s), HALF),
        ("attention", lambda h, s: F.scaled_dot_product_attention(s, s, s), HALF),
        ("rmatmul", lambda h, s: s @ h, HALF),
        ("matmul", lambda h, s: torch.matmul(h, s), HALF),
        ("gelu", lambda h, s: F.gelu(h), torch.float32),
        ("cpu", lambda h, s: h.cpu(), torch.float32),
        ("to cpu", lambda h, s: h.to("cpu"), HALF),
        ("prelu", lambda h, s: torch.prelu(s, torch.tensor([0.1])), HALF),
        ("bmm", lambda h, s: torch.bmm(s[None], s[None]), HALF),
        ("relu", lambda h, s: F.relu(h), HALF),
        ("mean", lambda h, s: h.mean(), HALF),
    ],
)
def test_gaps_are_filled_and_lists_are_kept(name: str, make: Any, expected: Any) -> None:
    started("O1")
    assert make(torch.ones(2, 2, dtype=HALF), torch.ones(2, 2)).dtype == expected


def test_adding_float_to_half_in_place_rebinds_and_leaves_the_original() -> None:
    started("O1")
    original = torch.ones(2, dtype=HALF)
    total = original
    total += torch.full((2,), 0.5)
    assert total.dtype == torch.float32
    assert torch.equal(original, torch.ones(2, dtype=HALF))


def test_batch_norm_takes_half_inputs_beside_float_weights() -> None:
    started("O1")
    norm = nn.BatchNorm1d(4)
    outputs = norm(torch.randn(8, 4).half())
    assert outputs.dtype == HALF
    assert norm.running_mean.dtype == torch.float32


@pytest.fixture
def library() -> types.ModuleType:
    module = types.ModuleType("library")
    module.score = lambda query: query.dtype
    return module


def test_a_registered_function_is_cast_and_comes_back(library: types.ModuleType) -> None:
    original = library.score
    amp.register_half_function(library, "score")
    started("O1")
    assert library.score(torch.ones(2)) == HALF
    amp.close()
    assert library.score is original


def test_a_user_registration_wins_over_the_list_and_both_come_back() -> None:
    original = torch.mm
    amp.register_float_function(torch, "mm")
    started("O1")
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float32
    amp.close()
    assert torch.mm is original
    started("O1")
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == HALF


def test_the_cure_for_binary_cross_entropy_cures() -> None:
    amp.register_float_function(torch, "sigmoid")
    started("O1")
    probabilities = torch.sigmoid(torch.zeros(3, dtype=HALF))
    assert probabilities.dtype == torch.float32
    assert F.binary_cross_entropy(probabilities, torch.ones(3)).isfinite()


def test_registrations_have_no_effect_without_function_casts(
    library: types.ModuleType,
) -> None:
    amp.register_half_function(library, "score")
    started("O2")
    assert library.score(torch.ones(2)) == torch.float32


def test_two_initializes_at_o1_leave_no_patch_behind() -> None:
    before = torch.mm, F.linear, torch.Tensor.__matmul__
    started("O1", seed=0)
    started("O1", seed=1)
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype == HALF
    amp.close()
    assert all(a is b for a, b in zip(before, (torch.mm, F.linear, torch.Tensor.__matmul__), strict=True))


def test_the_parameter_of_an_unrelated_model_may_be_used_twice() -> None:
    """#694: a CPU parameter was 'cast' to itself and died on its second use."""
    started("O1")
    unrelated = nn.Linear(4, 4)
    inputs = torch.randn(2, 4)
    (unrelated(inputs) + unrelated(inputs)).float().sum().backward()
    assert unrelated.weight.grad is not None
