// Selects a type's packing and product by the kind of its numbers.

template <Type T>
struct ElementOf;  // of a float type
template <>
struct ElementOf<Type::F16> : HalfElement {};
template <>
struct ElementOf<Type::BF16> : BfloatElement {};
template <>
struct ElementOf<Type::F32> : FloatElement {};

template <Type T>
void pack_panel(const uint8_t* rows, size_t stride, int valid_rows, int64_t cols, uint8_t* panel) {
  if constexpr (kQuantType<T>.is_float()) {
    pack_float<typename ElementOf<T>::Stored>(rows, stride, valid_rows, cols, panel);
  } else {
    pack_integer<T>(rows, stride, valid_rows, cols, panel);
  }
}

template <Type T>
void gemm_panel(const Panel& panel, const uint8_t* next, int64_t cols, const void* const* rows, int n,
                float* out) {
  if constexpr (kQuantType<T>.is_float()) {
    gemm_float<ElementOf<T>>(panel, next, cols, rows, n, out);
  } else if constexpr (kQuantType<T>.e4m3) {
    gemm_e4m3<T>(panel, next, cols, rows, n, out);
  } else {
    gemm_integer<T>(panel, next, cols, rows, n, out);
  }
}
