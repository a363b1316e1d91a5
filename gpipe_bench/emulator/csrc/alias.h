// A kernel is the CPU's kernel on CPU tensors that alias the memory of device tensors.
//
// Within one call every device storage has one alias storage, so that tensors which share memory still do. What the
// kernel returns goes back the same way: an alias of an argument is that argument, a view of an alias storage is a
// view of the device storage, and new memory is adopted by the device without a copy.
#pragma once

#include "device.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/TensorFactories.h>

#include <deque>

namespace virtual_devices {

inline bool is_ours(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().is_privateuseone();
}

inline void add_access(Accesses& accesses, const at::Tensor& tensor) {
  const Block* block = tensor.defined() && tensor.has_storage() ? Memory::find(tensor.storage().data_ptr()) : nullptr;
  if (block == nullptr) {
    return;
  }
  const int64_t item = tensor.itemsize(), offset = tensor.storage_offset();
  const int64_t end = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), item, offset);
  TraceAccess* known = access_to(accesses, block->id);
  if (known == accesses.end()) {
    accesses.push_back({block->id, offset * item, end});
  } else {
    *known = {block->id, std::min(known->first, offset * item), std::max(known->end, end)};
  }
}

// A tensor on `storage` that lies in it as `like` does in its own.
inline at::Tensor shaped(const c10::Storage& storage, c10::DispatchKeySet keys, const at::Tensor& like) {
  at::Tensor made =
      keys.has(c10::DispatchKey::PrivateUse1) && keys.has_any(c10::autograd_dispatch_keyset)
      ? at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(storage), keys, like.dtype())
      : at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), keys, like.dtype());
  c10::TensorImpl* impl = made.unsafeGetTensorImpl();
  impl->set_storage_offset(like.storage_offset());
  impl->set_sizes_and_strides(like.sizes(), like.strides());
  impl->_set_conj(like.is_conj());
  impl->_set_neg(like.is_neg());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) {
    impl->set_wrapped_number(true);
  }
  return made;
}

class Aliases {
 public:
  explicit Aliases(int device) : device_(device) {}

  // The alias of a device tensor; any other tensor as it is.
  at::Tensor to_cpu(const at::Tensor& tensor) {
    if (!is_ours(tensor)) {
      return tensor;
    }
    for (const Pair& pair : tensors_) {
      if (pair.ours.is_same(tensor)) {
        return pair.cpu;
      }
    }
    TORCH_CHECK(
        tensor.layout() == c10::kStrided, "a virtual device holds strided tensors only, got layout ", tensor.layout());
    at::Tensor cpu = shaped(alias(tensor.storage()), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor);
    tensors_.push_back({tensor, cpu});
    return cpu;
  }

  // What to return for a CPU tensor that a kernel returned.
  at::Tensor to_device(const at::Tensor& cpu) {
    if (!cpu.defined() || !cpu.device().is_cpu()) {
      return cpu;
    }
    for (const Pair& pair : tensors_) {
      if (pair.cpu.is_same(cpu)) {
        return pair.ours;
      }
    }
    TORCH_CHECK(cpu.layout() == c10::kStrided, "a virtual device holds strided tensors only, got ", cpu.layout());
    return shaped(adopt(cpu.storage()), keys(cpu), cpu);
  }

  // After the kernel: arguments that it resized, or gave another storage, follow.
  void update_arguments() {
    for (size_t index = 0; index < storages_.size(); ++index) {
      StoragePair& pair = storages_[index];
      if (pair.cpu.data() != pair.data || pair.cpu.nbytes() != pair.ours.nbytes()) {
        replace(pair);
      }
    }
    for (const Pair& pair : tensors_) {
      c10::TensorImpl* ours = pair.ours.unsafeGetTensorImpl();
      const c10::Storage storage = adopt(pair.cpu.storage());
      if (storage.unsafeGetStorageImpl() != pair.ours.storage().unsafeGetStorageImpl()) {
        ours->set_storage_keep_dtype(storage);
      }
      if (ours->storage_offset() != pair.cpu.storage_offset() || pair.ours.sizes() != pair.cpu.sizes() ||
          pair.ours.strides() != pair.cpu.strides()) {
        ours->set_storage_offset(pair.cpu.storage_offset());
        ours->set_sizes_and_strides(pair.cpu.sizes(), pair.cpu.strides());
      }
    }
  }

 private:
  struct Pair {
    at::Tensor ours;
    at::Tensor cpu;
  };

  struct StoragePair {
    c10::Storage ours;
    c10::Storage cpu;
    const void* data;
  };

  c10::Storage alias(const c10::Storage& ours) {
    for (const StoragePair& pair : storages_) {
      if (pair.ours.unsafeGetStorageImpl() == ours.unsafeGetStorageImpl()) {
        return pair.cpu;
      }
    }
    auto* keep = new c10::Storage(ours);
    c10::DataPtr pointer(
        ours.mutable_data(), keep, [](void* kept) { delete static_cast<c10::Storage*>(kept); }, c10::kCPU);
    c10::Storage cpu(
        c10::Storage::use_byte_size_t(), ours.nbytes(), std::move(pointer), c10::GetCPUAllocator(), true);
    storages_.push_back({ours, cpu, cpu.data()});
    return cpu;
  }

  c10::Storage adopt(const c10::Storage& cpu) {
    for (const StoragePair& pair : storages_) {
      if (pair.cpu.unsafeGetStorageImpl() == cpu.unsafeGetStorageImpl()) {
        return pair.ours;
      }
    }
    c10::Storage ours(
        c10::Storage::use_byte_size_t(),
        cpu.nbytes(),
        memory().make(device_, cpu.nbytes(), cpu),
        c10::GetAllocator(c10::DeviceType::PrivateUse1),
        true);
    storages_.push_back({ours, cpu, cpu.data()});
    return ours;
  }

  // A view has the keys of its base: in inference mode that of a normal tensor is one.
  c10::DispatchKeySet keys(const at::Tensor& cpu) const {
    for (const Pair& pair : tensors_) {
      if (pair.cpu.is_alias_of(cpu)) {
        return pair.ours.key_set();
      }
    }
    return c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }

  // The kernel gave an alias storage new memory: the device storage takes it over.
  void replace(StoragePair& pair) {
    c10::StorageImpl* ours = pair.ours.unsafeGetStorageImpl();
    ours->set_data_ptr_noswap(memory().make(device_, pair.cpu.nbytes(), pair.cpu));
    ours->set_nbytes(pair.cpu.nbytes());
    pair.data = pair.cpu.data();
  }

  int device_;
  std::deque<Pair> tensors_;
  std::deque<StoragePair> storages_;
};

// A kernel that is written by hand: aliases in, results out, one record in the trace.
class Kernel {
 public:
  Kernel(const char* name, int device) : aliases_(device) {
    jitter();
    record_ = kernel_row(name, device);
  }

  at::Tensor read(const at::Tensor& tensor) {
    add_access(record_.reads, tensor);
    return aliases_.to_cpu(tensor);
  }

  at::Tensor write(const at::Tensor& tensor) {
    add_access(record_.writes, tensor);
    return aliases_.to_cpu(tensor);
  }

  at::Tensor result(const at::Tensor& cpu) {
    at::Tensor ours = aliases_.to_device(cpu);
    add_access(record_.writes, ours);
    return ours;
  }

  Record& record() {
    return record_;
  }

  void launch() {
    trace().add(record_);
  }

 private:
  at::AutoDispatchBelowADInplaceOrView below_;
  Aliases aliases_;
  Record record_{};
};

} // namespace virtual_devices
