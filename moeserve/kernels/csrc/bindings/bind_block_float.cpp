// moeserve.kernels._C.BlockFloatMatrix and its attention: see ops/block_float.h. The typed wrapper is
// moeserve/kernels/block_float.py.
#include <nanobind/nanobind.h>

#include <stdexcept>

#include "ops/block_float.h"
#include "tensor_arg.h"

namespace nb = nanobind;

namespace moeserve {
namespace {

const BlockFloatKernels& kernels() {
  const BlockFloatKernels* found = block_float_kernels();
  if (found == nullptr)
    throw std::runtime_error("block floating point needs AVX-512 VNNI, which this CPU lacks");
  return *found;
}

void make(BlockFloatMatrix* self, nb::handle matrix, int threads) {
  const TensorArg a = tensor_arg(matrix, "matrix", Element::kFloat32);
  const nb::gil_scoped_release release;
  new (self) BlockFloatMatrix(kernels(), static_cast<const float*>(a.data), a.rows, a.cols, threads);
}

void multiply(const BlockFloatMatrix& self, nb::handle x, nb::handle bias, nb::handle out, int threads) {
  const int64_t n = tensor_arg(x, "x", Element::kFloat32).rows;
  const float* in = rows_arg<float>(x, "x", n, self.cols());
  const float* add = optional_arg<float>(bias, "bias", self.rows());
  float* to = sized_arg<float>(out, "out", n * self.rows());
  const nb::gil_scoped_release release;
  self.multiply(in, n, add, to, threads);
}

void attend_heads(nb::handle q, nb::handle k, nb::handle v, int dim, float scale, nb::handle out,
                  int threads) {
  const TensorArg a = tensor_arg(q, "q", Element::kFloat32);
  if (dim <= 0 || dim % 2 != 0 || dim > kFloatBlock || a.cols % dim != 0) {
    reject("q", "heads of an even number of at most 128 numbers wanted");
  }
  const float* keys = sized_arg<float>(k, "k", a.size());
  const float* values = sized_arg<float>(v, "v", a.size());
  float* to = sized_arg<float>(out, "out", a.size());
  const nb::gil_scoped_release release;
  attend(kernels(), static_cast<const float*>(a.data), keys, values, a.rows, a.cols / dim, dim, scale, to,
         threads);
}

}  // namespace

void bind_block_float(nb::module_& m) {
  nb::class_<BlockFloatMatrix>(m, "BlockFloatMatrix")
      .def("__init__", &make, nb::arg("matrix"), nb::arg("threads"))
      .def_prop_ro("rows", &BlockFloatMatrix::rows)
      .def_prop_ro("cols", &BlockFloatMatrix::cols)
      .def("multiply", &multiply, nb::arg("x"), nb::arg("bias").none(), nb::arg("out"), nb::arg("threads"));
  m.def("block_float_attention", &attend_heads, nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("dim"),
        nb::arg("scale"), nb::arg("out"), nb::arg("threads"));
  m.def("has_block_float", [] { return block_float_kernels() != nullptr; });
}

}  // namespace moeserve
