// numpy arrays that Python passes, borrowed for a call through the buffer protocol.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace moeserve {

// A contiguous int32 array. Throws std::invalid_argument (ValueError) with a message that begins with `name`.
class HostInts {
 public:
  HostInts(nanobind::handle array, const char* name, int dimensions);
  ~HostInts() { PyBuffer_Release(&view_); }
  HostInts(const HostInts&) = delete;

  const int32_t* data() const { return static_cast<const int32_t*>(view_.buf); }
  int64_t size(int dimension) const { return view_.shape[dimension]; }

 private:
  Py_buffer view_{};
};

}  // namespace moeserve
