"""The sections of a receipt as frozen records of plain types, which JSON can represent directly.

Types have torch's names without `torch.`: "float16". Bytes are those of this process.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Property:
    """A property of a level.

    Attributes:
        name: the keyword of `initialize`.
        value: the value in effect.
        default: the default of the level.
    """

    name: str
    value: str
    default: str

    @property
    def is_override(self) -> bool:
        """True if the value is not the default of the level."""
        return self.value != self.default


@dataclass(frozen=True)
class Asked:
    """The arguments of `initialize`.

    Attributes:
        enabled: False if amp does nothing.
        level: "O0" to "O5"; None if not enabled.
        brief: the level in a sentence.
        properties: the properties, in the order in which `initialize` prints them.
    """

    enabled: bool
    level: str | None
    brief: str
    properties: tuple[Property, ...]


@dataclass(frozen=True)
class Fact:
    """A line of `python -m amp_engine info`."""

    name: str
    value: str


@dataclass(frozen=True)
class OfType:
    """The tensors of one type in a model.

    Attributes:
        kind: "parameters" or "buffers".
        dtype: their type.
        tensors, elements, bytes: their numbers; a tensor with two names counts once.
    """

    kind: str
    dtype: str
    tensors: int
    elements: int
    bytes: int


@dataclass(frozen=True)
class Kept:
    """Tensors of one module that a level does not cast to half.

    Attributes:
        module: name of the module in the model; "" is the model itself.
        class_name: class of the module.
        dtype: type of the tensors; None if the level casts functions but no weights, and the whole module is kept.
        tensors, elements: their numbers.
        why: the reason.
    """

    module: str
    class_name: str
    dtype: str | None
    tensors: int
    elements: int
    why: str


@dataclass(frozen=True)
class Model:
    """An initialized model.

    Attributes:
        name: "" for a single model, else "models[0]" and so on.
        class_name: class of the model.
        types: types of its parameters and buffers.
        kept: its tensors that are not in half.
    """

    name: str
    class_name: str
    types: tuple[OfType, ...]
    kept: tuple[Kept, ...]


@dataclass(frozen=True)
class Op:
    """The calls of one function in one type, as `amp.explain()` counted them: see `casting.explain.Record`."""

    function: str
    listed: str
    dtype: str | None
    calls: int
    casts: int
    cached: int
    bytes_moved: int


@dataclass(frozen=True)
class Functions:
    """The patched functions.

    Attributes:
        dtype: type in which functions on the list "half" run; None if no function is cast.
        lists: the name of a list, and the number of functions of this torch on it.
        changes: the functions that users added and removed, in words.
        ops: calls by function and type; None if no explanation was given.
        note: why there are no casts, or how to get `ops`; "" if neither applies.
    """

    dtype: str | None
    lists: tuple[tuple[str, int], ...]
    changes: tuple[str, ...]
    ops: tuple[Op, ...] | None
    note: str


@dataclass(frozen=True)
class Shape:
    """A dimension of a matrix product in half that is not a multiple of 8.

    Attributes:
        module: name of the module, after the name of its model if there are several.
        class_name: class of the module.
        dimension: the name in the module's class, such as "out_features".
        size: size of the dimension.
        pad_to: the next multiple of 8.
    """

    module: str
    class_name: str
    dimension: str
    size: int
    pad_to: int


@dataclass(frozen=True)
class Shapes:
    """The audit of shapes for tensor cores.

    Attributes:
        audited: number of modules that compute matrix products in half.
        found: the dimensions to pad.
    """

    audited: int
    found: tuple[Shape, ...]


@dataclass(frozen=True)
class Memory:
    """The memory of one class of tensors on one device.

    Attributes:
        kind: "parameters", "buffers", "FP32 masters", "remainders of split masters", "optimizer state", "weight
            copies", "gradients".
        device: "cpu", "cuda:0".
        tensors: number of tensors.
        bytes: their bytes; for DTensors, this rank's part. Memory that two classes share counts in the first.
    """

    kind: str
    device: str
    tensors: int
    bytes: int


@dataclass(frozen=True)
class ScalePoint:
    """A point of a scale's history: see `history.Point`."""

    backward: int
    scale: float
    overflows: int


@dataclass(frozen=True)
class Overflows:
    """The overflows of one cause of `overflow_report`: their count, and the numbers of the newest backwards."""

    cause: str
    count: int
    backwards: tuple[int, ...]


@dataclass(frozen=True)
class Loss:
    """A loss scaler.

    Attributes:
        loss_id: its number.
        dynamic: True if the scale moves.
        scale: the scale of the next backward.
        backwards: number of checked backwards since `initialize`; 0 if gradients are not checked.
        overflows: number of checked backwards with a gradient that is not finite.
        history: the points where the scale moved or a backward overflowed, thinned to at most 1000.
        causes: this loss's overflows among the newest 1000 of all losses, the most frequent cause first.
        auto: True if the scale follows the largest gradient.
    """

    loss_id: int
    dynamic: bool
    scale: float
    backwards: int
    overflows: int
    history: tuple[ScalePoint, ...]
    causes: tuple[Overflows, ...] = ()  # older receipts lack it and `auto`
    auto: bool = False


@dataclass(frozen=True)
class Stepped:
    """An optimizer.

    Attributes:
        class_name: class of the optimizer.
        weights: number of the tensors that it steps.
        by: the code that steps it: "compiled kernels" or "its own class".
        why: the reason.
        masters: its masters and the type of its moments, in words; "" without masters and narrow moments.
        steps: number of calls of `step` since `initialize`.
        skips: number of skipped steps.
        skips_in_a_row: number of skipped steps since the last step that was taken.
    """

    class_name: str
    weights: int
    by: str
    why: str
    masters: str
    steps: int
    skips: int
    skips_in_a_row: int


@dataclass(frozen=True)
class Phase:
    """A part of the iterations that `amp.step_times()` measured.

    Attributes:
        name: "backward", "scale_loss", "step" or "other".
        what: its contents, in words.
        host_seconds: seconds on the host.
        device_seconds: seconds between the CUDA events around it; None without a GPU.
    """

    name: str
    what: str
    host_seconds: float
    device_seconds: float | None


@dataclass(frozen=True)
class Times:
    """The time of iterations, by phase.

    Attributes:
        steps: number of calls of `optimizer.step()`.
        phases: the phases, which add up to the whole time.
    """

    steps: int
    phases: tuple[Phase, ...]

    def share(self, phase: Phase) -> float:
        """The share of a phase, 0 to 1, in the device's time if it was measured, else in the host's."""
        on_device = all(p.device_seconds is not None for p in self.phases)
        seconds = [(p.device_seconds or 0.0) if on_device else p.host_seconds for p in self.phases]
        return seconds[self.phases.index(phase)] / total if (total := sum(seconds)) > 0 else 0.0
