#include "executor/cpu/reachable_buffers.h"

#include <bit>
#include <cstring>

#include "base/error.h"

namespace pycoll {
namespace {

// Smaller arrays are mostly edges if registered (transport/memory/registered_arrays.h).
constexpr size_t kMinRegisteredBytes = 16 << 10;

}  // namespace

void ReachableBuffers::find(const Given& input, const Given& output, bool copies) {
  input_ = locate(input);
  output_ = input.data == output.data && input.nbytes == output.nbytes ? input_ : locate(output);
  is_copied_ = copies && heap_ != nullptr && !(is_mapped(input_) && is_mapped(output_)) &&
               grow_copy(input.nbytes);
  if (!is_copied_) return;
  input_.mapped = output_.mapped = copy_;
  std::memcpy(copy_, input.data, input.nbytes);
}

ReachableBuffers::Buffer ReachableBuffers::locate(const Given& given) const {
  Buffer buffer{given.data, given.data, given.nbytes};
  if (heap_ != nullptr && buffer.nbytes >= kMinRegisteredBytes) {
    buffer.array = heap_->registered().find(given.data, given.nbytes);
  }
  if (buffer.array != nullptr) {
    buffer.mapped = buffer.array->in_heap(given.data);
    buffer.array->copy_edges_in(given.data, given.nbytes);
  }
  return buffer;
}

bool ReachableBuffers::is_mapped(const Buffer& buffer) const {
  return buffer.nbytes == 0 || heap_->contains(buffer.mapped, buffer.nbytes);
}

bool ReachableBuffers::grow_copy(size_t nbytes) {
  if (copy_bytes_ >= nbytes) return true;
  if (!has_room_) return false;
  free_copy();
  try {
    copy_ = heap_->allocate(std::bit_ceil(nbytes));
    copy_bytes_ = std::bit_ceil(nbytes);
  } catch (const SystemError&) {
    has_room_ = false;  // bytes travel through slots
  }
  return has_room_;
}

void ReachableBuffers::free_copy() {
  if (copy_ != nullptr) heap_->free(copy_);
  copy_ = nullptr;
  copy_bytes_ = 0;
}

void ReachableBuffers::release() {
  free_copy();
  heap_.reset();
}

void ReachableBuffers::deliver() const {
  if (is_copied_) {
    std::memcpy(output_.data, output_.mapped, output_.nbytes);
  } else if (output_.array != nullptr) {
    output_.array->copy_edges_out(output_.data, output_.nbytes);
  }
}

void ReachableBuffers::withdraw() {
  if (heap_ == nullptr) return;
  for (const Buffer& buffer : {input_, output_}) {
    if (buffer.nbytes != 0) heap_->withdraw(is_copied_ ? buffer.mapped : buffer.data);
  }
}

}  // namespace pycoll
