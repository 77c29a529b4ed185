"""What steps ask the CUDA runtime for, and what graphs consist of: tables.md."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def lines_of(table: str, of_this_version: str, *arguments: str) -> list[list[str]]:
    """Cells of each line that a table's command prints, without the version. They are those of
    tables.md, if it has a line that begins with `of_this_version` for this version of torch."""
    command = [sys.executable, "tests/cuda_stand_in/run.py", "-m", f"tests.cuda_stand_in.{table}"]
    command += arguments
    without = {"STAND_IN_VALUES": "", "TRITON_INTERPRET": "0"}
    environment = os.environ | {"PIECEGRAPH_OFF": "proof", **without}
    with tempfile.TemporaryDirectory() as scratch:
        environment |= {"TMPDIR": scratch}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        left = [*Path(scratch).glob("piecegraph-owned-*")]
    assert done.returncode == 0, done.stderr[-4000:]
    assert left == []  # another process would remove it while a kernel writes what is best for it
    lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    stated = Path(__file__).with_name("tables.md").read_text()
    if f"| {torch.__version__.partition('+')[0]} | {of_this_version} |" in stated:
        assert [line for line in lines if line not in stated] == []
    return [line.strip("| ").split(" | ")[1:] for line in lines]


def test_no_step_waits_for_a_stream_and_inputs_are_copied_in_one_launch(stand_in):
    lines = lines_of("call_table", "FULL, 4 copied inputs")
    for step, _, kernels, memcpys, pageable, _, _, _, waits, _ in lines:
        assert (pageable, waits) == ("0", "0"), step
        if step.startswith("FULL"):
            writes = (0 if "buffers" in step else 1) + ("padding" in step)
            assert (int(kernels), memcpys) == (writes, "0"), step
    assert len(lines) > 20


@pytest.mark.slow
@pytest.mark.parametrize("form", ["Llama", "biases", "parallel", "norms after"])
def test_a_graph_of_pieces_has_no_more_nodes_a_layer_than_torch_compile(form, stand_in):
    """One more in all: the angles of the positions, which each layer of the other computes."""
    ((_, of_torch_compile, of_pieces, copies),) = lines_of("node_table", form, form)
    assert int(of_pieces) <= int(of_torch_compile) + 1
    assert copies == "0"
