"""Batches for which a plan has no graph, and sizes that no step has; known at the start."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .plan import DispatchPlan


def covered_tokens(plan: DispatchPlan, query_len: int | None) -> Iterator[range]:
    """Numbers of tokens with a graph: of uniform decodes of `query_len`, or of mixed batches.

    Every graph has as many requests as its tokens allow, so that tokens alone decide."""
    for entry in plan.entries:
        key = entry.descriptor
        if key.for_decode and query_len is None:
            continue
        if query_len is not None:
            if query_len > (key.max_query_len or query_len):
                continue
            if query_len != (key.uniform_query_len or query_len):
                continue
        yield range(plan.least_tokens(key.num_tokens), key.num_tokens + 1)


def uncovered_decodes(plan: DispatchPlan, query_len: int, max_num_tokens: int) -> list[int]:
    """Numbers of requests whose uniform decodes run without a graph, ascending."""
    most = min(plan.max_num_reqs, max_num_tokens // query_len)
    ranges = (
        range(-(-tokens.start // query_len), (tokens.stop - 1) // query_len + 1)
        for tokens in covered_tokens(plan, query_len)
    )
    return sorted(set(range(1, most + 1)).difference(*ranges))


def sizes_for(plan: DispatchPlan, query_len: int, num_reqs: Sequence[int]) -> list[int]:
    """The fewest capture sizes that decodes of so many requests can be padded to, ascending."""
    sizes: list[int] = []
    for tokens in (query_len * each for each in reversed(num_reqs)):
        if not sizes or tokens < plan.least_tokens(sizes[-1]):
            sizes.append(tokens)
    return sizes[::-1]


def unreached_sizes(
    plan: DispatchPlan, sizes: Sequence[int], query_lens: Sequence[int]
) -> list[int]:
    """Those of `sizes` that no step has: none is a graph's, and batches of that many tokens are
    padded to others."""
    captured = {entry.descriptor.num_tokens for entry in plan.entries}

    def is_padded(size: int) -> bool:
        kinds = [None, *(q for q in query_lens if size in range(q, q * plan.max_num_reqs + 1, q))]
        return all(any(size in tokens for tokens in covered_tokens(plan, q)) for q in kinds)

    return [
        size
        for size in sizes
        if size not in captured and (size < plan.min_num_tokens or is_padded(size))
    ]
