// The emulated device: memory, streams and kernels of the CPU. It lets set-up, launch order,
// errors, deadlines, captures and the Python side run on machines without a GPU, also under
// sanitizers. Its ranks may be threads, or processes that map each other's memory.
//
// For tests, environment variables reduce its abilities: PYCOLL_DEVICE_THREADS_COUNT (number of
// devices; 1), ..._REACH=0 (no device reaches another one's memory), ..._EXPORT=0 (no process maps
// another one's memory), ..._PROCESSORS (maximum number of blocks at once; 32).
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "base/environment.h"
#include "base/error.h"
#include "device/device_table.h"
#include "kernels/threads/launch_threads.h"
#include "kernels/threads/thread_memory.h"
#include "kernels/threads/thread_stream.h"

namespace pycoll {
namespace {

constexpr int kNumProcessors = 32;  // the default of PYCOLL_DEVICE_THREADS_PROCESSORS
// Each is a CPU thread: the numbers are small, but above one.
constexpr int kBlockThreads = 4;
constexpr int kMaxChannels = 2;

thread_local std::string last_error_text;

/// State of the emulated device in one process. As with CUDA, a process that was forked from one
/// that has used the device cannot use it.
struct Machine {
  const pid_t pid = ::getpid();
  const int num_devices = static_cast<int>(env_number("PYCOLL_DEVICE_THREADS_COUNT"));
  ThreadMemory memory;
  std::mutex mutex;                                                // protects the members below
  std::vector<ThreadStream*> defaults;                             // by device
  std::map<ThreadStream*, std::shared_ptr<ThreadStream>> streams;  // all
  std::map<void*, size_t> host_memory;
};

Machine& machine() {
  static std::atomic<Machine*> current{nullptr};
  Machine* found = current.load();
  if (found != nullptr && found->pid == ::getpid()) return *found;
  if (found != nullptr) {
    throw SystemError("initialization error: this process was forked from one that had used it");
  }
  // Never deleted: threads may use it until the process has ended.
  auto* fresh = new Machine;
  if (current.compare_exchange_strong(found, fresh)) return *fresh;
  delete fresh;
  return *found;
}

void check_device(int device) {
  if (device >= 0 && device < machine().num_devices) return;
  throw UsageError("there is no device " + std::to_string(device) + ", only " +
                   std::to_string(machine().num_devices));
}

ThreadStream& stream_of(int device, DeviceStream handle) {
  if (reinterpret_cast<uintptr_t>(handle) > 2) return *static_cast<ThreadStream*>(handle);
  check_device(device);
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  m.defaults.resize(static_cast<size_t>(m.num_devices));
  ThreadStream*& stream = m.defaults[static_cast<size_t>(device)];
  if (stream == nullptr) {
    auto made = std::make_shared<ThreadStream>(device);
    stream = made.get();
    m.streams.emplace(stream, std::move(made));
  }
  return *stream;
}

void refuse_while_capturing(const char* what) {
  if (ThreadStream::any_capture()) {
    throw UsageError(std::string(what) + " is not allowed while a stream is captured");
  }
}

template <class Body>
int guarded(Body&& body) {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    last_error_text = error.what();
    return 1;
  }
}

// --- devices ---

const char* last_error() { return last_error_text.c_str(); }

int count_devices(int32_t* num_devices) {
  return guarded([&] { *num_devices = machine().num_devices; });
}

int describe(int32_t device, DeviceFacts* facts) {
  return guarded([&] {
    check_device(device);
    *facts = {};
    std::snprintf(facts->name, sizeof(facts->name), "emulated by threads of the host");
    std::snprintf(facts->uuid, sizeof(facts->uuid), "emulated-%d", device);
    facts->total_bytes = static_cast<uint64_t>(::sysconf(_SC_PHYS_PAGES)) * 4096;
    facts->num_processors = kNumProcessors;
    facts->block_threads = kBlockThreads;
    facts->max_channels = kMaxChannels;
  });
}

int find_device(const void* p, int32_t* device) {
  return guarded([&] { *device = machine().memory.device_of(p); });
}

int reach(int32_t device, int32_t peer, int32_t* can) {
  *can = device == peer || env_flag("PYCOLL_DEVICE_THREADS_REACH");
  return 0;
}

int synchronize_device(int32_t device) {
  return guarded([&] {
    refuse_while_capturing("waiting for a device");
    // Another thread may destroy a stream during the wait for it.
    std::vector<std::shared_ptr<ThreadStream>> streams;
    {
      const std::lock_guard lock(machine().mutex);
      for (const auto& [handle, stream] : machine().streams) streams.push_back(stream);
    }
    for (const auto& stream : streams) {
      if (stream->device() == device) stream->synchronize();
    }
  });
}

// --- memory ---

int allocate(int32_t device, size_t nbytes, void** memory) {
  return guarded([&] {
    check_device(device);
    refuse_while_capturing("an allocation");
    *memory = machine().memory.allocate(device, nbytes);
  });
}

int free_memory(void* memory) {
  return guarded([&] {
    refuse_while_capturing("freeing memory");
    machine().memory.free(memory);
  });
}

int export_memory(const void* p, DeviceHandle* handle, int32_t* fd) {
  return guarded([&] { machine().memory.export_memory(p, handle, fd); });
}

int import_memory(int32_t device, const DeviceHandle* handle, int32_t fd, void** base) {
  return guarded([&] { *base = machine().memory.import_memory(device, *handle, fd); });
}

int withdraw(int32_t, void* p, int32_t* can) {
  return guarded([&] { *can = machine().memory.withdraw(p); });
}

int allocate_host(size_t nbytes, void** memory) {
  return guarded([&] {
    refuse_while_capturing("an allocation");
    void* mapped =
        ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw_system_error("mmap");
    const std::lock_guard lock(machine().mutex);
    machine().host_memory[mapped] = nbytes;
    *memory = mapped;
  });
}

int free_host(void* memory) {
  return guarded([&] {
    const std::lock_guard lock(machine().mutex);
    const auto found = machine().host_memory.find(memory);
    if (found == machine().host_memory.end()) throw UsageError("no such allocation");
    ::munmap(memory, found->second);
    machine().host_memory.erase(found);
  });
}

int map_host(void* memory, size_t, void** on_device) {
  *on_device = memory;
  return 0;
}

int unmap_host(void*) { return 0; }

// --- streams ---

int create_stream(int32_t device, DeviceStream* stream) {
  return guarded([&] {
    check_device(device);
    auto made = std::make_shared<ThreadStream>(device);
    *stream = made.get();
    const std::lock_guard lock(machine().mutex);
    machine().streams.emplace(made.get(), std::move(made));
  });
}

int destroy_stream(DeviceStream handle) {
  return guarded([&] {
    std::shared_ptr<ThreadStream> stream;  // destroyed without the lock: it runs remaining tasks
    const std::lock_guard lock(machine().mutex);
    const auto found = machine().streams.find(static_cast<ThreadStream*>(handle));
    if (found == machine().streams.end()) throw UsageError("no such stream");
    stream = std::move(found->second);
    machine().streams.erase(found);
  });
}

int synchronize_stream(int32_t device, DeviceStream stream) {
  return guarded([&] { stream_of(device, stream).synchronize(); });
}

int copy(int32_t device, void* dst, const void* src, size_t nbytes, DeviceStream stream) {
  return guarded([&] {
    // Like CUDA, copies pageable CPU memory first, which may change or be freed after the call.
    if (nbytes <= 64 << 10 && machine().memory.device_of(src) < 0) {
      std::vector<std::byte> bytes(nbytes);
      if (nbytes != 0) std::memcpy(bytes.data(), src, nbytes);
      stream_of(device, stream).push([dst, bytes = std::move(bytes)] {
        if (!bytes.empty()) std::memcpy(dst, bytes.data(), bytes.size());
      });
      return;
    }
    stream_of(device, stream).push([=] { std::memmove(dst, src, nbytes); });
  });
}

int create_event(int32_t, DeviceEvent* event) {
  *event = new ThreadEvent;
  return 0;
}

int destroy_event(DeviceEvent event) {
  delete static_cast<ThreadEvent*>(event);
  return 0;
}

int record_event(int32_t device, DeviceEvent event, DeviceStream stream) {
  return guarded([&] { static_cast<ThreadEvent*>(event)->record(stream_of(device, stream)); });
}

int wait_event(int32_t device, DeviceStream stream, DeviceEvent event) {
  return guarded([&] { static_cast<ThreadEvent*>(event)->hold(stream_of(device, stream)); });
}

int query_event(DeviceEvent event, int32_t* is_over) {
  return guarded([&] {
    if (ThreadStream::captures_here()) {
      throw UsageError("querying an event is not allowed for a thread that captures a stream");
    }
    *is_over = static_cast<ThreadEvent*>(event)->is_over();
  });
}

int synchronize_event(DeviceEvent event) {
  return guarded([&] { static_cast<ThreadEvent*>(event)->synchronize(); });
}

// --- graphs ---

using Graph = std::shared_ptr<ThreadCapture>;

int capture_of(int32_t device, DeviceStream stream, uint64_t* number) {
  return guarded([&] {
    const Graph& capture = stream_of(device, stream).capture();
    *number = capture == nullptr ? 0 : capture->number;
  });
}

int begin_capture(int32_t device, DeviceStream stream) {
  return guarded([&] { stream_of(device, stream).begin_capture(); });
}

int end_capture(int32_t device, DeviceStream stream, DeviceGraph* graph) {
  return guarded([&] { *graph = new Graph(stream_of(device, stream).end_capture()); });
}

int launch_graph(int32_t device, DeviceGraph graph, DeviceStream stream) {
  return guarded([&] {
    stream_of(device, stream).push([graph = *static_cast<Graph*>(graph)] {
      for (const ThreadTask& task : graph->tasks) task();
    });
  });
}

int destroy_graph(DeviceGraph graph) {
  delete static_cast<Graph*>(graph);
  return 0;
}

// --- kernels ---

int preload(int32_t device) {
  return guarded([&] { check_device(device); });
}

int launch(int32_t device, const DeviceLaunch* launch, DeviceStream stream) {
  return guarded([&] {
    stream_of(device, stream).push([own = *launch] {
      ThreadPool pool;
      launch_on_threads(&own, 1, pool);
    });
  });
}

int launch_together(int32_t device, const DeviceLaunch*, const DeviceLaunch* launches,
                    int32_t num_launches, DeviceStream stream) {
  return guarded([&] {
    stream_of(device, stream).push([=] {
      ThreadPool pool;
      launch_on_threads(launches, num_launches, pool);
    });
  });
}

int max_resident_blocks(int32_t, const DeviceLaunch*, int32_t* num_blocks) {
  *num_blocks = static_cast<int>(env_number("PYCOLL_DEVICE_THREADS_PROCESSORS"));
  return 0;
}

int scale(int32_t device, void* dst, const void* src, int64_t count, int32_t dtype, double factor,
          DeviceStream stream) {
  return guarded([&] {
    stream_of(device, stream).push([=] {
      scale_on_threads(dst, src, count, static_cast<DType>(dtype), factor);
    });
  });
}

}  // namespace
}  // namespace pycoll

extern "C" __attribute__((visibility("default"))) const pycoll::DeviceTable* pycoll_device_table() {
  using namespace pycoll;
  static const DeviceTable table = {
      .version = kDeviceTableVersion,
      .table_bytes = sizeof(DeviceTable),
      .launch_bytes = sizeof(DeviceLaunch),
      .name = "threads",
      .built = "emulated by threads of the host",
      .last_error = last_error,
      .count_devices = count_devices,
      .describe = describe,
      .find_device = find_device,
      .reach = reach,
      .synchronize_device = synchronize_device,
      .allocate = allocate,
      .free = free_memory,
      .export_memory = export_memory,
      .import_memory = import_memory,
      .release_import = free_memory,
      .withdraw = withdraw,
      .allocate_host = allocate_host,
      .free_host = free_host,
      .map_host = map_host,
      .unmap_host = unmap_host,
      .create_stream = create_stream,
      .destroy_stream = destroy_stream,
      .synchronize_stream = synchronize_stream,
      .copy = copy,
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
      .scale = scale,
  };
  return &table;
}
