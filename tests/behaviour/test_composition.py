"""Models and optimizers put together as people do: wrapped after `initialize`, shared, tied, parametrized, nested."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_engine import AmpStateError, amp
from tests.models import MLP, NORMED_MLP
from tests.support import assert_bitwise

ROOT = Path(__file__).parents[2]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


# --- wrapped after initialize ---------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_model_is_traced_with_its_casts_and_scripted_after_close(level: str) -> None:
    model, (x, _) = NORMED_MLP.model().eval(), NORMED_MLP.batch()
    amp.initialize(model, opt_level=level, verbosity=0)
    with pytest.raises(AmpStateError, match=r"Call torch.jit.trace\(model, example_inputs\).*or amp.close\(\)"):
        torch.jit.script(model)
    assert_bitwise(torch.jit.trace(model, x)(x), model(x))
    amp.close()
    assert_bitwise(torch.jit.script(model)(x), model(x))


# --- called past the model ------------------------------------------------------------------------


class Parts(nn.Module):
    """Notes the type that its forward gets."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.GELU())
        self.norm = nn.BatchNorm1d(4)
        self.heads = nn.ModuleList([nn.Linear(4, 2)])
        self.got: torch.dtype | None = None

    def forward(self, x: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        self.got = x.dtype
        return {"y": self.heads[0](self.norm(self.encoder(x))) * scale}


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_every_hook_of_a_users_sees_the_types_outside_of_the_casts(level: str) -> None:
    seen: list[torch.dtype] = []

    def hook(model: nn.Module) -> None:
        model.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
        model.register_forward_hook(lambda _, args, output: seen.append(output["y"].dtype))

    model = Parts()
    hook(model)
    amp.initialize(model, opt_level=level, verbosity=0)
    hook(model)
    model(torch.randn(8, 4))
    assert seen == 4 * [torch.float32]


@pytest.mark.parametrize(("level", "casts"), [("O0", "everywhere"), ("O2", "everywhere"), ("O1", "model")])
def test_a_forward_that_was_kept_is_the_plain_one_after_close(level: str, casts: str) -> None:
    model, x = Parts().eval(), torch.randn(4, 4)
    amp.initialize(model, opt_level=level, casts=casts, verbosity=0)
    kept = [model.forward, model.encoder.forward]  # as Accelerate's hooks do
    amp.close()
    assert_bitwise([forward(x) for forward in kept], [model(x), model.encoder(x)])


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_the_class_a_model_gets_looks_like_its_own_which_close_gives_back(level: str) -> None:
    registered = []

    class Registering(Parts):
        def __init_subclass__(cls, **options: Any) -> None:
            registered.append(cls)

    model = Registering()
    before = dict(vars(model))
    amp.initialize(model, opt_level=level, verbosity=0)
    kind = type(model)
    assert isinstance(model, Registering)
    assert not registered
    assert (kind.__name__, kind.__qualname__, kind.__module__) == (
        Registering.__name__,
        Registering.__qualname__,
        Registering.__module__,
    )
    assert inspect.signature(model.forward) == inspect.signature(Parts().forward)
    assert inspect.getfullargspec(model.forward).args == ["self", "x", "scale"]
    amp.initialize(model, opt_level=level, verbosity=0)
    assert type(model) is kind
    amp.close()
    assert type(model) is Registering
    assert vars(model).keys() == before.keys()


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_what_a_forward_counts_on_its_class_by_name_is_there_after_close_as_the_limits_say(level: str) -> None:
    class Block(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Block.calls += 1
            return super().forward(x)

    limits = " ".join((ROOT / "docs/training_loop.md").read_text().partition("## Limits")[2].split())
    assert "what code wrote to `type(self)` meanwhile: for `type(self).calls += 1` write `Block.calls += 1`" in limits
    model = nn.Sequential(Block(4, 4), Block(4, 4))
    amp.initialize(model, opt_level=level, verbosity=0)
    model(torch.randn(2, 4))
    amp.close()
    assert Block.calls == model[0].calls == 2


# --- state_dict in all its forms ------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_state_dict_takes_a_prefix_and_a_destination(level: str) -> None:
    model = MLP.model()
    amp.initialize(model, sgd(model), opt_level=level, verbosity=0)
    destination: dict[str, Any] = {"mine": 1}
    assert model.state_dict(destination=destination, prefix="net.") is destination
    assert list(destination) == ["mine", "net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"]
    assert destination["net.0.weight"].dtype == torch.float32
    assert_bitwise(destination["net.0.weight"], model.state_dict()["0.weight"])


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_state_dict_with_keep_vars_gives_the_parameters_themselves(level: str) -> None:
    model = MLP.model()
    amp.initialize(model, sgd(model), opt_level=level, verbosity=0)
    assert model.state_dict(keep_vars=True)["0.weight"] is model[0].weight
