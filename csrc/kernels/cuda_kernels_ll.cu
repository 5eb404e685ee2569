#include "kernels/cuda_kernels.cuh"

namespace pycoll {

CudaKernels ll_cuda_kernels() { return make_cuda_kernels<DeviceProtocol::kLL>(); }

}  // namespace pycoll
