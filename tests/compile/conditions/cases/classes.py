"""Classes: what instances, class attributes and methods give."""

from __future__ import annotations

from .model import holding, of_result

CASES = {
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
    "method_patched_on_class": holding(
        "options",
        "Options()",
        "self.options.apply(x)",
        """
class Options:
    def apply(self, x): return x * 2
def other(self, x): return x * 3
<<pass|Options.apply = other>>
""",
    ),
    "method_unpatched_on_class": holding(
        "options",
        "Options()",
        "self.options.apply(x)",
        """
class Options:
    def apply(self, x): return x * 2
def other(self, x): return x * 3
<<Options.apply = other|pass>>
""",
    ),
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
    "sentinel": holding(
        "mode",
        "<<A|B>>",
        "x * 2 if self.mode is A else x * 3",
        """
A, B = object(), object()
""",
    ),
    "mapping_proxy": of_result(
        "TABLE = types.MappingProxyType({'a': <<2.0|3.0>>})", "x * TABLE['a']"
    ),
    "order_of_bases": of_result(
        """class A:
    gain = 2.0
class B:
    gain = 3.0
class Options(<<A, B|B, A>>):
    pass
""",
        "x * Options().gain",
    ),
    "method_of_super": holding(
        "options",
        "Options()",
        "self.options.scaled(x)",
        """
class Base:
    def scaled(self, x): return x * <<2.0|3.0>>
class Options(Base):
    def scaled(self, x): return super().scaled(x) + 1
""",
    ),
    "class_changed_later": """
class Options:
    def scaled(self, x): return x * 2
class Other:
    def scaled(self, x): return x * 3
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.options = Options()
        <<pass|self.options.__class__ = Other>>
    def forward(self, x):
        return self.options.scaled(x)
def build():
    return Model()
""",
    "method_patched_on_plain_instance": """
class Options:
    def scaled(self, x): return x * 2
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.options = Options()
        <<pass|self.options.scaled = lambda x: x * 3>>
    def forward(self, x):
        return self.options.scaled(x)
def build():
    return Model()
""",
    "weak_proxy": holding(
        "options",
        "weakref.proxy(KEPT)",
        "x * self.options.gain",
        """
class Options:
    gain = 1.0
KEPT = Options()
KEPT.gain = <<2.0|3.0>>
""",
    ),
    "class_of_named_tuples": of_result(
        """from typing import NamedTuple
class Pair(NamedTuple):
    a: float
    gain: float = <<2.0|3.0>>
    def scaled(self, x): return x * self.gain
""",
        "Pair(1.0).scaled(x)",
    ),
    "default_of_a_data_class": of_result(
        """@dataclasses.dataclass
class Options:
    gain: float = <<2.0|3.0>>
""",
        "x * Options().gain",
    ),
    "closure_of_a_class_made_elsewhere": of_result(
        """def make(gain):
    class Options:
        def scaled(self, x): return x * gain
    return Options
Made = make(<<2.0|3.0>>)
""",
        "Made().scaled(x)",
    ),
    "closed_list_of_a_class_made_elsewhere": of_result(
        """def make(gains):
    class Options:
        def scaled(self, x): return x * gains[0]
    return Options
Made = make([<<2.0|3.0>>])
""",
        "Made().scaled(x)",
    ),
    "closed_function_of_a_class_made_elsewhere": of_result(
        """def closed(gain): return lambda x: x * gain
def make(function):
    class Options:
        def scaled(self, x): return function(x)
    return Options
Made = make(closed(<<2.0|3.0>>))
""",
        "Made().scaled(x)",
    ),
    "class_attribute_read_from_a_made_object": of_result(
        """class Options:
    gain = <<2.0|3.0>>
""",
        "x * Options().gain",
    ),
}
