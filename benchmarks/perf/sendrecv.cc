#include "perf/sendrecv.h"

namespace pycoll::perf {
namespace {

// Block b goes from rank b to the next one.
bool at_sender(const BlockAt& at) { return at.rank == at.block; }
bool at_receiver(const BlockAt& at) { return at.rank == (at.block + 1) % at.num_ranks; }

Goal senders_at_receiver(const BlockAt& at) {
  return at_receiver(at) ? Goal{Goal::Kind::kStart, at.block} : Goal{};
}

constexpr CollectiveInfo kRow = {
    kSendRecv,
    "sendrecv",
    /*has_op=*/false,
    /*has_root=*/false,
    Blocks::kPerRank,
    at_sender,
    senders_at_receiver,
    [](const BlockAt& at) { return at_sender(at) ? 0 : kNoBlock; },
    [](const BlockAt& at) { return at_receiver(at) ? 0 : kNoBlock; },
    [](int) { return 1; },
    [](int) { return 1.0; },
};

}  // namespace

const CollectiveInfo& row_of(std::string_view name) {
  return name == kRow.name ? kRow : info(collective_from_name(name));
}

SendRecv::SendRecv(Communicator& comm, const Call& call) : comm_(comm) {
  send_.dtype = recv_.dtype = call.dtype;
  send_.nbytes = recv_.nbytes = static_cast<size_t>(call.count) * dtype_size(call.dtype);
  send_.is_send = true;
  send_.peer = (comm.rank() + 1) % comm.size();
  send_.data = static_cast<std::byte*>(const_cast<void*>(call.input));  // which it only reads
  recv_.peer = (comm.rank() + comm.size() - 1) % comm.size();
  recv_.data = static_cast<std::byte*>(call.output);
  for (int i = 0; i < 2; ++i) ops_.push_back(std::make_shared<MessageOp>());
}

void SendRecv::run(int num_calls) {
  PointToPoint& messages = comm_.messages();
  for (int i = 0; i < num_calls; ++i) {
    *ops_[0] = send_;
    *ops_[1] = recv_;
    messages.post_all(ops_, /*alone=*/false);
    messages.wait_for_all(ops_, {});
  }
}

void SendRecv::run_queued(int num_calls, double timeout_s) {
  PointToPoint& messages = comm_.messages();
  std::vector<std::shared_ptr<MessageOp>> started;
  started.reserve(2 * static_cast<size_t>(num_calls));
  for (int i = 0; i < num_calls; ++i) {
    for (const MessageOp& op : {send_, recv_}) {
      started.push_back(std::make_shared<MessageOp>(op));
      messages.start(started.back());
    }
  }
  for (const auto& op : started) {
    while (!messages.wait(*op, timeout_s)) {
    }
  }
}

}  // namespace pycoll::perf
