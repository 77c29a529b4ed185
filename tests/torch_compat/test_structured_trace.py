"""The structured trace that tlparse reads."""

import subprocess
import sys

import pytest

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


@pytest.mark.slow
def test_compile_unit_nests_artifacts_under_an_id_of_its_own(tmp_path):
    code = (
        "from piecegraph.torch_compat.basics import structured_trace as trace\n"
        "first, second = trace.new_frame(), trace.new_frame()\n"
        "assert second == first + 1\n"
        "assert not trace.in_compile_unit()\n"
        "with trace.compile_unit(second, 3, [('piece', 'model.py', 7)], 2):\n"
        "    assert trace.in_compile_unit()\n"
        "    trace.write_artifact('one', 'string', lambda: 'text')\n"
        "assert not trace.in_compile_unit()\n"
        "trace.write_phase('loading', 0.5, {})\n"
        "print(second)\n"
    )
    environment = {"TORCH_TRACE": str(tmp_path), "PATH": ""}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    )
    (trace,) = tmp_path.iterdir()
    (line,) = [line for line in trace.read_text().splitlines() if '"one"' in line]
    assert f'"frame_id": {done.stdout.strip()}' in line
    assert '"frame_compile_id": 3' in line
    assert '"attempt": 2' in line
    assert '"dur": 500000.0' in trace.read_text()
