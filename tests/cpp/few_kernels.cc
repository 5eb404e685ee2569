// The kernels on host threads for few dtypes, in the place of those for all: a sanitizer's build
// takes a minute less.
#include "kernels/threads/thread_kernels.h"

namespace pycoll {
namespace {

template <DeviceProtocol protocol, DType... dtypes>
constexpr ThreadKernels kernels_for() {
  ThreadKernels made{};
  ((made.kernels[static_cast<int>(dtypes)] = thread_kernel<protocol, dtypes>()), ...);
  return made;
}
template <DeviceProtocol protocol>
constexpr ThreadKernels few_kernels() {
  return kernels_for<protocol, DType::kF32, DType::kBF16, DType::kI8>();
}

}  // namespace

const ThreadKernels kSimpleThreadKernels = few_kernels<DeviceProtocol::kSimple>();
const ThreadKernels kLLThreadKernels = few_kernels<DeviceProtocol::kLL>();
const ThreadKernels kLL128ThreadKernels = few_kernels<DeviceProtocol::kLL128>();
const ThreadKernels kPoisonThreadKernels = few_kernels<DeviceProtocol::kPoison>();
const ThreadKernels kDirectThreadKernels = few_kernels<DeviceProtocol::kDirect>();

}  // namespace pycoll
