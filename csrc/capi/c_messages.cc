#include "capi/c_messages.h"

#include <memory>

#include "base/clock.h"
#include "capi/calls.h"
#include "capi/guard.h"
#include "capi/handles.h"

namespace pycoll {
namespace {

/// Kept in a MessageOp's keep_alive. The core releases it when the operation is over: after storing
/// the error and before notifying any waiting thread.
class Notice {
 public:
  Notice(const MessageOp* op, pycoll_done done, void* context)
      : op_(op), done_(done), context_(context) {}
  ~Notice() {
    if (done_ == nullptr) return;
    pycoll_error error;
    if (op_->error) describe_error(op_->error, &error);
    done_(context_, op_->error ? &error : nullptr);
  }
  Notice(const Notice&) = delete;
  Notice& operator=(const Notice&) = delete;

  void retract() { done_ = nullptr; }

 private:
  const MessageOp* op_;
  pycoll_done done_;
  void* context_;
};

}  // namespace

int start_message(pycoll_comm* comm, const pycoll_message* message, pycoll_done done, void* context,
                  pycoll_handle** handle, pycoll_error* error) {
  return guarded_call(error, [&] {
    Communicator& communicator = *comm->shared->comm;
    auto op = std::make_shared<MessageOp>(message_of(*message, communicator.size()));
    auto made = std::make_unique<pycoll_handle>(comm->shared, op);
    if (message->timeout_s > 0) {
      op->deadline_ns = now_ns() + static_cast<int64_t>(message->timeout_s * 1e9);
    }
    auto notice = std::make_shared<Notice>(op.get(), done, context);
    const std::weak_ptr<Notice> weak = notice;
    op->keep_alive = std::move(notice);
    *handle = made.get();  // `done` may look at it
    try {
      const std::lock_guard lock(comm->shared->starting);
      communicator.messages().start(op);
    } catch (...) {
      if (const auto mine = weak.lock()) mine->retract();
      *handle = nullptr;
      throw;
    }
    made.release();
    return static_cast<int>(PYCOLL_OK);
  });
}

int wait_message(pycoll_handle* handle, double timeout_s, pycoll_error* error) {
  return guarded_call(error, [&] {
    const bool over = handle->shared->comm->opened_messages().wait(*handle->op, timeout_s);
    return static_cast<int>(over ? PYCOLL_OK : PYCOLL_PENDING);
  });
}

}  // namespace pycoll
