"""Launchers over several hosts: torchrun, srun, and what `pycoll info` says of the job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import mpi_kit
import numpy as np
import pytest
from namespaces import TOKEN, Network, free_port, launcher_script, values
from processes import wait_for_pids, wait_until_gone

import pycoll

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

ROOT = Path(pycoll.__file__).parents[1]
ENV = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def run_on_all(network: Network, words: list[str], timeout_s: float = 120, **env: str) -> list[str]:
    """Runs the program on every host, with its number for `{host}`. Returns the output of each."""
    started = []
    for host in range(network.n):
        own = [word.format(host=host) for word in words]
        started.append(
            network.command(host, own, **ENV, **{k: v.format(host=host) for k, v in env.items()})
        )
    texts = []
    try:
        for process in started:
            texts.append(process.communicate(timeout=timeout_s)[0])
        for process, text in zip(started, texts, strict=True):
            assert process.returncode == 0, text
    finally:
        end_all(started)
    return texts


def end_all(started: list[subprocess.Popen[str]]) -> None:
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.parametrize("where", ["MASTER_ADDR", "SLURM_STEP_NODELIST"])
@pytest.mark.parametrize("secret", ["PYCOLL_TOKEN", "PMI_SHARED_SECRET"])
def test_variables_of_srun_and_a_secret_are_enough(two, where, secret):
    """Without MASTER_ADDR rank 0 is on the first host of the list."""

    def main() -> float:
        with pycoll.init(timeout_s=20) as comm:
            return float(comm.all_reduce(np.ones(3))[0])

    env = {"SLURM_NTASKS": "2", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": str(os.getpid())}
    env[where] = two.address(0)
    env[secret] = "1234567890123456"
    if where == "SLURM_STEP_NODELIST":
        env[where] += f",{two.address(1)}"
        env["SLURM_STEP_NUM_NODES"] = "2"
    pids = [two.start(rank, main, SLURM_PROCID=str(rank), **env) for rank in range(2)]
    assert values(two.outcomes(pids)) == [2.0, 2.0]


def test_info_of_the_cluster_names_hosts_and_measures_their_link(two):
    texts = run_on_all(
        two,
        [sys.executable, "-m", "pycoll", "info", "--cluster", "--json"],
        RANK="{host}",
        WORLD_SIZE="2",
        MASTER_ADDR=two.address(0),
        MASTER_PORT=str(free_port()),
        PYCOLL_TOKEN=TOKEN,
    )
    facts = json.loads(texts[0])
    assert texts[1] == ""
    assert facts["transport"] == "tcp"
    assert [rank["host"] for rank in facts["ranks"]] == ["host0", "host1"]
    (link,) = facts["links"]
    assert 0 < link["alpha_us"] < 1e5 and link["gbit_per_s"] > 0


@pytest.mark.slow
def test_info_of_the_cluster_draws_links_between_hosts_and_within(two, tmp_path):
    def main() -> None:
        from typer.testing import CliRunner

        from pycoll.cli import app

        plot = ["--plot", str(tmp_path / "cluster.svg")]
        done = CliRunner().invoke(app, ["info", "--cluster", "--json", *plot])
        assert done.exit_code == 0, done.output

    values(two.outcomes(two.start_world(main, [0, 0, 1, 1])))
    assert (tmp_path / "cluster.svg").read_text().startswith("<?xml")


@pytest.fixture
def hosts_of_run(two) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """`pycoll run --hosts` of both hosts from the first, with a script in place of ssh."""
    launcher = launcher_script(two)

    def start(*words: str) -> subprocess.Popen[str]:
        names = f"{two.address(0)},{two.address(1)}"
        command = [sys.executable, "-m", "pycoll", "run", "--hosts", names]
        return two.command(0, [*command, "--ssh", str(launcher), *words], **ENV)

    yield start
    launcher.unlink()


def test_run_starts_ranks_on_hosts_in_blocks(hosts_of_run, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, socket, sys, numpy as np, pycoll\n"
        "with pycoll.init(timeout_s=20) as comm:\n"
        "    total = comm.all_reduce(np.ones(1))[0]\n"
        "    print(socket.gethostname(), os.environ['LOCAL_RANK'], total, sys.argv[1:])\n"
    )
    text, _ = hosts_of_run("-n", "3", str(script), "--flag", "a b").communicate(timeout=100)
    lines = [line for line in sorted(text.splitlines()) if line.startswith("[")]
    arguments = "3.0 ['--flag', 'a b']"
    assert lines == [
        f"[0] host0 0 {arguments}",
        f"[1] host0 1 {arguments}",
        f"[2] host1 0 {arguments}",
    ], text


def test_run_on_hosts_names_a_rank_that_fails_and_ends_the_others(hosts_of_run, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, time\nsys.exit(3) if os.environ['RANK'] == '1' else time.sleep(60)\n"
    )
    process = hosts_of_run("-n", "2", "--grace", "0.5", str(script))
    text, _ = process.communicate(timeout=100)
    assert process.returncode == 3, text
    assert "rank 1 of 2 exited with status 3 on host 10.77.0.2" in text, text


def test_run_on_hosts_ends_all_ranks_when_interrupted(hosts_of_run, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, time\n"
        f"open('{tmp_path}/rank' + os.environ['RANK'], 'w').write(str(os.getpid()))\n"
        "time.sleep(60)\n"
    )
    process = hosts_of_run("-n", "2", "--grace", "1", str(script))
    pids = wait_for_pids(tmp_path, 2)
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=100)
    assert process.returncode == 130, text
    wait_until_gone(pids)


def test_run_on_a_host_that_ssh_does_not_reach_says_what_to_try(two):
    command = [sys.executable, "-m", "pycoll", "run", "-n", "2", "--grace", "0.5"]
    command += ["--hosts", "a,b", "--ssh", "sh -c 'exit 255' ssh", "script.py"]
    text, _ = two.command(0, command, **ENV).communicate(timeout=100)
    assert "exited with status 255 on host" in text and "try `sh -c" in text, text


SCRIPT = """
import numpy as np, pycoll
with pycoll.init(timeout_s=60) as comm:
    total = comm.all_reduce(np.full(100_000, comm.rank + 1.0))
    assert (total == comm.size * (comm.size + 1) / 2).all()
    print(f"rank {comm.rank} of {comm.size} over {comm.transport}", flush=True)
"""
# Starts `srun -n N command` as srun does: blocks of ranks on both hosts.
SRUN = """#!/bin/sh
n=$2; shift 2
rank=0
while [ $rank -lt $n ]; do
  host=$((rank * 2 / n))
  {launcher} {network}.$((host + 1)) SLURM_PROCID=$rank SLURM_NTASKS=$n SLURM_STEP_ID=0 \\
    SLURM_JOB_ID={job} SLURM_STEP_NUM_NODES=2 SLURM_STEP_NODELIST={nodes} "$@" &
  rank=$((rank + 1))
done
wait
"""


def documented_commands() -> dict[str, str]:
    """The column "Each host runs" of docs/hosts.md, by launcher."""
    text = (ROOT / "docs" / "hosts.md").read_text().partition("| Launcher |")[2]
    rows = [line.split("|")[1:3] for line in text.partition("\n\n")[0].splitlines()[2:]]
    return {name.split()[0]: command.split("`")[1] for name, command in rows}


def tools(network: Network, folder: Path) -> dict[str, str]:
    """Variables with which the documented commands reach the hosts: programs on PATH, no ssh."""
    launcher = launcher_script(network)
    nodes = f"{network.address(0)},{network.address(1)}"
    srun = folder / "srun"
    srun.write_text(
        SRUN.format(
            launcher=f"{launcher}",
            network=network.address(0).rpartition(".")[0],
            job=os.getpid(),
            nodes=nodes,
        )
    )
    srun.chmod(0o755)
    path = [str(folder), str(Path(sys.executable).parent), os.environ["PATH"]]
    mpi = {"HYDRA_LAUNCHER": "rsh", "HYDRA_LAUNCHER_EXEC": str(launcher), "HYDRA_IFACE": "eth0"}
    return {"PATH": os.pathsep.join(path), "PYCOLL_SSH": str(launcher), "UCX_TLS": "tcp,self"} | mpi


@pytest.mark.slow
@pytest.mark.parametrize("tls", ["0", "1"], ids=["plain", "TLS"])
@pytest.mark.parametrize("name", ["torchrun", "mpiexec", "srun", "pycoll", "by"])
def test_documented_command_starts_ranks_on_two_hosts(two, name, tls, tmp_path):
    """Seconds: the eight processes of the documents, of each launcher, with and without TLS."""
    if name == "torchrun":
        pytest.importorskip("torch")
    of_mpi = mpi_kit.need("mpich").environment if name == "mpiexec" else {}
    (tmp_path / "script.py").write_text(SCRIPT)
    env = ENV | of_mpi | tools(two, tmp_path) | {"PYCOLL_TLS": tls}
    if name in ("torchrun", "srun", "by") or (name, tls) == ("mpiexec", "1"):
        made = subprocess.check_output(["openssl", "rand", "-hex", "16"], text=True)
        env["PYCOLL_TOKEN"] = made.strip()
    command = documented_commands()[name].replace("29500", str(free_port()))
    command = command.replace("a,b", f"{two.address(0)},{two.address(1)}")
    command = command.replace("--master-addr A", f"--master-addr {two.address(0)}")
    command = command.replace("script.py", str(tmp_path / "script.py"))
    commands = {host: f"I={host}; {command}" for host in (0, 1)}
    if name == "by":
        values = ("{host}", "2", two.address(0), str(free_port()))
        for value in values:
            command = command.replace("=..", f"={value}", 1)
        commands = {host: command.format(host=host) for host in (0, 1)}
    elif name != "torchrun":  # "on one host"
        del commands[1]
    started = [
        two.command(host, ["sh", "-c", each], **env) for host, each in sorted(commands.items())
    ]
    try:
        texts = [process.communicate(timeout=200)[0] for process in started]
    finally:
        end_all(started)
        Path(env["PYCOLL_SSH"]).unlink()
    n = 2 if name == "by" else 8
    text = "\n".join(texts)
    assert [process.returncode for process in started] == [0] * len(started), text
    for rank in range(n):
        assert text.count(f"rank {rank} of {n} over tcp") == 1, text


@pytest.mark.slow
@pytest.mark.torch
def test_torchrun_over_two_hosts_trains_as_one_process_does(two):
    pytest.importorskip("torch")
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "2",
        "--node-rank",
        "{host}",
    ]
    words += ["--nproc-per-node", "2", "--master-addr", two.address(0), "--master-port"]
    words += [str(free_port()), str(ROOT / "examples" / "ddp_digits.py"), "--backend", "pycoll"]
    texts = run_on_all(two, words, timeout_s=240, PYCOLL_TOKEN=TOKEN)
    assert "off one process (allowed 1e-03): ok" in texts[0], texts[0]
