// Memory traffic of reduce_copy (sum) on one core: GB/s read and written, beside libc's memcpy.
//   reduce_copy_bench            all dtypes at 16 KiB (in cache) and 16 MiB (in memory)
//   reduce_copy_bench -s         ordinary against non-temporal stores, f32, 64 KiB to 64 MiB
//   reduce_copy_bench -l         latency of one call, f32 and u8, 4 B to 4 KiB
// PYCOLL_ISA lowers the instruction set.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "reduce/reduce_copy.h"

namespace {

constexpr int kMaxSrcs = 4;
constexpr int kNumSamples = 21;
constexpr size_t kMaxBytes = size_t{64} << 20;

/// Page-aligned memory, touched, so that no page fault is timed. Not zeros: some CPUs write them
/// faster.
class Pages {
 public:
  explicit Pages(size_t nbytes) : data_(std::aligned_alloc(4096, nbytes)) {
    std::memset(data_, 1, nbytes);
  }
  ~Pages() { std::free(data_); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  void* get() const { return data_; }

 private:
  void* data_;
};

/// Median time of one call in ns; each sample repeats it until it moved at least 4 MiB.
template <class Call>
double median_ns(size_t nbytes, Call call) {
  const size_t num_calls = std::max<size_t>(1, (size_t{4} << 20) / std::max<size_t>(nbytes, 64));
  std::vector<double> samples;
  for (int sample = -2; sample < kNumSamples; ++sample) {
    const int64_t begin_ns = pycoll::now_ns();
    for (size_t i = 0; i < num_calls; ++i) call();
    const double ns = static_cast<double>(pycoll::now_ns() - begin_ns);
    if (sample >= 0) samples.push_back(ns / static_cast<double>(num_calls));
  }
  std::nth_element(samples.begin(), samples.begin() + kNumSamples / 2, samples.end());
  return samples[kNumSamples / 2];
}

class Bench {
 public:
  Bench() : dst_(kMaxBytes) {
    for (int i = 0; i < kMaxSrcs; ++i) srcs_.emplace_back(new Pages(kMaxBytes));
  }
  ~Bench() {
    for (Pages* pages : srcs_) delete pages;
  }

  double reduce_ns(pycoll::DType dtype, size_t nbytes, int num_srcs, bool streaming) const {
    const void* srcs[kMaxSrcs];
    for (int i = 0; i < num_srcs; ++i) srcs[i] = srcs_[i]->get();
    void* const dst = dst_.get();
    const auto reduce = pycoll::reduce_copy_fn(dtype, pycoll::Op::kSum);
    const pycoll::ReduceCopyArgs args{srcs, num_srcs,         &dst, 1, nbytes / dtype_size(dtype),
                                      1,    streaming ? 1 : 0};
    return median_ns(nbytes, [&] { reduce(args); });
  }

  double copy_ns(size_t nbytes, bool streaming) const {
    return median_ns(nbytes,
                     [&] { pycoll::copy_bytes(dst_.get(), srcs_[0]->get(), nbytes, streaming); });
  }

  double memcpy_ns(size_t nbytes) const {
    void* (*volatile libc_memcpy)(void*, const void*, size_t) = std::memcpy;
    return median_ns(nbytes, [&] { libc_memcpy(dst_.get(), srcs_[0]->get(), nbytes); });
  }

 private:
  Pages dst_;
  std::vector<Pages*> srcs_;
};

/// Bytes per ns are GB per s.
double gb_per_s(size_t nbytes, int num_operands, double ns) {
  return static_cast<double>(nbytes) * num_operands / ns;
}

void print_dtypes(const Bench& bench) {
  constexpr size_t kSizes[] = {size_t{16} << 10, size_t{16} << 20};
  std::printf("%-6s %4s %14s %14s   (GB/s, read + written)\n", "dtype", "srcs", "16 KiB", "16 MiB");
  std::printf("%-6s %4d", "memcpy", 1);
  for (size_t nbytes : kSizes) std::printf(" %14.1f", gb_per_s(nbytes, 2, bench.memcpy_ns(nbytes)));
  std::printf("\n");
  for (int d = 0; d < pycoll::kNumDTypes; ++d) {
    const auto dtype = static_cast<pycoll::DType>(d);
    for (int num_srcs : {1, 2, 4}) {
      std::printf("%-6s %4d", pycoll::dtype_name(dtype).data(), num_srcs);
      for (size_t nbytes : kSizes) {
        const double ns = bench.reduce_ns(dtype, nbytes, num_srcs, false);
        std::printf(" %14.1f", gb_per_s(nbytes, num_srcs + 1, ns));
      }
      std::printf("\n");
    }
  }
}

void print_streaming(const Bench& bench) {
  std::printf("%10s %10s | %10s %10s | %10s %10s | %10s %10s   (GB/s, read + written)\n", "bytes",
              "memcpy", "copy", "nt", "2 srcs", "nt", "4 srcs", "nt");
  for (size_t nbytes = size_t{64} << 10; nbytes <= kMaxBytes; nbytes *= 2) {
    std::printf("%10zu %10.1f", nbytes, gb_per_s(nbytes, 2, bench.memcpy_ns(nbytes)));
    for (int num_srcs : {1, 2, 4}) {
      std::printf(" |");
      for (bool streaming : {false, true}) {
        const double ns = num_srcs == 1
                              ? bench.copy_ns(nbytes, streaming)
                              : bench.reduce_ns(pycoll::DType::kF32, nbytes, num_srcs, streaming);
        std::printf(" %10.1f", gb_per_s(nbytes, num_srcs + 1, ns));
      }
    }
    std::printf("\n");
  }
}

void print_latency(const Bench& bench) {
  std::printf("%8s %10s %10s %10s %10s   (ns)\n", "bytes", "memcpy", "copy", "f32 2", "u8 2");
  for (size_t nbytes : {4, 8, 16, 36, 60, 64, 100, 128, 256, 1024, 4096}) {
    std::printf("%8zu %10.1f %10.1f %10.1f %10.1f\n", nbytes, bench.memcpy_ns(nbytes),
                bench.copy_ns(nbytes, false),
                bench.reduce_ns(pycoll::DType::kF32, nbytes, 2, false),
                bench.reduce_ns(pycoll::DType::kU8, nbytes, 2, false));
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view mode = argc > 1 ? argv[1] : "";
  if (mode != "" && mode != "-s" && mode != "-l") {
    std::fprintf(stderr, "usage: %s [-s | -l]\n", argv[0]);
    return 2;
  }
  const Bench bench;
  std::printf("reduce_copy, %s\n", pycoll::reduce_copy_isa());
  if (mode == "-s") {
    print_streaming(bench);
  } else if (mode == "-l") {
    print_latency(bench);
  } else {
    print_dtypes(bench);
  }
  return 0;
}
