"""The state of the servers' optimizers of a table, put together from its parts and taken apart.

A state has a key for each kind of number: with one number for each weight, [rows, dim], or one for
all, such as the number of steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from pycoll.parallel.ps.keys import Layout, Table

State = dict[str, Tensor]


def assembled(table: Table, layout: Layout, parts: Mapping[int, State]) -> State:
    """The state of a whole table from those of its parts, by number.

    Rows of parts that have not stepped are zeros. Parts may have made different numbers of steps,
    where servers drop gradients; the largest one is taken.
    """
    whole: State = {}
    for number, state in parts.items():
        rows = torch.from_numpy(layout.parts[number].rows)
        for key, value in state.items():
            if value.dim() < 2:
                whole[key] = value if key not in whole else torch.maximum(whole[key], value)
                continue
            if key not in whole:
                whole[key] = torch.zeros(table.rows, table.dim, dtype=value.dtype)
            whole[key][rows] = value
    return whole


def of_parts(layout: Layout, parts: Iterable[int], whole: State) -> dict[int, State]:
    """The states of some parts of a table."""
    rows = {number: torch.from_numpy(layout.parts[number].rows) for number in parts}
    return {
        number: {key: value[mine] if value.dim() == 2 else value for key, value in whole.items()}
        for number, mine in rows.items()
    }


__all__ = ["State", "assembled", "of_parts"]
