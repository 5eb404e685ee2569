// Communicator and Work for Python. The collectives are plain C functions with keyword arguments
// (METH_FASTCALL): at four bytes the dispatcher of pybind11 costs more than the message.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>

#include "base/error.h"
#include "bindings/array.h"
#include "bindings/bind.h"
#include "bindings/communicator_docs.h"
#include "bindings/errors.h"
#include "bindings/interrupt.h"
#include "comm/init.h"
#include "schedule/schedule.h"

namespace pycoll {
namespace py = pybind11;

namespace {

// Below this size a call keeps the GIL until a wait turns slow; giving it up and taking it back
// would cost as much as the message.
constexpr int64_t kKeepGilBytes = 32 << 10;

/// Gives the GIL up at once or when told so, and takes it back at the end.
class LazyGilRelease {
 public:
  explicit LazyGilRelease(bool at_once) {
    if (at_once) release();
  }
  ~LazyGilRelease() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }
  void release() {
    if (state_ == nullptr) state_ = PyEval_SaveThread();
  }
  OnSlow on_slow() {
    return {[](void* self) { static_cast<LazyGilRelease*>(self)->release(); }, this};
  }

 private:
  PyThreadState* state_ = nullptr;
};

/// What Python's Communicator holds.
struct CommunicatorObject {
  CommunicatorObject() = default;
  CommunicatorObject(CommunicatorObject&&) = default;
  ~CommunicatorObject() {
    if (comm == nullptr) return;
    // Closing waits for the progress thread, which takes the GIL to let go of its arrays.
    const py::gil_scoped_release gil;
    comm.reset();
  }

  std::unique_ptr<Communicator> comm;
  bool ranks_are_threads = false;
};

struct LocalWorldObject {
  std::shared_ptr<LocalWorld> world;
};

CommunicatorObject wrap(std::unique_ptr<Communicator> comm) {
  CommunicatorObject object;
  object.ranks_are_threads = comm->transport_name() == "local";
  comm->set_interrupted([] {
    const py::gil_scoped_acquire gil;
    return PyErr_CheckSignals() != 0;
  });
  object.comm = std::move(comm);
  return object;
}

Op op_from_name(std::string_view name) {
  if (const std::optional<Op> op = find_op(name)) return *op;
  std::string known;
  for (int i = 0; i < kNumOps; ++i) {
    known += (i == 0 ? "" : ", ") + std::string(op_name(static_cast<Op>(i)));
  }
  throw UsageError("unknown op '" + std::string(name) + "': expected one of " + known);
}

std::string_view text_of(PyObject* object, const char* what) {
  Py_ssize_t size = 0;
  const char* text = PyUnicode_Check(object) ? PyUnicode_AsUTF8AndSize(object, &size) : nullptr;
  if (text == nullptr) {
    PyErr_Clear();
    throw UsageError(std::string(what) + " is a " + Py_TYPE(object)->tp_name + ", expected a str");
  }
  return {text, static_cast<size_t>(size)};
}

/// Arguments of one call, in the order of `names`; missing ones are null.
template <size_t N>
std::array<PyObject*, N> parse(const char* function, const std::array<const char*, N>& names,
                               size_t num_positional, PyObject* const* args, Py_ssize_t num_args,
                               PyObject* keywords) {
  std::array<PyObject*, N> values{};
  if (static_cast<size_t>(num_args) > num_positional) {
    throw UsageError(std::string(function) + " takes at most " + std::to_string(num_positional) +
                     " positional arguments, got " + std::to_string(num_args));
  }
  std::copy_n(args, num_args, values.begin());
  const Py_ssize_t num_keywords = keywords == nullptr ? 0 : PyTuple_GET_SIZE(keywords);
  for (Py_ssize_t i = 0; i < num_keywords; ++i) {
    PyObject* keyword = PyTuple_GET_ITEM(keywords, i);
    const auto found = std::find_if(names.begin(), names.end(), [keyword](const char* name) {
      return PyUnicode_CompareWithASCIIString(keyword, name) == 0;
    });
    if (found == names.end()) {
      throw UsageError(std::string(function) + " has no argument '" +
                       std::string(text_of(keyword, "a keyword")) + "'");
    }
    PyObject*& value = values[static_cast<size_t>(found - names.begin())];
    if (value != nullptr) {
      throw UsageError(std::string(function) + " got its argument '" + *found + "' twice");
    }
    value = args[num_args + i];
  }
  for (PyObject*& value : values) {
    if (value == Py_None) value = nullptr;
  }
  if (values[0] == nullptr) throw UsageError(std::string(function) + " needs an array x");
  return values;
}

/// A step may write a part of `out` before it reads that part of `x`, unless they are the same.
void check_overlap(const ArrayView& x, const ArrayView& out) {
  if (x.data == out.data) return;
  const auto nbytes = static_cast<uintptr_t>(x.count) * dtype_size(x.dtype);
  const auto first = reinterpret_cast<uintptr_t>(x.data);
  const auto second = reinterpret_cast<uintptr_t>(out.data);
  if ((first < second ? second - first : first - second) < nbytes) {
    throw UsageError("out overlaps x in part: pass out=x or an array of its own");
  }
}

void set_array(Call& call, const ArrayView& view) {
  call.input = view.data;
  call.count = view.count;
  call.dtype = view.dtype;
  call.num_dims = view.num_dims;
  std::copy_n(view.shape, 6, call.shape);
}

/// An algorithm that the core does not know may have been registered in Python: the method
/// _add_algorithm of the communicator builds it, or raises UsageError.
void know_algorithm(PyObject* self, Communicator& comm, const Call& call) {
  if (call.algorithm.empty()) return;
  const std::string_view name = call.algorithm.substr(0, call.algorithm.find('/'));
  if (comm.knows_algorithm(call.collective, name)) return;
  py::handle(self).attr("_add_algorithm")(info(call.collective).name, name, call.root);
}

/// What an asynchronous call must keep until it is over. Freed under the GIL, on any thread.
using Views = std::pair<ArrayView, std::optional<ArrayView>>;
std::shared_ptr<void> keep_alive(Views views) {
  return {new Views(std::move(views)), [](void* kept) {
            const py::gil_scoped_acquire gil;
            delete static_cast<Views*>(kept);
          }};
}

PyObject* run_or_start(PyObject* self, CommunicatorObject& object, Call call, bool async,
                       Views& views, PyObject* result) {
  know_algorithm(self, *object.comm, call);
  if (async) {
    py::object kept_result = py::reinterpret_borrow<py::object>(result);
    auto work = object.comm->start(call, keep_alive(std::move(views)));
    return py::module_::import("pycoll.communicator")
        .attr("Work")(py::cast(work), kept_result)
        .release()
        .ptr();
  }
  const int64_t nbytes = call.count * static_cast<int64_t>(dtype_size(call.dtype));
  {
    LazyGilRelease gil(object.ranks_are_threads || nbytes > kKeepGilBytes);
    call.on_slow = gil.on_slow();
    object.comm->run(call);
  }
  Py_INCREF(result);
  return result;
}

CommunicatorObject& object_of(PyObject* self) {
  return py::handle(self).cast<CommunicatorObject&>();
}

/// Runs `body` and turns what it throws into a Python error.
template <class Body>
PyObject* guarded(Body&& body) {
  try {
    return body();
  } catch (...) {
    set_python_error(std::current_exception());
    return nullptr;
  }
}

PyObject* all_reduce(PyObject* self, PyObject* const* args, Py_ssize_t num_args,
                     PyObject* keywords) {
  return guarded([&]() -> PyObject* {
    static constexpr std::array<const char*, 5> kNames = {"x", "op", "out", "algorithm",
                                                          "async_op"};
    const auto [x, op, out, algorithm, async_op] =
        parse("all_reduce", kNames, 3, args, num_args, keywords);
    CommunicatorObject& object = object_of(self);
    Call call;
    if (op != nullptr) call.op = op_from_name(text_of(op, "op"));
    if (algorithm != nullptr) call.algorithm = text_of(algorithm, "algorithm");
    const bool async = async_op != nullptr && PyObject_IsTrue(async_op) == 1;
    Views views{ArrayView(x, "x", out == nullptr), std::nullopt};
    const ArrayView& input = views.first;
    set_array(call, input);
    call.output = input.data;
    if (out != nullptr) {
      const ArrayView& output = views.second.emplace(out, "out", true);
      if (output.count != input.count || output.dtype != input.dtype) {
        throw UsageError("out has " + std::to_string(output.count) + " elements of " +
                         std::string(dtype_name(output.dtype)) + ", x has " +
                         std::to_string(input.count) + " of " +
                         std::string(dtype_name(input.dtype)) + ": they must be alike");
      }
      check_overlap(input, output);
      call.output = output.data;
    }
    return run_or_start(self, object, call, async, views, out != nullptr ? out : x);
  });
}

PyObject* broadcast(PyObject* self, PyObject* const* args, Py_ssize_t num_args,
                    PyObject* keywords) {
  return guarded([&]() -> PyObject* {
    static constexpr std::array<const char*, 4> kNames = {"x", "root", "algorithm", "async_op"};
    const auto [x, root, algorithm, async_op] =
        parse("broadcast", kNames, 2, args, num_args, keywords);
    CommunicatorObject& object = object_of(self);
    Call call;
    call.collective = Collective::kBroadcast;
    if (root != nullptr) {
      const Py_ssize_t value = PyNumber_AsSsize_t(root, nullptr);  // clips what is too large
      if (PyErr_Occurred() != nullptr || value < 0 || value >= object.comm->size()) {
        PyErr_Clear();
        throw UsageError("root is " + py::repr(root).cast<std::string>() +
                         ", expected a rank in 0.." + std::to_string(object.comm->size() - 1));
      }
      call.root = static_cast<int>(value);
    }
    if (algorithm != nullptr) call.algorithm = text_of(algorithm, "algorithm");
    const bool async = async_op != nullptr && PyObject_IsTrue(async_op) == 1;
    Views views{ArrayView(x, "x", true), std::nullopt};
    set_array(call, views.first);
    call.output = views.first.data;
    return run_or_start(self, object, call, async, views, x);
  });
}

PyMethodDef kMethods[] = {
    {"all_reduce", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(all_reduce)),
     METH_FASTCALL | METH_KEYWORDS, kAllReduceDoc},
    {"broadcast", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(broadcast)),
     METH_FASTCALL | METH_KEYWORDS, kBroadcastDoc},
};

}  // namespace

void bind_communicator(py::module_& m) {
  py::class_<Work, std::shared_ptr<Work>>(m, "Work")
      .def("done", &Work::done)
      .def("wait", &Work::wait, py::arg("timeout_s"), py::call_guard<py::gil_scoped_release>())
      .def("exception", [](const Work& work) -> py::object {
        const std::exception_ptr error = work.error();
        if (!error) return py::none();
        set_python_error(error);
        return py::error_already_set().value();
      });

  py::class_<CommunicatorObject> type(m, "Communicator");
  // Python's subclass takes over what the functions below return.
  type.def(py::init([](CommunicatorObject& other) { return std::move(other); }))
      .def_property_readonly("rank", [](const CommunicatorObject& o) { return o.comm->rank(); })
      .def_property_readonly("size", [](const CommunicatorObject& o) { return o.comm->size(); })
      .def_property_readonly("closed", [](const CommunicatorObject& o) { return o.comm->closed(); })
      .def_property_readonly("timeout_s",
                             [](const CommunicatorObject& o) { return o.comm->timeout_s(); })
      .def_property_readonly("transport",
                             [](const CommunicatorObject& o) { return o.comm->transport_name(); })
      .def("barrier",
           [](CommunicatorObject& o) {
             const py::gil_scoped_release gil;
             o.comm->barrier();
           })
      .def("close",
           [](CommunicatorObject& o) {
             const py::gil_scoped_release gil;
             o.comm->close();
           })
      .def("_disown", [](CommunicatorObject& o) { o.comm->disown(); })
      .def("_split",
           [](CommunicatorObject& o, int color, int key) -> std::optional<CommunicatorObject> {
             std::unique_ptr<Communicator> part;
             {
               const py::gil_scoped_release gil;
               part = o.comm->split(color, key, run_signal_handlers);
             }
             if (part == nullptr) return std::nullopt;
             return wrap(std::move(part));
           })
      .def("_add_schedule",
           [](CommunicatorObject& o, const Schedule& s) {
             const py::gil_scoped_release gil;
             o.comm->add_schedule(s);
           })
      .def("_explain",
           [](CommunicatorObject& o, const std::string& collective, int64_t nbytes, int root) {
             // A running operation may hold the lock and need the GIL to look for Ctrl-C.
             const py::gil_scoped_release gil;
             return o.comm->explain(collective_from_name(collective), nbytes, root);
           })
      .def_property_readonly("ledger", [](const CommunicatorObject& o) {
        const Ledger ledger = o.comm->ledger();
        py::dict result;
        result["sent_bytes"] = ledger.sent_bytes;
        result["sent_messages"] = ledger.sent_messages;
        return result;
      });
  for (PyMethodDef& method : kMethods) {
    type.attr(method.ml_name) = py::reinterpret_steal<py::object>(
        PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(type.ptr()), &method));
  }

  py::class_<LocalWorldObject>(m, "LocalWorld");
  m.def("make_local_world",
        [](int num_ranks) { return LocalWorldObject{make_local_world(num_ranks)}; });
  m.def("init_from_environment", [](double timeout_s) {
    std::unique_ptr<Communicator> comm;
    {
      const py::gil_scoped_release gil;
      comm = init_from_environment(timeout_s, run_signal_handlers);
    }
    return wrap(std::move(comm));
  });
  m.def("init_local", [](const LocalWorldObject& object, int rank, double timeout_s) {
    return wrap(
        std::make_unique<Communicator>(make_local_transport(object.world, rank), timeout_s));
  });
}

}  // namespace pycoll
