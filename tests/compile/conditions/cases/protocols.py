# ruff: noqa: E501
"""Changes of protocols, registries, late replacements and flags, thought of after verification."""

from __future__ import annotations

from .model import holding, of_result, under

CASES = {
    "global_of_a_function_in_the_graph": of_result(
        "G = <<2.0|3.0>>\n@torch.compiler.allow_in_graph\ndef f(x): return x * G\n", "f(x)"
    ),
    "cell_contents": of_result(
        "def make(g):\n    def f(x): return x * g\n    return f\nF1 = make(2.0)\n<<pass|F1.__closure__[0].__setattr__('cell_contents', 3.0)>>\n",
        "F1(x)",
    ),
    "class_getitem": of_result(
        "class C:\n    def __class_getitem__(cls, i): return <<2.0|3.0>>\n", "x * C[0]"
    ),
    "default_mutated": of_result(
        "def f(x, g=[2.0]): return x * g[0]\n<<pass|f.__defaults__[0].__setitem__(0, 3.0)>>\n",
        "f(x)",
    ),
    "fp16_reduction_flag": under(
        "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = <<True|False>>",
        "x * 2 if torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction else x",
        "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = True",
    ),
    "generic_args": of_result("T = <<list[int]|dict[int, int]>>\n", "x * len(T.__args__)"),
    "literal_type": of_result(
        "import typing\nT = typing.Literal[<<2|3>>]\n", "x * typing.get_args(T)[0]"
    ),
    "mkldnn_flag": under(
        "torch.backends.mkldnn.set_flags(<<True|False>>)",
        "x * 2 if torch.backends.mkldnn.enabled else x",
        "torch.backends.mkldnn.set_flags(True)",
    ),
    "namedtuple_defaults": of_result(
        "T = collections.namedtuple('T', 'a b', defaults=(<<2.0|3.0>>,))\n", "x * T(1.0).b"
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
