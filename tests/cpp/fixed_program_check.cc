// The programs of benchmarks/fixed_program.h are what their algorithms lower to, and give the
// same sums on teams of host threads. Built plain and under sanitizers.
#include <cstdio>
#include <cstring>
#include <string>

#include "all_reduce_launches.h"
#include "fixed_program.h"
#include "kernels/threads/thread_blocks.h"

namespace pycoll {
namespace {

int num_failures = 0;
int num_cases = 0;

void expect(bool good, const std::string& what) {
  ++num_cases;
  if (good) return;
  ++num_failures;
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
}

bool operator==(const StepPlace& a, const StepPlace& b) {
  return a.block == b.block && a.first_piece == b.first_piece && a.src_index == b.src_index &&
         a.dst_index == b.dst_index && a.src == b.src && a.dst == b.dst;
}

template <class Algorithm, int n>
void compare_steps() {
  const Schedule schedule =
      find_algorithm(Collective::kAllReduce, Algorithm::kAlgorithm).generate(n, 0);
  for (int rank = 0; rank < n; ++rank) {
    const auto fixed = Algorithm::template steps<n>(rank);
    const DeviceProgram lowered =
        device_program(make_plan(schedule, rank, {.num_slots = kMaxSlots, .multicast = false}));
    bool same = lowered.steps.size() == static_cast<size_t>(fixed.kSize);
    for (size_t i = 0; same && i < lowered.steps.size(); ++i) {
      // Where a chunk that is not read or written would lie does not matter.
      StepPlace place = fixed.places[i];
      const Step& step = lowered.steps[i];
      if (!step.has(kReadLocal)) place.src = lowered.places[i].src;
      if (!step.has(kWriteLocal)) place.dst = lowered.places[i].dst;
      same = step == fixed.steps[i] && lowered.places[i] == place;
    }
    expect(same, std::string(Algorithm::kAlgorithm) + " n=" + std::to_string(n) + " rank " +
                     std::to_string(rank) + " is not what it lowers to");
  }
}

template <class Algorithm, int... n>
void compare_steps(std::integer_sequence<int, n...>) {
  (compare_steps<Algorithm, n + 2>(), ...);
}

constexpr DeviceProtocol kProtocol = DeviceProtocol::kLL;

template <class Fixed>
ThreadKernel kernel_for() {
  return [](const ThreadEnv& env, const DeviceLaunch& launch, int channel, BlockShared& shared) {
    BlockRun<kProtocol, DType::kF32, ThreadEnv, Fixed>(env, launch, channel, shared).run();
  };
}
template <class Algorithm, int n>
ThreadKernel fixed_kernel_of(const DeviceLaunch& launch) {
  return [&]<int... rank>(std::integer_sequence<int, rank...>) {
    const ThreadKernel kernels[] = {kernel_for<FixedProgram<Algorithm, n, rank>>()...};
    return kernels[launch.rank];
  }(std::make_integer_sequence<int, n>{});
}
ThreadKernel kernel_of(const DeviceLaunch&) { return kernel_for<void>(); }

template <class Algorithm, int n>
void compare_runs() {
  ThreadPool pool;
  const std::string name = std::string(Algorithm::kAlgorithm) + " n=" + std::to_string(n);
  AllReduceLaunches launches(Algorithm::kAlgorithm, n, kProtocol, 2500, 2);
  // One after the other on the same links: each leaves them as the other expects them.
  for (int repeat = 0; repeat < 3; ++repeat) {
    run_blocks(launches.launches().data(), n, pool, kernel_of);
    expect(launches.take_sums(), name + ", interpreted");
    run_blocks(launches.launches().data(), n, pool, fixed_kernel_of<Algorithm, n>);
    expect(launches.take_sums(), name + ", fixed");
  }
}

void check() {
  using UpTo17 = std::make_integer_sequence<int, 16>;
  compare_steps<FixedOneShot>(UpTo17{});
  compare_steps<FixedTwoShot>(UpTo17{});
  compare_steps<FixedRing>(UpTo17{});
  compare_runs<FixedOneShot, 2>();
  compare_runs<FixedOneShot, 4>();
  compare_runs<FixedOneShot, 8>();
  compare_runs<FixedTwoShot, 4>();
  compare_runs<FixedRing, 4>();
}

}  // namespace
}  // namespace pycoll

int main() {
  pycoll::check();
  std::printf("%d cases, %d failures\n", pycoll::num_cases, pycoll::num_failures);
  return pycoll::num_failures == 0 ? 0 : 1;
}
