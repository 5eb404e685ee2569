#include "perf/measure.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "perf/buffer.h"
#include "perf/sendrecv.h"

namespace pycoll::perf {
namespace {

// As in pycoll/bench/timing.py.
constexpr int64_t kBlockNs = 2'000'000;
constexpr int kMaxCalls = 1 << 20;  // of a block
constexpr int kFewestBlocks = 5;    // of calls that are so long that more would take kLimitNs
constexpr int64_t kLimitNs = 2'000'000'000;
constexpr int64_t kRegisteredBytes = 64 << 10;  // from here on Python registers arrays
constexpr std::byte kUntouched{0xa5};

/// How many blocks the output begins behind the input in one buffer; nothing where the collective
/// has no form in place.
std::optional<int> place_of_output(const CollectiveInfo& collective, int rank, int num_ranks,
                                   int root) {
  for (const Collective apart : {Collective::kGather, Collective::kScatter, Collective::kAllToAll,
                                 Collective::kNeighborExchange, kSendRecv}) {
    if (collective.id == apart) return {};
  }
  for (int block = 0; block < num_blocks(collective.blocks, num_ranks); ++block) {
    const BlockAt at{rank, block, num_ranks, root};
    const int in = collective.input_block(at), out = collective.output_block(at);
    if (in != kNoBlock && out != kNoBlock) return in - out;
  }
  return 0;
}

/// By all ranks: the reduction of small vectors.
void agree(Communicator& comm, std::vector<int64_t>& values, Op op) {
  Call call;
  call.input = call.output = values.data();
  call.count = call.shape[0] = static_cast<int64_t>(values.size());
  call.num_dims = 1;
  call.dtype = DType::kI64;
  call.op = op;
  comm.run(call);
}

using Calls = std::function<void(int)>;

/// ns of a block of calls by the slowest rank.
int64_t time_block(Communicator& comm, const Calls& calls, int num_calls) {
  comm.barrier();
  const int64_t start_ns = now_ns();
  calls(num_calls);
  std::vector<int64_t> block_ns = {now_ns() - start_ns};
  agree(comm, block_ns, Op::kMax);
  return block_ns[0];
}

/// How many calls take kBlockNs: the block grows. One that seems long enough is timed again, so
/// that one interruption does not decide.
int calls_of_block(Communicator& comm, const Calls& calls) {
  int num_calls = 1;
  while (num_calls < kMaxCalls && (time_block(comm, calls, num_calls) < kBlockNs ||
                                   time_block(comm, calls, num_calls) < kBlockNs)) {
    num_calls *= 2;
  }
  return num_calls;
}

Figures time_calls(Communicator& comm, const Calls& calls, const Options& options) {
  const int num_calls = options.iters > 0 ? options.iters : calls_of_block(comm, calls);
  const int64_t first_ns = std::max<int64_t>(time_block(comm, calls, num_calls), 1);
  const auto affordable = std::max<int64_t>(kLimitNs / first_ns, kFewestBlocks);
  const int num_blocks = static_cast<int>(std::min<int64_t>(affordable, options.num_blocks));
  std::vector<double> call_s;
  for (int i = 0; i < num_blocks; ++i) {
    const auto block_ns = static_cast<double>(time_block(comm, calls, num_calls));
    call_s.push_back(block_ns / 1e9 / num_calls);
  }
  std::sort(call_s.begin(), call_s.end());
  Figures figures;
  figures.median_s = (call_s[(num_blocks - 1) / 2] + call_s[num_blocks / 2]) / 2;
  figures.min_s = call_s[0];
  figures.p99_s = call_s[(99 * num_blocks + 99) / 100 - 1];
  figures.num_calls = int64_t{num_calls} * num_blocks;
  return figures;
}

}  // namespace

std::optional<Figures> measure(Communicator& comm, const Options& options, const RowPlan& plan,
                               bool in_place) {
  const CollectiveInfo& collective = plan.collective;
  const int rank = comm.rank(), n = comm.size();
  const int num_in = num_input_blocks(collective, rank, n, options.root);
  const int num_out = num_output_blocks(collective, rank, n, options.root);
  const auto place = place_of_output(collective, rank, n, options.root);
  if (in_place && !place) return {};

  const auto block_bytes = static_cast<size_t>(plan.block_bytes());
  const bool on_device = device_of(options, rank) >= 0;
  const bool is_large = plan.payload_bytes(n) >= kRegisteredBytes;
  const bool registered =
      options.registered.value_or(is_large && !on_device && collective.id != kSendRecv);
  const int num_first = in_place ? std::max(num_in, num_out) : num_in;
  const Buffer first(comm, options, block_bytes * num_first, registered);
  std::optional<Buffer> second;
  if (!in_place) second.emplace(comm, options, block_bytes * num_out, registered);
  const Buffer& last = in_place ? first : *second;
  // Offsets of input and output in their buffers.
  const size_t shift = in_place ? static_cast<size_t>(std::abs(*place)) * block_bytes : 0;
  const size_t in_at = in_place && *place <= 0 ? shift : 0;
  const size_t out_at = in_place && *place > 0 ? shift : 0;

  Call call;
  call.collective = collective.id;
  call.input = num_in > 0 ? first.data() + in_at : nullptr;
  call.output = num_out > 0 ? last.data() + out_at : nullptr;
  call.device = device_of(options, rank);
  call.count = call.shape[0] = plan.count;
  call.num_dims = 1;
  call.dtype = plan.dtype;
  call.op = plan.op;
  call.root = collective.has_root ? options.root : 0;
  call.algorithm = options.algorithm;

  std::vector<std::shared_ptr<Work>> works;
  std::optional<SendRecv> messages;
  if (collective.id == kSendRecv) messages.emplace(comm, call);
  const auto calls = [&](int num_calls) {
    if (messages) {
      options.blocking ? messages->run(num_calls)
                       : messages->run_queued(num_calls, options.timeout_s);
    } else if (collective.id == Collective::kBarrier) {
      for (int i = 0; i < num_calls; ++i) comm.barrier();
    } else if (options.blocking) {
      for (int i = 0; i < num_calls; ++i) comm.run(call);
      // There a call returns when it is launched; all are over when the time is.
      if (call.device >= 0) comm.synchronize();
    } else {
      works.clear();
      for (int i = 0; i < num_calls; ++i) works.push_back(comm.start(call, nullptr));
      for (const auto& work : works) {
        while (!work->wait(options.timeout_s)) {
        }
      }
    }
  };

  const Pattern pattern(collective, plan.dtype, plan.op, options.root, n);
  pattern.fill_input(rank, first.host() + in_at, plan.count);
  first.push();
  calls(options.warmup_iters);
  Figures figures = time_calls(comm, calls, options);

  if (options.check && collective.id != Collective::kBarrier) {
    std::byte* const output = last.host() + out_at;
    if (num_out > 0) std::memset(output, static_cast<int>(kUntouched), block_bytes * num_out);
    pattern.fill_input(rank, first.host() + in_at, plan.count);
    first.push();
    if (!in_place) last.push();
    calls(1);
    last.pull();
    std::vector<int64_t> num_wrong = {pattern.count_wrong(rank, output, plan.count)};
    agree(comm, num_wrong, Op::kSum);
    figures.num_wrong = num_wrong[0];
  }
  return figures;
}

}  // namespace pycoll::perf
