// Runs every algorithm of every collective with every device protocol on teams of host threads, and
// compares bit by bit with the same program on CpuTarget, on random bits. ll128 also runs on
// threads that share lines, as the lanes of a GPU's warp do. Built plain and under sanitizers;
// `device_check few|all [ranks ...]`: the dtypes of few_kernels.cc or every one.
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "device_cases.h"
#include "kernels/threads/launch_threads.h"

namespace pycoll {
namespace {

int num_failures = 0;
int num_cases = 0;

/// Blocks as threads of this process, on its own memory.
struct HostThreads : CaseDevice {
  void run(std::pmr::vector<DeviceLaunch>& launches) override {
    launch_on_threads(launches.data(), static_cast<int>(launches.size()), pool);
  }
  ThreadPool pool;
} device;

/// The kernel of ll128 on lanes; null for dtypes that are not compiled for them. c128 has lines of
/// 112 bytes of payload.
ThreadKernel kernel_on_lanes(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return thread_kernel<DeviceProtocol::kLL128, DType::kF32, ThreadLineEnv>();
    case DType::kBF16:
      return thread_kernel<DeviceProtocol::kLL128, DType::kBF16, ThreadLineEnv>();
    case DType::kI8:
      return thread_kernel<DeviceProtocol::kLL128, DType::kI8, ThreadLineEnv>();
    case DType::kC128:
      return thread_kernel<DeviceProtocol::kLL128, DType::kC128, ThreadLineEnv>();
    default:
      return nullptr;
  }
}

/// Blocks whose threads share lines: two lines at a time.
struct HostLanes : CaseDevice {
  HostLanes() { num_threads = 2 * ThreadLine::kLanes; }
  void run(std::pmr::vector<DeviceLaunch>& launches) override {
    run_blocks(launches.data(), static_cast<int>(launches.size()), pool,
               [](const DeviceLaunch& launch) { return kernel_on_lanes(launch.dtype); });
  }
  ThreadPool pool;
} lanes;

void run_all(const Plans& plans, const Cell& cell, const Extent& extent) {
  const auto report = [](const char* on) {
    return [on](const Case& c, const std::string& wrong) {
      ++num_cases;
      if (wrong.empty()) return;
      ++num_failures;
      std::fprintf(stderr, "FAILED: %s%s: %s\n", c.name().c_str(), on, wrong.c_str());
    };
  };
  run_cases(device, plans, cell, extent, [](const Case&) { return num_failures == 0; }, report(""));
  const auto has_lanes = [](const Case& c) {
    return num_failures == 0 && c.protocol == DeviceProtocol::kLL128 &&
           kernel_on_lanes(c.cell.dtype) != nullptr;
  };
  run_cases(lanes, plans, cell, extent, has_lanes, report(" on lanes"));
}

/// Every algorithm of `num_ranks` ranks with each of these dtypes. Ops take turns, and so do a
/// message of several tiles and one of few elements that lie anywhere.
void check_algorithms(const std::vector<DType>& dtypes, int num_ranks) {
  size_t turn = 0;
  for (const AlgorithmInfo& algorithm : algorithms()) {
    const Plans plans(algorithm, num_ranks);
    for (const DType dtype : dtypes) {
      const std::vector<Op> ops = ops_of(dtype);
      const Cell cell{dtype, ops[turn % ops.size()]};
      const int64_t many = 5 * device.slot_bytes / 4 / static_cast<int64_t>(dtype_size(dtype)) + 1;
      run_all(plans, cell, turn % 2 == 0 ? Extent{many, 0} : Extent{num_ranks + 1, 1});
      ++turn;
    }
  }
}

/// These dtypes and every op through the paths of aligned packs, of elements, and of bytes.
void check_arithmetic(const std::vector<DType>& dtypes) {
  const Plans plans(find_algorithm(Collective::kAllReduce, "one_shot"), 3);
  for (const DType dtype : dtypes) {
    for (const Op op : ops_of(dtype)) {
      for (const int shift : {0, static_cast<int>(dtype_size(dtype)) % 16, 1}) {
        run_all(plans, {dtype, op}, {131, shift});
      }
    }
  }
}

void check(bool all, const std::vector<int>& worlds) {
  std::vector<DType> dtypes = {DType::kF32, DType::kBF16, DType::kI8};
  if (all) {
    dtypes.clear();
    for (int d = 0; d < kNumDTypes; ++d) dtypes.push_back(static_cast<DType>(d));
  }
  for (const int num_ranks : worlds) check_algorithms(dtypes, num_ranks);
  check_arithmetic(dtypes);
}

}  // namespace
}  // namespace pycoll

int main(int argc, char** argv) {
  const std::string which = argc > 1 ? argv[1] : "";
  std::vector<int> worlds;
  for (int i = 2; i < argc; ++i) worlds.push_back(std::atoi(argv[i]));
  if (worlds.empty()) worlds = {2, 3};
  if (which != "few" && which != "all") {
    std::fprintf(stderr, "usage: device_check few|all [ranks ...]\n");
    return 2;
  }
  pycoll::check(which == "all", worlds);
  std::printf("%d cases, %d failures\n", pycoll::num_cases, pycoll::num_failures);
  return pycoll::num_failures == 0 ? 0 : 1;
}
