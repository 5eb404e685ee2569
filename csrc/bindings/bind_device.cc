// Devices for Python: device information, memory, streams and asynchronous operations.
// Streams and captures are for tests and benchmarks, which run without a GPU array library.
#include <pybind11/pybind11.h>

#include <string>
#include <string_view>

#include "base/error.h"
#include "bindings/arguments/array.h"
#include "bindings/arguments/dlpack.h"
#include "bindings/bind.h"
#include "bindings/device_objects.h"
#include "bindings/errors.h"
#include "device/device.h"
#include "device/device_library.h"

namespace pycoll {
namespace py = pybind11;

namespace {

Device device_of(int index) {
  const DeviceTable& table = device_table();
  int32_t num_devices = 0;
  Device(table, 0).check(table.count_devices(&num_devices), "counting devices");
  if (index < 0 || index >= num_devices) {
    throw UsageError("device is " + std::to_string(index) + ", expected one of 0.." +
                     std::to_string(num_devices - 1));
  }
  return {table, index};
}

/// Devices and libraries that this process finds. It never raises, since `pycoll info` uses it to
/// diagnose errors.
py::dict device_info() {
  py::dict facts;
  std::string note;
  const DeviceTable* table = find_device_table(note);
  facts["library"] = note;
  py::list devices;
  int32_t num_devices = 0;
  if (table != nullptr) {
    facts["kind"] = table->name;
    facts["built"] = table->built;
    if (table->count_devices(&num_devices) != 0) facts["error"] = table->last_error();
  }
  for (int index = 0; index < num_devices; ++index) {
    const DeviceFacts found = Device(*table, index).facts();
    py::dict device;
    device["index"] = index;
    device["name"] = static_cast<const char*>(found.name);
    device["uuid"] = static_cast<const char*>(found.uuid);
    device["bytes"] = found.total_bytes;
    device["processors"] = found.num_processors;
    device["capability"] = found.capability;
    device["takes_turns"] = found.takes_turns != 0;
    devices.append(device);
  }
  facts["devices"] = devices;
  return facts;
}

/// A stream of a device; its work can be captured into graphs.
class StreamObject {
 public:
  explicit StreamObject(int device) : device_(device_of(device)), stream_(device_) {}
  ~StreamObject() {
    for (DeviceGraph graph : graphs_) device_.table().destroy_graph(graph);
  }
  StreamObject(const StreamObject&) = delete;

  uintptr_t handle() const { return reinterpret_cast<uintptr_t>(stream_.get()); }
  void synchronize() const {
    const py::gil_scoped_release gil;
    device_.synchronize(stream_.get());
  }
  void begin_capture() const {
    device_.check(device_.table().begin_capture(device_.index(), stream_.get()),
                  "beginning a capture");
  }
  /// The number of the graph.
  size_t end_capture() {
    DeviceGraph graph = nullptr;
    {
      const py::gil_scoped_release gil;  // may wait for the device
      device_.check(device_.table().end_capture(device_.index(), stream_.get(), &graph),
                    "ending a capture");
    }
    graphs_.push_back(graph);
    return graphs_.size() - 1;
  }
  void launch(size_t graph) const {
    if (graph >= graphs_.size()) {
      throw UsageError("this stream has no graph " + std::to_string(graph));
    }
    const DeviceGraph launched = graphs_[graph];
    const py::gil_scoped_release gil;  // waits while too many launches are queued
    device_.check(device_.table().launch_graph(device_.index(), launched, stream_.get()),
                  "launching a graph");
  }
  void hold(uintptr_t other) const {
    StreamEvent event(device_);
    event.record(reinterpret_cast<DeviceStream>(other));
    event.hold(stream_.get());
  }

 private:
  Device device_;
  Stream stream_;
  std::vector<DeviceGraph> graphs_;
};

/// Start of `array`'s bytes in the memory, at `offset`.
std::byte* part_of(const DeviceMemory& memory, const ArrayView& array, size_t offset) {
  if (offset > memory.nbytes() || static_cast<size_t>(array.nbytes()) > memory.nbytes() - offset) {
    throw UsageError("array has " + std::to_string(array.nbytes()) + " bytes, the memory " +
                     std::to_string(memory.nbytes()) + ", from byte " + std::to_string(offset));
  }
  return memory.data() + offset;
}

void copy_from_host(const DeviceMemory& memory, const py::object& array, size_t offset,
                    uintptr_t stream) {
  const ArrayView view(array.ptr(), "array", /*writable=*/false);
  std::byte* const data = part_of(memory, view, offset);
  const auto to = reinterpret_cast<DeviceStream>(stream);
  const py::gil_scoped_release gil;
  memory.device().copy(data, view.data, static_cast<size_t>(view.nbytes()), to);
  memory.device().synchronize(to);
}

void copy_to_host(const DeviceMemory& memory, const py::object& array, size_t offset,
                  uintptr_t stream) {
  const ArrayView view(array.ptr(), "array", /*writable=*/true);
  const std::byte* const data = part_of(memory, view, offset);
  const auto from = reinterpret_cast<DeviceStream>(stream);
  const py::gil_scoped_release gil;
  memory.device().copy(view.data, data, static_cast<size_t>(view.nbytes()), from);
  memory.device().synchronize(from);
}

/// The memory as a DLPack tensor of bytes, and what it keeps alive.
struct ExportedMemory {
  std::shared_ptr<DeviceMemory> memory;
  int64_t nbytes;
  DLManagedTensor managed;

  static void release(DLManagedTensor* managed) {
    const py::gil_scoped_acquire gil;
    delete static_cast<ExportedMemory*>(managed->manager_ctx);
  }
};

/// A DLPack capsule of the memory, for libraries with arrays of that device.
py::object export_dlpack(const std::shared_ptr<DeviceMemory>& memory, const py::object& stream) {
  (void)stream;  // nothing is queued on memory that no operation has used
  constexpr int32_t kCuda = 2;
  constexpr int32_t kExtension = 12;
  const Device& device = memory->device();
  const bool is_cuda = device.table().name == std::string_view("cuda");
  auto* const made = new ExportedMemory{memory, static_cast<int64_t>(memory->nbytes()), {}};
  DLTensor& tensor = made->managed.dl_tensor;
  tensor.data = memory->data();
  tensor.device = {is_cuda ? kCuda : kExtension, device.index()};
  tensor.ndim = 1;
  tensor.dtype = {kDLUInt, 8, 1};
  tensor.shape = &made->nbytes;
  made->managed.manager_ctx = made;
  made->managed.deleter = ExportedMemory::release;
  PyObject* const capsule = PyCapsule_New(&made->managed, "dltensor", [](PyObject* unused) {
    if (PyCapsule_IsValid(unused, "dltensor") == 0) return;  // a library has taken the tensor
    ExportedMemory::release(
        static_cast<DLManagedTensor*>(PyCapsule_GetPointer(unused, "dltensor")));
  });
  if (capsule == nullptr) {
    delete made;
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(capsule);
}

}  // namespace

void bind_device(py::module_& m) {
  m.def(
      "device_of",
      [](uintptr_t address) {
        int32_t device = -1;
        device_table().find_device(reinterpret_cast<const void*>(address), &device);
        return device;
      },
      py::arg("address"), "The device whose memory contains the address; -1: none.");
  m.def("device_info", device_info, "The device library of this process, and its devices.");

  py::class_<DeviceMemory, std::shared_ptr<DeviceMemory>>(m, "DeviceMemory")
      .def(py::init([](int device, size_t nbytes) {
             return for_python(std::make_shared<DeviceMemory>(device_of(device), nbytes));
           }),
           py::arg("device"), py::arg("nbytes"))
      .def_property_readonly(
          "address",
          [](const DeviceMemory& memory) { return reinterpret_cast<uintptr_t>(memory.data()); })
      .def_property_readonly("nbytes", &DeviceMemory::nbytes)
      .def_property_readonly("device",
                             [](const DeviceMemory& memory) { return memory.device().index(); })
      .def("__dlpack__", export_dlpack, py::arg("stream") = py::none())
      .def("copy_from_host", copy_from_host, py::arg("array"), py::arg("offset") = 0,
           py::arg("stream") = 0)
      .def("copy_to_host", copy_to_host, py::arg("array"), py::arg("offset") = 0,
           py::arg("stream") = 0);

  py::class_<StreamObject>(m, "DeviceStream")
      .def(py::init<int>(), py::arg("device") = 0)
      .def_property_readonly("handle", &StreamObject::handle)
      .def("synchronize", &StreamObject::synchronize)
      .def("hold", &StreamObject::hold, py::arg("other"))
      .def("begin_capture", &StreamObject::begin_capture)
      .def("end_capture", &StreamObject::end_capture)
      .def("launch", &StreamObject::launch, py::arg("graph"));

  py::class_<DeviceWorkObject>(m, "DeviceWork")
      .def("done", [](const DeviceWorkObject& object) { return object.work->done(); })
      .def(
          "given",
          [](const DeviceWorkObject& object, double timeout_s) {
            const py::gil_scoped_release gil;
            return object.work->given(timeout_s);
          },
          py::arg("timeout_s"))
      .def("hold",
           [](const DeviceWorkObject& object) {
             const ArrayView view(object.array.ptr(), "x", false, Memory::kHostOrDevice);
             object.work->hold(view.stream);
           })
      .def(
          "wait",
          [](const DeviceWorkObject& object, double timeout_s) {
            const py::gil_scoped_release gil;
            return object.work->wait(timeout_s);
          },
          py::arg("timeout_s"))
      .def("exception", [](const DeviceWorkObject& object) -> py::object {
        const std::exception_ptr error = object.work->error();
        if (!error) return py::none();
        set_python_error(error);
        return py::error_already_set().value();
      });
}

}  // namespace pycoll
