"""Small faults of a source file: which there are, and the file with one of them in it.

Python is read by `ast`, so that an operator, a constant or a statement is known as one. C++ is read by tokens, with
comments, strings and macros blanked out: clang-format's spaces tell a comparison from a template's bracket.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Mutant", "mutants_of"]


@dataclass(frozen=True)
class Mutant:
    """One fault: the bytes from `start` to `end` of a file become `after`."""

    path: str
    line: int
    kind: str
    before: str
    after: str
    start: int
    end: int
    id: str  # of path, line text and change, not of the line's number: it outlives edits elsewhere in the file

    def applied(self, source: bytes) -> bytes:
        """Return the file with the fault in it."""
        found = source[self.start : self.end].decode()
        if found != self.before:
            raise ValueError(f"{self.path}:{self.line} has {found!r} where {self.before!r} was; list the mutants anew.")
        return source[: self.start] + self.after.encode() + source[self.end :]

    def __str__(self) -> str:
        before, after = (" ".join(text.split()) for text in (self.before, self.after))
        shown = f"{before[:60]} -> {after[:60]}" if self.kind != "drop" else f"dropped: {before[:100]}"
        return f"{self.path}:{self.line}: {shown}"


Change = tuple[str, int, int, str]  # kind, start, end, text in its place


def mutants_of(root: Path, path: str) -> list[Mutant]:
    """Return every mutant of a file, in the order of the text."""
    source = (root / path).read_bytes()
    changes = _python(source) if path.endswith(".py") else _cpp(source)
    lines = source.split(b"\n")
    seen: Counter[str] = Counter()
    found = []
    for kind, start, end, after in sorted(set(changes), key=lambda change: change[1:]):
        line = source.count(b"\n", 0, start)
        before = source[start:end].decode()
        key = "|".join((path, kind, lines[line].decode().strip(), before, after))
        seen[key] += 1
        name = hashlib.sha256(f"{key}|{seen[key]}".encode()).hexdigest()[:12]
        found.append(Mutant(path, line + 1, kind, before, after, start, end, name))
    return found


# --- Python ----------------------------------------------------------------------------------------------------------

_COMPARISONS: dict[type[ast.cmpop], tuple[str, tuple[str, ...]]] = {
    ast.Lt: ("<", ("<=", ">")),
    ast.LtE: ("<=", ("<", ">=")),
    ast.Gt: (">", (">=", "<")),
    ast.GtE: (">=", (">", "<=")),
    ast.Eq: ("==", ("!=",)),
    ast.NotEq: ("!=", ("==",)),
    ast.Is: ("is", ("is not",)),
    ast.IsNot: ("is not", ("is",)),
    ast.In: ("in", ("not in",)),
    ast.NotIn: ("not in", ("in",)),
}
_ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"),
}
_TWINS = {"min": "max", "max": "min", "any": "all", "all": "any"}


def _python(source: bytes) -> Iterator[Change]:
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def begin(node: ast.AST) -> int:
        return starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]

    def finish(node: ast.AST) -> int:
        return starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def between(left: ast.AST, right: ast.AST, word: str) -> tuple[int, int] | None:
        low = finish(left)
        pattern = r"\b" + word.replace(" ", r"\s+") + r"\b" if word[0].isalpha() else re.escape(word)
        found = re.search(pattern.encode(), source[low : begin(right)])
        return (low + found.start(), low + found.end()) if found else None

    tree = ast.parse(source)
    for node in _walked(tree):
        if isinstance(node, ast.Compare):
            for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
                word, others = _COMPARISONS[type(op)]
                if place := between(left, right, word):
                    yield from (("comparison", *place, other) for other in others)
        elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            word, other = _ARITHMETIC[type(node.op)]
            if place := between(node.left, node.right, word):
                yield "operator", *place, other
        elif isinstance(node, ast.BoolOp):
            word, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            for left, right in zip(node.values, node.values[1:], strict=False):
                if place := between(left, right, word):
                    yield "logic", *place, other
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield "logic", begin(node), begin(node) + 3, ""
        elif isinstance(node, ast.Constant):
            yield from (("constant", begin(node), finish(node), other) for other in _other_values(node.value))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _TWINS:
            yield "operator", begin(node.func), finish(node.func), _TWINS[node.func.id]
        elif isinstance(node, ast.Break | ast.Continue):
            yield "drop", begin(node), finish(node), "pass"
        elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
            yield "drop", begin(node), finish(node), "return None"
        elif isinstance(node, ast.Expr | ast.Assign | ast.AugAssign | ast.Raise | ast.Delete):
            yield "drop", begin(node), finish(node), "pass"
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            test = source[begin(node.test) : finish(node.test)].decode()
            yield "condition", begin(node.test), finish(node.test), f"(not ({test}))"


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _other_values(value: object) -> list[str]:
    if isinstance(value, bool):
        return [str(not value)]
    if isinstance(value, int):
        return [str(value + 1)] if value in (0, 1) else [str(value + 1), str(value - 1)]
    if isinstance(value, float):
        return ["1.0"] if value == 0 else [repr(value * 2), repr(value / 2)]
    return []


def _walked(node: ast.AST) -> Iterator[ast.AST]:
    """Every node that decides something when the program runs: no annotation, docstring, message or import."""
    for name, field in ast.iter_fields(node):
        if name in ("annotation", "returns", "type_params") or (name == "exc" and isinstance(node, ast.Raise)):
            continue
        for child in field if isinstance(field, list) else [field]:
            if not isinstance(child, ast.AST) or isinstance(child, ast.Import | ast.ImportFrom | ast.Assert):
                continue
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
                continue  # a docstring or an ellipsis
            if isinstance(child, ast.Assign) and any(
                isinstance(t, ast.Name) and t.id == "__all__" for t in child.targets
            ):
                continue
            if isinstance(child, ast.keyword) and child.arg == "strict":
                continue  # of zip: lengths that agree anyway
            if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
                continue
            yield child
            if not isinstance(child, ast.JoinedStr):
                yield from _walked(child)


# --- C++ -------------------------------------------------------------------------------------------------------------

_BLANKED = re.compile(
    rb"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])+'|^[ \t]*\#(?:[^\n]*\\\n)*[^\n]*",
    re.DOTALL | re.MULTILINE,
)
_FLIPS = {
    "<": ("<=", ">"), "<=": ("<", ">="), ">": (">=", "<"), ">=": (">", "<="), "==": ("!=",), "!=": ("==",),
    "&&": ("||",), "||": ("&&",), "+": ("-",), "-": ("+",), "*": ("/",), "/": ("*",), "%": ("*",),
    "+=": ("-=",), "-=": ("+=",), "*=": ("/=",), "/=": ("*=",), "<<": (">>",), ">>": ("<<",),
}  # fmt: skip
_SPACED = re.compile(rb"(?<= )(<<|>>|<=|>=|==|!=|&&|\|\||[-+*/]=|[-+*/%<>])(?=[ \n])")
_STEPS = re.compile(rb"(?<![\w+-])(\+\+|--)(?=[\w(])")
_NUMBER = re.compile(rb"(?<![\w.])(0x[0-9a-fA-F']+|\d[\d']*\.?\d*(?:[eE][-+]?\d+)?)([fFuUlL]*)(?![\w.])")
_WORDS = re.compile(rb"\b(true|false|std::min|std::max|std::any_of|std::all_of)\b")
_OTHER_WORDS = {
    "true": "false", "false": "true", "std::min": "std::max", "std::max": "std::min",
    "std::any_of": "std::all_of", "std::all_of": "std::any_of",
}  # fmt: skip
_CONDITION = re.compile(rb"\bif (?:constexpr )?\(")
# An assignment to something that is declared elsewhere, or a call whose result nobody takes.
_STATEMENT = re.compile(
    rb"^ +(?!return\b|throw\b|delete\b|using\b|case\b|static_assert\b|friend\b|else\b|for\b|if\b|while\b|do\b|\})"
    rb"([\w.>\[\]()*:-]+ (?:[-+*/|&^]|<<|>>)?= [^;{}\n]*;|[\w.>:\[\]-]+\([^;{}\n]*\);|(?:\+\+|--)[\w.>-]+;)$",
    re.MULTILINE,
)
_UNTOUCHED = re.compile(rb"\b(static_assert|template|using|namespace|enum|OXY_ASSERT)\b")


def _cpp(source: bytes) -> Iterator[Change]:
    text = _BLANKED.sub(lambda found: re.sub(rb"[^\n]", b" ", found.group()), source)
    for found in _SPACED.finditer(text):
        if not text[: found.start()].rstrip().endswith((b"template", b"operator")) and not _in_declaration(text, found):
            kind = "logic" if found.group() in (b"&&", b"||") else "operator"
            kind = "comparison" if found.group() in (b"<", b"<=", b">", b">=", b"==", b"!=") else kind
            yield from ((kind, *found.span(), other) for other in _FLIPS[found.group().decode()])
    for found in _STEPS.finditer(text):
        yield "operator", *found.span(), "--" if found.group() == b"++" else "++"
    for found in _WORDS.finditer(text):
        yield "constant", *found.span(), _OTHER_WORDS[found.group().decode()]
    for found in _NUMBER.finditer(text):
        pure = text[: found.start()].endswith(b") = ") or text[: found.start()].endswith(b"override = ")
        if not _in_declaration(text, found) and not pure:
            yield from (("constant", *found.span(), other) for other in _other_numbers(*found.groups()))
    for found in _CONDITION.finditer(text):
        if (end := _closing(text, found.end())) is not None:
            condition = source[found.end() : end]
            if not re.search(rb"[^=!<>]=[^=]|;", text[found.end() : end]):
                yield "condition", found.end(), end, f"!({condition.decode()})"
    for found in _STATEMENT.finditer(text):
        if not _in_declaration(text, found):
            yield "drop", *found.span(1), ";"


def _in_declaration(text: bytes, found: re.Match[bytes]) -> bool:
    return _UNTOUCHED.search(text, text.rfind(b"\n", 0, found.start()) + 1, found.start(1) + 1) is not None


def _closing(text: bytes, start: int) -> int | None:
    depth = 1
    for place in range(start, min(len(text), start + 2000)):
        depth += {40: 1, 41: -1}.get(text[place], 0)
        if depth == 0:
            return place
    return None


def _other_numbers(number: bytes, suffix: bytes) -> list[str]:
    digits, tail = number.decode(), suffix.decode()
    if digits.startswith("0x"):
        return [f"({digits}{tail} + 1)"]
    if "." in digits or "e" in digits.lower():
        return [f"1.0{tail}"] if float(digits) == 0 else [f"({digits}{tail} * 2)", f"({digits}{tail} / 2)"]
    value = int(digits.replace("'", ""))
    return [f"{value + 1}{tail}"] if value in (0, 1) else [f"{value + 1}{tail}", f"{value - 1}{tail}"]
