"""A step's inputs and outputs: any form, any dynamic dimension, padding as declared."""

import pytest
import torch
from torch import nn

from piecegraph import Batch, prepare
from piecegraph.errors import (
    BatchExceeded,
    InputMismatch,
    InvalidSetting,
    MovedTensor,
    SizeOutOfRange,
)

from ..conftest import found_by, small_config, strict_backend

DECODE = Batch(3, 3, is_decode=True, query_len=1)


class Everything(nn.Module):
    """Dynamic in dimension 0, 1 and another symbol; one input unused, one passed through."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.rand(32, 4), requires_grad=False)

    def forward(self, ids, positions, lengths, unused, *, hidden, factor=2.0):
        x = self.table[ids] + positions.sum(0)[:, None] + hidden["x"]
        return {"x": x, "pair": (x.t() * factor, lengths + 1), "ids": ids}


CONFIG = small_config(
    inputs={
        "ids": "int64[num_tokens]",
        "positions": "int64[3, num_tokens]",
        "lengths": "int64[num_reqs]",
        "hidden.x": "float32[num_tokens, 4]",
    },
    tracing={"symbol_limits": {"num_reqs": (1, 8)}},
    capture_sizes=(4, 8),
    steps={"padding": {"ids": 31, "positions": "repeat", "lengths": "keep", "unused": "zero"}},
)


def arguments(num_tokens, num_reqs):
    ids = torch.randint(32, (num_tokens,))
    positions = torch.randint(9, (3, num_tokens))
    lengths = torch.randint(9, (num_reqs,))
    return (ids, positions, lengths, torch.zeros(99)), {"hidden": {"x": torch.randn(num_tokens, 4)}}


@pytest.fixture(scope="module")
def both():
    model = Everything()
    prepared = prepare(model, CONFIG, examples=arguments(5, 3), backend=strict_backend())
    prepared.capture()
    return prepared, model


@pytest.mark.parametrize(("num_tokens", "num_reqs"), [(1, 1), (3, 2), (4, 4), (7, 3), (8, 8)])
def test_everything_keeps_its_form(both, num_tokens, num_reqs):
    prepared, model = both
    args, kwargs = arguments(num_tokens, num_reqs)
    decision = prepared.dispatch(Batch(num_tokens, num_reqs))
    assert decision.mode.name == "FULL"
    got = prepared.run(decision, *args, **kwargs)
    expected = model(*args, **kwargs)
    assert list(got) == list(expected)
    assert isinstance(got["pair"], tuple)
    torch.testing.assert_close((got["x"], got["pair"]), (expected["x"], expected["pair"]))
    assert torch.equal(got["ids"], args[0])
    names = ("ids", "positions", "lengths")
    by_name = prepared.run(
        decision, **dict(zip(names, args, strict=False)), unused=args[3], **kwargs
    )
    assert torch.equal(by_name["x"], expected["x"])


def test_failure_25_padding_is_what_the_config_says(both):
    prepared, _ = both
    args, kwargs = arguments(3, 2)
    decision = prepared.dispatch(Batch(3, 2))
    prepared.run(decision, *args, **kwargs)
    paths = [".".join(map(str, item.path)) for item in prepared.compiled.plan.inputs]
    views = prepared._core.dummies.inputs(decision.graph_index).views
    inputs = dict(zip(paths, views, strict=True))
    ids, positions, hidden = inputs["ids"], inputs["positions"], inputs["hidden.x"]
    assert ids[3] == 31
    assert torch.equal(positions[:, 3], args[1][:, 2])
    assert hidden[3].tolist() == [0.0] * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": torch.zeros(3, dtype=torch.int32)}, "'ids' is torch.int32"),
        ({"ids": torch.zeros(3, 1, dtype=torch.int64)}, "'ids' is torch.int64 \\(3, 1\\)"),
        ({"positions": torch.zeros(2, 3, dtype=torch.int64)}, "'positions' is"),
        ({"positions": torch.zeros(3, 2, dtype=torch.int64)}, "'positions' is"),
        (
            {"hidden": {"x": torch.zeros(3, 5)}},
            r"'hidden.x' is .*prepared for torch.float32 \(num_tokens, 4\)",
        ),
        ({"ids": torch.zeros(3, dtype=torch.int64, device="meta")}, "on meta"),
        ({"ids": [1, 2, 3]}, "'ids' is list"),
    ],
)
def test_a_wrong_input_is_refused_by_name(both, change, message):
    prepared, _ = both
    (ids, positions, lengths, unused), kwargs = arguments(3, 2)
    given = {"ids": ids, "positions": positions, "lengths": lengths, "unused": unused} | kwargs
    for _ in range(2):  # also once a form of these sizes is known
        with pytest.raises(InputMismatch, match=message):
            prepared.run(prepared.dispatch(Batch(3, 2)), **given | change)
        prepared.run(prepared.dispatch(Batch(3, 2)), **given)


def test_a_batch_beyond_its_decision_or_the_model_is_refused(both):
    prepared, _ = both
    decision = prepared.dispatch(Batch(4, 2))
    for num_tokens, error in ((5, BatchExceeded), (9, SizeOutOfRange)):
        args, kwargs = arguments(num_tokens, 2)
        with pytest.raises(error, match=f"num_tokens = {num_tokens}") as caught:
            prepared.run(decision, *args, **kwargs)
        assert ("dispatched batch has at most 4" in str(caught.value)) == (num_tokens == 5)


def test_a_padding_policy_for_what_is_no_parameter_is_refused():
    with pytest.raises(InvalidSetting, match="'idds'"):
        prepare(
            Everything(),
            CONFIG.changed(steps={"padding": {"idds": "zero"}}),
            examples=arguments(5, 3),
        )


def test_buffers_of_the_engine_are_read_where_they_are(serve):
    buffer = torch.randn(16, 4)
    served = serve(input_buffers={"x": buffer}).capture()
    for num_tokens in (3, 2, 8):
        batch = served.batch(*[1] * num_tokens)
        decision = served.prepared.dispatch(batch)
        buffer.copy_(torch.randn(16, 4))
        expected = served.expected(buffer[:num_tokens].clone())
        assert torch.equal(served.prepared.run(decision, buffer[:num_tokens]), expected)
        assert decision.mode.name == "FULL"
    for _, recording in served.prepared.recordings():
        assert buffer.data_ptr() in [found.data_ptr() for found in found_by(recording.ownership)]


def test_failure_12_a_copy_of_the_engines_buffer_is_an_error(serve):
    buffer = torch.randn(16, 4)
    served = serve(input_buffers={"x": buffer}).capture()
    with pytest.raises(MovedTensor, match="input 'x'"):
        served.prepared(buffer[:3].clone(), batch=DECODE)
    assert torch.equal(served.prepared(buffer[:3], batch=DECODE), served.expected(buffer[:3]))
