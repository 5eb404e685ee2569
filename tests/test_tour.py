"""docs/tour.md tells the truth: its files and functions exist, and each hop calls the next one."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.pure

ROOT = Path(__file__).resolve().parents[1]
TOUR = (ROOT / "docs" / "tour.md").read_text()
NUM_HOPS = 7

Read = Callable[[str], str]  # path in the repository -> text


@dataclass(frozen=True)
class Place:
    """A function, `name` or `Class::name`, or a class, of a file."""

    file: str
    symbol: str

    @property
    def name(self) -> str:
        return self.symbol.rpartition("::")[2]


@dataclass(frozen=True)
class Hop:
    number: int
    functions: list[Place]  # the first is where the hop begins; it calls the others
    on_the_way: list[Place]  # called by one of them


def read_tree(path: str) -> str:
    return (ROOT / path).read_text()


def places(paragraph: str) -> list[Place]:
    """`file`: `symbol`, `symbol`; `file`: `symbol`."""
    found = []
    for group in paragraph.split(";"):
        file, *symbols = re.findall(r"`([^`]+)`", group)
        found += [Place(file, symbol) for symbol in symbols]
    return found


def hops_of(tour: str) -> list[Hop]:
    hops = []
    for section in re.split(r"^### ", tour, flags=re.MULTILINE)[1:]:
        labels = dict(re.findall(r"\*\*(In|On the way):\*\*(.*?)(?:\n\n|\Z)", section, re.DOTALL))
        number = int(section.partition(".")[0])
        hops.append(Hop(number, places(labels["In"]), places(labels["On the way"])))
    return hops


def without_comments(text: str) -> str:
    """C++ without comments, strings and preprocessor lines: what is left has matching brackets."""
    text = re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|^ *#.*?$', "", text, flags=re.S | re.M)
    return re.sub(r"'(?:\\.|[^'\\\n])'", "", text)


def end_of(text: str, start: int, brackets: str) -> int:
    """The position behind the bracket that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == brackets[0]) - (text[i] == brackets[1])
        if depth == 0:
            return i + 1
    raise AssertionError("brackets do not match")


def body_of_class(text: str, name: str) -> str | None:
    match = re.search(rf"\b(?:class|struct)\s+(?:alignas\(\w+\)\s+)?{name}\b[^;{{(]*\{{", text)
    return match and text[match.end() - 1 : end_of(text, match.end() - 1, "{}")]


def body_of_function(text: str, name: str) -> str | None:
    """The block after `name(...)`: of its definition, since no call has one."""
    for match in re.finditer(rf"\b{name}\s*\(", text):
        after = end_of(text, match.end() - 1, "()")
        block = re.match(r"\s*(?:const\s*)?(?:noexcept\s*)?\{", text[after:])
        if block:
            start = after + block.end() - 1
            return text[start : end_of(text, start, "{}")]
    return None


def definition(place: Place, read: Read) -> str:
    """The text of the function, or of the class."""
    text = without_comments(read(place.file))
    owner, _, name = place.symbol.rpartition("::")
    found = body_of_function(text, place.symbol)
    if found is None and owner:
        found = body_of_function(body_of_class(text, owner) or "", name)
    if found is None and not owner:
        found = body_of_class(text, name)
    assert found, f"{place.file} does not define {place.symbol}"
    return found


def calls(body: str, place: Place) -> bool:
    """`name(`, `name<...>(`, `name{` or `name view(`: a call, or a value that is made."""
    return re.search(rf"\b{place.name}\s*(?:<[^;()]*>)?(?:\s+\w+)?\s*[({{]", body) is not None


def check(tour: str, read: Read) -> None:
    hops = hops_of(tour)
    assert [hop.number for hop in hops] == list(range(1, NUM_HOPS + 1))
    for i, hop in enumerate(hops):
        bodies = [definition(place, read) for place in hop.functions]
        targets = hop.functions[1:] + hop.on_the_way
        targets += hops[i + 1].functions[:1] if i + 1 < len(hops) else []
        for place in targets:
            definition(place, read)
            assert any(calls(body, place) for body in bodies), (
                f"hop {hop.number}: nothing in it calls {place.symbol}"
            )


def test_tour_names_what_is_there():
    check(TOUR, read_tree)


def test_tour_notices_a_renamed_symbol():
    """In a copy of the tree in which the symbol has another name."""
    for place in [place for hop in hops_of(TOUR) for place in hop.functions + hop.on_the_way]:

        def renamed(path: str, name: str = place.name) -> str:
            return re.sub(rf"\b{name}\b", f"{name}_2", read_tree(path))

        with pytest.raises(AssertionError, match=f"{place.name}"):
            check(TOUR, renamed)


def test_tour_notices_a_call_that_is_gone():
    def cut(path: str) -> str:
        return read_tree(path).replace("return interpret<", "return skip<")

    with pytest.raises(AssertionError, match="hop 4: nothing in it calls interpret"):
        check(TOUR, cut)


def test_tour_notices_a_missing_hop():
    with pytest.raises(AssertionError):
        check(TOUR.replace("### 3. ", "#### 3. "), read_tree)
