"""The Triton attention kernel: its numbers in Triton's interpreter, and its code for a GPU."""

import os
import sys
from pathlib import Path

import pytest
import torch
import triton

from piecegraph.errors import InvalidSetting
from piecegraph.tools.serve.options import read_run_options
from piecegraph.tools.serve.run import library_config, require_kernels
from tests.processes import output_of

from .kernel_table import FORMS, attention_variants, table, variants

CASES = Path(__file__).with_name("kernel_cases.py")


def interpreted(*arguments):
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)]
    output_of(*command, *arguments, env=environment)


@pytest.mark.slow
def test_the_kernel_agrees_with_plain_code_on_mixed_batches():
    """Its cases: prompts and decodes mixed, grouped heads, windows, padding, tokens without a slot,
    and the main job on graphs of mixed batches, also overlapped."""
    interpreted("-m", "not heavy")


@pytest.mark.heavy
@pytest.mark.timeout(1800)
def test_the_main_job_with_each_feature():
    interpreted("-m", "heavy")


@pytest.mark.slow
@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param(attention_variants(FORMS[::4]), id="attention"),
        pytest.param(variants(), id="all", marks=pytest.mark.heavy),
    ],
)
def test_the_kernels_use_tensor_cores_and_do_not_spill(tmp_path, monkeypatch, chosen):
    """Their machine code; as tables.md states it, if it has this version of Triton."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    stated = Path(__file__).parents[1].joinpath("cuda_stand_in/tables.md").read_text()
    for line, (_, kernel, dtype, *_), (tensor_core, _, _, stack) in table(tmp_path, chosen):
        assert stack == 0, line
        assert tensor_core > 0 or dtype == "float32" or kernel != "_attend", line
        assert line in stated or f"| {triton.__version__} |" not in stated, line


def test_where_the_kernel_is_used():
    """On a GPU, and where it was asked for; then FULL graphs hold every batch."""
    read = read_run_options
    assert read(attention="triton").triton
    assert read(device="cuda").triton
    assert not read().triton
    assert not read(device="cuda", attention="plain").triton
    assert not read(device="cuda", buckets="linear").triton
    config = library_config(read(attention="triton", mode="full"))
    assert config.attention.support.name == "ALWAYS"


def test_without_the_interpreter_a_cpu_refuses():
    with pytest.raises(InvalidSetting, match="TRITON_INTERPRET=1"):
        require_kernels(torch.device("cpu"))
