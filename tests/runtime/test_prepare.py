"""What `prepare` and its settings refuse before anything is compiled."""

import pytest
from torch import nn

from piecegraph import Config, compile_ahead, prepare
from piecegraph.errors import InvalidSetting

from .conftest import small_config


class Model(nn.Module):
    def forward(self, x, unused):
        return x * 2


@pytest.mark.parametrize("make_ready", [prepare, compile_ahead])
@pytest.mark.parametrize(
    ("model", "fault"), [(lambda x: x, "it is no torch.nn.Module"), (Model, "it is a class")]
)
def test_what_is_no_model_is_refused(make_ready, model, fault):
    with pytest.raises(InvalidSetting, match=f"setting model = .*{fault}"):
        make_ready(model, Config(inputs={"x": "float32[num_tokens]"}, cache=False))


def test_inputs_must_state_the_number_of_tokens():
    with pytest.raises(InvalidSetting, match="setting inputs .* a dimension num_tokens"):
        Config(inputs={"ids": "int64[tokens]"})


@pytest.mark.compile
def test_an_input_that_the_model_does_not_read_states_nothing():
    inputs = {"x": "float32[4]", "unused": "int64[num_tokens]"}
    with pytest.raises(InvalidSetting, match="no input that the model reads"):
        prepare(Model(), Config(inputs=inputs, compiler="eager", cache=False))


@pytest.mark.compile
def test_the_report_lists_the_ranges_that_have_code_of_their_own():
    inputs = {"x": "float32[num_tokens, 4]", "unused": "int64[num_tokens]"}
    codegen = {"ranges": (8, 16), "sizes": (4,)}
    config = small_config(32, inputs=inputs, codegen=codegen, graph_mode="NONE")
    ranges = prepare(Model(), config).report()["pieces"]["ranges"]
    assert ranges == [[1, 3], [4, 4], [5, 8], [9, 16], [17, 32]]
