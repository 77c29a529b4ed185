"""Faults planted in a running engine: what its shadow steps take out of service, and what bisect
says of the step file that they leave."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.backends.registry import _COMPILER_FNS, register_backend

from piecegraph.compile.bundle import bundle as bundles
from piecegraph.runtime.parts.checks.model_check import ModelCheck
from piecegraph.tools.cli.app import main
from piecegraph.tools.engine import attention, metadata
from piecegraph.tools.serve import run

MODEL = ["--model", "layers=2,hidden=64,heads=4,vocab=64", "--requests", "8"]
SHADOW = ["--shadow", "1", "--set", "shadow.share=1.0", "--verify", "none"]
EAGER = ["--backend", "eager", "--no-cache"]

WRONG_SIZE = 4


@dataclass(frozen=True)
class Scene:
    """A fault, and what is to be seen of it.

    `refused` is the error with which the step ends before it could be proved.
    """

    what: str
    plant: Callable[[pytest.MonkeyPatch, Path], list[str]]
    """Plants it and gives the options of `run` and `bisect`, which may use a folder."""
    out_of_service: str | None = None
    bisect: str = ""
    refused: str = ""


@dataclass(frozen=True)
class Seen:
    """`wrong` has the facts of the first wrong step, `bisect` the last line for its file."""

    status: int
    out: str
    wrong: dict[str, Any] | None
    bisect: str


def see(scene, folder):
    """Serve with the fault, every step proved, and bisect the step that was saved."""
    with pytest.MonkeyPatch.context() as patch:
        options = scene.plant(patch, folder)
        report = folder / "report.json"
        command = ["run", *MODEL, *options, *SHADOW, "--json", str(report)]
        status, out = said(command)
        wrong = json.loads(report.read_text())["shadow"]["wrong"] if report.exists() else []
        line = ""
        if wrong:
            _, found = said(["bisect", *MODEL, *options, "--replay", wrong[0]["file"]])
            line = found.splitlines()[-1]
        return Seen(status, out, wrong[0] if wrong else None, line)


def said(command):
    """The exit status of a command, and all that it prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        status = main(command)
    return status, out.getvalue()


def configured(patch, **settings):
    """Let the reference engine use these settings of the library."""
    right = run.library_config
    patch.setattr(run, "library_config", lambda *given: right(*given).changed(**settings))


def rsqrt_is_sqrt(graph):
    """A user's pass with a typing error."""
    for node in graph.nodes:
        if node.target is torch.ops.aten.rsqrt.default:
            node.target = torch.ops.aten.sqrt.default


def wrong_pass(patch, folder):
    configured(patch, codegen={"passes": {"rsqrt_is_sqrt": rsqrt_is_sqrt}})
    return ["--no-cache"]


def stale_bundle(patch, folder):
    """What the trace read of the model is another now, and nothing compares it."""
    options = ["--cache-dir", str(folder / "cache"), "--set", "cache.verify_bundle=off"]
    status, out = said(["run", *MODEL, *options, "--verify", "none"])
    assert status == 0, out
    patch.setattr(bundles, "broken_conditions", lambda *_: [])
    patch.setattr(ModelCheck, "check_step", lambda *_: None)  # its turn comes later
    right = run.build_model

    def changed(*given):
        model = right(*given)
        for layer in model.layers:
            layer.mlp_norm.eps = 1.0
        return model

    patch.setattr(run, "build_model", changed)
    return options


def leaking_padding(patch, folder):
    """Tokens of padding are written into the first slot of a live request."""
    patch.setattr(metadata, "DUMP_SLOT", 16)
    return EAGER


def frozen_field(patch, folder):
    """Attention is scaled with the longest context, a number of the metadata."""
    right = attention._decode

    def scaled(query, *others):
        right(query * (1 + max(others[-1].context_lens, default=0)), *others)

    patch.setattr(attention, "_decode", scaled)
    return EAGER


def frozen_number(patch, folder):
    """The same, but the number is kept beside the metadata, where nothing compares it."""
    decode, upload, longest = attention._decode, metadata.MetadataBuffers._upload, [0]

    def uploaded(*given, **facts):
        longest[0] = max(facts["context_lens"], default=0)
        return upload(*given, **facts)

    def scaled(query, *others):
        decode(query * (1 + longest[0]), *others)

    patch.setattr(metadata.MetadataBuffers, "_upload", uploaded)
    patch.setattr(attention, "_decode", scaled)
    return EAGER


def moved_table(patch, folder):
    """The engine allocates a new block table before the fifth step, as one that grows."""
    right, steps = metadata.MetadataBuffers.fill, count(1)

    def fill(self, *given):
        if next(steps) == 5:
            self.tensors["block_table"] = self.tensors["block_table"].clone()
        return right(self, *given)

    patch.setattr(metadata.MetadataBuffers, "fill", fill)
    return EAGER


def moved_behind(patch, folder):
    """The same of a table beside the metadata, which attention finds by itself."""
    decode, upload = attention._decode, metadata.MetadataBuffers._upload
    table, steps = [torch.zeros(129, 64, dtype=torch.int64)], count(1)

    def uploaded(self, *given, **facts):
        filled = upload(self, *given, **facts)
        if facts["context_lens"] and next(steps) == 5:
            table[0] = table[0].clone()
        rows = filled.block_table
        table[0][: len(rows), : rows.shape[1]] = rows
        return filled

    def from_table(query, key, value, output, cache, given):
        rows, blocks = given.block_table.shape
        decode(query, key, value, output, cache, SimpleNamespace(
            slot_mapping=given.slot_mapping, query_start_loc=given.query_start_loc,
            seq_lens=given.seq_lens, block_table=table[0][:rows, :blocks],
        ))  # fmt: skip

    patch.setattr(metadata.MetadataBuffers, "_upload", uploaded)
    patch.setattr(attention, "_decode", from_table)
    return EAGER


def wrong_size(patch, folder):
    def compiler(graph, inputs):
        def code(*args):
            results = graph(*args)
            hit = any(isinstance(x, torch.Tensor) and len(x) == WRONG_SIZE for x in results)
            return (
                tuple(x * 1.5 if x.is_floating_point() else x for x in results) if hit else results
            )

        return code

    patch.delitem(_COMPILER_FNS, "planted_size", raising=False)
    register_backend(compiler, name="planted_size")
    configured(patch, compiler="planted_size")
    return ["--no-cache"]


SCENES = [
    Scene("a graph pass is wrong", wrong_pass, "compiled code", "pass rsqrt_is_sqrt"),
    Scene("a bundle is stale", stale_bundle, "bundle", "every stage is right"),
    Scene("padding is written to a live slot", leaking_padding, "all graphs",
          "stage=PIECEWISE piece=- operator=piecegraph_reference::paged_attention (model.py:"),
    Scene("a graph froze a number of the metadata", frozen_field,
          refused="scaled read len(metadata.context_lens) of the forward context inside a graph"),
    Scene("a graph froze a number beside the metadata", frozen_number, "graphs of the mode",
          "inside the FULL graph; right with splitting ops between the graphs"),
    Scene("a block table moved", moved_table,
          refused="metadata.block_table moved after graphs were captured"),
    Scene("a block table beside the metadata moved", moved_behind, "graphs of the mode",
          "every stage is right"),
    Scene("a kernel is wrong at one size", wrong_size, "compiled code",
          "stage=compiler piece=0 operator=torch.nn.functional.embedding"),
]  # fmt: skip
