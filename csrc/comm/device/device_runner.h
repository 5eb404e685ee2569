// Runs the operations of a rank on its device: set-up with the other ranks once, then a launch for
// each call, in the order of the caller's stream. The host waits for nobody after the set-up,
// unless ranks of one process share the device (device_meeting.h).
#pragma once

#include <memory>
#include <vector>

#include "comm/call.h"
#include "comm/device/device_arrays.h"
#include "comm/device/device_blocks.h"
#include "comm/device/device_links.h"
#include "comm/device/device_meeting.h"
#include "comm/device/device_planner.h"
#include "comm/device/device_watchdog.h"

namespace pycoll {

class DeviceRunner {
 public:
  /// Collective, on all ranks alike. Raises as `gather` does, and CudaError.
  DeviceRunner(Transport& transport, const Device& device,
               const std::shared_ptr<const SelectionInputs>& inputs, Waiter& waiter,
               const AllGather& gather, const Deadline& deadline);
  ~DeviceRunner();  // as finish()

  const Device& device() const { return device_; }
  Planner& planner() { return planner_.planner(); }
  DeviceWatchdog& watchdog() { return *watchdog_; }

  DeviceArrays& arrays() { return arrays_; }

  /// What a plain call runs: without slots where its arrays are registered. Sets its places_hash
  /// then. Raises UsageError when it names a protocol that its arrays do not allow.
  PlannedCall& choose(const CallPlan& plan, Call& call);
  /// Why the links, or this call, cannot have the protocol that is planned; null: they can. Alike
  /// on all ranks.
  const char* why_not(const Call& call, PlannedCall& planned);
  /// Makes the launch of the call that was chosen for. Raises UsageError when it would need memory
  /// that cannot be had while the stream is captured, and CudaError.
  void prepare(const Call& call, PlannedCall& planned);
  /// Launches it as the operation of `record`, behind what the call's stream has got. False when a
  /// wait for the ranks of this process failed: the waiter knows why. Raises CudaError.
  bool launch(const Call& call, const CallRecord& record, double timeout_s);
  /// A stream of its own for asynchronous operations, behind what `stream` has got.
  DeviceStream stream_beside(DeviceStream stream);
  /// Waits for what was launched, as long as that may take.
  void finish();
  /// dst <- the call's input times its factor, on its stream: the first half of premul.
  void scale_input(const Call& call, void* dst, int64_t count);
  /// Memory of the device that lives as long as this object, at least `nbytes` of it. Raises
  /// UsageError while `call`'s stream is captured and there is not enough.
  void* room(DeviceMemory& memory, size_t nbytes, const Call& call);
  DeviceMemory& premul_room() { return premul_room_; }

  /// Behind everything that was launched so far, but for captures; null when nothing was.
  const StreamEvent* last();
  /// A sentence for explain().
  std::string describe() const;
  void disown();

 private:
  void order_behind_last(DeviceStream stream, uint64_t capture);
  void mark_last();
  void set_counts(const Call& call, DeviceLaunch& launch);
  void set_tiles(const Call& call, const DevicePlan& plan, DeviceLaunch& launch) const;

  Transport& transport_;
  Device device_;
  Waiter& waiter_;
  const int rank_;
  const int num_ranks_;
  DevicePlanner planner_;
  DeviceArrays arrays_;
  std::optional<DeviceArrays::Places> places_;  // of the next call
  std::string path_;                            // how the ranks reach each other, for people
  std::unique_ptr<DeviceWindow> window_;
  std::unique_ptr<DeviceLinkMemory> links_;
  bool whole_lines_ = false;  // 128 bytes that a warp writes arrive together
  int block_threads_ = 0;
  int max_channels_ = 0;
  std::unique_ptr<DeviceBlocks> blocks_;
  std::shared_ptr<DeviceMeeting> meeting_;  // with the ranks of this process on this device
  PinnedMemory pinned_;                     // the abort word and the report
  std::unique_ptr<DeviceWatchdog> watchdog_;
  // The order of operations on several streams.
  StreamEvent last_;
  DeviceStream last_stream_ = nullptr;
  bool launched_ = false;
  bool is_marked_ = true;  // `last_` is behind what was launched last
  StreamEvent captured_last_;
  DeviceStream captured_stream_ = nullptr;
  uint64_t capture_ = 0;  // that had the last captured operation
  DeviceLaunch next_;     // as prepare() made it
  std::unique_ptr<Stream> beside_;
  std::unique_ptr<StreamEvent> before_beside_;
  DeviceMemory scratch_;
  DeviceMemory premul_room_;
  DeviceMemory counts_;
  std::vector<DeviceMemory> outgrown_;  // captured graphs may still use it
  std::vector<int64_t> staged_counts_;
};

}  // namespace pycoll
