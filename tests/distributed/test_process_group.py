"""`initialize(process_group=...)` takes only groups with this rank; LARC of shards is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from amp_engine import AmpStateError, AmpTypeError, AmpValueError, amp
from amp_engine.optimizers import LARC
from tests.models import MLP
from tests.support import left_alone, momentum_sgd


@pytest.mark.parametrize("wrong", ["WORLD", 0, [0, 1], True])
def test_what_is_no_group_is_refused(wrong: Any) -> None:
    model = MLP.model()
    optimizer = momentum_sgd(model.parameters())
    text = "Pass a group of torch.distributed with this rank, for example torch.distributed.group.WORLD"
    with left_alone(model, optimizer), pytest.raises(AmpTypeError, match=re.escape(text)):
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0, process_group=wrong)


def test_a_group_without_this_rank_is_refused() -> None:
    model = MLP.model()
    optimizer = momentum_sgd(model.parameters())
    nobody: Any = dist.GroupMember.NON_GROUP_MEMBER  # what new_group() gives to ranks that are not in it
    with left_alone(model, optimizer), pytest.raises(AmpValueError, match="a group that this rank is not in"):
        amp.initialize(model, optimizer, opt_level="O2", verbosity=0, process_group=nobody)


@pytest.mark.usefixtures("one_process_group")
def test_larc_of_shards_is_refused() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    model = fully_shard(MLP.model(), mesh=init_device_mesh("cpu", (1,)))
    optimizer = LARC(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(AmpStateError, match=r"LARC goes by the norm of each parameter.*Pass the SGD inside of it"):
        amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
