"""Fair shares against a second solution, written for being short."""

import math
import random

import pytest
from cases import each_case
from clusters import fat_tree, hosts

from pycoll import _core, schedule
from pycoll.topology import Straggler

pytestmark = pytest.mark.pure


def max_min_rates(routes, capacity):
    """Progressive filling: raise all rates equally until a link is full, fix those on it, go on."""
    rates, room = {}, dict(capacity)
    while len(rates) < len(routes):
        open_flows = {flow: route for flow, route in routes.items() if flow not in rates}
        crossing = {link: sum(link in r for r in open_flows.values()) for link in room}
        share, link = min((room[at] / num, at) for at, num in crossing.items() if num)
        for flow, route in open_flows.items():
            if link in route:
                rates[flow] = share
                for at in route:
                    room[at] -= share
    return rates


def ends_of(flows, capacity):
    """When each flow {name: (route, nbytes)} is through; all start at once."""
    left = {name: nbytes for name, (_, nbytes) in flows.items()}
    ends, now_s = {}, 0.0
    while left:
        rates = max_min_rates({name: flows[name][0] for name in left}, capacity)
        step_s = min(left[name] / rates[name] for name in left)
        now_s += step_s
        for name in list(left):
            left[name] -= step_s * rates[name]
            if left[name] <= 1e-9 * flows[name][1]:
                ends[name] = now_s
                del left[name]
    return ends


@each_case("seed", range(20))
def test_random_messages_end_when_an_independent_solution_says(seed):
    rng = random.Random(seed)
    slow = Straggler(level="host", units=(1,), link_factor=rng.choice([0.3, 1.0, 2.5]))
    cluster = rng.choice(
        [
            hosts(4, 3, stragglers=(slow,)),
            hosts(
                3, 4, outer={"num_links": 2}, inner={"link_bytes_per_s": 1.5}, stragglers=(slow,)
            ),
            fat_tree(2, 2, 3, stragglers=(slow,)),
        ]
    )
    n = cluster.num_ranks
    fabric = cluster.fabric()
    moves, flows, chunk = [], {}, 0
    num_chunks = 4 * n
    for src in range(n):  # each rank sends one message, to any other rank
        dst, count = rng.choice([r for r in range(n) if r != src]), rng.randint(1, 4)
        moves.append((0, "copy", chunk, count, src, dst))
        flows[src, dst] = (fabric.route(src, dst), count * 1000.0)
        chunk += 4
    core = _core.schedule_from_moves("broadcast", "random", n, num_chunks, 0, moves)
    one = schedule.Schedule(core).simulate(num_chunks * 1000, topology=cluster)

    capacity = {link: fabric.link_bytes_per_s(link) for link in range(fabric.num_links)}
    used = {link for route, _ in flows.values() for link in route}
    ends = ends_of(flows, {link: capacity[link] for link in used})
    for rank in range(n):
        # A message arrives its latency after it has left; a rank is done with its last one.
        times = [end_s for (src, _), end_s in ends.items() if src == rank]
        times += [
            end_s + fabric.latency_s(src, rank) for (src, dst), end_s in ends.items() if dst == rank
        ]
        overhead_s = cluster.overhead_s
        assert one.rank_time_s[rank] == pytest.approx(max(times) + overhead_s, rel=1e-9)
    assert math.isclose(one.time_s, max(one.rank_time_s))
