// Choice of the instruction set, once, at the first use.
#ifdef __x86_64__
#include <cpuid.h>
#endif

#include <cstdlib>
#include <string>
#include <string_view>

#include "base/environment.h"
#include "base/error.h"
#include "reduce/cells.h"
#include "reduce/copy_to_peer.h"
#include "reduce/kernel_table.h"
#include "reduce/reduce_copy.h"

namespace pycoll {
namespace {

struct Isa {
  const char* name;
  bool supported;
  const KernelTable& (*kernels)();
};

/// The best instruction set of this CPU, at or below PYCOLL_ISA.
Isa choose_isa() {
  const Isa best_first[] = {
#ifdef PYCOLL_X86
      {"avx512",
       __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"),
       kernels_avx512},
      {"avx2", __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"), kernels_avx2},
#endif
      {"generic", true, kernels_generic},
  };
  const auto limit = env_text("PYCOLL_ISA");
  bool allowed = !limit;
  for (const Isa& isa : best_first) {
    allowed = allowed || *limit == isa.name;
    if (allowed && isa.supported) return isa;
  }
  throw UsageError("PYCOLL_ISA=" + *limit +
                   ": unknown instruction set; use avx512, avx2 or generic");
}

struct Chosen {
  const char* name;
  const KernelTable* kernels;
};

const Chosen& chosen() {
  static const Chosen choice = [] {
    const Isa isa = choose_isa();
    return Chosen{isa.name, &isa.kernels()};
  }();
  return choice;
}

bool has_string_moves() {
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kFsrm = 1u << 4;
  // Zen 3 has the flag, and string moves that are up to 20 times slower than vectors (decision
  // 0134). It has no AVX-512, unlike the CPUs on which they were faster.
  constexpr unsigned kAvx512f = 1u << 16;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx & kFsrm) != 0 &&
         (ebx & kAvx512f) != 0;
#else
  return false;
#endif
}

}  // namespace

const bool kStringMoves = has_string_moves();

ReduceCopyFn reduce_copy_fn(DType dtype, Op op) {
  if (!supported(dtype, op)) check_op(dtype, op);
  return chosen()
      .kernels->reduce_copy[static_cast<size_t>(dtype) * kNumOps + static_cast<size_t>(op)];
}

ScaleFn scale_fn(DType dtype) {
  if (!supported(dtype, Op::kPremul)) check_op(dtype, Op::kPremul);
  return chosen().kernels->scale[static_cast<size_t>(dtype)];
}

const char* reduce_copy_isa() { return chosen().name; }

void copy_bytes(void* dst, const void* src, size_t nbytes, bool streaming) {
  chosen().kernels->copy_bytes(dst, src, nbytes, streaming);
}

void copy_from_peer(void* dst, const void* src, size_t nbytes, bool streaming) {
  if (!streaming && nbytes >= kMinStringReadBytes && pays_to_move_strings(dst, src)) {
    string_move(dst, src, nbytes);
  } else {
    copy_bytes(dst, src, nbytes, streaming);
  }
}

void copy_to_peer(void* dst, const void* src, size_t nbytes, PeerStores* stores) {
  const PeerStores::Turn turn = stores == nullptr ? PeerStores::Turn{} : stores->next(dst, nbytes);
  if (!turn.past_caches && nbytes >= kMinStringMoveBytes && pays_to_move_strings(dst, src)) {
    string_move(dst, src, nbytes);
  } else {
    copy_bytes(dst, src, nbytes, turn.past_caches);
  }
  if (turn.timed) stores->took(turn, nbytes);
}

}  // namespace pycoll
