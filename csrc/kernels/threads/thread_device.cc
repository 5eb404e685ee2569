// The emulated device: memory, streams and kernels of the CPU. It lets set-up, launch order,
// errors, deadlines, captures and the Python side run on machines without a GPU, also under
// sanitizers. Its ranks may be threads, or processes that map each other's memory.
//
// It refuses what CUDA refuses: use after a fork; while a stream is captured, allocations, frees,
// waits and work on the default stream. Blocks start where there is room for them, and streams
// share CUDA_DEVICE_MAX_CONNECTIONS hardware queues.
//
// For tests, environment variables reduce its abilities: PYCOLL_DEVICE_THREADS_COUNT (number of
// devices; 1), ..._REACH=0 (no device reaches another one's memory), ..._EXPORT=0 (no process maps
// another one's memory), ..._PROCESSORS (maximum number of blocks at once; 32), ..._WORD_OPS=0 (no
// stream waits for a word), ..._FAIL (the function that fails, and its error:
// "launch:cudaErrorLaunchOutOfResources").
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "base/clock.h"
#include "base/environment.h"
#include "base/error.h"
#include "device/device_table.h"
#include "device/hardware_queues.h"
#include "kernels/threads/launch_threads.h"
#include "kernels/threads/thread_memory.h"
#include "kernels/threads/thread_stream.h"
#include "kernels/threads/thread_words.h"
#include "transport/ring/device_slot.h"

namespace pycoll {
namespace {

// Each is a CPU thread: the numbers are small, but above one.
constexpr int kBlockThreads = 4;
constexpr int kMaxChannels = 2;
constexpr int kCacheBytes = 4 << 20;  // so that tests have the rings of ranks that share a cache

thread_local std::string last_error_text;

/// What a device has besides its memory.
struct ThreadDevice {
  ThreadDevice()
      : queues(static_cast<size_t>(num_hardware_queues())),
        processors(static_cast<int>(env_number("PYCOLL_DEVICE_THREADS_PROCESSORS"))) {}

  std::shared_ptr<ThreadStream> make_stream(int number) {
    return std::make_shared<ThreadStream>(number, queues[num_streams++ % queues.size()]);
  }

  std::vector<ThreadQueue> queues;
  ThreadProcessors processors;
  std::atomic<size_t> num_streams{0};
  ThreadStream* default_stream = nullptr;
};

/// State of the emulated device in one process. As with CUDA, a process that was forked from one
/// that has used the device cannot use it.
struct Machine {
  const pid_t pid = ::getpid();
  const int num_devices = static_cast<int>(env_number("PYCOLL_DEVICE_THREADS_COUNT"));
  ThreadMemory memory;
  std::vector<ThreadDevice> devices{static_cast<size_t>(num_devices)};
  std::mutex mutex;  // protects the members below, and default streams
  std::map<ThreadStream*, std::shared_ptr<ThreadStream>> streams;  // all
  std::map<void*, size_t> host_memory;                             // allocated here
  std::map<void*, size_t> mapped_memory;                           // by map_host()
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

ThreadDevice& device_at(int device) {
  check_device(device);
  return machine().devices[static_cast<size_t>(device)];
}

bool is_default(DeviceStream handle) { return reinterpret_cast<uintptr_t>(handle) <= 2; }

ThreadStream& stream_of(int device, DeviceStream handle) {
  if (!is_default(handle)) return *static_cast<ThreadStream*>(handle);
  ThreadDevice& its = device_at(device);
  Machine& m = machine();
  const std::lock_guard lock(m.mutex);
  if (its.default_stream == nullptr) {
    std::shared_ptr<ThreadStream> made = its.make_stream(device);
    its.default_stream = made.get();
    m.streams.emplace(its.default_stream, std::move(made));
  }
  return *its.default_stream;
}

void refuse_while_capturing(const char* what) {
  if (ThreadStream::any_capture()) {
    throw UsageError(std::string(what) + " is not allowed while a stream is captured");
  }
}

/// For what waits, which a thread that captures may not do, as in CUDA's thread-local mode.
void refuse_where_capturing(const char* what) {
  if (ThreadStream::captures_here()) {
    throw UsageError(std::string(what) + " is not allowed for a thread that captures a stream");
  }
}

/// The stream of new work. The default stream waits for captured streams, which is not possible.
ThreadStream& work_stream(int device, DeviceStream handle) {
  if (is_default(handle)) refuse_while_capturing("work on the default stream");
  return stream_of(device, handle);
}

/// Fails if PYCOLL_DEVICE_THREADS_FAIL says that `function` does.
void fail_if_told(const char* function) {
  const std::string error = told_failure(function);
  if (!error.empty()) throw SystemError(error);
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
    facts->num_processors = device_at(device).processors.num_blocks();
    facts->block_threads = kBlockThreads;
    facts->max_channels = facts->max_blocks = kMaxChannels;
    facts->cache_bytes = kCacheBytes;
    facts->takes_turns = !env_flag("PYCOLL_DEVICE_THREADS_MPS");
    facts->has_word_ops = env_flag("PYCOLL_DEVICE_THREADS_WORD_OPS");
    facts->num_queues = static_cast<int32_t>(device_at(device).queues.size());
    std::snprintf(facts->memory_note, sizeof(facts->memory_note), "%s",
                  machine().memory.note().c_str());
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
    refuse_while_capturing("freeing memory");
    const std::lock_guard lock(machine().mutex);
    const auto found = machine().host_memory.find(memory);
    if (found == machine().host_memory.end()) throw UsageError("no such allocation");
    ::munmap(memory, found->second);
    machine().host_memory.erase(found);
  });
}

int copy_now(int32_t, void* dst, const void* src, size_t nbytes) {
  return guarded([&] {
    refuse_while_capturing("a copy that waits");
    std::memmove(dst, src, nbytes);
  });
}

int map_host(void* memory, size_t nbytes, void** on_device) {
  return guarded([&] {
    refuse_while_capturing("mapping memory");
    const std::lock_guard lock(machine().mutex);
    machine().mapped_memory[memory] = nbytes;
    *on_device = memory;
  });
}

int unmap_host(void* memory) {
  return guarded([&] {
    refuse_while_capturing("unmapping memory");
    const std::lock_guard lock(machine().mutex);
    machine().mapped_memory.erase(memory);
  });
}

/// Whether `p` is in CPU memory that the device accesses.
bool is_accessible_host(const void* p) {
  const std::lock_guard lock(machine().mutex);
  const auto in = [p](const std::map<void*, size_t>& ranges) {
    auto found = ranges.upper_bound(const_cast<void*>(p));
    if (found == ranges.begin()) return false;
    --found;
    return static_cast<const std::byte*>(p) <
           static_cast<const std::byte*>(found->first) + found->second;
  };
  return in(machine().host_memory) || in(machine().mapped_memory);
}

// --- streams ---

int create_stream(int32_t device, DeviceStream* stream) {
  return guarded([&] {
    std::shared_ptr<ThreadStream> made = device_at(device).make_stream(device);
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
  return guarded([&] {
    refuse_where_capturing("waiting for a stream");
    if (is_default(stream)) refuse_while_capturing("waiting for the default stream");
    stream_of(device, stream).synchronize();
  });
}

int copy(int32_t device, void* dst, const void* src, size_t nbytes, DeviceStream stream) {
  return guarded([&] {
    fail_if_told("copy");
    ThreadStream& on = work_stream(device, stream);
    // Like CUDA, copies pageable CPU memory first, which may change or be freed after the call.
    if (nbytes <= 64 << 10 && machine().memory.device_of(src) < 0 && !is_accessible_host(src)) {
      std::vector<std::byte> bytes(nbytes);
      if (nbytes != 0) std::memcpy(bytes.data(), src, nbytes);
      on.push([dst, bytes = std::move(bytes)] {
        if (!bytes.empty()) std::memcpy(dst, bytes.data(), bytes.size());
      });
      return;
    }
    on.push([=] { std::memmove(dst, src, nbytes); });
  });
}

int queue_words(int32_t device, const DeviceWordOp* ops, int32_t num_ops, DeviceStream stream) {
  return guarded([&] {
    if (!env_flag("PYCOLL_DEVICE_THREADS_WORD_OPS")) throw UsageError("operation not supported");
    fail_if_told("queue_words");
    check_word_ops(ops, num_ops, [](const void* at) {
      return machine().memory.device_of(at) >= 0 || is_accessible_host(at);
    });
    work_stream(device, stream).push([own = std::vector(ops, ops + num_ops)] {
      run_word_ops(own);
    });
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
  return guarded([&] { static_cast<ThreadEvent*>(event)->record(work_stream(device, stream)); });
}

int wait_event(int32_t device, DeviceStream stream, DeviceEvent event) {
  return guarded([&] { static_cast<ThreadEvent*>(event)->hold(work_stream(device, stream)); });
}

int query_event(DeviceEvent event, int32_t* is_over) {
  return guarded([&] {
    refuse_where_capturing("querying an event");
    *is_over = static_cast<ThreadEvent*>(event)->is_over();
  });
}

int synchronize_event(DeviceEvent event) {
  return guarded([&] {
    refuse_where_capturing("waiting for an event");
    static_cast<ThreadEvent*>(event)->synchronize();
  });
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
  return guarded([&] {
    if (is_default(stream)) throw UsageError("the default stream cannot be captured");
    stream_of(device, stream).begin_capture();
  });
}

int end_capture(int32_t device, DeviceStream stream, DeviceGraph* graph) {
  return guarded([&] { *graph = new Graph(stream_of(device, stream).end_capture()); });
}

int launch_graph(int32_t device, DeviceGraph graph, DeviceStream stream) {
  return guarded([&] {
    work_stream(device, stream).push([graph = *static_cast<Graph*>(graph)] {
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

/// Runs launches as a task of a stream.
void run_launches(ThreadProcessors& processors, const DeviceLaunch* launches, int num_launches,
                  bool together) {
  ThreadStream::Running& task = *ThreadStream::Running::current();
  const BlockStart start{processors, together, [&task] { task.pass(); }};
  launch_on_threads(launches, num_launches, task.pool(), &start);
}

int launch(int32_t device, const DeviceLaunch* launch, DeviceStream stream) {
  return guarded([&] {
    fail_if_told("launch");
    require_kernel(*launch);
    work_stream(device, stream).push([own = *launch, &processors = device_at(device).processors] {
      run_launches(processors, &own, 1, false);
    });
  });
}

int launch_together(int32_t device, const DeviceLaunch* first, const DeviceLaunch* launches,
                    int32_t num_launches, DeviceStream stream) {
  return guarded([&] {
    fail_if_told("launch");
    require_kernel(*first);
    ThreadProcessors& processors = device_at(device).processors;
    if (num_launches * first->num_channels > processors.num_blocks()) {
      throw UsageError("too many blocks for a cooperative launch");
    }
    work_stream(device, stream).push([launches, num_launches, &processors] {
      run_launches(processors, launches, num_launches, true);
    });
  });
}

int max_resident_blocks(int32_t device, int32_t, int32_t* num_blocks) {
  return guarded([&] { *num_blocks = device_at(device).processors.num_blocks(); });
}

int store_words(int32_t device, const DeviceWords* words, DeviceStream stream) {
  return guarded([&] {
    fail_if_told("store_words");
    work_stream(device, stream).push([own = *words] {
      for (int i = 0; i < own.num; ++i) {
        if (told_failure("lost_words").empty()) device::store_release(*own.at[i], own.value[i]);
      }
    });
  });
}

int await_words(int32_t device, const DeviceWords* words, int64_t timeout_ns, uint64_t* found,
                DeviceStream stream) {
  return guarded([&] {
    work_stream(device, stream).push([own = *words, timeout_ns, found] {
      const int64_t deadline = now_ns() + timeout_ns;
      for (int i = 0; i < own.num; ++i) {
        do {
          found[i] = device::load_acquire(*own.at[i]);
        } while (found[i] != own.value[i] && now_ns() < deadline && ::sched_yield() == 0);
      }
    });
  });
}

int scale(int32_t device, void* dst, const void* src, int64_t count, int32_t dtype, double factor,
          DeviceStream stream) {
  return guarded([&] {
    fail_if_told("scale");
    work_stream(device, stream).push([=] {
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
      .copy_now = copy_now,
      .map_host = map_host,
      .unmap_host = unmap_host,
      .create_stream = create_stream,
      .destroy_stream = destroy_stream,
      .synchronize_stream = synchronize_stream,
      .copy = copy,
      .queue_words = queue_words,
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
