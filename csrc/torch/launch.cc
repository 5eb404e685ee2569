// Common launch path of all operations, from the backend to the core.
#include <unistd.h>

#include "torch/backend.h"
#include "torch/works/device_message.h"

namespace pycoll::torch_backend {

const at::Tensor& only(const Tensors& tensors, const char* what) {
  TORCH_CHECK_VALUE(tensors.size() == 1, what, " takes one tensor per rank, got ", tensors.size());
  return tensors[0];
}

template <class WorkType>
c10::intrusive_ptr<WorkType> PycollBackend::make_work(Operation operation, bool is_message) {
  const uint64_t sequence = is_message ? ++message_sequence_ : ++sequence_;
  std::optional<Tensors> inputs;
  const char* title = nullptr;
  if (at::hasCallbacks()) [[unlikely]] {  // a profiler is active
    title = operation.title;
    inputs = operation.profiled;
  }
  auto work = c10::make_intrusive<WorkType>(rank_, std::move(operation), sequence, title, inputs);
  if (onCompletionHook_) [[unlikely]] {
    work->on_completion = [hook = onCompletionHook_, sequence](PycollWork& of) {
      hook(
          std::make_shared<c10d::WorkInfo>(of.operation().type, sequence, of.started, of.finished,
                                           std::chrono::duration<float>(of.finished - of.started)));
    };
  }
  return work;
}

WorkPtr PycollBackend::launch(Operation operation, bool async) {
  const uint16_t site = sites_.here(comm_.get());
  for (pycoll_call& call : operation.calls) {
    call.site = site;
    call.deterministic = options_->deterministic ? 1 : 0;
  }
  tensor_cache_.note(operation);
  if (group_) [[unlikely]] {
    if (operation.on_device()) {
      group_->push_back(make_work<StreamWork>(std::move(operation), false));
    } else {
      group_->push_back(make_work<PycollWork>(std::move(operation), false));
    }
    return group_->back();
  }
  if (operation.on_device()) return run_on_device(std::move(operation), async);
  return async ? start(std::move(operation)) : run(std::move(operation));
}

WorkPtr PycollBackend::run(Operation operation) {
  auto work = make_work<PycollWork>(std::move(operation), false);
  const auto& calls = work->operation().calls;
  pycoll_error error;
  const int code = core().run(comm_.get(), calls.data(), calls.size(), &error);
  work->complete(code == PYCOLL_OK ? nullptr : &error);
  if (!work->isSuccess()) [[unlikely]]
    std::rethrow_exception(work->exception());
  return work;
}

WorkPtr PycollBackend::start(Operation operation) {
  auto work = make_work<PycollWork>(std::move(operation), false);
  const auto& calls = work->operation().calls;
  work->pending = pending_;
  pending_->begin(Pending::kCollective);
  pycoll_error error;
  void* const lent = PycollWork::lend(work);
  const int code =
      core().start(comm_.get(), calls.data(), calls.size(), PycollWork::done, lent, &error);
  if (code != PYCOLL_OK) {
    PycollWork::done(lent, &error);
    raise_core_error(code, error);
  }
  return work;
}

WorkPtr PycollBackend::start_message(Operation operation, pycoll_message message) {
  c10::intrusive_ptr<MessageWork> work;
  std::optional<c10::Event> after;
  MessageRoute route;
  if (operation.on_device()) {
    route = route_of(operation, message, after);
    const at::Device device = operation.device();
    const auto on_device = make_work<DeviceMessageWork>(std::move(operation), true);
    on_device->prepare(stream_beside(device, kOfMessages));
    work = on_device;
  } else {
    work = make_work<MessageWork>(std::move(operation), true);
  }
  work->pending = pending_;
  work->kind = Pending::kMessage;
  pending_->begin(Pending::kMessage);
  message.site = sites_.here(comm_.get());
  if (group_) group_->push_back(work);
  const auto start = [this, work, message, route](const pycoll_error* error) {
    error != nullptr ? work->complete(error) : work->start(comm_.get(), message, route);
  };
  starter_->start(std::move(after), start);
  if (const std::exception_ptr error = work->exception()) std::rethrow_exception(error);
  return work;
}

}  // namespace pycoll::torch_backend
