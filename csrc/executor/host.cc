#include "executor/host.h"

namespace pycoll {

HostThread::HostThread(Segment& segment, Waiter& waiter, int num_ranks)
    : segment_(segment),
      waiter_(waiter),
      staging_(new std::byte[static_cast<size_t>(num_ranks + 1) *
                             static_cast<size_t>(LineBatch::kPayloadBytes)]) {}

void HostThread::reduce_copy(const ProgramView& program, const StepOperands& operands) {
  const void* srcs[kMaxPeers + 1];
  void* dsts[kMaxPeers + 1];
  int num_srcs = 0;
  int num_dsts = 0;
  for_each_source(
      program, *links_, operands,
      [&](RecvEnd& link, int) {
        srcs[num_srcs++] = link.slot();
        return true;
      },
      [&] { srcs[num_srcs++] = operands.local_src; });
  if (operands.local_dst != nullptr) dsts[num_dsts++] = operands.local_dst;
  for_each_destination(program, *links_, *operands.step, [&](SendEnd& link, int) {
    dsts[num_dsts++] = link.slot();
    return true;
  });
  const size_t count = static_cast<size_t>(operands.count);
  const bool streaming = arithmetic_.streaming && operands.local_dst != nullptr;
  if (num_srcs == 1 && num_dsts == 1) {
    copy_bytes(dsts[0], srcs[0], count * arithmetic_.element_size, streaming);
    return;
  }
  arithmetic_.reduce_copy({srcs, num_srcs, dsts, num_dsts, count,
                           operands.step->has(kFinal) ? arithmetic_.divisor : 1, streaming});
}

void HostThread::LineBatch::finish() {
  const size_t element_size = target_.arithmetic_.element_size;
  std::byte* local = operands_.local_dst == nullptr ? nullptr : operands_.local_dst + at_;
  if (num_srcs_ == 1) {
    result_ = static_cast<const std::byte*>(srcs_[0]);
    if (local != nullptr) std::memcpy(local, result_, static_cast<size_t>(num_bytes_));
    return;
  }
  void* out = local != nullptr ? local : staging(num_srcs_);
  target_.arithmetic_.reduce_copy(
      {srcs_, num_srcs_, &out, 1, static_cast<size_t>(num_bytes_) / element_size,
       operands_.step->has(kFinal) ? target_.arithmetic_.divisor : 1, false});
  result_ = static_cast<const std::byte*>(out);
}

}  // namespace pycoll
