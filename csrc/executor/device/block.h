// Block: the Target that runs a program with a team of a device's threads, as seen by one thread.
//
// `Env` defines how the threads work together: ThreadEnv (thread_env.h) on CPU threads, CudaEnv
// (cuda_env.cuh) on a GPU. The rest is the same source on both, so ThreadSanitizer checks the code
// that a GPU runs. The op is chosen at run time, once per step and outside of its loops.
#pragma once

#include "base/bits.h"
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
  BlockOperands operands;
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
  PYCOLL_HD void on_post(const ProgramView&, const StepOperands&) const {}
  /// The op that combines two elements.
  PYCOLL_HD Op op() const { return combining_op(dtype, launch_.op); }
  PYCOLL_HD int64_t divisor(const StepOperands& operands) const {
    return operands.step->has(kFinal) ? launch_.divisor : 1;
  }

  /// Assigns the links with peer i to thread i.
  template <class Visit>
  PYCOLL_HD bool for_own_peers(const ProgramView& program, uint64_t mask, Visit&& visit) const {
    bool all = true;
    for (int i = thread_index(); i < launch_.num_peers; i += num_threads()) {
      if (mask >> i & 1) all = visit(program.peers[i]) && all;
    }
    return all;
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

  /// Shares where the operands of a step lie, before the barrier that precedes reduce_copy.
  PYCOLL_HD void prepare(const ProgramView& program, const StepOperands& operands) {
    share_operands(
        program, operands, [this](int peer) { return links().recv[peer].slot(); },
        [this](int peer) { return links().send[peer].slot(); });
  }
  PYCOLL_HD void reduce_copy(const ProgramView&, const StepOperands& operands) {
    combine(operands);
  }
  template <class Protocol>
  PYCOLL_HD bool run_lines(const ProgramView& program, const StepOperands& operands) {
    return run_in_lines<BlockBatch<Protocol, Block, dtype>>(*this, program, operands);
  }

  /// Shares where the operands of a step lie. A barrier must follow.
  template <class SourceOf, class DestinationOf>
  PYCOLL_HD void share_operands(const ProgramView& program, const StepOperands& operands,
                                SourceOf&& source_of, DestinationOf&& destination_of) {
    const Step& step = *operands.step;
    BlockOperands& shared = shared_.operands;
    const int local_place = count_bits(step.src_peers & bits_below(launch_.self_position));
    const bool has_local_src = operands.local_src != nullptr;
    const bool has_local_dst = operands.local_dst != nullptr;
    for (int i = thread_index(); i < launch_.num_peers; i += num_threads()) {
      if (step.src_peers >> i & 1) {
        const int place = count_bits(step.src_peers & bits_below(i));
        const bool above = has_local_src && place >= local_place;
        shared.srcs[place + above] = source_of(program.peers[i]);
      }
      if (step.dst_peers >> i & 1) {
        const int place = count_bits(step.dst_peers & bits_below(i));
        shared.dsts[place + has_local_dst] = destination_of(program.peers[i]);
      }
    }
    if (thread_index() == 0) {
      if (has_local_src) shared.srcs[local_place] = operands.local_src;
      if (has_local_dst) shared.dsts[0] = operands.local_dst;
    }
  }
  /// Combines the shared operands.
  PYCOLL_HD void combine(const StepOperands& operands) {
    const Step& step = *operands.step;
    const int num_srcs = count_bits(step.src_peers) + (operands.local_src != nullptr);
    const int num_dsts = count_bits(step.dst_peers) + (operands.local_dst != nullptr);
    BlockReduce<dtype>(shared_.operands, num_srcs, num_dsts, op(), divisor(operands),
                       thread_index(), num_threads())
        .run(operands.count);
  }

 private:
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
};

}  // namespace pycoll
