// Protocols: how the bytes of a step and their flags travel. Each runs on every Target.
#pragma once

#include <bit>

#include "base/macros.h"
#include "executor/interpret.h"
#include "executor/links.h"
#include "executor/wait.h"

namespace pycoll {

// --- What a step's masks mean -------------------------------------------------------------------
//
// `links` is the Target's: Links (links.h) on a host, the same members in device memory on a GPU.

/// Calls visit(peer rank) for each bit of `mask`, ascending; stops when it returns false.
template <class Visit>
PYCOLL_HD bool for_each_peer(const ProgramView& program, uint64_t mask, Visit&& visit) {
  for (; mask != 0; mask &= mask - 1) {
    if (!visit(program.peers[std::countr_zero(mask)])) return false;
  }
  return true;
}

PYCOLL_HD inline auto& source_link(auto& links, const Step& step, int peer) {
  const auto index = static_cast<size_t>(peer);
  return step.has(kMulticastSrc) ? links.recv_multicast[index] : links.recv[index];
}

/// Calls visit(link, peer rank) for each ring that the step writes: one per destination, or the
/// multicast ring once (with the lowest destination as the peer, for messages).
template <class Visit>
PYCOLL_HD bool for_each_destination(const ProgramView& program, auto& links, const Step& step,
                                    Visit&& visit) {
  if (step.dst_peers != 0 && step.has(kMulticastDst)) {
    return visit(links.send_multicast, program.peers[std::countr_zero(step.dst_peers)]);
  }
  return for_each_peer(program, step.dst_peers, [&](int peer) {
    return visit(links.send[static_cast<size_t>(peer)], peer);
  });
}

/// Sources in absolute rank order: on_peer(peer) for each peer, on_local() at the own place.
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

/// The same with each peer's link: on_link(link, peer).
template <class OnLink, class OnLocal>
PYCOLL_HD bool for_each_source(const ProgramView& program, auto& links,
                               const StepOperands& operands, OnLink&& on_link, OnLocal&& on_local) {
  return visit_sources(
      program, operands,
      [&](int peer) { return on_link(source_link(links, *operands.step, peer), peer); }, on_local);
}

template <class Target>
PYCOLL_HD bool wait_for_credits(Target& target, const ProgramView& program,
                                const StepOperands& operands) {
  const Step& step = *operands.step;
  const auto site = [&](int peer) {
    return WaitSite{peer, operands.index, step.first_chunk, /*for_credit=*/true};
  };
  if (step.dst_peers != 0 && step.has(kMulticastDst)) {
    auto& link = target.links().send_multicast;
    if (link.has_free_slot()) return true;
    // Reader by reader: the one that holds the slot is the one to look after, and to name. All
    // others are peers here, so this rank's position is its rank.
    const bool ready = for_each_peer(program, step.dst_peers, [&](int peer) {
      const int reader = peer < program.self_position ? peer : peer - 1;
      return target.spin_until([&link, reader] { return link.has_free_slot_of(reader); },
                               site(peer));
    });
    return ready && link.has_free_slot();
  }
  return for_each_destination(program, target.links(), step, [&](auto& link, int peer) {
    return target.spin_until([&link] { return link.has_free_slot(); }, site(peer));
  });
}

// --- simple: bulk bytes, then one flag -----------------------------------------------------------

struct Simple {
  template <class Target>
  PYCOLL_HD static bool run(Target& target, const ProgramView& program,
                            const StepOperands& operands) {
    bool ready = true;
    if (target.is_leader()) {
      ready = wait_for_sources(target, program, operands) &&
              wait_for_credits(target, program, operands);
    }
    if (!target.agree(ready)) return false;
    target.reduce_copy(program, operands);
    target.sync();  // every thread's bytes are written, and read, before the leader says so
    if (target.is_leader()) finish(target, program, operands);
    return true;
  }

 private:
  template <class Target>
  PYCOLL_HD static bool wait_for_sources(Target& target, const ProgramView& program,
                                         const StepOperands& operands) {
    const Step& step = *operands.step;
    return for_each_peer(program, step.src_peers, [&](int peer) {
      auto& link = source_link(target.links(), step, peer);
      if (!target.spin_until([&link] { return link.has_full_slot(); },
                             {peer, operands.index, step.first_chunk})) {
        return false;
      }
      return link.mark() == target.digest() || target.mismatch(peer);
    });
  }

  template <class Target>
  PYCOLL_HD static void finish(Target& target, const ProgramView& program,
                               const StepOperands& operands) {
    const Step& step = *operands.step;
    for_each_destination(program, target.links(), step, [&](auto& link, int) {
      link.post(target.digest());
      link.warm_next(operands.count * static_cast<int64_t>(target.element_size()));
      return true;
    });
    for_each_peer(program, step.src_peers, [&](int peer) {
      source_link(target.links(), step, peer).release();
      return true;
    });
    target.posted(program, operands);
  }
};

// --- ll: the flag travels inside the line
// ----------------------------------------------------------

/// Low latency. A slot is an array of the Target's lines; each carries its own flag, the message's
/// sequence number, so a reader needs one flight of one line and no flag apart. A thread works
/// through batches of lines on its own; only credits need the leader.
struct LowLatency {
  template <class Target>
  PYCOLL_HD static bool run(Target& target, const ProgramView& program,
                            const StepOperands& operands) {
    const Step& step = *operands.step;
    auto& links = target.links();
    bool ready = true;
    if (target.is_leader()) ready = wait_for_credits(target, program, operands);
    if (!target.agree(ready)) return false;

    using Batch = typename Target::LineBatch;
    const int64_t num_bytes = operands.count * static_cast<int64_t>(target.element_size());
    const int64_t stride = Batch::kPayloadBytes * target.num_threads();
    for (int64_t at = Batch::kPayloadBytes * target.thread_index(); at < num_bytes && ready;
         at += stride) {
      const int64_t left = num_bytes - at;
      Batch batch(target, operands, at, left < Batch::kPayloadBytes ? left : Batch::kPayloadBytes);
      ready = for_each_source(
          program, links, operands,
          [&](auto& link, int peer) { return batch.add_lines(link, peer); },
          [&] { batch.add_local(); });
      if (!ready) break;
      batch.finish();
      for_each_destination(program, links, step, [&](auto& link, int) {
        batch.write_lines(link);
        return true;
      });
    }
    if (!target.agree(ready)) return false;
    if (target.is_leader()) {
      for_each_destination(program, links, step, [&](auto& link, int) {
        link.post_in_band();
        link.warm_next((num_bytes + Batch::kLinePayloadBytes - 1) / Batch::kLinePayloadBytes *
                       Batch::kLineBytes);
        return true;
      });
      for_each_peer(program, step.src_peers, [&](int peer) {
        source_link(links, step, peer).release();
        return true;
      });
      target.posted(program, operands);
    }
    return true;
  }

  /// Bytes of a message that fit a slot of `slot_bytes`.
  template <class Target>
  static int64_t payload_bytes(size_t slot_bytes) {
    using Batch = typename Target::LineBatch;
    return static_cast<int64_t>(slot_bytes / Batch::kLineBytes) * Batch::kLinePayloadBytes;
  }
};

}  // namespace pycoll
