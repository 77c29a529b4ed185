"""Models of several tests, all of one input `x` of shape (num_tokens, 8)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from piecegraph.errors import CompileError

from . import ops as _registers  # noqa: F401

X = {"x": "float32[num_tokens, 8]"}
SIZES = (1, 2, 3, 7, 64, 128)
MIX = ("piecegraph_test::mix",)


class Body(nn.Module):
    """`body(module, x)` as a model."""

    def __init__(self, body: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = body
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


class Function(nn.Module):
    """A function of `x` as a model."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def assert_right(made: Callable[..., Any], model: nn.Module, sizes: Iterable[int] = SIZES) -> None:
    """What is made of a model gives what it gives, for each number of rows."""
    for size in sizes:
        x = torch.randn(size, 8)
        with torch.no_grad():
            torch.testing.assert_close(made(x.clone()), model(x.clone()))


def marked_line(body: Callable[..., Any], mark: str) -> int:
    """The number of the one line of `body` that holds `mark`."""
    lines, first = inspect.getsourcelines(body)
    (index,) = [i for i, line in enumerate(lines) if mark in line]
    return first + index


class Products(nn.Module):
    """Ops between products of matrices: Inductor has nothing for a C++ compiler to do."""

    def __init__(self, ops: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.names = [f"layers.{i}" for i in range(ops)]
        self.weight = nn.Parameter(torch.randn(8, 8) / 3, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for name in self.names:
            x = torch.ops.piecegraph_test.fresh(x @ self.weight, name)
        return x @ self.weight


def place(error: CompileError) -> tuple[str, int]:
    """File and line of an error."""
    file, _, line = str(error.where).partition(" in ")[0].rpartition(":")
    return file, int(line)


class Layer(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        out = torch.empty_like(y)
        torch.ops.piecegraph_test.mix(y, out, self.name)
        return x + F.silu(out)


class Stack(nn.Module):
    """Layers with a splitting op each."""

    def __init__(self, layers: int = 3, odd: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(f"layers.{i}") for i in range(layers))
        self.odd = odd
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = x * 0.5
        for index, layer in enumerate(self.layers):
            x = layer(x)
            if index == self.odd:
                x = x.tanh()
        return x * self.scale
