"""Runs lowered programs on numbers, in a random order, independently of their proof.

Links are rings of slots that hold bare values, as memory would: a reader takes the slot's value.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from pycoll.bench.oracle import COLLECTIVES, blocks_of_inputs, sources_by_block

_PRIME = 2**61 - 1
_FACTOR = 1234567891011  # stands for the operator's last factor
Value = tuple[int, float]  # exact, and rounded: the rounding tells orders of addition apart


class WrongResult(AssertionError):
    """The programs do not do what their collective promises."""


@dataclass
class _Link:
    """Slots with one writer; `read` counts per reader."""

    slots: list[list[Value]]
    readers: tuple[int, ...]
    written: int = 0
    read: dict[int, int] = field(default_factory=dict)

    def has_room(self) -> bool:
        return self.written - min(self.read.get(r, 0) for r in self.readers) < len(self.slots)

    def has_message(self, reader: int) -> bool:
        return self.read.get(reader, 0) < self.written

    def write(self, values: list[Value]) -> None:
        slot = self.slots[self.written % len(self.slots)]
        slot[: len(values)] = values
        self.written += 1

    def take(self, reader: int, count: int) -> list[Value]:
        at = self.read.get(reader, 0)
        self.read[reader] = at + 1
        return self.slots[at % len(self.slots)][:count]


class _World:
    def __init__(self, schedule: Any, programs: list[Any], slots: int, rng: random.Random) -> None:
        self.schedule = schedule
        self.programs = programs
        self.num_slots = slots
        self.rng = rng
        self.ranks = range(schedule.n)
        self.links: dict[tuple[str, int, int], _Link] = {}
        self.steps = [program.steps for program in programs]

    def link(self, src: int, dst: int, ring: bool) -> _Link:
        key = ("ring", src, -1) if ring else ("link", src, dst)
        if key not in self.links:
            readers = tuple(r for r in self.ranks if r != src) if ring else (dst,)
            slots = [
                [self.garbage() for _ in range(self.schedule.num_chunks)]
                for _ in range(self.num_slots)
            ]
            self.links[key] = _Link(slots, readers)
        return self.links[key]

    def garbage(self) -> Value:
        return self.rng.randrange(_PRIME), self.rng.gauss(0, 1e6)

    def can_run(self, rank: int, step: Any) -> bool:
        return all(
            self.link(src, rank, step.multicast_src).has_message(rank) for src in step.src_peers
        ) and all(self.link(rank, dst, step.multicast_dst).has_room() for dst in step.dst_peers)

    def run_step(self, rank: int, step: Any, chunks: list[Value]) -> None:
        first, last = step.first_chunk, step.first_chunk + step.num_chunks
        operands = {
            src: self.link(src, rank, step.multicast_src).take(rank, step.num_chunks)
            for src in step.src_peers
        }
        if step.read_local:
            operands[rank] = chunks[first:last]
        ordered = [operands[operand] for operand in sorted(operands)]
        result = []
        for values in zip(*ordered, strict=True):
            exact, rounded = values[0]
            for more_exact, more_rounded in values[1:]:
                exact, rounded = (exact + more_exact) % _PRIME, rounded + more_rounded
            if step.final:
                exact, rounded = exact * _FACTOR % _PRIME, rounded / self.schedule.n
            result.append((exact, rounded))
        if step.write_local:
            chunks[first:last] = result
        if step.multicast_dst:
            self.link(rank, -1, True).write(result)
        else:
            for dst in step.dst_peers:
                self.link(rank, dst, False).write(result)

    def run(self, tiles: int) -> None:
        starts = [[self._start_tile() for _ in range(tiles)] for _ in self.ranks]
        held = [[list(tile) for tile in rank_tiles] for rank_tiles in starts]
        at = [0] * self.schedule.n  # position in `tiles` repetitions of the program
        total = [tiles * len(steps) for steps in self.steps]
        while True:
            able = [
                r
                for r in self.ranks
                if at[r] < total[r] and self.can_run(r, self.steps[r][at[r] % len(self.steps[r])])
            ]
            if not able:
                break
            rank = self.rng.choice(able)
            tile, step_idx = divmod(at[rank], len(self.steps[rank]))
            self.run_step(rank, self.steps[rank][step_idx], held[rank][tile])
            at[rank] += 1
        if at != total:
            raise WrongResult(f"deadlock at {at} of {total}")
        for link in self.links.values():
            if any(link.has_message(reader) for reader in link.readers):
                raise WrongResult("a message is never read")
        for tile in range(tiles):
            self._check([rank[tile] for rank in starts], [rank[tile] for rank in held])

    def _start_tile(self) -> list[Value]:
        # Small whole numbers beside large fractions, so that every other order rounds differently.
        return [
            (self.rng.randrange(_PRIME), self.rng.gauss(0, 1) * 10 ** self.rng.uniform(0, 6))
            for _ in range(self.schedule.num_chunks)
        ]

    def _check(self, start: list[list[Value]], end: list[list[Value]]) -> None:
        for chunk in range(self.schedule.num_chunks):
            reduced = None
            for rank in self.ranks:
                wanted = _wanted_sources(self.schedule, rank, chunk)
                if wanted is None:
                    continue
                sources, is_final, same_everywhere = wanted
                result = end[rank][chunk]
                expected = sum(start[source][chunk][0] for source in sources) % _PRIME
                if is_final:
                    expected = expected * _FACTOR % _PRIME
                if result[0] != expected:
                    raise WrongResult(f"rank {rank}, chunk {chunk}: {result[0]} for {expected}")
                if not same_everywhere:
                    continue
                if reduced not in (None, result):
                    raise WrongResult(f"chunk {chunk}: ranks end with {reduced} and {result}")
                reduced = result


def _wanted_sources(schedule: Any, rank: int, chunk: int) -> tuple[list[int], bool, bool] | None:
    """The promise for that chunk of the rank at the end, from the table of collectives.

    Returns:
        Ranks whose start values are summed; whether the operator's last factor applies; whether all
        ranks that want it must have the same bits. None: the collective promises nothing.
    """
    name, n = schedule.collective, schedule.n
    block = chunk // (schedule.num_chunks // blocks_of_inputs(name, n))
    sources = sources_by_block(name, n, rank, schedule.root).get(block)
    if sources is None:
        return None
    is_prefix = name in ("scan", "exscan")
    is_final = (name == "barrier" or COLLECTIVES[name].has_op) and not is_prefix and n > 1
    return list(sources), is_final, not is_prefix


def check_programs(
    schedule: Any, programs: list[Any], slots: int, rng: random.Random, tiles: int = 2
) -> None:
    """Raises WrongResult unless the programs compute their collective, tile after tile.

    Args:
        schedule: with .collective, .n, .num_chunks and .root: what is to be computed.
        programs: one per rank.
        slots: of each link.
        rng: of the data and of the order in which ranks run.
        tiles: how often the programs are repeated without a pause.
    """
    _World(schedule, programs, slots, rng).run(tiles)
