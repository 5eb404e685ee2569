// The floor of collectives on new arrays, measured: the fastest way that is known to move bytes
// between two processes that do not reach each other's memory, without what a library adds.
//
// Two processes, each pinned to its core, with arrays of their own. A collective moves its bytes
// by the kernel (process_vm_readv), once, or through a ring of slots in shared memory, twice, with
// messages of several sizes, of which one or four are ahead of the reader, into slots of a ring or
// where a process has read its peer's messages (decision 0122). The fastest way counts.
//
// Usage: floor_new CORE CORE. Each line of the input, "all_reduce BYTES", asks for a measurement;
// the answer is a line with its time in us. The first request of several equal ones finds the
// fastest way, which the others measure. Between requests both processes sleep.
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <utility>
#include <vector>
#ifdef __SSE2__
#include <immintrin.h>
#endif

namespace {

constexpr size_t kMaxBytes = size_t{64} << 20;     // more take as long, in proportion
constexpr size_t kStageBytes = size_t{128} << 10;  // of the kernel's copies that are added
constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kNumSlots = 8;
constexpr size_t kMaxMessage = size_t{128} << 10;
constexpr int kRounds = 3;
constexpr size_t kBytesOfRound = size_t{16} << 20;
constexpr size_t kMaxCalls = 200;                      // of a round
constexpr size_t kBytesOnHugePages = size_t{4} << 20;  // NumPy asks for them from here on

/// A count that one process writes and the other one reads.
struct alignas(128) Count {
  std::atomic<uint64_t> value{0};
  void store(uint64_t to) { value.store(to, std::memory_order_release); }
  void wait(uint64_t at_least) const {
    while (value.load(std::memory_order_acquire) < at_least) {
    }
  }
};

/// Messages of one process.
struct Ring {
  Count posted;
  Count released;
  std::byte slots[kNumSlots][kMaxMessage];
};

struct Shared {
  Count entered[2];
  Count read[2];
  Ring rings[2][2];  // by writer; all_reduce has a second one
  struct {
    pid_t pid;
    std::byte *in, *out;
    bool may_read;
  } of[2];
  size_t fastest;  // of the ways of the request
};

/// Memory that begins at a huge page.
std::byte* new_pages(size_t num_bytes, int sharing) {
  void* const mapped =
      mmap(nullptr, num_bytes + kHugePage, PROT_READ | PROT_WRITE, sharing | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) {
    std::perror("floor_new: mmap");
    std::exit(1);
  }
  const auto address = (reinterpret_cast<uintptr_t>(mapped) + kHugePage - 1) & ~(kHugePage - 1);
  return reinterpret_cast<std::byte*>(address);
}

/// Makes an array of it, in huge pages where NumPy would ask for them. It holds numbers: a Zen 5
/// writes lines of zeros past its caches in half the time of others.
void make_array(std::byte* memory, size_t num_bytes) {
  madvise(memory, kMaxBytes, MADV_DONTNEED);
  madvise(memory, num_bytes, num_bytes >= kBytesOnHugePages ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  std::memset(memory, 1, num_bytes);
}

void add(std::byte* to, const std::byte* a, const std::byte* b, size_t nbytes) {
  auto* const sum = reinterpret_cast<float*>(to);
  const auto* const x = reinterpret_cast<const float*>(a);
  const auto* const y = reinterpret_cast<const float*>(b);
#pragma GCC ivdep
  for (size_t i = 0; i < nbytes / sizeof(float); ++i) sum[i] = x[i] + y[i];
}

/// A part of a rank's own block, which no other rank reads: past the caches if the block is large.
void copy_own(std::byte* to, const std::byte* from, size_t nbytes, size_t block) {
#ifdef __SSE2__
  constexpr size_t kStreamedBytes = size_t{8} << 20;
  if (block >= kStreamedBytes) {
    for (size_t at = 0; at < nbytes; at += sizeof(__m128i)) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + at),
                       _mm_load_si128(reinterpret_cast<const __m128i*>(from + at)));
    }
    return _mm_sfence();
  }
#endif
  std::memcpy(to, from, nbytes);
}

/// A collective in which bytes go one way only. Its root is rank 0.
struct Flow {
  int reader;
  size_t begin;  // so many bytes before it are the root's own block, which it copies
  size_t end;
  bool sums = false;
};

std::optional<Flow> flow_of(const std::string& collective, size_t nbytes) {
  if (collective == "broadcast") return Flow{.reader = 1, .begin = 0, .end = nbytes};
  if (collective == "reduce") return Flow{.reader = 0, .begin = 0, .end = nbytes, .sums = true};
  if (collective == "gather") return Flow{.reader = 0, .begin = nbytes / 2, .end = nbytes};
  if (collective == "scatter") return Flow{.reader = 1, .begin = nbytes / 2, .end = nbytes};
  return std::nullopt;
}

/// One of the two processes.
class Rank {
 public:
  Rank(Shared& shared, int rank) : shared_(shared), rank_(rank) {
    shared.of[rank] = {getpid(), in_, out_, false};
    make_arrays(kHugePage);
  }

  /// Begins messages of another size.
  void make_arrays(size_t nbytes) {
    make_array(in_, nbytes);
    make_array(out_, nbytes);
    meet();
  }

  /// Whether the kernel lets both processes read each other's memory.
  bool may_read() {
    const iovec mine{stage_, 8};
    const iovec theirs{shared_.of[1 - rank_].in, 8};
    const bool may = process_vm_readv(shared_.of[1 - rank_].pid, &mine, 1, &theirs, 1, 0) == 8;
    shared_.of[rank_].may_read = may;
    meet();
    return may && shared_.of[1 - rank_].may_read;
  }

  void meet() {
    shared_.entered[rank_].store(++meetings_);
    shared_.entered[1 - rank_].wait(meetings_);
  }

  /// How the following messages are placed: in the slots of a ring, or, unless `num_traded` is 0,
  /// in so many places that both processes use in turn.
  void place_messages(uint64_t num_traded) {
    num_traded_ = num_traded;
    for (int ring = 0; ring < 2; ++ring) {
      posts_before_[ring] = posts_[ring];
      taken_before_[ring] = taken_[ring];
    }
  }

  void by_kernel(const std::string& collective, size_t nbytes, bool sums_all) {
    const size_t half = nbytes / 2;
    if (collective == "all_reduce") {
      // Each sums a half and takes the other one, unless both sum all.
      if (sums_all) return take(shared_.of[1 - rank_].in, in_, 0, nbytes);
      take(shared_.of[1 - rank_].in, in_, half * rank_, half);
      take(shared_.of[1 - rank_].out, nullptr, half * (1 - rank_), half);
    } else if (collective == "reduce_scatter") {
      take(shared_.of[1 - rank_].in, in_, half * rank_, half);
    } else if (const auto flow = flow_of(collective, nbytes)) {
      if (rank_ == 0) copy_own(out_, in_, flow->begin, flow->begin);
      take(shared_.of[1 - rank_].in, flow->sums ? in_ : nullptr, flow->begin,
           rank_ == flow->reader ? flow->end - flow->begin : 0);
    } else {
      copy_own(out_ + half * rank_, in_ + half * rank_, half, half);
      take(shared_.of[1 - rank_].in, nullptr, half * (1 - rank_), half);
    }
  }

  void by_ring(const std::string& collective, size_t nbytes, size_t message, size_t ahead) {
    const size_t half = nbytes / 2;
    if (collective == "all_reduce") {
      sum_by_ring(half, message);
    } else if (collective == "reduce_scatter") {
      exchange(half, in_ + half * rank_, message, ahead);
    } else if (const auto flow = flow_of(collective, nbytes)) {
      // A root that reads copies its own block between messages, so that its peer can go on.
      const bool between = flow->reader == 0 && flow->begin != 0;
      if (rank_ == 0 && !between) copy_own(out_, in_, flow->begin, flow->begin);
      for (size_t at = flow->begin; at < flow->end; at += message) {
        if (rank_ != flow->reader) {
          post(0, in_ + at, message);
        } else {
          const size_t own = at - flow->begin;
          if (between) copy_own(out_ + own, in_ + own, message, flow->begin);
          read_message(flow->sums ? in_ + at : nullptr, at, message);
        }
      }
    } else {
      copy_own(out_ + half * rank_, in_ + half * rank_, half, half);
      exchange(half, nullptr, message, ahead);
    }
  }

 private:
  /// Bytes of the peer, at the same place of its array, to the output, added to `own` unless null.
  void take(std::byte* from, const std::byte* own, size_t at, size_t nbytes) {
    meet();
    const size_t block = own == nullptr ? nbytes : std::min(nbytes, kStageBytes);
    for (const size_t end = at + nbytes; at < end; at += block) {
      std::byte* const to = own == nullptr ? out_ + at : stage_;
      const iovec mine{to, block};
      const iovec theirs{from + at, block};
      if (process_vm_readv(shared_.of[1 - rank_].pid, &mine, 1, &theirs, 1, 0) !=
          static_cast<ssize_t>(block)) {
        std::perror("floor_new: process_vm_readv");
        std::_Exit(1);
      }
      if (own != nullptr) add(out_ + at, own + at, stage_, block);
    }
    shared_.read[rank_].store(++reads_);
    shared_.read[1 - rank_].wait(reads_);
  }

  std::byte* free_slot(int ring) {
    Ring& mine = shared_.rings[rank_][ring];
    if (posts_[ring] >= kNumSlots) mine.released.wait(posts_[ring] - kNumSlots + 1);
    return place(ring, rank_, posts_[ring] - posts_before_[ring]);
  }
  std::byte* place(int ring, int writer, uint64_t count) {
    if (num_traded_ == 0) return shared_.rings[writer][ring].slots[count % kNumSlots];
    const uint64_t round = count / num_traded_;
    return shared_.rings[(static_cast<uint64_t>(writer) + round) % 2][ring]
        .slots[count % num_traded_];
  }
  void posted(int ring) { shared_.rings[rank_][ring].posted.store(++posts_[ring]); }
  void post(int ring, const std::byte* from, size_t nbytes) {
    std::memcpy(free_slot(ring), from, nbytes);
    posted(ring);
  }
  const std::byte* next(int ring) {
    const Ring& theirs = shared_.rings[1 - rank_][ring];
    theirs.posted.wait(taken_[ring] + 1);
    return place(ring, 1 - rank_, taken_[ring] - taken_before_[ring]);
  }
  void release(int ring) { shared_.rings[1 - rank_][ring].released.store(++taken_[ring]); }

  void exchange(size_t nbytes, const std::byte* own, size_t message, size_t ahead) {
    const size_t num = nbytes / message;
    for (size_t i = 0; i < num + ahead; ++i) {
      if (i < num) post(0, in_ + i * message, message);
      if (i < ahead) continue;
      const size_t at = (i - ahead) * message;
      read_message(own == nullptr ? nullptr : own + at, at, message);
    }
  }

  /// The next message to the output, added to `own` unless null.
  void read_message(const std::byte* own, size_t at, size_t message) {
    const std::byte* const came = next(0);
    own == nullptr ? (void)std::memcpy(out_ + at, came, message)
                   : add(out_ + at, own, came, message);
    release(0);
  }

  /// Sums of this rank's half go to the peer through the second ring, message by message.
  void sum_by_ring(size_t half, size_t message) {
    const size_t num = half / message;
    std::byte* const sums = out_ + half * rank_;
    std::byte* const others = out_ + half * (1 - rank_);
    for (size_t i = 0; i < num + 2; ++i) {
      if (i < num) post(0, in_ + half * (1 - rank_) + i * message, message);
      if (i >= 1 && i <= num) {
        const size_t at = (i - 1) * message;
        add(sums + at, in_ + half * rank_ + at, next(0), message);
        release(0);
        post(1, sums + at, message);
      }
      if (i >= 2) {
        std::memcpy(others + (i - 2) * message, next(1), message);
        release(1);
      }
    }
  }

  Shared& shared_;
  const int rank_;
  std::byte* const in_ = new_pages(kMaxBytes, MAP_PRIVATE);
  std::byte* const out_ = new_pages(kMaxBytes, MAP_PRIVATE);
  std::byte* const stage_ = new_pages(kStageBytes, MAP_PRIVATE);
  uint64_t meetings_ = 0;
  uint64_t reads_ = 0;
  uint64_t posts_[2] = {};
  uint64_t taken_[2] = {};
  uint64_t posts_before_[2] = {};
  uint64_t taken_before_[2] = {};
  uint64_t num_traded_ = 0;
};

/// How a collective moves its bytes.
struct Way {
  bool by_kernel = false;
  bool sums_all = false;
  size_t message = 0;
  size_t ahead = 0;
  uint64_t num_traded = 0;  // places
};

std::vector<Way> ways_of(const std::string& collective, size_t nbytes, bool may_read) {
  const bool sums_twice = collective == "all_reduce";
  std::vector<Way> ways;
  if (may_read) ways.push_back({.by_kernel = true});
  if (may_read && sums_twice) ways.push_back({.by_kernel = true, .sums_all = true});
  for (size_t message = size_t{8} << 10; message <= std::min(kMaxMessage, nbytes / 2);
       message *= 2) {
    ways.push_back({.message = message});
    if (flow_of(collective, nbytes)) continue;
    if (!sums_twice) ways.push_back({.message = message, .ahead = 4});
    ways.push_back({.message = message, .num_traded = 4});
    if (!sums_twice) ways.push_back({.message = message, .ahead = 4, .num_traded = kNumSlots});
  }
  return ways;
}

/// A collective and its bytes.
struct Request {
  char collective[16] = "";
  size_t nbytes = 0;
};

/// Median of the rounds' times of a call, in us.
double measure(Rank& rank, const Request& request, const Way& way) {
  const size_t num_calls = std::clamp<size_t>(kBytesOfRound / request.nbytes, 3, kMaxCalls);
  std::vector<double> rounds;
  rank.meet();
  rank.place_messages(way.num_traded);
  for (int round = 0; round < kRounds; ++round) {
    rank.meet();
    const auto start = std::chrono::steady_clock::now();
    for (size_t i = 0; i < num_calls; ++i) {
      way.by_kernel ? rank.by_kernel(request.collective, request.nbytes, way.sums_all)
                    : rank.by_ring(request.collective, request.nbytes, way.message, way.ahead);
    }
    rank.meet();
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
    rounds.push_back(took.count() / static_cast<double>(num_calls));
  }
  std::sort(rounds.begin(), rounds.end());
  return rounds[kRounds / 2];
}

/// The way that rank 0 has found to be the fastest.
Way fastest(Rank& rank, Shared& shared, int index, const Request& request) {
  const std::vector<Way> ways = ways_of(request.collective, request.nbytes, rank.may_read());
  std::vector<double> took_us;
  for (const Way& way : ways) took_us.push_back(measure(rank, request, way));
  if (index == 0) {
    shared.fastest =
        static_cast<size_t>(std::min_element(took_us.begin(), took_us.end()) - took_us.begin());
  }
  rank.meet();
  return ways[shared.fastest];
}

/// Rank 0 reads the requests from the standard input, and rank 1 from rank 0.
void run(Shared& shared, int index, int from_rank_0, int to_rank_1) {
  Rank rank(shared, index);
  Request last;
  Way way;
  for (Request request;; last = request) {
    if (index == 0) {
      if (std::scanf("%15s %zu", request.collective, &request.nbytes) != 2) return;
      if (write(to_rank_1, &request, sizeof request) != sizeof request) std::_Exit(1);
    } else if (read(from_rank_0, &request, sizeof request) != sizeof request) {
      return;
    }
    const size_t wanted = std::exchange(request.nbytes, std::min(request.nbytes, kMaxBytes));
    if (std::strcmp(request.collective, last.collective) != 0 || request.nbytes != last.nbytes) {
      rank.make_arrays(request.nbytes);
      way = fastest(rank, shared, index, request);
    }
    const double us = measure(rank, request, way);
    if (index != 0) continue;
    std::printf("%.3f\n", us * static_cast<double>(wanted) / static_cast<double>(request.nbytes));
    std::fflush(stdout);
  }
}

void pin_to(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  if (sched_setaffinity(0, sizeof set, &set) == 0) return;
  std::fprintf(stderr, "floor_new: cannot use core %d: choose a core of taskset -p\n", core);
  std::_Exit(1);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: floor_new CORE CORE\n");
    return 2;
  }
  auto& shared = *new (new_pages(sizeof(Shared), MAP_SHARED)) Shared;
  int requests[2];
  if (pipe(requests) != 0) {
    std::perror("floor_new: pipe");
    return 1;
  }
  const pid_t child = fork();
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
  const int index = child == 0 ? 1 : 0;
  if (index == 1) prctl(PR_SET_PDEATHSIG, SIGKILL);
  pin_to(std::atoi(argv[1 + index]));
  close(requests[index == 1 ? 1 : 0]);
  run(shared, index, requests[0], requests[1]);
  if (index == 1) std::_Exit(0);
  close(requests[1]);
  int status = 0;
  waitpid(child, &status, 0);
  return status == 0 ? 0 : 1;
}
