// Virtual devices for PyTorch: registration, and the functions that library.py calls.
//
// One translation unit: PyTorch's headers take most of the time to compile.

#include "autocast.h"
#include "kernels.h"
#include "nodes.h"
#include "composite_operators.h"

namespace virtual_devices {

DeviceAllocator g_allocator;
PinnedAllocator g_pinned;

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &g_allocator)

const bool g_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  at::setHostAllocator(at::kPrivateUse1, &g_pinned);
  return true;
}();

} // namespace virtual_devices

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&virtual_devices::fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &virtual_devices::empty);
  m.impl("empty_strided", &virtual_devices::empty_strided);
  m.impl("_efficientzerotensor", &virtual_devices::zero_tensor);
  m.impl("resize_", &virtual_devices::resize);
  m.impl("set_", &virtual_devices::set_nothing);
  m.impl("set_.source_Tensor", &virtual_devices::set_tensor);
  m.impl("set_.source_Storage", &virtual_devices::set_storage);
  m.impl("set_.source_Storage_storage_offset", &virtual_devices::set_part);
  m.impl("_copy_from", &virtual_devices::copy_from);
  m.impl("_copy_from_and_resize", &virtual_devices::copy_from_and_resize);
  m.impl("record_stream", &virtual_devices::record_stream);
  m.impl("native_dropout", &virtual_devices::dropout);
}

// A copy materialises lazy conjugation and negation itself: without these, they would ask for a copy without end.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
  AT_FORALL_FP32(SINGLE_PRECISION)
  AT_FORALL_FP32_SET_OPT_DTYPE(SINGLE_BY_DEFAULT)
  AT_FORALL_PROMOTE(WIDEST)
}

TORCH_LIBRARY(virtual_devices, m) {
  m.def("default_generator(int device) -> Generator?", [](int64_t device) -> std::optional<at::Generator> {
    return virtual_devices::default_generator(static_cast<int>(device));
  });
}

// Plain C, called through ctypes: one library serves every Python version, and needs none of Python's headers.
extern "C" {

void vd_load(int count, int shapes_only, virtual_devices::Watch watch) {
  virtual_devices::g_device_count = count;
  virtual_devices::g_shapes_only = shapes_only != 0;
  virtual_devices::g_watch = watch;
  virtual_devices::keep_operators_whole();
  virtual_devices::watch_nodes();
}

// Of the operator that Python sees: a kernel that it launches.
void vd_say_kernel(
    const char* name, int64_t duration_ns, int64_t scratch_bytes, int64_t workspace_bytes, int launches) {
  virtual_devices::t_said.prices.push_back(
      {virtual_devices::trace().name(name), duration_ns, scratch_bytes, workspace_bytes, launches});
}

// Of the operator that Python sees: why it cannot run.
void vd_refuse(const char* reason, int unsupported) {
  virtual_devices::t_said.refusal = reason;
  virtual_devices::t_said.unsupported = unsupported != 0;
}

// Forget what operators give and cost.
void vd_forget() {
  virtual_devices::outcomes().clear();
}

int vd_device_count() {
  return virtual_devices::g_device_count;
}

void vd_trace_start() {
  virtual_devices::parameters().clear();
  virtual_devices::trace().start();
}

void vd_trace_stop() {
  virtual_devices::trace().stop();
  virtual_devices::workspaces().clear();
}

int64_t vd_trace_size() {
  return virtual_devices::trace().size();
}

const TraceRow* vd_trace_rows(int64_t* count) {
  return virtual_devices::trace().rows(count);
}

const TraceAccess* vd_trace_accesses(int64_t* count) {
  return virtual_devices::trace().accesses(count);
}

const char* vd_trace_names() {
  return virtual_devices::trace().names();
}

int64_t vd_signal() {
  return virtual_devices::trace_signal();
}

void vd_await(int64_t version) {
  virtual_devices::trace_await(version);
}

int64_t vd_backward() {
  return virtual_devices::begin_backward();
}

void vd_backward_end(int64_t version) {
  virtual_devices::end_backward(version);
}

int64_t vd_mark() {
  return virtual_devices::trace().add_version({ROW_mark});
}

// A part of a message on the current stream; returns the place of its row, or -1. `tensors`: first those that it reads.
int64_t vd_meet(const char* name, int device, const void* const* tensors, int reads, int count, int64_t bytes) {
  virtual_devices::Record row = virtual_devices::kernel_row(name, device);
  row.kind = ROW_meet;
  row.duration_ns = -1;
  row.bytes = bytes;
  for (int index = 0; index < count; ++index) {
    const at::Tensor tensor = virtual_devices::borrowed(tensors[index]);
    virtual_devices::add_access(index < reads ? row.reads : row.writes, tensor);
  }
  return virtual_devices::trace().add(row);
}

// Whether small tensors keep their values, and reading others is an error.
void vd_keep_values(int keep) {
  virtual_devices::g_values = keep != 0;
}

// Where the storage of a tensor is whose values are known; null: they are not.
const void* vd_values(const void* tensor) {
  const at::Tensor found = virtual_devices::borrowed(tensor);
  return virtual_devices::is_known(found) ? found.storage().data() : nullptr;
}

// The same for somebody who writes all of a tensor, whose values are known then; null: it is too large.
void* vd_write_values(const void* tensor) {
  const at::Tensor found = virtual_devices::borrowed(tensor);
  if (!virtual_devices::knows_after_write(found)) {
    return nullptr;
  }
  virtual_devices::know(found, true);
  return found.storage().mutable_data();
}

// Somebody has written values that nobody knows.
void vd_forget_values(const void* tensor) {
  virtual_devices::know(virtual_devices::borrowed(tensor), false);
}

void vd_parameter(const void* tensor) {
  virtual_devices::parameters().add(tensor);
}

void vd_update(int device, int64_t nanoseconds) {
  virtual_devices::trace().add({ROW_update, 0, device, virtual_devices::current_stream(device), nanoseconds});
}

int64_t vd_set_duration(int64_t nanoseconds) {
  return std::exchange(virtual_devices::t_duration_ns, nanoseconds);
}

void vd_set_jitter(uint64_t seed, int microseconds) {
  virtual_devices::g_jitter_seed = seed;
  virtual_devices::g_jitter_us = microseconds;
}

int vd_thread() {
  return virtual_devices::thread_index();
}

void vd_set_capacity(int device, int64_t bytes) {
  virtual_devices::memory().set_capacity(device, bytes);
}

int64_t vd_capacity(int device) {
  return virtual_devices::memory().capacity(device);
}

void vd_set_watcher(virtual_devices::Watcher watcher) {
  virtual_devices::g_watcher = watcher;
}

void vd_set_elapsed(virtual_devices::Elapsed elapsed) {
  virtual_devices::g_elapsed = elapsed;
}
}
