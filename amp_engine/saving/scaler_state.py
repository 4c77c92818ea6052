"""Saved states of loss scalers: in our format, apex's, or that of torch's GradScaler. Loading takes all three.

Our entry is apex's with three more keys. apex's loader reads the two keys that it knows, and code that iterates over
the dictionary finds scalers only. Keys of entries survive `dict(...)`, JSON and torch.distributed.checkpoint, which an
attribute of the dictionary does not.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from amp_engine.errors import AmpIndexError, AmpStateError, AmpTypeError, AmpValueError
from amp_engine.levels.scale_rule import DynamicLossScale
from amp_engine.scaling.scaler import MEMORY, LossScaler

SCHEMA_VERSION = 2

ScalerFormat = Literal["amp", "apex", "torch"]

_SCALER_KEY = "loss_scaler"
_SCALE_WINDOW = 2000  # apex's, which its users could not change


class Growth(NamedTuple):
    """The numbers of a dynamic scale's rule that a GradScaler saves, under its names."""

    growth_factor: float = DynamicLossScale.growth_factor
    backoff_factor: float = DynamicLossScale.backoff_factor
    growth_interval: int = DynamicLossScale.growth_interval


class SavedScaler(NamedTuple):
    """One loss scaler, as it was saved.

    Attributes:
        loss_scale: finite, above 0.
        unskipped: clean backwards since the scale last changed; for a static scale, all clean backwards.
        dynamic: True if the scale was dynamic.
        opt_level: level of the run that saved the scaler; None if it was not saved.
        is_torchs: True if a GradScaler saved the scale, which grows without bounds.
        memory: the numbers of `LossScaler.memory`, for "auto" and hysteresis; empty for other scalers.
        growth: the rule of a dynamic scale; the defaults if it was not saved, as only a GradScaler saves it.
    """

    loss_scale: float
    unskipped: int
    dynamic: bool
    opt_level: str | None = None
    is_torchs: bool = False
    memory: Mapping[str, float] = MappingProxyType({})
    growth: Growth = Growth()

    def as_amp(self) -> dict[str, Any]:
        """Return an entry of `amp.state_dict()`."""
        more = {"dynamic": self.dynamic, "opt_level": self.opt_level, "version": SCHEMA_VERSION}
        return {**self.as_apex(), **more, **self.memory}

    def as_apex(self) -> dict[str, Any]:
        """Return the entry that apex would write."""
        return {"loss_scale": self.loss_scale, "unskipped": self.unskipped}

    def as_torch(self) -> dict[str, Any]:
        """Return a state for `GradScaler.load_state_dict`.

        A static scale becomes the state of a new GradScaler: a GradScaler has no static scale, and refuses the empty
        dictionary that a disabled one saves.
        """
        if not self.dynamic:
            return {"scale": DynamicLossScale.init_scale, **Growth()._asdict(), "_growth_tracker": 0}
        return {"scale": self.loss_scale, **self.growth._asdict(), "_growth_tracker": self.unskipped}


def pack_scalers(
    scalers: Sequence[LossScaler],
    opt_level: str | None,
    destination: OrderedDict[str, Any] | None,
    scaler_format: ScalerFormat,
) -> OrderedDict[str, Any]:
    """Return `{"loss_scaler0": {...}, ...}`, in `destination` if given. Waits for the device for each dynamic scaler.

    Raises AmpValueError for an unknown format, and for several scalers in torch's format, which holds one.
    """
    _check_format(scaler_format)
    converted = _written([(i, _saved(scaler, opt_level)) for i, scaler in enumerate(scalers)], scaler_format)
    if destination is None:
        return converted
    destination.update(converted)
    return destination


def _saved(scaler: LossScaler, opt_level: str | None) -> SavedScaler:
    """Read a scaler. Waits for the device if it is dynamic."""
    state = scaler.state_dict()
    loss_scale = float(state["loss_scale"])
    _check_scale(loss_scale)
    return SavedScaler(
        loss_scale,
        int(state["unskipped"]),
        scaler.dynamic,
        opt_level,
        memory=scaler.memory(),
        growth=Growth(scaler.scale_factor, scaler.backoff_factor, scaler._scale_seq_len),
    )


def convert_state_dict(
    state_dict: Mapping[str, Any], scaler_format: ScalerFormat, loss_id: int | None = None
) -> OrderedDict[str, Any]:
    """Convert a state that `amp.state_dict()`, apex or a GradScaler saved. Needs no engine; no host sync.

    Args:
        state_dict: a state in any of the three formats.
        scaler_format: "amp"; "apex", two numbers per loss, which do not tell if the scale is dynamic; "torch", for
            `torch.amp.GradScaler.load_state_dict`, where a static scale becomes one that starts at 2**16. The rule of
            growth is that of a saved GradScaler, and else the default, as other entries do not tell it.
        loss_id: number of the scaler, for "torch" if there are several.

    Raises AmpTypeError, AmpValueError, AmpStateError or AmpIndexError for another dictionary, an unknown format, or, in
    torch's format, several scalers or a wrong `loss_id`.
    """
    _check_format(scaler_format)
    entries, unexpected = _read(state_dict)
    _refuse(unexpected)
    return _written(entries, scaler_format, loss_id)


def _check_format(scaler_format: str) -> None:
    if scaler_format not in ("amp", "apex", "torch"):
        raise AmpValueError(
            f'format={scaler_format!r} is none of "amp", "apex" and "torch".  Use "torch" for '
            'torch.amp.GradScaler, "apex" for NVIDIA\'s apex.'
        )


def _written(
    entries: Sequence[tuple[int, SavedScaler]], scaler_format: ScalerFormat, loss_id: int | None = None
) -> OrderedDict[str, Any]:
    """Return saved scalers, paired with their indices, in a format."""
    if scaler_format != "torch":
        form = SavedScaler.as_amp if scaler_format == "amp" else SavedScaler.as_apex
        return OrderedDict((f"{_SCALER_KEY}{i}", form(saved)) for i, saved in entries)
    if not entries and loss_id is None:
        return OrderedDict()  # of a disabled GradScaler too
    if loss_id is None and len(entries) > 1:
        raise AmpValueError(
            f"A GradScaler holds one loss scale, and there are {len(entries)}.  Use for example "
            'amp.convert_state_dict(amp.state_dict(), "torch", loss_id=0).'
        )
    found = dict(entries).get(entries[0][0] if loss_id is None else loss_id)
    if found is None:
        raise AmpIndexError(f"loss_id={loss_id!r}, but saved are loss_id {', '.join(str(i) for i, _ in entries)}.")
    return OrderedDict(found.as_torch())


def unpack_scalers(scalers: Sequence[LossScaler], state_dict: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Load a state that `pack_scalers`, apex or a GradScaler wrote: by name if the names are ours, else by order.

    A static scaler keeps its scale. A dynamic scaler takes a saved dynamic scale; if the saved scale is static, it
    restarts. Every scaler takes the scale of a GradScaler's dictionary, which has one scale for all losses.

    Reports, through `say`, entries without a scaler, scalers without an entry, and scales that are not taken. Raises,
    before anything is loaded, AmpTypeError if `state_dict` is no dictionary, AmpValueError for a malformed entry, and
    AmpStateError for an entry of a newer version; after loading the others, AmpStateError for keys of no loss scaler.
    """
    entries, unexpected = _read(state_dict)
    if _is_torchs(state_dict):
        entries = [(i, entries[0][1]) for i in range(len(scalers))]
    elif not state_dict:  # of amp or of a GradScaler that is not enabled
        if any(scaler.dynamic for scaler in scalers):
            say("Warning: the state_dict is empty, saved while amp or GradScaler was off: the loss scale starts anew")
    elif len(state_dict) != len(scalers):
        say(f"Warning: state_dict contains {len(state_dict)} entries, while {len(scalers)} loss_scalers are used")
    for index, saved in entries:
        if index >= len(scalers):
            say(f"Skipping loss_scaler[{index}], since num_losses was set to {len(scalers)}")
            break
        _load(scalers[index], saved, f"{_SCALER_KEY}{index}", say)
    _refuse(unexpected)


def _load(scaler: LossScaler, saved: SavedScaler, name: str, say: Callable[[str], None]) -> None:
    if scaler.dynamic and saved.dynamic:
        # Our scale is not clamped, so that a resume is bitwise: a script may have set a scale beyond the bounds.
        scale = scaler.bounded(saved.loss_scale) if saved.is_torchs else saved.loss_scale
        scaler.load_state_dict({"loss_scale": scale, "unskipped": saved.unskipped})
        scaler.remember(saved.memory)
    elif scaler.dynamic:
        scaler.restart()
        say(f"{name} was saved from a static loss scale: a dynamic scale starts at {scaler.loss_scale()}")
    elif saved.dynamic:
        say(f"{name} was saved from a dynamic loss scale: a static scale stays as it is")
    else:
        own = scaler.loss_scale()
        if saved.loss_scale != own:
            say(
                f"{name} was saved from a static loss scale of {saved.loss_scale}: {own}, as initialize was told, stays"
            )
        scaler.load_state_dict({"loss_scale": own, "unskipped": saved.unskipped})


def _read(state_dict: object) -> tuple[list[tuple[int, SavedScaler]], list[str]]:
    """Return pairs of a scaler's index and its saved state, lowest index first, and the keys of no scaler."""
    if not isinstance(state_dict, Mapping):
        raise AmpTypeError(
            f"amp.load_state_dict() takes what amp.state_dict() returned, not a {type(state_dict).__name__}."
        )
    if _is_torchs(state_dict):
        return [(0, _read_torchs(state_dict))], []
    entries = {key: value for key, value in state_dict.items() if _SCALER_KEY in str(key)}
    read = [(index, _read_entry(entry)) for index, entry in _by_name_or_order(entries)]
    return read, [str(key) for key in state_dict if key not in entries]


def _read_entry(entry: Any) -> SavedScaler:
    """Read one scaler of any format."""
    if _is_torchs(entry):
        return _read_torchs(entry)
    try:
        loss_scale, unskipped = float(entry["loss_scale"]), int(entry["unskipped"])
        version = int(entry.get("version", 1))
    except (AttributeError, KeyError, TypeError, ValueError) as e:
        raise AmpValueError(
            f'A loss scaler\'s state is {{"loss_scale": float, "unskipped": int}}, not {entry!r}.'
        ) from e
    _check_scale(loss_scale)
    if version > SCHEMA_VERSION:
        raise AmpStateError(
            f"A loss scaler was saved in version {version} of the format, by a newer amp_engine; this one knows up to "
            f"{SCHEMA_VERSION}.  Install that version, or save with amp.state_dict(format='apex')."
        )
    level = entry.get("opt_level")
    dynamic = entry.get("dynamic")
    if dynamic is None:
        dynamic = _was_dynamic(loss_scale, unskipped)
    memory = _read_memory(entry)
    return SavedScaler(loss_scale, unskipped, bool(dynamic), None if level is None else str(level), memory=memory)


def _read_memory(entry: Mapping[str, Any]) -> dict[str, float]:
    try:
        memory = {name: float(entry[name]) for name in MEMORY if name in entry}
    except (TypeError, ValueError) as e:
        raise AmpValueError(f"A loss scaler's {', '.join(MEMORY)} are numbers, in {entry!r}.") from e
    if not all(0.0 <= value < math.inf for value in memory.values()):
        raise AmpValueError(f"A loss scaler's {', '.join(MEMORY)} are finite numbers from 0 on, in {entry!r}.")
    return memory


def _was_dynamic(loss_scale: float, unskipped: int) -> bool:
    """True if an entry without the key "dynamic" is of a dynamic scaler."""
    # The entry is apex's. apex's dynamic scale begins at 2**16 and changes by factors of 2, and its count ends at the
    # window. A scale of 1 is nearly always the static one of O0 and O3. If it was dynamic, the restarted scale skips 16
    # steps until it is 1 again; continuing with 1 could lose small gradients for 32,000 steps.
    return loss_scale != 1.0 and math.frexp(loss_scale)[0] == 0.5 and unskipped < _SCALE_WINDOW


def _is_torchs(state: object) -> bool:
    return isinstance(state, Mapping) and "scale" in state and "_growth_tracker" in state


def _read_torchs(state: Mapping[str, Any]) -> SavedScaler:
    try:
        loss_scale, unskipped = float(state["scale"]), int(state["_growth_tracker"])
        numbers = {**Growth()._asdict(), **state}
        growth = Growth(
            float(numbers["growth_factor"]), float(numbers["backoff_factor"]), int(numbers["growth_interval"])
        )
    except (TypeError, ValueError, OverflowError) as e:
        raise AmpValueError(
            f'A GradScaler\'s state is {{"scale": float, "_growth_tracker": int, ...}}, not {dict(state)!r}.'
        ) from e
    if "loss_scale" in state:  # of amp.GradScaler, whose other keys say more
        own = {key: value for key, value in state.items() if key not in ("scale", "_growth_tracker")}
        return _read_entry(own)._replace(growth=growth)
    _check_scale(loss_scale)
    return SavedScaler(loss_scale, unskipped, dynamic=True, is_torchs=True, growth=growth)


def _check_scale(loss_scale: float) -> None:
    if not 0.0 < loss_scale < math.inf:
        raise AmpValueError(
            f"A saved loss_scale is {loss_scale!r}, and not a positive finite number.  Leave out "
            "amp.load_state_dict() to start at the first scale again."
        )


def _refuse(unexpected: Sequence[str]) -> None:
    if unexpected:
        keys = ", ".join(f'"{key}"' for key in unexpected)
        raise AmpStateError(f"Error(s) in loading state_dict. Unexpected key(s) in state_dict: {keys}. ")


def _by_name_or_order(entries: Mapping[str, Any]) -> list[tuple[int, Any]]:
    """Return pairs of a scaler's index and its entry, lowest index first."""
    names = [str(key).removeprefix(_SCALER_KEY) for key in entries]
    if all(name.isdecimal() for name in names) and len(set(names)) == len(names):
        return sorted(zip(map(int, names), entries.values(), strict=True), key=itemgetter(0))
    return list(enumerate(entries.values()))
