// One send or receive of this rank, from its call to its end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>

#include "executor/wait/describe.h"
#include "reduce/dtypes.h"
#include "transport/ring/slot.h"

namespace pycoll {

/// As the peer of a receive: whoever sends.
inline constexpr int kAnySource = -1;

struct MessageOp {
  enum class State : uint8_t {
    kQueued,     // a send that has not found room in the mailbox
    kAnnounced,  // a send whose bytes the receiver will take
    kStreaming,  // a send that writes its bytes in parts
    kPosted,     // a receive that no message has met
    kArriving,   // a receive whose bytes come in parts
    kOver,
  };

  bool is_send = false;
  bool blocking = true;  // its rank does nothing else until it is over
  DType dtype = DType::kU8;
  State state = State::kOver;
  int peer = 0;  // kAnySource: receive from anyone
  int32_t tag = 0;
  std::byte* data = nullptr;  // a send only reads it
  size_t nbytes = 0;
  int source = kAnySource;    // of a receive: whose message it got
  uint16_t site = 0;          // the user's file and line
  uint64_t number = 0;        // of its record; 0: it has none
  uint64_t id = 0;            // among the operations of this rank that a peer names
  uint64_t recv_id = 0;       // kStreaming: the receive at the peer
  size_t moved = 0;           // bytes that have gone or come in parts
  int64_t deadline_ns = 0;    // 0 until a wait is slow
  MessageOp* then = nullptr;  // a receive that waits for what arrives here
  std::exception_ptr error;
  // Of an asynchronous operation until it is over: its arrays, and itself.
  std::shared_ptr<void> keep_alive;
  std::shared_ptr<MessageOp> self;
  uint64_t over = 0;  // 1 at its end; released after all that is above

  bool is_over() const { return load_acquire(over) != 0; }
};

/// `recv(10 f32, tag 7, from rank 2)`: how messages name it.
inline std::string describe(const MessageOp& op) {
  return describe_message(op.is_send, op.dtype, op.nbytes, op.tag, op.peer);
}

}  // namespace pycoll
