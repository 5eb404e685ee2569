// The DLPack structures that this project reads, as fixed by the DLPack specification
// (https://dmlc.github.io/dlpack): the unversioned capsule, and version 1's C exchange table, which
// gives a view of a tensor without a call into Python.
#pragma once

#include <cstdint>

extern "C" {

struct DLDevice {
  int32_t device_type;  // 1: host, 2: CUDA, 3: pinned host, 12: extension, 13: managed by CUDA
  int32_t device_id;
};

/// The codes that name a row of the dtype table.
enum DLDataTypeCode : uint8_t {
  kDLInt = 0,
  kDLUInt = 1,
  kDLFloat = 2,
  kDLBfloat = 4,
  kDLComplex = 5,
  kDLBool = 6,
  kDLFloat8_e4m3fn = 10,
  kDLFloat8_e5m2 = 12,
};

struct DLDataType {
  uint8_t code;  // DLDataTypeCode
  uint8_t bits;
  uint16_t lanes;
};

struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;  // null: contiguous
  uint64_t byte_offset;
};

struct DLManagedTensor {
  DLTensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(DLManagedTensor* self);
};

/// Found as `type(x).__dlpack_c_exchange_api__`, a capsule named "dlpack_exchange_api".
struct DLPackExchangeAPI {
  struct Header {
    uint32_t major;
    uint32_t minor;
    Header* previous;
  } header;
  void* allocate;
  void* managed_from_object;
  void* managed_to_object;
  /// A view that is valid as long as `object` lives and is not resized. May be null.
  int (*tensor_from_object)(void* object, DLTensor* out);
  /// Gives the current stream of a device, by type and number.
  int (*current_stream)(int32_t device_type, int32_t device_id, void** stream);
};

}  // extern "C"
