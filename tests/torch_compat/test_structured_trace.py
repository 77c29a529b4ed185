"""The structured trace that tlparse reads."""

import subprocess
import sys

import pytest

from piecegraph.torch_compat.basics import structured_trace as trace
from piecegraph.torch_compat.basics.structured_trace import (
    TRACE_LOGGER,
    listening,
    write_artifact,
)


def test_logger_is_the_one_torch_writes_to():
    from torch._logging._internal import trace_log

    assert trace_log.name == TRACE_LOGGER


def test_a_listener_hears_each_record_and_may_stop_what_writes_it():
    heard = []

    def refuse(*_):
        raise ValueError("stop")

    with listening(lambda metadata, _: heard.append(metadata)):
        write_artifact("one", "string", lambda: "text")
    with listening(refuse), pytest.raises(ValueError, match="stop"):
        write_artifact("two", "string", lambda: "text")
    assert [each["artifact"]["name"] for each in heard if "artifact" in each] == ["one"]


def test_asking_does_not_import_torch():
    code = (
        "import sys\n"
        "from piecegraph.torch_compat.basics.structured_trace import trace_is_on\n"
        "assert not trace_is_on()\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_compile_unit_nests_artifacts_under_an_id_of_its_own():
    first, second = trace.new_frame(), trace.new_frame()
    assert second == first + 1
    assert not trace.in_compile_unit()
    heard = []
    with listening(lambda metadata, record: heard.append((metadata, record.payload))):
        with trace.compile_unit(second, 3, [("piece", "model.py", 7)], 2):
            assert trace.in_compile_unit()
            write_artifact("one", "string", lambda: "text")
        assert not trace.in_compile_unit()
        trace.write_phase("loading", 0.5, {})
    (one,) = [each for each, _ in heard if each.get("artifact", {}).get("name") == "one"]
    assert (one["frame_id"], one["frame_compile_id"], one["attempt"]) == (second, 3, 2)
    (phase,) = [payload for each, payload in heard if "chromium_event" in each]
    assert '"dur": 500000.0' in phase
