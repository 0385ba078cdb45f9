#include "host_array.h"

#include <cstring>
#include <string>

#include "tensor_arg.h"

namespace nb = nanobind;

namespace moeserve {

HostInts::HostInts(nb::handle array, const char* name, int dimensions) {
  if (PyObject_GetBuffer(array.ptr(), &view_, PyBUF_FORMAT | PyBUF_STRIDES) != 0) {
    PyErr_Clear();
    reject(name, "an array wanted");
  }
  std::string why;
  if (std::strcmp(view_.format, "i") != 0) {
    const nb::object dtype = array.attr("dtype");
    why = std::string("int32 wanted, not ") + nb::str(dtype).c_str();
  } else if (view_.ndim != dimensions) {
    why = std::string(dimensions == 1 ? "one dimension" : "two dimensions") + " wanted, not " +
          std::to_string(view_.ndim);
  } else if (PyBuffer_IsContiguous(&view_, 'C') == 0) {
    why = "a contiguous array wanted";
  }
  if (why.empty()) return;
  PyBuffer_Release(&view_);
  reject(name, why);
}

}  // namespace moeserve
