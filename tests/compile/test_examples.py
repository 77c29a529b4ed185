"""Example inputs: built from declarations, checked against them, or refused with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from piecegraph.compile.ir.config import CompileConfig, InputSpec
from piecegraph.compile.trace.examples import example_inputs, leaves, symbol_sizes
from piecegraph.config import Config, compile_config
from piecegraph.errors import (
    ExampleInputsMissing,
    ExampleMismatch,
    InvalidSetting,
    UndeclaredDynamicShape,
    UnknownInput,
)

CPU = torch.device("cpu")


class Model(nn.Module):
    def forward(self, x, y=None, *, scale=2.0, **others):
        return x


class Strict(nn.Module):
    def forward(self, x, table):
        return x


def examples(model=None, given=None, **settings):
    return example_inputs(model or Model(), compile_config(Config(**settings)), CPU, given)


def shapes(found):
    tensors = [leaf for leaf in found.leaves() if isinstance(leaf.value, torch.Tensor)]
    return {leaf.label: tuple(leaf.value.shape) for leaf in tensors}


def test_inputs_are_built_from_their_declaration():
    found = examples(inputs={"x": "int64[3, num_tokens]", "y": "float16[num_patches, 8]"})
    assert shapes(found) == {"x": (3, 17), "y": (19, 8)}
    assert found.arguments["x"].dtype is torch.int64
    assert found.arguments["scale"] == 2.0
    assert found.symbols == {("x", 1): "num_tokens", ("y", 0): "num_patches"}


def test_equal_symbols_get_equal_sizes_and_keep_to_their_limits():
    found = examples(
        inputs={"x": "int64[num_tokens]", "y": "int64[few, num_tokens]"},
        max_num_tokens=5,
        tracing={"symbol_limits": {"few": (2, 3)}},
    )
    assert shapes(found) == {"x": (5,), "y": (3, 5)}


def test_given_inputs_of_one_symbol_have_one_size():
    settings = {"inputs": {"x": "float32[num_tokens]", "y": "float32[num_tokens]"}}
    with pytest.raises(ExampleMismatch, match="'y'.*num_tokens = 5"):
        examples(given=((torch.zeros(5), torch.zeros(4)), {}), **settings)


@given(st.integers(1, 9), st.integers(1, 6), st.integers(0, 30))
def test_independent_sizes_are_within_limits_and_differ_where_they_can(count, low, more):
    names = [f"n{i}" for i in range(count)]
    config = CompileConfig(
        inputs={name: f"int64[{name}]" for name in names},
        symbol_limits=dict.fromkeys(names, (low, low + more)),
    )
    sizes = list(symbol_sizes(config).values())
    assert len(sizes) == count
    assert all(low <= size <= low + more for size in sizes)
    assert len(set(sizes)) == min(count, more + 1)


def test_given_inputs_are_checked_against_the_declaration():
    wrong = [torch.zeros(5), torch.zeros(5, 9), torch.zeros(5, 8, dtype=torch.float64), 3]
    for value in wrong:
        with pytest.raises(ExampleMismatch, match="'x'"):
            examples(given=((value,), {}), inputs={"x": "float32[num_tokens, 8]"})
    found = examples(given=((torch.zeros(5, 8),), {}), inputs={"x": "float32[num_tokens, 8]"})
    assert found.symbols == {("x", 0): "num_tokens"}


def test_input_that_is_none_needs_no_declared_form():
    inputs = {"x": "float32[num_tokens]", "y": "float32[num_tokens]"}
    found = examples(given=((torch.zeros(5),), {}), inputs=inputs)
    assert found.symbols == {("x", 0): "num_tokens"}


def test_range_of_the_tokens_is_stated_in_one_place():
    with pytest.raises(InvalidSetting, match="max_num_tokens"):
        compile_config(Config(tracing={"symbol_limits": {"num_tokens": (1, 5)}}))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"q": (5, 1)}, "q cannot range from 5 to 1"),
        ({"q": (-1, 1)}, "q cannot range from -1 to 1"),
        ({"q": (1, 5), "num_req": (1, 5)}, "has a dimension num_req"),
    ],
)
def test_a_range_of_nothing_is_refused(limits, message):
    with pytest.raises(InvalidSetting, match=message):
        compile_config(
            Config(inputs={"x": "int64[num_tokens, q]"}, tracing={"symbol_limits": limits})
        )
    with pytest.raises(InvalidSetting, match="symbol_limits"):
        compile_config(Config(tracing={"symbol_limits": limits}))


def test_missing_examples_name_the_argument():
    with pytest.raises(ExampleInputsMissing, match="'table'"):
        examples(Strict(), inputs={"x": "float32[num_tokens]"})
    with pytest.raises(ExampleInputsMissing, match="'x'"):
        examples(Strict())


def test_declared_input_that_the_model_does_not_take():
    inputs = {"x": "float32[num_tokens]", "z": "float32[num_tokens]"}
    with pytest.raises(UnknownInput, match="'z'"):
        examples(given=((torch.zeros(5),), {}), inputs=inputs)


def test_inference_of_the_token_dimension():
    found = examples(given=((torch.zeros(1, 6),), {"y": torch.zeros(6)}))
    assert found.symbols == {("x", 1): "num_tokens", ("y", 0): "num_tokens"}
    for args in [(torch.zeros(6, 8),), (torch.zeros(1),), ()]:
        arguments = args or (3,)
        with pytest.raises(UndeclaredDynamicShape):
            examples(given=(arguments, {}))


def test_examples_are_not_the_callers_tensors():
    given_ = torch.zeros(6)
    found = examples(given=((given_,), {}))
    assert found.arguments["x"] is not given_
    assert not hasattr(given_, "_dynamo_dynamic_indices")


def test_leaves_of_nested_arguments_are_labeled_by_path():
    found = leaves({"batch": {"x": 1, "pair": (2, [None])}})
    assert [leaf.label for leaf in found] == ["batch.x", "batch.pair.0", "batch.pair.1.0"]


@given(
    st.sampled_from(["int64", "float32", "bfloat16"]),
    st.lists(st.integers(0, 99) | st.sampled_from(["num_tokens", "n", "_x1"]), max_size=4),
)
def test_input_spec_is_read_as_it_is_written(dtype, shape):
    spec = InputSpec(dtype=dtype, shape=tuple(shape))
    assert InputSpec.parse(str(spec)) == spec


@pytest.mark.parametrize(
    "text", ["int64", "int64[", "[3]", "int64[-1]", "int64[a b]", "int64[a+1]"]
)
def test_malformed_spec_is_refused_with_the_setting(text):
    with pytest.raises(InvalidSetting, match="inputs"):
        compile_config(Config(inputs={"x": text}))


def test_dotted_names_are_places_in_dicts_lists_and_keywords():
    class Nested(nn.Module):
        def forward(self, x, states, **kwargs):
            return x

    inputs = {
        "x": "float32[num_tokens, 8]",
        "states.hidden": "float32[num_tokens, 8]",
        "states.aux.0": "float32[num_tokens]",
        "states.aux.1": "int64[num_tokens]",
        "kwargs.bias": "float32[8]",
    }
    found = examples(Nested(), inputs=inputs)
    n = symbol_sizes(compile_config(Config(inputs=inputs)))["num_tokens"]
    assert shapes(found) == {
        "x": (n, 8),
        "states.hidden": (n, 8),
        "states.aux.0": (n,),
        "states.aux.1": (n,),
        "kwargs.bias": (8,),
    }
    assert isinstance(found.arguments["states"]["aux"], list)
    with pytest.raises(UnknownInput, match="state.hidden"):
        examples(Nested(), inputs={**inputs, "state.hidden": "float32[num_tokens]"})


@dataclass
class States:
    hidden: torch.Tensor
    scale: torch.Tensor

    def __getitem__(self, key: str) -> torch.Tensor:
        raise KeyError(key)  # items that are not the fields


class Pair(NamedTuple):
    states: States
    bias: torch.Tensor


torch.export.register_dataclass(States)


class TakesObjects(nn.Module):
    def forward(self, pair: Pair, states: States | None = None) -> torch.Tensor:
        assert states is not None
        return pair.states.hidden * states.scale + states.hidden + pair.bias


def test_dataclasses_and_named_tuples_are_arguments(compiled):
    rows = "float32[num_tokens, 8]"
    inputs = {
        "pair.states.hidden": rows,
        "pair.states.scale": "float32[8]",
        "pair.bias": "float32[8]",
        "states.hidden": rows,
        "states.scale": "float32[8]",
    }
    made = compiled(TakesObjects(), inputs=inputs)
    for size in (1, 5):
        states = States(torch.randn(size, 8), torch.randn(8))
        pair = Pair(States(torch.randn(size, 8), torch.randn(8)), torch.randn(8))
        torch.testing.assert_close(made(pair, states), TakesObjects()(pair, states))
    del inputs["states.scale"]
    with pytest.raises(InvalidSetting, match="States cannot be made of these"):
        compiled(TakesObjects(), inputs=inputs)


@dataclass
class Parameter:
    """Named as a class of torch."""

    rows: torch.Tensor


torch.export.register_dataclass(Parameter)


def test_a_class_may_be_named_as_one_of_torch(compiled):
    class Doubles(nn.Module):
        def forward(self, given: Parameter) -> torch.Tensor:
            return given.rows * 2

    made = compiled(Doubles(), inputs={"given.rows": "float32[num_tokens, 8]"})
    rows = torch.randn(3, 8)
    assert torch.equal(made(Parameter(rows)), rows * 2)


def test_examples_have_strides_and_memory_of_their_own():
    x = torch.zeros(1, 128)[:, :17]
    shape = "float32[1,num_tokens]"
    inputs = {"x": shape, "y": shape}
    made = examples(given=((x, x), {}), inputs=inputs, max_num_tokens=64).arguments
    assert made["x"].stride() == (17, 1)
    assert made["x"].data_ptr() != made["y"].data_ptr()
