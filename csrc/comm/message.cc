#include "comm/message.h"

#include "reduce/cells.h"

namespace pycoll {

std::string describe(const MessageOp& op) {
  std::string text = op.is_send ? "send(" : "recv(";
  text += elements_text(op.dtype, op.nbytes) + ", tag " + std::to_string(op.tag) +
          (op.is_send ? ", to " : ", from ");
  return text + (op.peer == kAnySource ? "any rank" : "rank " + std::to_string(op.peer)) + ")";
}

}  // namespace pycoll
