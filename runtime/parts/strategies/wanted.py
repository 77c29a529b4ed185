"""Capture strategies as policy: which graphs at startup, which between two steps.

| strategy | at startup                | between steps                                            |
|----------|---------------------------|----------------------------------------------------------|
| EAGER    | every graph                | none                                                     |
| DELAYED  | the largest of each mode  | the wanted graph if missing, then the next largest        |
| LAZY     | the largest of each mode  | the wanted graph if missing                               |

Under all of them, the startup set of a model that has switched to compiled code while it serves is
captured between steps.

Uses are counted per graph, that is per padded size. Everything here depends only on the plan, the
wanted graphs and the outcomes of captures, so ranks with equal input choose the same.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence

from ....dispatch import NO_GRAPH, CaptureStrategy, Decision, DispatchPlan
from ...core.usage import IdleSteps

RETRY_STEPS = 64
"""Steps until a failed capture is tried again; each further failure doubles them."""

GIVE_UP_AFTER = 5
"""Failures after which a graph is never tried again."""

FADE_STEPS = 4096
"""All hits are halved each time this many steps have passed, so that old traffic fades."""

_MOST_IDLE = 4096


class GraphState:
    """The state of one graph.

    A `kept` graph was captured at startup and is not evicted; a `dropped` one is never captured. A
    `blocked` one does not fit into memory until a graph is captured or freed.
    `bytes` and `launches` are those of its recording, `hits` counts how often it was wanted.
    """

    def __init__(self) -> None:
        self.captured = self.kept = self.dropped = self.blocked = False
        self.hits = self.failures = self.retry_at = self.bytes = self.launches = 0

    @property
    def on_use(self) -> bool:
        """Whether it was captured after startup and can be evicted."""
        return self.captured and not self.kept


class CaptureQueue:
    """What a strategy captures next. `step` counts batches.

    `idle_steps` are decisions with nothing to capture, by identity; steps only increment their
    counter. It is emptied whenever a graph changes.
    """

    def __init__(self, strategy: CaptureStrategy, plan: DispatchPlan) -> None:
        self.states = [GraphState() for _ in plan.entries]
        self.step = 0
        self._strategy = strategy
        self._plan = plan
        self._by_size = sorted(
            range(len(plan.entries)), key=lambda i: -plan.entries[i].descriptor.num_tokens
        )
        self._pending: list[int] | None = None
        self._next_retry = 0
        self.idle_steps: dict[int, IdleSteps] = {}
        self._added: list[int] = []
        self._kept: frozenset[int] = frozenset()

    def add(self, added: Iterable[int]) -> None:
        """Capture graphs of the startup set between the next steps, under every strategy."""
        self._added = list(added)
        self._kept = frozenset(self._added)
        self._pending = None

    def left(self, used: Sequence[int]) -> None:
        """All graphs were freed, and return in the order of their uses, of which `used` has those
        of each graph. Under EAGER they are captured between the next steps."""
        self.changed()
        for state, steps in zip(self.states, used, strict=True):
            state.hits = max(state.hits, steps)
        self._by_size.sort(key=lambda i: -self.states[i].hits)
        kept = [i for i in self._by_size if self.states[i].kept]
        for state in self.states:
            state.captured = state.kept = False
            state.bytes = 0
        self.add(kept if self._strategy is CaptureStrategy.EAGER else ())
        self._kept = frozenset(kept)

    def is_kept(self, graph_index: int) -> bool:
        """Whether the graph belongs to a startup set that is captured between steps."""
        return graph_index in self._kept

    @property
    def adding(self) -> bool:
        """Whether the startup set still has graphs to capture between steps."""
        self._added = [i for i in self._added if not _done(self.states[i])]
        return bool(self._added)

    def startup(self) -> list[list[int]]:
        """Groups of graph indices in plan order; of each, the first possible one is captured.

        Under EAGER a group is one graph, otherwise the graphs of one mode, largest first.
        """
        indices = range(len(self.states))
        if self._strategy is CaptureStrategy.EAGER:
            return [[graph_index] for graph_index in indices]
        modes = dict.fromkeys(entry.mode for entry in self._plan.entries)
        return [[s for s in indices if self._plan.entries[s].mode is mode] for mode in modes]

    def see(self, wanted: int, batches: int = 1) -> None:
        """Count batches that want graph `wanted`, or NO_GRAPH."""
        fades = (self.step + batches) // FADE_STEPS - self.step // FADE_STEPS
        self.step += batches
        if wanted != NO_GRAPH:
            self.states[wanted].hits += batches
        if fades:
            for state in self.states:
                state.hits >>= fades

    def add_idle(self, decision: Decision, wanted: int, num_reqs: int) -> None:
        """Further steps of `decision` count themselves."""
        if len(self.idle_steps) >= _MOST_IDLE:
            self.count_idle()
            self.idle_steps.clear()
        self.idle_steps[id(decision)] = IdleSteps(decision, wanted, num_reqs)

    def count_idle(self) -> None:
        """Count the steps that counted themselves."""
        for idle in self.idle_steps.values():
            if idle.steps:
                self.see(idle.wanted, idle.steps)
                idle.steps = 0

    def changed(self) -> None:
        """A graph was captured or freed: those that did not fit may fit now."""
        self.count_idle()
        self.idle_steps.clear()
        self._pending = None
        for state in self.states:
            state.blocked = False

    def block(self, graph_index: int) -> None:
        """The graph does not fit into memory."""
        self.states[graph_index].blocked = True
        self._pending = None

    def nothing_to_capture(self, wanted: int) -> bool:
        """Whether batches that want graph `wanted` capture nothing until a graph changes."""
        if self.adding:
            return False
        if self._strategy is CaptureStrategy.DELAYED and not all(map(_done, self.states)):
            return False
        return wanted == NO_GRAPH or _done(self.states[wanted])

    def between_steps(self, wanted: int) -> Iterator[int]:
        """Graphs to capture before a step that wants graph `wanted`, most urgent first."""
        for graph_index in sorted(self._added, key=lambda added: added != wanted):
            if self._may_capture(graph_index):
                yield graph_index
        if self._strategy is CaptureStrategy.EAGER:
            return
        if wanted != NO_GRAPH and self._may_capture(wanted):
            yield wanted
        if self._strategy is CaptureStrategy.DELAYED:
            for graph_index in self._capturable():
                if graph_index != wanted and self._may_capture(graph_index):
                    yield graph_index

    def in_idle_time(self) -> Iterator[int]:
        """Graphs to capture while the engine is idle."""
        wanted = self._by_size
        if self._strategy is CaptureStrategy.LAZY:
            used = [i for i in self._by_size if self.states[i].hits or i in self._kept]
            wanted = sorted(used, key=lambda i: -self.states[i].hits)
        return (i for i in wanted if self._may_capture(i))

    def failed(self, graph_index: int) -> None:
        """Note a failed capture: it is tried again later, or after too many failures never."""
        state = self.states[graph_index]
        state.retry_at = self.step + (RETRY_STEPS << state.failures)
        state.failures += 1
        state.dropped = state.failures >= GIVE_UP_AFTER
        self._pending = None

    @property
    def untouched(self) -> bool:
        """Whether nothing is captured."""
        return not any(state.captured for state in self.states)

    @property
    def complete(self) -> bool:
        """Whether nothing is left to capture."""
        return all(state.captured or state.dropped for state in self.states)

    def _capturable(self) -> list[int]:
        """Graphs that can be captured now, the largest first; kept until one of them changes."""
        if self._pending is None or self.step >= self._next_retry:
            self._pending = [i for i in self._by_size if self._may_capture(i)]
            retries = [state.retry_at for state in self.states if state.retry_at > self.step]
            self._next_retry = min(retries, default=sys.maxsize)
        return self._pending

    def _may_capture(self, graph_index: int) -> bool:
        state = self.states[graph_index]
        return not _done(state) and self.step >= state.retry_at


def _done(state: GraphState) -> bool:
    return state.captured or state.dropped or state.blocked
