"""Which files are of torch, of Python and of users."""

import os

import torch

from piecegraph.torch_compat.basics.frames import (
    calling_module,
    is_torch_file,
    is_user_file,
    user_line,
)


def test_files_of_torch_and_of_users():
    assert is_torch_file(torch.nn.modules.linear.__file__)
    assert not is_torch_file(__file__)
    assert not is_torch_file(torch.__file__.replace("torch", "torchvision"))
    assert is_user_file(__file__)
    assert not is_user_file(os.__file__)
    assert user_line(None) is None


def test_the_innermost_module_whose_method_runs_is_named():
    class Outer:
        def call(self, fn):
            return fn()

    outer, inner = Outer(), Outer()
    names = {id(outer): "outer", id(inner): "inner"}
    assert outer.call(lambda: calling_module(names)) == "outer"
    assert outer.call(lambda: inner.call(lambda: calling_module(names))) == "inner"
    assert outer.call(lambda: calling_module({})) == ""
    assert calling_module(names) == ""
