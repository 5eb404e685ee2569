#include "kernels/cuda/cuda_words.h"

#include "kernels/cuda/cuda_driver.h"
#include "kernels/cuda/cuda_status.h"

namespace pycoll {
namespace {

/// The second version of the interface, in which 64-bit operations need no permission of the
/// administrator.
struct Driver {
  decltype(&::cuDeviceGetAttribute) get_attribute =
      find_driver_function<decltype(&::cuDeviceGetAttribute)>("cuDeviceGetAttribute");
  decltype(&::cuStreamBatchMemOp) queue =
      find_driver_function<decltype(&::cuStreamBatchMemOp)>("cuStreamBatchMemOp");
};

const Driver& driver() {
  static const Driver found;
  return found;
}

CUstreamBatchMemOpParams params_of(const DeviceWordOp& op) {
  CUstreamBatchMemOpParams params{};
  const auto address = reinterpret_cast<CUdeviceptr>(op.at);
  switch (op.kind) {
    case DeviceWordOp::Kind::kWrite:
      params.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
      params.writeValue.address = address;
      params.writeValue.value64 = op.value;
      // With a barrier: earlier stores of the stream are visible to every reader of the word.
      params.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
      break;
    case DeviceWordOp::Kind::kAwaitEqual:
      params.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_64;
      params.waitValue.address = address;
      params.waitValue.value64 = op.value;
      params.waitValue.flags = CU_STREAM_WAIT_VALUE_EQ;
      break;
  }
  return params;
}

}  // namespace

bool cuda_has_word_ops(int device) {
  int can = 0;
  return driver().queue != nullptr && driver().get_attribute != nullptr &&
         driver().get_attribute(&can, CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, device) ==
             CUDA_SUCCESS &&
         can != 0;
}

int cuda_queue_words(int32_t device, const DeviceWordOp* ops, int32_t num_ops,
                     DeviceStream stream) {
  if (driver().queue == nullptr) return cuda_refuse("this driver has no cuStreamBatchMemOp");
  const OnDevice current(device);
  CUstreamBatchMemOpParams params[kMaxWordOps];
  if (num_ops > kMaxWordOps) return cuda_refuse("too many operations on words");
  for (int32_t i = 0; i < num_ops; ++i) params[i] = params_of(ops[i]);
  return driver_status(
      driver().queue(static_cast<CUstream>(stream), static_cast<unsigned int>(num_ops), params, 0),
      "cuStreamBatchMemOp");
}

}  // namespace pycoll
