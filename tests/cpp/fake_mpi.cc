// An MPI of one process, whose other ranks are a test: what the test sends, MpiWire receives.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <utility>

#include "frame_networks.h"

#ifdef PYCOLL_MPI_ABI
#include "mpi/mpi_wire.h"

namespace pycoll {
namespace {

constexpr int kSuccess = MPI_SUCCESS;
constexpr uint16_t kGoodbye = 1;  // as in MpiWire

struct Posted {
  void* buffer;
  int nbytes;
  MPI_Request request;
};
struct FakeMpi {
  int num_ranks = 0;
  uintptr_t next_request = 0x10000;
  std::vector<std::deque<Posted>> posted;      // by source
  std::vector<std::deque<std::string>> inbox;  // by source: messages without a posted receive
  std::map<MPI_Request, int> done;             // length of the message; -1: it was too long
  std::vector<std::string> sent;               // by destination
  std::vector<bool> reads;                     // by destination
  std::vector<MPI_Request> unread;             // sends to ranks that do not read
  int num_tests = 0;                           // since the wire's last goodbye
};
FakeMpi fake;

MPI_Request new_request() { return reinterpret_cast<MPI_Request>(fake.next_request++); }

void match(size_t source) {
  while (!fake.posted[source].empty() && !fake.inbox[source].empty()) {
    const Posted to = fake.posted[source].front();
    const std::string message = std::move(fake.inbox[source].front());
    fake.posted[source].pop_front();
    fake.inbox[source].pop_front();
    const bool fits = message.size() <= static_cast<size_t>(to.nbytes);
    std::memcpy(to.buffer, message.data(), fits ? message.size() : static_cast<size_t>(to.nbytes));
    fake.done[to.request] = fits ? static_cast<int>(message.size()) : -1;
  }
}

/// A peer answers the wire's goodbye with its own, when it has been sent: no earlier poll sees it.
void answer(size_t peer, const std::string& message) {
  FrameHeader header;
  if (message.size() != sizeof(header)) return;
  std::memcpy(&header, message.data(), sizeof(header));
  if (header.spare != kGoodbye) return;
  fake.inbox[peer].push_back(message);
  match(peer);
  fake.num_tests = 0;
}

/// Completes the request if it is done.
bool take_done(MPI_Request* request, MPI_Status* status) {
  const auto found = fake.done.find(*request);
  if (found == fake.done.end()) return false;
  if (status != MPI_STATUS_IGNORE) {
    std::memset(status, 0, sizeof(*status));
    status->MPI_ERROR = found->second < 0 ? MPI_ERR_TRUNCATE : MPI_SUCCESS;
    status->MPI_internal[0] = found->second;
  }
  fake.done.erase(found);
  *request = MPI_REQUEST_NULL;
  return true;
}

PYCOLL_MPI_ABI::MpiApi make_api() {
  PYCOLL_MPI_ABI::MpiApi api;
  api.Comm_set_errhandler = [](MPI_Comm, MPI_Errhandler) { return kSuccess; };
  api.Comm_rank = [](MPI_Comm, int* rank) { return *rank = 0, kSuccess; };
  api.Comm_size = [](MPI_Comm, int* size) { return *size = fake.num_ranks, kSuccess; };
  api.Comm_free = [](MPI_Comm*) { return kSuccess; };
  api.Irecv = [](void* buffer, int count, MPI_Datatype, int source, int, MPI_Comm,
                 MPI_Request* request) {
    *request = new_request();
    fake.posted[static_cast<size_t>(source)].push_back({buffer, count, *request});
    match(static_cast<size_t>(source));
    return kSuccess;
  };
  api.Isend = [](const void* buffer, int count, MPI_Datatype, int to, int, MPI_Comm,
                 MPI_Request* request) {
    if (!fake.reads[static_cast<size_t>(to)]) {
      fake.unread.push_back(*request = new_request());
      return kSuccess;
    }
    const std::string message(static_cast<const char*>(buffer), static_cast<size_t>(count));
    fake.sent[static_cast<size_t>(to)] += message;
    *request = new_request();
    fake.done[*request] = count;
    answer(static_cast<size_t>(to), message);
    return kSuccess;
  };
  api.Test = [](MPI_Request* request, int* flag, MPI_Status* status) {
    ++fake.num_tests;
    *flag = *request == MPI_REQUEST_NULL || take_done(request, status);
    return kSuccess;
  };
  api.Testsome = [](int count, MPI_Request* requests, int* num_done, int* indices,
                    MPI_Status* statuses) {
    *num_done = 0;
    int code = kSuccess;
    for (int i = 0; i < count; ++i) {
      MPI_Status& status = statuses[*num_done];
      if (!take_done(&requests[i], &status)) continue;
      if (status.MPI_ERROR != MPI_SUCCESS) code = MPI_ERR_IN_STATUS;
      indices[(*num_done)++] = i;
    }
    return code;
  };
  api.Get_count = [](const MPI_Status* status, MPI_Datatype, int* count) {
    return *count = status->MPI_internal[0], kSuccess;
  };
  api.Cancel = [](MPI_Request* request) {
    for (std::deque<Posted>& receives : fake.posted) {
      std::erase_if(receives, [request](const Posted& one) { return one.request == *request; });
    }
    fake.done[*request] = 0;
    return kSuccess;
  };
  return api;
}

class MpiNetwork final : public FrameNetwork {
 public:
  /// A wire whose peers have said goodbye does not go on asking for it.
  ~MpiNetwork() override {
    constexpr int kMostTests = 1000;  // some for each request
    if (fake.num_tests <= kMostTests) return;
    std::fprintf(stderr, "FAILED: %d tests of requests after the goodbyes\n", fake.num_tests);
    std::_Exit(1);
  }
  std::unique_ptr<Wire> make_wire(const std::vector<int>& peers, int num_ranks) override {
    fake = {};
    fake.num_ranks = num_ranks;
    fake.posted.resize(static_cast<size_t>(num_ranks));
    fake.inbox.resize(static_cast<size_t>(num_ranks));
    fake.sent.resize(static_cast<size_t>(num_ranks));
    fake.reads.assign(static_cast<size_t>(num_ranks), true);
    auto shared = std::make_shared<PYCOLL_MPI_ABI::Shared>();
    shared->api = make_api();
    return std::make_shared<PYCOLL_MPI_ABI::Comm>(shared, MPI_COMM_WORLD)->make_wire(peers);
  }
  bool send(int peer, const std::string& bytes, size_t* sent) override {
    fake.inbox[static_cast<size_t>(peer)].push_back(bytes.substr(*sent));
    match(static_cast<size_t>(peer));
    *sent = bytes.size();
    return true;
  }
  std::string received(int peer) override {
    return std::exchange(fake.sent[static_cast<size_t>(peer)], "");
  }
  void stop_reading(int peer) override { fake.reads[static_cast<size_t>(peer)] = false; }
  /// Reads what has not been read, so that the wire ends at once.
  void end() override {
    for (const MPI_Request request : fake.unread) fake.done[request] = 0;
    fake.reads.assign(fake.reads.size(), true);
  }
};

}  // namespace

std::unique_ptr<FrameNetwork> make_mpi_network() { return std::make_unique<MpiNetwork>(); }

}  // namespace pycoll

#else

namespace pycoll {
std::unique_ptr<FrameNetwork> make_mpi_network() { return nullptr; }
}  // namespace pycoll

#endif
