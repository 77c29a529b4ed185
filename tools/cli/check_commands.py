"""`piecegraph check`: does a result depend on the other requests, is a capture's key complete."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ...errors import InvalidSetting
from ..serve.options import RunOptions
from .run_commands import WRONG_RESULT, ReplayOption, decoder_case, with_run_options

if TYPE_CHECKING:
    from ... import BatchDescriptor, RuntimeMode
    from ..bisect import Step
    from ..engine.metadata import AttentionMetadata

check_app = typer.Typer(help="Checks of a model and its engine.", no_args_is_help=True)

STEPS = 64
"""Steps recorded in search of a decode step of several requests."""


@check_app.command("invariance")
@with_run_options
def invariance_command(options: RunOptions, replay: ReplayOption = None) -> int:
    """Is a request's result the same alone, batched, with other requests, padded, in each mode?"""
    case = decoder_case(options, STEPS, replay)
    import torch

    from ..bisect import check_invariance

    most = max(case.steps, key=lambda step: step.batch.is_decode * step.batch.num_reqs)
    if not most.batch.is_decode:
        raise InvalidSetting(
            name="--requests",
            value=options.requests,
            reason="no step decoded several requests",
            expected="more requests",
        )
    generator = torch.Generator().manual_seed(options.seed)
    for layer in case.layers.values():
        for part in (layer.keys, layer.values):
            part.copy_(torch.randn(part.shape, generator=generator))

    def compose(numbers: Sequence[int]) -> Step:
        return _rows(most, numbers)

    found = check_invariance(case, compose, most.batch.num_reqs)
    for row in found:
        print(row.line())
    equal = sum(row.equal for row in found)
    print(f"{equal} of {len(found)} are bit-equal")
    return WRONG_RESULT if any(row.wrong for row in found) else 0


def _rows(step: Step, numbers: Sequence[int]) -> Step:
    """The step with only the requests of these numbers, in this order."""
    from ... import Batch
    from ..steps import Rebuilt, Step

    chosen = list(numbers)
    made = step.metadata
    assert isinstance(made, Rebuilt)
    metadata = made.recorded
    fewer = replace(
        metadata,
        slot_mapping=metadata.slot_mapping[chosen],
        block_table=metadata.block_table[chosen],
        seq_lens=metadata.seq_lens[chosen],
        query_start_loc=metadata.query_start_loc[: len(chosen) + 1],
        query_lens=tuple(metadata.query_lens[n] for n in chosen),
        context_lens=tuple(metadata.context_lens[n] for n in chosen),
    )
    batch = Batch(len(chosen), len(chosen), is_decode=True, query_len=1)
    args = tuple(tensor[chosen] for tensor in step.args)
    return Step(args, batch, Rebuilt(made.rebuild, fewer))


@check_app.command("keys")
@with_run_options
def keys_command(
    options: RunOptions,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the run to compare.")] = 12,
    replay: ReplayOption = None,
) -> int:
    """Does a graph depend on a fact that its key does not hold? Captures with facts changed."""
    case = decoder_case(options, steps, replay)
    from ..bisect import check_keys
    from ..engine.metadata import DUMP_SLOT

    padding = case.capture_metadata
    assert padding is not None

    def with_lengths(descriptor: BatchDescriptor, mode: RuntimeMode) -> AttentionMetadata:
        lengths: AttentionMetadata = padding(descriptor, mode)
        return replace(lengths, query_lens=(1,), context_lens=(1,))

    def with_slots(descriptor: BatchDescriptor, mode: RuntimeMode) -> AttentionMetadata:
        slots: AttentionMetadata = padding(descriptor, mode)
        slots.slot_mapping.fill_(DUMP_SLOT + 1)
        return slots

    variants = {"query and context lengths": with_lengths, "slots": with_slots}
    found, changed = check_keys(case, variants=variants)
    for row in found:
        print(row.line())
    print(f"changed: {', '.join(changed) or 'nothing'}; {len(found)} differences")
    return WRONG_RESULT if found else 0
