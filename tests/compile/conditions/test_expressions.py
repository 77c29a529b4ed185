"""Dynamo's expressions are parsed as `ast.parse` does, without it."""

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from piecegraph.compile.conditions.expressions import parsed

LITERALS = st.one_of(
    st.text(max_size=4), st.binary(max_size=3), st.integers(), st.floats(allow_nan=False).filter(
        lambda number: abs(number) != float("inf")
    ), st.sampled_from([None, True, False])
)  # fmt: skip
KEYS = st.recursive(LITERALS, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4)
NAMES = st.sampled_from(["L", "G", "dict", "___set_getitem", "größe"])
EXPRESSIONS = st.recursive(
    NAMES | KEYS.map(repr),
    lambda inner: st.one_of(
        st.builds("{}[{}]".format, NAMES | inner.filter(lambda text: text[-1] in ")]"), inner),
        st.builds("{}.{}".format, NAMES, NAMES),
        st.builds(
            lambda name, items: f"{name}({', '.join(items)})", NAMES, st.lists(inner, max_size=3)
        ),
    ),
    max_leaves=6,
)


@given(EXPRESSIONS)
def test_the_tree_is_that_of_ast(text):
    tree, expected = parsed(text), ast.parse(text, mode="eval").body
    assert ast.dump(tree) == ast.dump(expected).replace(", ctx=Load()", "")
    if text.isascii() and not isinstance(expected, ast.Tuple):
        assert (tree.col_offset, tree.end_col_offset) == (0, len(text))


@pytest.mark.parametrize(
    "text", ["", "a[", "a b", "a[1:2]", "f(x=1)", "lambda: 0", "<class 'x'>", "a.1"]
)
def test_anything_else_is_refused(text):
    with pytest.raises(SyntaxError):
        parsed(text)
