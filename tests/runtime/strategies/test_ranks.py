"""Ranks agree, or an error names the rank that differs or is lost; no rank ever hangs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # processes, and time-outs that are waited for

LAUNCHER = Path(__file__).with_name("rank_launcher.py")
TWO_RANKS = "2-1"
"""The number of ranks of a scene, and the one that differs."""
FOUR_RANKS = pytest.param("4-2", marks=pytest.mark.heavy)
"""Four do as two do. That others than two meet in a collective is shown by one kind of failure."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Plays a scene: what came of each rank. All end by themselves, but for one that dies."""
    command = [sys.executable, str(LAUNCHER)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as launcher:

        def of_scene(scene):
            name, size, odd = scene.split("-")
            folder = tmp_path_factory.mktemp(name)
            print(folder, scene, file=launcher.stdin, flush=True)
            assert launcher.stdout.readline() == f"{scene}\n"
            written = {r: folder / f"rank-{r}.json" for r in range(int(size))}
            ended = {rank: json.loads(p.read_text()) for rank, p in written.items() if p.exists()}
            assert ended.keys() == set(range(int(size))) - ({int(odd)} if name == "die" else set())
            return ended

        yield of_scene
        launcher.stdin.close()


@pytest.mark.parametrize("scene", [TWO_RANKS, FOUR_RANKS])
def test_failure_35_what_one_rank_runs_again_all_run_again(outcomes, scene):
    results = [outcome["result"] for outcome in outcomes(f"one_looks_again-{scene}").values()]
    assert results == [["FULL 8 right", "FULL 4 right", "FULL 2 right"]] * len(results)


@pytest.mark.parametrize("size", [2, 4])
def test_equal_ranks_agree(outcomes, size):
    results = [outcome["result"] for outcome in outcomes(f"agree-{size}-{size}").values()]
    assert results == [["agreed"]] * size


@pytest.mark.parametrize(
    ("scene", "fact", "value"),
    [
        ("disagree_on_sizes-4-2", "graph 0: rank 2: {", '"num_tokens": 2'),
        ("disagree_on_attention-2-1", "attention capabilities", '"NEVER"'),
        # in a step it would wait for the others, which are in a collective of the next one
        ("one_proves-2-1", "shadow", ""),
        ("one_proves_less-2-1", "shadow", ""),
        ("one_lacks_a_part-2-1", "strategy", ""),
    ],
)
def test_a_rank_that_differs_at_the_start_is_named_by_all(outcomes, scene, fact, value):
    for outcome in outcomes(scene).values():
        assert outcome["error"] == "RanksDisagree"
        named = f"rank {scene[-1]} disagrees at 'start' on {fact}"
        assert outcome["message"].startswith(named)
        assert value in outcome["message"]


def test_failure_35_a_late_rank_is_named(outcomes):
    """By the others, and by itself when it comes."""
    for outcome in outcomes("come_late-4-1").values():
        assert outcome["error"] == "RankLost"
        assert outcome["message"].startswith("rank 1 did not respond within 4.0 s at 'start'")
        assert "rank 1 is late: its process" in outcome["message"]


def test_failure_35_a_killed_rank_is_named_and_a_restart_works(outcomes):
    """The others stop one after another; none of them is taken for the lost one."""
    for outcome in outcomes("die-4-3").values():
        assert outcome["error"] == "RankLost"
        assert "rank 3 did not respond" in outcome["message"]
        assert "rank 3 has ended" in outcome["message"]
    assert all(o["result"] == ["agreed"] for o in outcomes("agree-4-4").values())


def test_failure_35_the_rank_that_hosts_the_store_is_named(outcomes):
    (outcome,) = outcomes("die-2-0").values()
    assert outcome["message"].startswith("rank 0 did not respond")
    assert "the store of the process group cannot be reached" in outcome["message"]


def test_failure_35_a_graph_that_one_rank_lacks_is_used_by_none(outcomes):
    results = [outcome["result"] for outcome in outcomes("one_cannot_capture-2-1").values()]
    assert results == [["4", "1"]] * 2


def test_a_probe_that_fails_on_one_rank_fails_on_all(outcomes):
    """Probes run collectives: ranks that probe different sizes would wait for each other."""
    results = [outcome["result"] for outcome in outcomes("one_cannot_probe-2-1").values()]
    assert results[0] == results[1]
    *tried, forecast, large, small = results[0]
    assert tried == ["0", "1", "2", "1", "0", "1"]  # probes, the smallest alone, the captures
    assert (large, small) == ("4", "2")
    assert "(1, " not in forecast


def test_failure_35_ranks_that_see_other_batches_are_named_with_the_step(outcomes):
    for outcome in outcomes("one_sees_another_batch-4-3").values():
        assert outcome["error"] == "RanksDisagree"
        assert "rank 3 disagrees" in outcome["message"]
        assert "at step 1" in outcome["message"]


def test_ranks_go_by_the_least_memory(outcomes):
    results = [outcome["result"] for outcome in outcomes("limits_differ-2-1").values()]
    assert results[0] == results[1]
    assert len(results[0]) == 1


MOST_SECONDS = 5.0
"""Of the capture that fails. A rank that is left inside a collective waits for a minute."""


@pytest.mark.parametrize("scene", [TWO_RANKS, "4-2"])
def test_failure_35_a_capture_that_fails_beside_a_collective(outcomes, scene):
    """No rank waits inside the collective, and all name the one that failed."""
    for outcome in outcomes(f"one_fails_beside_a_collective-{scene}").values():
        reason, *modes, seconds = outcome["result"]
        assert reason.startswith(f"rank {scene[-1]}: capturing PIECEWISE 2 failed")
        assert modes == ["PIECEWISE 4 right", "PIECEWISE 4 right"]
        assert float(seconds) < MOST_SECONDS


CAPTURES = [
    ("inside_a_graph", "FULL 4", ["FULL 8 right", "FULL 2 right"]),
    ("before_a_graph", "FULL 4", ["FULL 8 right", "FULL 2 right"]),
    ("in_a_first_run", "FULL 8", ["FULL 4 right", "FULL 2 right"]),
    ("at_the_end", "FULL 8", ["FULL 4 right", "FULL 2 right"]),
]


@pytest.mark.parametrize("scene", [TWO_RANKS, FOUR_RANKS])
@pytest.mark.parametrize(("where", "graph", "modes"), CAPTURES)
def test_failure_35_a_capture_that_fails_after_a_collective(outcomes, where, graph, modes, scene):
    """In each run of the model that it makes. Later captures are alike on all ranks."""
    for outcome in outcomes(f"one_fails_{where}-{scene}").values():
        reason, *served, seconds = outcome["result"]
        assert reason.startswith(
            f"rank {scene[-1]}: capturing {graph} failed: RuntimeError: out of something"
        )
        assert served == modes
        assert float(seconds) < MOST_SECONDS


@pytest.mark.parametrize("scene", [TWO_RANKS, FOUR_RANKS])
@pytest.mark.parametrize(
    ("name", "its_own", "why"),
    [
        ("one_fails_in_a_comparison", "RanksDisagree: rank", "disagrees at 'start' on ends"),
        ("one_fails_in_warm_up", "RuntimeError: out of something", "out of something"),
        ("one_lacks_a_layer", "LayerMissing: ", "the forward context has no layer 'kv'"),
    ],
)
def test_failure_35_what_one_rank_raises_ends_all(outcomes, name, its_own, why, scene):
    odd = scene[-1]
    for rank, outcome in outcomes(f"{name}-{scene}").items():
        error, seconds = outcome["result"]
        others = f"RanksDisagree: rank {odd} disagrees at "
        assert error.startswith(its_own if rank == int(odd) else others)
        assert why in error
        assert float(seconds) < MOST_SECONDS


@pytest.mark.parametrize("scene", [TWO_RANKS, FOUR_RANKS])
def test_what_is_stale_on_one_rank_is_captured_again_on_all(outcomes, scene):
    """A capture runs the model's collectives, in which a rank without stale graphs is missed."""
    for outcome in outcomes(f"one_has_another_weight-{scene}").values():
        sizes = ["PIECEWISE 8 right", "PIECEWISE 4 right", "PIECEWISE 2 right"]
        assert outcome["result"] == [3, *sizes]


def test_a_refresh_that_one_rank_refuses_is_refused_on_all(outcomes):
    first, second = (outcome["result"] for outcome in outcomes("one_has_changed-2-1").values())
    assert second[0].startswith("ModelChanged: ")
    assert first[0].startswith("RanksDisagree: rank 1 disagrees at 'refresh' on whether it can go")
    assert "factor: 1 -> 2" in first[0]


@pytest.mark.parametrize("name", ["they_start_cold", "they_start_cold_and_verify_before"])
def test_failure_35_a_rank_that_loads_what_another_has_compiled_meanwhile(outcomes, name):
    """It verifies that; the one that compiled takes part in the exchanges about it."""
    results = [outcome["result"] for outcome in outcomes(f"{name}-2-2").values()]
    assert sorted(hit for hit, *_ in results) == [False, True]
    assert [modes for _, *modes in results] == [["NONE 8 right"]] * 2


@pytest.mark.parametrize("scene", [TWO_RANKS, FOUR_RANKS])
def test_a_step_that_is_wrong_on_one_rank_leaves_service_on_all(outcomes, scene):
    """At the same step, with the right rows on the rank that is wrong; later steps are proved."""
    for outcome in outcomes(f"one_is_wrong-{scene}").values():
        *modes, proved, stopped, took_out = outcome["result"]
        assert modes == [
            "PIECEWISE 4 right", "PIECEWISE 2 right", "PIECEWISE 2 right", "PIECEWISE 4 right",
            "PIECEWISE 8 right", "PIECEWISE 2 right",
        ]  # fmt: skip
        assert (proved, stopped) == ("6", "None")
        assert took_out == "[('graph', ['PIECEWISE 4'])]"


def test_graphs_of_two_ranks_leave_and_return_after_seal(outcomes):
    """Each step of a sleeping rank brings its own graph back, and idle time the rest."""
    first, second = (outcome["result"] for outcome in outcomes("they_sleep-2-2").values())
    assert first == second
    steps, back = first[:9], first[9:]
    assert all(step.startswith("PIECEWISE") and step.endswith("right") for step in steps)
    assert back == ["8", "2", "4"] * 2


def test_steps_have_what_collectives_give_when_they_have_ended(outcomes):
    """Those that return before that, and those that call operators in a thread of their own."""
    for outcome in outcomes("they_meet-2-2").values():
        assert outcome["result"] == [True] * 40
