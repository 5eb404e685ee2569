#include "kernels/threads/thread_stream.h"

#include "base/error.h"

namespace pycoll {
namespace {

void raise_if_failed(const std::string& error) {
  if (!error.empty()) throw SystemError(error);
}

}  // namespace

void ThreadEvent::record(ThreadStream& stream) {
  capture_ = stream.capture();
  if (capture_ != nullptr) return;  // a capture keeps the order of its tasks anyway
  stream.push([stream = &stream, count = count_, number = ++recorded_] {
    {
      const std::lock_guard lock(count->mutex);
      count->done = number;
      count->error = stream->error();
    }
    count->reached.notify_all();
  });
}

void ThreadEvent::hold(ThreadStream& stream) {
  if (capture_ != nullptr) return stream.join_capture(capture_);
  if (stream.capture() != nullptr) {
    throw UsageError("a captured stream cannot wait for an event from outside the capture");
  }
  stream.push([count = count_, number = recorded_.load()] {
    std::unique_lock lock(count->mutex);
    count->reached.wait(lock, [&] { return count->done >= number; });
    raise_if_failed(count->error);
  });
}

void ThreadEvent::refuse_captured() const {
  if (capture_ != nullptr) throw UsageError("the event was recorded in a capture");
}

bool ThreadEvent::is_over() {
  refuse_captured();
  const std::lock_guard lock(count_->mutex);
  if (count_->done < recorded_) return false;
  raise_if_failed(count_->error);
  return true;
}

void ThreadEvent::synchronize() {
  refuse_captured();
  std::unique_lock lock(count_->mutex);
  count_->reached.wait(lock, [&] { return count_->done >= recorded_; });
  raise_if_failed(count_->error);
}

ThreadStream::~ThreadStream() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void ThreadStream::push(ThreadTask task) {
  if (capture_ != nullptr) {
    capture_->tasks.push_back(std::move(task));
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    if (!thread_.joinable()) {
      thread_ = start_thread("the thread of an emulated device's stream", [this] { run(); }, {});
    }
    queue_.push_back({std::move(task), hardware_.enter()});
    ++num_pushed_;
  }
  changed_.notify_all();
}

void ThreadStream::synchronize() {
  if (capture_ != nullptr) throw UsageError("a captured stream cannot be waited for");
  std::unique_lock lock(mutex_);
  const uint64_t number = num_pushed_;
  changed_.wait(lock, [&] { return num_done_ >= number; });
  raise_if_failed(error_);
}

std::string ThreadStream::error() {
  const std::lock_guard lock(mutex_);
  return error_;
}

void ThreadStream::run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stop_ || !queue_.empty(); });
    if (queue_.empty()) return;
    std::string error;
    {
      const Queued next = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      hardware_.wait(next.place);
      Running running(*this);
      try {
        next.task();
      } catch (const std::exception& raised) {
        error = raised.what();
      }
    }
    lock.lock();
    if (error_.empty()) error_ = std::move(error);
    ++num_done_;
    changed_.notify_all();
  }
}

void ThreadStream::begin_capture() {
  static std::atomic<uint64_t> last_number{0};
  if (capture_ != nullptr) throw UsageError("the stream is captured already");
  capture_ = std::make_shared<ThreadCapture>();
  capture_->number = ++last_number;
  capture_->origin = this;
  capture_->streams.push_back(this);
  ++num_captures_;
  ++num_captures_here_;
}

std::shared_ptr<ThreadCapture> ThreadStream::end_capture() {
  if (capture_ == nullptr || capture_->origin != this) {
    throw UsageError("no capture began in this stream");
  }
  std::shared_ptr<ThreadCapture> capture = capture_;
  for (ThreadStream* stream : capture->streams) stream->capture_ = nullptr;
  --num_captures_;
  --num_captures_here_;
  return capture;
}

void ThreadStream::join_capture(std::shared_ptr<ThreadCapture> capture) {
  if (capture_ == capture) return;
  if (capture_ != nullptr) throw UsageError("two captures cannot be joined");
  capture->streams.push_back(this);
  capture_ = std::move(capture);
}

}  // namespace pycoll
