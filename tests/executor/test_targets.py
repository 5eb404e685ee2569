"""The C++ checks, plain and under sanitizers: programs on hosts and devices, communicators."""

from __future__ import annotations

from pathlib import Path

import pytest
from builds import ROOT, build, need_sanitizer, plain, run, sanitized

pytestmark = [pytest.mark.sanitizer, pytest.mark.timeout(420)]

REPORTS = ("WARNING: ThreadSanitizer", "ERROR: AddressSanitizer", "runtime error:", "LeakSanitizer")


SLOW = pytest.mark.slow  # to compile


@pytest.fixture(scope="module", params=["plain", "thread", pytest.param("address", marks=SLOW)])
def tree(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A build tree with the C++ checks in it."""
    if request.param == "plain":
        folder = plain()
        build(folder, "checks", "-DPYCOLL_TESTS=ON")
        return folder
    need_sanitizer(request.param, tmp_path_factory.mktemp("probe"))
    folder = sanitized(request.param)
    build(folder, "checks")
    return folder


def check(folder: Path, program: str, *arguments: object, timeout_s: float = 400) -> str:
    done = run(
        folder / "tests/cpp" / program,
        *arguments,
        timeout_s=timeout_s,
        TSAN_OPTIONS="exitcode=66 halt_on_error=1",
        UBSAN_OPTIONS="halt_on_error=1 print_stacktrace=1",
        ASAN_OPTIONS="detect_leaks=1",
    )
    return done.stdout + f"\nexit code {done.returncode}"


def assert_clean(output: str) -> None:
    print(output)
    assert not [report for report in REPORTS if report in output], output[:6000]
    assert ", 0 failures\n" in output
    assert output.endswith("exit code 0")


def test_executor_check_on_2_to_4_ranks_is_right_and_clean(tree):
    assert_clean(check(tree, "executor_check", 2, 3, 4))


def test_device_check_on_3_ranks_is_right_and_clean(tree):
    assert_clean(check(tree, "device_check", "few", 3))


def test_device_failures_are_reported_by_those_that_wait(tree):
    assert_clean(check(tree, "device_failure_check"))


@pytest.mark.parametrize("protocol", ["simple", "ll", "ll128", "poison", "direct"])
def test_device_protocols_keep_calls_in_order(tree, protocol):
    assert_clean(check(tree, "device_order_check", protocol))


def test_fixed_programs_equal_what_their_algorithms_lower_to(tree):
    assert_clean(check(tree, "fixed_program_check"))


def test_communicator_check_is_right_and_clean(tree):
    assert_clean(check(tree, "communicator_check"))


def test_peer_memory_check_tells_peers_from_strangers(tree):
    assert_clean(check(tree, "peer_memory_check"))


@pytest.mark.slow
def test_executor_check_on_more_ranks_is_right_and_clean(tree):
    assert_clean(check(tree, "executor_check", 1, 5, 6, 7, 8))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_ranks", [(1, 2, 3, 4), (5, 6), (7,), (8,)], ids=str)
def test_device_check_of_every_dtype_is_right_and_clean(tree, num_ranks):
    """Every algorithm x protocol x dtype on so many ranks."""
    assert_clean(check(tree, "device_check", "all", *num_ranks, timeout_s=800))


def test_layers_link_one_by_one():
    """Every folder as a shared library of itself and what it may use: no symbol is undefined."""
    build(plain(), "layers", "-DPYCOLL_TESTS=ON")


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
        "target.sync();  // every thread's bytes are written, and read, before a flag says so",
        "",
        ["simple"],
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
        ["ll128"],
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
    "device_order_check.peers_do_not_meet_at_the_end": (
        "executor/device/run_block.h",
        "BlockDirect::meet(block_, program, launch_.num_steps);",
        "true;",
        ["direct"],
    ),
}


@pytest.fixture(scope="module")
def weakened(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checks under ThreadSanitizer, once more for each row of WEAKENED."""
    need_sanitizer("thread", tmp_path_factory.mktemp("probe"))
    headers = tmp_path_factory.mktemp("weakened")
    for change, (name, right, wrong, _) in WEAKENED.items():
        text = (ROOT / "csrc" / name).read_text()
        assert right in text, change
        to = headers / change / name
        to.parent.mkdir(parents=True)
        to.write_text(text.replace(right, wrong))
    folder = sanitized("thread", weakened=headers)
    build(folder, "weakened")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("change", WEAKENED)
def test_weakened_order_is_noticed(weakened, change):
    """The tests above can fail: each line that keeps an order is one that a test needs."""
    for argument in WEAKENED[change][-1]:
        output = check(weakened, change, argument)
        noticed = "WARNING: ThreadSanitizer: data race" in output
        assert noticed or not output.endswith("exit code 0"), (argument, output)
