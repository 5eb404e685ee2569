"""The ranks of a session find each other; the errors of each rank when they do not."""

from __future__ import annotations

import os
import random
import signal
import socket
import time

import pytest

from pycoll import errors
from pycoll._core import bootstrap

pytestmark = pytest.mark.ranks


def env(rank: int, num_ranks: int, port: int, token: str = "secret") -> bootstrap.LaunchEnv:
    return bootstrap.LaunchEnv(rank, num_ranks, "127.0.0.1", port, token)


def join_and_meet(rank: int, num_ranks: int, port: int, delay_s: float = 0) -> tuple[str, bytes]:
    """Joins, forms the local group, and reads what the next rank wrote into the store."""
    time.sleep(delay_s)
    session = bootstrap.join(env(rank, num_ranks, port), 10)
    session.set(f"from/{rank}", str(rank))
    word = session.get(f"from/{(rank + 1) % num_ranks}", 10)
    group = bootstrap.form_local_group(session.name, rank, num_ranks, 4096, session.token, 10)
    name = session.name
    session.close()
    group.close()
    return name, word


def test_join_of_all_ranks_in_any_order_gives_one_session_each_time(ranks, port):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    choose = random.Random(seed)
    sizes = [1, 2, 3, 8, *(choose.randrange(2, 6) for _ in range(8))]
    names = set()
    for num_ranks in sizes:
        delays = [choose.choice([0, 0, 0.002, 0.02]) for _ in range(num_ranks)]
        order = choose.sample(range(num_ranks), num_ranks)
        outcomes = ranks.run(
            lambda rank, n=num_ranks, d=delays: join_and_meet(rank, n, port, d[rank]), order
        )
        assert [outcome.text for outcome in outcomes] == [""] * num_ranks
        names |= {outcome.value[0] for outcome in outcomes}
        for rank, outcome in zip(order, outcomes, strict=True):
            assert outcome.value[1] == str((rank + 1) % num_ranks).encode()
            assert outcome.num_fds_leaked == 0
    assert len(names) == len(sizes)
    assert {len(name) for name in names} == {32}


def test_join_again_in_the_same_processes_never_mixes_sessions(ranks, port):
    def join_often(rank: int) -> list[str]:
        names = []
        for _ in range(20):
            session = bootstrap.join(env(rank, 3, port), 10)
            names.append(session.name)
            session.close()  # without waiting for another rank
        return names

    outcomes = ranks.run(join_often, range(3))
    assert [outcome.text for outcome in outcomes] == [""] * 3
    assert outcomes[0].value == outcomes[1].value == outcomes[2].value
    assert len(set(outcomes[0].value)) == 20


def test_late_rank_zero_is_waited_for(ranks, port):
    delays = {0: 0.6, 1: 0.0, 2: 0.1}
    outcomes = ranks.run(lambda rank: join_and_meet(rank, 3, port, delays[rank]), range(3))
    assert [outcome.text for outcome in outcomes] == [""] * 3


def test_missing_ranks_are_named_on_every_rank_that_joined(ranks, port):
    present = [7, 0, 3, 1, 4, 6]
    outcomes = ranks.run(lambda rank: bootstrap.join(env(rank, 8, port), 1), present)
    for outcome in outcomes:
        assert outcome.error == "TimeoutError"
        assert outcome.text.startswith("ranks 2, 5 of 8 did not join within 1 s:")
        assert outcome.num_fds_leaked == 0
    assert len({outcome.text for outcome in outcomes}) == 1


def test_first_deadline_to_pass_ends_the_joining_for_all(ranks, port):
    timeouts = {0: 30.0, 1: 30.0, 2: 0.5}
    outcomes = ranks.run(lambda rank: bootstrap.join(env(rank, 4, port), timeouts[rank]), range(3))
    for outcome in outcomes:
        assert outcome.error == "TimeoutError"
        assert outcome.text.startswith("rank 3 of 4 did not join within 0.5 s")
        assert outcome.seconds < 20


def test_missing_rank_zero_is_asked_for(ranks, port):
    outcomes = ranks.run(lambda rank: bootstrap.join(env(rank, 3, port), 0.3), [1, 2])
    for rank, outcome in zip([1, 2], outcomes, strict=True):
        assert outcome.error == "TimeoutError"
        assert outcome.text.startswith(f"rank {rank} could not reach the store at 127.0.0.1:{port}")
        assert outcome.num_fds_leaked == 0


def test_rank_with_another_token_is_refused_and_reported_missing(ranks, port):
    tokens = {0: "secret", 1: "secret", 2: "guess"}
    outcomes = ranks.run(
        lambda rank: bootstrap.join(env(rank, 3, port, tokens[rank]), 0.7), range(3)
    )
    assert [outcome.error for outcome in outcomes] == ["TimeoutError", "TimeoutError", "UsageError"]
    assert "rank 2 of 3 did not join" in outcomes[0].text
    assert "PYCOLL_TOKEN" in outcomes[2].text


def test_ranks_with_different_world_sizes_all_raise(ranks, port):
    sizes = {0: 4, 1: 4, 2: 3}

    def join(rank: int) -> None:
        time.sleep(0.5 if rank == 2 else 0)
        bootstrap.join(env(rank, sizes[rank], port), 10)

    outcomes = ranks.run(join, range(3))
    for outcome in outcomes:
        assert outcome.error == "UsageError"
        assert "rank 2 was started for a world of 3 ranks, rank 0 for one of 4" in outcome.text
        assert outcome.seconds < 20


def test_rank_zero_killed_while_ranks_join_is_named_at_once(ranks, port):
    pids = [ranks.start(lambda r=rank: bootstrap.join(env(r, 4, port), 30)) for rank in range(3)]
    time.sleep(0.5)  # rank 3 never comes
    os.kill(pids[0], signal.SIGKILL)
    for pid in pids[1:]:
        outcome = ranks.outcome(pid)
        assert (outcome.error, outcome.rank) == ("PeerDiedError", 0)
        assert outcome.seconds < 20
        assert outcome.num_fds_leaked == 0


def test_one_rank_joins_although_its_port_is_in_use():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        session = bootstrap.join(env(0, 1, taken.getsockname()[1]), 5)
        session.set("key", b"value")
        assert session.get("key", 5) == b"value"
        session.close()


def test_closed_session_says_so():
    session = bootstrap.join(env(0, 1, 0), 5)
    session.close()
    session.close()
    with pytest.raises(errors.UsageError, match="the session is closed"):
        session.get("key", 5)
