"""Triton kernels run in Triton's interpreter, as host functions on the stream.

`TRITON_INTERPRET=1` must be set before triton is imported. libdevice's functions, which are bodies
in another file on a device, are numpy functions here.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .values import cpu_argument, launch_argument, on_stream

SAME_IN_NUMPY = (
    "abs", "ceil", "cos", "exp", "exp2", "expm1", "floor", "fmod", "log", "log1p", "log2", "sin",
    "sqrt", "tanh", "trunc",
)  # fmt: skip
LIBDEVICE: dict[str, Callable[..., Any]] = {
    **{name: getattr(np, name) for name in SAME_IN_NUMPY},
    "div_rn": np.divide,
    "erf": np.vectorize(math.erf, otypes=[np.float64]),
    "fabs": np.abs,
    "isinf": lambda x: np.isinf(x).astype(np.int32),
    "isnan": lambda x: np.isnan(x).astype(np.int32),
    "nearbyint": np.rint,
    "pow": np.power,
    "rsqrt": lambda x: 1 / np.sqrt(x),
}
PREDICATES = ("isinf", "isnan")


def install() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("set TRITON_INTERPRET=1: Triton's kernels cannot run on the stand-in")
    _interpret_libdevice()
    _run_kernels_on_the_stream()


def _run_kernels_on_the_stream() -> None:
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner
    from triton.runtime.interpreter import GridExecutor

    interpret = GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        """On tensors of the device; a kernel on CPU tensors runs at once."""
        if not any(isinstance(each, torch.Tensor) and each.is_cuda for each in args):
            interpret(self, *args, **kwargs)
            return
        launched = [launch_argument(each) for each in args]
        on_stream(
            f"triton {self.fn.__name__}",
            lambda: interpret(self, *map(cpu_argument, launched), **kwargs),
            launched,
        )

    def run(self: Any, *args: Any, stream: Any, benchmark_run: bool = False, **kwargs: Any) -> None:
        args, grid = self._interpret_args_grid(args, self.configs[0])
        self.fn[grid](*args, **kwargs, **self.configs[0].kwargs)

    GridExecutor.__call__ = launch
    CachingAutotuner.run = run  # type: ignore[method-assign]


def _interpret_libdevice() -> None:
    from torch._inductor.runtime import triton_helpers
    from triton.language.extra import libdevice
    from triton.runtime import interpreter

    tl = interpreter.tl

    def computed(name: str, handles: list[Any]) -> Any:
        result = np.asarray(LIBDEVICE[name](*[handle.data for handle in handles]))
        if name in PREDICATES:
            return interpreter.TensorHandle(result.astype(np.int32), tl.int32)
        dtype = handles[0].dtype
        return interpreter.TensorHandle(result.astype(handles[0].data.dtype), dtype)

    def function(name: str) -> Callable[..., Any]:
        def call(*values: Any, _semantic: Any = None, **_: Any) -> Any:
            kind = values[0].type
            if name in PREDICATES:
                kind = tl.block_type(tl.int32, kind.shape) if kind.is_block() else tl.int32
            return tl.tensor(computed(name, [value.handle for value in values]), kind)

        return call

    for name in LIBDEVICE:
        for module in (libdevice, triton_helpers.libdevice):
            if hasattr(module, name):
                setattr(module, name, function(name))
