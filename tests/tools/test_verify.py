"""The verifier finds a wrong row, a wrong write and a NaN, names them, and changes nothing."""

import pytest
import torch

from piecegraph.compile.guards.tolerance import Excess
from piecegraph.tools.engine import serving_log as clock
from piecegraph.tools.serve import verify
from piecegraph.tools.serve.verify import Verifier

LENGTHS = ((13, 5), (4, 6), (2, 9))


@pytest.fixture
def serve(make_world, make_requests):
    """Serve three requests, each step through `fault(step, output, world)`; returns the result."""

    def serve(fault=lambda step, output, world: output, every=1):
        world = make_world()
        run, steps = world.prepared.run, iter(range(1000))

        def faulty(decision, *inputs, metadata):
            output = run(decision, *inputs, metadata=metadata)
            return fault(next(steps), output, world)

        world.prepared.run = faulty
        given = world.prepared, world.model, world.layers
        verifier = Verifier(*given, clock=world.clock, every=every)
        world.engine.run = verifier.run
        return verifier.result, world, world.serve(make_requests(*LENGTHS))

    return serve


def test_right_steps_are_verified(serve):
    result, world, _ = serve()
    assert result.ok
    assert result.steps == len(world.engine.log.steps)
    assert 0 <= result.max_abs_diff < 1e-5


def test_verifying_changes_nothing(serve, make_world, make_requests):
    _, _, verified = serve()
    assert verified == make_world().serve(make_requests(*LENGTHS))


def test_a_sample_has_the_first_step_of_each_mode_and_size(serve):
    result, world, _ = serve(every=10_000)
    steps = world.engine.log.steps
    kinds = {(step.mode, step.mode != "NONE" and step.padded_tokens) for step in steps}
    assert result.steps == len(kinds) < len(steps)


def test_a_wrong_row_is_named_with_step_mode_and_descriptor(serve):
    def fault(step, output, world):
        if step == 3:
            output[1:] += 0.5
        return output

    result, world, _ = serve(fault)
    assert not result.ok
    step = world.engine.log.steps[3]
    assert (result.mismatch.step, result.mismatch.mode) == (3, step.mode)
    assert result.mismatch.descriptor.num_tokens == step.padded_tokens
    assert "row 1 differs by 0.5" in result.mismatch.what
    assert result.max_abs_diff == pytest.approx(0.5, abs=1e-4)


def test_nan_is_a_mismatch(serve):
    result, _, _ = serve(lambda step, output, _: output * torch.nan if step == 2 else output)
    assert not result.ok
    assert result.mismatch.step == 2
    assert result.max_abs_diff < 1e-4


def test_a_missing_row_is_a_mismatch(serve):
    result, _, _ = serve(lambda step, output, _: torch.cat((output, output[-1:])))
    assert result.mismatch.what.startswith("shape")


@pytest.mark.parametrize("layer", ["layers.0.attention", "layers.1.attention"])
def test_failure_29_a_write_to_another_requests_slot_is_found(serve, layer):
    def fault(step, output, world):
        if step == 4:
            block = world.scheduler.blocks.table(0)[0]
            world.layers[layer].values[block, 0] = 7.0
        return output

    result, _, _ = serve(fault)
    assert result.mismatch.step == 4
    assert f"{layer} wrote to cache slot" in result.mismatch.what


def test_steps_of_which_rounding_leaves_nothing_are_counted(serve, monkeypatch):
    monkeypatch.setattr(verify, "compare", lambda *_: Excess(0, 0, 9.0, 9.0, "why"))
    result, _, _ = serve(lambda step, output, world: output * 2)
    assert result.ok
    assert result.not_compared == result.steps > 0


def test_the_clock_stands_still_meanwhile(serve, monkeypatch):
    seconds = [0.0]
    eager = verify.run_eagerly

    def slow(*args):
        seconds[0] += 10
        return eager(*args)

    monkeypatch.setattr(clock.time, "perf_counter", lambda: seconds[0])
    monkeypatch.setattr(verify, "run_eagerly", slow)
    result, world, _ = serve()
    assert seconds[0] == 10 * result.steps > 0
    assert all(step.seconds == 0 for step in world.engine.log.steps)
