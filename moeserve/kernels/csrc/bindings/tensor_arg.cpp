#include "tensor_arg.h"

#include <nanobind/ndarray.h>

#include <stdexcept>

namespace nb = nanobind;

namespace moeserve {
namespace {

using nb::dlpack::dltensor;

// The layout of DLPackExchangeAPI. Of its functions only borrow_from_object is called: it describes a tensor without
// owning it.
struct ExchangeApi {
  uint32_t major, minor;
  const void* older;
  void *allocate, *managed_from_object, *managed_to_object;
  int (*borrow_from_object)(void* object, dltensor* out);
  void* current_stream;
};

struct Torch {
  PyTypeObject* tensor;
  const ExchangeApi* api;
};

Torch find_torch() {
  const nb::object tensor = nb::module_::import_("torch").attr("Tensor");
  const nb::object capsule = tensor.attr("__dlpack_c_exchange_api__");
  const auto* api =
      static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (api == nullptr) throw nb::python_error();
  if (api->major != 1 || api->borrow_from_object == nullptr) {
    throw std::runtime_error("this torch has another DLPack C exchange than version 1");
  }
  // Both references are kept for ever: torch is never unloaded.
  return {reinterpret_cast<PyTypeObject*>(nb::object(tensor).release().ptr()), api};
}

struct ElementType {
  const char* name;
  nb::dlpack::dtype_code code;
  int bits;
};

// In the order of Element.
constexpr ElementType kElements[] = {
    {"float32", nb::dlpack::dtype_code::Float, 32}, {"float16", nb::dlpack::dtype_code::Float, 16},
    {"int8", nb::dlpack::dtype_code::Int, 8},       {"int32", nb::dlpack::dtype_code::Int, 32},
    {"int64", nb::dlpack::dtype_code::Int, 64},     {"uint8", nb::dlpack::dtype_code::UInt, 8},
};

bool contiguous(const dltensor& t) {
  int64_t expected = 1;
  for (int d = t.ndim - 1; d >= 0; --d) {
    if (t.shape[d] != 1 && t.strides != nullptr && t.strides[d] != expected) return false;
    expected *= t.shape[d];
  }
  return true;
}

}  // namespace

void reject(const char* name, const std::string& why) {
  throw std::invalid_argument(std::string(name) + ": " + why);
}

TensorArg tensor_arg(nb::handle tensor, const char* name, Element element) {
  static const Torch torch = find_torch();
  if (!PyObject_TypeCheck(tensor.ptr(), torch.tensor)) reject(name, "a torch.Tensor wanted");
  dltensor t;
  if (torch.api->borrow_from_object(tensor.ptr(), &t) != 0) {  // fails for sparse and meta tensors
    PyErr_Clear();
    reject(name, "a dense tensor on the CPU wanted");
  }
  const bool on_cpu =
      t.device.device_type == nb::device::cpu::value || t.device.device_type == nb::device::cuda_host::value;
  if (!on_cpu) reject(name, "a dense tensor on the CPU wanted");
  const ElementType& wanted = kElements[static_cast<int>(element)];
  if (t.dtype.code != static_cast<uint8_t>(wanted.code) || t.dtype.bits != wanted.bits) {
    const nb::object dtype = tensor.attr("dtype");
    reject(name, std::string(wanted.name) + " wanted, not " + nb::str(dtype).c_str());
  }
  int64_t cols = 1;
  for (int d = 1; d < t.ndim; ++d) cols *= t.shape[d];
  const int64_t rows = t.ndim > 0 ? t.shape[0] : 1;
  if (rows * cols > 0 && !contiguous(t)) reject(name, "a contiguous tensor wanted");
  return {static_cast<char*>(t.data) + t.byte_offset, rows, cols};
}

}  // namespace moeserve
