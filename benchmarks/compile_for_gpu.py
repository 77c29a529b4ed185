"""What compiling a decoder for a GPU takes, without a GPU: CPU seconds for sm_90 on the stand-in.

    python tests/cuda_stand_in/run.py -m benchmarks.compile_for_gpu --layers 32

The decoder of the reference engine in bfloat16, dynamic in the number of tokens, its attention an
op that no way compiles. Each way starts in a process of its own with empty caches and one thread,
and kernels are launched without computing. Seconds of ptxas are those of its processes, those of
Triton are without ptxas, and the rest is Dynamo, Inductor and the first call.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WAYS = ("piecegraph", "torch.compile", "nested_compile_region")
TOKENS = 64


def compile_one(way: str, layers: int, folder: str) -> dict[str, Any]:
    """CPU seconds by part of the first call of the decoder, prepared in this process."""
    import torch
    import triton

    import piecegraph as pg
    from piecegraph.tools.engine.attention import SPLITTING_OP
    from piecegraph.tools.engine.decoder_config import DecoderConfig
    from piecegraph.tools.engine.model import INPUTS, Decoder, DecoderLayer

    config = DecoderConfig(
        layers=layers, hidden=512, heads=8, kv_heads=4, intermediate=1024, vocab=512
    )
    library: Any = torch.library.Library("piecegraph_reference", "IMPL")  # type: ignore[no-untyped-call]
    library.impl("paged_attention", lambda *args: None, "CUDA", allow_override=True)
    model = Decoder(config, seed=0).to(device="cuda", dtype=torch.bfloat16)
    tokens = torch.zeros(TOKENS, dtype=torch.int64, device="cuda")
    in_triton, kernels, compile_kernel = 0.0, 0, triton.compile

    def timed(*args: Any, **kwargs: Any) -> Any:
        nonlocal in_triton, kernels
        began = time.process_time()
        try:
            return compile_kernel(*args, **kwargs)
        finally:
            in_triton, kernels = in_triton + time.process_time() - began, kernels + 1

    triton.compile = timed
    began = time.process_time()
    if way == "piecegraph":
        settings = pg.Config(
            splitting_ops=(SPLITTING_OP,), inputs=INPUTS, max_num_tokens=512, max_num_reqs=64,
            cache_dir=folder, graph_mode="NONE",
            # as `torch.compile` assumes: a guard on it is proved by running, and nothing computes
            tracing={"min_num_tokens": 2},
        )  # fmt: skip
        prepared = pg.prepare(model, settings, layers=dict.fromkeys(model.layer_names))
        batch = pg.Batch(num_tokens=TOKENS, num_reqs=1)
        prepared(tokens, tokens, batch=batch)
    else:
        if way == "nested_compile_region":
            region = torch.compiler.nested_compile_region(DecoderLayer.forward)
            setattr(DecoderLayer, "forward", region)  # noqa: B010
        call = torch.compile(model, fullgraph=True, dynamic=True)
        call(tokens, tokens)
    whole = time.process_time() - began
    ptxas = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "way": way,
        "kernels": kernels,
        "dynamo_and_inductor": whole - in_triton,
        "triton": in_triton,
        "ptxas_and_compilers": ptxas.ru_utime + ptxas.ru_stime,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--way", choices=WAYS, help="only this one, in this process")
    options = parser.parse_args()
    if options.way:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(compile_one(options.way, options.layers, folder)))
        return 0
    rows = []
    for way in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            environment = os.environ | {
                "TORCHINDUCTOR_COMPILE_THREADS": "1",
                "TORCHINDUCTOR_CACHE_DIR": str(Path(folder, "inductor")),
                "TRITON_CACHE_DIR": str(Path(folder, "triton")),
                "TMPDIR": folder,
            }
            command = [sys.executable, "-m", "benchmarks.compile_for_gpu", f"--way={way}"]
            said = subprocess.run(
                [*command, f"--layers={options.layers}"], env=environment, capture_output=True,
                text=True,
            )  # fmt: skip
        last = said.stdout.strip().splitlines()[-1:] or ["null"]
        row = json.loads(last[0]) if said.returncode == 0 else None
        rows.append(row or {"way": way, "failed": said.stderr.strip().splitlines()[-1][:300]})
    print(json.dumps({"layers": options.layers, "tokens": TOKENS, "cpu_seconds": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
