"""`amp.watch_gradients()`: statistics of each gradient, computed on its device and read only on request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from amp_engine.engine import Engine
from amp_engine.errors import AmpStateError, AmpTypeError, AmpValueError
from amp_engine.ground.devices import HostNumbers, is_capturing
from amp_engine.stepping.backward import Backward
from amp_engine.stepping.rows import Rows
from amp_engine.tools.diagnosis.post_mortem import place_of
from amp_engine.tools.diagnosis.recorder import places_in
from amp_engine.tools.page.page import Page, Paged, Sentence, Table, Verbatim
from amp_engine.tools.telemetry.closed_gradients import ClosedGradient, closed_gradients
from amp_engine.tools.telemetry.wording import number, percent, scale

KEPT = 100
"""The records of this many watched backwards are kept, the newest."""


@dataclass(frozen=True)
class GradientRecord:
    """One parameter's gradient after one backward.

    Attributes:
        backward: the number of the backward since the `with` was entered, from 1.
        loss_scale: the scale of the loss.
        parameter: name of the parameter in the model.
        elements: number of values.
        largest: largest magnitude, without the loss scale; not finite if a value is not finite.
        norm: 2-norm without the loss scale, before any clipping.
        zeros: share, 0 to 1, of values that are 0, including those that a half type lost during the backward.
        flushed: share that a half type would make 0 at the loss scale: 0 < |scale * g| < half of its smallest number.
            0 for gradients that are already in half.
        subnormal: share that is not 0 and, at the loss scale, keeps fewer bits than a half type has, or none.
        nonfinite: number of values that are inf or NaN.
    """

    backward: int
    loss_scale: float
    parameter: str
    elements: int
    largest: float
    norm: float
    zeros: float
    flushed: float
    subnormal: float
    nonfinite: int


class _Noted(NamedTuple):
    """The scale and six numbers of each gradient of one backward on one device, in transfer to the host."""

    backward: int
    names: list[str]
    elements: list[int]
    numbers: HostNumbers


class GradientWatch(Paged):
    """Records statistics of the gradients of every n-th backward in `with amp.watch_gradients(every=100) as watch:`.

        with amp.watch_gradients(every=100) as watch:
            train()
        print(watch)                      # the newest backward, a line for each parameter
        for record in watch.records: ...

    If the check of `scale_loss` reads the gradients, norm and largest magnitude come from it; the shares take some
    passes over the gradients. All numbers stay on the device until they are read, and other backwards cost nothing. If
    there are several backwards before a step, a record describes the sum so far. No host sync before `records` is read.
    Backwards that a CUDA graph captures are left out.

    Args:
        every: watch every n-th backward, beginning with the first.
        dtype: the type whose limits decide `flushed` and `subnormal`. Default: the type that the level computes in; at
            O0 float16.

    Raises AmpTypeError or AmpValueError for other arguments, AmpStateError if another watch is active.
    """

    def __init__(self, engine: Engine, every: int = 100, dtype: torch.dtype | None = None) -> None:
        if isinstance(every, bool) or not isinstance(every, int):
            raise AmpTypeError(f"every is a number of backwards, not a {type(every).__name__}.  Use every=100.")
        if every < 1:
            raise AmpValueError(f"every={every}: expected 1 or more backwards.  Use every=1 for each of them.")
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise AmpTypeError(f"dtype is a floating torch.dtype, not {dtype!r}.  Use torch.float16.")
        self._engine = engine
        self._every = every
        self._dtype = dtype
        self._count = 0
        self._noted: deque[_Noted] = deque(maxlen=KEPT)
        self._unsubscribe: Callable[[], None] = lambda: None

    def __enter__(self) -> GradientWatch:
        closed = self._engine.records.events.closed
        if any(isinstance(getattr(observer, "__self__", None), GradientWatch) for observer in closed.observers):
            raise AmpStateError("amp.watch_gradients() is watching already.  Leave its `with` before the next one.")
        self._count = 0
        self._noted.clear()
        self._unsubscribe = closed.subscribe(self._look)
        return self

    def __exit__(self, *error: object) -> None:
        self._unsubscribe()
        self._unsubscribe = lambda: None  # the subscription's refers to this object

    @property
    def records(self) -> list[GradientRecord]:
        """Records of the newest 100 watched backwards, oldest first. Waits for the device."""
        return [record for noted in self._noted for record in self._read(noted)]

    def _page(self) -> Page:
        """The newest backward, sorted by the share of zeros and subnormals."""
        if not self._noted:
            return Page.of(
                Verbatim("No gradient was looked at.  Run a backward in amp.scale_loss inside of the `with`.")
            )
        last = self._noted[-1].backward
        newest = [record for noted in self._noted if noted.backward == last for record in self._read(noted)]
        rows = [
            (
                r.parameter,
                number(r.elements),
                f"{r.largest:.3g}",
                f"{r.norm:.3g}",
                percent(r.zeros),
                percent(r.flushed),
                percent(r.subnormal),
            )
            for r in sorted(newest, key=lambda r: -(r.zeros + r.subnormal))
        ]
        first = Sentence(f"backward {last}, loss scale {scale(newest[-1].loss_scale)}")
        return Page.of(first, Table(rows, _HEAD, numbers=range(1, len(_HEAD))))

    def _limits(self) -> tuple[float, float]:
        """Half of the smallest number of the half type, and its smallest normal number."""
        policy = self._engine.policy
        info = torch.finfo(self._dtype or (policy and policy.low_precision) or torch.float16)
        return info.tiny * info.eps / 2, info.tiny

    def _look(self, rows: Sequence[Rows], backward: Backward | None) -> None:
        """Compute the numbers of a backward, if it is an n-th one."""
        self._count += 1
        if (self._count - 1) % self._every:
            return
        by_device: dict[torch.device, list[ClosedGradient]] = {}
        for one in closed_gradients(rows):
            if not is_capturing(one.values.device):
                by_device.setdefault(one.values.device, []).append(one)
        flush, normal = self._limits()
        places = places_in(self._engine._initialized.models)
        for device, gradients in by_device.items():
            loss_scale = torch.ones((), dtype=torch.float32, device=device)
            if backward is not None:
                loss_scale = backward.snapshot.scale.to(device, non_blocking=True)
            numbers = [loss_scale.double()]
            for one in gradients:
                numbers += _six(one, loss_scale, flush, normal)
            names = [place_of(one.param, places).parameter for one in gradients]
            elements = [one.values.numel() for one in gradients]
            self._noted.append(_Noted(self._count, names, elements, HostNumbers(torch.stack(numbers))))

    @staticmethod
    def _read(noted: _Noted) -> list[GradientRecord]:
        read = noted.numbers.read
        loss_scale = read(0)
        records = []
        for i, (name, elements) in enumerate(zip(noted.names, noted.elements, strict=True)):
            zeros, flushed, subnormal, nonfinite, squares, largest = (read(1 + 6 * i + place) for place in range(6))
            total = max(1, elements)
            records.append(
                GradientRecord(
                    backward=noted.backward,
                    loss_scale=loss_scale,
                    parameter=name,
                    elements=elements,
                    largest=largest / loss_scale,
                    norm=squares**0.5 / loss_scale,
                    zeros=zeros / total,
                    flushed=flushed / total,
                    subnormal=subnormal / total,
                    nonfinite=int(nonfinite),
                )
            )
        return records


_HEAD = ("parameter", "elements", "largest", "norm", "zeros", "flushed", "subnormal")


@torch.no_grad()
def _six(one: ClosedGradient, loss_scale: Tensor, flush: float, normal: float) -> list[Tensor]:
    """The six numbers of one gradient at the loss scale: float64, shape [], on its device."""
    magnitudes = (one.values.float() * loss_scale).abs()
    is_zero = magnitudes == 0
    is_small = magnitudes < flush
    counts = [is_zero.sum(), (is_small & ~is_zero).sum(), ((magnitudes < normal) & ~is_zero).sum()]
    counts.append((~one.values.isfinite()).sum())
    wide = magnitudes.double()
    largest = wide.max() if wide.numel() else wide.new_zeros(())
    return [*(count.double() for count in counts), wide.square().sum(), largest]


def watch_gradients(engine: Engine, every: int = 100, dtype: torch.dtype | None = None) -> GradientWatch:  # noqa: D103
    return GradientWatch(engine, every, dtype)


watch_gradients.__doc__ = GradientWatch.__doc__
