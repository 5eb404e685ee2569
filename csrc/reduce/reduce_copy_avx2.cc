// The kernels for AVX2 and F16C.
#include <concepts>
#include <limits>
#include <type_traits>
#include <utility>

#include "reduce/kernel_table.h"

#ifdef PYCOLL_X86
// After the standard headers, so that their inline functions stay valid for every CPU.
#pragma GCC target("avx2,f16c")
#define PYCOLL_VECTOR_BYTES 32
#include "reduce/kernels.h"

const pycoll::KernelTable& pycoll::kernels_avx2() { return kKernels; }
#endif
