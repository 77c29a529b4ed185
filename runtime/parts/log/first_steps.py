"""The first steps: whether most of them could use a better graph, and what the engine would have to
state or to capture for it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from ....dispatch import Batch, Decision, Dispatcher, Reason, RuntimeMode
from ...setup.remarks import StepsMissed

LEAST = 16
"""Steps for one reason before it is told; they are also half of all steps so far."""

MOST = 256
"""Steps that are looked at."""

UNSTATED = "the engine does not state that a step decodes"

REMEDIES: dict[str, str] = {
    UNSTATED: "State is_decode=True and query_len in the Batch of a step that only decodes.",
    Reason.AXIS: "Add the values that batches state to variants.axes.",
    Reason.LORA_CASE_MISSING: "Set variants.max_loras to the most adapters of a step.",
    Reason.ABOVE_LARGEST_SIZE: "Add larger sizes to capture_sizes, or limit the tokens of a step.",
    Reason.TOO_MANY_REQS: "Add larger sizes to capture_sizes, which are in tokens.",
    Reason.PADDING_LIMIT: "Add sizes to capture_sizes, or widen sizes.padding_limit.",
    Reason.NOT_CAPTURED: "Call capture() before the model serves.",
}
"""What to do about steps without a graph, by the reason."""


class FirstSteps:
    """Counts the first steps of one model by why they did not use a better graph."""

    def __init__(self, query_lens: tuple[int, ...]) -> None:
        self.steps = 0
        self._query_lens = query_lens
        self._reasons: Counter[str] = Counter()

    @property
    def over(self) -> bool:
        """Whether enough steps were looked at."""
        return self.steps >= MOST

    def see(self, batch: Batch, decision: Decision, dispatcher: Dispatcher) -> StepsMissed | None:
        """Count a step; returns what to tell, once."""
        self.steps += 1
        reason = self._reason(batch, decision, dispatcher)
        if reason is None:
            return None
        self._reasons[reason] += 1
        steps = self._reasons[reason]
        if steps < LEAST or 2 * steps < self.steps:
            return None
        told, self.steps = self.steps, MOST
        what = f"{steps} of the first {told} steps ran as {decision.mode.name}: {reason}"
        return StepsMissed(what, REMEDIES[reason], steps)

    def _reason(self, batch: Batch, decision: Decision, dispatcher: Dispatcher) -> str | None:
        for query_len in self._query_lens:
            if batch.num_reqs * query_len == batch.num_tokens > 0 and not (
                batch.is_decode and batch.query_len
            ):
                stated = replace(batch, is_decode=True, query_len=query_len, max_query_len=None)
                if dispatcher.dispatch(stated).mode > decision.mode:
                    return UNSTATED
        if decision.mode is RuntimeMode.NONE and decision.reason in REMEDIES:
            return decision.reason
        return None
