// Runs the operations of a rank on its device: one set-up with the other ranks, then one launch for
// each call, in the order of the caller's stream. After the set-up the CPU does not wait for other
// ranks, unless ranks of one process share the device (device_meeting.h).
#pragma once

#include <memory>
#include <vector>

#include "comm/call.h"
#include "comm/device/device_arrays.h"
#include "comm/device/device_blocks.h"
#include "comm/device/device_introduction.h"
#include "comm/device/device_links.h"
#include "comm/device/device_meeting.h"
#include "comm/device/device_planner.h"
#include "comm/device/device_watchdog.h"
#include "comm/device/staging/peer_staging.h"
#include "comm/device/streams/stream_waits.h"
#include "device/last_work.h"

namespace pycoll {

class DeviceRunner {
 public:
  /// Sets up the links. Collective. Raises the errors of `gather`, and CudaError.
  DeviceRunner(Transport& transport, const Device& device,
               const std::shared_ptr<const SelectionInputs>& inputs, Waiter& waiter,
               const AllGather& gather, const Deadline& deadline);
  ~DeviceRunner();  // calls finish()

  const Device& device() const { return device_; }
  Planner& planner() { return planner_->planner(); }
  DeviceWatchdog& watchdog() { return *watchdog_; }

  DeviceArrays& arrays() { return arrays_; }
  /// What the user should know of ranks that share a device; empty: nothing.
  std::string warning() const;
  /// True when operations wait for peers in streams, and not in kernels, where that is possible.
  bool waits_in_streams() const { return waits_in_streams_; }
  /// True when one launch has all ranks' parts, so that the ranks' arrays need no registration.
  bool meets_all() const {
    return meeting_ != nullptr && meeting_->num_members() == static_cast<size_t>(num_ranks_) &&
           !waits_in_streams_;
  }

  /// Chooses the plan of a plain call: a direct one if its arrays are registered, and then sets its
  /// places_hash, or if one launch has all ranks' parts. Raises UsageError if the call names a
  /// protocol that its arrays do not allow.
  PlannedCall& choose(const CallPlan& plan, Call& call);
  /// Returns why the links or this call cannot use the planned protocol; null: they can. Identical
  /// on all ranks.
  const char* why_not(const Call& call, PlannedCall& planned);
  /// Prepares the launch of a call after choose(). Raises CudaError, and UsageError if it needs
  /// memory that cannot be allocated while the stream is being captured.
  void prepare(const Call& call, PlannedCall& planned);
  /// Launches the prepared call as the operation of `record`, behind the earlier work of its
  /// stream. False if a wait for the ranks of this process failed; the waiter has the failure.
  /// Raises CudaError.
  bool launch(const Call& call, const CallRecord& record, double timeout_s);
  /// Returns the stream for asynchronous operations, behind the earlier work of `stream`.
  DeviceStream stream_beside(DeviceStream stream);
  /// Waits, without a timeout, for all launched operations.
  void finish();
  /// After a failure: ends this rank's kernels, and takes the arrays of operations that failed back
  /// from the other ranks. May be called by any thread. Raises CudaError.
  void take_back();
  /// dst <- the call's input times its factor, on its stream: the first half of premul.
  void scale_input(const Call& call, void* dst, int64_t count);
  /// Returns at least `nbytes` of device memory that lives as long as this object. Raises
  /// UsageError if `memory` must grow while the stream of `call` is being captured.
  void* room(DeviceMemory& memory, size_t nbytes, const Call& call);
  DeviceMemory& premul_room() { return premul_room_; }

  /// The last launched operation; captured ones do not count.
  LastWork& last() { return last_; }
  /// Description of the device and its links, for explain().
  std::string describe() const;
  void disown();

 private:
  /// The direct plan of an eager call whose launch has all ranks' parts; null: there is none.
  PlannedCall* direct_by_meeting(const CallPlan& plan, const Call& call) const;
  void choose_waits(const std::vector<DeviceIntroduction>& all, const AllGather& gather,
                    const Deadline& deadline);
  void share_blocks(const std::vector<DeviceIntroduction>& all);
  bool find_places(const CallPlan& plan, const Call& call);
  void fill(const Call& call);
  void launch_between_waits(const Call& call);
  void order_behind_last(DeviceStream stream, uint64_t capture);
  void set_counts(const Call& call, DeviceLaunch& launch);
  void set_tiles(const Call& call, const DevicePlan& plan, DeviceLaunch& launch) const;

  Transport& transport_;
  Device device_;
  Waiter& waiter_;
  const int rank_;
  const int num_ranks_;
  DeviceSlab slab_;
  std::unique_ptr<DevicePlanner> planner_;
  DeviceArrays arrays_;
  std::optional<DeviceArrays::Places> places_;  // of the next call's buffers
  std::string path_;                            // how the ranks access each other, for explain()
  bool takes_turns_ = false;                    // pycoll::take_turns
  bool waits_in_streams_ = false;
  int num_sharing_queues_ =
      0;  // ranks of this process on the device, if it has fewer hardware queues
  std::string why_no_stream_waits_;            // empty: streams can wait
  std::unique_ptr<StreamWaits> stream_waits_;  // null: streams cannot wait
  std::unique_ptr<PeerStaging> staging_;       // null unless waits_in_streams_
  std::unique_ptr<DeviceWindow> window_;
  std::unique_ptr<DeviceLinkMemory> links_;
  bool whole_lines_ = false;  // 128-byte lines that a warp writes arrive as a whole
  int block_threads_ = 0;
  int max_channels_ = 0;
  std::string why_no_blocks_;  // not empty: kernels of all ranks do not fit, and may not wait
  std::unique_ptr<DeviceBlocks> blocks_;
  std::vector<int> devices_;                // of the ranks of this process
  std::shared_ptr<DeviceMeeting> meeting_;  // null unless ranks of this process share the device
  PinnedMemory pinned_;                     // the abort word and the report
  std::unique_ptr<DeviceWatchdog> watchdog_;
  // The order of operations on several streams.
  LastWork last_;
  StreamEvent captured_last_;
  DeviceStream captured_stream_ = nullptr;
  uint64_t capture_ = 0;  // capture of the last captured operation
  // The next call, made by choose() and prepare().
  DeviceLaunch next_;
  const DevicePlan* plan_ = nullptr;
  bool staged_ = false;  // its arrays are copied through staging_
  std::unique_ptr<Stream> beside_;
  std::unique_ptr<StreamEvent> before_beside_;
  DeviceMemory scratch_;
  DeviceMemory premul_room_;
  DeviceMemory counts_;
  std::vector<DeviceMemory> outgrown_;  // captured graphs may still use these
  std::vector<int64_t> staged_counts_;
};

}  // namespace pycoll
