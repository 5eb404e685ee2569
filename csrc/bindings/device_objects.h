// What Python holds of a device: memory, streams, and operations that run there.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "comm/device_work.h"

namespace pycoll {

struct DeviceWorkObject {
  std::shared_ptr<DeviceWork> work;
  pybind11::object array;  // whose library's current stream waits
};

}  // namespace pycoll
