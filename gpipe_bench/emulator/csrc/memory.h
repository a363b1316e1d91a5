// Device memory: host memory that is counted per device, with a capacity; and pinned host memory.
#pragma once

#include "trace.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>

#include <cstdlib>
#include <cstring>
#include <map>

#include <sys/mman.h>

namespace virtual_devices {

struct Block {
  int64_t id;
  int device;
  int64_t stream; // that was current on the device when the block was allocated
  size_t bytes;
  void* data;
  // What a CPU kernel made and the block adopted; else the block owns `data`.
  c10::Storage owner;
  // For a kernel that can do without.
  bool scratch = false;
  // Whether its memory holds the values that the program computed, see values.h.
  bool known = false;
};

struct Count {
  int64_t current = 0;
  int64_t peak = 0;
  int64_t blocks = 0;

  void add(int64_t bytes, int sign) {
    current += sign * bytes;
    blocks += sign;
    peak = std::max(peak, current);
  }
};

void free_block(void* block);

std::atomic<bool> g_shapes_only{false};
constexpr size_t kPage = 4096;

// Memory that reads as zeros and takes no room until it is written, where only shapes are emulated.
inline void* reserve(size_t bytes) {
  if (!g_shapes_only) {
    return std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  }
  if (bytes < kPage) {
    return std::calloc(1, bytes);
  }
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return data == MAP_FAILED ? nullptr : data;
}

inline void give_back(void* data, size_t bytes) {
  if (g_shapes_only && bytes >= kPage) {
    munmap(data, bytes);
  } else {
    std::free(data);
  }
}

class Memory {
 public:
  Memory() {
    capacity_.fill(-1);
  }

  // A data pointer for `bytes` on a device; data that somebody else made is adopted from `owner`. Scratch memory does not
  // count: a kernel does without where there is none, which the replay decides.
  c10::DataPtr make(int device, size_t bytes, c10::Storage owner = {}, bool scratch = false) {
    const c10::Device where = device == kHost ? c10::Device(c10::kCPU) : device_of(device);
    if (bytes == 0) {
      return c10::DataPtr(nullptr, where);
    }
    auto block = std::make_unique<Block>(Block{0, device, device == kHost ? 0 : current_stream(device), bytes});
    block->scratch = scratch;
    block->id = ++g_numbered;
    try {
      account(*block, +1);
    } catch (const c10::OutOfMemoryError&) {
      trace().add({ROW_full, 0, device});
      throw;
    }
    if (owner) {
      block->data = owner.mutable_data();
      block->owner = std::move(owner);
    } else {
      block->data = reserve(bytes);
      TORCH_CHECK(block->data != nullptr, "host memory must hold every virtual device, got no ", bytes, " bytes");
    }
    note(ROW_alloc, *block);
    Block* raw = block.release();
    return c10::DataPtr(raw->data, raw, &free_block, where);
  }

  void release(Block* block) {
    note(ROW_free, *block);
    account(*block, -1);
    if (!block->owner) {
      give_back(block->data, block->bytes);
    }
    delete block;
  }

  // Null for memory that is none of ours.
  static Block* find(const c10::DataPtr& pointer) {
    return pointer.get_deleter() == &free_block ? static_cast<Block*>(pointer.get_context()) : nullptr;
  }

  void record_stream(const c10::DataPtr& pointer, const c10::Stream& stream) {
    if (const Block* block = find(pointer)) {
      Record record{ROW_record_stream, 0, stream.device_index(), stream.id()};
      record.block = block->id;
      trace().add(record);
    }
  }

  bool pinned(const void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto after = pinned_.upper_bound(static_cast<const char*>(data));
    return after != pinned_.begin() && static_cast<const char*>(data) < std::prev(after)->second;
  }

  Count count(int device) {
    std::lock_guard<std::mutex> lock(mutex_);
    return counts_[device];
  }

  void reset_peak(int device) {
    std::lock_guard<std::mutex> lock(mutex_);
    counts_[device].peak = counts_[device].current;
  }

  // Negative: no limit.
  void set_capacity(int device, int64_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    capacity_[device] = bytes;
  }

  int64_t capacity(int device) {
    std::lock_guard<std::mutex> lock(mutex_);
    return capacity_[device];
  }

 private:
  void account(const Block& block, int sign) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto bytes = static_cast<int64_t>(block.bytes);
    if (block.device != kHost && !block.scratch) {
      Count& count = counts_[block.device];
      const int64_t limit = capacity_[block.device];
      TORCH_CHECK_WITH(
          OutOfMemoryError,
          sign < 0 || limit < 0 || count.current + bytes <= limit,
          "virtual device ", block.device, " out of memory: tried to allocate ", bytes, " bytes with ",
          count.current, " of ", limit, " in use");
      count.add(bytes, sign);
    }
  }

  void note(int kind, const Block& block) {
    if (block.device == kHost) {
      std::lock_guard<std::mutex> lock(mutex_);
      auto* data = static_cast<const char*>(block.data);
      if (kind == ROW_alloc) {
        pinned_[data] = data + block.bytes;
      } else {
        pinned_.erase(data);
      }
    }
    Record record{kind, 0, block.device, block.stream};
    record.bytes = static_cast<int64_t>(block.bytes);
    record.block = block.id;
    record.scratch = block.scratch;
    trace().add(record);
  }

  std::mutex mutex_;
  std::array<Count, kMaxDevices> counts_{};
  std::array<int64_t, kMaxDevices> capacity_;
  std::map<const char*, const char*> pinned_;
};

// Leaked, as blocks may be freed while the process ends.
inline Memory& memory() {
  static Memory* instance = new Memory;
  return *instance;
}

void free_block(void* block) {
  memory().release(static_cast<Block*>(block));
}

// Keeps no cache: reserved and allocated bytes are equal.
struct DeviceAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    return memory().make(t_device, bytes);
  }

  void copy_data(void* target, const void* source, size_t count) const override {
    default_copy_data(target, source, count);
  }

  bool initialized() override {
    return true;
  }

  void emptyCache(c10::MempoolId_t) override {}

  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    memory().record_stream(pointer, stream);
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const Count count = memory().count(checked(device));
    c10::CachingDeviceAllocator::DeviceStats stats;
    for (auto* bytes : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.requested_bytes}) {
      (*bytes)[0].current = count.current;
      (*bytes)[0].peak = count.peak;
    }
    stats.allocation[0].current = count.blocks;
    return stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex) override {}

  void resetPeakStats(c10::DeviceIndex device) override {
    memory().reset_peak(checked(device));
  }
};

// The caching host allocator of CUDA records the streams that copy from or to a block by itself, so that freeing one
// is always safe.
struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    return memory().make(kHost, bytes);
  }

  void copy_data(void* target, const void* source, size_t count) const override {
    default_copy_data(target, source, count);
  }

  bool record_event(void*, void*, c10::Stream) override {
    return true;
  }

  void empty_cache() override {}

  at::HostStats get_stats() override {
    return {};
  }

  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

} // namespace virtual_devices
