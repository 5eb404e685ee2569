// Operations on device tensors: choice of streams, and the waits between them.
#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include "torch/backend.h"

namespace pycoll::torch_backend {
namespace {

bool capturing(at::Device device) {
  const c10::impl::VirtualGuardImpl guard = guard_of(device);
  return core().is_capturing(device.index(), guard.getStream(device).native_handle()) != 0;
}

/// Gives a message a buffer in CPU memory: a copy of the bytes of a send is queued; those of a
/// receive are copied to the tensor when it finishes.
void stage(Operation& operation, const at::Tensor& tensor, pycoll_message& message) {
  const at::NoGradGuard no_grad;
  const at::TensorOptions on_host =
      tensor.options().device(at::kCPU).pinned_memory(tensor.is_cuda());
  operation.kept.push_back(at::empty(tensor.sizes(), on_host));
  const at::Tensor staged = operation.kept.back();
  message.data = staged.data_ptr();
  if (message.is_send != 0) {
    staged.copy_(tensor, /*non_blocking=*/true);
  } else {
    operation.copies.assign(1, {tensor, staged});
  }
}

}  // namespace

c10::Stream PycollBackend::stream_beside(at::Device device, StreamUse use) {
  const std::lock_guard lock(streams_mutex_);
  const auto key = std::pair(device.index(), use);
  const auto found = streams_.find(key);
  if (found != streams_.end()) return found->second;
  return streams_.emplace(key, guard_of(device).getStreamFromGlobalPool(device)).first->second;
}

/// Prepares the message of a device tensor, which may start after the event `after`.
MessageRoute PycollBackend::route_of(Operation& operation, pycoll_message& message,
                                     std::optional<c10::Event>& after) {
  const bool is_send = message.is_send != 0;
  const at::Tensor tensor = is_send ? operation.kept.back() : operation.outputs.back();
  const at::Device device = tensor.device();
  TORCH_CHECK(!capturing(device), operation.title,
              ": cannot be captured: the host moves the bytes of messages");
  const c10::Stream stream = guard_of(device).getStream(device);
  MessageRoute route;
  if (message.nbytes <= core().max_staged_bytes(comm_.get())) {
    stage(operation, tensor, message);
    if (!is_send) return route;  // the tensor is written later, on a stream
  } else {
    route.device = device.index();
    if (is_send) {
      pycoll_device_bytes* bytes = nullptr;
      pycoll_error error;
      check(core().copy_for_send(comm_.get(), message.data, message.nbytes, device.index(),
                                 stream.native_handle(), &bytes, &error),
            error);
      route.bytes = {bytes, core().release_device_bytes};
    }
  }
  after.emplace(device.type());
  after->record(stream);
  return route;
}

WorkPtr PycollBackend::run_on_device(Operation operation, bool async) {
  auto work = make_work<StreamWork>(std::move(operation), false);
  give({work}, async);
  return work;
}

/// Submits works to their device in one launch.
void PycollBackend::give(const StreamWorks& works, bool async) {
  const at::Device device = works[0]->operation().device();
  const c10::DeviceGuard on_device(device);
  const c10::Stream current = guard_of(device).getStream(device);
  const c10::Stream stream = async ? stream_beside(device, kOfCollectives) : current;
  std::vector<pycoll_call> calls;
  for (const auto& work : works) {
    TORCH_CHECK_VALUE(
        work->operation().device() == device, "pycoll: a coalesced group with tensors on ", device,
        " and ", work->operation().device(), ": coalesce the tensors of each device separately");
    calls.insert(calls.end(), work->operation().calls.begin(), work->operation().calls.end());
  }
  if (async) {
    c10::Event ready(device.type());
    ready.record(current);
    ready.block(stream);
  }
  pycoll_device_work* handle = nullptr;
  pycoll_error error;
  const int code = core().run_on_device(comm_.get(), calls.data(), calls.size(), device.index(),
                                        stream.native_handle(), &handle, &error);
  if (code != PYCOLL_OK) {
    for (const auto& work : works) work->refused(error);
    raise_core_error(code, error);
  }
  GivenWork given;
  if (handle != nullptr) given = GivenWork(handle, core().release_device_work);
  for (const auto& work : works) work->given(given, stream, async);
}

void PycollBackend::eagerConnectSingleDevice(at::Device device) {
  if (device.is_cpu()) return;
  // The first operation sets up the links.
  c10d::BarrierOptions options;
  options.device = device;
  options.asyncOp = false;
  barrier(options)->wait();
}

}  // namespace pycoll::torch_backend
