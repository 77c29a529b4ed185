"""The whole table of resolved modes, and the rules before it."""

from itertools import product

import pytest

from piecegraph.dispatch import (
    AttentionSupport,
    GraphMode,
    RuntimeMode,
    resolve_mode,
)
from piecegraph.errors import FullModeUnsupported

NONE, PIECEWISE, FULL = GraphMode.NONE, GraphMode.PIECEWISE, GraphMode.FULL
FDO, FAP = GraphMode.FULL_DECODE_ONLY, GraphMode.FULL_AND_PIECEWISE
ALWAYS, UNIFORM = AttentionSupport.ALWAYS, AttentionSupport.UNIFORM_BATCH
SINGLE, NEVER = AttentionSupport.UNIFORM_SINGLE_TOKEN_DECODE, AttentionSupport.NEVER

# (configured, pieces) -> mode for ALWAYS, UNIFORM_BATCH, single q = 1, single q > 1, NEVER
TABLE = {
    (NONE, True): (NONE, NONE, NONE, NONE, NONE),
    (NONE, False): (NONE, NONE, NONE, NONE, NONE),
    (PIECEWISE, True): (PIECEWISE,) * 5,
    (PIECEWISE, False): (NONE,) * 5,
    (FULL, True): (FULL, FAP, FAP, PIECEWISE, None),
    (FULL, False): (FULL, FDO, FDO, NONE, None),
    (FDO, True): (FDO, FDO, FDO, PIECEWISE, PIECEWISE),
    (FDO, False): (FDO, FDO, FDO, NONE, NONE),
    (FAP, True): (FAP, FAP, FAP, PIECEWISE, PIECEWISE),
    (FAP, False): (FDO, FDO, FDO, NONE, NONE),
}
COLUMNS = (
    (ALWAYS, (1, 2, 5)),
    (UNIFORM, (1, 2, 5)),
    (SINGLE, (1,)),
    (SINGLE, (2, 5)),
    (NEVER, (1, 5)),
)
CELLS = [
    (mode, pieces, support, query_len, wanted)
    for (mode, pieces), row in TABLE.items()
    for (support, query_lens), wanted in zip(COLUMNS, row, strict=True)
    for query_len in query_lens
]


@pytest.mark.parametrize(("mode", "pieces", "support", "query_len", "wanted"), CELLS)
def test_every_cell_of_the_table(mode, pieces, support, query_len, wanted):
    def resolve():
        return resolve_mode(mode, support={"a": support}, pieces=pieces, query_len=query_len)

    if wanted is None:
        with pytest.raises(FullModeUnsupported, match=r"group 'a' can never.*Choose PIECEWISE"):
            resolve()
        return
    resolved = resolve()
    assert resolved.mode is wanted
    assert bool(resolved.reasons) == (wanted is not mode)


def test_resolution_is_total_and_its_reasons_lead_from_the_request_to_the_result():
    flags = [False, True]
    for requested, support, pieces, query_len, varlen, eager, level in product(
        [None, *GraphMode], AttentionSupport, flags, [1, 3], flags, flags, range(4)
    ):
        facts = {"pieces": pieces, "query_len": query_len, "eager": eager, "varlen_decode": varlen}
        try:
            resolved = resolve_mode(requested, support={"a": support}, level=level, **facts)
        except FullModeUnsupported:
            assert (requested, support, eager) == (FULL, NEVER, False)
            continue
        mode = requested
        for change in resolved.reasons:
            assert change.before is mode
            assert change.after is not mode
            assert change.why
            mode = change.after
        assert mode is resolved.mode
        assert pieces or not mode.needs_pieces
        assert not (mode.decode is RuntimeMode.FULL and support is NEVER)
        assert not (mode.mixed is RuntimeMode.FULL and support is not ALWAYS)
        assert not (eager and mode is not NONE)
        again = resolve_mode(mode, support={"a": support}, level=level, **facts)
        assert again.mode is mode
        assert not again.reasons


@pytest.mark.parametrize(("level", "wanted"), [*enumerate((NONE, PIECEWISE, FAP, FAP))])
def test_defaults_by_level(level, wanted):
    resolved = resolve_mode(None, support={"a": ALWAYS}, pieces=True, level=level)
    assert resolved.mode is wanted


def test_levels_set_defaults_only():
    for level, mode in product(range(4), GraphMode):
        assert resolve_mode(mode, support={}, pieces=True, level=level).mode is mode


def test_without_pieces_and_without_support_nothing_is_left():
    assert resolve_mode(None, support={"a": NEVER}, pieces=False).mode is NONE


def test_the_least_capable_group_of_a_hybrid_model_counts_and_is_named():
    support = {"full": ALWAYS, "mamba": UNIFORM, "sliding": ALWAYS}
    resolved = resolve_mode(FULL, support=support, pieces=True)
    assert resolved.mode is FAP
    assert "'mamba'" in resolved.reasons[0].why


def test_varlen_decode_needs_full_support_and_graphs_of_its_own():
    traits = {"varlen_decode": True}
    for support, wanted in ((ALWAYS, FAP), (UNIFORM, PIECEWISE), (SINGLE, PIECEWISE)):
        assert resolve_mode(FULL, support={"a": support}, pieces=True, **traits).mode is wanted
    assert resolve_mode(FULL, support={}, pieces=False, **traits).mode is FDO


def test_failure_W2_an_upgraded_mode_says_that_it_needs_pieces():
    # both used to arrive after pieces had been compiled unwrapped
    assert resolve_mode(FULL, support={"a": UNIFORM}, pieces=True).mode.needs_pieces
    assert resolve_mode(FDO, support={"a": NEVER}, pieces=True).mode.needs_pieces
