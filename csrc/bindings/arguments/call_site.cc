#include "bindings/arguments/call_site.h"

#include <unistd.h>

#include <climits>

namespace pycoll {
namespace py = pybind11;

namespace {

// Position of the call within its code object.
int instruction_of(PyFrameObject* frame) {
#if PY_VERSION_HEX >= 0x030b0000
  return PyFrame_GetLasti(frame);
#else
  return PyFrame_GetLineNumber(frame);
#endif
}

std::string text_of_name(PyObject* name) {
  Py_ssize_t size = 0;
  const char* text = name == nullptr ? nullptr : PyUnicode_AsUTF8AndSize(name, &size);
  if (text == nullptr) {
    PyErr_Clear();
    return "?";
  }
  return {text, static_cast<size_t>(size)};
}

std::string file_of(PyCodeObject* code) { return text_of_name(code->co_filename); }

}  // namespace

CallSites::CallSites() {
  const std::string file = py::module_::import("pycoll").attr("__file__").cast<std::string>();
  package_ = file.substr(0, file.rfind('/') + 1);
}

CallSites::~CallSites() {
  for (Entry& entry : entries_) Py_XDECREF(entry.code);
}

uint16_t CallSites::here(Recorder& recorder) {
  PyFrameObject* frame = PyEval_GetFrame();  // borrowed: the frame is running this call
  if (frame == nullptr) return 0;
  const Entry* entry = &find(frame, recorder);
  if (!entry->inside) [[likely]]
    return entry->id;
  py::object outer;  // keeps the current frame alive
  while (entry->inside) {
    PyFrameObject* back = PyFrame_GetBack(frame);
    if (back == nullptr) break;
    outer = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(back));
    frame = back;
    entry = &find(frame, recorder);
  }
  return entry->id;
}

const CallSites::Entry& CallSites::find(PyFrameObject* frame, Recorder& recorder) {
  PyCodeObject* code = PyFrame_GetCode(frame);  // a new reference; the frame has another
  Py_DECREF(code);
  const int instruction = instruction_of(frame);
  const size_t hash = (reinterpret_cast<uintptr_t>(code) >> 4) + static_cast<size_t>(instruction);
  Entry& entry = entries_[(hash ^ hash >> 7) % kNumEntries];
  if (entry.code != code || entry.instruction != instruction) [[unlikely]] {
    fill(entry, frame, code, recorder);
  }
  return entry;
}

void CallSites::fill(Entry& entry, PyFrameObject* frame, PyCodeObject* code,
                     Recorder& recorder) const {
  Py_INCREF(code);
  Py_XDECREF(entry.code);
  entry.code = code;
  entry.instruction = instruction_of(frame);
  entry.inside = file_of(code).rfind(package_, 0) == 0;
  entry.id = recorder.name_id(describe(frame, code));
}

std::string CallSites::describe(PyFrameObject* frame, PyCodeObject* code) const {
  std::string file = file_of(code);
  char folder[PATH_MAX];
  if (::getcwd(folder, sizeof(folder)) != nullptr) {
    const std::string prefix = std::string(folder) + "/";
    if (file.size() > prefix.size() && file.rfind(prefix, 0) == 0) file.erase(0, prefix.size());
  }
#if PY_VERSION_HEX >= 0x030b0000
  const std::string function = text_of_name(code->co_qualname);
#else
  const std::string function = text_of_name(code->co_name);
#endif
  return file + ":" + std::to_string(PyFrame_GetLineNumber(frame)) + " in " + function;
}

}  // namespace pycoll
