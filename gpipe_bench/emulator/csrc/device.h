// What PyTorch asks of a device type: guards, streams, events, generators, hooks.
#pragma once

#include "memory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace virtual_devices {

// Milliseconds between two versions of events, asked of the virtual clock in Python.
using Elapsed = double (*)(int64_t, int64_t);
std::atomic<Elapsed> g_elapsed{nullptr};

struct Event {
  int64_t version;
};

// The last event that the host has waited for.
inline std::atomic<int64_t> g_reached{0};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::DeviceType::PrivateUse1;

  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  c10::DeviceType type() const override {
    return static_type;
  }

  c10::Device exchangeDevice(c10::Device device) const override {
    const int before = t_device;
    setDevice(device);
    return device_of(before);
  }

  c10::Device getDevice() const override {
    return device_of(t_device);
  }

  void setDevice(c10::Device device) const override {
    t_device = indexed(device);
  }

  void uncheckedSetDevice(c10::Device device) const noexcept override {
    t_device = device.index();
  }

  c10::Stream getStream(c10::Device device) const override {
    const int index = indexed(device);
    return stream_of(index, current_stream(index));
  }

  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(indexed(device), 0);
  }

  c10::Stream getStreamFromGlobalPool(c10::Device device, bool is_high_priority) const override {
    return getNewStream(device, is_high_priority ? -1 : 0);
  }

  c10::Stream getNewStream(c10::Device device, int priority = 0) const override {
    const int index = indexed(device);
    const int pool = priority < 0 ? 1 : 0;
    return stream_of(index, 1 + pool * kPoolStreams + g_next_stream[index][pool]++ % kPoolStreams);
  }

  c10::Stream exchangeStream(c10::Stream stream) const override {
    const int device = checked(stream.device_index());
    const int64_t before = current_stream(device);
    t_streams[device] = stream.id();
    return stream_of(device, before);
  }

  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(g_device_count.load());
  }

  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Event;
    }
    static_cast<Event*>(*event)->version = trace_event(stream.device_index(), stream.id());
  }

  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      trace_wait(stream.device_index(), stream.id(), static_cast<Event*>(event)->version);
    }
  }

  // A kernel runs when it is launched, but a real device may be late: an event counts as passed only if the host has
  // waited for it or for a later one. Where nothing is computed, all events have passed: a program then drops its
  // references to memory that copies may still read, and record_stream keeps that memory in virtual time.
  bool queryEvent(void* event) const override {
    return event == nullptr || g_shapes_only || static_cast<Event*>(event)->version <= g_reached;
  }

  bool queryStream(const c10::Stream&) const override {
    return true;
  }

  void synchronizeStream(const c10::Stream& stream) const override {
    trace_sync(stream.device_index(), stream.id());
  }

  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      Record sync{ROW_sync_event};
      sync.version = static_cast<Event*>(event)->version;
      g_reached = std::max<int64_t>(g_reached, static_cast<Event*>(event)->version);
      trace().add(sync);
    }
  }

  void synchronizeDevice(c10::DeviceIndex device) const override {
    trace().add({ROW_sync_device, 0, device < 0 ? t_device : checked(device)});
  }

  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    memory().record_stream(pointer, stream);
  }

  double elapsedTime(void* begin, void* end, c10::DeviceIndex) const override {
    TORCH_CHECK(g_elapsed != nullptr, "events must be timed while a virtual clock runs, got none; start one");
    return g_elapsed.load()(static_cast<Event*>(begin)->version, static_cast<Event*>(end)->version);
  }
};

// The CPU's generator in a device's clothes: kernels are those of the CPU and accept no other.
class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(int device, at::Generator numbers)
      : GeneratorImpl(device_of(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        numbers_(std::move(numbers)) {}

  const at::Generator& numbers() const {
    return numbers_;
  }

  void set_current_seed(uint64_t seed) override {
    std::lock_guard<std::mutex> lock(numbers_.mutex());
    numbers_.set_current_seed(seed);
  }

  void set_offset(uint64_t offset) override {
    numbers_.set_offset(offset);
  }

  uint64_t get_offset() const override {
    return numbers_.get_offset();
  }

  uint64_t current_seed() const override {
    return numbers_.current_seed();
  }

  uint64_t seed() override {
    std::lock_guard<std::mutex> lock(numbers_.mutex());
    return numbers_.seed();
  }

  void set_state(const c10::TensorImpl& state) override {
    std::lock_guard<std::mutex> lock(numbers_.mutex());
    numbers_.unsafeGetGeneratorImpl()->set_state(state);
  }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    std::lock_guard<std::mutex> lock(numbers_.unsafeGetGeneratorImpl()->mutex_);
    return numbers_.unsafeGetGeneratorImpl()->get_state();
  }

 private:
  Generator* clone_impl() const override {
    return new Generator(device_.index(), numbers_.clone());
  }

  at::Generator numbers_;
};

inline const at::Generator& default_generator(int device) {
  static auto* generators = [] {
    auto* made = new std::vector<at::Generator>;
    for (int index = 0; index < kMaxDevices; ++index) {
      made->push_back(at::make_generator<Generator>(index, at::detail::createCPUGenerator()));
    }
    return made;
  }();
  return (*generators)[device < 0 ? t_device : checked(device)];
}

void resize_storage(c10::StorageImpl* storage, size_t bytes);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }

  bool isAvailable() const override {
    return g_device_count > 0;
  }

  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }

  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(g_device_count.load());
  }

  void setCurrentDevice(c10::DeviceIndex device) const override {
    t_device = checked(device);
  }

  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(t_device);
  }

  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const int before = t_device;
    t_device = checked(device);
    return static_cast<c10::DeviceIndex>(before);
  }

  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }

  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? t_device : checked(device), at::detail::createCPUGenerator());
  }

  bool isPinnedPtr(const void* data) const override {
    return memory().pinned(data);
  }

  at::Allocator* getPinnedMemoryAllocator() const override {
    return at::getHostAllocator(at::kPrivateUse1);
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), bytes);
  }
};

} // namespace virtual_devices
