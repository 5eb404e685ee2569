// The c10d::Backend: torch's process group over a communicator of the core.
//
// On CPU tensors, an operation with asyncOp off runs on the caller's thread, and its work is done
// when it returns; else it runs on the communicator's progress thread, which needs no GIL.
// On device tensors, an operation runs on the caller's current stream with asyncOp off, else on a
// stream of the backend. The host waits in neither case. One backend handles both.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "torch/bridge/options.h"
#include "torch/bridge/tensor_cache.h"
#include "torch/bridge/torch_call_site.h"
#include "torch/bridge/torch_store.h"
#include "torch/works/device_message.h"
#include "torch/works/group_work.h"
#include "torch/works/torch_work.h"

namespace pycoll::torch_backend {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<std::vector<at::Tensor>>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class PycollBackend : public c10d::Backend {
 public:
  /// Collective over the group's ranks, which share `store`.
  PycollBackend(StorePtr store, int rank, int num_ranks,
                c10::intrusive_ptr<BackendOptions> options);
  ~PycollBackend() override;

  const std::string getBackendName() const override { return "pycoll"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_; }
  bool supportsSplitting() const override { return true; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds timeout) override;

  // One tensor in, one tensor out (collectives.cc).
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                        std::vector<int64_t>& input_splits,
                        const c10d::AllToAllOptions& opts) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;

  // A tensor per rank, in or out (lists.cc).
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& opts) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;

  // Several operations as one (coalesced.cc).
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  // Between two ranks (messages.cc).
  WorkPtr send(Tensors& tensors, int dst, int tag) override;
  WorkPtr recv(Tensors& tensors, int src, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  // Lifecycle of the group (lifecycle.cc).
  void eagerConnectSingleDevice(at::Device device) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  c10::intrusive_ptr<c10d::Backend> split(
      const StorePtr& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<c10d::Backend::Options>& opts) override;
  c10::intrusive_ptr<c10d::Backend> merge(const StorePtr& store,
                                          const c10::intrusive_ptr<c10d::Backend::Options>& opts,
                                          const int& rank, const int& size) override;
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;
  void registerOnCompletionHook(
      std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  void waitForPendingWorks() override;
  void enableCollectivesTiming() override {}  // works always know their times

  at::Tensor allocateTensor(long size, at::TensorOptions options) override;
  /// The core's communicator, for its records.
  pycoll_comm* comm() const { return comm_.get(); }

  /// Always true: the index lacks the device type, which allocateTensor() gets and checks.
  bool supportsTensorAlloc(c10::DeviceIndex) override { return true; }

 private:
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;

  /// Runs the operation on this thread, starts it, or adds it to the group that is being coalesced.
  WorkPtr launch(Operation operation, bool async);
  void close();
  WorkPtr run(Operation operation);
  WorkPtr start(Operation operation);
  void start_group(const std::vector<c10::intrusive_ptr<PycollWork>>& works);
  WorkPtr start_message(Operation operation, pycoll_message message);
  // Operations on a device (devices.cc).
  using StreamWorks = std::vector<c10::intrusive_ptr<StreamWork>>;
  WorkPtr run_on_device(Operation operation, bool async);
  void give(const StreamWorks& works, bool async);
  enum StreamUse { kOfCollectives, kOfMessages };
  c10::Stream stream_beside(at::Device device, StreamUse use);
  MessageRoute route_of(Operation& operation, pycoll_message& message,
                        std::optional<c10::Event>& after);
  template <class WorkType>
  c10::intrusive_ptr<WorkType> make_work(Operation operation, bool is_message);
  void add_all_gather(Operation& operation, const at::Tensor& output,
                      const at::Tensor& input) const;
  void add_reduce_scatter(Operation& operation, const at::Tensor& output, const at::Tensor& input,
                          const c10d::ReduceOp& op) const;
  void add_all_gather_list(Operation& operation, const Tensors& outputs, const at::Tensor& input);

  StorePtr store_;
  c10::intrusive_ptr<BackendOptions> options_;
  std::shared_ptr<Pending> pending_ = std::make_shared<Pending>();
  Comm comm_;
  std::shared_ptr<SharedAllocator> allocator_ = std::make_shared<SharedAllocator>(comm_);
  TensorCache tensor_cache_{comm_, options_->register_after};
  CallSites sites_;
  std::atomic<uint64_t> sequence_ = 0;          // of collectives
  std::atomic<uint64_t> message_sequence_ = 0;  // of sends and receives
  uint64_t num_monitored_ = 0;
  pid_t pid_;
  uint8_t barrier_token_ = 0;
  std::mutex streams_mutex_;
  std::map<std::pair<c10::DeviceIndex, StreamUse>, c10::Stream> streams_;
  std::unique_ptr<MessageStarter> starter_ = std::make_unique<MessageStarter>();
  // Operations that were called since startCoalescing(); none outside of a coalesced group.
  std::optional<std::vector<c10::intrusive_ptr<PycollWork>>> group_;
};

/// The only tensor of the list. Raises ValueError unless the list has exactly one.
const at::Tensor& only(const Tensors& tensors, const char* what);

}  // namespace pycoll::torch_backend
