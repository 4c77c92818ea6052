"""amp.export_state_dict: weights for other programs, in the types that the model computes in."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from amp_engine import AmpTypeError, amp
from tests.models import NORMED_MLP
from tests.support import WEIGHT_DTYPE, assert_bitwise, frozen, masters, started, train


class Tied(nn.Module):
    """Two layers with one weight, a buffer under two names, one that is not saved, and an integer."""

    step: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.register_buffer("table", torch.linspace(0.0, 1.0, 64))
        self.register_buffer("again", self.table)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.register_buffer("step", torch.tensor(7))

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x)) + self.again.float()


def size_of(value: Any) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return len(file.getvalue())


def trained(level: str, model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    for _ in range(3):
        with amp.scale_loss(model(torch.ones(2, 64)).float().square().mean(), optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


# --- types ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O5"])
def test_entries_have_the_types_and_values_that_the_model_computes_with(level: str) -> None:
    model, optimizer = started(level)
    train(NORMED_MLP, model, optimizer, "cc")
    exported = amp.export_state_dict(model)
    assert list(exported) == list(model.state_dict())
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert_bitwise(frozen(dict(exported)), frozen({name: own[name] for name in exported}))
    assert exported["0.weight"].dtype == WEIGHT_DTYPE[level]
    assert exported["1.weight"].dtype == (torch.float16 if level == "O3" else torch.float32)
    assert exported["1.num_batches_tracked"].dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, "bf16"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3", "O5"])
def test_another_type_is_rounded_once_from_the_exact_values(level: str, dtype: Any) -> None:
    model, optimizer = started(level)
    train(NORMED_MLP, model, optimizer, "cc")
    target = torch.bfloat16 if dtype == "bf16" else dtype
    saved = model.state_dict()
    expected = {name: v.to(target) if v.is_floating_point() else v.clone() for name, v in saved.items()}
    assert_bitwise(dict(amp.export_state_dict(model, dtype)), expected)
    if level in ("O2", "O5") and target != WEIGHT_DTYPE[level]:
        half = model.get_parameter("0.weight").detach()
        assert not torch.equal(amp.export_state_dict(model, dtype)["0.weight"], half.to(target))  # not through half


# --- what is in it --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.float32])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_tied_weights_are_one_and_a_file_has_them_once(level: str, dtype: Any) -> None:
    model = Tied()
    trained(level, model)
    exported = amp.export_state_dict(model, dtype)
    assert exported["first.weight"] is exported["second.weight"]
    assert exported["table"] is exported["again"]
    plain = {**exported, "second.weight": exported["second.weight"].clone()}
    numel = model.first.weight.numel()
    assert size_of(plain) - size_of(exported) > 0.9 * numel * exported["first.weight"].element_size()
    assert "scratch" not in exported
    assert exported["step"] == 7
    fresh = Tied()
    fresh.load_state_dict(exported)


@pytest.mark.parametrize("dtype", [None, torch.float32])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_entries_are_copies_and_training_goes_on(level: str, dtype: Any) -> None:
    def run(exports: bool) -> list[Tensor]:
        model, optimizer = started(level)
        train(NORMED_MLP, model, optimizer, "cc")
        if exports:
            exported = amp.export_state_dict(model, dtype)
            assert not any(value.requires_grad for value in exported.values())
            before = frozen(dict(exported))
        train(NORMED_MLP, model, optimizer, "cc", first=2)
        if exports:
            assert_bitwise(dict(exported), before)
            for value in exported.values():
                value.zero_()
        return [value.clone() for value in masters(optimizer)]

    quiet = run(exports=False)
    amp.close()
    assert_bitwise(run(exports=True), quiet)


def test_weights_with_another_order_in_memory_come_out_contiguous() -> None:
    model = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
    assert not model.weight.is_contiguous()
    assert all(value.is_contiguous() for value in amp.export_state_dict(model).values())


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_wrappers_are_not_in_the_names(level: str) -> None:
    model, _ = started(level)
    plain = amp.export_state_dict(model)
    replicated = DistributedDataParallel(model)
    wrappers: list[nn.Module] = [
        replicated,
        nn.DataParallel(model),
        torch.compile(model, backend="eager"),
        torch.compile(replicated, backend="eager"),
        DistributedDataParallel(torch.compile(model, backend="eager")),
    ]
    for wrapper in wrappers:
        assert_bitwise(dict(amp.export_state_dict(wrapper)), dict(plain))


def test_an_average_is_exported_by_the_names_of_its_model() -> None:
    model, _ = started("O2")
    averaged = amp.averaged_model(model)
    assert_bitwise(dict(amp.export_state_dict(averaged)), frozen(dict(model.state_dict())))
    assert list(amp.export_state_dict(AveragedModel(NORMED_MLP.model()))) == list(model.state_dict())


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["int8", torch.int64, torch.float64, 16])
def test_another_dtype_is_refused_with_those_that_are_allowed(dtype: Any) -> None:
    with pytest.raises(AmpTypeError, match=r"dtype=.*Allowed are torch\.float16, torch\.bfloat16 and torch\.float32"):
        amp.export_state_dict(NORMED_MLP.model(), dtype)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(AmpTypeError, match="not a list"):
        amp.export_state_dict([NORMED_MLP.model()])  # type: ignore[arg-type]
