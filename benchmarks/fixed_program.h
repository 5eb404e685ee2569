// The most used programs as compile-time constants, identical to what lowering produces.
//
// Such a program runs with the interpreter's own step, so gpu_latency.cc, which compares the two,
// shows the cost of interpreting a program that is data. Each step is a phase of its own. The
// product does not use them. A test compares each with the lowered program of its algorithm
// (tests/cpp/fixed_program_check.cc).
#pragma once

#include <cstddef>
#include <utility>

#include "executor/interpret.h"

namespace pycoll {

/// The steps of one rank's all_reduce on links without multicast. Its chunks are pieces of one
/// block, which lies in the input until the output holds it.
template <int kNumSteps>
struct FixedSteps {
  static constexpr int kSize = kNumSteps;
  Step steps[kNumSteps] = {};
  StepPlace places[kNumSteps] = {};
};

namespace fixed {

/// The bit of `peer` among the peers of a rank that exchanges messages with all others.
constexpr uint64_t bit_of(int peer, int rank) { return uint64_t{1} << (peer - (peer > rank)); }

struct Line {
  uint64_t src_peers;
  uint64_t dst_peers;
  int chunk;
  int round;
  int flags;
};
template <int kNumSteps>
constexpr void set(FixedSteps<kNumSteps>& program, int index, const Line& line) {
  Step& step = program.steps[index];
  step.src_peers = line.src_peers;
  step.dst_peers = line.dst_peers;
  step.first_chunk = line.chunk;
  step.round = line.round;
  step.flags = static_cast<uint8_t>(line.flags);
  program.places[index].first_piece = line.chunk;
  program.places[index].dst = BufferKind::kOutput;
}

constexpr int kSum = kReadLocal | kWriteLocal | kFinal;

}  // namespace fixed

/// Every rank sends its block to all, and each reduces everything itself.
struct FixedOneShot {
  static constexpr const char* kAlgorithm = "one_shot";

  template <int n>
  static constexpr auto steps(int) {
    constexpr uint64_t kAll = (uint64_t{1} << (n - 1)) - 1;
    FixedSteps<2> program;
    fixed::set(program, 0, {0, kAll, 0, 0, kReadLocal});
    fixed::set(program, 1, {kAll, 0, 0, 0, fixed::kSum});
    return program;
  }
};

/// Rank c reduces chunk c from all ranks, then sends it to all.
struct FixedTwoShot {
  static constexpr const char* kAlgorithm = "two_shot";

  template <int n>
  static constexpr auto steps(int rank) {
    constexpr uint64_t kAll = (uint64_t{1} << (n - 1)) - 1;
    FixedSteps<2 * n - 1> program;
    for (int i = 1; i < n; ++i) {
      const int owner = (rank + i) % n;
      fixed::set(program, i - 1, {0, fixed::bit_of(owner, rank), owner, 0, kReadLocal});
    }
    fixed::set(program, n - 1, {kAll, kAll, rank, 0, fixed::kSum});
    for (int i = 0; i < n - 1; ++i) {
      const int owner = i + (i >= rank);
      fixed::set(program, n + i, {fixed::bit_of(owner, rank), 0, owner, 1, kWriteLocal});
    }
    return program;
  }
};

/// Reduce-scatter around the ring, then all-gather around the ring.
struct FixedRing {
  static constexpr const char* kAlgorithm = "ring";

  template <int n>
  static constexpr auto steps(int rank) {
    // Two neighbours, or the only other rank, in ascending order.
    const int next = (rank + 1) % n;
    const int previous = (rank - 1 + n) % n;
    const uint64_t to = uint64_t{1} << (next > previous);
    const uint64_t from = uint64_t{1} << (previous > next);
    FixedSteps<2 * n - 1> program;
    for (int i = 0; i < 2 * n - 1; ++i) {
      const int chunk = (rank - 1 - i + 2 * n) % n;
      const int flags = i < n - 1 ? kReadLocal : i == n - 1 ? fixed::kSum : kWriteLocal;
      fixed::set(program, i,
                 {i == 0 ? 0 : from, i == 2 * n - 2 ? 0 : to, chunk, i == 0 ? 0 : i - 1, flags});
    }
    return program;
  }
};

/// The steps of `kAlgorithm` for one rank of n.
template <class Algorithm, int n, int rank>
struct FixedProgram {
  static constexpr auto kSteps = Algorithm::template steps<n>(rank);

  /// Like pycoll::interpret(), with these steps in place of the program's.
  template <class Protocol, class Target>
  PYCOLL_HD static bool interpret(Target& target, const ProgramView& program,
                                  const Payload& payload) {
    const auto run = [&]<int i>(std::integral_constant<int, i>, int64_t done) {
      constexpr Step step = kSteps.steps[i];
      constexpr StepPlace place = kSteps.places[i];
      return run_step<Protocol>(target, program, payload, step, place, i, done);
    };
    const auto run_all = [&]<int... i>(std::integer_sequence<int, i...>, int64_t done) {
      return (run(std::integral_constant<int, i>{}, done) && ...);
    };
    return for_tiles(payload, [&](int64_t done) {
      return run_all(std::make_integer_sequence<int, decltype(kSteps)::kSize>{}, done);
    });
  }
};

}  // namespace pycoll
