// The kernels for any CPU: 16-byte vectors, which the compiler maps to SSE2, NEON or scalars.
#include "reduce/kernel_table.h"

#define PYCOLL_VECTOR_BYTES 16
#include "reduce/kernels.h"

const pycoll::KernelTable& pycoll::kernels_generic() { return kKernels; }
