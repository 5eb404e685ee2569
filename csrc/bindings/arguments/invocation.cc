#include "bindings/arguments/invocation.h"

#include <memory>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "bindings/device_objects.h"
#include "bindings/gil.h"
#include "schedule/collectives.h"

namespace pycoll {
namespace py = pybind11;

namespace {

// Below this size a call keeps the GIL until a wait turns slow: releasing and taking the GIL costs
// as much as the message.
constexpr int64_t kKeepGilBytes = 32 << 10;

/// Adds an algorithm that the core does not know: the communicator's method _add_algorithm builds
/// it if it was registered in Python, else raises UsageError.
void know_algorithm(PyObject* self, Communicator& comm, const Call& call) {
  if (call.algorithm.empty()) return;
  const std::string_view name = call.algorithm.substr(0, call.algorithm.find('/'));
  if (comm.knows_algorithm(call.collective, name, call.root)) return;
  py::handle(self).attr("_add_algorithm")(info(call.collective).name, name, call.root);
}

/// Bytes of the payload. Only the root of a gather or scatter has arrays of all of it.
int64_t payload_bytes(const Invocation& in) {
  const CollectiveInfo& row = info(in.call.collective);
  if (!row.has_root) return in.nbytes;
  return in.call.count * static_cast<int64_t>(in.call.element_size) *
         row.blocks_per_payload(in.object.comm->size());
}

/// Counts uses of the arrays that the caller may use repeatedly; a freshly allocated result is not
/// one of them.
void note_arrays(const Invocation& in) {
  RegistrationCache* const registration_cache = in.object.registration_cache.get();
  if (registration_cache == nullptr || !registration_cache->wants(payload_bytes(in))) [[likely]]
    return;
  const Operands& operands = in.operands;
  if (operands.x) registration_cache->note(*in.object.comm, *operands.x);
  if (operands.out && in.args[Arg::kOut] != nullptr) {
    registration_cache->note(*in.object.comm, *operands.out);
  }
}

/// For an operation that goes on after the call.
std::shared_ptr<void> keep(Operands operands) {
  py::object x = operands.x ? operands.x->pin() : py::object();
  py::object out = operands.out ? operands.out->pin() : py::object();
  return keep_alive(std::tuple(std::move(operands), std::move(x), std::move(out)));
}

PyObject* start(Invocation& in) {
  auto work = in.object.comm->start(in.call, keep(std::move(in.operands)));
  py::object result = in.result ? std::move(in.result) : py::none();
  return py::module_::import("pycoll.communicator")
      .attr("Work")(py::cast(std::move(work)), std::move(result), py::handle(in.self))
      .release()
      .ptr();
}

PyObject* start_on_device(Invocation& in) {
  DeviceWorkObject object;
  object.array = in.result ? in.result : py::reinterpret_borrow<py::object>(in.args[Arg::kX]);
  {
    LazyGilRelease gil(in.object.ranks_are_threads);
    in.call.on_slow = gil.on_slow();
    object.work = in.object.comm->start_on_device(in.call, keep(std::move(in.operands)));
  }
  py::object result = in.result ? std::move(in.result) : py::none();
  return py::module_::import("pycoll.communicator")
      .attr("Work")(py::cast(std::move(object)), std::move(result), py::handle(in.self))
      .release()
      .ptr();
}

}  // namespace

void run_here(CommunicatorObject& object, Call& call, int64_t nbytes) {
  LazyGilRelease gil(object.ranks_are_threads || nbytes > kKeepGilBytes);
  call.on_slow = gil.on_slow();
  object.comm->run(call);
}

void refuse_async_in_batch(bool is_async) {
  if (!is_async) return;
  throw UsageError("async_op within coalesce(): leave it out; the group ends with the context");
}

/// Warns once of what makes the caller's device slow.
void warn_of_device(const Invocation& in) {
  const std::string text = in.object.comm->take_device_warning();
  if (!text.empty() && PyErr_WarnEx(PyExc_RuntimeWarning, text.c_str(), 1) != 0) {
    throw py::error_already_set();
  }
}

PyObject* run_or_start(Invocation& in) {
  note_arrays(in);
  know_algorithm(in.self, *in.object.comm, in.call);
  in.call.site = in.object.sites->here(in.object.comm->recorder());
  if (in.object.batch != nullptr) [[unlikely]] {
    refuse_async_in_batch(in.is_async);
    in.object.batch->add(in.call, keep(std::move(in.operands)));
    return in.result ? in.result.release().ptr() : py::none().release().ptr();
  }
  if (in.is_async) {
    if (in.call.device < 0) return start(in);
    auto work = py::reinterpret_steal<py::object>(start_on_device(in));
    warn_of_device(in);
    return work.release().ptr();
  }
  run_here(in.object, in.call, in.nbytes);
  if (in.call.device >= 0) warn_of_device(in);
  return in.result ? in.result.release().ptr() : py::none().release().ptr();
}

}  // namespace pycoll
