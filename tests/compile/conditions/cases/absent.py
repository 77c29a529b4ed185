"""What is absent in the first variant, and there in the second."""

from __future__ import annotations

from .model import holding, of_result, under

HANDLED = """
def f(held, x):
    try:
        return x * <HELD>
    except (AttributeError, KeyError, IndexError):
        return x * 5
"""


def handled(read: str) -> str:
    """A function that reads something, or returns something else if that is absent."""
    return HANDLED.replace("<HELD>", read)


CASES = {
    "absent_in_a_module": of_result(
        "import helper\n",
        "x * getattr(helper, 'GAIN', 5.0)",
        helper="<<pass|GAIN = 3.0>>",
    ),
    "asked_of_a_module": of_result(
        "import helper\n",
        "x * 2 if hasattr(helper, 'GAIN') else x",
        helper="<<pass|GAIN = 3.0>>",
    ),
    "asked_of_a_module_by_a_made_name": of_result(
        "import helper\nFIRST = 'GA'\n",
        "x * getattr(helper, FIRST + 'IN', 5.0)",
        helper="<<pass|GAIN = 3.0>>",
    ),
    "handled_in_a_module": of_result(
        "import helper\n" + handled("held.GAIN"), "f(helper, x)", helper="<<pass|GAIN = 3.0>>"
    ),
    "handled_in_a_module_that_forward_imports": of_result(
        """
def f(x):
    try:
        import helper
        return x * helper.GAIN
    except AttributeError:
        return x * 5
""",
        "f(x)",
        helper="<<pass|GAIN = 3.0>>",
    ),
    "handled_in_a_class": of_result(
        handled("held.gain") + "class Options: pass\n<<pass|Options.gain = 3.0>>", "f(Options, x)"
    ),
    "handled_in_an_object": holding(
        "options",
        "types.SimpleNamespace(<<|gain=3.0>>)",
        "f(self.options, x)",
        handled("held.gain"),
    ),
    "handled_in_a_dict": holding(
        "table", "{<<'b'|'a'>>: 3.0}", "f(self.table, x)", handled("held['a']")
    ),
    "handled_in_a_list": holding(
        "table", "[1.0<<|, 3.0>>]", "f(self.table, x)", handled("held[1]")
    ),
    "handled_in_tensors": under(
        "<<pass|torch.Tensor.pg_gain = 3.0>>",
        "f(x, x)",
        "'pg_gain' in vars(torch.Tensor) and delattr(torch.Tensor, 'pg_gain')",
        handled("held.pg_gain"),
    ),
    "asked_of_tensors": under(
        "<<pass|torch.Tensor.pg_gain = 3.0>>",
        "x * 2 if hasattr(x, 'pg_gain') else x",
        "'pg_gain' in vars(torch.Tensor) and delattr(torch.Tensor, 'pg_gain')",
    ),
    "asked_of_torch": under(
        "<<pass|F.pg_gain = 3.0>>",
        "x * 2 if hasattr(F, 'pg_gain') else x",
        "'pg_gain' in vars(F) and delattr(F, 'pg_gain')",
    ),
    "asked_of_a_function": of_result(
        "def g(): pass\n<<pass|g.gain = 3.0>>", "x * 2 if hasattr(g, 'gain') else x"
    ),
    "asked_of_a_held_function": holding(
        "function",
        "g",
        "x * 2 if hasattr(self.function, 'gain') else x",
        "def g(): pass\n<<pass|g.gain = 3.0>>\n",
    ),
}
