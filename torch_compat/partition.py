"""Inductor's graph partition: its partitions, each replaced by one of ours."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from .inductor_fixes import share_memory_of_parts
from .patch import preserve_cache_variables, replaced


@dataclass
class Partitions:
    """What Inductor cut while `inductor_partitions` lasted."""

    count: int = 0
    """Partitions of the code that was made or loaded last."""
    cut_at: set[str] = field(default_factory=set)
    """Ops of `custom_should_partition_ops` that it cut at."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Other operations that it put into no partition, and why."""
    alive: set[str] = field(default_factory=set)
    """Ops of the graph once what nobody needs was removed from it, before it is optimised."""


@contextmanager
def inductor_partitions(wrap: Callable[[Any], Any]) -> Iterator[Partitions]:
    """Let Inductor replace every partition of what it compiles or loads by `wrap(partition)`.

    The scheduler cuts at the ops of the option `custom_should_partition_ops`, and around whatever
    it believes that no graph can hold. One of these rules is right for CUDA graphs alone: that
    operations of a CPU cannot be captured. In a model that is on a CPU as a whole they count as a
    device's. Partitions that write parts of one tensor are made to share its memory. All that is
    replaced is process-wide, and put back, whatever happens inside.
    """
    with preserve_cache_variables():
        import torch._inductor.config as inductor_config
        from torch._inductor import compile_fx
        from torch._inductor.scheduler import Scheduler
        from torch._inductor.utils import _unstable_customized_partition_wrapper as wrapper

        made = Partitions()
        judge: Any = Scheduler.should_partition
        sign: Any = Scheduler.get_graph_partition_signature
        optimise: Any = compile_fx._recursive_post_grad_passes

        def signatures(scheduler: Any, partitions: Any, *args: Any, **kwargs: Any) -> Any:
            signed = sign(scheduler, partitions, *args, **kwargs)
            share_memory_of_parts(partitions, signed)
            return signed

        def optimised(graph: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> None:
            made.alive |= _ops_of(graph)
            optimise(graph, *args, **kwargs)

        def should_partition(scheduler: Any, node: Any, *args: Any, **kwargs: Any) -> Any:
            with _cpu_as_device():
                reason = judge(scheduler, node, *args, **kwargs)
            if reason and not hasattr(node, "snodes"):
                op: Any = getattr(node.node, "op_overload", None)
                name = node.get_name() if op is None else op.name()
                if name in inductor_config.custom_should_partition_ops:
                    made.cut_at.add(name)
                else:
                    made.left_out[name] = str(reason)
            return reason

        def customized(partition: Any, metadata: Any) -> Any:
            made.count = metadata.num_partitions
            return wrap(partition)

        with (
            inductor_config.patch(graph_partition=True),
            replaced(Scheduler, "should_partition", should_partition),
            replaced(Scheduler, "get_graph_partition_signature", signatures),
            replaced(compile_fx, "_recursive_post_grad_passes", optimised),
            replaced(wrapper, "wrapper", customized),
        ):
            yield made


def _ops_of(graph: torch.fx.GraphModule) -> set[str]:
    """Names of the ops that a graph calls, also through what makes functions of them."""
    called: list[Any] = []
    for node in graph.graph.nodes:
        called += [node.target, *node.args[:1]]
    return {op.name() for op in called if hasattr(op, "_schema")}


@contextmanager
def _cpu_as_device() -> Iterator[None]:
    """Let the scheduler take a node of a graph that is on the CPU alone for one of a GPU."""
    from torch._inductor.scheduler import BaseSchedulerNode
    from torch._inductor.virtualized import V

    if set(V.graph.device_types) <= {"cpu"}:
        with replaced(BaseSchedulerNode, "is_gpu", BaseSchedulerNode.is_cpu):
            yield
    else:
        yield
