// Finds and opens the library that gives this process its DeviceTable.
#pragma once

#include <string>

#include "device/device_table.h"

namespace pycoll {

/// Names the library in place of the one that lies beside the core.
inline constexpr const char* kDeviceLibraryVariable = "PYCOLL_DEVICE_LIBRARY";

/// The table of this process, opened once. Raises UsageError that says what to build or install
/// when there is no library, or none that fits this build.
const DeviceTable& device_table();

/// The same without an error: null, and why there is none, or which library it is.
const DeviceTable* find_device_table(std::string& note);

}  // namespace pycoll
