#include "comm/coalesce.h"

#include <algorithm>
#include <cstring>

namespace pycoll {
namespace {

// Above this total the size of messages costs more than their number.
constexpr int64_t kMaxFusedBytes = 64 << 10;
constexpr size_t kMaxFusedCalls = 256;

int64_t bytes_of(const Call& call) {
  return call.count * static_cast<int64_t>(std::max(call.element_size, dtype_size(call.dtype)));
}

bool overlap(const void* first, int64_t first_bytes, const void* second, int64_t second_bytes) {
  const auto* a = static_cast<const std::byte*>(first);
  const auto* b = static_cast<const std::byte*>(second);
  return a < b + second_bytes && b < a + first_bytes;
}

/// Whether the order of reduction cannot change the result. The order depends on the size of the
/// message, so only such calls may be packed.
bool is_order_free(const Call& call, int num_ranks) {
  if (num_ranks <= 2 || call.deterministic) return true;
  const std::string_view dtype = dtype_name(call.dtype);
  return dtype[0] == 'i' || dtype[0] == 'u' || dtype == "bool";
}

bool have_same_operation(const Call& a, const Call& b) {
  return a.collective == b.collective && a.dtype == b.dtype && a.op == b.op &&
         a.factor == b.factor && a.deterministic == b.deterministic;
}

}  // namespace

void Batch::add(const Call& call, std::shared_ptr<void> keep_alive) {
  calls_.push_back({call, std::string(call.algorithm)});
  keep_alive_.push_back(std::move(keep_alive));
  nbytes_ += bytes_of(call);
}

void Batch::add(const MessageOp& op, std::shared_ptr<void> keep_alive) {
  messages_.push_back(std::make_shared<MessageOp>(op));
  keep_alive_.push_back(std::move(keep_alive));
  nbytes_ += static_cast<int64_t>(op.nbytes);
}

void Batch::run(Communicator& comm, const OnSlow& on_slow) {
  if (messages_.empty()) return run_calls(comm, on_slow);
  PointToPoint& messages = comm.messages();
  try {
    // While a collective runs, no thread waits for messages, so they need their own thread.
    messages.post_all(messages_, !calls_.empty());
    run_calls(comm, on_slow);
    messages.wait_for_all(messages_, on_slow);
  } catch (...) {
    // The arrays of pending operations are about to be released.
    messages.abandon();
    throw;
  }
}

void Batch::run_calls(Communicator& comm, const OnSlow& on_slow) {
  for (size_t at = 0; at < calls_.size();) {
    const size_t end = fusable_from(at, comm.size());
    if (end - at > 1) {
      run_fused(comm, at, end, on_slow);
    } else {
      Call& call = calls_[at].call;
      call.algorithm = calls_[at].algorithm;
      call.on_slow = on_slow;
      comm.run(call);
    }
    at = std::max(end, at + 1);
  }
}

size_t Batch::fusable_from(size_t first, int num_ranks) const {
  const Call& model = calls_[first].call;
  if (model.collective != Collective::kAllReduce || !is_order_free(model, num_ranks)) return first;
  int64_t total = 0;
  size_t end = first;
  for (; end < calls_.size() && end - first < kMaxFusedCalls; ++end) {
    const Call& call = calls_[end].call;
    total += bytes_of(call);
    if (!have_same_operation(call, model) || call.device >= 0 || !calls_[end].algorithm.empty() ||
        total > kMaxFusedBytes)
      break;
    // A call that reads the output of an earlier one of the group must run after it.
    const auto reads_output_of = [&call](const QueuedCall& earlier) {
      return overlap(call.input, bytes_of(call), earlier.call.output, bytes_of(earlier.call));
    };
    const auto begin = calls_.begin() + static_cast<std::ptrdiff_t>(first);
    if (std::any_of(begin, calls_.begin() + static_cast<std::ptrdiff_t>(end), reads_output_of)) {
      break;
    }
  }
  return end;
}

void Batch::run_fused(Communicator& comm, size_t first, size_t end, const OnSlow& on_slow) {
  Call fused = calls_[first].call;
  fused.on_slow = on_slow;
  fused.algorithm = {};
  fused.count = 0;
  fused.num_dims = 0;
  std::fill_n(fused.shape, 6, 0);
  if (packed_ == nullptr) {
    packed_ = std::make_unique_for_overwrite<std::byte[]>(static_cast<size_t>(kMaxFusedBytes));
  }
  size_t at = 0;
  for (size_t i = first; i < end; ++i) {
    const Call& call = calls_[i].call;
    const auto nbytes = static_cast<size_t>(bytes_of(call));
    if (nbytes != 0) std::memcpy(packed_.get() + at, call.input, nbytes);
    at += nbytes;
    fused.count += call.count;
    // The ranks must agree on the counts of the parts. Counts beyond the fifth are hashed into one.
    const size_t dim = std::min<size_t>(i - first, 5);
    fused.shape[dim] = dim < 5 ? call.count : fused.shape[dim] * 31 + call.count;
    fused.num_dims = static_cast<int>(dim) + 1;
  }
  fused.input = fused.output = packed_.get();
  comm.run(fused);
  at = 0;
  for (size_t i = first; i < end; ++i) {
    const Call& call = calls_[i].call;
    const auto nbytes = static_cast<size_t>(bytes_of(call));
    if (nbytes != 0) std::memcpy(call.output, packed_.get() + at, nbytes);
    at += nbytes;
  }
}

}  // namespace pycoll
