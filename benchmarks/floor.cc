// What no all_reduce between two cores can beat, measured: how long one cache line takes from core
// to core, and how fast a core reads what the other has just written.
//
// Two threads, each pinned to its core, hand buffers back and forth. Usage: floor CORE CORE; prints
// JSON.
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

namespace {

constexpr size_t kMinTile = size_t{4} << 10;
constexpr size_t kMaxTile = size_t{64} << 20;
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

// Sums 64-bit words: the cheapest use of a word, which the compiler turns into wide loads.
uint64_t read_all(const uint64_t* words, size_t num_words) {
  uint64_t sum = 0;
  for (size_t i = 0; i < num_words; ++i) sum += words[i];
  return sum;
}

// Bytes per ns at which the second core reads a tile that the first has just written.
double read_gb_per_s(int writer_core, int reader_core, std::vector<uint64_t>& tile,
                     size_t num_bytes) {
  const size_t num_words = num_bytes / sizeof(uint64_t);
  const int num_samples = num_bytes <= (size_t{1} << 20) ? 201 : num_bytes <= (16u << 20) ? 41 : 21;
  Flags flags;
  std::vector<int64_t> read_ns;
  std::thread reader([&] {
    pin_to(reader_core);
    for (int sample = 1; sample <= num_samples; ++sample) {
      wait_for(flags.ping, sample);
      const int64_t start_ns = now_ns();
      const uint64_t sum = read_all(tile.data(), num_words);
      read_ns.push_back(now_ns() - start_ns);
      if (sum != uint64_t(sample) * num_words) {
        std::fprintf(stderr, "floor: read a tile before it was written\n");
        std::exit(1);
      }
      flags.pong.store(sample, std::memory_order_release);
    }
  });
  pin_to(writer_core);
  for (int sample = 1; sample <= num_samples; ++sample) {
    std::fill_n(tile.data(), num_words, uint64_t(sample));
    flags.ping.store(sample, std::memory_order_release);
    wait_for(flags.pong, sample);
  }
  reader.join();
  return double(num_bytes) / double(fastest_tenth(read_ns));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: floor CORE CORE\n");
    return 2;
  }
  const int first_core = std::atoi(argv[1]);
  const int second_core = std::atoi(argv[2]);
  std::vector<uint64_t> tile(kMaxTile / sizeof(uint64_t));
  std::vector<Flags> places(kPlaces);
  double best_flight_ns = flight_ns(first_core, second_core, places[0]);
  for (int i = 1; i < kPlaces; ++i) {
    best_flight_ns = std::min(best_flight_ns, flight_ns(first_core, second_core, places[i]));
  }
  std::printf("{\"flight_ns\": %.1f, \"read_gb_per_s\": {", best_flight_ns);
  for (size_t num_bytes = kMinTile; num_bytes <= kMaxTile; num_bytes *= 4) {
    std::printf("%s\"%zu\": %.2f", num_bytes == kMinTile ? "" : ", ", num_bytes,
                read_gb_per_s(first_core, second_core, tile, num_bytes));
  }
  std::printf("}}\n");
}
