"""Models that read a value in one of many ways. `<<2.0|3.0>>` is what differs in the two variants.

A case is the source of a module with `build()`, which returns the model; a helper module, imported
as `helper`, stands below a line `#helper`. `enter()`, `leave()` surround a start. Each variant is
run by a process of its own on the cache of the first.
"""

from __future__ import annotations

HEAD = """
import abc, collections, contextlib, dataclasses, enum, functools, math, os, types, weakref
import torch
from torch import nn
import torch.nn.functional as F
"""

ATTRIBUTES = {
    # how `self.value` is made, how the forward uses it
    "float": ("<<2.0|3.0>>", "x * self.value"),
    "int": ("<<2|3>>", "x * self.value"),
    "bool": ("<<False|True>>", "x * 2 if self.value else x"),
    "string": ("'<<double|triple>>'", "x * 2 if self.value == 'double' else x * 3"),
    "bytes": ("b'<<a|b>>'", "x * 2 if self.value == b'a' else x * 3"),
    "none": ("<<None|3.0>>", "x if self.value is None else x * self.value"),
    "int_or_float": ("<<1|1.5>>", "x * self.value"),
    "list": ("[1.0, <<2.0|3.0>>]", "x * self.value[1]"),
    "list_length": ("[1.0, 2.0<<|, 3.0>>]", "x * sum(self.value)"),
    "list_len": ("[1.0, 2.0<<|, 3.0>>]", "x * len(self.value)"),
    "list_iterated": ("[1.0, <<2.0|3.0>>]", "[x := x * v for v in self.value][-1]"),
    "nested_list": ("[[[[[[[[<<1.0|2.0>>]]]]]]]]", "x * self.value[0][0][0][0][0][0][0][0]"),
    "tuple": ("(1.0, <<2.0|3.0>>)", "x * self.value[1]"),
    "tuple_unpacked": ("(1.0, <<2.0|3.0>>)", "(lambda a, b: x * a * b)(*self.value)"),
    "dict_value": ("{'gain': <<2.0|3.0>>}", "x * self.value['gain']"),
    "dict_get": ("{<<'gain'|'other'>>: 2.0}", "x * self.value.get('gain', 5.0)"),
    "dict_contains": ("{<<'gain'|'other'>>: 2.0}", "x * 2 if 'gain' in self.value else x"),
    "dict_keys": ("{'<<2|3>>': 1}", "x * float(list(self.value)[0])"),
    "dict_order_iterated": (
        "{<<'a': 1.0, 'b': 2.0|'b': 2.0, 'a': 1.0>>}",
        "x * list(self.value.values())[0]",
    ),
    "dict_int_key": ("{1: <<2.0|3.0>>}", "x * self.value[1]"),
    "dict_tuple_key": ("{(1, 'a'): <<2.0|3.0>>}", "x * self.value[1, 'a']"),
    "dict_enum_key": ("{Kind.ONE: <<2.0|3.0>>}", "x * self.value[Kind.ONE]"),
    "dict_float_key": ("{0.5: <<2.0|3.0>>}", "x * self.value[0.5]"),
    "ordered_dict": ("collections.OrderedDict(a=<<2.0|3.0>>)", "x * self.value['a']"),
    "default_dict": ("collections.defaultdict(float, a=<<2.0|3.0>>)", "x * self.value['a']"),
    "set": ("{<<'double'|'other'>>, 'x'}", "x * 2 if 'double' in self.value else x"),
    "set_missing": ("{'x'<<|, 'double'>>}", "x * 2 if 'double' in self.value else x"),
    "frozenset": ("frozenset({<<'double'|'other'>>})", "x * 2 if 'double' in self.value else x"),
    "set_length": ("{1, 2<<|, 3>>}", "x * len(self.value)"),
    "deque": ("collections.deque([<<2.0|3.0>>])", "x * self.value[0]"),
    "range": ("range(<<2|3>>)", "x * len(self.value)"),
    "range_step": ("range(0, 6, <<2|3>>)", "[x := x + v for v in self.value][-1]"),
    "slice": ("slice(0, <<2|3>>)", "x * x[:, self.value].sum()"),
    "dtype": ("torch.float<<64|16>>", "x.to(self.value)"),
    "finfo": ("torch.finfo(torch.float<<64|16>>)", "x * self.value.bits"),
    "device_type": ("torch.device('<<cpu|meta>>')", "x * 2 if self.value.type == 'cpu' else x"),
    "enum": ("Kind.<<ONE|TWO>>", "x * self.value.value"),
    "enum_compared": ("Kind.<<ONE|TWO>>", "x * 2 if self.value is Kind.ONE else x"),
    "flag": ("Bits.<<A|B>>", "x * 2 if self.value & Bits.A else x"),
    "dataclass": ("Options(<<2.0|3.0>>)", "x * self.value.gain"),
    "frozen_dataclass": ("Frozen(<<2.0|3.0>>)", "x * self.value.gain"),
    "slots": ("Slotted(<<2.0|3.0>>)", "x * self.value.gain"),
    "named_tuple": ("Pair(<<2.0|3.0>>, 1)", "x * self.value.gain"),
    "namespace": ("types.SimpleNamespace(gain=<<2.0|3.0>>)", "x * self.value.gain"),
    "object_in_object": ("Options(Options(<<2.0|3.0>>))", "x * self.value.gain.gain"),
    "object_in_list": ("[Options(<<2.0|3.0>>)]", "x * self.value[0].gain"),
    "object_in_dict": ("{'a': Options(<<2.0|3.0>>)}", "x * self.value['a'].gain"),
    "class_of_object": ("<<Options|Other>>(2.0)", "self.value.apply(x)"),
    "property": ("Options(<<2.0|3.0>>)", "x * self.value.twice"),
    "method": ("Options(<<2.0|3.0>>)", "self.value.apply(x)"),
    "call": ("Options(<<2.0|3.0>>)", "self.value(x)"),
    "bound_method": ("Options(<<2.0|3.0>>).apply", "self.value(x)"),
    "bound_methods_in_list": ("[Options(<<2.0|3.0>>).apply]", "self.value[0](x)"),
    "bound_method_in_dict": ("{'f': Options(<<2.0|3.0>>).apply}", "self.value['f'](x)"),
    "lambda_code": ("lambda x: x * <<2.0|3.0>>", "self.value(x)"),
    "lambda_default": ("lambda x, g=<<2.0|3.0>>: x * g", "self.value(x)"),
    "lambda_keyword_default": ("lambda x, *, g=<<2.0|3.0>>: x * g", "self.value(x)"),
    "closure": ("closed(<<2.0|3.0>>)", "self.value(x)"),
    "closure_dtype": ("cast(torch.float<<64|16>>)", "self.value(x)"),
    "closure_object": ("closed_object(Options(<<2.0|3.0>>))", "self.value(x)"),
    "closure_list": ("closed_list([<<2.0|3.0>>])", "self.value(x)"),
    "closure_of_closure": ("closed_function(closed(<<2.0|3.0>>))", "self.value(x)"),
    "partial": ("functools.partial(scaled, gain=<<2.0|3.0>>)", "self.value(x)"),
    "partial_position": (
        "functools.partial(scaled, gain=<<2.0|3.0>>).func",
        "self.value(x, <<2.0|3.0>>)",
    ),
    "partial_object": ("functools.partial(scaled_by, Options(<<2.0|3.0>>))", "self.value(x)"),
    "partial_dtype": (
        "functools.partial(F.softmax, dim=-1, dtype=torch.float<<64|32>>)",
        "self.value(x)",
    ),
    "partial_of_partial": (
        "functools.partial(functools.partial(scaled, gain=<<2.0|3.0>>))",
        "self.value(x)",
    ),
    "torch_function": ("<<F.silu|F.gelu>>", "self.value(x)"),
    "module_in_list": ("[Scale(<<2.0|3.0>>)]", "self.value[0](x)"),
    "module_in_tuple": ("(Scale(<<2.0|3.0>>),)", "self.value[0](x)"),
    "module_in_dict": ("{'m': Scale(<<2.0|3.0>>)}", "self.value['m'](x)"),
    "module_in_object": ("Options(Scale(<<2.0|3.0>>))", "self.value.gain(x)"),
    "module_class_in_list": ("[<<Scale|Shift>>(2.0)]", "self.value[0](x)"),
    "submodule": ("Scale(<<2.0|3.0>>)", "self.value(x)"),
    "module_list": ("nn.ModuleList([Scale(<<2.0|3.0>>)])", "self.value[0](x)"),
    "module_list_length": (
        "nn.ModuleList([Scale(2.0)<<|, Scale(2.0)>>])",
        "[x := m(x) for m in self.value][-1]",
    ),
    "module_dict": ("nn.ModuleDict({'a': Scale(<<2.0|3.0>>)})", "self.value['a'](x)"),
    "sequential": ("nn.Sequential(Scale(2.0), Scale(<<2.0|3.0>>))", "self.value(x)"),
    "module_forward_hook": ("hooked(Scale(2.0), <<2.0|3.0>>)", "self.value(x)"),
    "module_pre_hook": ("pre_hooked(Scale(2.0), <<2.0|3.0>>)", "self.value(x)"),
    "module_hook_added": ("<<Scale(2.0)|hooked(Scale(2.0), 3.0)>>", "self.value(x)"),
    "module_hook_method": ("method_hooked(Scale(2.0), Options(<<2.0|3.0>>))", "self.value(x)"),
    "weak_reference": ("weakref.ref(KEPT[<<0|1>>])", "self.value()(x)"),
    "training": ("nn.Dropout(0.5).train(<<False|True>>)", "x * 2 if self.value.training else x"),
    "norm_eps": ("nn.LayerNorm(8, eps=<<1e-5|1e-1>>)", "self.value(x)"),
    "complex": ("<<2j|3j>>", "x * self.value.imag"),
    "negative_zero": ("<<0.0|-0.0>>", "x + math.copysign(1.0, self.value)"),
    "not_a_number": ("float('<<nan|1.0>>')", "x * 2 if math.isnan(self.value) else x"),
    "iterator": ("KINDS[<<0|1>>]", "x * self.value.value"),
    "type": ("<<Options|Other>>", "self.value(2.0).apply(x)"),
    "hasattr": (
        "<<Options(1.0)|types.SimpleNamespace(other=1)>>",
        "x * 2 if hasattr(self.value, 'gain') else x",
    ),
    "isinstance": ("<<Options(1.0)|Other(1.0)>>", "x * 2 if isinstance(self.value, Other) else x"),
}

ATTRIBUTE_MODULE = """
class Kind(enum.Enum):
    ONE = 1.5
    TWO = 2.5
KINDS = list(Kind)
class Bits(enum.Flag):
    A = 1
    B = 2
@dataclasses.dataclass
class Options:
    gain: object
    def apply(self, x): return x * self.gain
    def __call__(self, x): return x * self.gain
    def hook(self, module, args, out): return out * self.gain
    @property
    def twice(self): return self.gain * 2
class Other(Options):
    def apply(self, x): return x - self.gain
@dataclasses.dataclass(frozen=True)
class Frozen:
    gain: float
class Slotted:
    __slots__ = ("gain",)
    def __init__(self, gain): self.gain = gain
Pair = collections.namedtuple("Pair", "gain rest")
def scaled(x, gain): return x * gain
def scaled_by(options, x): return x * options.gain
def closed(gain): return lambda x: x * gain
def cast(dtype): return lambda x: x.to(dtype)
def closed_object(options): return lambda x: x * options.gain
def closed_list(values): return lambda x: x * values[0]
def closed_function(function): return lambda x: function(x) + 1
class Scale(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.gain = gain
    def forward(self, x): return x * self.gain
class Shift(Scale):
    def forward(self, x): return x + self.gain
KEPT = [Scale(2.0), Scale(3.0)]
def hooked(module, gain):
    module.register_forward_hook(lambda m, a, out: out * gain)
    return module
def pre_hooked(module, gain):
    module.register_forward_pre_hook(lambda m, args: (args[0] * gain,))
    return module
def method_hooked(module, options):
    module.register_forward_hook(options.hook)
    return module
class Model(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = value
    def forward(self, x):
        return RESULT
def build():
    return Model(VALUE)
"""

MODEL = """
class Model(nn.Module):
    def forward(self, x):
        return {result}
def build():
    return Model()
"""


def _model(before: str, result: str, after: str = "", helper: str = "") -> str:
    below = f"\n#helper\n{helper}" if helper else ""
    return before + MODEL.format(result=result) + after + below


OTHERS = {
    "forward_code": _model("", "x * <<2.0|3.0>>"),
    "forward_default": """
class Model(nn.Module):
    def forward(self, x, gain=<<2.0|3.0>>):
        return x * gain
def build():
    return Model()
""",
    "global_float": _model("GAIN = <<2.0|3.0>>", "x * GAIN"),
    "global_dict": _model("TABLE = {'a': <<2.0|3.0>>}", "x * TABLE['a']"),
    "global_lowercase_dict": _model("table = {'a': <<2.0|3.0>>}", "x * table['a']"),
    "global_set": _model("ON = {<<'double'|'other'>>}", "x * 2 if 'double' in ON else x"),
    "helper_constant": _model("import helper", "x * helper.GAIN", helper="GAIN = <<2.0|3.0>>"),
    "helper_from_import": _model(
        "from helper import GAIN", "x * GAIN", helper="GAIN = <<2.0|3.0>>"
    ),
    "helper_function": _model(
        "import helper", "helper.f(x)", helper="def f(x): return x * <<2.0|3.0>>"
    ),
    "helper_of_helper": _model(
        "import helper",
        "helper.f(x)",
        helper="def g(x): return x * <<2.0|3.0>>\ndef f(x): return g(x)",
    ),
    "helper_set": _model(
        "import helper",
        "x * 2 if 'double' in helper.ON else x",
        helper="ON = {<<'double'|'other'>>}",
    ),
    "helper_frozenset": _model(
        "import helper",
        "x * 2 if 'double' in helper.ON else x",
        helper="ON = frozenset({<<'double'|'other'>>})",
    ),
    "helper_enum_value": _model(
        "import helper",
        "x * helper.Kind.ONE.value",
        helper="import enum\nclass Kind(enum.Enum):\n    ONE = <<2.0|3.0>>",
    ),
    "helper_class_attribute": _model(
        "import helper", "x * helper.Options.gain", helper="class Options:\n    gain = <<2.0|3.0>>"
    ),
    "helper_inherited_attribute": _model(
        "import helper",
        "x * helper.O.gain",
        helper="class B:\n    gain = <<2.0|3.0>>\nclass O(B):\n    pass",
    ),
    "helper_method": _model(
        "import helper",
        "helper.O().f(x)",
        helper="class O:\n    def f(self, x): return x * <<2.0|3.0>>",
    ),
    "helper_static_method": _model(
        "import helper",
        "helper.O.f(x)",
        helper="class O:\n    @staticmethod\n    def f(x): return x * <<2.0|3.0>>",
    ),
    "helper_class_method": _model(
        "import helper",
        "helper.O.f(x)",
        helper="class O:\n    @classmethod\n    def f(cls, x): return x * <<2.0|3.0>>",
    ),
    "helper_property": _model(
        "import helper\nOPTIONS = helper.O()",
        "x * OPTIONS.gain",
        helper="class O:\n    @property\n    def gain(self): return <<2.0|3.0>>",
    ),
    "helper_decorated": _model(
        "import helper",
        "helper.f(x)",
        helper="import functools\ndef wrap(f):\n    @functools.wraps(f)\n"
        "    def g(x): return f(x) * <<2.0|3.0>>\n"
        "    return g\n@wrap\ndef f(x): return x + 1",
    ),
    "helper_wrapped": _model(
        "import helper",
        "helper.f(x)",
        helper="import functools\ndef wrap(f):\n    @functools.wraps(f)\n"
        "    def g(x): return f(x) * 2\n"
        "    return g\n@wrap\ndef f(x): return x * <<2.0|3.0>>",
    ),
    "helper_lru_cache": _model(
        "import helper",
        "x * helper.gain()",
        helper="import functools\n@functools.lru_cache\ndef gain(): return <<2.0|3.0>>",
    ),
    "helper_lru_cache_argument": _model(
        "import helper",
        "x * helper.gain(2)",
        helper="import functools\n@functools.lru_cache\ndef gain(n): return n * <<2.0|3.0>>",
    ),
    "helper_that_raises": _model(
        "import helper",
        "helper.f(x)",
        helper="def g(x):\n    if <<True|False>>:\n        raise ValueError\n    return x\n"
        "def f(x):\n    try:\n        return g(x)\n    except ValueError:\n        return x * 2",
    ),
    "helper_generator": _model(
        "import helper",
        "[x := x * v for v in helper.values()][-1]",
        helper="def values():\n    yield 1.0\n    yield <<2.0|3.0>>",
    ),
    "helper_context": _model(
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
    "local_class_attribute": """
def build():
    class Options:
        gain = <<2.0|3.0>>
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.options = Options()
        def forward(self, x):
            return x * self.options.gain
    return Model()
""",
    "local_class_closure_of_forward": """
def make(gain):
    class Model(nn.Module):
        def forward(self, x):
            return x * gain
    return Model()
def build():
    return make(<<2.0|3.0>>)
""",
    "local_class_closure_object": """
def make(options):
    class Model(nn.Module):
        def forward(self, x):
            return x * options.gain
    return Model()
def build():
    return make(types.SimpleNamespace(gain=<<2.0|3.0>>))
""",
    "local_class_closure_of_method": """
def make(gain):
    class Model(nn.Module):
        def scaled(self, x):
            return x * gain
        def forward(self, x):
            return self.scaled(x)
    return Model()
def build():
    return make(<<2.0|3.0>>)
""",
    "local_function_in_forward": """
class Model(nn.Module):
    def forward(self, x):
        def f(x): return x * <<2.0|3.0>>
        return f(x)
def build():
    return Model()
""",
    "class_attribute": """
class Model(nn.Module):
    gain = <<2.0|3.0>>
    def forward(self, x):
        return x * self.gain
def build():
    return Model()
""",
    "inherited_class_attribute": """
class Base(nn.Module):
    gain = 2.0
class Middle(Base):
    <<pass|gain = 3.0>>
class Model(Middle):
    def forward(self, x):
        return x * self.gain
def build():
    return Model()
""",
    "shadowed_class_attribute": """
class Model(nn.Module):
    gain = 2.0
    def forward(self, x):
        return x * self.gain
def build():
    model = Model()
    <<pass|model.gain = 3.0>>
    return model
""",
    "method_in_subclass": """
class Base(nn.Module):
    def scaled(self, x): return x * 2
    def forward(self, x):
        return self.scaled(x)
class Model(Base):
    <<pass|scaled = lambda self, x: x * 3>>
def build():
    return Model()
""",
    "method_patched_on_class": """
class Options:
    def apply(self, x): return x * 2
def other(self, x): return x * 3
<<pass|Options.apply = other>>
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.options = Options()
    def forward(self, x):
        return self.options.apply(x)
def build():
    return Model()
""",
    "method_unpatched_on_class": """
class Options:
    def apply(self, x): return x * 2
def other(self, x): return x * 3
<<Options.apply = other|pass>>
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.options = Options()
    def forward(self, x):
        return self.options.apply(x)
def build():
    return Model()
""",
    "method_patched_on_instance": """
class Model(nn.Module):
    def scaled(self, x): return x * 2
    def forward(self, x):
        return self.scaled(x)
def build():
    model = Model()
    <<pass|model.scaled = lambda x: x * 3>>
    return model
""",
    "forward_patched_on_instance": """
class Model(nn.Module):
    def forward(self, x):
        return x * 2
def build():
    model = Model()
    <<pass|model.forward = types.MethodType(lambda self, x: x * 3, model)>>
    return model
""",
    "forward_of_submodule_patched": """
class Inner(nn.Module):
    def forward(self, x): return x * 2
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()
    def forward(self, x):
        return self.inner(x)
def build():
    model = Model()
    <<pass|model.inner.forward = lambda x: x * 3>>
    return model
""",
    "forward_of_torch_class_patched": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Hardswish()
    def forward(self, x):
        return self.inner(x)
def build():
    return Model()
ORIGINAL = nn.Hardswish.forward
def enter():
    <<pass|nn.Hardswish.forward = lambda self, x: x * 3>>
def leave():
    nn.Hardswish.forward = ORIGINAL
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
    "attribute_of_parameter": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.weight.gain = <<2.0|3.0>>
    def forward(self, x):
        return x * self.weight * self.weight.gain
def build():
    return Model()
""",
    "requires_grad": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8), requires_grad=<<True|False>>)
    def forward(self, x):
        return x * self.weight * (2 if self.weight.requires_grad else 3)
def build():
    return Model()
""",
    "shared_module": """
class Rope(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base
    def forward(self, x): return x * self.base
class Layer(nn.Module):
    def __init__(self, rope):
        super().__init__()
        self.rope = [rope]
    def forward(self, x): return self.rope[0](x)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        rope = Rope(<<10000|20000>>)
        self.layers = nn.ModuleList([Layer(rope), Layer(rope)])
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
def build():
    return Model()
""",
    "one_of_two_shared_objects": """
class Options:
    def __init__(self, gain): self.gain = gain
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = Options(2.0)
        self.b = <<self.a|Options(2.0)>>
    def forward(self, x):
        return x * 2 if self.a is self.b else x * 3
def build():
    return Model()
""",
    "environment_changed": _model(
        "",
        "x * float(os.environ.get('PG_TEST_GAIN', '1'))",
        "def enter():\n    os.environ['PG_TEST_GAIN'] = '<<2|3>>'\n"
        "def leave():\n    del os.environ['PG_TEST_GAIN']\n",
    ),
    "environment_set": _model(
        "",
        "x * 2 if 'PG_TEST_ON' in os.environ else x",
        "def enter():\n    <<pass|os.environ['PG_TEST_ON'] = '1'>>\n"
        "def leave():\n    os.environ.pop('PG_TEST_ON', None)\n",
    ),
    "environment_unset": _model(
        "",
        "x * 2 if os.getenv('PG_TEST_ON') else x",
        "def enter():\n    <<os.environ['PG_TEST_ON'] = '1'|pass>>\n"
        "def leave():\n    os.environ.pop('PG_TEST_ON', None)\n",
    ),
    "environment_item": _model(
        "",
        "x * float(os.environ['PG_TEST_GAIN'])",
        "def enter():\n    os.environ['PG_TEST_GAIN'] = '<<2|3>>'\n"
        "def leave():\n    del os.environ['PG_TEST_GAIN']\n",
    ),
    "environment_in_helper": _model(
        "import helper",
        "helper.f(x)",
        "def enter():\n    <<pass|os.environ['PG_TEST_ON'] = '1'>>\n"
        "def leave():\n    os.environ.pop('PG_TEST_ON', None)\n",
        helper="import os\n"
        "def f(x):\n    return x * 2 if os.environ.get('PG_TEST_ON') == '1' else x",
    ),
    "patched_functional": _model(
        "",
        "F.silu(x)",
        "ORIGINAL = F.silu\ndef enter():\n    <<pass|F.silu = lambda x, inplace=False: x * 3>>\n"
        "def leave():\n    F.silu = ORIGINAL\n",
    ),
    "unpatched_functional": _model(
        "",
        "F.silu(x)",
        "ORIGINAL = F.silu\ndef enter():\n    <<F.silu = lambda x, inplace=False: x * 3|pass>>\n"
        "def leave():\n    F.silu = ORIGINAL\n",
    ),
    "patched_functional_in_module": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.act = nn.SiLU()
    def forward(self, x):
        return self.act(x)
def build():
    return Model()
ORIGINAL = F.silu
def enter():
    <<pass|F.silu = lambda x, inplace=False: x * 3>>
def leave():
    F.silu = ORIGINAL
""",
    "patched_torch_function": _model(
        "",
        "torch.relu(x)",
        "ORIGINAL = torch.relu\ndef enter():\n    <<pass|torch.relu = lambda x: x * 3>>\n"
        "def leave():\n    torch.relu = ORIGINAL\n",
    ),
    "patched_math": _model(
        "",
        "x * math.factorial(3)",
        "ORIGINAL = math.factorial\ndef enter():\n    <<pass|math.factorial = lambda n: 5>>\n"
        "def leave():\n    math.factorial = ORIGINAL\n",
    ),
    "cudnn_benchmark": _model(
        "",
        "x * 2 if torch.backends.cudnn.benchmark else x",
        "def enter():\n    torch.backends.cudnn.benchmark = <<False|True>>\n"
        "def leave():\n    torch.backends.cudnn.benchmark = False\n",
    ),
    "deterministic": _model(
        "",
        "x * 2 if torch.are_deterministic_algorithms_enabled() else x",
        "def enter():\n    torch.use_deterministic_algorithms(<<False|True>>)\n"
        "def leave():\n    torch.use_deterministic_algorithms(False)\n",
    ),
    "default_dtype": _model(
        "",
        "x * 2 if torch.get_default_dtype() is torch.float64 else x",
        "def enter():\n    torch.set_default_dtype(torch.float<<32|64>>)\n"
        "def leave():\n    torch.set_default_dtype(torch.float32)\n",
    ),
    "context_variable_like_state": _model(
        "class State:\n    gain = 1.0\nSTATE = State()",
        "x * STATE.gain",
        "def enter():\n    STATE.gain = <<2.0|3.0>>\ndef leave():\n    pass\n",
    ),
    "module_attribute_of_package": _model(
        "import helper",
        "x * helper.inner.gain",
        helper="import types\ninner = types.SimpleNamespace(gain=<<2.0|3.0>>)",
    ),
    "allow_in_graph": _model(
        "import helper",
        "helper.f(x)",
        helper="import torch\n@torch._dynamo.allow_in_graph\ndef f(x): return x * <<2.0|3.0>>",
    ),
    "custom_op_fake": _model(
        "import helper",
        "torch.ops.pg_conditions.narrow(x) * 2",
        helper="import torch\nlib = torch.library.Library('pg_conditions', 'DEF')\n"
        "lib.define('narrow(Tensor x) -> Tensor')\n"
        "lib.impl('narrow', lambda x: x[:, :<<4|6>>].clone(), 'CompositeExplicitAutograd')\n"
        "fake = lambda x: x[:, :<<4|6>>].clone()\n"
        "torch.library.register_fake('pg_conditions::narrow', fake, lib=lib)",
    ),
    "composite_op": _model(
        "import helper",
        "torch.ops.pg_composite.scale(x) + 1",
        helper="import torch\ndef gain(x): return x * <<2.0|3.0>>\ndef scale(x): return gain(x)\n"
        "lib = torch.library.Library('pg_composite', 'DEF')\n"
        "lib.define('scale(Tensor x) -> Tensor')\n"
        "lib.impl('scale', scale, 'CompositeImplicitAutograd')",
    ),
    "constant_result": _model(
        "import helper",
        "x * helper.gain()",
        helper="import torch\nGAIN = [<<2.0|3.0>>]\n@torch._dynamo.assume_constant_result\n"
        "def gain(): return GAIN[0]",
    ),
    "tensor_from_list": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.values = [<<2.0|3.0>>] * 8
    def forward(self, x):
        return x * torch.tensor(self.values)
def build():
    return Model()
""",
    "weight_shape": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.ones(<<1|8>>))
    def forward(self, x):
        return x * self.weight * self.weight.shape[0]
def build():
    return Model()
""",
    "weight_tied": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.ones(8))
        self.b = <<self.a|nn.Parameter(torch.full((8,), 3.0))>>
    def forward(self, x):
        return x * self.a * self.b
def build():
    return Model()
""",
    "sentinel": """
A, B = object(), object()
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.mode = <<A|B>>
    def forward(self, x):
        return x * 2 if self.mode is A else x * 3
def build():
    return Model()
""",
    "metaclass_attribute": """
class Meta(type):
    @property
    def gain(cls): return <<2.0|3.0>>
class Options(metaclass=Meta):
    pass
class Model(nn.Module):
    def forward(self, x):
        return x * Options.gain
def build():
    return Model()
""",
    "descriptor": """
class Gain:
    def __init__(self, value): self.value = value
    def __get__(self, owner, cls): return self.value
class Options:
    gain = Gain(<<2.0|3.0>>)
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.options = Options()
    def forward(self, x):
        return x * self.options.gain
def build():
    return Model()
""",
    "getattr_of_object": """
class Options:
    def __init__(self, values): self.values = values
    def __getattr__(self, name): return self.__dict__["values"][name]
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.options = Options({"gain": <<2.0|3.0>>})
    def forward(self, x):
        return x * self.options.gain
def build():
    return Model()
""",
    "mapping_proxy": _model("TABLE = types.MappingProxyType({'a': <<2.0|3.0>>})", "x * TABLE['a']"),
    "abstract_method": """
class Base(abc.ABC):
    @abc.abstractmethod
    def gain(self): ...
class One(Base):
    def gain(self): return <<2.0|3.0>>
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = One()
    def forward(self, x):
        return x * self.one.gain()
def build():
    return Model()
""",
}


def sources() -> dict[str, str]:
    """The source of every case by name, both variants in one."""
    attributes = {
        f"attribute_{name}": ATTRIBUTE_MODULE.replace("VALUE", value).replace("RESULT", result)
        for name, (value, result) in ATTRIBUTES.items()
    }
    return {name: HEAD + source for name, source in {**attributes, **OTHERS}.items()}


UNREAD = {
    "attribute": ("self.other = '<<replica-1|replica-2>>'", "x * 2"),
    "number": ("self.other = <<1|2>>", "x * 2"),
    "path_of_a_checkpoint": (
        "self.config = types.SimpleNamespace(_name_or_path='/<<a|b>>/model', gain=2.0)",
        "x * self.config.gain",
    ),
    "field_of_an_object": (
        "self.config = types.SimpleNamespace(gain=2.0, started=<<1.0|2.0>>)",
        "x * self.config.gain",
    ),
    "order_of_a_dict": (
        "self.table = {<<'a': 1.0, 'b': 2.0|'b': 2.0, 'a': 1.0>>}",
        "x * self.table['a']",
    ),
    "other_key_of_a_dict": ("self.table = {'a': 2.0, 'b': <<1|2>>}", "x * self.table['a']"),
    "other_item_of_a_list": ("self.items = [2.0, <<1.0|5.0>>]", "x * self.items[0]"),
    "training_mode": ("self.train(<<True|False>>)", "x * 2"),
    "object_without_description": (
        "self.lock = __import__('<<threading|io>>').<<Lock|StringIO>>()",
        "x * 2",
    ),
    "name_of_a_submodule_class": ("self.inner = <<nn.Identity|nn.Tanh>>()", "x * 2"),
    "method_that_is_not_called": (
        "pass\n    def unused(self):\n        return <<1|2>>\n    def rest(self): pass",
        "x * 2",
    ),
    "global": ("pass", "x * 2"),
}
"""How the model is made, and what its forward gives: nothing reads what differs."""

UNREAD_MODEL = """
OTHER = <<1|2>>
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        MADE
    def forward(self, x):
        return RESULT
def enter():
    os.environ["TORCHX_JOB_ID"] = "job-<<1|2>>"
    os.environ["TRITON_SERVICE_HOST"] = "10.0.0.<<1|2>>"
    os.environ["TORCH_JOB_UID"] = "123e4567-e89b-12d3-a456-42661417400<<1|2>>"
def leave():
    for name in ("TORCHX_JOB_ID", "TRITON_SERVICE_HOST", "TORCH_JOB_UID"):
        del os.environ[name]
def build():
    return Model()
"""


def unread_sources() -> dict[str, str]:
    """Cases whose variants give the same result for the same reason."""
    return {
        f"unread_{name}": HEAD + UNREAD_MODEL.replace("MADE", made).replace("RESULT", result)
        for name, (made, result) in UNREAD.items()
    }
