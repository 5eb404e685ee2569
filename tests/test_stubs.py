"""The type stubs of the C++ module say what the module has."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import pycoll
from pycoll import _core

pytestmark = pytest.mark.pure

STUBS = ast.parse((Path(pycoll.__file__).parent / "_core.pyi").read_text())


def _names(body: list[ast.stmt]) -> set[str]:
    names = {n.name for n in body if isinstance(n, ast.ClassDef | ast.FunctionDef)}
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def _public(thing: object) -> set[str]:
    return {name for name in vars(thing) if not name.startswith("__")}


def test_stubs_module_names_match() -> None:
    hidden = {name for name in _public(_core) if name.startswith("_")}
    assert _names(STUBS.body) - hidden == _public(_core) - hidden


def test_stubs_classes_have_the_same_members() -> None:
    for node in STUBS.body:
        if isinstance(node, ast.ClassDef):
            stubbed = {name for name in _names(node.body) if not name.startswith("__")}
            actual = {name for name in _public(getattr(_core, node.name)) if "pybind11" not in name}
            assert stubbed == actual, node.name


def test_stubs_signatures_match_the_docstrings() -> None:
    communicator = next(
        n for n in STUBS.body if isinstance(n, ast.ClassDef) and n.name == "Communicator"
    )
    stubs = {n.name: n.args for n in communicator.body if isinstance(n, ast.FunctionDef)}
    for method in (row.name for row in _core.collectives()):
        stub = stubs[method]
        parameters = inspect.signature(getattr(pycoll.Communicator, method)).parameters
        assert [a.arg for a in [*stub.args, *stub.kwonlyargs]] == list(parameters), method
        by_keyword = [p.name for p in parameters.values() if p.kind is p.KEYWORD_ONLY]
        assert [a.arg for a in stub.kwonlyargs] == by_keyword, method
        defaults = [ast.literal_eval(d) for d in [*stub.defaults, *stub.kw_defaults] if d]
        expected = [p.default for p in parameters.values() if p.default is not p.empty]
        assert defaults == expected, method
