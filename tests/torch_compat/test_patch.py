"""Process-wide state of torch: the lock, cache variables, modes, replacements."""

import os
import subprocess
import sys
import threading
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes

from piecegraph.torch_compat.basics import patch
from piecegraph.torch_compat.basics.tensors import without_modes
from piecegraph.torch_compat.tracing.other_threads import unseen_by_other_threads
from tests.processes import in_a_thread

NAMES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@pytest.mark.parametrize("entered", [patch.compiler_lock, patch.preserve_cache_variables])
def test_the_lock_of_dynamo_is_taken_first(entered):
    """A thread in `torch.compile` holds Dynamo's lock and takes ours in a backend."""
    from torch._dynamo.convert_frame import compile_lock

    assert patch.dynamo_lock() is compile_lock
    inside = threading.Event()

    def enter():
        with entered():
            inside.set()

    thread = threading.Thread(target=enter)
    with compile_lock:
        thread.start()
        assert not inside.wait(0.2)
        with entered():
            assert not inside.is_set()
    assert inside.wait(10)
    thread.join()


def test_replaced_attributes_come_back_as_they_were():
    class Owner:
        @classmethod
        def name(cls):
            return "original"

    before = vars(Owner)["name"]

    def fail_inside():
        with patch.replaced(Owner, "name", lambda: "other"):
            assert Owner.name() == "other"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()
    assert vars(Owner)["name"] is before


def test_a_function_with_other_globals_is_called_in_the_same_way():
    more = 1

    def added(x, y=2, *, z=3):
        return x, y, z, more, os

    other = patch.with_globals(added, {"os": "another"})
    assert other(1) == (1, 2, 3, 1, "another")
    assert added(1)[-1] is os


FORKS_BESIDE_AN_IMPORT = """
import os, sys, threading, time
from piecegraph.torch_compat.basics.patch import compiler_lock

def compiles():
    with compiler_lock():
        half_done.append("a change of torch")
        inside.set()
        time.sleep(0.5)  # the fork has begun, and waits
        import torch.utils._filelock
        half_done.clear()

inside, half_done = threading.Event(), []
thread = threading.Thread(target=compiles)
thread.start()
inside.wait()
if (child := os.fork()) == 0:
    os._exit(len(half_done))
_, status = os.waitpid(child, 0)
thread.join()
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_fork_that_waits_for_a_compile_is_whole():
    """A child would have what is half done. Hooks that an import adds meanwhile would run after
    the fork only."""
    command = [sys.executable, "-c", FORKS_BESIDE_AN_IMPORT]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "ignored" not in done.stderr


def test_cache_variables_set_inside_are_gone(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    with patch.preserve_cache_variables():
        for name in NAMES:
            os.environ[name] = "/set by torch"
    assert not any(name in os.environ for name in NAMES)


def test_somebody_who_compiles_is_seen_from_another_thread():
    for inside, seen in ((patch.compiler_lock(), True), (nullcontext(), False)):
        with inside:
            assert in_a_thread(patch.somebody_compiles) is seen


class Exported(nn.Module):
    """Waits in the middle of its export, where modes of its own are hidden, too."""

    def __init__(self):
        super().__init__()
        self.inside, self.go_on = threading.Event(), threading.Event()

    def forward(self, x):
        x = x + 1
        with without_modes():
            assert (torch.ones(1) - 1).item() == 0
        self.inside.set()
        assert self.go_on.wait(300)
        return x * 2


@pytest.mark.parametrize("hidden", [patch.own_export_modes, without_modes, unseen_by_other_threads])
def test_an_export_in_another_thread_goes_on(hidden):
    """`_disable_current_modes`, as when a tensor is printed, and sizes took its mode away."""
    before, model, graphs = torch._ops.mode_stack_state_for_pre_dispatch, Exported(), []
    size = ShapeEnv().create_unbacked_symint()

    def export():
        graphs.append(torch.export.export(model, (torch.ones(2),)).graph)

    thread = threading.Thread(target=export)
    thread.start()
    assert model.inside.wait(300)
    with hidden(), _disable_current_modes():
        assert str(size + 1 == size) == "False"
        model.go_on.set()
        thread.join()
    assert [node.name for node in graphs[0].nodes] == ["x", "add", "mul", "output"]
    assert torch._ops.mode_stack_state_for_pre_dispatch is before


def test_threads_leave_their_modes_of_export_in_any_order():
    before = torch._ops.mode_stack_state_for_pre_dispatch
    inside, go_on, own = threading.Event(), threading.Event(), []

    def enter():
        with patch.own_export_modes():
            inside.set()
            assert go_on.wait(300)
            own.append(torch._ops.mode_stack_state_for_pre_dispatch())

    thread = threading.Thread(target=enter)
    with patch.own_export_modes():
        thread.start()
        assert inside.wait(300)
        with patch.own_export_modes():
            pass
        own.append(torch._ops.mode_stack_state_for_pre_dispatch())
    own.append(torch._ops.mode_stack_state_for_pre_dispatch())
    go_on.set()
    thread.join()
    assert len(set(map(id, own))) == 3
    assert own[1] is before() is torch._ops.mode_stack_state_for_pre_dispatch()
    assert torch._ops.mode_stack_state_for_pre_dispatch is before
