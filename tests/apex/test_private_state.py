"""Private state of apex that scripts read and write: all of it is the engine's own."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer

from amp_engine import amp
from amp_engine.errors import AmpStateError
from amp_engine.optimizers import LARC
from amp_engine.scaling.scaler import LossScaler
from tests import support
from tests.models import MLP, NORMED_MLP
from tests.support import (
    DYNAMIC_LEVELS,
    LEVELS,
    MASTER_LEVELS,
    assert_bitwise,
    backward,
    entries_of,
    frozen,
    masters,
    train,
)

METHODS = (
    "_lazy_init_maybe_master_weights",
    "_amp_lazy_init",
    "_prepare_amp_backward",
    "_post_amp_backward",
)


def started(level: str, make: Any = torch.optim.SGD, task: Any = NORMED_MLP, **keywords: Any) -> Any:
    return support.started(level, lambda params: make(params, 0.05), task, **keywords)


def scaler(index: int = 0) -> LossScaler:
    return amp._amp_state.loss_scalers[index]


# --- loss scalers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_a_written_scale_scales_the_next_loss_and_is_saved(level: str) -> None:
    model, optimizer = started(level, loss_scale="dynamic")
    scaler()._loss_scale = 2**10
    scaler()._unskipped = 5
    with amp.scale_loss(torch.ones(()), optimizer) as scaled_loss:
        assert float(scaled_loss) == 2.0**10
    assert scaler().loss_scale() == scaler()._loss_scale == 2.0**10
    assert amp.state_dict(format="apex")["loss_scaler0"] == {"loss_scale": 2.0**10, "unskipped": 6}


def test_a_written_window_is_when_the_scale_grows() -> None:
    model, optimizer = started("O2")
    scaler()._loss_scale = 2.0**8
    scaler()._scale_seq_len = 2
    train(NORMED_MLP, model, optimizer, "cccc")
    assert scaler().loss_scale() == 2.0**10


@pytest.mark.parametrize("level", DYNAMIC_LEVELS)
def test_has_overflow_tells_of_the_last_backward(level: str) -> None:
    model, optimizer = started(level)
    batch = NORMED_MLP.batch()
    backward(NORMED_MLP.loss(model, batch), optimizer, overflow=True)
    assert scaler()._has_overflow is True
    optimizer.step()
    optimizer.zero_grad()
    backward(NORMED_MLP.loss(model, batch), optimizer)
    assert scaler()._has_overflow is False


def test_has_overflow_is_written_and_cleared() -> None:
    one = LossScaler("dynamic")
    one._has_overflow = True
    assert one._has_overflow is True
    assert one.update_scale() is True
    assert one.loss_scale() == 2.0**15
    assert one._has_overflow is True
    one.clear_overflow_state()
    assert one._has_overflow is False
    one._has_overflow = True
    one._has_overflow = False
    assert one.update_scale() is False


def test_the_overflow_buffer_is_the_flag_itself_for_kernels_to_write() -> None:
    one = LossScaler("dynamic")
    buffer = one._overflow_buf
    assert (buffer.dtype, buffer.shape) == (torch.int32, (1,))
    buffer.fill_(1)
    assert one._has_overflow is True
    assert one.update_scale() is True
    buffer.fill_(1)
    buffer.zero_()
    assert one.update_scale() is False


def test_an_overflow_buffer_of_the_callers_own_is_heeded_and_the_old_one_put_back_is_clean() -> None:
    """The overflow code of the BERT pretraining scripts."""
    one, own = LossScaler("dynamic"), torch.tensor([1], dtype=torch.int32)
    old = one._overflow_buf
    one._overflow_buf = own
    assert one.update_scale() is True
    one._overflow_buf = old
    own.zero_()
    one._overflow_buf = own
    assert one.update_scale() is False
    assert one.loss_scale() == 2.0**15


def test_the_overflow_buffer_counts_where_denormal_numbers_are_taken_for_zero() -> None:
    one = LossScaler("dynamic")
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormal numbers")
    try:
        one._overflow_buf.fill_(1)
        assert one._has_overflow is True
        assert one.update_scale() is True
    finally:
        torch.set_flush_denormal(False)


# --- opt_properties --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [("enabled", False), ("keep_batchnorm_fp32", False), ("master_weights", False), ("loss_scale", 8.0)],
)
def test_a_property_that_initialize_has_acted_on_stays_and_says_what_to_type(name: str, value: Any) -> None:
    started("O2")
    before = dict(amp._amp_state.opt_properties.options)
    with pytest.raises(AmpStateError, match=rf"^{name} is .* since amp\.initialize.*amp\.close\(\)"):
        setattr(amp._amp_state.opt_properties, name, value)
    setattr(amp._amp_state.opt_properties, name, before[name])
    assert dict(amp._amp_state.opt_properties.options) == before


@pytest.mark.parametrize("name", ["opt_properties", "handle", "loss_scalers", "min_loss_scale", "max_loss_scale"])
def test_what_initialize_decided_is_not_replaced(name: str) -> None:
    started("O1")
    with pytest.raises(AmpStateError, match=rf"_amp_state\.{name} shows what amp\.initialize decided"):
        setattr(amp._amp_state, name, None)


# --- handle ----------------------------------------------------------------------------------------


def softmax_dtype() -> torch.dtype:
    return F.softmax(torch.ones(2, dtype=torch.float16), -1).dtype


def test_is_active_is_written_as_disable_casts_of_ones_own_do() -> None:
    started("O1")
    handle = amp._amp_state.handle
    assert handle._is_active is handle.is_active() is True
    handle._is_active = False
    handle._is_active = False
    assert (softmax_dtype(), handle._is_active, amp._amp_state.handle.is_active()) == (torch.float16, False, False)
    with amp.disable_casts():
        pass
    assert softmax_dtype() == torch.float16
    handle._is_active = True
    assert (softmax_dtype(), handle.is_active()) == (torch.float32, True)


def test_deactivate_gives_torch_its_functions_back_and_the_run_goes_on() -> None:
    before = F.softmax
    model, optimizer = started("O1")
    assert F.softmax is not before
    amp._amp_state.handle._deactivate()
    assert F.softmax is before
    assert amp._amp_state.handle.is_active() is False
    amp._amp_state.handle._clear_cache()
    train(NORMED_MLP, model, optimizer, "cc")


def test_clear_cache_forgets_casts_of_weights() -> None:
    model, _ = started("O1")
    model(NORMED_MLP.batch()[0])
    cache = amp._amp_state.engine.function_casts.casts.cache
    assert len(cache.kept()) > 0
    amp._amp_state.handle._clear_cache()
    assert cache.kept() == []


# --- attributes of the optimizer -------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
def test_the_attributes_come_with_initialize_and_go_with_close(level: str) -> None:
    model = NORMED_MLP.model()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    before = dict(vars(optimizer))
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert [name for name in (*METHODS, "_amp_stash") if not hasattr(optimizer, name)] == []
    amp.close()
    assert vars(optimizer) == before


def test_larc_has_the_attributes_of_the_optimizer_in_it() -> None:
    model = NORMED_MLP.model()
    larc = LARC(torch.optim.SGD(model.parameters(), 0.05))
    assert not any(hasattr(larc, name) for name in (*METHODS, "_amp_stash"))
    amp.initialize(model, larc, opt_level="O2", verbosity=0)
    assert larc._amp_stash is larc.optim._amp_stash
    assert [name for name in METHODS if getattr(larc, name) != getattr(larc.optim, name)] == []
    assert not hasattr(copy.deepcopy(larc), "_amp_stash")
    amp.close()
    assert not any(hasattr(larc, name) for name in (*METHODS, "_amp_stash"))


@pytest.mark.parametrize("name", METHODS)
def test_an_optimizer_with_an_attribute_of_that_name_is_refused(name: str) -> None:
    model = MLP.model()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    setattr(optimizer, name, None)
    with pytest.raises(AmpStateError, match=f"^Incoming optimizer already has {name} defined\\."):
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda optimizer: pickle.loads(pickle.dumps(optimizer))])
@pytest.mark.parametrize("level", LEVELS)
def test_a_copy_of_the_optimizer_is_a_plain_one(level: str, duplicate: Any) -> None:
    model, optimizer = started(level)
    train(NORMED_MLP, model, optimizer, "c")
    twin = duplicate(optimizer)
    assert [name for name in (*METHODS, "_amp_stash") if hasattr(twin, name)] == []
    before = frozen(dict(model.named_parameters()))
    for param in entries_of(twin):
        param.grad = torch.ones_like(param)
    twin.step()
    assert_bitwise(dict(model.named_parameters()), before)
    train(NORMED_MLP, model, optimizer, "c")


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_lazy_init_finds_parameters_that_are_new(level: str) -> None:
    model = NORMED_MLP.model()
    model[0].weight.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    assert len(optimizer._amp_stash.all_fp16_params) == 2
    model[0].weight.requires_grad_(True)
    optimizer._amp_lazy_init()
    assert len(optimizer._amp_stash.all_fp16_params) == 3
    assert any(param is model[0].weight for param in optimizer._amp_stash.all_fp16_params)


# --- around a backward of one's own ----------------------------------------------------------------


def unscaled_gradients(level: str, scale: float) -> list[Tensor]:
    model, optimizer = started(level, loss_scale=scale)
    backward(NORMED_MLP.loss(model, NORMED_MLP.batch()), optimizer)
    grads = [p.grad.clone() for p in amp.master_params(optimizer)]
    amp.close()
    return grads


@pytest.mark.parametrize("level", LEVELS)
def test_post_backward_alone_unscales_what_is_there(level: str) -> None:
    expected = unscaled_gradients(level, 2.0**10)
    model, optimizer = started(level, loss_scale=2.0**10)
    (NORMED_MLP.loss(model, NORMED_MLP.batch()).float() * 2.0**10).backward()
    optimizer._post_amp_backward(scaler())
    assert_bitwise([p.grad for p in amp.master_params(optimizer)], expected)


def test_preparing_inside_of_scale_loss_is_refused() -> None:
    model, optimizer = started("O2")
    with (
        pytest.raises(AmpStateError, match=r"_prepare_amp_backward\(\) was called for SGD inside of"),
        amp.scale_loss(torch.ones(()), optimizer),
    ):
        optimizer._prepare_amp_backward()


# --- the BERT pretraining scripts ------------------------------------------------------------------


def test_the_resume_of_bert_pretraining_is_exact() -> None:
    def run(first: int, count: int) -> list[Tensor]:
        train(NORMED_MLP, model, optimizer, "c" * count, first=first)
        return masters(optimizer)

    def adamw(params: Any, lr: float) -> Optimizer:
        return torch.optim.AdamW(params, lr, eps=1e-4)

    model, optimizer = started("O2", adamw)
    scaler()._loss_scale = 2**12
    saved = {"master params": run(0, 4), "optimizer": frozen(optimizer.state_dict())}
    saved["model"] = {
        name: value.half().float() if value.is_floating_point() else value for name, value in model.state_dict().items()
    }
    expected = run(4, 3)
    amp.close()

    model, optimizer = started("O2", adamw)
    scaler()._loss_scale = 2**12
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    optimizer._lazy_init_maybe_master_weights()
    optimizer._amp_stash.lazy_init_called = True
    optimizer.load_state_dict(saved["optimizer"])
    for param, saved_param in zip(amp.master_params(optimizer), saved["master params"], strict=True):
        param.data.copy_(saved_param.data)
    assert_bitwise(frozen(optimizer.state_dict()), saved["optimizer"])
    assert_bitwise(run(4, 3), expected)
