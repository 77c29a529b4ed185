"""Inductor's graph partition: observe it, and replace its partitions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..basics.patch import preserve_cache_variables, replaced
from ..repairs.inductor_fixes import share_memory_of_parts


@dataclass
class Partitions:
    """What Inductor partitioned inside `inductor_partitions`."""

    count: int = 0
    """Number of partitions of the last code that was generated or loaded."""
    cut_at: set[str] = field(default_factory=set)
    """Ops of `custom_should_partition_ops` at which it partitioned."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Other operations outside all partitions, and the reason."""
    alive: set[str] = field(default_factory=set)
    """Ops of the graph after dead code elimination, before optimization."""


@contextmanager
def inductor_partitions(wrap: Callable[[Any], Any]) -> Iterator[Partitions]:
    """Make Inductor replace every partition of what it compiles or loads by `wrap(partition)`.

    The scheduler partitions at the ops of the option `custom_should_partition_ops`, and around
    operations that no CUDA graph can hold. Operations on a CPU are among those; in a model that is
    entirely on a CPU they are treated like device operations. Partitions that write parts of one
    tensor share its memory. The replaced functions are process-wide and restored at the end.
    """
    with preserve_cache_variables():
        import torch._inductor.config as inductor_config
        from torch._inductor import compile_fx
        from torch._inductor.scheduler import Scheduler
        from torch._inductor.utils import _unstable_customized_partition_wrapper as wrapper

        made = Partitions()
        judge: Any = Scheduler.should_partition
        sign: Any = Scheduler.get_graph_partition_signature
        optimize: Any = compile_fx._recursive_post_grad_passes

        def signatures(scheduler: Any, partitions: Any, *args: Any, **kwargs: Any) -> Any:
            signed = sign(scheduler, partitions, *args, **kwargs)
            share_memory_of_parts(partitions, signed)
            return signed

        def optimized(graph: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> None:
            made.alive |= _ops_of(graph)
            optimize(graph, *args, **kwargs)

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
            replaced(compile_fx, "_recursive_post_grad_passes", optimized),
            replaced(wrapper, "wrapper", customized),
        ):
            yield made


def _ops_of(graph: torch.fx.GraphModule) -> set[str]:
    """Names of the ops that a graph calls, directly or through a higher-order op."""
    called: list[Any] = []
    for node in graph.graph.nodes:
        called += [node.target, *node.args[:1]]
    return {op.name() for op in called if hasattr(op, "_schema")}


@contextmanager
def _cpu_as_device() -> Iterator[None]:
    """Make the scheduler treat nodes of a CPU-only graph like nodes on a GPU."""
    from torch._inductor.scheduler import BaseSchedulerNode
    from torch._inductor.virtualized import V

    if set(V.graph.device_types) <= {"cpu"}:
        with replaced(BaseSchedulerNode, "is_gpu", BaseSchedulerNode.is_cpu):
            yield
    else:
        yield
