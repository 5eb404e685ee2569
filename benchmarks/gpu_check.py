"""Builds, tests and measures pycoll on a machine with a GPU: what `make gpu-check` runs.

python benchmarks/gpu_check.py [--part build|test|bench|all] [--device cuda|threads]

Without a network: it needs python3 with NumPy, pybind11, pytest and torch for CUDA, and nvcc, cmake
and ninja. Modules may be in a folder of PYTHONPATH. The core of this interpreter and the library
for this machine's GPUs are built into pycoll/. Each part ends within --seconds, and with it all
processes that it has started. Logs, JUnit files and results are in the build folder, and also in
--out if it is given. Status 2: something is missing here.
`--device threads` does all of it on the emulated device, whose times mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PARTS = ("build", "test", "bench")
AFTER_S = 20.0  # for the table's picture
NO_TESTS = 5  # pytest's status
SANITIZER_TOOLS = ("memcheck", "racecheck")
MODULES = {
    "build": ("pybind11", "numpy"),
    "test": ("numpy", "pytest"),
    "bench": ("numpy",),
}


def find_nvcc() -> str | None:
    named = os.environ.get("CUDACXX") or shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    return named if Path(named).is_file() else None


def gpus() -> list[dict[str, str]]:
    """Name and compute capability of the machine's GPUs, as the driver tells."""
    query = ["nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    found = [line.split(", ") for line in done.stdout.splitlines() if line.count(", ") == 2]
    return [{"name": n, "capability": c.replace(".", ""), "driver": d} for n, c, d in found]


def missing(parts: list[str], device: str) -> list[str]:
    """The needs of these parts that this machine lacks."""
    modules = {module for part in parts for module in MODULES[part]}
    if device == "cuda" and "bench" in parts:
        modules.add("torch")  # the copies that the ceiling is measured with
    lacking = []
    if device == "cuda" and not gpus():
        lacking.append("a GPU (nvidia-smi finds none)")
    if "build" in parts:
        if device == "cuda" and find_nvcc() is None:
            lacking.append("nvcc")
        lacking += [tool for tool in ("cmake", "ninja") if shutil.which(tool) is None]
    absent = sorted(module for module in modules if importlib.util.find_spec(module) is None)
    return lacking + [f"the Python module {module}" for module in absent]


def environment(options: argparse.Namespace) -> dict[str, str]:
    """The environment of programs that use a device: a hardware queue for each rank."""
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(":"),
        "PYTHONUNBUFFERED": "1",
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        # Otherwise torch's check makes a context in processes that fork ranks later.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    }
    if options.device == "threads":
        path = os.environ.get("PYCOLL_DEVICE_LIBRARY")
        env["PYCOLL_DEVICE_LIBRARY"] = path or str(options.build_folder / "_device_threads.so")
        env["PYCOLL_TEST_DEVICE_LIBRARY"] = env["PYCOLL_DEVICE_LIBRARY"]
    else:
        env.pop("PYCOLL_DEVICE_LIBRARY", None)
    return env


def run(
    options: argparse.Namespace, name: str, command: list[Any], seconds: float
) -> tuple[int | None, str]:
    """Runs a program, with its output in NAME.log.

    Returns its status, None if it was not done in time, and its output. All processes that it has
    started end with it: ranks that go on would keep the device.
    """
    path = options.build_folder / f"{name}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    words = [str(word) for word in command]
    status = None
    with path.open("w") as log:
        process = subprocess.Popen(
            words, cwd=ROOT, env=environment(options), stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            status = process.wait(max(seconds, 1))
        except subprocess.TimeoutExpired:
            log.write(f"\nnot done after {seconds:.0f} s\n")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return status, path.read_text(errors="replace")


def last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


def build(options: argparse.Namespace) -> bool:
    import pybind11

    start = time.monotonic()
    until = start + options.seconds
    configure = [
        *("cmake", "-S", ROOT, "-B", options.build_folder, "-G", "Ninja"),
        *(
            "-DCMAKE_BUILD_TYPE=Release",
            "-DPYCOLL_BENCHMARKS=ON",
            "-DPYCOLL_TESTS=ON",
            f"-DPython_EXECUTABLE={sys.executable}",
        ),
        *(f"-Dpybind11_DIR={pybind11.get_cmake_dir()}", f"-DPYCOLL_OUTPUT_DIR={ROOT / 'pycoll'}"),
    ]
    targets = ["_core", "all_reduce_perf", "gpu_matrix", "gpu_latency"]
    if options.device == "cuda":
        real = {f"{c}a-real" if int(c) >= 90 else f"{c}-real" for c in
                (gpu["capability"] for gpu in gpus())}  # fmt: skip
        targets.append("pycoll_cuda")
        configure += ["-DPYCOLL_CUDA=ON", f"-DCMAKE_CUDA_COMPILER={find_nvcc()}"]
        configure += [f"-DPYCOLL_CUDA_ARCHITECTURES={';'.join(sorted(real))}"]
    else:
        targets.append("device_threads")
    jobs = str(len(os.sched_getaffinity(0)))
    make = ["cmake", "--build", options.build_folder, "--parallel", jobs, "--target", *targets]
    steps = {"configure": configure, "compile": make}
    if importlib.util.find_spec("torch") is not None:
        # torch's backend, for the torch that is here: tests and benchmarks do not wait for it.
        code = (
            "from pycoll import torch_build as build\n"
            "print(build.find_or_build(build.Torch.find(), build.package_folder()))"
        )
        steps["torch_backend"] = [sys.executable, "-c", code]
    for name, command in steps.items():
        status, output = run(options, name, command, until - time.monotonic())
        if status != 0:
            print(output[-8000:], flush=True)
            print(f"gpu-check: {name} failed, {options.build_folder / name}.log", flush=True)
            return False
    print(f"gpu-check: built {', '.join(targets)} in {time.monotonic() - start:.0f} s", flush=True)
    return True


def matrix(options: argparse.Namespace, seconds: float) -> str:
    """Runs gpu_matrix for at most this time. Returns its last line, or why it was skipped."""
    program = options.build_folder / "tests" / "cpp" / "gpu_matrix"
    if not program.is_file():
        return "skipped: gpu_matrix was not built"
    few = ["--few", "--ranks", "2", "--dtypes", "f32,bf16"]
    command = [program, "--seconds", f"{seconds:.0f}"]
    command += few if options.device != "cuda" or options.tiny else []
    status, output = run(options, "matrix", command, seconds + 30)
    found = [line for line in output.splitlines() if not line.startswith("gpu_matrix:")]
    verdict = " | ".join(found[-2:]) or "no result"
    print("\n".join(found[-20:]), flush=True)
    return verdict if status in (0, 3) else f"FAILED, status {status}: {verdict}"


def sanitize(options: argparse.Namespace, until: float) -> dict[str, str]:
    """The verdict of each tool of compute-sanitizer on the kernels of all_reduce of f32, or why it
    was skipped. Other kernels are not loaded, so a tool need not instrument them.
    """
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    program = [str(options.build_folder / "tests" / "cpp" / "gpu_matrix"), "--few"]
    program += ["--ranks", "2", "--dtypes", "f32", "--only", "all_reduce"]
    results = {}
    for name in SANITIZER_TOOLS:
        if not Path(program[0]).is_file():
            results[name] = "skipped: gpu_matrix was not built"
            continue
        command = [tool, "--tool", name, "--error-exitcode", "9"]
        command += ["--kernel-name", "kernel_substring=run_kernel", *program]
        left = until - time.monotonic()
        if options.device != "cuda":
            command = program
        elif not Path(tool).is_file():
            results[name] = "skipped: compute-sanitizer is not installed"
            continue
        if left < 10:
            results[name] = "skipped: no time was left"
            continue
        status, output = run(options, name, command, left)
        if status is None:
            results[name] = f"not done after {left:.0f} s"
            continue
        lines = [line for line in output.splitlines() if line.strip()]
        verdict = {0: "clean", 9: "ERRORS"}.get(status, f"status {status}")
        if "not supported" in output and status != 0:
            verdict = "skipped: not supported here"
        if options.device != "cuda" and verdict == "clean":
            verdict = "skipped: no GPU's kernels; they ran without it, and were right"
        results[name] = f"{verdict} ({' | '.join(lines[-2:])})"
    for name, verdict in results.items():
        print(f"gpu-check: {name}: {verdict}", flush=True)
    return results


def pytest(options: argparse.Namespace, name: str, marker: str, seconds: float) -> dict[str, Any]:
    """Runs the tests with this marker. Their verdicts are in NAME.xml, also if time ends."""
    folders = options.tests or [str(ROOT / "tests" / "device")]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"]
    command += ["-rfE", "--durations=20", "-m", marker]
    command += [f"--junitxml={options.build_folder / name}.xml"]
    if importlib.util.find_spec("pytest_timeout") is None:
        command += ["-o", "addopts="]  # its marker is unknown; this part has a time of its own
    else:
        command += [f"--timeout={min(60, seconds):.0f}"]
    status, output = run(options, name, [*command, *folders], seconds)
    print(output[-6000:], flush=True)
    # A run in which all tests were skipped shows nothing.
    passed = status == 0 and " passed" in last_line(output)
    nothing = status == NO_TESTS and name != "tests"
    return {"pytest": last_line(output), "passed": passed or nothing}


def test(options: argparse.Namespace) -> bool:
    """The main kernels, the matrix, the tests of devices over the real library, those of torch, the
    sanitizers.

    What there is after each of them is saved for the record.
    """
    until = time.monotonic() + options.seconds
    kernels = [sys.executable, ROOT / "benchmarks" / "device_kernels.py", "2"]
    status, output = run(options, "smoke", kernels, 0.2 * options.seconds)
    results: dict[str, Any] = {"commit": commit(), "smoke": last_line(output)}
    save(options.build_folder / "tests.json", results)
    if status != 0:
        print(output[-8000:], flush=True)
        print("gpu-check: the main kernels do not run: no test was begun", flush=True)
        return False
    here = "gpu" if options.device == "cuda" else "not gpu"
    results["matrix"] = matrix(options, 0.25 * (until - time.monotonic()))
    save(options.build_folder / "tests.json", results)
    for name, marker, share in (("tests", "not torch", 0.6), ("torch_tests", "torch", 0.7)):
        left = until - time.monotonic()
        results[name] = pytest(options, name, f"{here} and {marker}", share * left)
        save(options.build_folder / "tests.json", results)
    results["sanitizers"] = sanitize(options, until)
    dirty = any(
        verdict.startswith(("ERRORS", "status")) for verdict in results["sanitizers"].values()
    )
    results["passed"] = (
        results["tests"]["passed"]
        and results["torch_tests"]["passed"]
        and not results["matrix"].startswith("FAILED")
    )
    save(options.build_folder / "tests.json", results)
    return results["passed"] and not dirty


def commit() -> str | None:
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(git, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or os.environ.get("PYCOLL_COMMIT")


def save(path: Path, data: dict[str, Any]) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(data, indent=1) + "\n")
    os.replace(new, path)


def latencies(options: argparse.Namespace, seconds: float) -> bool:
    """Runs gpu_latency, which measures what short collectives consist of. Saved for the record."""
    program = options.build_folder / "benchmarks" / "gpu_latency"
    if not program.is_file():
        print("gpu-check: gpu_latency: skipped: it was not built", flush=True)
        return True
    path = options.build_folder / "latencies.jsonl"
    path.unlink(missing_ok=True)
    few = ["--few"] if options.device != "cuda" or options.tiny else []
    command = [program, *few, "--json", path, "--seconds", f"{seconds:.0f}"]
    status, output = run(options, "latencies", command, seconds + 15)
    print(output, flush=True)
    return status == 0


def bench(options: argparse.Namespace) -> bool:
    """In a process of its own, which has the library's variables from its start."""
    until = time.monotonic() + options.seconds
    good = latencies(options, 0.2 * options.seconds)
    program = ROOT / "benchmarks" / "device_table.py"
    device = (gpus() or [{"name": "GPU"}])[0]["name"] if options.device == "cuda" else "emulated"
    name = "-".join(device.replace("/", " ").lower().split())
    record = (options.out or RESULTS) / f"{name}-{date.today()}.json"
    left = until - time.monotonic() - AFTER_S
    command = [sys.executable, str(program), options.device, str(record), f"{left:.0f}"]
    if options.tiny or options.device == "threads":
        command.append("--tiny")
    for name, found in (
        ("tests", options.build_folder / "tests.json"),
        ("latencies", options.build_folder / "latencies.jsonl"),
    ):
        if found.is_file():
            command += [f"--{name}", str(found)]
    status, output = run(options, "table", command, left + AFTER_S)
    print(output[-12000:], flush=True)
    if status is None:
        print("gpu-check: the table was not done in time; what was measured is in the record")
    return good and status == 0


def keep(options: argparse.Namespace) -> None:
    """Copies what the parts have written to --out."""
    if options.out is None:
        return
    options.out.mkdir(parents=True, exist_ok=True)
    for pattern in ("*.log", "*.xml", "tests.json", "latencies.jsonl"):
        for path in options.build_folder.glob(pattern):
            shutil.copy2(path, options.out / path.name)


def main() -> None:
    # As at the end of a part: what it has started ends with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parser = argparse.ArgumentParser(description="Builds, tests and measures pycoll on a GPU.")
    parser.add_argument("--part", choices=(*PARTS, "all"), default="all")
    parser.add_argument("--device", choices=("cuda", "threads"), default="cuda")
    parser.add_argument("--build-folder", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument(
        "--out", type=Path, help="folder of the record (else benchmarks/results), and of logs"
    )
    parser.add_argument("--seconds", type=float, default=540.0, help="of each part")
    parser.add_argument("--tiny", action="store_true", help="few and short messages")
    parser.add_argument("--tests", action="append", help="other tests than tests/device")
    options = parser.parse_args()
    options.build_folder = options.build_folder.resolve()
    parts = list(PARTS) if options.part == "all" else [options.part]
    lacking = missing(parts, options.device)
    if lacking:
        print(f"gpu-check: this machine lacks {', '.join(lacking)}.", file=sys.stderr)
        raise SystemExit(2)
    good = True
    for part in parts:
        good = {"build": build, "test": test, "bench": bench}[part](options) and good
        keep(options)
        if part == "build" and not good:
            break
    if not good:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
