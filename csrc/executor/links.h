// This rank's ends of all rings of one protocol.
#pragma once

#include <vector>

#include "transport/segment.h"

namespace pycoll {

struct Links {
  Links(const Segment& segment, int rank, ProtocolKind protocol);

  std::vector<SendEnd> send;            // by destination rank
  std::vector<RecvEnd> recv;            // by source rank
  SendEnd send_multicast;               // read by all other ranks
  std::vector<RecvEnd> recv_multicast;  // by source rank
  size_t slot_bytes = 0;
  ProtocolKind protocol;
};

}  // namespace pycoll
