// One call of a collective, as the bindings pass it to the core.
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
/// (schedule/collectives.h) gives this rank: `input` may be null if it has no input blocks,
/// `output` if it has no output blocks.
struct Call {
  Collective collective = Collective::kAllReduce;
  const void* input = nullptr;
  void* output = nullptr;  // may be `input`, or contain it (all_gather: input is block `rank`)
  int64_t count = 0;       // elements of one block
  DType dtype = DType::kF32;
  size_t element_size = 0;  // bytes, for kOpaque; else 0 or dtype_size(dtype)
  uint32_t dtype_hash = 0;  // of an opaque dtype's description; 0: not known
  uint16_t dtype_text = 0;  // Recorder::name_id of the description; 0: none
  Op op = Op::kSum;
  double factor = 1;  // premul: the factor of `input`
  int root = 0;
  int num_dims = 0;
  int64_t shape[6] = {};
  // Elements of each rank's block when the blocks differ (all_gather, reduce_scatter): one per
  // rank, identical on all ranks. `count` is unused then.
  const int64_t* block_counts = nullptr;
  // all_to_all with counts: elements to and from each rank. Set both or neither.
  const int64_t* send_counts = nullptr;
  const int64_t* recv_counts = nullptr;
  bool deterministic = false;      // only schedules whose result depends on nothing but the values
  std::string_view algorithm;      // "", "ring" or "ring/ll"
  bool shapes_may_differ = false;  // ranks compare counts; the shape is for error messages only
  double timeout_s = 0;            // 0: the communicator's
  uint16_t site = 0;               // Recorder::name_id of the user's file and line; 0: not known
  OnSlow on_slow;                  // for a blocking call
  int device = -1;                 // device of the buffers; -1: CPU memory
  void* stream = nullptr;    // stream of the device; the operation runs behind its earlier work
  uint32_t places_hash = 0;  // of the offsets in registered device arrays; equal on all ranks
};

}  // namespace pycoll
