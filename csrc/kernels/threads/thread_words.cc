#include "kernels/threads/thread_words.h"

#include <sched.h>

#include <chrono>
#include <string>
#include <thread>

#include "base/error.h"
#include "transport/ring/device_slot.h"

namespace pycoll {
namespace {

constexpr int kSpins = 1000;  // before the thread sleeps between two looks

void await_equal(const DeviceWordOp& op) {
  for (int i = 0; device::load_acquire(*op.at) != op.value; ++i) {
    if (i < kSpins) {
      ::sched_yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }
}

}  // namespace

void check_word_ops(const DeviceWordOp* ops, int num_ops,
                    const std::function<bool(const void*)>& is_accessible) {
  if (num_ops > kMaxWordOps) {
    throw UsageError(std::to_string(num_ops) + " operations on words, expected at most " +
                     std::to_string(kMaxWordOps));
  }
  for (int i = 0; i < num_ops; ++i) {
    if (reinterpret_cast<uintptr_t>(ops[i].at) % sizeof(uint64_t) != 0) {
      throw UsageError("operation " + std::to_string(i) + " is on a word that is not aligned");
    }
    if (!is_accessible(ops[i].at)) {
      throw UsageError("operation " + std::to_string(i) +
                       " is on a word that the device does not access");
    }
  }
}

void run_word_ops(const std::vector<DeviceWordOp>& ops) {
  for (const DeviceWordOp& op : ops) {
    switch (op.kind) {
      case DeviceWordOp::Kind::kWrite:
        device::store_release(*op.at, op.value);
        break;
      case DeviceWordOp::Kind::kAwaitEqual:
        await_equal(op);
        break;
    }
  }
}

}  // namespace pycoll
