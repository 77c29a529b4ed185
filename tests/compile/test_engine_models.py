"""Models as engines write them: equal to their forward in PIECEWISE mode with poisoned memory.

What torch alone decides, such as the forms of norms and rotary embeddings, is in test_hf.py; what
no graph can be is in test_guarded_models.py and test_trace_errors.py.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from piecegraph import Batch, Config, ReplayBackend, ReplayOptions, prepare

from .engine_models import MODELS

pytestmark = pytest.mark.compile


def arguments(model, tokens, num_reqs):
    """Inputs of a step, nested as the forward takes them."""
    sizes = {"num_tokens": tokens, "num_reqs": num_reqs}
    given = {}
    for name, spec in model.inputs.items():
        dtype, dims = spec.removesuffix("]").split("[")
        shape = [sizes.get(dim) or int(dim) for dim in dims.split(", ")]
        value = torch.randn(shape) if dtype == "float32" else torch.randperm(*shape) % 3
        if name == "slots":
            value = torch.randperm(70)[:tokens]
        outer, _, inner = name.partition(".")
        if inner:
            given.setdefault(outer, {})[inner] = value
        else:
            given[name] = value
    return given


@pytest.mark.parametrize("name", MODELS)
def test_model_of_an_engine_equals_its_forward(name):
    model = MODELS[name]
    module = model.build()
    config = Config(
        inputs=model.inputs,
        splitting_ops=model.splits,
        steps={"padding": model.padding},
        max_num_tokens=16,
        max_num_reqs=8,
        capture_sizes=(4, 16),
        graph_mode="PIECEWISE",
        compiler="eager",
        cache=False,
    )
    backend = ReplayBackend(ReplayOptions(poison_before_replay=True, fail_on_moved_inputs=True))
    served = prepare(module, config, backend=backend)
    served.capture()
    for tokens in (1, 3, 4, 7, 16):
        num_reqs = min(tokens, 3)
        given = arguments(model, tokens, num_reqs)
        with torch.no_grad():
            expected = module(**given)
        actual = served(**given, batch=Batch(tokens, num_reqs))
        torch.testing.assert_close(actual, expected, rtol=2e-3, atol=2e-4)


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
