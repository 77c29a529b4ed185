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
    "annotations_of_a_class": of_result(
        "class Base:\n    a: int\n    <<pass|b: int>>\n", "x * len(Base.__annotations__)"
    ),
    "order_of_bases": holding(
        "o",
        "Two()",
        "x * self.o.gain",
        "class A: gain = 2.0\nclass B: gain = 3.0\nclass Two(<<A, B|B, A>>): pass\n",
    ),
    "names_of_slots": holding(
        "o",
        "Slots()",
        "x * len(self.o.__slots__)",
        "class Slots:\n    __slots__ = ('a', <<|'b'>>)\n",
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
    "iterated_enum": of_result(
        "class Kind(enum.Enum):\n    A = 1\n    <<pass|B = 2>>\n", "x * len([k for k in Kind])"
    ),
    # functions
    "doc_of_a_function": of_result("def f():\n    '<<a|bb>>'\n", "x * len(f.__doc__)"),
    "line_of_code": of_result("<<|\n\n>>def f(): pass\n", "x * f.__code__.co_firstlineno"),
    "variables_of_code": of_result("def f(): <<a|bb>> = 1\n", "x * len(f.__code__.co_varnames[0])"),
    "dict_of_a_function": of_result(
        "def f(): pass\nf.a = 1\n<<pass|f.b = 2>>\n", "x * len(f.__dict__)"
    ),
    "defaults_of_a_function": of_result("def f(a=<<2.0|3.0>>): pass\n", "x * f.__defaults__[0]"),
    "bound_method_of_a_string": holding("get", "'<<a|bb>>'.count", "x * (1 + self.get('b'))"),
    # modules of Python
    "names_of_a_module": of_result(
        "import helper\n",
        "x * len([k for k in vars(helper) if k in 'ab'])",
        helper="a = 1\n<<|b = 2>>",
    ),
    # containers and values
    "user_dict": holding("o", "collections.UserDict(a=<<2.0|3.0>>)", "x * self.o['a']"),
    "weak_keys": holding("o", "weakref.WeakKeyDictionary()", "x * len(self.o)").replace(
        "return Model()", "model = Model()\n    <<pass|model.o[nn.Identity] = 1>>\n    return model"
    ),
    "shape_of_a_numpy_array": holding("o", "numpy.zeros(<<2|3>>)", "x * self.o.shape[0]"),
    "number_of_a_subclass": holding(
        "o", "Number(2)", "x * self.o.gain", "class Number(int):\n    gain = <<2.0|3.0>>\n"
    ),
    # modules and weights of torch
    "names_of_parameters": of_weights(
        "x * sum(len(n) for n, _ in self.named_parameters())",
        "model.three = model._modules.pop('two')",
    ),
    "names_of_buffers": of_weights(
        "x * len([n for n, _ in self.named_buffers()])", "model.register_buffer('b', torch.ones(1))"
    ),
    "requires_grad": of_weights(
        "x * 2 if self.one.weight.requires_grad else x", "model.one.weight.requires_grad_(False)"
    ),
    "gradient_is_there": of_weights(
        "x * 2 if self.one.weight.grad is None else x", "model.one.weight.grad = torch.zeros(8, 8)"
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
    "getattr_of_a_module": of_weights(
        "x * self.one.pg_gain", "type(model.one).pg_gain = 3.0", "self.one = Part()"
    ).replace("class Model", "class Part(nn.Module):\n    pg_gain = 2.0\nclass Model"),
    "order_of_hooks": of_result(
        "",
        "self.one(x)",
        made="self.one = nn.Tanh(); self.one.register_forward_hook(lambda m, a, o: o + 1); self.one.register_forward_hook(lambda m, a, o: o * 3, prepend=<<False|True>>)",
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
