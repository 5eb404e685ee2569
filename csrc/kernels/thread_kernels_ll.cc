#include "kernels/thread_kernels.h"

namespace pycoll {

const ThreadKernels kLLThreadKernels = make_thread_kernels<DeviceProtocol::kLL>();

}  // namespace pycoll
