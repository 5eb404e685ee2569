#include "torch/bridge/torch_call_site.h"

#include <pybind11/pybind11.h>
#include <unistd.h>

#include <climits>
#include <string>
#include <unordered_map>
#include <vector>

namespace pycoll::torch_backend {
namespace {

namespace py = pybind11;

#if PY_VERSION_HEX >= 0x030b0000 && PY_VERSION_HEX < 0x030e0000 && !defined(Py_GIL_DISABLED)
#define PYCOLL_KNOWS_FRAMES 1

/// The first members of the interpreter's frame struct.
struct Frame {
#if PY_VERSION_HEX < 0x030c0000
  void* function;
  void* globals;
  void* builtins;
  void* locals;
  PyObject* code;
  void* object;
  Frame* previous;
  const char* instruction;
#else
  PyObject* code;  // may be another object in a frame that C code has made
  Frame* previous;
  void* function;
  void* globals;
  void* builtins;
  void* locals;
  void* object;
  const char* instruction;
#endif
};

/// Innermost frame of the calling thread; null when Python does not know the thread.
const Frame* innermost_frame() {
  const PyThreadState* state = PyGILState_GetThisThreadState();
  if (state == nullptr) return nullptr;
#if PY_VERSION_HEX < 0x030d0000
  return reinterpret_cast<const Frame*>(state->cframe->current_frame);
#else
  return reinterpret_cast<const Frame*>(state->current_frame);
#endif
}

/// Position of the frame in its code, in bytes.
int instruction_of(const Frame& frame) {
  const auto* code = reinterpret_cast<const PyCodeObject*>(frame.code);
  return static_cast<int>(frame.instruction - code->co_code_adaptive);
}
#endif

/// Whether the frames as read here equal the innermost frames that Python reports.
bool frames_are_as_known() {
#ifdef PYCOLL_KNOWS_FRAMES
  const Frame* frame = innermost_frame();
  py::object theirs = py::reinterpret_borrow<py::object>(
      reinterpret_cast<PyObject*>(PyEval_GetFrame()));  // NOLINT: null where no code runs
  for (int depth = 0; depth < 2 && theirs; ++depth) {
    auto* object = reinterpret_cast<PyFrameObject*>(theirs.ptr());
    const auto code =
        py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(object)));
    while (depth > 0 && frame != nullptr && frame->code != code.ptr()) frame = frame->previous;
    if (frame == nullptr || frame->code != code.ptr() ||
        instruction_of(*frame) != PyFrame_GetLasti(object)) {
      return false;
    }
    frame = frame->previous;
    theirs =
        py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(object)));
  }
  return true;
#else
  return false;
#endif
}

bool knows_frames = false;  // set when the module is loaded

#ifdef PYCOLL_KNOWS_FRAMES
/// Call sites of all groups of this process. Entries are never removed, so references stay valid
/// until the process ends.
class Places {
 public:
  static Places& of_this_process() {
    static Places& places = *new Places;
    return places;
  }

  /// Number of the current call site; 0 when it is not known.
  uint16_t here() {
    if (busy_.test_and_set(std::memory_order_acquire)) return 0;  // another thread's call
    uint16_t number = 0;
    for (const Frame* frame = innermost_frame(); frame != nullptr; frame = frame->previous) {
      const Entry* entry = find(*frame);
      if (entry != nullptr && entry->inside) continue;
      if (entry != nullptr) number = entry->number;
      break;
    }
    busy_.clear(std::memory_order_release);
    return number;
  }
  /// Text of a number that here() returned. Its address stays valid.
  const char* text(uint16_t number) const { return texts_[number].c_str(); }

 private:
  static constexpr size_t kNumEntries = 2048;
  static constexpr size_t kMaxSteps = 8;
  static constexpr size_t kMaxTexts = 512;

  struct Entry {
    PyObject* code = nullptr;  // owned, so that its address is not used again
    const char* instruction = nullptr;
    bool inside = false;  // code of torch or pycoll: its caller is the call site
    uint16_t number = 0;  // number of the text
  };

  Places() : entries_(kNumEntries) {
    texts_.reserve(kMaxTexts);
    texts_.emplace_back();  // the empty text of number 0
  }

  const Entry* find(const Frame& frame) {
    const auto hash = (reinterpret_cast<uintptr_t>(frame.code) >> 4) +
                      (reinterpret_cast<uintptr_t>(frame.instruction) >> 1);
    for (size_t i = 0; i < kMaxSteps; ++i) {
      Entry& entry = entries_[(hash + i) % kNumEntries];
      if (entry.code == frame.code && entry.instruction == frame.instruction) [[likely]]
        return &entry;
      if (entry.code == nullptr) return fill(entry, frame);
    }
    return nullptr;  // the table is full
  }

  const Entry* fill(Entry& entry, const Frame& frame) {
    if (Py_IsInitialized() == 0) return nullptr;
    const py::gil_scoped_acquire gil;
    try {
      return fill_with_gil(entry, frame);
    } catch (const std::exception&) {
      return nullptr;  // a missing call site must not fail the operation
    }
  }

  const Entry* fill_with_gil(Entry& entry, const Frame& frame) {
    entry.inside = true;  // default for frames without Python code
    if (PyCode_Check(frame.code)) {
      auto* code = reinterpret_cast<PyCodeObject*>(frame.code);
      const std::string file = utf8(code->co_filename);
      entry.inside = file.empty() || file[0] == '<' || is_inside(file);
      if (!entry.inside) entry.number = number_of(describe(file, code, instruction_of(frame)));
    }
    entry.instruction = frame.instruction;
    entry.code = py::reinterpret_borrow<py::object>(frame.code).release().ptr();
    return &entry;
  }

  bool is_inside(const std::string& file) {
    if (folders_.empty()) {
      for (const char* name : {"torch", "pycoll"}) {
        const auto path = py::module_::import(name).attr("__file__").cast<std::string>();
        folders_.push_back(path.substr(0, path.rfind('/') + 1));
      }
    }
    for (const std::string& folder : folders_) {
      if (file.rfind(folder, 0) == 0) return true;
    }
    return false;
  }

  uint16_t number_of(const std::string& text) {
    const auto found = numbers_.find(text);
    if (found != numbers_.end()) return found->second;
    if (texts_.size() == kMaxTexts) return 0;
    const auto number = static_cast<uint16_t>(texts_.size());
    texts_.push_back(text);
    numbers_.emplace(text, number);
    return number;
  }

  static std::string utf8(PyObject* name) {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(name, &size);
    if (text == nullptr) {
      PyErr_Clear();
      return "?";
    }
    return {text, static_cast<size_t>(size)};
  }

  static std::string describe(std::string file, PyCodeObject* code, int instruction) {
    char folder[PATH_MAX];
    if (::getcwd(folder, sizeof(folder)) != nullptr) {
      const std::string prefix = std::string(folder) + "/";
      if (file.size() > prefix.size() && file.rfind(prefix, 0) == 0) file.erase(0, prefix.size());
    }
    return file + ":" + std::to_string(PyCode_Addr2Line(code, instruction)) + " in " +
           utf8(code->co_qualname);
  }

  std::atomic_flag busy_;
  std::vector<Entry> entries_;
  std::vector<std::string> texts_;
  std::unordered_map<std::string, uint16_t> numbers_;
  std::vector<std::string> folders_;
};
#endif

}  // namespace

void check_frames() { knows_frames = frames_are_as_known(); }

uint16_t CallSites::here(pycoll_comm* comm) {
#ifdef PYCOLL_KNOWS_FRAMES
  if (!knows_frames) return 0;
  const uint16_t place = Places::of_this_process().here();
  if (place == 0) return 0;
  std::atomic<uint16_t>& number = numbers_[place];
  const uint16_t known = number.load(std::memory_order_relaxed);
  if (known != 0) [[likely]]
    return known;
  const uint16_t made = core().name_site(comm, Places::of_this_process().text(place));
  number.store(made, std::memory_order_relaxed);
  return made;
#else
  (void)comm;
  return 0;
#endif
}

}  // namespace pycoll::torch_backend
