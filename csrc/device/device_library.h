// Finds and opens the library that provides this process's DeviceTable.
#pragma once

#include <string>

#include "device/device_table.h"

namespace pycoll {

/// Environment variable with the path of the library. Default: the one beside the core.
inline constexpr const char* kDeviceLibraryVariable = "PYCOLL_DEVICE_LIBRARY";

/// The table of this process, opened once. Raises UsageError with what to build or install when
/// there is no library, or only one that does not fit this build.
const DeviceTable& device_table();

/// The table of this process, or null; does not raise. `note` is the library's path, or why there
/// is none.
const DeviceTable* find_device_table(std::string& note);

}  // namespace pycoll
