"""DistributedDataParallel made before initialize: its gradients are reduced, or it is refused by name."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from amp_engine import AmpStateError, AmpTypeError, amp
from amp_engine.apex.parallel import DistributedDataParallel as ApexDistributedDataParallel
from tests.models import MLP
from tests.ranks import on_ranks
from tests.support import assert_bitwise, backward, left_alone, masters, momentum_sgd

REACHED = ("O0", "O1", "O4")
REFUSED = ("O2", "O3", "O5")
# The type in which a model comes, so that the level changes none.
COMES_IN = {**dict.fromkeys(REACHED, torch.float32), "O2": torch.float16, "O3": torch.float16, "O5": torch.bfloat16}
WRAPPERS = (DistributedDataParallel, ApexDistributedDataParallel)


def stepped_after_wrapping(rank: int) -> dict[Any, Any]:
    results = {}
    for level, dtype in COMES_IN.items():
        for passed in ("wrapper", "model inside"):
            model = MLP.model().to(dtype)
            ddp = DistributedDataParallel(model)
            optimizer = momentum_sgd(model.parameters())
            given = ddp if passed == "wrapper" else model
            returned, _ = amp.initialize(given, optimizer, opt_level=level, verbosity=0, loss_scale=128.0)
            backward(MLP.loss(ddp, MLP.batch(rank)), optimizer)
            optimizer.step()
            assert not amp.current_engine().step_was_skipped(optimizer)
            results[level, passed] = returned is given, masters(optimizer)
            amp.close()
            del ddp, given, returned
    for level in REFUSED:
        for order in ("made again", "made after"):
            results[level, order] = stepped_in_order(rank, level, order)
    return results


def summed(calls, bucket):  # torch looks at annotations, and takes no text
    """A communication hook that counts its buckets."""
    calls.append(bucket.index())
    return allreduce_hook(dist.group.WORLD, bucket)


def stepped_in_order(rank: int, level: str, order: str) -> tuple[Any, ...]:
    model, calls = MLP.model(), []
    optimizer = momentum_sgd(model.parameters())
    if order == "made after":
        amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=128.0)
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-4, gradient_as_bucket_view=True, init_sync=False)
    ddp.register_comm_hook(calls, summed)
    wrapper = ddp
    if order == "made again":
        with amp.rewrap(ddp) as inner:
            amp.initialize(inner, optimizer, opt_level=level, verbosity=0, loss_scale=128.0)
    for step in range(2):
        backward(MLP.loss(ddp, MLP.batch(2 * step + rank)), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    outcome = masters(optimizer), calls, ddp.bucket_bytes_cap, ddp.gradient_as_bucket_view, wrapper.module is model
    amp.close()
    return outcome


@pytest.fixture(scope="module")
def ranks() -> list[dict[Any, Any]]:
    return on_ranks(stepped_after_wrapping, 2)


@pytest.mark.parametrize("passed", ["wrapper", "model inside"])
@pytest.mark.parametrize("level", COMES_IN)
def test_what_is_wrapped_before_initialize_is_reduced_where_no_type_changes(
    ranks: list[dict[Any, Any]], level: str, passed: str
) -> None:
    (is_same, stepped), (_, other) = (results[level, passed] for results in ranks)
    assert is_same
    assert_bitwise(stepped, other)


@pytest.mark.parametrize("level", REFUSED)
def test_a_wrapper_that_is_made_again_reduces_as_one_that_is_made_after(
    ranks: list[dict[Any, Any]], level: str
) -> None:
    (stepped, calls, *options), (other, *_) = (results[level, "made again"] for results in ranks)
    assert_bitwise(stepped, other)
    assert len(calls) > 2
    wanted, *rest = ranks[0][level, "made after"]
    assert_bitwise(stepped, wanted)
    assert [calls, *options] == rest


def test_what_cannot_be_made_again_says_what_to_write() -> None:
    with pytest.raises(AmpTypeError, match=r"not a Mlp.  Call amp.initialize\(model, optimizer\)"):
        amp.rewrap(MLP.model()).__enter__()  # type: ignore[arg-type]


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize("attribute", ["mixed_precision", "_delay_all_reduce_params"])
def test_a_wrapper_whose_options_cannot_be_made_again_is_refused(
    attribute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ddp = DistributedDataParallel(MLP.model())
    monkeypatch.setattr(ddp, attribute, ["set"])
    with pytest.raises(AmpStateError, match="which it cannot make again"):
        amp.rewrap(ddp).__enter__()


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("level", REFUSED)
def test_a_wrapper_and_the_model_inside_are_refused_where_types_change(level: str, wrap: Any) -> None:
    model = MLP.model()
    ddp, optimizer = wrap(model), momentum_sgd(model.parameters())
    line = f"amp.initialize(model, optimizer, opt_level='{level}') first, then DistributedDataParallel(model)."
    for given in (ddp, model):
        with left_alone(model, optimizer), pytest.raises(AmpStateError, match=re.escape(line)):
            amp.initialize(given, optimizer, opt_level=level, verbosity=0)
    del ddp, given
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize("level", ["O2", "O3"])
def test_what_users_do_to_parameters_is_taken_for_no_wrapper(level: str) -> None:
    model, other = MLP.model(), MLP.model()
    ddp = DistributedDataParallel(other)
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda param: None)
        param.register_hook(lambda grad: None)
    loss = MLP.loss(model, MLP.batch())  # whose graph holds what a wrapper would
    amp.initialize(model, momentum_sgd(model.parameters()), opt_level=level, verbosity=0)
    del ddp, loss


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("level", REFUSED)
def test_close_says_that_a_wrapper_around_what_it_gives_another_type_reduces_no_more(level: str, wrap: Any) -> None:
    model = MLP.model()
    optimizer = momentum_sgd(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, verbosity=0)
    ddp = wrap(model)
    with pytest.warns(RuntimeWarning, match=r"Call \w*DistributedDataParallel\(model\) anew before") as said:
        amp.close()
    assert len(said) == 1
    assert said[0].filename == __file__
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    del ddp


@pytest.mark.usefixtures("one_process_group")
@pytest.mark.parametrize(("level", "master_weights"), [("O5", None), ("O5", "split"), ("O4", True), ("O1", True)])
def test_close_says_so_where_a_half_model_had_masters_and_is_half_again(level: str, master_weights: Any) -> None:
    model = MLP.model().bfloat16()
    optimizer = momentum_sgd(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, master_weights=master_weights)
    ddp = DistributedDataParallel(model)
    with pytest.warns(RuntimeWarning, match=r"Call DistributedDataParallel\(model\) anew before"):
        amp.close()
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    del ddp
