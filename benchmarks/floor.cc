// The floor of collectives between two cores, measured: the time of one cache line from core to
// core, and the time in which both cores together read and write the bytes that must be.
//
// Two threads, each pinned to its core, run the innermost loop of a collective at the same time:
// read one or two sources, write the sum to one or two destinations, all in memory that both reach.
// This is an all_reduce (2 sources, 2 destinations) or a broadcast (1 and 1) without everything
// that a library adds.
//
// Usage: floor CORE CORE. Each line of the input, "2to2 BYTES", asks for a measurement with so many
// bytes of each operand for each core; the answer is a line with its time in us. Between requests
// it sleeps.
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>
#ifdef __AVX__
#include <immintrin.h>
#endif

namespace {

// Per core. Times of less or more are those of these sizes, in proportion.
constexpr size_t kMinBytes = size_t{2} << 10;
constexpr size_t kMaxBytes = size_t{32} << 20;
constexpr size_t kHugePage = size_t{2} << 20;
constexpr int kFlightsPerSample = 100;
constexpr int kFlightSamples = 9;
constexpr int kPlaces =
    16;  // A line's home in the shared cache, hence its flight, depends on its address.
constexpr int kMinPasses = 3;
constexpr int kMaxPasses = 200;
constexpr double kPassesUs = 1000;  // for all passes of one way

// Each flag has a cache line (and the neighbour that is prefetched with it) to itself.
struct Flags {
  alignas(128) std::atomic<uint64_t> ping{0};
  alignas(128) std::atomic<uint64_t> pong{0};
};

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void pin_to(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  if (pthread_setaffinity_np(pthread_self(), sizeof set, &set) != 0) {
    std::fprintf(stderr, "floor: cannot pin a thread to core %d: choose a core of taskset -p\n",
                 core);
    std::exit(1);
  }
}

// Acquire: pairs with the release store of the other core, so that what it wrote before is seen.
void wait_for(const std::atomic<uint64_t>& flag, uint64_t value) {
  while (flag.load(std::memory_order_acquire) != value) {
  }
}

template <typename T>
T median(std::vector<T> values) {
  const auto at = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

// One-way time of a cache line in ns: half of a round trip.
double flight_ns(int first_core, int second_core, Flags& flags) {
  flags.ping.store(0, std::memory_order_relaxed);
  flags.pong.store(0, std::memory_order_relaxed);
  constexpr uint64_t kTrips = uint64_t{kFlightsPerSample} * kFlightSamples;
  std::thread echo([&] {
    pin_to(second_core);
    for (uint64_t trip = 1; trip <= kTrips; ++trip) {
      wait_for(flags.ping, trip);
      flags.pong.store(trip, std::memory_order_release);
    }
  });
  pin_to(first_core);
  std::vector<double> samples;
  uint64_t trip = 0;
  for (int sample = 0; sample < kFlightSamples; ++sample) {
    const int64_t start_ns = now_ns();
    for (int i = 0; i < kFlightsPerSample; ++i) {
      flags.ping.store(++trip, std::memory_order_release);
      wait_for(flags.pong, trip);
    }
    samples.push_back(double(now_ns() - start_ns) / kFlightsPerSample / 2);
  }
  echo.join();
  return median(samples);
}

// Memory in huge pages where the system gives them on request, as NumPy asks for large arrays. It
// holds numbers: a Zen 5 writes lines of zeros past its caches in half the time of others.
float* new_pages(size_t num_bytes) {
  void* const mapped = mmap(nullptr, num_bytes + kHugePage, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) {
    std::perror("floor: mmap");
    std::exit(1);
  }
  const auto address = (reinterpret_cast<uintptr_t>(mapped) + kHugePage - 1) & ~(kHugePage - 1);
  void* const aligned = reinterpret_cast<void*>(address);
  madvise(aligned, num_bytes, MADV_HUGEPAGE);
  std::memset(aligned, 1, num_bytes);
  return static_cast<float*>(aligned);
}

#if defined(__AVX512F__)
using Vector = __m512;
inline Vector load(const float* from) { return _mm512_load_ps(from); }
inline Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
inline void store(float* to, Vector v) { _mm512_store_ps(to, v); }
inline void stream(float* to, Vector v) { _mm512_stream_ps(to, v); }
inline void end_streams() { _mm_sfence(); }
#elif defined(__AVX__)
using Vector = __m256;
inline Vector load(const float* from) { return _mm256_load_ps(from); }
inline Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
inline void store(float* to, Vector v) { _mm256_store_ps(to, v); }
inline void stream(float* to, Vector v) { _mm256_stream_ps(to, v); }
inline void end_streams() { _mm_sfence(); }
#else
typedef float Vector __attribute__((vector_size(16)));
inline Vector load(const float* from) { return *reinterpret_cast<const Vector*>(from); }
inline Vector add(Vector a, Vector b) { return a + b; }
inline void store(float* to, Vector v) { *reinterpret_cast<Vector*>(to) = v; }
inline void stream(float* to, Vector v) { store(to, v); }
inline void end_streams() {}
#endif

// One core's part: num_bytes of each source and of each destination.
template <int num_srcs, int num_dsts, bool streaming>
void reduce_copy(float* const* srcs, float* const* dsts, size_t num_bytes) {
  for (size_t i = 0; i < num_bytes / sizeof(float); i += sizeof(Vector) / sizeof(float)) {
    Vector v = load(srcs[0] + i);
    if constexpr (num_srcs == 2) v = add(v, load(srcs[1] + i));
    for (int dst = 0; dst < num_dsts; ++dst) {
      if constexpr (streaming) {
        stream(dsts[dst] + i, v);
      } else {
        store(dsts[dst] + i, v);
      }
    }
  }
  if constexpr (streaming) end_streams();
}

struct Buffers {
  float* srcs[2] = {new_pages(2 * kMaxBytes), new_pages(2 * kMaxBytes)};
  float* dsts[2] = {new_pages(2 * kMaxBytes), new_pages(2 * kMaxBytes)};
};

using Loop = void (*)(float* const* srcs, float* const* dsts, size_t num_bytes);

// Median time in us until both cores have done their parts, begun together.
double pass_us(Loop loop, const int (&cores)[2], const Buffers& buffers, size_t num_bytes) {
  Flags flags;
  constexpr uint64_t kEnd = ~uint64_t{0};
  std::atomic<int64_t> second_ns{0};
  const auto part_ns = [&](int which) {
    float *srcs[2], *dsts[2];
    for (int i = 0; i < 2; ++i) {
      srcs[i] = buffers.srcs[i] + which * num_bytes / sizeof(float);
      dsts[i] = buffers.dsts[i] + which * num_bytes / sizeof(float);
    }
    const int64_t start_ns = now_ns();
    loop(srcs, dsts, num_bytes);
    return now_ns() - start_ns;
  };
  std::thread second([&] {
    pin_to(cores[1]);
    for (uint64_t pass = 1;; ++pass) {
      uint64_t begun = 0;
      while (begun < pass) begun = flags.ping.load(std::memory_order_acquire);
      if (begun == kEnd) return;
      second_ns.store(part_ns(1), std::memory_order_relaxed);
      flags.pong.store(pass, std::memory_order_release);
    }
  });
  pin_to(cores[0]);
  uint64_t passes = 0;
  const auto pass_ns = [&] {
    flags.ping.store(++passes, std::memory_order_release);
    const int64_t first_ns = part_ns(0);
    wait_for(flags.pong, passes);
    return std::max(first_ns, second_ns.load(std::memory_order_relaxed));
  };
  pass_ns();  // brings the buffers into the caches
  const auto num_passes = static_cast<int>(kPassesUs * 1e3 / static_cast<double>(pass_ns() + 1));
  std::vector<int64_t> samples_ns;
  for (int i = std::clamp(num_passes, kMinPasses, kMaxPasses); i > 0; --i) {
    samples_ns.push_back(pass_ns());
  }
  flags.ping.store(kEnd, std::memory_order_release);
  second.join();
  return static_cast<double>(median(samples_ns)) / 1e3;
}

struct NamedLoop {
  const char* name;
  Loop ordinary;
  Loop streaming;
};
template <int num_srcs, int num_dsts>
constexpr NamedLoop named(const char* name) {
  return {name, reduce_copy<num_srcs, num_dsts, false>, reduce_copy<num_srcs, num_dsts, true>};
}
constexpr NamedLoop kLoops[] = {named<1, 1>("1to1"), named<1, 2>("1to2"), named<2, 1>("2to1"),
                                named<2, 2>("2to2")};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: floor CORE CORE\n");
    return 2;
  }
  const int cores[2] = {std::atoi(argv[1]), std::atoi(argv[2])};
  const Buffers buffers;
  std::vector<Flags> places(kPlaces);
  const auto flight_of = [&](Flags& place) { return flight_ns(cores[0], cores[1], place); };
  std::vector<double> flights_ns;
  for (Flags& place : places) flights_ns.push_back(flight_of(place));
  Flags& nearest = places[static_cast<size_t>(
      std::min_element(flights_ns.begin(), flights_ns.end()) - flights_ns.begin())];

  char name[8];
  size_t num_bytes = 0;
  while (std::scanf("%7s %zu", name, &num_bytes) == 2) {
    const auto* const loop =
        std::find_if(std::begin(kLoops), std::end(kLoops),
                     [&](const NamedLoop& each) { return each.name == std::string(name); });
    if (loop == std::end(kLoops)) {
      std::fprintf(stderr, "floor: no loop %s\n", name);
      return 2;
    }
    const size_t measured = std::clamp(num_bytes, kMinBytes, kMaxBytes) / 64 * 64;
    const double us = std::min(pass_us(loop->ordinary, cores, buffers, measured),
                               pass_us(loop->streaming, cores, buffers, measured));
    const double share = static_cast<double>(num_bytes) / static_cast<double>(measured);
    std::printf("%.4f\n", flight_of(nearest) / 1e3 + us * share);
    std::fflush(stdout);
  }
}
