"""Modules: the model, its submodules and weights."""

from __future__ import annotations

from .model import holding

CASES = {
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
    "requires_grad": holding(
        "weight",
        "nn.Parameter(torch.ones(8), requires_grad=<<True|False>>)",
        "x * self.weight * (2 if self.weight.requires_grad else 3)",
    ),
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
    "tensor_from_list": holding("values", "[<<2.0|3.0>>] * 8", "x * torch.tensor(self.values)"),
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
    "class_of_a_submodule": holding("inner", "nn.<<Tanh|Sigmoid>>()", "self.inner(x)"),
    "order_of_a_sequence": holding(
        "inner", "nn.Sequential(nn.<<Tanh(), nn.Sigmoid|Sigmoid(), nn.Tanh>>())", "self.inner(x)"
    ),
    "number_of_children": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Tanh()
        <<pass|self.other = nn.Tanh()>>
    def forward(self, x):
        return x * len(list(self.children()))
def build():
    return Model()
""",
    "parametrization": """
from torch.nn.utils import parametrize
class Scaled(nn.Module):
    def __init__(self, gain):
        super().__init__()
        self.gain = gain
    def forward(self, weight): return weight * self.gain
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)
        parametrize.register_parametrization(self.inner, "weight", Scaled(<<2.0|3.0>>))
    def forward(self, x):
        return self.inner(x)
def build():
    return Model()
""",
    "attribute_of_a_torch_module": holding(
        "inner", "nn.LeakyReLU(<<0.1|0.5>>)", "self.inner(x - 1)"
    ),
    "getattr_of_the_model": """
class Model(nn.Module):
    def __getattr__(self, name):
        return <<2.0|3.0>> if name == "gain" else super().__getattr__(name)
    def forward(self, x):
        return x * self.gain
def build():
    return Model()
""",
    "call_of_the_model": """
class Model(nn.Module):
    def __call__(self, x):
        return super().__call__(x) * <<2.0|3.0>>
    def forward(self, x):
        return x + 1
def build():
    return Model()
""",
    "class_of_a_parameter": holding(
        "weight",
        "Weight(torch.ones(8))",
        "x * self.weight * type(self.weight).gain",
        """
class Weight(nn.Parameter):
    gain = <<2.0|3.0>>
""",
    ),
    "list_of_parameters": holding(
        "weights",
        "nn.ParameterList([torch.ones(8) for _ in range(<<2|3>>)])",
        "x * len(self.weights)",
    ),
    "vars_of_the_model": holding("gain", "<<2.0|3.0>>", 'x * self.__dict__["gain"]'),
    "attribute_by_computed_name": holding(
        "gain", "<<2.0|3.0>>", 'x * getattr(self, "".join(["ga", "in"]))'
    ),
    "call_patched_on_a_class": """
class Inner(nn.Module):
    def forward(self, x): return x * 2
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()
    def forward(self, x):
        return self.inner(x)
ORIGINAL = nn.Module.__call__
<<pass|Inner.__call__ = lambda self, x: ORIGINAL(self, x) * 3>>
def build():
    return Model()
""",
    "call_implementation_patched": """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Tanh()
    def forward(self, x):
        return self.inner(x)
ORIGINAL = nn.Module._call_impl
def enter():
    <<pass|nn.Module._call_impl = lambda self, *a: ORIGINAL(self, *a) * 3>>
def leave():
    nn.Module._call_impl = ORIGINAL
def build():
    return Model()
""",
    "reference_to_the_model": """
class Model(nn.Module):
    def __init__(self, gain=2.0):
        super().__init__()
        self.gain = gain
        if gain == 2.0:
            self.kept = [Model(3.0)]
            self.reference = [<<self|self.kept[0]>>]
    def forward(self, x):
        return x * self.reference[0].gain
def build():
    return Model()
""",
    "weak_reference_to_the_model": """
class Model(nn.Module):
    def __init__(self, gain=2.0):
        super().__init__()
        self.gain = gain
        if gain == 2.0:
            self.kept = [Model(3.0)]
            self.reference = weakref.ref(<<self|self.kept[0]>>)
    def forward(self, x):
        return x * self.reference().gain
def build():
    return Model()
""",
}
