// What lets one source serve the host compiler and nvcc.
#pragma once

#ifdef __CUDACC__
#define PYCOLL_HD __host__ __device__
#else
#define PYCOLL_HD
#endif

// Before a loop over an array that shall live in a GPU's registers: all of its indices are
// constants then. A host compiler decides for itself.
#ifdef __CUDA_ARCH__
#define PYCOLL_UNROLL _Pragma("unroll")
#define PYCOLL_NO_UNROLL _Pragma("unroll 1")  // or it runs out of registers
#else
#define PYCOLL_UNROLL
#define PYCOLL_NO_UNROLL
#endif
