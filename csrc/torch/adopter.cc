#include "torch/adopter.h"

#include <ATen/Context.h>
#include <c10/core/CPUAllocator.h>

#include <cstdlib>

namespace pycoll::torch_backend {
namespace {

constexpr int kRegisterAfter = 8;  // a move costs as much as some ten messages save

/// What stands in a storage for its memory once that was adopted.
struct Adopted {
  c10::DataPtr own;  // the memory as torch's allocator gave it
  pycoll_array* array;

  static void end(void* context) {
    const std::unique_ptr<Adopted> adopted(static_cast<Adopted*>(context));
    core().end_array(adopted->array);  // before the memory is freed
  }
};

}  // namespace

int default_register_after() {
  if (const char* text = std::getenv("PYCOLL_REGISTER_AFTER")) return std::atoi(text);
  return at::globalContext().hasCUDA() ? 0 : kRegisterAfter;
}

void Adopter::count(const at::Tensor& tensor) {
  if (!tensor.device().is_cpu() || !tensor.is_contiguous()) return;
  c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  const void* const data = tensor.const_data_ptr();
  const std::lock_guard lock(mutex_);
  const auto place = reinterpret_cast<uintptr_t>(data) >> 6;
  Seen& seen = seen_[(place ^ place >> 8 ^ place >> 16) % kNumSeen];
  if (seen.address != storage || seen.data != data || seen.nbytes != tensor.nbytes()) {
    seen = {tensor.storage().getWeakStorageImpl(), storage, data, tensor.nbytes(), 0};
  }
  if (++seen.num_uses == after_) adopt(tensor);
}

void Adopter::adopt(const at::Tensor& tensor) {
  c10::StorageImpl* const storage = tensor.storage().unsafeGetStorageImpl();
  const c10::DataPtr& memory = storage->_mutable_data_ptr_no_checks();
  // Only what torch's own allocator has given, and nobody else has a hand in: no arrays of NumPy,
  // no files, nothing that is shared with other processes or copied on write.
  if (memory.get_deleter() != c10::GetDefaultCPUAllocator()->raw_deleter() ||
      memory.get() != memory.get_context()) {
    return;
  }
  pycoll_array* array = nullptr;
  pycoll_error error;
  if (core().adopt(comm_.get(), const_cast<void*>(tensor.const_data_ptr()), tensor.nbytes(), &array,
                   &error) != PYCOLL_OK) {
    return;  // a closed communicator; the operation itself says so
  }
  auto adopted = std::make_unique<Adopted>(c10::DataPtr(), array);
  Adopted* const held = adopted.get();
  // The address stays the same: whoever reads it meanwhile reads the right one.
  held->own = storage->set_data_ptr(
      c10::DataPtr(memory.get(), adopted.release(), Adopted::end, memory.device()));
}

}  // namespace pycoll::torch_backend
