"""What the attention kernels are made of on a GPU of capability 9.0, as lines of tables.md.

They are compiled by the tools in the wheel of Triton, without a GPU.
"""

import re
import subprocess
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from piecegraph.tools.engine import triton_attention as kernels

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
INTS = ("block_table", "seq_lens", "query_start_loc", "slot_mapping")
NUMBERS = {"scale": "fp32", "window": "i32", "num_requests": "i32", "parts": "i32"}
NUMBERS |= {"table_stride": "i32"}
DIMS = {"keys_stride": 4, "values_stride": 4}
FORMS = (
    ("bfloat16", 32, 8, 128), ("bfloat16", 32, 32, 128), ("bfloat16", 14, 2, 64),
    ("float16", 32, 8, 128), ("float32", 32, 8, 128),
)  # fmt: skip
"""Type of the cache, query heads, key heads and their dim."""
TENSOR_CORE, SERIAL = "HMMA|HGMMA", "FFMA"


def machine_code(kernel, dtype, constants, folder):
    """Tensor-core and FFMA instructions, registers, and bytes of stack. As they are launched: the
    last stride is 1; addresses and other strides are multiples of 16."""
    signature, values, aligned = {}, {}, {}
    for at, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name], values[at,] = "constexpr", constants[name]
        elif name.endswith("_stride") and name not in NUMBERS:
            last = DIMS.get(name, 3) - 1
            signature[name], values[at, last] = ("i64",) * last + ("constexpr",), 1
            aligned |= {(at, stride): [["tt.divisibility", 16]] for stride in range(last)}
        elif name in NUMBERS:
            signature[name] = NUMBERS[name]
        else:
            numbers = "*fp32" if name in ("sums", "scales") else dtype
            signature[name] = "*i64" if name in INTS else numbers
            aligned[at,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, values, aligned)
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"])

    def output(*command):
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    usage = output(TOOLS / "cuobjdump", "-res-usage", cubin)
    code = output(TOOLS / "nvdisasm", cubin)
    instruction = rf"^\s*/\*\w+\*/\s+(?:@\S+\s+)?({TENSOR_CORE}|{SERIAL})\b"
    found = re.findall(instruction, code, re.MULTILINE)
    serial = found.count(SERIAL)
    used = (int(re.search(rf"{what}:(\d+)", usage)[1]) for what in ("REG", "STACK"))
    return len(found) - serial, serial, *used


def attention_variants(forms):
    """The kernel of attention, the type of its data, and its constants."""
    for dtype, heads, kv_heads, dim in forms:
        group, width = heads // kv_heads, triton.next_power_of_2(dim)
        sizes = {"BLOCK_SIZE": 16, "DIM": dim, "WIDTH": width, "GROUP": group}
        kind = getattr(torch, dtype)
        for rows in sorted({kernels.tile_rows(tokens, 1, group, kind) for tokens in (1, 4096)}):
            tiles = {"ROWS": rows, "TILE": rows // group, "PLACES": kernels.PLACES}
            yield kernels._attend, dtype, sizes | tiles


def variants():
    """The same of each kernel."""
    yield from attention_variants(FORMS)
    yield kernels._join, "bfloat16", {"DIM": 128, "WIDTH": 128, "MOST": kernels.MOST_PARTS}
    yield kernels._write, "bfloat16", {"BLOCK_SIZE": 16, "DIM": 128, "WIDTH": 128}


def table(folder, chosen):
    """Lines of kernels with constants, and what each line states."""
    for kernel, dtype, constants in chosen:
        pointer = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}[dtype]
        measured = machine_code(kernel, pointer, constants, folder)
        group, rows = (constants.get(name, "") for name in ("GROUP", "ROWS"))
        named = (triton.__version__, kernel.__name__, dtype, group, constants["DIM"], rows)
        yield f"| {' | '.join(map(str, (*named, *measured)))} |", named, measured


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as made:
        for line, _, _ in table(Path(made), variants()):
            print(line, flush=True)
