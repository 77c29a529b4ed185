"""What Python reads of a step inside a graph is compared in each step of the graph."""

from __future__ import annotations

import copy
import ctypes
import math
import re
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum
from functools import cached_property, lru_cache, partial
from itertools import count
from operator import itemgetter
from random import Random
from threading import local
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary, ref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from piecegraph import (
    Batch,
    ForwardContext,
    break_graph,
    get_forward_context,
    prepare,
)
from piecegraph.errors import (
    AllCapturesFailed,
    MovedTensor,
    OutsideStep,
    ReadNotKept,
    StaleContext,
)
from piecegraph.runtime.capture.op_log import line_of_difference, ops_of
from piecegraph.runtime.parts.checks.step_reads import StepReads
from piecegraph.torch_compat.basics.tensors import without_modes

from ..conftest import Computes, captured, right_step, small_config

SMALL = {"most": 4, "compile": False, "capture_sizes": (2,)}


class Inner:
    def __init__(self, scale):
        self.scale = scale


class Pair(NamedTuple):
    tensor: Tensor
    number: float


@dataclass
class Metadata:
    """Holds the same number in each way in which an engine may hold it."""

    scale: float
    by_name: dict[str, Any] = field(init=False)
    inner: Inner = field(init=False)
    values: list[float] = field(init=False)
    layers: list[Inner] = field(init=False)
    array: np.ndarray[Any, Any] = field(init=False)
    mixed: list[Any] = field(init=False)
    pair: Pair = field(init=False)
    bound: int = 0
    graph_constants = ("bound",)

    def __post_init__(self):
        self.by_name, self.inner = {"scale": self.scale}, Inner(self.scale)
        self.values, self.layers = [self.scale], [Inner(self.scale)]
        self.array = np.array([self.scale])
        self.mixed = [torch.ones(1), (self.scale, torch.ones(1))]
        self.pair = Pair(torch.ones(1), self.scale)

    def method(self):
        return self.inner.scale

    @property
    def computed(self):
        return self.scale


READS: dict[str, Callable[[Any], float]] = {
    "metadata.inner.scale": lambda m: m.method(),
    "metadata.scale": lambda m: m.computed,
    "metadata.by_name['scale']": lambda m: m.by_name.get("scale"),
    "metadata.values[0]": lambda m: m.values[0],
    "metadata.layers[0].scale": lambda m: m.layers[0].scale,
    "metadata.array.tobytes()": lambda m: float(m.array[0]),
    "metadata.mixed[1][0]": lambda m: m.mixed[1][0],
    "metadata.pair[1]": lambda m: m.pair.number,
}


@break_graph
def doubled(x: Tensor) -> None:
    x.mul_(getattr(get_forward_context().metadata, "scale", 1.0))


class Model(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.read = read
        self.one = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, x):
        try:
            y = x * self.read(get_forward_context().metadata)
        except OutsideStep:  # the form of the result is found outside of steps
            y = x * 1.0
        doubled(y)
        return y + self.one


def prepared_for(read, mode, device="cpu", layers=None, metadata=None):
    config = small_config(**SMALL, graph_mode=mode)
    prepared = prepare(Model(read).to(device), config, layers=layers)
    prepared.capture(lambda descriptor, mode: metadata or Metadata(2.0))
    return prepared


def step(prepared, metadata, device="cpu"):
    rows: Tensor = prepared(torch.ones(2, 4, device=device), batch=Batch(2, 2), metadata=metadata)
    return rows


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("path", READS)
def test_a_changed_value_is_an_error_that_names_it(path, device):
    prepared = prepared_for(READS[path], "PIECEWISE", device)
    assert step(prepared, Metadata(2.0), device).unique().tolist() == [5.0]
    with pytest.raises(StaleContext) as caught:
        step(prepared, Metadata(3.0), device)
    assert f"read {path} of" in str(caught.value)
    assert caught.value.where.startswith(__file__)


@pytest.mark.parametrize("device", DEVICES)
def test_an_object_that_the_engine_changes_in_place(device):
    prepared, metadata = prepared_for(READS["metadata.scale"], "FULL", device), Metadata(2.0)
    assert step(prepared, metadata, device).unique().tolist() == [5.0]
    metadata.scale = 3.0
    with pytest.raises(StaleContext, match=r"2\.0, and 3\.0 in this step"):
        step(prepared, metadata, device)
    metadata.scale = 2.0
    assert step(prepared, metadata, device).unique().tolist() == [5.0]


def test_an_attribute_of_a_layer_that_changes():
    layer = Inner(2.0)
    read = READS["metadata.scale"]
    prepared = prepared_for(
        lambda m: read(m) * get_forward_context().layers["a"].scale, "FULL", layers={"a": layer}
    )
    assert step(prepared, Metadata(2.0)).unique().tolist() == [9.0]
    layer.scale = 3.0
    with pytest.raises(StaleContext, match=r"read layers\['a'\]\.scale .* 2\.0, and 3\.0"):
        step(prepared, Metadata(2.0))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.calls, self.impl, self._by_name = 2.0, 0, Inner(1.0), {"k": 1.0}
        self.unread = 1.0
        self.register_buffer("weight", torch.ones(2))

    def read(self):
        self.calls += 1
        self.impl.calls = getattr(self.impl, "calls", 0) + 1
        self._by_name["calls"] = self._by_name.get("calls", 0) + 1
        return self.scale * self.impl.scale * self._by_name["k"] * self.weight.dim()


CHANGES_OF_A_MODULE: dict[str, Callable[[Any], object]] = {
    "scale": lambda layer: setattr(layer, "scale", 3.0),
    "impl.scale": lambda layer: setattr(layer.impl, "scale", 3.0),
    "_by_name": lambda layer: layer._by_name.update(k=3.0),
    "impl": lambda layer: setattr(layer, "impl", Slots(1, 2)),
}


@pytest.mark.parametrize("change", CHANGES_OF_A_MODULE)
def test_an_attribute_of_a_module_among_layers_that_changes(change):
    """What its own code counts is no change, nor is what was not read."""
    layer: Any = Scaled()
    read = READS["metadata.scale"]
    prepared = prepared_for(
        lambda m: read(m) * get_forward_context().layers["a"].read(), "FULL", layers={"a": layer}
    )
    for _ in range(2):
        assert step(prepared, Metadata(2.0)).unique().tolist() == [9.0]
        layer.read()
        layer.unread += 1
    CHANGES_OF_A_MODULE[change](layer)
    with pytest.raises(StaleContext, match=rf"read layers\['a'\]\.{change}"):
        step(prepared, Metadata(2.0))


IN_MODULES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], object]]] = {
    "another module": (len, lambda m: m.append(nn.ReLU())),
    "a hook": (lambda m: m(torch.ones(4)), lambda m: m.register_forward_hook(lambda *_: None)),
    "of one in a row": (lambda m: [each.scale for each in m], lambda m: setattr(m[0], "scale", 2)),
    "a parameter": (lambda m: len(list(m.parameters())), lambda m: m.append(nn.Linear(4, 4))),
}


@pytest.mark.parametrize("change", IN_MODULES)
def test_what_a_module_among_layers_holds_is_compared(change):
    read, changes = IN_MODULES[change]
    module: Any = nn.Sequential(nn.Linear(4, 4))
    module[0].scale = 1
    context, reads = ForwardContext({"a": module}), StepReads()
    reads.watch(context)
    reads.open()
    read(context.layers["a"])
    reads.close()
    reads.finish()
    reads.check(ForwardContext({"a": module}))
    changes(module)
    with pytest.raises(StaleContext, match=r"layers\['a'\]"):
        reads.check(ForwardContext({"a": module}))


def test_what_splitting_ops_read_and_what_is_declared_may_change():
    prepared = prepared_for(lambda m: 1.0 + m.bound, "PIECEWISE")
    changed = Metadata(4.0)
    changed.bound = 7
    assert step(prepared, Metadata(3.0)).unique().tolist() == [4.0]
    assert step(prepared, changed).unique().tolist() == [5.0]


def test_real_tokens_are_those_of_the_capture_only_without_padding():
    prepared = prepared_for(lambda m: get_forward_context().num_tokens, "PIECEWISE")
    assert step(prepared, Metadata(1.0)).unique().tolist() == [3.0]
    with pytest.raises(StaleContext, match="num_tokens"):
        prepared(torch.ones(1, 4), batch=Batch(1, 1), metadata=Metadata(1.0))


def test_a_form_of_metadata_that_lacks_the_value_is_an_error():
    prepared = prepared_for(READS["metadata.inner.scale"], "FULL")
    with pytest.raises(StaleContext, match="no attribute 'inner'"):
        step(prepared, Inner(2.0))


def test_the_event_of_a_capture_lists_what_it_read():
    prepared = prepared_for(READS["metadata.inner.scale"], "PIECEWISE")
    (event,) = prepared.events.named("capture.recorded")
    classes = {"metadata": "Metadata", "metadata.inner": "Inner"}
    reads = event.facts["python_reads"]
    (read,) = [each for each in reads.items() if each[0] not in classes]
    assert all(f"{classes[path]!r} at {__file__}" in reads[path] for path in classes)
    assert read[0] == "metadata.inner.scale"
    assert f"2.0 at {__file__}" in read[1]


class Slots:
    __slots__ = ("a", "b")

    def __init__(self, a, b):
        self.a, self.b = a, b


@dataclass
class Record:
    a: Any
    b: Any


class Named(NamedTuple):
    a: Any
    b: Any


LEAVES = st.sampled_from([0, 1, True, 1.0, "x", None, (1, 2), torch.float32])
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.dictionaries(st.sampled_from(["a", "b", 3, torch.int8]), inner, max_size=3),
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.lists(inner, max_size=3).map(deque),
        st.dictionaries(st.sampled_from("ab"), inner).map(OrderedDict),
        *(st.builds(kind, a=inner, b=inner) for kind in (SimpleNamespace, Slots, Record, Named)),
    ),
    max_leaves=8,
)


def parts(tree):
    if isinstance(tree, dict):
        return dict(tree)
    if isinstance(tree, list | tuple | deque) and not isinstance(tree, Named):
        return dict(enumerate(tree))
    return {name: getattr(tree, name) for name in ("a", "b") if hasattr(tree, name)}


def with_part(tree, key, part):
    """A copy of `tree` with another part, or without the part (`...`)."""
    changed = {k: v for k, v in {**parts(tree), key: part}.items() if v is not ...}
    if isinstance(tree, dict):
        return type(tree)(changed)
    if isinstance(tree, SimpleNamespace):
        return SimpleNamespace(**changed)
    if isinstance(tree, Slots | Record | Named):
        return type(tree)(**{"a": None, "b": None, **changed})
    return type(tree)(changed.values())


def changed(tree, draw):
    """`tree` with one part of any depth another, one more, or one fewer."""
    if not parts(tree) or draw(st.integers(0, 3)) == 0:
        return draw(TREES)
    key = draw(st.sampled_from([*parts(tree), "a"]))
    if isinstance(tree, list | tuple | deque) and not isinstance(tree, Named) and key == "a":
        return with_part(tree, len(tree), 1)
    part = parts(tree).get(key)
    return with_part(tree, key, draw(st.sampled_from([..., changed(part, draw)])))


def read(tree, choices):
    """What some reads of `tree`, in ways in which engines read metadata, give."""
    seen: list[Any] = []
    for choice in choices:
        match choice % 6, tree:
            case 0, _ if choice > 5:
                seen.append((type(tree) is dict, type(tree) is SimpleNamespace))
            case 0, _:
                seen.append(isinstance(tree, dict | Record))
            case 1, dict():
                seen.append(("a" in tree, len(tree), list(tree)))
            case 2, dict():
                tree = {**tree} if choice > 5 else copy.copy(tree)
            case _, dict():
                tree = tree.get("a" if choice % 2 else torch.int8, 7)
            case 1, list() | tuple() | deque():
                seen.append(len(tree))
            case _, list() | tuple() | deque() if tree:
                tree = tree[choice % len(tree)]
            case 1, SimpleNamespace() | Slots() | Record():
                seen.append(hasattr(tree, "b"))
            case 2, SimpleNamespace() | Slots() | Record():
                tree = copy.copy(tree)
            case 3, SimpleNamespace() | Record():
                tree = vars(tree).get("b")
            case _, SimpleNamespace() | Slots() | Record():
                tree = getattr(tree, "a", None)
            case _ if tree is None or isinstance(tree, int | float | str | torch.dtype):
                seen.append((type(tree), tree))
    return seen


def noted(read, metadata, whole=False):
    context, reads = ForwardContext({}, metadata=metadata), StepReads()
    reads.kept.whole = whole
    reads.watch(context)
    with reads.reads(set()):
        reads.open()
        read(context.metadata)
        reads.close()
    reads.finish()
    return reads


@given(TREES, st.lists(st.integers(0, 11), max_size=6), st.data())
def test_reads_that_are_noted_are_those_of_the_object_and_all_that_counts(tree, choices, data):
    expected = read(copy.deepcopy(tree), choices)
    for whole in (False, True):
        seen: list[Any] = []
        reads = noted(lambda m: seen.extend(read(m, choices)), copy.deepcopy(tree), whole)  # noqa: B023
        if seen == expected:  # else a capture is tried with the objects as they are
            break
    assert seen == expected
    reads.check(ForwardContext({}, metadata=copy.deepcopy(tree)))
    for _ in range(4):
        other = changed(tree, data.draw)
        if read(copy.deepcopy(other), choices) != expected:
            with pytest.raises(StaleContext):
                reads.check(ForwardContext({}, metadata=other))


class Money(Decimal):
    """Its value is in memory of C code."""


def holding(values):
    return lambda: values[0]


def scaled(scale):
    tensor: Any = torch.ones(2)
    tensor.scale = scale
    return tensor


class Stated(float):
    """A number with an attribute."""


def stated(extra):
    number: Any = Stated(1)
    number.extra = extra
    return number


def with_grad():
    tensor = torch.ones(2, requires_grad=True)
    tensor.grad = torch.ones(2)
    return tensor


SPACE = SimpleNamespace
ROWS = SPACE(t=torch.ones(2, 3)), SPACE(t=torch.ones(3, 3))
ONE, TWO, PART, KEYS = torch.ones(1), torch.ones(1), Inner(1.0), {"k": 1}
CHANGES: dict[str, tuple[Callable[[Any], object], Any, Any]] = {
    "a field appears": (lambda m: getattr(m, "mask", None), SPACE(), SPACE(mask=1)),
    "a key appears": (lambda m: m.get("mask"), {}, {"mask": 1}),
    "a key goes": (lambda m: "mask" in m, {"mask": 1}, {}),
    "it is None": (lambda m: m.part is not None, SPACE(part=Inner(1.0)), SPACE(part=None)),
    "another class": (lambda m: m.part, SPACE(part=Inner(1.0)), SPACE(part=Slots(1, 2))),
    "a number is a flag": (lambda m: m.n, SPACE(n=1), SPACE(n=True)),
    "a tensor is a number": (lambda m: m.n, SPACE(n=torch.ones(1)), SPACE(n=1.0)),
    "forgotten": (lambda m: m.a, Slots(torch.ones(1), 2), None),
    "in slots": (lambda m: m.a, Slots(1, 2), Slots(2, 2)),
    "in a deque": (lambda m: m[0], deque([1, 2]), deque([3, 2])),
    "through vars": (lambda m: vars(m)["a"], SPACE(a=1), SPACE(a=2)),
    "in a copy": (lambda m: copy.copy(m).scale, Inner(1.0), Inner(2.0)),
    "in a copy of slots": (lambda m: copy.copy(m).a, Slots(1, 2), Slots(2, 2)),
    "deep": (lambda m: m.a.a.a.a.a.a, *(Slots(*[Slots(*[Slots(*[Slots(
        *[Slots(Slots(n, 0), 0)], 0)], 0)], 0)], 0) for n in (1, 2))),
    "a function": (lambda m: m.fn, SPACE(fn=max), SPACE(fn=min)),
    "of a partial": (lambda m: m(), partial(max, 1, 2), partial(max, 1, 3)),
    "an enum key": (lambda m: m[torch.int8], {torch.int8: 1}, {torch.int8: 2}),
    "of a set": (lambda m: 3 in m.s, SPACE(s={1, 2}), SPACE(s={1, 3})),
    "a tensor of a set": (lambda m: [*m.s], SPACE(s={ONE}), SPACE(s={TWO, ONE})),
    "two are one": (lambda m: [m.a.scale, m.b.scale], *(SPACE(a=PART, b=each) for each in (
        PART, Inner(2.0)))),
    "two dicts are one": (lambda m: [m.a["k"], m.b["k"]], *(SPACE(a=KEYS, b=each) for each in (
        KEYS, {"k": 2}))),
    "the form of an array": (lambda m: m.a.shape, *(SPACE(a=np.zeros(each, np.int8)) for each in (
        (2, 8), (4, 4)))),
    "the type of an array": (lambda m: m.a.dtype, *(SPACE(a=np.zeros(2, each)) for each in (
        np.int32, np.float32))),
    "through a weak reference": (lambda m: m.r().scale, SPACE(r=ref(PART)), SPACE(r=ref(Inner(1)))),
    "of a function": (lambda m: m.f(), SPACE(f=holding([1])), SPACE(f=holding([2]))),
    "a number of C": (lambda m: int(m.n), SPACE(n=Money(1)), SPACE(n=Money(2))),
    "the rows of a tensor": (lambda m: len(m.t), SPACE(t=torch.ones(2)), SPACE(t=torch.ones(3))),
    "a size": (lambda m: m.t.size(1), SPACE(t=torch.ones(2, 3)), SPACE(t=torch.ones(2, 4))),
    "a dtype": (lambda m: m.t.dtype, SPACE(t=torch.ones(2)), SPACE(t=torch.ones(2).half())),
    "a tensor has no rows": (lambda m: m.t, SPACE(t=torch.ones(0)), SPACE(t=torch.ones(3))),
    "an attribute of a tensor": (lambda m: m.t.scale, SPACE(t=scaled(1.0)), SPACE(t=scaled(2.0))),
    "of a tensor made of it": (lambda m: m.t.flatten().shape[0], *ROWS),
    "of one made of two": (lambda m: torch.cat([m.t, m.t]).shape[0], *ROWS),
    "of a largest": (lambda m: m.t.max(0).values.shape[0], SPACE(t=torch.ones(2, 3)), SPACE(
        t=torch.ones(2, 4))),
    "rows one by one": (lambda m: len([*m.t]), *ROWS),
    "columns one by one": (lambda m: len(m.t.split(1, dim=1)), SPACE(t=torch.ones(2, 3)), SPACE(
        t=torch.ones(2, 4))),
    "an attribute appears": (lambda m: hasattr(m.t, "scale"), SPACE(t=ONE), SPACE(t=scaled(1.0))),
    "its gradient": (lambda m: m.t.grad, SPACE(t=torch.ones(2)), SPACE(t=with_grad())),
    "what made it": (lambda m: m.t.grad_fn, SPACE(t=with_grad() * 2), SPACE(t=with_grad())),
    "its storage": (lambda m: m.t.untyped_storage().nbytes(), SPACE(t=torch.ones(2)), SPACE(
        t=torch.ones(3)[:2])),
    "two tensors are one": (lambda m: m.a is m.b, SPACE(a=ONE, b=TWO), SPACE(a=ONE, b=ONE)),
    "a tensor is two": (lambda m: m.a is m.b, SPACE(a=ONE, b=ONE), SPACE(a=ONE, b=TWO)),
    "two objects are one": (lambda m: m.a is m.b, *(SPACE(a=PART, b=each) for each in (
        Inner(1.0), PART))),
    "the sign of zero": (lambda m: math.copysign(1, m.n), SPACE(n=0.0), SPACE(n=-0.0)),
    "an empty range": (lambda m: m.n.start, SPACE(n=range(0)), SPACE(n=range(5, 5))),
    "a flag in a set": (lambda m: True in m.s, SPACE(s={1}), SPACE(s={True})),
    "a key is a flag": (lambda m: [*m], {1: 2}, {True: 2}),
    "an attribute of a number": (lambda m: m.n.extra, SPACE(n=stated(1)), SPACE(n=stated(2))),
    "printed": (lambda m: str(m), {"n": 1}, {"n": 2}),
    "a namespace printed": (lambda m: str(m.n), SPACE(n=SPACE(k=1)), SPACE(n=SPACE(k=2))),
    "a namespace compared": (lambda m: m.n == SPACE(k=1), SPACE(n=SPACE(k=1)), SPACE(n=SPACE(k=2))),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_each_kind_of_change_is_noticed(change):
    read, captured, step = CHANGES[change]
    reads = noted(read, captured)
    reads.check(ForwardContext({}, metadata=copy.copy(captured)))
    with pytest.raises(StaleContext) as caught:
        reads.check(ForwardContext({}, metadata=step))
    if change == "two tensors are one":
        assert "metadata.b of" in str(caught.value)
        assert "an object of its own, and metadata.a in this step" in str(caught.value)


SEVERAL = {
    "attention": lambda t: nn.functional.multi_head_attention_forward(
        t, t, t, 4, 1, torch.ones(12, 4), None, None, None, False, 0.0, torch.ones(4, 4), None)[0],
    "a cell": lambda t: torch.lstm_cell(t, (t, t), *(torch.ones(16, 4) for _ in range(2)))[0],
    "a norm": lambda t: torch.native_layer_norm(t, (4,), None, None, 1e-5)[0],
    "three of one form": lambda t: sum(torch.broadcast_tensors(t, t * 2, t[0])),
    "a grid": lambda t: torch.meshgrid(t[:, 0], t[0], t[0, :1], indexing="ij")[0].squeeze(-1),
    "parts": lambda t: sum(torch.split(t, 2, 1)),
}  # fmt: skip


@pytest.mark.parametrize("several", SEVERAL)
def test_a_function_that_returns_several_tensors_can_be_captured(several):
    """Of `split` and its like the number of parts is noted; of others it is what it is."""
    model = Computes(SEVERAL[several])
    assert right_step(captured(model, **SMALL), model, torch.rand(2, 4)) == "FULL"


FACTS: dict[str, tuple[Callable[[Any], float], Callable[[], Any]]] = {
    "shape": (lambda t: t.shape[1], lambda: torch.ones(2, 3)),
    "size(dim=1)": (lambda t: t.size(dim=1), lambda: torch.ones(2, 3)),
    "__len__()": (len, lambda: torch.ones(3, 2)),
    "dtype": (lambda t: t.dtype.itemsize, lambda: torch.ones(2, 2).half()),
    "stride(0)": (lambda t: t.stride(0), lambda: torch.ones(3, 2).t()[:2]),
    "storage_offset()": (lambda t: t.storage_offset() + 1.0, lambda: torch.ones(8)[1:5].view(2, 2)),
}


@contextmanager
def op_of(read, name):
    """An op of one's own that multiplies by what `read` gives of the metadata."""
    with torch.library._scoped_library(name, "FRAGMENT") as library:
        library.define("times(Tensor x) -> Tensor")
        library.impl(
            "times",
            lambda x: x * read(get_forward_context().metadata),
            "CompositeExplicitAutograd",
        )
        torch.library.register_fake(f"{name}::times", torch.empty_like, lib=library)
        yield getattr(torch.ops, name).times


class CallsOps(nn.Module):
    """One op in a graph, behind one at which a PIECEWISE graph breaks."""

    def __init__(self, op, splits):
        super().__init__()
        self.op, self.splits = op, splits

    def forward(self, x):
        return self.op(self.splits(x) * 1.0) + 1.0


@contextmanager
def serving(read, metadata, **settings):
    with op_of(read, "reads") as op, op_of(lambda m: 1.0, "splits") as splits:
        config = small_config(4, capture_sizes=(2,), splitting_ops=("splits::times",), **settings)
        prepared = prepare(CallsOps(op, splits), config)
        prepared.capture(lambda descriptor, mode: metadata)
        yield prepared
        prepared.close()


WAYS = [(mode, traced) for mode in ("FULL", "PIECEWISE") for traced in (True, False)]


@pytest.mark.parametrize(("mode", "traced"), WAYS)
@pytest.mark.parametrize("fact", FACTS)
def test_facts_of_tensors_that_are_read_inside_an_op(fact, mode, traced):
    read, other = FACTS[fact]
    table = torch.ones(2, 2)
    with serving(
        lambda m: read(m.table), SPACE(table=table), compile=traced, graph_mode=mode
    ) as prepared:
        expected = read(table) + 1.0
        same = SPACE(table=torch.ones(2, 2))
        assert step(prepared, same).unique().tolist() == [expected]
        with pytest.raises(StaleContext, match=re.escape(f"metadata.table.{fact}")):
            step(prepared, SPACE(table=other()))


@pytest.mark.parametrize(("mode", "traced"), WAYS)
@pytest.mark.parametrize("is_op", [True, False])
def test_a_tensor_that_code_in_a_graph_reads_lies_in_other_memory(mode, traced, is_op):
    """Also where the kernel is no operator, and is given an address."""
    scale = torch.full((4,), 2.0)

    def read(metadata):
        if is_op:
            return metadata.scale
        return ctypes.c_float.from_address(metadata.scale.data_ptr()).value

    with serving(read, SPACE(scale=scale), compile=traced, graph_mode=mode) as prepared:
        assert step(prepared, SPACE(scale=scale)).unique().tolist() == [3.0]
        with pytest.raises(MovedTensor, match=r"metadata\.scale moved"):
            step(prepared, SPACE(scale=scale.clone()))


def test_whether_inputs_require_gradients_is_compared_if_it_was_read():
    for factor, reads in ((lambda x: 2.0 if x.requires_grad else 3.0, True), (len, False)):
        prepared = captured(Computes(lambda x, factor=factor: x * factor(x)), **SMALL)
        x = torch.ones(2, 4, requires_grad=True)
        assert prepared(x.detach(), batch=Batch(2, 2)).max() in (2.0, 3.0)
        if reads:
            with pytest.raises(StaleContext, match="requires_grad of an input"):
                prepared(x, batch=Batch(2, 2))
        else:
            prepared(x, batch=Batch(2, 2))


def test_the_last_item_of_a_dict_is_taken_first():
    seen: list[Any] = []
    noted(lambda m: seen.extend([m.popitem(), m.popitem()]), {"a": 1, "k": 2})
    assert seen == [("k", 2), ("a", 1)]
    with pytest.raises(KeyError, match="dictionary is empty"):
        noted(lambda m: m.popitem(), {})


class MetaUnseen(type):
    level = 1.0


class Unseen(metaclass=MetaUnseen):
    scale = 1.0


class Member(Enum):
    ONE = 1


MEMBER: Any = Member.ONE
MEMBER.scale = 1.0
LIBRARY: Any = ModuleType("library")
LIBRARY.scale = 1.0
UNSEEN: dict[str, tuple[Callable[[Any], object], Any]] = {
    "of its class": (lambda m: type(m).scale, Unseen()),
    "of a class": (lambda m: m.kind.scale, SPACE(kind=Unseen)),
    "of a class of classes": (lambda m: type(m).level, Unseen()),
    "of a member": (lambda m: m.kind.scale, SPACE(kind=MEMBER)),
    "of a library": (lambda m: m.library.scale, SPACE(library=LIBRARY)),
}


@pytest.mark.parametrize("attribute", UNSEEN)
def test_an_attribute_that_is_read_unseen_and_changes(attribute, monkeypatch):
    read, metadata = UNSEEN[attribute]
    reads, context = noted(read, metadata), ForwardContext({}, metadata=metadata)
    reads.check(context)
    holders = (MetaUnseen,) if attribute == "of a class of classes" else (Unseen, LIBRARY, MEMBER)
    for holder in holders:
        monkeypatch.setattr(holder, "scale" if holder is not MetaUnseen else "level", 2.0)
    with pytest.raises(StaleContext, match=r"\.(scale|level) of .* 1\.0, and 2\.0 in this step"):
        reads.check(context)


SAME = {"k": 1}
ASKS: dict[str, tuple[Callable[[Any], object], Any]] = {
    "type": (lambda m: type(m) is dict, {"k": 1}),
    "class": (lambda m: m.__class__ is SimpleNamespace, SPACE(k=1)),
    "in a field": (lambda m: type(m.part).__name__ == "dict", SPACE(part={})),
    "in a list": (lambda m: type(m["a"][0]) is dict, {"a": [{}]}),
    "identity": (lambda m: m.part is SAME, SPACE(part=SAME)),
    "a table by class": (lambda m: len(tree_flatten(m)[0]) == 1, {"k": 1}),
}


@pytest.mark.parametrize("ask", ASKS)
def test_code_that_asks_what_an_object_is_takes_its_own_branch(ask):
    """Also inside an op of its own, and what is read is noted there, too."""
    asks, metadata = ASKS[ask]

    def chosen(metadata):
        return 2.0 if asks(metadata) else 3.0

    with op_of(chosen, "asks") as op:
        for scale in (chosen, lambda m: op(torch.ones(1))):
            prepared = prepared_for(scale, "FULL", metadata=metadata)
            assert step(prepared, metadata).unique().tolist() == [3.0]
            with pytest.raises(StaleContext):
                step(prepared, SPACE(k=2, part=None))


def test_code_that_asks_whether_it_is_noted_is_refused_with_its_line():
    def asks(metadata):
        return 2.0 if type(metadata).__getattribute__ is object.__getattribute__ else 3.0

    with pytest.raises(AllCapturesFailed, match="are noted it runs other operators") as caught:
        prepared_for(asks, "FULL")
    assert __file__ in str(caught.value)
    assert "__getattribute__" not in vars(Metadata)


def test_an_object_that_C_code_has_a_part_of_is_refused():
    with pytest.raises(AllCapturesFailed, match=r"metadata\.dice .*: a Random, of which C code"):
        prepared_for(lambda m: m.dice.random(), "FULL", metadata=SPACE(dice=Random(1)))


def test_an_iterator_is_refused_with_the_line_that_reads_it():
    def reads(swallows):
        def read(metadata):
            try:
                return float(next(metadata.rows))
            except ReadNotKept:
                if not swallows:
                    raise
                return 2.0

        return read

    for swallows in (False, True):
        with pytest.raises(AllCapturesFailed, match=r"metadata\.rows .*: a count, which") as caught:
            prepared_for(reads(swallows), "FULL", metadata=SPACE(rows=count(1)))
        assert __file__ in str(caught.value)


@pytest.mark.parametrize(
    "held", [bytearray(b"1"), [1].__getitem__, holding([1]), partial(max, [1])]
)
def test_what_is_changed_in_place_is_noticed(held):
    reads = noted(lambda m: m.held, SPACE(held=held))
    reads.check(ForwardContext({}, metadata=SPACE(held=held)))
    if isinstance(held, bytearray):
        held[0] = 2
    elif isinstance(held, partial):
        held.args[0][0] = 2
    else:
        values = held.__closure__[0].cell_contents if hasattr(held, "__code__") else held.__self__
        values[0] = 2
    with pytest.raises(StaleContext):
        reads.check(ForwardContext({}, metadata=SPACE(held=held)))


GIVEN: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "the metadata": (lambda c: c.metadata, lambda given: given.scale),
    "the context": (lambda c: c, lambda given: given.metadata.scale),
    "an object": (lambda c: c.metadata.inner, lambda given: given.scale),
    "a dict": (lambda c: c.metadata.by_name, lambda given: given["scale"]),
    "a namespace": (lambda c: c.metadata.space, lambda given: given.scale),
    "a tensor": (lambda c: c.metadata.tensor, lambda given: given),
    "of a layer": (lambda c: c.layers["a"].scale, lambda given: given.scale),
    "in a list": (lambda c: [c.metadata, 1.0], lambda given: given[0].scale * given[1]),
}


@break_graph(fake=lambda x, given, scale_of: torch.empty_like(x))
def times(x, given, scale_of):
    return x * scale_of(given)


class Gives(nn.Module):
    """Reads what it gives to a break inside a graph."""

    def __init__(self, case):
        super().__init__()
        self.gives, self.scale_of = GIVEN[case]

    def forward(self, x):
        try:
            given = self.gives(get_forward_context())
        except OutsideStep:
            given = None
        return times(x * 1.0, given, self.scale_of) + 1.0


@pytest.mark.parametrize("case", GIVEN)
def test_a_break_is_given_what_the_step_has(case):
    def metadata(scale):
        made: Any = Metadata(scale)
        made.space, made.tensor = SPACE(scale=scale), torch.full((1,), scale)
        return made

    layer, given = Inner(Inner(2.0)), {"metadata_for": lambda *_: metadata(2.0), **SMALL}
    prepared = captured(Gives(case), layers={"a": layer}, graph_mode="PIECEWISE", **given)
    for scale in (2.0, 3.0, 4.0):
        layer.scale = Inner(scale)
        assert step(prepared, metadata(scale)).unique().tolist() == [scale + 1.0]


@break_graph(fake=lambda x, made: None)
def adds(x, made):
    made.append(x * 2.0)


def test_a_break_that_changes_a_list_that_it_is_given_is_refused_with_its_line():
    def forward(x):
        made: list[Tensor] = []
        adds(x * 1.0, made)
        return (made or [x])[0] + 1.0

    with pytest.raises(AllCapturesFailed, match="adds changes a list or dict") as caught:
        captured(Computes(forward), graph_mode="PIECEWISE", **SMALL)
    assert __file__ in str(caught.value)


@lru_cache
def doubled_once(metadata):
    return metadata.table * 2.0


class Slotted:
    __slots__ = ("derived", "table")

    def __init__(self, table):
        self.table, self.derived = table, None


class Holds:
    def __init__(self, table):
        self.table, self.derived, self.inner = table, None, Slotted(table)


def of_last(metadata, last=[None, None]):  # noqa: B006
    if last[0] is not metadata:
        last[:] = metadata, metadata.table * 2.0
    return last[1]


def of_slot(metadata):
    if metadata.derived is None:
        metadata.derived = metadata.table * 2.0
    return metadata.derived


KEPT = WeakKeyDictionary[Any, Any]()
KEEPS: dict[str, Callable[[Any], Any]] = {
    "by its hash": doubled_once,
    "for the last": of_last,
    "in a slot": of_slot,
    "in a slot of an object": lambda m: of_slot(m.inner),
    "weakly": lambda m: KEPT.get(m) if m in KEPT else KEPT.setdefault(m, m.table * 2.0),
}


@pytest.mark.parametrize("keeps", KEEPS)
def test_what_is_derived_once_from_metadata_is_in_the_graph_wherever_it_is_kept(keeps):
    table = torch.ones(1)
    prepared = captured(Model(KEEPS[keeps]), metadata_for=lambda *_: Holds(table), **SMALL)
    for value in (1.0, 2.0):
        table.fill_(value)
        assert step(prepared, Holds(table)).unique().tolist() == [value * 2.0 + 1.0]


class Slotful(float):
    __slots__ = ("extra",)


class OfNumpy(np.ndarray[Any, Any]):
    scale: int


class WithDefault(dict[str, Any]):
    """A dict of dicts with an attribute, which is given out as a copy."""


class Listed(list[Any]):
    def __init__(self, items, scale):
        super().__init__(items)
        self.scale = scale


class Coupled(tuple[Any, ...]):
    scale: int

    def __new__(cls, items, scale):
        made = super().__new__(cls, items)
        made.scale = scale
        return made


def with_attributes(value, **attributes):
    for name, each in attributes.items():
        setattr(value, name, each)
    return value


def keyword_default(values):
    return with_attributes(lambda *, k=None: k[0], __kwdefaults__={"k": values})


def slotful(extra):
    return with_attributes(Slotful(1.0), extra=extra)


def dict_of_dicts(scale):
    return with_attributes(WithDefault(part={"k": 1}), scale=scale)


def array_of(scale):
    return with_attributes(np.zeros(2).view(OfNumpy), scale=scale)


HELD: dict[str, tuple[Callable[[Any], object], Callable[[int], Any]]] = {
    "the length of a deque": (lambda m: m.maxlen, lambda n: deque([1], maxlen=n)),
    "the default of a dict": (lambda m: m["k"], lambda n: defaultdict([int, list][n - 1])),
    "a dict of dicts": (lambda m: (m["part"]["k"], m.scale), dict_of_dicts),
    "a list of dicts": (lambda m: (m[0]["k"], m.scale), lambda n: Listed([{"k": 1}], n)),
    "a tuple of dicts": (lambda m: (m[0]["k"], m.scale), lambda n: Coupled([{"k": 1}], n)),
    "in a slot of a number": (lambda m: m.n.extra, lambda n: SPACE(n=slotful(n))),
    "an attribute of an array": (lambda m: m.a.scale, lambda n: SPACE(a=array_of(n))),
    "an array of objects": (lambda m: m.a[0].k, lambda n: SPACE(a=np.array([SPACE(k=n)]))),
    "the order of an array": (lambda m: m.a.strides, lambda n: SPACE(
        a=np.zeros((2, 2), order=("C", "F")[n - 1]))),
    "a getter": (lambda m: m.get("abc"), lambda n: SPACE(get=itemgetter(n))),
}  # fmt: skip


@pytest.mark.parametrize("held", HELD)
def test_what_objects_of_C_code_hold_besides_their_items_is_noticed(held):
    read, metadata = HELD[held]
    seen: list[object] = []
    reads = noted(lambda m: seen.append(read(m)), metadata(1))
    assert seen == [read(metadata(1))]
    reads.check(ForwardContext({}, metadata=metadata(1)))
    with pytest.raises(StaleContext):
        reads.check(ForwardContext({}, metadata=metadata(2)))


LOCAL, VARIABLE, GENERATOR = local(), ContextVar[int]("VARIABLE"), torch.Generator()
VALUES, OBJECTS = [1], np.array([SPACE(k=1)])


class Table:
    rows: ClassVar = {"k": [1]}


IN_PLACE: dict[str, tuple[Callable[[Any], object], Any, Callable[[int], object]]] = {
    "of a thread": (lambda m: m.n, LOCAL, lambda n: setattr(LOCAL, "n", n)),
    "of a context": (lambda m: m.get(), VARIABLE, VARIABLE.set),
    "a default by keyword": (lambda m: m(), keyword_default(VALUES), lambda n: VALUES.append(n)),
    "an array of objects": (lambda m: m[0].k, OBJECTS, lambda n: setattr(OBJECTS[0], "k", n)),
    "a seed": (lambda m: m.initial_seed(), GENERATOR, GENERATOR.manual_seed),
    "a table of a class": (lambda m: m.rows["k"], Table, lambda n: Table.rows["k"].append(n)),
}


@pytest.mark.parametrize("held", IN_PLACE)
def test_what_changes_inside_of_what_is_held_is_noticed(held):
    read, value, change = IN_PLACE[held]
    change(1)
    reads = noted(lambda m: read(m.held), SPACE(held=value))
    reads.check(ForwardContext({}, metadata=SPACE(held=value)))
    change(2)
    with pytest.raises(StaleContext):
        reads.check(ForwardContext({}, metadata=SPACE(held=value)))


class Caches(Inner):
    @cached_property
    def doubled(self):
        return self.scale * 2.0


def test_a_cached_property_is_no_read_of_all():
    reads = noted(lambda m: m.doubled, with_attributes(Caches(1.0), number=1))
    reads.check(ForwardContext({}, metadata=with_attributes(Caches(1.0), number=2)))
    with pytest.raises(StaleContext, match=r"metadata\.(scale|doubled) "):
        reads.check(ForwardContext({}, metadata=with_attributes(Caches(2.0), number=1)))


def with_an_empty_cell():
    if VALUES == []:
        later = 1
    return lambda: later


EMPTY = with_an_empty_cell()


@pytest.mark.parametrize(
    ("held", "in_step"), [(float("nan"), float("nan")), (EMPTY, EMPTY)], ids=["nan", "empty"]
)
def test_what_equals_nothing_or_holds_nothing_is_itself(held, in_step):
    reads = noted(lambda m: m.held, SPACE(held=held))
    reads.check(ForwardContext({}, metadata=SPACE(held=in_step)))


class Bounded(SimpleNamespace):
    graph_bounds = ("longest",)


def test_rtp_1265_a_bound_may_fall_but_not_rise():
    metadata = Bounded(longest=8, scale=2.0)
    prepared = prepared_for(lambda m: m.longest * 0.0 + 1.0, "FULL", metadata=metadata)
    for longest in (8, 3):
        metadata = Bounded(longest=longest, scale=2.0)
        assert step(prepared, metadata).unique().tolist() == [3.0]
    with pytest.raises(StaleContext, match=r"metadata\.longest .* 'at most 8', and 9 in this step"):
        step(prepared, Bounded(longest=9, scale=2.0))


@pytest.mark.parametrize("bound", [np.int64(8), Decimal(8), 8.5, math.inf])
def test_a_bound_is_a_number_of_any_class(bound):
    reads = noted(lambda m: m.longest, Bounded(longest=bound))
    for longest in (bound, 3):
        reads.check(ForwardContext({}, metadata=Bounded(longest=longest)))
    if bound != math.inf:
        with pytest.raises(StaleContext, match="at most 8"):
            reads.check(ForwardContext({}, metadata=Bounded(longest=9)))


def test_a_bound_that_is_no_number_is_a_value():
    reads = noted(lambda m: m.longest, Bounded(longest=None))
    reads.check(ForwardContext({}, metadata=Bounded(longest=None)))
    with pytest.raises(StaleContext, match="None, and 9"):
        reads.check(ForwardContext({}, metadata=Bounded(longest=9)))


class Stating(Inner):
    graph_constants = "debug_level"  # without the comma of a tuple


def test_a_name_that_a_class_states_is_no_part_of_another():
    first, other = Stating(1.0), Stating(1.0)
    first.debug, other.debug, first.debug_level, other.debug_level = 1, 1, 1, 2
    for read in (lambda m: (m.debug, m.debug_level), copy.copy):
        reads = noted(read, first)
        reads.check(ForwardContext({}, metadata=other))
        other.debug = 2
        with pytest.raises(StaleContext, match=r"metadata\.debug "):
            reads.check(ForwardContext({}, metadata=other))
        other.debug = 1


def test_what_an_op_writes_and_then_reads_is_not_the_steps():
    def read(metadata):
        metadata.by_name["derived"] = metadata.derived = 4.0
        return float(metadata.derived + metadata.by_name["derived"])

    prepared, metadata = prepared_for(read, "FULL"), Metadata(2.0)
    assert step(prepared, metadata).unique().tolist() == [17.0]


def test_reads_of_another_thread_hide_none_of_a_capture():
    metadata, reads = Inner(2.0), StepReads()
    context = ForwardContext({}, metadata=metadata)
    reads.watch(context)
    reads.open()
    elsewhere = reads._observer._path_of(context, "metadata")
    with ThreadPoolExecutor(1) as other:
        assert other.submit(elsewhere.__enter__).result() is None
        assert context.metadata.scale == 2.0
        other.submit(elsewhere.__exit__, None, None, None).result()
    reads.finish()
    assert "metadata.scale" in reads.facts()


def test_two_captures_at_once_observe_one_class():
    first, second = StepReads(), StepReads()
    metadata = Inner(2.0)
    contexts = [ForwardContext({}, metadata=metadata) for _ in range(2)]
    for reads, context in zip((first, second), contexts, strict=True):
        reads.watch(context)
        reads.open()
    assert contexts[0].metadata.scale == 2.0
    first.finish()
    assert contexts[1].metadata.scale == 2.0
    second.finish()
    assert first.facts().keys() == second.facts().keys() >= {"metadata.scale"}
    assert "__getattribute__" not in vars(Inner)


def test_memory_that_compiled_code_makes_is_no_other_operator():
    """It is made without an operator, and lies elsewhere if something else was made before."""
    kept = []

    def run(noted=False):
        with without_modes():
            kept.extend(torch.empty(4) for _ in range(100 * noted))
            x = torch.empty(4)
        x.zero_()

    log = partial(ops_of, before=bool)
    plain, again = log(run), partial(log, run)
    assert line_of_difference(log(partial(run, True)), plain, again, bool) is None
    assert line_of_difference(log(lambda: torch.ones(2)), plain, again, bool) is not None


def test_a_first_run_that_sets_something_up_is_no_other_operator():
    """The run that it is compared with is made again: a difference of the noted run is found."""
    ready = []

    def run(noted=False):
        if not ready:
            ready.append(torch.ones(3))
        return torch.zeros(2 + noted)

    log = partial(ops_of, before=bool)
    plain, same, other = log(run), log(run), log(partial(run, True))
    assert line_of_difference(same, plain, partial(log, run), bool) is None
    assert "test_step_reads" in line_of_difference(other, plain, partial(log, run), bool)


def test_ranks_meet_before_each_collective_of_a_run_whose_operators_are_logged(tmp_path):
    """Each call is given a new object for its group, which is no other operator."""
    dist.init_process_group("gloo", f"file://{tmp_path}/store", world_size=1, rank=0)
    met = []
    try:
        one, other = (ops_of(lambda: dist.all_reduce(torch.ones(1)), met.append) for _ in "12")
    finally:
        dist.destroy_process_group()
    assert one.calls == other.calls
    assert met.count(torch.ops.c10d.allreduce_.default) == 2
