"""Forecast, pruning, limits and eviction on pools whose bytes are modeled."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from piecegraph.dispatch import GraphMode, RuntimeMode, make_plan
from piecegraph.runtime.capture.graph_set import GraphSet
from piecegraph.runtime.core.exchange import single_rank
from piecegraph.runtime.core.records import Records
from piecegraph.runtime.parts.strategies import graph_memory
from piecegraph.runtime.parts.strategies.admitted import worth
from piecegraph.runtime.parts.strategies.forecast import Forecast, ModeForecast, fit
from piecegraph.runtime.parts.strategies.graph_memory import GraphMemory, graph_of, prune

FULL = RuntimeMode.FULL
GRAPH = 1000
OPTIONS = {"graph_bytes": GRAPH}
LADDER = (1, 2, 4, 8, 16, 24, 32)


def ladder(make, memory_limit=None, strategy="eager", **options):
    """The small model with graphs of many sizes, each of which takes some bytes, within a limit."""
    options, steps = {**OPTIONS, **options}, {"memory_limit": memory_limit}
    return make(LADDER, strategy=strategy, steps=steps, options=options).capture()


def facts(served, event):
    return dict(served.prepared.events.named(event)[-1].facts)


def test_own_bytes_are_what_later_captures_add_and_the_rest_is_shared():
    forecast = fit([(64, 900), (32, 42), (2, 12)], alone=62)
    assert forecast.own == ((2, 12.0), (32, 42.0), (64, 74.0))
    assert forecast.shared == ((2, 50.0), (64, 826.0))
    assert fit([(64, 900), (2, 12)]).own == ((2, 12.0), (64, 12.0))
    assert Forecast({FULL: fit([(64, 900)])}).total([(FULL, 64)]) == 900
    exact = Forecast({FULL: forecast})
    assert exact.total([(FULL, 64), (FULL, 32), (FULL, 2)]) == 900 + 42 + 12
    assert exact.total([(FULL, 2)]) == 62
    assert exact.growth((FULL, 2), [(FULL, 64)]) == 12
    assert exact.growth((FULL, 64), [(FULL, 2)]) == 900 - 50


def test_graphs_of_a_mode_without_a_forecast_count_as_used_only():
    """A change of the plan may add a mode of which nothing was probed."""
    plan = make_plan(GraphMode.FULL_AND_PIECEWISE, (4, 8, 16), max_num_reqs=16)
    index = {graph_of(plan, graph_index): graph_index for graph_index in range(6)}
    memory = GraphMemory(plan)
    memory.limit, memory.forecast = 1000, Forecast({FULL: fit([(4, 900), (4, 42)], alone=62)})
    memory.took(index[RuntimeMode.PIECEWISE, 4], 300)
    memory.took(index[FULL, 4], 500)
    assert memory.used == 800
    assert memory.admits(index[RuntimeMode.PIECEWISE, 8])
    memory.took(index[RuntimeMode.PIECEWISE, 8], 300)
    assert not memory.admits(index[RuntimeMode.PIECEWISE, 16])


def test_several_graphs_of_one_size_count_as_the_largest_of_them():
    """LoRA cases and axes give a size several graphs."""
    forecast = Forecast({FULL: fit([(4, 900), (4, 42), (4, 12)], alone=62)})
    assert forecast.modes[FULL].own == ((4, 42.0),)
    assert forecast.total([(FULL, 4)] * 3) == 900 + 2 * 42
    mixed = Forecast({FULL: fit([(8, 900), (8, 42), (4, 30), (4, 20), (2, 12)], alone=62)})
    assert mixed.modes[FULL].own == ((2, 12.0), (4, 30.0), (8, 42.0))
    assert mixed.total([(FULL, 8), (FULL, 4)]) == 900 + 30


def test_vllm_44740_a_probe_that_gives_memory_back_makes_no_negative_forecast():
    forecast = Forecast({FULL: fit([(8, -900), (8, 42), (4, -30), (2, -12)], alone=-62)})
    assert all(forecast.total([(FULL, size)] * 2) >= 0 for size in (1, 2, 3, 4, 8))


def test_a_test_probe_off_the_line_is_the_margin_of_what_was_not_measured():
    straight = [(64, 900), (48, 58), (32, 42), (16, 26), (2, 12)]
    assert fit(straight).error == 0
    bent = Forecast({FULL: fit([(64, 900), (48, 58), (32, 42), (16, 1026), (2, 12)])})
    assert bent.margin([(FULL, 16), (FULL, 48)]) == 0
    assert bent.margin([(FULL, 8), (FULL, 16), (FULL, 40)]) == 2000


def test_failure_32_the_forecast_counts_the_shared_part_once(make):
    served = ladder(make, 10**9)
    told = facts(served, "memory.accuracy")
    assert told["actual"] == served.used
    assert told["forecast"] == pytest.approx(told["actual"], rel=0.1)
    assert facts(served, "memory.forecast")["bytes"] == told["forecast"]


def test_failure_34_probes_leave_nothing_in_the_pool(make):
    plain, served = ladder(make), ladder(make, 10**9)
    assert served.used == plain.used
    assert served.captures == plain.captures


def test_probes_are_released_even_if_their_recordings_are_held(make, monkeypatch):
    served = make(LADDER, options=OPTIONS)
    held = []
    record = GraphSet.record

    def holding(graphs, graph_index, session):
        held.append(record(graphs, graph_index, session))
        return held[-1]

    monkeypatch.setattr(GraphSet, "record", holding)
    assert served.prepared.parts.strategies.memory_plan().graphs > 0
    assert len(held) == 12
    assert served.used == 0


def test_a_capture_that_would_pass_the_limit_is_refused_though_nothing_was_pruned(
    make, monkeypatch
):
    monkeypatch.setattr(graph_memory, "prune", lambda *facts: [])
    limit = ladder(make).used // 2
    served = ladder(make, limit, "delayed")
    for _ in range(20):
        served.decode(1)
        assert served.used <= limit
    assert served.told("capture.refused")


def test_without_the_largest_the_next_opens_the_pool_with_a_fixed_workspace():
    probes = [(64, 6500 + 100), (32, 100), (2, 100)]
    forecast = Forecast({FULL: fit(probes, alone=6500 + 100)})  # a workspace that does not shrink
    assert forecast.total([(FULL, 32)]) == 6600
    assert forecast.total([(FULL, 32), (FULL, 2)]) == 6700


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.sampled_from(["eager", "delayed", "lazy"]),
    st.integers(0, 3000),
    st.floats(0, 1.2),
    st.lists(st.tuples(st.booleans(), st.integers(1, 33)), max_size=15),
)
def test_no_strategy_ever_exceeds_the_limit(make, strategy, graph_bytes, share, batches):
    limit = int(share * (len(LADDER) * 4 * graph_bytes + 10_000))
    served = ladder(make, limit, strategy, graph_bytes=graph_bytes)
    assert served.used <= limit
    for is_decode, n in batches:
        served.decode(n) if is_decode else served.mixed(n)
        assert served.used <= limit


# measured bytes, whole numbers
points = st.tuples(st.integers(0, 5000), st.integers(0, 5000)).map(
    lambda at: ((1, float(at[0])), (64, float(at[1])))
)
costs = st.builds(ModeForecast, own=points, shared=points)


@given(
    st.sets(st.integers(1, 64), min_size=1, max_size=12),
    costs,
    costs,
    st.integers(0, 20_000),
)
def test_no_pruned_plan_is_forecast_above_the_limit(sizes, piecewise, full, limit):
    plan = make_plan(GraphMode.FULL_AND_PIECEWISE, sorted(sizes), max_num_reqs=64)
    forecast = Forecast({RuntimeMode.PIECEWISE: piecewise, RuntimeMode.FULL: full})
    indices = list(range(len(plan.entries)))
    dropped = prune(plan, indices, forecast, limit)

    def total(left_out):
        return forecast.total([graph_of(plan, i) for i in indices if i not in left_out])

    assert total(dropped) <= limit
    assert not dropped or total(dropped[:-1]) > limit  # nothing is dropped beyond need
    assert len(set(dropped)) == len(dropped)


def test_what_saves_least_goes_first():
    plan = make_plan(GraphMode.FULL, (8, 16, 17, 32), max_num_reqs=64)
    forecast = Forecast({FULL: ModeForecast(((32, 100.0),), ((32, 0.0),))})
    indices = list(range(4))
    sizes = [entry.descriptor.num_tokens for entry in plan.entries]
    assert [sizes[graph_index] for graph_index in prune(plan, indices, forecast, 300)] == [16]
    often_16 = prune(plan, indices, forecast, 300, [100 if n == 16 else 1 for n in range(33)])
    assert [sizes[graph_index] for graph_index in often_16] == [17]


def test_the_limit_names_what_it_drops_and_the_rest_serves(make):
    limit = ladder(make).used // 2
    served = ladder(make, limit)
    dropped = facts(served, "memory.forecast")["dropped"]
    assert dropped
    assert len(dropped) + len(served.captures) == 2 * len(LADDER)
    assert served.used > limit // 2
    for n in range(1, 34):
        served.decode(n)
        served.mixed(n)


def test_a_share_of_free_memory_is_a_limit_too(make):
    free = 2 * ladder(make).used
    served = ladder(make, 0.25, limit=free)
    assert facts(served, "memory.forecast")["limit"] == free // 4
    assert 0 < served.used <= free // 4


def test_failure_33_out_of_memory_drops_the_largest_and_goes_on(make):
    # the first PIECEWISE capture and the first FULL one run out, regardless of the forecast
    exhausting = {"exhausting_captures": {1, 6}}
    served = make((2, 4, 8), strategy="eager", options=exhausting).capture()
    assert served.told("capture.failed") == ["PIECEWISE 8", "FULL 8"]
    assert "ran out of memory" in facts(served, "capture.failed")["reason"]
    assert served.captures == ["PIECEWISE 4", "PIECEWISE 2", "FULL 4", "FULL 2"]
    assert served.decode(7) == "NONE 7"
    assert served.decode(3) == "FULL 4"


@pytest.mark.parametrize("strategy", ["lazy", "delayed"])
def test_the_largest_that_fits_is_captured_at_startup(make, strategy):
    exhausting = {"exhausting_captures": {1}}
    served = make((2, 4, 8), strategy=strategy, options=exhausting).capture()
    assert served.captures == ["PIECEWISE 4", "FULL 8"]


def lazily(make, graphs):
    strategy = {"kind": "lazy", "max_bytes": graphs * GRAPH}
    served = make((1, 2, 4, 8, 64), strategy=strategy, options=OPTIONS).capture()
    served.prepared.seal()
    return served


def test_lazy_recordings_keep_their_bytes_and_the_least_wanted_goes(make):
    served = lazily(make, 2)
    at_startup = served.used
    for n in (8, 8, 8, 4, 2, 2):
        served.decode(n)
        assert served.used - at_startup <= 2 * GRAPH
    assert served.told("capture.evicted") == ["FULL 4"]
    assert served.captures[2:] == ["FULL 8", "FULL 4", "FULL 2"]
    assert served.decode(8) == "FULL 8"
    assert served.decode(4) == "FULL 8"


def test_what_is_worth_more_is_not_evicted(make):
    served = lazily(make, 1)
    assert [served.decode(n) for n in (8, 8, 8, 2, 2, 2)] == ["FULL 8"] * 6
    assert served.told("capture.evicted") == []
    assert served.told("capture.refused") == ["FULL 2"]
    assert [served.decode(2), served.decode(2)] == ["FULL 2", "FULL 2"]
    assert served.told("capture.evicted") == ["FULL 8"]


def test_startup_recordings_are_never_evicted(make):
    served = lazily(make, 0)
    for _ in range(5):
        served.decode(2)
    assert served.told("capture.evicted") == ["FULL 2"]  # it took more than was known before
    assert served.captures == ["PIECEWISE 64", "FULL 64", "FULL 2"]
    assert served.decode(2) == "FULL 64"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 6), st.lists(st.tuples(st.booleans(), st.integers(1, 9)), max_size=40))
def test_eviction_from_the_shared_pool_changes_no_result(make, graphs, batches):
    served = lazily(make, graphs)
    at_startup = served.used
    for is_decode, n in batches:
        served.decode(n) if is_decode else served.mixed(n)
        assert served.used - at_startup <= graphs * GRAPH
        assert served.prepared.parts.strategies.capturer.memory.used == served.used


def test_worth_is_what_is_saved_per_byte():
    assert worth(10, 5, 100) == 0.5
    assert worth(0, 5, 100) == 0
    assert worth(0, 5, 0) > worth(10**9, 10**9, 1)


def test_ranks_prune_by_the_traffic_of_them_all():
    plan = make_plan(GraphMode.FULL, (8, 16, 17, 32), max_num_reqs=64)
    memory, records = GraphMemory(plan), Records()
    memory.forecast = Forecast({FULL: ModeForecast(((32, 100.0),), ((32, 0.0),))})
    own = [int(n in (17, 32)) for n in range(33)]

    def exchange(topic, mine):
        theirs = [100 if n == 16 else 0 for n in range(33)]
        return [mine, {**mine, "traffic": theirs}]

    for among, least in ((single_rank, 16), (exchange, 8)):
        dropped = memory.plan_limit(300, own, among, records)
        assert [plan.entries[graph_index].descriptor.num_tokens for graph_index in dropped] == [
            least
        ]
