#include "kernels/thread_kernels.h"

namespace pycoll {

const ThreadKernels kDirectThreadKernels = make_thread_kernels<DeviceProtocol::kDirect>();

}  // namespace pycoll
