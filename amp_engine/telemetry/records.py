"""What a receipt says, section by section: frozen values of plain types, so that JSON holds them as they are.

Types are named as torch's, without `torch.`: "float16". Bytes are of this process, without torch's allocator.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Property:
    """One of the properties of a level.

    Attributes:
        name: the keyword of `initialize`.
        value: that counts.
        default: what the level alone would have decided.
    """

    name: str
    value: str
    default: str

    @property
    def is_override(self) -> bool:
        """Whether somebody decided otherwise than the level."""
        return self.value != self.default


@dataclass(frozen=True)
class Asked:
    """What `initialize` was asked for.

    Attributes:
        enabled: False: nothing was done.
        level: "O0" to "O5"; None if not enabled.
        brief: what the level is.
        properties: in the order in which `initialize` prints them.
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
        tensors, elements, bytes: how many; a tensor under two names counts once.
    """

    kind: str
    dtype: str
    tensors: int
    elements: int
    bytes: int


@dataclass(frozen=True)
class Kept:
    """Tensors of one module that a level leaves in a type of their own.

    Attributes:
        module: its name in the model; "" is the model itself.
        class_name: of the module.
        dtype: of the tensors; None: of all of them, at a level that casts functions and no weights.
        tensors, elements: how many.
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
    """One initialized model.

    Attributes:
        name: "" where there is one, else "models[0]" and so on.
        class_name: of the model.
        types: what it is made of.
        kept: what is not in half there, and why.
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
    """What is patched.

    Attributes:
        dtype: that functions on the list "half" run in; None: no function is cast.
        lists: name of a list and how many functions of this torch are on it.
        changes: what users added and took off, in words.
        ops: what ran in which type; None: no explanation was given.
        note: why there are no casts, or how to get `ops`; "" if there is nothing to say.
    """

    dtype: str | None
    lists: tuple[tuple[str, int], ...]
    changes: tuple[str, ...]
    ops: tuple[Op, ...] | None
    note: str


@dataclass(frozen=True)
class Shape:
    """A dimension of a matrix product in half that is no multiple of 8.

    Attributes:
        module: its name, behind that of the model where there are several.
        class_name: of the module.
        dimension: as the module's class calls it, such as "out_features".
        size: what it is.
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
        audited: how many modules compute matrix products in half.
        found: the dimensions to pad.
    """

    audited: int
    found: tuple[Shape, ...]


@dataclass(frozen=True)
class Memory:
    """What one class of tensors takes on one device.

    Attributes:
        kind: "parameters", "buffers", "FP32 masters", "remainders", "optimizer state", "weight copies", "gradients".
        device: "cpu", "cuda:0".
        tensors: how many.
        bytes: of all of them; of DTensors this rank's part. Memory that two have in common counts where it comes first.
    """

    kind: str
    device: str
    tensors: int
    bytes: int


@dataclass(frozen=True)
class ScalePoint:
    """As `history.Point`."""

    backward: int
    scale: float
    overflows: int


@dataclass(frozen=True)
class Loss:
    """One loss scaler.

    Attributes:
        loss_id: its number.
        dynamic: whether the scale moves.
        scale: that the next backward uses.
        backwards: how many were looked at since `initialize`, and
        overflows: how many of them had a gradient that is not finite. Both are 0 where nobody looks at gradients.
        history: where the scale moved or a backward overflowed; at most 1000 points, thinned.
    """

    loss_id: int
    dynamic: bool
    scale: float
    backwards: int
    overflows: int
    history: tuple[ScalePoint, ...]


@dataclass(frozen=True)
class Stepped:
    """One optimizer.

    Attributes:
        class_name: of the optimizer.
        weights: how many tensors it steps.
        by: "compiled kernels", "plain PyTorch kernels" or "its own class".
        why: the reason.
        masters: what its low-precision parameters are stepped through, in words; "" where there are none.
        steps: how many steps it was asked for since `initialize`, and
        skips: how many of them were skipped.
        skips_in_a_row: how many of the last ones were.
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
    """A part of the iterations that `amp.step_times()` has seen.

    Attributes:
        name: "backward", "scale_loss", "step" or "other".
        what: is in it.
        host_seconds: on the host.
        device_seconds: between the CUDA events around it; None without a GPU.
    """

    name: str
    what: str
    host_seconds: float
    device_seconds: float | None


@dataclass(frozen=True)
class Times:
    """Where the time of iterations went.

    Attributes:
        steps: how many `optimizer.step()` there were.
        phases: which add up to all of the time.
    """

    steps: int
    phases: tuple[Phase, ...]

    def share(self, phase: Phase) -> float:
        """Of the whole time, 0 to 1: on the device where that was measured, else on the host."""
        on_device = all(p.device_seconds is not None for p in self.phases)
        seconds = [(p.device_seconds or 0.0) if on_device else p.host_seconds for p in self.phases]
        return seconds[self.phases.index(phase)] / total if (total := sum(seconds)) > 0 else 0.0
