// Runs every all-reduce algorithm with both protocols on CpuTarget, ranks as threads, and compares
// with an oracle. Built plain and under sanitizers; `executor_check [n ...]`. Devices:
// device_check.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "algorithms/table/registry.h"
#include "base/peer_stores.h"
#include "executor/cpu/cpu_target.h"
#include "executor/cpu/peer_loads.h"
#include "executor/interpret_together.h"
#include "plan/direct_plan.h"
#include "plan/plan.h"
#include "reduce/element.h"
#include "transport/ring/claim_lines.h"

namespace pycoll {
namespace {

constexpr double kTimeoutS = 60;
constexpr int kNumRepeats = 7;  // slots wrap, and nothing is left over between operations

std::atomic<int> num_failures{0};
std::atomic<int> num_trading_calls{0};

void expect(bool good, const std::string& what) {
  if (good) return;
  if (num_failures.fetch_add(1) < 10) std::fprintf(stderr, "FAILED: %s\n", what.c_str());
}

// Small integers: their sums and products of two are exact in every dtype here.
template <DType dtype>
typename DTypeTraits<dtype>::Storage value(int rank, int64_t i) {
  using Traits = DTypeTraits<dtype>;
  return Traits::store(static_cast<typename Traits::Acc>((rank * 7 + i) % 5 + 1));
}

template <DType dtype, Op op>
typename DTypeTraits<dtype>::Storage oracle(int num_ranks, int64_t i) {
  using Traits = DTypeTraits<dtype>;
  auto acc = Traits::load(value<dtype>(0, i));
  for (int rank = 1; rank < num_ranks; ++rank) {
    acc = Combine<combining_op(dtype, op)>::apply(acc, Traits::load(value<dtype>(rank, i)));
  }
  return Traits::store(finish(acc, op == Op::kAvg ? num_ranks : 1));
}

struct Case {
  const AlgorithmInfo* algorithm;
  ProtocolKind protocol;
  int num_ranks;
  int64_t count;
};

template <class Protocol, DType dtype, Op op>
bool run_host(Segment& segment, Waiter& waiter, Links& links, const Plan& plan, Payload payload,
              int num_ranks, int num_together, bool ahead, const SlotUse& use) {
  CpuTarget host(segment, waiter, num_ranks);
  CpuArithmetic arithmetic;
  arithmetic.element_size = dtype_size(dtype);
  arithmetic.reduce_copy = reduce_copy_fn(dtype, op);
  arithmetic.divisor = op == Op::kAvg ? num_ranks : 1;
  host.begin(links, arithmetic, use);
  if (num_together == 1) return interpret<Protocol>(host, plan.view(), payload);
  int64_t num_met = 0;
  const auto meet = [&num_met](int64_t first, int64_t end) {
    expect(first == num_met && end > first, "groups of tiles that follow one another");
    num_met = end;
  };
  const ProgramView view = plan.view();
  StepEnds ends = step_ends(view.steps, view.num_steps);
  if (!ahead) ends.num_first = 0;
  const bool ok = interpret_together<Protocol>(host, view, payload, num_together, ends, meet);
  expect(!ok || num_met == payload.count, "each element is met, while messages are on their way");
  return ok;
}

template <class Protocol, DType dtype, Op op>
void run_rank(const Case& c, std::shared_ptr<LocalWorld> world, int rank) {
  using Storage = typename DTypeTraits<dtype>::Storage;
  const auto transport = make_local_transport(std::move(world), rank);
  Links links(transport->segment(), rank, c.protocol);
  const Plan plan = make_plan(c.algorithm->generate(c.num_ranks, 0), rank,
                              {.num_slots = transport->segment().layout().num_slots});
  constexpr int64_t slot_payload = 448;  // small, so that a small message has many tiles
  const std::string name = std::string(c.algorithm->name) + "/" + protocol_name(c.protocol) + " " +
                           std::string(dtype_name(dtype)) + " " + std::string(op_name(op)) +
                           " n=" + std::to_string(c.num_ranks) +
                           " count=" + std::to_string(c.count);
  std::vector<Storage> input(static_cast<size_t>(c.count));
  std::vector<Storage> output(static_cast<size_t>(c.count) + 1);
  Waiter waiter(*transport);
  for (int repeat = 1; repeat <= kNumRepeats; ++repeat) {
    for (int64_t i = 0; i < c.count; ++i) input[static_cast<size_t>(i)] = value<dtype>(rank, i);
    Payload payload;
    payload.buffers[static_cast<int>(BufferKind::kInput)] =
        reinterpret_cast<std::byte*>(input.data());
    payload.buffers[static_cast<int>(BufferKind::kOutput)] =
        reinterpret_cast<std::byte*>(output.data());
    payload.count = c.count;
    payload.tile_count = tile_count(plan, slot_payload, sizeof(Storage));
    if (!plan.placement.before.empty() || !plan.placement.any_time.empty()) {
      std::memcpy(output.data(), input.data(), input.size() * sizeof(Storage));
    }
    // One tile after another, several together, and as many as the slots allow; then in as few
    // slots as are safe, and in others.
    const auto all = static_cast<uint64_t>(transport->segment().layout().num_slots);
    const int most = static_cast<int>(all) / plan.min_slots;
    const int num_together = repeat > 3 ? 1 : repeat == 3 ? most : std::min(repeat, most);
    const auto fewest = std::bit_ceil(static_cast<uint64_t>(plan.min_slots));
    const bool few = c.protocol == ProtocolKind::kSimple && repeat > 3 && repeat % 2 == 0;
    SlotUse use{few ? std::min(all, fewest * (repeat == 6 ? 2 : 1)) : all};
    // Some calls in between trade places, where they may.
    if (c.protocol == ProtocolKind::kSimple && use.num_slots == all && repeat != 4 &&
        may_trade_places(plan, payload.count, payload.tile_count, num_together)) {
      use.places = Places::kTraded;
      ++num_trading_calls;
    }
    // Some ranks send the next tiles ahead, in the same call as others that do not.
    const bool ahead = use.places != Places::kTraded && (rank + repeat) % 3 != 0;
    waiter.begin(static_cast<uint64_t>(repeat), 1, kTimeoutS, {});
    const bool ok = run_host<Protocol, dtype, op>(transport->segment(), waiter, links, plan,
                                                  payload, c.num_ranks, num_together, ahead, use);
    expect(ok, name + " did not end");
    if (!ok) return;
    for (int64_t i = 0; i < c.count; ++i) {
      const Storage expected = oracle<dtype, op>(c.num_ranks, i);
      const bool same =
          std::memcmp(&expected, &output[static_cast<size_t>(i)], sizeof(Storage)) == 0;
      expect(same, name + " element " + std::to_string(i) + " on rank " + std::to_string(rank));
      if (!same) return;
    }
  }
}

template <DType dtype, Op op>
void run_case(const Case& c) {
  const auto world = make_local_world(c.num_ranks);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < c.num_ranks; ++rank) {
    ranks.emplace_back([&c, world, rank] {
      if (c.protocol == ProtocolKind::kLL) {
        run_rank<LowLatency, dtype, op>(c, world, rank);
      } else {
        run_rank<Simple, dtype, op>(c, world, rank);
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

/// Writes blocks of a ring of 8 slots that take so many ticks per byte; through the caches, `alone`
/// if the slot was written past them last.
void write_blocks(PeerStores& stores, uint64_t cached, uint64_t past, uint64_t alone,
                  uint32_t num_blocks = 4 * PeerStores::kPeriod) {
  constexpr size_t kBytes = 8192;
  constexpr uint32_t kSlots = 8;
  static char slots[kSlots];
  static bool was_past[kSlots];
  static uint32_t i = 0;
  for (const uint32_t end = i + num_blocks; i != end; ++i) {
    bool& was = was_past[i % kSlots];
    const PeerStores::Turn turn = stores.next(&slots[i % kSlots], kBytes);
    const uint64_t through = was ? alone : cached;
    was = turn.past_caches;
    if (!turn.timed) continue;
    // A third of the measurements are interrupted.
    const uint64_t late = i % 3 == 0 ? 100 * kBytes : 0;
    stores.took(turn, kBytes, turn.start + (turn.past_caches ? past : through) * kBytes + late);
  }
}

void check_peer_stores() {
  PeerStores stores(PeerStores::Way::kMeasured);
  write_blocks(stores, 2, 1, 2);
  expect(!stores.past_caches(), "twice as slow is not worth a reader's misses");
  write_blocks(stores, 10, 1, 10);
  expect(stores.past_caches(), "slow lines are written past the caches");
  char slot = 0;
  expect(!stores.next(&slot, PeerStores::kMinBytes - 1).past_caches,
         "short blocks stay in the caches");
  write_blocks(stores, 10, 1, 5, 64 * PeerStores::kPeriod);
  expect(stores.past_caches(), "a trial shows that the caches are still slow");
  write_blocks(stores, 1, 1, 5, 64 * PeerStores::kPeriod);
  expect(!stores.past_caches(), "the cores share a cache again");
  write_blocks(stores, 5, 1, 5, PeerStores::kCachedPeriod);
  expect(!stores.past_caches(), "lines that the reader is about to drop");
  write_blocks(stores, 5, 1, 5);
  expect(stores.past_caches(), "it does not drop them");
  write_blocks(stores, 1, 1, 1, 64 * PeerStores::kPeriod);
  write_blocks(stores, 10, 1, 10, 2 * PeerStores::kCachedPeriod);
  expect(stores.past_caches(), "slow caches are soon left");

  PeerStores of_long_rounds(PeerStores::Way::kMeasured, size_t{4} << 20);
  write_blocks(of_long_rounds, 5, 1, 5, 480);
  expect(!of_long_rounds.past_caches(), "lines of less than a round that are in no cache");
  write_blocks(of_long_rounds, 5, 1, 5);
  expect(of_long_rounds.past_caches(), "a whole round was slow");
}

void check_peer_loads() {
  const auto transport = make_local_transport(make_local_world(3), 0);
  PeerLoads loads(transport->segment(), 0, 3, PeerLoads::Way::kMeasured);
  const auto write_lines = [&loads](int peer, uint64_t kept, uint64_t returned) {
    for (int i = 0; i < 7; ++i) loads.took(peer, kept, returned);
  };
  write_lines(1, 700, 900);
  expect(!loads.wants_lines(), "lines are kept where they are written faster");
  write_lines(2, 2700, 1200);
  expect(loads.wants_lines(), "one peer that shares no cache is enough");
  for (int i = 0; i < 3; ++i) loads.took(2, 700, 900);
  expect(loads.wants_lines(), "three measurements of seven may be wrong");
  write_lines(2, 1100, 900);
  expect(loads.wants_lines(), "what was found last has the doubt");
  write_lines(2, 700, 900);
  expect(!loads.wants_lines(), "the cores share a cache again");
  write_lines(2, 1100, 900);
  expect(!loads.wants_lines(), "here, too");
}

/// In calls with different numbers of messages, no rank writes where its own message was last.
void check_traded_places() {
  const auto world = make_local_world(2);
  const auto of_0 = make_local_transport(world, 0);
  const auto of_1 = make_local_transport(world, 1);
  Links links[] = {{of_0->segment(), 0, ProtocolKind::kSimple},
                   {of_1->segment(), 1, ProtocolKind::kSimple}};
  std::map<const std::byte*, size_t> last_writer;
  for (const int num_messages : {1, 3, 6, 4, 4, 5, 2, 8, 7, 12, 1, 1, 9, 4}) {
    for (Links& own : links) own.begin_trading_call();
    for (int message = 0; message < num_messages; ++message) {
      for (size_t rank = 0; rank < 2; ++rank) {
        SendEnd& send = links[rank].send[1 - rank];
        RecvEnd& recv = links[1 - rank].recv[rank];
        const std::byte* const place = links[rank].traded.of(send);
        expect(place == links[1 - rank].traded.of(recv), "both ends find the same place");
        const auto found = last_writer.find(place);
        expect(found == last_writer.end() || found->second != rank, "a place may be unread");
        last_writer[place] = rank;
        send.post_in_band();
        recv.release();
      }
    }
  }
  expect(last_writer.size() == 2 * kTradedPlaces, "all places are used");
}

/// How many operations of `nbytes` are from the first trial to the second. Trials are numbered in
/// the lines that they write.
int operations_between_trials(int64_t nbytes) {
  const auto transport = make_local_transport(make_local_world(2), 0);
  PeerLoads loads(transport->segment(), 0, 2, PeerLoads::Way::kMeasured);
  uint64_t& number = transport->segment().exchange(0).trial.kept[0].value;
  number = 2;  // of no trial here
  int first = 0;
  for (int count = 1; count < 1000; ++count) {
    loads.enter();
    loads.entered(nbytes);
    if (first == 0 && number == 0) {
      first = count;
      loads.enter();  // ends the trial
    }
    if (first != 0 && number == 1) return count - first;
  }
  return 0;
}

void check_trials() {
  const auto transport = make_local_transport(make_local_world(2), 0);
  // Without a measurement (no clflushopt, or no steady counter) there are no trials.
  if (!PeerLoads(transport->segment(), 0, 2, PeerLoads::Way::kMeasured).claims()) return;
  expect(operations_between_trials(4096) == 257, "small operations are seldom measured");
  expect(operations_between_trials(int64_t{16} << 20) == 17, "large ones more often");
}

/// Claims bytes beside pages that may not be touched, on either side.
void check_claim_lines() {
  constexpr size_t kPage = 4096;
  auto* const pages = static_cast<std::byte*>(
      ::mmap(nullptr, 3 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  std::byte* const page = pages + kPage;
  ::mprotect(page, kPage, PROT_READ | PROT_WRITE);
  for (size_t i = 0; i < kPage; ++i) page[i] = static_cast<std::byte>(i * 7);
  for (size_t nbytes = 0; nbytes < 300; ++nbytes) {
    claim_lines(page, nbytes);
    claim_lines(page + kPage - nbytes, nbytes);
  }
  bool is_same = true;
  for (size_t i = 0; i < kPage; ++i) is_same = is_same && page[i] == static_cast<std::byte>(i * 7);
  expect(is_same, "claimed bytes stay as they are");
  ::munmap(pages, 3 * kPage);
}

void check_sole_readers() {
  const auto has_sole_readers = [](Collective collective, const char* name, int num_ranks) {
    for (const AlgorithmInfo& algorithm : algorithms()) {
      if (algorithm.collective != collective || std::string(algorithm.name) != name) continue;
      const auto direct = make_direct_plan(algorithm.generate(num_ranks, 0), 0);
      return direct && direct->has_sole_readers;
    }
    return false;
  };
  expect(has_sole_readers(Collective::kAllReduce, "two_shot", 3), "each part has one reader");
  expect(has_sole_readers(Collective::kReduceScatter, "all_pairs", 3), "each block has one reader");
  expect(has_sole_readers(Collective::kAllToAll, "pairwise", 3), "each block has one reader");
  expect(!has_sole_readers(Collective::kAllReduce, "one_shot", 2),
         "the owner reads its input, too");
}

/// How many blocks each of 4 ranks copies in a gather and in a scatter, beside its own; root 1.
void check_roots_work() {
  for (const AlgorithmInfo& algorithm : algorithms()) {
    const bool gathers = algorithm.collective == Collective::kGather;
    if ((!gathers && algorithm.collective != Collective::kScatter) ||
        std::string(algorithm.name) != "star") {
      continue;
    }
    const std::vector<DirectWork> work = direct_work(algorithm.generate(4, 1), Writes::kPeers);
    expect(work.size() == 4, "there is a direct plan");
    for (size_t rank = 0; rank < work.size(); ++rank) {
      expect(work[rank].remote == (rank == 1 ? 0 : 1),
             "a root has its own block to copy, so each other rank copies one, too");
    }
    // Peers' private memory is only read, so the root of a gather reads all.
    const std::vector<DirectWork> plain = direct_work(algorithm.generate(4, 1), Writes::kOwnOnly);
    expect(!gathers || (plain.size() == 4 && plain[1].remote == 3), "a root reads what it gathers");
  }
}

/// In an all_gather each rank reads its own block, and no other, and writes it everywhere.
void check_all_gathers_push() {
  for (const AlgorithmInfo& algorithm : algorithms()) {
    if (algorithm.collective != Collective::kAllGather ||
        std::string(algorithm.name) != "all_pairs")
      continue;
    const Schedule schedule = algorithm.generate(4, 0);
    const auto direct = make_direct_plan(schedule, 1);
    expect(direct && direct->plan.placement.any_time.empty(), "no copy outside the program");
    if (!direct) continue;
    int num_written = 0;
    for (const Step& step : direct->plan.program.steps) {
      expect(step.src_peers == 0 && step.has(kReadLocal), "a rank reads its own block");
      num_written += std::popcount(step.dst_peers) + (step.has(kWriteLocal) ? 1 : 0);
    }
    expect(num_written == 4, "and writes it to all outputs");
    const auto plain = make_direct_plan(schedule, 1, Writes::kOwnOnly);
    expect(plain && !plain->has_results, "peers' private memory is only read");
  }
}

void check_claims() {
  PeerLoads::Claims claims;
  int num_looks = 0;
  bool left_end = false;
  for (int call = 0; call < 62; ++call) {
    claims.begin_call();
    if (claims.looks()) ++num_looks;
    expect(claims.looks() == left_end, "a call that claims less comes before each look");
    left_end = claims.leaves_end();
    expect(!claims.leaves_end(), "the end is left only once");
  }
  expect(num_looks == 2, "one call in 31 looks");

  const auto calls_until_look = [&claims] {
    int num_calls = 0;
    do {
      claims.begin_call();
      ++num_calls;
    } while (!claims.looks());
    return num_calls;
  };
  calls_until_look();
  claims.found(true);
  expect(!claims.looks(), "a call looks once");
  expect(!claims.is_rewritten(), "one look may be wrong");
  expect(calls_until_look() == 2, "the next look comes at once");
  claims.found(true);
  expect(claims.is_rewritten() && calls_until_look() == 31, "two looks agree");
  claims.found(false);
  calls_until_look();
  claims.found(true);
  expect(claims.is_rewritten(), "a look that contradicts was wrong");
}

int check(const std::vector<int>& worlds) {
  check_claim_lines();
  check_sole_readers();
  check_roots_work();
  check_all_gathers_push();
  check_claims();
  check_peer_stores();
  check_peer_loads();
  check_traded_places();
  check_trials();
  int num_cases = 0;
  for (const int num_ranks : worlds) {
    for (const AlgorithmInfo& algorithm : algorithms()) {
      if (algorithm.collective != Collective::kAllReduce) continue;
      for (const ProtocolKind protocol : {ProtocolKind::kSimple, ProtocolKind::kLL}) {
        for (const int64_t count : {int64_t{1}, int64_t{num_ranks + 1}, int64_t{1031}}) {
          const Case c{&algorithm, protocol, num_ranks, count};
          run_case<DType::kF32, Op::kSum>(c);
          run_case<DType::kBF16, Op::kAvg>(c);
          run_case<DType::kI64, Op::kMax>(c);
          run_case<DType::kU8, Op::kSum>(c);
          run_case<DType::kC128, Op::kSum>(c);
          num_cases += 5;
        }
      }
    }
  }
  const bool has_two = std::find(worlds.begin(), worlds.end(), 2) != worlds.end();
  expect(!has_two || num_trading_calls > 100, "two ranks trade places");
  std::printf("%d cases, %d failures\n", num_cases, num_failures.load());
  return num_failures.load() == 0 ? 0 : 1;
}

}  // namespace
}  // namespace pycoll

int main(int argc, char** argv) {
  std::vector<int> worlds;
  for (int i = 1; i < argc; ++i) worlds.push_back(std::atoi(argv[i]));
  if (worlds.empty()) worlds = {1, 2, 3, 4};
  return pycoll::check(worlds);
}
