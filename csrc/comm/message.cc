#include "comm/message.h"

namespace pycoll {

std::string describe(const MessageOp& op) {
  std::string text = op.is_send ? "send(" : "recv(";
  text += std::to_string(op.count()) + " " + std::string(dtype_name(op.dtype)) + ", tag " +
          std::to_string(op.tag) + (op.is_send ? ", to " : ", from ");
  return text + (op.peer == kAnySource ? "any rank" : "rank " + std::to_string(op.peer)) + ")";
}

}  // namespace pycoll
