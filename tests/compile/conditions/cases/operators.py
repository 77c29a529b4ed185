"""Operators, descriptors, bases and metaclasses."""

from __future__ import annotations

from .model import holding, of_result


def class_property(read: str, rest: str, before: str = "") -> str:
    """A model that reads `read` of the class `c`, in a descriptor that is given the class."""
    descriptor = f"""
{before}
class ClassProperty:
    def __init__(self, read): self.read = read
    def __get__(self, owner, cls): return self.read(cls)
class Options{rest}
    gain = ClassProperty(lambda c: {read})
"""
    return holding("options", "Options()", "x * self.options.gain", descriptor)


GAIN = "\n    factor = <<2.0|3.0>>"
NESTED = "class Held:" + GAIN

CASES = {
    "getattr_of_object": holding(
        "options",
        'Options({"gain": <<2.0|3.0>>})',
        "x * self.options.gain",
        """
class Options:
    def __init__(self, values): self.values = values
    def __getattr__(self, name): return self.__dict__["values"][name]
""",
    ),
    "metaclass_field": of_result(
        """class Meta(type):
    gain = <<2.0|3.0>>
class Options(metaclass=Meta):
    pass
""",
        "x * Options.gain",
    ),
    "metaclass_method": of_result(
        """class Meta(type):
    def scaled(cls, x): return x * <<2.0|3.0>>
class Options(metaclass=Meta):
    pass
""",
        "Options.scaled(x)",
    ),
    "metaclass_of_a_local_class": of_result(
        """def make(gain):
    class Meta(type):
        def scaled(cls, x): return x * gain
    class Options(metaclass=Meta):
        pass
    return Options
Made = make(<<2.0|3.0>>)
""",
        "Made.scaled(x)",
    ),
    "operator_set_to_none": holding(
        "options",
        "Options()",
        "x * 2 if isinstance(self.options, collections.abc.Hashable) else x",
        """
import collections.abc
class Options:
    <<pass|__hash__ = None>>
""",
    ),
    "enum_by_name": of_result(
        """class Kind(enum.Enum):
    ONE = <<2.0|3.0>>
""",
        "x * Kind['ONE'].value",
    ),
    "class_property_of_a_class": class_property("c.held.factor", ":\n    held = Held", NESTED),
    "class_property_of_a_local_class": holding(
        "options",
        "make(<<2.0|3.0>>)()",
        "x * self.options.gain",
        """
class ClassProperty:
    def __get__(self, owner, cls): return cls.factor
def make(value):
    class Options:
        factor = value
        gain = ClassProperty()
    return Options
""",
    ),
}
