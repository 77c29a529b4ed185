"""Capture strategies as policy: which indices at startup, which between two steps.

| strategy | at startup                | between steps                                            |
|----------|---------------------------|----------------------------------------------------------|
| EAGER    | every graph                | none                                                     |
| DELAYED  | the largest of each mode  | the wanted graph if missing, then the next largest        |
| LAZY     | the largest of each mode  | the wanted graph once it has been wanted `min_hits` times |

The padded size decides, never the raw one: the graph index is counted. Everything here follows
from the plan, the wanted indices and the outcomes of captures, so ranks that see the same choose
the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...dispatch import NO_GRAPH, CaptureStrategy, DispatchPlan

RETRY_STEPS = 64
"""Steps before a capture that failed once is tried again; each further failure doubles them."""

GIVE_UP_AFTER = 5
"""Failures after which a graph index is left alone."""

FADE_STEPS = 4096
"""Every so many steps all hits are halved, so that old traffic fades."""


class GraphState:
    """What is known of one graph.

    `kept` indices were captured at startup and are not evicted, `dropped` ones are never captured.
    `bytes` and `launches` are those of its recording, `hits` how often it was wanted of late.
    """

    __slots__ = (
        "bytes", "captured", "dropped", "failures", "hits", "kept", "launches", "retry_at",
    )  # fmt: skip

    def __init__(self) -> None:
        self.captured = self.kept = self.dropped = False
        self.hits = self.failures = self.retry_at = self.bytes = self.launches = 0

    @property
    def on_use(self) -> bool:
        """Whether it was captured after startup, and may be evicted."""
        return self.captured and not self.kept


class CaptureQueue:
    """What a strategy captures next. `step` counts the batches seen so far."""

    def __init__(self, strategy: CaptureStrategy, plan: DispatchPlan, min_hits: int) -> None:
        self.states = [GraphState() for _ in plan.entries]
        self.step = 0
        self._strategy = strategy
        self._plan = plan
        self._min_hits = min_hits
        self._by_size = sorted(
            range(len(plan.entries)),
            key=lambda graph_index: -plan.entries[graph_index].descriptor.num_tokens,
        )

    def startup(self) -> list[list[int]]:
        """Groups of graph indices in plan order; one of each is wanted, the first that can be.

        Under EAGER a group is one graph, otherwise the indices of one mode, largest first.
        """
        indices = range(len(self.states))
        if self._strategy is CaptureStrategy.EAGER:
            return [[graph_index] for graph_index in indices]
        modes = dict.fromkeys(entry.mode for entry in self._plan.entries)
        return [[s for s in indices if self._plan.entries[s].mode is mode] for mode in modes]

    def see(self, wanted: int) -> None:
        """A batch wants graph `wanted`, or NO_GRAPH."""
        self.step += 1
        if wanted != NO_GRAPH:
            self.states[wanted].hits += 1
        if self.step % FADE_STEPS == 0:
            for state in self.states:
                state.hits //= 2

    def between_steps(self, wanted: int) -> Iterator[int]:
        """Graphs to capture before a step that wants graph `wanted`, the most urgent first."""
        return (
            graph_index for graph_index in self._order(wanted) if self._may_capture(graph_index)
        )

    def in_idle_time(self) -> Iterator[int]:
        """Graphs to capture while no request waits."""
        if self._strategy is CaptureStrategy.LAZY:
            wanted: Iterable[int] = sorted(
                self._by_size, key=lambda graph_index: -self.states[graph_index].hits
            )
            wanted = [
                graph_index
                for graph_index in wanted
                if self.states[graph_index].hits >= self._min_hits
            ]
        else:
            wanted = self._by_size
        return (graph_index for graph_index in wanted if self._may_capture(graph_index))

    def failed(self, graph_index: int) -> None:
        """Remember a failed capture: it is tried again later, or never."""
        state = self.states[graph_index]
        state.retry_at = self.step + (RETRY_STEPS << state.failures)
        state.failures += 1
        state.dropped = state.failures >= GIVE_UP_AFTER

    @property
    def untouched(self) -> bool:
        """Whether nothing is captured."""
        return not any(state.captured for state in self.states)

    @property
    def complete(self) -> bool:
        """Whether nothing is left that could ever be captured."""
        return all(state.captured or state.dropped for state in self.states)

    def _order(self, wanted: int) -> Iterator[int]:
        if self._strategy is CaptureStrategy.EAGER:
            return
        ready = wanted != NO_GRAPH and (
            self._strategy is CaptureStrategy.DELAYED or self.states[wanted].hits >= self._min_hits
        )
        if ready:
            yield wanted
        if self._strategy is CaptureStrategy.DELAYED:
            yield from (graph_index for graph_index in self._by_size if graph_index != wanted)

    def _may_capture(self, graph_index: int) -> bool:
        state = self.states[graph_index]
        return not state.captured and not state.dropped and self.step >= state.retry_at
