"""Faults of one line each, which the fast tests must find; `make faults` plants them one by one.

A fault is stored as the text of a line before and after, so it survives changes to other lines. A
file that has moved is found by its name, and a renamed file by the line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath


@dataclass(frozen=True)
class Fault:
    """One wrong line.

    Attributes:
        name: Short name, for the command line and the record.
        file: Path of the source file, from the root of the repository.
        before: The right line, without indentation.
        after: The wrong line.
        breaks: What the fault breaks, in one sentence.
        tests: Folders or files of the tests concerned.
        first: Files of those that run before the others, to save time.
    """

    name: str
    file: str
    before: str
    after: str
    breaks: str
    tests: tuple[str, ...]
    first: tuple[str, ...] = ()


class NotOnce(ValueError):
    """A fault's line is not in exactly one place."""


def locate(fault: Fault, sources: Mapping[str, str]) -> tuple[str, int]:
    """The file and the index of the line that a fault replaces.

    Args:
        fault: Which one.
        sources: Texts of all source files, by path from the root.

    Raises:
        NotOnce: No line is the one before, or several are.
    """

    def places(paths: Iterable[str]) -> list[tuple[str, int]]:
        return [
            (path, i)
            for path in paths
            for i, line in enumerate(sources[path].split("\n"))
            if line.strip() == fault.before
        ]

    was = PurePosixPath(fault.file)
    relatives = [path for path in sources if PurePosixPath(path).suffix == was.suffix]
    namesakes = [path for path in relatives if PurePosixPath(path).name == was.name]
    exact = [fault.file] if fault.file in sources else []
    # A file that has moved keeps its name, mostly.
    found = places(exact) or places(namesakes) or places(relatives)
    if len(found) != 1:
        where = ", ".join(f"{path}:{i + 1}" for path, i in found) or "nowhere"
        raise NotOnce(
            f"fault {fault.name}: expected one line {fault.before!r} in {fault.file}, found it "
            f"{where}: correct tests/faults/planted_faults.py"
        )
    return found[0]


def with_fault(fault: Fault, text: str, line_idx: int) -> str:
    """The text of a file with the fault at that line."""
    lines = text.split("\n")
    line = lines[line_idx]
    lines[line_idx] = line[: len(line) - len(line.lstrip())] + fault.after
    return "\n".join(lines)


# --- C++ -----------------------------------------------------------------------------------------

CORE = [
    Fault(
        "proof-allows-one-message-more",
        "csrc/schedule/verify.cc",
        "if ((step.dst_peers >> i & 1) != 0 && link_to(program, step, peer).size() >= slots_) {",
        "if ((step.dst_peers >> i & 1) != 0 && link_to(program, step, peer).size() > slots_) {",
        "The proof accepts schedules that need one slot more than a link has.",
        ("tests/schedule",),
        ("tests/schedule/test_verify.py",),
    ),
    Fault(
        "table-weighs-the-wrong-neighbour",
        "csrc/plan/tuning.cc",
        "{low.choice, std::pow(low.time_s, 1 - share) * std::pow(high.time_s, share)});",
        "{low.choice, std::pow(low.time_s, share) * std::pow(high.time_s, 1 - share)});",
        "Between two measured sizes, the time is that of the farther one.",
        ("tests/test_tuning.py", "tests/test_tune.py", "tests/comm/test_selection.py"),
    ),
    Fault(
        "bf16-rounds-ties-up",
        "csrc/reduce/conversion.h",
        "return bits + 0x7fffu + ((bits >> 16) & 1u);",
        "return bits + 0x8000u;",
        "Ties between two bfloat16 values are rounded up instead of to the even one.",
        ("tests/reduce",),
        ("tests/reduce/test_reduce_copy.py",),
    ),
    Fault(
        "own-part-is-combined-out-of-order",
        "csrc/executor/protocol.h",
        "program.self_position >= 64 ? ~uint64_t{0} : (uint64_t{1} << program.self_position) - 1;",
        "program.self_position >= 64 ? ~uint64_t{0} : (uint64_t{2} << program.self_position) - 1;",
        "A rank combines its own chunks behind those of the next rank, so bits differ by rank.",
        ("tests/comm", "tests/executor"),
        ("tests/comm/test_deterministic.py", "tests/comm/test_algorithms_run.py"),
    ),
    Fault(
        "timeout-names-the-neighbour",
        "csrc/executor/wait/wait.cc",
        "failure.culprit = static_cast<uint16_t>(find_culprit(late));",
        "failure.culprit = static_cast<uint16_t>(site.peer);",
        "A timeout names the rank that is waited for, not the rank that never came.",
        ("tests/comm", "tests/executor"),
        ("tests/comm/test_failures.py",),
    ),
    Fault(
        "edges-of-registered-arrays-are-copied-backwards",
        "csrc/transport/memory/registered_arrays.cc",
        "[this](ptrdiff_t at, size_t size) { std::memcpy(data_ + at, heap_at_ + at, size); });",
        "[this](ptrdiff_t at, size_t size) { std::memcpy(heap_at_ + at, data_ + at, size); });",
        "Results outside the whole pages of a registered array do not reach it.",
        ("tests/transport", "tests/comm"),
        ("tests/comm/test_registered.py",),
    ),
    Fault(
        "failure-stays-on-its-host",
        "csrc/transport/proxy/proxy.cc",
        "if (load_acquire(segment_.failure_word()) != 0) tell_failure();",
        "if (load_acquire(segment_.control(rank_).state) == 2) tell_failure();",
        "Ranks of other hosts learn of a failure only when a rank leaves.",
        ("tests/hosts",),
        ("tests/hosts/test_hosts_failures.py",),
    ),
    Fault(
        "short-message-is-accepted",
        "csrc/p2p/message_engine.cc",
        "if (op->nbytes == message.nbytes && same_type) return true;",
        "if (op->nbytes >= message.nbytes && same_type) return true;",
        "A message that is shorter than the receive raises no error.",
        ("tests/comm",),
        ("tests/comm/test_message_failures.py", "tests/comm/test_send_recv.py"),
    ),
    Fault(
        "group-fuses-calls-that-depend-on-each-other",
        "csrc/comm/coalesce.cc",
        "return overlap(call.input, bytes_of(call), earlier.call.output, bytes_of(earlier.call));",
        "return overlap(call.output, bytes_of(call), earlier.call.output, bytes_of(earlier.call));",
        "In a group, a call may read its input before an earlier call has written it.",
        ("tests/comm",),
        ("tests/comm/test_coalesce.py",),
    ),
    Fault(
        "streams-do-not-wait-for-each-other",
        "csrc/device/last_work.cc",
        "if (!any_ || stream == stream_) return;",
        "if (!any_ || stream != stream_) return;",
        "Operations on two streams of a device use the same links at once.",
        ("tests/device",),
        ("tests/device/test_device_streams.py",),
    ),
    Fault(
        "one-host-is-taken-for-several",
        "csrc/bootstrap/join/launch_env.cc",
        "return parse_number(launcher.num_local, *here, 1, INT32_MAX) < env.num_ranks;",
        "return parse_number(launcher.num_local, *here, 1, INT32_MAX) <= env.num_ranks;",
        "Ranks that mpiexec has started on one host look for each other on other hosts.",
        ("tests/bootstrap",),
        ("tests/bootstrap/test_launch_env.py",),
    ),
    Fault(
        "finished-requests-are-removed-in-the-wrong-order",
        "csrc/mpi/mpi_wire.cc",
        "std::sort(done_.begin(), done_.begin() + num_done, std::greater<>());",
        "std::sort(done_.begin(), done_.begin() + num_done, std::less<>());",
        "When MPI finishes several requests at once, other requests are forgotten.",
        ("tests/hosts",),
        ("tests/hosts/test_hosts_mpi.py",),
    ),
]

# --- Python --------------------------------------------------------------------------------------

PACKAGE = [
    Fault(
        "nan-stays-in-the-error-feedback",
        "pycoll/torch/hooks.py",
        "state._keep(bucket, torch.where(missing.isfinite(), missing, 0))",
        "state._keep(bucket, missing)",
        "After one step with a NaN, compressed gradients are NaN for ever.",
        ("tests/torch",),
        ("tests/torch/test_hooks.py",),
    ),
    Fault(
        "unused-parameters-get-zero-gradients",
        "pycoll/parallel/features/data/reducer.py",
        "piece.value.grad = None if piece.name in absent else gradient.to(piece.value.dtype)",
        "piece.value.grad = gradient.to(piece.value.dtype)",
        "The optimizer decays parameters that no rank has used.",
        ("tests/parallel",),
        ("tests/parallel/test_data_parallel.py",),
    ),
    Fault(
        "shared-gradients-are-not-added-up",
        "pycoll/parallel/features/data/buckets.py",
        "self._sums += reduced",
        "self._sums = reduced.clone()",
        "With ZeRO 2, only the gradients of the last microbatch count.",
        ("tests/parallel",),
        ("tests/parallel/test_data_parallel.py",),
    ),
    Fault(
        "loss-of-shared-classes-has-a-wrong-gradient",
        "pycoll/parallel/features/tensor/vocab.py",
        "result.scatter_add_(-1, index, (-grad * here).unsqueeze(-1))",
        "result.scatter_add_(-1, index, (-grad).unsqueeze(-1))",
        "Ranks without the target's class take the gradient from their first class.",
        ("tests/parallel",),
        ("tests/parallel/test_parity.py",),
    ),
    Fault(
        "queries-see-the-next-tile",
        "pycoll/parallel/features/context/ring.py",
        "if self.causal and k_start >= q_stop:",
        "if self.causal and k_start > q_stop:",
        "Under a causal mask, tokens see the tile behind their own.",
        ("tests/parallel",),
        ("tests/parallel/test_context.py",),
    ),
    Fault(
        "old-gradients-stay-in-a-version",
        "pycoll/parallel/pipeline/stash.py",
        "version[name].grad = None",
        "gradient = None",
        "Gradients of microbatches that share a version of the weights are counted twice.",
        ("tests/parallel/pipeline", "tests/parallel/test_updates.py"),
        ("tests/parallel/pipeline/test_pipedream.py",),
    ),
    Fault(
        "only-the-failed-rank-reports-a-failed-save",
        "pycoll/parallel/trainer/saving.py",
        "if failed or unfinished:",
        "if self._problem or unfinished:",
        "Ranks that could write do not raise when another one could not.",
        ("tests/parallel",),
        ("tests/parallel/test_checkpoint.py",),
    ),
    Fault(
        "masks-of-replicas-overlap",
        "pycoll/parallel/features/dropout/dropout.py",
        "first = now.first_sample * rows_of_sample * row",
        "first = now.first_sample * rows_of_sample",
        "Dropout masks depend on how many replicas share a batch.",
        ("tests/parallel",),
        ("tests/parallel/test_functional_dropout.py", "tests/parallel/test_parity.py"),
    ),
    Fault(
        "rank-without-tokens-skips-the-backward-pass",
        "pycoll/parallel/features/experts.py",
        "return nothing + x.sum() * 0  # keeps the graph to `x`",
        "return nothing",
        "A rank whose experts got no tokens does not take part in the backward exchange.",
        ("tests/parallel",),
        ("tests/parallel/test_experts.py",),
    ),
    Fault(
        "both-halves-of-a-world-go-on",
        "pycoll/elastic/owner_port.py",
        "return twice > len(alive) or (twice == len(alive) and alive[0] in votes)",
        "return twice >= len(alive)",
        "Two halves that a broken cable separates make a new world each.",
        ("tests/comm/test_elastic.py", "tests/hosts/test_hosts_elastic.py"),
    ),
    Fault(
        "echo-hides-the-error",
        "pycoll/launch/rank_functions.py",
        "return min(failures, key=lambda failure: (failure.echo, failure.time_s))",
        "return min(failures, key=lambda failure: failure.time_s)",
        "run_ranks may raise the error of a rank that only lost its peer.",
        ("tests/test_launch.py",),
    ),
    Fault(
        "last-failed-rank-gives-the-status",
        "pycoll/launch/script.py",
        "if status and not self._failed:",
        "if status:",
        "The command ends with the status of the last rank that fails, not of the first.",
        ("tests/test_cli_ranks.py",),
    ),
]

FAULTS = [*CORE, *PACKAGE]
