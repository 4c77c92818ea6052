"""apex.parallel: two processes that train as one, batch norms that share statistics, and what is refused."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import re
import runpy
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import amp_engine.optimizers
from amp_engine import amp
from amp_engine.apex import parallel
from amp_engine.apex.parallel import DistributedDataParallel, Reducer, SyncBatchNorm
from amp_engine.apex.parallel.distributed import flat_dist_call
from tests.models import CNN, MLP
from tests.ranks import on_ranks
from tests.support import LEVELS, assert_bitwise, backward, frozen, masters, started, train

RANKS = 2
PARALLEL_LEVELS = ("O0", "O1", "O2")
SCENARIOS: dict[str, Callable[[int], Any]] = {}


def on_two_ranks(run: Callable[[int], Any]) -> Callable[[int], Any]:
    SCENARIOS[run.__name__] = run
    return run


def run_scenarios(rank: int) -> dict[str, Any]:
    """Run in one of the processes; return what each scenario returned, or raised."""
    warnings.simplefilter("error")
    results: dict[str, Any] = {}
    for name, run in SCENARIOS.items():
        torch.manual_seed(rank)
        try:
            results[name] = frozen(run(rank))
        finally:
            amp.close()
    return results


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    """The results of the scenarios on each rank."""
    return on_ranks(run_scenarios, RANKS)


def half_of(rank: int, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return tuple(part.chunk(RANKS)[rank] for part in batch)  # type: ignore[return-value]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


# --- training -------------------------------------------------------------------------------------

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "delayed": {"delay_allreduce": True},
    "small buckets": {"message_size": 10},
    "predivided in float32": {"allreduce_always_fp32": True, "gradient_predivide_factor": 2.0},
}


@on_two_ranks
def training(rank: int) -> dict[Any, Any]:
    results = {}
    for level in PARALLEL_LEVELS:
        for variant, arguments in VARIANTS.items():
            model = MLP.model(seed=rank)
            optimizer = sgd(model)
            amp.initialize(model, optimizer, opt_level=level, verbosity=0)
            wrapped = DistributedDataParallel(model, **arguments)
            for index in range(4):
                optimizer.zero_grad()
                backward(MLP.loss(wrapped, half_of(rank, MLP.batch(index))), optimizer)
                optimizer.step()
            results[level, variant] = masters(optimizer), [p.detach() for p in model.parameters()]
            del wrapped
            amp.close()
    return results


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("level", PARALLEL_LEVELS)
def test_two_ranks_end_alike_and_as_one_process_on_the_joined_batch(
    level: str, variant: str, ranks: list[dict[str, Any]]
) -> None:
    """Each rank starts from weights of its own, and rank 0's are broadcast."""
    first, second = (rank["training"][level, variant] for rank in ranks)
    assert_bitwise(first, second)
    model = MLP.model(seed=0)
    start = frozen([p.detach() for p in model.parameters()])
    optimizer = sgd(model)
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    train(MLP, model, optimizer, "cccc")
    tolerance = 1e-6 if level == "O0" else 1e-3
    for ours, truth, before in zip(first[0], masters(optimizer), start, strict=True):
        torch.testing.assert_close(ours, truth, rtol=tolerance, atol=tolerance)
        assert (ours - before).abs().max() > 10 * tolerance


# --- how gradients are averaged -------------------------------------------------------------------


class Product(nn.Module):
    """A module whose gradient is its input."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


AVERAGES: dict[str, tuple[dict[str, Any], torch.dtype, tuple[float, float], float]] = {
    "average": ({}, torch.float32, (1.0, 4.0), 2.5),
    "sum": ({"gradient_average": False}, torch.float32, (1.0, 4.0), 5.0),
    "predivided average": ({"gradient_predivide_factor": 8.0}, torch.float32, (1.0, 4.0), 2.5),
    "predivided sum": ({"gradient_predivide_factor": 8.0, "gradient_average": False}, torch.float32, (1.0, 4.0), 0.625),
    "half average beyond half": ({}, torch.float16, (6e4, 6e4), 6e4),
    "half average below half": ({}, torch.float16, (2.0**-24, 2.0**-24), 0.0),
    "half average beyond half in float32": ({"allreduce_always_fp32": True}, torch.float16, (6e4, 6e4), 6e4),
    "half average below half in float32": (
        {"allreduce_always_fp32": True},
        torch.float16,
        (2.0**-24, 2.0**-24),
        2.0**-24,
    ),
}


@on_two_ranks
def averages(rank: int) -> dict[str, Any]:
    results = {}
    for name, (arguments, dtype, inputs, _) in AVERAGES.items():
        wrapped = DistributedDataParallel(Product(dtype), **arguments)
        copied, pickled = copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))
        for ddp in (wrapped, copied, pickled):
            ddp(torch.tensor([inputs[rank]], dtype=dtype)).sum().backward()
            results.setdefault(name, []).append(ddp.module.weight.grad.item())
    return results


@pytest.mark.parametrize("case", AVERAGES)
def test_gradients_are_averaged_as_asked_also_by_a_copy(case: str, ranks: list[dict[str, Any]]) -> None:
    expected = float(torch.tensor(AVERAGES[case][3], dtype=AVERAGES[case][1]))
    for rank in ranks:
        assert rank["averages"][case] == [expected] * 3


@on_two_ranks
def local_gradients(rank: int) -> list[Any]:
    wrapped = DistributedDataParallel(Product(torch.float32), allreduce_always_fp32=True)
    x = torch.tensor([1.0 + rank])
    seen = []
    wrapped.disable_allreduce()
    wrapped(x).sum().backward()
    seen.append(wrapped.module.weight.grad.item())
    wrapped.enable_allreduce()
    wrapped(10 * x).sum().backward()
    seen.append(wrapped.module.weight.grad.item())
    return seen


def test_gradients_stay_local_while_allreduce_is_disabled_and_are_then_averaged(ranks: list[dict[str, Any]]) -> None:
    assert [rank["local_gradients"] for rank in ranks] == [[1.0, 16.5], [2.0, 16.5]]


@on_two_ranks
def accumulation(rank: int) -> list[Tensor]:
    model, optimizer = started("O2", task=MLP)
    wrapped = DistributedDataParallel(model)
    wrapped.disable_allreduce()
    backward(MLP.loss(wrapped, half_of(rank, MLP.batch(0))), optimizer, delay_unscale=True)
    wrapped.enable_allreduce()
    backward(MLP.loss(wrapped, half_of(rank, MLP.batch(1))), optimizer)
    optimizer.step()
    return masters(optimizer)


def test_local_accumulation_at_o2_goes_by_delay_unscale(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["accumulation"] for rank in ranks)
    assert_bitwise(first, second)
    model = MLP.model()
    optimizer = sgd(model)
    (MLP.loss(model, MLP.batch(0)) + MLP.loss(model, MLP.batch(1))).backward()
    optimizer.step()
    torch.testing.assert_close(first, [p.detach() for p in model.parameters()], rtol=1e-3, atol=1e-3)


class Branches(nn.Module):
    """Uses one of two layers, so that the other has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)])

    def forward(self, x: Tensor, which: int) -> Tensor:
        return self.layers[which](x)


@on_two_ranks
def unused(rank: int) -> Any:
    results = {}
    for level in ("O1", "O2"):
        torch.manual_seed(0)
        model = Branches()
        optimizer = sgd(model)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        wrapped = DistributedDataParallel(model, delay_allreduce=True)
        before = masters(optimizer)
        x, y = half_of(rank, MLP.batch(0))
        for which in (0, 0, 1, rank):
            optimizer.zero_grad()
            backward((wrapped(x, which) - y[:, :1]).square().mean(), optimizer)
            optimizer.step()
        results[level] = before, masters(optimizer)
        del wrapped
        amp.close()
    return results


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_delay_allreduce_takes_a_model_with_unused_parameters(level: str, ranks: list[dict[str, Any]]) -> None:
    """The same one on both ranks, and another on each."""
    first, second = (rank["unused"][level] for rank in ranks)
    assert_bitwise(first, second)
    assert all(not torch.equal(a, b) for a, b in zip(*first, strict=True))


@on_two_ranks
def buffers(rank: int) -> Any:
    model = nn.BatchNorm1d(3)
    model.register_buffer("mine", torch.tensor(float(rank)))
    wrapped = DistributedDataParallel(model)
    alone = nn.BatchNorm1d(3)
    for _ in range(2):
        x = torch.randn(5, 3) + rank
        wrapped(x)
        alone(x)
    return model.mine, model.running_mean, alone.running_mean


def test_buffers_are_broadcast_once_and_then_each_ranks_own(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        mine, mean, mean_of_rank = rank["buffers"]
        assert mine == 0.0
        assert_bitwise(mean, mean_of_rank)


# --- Reducer and flat_dist_call -------------------------------------------------------------------


@on_two_ranks
def reducing(rank: int) -> Any:
    model = MLP.model(seed=rank)
    reducer = Reducer(model)
    start = frozen([p.detach() for p in model.parameters()])
    frozen_one = next(model.parameters())
    frozen_one.requires_grad_(False)
    MLP.loss(model, half_of(rank, MLP.batch(0))).backward()
    reducer.reduce()
    given = [torch.full((2,), 1.0 + rank), {"a": torch.full((3,), 4.0 * rank, dtype=torch.float16)}]
    Reducer(given).reduce()
    return start, [p.grad for p in model.parameters()], given


def test_reducer_broadcasts_a_module_and_averages_its_gradients_or_those_given(ranks: list[dict[str, Any]]) -> None:
    (start, grads, given), second = (rank["reducing"] for rank in ranks)
    assert_bitwise((start, grads, given), second)
    model = MLP.model(seed=0)
    assert_bitwise(start, [p.detach() for p in model.parameters()])
    MLP.loss(model, MLP.batch(0)).backward()
    assert grads[0] is None
    torch.testing.assert_close(grads[1:], [p.grad for p in model.parameters()][1:], rtol=1e-5, atol=1e-7)
    assert_bitwise(given, [torch.full((2,), 1.5), {"a": torch.full((3,), 2.0, dtype=torch.float16)}])


@on_two_ranks
def broadcasting_data(rank: int) -> Any:
    model = MLP.model(seed=rank)
    optimizer = sgd(model)
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    flat_dist_call([p.data for p in model.parameters()], dist.broadcast, (0,))
    train(MLP, model, optimizer, "c")
    return masters(optimizer)


def test_masters_follow_a_broadcast_of_the_data_of_their_parameters(ranks: list[dict[str, Any]]) -> None:
    assert_bitwise(*(rank["broadcasting_data"] for rank in ranks))


# --- batch norm -----------------------------------------------------------------------------------

NORM_SHAPES = {"2d": (6, 3), "3d": (6, 3, 4), "4d": (6, 3, 4, 5), "channel_last": (6, 4, 5, 3)}
SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "without affine": {"affine": False},
    "without statistics": {"track_running_stats": False},
    "cumulative": {"momentum": None},
}


def norm_input(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3 + 50


def norm_outcome(norm: nn.Module, x: Tensor) -> Any:
    for _ in range(2):
        y = norm(x)
    return y.detach(), {name: value.clone() for name, value in norm.state_dict().items()}


@on_two_ranks
def batch_norms(rank: int) -> Any:
    results: dict[Any, Any] = {}
    for shape in NORM_SHAPES:
        for setting, arguments in SETTINGS.items():
            norm = SyncBatchNorm(3, channel_last=shape == "channel_last", **arguments)
            x = norm_input(NORM_SHAPES[shape])
            results[shape, setting] = norm_outcome(norm, (x[:2], x[2:])[rank])
    alone = SyncBatchNorm(3, process_group=parallel.create_syncbn_process_group(1))
    together = SyncBatchNorm(3, process_group=parallel.create_syncbn_process_group(2))
    x = norm_input((6, 3)).chunk(2)[rank]
    results["groups"] = alone(x), together(x), parallel.create_syncbn_process_group(0)
    results["bfloat16"] = SyncBatchNorm(3)(x.bfloat16())
    results["wrapped"] = DistributedDataParallel(SyncBatchNorm(3))(x)
    return results


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("shape", NORM_SHAPES)
def test_ranks_with_batches_of_2_and_4_normalize_as_one_with_6(
    shape: str, setting: str, ranks: list[dict[str, Any]]
) -> None:
    x = norm_input(NORM_SHAPES[shape])
    truth = nn.SyncBatchNorm(3, **SETTINGS[setting])
    if shape == "channel_last":
        y, state = norm_outcome(truth, x.movedim(-1, 1))
        y = y.movedim(1, -1)
    else:
        y, state = norm_outcome(truth, x)
    (first, first_state), (second, second_state) = (rank["batch_norms"][shape, setting] for rank in ranks)
    assert_bitwise(first_state, second_state)
    torch.testing.assert_close(first_state, state, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.cat([first, second]), y, rtol=1e-4, atol=1e-4)


@on_two_ranks
def batch_norm_gradients(rank: int) -> Any:
    norm = SyncBatchNorm(3)
    x = norm_input((6, 3, 4)).double()[[slice(0, 2), slice(2, 6)][rank]].requires_grad_()
    norm.double()
    weights = norm_input((6, 3, 4)).sin().double()[[slice(0, 2), slice(2, 6)][rank]]
    (norm(x) * weights).sum().backward()
    dist.all_reduce(norm.weight.grad)
    dist.all_reduce(norm.bias.grad)
    return x.grad, norm.weight.grad, norm.bias.grad


def test_gradients_of_a_shared_batch_norm_are_those_of_the_joined_batch(ranks: list[dict[str, Any]]) -> None:
    norm = nn.BatchNorm1d(3).double()
    x = norm_input((6, 3, 4)).double().requires_grad_()
    (norm(x) * norm_input((6, 3, 4)).sin().double()).sum().backward()
    (first, weight, bias), (second, _, _) = (rank["batch_norm_gradients"] for rank in ranks)
    torch.testing.assert_close(torch.cat([first, second]), x.grad, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close((weight, bias), (norm.weight.grad, norm.bias.grad), rtol=1e-8, atol=1e-10)


def test_statistics_are_shared_within_a_group_only(ranks: list[dict[str, Any]]) -> None:
    x = norm_input((6, 3))
    expected = nn.BatchNorm1d(3)(x).chunk(2)
    for rank, one in enumerate(ranks):
        alone, together, everybody = one["batch_norms"]["groups"]
        assert everybody is None
        torch.testing.assert_close(together, expected[rank].detach(), rtol=1e-4, atol=1e-4)
        assert_bitwise(one["batch_norms"]["wrapped"], together)
        torch.testing.assert_close(alone, nn.BatchNorm1d(3)(x.chunk(2)[rank]).detach(), rtol=1e-4, atol=1e-4)
        assert one["batch_norms"]["bfloat16"].dtype == torch.bfloat16


def test_relu_and_addend_are_fused_as_asked() -> None:
    x, z = torch.randn(5, 3, 2, 2), torch.randn(5, 3, 2, 2)
    plain = nn.BatchNorm2d(3)
    assert_bitwise(SyncBatchNorm(3, fuse_relu=True)(x), plain(x).relu())
    assert_bitwise(SyncBatchNorm(3, fuse_relu=True)(x, z), (plain(x) + z).relu())
    assert_bitwise(SyncBatchNorm(3)(x, z), plain(x) + z)
    last = x.movedim(1, -1)
    torch.testing.assert_close(SyncBatchNorm(3, channel_last=True)(last), plain(x).movedim(1, -1))
    assert "channel_last=True, fuse_relu=False" in repr(SyncBatchNorm(3, channel_last=True))


@pytest.mark.parametrize(("shape", "what"), [((3,), "takes"), ((2, 0), "no channels")])
def test_an_input_without_channels_is_refused_with_its_shape(shape: tuple[int, ...], what: str) -> None:
    with pytest.raises(ValueError, match=rf"input of shape {re.escape(str(shape))}, .*{what}"):
        SyncBatchNorm(3)(torch.ones(shape))


def test_its_arguments_are_apexs() -> None:
    expected = ["num_features", "eps", "momentum", "affine", "track_running_stats"]
    expected += ["process_group", "channel_last", "fuse_relu"]
    assert list(inspect.signature(SyncBatchNorm).parameters) == expected


def test_conversion_keeps_parameters_buffers_hooks_and_mode() -> None:
    shared = nn.BatchNorm2d(3, momentum=0.3).eval()
    shared.weight.requires_grad_(False)
    calls = []
    handle = shared.register_forward_hook(lambda *_: calls.append(1))
    model = nn.Sequential(shared, nn.Sequential(nn.BatchNorm1d(2), shared), nn.InstanceNorm2d(3), nn.GroupNorm(1, 3))
    before = {name: id(value) for name, value in [*model.named_parameters(), *model.named_buffers()]}
    values = frozen(model.state_dict())
    assert parallel.convert_syncbn_model(model, channel_last=True) is model
    assert {name: id(value) for name, value in [*model.named_parameters(), *model.named_buffers()]} == before
    assert_bitwise(frozen(model.state_dict()), values)
    norms = [m for m in model.modules() if isinstance(m, SyncBatchNorm)]
    assert len(norms) == 2
    assert model[0] is model[1][1]
    assert (model[0].momentum, model[0].training, model[0].channel_last) == (0.3, False, True)
    assert type(model[2]) is nn.InstanceNorm2d
    assert type(model[3]) is nn.GroupNorm
    model[0](torch.randn(2, 4, 4, 3))
    handle.remove()
    model[0](torch.randn(2, 4, 4, 3))
    assert calls == [1]
    by_itself = parallel.convert_syncbn_model(nn.BatchNorm2d(3))
    assert_bitwise(by_itself(torch.ones(2, 3, 4, 4)), nn.BatchNorm2d(3)(torch.ones(2, 3, 4, 4)))


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_a_converted_model_trains_as_before_conversion_with_its_norms_in_fp32(level: str, after: bool) -> None:
    results = []
    for convert in (True, False):
        model = CNN.model()
        optimizer = sgd(model)
        if convert and not after:
            model = parallel.convert_syncbn_model(model)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        if convert and after:
            model = parallel.convert_syncbn_model(model)
        train(CNN, model, optimizer, "cc")
        norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        assert norms
        assert {m.weight.dtype for m in norms} == {torch.float16 if level == "O3" else torch.float32}
        results.append((masters(optimizer), frozen(model.state_dict())))
        amp.close()
    assert_bitwise(*results)


# --- names, and what is refused -------------------------------------------------------------------


def test_each_class_is_in_the_module_where_apex_has_it() -> None:
    from amp_engine.apex.parallel import distributed, optimized_sync_batchnorm, sync_batchnorm
    from amp_engine.apex.parallel.LARC import LARC

    assert parallel.LARC is LARC is amp_engine.optimizers.LARC
    assert distributed.DistributedDataParallel is parallel.DistributedDataParallel
    assert distributed.Reducer is parallel.Reducer
    assert sync_batchnorm.SyncBatchNorm is optimized_sync_batchnorm.SyncBatchNorm is parallel.SyncBatchNorm


@pytest.mark.parametrize(
    "call",
    [
        lambda: DistributedDataParallel(MLP.model()),
        lambda: Reducer(MLP.model()),
        lambda: parallel.create_syncbn_process_group(2),
    ],
)
def test_without_a_process_group_it_says_what_to_type(call: Callable[[], Any]) -> None:
    with pytest.raises(RuntimeError, match=r"Call torch\.distributed\.init_process_group.*torchrun"):
        call()


def test_multiproc_sends_its_users_to_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    import amp_engine.apex.parallel.multiproc as multiproc

    monkeypatch.setattr("sys.argv", ["multiproc", "main.py", "--epochs", "2"])
    with pytest.raises(SystemExit, match=r"Run torchrun --nproc_per_node=GPUS main\.py --epochs 2;"):
        runpy.run_path(str(Path(multiproc.__file__)), run_name="__main__")


@pytest.mark.usefixtures("one_process_group")
def test_arguments_without_a_meaning_today_are_taken_and_named() -> None:
    arguments = {
        "shared_param": True,
        "allreduce_trigger_params": [],
        "retain_allreduce_buffers": True,
        "num_allreduce_streams": 2,
        "allreduce_communicators": ([], []),
        "gradient_average_split_factor": 2.0,
        "prof": True,
    }
    with pytest.warns(UserWarning, match=f"ignores {', '.join(arguments)}: "):
        DistributedDataParallel(MLP.model(), **arguments)
    DistributedDataParallel(MLP.model(), 10_000_000, False, None, None, False, False, 1, None, True, 1.0, None, False)


@pytest.mark.usefixtures("one_process_group")
def test_wrong_arguments_are_refused_with_what_was_typed() -> None:
    with pytest.raises(TypeError, match="got a list, but wraps a model"):
        DistributedDataParallel([MLP.model()])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="message_size=0,"):
        DistributedDataParallel(MLP.model(), message_size=0)
    with pytest.raises(ValueError, match=r"gradient_predivide_factor=-1\.0,"):
        DistributedDataParallel(MLP.model(), gradient_predivide_factor=-1.0)
    with pytest.raises(ValueError, match=r"group_size=2 does not divide the 1 ranks"):
        parallel.create_syncbn_process_group(2)
    for wrong in (3, "model", [torch.ones(1), 3]):
        with pytest.raises(TypeError, match=r"Reducer\(\) got a (int|str)"):
            Reducer(wrong)  # type: ignore[arg-type]


@pytest.mark.usefixtures("one_process_group")
def test_initialize_refuses_a_wrapped_model_in_apexs_words() -> None:
    wrapped = DistributedDataParallel(MLP.model())
    message = (
        r"^Incoming model is an instance of <class '.*apex\.parallel\.distributed\.DistributedDataParallel'>\. "
        r"Parallel wrappers should only be applied to the model\(s\) AFTER \nthe model\(s\) have been returned from "
        r"amp\.initialize\."
    )
    with pytest.raises(RuntimeError, match=message):
        amp.initialize(wrapped, sgd(wrapped), opt_level="O2", verbosity=0)


@pytest.mark.parametrize("made", [DistributedDataParallel, lambda model: copy.copy(DistributedDataParallel(model))])
def test_the_process_group_outlives_the_reducer_of_a_model_that_outlives_both(made: Callable[[nn.Module], Any]) -> None:
    """Ended by the reducer, a group of Gloo waits, with the GIL, for threads that may want it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = made(MLP.model())
    ended: list[str] = []
    for name in ("reducer", "logger", "process_group"):
        weakref.finalize(getattr(model, name), ended.append, name)
    dist.destroy_process_group()
    assert ended == []
    del model
    gc.collect()
    assert ended[-1] == "process_group"
    assert sorted(ended) == ["logger", "process_group", "reducer"]


@pytest.mark.usefixtures("one_process_group")
def test_the_size_of_buckets_comes_from_message_size() -> None:
    wrapped = DistributedDataParallel(MLP.model().half(), message_size=2**20)
    assert wrapped.bucket_bytes_cap == 2**21
