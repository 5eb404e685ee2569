// The kernels for AVX-512 (F, BW, VL, DQ).
#include <concepts>
#include <limits>
#include <type_traits>
#include <utility>

#include "reduce/kernel_table.h"

#ifdef PYCOLL_X86
// After the standard headers, so that their inline functions stay valid for every CPU.
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,f16c")
#define PYCOLL_VECTOR_BYTES 64
#include "reduce/kernels.h"

const pycoll::KernelTable& pycoll::kernels_avx512() { return kKernels; }
#endif
