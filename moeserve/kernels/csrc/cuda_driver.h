// The few functions of the CUDA driver that PyTorch does not offer, looked up at run time: the same build runs on a
// machine without a driver. Types are those of cuda.h, spelled out so that no CUDA header is needed to build.
#pragma once

#include <cstdint>
#include <string>

namespace moeserve {

// Queues on a CUstream: wait until the 32-bit word at the device address equals `value`. May be captured in a graph.
// Empty, or why it cannot be done.
std::string cuda_stream_wait_value(uintptr_t stream, uint64_t address, uint32_t value);

// Where the device sees pinned host memory. Empty, or why not.
std::string cuda_device_address(void* host, uint64_t* address);

}  // namespace moeserve
