#include "p2p/message_queue.h"

namespace pycoll {

bool MessageQueue::take(int source, int32_t tag, int num_ranks, Unexpected* message) {
  if (unexpected_.empty()) return false;
  auto oldest = unexpected_.end();
  const int first = source == kAnySource ? 0 : source;
  const int last = source == kAnySource ? num_ranks - 1 : source;
  for (int rank = first; rank <= last; ++rank) {
    const auto found = unexpected_.lower_bound({rank, tag, 0});
    if (found == unexpected_.end() || found->first.source != rank || found->first.tag != tag) {
      continue;
    }
    if (oldest == unexpected_.end() || found->first.arrival < oldest->first.arrival) {
      oldest = found;
    }
  }
  if (oldest == unexpected_.end()) return false;
  *message = std::move(oldest->second);
  unexpected_.erase(oldest);
  if (message->announced && message->blocking) --num_held_senders_;
  return true;
}

MessageOp* MessageQueue::match(int source, int32_t tag) {
  for (auto at = posted_.begin(); at != posted_.end(); ++at) {
    MessageOp* op = *at;
    if (op->tag == tag && (op->peer == source || op->peer == kAnySource)) {
      posted_.erase(at);
      return op;
    }
  }
  return nullptr;
}

}  // namespace pycoll
