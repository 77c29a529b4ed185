"""One object at two places in the first variant, and two objects in the second."""

from __future__ import annotations

from .model import holding, of_result

GAIN = """
class Options:
    def __init__(self, gain): self.gain = gain
def by(gain):
    return lambda x: x * gain
def both(gain):
    return (lambda x: x * gain), (lambda x: x + gain)
def through(options):
    return lambda x: x * options.gain
def local():
    def double(x): return x * 2
    return double
"""


def of_two(made: str, result: str) -> str:
    return of_result(GAIN, result, made=made)


def of_global(value: str, other: str, result: str = "x * 2 if self.value is KNOWN else x") -> str:
    return holding("value", f"<<KNOWN|{other}>>", result, f"{GAIN}KNOWN = {value}\n")


CASES = {
    "closure_at_two_places": of_two(
        "self.a = by(2.0); self.b = <<self.a|by(3.0)>>", "self.b(self.a(x))"
    ),
    "closure_in_a_partial": of_two(
        "self.a = by(2.0); self.b = functools.partial(<<self.a|by(3.0)>>)", "self.b(self.a(x))"
    ),
    "closure_in_a_list": of_two(
        "self.a = [by(2.0)]; self.b = [<<self.a[0]|by(3.0)>>]", "self.b[0](self.a[0](x))"
    ),
    "variable_of_two_functions": of_two(
        "self.a, self.b = both(2.0); <<pass|self.b = both(3.0)[1]>>", "self.b(self.a(x))"
    ),
    "object_of_two_functions": of_two(
        "self.a = through(Options(2.0)); self.b = <<self.a|through(Options(3.0))>>",
        "self.b(self.a(x))",
    ),
    "closure_that_is_a_global": of_global("by(2.0)", "by(3.0)", "self.value(KNOWN(x))"),
    "global_closure_that_is_held": of_global("by(2.0)", "by(3.0)", "KNOWN(self.value(x))"),
    "list_that_is_a_global": of_global("[1, 2]", "[1, 2]"),
    "global_that_is_a_list": of_global("[1, 2]", "[1, 2]", "x * 2 if KNOWN is self.value else x"),
    "list_among_globals": holding(
        "value",
        "<<KNOWN[0]|[1, 2]>>",
        "x * 2 if any(self.value is k for k in KNOWN) else x",
        "KNOWN = [[1, 2]]\n",
    ),
    "dict_that_is_a_global": of_global("{'a': 1}", "{'a': 1}"),
    "set_that_is_a_global": of_global("{1, 2}", "{1, 2}"),
    "object_that_is_a_global": of_global("Options(2.0)", "Options(2.0)"),
    "function_that_is_a_global": of_global("local()", "local()"),
    "function_that_is_another": of_two(
        "self.a = local(); self.b = <<self.a|local()>>", "x * 2 if self.a is self.b else x"
    ),
    "method_of_a_global": of_global(
        "Options(2.0)", "Options(2.0)", "x * self.value.gain * (2 if self.value is KNOWN else 1)"
    ),
    "tensor_that_is_a_global": of_global("torch.ones(8)", "torch.ones(8)"),
    "layer_that_is_a_global": of_global("nn.Linear(8, 8)", "nn.Linear(8, 8)"),
    "class_attribute_that_is_held": """
class Model(nn.Module):
    known = [1, 2]
    def __init__(self):
        super().__init__()
        self.value = <<Model.known|[1, 2]>>
    def forward(self, x):
        return x * 2 if self.value is type(self).known else x
def build():
    return Model()
""",
}
