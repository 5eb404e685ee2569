#include "comm/message.h"

#include "executor/describe.h"

namespace pycoll {

std::string describe(const MessageOp& op) {
  return describe_message(op.is_send, op.dtype, op.nbytes, op.tag, op.peer);
}

}  // namespace pycoll
