#include "comm/device/streams/stream_waits.h"

#include <algorithm>

#include "base/clock.h"

namespace pycoll {

StreamWaits::StreamWaits(Transport& transport, const Device& device, const AllGather& gather,
                         const Deadline& deadline)
    : device_(device),
      rank_(transport.rank()),
      window_(DeviceWindow::of_cpu_memory(transport, device, kNumWords * sizeof(uint64_t), gather,
                                          deadline)),
      words_(reinterpret_cast<uint64_t*>(window_->cpu_at(rank_))) {
  store_release(words_[kWatched], 1);
}

void StreamWaits::write(int word, uint64_t value) {
  ops_.push_back({DeviceWordOp::Kind::kWrite, 0, word_of(rank_, word), value});
}

void StreamWaits::exchange(const DeviceLaunch& launch, int word) {
  uint64_t peers = 0;
  for (int i = 0; i < launch.num_peers; ++i) peers |= uint64_t{1} << launch.peers[i];
  write(kPeers, peers);
  for (int i = 0; i < launch.num_peers; ++i) {
    ops_.push_back(
        {DeviceWordOp::Kind::kWrite, 0, word_of(launch.peers[i], word + rank_), launch.digest});
  }
  for (int i = 0; i < launch.num_peers; ++i) {
    const int own = word + launch.peers[i];
    ops_.push_back({DeviceWordOp::Kind::kAwaitEqual, 0, word_of(rank_, own), launch.digest});
    write(own, 0);
  }
  write(kPeers, 0);
}

void StreamWaits::begin(const DeviceLaunch& launch, DeviceStream stream) {
  ops_.clear();
  // kWatched first for is_still(), and again after kDigest for watch(): a watchdog that sets it in
  // between would take the operation before for the last one. kOperation after kDigest for over().
  write(kWatched, 0);
  write(kTimeoutNs, static_cast<uint64_t>(launch.timeout_ns));
  write(kStep, 0);
  write(kDigest, launch.digest);
  write(kOperation, launch.operation);
  write(kWatched, 0);
  exchange(launch, kReady);
  device_.queue_words(ops_, stream);
}

void StreamWaits::end(const DeviceLaunch& launch, DeviceStream stream) {
  ops_.clear();
  write(kStep, static_cast<uint64_t>(launch.num_steps) + 1);  // a rank may have no steps
  exchange(launch, kDone);
  write(kDigest, 0);
  device_.queue_words(ops_, stream);
}

StreamWaits::Wait StreamWaits::wait_now() const {
  Wait wait;
  wait.digest = load_acquire(words_[kDigest]);
  wait.step = load_acquire(words_[kStep]);
  const uint64_t peers = load_acquire(words_[kPeers]);
  // The stream waits in this order, and clears the words that it has seen: the last one that is
  // clear is awaited for certain.
  for (int peer = 0; peer < kMaxDeviceRanks; ++peer) {
    if ((peers >> peer & 1) == 0) continue;
    const uint64_t found = load_acquire(words_[(wait.step == 0 ? kReady : kDone) + peer]);
    if (found == wait.digest) continue;
    wait.peer = peer;
    wait.found = found;
  }
  return wait;
}

bool StreamWaits::is_still(const Wait& wait) const {
  // In this order: kWatched is cleared by the next operation, before its other words.
  return load_acquire(words_[kStep]) == wait.step && load_acquire(words_[kDigest]) == wait.digest &&
         load_acquire(words_[kWatched]) != 0;
}

DeviceError StreamWaits::error_of(const Wait& wait, DeviceFailure code) const {
  DeviceError error;
  error.code = code;
  error.rank = static_cast<uint16_t>(rank_);
  error.peer = static_cast<uint16_t>(wait.peer < 0 ? rank_ : wait.peer);
  error.step = static_cast<uint8_t>(std::min<uint64_t>(wait.step == 0 ? 0 : wait.step - 1, 255));
  return error;
}

void StreamWaits::watch() {
  if (load_acquire(words_[kWatched]) == 0) {
    store_release(words_[kWatched], 1);
    since_ns_ = now_ns();
    is_good_ = false;
  }
  was_over_ = load_acquire(words_[kDigest]) == 0;
}

bool StreamWaits::look(DeviceError* error) {
  is_good_ = is_good_ || was_over_;
  const auto timeout_ns = static_cast<int64_t>(load_acquire(words_[kTimeoutNs]));
  const Wait wait = wait_now();
  if (wait.peer < 0 || wait.digest == 0) return false;
  const bool other_call = wait.found != 0;
  if ((!other_call && now_ns() - since_ns_ <= timeout_ns) || !is_still(wait)) return false;
  *error = error_of(wait, other_call ? DeviceFailure::kMismatch : DeviceFailure::kTimeout);
  return true;
}

bool StreamWaits::release(DeviceError* error) {
  const Wait wait = wait_now();
  if (wait.digest == 0 && is_good_) return false;
  *error = error_of(wait, DeviceFailure::kAborted);
  if (wait.digest == 0) return true;
  for (int word = kNumOwnWords; word < kNumWords; ++word) store_release(words_[word], wait.digest);
  return true;
}

}  // namespace pycoll
