"""Fingerprints depend on what code does, not on its location or layout."""

import functools
import importlib
import importlib.util
import itertools
import sys
from pathlib import Path

import pytest

from piecegraph.compile.conditions.code import fingerprint

_serial = itertools.count()

SOURCE = """
import math
from functools import partial

HERE = __file__
SCALE = 0.5
TABLE = {"silu": 1}
calls = 0
memo = {}

def helper(x):
    return x + 1

def only_nested(x):
    return x * 3

class Base:
    height = 5

class Tool(Base):
    width = 4
    def use(self, x):
        return helper(x) * self.width

def op(x, eps=1e-6):
    '''Docs.'''
    global calls
    calls += 1
    memo[x] = TABLE["silu"]
    inner = [helper(y) for y in (x,) if y in {"a", "b"}]
    later = lambda: only_nested(x)
    try:
        first = x.real - x.imag
        second = HERE
    except ValueError:
        pass
    return Tool().use(x) * SCALE + eps + math.pi

def make(n):
    def closure(x):
        return x * n
    return closure

class Kernel:
    def __init__(self, fn):
        self.fn = fn

kernel = Kernel(op)
small, large = make(1), make(2)
bound = Tool().use
half = partial(op, eps=1.0)
"""


SECOND_OUTSIDE = "    except ValueError:\n        pass\n    else:\n        second = HERE\n"


def module(tmp_path, source=SOURCE, name="model"):
    """The source as a fresh module `name` from a directory of its own."""
    path = tmp_path / str(next(_serial)) / f"{name}.py"
    path.parent.mkdir()
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


@pytest.mark.parametrize("name", ["op", "helper", "Tool", "kernel", "small", "bound", "half"])
def test_moved_checkout_and_moved_lines_change_nothing_c1_vllm_47573(tmp_path, name):
    moved = "# a comment\n\n\n" + SOURCE.replace("SCALE = 0.5", "SCALE = 0.5  # half")
    one, other = module(tmp_path), module(tmp_path, moved)
    assert fingerprint(getattr(one, name)) == fingerprint(getattr(other, name))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("x + 1", "x + 2"),
        ("x + 1", "x - 1"),
        ("SCALE = 0.5", "SCALE = 0.25"),
        ('"silu": 1', '"silu": 2'),
        ("width = 4", "width = 8"),
        ("height = 5", "height = 6"),
        ("x * 3", "x * 4"),
        ("x.real - x.imag", "x.imag - x.real"),
        ("        second = HERE\n    except ValueError:\n        pass\n", SECOND_OUTSIDE),
        ("* self.width", "+ self.width"),
        ("1e-6", "1e-5"),
        ('{"a", "b"}', '{"a", "c"}'),
        ("math.pi", "math.e"),
        ("helper(y) for", "-helper(y) for"),
    ],
)
@pytest.mark.parametrize("name", ["op", "kernel", "half"])
def test_every_change_that_matters_is_seen(tmp_path, name, old, new):
    assert SOURCE.count(old) == 1
    one, other = module(tmp_path), module(tmp_path, SOURCE.replace(old, new))
    assert fingerprint(getattr(one, name)) != fingerprint(getattr(other, name))


def test_running_changes_nothing(tmp_path):
    made = module(tmp_path)
    before = fingerprint(made.op)
    for number in range(2000):  # long enough for the interpreter to specialize the code
        made.op(number)
    assert made.calls == 2000
    assert fingerprint(made.op) == before


def test_edit_after_the_import_changes_nothing(tmp_path):
    """What runs is what was imported."""
    made = module(tmp_path)
    before = fingerprint(made.op)
    assert made.__file__ is not None
    Path(made.__file__).write_text(SOURCE.replace("x + 1", "x + 2"))
    assert fingerprint(made.op) == before


def test_closures_and_arguments_tell_functions_apart(tmp_path):
    made = module(tmp_path)
    prints = [
        fingerprint(function)
        for function in (
            made.small,
            made.large,
            made.op,
            made.half,
            functools.partial(made.op, 1),
            functools.partial(made.op, 1, 1),
            functools.partial(made.op, made.small),
            functools.partial(made.op, made.large),
        )
    ]
    assert len(set(prints)) == len(prints)


def test_functions_made_without_a_file_have_fingerprints():
    scope = {"__name__": "generated"}
    exec("def f(x): return x + 1\ndef g(x): return x + 2", scope)
    f, g = scope["f"], scope["g"]
    assert callable(f)
    assert callable(g)
    assert fingerprint(f) != fingerprint(g)


def test_recursion_ends(tmp_path):
    made = module(
        tmp_path, "def even(n): return n == 0 or odd(n - 1)\ndef odd(n): return even(n)\n"
    )
    assert fingerprint(made.even) != fingerprint(made.odd)


HELPER = "def f(x): return x + 1\n"


@pytest.mark.parametrize(
    ("source", "helper"),
    [
        ("def op(x):\n    from package_reached.helpers import f\n    return f(x)\n", HELPER),
        ("def op(x):\n    from .helpers import f\n    return f(x)\n", HELPER),
        ("def op(x):\n    import package_reached.helpers as h\n    return h.f(x)\n", HELPER),
        (
            "import package_reached.helpers\ndef op(x): return package_reached.helpers.f(x)\n",
            HELPER,
        ),
        ("from . import helpers\ndef op(x): return helpers.f(x)\n", HELPER),
        ("from . import helpers\nheld = {0: helpers}\ndef op(x): return held[0].f(x)\n", HELPER),
        ("from . import helpers\ndef op(x): return getattr(helpers, 'f')(x)\n", HELPER),
        ("from . import helpers\ndef op(x, h=helpers): return h.f(x)\n", HELPER),
        (
            "from . import helpers\ndef op(x): return helpers.f(x)\n",
            "import torch\n@torch.no_grad()\ndef f(x): return x + 1\n",
        ),
        (
            "from .helpers import f\ndef op(x):\n    with f(x) as y: return y\n",
            "import contextlib\n@contextlib.contextmanager\ndef f(x): yield x + 1\n",
        ),
        (
            "from .helpers import T\nt = T()\ndef op(x): return t.f(x)\n",
            "class T(tuple):\n    def f(self, x): return x + 1\n",
        ),
        (
            "from .helpers import C\ndef op(x): return C.f(x)\n",
            "class M(type):\n    def f(cls, x): return x + 1\nclass C(metaclass=M): pass\n",
        ),
    ],
)
def test_code_is_followed_wherever_it_is_reached(tmp_path, monkeypatch, source, helper):
    prints = set()
    for number, body in enumerate(("x + 1", "x + 2")):
        package = tmp_path / str(number) / "package_reached"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "helpers.py").write_text(helper.replace("x + 1", body))
        (package / "model.py").write_text(source)
        monkeypatch.syspath_prepend(package.parent)
        op = importlib.import_module("package_reached.model").op
        prints.add(fingerprint(op))
        assert op(1) == eval(body, {"x": 1})  # which imports what the key has found before
        assert fingerprint(op) in prints
        for name in [name for name in sys.modules if name.startswith("package_reached")]:
            del sys.modules[name]
    assert len(prints) == 2


def test_what_a_module_counts_is_no_part_of_it(tmp_path, monkeypatch):
    (tmp_path / "counting_helpers.py").write_text(
        "calls = 0\nlog = []\ndef f(x):\n    global calls\n    calls += 1\n    log.append(x)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    op = module(
        tmp_path, "def op(x):\n    import counting_helpers as h\n    h.f(x)\n    return h.calls\n"
    ).op
    before = fingerprint(op)
    assert op(1) == 1
    assert fingerprint(op) == before


@pytest.mark.parametrize(
    "source",
    [
        "def f(x):\n    import torch._inductor.nothing, scipy_of_no_one\n    return x\n",
        "from json import dumps\ndef f(x): return dumps(x)\n",
        "from sys import intern as f\n",
    ],
)
def test_what_is_imported_and_installed_is_known_by_its_version(tmp_path, source):
    """It is neither imported for that nor followed."""
    assert fingerprint(module(tmp_path, source).f) == fingerprint(module(tmp_path, source).f)


def test_a_global_that_a_nested_function_stores_is_state(tmp_path):
    source = "def f():\n    def g():\n        global n\n        n += 1\n    return g\nn = 0\n"
    made = module(tmp_path, source)
    before = fingerprint(made.f)
    made.f()()
    assert made.n == 1
    assert fingerprint(made.f) == before


PASSES = """
import functools

class Pass:
    kind = "a"
    def __init__(self, gain): self.gain = gain
    def __call__(self, graph): return self.gain * 5
    def apply(self, graph): return self.gain

table = {"state": 1}
HELD = Pass(7)

@functools.lru_cache
def helper(): return 11

def reads_table(graph): return table["state"]
def reads_object(graph): return HELD.gain
def calls_cached(graph): return helper()
def scaled(held, graph): return held.gain

instance = Pass(3)
bound = Pass(3).apply
partial = functools.partial(scaled, Pass(3))
"""


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("instance", "Pass(3)", "Pass(4)"),
        ("instance", "gain * 5", "gain * 6"),
        ("instance", 'kind = "a"', 'kind = "b"'),
        ("bound", "Pass(3)", "Pass(4)"),
        ("partial", "Pass(3)", "Pass(4)"),
        ("reads_table", '"state": 1', '"state": 2'),
        ("reads_object", "Pass(7)", "Pass(8)"),
        ("calls_cached", "return 11", "return 12"),
    ],
)
def test_f3_fields_and_helpers_of_a_pass_are_part_of_it(tmp_path, name, old, new):
    one, other = module(tmp_path, PASSES), module(tmp_path, PASSES.replace(old, new))
    assert fingerprint(getattr(one, name)) != fingerprint(getattr(other, name))
    assert fingerprint(getattr(one, name)) == fingerprint(getattr(module(tmp_path, PASSES), name))
