"""Dynamo: one full-graph capture, dynamic dimensions, the user's line of an error, backends."""

from __future__ import annotations

import builtins
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.autograd.grad_mode import _enter_inference_mode, _exit_inference_mode

from ..basics.facts import UNGUARDED, GuardFact
from ..basics.frames import is_user_file, user_line
from ..basics.patch import (
    compiler_lock,
    dynamo_lock,
    preserve_cache_variables,
    replaced,
    with_globals,
)
from ..basics.symbolic import release_shape_environments
from .inlined import Inlined, inlined_calls

enter_autocast = _enter_autocast
"""How Dynamo writes the start of an autocast block into a graph."""
exit_autocast = _exit_autocast


COMPILED_FUNCTION = "_torchdynamo_orig_callable"
"""Attribute of the function that `torch.compile` returns: the function that it was given."""


def import_dynamo() -> None:
    """Import what tracing needs, about 1 s, so that it can be timed apart from the trace."""
    import torch._dynamo.convert_frame  # noqa: F401


@dataclass(frozen=True)
class Captured:
    """Result of Dynamo's full-graph capture, without its version-dependent types."""

    graph: torch.fx.GraphModule
    fake_mode: Any
    call: Callable[..., Any]
    """`call(compiled_fn)(*args, **kwargs)` runs Dynamo's bytecode around `compiled_fn`, to which it
    passes the inputs of the graph."""
    inlined: Inlined
    guards: tuple[GuardFact, ...]
    aliases: dict[str, str]
    """Dynamo's own names for modules among the globals."""
    local_scope: dict[str, Any]
    """The meaning of `L` in expressions: the arguments of the traced function."""
    closure: dict[str, Any]
    """Variables that the traced function closes over; `L` has them too."""
    global_scope: dict[str, Any]
    """The meaning of `G`: the globals of the traced function, with the names Dynamo added."""
    changes: tuple[StateChange, ...]
    """What the model changes in objects that were there before; running `call` does not."""


@dataclass(frozen=True)
class StateChange:
    """A change of Python state: of `attribute` of the object at `expression`, or of a container."""

    expression: str
    attribute: str | None
    where: str | None
    """file:line of the user's code."""
    tensors: bool
    """Whether the new value holds tensors."""


@contextmanager
def reasoning_about_sizes(dynamic_shapes: str) -> Iterator[None]:
    """Set how torch decides conditions on sizes, while tracing and compiling."""
    from torch.fx.experimental import _config

    shapes_config: Any = _config

    oblivious = dynamic_shapes == "backed_size_oblivious"
    with (
        compiler_lock(),
        torch.no_grad(),
        shapes_config.patch(backed_size_oblivious=oblivious),
        _slices_of_derived_size(),
    ):
        yield


@contextmanager
def _slices_of_derived_size() -> Iterator[None]:
    """Torch 2.11 gives a slice that may end past the last row a size of its own."""
    if torch.__version__ >= "2.12":
        yield
        return
    from torch._subclasses import fake_impls

    kernels: dict[Any, Any] = dict(fake_impls.op_implementations_dict)
    kernels[torch.ops.aten.slice.Tensor] = partial(_sliced, fake_impls)
    with replaced(fake_impls, "op_implementations_dict", kernels):
        yield


def _sliced(
    torchs: Any,
    mode: Any,
    op: Any,
    x: Any,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: Any = 1,
) -> Any:
    """A slice as in later versions of torch: its size follows from the size of `x`."""
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    symbolic: Any = torch

    def row(index: Any) -> Any:
        if (known := torchs._compute_slice_index(x.size(dim), index)) is not None:
            return known
        if guard_or_false(index >= 0):
            return symbolic.sym_min(index, x.size(dim))
        return symbolic.sym_max(index + x.size(dim), 0) if guard_or_false(index < 0) else None

    first = row(0 if start is None else start)
    last = x.size(dim) if end is None else row(end)
    if first is None or last is None:
        return torchs.slice_forward(mode, op, x, dim, start, end, step)
    rows = last - first if guard_or_false(last >= first) else symbolic.sym_max(last - first, 0)
    sizes, strides = list(x.size()), list(x.stride())
    sizes[dim], strides[dim] = (rows + step - 1) // step, strides[dim] * step
    return x.as_strided(sizes, strides, x.storage_offset() + first * x.stride(dim))


@contextmanager
def dynamo_tracing(dynamic_shapes: str) -> Iterator[None]:
    """Settings for one trace; restored at the end."""
    release_shape_environments()
    with ExitStack() as stack:
        stack.enter_context(preserve_cache_variables())
        import torch._dynamo.config as dynamo_config
        from torch._dynamo.utils import get_metrics_context
        from torch._dynamo.variables import builder
        from torch.fx.experimental import symbolic_shapes

        stack.enter_context(dynamo_lock())
        stack.enter_context(reasoning_about_sizes(dynamic_shapes))
        settings: dict[str, Any] = {
            "automatic_dynamic_shapes": False,
            "replay_side_effects": False,
            "skip_guards_on_constant_func_defaults": False,  # True in torch 2.11
        }
        stack.enter_context(dynamo_config.patch(settings))
        for replacement in (
            (builder, "SkipGuardSource", lambda source: source),  # of a signature that is held
            (symbolic_shapes, "format_frame", _full_frame),
        ):
            stack.enter_context(replaced(*replacement))
        stack.enter_context(get_metrics_context())
        yield


def _full_frame(frame: Any, *, base: str | None = None, line: bool = False) -> str:
    """As torch formats a frame, with the whole path instead of its last three parts."""
    code = f"{frame.line}  # " if line else ""
    return f"{code}{frame.filename}:{frame.lineno} in {frame.name}"


def capture_full_graph(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Captured | None:
    """One Dynamo graph of `model.forward`, or None if it holds no tensor operation."""
    from torch._dynamo.convert_frame import fullgraph_capture

    function, bound = _traced_function(model)
    with (
        _own_globals(function) as traced,
        inlined_calls() as inlined,
        _state_changes() as changes,
        _parts_of_values_guarded(),
        _assertions_of_sizes_kept(),
    ):
        forward = traced if bound is None else MethodType(traced, bound)
        output = fullgraph_capture(forward, args, kwargs)
        runtime = output.graph_capture_output.get_runtime_env()
    own_kwargs = inspect.getfullargspec(function).varkw
    if output.backend_input is None:
        return None
    graph_name = output.backend_input.backend_id
    fake_mode: Any = output.backend_input.fake_mode
    # a shape environment, its fake inputs and their sizes are a cycle that no collection sees
    fake_mode.shape_env.tracked_fakes.clear()
    guards = [*inlined.facts, *_guard_facts(output.graph_capture_output.output_graph.guards)]
    unguarded = inlined.wrapped - {fact.expression for fact in guards}
    guards += [GuardFact(expression, UNGUARDED) for expression in unguarded]
    facts = {(fact.expression, fact.kind, repr(fact.argument)): fact for fact in guards}

    def call(compiled_fn: Callable[..., Any]) -> Callable[..., Any]:
        names = vars(builtins) | traced.__globals__  # torch 2.11 asks for builtins, too
        forward: Callable[..., Any] = runtime.forward_callable(
            graph_name, compiled_fn, extra_globals=names
        )
        return forward if bound is None else partial(forward, bound)

    return Captured(
        graph=output.backend_input.graph_module,
        fake_mode=fake_mode,
        call=call,
        inlined=inlined,
        guards=tuple(facts[identity] for identity in sorted(facts)),
        aliases=dict(output.graph_capture_output.import_sources),
        local_scope=_local_scope(function, bound, args, kwargs),
        closure=dict(inspect.getclosurevars(function).nonlocals),
        global_scope=traced.__globals__,
        changes=tuple(change for change in changes if change.expression != f"L[{own_kwargs!r}]"),
    )


def _traced_function(model: torch.nn.Module) -> tuple[Any, object | None]:
    """What Dynamo traces of a model, and the model if that is a method of it."""
    from torch._dynamo.convert_frame import get_traced_fn

    try:
        return get_traced_fn(model)
    except RuntimeError:  # its forward is no function and no method, such as a partial
        forward = model.forward

    def call(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return call, None


@contextmanager
def _own_globals(function: FunctionType) -> Iterator[FunctionType]:
    """The function with a copy of its globals, also in what it calls of the same file.

    Dynamo writes names into the globals of the function that it traces, and a full-graph capture
    leaves them there: one holds the graph. Another thread may go through these globals just then,
    as `torch.fx.symbolic_trace` does.
    """
    from torch._dynamo import variables

    kind: Any = variables.UserFunctionVariable
    shared, own = function.__globals__, dict(function.__globals__)
    original = kind.get_globals

    def get_globals(self: Any) -> dict[str, Any]:
        found = original(self)
        return own if found is shared else found

    with replaced(kind, "get_globals", get_globals):
        yield with_globals(function, own)


@contextmanager
def _parts_of_values_guarded() -> Iterator[None]:
    """Add guards on the arguments of which the forward makes a value of an opaque type.

    Dynamo adds none if the type was registered with `hoist=True`: its code makes the value before
    each call of the graph. Ours has the value that the trace made.
    """
    from torch._dynamo.variables import script_object
    from torch._dynamo.variables.lazy import LazyVariableTracker

    names = "OpaqueObjectClassVariable", "CustomClassVariable"  # the second from torch 2.14 on
    made: Any = next(vars(script_object)[name] for name in names if hasattr(script_object, name))
    original = made.call_function

    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        given = LazyVariableTracker.realize_all([[*args], kwargs])
        return original(self, tx, *given)

    with replaced(made, "call_function", call_function):
        yield


@contextmanager
def _assertions_of_sizes_kept() -> Iterator[None]:
    """Write each assertion about sizes into the graph, whatever its form and its message.

    Dynamo decides `torch._assert` by the example's size (`handle_assert` in
    `torch/_dynamo/variables/torch.py`), and takes no message that names a size.
    """
    from torch._dynamo import variables

    of_sizes: Any = vars(variables)["SymNodeVariable"]
    kind = variables.TorchInGraphFunctionVariable
    handlers = kind._get_handlers()
    check, checked = handlers[torch._check], kind(torch._check)

    def keeping(original: Callable[..., Any]) -> Callable[..., Any]:
        def handle(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            condition = args[0] if args else kwargs.get("cond", kwargs.get("condition"))
            if isinstance(condition, of_sizes):
                return check(checked, tx, condition)  # torch 2.11 calls what this one stands for
            return original(variable, tx, *args, **kwargs)

        return handle

    kept = {each: keeping(handlers[each]) for each in (torch._check, torch._assert)}
    with replaced(kind, "_get_handlers", staticmethod(lambda: handlers | kept)):
        yield


def _local_scope(function: Any, bound: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """The parameters of the traced function when it begins."""
    given = args if bound is None else (bound, *args)
    # a decorated function is traced from its wrapper, whose parameters are often *args, **kwargs
    taken = inspect.signature(function, follow_wrapped=False).bind(*given, **kwargs)
    taken.apply_defaults()
    return taken.arguments


@contextmanager
def _state_changes() -> Iterator[dict[StateChange, None]]:
    """Record what Dynamo would change after the graph has run, if it replayed side effects."""
    from torch._dynamo.side_effects import SideEffects
    from torch._dynamo.variables.base import AttributeMutationExisting, ValueMutationExisting

    found: dict[StateChange, None] = {}
    original = SideEffects.codegen_update_mutated

    def codegen_update_mutated(self: Any, *args: Any, **kwargs: Any) -> Any:
        for variable in self._get_modified_vars():
            existing = (AttributeMutationExisting, ValueMutationExisting)
            if not isinstance(variable.mutation_type, existing):
                continue
            try:
                expression = str(variable.source.name)
            except NotImplementedError:  # a variable of an enclosing function
                expression = str(getattr(variable, "local_name", None))
            where = next(map(user_line, self.mutation_user_stacks.get(variable, [])), None)
            written = self.store_attr_mutations.get(variable, {})
            for attribute, value in written.items():
                if not _is_now(variable, attribute, value):
                    changed = None if attribute == "cell_contents" else attribute
                    found[StateChange(expression, changed, where, _has_tensors(value))] = None
            if not written:
                found[StateChange(expression, None, where, _has_tensors(variable))] = None
        return original(self, *args, **kwargs)

    with replaced(SideEffects, "codegen_update_mutated", codegen_update_mutated):
        yield found


def _has_tensors(value: Any) -> bool:
    """Whether a value of Dynamo is a tensor, or a container with one inside."""
    from torch._dynamo import variables

    inside: list[Any] = []
    variables.VariableTracker.visit(inside.append, value)
    return any(isinstance(each, variables.TensorVariable) for each in inside)


def _is_now(variable: Any, attribute: str, value: Any) -> bool:
    """Whether the attribute of an object is set to the constant that it holds already."""
    try:
        now = inspect.getattr_static(variable.value, attribute)
        return bool(value.as_python_constant() is now)
    except Exception:  # not a constant, or not an object of its own
        return False


def _guard_facts(guards: Any) -> Iterator[GuardFact]:
    for guard in guards:
        given = guard.create_fn.keywords if isinstance(guard.create_fn, functools.partial) else {}
        named = next((given[name] for name in ("attr", "key", "source_b") if name in given), None)
        source, kind = guard.originating_source, guard.create_fn_name()
        if kind == "HASATTR" and "attr" not in given:  # torch 2.11: the source of the attribute
            attribute = source if hasattr(source, "member") else source.base
            if not hasattr(attribute, "member"):
                continue  # the code of a function: always there
            source, named = attribute.base, attribute.member
        expression = str(source.name)
        argument = str(given["source_b"].name) if "source_b" in given else named
        yield GuardFact(expression, kind, argument, user_line(guard.user_stack))


def unsupported_op(error: BaseException) -> str | None:
    """The op without a fake implementation that a Dynamo error is about; else None."""
    found = re.search(r"unsupported operator: ([\w.]+)", str(error))
    if found is None or "fake tensors" not in str(error):
        return None
    return "::".join(found[1].split(".")[:2])


def user_location(error: BaseException) -> str | None:
    """file:line of the user's code that a Dynamo error is about."""
    seen: BaseException | None = error
    while seen is not None:
        stack = getattr(seen, "real_stack", None)
        if stack:
            own = [frame for frame in stack if is_user_file(frame.filename)]
            return f"{(own or stack)[-1].filename}:{(own or stack)[-1].lineno}"
        seen = seen.__cause__ or seen.__context__
    return None


def mark_dynamic(
    tensor: torch.Tensor, dim: int, symbol: str, limits: tuple[int, int], dynamic_shapes: str
) -> None:
    """Mark a dimension as dynamic; unbacked dimensions with one symbol share it.

    Limits are passed for unbacked dimensions only (from torch 2.12 on). For a backed dimension with
    a narrower range torch would raise an error; we need a guard.
    """
    with preserve_cache_variables():
        import torch._dynamo

    if dynamic_shapes == "unbacked":
        mark = torch._dynamo.decorators.mark_unbacked
        known = {"min", "max"} <= inspect.signature(mark).parameters.keys()
        bounds = dict(zip(("min", "max"), limits, strict=True)) if known else {}
        mark(tensor, dim, shape_id=symbol, **bounds)
    else:
        torch._dynamo.mark_dynamic(tensor, dim)


def current_shape_env() -> Any:
    """The shape environment of the trace whose graph Dynamo gives to a backend."""
    from torch._guards import TracingContext

    return TracingContext.get().fake_mode.shape_env  # type: ignore[union-attr]


def input_source(node: torch.fx.Node) -> str:
    """Python expression over `L` (arguments) and `G` (globals) that yields a graph input."""
    return str(node._dynamo_source.name)  # type: ignore[attr-defined]


def registered_backends() -> list[str]:
    """Names of the backends that are registered with `torch.compile`."""
    with preserve_cache_variables():
        return torch.compiler.list_backends(exclude_tags=())


def registered_backend(name: str) -> Callable[..., Any]:
    """The backend that is registered with `torch.compile` as `name`."""
    from torch._dynamo.backends.registry import lookup_backend

    return lookup_backend(name)


def is_gradient_switch(target: Any) -> bool:
    """Whether a call of `target` in a graph only decides whether gradients are recorded."""
    switches = (_enter_inference_mode, _exit_inference_mode, torch._C._set_grad_enabled)
    return any(target is switch for switch in switches)
