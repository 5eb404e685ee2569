// Operations of a GPU's streams on words: the driver's stream memory operations.
#pragma once

#include <cstdint>

#include "device/device_table.h"

namespace pycoll {

/// DeviceFacts::has_word_ops.
bool cuda_has_word_ops(int device);
/// DeviceTable::queue_words.
int cuda_queue_words(int32_t device, const DeviceWordOp* ops, int32_t num_ops, DeviceStream stream);

}  // namespace pycoll
