"""Optimization level 3 autotunes the code of compile sizes, and is then part of the keys."""

from types import SimpleNamespace

import pytest
import torch

from piecegraph.compile.backends.trace_jobs import compiler_options
from piecegraph.compile.bundle.key_factors import machine_key, trace_key
from piecegraph.config import Config, compile_config
from piecegraph.events import Events

CPU = torch.device("cpu")
INPUTS = {"input": "float32[num_tokens, 4]"}


@pytest.mark.parametrize(
    ("level", "device", "size", "tuned"),
    [(3, "cuda", 4, True), (2, "cuda", 4, False), (3, "cpu", 4, False), (3, "cuda", None, False)],
)
def test_compile_sizes_are_autotuned_at_level_3_on_a_gpu(level, device, size, tuned):
    config = compile_config(Config(level=level, codegen={"sizes": (4,)}))
    events = Events()
    split = SimpleNamespace(config=config)
    job = SimpleNamespace(size=size, passes=(), unique=SimpleNamespace(index=0))
    assert ("max_autotune" in compiler_options(split, job, torch.device(device), events)) == tuned


def test_what_is_autotuned_has_other_keys():
    def keys(level, *sizes):
        config = compile_config(Config(level=level, codegen={"sizes": sizes}, inputs=INPUTS))
        key = trace_key(torch.nn.Linear(4, 4), config, CPU)
        return machine_key(config.code, CPU).factors["config"], key.digest

    assert keys(2, 4)[0] != keys(3, 4)[0]
    assert keys(2, 4)[1] != keys(3, 4)[1]
    assert keys(2) == keys(3)
