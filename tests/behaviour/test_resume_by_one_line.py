"""A resume where the trainer makes the optimizer, and loads its state before amp has seen it: bit by bit, too."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.optim import Optimizer

from amp_engine import AmpRuntimeWarning, Engine, amp
from tests.behaviour.test_later_optimizers import KINDS, adamw, half_model, initialized, train
from tests.models import MLP
from tests.support import assert_bitwise

WARNS = "Warning:  the state of AdamW was in half when its masters were made"

KINDS = {**KINDS, "NAdam": lambda params: torch.optim.NAdam(params, lr=1e-4)}


def result(model: nn.Module, optimizer: Optimizer) -> Any:
    return copy.deepcopy((dict(model.state_dict()), optimizer.state_dict()["state"]))


def saved_run(make: Callable[..., Optimizer] = adamw, **options: Any) -> tuple[Any, Any]:
    """The file after three steps, loaded, and what six steps end in."""
    model = half_model()
    optimizer = make(model.parameters())
    initialized(model, None, **options)
    train(model, optimizer)
    saved = from_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    train(model, optimizer, first=3)
    expected = result(model, optimizer)
    amp.close()
    return saved, expected


def from_file(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def without(groups: Any) -> Any:
    return [{key: value for key, value in group.items() if key != "amp_engine"} for group in groups]


def loaded(saved: Any, make: Callable[..., Optimizer] = adamw, **options: Any) -> tuple[nn.Module, Optimizer]:
    """As a trainer does it, after the one line."""
    model = half_model()
    amp.initialize(model, opt_level="O5", **options)
    optimizer = make(model.parameters())
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    return model, optimizer


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {}) for kind in KINDS),
        ("AdamW", {"master_weights": "split"}),
        ("AdamW", {"moment_dtype": torch.bfloat16}),
    ],
)
def test_it_goes_on_bit_by_bit(kind: str, options: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    amp.replace_engine(Engine())
    saved, expected = saved_run(KINDS[kind], **options)
    model, optimizer = loaded(saved, KINDS[kind], **options)
    train(model, optimizer, first=3)
    assert_bitwise(result(model, optimizer), expected)
    assert "rounded" not in capsys.readouterr().out


def test_where_losses_are_scaled_too() -> None:
    def run(model: nn.Module, optimizer: Optimizer, first: int) -> None:
        for index in range(first, first + 3):
            with amp.scale_loss(MLP.loss(model, MLP.batch(index)), optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    def model_and_optimizer() -> tuple[nn.Module, Optimizer]:
        model = initialized(MLP.model(), level="O2")
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)

    model, optimizer = model_and_optimizer()
    run(model, optimizer, 0)
    saved = from_file([model.state_dict(), optimizer.state_dict(), amp.state_dict()])
    run(model, optimizer, 3)
    expected = result(model, optimizer)
    amp.close()
    model, optimizer = model_and_optimizer()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    amp.load_state_dict(saved[2])
    run(model, optimizer, 3)
    assert_bitwise(result(model, optimizer), expected)


def test_groups_that_changed_their_order_and_a_parameter_that_joins() -> None:
    def groups(params: Any) -> Optimizer:
        first, *rest = params
        return torch.optim.AdamW([{"params": rest, "lr": 1e-4}, {"params": [first], "lr": 1e-3}])

    saved, expected = saved_run(groups)
    saved["optimizer"]["param_groups"][0]["params"].reverse()
    vars(saved["optimizer"]["param_groups"][0]["amp_engine"])["_exact"].reverse()
    model = initialized(half_model())
    first, *rest = model.parameters()
    optimizer = groups([first, *reversed(rest)])
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(3)))
    train(model, optimizer, first=3)
    assert_bitwise(dict(model.state_dict()), expected[0])


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
def test_copies_before_the_first_step(copied: Callable[[Any], Any]) -> None:
    saved, expected = saved_run()
    _, optimizer = loaded(saved)
    amp.close()
    model = half_model()
    for group in optimizer.param_groups:
        group["params"] = list(model.parameters())
    optimizer.state = type(optimizer.state)(dict, zip(model.parameters(), optimizer.state.values(), strict=True))
    model, optimizer = copied((model, optimizer))
    initialized(model).load_state_dict(saved["model"])
    train(model, optimizer, first=3)
    assert_bitwise(result(model, optimizer), expected)


def test_an_optimizer_that_is_passed_after_its_state_was_loaded() -> None:
    saved, expected = saved_run()
    model = half_model()
    optimizer = adamw(model.parameters())
    optimizer.load_state_dict(saved["optimizer"])
    initialized(model, optimizer).load_state_dict(saved["model"])
    train(model, optimizer, first=3)
    assert_bitwise(result(model, optimizer), expected)


def test_a_state_that_was_written_after_the_load_counts(capsys: pytest.CaptureFixture[str]) -> None:
    amp.replace_engine(Engine())
    saved, _ = saved_run()
    model, optimizer = loaded(saved)
    first, second = list(optimizer.state.values())[:2]
    first["exp_avg"].fill_(1.0)
    second["exp_avg"] = torch.zeros(7)
    amp.clip_grad_norm_(optimizer, 1.0)  # takes it in
    assert bool((optimizer.state[next(model.parameters())]["exp_avg"] == 1.0).all())
    assert second["exp_avg"].shape == (7,)
    assert WARNS in capsys.readouterr().out


def test_a_state_that_torch_has_rounded_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    amp.replace_engine(Engine())
    plain = MLP.model()
    optimizer = adamw(plain.parameters())
    train(plain, optimizer)
    model = half_model()
    amp.initialize(model, opt_level="O5")
    later = adamw(model.parameters())
    later.load_state_dict(optimizer.state_dict())
    train(model, later, steps=1)
    assert WARNS in capsys.readouterr().out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_torch_loads_what_was_saved(dtype: torch.dtype) -> None:
    saved, _ = saved_run()
    ends = []
    for groups in (saved["optimizer"]["param_groups"], without(saved["optimizer"]["param_groups"])):
        model = MLP.model().to(dtype)
        optimizer = adamw(model.parameters())
        optimizer.load_state_dict(copy.deepcopy({**saved["optimizer"], "param_groups": groups}))
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        train(model, optimizer)
        ends.append((dict(model.state_dict()), optimizer.state_dict()["state"]))
    assert_bitwise(*ends)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.* is deprecated")  # in torch's compiler
def test_plain_torch_compiles_a_step_after_it(dynamo: None) -> None:
    saved, _ = saved_run()
    model = MLP.model()
    optimizer = adamw(model.parameters())
    optimizer.load_state_dict(saved["optimizer"])
    step = torch.compile(optimizer.step, backend="eager")
    before = [p.detach().clone() for p in model.parameters()]
    MLP.loss(model, MLP.batch()).backward()
    step()
    assert not any(map(torch.equal, before, model.parameters()))


def test_an_optimizer_that_was_passed_loads_it_into_plain_groups() -> None:
    saved, expected = saved_run()
    model = half_model()
    optimizer = adamw(model.parameters())
    initialized(model, optimizer).load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    assert not any("amp_engine" in group for group in optimizer.param_groups)
    assert all("amp_engine" in group for group in saved["optimizer"]["param_groups"]), "the caller's are as they were"
    train(model, optimizer, first=3)
    assert_bitwise(result(model, optimizer), expected)


def test_an_optimizer_that_was_passed_saves_what_torch_does() -> None:
    model = half_model()
    optimizer = adamw(model.parameters())
    initialized(model, optimizer)
    train(model, optimizer)
    assert set(optimizer.state_dict()["param_groups"][0]) == set(optimizer.param_groups[0])


def test_the_file_holds_each_moment_once() -> None:
    model = initialized(nn.Linear(256, 256).to(torch.bfloat16))
    optimizer = adamw(model.parameters())
    model(torch.ones(2, 256, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    saved = optimizer.state_dict()
    sizes = []
    for groups in (saved["param_groups"], without(saved["param_groups"])):
        file = io.BytesIO()
        torch.save({**saved, "param_groups": groups}, file)
        sizes.append(file.tell())
    assert sizes[0] - sizes[1] < 2000 < 256 * 256 * 4


def test_the_copies_in_the_groups_go_at_the_first_step() -> None:
    saved, _ = saved_run()
    model, optimizer = loaded(saved)
    assert all("amp_engine" in group for group in optimizer.param_groups)
    train(model, optimizer, steps=1)
    assert not any("amp_engine" in group for group in optimizer.param_groups)


def test_what_is_saved_between_a_load_and_the_first_step_is_exact() -> None:
    saved, expected = saved_run()
    model, optimizer = loaded(saved)
    saved = from_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    amp.close()
    model, optimizer = loaded(saved)
    train(model, optimizer, first=3)
    assert_bitwise(result(model, optimizer), expected)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_torchs_distributed_checkpoint_does_not_meet_it(tmp_path: Any) -> None:
    model = initialized(half_model())
    optimizer = adamw(model.parameters())
    train(model, optimizer)
    weights, state = get_state_dict(model, optimizer)
    plain = {**state, "param_groups": without(state["param_groups"])}
    sizes = []
    for name, saved in (("plain", plain), ("saved", state)):
        dcp.save({"weights": weights, "state": saved}, checkpoint_id=tmp_path / name)
        sizes.append(sum(file.stat().st_size for file in (tmp_path / name).iterdir()))
    assert abs(sizes[1] - sizes[0]) < 100, "the moments once"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_a_training_state_goes_on_bit_by_bit(tmp_path: Any) -> None:
    model = initialized(half_model())
    optimizer = adamw(model.parameters())
    train(model, optimizer)
    dcp.save({"training": amp.training_state(model, optimizer)}, checkpoint_id=tmp_path)
    train(model, optimizer, first=3)
    expected = result(model, optimizer)
    amp.close()
    model = initialized(half_model())
    optimizer = adamw(model.parameters())
    dcp.load({"training": amp.training_state(model, optimizer)}, checkpoint_id=tmp_path)
    train(model, optimizer, first=3)
    assert_bitwise(result(model, optimizer), expected)


ROUNDED = "goes on from saved FP32 state, but its .* begin at bfloat16 weights"


@pytest.mark.parametrize("options", [{}, {"master_weights": "split"}], ids=["FP32", "split"])
@pytest.mark.parametrize("is_later", [False, True])
def test_saved_state_over_weights_that_were_rounded_is_warned_of(is_later: bool, options: dict[str, Any]) -> None:
    saved, _ = saved_run(**options)
    model = half_model()
    model.load_state_dict(saved["model"])  # as from_pretrained(dtype=torch.bfloat16) does
    optimizer = adamw(model.parameters())
    initialized(model, None if is_later else optimizer, **options)
    optimizer.load_state_dict(saved["optimizer"])
    with pytest.warns(AmpRuntimeWarning, match=ROUNDED):
        train(model, optimizer)


@pytest.mark.parametrize("order", ["weights", "state"])
def test_saved_state_beside_exact_weights_is_not_warned_of(order: str) -> None:
    saved, _ = saved_run()
    model = half_model()
    optimizer = adamw(model.parameters())
    initialized(model, optimizer)
    if order == "weights":
        model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    model.load_state_dict(saved["model"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer)
