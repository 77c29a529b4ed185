"""Inputs of any strides are right in every mode, with code that relies on strides."""

import pytest
import torch
from torch import nn

from piecegraph import Batch, compile_ahead, prepare
from piecegraph.errors import InputMismatch

from ..conftest import right_step, small_config, strict_backend

pytestmark = pytest.mark.compile

MAX_TOKENS = 16


class Model(nn.Module):
    def forward(self, x, positions, table):
        return x * 2 + positions.sum(0)[:, None] + table[:3].sum()


def config(**settings):
    inputs = {"x": "float32[num_tokens, 4]", "positions": "int64[3, num_tokens]"}
    inputs["table"] = "float32[3, 5]"
    settings = {"compiler": "inductor", "capture_sizes": (2, 4, 8), **settings}
    return small_config(MAX_TOKENS, inputs=inputs, **settings)


@pytest.fixture(
    scope="module", params=["artifacts", pytest.param("libraries", marks=pytest.mark.heavy)]
)
def settings(request, tmp_path_factory):
    """With code of this kind, which is made once."""
    made = config(cache=True, cache_dir=tmp_path_factory.mktemp("cache"))
    if request.param == "artifacts":
        return made
    compile_ahead(Model(), made)
    return made.changed(bundle="force")


@pytest.fixture(scope="module")
def prepared(settings):
    prepared = prepare(Model(), settings, backend=strict_backend())
    prepared.capture()
    return prepared


INPUTS = {
    "transposed": lambda n: {"x": torch.randn(4, n).t()},
    "column slice": lambda n: {"x": torch.randn(n, 9)[:, 2:6]},
    "every second row": lambda n: {"x": torch.randn(2 * n, 4)[::2]},
    "expanded": lambda n: {"x": torch.randn(1, 4).expand(n, 4)},
    "expanded rows": lambda n: {"positions": torch.arange(n).expand(3, n)},
    "transposed positions": lambda n: {"positions": torch.randint(9, (n, 3)).t()},
    "a slice of wider positions": lambda n: {"positions": torch.randint(9, (3, 20))[:, :n]},
    "negated when it is read": lambda n: {"x": torch._neg_view(torch.randn(n, 4))},
    "a fixed shape": lambda n: {"table": torch.randn(5, 3).t()},
}


def inputs(num_tokens):
    positions = torch.randint(9, (3, num_tokens))
    return torch.randn(num_tokens, 4), positions, torch.randn(3, 5)


@pytest.mark.parametrize("num_tokens", [3, 4, 12])  # padded, full, without a graph
@pytest.mark.parametrize("case", INPUTS)
def test_inputs_of_any_strides(prepared, case, num_tokens):
    given = dict(zip(("x", "positions", "table"), inputs(num_tokens), strict=True))
    mode = right_step(prepared, Model(), *(given | INPUTS[case](num_tokens)).values())
    assert mode == ("NONE" if num_tokens == 12 else "FULL")


def test_code_without_a_graph_is_given_the_strides_it_relies_on(prepared, monkeypatch):
    """Ahead-of-time libraries do not check strides: they read out of bounds."""
    seen = []
    stitched = prepared._core.steps.code.call

    def watching(*inputs):
        seen.extend(tensor.is_contiguous() for tensor in inputs)
        return stitched(*inputs)

    monkeypatch.setattr(prepared._core.steps.code, "call", watching)
    strided = torch.randn(4, 12).t(), torch.arange(12).expand(3, 12), torch.randn(5, 3).t()
    right_step(prepared, Model(), *strided)
    assert seen == [True] * 3


def test_an_engines_buffer_with_strided_rows_is_copied(settings):
    buffers = dict(zip(("x", "positions"), inputs(MAX_TOKENS), strict=False))
    served = prepare(Model(), settings, backend=strict_backend(), input_buffers=buffers)
    served.capture()
    for num_tokens in (3, 8, 12):
        for buffer in buffers.values():
            buffer.random_(9)
        given = buffers["x"][:num_tokens], buffers["positions"][:, :num_tokens], torch.randn(3, 5)
        mode = right_step(served, Model(), *given)
        assert mode == ("NONE" if num_tokens == 12 else "FULL")


def test_the_same_first_byte_with_other_strides_is_not_the_engines_buffer():
    buffer = torch.randn(MAX_TOKENS, 4)
    settings = config(compiler="eager")
    served = prepare(Model(), settings, backend=strict_backend(), input_buffers={"x": buffer})
    served.capture()
    rest = (torch.zeros(3, 4, dtype=torch.int64), torch.zeros(3, 5))
    decision = served.dispatch(Batch(4, 4))
    served.run(decision, buffer[:4], *rest)
    served.run(decision, buffer[:4].reshape(4, 1, 4)[:, 0], *rest)
    with pytest.raises(InputMismatch, match=r"'x' is laid out with strides \(1, 4\)"):
        served.run(decision, buffer[:4].t(), *rest)


def test_a_fixed_shape_keeps_the_strides_it_was_traced_with():
    table = torch.randn(5, 3).t()
    examples = ((torch.randn(7, 4).t().t(), torch.randint(9, (7, 3)).t(), table), {})
    served = prepare(Model(), config(), examples=examples, backend=strict_backend())
    assert [item.stride for item in served.compiled.plan.inputs] == [(), (), table.stride()]
    served.capture()
    for num_tokens in (3, 12):
        for given_table in (table, torch.randn(3, 5)):
            right_step(served, Model(), *inputs(num_tokens)[:2], given_table)


def test_an_engines_buffer_of_fixed_shape_and_other_strides_is_refused():
    buffers = {"table": torch.randn(5, 3).t()}
    with pytest.raises(InputMismatch, match=r"'table' is laid out with strides \(1, 3\)"):
        prepare(Model(), config(compiler="eager"), input_buffers=buffers)
