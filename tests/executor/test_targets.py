"""The C++ checks, plain and under sanitizers: programs on hosts and devices, communicators."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from builds import ROOT, build, need_sanitizer, plain, run, sanitized

pytestmark = [pytest.mark.sanitizer, pytest.mark.timeout(600)]

REPORTS = ("WARNING: ThreadSanitizer", "ERROR: AddressSanitizer", "runtime error:", "LeakSanitizer")
# The programs of tests/cpp, with the arguments of each run. All print the number of failures.
ON_HOST: list[list[object]] = [
    ["executor_check", 2, 3, 4],
    ["communicator_check"],
    ["peer_memory_check"],
    # As many mutated frames as take about 10 s under a sanitizer; MANY_CASES has more.
    ["frame_check", 1500],
]
ON_DEVICES: list[list[object]] = [
    ["device_check", "few", 3],
    ["gpu_matrix", "--few", "--ranks", 3, "--dtypes", "f32,bf16,i8"],
    ["device_failure_check"],
    ["device_words_check"],
    ["device_words_check", "one queue"],
    *(["device_order_check", p] for p in ("simple", "ll", "ll128", "lanes", "poison", "direct")),
]
MANY_CASES: list[list[object]] = [
    ["frame_check", 200_000],
    ["executor_check", 1, 5, 6, 7, 8],
    *(["device_check", "all", n] for n in range(1, 9)),
]


def check(folder: Path, program: object, *arguments: object) -> str:
    done = run(
        folder / "tests/cpp" / str(program),
        *arguments,
        timeout_s=800,
        TSAN_OPTIONS="exitcode=66 halt_on_error=1",
        UBSAN_OPTIONS="halt_on_error=1 print_stacktrace=1",
        ASAN_OPTIONS="detect_leaks=1",
    )
    return done.stdout + f"\nexit code {done.returncode}"


def assert_clean(folder: Path, programs: list[list[object]], at_once: int = 1) -> None:
    """All of the programs end without a failure and without a report."""
    with ThreadPoolExecutor(at_once) as pool:
        outputs = list(pool.map(lambda program: check(folder, *program), programs))
    for program, output in zip(programs, outputs, strict=True):
        print(*program, output)
        reports = [report for report in REPORTS if report in output]
        good = not reports and ", 0 failures\n" in output and output.endswith("exit code 0")
        assert good, f"{program}:\n{output[:6000]}"


def build_checks(kind: str, dtypes: str, probe: Path) -> Path:
    """The folder with the checks: plain, or under a sanitizer."""
    if kind == "plain":
        build(folder := plain(), "checks", "-DPYCOLL_TESTS=ON")
        build(folder, "fixed_program_check")
        return folder
    need_sanitizer(kind, probe)
    folder = sanitized(kind, dtypes)
    build(folder, "checks", timeout_s=1500)
    return folder


def test_checks_are_right(tmp_path):
    folder = build_checks("plain", "all", tmp_path)
    few_frames = ["frame_check", 300]
    # What fixed programs are is decided by the compiler: a sanitizer would see nothing new.
    programs = [*ON_HOST[:-1], few_frames, *ON_DEVICES, ["fixed_program_check"]]
    assert_clean(folder, programs, at_once=2)


def test_layers_link_one_by_one():
    """Every folder as a shared library of itself and what it may use: no symbol is undefined."""
    build(plain(), "layers", "-DPYCOLL_TESTS=ON")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["thread", "address"])
def test_checks_are_right_and_clean_under_sanitizers(kind, tmp_path):
    folder = build_checks(kind, "few", tmp_path)
    assert_clean(folder, ON_HOST + ON_DEVICES, at_once=2)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", ["plain", "thread", "address"])
def test_checks_of_many_ranks_and_every_dtype_are_right_and_clean(kind, tmp_path):
    """Every algorithm x protocol x dtype."""
    folder = build_checks(kind, "all", tmp_path)
    assert_clean(folder, ON_DEVICES + MANY_CASES)


RELEASE = "store(value, PYCOLL_ORDER(release));"
ACQUIRE = "load(PYCOLL_ORDER(acquire));"
# What each change takes away: the header, the line and what it becomes, and the arguments of the
# check that must notice. Where what is ordered is itself atomic, as the lines of ll and poison
# are, no order can be seen to be missing, but a wrong result can.
WEAKENED = {
    "executor_check.store_release": (
        "transport/ring/slot.h",
        "std::atomic_ref<uint64_t>(word).store(value, std::memory_order_release);",
        "std::atomic_ref<uint64_t>(word).store(value, std::memory_order_relaxed);",
        ["3"],
    ),
    "executor_check.load_acquire": (
        "transport/ring/slot.h",
        ".load(std::memory_order_acquire);",
        ".load(std::memory_order_relaxed);",
        ["3"],
    ),
    "device_order_check.store_release": (
        "transport/ring/device_slot.h",
        RELEASE,
        RELEASE.replace("release", "relaxed"),
        ["simple", "ll128", "poison", "direct"],
    ),
    "device_order_check.load_acquire": (
        "transport/ring/device_slot.h",
        ACQUIRE,
        ACQUIRE.replace("acquire", "relaxed"),
        ["simple", "ll128", "poison", "direct"],
    ),
    "device_order_check.credits_are_not_released": (
        "transport/ring/device_slot.h",
        "store_release(*ring_.head, ++released_);",
        "store_relaxed(*ring_.head, ++released_);",
        ["simple", "ll128"],
    ),
    "device_order_check.credits_are_not_waited_for": (
        "transport/ring/device_slot.h",
        "if (posted_ - released_ < static_cast<uint64_t>(ring_.num_slots)) return true;",
        "return true;",
        ["simple", "ll", "ll128"],
    ),
    "device_order_check.no_barrier_before_flags": (
        "executor/protocol.h",
        "target.sync();  // every thread has written and read its bytes before a flag is set",
        "",
        ["simple"],
    ),
    "device_order_check.no_barrier_before_operands_are_read": (
        "executor/device/block.h",
        "sync();  // every thread reads the operands of all steps",
        "",
        ["simple", "ll", "ll128", "poison", "direct"],
    ),
    "device_order_check.flags_of_ll_without_a_number": (
        "executor/device/block_lines.h",
        "static_cast<uint32_t>(sequence & 0xffffu);",
        "static_cast<uint32_t>(sequence & 0);",
        ["ll"],
    ),
    "device_order_check.flags_of_ll128_without_a_number": (
        "executor/device/block_long_lines.h",
        "return sequence << 24 |",
        "return (sequence & 0) << 24 | uint64_t{1} << 24 |",
        ["ll128", "lanes"],
    ),
    "device_order_check.poison_is_not_put_back": (
        "executor/device/block_lines.h",
        "device::store_relaxed16(line, {~uint64_t{0}, ~uint64_t{0}});",
        "",
        ["poison"],
    ),
    "device_order_check.poison_in_one_buffer": (
        "executor/device/device_launch.h",
        "inline constexpr int kPoisonBuffers = 3;",
        "inline constexpr int kPoisonBuffers = 1;",
        ["poison"],
    ),
    "device_order_check.peers_do_not_meet_at_the_start": (
        "executor/device/run_block.h",
        "(!meets || BlockDirect::meet(block_, program, 0)) &&",
        "",
        ["direct"],
    ),
    "device_order_check.messages_of_a_meeting_are_not_released": (
        "executor/device/block_direct.h",
        "link.release_in_band();",
        "",
        ["direct"],
    ),
    "device_order_check.sources_are_not_waited_for": (
        "executor/protocol.h",
        "wait_for_sources(target, program, phase) && wait_for_credits(target, program, phase);",
        "wait_for_credits(target, program, phase);",
        ["simple"],
    ),
    "device_order_check.positions_are_not_stored": (
        "executor/device/run_block.h",
        "close_links();",
        "",
        ["simple", "ll", "ll128", "direct"],
    ),
    "device_order_check.calls_are_not_announced": (
        "executor/device/run_block.h",
        "if constexpr (kind == DeviceProtocol::kPoison) announce();",
        "",
        ["poison"],
    ),
    "device_order_check.peers_do_not_meet_at_the_end": (
        "executor/device/run_block.h",
        "(!meets || BlockDirect::meet(block_, program, launch_.num_steps));",
        "true;",
        ["direct"],
    ),
    "device_order_check.lanes_do_not_vote_on_the_flag": (
        "executor/device/block_long_lines.h",
        "return target_.env().all_of_line(!has_flag(0) || flag >> 24 == expected >> 24);",
        "return !has_flag(0) || flag >> 24 == expected >> 24;",
        ["lanes"],
    ),
    "device_failure_check.without_abort": (
        "executor/device/block.h",
        "if (device::load_relaxed(*launch_.abort_word) != 0) {",
        "if (false) {",
        ["all"],
    ),
    "device_failure_check.without_deadline": (
        "executor/device/block.h",
        "if (env_.clock_ns() > shared_.deadline_ns) return",
        "if (false) return",
        ["all"],
    ),
    "device_failure_check.without_failure_of_other_threads": (
        "executor/device/block.h",
        "if (device::load_relaxed(*launch_.failed) != 0) return true;",
        "",
        ["all"],
    ),
    "device_failure_check.without_trouble_of_other_lanes": (
        "executor/device/block.h",
        "if constexpr (kTeam > 1) trouble = env_.any_of_line(trouble);",
        "",
        ["all"],
    ),
    "device_failure_check.without_failure_of_earlier_launches": (
        "executor/device/run_block.h",
        "bool may_run = device::load_relaxed(*launch_.failed) == 0;",
        "bool may_run = true;",
        ["all"],
    ),
    "device_failure_check.without_overlap": (
        "executor/device/run_block.h",
        "if (now % 2 != 0) return block_.overlap();",
        "",
        ["all"],
    ),
    "device_failure_check.without_start_of_an_epoch": (
        "executor/device/run_block.h",
        "device::store_relaxed(word, now + 1);",
        "",
        ["all"],
    ),
    "device_failure_check.without_end_of_an_epoch": (
        "executor/device/run_block.h",
        "device::store_relaxed(word, device::load_relaxed(word) + 1);",
        "",
        ["all"],
    ),
    "device_failure_check.without_operation_of_a_failure": (
        "executor/device/block.h",
        "device::store_relaxed(launch_.report->operation, launch_.operation);",
        "",
        ["all"],
    ),
    "device_failure_check.without_digest_of_simple": (
        "executor/protocol.h",
        "if (link.mark() != target.digest()) return target.mismatch(peer, operands.index);",
        "",
        ["all"],
    ),
    "device_failure_check.without_digest_of_ll": (
        "executor/device/block_lines.h",
        "if (!same_call) return target_.mismatch(site.peer, operands_.index);",
        "",
        ["all"],
    ),
    "device_failure_check.without_digest_of_ll128": (
        "executor/device/block_long_lines.h",
        "if (!target_.env().all_of_line(!has_flag(kNumChunks - 1) || flag == expected)) {",
        "if (false) {",
        ["all"],
    ),
    "device_failure_check.without_digest_of_poison": (
        "executor/device/run_block.h",
        "(device::load_ordered(tail.marks[buffer()]) == launch_.digest ||",
        "(true ||",
        ["all"],
    ),
    "device_failure_check.without_digest_of_direct": (
        "executor/device/block_direct.h",
        "return same || target.mismatch(peer, step);",
        "return true;",
        ["all"],
    ),
    "device_failure_check.without_old_flags_of_ll": (
        "executor/device/block_lines.h",
        "if ((link.slot_uses() + 1) % LowLatencyFlag::kClearUses != 0) return true;",
        "return true;",
        ["all"],
    ),
}


@pytest.fixture(scope="module")
def weakened(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checks under ThreadSanitizer, once more for each row of WEAKENED."""
    need_sanitizer("thread", tmp_path_factory.mktemp("probe"))
    headers = tmp_path_factory.mktemp("weakened")
    for change, (name, right, wrong, _) in WEAKENED.items():
        text = (ROOT / "csrc" / name).read_text()
        to = headers / change / name
        to.parent.mkdir(parents=True)
        to.write_text(text.replace(right, wrong))
    folder = sanitized("thread", weakened=headers)
    build(folder, "weakened", timeout_s=3000)
    return folder


def test_weakened_lines_stand_in_the_sources_once():
    for change, (name, right, _, _) in WEAKENED.items():
        assert (ROOT / "csrc" / name).read_text().count(right) == 1, (change, name, right)


@pytest.mark.soak
@pytest.mark.parametrize("change", WEAKENED)
def test_weakened_order_is_noticed(weakened, change):
    """The tests above can fail: each line that keeps an order is one that a test needs."""
    for argument in WEAKENED[change][-1]:
        output = check(weakened, change, argument)
        noticed = "WARNING: ThreadSanitizer: data race" in output
        assert noticed or not output.endswith("exit code 0"), (argument, output)
