"""An overflow that only one rank sees, after gradients were reduced, is one decision of all ranks, and said once."""

from __future__ import annotations

import contextlib
import io
import math
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from amp_engine import amp
from amp_engine.optimizers import FusedAdam
from tests.models import MLP
from tests.ranks import Messages, on_ranks
from tests.support import LEVELS, assert_bitwise, backward, masters, momentum_sgd, scaler_numbers

STEPS = int(os.environ.get("STEPS", "20"))  # 200 in make stress
DYNAMIC = ("O1", "O2", "O3")  # weights of FP32, masters, half weights


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-3, eps=1e-4)  # 1e-8 is 0 in float16, for O3


def poison(model: torch.nn.Module, value: float) -> None:
    """Poison one element of one gradient, after all ranks have the same, as a broken reduction, or memory, would."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    random.choice(gradients).view(-1)[0] = value


def picture(model: torch.nn.Module, optimizer: torch.optim.Optimizer, skips: int) -> dict[str, Any]:
    state = optimizer.state_dict()["state"]
    return {
        "scale": scaler_numbers(),
        "skips": skips,
        "masters": masters(optimizer),
        "weights": [p.detach().clone() for p in model.parameters()],
        "state": {(i, k): torch.as_tensor(v).clone() for i, values in state.items() for k, v in values.items()},
    }


def trained(rank: int, ranks: int, level: str, make: Any, steps: int, how: str) -> dict[str, Any]:
    model = MLP.model()
    optimizer = make(model.parameters())
    amp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale="dynamic")
    ddp = DistributedDataParallel(model)
    events, skips, expected = random.Random(5), 0, 0
    random.seed(rank)
    for index in range(steps):
        is_bad, who, value = events.random() < 0.1, events.randrange(ranks), events.choice([math.inf, math.nan])
        with amp.scale_loss(MLP.loss(ddp, MLP.batch(index * ranks + rank)), optimizer) as scaled_loss:
            scaled_loss.backward()
            if is_bad and (how == "all" or who == rank):
                poison(model, value)
        expected += is_bad
        if index % 3 == 0:
            amp.clip_grad_norm_(optimizer, 0.5)
        elif index % 3 == 1:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        skips += amp.current_engine().step_was_skipped(optimizer)
        optimizer.zero_grad()
    result = picture(model, optimizer, skips) | {"poisoned": expected}
    del ddp
    amp.close()
    return result


def poisoned(rank: int) -> dict[Any, Any]:
    ranks = dist.get_world_size()
    results = {
        (level, "AdamW", how): trained(rank, ranks, level, adamw, STEPS if how == "one" else 20, how)
        for level in DYNAMIC
        for how in ("one", "all")
    }
    results["O2", "FusedAdam", "one"] = trained(rank, ranks, "O2", FusedAdam, 20, "one")
    results["O2", "own step", "one"] = trained(rank, ranks, "O2", torch.optim.Adagrad, 20, "one")
    return results | said(rank, ranks)


CASES = [(level, "AdamW", how) for level in DYNAMIC for how in ("one", "all")]
CASES += [("O2", "FusedAdam", "one"), ("O2", "own step", "one")]


@pytest.fixture(scope="module")
def ranks() -> list[dict[Any, Any]]:
    return on_ranks(poisoned, 3)


@pytest.mark.parametrize("case", CASES, ids=" ".join)
def test_ranks_stay_bitwise_equal(ranks: list[dict[Any, Any]], case: tuple[str, str, str]) -> None:
    first, *others = (results[case] for results in ranks)
    for other in others:
        assert_bitwise(other, first)
    assert all(master.isfinite().all() for master in first["masters"])
    assert first["skips"] >= first["poisoned"] > 0


@pytest.mark.parametrize("level", DYNAMIC)
def test_an_overflow_of_all_ranks_is_one_skip(ranks: list[dict[Any, Any]], level: str) -> None:
    one = ranks[0][level, "AdamW", "all"]
    assert one["skips"] == one["poisoned"]
    assert one["scale"][0] == 2.0 ** (16 - one["poisoned"])
    steps = [value for (_, name), value in one["state"].items() if name == "step"]
    assert {int(step) for step in steps} == {20 - one["skips"]}


# --- what is said of it -------------------------------------------------------------------------------

SAID = ("Selected", "Gradient overflow", "Amp post-mortem")


def lines_of(run: Callable[[], None]) -> list[str]:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run()
    amp.close()
    return [line for line in printed.getvalue().splitlines() if line.startswith(SAID)]


def said(rank: int, ranks: int) -> dict[Any, Any]:
    last = ranks - 1
    group = dist.new_group(list(range(1, ranks)))

    def replicas(poisoned: Sequence[int], verbosity: int) -> None:
        model = MLP.model()
        optimizer = momentum_sgd(model.parameters())
        amp.initialize(model, optimizer, opt_level="O2", verbosity=verbosity)
        ddp = DistributedDataParallel(model)
        with amp.scale_loss(MLP.loss(ddp, MLP.batch(rank)), optimizer) as scaled_loss:
            scaled_loss.backward()
            if rank in poisoned:
                poison(model, math.inf)
        optimizer.step()

    def without_the_first() -> None:
        model = MLP.model()
        optimizer = momentum_sgd(model.parameters())
        amp.initialize(model, optimizer, opt_level="O2", process_group=group if rank > 0 else None)
        backward(MLP.loss(model, MLP.batch()), optimizer, overflow=rank == last)
        optimizer.step()

    return {
        "said, all": lines_of(lambda: replicas(range(ranks), 1)),
        "said, last": lines_of(lambda: replicas([last], 1)),
        "said, loud": lines_of(lambda: replicas(range(ranks), 2)),
        "said, silent": lines_of(lambda: replicas(range(ranks), 0)),
        "said, without the first": lines_of(without_the_first),
    }


def kinds(ranks: list[dict[Any, Any]], case: str) -> list[list[str]]:
    """Return for each rank the first word of each line."""
    return [[line.split()[0] if "Amp" not in line else line.split()[1] for line in one[case]] for one in ranks]


def test_what_all_ranks_would_say_is_said_by_the_first(ranks: list[dict[Any, Any]]) -> None:
    first, *others = kinds(ranks, "said, all")
    assert first == ["Selected", "Gradient", "post-mortem:"]
    assert others == [[]] * len(others)
    assert kinds(ranks, "said, silent") == [[]] * len(ranks)


def test_the_rank_with_the_culprit_names_it(ranks: list[dict[Any, Any]]) -> None:
    first, *between, last = kinds(ranks, "said, last")
    assert first == ["Selected", "Gradient", "post-mortem:"]
    assert between == [[]] * len(between)
    assert last == ["post-mortem:"]
    assert "elsewhere.  " in ranks[0]["said, last"][-1]
    assert "backward.  1 of 4 gradients are not finite: " in ranks[-1]["said, last"][-1]


def test_verbosity_2_has_all_ranks_say_it(ranks: list[dict[Any, Any]]) -> None:
    first, *others = kinds(ranks, "said, loud")
    assert first == ["Selected", "Gradient", "post-mortem:"]
    assert others == [["Gradient", "post-mortem:"]] * len(others)


def test_a_group_without_the_first_rank_has_a_first_of_its_own(ranks: list[dict[Any, Any]]) -> None:
    said_on = kinds(ranks, "said, without the first")
    assert said_on[0] == ["Selected"]
    assert said_on[1] == ["Gradient", "post-mortem:"]
    assert said_on[2:] == [["post-mortem:"]] * (len(ranks) - 2)  # whose gradient it was


# --- what it costs ------------------------------------------------------------------------------------


SCALES = [*((level, "default") for level in LEVELS), ("O0", "dynamic"), ("O5", "dynamic")]


def messages(rank: int) -> dict[Any, Any]:
    results: dict[Any, Any] = {}
    for level, scale in SCALES:
        model = MLP.model()
        optimizer = adamw(model.parameters())
        keywords = {} if scale == "default" else {"loss_scale": "dynamic"}
        amp.initialize(model, optimizer, opt_level=level, verbosity=0, **keywords)
        ddp = DistributedDataParallel(model)
        backward(MLP.loss(ddp, MLP.batch(rank)), optimizer)
        optimizer.step()
        with ExitStack() as counted:
            seen = Messages()
            with amp.scale_loss(MLP.loss(ddp, MLP.batch(rank)), optimizer) as scaled_loss:
                scaled_loss.backward()
                counted.enter_context(seen)
            asked = seen.asked
            amp.clip_grad_norm_(optimizer, 1.0)
            optimizer.step()
        results[level, scale] = seen.sent, asked
        del ddp
        amp.close()
    results["join"] = joined(rank)
    results["alone"] = without_wrapper(rank)
    return results


def joined(rank: int) -> tuple[int, list[Tensor]]:
    """Rank 1 has two batches more than the other, which is at its end meanwhile."""
    model = MLP.model()
    optimizer = momentum_sgd(model.parameters())
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    ddp = DistributedDataParallel(model)
    count = 2 + 2 * rank
    with ddp.join():
        for index in range(count):
            backward(MLP.loss(ddp, MLP.batch(index)), optimizer)
            optimizer.step()
            optimizer.zero_grad()
    result = count, masters(optimizer)
    del ddp
    amp.close()
    return result


def without_wrapper(rank: int) -> tuple[float, int]:
    """Ranks that train models of their own, of which one overflows, and leave `scale_loss` differently often."""
    model = MLP.model(rank)
    optimizer = momentum_sgd(model.parameters())
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    for index in range(2 + rank):
        backward(MLP.loss(model, MLP.batch(index)), optimizer, overflow=rank == 1 and index == 0)
        optimizer.step()
        optimizer.zero_grad()
    result = scaler_numbers()
    amp.close()
    return result


@pytest.fixture(scope="module")
def counted() -> list[dict[Any, Any]]:
    return on_ranks(messages, 2)


@pytest.mark.parametrize(("level", "scale"), SCALES)
def test_a_step_is_one_message_of_16_bytes_a_rank(counted: list[dict[Any, Any]], level: str, scale: str) -> None:
    decides = scale == "dynamic" or level in ("O1", "O2", "O4", "O5")
    for results in counted:
        sent, asked = results[level, scale]
        assert Counter(sent) == ({("c10d::allreduce_", 32): 1} if decides else {})
        # On a CPU the host reads this rank's own flag, which is there. It waits for no other rank.
        assert not decides or asked <= 1


def test_uneven_inputs_under_join_are_trained_to_their_end(counted: list[dict[Any, Any]]) -> None:
    assert [results["join"][0] for results in counted] == [2, 4]


def test_ranks_that_share_no_wrapper_decide_alone(counted: list[dict[Any, Any]]) -> None:
    assert [results["alone"] for results in counted] == [(65536.0, 2), (32768.0, 2)]
