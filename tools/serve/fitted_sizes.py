"""Capture sizes fitted to a request trace, compared with the lists in common use.

The trace is served by a simulated engine with continuous batching: decode first, prompts in chunks
under a token budget, a step takes a fixed time and a time for each token.
"""

from __future__ import annotations

import heapq
import json
import math
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...dispatch import default_capture_sizes
from ...errors import InvalidSetting
from ..report.output import reading
from ..sizes.traffic import fit_validated, padding_waste, thinned
from .trace import TraceRow

MAX_NUM_TOKENS, MAX_NUM_REQS = 2048, 256
STEP_SECONDS, TOKEN_SECONDS = 8e-3, 3e-5
MAX_GRAPHS = 48
DRIFTED = 3.0
"""By what factor the rate grows where the report shows drift."""


def step_sizes(
    requests: Sequence[TraceRow],
    rate: float = 1.0,
    *,
    max_num_tokens: int = MAX_NUM_TOKENS,
    max_num_reqs: int = MAX_NUM_REQS,
) -> tuple[list[int], list[int]]:
    """How often each number of tokens makes up a step of decode alone, and any other step.

    `rate` scales the arrivals. Equal steps in a row are counted at once, so that the time that this
    takes depends on the number of requests and not on their lengths.
    """
    decode, mixed = [0] * (max_num_reqs + 1), [0] * (max_num_tokens + 1)
    first = requests[0].arrival
    arriving = deque((each.arrival - first) / rate for each in requests)
    coming, prompts = deque(requests), deque[list[int]]()
    ends: list[int] = []  # a heap of the last steps of the decoding requests
    now, step, decoding = 0.0, 0, 0
    while coming or prompts or decoding:
        if not prompts and not decoding:
            now = max(now, arriving[0])
        while arriving and arriving[0] <= now:
            arriving.popleft()
            request = coming.popleft()
            prompts.append([request.num_prompt, request.num_generate])
        left, started, prefilling, times = max_num_tokens - decoding, 0, 0, 1
        if not prompts or decoding == max_num_reqs:
            times = ends[0] - step + 1
            if arriving and decoding < max_num_reqs:
                gap = (arriving[0] - now) / (STEP_SECONDS + TOKEN_SECONDS * decoding)
                times = min(times, max(1, math.ceil(gap)))
            decode[decoding] += times
        else:
            if 0 < left < prompts[0][0]:  # the first prompt takes whole steps
                times = min([(prompts[0][0] - 1) // left, *(end - step + 1 for end in ends[:1])])
                prompts[0][0] -= times * left
                left = 0
            while prompts and left and decoding + prefilling < max_num_reqs:
                chunk = min(left, prompts[0][0])
                prompts[0][0] -= chunk
                left -= chunk
                prefilling += 1
                if prompts[0][0] == 0:
                    _, output = prompts.popleft()
                    if output > 1:  # the prompt's last chunk produces the first token
                        heapq.heappush(ends, step + output - 1)
                        started += 1
            mixed[max_num_tokens - left] += times
        step += times
        decoding += started
        while ends and ends[0] < step:
            heapq.heappop(ends)
            decoding -= 1
        now += times * (STEP_SECONDS + TOKEN_SECONDS * (max_num_tokens - left))
    return decode, mixed


def traffic(requests: Sequence[TraceRow], rate: float, largest: int, **limits: int) -> list[int]:
    """How often each number of tokens up to `largest` makes up a step, of decode or mixed."""
    counts = [0] * (largest + 1)
    for kind in step_sizes(requests, rate, **limits):
        for tokens, count in enumerate(kind[: largest + 1]):
            counts[tokens] += count
    return counts


def fit_trace(
    requests: Sequence[TraceRow],
    *,
    name: str = "trace",
    max_graphs: int = MAX_GRAPHS,
    rate: float = 1.0,
    max_num_tokens: int = MAX_NUM_TOKENS,
    max_num_reqs: int = MAX_NUM_REQS,
) -> dict[str, Any]:
    """Fit on the first third of the requests, choose on the second, judge on the last; JSON-able.

    `waste` holds padding rows over padded rows of the last third for each list, `parts` of each
    third, `drift` of the second half of the last third at DRIFTED times the rate. `fitted` is that
    of `sizes`: the default sizes, at most `max_graphs` of them, unless the fit does better on the
    second third. Raises InvalidSetting for fewer than three requests, a rate that is not positive,
    or fewer than two graphs.
    """
    _require("requests", len(requests), len(requests) > 2, "3 or more")
    _require("--rate", rate, 0 < rate < math.inf, "a finite number above 0")
    limits = {"max_num_tokens": max_num_tokens, "max_num_reqs": max_num_reqs}
    _require(
        "--max-num-reqs",
        max_num_reqs,
        max_num_reqs <= max_num_tokens,
        f"at most --max-num-tokens, {max_num_tokens}",
    )
    _require("--max-graphs", max_graphs, max_graphs > 1, "2 or more")
    default = default_capture_sizes(max_num_reqs, max_num_tokens)
    powers = [1 << bit for bit in range(default[-1].bit_length())]
    third = len(requests) // 3
    parts = requests[:third], requests[third : 2 * third], requests[2 * third :]
    seen, chosen_on, held_out = (traffic(part, rate, default[-1], **limits) for part in parts)
    chosen = fit_validated(
        seen, chosen_on, default=default, max_graphs=max_graphs, widest=max_num_reqs
    )
    lists = {"default": default, "powers_of_two": powers, "fitted": chosen}

    def wastes(counts: Sequence[int], lists: Mapping[str, Sequence[int]]) -> dict[str, float]:
        return {name: padding_waste(counts, sizes).share for name, sizes in lists.items()}

    half = len(parts[2]) // 2
    met = traffic(parts[2][half:], DRIFTED * rate, default[-1], **limits)
    return {
        "trace": name,
        "rate": rate,
        "max_graphs": max_graphs,
        "steps": sum(held_out),
        "graphs": {name: len(sizes) for name, sizes in lists.items()},
        "waste": wastes(held_out, lists),
        "parts": {
            "fitted_on": wastes(seen, lists),
            "chosen_on": wastes(chosen_on, lists),
            "held_out": wastes(held_out, lists),
        },
        "drift": {"rate": DRIFTED * rate, **wastes(met, {"default": default, "fitted": chosen})},
        "kept_default": chosen == thinned(default, max_graphs),
        "sizes": list(chosen),
    }


def _require(name: str, value: float, met: bool, expected: str) -> None:
    if not met:
        reason = "it is out of range"
        raise InvalidSetting(name=name, value=value, reason=reason, expected=expected)


def read_sizes(path: Path) -> list[int]:
    """The sizes in a file that `fit --output` wrote; raises InvalidSetting for any other file."""
    with reading("sizes file", path, '{"capture_sizes": [...]}'):
        sizes = json.loads(path.read_text())["capture_sizes"]
        return [int(size) for size in sizes]


def render(result: dict[str, Any]) -> str:
    """The result as text: each list with its waste as a bar, and the sizes."""
    waste, graphs = result["waste"], result["graphs"]
    bars = [(name.replace("_", " "), graphs[name], share) for name, share in waste.items()]
    scale = 40 / max(0.01, *(share for _, _, share in bars))
    lines = [f"{'list':<14}{'graphs':>7}{'waste':>8}"]
    lines += [
        f"{name:<14}{count:>7}{share:>8.1%} {'#' * round(scale * share)}"
        for name, count, share in bars
    ]
    for part, shares in result["parts"].items():
        name = part.replace("_", " ")
        lines += [f"{name:<21}{shares['default']:>8.1%} default {shares['fitted']:>8.1%} fitted"]
    drift = result["drift"]
    lines += [
        f"{'at ' + format(drift['rate'], 'g') + ' x the rate':<21}{drift[name]:>8.1%} {name}"
        for name in ("default", "fitted")
    ]
    verdict = "the default sizes are kept" if result["kept_default"] else "the fit is taken"
    lines += [f"{verdict}: {' '.join(map(str, result['sizes']))}"]
    return "\n".join(lines)
