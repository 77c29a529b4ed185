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
BASE = "class Base:" + GAIN
NESTED = "class Held:" + GAIN
STATEFUL = """
class Held:
    def __init__(self, value): self.state = {'a': value}
    def __get__(self, owner, cls): return self.state['a']
"""

CASES = {
    "metaclass_attribute": of_result(
        """class Meta(type):
    @property
    def gain(cls): return <<2.0|3.0>>
class Options(metaclass=Meta):
    pass
""",
        "x * Options.gain",
    ),
    "descriptor": holding(
        "options",
        "Options()",
        "x * self.options.gain",
        """
class Gain:
    def __init__(self, value): self.value = value
    def __get__(self, owner, cls): return self.value
class Options:
    gain = Gain(<<2.0|3.0>>)
""",
    ),
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
    "abstract_method": holding(
        "one",
        "One()",
        "x * self.one.gain()",
        """
class Base(abc.ABC):
    @abc.abstractmethod
    def gain(self): ...
class One(Base):
    def gain(self): return <<2.0|3.0>>
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
    "operators_of_an_object": holding(
        "options",
        "Options()",
        'x * self.options["a"]',
        """
class Options:
    def __getitem__(self, key): return <<2.0|3.0>>
    def __len__(self): return <<2|3>>
    def __bool__(self): return <<True|False>>
    def __contains__(self, key): return <<True|False>>
""",
    ),
    "length_of_an_object": holding(
        "options",
        "Options()",
        "x * len(self.options)",
        """
class Options:
    def __len__(self): return <<2|3>>
""",
    ),
    "truth_of_an_object": holding(
        "options",
        "Options()",
        "x * 2 if self.options else x",
        """
class Options:
    def __bool__(self): return <<True|False>>
""",
    ),
    "equality_of_an_object": """
class Options:
    def __init__(self, gain): self.gain = gain
    def __eq__(self, other): return self.gain == other.gain
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Options(2.0), Options(<<2.0|3.0>>)
    def forward(self, x):
        return x * 2 if self.a == self.b else x
def build():
    return Model()
""",
    "iterated_object": """
class Options:
    def __iter__(self): return iter([<<2.0|3.0>>])
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.options = Options()
    def forward(self, x):
        for gain in self.options:
            x = x * gain
        return x
def build():
    return Model()
""",
    "missing_key": holding(
        "table",
        "Table()",
        'x * self.table["a"]',
        """
class Table(dict):
    def __missing__(self, key): return <<2.0|3.0>>
""",
    ),
    "truth_added_to_a_class": holding(
        "options",
        "Options()",
        "x * 2 if self.options else x",
        """
class Options:
    pass
<<pass|Options.__bool__ = lambda self: False>>
""",
    ),
    "base_of_a_checked_class": holding(
        "options",
        "Options()",
        "x * 2 if isinstance(self.options, Base) else x",
        """
class Base:
    pass
class Options<<|(Base)>>:
    pass
""",
    ),
    "registered_base": holding(
        "options",
        "Options()",
        "x * 2 if isinstance(self.options, Base) else x",
        """
class Base(abc.ABC):
    pass
class Options:
    pass
<<pass|Base.register(Options)>>
""",
    ),
    "registered_with_a_standard_class": holding(
        "options",
        "Options()",
        "x * 2 if isinstance(self.options, collections.abc.Sequence) else x",
        """
import collections.abc
class Base:
    pass
class Options(Base):
    pass
<<pass|collections.abc.MutableSequence.register(Base)>>
""",
    ),
    "property_added_to_a_class": holding(
        "options",
        "Options()",
        "x * self.options.gain",
        """
class Options:
    def __init__(self): self.__dict__["gain"] = 2.0
<<pass|Options.gain = property(lambda self: 3.0)>>
""",
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
    "class_in_brackets": of_result(
        """class Options:
    def __class_getitem__(cls, key): return <<2.0|3.0>>
""",
        "x * Options[1]",
    ),
    "hook_of_subclasses": holding(
        "options",
        "Options()",
        "x * 2 if isinstance(self.options, Base) else x",
        """
ON = [<<True|False>>]
class Base(abc.ABC):
    @classmethod
    def __subclasshook__(cls, other): return ON[0]
class Options: pass
""",
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
    "protocol": holding(
        "options",
        "Options()",
        "x * 2 if isinstance(self.options, Scaled) else x",
        """
from typing import Protocol, runtime_checkable
@runtime_checkable
class Scaled(Protocol):
    def scaled(self): ...
class Options:
    <<pass|def scaled(self): ...>>
""",
    ),
    "enum_by_name": of_result(
        """class Kind(enum.Enum):
    ONE = <<2.0|3.0>>
""",
        "x * Kind['ONE'].value",
    ),
    "enum_by_value": of_result(
        """class Kind(enum.Enum):
    <<ONE|TWO>> = 1
""",
        "x * 2 if Kind(1).name == 'ONE' else x",
    ),
    "enum_by_a_missing_value": of_result(
        """class Kind(enum.Enum):
    ONE = 2.0
    TWO = 3.0
    @classmethod
    def _missing_(cls, value): return cls.<<ONE|TWO>>
""",
        "x * Kind(7).value",
    ),
    "class_property": class_property("c.factor", ":" + GAIN),
    "class_property_of_a_base": class_property("c.factor", "(Base):", BASE),
    "class_property_of_a_table": class_property(
        "c.table['a'][0]", ":\n    table = {'a': [<<2.0|3.0>>]}"
    ),
    "class_property_of_a_class": class_property("c.held.factor", ":\n    held = Held", NESTED),
    "class_property_of_a_descriptor": class_property(
        "c.held", ":\n    held = Held(<<2.0|3.0>>)", STATEFUL
    ),
    "class_property_of_a_class_method": class_property(
        "c.read()", f":{GAIN}\n    @classmethod\n    def read(cls): return cls.factor"
    ),
    "class_property_of_what_is_absent": class_property(
        "getattr(c, 'factor', 2.0)", ":\n    <<pass|factor = 3.0>>"
    ),
    "class_property_by_hasattr": class_property(
        "2.0 if hasattr(c, 'factor') else 3.0", ":\n    <<factor = 1|pass>>"
    ),
    "class_property_of_a_made_object": of_result(
        """class ClassProperty:
    def __get__(self, owner, cls): return cls.factor
class Options:
    factor = <<2.0|3.0>>
    gain = ClassProperty()
""",
        "x * Options().gain",
    ),
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
    "class_given_to_a_data_descriptor": holding(
        "options",
        "Options()",
        "x * self.options.gain",
        """
class Gain:
    def __get__(self, owner, cls): return cls.factor
    def __set__(self, owner, value): pass
class Options:
    factor = <<2.0|3.0>>
    gain = Gain()
""",
    ),
}
