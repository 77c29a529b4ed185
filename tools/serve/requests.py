"""Requests with random prompts, with the lengths and arrival times of a trace."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import cycle

from ...errors import RequestTooLong
from ..engine.scheduler import Request, SamplingParams
from .options import RunOptions
from .trace import TraceRow, read_trace


def read_requests(options: RunOptions) -> list[Request]:
    """One request a row of the trace, numbered from 0 in the order of arrival.

    Raises what `read_trace` raises, and RequestTooLong for a request that goes beyond the model's
    positions.
    """
    rows = read_trace(options.trace, limit=options.requests, length_scale=options.length_scale)
    return requests_of(rows, options)


def requests_of(rows: Sequence[TraceRow], options: RunOptions) -> list[Request]:
    """One request a row, with a prompt of random tokens and a seed of its own.

    Raises RequestTooLong for one that goes beyond the model's positions.
    """
    for i, row in enumerate(rows):
        num_tokens = row.num_prompt + row.num_generate + options.speculate
        if num_tokens > options.served_model.max_positions:
            raise RequestTooLong(
                request=i,
                num_tokens=num_tokens,
                limit=options.served_model.max_positions,
                limited_by="the model",
            )
    draw, loras, seeds = (random.Random(options.seed) for _ in range(3))
    settings = zip(
        cycle(options.temperature), cycle(options.top_k), cycle(options.top_p), strict=True
    )
    vocab = range(options.served_model.vocab)
    return [
        Request(
            id=i,
            tokens=draw.choices(vocab, k=row.num_prompt),
            num_generate=row.num_generate,
            arrival=row.arrival * options.time_scale,
            lora=loras.choice([None, *range(options.lora)]),
            sampling=SamplingParams(temperature, top_k, top_p, seeds.getrandbits(63)),
        )
        for i, (row, (temperature, top_k, top_p)) in enumerate(zip(rows, settings, strict=False))
    ]
