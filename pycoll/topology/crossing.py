"""Which domains of a host the rounds of a collective cross, from the CPUs of its ranks."""

from __future__ import annotations

import collections
import contextlib
import os
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from pycoll import schedule
from pycoll.errors import UsageError
from pycoll.topology import sysfs
from pycoll.topology.host import CORE, Host

__all__ = ["domains_of_rounds", "explain_domains"]

NETWORK = "network"
Rounds = dict[int, str]
CpusOfRank = Sequence[Collection[int] | None]


def domains_of_rounds(
    messages: Iterable[tuple[int, int, int]], cpus_of_rank: CpusOfRank, host: Host
) -> Rounds:
    """The largest domain inside which a message of each round travels.

    Args:
        messages: (round, source rank, destination rank).
        cpus_of_rank: CPUs on which each rank may run; None is a rank of another host.
        host: this host.

    Returns:
        By round: `core`, the name of a level, or `network`. Messages between two ranks of other
        hosts do not count.
    """
    order = [CORE, *(level.name for level in host.levels), NETWORK]
    between: dict[tuple[int, int], int] = {}
    largest: dict[int, int] = {}
    for number, src, dst in messages:
        pair = (min(src, dst), max(src, dst))
        if pair not in between:
            between[pair] = order.index(_domain(cpus_of_rank[src], cpus_of_rank[dst], host))
        largest[number] = max(largest.get(number, 0), between[pair])
    return {number: order[at] for number, at in sorted(largest.items())}


def explain_domains(comm: Any, collective: str, root: int, choice: str) -> str:
    """A line for `Communicator.explain`.

    Args:
        comm: the communicator.
        collective: such as `all_reduce`.
        root: root of a rooted collective.
        choice: the text of the core, whose first line names the algorithm.

    Returns:
        The line with its '\\n'; empty for one rank, a closed communicator, or an algorithm without
        a schedule.

    Cost: builds the schedule and reads sysfs: milliseconds, at 256 ranks up to a second.
    """
    if comm.size == 1 or comm.closed:
        return ""
    name = choice.splitlines()[0].partition(" ranks: ")[2].rpartition(" over ")[0]
    ranks = comm._ranks()
    of_process = collections.Counter(rank["pid"] for rank in ranks)
    cpus_of_rank = [_cpus(rank, of_process[rank["pid"]] > 1) for rank in ranks]
    moves = _moves(collective, name.rpartition("/")[0], cpus_of_rank, root)
    if moves is None:
        return ""
    here = [cpus for cpus in cpus_of_rank if cpus is not None]
    try:
        host = sysfs.read_host(sysfs.ROOT)
        return f"  domains: {_text(moves, cpus_of_rank, here, host)}\n"
    except UsageError as error:
        return f"  domains: not known: {error}\n"


def _text(
    moves: Iterable[tuple[int, int, int]],
    cpus_of_rank: CpusOfRank,
    here: list[Collection[int]],
    host: Host,
) -> str:
    inner, outer = host.levels[0], host.levels[-1]
    unknown = [rank for rank, cpus in enumerate(cpus_of_rank) if cpus is not None and not cpus]
    # On a host of one domain the CPUs do not matter, so ranks that have not joined do not either.
    together = host.smallest_domain({cpu for cpus in here for cpu in cpus})
    is_one = inner is outer or (not unknown and together in (CORE, inner.name))
    if is_one and len(here) == len(cpus_of_rank):
        names = ", ".join([*inner.also, inner.name])
        return f"the ranks' CPUs are in one domain ({names}), which no message leaves"
    if unknown:
        return f"not known: the CPUs of {_ranks(unknown, cpus_of_rank)} cannot be read"
    free = [
        rank
        for rank, cpus in enumerate(cpus_of_rank)
        if cpus is not None and host.smallest_domain(cpus) in (outer.name, None)
    ]
    if free and inner is not outer:
        who = _ranks(free, cpus_of_rank)
        return f"not known: {who} may run in every {host.levels[-2].name}: pin them to CPUs"
    rounds = domains_of_rounds(moves, cpus_of_rank, host)
    runs: list[tuple[int, int, str]] = []
    for number, domain in rounds.items():
        if runs and runs[-1][2] == domain:
            runs[-1] = (runs[-1][0], number, domain)
        else:
            runs.append((number, number, domain))
    return ", ".join(f"{_span(first, last)} inside {domain}" for first, last, domain in runs)


def _domain(a: Collection[int] | None, b: Collection[int] | None, host: Host) -> str:
    if a is None and b is None:
        return CORE
    if a is None or b is None:
        return NETWORK
    return host.smallest_domain({*a, *b}) or host.levels[-1].name


def _cpus(rank: dict[str, Any], shares_process: bool) -> Collection[int] | None:
    """CPUs on which the rank may run; none if they are not known; None for another host.

    A rank that is a thread may be any thread of its process, so those of all threads count.
    """
    if rank["state"] != "absent" and not rank["pid"]:
        return None  # also if it has left: ranks of this host leave their pid
    try:
        if not shares_process:
            return os.sched_getaffinity(rank["thread_id"]) if rank["thread_id"] else ()
        cpus: set[int] = set()
        for thread in os.listdir(f"/proc/{rank['pid']}/task"):
            with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                cpus |= os.sched_getaffinity(int(thread))
        return cpus
    except OSError:
        return ()  # the thread has ended, or is in another pid namespace


def _moves(
    collective: str, algorithm: str, cpus_of_rank: CpusOfRank, root: int
) -> list[tuple[int, int, int]] | None:
    n = len(cpus_of_rank)
    of = "all_reduce" if collective == "barrier" else collective
    if algorithm == "hierarchical":
        here = sum(cpus is not None for cpus in cpus_of_rank)
        built = schedule.build_hierarchical(of, n, here, root)
    elif algorithm in schedule.algorithms(of):
        built = schedule.build(of, algorithm, n, root)
    else:
        return None
    return [(number, src, dst) for number, _, _, _, src, dst in built.core.moves]


def _ranks(ranks: list[int], cpus_of_rank: CpusOfRank) -> str:
    if len(ranks) == len(cpus_of_rank):
        return "the ranks"
    return "ranks " + ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


def _span(first: int, last: int) -> str:
    return f"round {first}" if first == last else f"rounds {first} to {last}"
