// Block: the Target that runs a program with a team of a device's threads, as seen by one thread.
//
// `Env` defines how the threads work together: ThreadEnv (thread_env.h) on CPU threads, CudaEnv
// (cuda_env.cuh) on a GPU. The rest is the same source on both, so ThreadSanitizer checks the code
// that a GPU runs. A team runs a phase at once: its threads meet once for all of its steps, its
// warps share out the bytes of all of them, and thread i posts to peer i, whichever step sends to
// it. The op is chosen at run time, once per step and outside of its loops.
#pragma once

#include "base/bits.h"
#include "executor/device/block_phase.h"
#include "executor/device/device_launch.h"
#include "executor/protocol.h"
#include "reduce/reduce_copy_block.h"
#include "transport/ring/device_slot.h"

namespace pycoll {

/// This rank's ends of the rings of one channel, by peer. Only the rings to the program's peers are
/// open.
struct BlockLinks {
  device::BlockSendEnd send[kMaxDeviceRanks];
  device::BlockRecvEnd recv[kMaxDeviceRanks];
};

/// State shared by the threads of a block (shared memory on a GPU). Written between barriers.
struct BlockShared {
  BlockLinks links;
  BlockOperands operands;           // of a phase
  BlockLinkSteps link_steps;        // of a phase
  BlockStep steps[kMaxPhaseSteps];  // of some whole phases
  ProgramView program;
  Payload payload;
  int64_t deadline_ns;
};

/// A protocol's batch of lines, defined in block_lines.h or block_long_lines.h.
template <class Protocol, class Target, DType dtype>
class BlockBatch;

template <class Env, DType dtype_>
class Block {
 public:
  static constexpr bool kRunsPhases = true;
  static constexpr DType dtype = dtype_;
  static constexpr int kLineTeam = Env::kLineTeam;
  using Storage = typename DeviceTraits<dtype>::Storage;

  PYCOLL_HD Block(const Env& env, const DeviceLaunch& launch, int channel, BlockShared& shared)
      : env_(env), launch_(launch), channel_(channel), shared_(shared) {}

  PYCOLL_HD BlockLinks& links() { return shared_.links; }
  PYCOLL_HD const DeviceLaunch& launch() const { return launch_; }
  PYCOLL_HD const Env& env() const { return env_; }
  static constexpr size_t element_size() { return sizeof(Storage); }
  PYCOLL_HD uint32_t digest() const { return launch_.digest; }
  PYCOLL_HD int thread_index() const { return env_.thread_index(); }
  PYCOLL_HD int num_threads() const { return env_.num_threads(); }
  PYCOLL_HD void sync() const { env_.sync(); }
  PYCOLL_HD bool agree(bool ready) const { return env_.agree(ready); }
  template <class Phase>
  PYCOLL_HD void on_post(const ProgramView&, const Phase&) const {}
  /// The op that combines two elements.
  PYCOLL_HD Op op() const { return combining_op(dtype, launch_.op); }
  PYCOLL_HD int64_t divisor(const StepOperands& operands) const {
    return operands.step->has(kFinal) ? launch_.divisor : 1;
  }

  /// Shares the operands of as many whole phases as there is room for, beginning with step `first`
  /// of the tile that starts at `done`. Returns one past their last step. Late threads may still
  /// post what the last phase has moved: no protocol reads the operands of a phase behind its last
  /// barrier.
  PYCOLL_HD int32_t share_steps(const ProgramView& program, const Payload& payload, int32_t first,
                                int64_t done) {
    int32_t end = program.num_steps;
    if (end - first > kMaxPhaseSteps) {
      end = first + kMaxPhaseSteps;
      while (program.steps[end].has(kSamePhase)) --end;
    }
    first_step_ = first;
    for (int32_t i = first + thread_index(); i < end; i += num_threads()) {
      BlockStep& shared = shared_.steps[i - first];
      shared.operands = step_operands(program, payload, program.steps[i], program.places[i], i,
                                      done, element_size());
      // Behind the operands of the phase's earlier steps, if all of these have elements.
      shared.first_src = shared.first_dst = 0;
      for (int32_t earlier = i; program.steps[earlier].has(kSamePhase);) {
        const Step& step = program.steps[--earlier];
        shared.first_src += count_bits(step.src_peers) + step.has(kReadLocal);
        shared.first_dst += count_bits(step.dst_peers) + step.has(kWriteLocal);
      }
    }
    sync();  // every thread reads the operands of all steps
    return end;
  }
  /// Steps [first, end) of the shared ones. Finds the steps that use this thread's links.
  PYCOLL_HD BlockPhase phase(int32_t first, int32_t end) {
    const BlockPhase phase{shared_.steps + (first - first_step_), end - first, &shared_.link_steps};
    for (int i = thread_index(); i < launch_.num_peers; i += num_threads()) {
      int src = -1;
      int dst = -1;
      for (int s = 0; s < phase.size(); ++s) {
        if (phase[s].count == 0) continue;
        const Step& step = *phase[s].step;
        if (step.src_peers >> i & 1) src = s;
        if (step.dst_peers >> i & 1) dst = s;
      }
      shared_.link_steps.srcs[i] = static_cast<int8_t>(src);
      shared_.link_steps.dsts[i] = static_cast<int8_t>(dst);
    }
    return phase;
  }

  /// Assigns the links with peer i to thread i: calls visit(peer) for each peer of the program.
  template <class Visit>
  PYCOLL_HD bool for_own_peers(const ProgramView& program, Visit&& visit) const {
    bool all = true;
    for (int i = thread_index(); i < launch_.num_peers; i += num_threads()) {
      all = visit(program.peers[i]) && all;
    }
    return all;
  }
  /// Calls visit(peer, operands of the step) for the sources or destinations of a phase, `peers`,
  /// that this thread serves.
  template <class Phase, class Visit>
  PYCOLL_HD bool for_own_peers(const ProgramView& program, const Phase& phase,
                               uint64_t Step::* peers, Visit&& visit) const {
    return for_own_steps(phase, peers,
                         [&](int i, int s) { return visit(program.peers[i], phase[s]); });
  }

  /// True when `ready()` came true; false when it never will, after the failure was reported.
  /// kTeam: the threads that wait for the same line and must continue or give up together.
  template <int kTeam = 1, class Ready>
  PYCOLL_HD bool spin_until(Ready&& ready, const WaitSite& site) const {
    for (;;) {
      for (int i = 0; i < Env::kSpins; ++i) {
        if (ready()) return true;
      }
      bool trouble = look_for_trouble(site);
      if constexpr (kTeam > 1) trouble = env_.any_of_line(trouble);
      if (trouble) return ready();  // data that arrived before the failure is valid
      env_.relax();
    }
  }
  /// Reports that a message of `peer` carried another digest. Returns false.
  PYCOLL_HD bool mismatch(int peer, int step) const {
    return fail(DeviceFailure::kMismatch, {peer, step});
  }

  /// Reports that another operation of this rank is under way. Returns false.
  PYCOLL_HD bool overlap() const { return fail(DeviceFailure::kOverlap, {launch_.rank, 0}); }

  /// Shares where the operands of a phase lie, before the barrier that precedes reduce_copy.
  template <class Phase>
  PYCOLL_HD void prepare(const ProgramView& program, const Phase& phase) {
    share_operands(
        program, phase, [this](int peer, const StepOperands&) { return links().recv[peer].slot(); },
        [this](int peer, const StepOperands&) { return links().send[peer].slot(); });
  }
  template <class Phase>
  PYCOLL_HD void reduce_copy(const ProgramView&, const Phase& phase) {
    combine(phase);
  }
  template <class Protocol, class Phase>
  PYCOLL_HD bool run_lines(const ProgramView& program, const Phase& phase) {
    return run_in_lines<BlockBatch<Protocol, Block, dtype>>(*this, program, phase);
  }

  /// Shares where the operands of a phase lie, step by step. A barrier must follow.
  template <class Phase, class SourceOf, class DestinationOf>
  PYCOLL_HD void share_operands(const ProgramView& program, const Phase& phase,
                                SourceOf&& source_of, DestinationOf&& destination_of) {
    BlockOperands& shared = shared_.operands;
    const auto local_place = [this](const Step& step) {
      return count_bits(step.src_peers & bits_below(launch_.self_position));
    };
    for_own_steps(phase, &Step::src_peers, [&](int i, int s) {
      const StepOperands& operands = phase[s];
      const int place = count_bits(operands.step->src_peers & bits_below(i));
      const bool above = operands.local_src != nullptr && place >= local_place(*operands.step);
      shared.srcs[phase.first_src(s) + place + above] = source_of(program.peers[i], operands);
      return true;
    });
    for_own_steps(phase, &Step::dst_peers, [&](int i, int s) {
      const StepOperands& operands = phase[s];
      const int place = count_bits(operands.step->dst_peers & bits_below(i));
      const bool has_local = operands.local_dst != nullptr;
      shared.dsts[phase.first_dst(s) + place + has_local] =
          destination_of(program.peers[i], operands);
      return true;
    });
    for (int s = thread_index(); s < phase.size(); s += num_threads()) {
      const StepOperands& operands = phase[s];
      if (operands.count == 0) continue;
      const int first_src = phase.first_src(s);
      if (operands.local_src != nullptr) {
        shared.srcs[first_src + local_place(*operands.step)] = operands.local_src;
      }
      if (operands.local_dst != nullptr) shared.dsts[phase.first_dst(s)] = operands.local_dst;
    }
  }
  /// Combines the shared operands. The bytes of all steps are one sequence of units, of which each
  /// warp takes an equal part.
  template <class Phase>
  PYCOLL_HD void combine(const Phase& phase) {
    constexpr int32_t kUnitBytes = Env::kWarp * BlockReduce<dtype>::kThreadBytes;
    const auto bytes_of = [&](const StepOperands& operands) {
      return static_cast<int32_t>(operands.count * int64_t{element_size()});
    };
    const auto units_of = [&](const StepOperands& operands) {
      return (bytes_of(operands) + kUnitBytes - 1) / kUnitBytes;
    };
    int32_t num_units = 0;
    for (int s = 0; s < phase.size(); ++s) num_units += units_of(phase[s]);
    const int32_t num_warps = num_threads() / Env::kWarp;
    const int32_t warp = thread_index() / Env::kWarp;
    int32_t first = num_units * warp / num_warps;
    int32_t end = num_units * (warp + 1) / num_warps;
    for (int s = 0; s < phase.size() && end > 0; ++s) {
      const StepOperands& operands = phase[s];
      const int32_t units = units_of(operands);
      if (first < units) {
        const int32_t num_bytes = bytes_of(operands);
        const Step& step = *operands.step;
        const ReduceOperands of_step = {
            shared_.operands.srcs + phase.first_src(s),
            count_bits(step.src_peers) + (operands.local_src != nullptr),
            shared_.operands.dsts + phase.first_dst(s),
            count_bits(step.dst_peers) + (operands.local_dst != nullptr)};
        BlockReduce<dtype>(of_step, op(), divisor(operands), thread_index() % Env::kWarp,
                           Env::kWarp)
            .run(first * kUnitBytes, end < units ? end * kUnitBytes : num_bytes);
        first = units;
      }
      first -= units;
      end -= units;
    }
  }

 private:
  /// Calls visit(bit of the peer, index of the step) for the sources or destinations of a phase
  /// that this thread serves. Threads of a warp visit at the same time.
  template <class Phase, class Visit>
  PYCOLL_HD bool for_own_steps(const Phase& phase, uint64_t Step::* peers, Visit&& visit) const {
    bool all = true;
    for (int i = thread_index(); i < launch_.num_peers; i += num_threads()) {
      const int s = phase.step_of(i, peers);
      if (s >= 0) all = visit(i, s) && all;
    }
    return all;
  }
  PYCOLL_HD static uint64_t bits_below(int position) {
    return position >= 64 ? ~uint64_t{0} : (uint64_t{1} << position) - 1;
  }

  /// True when the wait must end.
  PYCOLL_HD bool look_for_trouble(const WaitSite& site) const {
    if (device::load_relaxed(*launch_.failed) != 0) return true;
    if (device::load_relaxed(*launch_.abort_word) != 0) {
      return !fail(DeviceFailure::kAborted, site);
    }
    if (env_.clock_ns() > shared_.deadline_ns) return !fail(DeviceFailure::kTimeout, site);
    return false;
  }
  /// The first failing thread of the rank reports the reason; all others only see the failure.
  PYCOLL_HD bool fail(DeviceFailure code, const WaitSite& site) const {
    if (!device::claim(*launch_.failed)) return false;
    DeviceError error;
    error.code = code;
    error.for_credit = site.for_credit;
    error.rank = static_cast<uint16_t>(launch_.rank);
    error.peer = static_cast<uint16_t>(site.peer);
    error.step = static_cast<uint8_t>(site.step < 255 ? site.step : 255);
    error.channel = static_cast<uint8_t>(channel_);
    device::store_relaxed(launch_.report->operation, launch_.operation);
    device::store_release(launch_.report->error, __builtin_bit_cast(uint64_t, error));
    return false;
  }

  Env env_;
  const DeviceLaunch& launch_;
  int channel_;
  BlockShared& shared_;
  int32_t first_step_ = 0;  // the step of the first shared operands
};

}  // namespace pycoll
