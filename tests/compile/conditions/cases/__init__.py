"""Models that read a value in one of many ways. `<<2.0|3.0>>` is what differs in the two variants.

A case in the tables here is a module with `build()`, which returns the model. Either all of it is
in `program`, or `result` is what forward returns, `made` a statement of the model's constructor,
and `before` and `after` surround the class. `enter` and `leave` are executed around a start, and
`helper` is a module that is imported as `helper`; it stands below a line `#helper`. A pair is what
MADE and RESULT are in the program of the table's text file. Each variant is run by a process of its
own on the cache of the first.
"""

import tomllib
from pathlib import Path

HEAD = """
import abc, collections, contextlib, dataclasses, enum, functools, math, os, types, weakref
import numpy, torch
from torch import nn
import torch.nn.functional as F
"""


def sources():
    """The source of every case by name, both variants in one."""
    attributes = {f"attribute_{name}": case for name, case in _programs("attributes").items()}
    subjects = "absent aliases folded functions classes operators modules process"
    return attributes | _programs(*subjects.split())


def adversary_sources():
    """Changes that were thought of after the conditions had been written."""
    return _programs("adversary", "protocols", "strangers")


def unread_sources():
    """Cases whose variants give the same result for the same reason."""
    return {f"unread_{name}": source for name, source in _programs("unread").items()}


def _programs(*subjects):
    programs = {}
    for table in (Path(__file__).parent / f"{subject}.toml" for subject in subjects):
        for name, case in tomllib.loads(table.read_text()).items():
            if isinstance(case, list):
                program = table.with_suffix(".txt").read_text()
                made, result = case
                case = {"program": program.replace("MADE", made).replace("RESULT", result)}
            programs[name] = HEAD + (case.get("program") or _program(**case))
    return programs


def _program(result, before="", made="", after="", enter="", leave="pass", helper=""):
    lines = ["def __init__(self):", "    super().__init__()", f"    {made}"] if made else []
    lines += ["def forward(self, x):", f"    return {result}"]
    model = "\n".join(["class Model(nn.Module):", *(f"    {line}" for line in lines)])
    around = f"def enter():\n    {enter}\ndef leave():\n    {leave}\n" if enter else ""
    below = f"#helper\n{helper}" if helper else ""
    return f"{before}\n{model}\ndef build():\n    return Model()\n{after}{around}{below}"
