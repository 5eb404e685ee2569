"""How the features of `parallelize` hang together: their order, and what imports what."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import permutations
from pathlib import Path

import pytest

from pycoll.parallel import build
from pycoll.parallel.features.context.feature import ContextParallel
from pycoll.parallel.features.experts import ExpertParallel
from pycoll.parallel.features.tensor.feature import TensorParallel

FOLDER = Path(build.__file__).parent


def test_wrong_orders_of_features_are_refused():
    right = build.ORDER
    build.check_order(right)
    with pytest.raises(ValueError, match="TensorParallel needs ExpertParallel before it"):
        build.check_order([ContextParallel, TensorParallel, ExpertParallel])
    for a, b in permutations(range(len(right)), 2):
        swapped = list(right)
        swapped[a], swapped[b] = swapped[b], swapped[a]
        needs = any(
            needed in swapped[i:] for i, kind in enumerate(swapped) for needed in kind.after
        )
        if needs:
            with pytest.raises(ValueError, match="before it"):
                build.check_order(swapped)
        else:
            build.check_order(swapped)


def modules() -> dict[str, Path]:
    found = {}
    for path in FOLDER.rglob("*.py"):
        parts = ("pycoll", "parallel", *path.relative_to(FOLDER).with_suffix("").parts)
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


def imports(path: Path) -> Iterator[str]:
    """The modules that a file imports, also late ones and those for types alone."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                yield f"{node.module}.{alias.name}"
            yield node.module


def test_modules_do_not_import_each_other_in_a_circle():
    known = modules()
    packages = {name for name, path in known.items() if path.name == "__init__.py"}
    graph = {
        # A package lists what is in it, so that users find it there.
        name: {other for other in imports(path) if other in known and other not in packages}
        for name, path in known.items()
        if name not in packages
    }
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join([*above[above.index(name) :], name])
        if name not in done:
            for other in sorted(graph[name]):
                visit(other, (*above, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())


def test_rooms_import_only_those_below():
    """core: nothing else of the trainers; features: no trainer; trainers: no tool."""
    below = {
        "core": ("features", "pipeline", "trainer", "replicas", "tools", "build"),
        "pipeline": ("features", "trainer", "replicas", "tools", "build"),
        "features": ("trainer", "replicas", "tools", "build"),
        "trainer": ("replicas", "tools", "build"),
        "replicas": ("tools", "build"),
    }
    for name, path in modules().items():
        room = (name.split(".") + ["", ""])[2]
        for other in imports(path):
            for banned in below.get(room, ()):
                assert not other.startswith(f"pycoll.parallel.{banned}"), f"{name} imports {other}"
