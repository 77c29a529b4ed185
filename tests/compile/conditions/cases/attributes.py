"""Values held by an attribute of the model."""

from __future__ import annotations

ATTRIBUTES = {
    # how `self.value` is made, how the forward uses it
    "list_length": ("[1.0, 2.0<<|, 3.0>>]", "x * sum(self.value)"),
    "nested_list": ("[[[[[[[[<<1.0|2.0>>]]]]]]]]", "x * self.value[0][0][0][0][0][0][0][0]"),
    "dict_contains": ("{<<'gain'|'other'>>: 2.0}", "x * 2 if 'gain' in self.value else x"),
    "dict_tuple_key": ("{(1, 'a'): <<2.0|3.0>>}", "x * self.value[1, 'a']"),
    "dict_float_key": ("{0.5: <<2.0|3.0>>}", "x * self.value[0.5]"),
    "frozenset": ("frozenset({<<'double'|'other'>>})", "x * 2 if 'double' in self.value else x"),
    "slice": ("slice(0, <<2|3>>)", "x * x[:, self.value].sum()"),
    "enum": ("Kind.<<ONE|TWO>>", "x * self.value.value"),
    "enum_compared": ("Kind.<<ONE|TWO>>", "x * 2 if self.value is Kind.ONE else x"),
    "flag": ("Bits.<<A|B>>", "x * 2 if self.value & Bits.A else x"),
    "object_in_object": ("Options(Options(<<2.0|3.0>>))", "x * self.value.gain.gain"),
    "object_in_list": ("[Options(<<2.0|3.0>>)]", "x * self.value[0].gain"),
    "class_of_object": ("<<Options|Other>>(2.0)", "self.value.apply(x)"),
    "bound_method": ("Options(<<2.0|3.0>>).apply", "self.value(x)"),
    "bound_methods_in_list": ("[Options(<<2.0|3.0>>).apply]", "self.value[0](x)"),
    "closure": ("closed(<<2.0|3.0>>)", "self.value(x)"),
    "closure_object": ("closed_object(Options(<<2.0|3.0>>))", "self.value(x)"),
    "closure_list": ("closed_list([<<2.0|3.0>>])", "self.value(x)"),
    "closure_of_closure": ("closed_function(closed(<<2.0|3.0>>))", "self.value(x)"),
    "partial_object": ("functools.partial(scaled_by, Options(<<2.0|3.0>>))", "self.value(x)"),
    "module_class_in_list": ("[<<Scale|Shift>>(2.0)]", "self.value[0](x)"),
    "module_list_length": (
        "nn.ModuleList([Scale(2.0)<<|, Scale(2.0)>>])",
        "[x := m(x) for m in self.value][-1]",
    ),
    "sequential": ("nn.Sequential(Scale(2.0), Scale(<<2.0|3.0>>))", "self.value(x)"),
    "module_pre_hook": ("pre_hooked(Scale(2.0), <<2.0|3.0>>)", "self.value(x)"),
    "module_hook_added": ("<<Scale(2.0)|hooked(Scale(2.0), 3.0)>>", "self.value(x)"),
    "module_hook_method": ("method_hooked(Scale(2.0), Options(<<2.0|3.0>>))", "self.value(x)"),
    "weak_reference": ("weakref.ref(KEPT[<<0|1>>])", "self.value()(x)"),
    "norm_eps": ("nn.LayerNorm(8, eps=<<1e-5|1e-1>>)", "self.value(x)"),
    "hasattr": (
        "<<Options(1.0)|types.SimpleNamespace(other=1)>>",
        "x * 2 if hasattr(self.value, 'gain') else x",
    ),
    "chain_map": ("collections.ChainMap({}, {'a': <<2.0|3.0>>})", "x * self.value['a']"),
    "float_subclass": ("Number(<<2.0|3.0>>)", "x * float(self.value)"),
    "static_method_of_instance": ("Static(<<2.0|3.0>>)", "self.value.f(x)"),
    "set_of_enums": ("{Kind.<<ONE|TWO>>}", "x * 2 if Kind.ONE in self.value else x"),
    "sorted_dict": ("{'b': 1.0, '<<a|c>>': 5.0}", "x * self.value[sorted(self.value)[0]]"),
    "nested_partial_keyword": (
        "functools.partial(scaled_by, options=functools.partial(scaled, gain=<<2.0|3.0>>))",
        "x * self.value.keywords['options'].keywords['gain']",
    ),
}

ATTRIBUTE_MODULE = """
class Kind(enum.Enum):
    ONE = 1.5
    TWO = 2.5
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
class Slotted:
    __slots__ = ("gain",)
    def __init__(self, gain): self.gain = gain
class Number(float): pass
class Static:
    def __init__(self, gain): self.f = lambda x: x * gain
Pair = collections.namedtuple("Pair", "gain rest")
def one(): return 1.0
def two(): return 2.0
def scaled(x, gain): return x * gain
def scaled_by(options, x): return x * options.gain
def closed(gain): return lambda x: x * gain
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
