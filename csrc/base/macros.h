// Macros that let the host compiler and nvcc compile the same source.
#pragma once

#ifdef __CUDACC__
#define PYCOLL_HD __host__ __device__
#else
#define PYCOLL_HD
#endif

// For a loop over an array that must stay in a GPU's registers: unrolling makes all of its indices
// constants. The host compiler decides on its own.
#ifdef __CUDA_ARCH__
#define PYCOLL_UNROLL _Pragma("unroll")
#define PYCOLL_NO_UNROLL _Pragma("unroll 1")  // else the kernel runs out of registers
#else
#define PYCOLL_UNROLL
#define PYCOLL_NO_UNROLL
#endif
