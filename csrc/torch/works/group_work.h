// torch's handle on operations that were coalesced.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "torch/works/torch_work.h"

namespace pycoll::torch_backend {

class GroupWork : public c10d::Work {
 public:
  GroupWork(int rank, std::vector<c10::intrusive_ptr<PycollWork>> parts)
      : Work(rank, c10d::OpType::COALESCED), parts_(std::move(parts)) {}

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(kNoTimeout); }
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override;

 private:
  std::vector<c10::intrusive_ptr<PycollWork>> parts_;
};

}  // namespace pycoll::torch_backend
