"""A rank's record of messages; and errors, files and traces that use it."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from worlds import Comm, impatient, on_ranks

from pycoll import AbortedError, PeerDiedError, run_ranks
from pycoll import TimeoutError as PycollTimeoutError

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]


def line_of(text: str) -> int:
    """Number of the line of this file that holds the text, which stands here in two parts."""
    return 1 + next(
        i for i, line in enumerate(Path(__file__).read_text().splitlines()) if text in line
    )


@on_ranks(3)
def test_record_holds_both_ends_of_a_message(comm):
    for count in (1, 1000, 100_000):
        part = comm.split(0)
        x = np.full(count, comm.rank, np.float32)
        before = time.monotonic_ns()
        if comm.rank == 0:
            part.send(x, 1, 7)  # here: a send
            part.recv_any(x, 8)
        elif comm.rank == 1:
            part.recv(x, 0, tag=7, async_op=True).wait()
            part.send(x, 0, 8)
        part.barrier()
        found = part.message_record()
        after = time.monotonic_ns()
        for record in found:
            assert before <= record["entered_ns"] <= record["finished_ns"] <= after
            assert record["failed"] is False and record["rank"] == comm.rank
            assert (record["dtype"], record["count"], record["nbytes"]) == ("f32", count, 4 * count)
        everyone = part.message_record(all_ranks=True)
        assert [record["rank"] for record in everyone] == [0, 0, 1, 1]
        keys = ("number", "kind", "peer", "source", "tag", "blocking")
        said = [tuple(record[key] for key in keys) for record in found]
        if comm.rank == 0:
            assert said == [(1, "send", 1, None, 7, True), (2, "recv", None, 1, 8, True)]
            here = f"test_message_record.py:{line_of('# here: ' + 'a send')} in "
            assert here in found[0]["site"]
        elif comm.rank == 1:
            assert said == [(1, "recv", 0, 0, 7, False), (2, "send", 0, None, 8, True)]
        else:
            assert said == []


@on_ranks(processes=[1])
def test_record_keeps_the_last_1024_messages(comm):
    x = np.zeros(1)
    late = comm.recv(x, 0, 9999, async_op=True)  # its place is taken while it goes on
    for i in range(1500):
        comm.send(x, 0, i)
        comm.recv(x, 0, i)
    comm.send(x, 0, 9999)
    late.wait()
    found = comm.message_record()
    assert [record["number"] for record in found] == list(range(3002 - 1023, 3003))
    assert all(record["finished_ns"] is not None for record in found)


@on_ranks(2)
def test_record_shows_a_message_that_goes_on(comm):
    if comm.rank == 1:
        comm.barrier()
        comm.recv(np.zeros(100_000), 0)
        return
    sent = comm.send(np.zeros(100_000), 1, async_op=True)
    (record,) = comm.message_record()
    comm.barrier()
    sent.wait()
    (ended,) = comm.message_record()
    assert record["finished_ns"] is None and ended["finished_ns"] is not None


@pytest.mark.parametrize(("threads", "then"), [(False, "recv"), (True, "barrier")])
def test_timeout_of_an_asynchronous_send_is_named_by_calls_that_fail_after_it(threads, then):
    def work(comm: Comm) -> tuple[str, str]:
        if comm.rank == 0:
            time.sleep(1.6)
            with pytest.raises(AbortedError) as caught:
                comm.barrier()
            return str(caught.value), ""
        if comm.rank == 1:
            sent = comm.send(np.zeros(25_000, np.float32), 0, 7, async_op=True)  # here: too late
        time.sleep(0.6)
        with pytest.raises(AbortedError) as caught:
            if then == "recv":
                comm.recv(np.zeros(4, np.float32), 0)
            else:
                comm.barrier()
        if comm.rank == 2:
            return str(caught.value), ""
        with pytest.raises(PycollTimeoutError) as own:
            sent.wait()
        return str(caught.value), str(own.value)

    texts = run_ranks(impatient(work, 1), 3, threads=threads)
    for late, _ in texts:
        assert "cannot go on: rank 1's send(25000 f32, tag 7, to rank 0), called at " in late
        assert f"test_message_record.py:{line_of('# here: ' + 'too late')} in" in late
        assert ", timed out waiting for rank 0; make a new communicator" in late
    assert texts[1][1].startswith("send(25000 f32, tag 7, to rank 0): rank 1 of 3 waited 1 s")


@on_ranks(processes=[3])
def test_peer_that_left_is_named_with_the_message_that_needed_it(comm):
    if comm.rank == 2:
        comm.close()
    elif comm.rank == 1:
        with pytest.raises(PeerDiedError) as caught:
            comm.recv(np.zeros(3), 0)
        text = "rank 2 closed its communicator, which rank 0's send(100000 f64, tag 5"
        assert text in str(caught.value)
    else:
        sent = comm.send(np.zeros(100_000), 2, 5, async_op=True)
        with pytest.raises(PeerDiedError) as caught:
            sent.wait()
        assert str(caught.value).startswith("send(100000 f64, tag 5, to rank 2): ")
        assert "needed" not in str(caught.value)


def test_failed_message_dumps_the_record_and_trace_shows_it(tmp_path, monkeypatch):
    from pycoll.observe import trace

    monkeypatch.setenv("PYCOLL_FLIGHT_DIR", str(tmp_path / "flight"))

    def work(comm: Comm) -> None:
        x = np.zeros(3, np.float32)
        comm.all_reduce(x)
        if comm.rank == 0:
            comm.send(x, 1, 3)
            comm.recv(x, 1, 4, async_op=True).wait()
            with pytest.raises(PycollTimeoutError):
                comm.recv_any(x, 9)
        else:
            comm.recv(x, 0, 3)
            comm.send(x, 0, 4)
            time.sleep(1.6)

    run_ranks(impatient(work, 1), 2)
    (file,) = (tmp_path / "flight").glob("*-rank_0.json")
    found = json.loads(file.read_text())
    names = [entry["profiling_name"] for entry in found["entries"]]
    assert names[0] == "pycoll:all_reduce"
    assert names[1:] == ["pycoll:send 0->1", "pycoll:recv 0<-1", "pycoll:recv 0<-any"]
    sent, received, failed = found["entries"][1:]
    assert sent["is_p2p"] and sent["state"] == received["state"] == "completed"
    assert (failed["state"], failed["pycoll"]["failed"]) == ("started", True)
    assert [entry["p2p_seq_id"] for entry in (sent, received, failed)] == [1, 2, 3]
    assert sent["pycoll"]["tag"] == 3 and sent["input_sizes"] == [[3]]
    assert sent["frames"][0]["filename"].endswith("test_message_record.py")

    flights = trace.read([tmp_path / "flight"])
    events = trace.chrome_trace(flights)["traceEvents"]
    messages = [event for event in events if event.get("cat") == "message"]
    assert {event["ph"] for event in messages} == {"X", "b", "e"}
    slices = {event["name"]: event for event in messages if event["ph"] == "X"}
    assert slices["send 0->1"]["args"]["bytes"] == 12
    assert slices["send 0->1"]["args"]["peer"] == 1 and slices["send 0->1"]["args"]["tag"] == 3
    assert slices["recv 0<-any"]["args"]["state"] == "failed"
    tracks = {event["tid"] for event in events if event.get("cat") == "collective"}
    assert not tracks & {event["tid"] for event in messages}
    ((name, ranks),) = flights.items()
    assert [row["collective"] for row in trace.summary(ranks)] == ["all_reduce"]
    assert trace.write_pickles(flights, tmp_path / "pickles") == {"recv": 1}
