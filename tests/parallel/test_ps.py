"""Parameter servers whose links are calls: modes, staleness, copies, filters, messages, errors."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest
import torch
from ps_worlds import World
from torch import nn

from pycoll import Error, PeerDiedError, TimeoutError, UsageError
from pycoll import parallel as pc
from pycoll.parallel.ps import snapshot
from pycoll.parallel.ps.consistency import Damping, consistency_of
from pycoll.parallel.ps.keys import HashRing, Layout, Table
from pycoll.parallel.ps.messages import HEADER_BYTES, Kind, Message
from pycoll.parallel.ps.run import start
from pycoll.parallel.ps.tables import BLOCK

pytestmark = [pytest.mark.pure, pytest.mark.timeout(60)]


def weight_of(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=torch.float64))


def registered(world: World, *values: float) -> list[nn.Parameter]:
    """A weight for each worker, all with the first one's values."""
    weights = [weight_of(*values) for _ in world.workers]
    for worker, weight in zip(world.workers, weights, strict=True):
        worker.register([weight])
    return weights


def test_keys_move_only_from_a_server_that_left():
    rows = np.arange(20_000)
    three, four = HashRing(3).owners("a", rows)[:, 0], HashRing(4).owners("a", rows)[:, 0]
    shares = np.bincount(four, minlength=4) / len(rows)
    assert shares == pytest.approx(np.full(4, 0.25), abs=0.1)
    moved = three != four
    assert (four[moved] == 3).all() and moved.mean() == pytest.approx(0.25, abs=0.1)
    owners = HashRing(4, copies=3).owners("b", rows)
    assert all(len(set(row)) == 3 for row in owners[:100].tolist())


def test_layout_counts_every_row_once_also_after_a_death():
    table = Table(0, "t", 1000, 4, torch.float32)
    layout = Layout(table, HashRing(3, copies=2))
    for dead in (0, 0b010, 0b011):
        rows = [layout.rows_of(layout.decided_by(s, dead)) for s in range(3)]
        assert sorted(np.concatenate(rows).tolist()) == list(range(1000))
        assert all((layout.servers_of(of, dead) == s).all() for s, of in enumerate(rows))
    with pytest.raises(PeerDiedError, match="had no other copy: start with copies=2"):
        layout.decided_by(2, 0b111)


@pytest.mark.parametrize(
    "make", [pc.ps.SGD(0.1, momentum=0.9), pc.ps.Adagrad(0.1), pc.ps.Adam(0.1)]
)
def test_one_async_worker_is_plain_torch_to_the_bits(make):
    torch.manual_seed(0)
    plain = nn.Linear(40, 60).double()  # 2460 weights: three blocks
    served = nn.Linear(40, 60).double()
    served.load_state_dict(plain.state_dict())
    optimizer = make(list(plain.parameters()), False)
    (worker,) = World(3, 1, optimizer=make).workers
    worker.register(served)
    for _ in range(5):
        x = torch.randn(8, 40, dtype=torch.float64)
        worker.pull()
        served(x).square().mean().backward()
        worker.push()
        worker.clock()
        optimizer.zero_grad()
        plain(x).square().mean().backward()
        optimizer.step()
    worker.pull()
    for a, b in zip(plain.parameters(), served.parameters(), strict=True):
        assert torch.equal(a, b)


def test_staleness_counts_the_updates_between_pull_and_push(tmp_path):
    world = World(2, 4)
    weights = registered(world, 1.0)
    for worker in world.workers:
        worker.pull()
    for _ in range(3):
        for worker, weight in zip(world.workers, weights, strict=True):
            weight.grad = torch.ones_like(weight)
            worker.push()
            worker.pull()
    report = world.workers[0].report()
    assert report.staleness == {0: 1, 1: 1, 2: 1, 3: 9}  # P - 1, but for the first turn
    assert "mean staleness 2.50" in str(report) and report.num_updates == 12
    pytest.importorskip("matplotlib")
    report.draw(str(tmp_path / "report.svg"))
    assert "staleness, mean 2.50" in (tmp_path / "report.svg").read_text()


def test_worker_that_is_late_inside_backward_is_named():
    """Half a second: within 6 steps, worker 2 sleeps for 50 ms in each backward pass."""
    world = World(2, 4)
    weights = registered(world, *[1.0] * 3000)

    def sleep(gradient):
        time.sleep(0.05)
        return gradient

    weights[2].register_hook(sleep)
    for _ in range(6):
        for worker, weight in zip(world.workers, weights, strict=True):
            worker.pull()
            weight.square().sum().backward()
            worker.push()
            worker.clock()
    report = world.workers[0].report()
    worker, factor = report.straggler
    assert worker == 2 and factor > 1.5
    assert f"worker 2 computes {factor:.1f} times as long as the others" in str(report)


def steps_of_a_quadratic(staleness: int, damping: Damping) -> tuple[float, pc.ps.Report]:
    """x, after 1500 gradients of x^2 / 2 that are all `staleness` updates old but the first."""
    world = World(1, staleness + 1, optimizer=pc.ps.SGD(0.2), damping=damping)
    weights = registered(world, 1.0)
    for worker in world.workers:
        worker.pull()
    for step in range(1500):
        worker, weight = (of[step % len(weights)] for of in (world.workers, weights))
        weight.grad = weight.detach().clone()
        worker.push()
        worker.pull()
    return abs(weight.item()), world.workers[0].report()


def test_stale_gradients_diverge_plain_and_converge_damped():
    """A second: a gradient of x^2 / 2 with lr 0.2 tolerates a staleness of 7."""
    plain, report = steps_of_a_quadratic(50, Damping())
    assert plain > 1e3 and report.staleness[50] == 1500 - 50
    damped, _ = steps_of_a_quadratic(50, Damping(scales=True))
    assert damped < 0.02
    capped, report = steps_of_a_quadratic(50, Damping(cap=7))
    assert report.dropped["stale"] > 1000 and capped < 0.5


def test_ssp_keeps_clocks_together_under_random_delays():
    """A second: 4 workers make 1,000 steps with delays, and the servers check each pull."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    for staleness in (0, 2):
        world = World(2, 4, "ssp", staleness=staleness)
        weights = registered(world, 1.0)
        gaps: list[int] = []

        def work(number, world=world, weights=weights, gaps=gaps, staleness=staleness):
            worker, delays = world.workers[number], random.Random(seed + number)
            for _ in range(125):
                worker.pull()
                clocks = world.servers[0].members.clocks.values()
                gaps.append(worker.steps - min(clocks))
                time.sleep(delays.choice((0, 0, 0, 0.001, 0.002)) * (1 + 4 * (number == 0)) / 4)
                weights[number].grad = torch.ones_like(weights[number])
                worker.push()
                worker.clock()

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        report = world.workers[0].report()
        assert report.clocks == dict.fromkeys(range(4), 125)
        assert report.largest_gap <= staleness and max(gaps) <= staleness
        assert report.num_updates == 500
        assert report.largest_gap == staleness  # the bound was reached


def test_ssp_pull_of_a_worker_far_ahead_waits_and_names_the_slowest():
    world = World(1, 2, "ssp", staleness=1, timeout_s=0.05)
    registered(world, 1.0)
    worker = world.workers[0]
    for _ in range(2):
        worker.clock()
    text = r"worker 0 at clock 2 waited 0.05 s for worker 1 at clock 0 \(Bounded\(staleness=1\)\)"
    with pytest.raises(TimeoutError, match=text):
        worker.pull()
    world.servers[0].forget_worker(1)  # it died
    worker.pull()


def test_ksync_steps_by_the_first_k_and_drops_the_late():
    world = World(1, 3, "ksync", k=2, optimizer=pc.ps.SGD(1.0))
    weights = registered(world, 0.0)
    for worker in world.workers:
        worker.pull()
    for worker, weight, gradient in zip(world.workers, weights, (1.0, 3.0, 100.0), strict=True):
        weight.grad = torch.full_like(weight, gradient)
        if worker.number == 2:
            assert worker.is_late()
        assert worker.push() == (worker.number == 2)
        worker.clock()
    late = world.workers[2]
    late.pull()
    assert weights[2].item() == -2.0 and late.steps == 1 and not late.is_late()
    assert late.report().dropped == {"late": 1}


def test_late_worker_goes_on_with_the_current_step():
    world = World(1, 3, "sync", backup=1, optimizer=pc.ps.SGD(1.0))
    weights = registered(world, 0.0)
    for _ in range(4):
        for worker, weight in zip(world.workers[:2], weights, strict=False):
            worker.pull()
            weight.grad = torch.ones_like(weight)
            worker.push()
            worker.clock()
    world.workers[2].pull()
    assert world.workers[2].steps == 4 and weights[2].item() == -4


def test_step_does_not_wait_for_a_worker_that_left():
    world = World(2, 3, "sync", optimizer=pc.ps.SGD(1.0))
    weights = registered(world, 0.0)
    for worker, weight in zip(world.workers[:2], weights, strict=False):
        weight.grad = torch.full_like(weight, 1.0 + worker.number)
        worker.push()
        worker.clock()
    world.workers[2].close()
    world.workers[0].pull()
    assert weights[0].item() == -1.5


def test_second_push_at_one_clock_is_refused():
    world = World(1, 2, "sync")
    registered(world, 0.0)
    world.workers[0].push()
    with pytest.raises(UsageError, match=r"worker 0 has pushed at clock 0 already.*call clock\(\)"):
        world.workers[0].push()


def test_push_before_the_first_values_waits_for_them():
    """They would overwrite it."""
    world = World(2, 2, "async", optimizer=pc.ps.SGD(1.0), copies=2)
    weights = [weight_of(5.0) for _ in world.workers]

    def early() -> None:
        world.workers[1].register([weights[1]])
        weights[1].grad = torch.ones_like(weights[1])
        world.workers[1].push()

    thread = threading.Thread(target=early)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    world.workers[0].register([weights[0]])
    thread.join()
    world.workers[0].pull()
    assert weights[0].item() == 4.0


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("kind", [Kind.PUSH, Kind.PULL])
def test_killed_server_loses_no_acknowledged_update(mode, kind):
    """Server 1 of 2 makes an update, or the answer to a pull, and dies before the worker hears."""
    make = pc.ps.Adagrad(0.1)
    found = []
    for killed_at in (None, 3):
        torch.manual_seed(1)
        world = World(2, 2, mode, copies=2, optimizer=make)
        weights = [nn.Parameter(torch.zeros(5000, dtype=torch.float64)) for _ in range(2)]
        tables = []
        for each, weight in zip(world.workers, weights, strict=True):
            each.register([weight])
            tables.append(each.table("t", 50, 3, dtype=torch.float64))
        for step in range(6):
            if step == killed_at:
                world.dies_after = (1, kind)
            for each, weight, table in zip(world.workers, weights, tables, strict=True):
                rows = torch.randperm(50)[:7].sort().values
                values = each.pull_rows(table, rows).requires_grad_()
                table.leaves.append((rows, values))
                values.grad = torch.randn_like(values)
                weight.grad = torch.randn_like(weight)
                each.push()
                each.clock()
        for each, weight, table in zip(world.workers, weights, tables, strict=True):
            each.pull()
            found.append((weight.detach().clone(), each.pull_rows(table, torch.arange(50))))
        assert (1 in world.dead) == (killed_at is not None)
    without, killed = found[0], found[2]
    assert all(torch.equal(a, b) for a, b in zip(without, killed, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(found[2], found[3], strict=True))


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("make", [pc.ps.Adam(0.1), pc.ps.Adagrad(0.1)])
def test_servers_that_die_in_turn_lose_nothing(mode, make):
    """Two of three servers: the first death leaves one copy, which is made again on the third."""
    found = []
    for kills in ({}, {2: 1, 4: 0}, {2: 2, 4: 1}, {3: 0, 4: 2}):
        torch.manual_seed(1)
        world = World(3, 2, mode, copies=2, optimizer=make)
        weights = [nn.Parameter(torch.zeros(9000, dtype=torch.float64)) for _ in range(2)]
        tables = []
        for each, weight in zip(world.workers, weights, strict=True):
            each.register([weight])
            tables.append(each.table("t", 50, 3, dtype=torch.float64))
        for step in range(6):
            for number, (each, weight) in enumerate(zip(world.workers, weights, strict=True)):
                if number == 1 and step in kills:  # in "sync" mode, a gradient is held
                    world.kill(kills[step])
                rows = torch.randperm(50)[:7].sort().values
                values = each.pull_rows(tables[number], rows).requires_grad_()
                tables[number].leaves.append((rows, values))
                values.grad = torch.randn_like(values)
                weight.grad = torch.randn_like(weight)
                each.push()
                each.clock()
        world.workers[0].pull()
        everything = world.workers[0].pull_rows(tables[0], torch.arange(50))
        found.append((weights[0].detach().clone(), everything))
        assert len(world.dead) == len(kills)
    for killed in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], killed, strict=True))


def test_servers_that_die_at_once_are_an_error_of_their_keys():
    world = World(3, 1, copies=2)
    (worker,) = world.workers
    worker.register([nn.Parameter(torch.zeros(20_000))])
    world.dead |= {0, 1}  # no server has heard of the other one's death before its own
    world.servers[2].forget_server(0)
    world.servers[2].forget_server(1)
    with pytest.raises(PeerDiedError, match=r"ended, and \d+ keys had no other copy"):
        worker.pull()


def test_table_registered_after_a_death_has_its_copies():
    world = World(3, 1, copies=2, optimizer=pc.ps.SGD(1.0))
    (worker,) = world.workers
    world.kill(1)
    weight = nn.Parameter(torch.zeros(20_000))
    worker.register([weight])
    weight.grad = torch.ones_like(weight)
    worker.push()
    world.kill(0)
    worker.pull()
    assert torch.equal(weight, torch.full_like(weight, -1))


def test_snapshot_of_a_shard_is_read_again_and_a_damaged_one_is_refused():
    state = {"a": [1, (2.5, None)], 3: torch.arange(5, dtype=torch.int32), "e": torch.zeros(0, 2)}
    body = snapshot.pack(state)
    found = snapshot.unpack(body, "server 1")
    assert found["a"] == state["a"] and torch.equal(found[3], state[3])
    assert found["e"].shape == (0, 2)
    for damaged in (body[:-8], torch.cat([body, body]), body[:20]):
        with pytest.raises(Error, match="server 1 sent"):
            snapshot.unpack(damaged, "server 1")


def test_dead_server_without_copies_is_an_error_of_each_worker():
    world = World(2, 2)
    weights = [nn.Parameter(torch.zeros(5000)) for _ in range(2)]
    for worker, weight in zip(world.workers, weights, strict=True):
        worker.register([weight])
    world.kill(1)
    for worker in world.workers:
        with pytest.raises(PeerDiedError, match=r"server 1 ended, and \d keys had no other copy"):
            worker.pull()


def test_end_of_the_last_server_is_an_error_and_leaves_the_weights():
    world = World(1, 1)
    (worker,) = world.workers
    weight = nn.Parameter(torch.ones(5000))
    worker.register([weight])
    world.kill(0)
    for _ in range(2):  # the one that hears of the death, and the next one
        with pytest.raises(PeerDiedError, match=r"server 0 ended, and \d keys had no other copy"):
            worker.pull()
        assert torch.equal(weight, torch.ones(5000))
    for call in (worker.is_late, worker.report):
        with pytest.raises(PeerDiedError, match="parameter server: all servers have ended"):
            call()
    worker.close()


def test_untouched_rows_stay_and_touched_ones_step():
    world = World(3, 1, optimizer=pc.ps.SGD(1.0))
    (worker,) = world.workers
    layer = worker.embedding("e", 100, 4, std=0.5, dtype=torch.float64)
    table = layer.table
    before = worker.pull_rows(table, torch.arange(100))
    assert before.std().item() == pytest.approx(0.5, rel=0.1)
    layer(torch.tensor([3, 7, 7])).sum().backward()
    worker.push()
    moved = worker.pull_rows(table, torch.arange(100)) - before
    assert moved[3].tolist() == pytest.approx([-1] * 4)
    assert moved[7].tolist() == pytest.approx([-2] * 4)
    assert int((moved != 0).any(1).sum()) == 2
    (other,) = World(2, 1).workers  # first values do not depend on the servers
    again = other.table("e", 100, 4, std=0.5, dtype=torch.float64)
    assert torch.equal(other.pull_rows(again, torch.arange(100)), before)


def test_filter_of_keys_sends_them_once_and_again_after_a_death():
    world = World(2, 1, copies=2, filters=lambda: [pc.ps.KeyCache()])
    (worker,) = world.workers
    table = worker.table("t", 100, 1)
    rows = torch.arange(0, 100, 3)
    sizes = []
    send = worker._servers.links[0].send
    worker._servers.links[0].send = lambda m: (sizes.append((m.count, m.body.numel())), send(m))
    first = worker.pull_rows(table, rows)
    assert torch.equal(worker.pull_rows(table, rows), first)
    assert sizes[0][0] > 0 and sizes[0][1] == 8 * sizes[0][0] and sizes[1] == (-2, 0)
    world.kill(1)  # now server 0 is asked for more keys, of which it knows no list
    assert torch.equal(worker.pull_rows(table, rows), first)
    assert sizes[-1][0] == len(rows)
    world.servers[0]._tables._key_lists.clear()  # as after many other lists
    assert torch.equal(worker.pull_rows(table, rows), first)


@pytest.mark.parametrize("first", [3.0, None])
def test_first_pull_of_rows_waits_for_worker_0(first):
    """Worker 1 registers, pulls and pushes before worker 0 has registered: nothing is lost."""
    early, zero = World(2, 2, optimizer=pc.ps.SGD(1.0)).workers[::-1]
    rows, pulled = torch.arange(9), []

    def pull_and_push():
        table = early.table("t", 9, 1, dtype=torch.float64)
        values = early.pull_rows(table, rows)
        pulled.append(values.detach().clone())
        values.grad = torch.ones_like(values)
        table.leaves.append((rows, values))
        early.push()

    thread = threading.Thread(target=pull_and_push)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive() and not pulled
    values = None if first is None else torch.full((9, 1), first)
    table = zero.table("t", 9, 1, dtype=torch.float64, values=values)
    thread.join()
    assert (pulled[0] == (first or 0.0)).all()
    assert (zero.pull_rows(table, rows) == (first or 0.0) - 1.0).all()


def test_filter_of_significance_sends_sums_that_have_grown():
    world = World(1, 1, optimizer=pc.ps.SGD(1.0), filters=lambda: [pc.ps.Significance(0.25)])
    (worker,) = world.workers
    table = worker.table("t", 4, 1, dtype=torch.float64)
    for _ in range(3):
        values = worker.pull_rows(table, torch.tensor([1, 2]))
        values.grad = torch.tensor([[0.1], [0.01]], dtype=torch.float64)
        table.leaves.append((torch.tensor([1, 2]), values))
        worker.push()
    found = worker.pull_rows(table, torch.arange(4)).view(-1).tolist()
    assert found == pytest.approx([0, -0.3, 0, 0])


def test_filter_of_kkt_leaves_out_zeros_that_stay_zero():
    world = World(1, 1, optimizer=pc.ps.Proximal(1.0, 0.5), filters=lambda: [pc.ps.KKT(0.5)])
    (worker,) = world.workers
    table = worker.table("t", 4, 1, dtype=torch.float64)
    sent = []
    for _ in range(2):
        rows = torch.arange(4)
        values = worker.pull_rows(table, rows)
        values.grad = torch.tensor([[0.1], [2.0], [-0.6], [0.0]], dtype=torch.float64)
        table.leaves.append((rows, values))
        push = worker._servers.links[0].send
        worker._servers.links[0].send = lambda m, push=push: (sent.append(m.count), push(m))
        worker.push()
        del worker._servers.links[0].send
        assert sent[-1] == 2
    found = worker.pull_rows(table, torch.arange(4)).view(-1).tolist()
    assert found == pytest.approx([0, -3.0, 0.2, 0])


def test_int8_gradients_lose_nothing_in_the_end():
    world = World(2, 1, optimizer=pc.ps.SGD(1.0), filters=lambda: [pc.ps.Int8Feedback()])
    (worker,) = world.workers
    torch.manual_seed(2)
    gradient = torch.randn(3000, dtype=torch.float64)
    weight = nn.Parameter(torch.zeros(3000, dtype=torch.float64))
    worker.register([weight])
    for _ in range(50):
        weight.grad = gradient.clone()
        worker.push()
    worker.pull()
    assert torch.allclose(weight / -50, gradient, atol=0.001)  # one rounding: up to 0.015


@pytest.mark.parametrize("every", [1, 3])
def test_downpour_of_one_worker_is_plain_sgd(every):
    """With pulls and pushes in each step to the bits; with rarer ones, SGD steps add up as well."""
    torch.manual_seed(3)
    plain, served = nn.Linear(30, 40).double(), nn.Linear(30, 40).double()
    served.load_state_dict(plain.state_dict())
    (worker,) = World(2, 1, optimizer=pc.ps.SGD(0.1)).workers
    worker.register(served)
    local = torch.optim.SGD(served.parameters(), lr=0.1)
    downpour = pc.ps.Downpour(worker, local, nfetch=every, npush=every)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(7):
        x = torch.randn(8, 30, dtype=torch.float64)
        served(x).square().mean().backward()
        downpour.step()
        optimizer.zero_grad()
        plain(x).square().mean().backward()
        optimizer.step()
    pushes = worker._num_pushes
    downpour.finish()
    for a, b in zip(plain.parameters(), served.parameters(), strict=True):
        assert torch.equal(a, b) if every == 1 else torch.allclose(a, b, atol=1e-12)
    assert pushes == 7 // every and worker._num_pushes == -(-7 // every)


def test_downpour_warms_up_with_the_first_worker():
    world = World(1, 2)
    weights = registered(world, 1.0)
    made = []

    def second():
        local = torch.optim.SGD([weights[1]], lr=0.1)
        made.append(pc.ps.Downpour(world.workers[1], local, warm_start=3, timeout_s=20))
        made.append(world.servers[0].members.clocks[0])

    thread = threading.Thread(target=second)
    thread.start()
    first = pc.ps.Downpour(world.workers[0], torch.optim.SGD([weights[0]], lr=0.1))
    for _ in range(3):
        assert not made
        weights[0].grad = torch.ones_like(weights[0])
        first.step()
        time.sleep(0.02)
    thread.join(20)
    assert made[1] >= 3
    with pytest.raises(UsageError, match="nfetch=0, npush=1"):
        pc.ps.Downpour(world.workers[0], torch.optim.SGD([weights[0]], lr=0.1), nfetch=0)
    gathering = World(1, 1, "sync").workers[0]
    with pytest.raises(UsageError, match="expected a worker of mode='async'"):
        pc.ps.Downpour(gathering, torch.optim.SGD([weights[0]], lr=0.1))


@pytest.mark.parametrize(
    "options, text",
    [
        ({"mode": "bsp"}, "mode='bsp', expected one of sync, async, ssp, ksync"),
        ({"mode": "ssp"}, "mode='ssp' needs staleness="),
        ({"mode": "ssp", "staleness": -1}, "staleness=-1, expected 0 or more clocks"),
        ({"mode": "async", "staleness": 3}, "mode='async' has no staleness="),
        ({"mode": "ksync", "k": 5}, "k=5, and there are 4 workers: expected 1 to 4"),
        ({"mode": "ksync"}, "mode='ksync' needs k="),
        ({"mode": "sync", "backup": 4}, "backup=4 with mode='sync' and 4 workers"),
    ],
)
def test_wrong_options_are_refused_in_a_sentence(options, text):
    with pytest.raises(UsageError, match=text):
        consistency_of(num_workers=4, **options)


@pytest.mark.parametrize(
    "options, text",
    [
        ({"servers": 0}, "servers=0: expected at least one server"),
        ({"servers": 4}, "4 servers on 4 ranks leave no worker"),
        ({"servers": [1, 1]}, r"servers=\[1, 1\] on 4 ranks: expected different ranks"),
        ({"servers": 2, "copies": 3}, "copies=3 on 2 servers: expected 1 to 2"),
        ({"max_staleness": -1}, "max_staleness=-1, expected 0 or more"),
        ({"servers": 2, "listen": ["a:1"]}, "listen has 1 addresses, expected one for each of 2"),
    ],
)
def test_wrong_roles_are_refused_before_any_message(options, text):
    class FourRanks:
        size, rank, timeout_s = 4, 3, 1.0

    with pytest.raises(UsageError, match=text):
        start(FourRanks(), **options)


def test_wrong_keys_tables_and_messages_are_refused():
    world = World(2, 2)
    worker, other = world.workers
    table = worker.table("t", 10, 2)
    with pytest.raises(UsageError, match="no server has key 10 of table 't' of 10 x 2"):
        worker.pull_rows(table, torch.tensor([3, 10]))
    with pytest.raises(UsageError, match="worker 1 registers table 't' of 11 x 2.*same order"):
        other.table("t", 11, 2)
    server = world.servers[0]

    def refused(message: Message) -> str:
        answer = server.handle(message)
        assert answer.kind == Kind.FAILED
        return answer.body.numpy().tobytes().decode()

    assert "table 7 is not registered at server 0" in refused(Message(Kind.PULL, 7))
    key = torch.tensor([99]).view(torch.uint8)
    assert "no server has key 99" in refused(Message(Kind.PULL, 0, count=1, body=key))
    assert "0 bytes for" in refused(Message(Kind.PUSH, 0, number=1))
    assert "5 keys in 8 bytes" in refused(Message(Kind.PULL, 0, count=5, body=key))
    assert "ANSWER is no question" in refused(Message(Kind.ANSWER))
    with pytest.raises(Error, match="sent a message of kind 99"):
        header = Message(Kind.PULL).header()
        header[0] = 99
        Message.from_header(header, "rank 1")
    assert len(Message(Kind.PULL).header()) == HEADER_BYTES


def test_blocks_of_a_model_are_filled_up():
    world = World(1, 1)
    (worker,) = world.workers
    made = worker.register(nn.Linear(BLOCK, 1))  # BLOCK + 1 weights
    assert (made.table.rows, made.table.dim) == (2, BLOCK)
