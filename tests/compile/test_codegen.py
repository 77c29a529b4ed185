"""The stitched function: order, unpacking, keyword arguments, early release of values."""

import enum
import math
import re
import weakref

import torch
from hypothesis import given
from hypothesis import strategies as st

from piecegraph.compile.ir.serialization import Expr, Ref
from piecegraph.compile.plan.codegen import build_step, step_source

from .plans import call, piece, small_plan

X = torch.arange(24.0).view(3, 8)
WEIGHTS = {"a.b": torch.ones(8)}


def run(steps, results, *pieces, **hooks):
    plan = small_plan(steps, *results)
    return build_step(plan, pieces, WEIGHTS, **hooks)(X)


def test_each_use_of_a_piece_and_of_an_op_can_be_wrapped():
    steps = [
        piece("i0", outs=("t0",)),
        call("fresh.default", Ref("t0"), "a", outs=("t1",)),
        piece("t1", outs=("t2",)),
        call("fresh.default", Ref("t2"), "b", outs=("t3",)),
    ]
    seen = []

    def hook(kind):
        def wrap(use, fn):
            def wrapped(*args):
                seen.append((kind, use))
                return fn(*args)

            return wrapped

        return wrap

    run(steps, ["t3"], lambda args: (args[0] + 1,), piece_hook=hook("p"), call_hook=hook("c"))
    assert seen == [("p", 0), ("c", 0), ("p", 1), ("c", 1)]


def test_values_die_right_after_their_last_use():
    alive = []
    made = []

    def count(args):
        alive.append([index for index, ref in enumerate(made) if ref() is not None])
        out = torch.zeros(2)
        made.append(weakref.ref(out))
        args.clear()
        return (out,)

    steps = [
        piece("i0", outs=("t0",)),
        piece("t0", outs=("t1",)),
        piece("t0", "t1", outs=("t2",)),  # the last use of both
        piece("t2", outs=("t3",)),
        piece("i0", outs=("t4",)),
    ]
    run(steps, ["t4", "t2"], count)
    assert alive == [[], [0], [0, 1], [2], [2]]


@given(st.data())
def test_every_intermediate_is_deleted_once_and_never_used_after(data):
    """Against the obvious oracle: walk the source line by line and track which names exist."""
    steps, names = [], ["i0"]
    for _ in range(data.draw(st.integers(1, 8))):
        args = data.draw(st.lists(st.sampled_from(names), max_size=3))
        outs = tuple(f"t{len(names) + n}" for n in range(data.draw(st.integers(1, 2))))
        if data.draw(st.booleans()):
            steps.append(piece(*args, outs=outs))
        else:
            steps.append(call("x", *map(Ref, args), outs=outs, unpack=True))
        names.extend(outs)
    results = data.draw(st.lists(st.sampled_from(names), max_size=2))
    source, _ = step_source(small_plan(steps, *results))
    live = set()
    for line in map(str.strip, source.splitlines()):
        found = re.findall(r"\bt\d+", line)
        if line.startswith("del "):
            assert len(found) == len(set(found))
            assert set(found) <= live
            live -= set(found)
        elif "=" in line:
            left, _, right = line.partition("=")
            assert set(re.findall(r"\bt\d+", right)) <= live
            live |= set(re.findall(r"\bt\d+", left))
    assert live == {name for name in results if name.startswith("t")}


def test_size_inside_a_dict_is_computed():
    step = call("x", {"size": Expr("2*s0")}, {3: [Ref("i0")]}, outs=("t0",))
    source, constants = step_source(small_plan([step]))
    assert "c0({'size': 2*s0}, {3: [i0]})" in source
    assert constants == {}


class Mode(enum.Enum):
    FAST = 1


def test_w22_constants_that_have_no_source_form_are_bound():
    bound = [torch.float16, torch.device("cpu"), Mode.FAST]
    source, constants = step_source(
        small_plan([call("x", math.inf, -math.inf, 0.5, *bound, slice(1, None))])
    )
    assert list(constants.values()) == bound
    assert "c0(float('inf'), float('-inf'), 0.5, k0, k1, k2, " in source
    assert "slice(1, None, None)" in source
