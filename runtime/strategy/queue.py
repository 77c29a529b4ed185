"""Capture strategies as policy: which graphs at startup, which between two steps.

| strategy | at startup                | between steps                                            |
|----------|---------------------------|----------------------------------------------------------|
| EAGER    | every graph                | none                                                     |
| DELAYED  | the largest of each mode  | the wanted graph if missing, then the next largest        |
| LAZY     | the largest of each mode  | the wanted graph once it has been wanted `min_hits` times |

Uses are counted per graph, that is per padded size. Everything here depends only on the plan, the
wanted graphs and the outcomes of captures, so ranks that see the same choose the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ...dispatch import NO_GRAPH, CaptureStrategy, DispatchPlan

RETRY_STEPS = 64
"""Steps until a failed capture is tried again; each further failure doubles them."""

GIVE_UP_AFTER = 5
"""Failures after which a graph is never tried again."""

FADE_STEPS = 4096
"""All hits are halved each time this many steps have passed, so that old traffic fades."""


class GraphState:
    """The state of one graph.

    A `kept` graph was captured at startup and is not evicted; a `dropped` one is never captured.
    `bytes` and `launches` are those of its recording, `hits` counts how often it was wanted.
    """

    __slots__ = (
        "bytes", "captured", "dropped", "failures", "hits", "kept", "launches", "retry_at",
    )  # fmt: skip

    def __init__(self) -> None:
        self.captured = self.kept = self.dropped = False
        self.hits = self.failures = self.retry_at = self.bytes = self.launches = 0

    @property
    def on_use(self) -> bool:
        """Whether it was captured after startup and can be evicted."""
        return self.captured and not self.kept


class CaptureQueue:
    """What a strategy captures next. `step` counts batches."""

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
        """Groups of graph indices in plan order; of each, the first that can be is captured.

        Under EAGER a group is one graph, otherwise the graphs of one mode, largest first.
        """
        indices = range(len(self.states))
        if self._strategy is CaptureStrategy.EAGER:
            return [[graph_index] for graph_index in indices]
        modes = dict.fromkeys(entry.mode for entry in self._plan.entries)
        return [[s for s in indices if self._plan.entries[s].mode is mode] for mode in modes]

    def see(self, wanted: int) -> None:
        """Count a batch that wants graph `wanted`, or NO_GRAPH."""
        self.step += 1
        if wanted != NO_GRAPH:
            self.states[wanted].hits += 1
        if self.step % FADE_STEPS == 0:
            for state in self.states:
                state.hits //= 2

    def between_steps(self, wanted: int) -> Iterator[int]:
        """Graphs to capture before a step that wants graph `wanted`, most urgent first."""
        return (
            graph_index for graph_index in self._order(wanted) if self._may_capture(graph_index)
        )

    def in_idle_time(self) -> Iterator[int]:
        """Graphs to capture while the engine is idle."""
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
        """Note a failed capture: it is tried again later, or after too many failures never."""
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
        """Whether nothing is left to capture."""
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
