"""Inputs and outputs of a cast model: containers keep their types, floating tensors change theirs, the rest passes."""

from __future__ import annotations

import collections
import dataclasses
import threading
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from amp_engine import amp
from tests.support import WEIGHT_DTYPE

LEVELS = ("O0", "O2")  # that cast to FP32, and to half


class Point(NamedTuple):
    position: Tensor
    index: int


@dataclasses.dataclass
class Mutable:
    position: Tensor
    index: int = 1
    rank: int = dataclasses.field(default=0, init=False)
    posts: int = dataclasses.field(default=0, init=False)

    def __post_init__(self) -> None:
        self.posts += 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    position: Tensor
    index: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    position: Tensor
    index: int = 1


@dataclasses.dataclass
class Parent:
    inner: Frozen
    outer: list[Tensor]


class ModelOutput(collections.OrderedDict):
    """An output like those of Hugging Face's models: a mapping, a tuple and an object with attributes in one."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self.__dict__.update(fields)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        self.__dict__[key] = value

    def __getitem__(self, key: Any) -> Any:
        return tuple(self.values())[key] if isinstance(key, int) else super().__getitem__(key)


class Wanting(collections.OrderedDict):
    def __init__(self, key: str, value: Tensor) -> None:
        super().__init__({key: value})


class Around(collections.abc.MutableMapping):
    def __init__(self, items: dict[str, Any]) -> None:
        self._items = items

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._items[key] = value

    def __delitem__(self, key: str) -> None:
        del self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Unwritable(Around):
    def __setitem__(self, key: str, value: Any) -> None:
        raise NotImplementedError


class Pair(tuple):
    def __new__(cls, first: Tensor, second: Tensor) -> Pair:
        return super().__new__(cls, (first, second))


class Named(list):
    def __init__(self, name: str, items: list[Any]) -> None:
        super().__init__(items)
        self.name = name


class Deeper(Point):
    @property
    def next(self) -> int:
        return self.index + 1


@dataclasses.dataclass
class Child(Mutable):
    extra: Tensor | None = None


class Locked(collections.abc.Mapping):
    """Cannot be built anew."""

    def __init__(self, first: Tensor, *, key: str) -> None:
        self._first, self._key, self._lock = first, key, threading.Lock()

    def __getitem__(self, key: str) -> Any:
        return self._first

    def __iter__(self) -> Iterator[str]:
        return iter([self._key])

    def __len__(self) -> int:
        return 1


class MovedElsewhere:
    def to(self, *, where: str) -> MovedElsewhere:
        return self


class Batch:
    """A custom batch class: it is moved and cast by its own `to`."""

    def __init__(self, position: Tensor, note: str = "") -> None:
        self.position, self.note = position, note

    def to(self, dtype: torch.dtype) -> Batch:
        return Batch(self.position.to(dtype), self.note + "cast")


class Opaque:
    """Something that the engine knows nothing about."""


def floats(value: Any) -> Iterator[Tensor]:
    """The floating tensors anywhere inside."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, collections.abc.Mapping):
        for item in value.values():
            yield from floats(item)
    elif isinstance(value, PackedSequence):
        yield value.data
    elif isinstance(value, (list, tuple, collections.deque)):
        for item in value:
            yield from floats(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from floats(getattr(value, field.name))
    elif isinstance(value, Batch):
        yield value.position


class Passing(nn.Module):
    """Shows what arrives and gives it back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.arrived: Any = None

    def forward(self, value: Any) -> Any:
        self.arrived = value
        return value


def tensor(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(4, dtype=dtype).reshape(2, 2)


CONTAINERS: dict[str, Any] = {
    "tensor": tensor,
    "list": lambda: [tensor(), tensor()],
    "tuple": lambda: (tensor(), 1, "a"),
    "dict": lambda: {"a": tensor(), 2: tensor()},
    "ordered dict": lambda: collections.OrderedDict(a=tensor(), b=tensor()),
    "default dict": lambda: collections.defaultdict(list, a=tensor()),
    "namedtuple": lambda: Point(tensor(), 3),
    "dataclass": lambda: Mutable(tensor()),
    "frozen dataclass": lambda: Frozen(tensor(), 3),
    "slotted dataclass": lambda: Slotted(tensor(), 3),
    "nested dataclass": lambda: Parent(Frozen(tensor()), [tensor()]),
    "model output": lambda: ModelOutput(logits=tensor(), hidden=(tensor(), tensor())),
    "nested": lambda: {"a": [Point(tensor(), 1), (tensor(), {"b": Frozen(tensor())})]},
    "packed sequence": lambda: pack_padded_sequence(torch.ones(3, 2, 4), torch.tensor([3, 2])),
    "empty list": lambda: [],
    "deque": lambda: collections.deque([tensor()], maxlen=3),
    "proxy": lambda: types.MappingProxyType({"a": tensor(), "b": 1}),
    "user dict": lambda: collections.UserDict(a=tensor()),
    "ordered dict that wants arguments": lambda: Wanting("a", tensor()),
    "mapping around a dict": lambda: Around({"a": tensor()}),
    "mapping that cannot be written": lambda: Unwritable({"a": tensor()}),
    "chain map": lambda: collections.ChainMap({"a": tensor()}, {"b": tensor()}),
    "tuple that wants arguments": lambda: Pair(tensor(), tensor()),
    "list that wants arguments": lambda: Named("a", [tensor()]),
    "namedtuple of a subclass": lambda: Deeper(tensor(), 3),
    "dataclass of a subclass": lambda: Child(tensor()),
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", CONTAINERS)
def test_a_container_arrives_cast_with_its_type_and_leaves_in_float(name: str, level: str) -> None:
    model = Passing()
    amp.initialize(model, opt_level=level, verbosity=0)
    given = CONTAINERS[name]()
    left = model(given)
    assert type(model.arrived) is type(given)
    assert type(left) is type(given)
    assert {t.dtype for t in floats(model.arrived)} <= {WEIGHT_DTYPE[level]}
    assert {t.dtype for t in floats(left)} <= {torch.float32}
    assert len(list(floats(left))) == len(list(floats(given)))
    assert {t.dtype for t in floats(given)} <= {torch.float32}
    for ours, theirs in zip(floats(left), floats(given), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        2.5,
        "text",
        b"bytes",
        torch.float64,
        Opaque(),
        {1, 2},
        np.ones(3),
        torch.arange(3),
        torch.tensor([True]),
        torch.ones(2, dtype=torch.complex64),
        range(3),
        slice(1, 2),
        Opaque,
        ["a", None, 1],
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_holds_no_floating_tensor_passes_through(value: Any, level: str) -> None:
    model = Passing()
    amp.initialize(model, opt_level=level, verbosity=0)
    left = model(value)
    for passed in (model.arrived, left):
        assert type(passed) is type(value)
        if isinstance(value, list):
            assert passed == value
        else:
            assert passed is value


def test_a_batch_of_the_users_own_class_is_cast_by_its_own_to() -> None:
    model = Passing()
    amp.initialize(model, opt_level="O2", verbosity=0)
    given = Batch(tensor())
    left = model(given)
    assert isinstance(model.arrived, Batch)
    assert model.arrived.position.dtype == torch.float16
    assert model.arrived.note == "cast"
    assert left.position.dtype == torch.float32
    assert given.position.dtype == torch.float32
    given = Batch(tensor(torch.float16))
    model(given)
    assert model.arrived is given


def test_a_dataclass_keeps_fields_that_its_constructor_does_not_take() -> None:
    model = Passing()
    amp.initialize(model, opt_level="O2", verbosity=0)
    given = Mutable(tensor())
    given.rank = 7
    left = model(given)
    assert (left.rank, left.posts) == (7, 1)
    assert (given.rank, given.posts) == (7, 1)
    assert given.position.dtype == torch.float32


def test_a_tensor_of_the_right_type_passes_as_the_same_object() -> None:
    model = Passing()
    amp.initialize(model, opt_level="O0", verbosity=0)
    given = tensor()
    assert model(given) is given


# --- hooks ----------------------------------------------------------------------------------------


UNKNOWN: dict[str, Any] = {
    "set": lambda: {tensor()},
    "frozenset": lambda: frozenset([tensor()]),
    "generator": lambda: (tensor() for _ in range(2)),
    "object": Opaque,
    "mapping that cannot be built anew": lambda: Locked(tensor(), key="a"),
    "object with another `to`": MovedElsewhere,
}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", UNKNOWN)
def test_what_cannot_be_built_anew_passes_as_it_is(name: str, level: str) -> None:
    model = Passing()
    amp.initialize(model, opt_level=level, verbosity=0)
    given = UNKNOWN[name]()
    assert model(given) is given
    assert model.arrived is given
    assert name != "generator" or len(list(given)) == 2, "nobody has read it"


class OfAttrs:
    """A class like those of `@attrs.frozen`, which keep their fields in `__attrs_attrs__`."""

    __slots__ = ("index", "position")
    __attrs_attrs__ = (types.SimpleNamespace(name="position"), types.SimpleNamespace(name="index"))

    def __init__(self, position: Tensor, index: int = 1) -> None:
        object.__setattr__(self, "position", position)
        object.__setattr__(self, "index", index)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError("frozen")

    def __getstate__(self) -> tuple[Any, int]:
        return self.position, self.index

    def __setstate__(self, state: tuple[Any, int]) -> None:
        self.__init__(*state)  # type: ignore[misc]


class GivesPosition(nn.Module):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind
        self.layer = nn.Linear(3, 2)

    def forward(self, given: Any) -> Any:
        return self.kind(position=self.layer(given.position), index=given.index)


@pytest.mark.parametrize("kind", [types.SimpleNamespace, OfAttrs])
@pytest.mark.parametrize("level", LEVELS)
def test_namespaces_and_classes_of_attrs_are_cast_and_those_handed_in_stay(level: str, kind: Any) -> None:
    model = amp.initialize(GivesPosition(kind), opt_level=level, verbosity=0)
    given = kind(position=torch.ones(4, 3), index=3)
    position = given.position
    result = model(given)
    assert type(result) is kind
    assert (result.position.dtype, result.index) == (torch.float32, 3)
    assert given.position is position


# --- what a forward writes into its inputs -----------------------------------------------------------


class Record(dict):
    """Attributes are items: `__getattr__` raises KeyError for names that are no items."""

    __getattr__ = dict.__getitem__
    __setattr__ = dict.__setitem__


class Namespace(dict):
    """Attributes are items: one dictionary holds both."""

    def __init__(self, *args: Any, **items: Any) -> None:
        super().__init__(*args, **items)
        self.__dict__ = self


class Rows(Around):
    """Like a TensorDict: iterates over rows, not keys, and `to` gives a copy, even of what has the type."""

    def __iter__(self) -> Iterator[Any]:
        return iter(range(2))

    def keys(self) -> Any:
        return self._items.keys()

    def items(self) -> Any:
        return self._items.items()

    def values(self) -> Any:
        return self._items.values()

    def to(self, dtype: torch.dtype) -> Rows:
        return Rows({key: item.to(dtype) for key, item in self._items.items()})


class Writing(nn.Module):
    """Reads `x` of a batch, writes `y` and replaces `z`, takes `gone` out, and returns the batch."""

    def __init__(self, attributes: bool = False) -> None:
        super().__init__()
        self.layer, self.attributes = nn.Linear(2, 2), attributes

    def forward(self, batch: Any, also: Any = None) -> Any:
        x = batch.x if self.attributes else batch["x"]
        batch["y"] = self.layer(x)
        batch["z"] = batch["z"] + 1
        del batch["gone"]
        return batch if also is None else (batch, x)


def batch_of(kind: Any, dtype: torch.dtype) -> Any:
    names = ("x", "z", "gone")
    return kind({name: tensor(dtype) for name in names})


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", [dict, collections.UserDict, Around, Rows, Record, Namespace])
@pytest.mark.parametrize("dtype", [torch.float32, None])
@pytest.mark.parametrize("also", [None, 1])
def test_what_a_forward_writes_into_a_mapping_is_in_the_users(level: str, kind: Any, dtype: Any, also: Any) -> None:
    model = amp.initialize(Writing(), opt_level=level, verbosity=0)
    given = batch_of(kind, dtype or WEIGHT_DTYPE[level])
    x = given["x"]
    output = model(given) if also is None else model(given, also)[0]
    assert output is given
    assert given["x"] is x
    assert set(given.keys()) == {"x", "y", "z"}
    assert given["y"].dtype is given["z"].dtype is torch.float32
    torch.testing.assert_close(given["y"], model.layer(x.float()), rtol=0.01, atol=0.01)


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("kind", [Record, Namespace])
def test_a_dictionary_with_attributes_shows_the_cast_items_by_both(level: str, kind: Any) -> None:
    model = amp.initialize(Writing(attributes=True), opt_level=level, verbosity=0)
    given = batch_of(kind, torch.float32)
    model(given)
    assert given.y is given["y"]
    assert given.y.dtype is given.x.dtype is torch.float32


def test_a_mapping_within_a_mapping_is_written_too() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, batch: dict[str, Any]) -> Tensor:
            batch["inner"]["y"] = self.layer(batch["inner"]["x"])
            return batch["inner"]["y"]

    model = amp.initialize(Inner(), opt_level="O5", verbosity=0)
    inner = {"x": tensor()}
    given = {"inner": inner, "other": 1}
    model(given)
    assert given["inner"] is inner
    assert inner["y"].dtype is inner["x"].dtype is torch.float32


def test_a_compiled_model_writes_into_the_users_dictionary(dynamo: None) -> None:
    model = amp.initialize(Writing(), opt_level="O5", verbosity=0)
    given = batch_of(dict, torch.float32)
    with torch.no_grad():  # where torch 2.11 breaks the graph, at dictionaries, Dynamo looks at the `.grad` of results
        torch.compile(model, backend="eager")(given)
    assert given["y"].dtype is torch.float32


class Node:
    """Knows its parent, which knows it."""

    def __init__(self, x: Tensor, parent: Node | None = None) -> None:
        self.x, self.parent = x, parent
        self.child = None if parent else Node(x, self)

    def to(self, dtype: torch.dtype) -> Node:
        return Node(self.x.to(dtype))


class Proxy:
    """Has what the object inside has, its `to` too."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)


@pytest.mark.parametrize("make", [Node, lambda x: Proxy(Node(x))])
def test_objects_cast_themselves_that_refer_to_each_other_or_have_a_method_of_another(make: Any) -> None:
    model = amp.initialize(Passing(), opt_level="O5", verbosity=0)
    model(make(tensor()))
    assert model.arrived.x.dtype is torch.bfloat16
