// Devices, current device and current stream of each host thread.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include <array>
#include <atomic>
#include <chrono>
#include <random>
#include <thread>

namespace virtual_devices {

constexpr int kMaxDevices = 16;
// As in CUDA: a pool for each of the two priorities, and more requests than this share its streams. Stream 0 is the
// default one, 1 to 32 have the ordinary priority, the others the high one.
constexpr int64_t kPoolStreams = 32;
constexpr int kPools = 2;
constexpr int kHost = -1;

std::atomic<int> g_device_count{8};
std::array<std::array<std::atomic<int64_t>, kPools>, kMaxDevices> g_next_stream{};
std::atomic<int> g_threads{0};
// Blocks and autograd's nodes have been numbered so far.
std::atomic<int64_t> g_numbered{0};
std::atomic<int> g_jitter_us{0};
std::atomic<uint64_t> g_jitter_seed{0};

thread_local int t_device = 0;
thread_local std::array<int64_t, kMaxDevices> t_streams{};
thread_local int t_thread = -1;
// Nanoseconds of virtual time that each kernel of this thread takes; -1: not said.
thread_local int64_t t_duration_ns = -1;

inline int checked(int device) {
  TORCH_CHECK(
      device >= 0 && device < g_device_count, "device must be one of 0 to ", g_device_count - 1, ", got ", device);
  return device;
}

// -1 stands for the current device.
inline int indexed(c10::Device device) {
  return device.has_index() ? checked(device.index()) : t_device;
}

inline c10::Device device_of(int index) {
  return c10::Device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(index));
}

inline c10::Stream stream_of(int device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, device_of(device), id);
}

inline int64_t current_stream(int device) {
  return t_streams[device];
}

// Host threads by the order in which they were first seen.
inline int thread_index() {
  if (t_thread < 0) {
    t_thread = g_threads++;
  }
  return t_thread;
}

// A random wait of the host before it launches something: shakes what the host's threads do in which order. In some
// runs a thread is many times slower than others throughout.
inline void jitter() {
  const int most = g_jitter_us;
  if (most <= 0) {
    return;
  }
  thread_local std::mt19937_64 numbers;
  thread_local uint64_t seed = 0;
  thread_local int slowness = 1;
  if (seed != g_jitter_seed) {
    seed = g_jitter_seed;
    numbers.seed(seed * 1000003 + thread_index());
    slowness = seed % 2 == 0 ? 1 : 1 << (numbers() % 5);
  }
  std::this_thread::sleep_for(std::chrono::microseconds(numbers() % (slowness * most + 1)));
}

} // namespace virtual_devices
