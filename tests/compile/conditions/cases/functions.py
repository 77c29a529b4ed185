"""Code: functions, helpers, decorators, ops."""

from __future__ import annotations

from .model import of_result

CASES = {
    "forward_code": of_result("", "x * <<2.0|3.0>>"),
    "forward_default": """
class Model(nn.Module):
    def forward(self, x, gain=<<2.0|3.0>>):
        return x * gain
def build():
    return Model()
""",
    "global_float": of_result("GAIN = <<2.0|3.0>>", "x * GAIN"),
    "global_dict": of_result("TABLE = {'a': <<2.0|3.0>>}", "x * TABLE['a']"),
    "global_lowercase_dict": of_result("table = {'a': <<2.0|3.0>>}", "x * table['a']"),
    "global_set": of_result("ON = {<<'double'|'other'>>}", "x * 2 if 'double' in ON else x"),
    "helper_constant": of_result("import helper", "x * helper.GAIN", helper="GAIN = <<2.0|3.0>>"),
    "helper_from_import": of_result(
        "from helper import GAIN", "x * GAIN", helper="GAIN = <<2.0|3.0>>"
    ),
    "helper_function": of_result(
        "import helper", "helper.f(x)", helper="def f(x): return x * <<2.0|3.0>>"
    ),
    "helper_of_helper": of_result(
        "import helper",
        "helper.f(x)",
        helper="def g(x): return x * <<2.0|3.0>>\ndef f(x): return g(x)",
    ),
    "helper_set": of_result(
        "import helper",
        "x * 2 if 'double' in helper.ON else x",
        helper="ON = {<<'double'|'other'>>}",
    ),
    "helper_frozenset": of_result(
        "import helper",
        "x * 2 if 'double' in helper.ON else x",
        helper="ON = frozenset({<<'double'|'other'>>})",
    ),
    "helper_enum_value": of_result(
        "import helper",
        "x * helper.Kind.ONE.value",
        helper="import enum\nclass Kind(enum.Enum):\n    ONE = <<2.0|3.0>>",
    ),
    "helper_class_attribute": of_result(
        "import helper", "x * helper.Options.gain", helper="class Options:\n    gain = <<2.0|3.0>>"
    ),
    "helper_inherited_attribute": of_result(
        "import helper",
        "x * helper.O.gain",
        helper="class B:\n    gain = <<2.0|3.0>>\nclass O(B):\n    pass",
    ),
    "helper_method": of_result(
        "import helper",
        "helper.O().f(x)",
        helper="class O:\n    def f(self, x): return x * <<2.0|3.0>>",
    ),
    "helper_static_method": of_result(
        "import helper",
        "helper.O.f(x)",
        helper="class O:\n    @staticmethod\n    def f(x): return x * <<2.0|3.0>>",
    ),
    "helper_class_method": of_result(
        "import helper",
        "helper.O.f(x)",
        helper="class O:\n    @classmethod\n    def f(cls, x): return x * <<2.0|3.0>>",
    ),
    "helper_property": of_result(
        "import helper\nOPTIONS = helper.O()",
        "x * OPTIONS.gain",
        helper="class O:\n    @property\n    def gain(self): return <<2.0|3.0>>",
    ),
    "helper_decorated": of_result(
        "import helper",
        "helper.f(x)",
        helper="import functools\ndef wrap(f):\n    @functools.wraps(f)\n"
        "    def g(x): return f(x) * <<2.0|3.0>>\n"
        "    return g\n@wrap\ndef f(x): return x + 1",
    ),
    "helper_wrapped": of_result(
        "import helper",
        "helper.f(x)",
        helper="import functools\ndef wrap(f):\n    @functools.wraps(f)\n"
        "    def g(x): return f(x) * 2\n"
        "    return g\n@wrap\ndef f(x): return x * <<2.0|3.0>>",
    ),
    "helper_lru_cache": of_result(
        "import helper",
        "x * helper.gain()",
        helper="import functools\n@functools.lru_cache\ndef gain(): return <<2.0|3.0>>",
    ),
    "helper_lru_cache_argument": of_result(
        "import helper",
        "x * helper.gain(2)",
        helper="import functools\n@functools.lru_cache\ndef gain(n): return n * <<2.0|3.0>>",
    ),
    "helper_that_raises": of_result(
        "import helper",
        "helper.f(x)",
        helper="def g(x):\n    if <<True|False>>:\n        raise ValueError\n    return x\n"
        "def f(x):\n    try:\n        return g(x)\n    except ValueError:\n        return x * 2",
    ),
    "helper_generator": of_result(
        "import helper",
        "[x := x * v for v in helper.values()][-1]",
        helper="def values():\n    yield 1.0\n    yield <<2.0|3.0>>",
    ),
    "helper_context": of_result(
        "import helper",
        "helper.f(x)",
        helper="import contextlib\n@contextlib.contextmanager\ndef c():\n    yield <<2.0|3.0>>\n"
        "def f(x):\n    with c() as gain:\n        return x * gain",
    ),
    "helper_imported_in_forward": """
class Model(nn.Module):
    def forward(self, x):
        import helper
        return helper.f(x)
def build():
    return Model()
#helper
def f(x): return x * <<2.0|3.0>>
""",
    "local_function_in_forward": """
class Model(nn.Module):
    def forward(self, x):
        def f(x): return x * <<2.0|3.0>>
        return f(x)
def build():
    return Model()
""",
    "decorated_forward": """
def gained(gain):
    def wrap(forward):
        @functools.wraps(forward)
        def wrapper(*args, **kwargs):
            return forward(*args, **kwargs) * gain
        return wrapper
    return wrap
class Model(nn.Module):
    @gained(<<2.0|3.0>>)
    def forward(self, x):
        return x + 1
def build():
    return Model()
""",
    "decorated_forward_reads_model": """
def wrap(forward):
    @functools.wraps(forward)
    def wrapper(*args, **kwargs):
        return forward(*args, **kwargs)
    return wrapper
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = <<2.0|3.0>>
    @wrap
    def forward(self, x):
        return x * self.gain
def build():
    return Model()
""",
    "module_attribute_of_package": of_result(
        "import helper",
        "x * helper.inner.gain",
        helper="import types\ninner = types.SimpleNamespace(gain=<<2.0|3.0>>)",
    ),
    "allow_in_graph": of_result(
        "import helper",
        "helper.f(x)",
        helper="import torch\n@torch._dynamo.allow_in_graph\ndef f(x): return x * <<2.0|3.0>>",
    ),
    "custom_op_fake": of_result(
        "import helper",
        "torch.ops.pg_conditions.narrow(x) * 2",
        helper="import torch\nlib = torch.library.Library('pg_conditions', 'DEF')\n"
        "lib.define('narrow(Tensor x) -> Tensor')\n"
        "lib.impl('narrow', lambda x: x[:, :<<4|6>>].clone(), 'CompositeExplicitAutograd')\n"
        "fake = lambda x: x[:, :<<4|6>>].clone()\n"
        "torch.library.register_fake('pg_conditions::narrow', fake, lib=lib)",
    ),
    "composite_op": of_result(
        "import helper",
        "torch.ops.pg_composite.scale(x) + 1",
        helper="import torch\ndef gain(x): return x * <<2.0|3.0>>\ndef scale(x): return gain(x)\n"
        "lib = torch.library.Library('pg_composite', 'DEF')\n"
        "lib.define('scale(Tensor x) -> Tensor')\n"
        "lib.impl('scale', scale, 'CompositeImplicitAutograd')",
    ),
    "constant_result": of_result(
        "import helper",
        "x * helper.gain()",
        helper="import torch\nGAIN = [<<2.0|3.0>>]\n@torch._dynamo.assume_constant_result\n"
        "def gain(): return GAIN[0]",
    ),
    "function_attribute": of_result(
        "import helper", "helper.f(x)", helper="def f(x): return x * f.gain\nf.gain = <<2.0|3.0>>"
    ),
    "mutable_default": of_result(
        "import helper", "helper.f(x)", helper="def f(x, gains=[<<2.0|3.0>>]): return x * gains[0]"
    ),
    "default_of_a_generator": of_result(
        "import helper",
        "sum([x * v for v in helper.values()])",
        helper="def values(gain=<<2.0|3.0>>):\n    yield 1.0\n    yield gain",
    ),
    "module_getattr": of_result(
        "import helper", "x * helper.GAIN", helper="def __getattr__(name): return <<2.0|3.0>>"
    ),
    "helper_class_in_closure": of_result(
        "import helper",
        "helper.f(x)",
        helper="def make():\n    class O:\n        gain = <<2.0|3.0>>\n"
        "    return lambda x: x * O.gain\nf = make()",
    ),
    "nonlocal_changed": of_result(
        "import helper",
        "helper.f(x)",
        helper="def make():\n    gain = 1.0\n    def set(v):\n        nonlocal gain\n"
        "        gain = v\n    return set, lambda x: x * gain\nset, f = make()\nset(<<2.0|3.0>>)",
    ),
    "wrapper_that_keeps_its_function": of_result(
        "import helper",
        "helper.f(x)",
        helper="class Wrapper:\n    def __init__(self, f): self.f = f\n"
        "    def __call__(self, x): return self.f(x) + 1\n"
        "@Wrapper\ndef f(x): return x * <<2.0|3.0>>",
    ),
    "context_manager_object": of_result(
        "import helper",
        "helper.f(x)",
        helper="class C:\n    def __enter__(self): return <<2.0|3.0>>\n"
        "    def __exit__(self, *_): return None\n"
        "def f(x):\n    with C() as gain:\n        return x * gain",
    ),
    "match_of_a_class": of_result(
        "import helper",
        "helper.f(x)",
        helper="class P:\n    __match_args__ = ('<<a|b>>',)\n    a, b = 2.0, 3.0\n"
        "def f(x):\n    match P():\n        case P(v): return x * v",
    ),
    "exception_class": of_result(
        "import helper",
        "helper.f(x)",
        helper="class A(Exception): pass\nclass B(<<A|Exception>>): pass\n"
        "def f(x):\n    try:\n        raise B\n    except A:\n        return x * 2\n"
        "    except Exception:\n        return x * 3",
    ),
    "substituted_in_the_graph": of_result(
        "import helper",
        "x * helper.f(2.0)",
        helper="import torch\ndef f(v): return v * <<2.0|3.0>>\n"
        "@torch.compiler.substitute_in_graph(f)\ndef g(v): return v * <<2.0|3.0>>",
    ),
    "attribute_getter_of_a_changed_object": of_result(
        "import operator\nO = types.SimpleNamespace(a=<<2.0|3.0>>)",
        "x * operator.attrgetter('a')(O)",
    ),
    "compiled_pattern": of_result(
        "import re\nPATTERN = re.compile('A', <<0|re.I>>)", "x * 2 if PATTERN.match('a') else x"
    ),
    "docstring": of_result(
        "import helper", "x * float(helper.f.__doc__)", helper="def f():\n    '<<2.0|3.0>>'"
    ),
    "name_of_a_function": of_result(
        "import helper",
        "x * 2 if helper.f.__name__ == 'one' else x",
        helper="def <<one|two>>(): pass\nf = <<one|two>>",
    ),
    "annotations": of_result(
        "import helper",
        "x * helper.O.__annotations__['gain']",
        helper="class O:\n    gain: <<2.0|3.0>>",
    ),
    "item_getter": of_result(
        "import operator\nO = {'a': <<2.0|3.0>>}", "x * operator.itemgetter('a')(O)"
    ),
    "method_caller": of_result(
        "import operator\nO = {'a': <<2.0|3.0>>}", "x * operator.methodcaller('get', 'a')(O)"
    ),
    "module_by_a_global": of_result(
        "import helper\nOPS = <<helper|types.SimpleNamespace(GAIN=3.0)>>",
        "x * OPS.GAIN",
        helper="GAIN = 2.0",
    ),
    "one_of_two_modules": of_result(
        "import math, cmath\nOPS = <<math|cmath>>", "x * 2 if hasattr(OPS, 'floor') else x"
    ),
    "module_in_a_table": of_result(
        "import math, cmath\nTABLE = {'a': [<<math|cmath>>]}",
        "x * 2 if hasattr(TABLE['a'][0], 'floor') else x",
    ),
    "module_by_an_attribute": of_result(
        "import math, cmath",
        "x * 2 if hasattr(self.ops, 'floor') else x",
        made="self.ops = <<math|cmath>>",
    ),
    "module_by_a_class_attribute": of_result(
        "import math, cmath\nclass Options:\n    ops = <<math|cmath>>",
        "x * 2 if hasattr(Options.ops, 'floor') else x",
    ),
    "module_by_a_default": of_result(
        "import math, cmath\ndef f(x, ops=<<math|cmath>>):\n"
        "    return x * 2 if hasattr(ops, 'floor') else x",
        "f(x)",
    ),
    "module_by_a_closure": of_result(
        "import math, cmath\ndef make(ops):\n"
        "    return lambda x: x * 2 if hasattr(ops, 'floor') else x\nf = make(<<math|cmath>>)",
        "f(x)",
    ),
    "module_compared": of_result(
        "import math, cmath\nOPS = <<math|cmath>>", "x * 2 if OPS is math else x"
    ),
    "method_given_to_torch_compile": of_result(
        "class Act:\n    @torch.compile\n    def run(self, x): return x * <<2.0|3.0>>\n",
        "Act().run(x)",
    ),
    "function_given_to_torch_compile": of_result(
        "@torch.compile\ndef run(x): return x * <<2.0|3.0>>\n", "run(x)"
    ),
    "decorated_method_of_a_class_that_the_forward_makes": of_result(
        "import functools\ndef decorated(f):\n"
        "    @functools.wraps(f)\n    def call(*args): return f(*args)\n    return call\n"
        "namespace = {}\nexec('def init(self, x): self.value = x * <<2.0|3.0>>', namespace)\n"
        "class Result:\n    __init__ = decorated(namespace['init'])\n",
        "Result(x).value",
    ),
}
