// Every algorithm x protocol x dtype x op x number of ranks on a device, compared bit by bit with
// the same program on CpuTarget. All ranks are blocks of one launch, in memory of the DeviceTable:
// cudaMalloc's on a GPU, the emulated device's otherwise. Then a launch that waits for an absent
// peer and is aborted: it must end at once, and leave the device usable.
//
// The whole of the matrix is run with messages of 1, 33 and 4,099 elements, drawn with a fixed
// seed, and in half of the cases all operands start in the middle of an element; messages of
// 300,000 elements are run for every algorithm x protocol x number of ranks, with dtypes and ops in
// turn.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "device_arena.h"
#include "device_cases.h"
#include "device_main.h"

namespace pycoll {
namespace {

constexpr const char* kHelp =
    R"(usage: gpu_matrix [--few] [--ranks N,N,...] [--dtypes NAME,NAME,...]
                  [--only TEXT] [--seconds S]

Runs every algorithm x protocol x dtype x op x 2 to 8 ranks on the first device and compares the
bits with the CPU's. Prints a line for each wrong case; the status is 1 if there is one.

  --few       a cross-section: ops and sizes are drawn with a fixed seed; 2 and 3 ranks
  --ranks     these numbers of ranks
  --dtypes    these dtypes, as f32,bf16
  --only      cases whose name contains TEXT
  --seconds   stops after S seconds; what was not run is said, and the status is 3

examples:
  gpu_matrix                                   all of it
  gpu_matrix --few                             seconds, also on the emulated device
  gpu_matrix --ranks 2 --only two_shot/direct  one kernel set, as for compute-sanitizer
  gpu_matrix --only "f32 sum n=8 count=33"     one line of an earlier run again
)";

// Memory of the device. The longest case fits: 300,000 elements of 16 bytes of 8 ranks.
constexpr size_t kArenaBytes = size_t{256} << 20;
constexpr int64_t kLong = 300'000;
constexpr int64_t kAbortWithinNs = 100'000'000;

struct Options : DeviceOptions {
  std::vector<int> ranks;
  std::vector<DType> dtypes;
};

class Matrix {
 public:
  Matrix(const Device& device, const Options& options)
      : options_(options),
        arena_(device, kArenaBytes),
        stream_(device),
        device_(arena_, stream_.get()) {
    const DeviceFacts facts = device.facts();
    // Two blocks per rank on the emulated device, whose threads share few cores.
    device_.num_channels = std::min(facts.max_channels, 4);
    device_.num_threads = facts.block_threads;
    if (facts.capability != 0) device_.slot_bytes = 16 << 10;
  }

  void run() {
    for (const int num_ranks : options_.ranks) {
      for (const AlgorithmInfo& algorithm : algorithms()) {
        const Plans plans(algorithm, num_ranks);
        for (const DType dtype : options_.dtypes) run_dtype(plans, dtype);
        run_long(plans);
      }
    }
    if (!options_.few || options_.only.empty()) run_aborted();
    progress(true);
  }
  int num_wrong() const { return num_wrong_; }
  int num_cases() const { return num_cases_; }
  int num_left_out() const { return num_left_out_; }

 private:
  struct ArenaDevice : CaseDevice {
    ArenaDevice(DeviceArena& its_arena, DeviceStream its_stream)
        : arena(its_arena), stream(its_stream) {
      memory = &its_arena;
      shift = its_arena.shift();
      // Other programs may take the emulated device's processors for long.
      timeout_ns = its_arena.device().facts().capability != 0 ? 20'000'000'000 : 300'000'000'000;
    }
    void run(std::pmr::vector<DeviceLaunch>& launches) override {
      arena.upload(stream);
      start(launches, static_cast<int>(launches.size()));
      arena.device().synchronize(stream);
      arena.download(stream);
    }
    void start(std::pmr::vector<DeviceLaunch>& launches, int num) {
      const Device& on = arena.device();
      on.check(on.table().launch_together(on.index(), launches.data(),
                                          arena.seen_by_kernels(launches.data()), num, stream),
               "launching");
    }
    DeviceArena& arena;
    DeviceStream stream;
  };

  /// Elements of a block of a message of `count`: the message is divided among the blocks.
  static int64_t block_count(const Plans& plans, int64_t count) {
    const int64_t blocks = info(plans.algorithm->collective).blocks_per_payload(plans.num_ranks());
    return std::max<int64_t>(1, count / blocks);
  }

  void run_dtype(const Plans& plans, DType dtype) {
    constexpr int64_t kCounts[] = {1, 33, 4099};
    const bool has_op = info(plans.algorithm->collective).has_op;
    std::vector<Op> ops = ops_of(dtype);
    if (!has_op) ops.resize(1);
    // Drawn, since what takes turns may keep step: an op would always have the same length.
    if (options_.few) ops = {ops[random_() % ops.size()]};
    for (const Op op : ops) {
      const int64_t count = block_count(plans, kCounts[random_() % std::size(kCounts)]);
      run_message(plans, {dtype, op}, {count, static_cast<int>(random_() % 2)});
    }
  }
  void run_long(const Plans& plans) {
    if (options_.few && long_turn_ % 16 != 0) {
      ++long_turn_;
      return;
    }
    const DType dtype = options_.dtypes[long_turn_ % options_.dtypes.size()];
    const std::vector<Op> ops = ops_of(dtype);
    const int64_t count = options_.few ? kLong / 16 : kLong;
    run_message(plans, {dtype, ops[long_turn_ % ops.size()]}, {block_count(plans, count), 0});
    ++long_turn_;
  }

  void run_message(const Plans& plans, const Cell& cell, const Extent& extent) {
    run_cases(
        device_, plans, cell, extent,
        [&](const Case& c) {
          if (c.name().find(options_.only) == std::string::npos) return false;
          if (elapsed_s() >= options_.seconds) {
            ++num_left_out_;
            return false;
          }
          arena_.reset();  // the launches of the case before are gone
          return true;
        },
        [&](const Case& c, const std::string& wrong) {
          ++num_cases_;
          if (!wrong.empty()) say_wrong(c.name() + ": " + wrong);
          progress(false);
        });
  }

  /// One rank of two launches, and waits for the other one until the abort word is set.
  void run_aborted() {
    const Plans plans(find_algorithm(Collective::kAllReduce, "one_shot"), 2);
    for (const DeviceProtocol protocol : {DeviceProtocol::kSimple, DeviceProtocol::kLL}) {
      const Case c{plans.algorithm, 2, {DType::kF32, Op::kSum}, 33, 0, protocol};
      ++num_cases_;
      arena_.reset();
      const std::string reason = why_abort_fails(plans, c);
      if (!reason.empty()) say_wrong("abort of " + c.name() + ": " + reason);
      run_message(plans, c.cell, {33, 0});  // the device is usable
    }
  }
  std::string why_abort_fails(const Plans& plans, const Case& c) {
    const Device& device = arena_.device();
    const PinnedMemory word(device, sizeof(uint64_t));
    auto& abort_word = *reinterpret_cast<uint64_t*>(word.data());
    CaseLaunches launches(device_, c, plans.through_slots);
    std::pmr::vector<DeviceLaunch>& all = launches.launches();
    std::string reason = launches.set_up(make_buffers(c, plans.through_slots));
    if (!reason.empty()) return reason;
    all[0].abort_word = &abort_word;
    arena_.upload(stream_.get());
    device_.start(all, 1);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const int64_t start = now_ns();
    std::atomic_ref<uint64_t>(abort_word).store(1);
    device.synchronize(stream_.get());
    const int64_t took = now_ns() - start;
    arena_.download(stream_.get());
    if (launches.error(0).code != DeviceFailure::kAborted) return "it did not end by the abort";
    if (took < kAbortWithinNs) return "";
    return "it ended after " + std::to_string(took / 1'000'000) + " ms, not 100";
  }

  void say_wrong(const std::string& what) {
    ++num_wrong_;
    std::printf("WRONG: %s\n", what.c_str());
    std::fflush(stdout);
  }
  double elapsed_s() const { return static_cast<double>(now_ns() - start_ns_) * 1e-9; }
  void progress(bool last) {
    if (!last && elapsed_s() - said_s_ < 2) return;
    said_s_ = elapsed_s();
    std::fprintf(stderr, "gpu_matrix: %d cases, %d wrong, %.0f s\n", num_cases_, num_wrong_,
                 said_s_);
  }

  const Options& options_;
  DeviceArena arena_;
  Stream stream_;
  ArenaDevice device_;
  const int64_t start_ns_ = now_ns();
  double said_s_ = 0;
  std::mt19937 random_;  // with a fixed seed
  size_t long_turn_ = 0;
  int num_cases_ = 0;
  int num_wrong_ = 0;
  int num_left_out_ = 0;
};

std::vector<std::string> words_of(std::string_view text) {
  std::vector<std::string> words;
  while (!text.empty()) {
    const size_t comma = std::min(text.find(','), text.size());
    words.emplace_back(text.substr(0, comma));
    text.remove_prefix(std::min(comma + 1, text.size()));
  }
  return words;
}

DType dtype_named(const std::string& name) {
  for (int d = 0; d < kNumDTypes; ++d) {
    if (dtype_name(static_cast<DType>(d)) == name) return static_cast<DType>(d);
  }
  throw UsageError("gpu_matrix: no dtype is named " + name);
}

int number_of_ranks(const std::string& word) {
  const int number = std::atoi(word.c_str());
  if (number < 1 || number > 8) throw UsageError("gpu_matrix: 1 to 8 ranks, not " + word);
  return number;
}

Options options_of(int argc, char** argv) {
  Options options;
  read_options("gpu_matrix", argc, argv, options,
               [&](const std::string& flag, const std::string& value) {
                 if (flag == "--ranks") {
                   for (const std::string& word : words_of(value)) {
                     options.ranks.push_back(number_of_ranks(word));
                   }
                 } else if (flag == "--dtypes") {
                   for (const std::string& word : words_of(value)) {
                     options.dtypes.push_back(dtype_named(word));
                   }
                 } else {
                   return false;
                 }
                 return true;
               });
  if (options.ranks.empty()) {
    options.ranks = options.few ? std::vector<int>{2, 3} : std::vector<int>{2, 3, 4, 5, 6, 7, 8};
  }
  if (options.dtypes.empty()) {
    for (int d = 0; d < kNumDTypes; ++d) options.dtypes.push_back(static_cast<DType>(d));
  }
  return options;
}

int run(const Options& options) {
  const std::optional<Device> device = first_device("gpu_matrix");
  if (!device) return 2;
  std::fprintf(stderr, "gpu_matrix: %s, %s\n", device->title().c_str(), device->facts().name);
  Matrix matrix(*device, options);
  matrix.run();
  std::printf("%d cases, %d failures\n", matrix.num_cases(), matrix.num_wrong());
  if (matrix.num_wrong() != 0) return 1;
  if (matrix.num_left_out() == 0) return 0;
  std::printf("%d cases were not run in %.0f s\n", matrix.num_left_out(), options.seconds);
  return 3;
}

}  // namespace
}  // namespace pycoll

int main(int argc, char** argv) {
  using namespace pycoll;
  return main_of("gpu_matrix", kHelp, argc, argv, [&] { return run(options_of(argc, argv)); });
}
