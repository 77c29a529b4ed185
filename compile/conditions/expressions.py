"""A parser for Dynamo's expressions, such as `L['self'].act.__self__.k`.

`ast.parse` must not run in the thread that traces: in CPython 3.11.0 to 3.11.8 (gh-106905) a parse
of another thread that a finalizer interrupts meanwhile raises SystemError.
"""

from __future__ import annotations

import ast
import re

_TOKEN = re.compile(
    r"""\s*(?:
    (?P<literal>\d[\w.]*(?:(?<=[eE])[-+]\d+)? | b?(?:'(?:\\.|[^'\\])*' | "(?:\\.|[^"\\])*"))
    | (?P<name>[^\W\d]\w*) | (?P<mark>[][().,-])
    )""",
    re.VERBOSE | re.DOTALL,
)
_CONSTANTS = {"None": None, "True": True, "False": False}


def parsed(text: str) -> ast.expr:
    """The tree that `ast.parse` gives, each node with its place in `text`.

    Knows names, literals, tuples, attributes, subscripts and calls without keywords. Raises
    SyntaxError for anything else.
    """
    parser = _Parser(text)
    node = parser.expression()
    if parser.begin != len(text.rstrip()):
        raise SyntaxError(text)
    return node


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self.begin = 0
        """Where what is not read yet begins."""

    def expression(self) -> ast.expr:
        begin = self.begin
        node = self._first()
        while True:
            match self._mark("[", "(", "."):
                case "[":
                    node = ast.Subscript(node, self.expression())
                    self._expect("]")
                case "(":
                    node = ast.Call(node, self._items(), [])
                case ".":
                    node = ast.Attribute(node, self._token("name"))
                case _:
                    return node
            node.col_offset, node.end_col_offset = begin, self.begin

    def _first(self) -> ast.expr:
        begin, node = self.begin, ast.expr()
        if self._mark("-"):
            node = ast.UnaryOp(ast.USub(), self._first())
        elif self._mark("("):
            items = self._items()
            tuple_ends = self._text[: self.begin - 1].rstrip().endswith((",", "("))
            node = items[0] if len(items) == 1 and not tuple_ends else ast.Tuple(items)
        elif literal := self._token("literal", ""):
            node = ast.Constant(eval(literal))  # makes code, and no tree
        else:
            name = self._token("name")
            node = ast.Constant(_CONSTANTS[name]) if name in _CONSTANTS else ast.Name(name)
        node.col_offset, node.end_col_offset = begin, self.begin
        return node

    def _items(self) -> list[ast.expr]:
        """Expressions up to the closing parenthesis."""
        items = list[ast.expr]()
        while not self._mark(")"):
            items.append(self.expression())
            if not self._mark(","):
                self._expect(")")
                break
        return items

    def _mark(self, *marks: str) -> str:
        """The next token if it is one of `marks`; else empty."""
        found = _TOKEN.match(self._text, self.begin)
        if found is None or found["mark"] not in marks:
            return ""
        self.begin = found.end()
        return str(found["mark"])

    def _expect(self, mark: str) -> None:
        if not self._mark(mark):
            raise SyntaxError(self._text)

    def _token(self, kind: str, default: str | None = None) -> str:
        found = _TOKEN.match(self._text, self.begin)
        if found is None or found[kind] is None:
            if default is None:
                raise SyntaxError(self._text)
            return default
        self.begin = found.end()
        return str(found[kind])
