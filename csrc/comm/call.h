// One call of a collective, as the bindings hand it to the core.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "executor/wait/wait.h"
#include "reduce/dtypes.h"
#include "reduce/ops.h"
#include "schedule/collectives.h"

namespace pycoll {

/// One call of a collective by this rank. The buffers hold the blocks that the collective's row
/// (schedule/collectives.h) gives this rank: `input` may be null where it brings none, `output`
/// where it gets none.
struct Call {
  Collective collective = Collective::kAllReduce;
  const void* input = nullptr;
  void* output = nullptr;  // may be `input`, or hold it at its place (all_gather: output + rank)
  int64_t count = 0;       // elements of one block
  DType dtype = DType::kF32;
  size_t element_size = 0;  // bytes, of kOpaque elements; else 0 or dtype_size(dtype)
  Op op = Op::kSum;
  double factor = 1;  // premul: what `input` is multiplied by
  int root = 0;
  int num_dims = 0;
  int64_t shape[6] = {};
  // Elements of each rank's block where they differ (all_gather, reduce_scatter): alike on all
  // ranks, one per rank. `count` is unused then.
  const int64_t* block_counts = nullptr;
  // all_to_all with counts: elements to and from each rank. Both or none.
  const int64_t* send_counts = nullptr;
  const int64_t* recv_counts = nullptr;
  bool deterministic = false;  // only schedules whose bits do not depend on anything but the values
  std::string_view algorithm;  // "", "ring" or "ring/ll"
  bool shapes_may_differ = false;  // ranks compare counts, and the shape is only for messages
  double timeout_s = 0;            // 0: the communicator's
  uint16_t site = 0;               // Recorder::name_id of the user's file and line; 0: not known
  OnSlow on_slow;                  // of a blocking call
  int device = -1;                 // whose memory the buffers are in; -1: the host's
  void* stream = nullptr;          // of that device: the operation runs behind what it has got
  uint32_t places_hash = 0;  // where they lie in registered arrays of devices, alike on all ranks
};

}  // namespace pycoll
