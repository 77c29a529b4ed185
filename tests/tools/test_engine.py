"""The engine serves what a plain forward over the whole sequence would generate."""

import math
from collections import Counter

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from piecegraph import Config, prepare
from piecegraph.tools.engine.attention import SPLITTING_OP
from piecegraph.tools.engine.engine import ReferenceEngine
from piecegraph.tools.engine.model import ImageDecoder, rotate
from piecegraph.tools.engine.overlap import OverlappingEngine


def dense_forward(model, tokens, rows=None):
    """Hidden states of one sequence, without cache, op or batch."""
    positions = torch.arange(len(tokens))
    cos, sin = model.cos[positions][:, None], model.sin[positions][:, None]
    x = model.embedding(torch.tensor(tokens))
    if rows is not None:
        x[: len(rows)] += rows
    for layer in model.layers:
        part, h = layer.attention, layer.attention_norm(x)
        query, key, value = (
            projection(h).view(len(tokens), -1, part.head_dim)
            for projection in (part.q_proj, part.k_proj, part.v_proj)
        )
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        key, value = (t.repeat_interleave(2, dim=1).transpose(0, 1) for t in (key, value))
        mask = torch.ones(len(tokens), len(tokens)).tril().bool()
        scores = query.transpose(0, 1) @ key.transpose(1, 2) / math.sqrt(part.head_dim)
        weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
        x = x + part.o_proj((weights @ value).transpose(0, 1).flatten(1))
        x = x + layer.mlp(layer.mlp_norm(x))
    return model.norm(x)


def assert_greedy(model, request):
    """Each generated token is the best one, or as good as the best up to rounding."""
    logits = model.logits(dense_forward(model, request.tokens, request.image_rows))
    for place in range(request.num_prompt, len(request.tokens)):
        scores = logits[place - 1]
        assert scores[request.tokens[place]] >= scores.max() - 1e-4


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 10)), min_size=1, max_size=6),
    st.integers(9, 40),
)
def test_every_generated_token_is_the_plain_models(make_world, make_requests, lengths, num_blocks):
    world = make_world(num_blocks=num_blocks)
    requests = make_requests(*lengths)
    completed = [r for done in world.engine.serve(requests) for r in done]
    assert {r.id for r in completed} == {r.id for r in requests}
    for request in requests:
        assert_greedy(world.model, request)


def test_preemption_changes_no_token(make_world, make_requests):
    lengths = [(10, 8), (12, 8), (9, 8)]
    tight, roomy = make_world(num_blocks=9), make_world()
    served = {}
    for world in (tight, roomy):
        served[world is tight] = world.serve(make_requests(*lengths))
    assert sum(step.num_preempted for step in tight.engine.log.steps) > 0
    assert served[True] == served[False]


def test_the_batch_states_facts_about_the_phase(make_world, make_requests):
    world = make_world()
    world.serve(make_requests((13, 3)))
    facts = [(b.num_tokens, b.num_reqs, b.is_decode, b.query_len) for b in world.prepared.batches]
    assert facts == [(12, 1, False, None), (1, 1, False, None), (1, 1, True, 1), (1, 1, True, 1)]


def test_each_step_and_each_token_is_recorded(make_world, make_requests):
    world = make_world()
    world.serve(make_requests((3, 4), (2, 1)))
    steps = world.engine.log.steps
    assert [(s.mode, s.num_tokens, s.padded_tokens) for s in steps] == [
        ("PIECEWISE", 5, 8),
        ("FULL", 1, 1),
        ("FULL", 1, 1),
        ("FULL", 1, 1),
    ]
    times = world.engine.log.token_times
    assert [len(times[0]), len(times[1])] == [4, 1]
    assert times[0] == sorted(times[0])


def test_idle_time_is_skipped_and_arrivals_are_waited_for(make_world, make_requests):
    world = make_world()
    requests = make_requests((3, 2), (3, 2))
    requests[1].arrival = 3600.0
    idle = []
    world.prepared.parts.proof.idle = lambda: idle.append(world.clock.now())
    world.serve(requests)
    times = world.engine.log.token_times
    assert times[0][0] < 60
    assert 3600 <= times[1][0] < 3660
    (moment,) = idle
    assert moment < 3600
    world.clock.skip_to(0)  # never back
    assert world.clock.now() >= 3600


def test_failure_12_metadata_keeps_its_addresses(make_world, make_requests):
    world = make_world()
    addresses = set()
    run = world.prepared.run

    def watch(decision, *inputs, metadata):
        tensors = (metadata.slot_mapping, metadata.block_table, metadata.seq_lens)
        addresses.add(tuple(tensor.data_ptr() for tensor in tensors))
        return run(decision, *inputs, metadata=metadata)

    world.engine.run = watch
    world.serve(make_requests((13, 5), (4, 6), (2, 9)))
    assert len(addresses) == 1


def test_failure_30_metadata_is_sized_for_the_padded_batch(make_world, make_requests):
    world = make_world()
    run = world.prepared.run

    def check(decision, *inputs, metadata):
        assert len(metadata.slot_mapping) == decision.descriptor.num_tokens
        real = sum(metadata.query_lens)
        assert (metadata.slot_mapping[real:] == 0).all()
        assert (metadata.seq_lens[len(metadata.query_lens) :] == 0).all()
        assert (metadata.block_table[len(metadata.query_lens) :] == 0).all()
        return run(decision, *inputs, metadata=metadata)

    world.engine.run = check
    world.serve(make_requests((3, 2), (3, 6), (2, 9), (1, 9)))


@pytest.mark.compile
@pytest.mark.parametrize(
    "kind", [ReferenceEngine, pytest.param(OverlappingEngine, marks=pytest.mark.heavy)]
)
def test_steps_with_images_and_without_have_graphs_of_their_own(make_world, make_requests, kind):
    world = make_world(num_blocks=11)
    model = ImageDecoder(world.model)
    config = Config(
        inputs=model.call_forms(), splitting_ops=(SPLITTING_OP,), max_num_tokens=12,
        max_num_reqs=4, capture_sizes=(1, 2, 4, 8), attention={"support": "UNIFORM_BATCH"},
        compiler="eager", cache=False, steps={"after_seal": "raise"},
    )  # fmt: skip
    prepared = prepare(model, config, layers=world.layers)
    assert prepared.report()["counters"]["dynamo_traces"] == 2
    prepared.capture(world.buffers.padding)
    prepared.seal()
    world.engine = kind(prepared, world.model.logits, world.scheduler, world.buffers, world.clock)
    ran = Counter()

    def run(decision, *inputs, metadata):
        ran[f"{decision.mode.name} {len(inputs)}"] += 1
        return prepared.run(decision, *inputs, metadata=metadata)

    world.engine.run = run
    requests = make_requests((3, 7), (15, 5), (4, 8), (2, 9), (1, 5))
    for request in requests[::2]:
        request.image_rows = torch.randn(len(request.tokens), 16) * 3
    world.serve(requests)
    assert sum(step.num_preempted for step in world.engine.log.steps) > 0
    assert {"PIECEWISE 2", "PIECEWISE 3", "FULL 2"} <= {*ran}
    assert prepared.report()["pieces"]["unique"] < prepared.report()["pieces"]["total"]
    for request in requests:
        assert_greedy(world.model, request)
    requests[2].image_rows *= 0  # what the tokens do not depend on would not be noticed
    with pytest.raises(AssertionError):
        assert_greedy(world.model, requests[2])
    prepared.close()
