// Carries packets between hosts (network namespaces), each some time after it was sent.
//
//   carrier SETTINGS NAMESPACE...
//
// Makes a TUN device eth0 in each namespace; a line on standard output says that all are there.
// SETTINGS is a descriptor of shared memory: the delay of one way in seconds, and how many bytes
// per second a port receives (0: no limit), both doubles. Ends when it is killed.

#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <queue>
#include <vector>

namespace {

constexpr size_t kVnetHeader = 10;  // before each packet: how it is to be cut
constexpr size_t kMaxPacket = kVnetHeader + (64 << 10);
constexpr int kBatch = 64;

struct Settings {
  volatile double delay_s;
  volatile double bytes_per_s;
};

using Buffer = std::array<char, kMaxPacket>;

struct Packet {
  double arrives_s;
  uint64_t number;  // of two that arrive together, the first that was sent goes first
  size_t to;
  Buffer* buffer;
  size_t nbytes;
  bool operator>(const Packet& other) const {
    return arrives_s != other.arrives_s ? arrives_s > other.arrives_s : number > other.number;
  }
};

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "carrier: %s: %s\n", what, std::strerror(errno));
  std::exit(1);
}

double now_s() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

int open_tun(const char* network_namespace) {
  const int space = ::open(network_namespace, O_RDONLY | O_CLOEXEC);
  if (space < 0 || ::setns(space, CLONE_NEWNET) != 0) fail(network_namespace);
  ::close(space);
  const int device = ::open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  ifreq request{};
  std::strcpy(request.ifr_name, "eth0");
  request.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR;
  if (device < 0 || ::ioctl(device, TUNSETIFF, &request) != 0) fail("TUNSETIFF");
  // Packets of up to 64 KiB, as for a card that cuts them.
  if (::ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4) != 0) fail("TUNSETOFFLOAD");
  return device;
}

/// A switch, whose ports receive one packet at a time.
class Carrier {
 public:
  Carrier(const Settings& settings, std::vector<pollfd> devices)
      : settings_(settings), devices_(std::move(devices)), received_s_(devices_.size()) {}

  [[noreturn]] void run() {
    while (true) {
      deliver();
      wait();
      for (size_t from = 0; from < devices_.size(); ++from) {
        if ((devices_[from].revents & POLLIN) != 0) take(from);
      }
    }
  }

 private:
  void wait() {
    timespec left{};
    if (!waiting_.empty()) {
      const double seconds = std::max(waiting_.top().arrives_s - now_s(), 0.0);
      left.tv_sec = static_cast<time_t>(seconds);
      left.tv_nsec = static_cast<long>(1e9 * (seconds - static_cast<double>(left.tv_sec)));
    }
    if (::ppoll(devices_.data(), devices_.size(), waiting_.empty() ? nullptr : &left, nullptr) < 0)
      fail("ppoll");
  }

  void take(size_t from) {
    for (int i = 0; i < kBatch; ++i) {
      Buffer* buffer = free_buffer();
      const ssize_t count = ::read(devices_[from].fd, buffer->data(), kMaxPacket);
      const auto* ip = reinterpret_cast<const uint8_t*>(buffer->data()) + kVnetHeader;
      // Carries IPv4 only; host i has an address that ends in i + 1.
      const bool known = count > static_cast<ssize_t>(kVnetHeader + 20) && ip[0] >> 4 == 4 &&
                         ip[19] >= 1 && ip[19] <= devices_.size();
      if (!known) {
        free_.push_back(buffer);
        if (count < 0) return;
        continue;
      }
      const size_t to = ip[19] - 1u;
      double arrives_s = now_s();
      if (settings_.bytes_per_s > 0) {
        // What comes from several hosts at once waits. The sender's port was busy with this one
        // before, and receiving goes on at the same time: so a lone packet does not wait.
        const double busy_s = static_cast<double>(count - kVnetHeader) / settings_.bytes_per_s;
        arrives_s = received_s_[to] = std::max(arrives_s, received_s_[to] + busy_s);
      }
      waiting_.push(
          {arrives_s + settings_.delay_s, number_++, to, buffer, static_cast<size_t>(count)});
    }
  }

  void deliver() {
    while (!waiting_.empty() && waiting_.top().arrives_s <= now_s()) {
      const Packet packet = waiting_.top();
      waiting_.pop();
      // What a full queue does not take is lost, as on a network.
      [[maybe_unused]] const ssize_t written =
          ::write(devices_[packet.to].fd, packet.buffer->data(), packet.nbytes);
      free_.push_back(packet.buffer);
    }
  }

  Buffer* free_buffer() {
    if (free_.empty()) return new Buffer;
    Buffer* buffer = free_.back();
    free_.pop_back();
    return buffer;
  }

  const Settings& settings_;
  std::vector<pollfd> devices_;
  std::vector<double> received_s_;  // until then a port receives what it has
  std::priority_queue<Packet, std::vector<Packet>, std::greater<>> waiting_;
  std::vector<Buffer*> free_;
  uint64_t number_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: carrier SETTINGS NAMESPACE...\n");
    return 2;
  }
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  // A carrier that waits for a core is a slower network; without the right to it, it is one.
  const sched_param priority{.sched_priority = 2};
  ::sched_setscheduler(0, SCHED_RR, &priority);
  const void* shared =
      ::mmap(nullptr, sizeof(Settings), PROT_READ, MAP_SHARED, std::atoi(argv[1]), 0);
  if (shared == MAP_FAILED) fail("SETTINGS");
  std::vector<pollfd> devices;
  for (int i = 2; i < argc; ++i) devices.push_back({open_tun(argv[i]), POLLIN, 0});
  std::puts("ready");
  std::fflush(stdout);
  Carrier(*static_cast<const Settings*>(shared), std::move(devices)).run();
}
