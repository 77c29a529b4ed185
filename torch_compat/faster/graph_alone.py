"""What Dynamo makes so that a graph can be called with its inputs is left out.

Saves: TODO
For: torch 2.11 to 2.14.
Can go: once a full-graph capture of torch leaves out the code that calls the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..basics.patch import replaced


@contextmanager
def graph_alone() -> Iterator[None]:
    """Leave out what Dynamo makes of each input of a graph so that the graph can be called.

    It names the weights below each module for exporters, generates Python code for two modules of
    the graph, and bytecode that passes each input. No one calls the graph: code is generated when
    its forward is called, and the bytecode around it passes no inputs.
    """
    from torch._dynamo.codegen import PyCodegen
    from torch._dynamo.output_graph import OutputGraph

    compile_graph, call_graph = (
        OutputGraph.compile_and_call_fx_graph,
        PyCodegen.make_call_generated_code,
    )
    generate = torch.fx.GraphModule.recompile

    def on_demand(self: torch.fx.GraphModule) -> None:
        def forward(self: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
            generate(self)
            return self.forward(*args, **kwargs)

        type(self).forward = forward  # each has its own class

    def compiled(*args: Any, **kwargs: Any) -> Any:
        with replaced(torch.fx.GraphModule, "recompile", on_demand):
            return compile_graph(*args, **kwargs)

    def called(self: Any, name: str) -> None:
        with replaced(OutputGraph, "graphargs", ()):
            call_graph(self, name)

    with (
        replaced(OutputGraph, "compile_and_call_fx_graph", compiled),
        replaced(PyCodegen, "make_call_generated_code", called),
        replaced(OutputGraph, "add_fqn_info_for_inlined_modules", lambda *_: None),
    ):
        yield
