"""Results whose sizes, or sizes that are results, are not one expression of those of the batch."""

import pytest
import torch
from torch import nn

from piecegraph import Batch, prepare
from piecegraph.errors import ResultFormUnknown, ReturnsShape

from ..conftest import small_config, strict_backend

pytestmark = pytest.mark.compile

TABLE = torch.randn(8, 4)
FORMS = {
    "at most": lambda x: x[:4] * 2,
    "at least": lambda x: nn.functional.pad(x, (0, 0, 0, max(0, 8 - len(x)))),
    "a table": lambda x: (x * 2, TABLE[: len(x)] * 1),
    "one expression": lambda x: (x * 2, x.repeat_interleave(2, 0), TABLE * 2),
}


class Formed(nn.Module):
    def __init__(self, form):
        super().__init__()
        self.form = form

    def forward(self, x):
        return self.form(x)


@pytest.mark.parametrize("form", FORMS)
def test_rows_are_cut_only_where_the_form_is_the_same_for_all_sizes(form):
    config = small_config(16, compile=False, capture_sizes=(1, 2, 4, 8, 16))
    prepared = prepare(Formed(FORMS[form]), config, backend=strict_backend())
    prepared.capture()
    modes = set()
    for n in range(1, 17):
        x = torch.randn(n, 4)
        decision = prepared.dispatch(Batch(n, n, is_decode=True, query_len=1))
        modes.add((n, decision.mode.name, decision.descriptor.num_tokens))
        torch.testing.assert_close(prepared.run(decision, x), FORMS[form](x))
    assert (16, "FULL", 16) in modes
    assert ((3, "FULL", 4) in modes) == (form == "one expression")


def test_values_that_are_other_ones_for_some_sizes_are_refused():
    def form(x):
        return x * 2, min(x.shape[0], 4)

    config = small_config(16, compile=False)
    with pytest.raises(ResultFormUnknown, match="other values beside its tensors"):
        prepare(Formed(form), config, backend=strict_backend())


def test_values_that_only_a_step_has_are_refused_there():
    model = Formed(lambda x: (x * 2, model.name))
    model.name = "first"
    config = small_config(16, compile=False, graph_mode="NONE")
    prepared = prepare(model, config, backend=strict_backend())
    assert prepared(torch.ones(2, 4), batch=Batch(2, 1))[1] == "first"
    model.name = "second"
    with pytest.raises(ResultFormUnknown, match="other values beside its tensors"):
        prepared(torch.ones(2, 4), batch=Batch(2, 1))


SIZES = {
    "size": lambda x: x.size(),
    "of a result": lambda x: (x * 2).shape,
    "a part": lambda x: x.shape[:1],
    "a new one": lambda x: torch.Size([x.shape[0] * 2, 8]),
    "as a tuple": lambda x: tuple(x.shape),
}


@pytest.mark.parametrize("sizes", SIZES)
def test_sizes_that_a_traced_model_returns_are_those_of_the_step(sizes):
    model = Formed(lambda x: {"y": x * 2, "sizes": SIZES[sizes](x)})
    prepared = prepare(model, small_config(16, graph_mode="NONE"), backend=strict_backend())
    for n in (3, 16, 1):
        x = torch.randn(n, 4)
        result = prepared(x, batch=Batch(n, 1))
        assert (result["sizes"], result["y"].shape) == (SIZES[sizes](x), x.shape)


def test_the_shape_of_an_argument_is_refused_as_a_result():
    """Dynamo reads it from the argument, which in a trace is the example."""
    model = Formed(lambda x: (x * 2, {"shape": x.shape}))
    with pytest.raises(ReturnsShape, match=r"tuple\(x\.shape\)"):
        prepare(model, small_config(16, graph_mode="NONE"), backend=strict_backend())
