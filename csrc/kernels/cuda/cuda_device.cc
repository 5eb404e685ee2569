// NVIDIA GPUs as a DeviceTable, over the CUDA runtime. Memory that can be exported as a descriptor
// comes from the driver's virtual memory functions: it lives until the last process unmaps it, in
// whatever order the processes end. The driver's functions are found through the runtime, so the
// library does not link against the driver.
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdio>
#include <cstring>

#include "device/device_table.h"
#include "device/hardware_queues.h"
#include "kernels/cuda/cuda_memory.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/cuda/cuda_words.h"
#include "kernels/cuda/launch_cuda.h"

namespace pycoll {
namespace {

cudaStream_t stream_of(DeviceStream stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t event_of(DeviceEvent event) { return static_cast<cudaEvent_t>(event); }

// --- devices ---

int count_devices(int32_t* num_devices) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  *num_devices = count;
  if (status == cudaErrorNoDevice) return 0;
  return cuda_status(status);
}

int describe(int32_t device, DeviceFacts* facts) {
  cudaDeviceProp properties{};
  if (const int status = cuda_status(cudaGetDeviceProperties(&properties, device))) return status;
  *facts = {};
  std::snprintf(facts->name, sizeof(facts->name), "%.63s", properties.name);
  for (size_t i = 0; i < sizeof(properties.uuid.bytes); ++i) {
    std::snprintf(facts->uuid + 2 * i, 3, "%02x",
                  static_cast<unsigned char>(properties.uuid.bytes[i]));
  }
  facts->total_bytes = properties.totalGlobalMem;
  facts->num_processors = properties.multiProcessorCount;
  facts->capability = 10 * properties.major + properties.minor;
  facts->block_threads = kMaxDeviceThreads;
  // About a quarter of the processors: enough to saturate the links, and the rest stays free.
  facts->max_channels = properties.multiProcessorCount / 4;
  facts->max_blocks = properties.multiProcessorCount;
  facts->cache_bytes = properties.l2CacheSize;
  int has_mps = 0;
  if (cudaDeviceGetAttribute(&has_mps, cudaDevAttrMpsEnabled, device) != cudaSuccess) {
    (void)cudaGetLastError();  // an old driver
  }
  facts->takes_turns = has_mps == 0;
  facts->has_word_ops = cuda_has_word_ops(device);
  facts->num_queues = num_hardware_queues();
  std::snprintf(facts->memory_note, sizeof(facts->memory_note), "%s", cuda_memory_note().c_str());
  return 0;
}

int find_device(const void* p, int32_t* device) {
  cudaPointerAttributes attributes{};
  *device = -1;
  if (const int status = cuda_status(cudaPointerGetAttributes(&attributes, p))) return status;
  if (attributes.type == cudaMemoryTypeDevice || attributes.type == cudaMemoryTypeManaged) {
    *device = attributes.device;
  }
  return 0;
}

int reach(int32_t device, int32_t peer, int32_t* can) {
  int possible = 1;
  if (device != peer) {
    if (const int status = cuda_status(cudaDeviceCanAccessPeer(&possible, device, peer))) {
      return status;
    }
  }
  *can = possible;
  if (device == peer || possible == 0) return 0;
  const OnDevice current(device);
  const cudaError_t status = cudaDeviceEnablePeerAccess(peer, 0);
  if (status == cudaErrorPeerAccessAlreadyEnabled) {
    (void)cudaGetLastError();  // clears the status, which is no error here
    return 0;
  }
  return cuda_status(status);
}

int synchronize_device(int32_t device) {
  const OnDevice current(device);
  return cuda_status(cudaDeviceSynchronize());
}

// --- streams ---

int create_stream(int32_t device, DeviceStream* stream) {
  const AllowedInCapture allowed;
  const OnDevice current(device);
  int lowest = 0;
  int highest = 0;
  if (const int status = cuda_status(cudaDeviceGetStreamPriorityRange(&lowest, &highest))) {
    return status;
  }
  // Blocks of an operation, which peers wait for, start before the remaining blocks of a compute
  // kernel.
  cudaStream_t made = nullptr;
  const int status =
      cuda_status(cudaStreamCreateWithPriority(&made, cudaStreamNonBlocking, highest));
  *stream = made;
  return status;
}

int destroy_stream(DeviceStream stream) {
  return cuda_status(cudaStreamDestroy(stream_of(stream)));
}

int synchronize_stream(int32_t device, DeviceStream stream) {
  const AllowedInCapture allowed;
  const OnDevice current(device);
  return cuda_status(cudaStreamSynchronize(stream_of(stream)));
}

int copy(int32_t device, void* dst, const void* src, size_t nbytes, DeviceStream stream) {
  const OnDevice current(device);
  return cuda_status(cudaMemcpyAsync(dst, src, nbytes, cudaMemcpyDefault, stream_of(stream)));
}

int create_event(int32_t device, DeviceEvent* event) {
  const AllowedInCapture allowed;
  const OnDevice current(device);
  cudaEvent_t made = nullptr;
  const int status = cuda_status(cudaEventCreateWithFlags(&made, cudaEventDisableTiming));
  *event = made;
  return status;
}

int destroy_event(DeviceEvent event) { return cuda_status(cudaEventDestroy(event_of(event))); }

int record_event(int32_t device, DeviceEvent event, DeviceStream stream) {
  const OnDevice current(device);
  return cuda_status(cudaEventRecord(event_of(event), stream_of(stream)));
}

int wait_event(int32_t device, DeviceStream stream, DeviceEvent event) {
  const OnDevice current(device);
  return cuda_status(cudaStreamWaitEvent(stream_of(stream), event_of(event), 0));
}

int query_event(DeviceEvent event, int32_t* is_over) {
  const AllowedInCapture allowed;
  const cudaError_t status = cudaEventQuery(event_of(event));
  *is_over = status == cudaSuccess;
  if (status != cudaErrorNotReady) return cuda_status(status);
  (void)cudaGetLastError();
  return 0;
}

int synchronize_event(DeviceEvent event) {
  const AllowedInCapture allowed;
  return cuda_status(cudaEventSynchronize(event_of(event)));
}

// --- graphs ---

int capture_of(int32_t device, DeviceStream stream, uint64_t* capture) {
  const OnDevice current(device);
  cudaStreamCaptureStatus state = cudaStreamCaptureStatusNone;
  unsigned long long number = 0;
  // The legacy default stream is never captured, and must not be queried while another one is.
  *capture = 0;
  if (reinterpret_cast<uintptr_t>(stream) <= 1) return 0;
  const int status = cuda_status(cudaStreamGetCaptureInfo(stream_of(stream), &state, &number));
  if (status == 0 && state == cudaStreamCaptureStatusActive) *capture = number;
  return status;
}

int begin_capture(int32_t device, DeviceStream stream) {
  const OnDevice current(device);
  return cuda_status(cudaStreamBeginCapture(stream_of(stream), cudaStreamCaptureModeThreadLocal));
}

int end_capture(int32_t device, DeviceStream stream, DeviceGraph* graph) {
  const OnDevice current(device);
  cudaGraph_t captured = nullptr;
  if (const int status = cuda_status(cudaStreamEndCapture(stream_of(stream), &captured))) {
    return status;
  }
  cudaGraphExec_t made = nullptr;
  int status = cuda_status(cudaGraphInstantiate(&made, captured, 0));
  (void)cudaGraphDestroy(captured);
  // Now, because the first replay would allocate while the kernels of other ranks wait for it.
  if (status == 0) status = cuda_status(cudaGraphUpload(made, stream_of(stream)));
  *graph = made;
  return status;
}

int launch_graph(int32_t device, DeviceGraph graph, DeviceStream stream) {
  const OnDevice current(device);
  return cuda_status(cudaGraphLaunch(static_cast<cudaGraphExec_t>(graph), stream_of(stream)));
}

int destroy_graph(DeviceGraph graph) {
  return cuda_status(cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(graph)));
}

// --- kernels ---

int preload(int32_t device) {
  const OnDevice current(device);
  return cuda_status(static_cast<cudaError_t>(preload_on_cuda()));
}

int launch(int32_t device, const DeviceLaunch* launch, DeviceStream stream) {
  const OnDevice current(device);
  return cuda_status(static_cast<cudaError_t>(launch_on_cuda(*launch, stream)));
}

int launch_together(int32_t device, const DeviceLaunch* first, const DeviceLaunch* launches,
                    int32_t num_launches, DeviceStream stream) {
  const OnDevice current(device);
  return cuda_status(
      static_cast<cudaError_t>(launch_together_on_cuda(*first, launches, num_launches, stream)));
}

int max_resident_blocks(int32_t device, int32_t num_threads, int32_t* num_blocks) {
  const OnDevice current(device);
  return cuda_status(
      static_cast<cudaError_t>(max_resident_blocks_on_cuda(num_threads, num_blocks)));
}

int store_words(int32_t device, const DeviceWords* words, DeviceStream stream) {
  const OnDevice current(device);
  return cuda_status(static_cast<cudaError_t>(store_words_on_cuda(*words, stream)));
}

int await_words(int32_t device, const DeviceWords* words, int64_t timeout_ns, uint64_t* found,
                DeviceStream stream) {
  const OnDevice current(device);
  return cuda_status(
      static_cast<cudaError_t>(await_words_on_cuda(*words, timeout_ns, found, stream)));
}

int scale(int32_t device, void* dst, const void* src, int64_t count, int32_t dtype, double factor,
          DeviceStream stream) {
  const OnDevice current(device);
  return cuda_status(static_cast<cudaError_t>(
      scale_on_cuda(dst, src, count, static_cast<DType>(dtype), factor, stream)));
}

}  // namespace
}  // namespace pycoll

#define PYCOLL_TEXT(x) PYCOLL_TEXT_OF(x)
#define PYCOLL_TEXT_OF(x) #x

extern "C" __attribute__((visibility("default"))) const pycoll::DeviceTable* pycoll_device_table() {
  using namespace pycoll;
  static const DeviceTable table = {
      .version = kDeviceTableVersion,
      .table_bytes = sizeof(DeviceTable),
      .launch_bytes = sizeof(DeviceLaunch),
      .name = "cuda",
      .built = "CUDA runtime " PYCOLL_TEXT(CUDART_VERSION),
      .last_error = cuda_last_error,
      .count_devices = count_devices,
      .describe = describe,
      .find_device = find_device,
      .reach = reach,
      .synchronize_device = synchronize_device,
      .allocate = cuda_allocate,
      .free = cuda_free,
      .export_memory = cuda_export_memory,
      .import_memory = cuda_import_memory,
      .release_import = cuda_release_import,
      .withdraw = cuda_withdraw,
      .allocate_host = cuda_allocate_host,
      .free_host = cuda_free_host,
      .copy_now = cuda_copy_now,
      .map_host = cuda_map_host,
      .unmap_host = cuda_unmap_host,
      .create_stream = create_stream,
      .destroy_stream = destroy_stream,
      .synchronize_stream = synchronize_stream,
      .copy = copy,
      .queue_words = cuda_queue_words,
      .create_event = create_event,
      .destroy_event = destroy_event,
      .record_event = record_event,
      .wait_event = wait_event,
      .query_event = query_event,
      .synchronize_event = synchronize_event,
      .capture_of = capture_of,
      .begin_capture = begin_capture,
      .end_capture = end_capture,
      .launch_graph = launch_graph,
      .destroy_graph = destroy_graph,
      .preload = preload,
      .launch = launch,
      .launch_together = launch_together,
      .max_resident_blocks = max_resident_blocks,
      .store_words = store_words,
      .await_words = await_words,
      .scale = scale,
  };
  return &table;
}
