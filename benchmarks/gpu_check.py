"""Builds, tests and measures pycoll on a machine with a GPU: what `make gpu-check` runs.

python benchmarks/gpu_check.py [--part build|test|bench|all] [--device cuda|threads]

Without a network: it needs python3 with NumPy, pybind11, pytest and torch for CUDA, and nvcc, cmake
and ninja. The core of this interpreter and the library for this machine's GPUs are
built into pycoll/. Each part is done within ten minutes. Status 2: something is missing here.
`--device threads` does all of it on the emulated device, whose times mean nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("build", "test", "bench")
PART_S = 570.0
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
    env = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    if options.device == "threads":
        path = os.environ.get("PYCOLL_DEVICE_LIBRARY")
        env["PYCOLL_DEVICE_LIBRARY"] = path or str(options.build_folder / "_device_threads.so")
        env["PYCOLL_TEST_DEVICE_LIBRARY"] = env["PYCOLL_DEVICE_LIBRARY"]
    else:
        env.pop("PYCOLL_DEVICE_LIBRARY", None)
    return env


def build(options: argparse.Namespace) -> bool:
    import pybind11

    start = time.monotonic()
    configure = [
        *("cmake", "-S", ROOT, "-B", options.build_folder, "-G", "Ninja"),
        *("-DCMAKE_BUILD_TYPE=Release", f"-DPython_EXECUTABLE={sys.executable}"),
        *(f"-Dpybind11_DIR={pybind11.get_cmake_dir()}", f"-DPYCOLL_OUTPUT_DIR={ROOT / 'pycoll'}"),
    ]
    targets = ["_core"]
    if options.device == "cuda":
        real = {f"{c}a-real" if int(c) >= 90 else f"{c}-real" for c in
                (gpu["capability"] for gpu in gpus())}  # fmt: skip
        targets += ["pycoll_cuda", "launch_bench"]
        configure += ["-DPYCOLL_CUDA=ON", f"-DCMAKE_CUDA_COMPILER={find_nvcc()}"]
        configure += [f"-DPYCOLL_CUDA_ARCHITECTURES={';'.join(sorted(real))}"]
    else:
        targets.append("device_threads")
    jobs = str(len(os.sched_getaffinity(0)))
    make = ["cmake", "--build", options.build_folder, "--parallel", jobs, "--target", *targets]
    for command in (configure, make):
        done = subprocess.run([str(word) for word in command], timeout=PART_S)
        if done.returncode != 0:
            return False
    if importlib.util.find_spec("torch") is not None and not build_backend():
        return False
    print(f"gpu-check: built {', '.join(targets)} in {time.monotonic() - start:.0f} s", flush=True)
    return True


def build_backend() -> bool:
    """torch's backend, for the torch that is here: tests and benchmarks do not wait for it."""
    code = (
        "from pycoll import torch_build as build\n"
        "print(build.find_or_build(build.Torch.find(), build.package_folder()))"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code], env=env, timeout=PART_S).returncode == 0


def sanitize(options: argparse.Namespace, until: float) -> dict[str, str]:
    """The verdict of each tool of compute-sanitizer on the main kernels, or why it was skipped."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    program = [sys.executable, str(ROOT / "benchmarks" / "device_kernels.py"), "2"]
    results = {}
    for name in SANITIZER_TOOLS:
        command = [tool, "--tool", name, "--error-exitcode", "9", *program]
        left = until - time.monotonic()
        if options.device != "cuda":
            command = program
        elif not Path(tool).is_file():
            results[name] = "skipped: compute-sanitizer is not installed"
            continue
        if left < 10:
            results[name] = "skipped: no time was left"
            continue
        try:
            done = subprocess.run(
                command, env=environment(options), timeout=left, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            results[name] = f"not done after {left:.0f} s"
            continue
        lines = [line for line in done.stdout.splitlines() if line.strip()]
        verdict = {0: "clean", 9: "ERRORS"}.get(done.returncode, f"status {done.returncode}")
        if "not supported" in done.stdout and done.returncode != 0:
            verdict = "skipped: not supported here"
        if options.device != "cuda" and verdict == "clean":
            verdict = "skipped: no GPU's kernels; they ran without it, and were right"
        results[name] = f"{verdict} ({' | '.join(lines[-2:])})"
    for name, verdict in results.items():
        print(f"gpu-check: {name}: {verdict}", flush=True)
    return results


def test(options: argparse.Namespace) -> bool:
    """The tests of devices over the real library, then the sanitizers. Saved for the record."""
    until = time.monotonic() + PART_S
    marker = "gpu" if options.device == "cuda" else "not gpu"
    folders = options.tests or [str(ROOT / "tests" / "device")]
    command = [sys.executable, "-m", "pytest", "-q", "-m", marker, "-p", "no:cacheprovider"]
    if importlib.util.find_spec("pytest_timeout") is None:
        command += ["-o", "addopts=-ra"]  # its marker is unknown; this part has a time of its own
    try:
        done = subprocess.run(
            [*command, *folders], cwd=ROOT, env=environment(options), timeout=0.7 * PART_S,
            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        out, status = done.stdout, done.returncode
    except subprocess.TimeoutExpired as expired:
        out = (expired.stdout or b"").decode(errors="replace") + "\nnot done in time"
        status = 1
    print(out[-8000:], flush=True)
    last = (out.strip().splitlines() or [""])[-1]
    # A run in which all tests were skipped shows nothing.
    good = status == 0 and " passed" in last
    results = {"pytest": last, "passed": good, "sanitizers": sanitize(options, until)}
    save(options.build_folder / "tests.json", {"commit": commit()} | results)
    dirty = any(
        verdict.startswith(("ERRORS", "status")) for verdict in results["sanitizers"].values()
    )
    return good and not dirty


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


def launches(options: argparse.Namespace) -> bool:
    """Runs launch_bench, which measures the cost of a launch. Saved for the record."""
    program = options.build_folder / "launch_bench"
    if options.device != "cuda" or not program.is_file():
        print("gpu-check: launch_bench: skipped: it was not built, for want of a GPU", flush=True)
        return True
    path = options.build_folder / "launches.json"
    path.unlink(missing_ok=True)
    try:
        status = subprocess.run([program, "--json", path], timeout=60).returncode
    except subprocess.TimeoutExpired:
        print("gpu-check: launch_bench: not done after 60 s", flush=True)
        return False
    return status == 0


def bench(options: argparse.Namespace) -> bool:
    """In a process of its own, which has the library's variables from its start."""
    until = time.monotonic() + PART_S
    good = launches(options)
    program = ROOT / "benchmarks" / "device_table.py"
    device = (gpus() or [{"name": "GPU"}])[0]["name"] if options.device == "cuda" else "emulated"
    name = "-".join(device.replace("/", " ").lower().split())
    record = options.out / f"{name}-{date.today()}.json"
    left = until - time.monotonic()
    command = [sys.executable, str(program), options.device, str(record), f"{left:.0f}"]
    if options.tiny or options.device == "threads":
        command.append("--tiny")
    for name in ("tests", "launches"):
        found = options.build_folder / f"{name}.json"
        if found.is_file():
            command += [f"--{name}", str(found)]
    try:
        done = subprocess.run(command, env=environment(options), timeout=left + 25)
    except subprocess.TimeoutExpired:
        print("gpu-check: the table was not done in time; what was measured is in the record")
        return False
    return good and done.returncode == 0


def main() -> None:
    parser = argparse.ArgumentParser(description="Builds, tests and measures pycoll on a GPU.")
    parser.add_argument("--part", choices=(*PARTS, "all"), default="all")
    parser.add_argument("--device", choices=("cuda", "threads"), default="cuda")
    parser.add_argument("--build-folder", type=Path, default=ROOT / "build" / "gpu")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--tiny", action="store_true", help="few and short messages")
    parser.add_argument("--tests", action="append", help="other tests than tests/device")
    options = parser.parse_args()
    options.build_folder = options.build_folder.resolve()
    parts = list(PARTS) if options.part == "all" else [options.part]
    lacking = missing(parts, options.device)
    if lacking:
        print(f"gpu-check: this machine lacks {', '.join(lacking)}.", file=sys.stderr)
        raise SystemExit(2)
    if not all([{"build": build, "test": test, "bench": bench}[part](options) for part in parts]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
