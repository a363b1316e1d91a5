// Storages that grow.
#pragma once

#include "operators.h"

namespace virtual_devices {

void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  const int device = storage->device().index();
  c10::DataPtr grown = memory().make(device, bytes);
  const size_t kept = std::min(bytes, storage->nbytes());
  if (kept > 0) {
    if (!g_shapes_only) {
      std::memcpy(grown.get(), storage->data(), kept);
    }
    Record record = kernel_row("resize_", device);
    record.reads.push_back(whole(Memory::find(storage->data_ptr())->id));
    record.writes.push_back(whole(Memory::find(grown)->id));
    trace().add(record);
  }
  storage->set_data_ptr_noswap(std::move(grown));
  storage->set_nbytes(bytes);
}

inline void fit_storage(const at::Tensor& self) {
  const size_t needed =
      at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.itemsize(), self.storage_offset());
  if (self.numel() > 0 && needed > self.storage().nbytes()) {
    resize_storage(self.storage().unsafeGetStorageImpl(), needed);
  }
}

} // namespace virtual_devices
