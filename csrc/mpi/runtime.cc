#include "mpi/runtime.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "mpi/mpi_wire.h"

namespace pycoll::PYCOLL_MPI_ABI {
namespace {

constexpr double kPatienceSeconds = 5;
constexpr double kForeverSeconds = 1e9;
constexpr int64_t kGoodbyeNs = 200'000'000;
constexpr int kManyTests = 20'000;  // after that, sleep and leave the CPU to other threads

/// Converts a handle, which is a pointer in one ABI and a number in another.
MPI_Comm from_handle(uintptr_t handle) { return (MPI_Comm)handle; }

/// First line of the library's version text, without its build details.
std::string first_line(const char* text) {
  std::string line(text, std::strcspn(text, "\n"));
  for (char& c : line) {
    if (c == '\t') c = ' ';
  }
  line.erase(
      std::unique(line.begin(), line.end(), [](char a, char b) { return a == ' ' && b == ' '; }),
      line.end());
  return line;
}

}  // namespace

Runtime::Runtime(const MpiApi& api) : shared_(std::make_shared<Shared>()), pid_(::getpid()) {
  shared_->api = api;
  int runs = 0;
  int finalized = 0;
  api.check(api.Initialized(&runs), "MPI_Initialized");
  api.check(api.Finalized(&finalized), "MPI_Finalized");
  if (finalized != 0) throw UsageError("cannot use MPI after MPI_Finalize");
  int level = MPI_THREAD_SINGLE;
  if (runs == 0) {
    // The highest level, since the program may later call MPI beside pycoll's thread.
    api.check(api.Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level), "MPI_Init_thread");
    started_here_ = true;
    if (level < MPI_THREAD_SERIALIZED) {
      throw MpiError("this MPI allows calls from one thread only (MPI_Init_thread gave " +
                     std::to_string(level) + "); set PYCOLL_TRANSPORT=tcp to do without MPI");
    }
  } else {
    api.check(api.Query_thread(&level), "MPI_Query_thread");
    if (level < MPI_THREAD_SERIALIZED) {
      throw UsageError(
          "MPI was initialised for one thread, expected MPI_THREAD_MULTIPLE, or "
          "MPI_THREAD_SERIALIZED with links that progress within calls only. With mpi4py, set "
          "mpi4py.rc.thread_level = 'multiple' before `from mpi4py import MPI`; or set "
          "PYCOLL_TRANSPORT=tcp to do without MPI's links");
    }
    if (level < MPI_THREAD_MULTIPLE) threads_ = MpiThreads::kCallerOnly;
  }
  char text[MPI_MAX_LIBRARY_VERSION_STRING] = {};
  int length = 0;
  api.check(api.Get_library_version(text, &length), "MPI_Get_library_version");
  version_ = first_line(text);
  api.check(api.Comm_rank(MPI_COMM_WORLD, &world_rank_), "MPI_Comm_rank");
  api.check(api.Comm_size(MPI_COMM_WORLD, &world_size_), "MPI_Comm_size");
}

std::shared_ptr<MpiComm> Runtime::duplicate_world(const Deadline& deadline) {
  return duplicate_comm(MPI_COMM_WORLD, deadline);
}

std::shared_ptr<MpiComm> Runtime::duplicate(uintptr_t handle, const Deadline& deadline) {
  const MPI_Comm comm = from_handle(handle);
  if (comm == MPI_COMM_NULL) throw UsageError("mpi is MPI.COMM_NULL");
  int inter = 0;
  {
    const std::lock_guard lock(shared_->mutex);
    shared_->api.check(shared_->api.Comm_test_inter(comm, &inter), "MPI_Comm_test_inter");
  }
  if (inter != 0) throw UsageError("mpi is an intercommunicator: merge it first (Intercomm.Merge)");
  return duplicate_comm(comm, deadline);
}

std::shared_ptr<MpiComm> Runtime::duplicate_comm(MPI_Comm comm, const Deadline& deadline) {
  const MpiApi& api = shared_->api;
  // Leaked if the deadline passes, because MPI may still write into it.
  auto made = std::make_unique<MPI_Comm>(MPI_COMM_NULL);
  MPI_Request request = MPI_REQUEST_NULL;
  {
    const std::lock_guard lock(shared_->mutex);
    if (shared_->over) throw UsageError("cannot make a communicator: MPI has ended");
    api.check(api.Comm_idup(comm, made.get(), &request), "MPI_Comm_idup");
  }
  if (!wait_for(*shared_, &request, MPI_STATUS_IGNORE, deadline)) {
    (void)made.release();
    throw TimeoutError("not all ranks of the MPI communicator joined within " +
                       std::to_string(static_cast<int>(deadline.timeout_s())) +
                       " s: all of them must call pycoll.init");
  }
  return std::make_shared<Comm>(shared_, *made);
}

std::shared_ptr<MpiComm> Runtime::of_members(const std::vector<int>& world_ranks,
                                             const std::string& name) {
  const MpiApi& api = shared_->api;
  const std::lock_guard lock(shared_->mutex);
  if (shared_->over) throw UsageError("cannot make a communicator: MPI has ended");
  unsigned hash = 5381;
  for (const char c : name) hash = hash * 33 + static_cast<unsigned char>(c);
  MPI_Group world;
  MPI_Group members;
  MPI_Comm comm = MPI_COMM_NULL;
  api.check(api.Comm_group(MPI_COMM_WORLD, &world), "MPI_Comm_group");
  const int code =
      api.Group_incl(world, static_cast<int>(world_ranks.size()), world_ranks.data(), &members);
  api.Group_free(&world);
  api.check(code, "MPI_Group_incl");
  // 32767 is the largest tag that every MPI has.
  const int made =
      api.Comm_create_group(MPI_COMM_WORLD, members, static_cast<int>(hash % 32768), &comm);
  api.Group_free(&members);
  api.check(made, "MPI_Comm_create_group");
  return std::make_shared<Comm>(shared_, comm);
}

void Runtime::finish(bool in_order) {
  if (pid_ != ::getpid()) return;
  const std::lock_guard lock(shared_->mutex);
  if (shared_->over) return;
  const MpiApi& api = shared_->api;
  int finalized = 0;
  api.Finalized(&finalized);
  if (finalized != 0) {
    shared_->over = true;
    return;
  }
  for (MpiWire* wire : shared_->wires) wire->say_goodbye();
  bool all_are_here = false;
  if (started_here_ && in_order) {
    // MPI_Finalize waits for all ranks. After a failure some rank may never call it.
    const double patience_s = shared_->saw_failure ? kPatienceSeconds : kForeverSeconds;
    MPI_Request request = MPI_REQUEST_NULL;
    all_are_here = api.Ibarrier(MPI_COMM_WORLD, &request) == MPI_SUCCESS &&
                   wait_for(*shared_, &request, MPI_STATUS_IGNORE, Deadline::after_s(patience_s));
  }
  for (MpiWire* wire : shared_->wires) wire->end(kGoodbyeNs);
  shared_->over = true;
  if (all_are_here) api.Finalize();
}

Comm::Comm(std::shared_ptr<Shared> shared, MPI_Comm comm)
    : shared_(std::move(shared)), comm_(comm) {
  const std::lock_guard lock(shared_->mutex);
  const MpiApi& api = shared_->api;
  // Makes the loss of a rank an error code instead of the end of the program.
  api.check(api.Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  api.check(api.Comm_rank(comm_, &rank_), "MPI_Comm_rank");
  api.check(api.Comm_size(comm_, &size_), "MPI_Comm_size");
}

Comm::~Comm() {
  if (disowned_) return;
  const std::lock_guard lock(shared_->mutex);
  if (!shared_->over) shared_->api.Comm_free(&comm_);
}

std::unique_ptr<Wire> Comm::make_wire(const std::vector<int>& peers) {
  return std::make_unique<MpiWire>(shared_from_this(), peers);
}

bool wait_for(Shared& shared, MPI_Request* request, MPI_Status* status, const Deadline& deadline) {
  for (int64_t i = 0;; ++i) {
    int done = 0;
    {
      const std::lock_guard lock(shared.mutex);
      shared.api.check(shared.api.Test(request, &done, status), "MPI_Test");
    }
    if (done != 0) return true;
    if (deadline.expired()) return false;
    if (i % 64 == 0) deadline.check_interrupt();
    if (i < kManyTests) {
      ::sched_yield();
    } else {
      ::usleep(1000);
    }
  }
}

std::unique_ptr<Mpi> start(void* library, const std::string& path) {
  return std::make_unique<Runtime>(MpiApi::load(library, path));
}

}  // namespace pycoll::PYCOLL_MPI_ABI
