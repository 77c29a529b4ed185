"""Models as engines write them: equal in PIECEWISE mode with poisoned memory, or refused."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from piecegraph import Batch, Config, PiecegraphError, ReplayBackend, ReplayOptions, prepare

from . import engine_models  # noqa: F401  they add to MODELS
from .engine_parts import MODELS
from .models import marked_line

pytestmark = pytest.mark.compile

SIZES = (1, 3, 4, 7, 16)
QUICK = {
    "cache_written_in_a_piece",
    "experts_sorted",
    "int4_weights_as_a_subclass",
    "lora_op_with_a_list",
    "mla_with_slice_assignment",
    "pipeline_stage",
    "rows_that_are_sampled",
    "value_on_the_host",
    "vision_tower",
}
"""One of each kind is in every run."""


def prepared(model):
    used = {"num_image_tokens": (1, 16)} if "num_image_tokens" in str(model.inputs) else {}
    config = Config(
        inputs=model.inputs,
        splitting_ops=model.splits,
        tracing={"symbol_limits": used, **model.settings.get("tracing", {})},
        max_num_tokens=16,
        max_num_reqs=8,
        capture_sizes=(4, 16),
        graph_mode="PIECEWISE",
        compiler="eager",
        cache=False,
        **{name: value for name, value in model.settings.items() if name != "tracing"},
    )
    backend = ReplayBackend(ReplayOptions(poison_before_replay=True, fail_on_moved_inputs=True))
    module = model.build()
    return module, prepare(module, config, backend=backend)


def arguments(model, tokens):
    """Inputs of a step, nested as the forward takes them, and its number of requests."""
    num_reqs = min(tokens, 3)
    sizes = {"num_tokens": tokens, "num_reqs": num_reqs, "num_image_tokens": 1}
    given = {}
    for name, spec in model.inputs.items():
        dtype, dims = spec.removesuffix("]").split("[")
        shape = [sizes.get(dim) or int(dim) for dim in dims.split(", ")]
        value = torch.randn(shape)
        if dtype == "int64":
            value = torch.arange(value.numel()).view(shape) % 3 if tokens < 3 else (
                torch.randperm(value.numel()).view(shape) % min(tokens, 3))  # fmt: skip
        if name == "slots":
            value = torch.randperm(70)[:tokens]
        outer, _, inner = name.partition(".")
        if inner:
            given.setdefault(outer, {})[inner] = value
        else:
            given[name] = value.bool() if dtype == "bool" else value
    return given, num_reqs


def cases(*, refused):
    return [
        pytest.param(model, id=name, marks=[] if name in QUICK else pytest.mark.heavy)
        for name, model in MODELS.items()
        if (model.refused is not None) == refused
    ]


@pytest.mark.parametrize("model", cases(refused=False))
def test_model_of_an_engine_equals_its_forward(model):
    module, served = prepared(model)
    served.capture()
    for tokens in SIZES:
        torch.manual_seed(tokens)
        given, num_reqs = arguments(model, tokens)
        with torch.no_grad():
            expected = module(**given)
        actual = served(**given, batch=Batch(tokens, num_reqs))
        torch.testing.assert_close(leaves(actual), leaves(expected), rtol=2e-3, atol=2e-4)
        assert type(actual) is type(expected)


def leaves(result):
    if isinstance(result, Tensor):
        return [result]
    values = result if isinstance(result, (list, tuple)) else (
        result.values() if isinstance(result, dict) else vars(result).values())  # fmt: skip
    return [leaf for value in values for leaf in leaves(value)]


@pytest.mark.parametrize("model", cases(refused=True))
def test_model_that_is_no_graph_is_refused_at_its_line(model):
    with pytest.raises(PiecegraphError) as caught:
        prepared(model)
    assert type(caught.value) is model.refused
    file = model.forward.__code__.co_filename
    assert f"{file}:{marked_line(model.forward, '# here')}" in str(caught.value)


@pytest.mark.heavy
def test_two_ranks_of_a_tensor_parallel_model(tmp_path):
    """Functional collectives of gloo inside of pieces."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.compile.tensor_parallel", str(tmp_path)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "2"], cwd=root, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    results = [rank.communicate(timeout=300) for rank in ranks]
    for out, error in results:
        assert out.split() == ["FULL", "PIECEWISE"], error
