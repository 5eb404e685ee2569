#include "kernels/thread_kernels.h"

namespace pycoll {

const ThreadKernels kSimpleThreadKernels = make_thread_kernels<DeviceProtocol::kSimple>();

}  // namespace pycoll
