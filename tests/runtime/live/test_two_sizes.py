"""Graphs for two sizes: images in a batch, and patches in an image."""

import pytest
import torch
from torch import nn

from piecegraph import Axis, Batch

from ..conftest import captured


def attend(qkv, num_patches, output):
    """Each image over the patches that it has."""
    query, key, value = qkv.chunk(3, -1)
    seen = torch.arange(qkv.shape[1]) < num_patches[:, None]
    scores = (query @ key.transpose(1, 2)).masked_fill(~seen[:, None], -1e30)
    output.copy_(scores.softmax(-1) @ value)


class Tower(nn.Module):
    """Images of different numbers of patches, each padded to the largest one of the batch."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.places = nn.Linear(12, 8), nn.Embedding(32, 8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.requires_grad_(False)

    def forward(self, patches, places, num_patches):
        x = self.embed(patches) + self.places(places)
        output = torch.empty_like(x)
        torch.ops.two_sizes.attend(self.qkv(x), num_patches, output)
        return x + self.out(output)


@pytest.fixture(scope="module")
def prepared(temporary_op):
    schema = "(Tensor qkv, Tensor num_patches, Tensor(a!) output) -> ()"
    op = temporary_op("two_sizes::attend", schema, attend)
    inputs = {"patches": "float32[num_tokens, patches, 12]", "num_patches": "int64[num_tokens]"}
    inputs["places"] = "int64[num_tokens, patches]"
    settings = {
        "tracing": {"symbol_limits": {"patches": (1, 16)}},
        "variants": {"axes": (Axis("patches", (4, 8, 16), rounds_up=True),)},
        "splitting_ops": (op,),
        "graph_mode": "FULL_AND_PIECEWISE",
    }
    prepared = captured(Tower(), 4, inputs=inputs, capture_sizes=(1, 2, 4), **settings)
    yield prepared
    prepared.close()


def images(*lengths):
    """Patches, places and numbers of patches of one image for each of `lengths`."""
    form = (len(lengths), max(lengths))
    return torch.randn(*form, 12), torch.randint(32, form), torch.tensor(lengths)


def run(prepared, *lengths, **batch):
    """The decision of a step; its result is that of each image alone."""
    given = images(*lengths)
    count, most = len(lengths), max(lengths)
    decision = prepared.dispatch(Batch(count, count, axes={"patches": most}, **batch))
    result = prepared.run(decision, *given)
    assert result.shape == (count, most, 8)
    for row, length in enumerate(lengths):
        alone = [given[0][row : row + 1, :length], given[1][row : row + 1, :length]]
        expected = Tower()(*alone, torch.tensor([length]))[0]
        torch.testing.assert_close(result[row, :length], expected)
    return decision


def test_there_is_a_graph_for_each_number_of_images_and_of_patches(prepared):
    captured = {
        (entry.mode.name, entry.descriptor.num_tokens, dict(entry.descriptor.axes)["patches"])
        for entry in prepared.dispatcher.plan.entries
    }
    both = [(count, patches) for count in (1, 2, 4) for patches in (4, 8, 16)]
    assert captured == {(mode, *size) for mode in ("FULL", "PIECEWISE") for size in both}
    assert len(prepared.report()["captures"]) == len(captured)


@pytest.mark.parametrize(
    ("lengths", "padded"),
    [((4,), (1, 4)), ((3, 1), (2, 4)), ((5, 8, 2), (4, 8)), ((16, 9, 1, 1), (4, 16))],
)
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_a_batch_is_padded_to_both_sizes_of_its_graph(prepared, lengths, padded, mode):
    uniform = {"is_decode": True, "query_len": 1} if mode == "FULL" else {}
    for _ in range(2):  # the second step finds padding of the first
        decision = run(prepared, *lengths, **uniform)
        descriptor = decision.descriptor
        assert decision.mode.name == mode
        assert (descriptor.num_tokens, dict(descriptor.axes)["patches"]) == padded


def test_larger_and_smaller_images_follow_each_other(prepared):
    for lengths in [(16,) * 4, (1,), (9, 2), (4, 4, 4), (1, 2, 3, 4), (16, 1)]:
        run(prepared, *lengths)
