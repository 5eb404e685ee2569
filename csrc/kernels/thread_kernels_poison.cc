#include "kernels/thread_kernels.h"

namespace pycoll {

const ThreadKernels kPoisonThreadKernels = make_thread_kernels<DeviceProtocol::kPoison>();

}  // namespace pycoll
