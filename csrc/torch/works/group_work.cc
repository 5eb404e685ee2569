#include "torch/works/group_work.h"

#include <algorithm>

namespace pycoll::torch_backend {

bool GroupWork::isCompleted() {
  return std::all_of(parts_.begin(), parts_.end(), [](auto& part) { return part->isCompleted(); });
}

bool GroupWork::isSuccess() const {
  return std::all_of(parts_.begin(), parts_.end(), [](auto& part) { return part->isSuccess(); });
}

std::exception_ptr GroupWork::exception() const {
  for (const auto& part : parts_) {
    if (const std::exception_ptr error = part->exception()) return error;
  }
  return nullptr;
}

bool GroupWork::wait(std::chrono::milliseconds timeout) {
  // Waits for all operations even if one fails: no tensor may still be in use afterwards.
  std::exception_ptr error;
  for (const auto& part : parts_) {
    try {
      part->wait(timeout);
    } catch (...) {
      if (!error) error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
  return true;
}

std::vector<at::Tensor> GroupWork::result() {
  std::vector<at::Tensor> all;
  for (const auto& part : parts_) {
    const std::vector<at::Tensor> outputs = part->result();
    all.insert(all.end(), outputs.begin(), outputs.end());
  }
  return all;
}

c10::intrusive_ptr<c10::ivalue::Future> GroupWork::getFuture() {
  const auto type = c10::ListType::create(c10::TensorType::get());
  c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(c10::FutureType::create(type));
  for (const auto& part : parts_) futures.push_back(part->getFuture());
  return c10::collectAll(futures)->then(
      [outputs = result()](c10::ivalue::Future& all) {
        all.value();  // raises the error of a failed operation
        return c10::IValue(outputs);
      },
      type);
}

uint64_t GroupWork::getSequencenumber() const {
  return parts_.empty() ? 0 : parts_.back()->getSequencenumber();
}

}  // namespace pycoll::torch_backend
