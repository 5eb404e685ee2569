// The cost of a launch on a GPU: an empty kernel, one with 2 KiB of arguments, and short
// all_reduces of ranks that are blocks of one cooperative launch, once interpreted and once with
// the program as a constant. `launch_bench [--json FILE]`; status 2: there is no GPU.
//
// Each figure is a median of batches: of the time that a launch takes its caller, and of the time
// from one launch to the next when they follow each other in a stream. Answers are checked outside
// of what is timed.
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "all_reduce_launches.h"
#include "fixed_program.h"
#include "kernels/cuda/cuda_kernels.cuh"

namespace pycoll {
namespace {

constexpr int kNumBatches = 25;
constexpr int kLaunches = 200;  // of a batch
constexpr int kNumThreads = 128;

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

struct TwoKiB {
  uint64_t words[256];
};
__global__ void empty_kernel() {}
__global__ void arguments_kernel(const __grid_constant__ TwoKiB arguments, uint64_t* never) {
  if (never != nullptr) *never = arguments.words[threadIdx.x];
}

constexpr DeviceProtocol kProtocol = DeviceProtocol::kLL;

template <class Algorithm, int n>
__global__ void __launch_bounds__(kMaxDeviceThreads, 1)
    fixed_kernel(const __grid_constant__ DeviceLaunch launch, const DeviceLaunch* launches) {
  run_as_block(launch, launches, [](const DeviceLaunch& own, int channel, BlockShared& shared) {
    const auto run_rank = [&]<int rank>(std::integral_constant<int, rank>) {
      if (own.rank != rank) return;
      using Fixed = FixedProgram<Algorithm, n, rank>;
      BlockRun<kProtocol, DType::kF32, CudaEnv, Fixed>(CudaEnv(), own, channel, shared).run();
    };
    [&]<int... rank>(std::integer_sequence<int, rank...>) {
      (run_rank(std::integral_constant<int, rank>{}), ...);
    }(std::make_integer_sequence<int, n>{});
  });
}

/// Memory that the host and the GPU reach under one address.
class ManagedMemory : public std::pmr::memory_resource {
  void* do_allocate(size_t nbytes, size_t) override {
    void* memory = nullptr;
    check(cudaMallocManaged(&memory, nbytes), "cudaMallocManaged");
    return memory;
  }
  void do_deallocate(void* memory, size_t, size_t) override { cudaFree(memory); }
  bool do_is_equal(const memory_resource& other) const noexcept override { return this == &other; }
};

struct Row {
  std::string name;
  int num_ranks = 1;
  int64_t nbytes = 0;
  double enqueue_us = 0;  // the caller's time for a launch
  double launch_us = 0;   // from one launch to the next in the stream
  bool right = true;
};

double median(std::vector<double> times) {
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2];
}

/// Times `launch`, which puts one launch into the default stream.
template <class Launch>
Row measure(const std::string& name, Launch&& launch) {
  using Clock = std::chrono::steady_clock;
  const auto elapsed_us = [](Clock::time_point since) {
    return std::chrono::duration<double, std::micro>(Clock::now() - since).count();
  };
  std::vector<double> enqueue_us;
  std::vector<double> launch_us;
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin), "an event");
  check(cudaEventCreate(&end), "an event");
  for (int batch = 0; batch < kNumBatches + 2; ++batch) {
    check(cudaEventRecord(begin), "an event");
    const auto start = Clock::now();
    for (int i = 0; i < kLaunches; ++i) check(launch(), name.c_str());
    const double batch_us = elapsed_us(start);
    check(cudaEventRecord(end), "an event");
    check(cudaEventSynchronize(end), name.c_str());
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin, end), "an event");
    if (batch < 2) continue;  // warm-up
    enqueue_us.push_back(batch_us / kLaunches);
    launch_us.push_back(milliseconds * 1e3 / kLaunches);
  }
  check(cudaEventDestroy(begin), "an event");
  check(cudaEventDestroy(end), "an event");
  Row row;
  row.name = name;
  row.enqueue_us = median(enqueue_us);
  row.launch_us = median(launch_us);
  return row;
}

Row measure_all_reduce(const std::string& name, const void* kernel, AllReduceLaunches& all,
                       int64_t nbytes) {
  const DeviceLaunch first = all.launches().front();
  const DeviceLaunch* launches = all.launches().data();
  const auto launch = [&] {
    void* arguments[] = {const_cast<DeviceLaunch*>(&first), &launches};
    return cudaLaunchCooperativeKernel(kernel, dim3(static_cast<unsigned>(all.num_ranks())),
                                       dim3(kNumThreads), arguments, 0, nullptr);
  };
  check(launch(), name.c_str());
  check(cudaDeviceSynchronize(), name.c_str());
  const bool right = all.take_sums();
  Row row = measure(name, launch);
  row.num_ranks = all.num_ranks();
  row.nbytes = nbytes;
  check(cudaDeviceSynchronize(), name.c_str());
  row.right = all.take_sums() && right;
  return row;
}

template <class Algorithm, int n>
void measure_pair(std::vector<Row>& rows, ManagedMemory& memory) {
  for (const int64_t nbytes : {int64_t{8}, int64_t{4096}, int64_t{65536}}) {
    AllReduceLaunches all(Algorithm::kAlgorithm, n, kProtocol, nbytes / int64_t{sizeof(float)},
                          kNumThreads, &memory);
    const std::string name = std::string("all_reduce ") + Algorithm::kAlgorithm + "/ll, ";
    using Kernel = void (*)(DeviceLaunch, const DeviceLaunch*);
    const Kernel interpreted = &run_kernel<kProtocol, DType::kF32>;
    const Kernel fixed = &fixed_kernel<Algorithm, n>;
    rows.push_back(measure_all_reduce(name + "interpreted",
                                      reinterpret_cast<const void*>(interpreted), all, nbytes));
    rows.push_back(
        measure_all_reduce(name + "fixed", reinterpret_cast<const void*>(fixed), all, nbytes));
  }
}

std::vector<Row> measure_all() {
  std::vector<Row> rows;
  rows.push_back(measure("empty kernel", [] {
    empty_kernel<<<1, kNumThreads>>>();
    return cudaGetLastError();
  }));
  const TwoKiB arguments{};
  rows.push_back(measure("2 KiB of arguments", [&] {
    arguments_kernel<<<1, kNumThreads>>>(arguments, nullptr);
    return cudaGetLastError();
  }));
  ManagedMemory memory;
  measure_pair<FixedOneShot, 2>(rows, memory);
  measure_pair<FixedOneShot, 8>(rows, memory);
  measure_pair<FixedTwoShot, 4>(rows, memory);
  return rows;
}

void write_json(const char* path, const std::vector<Row>& rows, const char* gpu) {
  std::FILE* const file = std::fopen(path, "w");
  if (file == nullptr) throw std::runtime_error(std::string("cannot write ") + path);
  std::fprintf(file, "{\"gpu\": \"%s\", \"launches_per_batch\": %d, \"batches\": %d, \"rows\": [",
               gpu, kLaunches, kNumBatches);
  for (size_t i = 0; i < rows.size(); ++i) {
    const Row& row = rows[i];
    std::fprintf(file,
                 "%s\n {\"name\": \"%s\", \"ranks\": %d, \"nbytes\": %lld, \"enqueue_us\": %.3f, "
                 "\"launch_us\": %.3f, \"right\": %s}",
                 i == 0 ? "" : ",", row.name.c_str(), row.num_ranks,
                 static_cast<long long>(row.nbytes), row.enqueue_us, row.launch_us,
                 row.right ? "true" : "false");
  }
  std::fprintf(file, "\n]}\n");
  std::fclose(file);
}

int run(const char* json) {
  int num_gpus = 0;
  const cudaError_t status = cudaGetDeviceCount(&num_gpus);
  if (status != cudaSuccess || num_gpus == 0) {
    std::fprintf(stderr, "launch_bench: no GPU here: %s\n",
                 status != cudaSuccess ? cudaGetErrorString(status) : "none found");
    return 2;
  }
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, 0), "the GPU's properties");
  const std::vector<Row> rows = measure_all();
  std::printf("%-40s %5s %8s %12s %12s\n", properties.name, "ranks", "bytes", "enqueue, us",
              "launch, us");
  bool right = true;
  for (const Row& row : rows) {
    std::printf("%-40s %5d %8lld %12.2f %12.2f%s\n", row.name.c_str(), row.num_ranks,
                static_cast<long long>(row.nbytes), row.enqueue_us, row.launch_us,
                row.right ? "" : "  WRONG");
    right = right && row.right;
  }
  if (json != nullptr) write_json(json, rows, properties.name);
  return right ? 0 : 1;
}

}  // namespace
}  // namespace pycoll

int main(int argc, char** argv) {
  const bool to_file = argc == 3 && std::strcmp(argv[1], "--json") == 0;
  if (argc != 1 && !to_file) {
    std::fprintf(stderr, "usage: launch_bench [--json FILE]\n");
    return 1;
  }
  try {
    return pycoll::run(to_file ? argv[2] : nullptr);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "launch_bench: %s\n", error.what());
    return 1;
  }
}
