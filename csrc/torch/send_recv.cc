// Sends and receives. They begin at once, even within a coalesced group, so that no order of sends
// and receives deadlocks.
#include "torch/backend.h"

namespace pycoll::torch_backend {
namespace {

using c10d::OpType;

pycoll_message message_of(const at::Tensor& tensor, int peer, int tag, bool is_send) {
  return {.is_send = is_send,
          .dtype = dtype_of(tensor.scalar_type()),
          .peer = peer,
          .tag = tag,
          .data = tensor.data_ptr(),
          .nbytes = tensor.nbytes(),
          .timeout_s = 0,  // the group's timeout
          .site = 0};
}

}  // namespace

WorkPtr PycollBackend::send(Tensors& tensors, int dst, int tag) {
  Operation operation(OpType::SEND, "pycoll:send", options_->timeout);
  const at::Tensor x = operation.input(only(tensors, operation.title));
  return start_message(std::move(operation), message_of(x, dst, tag, true));
}

WorkPtr PycollBackend::recv(Tensors& tensors, int src, int tag) {
  TORCH_CHECK_VALUE(src >= 0, "pycoll:recv: source is ", src, ", expected a rank");
  Operation operation(OpType::RECV, "pycoll:recv", options_->timeout);
  const at::Tensor x = operation.output(only(tensors, operation.title));
  operation.note(tensors[0]);
  return start_message(std::move(operation), message_of(x, src, tag, false));
}

WorkPtr PycollBackend::recvAnysource(Tensors& tensors, int tag) {
  Operation operation(OpType::RECVANYSOURCE, "pycoll:recvAnySource", options_->timeout);
  const at::Tensor x = operation.output(only(tensors, operation.title));
  operation.note(tensors[0]);
  return start_message(std::move(operation), message_of(x, PYCOLL_ANY_SOURCE, tag, false));
}

}  // namespace pycoll::torch_backend
