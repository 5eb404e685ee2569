"""The files of a checkpoint: pieces of tensors, their places in the whole tensors, and checksums.

The checksums form a chain: `index.json` has one of itself and one of each file's header, and a
header has one of each piece. So each byte that a load uses has been checked.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pycoll.parallel.trainer.places import Place, assemble, cover_once

INDEX = "index.json"
VERSION = 2  # version 1 has no checksums
_PLACES = "pycoll"  # key of the header
_CHECKSUM = "crc32"  # key of a place and of the index


class DamageError(Exception):
    """A checkpoint cannot be read; the text names the file and says what is wrong."""


def checksum(data: Any) -> str:
    """CRC-32 of bytes, or of an array of bytes, as text.

    Damage is accidental, so that speed decides: on an AMD EPYC zlib.crc32 reads 2.6 GB/s, SHA-256
    with the CPU's instructions 1.3, BLAKE2b 0.6. It finds every damage within 32 bits, and misses
    other damage with a probability of 2**-32.
    """
    return f"{zlib.crc32(data):08x}"


def fsync(path: Path) -> None:
    """Waits until a file, or what a folder lists, is on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write(path: Path, tensors: dict[str, Tensor], places: dict[str, Any]) -> str:
    """Writes flat pieces and waits until they are on the disk; returns the header's checksum.

    Args:
        path: The file.
        tensors: The pieces, flat; none shares memory with another.
        places: The place of each in its whole tensor.

    Raises:
        OSError: The write failed.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    header = {
        name: {**place, _CHECKSUM: checksum(_bytes_of(tensors[name]))}
        for name, place in places.items()
    }
    try:
        save_file(tensors, path, metadata={_PLACES: json.dumps(header)})
    except SafetensorError as error:  # such as a disk that is full
        raise OSError(str(error)) from error
    fsync(path)
    return checksum(_header(path))


def write_index(folder: Path, index: dict[str, Any]) -> None:
    """Writes `index.json` and waits until it is on the disk.

    Raises:
        OSError: The write failed.
    """
    path = folder / INDEX
    index = {"version": VERSION, **index}
    path.write_text(json.dumps({**index, _CHECKSUM: _checksum_of_index(index)}, indent=1) + "\n")
    fsync(path)
    fsync(folder)


@dataclass(frozen=True)
class Index:
    """Content of `index.json`.

    Attributes:
        files: Checksum of each file's header; None in a checkpoint without checksums.
        objects: States of other objects, by name; None: tensors in the files.
    """

    step: int
    seed: int
    files: dict[str, str | None]
    groups: list[dict[str, Any]]
    extra: Any
    has_checksums: bool
    objects: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Index:
        """Reads and checks the index of a checkpoint.

        Raises:
            DamageError: It cannot be read, or does not match its checksum.
        """
        path = folder / INDEX
        with _reading(path):
            index = json.loads(path.read_text())
            version, files = index["version"], index["files"]
            if version not in (1, VERSION):
                raise DamageError(
                    f"{path} has version {version!r}, expected 1 or {VERSION}: another version of "
                    "pycoll has written it"
                )
            has_checksums = version == VERSION
            if has_checksums and index.pop(_CHECKSUM) != _checksum_of_index(index):
                raise DamageError(f"{path} is damaged: its content does not match its checksum")
            if not has_checksums:
                files = {name: None for name in _as_list(files)}
            return cls(
                int(index["step"]),
                int(index["seed"]),
                dict(files),
                _as_list(index["groups"]),
                index["extra"],
                has_checksums,
                dict(index.get("objects", {})),
            )


@dataclass(frozen=True)
class _StoredPiece:
    """A piece of a tensor in a file."""

    path: Path
    file: Any  # of safe_open
    name: str
    place: Place
    checksum: str | None

    def read(self) -> Tensor:
        """Reads the piece and checks it.

        Raises:
            DamageError: It cannot be read, or does not match its checksum.
        """
        with _reading(self.path):
            piece: Tensor = self.file.get_tensor(self.name)
            if self.checksum is not None and checksum(_bytes_of(piece)) != self.checksum:
                raise DamageError(
                    f"{self.path} is damaged: tensor {self.name!r} does not match its checksum"
                )
            return piece


class Reader:
    """Assembles whole tensors from the files of a checkpoint."""

    def __init__(self, folder: Path, index: Index) -> None:
        """Reads the headers.

        Raises:
            DamageError: A file cannot be read, or the pieces of a tensor do not fit together.
        """
        self._folder = folder
        self._pieces: dict[str, list[_StoredPiece]] = {}
        for name, expected in index.files.items():
            path = folder / name
            with _reading(path):
                for piece in _pieces_of(path, expected):
                    self._pieces.setdefault(piece.name, []).append(piece)
        for name, pieces in self._pieces.items():
            with _reading(folder):
                self._pieces[name] = pieces = _distinct(pieces)
                if not cover_once([piece.place for piece in pieces]):
                    raise DamageError(
                        f"{folder}: the pieces of tensor {name!r} in its files do not cover each "
                        "element exactly once"
                    )

    def __contains__(self, name: str) -> bool:
        return name in self._pieces

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a whole tensor."""
        return self._pieces[name][0].place.placement.shape

    def states(self, name: str) -> list[str]:
        """Keys of the optimizer's state for a parameter."""
        ends = f":{name}"
        return [
            key[len("state:") : -len(ends)]
            for key in self._pieces
            if key.startswith("state:") and key.endswith(ends) and key.count(":") == 2
        ]

    def check(self, files: Sequence[str]) -> None:
        """Reads all pieces in these files and checks them.

        Raises:
            DamageError: A piece cannot be read, or does not match its checksum.
        """
        paths = {self._folder / name for name in files}
        for pieces in self._pieces.values():
            for piece in pieces:
                if piece.path in paths and piece.checksum is not None:
                    piece.read()

    def whole(self, name: str) -> Tensor:
        """Assembles a whole tensor from its pieces.

        Raises:
            DamageError: A piece cannot be read, or does not match its checksum.
        """
        return assemble([(stored.place, stored.read()) for stored in self._pieces[name]])


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turns each error of reading a file into a DamageError: JSON and safetensors have many."""
    try:
        yield
    except DamageError:
        raise
    except FileNotFoundError as error:
        raise DamageError(f"{path} is missing") from error
    except Exception as error:
        raise DamageError(f"{path} cannot be read: {type(error).__name__}: {error}") from error


def _pieces_of(path: Path, expected: str | None) -> Iterator[_StoredPiece]:
    """Pieces that a file's header lists."""
    from safetensors import safe_open

    if expected is not None and checksum(_header(path)) != expected:
        raise DamageError(f"{path} is damaged: its header does not match its checksum in {INDEX}")
    file = safe_open(path, framework="pt")
    for name, place in json.loads(file.metadata()[_PLACES]).items():
        (count,) = file.get_slice(name).get_shape()
        hash = None if expected is None else place[_CHECKSUM]
        yield _StoredPiece(path, file, name, Place.of_json(place, count), hash)


def _distinct(pieces: list[_StoredPiece]) -> list[_StoredPiece]:
    """Each piece once; several ranks write a value that they all hold, as a number of steps."""
    by_place = {piece.place: piece for piece in pieces}
    filled = [piece for piece in by_place.values() if piece.place.count]
    return filled or pieces[:1]  # a tensor without elements has pieces, too


def _bytes_of(tensor: Tensor) -> Any:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


def _header(path: Path) -> bytes:
    """The header of a safetensors file, with its length."""
    with path.open("rb") as file:
        length = file.read(8)
        return length + file.read(min(int.from_bytes(length, "little"), path.stat().st_size))


def _checksum_of_index(index: dict[str, Any]) -> str:
    """Checksum of what is read back: JSON turns tuples into lists, and keys into texts."""
    return checksum(json.dumps(json.loads(json.dumps(index)), sort_keys=True).encode())


def _as_list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"expected a list, found {type(value).__name__}")
    return value


__all__ = ["INDEX", "DamageError", "Index", "Reader", "checksum", "fsync", "write", "write_index"]
