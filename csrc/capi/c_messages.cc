#include "capi/c_messages.h"

#include <memory>
#include <utility>

#include "base/clock.h"
#include "capi/calls.h"
#include "capi/guard.h"
#include "capi/handles.h"
#include "device/device_library.h"

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

/// `bytes`: owner of a send's bytes, or null.
void start_op(pycoll_comm* comm, const pycoll_message& message, std::shared_ptr<MessageOp> op,
              std::shared_ptr<void> bytes, pycoll_done done, void* context,
              pycoll_handle** handle) {
  auto made = std::make_unique<pycoll_handle>(comm->shared, op);
  if (message.timeout_s > 0) {
    op->deadline_ns = now_ns() + static_cast<int64_t>(message.timeout_s * 1e9);
  }
  auto notice = std::make_shared<Notice>(op.get(), done, context);
  const std::weak_ptr<Notice> weak = notice;
  op->keep_alive = std::make_shared<std::pair<std::shared_ptr<Notice>, std::shared_ptr<void>>>(
      std::move(notice), std::move(bytes));
  *handle = made.get();  // `done` may look at it
  try {
    const std::lock_guard lock(comm->shared->starting);
    comm->shared->comm->messages().start(op);
  } catch (...) {
    if (const auto mine = weak.lock()) mine->retract();
    *handle = nullptr;
    throw;
  }
  made.release();
}

std::shared_ptr<MessageOp> op_of(pycoll_comm* comm, const pycoll_message& message) {
  return std::make_shared<MessageOp>(message_of(message, comm->shared->comm->size()));
}

}  // namespace

int start_message(pycoll_comm* comm, const pycoll_message* message, pycoll_done done, void* context,
                  pycoll_handle** handle, pycoll_error* error) {
  return guarded_call(error, [&] {
    start_op(comm, *message, op_of(comm, *message), nullptr, done, context, handle);
    return static_cast<int>(PYCOLL_OK);
  });
}

size_t max_staged_bytes(pycoll_comm* comm) {
  size_t max_bytes = SIZE_MAX;
  guarded_call(nullptr, [&] {
    (void)device_table();  // raises if there is none
    if (comm->shared->comm->messages().carries_devices()) {
      max_bytes = DeviceMessages::kMaxMailboxBytes;
    }
    return static_cast<int>(PYCOLL_OK);
  });
  return max_bytes;
}

int copy_for_send(pycoll_comm* comm, const void* data, size_t nbytes, int device, void* stream,
                  pycoll_device_bytes** bytes, pycoll_error* error) {
  return guarded_call(error, [&] {
    const Device its(device_table(), device);
    DeviceMessages& messages = comm->shared->comm->messages().device_messages();
    *bytes = new pycoll_device_bytes{messages.stage(its, data, nbytes, stream), its, stream};
    return static_cast<int>(PYCOLL_OK);
  });
}

void release_device_bytes(pycoll_device_bytes* bytes) {
  const std::unique_ptr<pycoll_device_bytes> own(bytes);
  if (own->is_sent) return;
  guarded_call(nullptr, [&] {
    own->device.synchronize(own->stream);  // the next send may use the memory
    return static_cast<int>(PYCOLL_OK);
  });
}

int start_device_message(pycoll_comm* comm, const pycoll_message* message, int device,
                         pycoll_device_bytes* bytes, pycoll_done done, void* context,
                         pycoll_handle** handle, pycoll_error* error) {
  return guarded_call(error, [&] {
    std::shared_ptr<MessageOp> op = op_of(comm, *message);
    op->device = device;
    std::shared_ptr<DeviceMessages::Bytes> sent;
    if (bytes != nullptr) {
      bytes->is_sent = true;
      sent = bytes->bytes;
      op->data = sent->data();
      op->offer = sent->offer();
    }
    start_op(comm, *message, std::move(op), std::move(sent), done, context, handle);
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
