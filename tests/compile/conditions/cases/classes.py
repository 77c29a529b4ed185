"""Classes: what instances, class attributes and methods give."""

from __future__ import annotations

from .model import holding, of_result

CASES = {
    "local_class_closure_of_forward": """
def make(gain):
    class Model(nn.Module):
        def forward(self, x):
            return x * gain
    return Model()
def build():
    return make(<<2.0|3.0>>)
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
}
