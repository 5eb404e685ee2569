// Results of the runtime and the driver in the form of the DeviceTable: 0, or an error whose text
// last_error() returns.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

namespace pycoll {

/// Returns 0 for success; otherwise cuda_last_error() gives the reason. Clears the runtime's own
/// last error, so that other users of the runtime do not see it.
int cuda_status(cudaError_t status);
/// Like cuda_status(), for a result of the driver.
int driver_status(CUresult status, const char* what);
int cuda_refuse(const char* why);
const char* cuda_last_error();

/// Until it is destroyed, calls of this thread that do not belong to a stream neither fail nor end
/// a capture that this thread or another one has begun: queries of events, allocations.
class AllowedInCapture {
 public:
  AllowedInCapture() { (void)cudaThreadExchangeStreamCaptureMode(&before_); }
  ~AllowedInCapture() { (void)cudaThreadExchangeStreamCaptureMode(&before_); }
  AllowedInCapture(const AllowedInCapture&) = delete;

 private:
  cudaStreamCaptureMode before_ = cudaStreamCaptureModeRelaxed;  // then the thread's own mode
};

/// Makes a device the thread's current one, and restores the previous one at the end.
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
  int before_ = -1;  // negative: nothing to restore
};

}  // namespace pycoll
