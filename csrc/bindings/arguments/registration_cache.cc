#include "bindings/arguments/registration_cache.h"

#include <pybind11/numpy.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

#include "base/environment.h"
#include "base/error.h"
#include "transport/memory/cached_array.h"

namespace pycoll {
namespace py = pybind11;

namespace {

constexpr int kRegisterAfter = 8;  // moving an array costs what about ten messages save

/// Whether NumPy got the memory from malloc, not from a custom allocator.
bool is_from_malloc(PyObject* owner) {
  for (const char* module : {"numpy._core.multiarray", "numpy.core.multiarray"}) {
    try {
      const py::object name = py::module_::import(module).attr("get_handler_name")(
          py::reinterpret_borrow<py::object>(owner));
      return py::str(name).cast<std::string>() == "default_allocator";
    } catch (py::error_already_set&) {  // the function has another name in this NumPy
    }
  }
  return false;
}

// NumPy's description of an array's allocator, and the fields of an array; a part of its ABI since
// version 1.22, which is_from_malloc() checks.
struct NumpyAllocator {
  void* context;
  void* (*malloc)(void*, size_t);
  void* (*calloc)(void*, size_t, size_t);
  void* (*realloc)(void*, void*, size_t);
  void (*free)(void*, void*, size_t);
};
struct NumpyHandler {
  char name[127];
  uint8_t version;
  NumpyAllocator allocator;
};
struct NumpyArray {
  py::detail::PyArray_Proxy fields;
  PyObject* weak_references;
  void* buffer_info;
  PyObject* handler;
};
constexpr const char* kHandlerName = "mem_handler";  // of NumPy's capsules

/// The allocator of a registered array: NumPy's own, which first ends the registration when NumPy
/// frees or resizes the array. A weak reference would not do: NumPy refuses to resize an array that
/// has one.
class FollowingAllocator {
 public:
  /// Makes `owner` use such an allocator. Returns the array that the core registers; null if the
  /// owner has no allocator.
  static std::shared_ptr<CachedArray> follow(PyObject* owner, const ArrayView& view) {
    PyObject*& place = reinterpret_cast<NumpyArray*>(owner)->handler;
    if (place == nullptr || PyCapsule_IsValid(place, kHandlerName) == 0) return nullptr;
    auto* const own =
        new FollowingAllocator(py::reinterpret_borrow<py::object>(place),
                               std::make_shared<CachedArray>(static_cast<std::byte*>(view.data),
                                                             static_cast<size_t>(view.nbytes())));
    PyObject* const capsule = PyCapsule_New(&own->handler_, kHandlerName, [](PyObject* of) {
      delete from(static_cast<NumpyHandler*>(PyCapsule_GetPointer(of, kHandlerName)));
    });
    if (capsule == nullptr) {
      PyErr_Clear();
      delete own;
      return nullptr;
    }
    Py_DECREF(std::exchange(place, capsule));
    return own->array_;
  }

 private:
  FollowingAllocator(py::object original, std::shared_ptr<CachedArray> array)
      : handler_(*static_cast<NumpyHandler*>(PyCapsule_GetPointer(original.ptr(), kHandlerName))),
        original_(std::move(original)),
        allocator_(handler_.allocator),
        array_(std::move(array)) {
    handler_.allocator = {this, malloc, calloc, realloc, free};
  }

  static FollowingAllocator* from(void* context) {
    return static_cast<FollowingAllocator*>(static_cast<NumpyHandler*>(context)->allocator.context);
  }
  static FollowingAllocator& self(void* context) {
    return *static_cast<FollowingAllocator*>(context);
  }

  static void* malloc(void* context, size_t nbytes) {
    const NumpyAllocator& own = self(context).allocator_;
    return own.malloc(own.context, nbytes);
  }
  static void* calloc(void* context, size_t count, size_t nbytes) {
    const NumpyAllocator& own = self(context).allocator_;
    return own.calloc(own.context, count, nbytes);
  }
  static void* realloc(void* context, void* data, size_t nbytes) {
    self(context).end(CachedArray::Content::kStays);
    const NumpyAllocator& own = self(context).allocator_;
    return own.realloc(own.context, data, nbytes);
  }
  static void free(void* context, void* data, size_t nbytes) {
    self(context).end(CachedArray::Content::kMayGo);
    const NumpyAllocator& own = self(context).allocator_;
    own.free(own.context, data, nbytes);
  }

  void end(CachedArray::Content content) {
    // The array's uses are counted anew from here.
    if (const std::shared_ptr<CachedArray> array = std::exchange(array_, nullptr)) {
      array->end(content);
    }
  }

  NumpyHandler handler_;  // has the name of the original
  py::object original_;   // a capsule
  NumpyAllocator allocator_;
  std::shared_ptr<CachedArray> array_;
};

}  // namespace

RegistrationCache::RegistrationCache()
    : after_(static_cast<int>(env_number("PYCOLL_REGISTER_AFTER"))) {}

RegistrationCache::Seen& RegistrationCache::find(const PyObject* owner, const ArrayView& view) {
  // Two candidate entries, so that x and out of a loop never evict each other.
  const uint64_t hash = reinterpret_cast<uintptr_t>(view.data) * 0x9e3779b97f4a7c15;
  Seen& first = seen_[(hash >> 32) % kNumSeen];
  Seen& second = seen_[((hash >> 32) ^ 1) % kNumSeen];
  for (Seen* seen : {&first, &second}) {
    if (seen->owner == owner && seen->data == view.data && seen->nbytes == view.nbytes()) {
      seen->last_use = ++now_;
      return *seen;
    }
  }
  Seen& seen = first.last_use <= second.last_use ? first : second;
  seen = {owner, view.data, view.nbytes(), 0, after_, {}, ++now_};
  return seen;
}

void RegistrationCache::count(Communicator& comm, const ArrayView& view) {
  PyObject* const owner = numpy_owner(view.numpy());
  if (owner == nullptr) return;
  Seen& seen = find(owner, view);
  ++seen.num_uses;
  if (seen.num_uses < seen.wanted) return;
  if (seen.num_uses > seen.wanted) {
    if (!seen.array.expired()) return;
    // The address now belongs to another array.
    seen.wanted = seen.num_uses > seen.wanted + after_ ? after_ : 2 * seen.wanted;
    seen.num_uses = 1;
    return;
  }
  if (comm.reaches(view.data, static_cast<size_t>(view.nbytes())) || !is_from_malloc(owner)) return;
  if (std::shared_ptr<CachedArray> array = FollowingAllocator::follow(owner, view)) {
    seen.array = array;
    const py::gil_scoped_release gil;
    comm.cache_array(std::move(array));
  }
}

}  // namespace pycoll
