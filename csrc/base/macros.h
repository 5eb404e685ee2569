// What lets one source serve the host compiler and nvcc.
#pragma once

#ifdef __CUDACC__
#define PYCOLL_HD __host__ __device__
#else
#define PYCOLL_HD
#endif
