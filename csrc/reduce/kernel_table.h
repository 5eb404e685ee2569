// The kernels of one instruction set, as a table that run-time dispatch chooses.
#pragma once

#include <cstddef>

#include "reduce/reduce_copy.h"

#ifdef __x86_64__
#define PYCOLL_X86 1
#endif

namespace pycoll {

struct KernelTable {
  ReduceCopyFn reduce_copy[kNumDTypes * kNumOps];  // [dtype * kNumOps + op], null: no such cell
  ScaleFn scale[kNumDTypes];                       // null: cannot be scaled
  void (*copy_bytes)(void* dst, const void* src, size_t nbytes, bool streaming);
};

const KernelTable& kernels_generic();
#ifdef PYCOLL_X86
const KernelTable& kernels_avx2();
const KernelTable& kernels_avx512();
#endif

}  // namespace pycoll
