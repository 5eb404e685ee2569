"""`pycoll doctor --hosts`: merges the reports of each host's own doctor.

A program like ssh starts `pycoll doctor --json` on each host. The state of a rank is taken from its
own host. Hosts have different clocks, so times are transferred as ages.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from pycoll.errors import UsageError
from pycoll.launch.remote_hosts import host_names, over_there, ssh_words
from pycoll.observe.jobs import Group, Rank

_PATIENCE_S = 30.0  # longest wait for an answer


def ask(hosts: str, ssh: str | None, job: str | None) -> tuple[list[Group], list[str]]:
    """Queries all hosts at once.

    Args:
        hosts: names of the hosts, such as "a,b", as ssh knows them.
        ssh: command to use instead of ssh, with options; None: PYCOLL_SSH, or ssh.
        job: beginning of a job's name; the stacks of its ranks are taken, too. None: all jobs.

    Returns:
        The groups, each with the ranks of all hosts; and a text for each host that did not answer.

    Raises:
        UsageError: a name is empty, or no host answers.
    """
    words = [sys.executable, "-m", "pycoll", "doctor", "--json"]
    words += [] if job is None else [job, "--stacks"]
    names = host_names(hosts)
    asked = [
        subprocess.Popen(
            [*ssh_words(ssh), name, over_there(words)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "NO_COLOR": "1"},
        )
        for name in names
    ]
    answers: dict[str, list[dict[str, Any]]] = {}
    silent = []
    for name, process in zip(names, asked, strict=True):
        try:
            out, error = process.communicate(timeout=_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            out, error = "", f"no answer within {_PATIENCE_S:g} s"
        try:
            answers[name] = json.loads(out)
        except ValueError:
            # A host without running ranks of the job also exits with an error text.
            lines = [line.strip(" \u2502|") for line in error.splitlines() if line.strip()]
            silent.append(f"host {name}: {' '.join(lines) or 'no answer'}")
    if not answers:
        raise UsageError("; ".join(silent))
    return merge(answers), silent


def merge(answers: dict[str, list[dict[str, Any]]]) -> list[Group]:
    """Merges the output of `pycoll doctor --json` of all hosts into one group per name."""
    groups: dict[str, Group] = {}
    for host, of_host in answers.items():
        for facts in of_host:
            group = groups.get(facts["group"])
            if group is None:
                ranks = [_absent(rank) for rank in range(facts["size"])]
                group = Group(facts["group"], facts["size"], facts["now_ns"], None, ranks, None)
                groups[facts["group"]] = group
            group.failure = group.failure or facts["failure"]
            later_ns = group.now_ns - facts["now_ns"]
            for row in facts["ranks"]:
                if row["is_here"] or (row["pid"] and group.ranks[row["rank"]].host is None):
                    group.ranks[row["rank"]] = _rank(row, host, later_ns)
    return sorted(groups.values(), key=lambda group: (group.job, group.name))


def _absent(rank: int) -> Rank:
    why = "its host was not queried"
    return Rank(rank, None, "elsewhere", None, [], {"sequence": 0}, None, why, False)


def _rank(row: dict[str, Any], host: str, later_ns: int) -> Rank:
    for record in filter(None, [row["last"], *row["messages"]]):
        for key in ("entered_ns", "finished_ns"):
            if record[key] is not None:
                record[key] += later_ns
    return Rank(
        rank=row["rank"],
        pid=row["pid"],
        state=row["state"],
        last=row["last"],
        messages=row["messages"],
        control={"sequence": row["sequence"]},
        stack=row["stack"],
        why_no_stack=row["why_no_stack"],
        is_here=row["is_here"],
        host=host,
    )


__all__ = ["ask", "merge"]
