"""Triton kernels in a graph are known by their source, not by numbers of this process's table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import Graph

from piecegraph.compile.pieces.fingerprint import canonical_text

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


@triton.jit
def plus_one(x_ptr: Any, n: Any, block: tl.constexpr) -> None:
    at = tl.arange(0, block)
    tl.store(x_ptr + at, tl.load(x_ptr + at, mask=at < n) + 1, mask=at < n)


@triton.jit
def plus_two(x_ptr: Any, n: Any, block: tl.constexpr) -> None:
    at = tl.arange(0, block)
    tl.store(x_ptr + at, tl.load(x_ptr + at, mask=at < n) + 2, mask=at < n)


@pytest.fixture(autouse=True)
def table_as_before(monkeypatch):
    """Artifacts of later tests would hold all of the process's kernels, and `launching` is none."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    for name in ("id_to_kernel", "kernel_to_id", "constant_args"):
        monkeypatch.setattr(kernel_side_table, name, dict(getattr(kernel_side_table, name)))


def launching(kernel, number=8):
    """The canonical text of a graph that launches `kernel` as Dynamo writes it."""
    from torch._higher_order_ops.triton_kernel_wrap import (
        kernel_side_table,
        triton_kernel_wrapper_mutation,
    )

    graph = Graph()
    x = graph.placeholder("x")
    graph.call_function(
        triton_kernel_wrapper_mutation,
        kwargs={
            "kernel_idx": kernel_side_table.add_kernel(kernel),
            "constant_args_idx": kernel_side_table.add_constant_args({"n": number, "block": 16}),
            "grid": [(1, 1, 1)],
            "tma_descriptor_metadata": {},
            "kwargs": {"x_ptr": x},
        },
    )
    graph.output((x,))
    return canonical_text(graph, torch.nn.Module())


def test_kernel_and_its_constants_are_part_of_a_piece():
    first = launching(plus_one)
    assert launching(plus_one) == first
    assert launching(plus_two) != first
    assert launching(plus_one, number=9) != first


def test_place_in_the_process_table_is_not():
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    first = launching(plus_one)
    kernel_side_table.add_constant_args({"unrelated": 1})
    kernel_side_table.add_kernel(launching)
    assert launching(plus_one) == first
