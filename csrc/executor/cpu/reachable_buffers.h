// The input and output of a call at the addresses where other ranks access them.
#pragma once

#include <cstddef>
#include <memory>

#include "executor/cpu/buffer_exchange.h"
#include "transport/transport.h"

namespace pycoll {

class ReachableBuffers {
 public:
  explicit ReachableBuffers(Transport& transport) : heap_(transport.heap()) {}
  ReachableBuffers(const ReachableBuffers&) = delete;
  ReachableBuffers& operator=(const ReachableBuffers&) = delete;
  ~ReachableBuffers() { free_copy(); }

  /// A buffer as the caller passed it; a rank that has none passes 0 bytes.
  struct Given {
    std::byte* data;
    size_t nbytes;
  };
  /// Finds the buffers of a call. With `copies`, both have the same size, and if other ranks cannot
  /// access both where they are, one copy in the shared heap stands for both (decision 0091).
  void find(const Given& input, const Given& output, bool copies);

  std::byte* input() const { return input_.mapped; }
  std::byte* output() const { return output_.mapped; }
  BufferExchange::Buffer input_buffer() const { return {input_.mapped, input_.nbytes}; }
  BufferExchange::Buffer output_buffer() const { return {output_.mapped, output_.nbytes}; }

  /// Copies the results to the caller's output where they are elsewhere. Call it once all ranks
  /// have left the operation.
  void deliver() const;
  /// Takes both buffers away from the other ranks, which may be late.
  void withdraw();
  /// Frees the copy and lets the heap go. No operation is under way, and none follows.
  void release();

 private:
  struct Buffer {
    std::byte* data = nullptr;    // the caller's address
    std::byte* mapped = nullptr;  // the address of the same bytes in the heap; else `data`
    size_t nbytes = 0;
    const RegisteredArray* array = nullptr;  // contains the buffer; null: it is not registered
  };

  Buffer locate(const Given& given) const;
  bool is_mapped(const Buffer& buffer) const;
  /// Makes room for `nbytes` in the copy. False if the heap has none.
  bool grow_copy(size_t nbytes);
  void free_copy();

  std::shared_ptr<SharedHeap> heap_;  // null: none
  Buffer input_;
  Buffer output_;
  bool is_copied_ = false;
  bool has_room_ = true;
  std::byte* copy_ = nullptr;
  size_t copy_bytes_ = 0;
};

}  // namespace pycoll
