// What short collectives on a device consist of, in memory of the DeviceTable: launches, the flight
// of a flag, what the memory gives to n reads and n writes, and all_reduces of ranks that are
// blocks of one launch, replayed from a graph: the time of the kernels alone.
//
// Each figure is a median of batches, by the CPU's clock, which looks once for a batch of many
// launches. Results are checked outside of what is timed. On the emulated device the program runs,
// and its figures say nothing of a GPU.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "all_reduce_launches.h"
#include "base/clock.h"
#include "base/error.h"
#include "comm/device/device_links.h"
#include "device_arena.h"
#include "device_main.h"
#include "latency_probes.h"

namespace pycoll {
namespace {

constexpr const char* kHelp =
    R"(usage: gpu_latency [--few] [--json FILE] [--only TEXT] [--seconds S]

Times launches, the flight of a flag, the memory, and replayed all_reduces on the first device.
The status is 1 if a result is wrong.

  --few       few and short measurements
  --json      writes a line of JSON for each row to FILE as well, as soon as it is measured
  --only      rows whose name contains TEXT
  --seconds   begins no further row after S seconds

examples:
  gpu_latency --json rows.jsonl
  gpu_latency --only flag
  gpu_latency --only "two_shot/direct n=8"
)";

struct Options : DeviceOptions {
  std::string json;
};

struct Row {
  std::string name;
  int num_ranks = 1;
  int64_t nbytes = 0;
  double enqueue_us = 0;    // the caller's time for one
  double us = 0;            // from one to the next
  double bytes_per_us = 0;  // read and written; 0: does not apply
  bool right = true;
};

double median(std::vector<double> times) {
  std::nth_element(times.begin(), times.begin() + static_cast<ptrdiff_t>(times.size() / 2),
                   times.end());
  return times[times.size() / 2];
}

class Latency {
 public:
  Latency(const Device& device, const Options& options)
      : device_(device),
        options_(options),
        facts_(device.facts()),
        stream_(device),
        json_(options.json.empty() ? nullptr : std::fopen(options.json.c_str(), "w")) {
    if (!options.json.empty() && json_ == nullptr) {
      throw UsageError("gpu_latency: cannot write " + options.json);
    }
  }
  ~Latency() {
    if (json_ != nullptr) std::fclose(json_);
  }

  /// Returns whether all results were right.
  bool run() {
    std::printf("%-46s %5s %9s %11s %11s %8s\n", facts_.name, "ranks", "bytes", "enqueue, us", "us",
                "GB/s");
    launches();
    flags();
    memory();
    programs<FixedOneShot, 2>();
    programs<FixedOneShot, 8>();
    programs<FixedTwoShot, 4>();
    replays();
    if (num_left_out_ != 0) {
      std::printf("%d rows were not measured in %.0f s\n", num_left_out_, options_.seconds);
    }
    return right_;
  }

 private:
  bool emulated() const { return facts_.capability == 0; }

  /// Whether a row is wanted. Each is measured as soon as it is asked for.
  bool wants(const std::string& name) {
    if (name.find(options_.only) == std::string::npos) return false;
    if (static_cast<double>(now_ns() - start_ns_) * 1e-9 < options_.seconds) return true;
    ++num_left_out_;
    return false;
  }
  void say(const Row& row) {
    std::printf("%-46s %5d %9lld %11.2f %11.3f %8.1f%s\n", row.name.c_str(), row.num_ranks,
                static_cast<long long>(row.nbytes), row.enqueue_us, row.us, row.bytes_per_us * 1e-3,
                row.right ? "" : "  WRONG");
    std::fflush(stdout);
    right_ = right_ && row.right;
    if (json_ == nullptr) return;
    std::fprintf(json_,
                 "{\"name\": \"%s\", \"ranks\": %d, \"nbytes\": %lld, \"enqueue_us\": %.3f, "
                 "\"us\": %.4f, \"gb_per_s\": %.2f, \"right\": %s}\n",
                 row.name.c_str(), row.num_ranks, static_cast<long long>(row.nbytes),
                 row.enqueue_us, row.us, row.bytes_per_us * 1e-3, row.right ? "true" : "false");
    std::fflush(json_);
  }

  /// Times `one`, which puts one piece of work into the stream: `num` in a row, several times.
  void measure(Row& row, int num, const std::function<void()>& one) {
    std::vector<double> enqueue_us;
    std::vector<double> us;
    const int num_batches = options_.few ? 3 : 15;
    for (int batch = -1; batch < num_batches; ++batch) {
      device_.synchronize(stream_.get());
      const int64_t start = now_ns();
      for (int i = 0; i < num; ++i) one();
      const int64_t queued = now_ns();
      device_.synchronize(stream_.get());
      if (batch < 0) continue;  // warm-up
      enqueue_us.push_back(static_cast<double>(queued - start) * 1e-3 / num);
      us.push_back(static_cast<double>(now_ns() - start) * 1e-3 / num);
    }
    row.enqueue_us = median(enqueue_us);
    row.us = median(us);
  }
  int num_launches() const { return options_.few ? 3 : 200; }

  template <class Work>
  void launch_row(const std::string& name, const Work& work) {
    if (!wants(name)) return;
    Row row{.name = name};
    measure(row, num_launches(), [&] { launch_probe(device_, work, 1, 1, stream_.get()); });
    say(row);
  }
  void launches() {
    launch_row("launch, empty kernel", EmptyWork{});
    launch_row("launch, 2 KiB of arguments", ArgumentsWork{});
  }

  template <bool system>
  void flag_row(const std::string& name) {
    if (!wants(name)) return;
    DeviceMemory memory(device_, 2 * kDeviceAlignment);
    PingPongWork<system> work{reinterpret_cast<uint64_t*>(memory.data()), 1,
                              options_.few ? 50 : 2000};
    Row row{.name = name, .num_ranks = 2, .nbytes = sizeof(uint64_t)};
    measure(row, 1, [&] {
      launch_probe(device_, work, 2, 1, stream_.get());
      work.first += static_cast<uint64_t>(work.rounds);
    });
    row.us /= 2 * work.rounds;
    row.enqueue_us = 0;
    say(row);
  }
  void flags() {
    flag_row<false>("flag, one flight, .gpu scope");
    flag_row<true>("flag, one flight, .sys scope");
  }

  int64_t long_bytes() const { return options_.few ? 1 << 16 : 1 << 28; }

  template <DType dtype>
  void streams_row(int n, int num_blocks) {
    const int64_t nbytes = long_bytes() / n;
    const std::string name = "memory, " + std::to_string(n) + " reads and " + std::to_string(n) +
                             " writes, " + std::string(dtype_name(dtype)) + ", " +
                             std::to_string(num_blocks) + " blocks";
    if (!wants(name)) return;
    DeviceMemory memory(device_, static_cast<size_t>(2 * n * nbytes));
    const StreamsWork<dtype> work{memory.data(), nbytes, n, n, num_blocks};
    Row row{.name = name, .num_ranks = n, .nbytes = nbytes};
    measure(row, 5,
            [&] { launch_probe(device_, work, num_blocks, facts_.block_threads, stream_.get()); });
    row.bytes_per_us = static_cast<double>(2 * n * nbytes) / row.us;
    say(row);
  }
  void memory() {
    const int64_t nbytes = long_bytes();
    if (wants("memory, copy by the driver")) {
      DeviceMemory memory(device_, static_cast<size_t>(2 * nbytes));
      Row row{.name = "memory, copy by the driver", .nbytes = nbytes};
      measure(row, 5, [&] {
        device_.copy(memory.data() + nbytes, memory.data(), static_cast<size_t>(nbytes),
                     stream_.get());
      });
      row.bytes_per_us = static_cast<double>(2 * nbytes) / row.us;
      say(row);
    }
    const int processors = emulated() ? 2 : facts_.num_processors;
    for (const int n : {1, 2, 4, 8}) {
      for (const int num_blocks : {processors / 2, processors}) {
        streams_row<DType::kF32>(n, num_blocks);
        streams_row<DType::kBF16>(n, num_blocks);
      }
    }
  }

  /// The arena of an all_reduce: inputs, outputs, rings, and some room.
  static size_t arena_bytes(const AllReduceShape& shape) {
    const auto n = static_cast<size_t>(shape.num_ranks);
    const size_t rings = n * n * static_cast<size_t>(shape.num_channels);
    return 3 * n * static_cast<size_t>(shape.count) * sizeof(float) +
           rings * (static_cast<size_t>(shape.slot_bytes) * kMaxSlots + 1024) + (1 << 20);
  }
  /// Uploads the launches and their memory, runs `once`, and compares the results.
  bool is_right(DeviceArena& arena, AllReduceLaunches& all, const std::function<void()>& once) {
    arena.upload(stream_.get());
    once();
    device_.synchronize(stream_.get());
    arena.download(stream_.get());
    return all.take_sums();
  }

  template <class Algorithm, int n, bool fixed>
  void program_row(int64_t nbytes) {
    const std::string name = std::string("program, ") + Algorithm::kAlgorithm + "/ll " +
                             (fixed ? "fixed" : "interpreted") + " n=" + std::to_string(n);
    if (!wants(name)) return;
    const AllReduceShape shape{.algorithm = Algorithm::kAlgorithm,
                               .num_ranks = n,
                               .protocol = DeviceProtocol::kLL,
                               .count = std::max<int64_t>(nbytes / 4, 1),
                               .num_threads = std::min(facts_.block_threads, 128),
                               .phases = false};  // as the fixed program, step by step
    DeviceArena arena(device_, arena_bytes(shape));
    AllReduceLaunches all(shape, &arena, arena.shift());
    const ProgramWork<Algorithm, n, fixed> work{arena.seen_by_kernels(all.launches().data()), 1};
    const auto once = [&] { launch_probe(device_, work, n, shape.num_threads, stream_.get()); };
    Row row{.name = name, .num_ranks = n, .nbytes = nbytes};
    row.right = is_right(arena, all, once);
    measure(row, num_launches(), once);
    say(row);
  }
  template <class Algorithm, int n>
  void programs() {
    for (const int64_t nbytes : {int64_t{8}, int64_t{4096}}) {
      program_row<Algorithm, n, false>(nbytes);
      program_row<Algorithm, n, true>(nbytes);
    }
  }

  struct Way {
    const char* algorithm;
    const char* protocol;
    DeviceProtocol kind;
    int64_t most;  // bytes for which it is a candidate
  };
  void replay_row(const Way& way, int n, int64_t nbytes) {
    const std::string name = std::string("replay, ") + way.algorithm + "/" + way.protocol +
                             " n=" + std::to_string(n) + " " + std::to_string(nbytes) + " B";
    if (!wants(name)) return;
    const bool direct = way.kind == DeviceProtocol::kDirect;
    const int num_channels = emulated() ? 2 : facts_.num_processors / n;
    const int64_t slot_bytes =
        DeviceRings{n, num_channels, facts_.cache_bytes}.shape(way.kind).slot_bytes;
    const AllReduceShape shape{.algorithm = way.algorithm,
                               .num_ranks = n,
                               .protocol = way.kind,
                               .count = std::max<int64_t>(nbytes / 4, 1),
                               .num_threads = facts_.block_threads,
                               .num_channels = num_channels,
                               .slot_bytes = direct ? 64 << 10 : slot_bytes,
                               .by_size = true};
    DeviceArena arena(device_, arena_bytes(shape));
    AllReduceLaunches all(shape, &arena, arena.shift());
    const DeviceLaunch& first = all.launches().front();
    if (way.kind == DeviceProtocol::kPoison &&
        (first.count + first.tile_count - 1) / first.tile_count > first.num_channels) {
      return;  // the message has more tiles than there are blocks
    }
    const auto once = [&] {
      device_.check(device_.table().launch_together(device_.index(), &first,
                                                    arena.seen_by_kernels(all.launches().data()), n,
                                                    stream_.get()),
                    "launching");
    };
    Row row{.name = name, .num_ranks = n, .nbytes = nbytes};
    row.right = is_right(arena, all, once);
    const int num_nodes = options_.few ? 3 : nbytes > 1 << 18 ? 50 : 200;
    const DeviceTable& table = device_.table();
    device_.check(table.begin_capture(device_.index(), stream_.get()), "capturing a stream");
    for (int i = 0; i < num_nodes; ++i) once();
    DeviceGraph graph = nullptr;
    device_.check(table.end_capture(device_.index(), stream_.get(), &graph), "making a graph");
    measure(row, 1, [&] {
      device_.check(table.launch_graph(device_.index(), graph, stream_.get()), "launching a graph");
    });
    device_.check(table.destroy_graph(graph), "destroying a graph");
    row.us /= num_nodes;
    row.enqueue_us /= num_nodes;
    arena.download(stream_.get());
    row.right = row.right && all.take_sums();
    say(row);
  }
  void replays() {
    constexpr int64_t kMost = int64_t{4} << 20;
    const Way ways[] = {
        {"one_shot", "ll", DeviceProtocol::kLL, 1 << 18},
        {"one_shot", "poison", DeviceProtocol::kPoison, 1 << 18},
        {"one_shot", "simple", DeviceProtocol::kSimple, 1 << 18},
        {"two_shot", "ll", DeviceProtocol::kLL, 1 << 20},
        {"two_shot", "ll128", DeviceProtocol::kLL128, kMost},
        {"two_shot", "simple", DeviceProtocol::kSimple, kMost},
        {"two_shot", "direct", DeviceProtocol::kDirect, kMost},
    };
    std::vector<int64_t> sizes = {8, 4096, 1 << 15, 1 << 18, 1 << 20, kMost};
    if (options_.few) sizes = {8, 4096};
    for (const int n : options_.few ? std::vector<int>{2} : std::vector<int>{2, 4, 8}) {
      for (const int64_t nbytes : sizes) {
        for (const Way& way : ways) {
          if (nbytes <= way.most) replay_row(way, n, nbytes);
        }
      }
    }
  }

  Device device_;
  const Options& options_;
  DeviceFacts facts_;
  Stream stream_;
  std::FILE* json_;
  const int64_t start_ns_ = now_ns();
  int num_left_out_ = 0;
  bool right_ = true;
};

Options options_of(int argc, char** argv) {
  Options options;
  read_options("gpu_latency", argc, argv, options,
               [&](const std::string& flag, const std::string& value) {
                 if (flag != "--json") return false;
                 options.json = value;
                 return true;
               });
  return options;
}

int run(const Options& options) {
  const std::optional<Device> device = first_device("gpu_latency");
  if (!device) return 2;
  return Latency(*device, options).run() ? 0 : 1;
}

}  // namespace
}  // namespace pycoll

int main(int argc, char** argv) {
  using namespace pycoll;
  return main_of("gpu_latency", kHelp, argc, argv, [&] { return run(options_of(argc, argv)); });
}
