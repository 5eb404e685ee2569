// One send or receive of this rank, from its call to its end.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>

#include "base/checksum.h"
#include "executor/wait/describe.h"
#include "reduce/dtypes.h"
#include "transport/ring/slot.h"

namespace pycoll {

struct DeviceOffer;  // device_messages.h

/// Peer of a receive that accepts messages from any rank.
inline constexpr int kAnySource = -1;

struct MessageOp {
  enum class State : uint8_t {
    kQueued,     // a send that has not found room in the mailbox
    kAnnounced,  // a send whose bytes the receiver will copy
    kStreaming,  // a send that writes its bytes in parts
    kPosted,     // a receive that no message has matched yet
    kArriving,   // a receive whose bytes arrive in parts
    kOver,
  };

  bool is_send = false;
  bool blocking = true;  // the rank does nothing else until the operation is over
  DType dtype = DType::kU8;
  State state = State::kOver;
  uint16_t dtype_hash = 0;  // of the description of a dtype outside the table
  int peer = 0;             // kAnySource: receive from anyone
  int32_t tag = 0;
  std::byte* data = nullptr;           // a send only reads it
  int device = -1;                     // whose memory `data` is; -1: CPU memory
  const DeviceOffer* offer = nullptr;  // of a send of a device, for the receiver
  size_t nbytes = 0;                   // of `data`
  // PYCOLL_CHECK_DATA=1: `data` is this copy of `array`, with a checksum behind it.
  std::shared_ptr<std::byte[]> sealed;
  std::byte* array = nullptr;
  int source = kAnySource;    // receive: the rank that sent the message
  uint16_t site = 0;          // the user's file and line
  uint64_t number = 0;        // number of its record; 0: none
  uint64_t id = 0;            // identifies the operation to the peer
  uint64_t recv_id = 0;       // kStreaming: id of the receive at the peer
  size_t moved = 0;           // bytes sent or received in parts so far
  int64_t deadline_ns = 0;    // 0 until a wait is slow
  MessageOp* then = nullptr;  // a receive that gets the message after it has arrived here
  std::exception_ptr error;
  // Owners of the arrays and of this operation; set until an asynchronous operation is over.
  std::shared_ptr<void> keep_alive;
  std::shared_ptr<MessageOp> self;
  uint64_t over = 0;  // 1 at the end; stored with release after all members above

  bool is_over() const { return load_acquire(over) != 0; }
  /// Bytes of the caller's array.
  size_t array_bytes() const { return sealed == nullptr ? nbytes : nbytes - kChecksumBytes; }
};

/// `recv(10 f32, tag 7, from rank 2)`: the operation's name in error messages.
inline std::string describe(const MessageOp& op) {
  return describe_message(op.is_send, op.dtype, op.array_bytes(), op.tag, op.peer);
}

}  // namespace pycoll
