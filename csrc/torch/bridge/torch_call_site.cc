#include "torch/bridge/torch_call_site.h"

#include <unistd.h>

#include <algorithm>
#include <climits>
#include <exception>

namespace pycoll::torch_backend {
namespace {

namespace py = pybind11;

class Gil {
 public:
  Gil() : state_(PyGILState_Ensure()) {}
  ~Gil() { PyGILState_Release(state_); }
  Gil(const Gil&) = delete;

 private:
  PyGILState_STATE state_;
};

/// Position of the call within its code object.
int instruction_of(PyFrameObject* frame) {
#if PY_VERSION_HEX >= 0x030b0000
  return PyFrame_GetLasti(frame);
#else
  return PyFrame_GetLineNumber(frame);
#endif
}

std::string utf8(PyObject* name) {
  Py_ssize_t size = 0;
  const char* text = name == nullptr ? nullptr : PyUnicode_AsUTF8AndSize(name, &size);
  if (text == nullptr) {
    PyErr_Clear();
    return "?";
  }
  return {text, static_cast<size_t>(size)};
}

std::string describe(std::string file, PyFrameObject* frame, PyCodeObject* code) {
  char folder[PATH_MAX];
  if (::getcwd(folder, sizeof(folder)) != nullptr) {
    const std::string prefix = std::string(folder) + "/";
    if (file.size() > prefix.size() && file.rfind(prefix, 0) == 0) file.erase(0, prefix.size());
  }
#if PY_VERSION_HEX >= 0x030b0000
  const std::string function = utf8(code->co_qualname);
#else
  const std::string function = utf8(code->co_name);
#endif
  return file + ":" + std::to_string(PyFrame_GetLineNumber(frame)) + " in " + function;
}

}  // namespace

CallSites::~CallSites() {
  if (Py_IsInitialized() == 0) return;
  const Gil gil;
  for (Entry& entry : entries_) Py_XDECREF(entry.code);
}

uint16_t CallSites::here(pycoll_comm* comm) {
  if (Py_IsInitialized() == 0 || PyGILState_GetThisThreadState() == nullptr) return 0;
  const Gil gil;
  try {
    py::object outer;                          // keeps the current frame alive
    PyFrameObject* frame = PyEval_GetFrame();  // borrowed: the frame is running this call
    while (frame != nullptr) {
      const Entry& entry = find(frame, comm);
      if (!entry.inside) return entry.number;
      frame = PyFrame_GetBack(frame);
      outer = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(frame));
    }
  } catch (const std::exception&) {
    // A missing call site must not fail the operation.
  }
  return 0;
}

const CallSites::Entry& CallSites::find(PyFrameObject* frame, pycoll_comm* comm) {
  PyCodeObject* const code = PyFrame_GetCode(frame);  // a new reference; the frame has another
  Py_DECREF(code);
  const int instruction = instruction_of(frame);
  const size_t hash = (reinterpret_cast<uintptr_t>(code) >> 4) + static_cast<size_t>(instruction);
  Entry& entry = entries_[(hash ^ hash >> 8) % kNumEntries];
  if (entry.code != code || entry.instruction != instruction) [[unlikely]] {
    fill(entry, frame, code, comm);
  }
  return entry;
}

void CallSites::fill(Entry& entry, PyFrameObject* frame, PyCodeObject* code, pycoll_comm* comm) {
  Py_INCREF(code);
  Py_XDECREF(entry.code);
  entry.code = code;
  entry.instruction = instruction_of(frame);
  const std::string file = utf8(code->co_filename);
  entry.inside = file.empty() || file[0] == '<' || is_inside(file);
  entry.number = entry.inside ? 0 : core().name_site(comm, describe(file, frame, code).c_str());
}

bool CallSites::is_inside(const std::string& file) {
  if (folders_.empty()) {
    for (const char* name : {"torch", "pycoll"}) {
      const auto path = py::module_::import(name).attr("__file__").cast<std::string>();
      folders_.push_back(path.substr(0, path.rfind('/') + 1));
    }
  }
  return std::any_of(folders_.begin(), folders_.end(),
                     [&](const std::string& folder) { return file.rfind(folder, 0) == 0; });
}

}  // namespace pycoll::torch_backend
