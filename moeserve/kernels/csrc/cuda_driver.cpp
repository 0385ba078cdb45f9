#include "cuda_driver.h"

#include <dlfcn.h>

namespace moeserve {
namespace {

using Result = int;                 // CUresult, 0: success
constexpr unsigned kWaitEqual = 1;  // CU_STREAM_WAIT_VALUE_EQ

struct Driver {
  Result (*stream_wait_value)(void* stream, uint64_t address, uint32_t value, unsigned flags) = nullptr;
  Result (*device_pointer)(uint64_t* device, void* host, unsigned flags) = nullptr;
  Result (*error_name)(Result, const char**) = nullptr;
  std::string missing;

  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      missing = "no CUDA driver (libcuda.so.1)";
      return;
    }
    find(library, "cuStreamWaitValue32_v2", stream_wait_value);
    find(library, "cuMemHostGetDevicePointer_v2", device_pointer);
    find(library, "cuGetErrorName", error_name);
  }

 private:
  template <class F>
  void find(void* library, const char* name, F& function) {
    function = reinterpret_cast<F>(dlsym(library, name));
    if (function == nullptr) missing = std::string("the CUDA driver is too old: it has no ") + name;
  }
};

const Driver& driver() {
  static const Driver only;
  return only;
}

std::string describe(const char* what, Result result) {
  if (result == 0) return "";
  const char* name = nullptr;
  if (driver().error_name(result, &name) != 0 || name == nullptr) name = "an unknown error";
  return std::string(what) + ": " + name;
}

}  // namespace

std::string cuda_stream_wait_value(uintptr_t stream, uint64_t address, uint32_t value) {
  const Driver& d = driver();
  if (!d.missing.empty()) return d.missing;
  return describe("cuStreamWaitValue32",
                  d.stream_wait_value(reinterpret_cast<void*>(stream), address, value, kWaitEqual));
}

std::string cuda_device_address(void* host, uint64_t* address) {
  const Driver& d = driver();
  if (!d.missing.empty()) return d.missing;
  return describe("cuMemHostGetDevicePointer", d.device_pointer(address, host, 0));
}

}  // namespace moeserve
