// What ranks of other hosts must know of a rank, as bytes: what it did last, whom it waits for, and
// why a communicator broke. A rank's state is written into the mirror of it that each host's memory
// has, so that whoever reads there need not know on which host a rank runs.
#pragma once

#include <functional>
#include <span>
#include <string>

#include "bootstrap/join/serialize.h"
#include "transport/ring/segment.h"

namespace pycoll {

/// Appends what `rank` is doing, and its records of these operations where there are any.
void write_state(const Segment& segment, int rank, std::span<const uint64_t> sequences,
                 WireWriter& to);
/// Writes one such state into this host's mirror, if `is_mirror(rank)`. Calls `on_record` with each
/// record. Raises MalformedMessage.
void read_state(const Segment& segment, WireReader& from, const std::function<bool(int)>& is_mirror,
                const std::function<void(int rank, const CallRecord& record)>& on_record);

/// The failure that broke the communicator, with all that its errors tell of.
std::string failure_to_bytes(const Segment& segment);
/// Mirrors what is told and returns the failure.
Failure failure_from_bytes(const Segment& segment, std::string_view bytes,
                           const std::function<bool(int)>& is_mirror);

}  // namespace pycoll
