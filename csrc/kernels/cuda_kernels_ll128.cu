#include "kernels/cuda_kernels.cuh"

namespace pycoll {

CudaKernels ll128_cuda_kernels() { return make_cuda_kernels<DeviceProtocol::kLL128>(); }

}  // namespace pycoll
