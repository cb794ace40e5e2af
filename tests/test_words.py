"""Words: docstrings that begin with a verb or a noun, and one name for one thing. A ratchet."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import gradwire

PACKAGE = Path(gradwire.__file__).parent
QUESTION = re.compile(r"(What|Whether|Which|How|Where|Who|Whose|When|Those|That|So)\b")
WORDS = 25
"""The most words of a sentence at the beginning of a docstring."""


def trees():
    return {p.relative_to(PACKAGE).as_posix(): ast.parse(p.read_text()) for p in files()}


def files():
    return sorted(PACKAGE.rglob("*.py"))


def docstrings():
    """(place, text) of every docstring in the package."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for name, tree in trees().items():
        for node in ast.walk(tree):
            text = ast.get_docstring(node) if isinstance(node, kinds) else None
            if text:
                yield f"{name}:{getattr(node, 'lineno', 1)}", text


def functions():
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.name


def share(part, whole):
    part, whole = list(part), list(whole)
    assert whole
    return len(part) / len(whole), part[:10]


def test_docstrings_do_not_open_with_a_question():
    every = list(docstrings())
    found, examples = share([p for p, text in every if QUESTION.match(text)], every)
    assert found < 0.02, examples


def test_a_docstrings_first_sentences_are_short():
    def is_long(text):
        first = " ".join(text.split("\n\n")[0].split())
        return any(len(s.split()) > WORDS for s in re.split(r"(?<=[.!?])\s+", first))

    assert [place for place, text in docstrings() if is_long(text)] == []


def test_a_public_name_is_defined_in_one_module():
    homes = defaultdict(set)
    for name, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].add(name)
    found, examples = share([(n, sorted(h)) for n, h in homes.items() if len(h) > 1], homes)
    assert found < 0.02, examples


def test_most_functions_have_a_name_of_two_words():
    every = list(functions())
    found, _ = share([name for name in every if "_" not in name.strip("_")], every)
    assert found < 0.55
