# ruff: noqa: E501
"""Changes of protocols, registries, late replacements and flags, thought of after verification."""

from __future__ import annotations

from .model import holding, of_result, under

CASES = {
    "registered_with_an_abstract_class": holding(
        "o",
        "O()",
        "x * 2 if isinstance(self.o, Base) else x",
        "class Base(abc.ABC): pass\nclass O: pass\n<<pass|Base.register(O)>>\n",
    ),
    "global_of_a_function_in_the_graph": of_result(
        "G = <<2.0|3.0>>\n@torch.compiler.allow_in_graph\ndef f(x): return x * G\n", "f(x)"
    ),
    "bases_swapped": holding(
        "o",
        "O()",
        "x * self.o.gain",
        "class A:\n    gain = 2.0\nclass B:\n    gain = 3.0\nclass O(A): pass\n<<pass|O.__bases__ = (B,)>>\n",
    ),
    "caught_class": of_result(
        "ERR = <<KeyError|ValueError>>\ndef f():\n    try:\n        raise KeyError('a')\n    except ERR:\n        return 2.0\n    except Exception:\n        return 3.0\n",
        "x * f()",
    ),
    "cell_contents": of_result(
        "def make(g):\n    def f(x): return x * g\n    return f\nF1 = make(2.0)\n<<pass|F1.__closure__[0].__setattr__('cell_contents', 3.0)>>\n",
        "F1(x)",
    ),
    "class_getitem": of_result(
        "class C:\n    def __class_getitem__(cls, i): return <<2.0|3.0>>\n", "x * C[0]"
    ),
    "code_swapped": of_result(
        "def f(x): return x * 2\ndef g(x): return x * 3\n<<pass|f.__code__ = g.__code__>>\n", "f(x)"
    ),
    "default_dict_factory": holding(
        "d", "collections.defaultdict(<<lambda: 2.0|lambda: 3.0>>)", "x * self.d['a']"
    ),
    "default_mutated": of_result(
        "def f(x, g=[2.0]): return x * g[0]\n<<pass|f.__defaults__[0].__setitem__(0, 3.0)>>\n",
        "f(x)",
    ),
    "result_of_a_fake": of_result(
        "@torch.library.custom_op('pg_case::made', mutates_args=())\ndef made(x: torch.Tensor) -> torch.Tensor:\n    return x.clone()\n@made.register_fake\ndef _(x): return x.new_empty(x.shape, dtype=torch.<<float32|float64>>)\n",
        "x * 2 if made(x).dtype == torch.float32 else x",
    ),
    "expanded_variable": under(
        "os.environ['PG_G'] = '<<2|3>>'",
        "x * int(os.path.expandvars('$PG_G'))",
        "os.environ.pop('PG_G')",
    ),
    "fp16_reduction_flag": under(
        "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = <<True|False>>",
        "x * 2 if torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction else x",
        "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True",
    ),
    "generic_args": of_result("T = <<list[int]|dict[int, int]>>\n", "x * len(T.__args__)"),
    "generic_origin": of_result(
        "T = <<list[int]|dict[int, int]>>\n", "x * 2 if T.__origin__ is list else x"
    ),
    "kwdefaults_replaced": of_result(
        "def f(x, *, g=2.0): return x * g\n<<pass|f.__kwdefaults__ = {'g': 3.0}>>\n", "f(x)"
    ),
    "layer_norm_default": under(
        "F.layer_norm.__defaults__ = (None, None, <<1e-5|1.0>>)",
        "F.layer_norm(x, (8,))",
        "F.layer_norm.__defaults__ = (None, None, 1e-5)",
    ),
    "literal_type": of_result(
        "import typing\nT = typing.Literal[<<2|3>>]\n", "x * typing.get_args(T)[0]"
    ),
    "match_args": holding(
        "o",
        "P(2.0, 3.0)",
        "x * first(self.o)",
        "class P:\n    __match_args__ = (<<'a', 'b'|'b', 'a'>>)\n    def __init__(self, a, b): self.a, self.b = a, b\ndef first(o):\n    match o:\n        case P(v, _): return v\n",
    ),
    "mkldnn_flag": under(
        "torch.backends.mkldnn.set_flags(<<True|False>>)",
        "x * 2 if torch.backends.mkldnn.enabled else x",
        "torch.backends.mkldnn.set_flags(True)",
    ),
    "module_class_swapped": of_result(
        "class A(nn.Module):\n    def forward(self, x): return x * 2\nclass B(nn.Module):\n    def forward(self, x): return x * 3\n",
        "self.inner(x)",
        made="self.inner = A(); <<pass|self.inner.__class__ = B>>",
    ),
    "modulelist_getitem": of_result(
        "class L(nn.ModuleList):\n    def __getitem__(self, i): return super().__getitem__(<<0|1>>)\n",
        "self.l[0](x)",
        made="self.l = L([nn.ReLU(), nn.Sigmoid()])",
    ),
    "namedtuple_defaults": of_result(
        "T = collections.namedtuple('T', 'a b', defaults=(<<2.0|3.0>>,))\n", "x * T(1.0).b"
    ),
    "size_of_an_element": holding(
        "s",
        "torch.tensor(2.0, dtype=torch.<<float32|float64>>)",
        "(x * self.s.reshape(1)).to(torch.float64) * self.s.element_size()",
    ),
    "pytree_registry": of_result(
        "import torch.utils._pytree as P\nclass C:\n    def __init__(s, v): s.v = v\nP.register_pytree_node(C, lambda c: ([c.v * <<2|3>>], None), lambda v, _: C(v[0]))\n",
        "x * P.tree_leaves(C(1.0))[0]",
    ),
    "registry_of_copies": holding(
        "o",
        "O(2.0)",
        "x * copy.copy(self.o).v",
        "import copy, copyreg\nclass O:\n    def __init__(self, v): self.v = v\n<<pass|copyreg.pickle(O, lambda o: (O, (3.0,)))>>\n",
    ),
    "reloaded_helper": of_result(
        "import helper, importlib\nhelper.STATE['n'] = 1\n<<pass|importlib.reload(helper)>>\n",
        "x * helper.gain()",
        helper="STATE = globals().get('STATE', {})\nGAIN = 2.0 if not STATE else 3.0\ndef gain(): return GAIN\n",
    ),
    "script_function": of_result(
        "@torch.jit.script\ndef f(x):\n    return x * <<2.0|3.0>>\n", "f(x)"
    ),
    "sequence_protocol": holding(
        "o",
        "O()",
        "x * sum(self.o)",
        "class O:\n    def __getitem__(self, i):\n        if i >= <<2|3>>: raise IndexError\n        return 1.0\n",
    ),
    "sequential_iter_patched": under(
        "<<pass|nn.Sequential.__iter__ = lambda self: iter(list(self._modules.values())[::-1])>>",
        "self.s(x - 1)",
        "nn.Sequential.__iter__ = ORIGINAL",
        "ORIGINAL = nn.Sequential.__iter__\n",
        made="self.s = nn.Sequential(nn.ReLU(), nn.Hardtanh(-3, 0.5))",
    ),
    "attribute_set_in_forward": of_result(
        "class O:\n    def __setattr__(self, n, v): object.__setattr__(self, n, v * <<2|3>>)\ndef f():\n    o = O()\n    o.a = 1.0\n    return o.a\n",
        "x * f()",
    ),
    "signature_default": of_result(
        "import inspect\ndef f(a=<<2.0|3.0>>): return a\n",
        "x * inspect.signature(f).parameters['a'].default",
    ),
    "limits_of_an_integer": of_result("DT = torch.iinfo(torch.<<int8|int16>>)\n", "x * DT.max"),
    "subclass_hook": holding(
        "o",
        "O()",
        "x * 2 if isinstance(self.o, C) else x",
        "class C(abc.ABC):\n    @classmethod\n    def __subclasshook__(cls, o): return <<True|False>>\nclass O: pass\n",
    ),
    "base_that_super_finds": holding(
        "o",
        "O()",
        "x * self.o.g()",
        "class A:\n    def g(self): return 2.0\nclass B:\n    def g(self): return 3.0\nclass O(<<A, B|B, A>>):\n    def g(self): return super().g()\n",
    ),
    "tf32_flag": under(
        "torch.backends.cudnn.allow_tf32 = <<True|False>>",
        "x * 2 if torch.backends.cudnn.allow_tf32 else x",
        "torch.backends.cudnn.allow_tf32 = True",
    ),
    "global_of_an_imported_module": under(
        "json.decoder.pg_gain = <<2.0|3.0>>",
        "x * helper.json.decoder.pg_gain",
        before="import json, json.decoder\nimport helper\n",
    )
    + "\n#helper\nimport json\n",
    "translated": of_result("T = str.maketrans('a', '<<2|3>>')\n", "x * int('a'.translate(T))"),
    "user_missing": holding(
        "d",
        "D()",
        "x * self.d['a']",
        "class D(dict):\n    def __missing__(self, k): return <<2.0|3.0>>\n",
    ),
    "weakref_value": of_result(
        "class O: gain = 2.0\nO1 = O()\nO1.gain = <<2.0|3.0>>\nREF = weakref.ref(O1)\n",
        "x * REF().gain",
    ),
    "layout_of_a_weight": of_result(
        "",
        "x * 2 if self.w.is_contiguous() else x",
        made="self.w = nn.Parameter(torch.ones(8, 8)<<|.t()[:, ::2]>>.detach())",
    ),
}
