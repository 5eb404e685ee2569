"""The bytes that an algorithm moves on devices, counted in its lowered programs.

python benchmarks/device_traffic.py prints the table of docs/cuda.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from pycoll import schedule

# Algorithms of all_reduce that the table shows, and whether the form without slots is meant.
ROWS = (("one_shot", False), ("one_shot", True), ("two_shot", False), ("two_shot", True),
        ("ring", False), ("halving_doubling", False), ("tree", False))  # fmt: skip
SIZES = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class Traffic:
    """In messages of the call: what a rank moves, where all ranks are counted and divided by n.

    read and written are all accesses to memory, those of slots among them. sent is what leaves a
    GPU of its own on its links, of the rank that sends most.
    """

    read: float
    written: float
    sent: float

    @property
    def moved(self) -> float:
        return self.read + self.written


def traffic(collective: str, algorithm: str, n: int, direct: bool = False) -> Traffic:
    """Counts it.

    Args:
        collective: Its name.
        algorithm: A name without its protocol.
        n: Number of ranks.
        direct: Whether the form without slots is counted: it has no steps that only send start
            values or only store a message; a combining step reads inputs and writes outputs.

    Returns:
        The traffic, in messages.
    """
    built = schedule.build(collective, algorithm, n)
    read = written = 0
    sent = [0] * n
    for rank, program in enumerate(built.programs(multicast=False)):
        for step in program.steps:
            sources, destinations = len(step.src_peers), len(step.dst_peers)
            if direct:
                only_sends = not sources and not step.write_local
                only_stores = sources == 1 and not step.read_local and not destinations
                if only_sends or only_stores:
                    continue
                for peer in step.src_peers:  # which reads nothing by itself
                    sent[peer] += step.num_chunks
            read += (step.read_local + sources) * step.num_chunks
            written += (step.write_local + destinations) * step.num_chunks
            sent[rank] += destinations * step.num_chunks
    per_message = built.chunks_per_message
    return Traffic(read / n / per_message, written / n / per_message, max(sent) / per_message)


def table() -> str:
    """The table of all_reduce for few ranks, in Markdown."""
    heads = ["algorithm", *(f"memory, n={n}" for n in SIZES), *(f"link, n={n}" for n in SIZES)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, direct in ROWS:
        counted = [traffic("all_reduce", name, n, direct) for n in SIZES]
        cells = [f"{t.moved:.4g}" for t in counted] + [f"{t.sent:.4g}" for t in counted]
        title = f"`{name}/direct`" if direct else f"`{name}`"
        lines.append(f"| {' | '.join([title, *cells])} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table(), end="")
