"""`masters_on="cpu"`: masters and moments are in the memory of the host, where the CPU steps them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from amp_engine import AmpStateError, AmpTypeError, AmpValueError, Engine, amp, kernels
from amp_engine.optimizers import FusedLAMB
from tests import support
from tests.behaviour.test_released_gradients import FORMS, OPTIMIZERS, adamw, ended, iterate
from tests.behaviour.test_resume import checkpoint as saved_run
from tests.behaviour.test_resume import resumed
from tests.models import CNN, LSTM, MLP, NORMED_MLP
from tests.pretended_gpu import pretended_gpu
from tests.ranks import on_ranks
from tests.support import assert_bitwise, train

pytestmark = pytest.mark.skipif(not kernels.has_native(torch.device("cpu")), reason="only compiled kernels step so")
MOMENTS = {"FP32": {}, "bfloat16": {"moment_dtype": torch.bfloat16}, "8bit": {"moment_dtype": "8bit"}}


def started(make: Any = adamw, task: Any = MLP, level: str = "O5", **keywords: Any) -> tuple[nn.Module, Optimizer]:
    return support.started(level, make, task, **{"masters_on": "cpu", **keywords})


def both(run: Callable[[nn.Module, Optimizer], None], make: Any = adamw, task: Any = MLP, **keywords: Any) -> list[Any]:
    """Everything after `run` with masters on the CPU, and with masters on the device."""
    ends = []
    for where in ("cpu", None):
        model, optimizer = started(make, task, masters_on=where, **keywords)
        run(model, optimizer)
        ends.append(ended(model, optimizer))
        amp.close()
    return ends


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_is_that_of_masters_on_the_device(name: str, moments: str) -> None:
    if moments != "FP32" and name not in ("AdamW", "SGD", "FusedAdam"):
        moments = "FP32"
    here, there = both(
        lambda model, optimizer: iterate(NORMED_MLP, model, optimizer, 4),
        OPTIMIZERS[name],
        NORMED_MLP,
        **MOMENTS[moments],
    )
    assert_bitwise(here, there)


@pytest.mark.parametrize("task", [CNN, LSTM], ids=lambda task: task.name)
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_half_levels_at_a_scale_of_1(level: str, task: Any) -> None:
    here, there = both(
        lambda model, optimizer: iterate(task, model, optimizer, 4),
        OPTIMIZERS["FusedAdam"],
        task,
        level=level,
        loss_scale=1.0,
    )
    assert_bitwise(here, there)


def by_torch(model: nn.Module, optimizer: Optimizer) -> None:
    for index in range(4):
        MLP.loss(model, MLP.batch(index)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()


def by_a_closure(model: nn.Module, optimizer: Optimizer) -> None:
    for index in range(3):

        def closure(index: int = index) -> Tensor:
            optimizer.zero_grad()
            loss = MLP.loss(model, MLP.batch(index))
            loss.backward()
            return loss

        assert optimizer.step(closure) > 0


def with_a_skip(model: nn.Module, optimizer: Optimizer) -> None:
    train(MLP, model, optimizer, "coc")


def by_torch_on_masters(model: nn.Module, optimizer: Optimizer) -> None:
    for index in range(4):
        MLP.loss(model, MLP.batch(index)).backward()
        assert nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.1) > 0.1
        optimizer.step()
        optimizer.zero_grad()


def test_master_params_are_parameters_which_torch_clips() -> None:
    model, optimizer = started()
    assert {id(p) for p in amp.master_params(optimizer)} == set(map(id, model.parameters()))
    by_torch_on_masters(model, optimizer)


def with_writes_on_masters(model: nn.Module, optimizer: Optimizer) -> None:
    for index in range(3):
        iterate(MLP, model, optimizer, 1, first=index)
        with torch.no_grad(), amp.on_masters(optimizer):
            for group in optimizer.param_groups:
                for p in group["params"]:
                    assert p.dtype is torch.float32
                    p.mul_(0.999)
        assert amp.named_masters(model)


def with_writes(model: nn.Module, optimizer: Optimizer) -> None:
    for index in range(3):
        iterate(MLP, model, optimizer, 1, first=index)
        with torch.no_grad():
            next(model.parameters())[0].fill_(0.5)


def with_a_late_group(model: nn.Module, optimizer: Optimizer) -> None:
    last = optimizer.param_groups[0]["params"].pop()
    iterate(MLP, model, optimizer, 2)
    last.grad = None
    optimizer.add_param_group({"params": [last], "lr": 1e-3})
    iterate(MLP, model, optimizer, 2, first=2)


RUNS = [by_torch, by_a_closure, with_a_skip, with_writes_on_masters, with_writes, with_a_late_group]


@pytest.mark.parametrize("run", RUNS)
def test_loops_are_as_with_masters_on_the_device(run: Any) -> None:
    assert_bitwise(*both(run))


def test_amp_clips_as_torch_does() -> None:
    def clipped(clip: Callable[[nn.Module, Optimizer], Any]) -> Any:
        model, optimizer = started()
        for index in range(3):
            MLP.loss(model, MLP.batch(index)).backward()
            clip(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        end = ended(model, optimizer)
        amp.close()
        return end

    ours = clipped(lambda model, optimizer: amp.clip_grad_norm_(optimizer, 0.1))
    plain = clipped(lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    torch.testing.assert_close(ours["model"], plain["model"], rtol=1e-2, atol=1e-3)


def test_an_optimizer_that_is_made_later() -> None:
    ends = []
    for where in ("cpu", None):
        model = MLP.model().to(torch.bfloat16)
        amp.initialize(model, opt_level="O5", verbosity=0, masters_on=where)
        optimizer = adamw(model.parameters())
        iterate(MLP, model, optimizer, 3)
        ends.append(ended(model, optimizer))
        amp.close()
    assert_bitwise(*ends)


@pytest.mark.parametrize("moments", MOMENTS)
@pytest.mark.parametrize("before", [None, "cpu"])
@pytest.mark.parametrize("after", [None, "cpu"])
def test_a_run_resumes_on_either_side(before: str | None, after: str | None, moments: str) -> None:
    model, optimizer = started(masters_on=before, **MOMENTS[moments])
    iterate(MLP, model, optimizer, 3)
    state = saved_run(model, optimizer)
    iterate(MLP, model, optimizer, 3, first=3)
    uncut = ended(model, optimizer)
    amp.close()
    model, optimizer = resumed(state, MLP, adamw, "O5", masters_on=after, **MOMENTS[moments])
    iterate(MLP, model, optimizer, 3, first=3)
    assert_bitwise(ended(model, optimizer), uncut)


def test_close_gives_model_and_state_back() -> None:
    ends = []
    for where in ("cpu", None):
        model, optimizer = started(masters_on=where)
        iterate(MLP, model, optimizer, 2)
        amp.close()
        for index in range(2):
            MLP.loss(model, MLP.batch(index)).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(copy.deepcopy([dict(model.state_dict()), optimizer.state_dict()["state"]]))
    assert_bitwise(*ends)


def test_averages_named_masters_and_exports_are_as_on_the_device() -> None:
    ends = []
    for where in ("cpu", None):
        model, optimizer = started(masters_on=where)
        average = amp.averaged_model(model, optimizer)
        for index in range(3):
            iterate(MLP, model, optimizer, 1, first=index)
            average.update_parameters(model)
        with amp.averaged_weights(model, average):
            inside = MLP.loss(model, MLP.batch(0)).detach()
        iterate(MLP, model, optimizer, 1, first=3)
        names = {name: value.detach().clone() for name, value in amp.named_masters(model)}
        ends.append([inside, dict(average.module.state_dict()), names, amp.export_state_dict(model)])
        amp.close()
    assert_bitwise(*ends)


def test_the_banner_and_the_receipt_say_it(capsys: pytest.CaptureFixture[str]) -> None:
    amp.replace_engine(Engine())
    model, optimizer = started(verbosity=1)
    assert "AdamW steps 4 FP32 masters on the CPU by the compiled kernels." in capsys.readouterr().out
    iterate(MLP, model, optimizer, 1)
    assert "FP32 masters" in {one.kind for one in amp.receipt().memory}
    assert "4 FP32 masters on the CPU" in str(amp.receipt())


def test_frozen_parameters_get_no_master_before_they_are_trained() -> None:
    model = MLP.model()
    first = next(model.parameters()).requires_grad_(False)
    optimizer = adamw(model.parameters())
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0, masters_on="cpu")
    assert len(dict(amp.named_masters(model))) == 4
    iterate(MLP, model, optimizer, 1)
    before = first.detach().clone()
    first.requires_grad_(True)
    iterate(MLP, model, optimizer, 1)
    assert not torch.equal(before, first)


def test_a_step_that_only_the_class_could_do_is_refused() -> None:
    model, optimizer = started()
    first = next(model.parameters())
    MLP.loss(model, MLP.batch(0)).backward()
    first.grad = first.grad.to_sparse()
    before = ended(model, optimizer)
    with pytest.raises(AmpStateError, match=r"of layout torch\.sparse_coo for a gradient, but release_gradients"):
        optimizer.step()
    assert_bitwise(ended(model, optimizer), before)


@pytest.mark.parametrize(
    ("error", "words", "level", "make", "keywords"),
    [
        (AmpTypeError, r"masters_on=True, but it is \"cpu\"", "O5", adamw, {"masters_on": True}),
        (AmpValueError, r"masters_on='cuda', but it is \"cpu\"", "O5", adamw, {"masters_on": "cuda"}),
        (AmpValueError, r"loss_scale='dynamic'.*Choose opt_level='O5'", "O2", adamw, {}),
        (AmpValueError, r"master_weights='split'", "O5", adamw, FORMS["split"]),
        (AmpValueError, r"master_weights=None|master_weights=False", "O4", adamw, {}),
        (AmpValueError, r"release_gradients=True", "O5", adamw, {"release_gradients": True}),
        (AmpStateError, r"with RMSprop", "O5", torch.optim.RMSprop, {}),
        (AmpStateError, r"with FusedLAMB", "O5", FusedLAMB, {}),
    ],
)
def test_refusals(error: type[Exception], words: str, level: str, make: Any, keywords: dict[str, Any]) -> None:
    model = MLP.model()
    optimizer = make(model.parameters())
    with support.left_alone(model, optimizer), pytest.raises(error, match=words):
        amp.initialize(model, optimizer, opt_level=level, **{"masters_on": "cpu", **keywords})


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))


def trained(model: nn.Module, optimizer: Optimizer, inputs: Tensor) -> None:
    for _ in range(3):
        model(inputs).float().square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False)
        optimizer.step()
        optimizer.zero_grad()


def test_a_gpu_is_waited_for_only_by_events_and_has_no_master() -> None:
    torch.manual_seed(1)
    inputs = torch.randn(4, 8)
    model = layers()
    optimizer = adamw(model.parameters())
    amp.initialize(model, optimizer, opt_level="O5", verbosity=0)
    trained(model, optimizer, inputs)
    expected = ended(model, optimizer)
    amp.close()
    with pretended_gpu(has_host_kernels=True) as gpu:
        model = layers()
        for p in model.parameters():
            gpu.put(p)
        gpu.put(inputs)
        optimizer = adamw(model.parameters())
        gpu.is_trapped = False
        amp.initialize(model, optimizer, opt_level="O5", verbosity=0, masters_on="cpu")
        gpu.is_trapped = True
        trained(model, optimizer, inputs)
        gpu.is_trapped = False
        assert gpu.waits == 3 * (1 + 4), "for the decision, and for each gradient"
        assert all(gpu.has(p) for p in model.parameters())
        on_host = [*dict(amp.named_masters(model)).values(), *model.state_dict().values()]
        state = [value for one in optimizer.state.values() for value in one.values()]
        assert not any(map(gpu.has, [*on_host, *state]))
        optimizer.load_state_dict(optimizer.state_dict())
        assert not any(gpu.has(value) for one in optimizer.state.values() for value in one.values())
        assert_bitwise(ended(model, optimizer), expected)
        trained(model, optimizer, inputs)


def test_an_fp32_parameter_needs_kernels_of_its_own_device() -> None:
    with pretended_gpu(has_host_kernels=True) as gpu:
        model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
        inputs = torch.randn(4, 8)
        for tensor in (inputs, *model.parameters(), *model.buffers()):
            gpu.put(tensor)
        gpu.is_trapped = False
        optimizer = adamw(model.parameters())
        amp.initialize(model, optimizer, opt_level="O5", verbosity=0, masters_on="cpu")
        model(inputs).float().square().mean().backward()
        before = ended(model, optimizer)
        with pytest.raises(AmpStateError, match=r"one of shape \(8,\) stays FP32 on cuda:0"):
            optimizer.step()
        assert_bitwise(ended(model, optimizer), before)


def _on_a_rank(rank: int) -> None:
    ends = []
    for where in ("cpu", None):
        model = MLP.model()
        optimizer = adamw(model.parameters())
        amp.initialize(model, optimizer, opt_level="O5", verbosity=0, masters_on=where)
        replica = nn.parallel.DistributedDataParallel(model)
        for index in range(3):
            MLP.criterion(replica(MLP.batch(2 * index + rank)[0]), MLP.batch(2 * index + rank)[1]).backward()
            optimizer.step()
            optimizer.zero_grad()
        ends.append(ended(model, optimizer))
        amp.close()
    assert_bitwise(*ends)


def test_several_ranks_train_alike() -> None:
    on_ranks(_on_a_rank, 2)
