"""The Triton attention kernel: its numbers in Triton's interpreter, and its code for a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from piecegraph.errors import InvalidSetting
from piecegraph.tools.engine import triton_attention
from piecegraph.tools.serve.options import read_run_options
from piecegraph.tools.serve.run import library_config, require_kernels

CASES = Path(__file__).with_name("kernel_cases.py")


def interpreted(*arguments):
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)]
    done = subprocess.run(
        [*command, *arguments], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.slow
def test_the_kernel_agrees_with_plain_code_on_random_batches():
    """Its cases: prompts and decodes mixed, grouped heads, windows, padding, tokens without a slot,
    and the main job on graphs of mixed batches, also overlapped."""
    interpreted("-m", "not heavy")


@pytest.mark.heavy
@pytest.mark.timeout(1800)
def test_the_main_job_with_each_feature():
    interpreted("-m", "heavy")


STRIDES = ("i32", "i32", "constexpr")
CACHE_STRIDES = ("i32", *STRIDES)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_kernels_compile_for_a_gpu(dtype):
    """To machine code, without a GPU: the last stride of a row is 1."""
    data, ints = f"*{dtype}", "*i64"
    sizes = {"BLOCK_SIZE": 16, "DIM": 128, "WIDTH": 128}
    tiles = {"GROUP": 4, "TILE": 4, "ROWS": 16, "PLACES": triton_attention.PLACES}
    attend = {
        **dict.fromkeys(("query", "keys", "values", "output"), data),
        **dict.fromkeys(("block_table", "seq_lens", "query_start_loc"), ints),
        "query_stride": STRIDES, "keys_stride": CACHE_STRIDES, "values_stride": CACHE_STRIDES,
        "output_stride": STRIDES, "table_stride": "i32", "num_requests": "i32", "scale": "fp32",
        "window": "i32",
    }  # fmt: skip
    write = {
        **dict.fromkeys(("key", "value", "keys", "values"), data), "slot_mapping": ints,
        "key_stride": STRIDES, "value_stride": STRIDES, "keys_stride": CACHE_STRIDES,
        "values_stride": CACHE_STRIDES,
    }  # fmt: skip
    kernels = (
        (triton_attention._attend, attend, sizes | tiles),
        (triton_attention._write, write, sizes),
    )
    for kernel, types, constants in kernels:
        signature = types | dict.fromkeys(constants, "constexpr")
        names = list(signature)
        values = {(names.index(name),): value for name, value in constants.items()}
        strides = {name: len(form) - 1 for name, form in types.items() if isinstance(form, tuple)}
        values |= {(names.index(name), last): 1 for name, last in strides.items()}
        source = ASTSource(kernel, signature, values)
        assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]


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
    for other in ({"buckets": "linear"}, {"hf": "LlamaConfig,vocab_size=9"}):
        with pytest.raises(InvalidSetting, match="--attention"):
            read_run_options(attention="triton", **other)
