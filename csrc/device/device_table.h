// The one door between the core and a device: a table of C functions that a library gives.
//
// Two libraries give it: `_cuda` for NVIDIA GPUs (csrc/kernels/cuda/cuda_device.cc), and
// `_device_threads`, which emulates a device with memory and threads of the host
// (csrc/kernels/threads/thread_device.cc), so that everything on this side of the table is tested
// on every machine. The core is built without either; it opens one when it meets an array of a
// device (library.h). Only PODs and pointers cross the door.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pycoll {

struct DeviceLaunch;  // executor/device/device_launch.h

inline constexpr uint32_t kDeviceTableVersion = 1;

struct DeviceFacts {
  char name[64];
  char uuid[40];  // the same in all processes of a host, whatever number they give the device
  uint64_t total_bytes;
  int32_t num_processors;
  int32_t capability;     // 90: compute capability 9.0; 0: not a GPU
  int32_t block_threads;  // of a launch's blocks
  int32_t max_channels;   // blocks of one rank's launch that are worth it
};

/// How another process reaches an allocation.
enum class DeviceHandleKind : uint32_t {
  kNone,  // it cannot: memory that the system does not export
  kFd,    // by a file descriptor that is passed to it
  kIpc,   // by `bytes`, as long as the owner keeps the allocation
};
struct DeviceHandle {
  DeviceHandleKind kind;
  uint32_t reserved;
  uint64_t nbytes;  // of the whole allocation
  uint64_t offset;  // of the pointer that was asked for in it
  uint8_t bytes[64];
};

/// Streams, events and graphs are opaque. Stream 0 and 1 are a device's default stream, 2 is that
/// of the calling thread, as in CUDA.
using DeviceStream = void*;
using DeviceEvent = void*;
using DeviceGraph = void*;

/// Functions return 0, or not: then last_error() says why, on that thread. All may be called from
/// any thread; none changes the thread's current device. What is named `device` is its number in
/// this process.
struct DeviceTable {
  uint32_t version;       // kDeviceTableVersion of who built the library
  uint32_t table_bytes;   // sizeof(DeviceTable)
  uint32_t launch_bytes;  // sizeof(DeviceLaunch)
  const char* name;       // "cuda" or "threads"
  const char* built;      // with what, for people
  const char* (*last_error)();

  // --- devices ---
  int (*count_devices)(int32_t* num_devices);
  int (*describe)(int32_t device, DeviceFacts* facts);
  /// -1: `p` is no memory of a device.
  int (*find_device)(const void* p, int32_t* device);
  /// Whether kernels of `device` reach memory of `peer`; from then on they may.
  int (*reach)(int32_t device, int32_t peer, int32_t* can);
  /// Waits until all that was queued there is over.
  int (*synchronize_device)(int32_t device);

  // --- memory ---
  /// Zeroed, at least 512-byte aligned, and exportable if the system can.
  int (*allocate)(int32_t device, size_t nbytes, void** memory);
  /// All work that uses it is over.
  int (*free)(void* memory);
  /// How others reach the allocation that `p` lies in; `fd` is the caller's to close, or -1.
  int (*export_memory)(const void* p, DeviceHandle* handle, int32_t* fd);
  /// Maps the whole allocation for kernels of `device`; `fd` stays the caller's.
  int (*import_memory)(int32_t device, const DeviceHandle* handle, int32_t fd, void** base);
  int (*release_import)(void* base);
  /// Zeroed host memory that kernels reach under the same address.
  int (*allocate_host)(size_t nbytes, void** memory);
  int (*free_host)(void* memory);
  /// Lets kernels reach host memory that is mapped already, as `on_device`.
  int (*map_host)(void* memory, size_t nbytes, void** on_device);
  int (*unmap_host)(void* memory);

  // --- work in the order of a stream ---
  int (*create_stream)(int32_t device, DeviceStream* stream);
  int (*destroy_stream)(DeviceStream stream);
  int (*synchronize_stream)(int32_t device, DeviceStream stream);
  /// From and to memory of any kind.
  int (*copy)(int32_t device, void* dst, const void* src, size_t nbytes, DeviceStream stream);
  int (*create_event)(int32_t device, DeviceEvent* event);
  int (*destroy_event)(DeviceEvent event);
  int (*record_event)(int32_t device, DeviceEvent event, DeviceStream stream);
  /// What `stream` gets from now on begins after what `event` was last recorded behind.
  int (*wait_event)(int32_t device, DeviceStream stream, DeviceEvent event);
  int (*query_event)(DeviceEvent event, int32_t* is_over);
  int (*synchronize_event)(DeviceEvent event);

  // --- graphs ---
  /// 0: work given to the stream runs. Else it is recorded, for the capture of that number.
  int (*capture_of)(int32_t device, DeviceStream stream, uint64_t* capture);
  int (*begin_capture)(int32_t device, DeviceStream stream);
  int (*end_capture)(int32_t device, DeviceStream stream, DeviceGraph* graph);
  int (*launch_graph)(int32_t device, DeviceGraph graph, DeviceStream stream);
  int (*destroy_graph)(DeviceGraph graph);

  // --- kernels ---
  /// Loads all of them, so that no launch does while another kernel waits for it.
  int (*preload)(int32_t device);
  /// Runs one rank's part of one operation. `launch` is copied.
  int (*launch)(int32_t device, const DeviceLaunch* launch, DeviceStream stream);
  /// Runs the parts of several ranks as one kernel whose blocks are all resident. `launches` lie in
  /// memory that the device reads when it comes to it; `first` is a copy of one of them here.
  int (*launch_together)(int32_t device, const DeviceLaunch* first, const DeviceLaunch* launches,
                         int32_t num_launches, DeviceStream stream);
  /// How many blocks of the kernel that runs such a launch the device holds at once.
  int (*max_resident_blocks)(int32_t device, const DeviceLaunch* launch, int32_t* num_blocks);
  /// dst[i] <- src[i] * factor, in elements of a DType of that number.
  int (*scale)(int32_t device, void* dst, const void* src, int64_t count, int32_t dtype,
               double factor, DeviceStream stream);
};

}  // namespace pycoll

/// What a library exports.
extern "C" const pycoll::DeviceTable* pycoll_device_table();
