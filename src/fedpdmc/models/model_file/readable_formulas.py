"""A program of a model file in readable mathematics: short steps, each a formula."""

from __future__ import annotations

from typing import Any, NamedTuple

from fedpdmc.models.model_file.program import Equation, Literal, Name, Operand, Program

# A value that is used more than once, or whose formula would be longer than this, is a step of its own.
LONGEST = 60
# Precedence, from sums to values.
SUM, PRODUCT, POWER, VALUE = range(4)
INFIX = {
    "add": (" + ", SUM), "sub": (" - ", SUM), "mul": (" * ", PRODUCT), "div": (" / ", PRODUCT), "pow": ("^", POWER),
    "eq": (" == ", -1), "ne": (" != ", -1), "lt": (" < ", -1), "le": (" <= ", -1), "gt": (" > ", -1), "ge": (" >= ", -1),
    "and": (" and ", -1), "or": (" or ", -1),
}  # fmt: skip
CALLED = {
    "logistic": "sigmoid", "lgamma": "log_gamma", "integer_pow": "", "reduce_sum": "sum", "reduce_max": "max",
    "reduce_min": "min", "reduce_prod": "product", "reduce_and": "all", "reduce_or": "any", "dot": "dot",
    "concatenate": "join", "ndtr": "Phi", "log_ndtr": "log_Phi", "convert": "", "broadcast": "", "reshape": "",
    "squeeze": "", "stop_gradient": "without_derivative", "iota": "index",
}  # fmt: skip


class Formula(NamedTuple):
    """A text and how tightly it binds."""

    text: str
    binds: int

    def within(self, least: int) -> str:
        """The text, in parentheses unless it binds at least this tightly."""
        return self.text if self.binds >= least else f"({self.text})"


def formulas(program: Program, left: str) -> list[str]:
    """The program as lines such as ``u = a * (b - c)``; ``left`` stands for the result without a name."""
    uses: dict[int | str, int] = {}
    for operand in [x for equation in program.equations for x in equation.operands] + [x for _, x in program.results]:
        if isinstance(operand, Name):
            uses[operand.label] = uses.get(operand.label, 0) + 1
    known: dict[int | str, Formula] = {}
    lines: list[str] = []

    def read(operand: Operand) -> Formula:
        if isinstance(operand, Literal):
            text = f"{operand.value:g}" if isinstance(operand.value, float) else str(operand).lower()
            return Formula(text, VALUE if not text.startswith("-") else SUM)
        return known.get(operand.label, Formula(str(operand.label), VALUE))

    for i, equation in enumerate(program.equations, 1):
        made = _formula(equation, [read(x) for x in equation.operands])
        simple = made.binds == VALUE and "(" not in made.text and len(made.text) < 24
        if not simple and (uses.get(i, 0) > 1 or len(made.text) > LONGEST):
            lines.append(f"t{len(lines) + 1} = {made.text}")
            made = Formula(f"t{len(lines)}", VALUE)
        known[i] = made
    if len(program.results) == 1 and lines and read(program.results[0][1]).text == f"t{len(lines)}":
        # The last step is the result.
        return [*lines[:-1], f"{program.results[0][0] or left} = {lines[-1].partition(' = ')[2]}"]
    return lines + [f"{name or left} = {read(operand).text}" for name, operand in program.results]


def _formula(equation: Equation, parts: list[Formula]) -> Formula:
    name, params = equation.operation, dict(equation.params)
    if name in INFIX and len(parts) == 2:
        sign, binds = INFIX[name]
        right = binds + (name in ("sub", "div", "pow") or binds < 0)
        return Formula(f"{parts[0].within(max(binds, 0))}{sign}{parts[1].within(max(right, 0))}", binds)
    if name == "neg":
        return Formula(f"-{parts[0].within(PRODUCT)}", SUM)
    if name in ("square", "integer_pow"):
        return Formula(f"{parts[0].within(VALUE)}^{params.get('power', 2)}", POWER)
    if name == "not":
        return Formula(f"not {parts[0].within(VALUE)}", VALUE)
    if name == "select_n" and len(parts) == 3:
        which, no, yes = parts
        return Formula(f"(if {which.text} then {yes.text} else {no.text})", VALUE)
    if name == "constant":
        return Formula(_numbers(params["values"]), VALUE)
    if name == "slice":
        return Formula(f"{parts[0].within(VALUE)}{_range(params)}", VALUE)
    if CALLED.get(name) == "" and len(parts) == 1:
        return parts[0]
    if name == "iota":
        return Formula(f"(0 .. {equation.type.shape[params['axis']] - 1})", VALUE)
    return Formula(f"{CALLED.get(name, name)}({', '.join(part.text for part in parts)})", VALUE)


def _range(params: dict[str, Any]) -> str:
    parts = [
        str(start) if stop == start + 1 else f"{start}:{stop}"
        for start, stop in zip(params["start"], params["stop"], strict=True)
    ]
    return f"[{', '.join(parts)}]"


def _numbers(values: tuple[Any, ...]) -> str:
    shown = [f"{value:g}" if isinstance(value, float) else str(value).lower() for value in values[:6]]
    return f"[{', '.join(shown)}{', ...' if len(values) > 6 else ''}]"
