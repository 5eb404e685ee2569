#include "transport/net/host_links.h"

#include <algorithm>
#include <cerrno>
#include <exception>

#include "base/clock.h"
#include "base/error.h"
#include "transport/proxy/proxy.h"

namespace pycoll {
namespace {

constexpr int64_t kLookPeriodNs = 100'000'000;
constexpr int64_t kPauseNs = 1'000'000;      // while other threads move frames
constexpr int64_t kLongPauseNs = 8'000'000;  // at most, within a collective
constexpr int64_t kLingerNs = 2'000'000'000;
// A rank joins one communicator after the other, so a correct peer is ahead by a few.
constexpr int kMaxEarlyJoins = 1024;
// States help diagnosis and are asked for repeatedly: a peer that does not read gets no more.
constexpr size_t kManyUnsentFrames = 1024;

}  // namespace

HostLinks::HostLinks(std::unique_ptr<Wire> wire, int num_ranks, const std::vector<int>& peers,
                     double silence_s, bool background)
    : wire_(std::move(wire)),
      peers_(peers),
      silence_s_(silence_s),
      num_early_joins_(static_cast<size_t>(num_ranks)),
      placed_(static_cast<size_t>(num_ranks)),
      staged_(static_cast<size_t>(num_ranks)),
      states_(static_cast<size_t>(num_ranks)),
      heard_(static_cast<size_t>(num_ranks), false),
      spoken_(static_cast<size_t>(num_ranks), false),
      heard_ns_(static_cast<size_t>(num_ranks), now_ns()),
      spoken_ns_(static_cast<size_t>(num_ranks), now_ns()),
      looked_ns_(now_ns()) {
  if (!background) return;
  const BlockedSignals blocked;
  thread_ = std::make_unique<std::thread>(start_thread(
      "the thread of the links between hosts", [this] { run(); },
      [this](const std::string& text) { revoke(text); }));
}

HostLinks::~HostLinks() {
  if (thread_ == nullptr) return;
  stop_ = true;
  wire_->wake();
  thread_->join();
}

void HostLinks::add(Proxy& proxy) {
  proxies_[proxy.group()] = &proxy;
  const auto early = early_joins_.find(proxy.group());
  if (early == early_joins_.end()) return;
  for (const int peer : early->second) {
    --num_early_joins_[static_cast<size_t>(peer)];
    proxy.joined(peer);
  }
  early_joins_.erase(early);
}

void HostLinks::remove(Proxy& proxy, const std::byte* begin, const std::byte* end) {
  const auto found = proxies_.find(proxy.group());
  if (found == proxies_.end() || found->second != &proxy) return;
  proxies_.erase(found);
  for (const int peer : peers_) {
    Proxy*& placed = placed_[static_cast<size_t>(peer)];
    if (placed != &proxy) continue;
    placed = nullptr;
    wire_->discard(peer);
  }
  wire_->let_go(begin, end);
  // After the last proxy, the process may end.
  if (proxies_.empty()) flush(now_ns() + kLingerNs);
}

void HostLinks::flush(int64_t end_ns) {
  while (!wire_->has_delivered() && now_ns() < end_ns) {
    wire_->poll(*this, -1);
    if (!wire_->has_delivered()) wire_->wait(kPauseNs);
  }
}

void HostLinks::send(int peer, const FrameHeader& header, const void* payload, Rest rest) {
  const bool is_state = header.kind == FrameKind::kAsk || header.kind == FrameKind::kTell;
  if (is_state && wire_->num_unsent(peer) >= kManyUnsentFrames) return;
  spoken_[static_cast<size_t>(peer)] = true;
  wire_->send(peer, header, payload, rest);
}

void HostLinks::poll(int first) {
  num_polls_.fetch_add(1);
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (lock.owns_lock()) poll_for_all(first);
}

void HostLinks::poll_for_all(int first) {
  const bool moved = wire_->poll(*this, first);
  const bool is_left = wire_->has_stopped() && num_running_ == 0;
  // A sleeping thread does not see that its frames have arrived, nor what the poll has left to a
  // reader that is now gone: wake it.
  if ((moved && num_naps_ != 0) || is_left) wire_->wake();
}

void HostLinks::nap(int64_t ns, bool (*ready)(void*), void* context) {
  // Count first, then check; poll_for_all() moves frames first, then reads the count.
  ++num_naps_;
  if (ready == nullptr || !ready(context)) wire_->wait(ns);
  --num_naps_;
}

void HostLinks::flush_remaining() {
  {
    const std::lock_guard lock(mutex_);
    if (!wire_->has_unsent()) return;
    wire_->poll(*this, -1);
    if (!wire_->has_unsent()) return;
    if (thread_ == nullptr) return flush(now_ns() + kLingerNs);
  }
  has_rest_ = true;
  wire_->wake();
}

void HostLinks::reject(int peer) {
  wire_->close(peer);
  end(peer, Peer::kRejected);
}

bool HostLinks::place(int peer, const FrameHeader& header, PayloadParts* parts) {
  const auto at = static_cast<size_t>(peer);
  heard_[at] = true;
  placed_[at] = nullptr;
  if (!is_valid(header)) return false;
  const auto found = proxies_.find(header.group);
  if (found == proxies_.end()) return true;  // the payload is discarded
  placed_[at] = found->second;
  try {
    return found->second->place(peer, header, staged_[at], parts);
  } catch (const std::exception&) {  // no memory for the frame ends its link, not the process
    return false;
  }
}

bool HostLinks::swap_memory(int peer, const FrameHeader& header,
                            std::unique_ptr<FrameMemory>& memory) {
  Proxy* const proxy = placed_[static_cast<size_t>(peer)];
  return proxy != nullptr && proxy->swap_memory(peer, header, memory);
}

bool HostLinks::arrived(int peer, const FrameHeader& header) {
  const auto at = static_cast<size_t>(peer);
  try {
    // The proxy that has checked the header, if it still exists.
    if (placed_[at] != nullptr) return placed_[at]->arrived(peer, header, staged_[at]);
    return header.kind != FrameKind::kJoin || add_early_join(peer, header.group);
  } catch (const std::exception&) {
    return false;
  }
}

bool HostLinks::add_early_join(int peer, uint64_t group) {
  int& num_joins = num_early_joins_[static_cast<size_t>(peer)];
  if (num_joins == kMaxEarlyJoins) return false;
  num_joins += early_joins_[group].insert(peer).second;
  return true;
}

void HostLinks::lost(int peer, int error) {
  end(peer, error == EPROTO ? Peer::kRejected : error == EDQUOT ? Peer::kFull : Peer::kGone);
}

void HostLinks::end(int peer, Peer state) {
  std::atomic<Peer>& known = states_[static_cast<size_t>(peer)];
  if (known != Peer::kThere) return;
  known = state;
  if (state != Peer::kRejected) return;
  for (const auto& [group, proxy] : proxies_) proxy->rejected(peer);
}

void HostLinks::end_call() {
  --num_running_;
  ++num_ended_;
  if (wire_->has_stopped()) {
    const std::lock_guard lock(mutex_);
    poll_for_all(-1);
  }
  if (has_long_pause_ && has_long_pause_.exchange(false)) wire_->wake();
}

/// Doubles while one collective goes on.
int64_t HostLinks::next_pause_ns(int64_t last_ns) {
  const uint64_t num_ended = num_ended_;
  const bool goes_on = num_running_ != 0 && num_ended == num_ended_before_;
  num_ended_before_ = num_ended;
  if (!goes_on) return kPauseNs;
  has_long_pause_ = true;
  // A collective that ends after this line wakes the thread.
  if (num_ended_ == num_ended) return std::min(2 * last_ns, kLongPauseNs);
  has_long_pause_ = false;
  return kPauseNs;
}

void HostLinks::run() {
  uint64_t seen = 0;
  int64_t pause_ns = kPauseNs;
  while (!stop_) {
    wire_->wait(kLookPeriodNs);
    const uint64_t polls = num_polls_;
    const bool active = (polls != seen || num_naps_ != 0) && !has_rest_;
    seen = polls;
    const int64_t now = now_ns();
    if (!active || now - looked_ns_ >= kLookPeriodNs) {
      const std::lock_guard lock(mutex_);
      has_rest_ = false;
      if (!active) poll_for_all(-1);
      if (now - looked_ns_ >= kLookPeriodNs) look_after(now);
    }
    // Other threads move frames. When they stop, the rest waits for at most this pause.
    pause_ns = active ? next_pause_ns(pause_ns) : kPauseNs;
    if (active) wire_->pause(pause_ns);
    has_long_pause_ = false;
  }
}

void HostLinks::look_after(int64_t now) {
  const auto silence_ns = static_cast<int64_t>(silence_s_ * 1e9);
  // A rank that was suspended may have unread messages.
  const bool was_away = now - looked_ns_ > std::max(silence_ns / 4, 5 * kLookPeriodNs);
  looked_ns_ = now;
  for (const int peer : peers_) {
    const auto at = static_cast<size_t>(peer);
    if (states_[at] != Peer::kThere) continue;
    if (heard_[at] || was_away) heard_ns_[at] = now;
    heard_[at] = false;
    if (spoken_[at]) spoken_ns_[at] = now;
    spoken_[at] = false;
    if (silence_ns <= 0) continue;
    if (now - spoken_ns_[at] >= std::min<int64_t>(silence_ns / 5, 1'000'000'000)) {
      spoken_ns_[at] = now;
      wire_->send(peer, {}, nullptr, Rest::stays());
    }
    if (now - heard_ns_[at] >= silence_ns) {
      states_[at] = Peer::kSilent;
      wire_->close(peer);
    }
  }
}

void HostLinks::revoke(std::string_view reason) {
  const std::lock_guard lock(mutex_);
  for (const auto& [group, proxy] : proxies_) proxy->revoke(reason);
  wire_->poll(*this, -1);
}

void HostLinks::disown() {
  disowned_ = true;
  wire_->disown();
  // The thread does not exist in this process and cannot be joined.
  (void)thread_.release();
}

}  // namespace pycoll
