#include "kernels/cuda_kernels.cuh"

namespace pycoll {

CudaKernels direct_cuda_kernels() { return make_cuda_kernels<DeviceProtocol::kDirect>(); }

}  // namespace pycoll
