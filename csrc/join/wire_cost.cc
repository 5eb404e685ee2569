#include "join/wire_cost.h"

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <string>
#include <vector>

#include "base/error.h"

namespace pycoll {
namespace {

constexpr int kNumFlights = 16;
constexpr size_t kFrameBytes = 64 << 10;
constexpr int kMaxFrames = 256;  // in one burst
constexpr int64_t kLongEnoughNs = 5'000'000;
constexpr int64_t kNapNs = 1'000'000;
constexpr uint64_t kNoAnswer = 1;  // `more`: further frames of the burst follow
constexpr uint64_t kLast = 2;      // `more`: the measurement is over

class Probe final : public FrameSink {
 public:
  Probe(Wire& wire, int peer, const Deadline& deadline)
      : wire_(wire), peer_(peer), deadline_(deadline), bytes_(kFrameBytes) {}

  /// Sends frames of `nbytes` and waits until the peer has received all. Returns nanoseconds.
  int64_t there_and_back(int num_frames, size_t nbytes) {
    const int64_t start_ns = now_ns();
    for (int i = 1; i <= num_frames; ++i) send(nbytes, i < num_frames ? kNoAnswer : 0);
    await();
    return now_ns() - start_ns;
  }
  /// Tells the peer that it may stop answering.
  void finish() {
    send(0, kLast);
    while (wire_.has_unsent()) move();
  }
  void answer_until_last() {
    while (true) {
      await();
      if (more_ == kLast) break;
      if (more_ != kNoAnswer) send(0, 0);
    }
    while (wire_.has_unsent()) move();
  }

 private:
  bool place(int peer, const FrameHeader& header, PayloadParts* parts) override {
    if (peer != peer_ || header.kind != FrameKind::kHeartbeat || header.nbytes > bytes_.size()) {
      return false;
    }
    if (header.nbytes != 0) *parts = {1, {bytes_.data()}, {header.nbytes}};
    return true;
  }
  bool arrived(int, const FrameHeader& header) override {
    more_ = header.more;
    // Only the last frame of a burst asks for an answer.
    if (more_ != kNoAnswer) has_come_ = true;
    return true;
  }
  void lost(int peer, int error) override {
    throw PeerDiedError("rank " + std::to_string(peer) +
                            (error == EPROTO ? " sent an invalid frame" : " was lost") +
                            " while the network between hosts was measured",
                        peer, /*signal=*/0);
  }

  void send(size_t nbytes, uint64_t more) {
    FrameHeader header;
    header.nbytes = static_cast<uint32_t>(nbytes);
    header.more = more;
    wire_.send(peer_, header, bytes_.data(), Rest::stays());
  }
  void await() {
    for (has_come_ = false; !has_come_;) move();
  }
  void move() {
    if (wire_.poll(*this, peer_)) return;
    if (deadline_.expired()) {
      throw TimeoutError("rank " + std::to_string(peer_) +
                         " did not answer while the network to its host was measured");
    }
    wire_.wait(kNapNs);
    deadline_.check_interrupt();
  }

  Wire& wire_;
  const int peer_;
  const Deadline& deadline_;
  std::vector<std::byte> bytes_;  // payload of sends and receives; its contents do not matter
  bool has_come_ = false;
  uint64_t more_ = 0;
};

}  // namespace

NetworkCost measure_wire(Wire& wire, int peer, bool leads, const Deadline& deadline) {
  Probe probe(wire, peer, deadline);
  if (!leads) {
    probe.answer_until_last();
    return {};
  }
  std::vector<int64_t> flights_ns;
  for (int i = 0; i < kNumFlights; ++i) flights_ns.push_back(probe.there_and_back(1, 0));
  std::sort(flights_ns.begin(), flights_ns.end());
  const int64_t flight_ns = flights_ns[kNumFlights / 2];
  // Long enough that the latency, the initial burst of a throttled link and TCP's slow start hardly
  // matter.
  const int64_t long_enough_ns = std::max(kLongEnoughNs, 2 * flight_ns);
  int num_frames = 1;
  int64_t took_ns = 0;
  while (true) {
    took_ns = probe.there_and_back(num_frames, kFrameBytes);
    if (took_ns - flight_ns >= long_enough_ns || num_frames == kMaxFrames) break;
    num_frames *= 2;
  }
  probe.finish();
  const double nbytes = static_cast<double>(num_frames) * kFrameBytes;
  return {.alpha_s = 0.5e-9 * static_cast<double>(flight_ns),
          .beta_s_per_byte =
              1e-9 * static_cast<double>(std::max<int64_t>(took_ns - flight_ns, 1)) / nbytes};
}

}  // namespace pycoll
