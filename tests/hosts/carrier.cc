// Holds each packet that comes to a host (a network namespace) through eth0 for some time.
//
//   carrier SETTINGS NAMESPACE...
//
// SETTINGS is a descriptor of shared memory: the delay in seconds, a double. The kernel keeps the
// packets (NFQUEUE) and tells their numbers, so none of their bytes is copied. A line on standard
// output says that this works for all hosts. Ends when it is killed.

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/netfilter.h>
#include <linux/netfilter/nfnetlink.h>
#include <linux/netfilter/nfnetlink_queue.h>
#include <linux/netfilter/xt_NFQUEUE.h>
#include <linux/netfilter_ipv4/ip_tables.h>
#include <linux/netlink.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
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
#include <deque>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr uint16_t kQueue = 0;
constexpr uint32_t kMaxHeld = 1 << 16;

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "carrier: %s: %s\n", what, std::strerror(errno));
  std::exit(1);
}

double now_s() {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

/// Appends the bytes of `value`, and zeros to a multiple of `alignment`.
template <class Value>
void append(std::string& bytes, const Value& value, size_t alignment) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
  bytes.resize((bytes.size() + alignment - 1) / alignment * alignment);
}

template <class Value>
std::string attribute(uint16_t type, const Value& value) {
  std::string bytes;
  append(bytes, nlattr{sizeof(nlattr) + sizeof(value), type}, NLA_ALIGNTO);
  append(bytes, value, NLA_ALIGNTO);
  return bytes;
}

/// Sends a message to the queue of this namespace.
void tell(int socket, int type, const std::string& attributes) {
  std::string bytes;
  append(bytes,
         nlmsghdr{
             .nlmsg_len = static_cast<uint32_t>(NLMSG_SPACE(sizeof(nfgenmsg)) + attributes.size()),
             .nlmsg_type = static_cast<uint16_t>(NFNL_SUBSYS_QUEUE << 8 | type),
             .nlmsg_flags = NLM_F_REQUEST,
             .nlmsg_seq = 0,
             .nlmsg_pid = 0},
         NLMSG_ALIGNTO);
  append(bytes, nfgenmsg{AF_UNSPEC, NFNETLINK_V0, htons(kQueue)}, NLMSG_ALIGNTO);
  bytes += attributes;
  if (::send(socket, bytes.data(), bytes.size(), 0) < 0) fail("netlink");
}

/// A rule of iptables, for what comes through `from` ("": for all).
template <class Data>
std::string rule(const char* from, const char* target, const Data& data) {
  constexpr size_t kAlign = alignof(xt_counters);
  std::string end;
  append(end, data, kAlign);
  xt_entry_target head{};
  head.u.target_size = static_cast<uint16_t>(sizeof(head) + end.size());
  std::strcpy(head.u.user.name, target);
  ipt_entry entry{};
  entry.target_offset = sizeof(entry);
  entry.next_offset = static_cast<uint16_t>(sizeof(entry) + head.u.target_size);
  std::strcpy(entry.ip.iniface, from);
  std::memset(entry.ip.iniface_mask, 0xff, *from == 0 ? 0 : std::strlen(from) + 1);
  std::string bytes;
  append(bytes, entry, kAlign);
  append(bytes, head, kAlign);
  return bytes + end;
}

/// In this namespace, what comes through eth0 goes to the queue (iptables, the table "raw").
void hold_packets() {
  const int socket = ::socket(AF_INET, SOCK_RAW | SOCK_CLOEXEC, IPPROTO_RAW);
  ipt_getinfo before{};
  std::strcpy(before.name, "raw");
  socklen_t nbytes = sizeof(before);
  if (socket < 0 || ::getsockopt(socket, IPPROTO_IP, IPT_SO_GET_INFO, &before, &nbytes) != 0)
    fail("the table raw of iptables");
  const std::string held = rule("eth0", "NFQUEUE", xt_NFQ_info{kQueue});
  const std::string others = rule("", XT_STANDARD_TARGET, int{-NF_ACCEPT - 1});
  const std::string end = rule("", XT_ERROR_TARGET, std::array<char, XT_FUNCTION_MAXNAMELEN>{});
  std::vector<xt_counters> counters(before.num_entries);
  ipt_replace table{};
  std::strcpy(table.name, "raw");
  table.valid_hooks = before.valid_hooks;  // before routing, and of this host's own packets
  table.num_entries = 4;
  table.size = static_cast<unsigned>(held.size() + 2 * others.size() + end.size());
  table.hook_entry[NF_INET_PRE_ROUTING] = 0;
  table.underflow[NF_INET_PRE_ROUTING] = static_cast<unsigned>(held.size());
  table.hook_entry[NF_INET_LOCAL_OUT] = table.underflow[NF_INET_LOCAL_OUT] =
      static_cast<unsigned>(held.size() + others.size());
  table.num_counters = before.num_entries;
  table.counters = counters.data();
  std::string bytes(reinterpret_cast<const char*>(&table), sizeof(table));
  bytes += held + others + others + end;
  if (::setsockopt(socket, IPPROTO_IP, IPT_SO_SET_REPLACE, bytes.data(),
                   static_cast<socklen_t>(bytes.size())) != 0)
    fail("a rule for NFQUEUE");
  ::close(socket);
}

/// Enters the namespace. Returns the socket that tells of its packets.
int open_queue(const char* network_namespace) {
  const int space = ::open(network_namespace, O_RDONLY | O_CLOEXEC);
  if (space < 0 || ::setns(space, CLONE_NEWNET) != 0) fail(network_namespace);
  ::close(space);
  const int queue =
      ::socket(AF_NETLINK, SOCK_RAW | SOCK_NONBLOCK | SOCK_CLOEXEC, NETLINK_NETFILTER);
  const int buffer = 32 << 20;
  if (queue < 0 || ::setsockopt(queue, SOL_SOCKET, SO_RCVBUFFORCE, &buffer, sizeof(buffer)) != 0)
    fail("NETLINK_NETFILTER");
  tell(queue, NFQNL_MSG_CONFIG,
       attribute(NFQA_CFG_CMD, nfqnl_msg_config_cmd{NFQNL_CFG_CMD_BIND, 0, htons(AF_INET)}));
  tell(queue, NFQNL_MSG_CONFIG,
       attribute(NFQA_CFG_PARAMS, nfqnl_msg_config_params{0, NFQNL_COPY_META}) +
           attribute(NFQA_CFG_QUEUE_MAXLEN, htonl(kMaxHeld)) +
           // Packets of up to 64 KiB stay whole, as for a card that cuts them.
           attribute(NFQA_CFG_FLAGS, htonl(NFQA_CFG_F_GSO)) +
           attribute(NFQA_CFG_MASK, htonl(NFQA_CFG_F_GSO)));
  hold_packets();
  return queue;
}

struct Packet {
  double arrives_s;
  uint32_t id;  // in network order
};

/// The packets of one host.
class Carrier {
 public:
  Carrier(const volatile double& delay_s, int queue) : delay_s_(delay_s), queue_(queue) {}

  [[noreturn]] void run() {
    while (true) {
      wait();
      take();
      release();
    }
  }

 private:
  void wait() {
    timespec left{};
    if (!held_.empty()) {
      const double seconds = std::max(held_.front().arrives_s - now_s(), 0.0);
      left.tv_sec = static_cast<time_t>(seconds);
      left.tv_nsec = static_cast<long>(1e9 * (seconds - static_cast<double>(left.tv_sec)));
    }
    pollfd queue{queue_, POLLIN, 0};
    if (::ppoll(&queue, 1, held_.empty() ? nullptr : &left, nullptr) < 0 && errno != EINTR)
      fail("ppoll");
  }

  void take() {
    for (size_t i = 0; i < kBatch; ++i) {
      parts_[i] = {buffers_[i].data(), buffers_[i].size()};
      messages_[i].msg_hdr = {};
      messages_[i].msg_hdr.msg_iov = &parts_[i];
      messages_[i].msg_hdr.msg_iovlen = 1;
    }
    const int count = ::recvmmsg(queue_, messages_.data(), kBatch, MSG_DONTWAIT, nullptr);
    // ENOBUFS: packets were lost, as on a network.
    if (count < 0 && errno != EAGAIN && errno != ENOBUFS) fail("recvmmsg");
    for (int i = 0; i < count; ++i) {
      auto* header = reinterpret_cast<nlmsghdr*>(buffers_[static_cast<size_t>(i)].data());
      if (header->nlmsg_type == NLMSG_ERROR) {
        errno = -static_cast<nlmsgerr*>(NLMSG_DATA(header))->error;
        if (errno == ENOENT) continue;  // the kernel drops packets of a link that goes down
        fail("NFQUEUE");
      }
      // The first attribute of a packet is NFQA_PACKET_HDR.
      const char* attribute =
          static_cast<const char*>(NLMSG_DATA(header)) + sizeof(nfgenmsg) + sizeof(nlattr);
      nfqnl_msg_packet_hdr packet;
      std::memcpy(&packet, attribute, sizeof(packet));
      held_.push_back({now_s() + delay_s_, packet.packet_id});
    }
  }

  /// Lets go what has arrived: all packets up to one.
  void release() {
    const double now = now_s();
    uint32_t last = 0;
    bool any = false;
    for (; !held_.empty() && held_.front().arrives_s <= now; held_.pop_front()) {
      last = held_.front().id;
      any = true;
    }
    if (!any) return;
    tell(queue_, NFQNL_MSG_VERDICT_BATCH,
         attribute(NFQA_VERDICT_HDR, nfqnl_msg_verdict_hdr{htonl(NF_ACCEPT), last}));
  }

  static constexpr size_t kBatch = 64;

  const volatile double& delay_s_;
  const int queue_;
  std::deque<Packet> held_;
  std::array<mmsghdr, kBatch> messages_;
  std::array<iovec, kBatch> parts_;
  alignas(nlmsghdr) std::array<std::array<char, 512>, kBatch> buffers_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: carrier SETTINGS NAMESPACE...\n");
    return 2;
  }
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  const void* shared =
      ::mmap(nullptr, sizeof(double), PROT_READ, MAP_SHARED, std::atoi(argv[1]), 0);
  if (shared == MAP_FAILED) fail("SETTINGS");
  // A carrier that waits for a core is a slower network; without the right to it, it is one.
  const sched_param priority{.sched_priority = 2};
  ::sched_setscheduler(0, SCHED_RR, &priority);
  std::vector<std::thread> threads;
  for (int host = 0; host + 2 < argc; ++host) {
    const int queue = open_queue(argv[host + 2]);
    threads.emplace_back(
        [=] { Carrier(*static_cast<const volatile double*>(shared), queue).run(); });
    // As interrupts of two cards are spread over cores.
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(static_cast<unsigned>(host) % std::thread::hardware_concurrency(), &cores);
    ::pthread_setaffinity_np(threads.back().native_handle(), sizeof(cores), &cores);
  }
  std::puts("ready");
  std::fflush(stdout);
  for (std::thread& thread : threads) thread.join();
}
