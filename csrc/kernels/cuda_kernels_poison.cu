#include "kernels/cuda_kernels.cuh"

namespace pycoll {

CudaKernels poison_cuda_kernels() { return make_cuda_kernels<DeviceProtocol::kPoison>(); }

}  // namespace pycoll
