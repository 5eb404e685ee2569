"""The ways to share each operator: a table of rules, one row for each kind of operator.

A rule names each dimension of an operator's tensors by a letter. Dimensions with one letter are cut
together; a letter that only arguments have is summed over; "." stays whole. An operator without a
row runs whole.
"""

from __future__ import annotations

from collections.abc import Callable
from string import ascii_letters

from pycoll.parallel.features.annotate.cuts import Cut, Shape, Way, through_view
from pycoll.parallel.features.annotate.graph import Operator

WHOLE = "."
Letters = tuple[list[str], list[str]]  # of the dimensions of arguments, and of results
Rule = Callable[[Operator, int, Cut], "Way | None"]


def ways_from(operator: Operator, place: int, cut: Cut, ranks: int) -> Way | None:
    """The way to share an operator that follows from the cut of one of its tensors.

    Args:
        operator: The operator.
        place: Place of the tensor in `operator.values`.
        cut: Its cut.
        ranks: Number of ranks.

    Returns:
        The way; None: the operator has none for this cut, or a dimension does not divide.
    """
    rule = _RULES.get(operator.name)
    way = None if rule is None else rule(operator, place, cut)
    if way is None:
        return None
    shapes = (*operator.shapes, *operator.outputs)
    cuts = (*way.inputs, *way.outputs)
    fits = all(
        of is None or of.divides(shape, ranks) for of, shape in zip(cuts, shapes, strict=True)
    )
    return way if fits else None


def is_known(operator: Operator) -> bool:
    """Whether the table has a row for an operator."""
    return operator.name in _RULES


def by_letters(name_dims: Callable[[Operator], Letters | None]) -> Rule:
    """The rule of operators whose dimensions have letters."""

    def rule(operator: Operator, place: int, cut: Cut) -> Way | None:
        letters = name_dims(operator)
        if letters is None:
            return None
        inputs, outputs = letters
        letter = (inputs + outputs)[place][cut.dim]
        if letter == WHOLE:
            return None
        cuts = [
            Cut(of.index(letter), cut.blocks) if letter in of else None for of in inputs + outputs
        ]
        summed = not any(letter in of for of in outputs)
        return Way(tuple(cuts[: len(inputs)]), tuple(cuts[len(inputs) :]), summed)

    return rule


def _names(number: int, start: int = 0) -> str:
    return ascii_letters[start : start + number]


def _dim(operator: Operator, place: int, name: str, default: int = 0) -> int:
    dim = operator.argument(place, name, default)
    return int(dim) % max(1, len(operator.shapes[0]))


def _but(letters: str, *dims: int) -> str:
    return "".join(WHOLE if i in dims else letter for i, letter in enumerate(letters))


def _aligned(shape: Shape, against: Shape, letters: str) -> str:
    """Letters of a tensor that is broadcast: those of the last dimensions, if it has them."""
    skipped = len(against) - len(shape)
    return "".join(
        letters[skipped + i] if size == against[skipped + i] else WHOLE
        for i, size in enumerate(shape)
    )


def _elementwise(operator: Operator) -> Letters:
    out = operator.outputs[0]
    letters = _names(len(out))
    return [_aligned(shape, out, letters) for shape in operator.shapes], [letters]


def _linear(operator: Operator) -> Letters:
    lead = _names(len(operator.shapes[0]) - 1, 2)
    return [f"{lead}a", "ba", "b"][: len(operator.shapes)], [f"{lead}b"]


def _matmul(operator: Operator) -> Letters | None:
    x, y = operator.shapes
    if min(len(x), len(y)) < 2:
        return None
    out = operator.outputs[0]
    lead = _names(len(out) - 2, 3)
    first, second = (_aligned(shape[:-2], out[:-2], lead) for shape in (x, y))
    return [f"{first}ab", f"{second}bc"], [f"{lead}ac"]


def _conv2d(operator: Operator) -> Letters | None:
    if operator.argument(6, "groups", 1) != 1 or len(operator.shapes[0]) != 4:
        return None
    return ["ac..", "bc..", "b"][: len(operator.shapes)], ["ab.."]


def _embedding(operator: Operator) -> Letters:
    lead = _names(len(operator.shapes[1]), 2)
    return ["ab", lead], [f"{lead}b"]


def _layer_norm(operator: Operator) -> Letters:
    sizes = operator.argument(1, "normalized_shape")
    dims = len(operator.shapes[0]) - len(sizes)
    x = _names(dims) + WHOLE * len(sizes)
    return [x, *(WHOLE * len(sizes) for _ in operator.shapes[1:])], [x]


def _along(operator: Operator) -> Letters:
    """Operators that need one dimension whole, such as softmax."""
    letters = _but(_names(len(operator.shapes[0])), _dim(operator, 1, "dim"))
    return [letters], [letters]


def _attention(operator: Operator) -> Letters:
    lead = _names(len(operator.outputs[0]) - 2)
    heads = [f"{lead}.."] * 3
    masks = [
        _aligned(shape[:-2], operator.outputs[0][:-2], lead) + ".." for shape in operator.shapes[3:]
    ]
    return heads + masks, [f"{lead}.."]


def _pool(operator: Operator) -> Letters:
    letters = _names(len(operator.shapes[0]) - 2) + ".."
    return [letters], [letters]


def _permute(operator: Operator) -> Letters:
    letters = _names(len(operator.shapes[0]))
    order = [int(dim) % len(letters) for dim in operator.argument(1, "dims")]
    return [letters], ["".join(letters[dim] for dim in order)]


def _transpose(operator: Operator) -> Letters:
    letters = list(_names(len(operator.shapes[0])))
    if operator.name == "t":
        return ["".join(letters)], ["".join(reversed(letters))]
    a, b = _dim(operator, 1, "dim0"), _dim(operator, 2, "dim1")
    turned = list(letters)
    turned[a], turned[b] = letters[b], letters[a]
    return ["".join(letters)], ["".join(turned)]


def _expand(operator: Operator) -> Letters:
    out = operator.outputs[0]
    letters = _names(len(out))
    return [_aligned(operator.shapes[0], out, letters)], [letters]


def _cat(operator: Operator) -> Letters:
    letters = _but(_names(len(operator.outputs[0])), _dim(operator, 1, "dim"))
    return [letters] * len(operator.shapes), [letters]


def _slice(operator: Operator) -> Letters:
    shape, out = operator.shapes[0], operator.outputs[0]
    letters = _names(len(shape))
    dims = [i for i, size in enumerate(shape) if size != out[i]]
    return [_but(letters, *dims)], [_but(letters, *dims)]


def _select(operator: Operator) -> Letters:
    letters, dim = _names(len(operator.shapes[0])), _dim(operator, 1, "dim")
    return [_but(letters, dim)], [letters[:dim] + letters[dim + 1 :]]


def _repeat_interleave(operator: Operator) -> Letters | None:
    if len(operator.shapes) != 1 or operator.argument(2, "dim") is None:
        return None
    letters = _names(len(operator.shapes[0]))
    return [letters], [letters]


def _reduction(operator: Operator) -> Letters:
    letters = _names(len(operator.shapes[0]))
    asked = operator.argument(1, "dim")
    every = range(len(letters))
    dims = {dim % len(letters) for dim in ([asked] if isinstance(asked, int) else asked or every)}
    keeps = len(operator.outputs[0]) == len(letters)
    out = "".join(
        WHOLE if i in dims else letter for i, letter in enumerate(letters) if keeps or i not in dims
    )
    taken = letters if operator.name == "sum" else _but(letters, *dims)
    return [taken], [out]


def _view(operator: Operator, place: int, cut: Cut) -> Way | None:
    shapes = (operator.shapes[0], operator.outputs[0])
    other = through_view(cut, shapes[place], shapes[1 - place])
    if other is None:
        return None
    cuts = (cut, other) if place == 0 else (other, cut)
    return Way((cuts[0],), (cuts[1],))


def _pieces(operator: Operator, place: int, cut: Cut) -> Way | None:
    """Equal pieces along a dimension: a cut of the pieces is one of blocks of the whole."""
    number, dim = len(operator.outputs), _dim(operator, 2, "dim")
    if len({shape[dim] for shape in operator.outputs}) > 1:
        return None
    if cut.dim == dim and place == 0 and cut.blocks % number:
        return None
    times = number if cut.dim == dim else 1
    piece = Cut(cut.dim, cut.blocks // times) if place == 0 else cut
    return Way((Cut(cut.dim, piece.blocks * times),), (piece,) * number)


_ELEMENTWISE = (
    *("add", "sub", "rsub", "mul", "div", "neg", "abs", "pow", "exp", "log", "square", "sqrt"),
    *("rsqrt", "reciprocal", "sin", "cos", "tanh", "sigmoid", "gelu", "silu", "relu", "elu"),
    *("leaky_relu", "hardtanh", "softplus", "dropout", "where", "masked_fill", "clamp", "maximum"),
    *("minimum", "to", "_to_copy", "type_as", "clone", "contiguous", "detach", "alias", "eq", "ne"),
    *("lt", "le", "gt", "ge", "logical_not", "logical_and", "logical_or", "zeros_like"),
    *("ones_like", "full_like", "empty_like"),
)
# fmt: off
VIEWS = ("view", "reshape", "_unsafe_view", "flatten", "unflatten", "unsqueeze", "squeeze")
PRODUCTS = ("linear", "matmul", "mm", "bmm", "conv2d", "embedding", "scaled_dot_product_attention")
_RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, by_letters(_elementwise)),
    **dict.fromkeys(VIEWS, _view),
    **dict.fromkeys(("matmul", "mm", "bmm"), by_letters(_matmul)),
    **dict.fromkeys(("transpose", "t", "swapaxes"), by_letters(_transpose)),
    **dict.fromkeys(("softmax", "log_softmax"), by_letters(_along)),
    **dict.fromkeys(("chunk", "split"), _pieces),
    **dict.fromkeys(("sum", "mean", "amax", "amin"), by_letters(_reduction)),
    **dict.fromkeys(("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d"), by_letters(_pool)),
    "linear": by_letters(_linear),
    "conv2d": by_letters(_conv2d),
    "embedding": by_letters(_embedding),
    "layer_norm": by_letters(_layer_norm),
    "scaled_dot_product_attention": by_letters(_attention),
    "permute": by_letters(_permute),
    "expand": by_letters(_expand),
    "cat": by_letters(_cat),
    "slice": by_letters(_slice),
    "select": by_letters(_select),
    "repeat_interleave": by_letters(_repeat_interleave),
}
# fmt: on


__all__ = ["PRODUCTS", "VIEWS", "Letters", "Rule", "by_letters", "is_known", "ways_from"]
