// A request to the kernel that its older headers lack.
#pragma once

namespace moeserve {

// MADV_COLLAPSE, which headers before Linux 6.1 lack (linux/mman.h): moves written pages into huge ones.
constexpr int kMadviseCollapse = 25;

}  // namespace moeserve
