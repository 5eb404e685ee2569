// A rank must not take another process for its peer: pids differ between namespaces and are used
// again, and processes of one program hold the same things at the same addresses.
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <new>
#include <string>

#include "base/error.h"
#include "transport/memory/mapping.h"
#include "transport/memory/peer_memory.h"
#include "transport/memory/process_memory.h"
#include "transport/transport.h"

namespace pycoll {
namespace {

int num_failures = 0;

void expect(bool good, const std::string& what) {
  if (good) return;
  ++num_failures;
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
}

/// Two ranks, of which the first knows the second by this pid.
class TwoProcesses final : public Transport {
 public:
  TwoProcesses(Segment& segment, int rank, pid_t other)
      : segment_(segment), rank_(rank), other_(other) {}
  std::string_view name() const override { return "shm"; }
  std::string group_name() const override { return "check"; }
  int rank() const override { return rank_; }
  int num_ranks() const override { return 2; }
  Segment& segment() override { return segment_; }
  std::shared_ptr<SharedHeap> heap() override { return nullptr; }
  bool shares_address_space() const override { return false; }
  pid_t pid(int peer) const override { return peer == rank_ ? ::getpid() : other_; }
  std::optional<int> ended_by(int, Look) override { return std::nullopt; }
  std::unique_ptr<Transport> make_subgroup(std::span<const int>, const std::string&,
                                           const Deadline&) override {
    return nullptr;
  }
  void release() override {}

 private:
  Segment& segment_;
  int rank_;
  pid_t other_;
};

constexpr uint64_t kSecret = 0x5ec7e7;

// At one address in all the processes: where the second rank's token is, another process has one.
alignas(PeerMemory) std::byte place[sizeof(PeerMemory)];
uint64_t secret = 0;

/// A process that is rank 1 of this segment, until it is killed.
pid_t fork_rank(Segment& segment, uint64_t its_secret) {
  int ready[2];
  if (::pipe(ready) != 0) throw_system_error("pipe");
  const pid_t child = ::fork();
  if (child == 0) {
    TwoProcesses transport(segment, 1, ::getppid());
    new (place) PeerMemory(transport);
    secret = its_secret;
    if (::write(ready[1], "", 1) != 1) ::_exit(1);
    for (;;) ::pause();
  }
  char byte;
  expect(::read(ready[0], &byte, 1) == 1, "the child got ready");
  ::close(ready[0]);
  ::close(ready[1]);
  return child;
}

void check(Segment& segment, pid_t known_as, bool is_peer, const char* what) {
  TwoProcesses transport(segment, 0, known_as);
  PeerMemory memory(transport);
  uint64_t word = 0;
  const bool read = memory.read(1, &word, reinterpret_cast<uint64_t>(&secret), sizeof(word));
  expect(memory.reaches(1) == is_peer, std::string(what) + ": reaches");
  expect(read == is_peer && word == (is_peer ? kSecret : 0), std::string(what) + ": read");
}

int run() {
  uint64_t word = 0;
  if (!read_process(::getpid(), reinterpret_cast<uint64_t>(&secret), &word, sizeof(word))) {
    std::printf("peer memory: the system forbids process_vm_readv, 0 failures\n");
    return 0;
  }
  const size_t bytes = SegmentLayout::for_ranks(2).total_bytes;
  const Mapping memory(-1, bytes);
  const Mapping other_memory(-1, bytes);
  Segment segment(memory.base(), 2);
  Segment other_segment(other_memory.base(), 2);
  const pid_t peer = fork_rank(segment, kSecret);
  const pid_t outsider = fork_rank(other_segment, kSecret + 1);
  check(segment, peer, true, "the peer");
  check(segment, outsider, false, "a rank of another communicator");
  check(segment, ::getpid(), false, "this very process");
  check(segment, 0, false, "a process without a number here");
  for (const pid_t child : {peer, outsider}) {
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
  }
  check(segment, peer, false, "a process that has ended");
  std::printf("peer memory, %d failures\n", num_failures);
  return num_failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace pycoll

int main() { return pycoll::run(); }
