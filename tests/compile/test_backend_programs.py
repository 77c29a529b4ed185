"""Programs that run with Inductor run with `torch.compile(backend="piecegraph")`."""

import importlib.util

import pytest

import piecegraph as pg

from .backend_programs import NEEDED, PROGRAMS, try_program

SAMPLE = ("add", "conv_pixels", "changing_int", "in_place_view", "graph_break")
MORE = (
    "dictionary", "returns_input", "only_numbers", "scatter", "strided", "positive", "vmap",
    "nonzero_count", "attention", "train_mlp", "autocast", "batch_norm_train", "optimizer",
)  # fmt: skip

pytestmark = [pytest.mark.compile, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize(
    "name", [*SAMPLE, *(pytest.param(name, marks=pytest.mark.heavy) for name in MORE)]
)
def test_programs(name):
    """Pieces that Dynamo's own backend runs: what is adopted, split and handed on is right."""
    strict = name in ("add", "conv_pixels")  # sizes without an upper bound, which were refused
    options = {"compiler": "eager", "cache": False, "strict": strict}
    assert try_program(name, "piecegraph", options) is None


@pytest.mark.heavy
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_under_inductor(name, tmp_path):
    """Right, or wrong with Inductor alone too; what was stored gives the same when it is loaded."""
    for package in NEEDED.get(name.partition("_")[0], ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: {name} is not tried")
    compiles = []
    for _ in range(2):
        events = pg.Events()
        options = {"events": events, "cache_dir": tmp_path}
        fault = try_program(name, "piecegraph", options)
        if fault is not None:
            alone = try_program(name, "inductor", {})
            assert alone is not None, fault
            return
        compiles.append(events.counters["inductor_compiles"])
        stored = not events.named("artifact.not_kept") and not events.named("backend.fallback")
    assert not stored or compiles[1] == 0
