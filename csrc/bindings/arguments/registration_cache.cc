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
constexpr int kOwnsData = 0x4;     // NPY_ARRAY_OWNDATA

/// The array that owns the memory of `array`; null when the owner is not an array.
PyObject* owner_of(PyObject* array) {
  const auto& numpy = py::detail::npy_api::get();
  while (py::detail::array_proxy(array)->base != nullptr) {
    array = py::detail::array_proxy(array)->base;
    if (!numpy.PyArray_Check_(array)) return nullptr;
  }
  return (py::detail::array_proxy(array)->flags & kOwnsData) != 0 ? array : nullptr;
}

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

/// State of the callback of a weak reference to the owner of a registered array. NumPy calls it
/// before it frees the array, and refuses to resize an array that has weak references.
struct Followed {
  std::shared_ptr<CachedArray> array;
  PyObject* reference = nullptr;  // weak; owned by this object, which the callback owns

  static Followed* of(PyObject* capsule) {
    return static_cast<Followed*>(PyCapsule_GetPointer(capsule, nullptr));
  }
};

PyObject* on_death(PyObject* capsule, PyObject*) {
  Followed* const followed = Followed::of(capsule);
  if (followed == nullptr) return nullptr;
  followed->array->end();
  Py_XDECREF(std::exchange(followed->reference, nullptr));  // finally frees `followed` too
  return Py_NewRef(Py_None);
}

PyMethodDef kOnDeath = {"pycoll_array_died", on_death, METH_O, nullptr};

/// The array that the core registers; null when the owner supports no weak reference.
std::shared_ptr<CachedArray> follow(PyObject* owner, const ArrayView& view) {
  auto* const followed = new Followed{std::make_shared<CachedArray>(
      static_cast<std::byte*>(view.data), static_cast<size_t>(view.nbytes()))};
  const auto capsule = py::reinterpret_steal<py::object>(
      PyCapsule_New(followed, nullptr, [](PyObject* of) { delete Followed::of(of); }));
  const auto callback =
      py::reinterpret_steal<py::object>(PyCFunction_New(&kOnDeath, capsule.ptr()));
  followed->reference = PyWeakref_NewRef(owner, callback.ptr());
  if (followed->reference == nullptr) {
    PyErr_Clear();
    return nullptr;
  }
  return followed->array;
}

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
  PyObject* const owner = owner_of(view.numpy());
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
  if (std::shared_ptr<CachedArray> array = follow(owner, view)) {
    seen.array = array;
    const py::gil_scoped_release gil;
    comm.cache_array(std::move(array));
  }
}

}  // namespace pycoll
