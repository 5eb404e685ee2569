// Python objects of a device: memory, streams, and operations that run there.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "comm/device/device_work.h"

namespace pycoll {

/// Memory that is released without the GIL, since releasing it waits for the device.
inline std::shared_ptr<DeviceMemory> for_python(std::shared_ptr<DeviceMemory> memory) {
  DeviceMemory* const data = memory.get();
  return {data, [kept = std::move(memory)](DeviceMemory*) mutable {
            const pybind11::gil_scoped_release gil;
            kept.reset();
          }};
}

struct DeviceWorkObject {
  std::shared_ptr<DeviceWork> work;
  pybind11::object array;  // the current stream of its library waits for the operation
};

}  // namespace pycoll
