// Drives communicators whose ranks are threads: blocking and queued calls, splits, and every way in
// which a communicator breaks while others use it. Also drives the choice among plans that calls
// try. Built plain and under sanitizers.
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "comm/communicator.h"
#include "comm/tuning/online_tuning.h"

namespace pycoll {
namespace {

constexpr double kTimeoutS = 60;
constexpr int kNumRepeats = 20;

std::atomic<int> num_failures{0};

void expect(bool good, const std::string& what) {
  if (good) return;
  if (num_failures.fetch_add(1) < 10) std::fprintf(stderr, "FAILED: %s\n", what.c_str());
}

Call all_reduce_of(std::vector<int64_t>& x) {
  Call call;
  call.input = call.output = x.data();
  call.count = static_cast<int64_t>(x.size());
  call.dtype = DType::kI64;
  call.num_dims = 1;
  call.shape[0] = call.count;
  return call;
}

using RankMain = std::function<void(Communicator&)>;

void on_ranks(int num_ranks, double timeout_s, const RankMain& rank_main) {
  const auto world = make_local_world(num_ranks);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < num_ranks; ++rank) {
    ranks.emplace_back([&, rank] {
      Communicator comm(make_local_transport(world, rank), timeout_s);
      rank_main(comm);
    });
  }
  for (std::thread& rank : ranks) rank.join();
}

template <class ExpectedError>
void expect_error(const char* what, const std::function<void()>& call) {
  try {
    call();
    expect(false, std::string(what) + " raised nothing");
  } catch (const ExpectedError&) {
  } catch (const std::exception& error) {
    expect(false, std::string(what) + " raised: " + error.what());
  }
}

void use_communicator(Communicator& comm) {
  const int n = comm.size();
  for (int repeat = 0; repeat < kNumRepeats; ++repeat) {
    for (const size_t count : {0, 1, 1000, 30'000}) {
      std::vector<int64_t> first(count, comm.rank());
      std::vector<int64_t> second(count, 1);
      const auto work = comm.start(all_reduce_of(first), nullptr);
      comm.run(all_reduce_of(second));
      while (!work->wait(1)) {
      }
      expect(count == 0 || first.back() == n * (n - 1) / 2, "a queued all_reduce");
      expect(count == 0 || second.back() == n, "an all_reduce behind it");
    }
    comm.barrier();
    if (repeat % 5 == 0) {
      const auto part = comm.split(comm.rank() % 2, -comm.rank());
      std::vector<int64_t> x(10, 1);
      part->run(all_reduce_of(x));
      expect(x[0] == part->size(), "an all_reduce of a part");
      expect(!comm.explain(Collective::kAllReduce, 80, 0, Arrays::kPlain).empty(), "explain");
    }
  }
}

void mismatch(Communicator& comm) {
  std::vector<int64_t> x(comm.rank() == 1 ? 7 : 5, 1);
  expect_error<CollectiveMismatchError>("another count", [&] { comm.run(all_reduce_of(x)); });
  expect_error<CollectiveMismatchError>("the next call", [&] { comm.barrier(); });
}

void leave(Communicator& comm) {
  if (comm.rank() == 1) return comm.close();
  expect_error<PeerDiedError>("a barrier without rank 1", [&] { comm.barrier(); });
}

void stay_away(Communicator& comm) {
  if (comm.rank() == 1) {
    std::this_thread::sleep_for(std::chrono::milliseconds(400));
    return;
  }
  expect_error<TimeoutError>("a barrier that rank 1 does not enter", [&] { comm.barrier(); });
}

void close_with_pending_work(Communicator& comm) {
  if (comm.rank() == 1) return;
  std::vector<int64_t> x(100, 1);
  std::vector<std::shared_ptr<Work>> works;
  for (int i = 0; i < 5; ++i) works.push_back(comm.start(all_reduce_of(x), nullptr));
  comm.close();
  for (const auto& work : works) {
    expect_error<Error>("work that was pending at close", [&] { work->wait(0); });
  }
}

MessageOp message(bool is_send, int peer, std::vector<int64_t>& x) {
  MessageOp op;
  op.is_send = is_send;
  op.peer = peer;
  op.dtype = DType::kI64;
  op.data = reinterpret_cast<std::byte*>(x.data());
  op.nbytes = x.size() * sizeof(int64_t);
  return op;
}

/// A thread waits in the first receive when another one starts the first asynchronous send.
void receive_beside_a_send(Communicator& comm) {
  const int peer = 1 - comm.rank();
  std::vector<int64_t> given(10'000, comm.rank());
  std::vector<int64_t> got(given.size(), -1);
  PointToPoint& messages = comm.messages();
  std::thread receiver([&] {
    MessageOp receive = message(false, peer, got);
    messages.run(receive, {});
  });
  std::this_thread::yield();
  const auto send = std::make_shared<MessageOp>(message(true, peer, given));
  messages.start(send);
  while (!messages.wait(*send, 1)) {
  }
  receiver.join();
  expect(got.back() == peer, "a receive beside an asynchronous send");
}

/// Makes calls whose plans take such times, 0 if a plan cannot run, and returns how many run each
/// plan. One call in seven is interrupted.
std::vector<int> tune(OnlineTuning& tuning, const std::vector<double>& times, int num_calls) {
  std::vector<int> num(times.size());
  double ended = 0;
  for (int i = 0; i < num_calls; ++i) {
    const OnlineTuning::Turn turn = tuning.next();
    if (turn.follows && ended > 0) tuning.took(ended);
    const double late = i % 7 == 0 ? 100 : 1;
    if (turn.ends) ended = times[static_cast<size_t>(turn.plan)] * late;
    ++num[static_cast<size_t>(turn.plan)];
  }
  return num;
}

void check_online_tuning() {
  OnlineTuning tuning(3, {});
  std::vector<int> num = tune(tuning, {3, 2, 4}, 2000);
  expect(tuning.best() == 1 && num[1] > 1700, "most calls run the fastest plan");
  expect(num[2] > 0 && num[2] < 60, "a plan that loses clearly is tried seldom");
  expect(tuning.ns_per_byte(1) == 2 && tuning.ns_per_byte(2) == 4, "the median is what counts");
  num = tune(tuning, {3, 2, 1}, 8000);
  expect(tuning.best() == 2 && num[2] > 3000, "another plan becomes the fastest");
  num = tune(tuning, {1, 5, 5}, 12000);
  expect(tuning.best() == 0 && num[0] > 6000, "the machine has changed, so all plans are tried");
  num = tune(tuning, {1, 0.99, 5}, 3000);
  expect(tuning.best() == 0, "a plan that is hardly faster changes nothing");

  // The first calls after a pause find cold caches. Here they are the first part of a trial.
  OnlineTuning paused(2, {.num_spans = 3, .min_pause = 8});
  double ended = 0;
  int num_calls_of_other = 0;
  for (int i = 0; i < 25; ++i) {
    const OnlineTuning::Turn turn = paused.next();
    if (turn.follows) paused.took(ended);
    const bool is_cold = i >= 8 && i < 11;
    if (turn.ends) ended = turn.plan == 0 ? (is_cold ? 3 : 1) : 1.5;
    num_calls_of_other += turn.plan;
  }
  expect(num_calls_of_other == 5, "the other plan seems better, so the best one is timed again");
  expect(paused.best() == 0 && paused.ns_per_byte(0) == 1, "a pause before a trial changes nothing");

  OnlineTuning without(2, {});
  tune(without, {0, 1}, 100);
  expect(without.best() == 1, "a plan that cannot run is left");
  num = tune(without, {0, 1}, 10000);
  expect(num[0] < 100, "and tried seldom");

  OnlineTuning in_spans(2, {.num_spans = 3, .calls_of_span = 4});
  int num_timed = 0;
  int num_ended = 0;
  for (int i = 0; i < 1000; ++i) {
    const OnlineTuning::Turn turn = in_spans.next();
    expect(!turn.follows || num_ended > 0, "no time before the first span");
    num_timed += turn.timed ? 1 : 0;
    num_ended += turn.ends ? 1 : 0;
  }
  expect(num_ended > 10 && num_timed == 4 * num_ended, "spans have four calls each");

  OnlineTuning warmed(2, {.num_spans = 1});
  warmed.warms_up(1, 30);
  int num_warm = 0;
  int num_begun = 0;
  for (int i = 0; i < 60; ++i) {
    const OnlineTuning::Turn turn = warmed.next();
    num_begun += turn.begins ? 1 : 0;
    if (turn.plan == 1 && !turn.timed) ++num_warm;
  }
  expect(num_begun == 1 && num_warm == 30, "calls that find cold slots do not count");
  OnlineTuning best_warmed(2, {.num_spans = 1});
  best_warmed.warms_up(0, 50);
  for (int i = 0; i < 50; ++i) {
    expect(!best_warmed.next().timed, "nor do those of the plan that is used first");
  }
  expect(best_warmed.next().timed, "the first trial follows them");
  expect(!OnlineTuning().is_on() && !OnlineTuning(1, {}).is_on(), "nothing to choose from");
}

void check() {
  check_online_tuning();
  for (int repeat = 0; repeat < kNumRepeats; ++repeat) {
    on_ranks(2, kTimeoutS, receive_beside_a_send);
  }
  for (const int n : {1, 2, 3, 4}) on_ranks(n, kTimeoutS, use_communicator);
  for (const int n : {2, 3, 4}) {
    for (int repeat = 0; repeat < kNumRepeats; ++repeat) {
      on_ranks(n, kTimeoutS, mismatch);
      on_ranks(n, kTimeoutS, leave);
      on_ranks(n, kTimeoutS, close_with_pending_work);
    }
    on_ranks(n, 0.1, stay_away);
  }
  std::printf("communicators, %d failures\n", num_failures.load());
}

}  // namespace
}  // namespace pycoll

int main() {
  pycoll::check();
  return pycoll::num_failures.load() == 0 ? 0 : 1;
}
