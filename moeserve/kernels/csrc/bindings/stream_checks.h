// Checks of Stream's arguments beyond single tensors.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>

#include "ops/ops.h"
#include "tensor_arg.h"

namespace moeserve {

// Throws std::out_of_range unless all ids are in [0, count).
inline void check_ids(const char* what, const int32_t* ids, int n, int64_t count) {
  const auto* bad = std::find_if(ids, ids + n, [count](int32_t id) { return id < 0 || id >= count; });
  if (bad == ids + n) return;
  throw std::out_of_range(std::string(what) + " " + std::to_string(*bad) + " is not in [0, " +
                          std::to_string(count) + ")");
}

inline void check_heads(int heads, int kv_heads, int dim) {
  if (heads < 1 || kv_heads < 1 || heads % kv_heads != 0 || dim < 32 || dim % 32 != 0) {
    reject("heads", "num_kv that divides num and a dim that 32 divides wanted");
  }
}

struct Angles {
  const float *cos, *sin;    // [angles, half]
  const int32_t* positions;  // [n], the row of cos and sin for each row; nullptr: row i uses row i
};

// positions: None if cos and sin have one row for each of the n rows.
inline Angles angles_arg(nanobind::handle cos, nanobind::handle sin, nanobind::handle positions, int n,
                         int64_t half) {
  const int64_t rows = positions.is_none() ? n : tensor_arg(cos, "cos", Element::kFloat32).rows;
  const Angles angles{rows_arg<float>(cos, "cos", rows, half), rows_arg<float>(sin, "sin", rows, half),
                      positions.is_none() ? nullptr : rows_arg<int32_t>(positions, "positions", n, 1)};
  if (angles.positions != nullptr) check_ids("position", angles.positions, n, rows);
  return angles;
}

inline void check_activations(const Activations& a, const char* name, int64_t rows, int64_t cols,
                              bool integer) {
  if (a.cols != cols) {
    reject(name, std::to_string(cols) + " columns wanted, not " + std::to_string(a.cols));
  }
  if (rows < 0 || a.rows < rows) {
    reject(name, std::to_string(rows) + " rows wanted, not " + std::to_string(a.rows));
  }
  if (rows > 0 && (integer ? static_cast<const void*>(a.q8) : a.f32) == nullptr) {
    reject(name,
           integer ? "it has no int8 form, which is wanted" : "it has no float32 form, which is wanted");
  }
}

}  // namespace moeserve
