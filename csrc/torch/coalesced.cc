// Several operations as one: the core runs their calls in sequence, in one operation.
#include "torch/backend.h"

namespace pycoll::torch_backend {
namespace {

using c10d::OpType;

void check_pairs(size_t num_outputs, size_t num_inputs, const char* what) {
  TORCH_CHECK_VALUE(num_outputs == num_inputs, what, ": ", num_outputs, " outputs for ", num_inputs,
                    " inputs");
}

}  // namespace

WorkPtr PycollBackend::allreduce_coalesced(Tensors& tensors,
                                           const c10d::AllreduceCoalescedOptions& opts) {
  Operation operation(OpType::ALLREDUCE_COALESCED, "pycoll:all_reduce", opts.timeout);
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor x = operation.in_out(tensor);
    pycoll_call& call = operation.add(PYCOLL_ALL_REDUCE, x);
    operation.set_reduction(call, opts.reduceOp, x.scalar_type());
    call.input = call.output = x.data_ptr();
  }
  return launch(std::move(operation), opts.asyncOp);
}

WorkPtr PycollBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                       const c10d::AllgatherOptions& opts) {
  Operation operation(OpType::COALESCED, "pycoll:all_gather_into_tensor", opts.timeout);
  check_pairs(outputs.size(), inputs.size(), operation.title);
  for (size_t i = 0; i < inputs.size(); ++i) add_all_gather(operation, outputs[i], inputs[i]);
  return launch(std::move(operation), opts.asyncOp);
}

WorkPtr PycollBackend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                           const c10d::AllgatherOptions& opts) {
  Operation operation(OpType::ALLGATHER_COALESCED, "pycoll:all_gather", opts.timeout);
  TORCH_CHECK_VALUE(outputs.size() == static_cast<size_t>(size_), operation.title, ": ",
                    outputs.size(), " lists of outputs, expected one for each of the ", size_,
                    " ranks");
  for (const Tensors& of_rank : outputs) {
    check_pairs(of_rank.size(), inputs.size(), operation.title);
  }
  for (size_t i = 0; i < inputs.size(); ++i) {
    Tensors results;
    for (const Tensors& of_rank : outputs) results.push_back(of_rank[i]);
    add_all_gather_list(operation, results, inputs[i]);
  }
  return launch(std::move(operation), opts.asyncOp);
}

WorkPtr PycollBackend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                       const c10d::ReduceScatterOptions& opts) {
  Operation operation(OpType::COALESCED, "pycoll:reduce_scatter_tensor", opts.timeout);
  check_pairs(outputs.size(), inputs.size(), operation.title);
  for (size_t i = 0; i < inputs.size(); ++i) {
    add_reduce_scatter(operation, outputs[i], inputs[i], opts.reduceOp);
  }
  return launch(std::move(operation), opts.asyncOp);
}

void PycollBackend::startCoalescing() {
  TORCH_CHECK(!group_, "pycoll: startCoalescing within startCoalescing");
  group_.emplace();
}

WorkPtr PycollBackend::endCoalescing() {
  TORCH_CHECK(group_.has_value(), "pycoll: endCoalescing without startCoalescing");
  std::vector<c10::intrusive_ptr<PycollWork>> works = std::move(*group_);
  group_.reset();
  start_group(works);
  return c10::make_intrusive<GroupWork>(rank_, std::move(works));
}

/// Starts the collectives of a group as one operation; its messages were started when called.
void PycollBackend::start_group(const std::vector<c10::intrusive_ptr<PycollWork>>& works) {
  using Collectives = std::vector<c10::intrusive_ptr<PycollWork>>;
  auto collectives = std::make_unique<Collectives>();
  std::vector<pycoll_call> calls;
  StreamWorks on_device;
  for (const auto& work : works) {
    if (work->operation().calls.empty()) continue;
    if (work->operation().on_device()) {
      on_device.push_back(c10::static_intrusive_pointer_cast<StreamWork>(work));
      continue;
    }
    collectives->push_back(work);
    calls.insert(calls.end(), work->operation().calls.begin(), work->operation().calls.end());
  }
  if (!on_device.empty()) give(on_device, true);
  if (calls.empty()) return;
  for (const auto& work : *collectives) {
    work->pending = pending_;
    pending_->begin(Pending::kCollective);
  }
  const auto done = [](void* context, const pycoll_error* error) {
    const std::unique_ptr<Collectives> own(static_cast<Collectives*>(context));
    for (const auto& work : *own) work->complete(error);
  };
  pycoll_error error;
  Collectives* const lent = collectives.release();
  const int code = core().start(comm_.get(), calls.data(), calls.size(), done, lent, &error);
  if (code != PYCOLL_OK) {
    done(lent, &error);
    raise_core_error(code, error);
  }
}

}  // namespace pycoll::torch_backend
