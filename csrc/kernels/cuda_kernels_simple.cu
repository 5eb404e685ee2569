#include "kernels/cuda_kernels.cuh"

namespace pycoll {

CudaKernels simple_cuda_kernels() { return make_cuda_kernels<DeviceProtocol::kSimple>(); }

}  // namespace pycoll
