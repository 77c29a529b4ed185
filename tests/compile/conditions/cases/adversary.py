# ruff: noqa: E501
"""Changes that were thought of after the conditions were written: what else may Dynamo fold?"""

from __future__ import annotations

from .model import holding, of_result, under


def of_weights(result: str, change: str, made: str = "") -> str:
    """A model with two linear layers, changed by `change` in the second variant."""
    made = made or "self.one = nn.Linear(8, 8, bias=False); self.two = nn.Linear(8, 8, bias=False)"
    source = of_result("", result, made=made)
    return source.replace(
        "return Model()", f"model = Model()\n    <<pass|{change}>>\n    return model"
    )


PLAIN = "class Options:\n    def __init__(self, gain): self.gain = gain\n"

CASES = {
    # the process and its libraries
    "arguments_of_the_program": under(
        "sys.argv[:] = ['a'] * <<2|3>>", "x * len(sys.argv)", before="import sys\n"
    ),
    "loaded_modules": under(
        "<<pass|sys.modules.setdefault('pg_other', types)>>",
        "x * 2 if 'pg_other' in sys.modules else x",
        "sys.modules.pop('pg_other', None)",
        "import sys\n",
    ),
    "path_of_modules": under(
        "sys.path.extend([''] * <<1|9>>)", "x * len(sys.path)", before="import sys\n"
    ),
    "flag_of_the_interpreter": under(
        "sys.dont_write_bytecode = <<True|False>>",
        "x * 2 if sys.dont_write_bytecode else x",
        before="import sys\n",
    ),
    "attribute_of_sys": under(
        "sys.pg_gain = <<2.0|3.0>>", "x * sys.pg_gain", before="import sys\n"
    ),
    "hook_of_sys": under(
        "sys.excepthook = <<sys.__excepthook__|print>>",
        "x * 2 if sys.excepthook is sys.__excepthook__ else x",
        "sys.excepthook = sys.__excepthook__",
        "import sys\n",
    ),
    "printing_of_torch": under(
        "torch.set_printoptions(precision=<<2|3>>)",
        "x * torch._tensor_str.PRINT_OPTS.precision",
        "torch.set_printoptions(precision=4)",
    ),
    "version_of_torch": under(
        "torch.__version__ = <<ORIGINAL|'9.9'>>",
        "x * 2 if torch.__version__ < '9' else x",
        "torch.__version__ = ORIGINAL",
        "ORIGINAL = torch.__version__\n",
    ),
    "version_of_cuda": under(
        "torch.version.cuda = <<None|'13'>>",
        "x * 2 if torch.version.cuda else x",
        "torch.version.cuda = None",
    ),
    "limits_of_a_dtype": of_result(
        "DTYPE = torch.<<float16|bfloat16>>\n",
        "x.clamp(max=torch.finfo(DTYPE).max) * torch.finfo(DTYPE).eps",
    ),
    "default_of_autocast": under(
        "torch.set_autocast_enabled('cpu', <<True|False>>)",
        "x * 2 if torch.is_autocast_enabled('cpu') else x",
        "torch.set_autocast_enabled('cpu', False)",
    ),
    # classes
    "subclasses_of_a_class": of_result(
        "class Base: pass\nclass One(Base): pass\n<<pass|Two = type('Two', (Base,), {})>>\n",
        "x * len(Base.__subclasses__())",
    ),
    "doc_of_a_class": of_result("class Base:\n    '<<a|bb>>'\n", "x * len(Base.__doc__)"),
    "name_of_a_class": of_result(
        "class Base: pass\nBase.__name__ = '<<a|bb>>'\n", "x * len(Base.__name__)"
    ),
    "annotations_of_a_class": of_result(
        "class Base:\n    a: int\n    <<pass|b: int>>\n", "x * len(Base.__annotations__)"
    ),
    "variables_of_a_class": of_result(
        "class Base:\n    a = 1.0\n    <<pass|b = 2.0>>\n",
        "x * sum(v for k, v in vars(Base).items() if isinstance(v, float))",
    ),
    "order_of_bases": holding(
        "o",
        "Two()",
        "x * self.o.gain",
        "class A: gain = 2.0\nclass B: gain = 3.0\nclass Two(<<A, B|B, A>>): pass\n",
    ),
    "class_of_an_object_replaced": holding(
        "o",
        "One()",
        "x * self.o.gain()",
        "class One:\n    def gain(self): return 2.0\nclass Two(One):\n    def gain(self): return 3.0\n",
    ).replace(
        "return Model()", "model = Model()\n    <<pass|model.o.__class__ = Two>>\n    return model"
    ),
    "names_of_slots": holding(
        "o",
        "Slots()",
        "x * len(self.o.__slots__)",
        "class Slots:\n    __slots__ = ('a', <<|'b'>>)\n",
    ),
    "value_in_a_slot": holding(
        "o",
        "Slots()",
        "x * self.o.a",
        "class Slots:\n    __slots__ = ('a',)\n    def __init__(self): self.a = <<2.0|3.0>>\n",
    ),
    "repr_of_an_object": holding(
        "o",
        "Options(1.0)",
        "x * len(repr(self.o))",
        PLAIN + "    def __repr__(self): return '<<a|bb>>'\n",
    ),
    "index_of_an_object": holding(
        "o",
        "Options(1.0)",
        "x * [2.0, 3.0][self.o]",
        PLAIN + "    def __index__(self): return <<0|1>>\n",
    ),
    "descriptor_that_knows_its_name": holding(
        "o",
        "Options()",
        "x * self.o.gain",
        "class D:\n    def __set_name__(self, owner, name): self.gain = <<2.0|3.0>>\n    def __get__(self, o, c): return self.gain\nclass Options:\n    gain = D()\n",
    ),
    "registered_subclasses": of_result(
        "SEEN = []\nclass Base:\n    def __init_subclass__(cls, **k): SEEN.append(cls)\nclass One(Base): pass\n<<pass|Two = type('Two', (Base,), {})>>\n",
        "x * len(SEEN)",
    ),
    "fields_of_a_dataclass": holding(
        "o",
        "Data()",
        "x * len(dataclasses.fields(self.o))",
        "@dataclasses.dataclass\nclass Data:\n    a: int = 1\n    <<pass|b: int = 2>>\n",
    ),
    "dataclass_as_a_dict": holding(
        "o",
        "Data()",
        "x * sum(dataclasses.asdict(self.o).values())",
        "@dataclasses.dataclass\nclass Data:\n    a: int = 1\n    b: int = <<2|3>>\n",
    ),
    "fields_of_a_named_tuple": holding(
        "o",
        "Pair(1.0, 2.0)",
        "x * getattr(self.o, self.o._fields[0])",
        "Pair = collections.namedtuple('Pair', '<<a b|b a>>')\n",
    ).replace("Pair(1.0, 2.0)", "Pair(b=1.0, a=2.0)"),
    "members_of_a_flag": holding(
        "o",
        "Kind.A | Kind.B",
        "x * self.o.value",
        "class Kind(enum.Flag):\n    A = 1\n    B = <<2|4>>\n",
    ),
    "iterated_enum": of_result(
        "class Kind(enum.Enum):\n    A = 1\n    <<pass|B = 2>>\n", "x * len([k for k in Kind])"
    ),
    "length_of_an_enum": of_result(
        "class Kind(enum.Enum):\n    A = 1\n    <<pass|B = 2>>\n", "x * len(Kind)"
    ),
    # functions
    "doc_of_a_function": of_result("def f():\n    '<<a|bb>>'\n", "x * len(f.__doc__)"),
    "line_of_code": of_result("<<|\n\n>>def f(): pass\n", "x * f.__code__.co_firstlineno"),
    "variables_of_code": of_result("def f(): <<a|bb>> = 1\n", "x * len(f.__code__.co_varnames[0])"),
    "attribute_of_a_function": of_result("def f(): pass\nf.gain = <<2.0|3.0>>\n", "x * f.gain"),
    "dict_of_a_function": of_result(
        "def f(): pass\nf.a = 1\n<<pass|f.b = 2>>\n", "x * len(f.__dict__)"
    ),
    "globals_of_a_function": of_result(
        "GAIN = <<2.0|3.0>>\ndef f(): pass\n", "x * f.__globals__['GAIN']"
    ),
    "signature_of_a_function": of_result(
        "import inspect\ndef f(a, <<|b=1>>): pass\n", "x * len(inspect.signature(f).parameters)"
    ),
    "defaults_of_a_function": of_result("def f(a=<<2.0|3.0>>): pass\n", "x * f.__defaults__[0]"),
    "wrapped_function": of_result(
        "def f(x): return x * <<2.0|3.0>>\n@functools.wraps(f)\ndef g(x): return x\n",
        "g.__wrapped__(x)",
    ),
    "bound_method_of_a_string": holding("get", "'<<a|bb>>'.count", "x * (1 + self.get('b'))"),
    "keywords_of_a_partial": holding(
        "f", "functools.partial(torch.add, alpha=2)", "self.f(x, x)"
    ).replace(
        "return Model()",
        "model = Model()\n    <<pass|model.f.keywords['alpha'] = 3>>\n    return model",
    ),
    # modules of Python
    "attribute_made_by_a_module": of_result(
        "import helper\n", "x * helper.gain", helper="def __getattr__(name): return <<2.0|3.0>>"
    ),
    "names_of_a_module": of_result(
        "import helper\n",
        "x * len([k for k in vars(helper) if k in 'ab'])",
        helper="a = 1\n<<|b = 2>>",
    ),
    "exports_of_a_module": of_result(
        "import helper\n", "x * len(helper.__all__)", helper="__all__ = ['a', <<|'b'>>]"
    ),
    "name_of_a_module": of_result(
        "import helper\nhelper.__name__ = '<<a|bb>>'\n", "x * len(helper.__name__)", helper="a = 1"
    ),
    # containers and values
    "counter": holding("o", "collections.Counter('<<aab|ab>>')", "x * self.o['a']"),
    "user_dict": holding("o", "collections.UserDict(a=<<2.0|3.0>>)", "x * self.o['a']"),
    "mapping_proxy_length": holding(
        "o", "types.MappingProxyType(dict(a=1, <<|b=2>>))", "x * len(self.o)"
    ),
    "weak_keys": holding("o", "weakref.WeakKeyDictionary()", "x * len(self.o)").replace(
        "return Model()", "model = Model()\n    <<pass|model.o[nn.Identity] = 1>>\n    return model"
    ),
    "count_state": holding("o", "__import__('itertools').count(<<2|3>>)", "x * next(self.o)"),
    "shape_of_a_numpy_array": holding("o", "numpy.zeros(<<2|3>>)", "x * self.o.shape[0]"),
    "fraction": holding("o", "__import__('fractions').Fraction(<<2|3>>, 4)", "x * float(self.o)"),
    "pattern": holding(
        "o", "re.compile('<<a|b>>')", "x * 2 if self.o.match('a') else x", "import re\n"
    ),
    "path": holding(
        "o", "pathlib.PurePosixPath('/a.<<b|bc>>')", "x * len(self.o.suffix)", "import pathlib\n"
    ),
    "time_delta": holding(
        "o", "datetime.timedelta(seconds=<<2|3>>)", "x * self.o.seconds", "import datetime\n"
    ),
    "sign_of_zero": holding("o", "<<0.0|-0.0>>", "x * math.copysign(2.0, self.o)"),
    "bool_and_int": holding("o", "<<True|1>>", "x * 2 if self.o is True else x"),
    "type_of_a_number": holding(
        "o", "<<2|2.0>>", "(x.long() * self.o).to(x.dtype) * 2 if isinstance(self.o, int) else x"
    ),
    "number_of_a_subclass": holding(
        "o", "Number(2)", "x * self.o.gain", "class Number(int):\n    gain = <<2.0|3.0>>\n"
    ),
    "not_a_number": holding("o", "float('<<nan|inf>>')", "x * 2 if self.o == self.o else x"),
    # modules and weights of torch
    "order_of_modules": of_result(
        "",
        "[m for m in self.parts][0](x)",
        made="self.parts = nn.ModuleList([nn.<<Tanh(), nn.Sigmoid()|Sigmoid(), nn.Tanh()>>])",
    ),
    "number_of_modules": of_result(
        "",
        "x * len([m for m in self.modules()])",
        made="self.parts = nn.ModuleList([nn.Tanh()] + <<[]|[nn.Tanh()]>>)",
    ),
    "names_of_parameters": of_weights(
        "x * sum(len(n) for n, _ in self.named_parameters())",
        "model.three = model._modules.pop('two')",
    ),
    "names_of_buffers": of_weights(
        "x * len([n for n, _ in self.named_buffers()])", "model.register_buffer('b', torch.ones(1))"
    ),
    "persistence_of_a_buffer": of_result(
        "",
        "x * len(self._non_persistent_buffers_set)",
        made="self.register_buffer('b', torch.ones(8), persistent=<<True|False>>)",
    ),
    "requires_grad": of_weights(
        "x * 2 if self.one.weight.requires_grad else x", "model.one.weight.requires_grad_(False)"
    ),
    "gradient_is_there": of_weights(
        "x * 2 if self.one.weight.grad is None else x", "model.one.weight.grad = torch.zeros(8, 8)"
    ),
    "tied_weights": of_weights(
        "x * 2 if self.one.weight is self.two.weight else x", "model.two.weight = model.one.weight"
    ),
    "equal_modules": of_weights("x * 2 if self.one is self.two else x", "model.two = model.one"),
    "mark_on_a_weight": of_weights(
        "x * getattr(self.one.weight, 'gain', 2.0)", "model.one.weight.gain = 3.0"
    ),
    "strides_of_a_weight": of_weights(
        "x * self.one.weight.stride(0)", "model.one.weight = nn.Parameter(torch.ones(8, 8).t())"
    ),
    "name_of_a_module_class": of_weights(
        "x * len(self.one._get_name())", "nn.Linear._get_name = lambda self: 'ab'"
    ),
    "training_of_a_part": of_weights("x * 2 if self.one.training else x", "model.one.eval()"),
    "getattr_of_a_module": of_weights(
        "x * self.one.pg_gain", "type(model.one).pg_gain = 3.0", "self.one = Part()"
    ).replace("class Model", "class Part(nn.Module):\n    pg_gain = 2.0\nclass Model"),
    "hook_with_keywords": of_weights(
        "self.one(x)", "model.one.register_forward_hook(lambda m, a, k, o: o * 3, with_kwargs=True)"
    ),
    "order_of_hooks": of_result(
        "",
        "self.one(x)",
        made="self.one = nn.Tanh(); self.one.register_forward_hook(lambda m, a, o: o + 1); self.one.register_forward_hook(lambda m, a, o: o * 3, prepend=<<False|True>>)",
    ),
    "parametrization": of_weights(
        "self.one(x)",
        "nn.utils.parametrize.register_parametrization(model.one, 'weight', nn.Tanh())",
    ),
    "forward_by_getattr": of_result(
        "",
        "getattr(self, 'part_' + self.which)(x)",
        made="self.which = '<<a|b>>'; self.part_a = nn.Tanh(); self.part_b = nn.Sigmoid()",
    ),
    "kernel_of_an_op_of_torch": under(
        "<<pass|LIB.append(override())>>",
        "torch.dropout(x, 0.5, False)",
        "LIB and LIB.pop()._destroy()",
        "LIB = []\ndef override():\n    library = torch.library.Library('aten', 'IMPL')\n    library.impl('dropout', lambda x, p, train: x * 3, 'CompositeImplicitAutograd')\n    return library\n",
    ),
    "code_of_a_function_of_torch": under(
        "<<pass|F.tanhshrink.__code__ = F.softsign.__code__>>",
        "F.tanhshrink(x)",
        "F.tanhshrink.__code__ = ORIGINAL",
        "ORIGINAL = F.tanhshrink.__code__\n",
    ),
}
