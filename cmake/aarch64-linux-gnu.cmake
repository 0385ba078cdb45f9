# Cross-builds for AArch64 Linux with Debian's and Ubuntu's g++-aarch64-linux-gnu:
#   cmake -S . -B build/aarch64 -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64-linux-gnu.cmake -DMOESERVE_EXTENSION=OFF -DMOESERVE_KERNEL_BITS=ON
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
if(NOT CMAKE_CXX_COMPILER)
  set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
endif()
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)  # the interpreter that nanobind is asked with runs here
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu)
