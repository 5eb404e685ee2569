#include "perf/measure.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "perf/sendrecv.h"

namespace pycoll::perf {
namespace {

constexpr int kMaxSamples = 20;  // the timed calls are cut into so many blocks
constexpr size_t kHugePage = size_t{2} << 20;
constexpr std::byte kUntouched{0xa5};

/// Memory of a message, page-aligned and touched.
class Buffer {
 public:
  Buffer(Communicator& comm, size_t nbytes, bool registered) {
    if (registered) {
      const auto memory = std::make_shared<SharedMemory>(comm.allocate(nbytes));
      memory_ = {memory, memory->data()};
    } else {
      // In huge pages where the system gives them on request, as NumPy asks for large arrays.
      const size_t rounded = (std::max<size_t>(nbytes, 1) + kHugePage - 1) / kHugePage * kHugePage;
      void* const pages = std::aligned_alloc(kHugePage, rounded);
      if (pages == nullptr) throw SystemError("no memory for a message");
      madvise(pages, rounded, MADV_HUGEPAGE);
      memory_ = std::shared_ptr<std::byte>(static_cast<std::byte*>(pages), std::free);
    }
    data_ = memory_.get();
    std::memset(data_, 0, nbytes);
  }

  std::byte* data() const { return data_; }

 private:
  std::shared_ptr<std::byte> memory_;
  std::byte* data_;
};

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
  const Buffer first(comm, block_bytes * (in_place ? std::max(num_in, num_out) : num_in),
                     options.registered);
  std::optional<Buffer> second;
  if (!in_place) second.emplace(comm, block_bytes * num_out, options.registered);
  std::byte* input = first.data();
  std::byte* output = in_place ? first.data() : second->data();
  if (in_place)
    (*place > 0 ? output : input) += static_cast<size_t>(std::abs(*place)) * block_bytes;

  Call call;
  call.collective = collective.id;
  call.input = num_in > 0 ? input : nullptr;
  call.output = num_out > 0 ? output : nullptr;
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
  pattern.fill_input(rank, input, plan.count);
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
    if (num_out > 0) std::memset(output, static_cast<int>(kUntouched), block_bytes * num_out);
    pattern.fill_input(rank, input, plan.count);
    calls(1);
    std::vector<int64_t> num_wrong = {pattern.count_wrong(rank, output, plan.count)};
    agree(comm, num_wrong, Op::kSum);
    figures.num_wrong = num_wrong[0];
  }
  return figures;
}

}  // namespace pycoll::perf
