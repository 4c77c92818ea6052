"""The modules of apex.amp, as scripts import them, and the lists of functions that they edit."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import amp_engine
from amp_engine import Policy, amp
from amp_engine import apex as apex_package
from amp_engine.apex import amp as apex_amp
from amp_engine.errors import AmpStateError
from amp_engine.ground import containers
from amp_engine.levels.levels import LEVELS
from tests.models import MLP


def module(name: str) -> ModuleType:
    return importlib.import_module(f"amp_engine.apex.amp{name}")


PUBLIC = (
    "init",
    "half_function",
    "float_function",
    "promote_function",
    "register_half_function",
    "register_float_function",
    "register_promote_function",
    "scale_loss",
    "disable_casts",
    "initialize",
    "state_dict",
    "load_state_dict",
    "master_params",
)


def test_the_package_and_its_module_amp_have_the_functions_of_the_engine() -> None:
    functions = {name: getattr(amp, name) for name in PUBLIC}
    for place in ("", ".amp"):  # timm asks for them in __dict__
        assert {name: vars(module(place)).get(name) for name in PUBLIC} == functions, place


PARTS = {
    ".frontend": ("initialize", "state_dict", "load_state_dict", "Properties", "opt_levels"),
    "._initialize": ("applier",),
    ".handle": ("scale_loss", "disable_casts", "AmpHandle", "NoOpHandle"),
    ".scaler": ("LossScaler",),
    "._process_optimizer": ("AmpOptimizerState",),
    "._amp_state": ("AmpState", "_amp_state", "warn_or_err", "maybe_print", "master_params"),
    ".rnn_compat": ("has_old_rnns",),
    ".compat": ("filter_attrs",),
    ".utils": ("is_fp_tensor",),
    ".__version__": ("__version__",),
    ".lists.torch_overrides": ("MODULE", "FP16_FUNCS", "FP32_FUNCS", "CASTS"),
    ".lists.functional_overrides": ("MODULE", "FP16_FUNCS", "FP32_FUNCS", "CASTS"),
    ".lists.tensor_overrides": ("MODULE", "FP16_FUNCS", "FP32_FUNCS", "CASTS"),
}


def test_the_submodules_have_what_scripts_import_from_them() -> None:
    assert [f"{part}.{name}" for part in PARTS for name in PARTS[part] if not hasattr(module(part), name)] == []


def test_a_submodule_can_be_the_first_import_and_is_one_module_under_both_names() -> None:
    code = f"""if True:
        import amp_engine.apex.install
        import apex.amp.lists.torch_overrides, importlib.util, sys
        for part in {list(PARTS)}:
            assert importlib.util.find_spec("apex.amp" + part).name == "amp_engine.apex.amp" + part
            assert sys.modules["apex.amp" + part] is sys.modules["amp_engine.apex.amp" + part], part
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_state_is_an_object_as_an_attribute_and_a_module_as_an_import() -> None:
    state_module = module("._amp_state")
    assert isinstance(state_module, ModuleType)
    assert apex_amp._amp_state is state_module._amp_state is amp._amp_state
    assert isinstance(apex_amp._amp_state, state_module.AmpState)


def test_the_submodules_are_attributes_after_import_apex_alone() -> None:
    assert apex_package.amp is apex_amp
    assert apex_amp.lists.torch_overrides.MODULE is torch
    assert apex_amp.lists.tensor_overrides.MODULE is torch.Tensor
    assert apex_amp.rnn_compat.has_old_rnns() is False
    assert apex_amp.__version__.__version__ == amp_engine.__version__


def test_classes_are_those_of_the_objects_that_scripts_meet() -> None:
    model = MLP.model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    assert isinstance(optimizer._amp_stash, module("._process_optimizer").AmpOptimizerState)
    assert isinstance(amp._amp_state.loss_scalers[0], module(".scaler").LossScaler)
    assert isinstance(amp._amp_state.handle, module(".handle").AmpHandle)
    assert isinstance(amp._amp_state.opt_properties, module(".frontend").Properties)


# --- messages by the rules of the state ------------------------------------------------------------


def test_warn_or_err_raises_until_hard_override(capsys: pytest.CaptureFixture[str]) -> None:
    state = module("._amp_state")
    with pytest.raises(RuntimeError, match="^no good$"):
        state.warn_or_err("no good")
    state._amp_state.hard_override = True
    state.warn_or_err("no good")
    assert capsys.readouterr().out == "Warning:  no good\n"


def test_maybe_print_follows_the_verbosity(capsys: pytest.CaptureFixture[str]) -> None:
    state = module("._amp_state")
    state.maybe_print("heard")
    state._amp_state.verbosity = 0
    state.maybe_print("unheard")
    assert capsys.readouterr().out == "heard\n"


# --- properties and levels -------------------------------------------------------------------------

BEFORE = {
    "enabled": False,
    "opt_level": None,
    "cast_model_type": None,
    "patch_torch_functions": False,
    "keep_batchnorm_fp32": None,
    "master_weights": None,
    "loss_scale": 1.0,
}


def test_new_properties_are_those_before_initialize() -> None:
    properties = module(".frontend").Properties()
    assert list(properties.options.items()) == list(BEFORE.items())
    assert {name: getattr(properties, name) for name in BEFORE} == BEFORE


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_called_on_properties_sets_them_all_and_returns_them(level: str) -> None:
    frontend = module(".frontend")
    properties = frontend.Properties()
    assert frontend.opt_levels[level](properties) is properties
    assert dict(properties.options) == LEVELS[level].properties()
    assert frontend.opt_levels[level].brief.startswith(f"{level}:  ")


def test_properties_are_set_by_attribute_and_are_judged_as_overrides_are() -> None:
    frontend = module(".frontend")
    properties = frontend.opt_levels["O2"](frontend.Properties())
    properties.loss_scale = "128.0"
    properties.keep_batchnorm_fp32 = "False"
    properties.cast_model_type = None
    assert (properties.loss_scale, properties.keep_batchnorm_fp32, properties.cast_model_type) == (128.0, False, None)
    with pytest.raises(RuntimeError, match="should only be set by selecting opt_level='O1'"):
        properties.patch_torch_functions = True
    with pytest.raises(AmpStateError, match="There is no property 'speed'"):
        properties.speed = 2
    assert properties.options["patch_torch_functions"] is False
    with pytest.raises(AttributeError, match="'Properties' object has no attribute 'speed'"):
        properties.speed  # noqa: B018


def test_two_sets_of_properties_have_nothing_in_common_with_each_other_or_the_engine() -> None:
    frontend = module(".frontend")
    amp.initialize(MLP.model(), opt_level="O2", verbosity=0)
    one, other = frontend.Properties(), frontend.opt_levels["O3"](frontend.Properties())
    assert (one.opt_level, other.opt_level, amp._amp_state.opt_properties.opt_level) == (None, "O3", "O2")
    assert Policy() == amp_engine.levels.levels.DISABLED


# --- containers ------------------------------------------------------------------------------------


class Pair(NamedTuple):
    left: Tensor
    right: Any


def test_applier_reaches_every_tensor_and_keeps_the_containers() -> None:
    applier: Callable[..., Any] = module("._initialize").applier
    one = torch.ones(2)
    value = {"a": [one, 3], "b": Pair(one, "text"), "c": (one, None)}
    result = applier(value, lambda t: t * 2)
    assert isinstance(result["b"], Pair)
    assert [t.tolist() for t in (result["a"][0], result["b"].left, result["c"][0])] == [[2, 2]] * 3
    assert (result["a"][1], result["b"].right, result["c"][1]) == (3, "text", None)
    assert value["a"][0] is one
    assert containers.map_tensors(value, lambda t: t) is value


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (torch.ones(1), True),
        (torch.ones(1, dtype=torch.float64), True),
        (torch.ones(1, dtype=torch.int64), False),
        ([torch.ones(1), (torch.ones(1),)], True),
        ([torch.ones(1), torch.ones(1, dtype=torch.int64)], False),
        ([], True),
        (1.0, False),
    ],
)
def test_is_fp_tensor_looks_into_lists(value: Any, expected: bool) -> None:
    assert module(".utils").is_fp_tensor(value) is expected


# --- lists -----------------------------------------------------------------------------------------

HALF = torch.ones(3, dtype=torch.float16)


def types_of_softmax() -> list[torch.dtype]:
    return [F.softmax(HALF, -1).dtype, F.softmax(HALF.float(), -1).dtype]


def test_the_lists_say_what_is_cast() -> None:
    torch_lists = module(".lists.torch_overrides")
    assert "matmul" in torch_lists.FP16_FUNCS
    assert "exp" in torch_lists.FP32_FUNCS
    assert "cat" in torch_lists.CASTS
    assert "softmax" in module(".lists.functional_overrides").FP32_FUNCS
    assert "__matmul__" in module(".lists.tensor_overrides").FP16_FUNCS
    for part in ("torch", "functional", "tensor"):
        lists = module(f".lists.{part}_overrides")
        names = [*lists.FP16_FUNCS, *lists.FP32_FUNCS, *lists.CASTS]
        assert len(set(names)) == len(names)
        assert all(hasattr(lists.MODULE, name) for name in names)


@pytest.mark.parametrize("when", ["before initialize", "after initialize"])
def test_a_function_that_is_moved_between_lists_is_cast_as_the_new_one_says(when: str) -> None:
    """The Tacotron 2 family moves functions so, at the top of the script."""
    lists = module(".lists.functional_overrides")
    if when == "after initialize":
        amp.initialize(MLP.model(), opt_level="O1", verbosity=0)
    lists.FP32_FUNCS.remove("softmax")
    lists.FP16_FUNCS.append("softmax")
    if when == "before initialize":
        amp.initialize(MLP.model(), opt_level="O1", verbosity=0)
    assert types_of_softmax() == [torch.float16, torch.float16]
    assert "softmax" in lists.FP16_FUNCS
    assert "softmax" not in lists.FP32_FUNCS
    amp.close()
    assert "softmax" in lists.FP32_FUNCS
    assert "softmax" not in lists.FP16_FUNCS


def test_a_function_that_is_taken_off_its_list_runs_in_the_type_of_its_input() -> None:
    lists = module(".lists.functional_overrides")
    lists.FP32_FUNCS.remove("softmax")
    amp.initialize(MLP.model(), opt_level="O1", verbosity=0)
    assert types_of_softmax() == [torch.float16, torch.float32]
    lists.FP32_FUNCS += ["softmax"]
    assert types_of_softmax() == [torch.float32, torch.float32]


def test_a_list_edits_as_a_list_does() -> None:
    lists = module(".lists.torch_overrides")
    with pytest.raises(ValueError, match="^$"):
        lists.FP16_FUNCS.remove("exp")
    with pytest.raises(ValueError, match="No function named nonsense"):
        lists.FP16_FUNCS.append("nonsense")
    before = list(lists.FP16_FUNCS)
    lists.FP16_FUNCS.append("relu")
    assert lists.FP16_FUNCS[-1] == "relu"
    assert lists.FP16_FUNCS.pop() == "relu"
    assert list(lists.FP16_FUNCS) == before
    lists.FP32_FUNCS[lists.FP32_FUNCS.index("exp")] = "relu"
    assert "exp" not in lists.FP32_FUNCS
    assert "relu" in lists.FP32_FUNCS


def test_a_registration_shows_in_the_list() -> None:
    amp.register_half_function(torch, "sigmoid")
    lists = module(".lists.torch_overrides")
    assert "sigmoid" in lists.FP16_FUNCS
    lists.FP16_FUNCS.remove("sigmoid")
    amp.initialize(MLP.model(), opt_level="O1", verbosity=0)
    assert torch.sigmoid(torch.ones(1)).dtype == torch.float32
