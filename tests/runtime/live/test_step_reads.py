"""What Python reads of a step inside a graph is compared in each step of the graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from piecegraph import (
    Batch,
    Config,
    PreparedModel,
    break_graph,
    get_forward_context,
    prepare,
)
from piecegraph.errors import OutsideStep, StaleContext


class Inner:
    def __init__(self, scale: float) -> None:
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

    def __post_init__(self) -> None:
        self.by_name, self.inner = {"scale": self.scale}, Inner(self.scale)
        self.values, self.layers = [self.scale], [Inner(self.scale)]
        self.array = np.array([self.scale])
        self.mixed = [torch.ones(1), (self.scale, torch.ones(1))]
        self.pair = Pair(torch.ones(1), self.scale)

    def method(self) -> float:
        return self.inner.scale

    @property
    def computed(self) -> float:
        return self.scale


READS: dict[str, Callable[[Any], float]] = {
    "metadata.scale": lambda m: m.scale,
    "metadata.inner.scale": lambda m: m.method(),
    "metadata.computed": lambda m: m.computed,
    "metadata.by_name['scale']": lambda m: m.by_name.get("scale"),
    "metadata.values[0]": lambda m: m.values[0],
    "metadata.layers[0].scale": lambda m: m.layers[0].scale,
    "metadata.array.tobytes()": lambda m: float(m.array[0]),
    "metadata.mixed[1][0]": lambda m: m.mixed[1][0],
    "metadata.pair[1]": lambda m: m.pair.number,
}


@break_graph
def doubled(x: Tensor) -> None:
    x.mul_(get_forward_context().metadata.scale)


class Model(nn.Module):
    def __init__(self, read: Callable[[Any], float]) -> None:
        super().__init__()
        self.read = read
        self.one = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        try:
            y = x * self.read(get_forward_context().metadata)
        except OutsideStep:  # the form of the result is found outside of steps
            y = x * 1.0
        doubled(y)
        return y + self.one


def prepared_for(
    read: Callable[[Any], float],
    mode: str,
    device: str = "cpu",
    layers: dict[str, Inner] | None = None,
) -> PreparedModel:
    config = Config(
        compile=False,
        inputs={"x": "float32[num_tokens, 4]"},
        max_num_tokens=4,
        max_num_reqs=4,
        capture_sizes=(2,),
        graph_mode=mode,
        cache=False,
        attention={"support": "ALWAYS"},
    )
    prepared = prepare(Model(read).to(device), config, layers=layers)
    prepared.capture(lambda descriptor, mode: Metadata(2.0))
    return prepared


def step(prepared: PreparedModel, metadata: Any, device: str = "cpu") -> Tensor:
    rows: Tensor = prepared(torch.ones(2, 4, device=device), batch=Batch(2, 2), metadata=metadata)
    return rows


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("path", READS)
def test_a_changed_value_is_an_error_that_names_it(path: str, device: str) -> None:
    prepared = prepared_for(READS[path], "PIECEWISE", device)
    assert step(prepared, Metadata(2.0), device).unique().tolist() == [5.0]
    with pytest.raises(StaleContext) as caught:
        step(prepared, Metadata(3.0), device)
    assert f"read {path} of" in str(caught.value)
    assert caught.value.where is not None
    assert caught.value.where.startswith(__file__)


@pytest.mark.parametrize("device", DEVICES)
def test_an_object_that_the_engine_changes_in_place(device: str) -> None:
    prepared, metadata = prepared_for(READS["metadata.scale"], "FULL", device), Metadata(2.0)
    assert step(prepared, metadata, device).unique().tolist() == [5.0]
    metadata.scale = 3.0
    with pytest.raises(StaleContext, match=r"2\.0, and 3\.0 in this step"):
        step(prepared, metadata, device)
    metadata.scale = 2.0
    assert step(prepared, metadata, device).unique().tolist() == [5.0]


def test_an_attribute_of_a_layer_that_changes() -> None:
    layer = Inner(2.0)
    read = READS["metadata.scale"]
    prepared = prepared_for(
        lambda m: read(m) * get_forward_context().layers["a"].scale, "FULL", layers={"a": layer}
    )
    assert step(prepared, Metadata(2.0)).unique().tolist() == [9.0]
    layer.scale = 3.0
    with pytest.raises(StaleContext, match=r"read layers\['a'\]\.scale .* 2\.0, and 3\.0"):
        step(prepared, Metadata(2.0))


def test_what_splitting_ops_read_and_what_is_declared_may_change() -> None:
    prepared = prepared_for(lambda m: 1.0 + m.bound, "PIECEWISE")
    changed = Metadata(4.0)
    changed.bound = 7
    assert step(prepared, Metadata(3.0)).unique().tolist() == [4.0]
    assert step(prepared, changed).unique().tolist() == [5.0]


def test_real_tokens_are_those_of_the_capture_only_without_padding() -> None:
    prepared = prepared_for(lambda m: get_forward_context().num_tokens, "PIECEWISE")
    assert step(prepared, Metadata(1.0)).unique().tolist() == [3.0]
    with pytest.raises(StaleContext, match="num_tokens"):
        prepared(torch.ones(1, 4), batch=Batch(1, 1), metadata=Metadata(1.0))


def test_a_form_of_metadata_that_lacks_the_value_is_an_error() -> None:
    prepared = prepared_for(READS["metadata.inner.scale"], "FULL")
    with pytest.raises(StaleContext, match="no attribute 'inner'"):
        step(prepared, Inner(2.0))


def test_the_event_of_a_capture_lists_what_it_read() -> None:
    prepared = prepared_for(READS["metadata.inner.scale"], "PIECEWISE")
    (event,) = prepared.events.named("capture.recorded")
    (read,) = event.facts["python_reads"].items()
    assert read[0] == "metadata.inner.scale"
    assert f"2.0 at {__file__}" in read[1]
