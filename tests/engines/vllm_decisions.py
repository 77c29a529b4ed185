"""What vLLM decides about a module that it compiles: `python vllm_decisions.py`.

vLLM's own functions, without an engine and a GPU. PYTHONPATH may have another vLLM's Python.
Prints a JSON object: decisions with the module as vLLM leaves it (`alone`), as our worker leaves it
(`worker`), and as one that vLLM takes for not compiled (`not compiled`).
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import torch
import vllm
from vllm.compilation.decorators import support_torch_compile
from vllm.config import CompilationConfig, CompilationMode, VllmConfig, set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu.cudagraph_utils import has_compiled_submodule

from piecegraph.tools.integrations.vllm import take_over

MODES = ("FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "PIECEWISE", "NONE")


@support_torch_compile(dynamic_arg_dims={"input_ids": 0, "positions": 0})
class Model(torch.nn.Module):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> str:
        return "the module's own"


def graph_modes(module: torch.nn.Module) -> dict[str, str]:
    """The graph mode that each runner makes of each one that is asked for."""
    available = has_compiled_submodule(module)
    found = {}
    for mode, support, v2 in itertools.product(MODES, AttentionCGSupport, (False, True)):
        config = CompilationConfig(
            mode=3, cudagraph_mode=mode, cudagraph_capture_sizes=[1, 2, 4],
            max_cudagraph_capture_size=4,
        )  # fmt: skip
        runner = {"use_v2_model_runner": v2, "piecewise_capture_available": available or not v2}
        try:
            resolved = config.resolve_cudagraph_mode_and_sizes(support, "ANY", 1, **runner).name
        except ValueError as error:
            resolved = type(error).__name__
        found[f"V{1 + v2} {mode} {support.name}"] = resolved
    return found


def main() -> dict[str, Any]:
    config = VllmConfig()
    config.compilation_config.mode = CompilationMode.VLLM_COMPILE
    with set_current_vllm_config(config):
        modules = {name: Model(vllm_config=config) for name in ("alone", "worker", "not compiled")}
        take_over(modules["worker"], lambda *tensors: "ours")
        modules["not compiled"].do_not_compile = True
        decisions = {name: graph_modes(module) for name, module in modules.items()}
        with set_forward_context(None, config):
            ran = modules["worker"](torch.zeros(4), torch.zeros(4))
        return {"version": vllm.__version__, **decisions, "ran": ran}


if __name__ == "__main__":
    print("RESULT", json.dumps(main()), flush=True)
