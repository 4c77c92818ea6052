"""fully_shard at the levels that cast models: what its policy has to be, and training by it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from amp_engine import AmpStateError, amp
from tests.ranks import on_ranks
from tests.support import HALF, LEVELS, backward

MASTER_LEVELS = ("O2", "O5")


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.b = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.norm(self.a(x)).relu())


def model_of() -> Normed:
    torch.manual_seed(0)
    return Normed()


def alone() -> Any:
    return init_device_mesh("cpu", (1,))


def by_policy(level: str) -> nn.Module:
    model = model_of()
    fully_shard(model.norm, mp_policy=amp.fsdp_policy("O0"))
    fully_shard(model.a, mp_policy=amp.fsdp_policy(level))
    return fully_shard(model, mp_policy=amp.fsdp_policy(level, root=True))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def half_batch(index: int, rank: int) -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(index))[4 * rank : 4 * rank + 4]


# --- the policy ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("root", [False, True])
@pytest.mark.parametrize("level", LEVELS)
def test_the_policy_of_a_level(level: str, root: bool) -> None:
    policy = amp.fsdp_policy(level, root=root)
    if level in MASTER_LEVELS:
        output = torch.float32 if root else None
        expected = MixedPrecisionPolicy(param_dtype=HALF[level], reduce_dtype=torch.float32, output_dtype=output)
    else:
        expected = MixedPrecisionPolicy()
    assert policy == expected


def test_no_level_is_refused() -> None:
    with pytest.raises(AmpStateError, match="O6"):
        amp.fsdp_policy("O6")


# --- what initialize reads ----------------------------------------------------------------------------


def without_a_policy(level: str) -> nn.Module:
    model = model_of()
    fully_shard(model.norm, mesh=alone())
    return fully_shard(model, mesh=alone())


def of_the_other_half(level: str) -> nn.Module:
    model = model_of()
    fully_shard(model.norm, mesh=alone())
    fully_shard(model.a, mesh=alone(), mp_policy=amp.fsdp_policy("O5" if level == "O2" else "O2"))
    return fully_shard(model, mesh=alone(), mp_policy=amp.fsdp_policy(level, root=True))


def reduced_in_half(level: str) -> nn.Module:
    model = model_of()
    fully_shard(model.norm, mesh=alone())
    return fully_shard(model, mesh=alone(), mp_policy=MixedPrecisionPolicy(param_dtype=HALF[level]))


def half_outputs(level: str) -> nn.Module:
    model = model_of()
    fully_shard(model.norm, mesh=alone())
    return fully_shard(model, mesh=alone(), mp_policy=amp.fsdp_policy(level))


def norm_in_a_unit(level: str) -> nn.Module:
    return fully_shard(model_of(), mesh=alone(), mp_policy=amp.fsdp_policy(level, root=True))


def norm_in_half(level: str) -> nn.Module:
    model = model_of()
    fully_shard(model.norm, mesh=alone(), mp_policy=amp.fsdp_policy(level))
    return fully_shard(model, mesh=alone(), mp_policy=amp.fsdp_policy(level, root=True))


def a_part(level: str) -> nn.Module:
    model = model_of()
    fully_shard(model.a, mesh=alone(), mp_policy=amp.fsdp_policy(level))
    return model


def half_before(level: str) -> nn.Module:
    model = model_of().to(HALF[level])
    fully_shard(model.norm, mesh=alone())
    return fully_shard(model, mesh=alone(), mp_policy=amp.fsdp_policy(level, root=True))


def kept_in_a_unit(level: str) -> nn.Module:
    model = model_of()
    amp.keep_float(model.b)
    fully_shard(model.norm, mesh=alone(), mp_policy=amp.fsdp_policy("O0"))
    return fully_shard(model, mesh=alone(), mp_policy=amp.fsdp_policy(level, root=True))


def kept_alone_in_a_unit(level: str) -> nn.Module:
    model = model_of()
    amp.keep_float(model.b)
    fully_shard(model.norm, mesh=alone(), mp_policy=amp.fsdp_policy("O0"))
    fully_shard(model.a, mesh=alone(), mp_policy=amp.fsdp_policy(level))
    return fully_shard(model, mesh=alone(), mp_policy=amp.fsdp_policy(level, root=True))


def kept_in_half(level: str) -> nn.Module:
    model = model_of()
    amp.keep_float(model.b)
    fully_shard(model.norm, mesh=alone(), mp_policy=amp.fsdp_policy("O0"))
    fully_shard(model.b, mesh=alone(), mp_policy=amp.fsdp_policy(level))
    return fully_shard(model, mesh=alone(), mp_policy=amp.fsdp_policy(level, root=True))


SAID: list[tuple[Callable[[str], nn.Module], str]] = [
    (without_a_policy, "Call fully_shard(model, mp_policy=amp.fsdp_policy('{level}', root=True))"),
    (of_the_other_half, "Call fully_shard(model.a, mp_policy=amp.fsdp_policy('{level}'))"),
    (reduced_in_half, "model was sharded with MixedPrecisionPolicy(reduce_dtype=None)"),
    (half_outputs, "model was sharded with MixedPrecisionPolicy(output_dtype=None)"),
    (norm_in_a_unit, "Call fully_shard(module, mp_policy=amp.fsdp_policy('O0')) on each batch norm"),
    (norm_in_half, "Call fully_shard(model.norm, mp_policy=amp.fsdp_policy('O0'))"),
    (kept_in_a_unit, "model has a Linear in its unit of fully_shard, which {level} keeps in FP32."),
    (kept_alone_in_a_unit, "model has a Linear in its unit of fully_shard, which {level} keeps in FP32."),
    (kept_in_half, "Call fully_shard(model.b, mp_policy=amp.fsdp_policy('O0'))"),
    (a_part, "Parameter norm.weight of Normed is in no unit of fully_shard"),
    (half_before, "Call model.float() before fully_shard."),
]


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize(("make", "text"), SAID, ids=lambda value: getattr(value, "__name__", ""))
@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_another_policy_is_refused_with_the_line_to_write(level: str, make: Any, text: str) -> None:
    model = make(level)
    before = [p.to_local().clone() if hasattr(p, "to_local") else p.clone() for p in model.parameters()]
    with pytest.raises(AmpStateError, match=re.escape(text.format(level=level))):
        amp.initialize(model, sgd(model), opt_level=level, verbosity=0)
    after = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_outputs_in_half_are_taken_where_they_are_asked_for(level: str) -> None:
    model = half_outputs(level)
    amp.initialize(model, sgd(model), opt_level=level, verbosity=0, cast_model_outputs=HALF[level])
    assert model(torch.randn(4, 8)).dtype == HALF[level]


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize("by", ["keep_float", "policy"])
@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_a_kept_module_in_a_unit_of_its_own_computes_in_float32(level: str, by: str) -> None:
    model = model_of()
    if by == "keep_float":
        amp.keep_float(model.b)
    fully_shard(model.norm, mesh=alone(), mp_policy=amp.fsdp_policy("O0"))
    fully_shard(model.b, mesh=alone(), mp_policy=amp.fsdp_policy("O0"))
    fully_shard(model.a, mesh=alone(), mp_policy=amp.fsdp_policy(level))
    fully_shard(model, mesh=alone(), mp_policy=amp.fsdp_policy(level, root=True))
    optimizer = sgd(model)
    asked: Any = {"policy": amp.RunPolicy(level, keep_float=["b"])} if by == "policy" else {"opt_level": level}
    amp.initialize(model, optimizer, verbosity=0, **asked)
    types: set[Any] = set()
    model.b.register_forward_hook(lambda _, args, output: types.add((args[0].dtype, output.dtype)))
    before = model.b.weight.to_local().clone()
    loss = model(torch.randn(4, 8)).square().mean()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    assert types == {(torch.float32, HALF[level])}
    assert not torch.equal(model.b.weight.to_local(), before)


# --- training -----------------------------------------------------------------------------------------


def trained(rank: int) -> dict[Any, Any]:
    """Whole weights after steps on both halves of a batch, each with its own rank; and what is kept of them."""
    results: dict[Any, Any] = {}
    for level in MASTER_LEVELS:
        model = by_policy(level)
        optimizer = sgd(model)
        amp.initialize(model, optimizer, opt_level=level, verbosity=0)
        for index in range(4):
            outputs = model(half_batch(index, rank))
            assert outputs.dtype == torch.float32
            backward(outputs.square().mean(), optimizer, overflow=level == "O2" and index == 2 and rank == 1)
            optimizer.step()
            optimizer.zero_grad()
        state = [s["momentum_buffer"] for s in optimizer.state.values()]
        local = sum(s.to_local().numel() * s.to_local().element_size() for s in state)
        whole = sum(s.numel() * s.element_size() for s in state)
        results[level] = [p.detach().full_tensor().clone() for p in model.parameters()], local, whole
        amp.close()
    return results


@pytest.fixture(scope="module")
def ranks() -> list[dict[Any, Any]]:
    return on_ranks(trained, 2)


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_two_ranks_train_as_one_process_on_the_same_data(ranks: list[dict[Any, Any]], level: str) -> None:
    model = model_of()
    optimizer = sgd(model)
    for index in range(4):
        if level == "O2" and index == 2:
            continue  # one rank overflowed
        # A mean over ranks of means over their halves; batch norm is of each half, as without SyncBatchNorm.
        for rank in range(2):
            (model(half_batch(index, rank)).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    (weights, *_), (other, *_) = (results[level] for results in ranks)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(weights, other, strict=True))
    for ours, expected in zip(weights, model.parameters(), strict=True):
        torch.testing.assert_close(ours, expected.detach(), rtol=0, atol=5e-3 if level == "O2" else 3e-2)


@pytest.mark.parametrize("level", MASTER_LEVELS)
def test_each_rank_has_its_share_of_the_state(ranks: list[dict[Any, Any]], level: str) -> None:
    for results in ranks:
        _, local, whole = results[level]
        assert local <= 0.6 * whole
