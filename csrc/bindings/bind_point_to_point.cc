// send and recv for Python: plain C functions, as the collectives are (bind_collectives.cc).
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include "bindings/arguments/arguments.h"
#include "bindings/arguments/array.h"
#include "bindings/arguments/invocation.h"
#include "bindings/arguments/staged_array.h"
#include "bindings/bind.h"
#include "bindings/communicator_object.h"
#include "bindings/gil.h"
#include "bindings/message_docs.h"

namespace pycoll {
namespace py = pybind11;

namespace {

using enum Arg;

// Up to this size a call keeps the GIL until a wait turns slow.
constexpr size_t kKeepGilBytes = 32 << 10;

constexpr Signature kSend{"send", {kX, kPeer, kTag}, {kAsyncOp}};
constexpr Signature kRecv{"recv", {kX, kPeer, kTag}, {kAsyncOp}};
constexpr Signature kRecvAny{"recv_any", {kX, kTag}, {}};

/// State of Python's Work for a message.
struct MessageWork {
  std::shared_ptr<MessageOp> op;
  py::object communicator;  // makes progress on the message
};

// A call reads its numbers before it views its array: a number's `__index__` may change the array.

int32_t tag_of(const Arguments& args) {
  PyObject* const object = args[kTag];
  if (object == nullptr) return 0;
  const Py_ssize_t value = PyNumber_AsSsize_t(object, nullptr);  // clips large values
  if (PyErr_Occurred() != nullptr || value < 0 || value > INT32_MAX) {
    PyErr_Clear();
    throw UsageError("tag is " + repr_of(object) + ", expected an int in 0.." +
                     std::to_string(INT32_MAX));
  }
  return static_cast<int32_t>(value);
}

bool is_asynchronous(const Arguments& args) {
  return args[kAsyncOp] != nullptr && truth_of(args[kAsyncOp], "async_op");
}

bool is_any_source(PyObject* peer) {
  if (peer == nullptr) return true;
  return PyLong_Check(peer) != 0 && PyLong_AsLong(peer) == kAnySource &&
         PyErr_Occurred() == nullptr;
}

void set_array(CommunicatorObject& object, MessageOp& op, const ArrayView& x) {
  op.site = object.sites->here(object.comm->recorder());
  op.dtype = x.dtype;
  op.dtype_hash = static_cast<uint16_t>(x.dtype_hash ^ x.dtype_hash >> 16);
  op.data = static_cast<std::byte*>(x.data);
  op.nbytes = static_cast<size_t>(x.nbytes());
}

ArrayView view_of(const Arguments& args, const char* function, bool writable) {
  if (args[kX] == nullptr) throw UsageError(std::string(function) + " needs an array x");
  return ArrayView(args[kX], "x", writable, Memory::kHostOrDevice);
}

void run_here(CommunicatorObject& object, MessageOp& op) {
  PointToPoint& messages = object.comm->messages();
  LazyGilRelease gil(object.ranks_are_threads || op.nbytes > kKeepGilBytes);
  messages.run(op, gil.on_slow());
}

/// Prepares the receive into a device array: the array may be written from now on.
void prepare_device(MessageOp& op, const ArrayView& x, const char* function) {
  const Device device(device_table(), x.device);
  refuse_captured(device, x, function);
  op.device = x.device;
  const py::gil_scoped_release gil;
  device.synchronize(x.stream);
}

void receive_staged(CommunicatorObject& object, MessageOp& op, const ArrayView& x,
                    const char* function) {
  StagedArray staged(x, function);
  op.data = staged.data();
  run_here(object, op);
  const py::gil_scoped_release gil;
  staged.deliver();
}

/// For an operation that goes on after the call.
template <class Kept>
std::shared_ptr<void> keep(Kept&& x) {
  if constexpr (std::is_same_v<std::remove_cvref_t<Kept>, ArrayView>) {
    py::object pin = x.pin();
    return keep_alive(std::pair(std::forward<Kept>(x), std::move(pin)));
  } else {
    return keep_alive(std::forward<Kept>(x));
  }
}

/// `x` owns the message's bytes.
template <class Kept>
PyObject* start(PyObject* self, CommunicatorObject& object, const MessageOp& call, Kept&& x,
                PyObject* result) {
  auto op = std::make_shared<MessageOp>(call);
  op->keep_alive = keep(std::forward<Kept>(x));
  {
    // The thread that moves messages may hold the engine for as long as a large copy takes.
    const py::gil_scoped_release gil;
    object.comm->messages().start(op);
  }
  MessageWork work{std::move(op), py::reinterpret_borrow<py::object>(self)};
  return py::module_::import("pycoll.communicator")
      .attr("Work")(py::cast(std::move(work)), py::reinterpret_borrow<py::object>(result))
      .release()
      .ptr();
}

/// Runs the operation, starts it, or puts it into the group that is being coalesced.
template <class Kept>
PyObject* run_or_start(PyObject* self, CommunicatorObject& object, MessageOp& op, Kept&& x,
                       bool is_async, PyObject* result) {
  if (object.batch != nullptr) {
    refuse_async_in_batch(is_async);
    object.batch->add(op, keep(std::forward<Kept>(x)));
  } else if (is_async) {
    return start(self, object, op, std::forward<Kept>(x), result);
  } else {
    run_here(object, op);
  }
  return Py_NewRef(result);
}

PyObject* send(PyObject* self, PyObject* const* args, Py_ssize_t num_args, PyObject* keywords) {
  return guarded([&]() -> PyObject* {
    const Arguments arguments(kSend, args, num_args, keywords);
    CommunicatorObject& object = object_of(self);
    if (arguments[kPeer] == nullptr) throw UsageError("send needs a peer");
    MessageOp op;
    op.is_send = true;
    op.peer = rank_of(arguments[kPeer], "peer", object.comm->size());
    op.tag = tag_of(arguments);
    const bool is_async = is_asynchronous(arguments);
    ArrayView x = view_of(arguments, "send", false);
    set_array(object, op, x);
    if (x.device >= 0 && op.nbytes > DeviceMessages::kMaxMailboxBytes &&
        object.comm->messages().carries_devices()) {
      const Device device(device_table(), x.device);
      refuse_captured(device, x, "send");
      std::shared_ptr<DeviceMessages::Bytes> bytes;
      {
        const py::gil_scoped_release gil;
        bytes =
            object.comm->messages().device_messages().stage(device, op.data, op.nbytes, x.stream);
        device.synchronize(x.stream);
      }
      op.device = x.device;
      op.data = bytes->data();
      op.offer = bytes->offer();
      return run_or_start(self, object, op, std::move(bytes), is_async, Py_None);
    }
    if (x.device >= 0) {
      auto staged = std::make_shared<StagedArray>(x, "send");
      {
        const py::gil_scoped_release gil;
        staged->fetch();
      }
      op.data = staged->data();
      return run_or_start(self, object, op, std::move(staged), is_async, Py_None);
    }
    return run_or_start(self, object, op, std::move(x), is_async, Py_None);
  });
}

PyObject* recv(PyObject* self, PyObject* const* args, Py_ssize_t num_args, PyObject* keywords) {
  return guarded([&]() -> PyObject* {
    const Arguments arguments(kRecv, args, num_args, keywords);
    CommunicatorObject& object = object_of(self);
    MessageOp op;
    PyObject* peer = arguments[kPeer];
    op.peer = is_any_source(peer) ? kAnySource : rank_of(peer, "peer", object.comm->size());
    op.tag = tag_of(arguments);
    const bool is_async = is_asynchronous(arguments);
    ArrayView x = view_of(arguments, "recv", true);
    set_array(object, op, x);
    if (x.device >= 0 && object.comm->messages().carries_devices()) {
      prepare_device(op, x, "recv");
    } else if (x.device >= 0) {
      if (object.batch != nullptr || is_async) {
        throw UsageError(
            "recv into a device array, of ranks on several hosts or with PYCOLL_CHECK_DATA=1, "
            "blocks "
            "until the message has arrived: leave out async_op, and call it outside of coalesce()");
      }
      receive_staged(object, op, x, "recv");
      return Py_NewRef(arguments[kX]);
    }
    return run_or_start(self, object, op, std::move(x), is_async, arguments[kX]);
  });
}

PyObject* recv_any(PyObject* self, PyObject* const* args, Py_ssize_t num_args, PyObject* keywords) {
  return guarded([&]() -> PyObject* {
    const Arguments arguments(kRecvAny, args, num_args, keywords);
    CommunicatorObject& object = object_of(self);
    if (object.batch != nullptr) {
      throw UsageError(
          "recv_any within coalesce(): its source is known only at the end of the "
          "group; call it outside");
    }
    MessageOp op;
    op.peer = kAnySource;
    op.tag = tag_of(arguments);
    const ArrayView x = view_of(arguments, "recv_any", true);
    set_array(object, op, x);
    if (x.device >= 0 && !object.comm->messages().carries_devices()) {
      receive_staged(object, op, x, "recv_any");
    } else {
      if (x.device >= 0) prepare_device(op, x, "recv_any");
      run_here(object, op);
    }
    return PyLong_FromLong(op.source);
  });
}

PyMethodDef kMessageMethods[] = {
    {"send", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(send)),
     METH_FASTCALL | METH_KEYWORDS, kSendDoc},
    {"recv", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(recv)),
     METH_FASTCALL | METH_KEYWORDS, kRecvDoc},
    {"recv_any", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(recv_any)),
     METH_FASTCALL | METH_KEYWORDS, kRecvAnyDoc},
};

PointToPoint& messages_of(const MessageWork& work) {
  return object_of(work.communicator.ptr()).comm->opened_messages();
}

}  // namespace

void bind_point_to_point(py::module_& m, py::handle communicator_type) {
  m.attr("ANY_SOURCE") = kAnySource;
  py::class_<MessageWork>(m, "MessageWork")
      .def("done",
           [](const MessageWork& work) {
             const py::gil_scoped_release gil;
             return messages_of(work).test(*work.op);
           })
      .def(
          "wait",
          [](const MessageWork& work, double timeout_s) {
            const py::gil_scoped_release gil;
            return messages_of(work).wait(*work.op, timeout_s);
          },
          py::arg("timeout_s"))
      .def_property_readonly("finished", [](const MessageWork& work) { return work.op->is_over(); })
      .def("exception",
           [](const MessageWork& work) -> py::object {
             if (!work.op->is_over() || !work.op->error) return py::none();
             set_python_error(work.op->error);
             return py::error_already_set().value();
           })
      .def_property_readonly("source", [](const MessageWork& work) -> std::optional<int> {
        if (!work.op->is_over() || work.op->source == kAnySource) return std::nullopt;
        return work.op->source;
      });
  py::class_<CommunicatorObject> type(py::reinterpret_borrow<py::object>(communicator_type));
  type.def_property_readonly("_is_coalescing",
                             [](const CommunicatorObject& o) { return o.batch != nullptr; })
      .def_property_readonly(
          "_carries_devices",
          [](const CommunicatorObject& o) { return o.core().messages().carries_devices(); })
      .def("_begin_batch", [](CommunicatorObject& o) { o.batch = std::make_unique<Batch>(); })
      .def("_drop_batch", [](CommunicatorObject& o) { o.batch.reset(); })
      .def("_run_batch", [](CommunicatorObject& o) {
        // The group ends here, even if an operation fails.
        const std::unique_ptr<Batch> batch = std::move(o.batch);
        if (batch == nullptr) throw UsageError("there is no group of operations to run");
        const bool large = batch->nbytes() > static_cast<int64_t>(kKeepGilBytes);
        LazyGilRelease gil(o.ranks_are_threads || large);
        batch->run(o.core(), gil.on_slow());
      });
  for (PyMethodDef& method : kMessageMethods) {
    py::setattr(communicator_type, method.ml_name,
                py::reinterpret_steal<py::object>(PyDescr_NewMethod(
                    reinterpret_cast<PyTypeObject*>(communicator_type.ptr()), &method)));
  }
}

}  // namespace pycoll
