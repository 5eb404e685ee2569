// Protocols: how the bytes of a step and their flags travel. Each protocol runs on every Target.
#pragma once

#include "base/bits.h"
#include "base/macros.h"
#include "executor/interpret.h"
#include "executor/wait/wait_site.h"

namespace pycoll {

// --- What a step's masks mean -------------------------------------------------------------------
//
// `links` belongs to the Target: Links (links.h) on a CPU, BlockLinks (device/block.h) on a device.
// BlockLinks have no multicast rings.

/// Calls visit(peer rank) for each bit of `mask`, in ascending order, until it returns false.
template <class Visit>
PYCOLL_HD bool for_each_peer(const ProgramView& program, uint64_t mask, Visit&& visit) {
  for (; mask != 0; mask &= mask - 1) {
    if (!visit(program.peers[lowest_bit(mask)])) return false;
  }
  return true;
}

PYCOLL_HD inline decltype(auto) source_link(auto& links, const Step& step, int peer) {
  const auto index = static_cast<size_t>(peer);
  if constexpr (requires { links.recv_multicast; }) {
    return step.has(kMulticastSrc) ? links.recv_multicast[index] : links.recv[index];
  } else {
    return (links.recv[index]);
  }
}

/// Calls visit(link, peer rank) for each ring that the step writes: one per destination, or the
/// multicast ring once, with the lowest destination as the peer (for error messages).
template <class Visit>
PYCOLL_HD bool for_each_destination(const ProgramView& program, auto& links, const Step& step,
                                    Visit&& visit) {
  if constexpr (requires { links.send_multicast; }) {
    if (step.dst_peers != 0 && step.has(kMulticastDst)) {
      return visit(links.send_multicast, program.peers[lowest_bit(step.dst_peers)]);
    }
  }
  return for_each_peer(program, step.dst_peers, [&](int peer) {
    return visit(links.send[static_cast<size_t>(peer)], peer);
  });
}

/// Visits the sources in rank order: on_peer(peer) for each peer, on_local() at this rank's place.
template <class OnPeer, class OnLocal>
PYCOLL_HD bool visit_sources(const ProgramView& program, const StepOperands& operands,
                             OnPeer&& on_peer, OnLocal&& on_local) {
  const Step& step = *operands.step;
  const uint64_t below =
      program.self_position >= 64 ? ~uint64_t{0} : (uint64_t{1} << program.self_position) - 1;
  if (!for_each_peer(program, step.src_peers & below, on_peer)) return false;
  if (operands.local_src != nullptr) on_local();
  return for_each_peer(program, step.src_peers & ~below, on_peer);
}

/// Like the above, with each peer's link: on_link(link, peer).
template <class OnLink, class OnLocal>
PYCOLL_HD bool for_each_source(const ProgramView& program, auto& links,
                               const StepOperands& operands, OnLink&& on_link, OnLocal&& on_local) {
  return visit_sources(
      program, operands,
      [&](int peer) { return on_link(source_link(links, *operands.step, peer), peer); }, on_local);
}

// Per-link work is divided among the threads of a team: Target::for_own_peers visits the sources or
// destinations of a phase whose links this thread serves, each with the step that uses the link. A
// single thread serves all links; in a block, thread i serves the links of peer i, so that the
// latencies of their flags overlap.

/// Whether a link has a slot for the next message of the call.
template <class Target, class Link>
PYCOLL_HD bool has_credit(const Target& target, Link& link) {
  if constexpr (requires { target.slot_use(); }) {
    return link.has_free_slot(target.slot_use());
  } else {
    return link.has_free_slot();
  }
}

/// Whether a step can be run `count` times without waiting for a credit.
template <class Target>
bool has_credits(Target& target, const ProgramView& program, const Step& step, uint64_t count) {
  return for_each_destination(program, target.links(), step, [&](auto& link, int) {
    return link.has_free_slots(target.slot_use(), count);
  });
}

template <class Target, class Phase>
PYCOLL_HD bool wait_for_credits(Target& target, const ProgramView& program, const Phase& phase) {
  const auto site = [](int peer, const StepOperands& operands) {
    return WaitSite{peer, operands.index, operands.step->first_chunk, /*for_credit=*/true};
  };
  auto& links = target.links();
  if constexpr (requires { links.send_multicast; }) {
    const Step& step = *phase[0].step;
    if (step.dst_peers != 0 && step.has(kMulticastDst)) {
      auto& link = links.send_multicast;
      if (has_credit(target, link)) return true;
      // Checks one reader at a time, because the wait and its error must name the reader that holds
      // the slot. All other ranks are peers here, so this rank's position is its rank.
      const bool ready = for_each_peer(program, step.dst_peers, [&](int peer) {
        const int reader = peer < program.self_position ? peer : peer - 1;
        return target.spin_until([&link, reader] { return link.has_free_slot_of(reader); },
                                 site(peer, phase[0]));
      });
      return ready && has_credit(target, link);
    }
  }
  return target.for_own_peers(
      program, phase, &Step::dst_peers, [&](int peer, const StepOperands& operands) {
        auto& link = links.send[static_cast<size_t>(peer)];
        return target.spin_until([&] { return has_credit(target, link); }, site(peer, operands));
      });
}

/// Calls visit(link, operands) for each ring that the phase writes and this thread serves.
template <class Target, class Phase, class Visit>
PYCOLL_HD void for_own_destinations(Target& target, const ProgramView& program, const Phase& phase,
                                    Visit&& visit) {
  auto& links = target.links();
  if constexpr (requires { links.send_multicast; }) {
    const Step& step = *phase[0].step;
    if (step.dst_peers != 0 && step.has(kMulticastDst)) {
      return visit(links.send_multicast, phase[0]);
    }
  }
  target.for_own_peers(program, phase, &Step::dst_peers,
                       [&](int peer, const StepOperands& operands) {
                         visit(links.send[static_cast<size_t>(peer)], operands);
                         return true;
                       });
}

/// Brings the slot of the next message into the caches of links that have these: a message of as
/// many bytes as `nbytes_of()` returns.
template <class Link, class NumBytesOf>
PYCOLL_HD void warm_next(Link& link, NumBytesOf&& nbytes_of) {
  if constexpr (requires { link.warm_next(int64_t{}); }) link.warm_next(nbytes_of());
}

// --- simple: bulk bytes, then one flag -----------------------------------------------------------

/// A target whose slots may have checksums, and whose messages may come from other hosts. (nvcc
/// rejects the same test inside a generic lambda.)
template <class Target>
concept ChecksData = requires { &Target::add_checksum; };
template <class Target>
concept HasHosts = requires { &Target::await_remote; };

struct Simple {
  template <class Target, class Phase>
  PYCOLL_HD static bool run(Target& target, const ProgramView& program, const Phase& phase) {
    const bool ready =
        wait_for_sources(target, program, phase) && wait_for_credits(target, program, phase);
    target.prepare(program, phase);
    if (!target.agree(ready)) return false;
    target.reduce_copy(program, phase);
    target.sync();  // every thread has written and read its bytes before a flag is set
    finish(target, program, phase);
    return true;
  }

 private:
  template <class Target, class Phase>
  PYCOLL_HD static bool wait_for_sources(Target& target, const ProgramView& program,
                                         const Phase& phase) {
    return target.for_own_peers(
        program, phase, &Step::src_peers, [&](int peer, const StepOperands& operands) {
          const Step& step = *operands.step;
          auto& link = source_link(target.links(), step, peer);
          const WaitSite site{peer, operands.index, step.first_chunk};
          const auto arrive = [&] {
            return target.spin_until([&link] { return link.has_full_slot(); }, site);
          };
          if constexpr (HasHosts<Target>) {
            if (!(target.has_hosts() ? target.await_remote(link, operands, site) : arrive())) {
              return false;
            }
          } else {
            if (!arrive()) return false;
          }
          if (link.mark() != target.digest()) return target.mismatch(peer, operands.index);
          if constexpr (ChecksData<Target>) {
            return target.has_checksum(link, peer, operands);
          } else {
            return true;
          }
        });
  }

  template <class Target, class Phase>
  PYCOLL_HD static void finish(Target& target, const ProgramView& program, const Phase& phase) {
    for_own_destinations(target, program, phase, [&](auto& link, const StepOperands& operands) {
      if constexpr (ChecksData<Target>) {
        target.add_checksum(link, operands);
      }
      link.post(target.digest());
      warm_next(link, [&] { return operands.count * static_cast<int64_t>(target.element_size()); });
    });
    target.for_own_peers(program, phase, &Step::src_peers,
                         [&](int peer, const StepOperands& operands) {
                           source_link(target.links(), *operands.step, peer).release();
                           return true;
                         });
    target.on_post(program, phase);
  }
};

// --- ll, ll128, poison: the flag travels with the bytes ------------------------------------------

/// A slot is an array of lines, and each line shows by itself whether it has arrived: a reader
/// waits for one transfer, and needs no separate flag. A thread, or a few that share a line, work
/// through batches of lines independently, those of all steps of a phase as one sequence; only
/// credits need agreement. Batch defines the lines:
/// kPayloadBytes of a batch, kLinePayloadBytes of kLineBytes, kTeam threads for one batch, kCredits
/// (slots must be returned to the writer), add_sources() where a thread looks at the lines of
/// several sources at once, clear() where slots must be cleared periodically.
template <class Batch, class Target, class Phase>
PYCOLL_HD bool run_in_lines(Target& target, const ProgramView& program, const Phase& phase) {
  auto& links = target.links();
  bool ready = true;
  if constexpr (Batch::kCredits) {
    if (!target.agree(wait_for_credits(target, program, phase))) return false;
  }
  const auto bytes_of = [&](const StepOperands& operands) {
    return operands.count * static_cast<int64_t>(target.element_size());
  };
  const int64_t stride = Batch::kPayloadBytes * (target.num_threads() / Batch::kTeam);
  int64_t at = Batch::kPayloadBytes * (target.thread_index() / Batch::kTeam);
  for (int i = 0; i < phase.size() && ready; ++i) {
    const StepOperands& operands = phase[i];
    const int64_t num_bytes = bytes_of(operands);
    for (; at < num_bytes && ready; at += stride) {
      const int64_t left = num_bytes - at;
      Batch batch(target, operands, at, left < Batch::kPayloadBytes ? left : Batch::kPayloadBytes);
      if constexpr (requires { batch.add_sources(program); }) {
        ready = batch.add_sources(program);
      } else {
        ready = for_each_source(
            program, links, operands,
            [&](auto& link, int peer) { return batch.add_lines(link, peer); },
            [&] { batch.add_local(); });
      }
      if (!ready) break;
      batch.finish();
      for_each_destination(program, links, *operands.step, [&](auto& link, int) {
        batch.write_lines(link);
        return true;
      });
    }
    // The next step's batches follow this one's.
    at -= (num_bytes + Batch::kPayloadBytes - 1) / Batch::kPayloadBytes * Batch::kPayloadBytes;
  }
  if constexpr (requires { Batch::clear(target, program, *phase[0].step); }) {
    for (int i = 0; i < phase.size(); ++i) {
      if (phase[i].count != 0) Batch::clear(target, program, *phase[i].step);
    }
  }
  if (!target.agree(ready)) return false;
  for_own_destinations(target, program, phase, [&](auto& link, const StepOperands& operands) {
    link.post_in_band();
    warm_next(link, [&] {
      return (bytes_of(operands) + Batch::kLinePayloadBytes - 1) / Batch::kLinePayloadBytes *
             Batch::kLineBytes;
    });
  });
  if constexpr (Batch::kCredits) {
    target.for_own_peers(program, phase, &Step::src_peers,
                         [&](int peer, const StepOperands& operands) {
                           source_link(links, *operands.step, peer).release();
                           return true;
                         });
    target.on_post(program, phase);
  } else {
    target.for_own_peers(program, phase, &Step::src_peers, [&](int peer, const StepOperands&) {
      links.recv[static_cast<size_t>(peer)].release_in_band();
      return true;
    });
    target.sync();  // the serving thread has advanced a link before any thread uses it again
  }
  return true;
}

/// Low latency: each line is as short as the target can store and load atomically.
struct LowLatency {
  template <class Target, class Phase>
  PYCOLL_HD static bool run(Target& target, const ProgramView& program, const Phase& phase) {
    return target.template run_lines<LowLatency>(program, phase);
  }

  /// Bytes of a message that fit in a slot of `slot_bytes`.
  template <class Batch>
  static int64_t payload_bytes(size_t slot_bytes) {
    return static_cast<int64_t>(slot_bytes / Batch::kLineBytes) * Batch::kLinePayloadBytes;
  }
};

/// Lines of 128 bytes with a flag of 8 bytes: nearly all of a link's bandwidth at nearly the
/// latency of ll. Devices only.
struct LowLatency128 {
  template <class Target, class Phase>
  PYCOLL_HD static bool run(Target& target, const ProgramView& program, const Phase& phase) {
    return target.template run_lines<LowLatency128>(program, phase);
  }
};

/// The payload is its own flag: slots hold poison, a NaN that arithmetic never produces, until data
/// arrives; the reader restores the poison. Needs no flag, no credit and no barrier at the end
/// (decision 0019). Devices only.
struct Poison {
  template <class Target, class Phase>
  PYCOLL_HD static bool run(Target& target, const ProgramView& program, const Phase& phase) {
    return target.template run_lines<Poison>(program, phase);
  }
};

}  // namespace pycoll
