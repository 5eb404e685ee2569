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

constexpr int kMaxSamples = 20;  // the timed calls are cut into so many blocks
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

/// ns of every block of calls, by the slowest rank.
std::vector<int64_t> time_blocks(Communicator& comm, const std::function<void(int)>& calls,
                                 const std::vector<int>& calls_of_block) {
  std::vector<int64_t> block_ns;
  comm.barrier();
  for (const int num_calls : calls_of_block) {
    const int64_t start_ns = now_ns();
    calls(num_calls);
    block_ns.push_back(now_ns() - start_ns);
  }
  agree(comm, block_ns, Op::kMax);
  return block_ns;
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
  const Buffer first(comm, options, block_bytes * (in_place ? std::max(num_in, num_out) : num_in));
  std::optional<Buffer> second;
  if (!in_place) second.emplace(comm, options, block_bytes * num_out);
  const Buffer& last = in_place ? first : *second;
  // Where input and output begin in their buffers.
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
  works.reserve(static_cast<size_t>(options.iters));
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
  const int num_samples = std::min(kMaxSamples, options.iters);
  std::vector<int> calls_of_block(static_cast<size_t>(num_samples));
  for (int i = 0; i < num_samples; ++i) {
    calls_of_block[i] = options.iters / num_samples + (i < options.iters % num_samples);
  }
  const std::vector<int64_t> block_ns = time_blocks(comm, calls, calls_of_block);

  Figures figures;
  std::vector<double> call_us;
  int64_t total_ns = 0;
  for (int i = 0; i < num_samples; ++i) {
    total_ns += block_ns[i];
    call_us.push_back(static_cast<double>(block_ns[i]) / 1e3 / calls_of_block[i]);
  }
  std::sort(call_us.begin(), call_us.end());
  figures.mean_us = static_cast<double>(total_ns) / 1e3 / options.iters;
  figures.median_us = (call_us[(num_samples - 1) / 2] + call_us[num_samples / 2]) / 2;
  figures.min_us = call_us[0];

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
