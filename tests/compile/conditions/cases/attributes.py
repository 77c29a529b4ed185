"""Values held by an attribute of the model."""

from __future__ import annotations

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
    "numpy_dtype": ("numpy.dtype('float<<32|64>>')", "x * self.value.itemsize"),
    "data_class_with_slots": ("WithSlots(<<2.0|3.0>>)", "x * self.value.gain"),
    "inherited_slots": ("MoreSlots(<<2.0|3.0>>)", "x * self.value.gain"),
    "string_enum": ("Named.<<ONE|TWO>>", "x * 2 if self.value == 'one' else x"),
    "integer_enum": ("Numbered.<<ONE|TWO>>", "x * self.value"),
    "chain_map": ("collections.ChainMap({}, {'a': <<2.0|3.0>>})", "x * self.value['a']"),
    "counter": ("collections.Counter(a=<<2|3>>)", "x * self.value['a']"),
    "user_dict": ("collections.UserDict(a=<<2.0|3.0>>)", "x * self.value['a']"),
    "default_factory": (
        "collections.defaultdict(lambda: <<2.0|3.0>>)",
        "x * self.value['absent']",
    ),
    "default_factory_function": (
        "collections.defaultdict(<<one|two>>)",
        "x * self.value['absent']",
    ),
    "picked_function": ("picked(<<False|True>>)", "self.value(x)"),
    "list_subclass": ("Items([<<2.0|3.0>>])", "x * self.value[0]"),
    "float_subclass": ("Number(<<2.0|3.0>>)", "x * float(self.value)"),
    "size": ("torch.Size([<<2|3>>])", "x * self.value[0]"),
    "memory_format": (
        "torch.<<contiguous_format|channels_last>>",
        "x * 2 if self.value is torch.channels_last else x",
    ),
    "property_with_state": ("WithProperty(<<2.0|3.0>>)", "x * self.value.gain"),
    "static_method_of_instance": ("Static(<<2.0|3.0>>)", "self.value.f(x)"),
    "set_of_enums": ("{Kind.<<ONE|TWO>>}", "x * 2 if Kind.ONE in self.value else x"),
    "zip_of_lists": ("([1.0], [<<2.0|3.0>>])", "[x * a * b for a, b in zip(*self.value)][0]"),
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
@dataclasses.dataclass(slots=True)
class WithSlots:
    gain: float
class MoreSlots(Slotted):
    __slots__ = ("other",)
class Named(enum.StrEnum):
    ONE = "one"
    TWO = "two"
class Numbered(enum.IntEnum):
    ONE = 1
    TWO = 2
class Items(list): pass
class Number(float): pass
class WithProperty:
    def __init__(self, gain): self._gain = gain
    gain = property(lambda self: self._gain)
class Static:
    def __init__(self, gain): self.f = lambda x: x * gain
Pair = collections.namedtuple("Pair", "gain rest")
def one(): return 1.0
def two(): return 2.0
def picked(second):
    a, b = lambda x: x * 2, lambda x: x * 3
    return b if second else a
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
