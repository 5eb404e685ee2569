// Patches of images as columns of a matrix, which turns a convolution into a matrix product.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pycoll {

/// One dimension of an image, and the filter's extent and stride along it.
struct PatchAxis {
  int64_t size;     // of the image
  int64_t kernel;   // elements of the filter
  int64_t stride;   // between patches
  int64_t padding;  // zeros at each end
  int64_t dilation;

  /// Number of patches; below 1: none fits.
  int64_t num_patches() const {
    const int64_t span = size + 2 * padding - dilation * (kernel - 1) - 1;
    return span < 0 ? 0 : span / stride + 1;
  }
};

/// Writes the patches of `num_planes` images of one channel, one after the other.
/// in: [planes, rows.size, columns.size]; out: [planes, rows.kernel, columns.kernel,
/// rows.num_patches(), columns.num_patches()]; elements of `element_size` bytes (1, 2, 4, 8 or 16)
/// whose zero has all bits zero. Cost: out is written once.
/// Raises UsageError for any other element size.
void im2col(const void* in, void* out, int64_t num_planes, PatchAxis rows, PatchAxis columns,
            size_t element_size);

}  // namespace pycoll
