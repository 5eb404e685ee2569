// The output plane of a filter element is the shifted image: a run of each row is copied, and
// positions beyond the edge are filled with zeros.
#include "bindings/operators/im2col.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/error.h"

namespace pycoll {
namespace {

struct Wide {
  uint64_t low, high;
};

/// Patches whose element lies within the image: [first, last).
struct Within {
  Within(const PatchAxis& axis, int64_t offset) {
    const int64_t before = axis.padding - offset;  // distance of the first patch before the image
    const int64_t count = axis.num_patches();
    first = std::clamp((before + axis.stride - 1) / axis.stride, int64_t{0}, count);
    if (before <= 0) first = 0;
    const int64_t room = axis.size - 1 + before;
    last = room < 0 ? first : std::clamp(room / axis.stride + 1, first, count);
  }
  int64_t first, last;
};

template <class T>
void copy_run(const T* __restrict src, T* __restrict dst, int64_t count, int64_t stride) {
  if (stride == 1) {
    std::memcpy(dst, src, static_cast<size_t>(count) * sizeof(T));
    return;
  }
  for (int64_t i = 0; i < count; ++i) dst[i] = src[i * stride];
}

template <class T>
void copy_patches(const T* __restrict in, T* __restrict out, int64_t num_planes,
                  const PatchAxis& rows, const PatchAxis& columns) {
  const int64_t num_rows = rows.num_patches();
  const int64_t num_columns = columns.num_patches();
  for (int64_t plane = 0; plane < num_planes; ++plane) {
    const T* image = in + plane * rows.size * columns.size;
    for (int64_t i = 0; i < rows.kernel; ++i) {
      const Within high(rows, i * rows.dilation);
      for (int64_t j = 0; j < columns.kernel; ++j) {
        const Within wide(columns, j * columns.dilation);
        std::fill_n(out, high.first * num_columns, T{});
        for (int64_t row = high.first; row < high.last; ++row) {
          T* to = out + row * num_columns;
          const int64_t y = row * rows.stride - rows.padding + i * rows.dilation;
          const int64_t x = wide.first * columns.stride - columns.padding + j * columns.dilation;
          std::fill_n(to, wide.first, T{});
          copy_run(image + y * columns.size + x, to + wide.first, wide.last - wide.first,
                   columns.stride);
          std::fill_n(to + wide.last, num_columns - wide.last, T{});
        }
        std::fill_n(out + high.last * num_columns, (num_rows - high.last) * num_columns, T{});
        out += num_rows * num_columns;
      }
    }
  }
}

}  // namespace

void im2col(const void* in, void* out, int64_t num_planes, PatchAxis rows, PatchAxis columns,
            size_t element_size) {
  const auto copy = [&]<class T>(T) {
    copy_patches(static_cast<const T*>(in), static_cast<T*>(out), num_planes, rows, columns);
  };
  switch (element_size) {
    case 1:
      return copy(uint8_t{});
    case 2:
      return copy(uint16_t{});
    case 4:
      return copy(uint32_t{});
    case 8:
      return copy(uint64_t{});
    case 16:
      return copy(Wide{});
    default:
      throw UsageError("im2col: expected elements of 1, 2, 4, 8 or 16 bytes, got " +
                       std::to_string(element_size));
  }
}

}  // namespace pycoll
