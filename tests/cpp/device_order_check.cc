// What orders bytes and flags between blocks: a few all_reduces over and over, with one protocol.
// Only f32 and all of it compiled here, so that tests compile it again with an order taken away.
// `device_order_check simple|ll|ll128|lanes|poison|direct`; lanes: ll128 on threads that share
// lines.
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <string_view>
#include <thread>
#include <vector>

#include "all_reduce_launches.h"
#include "kernels/threads/thread_blocks.h"

namespace pycoll {
namespace {

constexpr int kNumRanks = 3;
constexpr int kNumRounds = 24;
constexpr unsigned kHangS = 100;  // the whole program takes some seconds

template <DeviceProtocol protocol, class Env>
ThreadKernel kernel_of(const DeviceLaunch&) {
  return thread_kernel<protocol, DType::kF32, Env>();
}

/// One rank's calls, one after another: nothing but the protocol holds it back.
template <DeviceProtocol protocol, class Env>
int run_rank(AllReduceLaunches& all, int rank) {
  ThreadPool pool;
  int num_failures = 0;
  for (int round = 0; round < kNumRounds; ++round) {
    all.fill(rank, round);
    run_blocks(&all.launches()[static_cast<size_t>(rank)], 1, pool, kernel_of<protocol, Env>);
    if (all.world().error(rank).code != DeviceFailure::kNone) return 1;
    if (!all.take_sum(rank, round)) ++num_failures;
  }
  return num_failures;
}

template <DeviceProtocol protocol, class Env>
int check(const char* algorithm) {
  // Several tiles per channel, so that slots are used again within a launch; poison has one.
  AllReduceLaunches all({.algorithm = algorithm,
                         .num_ranks = kNumRanks,
                         .protocol = protocol,
                         .count = protocol == DeviceProtocol::kPoison ? 48 : 600,
                         .num_threads = Env::kLineTeam == 1 ? 2 : Env::kLineTeam,
                         .num_channels = 2,
                         .slot_bytes = 256});
  std::atomic<int> num_failures{0};
  std::vector<std::thread> threads;
  for (int rank = 0; rank < static_cast<int>(all.launches().size()); ++rank) {
    all.launches()[static_cast<size_t>(rank)].timeout_ns = 5'000'000'000;
    threads.emplace_back([&, rank] { num_failures += run_rank<protocol, Env>(all, rank); });
  }
  for (std::thread& thread : threads) thread.join();
  return num_failures;
}

template <DeviceProtocol protocol, class Env = ThreadEnv>
int check_all() {
  return check<protocol, Env>("one_shot") + check<protocol, Env>("two_shot") +
         check<protocol, Env>("ring");
}

int check_named(std::string_view protocol) {
  if (protocol == "simple") return check_all<DeviceProtocol::kSimple>();
  if (protocol == "ll") return check_all<DeviceProtocol::kLL>();
  if (protocol == "ll128") return check_all<DeviceProtocol::kLL128>();
  if (protocol == "lanes") return check_all<DeviceProtocol::kLL128, ThreadLineEnv>();
  if (protocol == "poison") return check_all<DeviceProtocol::kPoison>();
  if (protocol == "direct") return check_all<DeviceProtocol::kDirect>();
  std::fprintf(stderr, "usage: device_order_check simple|ll|ll128|lanes|poison|direct\n");
  return 1;
}

}  // namespace
}  // namespace pycoll

int main(int argc, char** argv) {
  alarm(pycoll::kHangS);
  const int num_failures = pycoll::check_named(argc > 1 ? argv[1] : "");
  std::printf("%s, %d failures\n", argv[argc - 1], num_failures);
  return num_failures == 0 ? 0 : 1;
}
