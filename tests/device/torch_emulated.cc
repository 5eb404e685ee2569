// The emulated device (csrc/kernels/threads/thread_device.cc) as a device of torch, "emulated:0":
// memory, streams and events are its own. What torch computes there runs on the host, behind the
// current stream, so that code that forgets to wait for a stream reads what was there before.
//
// Memory is handed out anew as soon as its tensor is gone, as CUDA's allocator does: but for
// streams that it was recorded on, which are waited for.
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dlfcn.h>
#include <torch/extension.h>
#include <torch/library.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <future>
#include <map>
#include <mutex>
#include <set>

#include "device/device_table.h"

namespace {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
constexpr int kPoolStreams = 4;
constexpr size_t kNumbersBytes = 256;

const pycoll::DeviceTable& table() {
  static const pycoll::DeviceTable* const found = [] {
    const char* path = std::getenv("PYCOLL_DEVICE_LIBRARY");
    TORCH_CHECK(path != nullptr, "PYCOLL_DEVICE_LIBRARY names no library");
    void* library = ::dlopen(path, RTLD_NOW | RTLD_LOCAL);
    TORCH_CHECK(library != nullptr, ::dlerror());
    using Get = const pycoll::DeviceTable* (*)();
    return reinterpret_cast<Get>(::dlsym(library, "pycoll_device_table"))();
  }();
  return *found;
}

void check(int status) { TORCH_CHECK(status == 0, "the emulated device: ", table().last_error()); }

thread_local c10::DeviceIndex current_device = 0;
thread_local std::map<c10::DeviceIndex, c10::StreamId> current_streams;

/// The streams of one process: a forked one has none of them.
struct Streams {
  const pid_t pid = ::getpid();
  std::mutex mutex;
  std::map<std::pair<int, c10::StreamId>, pycoll::DeviceStream> handles;
  c10::StreamId next = 0;
};
Streams& streams() {
  static Streams* current = nullptr;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (current == nullptr || current->pid != ::getpid()) current = new Streams;
  return *current;
}

pycoll::DeviceStream handle_of(c10::Stream stream) {
  if (stream.id() == 0) return nullptr;  // the default one
  Streams& all = streams();
  const std::lock_guard lock(all.mutex);
  pycoll::DeviceStream& handle = all.handles[{stream.device_index(), stream.id()}];
  if (handle == nullptr) check(table().create_stream(stream.device_index(), &handle));
  return handle;
}

c10::Stream stream_of(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), id);
}
c10::DeviceIndex index_of(c10::Device device) {
  return device.has_index() ? device.index() : current_device;
}
c10::Stream current_stream(c10::Device device) {
  return stream_of(index_of(device), current_streams[index_of(device)]);
}
void wait_for(c10::Stream stream) {
  check(table().synchronize_stream(stream.device_index(), handle_of(stream)));
}

// --- memory ---

struct Block {
  void* data;
  size_t nbytes;
  int device;
  pid_t pid;
  std::set<std::pair<int, c10::StreamId>> used_on;
};

struct Pool {
  std::mutex mutex;
  std::multimap<std::pair<int, size_t>, Block*> free;
};
Pool& pool() {
  static auto* const all = new Pool;
  return *all;
}

void give_back(void* context) {
  auto* const block = static_cast<Block*>(context);
  if (block->pid != ::getpid()) return;
  for (const auto& [device, id] : block->used_on) wait_for(stream_of(device, id));
  block->used_on.clear();
  const std::lock_guard lock(pool().mutex);
  pool().free.emplace(std::pair(block->device, block->nbytes), block);
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    const c10::Device device(kType, current_device);
    if (nbytes == 0) return {nullptr, device};
    const size_t rounded = (nbytes + 511) / 512 * 512;
    Block* block = nullptr;
    {
      const std::lock_guard lock(pool().mutex);
      const auto found = pool().free.find({current_device, rounded});
      if (found != pool().free.end() && found->second->pid == ::getpid()) {
        block = found->second;
        pool().free.erase(found);
      }
    }
    if (block == nullptr) {
      block = new Block{nullptr, rounded, current_device, ::getpid(), {}};
      check(table().allocate(current_device, rounded, &block->data));
    }
    return {block->data, block, give_back, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    check(table().copy(current_device, to, from, nbytes,
                       handle_of(current_stream(c10::Device(kType, current_device)))));
  }
};
Memory memory;
REGISTER_ALLOCATOR(kType, &memory)

// --- streams and events ---

struct Event {
  pycoll::DeviceEvent handle;
  int device;
  std::shared_future<int64_t> reached_ns;  // of an event with timing

  /// Lets a thread note when the work before the event is over.
  void note_time() {
    if (reached_ns.valid()) reached_ns.wait();
    const auto wait = [handle = handle]() -> int64_t {
      check(table().synchronize_event(handle));
      return std::chrono::steady_clock::now().time_since_epoch().count();
    };
    reached_ns = std::async(std::launch::async, wait).share();
  }
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::DeviceIndex before = current_device;
    if (device.has_index()) current_device = device.index();
    return {kType, before};
  }
  c10::Device getDevice() const override { return {kType, current_device}; }
  void setDevice(c10::Device device) const override { current_device = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const override { return current_stream(device); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(index_of(device), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    Streams& all = streams();
    const std::lock_guard lock(all.mutex);
    return stream_of(index_of(device), all.next++ % kPoolStreams + 1);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return getStreamFromGlobalPool(device, false);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = current_stream(stream.device());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return handle_of(stream); }
  c10::DeviceIndex deviceCount() const noexcept override {
    int32_t count = 0;
    table().count_devices(&count);
    return static_cast<c10::DeviceIndex>(count);
  }
  bool queryStream(const c10::Stream& stream) const override {
    wait_for(stream);
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override { wait_for(stream); }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    check(table().synchronize_device(device));
  }
  bool isStreamCapturing(const c10::Stream& stream) const {
    uint64_t capture = 0;
    check(table().capture_of(stream.device_index(), handle_of(stream), &capture));
    return capture != 0;
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag flag) const override {
    if (*event == nullptr) {
      auto* const made = new Event{nullptr, stream.device_index(), {}};
      check(table().create_event(made->device, &made->handle));
      *event = made;
    }
    auto* const own = static_cast<Event*>(*event);
    check(table().record_event(own->device, own->handle, handle_of(stream)));
    if (flag == c10::EventFlag::BACKEND_DEFAULT) own->note_time();
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    const auto ns = [](void* event) { return static_cast<Event*>(event)->reached_ns.get(); };
    return static_cast<double>(ns(second) - ns(first)) / 1e6;
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    check(table().wait_event(stream.device_index(), handle_of(stream),
                             static_cast<Event*>(event)->handle));
  }
  bool queryEvent(void* event) const override {
    int32_t is_over = 1;
    if (event != nullptr) check(table().query_event(static_cast<Event*>(event)->handle, &is_over));
    return is_over != 0;
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) check(table().synchronize_event(static_cast<Event*>(event)->handle));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    auto* const own = static_cast<Event*>(event);
    if (own == nullptr) return;
    if (own->reached_ns.valid()) own->reached_ns.wait();
    table().destroy_event(own->handle);
    delete own;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    if (data.get_deleter() != give_back) return;
    static_cast<Block*>(data.get_context())->used_on.insert({stream.device_index(), stream.id()});
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return Guard().deviceCount(); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(current_device, device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(current_device, device);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    c10::DataPtr fresh = memory.allocate(nbytes);
    const size_t kept = std::min(nbytes, storage.nbytes());
    if (kept != 0) memory.copy_data(fresh.get(), storage.data(), kept);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(nbytes);
  }
};

// --- operators ---

/// The tensor as the host sees it, once all that was given to the current stream is over.
at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.device().is_cpu()) return tensor;
  wait_for(current_stream(tensor.device()));
  if (tensor.numel() == 0) {
    return at::detail::empty_strided_cpu(tensor.sizes(), tensor.strides(), tensor.scalar_type());
  }
  at::Tensor host = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(),
                                  at::TensorOptions(tensor.scalar_type()));
  if (tensor.is_conj()) host._set_conj(true);
  if (tensor.is_neg()) host._set_neg(true);
  return host;
}

at::Tensor empty(c10::IntArrayRef sizes, std::optional<c10::ScalarType> dtype,
                 std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>,
                 std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(c10::Device(kType, device ? index_of(*device) : current_device));
  return at::detail::empty_generic(sizes, &memory,
                                   c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                         std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                         std::optional<c10::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(c10::Device(kType, device ? index_of(*device) : current_device));
  return at::detail::empty_strided_generic(sizes, strides, &memory,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

thread_local bool in_fallback = false;
std::atomic<int64_t> num_host_copies{0};

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  // Copies that a program asks for; those of an operator that the host computes are ours. Short
  // ones are numbers.
  const bool is_tensor = to.nbytes() > kNumbersBytes;
  if (!in_fallback && is_tensor && from.is_cpu() != to.is_cpu()) ++num_host_copies;
  const bool plain = from.is_contiguous() && to.is_contiguous() && !from.is_conj() &&
                     !to.is_conj() && !from.is_neg() && !to.is_neg() &&
                     from.scalar_type() == to.scalar_type() && from.numel() == to.numel();
  if (plain && from.device() == to.device()) {  // in its stream's order; the host does not wait
    const c10::Stream stream = current_stream(to.device());
    if (to.numel() != 0) {
      check(table().copy(stream.device_index(), to.data_ptr(), from.data_ptr(), to.nbytes(),
                         handle_of(stream)));
    }
    return to;
  }
  on_host(to).copy_(on_host(from));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  return at::native::_local_scalar_dense_cpu(on_host(tensor));
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size,
                         std::optional<at::MemoryFormat>) {
  at::native::resize_impl_cpu_(self.unsafeGetTensorImpl(), C10_AS_INTARRAYREF_SLOW(size),
                               std::nullopt, /*resize_storage=*/false);
  at::TensorImpl* const impl = self.unsafeGetTensorImpl();
  const size_t needed = impl->numel() == 0 ? 0
                                           : at::detail::computeStorageNbytes(
                                                 impl->sizes(), impl->strides(), impl->itemsize(),
                                                 impl->storage_offset());
  if (needed > self.storage().nbytes()) {
    const c10::DeviceGuard guard(self.device());
    Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  }
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset,
                        c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  if (strides.data() != nullptr && strides.size() == sizes.size()) {
    self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  } else {
    self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  }
  return self;
}

/// What the host computes with: the tensors' own memory, so that strides and alignment, and with
/// them the order of additions, are those of the same operator on the CPU.
std::vector<at::Tensor> to_cpu(at::TensorList tensors) {
  std::vector<at::Tensor> found;
  for (const at::Tensor& tensor : tensors) found.push_back(on_host(tensor));
  return found;
}

void on_the_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const bool before = std::exchange(in_fallback, true);
  at::native::cpu_fallback(op, stack);
  in_fallback = before;
}

/// A tensor that the host has computed, on the device of `like`; undefined ones stay so.
at::Tensor on_device_of(const at::Tensor& like, const at::Tensor& host) {
  if (!host.defined()) return host;
  const bool before = std::exchange(in_fallback, true);
  at::Tensor made = host.to(like.device());
  in_fallback = before;
  return made;
}

// torch's convolution has operators for other devices, which the CPU does not have.
at::Tensor convolution(const at::Tensor& x, const at::Tensor& weight,
                       const std::optional<at::Tensor>& bias, c10::IntArrayRef stride,
                       c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
                       c10::IntArrayRef output_padding, int64_t groups) {
  std::optional<at::Tensor> host_bias;
  if (bias && bias->defined()) host_bias = on_host(*bias);
  return on_device_of(x, at::convolution(on_host(x), on_host(weight), host_bias, stride, padding,
                                         dilation, transposed, output_padding, groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& x, const at::Tensor& weight,
    c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
    c10::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> needed) {
  const int64_t num_biases = transposed ? weight.size(1) * groups : weight.size(0);
  const auto [of_x, of_weight, of_bias] = at::convolution_backward(
      on_host(gradient), on_host(x), on_host(weight), c10::IntArrayRef(num_biases), stride, padding,
      dilation, transposed, output_padding, groups, needed);
  return {on_device_of(x, of_x), on_device_of(x, of_weight), on_device_of(x, of_bias)};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_to_cpu", to_cpu);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("resize_", resize);
  m.impl("view", [](const at::Tensor& x, c10::IntArrayRef s) { return at::native::view(x, s); });
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_.source_Storage", [](at::Tensor& self, at::Storage source) -> at::Tensor& {
    const auto count = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
    return set_storage(self, std::move(source), 0, {count}, {});
  });
  m.impl("set_.source_Storage_storage_offset", set_storage);
  // torch would compute these by several operators, whose last bits differ from those of its own
  // function for the CPU.
  for (const char* name : {"native_layer_norm", "native_layer_norm_backward"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_the_host>());
  }
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_host>());
}

/// As torch.cuda.CUDAGraph: what is given to the current stream between begin and end, as one.
class Graph {
 public:
  void capture_begin() { check(table().begin_capture(current_device, current_handle())); }
  void capture_end() { check(table().end_capture(current_device, current_handle(), &graph_)); }
  void replay() { check(table().launch_graph(current_device, graph_, current_handle())); }
  void reset() { check(table().destroy_graph(std::exchange(graph_, nullptr))); }

 private:
  static pycoll::DeviceStream current_handle() {
    return handle_of(current_stream(c10::Device(kType, current_device)));
  }
  pycoll::DeviceGraph graph_ = nullptr;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;
  py::class_<Graph>(m, "Graph")
      .def(py::init<>())
      .def("capture_begin", &Graph::capture_begin)
      .def("capture_end", &Graph::capture_end)
      .def("replay", &Graph::replay)
      .def("reset", &Graph::reset);
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  m.def("num_host_copies", [] { return num_host_copies.load(); });
  m.def("device_count", [] { return static_cast<int>(Guard().deviceCount()); });
}
