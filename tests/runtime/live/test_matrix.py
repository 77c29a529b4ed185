"""Every graph mode under every strategy gives the results of the plain model, bit for bit.

Outputs are poisoned before each replay and the padding of the input is NaN.
"""

import gc
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from piecegraph import Delayed, GraphMode, Lazy
from piecegraph.dispatch import CaptureStrategy

from ..conftest import tensors_alive

BATCHES = ((1,), (1, 1), (3,), (1,) * 7, (2, 5), (1,) * 8, (12,), (9, 1, 1), (1,) * 3, (6, 2))


@pytest.mark.parametrize("compiles", [True, False])
@pytest.mark.parametrize("strategy", CaptureStrategy)
@pytest.mark.parametrize("mode", GraphMode)
def test_failure_25_every_mode_and_strategy(serve, mode, strategy, compiles):
    serve = partial(serve, compile=compiles)
    if mode is GraphMode.FULL:
        # attention here reads nothing but buffers, so that any batch may be one graph
        served = serve(mode=mode, strategy=strategy, attention={"support": 3})
    else:
        served = serve(mode=mode, strategy=strategy)
    served.prepared.capture()
    used = {served.step(*lengths).split()[0] for _ in range(3) for lengths in BATCHES}
    expected = {mode.decode.name, mode.mixed.name, "NONE"}  # some batches are too large
    assert used == expected


@pytest.mark.slow
@given(data=st.data())
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_batches_over_any_plan(serve, data):
    sizes = sorted(data.draw(st.sets(st.integers(1, 16), min_size=1, max_size=4)))
    modes = st.sampled_from([mode for mode in GraphMode if mode is not GraphMode.FULL])
    strategies = (
        "eager",
        "delayed",
        Delayed(captures_per_step=2),
        "lazy",
        Lazy(captures_per_step=2),
    )
    served = serve(
        sizes,
        data.draw(modes),
        strategy=data.draw(st.sampled_from(strategies)),
        steps={"padding": {"x": data.draw(st.sampled_from(["zero", "repeat", "keep", 7.5]))}},
    ).capture()
    lengths = st.lists(st.integers(1, 16), min_size=1, max_size=16).filter(lambda n: sum(n) <= 16)
    decodes = st.integers(1, 16).map(lambda n: [1] * n)
    batches = data.draw(st.lists(st.one_of(lengths, decodes), min_size=1, max_size=8))
    for batch in batches:
        served.step(*batch)
    captured, used = served.captured(), served.backend.memory().used
    for _ in range(3):
        for batch in batches:
            served.step(*batch)
    if served.captured() == captured:
        assert served.backend.memory().used == used
    served.prepared.close()
    assert served.backend.memory().used == 0


@pytest.mark.parametrize("compiles", [True, False])
def test_memory_is_flat_while_serving(serve, compiles):
    served = serve(compile=compiles).capture()

    def serve_all():
        for lengths in BATCHES:
            served.step(*lengths)
        gc.collect()
        return tensors_alive()

    before = serve_all()
    assert {serve_all() for _ in range(3)} == {before}


@pytest.mark.parametrize("compiles", [True, False])
def test_failure_17_smaller_recordings_share_the_memory_of_the_largest(serve, compiles):
    serve = partial(serve, compile=compiles)
    alone, ladder = serve(sizes=(8,)), serve(sizes=(1, 2, 4, 8))
    for served in (alone, ladder):
        served.prepared.capture()
    assert ladder.backend.memory().used == alone.backend.memory().used > 0
    for lengths in BATCHES:
        ladder.step(*lengths)
