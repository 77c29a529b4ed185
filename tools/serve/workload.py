"""Turns a request trace into requests: the trace's lengths and times, tokens drawn from a seed."""

from __future__ import annotations

import random

from ...errors import RequestTooLong
from ..engine.scheduler import Request
from .options import RunOptions
from .trace_reader import read_trace


def read_requests(options: RunOptions) -> list[Request]:
    """One request a row of the trace, numbered from 0 in the order of arrival.

    Raises what `read_trace` raises, and RequestTooLong for a request that goes beyond the model's
    positions.
    """
    rows = read_trace(options.trace, limit=options.requests, length_scale=options.length_scale)
    for i, row in enumerate(rows):
        if row.num_prompt + row.num_generate > options.model.max_positions:
            raise RequestTooLong(
                request=i,
                num_tokens=row.num_prompt + row.num_generate,
                limit=options.model.max_positions,
                limited_by="the model",
            )
    draw = random.Random(options.seed)
    vocab = range(options.model.vocab)
    return [
        Request(
            id=i,
            tokens=draw.choices(vocab, k=row.num_prompt),
            num_generate=row.num_generate,
            arrival=row.arrival * options.time_scale,
        )
        for i, row in enumerate(rows)
    ]
