// The kernels of one instruction set, as a table that is chosen at run time.
#pragma once

#include <cstddef>

#include "reduce/reduce_copy.h"

#ifdef __x86_64__
#define PYCOLL_X86 1
#endif

namespace pycoll {

struct KernelTable {
  ReduceCopyFn reduce_copy[kNumDTypes * kNumOps];  // [dtype * kNumOps + op]; null: invalid cell
  ScaleFn scale[kNumDTypes];                       // null: the dtype cannot be scaled
  void (*copy_bytes)(void* dst, const void* src, size_t nbytes, bool streaming);
};

const KernelTable& kernels_generic();
#ifdef PYCOLL_X86
const KernelTable& kernels_avx2();
const KernelTable& kernels_avx512();
#endif

}  // namespace pycoll
