# ruff: noqa: E501
"""Changes that a reader of the package thought of who had not written it: one of each kind."""

from __future__ import annotations

from .model import holding, of_result, under

PLAIN = "class O:\n    def __init__(self, gain=1.0): self.gain = gain\n"
SHADOW = """
import importlib.util, sys
def shadowed():
    path = os.path.join(os.path.dirname(__file__), 'helper.py')
    spec = importlib.util.spec_from_file_location('colorsys', path)
    module = importlib.util.module_from_spec(spec)
    sys.modules['colorsys'] = module
    spec.loader.exec_module(module)
    return module
S = shadowed()
"""


def shadowing(result: str, helper: str) -> str:
    """A model that reads a module of the user's with a name of the standard library."""
    return of_result(
        SHADOW, result, "def leave():\n    sys.modules.pop('colorsys', None)\n", helper
    )


CASES = {
    # protocols of objects
    "float_of_an_object": holding(
        "o", "O()", "x * float(self.o)", "class O:\n    def __float__(self): return <<2.0|3.0>>\n"
    ),
    "integer_of_an_object": holding(
        "o", "O()", "x * int(self.o)", "class O:\n    def __int__(self): return <<2|3>>\n"
    ),
    "string_of_an_object": holding(
        "o", "O()", "x * len(str(self.o))", "class O:\n    def __str__(self): return '<<a|bb>>'\n"
    ),
    "order_of_objects": holding(
        "o",
        "[O(2.0), O(3.0)]",
        "x * (2 if self.o[0] < self.o[1] else 1)",
        PLAIN + "    def __lt__(self, other): return <<self.gain < other.gain|False>>\n",
    ),
    "absolute_of_an_object": holding(
        "o", "O()", "x * abs(self.o)", "class O:\n    def __abs__(self): return <<2.0|3.0>>\n"
    ),
    "minus_an_object": holding(
        "o", "O()", "x * -self.o", "class O:\n    def __neg__(self): return <<2.0|3.0>>\n"
    ),
    "reversed_object": holding(
        "o",
        "O()",
        "x * list(reversed(self.o))[0]",
        "class O:\n    def __reversed__(self): return iter([<<2.0|3.0>>])\n",
    ),
    "callable_object": holding(
        "o",
        "O()",
        "x * 2 if callable(self.o) else x",
        "class O:\n    <<pass|def __call__(self): pass>>\n",
    ),
    "copy_of_an_object": holding(
        "o",
        "O()",
        "x * copy.copy(self.o).gain",
        "import copy\n" + PLAIN + "    def __copy__(self): return O(<<2.0|3.0>>)\n",
    ),
    "torch_function_of_an_object": holding(
        "o",
        "O()",
        "torch.add(x, self.o)",
        "class O:\n    gain = <<2.0|3.0>>\n    @classmethod\n    def __torch_function__(cls, f, types, args=(), kwargs=None): return args[0] * cls.gain\n",
    ),
    "object_that_is_made": of_result(
        "class O:\n    def __new__(cls):\n        o = object.__new__(cls)\n        o.gain = <<2.0|3.0>>\n        return o\n",
        "x * O().gain",
    ),
    "property_added_to_tensors": under(
        "torch.Tensor.pg_gain = property(lambda self: <<2.0|3.0>>)",
        "x * x.pg_gain",
        "del torch.Tensor.pg_gain",
    ),
    "method_of_parameters_patched": under(
        "<<pass|nn.Parameter.relu = lambda self: self * 3>>",
        "x * self.w.relu()",
        "'relu' in vars(nn.Parameter) and delattr(nn.Parameter, 'relu')",
        made="self.w = nn.Parameter(torch.ones(8))",
    ),
    # classes
    "instance_check_that_reads_the_object": holding(
        "o",
        "O()",
        "x * 2 if isinstance(self.o, C) else x",
        "class M(type):\n    def __instancecheck__(cls, o): return o.on\nclass C(metaclass=M): pass\nclass O:\n    def __init__(self): self.on = <<True|False>>\n",
    ),
    "subclass_hook_that_reads_the_class": holding(
        "o",
        "O()",
        "x * 2 if isinstance(self.o, C) else x",
        "class C(abc.ABC):\n    @classmethod\n    def __subclasshook__(cls, other): return 'run' in vars(other)\nclass O:\n    <<pass|run = 1>>\n",
    ),
    "class_item_that_reads_the_class": of_result(
        "class C:\n    table = [<<2.0|3.0>>]\n    def __class_getitem__(cls, i): return cls.table[i]\n",
        "x * C[0]",
    ),
    "registered_with_a_registered_class": holding(
        "o",
        "O()",
        "x * 2 if isinstance(self.o, Base) else x",
        "class Base(abc.ABC): pass\nclass Middle(abc.ABC): pass\nBase.register(Middle)\nclass O: pass\n<<pass|Middle.register(O)>>\n",
    ),
    "registered_with_a_subclass": holding(
        "o",
        "O()",
        "x * 2 if isinstance(self.o, Base) else x",
        "class Base(abc.ABC): pass\nclass Below(Base): pass\nclass O: pass\n<<pass|Below.register(O)>>\n",
    ),
    "registered_as_a_path": holding(
        "o",
        "O()",
        "x * 2 if isinstance(self.o, os.PathLike) else x",
        "class O: pass\n<<pass|os.PathLike.register(O)>>\n",
    ),
    "keyword_of_a_class": holding(
        "o",
        "O()",
        "x * self.o.gain",
        "class Base:\n    def __init_subclass__(cls, gain): cls.gain = gain\nclass O(Base, gain=<<2.0|3.0>>): pass\n",
    ),
    "length_of_the_bases": holding(
        "o",
        "O()",
        "x * len(type(self.o).__mro__)",
        "class A: pass\nclass O<<|(A)>>: pass\n",
    ),
    "subclass_of_a_class": of_result(
        "class A: pass\nclass B<<|(A)>>: pass\n", "x * 2 if issubclass(B, A) else x"
    ),
    "module_of_a_class": of_result(
        "class A: pass\nA.__module__ = '<<a|bb>>'\n", "x * len(A.__module__)"
    ),
    "abstract_methods": of_result(
        "class A(abc.ABC):\n    @abc.abstractmethod\n    def f(self): ...\n    <<pass|g = abc.abstractmethod(lambda self: 1)>>\n",
        "x * len(A.__abstractmethods__)",
    ),
    "class_of_a_union": holding(
        "o",
        "2",
        "x * 2 if isinstance(self.o, KINDS) else x",
        "import typing\nKINDS = typing.Union[<<int|float>>, str]\n",
    ),
    "class_of_a_tuple": holding(
        "o", "2", "x * 2 if isinstance(self.o, KINDS) else x", "KINDS = (str, <<int|float>>)\n"
    ),
    # dataclasses and enums
    "default_factory_of_a_dataclass": of_result(
        "def made(): return <<2.0|3.0>>\n@dataclasses.dataclass\nclass D:\n    gain: float = dataclasses.field(default_factory=made)\n",
        "x * D().gain",
    ),
    "equality_of_a_dataclass": of_result(
        "@dataclasses.dataclass(eq=<<True|False>>)\nclass D:\n    gain: float = 2.0\n",
        "x * 2 if self.a == self.b else x",
        made="self.a, self.b = D(), D()",
    ),
    "field_that_is_not_compared": of_result(
        "@dataclasses.dataclass\nclass D:\n    gain: float = dataclasses.field(compare=<<True|False>>)\n",
        "x * 2 if self.a == self.b else x",
        made="self.a, self.b = D(2.0), D(3.0)",
    ),
    "metadata_of_a_field": holding(
        "o",
        "D()",
        "x * dataclasses.fields(self.o)[0].metadata['gain']",
        "@dataclasses.dataclass\nclass D:\n    a: float = dataclasses.field(default=1.0, metadata={'gain': <<2.0|3.0>>})\n",
    ),
    "computed_field_of_a_dataclass": of_result(
        "@dataclasses.dataclass\nclass D:\n    a: float = 1.0\n    def __post_init__(self): self.b = self.a * <<2.0|3.0>>\n",
        "x * D().b",
    ),
    "alias_in_an_enum": of_result(
        "class Kind(enum.Enum):\n    A = 1\n    B = 2\n    C = <<1|2>>\n",
        "x * 2 if Kind.C is Kind.A else x",
    ),
    "attribute_of_a_member": holding(
        "k",
        "Kind.A",
        "x * self.k.gain",
        "class Kind(enum.Enum):\n    A = 1\nKind.A.gain = <<2.0|3.0>>\n",
    ),
    "attribute_of_a_global_member": of_result(
        "class Kind(enum.Enum):\n    A = 1\n    def __init__(self, n): self.gain = n * <<2.0|3.0>>\n",
        "x * Kind.A.gain",
    ),
    "order_of_members": of_result(
        "class Kind(enum.Enum):\n    <<A = 1|B = 2>>\n    <<B = 2|A = 1>>\n",
        "x * list(Kind)[0].value",
    ),
    # containers and values
    "type_of_a_string": holding(
        "o", "<<'a'|S('a')>>", "x * 2 if type(self.o) is str else x", "class S(str): pass\n"
    ),
    "type_of_a_shape": holding(
        "o", "<<(2, 3)|torch.Size([2, 3])>>", "x * 2 if isinstance(self.o, torch.Size) else x"
    ),
    "type_of_a_tuple": holding(
        "o",
        "<<(2.0, 3.0)|P(2.0, 3.0)>>",
        "x * 2 if type(self.o) is tuple else x",
        "P = collections.namedtuple('P', 'a b')\n",
    ),
    "sentinel_of_a_library": holding(
        "o",
        "<<dataclasses.MISSING|NotImplemented>>",
        "x * 2 if self.o is dataclasses.MISSING else x",
    ),
    "order_of_an_ordered_dict": holding(
        "o",
        "collections.OrderedDict([<<('a', 2.0), ('b', 3.0)|('b', 3.0), ('a', 2.0)>>])",
        "x * next(iter(self.o.values()))",
    ),
    "equal_ranges": holding("o", "range(0, <<3|4>>, 2)", "x * self.o.stop"),
    "item_of_a_subclass_of_dict": holding(
        "o",
        "D(a=1.0)",
        "x * self.o['a']",
        "class D(dict):\n    def __getitem__(self, k): return super().__getitem__(k) * <<2.0|3.0>>\n",
    ),
    "dead_reference": holding(
        "r", "weakref.ref(<<KEPT|O()>>)", "x * 2 if self.r() is None else x", PLAIN + "KEPT = O()\n"
    ),
    "weak_values": holding(
        "o",
        "MADE",
        "x * len(self.o)",
        PLAIN + "KEPT = O()\nMADE = weakref.WeakValueDictionary(<<|a=KEPT>>)\n",
    ),
    "held_autocast": of_result(
        "def f(c, x, w):\n    with c:\n        return x @ w\n",
        "f(self.c, x, self.w)",
        made="self.c = torch.autocast('cpu', dtype=torch.<<bfloat16|float16>>); self.w = nn.Parameter(torch.ones(8, 8))",
    ),
    # functions and modules of Python
    "constants_of_code": of_result("def f(): return <<2.0|3.0>>\n", "x * f.__code__.co_consts[1]"),
    "number_of_arguments": of_result("def f(a<<|, b>>): pass\n", "x * f.__code__.co_argcount"),
    "presence_of_a_closure": of_result(
        "def make(g):\n    def f(): return g\n    return f\ndef plain(): return 1\nF1 = <<plain|make(2)>>\n",
        "x * 2 if F1.__closure__ is None else x",
    ),
    "doc_of_a_module": of_result(
        "import helper\n", "x * len(helper.__doc__)", helper="'<<a|bb>>'\n"
    ),
    "property_of_a_module": of_result(
        "import helper\n",
        "x * helper.gain",
        helper="import sys, types\nclass M(types.ModuleType):\n    @property\n    def gain(self): return <<2.0|3.0>>\nsys.modules[__name__].__class__ = M\n",
    ),
    "class_of_a_shadowing_module": shadowing(
        "x * S.O().gain", "class O:\n    gain = <<2.0|3.0>>\n"
    ),
    "member_of_a_shadowing_module": shadowing(
        "x * len(S.Kind)", "import enum\nclass Kind(enum.Enum):\n    A = 1\n    <<pass|B = 2>>\n"
    ),
    "check_of_a_shadowing_module": shadowing(
        "x * 2 if isinstance(S.O(), S.Base) else x",
        "class Base: pass\nclass O<<|(Base)>>: pass\n",
    ),
    "instance_check_of_a_shadowing_module": shadowing(
        "x * 2 if isinstance(S.K, S.C) else x",
        "class M(type):\n    def __instancecheck__(cls, o): return <<True|False>>\nclass C(metaclass=M): pass\nclass O: pass\nK = O()\n",
    ),
    # the process
    "first_day_of_a_week": under(
        "calendar.setfirstweekday(<<1|2>>)",
        "x * calendar.firstweekday()",
        "calendar.setfirstweekday(0)",
        "import calendar\n",
    ),
    "system_of_the_machine": under(
        "sys.platform = <<ORIGINAL|'other'>>",
        "x * 2 if sys.platform == 'other' else x",
        "sys.platform = ORIGINAL",
        "import sys\nORIGINAL = sys.platform\n",
    ),
    "file_read_by_a_constant": under(
        "pathlib.Path(PATH).write_text('<<2|3>>')",
        "x * gain()",
        "os.remove(PATH)",
        "import pathlib\nPATH = os.path.join(os.path.dirname(__file__), 'gain.txt')\n@torch._dynamo.assume_constant_result\ndef gain(): return float(pathlib.Path(PATH).read_text())\n",
    ),
    "method_with_a_constant_result": holding(
        "o",
        "O(<<2.0|3.0>>)",
        "x * self.o.read()",
        PLAIN + "    @torch._dynamo.assume_constant_result\n    def read(self): return self.gain\n",
    ),
    # functions that torch keeps whole
    "object_of_a_function_in_the_graph": of_result(
        PLAIN
        + "KEPT = O(<<2.0|3.0>>)\n@torch.compiler.allow_in_graph\ndef f(x): return x * KEPT.gain\n",
        "f(x)",
    ),
    "method_of_a_function_in_the_graph": of_result(
        PLAIN
        + "    def by(self, x): return x * self.rest()\n    def rest(self): return <<2.0|3.0>>\nKEPT = O()\n@torch.compiler.allow_in_graph\ndef f(x): return KEPT.by(x)\n",
        "f(x)",
    ),
    "state_of_a_fake": of_result(
        "SIZE = [<<2|3>>]\n@torch.library.custom_op('pg_case::sized', mutates_args=())\ndef sized(x: torch.Tensor) -> torch.Tensor:\n    return x[:, :SIZE[0]].clone()\n@sized.register_fake\ndef _(x): return x.new_empty(x.shape[0], SIZE[0])\n",
        "x * sized(x).shape[1]",
    ),
    # settings of torch
    "fast_path_of_attention": under(
        "torch.backends.mha.set_fastpath_enabled(<<True|False>>)",
        "x * 2 if torch.backends.mha.get_fastpath_enabled() else x",
        "torch.backends.mha.set_fastpath_enabled(True)",
    ),
    "engine_of_quantization": under(
        "torch.backends.quantized.engine = <<'onednn'|'x86'>>",
        "x * 2 if torch.backends.quantized.engine == 'x86' else x",
        "torch.backends.quantized.engine = 'x86'",
    ),
    "cache_of_autocast": under(
        "torch.set_autocast_cache_enabled(<<True|False>>)",
        "x * 2 if torch.is_autocast_cache_enabled() else x",
        "torch.set_autocast_cache_enabled(True)",
    ),
    # weights and modules of torch
    "leaf_of_a_graph": of_result(
        "",
        "x * 2 if self.w.is_leaf else x",
        made="self.w = made()",
    ).replace(
        "class Model",
        "def made():\n    with torch.enable_grad(): return (torch.ones(8, requires_grad=True) * 1)<<.detach()|>>\nclass Model",
    ),
    "parameter_that_is_a_buffer": of_result(
        "",
        "x * 2 if isinstance(self.w, nn.Parameter) else x",
        made="<<self.w = nn.Parameter(torch.ones(8), False)|self.register_buffer('w', torch.ones(8))>>",
    ),
    "buffer_that_is_none": of_result(
        "",
        "x * 2 if self.b is None else x",
        made="self.register_buffer('b', None); <<pass|self.b = torch.ones(8)>>",
    ),
    "order_of_a_module_dict": of_result(
        "",
        "list(self.d.values())[0](x)",
        made="self.d = nn.ModuleDict([<<('a', nn.Tanh()), ('b', nn.Sigmoid())|('b', nn.Sigmoid()), ('a', nn.Tanh())>>])",
    ),
    "order_of_buffers": of_result(
        "",
        "x * 2 if list(self.buffers())[0] is self.a else x",
        made="[self.register_buffer(n, torch.ones(8)) for n in <<'ab'|'ba'>>]",
    ),
    "keys_of_a_parameter_dict": of_result(
        "",
        "x * len(list(self.p.keys())[0])",
        made="self.p = nn.ParameterDict({'<<a|bb>>': torch.ones(8)})",
    ),
    "order_of_parametrizations": of_result(
        "P = nn.utils.parametrize.register_parametrization\nclass Twice(nn.Module):\n    def forward(self, w): return w * 2\n",
        "self.one(x)",
        made="self.one = nn.Linear(8, 8); [P(self.one, 'weight', m) for m in (<<Twice(), nn.Tanh()|nn.Tanh(), Twice()>>)]",
    ),
    "hook_that_is_an_object": of_result(
        PLAIN + "    def __call__(self, m, a, out): return out * self.gain\n",
        "self.one(x)",
        made="self.one = nn.Tanh(); self.one.register_forward_hook(O(<<2.0|3.0>>))",
    ),
    "order_of_pre_hooks": of_result(
        "",
        "self.one(x)",
        made="self.one = nn.Tanh(); self.one.register_forward_pre_hook(lambda m, a: (a[0] + 1,)); self.one.register_forward_pre_hook(lambda m, a: (a[0] * 3,), prepend=<<False|True>>)",
    ),
    "children_by_another_method": of_result(
        "class Part(nn.Module):\n    def named_children(self): return iter([('a', nn.Tanh())] * <<1|2>>)\n",
        "x * len(list(self.part.children()))",
        made="self.part = Part()",
    ),
    "keys_of_a_state": of_result(
        "",
        "x * len(self.part._state_dict_hooks)",
        made="self.part = nn.Tanh(); <<pass|self.part._register_state_dict_hook(print)>>",
    ),
}
