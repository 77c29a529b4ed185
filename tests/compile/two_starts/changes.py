"""Changes that somebody makes to a program between two of its starts.

A change is a text with `<<first||second>>` where the two starts differ. Its lines `### NAME` begin
further files; `### environ` holds variables, `### moved` puts the second start elsewhere, and
`### compiler` names the compiler where that of the tests, which keeps calls of torch, does not do.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
DIFFERING = re.compile(r"<<(.*?)\|\|(.*?)>>", re.DOTALL)
BEGIN = """\
import abc, array, builtins, collections, contextlib, contextvars, copy, dataclasses, enum
import fractions, functools, gc, json, logging, math, operator, os, pathlib, random, sys
import threading, time, types, typing, warnings, weakref
import numpy as np
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F
"""
MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)
        setup(self)
    forward = forward
"""
NO_SETUP = """
def setup(self):
    pass
"""
BUILD = """
def model():
    return Model()
"""


@dataclass(frozen=True)
class Change:
    name: str
    alters: bool  # what the model computes
    text: str

    def files(self, start: int) -> dict[str, str]:
        """By name the files of a start, 1 or 2."""
        text = DIFFERING.sub(lambda match: match[start], self.text)
        program, *rest = re.split(r"^### (\S+)\n", text, flags=re.MULTILINE)
        program = BEGIN + program
        if "def setup" not in program:
            program += NO_SETUP
        if "class Model" not in program:
            program += MODEL
        if "def model" not in program:
            program += BUILD
        return {"program.py": program, **dict(zip(rest[::2], rest[1::2], strict=True))}


def read(name: str, alters: bool) -> list[Change]:
    parts = re.split(r"^=== (\S+)\n", (HERE / name).read_text(), flags=re.MULTILINE)
    return [Change(name, alters, text) for name, text in zip(parts[1::2], parts[2::2], strict=True)]


CHANGES = [*read("altering.txt", True), *read("harmless.txt", False)]
