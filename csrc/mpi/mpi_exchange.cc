// Exchanges values among the ranks of an MPI communicator: rank 0 collects them and sends them to
// all. It uses point-to-point messages, so that rank 0 can name the missing ranks.
#include <cstring>

#include "base/ending.h"
#include "bootstrap/join/joining.h"
#include "bootstrap/join/serialize.h"
#include "mpi/runtime.h"

namespace pycoll::PYCOLL_MPI_ABI {
namespace {

// Tags that differ from those of a wire over the same communicator (mpi_wire.cc).
constexpr int kSizeTag = 30'001;
constexpr int kBytesTag = 30'002;
/// Largest value of one rank.
constexpr size_t kMaxValueBytes = size_t{16} << 20;

/// Memory that MPI may still read or write after a deadline has passed or a signal ended the wait.
/// It is freed only when its request is done.
struct Message {
  MPI_Request request = MPI_REQUEST_NULL;
  uint64_t nbytes = 0;
  std::string bytes;
};

}  // namespace

std::vector<std::string> Comm::exchange(const std::string& own, const Deadline& deadline) {
  const MpiApi& api = shared_->api;
  const auto post = [&](bool sends, int peer, void* data, size_t nbytes, int tag, MPI_Request* to) {
    const std::lock_guard lock(shared_->mutex);
    if (shared_->over) throw UsageError("cannot exchange values: MPI has ended");
    const int count = static_cast<int>(nbytes);
    api.check(sends ? api.Isend(data, count, MPI_BYTE, peer, tag, comm_, to)
                    : api.Irecv(data, count, MPI_BYTE, peer, tag, comm_, to),
              sends ? "MPI_Isend" : "MPI_Irecv");
  };
  const auto send = [&](int peer, const std::string& bytes, const Deadline& end) {
    auto* size = new Message{MPI_REQUEST_NULL, bytes.size(), {}};
    auto* body = new Message{MPI_REQUEST_NULL, 0, bytes};
    post(true, peer, &size->nbytes, sizeof(size->nbytes), kSizeTag, &size->request);
    post(true, peer, body->bytes.data(), body->bytes.size(), kBytesTag, &body->request);
    if (!wait_for(*shared_, &size->request, MPI_STATUS_IGNORE, end) ||
        !wait_for(*shared_, &body->request, MPI_STATUS_IGNORE, end)) {
      return false;
    }
    delete size;
    delete body;
    return true;
  };
  const auto receive = [&](int peer, std::string* bytes, size_t max_bytes, const Deadline& end) {
    auto* message = new Message;
    post(false, peer, &message->nbytes, sizeof(message->nbytes), kSizeTag, &message->request);
    if (!wait_for(*shared_, &message->request, MPI_STATUS_IGNORE, end)) return false;
    if (message->nbytes > max_bytes) {
      const uint64_t nbytes = message->nbytes;
      delete message;
      throw MpiError("rank " + std::to_string(peer) + " announced a value of " +
                     std::to_string(nbytes) + " bytes to rank " + std::to_string(rank_) +
                     " while the ranks were joining: expected at most " +
                     std::to_string(max_bytes));
    }
    message->bytes.resize(message->nbytes);
    post(false, peer, message->bytes.data(), message->bytes.size(), kBytesTag, &message->request);
    if (!wait_for(*shared_, &message->request, MPI_STATUS_IGNORE, end)) return false;
    *bytes = std::move(message->bytes);
    delete message;
    return true;
  };

  const Deadline last_word = deadline.extended_s(kLastWordSeconds);
  std::string verdict;
  std::vector<std::string> all(static_cast<size_t>(size_));
  if (rank_ != 0) {
    if (!send(0, own, deadline) || !receive(0, &verdict, all.size() * kMaxValueBytes, last_word)) {
      throw TimeoutError(did_not_join({0}, size_, deadline.timeout_s()));
    }
  } else {
    std::vector<int> missing;
    WireWriter table;
    for (int peer = 0; peer < size_; ++peer) {
      std::string& bytes = all[static_cast<size_t>(peer)];
      if (peer == 0) {
        bytes = own;
      } else if (!receive(peer, &bytes, kMaxValueBytes, deadline)) {
        missing.push_back(peer);
      }
      table.text(bytes);
    }
    const std::string problem =
        missing.empty() ? "" : did_not_join(missing, size_, deadline.timeout_s());
    verdict = WireWriter().text(problem).bytes() + table.bytes();
    for (int peer = 1; peer < size_; ++peer) send(peer, verdict, last_word);
  }
  WireReader reader(verdict);
  const std::string_view problem = reader.text();
  if (!problem.empty()) throw TimeoutError(std::string(problem));
  for (std::string& bytes : all) bytes = std::string(reader.text());
  return all;
}

}  // namespace pycoll::PYCOLL_MPI_ABI
