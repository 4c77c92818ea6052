"""Models in shards: fully_shard, FullyShardedDataParallel, tensor parallelism, ZeroRedundancyOptimizer.

Trained alike by all ranks, or refused by name: by initialize, or by the first scale_loss or step after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from amp_engine import AmpStateError, amp, kernels, optimizers
from tests.ranks import on_ranks
from tests.support import LEVELS, assert_bitwise

RANKS = 2
FUSED = ("FusedAdam", "FusedMixedPrecisionLamb")
SOME = ("O2", "O4")
STATIC = {"loss_scale": 1.0}


def base() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def units(model: nn.Module) -> nn.Module:
    fully_shard(model[0])  # type: ignore[index]
    return fully_shard(model)


def one_unit(model: nn.Module) -> nn.Module:
    return fully_shard(model)


def a_part(model: nn.Module) -> nn.Module:
    fully_shard(model[0])  # type: ignore[index]
    return model


def in_bfloat16(model: nn.Module) -> nn.Module:
    return fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


def in_float16(model: nn.Module) -> nn.Module:
    return fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16))


def tensor_parallel(model: nn.Module) -> nn.Module:
    return parallelize_module(
        model, init_device_mesh("cpu", (RANKS,)), {"0": ColwiseParallel(), "2": RowwiseParallel()}
    )


def half_tensor_parallel(model: nn.Module) -> nn.Module:
    return tensor_parallel(model.bfloat16())


def fsdp1(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


def fsdp1_original(model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def iterate(model: nn.Module, optimizer: Any, named: Any = None, in_care: bool = True) -> None:
    """Take one step on the same data on all ranks; scale_loss gets `named`."""
    torch.manual_seed(1)
    loss = model(torch.randn(4, 8)).float().square().mean()
    if in_care:
        with amp.scale_loss(loss, named or optimizer) as scaled_loss:
            scaled_loss.backward()
    else:
        loss.backward()
    optimizer.step()


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def fused(name: str) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda params: getattr(optimizers, name)(params, lr=0.01)


def first_sharded(shard: Callable[..., nn.Module], level: str, make: Any = adamw, **options: Any) -> Any:
    """The weights, whole, after a step of amp's, and those after a step in FP32; or the refusal of initialize."""
    try:
        model = shard(base())
        optimizer = make(model.parameters())
        amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
        iterate(model, optimizer)
        stepped = [whole(param.detach()).clone() for param in model.parameters()]
    except AmpStateError as error:
        return str(error)
    finally:
        amp.close()
    model = shard(base())
    optimizer = make(model.parameters())
    iterate(model, optimizer, in_care=False)
    return stepped, [whole(param.detach()) for param in model.parameters()]


def then_sharded(shard: Callable[..., nn.Module], level: str, first: str, **options: Any) -> Any:
    """Return the error of the first scale_loss or step after an initialize of the whole model; None if none."""
    model = base()
    optimizer = adamw(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    sharded = shard(model)
    try:
        if first == "step":
            optimizer.step()
        else:
            iterate(sharded, optimizer)
    except AmpStateError as error:
        return str(error)
    finally:
        amp.close()
    return None


def zero(level: str, passed: str) -> Any:
    """The weights after a step of amp's, and after one without amp; or the refusal of initialize."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # a module that warns, where warnings are errors

    results: list[list[Tensor]] = []
    for in_care in (True, False):
        model = base()
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
        inside = optimizer if passed == "wrapper" else optimizer.optim
        try:
            if in_care:
                amp.initialize(model, inside, opt_level=level, verbosity=0)
            ddp = DistributedDataParallel(model)
            iterate(ddp, optimizer, inside, in_care)
            del ddp
        except AmpStateError as error:
            return str(error)
        finally:
            amp.close()
        results.append([param.detach().clone() for param in model.parameters()])
    return tuple(results)


def cases() -> dict[tuple[Any, ...], Callable[[], Any]]:
    found: dict[tuple[Any, ...], Callable[[], Any]] = {}
    for shard in (units, tensor_parallel, fsdp1, fsdp1_original):
        for level in LEVELS:
            found["first", shard, level] = lambda shard=shard, level=level: first_sharded(shard, level)
        found["first", shard, "O1", 1.0] = lambda shard=shard: first_sharded(shard, "O1", **STATIC)
    found["first", half_tensor_parallel, "O5"] = lambda: first_sharded(half_tensor_parallel, "O5")
    for shard in (in_bfloat16, in_float16):
        for level in ("O0", "O1", "O4"):
            found["first", shard, level] = lambda shard=shard, level=level: first_sharded(shard, level, **STATIC)
    for name in FUSED:
        for shard in (units, tensor_parallel):
            found[name, shard] = lambda shard=shard, name=name: first_sharded(shard, "O4", fused(name))
    for shard in (units, one_unit, a_part, tensor_parallel, fsdp1, fsdp1_original):
        for level in LEVELS if shard is fsdp1_original else SOME:
            found["then", shard, level] = lambda shard=shard, level=level: then_sharded(shard, level, "scale_loss")
        found["then", shard, "step"] = lambda shard=shard: then_sharded(shard, "O4", "step")
    for level in LEVELS:
        for passed in ("wrapper", "inside"):
            found["zero", level, passed] = lambda level=level, passed=passed: zero(level, passed)
    return {tuple(getattr(part, "__name__", part) for part in key): run for key, run in found.items()}


def run_cases(rank: int) -> dict[Any, Any]:
    return {key: run() for key, run in cases().items()}


@pytest.fixture(scope="module")
def ranks() -> list[dict[Any, Any]]:
    return on_ranks(run_cases, RANKS)


def said(ranks: list[dict[Any, Any]], *case: Any) -> str:
    """The refusal, by all ranks alike."""
    first, *others = (results[case] for results in ranks)
    assert isinstance(first, str), f"{case} was not refused"
    assert all(other == first for other in others)
    return first


def assert_trained(ranks: list[dict[Any, Any]], *case: Any) -> None:
    for results in ranks:
        assert not isinstance(results[case], str), results[case]
        stepped, expected = results[case]
        torch.testing.assert_close(stepped, expected, atol=2e-3, rtol=0)  # a fifth of a step


@pytest.mark.parametrize("level", ["O0", "O4"])
@pytest.mark.parametrize("shard", ["units", "tensor_parallel", "fsdp1", "fsdp1_original"])
def test_shards_are_trained_where_nothing_is_scaled_or_cast(ranks: Any, shard: str, level: str) -> None:
    assert_trained(ranks, "first", shard, level)


@pytest.mark.parametrize("shard", ["units", "tensor_parallel", "fsdp1", "fsdp1_original"])
def test_shards_are_trained_at_o1_without_a_scale(ranks: Any, shard: str) -> None:
    assert_trained(ranks, "first", shard, "O1", 1.0)


@pytest.mark.parametrize("shard", ["units", "tensor_parallel"])
def test_dtensors_are_scaled_at_o1(ranks: Any, shard: str) -> None:
    assert_trained(ranks, "first", shard, "O1")


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_fully_shard_is_told_of_our_policy(ranks: Any, level: str) -> None:
    text = said(ranks, "first", "units", level)
    assert f"Call fully_shard(model, mp_policy=amp.fsdp_policy('{level}', root=True))" in text


def test_fully_shard_is_told_to_have_half_parameters_at_o3(ranks: Any) -> None:
    text = said(ranks, "first", "units", "O3")
    assert "Parameter 0.weight of FSDPSequential is a DTensor, which O3 cannot cast" in text
    assert "call model.to(torch.float16) before fully_shard" in text


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_tensor_parallelism_is_not_called_fsdp2(ranks: Any, level: str) -> None:
    text = said(ranks, "first", "tensor_parallel", level)
    assert text.endswith("choose opt_level='O4' or 'O1'.")
    assert "FSDP" not in text
    assert "MixedPrecision" not in text


def test_half_shards_that_would_have_no_master_are_refused(ranks: Any) -> None:
    text = said(ranks, "first", "half_tensor_parallel", "O5")
    assert "is a DTensor in torch.bfloat16, for which O5 keeps no FP32 master: make it of FP32 weights" in text


@pytest.mark.parametrize("shard", ["fsdp1", "fsdp1_original"])
def test_fsdp1_is_refused_where_it_is_cast_or_scaled(ranks: Any, shard: str) -> None:
    of_model = "FullyShardedDataParallel has made shards of the parameters of this model"
    for level in ("O1", "O2", "O3", "O5"):
        why = "would have each rank decide on an overflow of its own" if level == "O1" else "cannot cast them"
        text = said(ranks, "first", shard, level)
        assert text.startswith(f"{of_model}: {level} {why}.  Choose opt_level='O4'")


@pytest.mark.parametrize(
    ("shard", "level", "cure"), [("in_bfloat16", "O1", "opt_level='O4'"), ("in_float16", "O4", "opt_level='O1'")]
)
def test_the_param_dtype_of_a_policy_of_another_half_is_refused(ranks: Any, shard: str, level: str, cure: str) -> None:
    text = said(ranks, "first", shard, level)
    assert f"MixedPrecisionPolicy(param_dtype=torch.{shard.removeprefix('in_')})" in text
    assert f"Choose {cure}, or call fully_shard(model) without param_dtype." in text


@pytest.mark.parametrize(
    ("shard", "level"), [("in_bfloat16", "O0"), ("in_float16", "O0"), ("in_bfloat16", "O4"), ("in_float16", "O1")]
)
def test_the_param_dtype_of_a_policy_of_the_same_half_is_taken(ranks: Any, shard: str, level: str) -> None:
    assert_trained(ranks, "first", shard, level)


@pytest.mark.skipif(not kernels.has_native(torch.device("cpu")), reason="fused optimizers need compiled kernels")
@pytest.mark.parametrize("shard", ["units", "tensor_parallel"])
@pytest.mark.parametrize("name", FUSED)
def test_fused_optimizers_of_dtensors_are_refused_by_initialize(ranks: Any, name: str, shard: str) -> None:
    text = said(ranks, name, shard)
    assert text.startswith(f"{name} cannot step DTensors")
    assert text.endswith("Use an optimizer of torch.optim, such as torch.optim.AdamW.")


@pytest.mark.parametrize(
    ("shard", "when"),
    [(shard, when) for shard in ("units", "one_unit", "a_part", "tensor_parallel") for when in (*SOME, "step")],
)
def test_dtensors_in_the_place_of_parameters_are_an_error_at_the_first_use(ranks: Any, shard: str, when: str) -> None:
    text = said(ranks, "then", shard, when)
    assert text.startswith("DTensors have replaced parameters of this ")
    assert "Call fully_shard(model), or what else shards it, first, then make the AdamW, then call amp.init" in text


@pytest.mark.parametrize("when", [*SOME, "step"])
def test_flat_parameters_in_the_place_of_others_are_an_error_at_the_first_use(ranks: Any, when: str) -> None:
    text = said(ranks, "then", "fsdp1", when)
    assert text.startswith("FullyShardedDataParallel has replaced parameters of this Sequential")


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_shards_of_the_same_parameters_are_an_error_where_ranks_would_differ(ranks: Any, level: str) -> None:
    text = said(ranks, "then", "fsdp1_original", level)
    assert text.startswith("FullyShardedDataParallel has made shards of parameters of this Sequential")


@pytest.mark.parametrize("when", ["O0", "O4", "step"])
def test_shards_of_the_same_parameters_are_trained_elsewhere(ranks: Any, when: str) -> None:
    assert [results["then", "fsdp1_original", when] for results in ranks] == [None] * RANKS


@pytest.mark.parametrize("level", ["O0", "O4"])
def test_what_zero_steps_by_is_taken_where_the_refusal_of_the_wrapper_says_so(ranks: Any, level: str) -> None:
    text = said(ranks, "zero", level, "wrapper")
    assert "Call amp.initialize(model, optimizer.optim, opt_level='O4'), or 'O0'" in text
    assert_trained(ranks, "zero", level, "inside")
    ours, theirs = (results["zero", level, "inside"][0] for results in ranks)
    assert_bitwise(ours, theirs)


@pytest.mark.parametrize("passed", ["wrapper", "inside"])
def test_zero_is_refused_where_ranks_would_differ(ranks: Any, passed: str) -> None:
    for level in ("O1", "O2", "O5"):
        assert said(ranks, "zero", level, passed).endswith("do without it at O2 and O5.")
