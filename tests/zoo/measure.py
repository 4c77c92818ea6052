"""What is measured of one architecture: as loaded in bfloat16, built in FP32, and one training step."""

from __future__ import annotations

import copy
import math
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from amp_engine import amp
from tests.zoo.architectures import Model

SEEDS = (1, 2, 3)
LEVELS = {"O5": torch.bfloat16, "O2": torch.float16}


def row_of(model: Model) -> dict[str, Any]:
    """All that the table says of a model. An error is measured as well: its text is in the place of the numbers."""
    return {
        "class": type(model.module).__name__,
        "plan": model.plan,
        "parameters": sum(parameter.numel() for parameter in model.module.parameters()),
        "as_loaded": or_error(as_loaded, model),
        "errors": or_error(errors, model),
        "training": {level: or_error(training_step, model, level) for level in LEVELS},
        "buffers": list(buffers(model.module)),
    }


def or_error(measure: Callable[..., Any], *args: Any) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return measure(*args)
    except Exception as error:
        return {"error": text_of(error)}
    finally:
        amp.close()


def text_of(error: BaseException) -> str:
    """Its type, its first line, and the place of it in the model's code."""
    frames = traceback.extract_tb(error.__traceback__)
    frame = next((frame for frame in reversed(frames) if "/modeling_" in frame.filename), frames[-1])
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first[:200]} ({frame.filename.rpartition('/')[2]}:{frame.lineno})"


def as_loaded(model: Model) -> dict[str, Any]:
    """Outputs of the model as loaded in bfloat16 against those at O5, and the dtypes of its state."""
    module = model.load(torch.bfloat16).eval()
    try:
        inputs, taken = _inputs_as_taken(module, model.inputs(SEEDS[0]))
    except Exception as error:
        return {"loaded": text_of(error)}
    expected = outputs(module, inputs)
    repeated = outputs(module, inputs)
    dtypes, saved = _dtypes(module), {name: tensor.dtype for name, tensor in module.state_dict().items()}

    initialize(module, "O5")
    found = {
        "taken": taken,
        "fp32": [name for name, dtype in dtypes.items() if dtype is torch.float32],
        "cast": {name: str(now)[6:] for name, now in _dtypes(module).items() if now is not dtypes[name]},
        "exported": [
            name for name, tensor in amp.export_state_dict(module).items() if tensor.dtype is not saved.get(name)
        ],
        "repeats": all(_equal(tensor, repeated[name]) for name, tensor in expected.items()),
    }
    given = inputs if taken == "float32" else _cast(inputs, torch.float32)
    actual = outputs(module, given)
    differences = {name: _difference(tensor, actual[name]) for name, tensor in expected.items()}
    different = {name: value for name, value in differences.items() if value}
    return {**found, "outputs": len(expected), "different": different, "equal": bool(expected) and not different}


def _inputs_as_taken(module: nn.Module, inputs: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """The inputs in bfloat16 if the model takes them so, or in FP32. Raises what the model raised for bfloat16."""
    half = _cast(inputs, torch.bfloat16)
    try:
        outputs(module, half)
        return half, "bfloat16" if _floating(inputs) else ""
    except Exception:
        try:
            outputs(module, inputs)
            return inputs, "float32"
        except Exception:
            pass
        raise


def errors(model: Model) -> dict[str, Any]:
    """Relative errors of the outputs at O5 and O2 against FP32, beside autocast's and those in pure half."""
    module = copy.deepcopy(model.module)  # a forward may keep tensors in attributes
    reference = [outputs(module, model.inputs(seed)) for seed in SEEDS]
    found: dict[str, Any] = {}
    for level, dtype in LEVELS.items():
        found[level] = or_error(_error_at, model, level, reference)
        found[f"autocast {level}"] = or_error(_error_under_autocast, model, dtype, reference)
        found[f"half {level}"] = or_error(_error_in_half, model, dtype, reference)
    return found


def _error_at(model: Model, level: str, reference: list[dict[str, Tensor]]) -> dict[str, float]:
    module = copy.deepcopy(model.module)
    initialize(module, level)
    return relative_error([outputs(module, model.inputs(seed)) for seed in SEEDS], reference)


def _error_under_autocast(model: Model, dtype: torch.dtype, reference: list[dict[str, Tensor]]) -> dict[str, float]:
    module = copy.deepcopy(model.module)
    with torch.autocast("cpu", dtype=dtype):
        return relative_error([outputs(module, model.inputs(seed)) for seed in SEEDS], reference)


def _error_in_half(model: Model, dtype: torch.dtype, reference: list[dict[str, Tensor]]) -> dict[str, float]:
    """Of the model with its parameters, but for batch norms, and its inputs in half, and with FP32 buffers."""
    module = copy.deepcopy(model.module)
    for part in module.modules():
        if not isinstance(part, nn.modules.batchnorm._BatchNorm):
            for parameter in part.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)
    return relative_error([outputs(module, _cast(model.inputs(seed), dtype)) for seed in SEEDS], reference)


def relative_error(actual: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> dict[str, float]:
    """|actual - expected| / |expected|: the root mean square over outputs and inputs, and the median of rows.

    Where a choice flips, as that of an expert, few rows have a large error; the median does not see them.
    """
    squares, rows = [], []
    for one, other in zip(actual, expected, strict=True):
        for name, tensor in other.items():
            if not tensor.is_floating_point() or tensor.numel() < 2:
                continue
            if one[name].shape != tensor.shape:
                return {"rms": math.nan, "median": math.nan}
            finite = tensor.isfinite()
            difference = torch.where(finite, one[name].double() - tensor.double(), 0.0)
            size = torch.where(finite, tensor.double(), 0.0)
            if not size.any():
                continue
            squares.append(float(difference.square().sum() / size.square().sum()))
            last = tensor.shape[-1]
            rows.append(difference.reshape(-1, last).norm(dim=-1) / size.reshape(-1, last).norm(dim=-1))
    return {"rms": math.sqrt(sum(squares) / len(squares)), "median": float(torch.cat(rows).nanmedian())}


def training_step(model: Model, level: str) -> dict[str, Any]:
    """One step: whether all gradients are finite, at a loss scale at which they are."""
    module = copy.deepcopy(model.module).train()
    optimizer = initialize(module, level)
    skips = 0
    while True:
        torch.manual_seed(0)
        loss = loss_of(module, model.inputs(SEEDS[0]))
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        before = amp.get_scale()
        optimizer.step()
        skipped = bool(amp.get_scale() < before)
        optimizer.zero_grad()
        skips += skipped
        if not skipped or skips == 12:
            break
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    return {
        "loss": float(loss.detach()),
        "skips": skips,
        "finite": all(bool(weight.isfinite().all()) for weight in weights),
    }


def loss_of(module: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """The model's own loss, or the mean of the squares of its floating outputs."""
    found = module(**inputs)
    loss = getattr(found, "loss", None)
    if isinstance(loss, Tensor) and loss.requires_grad:
        return loss.float().mean()
    tensors = [tensor for _, tensor in walk(found) if tensor.is_floating_point() and tensor.requires_grad]
    return sum(tensor.float().square().mean() for tensor in tensors[:1])


def initialize(module: nn.Module, level: str) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-4)
    amp.initialize(module, optimizer, opt_level=level, verbosity=0)
    return optimizer


def buffers(module: nn.Module) -> Iterator[dict[str, Any]]:
    """The floating buffers of modules that are not torch's own."""
    for prefix, part in module.named_modules():
        if type(part).__module__.startswith("torch."):
            continue
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                yield {
                    "name": f"{prefix}.{name}".lstrip("."),
                    "class": type(part).__name__,
                    "dtype": str(buffer.dtype)[6:],
                    "shape": list(buffer.shape),
                    "persistent": name not in part._non_persistent_buffers_set,
                    "bfloat16": _equal(buffer.bfloat16().to(buffer.dtype), buffer),
                    "float16": _equal(buffer.half().to(buffer.dtype), buffer),
                }


def outputs(module: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors that the model returns, by their names; what it draws, it draws from the same seed."""
    torch.manual_seed(0)
    with torch.no_grad():
        return {name: tensor.detach().clone() for name, tensor in walk(module(**inputs))}


def walk(found: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Each tensor in what a forward returned, with its name."""
    if isinstance(found, Tensor):
        yield name, found
    elif isinstance(found, Mapping):
        for key, value in found.items():
            yield from walk(value, f"{name}.{key}".lstrip("."))
    elif isinstance(found, (tuple, list)):
        for place, value in enumerate(found):
            yield from walk(value, f"{name}.{place}".lstrip("."))
    elif hasattr(found, "__dataclass_fields__"):
        yield from walk(vars(found), name)


def _dtypes(module: nn.Module) -> dict[str, torch.dtype]:
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name: tensor.dtype for name, tensor in tensors if tensor.is_floating_point()}


def _cast(inputs: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The inputs in a dtype, but for a time step, which a pipeline gives in FP32."""
    return {
        name: value.to(dtype) if _is_floating(value) and name != "timestep" else value for name, value in inputs.items()
    }


def _floating(inputs: dict[str, Any]) -> list[str]:
    return [name for name, value in inputs.items() if _is_floating(value)]


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and not _difference(one, other)


def _difference(expected: Tensor, actual: Tensor) -> float:
    """The largest difference, relative to the largest element; infinite where one is not a number or shapes differ."""
    if expected.shape != actual.shape:
        return math.inf
    if not expected.is_floating_point():
        return float(not torch.equal(expected, actual))
    one, other = expected.double(), actual.double()
    if torch.equal(torch.nan_to_num(one, 0.123), torch.nan_to_num(other, 0.123)):
        return 0.0
    difference = (one - other).abs().nan_to_num(math.inf, math.inf)
    finite = one[one.isfinite()].abs()
    difference = difference[~(one == other) & ~(one.isnan() & other.isnan())]
    return float(difference.max() / finite.max().clamp_min(1e-30)) if len(finite) and len(difference) else math.inf
