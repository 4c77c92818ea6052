"""Masters in two halves (`master_weights="split"`) and moments in bfloat16 (`moment_dtype`), through the engine."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel

from amp_engine import amp, kernels
from amp_engine.errors import AmpStateError, AmpTypeError, AmpValueError
from amp_engine.kernels import halves
from amp_engine.optimizers import FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD
from amp_engine.stepping.exact import exact_of, exact_value
from tests import support
from tests.behaviour.test_resume import checkpoint, resumed
from tests.models import CNN, LSTM, MLP, NORMED_MLP
from tests.ranks import on_ranks
from tests.support import assert_bitwise, backward, entries_of, everything, frozen, masters, picture, train, weights_of

pytestmark = pytest.mark.skipif(not kernels.has_native(torch.device("cpu")), reason="only compiled kernels step them")
NARROW = {
    "split": {"master_weights": "split"},
    "moments": {"moment_dtype": torch.bfloat16},
    "both": {"master_weights": "split", "moment_dtype": "bfloat16"},
    "seven bytes": {"master_weights": "24bit", "moment_dtype": "8bit"},
}


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-4)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


OPTIMIZERS = {
    "AdamW": adamw,
    "SGD": sgd,
    "FusedAdam": lambda params: FusedAdam(params, lr=1e-2, eps=1e-4),
    "FusedSGD": lambda params: FusedSGD(params, lr=0.05, momentum=0.9),
    "FusedLAMB": lambda params: FusedLAMB(params, lr=1e-2),
    "FusedNovoGrad": lambda params: FusedNovoGrad(params, lr=1e-2),
}


def started(make: Any = adamw, task: Any = NORMED_MLP, level: str = "O5", **keywords: Any) -> Any:
    return support.started(level, make, task, **keywords)


def exact(model: nn.Module) -> list[Tensor]:
    return [weight.detach().clone() for _, weight in amp.named_masters(model)]


@pytest.mark.parametrize(
    ("keywords", "masters", "size"),
    [
        ({}, "FP32 masters", 14),
        (NARROW["split"], "FP32 masters", 12),
        (NARROW["both"], "FP32 masters", 8),
        (NARROW["seven bytes"], "masters of 24 bits", 5.06),
    ],
)
def test_the_banner_says_what_is_stepped_in_how_many_bytes(
    keywords: dict[str, Any], masters: str, size: float, capsys: Any
) -> None:
    model = nn.Linear(64, 64)
    optimizer = adamw(model.parameters())
    amp.initialize(model, optimizer, opt_level="O5", **keywords)
    said = f"AdamW steps 2 {masters} by the compiled kernels.  Weights and state take {size} bytes a parameter."
    assert said in capsys.readouterr().out
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    moments = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
    held = {id(t): t for t in (*model.parameters(), *moments)}
    for p in model.parameters():
        held |= {id(t): t for one in exact_of(p) for t in (one.stepped, one.copy)}
    assert sum(t.nbytes for t in held.values()) / (64 * 65) == pytest.approx(size, abs=0.01)


def test_the_banner_counts_no_moments_of_frozen_parameters(capsys: Any) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[0].requires_grad_(False)
    amp.initialize(model, adamw(model.parameters()), opt_level="O5")
    assert "Weights and state take 8 bytes a parameter." in capsys.readouterr().out  # 2 and 14


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_is_that_of_fp32_masters_but_for_ties(name: str) -> None:
    kept = {}
    for master_weights in (True, "split"):
        model, optimizer = started(OPTIMIZERS[name], master_weights=master_weights)
        kept[master_weights] = train(NORMED_MLP, model, optimizer, "c" * 8), exact(model)
        amp.close()
    assert_bitwise(kept["split"], kept[True])


@pytest.mark.parametrize("level", support.LEVELS)
def test_every_level_keeps_narrow_moments(level: str) -> None:
    make = OPTIMIZERS["FusedAdam" if level == "O3" else "AdamW"]
    model, optimizer = started(make, level=level, moment_dtype=torch.bfloat16)
    losses = train(NORMED_MLP, model, optimizer, "c" * 20)
    assert losses[-1] < losses[0]
    moments = [v for of_one in optimizer.state.values() for k, v in of_one.items() if k != "step"]
    assert {v.dtype for v in moments} == {torch.bfloat16}


def test_there_is_no_fp32_copy_and_what_there_is_takes_four_bytes_a_weight() -> None:
    model, optimizer = started(**NARROW["both"])
    train(NORMED_MLP, model, optimizer, "cc")
    for param in weights_of(optimizer):
        assert any(param is own for own in model.parameters())
        state = optimizer.state[param]
        assert state["exp_avg"].dtype is state["exp_avg_sq"].dtype is torch.bfloat16
        keepers = list(exact_of(param))
        if param.dtype is torch.float32:
            assert keepers == []  # of the batch norm
        else:
            (remainder,) = keepers
            assert (remainder.bits.dtype, param.dtype) == (torch.int16, torch.bfloat16)
            assert not torch.equal(exact_value(param), param.float())
            assert torch.equal(exact_value(param).bfloat16(), param)


@pytest.mark.parametrize("how", NARROW)
@pytest.mark.parametrize("name", ["AdamW", "FusedAdam", "SGD"])
@pytest.mark.parametrize("task", [NORMED_MLP, CNN, LSTM], ids=lambda task: task.name)
def test_a_resumed_run_is_the_uncut_one(task: Any, name: str, how: str) -> None:
    make, keywords = OPTIMIZERS[name], {"loss_scale": "dynamic", **NARROW[how]}
    model, optimizer = started(make, task, **keywords)
    train(task, model, optimizer, "ccoc")
    file = checkpoint(model, optimizer)
    losses = train(task, model, optimizer, "cocc", first=4)
    truth = everything(model, optimizer)
    amp.close()
    model, optimizer = resumed(file, task, make, "O5", **keywords)
    assert train(task, model, optimizer, "cocc", first=4) == losses
    assert_bitwise(everything(model, optimizer), truth)


def test_a_file_and_the_names_of_parameters_carry_it_too(tmp_path: Any) -> None:
    model, optimizer = started(**NARROW["both"])
    train(NORMED_MLP, model, optimizer, "ccc")
    amp.save(tmp_path / "run.pt", model=model, optimizer=optimizer)
    by_name, truth = frozen(get_optimizer_state_dict(model, optimizer)), everything(model, optimizer)
    state = amp.training_state(model, optimizer).state_dict()
    amp.close()
    model, optimizer = started(seed=5, **NARROW["both"])
    amp.load(tmp_path / "run.pt", model=model, optimizer=optimizer)
    train(NORMED_MLP, model, optimizer, "")
    assert_bitwise(everything(model, optimizer)["saved"], truth["saved"])
    assert_bitwise(get_optimizer_state_dict(model, optimizer)["state"], _wide(by_name["state"]))
    amp.training_state(model, optimizer).load_state_dict(state)
    assert_bitwise(everything(model, optimizer)["saved"], truth["saved"])


def _wide(state: dict[str, Any]) -> dict[str, Any]:
    """Moments as they are until the next step narrows them again."""
    return {name: {key: value.float() for key, value in of_one.items()} for name, of_one in state.items()}


@pytest.mark.parametrize("how", ["in place", "state_dict"])
def test_what_somebody_writes_becomes_the_master(how: str) -> None:
    model, optimizer = started(sgd, MLP, master_weights="split")
    train(MLP, model, optimizer, "cc")
    weight = model[0].weight
    new = torch.full_like(weight, 0.5)
    with torch.no_grad():
        if how == "in place":
            weight.copy_(new)
        else:
            model.load_state_dict({**model.state_dict(), "0.weight": new.float() + 2**-12})
    expected = new.float() + (2**-12 if how == "state_dict" else 0)
    assert exact_value(weight) is None or torch.equal(exact_value(weight), expected)
    optimizer.zero_grad()
    loss = MLP.loss(model, MLP.batch(0))
    backward(loss, optimizer)
    buffer = optimizer.state[weight]["momentum_buffer"]
    after = expected - 0.05 * (0.9 * buffer + weight.grad.float())
    optimizer.step()
    torch.testing.assert_close(exact_value(weight), after, rtol=0, atol=1e-7)


def test_seven_bytes_a_parameter_are_seven_bytes() -> None:
    model, optimizer = started(task=MLP, **NARROW["seven bytes"])
    backward(MLP.loss(model, MLP.batch(0)), optimizer)
    optimizer.step()
    count = sum(p.numel() for p in model.parameters())
    blocks = sum(-(-p.numel() // 32) for p in model.parameters())
    held = sum(kind.bytes for kind in amp.receipt().memory)
    steps = 4 * len(weights_of(optimizer))
    assert held == 7 * count + 2 * blocks + steps


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@pytest.mark.parametrize("into", [{}, NARROW["both"], NARROW["split"]], ids=["FP32", "both", "split"])
def test_a_run_in_blocks_goes_on_in_another_form_and_back(name: str, into: dict[str, Any]) -> None:
    make = OPTIMIZERS[name]
    model, optimizer = started(make, **NARROW["seven bytes"])
    train(NORMED_MLP, model, optimizer, "ccc")
    file, values = checkpoint(model, optimizer), exact(model)
    amp.close()
    wide = _moments(optimizer)
    model, optimizer = resumed(file, NORMED_MLP, make, "O5", **into)
    assert_bitwise(exact(model), values)
    optimizer.step()  # gradients are missing, so this only brings the state into its form
    train(NORMED_MLP, model, optimizer, "c", first=3)
    other, after = checkpoint(model, optimizer), exact(model)
    amp.close()
    assert all(torch.isfinite(m).all() and m.shape == w.shape for m, w in zip(_moments(optimizer), wide, strict=True))
    model, optimizer = resumed(other, NORMED_MLP, make, "O5", **NARROW["seven bytes"])
    for one, old in zip(exact(model), after, strict=True):
        torch.testing.assert_close(one, old, rtol=2**-15, atol=0)
    losses = train(NORMED_MLP, model, optimizer, "c" * 4, first=4)
    assert all(map(math.isfinite, losses))
    assert {m.dtype for m in _held(optimizer)} == {torch.uint8}


@pytest.mark.parametrize("level", ["O0", "O5"])
def test_loaded_codes_are_codes_before_the_next_step(level: str) -> None:
    model, optimizer = started(level=level, moment_dtype="8bit")
    train(NORMED_MLP, model, optimizer, "cc")
    saved = frozen(optimizer.state_dict())
    amp.close()
    model, optimizer = started(level=level, moment_dtype="8bit", seed=5)
    optimizer.load_state_dict(saved)
    assert_bitwise(optimizer.state_dict()["state"], saved["state"])


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_codes_are_widened_where_a_run_keeps_none(name: str, level: str) -> None:
    model, optimizer = started(OPTIMIZERS[name], **NARROW["seven bytes"])
    train(NORMED_MLP, model, optimizer, "ccc")
    saved = frozen(optimizer.state_dict())
    amp.close()
    wide = _moments(optimizer)
    model, optimizer = started(OPTIMIZERS[name], level=level, seed=5)
    optimizer.load_state_dict(saved)
    for loaded, expected in zip(_held(optimizer), wide, strict=True):
        torch.testing.assert_close(loaded.float(), expected, rtol=2**-10, atol=2**-24)
    assert all(map(math.isfinite, train(NORMED_MLP, model, optimizer, "cc")))


@pytest.mark.parametrize("level", ["O0", "O3", "O5"])
def test_state_of_the_users_own_in_uint8_is_loaded_as_it_is(level: str) -> None:
    model, optimizer = started(level=level)
    train(NORMED_MLP, model, optimizer, "c")
    mask = torch.ones(model[0].weight.shape, dtype=torch.uint8)
    optimizer.state[entries_of(optimizer)[0]]["mask"] = mask
    optimizer.load_state_dict(frozen(optimizer.state_dict()))
    loaded = optimizer.state[entries_of(optimizer)[0]]["mask"]
    assert loaded.dtype is torch.uint8
    assert torch.equal(loaded, mask)


def _held(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = (optimizer.state[p] for p in entries_of(optimizer))
    return [value for state in states for key, value in state.items() if key != "step"]


def _moments(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    held = _held(optimizer)
    assert {m.dtype for m in held} == {torch.float32}
    return held


def test_torch_itself_refuses_moments_in_blocks() -> None:
    model, optimizer = started(task=MLP, **NARROW["seven bytes"])
    train(MLP, model, optimizer, "c")
    saved = optimizer.state_dict()
    amp.close()
    model = MLP.model()
    optimizer = adamw(model.parameters())
    optimizer.load_state_dict(saved)
    MLP.loss(model, MLP.batch(0)).backward()
    with pytest.raises(RuntimeError):
        optimizer.step()


@pytest.mark.parametrize("how", ["both", "seven bytes"])
def test_close_gives_the_model_its_masters_and_moments_of_float32(how: str) -> None:
    model, optimizer = started(**NARROW[how])
    train(NORMED_MLP, model, optimizer, "ccc")
    values = exact(model)
    amp.close()
    assert_bitwise([p.detach() for p in model.parameters()], values)
    assert {v.dtype for p in model.parameters() for v in optimizer.state[p].values()} == {torch.float32}
    NORMED_MLP.loss(model, NORMED_MLP.batch(0)).backward()
    optimizer.step()
    assert not list(exact_of(next(model.parameters())))


REFUSED = {
    "float16": ("O2", adamw, {"master_weights": "split"}, AmpStateError, "whose model is float16"),
    "float32": ("O0", adamw, {"master_weights": "split"}, AmpStateError, "whose model is float32"),
    "functions": ("O4", adamw, {"master_weights": "split"}, AmpStateError, "doesn't make sense to use master_weights"),
    "typed wrong": (
        "O5",
        adamw,
        {"master_weights": "spilt"},
        AmpValueError,
        'none of True, False, "split" and "24bit"',
    ),
    "amsgrad": (
        "O5",
        lambda params: torch.optim.AdamW(params, amsgrad=True),
        {"moment_dtype": "bfloat16"},
        AmpStateError,
        "moment_dtype=torch.bfloat16 was given with AdamW as the kernels cannot step it: with amsgrad",
    ),
    "half weights": ("O3", adamw, {"moment_dtype": "bfloat16"}, AmpStateError, "half weights without masters"),
    "float16 moments": ("O5", adamw, {"moment_dtype": torch.float16}, AmpValueError, "float16 holds no second"),
    "no type": ("O5", adamw, {"moment_dtype": "half16"}, AmpTypeError, "moment_dtype='half16'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_refused_and_changes_nothing(case: str) -> None:
    level, make, keywords, error, text = REFUSED[case]
    model = MLP.model()
    optimizer = make(model.parameters())
    before = picture(model, [optimizer])
    with pytest.raises(error, match=text):
        amp.initialize(model, optimizer, opt_level=level, verbosity=0, **keywords)
    assert_bitwise(picture(model, [optimizer]), before)


def test_two_optimizers_of_one_parameter_are_refused() -> None:
    model = MLP.model()
    both = [sgd(model.parameters()), sgd(model.parameters())]
    before = picture(model, both)
    with pytest.raises(AmpStateError, match="stepped by two optimizers"):
        amp.initialize(model, both, opt_level="O5", verbosity=0, master_weights="split")
    assert_bitwise(picture(model, both), before)


@pytest.mark.parametrize("how", ["moments", "both", "seven bytes"])
def test_a_step_that_the_kernels_cannot_take_is_refused_before_it_writes(how: str) -> None:
    model, optimizer = started(adamw, MLP, **NARROW[how])
    train(MLP, model, optimizer, "c")
    backward(MLP.loss(model, MLP.batch(1)), optimizer)
    for weight in weights_of(optimizer):
        weight.grad = weight.grad.to_sparse()
    before = exact(model), masters(optimizer)
    reason = r"the gradient of parameter 0 is a Tensor of torch.\w+ of layout torch.sparse_coo"
    with pytest.raises(AmpStateError, match=f"AdamW cannot be stepped by the kernels: {reason}"):
        optimizer.step()
    assert_bitwise((exact(model), masters(optimizer)), before)


def _on_rank(rank: int) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(rank)  # each begins with weights of its own, and so with remainders
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = adamw(model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level="O5", verbosity=0, **NARROW["both"])
    ddp = DistributedDataParallel(model)
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + rank)
        loss = ddp(torch.randn(8, 8, generator=generator)).square().mean()
        optimizer.zero_grad()
        backward(loss, optimizer)
        optimizer.step()
    result = exact(model), [v.clone() for p in weights_of(optimizer) for v in optimizer.state[p].values()]
    del ddp
    return result


def test_ranks_that_began_with_other_weights_have_one_master_and_one_rounding() -> None:
    one, other = on_ranks(_on_rank, 2)
    assert_bitwise(one, other)
    assert any(not torch.equal(halves.split(w)[1], torch.zeros_like(w, dtype=torch.int16)) for w in one[0])


@pytest.mark.parametrize("into", [True, "split"])
def test_a_checkpoint_of_one_form_goes_on_in_the_other(into: Any) -> None:
    out_of = "split" if into is True else True
    make = OPTIMIZERS["FusedAdam"]
    model, optimizer = started(make, master_weights=out_of)
    train(NORMED_MLP, model, optimizer, "ccc")
    file = checkpoint(model, optimizer)
    losses, values = train(NORMED_MLP, model, optimizer, "ccc", first=3), exact(model)
    amp.close()
    model, optimizer = resumed(file, NORMED_MLP, make, "O5", master_weights=into)
    assert train(NORMED_MLP, model, optimizer, "ccc", first=3) == losses
    assert_bitwise(exact(model), values)


def test_a_skipped_step_leaves_both_halves() -> None:
    model, optimizer = started(loss_scale="dynamic", **NARROW["both"])
    train(NORMED_MLP, model, optimizer, "cc")
    before = exact(model), frozen(optimizer.state_dict())
    train(NORMED_MLP, model, optimizer, "o", first=2)
    assert_bitwise((exact(model), frozen(optimizer.state_dict())), before)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@pytest.mark.parametrize("form", [{}, {"moment_dtype": torch.bfloat16}, {"moment_dtype": "8bit"}], ids=str)
def test_a_frozen_half_weight_leaves_the_others_to_the_kernels(name: str, form: dict[str, Any]) -> None:
    """As it is in the groups of a LoRA, and until it is trained."""
    weights = []
    for is_given in (True, False):
        model = MLP.model()
        first = model[0].weight.requires_grad_(False)
        optimizer = OPTIMIZERS[name]([p for p in model.parameters() if is_given or p is not first])
        amp.initialize(model, optimizer, opt_level="O5", verbosity=0, **form)
        train(MLP, model, optimizer, "cc")
        assert [one.by for one in amp.receipt().optimizers] == ["compiled kernels"]
        first.requires_grad_(True)
        if not is_given:
            optimizer.add_param_group({"params": [first]})
        train(MLP, model, optimizer, "ccc", first=2)
        assert [one.by for one in amp.receipt().optimizers] == ["compiled kernels"]
        weights.append(model.state_dict())
        amp.close()
    for one, other in zip(*(each.values() for each in weights), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6 if form == {} else 5e-3)


@pytest.mark.parametrize("form", [{}, *NARROW.values(), {"moment_dtype": "8bit"}], ids=str)
def test_an_empty_parameter_is_stepped_with_others(form: dict[str, Any]) -> None:
    weights = []
    for empty in (0, 1):
        torch.manual_seed(0)
        params = [nn.Parameter(torch.randn(40).bfloat16()) for _ in range(2)]
        all_of_them = [*[nn.Parameter(torch.zeros(0, dtype=torch.bfloat16))] * empty, *params]
        optimizer = adamw(all_of_them)
        amp.initialize(nn.ParameterList(all_of_them), optimizer, opt_level="O5", verbosity=0, **form)
        for step in range(4):
            for p in all_of_them:
                p.grad = None if step == 1 and p is params[1] else torch.ones_like(p)
            optimizer.step()
            if step == 2:
                optimizer.load_state_dict(frozen(optimizer.state_dict()))
        weights.append([exact_value(p) for p in params])
        amp.close()
    assert len(weights[0]) == 2
    if form.get("master_weights") == "24bit" or "moment_dtype" in form:  # chance depends on the place in the list
        torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=1e-3)
    else:
        assert_bitwise(weights[0], weights[1])


def test_a_default_type_of_half_changes_nothing() -> None:
    batches, results = [NORMED_MLP.batch(index) for index in range(3)], []
    for default in (torch.float32, torch.bfloat16):
        model, optimizer = started(release_gradients=True, **NARROW["seven bytes"])
        torch.set_default_dtype(default)
        try:
            for batch in batches:
                NORMED_MLP.loss(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append((frozen(model.state_dict()), frozen(optimizer.state_dict())))
        finally:
            torch.set_default_dtype(torch.float32)
            amp.close()
    assert_bitwise(results[1], results[0])
