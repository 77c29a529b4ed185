"""Changes of all cases without conditions: no wrong number after the verification.

Process A stores a bundle, process B starts with the changed model on A's cache.
"""

import pytest

from tests.text_compiler import use_text_compiler

from .cases import unread_sources
from .outcomes import CASES, starts, write
from .run_cases import run

NOT_CACHED = {
    *("environment_iterated", "environment_length", "hash_of_a_string", "identity_of_bytes"),
    *("identity_of_floats", "identity_of_integers", "identity_of_strings", "set_popped"),
    *("set_of_a_set_of_strings", "set_of_strings", "substituted_in_the_graph"),
    *("subclasses_of_a_class", "method_with_a_constant_result"),
}
SAMPLE = (
    *("arguments_of_the_program", "cache_of_autocast", "class_item_that_reads_the_class"),
    *(
        pytest.param(name, marks=pytest.mark.heavy)
        for name in (
            "order_of_bases",
            "printing_of_torch",
            "registered_with_a_subclass",
            "signature_that_is_held",
        )
    ),
)
NOT_OF_A_THREAD = {"default_of_autocast", "thread_local"}
"""Values of one thread: `prepare` does not run under autocast."""
REFUSED = {"dispatch_mode", "torch_function_mode"}
"""`prepare` raises ModeActive."""
NOT_KNOWN = {"environment_bytes_contains", "thread_local"}
"""No trace beside steps succeeds, which stops none: conditions alone refuse these bundles. Before
steps such a trace counts as different."""


def expect_none_stale(cold, changed, unknown=()):
    assert {name for name in cold if isinstance(changed[name].get("verified"), str)} == {*unknown}
    for outcomes in (cold, changed):
        known = {name: outcome for name, outcome in outcomes.items() if name not in unknown}
        assert not [name for name, outcome in known.items() if "error" in outcome]
        assert not [name for name, outcome in known.items() if not outcome["right"]]


@pytest.mark.heavy
@pytest.mark.timeout(1200)
def test_nothing_is_stale_after_verification(tmp_path):
    """No condition refuses a bundle here; in the second and the third run only a trace does."""
    cases = CASES.keys() - unread_sources().keys() - REFUSED
    write(cases, tmp_path)
    cold, *changed, control = (
        starts(tmp_path, each)[0]
        for each in (
            ("use", "first"),
            ("before", "second"),
            ("background", "second"),
            ("background", "moved"),
        )
    )
    for run_of_changed, unknown in zip(changed, (set(), NOT_KNOWN), strict=True):
        expect_none_stale(cold, run_of_changed, unknown)
        found = [name for name in cases if run_of_changed[name].get("verified") is False]
        missed = [name for name in cases if not run_of_changed[name]["hit"]]
        print(f"{len(cases)} changes: {len(found)} found by a trace, {len(missed)} other keys")
        assert len(found) + len(missed) + len(unknown) == len(cases)
        assert len(found) > 520
    refused = {name for name in cases if control[name].get("verified") is not True}
    assert refused == NOT_CACHED | NOT_OF_A_THREAD


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("name", SAMPLE)
def test_a_trace_finds_what_no_condition_refuses(name, tmp_path, monkeypatch):
    monkeypatch.delenv("PIECEGRAPH_OFF", raising=False)
    use_text_compiler(monkeypatch)
    write([name], tmp_path)
    outcomes = [
        run(name, bundle, tmp_path / variant, tmp_path / "cache")
        for bundle, variant in (("use", "first"), ("before", "second"), ("background", "second"))
    ]
    expect_none_stale({name: outcomes[0]}, {name: outcomes[1]})
    assert [outcome.get("verified") for outcome in outcomes] == [None, False, False]
