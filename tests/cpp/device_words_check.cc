// Operations of streams on words: their order, captures, and what is refused. With any argument:
// how they hold up a hardware queue.
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "device/device.h"
#include "transport/ring/device_slot.h"

namespace pycoll {
namespace {

constexpr unsigned kHangS = 60;
int num_failures = 0;

void expect(bool holds, const char* what) {
  if (holds) return;
  ++num_failures;
  std::printf("not so: %s\n", what);
}

using Kind = DeviceWordOp::Kind;

struct Words {
  explicit Words(const Device& its_device)
      : device(its_device), memory(device, 4096), stream(device), other(device) {}

  uint64_t* at(int i) const { return reinterpret_cast<uint64_t*>(memory.data()) + i; }
  uint64_t value(int i) const { return pycoll::device::load_acquire(*at(i)); }
  void queue(const std::vector<DeviceWordOp>& ops, const Stream& on) const {
    device.queue_words(ops, on.get());
  }
  /// True when the stream has no work left within a tenth of a second.
  static bool is_over(const StreamEvent& event) {
    for (int i = 0; i < 20; ++i) {
      if (event.is_over()) return true;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    return false;
  }

  Device device;
  PinnedMemory memory;
  Stream stream, other;
};

void check_order(const Device& device) {
  const Words words(device);
  const DeviceMemory payload(device, 8);
  StreamEvent event(device);
  words.queue({{Kind::kAwaitEqual, 0, words.at(0), 7}, {Kind::kWrite, 0, words.at(0), 0}},
              words.stream);
  device.copy(payload.data(), words.at(1), 8, words.stream.get());
  words.queue({{Kind::kWrite, 0, words.at(2), 9}}, words.stream);
  event.record(words.stream.get());
  expect(!Words::is_over(event) && words.value(2) == 0, "a stream waits for a word");
  pycoll::device::store_release(*words.at(0), uint64_t{8});
  expect(!Words::is_over(event), "another value does not end the wait");
  // Another stream writes the word, after the bytes that the first one copies.
  words.queue({{Kind::kWrite, 0, words.at(1), 42}, {Kind::kWrite, 0, words.at(0), 7}}, words.other);
  device.synchronize(words.stream.get());
  uint64_t copied = 0;
  device.copy_now(&copied, payload.data(), 8);
  expect(copied == 42 && words.value(0) == 0 && words.value(2) == 9, "operations keep their order");
}

void check_graph(const Device& device) {
  const Words words(device);
  DeviceGraph graph = nullptr;
  const DeviceTable& table = device.table();
  device.check(table.begin_capture(device.index(), words.stream.get()), "capturing");
  words.queue({{Kind::kAwaitEqual, 0, words.at(0), 1}, {Kind::kWrite, 0, words.at(0), 0}},
              words.stream);
  device.check(table.end_capture(device.index(), words.stream.get(), &graph), "capturing");
  for (int replay = 0; replay < 3; ++replay) {
    device.check(table.launch_graph(device.index(), graph, words.stream.get()), "replaying");
    words.queue({{Kind::kWrite, 0, words.at(0), 1}}, words.other);
    device.synchronize(words.stream.get());
    expect(words.value(0) == 0, "each replay waits again");
  }
  table.destroy_graph(graph);
}

/// Both streams share the only queue: the work behind a wait cannot begin.
void check_queue(const Device& device) {
  const Words words(device);
  StreamEvent event(device);
  words.queue({{Kind::kAwaitEqual, 0, words.at(0), 1}}, words.stream);
  words.queue({{Kind::kWrite, 0, words.at(1), 1}}, words.other);
  event.record(words.other.get());
  expect(!Words::is_over(event), "a wait holds up other streams of its hardware queue");
  pycoll::device::store_release(*words.at(0), uint64_t{1});
  device.synchronize(words.other.get());
}

void check_refusals(const Device& device) {
  const Words words(device);
  uint64_t elsewhere = 0;
  const auto refused = [&](const std::vector<DeviceWordOp>& ops) {
    return device.table().queue_words(device.index(), ops.data(), static_cast<int32_t>(ops.size()),
                                      words.stream.get()) != 0;
  };
  const DeviceWordOp good{Kind::kWrite, 0, words.at(0), 1};
  DeviceWordOp crooked = good;
  crooked.at = reinterpret_cast<uint64_t*>(words.memory.data() + 4);
  expect(refused({crooked}), "a word that is not aligned is refused");
  expect(refused({{Kind::kWrite, 0, &elsewhere, 1}}), "memory that is not mapped is refused");
  const std::vector<DeviceWordOp> many(kMaxWordOps + 1, good);
  expect(refused(many), "more operations than the driver takes are refused");
  words.queue(many, words.stream);  // in two calls
  device.synchronize(words.stream.get());
  expect(words.value(0) == 1, "the core cuts long lists");
}

}  // namespace
}  // namespace pycoll

int main(int argc, char**) {
  using namespace pycoll;
  alarm(kHangS);
  const bool one_queue = argc > 1;
  ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", one_queue ? "1" : "8", 1);
  const Device device(*pycoll_device_table(), 0);
  if (one_queue) {
    check_queue(device);
  } else {
    check_order(device);
    check_graph(device);
    check_refusals(device);
  }
  std::printf("words, %d failures\n", num_failures);
  return num_failures == 0 ? 0 : 1;
}
