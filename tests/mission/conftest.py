"""A small model with attention as a custom op, and runs of the command line."""

import functools
import json
from contextlib import suppress

import pytest
import torch
from torch import nn

import piecegraph as pg
from piecegraph.tools.cli.app import main

HIDDEN = 8
SMALL = "layers=2,hidden=32,heads=2,kv_heads=1,vocab=64"
"""The reference decoder of these runs."""
OP = "mission::attention"
_LIBRARY = torch.library.Library("mission", "DEF")


def attention(x):
    """Adds to each row what the engine says of the step."""
    with suppress(pg.PiecegraphError):
        return x + (pg.get_forward_context().metadata or 0.0)
    return x.clone()


_LIBRARY.define("attention(Tensor x) -> Tensor")
_LIBRARY.impl("attention", attention, "CompositeExplicitAutograd")
torch.library.register_fake(OP, torch.empty_like, lib=_LIBRARY)


class Model(nn.Module):
    """Three equal layers with attention between them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.requires_grad_(False)

    def forward(self, x):
        for layer in self.layers:
            x = torch.ops.mission.attention(layer(x))
        return x


@pytest.fixture
def prepare():
    """Prepares the model; a cache only if one is asked for."""

    def make(**settings):
        changed = {
            "splitting_ops": (OP,), "inputs": {"x": f"float32[num_tokens, {HIDDEN}]"},
            "max_num_tokens": 16, "max_num_reqs": 8, "capture_sizes": (2, 4, 8),
            "attention": {"support": "UNIFORM_SINGLE_TOKEN_DECODE"}, "compiler": "eager",
            "cache": False, **settings,
        }  # fmt: skip
        return pg.prepare(Model(), pg.Config(**changed))

    return make


def mode_of(prepared, num_tokens, decodes, **batch):
    """The mode and padded size of a step, which is compared with the model's."""
    x = torch.rand(num_tokens, HIDDEN)
    reqs = num_tokens if decodes else 1
    decode = {"is_decode": True, "query_len": 1} if decodes else {}
    decision = prepared.dispatch(pg.Batch(num_tokens, reqs, **decode, **batch))
    got = prepared.run(decision, x)
    torch.testing.assert_close(got, Model()(x))
    return f"{decision.mode.name} {decision.descriptor.num_tokens}"


def report_of(folder, *options):
    """The report of `piecegraph run` with each step verified."""
    path = folder / "report.json"
    few = ["--requests", "6", "--length-scale", "0.04", "--backend", "eager", "--verify", "all"]
    few += ["--model", SMALL]
    cache = [] if "--cache-dir" in options else ["--no-cache"]
    assert main(["run", *few, *cache, "--json", str(path), *options]) == 0
    report = json.loads(path.read_text())
    assert report["verification"]["ok"]
    return report


@pytest.fixture
def run(tmp_path):
    """`run("--lora", "2")`: the report of a run with these options."""
    return functools.partial(report_of, tmp_path)


@pytest.fixture(scope="session")
def report(tmp_path_factory):
    """Of a run without options of its own."""
    return report_of(tmp_path_factory.mktemp("run"))
