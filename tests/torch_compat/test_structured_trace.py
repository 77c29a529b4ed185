"""The structured trace that tlparse reads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from piecegraph.torch_compat.structured_trace import TRACE_LOGGER


def test_logger_is_the_one_torch_writes_to() -> None:
    from torch._logging._internal import trace_log

    assert trace_log.name == TRACE_LOGGER


def test_artifact_is_written_where_torch_traces(tmp_path: Path) -> None:
    code = (
        "import torch\n"
        "from piecegraph.torch_compat.structured_trace import trace_is_on, write_artifact\n"
        "assert trace_is_on()\n"
        "write_artifact('one', 'string', lambda: 'text')\n"
    )
    environment = {"TORCH_TRACE": str(tmp_path), "PATH": ""}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    (trace,) = tmp_path.iterdir()
    assert '"one"' in trace.read_text()


def test_without_a_trace_it_is_off() -> None:
    """In its own process: pytest's log capture is a handler of the trace."""
    code = (
        "import torch\n"
        "from piecegraph.torch_compat.structured_trace import trace_is_on\n"
        "assert not trace_is_on()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_asking_does_not_import_torch() -> None:
    code = (
        "import sys\n"
        "from piecegraph.torch_compat.structured_trace import trace_is_on\n"
        "assert not trace_is_on()\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
