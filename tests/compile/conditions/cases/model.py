"""A model by the expression it returns."""

from __future__ import annotations


def of_result(before: str, result: str, after: str = "", helper: str = "", made: str = "") -> str:
    """A model whose forward returns `result`; `made` are attributes that it is given."""
    lines = ["def __init__(self):", "    super().__init__()", f"    {made}"] if made else []
    lines += ["def forward(self, x):", f"    return {result}"]
    model = "\n".join(["", "class Model(nn.Module):", *(f"    {line}" for line in lines)])
    below = f"\n#helper\n{helper}" if helper else ""
    return f"{before}{model}\ndef build():\n    return Model()\n{after}{below}"


def holding(name: str, value: str, result: str, before: str = "") -> str:
    """A model with one attribute."""
    return of_result(before, result, made=f"self.{name} = {value}")


def under(state: str, result: str, leave: str = "pass", before: str = "", made: str = "") -> str:
    """A model that runs while `state` has been executed; `leave` undoes it."""
    after = f"def enter():\n    {state}\ndef leave():\n    {leave}\n"
    return of_result(before, result, after, made=made)
