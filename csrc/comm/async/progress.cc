#include "comm/async/progress.h"

namespace pycoll {
namespace {

std::exception_ptr error_of(const std::function<void()>& action) {
  try {
    action();
    return nullptr;
  } catch (...) {
    return std::current_exception();
  }
}

}  // namespace

ProgressThread::ProgressThread(ReportError report)
    : thread_(start_thread(
          "the thread of asynchronous operations", [this] { run(); }, std::move(report))) {}

ProgressThread::~ProgressThread() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  thread_.join();
}

std::shared_ptr<Work> ProgressThread::submit(std::function<void()> operation,
                                             std::function<void()> then) {
  return push({.operation = std::move(operation), .then = std::move(then)});
}

std::shared_ptr<Work> ProgressThread::submit_local(std::function<void()> action) {
  return push({.operation = std::move(action), .is_local = true});
}

std::shared_ptr<Work> ProgressThread::push(Item item) {
  auto work = std::make_shared<Work>();
  item.work = work;
  {
    const std::lock_guard lock(mutex_);
    num_operations_.fetch_add(item.is_local ? 0 : 1, std::memory_order_acq_rel);
    queue_.push_back(std::move(item));
    num_pending_.fetch_add(1, std::memory_order_acq_rel);
  }
  wake_.notify_all();
  return work;
}

void ProgressThread::run() {
  for (;;) {
    Item item;
    {
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [this] { return stop_ || !queue_.empty(); });
      if (queue_.empty()) return;
      item = std::move(queue_.front());
      queue_.pop_front();
    }
    std::exception_ptr error = error_of(item.operation);
    item.operation = nullptr;  // releases the caller's memory before any notification
    num_operations_.fetch_sub(item.is_local ? 0 : 1, std::memory_order_acq_rel);
    num_pending_.fetch_sub(1, std::memory_order_acq_rel);
    const std::exception_ptr later = item.then ? error_of(item.then) : nullptr;
    item.work->finish(error ? std::move(error) : later);
  }
}

}  // namespace pycoll
