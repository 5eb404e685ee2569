// Limits of the numbers in records and messages: the tables that they index are in folders above
// this one (reduce/dtypes.h, reduce/ops.h, schedule/collectives.h), which check that they are equal
// (executor/wait/describe.cc).
#pragma once

#include <cstdint>

namespace pycoll {

inline constexpr int kNumRecordedCollectives = 12;
inline constexpr int kNumRecordedDTypes = 18;  // with kOpaque
inline constexpr int kNumRecordedOps = 9;
/// Numbers of calls and messages are smaller, so that loops over the last ones end.
inline constexpr uint64_t kMaxRecordNumber = uint64_t{1} << 62;

}  // namespace pycoll
