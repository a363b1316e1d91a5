// Operators that need a kernel of their own.
#pragma once

#include "fallback.h"

namespace virtual_devices {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

inline void check_factory(std::optional<c10::Layout> layout, std::optional<bool> pinned) {
  TORCH_CHECK(c10::layout_or_default(layout) == c10::kStrided, "a virtual device holds strided tensors only");
  TORCH_CHECK(!c10::pinned_memory_or_default(pinned), "pinned memory must be on the CPU, got a virtual device");
}

at::Tensor empty(
    c10::IntArrayRef size,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout> layout,
    std::optional<c10::Device> device,
    std::optional<bool> pinned,
    std::optional<c10::MemoryFormat> format) {
  check_factory(layout, pinned);
  const c10::DeviceGuard guard(device_of(indexed(c10::device_or_default(device))));
  auto* allocator = c10::GetAllocator(c10::DeviceType::PrivateUse1);
  return unwritten(at::detail::empty_generic(size, allocator, kKeys, c10::dtype_or_default(dtype), format));
}

at::Tensor empty_strided(
    c10::IntArrayRef size,
    c10::IntArrayRef stride,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout> layout,
    std::optional<c10::Device> device,
    std::optional<bool> pinned) {
  check_factory(layout, pinned);
  const c10::DeviceGuard guard(device_of(indexed(c10::device_or_default(device))));
  auto* allocator = c10::GetAllocator(c10::DeviceType::PrivateUse1);
  return unwritten(at::detail::empty_strided_generic(size, stride, allocator, kKeys, c10::dtype_or_default(dtype)));
}

at::Tensor zero_tensor(
    c10::IntArrayRef size,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>,
    std::optional<c10::Device> device,
    std::optional<bool>) {
  at::native::ZeroTensorAllocator allocator(device_of(indexed(c10::device_or_default(device))));
  const auto keys = kKeys | c10::DispatchKeySet(c10::DispatchKey::ZeroTensor);
  return at::detail::empty_generic(size, &allocator, keys, c10::dtype_or_default(dtype), std::nullopt);
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat> format) {
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) {
    impl->set_sizes_contiguous(size);
    fit_storage(self);
  }
  if (format.has_value() && *format != c10::MemoryFormat::Preserve) {
    impl->empty_tensor_restride(*format);
  }
  return self;
}

at::Tensor& set_part(
    at::Tensor& self, c10::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  TORCH_CHECK(source.device() == self.device(), "a tensor must keep its device, got a storage on ", source.device());
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  if (stride.data() == nullptr) {
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride);
  }
  fit_storage(self);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, c10::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_part(self, std::move(source), 0, {count}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_part(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  c10::Storage nothing(c10::Storage::use_byte_size_t(), 0, c10::GetAllocator(c10::DeviceType::PrivateUse1), true);
  return set_part(self, std::move(nothing), 0, {0}, {});
}

// As CUDA does it (CUDACachingAllocator, Copy.cu): between devices on the sender's current stream, which waits for the
// receiver's before and is waited for by it afterwards; with the host on the device's current stream, and the host
// waits unless told not to, or always when it takes the data to memory that is not pinned.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  if (target.numel() == 0) {
    return target;
  }
  const bool from_host = !is_ours(self);
  const bool to_host = !is_ours(target);
  const int device = from_host ? target.device().index() : self.device().index();
  const int peer = from_host || to_host ? kHost : target.device().index();
  if (peer == device && g_shapes_only) {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
    call_shapes(op, device, target, self, non_blocking);
    copy_values(self, target);
    return target;
  }
  const bool across = peer != kHost && peer != device;
  const bool pinned = to_host && memory().pinned(target.const_data_ptr());
  Kernel kernel("copy_", device);
  Record& record = kernel.record();
  const int64_t stream = record.stream;
  const at::Tensor source = kernel.read(self);
  at::Tensor written = kernel.write(target);
  if (!g_shapes_only) {
    written.copy_(source);
  } else if (to_host && g_values) {
    is_known(self) ? static_cast<void>(written.copy_(source)) : copy_unknown(written);
  } else if (to_host && !pinned) {
    written.zero_();
  }
  if (peer != device) {
    record.kind = ROW_copy;
    record.peer = peer;
    record.peer_stream = peer == kHost ? 0 : current_stream(peer);
    record.bytes = static_cast<int64_t>(target.nbytes());
    record.name = trace().name(from_host ? "host_to_device" : to_host ? "device_to_host" : "device_to_device");
  }
  if (across) {
    trace_barrier(peer, current_stream(peer), device, stream);
  }
  kernel.launch();
  if (across) {
    trace_barrier(device, stream, peer, current_stream(peer));
  }
  if ((from_host || to_host) && (!non_blocking || (to_host && !pinned))) {
    trace_sync(device, stream);
  }
  copy_values(self, target);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  target.resize_(self.sizes());
  return copy_from(self, target, false);
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  memory().record_stream(self.storage().data_ptr(), stream);
}

// The CPU's takes no generator.
std::tuple<at::Tensor, at::Tensor> dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  const int device = input.device().index();
  if (g_shapes_only) {
    static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::native_dropout", "");
    const Stack results = call_shapes(op, device, input, p, train);
    return {results[0].toTensor(), results[1].toTensor()};
  }
  Kernel kernel("native_dropout", device);
  const at::Tensor given = kernel.read(input);
  at::Tensor kept = at::ones_like(given, given.options().dtype(at::kBool));
  at::Tensor output = given.clone();
  if (train.value_or(true)) {
    kept.bernoulli_(1 - p, numbers_of({}, device));
    output.mul_(kept).mul_(p == 1 ? 0 : 1 / (1 - p));
  }
  std::tuple<at::Tensor, at::Tensor> results{kernel.result(output), kernel.result(kept)};
  kernel.launch();
  return results;
}

} // namespace virtual_devices
