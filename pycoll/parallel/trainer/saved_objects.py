"""What a checkpoint holds beside model and optimizer: loaders, schedulers, scalers, averages."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pycoll.errors import UsageError
from pycoll.parallel.core.mesh import Mesh
from pycoll.parallel.core.object_collectives import gather_objects
from pycoll.parallel.core.plain_values import decode, encode
from pycoll.parallel.features.data.reducer import Piece
from pycoll.parallel.trainer.trainer import Trainer
from pycoll.parallel.trainer.weight_average import EMA

Objects = Mapping[str, Any]  # by name; each has state_dict and load_state_dict, or is an EMA


class RNG:
    """The generators of random numbers of this process: torch's on the CPU, NumPy's, Python's.

    The trainers do not need them: initial weights, dropout and the order of a loader are keyed.
    They are for random numbers that a script draws. Each rank gets back its own state.
    """

    def __init__(self, mesh: Mesh) -> None:
        """Makes the object; the mesh has the ranks."""
        self._world = mesh.world

    def state_dict(self) -> dict[str, Any]:
        """The states of all ranks. Collective."""
        mine = torch.get_rng_state(), np.random.get_state(), random.getstate()
        return {"ranks": gather_objects(encode(mine, "RNG"), self._world)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Sets this rank's state.

        Raises:
            UsageError: It was saved on another number of ranks.
        """
        ranks = state["ranks"]
        if len(ranks) != self._world.size:
            raise UsageError(
                f"load: the states of random numbers are those of {len(ranks)} ranks, and this job "
                f"has {self._world.size}: leave the RNG out, and seed the generators anew"
            )
        of_torch, of_numpy, of_python = decode(ranks[self._world.rank])
        torch.set_rng_state(of_torch)
        np.random.set_state(of_numpy)
        random.setstate(of_python)


def states(objects: Objects) -> dict[str, Any]:
    """The states of objects as JSON values; those of rank 0 are saved. Collective for an RNG.

    Raises:
        UsageError: An object has no state, its name is unusable, or its state cannot be written.
    """
    found: dict[str, Any] = {}
    for name, object in objects.items():
        if ":" in name:
            raise UsageError(f"save: {name!r} cannot name an object, because it has a colon")
        if isinstance(object, EMA):
            found[name] = None
        elif not hasattr(object, "state_dict") or not hasattr(object, "load_state_dict"):
            raise UsageError(
                f"save: {name!r} is a {type(object).__name__}, expected an object with state_dict "
                "and load_state_dict"
            )
        else:
            found[name] = encode(object.state_dict(), repr(name))
    return found


def averages(objects: Objects, trainer: Trainer) -> Iterator[tuple[str, Piece, Tensor]]:
    """The averages of weights among the objects: names in the checkpoint, pieces, values."""
    for name, object in objects.items():
        if isinstance(object, EMA):
            for parameter, piece in trainer.reducer.pieces.items():
                yield f"object:{name}:{parameter}", piece, object.averages[parameter]


def check(objects: Objects, saved: Mapping[str, Any]) -> None:
    """Raises UsageError if an object was not saved."""
    for name, object in objects.items():
        if name not in saved or isinstance(object, EMA) != (saved[name] is None):
            raise UsageError(
                f"load: the checkpoint has no state of {name!r} ({type(object).__name__}); it has "
                f"{', '.join(map(repr, saved)) or 'none'}"
            )


def restore(objects: Objects, saved: Mapping[str, Any]) -> None:
    """Gives objects the states that `states` returned; averages are tensors of their own."""
    for name, object in objects.items():
        if not isinstance(object, EMA):
            object.load_state_dict(decode(saved[name]))


__all__ = ["RNG", "Objects", "averages", "check", "restore", "states"]
