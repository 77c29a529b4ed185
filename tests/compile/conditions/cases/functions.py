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
    "global_set": of_result("ON = {<<'double'|'other'>>}", "x * 2 if 'double' in ON else x"),
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
    "helper_static_method": of_result(
        "import helper",
        "helper.O.f(x)",
        helper="class O:\n    @staticmethod\n    def f(x): return x * <<2.0|3.0>>",
    ),
    "helper_property": of_result(
        "import helper\nOPTIONS = helper.O()",
        "x * OPTIONS.gain",
        helper="class O:\n    @property\n    def gain(self): return <<2.0|3.0>>",
    ),
    "helper_context": of_result(
        "import helper",
        "helper.f(x)",
        helper="import contextlib\n@contextlib.contextmanager\ndef c():\n    yield <<2.0|3.0>>\n"
        "def f(x):\n    with c() as gain:\n        return x * gain",
    ),
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
    "allow_in_graph": of_result(
        "import helper",
        "helper.f(x)",
        helper="import torch\n@torch._dynamo.allow_in_graph\ndef f(x): return x * <<2.0|3.0>>",
    ),
    "constant_result": of_result(
        "import helper",
        "x * helper.gain()",
        helper="import torch\nGAIN = [<<2.0|3.0>>]\n@torch._dynamo.assume_constant_result\n"
        "def gain(): return GAIN[0]",
    ),
    "mutable_default": of_result(
        "import helper", "helper.f(x)", helper="def f(x, gains=[<<2.0|3.0>>]): return x * gains[0]"
    ),
    "helper_class_in_closure": of_result(
        "import helper",
        "helper.f(x)",
        helper="def make():\n    class O:\n        gain = <<2.0|3.0>>\n"
        "    return lambda x: x * O.gain\nf = make()",
    ),
    "match_of_a_class": of_result(
        "import helper",
        "helper.f(x)",
        helper="class P:\n    __match_args__ = ('<<a|b>>',)\n    a, b = 2.0, 3.0\n"
        "def f(x):\n    match P():\n        case P(v): return x * v",
    ),
    "substituted_in_the_graph": of_result(
        "import helper",
        "x * helper.f(2.0)",
        helper="import torch\ndef f(v): return v * <<2.0|3.0>>\n"
        "@torch.compiler.substitute_in_graph(f)\ndef g(v): return v * <<2.0|3.0>>",
    ),
    "docstring": of_result(
        "import helper", "x * float(helper.f.__doc__)", helper="def f():\n    '<<2.0|3.0>>'"
    ),
    "annotations": of_result(
        "import helper",
        "x * helper.O.__annotations__['gain']",
        helper="class O:\n    gain: <<2.0|3.0>>",
    ),
    "module_in_a_table": of_result(
        "import math, cmath\nTABLE = {'a': [<<math|cmath>>]}",
        "x * 2 if hasattr(TABLE['a'][0], 'floor') else x",
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
}
