"""What Dynamo takes as constant: hooks that are absent, order, identity, torch's own functions."""

from __future__ import annotations

from .model import holding, of_result, under

FORWARD = "lambda m, a, out: out * 3"
INSTALL = """
import torch
def install(name, function):
    library = torch.library.Library(f"pg_{name}", "FRAGMENT")
    library.define("f(Tensor x) -> Tensor")
    library.impl("f", function, "CompositeImplicitAutograd")
    return library
"""
TWINS = """
def make():
    class Kind:
        gain = 2.0
    return Kind
ONE, TWO = make(), make()
"""


def composite(
    name: str, before: str, registered: str, helper: str = "", result: str = "", variable: str = ""
) -> str:
    """A model that calls a composite op, whose function is the expression `registered`.

    Another file registers it, which is the same in both variants. It runs with `variable` set.
    """
    op = f"torch.ops.pg_{name}.f"
    register = f"import helper\n{before}LIB = helper.install('{name}', {registered})\n"
    set_variable = f"def enter():\n    os.environ['{variable}'] = '<<2|3>>'\n"
    set_variable += f"def leave():\n    del os.environ['{variable}']\n"
    after = set_variable if variable else ""
    return of_result(register, result or f"{op}(x)", after, helper=INSTALL + helper)


REGISTRY = """
class Registry(dict):
    pass
def read(table, x):
    try:
        return x * table['b']
    except KeyError:
        return x
"""


def registry(made: str, result: str) -> str:
    """A model that reads a dict, or one of a subclass, which has another key."""
    return of_result(f"{REGISTRY}TABLE = {made}(a=2.0, <<|b=5.0>>)\n", result)


def patched(owner: str, name: str, result: str, made: str = "", by: str = "") -> str:
    """A model that runs while a function that one of torch calls is another."""
    other = by or "lambda *a, **k: ORIGINAL(*a, **k) * 3"
    return under(
        f"<<pass|{owner}.{name} = {other}>>",
        result,
        f"{owner}.{name} = ORIGINAL",
        f"ORIGINAL = {owner}.{name}\n",
        made,
    )


CASES = {
    "hook_of_the_model_added": of_result("", "x * 2").replace(
        "return Model()",
        f"model = Model()\n    <<pass|model.register_forward_hook({FORWARD})>>\n    return model",
    ),
    "pre_hook_of_the_model_added": of_result("", "x * 2").replace(
        "return Model()",
        "model = Model()\n    <<pass|model.register_forward_pre_hook(lambda m, a: (a[0] * 3,))>>\n"
        "    return model",
    ),
    "global_hook_around_the_model_added": under(
        f"<<pass|HOOKS.append(HOOK({FORWARD}))>>",
        "x * 2",
        "HOOKS and HOOKS.pop().remove()",
        "HOOK, HOOKS = nn.modules.module.register_module_forward_hook, []\n",
    ),
    "set_iterated": holding("values", "{<<16, 8|8, 16>>}", "self.run(x)").replace(
        "    def forward",
        "    def run(self, x):\n        for v in self.values: x = x * 2 + v\n        return x\n"
        "    def forward",
    ),
    "set_as_a_list": holding("values", "{<<16, 8|8, 16>>}", "x * list(self.values)[0]"),
    "set_as_a_tuple": holding(
        "values", "frozenset([<<16, 8|8, 16>>])", "x * tuple(self.values)[0]"
    ),
    "set_of_a_list": holding(
        "names", "['a', 'bb', <<'ccc'|'cccc'>>]", "x * sum([len(n) for n in set(self.names)])"
    ),
    "set_of_strings": holding(
        "names", "{'a', 'bb', <<'ccc'|'cccc'>>}", "x * sum([len(n) for n in self.names])"
    ),
    "set_of_a_set_of_strings": holding(
        "names", "{'a', 'bb', <<'ccc'|'cccc'>>}", "x * sum([len(n) for n in set(self.names)])"
    ),
    "set_popped": holding("values", "{<<16, 8|8, 16>>}", "x * set(self.values).pop()"),
    "set_comprehended": holding("values", "{<<16, 8|8, 16>>}", "x * [v for v in self.values][0]"),
    "set_next": holding("values", "{<<16, 8|8, 16>>}", "x * next(iter(self.values))"),
    "set_unpacked": holding(
        "values", "{<<16, 8|8, 16>>}", "x * (lambda a, b: a - 2 * b)(*self.values)"
    ),
    "variables_of_an_object": holding(
        "o", "types.SimpleNamespace(a=1.0, <<|b=2.0>>)", "x * sum(vars(self.o).values())"
    ),
    "dict_of_an_object": holding(
        "o", "types.SimpleNamespace(a=1.0, <<|b=2.0>>)", "x * len(self.o.__dict__)"
    ),
    "dict_of_an_object_iterated": holding(
        "o",
        "types.SimpleNamespace(a=1.0, <<|b=2.0>>)",
        "x * sum(v for k, v in self.o.__dict__.items())",
    ),
    "hash_of_a_string": holding("name", "'a'", "x * (hash(self.name) % 7)"),
    "identity_of_strings": of_result(
        "",
        "x * 2 if self.a is self.b else x",
        made="self.a = 'left'; self.b = <<self.a|''.join(['le', 'ft'])>>",
    ),
    "identity_of_floats": of_result(
        "",
        "x * 2 if self.a is self.b else x",
        made="self.a = 2.5; self.b = <<self.a|float('2.5')>>",
    ),
    "identity_of_integers": of_result(
        "",
        "x * 2 if self.a is not self.b else x",
        made="self.a = 70000; self.b = <<self.a|int('70000')>>",
    ),
    "identity_of_bytes": of_result(
        "",
        "x * 2 if self.a is self.b else x",
        made="self.a = b'left'; self.b = <<self.a|bytes([108, 101, 102, 116])>>",
    ),
    "method_of_tensors_held": holding("act", "torch.Tensor.<<sin|cos>>", "self.act(x)"),
    "annotations_of_a_function": of_result(
        "def f(a: '<<2.0|3.0>>'): pass\n", "x * float(f.__annotations__['a'])"
    ),
    "name_of_code": of_result(
        "def f(): pass\ndef g(): pass\nf.__code__ = f.__code__.replace(co_name='<<two|three>>')\n",
        "x * len(f.__code__.co_name)",
    ),
    "class_of_one_name": of_result(
        TWINS,
        "x * 2 if isinstance(self.one, self.kind) else x",
        made="self.one = ONE(); self.kind = <<ONE|TWO>>",
    ),
    "types_of_one_name": of_result(
        TWINS,
        "x * 2 if type(self.one) is type(self.two) else x",
        made="self.one = ONE(); self.two = <<ONE|TWO>>()",
    ),
    "base_of_one_name": of_result(
        TWINS.replace("return Kind", "    class Below(Kind): pass\n    return Kind, Below").replace(
            "        class Below", "    class Below"
        ),
        "x * 2 if isinstance(self.one, self.kind) else x",
        made="self.one = ONE[1](); self.kind = <<ONE|TWO>>[0]",
    ),
    "closure_from_another_file": composite(
        "other_file", "", "helper.made(<<2.0|3.0>>)", "def made(gain): return lambda x: x * gain\n"
    ),
    "default_from_another_file": composite(
        "default",
        "",
        "helper.made(<<2.0|3.0>>)",
        "def made(gain): return lambda x, g=gain: x * g\n",
    ),
    "composite_method": composite(
        "method",
        "class S:\n    gain = <<2.0|3.0>>\n    def f(self, x): return x * self.gain\n",
        "S().f",
    ),
    "composite_partial": composite(
        "partial", "def f(x, gain): return x * gain\n", "functools.partial(f, gain=<<2.0|3.0>>)"
    ),
    "composite_variable": composite(
        "variable",
        "",
        "lambda x: x * float(os.environ.get('PG_TEST_GAIN', '1'))",
        variable="PG_TEST_GAIN",
    ),
    "composite_variable_by_getenv": composite(
        "getenv", "", "lambda x: x * float(os.getenv('PG_TEST_GAIN'))", variable="PG_TEST_GAIN"
    ),
    "composite_item_beside_a_counter": composite(
        "beside",
        "TABLE = {'calls': 0, 'gain': <<2.0|3.0>>}\n"
        "def f(x):\n    TABLE['calls'] += 1\n    return x * TABLE['gain']\n",
        "f",
    ),
    "composite_attribute_beside_a_counter": composite(
        "field",
        "class S:\n    calls, gain = 0, <<2.0|3.0>>\n"
        "def f(x):\n    S.calls += 1\n    return x * S.gain\n",
        "f",
    ),
    **{
        f"{kind}_{name}": registry(made, result)
        for kind, made in {"dict": "dict", "registry": "Registry"}.items()
        for name, result in {
            "as_a_dict": "x * sum(dict(TABLE).values())",
            "unpacked": "x * sum({**TABLE}.values())",
            "copied": "x * sum(TABLE.copy().values())",
            "length": "x * len(TABLE)",
            "listed": "x * len(list(TABLE))",
            "values": "x * sum(TABLE.values())",
            "items": "x * sum(v for k, v in TABLE.items())",
            "keys": "x * len(TABLE.keys())",
            "compared": "x * 2 if TABLE == {'a': 2.0} else x",
            "joined": "x * sum((TABLE | {}).values())",
            "last": "x * [TABLE[k] for k in TABLE][-1]",
            "reversed": "x * TABLE[next(reversed(TABLE))]",
            "largest": "x * max(TABLE.values())",
            "absent": "x * TABLE.get('b', 2.0)",
            "contained": "x * 2 if 'b' in TABLE else x",
            "handled": "read(TABLE, x)",
        }.items()
    },
    "registry_that_is_empty": of_result(
        REGISTRY + "TABLE = Registry(<<|b=1>>)\n", "x * 2 if TABLE else x"
    ),
    "aten_op_overridden": under(
        "LIB.append(override(<<1.0|3.0>>))",
        "F.linear(x, self.w)",
        "LIB.pop()._destroy()",
        """
LIB = []
def override(gain):
    library = torch.library.Library('aten', 'IMPL')
    linear = lambda x, w, b=None: (x @ w.t()) * gain
    library.impl('linear', linear, 'CompositeImplicitAutograd')
    return library
""",
        made="self.w = nn.Parameter(torch.eye(8))",
    ),
    "aten_op_overridden_later": under(
        "<<pass|LIB.append(override(3.0))>>",
        "F.linear(x, self.w)",
        "LIB and LIB.pop()._destroy()",
        """
LIB = []
def override(gain):
    library = torch.library.Library('aten', 'IMPL')
    linear = lambda x, w, b=None: (x @ w.t()) * gain
    library.impl('linear', linear, 'CompositeImplicitAutograd')
    return library
""",
        made="self.w = nn.Parameter(torch.eye(8))",
    ),
    "dispatch_mode": under(
        "MODE.gain = <<2.0|3.0>>; MODE.__enter__()",
        "x * 2",
        "MODE.__exit__(None, None, None)",
        """
from torch.utils._python_dispatch import TorchDispatchMode
class Mode(TorchDispatchMode):
    gain = 1.0
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))
MODE = Mode()
""",
    ),
    "inner_layer_norm": patched("torch", "layer_norm", "F.layer_norm(x, (8,))"),
    "inner_layer_norm_of_a_module": patched(
        "torch", "layer_norm", "self.n(x)", "self.n = nn.LayerNorm(8)"
    ),
    "inner_group_norm": patched("torch", "group_norm", "F.group_norm(x, 2)"),
    "inner_silu": patched("torch._C._nn", "silu", "F.silu(x)"),
    "inner_silu_of_a_module": patched("torch._C._nn", "silu", "self.a(x)", "self.a = nn.SiLU()"),
    "inner_embedding": patched(
        "torch", "embedding", "self.e(x[:, 0].long().clamp(0, 3))", "self.e = nn.Embedding(4, 8)"
    ),
    "inner_attention": patched(
        "F",
        "scaled_dot_product_attention",
        "self.m(x[None], x[None], x[None])[0][0]",
        "self.m = nn.MultiheadAttention(8, 2, batch_first=True).train()",
    ),
    "inner_vector_norm": patched(
        "torch.linalg", "vector_norm", "x * torch.norm(x, dim=-1, keepdim=True)"
    ),
    "inner_einsum": patched(
        "torch._VF",
        "einsum",
        "torch.einsum('ij,kj->ik', x, self.w)",
        "self.w = nn.Parameter(torch.ones(3, 8))",
    ),
    "own_function_under_another_name": patched("torch", "sinh", "torch.sinh(x)", by="torch.cosh"),
    "own_inner_function_under_another_name": patched(
        "torch._C._nn", "silu", "F.silu(x)", by="torch._C._nn.hardswish"
    ),
    "own_method_of_tensors_under_another_name": patched(
        "torch.Tensor", "sin", "x.sin()", by="torch.Tensor.cos"
    ),
    "default_of_an_inner_function": under(
        "<<pass|F.layer_norm.__defaults__ = (None, None, 5.0)>>",
        "F.layer_norm(x, (8,))",
        "F.layer_norm.__defaults__ = ORIGINAL",
        "ORIGINAL = F.layer_norm.__defaults__\n",
    ),
}

NEEDLESS = {
    "composite_counter": composite(
        "counter",
        "class S:\n    calls = <<0|7>>\ndef f(x):\n    S.calls += 1\n    return x * 2\n",
        "f",
    ),
    "composite_counter_of_items": composite(
        "items",
        "TABLE = {'calls': <<0|7>>, 'gain': 2.0}\n"
        "def f(x):\n    TABLE['calls'] += 1\n    return x * TABLE['gain']\n",
        "f",
    ),
    "composite_other_variable": composite(
        "others",
        "",
        "lambda x: x * float(os.environ.get('PG_TEST_GAIN', '1'))",
        variable="PG_TEST_OTHER",
    ),
    "registry_other_order": of_result(
        REGISTRY + "TABLE = Registry(<<a=2.0, b=1.0|b=1.0, c=1.0, a=2.0>>)\n", "x * TABLE['a']"
    ),
    "registry_other_key": of_result(
        REGISTRY + "TABLE = Registry(a=2.0, <<|b=1.0>>)\n", "x * TABLE.get('a')"
    ),
    "registry_other_class_before": of_result(
        "class A: pass\nclass B: pass\nREGISTRY = {<<|B: 5.0, >>A: 2.0}\n", "x * REGISTRY[A]"
    ),
    "registry_without_the_class": of_result(
        REGISTRY + "TABLE = Registry(<<a=2.0|b=1.0>>)\n", "x * (TABLE.get('c') or 3.0)"
    ),
    "registry_by_name_without_the_class": of_result(
        "class Named(dict):\n"
        "    def get(self, model): return super().get(str(model.__class__)) or {}\n"
        "NAMED = Named(<<a={'k': 2.0}|b={'k': 1.0}>>)\n",
        "x * (NAMED.get(self).get('k') or 3.0)",
    ),
    "registry_by_class": of_result(
        "class A: pass\nclass B: pass\nREGISTRY = {A: 2.0, <<|B: 5.0>>}\n", "x * REGISTRY[A]"
    ),
    "registry_by_class_get": of_result(
        "class A: pass\nclass B: pass\nREGISTRY = {A: 2.0, <<|B: 5.0>>}\n",
        "x * REGISTRY.get(A, 1.0)",
    ),
    "registry_by_class_contains": of_result(
        "class A: pass\nclass B: pass\nREGISTRY = {A: 2.0, <<|B: 5.0>>}\n",
        "x * 2 if A in REGISTRY else x",
    ),
}
"""Both variants give the same result."""
