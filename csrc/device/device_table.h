// The only interface between the core and a device: a table of C functions from a device library.
//
// Two libraries provide it: `_cuda` for NVIDIA GPUs (csrc/kernels/cuda/cuda_device.cc), and
// `_device_threads`, which emulates a device with CPU memory and threads
// (csrc/kernels/threads/thread_device.cc), so that all users of the table are tested on every
// machine. The core is built without either, and opens one when it is first passed a device array
// (device_library.h). Only PODs and pointers cross the interface.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pycoll {

struct DeviceLaunch;  // executor/device/device_launch.h

inline constexpr uint32_t kDeviceTableVersion = 4;

struct DeviceFacts {
  char name[64];
  char uuid[40];  // identical in all processes of a host, even if their device numbers differ
  uint64_t total_bytes;
  int32_t num_processors;
  int32_t capability;     // 90: compute capability 9.0; 0: not a GPU
  int32_t block_threads;  // threads of a block
  int32_t max_channels;   // largest useful number of blocks in one rank's launch: fills the links
  int32_t max_blocks;     // largest useful number of blocks of all ranks: fills the memory
  int32_t takes_turns;    // 1: kernels of several processes never run at once, as without MPS
  int32_t cache_bytes;    // of the cache that all processors share
  int32_t has_word_ops;   // 1: streams write words and wait for them (queue_words)
  int32_t num_queues;     // streams of a process that can start their work independently
  // How memory is shared with other processes if not by descriptors, and why; empty: by
  // descriptors.
  char memory_note[128];
};

/// How another process maps an allocation.
enum class DeviceHandleKind : uint32_t {
  kNone,  // not at all: the system does not export this memory
  kFd,    // by a file descriptor that is passed to it
  kIpc,   // by `bytes`, as long as the owner keeps the allocation
};
struct DeviceHandle {
  DeviceHandleKind kind;
  uint32_t reserved;
  uint64_t nbytes;  // size of the whole allocation
  uint64_t offset;  // offset of the exported pointer in it
  uint8_t bytes[64];
};

/// Words in memory that kernels of this process reach, for tests of that reach.
struct DeviceWords {
  static constexpr int kMax = 64;
  int32_t num = 0;
  int32_t reserved = 0;
  uint64_t* at[kMax] = {};
  uint64_t value[kMax] = {};
};

/// An operation of a stream on an aligned word, in device memory or in CPU memory that is mapped
/// for the device. It needs no kernel: a stream that waits leaves the processors to other work.
struct DeviceWordOp {
  enum class Kind : uint32_t {
    kWrite,       // *at = value, behind all earlier work of the stream, whose stores are visible
    kAwaitEqual,  // later work of the stream waits until *at == value
  };
  Kind kind = Kind::kWrite;
  uint32_t reserved = 0;
  uint64_t* at = nullptr;
  uint64_t value = 0;
};
/// Maximum number of operations in one call of queue_words(); the driver's limit.
inline constexpr int kMaxWordOps = 256;

/// Streams, events and graphs are opaque. Streams 0 and 1 are the device's default stream, 2 is the
/// calling thread's default stream, as in CUDA.
using DeviceStream = void*;
using DeviceEvent = void*;
using DeviceGraph = void*;

/// Functions return 0 on success; otherwise last_error() on the same thread says why. All may be
/// called from any thread; none changes the thread's current device. `device` is a device's number
/// in this process.
struct DeviceTable {
  uint32_t version;       // kDeviceTableVersion when the library was built
  uint32_t table_bytes;   // sizeof(DeviceTable)
  uint32_t launch_bytes;  // sizeof(DeviceLaunch)
  const char* name;       // "cuda" or "threads"
  const char* built;      // the runtime it was built with, for people
  const char* (*last_error)();

  // --- devices ---
  int (*count_devices)(int32_t* num_devices);
  int (*describe)(int32_t device, DeviceFacts* facts);
  /// Sets *device to the device whose memory `p` is in; -1: none.
  int (*find_device)(const void* p, int32_t* device);
  /// Sets *can to whether kernels of `device` can access memory of `peer`, and enables the access.
  int (*reach)(int32_t device, int32_t peer, int32_t* can);
  /// Waits until all work queued on the device is over.
  int (*synchronize_device)(int32_t device);

  // --- memory ---
  /// Allocates zeroed memory, at least 512-byte aligned, and exportable if the system allows it.
  int (*allocate)(int32_t device, size_t nbytes, void** memory);
  /// Frees memory that no queued work uses any more.
  int (*free)(void* memory);
  /// Exports the allocation that contains `p`. The caller closes `fd`, which may be -1.
  int (*export_memory)(const void* p, DeviceHandle* handle, int32_t* fd);
  /// Maps the whole allocation for kernels of `device`. The caller still owns `fd`.
  int (*import_memory)(int32_t device, const DeviceHandle* handle, int32_t fd, void** base);
  int (*release_import)(void* base);
  /// Replaces the memory of the allocation that contains `p` by private memory with its content, at
  /// the same address; processes that have imported it keep the former memory. No queued work may
  /// use it. Sets *can to 0, and does nothing, for memory of another library.
  int (*withdraw)(int32_t device, void* p, int32_t* can);
  /// Allocates zeroed CPU memory that kernels access at the same address.
  int (*allocate_host)(size_t nbytes, void** memory);
  int (*free_host)(void* memory);
  /// Copies between memory of any kind, behind no other work of the device; returns when it is
  /// done.
  int (*copy_now)(int32_t device, void* dst, const void* src, size_t nbytes);
  /// Makes CPU memory that is already mapped accessible to kernels, at address `on_device`.
  int (*map_host)(void* memory, size_t nbytes, void** on_device);
  int (*unmap_host)(void* memory);

  // --- stream-ordered work ---
  /// The stream has the highest priority, and does not wait for the default stream.
  int (*create_stream)(int32_t device, DeviceStream* stream);
  int (*destroy_stream)(DeviceStream stream);
  int (*synchronize_stream)(int32_t device, DeviceStream stream);
  /// Copies between memory of any kind.
  int (*copy)(int32_t device, void* dst, const void* src, size_t nbytes, DeviceStream stream);
  /// Queues the operations in their order, also into a capture. Not possible where
  /// DeviceFacts::has_word_ops is 0. A wait has no deadline: the CPU must be able to store the
  /// word.
  int (*queue_words)(int32_t device, const DeviceWordOp* ops, int32_t num_ops, DeviceStream stream);
  int (*create_event)(int32_t device, DeviceEvent* event);
  int (*destroy_event)(DeviceEvent event);
  int (*record_event)(int32_t device, DeviceEvent event, DeviceStream stream);
  /// Makes all later work on `stream` wait until `event`, as last recorded, is over.
  int (*wait_event)(int32_t device, DeviceStream stream, DeviceEvent event);
  int (*query_event)(DeviceEvent event, int32_t* is_over);
  int (*synchronize_event)(DeviceEvent event);

  // --- graphs ---
  /// Sets *capture to the number of the capture that records the stream's work; 0: the work runs.
  int (*capture_of)(int32_t device, DeviceStream stream, uint64_t* capture);
  int (*begin_capture)(int32_t device, DeviceStream stream);
  int (*end_capture)(int32_t device, DeviceStream stream, DeviceGraph* graph);
  int (*launch_graph)(int32_t device, DeviceGraph graph, DeviceStream stream);
  int (*destroy_graph)(DeviceGraph graph);

  // --- kernels ---
  /// Loads all kernels, so that no launch loads one while another kernel waits for it.
  int (*preload)(int32_t device);
  /// Runs one rank's part of one operation. `launch` is copied.
  int (*launch)(int32_t device, const DeviceLaunch* launch, DeviceStream stream);
  /// Runs the parts of several ranks as one kernel whose blocks are all resident. `launches` are in
  /// memory that the device reads when the kernel starts; `first` is a CPU copy of one of them.
  int (*launch_together)(int32_t device, const DeviceLaunch* first, const DeviceLaunch* launches,
                         int32_t num_launches, DeviceStream stream);
  /// Sets *num_blocks to how many blocks of `num_threads` threads are resident at once, whichever
  /// kernel they run.
  int (*max_resident_blocks)(int32_t device, int32_t num_threads, int32_t* num_blocks);
  /// Stores the words by a kernel, as protocols store flags.
  int (*store_words)(int32_t device, const DeviceWords* words, DeviceStream stream);
  /// Polls the words by a kernel until each has its value, or for `timeout_ns`. Stores the value
  /// that word i has then at found[i], in memory of allocate_host().
  int (*await_words)(int32_t device, const DeviceWords* words, int64_t timeout_ns, uint64_t* found,
                     DeviceStream stream);
  /// dst[i] <- src[i] * factor, for elements of the DType with number `dtype`.
  int (*scale)(int32_t device, void* dst, const void* src, int64_t count, int32_t dtype,
               double factor, DeviceStream stream);
};

}  // namespace pycoll

/// The function that a device library exports.
extern "C" const pycoll::DeviceTable* pycoll_device_table();
