// The cost of the library's own code per small call, without waiting. Usage: call_overhead
// [CALLS]; prints JSON, ns per call.
//
// "one rank" is a communicator of one: everything but links. "loopback" is two ranks that one
// thread plays in turn: the root of a broadcast sends, which does not wait while a slot is free;
// then the other rank receives what is already there. Both run the whole path of a small call: the
// plan is looked up, the call is announced, its fingerprint compared, the program interpreted, data
// and flags written and read. The flight of a cache line between two cores is left out.
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <vector>

#include "join/init.h"

namespace pycoll {
namespace {

constexpr int kNumSamples = 21;
constexpr double kTimeoutS = 10;

/// Time that this thread has run, in ns: nothing here waits, and other processes do not count.
int64_t cpu_ns() {
  timespec time{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return time.tv_sec * int64_t{1'000'000'000} + time.tv_nsec;
}

double median_ns(int num_calls, const std::function<void(int)>& calls) {
  std::vector<double> samples;
  calls(num_calls);
  for (int sample = 0; sample < kNumSamples; ++sample) {
    const int64_t start_ns = cpu_ns();
    calls(num_calls);
    samples.push_back(static_cast<double>(cpu_ns() - start_ns) / num_calls);
  }
  std::nth_element(samples.begin(), samples.begin() + kNumSamples / 2, samples.end());
  return samples[kNumSamples / 2];
}

Call call_of(Collective collective, float* x) {
  Call call;
  call.collective = collective;
  call.input = call.output = x;
  call.count = call.shape[0] = call.num_dims = 1;
  return call;
}

double one_rank_ns(int num_calls) {
  Communicator comm(make_local_transport(make_world(1), 0), kTimeoutS);
  float x = 1;
  const Call call = call_of(Collective::kAllReduce, &x);
  return median_ns(num_calls, [&](int n) {
    for (int i = 0; i < n; ++i) comm.run(call);
  });
}

/// ns of one rank's call: half of both.
double loopback_ns(int num_calls) {
  const auto world = make_world(2);
  Communicator root(make_local_transport(world, 0), kTimeoutS);
  Communicator other(make_local_transport(world, 1), kTimeoutS);
  float x = 1, y = 0;
  const Call send = call_of(Collective::kBroadcast, &x);
  const Call receive = call_of(Collective::kBroadcast, &y);
  return median_ns(num_calls,
                   [&](int n) {
                     for (int i = 0; i < n; ++i) {
                       root.run(send);
                       other.run(receive);
                     }
                   }) /
         2;
}

}  // namespace
}  // namespace pycoll

int main(int argc, char** argv) {
  const int num_calls = argc > 1 ? std::atoi(argv[1]) : 20000;
  if (argc > 2 || num_calls < 1) {
    std::fprintf(stderr, "usage: call_overhead [CALLS]\n");
    return 2;
  }
  std::printf("{\"one_rank_ns\": %.1f, \"loopback_ns\": %.1f}\n", pycoll::one_rank_ns(num_calls),
              pycoll::loopback_ns(num_calls));
}
