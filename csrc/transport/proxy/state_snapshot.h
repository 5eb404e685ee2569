// A snapshot of a rank's state as bytes, for ranks of other hosts: its last operations, the rank it
// waits for, and why a communicator broke. Each host's memory has a mirror of every remote rank's
// state, so that readers need not know on which host a rank runs.
#pragma once

#include <functional>
#include <span>
#include <string>

#include "bootstrap/join/serialize.h"
#include "transport/ring/segment.h"

namespace pycoll {

/// Appends the state of `rank`, and its records of the given operations as far as they exist.
void write_state(const Segment& segment, int rank, std::span<const uint64_t> sequences,
                 WireWriter& to);
/// Reads one state and writes it into this host's mirror, if `is_mirror(rank)`. Calls `on_record`
/// with each record. Raises MalformedMessage.
void read_state(const Segment& segment, WireReader& from, const std::function<bool(int)>& is_mirror,
                const std::function<void(int rank, const CallRecord& record)>& on_record);

/// The failure that broke the communicator, with the states that its error texts need.
std::string failure_to_bytes(const Segment& segment);
/// Mirrors the states of these bytes and returns the failure. Raises MalformedMessage.
Failure failure_from_bytes(const Segment& segment, std::string_view bytes,
                           const std::function<bool(int)>& is_mirror);

}  // namespace pycoll
