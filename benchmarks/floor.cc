// The floor of collectives between two cores, measured: the time of one cache line from core to
// core, and the time in which both cores together read and write the bytes that must be.
//
// Two threads, each pinned to its core, run the innermost loop of a collective at the same time:
// read one or two sources, write the sum to one or two destinations, all in memory that both reach.
// This is an all_reduce (2 sources, 2 destinations) or a broadcast (1 and 1) without everything
// that a library adds. Usage: floor CORE CORE; prints JSON.
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
#include <thread>
#include <vector>
#ifdef __AVX__
#include <immintrin.h>
#endif

namespace {

constexpr size_t kMinBytes = size_t{2} << 10;  // per core
constexpr size_t kMaxBytes = size_t{32} << 20;
constexpr size_t kHugePage = size_t{2} << 20;
constexpr int kFlightsPerSample = 200;
constexpr int kFlightSamples = 100;
constexpr int kPlaces =
    16;  // A line's home in the shared cache, hence its flight, depends on its address.

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

// The value that a tenth of the samples do not exceed: a floor is what the cores can do when
// nothing else runs, but not the luckiest sample.
template <typename T>
T fastest_tenth(std::vector<T> values) {
  const auto at = values.begin() + values.size() / 10;
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

// One-way time of a cache line in ns: half of a round trip.
double flight_ns(int first_core, int second_core, Flags& flags) {
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
  return fastest_tenth(samples);
}

// Memory in huge pages where the system gives them on request, as NumPy asks for large arrays.
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
  std::memset(aligned, 0, num_bytes);
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

// Time in us until both cores have done their parts, begun together.
template <int num_srcs, int num_dsts, bool streaming>
double pass_us(const int (&cores)[2], const Buffers& buffers, size_t num_bytes) {
  const int num_samples = num_bytes <= (size_t{512} << 10) ? 401 : 41;
  std::vector<int64_t> core_ns[2];
  Flags flags;
  const auto part = [&](int which, int sample) {
    float *srcs[2], *dsts[2];
    for (int i = 0; i < 2; ++i) {
      srcs[i] = buffers.srcs[i] + which * num_bytes / sizeof(float);
      dsts[i] = buffers.dsts[i] + which * num_bytes / sizeof(float);
    }
    // One starts with the flag, the other when it sees it.
    if (which == 0) flags.ping.store(sample, std::memory_order_release);
    if (which == 1) wait_for(flags.ping, sample);
    const int64_t start_ns = now_ns();
    reduce_copy<num_srcs, num_dsts, streaming>(srcs, dsts, num_bytes);
    core_ns[which].push_back(now_ns() - start_ns);
    if (which == 1) flags.pong.store(sample, std::memory_order_release);
    if (which == 0) wait_for(flags.pong, sample);
  };
  std::thread second([&] {
    pin_to(cores[1]);
    for (int sample = 1; sample <= num_samples; ++sample) part(1, sample);
  });
  pin_to(cores[0]);
  for (int sample = 1; sample <= num_samples; ++sample) part(0, sample);
  second.join();
  std::vector<int64_t> slower_ns;
  for (int i = 0; i < num_samples; ++i) {
    slower_ns.push_back(std::max(core_ns[0][i], core_ns[1][i]));
  }
  return fastest_tenth(slower_ns) / 1e3;
}

// With ordinary or with streaming stores, whichever is faster at this size.
template <int num_srcs, int num_dsts>
void print_passes(const int (&cores)[2], const Buffers& buffers, bool last) {
  std::printf("\"%dto%d\": {", num_srcs, num_dsts);
  for (size_t num_bytes = kMinBytes; num_bytes <= kMaxBytes; num_bytes *= 4) {
    const double ordinary_us = pass_us<num_srcs, num_dsts, false>(cores, buffers, num_bytes);
    const double streaming_us = pass_us<num_srcs, num_dsts, true>(cores, buffers, num_bytes);
    std::printf("%s\"%zu\": %.3f", num_bytes == kMinBytes ? "" : ", ", num_bytes,
                std::min(ordinary_us, streaming_us));
  }
  std::printf("}%s", last ? "" : ", ");
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: floor CORE CORE\n");
    return 2;
  }
  const int cores[2] = {std::atoi(argv[1]), std::atoi(argv[2])};
  std::vector<Flags> places(kPlaces);
  double best_flight_ns = flight_ns(cores[0], cores[1], places[0]);
  for (int i = 1; i < kPlaces; ++i) {
    best_flight_ns = std::min(best_flight_ns, flight_ns(cores[0], cores[1], places[i]));
  }
  std::printf("{\"flight_ns\": %.1f, \"both_cores_us\": {", best_flight_ns);
  const Buffers buffers;
  print_passes<1, 1>(cores, buffers, false);
  print_passes<1, 2>(cores, buffers, false);
  print_passes<2, 1>(cores, buffers, false);
  print_passes<2, 2>(cores, buffers, true);
  std::printf("}}\n");
}
