// Operations of an emulated device's stream on words.
#pragma once

#include <functional>
#include <vector>

#include "device/device_table.h"

namespace pycoll {

/// Raises UsageError for operations that CUDA refuses: too many, and words that are not aligned or
/// not in memory that the device accesses.
void check_word_ops(const DeviceWordOp* ops, int num_ops,
                    const std::function<bool(const void*)>& is_accessible);
/// Runs them on the stream's thread. Waits for as long as it takes, as a GPU does.
void run_word_ops(const std::vector<DeviceWordOp>& ops);

}  // namespace pycoll
