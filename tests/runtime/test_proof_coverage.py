"""When graphs are proved, on a clock that only steps and proofs move."""

from collections import Counter

import pytest

from piecegraph.config import Shadow
from piecegraph.runtime.parts.proof.coverage import MOST_STEPS, Coverage

GRAPHS, SHARE = 14, 0.01


@pytest.mark.parametrize(("first", "later"), [(300.0, 25.0), (3.0, 0.5)], ids=["slow", "fast"])
def test_each_graph_is_proved_by_its_tenth_step_and_the_rest_within_the_share(first, later):
    """The first proof of all takes longer, as in a process that has made none."""
    now, spent = [0.0], list[float]()
    coverage = Coverage(Shadow(every=100, share=SHARE), lambda: now[0])
    steps, proved = Counter[int](), Counter[int]()
    for step in range(200_000):
        graph = step * step % GRAPHS if step % 3 else step // 3 % GRAPHS  # some are rare
        now[0] += 1.0
        steps[graph] += 1
        coverage.left -= 1
        if (graph in coverage.covered and coverage.left > 0) or not coverage.is_turn(graph):
            continue
        is_overdue = coverage.is_overdue(graph)
        if not is_overdue and not coverage.has_time():
            coverage.skip(graph, "budget")
            continue
        if not proved[graph]:
            assert steps[graph] <= MOST_STEPS
        spent.append(later if spent else first)
        now[0] += spent[-1]
        proved[graph] += 1
        coverage.spend(spent[-1], is_overdue)
        coverage.prove(graph, step)
        if not is_overdue and len(spent) > 1:  # what could not wait is paid back
            assert sum(spent) <= SHARE * now[0]
        if step == 8000:
            assert len(proved) == GRAPHS
    assert len(spent) > 2 * GRAPHS
    assert coverage.share() == sum(spent) / now[0] <= SHARE
    assert min(proved.values()) >= max(proved.values()) - 2


def test_a_graph_that_cannot_be_proved_is_tried_less_and_less():
    coverage = Coverage(Shadow(every=100, share=SHARE), lambda: 0.0)
    tried = [step for step in range(1, 1001) if coverage.is_overdue(0)]
    assert tried == [10, 20, 40, 80, 160, 320, 640]
    coverage.forget(0)
    assert not coverage.is_overdue(0)
