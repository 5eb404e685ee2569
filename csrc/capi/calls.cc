#include "capi/calls.h"

#include <algorithm>
#include <string>

#include "base/error.h"

namespace pycoll {
namespace {

// The enumerators of pycoll.h are in the order of the core's tables.
static_assert(PYCOLL_NEIGHBOR_EXCHANGE + 1 == kNumCollectives);
static_assert(PYCOLL_BARRIER == static_cast<int>(Collective::kBarrier));
static_assert(PYCOLL_ALL_TO_ALL == static_cast<int>(Collective::kAllToAll));
static_assert(PYCOLL_OPAQUE == static_cast<int>(DType::kOpaque));
static_assert(PYCOLL_F8_E4M3 == static_cast<int>(DType::kF8E4M3));
static_assert(PYCOLL_I8 == static_cast<int>(DType::kI8));
static_assert(PYCOLL_U8 == static_cast<int>(DType::kU8));
static_assert(PYCOLL_BOOL == static_cast<int>(DType::kBool));
static_assert(PYCOLL_C128 == static_cast<int>(DType::kC128));
static_assert(PYCOLL_AVG == static_cast<int>(Op::kAvg));
static_assert(PYCOLL_PREMUL + 1 == kNumOps);
static_assert(PYCOLL_ANY_SOURCE == kAnySource);
static_assert(PYCOLL_MAX_DIMS == std::size(Call().shape));

}  // namespace

Call call_of(const pycoll_call& from) {
  Call call;
  call.collective = static_cast<Collective>(from.collective);
  call.input = from.input;
  call.output = from.output;
  call.count = from.count;
  call.dtype = static_cast<DType>(from.dtype);
  call.element_size = from.element_size;
  call.op = static_cast<Op>(from.op);
  call.factor = from.factor;
  call.root = from.root;
  call.num_dims = from.num_dims;
  std::copy_n(from.shape, PYCOLL_MAX_DIMS, call.shape);
  call.block_counts = from.block_counts;
  call.send_counts = from.send_counts;
  call.recv_counts = from.recv_counts;
  call.deterministic = from.deterministic != 0;
  call.timeout_s = from.timeout_s;
  call.site = from.site;
  // As in other collectives libraries, only the numbers of elements must agree.
  call.shapes_may_differ = true;
  return call;
}

MessageOp message_of(const pycoll_message& message, int num_ranks) {
  if (message.tag < 0) {
    throw UsageError("tag is " + std::to_string(message.tag) + ", expected 0 or more");
  }
  const bool any = message.is_send == 0 && message.peer == PYCOLL_ANY_SOURCE;
  if (!any && (message.peer < 0 || message.peer >= num_ranks)) {
    throw UsageError("peer is " + std::to_string(message.peer) + ", expected a rank of 0.." +
                     std::to_string(num_ranks - 1));
  }
  MessageOp op;
  op.is_send = message.is_send != 0;
  op.peer = message.peer;
  op.tag = message.tag;
  op.dtype = static_cast<DType>(message.dtype);
  op.data = static_cast<std::byte*>(message.data);
  op.nbytes = message.nbytes;
  op.site = message.site;
  return op;
}

KeptCall::KeptCall(const pycoll_call& call, int num_ranks) : call_(call_of(call)) {
  const auto n = static_cast<size_t>(num_ranks);
  if (call.block_counts != nullptr) {
    counts_.assign(call.block_counts, call.block_counts + n);
    call_.block_counts = counts_.data();
  }
  if (call.send_counts != nullptr) {
    counts_.assign(call.send_counts, call.send_counts + n);
    counts_.insert(counts_.end(), call.recv_counts, call.recv_counts + n);
    call_.send_counts = counts_.data();
    call_.recv_counts = counts_.data() + n;
  }
}

}  // namespace pycoll
