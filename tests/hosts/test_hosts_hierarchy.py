"""Schedules for hosts of several ranks: the bytes that leave a host, and when they are chosen."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest
from host_jobs import TO_HOSTS, differences_from_formulas, sent_per_message_of
from tuning_tables import CORES, size

import pycoll
from pycoll import tuning

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(120)]

Comm = pycoll.Communicator


def explanation(comm: Comm) -> str:
    return comm.explain("all_reduce", 16 << 20, np.float32)


def chosen(text: str) -> str:
    """The algorithm that an explanation names first."""
    return text.splitlines()[0]


def test_hierarchical_is_chosen_and_sends_the_bytes_of_the_formula(two):
    def sent(comm: Comm) -> dict[str, float]:
        return sent_per_message_of(comm, TO_HOSTS)

    texts, sent_by_rank = two.run_jobs([explanation, sent], 2)
    assert all("hierarchical" in chosen(text) for text in texts), texts[0]
    assert not differences_from_formulas(list(sent_by_rank[::2]), 2)


def explanation_without_others(comm: Comm) -> str:
    if comm.rank:
        comm.close()
        return ""
    while any(one["state"] == "here" for one in comm._ranks()[1:]):
        time.sleep(0.01)
    return explanation(comm)


def test_ranks_that_have_left_are_on_their_hosts_in_an_explanation(two):
    (texts,) = two.run_jobs([explanation_without_others], 2)
    assert "hierarchical" in chosen(texts[0]) and " inside network" in texts[0]


def test_table_measured_on_one_host_says_nothing_of_several(two, tmp_path, monkeypatch):
    rows = [
        size(ranks=4, arrays=arrays, nbytes=nbytes, cores=cores, tree__simple=1e-6)
        for arrays in ("plain", "mapped")
        for nbytes in (4096, 64 << 20)
        for cores in (CORES, 2 * CORES)
    ]
    monkeypatch.setenv("PYCOLL_CACHE_DIR", str(tmp_path))
    tuning.save([], rows)
    (texts,) = two.run_jobs([explanation], 2)
    assert all("hierarchical" in chosen(text) for text in texts), texts[0]


def test_costs_between_hosts_are_those_of_the_network(two):
    def costs(comm: Comm) -> str:
        texts = [comm.explain("all_reduce", 1 << 20)]
        part = comm.split(0, key=-comm.rank)  # inherits the costs
        texts.append(part.explain("all_reduce", 1 << 20))
        return "\n".join(line for text in texts for line in text.splitlines() if "Gbit/s" in line)

    two.set_rate("100mbit")
    try:
        (texts,) = two.run_jobs([costs], 2)
    finally:
        two.set_rate(None)
    assert len(set(texts)) == 1
    found = re.findall(r"between hosts: (.+) us and (.+) Gbit/s, measured", texts[0])
    assert len(found) == 2 and found[0] == found[1]
    # The first burst passes at once, and other programs on this machine cost time.
    assert 0.02 < float(found[0][1]) < 0.25
