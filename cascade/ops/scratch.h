// Memory for the length of one kernel call: 64-byte aligned, not cleared.
#pragma once

#include <algorithm>
#include <cstdint>
#include <new>

namespace stepwell {

template <typename T>
struct Scratch {
  explicit Scratch(int64_t count)
      : data(static_cast<T*>(::operator new(static_cast<size_t>(std::max<int64_t>(count, 1)) * sizeof(T), std::align_val_t{64}))) {}
  ~Scratch() { ::operator delete(data, std::align_val_t{64}); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  T* data;
};

}  // namespace stepwell
