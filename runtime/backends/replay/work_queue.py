"""Delayed work of the replay backend: one stream, whose work runs when something waits for it.

A step puts its work into a `WorkQueue` and returns results that have no values yet. From then on a
dispatch mode sees what the engine does. An operation that needs something the queue will write is
queued too, and so is a copy with `non_blocking=True`: both are in the order of the stream. A read
on the host runs the queue first. Every other operation runs at once, as it would on another stream
or on the host: if it writes to what queued work still reads, that work finds the new contents.

Writes that torch does not see, through numpy or by another thread, are found by their contents.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from ....compile.ir.locations import user_line
from ....compile.ir.ops import tensors_in, written_by
from ....errors import ResultOverwritten, RewrittenEarly
from ....torch_compat.basics.ops import (
    OpOverload,
    call_kernel,
    is_composite,
    is_higher_order,
    run_kernel,
)
from ....torch_compat.basics.tensors import (
    FakeTensorMode,
    LightDispatchMode,
    OwnFunctionMode,
    as_bytes,
    last_modes,
    reads_memory,
    storage_id,
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
    without_modes,
)
from ..ownership import EachOp, extent, memory_of, reads_host
from .tape import poison


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """Work that has not run. `names` are of tensors that it may read, for errors."""

    number: int
    name: str
    run: Callable[[], object]
    reads: Sequence[Tensor]
    contents: Sequence[tuple[Tensor, Tensor]]
    """Tensors that nothing in the queue writes, each with what it held when this was queued."""
    names: Sequence[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class Rewrite:
    """A write that did not wait for the work up to number `after`."""

    tensor: Tensor
    where: str | None
    after: int


class WorkQueue:
    """Work in the order in which it was queued. It runs as late as possible.

    With `seed` some of it runs earlier, at random points, as a device may. With `checks`,
    work that reads what was rewritten too early raises RewrittenEarly, and a read of a result that
    a later step overwrote ResultOverwritten; the work that is left is dropped then.
    """

    def __init__(self, seed: int | None, checks: bool) -> None:
        self.checks = checks
        self.busy = False
        """Whether queued work or a capture runs: what it does is not seen."""
        self.done = self.last = 0
        self.steps = 0
        self._random = None if seed is None else Random(seed)
        self._works: deque[Work] = deque()
        # by identity of a storage, the last work that writes it; kept in memory until that has run
        self._written: dict[int, int] = {}
        self._state: dict[int, int] = {}
        self._rewrites: list[Rewrite] = []
        self._results: Any = WeakTensorKeyDictionary()
        self._owners: dict[int, str] = {}
        self._watch: _Watch | None = None

    def put(
        self,
        name: str,
        run: Callable[[], object],
        *,
        reads: Sequence[Tensor] = (),
        compared: Sequence[Tensor] = (),
        writes: Iterable[Tensor] = (),
        state: Iterable[Tensor] = (),
        names: Sequence[tuple[str, Tensor]] = (),
    ) -> None:
        """Queue `run`.

        It reads `reads`, and what it is seen to read; the contents of `compared` are compared then.
        Operations that touch `writes` come after it, and those that read `state`, which it may
        write.
        """
        self.last += 1
        contents = []
        if self.checks and compared:
            known = [each for each in compared if not self._awaits(self._written, each)]
            with without_modes():
                contents = [(each.detach(), each.detach().clone()) for each in known]
        self._works.append(Work(self.last, name, run, reads, contents, names))
        self._written |= {storage_id(each): self.last for each in writes}
        self._state |= {storage_id(each): self.last for each in state}
        self._advance()

    def watch(self) -> bool:
        """See what this thread does from now on; False where other modes would not let us."""
        if self._watch is None:
            _leave_ended()
            if not all(isinstance(mode, _Watch | _HostReads | None) for mode in last_modes()):
                return False
            self._watch = _Watch(ref(self))
            for mode in (self._watch, _HostReads(ref(self))):
                enter: Callable[[], object] = mode.__enter__
                enter()
        return True

    def drain(self, number: int | None = None) -> None:
        """Run the work up to `number`, or all. Raises what the work raises."""
        while self._works and not self.busy and (number is None or self.done < number):
            self._run_next()

    def finish(self) -> None:
        """Run all. Stop to see what this thread does, unless a result is alive."""
        self.drain()
        if not self.busy and not self._results:
            self._end_watch()

    def _end_watch(self) -> None:
        """Stop to see what this thread does. Inside an operation that the mode sees it stays, and
        does nothing, until the next step or the end of the work."""
        if self._watch is not None:
            self._watch.ended, self._watch = True, None
        _leave_ended()

    def made(self, tensor: Tensor, step: str) -> None:
        """`tensor` is a result of `step` in static memory."""
        self._results[tensor] = step

    def overwritten(self, tensors: Iterable[Tensor], by: str) -> None:
        """Static memory has what `by` wrote from now on, in the order of the queue."""
        self._owners |= {storage_id(tensor): by for tensor in tensors}

    def read_on_host(self, args: Any) -> None:
        """Run the queue if it writes what is read."""
        used = memory_of(args)
        self._check_results(used)
        if any(self._awaits(by, each) for each in used for by in (self._written, self._state)):
            self.drain()

    def operation(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """An operation of the engine: now, or in the order of the queue."""
        self._advance()
        used, written = memory_of((args, kwargs)), memory_of(list(written_by(func, args, kwargs)))
        if func.is_view or torch.Tag.inplace_view in func.tags:
            return self._view(func(*args, **kwargs), used)
        self._check_results(used)
        sources = [each for each in used if all(each is not target for target in written)]
        late = _non_blocking(func, args, kwargs)
        needed = any(self._awaits(self._written, each) for each in used)
        if not (late or needed or any(self._awaits(self._state, each) for each in sources)):
            self._note(written)
            return func(*args, **kwargs)
        places = None if reads_host(func, args, kwargs) else _places(func, args, kwargs)
        if places is None:
            self.drain()
            return func(*args, **kwargs)
        where = user_line()
        name = f"{func.overloadpacket} (at {where})" if where else str(func.overloadpacket)
        # what one operation of the engine reads, its next ones write in the order of the stream
        others = [] if late and not needed else sources
        self.put(
            name,
            partial(_fill, func, args, kwargs, places),
            reads=used,
            compared=sources if late else (),
            writes=[*memory_of(places), *written, *others],
            names=[(f"argument {number}", each) for number, each in enumerate(sources)],
        )
        return places

    def _awaits(self, writers: Mapping[int, int], tensor: Tensor) -> bool:
        """Whether one of `writers` is still to write `tensor`."""
        return writers.get(storage_id(tensor), 0) > self.done

    def _advance(self) -> None:
        """Run some work, as a device may have done by now."""
        while self._random is not None and self._works and self._random.random() < 0.25:
            self._run_next()

    def _run_next(self) -> None:
        work = self._works.popleft()
        self.busy = True
        try:
            self._run_checked(work)
        except BaseException:
            self._works.clear()
            self._end_watch()
            raise
        finally:
            self.busy = False
            self.done = work.number if self._works else self.last
            self._rewrites = [each for each in self._rewrites if each.after > self.done]

    def _run_checked(self, work: Work) -> None:
        if not self.checks:
            work.run()
            return
        early = [each for each in self._rewrites if each.after >= work.number]
        for tensor in work.reads:
            _check_read(tensor, early, work)

        def see(func: OpOverload, args: Any, kwargs: Any) -> None:
            for tensor in memory_of((args, kwargs)):
                _check_read(tensor, early, work)

        with EachOp(see, call_kernel):
            work.run()

    def _note(self, written: Sequence[Tensor]) -> None:
        if written and self._works:
            where = user_line()
            self._rewrites += [Rewrite(each.detach(), where, self.last) for each in written]

    def _view(self, result: Any, used: Sequence[Tensor]) -> Any:
        """Views of a result are results of the same step."""
        steps = [step for each in used if (step := self._results.get(each)) is not None]
        for view in tensors_in(result) if steps else ():
            self._results[view] = steps[0]
        return result

    def _check_results(self, used: Sequence[Tensor]) -> None:
        for tensor in used if self.checks and not self.busy else ():
            step = self._results.get(tensor)
            by = self._owners.get(storage_id(tensor))
            if step is not None and by is not None and by != step:
                raise ResultOverwritten(where=user_line(), step=step, by=by)


class _Watch(LightDispatchMode):
    """Shows a queue the operations of this thread, as long as the queue exists."""

    def __init__(self, queue: ref[WorkQueue]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ended = False
        self._queue = queue

    @property
    def in_use(self) -> bool:
        return not self.ended and self._queue() is not None

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        queue, given = self._queue(), kwargs or {}
        if queue is None or queue.busy or self.ended:
            return func(*args, **given)
        if is_higher_order(func):
            return func(*args, **given)
        if is_composite(func):
            with self:
                return run_kernel(func, "CPU", args, given)
        return queue.operation(func, args, given)


class _HostReads(OwnFunctionMode):
    """Shows a queue the host reads that no dispatch mode sees."""

    def __init__(self, queue: ref[WorkQueue]) -> None:
        super().__init__()
        self._queue = queue

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        queue = self._queue()
        given = kwargs or {}
        if queue is not None and reads_memory(func, args, given):
            queue.read_on_host((args, given))
        return func(*args, **given)


def _leave_ended() -> None:
    """Leave the modes of ended queues, except below modes of others."""
    while isinstance(watch := (modes := last_modes())[0], _Watch) and not watch.in_use:
        if not isinstance(modes[1], _HostReads):
            return
        for mode in modes:
            leave: Callable[..., object] = mode.__exit__
            leave(None, None, None)


class QueuePoint:
    """The end of the work queued so far, with the methods of a `torch.cuda.Event`."""

    def __init__(self, queue: WorkQueue | None) -> None:
        self._queue = queue
        self._number = queue.last if queue is not None else 0

    def query(self) -> bool:
        """Whether the work has run."""
        return self._queue is None or self._queue.done >= self._number

    def synchronize(self) -> None:
        """Run the work that has not run."""
        if self._queue is not None:
            self._queue.drain(self._number)

    def wait(self, stream: Any = None) -> None:
        """Run the work that has not run: operations of the engine are not on the stream."""
        self.synchronize()


def _non_blocking(func: OpOverload, args: Any, kwargs: Any) -> bool:
    """Whether a copy was asked for that a device makes later."""
    third = func.overloadpacket is torch.ops.aten.copy_ and len(args) > 2 and args[2]
    return bool(third or kwargs.get("non_blocking"))


def _places(func: OpOverload, args: Any, kwargs: Any) -> Any:
    """What `func` returns, without values; None if its form depends on values."""
    fakes: dict[int, Tensor] = {}
    try:
        with FakeTensorMode() as mode:

            def fake(tensor: Tensor) -> Any:
                made = mode.from_tensor(tensor)
                fakes[id(made)] = tensor
                return made

            given = tree_map_only(Tensor, fake, (args, kwargs))
            leaves, spec = tree_flatten(func(*given[0], **given[1]))
    except Exception:  # the operation itself raises it again, or its form is not known
        return None
    if not all(leaf is None or isinstance(leaf, Tensor) for leaf in leaves):
        return None
    return tree_unflatten([leaf if leaf is None else _place(leaf, fakes) for leaf in leaves], spec)


def _place(fake: Tensor, fakes: dict[int, Tensor]) -> Tensor:
    given = fakes.get(id(fake))
    if given is not None:
        return given
    return poison(torch.empty_strided(fake.size(), fake.stride(), dtype=fake.dtype, device="cpu"))


def _fill(func: OpOverload, args: Any, kwargs: Any, places: Any) -> None:
    with torch.inference_mode():  # in which tensors of either kind may be written
        results = tree_leaves(func(*args, **kwargs))
        for place, result in zip(tree_leaves(places), results, strict=True):
            if place is not result and place is not None:
                place.copy_(result)


def _check_read(tensor: Tensor, early: Sequence[Rewrite], work: Work) -> None:
    """Raise RewrittenEarly if `tensor` is not what it was when `work` was queued."""
    rewrite = next((each for each in early if _overlap(tensor, each.tensor)), None)
    held = (pair for pair in work.contents if _overlap(tensor, pair[0]))
    others = (not torch.equal(*map(as_bytes, pair)) for pair in held)
    if rewrite is None and not any(others):
        return
    form = f"a {str(tensor.dtype).removeprefix('torch.')} tensor of shape {tuple(tensor.shape)}"
    raise RewrittenEarly(
        where=rewrite.where if rewrite is not None else None,
        by="the engine" if rewrite is not None else "something that torch does not see",
        buffer=next((name for name, each in work.names if _overlap(tensor, each)), form),
        step=work.name,
    )


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have memory in common, as far as their first and last bytes say."""
    (a, b), (c, d) = extent(one), extent(other)
    return a < d and c < b
