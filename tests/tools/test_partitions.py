"""The reference decoder, its code partitioned by Inductor at the attention op."""

from __future__ import annotations

import pytest
import torch

from piecegraph import AttentionSupport, Config, Events, GraphMode, prepare
from piecegraph.runtime.backends.replay import ReplayBackend, ReplayOptions
from piecegraph.runtime.graphs.recording import SegmentKind
from piecegraph.tools.engine.engine import Engine
from piecegraph.tools.explain.collect import pieces as explained
from piecegraph.tools.serve.verify import Verifier

pytestmark = [
    pytest.mark.compile,
    pytest.mark.heavy,  # tests/runtime/live/test_partitions.py, with an engine
    pytest.mark.filterwarnings("default::DeprecationWarning", "default::FutureWarning"),
]

LAYERS = 2
GRAPH, EAGER = SegmentKind.GRAPH, SegmentKind.EAGER


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("partitions")


@pytest.fixture
def serve(make_world, make_requests, cache):
    """Serve three requests in a mode, every step compared with the eager model; everything that
    may be poisoned is."""

    def serve(mode):
        world, events = make_world(), Events()
        config = Config(
            splitting_ops=("piecegraph_reference::paged_attention",),
            codegen={"inductor_partition": True},
            inputs={"input_ids": "int64[num_tokens]", "positions": "int64[num_tokens]"},
            max_num_tokens=12,
            max_num_reqs=4,
            capture_sizes=(1, 2, 4, 8),
            graph_mode=mode,
            attention={"support": AttentionSupport.UNIFORM_SINGLE_TOKEN_DECODE},
            cache_dir=cache,
        )
        backend = ReplayBackend(ReplayOptions(poison_before_replay=True, fail_on_moved_inputs=True))
        prepared = prepare(world.model, config, layers=world.layers, backend=backend, events=events)
        prepared.capture(world.buffers.padding)
        prepared.seal()
        verifier = Verifier(
            prepared, world.model, world.layers, clock=world.clock, tolerance=1e-4, every=1
        )
        engine = Engine(
            prepared,
            world.model.logits,
            world.scheduler,
            world.buffers,
            clock=world.clock,
            device=torch.device("cpu"),
            run=verifier.run,
        )
        requests = make_requests((7, 5), (4, 6), (2, 9))
        for _ in engine.serve(requests):
            pass
        assert verifier.result.mismatch is None
        assert verifier.result.steps == len(engine.log.steps)
        return prepared, {step.mode for step in engine.log.steps}

    return serve


@pytest.mark.parametrize(
    ("mode", "used"),
    [
        (GraphMode.NONE, {"NONE"}),
        (GraphMode.PIECEWISE, {"NONE", "PIECEWISE"}),
        (GraphMode.FULL_AND_PIECEWISE, {"NONE", "PIECEWISE", "FULL"}),
    ],
)
def test_steps_are_those_of_the_eager_model_in_every_mode(serve, mode, used):
    prepared, modes = serve(mode)
    assert modes == used
    assert prepared.compiled.plan.partitions() == LAYERS + 1
    pieces = prepared.report()["pieces"]
    assert (pieces["partitions"], pieces["segments"]) == (LAYERS + 1, 2 * LAYERS + 1)
    (row,) = explained(prepared)
    assert row["made"] in ("compiled in 3 partitions", "loaded in 3 partitions")
    for slot, recording in prepared.recordings():
        kinds = [segment.kind for segment in recording.segments]
        piecewise = prepared.dispatcher.plan.entries[slot].mode.name == "PIECEWISE"
        assert kinds == ([GRAPH, EAGER] * LAYERS + [GRAPH] if piecewise else [GRAPH])
