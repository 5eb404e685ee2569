#include "kernels/thread_kernels.h"

namespace pycoll {

const ThreadKernels kLL128ThreadKernels = make_thread_kernels<DeviceProtocol::kLL128>();

}  // namespace pycoll
