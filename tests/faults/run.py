#!/usr/bin/env python3
"""Plants the faults of planted_faults.py one at a time, and records which fast test finds each.

Ends with status 1 if a fault is missed that the record's column `before` says was found.
"""

from __future__ import annotations

import argparse
import ctypes
import io
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from planted_faults import FAULTS, Fault, locate, with_fault

ROOT = Path(__file__).resolve().parents[2]
RECORD = Path(__file__).with_name("record.json")
NOT_FAST = ("slow", "soak")  # markers
OUTCOME = re.compile(r"^(tests/\S+?::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b", re.M)
PR_SET_CHILD_SUBREAPER = 36

EPILOG = """\
examples:
  python tests/faults/run.py                          all faults, in the working tree
  python tests/faults/run.py echo-hides-the-error     one of them
  python tests/faults/run.py --commit b6f43d0 --as before --no-baseline
  python tests/faults/run.py --list
"""


@dataclass(frozen=True)
class Found:
    """The outcome of one fault. `by` is empty if no test found it."""

    by: str
    seconds: int

    def row(self) -> dict[str, object]:
        return {"found": bool(self.by), "by": self.by, "seconds": self.seconds}


class Scratch:
    """A copy of the tree with a build of its own; the user's tree is never changed.

    Args:
        folder: Folder of the copy; an earlier build there is reused.
        commit: The commit to copy; None: the working tree.
    """

    def __init__(self, folder: Path, commit: str | None) -> None:
        self.folder = folder
        self.logs = folder / "build" / "faults"
        files = of_commit(commit) if commit else of_working_tree()
        self._remove_others(files)
        for name, (content, mode) in files.items():
            self._write(name, content, mode)
        self.sources = {
            name: content.decode()
            for name, (content, _) in files.items()
            if name.startswith(("csrc/", "pycoll/")) and name.endswith((".cc", ".h", ".py"))
        }
        self.logs.mkdir(parents=True, exist_ok=True)

    def _write(self, name: str, content: bytes, mode: int) -> None:
        """Writes a file that differs; others are not compiled again."""
        path = self.folder / name
        if path.is_file() and path.read_bytes() == content:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(mode)

    def _remove_others(self, files: Iterable[str]) -> None:
        """Removes the files of an earlier tree; build outputs stay."""
        listed = self.folder / "files.txt"
        if listed.is_file():
            for name in set(listed.read_text().split("\n")).difference(files):
                (self.folder / name).unlink(missing_ok=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        listed.write_text("\n".join(files))

    def plant(self, fault: Fault) -> str:
        """Returns the name of the changed file."""
        name, line_idx = locate(fault, self.sources)
        (self.folder / name).write_text(with_fault(fault, self.sources[name], line_idx))
        return name

    def restore(self, name: str) -> None:
        (self.folder / name).write_text(self.sources[name])

    def build(self) -> None:
        command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
        environment = clean_environment(self.folder)
        for variable in ("PYCOLL_UNITY", "PYCOLL_MPI_INCLUDE", "PYCOLL_MPICC"):
            if variable in os.environ:
                environment[variable] = os.environ[variable]
        environment["PYCOLL_BUILD_DIR"] = "build/cmake"
        log = self.logs / "build.txt"
        with log.open("w") as out:
            status = run_group(command, self.folder, environment, out, timeout_s=3600)
        if status != 0:
            sys.exit(f"faults: the build failed, see {log}")

    def check_import(self) -> None:
        code = "import pycoll, pathlib; print(pathlib.Path(pycoll.__file__).parents[1])"
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=self.folder,
            env=clean_environment(self.folder),
            capture_output=True,
            text=True,
        )
        if Path(done.stdout.strip()) != self.folder:
            sys.exit(f"faults: expected pycoll of {self.folder}, got {done.stdout or done.stderr}")

    def test(self, log: Path, arguments: list[str], timeout_s: float) -> tuple[int | None, str]:
        """Runs pytest. Returns its status (None: it took too long) and its output."""
        # pytest refuses a marker that an older commit does not have.
        markers = (self.folder / "pyproject.toml").read_text()
        fast = " and ".join(f"not {name}" for name in NOT_FAST if f'"{name}:' in markers)
        command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-m", fast, *arguments]
        with log.open("a") as out:
            start = out.tell()
            status = run_group(command, self.folder, clean_environment(self.folder), out, timeout_s)
        if status == 4:  # a path or an option that pytest does not know
            sys.exit(f"faults: pytest refused {arguments}, see {log}")
        with log.open() as file:
            file.seek(start)
            return status, file.read()


def of_working_tree() -> dict[str, tuple[bytes, int]]:
    """Files that git tracks or would add: contents and modes by path."""
    listed = git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split(b"\0")
    paths = {name.decode(): ROOT / name.decode() for name in listed if name}
    return {
        name: (path.read_bytes(), path.stat().st_mode & 0o777)
        for name, path in paths.items()
        if path.is_file()
    }


def of_commit(commit: str) -> dict[str, tuple[bytes, int]]:
    with tarfile.open(fileobj=io.BytesIO(git("archive", "--format=tar", commit))) as tar:
        return {
            member.name: (tar.extractfile(member).read(), member.mode & 0o777)  # type: ignore[union-attr]
            for member in tar.getmembers()
            if member.isfile()
        }


def git(*words: str) -> bytes:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout


def clean_environment(folder: Path) -> dict[str, str]:
    """The environment without the variables that pycoll reads; imports come from `folder`."""
    removed = ("PYCOLL_", "PYTEST_", "MASTER_", "SLURM_", "OMPI_", "PMI_", "PMIX_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(removed)}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        kept.pop(name, None)
    path = f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', os.defpath)}"
    return kept | {"PYTHONPATH": str(folder), "PATH": path}


def run_group(
    command: list[str], folder: Path, environment: dict[str, str], out: object, timeout_s: float
) -> int | None:
    """Runs a command and ends all its processes. Returns its status; None: it took too long."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=out,  # type: ignore[arg-type]
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(timeout_s)
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as reason:
        os.killpg(process.pid, signal.SIGINT)  # pytest ends the processes of its tests
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if isinstance(reason, KeyboardInterrupt):
            raise
        return None
    finally:
        end_orphans()


def end_orphans() -> None:
    """Ends processes that the tests have left: this process adopts all orphans."""
    while children := own_children():
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        for pid in children:
            os.waitpid(pid, 0)


def own_children() -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(fields[1]) == os.getpid():
            found.append(int(entry.parent.name))
    return found


def failures(output: str) -> list[str]:
    """Ids of the tests that failed."""
    return [name for name, outcome in OUTCOME.findall(output) if outcome in ("FAILED", "ERROR")]


def finder(status: int | None, output: str) -> str:
    """The id of the first test that failed or hung; empty: all passed."""
    if status in (0, 5):  # 5: no test is selected
        return ""
    if failed := failures(output):
        hung = " (timeout)" if "Failed: Timeout" in output else ""
        return failed[0] + hung
    lines = [line.strip() for line in output.split("\n") if re.match(r"tests/\S+?::", line)]
    if status == 2 or not lines:
        return "the collection of tests"
    last = next((line for line in reversed(lines) if not OUTCOME.match(line)), lines[-1])
    return f"{last} ({'timeout' if status is None or 'Timeout' in output else 'crash'})"


def stages(scratch: Scratch, fault: Fault) -> list[list[str]]:
    """Arguments of pytest, one list after the other: the likely files, then all others."""
    first = [path for path in fault.first if (scratch.folder / path).exists()]
    rest = [*fault.tests, *(f"--ignore={path}" for path in first)]
    return [first, rest] if first and set(first) != set(fault.tests) else [list(fault.tests)]


def try_fault(scratch: Scratch, fault: Fault, timeout_s: float, without: list[str]) -> Found:
    log = scratch.logs / f"{fault.name}.txt"
    log.unlink(missing_ok=True)
    begin = time.monotonic()
    name = scratch.plant(fault)
    try:
        scratch.build()  # of a fault in Python, too: the one before may have been compiled
        begin = time.monotonic()
        by = ""
        for arguments in stages(scratch, fault):
            status, output = scratch.test(log, ["-x", *arguments, *without], timeout_s)
            by = finder(status, output)
            if by:
                break
        return Found(by, round(time.monotonic() - begin))
    finally:
        scratch.restore(name)


def baseline(scratch: Scratch, faults: list[Fault], timeout_s: float) -> list[str]:
    """Ids of the tests concerned that fail without any fault."""
    tests = sorted({test for fault in faults for test in fault.tests})
    folders = [test for test in tests if not any(test.startswith(f"{t}/") for t in tests)]
    log = scratch.logs / "baseline.txt"
    log.unlink(missing_ok=True)
    status, output = scratch.test(log, folders, timeout_s * len(folders))
    if status not in (0, 1):
        sys.exit(f"faults: the tests did not run without a fault, see {log}")
    return failures(output)


def write_record(path: Path, column: str, commit: str, found: dict[str, Found]) -> None:
    """Changes the column of the faults that were tried."""
    record = json.loads(path.read_text()) if path.is_file() else {}
    rows = {row["name"]: row for row in record.get("faults", [])}
    heads = {"before": record.get("before"), "after": record.get("after")} | {column: commit}
    lines = []
    for fault in FAULTS:
        row = {"name": fault.name, "before": None, "after": None} | rows.get(fault.name, {})
        if fault.name in found:
            row[column] = found[fault.name].row()
        lines.append(f"  {json.dumps(row)}")
    head = "".join(f" {json.dumps(key)}: {json.dumps(value)},\n" for key, value in heads.items())
    path.write_text("{\n" + head + ' "faults": [\n' + ",\n".join(lines) + "\n ]\n}\n")


def found_before(path: Path) -> set[str]:
    rows = json.loads(path.read_text())["faults"]
    return {row["name"] for row in rows if row["before"] and row["before"]["found"]}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="run.py",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults to try; all")
    parser.add_argument("--list", action="store_true", help="print the faults and what they break")
    parser.add_argument(
        "--commit", metavar="REVISION", help="try this commit instead of the working tree"
    )
    parser.add_argument(
        "--as",
        dest="column",
        choices=["before", "after"],
        default="after",
        help="column of the record; after",
    )
    parser.add_argument("--record", type=Path, default=RECORD, help="file of the record")
    parser.add_argument(
        "--scratch",
        type=Path,
        default=ROOT / "build" / "faults",
        help="folder of the copy, kept for the next run; build/faults",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=900,
        metavar="S",
        help="seconds for the tests of one fault, in each of at most two runs; 900",
    )
    parser.add_argument(
        "--no-baseline",
        action="store_true",
        help="do not run the tests without a fault before",
    )
    parser.add_argument(
        "--deselect", action="append", default=[], metavar="ID", help="test to leave out"
    )
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    known = {fault.name: fault for fault in FAULTS}
    if unknown := [name for name in options.names if name not in known]:
        sys.exit(f"faults: unknown fault {unknown[0]!r}; --list prints all")
    faults = [known[name] for name in options.names] or FAULTS
    if options.list:
        for fault in faults:
            print(f"{fault.name} ({fault.file}): {fault.breaks}")
        return
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    commit = git("rev-parse", "--short", options.commit or "HEAD").decode().strip()
    scratch = Scratch(options.scratch.resolve(), options.commit)
    print(f"building {scratch.folder} ...", flush=True)
    scratch.build()
    scratch.check_import()
    broken = list(options.deselect)
    if not options.no_baseline:
        print("running the tests without a fault ...", flush=True)
        broken += baseline(scratch, faults, options.timeout)
        for name in broken:
            print(f"  left out, fails without a fault: {name}", flush=True)
    without = [f"--deselect={name}" for name in broken]
    found: dict[str, Found] = {}
    for i, fault in enumerate(faults):
        print(f"[{i + 1}/{len(faults)}] {fault.name}: ", end="", flush=True)
        one = found[fault.name] = try_fault(scratch, fault, options.timeout, without)
        print(f"{f'found by {one.by}' if one.by else 'NOT FOUND'}, {one.seconds} s", flush=True)
        write_record(options.record, options.column, commit, found)
    missed = [name for name, one in found.items() if not one.by]
    print(f"{len(found) - len(missed)} of {len(found)} faults are found; record: {options.record}")
    if worse := found_before(options.record).intersection(missed):
        sys.exit(f"faults: found before, but not now: {', '.join(sorted(worse))}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
