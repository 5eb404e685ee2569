// What the runtime and the driver answer, as the DeviceTable gives it: 0, or a text for
// last_error().
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

namespace pycoll {

/// 0, or not; then cuda_last_error() says why. Clears the runtime's own last error, which belongs
/// to nobody else.
int cuda_status(cudaError_t status);
/// The same of the driver.
int driver_status(CUresult status, const char* what);
int cuda_refuse(const char* why);
const char* cuda_last_error();

/// Makes a device the thread's current one, and the earlier one again at the end.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    if (cudaGetDevice(&before_) != cudaSuccess) before_ = -1;
    if (before_ != device) {
      (void)cudaSetDevice(device);
    } else {
      before_ = -1;
    }
  }
  ~OnDevice() {
    if (before_ >= 0) (void)cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;

 private:
  int before_ = -1;  // negative: nothing to undo
};

}  // namespace pycoll
