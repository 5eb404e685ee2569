// Waits of a rank's streams for its peers, in place of kernels that spin: the streams write words
// and wait for words (DeviceTable::queue_words). A kernel between the waits needs no peer, so the
// ranks' kernels may run one after another, as those of processes that share a GPU without MPS do.
//
// Each rank has words in CPU memory that all ranks map: for each peer one that says that the peer's
// arrays may be used, and one that says that the peer is done with this rank's. A peer's stream
// writes the digest of the call there; this rank's stream waits for that value, and clears the word
// for the next call. A peer cannot write the word again before this rank has written the word of
// the other kind, so one word is enough. The values do not depend on the number of the call, so a
// captured operation can be replayed.
//
// A stream's wait has no deadline and sees no failure. The watchdog keeps the deadline, and ends
// the waits of a broken communicator: it writes the awaited words itself. The stream then goes on,
// and tells its peers "done" although it has done nothing. Their streams go on too, before their
// own watchdogs have looked. So an operation is known to be good only if it was over when the
// communicator was still whole. The watchdog therefore calls watch() before it looks for a failure,
// and look() if there is none.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "executor/device/device_launch.h"
#include "transport/memory/device_window.h"

namespace pycoll {

class StreamWaits {
 public:
  /// Makes the words. Collective.
  StreamWaits(Transport& transport, const Device& device, const AllGather& gather,
              const Deadline& deadline);

  /// Queues the start of an operation of `launch`: tells its peers that this rank's arrays may be
  /// used, and waits until theirs may be.
  void begin(const DeviceLaunch& launch, DeviceStream stream);
  /// Queues its end: tells its peers that this rank is done with their arrays, and waits until they
  /// are done with its own.
  void end(const DeviceLaunch& launch, DeviceStream stream);

  // --- for the watchdog's thread
  /// Notes whether the operation that began last is over.
  void watch();
  /// In a communicator that was whole after watch(): an operation that was over is good. Sets
  /// `*error` and returns true if an operation is under way and is late, or if a peer has called
  /// another one.
  bool look(DeviceError* error);
  /// Ends all waits of the operation that is under way, in a broken communicator. Returns false if
  /// the operation that began last is good, else sets `*error` to what it waited for.
  bool release(DeviceError* error);
  /// Number of the operation that began last.
  uint64_t operation() const { return load_acquire(words_[kOperation]); }
  /// Number of the operation that ended last.
  uint64_t over() const {
    const uint64_t last = operation();
    return load_acquire(words_[kDigest]) == 0 ? last : last - 1;
  }

 private:
  // The words of a rank: those with which its streams tell its watchdog what they do, and two for
  // each peer.
  enum Word : int {
    kWatched,  // cleared when an operation begins, and set by watch()
    kOperation,
    kTimeoutNs,
    kPeers,   // bit r: the stream waits for rank r; 0 between the waits
    kStep,    // before the program: 0, after it: the number of its steps, plus 1
    kDigest,  // not 0: the operation of the words above is under way
    kNumOwnWords,
    kReady = kNumOwnWords,             // + peer
    kDone = kReady + kMaxDeviceRanks,  // + peer
    kNumWords = kDone + kMaxDeviceRanks,
  };
  using Ops = std::vector<DeviceWordOp>;

  uint64_t* word_of(int rank, int word) const {  // for streams
    return reinterpret_cast<uint64_t*>(window_->at(rank)) + word;
  }
  void write(int word, uint64_t value);
  void exchange(const DeviceLaunch& launch, int word);
  /// What the stream waits for.
  struct Wait {
    uint64_t digest = 0;  // of the operation; 0: none is under way
    uint64_t step = 0;    // kStep
    int peer = -1;        // whose word it waits for; -1: it does not wait
    uint64_t found = 0;   // in that word: 0, or the digest of another call of the peer
  };
  Wait wait_now() const;
  /// Whether the stream has been in this wait until now.
  bool is_still(const Wait& wait) const;
  DeviceError error_of(const Wait& wait, DeviceFailure code) const;

  const Device device_;
  const int rank_;
  const std::unique_ptr<DeviceWindow> window_;
  uint64_t* const words_;  // of this rank, for the CPU
  // The next three are of the operation that the watchdog saw last.
  int64_t since_ns_ = 0;   // when it was first seen
  bool was_over_ = false;  // in the last watch()
  bool is_good_ = true;    // was over in a whole communicator; true before the first
  Ops ops_;                // of the current call
};

}  // namespace pycoll
