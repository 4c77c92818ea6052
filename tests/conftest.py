"""Fixtures of the whole suite: every test starts seeded and leaves torch as it found it."""

from __future__ import annotations

import gc
import random
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch._dynamo  # imported here, since torch imports it late and then replaces `torch.manual_seed` itself
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.nn.modules import rnn
from torch.optim import optimizer as optimizer_hooks

from amp_engine import kernels
from amp_engine.casting.patch_torch import install
from amp_engine.errors import AmpStateError
from amp_engine.stepping.step import remove_unused
from tests.cases import TOGETHER, chosen

NAMESPACES = {
    "torch": torch,
    "torch.nn.functional": F,
    "torch.linalg": torch.linalg,
    "torch.Tensor": torch.Tensor,
    "torch._C": torch._C,
    "torch._C.TensorBase": torch._C.TensorBase,
    "torch._library.fake_impl": torch._library.fake_impl,
    "torch.nn.modules.rnn": rnn,
    "torch.nn.Module": torch.nn.Module,
    "torch.optim.Optimizer": torch.optim.Optimizer,
}
# But for names that Python itself writes; to a class it writes one, `__slotnames__`, on the first copy or pickle.
PRISTINE = {
    name: {key: value for key, value in vars(namespace).items() if isinstance(namespace, type) or key[:2] != "__"}
    for name, namespace in NAMESPACES.items()
}
GLOBAL_HOOKS = (
    module_hooks._global_forward_hooks,
    module_hooks._global_forward_pre_hooks,
    module_hooks._global_backward_hooks,
    module_hooks._global_module_registration_hooks,
    module_hooks._global_parameter_registration_hooks,
    optimizer_hooks._global_optimizer_pre_hooks,
    optimizer_hooks._global_optimizer_post_hooks,
)

# Autograd starts a thread for each device that the first backward of a process finds, and with such threads torch
# refuses a backward in a fork. `torch.compile` registers a pretended CUDA device where torch was built for CUDA and
# finds none: with this backward before it, no test that forks depends on the tests before it.
torch.ones((), requires_grad=True).backward()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cases",
        choices=("all", *TOGETHER),
        default="all",
        help="of each test run all cases; few that have each pair of values of two parameters, or each value; or one",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Few cases of what `-k` and `-m` leave; files with slow tests first: no worker has one alone at the end."""
    if (together := TOGETHER.get(config.getoption("--cases"))) is not None:
        every, items[:] = list(items), chosen(items, together)
        config.hook.pytest_deselected(items=list(set(every) - set(items)))
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """Freeze imported objects, which are no garbage: walks through all objects of the process then skip them."""
    gc.collect()
    gc.freeze()


@contextmanager
def skipped_where_steps_are_refused() -> Iterator[None]:
    """Where no kernels compute, skip a test that is refused what needs them; tests of the refusal expect it."""
    try:
        yield
    except AmpStateError as error:
        if "needs compiled kernels" not in str(error) or kernels.has_native(torch.device("cpu")):
            raise
        pytest.skip(str(error))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, object, object]:
    with skipped_where_steps_are_refused():
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    with skipped_where_steps_are_refused():
        return (yield)


def patched_names() -> list[str]:
    """The names of torch that hold another object than when the suite started, and those new on its classes.

    New names in a module are not counted: importing a submodule adds one.
    """
    changed = []
    for label, namespace in NAMESPACES.items():
        before, now = PRISTINE[label], vars(namespace)
        if isinstance(namespace, type):
            changed += [f"{label}.{name}" for name in now if name not in before and name != "__slotnames__"]
        changed += [f"{label}.{name}" for name, value in before.items() if now.get(name) is not value]
    return changed


@pytest.fixture(autouse=True)
def pristine_torch() -> Iterator[None]:
    """Seeds before the test; afterwards undoes amp and asserts that torch is as it was."""
    from amp_engine import amp

    torch.set_num_threads(1)  # tiny models gain nothing from more, and lose tenfold on a busy machine
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` takes milliseconds for devices that are not there
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)
    np.random.seed(0)
    random.seed(0)
    computes = dict.fromkeys(("amx_bf16", "amx_fp16", "bf16", "asimdhp"), True)
    with pytest.MonkeyPatch.context() as patch:  # no test is told that this CPU emulates a type, unless it asks
        patch.setattr("amp_engine.ground.dtypes.cpu_flags", lambda: computes)
        yield
    amp.close()
    amp._amp_state.hard_override = False
    amp._amp_state.allow_incoming_model_not_fp32 = False
    amp._amp_state.verbosity = 1
    left = patched_names()
    if left:
        install(None)  # the next test starts without them
    assert left == []
    if any(GLOBAL_HOOKS):
        gc.collect()
        remove_unused()  # an engine that was dropped without close() leaves its hook to the next one
    assert not any(GLOBAL_HOOKS)
    assert torch.backends.mha.get_fastpath_enabled()
    assert torch.is_grad_enabled()
    assert (torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()) == (torch.bfloat16, True)


@pytest.fixture
def one_process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    gc.collect()  # models before their group: https://github.com/pytorch/pytorch/issues/56297
    dist.destroy_process_group()
    # DTensor's cache, of this thread, has the group. A child that another thread forks frees it, and waits for threads.
    getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()


@pytest.fixture
def dynamo() -> Iterator[None]:
    """torch.compile tags nn.Module for good; this takes the tags off."""
    before = dict(vars(nn.Module))
    yield
    torch.compiler.reset()
    for name, value in dict(vars(nn.Module)).items():
        if name not in before:
            delattr(nn.Module, name)
        elif value is not before[name]:
            setattr(nn.Module, name, before[name])
