// An operation as the pool's threads run it, and a record of operations that were queued.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "bytes_ahead.h"

namespace moeserve {

class Team;

struct alignas(64) Operation {
  static constexpr size_t kBytes = 384;

  unsigned char bytes[kBytes];  // the operation's struct: see Pool::submit
  void (*run)(const void*, Team&);
  BytesAhead (*reads_first)(const void*, const Team&);  // or nullptr
  uint16_t number;                                      // in Pool::operation_names
  bool is_small;
};

// Operations in the order in which they were queued. They hold the addresses of their operands, which the caller keeps
// alive and in place.
using OperationRecord = std::vector<Operation>;

}  // namespace moeserve
